"""Recipe configurations: presets, `--set` overrides, and errors that say what to write instead."""

from __future__ import annotations

import difflib
import re
import types
import typing
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from stages.spec import ConfigError, explain
from storage.files import read_text

PRESETS = Path(__file__).resolve().parent / "presets"
CONSTITUTION = PRESETS / "constitution.yaml"  # principles for recipes that are given none


# ---------------------------------------------------------------- values


def parse_sets(pairs: Iterable[str]) -> dict[str, Any]:
    """['rl.max_steps=40', 'sft.lora=null'] -> nested values. Values are YAML: numbers, true, null, [a, b], text."""
    values: dict[str, Any] = {}
    for pair in pairs:
        key, sign, text = pair.partition("=")
        if not sign or not key.strip():
            raise ConfigError(f"{pair!r} is no setting: write key=value, for example --set sft.learning_rate=1e-4")
        place = values
        *parents, last = key.strip().split(".")
        for parent in parents:
            place = place.setdefault(parent, {})
            if not isinstance(place, dict):
                raise ConfigError(f"--set {pair!r}: {parent!r} was already given as a plain value")
        place[last] = scalar(text)
    return values


def scalar(text: str) -> Any:
    """A YAML value; unlike YAML 1.1 it also reads 1e-5 as a number."""
    import yaml

    if re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)[eE][+-]?\d+", text.strip()):
        return float(text)
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def load_yaml(path: str | Path) -> dict[str, Any]:
    """The mapping in a YAML (or JSON) file."""
    import yaml

    try:
        values = yaml.safe_load(read_text(path))
    except FileNotFoundError:
        raise ConfigError(f"there is no configuration file {path}") from None
    except IsADirectoryError:
        raise ConfigError(f"{path} is a directory; write the path of a YAML or JSON file") from None
    except (ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: write a mapping of sections, for example 'sft: {{epochs: 2}}'")
    return values


def presets(recipe: str) -> list[str]:
    """Names of the recipe's presets (files flows/presets/RECIPE.NAME.yaml)."""
    return sorted(path.name.split(".")[1] for path in PRESETS.glob(f"{recipe}.*.yaml"))


def load_preset(recipe: str, name: str) -> dict[str, Any]:
    path = PRESETS / f"{recipe}.{name}.yaml"
    if not path.exists():
        raise ConfigError(f"recipe {recipe} has no preset {name!r}; it has: {', '.join(presets(recipe)) or 'none'}")
    values = load_yaml(path)
    below = values.pop("extends", None)  # a preset of the same recipe that this one is laid over
    return values if below is None else merge(load_preset(recipe, below), values)


def merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """`over` laid over `base`, section by section; neither is changed."""
    merged = dict(base)
    for key, value in over.items():
        below = merged.get(key)
        merged[key] = merge(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return merged


# ---------------------------------------------------------------- validation


def build(model: type[BaseModel], values: dict[str, Any]) -> BaseModel:
    """Validate `values`; a ConfigError lists every problem, one per line, with the nearest valid key."""
    unknown = list(_unknown(model, values))
    if unknown:
        raise ConfigError("\n".join(unknown))
    try:
        return model.model_validate(values)
    except ValidationError as error:
        what = getattr(model, "__module__", "config").rpartition(".")[2]
        raise ConfigError(explain(what, model, error, VALUES)) from None


def keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Every dotted key of the configuration."""
    for name, field in model.model_fields.items():
        yield prefix + name
        for section in _sections(field.annotation):
            yield from keys(section, f"{prefix}{name}.")


def field_at(model: type[BaseModel], key: str) -> tuple[Any, str]:
    """(default, description) of a dotted key."""
    *parents, last = key.split(".")
    given = None  # what the model above sets in this section
    for parent in parents:
        given = model.model_fields[parent].default if given is None else getattr(given, parent, None)
        model, given = section(model, parent), given if isinstance(given, BaseModel) else None
    field = model.model_fields[last]
    default = (
        getattr(given, last)
        if hasattr(given, last)
        else "(required)"
        if field.is_required()
        else field.get_default(call_default_factory=True)
    )
    return (
        "(section)" if _sections(field.annotation) and isinstance(default, BaseModel) else default
    ), field.description or ""


def section(model: type[BaseModel], name: str) -> type[BaseModel]:
    """The model of a section, e.g. `sft` -> stages.sft.Config."""
    field = model.model_fields.get(name)
    sections = _sections(field.annotation) if field else []
    if not sections:
        names = [key for key, value in model.model_fields.items() if _sections(value.annotation)]
        raise ConfigError(f"there is no section {name!r}; the sections are: {', '.join(names)}")
    return sections[0]


def _sections(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if typing.get_origin(annotation) in (typing.Union, types.UnionType, typing.Annotated):
        return [found for part in typing.get_args(annotation) for found in _sections(part)]
    return []


def _named(model: type[BaseModel]) -> str:
    """The command of the stage or recipe that these settings are of."""
    from stages.registry import STAGES

    module = model.__module__
    name = next((name for name, its in STAGES.items() if its == module), module.rpartition(".")[2])
    return f"{'run' if module.startswith('flows.') else 'stage'} {name}"


def _unknown(model: type[BaseModel], values: dict[str, Any], prefix: str = "", top: type[BaseModel] | None = None):
    top = top or model
    for name, value in values.items():
        field = model.model_fields.get(name)
        if field is None and name in getattr(model, "ALSO", ()):
            continue
        if field is None:
            typed = isinstance(value, dict) and difflib.get_close_matches(
                str(name),
                [key for key, below in model.model_fields.items() if _sections(below.annotation)],
                n=1,
                cutoff=0.6,
            )
            named = {} if typed else {path: _elsewhere(path, prefix, top) for path in _paths(str(name), value)}
            alike = difflib.get_close_matches(str(name), list(model.model_fields), n=1, cutoff=0.9)
            nested = isinstance(value, dict) and not typed and not alike
            if nested or any(named.values()):
                yield from (
                    f"unknown key {prefix + path!r}; {text or 'nothing here has that name, see --keys'}"
                    for path, text in named.items()
                )
                continue
            path = prefix + str(name)
            near = nearest(path, [key for key in keys(top) if not path.startswith(f"{key}.")])
            yield f"unknown key {prefix + str(name)!r}; " + (
                f"did you mean {near!r}?" if near else f"all keys: `posttrain {_named(top)} --keys`"
            )
            continue
        sections = _sections(field.annotation)
        if isinstance(value, dict) and sections:
            problems = [list(_unknown(option, value, f"{prefix}{name}.", top)) for option in sections]
            yield from min(problems, key=len)


def _paths(name: str, value: Any) -> Iterator[str]:
    """Dotted names of what is set in a section that does not exist here; the name itself where it is none."""
    if not isinstance(value, dict) or not value:
        yield name
        return
    for inner, below in value.items():
        yield from _paths(f"{name}.{inner}", below)


def _elsewhere(path: str, prefix: str, top: type[BaseModel]) -> str | None:
    """Where a setting of another project is found here, by the longest end of its dotted name in ELSEWHERE, or by a
    setting of ours that its last part names; None where neither knows it.
    """
    known, parts = list(keys(top)), path.split(".")
    ends = [".".join(parts[i:]) for i in range(len(parts))]
    word = next((ELSEWHERE[end] for end in ends if end in ELSEWHERE), ends[-1] if len(parts) > 1 else None)
    if word is None:
        return None
    ours, _, why = word.partition(": ")
    if not ours:
        return why
    here = next(
        (key for key in (prefix + ours, *(key for key in known if key.rsplit(".", 1)[-1] == ours)) if key in known),
        None,
    )
    if here is None and ours in ELSEWHERE and ours != path:
        return _elsewhere(ours, prefix, top)  # what takes its place where a stage has no such setting
    return None if here is None else f"here it is {here!r}" + (f" ({why})" if why else "")


#: What settings of TRL, verl, OpenRLHF and open-instruct are called here, as `NAME`, `NAME: remark` or, where there is
#: nothing to set, `: remark`. Only what spelling alone would not find. Of names that say little by themselves, the end
#: of the dotted name.
ELSEWHERE = {
    "gradient_accumulation_steps": (
        "batch_size: the rows of one optimizer step, however many go through the model at a time;"
        " max_tokens_per_micro_batch bounds memory"
    ),
    "micro_batch_size": "max_tokens_per_micro_batch: in tokens; it cannot change the result",
    "max_new_tokens": "max_completion_length",
    "max_tokens": "max_completion_length",
    "response_length": "max_completion_length",
    "max_response_length": "max_completion_length",
    "generate_max_len": "max_completion_length",
    "max_seq_length": "max_length",
    "max_seq_len": "max_length",
    "num_epochs": "num_train_epochs",
    "epochs": "num_train_epochs",
    "total_epochs": "num_train_epochs",
    "num_train_epochs": (
        "max_steps: RL is counted in optimizer steps; an epoch is the number of prompts / prompts_per_step"
    ),
    "steps": "max_steps",
    "total_training_steps": "max_steps",
    "algorithm": "preset",
    "algo": "preset",
    "adv_estimator": "preset",
    "advantage_estimator": "preset",
    "rollout_n": "num_generations",
    "n_samples_per_prompt": "num_generations",
    "n": "num_generations",
    "num_samples_per_prompt": "num_generations",
    "train_batch_size": "prompts_per_step",
    "rollout_batch_size": "prompts_per_step",
    "ppo_epochs": "num_iterations",
    "num_ppo_epochs": "num_iterations",
    "ppo_mini_batch_size": (
        "num_minibatches: into how many steps a batch is cut, train_batch_size / ppo_mini_batch_size"
    ),
    "num_mini_batches": "num_minibatches",
    "cliprange": "epsilon",
    "clip_ratio": "epsilon",
    "eps_clip": "epsilon",
    "clip_ratio_high": "epsilon_high",
    "init_kl_coef": "kl_coef",
    "kl_loss_coef": "beta",
    "entropy_coeff": "entropy_coef",
    "reward_weights": "rewards: every component has its weight",
    # verl
    "optim.lr": "learning_rate",
    "critic.optim.lr": "critic_learning_rate",
    "lr_warmup_steps_ratio": "warmup_ratio",
    "lr_warmup_steps": "warmup_ratio: a share of the steps",
    "grad_clip": "max_grad_norm",
    "clip_ratio_low": "epsilon",
    "use_kl_loss": "beta: above 0",
    "kl_loss_type": "kl_estimator: k3 for low_var_kl, k2 for mse and for names that end in +",
    "use_kl_in_reward": "kl_coef: above 0",
    "kl_penalty": "kl_reward_estimator: k1 for kl",
    "kl_ctrl.type": "kl_controller: fixed, or adaptive_ziegler with kl_horizon and kl_unit=sequence_mean for adaptive",
    "horizon": "kl_horizon",
    "norm_adv_by_std_in_grpo": "scale_rewards: group or none",
    "loss_mode": "surrogate: or a preset, such as gspo, sapo, cispo, gmpo",
    "tau_pos": "options: of surrogate=sapo",
    "tau_neg": "options: of surrogate=sapo",
    "clip_cov_ratio": "covariance_clip",
    "clip_cov_lb": "covariance_band",
    "clip_cov_ub": "covariance_band",
    "kl_cov_ratio": "covariance_kl",
    "ppo_kl_coef": "covariance_kl_coef",
    "filter_groups.enable": "dynamic_sampling",
    "filter_groups.metric": "filter_groups_metric: acc, or reward_std for any reward",
    "filter_groups": "dynamic_sampling",
    "overlong_buffer.len": "soft_punish_cache",
    "overlong_buffer_cfg.len": "soft_punish_cache",
    "overlong_buffer": "soft_punish_cache",
    "overlong_buffer_cfg": "soft_punish_cache",
    "rollout_is": "importance_correction: token_truncate, or token_mask for two bounds; or sequence",
    "rollout_is_threshold": "importance_clip_max",
    "rollout_is_batch_normalize": "importance_normalise",
    "rollout_rs": "rejection",
    "rollout_rs_threshold": "rejection_max: of ratios also rejection_min",
    "critic_warmup": "critic_warmup_steps",
    "test_freq": "eval_every",
    "enable_gradient_checkpointing": "activation_checkpointing",
    "rollout.name": "engine",
    # OpenRLHF
    "advantage.estimator": "preset",
    "init_coef": "kl_coef: beta with use_loss",
    "kl.estimator": "kl_reward_estimator: kl_estimator with use_loss",
    "use_loss": "beta: above 0, and kl_coef=0",
    "unbiased_gradient": "kl_is_weighted",
    "kl.target": "target_kl",
    "kl.horizon": "kl_horizon",
    "eps_clip_low_high": "epsilon: the lower one; epsilon_high the upper",
    "dual_clip": "clip_ratio_c",
    "value_clip": "cliprange_value",
    "lambd": "lam",
    "no_std_norm": "whiten",
    "policy_loss_type": "preset: gspo",
    "is_correction_level": "importance_correction: token_truncate or token_mask; rejection=sequence_mean for seq",
    "is_correction_mode": "importance_correction: token_truncate for clip, token_mask for mask",
    "is_correction_gating": "rejection_statistic",
    "is_correction_threshold": "importance_clip_max: and importance_clip_min; rejection_max for seq",
    "overlong_buffer_len": "soft_punish_cache",
    "stop_properly_penalty_coef": "truncation_policy: penalty with missing_eos_penalty, or zero",
    "dynamic_filtering_enable": "dynamic_sampling",
    "dynamic_filtering": "dynamic_sampling",
    "dynamic_filtering_range": "filter_groups_metric",
    "dynamic_filtering_reward_range": "filter_groups_metric",
    "reward.clip_range": "reward_clip",
    "reward_clip_range": "reward_clip",
    "freezing_steps": "critic_warmup_steps",
    "freezing_actor_steps": "critic_warmup_steps",
    "rollout.batch_size": "prompts_per_step",
    "train.batch_size": "num_minibatches: rollout.batch_size * n_samples_per_prompt / train.batch_size",
    "train.max_epochs": "num_iterations",
    "max_epochs": "num_iterations",
    "num_episodes": "max_steps: an episode is the number of prompts / prompts_per_step",
    "adam.lr": "learning_rate",
    "critic.adam.lr": "critic_learning_rate",
    "actor_learning_rate": "learning_rate",
    "lr_warmup_ratio": "warmup_ratio",
    "max_norm": "max_grad_norm",
    "async_enable": "async_rollouts",
    "async_train": "async_rollouts",
    "remote_url": "rewards: [{kind: remote, url: ...}]",
    "remote_rm_url": "rewards: [{kind: remote, url: ...}]",
    "agent_func_path": "environment",
    "ipo_enable": "method: ipo",
    "nll_loss_coef": "nll_coef",
    "gradient_checkpointing_enable": "activation_checkpointing",
    "eval.steps": "eval_every",
    "lora.rank": "lora_rank",
    "lora.alpha": "lora_alpha",
    "lora.target_modules": "lora_targets",
    "vllm_enable_sleep": "engine_sleep",
    "enable_sleep": "engine_sleep",
    "max_len": "max_length",
    "loss_type": "method",
    "bf16": "compute_dtype: bfloat16",
    "fp16": "compute_dtype: bfloat16",
    "torch_dtype": "compute_dtype",
    "gradient_checkpointing": "activation_checkpointing",
    "lora_r": "lora_rank",
    "r": "lora_rank",
    "use_peft": "lora_rank: 0 trains all weights",
    "load_in_4bit": "frozen_dtype: nf4, beside lora_rank",
    "quantization_config": "frozen_dtype: nf4, beside lora_rank",
    "bnb_4bit_quant_type": "frozen_dtype: nf4",
    "bnb_4bit_use_double_quant": "frozen_dtype: nf4_double",
    "bnb_4bit_compute_dtype": "compute_dtype",
    "load_in_8bit": "frozen_dtype: bfloat16 or nf4",
    "lora_target_modules": "lora_targets",
    "target_modules": "lora_targets",
    "use_vllm": "engine: vllm",
    "vllm_mode": "engine: vllm",
    "vllm_server_base_url": "engine_url",
    "lr_scheduler_type": "lr_schedule",
    "warmup_steps": "warmup_ratio: a share of the steps",
    "eval_steps": "eval_every",
    "metric_for_best_model": "select_by",
    "resume_from_checkpoint": ": a killed stage continues when the same command is given again; leave it out",
    "per_device_train_batch_size": "batch_size: the rows of one optimizer step, over all devices",
    "batch_size": "prompts_per_step",
    "method": "preset",
    "peft_config": "lora_rank: with lora_alpha and lora_targets",
    "rpo_alpha": "nll_coef",
    "vllm_gpu_memory_utilization": "engine_options: {gpu_memory_utilization: 0.5}",
    "mask_truncated_completions": "truncation_policy: mask",
    "label_smoothing": "options: {label_smoothing: 0.1}, of the methods that have it",
    "precompute_ref_log_probs": ": the reference's log-probs are always computed once and kept; leave it out",
    "max_prompt_length": "max_length: of prompt and completion together",
    "assistant_only_loss": "train_on: all_assistant for true, full for false",
    "completion_only_loss": "train_on: all_assistant for true, full for false",
    "generation_batch_size": "prompts_per_step: it, divided by num_generations",
    "steps_per_generation": "num_minibatches",
    "vllm_importance_sampling_mode": "importance_correction",
    "vllm_importance_sampling_clip_max": "importance_clip_max",
    "vllm_importance_sampling_clip_min": "importance_clip_min",
    "vllm_importance_sampling_correction": "importance_correction: such as sequence_mask; none is the default",
    "importance_sampling_level": "ratio_level",
    "delta": "clip_ratio_c",
    "use_bias_correction_kl": "kl_is_weighted",
    "normalize_advantages": "whiten",
    "max_tool_calling_iterations": "max_turns",
    "vllm_importance_sampling_cap": "importance_clip_max",
    "vllm_enable_sleep_mode": "engine_sleep",
    "vllm_server_host": "engine_url: http://HOST:PORT/v1, with engine=server",
    "vllm_server_timeout": "engine_timeout_s",
    "reference_free": "method: reference_free",
    "use_weighting": "method: wpo, with options.aligned=true",
    "cpo_alpha": "nll_coef",
    "pref_loss": "method",
    "preset": "objective",
    "sync_ref_model": "reference_update: tr_soft",
    "reference_update": "ref_mode: refresh",
    "ref_model_mixup_alpha": "reference_alpha",
    "reference_alpha": "ref_sync_alpha",
    "ref_model_sync_steps": "reference_interval",
    "reference_interval": "ref_sync_steps",
    "loss_weights": "loss_weight: of the method, others by also",
    # open-instruct
    "num_unique_prompts_rollout": "prompts_per_step",
    "num_samples_per_prompt_rollout": "num_generations",
    "total_episodes": "max_steps: an episode is one completion; a batch has prompts_per_step * num_generations",
    "clip_lower": "epsilon",
    "clip_higher": "epsilon_high",
    "advantage_normalization_type": "scale_rewards: group for standard, none for centered",
    "active_sampling": "dynamic_sampling",
    "async_steps": "async_rollouts",
    "truncated_importance_sampling_ratio_cap": "importance_clip_max: with importance_correction=token_truncate",
    "apply_verifiable_reward": "rewards: [{kind: verifier}]",
    "verification_reward": "rewards: [{kind: verifier, correct_value: 10}]",
    "apply_r1_style_format_reward": "rewards: [{kind: verifier}, {kind: format, weight: 1}]",
    "non_stop_penalty": "truncation_policy: penalty, with missing_eos_penalty",
    "non_stop_penalty_value": "missing_eos_penalty",
    # of several, and of transformers
    "optim": "optimizer",
    "betas": "adam_beta1: and adam_beta2",
    "eps": "adam_epsilon",
    "clip_grad": "max_grad_norm",
    "lr_scheduler": "lr_schedule",
    "warmup_style": "lr_schedule",
    "lr_scheduler_kwargs": "min_lr_ratio: or lr_power, lr_cycles, decay_type",
    "dtype": "compute_dtype",
    "tf32": "compute_dtype: bfloat16",
    "torch_compile": "forward: compiled",
    "use_torch_compile": "forward: compiled",
    "activation_offloading": "activation_checkpointing",
    "fsdp": "sharding: full, with --devices N",
    "fsdp_config": "sharding: full, with --devices N",
    "deepspeed": "sharding: full, with --devices N",
    "strategy": "sharding: full for fsdp, with --devices N",
    "use_rslora": "lora_rslora",
    "use_dora": "lora_dora",
    "lora_target": "lora_targets",
    "modules_to_save": "lora_modules_to_save",
    "use_bnb_nested_quant": "frozen_dtype: nf4_double",
    "aux_loss_coef": "router_aux_loss_coef",
    "enable_ema": "ema_decay: above 0",
    "ema_beta": "ema_decay",
    "load_best_model_at_end": "select_by: loss, with eval_every=STEPS; it publishes the best validation pass",
    "eval_strategy": "eval_every: in optimizer steps",
    "evaluation_strategy": "eval_every: in optimizer steps",
    "do_eval": "eval_every: in optimizer steps",
    "chat_template_path": "chat_template",
    "chat_template_name": "chat_template",
    "custom_chat_template": "chat_template",
    "tokenizer_chat_template": "chat_template",
    "apply_chat_template_kwargs": "chat_template_kwargs",
    "prompt_length": "max_prompt_length",
    "cutoff_len": "max_length",
    "sequence_len": "max_length",
    "train_on_inputs": "train_on: full for true, all_assistant for false",
    "pretrain_mode": "train_on: full",
    "pretrain_mode_enable": "train_on: full",
    "multiturn": "train_on: all_assistant",
    "margin_loss": "objective: margin",
    "margin_loss_enable": "objective: margin",
    "normalize_enable": "reward_norm: running",
    "normalize_reward": "reward_norm: running",
    "do_sample": "temperature",
    "max_assistant_turns": "max_turns",
    "max_user_turns": "max_turns",
    **dict.fromkeys(
        ("tools", "rollout_func", "environment_factory", "tool_config_path", "multi_turn.enable"), "environment"
    ),
    **dict.fromkeys(
        ("desirable_weight", "undesirable_weight", "discopop_tau", "simpo_gamma"),
        "options: of the methods that have it",
    ),
    **dict.fromkeys(
        ("sapo_temperature_pos", "sapo_temperature_neg"), "options: {tau_pos: 1.0, tau_neg: 1.05}, of preset=sapo"
    ),
    **dict.fromkeys(
        ("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"),
        "options: {k_pos: 2.0, lambda_pos: 3.0, k_neg: 3.0, lambda_neg: 2.0}, of preset=vespo",
    ),
    **dict.fromkeys(
        ("tensor_model_parallel_size", "vllm_tensor_parallel_size"), "engine_options: {tensor_parallel_size: 2}"
    ),
    **dict.fromkeys(("max_model_len", "vllm_max_model_length"), "engine_options: {max_model_len: 4096}"),
    **dict.fromkeys(
        ("gpu_memory_utilization", "max_num_seqs", "max_num_batched_tokens", "enforce_eager", "enable_prefix_caching"),
        "engine_options: of engine=vllm",
    ),
    **dict.fromkeys(
        (
            "reward_funcs",
            "reward_function",
            "custom_reward_function",
            "custom_reward_function.path",
            "custom_reward_function.name",
        ),
        "rewards: [{kind: python, source: my_reward.py, function: NAME}]",
    ),
    **dict.fromkeys(
        (
            "ppo_micro_batch_size",
            "ppo_micro_batch_size_per_gpu",
            "ppo_max_token_len_per_gpu",
            "log_prob_micro_batch_size",
            "log_prob_micro_batch_size_per_gpu",
            "log_prob_max_token_len_per_gpu",
            "forward_micro_batch_size_per_gpu",
            "forward_max_token_len_per_gpu",
            "per_device_eval_batch_size",
            "precompute_ref_batch_size",
            "pack_length",
        ),
        "max_tokens_per_micro_batch: in tokens; it cannot change the result",
    ),
    # what a stage takes as an input, or a setting of the stage that makes its data
    **dict.fromkeys(("model_name_or_path", "model.path", "actor.model_name_or_path"), "model"),
    "model": ": give it as --input model=DIR",
    "model_revision": ": give it behind the id: --input model=OWNER/NAME@REVISION",
    **dict.fromkeys(
        ("ref_model", "ref_model_path", "ref.model_name_or_path"),
        ": give it as --input reference=DIR; without one it is the model that training starts from",
    ),
    **dict.fromkeys(("critic.model.path", "critic.model_name_or_path"), ": give it as --input critic=DIR"),
    **dict.fromkeys(
        ("reward_model_path", "reward_model.model.path", "reward_model.model_path", "reward.model_name_or_path"),
        ": give it as --input reward_model=DIR, with rewards='[{kind: model}]'",
    ),
    **dict.fromkeys(
        ("dataset_name", "data.dataset", "prompt_dataset", "dataset_mixer_list", "train_files"),
        ": give it as --input data=FILE (to a recipe as data.NAME=FILE, see --keys); the stage mix puts several together",
    ),
    **dict.fromkeys(
        ("val_files", "dataset_test_split", "dataset_mixer_eval_list", "eval.dataset"),
        ": held-out rows come with the data: a column split, or files or folders called train and validation",
    ),
    **dict.fromkeys(("val_set_size", "val_size"), "validation_fraction"),
    **dict.fromkeys(("dataset_text_field", "text_field"), "text_column"),
    **dict.fromkeys(("prompt_key", "input_key"), "prompt_column"),
    "chosen_key": "chosen_column",
    "rejected_key": "rejected_column",
    **dict.fromkeys(("response_key", "output_key"), "completion_column"),
    **dict.fromkeys(("ground_truths_key", "label_key"), "answer_column"),
    **dict.fromkeys(("messages_key", "sft_messages_key"), "messages_column"),
    **dict.fromkeys(("max_samples", "max_train_samples"), "limit"),
    **{
        name: f": it is a setting of the stage ingest: posttrain stage ingest --input data=FILE --set {name}=..., whose"
        " dataset is the input here"
        for name in (
            "validation_fraction",
            "text_column",
            "prompt_column",
            "chosen_column",
            "rejected_column",
            "completion_column",
            "answer_column",
            "messages_column",
            "column_map",
            "limit",
        )
    },
    # what there is nothing to set for
    **dict.fromkeys(
        ("packing", "packing_samples", "sample_packing", "eval_packing", "padding_free", "use_remove_padding"),
        ": nothing is padded here, so there is nothing to pack; leave it out",
    ),
    **dict.fromkeys(("pad_token", "pad_to_multiple_of"), ": nothing is padded here; leave it out"),
    "eos_token": ": the stop token is what the chat template ends an answer with; give another chat_template",
    "truncation_mode": ": rows that are longer than max_length are cut at their end and counted; leave it out",
    "disable_dropout": ": there is none, unless lora_dropout is given; leave it out",
    "num_generations_eval": ": held-out prompts are answered once; leave it out",
    "generation_kwargs": ": temperature, top_p, min_tokens, bad_words and the like are settings of their own",
    "trust_remote_code": ": code that comes with a model is not run; leave it out",
    "attn_implementation": ": setting forward says who computes the layers; leave it out",
    **dict.fromkeys(
        ("use_liger_kernel", "use_liger", "cast_lm_head_to_fp32"),
        ": the LM head is computed in parts, in float32; leave it out",
    ),
    **dict.fromkeys(
        ("use_dynamic_bsz", "log_prob_use_dynamic_bsz", "auto_find_batch_size", "dynamic_batch_enable"),
        ": micro-batches go by tokens (max_tokens_per_micro_batch); leave it out",
    ),
    **dict.fromkeys(
        ("use_transformers_paged", "use_transformers_continuous_batching"),
        ": the built-in sampler batches continuously; leave it out",
    ),
    **dict.fromkeys(
        ("save_steps", "save_freq", "save_strategy", "save_total_limit", "checkpoint_state_freq", "resume_mode"),
        ": checkpoints are kept by themselves, and the same command continues; leave it out",
    ),
    **dict.fromkeys(
        ("logging_steps", "logging_strategy", "logging_first_step", "disable_tqdm", "log_level"),
        ": every step is logged; leave it out",
    ),
    **dict.fromkeys(
        ("report_to", "trainer.logger", "with_tracking", "use_wandb", "logging_dir"),
        ": MLflow always has the metrics (POSTTRAIN_MIRROR hands them on); leave it out",
    ),
    **dict.fromkeys(
        ("run_name", "project_name", "experiment_name", "exp_name"),
        ": --name-as NAME is what a stage publishes its outputs under; leave it out",
    ),
    **dict.fromkeys(
        ("output_dir", "default_local_dir"),
        ": outputs are kept below POSTTRAIN_HOME and copied out by `posttrain export`; leave it out",
    ),
    **dict.fromkeys(
        ("push_to_hub", "hub_model_id", "hub_private_repo", "hub_token", "hub_strategy"),
        ": publish with `posttrain export REF --push OWNER/NAME`; leave it out",
    ),
    **dict.fromkeys(
        ("log_completions", "num_completions_to_print", "log_unique_prompts"),
        ": every rollout is kept (`posttrain show`); leave it out",
    ),
    **dict.fromkeys(("seed", "data_seed", "data_loader_seed"), ": give it as --seed N"),
    **dict.fromkeys(
        ("full_determinism", "full_determinism_enable"), ": a seed always gives the same result; leave it out"
    ),
    **dict.fromkeys(
        ("n_gpus_per_node", "num_gpus_per_node", "num_gpus", "local_rank", "ddp_find_unused_parameters", "ddp_timeout"),
        ": --devices N says on how many GPUs; leave it out",
    ),
    **dict.fromkeys(("nnodes", "num_nodes"), ": --nodes N says on how many machines; leave it out"),
    **dict.fromkeys(
        (
            "shuffle_dataset",
            "packing_strategy",
            "activation_checkpointing_kwargs",
            "gradient_checkpointing_kwargs",
            "lora_task_type",
            "do_train",
            "project",
            "remove_unused_columns",
            "dataset_num_proc",
            "dataloader_num_workers",
            "dataloader_drop_last",
            "dataloader_pin_memory",
            "group_by_length",
        ),
        ": leave it out",
    ),
}

#: What values of settings are called here that TRL, verl, OpenRLHF or open-instruct write otherwise, by the last part of
#: the setting's name.
VALUES: dict[str, dict[Any, str]] = {
    "method": {
        "sigmoid": "method=dpo",
        "hinge": "method=hinge_norm",
        "robust": "method=robust_dpo",
        "sigmoid_norm": "method=length_norm",
        "dpo_norm": "method=length_norm",
        "exo": "method=exo_pair",
        "kto_pair": "method=kto",
        "sft": "nll_coef=1 nll_reduction=token-mean beside another method",
    },
    "preset": {
        "gae": "preset=ppo",
        "group_norm": "preset=grpo",
        "bnpo": "preset=grpo loss_agg_mode=token-mean",
        "reinforce_plus_plus": "preset=reinforce_pp",
        "reinforce++": "preset=reinforce_pp",
        "reinforce_baseline": "preset=grpo scale_rewards=none whiten=true",
        "reinforce_plus_plus_baseline": "preset=grpo scale_rewards=none whiten=true",
        "optimal_token_baseline": "preset=otb",
    },
    "optimizer": dict.fromkeys(
        ("adamw_torch", "adamw_torch_fused", "adamw_hf", "paged_adamw_32bit", "adam"), "optimizer=adamw"
    ),
    "compute_dtype": {
        "bf16": "compute_dtype=bfloat16",
        "fp16": "compute_dtype=bfloat16",
        "float16": "compute_dtype=bfloat16",
        "fp32": "compute_dtype=float32",
    },
    "kl_estimator": {"low_var_kl": "kl_estimator=k3", "mse": "kl_estimator=k2"},
    "engine": {"hf": "engine=builtin"},
    "packing": dict.fromkeys((True, False), ": nothing is padded here, so there is nothing to pack; leave it out"),
}


def nearest(word: str, words: list[str]) -> str | None:
    """The valid key closest to `word`: by spelling, else by its last part (learning_rate -> sft.learning_rate), else by
    its initials (lr) or as a part of it (per_device_train_batch_size -> batch_size)."""
    close = difflib.get_close_matches(word, words, n=1, cutoff=0.6)
    if close:
        return close[0]
    last = word.rsplit(".", 1)[-1]
    tails = {known.rsplit(".", 1)[-1]: known for known in reversed(words)}
    tail = difflib.get_close_matches(last, list(tails), n=1, cutoff=0.6)
    short = (
        tail
        or [known for known in reversed(tails) if "".join(part[0] for part in known.split("_") if part) == last]
        or sorted((known for known in tails if "_" in known and known in last), key=len, reverse=True)
    )
    return tails[short[0]] if short else None
