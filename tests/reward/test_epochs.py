"""publish_epochs of reward models: the model behind every pass over the rows is what would be published if training ended
there, weights, tokenizer and card.
"""

import json
import os
import shutil
import subprocess
import sys

import pytest

from stages.reward_models.reward_heads import read_card
from stages.reward_models.reward_scorers import Response, load_scorer
from stages.spec import PROJECT_ROOT, ConfigError
from storage.files import tree_digest
from tests.common import assistant, user

# 30 training rows: three steps an epoch
CONSTANT = {
    "batch_size": 10,
    "learning_rate": 2e-3,
    "num_train_epochs": 3,
    "lr_schedule": "constant",
    "warmup_steps": 0,
    "max_length": 96,
}
CASES = {
    "pairs": ("pairs", {}),
    "adapters, averaged": ("pairs", {"lora_rank": 4, "lora_dropout": 0.1, "learning_rate": 1e-2, "ema_decay": 0.8}),
    "rounded adapters over bfloat16": ("pairs", {"lora_rank": 4, "frozen_dtype": "bfloat16", "save_dtype": "bfloat16"}),
    "LM head beside": ("pairs", {"lm_loss_weight": 0.5}),
    "gain and bias": ("labels", {"objective": "orm", "outcome_head": "gain_bias", "balance": False}),
    "anchored": ("rankings", {}),
    "label words": ("pairs", {"objective": "t2t_point"}),
    "rating scale": ("ratings", {}),
    "steps": ("steps", {"step_classes": 3}),
    "encoder": ("pairs", {}),
    "end token as pad": ("pairs", {}),
}


@pytest.fixture(scope="session")
def padless(tiny, tmp_path_factory):
    """A policy whose tokenizer pads with the token that ends a turn."""
    from transformers import AutoTokenizer

    path = tmp_path_factory.mktemp("padless") / "model"
    shutil.copytree(tiny["policy"], path)
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(path)
    return str(path)


def scores_of(path):
    """Scores of a few answers, by the model as it is loaded anew."""
    shown = [Response(user("which?"), assistant(text)) for text in ("yes good", "no no bad", "so so")]
    scorer = load_scorer(path, "cpu")
    return None if scorer.relative else scorer.score(shown)


@pytest.mark.parametrize("case", CASES)
def test_each_epoch_is_the_model_of_a_run_that_ends_there(case, tiny, encoder, padless, rows, train):
    """Under a constant rate a run of one pass is the beginning of a run of three; nothing of the run itself moves."""
    kind, more = CASES[case]
    model = {"encoder": encoder, "end token as pad": padless}.get(case, tiny["policy"])
    inputs, config = {"model": model, "data": rows[kind]}, {**CONSTANT, **more}
    found = train("reward_model", {**config, "publish_epochs": True}, inputs, "three")
    out = {name: output["path"] for name, output in found["outputs"].items()}
    assert sorted(out) == ["epoch.1", "epoch.2", "epoch.3", "model"]
    assert {output["role"] for output in found["outputs"].values()} == {"reward"}
    assert tree_digest(out["epoch.3"]) == tree_digest(out["model"])
    assert os.path.samefile(f"{out['epoch.3']}/model.safetensors", f"{out['model']}/model.safetensors")
    short = train("reward_model", {**config, "num_train_epochs": 2}, inputs, "two")["outputs"]
    assert list(short) == ["model"]
    mine, theirs = out["epoch.2"], short["model"]["path"]
    assert sorted(os.listdir(mine)) == sorted(os.listdir(theirs)) and read_card(mine) == read_card(theirs)
    assert tree_digest(mine) == tree_digest(theirs)
    plain = train("reward_model", config, inputs, "plain")
    assert tree_digest(plain["outputs"]["model"]["path"]) == tree_digest(out["model"])
    assert found["summary"] == plain["summary"] and found["warnings"] == plain["warnings"]
    assert [one["name"] for one in found["reports"]] == [one["name"] for one in plain["reports"]]
    assert len({tree_digest(path) for path in out.values()}) == 3


