"""Two gloo ranks give the single process's result; a run resumes on another number of ranks. The cases in LAUNCHED
start their ranks as users do, the others fork them from warm parents (tests/processes.py)."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from stages.harness import execute
from tests.processes import UNDRAWN
from tests.reward.conftest import encoder, rows  # noqa: F401
from tests.training.test_align_methods import preferences  # noqa: F401

# Ranks end with the process that started them, as under a task.
ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "POSTTRAIN_PARENT_PID": str(os.getpid()),
}


@pytest.mark.parametrize("sharding", ("none", "full"))
def test_every_objectives_gradient_is_the_single_process_one(tiny, tmp_path, sharding, forks):
    """DDP through our forward to 1e-12; FSDP2 through the model's own, whose norms round to float32, to 2e-6."""
    for name, ranks in (("one", 1), ("two", 2)):
        forks.run(
            tiny["policy"], tmp_path / f"{name}.pt", sharding, target="tests.training.ranks_program:main", ranks=ranks
        )
    one, two = (torch.load(tmp_path / f"{n}.pt") for n in ("one", "two"))
    assert set(one) == set(two) and one
    exact = 1e-12 if sharding == "none" else 2e-6
    for name, (gradient, metrics, judged) in one.items():
        other, other_metrics, other_judged = two[name]
        assert torch.allclose(other, gradient, rtol=0, atol=exact * float(gradient.abs().max())), name
        assert other_metrics == pytest.approx(metrics, rel=1e-5, abs=1e-6) and other_judged == pytest.approx(
            judged, rel=1e-5, abs=1e-6
        ), name


def test_every_loss_has_the_single_process_gradient(tiny, preferences, rows, tmp_path, forks):
    """On two ranks to 1e-12: every row of the tables of direct alignment, reward models and RL, the variants of a policy
    loss and the critics, with what they need of the whole step (KTO's z0, AOT's matches, the mean margin of AQL).
    """
    given = tiny["policy"], tiny["other"], json.dumps(preferences), json.dumps(rows)
    target = "tests.training.ranks_program:every_loss"
    for count in (1, 2):
        forks.run(*given, tmp_path / f"{count}.pt", target=target, ranks=count)
    one, two = (torch.load(tmp_path / f"{count}.pt") for count in (1, 2))
    assert one.keys() == two.keys() and len(one) > 100
    for name, (gradient, metrics, judged) in one.items():
        other, other_metrics, other_judged = two[name]
        assert gradient.abs().max() > 0, name
        assert torch.allclose(other, gradient, rtol=0, atol=1e-12 * float(gradient.abs().max())), name
        assert other_metrics == pytest.approx(metrics, rel=1e-5, abs=1e-6), name
        assert other_judged == pytest.approx(judged, rel=1e-5, abs=1e-6), name


