"""The load-balancing loss of mixtures of experts: transformers' number and gradient, and the same whatever a step is
cut into.
"""

import importlib
import pickle

import numpy as np
import pytest
import torch

from stages.batching import collate, make_item
from stages.models import balance
from stages.models.balance import Balanced, load_balancing_loss, routers_of
from stages.models.experts import routed
from stages.models.modeling import hidden_states
from stages.running import ranks
from stages.settings import OptimizerConfig
from stages.training import Sums, Trainer, TrainingError
from tests.architectures import build, in_float64

MIXTURES = ("mixtral", "qwen3-moe", "olmoe")


def by_hand(logits, mask, k):
    """In float64 by loops: logits per layer [B, T, E], mask [B, T]."""
    experts, rows = logits[0].shape[-1], 0
    chosen, given = [0.0] * experts, [torch.zeros((), dtype=torch.float64)] * experts
    for layer in logits:
        for b, t in np.argwhere(mask):
            p = torch.softmax(layer[b, t].double(), -1)
            for e in sorted(range(experts), key=lambda e: -float(p.detach()[e]))[:k]:
                chosen[e] += 1
            given = [g + p[e] for e, g in enumerate(given)]
            rows += 1
    return experts * sum(c / rows * g / rows for c, g in zip(chosen, given))


class Nothing:
    """An objective whose loss is 0 whatever the model does: the gradient is the load-balancing loss's alone."""

    def counts(self, items):
        return {"items": float(len(items))}

    def __call__(self, model, batch):
        states = hidden_states(model, batch, batch.src_N)
        return Sums({"nothing": (0.0 * states.sum(), "items")})


def rows_of(rng, n=9):
    found = []
    for i in range(n):
        prompt = rng.integers(3, 97, rng.integers(2, 20)).tolist()
        responses = [rng.integers(3, 97, rng.integers(1, 12)).tolist() for _ in range(1 + i % 3)]
        masks = [[1] * len(r) for r in responses]
        if i == 5:
            masks[0] = [0] * len(responses[0])
        found.append(make_item(f"row-{i}", prompt, responses, masks, by_response=()))
    return found


def theirs(model, items):
    """The loss of transformers' own forward over padded rows, prompt and response each; responses without a target are
    no rows.
    """
    rows = [[*i.prompt.tolist(), *r.tolist()] for i in items for r, m in zip(i.responses, i.masks) if m.any()]
    longest = max(map(len, rows)) + 3
    ids = torch.tensor([r + [0] * (longest - len(r)) for r in rows])
    mask = torch.tensor([[1] * len(r) + [0] * (longest - len(r)) for r in rows])
    out = model(input_ids=ids, attention_mask=mask, output_router_logits=True, use_cache=False)
    logits = [x.view(*ids.shape, -1) for x in out.router_logits]
    module = importlib.import_module(type(model).__module__)
    k = model.config.num_experts_per_tok
    float32 = module.load_balancing_loss_func(out.router_logits, logits[0].shape[-1], k, mask)
    return by_hand(logits, mask.numpy(), k), float32


def trained(model, items, budget, **config):
    settings = OptimizerConfig(
        router_aux_loss_coef=0.3, max_tokens_per_micro_batch=budget, max_grad_norm=1e9, learning_rate=1e-12, **config
    )
    trainer = Trainer(model, Nothing(), settings, 1)
    metrics = trainer.step(items)
    return metrics, {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}, trainer


@pytest.mark.parametrize("forward", ["auto", "model"])
@pytest.mark.parametrize("name", MIXTURES)
def test_value_and_gradient_are_those_of_transformers_however_a_step_is_cut(name, forward):
    items = rows_of(np.random.default_rng(3))
    with in_float64():
        model = build(name, torch.float64)
        wanted, float32 = theirs(model, items)
        assert float(float32) == pytest.approx(float(wanted), rel=1e-6)  # which sums in float32
        (0.3 * wanted).backward()
        gradient = {
            n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None and p.grad.abs().max() > 0
        }
        scale = max(float(g.abs().max()) for g in gradient.values())
        assert any("gate.weight" in n for n in gradient) and len(gradient) > 5
        for budget, more in ((10**6, {}), (60, {}), (1, {}), (60, {"activation_checkpointing": True})):
            other = build(name, torch.float64)
            metrics, found, _ = trained(other, items, budget, forward=forward, **more)
            assert metrics["aux_loss"] == pytest.approx(float(wanted), rel=1e-12) and metrics["loss"] == metrics[
                "router_aux"
            ] == pytest.approx(0.3 * float(wanted), rel=1e-12)
            for n, g in gradient.items():
                assert float((found[n] - g).abs().max()) < 1e-11 * scale, (budget, n)


