"""What metrics were called before they had TRL's names: runs of then are read under the names of now, and who writes a
former name is told the new one.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

FORMER = {
    "reward/mean": "reward",
    "reward/group_std": "reward_std",
    "reward/frac_zero_std": "frac_reward_zero_std",
    "reward/mean_before": "reward/before",
    "train/correct": "completions/correct_fraction",
    "policy/clip_low": "clip_ratio/low_mean",
    "policy/clip_high": "clip_ratio/high_mean",
    "policy/k1": "approx_kl/k1",
    "policy/k2": "approx_kl/k2",
    "policy/k3": "approx_kl/k3",
    "kl/reference": "kl",
    "sampling/logp_difference/mean": "sampling/sampling_logp_difference/mean",
    "sampling/logp_difference/max": "sampling/sampling_logp_difference/max",
    "train/policy": "policy_loss",
    "train/value": "value_loss",
    "train/ptx": "ptx_loss",
    "router/aux_loss": "aux_loss",
    "token_accuracy": "mean_token_accuracy",
    "score_mean": "mean_reward",
    "score_std": "std_reward",
    "z0": "kl",
}
#: Parts of a stage's numbers: of a validation pass or a split, of the last batch, of a member of an ensemble.
PARTS = re.compile(r"(?:(?:validation|test|earlier|last|member/[^/]+)/)?")


def current_name(name: str, stage: str | None = None) -> str:
    """The name that a metric has now; itself where it did not change. ``stage``: whose it is, where that is known (the
    KL of rl's loss and that of distill's had one name).
    """
    part = PARTS.match(name)[0]
    name = name.removeprefix(part)
    if stage == "rl" and name == "train/kl":
        return f"{part}kl_loss"
    if name not in FORMER and not name.startswith("train/final_"):
        name = name.removeprefix("train/")
    return part + FORMER.get(name, name)


def under_current_names(metrics: Mapping[str, Any], stage: str) -> dict[str, Any]:
    """A run's metrics under the names of now. A former name stays where the new one is there too: then it is another
    metric, of a reward component that is called ``mean``. Evaluations had these names before.
    """
    if stage == "evaluate":
        return dict(metrics)
    return {new if (new := current_name(name, stage)) not in metrics else name: v for name, v in metrics.items()}


def renamed(name: str, known: Collection[str], validation: bool = False) -> str:
    """``NAME is called NEW here; `` where ``name`` is a former name, or the name in TRL's evaluations (``eval_NAME``), of
    one of ``known``; else the empty string. ``validation``: these are numbers of a validation pass, without its name.
    """
    new = current_name(re.sub(r"^eval_(?=.)", "validation/", name))
    new = new.removeprefix("validation/") if validation else new
    return f"{name} is called {new} here; " if new != name and new in known else ""
