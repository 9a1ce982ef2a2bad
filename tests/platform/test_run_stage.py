"""The body of every stage task: cache, failure, cancellation, publishing."""

import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from stages.registry import get_stage
from stages.spec import PROJECT_ROOT, ConfigError
from storage import home, leases, records, registry, store
from storage.datasets import open_dataset
from storage.files import read_json
from tasks.publishing import name_of, names_of
from tasks.run import StageError, finish_flow, prepare, run_stage, start_flow
from tasks.stopping import Cancelled

TOY = "tests.toy_stage"


def events(into, stop=None):
    def listen(event):
        into.append(event["event"])
        if stop:
            stop(event)

    return listen


def test_a_stage_key_names_the_one_output_of_the_kind_that_is_needed(state_dir):
    made = run_stage(TOY, {}, {"steps": 6})
    for text in (made.key, made.key[:6]):
        for name, kind in (("model", "model"), ("data", "dataset"), ("data", "file")):
            assert store.resolve(text, kind) == store.resolve(made.outputs[name])
    with pytest.raises(store.StoreError, match=f"there is no model '{made.key[:5]}'"):
        store.resolve(made.key[:5], "model")
    read = run_stage("ingest", {"data": made.key[:8]}, {})
    assert read.key == run_stage("ingest", {"data": made.outputs["data"]}, {}).key
    assert "quarantine" in read.outputs and store.resolve(read.key, "dataset") == store.resolve(read.outputs["data"])
    refused = rf"stage ingest with key {read.key[:12]} made no models; write .*: {read.outputs['data']} \(data\)"
    with pytest.raises(store.StoreError, match=refused):
        store.resolve(read.key, "model")
    few = {"train": 8, "validation": 2, "test": 2}
    world = run_stage("world", {}, {one: few for one in ("text", "demonstrations", "comparisons", "prompts")})
    refused = rf"made several datasets; write .*: .*{world.outputs['pairs']} \(pairs\), {world.outputs['prompts']} "
    with pytest.raises(store.StoreError, match=refused):
        store.resolve(world.key, "dataset")


def test_second_run_is_cached_and_outputs_are_checked(state_dir):
    seen = []
    first = run_stage(TOY, {}, {"steps": 6}, on_event=events(seen))
    assert not first.cached and "started" in seen and first.perf["seconds"] > 0 and first.perf["peak_memory_mib"] > 1
    assert (
        first.perf["tokens_per_second"] == 3.5 and first.metrics["position"] and first.seconds == first.perf["seconds"]
    )
    seen.clear()
    again = run_stage(TOY, {}, {"steps": 6}, name_as="other", on_event=events(seen))
    assert again.cached and "started" not in seen and again.key == first.key
    assert store.resolve("dataset:other@latest").digest == store.resolve(first.outputs["data"]).digest
    assert registry.lookup("other").versions[1]["digest"] == registry.lookup("toy").versions[1]["digest"]
    os.utime(Path(first.paths["model"]) / "weights.bin")  # touched but unchanged: still good
    assert run_stage(TOY, {}, {"steps": 6}).cached
    weights = Path(first.paths["model"]) / "weights.bin"
    good = weights.read_bytes()
    weights.write_bytes(b"damaged")
    assert records.problems(records.read(first.key))
    repaired = run_stage(TOY, {}, {"steps": 6})
    assert not repaired.cached and repaired.outputs == first.outputs and weights.read_bytes() == good
    shutil.rmtree(first.paths["data"])
    shutil.rmtree(state_dir / "datasets" / "other")
    assert not run_stage(TOY, {}, {"steps": 6}).cached
    assert run_stage(TOY, {}, {"steps": 6, "sleep": 0.001}).cached  # speed is not identity
    forced = run_stage(TOY, {}, {"steps": 6}, force=True)
    assert not forced.cached and forced.outputs == first.outputs
    assert not run_stage(TOY, {}, {"steps": 6}, seed=1).cached


def test_a_result_of_a_server_at_another_address_is_reused_with_a_word(state_dir):
    """The address is no identity, so that a run goes on where its server was started elsewhere; another model behind
    the same name would be reused in silence."""
    first = run_stage(TOY, {}, {"steps": 6, "server": "http://a:1/v1"})
    seen = []
    again = run_stage(TOY, {}, {"steps": 6, "server": "http://b:2/v1"}, on_event=seen.append)
    assert again.cached and again.key == first.key
    (told,) = [event["text"] for event in seen if event["event"] == "warning"]
    assert "server=http://a:1/v1, now http://b:2/v1" in told and "--force" in told
    assert [one["text"] for one in again.warnings] == [told]
    assert not run_stage(TOY, {}, {"steps": 6, "server": "http://a:1/v1"}).warnings


