"""This project's stages on the same rows as :mod:`tests.peers.trl_side`: the encoders, objectives and trainer that the
stages run, in float64, in the order of the file.
"""

from __future__ import annotations

from pathlib import Path

import torch

from stages.running import randomness
from storage.datasets import open_dataset
from tests.peers.trl_side import ROWS, STEPS, Run

#: What both sides train with, under our names.
COMMON = {"learning_rate": 1e-2, "lr_schedule": "constant", "warmup_ratio": 0.0, "max_grad_norm": 0.5}


def ingested(rows, folder, name: str = "rows", **settings):
    """The rows through stage ``ingest``, all of them in train, in their order."""
    from tests.data.driver import ingest, write_lines

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    path = write_lines(folder / f"{name}.jsonl", [{**row, "split": "train"} for row in rows])
    found = ingest(path, folder / f"{name}-ingested", **settings)
    assert found.counts["rows_kept"] == len(rows), found.refused
    return open_dataset(folder / f"{name}-ingested" / "out" / "data")


def rng(*purpose):
    return randomness.rng(0, "peers", *purpose)


def steps_of(
    model,
    objective,
    config,
    items,
    prepare=lambda items: None,
    after=lambda step: None,
    total: int = STEPS,
    rows: int = ROWS,
) -> Run:
    """One optimizer step on every ``rows`` items."""
    from stages.training import Trainer

    trainer, run = Trainer(model, objective, config, total), Run()
    for step in range(total):
        part = items[step * rows : (step + 1) * rows]
        prepare(part)
        found = trainer.step(part)
        after(step + 1)
        run.step(found["loss"], found["grad_norm"], found["learning_rate"], model)
        if trainer.averages:  # what would be published
            run.weights[-1] = torch.cat([w.detach().clone().flatten() for _, w in sorted(trainer.averages.items())])
    return run


def policy_of(path: str):
    from stages.models.modeling import load_policy

    return load_policy(path).double()


def sft(path, rows, folder, ingest=None, step_rows: int = ROWS, total: int = STEPS, **settings) -> Run:
    from stages.chat import renderer_for
    from stages.sft import Config, NextToken, Noise, encode_demonstrations, encode_text

    config, data = Config(**{**COMMON, "max_length": 256, **settings}), ingested(rows, folder, **(ingest or {}))
    encode = encode_text if data.kind == "text/1" else encode_demonstrations
    items, _ = encode(data, "train", renderer_for(path), config)
    noise = None if config.neftune_noise_alpha is None else Noise(config.neftune_noise_alpha, rng)
    objective = NextToken(
        config.loss_agg_mode,
        loss_scale_factor=config.loss_scale_factor or config.max_length,
        loss_type=config.loss_type,
        label_smoothing_factor=config.label_smoothing_factor,
        noise=noise,
    )
    run = steps_of(policy_of(path), objective, config, items, total=total, rows=step_rows)
    run.batches = [{"items": items[at : at + ROWS]} for at in range(0, len(items), ROWS)]
    return run


def align(path, reference, rows, folder, ingest=None, rotate: bool = False, **settings) -> Run:
    """``rotate``: KTO's mismatched responses are those of TRL, each step's own ones moved on by one row."""
    from stages.align import Config
    from stages.chat import renderer_for
    from stages.direct.direct_alignment import DirectAlignment, MovingReference
    from stages.direct.preference_items import Encoder
    from stages.models.modeling import freeze

    config, data = Config(**{**COMMON, "max_length": 256, **settings}), ingested(rows, folder, **(ingest or {}))
    objective = DirectAlignment(config)
    items = Encoder(renderer_for(path), objective.reads, config, rng)(data, "train")
    moving = None
    if config.reference_update != "frozen":
        moving = MovingReference(config, freeze(policy_of(reference)), "cpu", policy_of(path))
    if rotate:
        rotated(items)
    policy = policy_of(path)
    every = items + [i.extra["mismatched"] for i in items if "mismatched" in i.extra]
    if objective.method.needs_reference and moving is None:
        for item, values in zip(every, objective.log_probs(policy_of(reference), every, "cpu")):
            item.extra["ref"] = values

    def prepare(part):
        if moving is not None:
            moving.attach(objective, part)
        objective.prepare(policy, part, "cpu")

    run = steps_of(
        policy,
        objective,
        config,
        items,
        prepare,
        after=(lambda step: moving.after_step(step, policy)) if moving is not None else lambda step: None,
    )
    run.batches = [{"items": items[at : at + ROWS]} for at in range(0, len(items), ROWS)]
    return run


