"""The memory plan of a training stage against what it really holds, and what is refused before anything is loaded."""

import functools
import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from stages.batching import collate, make_item
from stages.decoding.sampler import Sampler
from stages.harness import execute
from stages.models import memory
from stages.models.modeling import hidden_states, load_policy, policy_to_train
from stages.preflight import held_bytes
from stages.registry import get_spec
from stages.spec import ConfigError
from stages.training import Trainer, products
from tasks.run import run_stage
from tests.common import silent
from tests.second_device import DEVICE, second_device

SFT = {"learning_rate": 1e-3, "batch_size": 4, "max_length": 96, "max_tokens_per_micro_batch": 256}
RL = {
    "preset": "ppo",
    "beta": 0.1,
    "kl_coef": 0,
    "max_steps": 1,
    "prompts_per_step": 2,
    "num_generations": 2,
    "max_completion_length": 4,
    "rewards": [{"kind": "length"}],
}


def told(events):
    return next(e["text"] for e in events if e["event"] == "log" and e["text"].startswith("memory: "))


def test_the_shape_is_that_of_the_loaded_model(tiny):
    shape = memory.shape_of(tiny["policy"])
    assert shape.parameters == sum(p.numel() for p in load_policy(tiny["policy"]).parameters())
    assert shape.config["num_hidden_layers"] == 2 and memory.shape_of("/nonexistent") is None


@pytest.mark.parametrize("targets", ("all-linear", "q_proj,v_proj"))
def test_adapters_have_the_parameters_that_peft_gives_them(tiny, targets):
    class Stage:
        config = get_spec("sft").config(lora_rank=4, lora_targets=targets)
        device, inputs = "cpu", {}
        path = staticmethod(lambda name: tiny["policy"])
        log = seed_for = staticmethod(lambda *a: 0)

    adapted = sum(p.numel() for p in policy_to_train(Stage).parameters() if p.requires_grad)
    assert memory.lora_parameters(memory.shape_of(tiny["policy"]), Stage.config) == adapted > 0


@pytest.mark.parametrize(
    "changes",
    ({}, {"lora_rank": 4, "kl_coef": 0.1, "beta": 0}, {"ref_mode": "ema", "ema_decay": 0.9}, {"critic_mode": "shared"}),
)
def test_the_plan_of_rl_is_what_it_holds(tiny, data, spec, monkeypatch, changes):
    """Against an independent count: every storage of every model that the stage has, gradients, moments and averages,
    just before training.
    """
    from stages import preflight

    held = []

    def rl_preflight(stage, trainer, source):
        trainers = [t for t in (trainer, getattr(source.critic, "trainer", None)) if t is not None]
        held.append(
            sum(
                held_bytes(
                    [
                        m
                        for m in (
                            trainer.model,
                            source.policy.model,
                            source.reference,
                            source.old,
                            getattr(source.critic, "model", None),
                        )
                        if m is not None
                    ],
                    trainers,
                )
            )
        )
        raise InterruptedError

    monkeypatch.setattr(preflight, "rl_preflight", rl_preflight)
    events = []
    inputs = {"model": tiny["policy"], "data": data["prompts"]}
    with pytest.raises(InterruptedError):
        execute(spec("rl", {**RL, **changes}, inputs, "held"), events.append)
    config = get_spec("rl").config(**{**RL, **changes})
    shapes = {"model": memory.shape_of(tiny["policy"])}
    found = memory.need(get_spec("rl").roles(config, set(inputs)), shapes, config)
    assert found.states == pytest.approx(held[0], rel=0.02)  # heads of critics come on top
    assert f"{memory.shown(found.states)} for weights" in told(events) and "KV cache" in told(events)


