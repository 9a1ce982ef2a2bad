"""judge: a judge's opinion instead of a person's: which of two answers is better, as preference pairs (``synth.rlaif``,
``synth.cai_pref``, ``synth.judge``).

Takes pairs, comparisons, rankings, or candidates of ``rejection`` (two answers of each prompt). Every pair is shown in
both orders, and the mean is the label: ``chosen`` is the answer that the judge prefers, ``label_prob`` = max(p, 1 - p),
for ``reward_model`` (objective=soft_label) and ``align``. With ``principles``, each pair is judged by one of them,
drawn at random by its row. Rows keep prompt, split, group, weight and who generated them; pairs that were made here of
the answers to one prompt weigh together as much as one.

Ties, errors and unsure labels are left out and counted by reason; ``fallback=given`` keeps the label that a row came
with for them (``synth.hybrid``). Where rows came with labels, the report says how often the judge agrees
(``eval.judge_agreement``), and what the judge goes by beside quality (``eval.judge_bias``). A killed run continues at
its last complete block, and asks a server for nothing twice.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Literal, Optional

from pydantic import Field, model_validator

from stages.reward.judging import (
    JUDGE_INPUTS,
    Item,
    JudgeSettings,
    Opinion,
    PairJudge,
    judge_metrics,
    longer_wins,
    text_of,
    verdict_of,
    warn_about_judge,
)
from stages.settings import PARTED_TRAINING, refuse_unread
from stages.spec import ConfigError, InputSpec, OutputSpec, StageSpec

KINDS = ("pairs/1", "comparisons/1", "rankings/1", "candidates/1")


class Config(JudgeSettings):
    labels: Literal["soft", "hard"] = Field(
        "soft",
        description=(
            "soft: label_prob is the judge's probability (RLAIF, Constitutional AI); hard: the better answer, and no"
            " probability."
        ),
    )
    min_confidence: Optional[float] = Field(
        None,
        ge=0.5,
        le=1,
        title="Min confidence",
        description=(
            "Pairs whose max(p, 1 - p) is below this are unsure and left out. Unset: 0.6 for hard "
            "labels, none for soft ones."
        ),
    )
    tie_policy: Literal["drop", "soft"] = Field(
        "drop", description="Ties: left out, or kept with label_prob 0.5 (data.binarise)."
    )
    fallback: Literal["drop", "given"] = Field(
        "drop",
        description=(
            "Pairs that the judge gives no sure label (errors, inconsistent, ties, unsure): left out, or kept with the"
            " label that they came with, a person's for example (synth.hybrid)."
        ),
    )
    disagreement: Literal["relabel", "drop"] = Field(
        "relabel",
        description=(
            "Pairs whose given label the judge contradicts: get the judge's, or are left out (a check that the chosen "
            "answer wins, synth.clair)."
        ),
    )
    pairs_per_prompt: int = Field(
        1, ge=1, description="rankings and candidates: pairs of each prompt at most, in the order of the answers."
    )
    split: str = Field("", description="Split to judge; empty: all of them.")
    limit: Optional[int] = Field(
        None, ge=1, title="Limit", description="Pairs judged at most, the first ones; empty = all."
    )
    validation_fraction: float = Field(
        0.0, ge=0, lt=1, description="Share of the training prompts in the validation split, where no row is in it."
    )

    @model_validator(mode="after")
    def _labels(self):
        refuse_unread(self, PARTED_TRAINING)
        if self.labels == "hard" and self.tie_policy == "soft":
            raise ValueError("a tie has no hard label; write labels=soft, or tie_policy=drop")
        if self.disagreement == "drop" and self.fallback == "given":
            raise ValueError(
                "disagreement=drop trusts a given label only where the judge agrees, fallback=given where it has no"
                " opinion; write fallback=drop"
            )
        return self

    @property
    def sure(self) -> float:
        return self.min_confidence if self.min_confidence is not None else 0.6 if self.labels == "hard" else 0.5


SPEC = StageSpec(
    name="judge",
    config=Config,
    gpu="models",
    inputs={
        "data": InputSpec(
            "dataset", kinds=KINDS, doc="Pairs, comparisons, rankings, or candidates of a rejection run."
        ),
        **JUDGE_INPUTS,
    },
    outputs={
        "data": OutputSpec("dataset", doc="pairs/1, ready for reward_model and align."),
        "judgements": OutputSpec("dataset", doc="judgements/1: every request and answer."),
    },
)


def run(stage):
    items, left_out = read(stage)
    judge = PairJudge(stage)
    judge.run(items)
    opinions = judge.opinions(items)
    labelled, reasons = [], Counter(left_out)
    for item, found in zip(items, opinions):
        row, reason = label(item, found, stage.config, judge.judge_id)
        reasons.update([reason] * bool(reason))
        labelled += [(item, row)] * (row is not None)
    rows = weighed(labelled)
    write(stage, rows, reasons, len(items))
    report(stage, items, opinions, rows, reasons, judge)


# -- what is judged ----------------------------------------------------------------------------------------------------


def read(stage) -> tuple[list[Item], Counter]:
    """The pairs of the input, each two answers once, and how many rows gave none, by reason. Raises ConfigError: there
    is no pair.
    """
    config, data, left_out = stage.config, stage.dataset("data"), Counter()
    made = {
        "pairs/1": _of_pairs,
        "comparisons/1": _of_comparisons,
        "rankings/1": _of_rankings,
        "candidates/1": _of_candidates,
    }[data.kind]
    items: dict[tuple, Item] = {}
    for row in made(data.iter_rows(split=config.split) if config.split else data.iter_rows(), left_out, config):
        item = item_of(row)
        trait = item.row["trait"] if config.principle_of == "row" else None
        key = item.row["prompt_id"], trait, text_of(item.a), text_of(item.b)
        if key in items:  # another annotator of the same comparison: one question, all votes
            left_out["the same two answers again"] += 1
            _merge(items[key].row, item.row)
            continue
        items[key] = item
    found = list(items.values())[: config.limit]
    if not found:
        splits = ", ".join(data.manifest.get("splits") or {}) or "none"
        why = "; ".join(f"{n} {reason}" for reason, n in left_out.most_common())
        raise ConfigError(
            f"stage judge: the input data ({data.kind}) gives no pair of answers ({why or 'it has no rows'}; splits:"
            f" {splits})"
            + (
                f"; write split=NAME for another split than {config.split!r}"
                if config.split
                else "; give two different answers to each prompt"
            )
        )
    return found, left_out


def _merge(row: dict, other: dict) -> None:
    """Add another label of the same two answers; of where they are from and who gave it, what both have stays."""
    for name in ("votes", "row_ids"):
        row[name].extend(other[name])
    for name in ("batch_id", "license", "collected_at"):
        if row[name] != other[name]:
            row[name] = None
    who, another = (one["ann"] or {} for one in (row, other))
    if who.get("annotator_id") != another.get("annotator_id"):
        row["ann"] = {**who, "annotator_id": None}


def item_of(row: dict) -> Item:
    """The pair of a row {prompt, answers: [two], gens: [two], votes: [P(first is better)], ...}. Which answer is the
    item's A is decided by their texts, so that neither requests nor agreement know the given label."""
    order = sorted(
        (0, 1), key=lambda i: hashlib.sha256(text_of(row["answers"][i]).encode("utf-8", "surrogatepass")).digest()
    )
    a, b = (row["answers"][i] for i in order)
    votes = [p if order == [0, 1] else 1.0 - p for p in row["votes"]]
    return Item(row["row_id"], row["prompt"], a, b, {**row, "votes": votes, "gens": [row["gens"][i] for i in order]})


