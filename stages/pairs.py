"""Preference rows as items: what reward models, direct alignment and the evaluation of pairs share.

A pair is one item: its prompt is computed once for both responses. Pairs that truncation makes identical, and responses
without a trained token, never reach a loss and are counted.
"""

from __future__ import annotations

#: Entry of ``extra_json``: the columns whose answer was cut when it was sampled (``["rejected"]``), so it has no end.
CUT_ANSWERS = "cut_answers"


def ended_of(row: dict, *columns: str) -> list[bool]:
    """Whether the answer in each of ``columns`` came to its end: False where :data:`CUT_ANSWERS` names the column."""
    import json

    said = row.get("extra_json") or ""
    cut = json.loads(said).get(CUT_ANSWERS) if f'"{CUT_ANSWERS}"' in said else None
    return [column not in cut if isinstance(cut, list) else True for column in columns]


def both_orders(first, second):
    """P(A) from each order's probability of the answer shown first, numbers or arrays: (p(AB) + 1 - p(BA)) / 2
    (``synth.rlaif``, ``rm.pairwise``), exactly one half where they are equal.
    """
    return 0.5 + (first - second) / 2.0


def encode_pairs(dataset, split: str, renderer, max_length: int, limit: int | None = None):
    """Items of a ``pairs/1`` split and counts of dropped rows by reason.

    Item extras: ``label_prob`` (1 where null), ``weight``.
    """
    from stages.batching import make_item, row_weight
    from stages.chat import rendering

    items = []
    dropped = {"truncated": 0, "identical_after_truncation": 0, "no_target": 0}
    for row in dataset.iter_rows(split=split):
        if limit is not None and len(items) >= limit:
            break
        with rendering(row):
            ends = ended_of(row, "chosen", "rejected")
            prompt, chosen, chosen_mask = renderer.completion_ids(row["prompt"], row["chosen"], ends[0])
            _, rejected, rejected_mask = renderer.completion_ids(row["prompt"], row["rejected"], ends[1])
        prompt, ((chosen, chosen_mask), (rejected, rejected_mask)), was_cut = cut(
            prompt, [(chosen, chosen_mask), (rejected, rejected_mask)], max_length
        )
        dropped["truncated"] += was_cut
        if same := identical([chosen, rejected], was_cut):
            dropped[same] = dropped.get(same, 0) + 1
            continue
        chosen, chosen_mask = trim(chosen, chosen_mask)
        rejected, rejected_mask = trim(rejected, rejected_mask)
        if not sum(chosen_mask) or not sum(rejected_mask):
            dropped["no_target"] += 1
            continue
        probability = row.get("label_prob")
        items.append(
            make_item(
                row["row_id"],
                prompt,
                [chosen, rejected],
                [chosen_mask, rejected_mask],
                label_prob=1.0 if probability is None else float(probability),
                weight=row_weight(row),
            )
        )
    return items, dropped


def cut(prompt: list[int], responses: list[tuple[list[int], list[int]]], max_length: int):
    """(prompt, responses, was anything cut) within ``max_length`` tokens of prompt and longest response (``da.dpo``).

    Responses (ids, mask) are cut first, at their end, to at least half of ``max_length``; then the prompt at its
    beginning, identically for all of them.
    """
    longest = max(len(ids) for ids, _ in responses)
    if len(prompt) + longest <= max_length:
        return prompt, responses, False
    room = max(max_length // 2, max_length - len(prompt))
    responses = [(ids[:room], mask[:room]) for ids, mask in responses]
    keep = max_length - min(longest, room)
    return prompt[len(prompt) - keep :], responses, True


def identical(responses, was_cut: bool) -> str | None:
    """Why responses of which some have the same ids are dropped: the cut, or (of a pair) a template or tokenizer that
    writes both texts alike. None where they differ; longer lists may hold a text twice."""
    if len(set(map(tuple, responses))) == len(responses) or not (was_cut or len(responses) == 2):
        return None
    return "identical_after_truncation" if was_cut else "identical_after_tokenisation"


def is_tie(row: dict) -> bool:
    """Whether a pair prefers neither side (``label_prob`` 0.5): nothing for a loss of hard labels (``rm.bt``), or a
    kind of rows without soft ones.
    """
    return row.get("label_prob") == 0.5


def trim(ids, mask):
    """Drop what the template writes after the last trained token (a newline after the stop token): nothing reads it."""
    end = len(mask)
    while end and not mask[end - 1]:
        end -= 1
    return ids[:end], mask[:end]
