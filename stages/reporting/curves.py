"""The report every trained stage ends with: its curves, its numbers, its warnings."""

from __future__ import annotations

import json

#: Metric groups drawn as figures, in this order, where the stage logged them.
FIGURES = {
    "loss": ("loss", "validation/loss"),
    "accuracy": ("accuracy", "validation/accuracy", "rewards/accuracies", "validation/rewards/accuracies"),
    "rewards": ("rewards/chosen", "rewards/rejected", "rewards/margins"),
    "logps": ("logps/chosen", "logps/rejected"),
    "reward": ("reward", "reward/shaped", "validation/reward", "completions/correct_fraction"),
    "tier_agreement": (
        "reward/tier_agreement/rule_learned",
        "reward/tier_agreement/rule_judge",
        "reward/tier_agreement/learned_judge",
    ),
    "kl": ("kl", "kl/sequence_sum", "approx_kl/k3"),
    "kl_coef": ("kl/coef",),
    "clip": ("clip_ratio/low_mean", "clip_ratio/high_mean", "policy/outside_range"),
    "ratio": (
        "policy/ratio",
        "policy/ess_fraction",
        "sampling/importance_sampling_ratio/mean",
        "sampling/importance_sampling_ratio/max",
    ),
    "engine_mismatch": ("sampling/sampling_logp_difference/mean", "sampling/mismatch_kl"),
    "advantage": ("advantage/std", "advantage/mean"),
    "critic": ("critic/explained_variance",),
    "critic_loss": ("critic/loss",),
    "length": (
        "completions/mean_length",
        "completions/mean_terminated_length",
        "completions/mean_correct_length",
        "completions/mean_incorrect_length",
    ),
    "truncation": (
        "completions/clipped_ratio",
        "completions/repetition",
        "completions/empty_fraction",
        "reward/unscorable_fraction",
    ),
    "groups": ("frac_reward_zero_std", "groups/informative_fraction", "groups/filter_rate"),
    "self_distillation": (
        "self_distillation/reprompt_sample_fraction",
        "self_distillation/success_group_fraction",
        "self_distillation/feedback_used_fraction",
    ),
    "self_distillation_kl": ("self_distillation/kl",),
    "entropy": ("entropy",),
    "entropy_coef": ("entropy_coef", "entropy_coef/paid"),
    "learning_rate": ("learning_rate",),
    "grad_norm": ("grad_norm",),
}


class MetricLog:
    """The rows of a stage's metrics file, read on from where the last :meth:`rows` ended."""

    def __init__(self, stage):
        self._file, self._read, self._rows = stage.workdir / "metrics.jsonl", 0, []

    def rows(self) -> list[dict]:
        """``{"step": s, name: value, ...}`` of every line so far; none where the file is missing. Of several ranks the
        first writes it, so that for another one its last line may be on its way.
        """
        if self._file.exists():
            with open(self._file, "rb") as lines:
                lines.seek(self._read)
                for line in lines:
                    if not line.endswith(b"\n"):
                        break
                    self._read += len(line)
                    record = json.loads(line)
                    self._rows.append({"step": record["step"], **record["metrics"]})
        return self._rows


def logged_metrics(stage) -> list[dict]:
    """All rows of :class:`MetricLog`."""
    return MetricLog(stage).rows()


def training_report(stage, title: str, summary: dict, *blocks) -> None:
    """Figures of the logged curves and one markdown page with the final numbers and the warnings; ``blocks`` are
    further parts of the page. One rank draws them."""
    if stage.rank != 0:
        return
    from stages.reporting.reports import document, facts, metric_curves

    rows = logged_metrics(stage)
    names = {name for row in rows for name in row}
    for figure, wanted in FIGURES.items():
        present = [n for n in wanted if n in names]
        if present:
            stage.report(f"curve-{figure}", png=metric_curves(rows, present, title=f"{title}: {figure}"))
    warned = "\n".join(facts({w["code"]: w["text"]}) for w in stage.warnings)  # a code may have several texts
    stage.report("summary", markdown=document(title, facts(summary), ("Warnings", warned), *blocks))
