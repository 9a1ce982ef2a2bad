"""Rows of every labelled kind as training items of a reward model.

One item is what the loss needs together: a pair, a ranking, a solution. ``extra["counts"]`` holds what the item adds to
each denominator of the optimizer step, so an objective only sums. Rows that carry no signal for their objective (one
response, all tied, identical after the cut) never become items and are counted by reason.
"""

from __future__ import annotations

from collections import Counter, defaultdict

import numpy as np

from stages.batching import Item, make_item, row_weight
from stages.chat import rendering
from stages.pairs import cut, ended_of, identical, is_tie
from stages.running.parallel import items_of

CONTEXT = "[CONTEXT]\n{context}"
COMPARE = CONTEXT + "\n\n[RESPONSE A]\n{a}\n\n[RESPONSE B]\n{b}\n\n[PREFERRED RESPONSE]"
JUDGE_ONE = CONTEXT + "\n\n[RESPONSE]\n{a}\n\n[QUALITY]"
#: What label models read of one response, and of two: sections as RSO writes them, or a line as SLiC-HF does
#: (data.t2t).
LABEL_REQUESTS = {
    "sections": (JUDGE_ONE, COMPARE),
    "slic": ("[Context] {context} [Summary] {a}", "[Context] {context} [Summary A] {a} [Summary B] {b}"),
}
NO_FACTS = "none"
#: What a control word looks like in front of an answer, and the words (good, bad) (rm.pmp).
CONTROL, CONTROL_WORDS = "{word}:", ("GOOD", "BAD")


class Drop(Exception):
    """A row without signal; the text is the reason's name."""


def encode(
    objective, dataset, split: str, reader, config, dropped: Counter | None = None, limit: int | None = None
) -> list[Item]:
    """Items of one split, in row order; reasons of dropped rows are counted into ``dropped``."""
    from stages.algorithms import resolve

    make = resolve(objective.encode)

    def of(rows):
        items, lost = [], Counter()
        for row in rows:
            try:
                items.extend(make(transition(row), reader, config, lost))
            except Drop as reason:
                lost[str(reason)] += 1
        return items, lost

    items, lost = items_of(dataset.iter_rows(split=split), of, expected=dataset.rows_of(split), limit=limit)
    if dropped is not None:
        dropped.update(lost)
    return items


def transition(row: dict) -> dict:
    """A step of ``trajectories/1`` as a rated answer: the observation is the prompt, the action and what came of it the
    answer, the reward the score (``rm.agentic``: r(o_t, a_t, o_t+1)). Rows of other kinds as they are."""
    import json

    if "next_observation_json" not in row:
        return row

    def text(name):
        value = json.loads(row[name])
        return value if isinstance(value, str) else json.dumps(value, sort_keys=True, ensure_ascii=False)

    answer = f"[ACTION]\n{text('action_json')}\n\n[NEXT OBSERVATION]\n{text('next_observation_json')}"
    question = f"[OBSERVATION]\n{text('observation_json')}"
    return {
        **row,
        "prompt": [{"role": "user", "content": question}],
        "completion": [{"role": "assistant", "content": answer}],
        "score": row["reward"],
    }


def with_facts(row: dict, prompt: list[dict], facts: bool) -> list[dict]:
    """The prompt as the reward model sees it: with ``facts``, they follow the last message, or an explicit "none"
    (``rm.factual``).
    """
    import json

    if not facts:
        return prompt
    found = row.get("facts")
    if found is None and row.get("extra_json"):
        found = json.loads(row["extra_json"]).get("facts")
    found = [found] if isinstance(found, str) else list(found or [])
    text = "\n".join(f"- {fact}" for fact in found) if found else NO_FACTS
    last = dict(prompt[-1]) if prompt else {"role": "user", "content": ""}
    return [*prompt[:-1], {**last, "content": f"{last.get('content') or ''}\n\n[FACTS]\n{text}"}]


