"""Methods as rows of tables: which advantage, surrogate, KL and aggregation make up a named algorithm.

Nothing heavy is imported here (configs read the keys); functions are named as "module:function" and looked up by
`resolve`. A row is a point on independent axes (rl.md 1.5): take one and `dataclasses.replace` what you want to
differ, then `validate_rl` says whether the combination makes sense.
"""
from __future__ import annotations

import importlib
from dataclasses import dataclass, field, replace

ADVANTAGES = ("reward_minus_baseline", "group_mean", "leave_one_out", "gae")
SCALES = ("none", "group", "batch", "batch_centered")


@dataclass(frozen=True)
class RLPreset:
    """One policy-gradient algorithm. KL coefficients of 0 mean that no reference model is loaded."""
    name: str
    advantage: str                       # ADVANTAGES
    scale: str = "none"                  # scale_rewards: SCALES
    surrogate: str = "clip"              # losses.SURROGATES
    ratio_level: str = "token"           # losses.RATIO_LEVELS
    epsilon: float = 0.2
    epsilon_high: float | None = None    # None = epsilon
    kl_reward_coef: float = 0.0          # nats -> reward
    kl_reward_mode: str = "sequence_sum"  # estimators.KL_REWARD_MODES
    kl_loss_coef: float = 0.0            # "beta"
    kl_loss_estimator: str = "k3"        # losses.KL_ESTIMATORS
    aggregation: str = "token-mean"      # losses.LOSS_AGG_MODES
    baseline: str = "none"               # for reward_minus_baseline: none | moving_average | batch_mean
    std_ddof: int = 1
    std_eps: float = 1e-4
    num_iterations: int = 1              # optimizer epochs over one rollout
    min_generations: int = 1
    needs_critic: bool = False
    source: str = ""
    note: str = ""

    @property
    def needs_reference(self) -> bool:
        return self.kl_reward_coef > 0 or self.kl_loss_coef > 0

    @property
    def group_mode(self) -> str:
        """The `mode` of estimators.group_advantage."""
        if self.advantage == "leave_one_out":
            return "leave_one_out"
        if self.advantage == "group_mean":
            return {"none": "mean", "group": "mean_std", "batch": "batch_std", "batch_centered": "batch_centered_std"}[self.scale]
        return "batch_mean" if self.baseline == "batch_mean" else "none"


_RL_ROWS = (
    RLPreset("reinforce", "reward_minus_baseline", surrogate="logp", baseline="moving_average",
             kl_reward_coef=0.02, aggregation="seq-mean-token-sum", source="REINFORCE (Williams 1992)",
             note="strictly on-policy: one optimizer step per rollout"),
    RLPreset("rloo", "leave_one_out", surrogate="logp", kl_reward_coef=0.02, aggregation="seq-mean-token-sum",
             min_generations=2, source="RLOO (Ahmadian et al. 2024)", note="strictly on-policy unless surrogate=clip"),
    RLPreset("grpo", "group_mean", scale="group", kl_loss_coef=0.04, aggregation="seq-mean-token-mean",
             min_generations=2, source="GRPO (Shao et al. 2024)",
             note="per-sequence mean: short answers weigh more per token; write kl_loss_coef=0 with verifiable rewards"),
    RLPreset("dr_grpo", "group_mean", aggregation="seq-mean-token-sum-norm", min_generations=2,
             source="Dr. GRPO (Liu et al. 2025)", note="no std, constant length normaliser, no KL"),
    RLPreset("gspo", "group_mean", scale="group", ratio_level="sequence_mean", epsilon=3e-4, epsilon_high=4e-4,
             aggregation="seq-mean-token-mean", min_generations=2, source="GSPO (Zheng et al. 2025)",
             note="one geometric-mean ratio and one clip per sequence"),
    RLPreset("cispo", "group_mean", scale="group", surrogate="cispo", epsilon_high=0.28, aggregation="token-mean",
             min_generations=2, source="CISPO (MiniMax 2025)", note="clipped detached weight, every token keeps a gradient"),
)
RL_PRESETS: dict[str, RLPreset] = {row.name: row for row in _RL_ROWS}


