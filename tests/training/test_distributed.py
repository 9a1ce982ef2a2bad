"""Two gloo ranks under torchrun give the single process's result; a run resumes on another number of ranks."""

import json
import os
import subprocess
import sys

import pytest
import torch

# Ranks end with the process that started them, as under a task.
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "POSTTRAIN_PARENT_PID": str(os.getpid())}


def run(*command):
    done = subprocess.run([sys.executable, *command], env=ENVIRONMENT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.parametrize("sharding", ("none", "full"))
def test_every_objectives_gradient_is_the_single_process_one(tiny, tmp_path, sharding):
    """DDP through our forward to 1e-12; FSDP2 through the model's own, whose norms round to float32, to 2e-6."""
    run("-m", "tests.training.ranks_program", tiny["policy"], str(tmp_path / "one.pt"), sharding)
    run("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "tests.training.ranks_program", tiny["policy"], str(tmp_path / "two.pt"), sharding)
    one, two = (torch.load(tmp_path / f"{n}.pt") for n in ("one", "two"))
    assert set(one) == set(two) and one
    exact = 1e-12 if sharding == "none" else 2e-6
    for name, (gradient, metrics, judged) in one.items():
        other, other_metrics, other_judged = two[name]
        assert torch.allclose(other, gradient, rtol=0, atol=exact * float(gradient.abs().max())), name
        assert other_metrics == pytest.approx(metrics, rel=1e-5, abs=1e-6) and other_judged == pytest.approx(judged, rel=1e-5, abs=1e-6), name


@pytest.mark.parametrize("stage, sharding", (("sft", "none"), ("sft", "full"), ("align", "none"), ("rl", "none")))
def test_a_stage_on_two_ranks_and_a_resume_on_another_count(stage, sharding, tiny, data, spec, tmp_path):
    """Same weights (to float32 rounding) from 1 rank, 2 ranks, and 2 ranks for the first steps then 1."""
    from safetensors.torch import load_file

    config = {"max_steps": 6, "batch_size": 8, "learning_rate": 1e-3, "eval_rows": 4, "sharding": sharding, "ema_decay": 0.5}
    if stage == "rl":
        config = {"max_steps": 6, "prompts_per_step": 4, "num_generations": 4, "max_completion_length": 10, "learning_rate": 1e-3, "preset": "dr_grpo",
                  "rewards": [{"name": "length", "kind": "length", "max_length": 10, "cache_length": 10}]}
    inputs = {"model": tiny["policy"], "data": data[{"sft": "demonstrations", "align": "pairs", "rl": "prompts"}[stage]]}
    weights = {}
    for name, devices in (("one", [1]), ("two", [2]), ("changed", [2, 1])):
        built = spec(stage, config, inputs, name)
        for i, count in enumerate(devices):
            built["devices"] = count
            path = tmp_path / f"{name}-{i}.json"
            path.write_text(json.dumps(built))
            environment = {**ENVIRONMENT, "POSTTRAIN_CHECKPOINT_SECONDS": "0"}
            if i + 1 < len(devices):  # stop behind the third checkpoint
                stop_after(path, environment, tmp_path / name / "checkpoints", 3)
            else:
                done = subprocess.run([sys.executable, "-m", "stages", str(path)], env=environment, capture_output=True, text=True, timeout=600)
                assert done.returncode == 0, done.stderr[-4000:]
        result = json.loads((tmp_path / name / "result.json").read_text())
        if name == "changed":
            assert result["resumed_from"] is not None
        weights[name] = load_file(tmp_path / name / "out" / "model" / "model.safetensors")
    for name in ("two", "changed"):
        for key, value in weights["one"].items():
            assert torch.allclose(weights[name][key], value, atol=2e-5), (name, key)


def stop_after(path, environment, checkpoints, step):
    import signal
    import time

    process = subprocess.Popen([sys.executable, "-m", "stages", str(path)], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                               start_new_session=True)
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline and process.poll() is None:
        if any(int("".join(c for c in p.name if c.isdigit()) or 0) >= step for p in checkpoints.glob("*") if not p.name.startswith(".")):
            break
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    time.sleep(2)  # the ranks, in sessions of their own, notice within a fraction of a second
