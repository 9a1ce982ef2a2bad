"""preferences: scored candidates of the rejection stage -> preference pairs, rankings or labelled rows.

Pair building is a selector on each prompt's rewards: best against worst (catalogue ``da.online_dpo``, ``rs.triplet``)
or a random other, every pair with a large enough gap (``rs.rs_dpo``), pairs of statistically accepted candidates
(``rs.rso``), correct against incorrect (``da.dpo_nll``), or all. Candidates that were cut by the length limit or could
not be scored are in no pair; with ``allow_truncated_rejected`` a cut one may be the rejected answer, and the row says
that it has no end. Prompts that give none are counted. Rows stay in the split of their prompt; a validation
split is cut from the training prompts where the candidates have none.
"""

from __future__ import annotations

from collections import Counter
from typing import ClassVar, Literal

from pydantic import Field, model_validator

from stages.settings import ReadWhen, refuse_unread
from stages.spec import InputSpec, OutputSpec, StageConfig, StageSpec


class Config(StageConfig):
    READ_WHEN: ClassVar[ReadWhen] = (
        (
            ("select", "soft_labels", "max_pairs_per_prompt"),
            lambda c: c.kind == "pairs/1",
            "only pairs are selected; write kind=pairs/1",
        ),
        (
            ("eta",),
            lambda c: c.kind == "pairs/1" and c.select == "gap",
            "only select=gap has a least probability; write select=gap",
        ),
        (
            ("tau",),
            lambda c: c.kind == "pairs/1" and (c.select == "gap" or c.soft_labels),
            "no probability is made of rewards; write select=gap or soft_labels=true",
        ),
        (
            ("rso_beta", "rso_accept", "rso_pairs"),
            lambda c: uses_rso(c),
            "no candidates are accepted by chance; write select=rso",
        ),
        (
            ("max_pairs_per_prompt",),
            lambda c: c.select not in ("best_vs_worst", "best_vs_random"),
            "this select gives one pair of a prompt; write select=all, gap, rso or correct_vs_incorrect",
        ),
        (
            ("threshold",),
            lambda c: c.kind == "unpaired/1",
            "only single responses get a label from it; write kind=unpaired/1",
        ),
        (
            ("allow_truncated_rejected",),
            lambda c: c.kind != "rankings/1",
            "a ranking has no rejected side, and would prefer a cut answer to those below it; write kind=pairs/1 or"
            " unpaired/1",
        ),
    )

    kind: Literal["pairs/1", "rankings/1", "unpaired/1"] = Field(
        "pairs/1", description="Rows wanted: pairs, one ranking per prompt (by reward), or labelled responses."
    )
    select: Literal["best_vs_worst", "best_vs_random", "gap", "rso", "correct_vs_incorrect", "all"] = Field(
        "best_vs_worst",
        description=(
            "pairs: which. best_vs_worst (da.online_dpo), best_vs_random (a random one of the lower ones: Zephyr, Tulu"
            " 3), gap (rs.rs_dpo), rso (rs.rso), correct_vs_incorrect (da.dpo_nll), all with different rewards."
        ),
    )
    members: Literal["all", "best_and_worst"] = Field(
        "all",
        description=(
            "rankings: the responses of a prompt that are kept; best_and_worst with the scores that they have among all"
            " (SPPO)."
        ),
    )
    tau: float = Field(1.0, gt=0, description="gap: temperature of the reward difference (RS-DPO 1.0).")
    eta: float = Field(
        0.85,
        ge=0.5,
        lt=1,
        description=(
            "gap: keep pairs with sigma((r_i - r_j)/tau) above this (RS-DPO 0.85); lower = more, noisier pairs."
        ),
    )
    rso_beta: float = Field(
        0.5, gt=0, description="rso: temperature of acceptance (RSO 0.5); small = only the best, large = plain samples."
    )
    rso_accept: int = Field(8, ge=2, description="rso: candidates accepted per prompt (RSO 8 of 64).")
    rso_pairs: Literal["first_round", "tournament"] = Field(
        "first_round", description="rso: n/2 pairs of neighbours after shuffling, or n-1 of a knock-out."
    )
    max_pairs_per_prompt: int | None = Field(
        None, ge=1, title="Max pairs per prompt", description="Cap, the first ones in candidate order; empty = all."
    )
    soft_labels: bool = Field(False, description="pairs: write label_prob = sigma((r_w - r_l)/tau) (da.soft_dpo).")
    threshold: float | None = Field(
        None, title="Threshold", description="unpaired: label = reward above this; empty = the verifier's verdict."
    )
    dedupe: bool = Field(True, description="Identical texts of one prompt count once (the first).")
    allow_truncated_rejected: bool = Field(
        False,
        title="Allow truncated rejected",
        description=(
            "Answers cut by the length limit may be rejected (never chosen, or labelled good), and are trained without"
            " an end token; false = they are in no pair."
        ),
    )
    validation_fraction: float = Field(
        0.05,
        ge=0,
        lt=1,
        description="Share of the training prompts in the validation split, where no candidate is in it.",
    )

    @model_validator(mode="after")
    def _possible(self):
        refuse_unread(self, self.READ_WHEN)
        if self.soft_labels and self.select == "correct_vs_incorrect":
            raise ValueError(
                "soft_labels are made of rewards, and select=correct_vs_incorrect goes by the verdicts; write"
                " soft_labels=false, or another select"
            )
        if self.members != "all" and self.kind != "rankings/1":
            raise ValueError(
                f"members={self.members} is for rankings; write kind=rankings/1, or select=best_vs_worst for"
                f" {self.kind}"
            )
        return self


