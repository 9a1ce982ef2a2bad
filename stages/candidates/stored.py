"""Candidates of earlier runs: several sets as one, and the same answers behind other rewards."""

from __future__ import annotations

import json
from itertools import groupby

from stages.candidates.rows import verdict
from stages.generation import Sample, by_prompt_id, opens_thought, prompt_ids, score, stored_completion
from stages.running.blocks import remaining_blocks
from stages.selection import top_k_per_prompt
from stages.spec import ConfigError
from storage.schema import complete_row


def warn_of_rewards(stage, rows) -> None:
    """Say so where other rewards are configured than those that the candidates came with, which are the ones that
    select.
    """
    usual = type(stage.config).model_fields["rewards"].get_default(call_default_factory=True)
    if "rewards" not in stage.config.model_fields_set or stage.config.rewards == usual:
        return
    asked, stored = (
        {c.name for c in stage.config.rewards},
        {part["source"].split("/")[0] for row in rows for part in row["scores"] or ()},
    )
    if asked != stored:
        stage.warn(
            "rewards_not_read",
            f"rewards names {', '.join(sorted(asked))}, and the candidates are selected by the rewards that they came"
            f" with ({', '.join(sorted(stored)) or 'without names'}). Write rescore=true to score them anew.",
        )


def joined(stage):
    """Rows of all candidate sets; several sets are numbered anew, prompt by prompt in order of first appearance, sets
    in the order of their labels.
    """
    labels = sorted(stage.many("candidates"))
    datasets = [stage.dataset(f"candidates.{label}" if label else "candidates") for label in labels]
    prompts, counts, cells = {}, {}, set()
    if len(datasets) == 1:
        for row in datasets[0].iter_rows():
            cell = row["prompt_idx"], row["completion_idx"]
            if cell in cells or prompts.setdefault(cell[0], row["prompt_id"]) != row["prompt_id"]:
                what = (
                    f"two rows for completion_idx={cell[1]} of prompt_idx={cell[0]}"
                    if cell in cells
                    else f"two prompts with prompt_idx={cell[0]}"
                )
                raise ConfigError(
                    f"rejection: the candidates have {what}, as files of several runs one behind the other have; give"
                    " each as a dataset of its own (candidates.A=..., candidates.B=...), or number them through"
                )
            cells.add(cell)
            yield row
        return
    for dataset in datasets:
        for row in dataset.iter_rows():
            at = prompts.setdefault(row["prompt_id"], len(prompts))
            counts[at] = counts.get(at, -1) + 1
            yield complete_row(
                "candidates/1",
                {**row, "prompt_idx": at, "completion_idx": counts[at]},
                dataset="candidates",
                source=row["source"],
                origin=row["origin"],
            )


def rescore(stage) -> None:
    """Score candidates of earlier runs with the configured rewards, one Parquet part per block of prompts; what was
    sampled does not change.
    """
    from stages.chat import stage_renderer
    from stages.reward.rewards import build_rewards

    config = stage.config
    groups = [
        list(rows)
        for _, rows in groupby(
            sorted(joined(stage), key=lambda row: (row["prompt_idx"], row["completion_idx"])),
            key=lambda row: row["prompt_idx"],
        )
    ]
    prompts = by_prompt_id(stage, stage.dataset("prompts").iter_rows(), {rows[0]["prompt_id"] for rows in groups})
    lost = [rows[0]["prompt_id"] for rows in groups if rows[0]["prompt_id"] not in prompts]
    if lost:
        raise ConfigError(
            f"rejection: the input prompts lacks {len(lost)} prompts of the candidates (first {lost[0]}); give the"
            " prompts that they were sampled for"
        )
    if config.rescore_best is not None:
        best = lambda rows: top_k_per_prompt(
            [
                [
                    row["reward"] if row["kept"] is not False and row["reward"] is not None else float("nan")
                    for row in rows
                ]
            ],
            config.rescore_best,
        )[0]
        groups = [[rows[i] for i in sorted(best(rows))] for rows in groups]
    writer = stage.writer("candidates", "candidates/1")
    renderer = stage_renderer(stage)
    opened = opens_thought(renderer.tokenizer)
    if stage.units_done * config.block < len(groups):
        rewards = build_rewards(config.rewards, stage.inputs, renderer=renderer, device=stage.device)
        rewards.check([prompts[rows[0]["prompt_id"]] for rows in groups if rows])
    for _, block in remaining_blocks(stage, groups, config.block, "prompts"):
        rows = [row for group in block for row in group]
        extras = [json.loads(row["extra_json"] or "{}") for row in rows]
        stored = [stored_completion(renderer, row) for row in rows]
        shown = [prompt_ids(renderer, row["prompt"], config.prompt_template) for row in rows]
        samples = [
            Sample(
                prompts[row["prompt_id"]],
                before,
                row["completion_idx"],
                ids,
                None,
                finish,
                row["completion"][-1].get("content") or "",
                error=error,
                opened=opened(before),
            )
            for row, before, (ids, finish, error) in zip(rows, shown, stored)
        ]
        score(rewards, samples)
        writer.write(
            [
                complete_row(
                    "candidates/1",
                    {
                        **row,
                        **verdict(sample, extra),
                        "extra_json": json.dumps(
                            extra | {"unscorable": sample.reasons, "tier": sample.tier}, sort_keys=True
                        ),
                    },
                    dataset="candidates",
                    source=row["source"],
                    origin=row["origin"],
                )
                for row, extra, sample in zip(rows, extras, samples)
            ]
        )
    writer.close({"prompts": len(groups), "completions": sum(map(len, groups))})