def test_the_last_epoch_is_its_own_where_another_pass_was_chosen(tiny, rows, train):
    inputs = {"model": tiny["policy"], "data": rows["pairs"]}
    chosen = {**CONSTANT, "eval_every": 3, "select_by": "mean_reward", "publish_epochs": True}
    found = train("reward_model", chosen, inputs, "chosen")
    out = {name: output["path"] for name, output in found["outputs"].items()}
    last = train("reward_model", CONSTANT, inputs, "last")["outputs"]["model"]["path"]
    assert found["summary"]["selected_step"] < 9 and tree_digest(out["epoch.3"]) == tree_digest(last)
    assert tree_digest(out["epoch.3"]) != tree_digest(out["model"])


def test_a_reloaded_epoch_scores_the_same_in_a_process_of_its_own(tiny, rows, train):
    """What was scored in memory before it was written, a fresh process reads out of its files."""
    config = {**CONSTANT, "num_train_epochs": 2, "publish_epochs": True}
    out = train("reward_model", config, {"model": tiny["policy"], "data": rows["pairs"]}, "two")["outputs"]
    code = (
        "import json, sys; from tests.reward.test_epochs import scores_of;"
        " print(json.dumps([scores_of(path) for path in sys.argv[1:]]))"
    )
    paths = [out[name]["path"] for name in ("epoch.1", "model")]
    ran = subprocess.run(
        [sys.executable, "-c", code, *paths], cwd=PROJECT_ROOT, capture_output=True, text=True, check=True
    )
    mine = [scores_of(path) for path in paths]
    assert json.loads(ran.stdout.splitlines()[-1]) == mine and mine[0] != mine[1]


def test_killed_behind_an_epoch_it_ends_with_the_same_bytes(tiny, rows, tmp_path, forks):
    specs = {}
    for name in ("whole", "killed"):
        specs[name] = {
            "stage": "reward_model",
            "key": "k",
            "config": {
                **CONSTANT,
                "lm_loss_weight": 0.5,
                "num_train_epochs": 6,
                "publish_epochs": True,
            },
            "seed": 5,
            "device": "cpu",
            "inputs": {
                n: {"path": p, "ref": n, "digest": n} for n, p in (("model", tiny["policy"]), ("data", rows["pairs"]))
            },
            "workdir": str(tmp_path / name),
        }
        (tmp_path / f"{name}.json").write_text(json.dumps(specs[name]))
    forks.run(tmp_path / "whole.json")
    forks.start(tmp_path / "killed.json").kill_when((tmp_path / "killed/out/epoch.2").exists)
    assert not (tmp_path / "killed/result.json").exists()
    forks.run(tmp_path / "killed.json")
    whole, killed = (json.loads((tmp_path / name / "result.json").read_text()) for name in specs)
    assert sorted(killed["outputs"]) == [*(f"epoch.{n}" for n in range(1, 7)), "model"]
    for name, one in whole["outputs"].items():
        assert tree_digest(one["path"]) == tree_digest(killed["outputs"][name]["path"]), name
    assert whole["summary"] == killed["summary"]
    assert (tmp_path / "whole/metrics.jsonl").read_bytes() == (tmp_path / "killed/metrics.jsonl").read_bytes()


def test_a_run_without_a_pass_is_refused(tiny, rows, train):
    inputs = {"model": tiny["policy"], "data": rows["pairs"]}
    with pytest.raises(ConfigError, match="ends after 2 of the 3 steps of the first one; write num_train_epochs=1"):
        train("reward_model", {**CONSTANT, "max_steps": 2, "publish_epochs": True}, inputs)
    with pytest.raises(ValueError, match="write curriculum=none, or leave publish_epochs out"):
        train("reward_model", {**CONSTANT, "curriculum": "margin", "publish_epochs": True}, inputs, "parts")
