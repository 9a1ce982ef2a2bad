"""Every loss of a direct method, and a stage for every value of what distinguishes direct methods, objectives of reward
models and presets of RL, takes a step on the second device (tests/second_device.py) in bfloat16: nothing is left on the
CPU, CUDA's autocast refuses nothing, and what backward computes has a deterministic form. A new one is tried without
being named here."""

import math
from typing import get_args

import pytest

from stages.algorithms import DIRECT_METHODS, RL_PRESETS
from stages.align import Config as Align
from stages.chat import renderer_for
from stages.direct.direct_alignment import DirectAlignment
from stages.direct.preference_items import Encoder
from stages.harness import execute
from stages.models.modeling import load_policy
from stages.reward_model import Config as RewardModel
from stages.policy.settings import Preset
from stages.running import cuda, randomness
from stages.training import Trainer
from storage.datasets import open_dataset
from tests.reward.conftest import rows  # noqa: F401
from tests.reward.test_stage import CASES as OBJECTIVES
from tests.second_device import DEVICE, REAL, second_device
from tests.training.test_align_methods import DATA, preferences  # noqa: F401
from tests.training.test_rl_presets import EXTRA, SMALL, fitting, inputs_of, text  # noqa: F401

ONE = {"max_steps": 1, "batch_size": 4, "max_length": 96, "learning_rate": 1e-3, "compute_dtype": "bfloat16"}
DIRECT = ("data", "needs_reference", "logp_reduction", "statistic", "positive_gap", "nll_reduction", "nll_coef")


def first_of(table, axes, names):
    """The first name that has a value of an axis, for every value."""
    new: dict[tuple, str] = {}
    for name in names:
        for axis in axes:
            new.setdefault((axis, getattr(table[name], axis)), name)
    return list(dict.fromkeys(new.values()))


METHODS = [name for name in DIRECT_METHODS if name != "written"]  # needs a loss that somebody wrote
#: How an advantage follows from rewards is NumPy's. TRPO: no forward-mode gradients on the pretended device.
PRESETS = first_of(
    RL_PRESETS,
    ("surrogate", "needs_critic", "needs_reference"),
    [name for name in get_args(Preset) if name != "trpo" or REAL],
)
# objectives that are one of the others with a column more, or on other rows
OTHERS = {"auto", "margin", "soft_label", "kwise_pairs", "orm"}


def steps(spec, stage, config, inputs, monkeypatch):
    made = spec(stage, config, inputs, "there")
    if "ptx" in inputs:
        made["inputs"]["ptx"]["kind"] = "dataset"
    with second_device(monkeypatch):
        result = execute({**made, "device": DEVICE}, lambda event: None)
        assert not cuda._given_up, "backward has an operation without a deterministic form"
    assert result["summary"] and all(
        math.isfinite(v) for name, v in result["summary"].items() if isinstance(v, float) and name.endswith("/loss")
    )


@pytest.mark.parametrize("name", PRESETS)
def test_presets(tiny, data, spec, text, name, monkeypatch):  # noqa: F811
    config = fitting({**SMALL, "max_steps": 1, "preset": name, **EXTRA.get(name, {}), "compute_dtype": "bfloat16"})
    steps(
        spec, "rl", config, {**inputs_of(name, tiny, data), **({"ptx": text} if name == "ppo_ptx" else {})}, monkeypatch
    )


@pytest.mark.parametrize("name", first_of(DIRECT_METHODS, DIRECT, METHODS))
def test_direct_methods(tiny, preferences, spec, name, monkeypatch):  # noqa: F811
    steps(
        spec,
        "align",
        {**ONE, "method": name},
        {"model": tiny["policy"], "data": preferences[DATA[DIRECT_METHODS[name].data]]},
        monkeypatch,
    )


def test_every_loss_of_direct_methods(tiny, preferences, monkeypatch):  # noqa: F811
    """One model and one encoding of each kind of rows for all, without the stage around them."""
    policy, renderer, found = load_policy(tiny["policy"]), renderer_for(tiny["policy"]), {}
    with second_device(monkeypatch):
        policy.to(DEVICE)
        for name in METHODS:
            config = Align(method=name, **ONE)
            objective = DirectAlignment(config)
            items = Encoder(renderer, objective.reads, config, lambda *purpose: randomness.rng(0, "align", *purpose))(
                open_dataset(preferences[DATA[objective.method.data]]), "train"
            )
            for item in [*items, *(i.extra["mismatched"] for i in items if "mismatched" in i.extra)]:
                (item.extra["ref"],) = objective.log_probs(policy, [item], DEVICE)
            objective.prepare(policy, items, DEVICE)
            trainer = Trainer(policy, objective, config, 1, DEVICE)
            found[name] = trainer.step(items)["loss"]
        assert not cuda._given_up
    assert len(found) == len(METHODS) and all(map(math.isfinite, found.values()))


@pytest.mark.parametrize(
    "name", [name for name in get_args(RewardModel.model_fields["objective"].annotation) if name not in OTHERS]
)
def test_every_objective_of_reward_models(tiny, rows, spec, name, monkeypatch):  # noqa: F811
    kind, more = OBJECTIVES[name]
    steps(
        spec,
        "reward_model",
        {**ONE, "objective": name, **more},
        {"model": tiny["policy"], "data": rows[kind]},
        monkeypatch,
    )
