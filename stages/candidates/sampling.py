"""Sampling candidates: completions of every prompt of a stage, scored, one Parquet part per block of prompts."""

from __future__ import annotations

from dataclasses import replace

from stages.candidates.contexts import Context
from stages.candidates.rows import candidates_of
from stages.generation import MixtureSampler, prompt_rows, sample_groups, sampling_params, score, warn_of_failures
from stages.running.blocks import remaining_blocks
from stages.spec import ConfigError


def generate(stage) -> None:
    """Sample and score every prompt, one Parquet part per block of prompts."""
    from stages.chat import stage_renderer
    from stages.reward.rewards import build_rewards
    from stages.reward.rubric_reward import score_rows, write_review

    config = stage.config
    if bool(config.mixture_coef) != stage.has("reference"):
        raise ValueError(
            "mixture_coef and the input `reference` go together; write for example mixture_coef=0.25 with --input"
            " reference=MODEL, or neither."
        )
    renderer = stage_renderer(stage)
    rows = chosen_prompts(stage, renderer)
    counts = [completions_of(stage, row) for row, _ in rows]
    writer = stage.writer("candidates", "candidates/1")
    rubric = any(component.kind == "rubric" for component in config.rewards)
    items = stage.writer("rubric_scores", "rubric_scores/1") if rubric else None
    total = len(rows)
    if rubric and total > config.block:
        stage.warn(
            "rubric_blocks",
            f"Confidences of rubric items are averaged over blocks of {config.block} prompts; run stage rescore on the"
            " candidates for averages over all of them, or raise block.",
        )
    context = Context(stage, renderer, rows)
    if config.rationalise:
        warn_of_long_hints(stage, renderer, rows)
    if stage.units_done * config.block < total:
        sampler = sampler_of(stage, renderer)
        rewards = build_rewards(config.rewards, stage.inputs, renderer=renderer, device=stage.device)
        rewards.check([row for row, _ in rows])
        rewards.check_company(config.num_generations, "write num_generations=4")
        params = sampling_params(config, renderer)
    for start, block in remaining_blocks(stage, rows, config.block, "prompts"):
        seeds = [
            [stage.seed_for("rejection", row["row_id"], k) for k in range(n)]
            for (row, _), n in zip(block, counts[start:])
        ]
        groups, notes = sample_block(stage, rewards, sampler, block, params, seeds, context)
        warn_of_failures(stage, sampler, [s for group in groups for s in group])
        score(rewards, [s for group in groups for s in group])
        hinted = rationalised(stage, renderer, rewards, sampler, block, params, groups)
        made = [
            row
            for i, ((row, _), group, note) in enumerate(zip(block, groups, notes))
            for row in candidates_of(stage, renderer, sampler, row, start + i, seeds[i], group, hinted.get(i, []), note)
        ]
        writer.write(made)
        if rubric:
            everyone = [s for i, group in enumerate(groups) for s in [*group, *hinted.get(i, [])]]
            items.write([row for one, s in zip(made, everyone) for row in score_rows(one, s.items)])
    writer.close({"prompts": total, "completions": sum(counts)})
    if rubric:
        items.close({})
        write_review(stage)


def chosen_prompts(stage, renderer) -> list:
    """The prompts that are sampled for, each with its ids: a part of them, or as many as are asked for from an offset
    on.
    """
    config = stage.config
    rows = prompt_rows(
        stage,
        stage.dataset("prompts"),
        config.split,
        renderer,
        config.max_prompt_length,
        None if config.prompt_offset or config.prompt_part else config.max_prompts,
        config.prompt_template,
    )
    if config.prompt_part is not None:
        part, parts = config.prompt_part
        if parts > len(rows):
            raise ConfigError(
                f"rejection: prompt_part={list(config.prompt_part)} cuts {len(rows)} prompts into empty parts; write"
                " fewer parts"
            )
        rows = rows[part - 1 :: parts]
    first = config.prompt_offset % len(rows)
    return (rows[first:] + rows[:first])[: config.max_prompts]


