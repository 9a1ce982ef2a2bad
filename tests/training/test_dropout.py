"""lora_dropout: peft's formula with masks of our own, which are the same however a step is cut, and nowhere but in
training.
"""

import pickle

import numpy as np
import peft  # noqa: F401  (with what it imports, before in_float64 renames types)
import pytest
import safetensors.torch  # noqa: F401
import torch

from stages.batching import collate, make_item
from stages.models import dropout
from stages.models.adapters import add_lora
from stages.models.dropout import Dropped, Places, mixed_, mixed_numpy
from stages.models.modeling import ModelError, hidden_states, target_logps
from stages.running import ranks
from stages.settings import OptimizerConfig
from stages.training import Sums, Trainer
from tests.architectures import build, in_float64

P = 0.25
FAMILIES = ("llama", "qwen3", "gemma2", "phi3", "olmo2", "mixtral")


class Likelihood:
    def counts(self, items):
        return {"tokens": float(sum(i.n_targets for i in items))}

    def __call__(self, model, batch):
        return Sums({"nll": (-target_logps(model, batch)[0].sum(), "tokens")})


def rows_of(rng, n=8):
    found = []
    for i in range(n):
        responses = [rng.integers(3, 97, rng.integers(1, 12)).tolist() for _ in range(1 + i % 4)]
        found.append(
            make_item(
                f"row-{i}",
                rng.integers(3, 97, rng.integers(1, 20)).tolist() if i % 3 else [],
                responses,
                [[1] * len(r) for r in responses],
                by_response=(),
            )
        )
    return found


def adapted(name, p=P, dtype=torch.float64, **config):
    model = add_lora(build(name, dtype), OptimizerConfig(lora_rank=3, lora_dropout=p, **config), seed=7)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for n, parameter in model.named_parameters():
            if ".lora_" in n:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return model


