"""Before a training stage starts: what will run, what is trained in five real rows, and the dearest micro-batch, first.

What would fail after an hour (memory on the longest rows, a mask that trains nothing or never trains the stop token) fails or warns
in the first seconds. Nothing here changes a result: the trial micro-batch's gradients are thrown away.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

from stages.batching import Item, plan, size

SAMPLES = 5
LONGEST_SHOWN = 1200


def preflight(stage, trainer, items: Sequence[Item], batch_size: int, renderer, *, completions_end: bool = True,
              prepare: Callable[[list[Item]], object] | None = None) -> None:
    """Report the plan and marked samples of these training items and try the dearest micro-batch. Skipped on a resume.

    Args:
        batch_size: items per optimizer step.
        prepare: gives the trial's items what their loss needs beyond themselves.
        completions_end: trained responses are expected to train a stop token (False for plain text and reward models).

    Raises:
        TrainingError: the dearest micro-batch does not fit into memory.
    """
    if stage.checkpoints.latest() is not None or not items:
        return
    facts = plan_facts(items, batch_size, trainer.total_steps, trainer.config.max_tokens_per_micro_batch)
    samples = [marked(item, renderer) for item in items[:SAMPLES]]
    stage.report("preflight", markdown=page(facts, samples), table=[{"row": s["row"], "segments": s["segments"]} for s in samples])
    stage.log("plan: " + ", ".join(f"{v:,} {k}" if isinstance(v, int) else f"{k} {v}" for k, v in facts.items()))
    if completions_end:
        check_stop_tokens(stage, items, renderer)
    seconds, tokens, peak = try_dearest(trainer, items, batch_size, prepare)
    whole = facts["tokens per step"] * trainer.total_steps * seconds / max(1, tokens)
    stage.log(f"the dearest micro-batch ({tokens:,} tokens) ran in {seconds:.2f} s; memory so far {peak:,.0f} MiB; "
              f"{trainer.total_steps} steps will take about {duration(whole)}")


def plan_facts(items: Sequence[Item], batch_size: int, steps: int, budget: int) -> dict[str, int | str]:
    """What a person checks before waiting: counts of rows, steps, tokens, micro-batches."""
    sizes = [size(i) for i in items]
    per_step = [items[i:i + batch_size] for i in range(0, len(items), batch_size)]
    micro = [len(plan(step, budget)) for step in per_step[:50]]
    return {"rows": len(items), "optimizer steps": steps, "rows per step": min(batch_size, len(items)),
            "tokens per step": round(statistics.mean(sizes) * min(batch_size, len(items))), "micro-batches per step at most": max(micro),
            "tokens in the longest row": max(sizes), "trained": f"{sum(i.n_targets for i in items) / max(1, sum(i.n_tokens for i in items)):.0%} of the tokens"}


def marked(item: Item, renderer) -> dict:
    """One item as text in segments ``[text, trained]``: the prompt, then each response."""
    segments: list[list] = [[_text(renderer, item.prompt.tolist()), False]] if len(item.prompt) else []
    for k, (ids, mask) in enumerate(zip(item.responses, item.masks)):
        if len(item.responses) > 1:
            segments.append([f"\n— response {k + 1} —\n", None])
        start = 0
        for end in range(1, len(ids) + 1):
            if end == len(ids) or mask[end] != mask[start]:
                segments.append([_text(renderer, ids[start:end].tolist()), bool(mask[start])])
                start = end
    return {"row": item.row_id, "segments": segments}


def _text(renderer, ids: list[int]) -> str:
    return renderer.tokenizer.decode(ids, skip_special_tokens=False)


def page(facts, samples) -> str:
    """The report: the plan as a table, the samples with what is trained in bold between brackets."""
    lines = ["# Before training", "", "| | |", "|---|---|", *(f"| {k} | {v:,} |" if isinstance(v, int) else f"| {k} | {v} |" for k, v in facts.items()), "",
             "Rows as the model sees them; what is trained stands in 【brackets】.", ""]
    for sample in samples:
        text = "".join(f"【{t}】" if trained else t for t, trained in sample["segments"])
        if len(text) > LONGEST_SHOWN:
            text = text[: LONGEST_SHOWN // 2] + " … " + text[-LONGEST_SHOWN // 2:]
        lines += [f"### {sample['row']}", "", "```text", text.replace("```", "ˋˋˋ"), "```", ""]
    return "\n".join(lines)


def check_stop_tokens(stage, items: Sequence[Item], renderer) -> None:
    """Warn when trained responses hardly ever train a stop token: the model would not learn to stop."""
    responses = [(ids, mask) for item in items[:512] for ids, mask in zip(item.responses, item.masks) if mask.any()]
    ending = sum(any(int(t) in renderer.stop_ids for t in ids[max(0, len(ids) - 2):][mask[max(0, len(ids) - 2):] > 0]) for ids, mask in responses)
    if responses and ending < 0.5 * len(responses):
        stage.warn("stop_token_not_trained", f"Only {ending} of {len(responses)} trained responses train a stop token, so the model may never stop. "
                   "Raise max_length, or use a chat template that closes assistant turns with an end token.")


def try_dearest(trainer, items: Sequence[Item], batch_size: int, prepare=None) -> tuple[float, int, float]:
    """Forward and backward of the largest micro-batch that a step could hold: (seconds, its tokens, peak MiB so far)."""
    import torch

    from stages.harness import peak_memory_mib
    from stages.training import TrainingError

    step = sorted(items, key=size, reverse=True)[:batch_size]
    group = max(plan(step, trainer.config.max_tokens_per_micro_batch), key=lambda g: sum(map(size, g)))
    tokens = sum(map(size, group))
    started = time.monotonic()
    try:
        if prepare is not None:
            prepare(step)
        trainer.backward(group, trainer.objective.counts(step))
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, (MemoryError, torch.OutOfMemoryError)) and "alloc" not in str(error).lower():
            raise
        raise TrainingError(f"The dearest micro-batch ({len(group)} rows, {tokens:,} tokens) does not fit into memory. Lower max_tokens_per_micro_batch "
                            f"(now {trainer.config.max_tokens_per_micro_batch:,}) or max_length, or write activation_checkpointing=true.") from error
    finally:
        trainer.optimizer.zero_grad(set_to_none=True)
    peak = torch.cuda.max_memory_allocated() / 2**20 if trainer.device.startswith("cuda") else peak_memory_mib()
    return time.monotonic() - started, tokens, peak


def duration(seconds: float) -> str:
    """A rough length of time for a person."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
