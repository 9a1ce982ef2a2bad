"""What is said to torch on CUDA only: as far as a CPU can tell by pretending, and what only a GPU shows (marked
gpu).
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from stages.decoding import engines
from stages.harness import Stage, execute
from stages.models import memory
from stages.registry import get_stage
from stages.rollouts.ahead import Ahead
from stages.running import cuda
from stages.spec import ConfigError
from stages.training import Trainer, checkpoint_due
from tests.sampler import fake_vllm
from tests.training.test_resume import _RL

gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.fixture()
def pretended(monkeypatch):
    """The CPU counts as a GPU for stages.running.cuda, and the process's modes are put back afterwards."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    monkeypatch.setattr(cuda, "is_cuda", lambda device: True)
    monkeypatch.setattr(cuda, "_shared", False)
    monkeypatch.setattr(cuda, "_given_up", False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: True)
    yield
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def mode():
    return (
        "strict"
        if torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
        else "weak"
        if torch.are_deterministic_algorithms_enabled()
        else "off"
    )


class Watch(torch.autograd.Function):
    """Identity that notes the mode in which its backward runs."""

    seen: list = []

    @staticmethod
    def forward(ctx, x):
        Watch.seen.append(("forward", mode()))
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        Watch.seen.append(("backward", mode()))
        return grad


def watched_rl(tiny, data, spec, monkeypatch, name, **settings):
    """(metrics of every step, modes seen while sampling, modes seen by Watch) of an RL stage."""
    import stages.policy.policy_update
    from stages.decoding.sampler import Sampler

    sampling, hidden, generate = [], stages.policy.policy_update.hidden_states, Sampler.generate
    monkeypatch.setattr(stages.policy.policy_update, "hidden_states", lambda *given: Watch.apply(hidden(*given)))
    monkeypatch.setattr(
        Sampler, "generate", lambda self, *given, **more: (sampling.append(mode()), generate(self, *given, **more))[1]
    )
    Watch.seen = []
    made = spec(
        "rl",
        {**_RL, "preset": "grpo", "max_steps": 2, **settings},
        {"model": tiny["policy"], "data": data["prompts"]},
        name,
    )
    result = execute(made, lambda event: None)
    return Path(made["workdir"], "metrics.jsonl").read_bytes(), sampling, Watch.seen, result


def test_backward_is_strict_sampling_free_and_the_rest_as_before(tiny, data, spec, monkeypatch, pretended):  # noqa: F811
    metrics, sampling, seen, result = watched_rl(tiny, data, spec, monkeypatch, "pretended")
    assert set(sampling) == {"off"}
    assert (
        {m for what, m in seen if what == "backward"} == {"strict"}
        and {m for what, m in seen if what == "forward"} == {"weak"}
        and mode() == "weak"
    )
    assert [w["code"] for w in result["warnings"]].count("slow_precision") == 1
    monkeypatch.undo()
    plain, sampling, seen, result = watched_rl(tiny, data, spec, monkeypatch, "plain")
    assert {*sampling, *(m for _, m in seen)} == {"weak"} and plain == metrics
    assert "slow_precision" not in [w["code"] for w in result["warnings"]]


def test_a_thread_that_samples_keeps_one_mode_for_both(pretended):
    with cuda.strictly("cuda"):
        assert mode() == "strict"
    cuda.share()
    torch.use_deterministic_algorithms(True, warn_only=True)
    with cuda.strictly("cuda"), cuda.freely("cuda"):
        assert mode() == "weak"


