"""Methods as rows of tables: which advantage, surrogate, KL and aggregation make up a named algorithm.

Nothing heavy is imported here (configs read the keys); functions are named as "module:function" and looked up by
`resolve`. A row is a point on independent axes: take one and `dataclasses.replace` what you want to
differ, then `validate_rl` says whether the combination makes sense.
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
        return self.advantage in GROUP_ADVANTAGES or self.unit == "pairs"

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


#: Settings of the rl stage that take the place of an axis of the preset's row: setting -> field of the row.
RL_AXES = {
    "beta": "kl_loss_coef",
    "kl_estimator": "kl_loss_estimator",
    "kl_coef": "kl_reward_coef",
    "scale_rewards": "scale",
    "loss_agg_mode": "aggregation",
    **{
        name: name
        for name in (
            "advantage",
            "baseline",
            "std_ddof",
            "std_eps",
            "whiten",
            "adv_norm_ddof",
            "gamma",
            "lam",
            "lam_critic",
            "lam_alpha",
            "opponent",
            "surrogate",
            "ratio_level",
            "epsilon",
            "epsilon_high",
            "clip_ratio_c",
            "num_iterations",
            "kl_reward_mode",
            "kl_direction",
            "kl_target",
            "kl_controller",
            "target_kl",
            "critic_target",
            "n_steps",
            "critic_warmup_steps",
            "truncation_policy",
            "dynamic_sampling",
            "ptx_coef",
        )
    },
}


def _pays_steps(c) -> bool:
    """Whether a reward pays the reasoning steps of a completion."""
    return any(one.step_credit != "none" and one.counts for one in c.rewards)


def _aggregates(r: RLPreset, c) -> bool:
    """Whether any term of the loss is a sum over tokens that the aggregation weighs."""
    return not r.objective or r.unit == "tokens" or r.kl_loss_coef > 0 or c.entropy_coef > 0 or r.needs_critic


#: Settings of the rl stage that are read under a condition only (``stages.settings.unread``): the condition on the
#: resolved row ``r`` and the config ``c``, and what is written where it does not hold. What is not named here is read
#: by every preset; of settings with several conditions the first that fails speaks.
RL_READ_WHEN = (
    # TRPO's step: its critic alone takes gradient steps
    (
        (
            "lr_schedule",
            "warmup_ratio",
            "warmup_steps",
            "weight_decay",
            "adam_beta1",
            "adam_beta2",
            "adam_epsilon",
            "max_grad_norm",
        ),
        lambda r, c: r.update != "trust_region" or r.needs_critic,
        (
            "TRPO's step is that of conjugate gradient and line search, and there is no critic; write max_kl, or"
            " preset=ppo"
        ),
    ),
    (
        ("optimizer",),
        lambda r, c: r.update != "trust_region",
        "TRPO's step is that of conjugate gradient and line search (and a critic's AdamW); write preset=ppo",
    ),
    # advantages
    (
        ("advantage",),
        lambda r, c: r.unit != "pairs",
        "the preset's loss compares the rewards of pairs and reads no advantages; write another preset",
    ),
    (
        ("baseline", "scale_rewards", "std_ddof", "std_eps", "whiten", "adv_norm_ddof", "advantage_clip"),
        lambda r, c: r.unit != "pairs",
        "the preset's loss compares the rewards of pairs and reads no advantages; write another preset",
    ),
    (
        ("advantage", "baseline", "whiten", "adv_norm_ddof", "advantage_clip"),
        lambda r, c: r.unit != "tokens",
        "the preset regresses policy and critic on the same returns, which are rewards-to-go; write another preset",
    ),
    (
        ("multi_objective_aggregation",),
        lambda r, c: r.advantage == "group_mean" and r.unit != "pairs",
        "components are normalised in a prompt's group, which advantage=group_mean compares in; write that",
    ),
    (
        ("scale_rewards",),
        lambda r, c: (
            r.advantage == "group_mean"
            or (r.advantage in ("turn_returns", "leave_one_out_max") and r.scale in ("none", "group"))
        ),
        (
            "advantage=group_mean divides by a std (turn_returns and leave_one_out_max: by the group's), no other does;"
            " write advantage=group_mean"
        ),
    ),
    (
        ("std_ddof", "std_eps"),
        lambda r, c: (
            r.advantage == "process"
            or c.multi_objective_aggregation == "normalize_then_sum"
            or (r.scale != "none" and r.advantage in ("group_mean", "turn_returns", "leave_one_out_max"))
        ),
        "no std of a group or batch is taken; write advantage=group_mean scale_rewards=group",
    ),
    (("adv_norm_ddof",), lambda r, c: r.whiten, "advantages are not whitened; write whiten=true"),
    (
        ("gamma",),
        lambda r, c: (
            r.advantage in ("turn_returns", "token_baseline", "reward_to_go", "gae")
            or (r.advantage == "leave_one_out" and _pays_steps(c))
            or (r.needs_critic and r.critic_target in ("lambda_return", "mc_return", "td0", "n_step", "soft_bellman"))
        ),
        (
            "every token is credited with the whole reward; write advantage=reward_to_go, gae (with a critic) or"
            " turn_returns (in an environment, or with steps that a reward pays)"
        ),
    ),
    (
        ("lam",),
        lambda r, c: (
            (r.advantage == "gae" and r.lam_alpha is None)
            or (r.needs_critic and r.critic_target == "lambda_return" and r.lam_critic is None)
        ),
        (
            "no lambda-return with a fixed lambda is taken; write preset=ppo (vapo sets the policy's by length, the"
            " critic's is lam_critic)"
        ),
    ),
    (
        ("lam_alpha",),
        lambda r, c: r.advantage == "gae",
        "no generalised advantage estimate is taken; write preset=ppo or vapo",
    ),
    (
        ("lam_critic",),
        lambda r, c: r.needs_critic and r.critic_target == "lambda_return",
        "it is the lambda of a critic's target; write preset=ppo, with critic_target=lambda_return",
    ),
    (
        ("n_steps",),
        lambda r, c: r.needs_critic and r.critic_target == "n_step",
        "it is the horizon of a critic's target; write preset=ppo, with critic_target=n_step",
    ),
    (
        ("baseline_value",),
        lambda r, c: _baseline(r) == "constant",
        "it is the baseline of baseline=constant; write that (with advantage=reward_minus_baseline)",
    ),
    (
        ("baseline_decay",),
        lambda r, c: _baseline(r) == "moving_average",
        "only baseline=moving_average decays; write that (with advantage=reward_minus_baseline)",
    ),
    (
        ("baseline_samples",),
        lambda r, c: _baseline(r) in ("table", "v_star"),
        "only baseline=table and v_star sample before training; write one of them",
    ),
    (("v_star_beta",), lambda r, c: _baseline(r) == "v_star", "it is the temperature of baseline=v_star; write that"),
    (
        ("opponent",),
        lambda r, c: r.advantage == "win_rate",
        "only advantage=win_rate compares with an opponent; write preset=nash_md or sppo",
    ),
    (
        ("opponent_decay",),
        lambda r, c: r.advantage == "win_rate" and r.opponent == "ema",
        "there is no averaged opponent; write opponent=ema (with preset=nash_md or sppo)",
    ),
    (
        ("mixture_coef",),
        lambda r, c: r.advantage == "win_rate" and r.opponent == "mixture",
        "there is no mixed opponent; write opponent=mixture (with preset=nash_md or sppo)",
    ),
    (
        ("vine_samples",),
        lambda r, c: r.advantage == "vine",
        "only advantage=vine continues completions; write preset=vineppo",
    ),
    (
        ("step_separator",),
        lambda r, c: r.advantage in ("process", "vine") and not c.environment,
        (
            "only advantage=process and vine cut completions into steps (in an environment: by turns); write"
            " preset=grpo_process or vineppo"
        ),
    ),
    # ratios, clips, aggregation
    (
        ("surrogate", "ratio_level", "epsilon", "epsilon_high", "clip_ratio_c", "importance_correction", "rejection"),
        lambda r, c: not r.objective,
        (
            "the preset has a loss of its own on whole responses instead of a surrogate; write its constants as"
            " options, or another preset"
        ),
    ),
    (
        ("top_entropy_quantile", "off_policy_mask_threshold"),
        lambda r, c: not r.objective,
        (
            "the preset has a loss of its own on whole responses, of which no token or response is left out; "
            "write preset=grpo"
        ),
    ),
    (
        ("top_entropy_quantile", "off_policy_mask_threshold"),
        lambda r, c: r.update != "trust_region",
        "TRPO's step is measured over all tokens; write preset=grpo or ppo",
    ),
    (
        ("covariance_clip", "covariance_kl"),
        lambda r, c: not r.objective and r.update != "trust_region",
        "the preset has a loss of its own on whole responses, or a step of its own; write preset=grpo",
    ),
    (
        ("covariance_kl",),
        lambda r, c: r.num_iterations * c.num_minibatches > 1 or c.async_rollouts,
        "every step is taken where pi is pi_old and the penalty flat; write num_iterations=2 or num_minibatches=2",
    ),
    (
        ("covariance_band",),
        lambda r, c: c.covariance_clip > 0,
        "no token is left out by its covariance; write covariance_clip=2e-4",
    ),
    (
        ("covariance_kl_coef",),
        lambda r, c: c.covariance_kl > 0,
        "no token pays for its covariance; write covariance_kl=2e-4",
    ),
    (
        ("off_policy_mask_threshold",),
        lambda r, c: (
            r.num_iterations * c.num_minibatches > 1
            or c.engine != "builtin"
            or c.async_rollouts
            or c.importance_correction != "none"
        ),
        (
            "every step is taken from the policy that sampled, from which nothing is off; write num_iterations=2,"
            " num_minibatches=2 or async_rollouts=true"
        ),
    ),
    (
        ("ratio_level",),
        lambda r, c: r.surrogate not in ("logp", "vespo", "geo_mean", "dppo_tv", "dppo_kl"),
        "surrogate=logp has no ratio, vespo, geo_mean and dppo have one of their own; write surrogate=clip",
    ),
    (
        ("epsilon",),
        lambda r, c: (
            r.surrogate in ("clip", "geo_mean", "dppo_tv", "dppo_kl")
            or (r.surrogate == "cispo" and r.epsilon_high is None)
        ),
        "the surrogate has no lower clip; write surrogate=clip",
    ),
    (
        ("epsilon_high",),
        lambda r, c: r.surrogate in ("clip", "cispo", "geo_mean", "dppo_tv", "dppo_kl"),
        "the surrogate does not clip; write surrogate=clip",
    ),
    (
        ("clip_ratio_c",),
        lambda r, c: r.surrogate in ("clip", "dppo_tv", "dppo_kl"),
        "the surrogate does not clip; write surrogate=clip",
    ),
    (
        ("importance_clip_max",),
        lambda r, c: c.importance_correction != "none" and not r.objective,
        "no importance weights are taken; write importance_correction=token_truncate",
    ),
    (
        ("importance_normalise",),
        lambda r, c: c.importance_correction != "none" and not r.objective,
        "no importance weights are taken; write importance_correction=token_truncate",
    ),
    (
        ("importance_clip_min",),
        lambda r, c: c.importance_correction != "none" and not r.objective,
        "no importance weights are taken; write importance_correction=token_truncate",
    ),
    (
        ("rejection_statistic", "rejection_min", "rejection_max", "rejection_scope"),
        lambda r, c: c.rejection != "none" and not r.objective,
        "nothing is rejected; write rejection=sequence_mean",
    ),
    (
        ("rejection_min",),
        lambda r, c: c.rejection_statistic == "ratio",
        "only ratios have a lower bound; write rejection_statistic=ratio",
    ),
    (
        ("loss_agg_mode", "loss_scale_factor", "token_norm_scope"),
        _aggregates,
        (
            "the preset's loss is a mean over sequences or pairs and has no token term; write beta=0.04 or"
            " entropy_coef=0.01 to add one"
        ),
    ),
    (
        ("loss_scale_factor",),
        lambda r, c: r.aggregation == "seq-mean-token-sum-norm",
        "only one aggregation has a constant; write loss_agg_mode=seq-mean-token-sum-norm",
    ),
    (
        ("token_norm_scope",),
        lambda r, c: r.aggregation == "token-mean",
        "it is the scope of a mean over tokens; write loss_agg_mode=token-mean",
    ),
    (
        ("seq_denominator",),
        lambda r, c: (r.objective and r.unit == "sequences") or (_aggregates(r, c) and r.aggregation != "token-mean"),
        "nothing is averaged over sequences; write loss_agg_mode=seq-mean-token-mean",
    ),
    (
        ("minibatch_unit",),
        lambda r, c: c.num_minibatches > 1,
        "every pass over a batch of completions is one step; write num_minibatches=4",
    ),
    (
        ("early_stop_kl",),
        lambda r, c: r.num_iterations * c.num_minibatches > 1,
        "each batch of completions is used for one step; write num_iterations=2 or num_minibatches=2",
    ),
    # KL
    (
        ("kl_estimator", "kl_direction", "kl_target", "kl_is_weighted"),
        lambda r, c: r.kl_loss_coef > 0,
        "there is no KL in the loss (beta=0); write beta=0.04",
    ),
    (
        ("kl_direction",),
        lambda r, c: r.kl_loss_estimator == "full",
        "only the exact KL has a direction; write kl_estimator=full",
    ),
    (
        ("kl_is_weighted",),
        lambda r, c: r.kl_loss_estimator != "full",
        "the exact KL needs no weights; write kl_estimator=k3",
    ),
    (
        ("kl_reward_mode",),
        lambda r, c: r.kl_reward_coef > 0,
        "there is no KL in the reward (kl_coef=0); write kl_coef=0.02",
    ),
    (
        ("kl_reward_estimator",),
        lambda r, c: r.kl_reward_coef > 0,
        "there is no KL in the reward (kl_coef=0); write kl_coef=0.02",
    ),
    (
        ("k_beta", "kl_horizon"),
        lambda r, c: r.kl_controller == "adaptive_ziegler",
        "only one controller has a gain; write kl_controller=adaptive_ziegler",
    ),
    (("k_beta",), lambda r, c: c.kl_horizon is None, "kl_horizon takes its place; leave one of them out"),
    (
        ("kl_coef_min", "kl_coef_max"),
        lambda r, c: r.kl_controller != "fixed",
        "the KL coefficient does not move; write kl_controller=adaptive_ppo",
    ),
    # the alarm kl_over_target
    (
        ("target_kl",),
        lambda r, c: (
            r.kl_controller != "fixed" or (r.kl_target == "ref" and (r.kl_loss_coef > 0 or r.kl_reward_coef > 0))
        ),
        "no KL to the reference is held down; write kl_coef=0.02 or beta=0.04, and kl_controller=adaptive_ppo",
    ),
    (
        ("kl_unit",),
        lambda r, c: bool(r.target_kl) and not (r.kl_loss_coef > 0 and r.kl_target == "old"),
        "no KL to the reference is compared with a target; write target_kl",
    ),
    (
        ("ref_mode", "ref_sync_steps", "ref_sync_alpha", "ref_decay"),
        lambda r, c: r.needs_reference or c.monitor_kl or (r.opponent == "mixture" and c.ref_mode != "previous"),
        "no reference is loaded; write beta=0.04, kl_coef=0.02 or monitor_kl=true",
    ),
    (
        ("ref_sync_steps", "ref_sync_alpha"),
        lambda r, c: c.ref_mode == "refresh",
        "only ref_mode=refresh mixes every so many steps; write that",
    ),
    (("ref_decay",), lambda r, c: c.ref_mode == "ema", "only ref_mode=ema is an average; write that"),
    # critic
    (
        (
            "critic_mode",
            "critic_init",
            "critic_learning_rate",
            "critic_target",
            "critic_warmup_steps",
            "vf_coef",
            "cliprange_value",
            "value_loss_half",
        ),
        lambda r, c: r.needs_critic,
        "the preset has no critic, or its advantage reads none; write preset=ppo (with its own advantage)",
    ),
    (
        ("critic_init", "critic_learning_rate", "critic_warmup_steps"),
        lambda r, c: c.critic_mode == "separate",
        "a shared trunk learns with the policy; write critic_mode=separate",
    ),
    (
        ("vf_coef",),
        lambda r, c: c.critic_mode == "shared",
        "a critic of its own has its own learning rate (critic_learning_rate); write critic_mode=shared",
    ),
    # lengths and filters
    (
        ("missing_eos_penalty", "missing_eos_mode"),
        lambda r, c: r.truncation_policy == "penalty",
        "cut completions are not penalised; write truncation_policy=penalty",
    ),
    (
        ("truncated_in_stats",),
        lambda r, c: r.truncation_policy == "mask",
        "cut completions are not masked; write truncation_policy=mask",
    ),
    (
        ("truncated_in_stats",),
        lambda r, c: (
            r.unit != "pairs"
            and (r.advantage in GROUP_ADVANTAGES or _baseline(r) in ("moving_average", "batch_mean", "table", "v_star"))
        ),
        "no mean is taken over the rewards of completions; write advantage=group_mean, or baseline=batch_mean",
    ),
    (
        ("filter_groups_metric", "gen_batch_size", "max_num_gen_batches"),
        lambda r, c: r.dynamic_sampling,
        "no group is sampled again; write dynamic_sampling=true",
    ),
    (
        ("filter_groups_metric",),
        lambda r, c: r.advantage != "process",
        "groups are judged by the rewards of their steps, whatever is right in the end; write advantage=group_mean",
    ),
    (
        ("zero_advantage",),
        lambda r, c: r.unit != "pairs" and r.advantage in GROUP_ADVANTAGES and r.advantage != "win_rate",
        "the preset has no advantages that are 0 for a whole group of equal rewards; write advantage=group_mean",
    ),
    # off-policy data, pretraining mix, trust region
    (
        ("replay_window",),
        lambda r, c: c.replay_fraction > 0,
        "nothing is replayed; write replay_fraction=0.25 (with an off-policy preset)",
    ),
    (
        ("max_staleness",),
        lambda r, c: c.replay_fraction > 0 or c.async_rollouts,
        "nothing old is trained on; write replay_fraction=0.25 (with an off-policy preset), or async_rollouts=true",
    ),
    (
        ("ptx_batch_ratio", "ptx_agg", "ptx_max_length"),
        lambda r, c: r.ptx_coef > 0,
        "no pretraining text is mixed in; write ptx_coef (and the input ptx)",
    ),
    (
        (
            "max_kl",
            "cg_iters",
            "fisher_fraction",
            "cg_damping",
            "backtrack_coeff",
            "backtrack_iters",
            "trust_region_max_parameters",
        ),
        lambda r, c: r.update == "trust_region",
        "the preset takes gradient steps; write preset=trpo (early_stop_kl bounds the KL of the others)",
    ),
    (
        ("router_aux_loss_coef",),
        lambda r, c: r.update != "trust_region",
        "TRPO's step is that of the surrogate alone; write preset=ppo",
    ),
    # engines, prompts, groups, validation
    (
        ("engine_timeout_s", "engine_concurrency"),
        lambda r, c: c.engine == "server",
        "no server is asked for completions; write engine=server",
    ),
    (("engine_sleep",), lambda r, c: c.engine == "vllm", "only vLLM can sleep; write engine=vllm"),
    (("curriculum_mix",), lambda r, c: c.curriculum == "easy_to_hard", "write curriculum=easy_to_hard"),
    (("rerank_score",), lambda r, c: c.curriculum == "rerank", "write curriculum=rerank"),
    (("curriculum_beta", "curriculum_sigma"), lambda r, c: c.curriculum == "gaussian", "write curriculum=gaussian"),
    (("passk_bands", "passk_k"), lambda r, c: c.curriculum == "pass_at_k", "write curriculum=pass_at_k"),
    (("self_paced_thresholds",), lambda r, c: c.curriculum == "self_paced", "write curriculum=self_paced"),
    (
        ("passk_samples",),
        lambda r, c: c.curriculum in ("pass_at_k", "self_paced") or c.difficulty_band is not None,
        (
            "no pass rates are measured before training; write curriculum=pass_at_k or self_paced, or"
            " difficulty_band=[0.2, 0.8]"
        ),
    ),
    (
        ("improve_share", "prior_choice"),
        lambda r, c: c.mode_mix != "fresh",
        "no earlier answer is improved; write mode_mix=share",
    ),
    (
        ("conditioning",),
        lambda r, c: any(one.kind == "rubric" for one in c.rewards),
        "every answer is sampled behind the plain question; add a reward of kind rubric",
    ),
    (("sft_in_loss",), lambda r, c: c.sft_member != "none", "no SFT answer joins a group; write sft_member=append"),
    (("eval_every",), lambda r, c: c.eval_prompts > 0, "no validation prompt is asked; write eval_prompts=64"),
)


def _pays_outcomes(r: RLPreset, c) -> bool:
    return r.advantage != "process" or bool(c.environment)


#: Inputs of the rl stage that are read under a condition only (``stages.settings.refuse_unread_inputs``): the condition
#: on the resolved row ``r``, the config ``c`` and ``by_rewards``, the names of the inputs that its reward components
#: read.
RL_INPUTS_READ_WHEN = (
    (
        ("reward_model",),
        lambda r, c, by_rewards: (
            "reward_model" in by_rewards
            or not _pays_outcomes(r, c)
            or (r.needs_critic and c.critic_mode == "separate" and c.critic_init != "policy")
        ),
        "no reward asks it, and no critic starts from it; write rewards=[{name: reward, kind: model}] to be paid by it",
    ),
    (
        ("judge",),
        lambda r, c, by_rewards: "judge" in by_rewards,
        "no reward asks it; write rewards=[{name: judge, kind: judge}]",
    ),
    (
        ("gold",),
        lambda r, c, by_rewards: "gold" in by_rewards,
        "no reward asks it; write rewards=[..., {name: gold, kind: model, input: gold, weight: 0}] to watch it",
    ),
    (
        ("rubric",),
        lambda r, c, by_rewards: "rubric" in by_rewards,
        "no reward scores by it; write rewards=[{name: rubric, kind: rubric}]",
    ),
    (
        ("group_preference", "context"),
        lambda r, c, by_rewards: "context" in by_rewards or "group_preference" in by_rewards,
        "no reward asks it; write rewards=[{kind: group_preference, group: NAME}]",
    ),
    (
        ("demonstrations",),
        lambda r, c, by_rewards: "demonstrations" in by_rewards,
        "no reward retrieves from it; write rewards=[{kind: icdpo}]",
    ),
    (
        ("principles",),
        lambda r, c, by_rewards: "principles" in by_rewards,
        "no judge is shown them; write {principle} in the judge_prompt of a reward",
    ),
    (("sft",), lambda r, c, _: c.sft_member != "none", "no SFT answer joins a group; write sft_member=append"),
    (
        ("reference",),
        lambda r, c, _: c.ref_mode != "previous" or r.opponent == "mixture",
        "the reference is the policy that started the iteration; write ref_mode=frozen",
    ),
    (
        ("critic",),
        lambda r, c, _: r.needs_critic,
        "the preset has no critic, or its advantage reads none; write preset=ppo",
    ),
    (
        ("critic",),
        lambda r, c, _: c.critic_mode == "separate",
        "the critic is a head on the policy's trunk; write critic_mode=separate",
    ),
    (("ptx",), lambda r, c, _: r.ptx_coef > 0, "no pretraining text is mixed in; write ptx_coef=27.8"),
    (
        ("baselines",),
        lambda r, c, _: _baseline(r) in ("table", "v_star"),
        "no baseline of prompts is read; write baseline=table or v_star (with advantage=reward_minus_baseline)",
    ),
    (
        ("prompt_stats",),
        lambda r, c, _: c.curriculum in ("pass_at_k", "self_paced") or c.difficulty_band is not None,
        "no pass rates are read; write curriculum=pass_at_k or self_paced, or difficulty_band=[0.2, 0.8]",
    ),
)

#: Settings of the rl stage that an input replaces; conditions are called with the stage.
RL_READ_OF_INPUTS = (
    (
        ("baseline_samples", "v_star_beta"),
        lambda s: not s.has("baselines"),
        "the input baselines gives the baselines, and nothing is sampled for them; leave that input out",
    ),
    (("critic_init",), lambda s: not s.has("critic"), "the critic starts from the input critic; leave that input out"),
)

#: What must hold for an alarm of ``stop_on`` ever to go off: alarm -> (condition on row and config, what to write).
#: Alarms that are not named always can.
RL_ALARMS_WATCH = {
    "kl_over_target": (
        lambda r, c: bool(r.target_kl) and r.kl_target == "ref" and (r.kl_loss_coef > 0 or r.kl_reward_coef > 0),
        "there is no target for a KL to the reference; write target_kl=6.0 (with beta=0.04 or kl_coef=0.02)",
    ),
    "over_optimisation": (
        lambda r, c: c.eval_prompts > 0 and c.eval_every > 0,
        "it compares passes over validation prompts; write eval_prompts=64 and eval_every=10",
    ),
    **dict.fromkeys(
        ("harmful_critic", "td_error_stays"), (lambda r, c: r.needs_critic, "there is no critic; write preset=ppo")
    ),
    "reward_model_drift": (
        lambda r, c: (
            any(one.learned for one in c.rewards)
            and (
                c.reward_override == "none"
                and any(one.kind in ("verifier", "code", "constraints", "environment") for one in c.rewards)
                or sum(one.learned for one in c.rewards) > 1
                and any(one.input == "gold" for one in c.rewards)
            )
        ),
        (
            "no reward model is compared with fresh labels; add {name: verdict, kind: verifier, weight: 0} beside a"
            " reward of kind model, or {name: gold, kind: model, input: gold, weight: 0}"
        ),
    ),
    **dict.fromkeys(
        ("entropy_collapse", "entropy_explosion"),
        (lambda r, c: c.log_entropy or c.entropy_coef > 0, "the entropy is not measured; write log_entropy=true"),
    ),
    "format_invalid": (
        lambda r, c: any(one.kind == "format" for one in c.rewards),
        "no reward says whether a completion has its form; add {kind: format, weight: 0}",
    ),
    "dead_groups": (lambda r, c: r.compares, "no completions of a group are compared; write preset=grpo"),
    "clip_fraction_high": (
        lambda r, c: not r.objective and not r.strictly_on_policy and r.surrogate in CLIPPED,
        "no ratio is compared with a clip range; write surrogate=clip (with a preset that has a surrogate)",
    ),
    "ratio_off": (
        lambda r, c: not r.strictly_on_policy,
        "every step is taken from the policy that sampled, where ratios are 1; write surrogate=clip",
    ),
    "unscorable_rewards": (
        _pays_outcomes,
        "the rewards of steps are paid, which all completions have; write advantage=group_mean",
    ),
    "cut_completions_earn_more": (
        lambda r, c: r.truncation_policy not in ("bootstrap", "mask"),
        "a cut completion earns nothing of its own; write truncation_policy=score",
    ),
}


def _baseline(r: RLPreset) -> str:
    """The baseline that is read, if any."""
    return r.read_baseline


def rl_preset(name: str, **changes) -> RLPreset:
    """A row of RL_PRESETS with some axes changed; unknown names list the known ones."""
    if name not in RL_PRESETS:
        raise ValueError(f"no RL preset {name!r}; write one of: {', '.join(RL_PRESETS)}")
    return replace(RL_PRESETS[name], **changes)


#: Where constants of a preset's own loss make sense: numbers above the first and up to the second, or the words to
#: choose from; a pair of numbers is an interval of weights, low to high.
RL_OPTION_RANGES: dict[str, tuple] = {
    **{name: (0.0, float("inf")) for options in SURROGATE_OPTIONS.values() for name in options},
    **{name: (0.0, float("inf")) for name in ("tau", "beta", "eta", "epsilon")},
    "form": ("separate", "joint"),
}


def preset_options(row: RLPreset, given: dict) -> dict:
    """The constants of a preset's own loss, or of its surrogate, with those ``given`` in their place; ValueError where
    one is unknown, of another type, or makes no sense.
    """
    known, of = (
        (row.options, f"preset {row.name}")
        if row.objective or row.surrogate not in SURROGATE_OPTIONS
        else (SURROGATE_OPTIONS[row.surrogate], f"surrogate {row.surrogate}")
    )
    unknown = set(given) - set(known)
    if unknown:
        raise ValueError(f"options {', '.join(sorted(unknown))}: {of} has {', '.join(known) or 'none'}; remove them.")
    for name, value in given.items():
        like, who = known[name], f"options.{name}={list(value) if isinstance(value, tuple) else value!r} of {of}"
        if isinstance(like, tuple):
            if not isinstance(value, (tuple, list)) or not 0.0 <= value[0] <= value[1]:
                raise ValueError(f"{who}: write the smallest and the largest weight, 0 or more, like {list(like)}.")
        elif isinstance(like, str):
            if value not in RL_OPTION_RANGES[name]:
                raise ValueError(f"{who}: write one of {', '.join(RL_OPTION_RANGES[name])}.")
        elif (
            isinstance(value, bool)
            or not isinstance(value, (int, float))
            or not RL_OPTION_RANGES[name][0] < value < RL_OPTION_RANGES[name][1]
        ):
            raise ValueError(f"{who}: write a number > {RL_OPTION_RANGES[name][0]:g}, like {like:g}.")
    return {**known, **{name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}}


def validate_rl(
    row: RLPreset,
    num_generations: int,
    *,
    updates_per_generation: int | None = None,
    max_staleness: int = 0,
    async_rollouts: bool = False,
    allow_double_kl: bool = False,
    loss_scale_factor: float | None = None,
) -> list[str]:
    """Refuse impossible combinations (ValueError saying what to write) and return warnings."""

    def refuse(text):
        raise ValueError(f"RL preset {row.name}: {text}")

    updates = updates_per_generation or row.num_iterations
    for name, value, known in (
        ("advantage", row.advantage, ADVANTAGES),
        ("scale_rewards", row.scale, SCALES),
        ("baseline", row.baseline, BASELINES),
        ("critic_target", row.critic_target, CRITIC_TARGETS),
    ):
        if value not in known:
            refuse(f"{name}={value!r}; write one of {', '.join(known)}")
    for name in ("epsilon", "kl_reward_coef", "kl_loss_coef", "ptx_coef"):
        if getattr(row, name) < 0:
            refuse(f"{name}={getattr(row, name)} is negative; write 0 to switch it off")
    needed = max(row.min_generations, 2 if row.compares else 1)
    if num_generations < needed:
        refuse(
            f"num_generations={num_generations} gives no baseline inside the group; write num_generations >= {needed}"
        )
    if row.epsilon_high is not None and row.epsilon_high < row.epsilon and row.surrogate == "clip":
        refuse(f"epsilon_high={row.epsilon_high} is below epsilon={row.epsilon}; write epsilon_high >= epsilon")
    if (
        row.clip_ratio_c is not None
        and row.surrogate == "clip"
        and not row.objective
        and row.clip_ratio_c <= 1 + (row.epsilon if row.epsilon_high is None else row.epsilon_high)
    ):
        high = row.epsilon if row.epsilon_high is None else row.epsilon_high
        refuse(
            f"clip_ratio_c={row.clip_ratio_c:g} bounds ratios that the clip at 1 + epsilon_high = {1 + high:g} does not"
            " reach; write clip_ratio_c=3.0"
        )
    if row.dynamic_sampling and num_generations < 2:
        refuse(
            "dynamic_sampling=true drops groups whose answers all earn the same, which groups of one always do; write"
            " num_generations=4, or dynamic_sampling=false"
        )
    if row.update == "trust_region" and row.ptx_coef > 0:
        refuse(
            "ptx_coef mixes pretraining text into the batch, which update=trust_region would measure its KL and Fisher"
            " matrix over; write ptx_coef=0, or preset=ppo_ptx"
        )
    if row.kl_reward_coef > 0 and row.kl_loss_coef > 0 and row.kl_target == "ref" and not allow_double_kl:
        refuse("KL is penalised in the reward and in the loss; set kl_coef or beta to 0, or allow_double_kl=true")
    if row.kl_loss_coef > 0 and row.kl_loss_estimator == "k1":
        refuse(
            "k1 in the loss has zero expected gradient and regularises nothing; write kl_estimator=k3 or k2, or put the"
            " KL in the reward"
        )
    if row.kl_direction == "forward" and row.kl_loss_coef > 0 and row.kl_loss_estimator != "full":
        refuse("kl_direction=forward needs the whole distribution; write kl_estimator=full")
    if row.objective and row.kl_loss_coef > 0 and row.unit == "pairs":
        refuse("a loss on pairs has no token average to put a KL into; write beta=0 (kl_coef puts it into the reward)")
    if (
        row.kl_reward_coef > 0
        and row.kl_reward_mode.startswith("token")
        and row.advantage not in ("reward_to_go", "token_baseline", *VALUE_ADVANTAGES)
    ):
        refuse(
            f"kl_reward_mode={row.kl_reward_mode} shapes token rewards, but advantage={row.advantage} reads one reward"
            " per completion; write kl_reward_mode=sequence_sum"
        )
    if (
        row.kl_reward_coef > 0
        and row.kl_reward_mode == "token_broadcast"
        and not (
            row.advantage == "reward_minus_value" and row.critic_target in ("kl_adjusted_outcome", "terminal", "bandit")
        )
    ):
        refuse(
            f"kl_reward_mode=token_broadcast puts the whole reward on every token, and advantage={row.advantage} with"
            f" critic_target={row.critic_target} would add these up; write kl_reward_mode=token_terminal, or"
            " advantage=reward_minus_value with critic_target=kl_adjusted_outcome"
        )
    if row.kl_reward_coef > 0 and row.advantage == "process":
        refuse(
            "advantage=process reads step rewards, which kl_coef does not lower; write beta=0.04 (the KL in the loss)"
            " and kl_coef=0"
        )
    if row.kl_reward_coef > 0 and row.advantage == "vine":
        refuse(
            "advantage=vine compares values of steps, which kl_coef does not lower: the whole completion's KL would"
            " land on the last step; write beta=1e-4 (the KL in the loss, VinePPO's) and kl_coef=0"
        )
    if row.kl_controller != "fixed" and not (row.kl_loss_coef or row.kl_reward_coef):
        refuse(
            f"kl_controller={row.kl_controller} multiplies a coefficient, and both are 0; write beta or kl_coef > 0 to"
            " start from, or kl_controller=fixed"
        )
    if row.kl_controller != "fixed" and not (row.target_kl and row.target_kl > 0):
        refuse(f"kl_controller={row.kl_controller} needs target_kl > 0 (6.0 nats per sequence is a common start)")
    if row.advantage in VALUE_ADVANTAGES and not row.needs_critic:
        refuse("GAE needs a critic; write preset=ppo, or advantage=group_mean")
    if row.strictly_on_policy and updates > 1:
        one = (
            f"write num_iterations=1 and num_minibatches=1, which gives one optimizer step per rollout (here {updates})"
        )
        if row.update == "trust_region":
            refuse(f"update=trust_region measures its step from the policy that sampled; {one}, or preset=ppo")
        refuse(f"surrogate={row.surrogate} is strictly on-policy; {one}, or surrogate=clip")
    if max_staleness > 0 and not (row.off_policy_ok or async_rollouts):
        refuse(
            "it is on-policy and accepts no stale rollouts; write max_staleness=0, or preset=topr, offline_is, copg,"
            " mdpo or oreo"
        )
    if row.aggregation == "seq-mean-token-sum-norm" and loss_scale_factor is not None and loss_scale_factor <= 0:
        refuse("loss_scale_factor must be > 0; write the maximum completion length")
    if row.unit == "tokens" and row.gamma != 1.0:
        refuse(
            f"gamma={row.gamma:g} would discount rewards, and not the log-ratios to come that the regression takes off"
            " them; write gamma=1, or preset=ppo"
        )
    if row.unit == "tokens" and row.critic_target != "soft_bellman":
        refuse(
            f"critic_target={row.critic_target}: the policy's regression takes the value to be that of the soft-Bellman"
            " regression, reward to come less beta times the log-ratios to come; leave critic_target out, or write"
            " preset=ppo"
        )
    if row.truncation_policy == "bootstrap" and not row.needs_critic:
        refuse(
            "truncation_policy=bootstrap needs a critic's value of the cut state; write score, zero, penalty or mask"
        )
    if row.truncation_policy == "bootstrap" and row.advantage != "gae":
        refuse(
            "truncation_policy=bootstrap pays a cut completion by the value of its end, which"
            f" advantage={row.advantage} does not read; write score, zero, penalty or mask, or advantage=gae"
        )
    warnings = []
    of_sequences = row.ratio_level != "token" or row.surrogate == "geo_mean"
    if of_sequences and row.aggregation != "seq-mean-token-mean" and not row.objective:
        warnings.append(
            f"{row.name}: a sequence ratio with {row.aggregation} weights sequences by their length;"
            " seq-mean-token-mean gives one term each"
        )
    if row.name == "astar_po" and num_generations > 1:
        warnings.append(
            f"astar_po: A*-PO takes one completion of each prompt, here num_generations={num_generations}; write"
            " num_generations=1 (and more prompts_per_step)"
        )
    if row.num_iterations > 4:
        warnings.append(f"{row.name}: {row.num_iterations} epochs on one rollout; more than 4 is rarely stable")
    if row.surrogate == "none" and not row.kl_loss_coef and updates > 4:
        warnings.append(f"{row.name}: {updates} updates per rollout without a clip; texts say fewer than five")
    if row.kl_reward_coef > 0 and row.scale != "none":
        warnings.append(
            f"{row.name}: KL in the reward with std scaling does not give the reverse-KL gradient; use beta"
        )
    return warnings


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
    nll_coef: float = 0.0  # coefficient of an NLL term on the chosen response
    nll_reduction: str = "seq-mean"  # of that term: seq-mean | seq-sum (per response) | token-mean (of the step)
    source: str = ""


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
#: Where options of direct methods make sense (of one method alone: METHOD.OPTION): numbers in [low, high), or the words
#: to choose from; all others take any number.
OPTION_RANGES: dict[str, tuple] = {
    "label_smoothing": (0.0, 0.5),
    "exo_pair.label_smoothing": (1e-12, 0.5),  # its KL to labels without smoothing is infinite
    "discopop_tau": (1e-6, float("inf")),
    "eta": (1e-12, float("inf")),
    "momentum": (0.0, 1.0),
    "offset_fn": ("log", "identity"),
    **{
        name: (0.0, float("inf"))
        for name in (
            "desirable_weight",
            "undesirable_weight",
            "reg_coef",
            "cal_weight",
            "conditional_weight",
            "anchor_weight",
            "simpo_gamma",
        )
    },
}


#: Settings of align that are read under a condition only, as ``RL_READ_WHEN``: the method's row ``m`` and the config
#: ``c``.
DIRECT_READ_WHEN = (
    (
        ("reference_alpha",),
        lambda m, c: c.reference_update == "tr_soft",
        "it is a share of the mixed reference; write reference_update=tr_soft",
    ),
    (
        ("reference_decay",),
        lambda m, c: c.reference_update == "ema",
        "it is the decay of the averaged reference; write reference_update=ema",
    ),
    (
        ("reference_interval",),
        lambda m, c: c.reference_update in ("tr_soft", "per_interval"),
        "the reference does not move every so many steps; write reference_update=tr_soft or per_interval",
    ),
    (("z_ref_mode",), lambda m, c: m.statistic == "z0", "only kto has a reference point; write method=kto"),
    (
        ("win_probability",),
        lambda m, c: "win_prob" in m.columns,
        "only sppo reads win probabilities; write method=sppo",
    ),
    (("segment_pairing",), lambda m, c: m.data == "segments", "only 2d_dpo pairs segments; write method=2d_dpo"),
    (
        ("corruption", "corruption_share"),
        lambda m, c: m.data == "conditions",
        "only mdpo corrupts prompts; write method=mdpo",
    ),
    (
        ("corruption_share",),
        lambda m, c: c.corruption != "shuffle",
        "shuffling keeps every part; write corruption=drop or truncate",
    ),
    (
        ("loss_weight",),
        lambda m, c: bool(c.also) or (m.nll_coef if c.nll_coef is None else c.nll_coef) > 0,
        (
            "there is no other loss beside it, so it would only scale the gradient; "
            "write also='[{method: bco_pair, weight: 0.2}]', or nll_coef=1"
        ),
    ),
    (
        ("f_divergence_type",),
        lambda m, c: m.divergence,
        (
            "its implicit rewards come from another f-divergence only where a loss reads nothing but their difference;"
            " write method=dpo, ipo, length_norm, hinge_norm, exo_pair, robust_dpo or discopop"
        ),
    ),
    (
        ("f_alpha_divergence_coef",),
        lambda m, c: c.f_divergence_type == "alpha_divergence",
        "only the alpha-divergence has a coefficient; write f_divergence_type=alpha_divergence",
    ),
    (
        ("ld_alpha",),
        lambda m, c: m.data == "pairs" and m.needs_reference and (c.logp_reduction or m.logp_reduction) == "sum",
        (
            "it weighs what a response of a pair has beyond the length of the other in sums of log-probs that are"
            " compared with a reference; write method=dpo (without logp_reduction=mean)"
        ),
    ),
    (
        ("nll_reduction",),
        lambda m, c: (m.nll_coef if c.nll_coef is None else c.nll_coef) > 0,
        "there is no NLL term; write nll_coef=1",
    ),
)


def refuse_addend(row: DirectMethod, added: DirectMethod, config) -> None:
    """Refuse a loss that cannot be added to that of ``row`` on the same pairs (``align also=``), with what to write
    instead.
    """

    def refuse(why: str):
        raise ValueError(f"also: {added.name} cannot be added to {row.name}: {why}")

    if row.data != "pairs" or added.data != "pairs":
        refuse(
            "losses are added on pairs only, with one chosen and one rejected response; write two methods on pairs,"
            " such as method=dpo with bco_pair"
        )
    if row.needs_reference != added.needs_reference:
        refuse(
            "one compares with a reference policy and the other has none; write two methods of one kind, such as dpo"
            " with bco_pair, or simpo with reference_free"
        )
    if row.statistic or added.statistic:
        refuse("aot and aql read all rows of a step at once and are trained alone; leave one of them out")
    if added.nll_coef:
        refuse(
            "it has an NLL term of its own, and a run has one; write it as method and add the other, or nll_coef=1"
            " with " + {"dpo_nll": "dpo", "cpo": "reference_free"}.get(added.name, "another loss")
        )
    if "target" in added.columns or added.name == "written":
        refuse(f"write method={added.name} and add the other to it")
    if ("label_prob" in row.columns) != ("label_prob" in added.columns):
        refuse(
            "one reads the probability that a pair is labelled right and the other takes every label as certain; write"
            " soft_dpo with soft_ipo, or dpo with ipo"
        )
    if config.f_divergence_type != "reverse_kl" and not added.divergence:
        refuse(f"it has no form with f_divergence_type={config.f_divergence_type}; leave that out")
    if config.ld_alpha is not None and added.logp_reduction != "sum":
        refuse("it compares means of log-probs, which ld_alpha does not weigh; leave ld_alpha out")
    if (
        (config.logp_reduction or row.logp_reduction) != added.logp_reduction
        and added.default_beta is not None
        and next(o for o in config.also if o.method == added.name).beta is None
    ):
        refuse(
            "one compares sums and the other means of log-probs, so they cannot share a beta; write its own, for"
            f" example beta: {added.default_beta:g}"
        )


def validate_direct(row: DirectMethod, beta: float | None, has_reference: bool) -> list[str]:
    """Refuse impossible direct-alignment settings and return warnings."""
    if row.default_beta is None and beta is not None:
        raise ValueError(f"{row.name} has no beta; leave it out (its options are {', '.join(row.options)})")
    if row.default_beta is not None and not beta > 0:
        raise ValueError(f"beta={beta} must be > 0; write {row.default_beta} for {row.name}")
    if row.needs_reference and not has_reference:
        raise ValueError(
            f"{row.name} compares with a reference policy; give one (normally the model you start from), or use"
            " method=simpo or orpo"
        )
    if not row.needs_reference and has_reference:
        raise ValueError(f"{row.name} has no reference policy; leave the reference input and reference_update out")
    return [f"beta={beta} is below the usual range for simpo (2.0-2.5)"] if row.name == "simpo" and beta < 1 else []


def resolve(path: str):
    """The function behind "module:function"."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)
