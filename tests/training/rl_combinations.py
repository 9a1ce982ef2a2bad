"""Combinations of the rl stage's settings, drawn so that pairs of values come up together, and the runs of one of them.

Axes come from the registry: presets from :data:`stages.policy.settings.Preset`, values of settings with a choice from
their types. Settings that are numbers have their values in :data:`NUMBERS`; a setting that is in no table here is an
error that says so, so that a new one cannot be forgotten.

    python -m tests.training.rl_combinations FOLDER COUNT SEED    # many of them, audited; what is wrong goes to FOLDER/found.txt
"""

from __future__ import annotations

import json
import shutil
import sys
import time
import traceback
from pathlib import Path
from typing import Literal, get_args, get_origin

import numpy as np
from tests.common import written

SPREAD = {
    "name": "spread",
    "kind": "python",
    "source": "def score(completion_ids):\n    return sum(i * i for i in completion_ids) % 7 / 3 - 0.9",
}
EVEN = {
    "name": "even",
    "kind": "python",
    "source": "def score(completion_ids):\n    return sum(completion_ids) % 2 == 0",
}
SOME = {
    "name": "some",
    "kind": "python",
    "source": (
        "def score(completion_ids):\n    return None if sum(completion_ids) % 5 == 0 else len(completion_ids) % 3"
    ),
}
TALKING = {
    "name": "talking",
    "kind": "python",
    "source": (
        "def score(completion_ids):\n    right = sum(completion_ids) % 3 == 0\n"
        "    said = '' if right else f'the sum is {sum(completion_ids)}'\n"
        "    return {'reward': float(right), 'correct': right, 'feedback': said}"
    ),
}
COST = {"name": "cost", "kind": "length_penalty", "length_alpha": 0.05, "weight": 2.0}
CUT = {"name": "cut", "kind": "truncation"}
MODEL = {"name": "model", "kind": "model", "weight": 0.5}
#: A rule that cannot score every answer, a reward model that is sure of some of the others, and a last word.
CASCADE = [
    {**SOME, "source": SOME["source"].replace("% 5 == 0", "% 3"), "tier": "rule"},
    {**MODEL, "tier": "learned", "min_confidence": 0.74, "weight": 1.0},
    {**SPREAD, "tier": "judge"},
    COST,
]
ENVIRONMENT = {
    "environment": "tests.training.environments:Countdown",
    "environment_options": {"turns": 3},
    "max_turn_length": 5,
    "max_completion_length": 90,
    "rewards": [{"kind": "environment"}],
}

