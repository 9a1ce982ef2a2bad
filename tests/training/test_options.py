"""What every trained stage can be asked for: LoRA, averaged weights, the best validation pass, early stopping, who
computes the layers.
"""

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from stages.batching import collate, make_item
from stages.chat import load_tokenizer
from stages.harness import execute
from stages.models import frozen
from stages.models.adapters import AdapterOff, add_lora
from stages.models.modeling import ModelError, head_of, is_lean, load_policy, save_policy, target_logps
from stages.settings import OptimizerConfig
from stages.sft import NextToken
from stages.spec import ConfigError
from stages.training import Trainer, TrainingError, learning_rate_at
from tests.common import silent
from tests.training.fresh import scores_elsewhere
from tests.training.test_invariance import text_items

SFT = {"learning_rate": 1e-2, "batch_size": 8, "num_train_epochs": 2, "max_length": 64}


def scores(model, items) -> list[float]:
    with torch.inference_mode():
        return target_logps(model.eval(), collate(items))[0].tolist()


def test_lora_trains_only_the_adapter_and_comes_back_to_the_last_bit(tiny, tmp_path, forks):
    """In a fresh process: base + adapter give the trained scores exactly, the merged directory gives the merged
    model's.
    """
    items = text_items(np.random.default_rng(0))
    base = load_policy(tiny["policy"])
    before = scores(base, items)
    model = add_lora(load_policy(tiny["policy"]), OptimizerConfig(lora_rank=4), seed=7)
    assert scores(model, items) == pytest.approx(before, abs=1e-6)  # B starts at 0
    trainer = Trainer(
        model, NextToken("token-mean"), OptimizerConfig(learning_rate=1e-2, lora_rank=4, warmup_ratio=0), 3
    )
    assert trainer.parameters and all("lora_" in name for name in trainer.parameters)
    for _ in range(3):
        trainer.step(items)
    trained = scores(model, items)
    assert max(abs(a - b) for a, b in zip(trained, before)) > 1e-2
    with model.disable_adapter():
        assert scores(model, items) == before
    save_policy(model, load_tokenizer(tiny["policy"]), tmp_path / "out", base="model:base")
    merged = scores(load_policy(str(tmp_path / "out")), items)
    assert merged == pytest.approx(trained, abs=1e-4)
    assert (
        json.loads((tmp_path / "out/adapter/adapter_config.json").read_text())["base_model_name_or_path"]
        == "model:base"
    )
    policy, out = tiny["policy"], str(tmp_path / "out")
    assert scores_elsewhere(
        forks, f"PeftModel.from_pretrained(load_policy({policy!r}), {out + '/adapter'!r})", f"load_policy({out!r})"
    ) == [trained, merged]


@pytest.mark.parametrize("stage", ("sft", "align", "rl"))
def test_stages_train_with_lora(stage, tiny, data, spec):
    from transformers import AutoModelForCausalLM

    config = {
        "sft": SFT,
        "align": {**SFT, "max_length": 96},
        "rl": {
            "learning_rate": 1e-2,
            "max_steps": 2,
            "prompts_per_step": 6,
            "num_generations": 8,
            "max_completion_length": 48,
            "rewards": [{"name": "length", "kind": "length", "max_length": 48, "cache_length": 48}],
        },
    }[stage]
    rows = {"sft": "demonstrations", "align": "pairs", "rl": "prompts"}[stage]
    result = execute(
        spec(stage, {**config, "lora_rank": 4}, {"model": tiny["policy"], "data": data[rows]}, "lora"), silent
    )
    out = Path(result["outputs"]["model"]["path"])
    new, old = (dict(AutoModelForCausalLM.from_pretrained(p).named_parameters()) for p in (out, tiny["policy"]))
    changed = {n for n in old if not torch.equal(old[n], new[n])}
    assert changed and all(n.endswith("_proj.weight") for n in changed)
    assert (out / "adapter" / "adapter_model.safetensors").exists()


def test_unknown_lora_targets_name_the_layers(tiny):
    with pytest.raises(ModelError, match="q_proj"):
        add_lora(load_policy(tiny["policy"]), OptimizerConfig(lora_rank=2, lora_targets="quack"), 0)


def test_an_adapter_on_the_output_layer_is_the_models_own_forward(tiny):
    """The chunked head with the adapter's product in its weight: log-probs, entropy and gradients are those of the
    model's logits; off, the base's.
    """
    items = text_items(np.random.default_rng(0))
    model = add_lora(
        load_policy(tiny["policy"]), OptimizerConfig(lora_rank=2, lora_targets="v_proj,lm_head"), 0
    ).double()
    for name, parameter in model.named_parameters():
        if ".lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(1))
    trained = [p for p in model.parameters() if p.requires_grad]
    batch = collate(items[:2])
    logps, entropy = target_logps(model, batch, entropy=True)
    expected = []
    for item in items[:2]:
        for response, mask in zip(item.responses, item.masks):
            ids = torch.tensor([[*item.prompt, *response]])
            logp = torch.log_softmax(model(input_ids=ids, use_cache=False).logits[0].double(), -1)
            for t in np.flatnonzero(mask):
                row = logp[len(item.prompt) + t - 1]
                expected.append((row[response[t]], -(row.exp() * row).sum()))
    own_logps, own_entropy = (torch.stack(x) for x in zip(*expected))
    assert torch.allclose(logps, own_logps, atol=1e-6) and torch.allclose(entropy, own_entropy, atol=1e-6)
    weights = torch.linspace(-1, 1, len(logps), dtype=torch.float64)
    found, own = (
        torch.autograd.grad((weights * (a + b)).sum(), trained) for a, b in ((logps, entropy), (own_logps, own_entropy))
    )
    assert len(found) == 6 and all(
        torch.allclose(a, b, atol=1e-5 * float(b.abs().max())) and b.any() for a, b in zip(found, own)
    )
    assert torch.equal(head_of(AdapterOff(model)).weight, load_policy(tiny["policy"]).lm_head.weight.double())


