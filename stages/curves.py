"""The report every trained stage ends with: its curves, its numbers, its warnings."""

from __future__ import annotations

import json

#: Metric groups drawn as figures, in this order, where the stage logged them.
FIGURES = {
    "loss": ("train/loss", "validation/loss"),
    "accuracy": ("train/accuracy", "validation/accuracy", "rewards/accuracies", "validation/rewards/accuracies"),
    "rewards": ("rewards/chosen", "rewards/rejected", "rewards/margins"),
    "logps": ("logps/chosen", "logps/rejected"),
    "reward": ("reward/mean", "reward/shaped", "reward/verifier", "train/correct"),
    "kl": ("kl/reference", "kl/sequence_sum", "policy/k3"),
    "kl_coef": ("kl/coef",),
    "critic": ("critic/explained_variance",),
    "critic_loss": ("critic/loss",),
    "length": ("completions/mean_length", "completions/mean_terminated_length"),
    "groups": ("reward/frac_zero_std", "completions/clipped_ratio"),
    "entropy": ("train/entropy",),
    "learning_rate": ("train/learning_rate",),
    "grad_norm": ("train/grad_norm",),
}


def logged_metrics(stage) -> list[dict]:
    """Rows of the stage's metrics file: ``{"step": s, name: value, ...}``."""
    file = stage.workdir / "metrics.jsonl"
    rows = []
    if file.exists():
        for line in file.read_text().splitlines():
            record = json.loads(line)
            rows.append({"step": record["step"], **record["metrics"]})
    return rows


def training_report(stage, title: str, summary: dict) -> None:
    """Figures of the logged curves and one markdown page with the final numbers."""
    from stages.reports import document, facts, metric_curves

    rows = logged_metrics(stage)
    names = {name for row in rows for name in row}
    for figure, wanted in FIGURES.items():
        present = [n for n in wanted if n in names]
        if present:
            stage.report(f"curve-{figure}", png=metric_curves(rows, present, title=f"{title}: {figure}"))
    stage.report("summary", markdown=document(title, facts(summary)))