BASE = {
    "max_steps": 3,
    "prompts_per_step": 3,
    "num_generations": 3,
    "max_completion_length": 8,
    "learning_rate": 3e-3,
    "rewards": [EVEN, {**SPREAD, "weight": 0.7}],
    "max_grad_norm": 1e6,
}
#: Values of settings that are numbers or lists: those beside the default.
NUMBERS = {
    "std_eps": [1e-6, 0.1],
    "advantage_clip": [0.6],
    "gamma": [0.9],
    "lam": [0.5],
    "lam_alpha": [0.4],
    "lam_critic": [1.0],
    "epsilon": [0.02, 0.1],
    "epsilon_high": [0.28],
    "clip_ratio_c": [3.0],
    "loss_scale_factor": [5.0],
    "top_entropy_quantile": [0.5],
    "covariance_clip": [0.2],
    "covariance_kl": [0.2],
    "off_policy_mask_threshold": [0.01],
    "beta": [0.0, 0.3],
    "kl_coef": [0.0, 0.2],
    "target_kl": [1e-3],
    "k_beta": [0.5],
    "kl_horizon": [50.0],
    "kl_coef_min": [0.05],
    "kl_coef_max": [0.3],
    "ref_sync_steps": [1, 2],
    "ref_sync_alpha": [1.0],
    "ref_decay": [0.5],
    "entropy_coef": [0.05],
    "entropy_coef_min": [0.01],
    "entropy_coef_max": [0.06],
    "entropy_coef_delta": [0.02],
    "entropy_target": [4.6],
    "distillation_weight": [0.5, 1.0],
    "distillation_alpha": [0.0, 0.3],
    "distillation_is_clip": [1.001],
    "success_reward_threshold": [0.3],
    "n_steps": [2],
    "critic_warmup_steps": [1],
    "vf_coef": [0.1],
    "cliprange_value": [0.01],
    "missing_eos_penalty": [0.4],
    "reward_clip": [0.5],
    "soft_punish_cache": [4],
    "gen_batch_size": [2],
    "baseline_value": [0.3],
    "baseline_decay": [0.5],
    "baseline_samples": [2],
    "importance_clip_max": [1.05],
    "importance_clip_min": [0.9],
    "rejection_min": [0.8],
    "rejection_max": [1.2, 0.01],
    "replay_fraction": [0.34],
    "num_iterations": [1, 2],
    "num_minibatches": [2, 3],
    "num_generations": [1, 2, 4],
    "prompts_per_step": [2, 4],
    "temperature": [0.7, 1.4],
    "top_p": [0.8],
    "top_k": [20],
    "min_p": [0.02],
    "stop_strings": [["e"], ["an"]],
    "min_tokens": [2],
    "max_tokens_per_micro_batch": [40],
    "lora_rank": [4],
    "context_schedule": [[[0, 5], [2, 8]]],
    "weight_decay": [0.1],
    "max_grad_norm": [0.05],
    "ema_decay": [0.5],
    "max_staleness": [3],
    "replay_window": [2],
    "fisher_fraction": [0.5],
    "covariance_band": [[0.0, 3.0]],
    "covariance_kl_coef": [0.2],
    "max_completion_length": [6],
    "repetition_penalty": [1.2],
    "no_resampling_pass_rate": [0.6],
    "curriculum_mix": [0.5],
    "difficulty_band": [[0.0, 0.9]],
    "rerank_score": ["std"],
}
#: Values of settings that name a whole setup.
SETUPS = {
    "rewards": [
        [EVEN],
        [SPREAD],
        [EVEN, COST],
        [SPREAD, {**EVEN, "at_least": 0.5, "multiplier_step": 0.3}],
        [SPREAD, {**COST, "from_step": 2}, CUT],
        [SOME, {**EVEN, "weight": 0.0}],
        [MODEL, SPREAD],
        [
            {**SPREAD, "on_missing": "skip"},
            {**SOME, "on_missing": "renormalise"},
            {"kind": "verifier", "name": "right", "weight": 0.0},
        ],
    ],
    "environment": [ENVIRONMENT["environment"]],
}
#: Settings that are left as they are: who computes and where, what is measured beside training, and what has tests of
#: its own (tests/training/test_grape.py, test_resume.py, test_rl_parts.py).
FIXED = {
    *"""preset engine engine_url engine_model engine_api engine_key_variable engine_timeout_s engine_concurrency engine_options engine_sleep engine_max_mismatch allow_reencoded_ids sampling_dtype
    generation_batch forward sharding activation_checkpointing frozen_dtype save_dtype compute_dtype device_memory_gib memory_check router_aux_loss_coef bema select_by early_stopping_patience optimizer momentum
    adam_beta1 adam_beta2 adam_epsilon lr_schedule warmup_ratio warmup_steps decay_ratio decay_type lr_power lr_cycles min_lr_ratio learning_rate critic_learning_rate max_steps max_nonfinite_steps packing
    lora_alpha lora_rslora lora_dora lora_dropout lora_targets lora_exclude lora_modules_to_save chat_template chat_template_digest chat_template_kwargs prompt_template split max_prompts max_prompt_length
    stop_on eval_every eval_prompts log_entropy environment_options environment_digest environment_timeout_s environment_memory_mib environment_network environment_workers max_turns max_turn_length
    observation_role mode_mix improve_share prior_choice conditioning sft_member sft_in_loss early_stop_kl options ptx_coef ptx_batch_ratio ptx_agg ptx_max_length max_kl cg_iters cg_damping
    backtrack_coeff backtrack_iters trust_region_max_parameters opponent_decay mixture_coef vine_samples step_separator curriculum_beta curriculum_sigma passk_bands passk_k passk_samples
    self_paced_thresholds v_star_beta bad_words logit_bias frequency_penalty presence_penalty max_num_gen_batches
    reprompt_template solution_template feedback_template max_reprompt_len""".split()
}
OF_PRESET = {
    "vineppo": {"vine_samples": 2, "step_separator": "e"},
    "grpo_process": {"step_separator": "e"},
    "astar_po": {"options": {"beta": 0.1}, "baseline_samples": 2, "num_generations": 1},
    "sppo": {"options": {"eta": 1.0}},
    "p3o": {"num_generations": 4},
    "copg": {"num_generations": 4},
    "online_ipo": {"options": {"tau": 1.0}, "num_generations": 4},
    "ppo_ptx": {"ptx_coef": 1.0},
    "agent": ENVIRONMENT,
    "grpo_plus": {},
    "a_lol": {"baseline_samples": 2},
    "gspo": {"epsilon": 0.02, "epsilon_high": 0.03},
}


