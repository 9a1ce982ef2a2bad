"""Which settings, inputs and alarms of the rl stage anything reads: the condition on the resolved row, and what to write
where it does not hold.
"""

from __future__ import annotations

from collections.abc import Collection

from stages.algorithms import CLIPPED, GROUP_ADVANTAGES, RLPreset


def _pays_steps(c) -> bool:
    """Whether a reward pays the reasoning steps of a completion."""
    return any(one.step_credit != "none" and one.counts for one in c.rewards)


def _aggregates(r: RLPreset, c) -> bool:
    """Whether any term of the loss is a sum over tokens that the aggregation weighs."""
    return not r.objective or r.unit == "tokens" or r.kl_loss_coef > 0 or c.pays_entropy or r.needs_critic


def _pays_outcomes(r: RLPreset, c) -> bool:
    return r.advantage != "process" or bool(c.environment)


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
        lambda r, c: r.read_baseline == "constant",
        "it is the baseline of baseline=constant; write that (with advantage=reward_minus_baseline)",
    ),
    (
        ("baseline_decay",),
        lambda r, c: r.read_baseline == "moving_average",
        "only baseline=moving_average decays; write that (with advantage=reward_minus_baseline)",
    ),
    (
        ("baseline_samples",),
        lambda r, c: r.read_baseline in ("table", "v_star"),
        "only baseline=table and v_star sample before training; write one of them",
    ),
    (
        ("baseline_missing",),
        lambda r, c: r.read_baseline == "table",
        "only baseline=table looks baselines up and takes another in place of one; write that",
    ),
    (
        ("v_star_beta",),
        lambda r, c: r.read_baseline == "v_star",
        "it is the temperature of baseline=v_star; write that",
    ),
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
    # entropy and distillation
    (
        ("entropy_coef_min", "entropy_coef_max", "entropy_coef_delta", "entropy_target"),
        lambda r, c: c.use_adaptive_entropy,
        "the coefficient of the entropy bonus stays as it is written; write use_adaptive_entropy=true",
    ),
    (
        (
            "distillation_mode",
            "distillation_is_clip",
            "use_successful_as_teacher",
            "include_environment_feedback",
            "reprompt_template",
            "max_reprompt_len",
        ),
        lambda r, c: r.distillation_weight > 0,
        "nothing is distilled; write distillation_weight=0.5, or preset=sdpo",
    ),
    (
        ("distillation_alpha",),
        lambda r, c: r.distillation_weight > 0 and c.distillation_mode == "full_logits",
        "of a sampled token only the reverse KL is known; write distillation_mode=full_logits (with preset=sdpo)",
    ),
    (
        (
            "success_reward_threshold",
            "dont_reprompt_on_self_success",
            "solution_template",
            "remove_thinking_from_demonstration",
        ),
        lambda r, c: r.distillation_weight > 0 and c.use_successful_as_teacher,
        "no successful answer is shown; write use_successful_as_teacher=true (with preset=sdpo)",
    ),
    (
        ("environment_feedback_only_without_solution", "feedback_template"),
        lambda r, c: r.distillation_weight > 0 and c.include_environment_feedback,
        "no feedback is shown; write include_environment_feedback=true (with preset=sdpo)",
    ),
    (
        ("environment_feedback_only_without_solution",),
        lambda r, c: c.use_successful_as_teacher,
        "no successful answer is shown beside it; write use_successful_as_teacher=true",
    ),
    (
        (
            "advantage",
            "baseline",
            "scale_rewards",
            "std_ddof",
            "std_eps",
            "whiten",
            "adv_norm_ddof",
            "advantage_clip",
            "gamma",
            "multi_objective_aggregation",
            "surrogate",
            "ratio_level",
            "epsilon",
            "epsilon_high",
            "clip_ratio_c",
            "top_entropy_quantile",
            "covariance_clip",
            "covariance_kl",
            "off_policy_mask_threshold",
            "importance_correction",
            "zero_advantage",
        ),
        lambda r, c: r.distillation_weight < 1,
        "all of the loss is distillation, which reads no advantages; write distillation_weight=0.5",
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
        lambda r, c: (
            r.needs_reference
            or c.monitor_kl
            or r.distillation_weight > 0
            or (r.opponent == "mixture" and c.ref_mode != "previous")
        ),
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
            and (
                r.advantage in GROUP_ADVANTAGES
                or r.read_baseline in ("moving_average", "batch_mean", "table", "v_star")
            )
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
        lambda r, c, _: r.read_baseline in ("table", "v_star"),
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
        (lambda r, c: c.log_entropy or c.pays_entropy, "the entropy is not measured; write log_entropy=true"),
    ),
    "format_invalid": (
        lambda r, c: any(one.kind == "format" for one in c.rewards),
        "no reward says whether a completion has its form; add {kind: format, weight: 0}",
    ),
    "tiers_disagree": (
        lambda r, c: any(one.audit_fraction > 0 for one in c.rewards),
        "no tier of a cascade is asked about what an earlier one decided; write audit_fraction: 0.05 in the later one",
    ),
    "rubric_low_confidence": (
        lambda r, c: any(one.kind == "rubric" for one in c.rewards),
        "no reward is a rubric; write one of kind: rubric",
    ),
    "dead_groups": (lambda r, c: r.compares, "no completions of a group are compared; write preset=grpo"),
    "nothing_distilled": (
        lambda r, c: r.distillation_weight > 0,
        "nothing is distilled; write preset=sdpo",
    ),
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


def reads_verdicts(config, given: Collection[str]) -> list[str]:
    """The settings, as they are written, that go by which completions are right."""
    rates = [f"curriculum={config.curriculum}"] * (config.curriculum in ("pass_at_k", "self_paced"))
    rates += ["no_resampling_pass_rate"] * (config.no_resampling_pass_rate is not None)
    # of a band alone, statistics that are given know it
    return rates + ["difficulty_band"] * (config.difficulty_band is not None and "prompt_stats" not in given)