def completions_of(stage, row: dict) -> int:
    """How many completions of a prompt are sampled; where a range is asked for, drawn by the row's own seed."""
    least, most = stage.config.min_generations, stage.config.num_generations
    if least is None:
        return most
    return int(stage.rng("generations", row["row_id"]).integers(least, most + 1))


def sampler_of(stage, renderer):
    """The engine that is asked for, or the mixture of policy and reference in every token."""
    import torch

    from stages.decoding.engines import make_engine
    from stages.models.modeling import freeze, load_policy

    config = stage.config
    if not config.mixture_coef:
        return make_engine(stage, renderer)
    policy, reference = (
        freeze(load_policy(stage.path(role), stage.device, getattr(torch, config.sampling_dtype)))
        for role in ("model", "reference")
    )
    return MixtureSampler(policy, reference, renderer.tokenizer, config.mixture_coef)


def sample_block(stage, rewards, sampler, block, params, seeds, context):
    """(groups of samples, what to note about each group's candidates) of a block; with ``in_context`` sampled behind
    demonstrations, with ``system`` or ``traits`` behind a system message."""
    if context.system:
        groups = sample_groups(sampler, [(row, context.ids(row)) for row, _ in block], params, seeds)
        return [[replace(s, prompt_ids=ids) for s in group] for (_, ids), group in zip(block, groups)], [
            context.note(row) for row, _ in block
        ]
    retriever = next((rewards.scorers[c.name] for c in rewards.components if c.kind == "icdpo"), None)
    found = [retriever.retrieve(row) if retriever is not None else ([], None) for row, _ in block]
    notes = [{"demonstrations": names} if retriever is not None else {} for names, _ in found]
    if not stage.config.in_context:
        return sample_groups(sampler, block, params, seeds), notes
    groups = sample_groups(
        sampler, [(row, behind or ids) for (row, ids), (_, behind) in zip(block, found)], params, seeds
    )
    notes = [{**note, "in_context": behind is not None} for note, (_, behind) in zip(notes, found)]
    return [[replace(s, prompt_ids=ids) for s in group] for (_, ids), group in zip(block, groups)], notes


def hinted_ids(renderer, config, row: dict) -> list[int]:
    """Ids of a prompt whose last message holds its answer as a hint."""
    *before, last = row["prompt"]
    told = config.hint.replace("{question}", last.get("content") or "").replace("{answer}", row["answer"])
    return renderer.prompt_ids([*before, {**last, "content": told}])


def warn_of_long_hints(stage, renderer, rows) -> None:
    """Say how many prompts are too long with the hint to be asked again."""
    config = stage.config
    known = [row for row, _ in rows if row.get("answer") is not None]
    lost = [row for row in known if len(hinted_ids(renderer, config, row)) > config.max_prompt_length]
    if lost:
        stage.warn(
            "hints_too_long",
            f"{len(lost)} of {len(known)} prompts with an answer are longer than"
            f" max_prompt_length={config.max_prompt_length} once they hold the hint (the first is {lost[0]['row_id']}),"
            " and are not asked again where no completion is right; raise max_prompt_length, or write a shorter hint.",
        )


def rationalised(stage, renderer, rewards, sampler, block, params, groups) -> dict[int, list]:
    """Scored samples, by place in the block, of prompts that no completion solved, drawn with the answer as a hint
    (``rs.star``, Zelikman et al. 2022).

    They belong to the prompt without the hint; their indices follow those of the direct ones.
    """
    config = stage.config
    asked = []
    for i, ((row, _), group) in enumerate(zip(block, groups)):
        if config.rationalise and row.get("answer") is not None and not any(s.correct and s.terminated for s in group):
            ids = hinted_ids(renderer, config, row)
            if len(ids) <= config.max_prompt_length:
                asked.append((i, row, ids))
    if not asked:
        return {}
    seeds = [
        [stage.seed_for("rationalise", row["row_id"], k) for k in range(config.rationalise)] for _, row, _ in asked
    ]
    found = sample_groups(sampler, [(row, ids) for _, row, ids in asked], params, seeds)
    out = {
        i: [replace(s, prompt_ids=block[i][1], index=config.num_generations + s.index) for s in group]
        for (i, _, _), group in zip(asked, found)
    }
    score(rewards, [s for group in out.values() for s in group])
    return out