SPEC = StageSpec(
    name="preferences",
    config=Config,
    inputs={
        "candidates": InputSpec(
            "dataset",
            kinds=("candidates/1",),
            many=True,
            doc="Scored candidates; several sets (other models, a teacher) are joined by prompt.",
        )
    },
    outputs={"data": OutputSpec("dataset", doc="pairs/1, rankings/1 or unpaired/1.")},
)


def run(stage):
    from stages.ingestion import curation
    from stages.pairs import CUT_ANSWERS
    from storage.schema import complete_row

    config = stage.config
    groups, everything, unusable = usable(stage)
    counts = {
        "prompts": len(groups),
        "candidates": len(everything),
        "unusable": unusable.total(),
        "rows": 0,
        "prompts_without": 0,
        "accepted": 0,
    }
    if uses_rso(config):
        counts |= {"draws": 0, "passes": 0, "too_few": 0}
    if config.allow_truncated_rejected:
        counts |= {
            "truncated": sum(map(is_cut, (r for rows in groups.values() for r in rows))),
            "truncated_rejected": 0,
        }
    gaps, taken, lengths = [], [], []
    writer = stage.writer("data", config.kind)
    splits = curation.generated_splits((row for rows in groups.values() for row in rows), config.validation_fraction)
    for prompt_id, rows in groups.items():
        made = (
            {"pairs/1": pairs_of, "rankings/1": ranking_of, "unpaired/1": labelled_of}[config.kind](stage, rows, counts)
            if rows
            else []
        )
        counts["prompts_without"] += not made
        counts["rows"] += len(made)
        for row in made:
            if config.allow_truncated_rejected:
                counts["truncated_rejected"] += CUT_ANSWERS in row["extra_json"]
            if config.kind == "pairs/1":
                gaps.append(row["chosen_score"] - row["rejected_score"])
                taken += [row["chosen_score"], row["rejected_score"]]
                lengths.append(characters(row["chosen"]) - characters(row["rejected"]))
        writer.write(
            [
                complete_row(
                    config.kind,
                    {"prompt": rows[0]["prompt"], **row, "group_id": rows[0]["group_id"]},
                    dataset="preferences",
                    source=rows[0]["source"],
                    origin="verifier" if by_verdicts(config) else "ai",
                    split=splits[prompt_id],
                )
                for row in made
            ]
        )
    if not counts["rows"]:
        raise ValueError(why_none(config, groups, counts, unusable))
    writer.close(counts)
    publish(
        stage,
        {
            **counts,
            "rows_per_prompt": counts["rows"] / len(groups),
            "reward": sum(everything) / len(everything),
        },
        gaps,
        taken,
        lengths,
    )


def usable(stage) -> tuple[dict[str, list[dict]], list[float], Counter]:
    """(candidates that can be compared by prompt, their rewards, how many others there are by reason)."""
    from storage.files import canonical_json
    from storage.schema import clean_messages

    groups: dict[str, list[dict]] = {}
    seen, unusable, rewards = set(), Counter(), []
    for name in stage.many("candidates"):
        for row in stage.dataset(f"candidates.{name}" if name else "candidates").iter_rows():
            group = groups.setdefault(row["prompt_id"], [])
            cut = stage.config.allow_truncated_rejected and is_cut(row)
            key = row["prompt_id"], canonical_json(clean_messages(row["completion"])), cut
            repeated = stage.config.dedupe and key in seen
            if (row["kept"] is False and not cut) or row["reward"] is None or repeated:
                unusable[
                    row.get("drop_reason")
                    or ("repeated" if repeated else "without a reward" if row["reward"] is None else "not kept")
                ] += 1
                continue
            seen.add(key)
            group.append(row)
            rewards.append(row["reward"])
    return groups, rewards, unusable


