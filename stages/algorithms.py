"""Methods as rows of tables: which advantage, surrogate, KL and aggregation make up a named algorithm.

Nothing heavy is imported here (configs read the keys); functions are named as "module:function" and looked up by
`resolve`. A row is a point on independent axes: take one and `dataclasses.replace` what you want to
differ, then `stages.policy.combinations.validate_rl` says whether the combination makes sense.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field, replace

ADVANTAGES = (
    "reward_minus_baseline",
    "group_mean",
    "leave_one_out",
    "leave_one_out_max",
    "length_weighted",
    "token_baseline",
    "process",
    "win_rate",
    "turn_returns",
    "vine",
    "reward_to_go",
    "gae",
    "reward_minus_value",
)
# compare the completions of one prompt
GROUP_ADVANTAGES = (
    "group_mean",
    "leave_one_out",
    "leave_one_out_max",
    "length_weighted",
    "token_baseline",
    "process",
    "win_rate",
    "turn_returns",
)
BASELINE_ADVANTAGES = ("reward_minus_baseline", "reward_to_go")  # read `baseline`
VALUE_ADVANTAGES = ("gae", "reward_minus_value")  # need a critic
SCALES = ("none", "group", "batch", "batch_centered")
BASELINES = ("none", "constant", "moving_average", "batch_mean", "greedy", "table", "v_star")
CRITIC_TARGETS = (
    "lambda_return",
    "mc_return",
    "td0",
    "n_step",
    "terminal",
    "bandit",
    "kl_adjusted_outcome",
    "soft_bellman",
)
ON_POLICY_SURROGATES = ("logp", "stopgrad_ratio")
CLIPPED = ("clip", "cispo", "geo_mean", "dppo_tv", "dppo_kl")  # surrogates with a clip range
#: Constants of the surrogates that have some (``options`` of the rl stage), with their papers' values.
SURROGATE_OPTIONS = {
    "sapo": {"tau_pos": 1.0, "tau_neg": 1.05},
    "vespo": {"k_pos": 2.0, "lambda_pos": 3.0, "k_neg": 3.0, "lambda_neg": 2.0},
}


@dataclass(frozen=True)
class RLPreset:
    """One policy-gradient algorithm: a point on independent axes. KL coefficients of 0 mean that no reference is
    loaded.
    """

    name: str
    advantage: str  # ADVANTAGES
    scale: str = "none"  # scale_rewards: SCALES, of group advantages
    whiten: bool = False  # over the trained tokens of the rollout batch (NORM)
    adv_norm_ddof: int = 0  # of whiten
    baseline: str = "none"  # BASELINES, for reward_minus_baseline
    gamma: float = 1.0
    lam: float = 0.95  # GAE
    lam_critic: float | None = None  # GAE of the critic's target; None = lam
    lam_alpha: float | None = None  # length-adaptive lambda of the policy: 1 - 1/(lam_alpha * length) (VAPO)
    surrogate: str = "clip"  # losses.SURROGATES; unused where objective is given
    ratio_level: str = "token"  # losses.RATIO_LEVELS
    epsilon: float = 0.2
    epsilon_high: float | None = None  # None = epsilon
    clip_ratio_c: float | None = None  # dual clip
    # "module:function" of a loss on whole responses (sequence_losses.Responses), instead of a surrogate
    objective: str = ""
    # what `objective` is averaged over: sequences, pairs (two completions of a prompt) or tokens
    unit: str = "sequences"
    # keyword arguments of `objective`; of a surrogate its SURROGATE_OPTIONS
    options: dict = field(default_factory=dict)
    # "module:function" of what is logged of it: {name: sum over the trained responses}
    objective_log: str = ""
    off_policy_ok: bool = False  # may train on replayed or stored rollouts of other policies
    # replayed rollouts get the current policy's log-probs, not those they were sampled with
    on_policy_logps: bool = False
    kl_reward_coef: float = 0.0  # nats -> reward
    kl_reward_mode: str = "sequence_sum"  # estimators.KL_REWARD_MODES
    kl_loss_coef: float = 0.0  # "beta"
    kl_loss_estimator: str = "k3"  # losses.KL_ESTIMATORS or full (exact, over the vocabulary)
    kl_direction: str = "reverse"  # of full: reverse KL(pi||target), forward KL(target||pi)
    kl_target: str = "ref"  # of the KL in the loss: ref, or old (the policy that sampled: a trust region)
    kl_controller: str = "fixed"  # estimators.KL_CONTROLLERS
    target_kl: float | None = None  # of the controller: nats per sequence towards ref, nats per token towards old
    reads_reference: bool = False  # `objective` reads reference log-probs
    # share of the distillation from the reference as it reads more than the policy did; the rest is the policy's loss
    distillation_weight: float = 0.0
    pair_preference: bool = False  # `objective` reads P(first of a pair preferred to the second)
    aggregation: str = "token-mean"  # losses.LOSS_AGG_MODES
    std_ddof: int = 1
    std_eps: float = 1e-4
    needs_critic: bool = False
    critic_target: str = "lambda_return"  # CRITIC_TARGETS
    n_steps: int = 5  # of critic_target=n_step (A3C, Mnih et al. 2016)
    num_iterations: int = 1  # optimizer epochs over one rollout
    reset_optimizer: bool = False  # Adam's moments start anew with every rollout batch
    # adamw, or trust_region (conjugate gradient and line search, one step per rollout)
    update: str = "adamw"
    ptx_coef: float = 0.0  # pretraining mix (PPO-PTX)
    positive_nll_coef: float = 0.0  # NLL of correct completions (VAPO)
    critic_warmup_steps: int = 0  # critic steps before the policy moves
    dynamic_sampling: bool = False  # refill groups without signal
    truncation_policy: str = "score"  # estimators.TRUNCATION_POLICIES
    soft_punish_share: float = 0.0  # soft overlong penalty on the last share of max_completion_length (OVERLONG)
    min_generations: int = 1
    opponent: str = "self"  # of win rates: self (the group), ema, mixture
    source: str = ""
    note: str = ""

    @property
    def needs_reference(self) -> bool:
        return self.kl_reward_coef > 0 or (self.kl_loss_coef > 0 and self.kl_target == "ref") or self.reads_reference

    @property
    def read_baseline(self) -> str:
        """The baseline that is read, if any."""
        return self.baseline if self.advantage in BASELINE_ADVANTAGES and self.unit != "pairs" else "none"

    @property
    def reads_preferences(self) -> bool:
        """Whether the advantage or the loss is made of P(y > y'): of the model that compares, or of sigmoid(r - r')."""
        return self.advantage == "win_rate" or self.pair_preference

    @property
    def compares(self) -> bool:
        """Whether groups of equal rewards teach nothing."""
        return (self.advantage in GROUP_ADVANTAGES or self.unit == "pairs") and self.distillation_weight < 1

    @property
    def strictly_on_policy(self) -> bool:
        return self.update == "trust_region" or (not self.objective and self.surrogate in ON_POLICY_SURROGATES)

    @property
    def behaviour_ratio(self) -> bool:
        """Whether ratios are to whoever sampled (pi/mu: filters of the sampler, older policies), not to the policy that
        started the iteration.
        """
        return self.off_policy_ok and not self.on_policy_logps

    @property
    def group_mode(self) -> str:
        """The `mode` of estimators.group_advantage."""
        if self.advantage == "leave_one_out":
            return "leave_one_out"
        if self.advantage in ("length_weighted", "leave_one_out_max"):
            return self.advantage + ("_std" if self.advantage == "leave_one_out_max" and self.scale == "group" else "")
        if self.advantage == "group_mean":
            return {"none": "mean", "group": "mean_std", "batch": "batch_std", "batch_centered": "batch_centered_std"}[
                self.scale
            ]
        return "batch_mean" if self.baseline == "batch_mean" else "none"


_REGRESSION = "stages.policy.sequence_losses:"
_PPO = RLPreset(
    "ppo",
    "gae",
    whiten=True,
    needs_critic=True,
    kl_reward_coef=0.02,
    kl_reward_mode="token_terminal",
    num_iterations=4,
    truncation_policy="bootstrap",
    source="PPO (Schulman et al. 2017; Ouyang et al. 2022)",
)
_RL_ROWS = (
    RLPreset(
        "reinforce",
        "reward_minus_baseline",
        surrogate="logp",
        baseline="moving_average",
        kl_reward_coef=0.02,
        aggregation="seq-mean-token-sum",
        source="REINFORCE (Williams 1992)",
        note="strictly on-policy: one optimizer step per rollout",
    ),
    RLPreset(
        "remax",
        "reward_minus_baseline",
        surrogate="logp",
        baseline="greedy",
        kl_reward_coef=0.02,
        aggregation="seq-mean-token-sum",
        source="ReMax (Li et al. 2023)",
        note="one greedy completion per prompt more",
    ),
    RLPreset(
        "reinforce_pp",
        "reward_to_go",
        whiten=True,
        kl_reward_coef=0.02,
        kl_reward_mode="token_terminal",
        source="REINFORCE++ (Hu 2025)",
    ),
    RLPreset(
        "rloo",
        "leave_one_out",
        surrogate="logp",
        kl_reward_coef=0.02,
        aggregation="seq-mean-token-sum",
        min_generations=2,
        source="RLOO (Ahmadian et al. 2024)",
        note="strictly on-policy unless surrogate=clip",
    ),
    RLPreset(
        "grpo",
        "group_mean",
        scale="group",
        kl_loss_coef=0.04,
        aggregation="seq-mean-token-mean",
        min_generations=2,
        source="GRPO (Shao et al. 2024)",
        note="per-sequence mean: short answers weigh more per token; write beta=0 with verifiable rewards",
    ),
    RLPreset(
        "grpo_process",
        "process",
        kl_loss_coef=0.04,
        aggregation="seq-mean-token-mean",
        min_generations=2,
        source="GRPO with process supervision (Shao et al. 2024)",
        note="step rewards from the reward model at every step_separator",
    ),
    RLPreset(
        "dr_grpo",
        "group_mean",
        aggregation="seq-mean-token-sum-norm",
        min_generations=2,
        source="Dr. GRPO (Liu et al. 2025)",
        note="no std, constant length normaliser, no KL",
    ),
    RLPreset(
        "dapo",
        "group_mean",
        scale="group",
        epsilon_high=0.28,
        dynamic_sampling=True,
        soft_punish_share=0.2,
        truncation_policy="mask",
        min_generations=2,
        source="DAPO (Yu et al. 2025)",
        note="paper: rewards +1 and -1, 512 prompts x 16, 16 updates per rollout",
    ),
    RLPreset(
        "grpo_plus",
        "group_mean",
        scale="group",
        epsilon_high=0.4,
        aggregation="seq-mean-token-mean",
        truncation_policy="mask",
        min_generations=2,
        source="GRPO+ (DeepCoder 2025)",
        note="with context_schedule; reward 1 only if all tests pass",
    ),
    RLPreset(
        "gspo",
        "group_mean",
        scale="group",
        ratio_level="sequence_mean",
        epsilon=3e-4,
        epsilon_high=4e-4,
        aggregation="seq-mean-token-mean",
        min_generations=2,
        source="GSPO (Zheng et al. 2025)",
        note="one geometric-mean ratio and one clip per sequence",
    ),
    RLPreset(
        "cispo",
        "group_mean",
        scale="group",
        surrogate="cispo",
        epsilon_high=0.28,
        aggregation="token-mean",
        min_generations=2,
        source="CISPO (MiniMax 2025)",
        note="clipped detached weight, every token keeps a gradient",
    ),
    RLPreset(
        "sapo",
        "group_mean",
        scale="group",
        surrogate="sapo",
        aggregation="seq-mean-token-mean",
        min_generations=2,
        source="SAPO (Gao et al. 2025)",
        note="a smooth gate in the place of the clip, narrower for negative advantages",
    ),
    RLPreset(
        "vespo",
        "group_mean",
        scale="group",
        surrogate="vespo",
        aggregation="token-mean",
        min_generations=2,
        source="VESPO (2026)",
        note=(
            "log-probs weighted by a gamma function of the sequence's product ratio, 1 on-policy; for stale or"
            " asynchronous rollouts"
        ),
    ),
    RLPreset(
        "gmpo",
        "group_mean",
        scale="group",
        surrogate="geo_mean",
        epsilon=0.4,
        epsilon_high=0.4,
        aggregation="seq-mean-token-mean",
        min_generations=2,
        source="GMPO (Zhao et al. 2025)",
        note="geometric mean of ratios that are clipped by token, epsilon in nats: ratios of exp(-.4) to exp(.4)",
    ),
    RLPreset(
        "opo",
        "length_weighted",
        surrogate="logp",
        aggregation="token-mean",
        min_generations=2,
        source="OPO (Hao et al. 2025)",
        note="baseline of least variance where gradients grow with length; strictly on-policy, no KL, no entropy",
    ),
    RLPreset(
        "otb",
        "token_baseline",
        aggregation="token-mean",
        min_generations=2,
        source="optimal token baseline (2026)",
        note=(
            "the group's baseline at each token, weighted by how much of the gradient's variance a completion carries"
            " by then"
        ),
    ),
    RLPreset(
        "grpo_passk",
        "leave_one_out_max",
        aggregation="token-mean",
        min_generations=2,
        source="pass@k (Tang et al. 2025)",
        note="of each group the best completion alone, by its lead; k is num_generations",
    ),
    RLPreset(
        "sdpo",
        "group_mean",
        scale="group",
        aggregation="seq-mean-token-mean",
        distillation_weight=1.0,
        source="SDPO (Huebotter et al. 2026, arXiv:2601.20802)",
        note=(
            "the policy learns on its own answers from its moving average (ref_mode=ema) that has read a right answer of"
            " the same group, and what the rewards say of its own"
        ),
    ),
    RLPreset(
        "grape",
        "group_mean",
        aggregation="seq-mean-token-sum",
        min_generations=2,
        source="GRAPE",
        note="for rubric rewards",
    ),
    RLPreset(
        "grape_alt",
        "group_mean",
        ratio_level="sequence",
        aggregation="seq-mean-token-mean",
        min_generations=2,
        source="Alt-GRAPE, PPO-SEQ",
        note="one product ratio and one clip per sequence; collapses more easily than token level",
    ),
    _PPO,
    replace(
        _PPO,
        name="ppo_outcome",
        advantage="reward_minus_value",
        kl_reward_mode="sequence_mean",
        aggregation="seq-mean-token-mean",
        critic_target="kl_adjusted_outcome",
        truncation_policy="score",
        note="the KL-adjusted outcome on every token",
    ),
    replace(
        _PPO,
        name="ppo_ptx",
        ptx_coef=27.8,
        source="PPO-ptx (Ouyang et al. 2022)",
        note="needs the input ptx; retune the coefficient",
    ),
    replace(
        _PPO,
        name="ppo_penalty_adaptive",
        surrogate="none",
        kl_reward_coef=0.0,
        kl_loss_coef=1.0,
        kl_loss_estimator="full",
        kl_target="old",
        kl_direction="forward",
        kl_controller="adaptive_ppo",
        target_kl=0.01,
        note="paper's targets .003, .01, .03",
    ),
    replace(
        _PPO,
        name="ppo_clip_kl",
        kl_reward_coef=0.0,
        kl_loss_coef=1.0,
        kl_loss_estimator="full",
        kl_target="old",
        kl_direction="forward",
    ),
    replace(_PPO, name="a2c", surrogate="logp", num_iterations=1, source="A2C (Mnih et al. 2016)"),
    replace(
        _PPO,
        name="vapo",
        kl_reward_coef=0.0,
        epsilon_high=0.28,
        lam_critic=1.0,
        lam_alpha=0.05,
        num_iterations=1,
        positive_nll_coef=0.1,
        critic_warmup_steps=50,
        source="VAPO (2025)",
    ),
    replace(
        _PPO,
        name="trpo_penalty",
        surrogate="none",
        kl_reward_coef=0.0,
        kl_loss_coef=1.0,
        kl_loss_estimator="full",
        kl_target="old",
        kl_direction="forward",
        aggregation="seq-mean-token-sum",
        num_iterations=1,
        source="TRPO, penalty form (Schulman et al. 2015)",
        note="beta tested at .3, 1, 3, 10; the KL acts from the second step of a rollout batch on (num_minibatches)",
    ),
    replace(
        _PPO,
        name="trpo",
        surrogate="none",
        kl_reward_coef=0.0,
        update="trust_region",
        aggregation="seq-mean-token-sum",
        num_iterations=1,
        source="TRPO (Schulman et al. 2015)",
        note="one Fisher-vector product per conjugate-gradient step: a small model, or a LoRA adapter",
    ),
    RLPreset(
        "agent",
        "turn_returns",
        aggregation="token-mean",
        min_generations=2,
        source="multi-turn agentic RL (AGENT-RL)",
        note="needs an environment; the return of each turn on its own tokens, less the group's mean at that turn",
    ),
    RLPreset(
        "vineppo",
        "vine",
        aggregation="token-mean",
        source="VinePPO (Kazemnejad et al. 2024)",
        note="vine_samples continuations from every step border; paper: 9, PPO's clip, KL 1e-4",
    ),
    RLPreset(
        "topr",
        "reward_minus_baseline",
        objective=_REGRESSION + "tapered",
        objective_log=_REGRESSION + "tapered_log",
        options={"clip_pos": (1.0, 1.0), "clip_neg": (0.0, 1.0)},
        aggregation="seq-mean-token-sum",
        off_policy_ok=True,
        source="TOPR (Le Roux et al. 2025)",
        note="stored and replayed rollouts welcome",
    ),
    RLPreset(
        "a_lol",
        "reward_minus_baseline",
        baseline="table",
        objective=_REGRESSION + "tapered",
        objective_log=_REGRESSION + "tapered_log",
        options={"clip_pos": (0.0, 2.0), "clip_neg": (0.0, 0.0)},
        aggregation="seq-mean-token-sum",
        off_policy_ok=True,
        source="A-LoL (Baheti et al. 2023)",
        note="positive advantages only, R - V(x) of the starting policy; the clip is ours; give the input stored",
    ),
    RLPreset(
        "offline_is",
        "reward_minus_baseline",
        objective=_REGRESSION + "tapered",
        objective_log=_REGRESSION + "tapered_log",
        options={"clip_pos": (0.0, 2.0), "clip_neg": (0.0, 2.0)},
        aggregation="seq-mean-token-sum",
        off_policy_ok=True,
        source="OFFPOL-IS",
        note="truncated importance-weighted policy gradient",
    ),
    RLPreset(
        "p3o",
        "reward_minus_baseline",
        objective=_REGRESSION + "pairwise_ppo",
        unit="pairs",
        options={"epsilon": 0.2, "form": "separate"},
        kl_reward_coef=0.02,
        min_generations=2,
        source="P3O (Wu et al. 2023)",
    ),
    RLPreset(
        "copg",
        "reward_minus_baseline",
        objective=_REGRESSION + "contrastive",
        unit="pairs",
        options={"beta": 0.1},
        reads_reference=True,
        off_policy_ok=True,
        min_generations=2,
        source="CoPG (Flet-Berliac et al. 2024)",
    ),
    RLPreset(
        "mdpo",
        "group_mean",
        objective=_REGRESSION + "mirror_descent",
        options={"tau": 0.1},
        off_policy_ok=True,
        on_policy_logps=True,
        reset_optimizer=True,
        num_iterations=2,
        min_generations=2,
        source="mirror descent policy optimisation (Kimi k1.5)",
        note="the iterate is the policy that started the round",
    ),
    RLPreset(
        "astar_po",
        "reward_minus_baseline",
        baseline="v_star",
        objective=_REGRESSION + "optimal_advantage",
        options={"beta": 1e-3},
        reads_reference=True,
        source="A*-PO (Brantley et al. 2025)",
        note="one generation per prompt; V* from baseline_samples of the reference",
    ),
    RLPreset(
        "oreo",
        "reward_to_go",
        objective=_REGRESSION + "soft_bellman",
        unit="tokens",
        options={"beta": 0.1},
        reads_reference=True,
        needs_critic=True,
        critic_target="soft_bellman",
        off_policy_ok=True,
        on_policy_logps=True,
        source="OREO (Wang et al. 2024)",
    ),
    RLPreset(
        "sppo",
        "win_rate",
        objective=_REGRESSION + "win_rate_regression",
        options={"eta": 1e3},
        min_generations=2,
        source="SPPO (Wu et al. 2024)",
        note="win rates inside the group; learning rate 5e-7 in the paper",
    ),
    RLPreset(
        "online_ipo",
        "reward_minus_baseline",
        objective=_REGRESSION + "on_policy_ipo",
        unit="pairs",
        options={"tau": 0.1},
        reads_reference=True,
        pair_preference=True,
        min_generations=2,
        source="online IPO (Calandriello et al. 2024)",
    ),
    RLPreset(
        "nash_md",
        "win_rate",
        surrogate="logp",
        kl_reward_coef=0.1,
        aggregation="seq-mean-token-sum",
        min_generations=2,
        source="Nash-MD-PG, Nash-EMA-PG (Munos et al. 2023)",
        opponent="mixture",
        note="kl_coef is tau; opponent=ema is Nash-EMA, self plain self-play",
    ),
)
RL_PRESETS: dict[str, RLPreset] = {row.name: row for row in _RL_ROWS}


def rl_preset(name: str, **changes) -> RLPreset:
    """A row of RL_PRESETS with some axes changed; unknown names list the known ones."""
    if name not in RL_PRESETS:
        raise ValueError(f"no RL preset {name!r}; write one of: {', '.join(RL_PRESETS)}")
    return replace(RL_PRESETS[name], **changes)


@dataclass(frozen=True)
class DirectMethod:
    """One direct-alignment loss: which data it reads, what number a response becomes, what else the loss wants.

    data: `pairs` (loss of policy and reference values of both sides [B]), `unpaired` (of log-ratios and labels [B]),
    `rankings` (of the K responses of one prompt), `segments` (of paired spans), `conditions` (pairs, plus the chosen
    response behind a corrupted prompt). See stages/direct/direct_losses.py for the signatures.
    """

    name: str
    loss: str  # "module:function"
    needs_reference: bool = True
    data: str = "pairs"
    logp_reduction: str = "sum"  # how token log-probs become one number per response: sum | mean
    default_beta: float | None = 0.1  # None: the loss has no beta
    options: dict = field(default_factory=dict)  # extra keyword arguments with their defaults
    columns: tuple[str, ...] = ()  # per-row values the loss also wants (lengths and means, or extras of items)
    positive_gap: bool = False  # pairs whose chosen score is not above the rejected one are dropped
    # of the whole step or run: z0 | delta | mean | sorted | sorted_pairs (stages.direct.direct_alignment, prepare)
    statistic: str = ""
    # reads differences of implicit rewards only, so these may come from another f-divergence than the KL (f-DPO)
    divergence: bool = False
    settings: dict = field(default_factory=dict)  # options of the statistic or of the NLL term, not of the loss
    nll_coef: float = 0.0  # coefficient of an NLL term
    nll_of: str = "chosen"  # the response that it is of: chosen | target (a gold answer of the prompt, beside the pair)
    nll_reduction: str = "seq-mean"  # of that term: seq-mean | seq-sum (per response) | token-mean (of the step)
    source: str = ""

    @property
    def reads_target(self) -> bool:
        """Whether a pair has a third response, the target answer of its prompt."""
        return "target" in self.columns or self.nll_of == "target"


_DIRECT_ROWS = (
    DirectMethod(
        "dpo",
        "stages.losses:dpo_loss",
        divergence=True,
        options={"label_smoothing": 0.0},
        source="da.dpo (Rafailov et al. 2023)",
    ),
    DirectMethod("cdpo", "stages.losses:dpo_loss", divergence=True, options={"label_smoothing": 0.1}, source="da.cdpo"),
    DirectMethod(
        "robust_dpo",
        "stages.losses:dpo_loss",
        divergence=True,
        options={"label_smoothing": 0.1, "robust": True},
        source="da.cdpo (Chowdhury et al. 2024)",
    ),
    DirectMethod("soft_dpo", "stages.losses:dpo_loss", divergence=True, columns=("label_prob",), source="da.soft_dpo"),
    DirectMethod(
        "ipo", "stages.direct.direct_losses:ipo_loss", divergence=True, source="da.ipo (Azar et al. 2023); beta is tau"
    ),
    DirectMethod(
        "soft_ipo",
        "stages.direct.direct_losses:ipo_loss",
        divergence=True,
        columns=("label_prob",),
        source="da.ipo with preference probabilities",
    ),
    DirectMethod(
        "hinge_norm",
        "stages.direct.direct_losses:hinge_norm_loss",
        divergence=True,
        default_beta=0.05,
        source="da.slic, RSO",
    ),
    DirectMethod(
        "length_norm",
        "stages.losses:dpo_loss",
        divergence=True,
        logp_reduction="mean",
        default_beta=5.0,
        source="da.length_norm",
    ),
    DirectMethod("apo_zero", "stages.direct.direct_losses:apo_zero_loss", source="da.apo_zero"),
    DirectMethod("apo_down", "stages.direct.direct_losses:apo_down_loss", source="da.apo_down"),
    DirectMethod(
        "discopop",
        "stages.direct.direct_losses:discopop_loss",
        divergence=True,
        default_beta=0.05,
        options={"discopop_tau": 0.05},
        source="da.discopop",
    ),
    DirectMethod(
        "discovered",
        "stages.direct.direct_losses:discovered_loss",
        divergence=True,
        default_beta=0.05,
        options={"member": "padll"},
        source="da.discopop, the family",
    ),
    DirectMethod(
        "pfl",
        "stages.direct.direct_losses:policy_focused_loss",
        default_beta=0.05,
        source="da.discopop, policy-focused",
    ),
    DirectMethod(
        "aql",
        "stages.direct.direct_losses:adaptive_quantile_loss",
        default_beta=0.05,
        columns=("mean_h",),
        statistic="mean",
        source="da.discopop, adaptive quantile",
    ),
    DirectMethod(
        "written",
        "stages.direct.objective_code:written_loss",
        default_beta=0.05,
        options={"code": "softplus(-beta * ((pc - pr) - (rc - rr)))"},
        source="flow.objective_discovery: a loss given as text; the code here is an example",
    ),
    DirectMethod(
        "cal_dpo",
        "stages.direct.direct_losses:cal_dpo_loss",
        options={"cal_weight": 0.5, "beta_in_contrast": False},
        source="da.cal_dpo",
    ),
    DirectMethod("nca_pair", "stages.direct.direct_losses:nca_pair_loss", source="da.relatives"),
    DirectMethod(
        "exo_pair",
        "stages.direct.direct_losses:exo_pair_loss",
        divergence=True,
        options={"label_smoothing": 1e-3},
        source="da.relatives",
    ),
    DirectMethod(
        "r_dpo",
        "stages.direct.direct_losses:r_dpo_loss",
        divergence=True,
        columns=("length_chosen", "length_rejected"),
        options={"alpha": 0.05},
        source="da.relatives",
    ),
    DirectMethod(
        "wpo",
        "stages.direct.direct_losses:wpo_loss",
        divergence=True,
        columns=("mean_chosen", "mean_rejected"),
        settings={"aligned": False},
        source="da.relatives; aligned: Zhou et al. 2024, eq. 2 with sampled alignment",
    ),
    DirectMethod(
        "aot_unpaired",
        "stages.direct.direct_losses:aot_matched_loss",
        columns=("matched_rejected", "matched_chosen"),
        statistic="sorted",
        options={"label_smoothing": 0.0},
        source="da.relatives (Melnyk et al. 2024)",
    ),
    DirectMethod(
        "aot_paired",
        "stages.direct.direct_losses:aot_paired_loss",
        columns=("matched_margin",),
        statistic="sorted_pairs",
        options={"label_smoothing": 0.0},
        source="AOT (Melnyk et al. 2024); TRL's aot",
    ),
    DirectMethod("dpo_nll", "stages.losses:dpo_loss", divergence=True, nll_coef=1.0, source="da.dpo_nll"),
    DirectMethod(
        "mdpo",
        "stages.direct.direct_losses:mdpo_loss",
        data="conditions",
        columns=("h_corrupted",),
        options={"delta": 0.0, "conditional_weight": 1.0, "anchor_weight": 1.0},
        source="da.mdpo, text analogue",
    ),
    DirectMethod("2d_dpo", "stages.direct.direct_losses:two_d_dpo_loss", data="segments", source="da.2d_dpo"),
    # with scores of both responses
    DirectMethod(
        "odpo",
        "stages.direct.direct_losses:odpo_loss",
        divergence=True,
        columns=("score_gap",),
        positive_gap=True,
        options={"alpha": 1.0, "offset_fn": "log"},
        source="da.odpo (Amini et al. 2024)",
    ),
    DirectMethod(
        "rpo",
        "stages.direct.direct_losses:rpo_loss",
        divergence=True,
        columns=("score_gap",),
        options={"eta": 1.0},
        source="da.rpo (Nemotron-4)",
    ),
    DirectMethod(
        "rebel",
        "stages.direct.direct_losses:rebel_pair_loss",
        columns=("score_gap",),
        default_beta=1.0,
        source="da.rebel; beta is 1/eta",
    ),
    # rankings
    DirectMethod("pl_dpo", "stages.direct.direct_losses:pl_dpo_loss", data="rankings", source="da.pl_dpo"),
    DirectMethod(
        "sppo",
        "stages.direct.direct_losses:sppo_loss",
        data="rankings",
        columns=("win_prob",),
        default_beta=1e-3,
        source="da.sppo; beta is 1/eta, the reference is the previous iterate",
    ),
    DirectMethod("sppo_hard", "stages.direct.direct_losses:sppo_hard_loss", default_beta=1e-3, source="da.sppo"),
    DirectMethod(
        "rrhf",
        "stages.direct.direct_losses:rrhf_loss",
        needs_reference=False,
        data="rankings",
        columns=("rewards",),
        default_beta=None,
        options={"average": False},
        source="da.rrhf (Yuan et al. 2023)",
    ),
    # single responses with a label
    DirectMethod(
        "kto",
        "stages.direct.direct_losses:kto_loss",
        data="unpaired",
        statistic="z0",
        options={"desirable_weight": 1.0, "undesirable_weight": 1.0},
        source="da.kto (Ethayarajh et al. 2024)",
    ),
    DirectMethod(
        "bco",
        "stages.direct.direct_losses:bco_loss",
        data="unpaired",
        statistic="delta",
        settings={"momentum": 0.99},
        source="da.bco",
    ),
    DirectMethod("bco_pair", "stages.direct.direct_losses:bco_pair_loss", options={"delta": 0.0}, source="da.bco"),
    DirectMethod(
        "apo_zero_unpaired", "stages.direct.direct_losses:apo_zero_unpaired_loss", data="unpaired", source="da.apo_zero"
    ),
    # without a reference policy
    DirectMethod(
        "reference_free",
        "stages.direct.direct_losses:reference_free_loss",
        needs_reference=False,
        source="da.reference_free",
    ),
    DirectMethod(
        "simpo",
        "stages.direct.direct_losses:simpo_loss",
        needs_reference=False,
        logp_reduction="mean",
        default_beta=2.0,
        options={"simpo_gamma": 0.5, "label_smoothing": 0.0},
        source="da.simpo",
    ),
    DirectMethod(
        "alphapo",
        "stages.direct.direct_losses:alphapo_loss",
        needs_reference=False,
        logp_reduction="mean",
        default_beta=2.0,
        options={"simpo_gamma": 0.5, "alpha": 0.25},
        source="da.alphapo",
    ),
    DirectMethod(
        "cpo",
        "stages.direct.direct_losses:reference_free_loss",
        needs_reference=False,
        nll_coef=1.0,
        nll_reduction="seq-sum",
        source="da.cpo",
    ),
    DirectMethod(
        "tpo",
        "stages.direct.direct_losses:reference_free_loss",
        needs_reference=False,
        default_beta=0.01,
        nll_coef=1.0,
        nll_of="target",
        nll_reduction="token-mean",
        source="TPO (Saeidi et al. 2024, arXiv:2405.16681), with TRL's beta and mean over tokens; nll_coef is alpha",
    ),
    DirectMethod(
        "tpo_l",
        "stages.direct.direct_losses:simpo_loss",
        needs_reference=False,
        logp_reduction="mean",
        default_beta=2.0,
        options={"simpo_gamma": 0.5, "label_smoothing": 0.0},
        nll_coef=1.0,
        nll_of="target",
        nll_reduction="token-mean",
        source="TPO-L (Saeidi et al. 2024), means with a margin; beta is simpo's, whose term it is",
    ),
    DirectMethod(
        "orpo",
        "stages.direct.direct_losses:orpo_loss",
        needs_reference=False,
        logp_reduction="mean",
        default_beta=0.1,
        nll_coef=1.0,
        settings={"nll_on_prompt": False},
        source="da.orpo; beta is lambda, the loss is lambda * odds-ratio term",
    ),
    DirectMethod(
        "slic",
        "stages.direct.direct_losses:slic_loss",
        needs_reference=False,
        columns=("target",),
        default_beta=None,
        options={"delta": 1.0, "reg_coef": 0.1},
        source="da.slic (SLiC-HF)",
    ),
)
DIRECT_METHODS: dict[str, DirectMethod] = {row.name: row for row in _DIRECT_ROWS}


def resolve(path: str):
    """The function behind "module:function"."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)
