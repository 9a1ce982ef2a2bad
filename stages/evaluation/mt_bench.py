"""MT-Bench: questions of several turns, each answer rated 1 to 10 by a judge (eval.mt_bench; Zheng et al. 2023).

Prompts are questions with a column ``turns`` (ingestion keeps it in ``extra_json``). A later turn follows the policy's
own answers, token for token. Math, reasoning and coding are rated beside the question's ``reference`` answers. A rating
that cannot be read is missing: in no mean, and counted.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from stages.evaluation.asked import MTBench
from stages.evaluation.scores import Metric, average, cluster_of, counted
from stages.measures import suites

#: Temperatures of the categories; 0 for all others.
TEMPERATURES = {"writing": 0.7, "roleplay": 0.7, "stem": 0.1, "humanities": 0.1}
GUIDED = ("math", "reasoning", "coding")

_SCALE = (
    "{task} First explain your opinion in a few sentences. Then end strictly with the rating, a whole number from 1 to"
    " 10 in double brackets, for example [[5]]."
)
TASK = "Rate the answer to the last message of the question; earlier messages are what it has to follow."
GUIDED_TASK = (
    "Rate whether the answer to the last message of the question is right and helpful: compare it with the reference"
    " answer and name its mistakes."
)
AGAIN = (
    "\n\nYour last reply could not be read: it held no rating from 1 to 10, or two different ones. Reply again, and end"
    " strictly with the rating as [[5]]."
)


@dataclass
class Talk:
    """A question on its way: ``ids`` is what the next turn is sampled from, ``messages`` what a judge reads before an
    answer, without thoughts.
    """

    row: dict
    turns: list[str]
    references: list[str]
    ids: list[int]
    messages: list[dict]
    answers: list = field(default_factory=list)  # a Sample per answered turn
    stopped: str | None = None


def questions_of(row: dict) -> tuple[list[str], list[str]]:
    """(what each turn asks, reference answers by turn, empty where there is none) of a prompt row."""
    extra = json.loads(row["extra_json"]) if row.get("extra_json") else {}
    extra = extra if isinstance(extra, dict) else {}
    turns, references = extra.get("turns"), extra.get("reference") or []
    turns = [str(turn) for turn in turns] if isinstance(turns, list) and turns else [row["prompt"][-1]["content"] or ""]
    references = [references] if isinstance(references, str) else references
    return turns, [str(one or "") for one in references][: len(turns)]


def check(rows: Sequence[dict]) -> None:
    """Refuse prompts of one turn each, which are no MT-Bench."""
    from stages.spec import ConfigError

    if not any(len(questions_of(row)[0]) > 1 for row in rows):
        raise ConfigError(
            "evaluate: mt_bench asks questions of several turns, and no prompt has a second one; give MT-Bench's"
            " question file, or prompts with a column turns (a list of what each turn asks), or leave mt_bench out"
        )


def temperature_of(row: dict, settings: MTBench) -> float:
    return 0.0 if settings.temperatures == "greedy" else TEMPERATURES.get(row.get("category") or "", 0.0)


def request(talk: Talk, turn: int, answer: str) -> str:
    """What the judge reads of one answer."""
    from stages.reward.judge import ONE, QUESTION, quoted
    from stages.reward_models.reward_heads import transcript

    context = QUESTION.format(context=quoted(transcript(talk.messages[: len(talk.row["prompt"]) + 2 * turn])))
    reference = ""
    if talk.row.get("category") in GUIDED and turn < len(talk.references) and talk.references[turn]:
        told = "\n\n".join(
            f"To message {k + 1}: {one}" if turn else one for k, one in enumerate(talk.references[: turn + 1]) if one
        )
        reference = f"\n\n[Reference answer]\n{quoted(told)}\n[End of reference answer]"
    return (
        context
        + reference
        + ONE.format(a=quoted(answer))
        + "\n\n"
        + _SCALE.format(task=GUIDED_TASK if reference else TASK)
    )


def answers(plan, part: Sequence[tuple[dict, list[int]]]) -> list[dict]:
    """``eval_samples/1`` rows of one chunk of questions: mode ``turn``, a row per turn, with ``rating`` and what the
    judge wrote.
    """
    from stages.decoding.engines import make_engine
    from stages.generation import Sample, sample_groups, sampling_params, warn_of_failures
    from stages.reward.judge import parse_rating
    from stages.verification.responses import view

    stage, config, settings = plan.stage, plan.config, plan.config.mt_bench
    sampler = plan._once("sampler", lambda: make_engine(stage, plan.renderer, plan.policy))
    params = sampling_params(config, plan.renderer)
    talks = [Talk(row, *questions_of(row), ids, list(row["prompt"])) for row, ids in part]
    for turn in range(max(len(talk.turns) for talk in talks)):
        asked = [
            talk
            for talk in talks
            if turn < len(talk.turns) and not talk.stopped and (turn == 0 or _ask_next(plan, talk, turn))
        ]
        for temperature in sorted({temperature_of(talk.row, settings) for talk in asked}):
            group = [talk for talk in asked if temperature_of(talk.row, settings) == temperature]
            drawn = replace(
                params, temperature=temperature, **({} if temperature else {"top_p": 1.0, "top_k": 0, "min_p": 0.0})
            )
            made = sample_groups(
                sampler,
                [(talk.row, talk.ids) for talk in group],
                drawn,
                [[stage.seed_for("mt_bench", talk.row["row_id"], turn)] for talk in group],
            )
            for talk, (sample,) in zip(group, made):
                talk.answers.append(sample)
                talk.stopped = sample.error
        warn_of_failures(stage, sampler, [talk.answers[turn] for talk in asked])
    said = [(talk, turn, sample) for talk in talks for turn, sample in enumerate(talk.answers) if sample.error is None]
    judge = plan._once("mt_bench", lambda: settings.load("mt_bench", stage.inputs, stage.device))
    found = settings.ask(
        judge,
        [request(talk, turn, view(sample.seen, "answer_only")) for talk, turn, sample in said],
        parse_rating,
        AGAIN,
    )
    ratings = {(id(talk), turn): one for (talk, turn, _), one in zip(said, found)}
    rows = []
    for talk in talks:
        for turn, question in enumerate(talk.turns):
            sample = (
                talk.answers[turn]
                if turn < len(talk.answers)
                else Sample(talk.row, talk.ids, 0, [], None, "error", "", error=talk.stopped)
            )
            rating, judgement = ratings.get((id(talk), turn), (None, None))
            extra = {
                "mode": "turn",
                "turn": turn + 1,
                "finish": sample.finish_reason,
                "category": talk.row.get("category"),
                "prompt": question,
                "rating": rating,
                "judgement": judgement,
                "temperature": temperature_of(talk.row, settings),
                "reencoded": sample.reencoded or None,
                "error": sample.error,
            }
            rows.append(plan._row(talk.row, "turn", turn, sample.text, len(sample.ids), extra))
    return rows


def given(plan, part: Sequence[tuple[dict, list[int]]]) -> list[dict]:
    """:func:`answers` of answers that somebody else made: rows of the same form, of the given turns."""
    from stages.reward.judge import parse_rating
    from stages.verification.responses import view

    stage, settings, said = plan.stage, plan.config.mt_bench, []
    for row, ids in part:
        talk = Talk(row, *questions_of(row), ids, list(row["prompt"]))
        for turn, text in enumerate(plan.given.turns(row, len(talk.turns))):
            said.append((talk, turn, text))
            answer = {"role": "assistant", "content": view(text, "answer_only")}
            talk.messages += [answer, *({"role": "user", "content": one} for one in talk.turns[turn + 1 : turn + 2])]
    judge = plan._once("mt_bench", lambda: settings.load("mt_bench", stage.inputs, stage.device))
    asked = [request(talk, turn, view(text, "answer_only")) for talk, turn, text in said]
    rows = []
    for (talk, turn, text), (rating, judgement) in zip(said, settings.ask(judge, asked, parse_rating, AGAIN)):
        extra = {
            "mode": "turn",
            "turn": turn + 1,
            "category": talk.row.get("category"),
            "prompt": talk.turns[turn],
            "rating": rating,
            "judgement": judgement,
            "characters": len(text),
        }
        rows.append(plan._row(talk.row, "turn", turn, text, 0, extra))
    return rows


def _ask_next(plan, talk: Talk, turn: int) -> bool:
    """Put the last answer and the next question behind what was sampled; False, and why, where the model has no
    positions left.
    """
    from stages.verification.responses import view

    sample = talk.answers[-1]
    question = {"role": "user", "content": talk.turns[turn]}
    talk.messages += [{"role": "assistant", "content": view(sample.seen, "answer_only")}, question]
    closed = bool(sample.ids) and sample.ids[-1] == plan.renderer.turn_end_id
    talk.ids = [*sample.prompt_ids, *sample.ids, *plan.renderer.observation_ids([question], closed)]
    if plan.positions is not None and len(talk.ids) + plan.config.max_completion_length > plan.positions:
        talk.stopped = (
            f"turn {turn + 1}: {len(talk.ids)} tokens of question and answers leave no room for"
            f" max_completion_length={plan.config.max_completion_length} in {plan.positions} positions"
        )
    return not talk.stopped


def protocol(plan) -> dict:
    """What the ratings depend on besides the judge's weights."""
    from stages.reward.judge import ONE, QUESTION
    from storage.files import sha256_text

    if plan.config.mt_bench is None:
        return {}
    return {
        "mt_bench": (
            plan.config.mt_bench.model_dump(mode="json", exclude={"timeout_s"})
            | plan.config.mt_bench.identity()  # a server by its model, wherever it is
            | {"template": sha256_text("".join((QUESTION, ONE, _SCALE, TASK, GUIDED_TASK, AGAIN)))[:12]}
        )
    }


