"""Memory that does not suffice for a micro-batch: the step is done again in smaller ones and is the same step, and a run
that is killed goes on with them. Steps, gradients and stages are real; only the device is too small.
"""

import json
import os
import time
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from stages.batching import RowTooLarge, per_response, size
from stages.harness import execute
from stages.models.modeling import load_policy
from stages.reward_models.reward_heads import new_reward_model
from stages.running import cuda
from stages.settings import OptimizerConfig
from stages.training import Trainer, TrainingError
from tests.common import silent
from tests.processes import undrawn
from tests.second_device import DEVICE, second_device
from tests.training.test_invariance import complete, objectives
from tests.training.test_resume import outputs


class Full:
    """An objective on a device that holds ``most`` tokens at a time: more of them end its forward, or its backward when
    the gradients of later layers have been added already."""

    def __init__(self, objective, most: int, where: str):
        self.objective, self.most, self.where, self.seen = objective, most, where, []

    def __getattr__(self, name):
        return getattr(self.__dict__["objective"], name)

    def __call__(self, model, batch):
        tokens = len(batch.ids_U)
        self.seen.append(tokens)
        if tokens <= self.most:
            return self.objective(model, batch)
        if self.where == "forward":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        sums = self.objective(model, batch)

        def full(gradient):
            handle.remove()
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")

        handle = model.get_input_embeddings().weight.register_hook(full)  # the last gradient
        return sums


def made(tiny, name):
    objective, make, reward = objectives()[name]
    model = (new_reward_model(tiny["policy"]) if reward else load_policy(tiny["policy"])).double()
    complete(name, objective, lambda: load_policy(tiny["other"]))
    return objective, model, make(np.random.default_rng(0))


def gradients(model):
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize(
    "name, where",
    [
        *((name, "forward") for name in objectives()),
        *(
            (name, "backward")
            for name in ("sft/neftune", "reward_model", "align/dpo", "distill/gold", "rl/ppo", "rl/sppo")
        ),
    ],
)
def test_a_step_in_halves_is_the_same_step(tiny, name, where):
    found = []
    for limited in (False, True):
        objective, model, items = made(tiny, name)
        most = max(map(size, items)) + 1
        if limited:
            objective = Full(objective, most, where)
        trainer = Trainer(model, objective, OptimizerConfig(max_grad_norm=1e9), 3)
        metrics = trainer.step(items)
        found.append((gradients(model), metrics, trainer))
    (whole, wanted, _), (halved, got, trainer) = found
    assert whole.abs().max() > 0 and torch.allclose(halved, whole, rtol=0, atol=1e-12 * float(whole.abs().max()))
    assert got == pytest.approx(wanted, rel=1e-5, abs=1e-7) and got["loss"] == pytest.approx(wanted["loss"], rel=1e-11)
    assert trainer.step_index == 1 and trainer.budget < OptimizerConfig().micro_batch_tokens
    refused = [tokens for tokens in objective.seen if tokens > most]
    assert refused and refused == sorted(refused, reverse=True), "each attempt is smaller than the one before"
    before = len(objective.seen)
    trainer.step(items)
    assert max(objective.seen[before:]) <= most, "what follows has room at once"


@pytest.mark.parametrize(
    "settings, where",
    (
        ({"activation_checkpointing": True}, "backward"),
        ({"lora_rank": 3, "lora_dropout": 0.3}, "forward"),  # the embedding has no gradient
        ({"forward": "model"}, "backward"),
        ({"packing": "best_fit"}, "backward"),
        ({"ema_decay": 0.5, "optimizer": "muon"}, "forward"),
    ),
    ids=str,
)
def test_the_weights_are_those_of_a_run_that_had_room(tiny, settings, where):
    """After some steps, with dropout's masks, averages and the optimizer's state."""
    from stages.models.adapters import add_lora
    from stages.sft import NextToken
    from tests.training.test_invariance import text_items

    found = []
    for limited in (False, True):
        model = load_policy(tiny["policy"]).double()
        config = OptimizerConfig(learning_rate=1e-3, **settings)
        if config.lora_rank:
            model = add_lora(model, config, seed=7)
        objective = NextToken("token-mean")
        if limited:
            objective = Full(objective, 70, where)
        trainer = Trainer(model, objective, config, 3)
        for seed in range(3):
            trainer.step(text_items(np.random.default_rng(seed)))
        found.append(torch.cat([p.detach().flatten() for p in trainer.parameters.values()]))
    exact = 1e-5 if settings.get("forward") or settings.get("optimizer") else 1e-9
    assert torch.allclose(*found, rtol=0, atol=exact) and trainer.budget <= 70