def axes() -> dict[str, list]:
    """Setting -> the values that it is tried with."""
    from stages.rl import Config

    found, forgotten = {}, []
    for name, field in Config.model_fields.items():
        if name in FIXED:
            continue
        kinds = [one for one in (field.annotation, *get_args(field.annotation)) if get_origin(one) is Literal]
        if name in NUMBERS or name in SETUPS:
            found[name] = (NUMBERS | SETUPS)[name]
        elif kinds:
            found[name] = list(get_args(kinds[0]))
        elif bool in (field.annotation, *get_args(field.annotation)):
            found[name] = [True, False]
        else:
            forgotten.append(name)
    assert not forgotten, (
        f"say in tests/training/rl_combinations.py which values {', '.join(forgotten)} of the rl stage is tried with"
        " (NUMBERS), or why not (FIXED)"
    )
    return found


def says_what_to_write(error: Exception) -> bool:
    return any(
        word in str(error) for word in ("write", "leave", "give", "use ", "add ", "set ", "lower", "should be", "take ")
    )


class Covering:
    """Configurations in which pairs of axis values come up that did not before; ``refusals``: what was refused without
    saying what to write.
    """

    def __init__(self, seed: int, size: int = 7):
        self.rng = np.random.default_rng(seed)
        self.size = size
        self.axes = axes()
        self.seen = set()
        self.tried = set()
        self.refusals = []
        from stages.policy.settings import Preset

        self.presets, self.order = list(get_args(Preset)), []

    def valid(self, config) -> bool:
        from stages.rl import Config, resolve_preset

        try:
            resolve_preset(Config(**config))
            return True
        except ValueError as error:
            if not says_what_to_write(error):
                self.refusals.append((config, str(error)))
            return False

    def next(self) -> dict:
        self.order = self.order or list(self.rng.permutation(self.presets))
        preset = str(self.order.pop())
        config = {**BASE, "preset": preset, **OF_PRESET.get(preset, {})}
        from stages.algorithms import RL_PRESETS

        if RL_PRESETS[preset].needs_critic:
            config["critic_learning_rate"] = 1e-2
        chosen = [("preset", preset)]
        for _ in range(8 * self.size):
            if len(chosen) > self.size:
                break
            pool = [
                (name, k) for name, values in self.axes.items() if name not in dict(chosen) for k in range(len(values))
            ]
            best = max(
                (pool[i] for i in self.rng.permutation(len(pool))[:12]),
                key=lambda one: sum(frozenset((one, other)) not in self.tried for other in chosen),
            )
            self.tried |= {frozenset((best, other)) for other in chosen}
            name, value = best[0], self.axes[best[0]][best[1]]
            more = ENVIRONMENT if name == "environment" else {name: value}
            if "environment" in config and name in ("rewards", "stop_strings", "max_completion_length"):
                continue
            for extra in ({}, *PARTNERS.get(name, ())):
                made = {**config, **extra, **more}
                if "critic_learning_rate" in made and not _critic(made):
                    made.pop("critic_learning_rate")
                if self.valid(made):
                    config = made
                    chosen.append(best)
                    break
        self.seen |= {
            frozenset(pair) for i, one in enumerate(chosen) for pair in ((one, other) for other in chosen[:i])
        }
        return config