def step(model, items, budget=10**6, at=0, **config):
    trainer = Trainer(
        model,
        Likelihood(),
        OptimizerConfig(
            max_tokens_per_micro_batch=budget,
            max_grad_norm=1e9,
            learning_rate=1e-12,
            lora_rank=3,
            lora_dropout=P,
            **config,
        ),
        9,
    )
    trainer.step_index = at
    metrics = trainer.step(items)
    return metrics["loss"], {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def same(one, other, tolerance=1e-10):
    scale = max(float(g.abs().max()) for g in one[1].values())
    return (
        set(one[1]) == set(other[1])
        and one[0] == pytest.approx(other[0], rel=tolerance)
        and all(float((other[1][n] - g).abs().max()) < tolerance * scale for n, g in one[1].items())
    )


@pytest.mark.parametrize("name", FAMILIES)
def test_own_and_model_forward_have_the_same_masks_however_a_step_is_cut(name):
    """Loss and every gradient in float64, also against autograd through peft's own layers."""
    items = rows_of(np.random.default_rng(2))
    with in_float64():
        targets = {"lora_targets": "q_proj,v_proj,o_proj"} if name == "mixtral" else {}
        first = step(adapted(name, **targets), items)
        for budget, more in (
            (40, {}),
            (1, {}),
            (10**6, {"forward": "model"}),
            (40, {"forward": "model"}),
            (40, {"activation_checkpointing": True}),
            (40, {"activation_checkpointing": True, "forward": "model"}),
            (40, {"packing": "best_fit"}),
        ):
            assert same(
                first, step(adapted(name, **targets), items[::-1] if budget == 40 else items, budget, **more)
            ), (budget, more)
        assert not same(first, step(adapted(name, **targets), items, at=1), 1e-3)  # drawn anew at every step


def test_values_are_those_of_the_formula():
    """x W' + scale * (mask * x) A' B' of one layer, the masks those that the layer says."""
    with in_float64():
        model = adapted("llama")
        item = make_item("row-3", [5, 6, 7], [[8, 9]], [[1, 1]])
        batch, layer = collate([item]), model.base_model.model.model.layers[0].self_attn.q_proj
        places, x = dropout.places_of(model), torch.randn(5, 32, dtype=torch.float64)
        drop = layer.lora_dropout["default"]
        with places.at_step(4):
            from stages.batching import pad

            places.in_rows(batch, pad(batch))
            out = layer(x)
            mask = drop.mask(places.of(batch), 32, torch.float64)
        wanted = (
            x @ layer.base_layer.weight.T
            + layer.base_layer.bias
            + layer.scaling["default"]
            * ((x * mask) @ layer.lora_A["default"].weight.T)
            @ layer.lora_B["default"].weight.T
        )
        assert torch.allclose(out, wanted, atol=1e-12) and set(mask.unique().tolist()) == {0.0, 1 / (1 - P)}
        # outside of a step
        assert torch.allclose(
            layer(x),
            layer.base_layer(x)
            + layer.scaling["default"] * (x @ layer.lora_A["default"].weight.T) @ layer.lora_B["default"].weight.T,
            atol=1e-12,
        )


def test_masks_are_even_and_independent():
    """Share of zeros, and correlation between tokens, features, layers, steps, rows and responses, within five standard
    errors.
    """
    places = Places(11)
    drops = [Dropped(0.3, dropout.seed_for(11, "", "layer", str(k)), places) for k in range(2)]
    batch = collate(
        [
            make_item(name, list(range(200)), [list(range(100)), list(range(100))], [[1] * 100] * 2)
            for name in ("a", "b")
        ]
    )
    found = []
    for at in (0, 1):
        with places.at_step(at):
            found += [drop.mask(places.of(batch), 64, torch.float64) for drop in drops]
    kept = torch.stack([m > 0 for m in found]).double()  # [4, 800, 64]
    n = kept[0].numel()
    assert float((kept.mean((1, 2)) - 0.7).abs().max()) < 5 * (0.21 / n) ** 0.5
    z = (kept - 0.7) / 0.21**0.5
    pairs = [
        (z[0], z[1]),
        (z[0], z[2]),
        (z[0][:400], z[0][400:]),
        (z[0][200:300], z[0][300:400]),
        (z[0][:-1], z[0][1:]),
        (z[0][:, :-1], z[0][:, 1:]),
        (z[0][:-1, 1:], z[0][1:, :-1]),
    ]
    for a, b in pairs:
        assert abs(float((a * b).mean())) < 5 / a.numel() ** 0.5
    assert (
        float(kept[0].mean(1).std()) < 1.3 * (0.21 / 64) ** 0.5
        and float(kept[0].mean(0).std()) < 1.3 * (0.21 / 800) ** 0.5
    )


def test_mixing_is_splitmix64():
    states = np.arange(1, 4, dtype=np.uint64) * np.uint64(dropout.GAMMA)
    wanted = [16294208416658607535, 7960286522194355700, 487617019471545679]  # SplitMix64 from the state 0
    assert mixed_numpy(states).tolist() == wanted
    assert mixed_(torch.as_tensor(states.view(np.int64)).clone()).numpy().view(np.uint64).tolist() == wanted


def test_nothing_but_training_has_dropout():
    items = rows_of(np.random.default_rng(3))
    with in_float64():
        plain, with_dropout = adapted("llama", 0.0), adapted("llama")
        trainer = Trainer(with_dropout, Likelihood(), OptimizerConfig(lora_rank=3, lora_dropout=P), 9)
        assert (
            trainer.evaluate(items)["loss"]
            == Trainer(plain, Likelihood(), OptimizerConfig(lora_rank=3), 9).evaluate(items)["loss"]
        )
        trainer.step(items[:2])
        batch = collate(items)
        assert dropout.active(with_dropout) is None and torch.equal(
            hidden_states(with_dropout, batch), hidden_states(with_dropout, batch)
        )
    assert dropout.places_of(plain) is None and not any(isinstance(m, Dropped) for m in plain.modules())
    assert all(isinstance(m, torch.nn.Identity) for n, m in plain.named_modules() if n.endswith("lora_dropout.default"))


def test_parts_of_a_group_have_the_masks_of_the_whole():
    rng = np.random.default_rng(5)
    responses = [rng.integers(3, 97, 9).tolist() for _ in range(6)]
    item = make_item("group", rng.integers(3, 97, 30).tolist(), responses, [[1] * 9] * 6, by_response=())
    with in_float64():
        for forward in ("auto", "model"):
            assert same(
                step(adapted("llama"), [item], forward=forward), step(adapted("llama"), [item], 50, forward=forward)
            )


def test_what_has_no_place_for_it_is_refused():
    with pytest.raises(ValueError, match="lora_dropout=0.1 would change nothing.*lora_rank=16"):
        OptimizerConfig(lora_dropout=0.1)
    for more, text in (({"lora_dora": True}, "lora_dora=false"), ({"forward": "compiled"}, "forward=auto")):
        with pytest.raises(ValueError, match=text):
            OptimizerConfig(lora_rank=2, lora_dropout=0.1, **more)
    with pytest.raises(ModelError, match="names the output layer.*lora_dropout=0"):
        add_lora(build("llama"), OptimizerConfig(lora_rank=2, lora_dropout=0.1, lora_targets="q_proj,lm_head"), seed=1)


def on_ranks(out, sharding):
    torch.set_num_threads(1)
    from stages.models.sharding import whole

    with in_float64():
        model = adapted("llama")
        loss, _ = step(
            model,
            rows_of(np.random.default_rng(8)),
            40,
            sharding=sharding,
            forward="model" if sharding == "full" else "auto",
        )
        found = loss, {n: whole(p.grad).numpy() for n, p in model.named_parameters() if p.grad is not None}
    if ranks.rank() == 0:
        with open(out, "wb") as file:
            pickle.dump(found, file)


@pytest.mark.parametrize("sharding", ["none", "full"])
def test_two_ranks_have_the_masks_of_one(tmp_path, forks, sharding):
    for name, count in (("one", 1), ("two", 2)):
        forks.run(tmp_path / name, sharding, target="tests.training.test_dropout:on_ranks", ranks=count)
    one, two = (
        (loss, {n: torch.as_tensor(g) for n, g in grads.items()})
        for loss, grads in (pickle.loads((tmp_path / name).read_bytes()) for name in ("one", "two"))
    )
    assert same(one, two)


STAGES = {
    "sft": ({"batch_size": 8}, "demonstrations"),
    "align": ({"batch_size": 8}, "pairs"),
    "reward_model": ({"batch_size": 8}, "pairs"),
    "rl": (
        {
            "preset": "rloo",
            "prompts_per_step": 4,
            "num_generations": 2,
            "max_completion_length": 4,
            "reward_override": "random",
            "rewards": [{"name": "length", "kind": "length", "max_length": 3, "cache_length": 3}],
        },
        "prompts",
    ),
}


@pytest.mark.parametrize("stage", STAGES)
def test_stages_train_with_it(stage, tiny, data, spec):
    import json

    from stages.harness import execute
    from tests.common import silent

    config, rows = STAGES[stage]
    losses = {}
    for name, more in (
        ("none", {}),
        ("dropped", {"lora_dropout": 0.4}),
        ("again", {"lora_dropout": 0.4, "max_tokens_per_micro_batch": 64}),
    ):
        made = spec(
            stage,
            {"max_steps": 2, "lora_rank": 4, "learning_rate": 1e-2, **config, **more},
            {"model": tiny["policy"], "data": data[rows]},
            name,
        )
        execute(made, silent)
        losses[name] = [
            json.loads(line)["metrics"].get("grad_norm") for line in open(made["workdir"] + "/metrics.jsonl")
        ]
        losses[name] = [x for x in losses[name] if x is not None]
    assert losses["none"] != losses["dropped"] and losses["dropped"] == pytest.approx(losses["again"], rel=1e-3)
    if stage != "reward_model":  # whose adapter is merged and not kept
        assert (
            json.loads(open(made["workdir"] + "/out/model/adapter/adapter_config.json").read())["lora_dropout"] == 0.4
        )


def test_ratios_to_old_log_probs_are_refused():
    from stages.rl import Config, resolve_preset

    for preset in ("grpo", "ppo", "sppo", "gspo"):
        with pytest.raises(ValueError, match="lora_dropout=0.1.*old log-probs.*preset=rloo"):
            resolve_preset(Config(preset=preset, lora_rank=4, lora_dropout=0.1))
    resolve_preset(Config(preset="rloo", lora_rank=4, lora_dropout=0.1))