def given_verdict(item: Item) -> str | None:
    """ "A", "B" or "tie" by the labels that the data came with; None without any."""
    votes = item.row["votes"]
    return verdict_of(sum(votes) / len(votes)) if votes else None


def _common(row: dict) -> dict:
    return {
        name: row.get(name)
        for name in (
            "row_id",
            "prompt",
            "prompt_id",
            "group_id",
            "split",
            "weight",
            "source",
            "batch_id",
            "license",
            "collected_at",
            "stage_index",
            "turn_index",
            "constraint_ids",
            "ann",
        )
    } | {
        "row_ids": [row["row_id"]],
        "origin": row["origin"],
        "trait": json.loads(row["extra_json"] or "{}").get("trait"),
    }


def _of_pairs(rows: Iterable[dict], left_out: Counter, config: Config):
    from stages.pairs import ended_of

    for row in rows:
        if not all(ended_of(row, "chosen", "rejected")):  # as of candidates: it could be preferred
            left_out["pairs with a cut answer"] += 1
            continue
        p = 1.0 if row["label_prob"] is None else row["label_prob"]
        yield {
            **_common(row),
            "answers": [row["chosen"], row["rejected"]],
            "gens": [row["chosen_gen"], row["rejected_gen"]],
            "votes": [p],
            "pairs_in_group": row["pairs_in_group"],
        }


