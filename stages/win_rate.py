"""win_rate: how often one model's answers are better than another's, by a judge, a reward model, or judgements that
were recorded (``eval.win_rate``).

    posttrain stage win_rate --input answers.new=SAMPLES --input answers.old=SAMPLES --input prompts=PROMPTS --input
    judge=MODEL --set baseline=old posttrain stage win_rate --input recorded=alpaca_eval_annotations.json

Answers come from ``evaluate`` (its samples), ``rejection`` (candidates), or a file of answers (``instruction`` and
``output``, as AlpacaEval's), and are matched by prompt. A judge sees both orders (stages/reward/judging.py); a reward
model's opinion is sigma(r_A - r_B). Against a ``baseline`` every other model has a win rate, without one every model
meets every other. Reported: wins with ties as half, and their error by cluster of prompts; the length-controlled rate
(``eval.alpacaeval_lc``) and one controlled for style; rates by category and by tercile of the difference in length; how
far the judge can be trusted (``eval.judge_bias``); with more than two models, or with five verdicts
(``eval.arena_hard``), Bradley-Terry strengths with bootstrap intervals, and Elo. What could not be judged or matched is
counted and in no rate.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import combinations
from typing import Literal, Optional

from pydantic import Field

from stages.generation import UNANSWERED
from stages.ingestion.plain import read_rows
from stages.reward.judging import (
    IDENTICAL,
    JUDGE_INPUTS,
    Item,
    JudgeSettings,
    Opinion,
    PairJudge,
    judge_metrics,
    text_of,
    verdict_of,
    warn_about_judge,
)
from stages.spec import ConfigError, InputSpec, OutputSpec, StageSpec

ANSWERS = ("demonstrations/1", "eval_samples/1", "candidates/1")
NEVER_GIVEN = "answers that an engine or server failed to give"
UNPAIRED = "answers beyond as many as the other model has"


class Config(JudgeSettings):
    baseline: str = Field(
        "",
        description=(
            "Name of the model that all others are compared with; empty: the input answers.baseline where there is one,"
            " or the model that all recorded judgements share, else every model meets every other."
        ),
    )
    answers: Literal["auto", "greedy", "sample"] = Field(
        "auto", description="Which of a model's samples: greedy, sampled, or greedy where all models have them."
    )
    max_samples: int = Field(
        1,
        ge=1,
        description="Sampled answers of each prompt at most; the k-th of one model meets the k-th of the other.",
    )
    split: str = Field("", description="Split of the answers; empty: all of them.")
    limit: Optional[int] = Field(
        None, ge=1, title="Limit", description="Prompts used at most, the first that all models answered; empty = all."
    )
    length_l2: float = Field(
        0.0,
        ge=0,
        description=(
            "Ridge on the length (and difficulty) term of the length-controlled rate, for data that it separates"
            " (shipped 0; 3 with instruction_difficulty comes near AlpacaEval's published rates)."
        ),
    )
    instruction_difficulty: bool = Field(
        False,
        description=(
            "Length-controlled rate with each prompt's difficulty, estimated from the other models (at least two on the"
            " same prompts; AlpacaEval 2.0)."
        ),
    )
    bootstrap: int = Field(
        1000,
        ge=10,
        description=(
            "Resamples of the prompts behind the intervals of Bradley-Terry strengths, and, 200 at most, of the"
            " length-controlled rate."
        ),
    )


SPEC = StageSpec(
    name="win_rate",
    config=Config,
    gpu="models",
    inputs={
        "answers": InputSpec(
            "file",
            required=False,
            many=True,
            doc="Answers of each model, as answers.NAME: samples of evaluate, candidates, or a file of answers.",
        ),
        "prompts": InputSpec(
            "dataset",
            kinds=("prompts/1",),
            required=False,
            doc="The prompts that samples of evaluate answer, with their categories.",
        ),
        "recorded": InputSpec(
            "file",
            required=False,
            doc=(
                "Recorded judgements, instead of answers and a judge: AlpacaEval annotations, or comparisons with the "
                "models' names."
            ),
        ),
        "reward_model": InputSpec("model", required=False, doc="Judges instead of a language model."),
        **JUDGE_INPUTS,
    },
    outputs={
        "battles": OutputSpec("dataset", doc="battles/1: every judged item, both orders in one (order 0)."),
        "scores": OutputSpec("dataset", doc="eval_scores/1: every rate with its error."),
        "judgements": OutputSpec(
            "dataset", required=False, doc="judgements/1: every request and answer, or every reward."
        ),
    },
)


def run(stage):
    config = stage.config
    asking = [
        name
        for name, given in (
            ("judge", stage.has("judge") or bool(config.endpoint)),
            ("reward_model", stage.has("reward_model")),
            ("recorded", stage.has("recorded")),
        )
        if given
    ]
    if len(asking) != 1 or bool(stage.many("answers")) == stage.has("recorded"):
        raise ConfigError(
            "stage win_rate: give answers.NAME=... of two models or more and one judge (judge=MODEL, endpoint=URL or"
            " reward_model=MODEL), or recorded=FILE alone (given:"
            f" {', '.join([*sorted(stage.inputs), *['endpoint'] * bool(config.endpoint)]) or 'nothing'})"
        )
    if stage.has("recorded"):
        items, opinions, baseline, left_out, metrics = *recorded(stage), {}
    else:
        items, baseline, left_out = matched(stage)
        referee = RewardReferee(stage) if stage.has("reward_model") else PairJudge(stage)
        referee.run(items)
        opinions = referee.opinions(items)
        metrics = {} if stage.has("reward_model") else judge_metrics(items, opinions, referee)
    if all(found.p_a is None for found in opinions):
        raise ConfigError(
            f"stage win_rate: none of {len(items)} pairs of answers could be judged; most often:"
            f" {Counter(found.why for found in opinions).most_common(1)[0][0]}"
        )
    conclude(stage, items, opinions, baseline, left_out, metrics)


# -- who meets whom ----------------------------------------------------------------------------------------------------


def matched(stage) -> tuple[list[Item], str, Counter]:
    """(an item for each pair of models, prompt and sample; the baseline or an empty text; what was left out, by
    reason).
    """
    config, left_out = stage.config, Counter()
    sets = {name: _answers(stage, name, left_out) for name in sorted(stage.many("answers"))}
    if "" in sets or len(sets) < 2:
        raise ConfigError(
            "stage win_rate: answers of two models or more are compared, each by its name: --input answers.new=..."
            " --input answers.old=..."
        )
    baseline = _baseline(config.baseline or ("baseline" if "baseline" in sets else ""), sets)
    prompts = {row["prompt_id"]: row for row in stage.dataset("prompts").iter_rows()} if stage.has("prompts") else {}
    greedy = (
        config.answers == "greedy"
        or config.answers == "auto"
        and all(any(own["greedy"] for own in found.values()) for found in sets.values())
    )
    chosen = {
        name: {key: (own["greedy"] if greedy else own["sample"])[: config.max_samples] for key, own in found.items()}
        for name, found in sets.items()
    }
    every = list(dict.fromkeys(key for found in chosen.values() for key, own in found.items() if own))
    common = [key for key in every if all(found.get(key) for found in chosen.values())]
    if not common:
        raise ConfigError(
            f"stage win_rate: no prompt has {'a greedy' if greedy else 'a sampled'} answer of each of"
            f" {', '.join(sets)}; give answers to the same prompts, or another value of answers="
        )
    left_out["prompts that not all models answered"] += len(every) - len(common)
    if len(every) > len(common):
        stage.warn(
            "unmatched_prompts",
            f"{len(every) - len(common)} of {len(every)} prompts are not answered by all models and are left out. Give"
            " answers of every model to the same prompts.",
        )
    items = []
    for key in common[: config.limit]:
        prompt = _prompt(key, prompts, [chosen[name][key][0] for name in sets])
        for model_a, model_b in _meetings(sets, baseline):
            left_out[UNPAIRED] += abs(len(chosen[model_a][key]) - len(chosen[model_b][key]))
            for k, (one, two) in enumerate(zip(chosen[model_a][key], chosen[model_b][key])):
                row = {
                    "model_a": model_a,
                    "model_b": model_b,
                    "item": f"{key}:{k}",
                    "prompt_id": key,
                    "group_id": one["group_id"],
                    "split": one["split"],
                    "source": one["source"],
                    "category": (prompts.get(key) or {}).get("category") or one["category"] or two["category"],
                    "cut": (one["cut"], two["cut"]),
                }
                items.append(Item(f"{model_a}:{model_b}:{key}:{k}", prompt, one["answer"], two["answer"], row))
    if left_out[UNPAIRED]:
        stage.warn(
            "unequal_samples",
            f"{left_out[UNPAIRED]} answers meet none, since the other model has fewer to their prompts, and are left"
            " out; sample as many of every model.",
        )
    return items, baseline, left_out


def _answers(stage, name: str, left_out: Counter) -> dict[str, dict]:
    """{prompt id: {"greedy": [...], "sample": [...]}} of one model, each answer {answer, prompt (messages or None),
    text, category, group_id, split, source}.
    """
    from stages.evaluation.scores import cut

    found: dict[str, dict] = {}
    for kind, row in read_rows(stage, f"answers.{name}" if name else "answers", ANSWERS, left_out):
        if stage.config.split and row["split"] != stage.config.split:
            continue
        one = {
            "category": row.get("category"),
            "group_id": row["group_id"],
            "split": row["split"],
            "source": row["source"],
            "prompt": None,
            "text": None,
            "at": 0,
            "mode": "sample",
            "cut": False,  # as far as is known
        }
        if kind == "eval_samples/1":
            extra = json.loads(row["extra_json"] or "{}")
            if extra.get("mode") not in ("sample", "greedy"):
                continue
            if extra.get("error"):
                left_out[NEVER_GIVEN] += 1
                continue
            one |= {
                "answer": [{"role": "assistant", "content": row["output"]}],
                "text": extra.get("prompt"),
                "at": row["sample_idx"],
                "mode": extra["mode"],
                "category": extra.get("category"),
                "cut": cut({"finish": extra.get("finish")}),
            }
        elif kind == "candidates/1":
            if row["drop_reason"] in UNANSWERED:  # no answer is not a bad one
                left_out[NEVER_GIVEN] += 1
                continue
            one |= {"answer": row["completion"], "prompt": row["prompt"], "at": row["completion_idx"]}
        else:
            turn = row["train_turns"][-1] if row["train_turns"] else len(row["messages"])
            one |= {"answer": row["messages"][turn:], "prompt": row["messages"][:turn]}
            row = {**row, "prompt_id": _id(row["messages"][:turn])}
        if one["answer"]:
            one["answer"] = _shown(
                one["answer"], kind == "eval_samples/1" and bool(extra.get("opened")), stage.config.view
            )
            found.setdefault(row["prompt_id"], {"greedy": [], "sample": []})[one["mode"]].append(one)
    for own in found.values():
        for answers in own.values():
            answers.sort(key=lambda one: one["at"])
    return found


def _shown(answer: list[dict], opened: bool, which: str) -> list[dict]:
    """An answer's messages as the judge is shown them, so that lengths and style are of that: under
    ``view=answer_only`` the last one without its thought.
    """
    from stages.generation import seen
    from stages.verification.responses import view

    text = answer[-1].get("content")
    return (
        answer
        if which == "full" or not text
        else [*answer[:-1], {**answer[-1], "content": view(seen(text, opened), which)}]
    )


def _id(messages: list[dict]) -> str:
    from storage.schema import prompt_id

    return prompt_id(messages)


def _prompt(key: str, prompts: dict[str, dict], answers: Sequence[dict]) -> list[dict]:
    """The messages that answers are to: of the input `prompts`, of an answer that has them, or a last message that is
    the whole prompt.
    """
    if key in prompts:
        return prompts[key]["prompt"]
    given = next((one["prompt"] for one in answers if one["prompt"] is not None), None)
    if given is None:
        text = next((one["text"] for one in answers if one["text"] is not None), "")
        given = [{"role": "user", "content": text}]
        if _id(given) != key:
            raise ConfigError(
                "stage win_rate: samples hold only the last message of a conversation, and a judge must see all of it;"
                " give --input prompts=PROMPTS, the prompts that were evaluated"
            )
    return given


def _baseline(name: str, models: Iterable[str]) -> str:
    if name and name not in models:
        raise ConfigError(f"stage win_rate: baseline={name!r} is none of the models; write one of {', '.join(models)}")
    return name


def _meetings(models: Iterable[str], baseline: str) -> list[tuple[str, str]]:
    return [(name, baseline) for name in models if name != baseline] if baseline else list(combinations(models, 2))


def recorded(stage) -> tuple[list[Item], list[Opinion], str, Counter]:
    """(items, their recorded opinions, baseline, what was left out) of comparisons that name the models. The same two
    answers judged again are one item: the mean.
    """
    from stages.ai_labels import comparison_p_a

    left_out: Counter = Counter()
    rows = [
        row
        for _, row in read_rows(stage, "recorded", ("comparisons/1",), left_out)
        if not stage.config.split or row["split"] == stage.config.split
    ]
    named = [row for row in rows if all((row.get(f"gen_{side}") or {}).get("model_id") for side in "ab")]
    left_out["recorded judgements without the models' names"] += len(rows) - len(named)
    models = sorted({row[f"gen_{side}"]["model_id"] for row in named for side in "ab"})
    if len(models) < 2:
        raise ConfigError(
            "stage win_rate: the input recorded names fewer than two models; give comparisons with model_a and model_b"
            " (AlpacaEval: generator_1 and generator_2)"
        )
    shared = [
        name for name in models if all(name in (row["gen_a"]["model_id"], row["gen_b"]["model_id"]) for row in named)
    ]
    baseline = _baseline(stage.config.baseline or (shared[0] if len(shared) == 1 else ""), models)
    items, votes, answers = {}, {}, {}
    for row in named:
        sides, p = [(row[f"gen_{side}"]["model_id"], row[f"response_{side}"]) for side in "ab"], comparison_p_a(row)
        if sides[0][0] == sides[1][0] or (baseline and baseline not in (sides[0][0], sides[1][0])):
            left_out[
                (
                    "recorded judgements of a model with itself"
                    if sides[0][0] == sides[1][0]
                    else "recorded judgements without the baseline"
                )
            ] += 1
            continue
        if sides[0][0] == baseline or (not baseline and sides[0][0] > sides[1][0]):
            sides, p = sides[::-1], 1.0 - p
        (model_a, a), (model_b, b) = sides
        kept = {
            "model_a": model_a,
            "model_b": model_b,
            "prompt_id": row["prompt_id"],
            "group_id": row["group_id"],
            "split": row["split"],
            "source": row["source"],
            "category": row["source"],
            "judge_id": (
                (row.get("ann") or {}).get("judge_id") or (row.get("ann") or {}).get("annotator_type") or "recorded"
            ),
        }
        meeting = f"{model_a}:{model_b}:{row['prompt_id']}"
        own = answers.setdefault(meeting, {})
        key = f"{meeting}:{own.setdefault((text_of(a), text_of(b)), len(own))}"
        kept["item"] = key.removeprefix(f"{model_a}:{model_b}:")
        items.setdefault(key, Item(key, row["prompt"], a, b, kept))
        votes.setdefault(key, []).append(p)
    left_out["the same two answers again, averaged"] += sum(len(own) - 1 for own in votes.values())
    prompts = list(dict.fromkeys(item.row["prompt_id"] for item in items.values()))[: stage.config.limit]
    found = [item for item in items.values() if item.row["prompt_id"] in set(prompts)]
    return found, [Opinion(sum(votes[item.item_id]) / len(votes[item.item_id])) for item in found], baseline, left_out


class RewardReferee:
    """A reward model as judge: P(A) = sigma(r_A - r_B). Every reward is a row of the output ``judgements`` (order 0: of
    the item's first answer, 1: of its second).
    """

    def __init__(self, stage):
        self.stage, self.judge_id = stage, f"reward:{stage.inputs['reward_model'].digest[:16] or 'local'}"
        if unread := [name for name in ("principles", "judgements") if stage.has(name)]:
            raise ConfigError(
                f"stage win_rate: a reward model reads no {' and no '.join(unread)}; leave the input out, or give"
                " judge=MODEL"
            )

    def run(self, items: Sequence[Item]) -> None:
        from stages.reward_models.reward_eval import margins_of
        from stages.reward_models.reward_scorers import Response, load_scorer
        from stages.running.blocks import remaining_blocks
        from storage.schema import complete_row

        stage, config = self.stage, self.stage.config
        writer = stage.writer("judgements", "judgements/1", meta={"judge": self.judge_id})
        scorer = None
        for _, block in remaining_blocks(stage, items, config.block, "pairs"):
            scorer = scorer or load_scorer(stage.path("reward_model"), stage.device)
            margins, scores = margins_of(
                scorer, [(Response(item.prompt, item.a), Response(item.prompt, item.b)) for item in block]
            )
            scores = [(float(m) / 2, -float(m) / 2) for m in margins] if scores is None else scores.tolist()
            for item, both in zip(block, scores):
                for order, value in enumerate(both):
                    right = math.isfinite(value)
                    writer.write(
                        [
                            complete_row(
                                "judgements/1",
                                {
                                    "item_id": item.item_id,
                                    "judge_id": self.judge_id,
                                    "judge_prompt_id": "reward",
                                    "order": order,
                                    "raw": "",
                                    "rating": value if right else None,
                                    "error": None if right else scorer.why_not,
                                    "attempt": 0,
                                    "tokens_in": 0,
                                    "tokens_out": 0,
                                    "cost_usd": 0.0,
                                    "cache_key": f"{item.item_id}:{order}",
                                    "prompt_id": item.row["prompt_id"],
                                    "group_id": item.row["group_id"],
                                },
                                dataset="judgements",
                                source=item.row["source"],
                                origin="ai",
                                split=item.row["split"],
                            )
                        ]
                    )
        writer.close({"items": len(items)})

    def opinions(self, items: Sequence[Item]) -> list[Opinion]:
        from stages.reward.judge import soft_label
        from storage.datasets import open_dataset

        ratings: dict[str, list[dict]] = {}
        for row in open_dataset(str(self.stage.workdir / "out" / "judgements")).iter_rows():
            ratings.setdefault(row["item_id"], []).append(row)
        found = []
        for item in items:
            rows = ratings[item.item_id]
            error = next((row["error"] for row in rows if row["error"]), None)
            found.append(
                IDENTICAL
                if item.identical
                else (
                    Opinion(None, f"error: {error}")
                    if error
                    else Opinion(soft_label(rows[0]["rating"], rows[1]["rating"]))
                )
            )
        return found


# -- what is reported --------------------------------------------------------------------------------------------------


def rates(
    items: Sequence[Item],
    opinions: Sequence[Opinion],
    config: Config,
    others: dict[str, dict[str, tuple[float, float]]] | None = None,
) -> dict:
    """{metric: Metric} of one model against another: ``win_rate`` (the mean opinion: for verdicts, wins with ties as
    half), ``discrete_win_rate`` (each item decided), ``tie_rate``, ``lc_win_rate`` (as if both answers were equally
    long), ``style_controlled_win_rate`` (as if they also had as many headers, lists and bold words). others: {model:
    {item: (opinion, length difference)}}, for the prompts' difficulty."""
    import numpy as np

    from stages.evaluation.scores import Metric, share
    from stages.measures import preference
    from stages.measures.text import style_counts

    soft, clusters = [found.p_a for found in opinions], [item.row["group_id"] for item in items]
    verdicts = [verdict_of(p) for p in soft]
    won = preference.win_rate(verdicts)
    out = {
        "win_rate": share(soft, clusters),
        "discrete_win_rate": share([preference.OUTCOME[v] for v in verdicts], clusters),
        "tie_rate": share([float(v == "tie") for v in verdicts], clusters),
        "wins_only": Metric(won["wins_only"], won["n"]),
    }
    lengths = [(len(text_of(item.a)), len(text_of(item.b))) for item in items]
    for name, at in (("length/a", 0), ("length/b", 1)):
        out[name] = Metric(float(np.mean([pair[at] for pair in lengths])), len(items))
    if len(items) < 3:
        return out
    keys = [item.row["item"] for item in items]
    whole = {name: own for name, own in (others or {}).items() if all(key in own for key in keys)}
    difficulty = None
    if config.instruction_difficulty and len(whole) >= 2:
        difficulty = preference.instruction_difficulty(
            {n: [own[key][0] for key in keys] for n, own in whole.items()},
            {n: [own[key][1] for key in keys] for n, own in whole.items()},
        )
    fit = preference.length_controlled_win_rate(
        [a for a, _ in lengths], [b for _, b in lengths], soft, difficulty, l2=config.length_l2
    )
    if fit["converged"]:
        low, high = length_controlled_interval(
            [a for a, _ in lengths], [b for _, b in lengths], soft, difficulty, clusters, config
        )
        out["lc_win_rate"] = Metric(fit["lc_win_rate"], len(items), None, low, high)
    styled = preference.style_controlled_win_rate(
        *(
            [style_counts(text_of(answer)) for answer in side]
            for side in ([item.a for item in items], [item.b for item in items])
        ),
        soft,
        l2=config.length_l2,
    )
    if styled["converged"]:
        out["style_controlled_win_rate"] = Metric(styled["win_rate"], len(items))
        out |= {f"style/{name}": Metric(value, len(items)) for name, value in styled["coefficients"].items()}
    out["lc/suspicious"], out["lc/converged"] = (
        Metric(float(fit["suspicious"]), len(items)),
        Metric(float(fit["converged"]), len(items)),
    )
    return out


#: Resamples behind the interval of a length-controlled rate at most: each is a fit of its own (ours).
REFITS = 200


def length_controlled_interval(
    len_a, len_b, preference, difficulty, clusters: Sequence[str], config: Config
) -> tuple[float | None, float | None]:
    """95% interval of the length-controlled rate: percentiles over resamples of the prompts, the model fitted anew to
    each. (None, None) for a single prompt, and where lengths separate the wins in more than a twentieth of the
    resamples, so that these have no rate."""
    import numpy as np

    from stages.evaluation.scores import BOOTSTRAP_SEED
    from stages.measures import preference as of

    members: dict[str, list[int]] = {}
    for i, name in enumerate(clusters):
        members.setdefault(name, []).append(i)
    groups, rng = list(members.values()), np.random.Generator(np.random.Philox(key=BOOTSTRAP_SEED))
    if len(groups) < 2:
        return None, None
    a, b, p, hard = (
        None if column is None else np.asarray(column, float) for column in (len_a, len_b, preference, difficulty)
    )
    rounds, found = min(config.bootstrap, REFITS), []
    for _ in range(rounds):
        at = np.concatenate([groups[i] for i in rng.integers(0, len(groups), len(groups))])
        fit = of.length_controlled_win_rate(
            a[at], b[at], p[at], None if hard is None else hard[at], l2=config.length_l2
        )
        found += [fit["lc_win_rate"]] if fit["converged"] else []
    if len(found) < 0.95 * rounds:
        return None, None
    low, high = np.percentile(found, [2.5, 97.5])
    return float(low), float(high)


def terciles(items: Sequence[Item]) -> list[str]:
    """Of each item, whether its first answer is shorter than the second, similar, or longer: terciles of the difference
    in characters. Equal differences stay together, in the middle where they reach from the first tercile into the last.
    """
    import numpy as np

    gaps = np.array([len(text_of(item.a)) - len(text_of(item.b)) for item in items], float)
    low, high = np.quantile(gaps, [1 / 3, 2 / 3], method="lower")
    return ["shorter" if gap < low or gap == low < high else "similar" if gap <= high else "longer" for gap in gaps]


def conclude(stage, items, opinions, baseline: str, left_out: Counter, judged: dict[str, float]) -> None:
    from stages.evaluation.scores import flatten

    judged_id = items[0].row.get("judge_id") or (
        stage.config.endpoint_model
        or next(f"{name}:{stage.inputs[name].digest[:16]}" for name in ("judge", "reward_model") if stage.has(name))
    )
    good = [(item, found) for item, found in zip(items, opinions) if found.p_a is not None]
    write_battles(stage, good, judged_id, len(items))
    meetings: dict[tuple[str, str], list] = {}
    for item, found in good:
        meetings.setdefault((item.row["model_a"], item.row["model_b"]), []).append((item, found))
    opinions_of = {
        pair: {item.row["item"]: (found.p_a, len(text_of(item.a)) - len(text_of(item.b))) for item, found in own}
        for pair, own in meetings.items()
    }
    table, metrics = [], {}
    for (a, b), own in meetings.items():
        others = {x: opinions_of[x, y] for x, y in meetings if y == b and x != a}
        found = rates(*map(list, zip(*own)), stage.config, others)
        metrics[a, b] = found
        table.append(
            {
                "model": a,
                "against": b,
                "items": len(own),
                **flatten({name: m for name, m in found.items() if not name.startswith("lc/")}),
            }
        )
        warn_about_length(stage, a, b, found)
    groups = by_group(meetings)
    ranking, elo = ranked(stage, good, baseline)
    summary = {
        "items": len(items),
        "judged": len(good),
        "errors": len(items) - len(good),
        **{f"left_out/{name}": n for name, n in left_out.items() if n},
        **judged,
    }
    for (a, b), found in metrics.items():
        name = a if baseline else f"{a}:{b}"
        summary |= {
            f"{name}/{metric}": value
            for metric, value in flatten({n: m for n, m in found.items() if not n.startswith("lc/")}).items()
        }
        if len(metrics) == 1:
            summary |= flatten({n: m for n, m in found.items() if not n.startswith("lc/")})
    if stage.config.principle_of == "row":  # each trait by itself (eval.personality)
        summary |= {
            f"{r['model']}/trait/{r['group']}/{name}": r[name]
            for r in groups
            if r["by"] == "category"
            for name in ("win_rate", "win_rate_low", "win_rate_high", "items")
        }
    for row in ranking:
        summary |= {
            f"{row['player']}/bt_{name}": row[name]
            for name in ("elo", "low", "high", "win_rate", "win_rate_low", "win_rate_high")
            if row.get(name) is not None
        }
    summary |= {f"{name}/elo_median": value for name, value in elo.items()}
    stage.summary(summary)
    write_scores(stage, metrics, groups, ranking, judged_id)
    if judged:
        warn_about_judge(stage, judged, [name for pair in meetings for name in pair])
    report(stage, items, opinions, table, groups, ranking, elo, summary)


def warn_about_length(stage, a: str, b: str, found: dict) -> None:
    if found.get("lc/converged") is not None and not found["lc/converged"].value:
        stage.warn(
            "length_control_diverges",
            f"{a} against {b}: length separates the wins, so that there is no length-controlled rate without a ridge;"
            " write length_l2=0.1.",
        )
    elif found.get("lc/suspicious") is not None and found["lc/suspicious"].value:
        stage.warn(
            "length_control_moves_far",
            f"{a} against {b}: length control moved the win rate from {found['win_rate'].value:.3f} to"
            f" {found['lc_win_rate'].value:.3f}, more than lengths can explain (eval.alpacaeval_lc): look at the"
            " answers.",
        )


def by_group(meetings: dict) -> list[dict]:
    """Win rates by category and by tercile of the difference in length."""
    from stages.evaluation.scores import share

    rows = []
    for (a, b), own in meetings.items():
        labels = {
            "category": [item.row["category"] for item, _ in own],
            "length": terciles([item for item, _ in own]) if len(own) >= 3 else [None] * len(own),
        }
        for field, names in labels.items():
            order = (
                ("shorter", "similar", "longer")
                if field == "length"
                else sorted({name for name in names if name is not None})
            )
            for name in order:
                part = [(found.p_a, item.row["group_id"]) for (item, found), mine in zip(own, names) if mine == name]
                if part:
                    m = share(*map(list, zip(*part)))
                    rows.append(
                        {
                            "model": a,
                            "against": b,
                            "by": field,
                            "group": name,
                            "items": m.n,
                            "win_rate": m.value,
                            "win_rate_low": m.low,
                            "win_rate_high": m.high,
                        }
                    )
    return rows


def ranked(stage, good, baseline: str) -> tuple[list[dict], dict[str, float]]:
    """(Bradley-Terry ranking, median Elo) of more than two models, or of verdicts that tell much better from better,
    which then count three wins (``eval.arena_hard``).
    """
    import numpy as np

    from stages.measures import preference

    names = sorted({name for item, _ in good for name in (item.row["model_a"], item.row["model_b"])})
    if len(names) < 3 and not any(found.words for _, found in good):
        return [], {}
    index, keys = {name: i for i, name in enumerate(names)}, {}
    for item, _ in good:
        keys.setdefault(item.row["group_id"], len(keys))
    wins = np.zeros((len(keys), len(names), len(names)))
    for item, found in good:
        a, b, k = index[item.row["model_a"]], index[item.row["model_b"]], keys[item.row["group_id"]]
        games = [(found.p_a, 1.0 - found.p_a)]
        if found.words:  # each order is a game; in the second one the item's first answer is shown second
            games = [preference.arena_hard_wins(found.words[0]), preference.arena_hard_wins(found.words[1])[::-1]]
        for mine, theirs in games:
            wins[k, a, b] += mine
            wins[k, b, a] += theirs
    ranking = preference.item_ranking(names, wins, stage.rng("bootstrap"), stage.config.bootstrap, baseline or None)
    if ranking[0]["l2"]:
        stage.warn(
            "strengths_need_a_ridge",
            "Some models won or lost everything, or never met: their strengths are finite only by a ridge"
            " (eval.bradley_terry). Take more prompts, or let every model meet every other, before reading distances.",
        )
    outcomes = [(item.row["model_a"], item.row["model_b"], preference.OUTCOME[found.verdict]) for item, found in good]
    return ranking, preference.elo_median(outcomes, stage.rng("elo"))


def write_battles(stage, good, judge_id: str, asked: int) -> None:
    from stages.measures.preference import OUTCOME
    from storage.schema import complete_row

    writer = stage.writer("battles", "battles/1")
    writer.write(
        [
            complete_row(
                "battles/1",
                {
                    "model_a": item.row["model_a"],
                    "model_b": item.row["model_b"],
                    "outcome_a": OUTCOME[found.verdict],
                    "item_id": item.row["item"],
                    "judge_id": judge_id,
                    "len_a": len(text_of(item.a)),
                    "len_b": len(text_of(item.b)),
                    "order": 0,
                    "prompt_id": item.row["prompt_id"],
                    "group_id": item.row["group_id"],
                    "extra_json": json.dumps(
                        {
                            "p_a": found.p_a,
                            "category": item.row["category"],
                            "printed": list(found.printed),
                            "principle_ids": list(found.principle_ids),
                        },
                        sort_keys=True,
                    ),
                },
                dataset="win_rate",
                source=item.row["source"],
                origin="ai",
                split=item.row["split"],
            )
            for item, found in good
        ]
    )
    writer.close({"items": asked, "judged": len(good), "errors": asked - len(good)})


def write_scores(stage, metrics: dict, groups: list[dict], ranking: list[dict], judge_id: str) -> None:
    """``eval_scores/1``: every rate of every pair of models; ``config_json`` says how it was judged."""
    from stages.evaluation.scores import known, score_row

    config = {**stage.config.identity(), "judge": judge_id}
    rows = [
        (f"{a}:{b}/{name}", m.value, m.se, m.n, {"low": m.low, "high": m.high})
        for (a, b), found in metrics.items()
        for name, m in found.items()
    ]
    rows += [
        (
            f"{r['model']}:{r['against']}/win_rate/{r['by']}={r['group']}",
            r["win_rate"],
            None,
            r["items"],
            {"low": r["win_rate_low"], "high": r["win_rate_high"]},
        )
        for r in groups
    ]
    rows += [
        (f"{r['player']}/bt_elo", r["elo"], None, r["games"], {"low": r["low"], "high": r["high"]}) for r in ranking
    ]
    writer = stage.writer("scores", "eval_scores/1")
    writer.write(
        [
            score_row(
                stage.key[:16],
                "win_rate",
                name,
                value,
                se,
                n,
                config=config,
                source=judge_id,
                origin="ai",
                detail=known(interval),
            )
            for name, value, se, n, interval in rows
        ]
    )
    writer.close({"metrics": len(rows)})


def report(stage, items, opinions, table, groups, ranking, elo, summary) -> None:
    from stages.measures.text import style_counts
    from stages.reporting.reports import bar_chart, document, facts, histogram, markdown_table, sample_table

    bars = [
        {
            "model": f"{row['model']} vs {row['against']}" if len({r["against"] for r in table}) > 1 else row["model"],
            "value": row["win_rate"],
            "low": row.get("win_rate_low"),
            "high": row.get("win_rate_high"),
        }
        for row in sorted(table, key=lambda row: -row["win_rate"])
    ]
    stage.report(
        "win-rate",
        png=bar_chart(
            bars,
            title="Win rate" + (f" against {table[0]['against']}" if len({r["against"] for r in table}) == 1 else ""),
            ylabel="share of wins, ties as half",
        ),
    )
    stage.report(
        "opinions",
        png=histogram(
            {
                name: [
                    found.p_a
                    for item, found in zip(items, opinions)
                    if found.p_a is not None and item.row["model_a"] == name
                ]
                for name in list(dict.fromkeys(item.row["model_a"] for item in items))[:6]
            },
            title="Opinions",
            xlabel="P(first model's answer is better)",
        ),
    )
    if ranking:
        stage.report(
            "strength",
            png=bar_chart(
                [{"model": r["player"], "value": r["elo"], "low": r["low"], "high": r["high"]} for r in ranking],
                title="Bradley-Terry strength",
                ylabel="Elo scale",
            ),
        )
    texts = {}
    for item in items:
        texts.setdefault(item.row["model_a"], {})[item.row["item"]] = text_of(item.a)
        texts.setdefault(item.row["model_b"], {})[item.row["item"]] = text_of(item.b)
    style = []
    for name, own in texts.items():
        counts = [style_counts(text) for text in own.values()]
        style.append({"model": name, **{key: sum(count[key] for count in counts) / len(counts) for key in counts[0]}})
    errors = Counter(found.why for found in opinions if found.p_a is None)
    ends: dict[str, dict] = {}
    for item in items:
        for name, was_cut in zip((item.row["model_a"], item.row["model_b"]), item.row.get("cut", ())):
            ends.setdefault(name, {})[item.row["item"]] = was_cut
    shown = [
        {
            "prompt": text_of(item.prompt),
            item.row["model_a"] if len(table) == 1 else "A": text_of(item.a),
            item.row["model_b"] if len(table) == 1 else "B": text_of(item.b),
            "P(A)": found.p_a,
            "why": found.why,
            **({} if len(table) == 1 else {"A is": item.row["model_a"], "B is": item.row["model_b"]}),
        }
        for item, found in list(zip(items, opinions))[:10]
    ]
    facts_shown = {
        name: value for name, value in summary.items() if "/" not in name or name.startswith(("judge/", "left_out/"))
    }
    stage.report(
        "summary",
        table=table,
        markdown=document(
            "Win rates",
            facts(facts_shown),
            ("Rates", markdown_table(table)),
            (
                "Cut answers",
                (
                    "Answers are judged as they stand, also those that were cut at their limit:"
                    f" {', '.join(f'{sum(own.values())} of {len(own)} of {name}' for name, own in ends.items())}."
                    + (
                        " In training and rejection a reward model does not score these: they get no_eos_reward."
                        if stage.has("reward_model")
                        else ""
                    )
                    if any(sum(own.values()) for own in ends.values())
                    else ""
                ),
            ),
            ("By category and by difference in length", markdown_table(groups)),
            (
                "Bradley-Terry strengths",
                (
                    markdown_table(
                        [
                            {k: v for k, v in row.items() if k != "l2"} | {"elo_median": elo.get(row["player"])}
                            for row in ranking
                        ]
                    )
                    if ranking
                    else ""
                ),
            ),
            ("Style of the answers, means per answer", markdown_table(style)),
            (
                "Without an opinion",
                markdown_table([{"why": why, "items": n} for why, n in errors.most_common(10)]) if errors else "",
            ),
            ("Samples", sample_table(shown)),
        ),
    )
