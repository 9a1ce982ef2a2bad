"""Every stage that computes, on a device that is not the CPU: nothing is left on the other one, and the numbers are
those of the CPU.
"""

import json
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from stages.harness import execute
from tests.reward.conftest import encoder  # noqa: F401
from tests.second_device import DEVICE, REAL, second_device
from tests.training.test_resume import _RL, KINDS, STAGES, STATEFUL, labelled  # noqa: F401

CASES = {
    **{name: (name.split("/")[0].split()[0], config, rows[1], {}) for name, (config, rows) in STAGES.items()},
    # no forward-mode gradients on the pretended device
    **{
        name: ("rl", {**_RL, **config}, "prompts", {})
        for name, config in STATEFUL.items()
        if config["preset"] != "trpo" or REAL
    },
    **{name: (name.split()[0], config, rows, more) for name, (config, rows, more) in KINDS.items()},
}

# bitsandbytes has kernels for real devices only
CASES = {name: case for name, case in CASES.items() if "4 bits" not in name or REAL}

#: How many lines to compare where rounding decides what follows: advantages that are zero but for it.
LINES = {
    "old policy, averaged opponent": 1,
    "adapter on a base kept in bfloat16": 1,
    "adapter on a base kept in 4 bits": 2,
}
#: Shares of rows on one side of zero: of a policy that is its own reference, rounding decides.
SIDES = (
    "accuracies",
    "positive_fraction",
    "zero_fraction",
    "displaced_fraction",
    "both_fell_fraction",
    "importance_clipped",
)


@pytest.mark.skipif(REAL, reason="of the pretended device")
def test_tensors_of_two_devices_do_not_meet(monkeypatch):
    with second_device(monkeypatch):
        there, here = torch.ones(2, 3, device=DEVICE, requires_grad=True), torch.ones(3, 2)
        with pytest.raises(RuntimeError, match="aten::mm: tensors on cuda:0 and on the CPU"):
            there @ here
        with pytest.raises((RuntimeError, TypeError)):
            there.detach().numpy()
        product = (there @ here.to(DEVICE) * torch.tensor(2.0)).sum()
        product.backward()
        assert there.grad.device.type == "cuda" and there.grad.tolist() == [[4.0] * 3] * 2 and product.item() == 24.0
        assert there[torch.tensor([0])].device.type == "cuda" and there.cpu().device.type == "cpu"


@pytest.mark.parametrize("case", CASES)
def test_a_stage_computes_on_another_device(tiny, data, labelled, spec, case, monkeypatch):  # noqa: F811
    stage, config, rows, more = CASES[case]
    inputs = {
        "model": tiny["policy"],
        "data": {**data, **labelled}[rows],
        **{name: tiny[which] for name, which in more.items()},
    }
    config = {**config, **({"max_steps": 3} if stage != "group_preference" else {})}
    for whole_passes in ("num_train_epochs", "publish_epochs"):
        config.pop(whole_passes, None)
    here = execute(spec(stage, config, inputs, "here"), lambda event: None)
    with second_device(monkeypatch):
        there = execute({**spec(stage, config, inputs, "there"), "device": DEVICE}, lambda event: None)
    assert here["summary"].keys() == there["summary"].keys()
    lines = [
        [
            json.loads(line)
            for line in Path(spec.path(name)).with_suffix("").joinpath("metrics.jsonl").read_text().splitlines()
        ]
        for name in ("here", "there")
    ]
    assert len(lines[0]) == len(lines[1]) and lines[0]
    low = config.get("compute_dtype") == "bfloat16"
    for i, (one, other) in enumerate([*zip(*lines)][: LINES.get(case)]):
        near = {"rel": 5e-2, "abs": 2e-3} if i or low else {"rel": 1e-3, "abs": 1e-4}  # Adam makes much of little
        assert one["metrics"].keys() == other["metrics"].keys()
        # how far the sampler's rounding is from the trainer's
        far = {
            key: (value, other["metrics"][key])
            for key, value in one["metrics"].items()
            if not key.endswith(SIDES)
            and not (low and key.startswith("sampling/"))
            and value != pytest.approx(other["metrics"][key], **near, nan_ok=True)
        }
        assert not far, f"step {one.get('step')}"