def _of_comparisons(rows: Iterable[dict], left_out: Counter, config: Config):
    for row in rows:
        yield {
            **_common(row),
            "answers": [row["response_a"], row["response_b"]],
            "gens": [row["gen_a"], row["gen_b"]],
            "votes": [comparison_p_a(row)],
        }


def comparison_p_a(row: dict) -> float:
    """P(A is better) by the label of a ``comparisons/1`` row: a probability, a share of votes, or the side of a
    scale.
    """
    from stages.ingestion import pairing

    if row["label_kind"] == "likert":
        return {"A": 1.0, "B": 0.0, "tie": 0.5}[
            pairing.likert(row["label"], row["n_points"], row.get("orientation") or "low_is_a")[0]
        ]
    return row["p_a"] if row["label_kind"] == "prob" else pairing.votes(row["votes"])["p_a"]


def _of_rankings(rows: Iterable[dict], left_out: Counter, config: Config):
    for row in rows:
        ranks, gens = row["ranks"], row["gens"] or [None] * len(row["completions"])
        yield from _pairs_among(
            _common(row),
            [(c, g, row["row_id"]) for c, g in zip(row["completions"], gens)],
            left_out,
            config.pairs_per_prompt,
            lambda i, j: [1.0 if ranks[i] < ranks[j] else 0.0 if ranks[i] > ranks[j] else 0.5],
        )


def _of_candidates(rows: Iterable[dict], left_out: Counter, config: Config):
    from storage.schema import provenance

    groups: dict[tuple, list[dict]] = {}
    for row in rows:
        trait = json.loads(row["extra_json"] or "{}").get("trait") if config.principle_of == "row" else None
        group = groups.setdefault((row["prompt_id"], trait), [])
        if row["kept"] is False and row["drop_reason"] != "unscorable":  # a judge needs no reward
            left_out[f"answers {row['drop_reason'] or 'not kept'}"] += 1
        else:
            group.append(row)
    for (_, trait), group in groups.items():
        if len(group) < 2:
            left_out["prompts with fewer than two answers"] += 1
            continue
        common = {**_common(group[0]), **provenance(*group)}
        if trait is not None:  # the same answers may have been sampled for another one
            common["row_id"] += f":{trait}"
        yield from _pairs_among(
            common,
            [(row["completion"], row["gen"], row["row_id"]) for row in group],
            left_out,
            config.pairs_per_prompt,
            lambda i, j: [],
        )


def _pairs_among(common: dict, answers: Sequence[tuple], left_out: Counter, limit: int, votes):
    """The first pairs of different answers of a prompt, ``made_of`` one row or group and with its whole weight."""
    from itertools import combinations

    different = [
        (i, j) for i, j in combinations(range(len(answers)), 2) if text_of(answers[i][0]) != text_of(answers[j][0])
    ][:limit]
    if not different:
        left_out["prompts whose answers are all the same"] += 1
    for i, j in different:
        yield {
            **common,
            "row_id": f"{common['row_id']}:{i}:{j}",
            "answers": [answers[i][0], answers[j][0]],
            "gens": [answers[i][1], answers[j][1]],
            "votes": votes(i, j),
            "row_ids": list(dict.fromkeys((answers[i][2], answers[j][2]))),
            "made_of": common["row_id"],
        }


# -- what comes of it --------------------------------------------------------------------------------------------------


