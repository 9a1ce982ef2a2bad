"""Which candidates are kept, and what is written of them: demonstrations, prompts of medium difficulty."""

from __future__ import annotations

import json

import numpy as np

from stages import selection
from stages.candidates.rows import rationalised_row
from storage.schema import complete_row, provenance


def drop_duplicates(matrix, where) -> int:
    """Later copies of a valid answer within one prompt lose their score, so that no selector takes them; returns how
    many.
    """
    seen, before = set(), int((matrix == matrix).sum())
    for (i, j), row in sorted(where.items()):
        key = i, json.dumps(row["completion"], sort_keys=True)
        if key in seen:
            matrix[i, j] = float("nan")
        elif matrix[i, j] == matrix[i, j]:
            seen.add(key)
    return before - int((matrix == matrix).sum())


def select(matrix, correct, config, stage) -> list[int]:
    """Flat indices (prompt-major) kept by the configured selector."""
    width = matrix.shape[1]
    floor = None if config.threshold is None else level(matrix, config)
    # drawn among those that may be kept, as many as a selector of the best would keep
    if floor is not None and config.select.startswith("random"):
        matrix = np.where(matrix > floor, matrix, np.nan)
    if config.select in ("top_per_prompt", "top_k_per_prompt"):
        best = selection.top_k_per_prompt(matrix, config.k if config.select == "top_k_per_prompt" else 1)
        flat = [i * width + j for i, row in enumerate(best) for j in row]
    elif config.select == "top_k_overall":
        flat = selection.top_k_overall(matrix, config.k, config.max_per_prompt)
    elif config.select == "random_k_overall":
        flat = selection.random_k_overall(matrix, config.k, stage.rng("random_k_overall"))
    elif config.select == "threshold":
        flat = selection.threshold(matrix, floor)
    elif config.select == "all_correct":
        flat = np.flatnonzero(correct & ~np.isnan(matrix))
    else:
        picks = selection.random_per_prompt(matrix, stage.rng("random_per_prompt"))
        flat = [i * width + j for i, j in enumerate(picks) if j is not None]
    flat = sorted(int(i) for i in flat)
    if floor is not None and config.select != "threshold":
        flat = [i for i in flat if matrix.flat[i] > floor]
    if config.max_per_prompt is not None and config.select in ("threshold", "all_correct"):
        flat = [
            i
            for at, i in enumerate(flat)
            if at < config.max_per_prompt or flat[at - config.max_per_prompt] // width != i // width
        ]
    return flat


def level(matrix, config) -> float:
    """The threshold as a reward: itself, or the quantile of the valid rewards."""
    if config.threshold_mode == "absolute":
        return config.threshold
    return float(np.nanquantile(matrix, config.threshold)) if (~np.isnan(matrix)).any() else 0.0


def write_selected(stage, rows, candidates=()) -> None:
    """The selected rows as demonstrations, in the split of their prompt. candidates: what they were selected from, for
    saying why nothing was.
    """
    from stages.ingestion.curation import generated_splits
    from stages.reward.verdicts import commonest_failure, failures

    splits = generated_splits(rows, stage.config.validation_fraction)
    writer = stage.writer("selected", "demonstrations/1")
    writer.write(
        [
            complete_row(
                "demonstrations/1",
                {
                    "messages": row["prompt"] + row["completion"],
                    "train_turns": [len(row["prompt"])],
                    "kept": True,
                    "gen": row["gen"],
                    "category": json.loads(row["extra_json"] or "{}").get("category"),
                    **provenance(row),
                },
                dataset="selected",
                source=row["source"],
                origin="ai",
                split=splits[row["prompt_id"]],
            )
            for row in rows
        ]
    )
    writer.close({"selected": len(rows)})
    asked = stage.config.select == "all_correct" or stage.config.threshold is not None
    if not rows and stage.config.allow_empty and asked:  # elsewhere the candidates alone may be what is wanted
        stage.warn(
            "nothing_selected",
            "No completion is "
            + ("right" if stage.config.threshold is None else f"above threshold={stage.config.threshold:g}")
            + ", so there is nothing to train on. "
            + ("Sample" if stage.config.threshold is None else "Lower the threshold, or sample")
            + " more (num_generations); the candidates dataset shows each row's reward and drop_reason.",
        )
    if not rows and not stage.config.allow_empty:
        lost = [
            failures(dict.fromkeys(why), why)
            for row in candidates
            if row["drop_reason"] == "unscorable"
            for why in [json.loads(row["extra_json"])["unscorable"]]
        ]
        if lost and not any(row["reward"] is not None for row in candidates):
            raise ValueError(
                f"Nothing was selected: {len(lost)} completions ended by themselves but could not be scored. Most"
                f" often: {commonest_failure(lost)}. Mend the reward component, or give it more time."
            )
        why = f" {len(lost)} completions could not be scored, most often: {commonest_failure(lost)}." if lost else ""
        raise ValueError(
            "Nothing was selected: no completion ended by itself and could be scored above the threshold. Raise"
            " max_completion_length or num_generations, or lower threshold; the candidates dataset shows each row's"
            f" drop_reason.{why}"
        )


def write_banded(stage, rows) -> None:
    """The prompts whose pass rate over their direct completions with a verdict is in ``difficulty_band``, with the
    counts (``rs.difficulty_band``).
    """
    low, high = stage.config.difficulty_band
    verdicts: dict[str, list[bool]] = {}
    for row in rows:
        if row["correct"] is not None and not rationalised_row(row):
            verdicts.setdefault(row["prompt_id"], []).append(row["correct"])
    kept = {
        name for name, found in verdicts.items() if selection.difficulty_band([sum(found)], len(found), low, high)[0]
    }
    writer = stage.writer("banded", "prompts/1")
    for row in stage.dataset("prompts").iter_rows():
        found = verdicts.get(row["prompt_id"])
        if row["prompt_id"] in kept:
            extra = json.loads(row["extra_json"] or "{}") | {
                "pass_rate": sum(found) / len(found),
                "passed": sum(found),
                "sampled": len(found),
            }
            writer.write(
                [
                    complete_row(
                        "prompts/1",
                        {**row, "extra_json": json.dumps(extra, sort_keys=True)},
                        dataset="banded",
                        source=row["source"],
                        origin=row["origin"],
                        split=row["split"],
                    )
                ]
            )
    rates = [sum(found) / len(found) for found in verdicts.values()]
    writer.close(
        {
            "prompts": len(rates),
            "kept": len(kept),
            "too_hard": sum(rate < low for rate in rates),
            "too_easy": sum(rate > high for rate in rates),
        }
    )
    stage.summary({"banded": len(kept), "banded/of": len(verdicts)})
    if not kept:
        stage.warn(
            "band_is_empty",
            f"No prompt has a pass rate in {stage.config.difficulty_band}: sample more completions, or widen"
            " difficulty_band.",
        )
