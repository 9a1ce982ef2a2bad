"""What a person opens after (or during) an RL run: curves, reward against KL, proxy against held-out reward, the best
and worst samples.

They are functions of the logged metrics and of the datasets ``rollouts`` and ``validation``, so a resumed run reports
the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence


def validation_rows(samples, step: int) -> list[dict]:
    """``eval_samples/1`` rows of one pass over the validation prompts at an optimizer step."""
    from storage.files import canonical_json
    from storage.schema import complete_row

    return [
        complete_row(
            "eval_samples/1",
            {
                "prompt_id": s.prompt["prompt_id"],
                "group_id": s.prompt["group_id"],
                "run_id": f"step-{step}",
                "item_id": s.prompt["row_id"],
                "sample_idx": 0,
                "output": s.text,
                "correct": s.correct,
                "format_error": False,
                "tokens": len(s.ids),
                "extra_json": canonical_json(
                    {
                        "mode": "sample",
                        "step": step,
                        "reward": s.total if s.total == s.total else None,
                        "parts": s.parts,
                        "finish": s.finish_reason,
                        "prompt": s.prompt["prompt"][-1]["content"],
                        **({"unscorable": s.reasons} if s.reasons else {}),
                        **({"error": s.error} if s.error else {}),
                    }
                ),
            },
            dataset="validation",
            source=s.prompt["source"],
            origin="ai",
            split="validation",
        )
        for s in samples
    ]


def best_and_worst(records: Sequence[dict], count: int = 3) -> list[dict]:
    """Table rows of every validation pass: the ``count`` answers with the highest and the lowest reward."""
    found = []
    for step in sorted({r["step"] for r in records}):
        scored = sorted(
            (r for r in records if r["step"] == step and r["reward"] is not None),
            key=lambda r: (-r["reward"], r["item_id"]),
        )
        cut = min(count, len(scored) - len(scored) // 2)
        for which, part in (("best", scored[:cut]), ("worst", scored[cut:][-count:][::-1])):
            found += [
                {
                    "step": step,
                    "which": which,
                    "reward": r["reward"],
                    "prompt": r["prompt"],
                    "answer": r["output"],
                    "tokens": r["tokens"],
                    "finish": r["finish"],
                }
                for r in part
            ]
    return found


def rollout_samples(rows: Iterable[dict], decode: Callable[..., str]) -> list[dict]:
    """:func:`best_and_worst` of the completions in ``rollouts/1`` rows, by iteration; ``decode``: a tokenizer's."""
    return best_and_worst(
        [
            {
                "step": r["iteration"],
                "reward": None if r["reward_tier"] == "unscorable" else r["reward"],
                "item_id": r["row_id"],
                "prompt": decode(r["prompt_ids"], skip_special_tokens=True),
                "output": decode(r["completion_ids"], skip_special_tokens=True),
                "tokens": r["length"],
                "finish": r["finish_reason"] or ("eos" if r["terminated"] else "length"),
            }
            for r in rows
        ]
    )


def first_and_last(path: str, iterations: int) -> list[dict]:
    """Rows of the first and of the last of so many iterations in a ``rollouts/1`` dataset."""
    import pyarrow.compute as pc

    from storage.datasets import open_dataset

    columns = [
        "iteration",
        "row_id",
        "reward",
        "reward_tier",
        "prompt_ids",
        "completion_ids",
        "length",
        "finish_reason",
        "terminated",
    ]
    return [
        row
        for batch in open_dataset(path).iter_batches(columns)
        for row in batch.filter(pc.is_in(batch["iteration"], pc.cast([0, iterations - 1], "int64"))).to_pylist()
    ]


def along(rows: Sequence[dict], x: str, y: str) -> tuple[list[float], list[float], list[int]]:
    """(x, y, step) of the steps at which y was logged; x is its mean over the steps since the last one (a single
    batch's reward is noise).
    """
    points, since = [], []
    for row in rows:
        since += [float(row[x])] if row.get(x) is not None else []
        if since and row.get(y) is not None:
            points.append((sum(since) / len(since), float(row[y]), int(row["step"])))
            since = []
    return tuple(map(list, zip(*points))) if points else ([], [], [])


def figures(rows: Sequence[dict], components: Sequence[str], title: str) -> dict[str, bytes]:
    """{name: PNG} of the plots that show two metrics together, where both were logged."""
    from stages.reporting.reports import metric_curves, path_chart

    found = {}
    names = {name for row in rows for name in row}
    parts = [name for name in (f"reward/{c}" for c in components) if name in names]
    if parts:
        found["curve-reward-components"] = metric_curves(
            rows, ["reward", *parts], title=f"{title}: reward by component"
        )
    paths = {
        name: along(rows, "kl/sequence_sum", metric)
        for name, metric in (("train", "reward"), ("held out", "validation/reward"))
    }
    paths = {name: path for name, path in paths.items() if len(path[0]) > 1}
    if paths:
        found["reward-against-kl"] = path_chart(
            paths,
            title=f"{title}: reward against KL",
            xlabel="KL(policy || reference) per completion, nats",
            ylabel="reward",
        )
    proxy = along(rows, "reward", "validation/reward")
    if len(proxy[0]) > 1:
        found["proxy-against-held-out"] = path_chart(
            {"by step": proxy},
            title=f"{title}: training reward against held-out reward",
            xlabel="reward on training prompts (proxy)",
            ylabel="reward on held-out prompts",
            diagonal=True,
        )
        found["curve-held-out"] = metric_curves(
            rows, ["reward", "validation/reward"], title=f"{title}: training and held-out reward"
        )
    return found


def rl_report(stage, title: str, summary: dict, decode: Callable[..., str]) -> None:
    """All curves and plots of an RL stage, its samples as a table, and the page that sums it up. One rank draws
    them.
    """
    if stage.rank != 0:
        return
    from stages.evaluation.scores import records_of
    from stages.reporting import reports
    from stages.reporting.curves import logged_metrics, training_report
    from storage.datasets import open_dataset

    rows = logged_metrics(stage)
    for name, png in figures(rows, [c.name for c in stage.config.rewards], title).items():
        stage.report(name, png=png)
    blocks = []
    if table := rollout_samples(first_and_last(str(stage.workdir / "out" / "rollouts"), summary["iterations"]), decode):
        stage.report("rollout-samples", table=table)
        blocks.append(
            (
                "Best and worst completions of the first and of the last iteration",
                reports.sample_table(table, limit=160),
            )
        )
    path = stage.workdir / "out" / "validation"
    if path.exists():
        table = best_and_worst(records_of(open_dataset(str(path)).iter_rows()))
        if table:
            stage.report("validation-samples", table=table)
            ends = {table[0]["step"], table[-1]["step"]}
            blocks.append(
                (
                    "Best and worst held-out samples, first and last pass",
                    reports.sample_table([r for r in table if r["step"] in ends], limit=160),
                )
            )
    if not any(row.get("kl/sequence_sum") is not None for row in rows):
        blocks.append(
            "No KL to the reference was logged, so there is no plot of reward against KL: monitor_kl=true logs it at"
            " the price of a reference forward."
        )
    training_report(stage, title, summary, *blocks)