def rotated(items) -> None:
    from stages.batching import make_item

    for at in range(0, len(items), ROWS):
        part = items[at : at + ROWS]
        for item, before in zip(part, [part[-1], *part[:-1]]):
            item.extra["mismatched"] = make_item(
                f"{item.row_id}~{before.row_id}",
                item.prompt,
                [before.responses[0]],
                [before.masks[0]],
                prompt_id=item.extra["prompt_id"],
            )


def reward(path, rows, folder, ingest=None, **settings) -> Run:
    from stages.reward_model import Setup

    data = ingested(rows, folder, **(ingest or {}))
    stage = stage_of(
        "reward_model",
        {**COMMON, "max_length": 256, "init_head": "keep", **settings},
        {"model": path},
        folder,
        data=data.path,
    )
    setup = Setup(stage, data)
    items = setup.items(data, "train", {}, training=True)
    return steps_of(setup.model.double(), setup.objective, stage.config, items)


def distill(path, teacher, rows, folder, **settings) -> Run:
    from stages.chat import renderer_for
    from stages.distill import Config, Distillation
    from stages.models.modeling import freeze
    from stages.sft import encode_demonstrations

    config, data = Config(**{**COMMON, "max_length": 256, **settings}), ingested(rows, folder)
    items, _ = encode_demonstrations(data, "train", renderer_for(path), config)
    return steps_of(policy_of(path), Distillation(config, freeze(policy_of(teacher))), config, items)


def distill_across(path, teacher, rows, folder, **settings) -> Run:
    """Stage ``distill`` with a teacher that has a tokenizer of its own."""
    from stages.chat import renderer_for
    from stages.distill import Distillation, across_of, encode
    from stages.models.modeling import freeze

    given = {"model": path, "teacher": teacher}
    stage = stage_of(
        "distill", {**COMMON, "max_length": 256, **settings}, given, folder, data=ingested(rows, folder).path
    )
    items, _ = encode(stage, renderer_for(path), "train")
    shared = across_of(stage, renderer_for(path)).shared
    return steps_of(
        policy_of(path), Distillation(stage.config, freeze(policy_of(teacher)), shared), stage.config, items
    )


def self_distilled(path, rows, folder, teacher=None, **settings) -> tuple[Run, list[list[list[int]]]]:
    """Stage ``distill`` with its own sampler and a teacher of its own, or another one: (its run, the completions of
    every step).
    """
    from stages.chat import renderer_for
    from stages.distill import Distillation, answers, encode
    from stages.models.modeling import freeze
    from stages.training import Trainer

    more = {**COMMON, "max_length": 256, "batch_size": ROWS, "max_completion_length": 4, **settings}
    given = {"model": path} | ({} if teacher is None else {"teacher": teacher})
    stage = stage_of("distill", more, given, folder, data=ingested(rows, folder).path)
    renderer, model = renderer_for(path), policy_of(path)
    items, _ = encode(stage, renderer, "train")
    objective = Distillation(stage.config, freeze(policy_of(teacher or path)))
    source = answers(stage, items, objective, renderer, model)
    trainer, run, said = Trainer(model, objective, stage.config, STEPS), Run(), []
    for step in range(STEPS):
        part = source.sample(items[step * ROWS : (step + 1) * ROWS], step)
        said.append([item.responses[0].tolist() for item in part])
        found = trainer.step(part)
        source.after_step(step + 1, found)
        run.step(found["loss"], found["grad_norm"], found["learning_rate"], model)
    return run, said