#: The checkpoint behind which a run is killed that is to be resumed.
KILLED_BEHIND = 2
LENGTH = [{"name": "length", "kind": "length", "max_length": 10, "cache_length": 10}]
RL = {
    "max_steps": 4,
    "prompts_per_step": 4,
    "num_generations": 4,
    "max_completion_length": 10,
    "learning_rate": 1e-3,
    "rewards": LENGTH,
}
ROWS = {"max_steps": 4, "batch_size": 8, "learning_rate": 1e-3, "eval_rows": 4}
FULL = {"sharding": "full", "forward": "model"}  # one process computes the layers as the ranks do
TURNS = {
    "preset": "agent",
    "environment": "tests.training.environments:Countdown",
    "rewards": [{"kind": "environment"}],
    "max_completion_length": 90,
    "max_turn_length": 6,
}
TRUST = {"preset": "trpo", "truncation_policy": "score", "cg_iters": 3}
CASES = {  # name: (stage, settings, rows)
    "sft": ("sft", {**ROWS, "ema_decay": 0.5}, "demonstrations"),
    "align": ("align", ROWS, "pairs"),
    "align, muon": ("align", {**ROWS, "optimizer": "muon", "learning_rate": 2e-4}, "pairs"),  # it computes in bfloat16
    "align, muon, given reference, sharded": (
        "align",
        {**ROWS, **FULL, "optimizer": "muon", "learning_rate": 2e-4},
        "pairs",
    ),
    "sft, muon on LoRA, sharded": (
        "sft",
        {**ROWS, **FULL, "optimizer": "muon", "learning_rate": 1e-3, "lora_rank": 4},
        "demonstrations",
    ),
    "sft, adafactor, noise and smoothing, sharded": (
        "sft",
        {
            **ROWS,
            **FULL,
            "optimizer": "adafactor",
            "weight_decay": 0.1,
            "neftune_noise_alpha": 20.0,
            "label_smoothing_factor": 0.1,
        },
        "demonstrations",
    ),
    "sft, momentum, sharded": (
        "sft",
        {**ROWS, **FULL, "optimizer": "sgd", "learning_rate": 0.1, "momentum": 0.9},
        "demonstrations",
    ),
    "rl": ("rl", {**RL, "preset": "dr_grpo"}, "prompts"),
    "rl, environment": ("rl", {**RL, **TURNS}, "prompts"),
    "rl, environment, sharded": ("rl", {**RL, **TURNS, **FULL, "eval_prompts": 3, "eval_every": 2}, "prompts"),
    "rl, sampled ahead": (
        "rl",
        {**RL, "preset": "dr_grpo", "surrogate": "clip", "async_rollouts": True, "eval_prompts": 3, "eval_every": 2},
        "prompts",
    ),
    "rl, sampled ahead, sharded": (
        "rl",
        {**RL, **FULL, "preset": "dr_grpo", "surrogate": "clip", "async_rollouts": True},
        "prompts",
    ),
    "rl, trust region": ("rl", {**RL, **TRUST}, "prompts"),
    "rl, trust region, LoRA": ("rl", {**RL, **TRUST, "lora_rank": 4}, "prompts"),
    "sft, LoRA, sharded": (
        "sft",
        {**ROWS, **FULL, "learning_rate": 1e-2, "lora_rank": 4, "ema_decay": 0.5},
        "demonstrations",
    ),
    "sft, every epoch, LoRA, sharded": (
        "sft",
        {**ROWS, **FULL, "learning_rate": 1e-2, "lora_rank": 4, "batch_size": 21, "publish_epochs": True},
        "demonstrations",
    ),
    "sft, every epoch, averages, sharded": (
        "sft",
        {**ROWS, **FULL, "batch_size": 21, "publish_epochs": True, "ema_decay": 0.5},
        "demonstrations",
    ),
    "reward model, every epoch, LoRA, sharded": (
        "reward_model",
        {**ROWS, **FULL, "learning_rate": 1e-2, "lora_rank": 4, "batch_size": 21, "publish_epochs": True},
        "pairs",
    ),
    "reward model, every epoch, LM head beside": (
        "reward_model",
        {**ROWS, "batch_size": 21, "publish_epochs": True, "lm_loss_weight": 0.5},
        "pairs",
    ),
    "sft, corrected averages, LoRA, sharded": (
        "sft",
        {**ROWS, **FULL, "learning_rate": 1e-2, "lora_rank": 4, "bema": {"update_freq": 1, "update_after": 1}},
        "demonstrations",
    ),
    "align, corrected averages and a reference of them, sharded": (
        "align",
        {
            **ROWS,
            **FULL,
            "bema": {"update_freq": 2},
            "reference_update": "bema",
            "reference_bema": {"update_freq": 1},
            "reference_interval": 2,
        },
        "pairs",
    ),
    "align, pairs matched over the step and weighed in parts, sharded": (
        "align",
        {**ROWS, **FULL, "method": "aot_paired", "ld_alpha": 0.5},
        "pairs",
    ),
    "align, own statistics, sharded": ("align", {**ROWS, **FULL, "method": "kto"}, "pairs"),
    "align, LoRA, moving reference, sharded": (
        "align",
        {**ROWS, **FULL, "lora_rank": 4, "learning_rate": 1e-2, "reference_update": "tr_soft", "reference_interval": 2},
        "pairs",
    ),
    "reward model, language model loss, sharded": ("reward_model", {**ROWS, **FULL, "lm_loss_weight": 0.1}, "pairs"),
    "reward model, LoRA, sharded": ("reward_model", {**ROWS, **FULL, "lora_rank": 4, "learning_rate": 1e-2}, "pairs"),
    "reward model on an encoder, sharded": ("reward_model", {**ROWS, **FULL}, "pairs"),
    "rl, critic, reference, sharded": ("rl", {**RL, **FULL, "preset": "ppo", "beta": 0.1, "kl_coef": 0}, "prompts"),
    "rl, shared critic, averages, sharded": (
        "rl",
        {**RL, **FULL, "preset": "ppo", "critic_mode": "shared", "ema_decay": 0.5, "eval_prompts": 3, "eval_every": 2},
        "prompts",
    ),
    "rl, LoRA, shared critic, sharded": (
        "rl",
        {
            **RL,
            **FULL,
            "preset": "ppo",
            "critic_mode": "shared",
            "beta": 0.1,
            "kl_coef": 0,
            "lora_rank": 4,
            "learning_rate": 1e-2,
        },
        "prompts",
    ),
    "rl, LoRA on a base kept in bfloat16": (
        "rl",
        {**RL, "preset": "grpo", "beta": 0.1, "lora_rank": 4, "learning_rate": 1e-2, "frozen_dtype": "bfloat16"},
        "prompts",
    ),
    "rl, LoRA on a base kept in 4 bits": (
        "rl",
        {**RL, "preset": "grpo", "beta": 0.1, "lora_rank": 4, "learning_rate": 1e-2, "frozen_dtype": "nf4"},
        "prompts",
    ),
    "rl, LoRA on a base kept in bfloat16, sharded": (
        "rl",
        {
            **RL,
            **FULL,
            "preset": "grpo",
            "beta": 0.1,
            "lora_rank": 4,
            "learning_rate": 1e-2,
            "num_iterations": 2,
            "frozen_dtype": "bfloat16",
        },
        "prompts",
    ),
    "reward model, LoRA on a base kept in bfloat16, sharded": (
        "reward_model",
        {**ROWS, **FULL, "lora_rank": 4, "learning_rate": 1e-2, "frozen_dtype": "bfloat16", "save_dtype": "bfloat16"},
        "pairs",
    ),
    "rl, DoRA, sharded": (
        "rl",
        {**RL, **FULL, "preset": "grpo", "beta": 0.1, "lora_rank": 4, "lora_dora": True, "learning_rate": 1e-2},
        "prompts",
    ),
    "sft, LoRA and whole modules on a base kept in bfloat16, sharded": (
        "sft",
        {
            **ROWS,
            **FULL,
            "learning_rate": 1e-2,
            "lora_rank": 4,
            "lora_targets": "q_proj,v_proj",
            "lora_modules_to_save": "embed_tokens,lm_head",
            "frozen_dtype": "bfloat16",
        },
        "demonstrations",
    ),
}