@pytest.mark.parametrize(
    "stage,changes,inputs",
    (
        ("sft", {"ema_decay": 0.9, "eval_every": 1, "select_by": "loss"}, {"data": "demonstrations"}),
        ("sft", {"bema": {"update_freq": 1}}, {"data": "demonstrations"}),
        ("sft", {"lora_rank": 4}, {"data": "demonstrations"}),
        ("align", {"method": "dpo", "reference_update": "ema"}, {"data": "pairs"}),
        ("align", {"method": "dpo"}, {"data": "pairs", "reference": "tiny"}),
        ("reward_model", {}, {"data": "pairs"}),
        ("distill", {"method": "logit"}, {"data": "demonstrations", "teacher": "tiny"}),
        ("distill", {"method": "context", "context": "Be kind."}, {"data": "demonstrations"}),
    ),
)
def test_the_plan_of_other_stages_is_what_they_hold(tiny, data, spec, monkeypatch, stage, changes, inputs):
    """Against every model that is alive when training begins, gradients, moments and averages; heads of reward models
    come on top.
    """
    import gc

    from transformers import PreTrainedModel

    alive = lambda: {id(one): one for one in gc.get_objects() if isinstance(one, PreTrainedModel)}
    gc.collect()
    before, held = set(alive()), []

    def looked_at(running, trainer, *arguments, **more):
        gc.collect()
        held.append(sum(held_bytes([one for key, one in alive().items() if key not in before], [trainer])))
        raise InterruptedError

    monkeypatch.setattr("stages.preflight.preflight", looked_at)
    given = {
        "model": tiny["policy"],
        **{name: tiny["policy"] if what == "tiny" else data[what] for name, what in inputs.items()},
    }
    config = get_spec(stage).config(**{**SFT, "max_steps": 1, **changes})
    with pytest.raises(InterruptedError):
        execute(spec(stage, {**SFT, "max_steps": 1, **changes}, given, "held"), silent)
    shape = memory.shape_of(tiny["policy"])
    found = memory.need(
        get_spec(stage).roles(config, set(given)), {name: shape for name in given if name != "data"}, config
    )
    # the best weights are kept from the first validation pass on
    best = 4 * shape.parameters if "select_by" in changes else 0
    assert found.states == pytest.approx(held[0] + best, rel=0.02)


def test_the_previous_reward_model_is_loaded_when_training_holds_nothing_any_more(tiny, data, spec, monkeypatch):
    """The plan has one reward model: the earlier one is compared with it once gradients and moments are gone, not on
    top of them.
    """
    import gc

    import torch

    from stages import reward_model

    alive = lambda: {id(one): one for one in gc.get_objects() if isinstance(one, torch.optim.Optimizer) and one.state}
    gc.collect()
    before, left = set(alive()), []

    def compared(*arguments):
        gc.collect()
        left.append([one for key, one in alive().items() if key not in before])
        return {}

    monkeypatch.setattr(reward_model, "drift", compared)
    execute(
        spec(
            "reward_model",
            {**SFT, "max_steps": 1},
            {"model": tiny["policy"], "data": data["pairs"], "previous": tiny["reward"]},
            "previous",
        ),
        silent,
    )
    assert left == [[]]


def test_a_plan_that_cannot_fit_is_refused_before_anything_is_loaded(tiny, data, spec, monkeypatch):
    states = 16 * memory.shape_of(tiny["policy"]).parameters
    config, inputs = {**SFT, "max_steps": 1}, {"model": tiny["policy"], "data": data["demonstrations"]}
    small = {"device_memory_gib": 0.6 * states / memory.GIB}
    monkeypatch.setattr("stages.models.modeling.load_policy", lambda *a, **k: pytest.fail("loaded"))
    with pytest.raises(
        ConfigError,
        match=(
            r"sft cannot fit on this device: it needs 0.\d+ MiB for weights, .*lora_rank=16 \(needs 0.\d+"
            r" MiB.*sharding=full with --devices 2.*memory_check=warn"
        ),
    ):
        execute(spec("sft", {**config, **small}, inputs, "small"), silent)
    with pytest.raises(
        ConfigError, match="a plan without a resident reference: beta=0 kl_coef=0.*; or critic_mode=shared"
    ):
        execute(spec("rl", {**RL, **small}, {"model": tiny["policy"], "data": data["prompts"]}, "rl"), silent)
    monkeypatch.undo()
    events = []
    result = execute(spec("sft", {**config, **small, "memory_check": "warn"}, inputs, "warned"), events.append)
    plain = execute(spec("sft", config, inputs, "plain"), silent)
    assert any(w["code"] == "memory" for w in result["warnings"]) and not any(
        w["code"] == "memory" for w in plain["warnings"]
    )
    assert result["summary"] == plain["summary"]


