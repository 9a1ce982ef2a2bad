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
        raise ConfigError(explain(getattr(model, "__module__", "config").rpartition(".")[2], model, error)) from None


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
            if any(named.values()):
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


#: What settings of TRL, verl and OpenRLHF are called here, as `NAME`, `NAME: remark` or, where there is nothing to set,
#: `: remark`. Only what spelling alone would not find. Of names that say little by themselves, the end of the dotted
#: name.
ELSEWHERE = {
    "gradient_accumulation_steps": (
        "batch_size: the rows of one optimizer step, however many go through the model at a time;"
        " max_tokens_per_micro_batch bounds memory"
    ),
    "micro_batch_size": "max_tokens_per_micro_batch: in tokens; it cannot change the result",
    "ppo_micro_batch_size_per_gpu": "max_tokens_per_micro_batch: in tokens; it cannot change the result",
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
    "reward_funcs": "rewards",
    "reward_function": "rewards: [{kind: python, source: my_reward.py}]",
    "custom_reward_function": "rewards: [{kind: python, source: my_reward.py}]",
    "reward_weights": "rewards: every component has its weight",
    # verl
    "optim.lr": "learning_rate",
    "critic.optim.lr": "critic_learning_rate",
    "lr_warmup_steps_ratio": "warmup_ratio",
    "lr_warmup_steps": "warmup_ratio: a share of the steps",
    "grad_clip": "max_grad_norm",
    "ppo_max_token_len_per_gpu": "max_tokens_per_micro_batch: it cannot change the result",
    "ppo_micro_batch_size": "max_tokens_per_micro_batch: in tokens; it cannot change the result",
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
    "save_freq": ": checkpoints are kept by themselves; leave it out",
    "enable_gradient_checkpointing": "activation_checkpointing",
    "rollout.name": "engine",
    "custom_reward_function.path": "rewards: [{kind: python, source: my_reward.py}]",
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
    "packing_samples": ": nothing is padded here, so there is nothing to pack; leave it out",
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
    "packing": ": nothing is padded here, so there is nothing to pack; leave it out",
    "padding_free": ": nothing is padded here; leave it out",
    "output_dir": ": outputs are kept below POSTTRAIN_HOME and copied out by `posttrain export`; leave it out",
    "report_to": ": MLflow always has the metrics; leave it out",
    "logging_steps": ": every step is logged; leave it out",
    "save_steps": ": checkpoints are kept by themselves; leave it out",
    "resume_from_checkpoint": ": a killed stage continues when the same command is given again; leave it out",
    "dataset_num_proc": ": leave it out",
    "save_strategy": ": checkpoints are kept by themselves; leave it out",
    "save_total_limit": ": checkpoints are kept by themselves; leave it out",
    "remove_unused_columns": ": leave it out",
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
    "loss_weights": "loss_weight: of the method, others by also",
    "push_to_hub": ": publish with `posttrain export REF --push OWNER/NAME`; leave it out",
    "seed": ": give it as --seed N",
    "log_completions": ": every rollout is kept (`posttrain show`); leave it out",
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