# POSTTRAIN_FORK of the undisturbed run on two ranks and of the killed one that are started as users do: the launcher's
# ranks are forked, or new interpreters
LAUNCHED = {"sft": ("1", "0"), "rl": (None, "1")}


def alike(a, b) -> bool:
    """To float32 rounding; of what is saved in bfloat16 few weights lie so close to a border that this takes them over
    it.
    """
    if b.dtype != torch.bfloat16:
        return torch.allclose(a, b, atol=2e-5)
    return torch.allclose(a, b, atol=2e-5, rtol=2**-7) and float((a != b).float().mean()) < 0.01


@pytest.mark.parametrize("case", CASES)
def test_a_stage_on_two_ranks_and_a_resume(case, tiny, encoder, data, spec, tmp_path, forks):
    """Same weights (to float32 rounding) from 1 rank, 2 ranks, and 2 ranks for the first steps then 1; with sharded
    weights a kill and a resume on 2 ranks give the same bytes."""
    if "4 bits" in case:
        pytest.importorskip("bitsandbytes", reason="the extra `qlora` is not installed")
    stage, config, rows = CASES[case]
    inputs = {"model": encoder if "encoder" in case else tiny["policy"], "data": data[rows]}
    if "given reference" in case:
        inputs["reference"] = tiny["other"]
    sharded = config.get("sharding") == "full"
    start = launched(*LAUNCHED.get(case, (None, None)), otherwise=forked(forks))
    one, _ = trained(spec, stage, config, inputs, "one", [1], start)
    together = "changed" if case not in LAUNCHED else None
    two, result = trained(spec, stage, config, inputs, "two", [2], start, killed=together)
    before = {
        k.removeprefix("bert."): v for k, v in load_file(os.path.join(inputs["model"], "model.safetensors")).items()
    }
    moved = [
        float((v - before[k]).abs().max())
        for k, v in ((k.removeprefix("bert."), v) for k, v in one.items())
        if k in before
    ]
    assert max(moved) > 1e-4, "nothing was learned, so nothing was compared"
    plan = [2, 2 if sharded else 1][bool(together) :]
    changed, again = trained(spec, stage, config, inputs, "changed", plan, start)
    assert again["resumed_from"]
    assert one.keys() == two.keys() == changed.keys()
    for key, value in one.items():
        # softmax cannot see a key's, a comparison not the last one: Adam follows the rounding of a zero gradient
        if "encoder" in case and key.endswith("bias"):
            continue
        assert alike(two[key], value), key
        assert torch.equal(changed[key], two[key]) if sharded else alike(changed[key], value), key
    epochs = [epochs_of(tmp_path / name) for name in ("one", "two", "changed")]
    assert len(epochs[0]) == (2 if config.get("publish_epochs") else 0)
    for name, value in epochs[0].items():
        assert all(alike(epochs[1][name][key], each) for key, each in value.items())
        same = torch.equal if sharded else alike
        assert all(same(epochs[2][name][key], each) for key, each in epochs[1][name].items())
    if sharded:
        assert again["summary"] == result["summary"]
        assert (tmp_path / "changed/metrics.jsonl").read_bytes() == (tmp_path / "two/metrics.jsonl").read_bytes()