def label(item: Item, found: Opinion, config: Config, judge_id: str) -> tuple[dict | None, str]:
    """(the pair, or None where it is left out, why it has no label of the judge: empty where it has one)."""
    p = found.p_a
    reason = found.why.partition(":")[0]
    if not reason:
        reason = "tie" if p == 0.5 else "unsure" if max(p, 1 - p) < config.sure - 1e-9 else ""
    if not reason and config.disagreement == "drop" and given_verdict(item) not in (None, verdict_of(p)):
        return None, "disagrees with the given label"
    if not reason or (reason == "tie" and config.tie_policy == "soft"):
        ann = {
            "annotator_type": "ai",
            "judge_id": judge_id,
            "judge_prompt_id": found.judge_prompt_id,
            "principle_ids": list(found.principle_ids) or None,
            "confidence": max(p, 1 - p),
            "cost_usd": found.cost_usd,
        }
        return (
            _pair(
                item,
                p,
                found,
                origin="ai",
                ann=ann,
                soft=config.labels == "soft",
                strength=(2 if found.strong else 1) if config.mode == "five_way" and p != 0.5 else None,
            ),
            "",
        )
    given = given_verdict(item)
    if config.fallback == "given" and given in ("A", "B") and not item.identical:
        votes = item.row["votes"]
        p = sum(votes) / len(votes)
        return (
            _pair(item, p, found, origin=item.row["origin"], ann=item.row["ann"], soft=0 < p < 1),
            f"{reason}, the given label kept",
        )
    return None, reason


def weighed(labelled: Sequence[tuple[Item, dict]]) -> list[dict]:
    """The rows; those of one ranking, or of one prompt's candidates, share its weight among those that got a label
    (``data.ranking``).
    """
    sizes = Counter(item.row["made_of"] for item, _ in labelled if "made_of" in item.row)
    return [
        row | {"pairs_in_group": (n := sizes[item.row["made_of"]]), "weight": item.row["weight"] / n}
        if "made_of" in item.row
        else row
        for item, row in labelled
    ]


def _pair(
    item: Item, p: float, found: Opinion, *, origin: str, ann: dict | None, soft: bool, strength: int | None = None
) -> dict:
    """One ``pairs/1`` row: the preferred answer as chosen."""
    from storage.schema import complete_row

    row, first = item.row, p >= 0.5
    extra = {
        "from": row["row_ids"],
        "judge": {
            "p_a": found.p_a,
            "shown_first": list(found.shown_first),
            "verdicts": list(found.printed),
            "why": found.why or None,
        },
        "given": given_verdict(item),
    }
    kept = {
        name: row.get(name)
        for name in (
            "prompt",
            "prompt_id",
            "group_id",
            "split",
            "weight",
            "batch_id",
            "license",
            "collected_at",
            "stage_index",
            "turn_index",
            "constraint_ids",
        )
    }
    return complete_row(
        "pairs/1",
        {
            **kept,
            "chosen": item.a if first else item.b,
            "rejected": item.b if first else item.a,
            "label_prob": max(p, 1 - p) if soft else None,
            "strength": strength,
            "chosen_gen": row["gens"][not first],
            "rejected_gen": row["gens"][first],
            "pairs_in_group": row.get("pairs_in_group") or 1,
            "ann": ann,
            "extra_json": json.dumps(extra, sort_keys=True),
        },
        dataset="judge",
        source=row["source"],
        origin=origin,
    )


def write(stage, rows: list[dict], reasons: Counter, asked: int) -> None:
    from stages.harness import StageFailure
    from stages.ingestion.curation import generated_splits

    if stage.config.validation_fraction:
        splits = generated_splits(rows, stage.config.validation_fraction)
        rows = [{**row, "split": splits[row["prompt_id"]]} for row in rows]
    if not rows:
        why = ", ".join(f"{n} {reason}" for reason, n in reasons.most_common())
        raise StageFailure(
            f"None of {asked} pairs got a label: {why}. Its judgements are in {stage.workdir.name}/out/judgements; take"
            " another judge or mode, tie_policy=soft, or a lower min_confidence."
        )
    writer = stage.writer("data", "pairs/1")
    writer.write(rows)
    writer.close(
        {"pairs": asked, "rows": len(rows), **{f"without_label/{reason}": n for reason, n in sorted(reasons.items())}}
    )


def agreement(items: Sequence[Item], opinions: Sequence[Opinion]) -> tuple[dict[str, float], list[list[int]]]:
    """(agreement with the labels that the data came with, with and without ties, and Cohen's kappa; the table judge x
    given over A, B, tie).
    """
    from stages.ingestion.curation import cohen_kappa
    from stages.measures.suites import judge_agreement

    both = [
        (found.verdict, given)
        for item, found in zip(items, opinions)
        if found.verdict != "error" and not item.identical and (given := given_verdict(item)) is not None
    ]
    names = ("A", "B", "tie")
    table = [[both.count((mine, theirs)) for theirs in names] for mine in names]
    if not both:
        return {}, table
    out = {**judge_agreement(*map(list, zip(*both))), "kappa": cohen_kappa(table)["kappa"], "agreement_of": len(both)}
    return {name: value for name, value in out.items() if value is not None}, table