#: What a setting needs beside itself to be read.
PARTNERS = {
    "kl_controller": [{"target_kl": 1e-3}],
    "k_beta": [{"kl_controller": "adaptive_ziegler", "target_kl": 1e-3}],
    "kl_unit": [{"target_kl": 1e-3}, {"target_kl": 1e-3, "kl_controller": "adaptive_ppo"}],
    "kl_estimator": [{"beta": 0.3}],
    "kl_direction": [{"kl_estimator": "full", "beta": 0.3}],
    "kl_is_weighted": [{"beta": 0.3}],
    "kl_target": [{"beta": 0.3}],
    "ref_mode": [{"beta": 0.3}, {"monitor_kl": True}],
    "ref_sync_alpha": [{"ref_mode": "refresh", "ref_sync_steps": 1, "beta": 0.3}],
    "ref_decay": [{"ref_mode": "ema", "beta": 0.3}],
    **dict.fromkeys(("distillation_mode", "distillation_is_clip"), [{"distillation_weight": 0.5}]),
    "distillation_alpha": [{"distillation_weight": 0.5, "distillation_mode": "full_logits"}],
    **dict.fromkeys(
        ("entropy_coef_min", "entropy_coef_max", "entropy_coef_delta", "entropy_target"),
        [{"use_adaptive_entropy": True, "entropy_coef": 0.02}],
    ),
    "baseline": [{"advantage": "reward_minus_baseline"}, {"advantage": "reward_to_go"}],
    "importance_clip_max": [{"importance_correction": "token_truncate", "top_p": 0.9}],
    "importance_correction": [{"top_p": 0.9}],
    "rejection": [{"top_p": 0.9}],
    "importance_normalise": [{"importance_correction": "sequence_truncate", "top_k": 30}],
    "rejection_scope": [{"rejection": "token", "rejection_max": 1.2, "top_p": 0.8}],
    "rejection_statistic": [{"rejection": "sequence_mean", "rejection_max": 0.01, "top_p": 0.8}],
    "minibatch_unit": [{"num_minibatches": 2}],
    "missing_eos_mode": [{"truncation_policy": "penalty"}],
    "truncated_in_stats": [{"truncation_policy": "mask"}],
    "token_norm_scope": [{"loss_agg_mode": "token-mean"}],
    "seq_denominator": [{"loss_agg_mode": "seq-mean-token-mean"}],
    "kl_reward_mode": [{"kl_coef": 0.2}],
    "kl_reward_estimator": [{"kl_coef": 0.2}],
    "covariance_kl": [{"num_minibatches": 3}],
    "off_policy_mask_threshold": [{"num_iterations": 2}],
    "surrogate": [{"num_iterations": 1, "num_minibatches": 1}],
    "filter_groups_metric": [{"dynamic_sampling": True}],
    "adv_norm_ddof": [{"whiten": True}],
    "loss_scale_factor": [{"loss_agg_mode": "seq-mean-token-sum-norm"}],
    "truncation_policy": [{"advantage": "gae"}],
    "multi_objective_aggregation": [{"advantage": "group_mean"}],
}