@pytest.mark.parametrize("layer", ("lm_head", "embed_tokens"))
@pytest.mark.parametrize("tied", (False, True))
def test_a_stage_trains_an_adapter_on_the_output_layer_or_the_embedding_unless_they_are_one(
    tied, layer, tiny, data, spec, tmp_path
):
    from transformers import AutoModelForCausalLM

    path = tiny["policy"]
    if tied:
        model = load_policy(path)
        model.config.tie_word_embeddings = True
        model.tie_weights()
        path = str(tmp_path / "tied")
        save_policy(model, load_tokenizer(tiny["policy"]), path)
    built = spec(
        "sft",
        {**SFT, "lora_rank": 4, "lora_targets": f"q_proj,{layer}"},
        {"model": path, "data": data["demonstrations"]},
        "head",
    )
    if tied:
        with pytest.raises(ModelError, match="one weight for the embedding and the output layer"):
            execute(built, silent)
        return
    out = execute(built, silent)["outputs"]["model"]["path"]
    new, old = (dict(AutoModelForCausalLM.from_pretrained(p).named_parameters()) for p in (out, path))
    assert {n for n in old if not torch.equal(old[n], new[n])} == {
        n for n in old if n.endswith(("q_proj.weight", f"{layer}.weight"))
    }
    items = text_items(np.random.default_rng(0))
    from peft import PeftModel

    assert scores(PeftModel.from_pretrained(load_policy(path), f"{out}/adapter"), items) == pytest.approx(
        scores(load_policy(out), items), rel=1e-5
    )


def test_averaged_weights_are_the_published_ones(tiny):
    items = text_items(np.random.default_rng(0))
    model = load_policy(tiny["policy"])
    trainer = Trainer(model, NextToken("token-mean"), OptimizerConfig(learning_rate=1e-2, ema_decay=0.8), 4)
    expected = {n: p.detach().clone() for n, p in trainer.parameters.items()}
    for _ in range(4):
        trainer.step(items)
        expected = {n: 0.8 * e + 0.2 * trainer.parameters[n].detach() for n, e in expected.items()}
    last = {n: p.detach().clone() for n, p in trainer.parameters.items()}
    with trainer.averaged():
        inside = trainer.evaluate(items)["loss"]
    assert all(torch.equal(last[n], p) for n, p in trainer.parameters.items())
    trainer.settle()
    assert all(torch.allclose(expected[n], p, atol=1e-6) for n, p in trainer.parameters.items())
    assert trainer.evaluate(items)["loss"] == inside


BEMA = {
    "every step": {"update_freq": 1, "lag": 2.0},
    "now and then, after a burn-in": {"update_freq": 2, "update_after": 1, "ema_power": 0.7, "multiplier": 0.5},
    "all of the way": {"update_freq": 1, "bias_power": 0.0},
    "no mean": {"update_freq": 1, "ema_power": 0.0, "bias_power": 0.3},
    "a plain average": {"update_freq": 1, "bias_power": 40.0, "min_ema_multiplier": 0.4},
}


@pytest.mark.parametrize("constants", BEMA.values(), ids=BEMA)
@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
def test_bema_is_that_of_its_formulas(tiny, constants, dtype):
    """Block & Zhang 2025 in float64 from the weights of every step; products in bfloat16 change the weights, not what
    is made of them. A step that trains nothing or is skipped is no step of the average.
    """
    items = text_items(np.random.default_rng(0))
    config = OptimizerConfig(learning_rate=1e-2, bema=constants, compute_dtype=dtype)
    trainer = Trainer(load_policy(tiny["policy"]), NextToken("token-mean"), config, 6)
    seen = [{n: p.detach().double() for n, p in trainer.parameters.items()}]
    for step in range(6):
        trainer.step([replace(i, extra={**i.extra, "skip_forward": step == 2}) for i in items])
        if step != 2:
            seen.append({n: p.detach().double() for n, p in trainer.parameters.items()})
    tau, phi = constants.get("update_after", 0), constants["update_freq"]
    lag, gamma = constants.get("lag", 10.0), constants.get("multiplier", 1.0)
    start = mean = average = seen[tau]
    for t in range(tau + phi, len(seen), phi):
        age = lag + gamma * t
        beta = max(age ** -constants.get("ema_power", 0.5), constants.get("min_ema_multiplier", 0.0))
        alpha = age ** -constants.get("bias_power", 0.2)
        mean = {n: (1 - beta) * mean[n] + beta * seen[t][n] for n in mean}
        average = {n: mean[n] + alpha * (seen[t][n] - start[n]) for n in mean}
    if constants.get("bias_power") == 40.0:
        assert all(torch.allclose(average[n], mean[n], atol=1e-9) for n in mean)
    assert all(w.dtype == torch.float32 for w in trainer.averages.values())
    assert all(torch.allclose(trainer.averages[n].double(), w, rtol=0, atol=1e-6) for n, w in average.items())
    assert max(float((average[n] - seen[-1][n]).abs().max()) for n in mean) > 1e-3
    trainer.settle()
    assert all(torch.equal(p, trainer.averages[n]) for n, p in trainer.parameters.items())


