"""publish_epochs: the model behind every pass over the rows is an output of its own (sft.ckpt_select)."""

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from stages.harness import execute
from stages.spec import ConfigError
from storage.files import tree_digest
from tests.common import silent

SFT = {"batch_size": 8, "learning_rate": 2e-3, "num_train_epochs": 3, "max_length": 64, "publish_epochs": True}
# 42 training rows: six steps an epoch
CASES = {
    "plain": {},
    "averaged adapters": {"lora_rank": 4, "learning_rate": 1e-2, "ema_decay": 0.8},
    "rounded adapters over 4 bits": {"lora_rank": 4, "frozen_dtype": "nf4", "save_dtype": "bfloat16"},
}


def weights(folder):
    return load_file(Path(folder) / "model.safetensors")


def equal(a, b):
    a, b = weights(a), weights(b)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("case", CASES)
def test_each_epoch_is_the_model_of_a_run_that_ends_there(tiny, data, spec, case):
    """Under a constant rate a run of one pass is the beginning of a run of three."""
    inputs = {"model": tiny["policy"], "data": data["demonstrations"]}
    config = {**SFT, "lr_schedule": "constant", "warmup_steps": 0, **CASES[case]}
    found = execute(spec("sft", config, inputs, "three"), silent)
    out = {name: output["path"] for name, output in found["outputs"].items()}
    assert sorted(out) == ["epoch.1", "epoch.2", "epoch.3", "model"]
    assert tree_digest(out["epoch.3"]) == tree_digest(out["model"])
    assert os.path.samefile(f"{out['epoch.3']}/model.safetensors", f"{out['model']}/model.safetensors")
    assert not equal(out["epoch.1"], out["epoch.2"]) and not equal(out["epoch.2"], out["epoch.3"])
    short = execute(spec("sft", {**config, "num_train_epochs": 1, "publish_epochs": False}, inputs, "one"), silent)
    assert list(short["outputs"]) == ["model"]
    assert tree_digest(short["outputs"]["model"]["path"]) == tree_digest(out["epoch.1"])
    plain = execute(spec("sft", {**config, "publish_epochs": False}, inputs, "plain"), silent)
    assert tree_digest(plain["outputs"]["model"]["path"]) == tree_digest(out["model"])
    assert found["summary"] == plain["summary"]


def test_only_the_model_that_the_stage_is_for_is_a_candidate(tiny, data, tmp_path, monkeypatch):
    """The epochs before it are versions of names of their own, which make room without --unalias."""
    from flows.remove import remove
    from storage import registry, store
    from tasks.run import run_stage

    monkeypatch.setenv("POSTTRAIN_HOME", str(tmp_path / "home"))
    inputs = {"model": tiny["policy"], "data": data["demonstrations"]}
    made = run_stage("sft", inputs, {**SFT, "num_train_epochs": 2}, name_as="mine")
    assert {name: model.aliases for name, model in registry.models().items()} == {
        "mine": {"candidate": 1},
        "mine-epoch-1": {},
        "mine-epoch-2": {},
    }
    assert store.resolve("model:mine-epoch-1").ref == made.outputs["epoch.1"]
    gone = remove([made.outputs["epoch.1"]], before=None, unalias=False, dry_run=False)
    assert [one["ref"] for one in gone["removed"]] == [made.outputs["epoch.1"]] and not os.path.exists(
        made.paths["epoch.1"]
    )


def test_the_last_epoch_is_its_own_where_another_pass_was_chosen(tiny, data, spec):
    """select_by changes what is published, not what an epoch is; nothing else of the run changes."""
    inputs = {"model": tiny["policy"], "data": data["demonstrations"]}
    chosen = {**SFT, "eval_every": "epoch", "select_by": "target_fraction"}  # always the same: the first pass
    found = execute(spec("sft", chosen, inputs, "chosen"), silent)
    assert found["summary"]["selected_step"] == 0
    out = {name: output["path"] for name, output in found["outputs"].items()}
    plain = {**chosen, "select_by": None, "publish_epochs": False}
    last = execute(spec("sft", plain, inputs, "last"), silent)["outputs"]["model"]["path"]
    assert equal(out["epoch.3"], last) and not equal(out["epoch.3"], out["model"])


def test_an_early_stop_keeps_the_epochs_until_there(tiny, data, spec):
    config = {**SFT, "num_train_epochs": 5, "eval_every": "epoch", "select_by": "target_fraction"}
    found = execute(
        spec(
            "sft",
            {**config, "early_stopping_patience": 2},
            {"model": tiny["policy"], "data": data["demonstrations"]},
            "stopped",
        ),
        silent,
    )
    assert found["summary"]["steps"] == 12 and sorted(found["outputs"]) == ["epoch.1", "epoch.2", "model"]


@pytest.mark.parametrize(
    "stage, rows, config",
    [
        ("align", "pairs", {"batch_size": 21, "num_train_epochs": 2.5, "learning_rate": 1e-3}),
        ("distill", "demonstrations", {"batch_size": 21, "num_train_epochs": 2.5, "learning_rate": 1e-3}),
    ],
)
def test_other_stages_that_pass_over_rows_have_it_too(tiny, data, spec, stage, rows, config):
    """Half a pass at the end is no epoch."""
    inputs = {"model": tiny["policy"], "data": data[rows]} | ({"teacher": tiny["other"]} if stage == "distill" else {})
    found = execute(spec(stage, {**config, "publish_epochs": True}, inputs, stage), silent)
    models = [name for name, output in found["outputs"].items() if output["kind"] == "model"]
    assert models == ["epoch.1", "epoch.2", "model"]
    out = found["outputs"]
    assert not equal(out["epoch.1"]["path"], out["epoch.2"]["path"])
    assert not equal(out["epoch.2"]["path"], out["model"]["path"])


@pytest.mark.parametrize(
    "changes, told",
    [
        ({"max_steps": 3}, r"ends after 3 of the 6 steps of the first one; write num_train_epochs=1 or more"),
        ({"curriculum": "length"}, "write curriculum=none, or leave publish_epochs out"),
    ],
)
def test_runs_without_a_pass_are_refused(tiny, data, spec, changes, told):
    with pytest.raises(ConfigError, match=told):
        execute(
            spec("sft", {**SFT, **changes}, {"model": tiny["policy"], "data": data["demonstrations"]}, "no"), silent
        )
