"""rl: policy-gradient fine-tuning with rewards from verifiers, reward models or mixtures.

An algorithm is a row of ``stages.algorithms.RL_PRESETS`` (``ppo``, ``grpo``, ``dapo``, ``rloo``, ``topr``, ...):
advantage, scaling, ratio and surrogate, KL in reward or loss, aggregation, critic, epochs. Every field left empty below
takes the preset's value (:mod:`stages.policy.presets`, which also refuses what does not go together); the resolved row
is printed at the start.

One iteration: :mod:`stages.rollouts` chooses prompts, samples G completions each, scores, filters, credits
and records them; :mod:`stages.policy.credit` turns rewards into an advantage per token;
:mod:`stages.policy.policy_update` is the loss of the ``num_iterations`` x ``num_minibatches`` optimizer steps,
:mod:`stages.policy.critics` the value function beside it. Rollouts are a ``rollouts/1`` dataset with every token, mask,
log-prob, reward component, value and advantage, so each update can be computed again. Groups without signal are counted
but never forwarded. Killed at any instant, the next run computes the same bytes.

With ``environment`` a completion is a trajectory of several turns (:mod:`stages.acting.agents`): rewards by turn, loss
on the policy's own tokens, and every turn once more as a row of ``trajectories/1``.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from stages.models.memory import SAMPLING, Role
from stages.policy.presets import RL_AXES, exact_in_reward, not_read, resolve_preset, row_of
from stages.reward.components import REWARD_INPUTS, WITHOUT_VERDICT, RewardComponent
from stages.reward.rewards import check_inputs, inputs_read
from stages.settings import (
    PROMPT_TEMPLATE,
    AgentConfig,
    ChatConfig,
    OptimizerConfig,
    PromptTemplate,
    SamplingConfig,
    Schedule,
    refuse_unread_in,
    refuse_unread_inputs,
)
from stages.spec import ConfigError, InputSpec, OutputSpec, StageSpec

Preset = Literal[
    "reinforce",
    "remax",
    "reinforce_pp",
    "rloo",
    "grpo",
    "grpo_process",
    "dr_grpo",
    "dapo",
    "grpo_plus",
    "gspo",
    "cispo",
    "sapo",
    "vespo",
    "gmpo",
    "opo",
    "otb",
    "grpo_passk",
    "grape",
    "grape_alt",
    "ppo",
    "ppo_outcome",
    "ppo_ptx",
    "ppo_penalty_adaptive",
    "ppo_clip_kl",
    "a2c",
    "vapo",
    "trpo_penalty",
    "trpo",
    "agent",
    "vineppo",
    "topr",
    "a_lol",
    "offline_is",
    "p3o",
    "copg",
    "mdpo",
    "astar_po",
    "oreo",
    "sppo",
    "online_ipo",
    "nash_md",
]
AlarmName = Literal[
    "unscorable_rewards",
    "reward_collapse",
    "kl_over_target",
    "entropy_collapse",
    "entropy_explosion",
    "clip_fraction_high",
    "ratio_off",
    "dead_groups",
    "completions_truncated",
    "cut_completions_earn_more",
    "length_growth",
    "repetition",
    "special_characters",
    "stock_phrases",
    "refusals",
    "rubric_low_confidence",
    "format_invalid",
    "harmful_critic",
    "td_error_stays",
    "reward_model_drift",
    "over_optimisation",
    "engine_mismatch",
]


class Config(OptimizerConfig, SamplingConfig, AgentConfig, ChatConfig):
    preset: Preset = Field(
        "grpo", description="Algorithm: a row of stages/algorithms.py, whose axes the settings below change."
    )
    rewards: list[RewardComponent] = Field(
        default_factory=lambda: [RewardComponent(name="verifier", kind="verifier")],
        description="Named, weighted reward components.",
    )
    learning_rate: float = Field(1e-6, gt=0, description="Peak learning rate, full parameters (texts 1e-6 to 1e-5).")
    lr_schedule: Schedule = Field("constant", description="Decay after warm-up, as in the other stages.")
    warmup_ratio: float = Field(0.0, ge=0, le=1, description="Share of the steps spent in linear warm-up.")
    max_steps: int = Field(100, ge=1, description="Optimizer steps.")
    prompts_per_step: int = Field(
        16,
        ge=1,
        description=(
            "Prompts per rollout batch. batch_size=N, completions per optimizer step, says it (or, beside it,"
            " num_minibatches) as in the other stages."
        ),
    )
    num_generations: int = Field(8, ge=1, description="Completions per prompt, G (TRL 8; DeepSeekMath 64).")
    num_iterations: int | None = Field(
        None, ge=1, title="Num iterations", description="Passes over each rollout batch (mu)."
    )
    num_minibatches: int = Field(1, ge=1, description="Optimizer steps per pass over a rollout batch.")
    minibatch_unit: Literal["prompt", "sequence", "token"] = Field(
        "prompt",
        description=(
            "num_minibatches deals out whole groups, completions, or single tokens, each behind its own context"
            " (OFFPOL-LOOP; token needs a mean over tokens)."
        ),
    )
    early_stop_kl: float | None = Field(
        None,
        gt=0,
        title="Early-stop KL",
        description="Sample again once KL(old||new) of the next minibatch passes 1.5 times this (nats per token).",
    )

    # Axes of the preset; empty = the preset's.
    advantage: (
        Literal[
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
        ]
        | None
    ) = Field(None, title="Advantage", description="Advantage estimator.")
    baseline: Literal["none", "constant", "moving_average", "batch_mean", "greedy", "table", "v_star"] | None = Field(
        None, title="Baseline", description="Baseline of reward_minus_baseline (BASELINE)."
    )
    scale_rewards: Literal["none", "group", "batch", "batch_centered"] | None = Field(
        None, title="Scale rewards", description="Std division of group advantages."
    )
    std_ddof: Literal[0, 1] | None = Field(
        None, title="Std ddof", description="Of a group's std: 1 sample (GRPO's code, TRL), 0 population."
    )
    std_eps: float | None = Field(
        None, ge=0, title="Std eps", description="Added to a group's std (TRL 1e-4, verl 1e-6)."
    )
    whiten: bool | None = Field(
        None, title="Whiten", description="Whiten advantages over the rollout batch's trained tokens (NORM)."
    )
    adv_norm_ddof: Literal[0, 1] | None = Field(
        None, title="Whitening ddof", description="Of whiten: 0 population (texts), 1 sample (TRL, verl)."
    )
    advantage_clip: float | None = Field(
        None, gt=0, title="Advantage clip", description="Clip advantages to +- this, after whitening."
    )
    gamma: float | None = Field(None, ge=0, le=1, title="Gamma", description="Discount (LLM 1).")
    lam: float | None = Field(None, ge=0, le=1, title="Lambda", description="GAE lambda (.9 to .97).")
    lam_alpha: float | None = Field(
        None,
        gt=0,
        title="Length-adaptive lambda",
        description=(
            "Lambda of the policy's advantages is 1 - 1/(lam_alpha * length), at least 0, in place "
            "of lam (VAPO: .05, for answers of thousands of tokens; answers of 20 need 1 or more, otherwise it is 0)."
        ),
    )
    lam_critic: float | None = Field(
        None,
        ge=0,
        le=1,
        title="Critic's lambda",
        description="GAE lambda of the critic's target, where it differs (VAPO 1).",
    )
    surrogate: (
        Literal["clip", "none", "logp", "stopgrad_ratio", "cispo", "sapo", "vespo", "geo_mean", "dppo_tv", "dppo_kl"]
        | None
    ) = Field(
        None,
        title="Surrogate",
        description=(
            "Policy loss per token: clipped ratio (PPO), unclipped, REINFORCE's log-prob, or weights that fade smoothly"
            " (sapo by token, vespo by sequence), or the geometric mean of a sequence's clipped ratios (geo_mean); or"
            " log-probs without tokens that moved too far, by total variation or KL (dppo_tv, dppo_kl: epsilon is that"
            " distance, DPPO .15 and .05)."
        ),
    )
    ratio_level: Literal["token", "sequence", "sequence_mean"] | None = Field(
        None, title="Ratio level", description="Ratio per token, product or geometric mean per sequence."
    )
    epsilon: float | None = Field(None, gt=0, title="Epsilon", description="Lower clip range.")
    epsilon_high: float | None = Field(None, gt=0, title="Epsilon high", description="Upper clip range (DAPO .28).")
    clip_ratio_c: float | None = Field(
        None,
        gt=1,
        title="Dual clip",
        description=(
            "Bound of the ratio where the advantage is negative (3.0 if on); of the weights of dppo_tv and dppo_kl"
            " (20)."
        ),
    )
    loss_agg_mode: (
        Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"] | None
    ) = Field(None, title="Loss aggregation", description="Aggregation over the whole optimizer step (AGG).")
    loss_scale_factor: float | None = Field(
        None,
        gt=0,
        title="Loss scale factor",
        description="Constant of seq-mean-token-sum-norm; default max_completion_length.",
    )
    token_norm_scope: Literal["batch", "group"] = Field(
        "batch", description="token-mean over the step's tokens, or per prompt group and then over groups."
    )
    seq_denominator: Literal["nonempty", "all"] = Field(
        "nonempty",
        description=(
            "Means over sequences count those with a trained token (verl), or all that were sampled (TRL's GRPO)."
        ),
    )
    options: dict[str, float | tuple[float, float] | str] = Field(
        default_factory=dict,
        description=(
            "Constants of a preset's own loss: tau (mdpo, online_ipo), beta (copg, astar_po, oreo), eta (sppo), epsilon"
            " and form=separate or joint (p3o), clip_pos and clip_neg (topr, a_lol, offline_is): smallest and largest"
            " importance weight of a completion with positive and with other advantage, for example clip_pos=[0, 2]; or"
            " of a surrogate: tau_pos, tau_neg (sapo), k_pos, lambda_pos, k_neg, lambda_neg (vespo)."
        ),
    )
    top_entropy_quantile: float = Field(
        1.0,
        gt=0,
        le=1,
        description=(
            "Share of the trained tokens of a rollout batch, those of highest entropy under the policy that starts the"
            " iteration, that the policy loss learns from (Wang et al. 2025: 0.2); KL and entropy bonus stay on all,"
            " and so do the denominators. 1 = all."
        ),
    )
    covariance_clip: float = Field(
        0.0,
        ge=0,
        lt=1,
        description=(
            "Leave this share of the trained tokens of a rollout batch out of the policy loss, at random from those"
            " whose covariance of log-prob and advantage under the policy that starts the iteration lies in"
            " covariance_band, so that the entropy falls more slowly (Clip-Cov, Cui et al. 2025: 2e-4); they stay in"
            " the denominators. 0 = none."
        ),
    )
    covariance_band: tuple[float, float] = Field(
        (1.0, 5.0), description="Of covariance_clip: lower and upper bound (Cui et al. 1 and 5)."
    )
    covariance_kl: float = Field(
        0.0,
        ge=0,
        lt=1,
        description=(
            "This share of the trained tokens, those of the largest covariance, also pays covariance_kl_coef times |log"
            " pi/pi_old| (KL-Cov, Cui et al. 2025: 2e-4, with surrogate=none); what is below rounding (1e-4 nats, in"
            " bfloat16 1e-2) counts 0. 0 = none."
        ),
    )
    covariance_kl_coef: float = Field(1.0, gt=0, description="Of covariance_kl (Cui et al. 1; verl 0.1).")
    off_policy_mask_threshold: float | None = Field(
        None,
        ge=0,
        title="Off-policy mask threshold",
        description=(
            "Leave completions of negative advantage out of the policy loss whose mean log mu/pi, mu whoever sampled,"
            " is above this [nats per token] (DeepSeek-V3.2; TRL); empty: none."
        ),
    )

    # KL and entropy.
    beta: float | None = Field(None, ge=0, title="Beta", description="KL-in-loss coefficient; 0 loads no reference.")
    kl_estimator: Literal["k2", "k3", "full"] | None = Field(
        None, title="KL estimator", description="KL in the loss: an estimator, or exact over the vocabulary."
    )
    kl_direction: Literal["reverse", "forward"] | None = Field(
        None, title="KL direction", description="Of kl_estimator=full: KL(pi||target) or KL(target||pi)."
    )
    kl_target: Literal["ref", "old"] | None = Field(
        None, title="KL target", description="KL in the loss to the reference, or to the policy that sampled."
    )
    kl_is_weighted: bool = Field(
        False, description="Multiply the KL in the loss by pi/pi_old: reverse-KL gradient for k3 (KL-LOSS)."
    )
    kl_coef: float | None = Field(None, ge=0, title="KL coefficient", description="KL-in-reward coefficient.")
    kl_reward_mode: Literal["token_terminal", "token_broadcast", "sequence_sum", "sequence_mean"] | None = Field(
        None, title="KL reward mode", description="How the KL enters the reward (KL-REWARD)."
    )
    kl_reward_estimator: Literal["k1", "k2", "k3", "full"] = Field(
        "k1",
        description=(
            "Estimator of the KL in the reward; only k1 gives the reverse-KL gradient. full: exact over the vocabulary,"
            " which no sampled token moves: it acts through later tokens only."
        ),
    )
    kl_controller: Literal["fixed", "adaptive_ppo", "adaptive_ziegler"] | None = Field(
        None,
        title="KL controller",
        description="Rule that moves the KL coefficient: that of the loss where there are two.",
    )
    kl_coef_min: float | None = Field(
        None, ge=0, title="Smallest KL coefficient", description="Bound of the controller; empty: none."
    )
    kl_coef_max: float | None = Field(
        None, gt=0, title="Largest KL coefficient", description="Bound of the controller; empty: none."
    )
    target_kl: float | None = Field(
        None,
        gt=0,
        title="Target KL",
        description="Controller's target: nats to the reference in kl_unit, nats per token to the old policy.",
    )
    kl_unit: Literal["sequence_sum", "sequence_mean", "token_mean"] = Field(
        "sequence_sum",
        description=(
            "Unit of target_kl towards the reference: per completion (TRL), the mean over its tokens, or per token of"
            " the batch (KL-CTRL)."
        ),
    )
    k_beta: float = Field(
        0.1,
        gt=0,
        title="Controller gain",
        description=(
            "kl_controller=adaptive_ziegler: a batch moves the coefficient by this share of the KL's relative error,"
            " which counts up to 0.2 (Ziegler 0.1)."
        ),
    )
    kl_horizon: float | None = Field(
        None,
        gt=0,
        title="KL horizon",
        description=(
            "kl_controller=adaptive_ziegler: completions over which the coefficient moves; takes the place of k_beta,"
            " which is then the batch's completions over it (TRL 10000)."
        ),
    )
    monitor_kl: bool = Field(
        False,
        description=(
            "Log the KL to the reference although no coefficient needs it (one more forward of the samples); where the"
            " reference moves (ref_mode), passes over validation prompts also log the KL to the policy that training"
            " started from, kl/start_sequence_sum, which is held for it."
        ),
    )
    allow_double_kl: bool = Field(False, description="Allow a KL in the reward and in the loss at once.")
    ref_mode: Literal["frozen", "ema", "refresh", "previous"] = Field(
        "frozen",
        description=(
            "Reference: frozen; moving average of the policy; mixed with it every ref_sync_steps; the policy that"
            " started the iteration. The KL inside an iteration is to the reference of its start; where"
            " kl_estimator=full reads it at every step, its moves of the iteration are made together at the end,"
            " towards the policy as it is then."
        ),
    )
    ref_sync_steps: int = Field(512, ge=1, description="Optimizer steps between refreshes (TR-DPO 512).")
    ref_sync_alpha: float = Field(
        0.6, gt=0, le=1, description="Policy's share at a refresh (TR-DPO 0.6; 1 = copy, iterative GRPO)."
    )
    ref_decay: float = Field(
        0.995, ge=0, lt=1, description="Share of the old reference kept at every step (ref_mode=ema)."
    )
    entropy_coef: float = Field(0.0, ge=0, description="Entropy bonus (texts 0.01, off).")
    log_entropy: bool = Field(
        True,
        description=(
            "Log the policy's exact entropy (free when entropy_coef > 0): of the tokens that go through the model,"
            " which are a share groups/forwarded_fraction of those trained."
        ),
    )

    # Critic.
    critic_mode: Literal["separate", "shared"] = Field(
        "separate", description="Own network and optimizer, or a head on the policy's trunk."
    )
    critic_init: Literal["auto", "reward_model", "policy"] = Field(
        "auto",
        description=(
            "Separate critic starts from the reward model where one is given, else from the policy with values of 0."
        ),
    )
    critic_learning_rate: float = Field(
        1e-5, gt=0, description="Peak learning rate of the separate critic (InstructGPT 9e-6)."
    )
    critic_target: (
        Literal["lambda_return", "mc_return", "td0", "n_step", "terminal", "bandit", "kl_adjusted_outcome"] | None
    ) = Field(
        None,
        title="Critic target",
        description="What the critic regresses on (CRITIC-LOSS); bandit: one value per prompt.",
    )
    n_steps: int | None = Field(
        None,
        ge=1,
        title="n steps",
        description=(
            "critic_target=n_step: tokens whose rewards are summed before the critic's own value stands for the rest"
            " (A3C 5)."
        ),
    )
    critic_warmup_steps: int | None = Field(
        None,
        ge=0,
        title="Critic warm-up steps",
        description="Critic steps on rollouts of the starting policy before it moves.",
    )
    vf_coef: float = Field(0.5, ge=0, description="Weight of the value loss (shared trunk only).")
    cliprange_value: float | None = Field(
        None, gt=0, title="Value clip range", description="Value clipping (0.2 if on)."
    )
    value_loss_half: bool = Field(False, description="Half the squared error (TRL, verl).")

    # Rewards, lengths, filters.
    truncation_policy: Literal["score", "bootstrap", "zero", "penalty", "mask"] | None = Field(
        None,
        title="Truncation policy",
        description="What a completion without end token earns (TERM); bootstrap needs a critic.",
    )
    missing_eos_penalty: float = Field(
        1.0, ge=0, description="Penalty of a cut completion (truncation_policy=penalty)."
    )
    missing_eos_mode: Literal["replace", "subtract"] = Field(
        "replace", description="The penalty replaces the reward, or lowers it."
    )
    reward_norm: Literal["none", "whiten", "whiten_without_shift", "minmax", "running"] = Field(
        "none",
        description=(
            "Rewards of a rollout batch before KL and advantages (NORM): as they are, mean 0 and std 1, std 1 (TRL"
            " whiten_rewards), [0, 1], or by the mean and std of all so far. The scale changes what a KL coefficient"
            " means."
        ),
    )
    reward_clip: float | None = Field(
        None, gt=0, title="Reward clip", description="Clip rewards to +- this, after reward_norm."
    )
    truncated_in_stats: bool = Field(
        True, description="Rewards of masked completions stay in the group's mean and std (OVERLONG)."
    )
    soft_punish_cache: int | None = Field(
        None,
        ge=0,
        title="Soft punish cache",
        description="The last so many tokens before max_completion_length cost up to 1 (OVERLONG); 0 = off.",
    )
    context_schedule: list[tuple[int, int]] = Field(
        default_factory=list, description="max_completion_length by optimizer step, as [[0, 16384], [180, 32768]]."
    )
    dynamic_sampling: bool | None = Field(
        None,
        title="Dynamic sampling",
        description="Drop groups without signal and sample until the batch is full (DYN-SAMPLING).",
    )
    filter_groups_metric: Literal["acc", "reward_std"] = Field(
        "acc", description="Signal: some but not all correct, or rewards that differ."
    )
    gen_batch_size: int | None = Field(
        None, ge=1, title="Generation batch", description="Prompts per refill round; default prompts_per_step."
    )
    max_num_gen_batches: int = Field(
        10,
        ge=0,
        description="Rounds of prompts before the stage fails; 0 = no limit but that a step draws every prompt once.",
    )
    zero_advantage: Literal["keep", "mask"] = Field(
        "keep", description="Groups without signal count in the denominators, or leave the step."
    )
    reward_override: Literal["none", "random", "inverted", "format_only"] = Field(
        "none",
        description=(
            "Control experiments: random rewards, inverted ones, or the components of kind format alone. Nothing else"
            " of the task counts then: no verdicts, no penalties of long or cut completions. Of stored rollouts too."
        ),
    )
    step_separator: str = Field("\n\n", description="End of a reasoning step (advantage=process, vine).")
    multi_objective_aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = Field(
        "sum_then_normalize",
        description=(
            "Several reward components: their weighted sum is compared within the group, or each is normalised there by"
            " std_ddof and std_eps and then weighted, so that weights do not depend on scales (reward.composite; TRL's"
            " name). normalize_then_sum needs advantage=group_mean and takes the place of its scale_rewards, unless"
            " that is batch: then the sums are divided by their std over the batch (GDPO, TRL)."
        ),
    )
    baseline_value: float = Field(
        0.0,
        description="baseline=constant: the number, on the scale of the rewards behind reward_norm and reward_clip.",
    )
    baseline_decay: float = Field(0.9, ge=0, lt=1, description="Moving-average baseline of reinforce.")
    baseline_samples: int = Field(
        8, ge=1, description="Completions of the starting policy per prompt behind baseline=table and v_star (A*-PO 8)."
    )
    baseline_missing: Literal["error", "batch_mean"] = Field(
        "error",
        description=(
            "baseline=table: prompts that the input baselines lacks are refused, and ones that could not be scored"
            " before training left out; or their baseline is the mean reward of the batch."
        ),
    )
    v_star_beta: float = Field(0.5, gt=0, description="Temperature of V* = beta log mean exp(r/beta) (A*-PO 0.5).")

    # Off-policy data, opponents, pretraining mix, trust region, prompt order.
    importance_correction: Literal["none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] = (
        Field("none", description="Weights for the sampler's log-probs against the trainer's (TIS).")
    )
    engine_sleep: bool = Field(
        False, description="engine=vllm: give its device memory back while training (vLLM sleep mode, level 2)."
    )
    engine_max_mismatch: float = Field(
        1.0,
        ge=0,
        description=(
            "Stop where another engine's log-probs differ from the trainer's by more nats per token on "
            "average; 0 = never."
        ),
    )
    allow_reencoded_ids: bool = Field(
        False,
        description=(
            "Train on the encoding of texts from a server that returns no ids; what was sampled may have been "
            "other ids."
        ),
    )
    importance_clip_max: float = Field(
        2.0,
        gt=0,
        description=(
            "Largest importance weight (TIS; TRL 3.0): larger ones are cut to it (truncate) or become 0 (mask)."
        ),
    )
    importance_clip_min: float = Field(
        0.0,
        ge=0,
        description=(
            "Smallest importance weight: smaller ones are raised to it (truncate) or become 0 (mask); 0 = no bound."
        ),
    )
    importance_normalise: bool = Field(
        False,
        description=(
            "Divide importance weights by their mean over the batch's tokens (token modes) or sequences, so that they"
            " change no step's size (verl)."
        ),
    )
    rejection: Literal["none", "token", "sequence_sum", "sequence_mean", "sequence_max"] = Field(
        "none",
        description=(
            "Throw out tokens, or sequences by the sum, mean or maximum over their tokens, where trainer and sampler"
            " are too far apart (verl rollout_rs, OpenRLHF is_correction_level)."
        ),
    )
    rejection_statistic: Literal["ratio", "k2", "k3", "binary_kl", "tv"] = Field(
        "ratio",
        description=(
            "How far: pi_old/mu (of a sequence the product, geometric mean or largest), an estimator of the KL, or KL"
            " or total variation of this token against all others."
        ),
    )
    rejection_min: float = Field(
        0.0,
        ge=0,
        description="rejection_statistic=ratio: smaller ratios are rejected (verl: 1/rejection_max); 0 = no bound.",
    )
    rejection_max: float = Field(
        2.0,
        gt=0,
        description=(
            "Larger statistics are rejected: ratios (2), or nats or probabilities per token or sequence (1e-3 to 1e-1)."
        ),
    )
    rejection_scope: Literal["drop", "zero"] = Field(
        "drop",
        description=(
            "Rejected tokens leave loss, KL, entropy, whitening and all denominators (verl), or have weight 0 in the"
            " policy loss and count on (OpenRLHF)."
        ),
    )
    async_rollouts: bool = Field(
        False,
        description=(
            "Sample the next batch while this one is trained on, from the weights of its start (ASYNC): one iteration"
            " off-policy, the same result however fast either is. For an engine on devices of its own, or rewards that"
            " take time."
        ),
    )
    replay_window: int = Field(
        3, ge=1, description="Iterations, the current one included, whose rollouts may be replayed."
    )
    replay_fraction: float = Field(
        0.0, ge=0, lt=1, description="Share of each batch that is replayed (0.25 if on); off-policy presets only."
    )
    max_staleness: int = Field(
        0,
        ge=0,
        description=(
            "Optimizer steps a rollout may lag behind; older ones are dropped. 0 = no limit for off-policy presets."
        ),
    )
    opponent: Literal["self", "ema", "mixture"] | None = Field(
        None,
        title="Opponent",
        description=(
            "advantage=win_rate: compare with the group, with samples of the policy's moving average, or of policy x"
            " reference."
        ),
    )
    opponent_decay: float = Field(0.99, ge=0, lt=1, description="Decay of opponent=ema.")
    mixture_coef: float = Field(0.25, ge=0, le=1, description="Weight of the reference in opponent=mixture (TRL 0.5).")
    ptx_coef: float | None = Field(
        None,
        ge=0,
        title="PTX coefficient",
        description="Weight of the pretraining loss (InstructGPT 27.8); needs the input ptx.",
    )
    ptx_batch_ratio: float = Field(
        1.0, gt=0, description="Pretraining rows per RL completion in a step (InstructGPT 8)."
    )
    ptx_agg: Literal["token-mean", "seq-mean-token-sum"] = Field(
        "token-mean", description="Normaliser of the pretraining loss."
    )
    ptx_max_length: int = Field(512, ge=2, description="Tokens per pretraining row.")
    max_kl: float = Field(0.01, gt=0, description="update=trust_region: mean KL(old||new) per step (TRPO).")
    cg_iters: int = Field(10, ge=1, description="Conjugate-gradient steps (TRPO).")
    fisher_fraction: float = Field(
        1.0,
        gt=0,
        le=1,
        description=(
            "Share of a batch's prompts whose Fisher matrix bounds the step (TRPO, appendix C: 0.1); the KL of the step"
            " taken is that of all."
        ),
    )
    cg_damping: float = Field(0.1, ge=0, description="Damping of the Fisher matrix (TRPO).")
    backtrack_coeff: float = Field(0.8, gt=0, lt=1, description="Step shrink of the line search (TRPO).")
    backtrack_iters: int = Field(10, ge=1, description="Line-search tries (TRPO).")
    trust_region_max_parameters: int = Field(
        50_000_000, ge=1, description="TRPO refuses to train more parameters than this; with LoRA the adapter's count."
    )
    curriculum: Literal["none", "easy_to_hard", "cosine", "gaussian", "rerank", "pass_at_k", "self_paced"] = Field(
        "none",
        description=(
            "Prompt order: shuffled; by the rows' difficulty (extra_json.difficulty) sorted or drawn by E2H; by what"
            " the last group could teach; or those admitted whose pass@k is high enough by now (passk_bands), or whose"
            " loss is low enough (self_paced_thresholds)."
        ),
    )
    curriculum_mix: float = Field(
        0.0,
        ge=0,
        le=1,
        description=(
            "curriculum=easy_to_hard: share of the places in the order that a random easier prompt takes, "
            "one that had its turn (CURRICULUM)."
        ),
    )
    rerank_score: Literal["mean_deviation", "std", "confidence"] = Field(
        "mean_deviation",
        description=(
            "curriculum=rerank: what orders the prompts whose rewards differ: mean |r - mean r|, the std of the"
            " rewards, or how little confident the policy's answers are (perplexity)."
        ),
    )
    curriculum_beta: float = Field(1.0, gt=0, description="Speed of curriculum=gaussian.")
    curriculum_sigma: float = Field(0.75, gt=0, description="Width of curriculum=gaussian, in levels.")

    passk_bands: list[float] = Field(
        [0.75, 0.5, 0.25, 0.0],
        min_length=1,
        description=(
            "curriculum=pass_at_k: falling bounds of pass@k under the policy, each for an equal "
            "part of the run (bounds are ours)."
        ),
    )
    self_paced_thresholds: tuple[float, float] = Field(
        (0.5, 1.25),
        description=(
            "curriculum=self_paced: a prompt is in while its share of wrong answers under the policy is below 1/K"
            " (Kumar et al. 2010), which grows from the first number to the second by a constant factor; above 1 is"
            " every prompt (numbers are ours)."
        ),
    )
    passk_k: int = Field(1, ge=1, description="curriculum=pass_at_k: k.")
    passk_samples: int = Field(
        8,
        ge=1,
        description=(
            "curriculum=pass_at_k, self_paced: completions of the starting policy per prompt behind the first"
            " estimates, where no input prompt_stats gives them; later groups of a prompt replace them."
        ),
    )
    difficulty_band: tuple[float, float] | None = Field(
        None,
        title="Difficulty band",
        description=(
            "Train only on prompts whose pass rate under the starting policy lies in [low, high] (DIFF-FILTER, texts"
            " 0.2 to 0.8 of 16 samples): of passk_samples completions (the texts' number is passk_samples=16), or of"
            " the input prompt_stats."
        ),
    )
    no_resampling_pass_rate: float | None = Field(
        None,
        ge=0,
        lt=1,
        title="No resampling above",
        description=(
            "A prompt is not sampled again once a group of its completions was right more often than this; when all"
            " are, they come again."
        ),
    )
    vine_samples: int = Field(
        9,
        ge=1,
        description=(
            "advantage=vine: continuations from every step border (VinePPO 9); steps end at step_separator, in an"
            " environment with turns."
        ),
    )

    # Members of a group (GRAPE-GEN).
    mode_mix: Literal["fresh", "share", "probability"] = Field(
        "fresh",
        description=(
            "From the second visit of a prompt on, answers that improve an earlier one by its critique: none, a fixed"
            " share of each group (rounded down), or each with a probability. Needs a reward of kind rubric."
        ),
    )
    improve_share: float = Field(0.25, ge=0, le=1, description="That share or probability (0.25 is ours).")
    prior_choice: Literal["best", "random", "worst"] = Field(
        "best",
        description="Which earlier answer is improved: the best-scored so far, the worst, or any of the last visit.",
    )
    conditioning: Literal["plain", "sampling"] = Field(
        "plain",
        description=(
            "What log-probs of ratio and KL are conditioned on where an answer was sampled behind a generation prompt"
            " or from an earlier answer: the plain question (prompt distillation), or what it was sampled from. Both"
            " log-probs are stored."
        ),
    )
    sft_member: Literal["none", "replace", "append"] = Field(
        "none", description="The SFT answer to the prompt (input sft) takes a sample's place in the group, or joins it."
    )
    sft_in_loss: bool = Field(True, description="SFT members are trained on; false: they only enter the group's mean.")

    split: str = Field("train", description="Prompt split to train on.")
    max_prompts: int | None = Field(
        None,
        ge=1,
        title="Max prompts",
        description=(
            "Training prompts used at most, the first ones of the split; with fewer than prompts_per_step a step draws"
            " one several times, a group each (RLVR on 1 to 8 examples)."
        ),
    )
    prompt_template: PromptTemplate = Field("chat", description=PROMPT_TEMPLATE)
    max_prompt_length: int = Field(
        1024,
        ge=1,
        description=(
            "Prompt tokens at most; longer prompts are left out and counted. max_length=N, of prompt and completion"
            " together, bounds it as in the other stages."
        ),
    )
    stop_on: list[AlarmName] = Field(
        default_factory=list,
        description="Alarms that end the stage, its last checkpoint kept, instead of warning only.",
        json_schema_extra={"identity": False},
    )
    eval_every: int = Field(
        0, ge=0, description="Optimizer steps between passes over validation prompts; 0 = only at start and end."
    )
    eval_prompts: int = Field(
        0, ge=0, description="Validation prompts sampled once each; 0 = no validation in this stage."
    )

    # names of other stages that are understood, and are no settings of their own
    ALSO: ClassVar[tuple[str, ...]] = ("batch_size", "max_length")

    @field_validator("scale_rewards", mode="before")
    @classmethod
    def _not_yes_or_no(cls, value):
        said = str(value).lower()
        if said in ("true", "false"):
            raise ValueError(
                f"scale_rewards={said} is another trainer's spelling; write scale_rewards="
                + ("group, by whose std it divides" if said == "true" else "none, which divides by nothing")
                + " (batch: by the std of the whole batch)"
            )
        return value

    @model_validator(mode="before")
    @classmethod
    def _as_in_other_stages(cls, values):
        """batch_size and max_length (ALSO) are said in the settings of rl: prompts_per_step * num_generations =
        batch_size * num_minibatches; max_prompt_length = max_length - max_completion_length.
        """
        if not isinstance(values, dict):
            return values
        values = dict(values)
        number = lambda name: values[name] if isinstance(values.get(name), int) else cls.model_fields[name].default
        rows, length = (values.pop(name, None) for name in cls.ALSO)
        for name, value in zip(cls.ALSO, (rows, length)):
            if value is not None and (type(value) is not int or value < 1):
                raise ValueError(
                    f"{name}={value!r} is no number of {'completions' if name == 'batch_size' else 'tokens'}; write a"
                    " whole number above 0"
                )
        if rows is not None:
            group, steps, sampled = (
                number("num_generations"),
                number("num_minibatches"),
                number("prompts_per_step") * number("num_generations"),
            )
            if "prompts_per_step" not in values:
                if rows * steps % group:
                    raise ValueError(
                        f"batch_size={rows}: prompts have num_generations={group} completions each, so write a multiple"
                        f" of {group}; or give prompts_per_step too"
                    )
                values["prompts_per_step"] = rows * steps // group
            elif sampled % rows or values.get("num_minibatches", sampled // rows) != sampled // rows:
                raise ValueError(
                    f"batch_size={rows}: a rollout batch has prompts_per_step * num_generations = {sampled}"
                    f" completions, in num_minibatches={steps} steps of {sampled / steps:g}; leave batch_size out, or"
                    " give it without num_minibatches as a divisor of the rollout batch"
                )
            else:
                values["num_minibatches"] = sampled // rows
                if rows % group:  # a step has less than whole groups
                    values.setdefault("minibatch_unit", "sequence")
        if length is not None:
            room = length - number("max_completion_length")
            if room < 1:
                raise ValueError(
                    f"max_length={length} leaves no room for a prompt beside"
                    f" max_completion_length={number('max_completion_length')}; write a smaller max_completion_length,"
                    " or leave max_length out"
                )
            values["max_prompt_length"] = min(number("max_prompt_length"), room)
        return values

    def effective(self) -> dict:
        row = row_of(self)
        return {
            "options": dict(row.options),
            **{name: getattr(row, axis) for name, axis in RL_AXES.items() if getattr(self, name) is None},
        }

    @property
    def longest_completion(self) -> int:
        """max_completion_length over the whole run: the constant of seq-mean-token-sum-norm must not move."""
        return max([self.max_completion_length, *(length for _, length in self.context_schedule)])

    def completion_limit(self, step: int) -> int:
        """max_completion_length of completions sampled at an optimizer step (context_schedule)."""
        from stages.policy.schedules import step_function

        return step_function(self.context_schedule, step, self.max_completion_length)


def roles(config, given) -> list[Role]:
    """The models that `run` holds (section F.0): policy, sampling copy, reference, behaviour policy, critic, opponent,
    and those that give rewards.
    """
    row, _ = resolve_preset(config)
    found = [Role("policy", "model", trained=True, sharded=True)]
    reference = "reference" if "reference" in given else "model"
    follows = config.ref_mode in ("ema", "refresh")
    if loads_reference(row, config) and not (config.lora_rank and not follows and reference == "model"):
        found.append(Role("reference", reference, moves=follows, sharded=reference_in_shards(row, config)))
    if config.async_rollouts:
        found.append(Role(SAMPLING, "model"))
    if row.kl_loss_coef and row.kl_target == "old" and row.kl_loss_estimator == "full":
        found.append(Role("old policy", "model", moves=True))
    if loads_start(config) and not config.lora_rank:
        found.append(Role("starting policy", "model"))
    if row.advantage == "win_rate" and row.opponent == "ema":
        found.append(Role("opponent", "model", moves=True))
    if row.needs_critic and config.critic_mode == "separate":
        start = (
            "critic"
            if "critic" in given
            else "reward_model"
            if "reward_model" in given and config.critic_init != "policy"
            else "model"
        )
        found.append(Role("critic", start, trained=True, whole=True, sharded=True, headless=True))
    asked = {c.input for c in config.rewards if c.kind == "model"}
    return found + [
        Role(name, name)
        for name in ("reward_model", "gold", "judge", "group_preference")
        if name in given and (name != "reward_model" or name in asked)
    ]


def check(config: Config, given: Collection[str]) -> None:
    """Refuse settings that do not fit together, rewards whose inputs are not there, and inputs that nothing reads.
    Raises ValueError or ConfigError.
    """
    from stages.policy.read_when import RL_INPUTS_READ_WHEN

    row, _ = resolve_preset(config)
    check_inputs(config.rewards, given)
    if "recorded" in given:
        from stages.rollouts.recorded import check_recorded

        check_recorded(config, row, given)
    refuse_unread_inputs(SPEC.name, given, RL_INPUTS_READ_WHEN, row, config, inputs_read(config.rewards, given))
    if row.ptx_coef and "ptx" not in given:
        raise ValueError(
            f"ptx_coef={row.ptx_coef} mixes in pretraining text, which is not there; give the input ptx=REF, or write"
            " ptx_coef=0"
        )
    if config.curriculum == "pass_at_k" and "prompt_stats" not in given and config.passk_k > config.passk_samples:
        raise ValueError(
            f"pass@{config.passk_k} needs as many samples of a prompt; write passk_k <= {config.passk_samples}, or raise"
            " passk_samples."
        )
    rates = reads_verdicts(config, given)
    if rates and all(c.kind in WITHOUT_VERDICT for c in config.rewards):
        raise ValueError(
            f"{rates[0]} goes by which completions are right, which no reward here says; add {{name: verdict, kind:"
            f" verifier, weight: 0}} to rewards, or leave {rates[0]} out"
        )


def reads_verdicts(config: Config, given: Collection[str]) -> list[str]:
    """The settings, as they are written, that go by which completions are right."""
    rates = [f"curriculum={config.curriculum}"] * (config.curriculum in ("pass_at_k", "self_paced"))
    rates += ["no_resampling_pass_rate"] * (config.no_resampling_pass_rate is not None)
    # of a band alone, statistics that are given know it
    return rates + ["difficulty_band"] * (config.difficulty_band is not None and "prompt_stats" not in given)


def loads_start(config: Config) -> bool:
    """Whether validation passes log the KL to the policy that training started from, beside that to a reference that
    moves.
    """
    return config.monitor_kl and config.ref_mode != "frozen" and config.eval_prompts > 0


def reference_in_shards(row, config: Config) -> bool:
    """Whether a sharded run may split the reference too: not where it follows the policy, nor where whole distributions
    of both are read together.
    """
    return (
        config.ref_mode not in ("ema", "refresh")
        and row.kl_loss_estimator != "full"
        and row.opponent != "mixture"
        and not exact_in_reward(row, config)
    )


def loads_reference(row, config: Config) -> bool:
    """Whether a reference model is held; that of ref_mode=previous is in the log-probs of the samples already."""
    return row.opponent == "mixture" or (row.needs_reference or config.monitor_kl) and config.ref_mode != "previous"


def reads_input(config: Config, name: str, given: Collection[str] = ()) -> bool:
    """Whether a run with these settings would read one of its optional inputs beside those that are ``given``."""
    from stages.policy.read_when import RL_INPUTS_READ_WHEN

    row, by_rewards = row_of(config), inputs_read(config.rewards, {name, *given})
    return all(condition(row, config, by_rewards) for names, condition, _ in RL_INPUTS_READ_WHEN if name in names)


SPEC = StageSpec(
    name="rl",
    config=Config,
    gpu=True,
    parallel=True,
    roles=roles,
    check=check,
    inputs={
        "model": InputSpec("model", use="words", doc="Policy to start from."),
        "data": InputSpec("dataset", kinds=("prompts/1",), doc="Prompts, with answers for verifiers."),
        "reward_model": InputSpec(
            "model", required=False, use="scores", doc="Scorer of components with kind=model; the critic's start."
        ),
        "judge": InputSpec(
            "model",
            required=False,
            use="words",
            doc="Causal LM of components with kind=judge, and of a rubric's judged items.",
        ),
        "rubric": InputSpec(
            "dataset",
            kinds=("rubric_items/1",),
            required=False,
            doc="Rubric of the component with kind=rubric: a file or a dataset.",
        ),
        **REWARD_INPUTS,
        "sft": InputSpec(
            "dataset", kinds=("demonstrations/1",), required=False, doc="Answers that join the groups (sft_member)."
        ),
        "reference": InputSpec("model", required=False, use="words", doc="KL reference; default: the starting policy."),
        "critic": InputSpec(
            "model",
            required=False,
            doc=(
                "Model to start the critic from, instead of the reward model: a value or reward model, or a language"
                " model (base, SFT), whose values begin at 0."
            ),
        ),
        "ptx": InputSpec(
            "dataset", kinds=("text/1", "demonstrations/1"), required=False, doc="Pretraining text mixed in (ptx_coef)."
        ),
        "baselines": InputSpec(
            "dataset",
            kinds=("baselines/1",),
            required=False,
            doc="Baseline per prompt (baseline=table, v_star); default: sampled first.",
        ),
        "prompt_stats": InputSpec(
            "dataset",
            kinds=("prompt_stats/1",),
            required=False,
            doc=(
                "Pass rates behind curriculum=pass_at_k, self_paced and difficulty_band, the last of each prompt;"
                " default: sampled first."
            ),
        ),
        "stored": InputSpec(
            "dataset",
            kinds=("rollouts/1",),
            required=False,
            doc="Train on these rollouts instead of sampling (off-policy presets).",
        ),
        "recorded": InputSpec(
            "dataset",
            kinds=("rollouts/1",),
            required=False,
            doc=(
                "The rollouts of a run with these very settings and inputs: it is computed again from them, sampling only"
                " what they do not hold, and everything in them held against what comes out now."
            ),
        ),
    },
    outputs={
        "model": OutputSpec("model", role="policy"),
        "rollouts": OutputSpec("dataset"),
        "trajectories": OutputSpec(
            "dataset",
            required=False,
            doc="trajectories/1: every turn in an environment, with observations, reward and events.",
        ),
        "validation": OutputSpec(
            "dataset", required=False, doc="eval_samples/1: every answer to a validation prompt, pass by pass."
        ),
        "prompt_stats": OutputSpec(
            "dataset", required=False, doc="prompt_stats/1: every group of every iteration, kept or dropped and why."
        ),
        "rubric_scores": OutputSpec(
            "dataset",
            required=False,
            doc="rubric_scores/1: every item of every completion, with critique and reasoning.",
        ),
        "rubric_confidence": OutputSpec(
            "dataset", required=False, doc="rubric_confidence/1: mean confidence per rubric item."
        ),
        "critic": OutputSpec("model", role="value", required=False, doc="The separate critic after training."),
        "baselines": OutputSpec("dataset", required=False, doc="baselines/1 as sampled before training."),
    },
)


def arm_of(values: dict, own: Collection[str]) -> Config:
    """One of several runs that share settings: the config of ``values``, without those that its preset does not read
    and that are not its ``own``.
    """
    config = Config.model_validate(values)
    dead = not_read(config).keys() - set(own)
    return (
        Config.model_validate({name: value for name, value in values.items() if name not in dead}) if dead else config
    )


def run(stage):
    from stages.policy.read_when import RL_READ_OF_INPUTS
    from stages.chat import stage_renderer
    from stages.models import sharding
    from stages.models.adapters import AdapterOff
    from stages.models.modeling import freeze, load_frozen, load_policy, policy_to_train, publish
    from stages.policy.policy_update import PolicyGradient
    from stages.policy.rl_report import rl_report
    from stages.policy.trust_region import TrustRegionTrainer
    from stages.preflight import rl_preflight
    from stages.reward.rewards import build_rewards
    from stages.rollouts.recorded import leaves_validation_out
    from stages.rollouts.source import Rollouts
    from stages.training import Trainer, fit

    config = stage.config
    row, warnings = resolve_preset(config)
    if config.sharding == "full" and row.update == "trust_region":
        raise ConfigError(
            "update=trust_region takes derivatives along a direction, for which weights must be whole; write"
            " sharding=none (several devices share the micro-batches then too), lora_rank=16 where memory is short, or"
            " another preset."
        )
    check(config, stage.inputs)
    refuse_unread_in(stage, RL_READ_OF_INPUTS)
    stage.log(f"{row}")
    for text in warnings:
        stage.warn("rl_settings", text)
    renderer = stage_renderer(stage)
    prompts, held_out = _prompts(stage, renderer)
    rewards = build_rewards(
        config.rewards, stage.inputs, renderer=renderer, device=stage.device, frozen=config.frozen_dtype
    )
    rewards.check([prompt for prompt, _ in prompts + held_out])
    unseen = leaves_validation_out(config, stage.inputs)
    if held_out and unseen:
        stage.log("no validation passes: their answers are in no rollouts, and a service would be asked about new ones")
        held_out = []
    model = policy_to_train(stage)
    reference, apart = _reference(stage, row, renderer, model)
    if row.update == "trust_region":
        _warn_of_learning_rate(stage, row)
    old = (
        freeze(load_policy(stage.path("model"), stage.device))
        if row.kl_loss_coef and row.kl_target == "old" and row.kl_loss_estimator == "full"
        else None
    )
    critic = _critic(stage, row, renderer, model) if row.needs_critic else None
    sampled_here = config.engine == "builtin" or row.opponent == "mixture"  # other engines hold weights of their own
    acting = sharding.Acting(model, sampled_here and (sharding.asked(config) or config.async_rollouts))
    anchor = old if row.kl_target == "old" else reference
    if apart:
        sharding.shard(reference, stage.device)
    start = None
    if loads_start(config):
        start = (
            AdapterOff(model)
            if config.lora_rank
            else load_frozen(stage.path("model"), stage.device, config.frozen_dtype)
        )
    source = Rollouts(
        stage, row, renderer, acting, rewards, prompts, reference=reference, old=old, critic=critic, start=start
    )
    objective = PolicyGradient(
        row,
        config,
        source.kl_loss_coef,
        anchor,
        critic.head if critic is not None and config.critic_mode == "shared" else None,
    )
    trainer = (TrustRegionTrainer if row.update == "trust_region" else Trainer)(
        model, objective, config, source.total_steps, stage.device
    )
    if row.reset_optimizer:
        source.on_new_batch = trainer.optimizer.state.clear
    rl_preflight(stage, trainer, source)
    evaluate = (
        (lambda: source.evaluate(held_out, trainer.step_index) | source.beside_text(trainer)) if held_out else None
    )
    every = 0 if unseen else config.eval_every
    fit(stage, trainer, source, evaluate=evaluate, eval_every=every, again=False, falls=False)
    source.close()
    source.check_scored()
    if critic is not None:
        critic.save(stage, renderer)
    publish(stage, model, renderer.tokenizer)
    summary = {
        "updates_per_generation": source.steps_per_batch,
        "old_logps": "sampler" if source.policy.exact_logps else "trainer",
        "engine": source.policy.engine.name,
        "steps": trainer.step_index,
        "iterations": source.iteration + 1,
        "skipped_steps": trainer.skipped,
        **{f"last/{k}": v for k, v in source.metrics.items()},
        **(source.recorded.tell() if source.recorded is not None else {}),
    }
    stage.summary(summary)
    rl_report(stage, f"RL ({config.preset})", summary, renderer.tokenizer.decode)


def _prompts(stage, renderer) -> tuple[list, list]:
    """(prompts that are trained on, validation prompts that are only watched), each with its ids."""
    from stages.generation import prompt_rows
    from stages.training import HOLD_OUT

    config, data = stage.config, stage.dataset("data")

    def rows(split, most):
        return prompt_rows(stage, data, split, renderer, config.max_prompt_length, most, config.prompt_template)

    prompts = rows(config.split, config.max_prompts)
    if not config.eval_prompts:
        return prompts, []
    if "validation" not in data.manifest["splits"]:
        raise ConfigError(
            f"rl: eval_prompts={config.eval_prompts} asks validation prompts and there are none; {HOLD_OUT}, or leave"
            " eval_prompts out"
        )
    return prompts, rows("validation", config.eval_prompts)


def _warn_of_learning_rate(stage, row) -> None:
    """Say so where a learning rate is given, which TRPO's step does not read."""
    config = stage.config
    if config.learning_rate != type(config).model_fields["learning_rate"].default:
        stage.warn(
            "learning_rate_unused",
            f"learning_rate={config.learning_rate} moves nothing: the length of TRPO's step is max_kl={config.max_kl}"
            + (
                f", and its critic learns at critic_learning_rate={config.critic_learning_rate}."
                if row.needs_critic
                else "."
            ),
        )