def test_a_trust_region_step_in_halves_is_the_same_step(tiny):
    """Wherever memory ends: in the gradient, in a product with the Fisher matrix, in the line search, when the weights
    have been moved already.
    """
    from stages.policy import trust_region
    from stages.policy.policy_update import PolicyGradient
    from stages.rl import Config, resolve_preset
    from tests.training.test_micro_batches import groups

    def stepped(patch=None):
        config = Config(preset="trpo", num_generations=7, truncation_policy="score", cg_iters=4)
        model = load_policy(tiny["policy"]).double()
        objective = PolicyGradient(resolve_preset(config)[0], config)
        trainer = trust_region.TrustRegionTrainer(model, objective, config, 1)
        if patch is not None:
            patch(trainer)
        metrics = trainer.step(groups(2))
        return trainer, metrics, torch.cat([p.detach().flatten() for p in model.parameters()])

    def full(*given):
        raise torch.OutOfMemoryError("CUDA out of memory")

    def in_gradient(trainer):
        trainer.objective = Full(trainer.objective, 60, "forward")

    def once(name):
        def patch(trainer):
            whole = getattr(trainer, name)

            def first(*given):
                setattr(trainer, name, whole)
                full()

            setattr(trainer, name, first)

        return patch

    _, wanted, weights = stepped()
    assert wanted["trpo/step_fraction"] > 0
    for patch in (in_gradient, once("_fisher_product"), once("_kl_sum")):
        trainer, metrics, found = stepped(patch)
        assert trainer.budget < 4096 and trainer.step_index == 1
        assert torch.allclose(found, weights, rtol=0, atol=1e-7)
        assert metrics == pytest.approx(wanted, rel=1e-4, abs=1e-6)


def test_validation_and_the_norm_of_a_gradient_have_halves_too(tiny):
    found = []
    for limited in (False, True):
        objective, model, items = made(tiny, "sft/token-mean")
        if limited:
            objective = Full(objective, 40, "forward")
        trainer = Trainer(model, objective, OptimizerConfig(), 3)
        found += [trainer.evaluate(items), {"norm": trainer.gradient_norm(items)}]
    assert found[2:] == [pytest.approx(one, rel=1e-6) for one in found[:2]] and trainer.budget <= 40
    assert trainer.step_index == 0 and all(p.grad is None for p in model.parameters())


def test_other_errors_are_not_taken_for_memory(tiny):
    objective, model, items = made(tiny, "sft/token-mean")

    def broken(*given):
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    trainer = Trainer(model, objective, OptimizerConfig(), 3)
    trainer.backward = broken
    with pytest.raises(RuntimeError, match="mat1"):
        trainer.step(items)
    assert trainer.budget == 4096
    for error, memory in (
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory"), True),
        (MemoryError(), True),
        (RuntimeError("CUDA error: device-side assert triggered"), False),
        (ValueError("out of memory"), False),
    ):
        assert cuda.out_of_memory(error) is memory, error


def test_values_of_responses_are_computed_in_halves(tiny):
    """Reference log-probs, scores of reward models, a critic's values."""
    from tests.training.test_invariance import group_items, pair_items

    tried, most = [], 60

    def compute(batch):
        tried.append(len(batch.ids_U))
        if tried[-1] > most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return [[int(ids.sum()), len(ids)] for item in batch.items for ids in item.responses]

    for items in (pair_items(np.random.default_rng(0)), group_items(np.random.default_rng(0))):
        wanted = [[[int(r.sum()), len(r)] for r in item.responses] for item in items]
        assert per_response(items, 10**6, "cpu", compute) == wanted and tried[0] > most
    most = max(map(size, items)) - 1
    longest = max(items, key=size).row_id
    with pytest.raises(RowTooLarge, match=rf"rows {longest}.*this is one row\. Write a lower max_length"):
        per_response(items, 10**6, "cpu", compute)


def test_a_sampler_without_memory_says_what_to_write(tiny, monkeypatch):
    from stages.chat import load_tokenizer
    from stages.decoding import sampler
    from stages.decoding.sampling import SamplingParams

    def full(self):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(sampler._Run, "finish", full)
    engine = sampler.Sampler(load_policy(tiny["policy"]), load_tokenizer(tiny["policy"]), max_batch=6)
    for rows, says in (
        (20, "generation_batch=3 or a lower max_completion_length"),
        (1, "a lower max_completion_length"),
    ):
        with pytest.raises(sampler.SamplerError, match=rf"up to 9 tokens at a time\. Write {says}\.$"):
            engine.generate([[5, 6]], SamplingParams(max_new_tokens=9), [list(range(rows))])