@pytest.mark.parametrize("trainer", ["step", "preflight"])
def test_what_has_no_deterministic_form_is_computed_without(pretended, trainer):
    """torch refuses in the strict mode; the same step is done again in the weak one, and gives what it would have
    given.
    """
    from stages.batching import make_item
    from stages.preflight import try_dearest
    from stages.settings import OptimizerConfig
    from stages.training import Sums

    class Odd(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            if mode() == "strict":
                raise RuntimeError(
                    "cumsum_cuda_kernel does not have a deterministic implementation, but you set"
                    " 'torch.use_deterministic_algorithms(True)'."
                )
            return grad

    class Objective:
        odd = True

        def counts(self, items):
            return {"rows": float(len(items))}

        def __call__(self, model, batch):
            loss = model.weight.square().sum() * len(batch.items)
            return Sums({"loss": (Odd.apply(loss) if self.odd else loss, "rows")})

    def made(odd):
        model = torch.nn.Linear(3, 2)
        with torch.no_grad():
            model.weight.copy_(torch.arange(6.0).view(2, 3))
        model._posttrain_lean = False
        objective = Objective()
        objective.odd = odd
        return Trainer(model, objective, OptimizerConfig(max_tokens_per_micro_batch=4), 2)

    items = [make_item(f"r{k}", [1, 2], [[3, 4]], [[1, 1]]) for k in range(3)]
    odd, plain = made(True), made(False)
    with pytest.warns(UserWarning, match="not deterministic on CUDA"):
        if trainer == "preflight":
            try_dearest(odd, items, 3)
            assert odd.step_index == 0 and odd.model.weight.grad is None
        got = odd.step(items)
    assert cuda._given_up and odd.step_index == 1
    assert got == plain.step(items) and torch.equal(odd.model.weight, plain.model.weight)


def test_other_errors_of_backward_are_raised(pretended):
    assert not cuda.give_up(RuntimeError("CUDA error: an illegal memory access was encountered"))


def test_numbers_are_those_of_float():
    values = [
        torch.tensor(0.1),
        torch.tensor(3),
        torch.tensor(0.1, dtype=torch.float64),
        torch.tensor(1.5, dtype=torch.bfloat16),
        torch.tensor([7.25], requires_grad=True),
        torch.tensor(float("nan")),
        torch.tensor(float("inf")),
    ]
    found = cuda.numbers(values)
    assert [repr(v) for v in found] == [repr(float(v.detach())) for v in values]


def test_a_tree_of_one_transfer_gives_the_same_numbers(monkeypatch):
    from tests.second_device import DEVICE, second_device

    values = [0.1, 2.0, 1e30, 1e-30]
    with second_device(monkeypatch):
        there = [torch.tensor(v).to(DEVICE) for v in values]
        assert cuda.numbers([*there, torch.tensor(0.3)]) == [float(torch.tensor(v)) for v in [*values, 0.3]]


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("masked", [False, True])
def test_attention_with_repeated_heads_is_transformers_own(groups, masked, monkeypatch):
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, 5, 4, dtype=torch.float32, requires_grad=True) for heads in (2 * groups, 2, 2))
    mask = torch.ones(5, 5, dtype=torch.bool).tril()[None, None] if masked else None
    module = SimpleNamespace(num_key_value_groups=groups, is_causal=True)
    asked, known = [], torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        torch.nn.functional,
        "scaled_dot_product_attention",
        lambda *given, **more: (asked.append(more.get("enable_gqa", False)), known(*given, **more))[1],
    )
    ours, theirs = (
        attend(module, q, k, v, mask, dropout=0.0, scaling=0.5)[0] for attend in (cuda.attend, sdpa_attention_forward)
    )
    assert asked == [False, groups > 1 and not masked], "the memory-efficient kernel takes no grouped heads"
    assert torch.allclose(ours, theirs, atol=1e-6)
    weights = torch.randn_like(ours)
    for one, other in zip(
        torch.autograd.grad((ours * weights).sum(), (q, k, v)), torch.autograd.grad((theirs * weights).sum(), (q, k, v))
    ):
        assert torch.allclose(one, other, atol=1e-5)


def test_half_types_keep_torchs_grouped_heads(monkeypatch):
    asked, known = [], torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        torch.nn.functional,
        "scaled_dot_product_attention",
        lambda *given, **more: (asked.append(more.get("enable_gqa", False)), known(*given, **more))[1],
    )
    q, k = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 3, 8)
    cuda.attend(SimpleNamespace(num_key_value_groups=2), q.bfloat16(), k.bfloat16(), k.bfloat16(), None)
    with torch.autocast("cpu", torch.bfloat16):
        cuda.attend(SimpleNamespace(num_key_value_groups=2), q, k, k, None)
    assert asked == [True, True]


def test_settling_puts_our_attention_in_the_place_of_sdpa(tiny, monkeypatch):
    from transformers import AttentionInterface

    from stages.models.modeling import load_policy

    before, ids = dict(AttentionInterface._global_mapping), torch.tensor([[1, 5, 9]])
    whole, called, attend = load_policy(tiny["policy"])(ids).logits, [], cuda.attend
    enabled = torch.backends.cuda.cudnn_sdp_enabled()
    monkeypatch.setattr(cuda, "attend", lambda *given, **more: (called.append(1), attend(*given, **more))[1])
    try:
        cuda.settle("cuda")
        assert not torch.backends.cuda.cudnn_sdp_enabled()
        assert torch.allclose(load_policy(tiny["policy"])(ids).logits, whole, atol=1e-5) and called
    finally:
        AttentionInterface._global_mapping.update(before)
        torch.backends.cuda.enable_cudnn_sdp(enabled)