def test_who_takes_the_candidate_of_somebody_else_is_told(state_dir, monkeypatch):
    """Of a home that several people share: anna's model stays where it is, under its version."""
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "anna")
    hers = run_stage(TOY, {}, {"steps": 6})
    assert not run_stage(TOY, {}, {"steps": 7}).warnings, "her own"
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "ben")
    assert not run_stage(TOY, {}, {"steps": 7}).warnings, "nothing new"
    seen = []
    again = run_stage(TOY, {}, {"steps": 6}, seed=1, on_event=seen.append)
    (told,) = [event["text"] for event in seen if event["event"] == "warning"]
    assert told.startswith("model:toy@candidate was version 2, which anna made, and is version 3 now")
    assert [one["code"] for one in again.warnings] == ["alias_taken_over"] and "model:toy/2" in told
    assert store.resolve("model:toy/1").ref == hers.outputs["model"]
    assert not run_stage(TOY, {}, {"steps": 8}).warnings, "it is his by now"
    assert not run_stage(TOY, {}, {"steps": 9}, name_as="bens").warnings


def test_results_of_stages_that_ran_by_themselves_are_listed(state_dir):
    from flows import report

    first, second = (run_stage(TOY, {}, {"steps": 6}, seed=seed) for seed in (0, 1))
    listed = report.listing("results")
    assert [row["key"] for row in listed] == [second.key[:12], first.key[:12]] and {row["stage"] for row in listed} == {
        "toy"
    }
    assert (
        "model:" in listed[0]["outputs"] and "dataset:" in listed[0]["outputs"] and "position" in listed[0]["numbers"]
    )
    assert report.describe(listed[0]["key"])["key"] == second.key


def test_a_stage_that_failed_by_itself_is_listed_with_its_error_and_how_to_go_on(state_dir, tmp_path, monkeypatch):
    """It was in no list: its key stood in the terminal where it had failed and nowhere else."""
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "ada")
    (tmp_path / "raw text.txt").write_text("x")
    given, config = {"text": str(tmp_path / "raw text.txt")}, {"steps": 9, "fail_at": 7}
    with pytest.raises(StageError) as caught:
        run_stage(TOY, given, config, seed=3, name_as="walk")
    done = run_stage(TOY, {}, {"steps": 3})
    (listed, text) = looked("ls", "results")
    assert {row["user"] for row in listed["results"]} == {"ada"}
    assert [(row["key"], row["status"]) for row in listed["results"]] == [
        (done.key[:12], "finished"),
        (caught.value.key[:12], "failed"),
    ]
    assert listed["results"][1]["numbers"] == "RuntimeError: asked to fail at step 7" and "asked to fail" in text
    shown, text = looked("show", caught.value.key[:12])
    assert shown["user"] == "ada" and "user    ada" in text
    assert shown["error"] == "RuntimeError: asked to fail at step 7" and f"go on   {shown['go_on']}" in text
    program, *command = shlex.split(shown["go_on"])
    assert program == "posttrain" and command[-4:] == ["--seed", "3", "--name-as", "walk"]
    plan, _ = looked(*command, "--dry-run")
    assert (plan["key"], plan["plan"], plan["seed"]) == (caught.value.key, "continue", 3)
    seen = []
    look = lambda event: (
        event["event"] == "progress" and not seen and seen.append(looked("ls", "results")[0]["results"])
    )
    with pytest.raises(StageError):
        run_stage(TOY, given, {**config, "sleep": 0.01}, seed=3, on_event=look)
    assert seen[0][0]["status"] == "running" and seen[0][0]["key"] == caught.value.key[:12]


def test_a_stage_that_failed_in_its_own_deployment_goes_on_by_a_command_that_does(state_dir):
    """`posttrain rerun`, which was named, refuses the run of one stage."""
    run = start_flow("stage:toy", {}, run_id="12345678-1")
    with pytest.raises(StageError) as caught:
        run_stage(TOY, {}, {"steps": 9, "fail_at": 7}, seed=3, name_as="walk", flow_run=run.as_flow_run("toy"))
    finish_flow(run.run_id, "FAILED", "asked to fail")
    for what in (run.run_id, caught.value.key[:12]):
        shown, text = looked("show", what)
        told = shown["unfinished"][0]["go_on"] if "unfinished" in shown else shown["go_on"]
        assert f"go on   {told}" in text.replace("go on     ", "go on   ")
        program, *command = shlex.split(told)
        assert program == "posttrain" and command[0] == "stage" and command[-2:] == ["--name-as", "walk"]
        plan, _ = looked(*command, "--dry-run")
        assert (plan["key"], plan["plan"]) == (caught.value.key, "continue")