def test_it_is_the_same_step_on_a_device_of_its_own(tiny, data, spec, monkeypatch):
    """What is released there is the device's; the numbers are those of the CPU."""
    config, rows, most, first = STAGES["sft"]
    released, whole, release = [], Trainer._sums, cuda.release

    def sums(self, group):
        if self.step_index >= first and sum(map(size, group)) > most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return whole(self, group)

    monkeypatch.setattr(Trainer, "_sums", sums)
    monkeypatch.setattr(cuda, "release", lambda device: (released.append(device), release(device)))
    told = []
    for device in ("cpu", DEVICE):
        given = {**spec("sft", config, {"model": tiny["policy"], "data": data[rows]}, device[:4]), "device": device}
        with second_device(monkeypatch) if device == DEVICE else nullcontext():
            execute(given, silent)
        lines = (Path(given["workdir"]) / "metrics.jsonl").read_text().splitlines()
        told.append([json.loads(line)["metrics"] for line in lines])
    for there, here in zip(*told, strict=True):
        assert there == pytest.approx(here, rel=1e-3, abs=1e-5)
    assert set(released) == {"cpu", DEVICE} and "micro_batch_tokens" in told[1][-2]


# -- stages ------------------------------------------------------------------------------------------------------------


def full_at_the_update(spec: str) -> int:
    """A stage process whose second optimizer step finds no memory."""

    def average(self):
        if self.step_index == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.\nmore")

    Trainer._average = average
    return undrawn(spec)


def test_memory_that_ends_elsewhere_is_told_with_what_to_do(tiny, data, spec, forks):
    """Weights may have moved there, so nothing is done again."""
    config, rows, *_ = STAGES["sft"]
    spec("sft", config, {"model": tiny["policy"], "data": data[rows]}, "update")
    group = forks.start(spec.path("update"), target="tests.training.test_out_of_memory:full_at_the_update")
    deadline = time.monotonic() + 200
    while group.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    assert group.poll() == 1
    said = group.processes[0].said()
    assert "Tried to allocate 20.00 MiB. The device's memory does not suffice. End what else uses it" in said, said


def test_a_loss_whose_preparation_does_not_fit_is_told_before_the_first_step(tiny):
    from stages.preflight import try_dearest

    objective, model, items = made(tiny, "align/dpo")

    def prepare(step):
        raise torch.OutOfMemoryError("CUDA out of memory")

    trainer = Trainer(model, objective, OptimizerConfig(), 3)
    with pytest.raises(TrainingError, match=r"Write max_tokens_per_micro_batch=2048, or a lower max_length"):
        try_dearest(trainer, items, 4, prepare)


def limited(spec: str, most: str, first: str, rank: str = "") -> int:
    """A stage process whose device holds ``most`` tokens of a micro-batch from the optimizer step ``first`` on (0: in the
    preflight, too); with ``rank`` only that rank's does.
    """
    whole = Trainer._sums

    def sums(self, group):
        if self.step_index >= int(first) and sum(map(size, group)) > int(most) and rank in ("", os.environ.get("RANK")):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        return whole(self, group)

    Trainer._sums = sums
    return undrawn(spec)


PPO = {
    "preset": "ppo",
    "learning_rate": 1e-3,
    "max_steps": 8,
    "prompts_per_step": 4,
    "num_generations": 2,
    "max_completion_length": 8,
    "reward_override": "random",
    "rewards": [{"name": "length", "kind": "length"}],
}
STAGES = {  # (settings, rows, tokens that fit, the first step where there is not more room)
    "sft": ({"learning_rate": 1e-3, "batch_size": 8, "num_train_epochs": 2, "max_length": 64}, "demonstrations", 60, 5),
    "align": ({"learning_rate": 1e-3, "batch_size": 6, "num_train_epochs": 2, "max_length": 96}, "pairs", 150, 4),
    "reward_model": ({"batch_size": 6, "num_train_epochs": 2, "max_length": 96}, "pairs", 150, 0),
    "rl": (PPO, "prompts", 60, 4),
}


