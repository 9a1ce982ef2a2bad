"""Several reward models on the same held-out rows, to choose one of them by (stage ``select_checkpoint``)."""

from __future__ import annotations

from stages.reward_models.reward_eval import Unreported, judged, rows_of
from stages.reward_models.reward_heads import has_card
from stages.reward_models.reward_scorers import load_scorer
from stages.spec import ConfigError, did_you_mean

#: Metrics of held-out rows (``rm.eval``) of which more is better, and of which less is; the first that the rows have
#: decides where nobody says by which.
MORE = ("accuracy", "spearman", "pearson", "auc", "kendall_tau", "best_found", "half_credit_accuracy", "mean_margin")
MORE += ("length_residual_accuracy", "length_matched_accuracy", "step_auc", "first_error_accuracy", "solution_auc")
LESS = ("log_loss", "ece", "brier", "mse", "mae", "tie_rate", "order_inconsistency", "disagreement")
#: How metrics of parts begin: of strengths and sources, of classes of steps; of probes that fool, of flips.
MORE_OF, LESS_OF = ("accuracy_strength_", "accuracy_source_", "step_auc_"), ("probe/", "flips/")


def is_reward_model(path: str) -> bool:
    """Whether a model directory holds a reward model: it has a card, or is a sequence classifier."""
    from transformers import AutoConfig

    made = AutoConfig.from_pretrained(path).architectures or [] if not has_card(path) else []
    return has_card(path) or any("SequenceClassification" in name for name in made)


def less_is_better(metric: str) -> bool:
    return metric in LESS or metric.startswith(LESS_OF)


def decides(metric: str) -> bool:
    """Whether of two reward models the one with more, or with less, of it is the better one."""
    return metric in (*MORE, *LESS) or metric.startswith((*MORE_OF, *LESS_OF))


def check_metric(metric: str) -> None:
    """Refuse a metric by which no reward model is better than another one."""
    if not decides(metric):
        raise ConfigError(
            f"select_checkpoint: select_on=metric:{metric} says not which of two reward models is the better one;"
            f" {did_you_mean(metric, [*MORE, *LESS])}write metric:NAME with one of {', '.join((*MORE, *LESS))}, or a part"
            f" such as {MORE_OF[1]}NAME, {LESS_OF[0]}NAME"
        )


def measured(stage, labels, probe_pairs: int) -> dict[str, dict[str, float]]:
    """{candidate: metrics of its held-out rows} (``rm.eval``), a candidate after the other; a killed run goes on behind
    the last one.

    Raises:
        ConfigError: the data are none that a reward model is judged by, or have no row in the split.
    """
    from stages.reward_models.reward_objectives import KINDS

    config, data = stage.config, stage.dataset("data")
    if data.kind not in KINDS:
        raise ConfigError(
            f"select_checkpoint: the candidates are reward models, and nobody judged the rows of {data.name}"
            f" ({data.kind}); give --input data=REF with one of {', '.join(KINDS)}"
        )
    rows = rows_of(data, config.split, config.eval_rows)
    if not rows:
        splits = ", ".join(f"{name} ({n})" for name, n in (data.manifest.get("splits") or {}).items()) or "none"
        raise ConfigError(
            f"select_checkpoint: data has no row in split {config.split!r}, by which reward models could be judged; write"
            f" split=NAME (it has {splits})"
        )
    checkpoint = stage.checkpoints.latest()
    found: dict[str, dict[str, float]] = dict(checkpoint.state["found"]) if checkpoint else {}
    scorer = None
    for label in labels:
        if label in found:
            continue
        del scorer  # before the next one takes its memory
        scorer = load_scorer(stage.path(f"candidates.{label}"), stage.device, config.max_tokens_per_micro_batch)
        found[label] = judged(Unreported(stage), scorer, data.kind, rows, config.split, probe_pairs)
        stage.save_checkpoint(len(found), {"found": found})
        stage.progress(len(found), len(labels), f"candidate {label}")
    return found