SHORT = {"max_steps": 3, "batch_size": 6, "learning_rate": 1e-3, "max_length": 96}
STAGES = {
    "sft": (SHORT, "demonstrations"),
    "reward_model": (SHORT, "pairs"),
    "align": (SHORT, "pairs"),
    "distill": ({**SHORT, "method": "context", "context": "be brief"}, "demonstrations"),
    "rl": (
        {
            "max_steps": 3,
            "learning_rate": 1e-3,
            "preset": "ppo",
            "prompts_per_step": 4,
            "num_generations": 2,
            "max_completion_length": 8,
            "reward_override": "random",
        },
        "prompts",
    ),
}


@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_publishes_what_bema_makes_of_its_weights(tiny, data, spec, stage):
    """With both powers 0 that is the weights and all of the way that they have come once more."""
    from safetensors.torch import load_file

    config, rows = STAGES[stage]
    inputs = {"model": tiny["reward" if stage == "reward_model" else "policy"], "data": data[rows]}
    if stage == "reward_model":
        config = {**config, "init_head": "keep"}
    if stage == "rl":
        config = {**config, "rewards": [{"name": "length", "kind": "length"}]}
    found = [
        load_file(
            str(
                Path(
                    execute(spec(stage, {**config, **more}, inputs, name), silent)["outputs"]["model"]["path"],
                    "model.safetensors",
                )
            )
        )
        for name, more in (
            ("plain", {}),
            ("ahead", {"bema": {"update_freq": 1, "ema_power": 0.0, "bias_power": 0.0}}),
        )
    ]
    start = load_file(str(Path(inputs["model"], "model.safetensors")))
    assert found[0].keys() == found[1].keys() == start.keys()
    assert all(torch.allclose(found[1][n], 2 * w - start[n], rtol=0, atol=1e-6) for n, w in found[0].items())
    assert max(float((w - start[n]).abs().max()) for n, w in found[0].items()) > 1e-4


def test_bema_of_a_burn_in_is_the_weights_as_they_are(tiny):
    items = text_items(np.random.default_rng(0))
    config = OptimizerConfig(learning_rate=1e-2, bema={"update_freq": 2, "update_after": 2})
    trainer = Trainer(load_policy(tiny["policy"]), NextToken("token-mean"), config, 5)
    for step in range(1, 6):
        trainer.step(items)
        same = [torch.equal(p, trainer.averages[n]) for n, p in trainer.parameters.items()]
        assert all(same) if step <= 3 else not any(same)


def test_patience_waits_for_an_average_that_has_not_moved(tiny):
    """A pass over the same average says nothing, so training ends by passes over others only."""
    items = text_items(np.random.default_rng(0))
    config = OptimizerConfig(
        learning_rate=1e-2, bema={"update_freq": 4}, select_by="loss", early_stopping_patience=2, lr_schedule="constant"
    )
    trainer = Trainer(load_policy(tiny["policy"]), NextToken("token-mean"), config, 12)
    counts = []
    for step in range(13):
        if step:
            trainer.step(items)
        with trainer.averaged():
            stop = trainer.consider({"loss": 1.0 + step})
        trainer.best = json.loads(json.dumps(trainer.best))  # as a checkpoint has it
        counts.append(trainer.best["passes_since"])
        assert stop == (counts[-1] >= 2)
    # until the first update the weights are judged as they are
    assert counts == [0, 1, 2, 3, 4, 4, 4, 4, 5, 5, 5, 5, 6]


def test_an_average_that_never_moves_or_has_no_age_or_is_one_of_two_is_refused(tiny):
    model = load_policy(tiny["policy"])
    for constants, steps in (({}, 399), ({"update_freq": 2, "update_after": 9}, 10)):
        with pytest.raises(TrainingError, match="would not be trained; write for example bema='{update_freq: "):
            Trainer(model, NextToken("token-mean"), OptimizerConfig(bema=constants), steps)
    Trainer(model, NextToken("token-mean"), OptimizerConfig(bema={"update_freq": 2, "update_after": 8}), 10)
    with pytest.raises(ValueError, match="write lag=10"):
        OptimizerConfig(bema={"lag": 0, "multiplier": 0.1, "update_freq": 5})
    with pytest.raises(ValueError, match="write ema_decay=0, or leave bema out"):
        OptimizerConfig(bema={}, ema_decay=0.9)


def test_the_best_validation_pass_is_published_and_training_stops(tiny, data, spec):
    """A learning rate that ruins the model: the published weights are those of the best pass, and patience ends the
    run.
    """
    config = {
        **SFT,
        "learning_rate": 3.0,
        "warmup_ratio": 0,
        "lr_schedule": "constant",
        "num_train_epochs": 6,
        "eval_every": 2,
        "select_by": "loss",
        "early_stopping_patience": 2,
    }
    made = spec("sft", config, {"model": tiny["policy"], "data": data["demonstrations"]}, "best")
    result = execute(made, silent)
    rows = [json.loads(line) for line in Path(made["workdir"], "metrics.jsonl").read_text().splitlines()]
    passes = {r["step"]: r["metrics"]["validation/loss"] for r in rows if "validation/loss" in r["metrics"]}
    best = min(passes, key=passes.get)
    assert result["summary"]["selected_step"] == best and result["summary"]["steps"] == best + 4 < 36
    assert result["summary"]["validation/nll"] == pytest.approx(passes[best], rel=1e-5)
    same = execute(
        spec(
            "sft",
            {**SFT, "max_steps": 1},
            {"model": result["outputs"]["model"]["path"], "data": data["demonstrations"]},
            "again",
        ),
        silent,
    )
    assert same["summary"]["validation/nll_before"] == pytest.approx(passes[best], rel=1e-5)