# -- metrics -----------------------------------------------------------------------------------------------------------


def metrics(records: Sequence[dict], seed: int = 0) -> dict[str, Metric]:
    """``mt_bench`` (mean over all rated turns), ``mt_bench/turn=N``, ``mt_bench/category=NAME``,
    ``mt_bench_missing_rate``; and length and truncation of the answers.
    """
    turns = [r for r in records if r["mode"] == "turn"]
    if not turns:
        return {}
    found: dict[str, Metric] = {}
    by_question: dict[str, list] = {}
    for r in sorted(turns, key=lambda r: r["turn"]):
        by_question.setdefault(r["item_id"], []).append(r.get("rating"))
    means = suites.mt_bench(by_question, missing=None)

    def add(name: str, part: Sequence[dict], value: float | None = None) -> None:
        rated = [(r["rating"], cluster_of(r)) for r in part if r.get("rating") is not None]
        if rated:
            metric = average(*map(list, zip(*rated)), seed)
            found[name] = metric if value is None else replace(metric, value=value)

    add("mt_bench", turns, means["overall"])
    for number in sorted({r["turn"] for r in turns}):
        add(f"mt_bench/turn={number}", [r for r in turns if r["turn"] == number], means[f"turn{number}"])
    for category in sorted({r["category"] for r in turns if r.get("category")}):
        add(f"mt_bench/category={category}", [r for r in turns if r.get("category") == category])
    found["mt_bench_missing_rate"] = Metric(means["n_missing"] / len(turns), len(turns))
    answered = [r for r in turns if not r.get("error") and counted(r)]
    if answered:
        found["length_mean"] = average([float(r["tokens"]) for r in answered], [cluster_of(r) for r in answered], seed)
        found["truncation_rate"] = Metric(sum(r["finish"] == "length" for r in answered) / len(answered), len(answered))
    return found