def test_failure_carries_the_stage_own_words(state_dir):
    with pytest.raises(StageError) as caught:
        run_stage(TOY, {}, {"steps": 9, "fail_at": 7})
    assert caught.value.message == "asked to fail at step 7" and caught.value.kind == "RuntimeError"
    assert "toy_stage.py" in str(caught.value) and "stage.log" in str(caught.value)
    assert records.read(caught.value.key) is None
    import pickle

    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_bad_inputs_and_settings_are_refused_before_anything_starts(state_dir, tmp_path):
    with pytest.raises(ConfigError, match="did you mean 'steps'"):
        run_stage(TOY, {}, {"step": 3})
    with pytest.raises(ConfigError, match="has no input"):
        run_stage(TOY, {"datta": "x"})
    with pytest.raises(store.StoreError, match="input model of stage toy"):
        run_stage(TOY, {"model": str(tmp_path / "nowhere")})
    with pytest.raises(ConfigError, match="there is no stage"):
        run_stage("stf")
    assert not list((state_dir / "work").glob("*")) if (state_dir / "work").exists() else True


def test_a_name_that_nothing_can_have_is_refused_before_the_stage_runs(state_dir):
    """It was refused when the outputs were published: after the training."""
    events = []
    for name in ("my/policy", "policy\n", "x" * 201):
        with pytest.raises(ConfigError, match="cannot be a name"):
            run_stage(TOY, {}, {"steps": 2}, name_as=name, on_event=events.append)
    assert events == []
    assert run_stage(TOY, {}, {"steps": 2}, name_as="x" * 200).outputs


def test_what_is_published_beside_a_model_says_what_it_is():
    """Reference log-probs of a recipe's DPO were dataset:dpo."""
    align = names_of(get_stage("align").SPEC, "dpo")
    assert align == {"model": "dpo", "epoch": "dpo-epoch", "ref_logps": "dpo-ref_logps"}
    assert [name_of(align, one) for one in ("model", "epoch.2", "ref_logps")] == ["dpo", "dpo-epoch-2", "dpo-ref_logps"]
    assert names_of(get_stage("sft").SPEC, None) == {"model": "sft", "epoch": "sft-epoch"}
    rl = names_of(get_stage("rl").SPEC, "policy")
    assert rl["model"] == "policy" and rl["rollouts"] == "policy-rollouts" and len({*rl.values()}) == len(rl)
    assert names_of(get_stage("ingest").SPEC, "pairs")["data"] == "pairs"


def test_raw_data_with_a_name_as_long_as_one_can_be_is_ingested(state_dir, tmp_path):
    file = tmp_path / ("n" * 249 + ".jsonl")
    file.write_text("".join(f'{{"prompt": "what is {i}?", "completion": "{i}"}}\n' for i in range(4)))
    assert run_stage(TOY, {"data": str(file)}, {"steps": 2}).outputs


def test_key_depends_on_input_content_not_on_its_place(state_dir, tmp_path):
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("same")
    keys = {prepare(TOY, {"text": str(tmp_path / n)}).key for n in ("a.txt", "b.txt")}
    (tmp_path / "b.txt").write_text("other")
    assert len(keys) == 1 and prepare(TOY, {"text": str(tmp_path / "b.txt")}).key not in keys


def test_a_failing_listener_does_not_fail_the_stage(state_dir, capsys):
    def broken(event):
        raise RuntimeError("the log server is away")

    assert run_stage(TOY, {}, {"steps": 2}, on_event=broken).metrics
    assert capsys.readouterr().err.count("the log server is away") == 1


@pytest.mark.parametrize("kind", [KeyboardInterrupt, Cancelled])
def test_cancel_takes_the_whole_tree_down(state_dir, kind):
    pids = []

    def stop(event):
        if event["event"] == "started":
            pids.append(event["pid"])
        if event["event"] == "metric":
            pids.extend(p.pid for p in psutil.Process(pids[0]).children(recursive=True))
            raise kind("cancelled from outside")

    started = time.monotonic()
    with pytest.raises(kind):
        run_stage(TOY, {}, {"steps": 5000, "sleep": 0.05}, on_event=stop)
    assert not any(psutil.pid_exists(p) for p in pids) and time.monotonic() - started < 240
    assert leases.holder(next((state_dir / "leases").glob("stage-*.json"), state_dir / "none")) is None


def test_sigterm_to_the_parent_ends_the_child(state_dir):
    code = (
        f"from tasks.run import run_stage; run_stage({TOY!r}, {{}}, {{'steps': 5000, 'sleep': 0.05}}, on_event=lambda"
        " e: e['event'] == 'started' and print(e['pid'], flush=True))"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code], cwd=PROJECT_ROOT, stdout=subprocess.PIPE, text=True, stderr=subprocess.PIPE
    )
    child = int(parent.stdout.readline())
    parent.send_signal(signal.SIGTERM)
    _, err = parent.communicate(timeout=120)
    assert parent.returncode != 0 and "Cancelled" in err and not psutil.pid_exists(child)