def rl_preset(name: str, **changes) -> RLPreset:
    """A row of RL_PRESETS with some axes changed; unknown names list the known ones."""
    if name not in RL_PRESETS:
        raise ValueError(f"no RL preset {name!r}; write one of: {', '.join(RL_PRESETS)}")
    return replace(RL_PRESETS[name], **changes)


def validate_rl(row: RLPreset, num_generations: int, *, updates_per_generation: int | None = None,
                max_staleness: int = 0, allow_double_kl: bool = False, allow_biased_kl: bool = False,
                loss_scale_factor: float | None = None) -> list[str]:
    """Refuse impossible combinations (ValueError saying what to write) and return warnings (rl.md 1.5, Config validation)."""
    def refuse(text):
        raise ValueError(f"RL preset {row.name}: {text}")

    if row.advantage not in ADVANTAGES:
        refuse(f"advantage={row.advantage!r}; write one of {', '.join(ADVANTAGES)}")
    if row.scale not in SCALES:
        refuse(f"scale_rewards={row.scale!r}; write one of {', '.join(SCALES)}")
    for name in ("epsilon", "kl_reward_coef", "kl_loss_coef"):
        if getattr(row, name) < 0:
            refuse(f"{name}={getattr(row, name)} is negative; write 0 to switch it off")
    group = row.advantage in ("group_mean", "leave_one_out")
    needed = max(row.min_generations, 2 if group else 1)
    if num_generations < needed:
        refuse(f"num_generations={num_generations} gives no baseline inside the group; write num_generations >= {needed}")
    if row.epsilon_high is not None and row.epsilon_high < row.epsilon and row.surrogate == "clip":
        refuse(f"epsilon_high={row.epsilon_high} is below epsilon={row.epsilon}; write epsilon_high >= epsilon")
    if row.kl_reward_coef > 0 and row.kl_loss_coef > 0 and not allow_double_kl:
        refuse("KL is penalised in the reward and in the loss; set kl_reward_coef or kl_loss_coef to 0, or allow_double_kl=true")
    if row.kl_loss_coef > 0 and row.kl_loss_estimator == "k1" and not allow_biased_kl:
        refuse("k1 in the loss has zero expected gradient and regularises nothing; write kl_loss_estimator=k3 or k2, or put the KL in the reward")
    if row.advantage == "gae" and not row.needs_critic:
        refuse("GAE needs a critic; write needs_critic=true or advantage=group_mean")
    if row.surrogate in ("logp", "stopgrad_ratio") and (updates_per_generation or row.num_iterations) > 1:
        refuse(f"surrogate={row.surrogate} is strictly on-policy; write num_iterations=1 and one optimizer step per rollout, or surrogate=clip")
    if row.surrogate in ("logp", "stopgrad_ratio") and max_staleness > 0:
        refuse("on-policy surrogates accept no stale rollouts; write max_staleness=0 or surrogate=clip")
    if row.aggregation == "seq-mean-token-sum-norm" and loss_scale_factor is not None and loss_scale_factor <= 0:
        refuse("loss_scale_factor must be > 0; write the maximum completion length")
    warnings = []
    if row.ratio_level != "token" and row.aggregation == "token-mean":
        warnings.append(f"{row.name}: a sequence ratio with token-mean weights sequences by their length; seq-mean-token-mean gives one term each")
    if row.num_iterations > 4:
        warnings.append(f"{row.name}: {row.num_iterations} epochs on one rollout; more than 4 is rarely stable")
    if row.kl_reward_coef > 0 and row.scale != "none":
        warnings.append(f"{row.name}: KL in the reward with std scaling does not give the reverse-KL gradient; use kl_loss_coef")
    return warnings


