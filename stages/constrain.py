"""constrain: prompts with constraints that a program can check, answers to them, and pairs that teach to follow them
(``data.constraint_pairs``, ``synth.constraint``).

    p             a prompt in English                     c   one to three constraints that go together (``stages/verification/constraint_pool.py``)
    p + c         the prompt that asks for them           y_c answers to it            y_0   answers to p alone, of the same model or of ``plain_model``

Out come p + c with its constraints for RL (reward component ``kind: constraints``); pairs (p + c, y_c over y_0) where
y_c meets all of c and y_0 does not; demonstrations (p + c, y_c) for ``sft``; and every answer with its verdict
(``candidates``), from which ``preferences`` makes other pairs. Without a model or an endpoint there are the prompts
only. Draws depend on the row and the seed alone. A killed run continues at the last complete block of prompts and ends
with the same bytes.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

from pydantic import Field, model_validator

from stages.decoding.writers import WriterConfig
from stages.settings import ReadWhen, refuse_unread_in
from stages.spec import InputSpec, OutputSpec, StageSpec, did_you_mean
from stages.verification.constraint_pool import FORBIDDEN_POOL, KEYWORD_POOL, LANGUAGE_NAMES
from stages.verification.ifeval import CHECKERS


class Config(WriterConfig):
    kinds: list[str] = Field(
        list(CHECKERS),
        min_length=1,
        description=(
            "Kinds of constraints that are drawn: IFEval's ids, or the part before the colon for all of a group"
            " (keywords)."
        ),
    )
    counts: list[float] = Field(
        [0.56, 0.33, 0.11],
        min_length=1,
        description=(
            "Shares of prompts that get 1, 2, 3, ... constraints (those of IFEval); fewer where no more go together."
        ),
    )
    per_prompt: int = Field(
        1,
        ge=1,
        description="Draws of constraints for each prompt, each of them a prompt of its own; what was drawn before is left out.",
    )
    keywords: list[str] = Field(list(KEYWORD_POOL), min_length=4, description="Words that answers are asked to have.")
    forbidden_words: list[str] = Field(
        list(FORBIDDEN_POOL),
        min_length=4,
        description="Words that answers are asked to do without: common ones, or leaving them out is no effort.",
    )
    languages: list[str] = Field(
        sorted(LANGUAGE_NAMES),
        min_length=1,
        description="Codes of the languages that answers are asked for in; write those that the model knows.",
    )
    max_words: int = Field(
        300,
        ge=30,
        description=(
            "Words that an answer is asked to have at least, at most; leave room for them in max_completion_length."
        ),
    )
    num_generations: int = Field(2, ge=1, description="Answers to each prompt with constraints, y_c.")
    num_plain: int = Field(1, ge=1, description="Answers to each prompt without them, y_0.")
    max_pairs_per_prompt: int = Field(
        4, ge=1, description="Pairs of a prompt at most, the first ones (data.correctness_pairs, ours 4)."
    )
    max_demonstrations: int = Field(
        1,
        ge=1,
        description=(
            "Demonstrations of a prompt at most: its first answers that meet every constraint and are not alike."
        ),
    )
    view: Literal["full", "answer_only"] = Field(
        "answer_only",
        description=(
            "Part of an answer that is checked: what follows the thought where there is one, or full, all of it"
            " (reward.view). A reward of another view than its own answer_only must say the same."
        ),
    )
    max_completion_length: int = Field(
        1024, ge=1, description="New tokens of an answer at most; one that is cut is in no pair and no demonstration."
    )
    split: str = Field(
        "train",
        description="Split whose prompts are answered; those of the others get constraints only, to evaluate on.",
    )
    validation_fraction: float = Field(
        0.05,
        ge=0,
        lt=1,
        description="Share of the answered prompts whose pairs and demonstrations are the validation split.",
    )
    max_prompts: int | None = Field(None, ge=1, title="Max prompts", description="Prompts that are answered at most.")
    block: int = Field(64, ge=1, description="Prompts answered as one resumable unit.")

    @model_validator(mode="after")
    def _known(self):
        groups = {name.split(":")[0] for name in CHECKERS}
        for name in self.kinds:
            if name not in CHECKERS and name not in groups:
                raise ValueError(
                    f"kinds: there is no {name!r}; {did_you_mean(name, [*CHECKERS, *groups])}the kinds are:"
                    f" {', '.join(CHECKERS)}"
                )
        if unknown := [name for name in self.languages if name not in LANGUAGE_NAMES]:
            raise ValueError(
                f"languages: {unknown[0]!r} is no language that can be asked for instead of English; write some of"
                f" {', '.join(LANGUAGE_NAMES)}"
            )
        if any(share < 0 for share in self.counts) or not sum(self.counts):
            raise ValueError(f"counts={self.counts} are no shares; write for example counts=[0.5,0.3,0.2]")
        if odd := [
            word for word in [*self.keywords, *self.forbidden_words] if not word.isalpha() or not word.islower()
        ]:
            raise ValueError(f"keywords and forbidden_words are single words in small letters, which {odd[0]!r} is not")
        if self.request_format == "text":
            raise ValueError(
                "request_format=text is for requests with worked examples; prompts are shown as chat messages here, so"
                " leave it out"
            )
        return self

    def choice(self):
        """What constraints are drawn from."""
        from stages.verification.constraint_pool import Choice

        kinds = tuple(name for name in CHECKERS if name in self.kinds or name.split(":")[0] in self.kinds)
        return Choice(kinds, tuple(self.keywords), tuple(self.forbidden_words), tuple(self.languages), self.max_words)


SPEC = StageSpec(
    name="constrain",
    config=Config,
    gpu="models",
    inputs={
        "prompts": InputSpec(
            "dataset", kinds=("prompts/1",), doc="Prompts in English; those that have constraints already are left out."
        ),
        "model": InputSpec("model", required=False, doc="Who answers (or endpoint=URL); nobody: prompts only."),
        "plain_model": InputSpec(
            "model", required=False, doc="Who answers the prompts without constraints; default: the same."
        ),
    },
    outputs={
        "prompts": OutputSpec("dataset", doc="prompts/1: p + c with its constraints, for rl and evaluate."),
        "pairs": OutputSpec("dataset", required=False, doc="pairs/1: y_c over y_0, for align and reward_model."),
        "data": OutputSpec(
            "dataset", required=False, doc="demonstrations/1: (p + c, y_c) that meets every constraint, for sft."
        ),
        "candidates": OutputSpec(
            "dataset",
            required=False,
            doc="candidates/1: every answer with its verdict; y_0 come last and say that they saw no constraint.",
        ),
    },
)


#: Settings that are read where somebody answers, as ``READ_WHEN``: of the stage.
READ_OF_INPUTS: ReadWhen = (
    (
        (
            *("num_generations", "num_plain", "max_pairs_per_prompt", "max_demonstrations", "view", "temperature"),
            *("max_completion_length", "split", "validation_fraction", "max_prompts"),
        ),
        lambda stage: stage.has("model") or bool(stage.config.endpoint),
        "nobody answers the prompts, all of which get constraints; give model=REF, or endpoint=URL and"
        " endpoint_model=NAME",
    ),
)


@dataclass
class Asked:
    """A prompt with constraints, and its answers: (text, met each constraint, Written), those without the constraints
    apart.
    """

    row: dict
    plain: list[dict]
    answers: list[tuple] = field(default_factory=list)
    unasked: list[tuple] = field(default_factory=list)


def run(stage):
    from stages.decoding.writers import ModelWriter, make_writer
    from stages.ingestion.curation import generated_splits
    from stages.running.blocks import remaining_blocks
    from stages.spec import ConfigError

    config = stage.config
    refuse_unread_in(stage, READ_OF_INPUTS)
    answered = stage.has("model") or bool(config.endpoint)
    if stage.has("model") and config.endpoint:
        raise ConfigError(
            "constrain: model and endpoint both answer; leave one of them out (plain_model=REF answers the prompts"
            " without constraints)"
        )
    if stage.has("plain_model") and not answered:
        raise ConfigError(
            "constrain: plain_model answers the prompts without constraints, and nobody those with them; give model=REF"
            " too, or endpoint=URL and endpoint_model=NAME"
        )
    if stage.has("plain_model") and config.engine == "server":
        raise ConfigError(
            "constrain: engine=server serves one model, and plain_model is another one; write endpoint=URL"
            " endpoint_model=NAME for the first, and engine=builtin"
        )
    asked, left_out = constrained(stage)
    chosen = answerable(stage, asked) if answered else set()
    splits = generated_splits([asked[i].row for i in sorted(chosen)], config.validation_fraction)
    kinds = {
        "prompts": "prompts/1",
        **({"pairs": "pairs/1", "data": "demonstrations/1", "candidates": "candidates/1"} if answered else {}),
    }
    writers = {name: stage.writer(name, kind) for name, kind in kinds.items()}
    found = stage.checkpoints.latest()
    tally = Counter(found.state) if found else Counter()
    writer = plain = None
    for start, block in remaining_blocks(stage, asked, config.block, "prompts", lambda: dict(tally)):
        if answered and writer is None:
            writer = make_writer(stage, "model")
            plain = ModelWriter(stage, "plain_model") if stage.has("plain_model") else writer
        here = [one for i, one in enumerate(block, start) if i in chosen]
        if here:
            answer(stage, writer, here, plain=False)
            answer(stage, plain, here, plain=True)
        writers["prompts"].write([one.row for one in block])
        for i, one in enumerate(block, start):
            if i in chosen:
                writers["pairs"].write(pairs := pair_rows(stage, one, splits[one.row["prompt_id"]], tally))
                writers["data"].write(demonstrations := demonstration_rows(stage, one, splits[one.row["prompt_id"]]))
                writers["candidates"].write(candidate_rows(one, i))
                tally.update(pairs=len(pairs), demonstrations=len(demonstrations), answered=1)
    for one in writers.values():
        one.close({"prompts": len(asked), **left_out})
    report(stage, asked, left_out, tally, answered)


def constrained(stage) -> tuple[list[Asked], Counter]:
    """Every prompt of the input with drawn constraints, and how many were left out, by reason.

    Raises ValueError where none is left.
    """
    import numpy as np

    from stages.verification.constraint_pool import draw_constraints, unfit, with_constraints
    from storage.schema import complete_row

    config, choice, found, left_out = stage.config, stage.config.choice(), [], Counter()
    shares = np.cumsum(np.asarray(config.counts, float)) / sum(config.counts)
    for row in stage.dataset("prompts").iter_rows():
        reason = "constrained_already" if row["constraints"] else unfit(row["prompt"])
        if reason:
            left_out[reason] += 1
            continue
        *before, last = row["prompt"]
        asks = set()
        for k in range(config.per_prompt):
            rng = stage.rng("constraints", row["row_id"], k)
            count = 1 + min(int(np.searchsorted(shares, rng.random(), side="right")), len(shares) - 1)
            drawn = draw_constraints(rng, last["content"], count, choice)
            if not drawn:
                left_out["none_fits"] += 1
                continue
            text = with_constraints(last["content"], drawn)
            if text in asks:  # few kinds have few draws
                left_out["drawn_before"] += 1
                continue
            asks.add(text)
            note = json.loads(row["extra_json"] or "{}") | {"of": row["row_id"], "draw": k, "wanted": count}
            found.append(
                Asked(
                    complete_row(
                        "prompts/1",
                        {
                            **row,
                            "prompt": [*before, {**last, "content": text}],
                            "prompt_id": None,
                            "group_id": row["group_id"],
                            "constraints": [
                                {"id": one.id, "kwargs_json": json.dumps(one.kwargs, sort_keys=True)} for one in drawn
                            ],
                            "extra_json": json.dumps(note, sort_keys=True),
                        },
                        dataset="constrained",
                        source=row["source"],
                        origin=row["origin"],
                        split=row["split"],
                    ),
                    row["prompt"],
                )
            )
    if not found:
        why = ", ".join(f"{n} {name}" for name, n in left_out.items()) or "there are none"
        raise ValueError(
            f"No prompt got a constraint: {why}. Prompts are in English, end with a message of the user and have no"
            " constraints yet; kinds of which none suits a prompt give none."
        )
    return found, left_out


def answerable(stage, asked: list[Asked]) -> set[int]:
    """Places of the prompts that are answered; ValueError where there is none."""
    there = [i for i, one in enumerate(asked) if one.row["split"] == stage.config.split][: stage.config.max_prompts]
    if not there:
        splits = Counter(one.row["split"] for one in asked)
        raise ValueError(
            f"No prompt is in split {stage.config.split!r}; there are"
            f" {', '.join(f'{name} ({n})' for name, n in splits.items())}. Write split={next(iter(splits))}."
        )
    return set(there)


def answer(stage, writer, asked: list[Asked], plain: bool) -> None:
    """Answers of the writer with their verdicts, in place: to the prompts with constraints, or to the plain ones."""
    from stages.decoding.writers import warn_of_failed
    from stages.verification.constraints import check_constraint
    from stages.verification.responses import view

    config, n = stage.config, stage.config.num_plain if plain else stage.config.num_generations
    requests = [one.plain if plain else one.row["prompt"] for one in asked for _ in range(n)]
    seeds = [stage.seed_for("plain" if plain else "answer", one.row["row_id"], k) for one in asked for k in range(n)]
    written = writer.write(requests, seeds, config.max_completion_length, config.temperature)
    warn_of_failed(stage, written)
    for i, said in enumerate(written):
        one = asked[i // n]
        seen = view(said.text, config.view)
        met = [check_constraint(c["id"], json.loads(c["kwargs_json"]), seen) for c in one.row["constraints"]]
        (one.unasked if plain else one.answers).append((said.text, met, said))


def complete(answers: list[tuple]) -> list[tuple]:
    """The answers that ended by themselves and are not empty."""
    return [one for one in answers if one[2].problem is None]


def pair_rows(stage, asked: Asked, split: str, tally: Counter) -> list[dict]:
    """``pairs/1`` of a prompt: answers that meet every constraint over plain ones that do not; the prompt asks for
    them. Why there is none is counted.
    """
    from stages.ingestion.pairing import constraint_contrast
    from storage.schema import complete_row, provenance

    answers, plain = complete(asked.answers), complete(asked.unasked)
    if not answers or not plain:
        tally["dropped/no_complete_answer"] += 1
        return []
    reason = constraint_contrast(any(all(met) for _, met, _ in answers), all(all(met) for _, met, _ in plain))
    if reason:
        tally[f"dropped/{reason}"] += 1
        return []
    found = [(y, n) for y in answers for n in plain if constraint_contrast(all(y[1]), all(n[1])) is None]
    found = list({(y[0], n[0]): (y, n) for y, n in reversed(found)}.values())[::-1][: stage.config.max_pairs_per_prompt]
    return [
        complete_row(
            "pairs/1",
            {
                "prompt": asked.row["prompt"],
                "chosen": assistant(y),
                "rejected": assistant(n),
                "constraint_ids": [c["id"] for c in asked.row["constraints"]],
                "pairs_in_group": len(found),
                **provenance(asked.row),
                "weight": asked.row["weight"] / len(found),
                "chosen_gen": y[2].gen,
                "rejected_gen": n[2].gen,
                "ann": {"annotator_type": "rule", "criteria": "constraints"},
                "extra_json": json.dumps({"of": asked.row["row_id"]}),
            },
            dataset="constraint-pairs",
            source=asked.row["source"],
            origin="constraint",
            split=split,
        )
        for y, n in found
    ]


def demonstration_rows(stage, asked: Asked, split: str) -> list[dict]:
    """``demonstrations/1``: the prompt with its constraints, and answers that meet all of them."""
    from storage.schema import complete_row, provenance

    good = {said.text.strip(): (text, said) for text, met, said in reversed(complete(asked.answers)) if all(met)}
    return [
        complete_row(
            "demonstrations/1",
            {
                "messages": asked.row["prompt"] + [{"role": "assistant", "content": text}],
                "train_turns": [len(asked.row["prompt"])],
                "kept": True,
                "gen": said.gen,
                "category": asked.row["category"],
                **provenance(asked.row),
                "extra_json": json.dumps(
                    {"of": asked.row["row_id"], "constraint_ids": [c["id"] for c in asked.row["constraints"]]}
                ),
            },
            dataset="constrained-answers",
            source=asked.row["source"],
            origin="constraint",
            split=split,
        )
        for text, said in list(good.values())[::-1][: stage.config.max_demonstrations]
    ]


def candidate_rows(asked: Asked, prompt_idx: int) -> list[dict]:
    """``candidates/1``: every answer, scored by whether it meets all constraints of the prompt; the plain ones behind
    the others.
    """
    from storage.schema import complete_row, prompt_id, provenance

    reasons = {
        "cut": "truncated",
        "empty": "empty",
        "request_too_long": "request_too_long",
        "engine_error": "engine_error",
    }
    rows = []
    for i, (text, met, said) in enumerate(asked.answers + asked.unasked):
        note = {"sampling_prompt_id": prompt_id(asked.plain), "mode": "plain"} if i >= len(asked.answers) else {}
        rows.append(
            complete_row(
                "candidates/1",
                {
                    "prompt": asked.row["prompt"],
                    **provenance(asked.row),
                    "prompt_idx": prompt_idx,
                    "completion_idx": i,
                    "completion": assistant((text,)),
                    "scores": [{"source": "constraints", "value": sum(met) / len(met)}],
                    "reward": float(all(met)),
                    "correct": all(met),
                    "kept": said.problem is None,
                    "drop_reason": reasons.get(said.problem),
                    "gen": said.gen,
                    "extra_json": json.dumps(
                        {
                            "met": met,
                            "finish_reason": said.finish_reason,
                            **note,
                            **({"error": said.error} if said.error else {}),
                        },
                        sort_keys=True,
                    ),
                },
                dataset="candidates",
                source=asked.row["source"],
                origin="ai",
                split=asked.row["split"],
            )
        )
    return rows


def assistant(answer: tuple) -> list[dict]:
    return [{"role": "assistant", "content": answer[0]}]


def report(stage, asked: list[Asked], left_out: Counter, tally: Counter, answered: bool) -> None:
    """What was drawn and left out; with answers, how often each kind was met with and without being asked for, read
    from the candidates so that a resumed run says the same.
    """
    from stages.reporting.reports import document, facts, markdown_table, sample_table
    from storage.datasets import open_dataset

    per_kind = {name: Counter() for name in stage.config.choice().kinds}
    for one in asked:
        for constraint in one.row["constraints"]:
            per_kind[constraint["id"]]["drawn"] += 1
    counts = Counter(len(one.row["constraints"]) for one in asked)
    short = sum(len(one.row["constraints"]) < json.loads(one.row["extra_json"])["wanted"] for one in asked)
    summary = {
        "prompts": len(asked),
        **{f"constraints.{n}": counts[n] for n in sorted(counts)},
        "fewer_than_wanted": short,
        **{f"left_out/{name}": n for name, n in sorted(left_out.items())},
    }
    never = [name for name, found in per_kind.items() if not found["drawn"]]
    if never and len(asked) >= 20 * len(per_kind):
        stage.warn(
            "kinds_not_drawn",
            f"No prompt suited {', '.join(never)}. Give prompts that these suit, or leave them out of kinds.",
        )
    met, lost = {"asked": [0, 0], "plain": [0, 0]}, Counter()
    if answered:
        by_idx = {i: one.row["constraints"] for i, one in enumerate(asked)}
        for row in open_dataset(str(stage.workdir / "out" / "candidates")).iter_rows():
            note = json.loads(row["extra_json"])
            if not row["kept"]:
                lost[row["drop_reason"]] += 1
                continue
            how = "plain" if note.get("mode") == "plain" else "asked"
            met[how] = [met[how][0] + row["correct"], met[how][1] + 1]
            for constraint, good in zip(by_idx[row["prompt_idx"]], note["met"]):
                per_kind[constraint["id"]].update({f"{how}_met": int(good), f"{how}_n": 1})
        summary |= {
            "answered": tally["answered"],
            "pairs": tally["pairs"],
            "demonstrations": tally["demonstrations"],
            **{name: n for name, n in sorted(tally.items()) if name.startswith("dropped/")},
            **{f"pass_rate/{how}": good / n for how, (good, n) in met.items() if n},
            **{f"answers/{name}": n for name, n in sorted(lost.items())},
        }
        if not tally["pairs"]:
            stage.warn(
                "no_pairs",
                "No prompt gave a pair: "
                + ", ".join(
                    f"{n} {name.removeprefix('dropped/')}"
                    for name, n in sorted(tally.items())
                    if name.startswith("dropped/")
                )
                + ". Raise num_generations or max_completion_length, write fewer or easier kinds, or give a stronger"
                " model.",
            )
    stage.summary(summary)
    rate = lambda found, how: round(found[f"{how}_met"] / found[f"{how}_n"], 3) if found[f"{how}_n"] else None
    table = [
        {
            "kind": name,
            "drawn": found["drawn"],
            **({"met when asked": rate(found, "asked"), "met without": rate(found, "plain")} if answered else {}),
        }
        for name, found in per_kind.items()
    ]
    shown = [{"prompt": one.row["prompt"][-1]["content"]} for one in asked[:10]]
    stage.report("kinds", table=table)
    stage.report(
        "summary",
        markdown=document(
            "Prompts with constraints",
            facts(summary),
            ("Kinds", markdown_table(table)),
            ("Samples", sample_table(shown, ("prompt",))),
        ),
    )
