"""kill -9 of a training stage at any step, then the same command: byte-identical weights, metrics and datasets."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stages.harness import execute
from stages.spec import PROJECT_ROOT
from storage.files import tree_digest
from tests.processes import STAGES as DRAWN, UNDRAWN

STAGES = {
    "sft": (
        {"learning_rate": 1e-3, "batch_size": 8, "num_train_epochs": 2, "max_length": 64},
        ("model", "demonstrations"),
    ),
    "sft with everything": (
        {
            "learning_rate": 1e-2,
            "batch_size": 8,
            "num_train_epochs": 3,
            "max_length": 64,
            "lora_rank": 3,
            "ema_decay": 0.7,
            "eval_every": 2,
            "select_by": "loss",
            "publish_epochs": True,
        },
        ("model", "demonstrations"),
    ),
    "sft by sgd": (
        {
            "optimizer": "sgd",
            "momentum": 0.9,
            "learning_rate": 0.1,
            "batch_size": 8,
            "num_train_epochs": 2,
            "max_length": 64,
        },
        ("model", "demonstrations"),
    ),
    "sft by adamw_8bit": (
        {"optimizer": "adamw_8bit", "weight_decay": 0.1, "batch_size": 8, "num_train_epochs": 2, "max_length": 64},
        ("model", "demonstrations"),
    ),
    "sft by adafactor": (
        {"optimizer": "adafactor", "weight_decay": 0.1, "batch_size": 8, "num_train_epochs": 2, "max_length": 64},
        ("model", "demonstrations"),
    ),
    "align by muon": (
        {
            "optimizer": "muon",
            "learning_rate": 1e-3,
            "batch_size": 6,
            "num_train_epochs": 2,
            "max_length": 96,
            "lr_schedule": "cosine_with_restarts",
            "lr_cycles": 2,
        },
        ("model", "pairs"),
    ),
    "reward_model": (
        {"learning_rate": 1e-3, "batch_size": 6, "num_train_epochs": 2, "max_length": 96},
        ("model", "pairs"),
    ),
    "reward_model averaged": (
        {
            "learning_rate": 1e-3,
            "batch_size": 6,
            "num_train_epochs": 2,
            "max_length": 96,
            "bema": {"update_freq": 2, "update_after": 1, "lag": 2.0},
        },
        ("model", "pairs"),
    ),
    "align": ({"learning_rate": 1e-3, "batch_size": 6, "num_train_epochs": 2, "max_length": 96}, ("model", "pairs")),
    "align/bco": (
        {
            "method": "bco",
            "options": {"momentum": 0.7},
            "learning_rate": 1e-3,
            "batch_size": 6,
            "num_train_epochs": 2,
            "max_length": 96,
        },
        ("model", "pairs"),
    ),
    "rl": (
        {
            "learning_rate": 1e-3,
            "preset": "grpo",
            "max_steps": 12,
            "prompts_per_step": 4,
            "num_generations": 4,
            "num_iterations": 2,
            "num_minibatches": 2,
            "max_completion_length": 12,
            "rewards": [{"name": "length", "kind": "length", "max_length": 12, "cache_length": 12}],
        },
        ("model", "prompts"),
    ),
}


# undisturbed in an interpreter of their own, as by hand; the others are forked, as those that are killed
APART = ("align", "rl")


def outputs(workdir: Path) -> dict:
    digests = {p.name: tree_digest(p) for p in (workdir / "out").iterdir()}
    return {
        **digests,
        "metrics": (workdir / "metrics.jsonl").read_bytes(),
        "summary": json.loads((workdir / "result.json").read_text())["summary"],
    }


_RL = {
    "learning_rate": 1e-3,
    "max_steps": 10,
    "prompts_per_step": 4,
    "num_generations": 2,
    "max_completion_length": 8,
    "reward_override": "random",
    "rewards": [{"name": "length", "kind": "length"}],
}
STATEFUL = {  # what each carries over a kill, beside weights and rollouts in hand
    "adaptive KL, critic, early stop, warm-up": {
        "preset": "ppo",
        "truncation_policy": "score",
        "num_iterations": 2,
        "kl_controller": "adaptive_ziegler",
        "target_kl": 1e-3,
        "early_stop_kl": 1e-3,
        "critic_warmup_steps": 2,
        "critic_learning_rate": 1e-2,
    },
    "refill, iterative reference, context": {
        "preset": "grpo",
        "dynamic_sampling": True,
        "filter_groups_metric": "reward_std",
        "gen_batch_size": 2,
        "ref_mode": "refresh",
        "ref_sync_steps": 2,
        "ref_sync_alpha": 1.0,
        "context_schedule": [[0, 5], [4, 8]],
    },
    "replay, moving baseline, validation": {
        "preset": "topr",
        "baseline": "moving_average",
        "replay_fraction": 0.5,
        "curriculum": "rerank",
        "eval_every": 3,
        "eval_prompts": 4,
        "monitor_kl": True,
    },
    "old policy, averaged opponent": {
        "preset": "nash_md",
        "opponent": "ema",
        "surrogate": "none",
        "num_iterations": 2,
        "beta": 0.1,
        "kl_estimator": "full",
        "kl_target": "old",
        "kl_direction": "forward",
    },
    "trust region, baseline table": {
        "preset": "trpo",
        "advantage": "reward_minus_baseline",
        "baseline": "table",
        "baseline_samples": 2,
        "truncation_policy": "score",
        "max_steps": 8,
    },
    "trust region of an adapter": {
        "preset": "trpo",
        "lora_rank": 4,
        "truncation_policy": "score",
        "critic_learning_rate": 1e-2,
        "max_steps": 8,
    },
    "adapter on a base kept in bfloat16": {
        "preset": "grpo",
        "lora_rank": 4,
        "beta": 0.1,
        "learning_rate": 1e-2,
        "num_iterations": 2,
        "frozen_dtype": "bfloat16",
        "save_dtype": "bfloat16",
        "compute_dtype": "bfloat16",
    },
    "adapter on a base kept in 4 bits": {
        "preset": "grpo",
        "lora_rank": 4,
        "beta": 0.1,
        "learning_rate": 1e-2,
        "num_iterations": 2,
        "frozen_dtype": "nf4_double",
    },
    "DoRA": {
        "preset": "grpo",
        "lora_rank": 4,
        "lora_dora": True,
        "lora_exclude": "k_proj",
        "beta": 0.1,
        "learning_rate": 1e-2,
    },
    "adapter, shared critic, reference": {
        "preset": "ppo",
        "lora_rank": 4,
        "critic_mode": "shared",
        "learning_rate": 1e-2,
        "num_iterations": 2,
    },
    "continuations, prompts by pass@k": {
        "preset": "vineppo",
        "vine_samples": 2,
        "step_separator": "e",
        "curriculum": "pass_at_k",
        "passk_bands": [1.0, 0.0],
        "passk_samples": 2,
        "reward_override": "none",
        "rewards": [{"kind": "verifier"}, {"kind": "length", "max_length": 8, "cache_length": 7}],
    },
    "groups in parts": {
        "preset": "ppo",
        "num_generations": 5,
        "max_tokens_per_micro_batch": 60,
        "num_iterations": 2,
        "num_minibatches": 2,
        "critic_learning_rate": 1e-3,
    },
    "sampled ahead": {
        "preset": "grpo",
        "async_rollouts": True,
        "dynamic_sampling": True,
        "filter_groups_metric": "reward_std",
        "num_minibatches": 2,
        "curriculum": "rerank",
        "eval_every": 4,
        "eval_prompts": 4,
    },
    "multipliers of constraints": {
        "preset": "grpo",
        "reward_override": "none",
        "num_iterations": 2,
        "eval_every": 3,
        "eval_prompts": 4,
        "rewards": [
            {"kind": "length_penalty", "length_alpha": 0.1},
            {"kind": "truncation", "at_least": -0.1, "multiplier_step": 0.5},
        ],
    },
    "trajectories sampled ahead": {
        "preset": "agent",
        "async_rollouts": True,
        "environment": "tests.training.environments:Countdown",
        "rewards": [{"kind": "environment"}],
        "reward_override": "none",
        "max_completion_length": 90,
        "max_turn_length": 6,
    },
    "trajectories in an environment": {
        "preset": "agent",
        "environment": "tests.training.environments:Countdown",
        "rewards": [{"kind": "environment"}],
        "reward_override": "none",
        "max_completion_length": 90,
        "max_turn_length": 6,
        "num_minibatches": 2,
        "num_iterations": 2,
    },
}


KINDS = {  # the other stages that train: config, rows, further inputs
    "distill from samples of its own": (
        {
            "method": "on_policy",
            "lmbda": 0.5,
            "direction": "jsd",
            "max_completion_length": 6,
            "learning_rate": 1e-3,
            "batch_size": 6,
            "max_length": 64,
            "num_train_epochs": 2,
        },
        "demonstrations",
        {"teacher": "other"},
    ),
    "distill from a teacher that reads texts": (
        {
            "method": "on_policy",
            "objective": "gold",
            "lmbda": 0.5,
            "max_completion_length": 6,
            "learning_rate": 1e-3,
            "batch_size": 6,
            "max_length": 64,
            "num_train_epochs": 2,
        },
        "demonstrations",
        {"teacher": "other"},
    ),
    "distill from a teacher that follows": (
        {
            "method": "on_policy",
            "lmbda": 1.0,
            "context": "a good answer is: {answer}",
            "teacher_update": "ema",
            "teacher_decay": 0.5,
            "direction": "reverse",
            "max_completion_length": 6,
            "learning_rate": 1e-3,
            "batch_size": 6,
            "max_length": 96,
            "num_train_epochs": 2,
        },
        "demonstrations",
        {},
    ),
    "distill from a teacher in memory": (
        {
            "method": "logit",
            "direction": "forward",
            "learning_rate": 1e-3,
            "batch_size": 6,
            "max_length": 64,
            "num_train_epochs": 2,
            "ema_decay": 0.7,
        },
        "demonstrations",
        {"teacher": "other"},
    ),
    "reward_model of rankings": (
        {
            "objective": "plackett_luce",
            "learning_rate": 1e-3,
            "batch_size": 6,
            "num_train_epochs": 2,
            "max_length": 96,
            "eval_every": 2,
            "select_by": "loss",
        },
        "rankings",
        {},
    ),
    "reward_model of aspects": (
        {
            "objective": "regression",
            "attributes": ["help", "truth"],
            "learning_rate": 1e-3,
            "batch_size": 6,
            "num_train_epochs": 2,
            "max_length": 96,
        },
        "ratings",
        {},
    ),
    "reward_model that compares": (
        {"objective": "pairwise", "learning_rate": 1e-3, "batch_size": 6, "num_train_epochs": 2, "max_length": 96},
        "labelled pairs",
        {},
    ),
    "group_preference": (
        {
            "max_steps": 10,
            "batch_size": 4,
            "hidden_size": 16,
            "num_heads": 2,
            "num_layers": 1,
            "eval_every": 3,
            "eval_repeats": 2,
            "eval_context_sizes": [1, 2],
        },
        "groups",
        {},
    ),
    "reward_model of steps": (
        {"objective": "prm", "learning_rate": 1e-3, "batch_size": 6, "num_train_epochs": 2, "max_length": 96},
        "steps",
        {},
    ),
    "align with a moving reference": (
        {
            "reference_update": "tr_soft",
            "reference_interval": 3,
            "learning_rate": 1e-3,
            "batch_size": 6,
            "num_train_epochs": 2,
            "max_length": 96,
        },
        "pairs",
        {},
    ),
}


@pytest.fixture(scope="module")
def labelled(tmp_path_factory):
    """{name: path} of datasets of labelled steps, rankings, ratings, pairs, and of what six groups think of random
    points.
    """
    import numpy as np

    from storage.datasets import write_dataset
    from storage.schema import complete_row
    from tests.reward.conftest import MAKE

    root, rng = tmp_path_factory.mktemp("resume"), np.random.default_rng(0)
    points = [
        {
            "group": f"g{g}",
            "question": f"q{q}",
            "response": f"{g}.{q}.{a}",
            "embedding": rng.normal(size=4).tolist(),
            "y": float(rng.normal()),
        }
        for g in range(6)
        for q in range(4)
        for a in range(2)
    ]
    contents = {
        "groups": (
            "group_preferences/1",
            [
                complete_row("group_preferences/1", point, dataset="made", source="s", origin="human")
                for point in points
            ],
        )
    }
    for name, made in {
        "steps": "steps",
        "rankings": "rankings",
        "ratings": "ratings",
        "labelled pairs": "pairs",
    }.items():
        kind, make = MAKE[made]
        contents[name] = (
            kind,
            [
                complete_row(
                    kind,
                    make(i),
                    dataset="made",
                    source="s",
                    origin="human",
                    split="validation" if i % 8 == 0 else "train",
                )
                for i in range(42)
            ],
        )
    for name, (kind, rows) in contents.items():
        write_dataset(str(root / name), name.replace(" ", "-"), kind, rows)
    return {name: str(root / name) for name in contents}


@pytest.mark.parametrize("case", [*STAGES, *STATEFUL, *KINDS])
def test_kill9_equals_uninterrupted(tiny, data, labelled, spec, case, forks):
    if "4 bits" in case:
        pytest.importorskip("bitsandbytes", reason="the extra `qlora` is not installed")
    config, rows, more = (
        KINDS[case]
        if case in KINDS
        else (*STAGES[case], {})
        if case in STAGES
        else ({**_RL, **STATEFUL[case]}, ("model", "prompts"), {})
    )
    stage = case.split("/")[0] if case not in STATEFUL else "rl"
    rows = rows if case in KINDS else rows[1]
    inputs = {
        "model": tiny["policy"],
        "data": {**data, **labelled}[rows],
        **{name: tiny[which] for name, which in more.items()},
    }
    stage = stage.split()[0]
    spec(stage, config, inputs, "whole")
    if case in APART:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "POSTTRAIN_CHECKPOINT_SECONDS": "1000"}
        subprocess.run(
            [sys.executable, "-m", "stages", spec.path("whole")],
            cwd=PROJECT_ROOT,
            env=environment,
            check=True,
            capture_output=True,
        )
    else:
        forks.run(spec.path("whole"), target=UNDRAWN, POSTTRAIN_CHECKPOINT_SECONDS="1000")
    killed = spec(stage, config, inputs, "killed")
    metrics = Path(killed["workdir"], "metrics.jsonl")
    for lines in (3, 7):
        forks.start(spec.path("killed"), POSTTRAIN_CHECKPOINT_SECONDS="0").kill_when(
            lambda: metrics.exists() and metrics.read_bytes().count(b"\n") >= lines
        )
    assert not Path(killed["workdir"], "result.json").exists()
    # its charts are drawn where those of the undisturbed run are
    forks.run(spec.path("killed"), target=DRAWN if case in APART else UNDRAWN, POSTTRAIN_CHECKPOINT_SECONDS="0")
    result = json.loads(Path(killed["workdir"], "result.json").read_text())
    assert result["resumed_from"], "the last run did not continue from a checkpoint"
    assert outputs(Path(killed["workdir"])) == outputs(Path(killed["workdir"]).parent / "whole")
    weights = Path(
        killed["workdir"],
        "out",
        "model",
        "group_preference.safetensors" if stage == "group_preference" else "model.safetensors",
    ).read_bytes()
    assert weights != Path(tiny["policy"], "model.safetensors").read_bytes(), (
        "nothing was learned, so nothing was compared"
    )


@pytest.mark.parametrize("case", ["sft with everything", "rl"])
def test_sigterm_ends_after_the_step_with_a_checkpoint_and_the_same_command_goes_on(tiny, data, spec, case, forks):
    """As Kubernetes and Slurm take a node back: no step is done twice, however long ago the last checkpoint was."""
    config, (_, rows) = STAGES[case]
    stage, inputs = case.split()[0], {"model": tiny["policy"], "data": data[rows]}
    one = lambda name: forks.start(spec.path(name), target=UNDRAWN, POSTTRAIN_CHECKPOINT_SECONDS="1000").processes[0]
    start = lambda name: one(name).forked
    for name in ("whole", "preempted"):
        spec(stage, config, inputs, name)
    assert start("whole").wait(timeout=300) == 0
    work = Path(spec.path("preempted")).parent / "preempted"
    process = start("preempted")
    deadline = time.monotonic() + 300
    while (
        time.monotonic() < deadline
        and process.poll() is None
        and (not (work / "metrics.jsonl").exists() or (work / "metrics.jsonl").read_bytes().count(b"\n") < 4)
    ):
        time.sleep(0.002)
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait(timeout=60) == 143
    steps = json.loads((work / "metrics.jsonl").read_text().splitlines()[-1])["step"]
    assert steps >= 3
    assert start("preempted").wait(timeout=300) == 0
    assert json.loads((work / "result.json").read_text())["resumed_from"] == steps
    assert outputs(work) == outputs(work.parent / "whole")


def test_scores_survive_save_and_load(tiny, data, spec):
    """The stage's model, loaded anew, gives the scores bit for bit, calibration included."""
    from stages.chat import load_tokenizer
    from stages.reward_models.reward_heads import load_reward_model, read_card, save_reward_model
    from stages.reward_models.reward_scorers import load_scorer

    result = execute(
        spec("reward_model", STAGES["reward_model"][0], {"model": tiny["policy"], "data": data["pairs"]}, "rm"),
        lambda e: None,
    )
    path = result["outputs"]["model"]["path"]
    rows = [[5, 6, 7], [9] * 20, [11]]
    first = load_scorer(path).score_ids(rows)
    copy = Path(path).parent / "copy"
    save_reward_model(load_reward_model(path), load_tokenizer(path), copy, read_card(path))
    assert load_scorer(str(copy)).score_ids(rows) == first
    assert result["summary"]["calibration_bias"] == pytest.approx(load_scorer(path).bias)