def build(
    reader,
    row: dict,
    prompt,
    completions,
    dropped: Counter,
    *,
    counts: dict,
    distinct: bool = False,
    words: list[str] | None = None,
    ends: list[bool] | tuple[()] = (),
    **extra,
) -> Item:
    """Item of one prompt with its responses, cut to the reader's room; ``ends``: whether each response came to its end
    when it was sampled (without them all did).

    words: a text in front of each response, which the template does not see (:data:`CONTROL`).

    Raises:
        Drop: a response without a scored token, or (``distinct``) responses that the template or the cut made equal;
            rankings may repeat a text.
    """
    with rendering(row):
        ids, responses = reader.parts(prompt, completions, ends)
    if words:
        before = [reader.plain(CONTROL.format(word=word)) for word in words]
        responses = [([*word, *r], [0] * len(word) + list(m)) for word, (r, m) in zip(before, responses, strict=True)]
    if any(not sum(mask) for _, mask in responses):
        raise Drop("no_target")
    ids, responses, was_cut = cut(ids, responses, reader.room)
    if distinct and (same := identical([r for r, _ in responses], was_cut)):
        raise Drop(same)
    if was_cut:
        dropped["truncated"] += 1
        if any(not sum(mask) for _, mask in responses):
            raise Drop("no_target")
    wrapped = [reader.wrap(ids, r, m) for r, m in responses]
    return make_item(
        row["row_id"],
        wrapped[0][0],
        [r for _, r, _, _ in wrapped],
        [m for _, _, m, _ in wrapped],
        counts=counts,
        first=tuple(n for *_, n in wrapped),
        lengths=tuple(len(r) for r, _ in responses),
        ended=tuple(reader.ended(r) for r, _ in responses),
        **_labels(row),
        **extra,
    )


def _labels(row: dict) -> dict:
    return {
        "weight": row_weight(row),
        "prompt_id": row.get("prompt_id") or row["row_id"],
        "source": row.get("source"),
        "strength": row.get("strength"),
    }


# -- rankings of two and more ------------------------------------------------------------------------------------------


def pair_items(row, reader, config, dropped) -> list[Item]:
    """One item per pair: chosen first. Extras ``margin`` (0 where null), ``label_prob`` (1 where null)."""
    if is_tie(row) and not config.use_soft_labels:
        raise Drop("tie")
    if config.use_margin and (row.get("margin") or 0.0) < 0:
        raise Drop("negative_margin")
    probability, weight = row.get("label_prob"), row_weight(row)
    item = build(
        reader,
        row,
        with_facts(row, row["prompt"], config.facts),
        [row["chosen"], row["rejected"]],
        dropped,
        distinct=True,
        ends=ended_of(row, "chosen", "rejected"),
        counts={"weight": weight, "pairs": 1.0},
        margin=float(row.get("margin") or 0.0),
        label_prob=1.0 if probability is None else float(probability),
        difficulty=pair_difficulty(row, config.curriculum),
        stage_index=row.get("stage_index"),
    )
    item.extra["counts"]["chosen_tokens"] = float(item.masks[0].sum()) * weight
    return [item]


def pair_difficulty(row: dict, by: str) -> float:
    """How hard a pair is, larger = harder (``rm.curriculum``): a small margin, rank gap, score gap or judge confidence
    is hard.
    """
    if by == "none":
        return 0.0
    if by == "stage_index":
        value = row.get("stage_index")
        return 0.0 if value is None else float(value)
    if by == "score_gap":
        a, b = row.get("chosen_score"), row.get("rejected_score")
        value = None if a is None or b is None else abs(a - b)
    elif by == "confidence":
        value = None if row.get("label_prob") is None else abs(row["label_prob"] - 0.5)
    else:
        value = row.get(by)
    if value is None:
        raise ValueError(
            f"curriculum={by} needs that column in every pair, and row {row['row_id']} has none; set curriculum=none,"
            " or ingest with margin_mode=score_diff (margin), pair_mode=rank_gap (rank_gap) or judgements with"
            " probabilities (confidence)."
        )
    return -float(value)