def test_the_summarys_loss_is_the_mean_of_the_last_tenth_of_the_steps_and_the_averages_best_pass_is_published(
    tiny, data, spec
):
    made = spec(
        "sft",
        {**SFT, "max_steps": 29, "ema_decay": 0.5, "eval_every": 4, "learning_rate": 0.1, "select_by": "loss"},
        {"model": tiny["policy"], "data": data["demonstrations"]},
        "late",
    )
    result = execute(made, silent)
    rows = [json.loads(line) for line in Path(made["workdir"], "metrics.jsonl").read_text().splitlines()]
    losses = [r["metrics"]["loss"] for r in rows if "loss" in r["metrics"]]
    assert len(losses) == 29 and losses[-1] != pytest.approx(losses[-2], rel=1e-6)
    assert result["summary"]["loss"] == pytest.approx(sum(losses[-2:]) / 2, rel=1e-12)
    passes = {r["step"]: r["metrics"]["validation/loss"] for r in rows if "validation/loss" in r["metrics"]}
    assert list(passes) == [0, *range(4, 29, 4), 29] and result["summary"]["selected_step"] == min(
        passes, key=passes.get
    )
    assert result["summary"]["validation/nll"] == pytest.approx(min(passes.values()), rel=1e-5)


@pytest.mark.parametrize("eval_rows", (512, 0))
def test_the_best_pass_by_reward_score_is_published(tiny, data, spec, eval_rows):
    """Also where validation passes have only answers to judge (eval_rows=0)."""
    config = {"num_train_epochs": 4, "eval_every": 2, "select_by": "reward", "eval_completion_length": 24}
    made = spec(
        "sft",
        {**SFT, **config, "eval_rows": eval_rows},
        {"model": tiny["policy"], "data": data["demonstrations"], "reward_model": tiny["reward"]},
        "judged",
    )
    result = execute(made, silent)
    rows = [json.loads(line) for line in Path(made["workdir"], "metrics.jsonl").read_text().splitlines()]
    passes = {r["step"]: r["metrics"]["validation/reward"] for r in rows if "validation/reward" in r["metrics"]}
    assert len(passes) > 3 and len(set(passes.values())) > 1
    assert result["summary"]["selected_step"] == max(passes, key=passes.get)
    assert result["summary"]["validation/reward"] == pytest.approx(max(passes.values()), rel=1e-5)
    assert ("validation/nll" in result["summary"]) is bool(eval_rows)


def test_the_reward_model_is_not_asked_about_unfinished_answers(tiny, data, spec):
    """One token is an unfinished answer, or an end token alone, an empty one: both have a value of their own
    (rm.score_rules).
    """
    inputs = {"model": tiny["policy"], "data": data["demonstrations"], "reward_model": tiny["reward"]}
    found = execute(spec("sft", {**SFT, "max_steps": 1, "eval_completion_length": 1}, inputs, "one"), silent)
    (cut,) = [w["text"] for w in found["warnings"] if w["code"] == "answers_truncated"]
    assert "eval_completion_length=1 and count -1" in cut
    assert found["summary"]["validation/reward"] == found["summary"]["validation/reward_before"] == -1.0


@pytest.mark.parametrize("patience", (0, 2))
def test_where_no_pass_was_finite_the_last_weights_are_published_and_it_is_said(
    tiny, data, spec, monkeypatch, patience
):
    """select_by of a metric that is never a number, with and without early stopping: a warning, and the weights of the
    last step.
    """
    evaluate = Trainer.evaluate
    monkeypatch.setattr(Trainer, "evaluate", lambda self, items: {**evaluate(self, items), "odd": float("nan")})
    config = {**SFT, "max_steps": 4, "eval_every": 1}
    chosen = execute(
        spec(
            "sft",
            {**config, "select_by": "odd", "early_stopping_patience": patience},
            {"model": tiny["policy"], "data": data["demonstrations"]},
            "odd",
        ),
        silent,
    )
    steps = 4 if not patience else chosen["summary"]["steps"]
    assert (
        [w["code"] for w in chosen["warnings"]].count("nothing_selected") == 1
        and "selected_step" not in chosen["summary"]
        and (steps == 4 or steps < 4 and patience)
    )
    if not patience:
        plain = execute(spec("sft", config, {"model": tiny["policy"], "data": data["demonstrations"]}, "plain"), silent)
        assert chosen["summary"]["validation/nll"] == plain["summary"]["validation/nll"]
    else:
        assert "validation/nll" in chosen["summary"]