@pytest.mark.parametrize(
    "given, ranks, current",
    [("cuda:1", 1, "cuda:1"), ("cuda", 2, "cuda:1"), ("cuda:0", 2, "cuda:1"), ("cuda", 1, None)],
)
def test_a_stages_device_is_the_current_one_and_each_rank_has_its_own(
    tiny, data, spec, monkeypatch, given, ranks, current
):  # noqa: F811
    from transformers import AttentionInterface

    asked = []
    monkeypatch.setattr(torch.cuda, "set_device", asked.append)
    monkeypatch.setattr(AttentionInterface, "register", lambda *given: None)
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", lambda on: None)
    monkeypatch.setenv("LOCAL_RANK", "1" if ranks > 1 else "0")
    stage = stage_of(spec, tiny, data, "placed", given)
    stage.world_size = ranks
    assert stage.device == stage.device == (current or given) and asked == ([torch.device(current)] if current else [])


# -- threads, processes, memory ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("device, fails", [("cuda", False), ("cuda:7", True)])
def test_what_goes_wrong_in_the_thread_reaches_who_waits(device, fails, monkeypatch):
    asked = []

    def set_device(given):
        asked.append(given)
        raise RuntimeError("invalid device ordinal")

    monkeypatch.setattr(torch.cuda, "set_device", set_device)
    monkeypatch.setattr(cuda, "_shared", False)
    ahead = Ahead(device)
    ahead.submit(lambda: 3)
    if fails:
        with pytest.raises(RuntimeError, match="invalid device ordinal"):
            ahead.take()
    else:
        assert ahead.take() == 3 and not asked, (
            "a device without a number is the thread's anyway, and set_device refuses it"
        )
    assert cuda._shared


def stage_of(spec, tiny, data, name, device="auto"):  # noqa: F811
    return Stage(
        get_stage("sft"),
        {**spec("sft", {}, {"model": tiny["policy"], "data": data["demonstrations"]}, name), "device": device},
        lambda event: None,
    )


def test_a_gpu_that_torch_cannot_use_is_a_warning_and_of_several_an_error(tiny, data, spec, monkeypatch):  # noqa: F811
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    stage = stage_of(spec, tiny, data, "one")
    assert stage.device == stage.device == "cpu"
    (told,) = stage.warnings
    assert told["code"] == "gpu_unusable" and "(3)" in told["text"] and torch.__version__ in told["text"]
    stage = stage_of(spec, tiny, data, "several")
    stage.world_size = 2
    with pytest.raises(ConfigError, match="devices=2: there are GPUs"):
        stage.device
    for seen in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", seen)
        stage = stage_of(spec, tiny, data, f"none{seen}")
        assert stage.device == "cpu" and stage.warnings == []