def test_what_fits_by_certain_bytes_only_is_a_warning(tiny, data, spec, monkeypatch):
    config = get_spec("rl").config(**RL)
    shapes = {"model": memory.shape_of(tiny["policy"])}
    found = memory.need(get_spec("rl").roles(config, {"model", "data"}), shapes, config)
    assert set(found.caches) == {memory.SAMPLED, "logits"}
    # max_prompt_length is 512 by default, the model has 256 positions
    text, rows, length = shapes["model"].config, 4, 256
    cache, weights = 2 * text["num_hidden_layers"] * 32 * rows * length * 4, 4 * shapes["model"].parameters
    assert found.caches[memory.SAMPLED] == cache + weights
    low = memory.need(
        get_spec("rl").roles(config, {"model", "data"}),
        shapes,
        config.model_copy(update={"sampling_dtype": "bfloat16"}),
    )
    assert low.caches[memory.SAMPLED] == found.caches[memory.SAMPLED] // 2
    agent = memory.need(
        get_spec("rl").roles(config, {"model", "data"}),
        shapes,
        config.model_copy(update={"environment": "tools", "generation_batch": 1}),
    )
    # one row at a time, and all that may be continued
    assert agent.caches[memory.SAMPLED] == cache * (rows + 1) // rows + weights
    monkeypatch.setattr(memory, "KEPT_BYTES", 10)
    agent = memory.need(
        get_spec("rl").roles(config, {"model", "data"}), shapes, config.model_copy(update={"environment": "tools"})
    )
    assert agent.caches[memory.SAMPLED] == found.caches[memory.SAMPLED] + 10
    events, released = [], []
    monkeypatch.setattr(Sampler, "release", lambda sampler: released.append(1))
    result = execute(
        spec(
            "rl",
            {**RL, "device_memory_gib": (found.states + 1) / memory.GIB},
            {"model": tiny["policy"], "data": data["prompts"]},
            "tight",
        ),
        events.append,
    )
    (warned,) = [w["text"] for w in result["warnings"] if w["code"] == "memory"]
    assert "generation_batch or max_completion_length" in warned or "max_tokens_per_micro_batch" in warned
    # where it is tight the sampler keeps nothing while is trained: after the preflight, the step, and at the end
    assert len(released) == 3
    roomy = {**RL, "device_memory_gib": 2 * (found.states + sum(found.caches.values())) / memory.GIB}
    execute(spec("rl", roomy, {"model": tiny["policy"], "data": data["prompts"]}, "roomy"), events.append)
    assert len(released) == 4


def test_sharding_divides_what_is_sharded_and_sampling_needs_a_whole_copy(tiny):
    spec, n = get_spec("rl"), memory.shape_of(tiny["policy"]).parameters
    config = spec.config(**{**RL, "preset": "grpo", "sharding": "full"})
    need = memory.need(
        spec.roles(config, {"model", "data"}), {"model": memory.shape_of(tiny["policy"])}, config, devices=4
    )
    assert need.states == 16 * n // 4 + 4 * n // 4 + 4 * n
    sft = get_spec("sft").config(sharding="full", ema_decay=0.9)
    assert (
        memory.need(
            get_spec("sft").roles(sft, {"model"}), {"model": memory.shape_of(tiny["policy"])}, sft, devices=2
        ).states
        == 20 * n // 2
    )


@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
@pytest.mark.parametrize("kind", ("llama", "qwen3", "gemma2"))
def test_the_estimate_of_activations_is_what_backward_holds(kind, dtype):
    """Against the storages that autograd keeps of a forward pass of our own, weights left out; what is counted besides
    is one layer for gradients.
    """
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(
            kind,
            hidden_size=128,
            intermediate_size=512,
            num_hidden_layers=8,
            num_attention_heads=8,
            num_key_value_heads=4,
            head_dim=16,
            vocab_size=300,
            max_position_embeddings=512,
        )
    )
    config = get_spec("sft").config(compute_dtype=dtype)
    rows = [make_item(str(i), [1] * 20, [[2] * 200], [[1] * 200]) for i in range(8)]
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept, alive = {}, []

    def keep(tensor):
        alive.append(tensor)  # so that no storage takes the address of another
        if (storage := tensor.untyped_storage()).data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), products(config, "cpu"):
        hidden_states(model, collate(rows, "cpu"))
    told = memory.activation_bytes(config, model.config.to_dict()) * 8 * 220
    assert 0.95 < told * 8 / 9 / sum(kept.values()) < 1.4
    sparing = config.model_copy(update={"activation_checkpointing": True})
    assert memory.activation_bytes(sparing, model.config.to_dict()) * 8 * 220 < told / 3


ONE = {
    "num_hidden_layers": 16,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}


@pytest.mark.parametrize(
    "gib, changes, tokens",
    (
        (24, {"compute_dtype": "bfloat16"}, 4096),  # 18.6 GiB of weights and optimizer alone
        (32, {"compute_dtype": "bfloat16"}, 4096),
        (32, {"compute_dtype": "bfloat16", "activation_checkpointing": True}, 16384),
        (40, {"compute_dtype": "bfloat16"}, 8192),
        (80, {"compute_dtype": "bfloat16"}, 16384),
        (80, {}, 16384),
        (24, {"compute_dtype": "bfloat16", "lora_rank": 16, "frozen_dtype": "bfloat16"}, 8192),
    ),
)
def test_a_gpu_takes_as_many_tokens_at_a_time_as_fit(gib, changes, tokens):
    """A Llama of 1.2 billion weights. Where nothing is known of device or model it stays at the default."""
    layer = {"q": (2048, 2048), "k": (512, 2048), "v": (512, 2048), "o": (2048, 2048)}
    layer |= {"gate": (8192, 2048), "up": (8192, 2048), "down": (2048, 8192)}
    matrices = {f"model.layers.{i}.{name}_proj.weight": size for i in range(16) for name, size in layer.items()}
    matrices["model.embed_tokens.weight"] = (128256, 2048)
    shape = memory.Shape(sum(a * b for a, b in matrices.values()), matrices, ONE)
    config = get_spec("sft").config(**changes)
    roles = get_spec("sft").roles(config, {"model", "data"})
    choose = functools.partial(memory.micro_batch_for, roles, {"model": shape}, config)
    assert choose(gib * memory.GIB, 1, "cuda") == tokens
    assert choose(gib * memory.GIB, 1, "cpu") == choose(None, 1, "cuda") == config.micro_batch_tokens == 4096
    assert memory.micro_batch_for(roles, {"model": None}, config, gib * memory.GIB, 1, "cuda") == 4096