def test_second_copy_waits_or_is_refused(state_dir):
    code = (
        f"from tasks.run import run_stage; run_stage({TOY!r}, {{}}, {{'steps': 60, 'sleep': 0.05}}, on_event=lambda e:"
        " print(e['event'], flush=True))"
    )
    other = subprocess.Popen([sys.executable, "-c", code], cwd=PROJECT_ROOT, stdout=subprocess.PIPE, text=True)
    while other.stdout.readline() != "started\n":
        assert other.poll() is None
    with pytest.raises(leases.LeaseBusy, match=f"process {other.pid}"):
        run_stage(TOY, {}, {"steps": 60}, wait=False)
    seen = []
    result = run_stage(TOY, {}, {"steps": 60}, on_event=events(seen))
    assert result.cached and "waiting" in seen and "started" not in seen
    other.communicate(timeout=60)
    assert other.returncode == 0


def test_crash_between_publish_and_record_needs_no_second_run(state_dir, monkeypatch):
    class Killed(BaseException):
        pass

    def die(*_):
        raise Killed

    real = records.write
    monkeypatch.setattr(records, "write", die)
    with pytest.raises(Killed):
        run_stage(TOY, {}, {"steps": 4})
    monkeypatch.setattr(records, "write", real)
    real_publish = store.publish_model
    shutil.rmtree(state_dir / "leases")
    seen = []
    result = run_stage(TOY, {}, {"steps": 4}, on_event=events(seen))
    assert "started" not in seen and not result.cached and records.find(result.key)
    monkeypatch.setattr(store, "publish_model", lambda *a: die())
    with pytest.raises(Killed):
        run_stage(TOY, {}, {"steps": 5})
    monkeypatch.setattr(store, "publish_model", real_publish)
    seen.clear()
    result = run_stage(TOY, {}, {"steps": 5}, on_event=events(seen))
    assert "started" not in seen and records.find(result.key)


def test_gpu_slot_is_taken_only_by_gpu_stages(state_dir, monkeypatch):
    import dataclasses

    import tests.toy_stage as toy
    from tasks.devices import take_devices

    monkeypatch.setenv("POSTTRAIN_GPU_SLOTS", "1")
    slots, device, env = take_devices(toy.SPEC, 1, True, lambda e: None)
    assert slots == [] and device == "cpu" and env == {"CUDA_VISIBLE_DEVICES": ""}
    slots, device, env = take_devices(dataclasses.replace(toy.SPEC, gpu=True), 1, True, lambda e: None)
    assert len(slots) == 1 and device == "cpu"
    with pytest.raises(leases.LeaseBusy):
        take_devices(dataclasses.replace(toy.SPEC, gpu=True), 1, False, lambda e: None)
    slots[0].release()
    monkeypatch.setenv("POSTTRAIN_GPU_SLOTS", "many")
    with pytest.raises(ConfigError, match="write the number"):
        take_devices(dataclasses.replace(toy.SPEC, gpu=True), 1, False, lambda e: None)


@pytest.fixture()
def cards(monkeypatch):
    """``cards(n)``: this machine has so many GPUs."""
    return lambda n: monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(n))))


def test_the_slots_of_a_stage_are_on_cards_of_their_own(state_dir, monkeypatch, cards):
    import dataclasses

    import tests.toy_stage as toy
    from tasks.devices import take_devices

    spec = dataclasses.replace(toy.SPEC, gpu=True)
    cards(2)
    monkeypatch.setenv("POSTTRAIN_GPU_SLOTS", "4")
    one, device, env = take_devices(spec, 1, False, lambda e: None)
    assert device == "auto" and env == {"CUDA_VISIBLE_DEVICES": "0"}
    two, _, env = take_devices(spec, 2, False, lambda e: None)
    assert env == {"CUDA_VISIBLE_DEVICES": "1,0"} and [s.index for s in two] == [1, 2]
    with pytest.raises(leases.LeaseBusy):  # a slot is left, and it is on the card of the other
        take_devices(spec, 2, False, lambda e: None)
    last, _, env = take_devices(spec, 1, False, lambda e: None)
    assert env == {"CUDA_VISIBLE_DEVICES": "1"}
    with pytest.raises(ConfigError, match="devices=3: this machine offers 2 GPU.s. and 4 slot.s.; write devices=2"):
        take_devices(spec, 3, False, lambda e: None)
    [s.release() for s in one + two + last]


def test_vllm_over_several_cards_leases_them_all(state_dir, cards):
    import dataclasses

    import tests.toy_stage as toy
    from stages.rl import Config
    from tasks.devices import engine_cards, take_devices

    spec = dataclasses.replace(toy.SPEC, gpu=True)
    asked = lambda **options: engine_cards(Config(engine="vllm", engine_options=options))
    assert (
        asked(tensor_parallel_size=2),
        asked(tensor_parallel_size=2, pipeline_parallel_size=2),
        asked(),
        engine_cards(Config()),
        engine_cards(toy.SPEC.config()),
    ) == (2, 4, 1, 1, 1)
    cards(3)
    slots, device, env = take_devices(spec, 1, False, lambda e: None, 2)
    assert len(slots) == 2 and device == "auto" and env == {"CUDA_VISIBLE_DEVICES": "0,1"}
    with pytest.raises(ConfigError, match="split its model over 4 GPUs.*write {tensor_parallel_size: 3}"):
        take_devices(spec, 1, False, lambda e: None, 4)
    [s.release() for s in slots]


