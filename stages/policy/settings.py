"""The settings of `rl`, theme by theme: what each is, its unit, range and source.

What they ask for together is the row that ``stages.policy.presets`` resolves; what reads each of them is in
``stages.policy.read_when``.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from stages.reward.components import RewardComponent
from stages.settings import (
    PROMPT_TEMPLATE,
    AgentConfig,
    ChatConfig,
    OptimizerConfig,
    PromptTemplate,
    SamplingConfig,
    Schedule,
)

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
    "sdpo",
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
    "nothing_distilled",
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
    "tiers_disagree",
    "over_optimisation",
    "engine_mismatch",
]


class PolicyGradientConfig(OptimizerConfig, SamplingConfig, AgentConfig, ChatConfig):
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
    entropy_coef: float = Field(
        0.0,
        ge=0,
        description="Entropy bonus (texts 0.01, off); with use_adaptive_entropy what the coefficient starts at.",
    )
    use_adaptive_entropy: bool = Field(
        False,
        description=(
            "Every optimizer step raises the coefficient of the entropy bonus by entropy_coef_delta where the entropy is"
            " at most entropy_target, and lowers it where it is above, where no bonus is paid (Skywork-OR1,"
            " arXiv:2505.22312; TRL)."
        ),
    )
    entropy_coef_min: float = Field(0.0, ge=0, description="Smallest coefficient (use_adaptive_entropy).")
    entropy_coef_max: float = Field(1.0, gt=0, description="Largest coefficient (use_adaptive_entropy).")
    entropy_coef_delta: float = Field(
        0.005, gt=0, description="What a step adds to the coefficient, or takes off it (use_adaptive_entropy)."
    )
    entropy_target: float = Field(
        0.2,
        gt=0,
        description="Entropy that is held, nats per token over the tokens of the step (use_adaptive_entropy; TRL 0.2).",
    )
    log_entropy: bool = Field(
        True,
        description=(
            "Log the policy's exact entropy (free when entropy_coef > 0): of the tokens that go through the model,"
            " which are a share groups/forwarded_fraction of those trained."
        ),
    )

    # Self-distillation: the reference reads more than the policy did.
    distillation_weight: float | None = Field(
        None,
        ge=0,
        le=1,
        title="Distillation weight",
        description=(
            "Share w of the loss that is distillation on the policy's own tokens, w * distillation + (1 - w) * policy"
            " loss. The teacher is the reference (ref_mode; with preset=sdpo ema of ref_decay 0.95 unless given), behind"
            " a prompt that also shows a right answer of the same group or what the rewards said of this one"
            " (SDPO)."
        ),
    )
    distillation_mode: Literal["sampled_token", "full_logits"] = Field(
        "sampled_token",
        description=(
            "What is compared with the teacher: the log-prob of the token that was sampled (policy gradient of the"
            " reverse KL; TRL's default), or the whole distributions."
        ),
    )
    distillation_alpha: float = Field(
        1.0,
        ge=0,
        le=1,
        description=(
            "distillation_mode=full_logits: 0 is KL(teacher||policy), 1 KL(policy||teacher), between them their"
            " Jensen-Shannon divergence, whose mixture has this share of the teacher."
        ),
    )
    distillation_is_clip: float | None = Field(
        2.0,
        gt=0,
        title="Largest distillation ratio",
        description=(
            "The distillation of a token is multiplied by its ratio pi/pi_old, at most this, without a gradient; empty:"
            " it is not."
        ),
    )
    use_successful_as_teacher: bool = Field(
        True, description="Show the teacher the first successful answer of the same group, where there is one."
    )
    success_reward_threshold: float | None = Field(
        None,
        title="Success threshold",
        description=(
            "An answer is successful from this reward on (TRL 1.0); empty: where a verifier says that it is right, and"
            " without a verdict from 1.0 on."
        ),
    )
    dont_reprompt_on_self_success: bool = Field(
        True, description="An answer is not shown to the teacher that reads this very answer."
    )
    include_environment_feedback: bool = Field(
        True,
        description=(
            "Show the teacher what was said of this answer: by rewards of kind code (the first failed test), python"
            " (feedback of the dict that it returns) and rubric (critiques), else the row's column privileged_context"
            " (TRL: off)."
        ),
    )
    environment_feedback_only_without_solution: bool = Field(
        False, description="Show that only where no successful answer is shown."
    )
    reprompt_template: str = Field(
        "{prompt}{solution}{feedback}\n\nCorrectly solve the original question.\n",
        description="What the teacher reads in the place of the last question, {prompt}.",
    )
    solution_template: str = Field(
        "\nCorrect solution:\n\n{successful_previous_attempt}\n\n",
        description="{solution} of reprompt_template; nothing where no answer is shown.",
    )
    feedback_template: str = Field(
        "\nThe following is feedback from your unsuccessful earlier attempt:\n\n{feedback_raw}\n\n",
        description="{feedback} of reprompt_template; nothing where there is none.",
    )
    remove_thinking_from_demonstration: bool = Field(
        False, description="Show a successful answer without its thought, <think> to </think>."
    )
    max_reprompt_len: int = Field(
        10240,
        ge=1,
        description=(
            "Tokens of the teacher's prompt at most; where it is longer, or the model has no positions for it and the"
            " answer, this answer is not distilled, and counted."
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

    @property
    def pays_entropy(self) -> bool:
        """Whether the loss may have an entropy bonus."""
        return self.entropy_coef > 0 or self.use_adaptive_entropy