def test_a_reward_model_whose_end_token_pads_is_read_at_it_by_transformers_too(tiny, tmp_path):
    """Llama's tokenizers have no pad token, so the end token stood in the config as one, and transformers' own forward
    skips pads: plain transformers, and TRL's trainers with it, gave other scores than the stage.
    """
    from transformers import AutoModelForSequenceClassification, AutoTokenizer
    from stages.reward_models.reward_heads import RewardCard, load_reward_model, save_reward_model

    ours, tokenizer = load_reward_model(tiny["reward"]), AutoTokenizer.from_pretrained(tiny["reward"])
    tokenizer.pad_token = tokenizer.eos_token
    save_reward_model(ours, tokenizer, tmp_path / "rm", RewardCard("bt"))
    assert tokenizer.pad_token == tokenizer.eos_token  # the caller's own stays
    plain = AutoModelForSequenceClassification.from_pretrained(tmp_path / "rm").eval()
    saved = AutoTokenizer.from_pretrained(tmp_path / "rm")
    assert saved.pad_token_id == plain.config.pad_token_id != saved.eos_token_id
    texts = [f"{words}{saved.eos_token}" for words in ("two", "two and then some more of it")]
    batch = saved(texts, return_tensors="pt", padding=True, add_special_tokens=False)
    with torch.no_grad():
        scores = plain(**batch).logits[:, 0]
        for text, score in zip(texts, scores):
            ids = saved(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
            assert ids[0, -1] == saved.eos_token_id
            read = plain.score(plain.model(input_ids=ids).last_hidden_state[:, -1])[0, 0]
            torch.testing.assert_close(score, read, atol=1e-5, rtol=1e-5)


def test_of_equal_passes_the_first_is_the_best_whatever_rounding_says(tiny):
    """The same share right, added up over other micro-batches: in the last digit one pass was above the other."""
    config = OptimizerConfig(select_by="mean_token_accuracy", early_stopping_patience=2)
    trainer = Trainer(load_policy(tiny["policy"]), NextToken("token-mean"), config, 3)
    assert 0.1 + 0.2 > 0.3
    for step, (value, best, stops) in enumerate([(0.3, 0, False), (0.1 + 0.2, 0, False), (0.31, 2, False)]):
        trainer.step_index = step
        assert trainer.consider({"mean_token_accuracy": value}) is stops and trainer.best["step"] == best


def test_a_model_that_compares_answers_cannot_choose_the_best_pass(tiny, data, spec, tmp_path):
    """Every pass would get 0.5 and the first, untrained, would be published; inside a combination too."""
    from stages.reward_models.reward_heads import RewardCard, new_reward_model, save_reward_model, write_card

    save_reward_model(
        new_reward_model(tiny["policy"]),
        load_tokenizer(tiny["policy"]),
        tmp_path / "both/members/a",
        RewardCard("pairwise", max_length=96),
    )
    write_card(tmp_path / "both", RewardCard("combined", options={"members": ["a"], "combine": "mean"}))
    for name, path in (("alone", tmp_path / "both/members/a"), ("inside", tmp_path / "both")):
        with pytest.raises(ConfigError, match="compares answers.*objective=bt"):
            execute(
                spec(
                    "sft",
                    {**SFT, "eval_every": 2, "select_by": "reward"},
                    {"model": tiny["policy"], "data": data["demonstrations"], "reward_model": str(path)},
                    name,
                ),
                silent,
            )


def test_a_validation_pass_behind_every_epoch(tiny, data, spec):
    """eval_every=epoch: 42 rows in batches of 8 are 6 steps; the weights of the best such pass are published."""
    for stage, more in (("sft", {}), ("distill", {"method": "context", "context": "Be brief."})):
        config = {
            **SFT,
            "learning_rate": 3.0,
            "warmup_ratio": 0,
            "lr_schedule": "constant",
            "batch_size": 8,
            "num_train_epochs": 3,
            "eval_every": "epoch",
            "select_by": "loss",
            **more,
        }
        made = spec(stage, config, {"model": tiny["policy"], "data": data["demonstrations"]}, f"epochs-{stage}")
        result = execute(made, silent)
        rows = [json.loads(line) for line in Path(made["workdir"], "metrics.jsonl").read_text().splitlines()]
        judged = [(r["step"], r["metrics"]["validation/loss"]) for r in rows if "validation/loss" in r["metrics"]]
        passes = dict(judged)
        assert [step for step, _ in judged] == [0, 6, 12, 18] and result["summary"]["selected_step"] == min(
            passes, key=passes.get
        ), stage


def test_a_curriculum_goes_from_short_to_long(tiny, data, spec):
    from stages.chat import renderer_for
    from stages.harness import Stage
    from stages.registry import get_stage
    from stages.sft import encode_demonstrations, rows_in_order
    from stages.spec import ConfigError

    made = spec(
        "sft", {**SFT, "curriculum": "length"}, {"model": tiny["policy"], "data": data["demonstrations"]}, "ordered"
    )
    stage = Stage(get_stage("sft"), made, silent)
    items, _ = encode_demonstrations(stage.dataset("data"), "train", renderer_for(tiny["policy"]), stage.config)
    source = rows_in_order(stage, items, stage.config)
    parts = [[], [], []]
    for step in range(source.total_steps):
        parts[int(source.after_step(step + 1, {})["curriculum_stage"])] += [i.n_targets for i in source.items(step)]
    assert [len(p) for p in parts] == [28, 28, 28] and max(parts[0]) <= min(parts[1]) and max(parts[1]) <= min(parts[2])
    by_difficulty = stage.config.model_copy(update={"curriculum": "difficulty"})
    with pytest.raises(ConfigError, match="difficulty"):
        rows_in_order(stage, items, by_difficulty)
    for i, item in enumerate(items):
        item.extra["difficulty"] = str(i % 7) if i % 2 else i % 7
    assert {int(i.extra["difficulty"]) for i in rows_in_order(stage, items, by_difficulty).items(0)} <= {0, 1, 2}
    items[5].extra["difficulty"] = "hard"
    with pytest.raises(ConfigError, match=r"1 rows have another difficulty \(first .*: 'hard'\)"):
        rows_in_order(stage, items, by_difficulty)


@pytest.mark.parametrize(
    "metric,best",
    [
        ("loss", 1),
        ("reward", 2),
        ("rewards/margins", 2),
        ("accuracy", 2),
        ("kl/start_sequence_sum", 1),
        ("gradient_weight", 1),
        ("completions/clipped_ratio", 1),
        ("completions/repetition", 1),
        ("reward/unscorable_fraction", 1),
        ("reward/judge/unscorable_fraction", 1),
        ("reward/preference", 2),
        ("reward/low_perplexity", 2),
    ],
)
def test_the_best_pass_is_the_lowest_of_what_goes_wrong_and_the_highest_of_every_reward(metric, best):
    """Of cut answers or of the distance from the start most was taken for best, and of a reward that its user named
    after a loss, least.
    """
    chooser = SimpleNamespace(
        config=SimpleNamespace(select_by=metric, early_stopping_patience=0), best={}, parameters={}, bema=None
    )
    for chooser.step_index, value in ((0, 0.5), (1, 0.25), (2, 0.75)):
        Trainer.consider(chooser, {metric: value})
    assert chooser.best["step"] == best


def test_selection_needs_something_to_select_by(tiny, data, spec):
    with pytest.raises(ValueError, match="eval_every=STEPS"):
        OptimizerConfig.model_validate({"early_stopping_patience": 1})
    from stages.sft import Config

    with pytest.raises(ValueError, match="eval_every=STEPS"):
        Config(select_by="loss")
    with pytest.raises(TrainingError, match="write one of.*loss"):
        execute(
            spec(
                "sft",
                {**SFT, "eval_every": 1, "select_by": "quality"},
                {"model": tiny["policy"], "data": data["demonstrations"]},
                "wrong",
            ),
            silent,
        )


@pytest.mark.parametrize(
    "config", [{}, {"method": "kto"}, {"method": "aot_unpaired"}, {"method": "simpo"}, {"reference_update": "ema"}]
)
def test_align_refuses_an_unknown_select_by_before_the_reference_is_computed(tiny, data, spec, monkeypatch, config):
    from stages import align

    monkeypatch.setattr(align, "add_reference", lambda *a: pytest.fail("it computed the reference"))
    config = {"max_length": 96, "eval_every": 1, "max_steps": 1, "select_by": "quality", **config}
    inputs = {"model": tiny["policy"], "data": data["pairs"]}
    with pytest.raises(TrainingError, match="select_by=quality.*write one of.*loss.*rewards/margins"):
        execute(spec("align", config, inputs, "unknown"), silent)


@pytest.mark.parametrize("method", ["dpo", "kto"])
def test_align_selects_by_any_metric_of_its_validation_passes(tiny, data, spec, method):
    """Each of them is known before the first pass, and knowing it moves no number."""
    config = {"method": method, "max_length": 96, "eval_every": 1, "max_steps": 2, "learning_rate": 1e-3}
    inputs = {"model": tiny["policy"], "data": data["pairs"]}
    plain = execute(spec("align", config, inputs, "plain"), silent)["summary"]
    found = {name.partition("/")[2]: value for name, value in plain.items() if name.startswith("validation/")}
    chosen = execute(spec("align", {**config, "select_by": "logps/chosen"}, inputs, "logps"), silent)["summary"]
    assert chosen["loss"] == plain["loss"] and "selected_step" in chosen
    for name in found.keys() - {"logps/chosen"}:
        execute(spec("align", {**config, "max_steps": 1, "select_by": name}, inputs, name.replace("/", "-")), silent)


@pytest.mark.parametrize("stage,rows", [("sft", "demonstrations"), ("align", "pairs")])
def test_selection_without_validation_rows_is_refused_before_anything_is_computed(
    stage, rows, tiny, data, spec, tmp_path, monkeypatch
):
    """align computed the reference of every row first, and sft offered metrics to write of which there were none."""
    from stages import align
    from storage.datasets import open_dataset, write_dataset

    monkeypatch.setattr(align, "add_reference", lambda *a: pytest.fail("it computed the reference"))
    given = open_dataset(data[rows])
    write_dataset(str(tmp_path / "train"), "made", given.kind, given.iter_rows(split="train"))
    config = {**SFT, "max_length": 96, "eval_every": 1, "select_by": "loss"}
    with pytest.raises(TrainingError, match="select_by=loss needs validation rows.*hold some out"):
        execute(spec(stage, config, {"model": tiny["policy"], "data": str(tmp_path / "train")}, "none"), silent)


def test_a_layers_own_forward_and_ours_train_alike(tiny):
    items = text_items(np.random.default_rng(0))
    weights = []
    for forward in ("own", "model"):
        model = load_policy(tiny["policy"])
        trainer = Trainer(
            model,
            NextToken("token-mean"),
            OptimizerConfig(learning_rate=1e-3, forward=forward, activation_checkpointing=forward == "own"),
            3,
        )
        for _ in range(3):
            trainer.step(items)
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.allclose(*weights, atol=2e-5)


@pytest.mark.parametrize("rank", (0, 2))
def test_activation_checkpointing_leaves_the_layers_to_our_forward(tiny, rank):
    """transformers hooks the embedding where it turns checkpointing on, and what is hooked is not for our forward."""
    model = add_lora(
        load_policy(tiny["policy"]),
        config := OptimizerConfig(learning_rate=1e-3, activation_checkpointing=True, lora_rank=rank),
        0,
    )
    trainer = Trainer(model, NextToken("token-mean"), config, 1)
    assert is_lean(model) and trainer.step(text_items(np.random.default_rng(0)))["grad_norm"] > 0
    own = add_lora(load_policy(tiny["policy"]), other := config.model_copy(update={"forward": "model"}), 0)
    Trainer(own, NextToken("token-mean"), other, 1).step(text_items(np.random.default_rng(0)))
    assert not is_lean(own)
    for (name, a), b in zip(model.named_parameters(), own.parameters()):
        assert not a.requires_grad or a.grad.abs().max() > 0 or "lora_A" in name, name
        assert a.grad is None and b.grad is None or torch.allclose(a.grad, b.grad, atol=1e-5), name


def test_a_pad_token_that_a_text_holds_is_learned_by_every_forward(tiny):
    """Transformers' embeddings leave the pad token's row out of the gradient (``padding_idx``), also where it was
    sampled, or is the end token too; our forward does not.
    """
    items, found = (
        [
            make_item("r", [20, 3, 30], [[40, 3, 50, 3]], [[1, 1, 1, 1]], weight=1.0),
            make_item("s", [21], [[41, 51]], [[1, 1]], weight=1.0),
        ],
        [],
    )
    for forward in ("own", "model"):
        model = load_policy(tiny["policy"]).double()
        assert model.config.pad_token_id == 3 and model.get_input_embeddings().padding_idx == 3
        Trainer(model, NextToken("token-mean"), OptimizerConfig(forward=forward, max_grad_norm=1e9), 1).step(items)
        found.append(model.get_input_embeddings().weight.grad)
    assert torch.allclose(*found, atol=1e-6) and float(found[0][3].norm()) > 1e-2


@pytest.fixture
def compiled_here():
    """No pool of processes for a handful of kernels, which need not be fast: without vectors (nor a trial of each kind,
    two seconds apiece), not optimised. Graphs are counted anew.
    """
    import torch._inductor.config
    from torch._dynamo.utils import counters

    counters.clear()
    settings = {"compile_threads": 1, "aot_inductor.debug_compile": True, "cpp.simdlen": 1, "cpp.vec_isa_ok": False}
    with torch._inductor.config.patch(settings):
        yield counters["stats"]


def one_layer(path):
    """A further one has the kernels of the first."""
    model = load_policy(path)
    model.model.layers, model.config.num_hidden_layers = model.model.layers[:1], 1
    return model


@pytest.mark.slow
def test_compiled_forward_trains_alike(tiny, compiled_here):
    """And what is tried before of the model's code compiles nothing."""
    items = text_items(np.random.default_rng(0), 3)
    weights = []
    for forward in ("compiled", "model"):
        model = one_layer(tiny["policy"])
        trainer = Trainer(model, NextToken("token-mean"), OptimizerConfig(learning_rate=1e-3, forward=forward), 1)
        trainer.step(items)
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.allclose(*weights, atol=2e-5)
    assert compiled_here["unique_graphs"] == 1


def test_compiled_forward_trains_alike_over_a_base_kept_in_bfloat16(tiny, compiled_here):
    """Loss and gradients of an adapter are those of the model's own code over the same matrices."""
    items, found = text_items(np.random.default_rng(0), 3), []
    for forward in ("compiled", "model"):
        config = OptimizerConfig(
            learning_rate=1e-3, forward=forward, lora_rank=4, frozen_dtype="bfloat16", max_grad_norm=1e9
        )
        model = frozen.keep(add_lora(one_layer(tiny["policy"]), config, 3), "bfloat16")
        assert model.get_base_model().model.layers[0].mlp.up_proj.base_layer.weight.dtype == torch.bfloat16
        loss = Trainer(model, NextToken("token-mean"), config, 1).step(items)["loss"]
        found.append((loss, torch.cat([p.grad.flatten() for n, p in model.named_parameters() if ".lora_B." in n])))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-5) and float(found[1][1].abs().max()) > 0
    assert torch.allclose(found[0][1], found[1][1], rtol=0, atol=1e-4 * float(found[1][1].abs().max()))


