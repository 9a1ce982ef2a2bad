"""label_steps: step labels for process reward models without people (``rm.prm_rollout``, Math-Shepherd).

From the end of every step of a solution, sample n completions and check their final answers. The soft label of the step
is the share that ends right, the hard label whether any does; behind the last step there is nothing to complete, so its
one rollout is the solution itself. Rollouts that could not be checked are in neither label, and a step with no other has
none: it is one with the step behind it, or left out at the end. Solutions come from the candidates of a ``rejection``
run, those that ended by themselves; with a process reward model the ones worth labelling can be chosen (``rm.active``).
Every block of solutions is a resumable unit.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from stages.generation import NO_ANSWER
from stages.reward.components import FixedComponent, RewardComponent
from stages.settings import (
    PROMPT_TEMPLATE,
    ChatConfig,
    PromptTemplate,
    ReadWhen,
    SamplingConfig,
    refuse_unread_inputs,
)
from stages.spec import InputSpec, OutputSpec, StageSpec


class Config(SamplingConfig, ChatConfig):
    rollouts: int = Field(8, ge=1, description="Completions sampled from each step (Math-Shepherd 8).")
    separator: str = Field("\n\n", min_length=1, description="Text between the steps of a solution.")
    prompt_template: PromptTemplate = Field(
        "chat", description=PROMPT_TEMPLATE + " Write what the solutions were sampled with."
    )
    max_steps_per_solution: int = Field(
        32, ge=1, description="Steps labelled at most; the rest of a longer solution is left out."
    )
    rewards: list[FixedComponent] = Field(
        default_factory=lambda: [RewardComponent(name="verifier", kind="verifier")],
        description="The checker of final answers; its verdict counts.",
    )
    active: Literal["none", "convincing_wrong", "uncertain"] = Field(
        "none",
        description=(
            "Which solutions: all, wrong ones that the reward model likes best (Lightman), or those it scores nearest"
            " to 0.5 (rm.active)."
        ),
    )
    max_solutions: int | None = Field(None, ge=1, title="Max solutions", description="Solutions labelled at most.")
    solution_split: str = Field("train", description="Split of the candidates.")
    validation_fraction: float = Field(
        0.05,
        ge=0,
        lt=1,
        description=(
            "Share of the training prompts whose solutions become the validation split, which a reward model on the steps"
            " is judged by."
        ),
    )
    block: int = Field(16, ge=1, description="Solutions rolled out as one resumable unit.")


SPEC = StageSpec(
    name="label_steps",
    config=Config,
    gpu=True,
    inputs={
        "model": InputSpec("model", doc="Policy that finishes the solutions."),
        "candidates": InputSpec("dataset", kinds=("candidates/1",), doc="Solutions, from the rejection stage."),
        "prompts": InputSpec("dataset", kinds=("prompts/1",), doc="Their prompts, with the answers."),
        "reward_model": InputSpec("model", required=False, doc="Scores the solutions that `active` chooses from."),
    },
    outputs={"steps": OutputSpec("dataset", doc="stepwise/1 with soft and hard labels.")},
)


def estimates(rollout_correct) -> tuple[list[float], list[int]]:
    """(soft, hard) labels of each step from its rollouts' verdicts, at least one a step: share correct, and 1 if any is
    (``rm.prm_rollout``).
    """
    return [sum(map(bool, row)) / len(row) for row in rollout_correct], [int(any(row)) for row in rollout_correct]


def checked(parts: list[str], verdicts: list[list[bool | None]], separator: str) -> tuple[list[str], list[list[bool]]]:
    """(steps, verdicts of each) without the verdicts None. A step that has no other cannot be labelled: its text begins
    the next one, and the last ones are left out."""
    steps, known, begun = [], [], []
    for part, row in zip(parts, verdicts):
        begun.append(part)
        found = [verdict for verdict in row if verdict is not None]
        if found:
            steps.append(separator.join(begun))
            known.append(found)
            begun = []
    return steps, known


def solutions(stage) -> list[tuple[dict, dict]]:
    """(candidate, prompt row) of the solutions to label, in order; complete answers to prompts with a checkable
    answer.
    """
    from stages.reward_models.reward_scorers import Response, load_scorer, score_in_blocks
    from stages.selection import convincing_wrong, uncertain
    from stages.spec import ConfigError

    config = stage.config
    prompts = {
        row["prompt_id"]: row
        for row in stage.dataset("prompts").iter_rows()
        if row.get("answer") is not None or row.get("tests")
    }
    rows = [
        row
        for row in stage.dataset("candidates").iter_rows(split=config.solution_split)
        if row["prompt_id"] in prompts and row["drop_reason"] not in NO_ANSWER
    ]
    if not rows:
        raise ConfigError(
            "label_steps: no candidate is a complete answer to a prompt with a checkable answer; give the prompts the"
            " candidates were sampled from, and look at solution_split"
        )
    if config.active != "none":
        if not stage.has("reward_model"):
            raise ConfigError(
                f"label_steps: active={config.active} needs reward_model=REF, the model whose scores choose"
            )
        scores = score_in_blocks(
            stage,
            "active",
            load_scorer(stage.path("reward_model"), stage.device),
            [Response(r["prompt"], r["completion"], row=prompts[r["prompt_id"]]) for r in rows],
        )
        k = config.max_solutions or len(rows)
        chosen = (
            convincing_wrong(scores, [r["correct"] for r in rows], k)
            if config.active == "convincing_wrong"
            else uncertain(scores, k)
        )
        rows = [rows[i] for i in chosen]
        if not rows:
            raise ConfigError(
                "label_steps: active=convincing_wrong found no wrong solution; set active=none or sample more"
                " candidates"
            )
    return [(row, prompts[row["prompt_id"]]) for row in rows[: config.max_solutions]]


#: Inputs that are read under a condition only (``stages.settings.refuse_unread_inputs``).
INPUTS_READ_WHEN: ReadWhen = (
    (
        ("reward_model",),
        lambda config, by_rewards: config.active != "none" or "reward_model" in by_rewards,
        "all solutions are labelled, and none is chosen by its score; write active=uncertain or active=convincing_wrong",
    ),
)


def run(stage):
    import json

    from stages.chat import stage_renderer
    from stages.decoding.engines import make_engine
    from stages.generation import sampling_params
    from stages.ingestion.curation import generated_splits
    from stages.reporting.reports import document, facts
    from stages.reward.rewards import build_rewards, inputs_read
    from stages.reward_models.reward_scorers import split_steps
    from stages.running.blocks import remaining_blocks
    from storage.datasets import open_dataset

    config = stage.config
    refuse_unread_inputs(SPEC.name, stage.inputs, INPUTS_READ_WHEN, config, inputs_read(config.rewards, stage.inputs))
    renderer = stage_renderer(stage)
    work = solutions(stage)
    splits = generated_splits((prompt for _, prompt in work), config.validation_fraction)
    blank = sum(not split_steps(row["completion"][-1].get("content") or "", config.separator) for row, _ in work)
    if blank == len(work):
        raise ValueError(
            f"All {blank} solutions are blank, so there is no step to label. Look at the candidates (posttrain show REF"
            " --rows 5), and sample them again with another chat template or prompt_template."
        )
    writer = stage.writer("steps", "stepwise/1")
    if stage.units_done * config.block < len(work):
        sampler = make_engine(stage, renderer)
        rewards = build_rewards(config.rewards, stage.inputs, renderer=renderer, device=stage.device)
        params = sampling_params(config, renderer)
    for _, block in remaining_blocks(stage, work, config.block, "solutions"):
        writer.write(label_block(stage, block, splits, sampler, rewards, params, renderer))
    writer.close({"solutions": len(work)})
    rows = list(open_dataset(str(stage.workdir / "out" / "steps")).iter_rows())
    if not rows:
        raise ValueError(
            "No step has a label: no rollout of any solution could be checked. Give rewards a component with a verdict"
            " (kind verifier, code or python) that can check these prompts, or raise its timeout."
        )
    soft = [s for r in rows for s in r["soft_labels"]]
    notes = [json.loads(r["extra_json"]) for r in rows]
    lost = {
        "solutions_without_labels": len(work) - blank - len(rows),
        **{name: sum(note[name] for note in notes) for name in ("steps_without_verdict", "unscorable_rollouts")},
    }
    if any(lost.values()):
        stage.warn(
            "steps_not_labelled",
            f"Of {len(work)} solutions {lost['solutions_without_labels']} have no label, and of the rows"
            f" {lost['steps_without_verdict']} steps: their rollouts could not be checked (nor could"
            f" {lost['unscorable_rollouts']} in all). Raise max_completion_length where they are cut, or the verifier's"
            " timeout_s.",
        )
    if blank:
        stage.warn(
            "blank_solutions",
            f"{blank} of {len(work)} solutions are blank: they have no steps, and no rows. Leave them out of the data.",
        )
    summary = {
        "solutions": len(rows),
        "blank_solutions": blank,
        "steps": len(soft),
        "rollouts": sum(note["rollouts"] for note in notes),
        **lost,
        "mean_soft_label": sum(soft) / max(1, len(soft)),
        "never_right": sum(s == 0 for s in soft) / max(1, len(soft)),
        "always_right": sum(s == 1 for s in soft) / max(1, len(soft)),
        "solutions_correct": sum(bool(r["solution_correct"]) for r in rows) / max(1, len(rows)),
    }
    if len(set(soft)) < 2:
        stage.warn(
            "labels_without_contrast",
            f"Every step has the soft label {soft[0] if soft else None}: the policy always or never finishes these"
            " solutions right. Take prompts of medium difficulty, or more rollouts.",
        )
    stage.summary(summary)
    stage.report("summary", markdown=document("Step labels by rollouts", facts(summary)))


def label_block(stage, work, splits, sampler, rewards, params, renderer) -> list[dict]:
    """Finished ``stepwise/1`` rows of one block: prefix ids are the prompt's and the steps' own, so a rollout continues
    in mid-solution. One from behind the last step is the solution as it is.
    """
    import json

    from stages.decoding.engines import EngineError
    from stages.generation import prompt_ids, sample_with_room
    from stages.reward_models.reward_scorers import split_steps
    from storage.schema import complete_row, provenance

    config = stage.config
    texts = [row["completion"][-1].get("content") or "" for row, _ in work]
    whole = [split_steps(text, config.separator) for text in texts]
    steps = [parts[: config.max_steps_per_solution] for parts in whole]
    prefixes, lengths, owners, finished = [], [], [], {}
    for k, ((_, prompt), parts) in enumerate(zip(work, steps)):
        start = prompt_ids(renderer, prompt["prompt"], config.prompt_template)
        if parts and len(parts) == len(whole[k]):
            finished[k] = {
                "prompt_row": prompt,
                "prompt_ids": start,
                "completion_ids": renderer._plain_ids(texts[k]),
                "finish_reason": "eos",
                "completion_text": texts[k],
            }
        for n in range(1, len(parts) + (k not in finished)):
            begun = renderer._plain_ids(config.separator.join(parts[:n]) + config.separator)
            prefixes.append(start + begun)
            lengths.append(len(begun))
            owners.append((k, n))
    seeds = [[stage.seed_for("rollout", work[k][0]["row_id"], n, j) for j in range(config.rollouts)] for k, n in owners]
    rooms = [params.max_new_tokens] * len(prefixes)
    groups = sample_with_room(sampler, prefixes, params, seeds, rooms, begun=lengths)
    failed = [c.error for group in groups for c in group if c.error is not None]
    if failed:
        raise EngineError(
            f"{sampler.name} failed on {len(failed)} rollouts, which would count as wrong ({failed[0]}). Run the stage"
            " again: it continues with this block."
        )
    asked = [
        {
            "prompt_row": work[k][1],
            "prompt_ids": prefix,
            "completion_ids": c.ids,
            "finish_reason": c.finish_reason,
            "completion_text": config.separator.join(steps[k][:n]) + config.separator + c.text,
        }
        for (k, n), prefix, group in zip(owners, prefixes, groups)
        for c in group
    ]
    verdicts = iter([s.correct for s in rewards.score([*asked, *finished.values()])])
    table: list[list[list[bool | None]]] = [[] for _ in work]
    for k, _ in owners:
        table[k].append([next(verdicts) for _ in range(config.rollouts)])
    for k in finished:
        table[k].append([next(verdicts)])
    rows = []
    for (candidate, prompt), parts, given in zip(work, steps, table):
        labelled, known = checked(parts, given, config.separator)
        if not labelled:
            continue
        soft, hard = estimates(known)
        unknown = [verdict is None for row in given for verdict in row]
        note = {
            "rollouts": len(unknown),
            "unscorable_rollouts": sum(unknown),
            "steps_without_verdict": len(parts) - len(labelled),
        }
        rows.append(
            complete_row(
                "stepwise/1",
                {
                    "prompt": prompt["prompt"],
                    "completions": labelled,
                    "labels": [1 if h else -1 for h in hard],
                    "soft_labels": soft,
                    "separator": config.separator,
                    "answer": prompt.get("answer"),
                    "solution_correct": candidate["correct"],
                    "is_quality_control": False,
                    **provenance(prompt),
                    "weight": candidate["weight"],
                    "extra_json": json.dumps(note, sort_keys=True),
                },
                dataset="steps",
                source=candidate["source"],
                origin="verifier",
                split=splits[prompt["prompt_id"]],
            )
        )
    return rows