@pytest.mark.parametrize("sharding", ("none", "full"))
def test_ranks_share_a_server(tiny, data, spec, sharding, forks):
    """Two ranks ask one vLLM server for their prompts; the first pushes the weights, once whenever they changed. The
    result is one rank's.
    """
    from tests.sampler import fake_vllm
    from tests.sampler.servers import vllm_server

    config = {
        **RL,
        **(FULL if sharding == "full" else {}),
        "preset": "dr_grpo",
        "engine": "server",
        "importance_correction": "token_truncate",
    }
    found = []
    asked = []
    for devices in (1, 2):
        llm = fake_vllm.LLM(tiny["policy"])
        with vllm_server(llm) as (url, seen):
            found.append(
                trained(
                    spec,
                    "rl",
                    {**config, "engine_url": url},
                    {"model": tiny["policy"], "data": data["prompts"]},
                    f"{devices} ranks",
                    [devices],
                    forked(forks),
                )[0]
            )
            asked.append(sorted((tuple(body["prompt"]), body["seed"]) for body in seen))
        asked.append(llm.calls.count("reload"))
    assert asked[:2] == asked[2:] and asked[1] > 2
    before = load_file(os.path.join(tiny["policy"], "model.safetensors"))
    assert max(float((found[0][k] - before[k]).abs().max()) for k in before) > 1e-4
    assert all(torch.allclose(found[1][k], v, atol=2e-5) for k, v in found[0].items())


ANY = (
    "rl, shared critic, averages, sharded",
    "rl, critic, reference, sharded",
    "align, LoRA, moving reference, sharded",
)