def test_learning_rate_schedules():
    def curve(schedule, **extra):
        config = OptimizerConfig(learning_rate=1.0, lr_schedule=schedule, warmup_ratio=0.1, **extra)
        return [learning_rate_at(step, 100, config) for step in range(100)]

    for schedule in ("constant", "linear", "cosine", "inverse_sqrt", "wsd"):
        values = curve(schedule)
        assert values[0] == pytest.approx(0.1) and values[9] == pytest.approx(1.0) and max(values) <= 1.0 + 1e-12, (
            schedule
        )
    assert curve("wsd", decay_ratio=0.3)[69] == 1.0 and curve("wsd", decay_ratio=0.3)[85] == pytest.approx(0.5)
    assert curve("inverse_sqrt")[39] == pytest.approx(0.5)
    assert curve("linear", min_lr_ratio=0.2)[99] == pytest.approx(0.2 + 0.8 / 90, abs=1e-9)


def test_preflight_tells_the_plan_and_marks_what_is_trained(tiny, data, spec):
    events = []
    execute(
        spec("sft", {**SFT, "max_steps": 1}, {"model": tiny["policy"], "data": data["demonstrations"]}, "pre"),
        events.append,
    )
    told = [e for e in events if e["event"] == "report" and e["name"] == "preflight"][0]
    page = Path(told["markdown"]).read_text()
    assert "optimizer steps | 1" in page
    rows = json.loads(Path(told["table"]).read_text())
    assert len(rows) == 5
    for row in rows:
        trained = "".join(text for text, on in row["segments"] if on)
        assert set(trained.split("<")[0]) == {"b"} and "user" not in trained
    assert any("dearest micro-batch" in e.get("text", "") for e in events)