def ranking_items(row, reader, config, dropped) -> list[Item]:
    """One item per prompt, responses best first; ``pairs`` are the index pairs that the ranks decide (ties are dropped,
    and below ``top_ranks`` nothing is decided).

    Raises:
        Drop: fewer than two responses, or all tied.
        ValueError: ties under ``tie_policy=error`` (Plackett-Luce cannot represent them).
    """
    ranks = list(row["ranks"])
    order = sorted(range(len(ranks)), key=lambda i: (ranks[i], i))
    if len(order) < 2:
        raise Drop("single_response")
    ranks = [ranks[i] for i in order]
    completions = [row["completions"][i] for i in order]
    # the order below the top is not known, so neither are ties there
    listwise, top = config.objective == "plackett_luce", config.top_ranks or len(ranks)
    winners = ranks[:top] if listwise else ranks
    if listwise and any(a == b for a, b in zip(ranks[:top], ranks[1:])):
        if config.tie_policy == "error":
            raise ValueError(
                f"Row {row['row_id']} ranks responses equally, which Plackett-Luce cannot represent. Set"
                " tie_policy=drop_item (keep the first of equals) or use_pairs, or objective=kwise_pairs."
            )
        if config.tie_policy == "drop_item":
            keep = []
            for i, rank in enumerate(ranks):
                if len(keep) > top or not keep or rank != ranks[keep[-1]]:
                    keep.append(i)
            ranks, completions = [ranks[i] for i in keep], [completions[i] for i in keep]
            winners = ranks[:top]
        else:
            listwise, winners = False, [rank for rank in ranks if rank <= ranks[min(top, len(ranks)) - 1]]
    pairs = [(i, j) for i in range(len(winners)) for j in range(i + 1, len(ranks)) if ranks[i] < ranks[j]]
    if not pairs:
        raise Drop("all_tied" if len(ranks) > 1 else "single_response")
    weight, per_prompt = row_weight(row), config.objective == "plackett_luce" or config.pair_weighting == "per_prompt"
    return [
        build(
            reader,
            row,
            with_facts(row, row["prompt"], config.facts),
            completions,
            dropped,
            distinct=True,
            counts={
                "weight": weight if per_prompt else weight * len(pairs),
                "prompts": 1.0,
                "pairs": float(len(pairs)),
            },
            pairs=pairs,
            ranks=ranks,
            listwise=listwise,
            pair_weight=weight / len(pairs) if per_prompt else weight,
            difficulty=0.0,
        )
    ]


# -- single responses --------------------------------------------------------------------------------------------------


def labelled_items(row, reader, config, dropped) -> list[Item]:
    """One item per completion with a target: the label (0 or 1) of ``unpaired/1``, the score of ``ratings/1``."""
    target = float(row["label"]) if row.get("label") is not None else float(row["score"])
    weight = row_weight(row)
    item = build(
        reader,
        row,
        with_facts(row, row["prompt"], config.facts),
        [row["completion"]],
        dropped,
        ends=ended_of(row, "completion"),
        counts={"weight": weight, "rows": 1.0},
        target=target,
        difficulty=0.0,
    )
    item.extra["counts"] |= {"tokens": float(item.n_targets) * weight, "chosen_tokens": float(item.n_targets) * weight}
    return [item]


def control_items(row, reader, config, dropped) -> list[Item]:
    """One item per pair A > B, with the responses GOOD:A, BAD:A, BAD:B, GOOD:B, or per labelled answer, with the first
    two of them if it is good and the last two if not: the right word first (``rm.pmp``). The words are
    ``label_words``.
    """
    if is_tie(row):
        raise Drop("tie")
    good, bad = config.label_words or CONTROL_WORDS
    answers = [("completion", row["label"])] if "completion" in row else [("chosen", True), ("rejected", False)]
    twice = [name for name, _ in answers for _ in range(2)]
    item = build(
        reader,
        row,
        with_facts(row, row["prompt"], config.facts),
        [row[name] for name in twice],
        dropped,
        distinct=True,
        ends=ended_of(row, *twice),
        words=[word for _, label in answers for word in ((good, bad) if label else (bad, good))],
        counts={"weight": row_weight(row) * len(answers), "pairs": float(len(answers))},
        difficulty=0.0,
    )
    if len({r.tobytes() for r in item.responses}) < len(item.responses):
        raise Drop("identical_after_tokenisation")
    return [item]


def balanced(items: list[Item], dropped: Counter) -> list[Item]:
    """Equally many right and wrong completions of every prompt, the first ones that count (weight above 0); prompts
    with one kind only are left out (``rm.orm``).
    """
    keep = {i for both in right_and_wrong(items) for i in both}
    dropped["unbalanced"] += len(items) - len(keep)
    return [item for index, item in enumerate(items) if index in keep]


