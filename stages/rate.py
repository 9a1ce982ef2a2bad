"""rate: a judge reads all answers to a prompt and rates each by aspects, or ranks them (``synth.ultrafeedback``,
``synth.nectar_k``).

    posttrain stage rejection --input model=A --input prompts=PROMPTS --input traits=principles.txt --set trait_of=drawn ...         # once for each model
    posttrain stage rate --input candidates.A=REF --input candidates.B=REF ... --input judge=MODEL                                   # 4 answers a prompt, 4 aspects: ratings/1
    posttrain stage rate --input candidates.A=REF ... --set mode=ranking --set answers_per_prompt=7 --input judge=MODEL              # 7 answers a prompt: rankings/1

``aspects``   each aspect is a request of its own, with all answers of the prompt in an order drawn anew; the score of an answer is the weighted mean of its aspects
``ranking``   one request, answers in a random order, the best first, ties with "="; with ``orders`` of two or more the mean rank counts, which balances what the judge likes by place

The answers of a prompt are drawn from those of all inputs, one of each model before a second of any; what was cut is
left out, and what is empty or the same as another in the eyes of the judge (``view``). A reply that cannot be read is asked for again with what was wrong, then stays an error: its answers
get no rating (its prompt no ranking) and are counted. ``align`` and ``reward_model`` take either kind; ``ingest`` makes
pairs of them with a rule of its own (``pair_mode=best_vs_random min_margin=...``). A killed run continues at its last
complete block and asks a server for nothing twice.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Optional

from pydantic import Field, model_validator

from stages.reward.judging import ERRORS, JUDGE_INPUTS, AskedSettings, Asker, text_of
from stages.settings import PARTED_TRAINING, refuse_unread
from stages.spec import ConfigError, InputSpec, OutputSpec, StageSpec

ASPECTS = {
    "instruction_following": (
        "Does the answer do what was asked, all of it and nothing else, in the form that was asked for?"
    ),
    "truthfulness": "Is what the answer says true, free of contradictions, and is nothing made up?",
    "honesty": (
        "Does the answer say how sure it is and what it does not know, as far as it can be right or wrong about it?"
    ),
    "helpfulness": "Does the answer help whoever asked: is it to the point, complete, and clear?",
}
SHOWN = "{preamble}\n\n[Question]\n{context}\n[End of question]\n\n{answers}"
RATE = (
    "Rate each answer by this aspect alone, {aspect}: {text}\n\nWrite one line for each answer, from answer 1 to answer"
    " {n}, with a whole number from 1 (worst) to {scale} (best) in double brackets and a short reason, such as\nAnswer"
    " 1: [[{example}]] because ..."
)
RANK = (
    "Which answer is best, which next, and so on to the worst? Explain in a few sentences, then write the whole ranking"
    " once, best first, in double brackets, with = between answers that are equally good, such as [[{example}]]."
)
AGAIN = "\n\nYour last reply could not be read: {why}. Reply again in the form that was asked for."
_RATING = re.compile(r"(?im)^\W*answer\W*(\d+)\W*?\[\[\s*(-?\d+(?:\.\d+)?)\s*\]\](.*)$")
_RANKING = re.compile(r"\[\[([\d\s>=]+)\]\]")


class Config(AskedSettings):
    mode: Literal["aspects", "ranking"] = Field(
        "aspects",
        description=(
            "Ratings of each answer by aspects (UltraFeedback), or a ranking of all answers of a prompt (Nectar)."
        ),
    )
    aspects: dict[str, str] = Field(
        ASPECTS, min_length=1, description="aspects: name -> what the judge is asked about it."
    )
    weights: dict[str, float] = Field(
        default_factory=dict,
        description="aspects: share of each in the score, summing to 1; empty: equal shares (data.ratings).",
    )
    scale: int = Field(5, ge=2, le=100, description="aspects: ratings go from 1 to this (UltraFeedback 5).")
    together: bool = Field(
        True,
        description=(
            "aspects: all answers of a prompt in one request, so that they are rated by one measure; false: each by"
            " itself."
        ),
    )
    answers_per_prompt: int = Field(
        4,
        ge=2,
        le=26,
        description=(
            "Answers of each prompt, drawn from all inputs, one of each model first (UltraFeedback 4, Nectar 7,"
            " InstructGPT 4 to 9)."
        ),
    )
    orders: int = Field(
        1,
        ge=1,
        description="Random orders in which answers are shown, each asked about; the mean rating or rank counts.",
    )
    preamble: str = Field(
        "", description="What the judge is told first; empty: to judge impartially, by what, and by what not."
    )
    view: Literal["full", "answer_only"] = Field(
        "answer_only",
        description=(
            "What is shown of an answer: all, or what follows its thought (a judge must not see hidden reasoning)."
        ),
    )
    split: str = Field("", description="Split to judge; empty: all of them.")
    limit: Optional[int] = Field(
        None, ge=1, title="Limit", description="Prompts judged at most, the first ones; empty = all."
    )
    validation_fraction: float = Field(
        0.0, ge=0, lt=1, description="Share of the training prompts in the validation split, where no row is in it."
    )

    @model_validator(mode="after")
    def _possible(self):
        refuse_unread(self, PARTED_TRAINING)
        if self.weights and (
            set(self.weights) != set(self.aspects)
            or abs(sum(self.weights.values()) - 1) > 1e-9
            or min(self.weights.values()) < 0
        ):
            raise ValueError(
                f"weights have one share for each of {', '.join(self.aspects)}, not below 0, and sum to 1; leave them"
                " out for equal shares"
            )
        if self.mode == "ranking" and not self.together:
            raise ValueError("a ranking is of answers that are read together; write together=true, or mode=aspects")
        if self.mode == "ranking" and (self.weights or self.aspects != ASPECTS):
            raise ValueError("mode=ranking asks for no aspects; write what counts into preamble, or write mode=aspects")
        return self

    @property
    def shares(self) -> dict[str, float]:
        return self.weights or dict.fromkeys(self.aspects, 1 / len(self.aspects))


SPEC = StageSpec(
    name="rate",
    config=Config,
    gpu="models",
    inputs={
        "candidates": InputSpec(
            "dataset",
            kinds=("candidates/1",),
            many=True,
            doc="Answers; those of several models (candidates.LABEL) are joined by prompt.",
        ),
        **{name: JUDGE_INPUTS[name] for name in ("judge", "judgements")},
    },
    outputs={
        "data": OutputSpec("dataset", doc="ratings/1 or rankings/1, for reward_model, align and ingest."),
        "judgements": OutputSpec("dataset", doc="judgements/1: every request and answer."),
    },
)


@dataclass
class Group:
    """A prompt and the answers to it that are judged."""

    prompt_id: str
    answers: list[dict]


@dataclass
class Call:
    """One request: the answers ``shown`` (places in the group, in their order) by an aspect ("": the ranking), and the
    rows it left.
    """

    group: Group
    aspect: str
    order: int
    shown: list[int]
    text: str
    rows: list[dict] = field(default_factory=list)

    @property
    def item_id(self) -> str:
        return f"{self.group.prompt_id}:{self.aspect or 'ranking'}" + f":{self.shown[0]}" * (len(self.shown) == 1)


def run(stage):
    config = stage.config
    groups, left_out = read(stage)
    judge = Asker(stage)
    ask(stage, judge, groups)
    found = {(row["item_id"], row["order"]): row for row in judge.rows()}  # of each request the last word counts
    rows, lost, asked = [], Counter(), {row["prompt_id"] for row in found.values()}
    for group in groups:
        if group.prompt_id not in asked:
            lost["prompts over budget"] += 1
            continue
        made = (ratings if config.mode == "aspects" else ranking)(stage, judge, group, found, lost)
        rows += made
    write(stage, rows, lost, groups)
    report(stage, judge, groups, rows, found, left_out, lost)


# -- what is judged ----------------------------------------------------------------------------------------------------


def read(stage) -> tuple[list[Group], Counter]:
    """The prompts of the inputs with the answers drawn for them, and what was left out, by reason. Raises ConfigError
    where no prompt has two answers.
    """
    from stages.verification.responses import view

    config, left_out = stage.config, Counter()
    answers: dict[str, dict[str, dict]] = {}
    for label in sorted(stage.many("candidates")):
        dataset = stage.dataset(f"candidates.{label}" if label else "candidates")
        for row in dataset.iter_rows(split=config.split) if config.split else dataset.iter_rows():
            own = answers.setdefault(row["prompt_id"], {})
            if row["kept"] is False and row["drop_reason"] != "unscorable":  # a judge needs no reward
                left_out[f"answers {row['drop_reason'] or 'not kept'}"] += 1
            elif not (shown := view(text_of(row["completion"]), config.view).strip()):
                left_out["answers empty"] += 1
            elif shown in own:
                left_out["answers the same as another"] += 1
            else:
                own[shown] = row
    groups = []
    for prompt_id, own in answers.items():
        if len(own) < 2:
            left_out["prompts with fewer than two answers"] += 1
            continue
        groups.append(Group(prompt_id, drawn(stage, prompt_id, list(own.values()))))
    groups = groups[: config.limit]
    if not groups:
        why = "; ".join(f"{n} {reason}" for reason, n in left_out.most_common()) or "there are no rows"
        raise ConfigError(
            f"stage rate: no prompt has two answers to compare ({why})"
            + f"; write another split than {config.split!r}" * bool(config.split)
            + "; give candidates of several models, or sample with num_generations=2 or more"
        )
    return groups, left_out


def drawn(stage, prompt_id: str, rows: list[dict]) -> list[dict]:
    """``answers_per_prompt`` of the answers, models in a random order, a second answer of one only when all have
    one.
    """
    rng, by_model = stage.rng("answers", prompt_id), {}
    for i in rng.permutation(len(rows)):
        gen = rows[i]["gen"] or {}
        by_model.setdefault((gen.get("model_id"), gen.get("checkpoint_id")), []).append(rows[i])
    rounds = [own[k] for k in range(max(map(len, by_model.values()))) for own in by_model.values() if k < len(own)]
    return rounds[: stage.config.answers_per_prompt]


def calls_of(stage, group: Group, judge_preamble: str) -> list[Call]:
    """The requests about a prompt."""
    config, n = stage.config, len(group.answers)
    out = []
    for aspect in config.aspects if config.mode == "aspects" else [""]:
        for order in range(config.orders):
            permuted = [int(i) for i in stage.rng("order", group.prompt_id, aspect, order).permutation(n)]
            for shown in [permuted] if config.together else [[i] for i in range(n)]:
                out.append(Call(group, aspect, order, shown, request(stage, group, aspect, shown, judge_preamble)))
    return out


def request(stage, group: Group, aspect: str, shown: Sequence[int], preamble: str) -> str:
    """What the judge is shown and asked: no model is named, and no mark in an answer can open or close a part."""
    from stages.reward.judge import quoted
    from stages.verification.responses import view

    config = stage.config
    answers = "\n\n".join(
        f"[Answer {n}]\n{quoted(view(text_of(group.answers[i]['completion']), config.view))}\n[End of answer {n}]"
        for n, i in enumerate(shown, 1)
    )
    item = SHOWN.format(preamble=preamble, context=quoted(text_of(group.answers[0]["prompt"])), answers=answers)
    if config.mode == "ranking":
        return f"{item}\n\n" + RANK.format(
            example=" > ".join(map(str, [2, 1, *range(3, len(shown) + 1)][: len(shown)]))
        )
    return f"{item}\n\n" + RATE.format(
        aspect=aspect.replace("_", " "),
        text=config.aspects[aspect],
        n=len(shown),
        scale=config.scale,
        example=(config.scale + 1) // 2,
    )


# -- asking and reading ------------------------------------------------------------------------------------------------


def parse_ratings(text: str, n: int, scale: int) -> tuple[list[tuple[int, str]] | None, str]:
    """([(rating, reason) of answers 1..n], "") of a reply, or (None, what is wrong with it): a line for each answer,
    with one whole number in the scale.
    """
    found: dict[int, tuple[int, str]] = {}
    for number, rating, reason in _RATING.findall(text):
        number, value = int(number), float(rating)
        if not 1 <= number <= n:
            return None, f"it rates an answer {number}, and there are {n}"
        if value != int(value) or not 1 <= value <= scale:
            return None, f"{rating} is no whole number from 1 to {scale}"
        if number in found and found[number][0] != int(value):
            return None, f"it rates answer {number} twice, differently"
        found.setdefault(number, (int(value), reason.strip(" \t:-–,.").strip()))
    missing = [str(k) for k in range(1, n + 1) if k not in found]
    return (
        (None, f"it has no rating of answer {', '.join(missing)}")
        if missing
        else ([found[k] for k in range(1, n + 1)], "")
    )


def parse_ranking(text: str, n: int) -> tuple[list[int] | None, str]:
    """([rank of answers 1..n, 0 the best, equal where "=" says so], "") of a reply, or (None, what is wrong with it):
    one ranking of every answer, once.
    """
    found = {
        " ".join(re.sub(r"([>=])", r" \1 ", one).split()) for one in _RANKING.findall(text) if ">" in one or "=" in one
    }
    if len(found) != 1:
        return None, "it has no ranking in double brackets" if not found else "it has two different rankings"
    levels = [[one.strip() for one in level.split("=")] for level in found.pop().split(">")]
    names = [one for level in levels for one in level]
    if any(not one.isdigit() for one in names) or sorted(map(int, names)) != list(range(1, n + 1)):
        return None, f"its ranking does not name each of the answers 1 to {n} once"
    ranks = {int(one): sum(map(len, levels[:k])) for k, level in enumerate(levels) for one in level}
    return [ranks[k] for k in range(1, n + 1)], ""


def ask(stage, judge: Asker, groups: list[Group]) -> None:
    """Ask about every prompt, as :meth:`stages.reward.judging.Asker.each_block` does; every request and reply is a row
    of ``judgements``.
    """
    from stages.reward.judge import IMPARTIAL

    config, preamble = stage.config, stage.config.preamble or IMPARTIAL

    def block(some: list[Group]) -> list[Call]:
        calls = [call for group in some for call in calls_of(stage, group, preamble)]
        answer(stage, judge, calls)
        return calls

    judge.each_block(
        groups,
        block,
        "prompts",
        "prompts",
        "Take another judge, fewer answers_per_prompt, or together=false.",
        {"mode": config.mode, "preamble": preamble, "aspects": config.aspects if config.mode == "aspects" else {}},
    )


def answer(stage, judge: Asker, calls: list[Call]) -> None:
    """Replies to all calls; what cannot be read is asked for again, with what was wrong with it."""
    from storage.files import sha256_text
    from storage.schema import complete_row

    config, waiting, told = stage.config, list(calls), {}
    prompt_id = f"{config.mode}-{sha256_text(SHOWN + (RATE if config.mode == 'aspects' else RANK))[:8]}"
    for attempt in range(config.judge_retries + 1):
        texts = [call.text + (AGAIN.format(why=told[id(call)]) if attempt else "") for call in waiting]
        unread = []
        for call, (key, reply) in zip(waiting, judge._replies(texts, attempt)):
            parsed, why = (None, "") if reply.error else read_reply(config, call, reply)
            error = reply.error or why or None
            given = call.group.answers[call.shown[0]]
            call.rows.append(
                complete_row(
                    "judgements/1",
                    {
                        "item_id": call.item_id,
                        "judge_id": judge.judge_id,
                        "judge_prompt_id": prompt_id,
                        "order": call.order,
                        "raw": reply.text,
                        "verdict": None if parsed is None else json.dumps(parsed),
                        "rating": (
                            float(parsed[0][0])
                            if parsed and config.mode == "aspects" and len(call.shown) == 1
                            else None
                        ),
                        "error": error,
                        "attempt": attempt,
                        "tokens_in": reply.tokens_in,
                        "tokens_out": reply.tokens_out,
                        "cost_usd": judge.cost(reply),
                        "cache_key": key,
                        "prompt_id": call.group.prompt_id,
                        "group_id": given["group_id"],
                        "extra_json": json.dumps(
                            {
                                "shown": [call.group.answers[i]["row_id"] for i in call.shown],
                                "places": call.shown,
                                "aspect": call.aspect or None,
                                **({"cut": True} if reply.cut else {}),
                            },
                            sort_keys=True,
                        ),
                    },
                    dataset="judgements",
                    source=given["source"],
                    origin="ai",
                    split=given["split"],
                )
            )
            if why and not reply.error:
                told[id(call)] = why
                unread.append(call)
        waiting = unread
        if not waiting:
            break


def read_reply(config: Config, call: Call, reply):
    """What a reply says, as :func:`parse_ratings` and :func:`parse_ranking`. In one that was cut a rating counts, which
    stands before its reason, and no ranking, which stands behind an explanation that may be what names it.
    """
    from stages.reward.judge import spoken

    if config.mode == "aspects":
        return parse_ratings(spoken(reply.text), len(call.shown), config.scale)
    found = reply.verdict(lambda text: parse_ranking(spoken(text), len(call.shown)))
    return found or (None, "it was cut before its end")


# -- what comes of it --------------------------------------------------------------------------------------------------


def said_of(group: Group, found: dict, aspect: str, orders: int, together: bool) -> dict[int, list]:
    """{place of an answer: what each order says of it}; an answer of which any order says nothing is not in it."""
    out: dict[int, list] = {}
    for k in range(1 if together else len(group.answers)):
        item_id = f"{group.prompt_id}:{aspect or 'ranking'}" + f":{k}" * (not together)
        calls = [found[item_id, order] for order in range(orders)]
        if any(row["error"] for row in calls):
            continue
        for row in calls:
            for place, one in zip(json.loads(row["extra_json"])["places"], json.loads(row["verdict"])):
                out.setdefault(place, []).append(one)
    return out


def ann_of(judge: Asker, group: Group) -> dict:
    return {"annotator_type": "ai", "annotator_id": judge.judge_id, "judge_id": judge.judge_id}


def ratings(stage, judge: Asker, group: Group, found: dict, lost: Counter) -> list[dict]:
    """``ratings/1`` of a prompt: answers with a rating by every aspect."""
    from stages.ingestion.pairing import overall_scores
    from storage.schema import complete_row, provenance

    config = stage.config
    said = {aspect: said_of(group, found, aspect, config.orders, config.together) for aspect in config.aspects}
    rows = []
    for i, one in enumerate(group.answers):
        if any(i not in own for own in said.values()):
            lost["answers without a rating by every aspect"] += 1
            continue
        mean = {aspect: sum(rating for rating, _ in own[i]) / len(own[i]) for aspect, own in said.items()}
        aspects = [
            {
                "aspect": aspect,
                "score": mean[aspect],
                "rationale": next((reason for _, reason in said[aspect][i] if reason), None),
            }
            for aspect in config.aspects
        ]
        rows.append(
            complete_row(
                "ratings/1",
                {
                    "prompt": one["prompt"],
                    "completion": one["completion"],
                    "score": overall_scores([list(mean.values())], [config.shares[aspect] for aspect in mean])[0],
                    "scale_min": 1.0,
                    "scale_max": float(config.scale),
                    "aspects": aspects,
                    "gen": one["gen"],
                    "ann": ann_of(judge, group),
                    **provenance(one),
                    "extra_json": json.dumps({"of": one["row_id"]}),
                },
                dataset="rated",
                source=one["source"],
                origin="ai",
                split=one["split"],
            )
        )
    return rows


def ranking(stage, judge: Asker, group: Group, found: dict, lost: Counter) -> list[dict]:
    """``rankings/1`` of a prompt by the mean rank over the orders; none where an order could not be read, or all are
    equal.
    """
    from storage.schema import complete_row, provenance

    said = said_of(group, found, "", stage.config.orders, True)
    if len(said) < len(group.answers):
        lost["prompts without a readable ranking"] += 1
        return []
    mean = [sum(said[i]) / len(said[i]) for i in range(len(group.answers))]
    if len(set(mean)) < 2:
        lost["prompts whose answers are all equal"] += 1
        return []
    one = group.answers[0]
    return [
        complete_row(
            "rankings/1",
            {
                "prompt": one["prompt"],
                "completions": [a["completion"] for a in group.answers],
                "ranks": [sum(other < value for other in mean) for value in mean],
                "gens": [a["gen"] for a in group.answers],
                "ann": ann_of(judge, group),
                **provenance(*group.answers),
                "extra_json": json.dumps({"of": [a["row_id"] for a in group.answers], "mean_ranks": mean}),
            },
            dataset="ranked",
            source=one["source"],
            origin="ai",
            split=one["split"],
        )
    ]


def write(stage, rows: list[dict], lost: Counter, groups: list[Group]) -> None:
    from stages.harness import StageFailure
    from stages.ingestion.curation import generated_splits

    if stage.config.validation_fraction:
        splits = generated_splits(rows, stage.config.validation_fraction)
        rows = [{**row, "split": splits[row["prompt_id"]]} for row in rows]
    if not rows:
        raise StageFailure(
            f"Nothing came of {len(groups)} prompts: {', '.join(f'{n} {reason}' for reason, n in lost.most_common())}."
            f" Their judgements are in {stage.workdir.name}/out/judgements; take another judge, or fewer"
            " answers_per_prompt."
        )
    writer = stage.writer("data", "ratings/1" if stage.config.mode == "aspects" else "rankings/1")
    writer.write(rows)
    writer.close(
        {"prompts": len(groups), "rows": len(rows), **{f"lost/{reason}": n for reason, n in sorted(lost.items())}}
    )


def report(
    stage, judge: Asker, groups: list[Group], rows: list[dict], found: dict, left_out: Counter, lost: Counter
) -> None:
    """Scores by model, what the place of an answer is worth to the judge, lengths, errors and cost."""
    import numpy as np

    from stages.reporting.reports import document, facts, histogram, markdown_table, sample_table

    config, everything = stage.config, list(judge.rows())
    errors = sum(bool(row["error"]) for row in found.values())
    by_model: dict[str, list[float]] = {}
    scores, lengths, first = [], [], []
    for row in rows:
        values = (
            [row["score"]]
            if config.mode == "aspects"
            else [(len(row["ranks"]) - 1 - rank) / (len(row["ranks"]) - 1) for rank in row["ranks"]]
        )
        texts = [row["completion"]] if config.mode == "aspects" else row["completions"]
        for gen, value, text in zip([row["gen"]] if config.mode == "aspects" else row["gens"], values, texts):
            by_model.setdefault((gen or {}).get("model_id") or "unknown", []).append(value)
            scores.append(value)
            lengths.append(len(text_of(text)))
    for row in found.values():
        said = None if row["error"] else json.loads(row["verdict"])
        if said and len(said) > 1:
            worth = [one[0] for one in said] if config.mode == "aspects" else [-rank for rank in said]
            first.append(worth[0] - sum(worth) / len(worth))
    name = "score" if config.mode == "aspects" else "rank_share"
    summary = {
        "prompts": len(groups),
        "answers": sum(len(group.answers) for group in groups),
        "rows": len(rows),
        "judge/calls": len(everything),
        "judge/error_rate": errors / len(found),
        "judge/tokens_in": sum(row["tokens_in"] for row in everything),
        "judge/tokens_out": sum(row["tokens_out"] for row in everything),
        "judge/cost_usd": judge.paid(everything),
        **({"judge/first_place": float(np.mean(first))} if first else {}),
        **{f"{name}/{model}": float(np.mean(own)) for model, own in sorted(by_model.items())},
        **(
            {
                f"aspect/{aspect}": float(
                    np.mean([one["score"] for row in rows for one in row["aspects"] if one["aspect"] == aspect])
                )
                for aspect in config.aspects
            }
            if config.mode == "aspects"
            else {}
        ),
        **(
            {f"length_correlation/{name}": float(np.corrcoef(scores, lengths)[0, 1])}
            if np.std(scores) and np.std(lengths)
            else {}
        ),
        **{f"left_out/{reason}": n for reason, n in sorted(left_out.items())},
        **{f"lost/{reason}": n for reason, n in sorted(lost.items())},
    }
    stage.summary(summary)
    if errors > ERRORS * len(found):
        stage.warn(
            "judge_errors",
            f"{errors} of {len(found)} requests have no readable answer ({errors / len(found):.0%}); what they are"
            " about is left out. Read why in judgements; give the judge more room (judge_tokens) or time, or take another one.",
        )
    table = [
        {"model": model, "answers": len(own), name: round(float(np.mean(own)), 3)}
        for model, own in sorted(by_model.items(), key=lambda item: -np.mean(item[1]))
    ]
    shown = [
        (
            {
                "prompt": text_of(row["prompt"]),
                "answer": text_of(row["completion"]),
                "score": row["score"],
                **{one["aspect"]: one["score"] for one in row["aspects"]},
            }
            if config.mode == "aspects"
            else {"prompt": text_of(row["prompt"]), "best": text_of(row["completions"][row["ranks"].index(0)])}
        )
        for row in rows[:12]
    ]
    if config.mode == "aspects":
        stage.report("scores", png=histogram({"score": scores}, title="Scores", xlabel="weighted mean of the aspects"))
    stage.report(
        "summary",
        markdown=document(
            "Answers rated by a judge" if config.mode == "aspects" else "Answers ranked by a judge",
            facts(summary),
            ("Models", markdown_table(table)),
            ("Samples", sample_table(shown)),
        ),
    )