@pytest.mark.parametrize("more", ({}, {"activation_checkpointing": True}), ids=("plain", "recomputed"))
def test_groups_attend_in_one_call_there(tiny, data, spec, more, monkeypatch):
    """All responses of all groups of a micro-batch, with their prompts' keys copied for them."""
    from stages.models import varlen

    config = {**_RL, "preset": "grpo", "num_generations": 5, "prompts_per_step": 2, "max_steps": 1, **more}
    made, attended = [], varlen.attended
    monkeypatch.setattr(
        varlen, "attended", lambda q, k, v, plan, *how: (made.append(plan), attended(q, k, v, plan, *how))[1]
    )
    found = []
    for name, device in (("here", "cpu"), ("there", DEVICE)):
        given = {**spec("rl", config, {"model": tiny["policy"], "data": data["prompts"]}, name), "device": device}
        with second_device(monkeypatch) if device == DEVICE else nullcontext():
            found.append(execute(given, lambda event: None)["summary"])
        assert bool(made) == (device == DEVICE)
    # two groups of a prompt and 5 responses; what fills the micro-batch up may be one more
    assert {len(plan.queries) for plan in made if plan.copies is not None} <= {1 + 2 * 6, 2 + 2 * 6} and made
    here, there = found
    near = {"rel": 1e-3, "abs": 1e-4}
    assert here.keys() == there.keys() and not {
        key: (value, there[key])
        for key, value in here.items()
        if isinstance(value, float) and value != pytest.approx(there[key], **near)
    }


SHORT = {"max_steps": 2, "batch_size": 6, "max_length": 96, "learning_rate": 1e-3}
ODD = {
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 20,
    "min_p": 0.01,
    "repetition_penalty": 1.2,
    "frequency_penalty": 0.1,
    "stop_strings": ["e e"],
    "bad_words": ["x"],
    "logit_bias": {5: 1.0},
}
READS = {  # stage, settings, inputs: which of the tiny models and datasets
    "evaluate prompts": (
        "evaluate",
        {
            "num_samples": 2,
            "max_completion_length": 6,
            "split": "test",
            "rewards": [{"kind": "verifier"}, {"kind": "model"}],
            "token_shift": True,
        },
        {"model": "policy", "prompts": "prompts", "reward_model": "reward", "reference": "other"},
    ),
    "evaluate pairs by a reward model": (
        "evaluate",
        {"target": "reward_model", "split": "test"},
        {"model": "reward", "pairs": "pairs"},
    ),
    "evaluate pairs by a policy": (
        "evaluate",
        {"target": "policy", "split": "test"},
        {"model": "policy", "pairs": "pairs", "reference": "other"},
    ),
    "rejection, every filter": (
        "rejection",
        {
            "num_generations": 2,
            "max_completion_length": 6,
            "split": "test",
            "allow_empty": True,
            "rewards": [{"kind": "model"}],
            **ODD,
        },
        {"model": "policy", "prompts": "prompts", "reward_model": "reward"},
    ),
    "capture": ("capture", {"top_k": 5, "max_length": 64}, {"model": "policy", "data": "demonstrations"}),
    "sft, model's own code": (
        "sft",
        {**SHORT, "forward": "model", "activation_checkpointing": True},
        {"model": "policy", "data": "demonstrations"},
    ),
    "sft, bfloat16 with checkpoints of activations": (
        "sft",
        {**SHORT, "compute_dtype": "bfloat16", "activation_checkpointing": True},
        {"model": "policy", "data": "demonstrations"},
    ),
    "align, LoRA": ("align", {**SHORT, "lora_rank": 4}, {"model": "policy", "data": "pairs"}),
    "reward_model that also speaks": (
        "reward_model",
        {**SHORT, "lm_loss_weight": 0.1},
        {"model": "policy", "data": "pairs"},
    ),
    "rl, exact KL, reference": (
        "rl",
        {
            **_RL,
            "preset": "grpo",
            "max_steps": 2,
            "beta": 0.1,
            "kl_estimator": "full",
            "kl_target": "ref",
            "eval_prompts": 3,
            "eval_every": 1,
            "monitor_kl": True,
        },
        {"model": "policy", "data": "prompts"},
    ),
    "distill, a teacher in bfloat16": (
        "distill",
        {**SHORT, "direction": "jsd", "compute_dtype": "bfloat16", "frozen_dtype": "bfloat16"},
        {"model": "policy", "teacher": "other", "data": "demonstrations"},
    ),
    "distill, a teacher that reads texts": (
        "distill",
        {**SHORT, "objective": "gold", "method": "on_policy", "max_completion_length": 4, "compute_dtype": "bfloat16"},
        {"model": "policy", "teacher": "other", "data": "demonstrations"},
    ),
    "distill, sampled tokens": (
        "distill",
        {**SHORT, "objective": "iw_opd", "method": "on_policy", "max_completion_length": 4},
        {"model": "policy", "teacher": "other", "data": "demonstrations"},
    ),
    "reward_model of an encoder in bfloat16": (
        "reward_model",
        {**SHORT, "compute_dtype": "bfloat16"},
        {"model": "encoder", "data": "pairs"},
    ),
}