@pytest.mark.parametrize("case", ANY)
def test_what_is_beside_the_weights_resumes_on_another_number_of_ranks(case, tiny, data, spec, tmp_path, forks):
    """A critic with its optimizer, averages, a moving reference: two ranks end a run that one began, and the other way
    round.
    """
    stage, config, kind = CASES[case]
    inputs = {"model": tiny["policy"], "data": data[kind]}
    expected, _ = trained(spec, stage, config, inputs, "undisturbed", [2], forked(forks))
    for plan in ([2, 1], [1, 2]):
        name = "-".join(map(str, plan))
        found, result = trained(spec, stage, config, inputs, name, plan, forked(forks))
        assert result["resumed_from"]
        assert all(alike(found[k], v) for k, v in expected.items()), plan


def test_sharded_checkpoints_resume_on_any_number_of_ranks(tiny, data, spec, tmp_path, forks):
    """Every rank's file holds about its share of weights, moments, averages and best weights; 1, 2 and 3 ranks continue
    from them.
    """
    config = {**ROWS, **FULL, "ema_decay": 0.5, "eval_every": 2, "select_by": "loss"}
    inputs = {"model": tiny["policy"], "data": data["demonstrations"]}
    expected, _ = trained(spec, "sft", config, inputs, "undisturbed", [2], forked(forks))
    for plan in ([2, 1], [1, 2], [2, 3]):
        name = "-".join(map(str, plan))
        found, result = trained(spec, "sft", config, inputs, name, plan, forked(forks))
        assert result["resumed_from"]
        assert all(torch.allclose(found[k], v, atol=2e-5) for k, v in expected.items()), plan
        newest = max((tmp_path / name / "checkpoints").glob("step-*"))
        sizes = [p.stat().st_size for p in sorted(newest.glob("trainer-*.safetensors"))]
        assert len(sizes) == plan[-1] and max(sizes) < 1.2 * min(sizes), sizes


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the peak from /proc")
def test_saving_a_state_takes_no_memory(tmp_path, forks):
    """Tensors go to the file one by one: the process does not grow while it saves 128 MiB, and gets every byte back."""
    forks.run("saved", tmp_path / "state", tmp_path / "grown", target="tests.training.shards_program:main")
    grown = float((tmp_path / "grown").read_text())
    assert grown < 16, f"grew by {grown} MiB"


# --- sharding=full reads and publishes shard by shard -----------------------------------------------------------------


def files_of(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(Path(folder).rglob("*")) if p.is_file()}


