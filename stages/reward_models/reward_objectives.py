"""How a reward model is trained: one row per objective (catalogue section B). Imports nothing heavy.

A row says which rows of data it takes, how they become items, which loss is summed over them, and how the trained
model's outputs are read as one score. All of them run in the one training loop; none has a trainer of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

from stages.spec import ConfigError


@dataclass(frozen=True)
class RewardObjective:
    """One way to train a reward model.

    kinds: dataset kinds it learns from, the natural one first. encode: rows -> items. loss: (model outputs, batch,
    settings) -> Sums. reads: what the loss and the scorer read (a key of ``reward_heads.READS``). score: class that
    scores with the trained model. anchor: which scores become 0 on average unless the config says otherwise.
    """

    name: str
    kinds: tuple[str, ...]
    encode: str
    loss: str
    reads: str = "response"
    score: str = "stages.reward_models.reward_scorers:ScalarScorer"
    anchor: str = "none"
    settings: tuple[tuple[str, object], ...] = ()  # config values that the name stands for
    source: str = ""


_PAIRS, _RANKINGS, _LABELS = ("pairs/1",), ("rankings/1",), ("unpaired/1",)
_ROWS = (
    RewardObjective(
        "bt",
        _PAIRS,
        "stages.reward_models.reward_data:pair_items",
        "stages.reward_models.reward_losses:bradley_terry",
        anchor="chosen",
        source="rm.bt",
    ),
    RewardObjective(
        "margin",
        _PAIRS,
        "stages.reward_models.reward_data:pair_items",
        "stages.reward_models.reward_losses:bradley_terry",
        anchor="chosen",
        settings=(("use_margin", True),),
        source="rm.margin (Llama 2)",
    ),
    RewardObjective(
        "soft_label",
        _PAIRS,
        "stages.reward_models.reward_data:pair_items",
        "stages.reward_models.reward_losses:bradley_terry",
        anchor="chosen",
        settings=(("use_soft_labels", True),),
        source="rm.soft_label",
    ),
    RewardObjective(
        "kwise_pairs",
        _RANKINGS,
        "stages.reward_models.reward_data:ranking_items",
        "stages.reward_models.reward_losses:kwise_pairs",
        anchor="chosen",
        source="rm.kwise_pairs (InstructGPT)",
    ),
    RewardObjective(
        "plackett_luce",
        _RANKINGS,
        "stages.reward_models.reward_data:ranking_items",
        "stages.reward_models.reward_losses:plackett_luce",
        anchor="chosen",
        source="rm.plackett_luce (Starling)",
    ),
    RewardObjective(
        "pointwise_bce",
        _LABELS,
        "stages.reward_models.reward_data:labelled_items",
        "stages.reward_models.reward_losses:pointwise_bce",
        source="rm.pmp, binary discrimination (Askell et al. 2021)",
    ),
    RewardObjective(
        "control_tokens",
        ("pairs/1", "unpaired/1"),
        "stages.reward_models.reward_data:control_items",
        "stages.reward_models.reward_losses:control_tokens",
        score="stages.reward_models.reward_scorers:ControlScorer",
        source="rm.pmp, binary discrimination by control tokens (Askell et al. 2021)",
    ),
    RewardObjective(
        "regression",
        ("ratings/1", "trajectories/1"),
        "stages.reward_models.reward_data:rating_items",
        "stages.reward_models.reward_losses:regression",
        score="stages.reward_models.reward_scorers:RatingScorer",
        source="rm.regression, rm.agentic",
    ),
    RewardObjective(
        "orm",
        _LABELS,
        "stages.reward_models.reward_data:labelled_items",
        "stages.reward_models.reward_losses:outcome",
        reads="tokens",
        score="stages.reward_models.reward_scorers:OutcomeScorer",
        source="rm.orm (Cobbe et al. 2021, Lightman et al. 2023)",
    ),
    RewardObjective(
        "value",
        ("unpaired/1", "ratings/1"),
        "stages.reward_models.reward_data:labelled_items",
        "stages.reward_models.reward_losses:value",
        reads="tokens",
        score="stages.reward_models.reward_scorers:ValueScorer",
        source="rm.value",
    ),
    RewardObjective(
        "prm",
        ("stepwise/1",),
        "stages.reward_models.reward_data:step_items",
        "stages.reward_models.reward_losses:steps",
        reads="tokens",
        score="stages.reward_models.reward_scorers:StepScorer",
        source="rm.prm (Lightman et al. 2023)",
    ),
    RewardObjective(
        "pairwise",
        _PAIRS,
        "stages.reward_models.reward_data:comparison_items",
        "stages.reward_models.reward_losses:pairwise",
        score="stages.reward_models.reward_scorers:PairwiseScorer",
        source="rm.pairwise",
    ),
    RewardObjective(
        "t2t_point",
        _PAIRS,
        "stages.reward_models.reward_data:point_label_items",
        "stages.reward_models.reward_losses:label_nll",
        reads="labels",
        score="stages.reward_models.reward_scorers:PointLabelScorer",
        source="rm.t2t_point (SLiC-HF)",
    ),
    RewardObjective(
        "t2t_pair",
        _PAIRS,
        "stages.reward_models.reward_data:pair_label_items",
        "stages.reward_models.reward_losses:label_nll",
        reads="labels",
        score="stages.reward_models.reward_scorers:PairLabelScorer",
        source="rm.t2t_pair (SLiC-HF, RSO)",
    ),
)
REWARD_OBJECTIVES: dict[str, RewardObjective] = {row.name: row for row in _ROWS}
#: Objective of ``objective=auto``: the natural one of each kind of data.
NATURAL = {
    "pairs/1": "bt",
    "rankings/1": "kwise_pairs",
    "ratings/1": "regression",
    "unpaired/1": "pointwise_bce",
    "stepwise/1": "prm",
    "trajectories/1": "regression",
}
KINDS = tuple(NATURAL)
_BT = ("bt", "margin", "soft_label")
#: Objectives of models that compare answers: their scores have no zero point.
COMPARING = ("pairwise", "t2t_pair")
#: Settings that some objectives read and the others would ignore.
# label words are read by the language model's own head
READ_BY: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("use_margin", "center_rewards_coefficient", "curriculum", "spoiled_fraction", "spoiled_by"), _BT),
    **dict.fromkeys(("use_soft_labels", "label_smoothing"), (*_BT, "pairwise")),
    "lm_loss_weight": (*_BT, "orm"),
    "pair_weighting": ("kwise_pairs",),
    **dict.fromkeys(("tie_policy", "top_ranks", "normalise_by_k"), ("plackett_luce",)),
    **dict.fromkeys(("attributes", "attribute_weights", "regression_loss", "centre_annotators"), ("regression",)),
    **dict.fromkeys(("balance", "outcome_head", "outcome_token"), ("orm",)),
    "aggregation": ("orm", "prm"),
    **dict.fromkeys(("step_classes", "step_separator", "after_first_error", "hard_labels", "neutral_as"), ("prm",)),
    "label_words": ("t2t_point", "t2t_pair", "control_tokens"),
    "label_request": ("t2t_point", "t2t_pair"),
    "normalise_over_labels": ("t2t_point",),
    **dict.fromkeys(("init_head", "pooling"), tuple(row.name for row in _ROWS if row.reads != "labels")),
}


def refuse_unread(name: str, config) -> None:
    """Refuse settings, other than their defaults, that the objective would ignore.

    Raises:
        ConfigError: names the first such setting and the objectives that read it.
    """
    for field, readers in READ_BY.items():
        value = getattr(config, field)
        if name not in readers and value != type(config).model_fields[field].get_default(call_default_factory=True):
            raise ConfigError(
                f"{field}={value} is a setting of objective {' and '.join(readers)}, which objective={name} does not"
                f" read; leave {field} out, or take such an objective"
            )


def objective_for(name: str, kind: str) -> RewardObjective:
    """The row of an objective for data of one kind; ``auto`` takes the kind's natural one.

    Raises:
        ValueError: the objective does not learn from such rows; the text names the conversion or the objectives that
            do.
    """
    row = REWARD_OBJECTIVES[NATURAL[kind] if name == "auto" else name]
    if kind not in row.kinds:
        fitting = ", ".join(r.name for r in _ROWS if kind in r.kinds)
        raise ValueError(
            f"objective={name} learns from {' or '.join(row.kinds)}, the data holds {kind}. Convert it with the ingest"
            f" stage (--set kind={row.kinds[0]}), or set objective to one of: {fitting}."
        )
    return row