def table(metrics: dict[str, Metric], records: Sequence[dict]) -> list[dict]:
    """Rows {category, turn 1, turn 2 ..., all, low, high, rated} of the report."""
    turns = [r for r in records if r["mode"] == "turn"]
    rows = []
    for category in [*sorted({r["category"] for r in turns if r.get("category")}), ""]:
        whole = metrics.get(f"mt_bench/category={category}" if category else "mt_bench")
        if whole is None:
            continue
        row = {"category": category or "all"}
        for number in sorted({r["turn"] for r in turns}):
            own = [
                r["rating"]
                for r in turns
                if r["turn"] == number
                and (not category or r.get("category") == category)
                and r.get("rating") is not None
            ]
            row[f"turn {number}"] = sum(own) / len(own) if own else None
        rows.append(row | {"mean": whole.value, "low": whole.low, "high": whole.high, "rated": whole.n})
    return rows


def warn(stage, records: Sequence[dict], rows: Sequence[dict]) -> None:
    """Say which ratings are missing and why, and how many questions that are rated by a reference have none. ``rows``:
    the prompts.
    """
    turns = [r for r in records if r["mode"] == "turn"]
    if not turns:
        return
    lost = [r for r in turns if r.get("rating") is None]
    if lost:
        why = [
            r.get("error") or "the judge's answer held no rating from 1 to 10, or two, or was cut (judge_tokens)"
            for r in lost
        ]
        stage.warn(
            "ratings_missing",
            f"{len(lost)} of {len(turns)} turns have no rating and are in no mean; most often:"
            f" {max(why, key=why.count)}. Give the judge more room (judge_tokens) or time, or take another one.",
        )
    asked = [questions_of(row) for row in rows if row.get("category") in GUIDED]
    bare = sum(len(references) < len(questions) or not all(references) for questions, references in asked)
    if bare:
        stage.warn(
            "references_missing",
            f"{bare} of {len(asked)} questions of {', '.join(GUIDED)} lack the reference answer of a turn, which is"
            " then rated without. Add a column reference with an answer per turn.",
        )