def why_none(config, groups: dict[str, list[dict]], counts: dict, unusable: Counter) -> str:
    """Why no prompt gave a row, and what to write instead."""
    why = ", ".join(f"{n} {reason}" for reason, n in unusable.most_common())
    advice = [
        "raise num_generations or temperature of the sampling",
        *(["its max_completion_length"] if unusable["truncated"] or counts.get("truncated") else []),
        *(
            []
            if config.kind != "pairs/1" or config.select in ("best_vs_worst", "best_vs_random", "all")
            else ["or take select=best_vs_worst"]
        ),
        *(["or a lower eta"] if config.kind == "pairs/1" and config.select == "gap" else []),
    ]
    if counts.get("too_few"):
        most = max(map(len, groups.values()))
        advice = [
            *([f"write rso_accept={most} or less, which is how many a prompt has at most, or"] if most > 1 else []),
            "sample more (RSO: num_generations=64, rso_accept=8)",
        ]
    lack = (
        "none is left"
        if not counts["candidates"]
        else "all of them were cut, and a cut one is never chosen"
        if counts["candidates"] == counts.get("truncated")
        else (
            f"{counts['too_few']} prompts have fewer than rso_accept={config.rso_accept} of them"
            if counts.get("too_few")
            else "no two differ in reward" + f" as select={config.select} asks for" * (config.kind == "pairs/1")
        )
    )
    return (
        f"No prompt gave a row of {config.kind}: of {len(groups)} prompts with {counts['candidates']} usable candidates"
        f" ({why or 'none'} left aside) {lack}; {(' ' if counts.get('too_few') else ', ').join(advice)}."
    )


