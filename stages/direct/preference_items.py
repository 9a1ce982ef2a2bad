"""Preference data of every kind as training items of direct alignment: pairs, labelled responses, rankings, segments.

An item is a prompt with its responses, in the order that the method's loss expects: chosen, rejected; one labelled
response; K responses best first; or, for the conditional term of mDPO, three whole conversations. What truncation makes
identical, what has no trained token and what lacks a value that the loss needs never reaches a loss and is counted.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator

KIND = {
    "pairs": "pairs/1",
    "conditions": "pairs/1",
    "unpaired": "unpaired/1",
    "rankings": "rankings/1",
    "segments": "segments/1",
}


def rows_as(
    dataset, split: str, kind: str, dropped: dict[str, int] | None = None, stage_index: int | None = None
) -> Iterator[dict]:
    """Rows of a split as rows of ``kind``, converted by the rules of ingestion where the dataset is of another kind;
    what gives no row is counted into ``dropped``, by reason. ``stage_index``: of the pairs of a curriculum those of
    this stage only, taken before they are converted.

    Raises:
        ValueError: there is no such conversion.
        ConfigError: ``stage_index`` of rows that have no such column, or a stage that no row is of.
    """
    from stages.ingest import Config
    from stages.ingestion import conversions
    from stages.ingestion.rules import Bad
    from stages.spec import ConfigError
    from storage.schema import complete_row

    have, options = dataset.kind, Config()
    path = conversions.route(have, kind)
    if path is None:
        raise ValueError(
            f"this method trains on {kind}, and {have} cannot become that; give data of kind {kind}"
            + (
                ", or choose a method for pairs, such as dpo"
                if kind == "segments/1"
                else " (stage ingest makes it from raw files)"
            )
        )
    if stage_index is not None and have != "pairs/1":
        raise ConfigError(
            f"stage_index={stage_index} takes the pairs of one stage of a curriculum, and {have} has no column"
            " stage_index; give the output of stage curriculum, or leave stage_index out"
        )
    rows, lost = dataset.iter_rows(split=split), Counter()
    if stage_index is not None:
        there = {row["stage_index"] for row in dataset.iter_rows(columns=["stage_index"], split=split)}
        if there and stage_index not in there:
            stages = ", ".join(map(str, sorted(there - {None})))
            raise ConfigError(
                f"stage_index={stage_index}: no pair of split {split} is of this stage; "
                + (f"the data has the stages {stages}, so write one of these" if stages else "none says of which it is")
                + ", give the output of stage curriculum, or leave stage_index out"
            )
        rows = (row for row in rows if row["stage_index"] == stage_index)
    for a, b in zip(path, path[1:]):
        made = []
        if (a, b) in conversions.ROWWISE:
            for row in rows:
                try:
                    made += conversions.rowwise(a, b, row, options)
                except Bad as bad:
                    lost.update(bad.codes)
        else:
            groups: dict[str, list[dict]] = {}
            for row in rows:
                groups.setdefault(row["prompt_id"], []).append(row)
            for group in groups.values():
                found, reasons, refused = conversions.grouped(a, b, group, options)
                made += found
                lost.update(Counter(refused.values()) | Counter(reasons))
        rows = [
            complete_row(
                b, row, dataset=dataset.name, source=row.get("source") or dataset.name, origin="conversion", split=split
            )
            for row in made
        ]
    if dropped is not None:
        for reason, n in lost.items():
            dropped[reason] = dropped.get(reason, 0) + n
    yield from rows


def segment_score(scores: list[dict], weights: dict[str, float]) -> float | None:
    """A segment's score: the mean of its aspects (0 without any), or their weighted sum; None where it lacks an aspect
    that ``weights`` names (``da.2d_dpo``).
    """
    if not weights:
        return sum(a["score"] for a in scores) / max(len(scores), 1)
    found = {a["aspect"]: a["score"] for a in scores}
    return sum(w * found[name] for name, w in weights.items()) if weights.keys() <= found.keys() else None


class Encoder:
    """Rows of one dataset to items for one method.

    Args:
        method: row of ``stages.algorithms.DIRECT_METHODS``.
        config: ``stages.align.Config``.
        targets: prompt_id -> messages of the regularisation target (``da.slic``) or gold answer (TPO); None: the chosen
            response, of TPO :func:`gold_answer`.
        rng: ``rng(purpose, *counters)``, counter-based.
    """

    def __init__(self, renderer, method, config, rng, targets: dict[str, list[dict]] | None = None):
        self.renderer, self.method, self.config, self.rng, self.targets = renderer, method, config, rng, targets
        self.formatting = frozenset()
        if config.mask_formatting:
            self.formatting = renderer.stop_ids | {
                i for i, token in renderer.tokenizer.added_tokens_decoder.items() if token.special
            }
        self.dropped = Counter({"truncated": 0, "identical_after_truncation": 0, "no_target": 0})

    def __call__(self, dataset, split: str, limit: int | None = None) -> list:
        """Items of a split; counts of what was dropped or cut go to :attr:`dropped`."""
        from stages.chat import rendering
        from stages.pairs import is_tie
        from stages.running.parallel import items_of

        make = getattr(self, "_" + self.method.data)
        hard = KIND[self.method.data] == "pairs/1" and "label_prob" not in self.method.columns

        def of(rows):
            items, self.dropped = [], Counter()
            for row in rows:
                with rendering(row):
                    item = self._drop("tie") if hard and is_tie(row) else make(row)
                if item is not None:
                    items.append(item)
            return items, self.dropped

        counted = self.dropped
        rows = rows_as(
            dataset, split, KIND[self.method.data], counted, self.config.stage_index if split == "train" else None
        )
        items, dropped = items_of(rows, of, expected=dataset.rows_of(split), limit=limit)
        self.dropped = counted
        self.dropped.update(dropped)
        if self.method.statistic == "z0":
            self._mismatch(items, split)
        return items

    def _drop(self, reason: str) -> None:
        self.dropped[reason] += 1

    def _encode(self, row, completions, *columns):
        """(prompt, [(ids, mask)]) cut to max_length and trimmed, or None when a response has no trained token;
        ``columns``: where the first of the completions are from, which may have no end."""
        from stages.pairs import cut, ended_of, identical, trim

        ends = ended_of(row, *columns) + [True] * (len(completions) - len(columns))
        encoded = [self.renderer.completion_ids(row["prompt"], c, ended) for c, ended in zip(completions, ends)]
        prompt, responses, was_cut = cut(
            encoded[0][0], [(ids, mask) for _, ids, mask in encoded], self.config.max_length
        )
        self.dropped["truncated"] += was_cut
        # a target answer may well be the chosen one
        compared = responses[:2] if self.method.data == "pairs" else responses
        if same := identical([ids for ids, _ in compared], was_cut):
            return self._drop(same)
        responses = [
            trim(ids, [0 if i in self.formatting else m for i, m in zip(ids, mask)] if self.formatting else mask)
            for ids, mask in responses
        ]
        if not all(sum(mask) for _, mask in responses):
            return self._drop("no_target")
        return prompt, responses

    def _item(self, row, prompt, responses, **extra):
        from stages.batching import make_item, row_weight

        weight = row_weight(row)
        # matching is between all rows of a step, so one row cannot count more than another, but it may be left out
        if self.method.statistic.startswith("sorted"):
            if not weight:
                return self._drop("weight_0")
            weight, extra["unread_weight"] = 1.0, weight
        return make_item(
            row["row_id"],
            prompt,
            [ids for ids, _ in responses],
            [mask for _, mask in responses],
            weight=weight,
            prompt_id=row.get("prompt_id"),
            **extra,
        )

    def _pairs(self, row, more=()):
        gap = score_gap(row)
        if "score_gap" in self.method.columns and gap is None:
            return self._drop("no_score")
        if self.method.positive_gap and gap <= 0:
            return self._drop("score_gap_not_positive")
        completions = [row["chosen"], row["rejected"], *more]
        if self.method.reads_target and (self.targets is not None or self.method.nll_of == "target"):
            target = gold_answer(row) if self.targets is None else self.targets.get(row["prompt_id"])
            if target is None:
                return self._drop("no_target_answer")
            completions.append(target)
        encoded = self._encode(row, completions, "chosen", "rejected")
        if encoded is None:
            return None
        # a third response: prompt and chosen answer, every token of it a target
        if self.config.options.get("nll_on_prompt"):
            prompt, (chosen, rejected) = encoded
            whole = [(list(prompt) + list(ids), [0] * len(prompt) + list(mask)) for ids, mask in (chosen, rejected)]
            encoded = [], [*whole, (whole[0][0], [1] * len(whole[0][0]))]
        probability = row.get("label_prob")
        return self._item(row, *encoded, label_prob=1.0 if probability is None else float(probability), score_gap=gap)

    def _unpaired(self, row):
        encoded = self._encode(row, [row["completion"]], "completion")
        return None if encoded is None else self._item(row, *encoded, label=bool(row["label"]))

    def _rankings(self, row):
        """Best first. For Plackett-Luce one response per rank, since a tie has no order."""
        ranks, scores = row["ranks"], row.get("scores")
        order = sorted(range(len(ranks)), key=lambda i: (ranks[i], i))
        if not self.method.columns:
            order = [i for at, i in enumerate(order) if at == 0 or ranks[i] != ranks[order[at - 1]]]
            if tied := len(ranks) - len(order):
                self.dropped["tied_responses"] += tied
        if len(order) < 2 or len({ranks[i] for i in order}) < 2:
            return self._drop("no_order")
        if self.config.win_probability != "ranks" and "win_prob" in self.method.columns and scores is None:
            return self._drop("no_score")
        encoded = self._encode(row, [row["completions"][i] for i in order])
        if encoded is None:
            return None
        rewards = [float(-ranks[i]) if scores is None else float(scores[i]) for i in order]
        return self._item(
            row,
            *encoded,
            rewards=rewards,
            win_prob=win_probabilities(self.config.win_probability, [ranks[i] for i in order], rewards),
        )

    def _segments(self, row):
        encoded = self._encode(row, [row["chosen"], row["rejected"]], "chosen", "rejected")
        if encoded is None:
            return None
        sides = []
        for (ids, mask), segments in zip(encoded[1], (row["chosen_segments"], row["rejected_segments"])):
            spans = (
                token_spans(self.renderer, ids, segments)
                if row["offset_unit"] == "char"
                else [(s["start"], s["end"]) for s in segments]
            )
            scores = [segment_score(s["scores"], self.config.aspect_weights) for s in segments]
            self.dropped["segments_without_an_aspect"] += scores.count(None)
            sides.append(
                [
                    (start, min(end, len(ids)), score)
                    # no token begins in it, or none that is left and trained
                    if score is not None and start < min(end, len(ids)) and any(mask[start:end])
                    else None
                    for (start, end), score in zip(spans, scores)
                ]
            )
        if self.config.segment_pairing == "top_chosen_vs_bottom_rejected":
            sides = [
                sorted(filter(None, sides[0]), key=lambda s: -s[2]),
                sorted(filter(None, sides[1]), key=lambda s: s[2]),
            ]
        paired = [(a, b) for a, b in zip(*sides) if a and b]
        self.dropped["unpaired_segments"] += sum(s is not None for side in sides for s in side) - 2 * len(paired)
        if not paired:
            return self._drop("no_segment")
        return self._item(
            row,
            *encoded,
            segments=[[(a, b) for a, b, _ in side] for side in zip(*paired)],
            segment_weights=[[w for _, _, w in side] for side in zip(*paired)],
        )

    def _conditions(self, row):
        """Three conversations in one item: chosen, rejected, and chosen behind the corrupted prompt."""
        encoded = self._encode(row, [row["chosen"], row["rejected"]], "chosen", "rejected")
        if encoded is None:
            return None
        prompt, responses = encoded
        messages = corrupt(
            row["prompt"], self.config.corruption, self.config.corruption_share, self.rng("corrupt", row["row_id"])
        )
        if messages is None:
            return self._drop("prompt_too_short_to_corrupt")
        other = self.renderer.prompt_ids(messages)[-max(1, self.config.max_length - len(responses[0][0])) :]
        whole = [
            (list(p) + list(ids), [0] * len(p) + list(mask))
            for p, (ids, mask) in ((prompt, responses[0]), (prompt, responses[1]), (other, responses[0]))
        ]
        return self._item(row, [], whole)

    def _mismatch(self, items, split: str) -> None:
        """Give every item, as ``extra["mismatched"]``, its prompt with the response of a fixed row that has another
        prompt (``da.kto``).

        The pairing is fixed so that the reference's log-probs of it can be cached.
        """
        from stages.batching import make_item
        from stages.pairs import cut

        order = self.rng("mismatched", split).permutation(len(items))
        for at, i in enumerate(order):
            item = items[i]
            partner = next(
                (
                    items[order[(at + step) % len(items)]]
                    for step in range(1, len(items))
                    if items[order[(at + step) % len(items)]].extra["prompt_id"] != item.extra["prompt_id"]
                ),
                None,
            )
            if partner is not None:
                prompt, [(ids, mask)], _ = cut(
                    item.prompt, [(partner.responses[0], partner.masks[0])], self.config.max_length
                )
                item.extra["mismatched"] = make_item(
                    f"{item.row_id}~{partner.row_id}", prompt, [ids], [mask], prompt_id=item.extra["prompt_id"]
                )


def score_gap(row: dict) -> float | None:
    """chosen_score - rejected_score, else the margin, else None."""
    if row.get("chosen_score") is not None and row.get("rejected_score") is not None:
        return float(row["chosen_score"]) - float(row["rejected_score"])
    return None if row.get("margin") is None else float(row["margin"])


def gold_answer(row) -> list[dict] | None:
    """The gold answer that a pair's row brings along: what the file had in a column `reference` (TRL's TPO), which
    ingestion keeps in ``extra_json``; a text, or messages (with the prompt before them, or without). None where there is
    none.
    """
    extra = row.get("extra_json")
    if not extra or '"reference"' not in extra:
        return None
    said = json.loads(extra).get("reference")
    if isinstance(said, str):
        said = [{"role": "assistant", "content": said}]
    if not isinstance(said, list) or not all(isinstance(m, dict) and isinstance(m.get("content"), str) for m in said):
        return None
    plain = lambda messages: [(m.get("role"), m["content"]) for m in messages]
    prompt = row["prompt"]
    answer = said[len(prompt) :] if plain(said[: len(prompt)]) == plain(prompt) else said
    return answer if answer and {m.get("role") for m in answer} == {"assistant"} else None


def win_probabilities(mode: str, ranks, scores) -> list[float]:
    """P(y beats another response of the prompt), averaged over the others (``da.sppo``).

    ``ranks``: 1, 1/2 or 0 by rank; ``bradley_terry``: sigma of score differences; ``scores``: the scores are these
    probabilities.

    Raises:
        ValueError: a score is no probability with mode ``scores``.
    """
    import math

    if mode == "scores":
        if any(not 0.0 <= s <= 1.0 for s in scores):
            raise ValueError(
                f"win_probability=scores needs scores in [0, 1], but a row has {scores}; write"
                " win_probability=bradley_terry for rewards"
            )
        return list(scores)

    def beats(i, j):
        if mode == "ranks":
            return 1.0 if ranks[i] < ranks[j] else 0.5 if ranks[i] == ranks[j] else 0.0
        return 0.5 * (1.0 + math.tanh((scores[i] - scores[j]) / 2.0))

    n = len(ranks)
    return [sum(beats(i, j) for j in range(n) if j != i) / (n - 1) for i in range(n)]


def corrupt(messages: list[dict], mode: str, share: float, rng) -> list[dict] | None:
    """The prompt with its last message spoiled: parts dropped or shuffled, or its end cut off (``da.mdpo``, text
    analogue).

    Parts are paragraphs, else sentences, else words. None when there are fewer than two.
    """
    import re

    text = messages[-1]["content"]
    separator, parts = next(
        (
            (s, p)
            for s, p in (("\n\n", text.split("\n\n")), (" ", re.split(r"(?<=[.!?])\s+", text)), (" ", text.split()))
            if len(p) > 1
        ),
        (" ", [text]),
    )
    if len(parts) < 2:
        return None
    n = min(len(parts) - 1, max(1, round(share * len(parts))))
    if mode == "drop":
        gone = set(rng.choice(len(parts), size=n, replace=False).tolist())
        kept = [part for i, part in enumerate(parts) if i not in gone]
    elif mode == "truncate":
        kept = parts[: len(parts) - n]
    else:
        order = rng.permutation(len(parts))
        kept = [parts[i] for i in (order if (order != range(len(parts))).any() else order[::-1])]
    return [*messages[:-1], {**messages[-1], "content": separator.join(kept)}]


def token_spans(renderer, ids, segments) -> list[tuple[int, int]]:
    """Half-open token spans of half-open character spans of a response: a token belongs where its first character is
    (``data.segments``).
    """
    ends = [len(renderer.decode(ids[: i + 1])) for i in range(len(ids))]
    starts = [0, *ends[:-1]]
    spans = []
    for segment in segments:
        inside = [i for i, (a, b) in enumerate(zip(starts, ends)) if b > a and segment["start"] <= a < segment["end"]]
        spans.append((inside[0], inside[-1] + 1) if inside else (0, 0))
    return spans