@pytest.mark.parametrize(
    "visible, found",
    [
        ("1, 0", ["1", "0"]),
        ("GPU-8932f937,MIG-2", ["GPU-8932f937", "MIG-2"]),
        ("2,-1,0", ["2"]),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
    ],
)
def test_visible_devices_are_those_that_cuda_reads(monkeypatch, visible, found):
    """NoDevFiles is what Slurm writes for a job without GPUs: it counted as a GPU, beside which two ranks on the CPU were
    refused."""
    from tasks.devices import cuda_devices, take_devices

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.delenv("POSTTRAIN_GPU_SLOTS", raising=False)
    assert cuda_devices() == found
    if not found:
        assert take_devices(get_stage("sft").SPEC, 2, False, print)[:2] == ([], "cpu")


def test_gpus_without_device_files_are_those_that_nvidia_smi_names(state_dir, tmp_path, monkeypatch):
    """As on WSL2."""
    from tasks import devices

    if Path("/proc/driver/nvidia/gpus").is_dir() or list(Path("/dev").glob("nvidia[0-9]*")):
        pytest.skip("this machine has device files")
    program = tmp_path / "nvidia-smi"
    program.write_text(
        "#!/bin/sh\n[ $1 = -L ] && printf 'GPU 0: NVIDIA RTX (UUID: GPU-1)\\n  MIG 1g.5gb (UUID: MIG-2)\\nGPU 1: NVIDIA"
        " RTX (UUID: GPU-3)\\n'\n"
    )
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    for content, found in ((None, ["0", "1"]), ("#!/bin/sh\nexit 9\n", [])):
        if content:
            program.write_text(content)
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
        devices._cards_told.cache_clear()
        assert devices.cuda_devices() == found
    devices._cards_told.cache_clear()


def test_the_doctor_fails_where_torch_cannot_use_the_gpus(state_dir, tmp_path, monkeypatch, cards):
    import torch

    from flows.doctor import torch_device

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert [ok for ok, _ in torch_device(tmp_path, False)] == [True]
    cards(2)
    ((ok, text),) = torch_device(tmp_path, False)
    assert not ok and "0, 1" in text and torch.__version__ in text


def test_the_doctor_tries_whether_a_gpu_gets_its_kernels(monkeypatch, tmp_path):
    import torch

    from flows.doctor import torch_device
    from stages.models import fused

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda i=0: "a GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(fused, "triton", None)
    (_, (ok, text)) = torch_device(tmp_path, False)
    assert not ok and "pip install triton" in text
    monkeypatch.setattr(fused, "triton", object())
    fused.compiles.cache_clear()
    (_, (ok, text)) = torch_device(tmp_path, False)  # this torch makes no tensors there
    assert not ok and "install gcc" in text
    fused.compiles.cache_clear()
    monkeypatch.setattr(fused, "compiles", lambda: True)
    assert [ok for ok, _ in torch_device(tmp_path, False)] == [True, True]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    (_, (ok, text)) = torch_device(tmp_path, False)
    assert ok and "older than Ampere" in text


def test_the_doctor_names_models_and_datasets_that_lost_their_files(state_dir):
    from flows.doctor import contents

    result = run_stage("tests.toy_stage", {}, {"steps": 2}, name_as="kept")
    assert [ok for ok, _ in contents(state_dir, False)] == [True]
    part = next(Path(result.paths["data"]).glob("part-*.parquet"))
    part.chmod(0o644)
    os.truncate(part, 100)
    ((ok, text),) = contents(state_dir, False)
    assert not ok and "dataset:kept" in text and part.name in text
    shutil.rmtree(result.paths["model"])
    assert any(not ok and "model:kept" in text for ok, text in contents(state_dir, False))


def test_a_damaged_checkpoint_is_told(state_dir):
    config = {"steps": 9, "save_every": 2, "fail_at": 7}
    with pytest.raises(StageError):
        run_stage("tests.toy_stage", {}, config)
    newest = sorted(state_dir.glob("work/*/checkpoints/step-*"))[-1]
    state = newest / "state.json"
    state.chmod(0o644)
    os.truncate(state, 10)
    told = []
    with contextlib.suppress(StageError):
        run_stage("tests.toy_stage", {}, config, on_event=told.append)
    (warning,) = [one["text"] for one in told if one.get("code") == "checkpoint_damaged"]
    assert f"step {int(newest.name[5:])} " in warning and f"step {int(newest.name[5:]) - 2}." in warning