def _critic(config) -> bool:
    from stages.rl import Config, row_of

    return (
        row_of(Config(**{k: v for k, v in config.items() if k != "critic_learning_rate"})).needs_critic
        and config.get("critic_mode") != "shared"
    )


class World:
    """The inputs of these runs, and the runs."""

    def __init__(self, tiny: dict, prompts: str, text: str, folder: Path):
        from transformers import AutoTokenizer

        self.tiny, self.prompts, self.text, self.folder, self.count = tiny, prompts, text, Path(folder), 0
        self.tokenizer = AutoTokenizer.from_pretrained(tiny["policy"])

    def inputs(self, config: dict, **more: str) -> dict[str, str]:
        from stages.rl import Config, resolve_preset

        row, c = resolve_preset(Config(**config))[0], Config(**config)
        given = {"model": self.tiny["policy"], "data": self.prompts}
        if (
            (row.advantage == "process" and not c.environment)
            or any(x.kind == "model" for x in c.rewards)
            or (row.needs_critic and c.critic_mode == "separate" and c.critic_init != "policy")
        ):
            given["reward_model"] = self.tiny["reward"]
        if (
            (row.needs_reference or c.monitor_kl or row.opponent == "mixture" or row.distillation_weight)
            and c.ref_mode != "previous"
            and not (c.lora_rank and self.count % 2)
        ):
            given["reference"] = self.tiny["other"]
        if row.ptx_coef:
            given["ptx"] = self.text
        return given | more

    def spec(self, config: dict, name: str, inputs: dict | None = None) -> dict:
        inputs = self.inputs(config) if inputs is None else inputs
        return {
            "stage": "rl",
            "key": f"test-{name}",
            "config": config,
            "seed": 5,
            "device": "cpu",
            "workdir": str(self.folder / name),
            "inputs": {
                k: {
                    "kind": "dataset" if k in ("data", "ptx", "stored", "recorded") else "model",
                    "path": v,
                    "ref": k,
                    "digest": f"digest-{k}",
                }
                for k, v in inputs.items()
            },
        }

    def run(self, config: dict, name: str, inputs: dict, watch):
        """(rollouts, metrics by step) of one run in this process."""
        from stages.harness import execute
        from storage.datasets import open_dataset

        spec = self.spec(config, name, inputs)
        with watch:
            result = execute(spec, lambda event: None)
        metrics = [
            json.loads(line)["metrics"] for line in Path(spec["workdir"], "metrics.jsonl").read_text().splitlines()
        ]
        return list(open_dataset(result["outputs"]["rollouts"]["path"]).iter_rows()), metrics, spec

    def audit(self, config: dict, more: bool = False, **given: str) -> tuple[str, list[str]]:
        """("refused", why) or ("ran", what is wrong): one run computed again; with ``more`` also in smaller
        micro-batches, killed and gone on with, and from its own rollouts. ``given``: further inputs.
        """
        from stages.spec import ConfigError
        from tests.training.rl_audit import Watch, audit

        self.count += 1
        name = f"run-{self.count}"
        inputs = self.inputs(config, **given)
        watch = Watch()
        try:
            rows, metrics, spec = self.run(config, name, inputs, watch)
        except (ConfigError, ValueError, RuntimeError) as error:
            if isinstance(error, (ConfigError,)) or says_what_to_write(error):
                return "refused", (
                    [] if says_what_to_write(error) else [f"refused without a word on what to write: {error}"]
                )
            return "failed", ["".join(traceback.format_exception(error))[-1500:]]
        problems = audit(config, inputs, rows, metrics, watch, self.tokenizer, "stored" in given)
        problems += self.published(config, inputs, spec, watch)
        problems += [
            f"metric {k} of step {i + 1} is {v}"
            for i, m in enumerate(metrics)
            for k, v in m.items()
            if v is not None and not np.isfinite(v)
        ]
        if more:
            problems += self.otherwise(config, name, inputs, rows, metrics, watch) + self.killed(config, name, inputs)
            problems += self.from_rollouts(config, name, inputs)
        shutil.rmtree(self.folder / name, ignore_errors=True)
        return "ran", problems

    def published(self, config, inputs, spec, watch) -> list[str]:
        """The weights that the stage gives out are the last ones, or with ema_decay their average from the start on."""
        from safetensors.torch import load_file

        from tests.training.rl_audit import Model

        rank, decay = config.get("lora_rank", 0), config.get("ema_decay", 0.0)
        plain = Model(inputs["model"], scale=2.0 if rank else 1.0).plain
        # of what is trained: an adapter's factors one by one
        average = {n: watch.policy[0].before[n] for n in watch.policy[0].trained}
        for noted in watch.policy:
            average = {n: decay * w + (1 - decay) * noted.after[n] for n, w in average.items()}
        expected = plain({**watch.policy[-1].after, **average})
        found = load_file(str(Path(spec["workdir"], "out", "model", "model.safetensors")))
        return [
            f"the published {n} is off by {float((w - found[n].double()).abs().max()):.3g}"
            for n, w in expected.items()
            if n in found and float((w - found[n].double()).abs().max()) > 1e-5
        ][:2] + [f"{n} is not published" for n in expected if n not in found][:2]

    def otherwise(self, config, name, inputs, rows, metrics, watch) -> list[str]:
        """The same in other micro-batches: the first step's loss, gradient and curves are the same up to rounding."""
        from tests.training.rl_audit import Watch

        again = Watch()
        _, other, _ = self.run(
            {
                **config,
                "max_tokens_per_micro_batch": 23 if config.get("max_tokens_per_micro_batch") else 50,
                "packing": "best_fit",
            },
            f"{name}-parts",
            inputs,
            again,
        )
        shutil.rmtree(self.folder / f"{name}-parts", ignore_errors=True)
        found = [
            f"in other micro-batches {k} of the first step is {other[0].get(k)} and not {v}"
            for k, v in metrics[0].items()
            if v is not None
            and (
                other[0].get(k) is None
                or not np.isclose(
                    v, other[0][k], rtol=2e-3, atol=2e-4 if config.get("compute_dtype") != "bfloat16" else 0.1
                )
            )
            and not k.startswith("trpo")
        ]
        for key, g in watch.policy[0].grads.items():
            h = again.policy[0].grads.get(key)
            norm = sum(float(x.norm()) ** 2 for x in watch.policy[0].grads.values()) ** 0.5
            if (h is None or float((g - h).norm()) > 1e-3 * norm + 1e-7) and config.get("compute_dtype") != "bfloat16":
                found.append(f"in other micro-batches the gradient of {key} is another")
                break
        return found

    def killed(self, config, name, inputs) -> list[str]:
        """Ended before the third step and gone on with: every byte that is left is the same."""
        import os

        from storage.files import tree_digest
        from tests.training.rl_audit import Watch

        def left(workdir):
            made = Path(workdir)
            return {
                **{p.name: tree_digest(p) for p in (made / "out").iterdir()},
                "metrics": (made / "metrics.jsonl").read_bytes(),
            }

        whole = left(self.folder / name)
        os.environ["POSTTRAIN_CHECKPOINT_SECONDS"] = "0"
        try:
            for die in (2, None):
                try:
                    # the same stage key, so that seeds and identities are the same; a directory of its own
                    spec = {**self.spec(config, name, inputs), "workdir": str(self.folder / f"{name}-killed")}
                    from stages.harness import execute

                    with Watch(die):
                        execute(spec, lambda event: None)
                except Watch.Killed:
                    pass
            found = left(self.folder / f"{name}-killed")
        finally:
            del os.environ["POSTTRAIN_CHECKPOINT_SECONDS"]
            shutil.rmtree(self.folder / f"{name}-killed", ignore_errors=True)
        return [f"killed and gone on with, {k} has other bytes" for k in whole if whole[k] != found.get(k)]

    def from_rollouts(self, config, name, inputs) -> list[str]:
        """Computed again from its own rollouts where they hold all that it read: the same rollouts and weights."""
        from stages.harness import execute
        from stages.rl import Config
        from stages.rollouts.recorded import check_recorded
        from stages.policy.presets import resolve_preset
        from storage.datasets import open_dataset
        from storage.files import tree_digest

        whole = self.folder / name / "out"
        settings = Config(**config)
        try:
            check_recorded(settings, resolve_preset(settings)[0], inputs)
        except ValueError:
            return []
        spec = self.spec(config, name, {**inputs, "recorded": str(whole / "rollouts")})
        spec["workdir"] = str(self.folder / f"{name}-again")
        result = execute(spec, lambda event: None)
        again = Path(spec["workdir"], "out")
        found = [w["text"] for w in result["warnings"] if w["code"] == "recorded_differs"]
        found += [
            f"computed again from its rollouts, {part} has other bytes"
            for part, digest in (("model", tree_digest), ("rollouts", lambda path: open_dataset(path).digest))
            if digest(whole / part) != digest(again / part)
        ]
        shutil.rmtree(spec["workdir"], ignore_errors=True)
        return found