@pytest.mark.parametrize("case", READS)
def test_other_stages_and_ways_compute_there_too(tiny, data, encoder, spec, case, monkeypatch):  # noqa: F811
    stage, config, given = READS[case]
    training = "max_steps" in config or stage == "capture"
    known = {**tiny, **data} if training else {**data, **tiny}
    inputs = {name: {**known, "encoder": encoder}[which] for name, which in given.items()}
    found = []
    for name, device in (("here", "cpu"), ("there", DEVICE)):
        made = {**spec(stage, config, inputs, name), "device": device}
        if "pairs" in made["inputs"]:
            made["inputs"]["pairs"]["kind"] = "dataset"
        with second_device(monkeypatch) if device == DEVICE else nullcontext():
            found.append(execute(made, lambda event: None)["summary"])
    here, there = found
    assert here.keys() == there.keys()
    near = {"rel": 5e-2, "abs": 2e-2 if "bfloat16" in case else 2e-3}
    far = {
        key: (value, there[key])
        for key, value in here.items()
        if isinstance(value, float)
        and not key.endswith(SIDES)
        and value != pytest.approx(there[key], **near, nan_ok=True)
    }
    assert not far


class Killed(Exception):
    pass


@pytest.mark.parametrize("case", ["sft", "grpo", "grpo in bfloat16"])
def test_a_continued_run_ends_with_the_same_bytes_there(tiny, data, spec, case, monkeypatch):
    """Whoever continues has captured no step, holds no storage and has met no shape."""
    monkeypatch.setenv("POSTTRAIN_CHECKPOINT_SECONDS", "0")
    low = {"compute_dtype": "bfloat16", "sampling_dtype": "bfloat16"} if "bfloat16" in case else {}
    stage, config, rows = (
        ("sft", {**SHORT, "max_steps": 5}, "demonstrations")
        if case == "sft"
        else ("rl", {**_RL, "preset": "grpo", "max_steps": 5, "max_completion_length": 24, **low}, "prompts")
    )
    whole, made = (
        {**spec(stage, config, {"model": tiny["policy"], "data": data[rows]}, name), "device": DEVICE}
        for name in ("whole", "killed")
    )
    metrics = Path(made["workdir"], "metrics.jsonl")

    def until(event):
        if metrics.exists() and metrics.read_bytes().count(b"\n") >= 3:
            raise Killed

    with second_device(monkeypatch):
        execute(whole, lambda event: None)
        with pytest.raises(Killed):
            execute(made, until)
        assert execute(made, lambda event: None)["resumed_from"]
    for name in ("out/model/model.safetensors", "metrics.jsonl"):
        assert Path(made["workdir"], name).read_bytes() == Path(whole["workdir"], name).read_bytes(), name


@pytest.mark.parametrize("first", [DEVICE, "cpu"])
@pytest.mark.parametrize(
    "case", ["sft with everything", "align by muon", "adaptive KL, critic, early stop, warm-up", "sampled ahead"]
)
def test_a_checkpoint_is_continued_on_the_other_device(tiny, data, labelled, spec, case, first, monkeypatch):  # noqa: F811
    """Weights, moments, averages and what was sampled, all of them where the stage computes now."""
    monkeypatch.setenv("POSTTRAIN_CHECKPOINT_SECONDS", "0")
    stage, config, rows, _ = CASES[case]
    config = {**config, "max_steps": 5}
    for whole_passes in ("num_train_epochs", "publish_epochs"):
        config.pop(whole_passes, None)
    inputs = {"model": tiny["policy"], "data": {**data, **labelled}[rows]}
    whole = execute(spec(stage, config, inputs, "whole"), lambda event: None)
    made = spec(stage, config, inputs, "moved")
    lines = lambda name: Path(spec.path(name)).with_suffix("").joinpath("metrics.jsonl").read_text().splitlines()

    def until(event):
        path = Path(made["workdir"], "metrics.jsonl")
        # of the first step, before which there may be a validation, there is no checkpoint yet
        if path.exists() and path.read_bytes().count(b"\n") >= 4:
            raise Killed

    other = "cpu" if first == DEVICE else DEVICE
    for device, listen in ((first, until), (other, lambda event: None)):
        with second_device(monkeypatch) if device == DEVICE else nullcontext():
            with pytest.raises(Killed) if listen is until else nullcontext():
                result = execute({**made, "device": device}, listen)
    assert result["resumed_from"]
    assert result["summary"].keys() == whole["summary"].keys() and len(lines("moved")) == len(lines("whole"))
    near = {"rel": 5e-2, "abs": 2e-3}
    far = {
        key: (value, result["summary"][key])
        for key, value in whole["summary"].items()
        if isinstance(value, float)
        and not key.endswith(SIDES)
        and value != pytest.approx(result["summary"][key], **near, nan_ok=True)
    }
    assert not far