def right_and_wrong(items: list[Item]) -> list[tuple[int, int]]:
    """Positions of a right and a wrong completion of one prompt that both count, each position once."""
    groups: dict[str, dict[bool, list[int]]] = defaultdict(lambda: {True: [], False: []})
    for index, item in enumerate(items):
        if item.extra["weight"]:
            groups[item.extra["prompt_id"]][item.extra["target"] > 0.5].append(index)
    return [both for sides in groups.values() for both in zip(sides[True], sides[False])]


def attribute_scores(row: dict, attributes: list[str]) -> list[float]:
    """A rated answer's score by each attribute, NaN where it has none; ``overall`` is the score itself."""
    given = {a["aspect"]: float(a["score"]) for a in row.get("aspects") or []} | {"overall": float(row["score"])}
    return [given.get(name, np.nan) for name in attributes]


def check_attributes(attributes: list[str], dataset, split: str) -> None:
    """Refuse attributes that no row of the split has: their mean would be that of nothing, and every score with it.

    Raises:
        ConfigError: names them and the aspects there are.
    """
    from stages.spec import ConfigError

    there = {"overall"}
    if attributes and dataset.kind == "ratings/1":
        there |= {
            a["aspect"] for row in dataset.iter_rows(columns=["aspects"], split=split) for a in row["aspects"] or ()
        }
    if lost := [name for name in attributes if name not in there]:
        raise ConfigError(
            f"attributes={lost}: no row of split {split} is rated by {'it' if len(lost) == 1 else 'them'}; the aspects"
            f" of the data are {', '.join(sorted(there))} (overall: the score), so write some of these, or leave"
            " attributes out"
        )


def rating_items(row, reader, config, dropped) -> list[Item]:
    """One item per rated completion; ``targets`` and ``present`` per attribute (the overall score without
    ``attributes``).
    """
    values = [float(row["score"])]
    if config.attributes:
        values = attribute_scores(row, config.attributes)
        if np.isnan(values).all():
            raise Drop("no_attribute")
    weight = row_weight(row)
    annotator = (row.get("ann") or {}).get("annotator_id")
    return [
        build(
            reader,
            row,
            with_facts(row, row["prompt"], config.facts),
            [row["completion"]],
            dropped,
            counts={"weight": weight, "rows": 1.0},
            targets=values,
            raw=values[0] if len(values) == 1 else float(row["score"]),
            annotator=annotator,
            difficulty=0.0,
        )
    ]


def annotator_shifts(items: list[Item]) -> dict[str, np.ndarray]:
    """What moves each annotator's mean rating to the overall one, per attribute: people use scales differently
    (``rm.regression``, centre_annotators).
    """
    values = np.array([i.extra["targets"] for i in items], float)
    weights = np.array([i.extra["weight"] for i in items], float)
    overall, names = moments(values, weights)[0], np.array([str(i.extra["annotator"]) for i in items])
    return {str(name): overall - moments(values[names == name], weights[names == name])[0] for name in np.unique(names)}


