"""What tests of every part write their rows with."""


def user(text):
    return [{"role": "user", "content": text}]


def assistant(text):
    return [{"role": "assistant", "content": text}]


def stage_processes(home):
    """The processes of the stages that run now in a state directory, however they were started."""
    import psutil

    from storage.files import read_json

    found = [read_json(path, {}).get("child") for path in (home / "leases").glob("stage-*")]
    return [psutil.Process(child["pid"]) for child in found if child and psutil.pid_exists(child["pid"])]


def silent(event):
    """A listener of ``stages.harness.execute`` that keeps nothing."""