def report(stage, items, opinions, rows, reasons: Counter, judge: PairJudge) -> None:
    import numpy as np

    from stages.evaluation.scores import cluster_of, share
    from stages.reporting.reports import calibration_diagram, document, facts, histogram, markdown_table, sample_table

    metrics = judge_metrics(items, opinions, judge)
    agreed, table = agreement(items, opinions)
    decided = [
        (found, given, item)
        for item, found in zip(items, opinions)
        if found.verdict in ("A", "B") and not item.identical and (given := given_verdict(item)) in ("A", "B")
    ]
    if decided:
        right = share(
            [float(found.verdict == given) for found, given, _ in decided],
            [cluster_of({**item.row, "item_id": item.item_id}) for _, _, item in decided],
        )
        agreed |= {"agreement_no_ties_low": right.low, "agreement_no_ties_high": right.high}
        longer = [
            value for _, given, item in decided if (value := longer_wins(item, given, stage.config.view)) is not None
        ]
        agreed |= {"given/longer_wins": float(np.mean(longer))} if longer else {}
    confidence = [max(found.p_a, 1 - found.p_a) for found in opinions if not found.why]
    summary = {
        **metrics,
        "rows": len(rows),
        **({"ties": sum(row["label_prob"] == 0.5 for row in rows)} if stage.config.tie_policy == "soft" else {}),
        **agreed,
        **{f"without_label/{reason}": n for reason, n in sorted(reasons.items())},
        "confidence/mean": float(np.mean(confidence)) if confidence else None,
        "length_difference/mean": float(
            np.mean([len(text_of(row["chosen"])) - len(text_of(row["rejected"])) for row in rows])
        ),
    }
    stage.summary({name: value for name, value in summary.items() if value is not None})
    makers = {
        gen.get(name) for item in items for gen in item.row["gens"] if gen for name in ("model_id", "checkpoint_id")
    }
    warn_about_judge(stage, metrics, makers)
    if agreed.get("kappa") is not None and agreed["kappa"] < 0.4 and agreed["agreement_of"] >= 20:
        stage.warn(
            "judge_disagrees",
            f"Cohen's kappa of the judge with the labels of the data is {agreed['kappa']:.2f} (below 0.4): the judge's"
            " labels are not those of whoever labelled the data. Read the pairs on which they differ, then write a"
            " clearer preamble, or take another judge.",
        )
    if confidence:
        stage.report(
            "confidence",
            png=histogram(
                {"max(p, 1 - p)": confidence},
                title="How sure the judge is, both orders averaged",
                xlabel="probability of the preferred answer",
            ),
        )
    if len(decided) >= 20 and stage.config.mode == "preference":
        stage.report(
            "calibration",
            png=calibration_diagram(
                [max(f.p_a, 1 - f.p_a) for f, _, _ in decided],
                [float(f.verdict == g) for f, g, _ in decided],
                title="Agreement with the given labels by the judge's confidence",
            ),
        )
    by_principle = Counter(name for found in opinions for name in found.principle_ids)
    errors = Counter(found.why for found in opinions if found.why.startswith("error"))
    shown = [
        {
            "prompt": text_of(item.prompt),
            "A": text_of(item.a),
            "B": text_of(item.b),
            "P(A)": found.p_a,
            "given": given_verdict(item),
            "why": found.why,
        }
        for item, found in list(zip(items, opinions))[:12]
    ]
    names = ("A", "B", "tie")
    stage.report(
        "summary",
        markdown=document(
            "Pairs labelled by a judge",
            facts(summary),
            (
                "Judge (rows) and given labels (columns)",
                (
                    markdown_table([{"judge": name, **dict(zip(names, line))} for name, line in zip(names, table)])
                    if agreed
                    else ""
                ),
            ),
            (
                "Pairs by principle",
                (
                    markdown_table([{"principle": name, "pairs": n} for name, n in sorted(by_principle.items())])
                    if by_principle
                    else ""
                ),
            ),
            (
                "Errors",
                markdown_table([{"error": name, "pairs": n} for name, n in errors.most_common(10)]) if errors else "",
            ),
            ("Samples", sample_table(shown)),
        ),
    )