def test_devices_have_the_numbers_of_nvidia_smi(monkeypatch):
    from tasks.processes import environment

    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    assert environment()["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "FASTEST_FIRST")  # who chose, chose
    assert environment()["CUDA_DEVICE_ORDER"] == "FASTEST_FIRST"


def test_run_record_lists_its_stages(state_dir):
    from tasks.run import finish_flow, start_flow

    run = start_flow("demo", {"x": 1})
    run_stage(TOY, {}, {"steps": 3}, flow_run=run.as_flow_run("first"))
    second = run_stage(TOY, {}, {"steps": 3}, flow_run=run.as_flow_run("second"))
    finish_flow(run.run_id, "FINISHED")
    back = records.get_run(run.run_id[:-2])
    assert back.status == "FINISHED" and list(back.stages()) == ["first", "second"]
    assert back.stages()["second"]["cached"] and back.stages()["second"]["key"] == second.key
    assert records.get_run("latest").run_id == run.run_id
    data = read_json(start_flow("demo", {}).path)
    data["owner"]["start"] = 1.0
    assert records.RunRecord(data).status == "KILLED"


def test_lineage_reads_from_a_name_to_the_outside(state_dir, tmp_path):
    from storage import lineage

    raw = tmp_path / "raw.txt"
    raw.write_text("x")
    first = run_stage(TOY, {"text": str(raw)}, {"steps": 3})
    run_stage(TOY, {"data": first.outputs["data"], "model": first.outputs["model"]}, {"steps": 4}, name_as="final")
    tree = lineage.tree("model:final@candidate")
    assert (
        tree["stage"] == "toy"
        and set(tree["inputs"]) == {"data", "model"}
        and tree["names"] == ["model:final/1 (candidate)"]
    )
    leaf = tree["inputs"]["data"]["inputs"]["text"]
    assert leaf["path"] == str(raw) and "stage" not in leaf
    assert tree["inputs"]["model"].get("again") is True
    text = "\n".join(lineage.lines(tree))
    assert "(from outside)" in text and "└─" in text
    assert [r["stage"] for r in records.users_of(store.resolve(first.outputs["model"]).digest)] == ["toy"]
    assert lineage.tree(first.key[:12])["key"] == first.key
    with pytest.raises(store.StoreError):
        lineage.tree("model:unknown")


def test_the_name_of_a_raw_file_is_part_of_what_was_given(state_dir, tmp_path):
    """The same bytes as lines of text and as CSV are two datasets, a file that moved is the one it was, and rows name
    the file that they were read from.
    """
    found = {}
    for name in ("x.txt", "x.csv", "y.CSV", "moved/x.csv"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text('prompt,completion\n"1, 2",three\nplain,words\nlonely,\nmore,words\nyet more,words\n,none\n')
        found[name] = run_stage("ingest", {"data": str(path)}, {"max_quarantine_fraction": 0.5})
    kinds = {name: store.resolve(one.outputs["data"]).manifest["kind"] for name, one in found.items()}
    assert kinds == {"x.txt": "text/1", **dict.fromkeys(("x.csv", "y.CSV", "moved/x.csv"), "demonstrations/1")}
    assert [one.cached for one in found.values()] == [False, False, False, True]
    for name in ("x.csv", "y.CSV"):
        assert {row["source_file"] for row in open_dataset(found[name].paths["quarantine"]).iter_rows()} == {name}
        assert {row["dataset"] for row in open_dataset(found[name].paths["data"]).iter_rows()} == {name[0]}


def test_stage_runs_by_hand(state_dir, tmp_path):
    import json

    (tmp_path / "s.json").write_text(json.dumps({"stage": TOY, "config": {"steps": 2}}))
    run = subprocess.run(
        [sys.executable, "-m", "stages", str(tmp_path / "s.json")], capture_output=True, text=True, cwd=PROJECT_ROOT
    )
    lines = [json.loads(line) for line in run.stdout.splitlines()]
    assert run.returncode == 0 and lines[-1]["event"] == "done" and (tmp_path / "s.work" / "out" / "model").is_dir()
    (tmp_path / "s.json").write_text(json.dumps({"stage": TOY, "config": {"stepps": 2}}))
    run = subprocess.run(
        [sys.executable, "-m", "stages", str(tmp_path / "s.json")], capture_output=True, text=True, cwd=PROJECT_ROOT
    )
    assert run.returncode == 2 and "did you mean 'steps'" in run.stdout and "Traceback" not in run.stderr


def test_a_signal_while_a_process_is_started_waits_until_somebody_can_end_it():
    import signal

    from tasks.stopping import signals_held

    class Ended(BaseException):
        pass

    def end(signum, frame):
        raise Ended

    before = signal.signal(signal.SIGTERM, end)
    started = None
    try:
        with pytest.raises(Ended):
            with signals_held():
                signal.raise_signal(signal.SIGTERM)
                started = "known"  # reached although the signal has come
        assert started == "known" and signal.getsignal(signal.SIGTERM) is end
    finally:
        signal.signal(signal.SIGTERM, before)


def test_what_a_rubric_names_is_part_of_its_identity(tmp_path):
    """A function or a word list that changed behind an unchanged rubric file is another ingestion; a wrong rubric is
    left to the stage to refuse.
    """
    rubric, source, words = tmp_path / "r.yaml", tmp_path / "score.py", tmp_path / "words.txt"
    rubric.write_text(
        "categories: {c: {items: [{id: own, kind: verifiable, criterion: Own., weight: 1.0, "
        f"scorer: {{kind: python, source: {source}, files: [{words}]}}}}]}}}}"
    )

    def key():
        return prepare("ingest", {"data": str(rubric)}, {"kind": "rubric_items/1"}).key

    source.write_text("def score(prompt, completion, answer):\n    return 1.0\n")
    words.write_text("good\n")
    first = key()
    assert key() == first
    source.write_text("def score(prompt, completion, answer):\n    return 0.0\n")
    second = key()
    words.write_text("fine\n")
    assert len({first, second, key()}) == 3
    words.unlink()
    assert key()


def looked(*arguments):
    """(the JSON line, the text) of a command that only looks."""
    from typer.testing import CliRunner

    from flows.cli import app

    json_, text = (CliRunner().invoke(app, [*arguments, *more]) for more in (["--json"], []))
    assert json_.exit_code == 0 and text.exit_code == 0, (json_.output, text.output, json_.exception, text.exception)
    return json.loads(json_.stdout.splitlines()[-1]), text.stdout


def test_a_run_that_is_underway_says_how_far_it_is_and_what_it_has_cost(state_dir):
    """And one that failed, where it stopped; both compare with each other, up to the step that both have come to."""
    run = start_flow("walks", {"seed": 0})
    first = run_stage(TOY, {}, {"steps": 3}, flow_run=run.as_flow_run("first"))
    seen = []

    def look(event):
        if event["event"] == "progress" and not seen:
            key = prepare(TOY, {}, {"steps": 20}, seed=1).key
            names = (("show", run.run_id), ("show", key[:10]), ("cost", run.run_id), ("status",), ("ls", "runs"))
            seen.extend(looked(*one) for one in names)

    second = run_stage(TOY, {}, {"steps": 20}, seed=1, flow_run=run.as_flow_run("second"), on_event=look)
    (shown, text), (stage, stage_text), (cost, cost_text), (status, _), (listed, _) = seen
    (one,) = shown["unfinished"]
    assert [done["label"] for done in shown["stages"]] == ["first"] and shown["status"] == "RUNNING"
    assert (one["label"], one["stage"], one["key"], one["status"]) == ("second", "toy", second.key, "running")
    assert (one["progress"]["done"], one["progress"]["total"]) == (1, 20)
    points = [json.loads(line) for line in (home.work_dir(second.key) / "metrics.jsonl").read_text().splitlines()]
    assert one["metrics"] == points[one["step"]]["metrics"] and one["seconds"] > 0
    assert "step second  stage toy\n  runs    since" in text and "number  position = " in text
    assert stage["status"] == "running" and stage["key"] == second.key and "number  abs = " in stage_text
    hours = {row["stage"]: row["count"] for row in cost["ledger"]}
    assert (
        hours["first"] == pytest.approx(first.seconds / 3600)
        and 0 < hours["second"]
        and "until now: second" in cost_text
    )
    assert cost["unfinished"] == ["second"] and cost["items"]["cpu_hours"] == pytest.approx(sum(hours.values()))
    for rows in (status["runs"], listed["runs"]):
        assert rows[0]["now"] == "second 1/20"
    assert status["stages"] == []  # those of runs stand there
    by_itself = []
    tell = lambda event: event["event"] == "progress" and not by_itself and by_itself.append(looked("status"))
    alone = run_stage(TOY, {}, {"steps": 20}, seed=2, on_event=tell)
    ((status, text),) = by_itself
    assert [(one["key"], one["now"]) for one in status["stages"]] == [(alone.key[:12], "1/20")]
    assert "running by themselves" in text
    finish_flow(run.run_id, "FINISHED")
    over, text = looked("show", run.run_id)
    assert over["unfinished"] == [] and over["next"] == [] and "so far" not in text

    broken = start_flow("walks", {"seed": 1})
    with pytest.raises(StageError):
        run_stage(TOY, {}, {"steps": 9, "fail_at": 7}, flow_run=broken.as_flow_run("second"))
    finish_flow(broken.run_id, "FAILED", "asked to fail")
    shown, text = looked("show", broken.run_id)
    (one,) = shown["unfinished"]
    assert (one["status"], one["step"]) == ("stopped", 6) and f"posttrain rerun {broken.run_id[:8]}" in text
    found, text = looked("compare", broken.run_id, run.run_id)
    assert "second of a has not finished (stopped) and is at step 6" in text and "those until step 6" in text
    six = json.loads((home.work_dir(one["key"]) / "metrics.jsonl").read_text().splitlines()[6])["metrics"]
    assert [(row["metric"], row["a"], row["b"]) for row in found["metrics"]] == [
        (name, six[name], points[6]["metrics"][name]) for name in six
    ]
    assert "second.steps: 9 -> 20" in found["config"]


def test_of_a_list_of_components_what_differs_is_named_by_its_place(capsys):
    """The whole list was printed, a hundred settings for one weight."""
    from flows.compare import differences
    from flows.report import _print_maker
    from stages.registry import get_spec

    def config(*rewards):
        return get_spec("rl").config.model_validate({"rewards": list(rewards)}).resolved()

    known = {"kind": "verifier", "name": "right", "correct_value": 2.0}
    short = {"kind": "length", "name": "short"}
    one, two = config(known, short), config({**known, "weight": 0.5}, {**short, "domains": ["maths"]})
    assert differences(one, two) == ["rewards[0].weight: 1.0 -> 0.5", "rewards[1].domains: [] -> ['maths']"]
    (more,) = differences(config(known), one)
    assert more.startswith("rewards[1]: (not there) -> {") and "'kind': 'length'" in more
    assert differences({"stop": ["a"]}, {"stop": ["b"]}) == ["stop: ['a'] -> ['b']"]
    _print_maker({"stage": "rl", "config": two})
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert [line for line in lines if line.startswith("config")] == [
        "config  rewards[0].name = right",
        "config  rewards[0].weight = 0.5",
        "config  rewards[0].correct_value = 2.0",
        "config  rewards[1].name = short",
        "config  rewards[1].kind = length",
        "config  rewards[1].domains = ['maths']",
    ]
    assert "default rewards[1].weight = 1.0" in lines and "default rewards[0].kind = verifier" in lines


def test_the_next_steps_of_a_run_are_those_of_its_plan():
    from flows.config import load_preset
    from flows.recipe import Plan, get_recipe, load_config
    from flows.report import steps_left

    config = load_config("post_training", load_preset("post_training", "demo"))
    plan = Plan("post_training", 0, [])
    get_recipe("post_training").method(plan, config)
    steps = [row["step"] for row in plan.table]
    run = start_flow("post_training", config.model_dump(mode="json"))
    assert steps_left(run, {}) == steps
    outputs = {name: f"dataset:{name}@0" for name in ("text", "demonstrations", "comparisons", "pairs", "prompts")}
    run.data["stages"] = [{"label": "world", "outputs": outputs, "metrics": {}}]
    assert steps_left(run, {"ingest_pairs": {}}) == [step for step in steps if step not in ("world", "ingest_pairs")]


def test_a_stage_says_what_it_would_do_and_does_nothing(tmp_path):
    raw = tmp_path / "raw.jsonl"
    raw.write_text("".join(json.dumps({"prompt": f"p {i}", "completion": f"c {i}"}) + "\n" for i in range(4)))
    command = ("stage", "mix", "--input", f"data.a={raw}", "--dry-run")
    plan, text = looked(*command)
    assert (plan["plan"], plan["key"], plan["inputs"][0]["kind"]) == ("run", None, "raw data, ingested first")
    assert "once its raw data has been ingested" in text and not list(records.all_records())  # nor was it ingested
    run_stage("ingest", {"data": str(raw)}, {"kind": "demonstrations/1"})
    plan, text = looked(*command)
    (given,) = plan["inputs"]
    assert (plan["plan"], given["kind"], given["rows"], given["splits"]) == ("run", "demonstrations/1", 4, {"train": 4})
    assert plan["config"]["weights"] == {} and "(what stays at its default is left out" in text
    made = run_stage("mix", {"data.a": str(raw)})
    plan, text = looked(*command)
    assert (plan["plan"], plan["key"], plan["outputs"]) == (
        "cached",
        made.key,
        made.outputs,
    ) and "would be reused" in text
    assert looked(*command, "--force")[0]["plan"] == "run"
    with pytest.raises(StageError):
        run_stage(TOY, {}, {"steps": 9, "fail_at": 7})
    plan, text = looked("stage", TOY, "steps=9", "fail_at=7", "--dry-run")
    assert plan["plan"] == "continue" and plan["unfinished"]["step"] == 6 and "continue what was stopped, at" in text


@pytest.mark.parametrize("finished", [True, False])
def test_the_beginning_of_several_stage_keys_is_refused_in_words(finished):
    from flows import report
    from storage.files import atomic_write_json

    for key in ("abcdef01" * 8, "abcdef02" * 8):
        path = records.record_path(key) if finished else home.work_dir(key) / "SPEC.json"
        atomic_write_json(path, {"key": key, "stage": TOY, "outputs": {}})
    with pytest.raises(store.StoreError, match="stage key abcdef is ambiguous; write more digits: abcdef0"):
        report.describe("abcdef")