def _reference(stage, row, renderer, model):
    """(the reference policy or None, whether it is in shards of its own): a frozen model, one that will follow the
    policy, or the policy without its adapter.
    """
    from stages.models import sharding
    from stages.models.adapters import AdapterOff
    from stages.models.modeling import follower, load_frozen

    config = stage.config
    if not loads_reference(row, config):
        if stage.has("reference"):
            stage.warn(
                "reference_unused",
                f"The input reference is not read: {config.preset} has no KL to it. Write beta=0.04 or kl_coef=0.02, or"
                " monitor_kl=true to log the KL, or leave the input out.",
            )
        return None, False
    if stage.has("reference"):
        _same_vocabulary(renderer, stage.path("reference"), "reference")
    follows = config.ref_mode in ("ema", "refresh")
    if config.lora_rank and not follows and not stage.has("reference"):
        return AdapterOff(model), False
    apart = sharding.asked(config) and reference_in_shards(row, config)
    path = stage.path("reference" if stage.has("reference") else "model")
    return (
        follower(path, stage.device, model, config, not stage.has("reference"))
        if follows
        else load_frozen(path, stage.device, config.frozen_dtype, in_shards=apart)
    ), apart


def _critic(stage, row, renderer, model):
    """The value function: from the input critic, else the reward model (critic_init), else the policy."""
    from stages.policy.critics import Critic, is_language_model, why_no_start

    config = stage.config
    start = (
        "critic"
        if stage.has("critic")
        else "reward_model"
        if stage.has("reward_model") and config.critic_init != "policy"
        else "model"
    )
    if start == "model" and config.critic_init == "reward_model":
        raise ValueError(
            "critic_init=reward_model needs the input reward_model; give reward_model=MODEL_REF, or write"
            " critic_init=policy."
        )
    if start == "critic" and config.critic_mode == "separate" and is_language_model(stage.path(start)):
        _same_vocabulary(renderer, stage.path(start), start)
        return Critic(stage, row, stage.path(start), False, model)
    reason = (
        why_no_start(stage.path(start), renderer) if start != "model" and config.critic_mode == "separate" else None
    )
    if reason and (start == "critic" or config.critic_init == "reward_model"):
        raise ValueError(
            f"the critic cannot start from the input {start}: {reason}. Give a scalar reward model on a decoder,"
            + (" a language model, or leave the input out." if start == "critic" else " or write critic_init=policy.")
        )
    if reason:
        stage.warn("critic_start", f"The critic starts from the policy, not from the reward model: {reason}.")
        start = "model"
    return Critic(stage, row, stage.path(start), start != "model", model)


def _same_vocabulary(renderer, path: str, name: str) -> None:
    from stages.chat import load_tokenizer

    if load_tokenizer(path).get_vocab() != renderer.tokenizer.get_vocab():
        raise ValueError(
            f"the input {name} in {path} has another tokenizer than the policy; give a model with the policy's"
            " vocabulary."
        )