def test_the_memory_of_a_gpu_is_that_of_the_smallest_one_seen(tmp_path, monkeypatch):
    """By nvidia-smi, which answers in MiB, and not at all for a GPU that shares the machine's memory."""
    program = tmp_path / "nvidia-smi"
    program.write_text(
        """#!/bin/sh
case "$*" in
  *--query-gpu=memory.total*nounits*--id=1) echo 81559;;
  *--id=2) echo '[N/A]';;
  *--id=*) exit 6;;
  *) printf '81559\\n46068\\n';;
esac
"""
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    found = []
    for visible in ("", "1", "2", "MIG-7"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        found.append(memory.device_bytes("cuda:0", 4))
    assert found == [46068 * 2**20, 81559 * 2**20, None, None]


def test_a_stage_on_a_gpu_chooses_its_micro_batch_unless_it_is_given(tiny, data, spec, monkeypatch):
    inputs = {"model": tiny["policy"], "data": data["demonstrations"]}
    settings = {name: value for name, value in SFT.items() if name != "max_tokens_per_micro_batch"}
    seen = []
    monkeypatch.setattr(
        Trainer, "planned", lambda self, items, of=Trainer.planned: (seen.append(self.config), of(self, items))[1]
    )
    monkeypatch.setattr(memory, "device_bytes", lambda *_: 80 * memory.GIB)

    def run(name, **changes):
        events = []
        with second_device(monkeypatch):
            execute({**spec("sft", settings | changes, inputs, name), "device": DEVICE}, events.append)
        budget = seen[-1].micro_batch_tokens
        seen.clear()
        return budget, [e["text"] for e in events if e["event"] == "log" and e["text"].startswith("micro-batches of")]

    assert run("empty") == (16384, ["micro-batches of 16,384 tokens (max_tokens_per_micro_batch was left empty)"])
    assert run("given", max_tokens_per_micro_batch=300) == (300, [])


def test_a_dry_run_tells_and_refuses(tiny, data, tmp_path, monkeypatch):
    """Shapes of models that are not there yet are those they are trained from."""
    from typer.testing import CliRunner

    from flows.cli import app

    monkeypatch.setenv("POSTTRAIN_HOME", str(tmp_path / "home"))
    command = [
        "run",
        "preference",
        f"data.path={data['pairs']}",
        f"model={tiny['policy']}",
        "sft_first=true",
        "evaluate.max_completion_length=64",
        "--dry-run",
        "--json",
    ]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    plan = {row["step"]: row for row in json.loads(done.stdout.splitlines()[-1])["plan"]}
    assert (
        "MiB of" in plan["sft"]["memory"]
        and plan["dpo"]["memory"] == plan["sft"]["memory"]
        and "memory" not in plan["evaluate_dpo"]
    )
    # a model may be named by the key of the stage that made it
    made = run_stage("merge", {"models.a": tiny["policy"], "models.b": tiny["policy"]}, {"method": "linear"})
    for name in (made.key[:12], f"{made.key[:12]}:model"):
        keyed = [f"model={name}" if word.startswith("model=") else word for word in command]
        done = CliRunner().invoke(app, keyed)
        assert done.exit_code == 0, done.output
        row = next(row for row in json.loads(done.stdout.splitlines()[-1])["plan"] if row["step"] == "sft")
        assert row["memory"] == plan["sft"]["memory"]
    # several machines hold the shards together
    sharded = [*command, "dpo.sharding=full", "--nodes=4", "--node-rank=0", "--rendezvous=h:1"]
    four = {row["step"]: row for row in json.loads(CliRunner().invoke(app, sharded).stdout.splitlines()[-1])["plan"]}
    need = [float(one["dpo"]["memory"].split(" MiB of")[0]) for one in (plan, four)]
    assert need[1] < need[0] / 2 and four["sft"]["memory"] == plan["sft"]["memory"], need
    done = CliRunner().invoke(app, [*command, "dpo.device_memory_gib=1e-4"])
    assert (
        isinstance(done.exception, ConfigError)
        and str(done.exception).startswith("dpo cannot fit")
        and "dpo  " not in str(done.exception)
    )