def test_what_was_loaded_into_shards_is_published_as_a_whole_model_is(tiny, encoder, tmp_path, forks):
    """Policies (tied, untied, GPT-2, bfloat16 in several files), adapters, reward heads and an encoder: the same bytes
    in every file.
    """
    import shutil

    from transformers import GPT2Config, GPT2LMHeadModel

    from stages.chat import load_tokenizer
    from stages.models.modeling import load_policy, save_policy

    root, tokenizer = tmp_path / "models", load_tokenizer(tiny["policy"])
    for name, path in (("policy", tiny["policy"]), ("reward", tiny["reward"]), ("encoder", encoder)):
        shutil.copytree(path, root / name)
    tied = load_policy(tiny["policy"])
    tied.config.tie_word_embeddings = True
    tied.tie_weights()
    save_policy(tied, tokenizer, root / "tied")
    load_policy(tiny["policy"], dtype=torch.bfloat16).save_pretrained(root / "half", max_shard_size="20KB")
    tokenizer.save_pretrained(root / "half")
    assert len(list((root / "half").glob("model-*.safetensors"))) > 2 and "lm_head.weight" not in load_file(
        root / "tied/model.safetensors"
    )
    torch.manual_seed(0)
    save_policy(
        GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), n_embd=32, n_layer=2, n_head=2, n_positions=64)),
        tokenizer,
        root / "gpt2",
    )
    for name, count in (("whole", 1), ("shards", 2)):
        forks.run("everything", root, tmp_path / name, target="tests.training.shards_program:main", ranks=count)
    whole, shards = files_of(tmp_path / "whole"), files_of(tmp_path / "shards")
    assert whole.keys() == shards.keys() and len(whole) > 40
    assert [name for name in whole if whole[name] != shards[name]] == []


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the peak from /proc")
def test_a_rank_holds_its_shard_and_little_more_than_a_layer(tiny, tmp_path, forks):
    """280 MiB of weights on two ranks: loading, sharding and publishing take each of them well under the whole model,
    and one process all of it.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    from stages.chat import load_tokenizer
    from stages.models.modeling import save_policy

    tokenizer = load_tokenizer(tiny["policy"])
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=4096,
            hidden_size=512,
            intermediate_size=1536,
            num_hidden_layers=20,
            num_attention_heads=8,
            num_key_value_heads=8,
            max_position_embeddings=64,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
    )
    save_policy(model, tokenizer, tmp_path / "model")
    weights = sum(p.numel() for p in model.parameters()) * 4 / 2**20
    assert weights > 250
    for name, count in (("one", 1), ("two", 2)):
        forks.run("peak", tmp_path / "model", tmp_path / name, target="tests.training.shards_program:main", ranks=count)
    one, two = (json.loads((tmp_path / name / "grown.json").read_text()) for name in ("one", "two"))
    assert one[0][1] > 0.9 * weights, one  # a whole model lies in its mapped file until it is read
    assert (
        max(grown for _, grown in two) < 0.8 * weights and max(grown - loaded for loaded, grown in two) < 0.1 * weights
    ), (weights, one, two)
    assert files_of(tmp_path / "two/model") == files_of(tmp_path / "model")


def trained(spec, stage, config, inputs, name, devices, start, killed=None):
    """(weights, result) of a stage run on these numbers of ranks one after the other, killed behind a checkpoint
    between. killed: the name of the same run once more, which the ranks begin behind this one's end and are killed in.
    """
    built = spec(stage, config, inputs, name)
    work = Path(built["workdir"])
    if devices == [1]:
        execute(built, lambda event: None)
    for i, count in enumerate(devices if devices != [1] else ()):
        files = [work.parent / f"{name}-{i}.json"]
        files[0].write_text(json.dumps({**built, "devices": count}))
        behind = work if i + 1 < len(devices) else None
        if killed:
            once_more = spec(stage, config, inputs, killed)
            files.append(Path(spec.path(killed)))
            files[1].write_text(json.dumps({**once_more, "devices": count}))
            behind = Path(once_more["workdir"])
        start(files, count, killed_behind=behind and behind / "checkpoints")
    return load_file(work / "out" / "model" / "model.safetensors"), json.loads((work / "result.json").read_text())


def epochs_of(work: Path) -> dict:
    """The weights of every epoch that a run published."""
    return {folder.name: load_file(folder / "model.safetensors") for folder in (work / "out").glob("epoch.*")}


def newest(checkpoints: Path) -> int:
    return max(
        (
            int("".join(c for c in p.name if c.isdigit()) or 0)
            for p in checkpoints.glob("*")
            if not p.name.startswith(".")
        ),
        default=0,
    )


def forked(forks):
    def start(files, count, killed_behind):
        group = forks.start(*files, target=UNDRAWN, ranks=count, POSTTRAIN_CHECKPOINT_SECONDS="0")
        group.kill_when(lambda: newest(killed_behind) >= KILLED_BEHIND) if killed_behind else group.finish()

    return start


def launched(whole, killed, otherwise):
    """A stage's own start of its ranks, on two of them. SIGKILL goes to the launcher: its ranks notice and end."""

    def start(files, count, killed_behind):
        fork = killed if killed_behind else whole if count > 1 else None
        if fork is None:
            return otherwise(files, count, killed_behind)
        process = subprocess.Popen(
            [sys.executable, "-m", "stages", *map(str, files)],
            env={
                **ENVIRONMENT,
                "POSTTRAIN_CHECKPOINT_SECONDS": "0",
                "POSTTRAIN_FORK": fork,
            },
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        if not killed_behind:
            _, said = process.communicate(timeout=600)
            assert process.returncode == 0, said[-4000:]
            return
        deadline = time.monotonic() + 300
        while time.monotonic() < deadline and process.poll() is None and newest(killed_behind) < KILLED_BEHIND:
            time.sleep(0.02)
        ranks = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        process.wait()
        assert len(ranks) >= count and psutil.wait_procs(ranks, timeout=30)[1] == []

    return start