def moments(values: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(mean, std with ddof 0) of each column of values [rows, columns], NaN left out, by the weights of the rows: one
    of weight 2 is two rows. A column whose rows all have weight 0 trains nothing, and its rows count alike."""
    if np.ptp(weights) == 0:
        return np.nanmean(values, axis=0), np.nanstd(values, axis=0)
    shares = np.where(np.isnan(values), 0.0, weights[:, None])
    shares = np.where(shares.sum(0) > 0, shares, ~np.isnan(values))
    known = np.nan_to_num(values)
    mean = (shares * known).sum(0) / shares.sum(0)
    return mean, np.sqrt((shares * (known - mean) ** 2).sum(0) / shares.sum(0))


def standardise(
    items: list[Item], scale: tuple[list[float], list[float]] | None, shifts: dict[str, np.ndarray] | None = None
) -> tuple[list[float], list[float]]:
    """Targets become z-scores in place; returns (mean, std), ddof 0 and by the rows' weights, of the training targets,
    or applies the given ones.

    ``shifts``: added first, by annotator (:func:`annotator_shifts` of the training rows); nothing is known of others.
    """
    values = np.array([i.extra["targets"] for i in items], float)
    for row, item in zip(values, items) if shifts else ():
        row += np.nan_to_num(shifts.get(str(item.extra["annotator"]), 0.0))
    if scale is None:
        mean, std = moments(values, np.array([i.extra["weight"] for i in items], float))
        scale = mean.tolist(), np.where(std > 0, std, 1.0).tolist()
    for item, row in zip(items, (values - scale[0]) / scale[1]):
        item.extra["targets"] = row.tolist()
    return scale


# -- steps -------------------------------------------------------------------------------------------------------------


def step_ids(reader, steps: list[str], separator: str) -> tuple[list[int], list[int]]:
    """(ids of all steps, each followed by the separator's ids; index of every step's last separator token)
    (``rm.prm``).

    Each piece is encoded by itself, so no token crosses the border of a step.
    """
    ids, ends = [], []
    tail = reader.plain(separator)
    for step in steps:
        ids += [*reader.plain(step), *tail]
        ends.append(len(ids) - 1)
    return ids, ends


def step_item(reader, row: dict, prompt, steps: list[str], separator: str, targets: list[list[float]], **extra) -> Item:
    """A solution whose targets are step ends; steps beyond the room are cut together with their labels."""
    ids, ends = step_ids(reader, steps, separator)
    prompt_ids, [(ids, _)], was_cut = cut(reader.prompt(prompt), [(ids, ids)], reader.room)
    ends = [e for e in ends if e < len(ids)]
    if not ends:
        raise Drop("no_step_fits")
    mask = np.zeros(len(ids), np.int8)
    mask[ends] = 1
    first, ids, mask, n = reader.wrap(prompt_ids, ids[: ends[-1] + 1], mask[: ends[-1] + 1].tolist())
    weight = row_weight(row)
    return make_item(
        row["row_id"],
        first,
        [ids],
        [mask],
        first=(n,),
        targets=targets[: len(ends)],
        n_steps=len(ends),
        lengths=(len(ids),),
        truncated=was_cut,
        counts={"steps": weight * len(ends), "labelled": float(len(ends)), "rows": 1.0},
        ended=(True,),
        difficulty=0.0,
        **_labels(row),
        **extra,
    )


def step_items(row, reader, config, dropped) -> list[Item]:
    """One item per solution; ``targets`` hold one distribution over classes per step, up to and including the first
    wrong step.
    """
    if row.get("is_quality_control"):  # for screening annotators (data.stepwise)
        raise Drop("quality_control")
    labels, soft = list(row["labels"]), row.get("soft_labels")
    if config.after_first_error == "drop" and -1 in labels:
        labels = labels[: labels.index(-1) + 1]
    targets = [
        class_target(label, config.step_classes) if soft is None or config.hard_labels else [1.0 - soft[i], soft[i]]
        for i, label in enumerate(labels)
    ]
    if soft is not None and not config.hard_labels and config.step_classes != 2:
        raise ValueError(
            "soft step labels (stage label_steps) are probabilities of two classes; set step_classes=2, or"
            " hard_labels=true."
        )
    separator = config.step_separator or row.get("separator") or "\n\n"
    item = step_item(
        reader,
        row,
        with_facts(row, row["prompt"], config.facts),
        row["completions"][: len(labels)],
        separator,
        targets,
        labels=labels,
        solution_correct=row.get("solution_correct"),
    )
    dropped["truncated"] += item.extra["truncated"]
    return [item]


def class_target(label: int, classes: int) -> list[float]:
    """One-hot over (wrong, right), or (wrong, neutral, right); with two classes a neutral step counts as right
    (PRM800K).
    """
    index = label + 1 if classes == 3 else int(label >= 0)
    return [float(k == index) for k in range(classes)]


# -- two responses in one context, and label words ---------------------------------------------------------------------


def comparison_ids(reader, prompt, a, b, template: str = COMPARE) -> tuple[list[int], bool]:
    """(ids of one request that shows both responses, whether it was cut): over-long parts are (responses at their end,
    the context at its beginning).
    """
    from stages.reward_models.reward_heads import transcript

    return fill(reader, template, context=transcript(prompt), a=transcript(a), b=transcript(b))


def fill(reader, template: str, *, context: str, **responses: str) -> tuple[list[int], bool]:
    """(ids of a filled template within the reader's room, whether parts of it were cut for that)."""
    ids = reader.instruction(template.format(context=context, **responses))
    if len(ids) <= reader.room:
        return ids, False
    frame = len(reader.instruction(template.format(context="", **{k: "" for k in responses})))
    free = max(8, reader.room - frame - 8)
    share = max(4, free // (len(responses) + 1))
    decode = lambda part: reader.tokenizer.decode(part, skip_special_tokens=True)
    cut_down = {k: decode(reader.plain(v)[:share]) for k, v in responses.items()}
    left = max(1, free - sum(len(reader.plain(v)) for v in cut_down.values()))
    return (
        reader.instruction(template.format(context=decode(reader.plain(context)[-left:]), **cut_down))[-reader.room :],
        True,
    )


def told_apart(requests: list[tuple[list[int], bool]], dropped: Counter) -> list[list[int]]:
    """The ids of the two requests that a pair becomes; a cut one is counted.

    Raises:
        Drop: both are the same, so that one label contradicts the other.
    """
    ids, was_cut = [i for i, _ in requests], any(c for _, c in requests)
    if same := identical(ids, was_cut):
        raise Drop(same)
    if was_cut:
        dropped["truncated"] += 1
    return ids


def comparison_item(reader, row: dict, prompt, a, b, dropped: Counter, **extra) -> Item:
    """Both presentation orders of two responses, as the two rows of one item (``rm.pairwise``)."""
    orders = told_apart([comparison_ids(reader, prompt, a, b), comparison_ids(reader, prompt, b, a)], dropped)
    rows = [reader.wrap([], ids, [1] * len(ids)) for ids in orders]
    return make_item(
        row["row_id"],
        [],
        [r for _, r, _, _ in rows],
        [m for _, _, m, _ in rows],
        first=tuple(n for *_, n in rows),
        lengths=tuple(len(reader.plain((m[-1].get("content") or ""))) for m in (a, b)),
        ended=(True, True),
        difficulty=0.0,
        **_labels(row),
        **extra,
    )


def comparison_items(row, reader, config, dropped) -> list[Item]:
    probability = row.get("label_prob") if config.use_soft_labels else None
    if row["chosen"] == row["rejected"]:
        raise Drop("identical")
    if is_tie(row) and not config.use_soft_labels:
        raise Drop("tie")
    return [
        comparison_item(
            reader,
            row,
            with_facts(row, row["prompt"], config.facts),
            row["chosen"],
            row["rejected"],
            dropped,
            counts={"weight": row_weight(row), "pairs": 1.0},
            label_prob=1.0 if probability is None else float(probability),
        )
    ]


def label_item(reader, row: dict, ids: list[int], label: str, **extra) -> Item:
    word = reader.plain(label)
    return make_item(
        row["row_id"],
        ids,
        [word],
        [[1] * len(word)],
        first=(0,),
        lengths=(len(word),),
        ended=(True,),
        difficulty=0.0,
        counts={
            "weight": row_weight(row),
            "tokens": len(word) * row_weight(row),
            "labelled": float(len(word)),
            "rows": 1.0,
        },
        **_labels(row),
        **extra,
    )


def point_label_items(row, reader, config, dropped) -> list[Item]:
    """Each pair gives one ``Good`` and one ``Bad`` row (``rm.t2t_point``); the words are ``label_words``."""
    if is_tie(row):
        raise Drop("tie")
    from stages.reward_models.reward_heads import transcript

    prompt = transcript(with_facts(row, row["prompt"], config.facts))
    words = config.label_words or ["Good", "Bad"]
    requests = told_apart(
        [
            fill(reader, LABEL_REQUESTS[config.label_request][0], context=prompt, a=transcript(row[side]))
            for side in ("chosen", "rejected")
        ],
        dropped,
    )
    return [label_item(reader, row, ids, word) for ids, word in zip(requests, words)]


def pair_label_items(row, reader, config, dropped) -> list[Item]:
    """Each pair in both orders, with the letter of the better response (``rm.t2t_pair``)."""
    if is_tie(row):
        raise Drop("tie")
    prompt, words = with_facts(row, row["prompt"], config.facts), config.label_words or ["A", "B"]
    template = LABEL_REQUESTS[config.label_request][1]
    requests = told_apart(
        [
            comparison_ids(reader, prompt, row["chosen"], row["rejected"], template),
            comparison_ids(reader, prompt, row["rejected"], row["chosen"], template),
        ],
        dropped,
    )
    return [label_item(reader, row, ids, word) for ids, word in zip(requests, words)]
