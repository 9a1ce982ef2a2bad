"""Budget forcing: how long a model thinks, set from outside (eval.test_time_compute; Muennighoff et al. 2025, s1).

``think_max``  a thought that is not closed within so many tokens is closed by ``</think>``, and the answer follows; 0
is no thinking at all. ``think_min``  a thought that would be closed before so many tokens goes on instead: its end is
taken away and ``Wait`` put there, ``think_waits`` times at most.

A thought begins where the answer does, or where the template has opened it, and ends at the first ``</think>``. What is
put in counts as tokens of the answer.
"""

from __future__ import annotations

from dataclasses import replace

END, WAIT = "</think>", "Wait"


def asked(config) -> bool:
    return config.think_max is not None or config.think_min > 0


def span(tokenizer, ids) -> tuple[int, int] | None:
    """(tokens before the end of the thought, tokens up to behind it); None for one that is not closed."""
    text = lambda n: tokenizer.decode(ids[:n], skip_special_tokens=False)
    whole = text(len(ids))
    at = whole.find(END)
    if at < 0:
        return None
    behind = _first(lambda n: END in text(n), len(ids))
    # the token that holds its first character is not before it
    begun = _first(lambda n: len(text(n)) > at, len(ids)) - 1
    return begun, behind


def _first(holds, most: int) -> int:
    """The least n up to ``most`` for which a property holds that stays once it holds."""
    low, high = 0, most
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle + 1, high)
    return low


def forced(config, sampler, renderer, rows, groups, params, seed_of) -> list[list]:
    """The samples ``groups`` of ``rows`` with their thoughts as long as the settings say; each has ``forced`` {"waits",
    "closed"} then.

    Args:
        seed_of: (row, sample's index, how often it was continued) -> seed.
    """
    from stages.generation import continuations

    tokenizer = renderer.tokenizer
    end_ids, wait_ids = renderer._ids(f"\n{END}\n\n"), renderer._ids(WAIT)
    samples = [sample for group in groups for sample in group]
    told = [{"waits": 0, "closed": False} for _ in samples]

    def go_on(chosen: dict[int, list[int]]) -> None:
        """Continue samples from these tokens."""
        at = [i for i, ids in chosen.items() if len(ids) < params.max_new_tokens]
        starts = [(replace(samples[i], ids=chosen[i]), len(chosen[i])) for i in at]
        seeds = [[seed_of(samples[i].prompt, samples[i].index, told[i]["waits"] + told[i]["closed"])] for i in at]
        for i, (made,) in zip(at, continuations(sampler, starts, params, seeds) if at else []):
            samples[i] = replace(made, index=samples[i].index, logps=None)

    for _ in range(config.think_waits if config.think_min else 0):
        chosen = {}
        for i, sample in enumerate(samples):
            found = span(tokenizer, sample.ids) if sample.error is None else None
            if found is not None and found[0] < config.think_min and found[0] + len(wait_ids) < params.max_new_tokens:
                told[i]["waits"] += 1
                chosen[i] = list(sample.ids[: found[0]]) + wait_ids
        go_on(chosen)
    if config.think_max is not None:
        chosen = {}
        for i, sample in enumerate(samples):
            found = span(tokenizer, sample.ids) if sample.error is None else None
            if (
                sample.error is None
                and (found is None or found[0] > config.think_max)
                and config.think_max + len(end_ids) < params.max_new_tokens
            ):
                thought = [t for t in sample.ids[: config.think_max] if t not in params.stop_ids]
                told[i]["closed"] = True
                chosen[i] = thought + end_ids
        go_on(chosen)
    made = iter(zip(samples, told))
    out = []
    for group in groups:
        out.append([])
        for _ in group:
            sample, one = next(made)
            sample.forced = one
            out[-1].append(sample)
    return out
