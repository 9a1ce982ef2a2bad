"""What tests of every part write their rows with."""


def user(text):
    return [{"role": "user", "content": text}]


def assistant(text):
    return [{"role": "assistant", "content": text}]


def silent(event):
    """A listener of ``stages.harness.execute`` that keeps nothing."""