def stage_of(name: str, config: dict, models: dict, folder, **datasets):
    from stages.harness import Stage
    from stages.registry import get_stage

    given = {
        key: {"kind": "model", "path": value, "ref": key, "digest": f"digest-{key}"} for key, value in models.items()
    }
    given |= {
        key: {"kind": "dataset", "path": str(value), "ref": key, "digest": f"digest-{key}"}
        for key, value in datasets.items()
    }
    Path(folder).mkdir(parents=True, exist_ok=True)
    return Stage(
        get_stage(name),
        {
            "stage": name,
            "key": f"peers-{name}",
            "config": config,
            "seed": 5,
            "device": "cpu",
            "inputs": given,
            "workdir": str(Path(folder) / name),
        },
        lambda event: None,
    )


def on_policy(path, reference, prompts, folder, change=None, **settings) -> tuple[Run, list[dict]]:
    """Stage ``rl`` with its own sampler: (its run, what it sampled, for ``trl_side.on_policy``).

    Args:
        prompts: a ``prompts/1`` dataset.
        change: called with each iteration's samples, to give them other rewards (``total``), log-probs, or ends.
    """
    from stages.chat import renderer_for
    from stages.generation import prompt_rows
    from stages.models.modeling import freeze
    from stages.models.sharding import Acting
    from stages.policy.policy_update import PolicyGradient
    from stages.reward.rewards import build_rewards
    from stages.rl import resolve_preset
    from stages.rollouts.source import Rollouts
    from stages.training import Trainer

    config = {
        **COMMON,
        "max_steps": STEPS,
        "prompts_per_step": 2,
        "num_generations": 4,
        "max_completion_length": 8,
        "reward_override": "random",
        "rewards": [{"name": "length", "kind": "length"}],
        **settings,
    }
    stage = stage_of("rl", config, {"model": path, "reference": reference}, folder, data=prompts)
    config, (row, _) = stage.config, resolve_preset(stage.config)
    renderer, model = renderer_for(path), policy_of(path)
    given = prompt_rows(stage, stage.dataset("data"), "train", renderer, 64)
    source = Rollouts(
        stage,
        row,
        renderer,
        Acting(model, False),
        build_rewards(config.rewards, stage.inputs, renderer=renderer),
        given,
        reference=freeze(policy_of(reference)) if row.needs_reference or row.distillation_weight else None,
    )
    seen, fill, behind = [], source.groups.fill, {}
    measured = source.crediting.baseline_of

    def baseline_of(group):
        behind[tuple(group[0].prompt_ids)] = [s.total for s in group]
        return measured(group)

    source.crediting.baseline_of = baseline_of
    # else the trainer computes old log-probs itself, of what became of the samples
    source.policy.exact_logps = source.policy.exact_logps and change is None

    def filled(*args):
        groups, dropped, metrics = fill(*args)
        samples = [s for group in groups for s in group.samples]
        if change is not None:
            change(samples, len(seen))
        seen.append(
            {
                "prompts": [s.prompt for s in samples],
                "prompt_ids": [list(s.prompt_ids) for s in samples],
                "completion_ids": [list(s.ids) for s in samples],
                "logprobs": [list(s.logps) for s in samples],
                "cut": [not s.terminated for s in samples],
                "behind": [behind.get(tuple(s.prompt_ids)) for s in samples],
                "greedy": None if groups[0].greedy_sample is None else [g.greedy_sample.total for g in groups],
                "rewards": [
                    (
                        [s.parts[n] for n in sorted(s.weights)]
                        if config.multi_objective_aggregation == "normalize_then_sum"
                        else None
                        if s.total != s.total
                        else s.total
                    )
                    for s in samples
                ],
            }
        )
        return groups, dropped, metrics

    source.groups.fill = filled
    objective = PolicyGradient(
        row,
        config,
        source.kl_loss_coef,
        teacher=source.reference if row.distillation_weight else None,
        entropy_coef=source.entropy.paid,
    )
    trainer, run = Trainer(model, objective, config, source.total_steps), Run()
    for step in range(STEPS):
        items = source.items(step)
        found = trainer.step(items)
        source.after_step(step + 1, found)
        run.batches.append({"items": items})
        run.step(found["loss"], found["grad_norm"], found["learning_rate"], model)
    return run, seen
