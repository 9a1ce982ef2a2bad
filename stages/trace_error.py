"""trace_error: right answers by wrong reasoning (eval.trace_error; Uesato et al. 2022).

    final_answer_error  share of solutions whose answer is wrong
    trace_error         share with at least one wrong step, among those whose answer is right

Steps are labelled in the data (``stepwise/1``: by people, by the stage `label_steps`, by a judge), or by a process
reward model (input `reward_model`): a step is wrong where its probability is below ``threshold``. Solutions may then
also be the candidates of `rejection` or the samples of `evaluate`, cut into steps at ``separator``: what `evaluate`'s
accuracy is of, so the greedy answers only where nothing was sampled, and no perturbed forms of a prompt. Solutions
without a verdict, or without a step that can be labelled, are counted and in no share. Labels by a model are written as
a dataset; a killed run continues at its last block.
"""

from __future__ import annotations

from pydantic import Field

from stages.generation import NO_ANSWER
from stages.spec import ConfigError, InputSpec, OutputSpec, StageConfig, StageSpec


class Config(StageConfig):
    split: str | None = Field(None, title="Split", description="Split of the data; empty: all rows.")
    threshold: float = Field(
        0.5, gt=0, lt=1, description="With a reward_model: a step with a smaller probability of being right is wrong."
    )
    separator: str = Field(
        "\n\n",
        min_length=1,
        description="Text between the steps of candidates and samples; stepwise data brings its own.",
    )
    block: int = Field(64, ge=1, description="Solutions labelled as one resumable unit.")
    examples: int = Field(
        6,
        ge=0,
        description="Right answers by wrong reasoning shown in the report.",
        json_schema_extra={"identity": False},
    )


SPEC = StageSpec(
    name="trace_error",
    config=Config,
    gpu=True,
    inputs={
        "data": InputSpec(
            "dataset",
            kinds=("stepwise/1", "candidates/1", "eval_samples/1"),
            doc="Solutions with step labels and the verdict on their answer; with a reward_model any solutions.",
        ),
        "reward_model": InputSpec(
            "model", required=False, doc="Process reward model that labels the steps; default: the labels in the data."
        ),
        "prompts": InputSpec("dataset", kinds=("prompts/1",), required=False, doc="The prompts of evaluate's samples."),
    },
    outputs={
        "steps": OutputSpec("dataset", doc="stepwise/1: the solutions with the labels that counted."),
        "scores": OutputSpec("dataset", doc="eval_scores/1."),
    },
)


def solutions(stage) -> tuple[list[dict], int]:
    """(stepwise/1 rows as far as they are known: prompt, completions, labels or None, solution_correct; how many rows
    hold no answer to judge).
    """
    from stages.reward_models.reward_scorers import split_steps

    config, data = stage.config, stage.dataset("data")
    rows = list(data.iter_rows(split=config.split))
    known = {"prompt_id", "group_id", "source", "origin", "split"}
    if data.kind == "stepwise/1":
        return [
            {
                **{name: row[name] for name in known},
                "prompt": row["prompt"],
                "steps": row["completions"],
                "labels": row["labels"],
                "separator": row["separator"],
                "correct": row["solution_correct"],
                "answer": row["answer"],
            }
            for row in rows
        ], 0
    if not stage.has("reward_model"):
        raise ConfigError(
            f"trace_error: {data.kind} has no step labels; give --input reward_model=PRM, which labels the steps, or"
            " label them first (stage label_steps)"
        )
    if data.kind == "candidates/1":
        texts = [
            (row, row["prompt"], row["completion"][-1].get("content") or "", row["correct"])
            for row in rows
            if row["drop_reason"] not in NO_ANSWER
        ]
    else:
        asked = (
            {row["row_id"]: row["prompt"] for row in stage.dataset("prompts").iter_rows()}
            if stage.has("prompts")
            else {}
        )
        if not asked:
            raise ConfigError(
                "trace_error: samples of evaluate hold answers only; give --input prompts=REF_OR_PATH, the prompts that"
                " were evaluated"
            )
        from stages.evaluation.scores import originals, records_of

        records = [row for row in originals(records_of(rows)) if row["mode"] in ("sample", "greedy")]
        mode = "sample" if any(row["mode"] == "sample" for row in records) else "greedy"
        texts = [
            (row, asked[row["item_id"]], row["output"], row["correct"])
            for row in records
            if row["mode"] == mode and row["item_id"] in asked and not row.get("error")
        ]
    return [
        {
            **{name: row[name] for name in known},
            "prompt": prompt,
            "steps": split_steps(text, config.separator),
            "labels": None,
            "separator": config.separator,
            "correct": correct,
            "answer": None,
        }
        for row, prompt, text, correct in texts
    ], len(rows) - len(texts)