@pytest.mark.parametrize("stage", STAGES)
def test_a_killed_run_goes_on_with_the_smaller_micro_batches(tiny, data, spec, stage, forks):
    """Killed before and after memory ended: the bytes of an undisturbed run on the same device."""
    config, rows, most, first = STAGES[stage]
    for name in ("whole", "killed"):
        spec(stage, config, {"model": tiny["policy"], "data": data[rows]}, name)
    folder = Path(spec.path("whole")).parent
    run = lambda name, **more: forks.start(
        spec.path(name), str(most), str(first), target="tests.training.test_out_of_memory:limited", **more
    )
    run("whole").finish()
    told = json.loads((folder / "whole" / "result.json").read_text())
    warned = [w["text"] for w in told["warnings"] if w["code"] == "micro_batch_halved"]
    lines = [json.loads(line) for line in (folder / "whole" / "metrics.jsonl").read_text().splitlines()]
    halved = [line["step"] for line in lines if "micro_batch_tokens" in line["metrics"]]
    last = int(told["summary"]["micro_batch_tokens"])
    assert warned and f"max_tokens_per_micro_batch={last} " in warned[-1] and last <= most
    assert halved == sorted({line["step"] for line in lines if line["step"] >= max(1, first)})
    if stage == "rl":
        assert any("critic/micro_batch_tokens" in line["metrics"] for line in lines)
    seen = lambda count: (
        lambda: (
            (folder / "killed" / "metrics.jsonl").exists()
            and (folder / "killed" / "metrics.jsonl").read_bytes().count(b"\n") >= count
        )
    )
    for count in (2, max(4, first + 2)):
        run("killed", POSTTRAIN_CHECKPOINT_SECONDS="0").kill_when(seen(count))
    run("killed", POSTTRAIN_CHECKPOINT_SECONDS="0").finish()
    assert json.loads((folder / "killed" / "result.json").read_text())["resumed_from"]
    assert outputs(folder / "killed") == outputs(folder / "whole")
    assert json.loads((folder / "killed" / "result.json").read_text())["warnings"] == told["warnings"]


def test_ranks_agree_where_one_of_them_has_no_memory(tiny, data, spec, forks):
    """Both do the step again, with the same micro-batches; the model is the one of ranks that had room."""
    config, rows, _, first = STAGES["sft"]
    for name, most in (("room", 10**6), ("full", 40)):
        spec("sft", {**config, "batch_size": 8}, {"model": tiny["policy"], "data": data[rows]}, name)
        forks.run(
            spec.path(name), str(most), str(first), "1", target="tests.training.test_out_of_memory:limited", ranks=2
        )
    folder = Path(spec.path("full")).parent
    room, full = (load_file(folder / name / "out" / "model" / "model.safetensors") for name in ("room", "full"))
    assert all(torch.allclose(full[name], room[name], atol=1e-5) for name in room)
    told = json.loads((folder / "full" / "result.json").read_text())
    assert told["summary"]["micro_batch_tokens"] < 200 and "micro_batch_halved" in [w["code"] for w in told["warnings"]]


@pytest.mark.parametrize("first", [5, 0], ids=["in a step", "in the preflight"])
def test_sharded_ranks_end_and_the_same_command_goes_on(tiny, data, spec, forks, first):
    """A rank that leaves a layer would keep the others waiting there: the stage ends, and its next attempt begins at the
    checkpoint with what fits.
    """
    config, rows, _, _ = STAGES["sft"]
    spec("sft", {**config, "sharding": "full"}, {"model": tiny["policy"], "data": data[rows]}, "sharded")
    folder = Path(spec.path("sharded")).parent / "sharded"
    ended, told = 1, []
    for _ in range(6):
        group = forks.start(
            spec.path("sharded"),
            "60",
            str(first),
            target="tests.training.test_out_of_memory:limited",
            ranks=2,
            POSTTRAIN_CHECKPOINT_SECONDS="0",
        )
        deadline = time.monotonic() + 200
        while (ended := group.poll()) is None and time.monotonic() < deadline:
            time.sleep(0.02)
        said = "".join(process.said() for process in group.processes)
        group.kill()
        if not ended:
            break
        assert "does not fit into memory, and with sharding=full" in said, said
        assert "it goes on from the last checkpoint, with micro-batches of" in said
        told.append(json.loads((folder / "micro_batch_tokens.json").read_text())["tokens"])
    assert ended == 0 and told and told == sorted(told, reverse=True)
    result = json.loads((folder / "result.json").read_text())
    assert (result["resumed_from"] or 0) >= first - 1 and result["summary"]["micro_batch_tokens"] == told[-1]
