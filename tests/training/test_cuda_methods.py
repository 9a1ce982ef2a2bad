"""Every direct method and objective, and a preset for every value of the axes of RL, takes a step on the second device (tests/second_device.py) in bfloat16: nothing is left on the CPU, CUDA's autocast refuses nothing, and what backward
computes has a deterministic form. A new one is tried without being named here."""

import math
from typing import get_args

import pytest

from stages.algorithms import DIRECT_METHODS, RL_PRESETS
from stages.harness import execute
from stages.reward_model import Config as RewardModel
from stages.rl import Preset
from stages.running import cuda
from tests.reward.conftest import rows  # noqa: F401
from tests.reward.test_stage import CASES as OBJECTIVES
from tests.second_device import DEVICE, second_device
from tests.training.test_align_methods import DATA, preferences  # noqa: F401
from tests.training.test_rl_presets import EXTRA, SMALL, fitting, inputs_of, text  # noqa: F401

ONE = {"max_steps": 1, "batch_size": 4, "max_length": 96, "learning_rate": 1e-3, "compute_dtype": "bfloat16"}
AXES = ("advantage", "surrogate", "needs_critic", "needs_reference")
NEW: dict[tuple, str] = {}  # the first preset that has a value of an axis
for _name in get_args(Preset):
    for _axis in AXES if _name != "trpo" else ():  # no forward-mode gradients on this device
        NEW.setdefault((_axis, getattr(RL_PRESETS[_name], _axis)), _name)
PRESETS = list(dict.fromkeys(NEW.values()))
OTHERS = {"auto": "bt"}  # objectives that are one of the others


def steps(spec, stage, config, inputs, monkeypatch):
    made = spec(stage, config, inputs, "there")
    if "ptx" in inputs:
        made["inputs"]["ptx"]["kind"] = "dataset"
    with second_device(monkeypatch):
        result = execute({**made, "device": DEVICE}, lambda event: None)
        assert not cuda._given_up, "backward has an operation without a deterministic form"
    assert result["summary"] and all(math.isfinite(v) for name, v in result["summary"].items() if isinstance(v, float) and name.endswith("/loss"))


@pytest.mark.parametrize("name", PRESETS)
def test_presets(tiny, data, spec, text, name, monkeypatch):  # noqa: F811
    config = fitting({**SMALL, "max_steps": 1, "preset": name, **EXTRA.get(name, {}), "compute_dtype": "bfloat16"})
    steps(spec, "rl", config, {**inputs_of(name, tiny, data), **({"ptx": text} if name == "ppo_ptx" else {})}, monkeypatch)


@pytest.mark.parametrize("name", [name for name in DIRECT_METHODS if name != "written"])  # needs a loss that somebody wrote
def test_every_direct_method(tiny, preferences, spec, name, monkeypatch):  # noqa: F811
    steps(spec, "align", {**ONE, "method": name}, {"model": tiny["policy"], "data": preferences[DATA[DIRECT_METHODS[name].data]]}, monkeypatch)


@pytest.mark.parametrize("name", [name for name in get_args(RewardModel.model_fields["objective"].annotation) if name not in OTHERS])
def test_every_objective_of_reward_models(tiny, rows, spec, name, monkeypatch):  # noqa: F811
    kind, more = OBJECTIVES[name]
    steps(spec, "reward_model", {**ONE, "objective": name, **more}, {"model": tiny["policy"], "data": rows[kind]}, monkeypatch)
