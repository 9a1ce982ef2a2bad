"""Rows of ``candidates/1``: a scored completion, and what keeps one from being selected."""

from __future__ import annotations

import json
import math

from stages.generation import gen_record
from storage.schema import complete_row, provenance


def candidates_of(stage, renderer, sampler, row: dict, prompt_idx: int, seeds, group, hinted, note: dict) -> list[dict]:
    """Rows of a prompt's completions, then of those that were sampled with its answer as a hint."""
    made = []
    for sample, mode in [*((s, {}) for s in group), *((s, {"mode": "rationalised"}) for s in hinted)]:
        seed = (
            seeds[sample.index]
            if not mode
            else stage.seed_for("rationalise", row["row_id"], sample.index - stage.config.num_generations)
        )
        gen = gen_record(stage, stage.config, renderer, seed, engine=sampler.name)
        made.append(
            complete_row(
                "candidates/1",
                candidate(sample, prompt_idx, gen, {**note, **mode}),
                dataset="candidates",
                source=row["dataset"],
                origin="ai",
            )
        )
    return made


def verdict(sample, note: dict) -> dict:
    """What scoring says of a candidate; an answer that is empty, or rationalised and not right, is never kept."""
    reason = None if sample.terminated else "engine_error" if sample.error is not None else "truncated"
    if reason is None and not sample.text.strip():
        reason = "empty"
    if reason is None and math.isnan(sample.total):
        reason = "unscorable"
    if reason is None and note.get("mode") == "rationalised" and not sample.correct:
        reason = "hint_did_not_help"
    return {
        "scores": [{"source": k, "value": v} for k, v in sample.parts.items()],
        "reward": None if math.isnan(sample.total) else sample.total,
        "correct": sample.correct,
        "kept": reason is None,
        "drop_reason": reason,
    }


def candidate(sample, prompt_idx: int, gen: dict, note: dict) -> dict:
    """One ``candidates/1`` row."""
    return {
        "prompt": sample.prompt["prompt"],
        **provenance(sample.prompt),
        "prompt_idx": prompt_idx,
        "completion_idx": sample.index,
        "completion": [{"role": "assistant", "content": sample.text}],
        **verdict(sample, note),
        "gen": gen,
        "split": sample.prompt["split"],
        "extra_json": json.dumps(
            {
                "completion_ids": sample.ids,
                "finish_reason": sample.finish_reason,
                "logp_sum": None if sample.logps is None else sum(sample.logps),
                "unscorable": sample.reasons,
                "category": sample.prompt.get("category"),
                "tier": sample.tier,
                **note,
                **({"reencoded": True} if sample.reencoded else {}),
                **({"error": sample.error} if sample.error else {}),
            },
            sort_keys=True,
        ),
    }


def rationalised_row(row: dict) -> bool:
    """Whether a candidate was sampled with the answer as a hint."""
    return json.loads(row["extra_json"] or "{}").get("mode") == "rationalised"