def test_what_is_said_of_a_gpu_names_the_build(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert "built for CUDA 13.0" in cuda.unusable("0") and "update the driver" in cuda.unusable("0")
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "built for the CPU only" in cuda.unusable("0")


def test_a_stage_by_hand_has_cublas_workspaces_of_its_own(tiny, data, spec, monkeypatch):  # noqa: F811
    import os

    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    execute(
        spec(
            "sft", {"max_steps": 1, "batch_size": 2}, {"model": tiny["policy"], "data": data["demonstrations"]}, "hand"
        ),
        lambda event: None,
    )
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


def test_checkpoints_of_large_models_are_a_twentieth_of_the_time(monkeypatch):
    monkeypatch.delenv("POSTTRAIN_CHECKPOINT_SECONDS", raising=False)
    assert not checkpoint_due(29.9, 0.0) and checkpoint_due(30.0, 0.0) and checkpoint_due(30.0, 1.5)
    assert not checkpoint_due(1199.0, 60.0) and checkpoint_due(1200.0, 60.0)
    monkeypatch.setenv("POSTTRAIN_CHECKPOINT_SECONDS", "0")
    assert checkpoint_due(0.0, 60.0)


def test_a_file_hashed_while_it_is_written_is_the_file(tmp_path):
    from stages.models.tensor_files import writer_of
    from storage.checkpoints import Checkpoints, Sha256
    from storage.files import sha256_file

    tensors = {"a": torch.arange(7.0), "b/c": torch.zeros(0), "d": torch.ones(2, 3, dtype=torch.bfloat16)}
    digest = writer_of(tensors)(tmp_path / "file")
    assert isinstance(digest, Sha256) and digest == sha256_file(tmp_path / "file")
    store = Checkpoints(tmp_path / "store")
    saved = store.save(
        1, {}, {"weights": writer_of(tensors), "text": lambda path: str(path.write_text("x")), "raw": b"y"}
    )
    listed = json.loads((saved.path / "manifest.json").read_text())["files"]
    assert {name: entry["sha256"] for name, entry in listed.items()} == {
        name: sha256_file(saved.path / name) for name in ("weights", "text", "raw", "state.json")
    }
    assert store.latest().step == 1


def test_the_engines_share_is_what_training_leaves():
    gib = 2**30
    # 7B of 16 bytes on 80 GiB do not fit beside anything; with an adapter the weights of 14 GiB are there, and hardly
    # more is needed
    assert memory.engine_share(66 * gib, 80 * gib, 14 * gib, 15 * gib, gib, sleeps=False) == pytest.approx(
        (66 - 1 - 8) * 100 // 80 / 100
    )
    assert memory.engine_share(66 * gib, 80 * gib, 14 * gib, 44 * gib, gib, sleeps=False) == 0.35
    # two thirds of 30 GiB, and 1.6
    assert memory.engine_share(66 * gib, 80 * gib, 14 * gib, 44 * gib, gib, sleeps=True) == 0.55
    assert memory.engine_share(1 * gib, 80 * gib, 14 * gib, 99 * gib, gib, sleeps=False) == 0.05
    assert memory.engine_share(66 * gib, 80 * gib, 14 * gib, 15 * gib, 20 * gib, sleeps=False) == 0.56


def test_a_gpu_computes_more_logits_at_a_time_and_the_plan_counts_them():
    config = SimpleNamespace(micro_batch_tokens=100, engine="builtin", compute_dtype="float32")
    shape = memory.Shape(1, config={"vocab_size": 1000})
    assert memory.caches_of(config, shape) == {"logits": 400_000}
    assert memory.caches_of(config, shape, "cuda:0") == {"logits": 400_000 + 14 * 100_000}
    config.micro_batch_tokens = 10**6
    assert (
        memory.caches_of(config, shape, "cuda:0")["logits"]
        == memory.HEAD_KEEP_BYTES_ON_GPU + 14 * memory.HEAD_CHUNK_ON_GPU
    )


# -- vLLM beside training ----------------------------------------------------------------------------------------------


class Half:
    dtype = torch.bfloat16


@pytest.fixture()
def vllms(monkeypatch):
    """(arguments of every vllm.LLM, the directories of its pushes)."""
    given, read = [], []
    original, rpc = fake_vllm.LLM.__init__, fake_vllm.LLM.collective_rpc
    monkeypatch.setitem(sys.modules, "vllm", fake_vllm)
    monkeypatch.setattr(
        fake_vllm.LLM,
        "__init__",
        lambda self, **arguments: (given.append((self, arguments)), original(self, **arguments))[1],
    )

    def reload(self, method, timeout=None, args=(), kwargs=None):
        from safetensors.torch import load_file

        path = Path(kwargs["weights_path"])
        read.append(
            (
                path,
                {t.dtype for t in load_file(path / "model.safetensors").values()},
                json.loads((path / "config.json").read_text())["dtype"],
            )
        )
        return rpc(self, method, timeout, args, kwargs)

    monkeypatch.setattr(fake_vllm.LLM, "collective_rpc", reload)
    return given, read


VLLM = {
    **_RL,
    "preset": "grpo",
    "max_steps": 2,
    "engine": "vllm",
    "importance_correction": "token_truncate",
    "max_prompt_length": 40,
    "max_completion_length": 6,
}


def test_vllm_has_room_for_the_longest_row_and_what_training_leaves(tiny, data, spec, vllms, monkeypatch):  # noqa: F811
    given, read = vllms
    run = lambda name, **settings: execute(
        spec("rl", {**VLLM, **settings}, {"model": tiny["policy"], "data": data["prompts"]}, name), lambda event: None
    )
    run("cpu")
    assert given[-1][1]["max_model_len"] == 46 and "gpu_memory_utilization" not in given[-1][1]
    assert read and all(not path.exists() and kinds == {torch.float32} for path, kinds, _ in read)
    run("given", engine_options={"max_model_len": 60, "gpu_memory_utilization": 0.3})
    assert given[-1][1]["max_model_len"] == 60 and given[-1][1]["gpu_memory_utilization"] == 0.3


def test_the_share_is_asked_of_the_gpu(tiny, data, spec, vllms, monkeypatch):  # noqa: F811
    stage = Stage(
        get_stage("rl"),
        spec("rl", VLLM, {"model": tiny["policy"], "data": data["prompts"]}, "share"),
        lambda event: None,
    )
    monkeypatch.setattr(cuda, "is_cuda", lambda device: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (60 * 2**30, 80 * 2**30))
    # less a tenth for activations, rounded down
    assert engines.beside_training(stage, tiny["policy"], False) == {
        "max_model_len": 46,
        "gpu_memory_utilization": 0.64,
    }
    assert engines.beside_training(stage, tiny["policy"], True)["gpu_memory_utilization"] == 0.72
    stage = Stage(
        get_stage("rejection"),
        spec("rejection", {}, {"model": tiny["policy"], "prompts": data["prompts"]}, "alone"),
        lambda event: None,
    )
    assert engines.beside_training(stage, tiny["policy"], False) == {}


@pytest.mark.parametrize("room", [True, False])
def test_weights_are_pushed_in_the_engines_type_through_memory_and_leave_nothing(
    tiny, data, spec, vllms, monkeypatch, room
):  # noqa: F811
    given, read = vllms
    monkeypatch.setattr(fake_vllm.LLM, "llm_engine", SimpleNamespace(model_config=Half()), raising=False)
    if not room:
        monkeypatch.setattr(engines, "memory_disk", lambda name, size: None)
    made = spec("rl", {**VLLM, "engine_sleep": True}, {"model": tiny["policy"], "data": data["prompts"]}, "half")
    result = execute(made, lambda event: None)
    assert len(read) == 3 and len({path.name for path, *_ in read}) == 2, (
        "asleep during the preflight's trial it loses what it was given"
    )
    for path, kinds, kind in read:
        assert (
            kinds == {torch.bfloat16}
            and kind == "bfloat16"
            and not path.exists()
            and path.is_relative_to("/dev/shm") == room
        )
    assert not list(Path("/dev/shm").glob(f"posttrain-*/{read[0][0].name}")) and result["summary"]["steps"] == 2
    assert given[-1][0].calls[:4] == [
        "reload",
        "reset",
        "sleep 2",
        "wake weights",
    ], "it sleeps while the dearest micro-batch is tried"


def test_room_in_memory_is_taken_only_where_there_is_twice_as_much():
    found = engines.memory_disk("a stage", 10)
    assert found is not None and found.stat().st_mode & 0o077 == 0
    (found / "left").write_text("by a killed process")
    assert engines.memory_disk("a stage", 10) == found and not list(found.iterdir())
    assert engines.memory_disk("a stage", 2**60) is None and not found.exists()


# -- on a GPU ----------------------------------------------------------------------------------------------------------


@pytest.fixture(params=[pytest.param(None, marks=gpu)])
def on_gpu():
    return "cuda:0"


def test_backward_of_attention_repeats_itself(on_gpu):
    """bfloat16 (flash) and float32 (memory-efficient): the same gradients, bit for bit, over and over."""
    for dtype in (torch.bfloat16, torch.float32):
        q, k, v = (torch.randn(2, 4, 1024, 64, device=on_gpu, dtype=dtype, requires_grad=True) for _ in range(3))
        found = []
        for _ in range(5):
            with cuda.strictly(on_gpu):
                found.append(
                    torch.autograd.grad(
                        torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).sum(), (q, k, v)
                    )
                )
        assert all(torch.equal(a, b) for one in found[1:] for a, b in zip(one, found[0]))


@pytest.mark.parametrize(
    "config", [{}, {"compute_dtype": "bfloat16"}, {"forward": "model"}, {"activation_checkpointing": True}]
)
def test_a_killed_run_ends_with_the_same_bytes(on_gpu, tiny, data, spec, config):  # noqa: F811
    def run(name):
        made = spec(
            "rl",
            {**_RL, "preset": "grpo", "max_steps": 4, **config},
            {"model": tiny["policy"], "data": data["prompts"]},
            name,
        )
        execute({**made, "device": on_gpu}, lambda event: None)
        assert not cuda._given_up, "an operation has no deterministic form"
        return Path(made["workdir"], "out", "model", "model.safetensors").read_bytes()

    assert run("one") == run("other")


def test_float32_with_grouped_heads_takes_a_fused_kernel(on_gpu):
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, k = torch.randn(1, 4, 128, 64, device=on_gpu), torch.randn(1, 2, 128, 64, device=on_gpu)
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION]):
        cuda.attend(SimpleNamespace(num_key_value_groups=2, is_causal=True), q, k, k, None)