def publish(stage, summary: dict, gaps: list[float], taken: list[float], lengths: list[int]) -> None:
    """The numbers of the dataset with those of its pairs: reward gaps, rewards taken, differences in length."""
    from stages.reporting.reports import document, facts, histogram

    config = stage.config
    if uses_rso(config):  # of the draws, so that a low rate says that rso_beta lets little but the best through
        summary |= {
            "acceptance_rate": summary["accepted"] / max(summary["draws"], 1),
            "passes_per_prompt": summary["passes"] / max(summary["accepted"] // config.rso_accept, 1),
        }
        if summary["too_few"]:
            stage.warn(
                "too_few_to_accept",
                f"{summary['too_few']} of {summary['prompts']} prompts have fewer than rso_accept={config.rso_accept}"
                " usable candidates and give no pair. Sample more (num_generations), or write a smaller rso_accept.",
            )
    if gaps:
        summary |= {
            "reward_gap/mean": sum(gaps) / len(gaps),
            "reward/used": sum(taken) / len(taken),
            "length_difference/mean": sum(lengths) / len(lengths),
        }
        stage.report(
            "gaps", png=histogram({"reward gap": gaps}, title="Reward gap of the pairs", xlabel="chosen - rejected")
        )
    stage.summary(summary)
    stage.report("summary", markdown=document("Preferences from candidates", facts(summary)))


def characters(messages: list[dict]) -> int:
    return sum(len(message.get("content") or "") for message in messages)


def is_cut(row: dict) -> bool:
    """Whether a candidate is the beginning of an answer that the length limit cut."""
    return row["kept"] is False and row.get("drop_reason") == "truncated" and characters(row["completion"]) > 0


def without_best_cut(rows: list[dict], by_rewards: bool) -> list[dict]:
    """The candidates without the cut ones that are no worse than every whole one: these can only be preferred."""
    best = max((r["reward"] for r in rows if not is_cut(r)), default=None)
    return [r for r in rows if not is_cut(r) or (best is not None and (not by_rewards or r["reward"] < best))]


def made_of(*rows: dict, **more) -> str:
    """``extra_json`` of a row that was made of candidates."""
    from storage.files import canonical_json

    return canonical_json({"from": "candidates/1", "row_ids": [row["row_id"] for row in rows], **more})


def cut_answers(row: dict, column: str) -> dict:
    """What ``extra_json`` says where ``row``, which goes to ``column``, was cut."""
    from stages.pairs import CUT_ANSWERS

    return {CUT_ANSWERS: [column]} if is_cut(row) else {}


def uses_rso(config: Config) -> bool:
    return config.kind == "pairs/1" and config.select == "rso"


def by_verdicts(config: Config) -> bool:
    """Whether the verifier's verdicts say what is better, and not the rewards."""
    if config.kind == "unpaired/1":
        return config.threshold is None
    return config.select == "correct_vs_incorrect"


def pairs_of(stage, rows, counts) -> list[dict]:
    """Pairs of one prompt, which together weigh as much as one candidate. Pairs by verdicts have scores, but neither
    margin nor label_prob: a mixed reward may well be higher for the wrong answer."""
    import math

    from stages import selection
    from storage.schema import provenance

    config, by_reward = stage.config, stage.config.select != "correct_vs_incorrect"
    rows = without_best_cut(rows, by_reward)
    rewards = [r["reward"] for r in rows]
    if config.select == "best_vs_worst":
        pair = selection.best_vs_worst(rewards)
        found = [] if pair is None else [pair]
    elif config.select == "best_vs_random":
        pair = selection.best_vs_random(
            rewards, lambda n: int(stage.rng("best_vs_random", rows[0]["prompt_id"]).integers(n))
        )
        found = [] if pair is None else [pair]
    elif config.select == "gap":
        found = [(i, j) for i, j, _ in selection.gap_pairs(rewards, config.tau, config.eta)]
    elif config.select == "rso":
        found = rso_pairs(stage, rows[0]["prompt_id"], rewards, counts) if rows else []
    elif config.select == "correct_vs_incorrect":
        from stages.ingestion.pairing import correctness_pairs

        found, _ = correctness_pairs([row["correct"] for row in rows])
    else:
        found = [(i, j) for i in range(len(rows)) for j in range(len(rows)) if rewards[i] > rewards[j]]
    found = [(i, j) for i, j in found if not is_cut(rows[i])][: config.max_pairs_per_prompt]
    return [
        {
            "chosen": rows[i]["completion"],
            "rejected": rows[j]["completion"],
            "chosen_score": rewards[i],
            "rejected_score": rewards[j],
            "margin": rewards[i] - rewards[j] if by_reward else None,
            "pairs_in_group": len(found),
            **provenance(rows[i], rows[j]),
            "weight": (rows[i]["weight"] + rows[j]["weight"]) / 2 / len(found),
            "chosen_gen": rows[i]["gen"],
            "rejected_gen": rows[j]["gen"],
            "label_prob": (
                0.5 * (1.0 + math.tanh((rewards[i] - rewards[j]) / (2.0 * config.tau))) if config.soft_labels else None
            ),
            "extra_json": made_of(rows[i], rows[j], **cut_answers(rows[j], "rejected")),
        }
        for i, j in found
    ]


def rso_pairs(stage, prompt_id: str, rewards, counts) -> list[tuple[int, int]]:
    """Pairs among candidates accepted by statistical rejection sampling, labelled by reward; equal rewards give none
    (``rs.rso``).
    """
    from stages import selection

    config = stage.config
    if len(rewards) < config.rso_accept:
        counts["too_few"] += 1
        return []
    rng = stage.rng("rso", prompt_id)
    accepted, draws, passes = selection.rso_select(rewards, config.rso_accept, config.rso_beta, iter(rng.random, None))
    for name, n in (("accepted", len(accepted)), ("draws", draws), ("passes", passes)):
        counts[name] += n
    order = [accepted[i] for i in rng.permutation(len(accepted))]
    if config.rso_pairs == "tournament":
        played, _ = selection.tournament(len(order), lambda a, b: rewards[order[a]] >= rewards[order[b]])
        found = [(order[a], order[b]) for a, b in played]
    else:
        found = [(a, b) if rewards[a] >= rewards[b] else (b, a) for a, b in zip(order[::2], order[1::2])]
    return [(a, b) for a, b in found if rewards[a] > rewards[b]]


def ranking_of(stage, rows, counts) -> list[dict]:
    """One ranking by reward, which weighs as much as one candidate; equal rewards share a rank, and a prompt with one
    reward only gives none.
    """
    from stages.selection import best_vs_worst
    from storage.schema import provenance

    rewards = [r["reward"] for r in rows]
    if stage.config.members == "best_and_worst":
        rows = [rows[i] for i in best_vs_worst(rewards) or ()]
        rewards = [r["reward"] for r in rows]
    levels = sorted(set(rewards), reverse=True)
    if len(levels) < 2:
        return []
    return [
        {
            "completions": [r["completion"] for r in rows],
            "ranks": [levels.index(r) for r in rewards],
            "scores": rewards,
            "gens": [r["gen"] for r in rows],
            **provenance(*rows),
            "extra_json": made_of(*rows),
        }
    ]


def labelled_of(stage, rows, counts) -> list[dict]:
    """Every candidate with a label: the reward against the threshold, else the verifier's verdict."""
    from storage.schema import provenance

    threshold = stage.config.threshold
    if threshold is None and all(r["correct"] is None for r in rows):
        raise ValueError(
            "kind=unpaired/1 needs a label: the candidates have no verifier's verdict, so write threshold=VALUE (label"
            " = reward above it)."
        )
    return [
        {
            "completion": r["completion"],
            "label": bool(r["correct"]) if threshold is None else r["reward"] > threshold,
            "label_kind": "correctness" if threshold is None else "threshold",
            "gen": r["gen"],
            **provenance(r),
            "extra_json": made_of(r, **cut_answers(r, "completion")),
        }
        for r in rows
        if (threshold is not None or r["correct"] is not None)
        and not (is_cut(r) and (r["correct"] if threshold is None else r["reward"] > threshold))
    ]