RL = {
    "preset": "ppo",
    "beta": 0.1,
    "kl_coef": 0,
    "max_steps": 2,
    "prompts_per_step": 3,
    "num_generations": 4,
    "max_completion_length": 6,
    "num_minibatches": 2,
    "learning_rate": 1e-3,
    "rewards": [{"name": "length", "kind": "length"}],
}


def test_rl_tells_its_plan_shows_completions_and_tries_the_longest_rollouts_first(tiny, data, spec):
    events = []
    execute(
        spec("rl", {**RL, "truncation_policy": "mask"}, {"model": tiny["policy"], "data": data["prompts"]}, "pre"),
        events.append,
    )
    told = next(e for e in events if e["event"] == "report" and e["name"] == "preflight")
    page = Path(told["markdown"]).read_text()
    longest = int(re.search(r", (\d+) \(longest\)", page)[1])
    assert "completions per prompt | 4" in page and "tokens to sample per batch at most | 72" in page
    assert f"tokens per step at most | {2 * (longest + 4 * 6)}" in page and "KV cache at most" in page
    rows = json.loads(Path(told["table"]).read_text())
    assert len(rows) == 5
    for row in rows:  # the prompt is read, completions that were cut are not trained under truncation_policy=mask
        assert "what is" in row["segments"][0][0] and row["segments"][0][1] is False
        assert sum(text.startswith("\n— response") for text, _ in row["segments"]) == 4
    first_metric = next(i for i, e in enumerate(events) if e["event"] == "metric")
    tried = [e["text"] for e in events[:first_metric] if "dearest micro-batch" in e.get("text", "")]
    assert [t.split("'")[0] for t in tried] == [
        "the policy",
        "the critic",
    ] and f"({2 * (longest + 4 * 6)} tokens)" in tried[0]
    ended = next(int(e["text"].split()[0]) for e in events if "completions tried end" in e.get("text", ""))
    trained = sum(on is True for row in rows for _, on in row["segments"])
    assert trained == ended and any(e.get("code") == "completions_do_not_end" for e in events) == (ended == 0)