def run(stage):
    from dataclasses import replace

    from stages.evaluation import scores
    from stages.measures import suites
    from stages.reward_models.reward_scorers import load_scorer
    from storage.datasets import open_dataset

    config = stage.config
    work, left_out = solutions(stage)
    if not work:
        raise ConfigError(
            f"trace_error: the data has no solution{f' in split {config.split!r}' if config.split else ''}; write"
            " split=NAME, or leave it out for all"
        )
    scorer = None
    if stage.has("reward_model"):
        scorer = load_scorer(stage.path("reward_model"), stage.device)
        if not hasattr(scorer, "step_probabilities"):
            raise ConfigError(
                "trace_error: the input reward_model scores whole answers; give a process reward model (stage"
                " reward_model with objective=prm on step labels)"
            )
    label(stage, work, scorer)
    rows = list(open_dataset(str(stage.workdir / "out" / "steps")).iter_rows())
    judged = [row for row in rows if row["labels"] and row["solution_correct"] is not None]
    lost = {
        "without_verdict": sum(row["solution_correct"] is None for row in rows),
        "without_labels": sum(not row["labels"] for row in rows),
        "not_solutions": left_out,
    }
    if not judged:
        raise ConfigError(
            f"trace_error: none of {len(rows)} solutions has both step labels and a verdict on its answer"
            f" ({lost['without_verdict']} have no verdict); give prompts with checkable answers"
        )
    if lost["without_verdict"] or lost["without_labels"]:
        stage.warn(
            "solutions_left_out",
            f"Of {len(rows)} solutions {lost['without_verdict']} have no verdict on their answer and"
            f" {lost['without_labels']} no step that could be labelled; they are in no share. Give prompts with"
            " checkable answers, and solutions in steps.",
        )
    clusters = [row["group_id"] or row["prompt_id"] for row in judged]
    right, wrong_step = [bool(row["solution_correct"]) for row in judged], [min(row["labels"]) < 0 for row in judged]
    values = suites.trace_error(right, wrong_step)
    metrics = {"final_answer_error": scores.share([float(not r) for r in right], clusters)}
    if any(right):
        metrics["trace_error"] = scores.share(
            [float(w) for w, r in zip(wrong_step, right) if r], [c for c, r in zip(clusters, right) if r]
        )
    else:
        stage.warn(
            "no_right_answer",
            "No solution has a right answer, so there is no trace error. Give solutions of a stronger model, or easier"
            " prompts.",
        )
    metrics = {name: replace(m, value=values[name]) for name, m in metrics.items()}
    metrics["wrong_steps"] = scores.share(
        [float(label < 0) for row in judged for label in row["labels"]],
        [c for row, c in zip(judged, clusters) for _ in row["labels"]],
    )
    summary = {**scores.flatten(metrics), "solutions": len(judged), "right": sum(right), **lost}
    stage.summary(summary)
    out = stage.writer("scores", "eval_scores/1")
    how = {"threshold": config.threshold, "labels": "reward_model" if scorer is not None else "data"}
    out.write(
        scores.score_row(
            stage.key[:16],
            stage.dataset("data").name,
            name,
            m.value,
            m.se,
            m.n,
            config=how,
            source="steps",
            detail={"low": m.low, "high": m.high},
        )
        for name, m in metrics.items()
    )
    out.close({"metrics": len(metrics)})
    publish(stage, metrics, [row for row, r, w in zip(judged, right, wrong_step) if r and w])


def label(stage, work: list[dict], scorer) -> None:
    """The output ``steps``: the labels given with the solutions, or those of a process reward model."""
    from stages.reward_models.reward_scorers import Response
    from stages.running.blocks import remaining_blocks
    from storage.files import canonical_json
    from storage.schema import complete_row

    writer = stage.writer("steps", "stepwise/1")
    for start, part in remaining_blocks(stage, work, stage.config.block, "solutions"):
        if scorer is not None:  # cut where the process model was trained to cut
            joined = [scorer.card.options["separator"].join(one["steps"]) for one in part]
            found = scorer.step_probabilities(
                [Response(one["prompt"], [{"role": "assistant", "content": text}]) for one, text in zip(part, joined)]
            )
        rows = []
        for k, one in enumerate(part):
            soft = list(found[k]) if scorer is not None else None
            labels = one["labels"] if soft is None else [1 if p >= stage.config.threshold else -1 for p in soft]
            if soft is not None and len(soft) != len(one["steps"]):
                labels, soft = [], []  # nothing could be read: counted by run
            rows.append(
                complete_row(
                    "stepwise/1",
                    {
                        "prompt": one["prompt"],
                        "completions": list(one["steps"]) if labels else [],
                        "labels": list(labels),
                        "soft_labels": soft,
                        "separator": one["separator"],
                        "answer": one["answer"],
                        "solution_correct": one["correct"],
                        "is_quality_control": False,
                        "prompt_id": one["prompt_id"],
                        "group_id": one["group_id"],
                        "extra_json": canonical_json({"index": start + k}),
                    },
                    dataset="trace",
                    source=one["source"],
                    origin="ai" if scorer is not None else one["origin"],
                    split=one["split"],
                )
            )
        writer.write(rows)
    writer.close({"solutions": len(work)})


def publish(stage, metrics: dict, wrong_reasoning: list[dict]) -> None:
    """The shares with intervals, and right answers that a wrong step led to."""
    from stages.reporting import reports

    shown = [
        {
            "prompt": row["prompt"][-1]["content"],
            "first wrong step": row["completions"][row["labels"].index(min(row["labels"]))],
            "solution": row["separator"].join(row["completions"]),
        }
        for row in wrong_reasoning[: stage.config.examples]
    ]
    stage.report(
        "summary",
        table=[
            {"metric": name, "value": m.value, "low": m.low, "high": m.high, "n": m.n} for name, m in metrics.items()
        ],
        markdown=reports.document(
            "Trace error",
            "Brackets are 95% intervals over prompts.",
            (
                "Results",
                reports.markdown_table(
                    [
                        {"metric": name, "value": reports.with_interval(m.value, m.low, m.high), "n": m.n}
                        for name, m in metrics.items()
                    ]
                ),
            ),
            ("Right answers by wrong reasoning", reports.sample_table(shown) if shown else ""),
        ),
    )