def test_even_loads_have_the_least_loss_and_one_expert_the_most():
    assert float(load_balancing_loss(torch.full((8,), 2 / 8), torch.full((8,), 1 / 8))) == pytest.approx(2)  # k
    one = torch.zeros(8)
    one[3] = 1.0
    assert float(load_balancing_loss(one, one)) == 8
    sums, counts = routed(torch.tensor([[5.0, 1.0, 0.0], [0.0, 9.0, 1.0]]), 2, torch.tensor([1.0, 3.0]))
    assert counts.tolist() == [1.0, 4.0, 3.0] and float(sums.sum()) == pytest.approx(4)


def test_metrics_say_how_the_experts_are_loaded():
    items = rows_of(np.random.default_rng(4))
    model = build("qwen3-moe", torch.float64)
    with in_float64():
        metrics, _, trainer = trained(model, items, 60)
        batch = collate([i for i in items], "cpu")
        loads = np.zeros(4)
        layer = model.model.layers[1].mlp.gate
        seen = []
        handle = layer.register_forward_hook(lambda m, a, out: seen.append(out[2]))
        model._posttrain_lean = False
        with torch.no_grad():
            for item in items:
                for response, mask in zip(item.responses, item.masks):
                    if mask.any():
                        model(input_ids=torch.tensor([[*item.prompt.tolist(), *response.tolist()]]))
        handle.remove()
    for chosen in seen:
        loads += np.bincount(chosen.flatten().numpy(), minlength=4)
    relative = loads / loads.mean()
    assert [metrics[f"router/load/{e:02d}"] for e in range(4)] == pytest.approx(relative.tolist())
    assert (
        metrics["router/violation_max"] == metrics["router/violation_mean"] == pytest.approx(relative.max() - 1)
        and metrics["router/unused_experts"] == 0
    )
    assert (
        loads.sum() == 2 * trainer.objective.counts(items)["router_tokens"]
        and float(batch.ids_U.numel()) < loads.sum() / 2
    )


def test_validation_and_zero_have_no_such_loss():
    items, model = rows_of(np.random.default_rng(5)), build("mixtral")
    _, _, trainer = trained(model, items, 60)
    assert "router_aux" not in trainer.evaluate(items) and trainer.evaluate(items)["loss"] == 0
    plain = Trainer(model, Nothing(), OptimizerConfig(), 1)
    assert not isinstance(plain.objective, Balanced) and "aux_loss" not in plain.step(items)


def test_who_has_such_a_loss():
    from stages.sft import Config as SFT

    mixture = build("mixtral", router_aux_loss_coef=0.02)
    assert balance.coefficient(mixture, SFT()) == 0.02 and balance.coefficient(
        mixture, SFT(router_aux_loss_coef=0)
    ) == 0 == balance.coefficient(mixture, OptimizerConfig())
    assert balance.coefficient(build("llama"), SFT()) == 0 and routers_of(build("deepseek-v3")) is None
    assert balance.coefficient(build("gpt-oss"), OptimizerConfig(router_aux_loss_coef=0.1)) == 0.1
    with pytest.raises(TrainingError, match="router_aux_loss_coef=0.1: LlamaForCausalLM has no routers"):
        Trainer(build("llama"), Nothing(), OptimizerConfig(router_aux_loss_coef=0.1), 1)


@pytest.mark.parametrize("name", ["gpt-oss", "qwen2-moe", "mixtral window"])
def test_other_mixtures_go_through_their_own_code(name):
    items = rows_of(np.random.default_rng(6))
    with in_float64():
        model = build(name, torch.float64)
        metrics, gradient, _ = trained(model, items, 70)
        wanted, _ = theirs(build(name, torch.float64), items)
    assert metrics["aux_loss"] == pytest.approx(float(wanted), rel=1e-9) and ranks.world_size() == 1


def on_ranks(out, sharding):
    torch.set_num_threads(1)
    from stages.models.sharding import whole

    found = {}
    with in_float64():
        for name in MIXTURES:
            for count in (9, 1):  # one row: the other rank has none of its own
                model = build(name, torch.float64)
                metrics, _, _ = trained(
                    model,
                    rows_of(np.random.default_rng(8), count),
                    60,
                    sharding=sharding,
                    forward="model" if sharding == "full" else "auto",
                )
                found[name, count] = (
                    metrics,
                    {n: whole(p.grad).numpy() for n, p in model.named_parameters() if p.grad is not None},
                )
    if ranks.rank() == 0:
        with open(out, "wb") as file:
            pickle.dump(found, file)