def main(folder: str, count: str, seed: str, more: str = "") -> None:
    import logging
    import warnings

    import torch

    from tests.evaluation.conftest import tiny_policy

    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    home = Path(folder)
    home.mkdir(parents=True, exist_ok=True)
    world = world_in(home, tiny_policy)
    made, tally, started = Covering(int(seed)), {}, time.monotonic()
    with (home / f"found-{seed}.txt").open("w") as out:
        for k in range(int(count)):
            config = made.next()
            try:
                kind, problems = world.audit(config, bool(more) and k % 2 == 0)
            except Exception:
                kind, problems = "crashed", [traceback.format_exc()[-1500:]]
            tally[kind] = tally.get(kind, 0) + 1
            if problems:
                tally["wrong"] = tally.get("wrong", 0) + 1
                short = {name: value for name, value in config.items() if BASE.get(name) != value}
                print(
                    f"## {k} {kind} {json.dumps(short)}\n" + "\n".join(problems[:8]) + f"\n({len(problems)})\n",
                    file=out,
                    flush=True,
                )
        for config, text in made.refusals[:20]:
            print(f"## refusal without advice: {text}\n", file=out)
        print(f"{tally}, {len(made.seen)} pairs in {time.monotonic() - started:.0f} s", file=out)


def world_in(home: Path, tiny_policy) -> World:
    """A :class:`World` of the tests' tiny models and prompts."""
    from stages.reward_models.reward_heads import RewardCard, new_reward_model, save_reward_model
    from storage.datasets import write_dataset
    from storage.schema import complete_row

    paths = {name: str(home / name) for name in ("policy", "other", "reward")}
    if not (home / "reward").exists():
        for seed, name in enumerate(("policy", "other")):
            fast = tiny_policy(paths[name], seed)
        save_reward_model(
            new_reward_model(paths["policy"], seed=3), fast, paths["reward"], RewardCard(bias=0.5, anchor="chosen")
        )
        rows = [
            complete_row(
                "prompts/1",
                {
                    "prompt": [{"role": "user", "content": f"what is {i} plus {i}?"}],
                    "answer": str(2 * i),
                    "answer_type": "integer",
                    "extra_json": f'{{"difficulty":{1 + i % 3}}}',
                },
                dataset="made",
                source="s",
                origin="human",
                split="train",
            )
            for i in range(10)
        ]
        write_dataset(str(home / "prompts"), "prompts", "prompts/1", rows)
        written(
            str(home / "text"),
            "text",
            "text/1",
            [{"text": f"two plus {i} is a sum. " * 3} for i in range(6)],
            dataset="t",
        )
    return World(paths, str(home / "prompts"), str(home / "text"), home)


if __name__ == "__main__":
    main(*sys.argv[1:])