@dataclass(frozen=True)
class DirectMethod:
    """One direct-alignment loss: which data it reads, what number a response becomes, what else the loss wants.

    data: `pairs` (loss of policy and reference values of both sides [B]), `unpaired` (of log-ratios and labels [B]), `rankings`
    (of the K responses of one prompt), `segments` (of paired spans), `conditions` (pairs, plus the chosen response behind a
    corrupted prompt). See stages/direct_losses.py for the signatures.
    """
    name: str
    loss: str                            # "module:function"
    needs_reference: bool = True
    data: str = "pairs"
    logp_reduction: str = "sum"          # how token log-probs become one number per response: sum | mean
    default_beta: float | None = 0.1     # None: the loss has no beta
    options: dict = field(default_factory=dict)  # extra keyword arguments with their defaults
    columns: tuple[str, ...] = ()        # per-row values the loss also wants (stages.align.COLUMNS or item extras)
    positive_gap: bool = False           # pairs whose chosen score is not above the rejected one are dropped
    statistic: str = ""                  # of the whole step or run: z0 | delta | sorted (stages.align.Statistics)
    settings: dict = field(default_factory=dict)  # options of the statistic, not of the loss
    nll_coef: float = 0.0                # coefficient of an NLL term on the chosen response
    nll_reduction: str = "seq-mean"      # of that term per response: seq-mean | seq-sum
    source: str = ""