def test_rl_that_cannot_hold_its_longest_rollouts_fails_before_the_first_step(tiny, data, spec, monkeypatch):
    def backward(self, group, counts, counted=True):
        raise MemoryError

    monkeypatch.setattr(Trainer, "backward", backward)
    with pytest.raises(TrainingError, match="max_completion_length"):
        execute(spec("rl", RL, {"model": tiny["policy"], "data": data["prompts"]}, "memory"), silent)
    with pytest.raises(ConfigError, match="256 positions; write max_prompt_length"):
        execute(
            spec(
                "rl",
                {**RL, "max_completion_length": 250},
                {"model": tiny["policy"], "data": data["prompts"]},
                "positions",
            ),
            silent,
        )


def test_a_micro_batch_that_does_not_fit_fails_at_once_with_advice(tiny):
    from stages.preflight import try_dearest

    items = text_items(np.random.default_rng(0))
    trainer = Trainer(load_policy(tiny["policy"]), NextToken("token-mean"), OptimizerConfig(), 1)

    def backward(group, counts):
        raise MemoryError

    trainer.backward = backward
    with pytest.raises(TrainingError, match="max_tokens_per_micro_batch"):
        try_dearest(trainer, items, 4)


def test_a_half_precision_model_is_published_in_float32_and_the_log_says_so(tiny, data, spec, tmp_path):
    from transformers import AutoConfig

    load_policy(tiny["policy"], dtype=torch.bfloat16).save_pretrained(tmp_path / "half")
    load_tokenizer(tiny["policy"]).save_pretrained(tmp_path / "half")
    for path, said in ((str(tmp_path / "half"), True), (tiny["policy"], False)):
        events = []
        result = execute(
            spec("sft", {**SFT, "max_steps": 1}, {"model": path, "data": data["demonstrations"]}, Path(path).name),
            events.append,
        )
        assert AutoConfig.from_pretrained(result["outputs"]["model"]["path"]).dtype == torch.float32
        assert (
            any(
                "stored as bfloat16; the new weights are published as they were computed, in float32" in str(e)
                for e in events
            )
            is said
        )


@pytest.mark.parametrize(
    "stage,rows", (("sft", "demonstrations"), ("align", "pairs"), ("reward_model", "pairs"), ("rl", "prompts"))
)
def test_a_token_that_only_the_tokenizer_has_is_named_before_training(tiny, data, spec, tmp_path, stage, rows):
    """Added to the tokenizer and the chat template without rows in the embedding."""
    path = tmp_path / "added"
    load_policy(tiny["policy"]).save_pretrained(path)
    tokenizer = load_tokenizer(tiny["policy"])
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|new|>"]})
    tokenizer.chat_template = tokenizer.chat_template.replace("<|im_start|>", "<|new|>")
    tokenizer.save_pretrained(path)
    config = {"max_steps": 1, "max_completion_length": 4} if stage == "rl" else {"max_steps": 1, "max_length": 96}
    with pytest.raises(
        TrainingError,
        match=r"the token '<\|new\|>', id \d+, and the model's embedding has \d+ rows.*resize_token_embeddings",
    ):
        execute(spec(stage, config, {"model": str(path), "data": data[rows]}, "added"), silent)