@pytest.mark.parametrize("sharding", ["none", "full"])
def test_two_ranks_have_the_loss_of_one(tmp_path, forks, sharding):
    for name, count in (("one", 1), ("two", 2)):
        forks.run(tmp_path / name, sharding, target="tests.training.test_balance:on_ranks", ranks=count)
    one, two = (pickle.loads((tmp_path / name).read_bytes()) for name in ("one", "two"))
    for name, (metrics, gradient) in one.items():
        assert two[name][0] == pytest.approx(metrics, rel=1e-11)
        scale = max(float(abs(g).max()) for g in gradient.values())
        for n, g in gradient.items():
            assert float(abs(two[name][1][n] - g).max()) < 1e-11 * scale, (name, n)


def test_a_resumed_run_has_the_loss_of_its_tokens(tmp_path, data, tiny, spec, monkeypatch):
    """A head is tried out once, on four tokens, the first time it is asked for: in a resumed run inside a step, whose
    routers are watched.
    """
    from transformers import AutoTokenizer

    from stages.harness import Stage, execute

    monkeypatch.setenv("POSTTRAIN_CHECKPOINT_SECONDS", "0")
    tokenizer = AutoTokenizer.from_pretrained(tiny["policy"])
    build(
        "olmoe",
        vocab_size=len(tokenizer),
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        pad_token_id=tokenizer.pad_token_id,
    ).save_pretrained(tmp_path / "olmoe")
    tokenizer.save_pretrained(tmp_path / "olmoe")
    config = {
        "max_steps": 3,
        "batch_size": 6,
        "learning_rate": 1e-3,
        "router_aux_loss_coef": 0.1,
        "eval_rows": 0,
    }
    save = Stage.save_checkpoint

    def run(name):
        execute(
            spec("sft", config, {"model": str(tmp_path / "olmoe"), "data": data["demonstrations"]}, name),
            lambda event: None,
        )

    def then_killed(stage, *args, **more):
        save(stage, *args, **more)
        raise KeyboardInterrupt

    run("whole")
    monkeypatch.setattr(Stage, "save_checkpoint", then_killed)
    with pytest.raises(KeyboardInterrupt):
        run("killed")
    monkeypatch.setattr(Stage, "save_checkpoint", save)
    run("killed")
    assert (tmp_path / "killed/metrics.jsonl").read_text() == (tmp_path / "whole/metrics.jsonl").read_text()
    assert (tmp_path / "killed/out/model/model.safetensors").read_bytes() == (
        tmp_path / "whole/out/model/model.safetensors"
    ).read_bytes()


def test_what_has_no_place_for_it_is_refused():
    from stages.sft import Config as SFT

    with pytest.raises(ValueError, match="router_aux_loss_coef.*write forward=auto"):
        OptimizerConfig(router_aux_loss_coef=0.1, forward="compiled")
    assert balance.coefficient(build("mixtral"), SFT(forward="compiled")) == 0


def test_sft_and_rl_train_mixtures_with_it(tmp_path, tiny, data, spec):
    from stages.chat import load_tokenizer
    from stages.harness import execute
    from tests.common import silent

    root, tokenizer = str(tmp_path / "mixture"), load_tokenizer(tiny["policy"])
    build("mixtral", vocab_size=len(tokenizer)).save_pretrained(root)
    tokenizer.save_pretrained(root)
    for stage, config, rows in (
        ("sft", {"batch_size": 8, "max_tokens_per_micro_batch": 64}, "demonstrations"),
        (
            "rl",
            {
                "preset": "grpo",
                "prompts_per_step": 4,
                "num_generations": 2,
                "max_completion_length": 4,
                "rewards": [{"name": "length", "kind": "length", "max_length": 3, "cache_length": 3}],
            },
            "prompts",
        ),
    ):
        for coefficient in (None, 0.5):
            made = spec(
                stage,
                {"max_steps": 2, **config, **({} if coefficient is None else {"router_aux_loss_coef": coefficient})},
                {"model": root, "data": data[rows]},
                f"{stage}-{coefficient}",
            )
            execute(made, silent)
            text = open(made["workdir"] + "/metrics.jsonl").read()
            assert ("aux_loss" in text) == (stage == "sft" or coefficient is not None)