_DIRECT_ROWS = (
    DirectMethod("dpo", "stages.losses:dpo_loss", options={"label_smoothing": 0.0}, source="da.dpo (Rafailov et al. 2023)"),
    DirectMethod("cdpo", "stages.losses:dpo_loss", options={"label_smoothing": 0.1}, source="da.cdpo"),
    DirectMethod("robust_dpo", "stages.losses:dpo_loss", options={"label_smoothing": 0.1, "robust": True}, source="da.cdpo (Chowdhury et al. 2024)"),
    DirectMethod("soft_dpo", "stages.losses:dpo_loss", columns=("label_prob",), source="da.soft_dpo"),
    DirectMethod("ipo", "stages.direct_losses:ipo_loss", source="da.ipo (Azar et al. 2023); beta is tau"),
    DirectMethod("soft_ipo", "stages.direct_losses:ipo_loss", columns=("label_prob",), source="da.ipo with preference probabilities"),
    DirectMethod("hinge_norm", "stages.direct_losses:hinge_norm_loss", default_beta=0.05, source="da.slic, RSO"),
    DirectMethod("length_norm", "stages.losses:dpo_loss", logp_reduction="mean", default_beta=5.0, source="da.length_norm"),
    DirectMethod("apo_zero", "stages.direct_losses:apo_zero_loss", source="da.apo_zero"),
    DirectMethod("apo_down", "stages.direct_losses:apo_down_loss", source="da.apo_down"),
    DirectMethod("discopop", "stages.direct_losses:discopop_loss", default_beta=0.05, options={"discopop_tau": 0.05}, source="da.discopop"),
    DirectMethod("discovered", "stages.direct_losses:discovered_loss", default_beta=0.05, options={"member": "padll"}, source="da.discopop, the family"),
    DirectMethod("cal_dpo", "stages.direct_losses:cal_dpo_loss", options={"cal_weight": 0.5, "beta_in_contrast": False}, source="da.cal_dpo"),
    DirectMethod("nca_pair", "stages.direct_losses:nca_pair_loss", source="da.relatives"),
    DirectMethod("exo_pair", "stages.direct_losses:exo_pair_loss", options={"label_smoothing": 1e-3}, source="da.relatives"),
    DirectMethod("r_dpo", "stages.direct_losses:r_dpo_loss", columns=("length_chosen", "length_rejected"), options={"alpha": 0.05}, source="da.relatives"),
    DirectMethod("wpo", "stages.direct_losses:wpo_loss", columns=("length_chosen", "length_rejected"), source="da.relatives"),
    DirectMethod("aot", "stages.direct_losses:aot_matched_loss", columns=("matched_rejected", "matched_chosen"), statistic="sorted", source="da.relatives"),
    DirectMethod("dpo_nll", "stages.losses:dpo_loss", nll_coef=1.0, source="da.dpo_nll"),
    DirectMethod("mdpo", "stages.direct_losses:mdpo_loss", data="conditions", columns=("h_corrupted",),
                 options={"delta": 0.0, "conditional_weight": 1.0, "anchor_weight": 1.0}, source="da.mdpo, text analogue"),
    DirectMethod("2d_dpo", "stages.direct_losses:two_d_dpo_loss", data="segments", source="da.2d_dpo"),
    # with scores of both responses
    DirectMethod("odpo", "stages.direct_losses:odpo_loss", columns=("score_gap",), positive_gap=True, options={"alpha": 1.0, "offset_fn": "log"},
                 source="da.odpo (Amini et al. 2024)"),
    DirectMethod("rpo", "stages.direct_losses:rpo_loss", columns=("score_gap",), options={"eta": 1.0}, source="da.rpo (Nemotron-4)"),
    DirectMethod("rebel", "stages.direct_losses:rebel_pair_loss", columns=("score_gap",), default_beta=1.0, source="da.rebel; beta is 1/eta"),
    # rankings
    DirectMethod("pl_dpo", "stages.direct_losses:pl_dpo_loss", data="rankings", source="da.pl_dpo"),
    DirectMethod("sppo", "stages.direct_losses:sppo_loss", data="rankings", columns=("win_prob",), default_beta=1e-3,
                 source="da.sppo; beta is 1/eta, the reference is the previous iterate"),
    DirectMethod("sppo_hard", "stages.direct_losses:sppo_hard_loss", default_beta=1e-3, source="da.sppo"),
    DirectMethod("rrhf", "stages.direct_losses:rrhf_loss", needs_reference=False, data="rankings", columns=("rewards",), default_beta=None,
                 options={"average": False}, source="da.rrhf (Yuan et al. 2023)"),
    # single responses with a label
    DirectMethod("kto", "stages.direct_losses:kto_loss", data="unpaired", statistic="z0",
                 options={"desirable_weight": 1.0, "undesirable_weight": 1.0}, source="da.kto (Ethayarajh et al. 2024)"),
    DirectMethod("bco", "stages.direct_losses:bco_loss", data="unpaired", statistic="delta", settings={"momentum": 0.99}, source="da.bco"),
    DirectMethod("bco_pair", "stages.direct_losses:bco_pair_loss", options={"delta": 0.0}, source="da.bco"),
    DirectMethod("apo_zero_unpaired", "stages.direct_losses:apo_zero_unpaired_loss", data="unpaired", source="da.apo_zero"),
    # without a reference policy
    DirectMethod("reference_free", "stages.direct_losses:reference_free_loss", needs_reference=False, source="da.reference_free"),
    DirectMethod("simpo", "stages.direct_losses:simpo_loss", needs_reference=False, logp_reduction="mean", default_beta=2.0,
                 options={"simpo_gamma": 0.5, "label_smoothing": 0.0}, source="da.simpo"),
    DirectMethod("alphapo", "stages.direct_losses:alphapo_loss", needs_reference=False, logp_reduction="mean", default_beta=2.0,
                 options={"simpo_gamma": 0.5, "alpha": 0.25}, source="da.alphapo"),
    DirectMethod("cpo", "stages.direct_losses:reference_free_loss", needs_reference=False, nll_coef=1.0, nll_reduction="seq-sum", source="da.cpo"),
    DirectMethod("orpo", "stages.direct_losses:orpo_loss", needs_reference=False, logp_reduction="mean", default_beta=0.1,
                 nll_coef=1.0, source="da.orpo; beta is lambda, the loss is lambda * odds-ratio term"),
    DirectMethod("slic", "stages.direct_losses:slic_loss", needs_reference=False, columns=("target",), default_beta=None,
                 options={"delta": 1.0, "reg_coef": 0.1}, source="da.slic (SLiC-HF)"),
)
DIRECT_METHODS: dict[str, DirectMethod] = {row.name: row for row in _DIRECT_ROWS}


def validate_direct(row: DirectMethod, beta: float | None, has_reference: bool) -> list[str]:
    """Refuse impossible direct-alignment settings (supervised-reward-direct.md, Model roles) and return warnings."""
    if row.default_beta is None and beta is not None:
        raise ValueError(f"{row.name} has no beta; leave it out (its options are {', '.join(row.options)})")
    if row.default_beta is not None and not beta > 0:
        raise ValueError(f"beta={beta} must be > 0; write {row.default_beta} for {row.name}")
    if row.needs_reference and not has_reference:
        raise ValueError(f"{row.name} compares with a reference policy; give one (normally the model you start from), or use method=simpo or orpo")
    if not row.needs_reference and has_reference:
        raise ValueError(f"{row.name} has no reference policy; leave the reference input and reference_update out")
    return [f"beta={beta} is below the usual range for simpo (2.0-2.5)"] if row.name == "simpo" and beta < 1 else []


def resolve(path: str):
    """The function behind "module:function"."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)
