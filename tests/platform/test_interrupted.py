"""What is exact although something happens meanwhile: a kill between two acts of publishing, inputs and code that
change while a stage waits or runs, hosts whose clocks differ, a full disk, libraries that are upgraded."""

import errno
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from storage import home, leases, records, registry, store, work
from storage.files import atomic_write_json, read_json
from tasks import people, processes, run
from tasks.run import StageError, run_stage

TOY = "tests.toy_stage"


class Killed(BaseException):
    pass


def killed(*_, **__):
    raise Killed


def dataset_of(state_dir, name="toy-data"):
    return store.resolve(f"dataset:{name}@latest").digest


# --- publishing -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "instant", ["before the name points at it", "while a copy of it is removed", "before the record"]
)
def test_publishing_goes_on_wherever_it_was_cut_off(state_dir, monkeypatch, instant):
    """A dataset that was moved into the store before the kill stayed without its ``@latest``, and one half removed
    could never be published.
    """
    first = run_stage(TOY, {}, {"steps": 4})
    if instant == "while a copy of it is removed":  # the same bytes again, under another seed's key but for one step

        def half(path, *_, **__):
            if Path(path).name == "data":
                (Path(path) / "manifest.json").unlink()
                raise Killed

        monkeypatch.setattr(store.shutil, "rmtree", half)
        source = state_dir / "copy" / "data"
        source.parent.mkdir()
        shutil.copytree(first.paths["data"], source)
        with pytest.raises(Killed):
            store.publish_dataset(source, "toy-data", Path(first.paths["data"]).name)
        monkeypatch.undo()
        monkeypatch.setenv("POSTTRAIN_HOME", str(state_dir))
        assert (
            source.is_dir()
            and store.publish_dataset(source, "toy-data", Path(first.paths["data"]).name).path == first.paths["data"]
            and not source.exists()
        )
        return
    real = {"before the name points at it": (store, "set_latest"), "before the record": (records, "write")}[instant]
    with monkeypatch.context() as patch:
        patch.setattr(*real, killed)
        with pytest.raises(Killed):
            run_stage(TOY, {}, {"steps": 5})
    seen = []
    result = run_stage(TOY, {}, {"steps": 5}, on_event=lambda e: seen.append(e["event"]))
    assert (
        "started" not in seen
        and store.resolve("dataset:toy-data@latest").path == result.paths["data"] != first.paths["data"]
    )


@pytest.mark.parametrize("way", [os.rename, shutil.copytree])
def test_what_was_made_before_a_home_was_moved_or_copied_is_published_from_where_it_is_now(
    state_dir, tmp_path, monkeypatch, way
):
    """It was made again in a moved home, and in a copy the outputs of the first home were moved away."""
    with monkeypatch.context() as patch:
        patch.setattr(run, "publish", killed)
        with pytest.raises(Killed):
            run_stage(TOY, {}, {"steps": 5})
    way(state_dir, tmp_path / "other")
    monkeypatch.setenv("POSTTRAIN_HOME", str(tmp_path / "other"))
    seen = []
    result = run_stage(TOY, {}, {"steps": 5}, on_event=lambda e: seen.append(e["event"]))
    assert "started" not in seen and all(path.startswith(str(tmp_path / "other")) for path in result.paths.values())
    (report,) = result.reports
    assert Path(report["markdown"]).is_relative_to(tmp_path / "other") and Path(report["markdown"]).is_file()
    if way is shutil.copytree:
        monkeypatch.setenv("POSTTRAIN_HOME", str(state_dir))
        assert run_stage(TOY, {}, {"steps": 5}, on_event=lambda e: seen.append(e["event"])).outputs == result.outputs
        assert "started" not in seen


ANSWER = """
import os, sys
from tasks.people import answer

left = int(sys.argv[3])

def cut(event, arguments):
    global left
    if event in ("os.rename", "os.remove"):
        if left == 0:
            os._exit(9)
        left -= 1

sys.addaudithook(cut)
answer(sys.argv[1], sys.argv[2])
"""


def test_answers_of_people_are_there_wherever_it_was_cut_off_that_others_took_their_place(state_dir, tmp_path):
    """The earlier file was removed before the new one had its name: a kill between the two lost what people wrote."""
    where = home.subdir("human", "a" * 16)
    (where / "task.csv").write_text("item_id,answer_1,answer_2,choice,annotator\ni,yes,no,,\n")
    (tmp_path / "first.csv").write_text("item_id,choice,annotator\ni,1,ann\n")
    (tmp_path / "second.jsonl").write_text('{"item_id": "i", "choice": "2", "annotator": "ben"}\n')
    for instant in range(9):
        for left in where.glob("answers.*"):
            left.unlink()
        people.answer("a" * 16, tmp_path / "first.csv")
        command = [sys.executable, "-c", ANSWER, "a" * 16, str(tmp_path / "second.jsonl"), str(instant)]
        status = subprocess.run(command, cwd=run.PROJECT_ROOT).returncode
        found = people.answers_of("a" * 16).read_bytes()
        assert found in ((tmp_path / "first.csv").read_bytes(), (tmp_path / "second.jsonl").read_bytes())
        if status == 0:
            break
    assert status == 0 and instant > 1 and found.startswith(b"{") and len(list(where.glob("answers.*"))) == 1


def test_answers_that_two_bring_in_at_once_are_not_removed_by_each_other(state_dir, tmp_path, monkeypatch):
    where = home.subdir("human", "a" * 16)
    (where / "task.csv").write_text("item_id,answer_1,answer_2,choice,annotator\ni,yes,no,,\n")
    (tmp_path / "a.csv").write_text("item_id,choice,annotator\ni,1,ann\n")
    (tmp_path / "b.jsonl").write_text('{"item_id": "i", "choice": "2", "annotator": "ben"}\n')
    real, both = people.atomic_write_bytes, threading.Barrier(2)

    def write(path, data):
        real(path, data)
        try:
            both.wait(1.0)  # for the other, as far as it is
        except threading.BrokenBarrierError:
            pass

    monkeypatch.setattr(people, "atomic_write_bytes", write)
    threads = [threading.Thread(target=people.answer, args=("a", tmp_path / name)) for name in ("a.csv", "b.jsonl")]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert len(list(where.glob("answers.*"))) == 1


def test_a_forced_run_that_was_killed_after_its_record_is_over(state_dir, monkeypatch):
    """Its mark stayed behind, so the next forced run published the old result again instead of running."""
    run_stage(TOY, {}, {"steps": 4})
    with monkeypatch.context() as patch:
        patch.setattr(work, "tidy", killed)
        with pytest.raises(Killed):
            run_stage(TOY, {}, {"steps": 4}, force=True)
    seen = []
    run_stage(TOY, {}, {"steps": 4}, force=True, on_event=lambda e: seen.append(e["event"]))
    assert "started" in seen


def test_a_version_that_was_registered_before_a_kill_becomes_the_candidate(state_dir, monkeypatch):
    registry.register("policy", "a" * 64)
    with monkeypatch.context() as patch:
        patch.setattr(registry, "set_alias", killed)
        with pytest.raises(Killed):
            registry.register("policy", "b" * 64)
    assert registry.digest_of("policy", "candidate")[1] == 1
    assert registry.register("policy", "b" * 64) == 2 and registry.digest_of("policy", "candidate")[1] == 2
    registry.set_alias("policy", "candidate", 1)  # by a person: not taken back
    assert registry.register("policy", "b" * 64) == 2 and registry.digest_of("policy", "candidate")[1] == 1


def test_a_reason_with_line_separators_keeps_its_promotion(state_dir):
    """U+2028 and U+0085 end a line for Python's splitlines, which lost the entry."""
    registry.register("policy", "a" * 64)
    registry.set_alias("policy", "champion", 1, reason="better\u2028in every way\x85says the team")
    assert registry.digest_of("policy", "champion") == ("a" * 64, 1)


# --- what changes meanwhile -------------------------------------------------------------------------------------------


def test_an_input_that_changes_while_a_stage_runs_is_refused_until_it_is_back(state_dir, tmp_path):
    """The result would be known, and reused, by the content that the file had before."""
    text = tmp_path / "rules.txt"
    text.write_text("one\n")

    def change(event):
        if event["event"] == "started":
            text.write_text("two\n")

    with pytest.raises(StageError, match=r"input text at .*rules.txt changed while it ran.*put the old content back"):
        run_stage(TOY, {"text": str(text)}, {"steps": 4}, on_event=change)
    seen = []
    other = run_stage(TOY, {"text": str(text)}, {"steps": 4}, on_event=lambda e: seen.append(e["event"]))
    assert "started" in seen and not other.cached
    text.write_text("one\n")
    seen.clear()
    back = run_stage(TOY, {"text": str(text)}, {"steps": 4}, on_event=lambda e: seen.append(e["event"]))
    assert "started" not in seen and not back.cached and back.key != other.key


def test_code_that_changes_while_a_stage_waits_is_not_run_under_the_old_key(state_dir, monkeypatch):
    real = run.take_devices

    def wait(*arguments):
        monkeypatch.setattr(run, "closure_digest", lambda *_: "another")
        return real(*arguments)

    monkeypatch.setattr(run, "take_devices", wait)
    seen = []
    with pytest.raises(StageError, match="its code changed while it waited.*same command"):
        run_stage(TOY, {}, {"steps": 4}, on_event=lambda e: seen.append(e["event"]))
    assert "started" not in seen


def test_a_copy_that_keeps_size_and_time_is_seen(state_dir, tmp_path):
    """Archives and `cp -p` set modification times, and weights of one architecture have one size: digests were taken
    from the cache for other contents.
    """
    model, other = tmp_path / "model", tmp_path / "other"
    for folder, value in ((model, "a"), (other, "b")):
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        (folder / "weights").write_text(value * 100)
        for file in folder.iterdir():
            os.utime(file, ns=(10**18, 10**18))
    time.sleep(2.1)  # younger files are read each time
    first = store.resolve(str(model), "model").digest
    assert read_json(next((state_dir / "cache" / "digests").glob("*.json")))["digest"] == first
    shutil.copy2(other / "weights", model / "weights")
    assert (model / "weights").stat().st_mtime_ns == 10**18
    assert store.resolve(str(model), "model").digest == store.resolve(str(other), "model").digest != first


@pytest.mark.skipif(os.uname().sysname != "Linux", reason="stages are forked on Linux only")
def test_upgraded_libraries_are_loaded_anew(state_dir, monkeypatch):
    """The key names the installed versions, and a parent that had loaded others went on forking stages."""
    monkeypatch.setattr(processes, "_running", None)
    one = processes._parent(processes.environment())
    assert processes._parent(processes.environment()) is one
    monkeypatch.setattr(processes, "library_versions", lambda: {"torch": "99"})
    two = processes._parent(processes.environment())
    assert two is not one and one.process.poll() is None and two.process.poll() is None  # stages of the first one go on
    one.close(), two.close()


def test_the_version_of_vllm_is_known_where_it_samples(state_dir, monkeypatch):
    seen = {}
    monkeypatch.setattr(run, "stage_key", lambda name, code, config, digests, seed: seen.update(digests) or "0" * 64)
    monkeypatch.setattr(run, "library_versions", lambda names: {"vllm": "1.2"})
    model = state_dir / "m"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    inputs = {"model": str(model), "prompts": store.publish_dataset(prompts(state_dir), "p").ref}
    run.prepare("rejection", inputs, {"engine": "vllm"})
    assert "engine" in seen
    seen.clear()
    run.prepare("rejection", inputs, {})
    assert "engine" not in seen


def test_a_stage_that_is_told_to_stop_keeps_its_vllm_until_it_ends(tmp_path):
    """The step under way, which is finished before the checkpoint, still samples from it; a helper of another kind is
    told to stop too.
    """
    import psutil

    for name in ("VLLM::Engine", "helper"):
        shutil.copy(shutil.which("sleep"), tmp_path / name)
    (tmp_path / "stage.py").write_text(
        "import pathlib, signal, subprocess, sys, time\nhere = pathlib.Path(sys.argv[1])\ndef heed(*_):\n   "
        " time.sleep(1.0)\n    (here / 'seen').write_text(' '.join('gone' if p.poll() is not None else 'there' for p in"
        " made))\n    sys.exit(143)\nsignal.signal(signal.SIGTERM, heed)\nmade = [subprocess.Popen([str(here / n),"
        " '60']) for n in ('VLLM::Engine', 'helper')]\n(here / 'ready').write_text('')\nwhile True:\n   "
        " time.sleep(0.1)\n"
    )
    child = subprocess.Popen([sys.executable, str(tmp_path / "stage.py"), str(tmp_path)], start_new_session=True)
    while not (tmp_path / "ready").exists():
        time.sleep(0.05)
    below = psutil.Process(child.pid).children(recursive=True)
    processes.kill_tree(child, grace=30)
    assert (tmp_path / "seen").read_text() == "there gone" and child.returncode == 143
    psutil.wait_procs(below, timeout=60)
    assert not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in below)


def test_the_version_of_a_module_is_found_under_its_packages_name(tmp_path, monkeypatch):
    from stages import spec

    info = tmp_path / "odd_cpu-3.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: odd-cpu\nVersion: 3.1\n")
    (info / "top_level.txt").write_text("oddmodule\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    spec._distributions.cache_clear()
    assert spec.library_versions(["oddmodule", "nosuchmodule"]) == {"oddmodule": "3.1", "nosuchmodule": None}
    spec._distributions.cache_clear()


def prompts(folder):
    from storage.datasets import write_dataset
    from storage.schema import complete_row
    from tests.common import user

    row = complete_row("prompts/1", {"prompt": user("2+2?")}, dataset="d", source="d", origin="human")
    write_dataset(folder / "raw", "d", "prompts/1", [row])
    return folder / "raw"


# --- hosts and disks --------------------------------------------------------------------------------------------------


def elsewhere(**more):
    return {**leases.this_process(), "host": "elsewhere", **more}


def aged(path, seconds):
    path.touch()
    os.utime(path, (time.time() - seconds,) * 2)


@pytest.mark.parametrize("clock", [-3600.0, 0.0, 3600.0])
def test_another_hosts_clock_may_be_wrong(state_dir, clock):
    """A host that was five minutes behind lost the locks of its running stages; one that was ahead kept them for
    good.
    """
    path = home.leases_dir() / "x.json"
    atomic_write_json(path, elsewhere(heartbeat=time.time() + clock))
    assert leases.holder(path)
    aged(path, 400)
    assert leases.holder(path) is None


def test_a_run_on_another_host_is_running_while_it_beats(state_dir):
    """It counted as killed at once, and the same command on this host went on in its record."""
    one = records.start_run("demo", {}, identity="i")
    beat = leases._beat_file(one.data["owner"])
    assert beat.exists()
    there = elsewhere()
    atomic_write_json(one.path, {**one.data, "owner": there})
    far = leases._beat_file(there)
    far.touch()
    assert (
        records.get_run(one.run_id).status == "RUNNING"
        and records.start_run("demo", {}, identity="i").run_id != one.run_id
    )
    aged(far, 400)
    assert records.get_run(one.run_id).status == "KILLED"


def test_a_lock_that_a_full_disk_cut_off_is_nobodys(state_dir, monkeypatch):
    real = leases.Lease._write

    def full(self):
        if self.index == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(self)

    with monkeypatch.context() as patch:
        patch.setattr(leases.Lease, "_write", full)
        with pytest.raises(OSError):
            leases.acquire_slots("gpu", 2, 2)
    [lease.release() for lease in leases.acquire_slots("gpu", 2, 2, wait=False)]


@pytest.mark.parametrize("name", ["manifest.json", "state.json", "weights"])
def test_a_checkpoint_that_the_disk_cannot_read_is_passed_over(tmp_path, monkeypatch, name):
    """An I/O error on its manifest ended the stage, though the checkpoint before it was whole."""
    from storage.checkpoints import Checkpoints

    checkpoints = Checkpoints(tmp_path)
    for step in (1, 2):
        checkpoints.save(step, {"n": step}, {"weights": b"w" * step})
    real = open

    def broken(path, *arguments, **options):
        if str(path).endswith(f"step-0000000002/{name}"):
            raise OSError(errno.EIO, "Input/output error", str(path))
        return real(path, *arguments, **options)

    monkeypatch.setattr("builtins.open", broken)
    assert checkpoints.latest().state == {"n": 1}


def test_the_doctor_removes_what_killed_processes_were_writing(state_dir):
    """A copy of a model that was cut off stayed for ever; what may still be written to is left alone."""
    from flows import doctor

    run_stage(TOY, {}, {"steps": 3}, name_as="kept")

    def parts():
        cut = state_dir / "models" / ".tmp-0123456789ab"
        cut.mkdir(exist_ok=True)
        written = [cut / "weights.bin", state_dir / "datasets" / "kept" / ".latest.json.0123456789ab.tmp"]
        for path in written:
            path.write_text("half")
        return [cut, *written]

    def said(fix):
        return [text for ok, text in doctor.work_directories(state_dir, fix) if "killed processes" in text and ok]

    before = sorted(path for path in state_dir.rglob("*") if path.is_file())
    made = parts()
    assert said(True) == [] and all(path.exists() for path in made)
    for path in reversed(made):
        os.utime(path, (time.time() - 2 * 86400,) * 2)
    assert "--fix" in said(False)[0] and all(path.exists() for path in made)
    (told,) = said(True)
    assert str(made[0]) in told and str(made[2]) in told and said(True) == []
    assert sorted(path for path in state_dir.rglob("*") if path.is_file()) == before
    assert run_stage(TOY, {}, {"steps": 3}, name_as="kept").cached


def test_cleaning_leaves_alone_what_is_started_meanwhile(state_dir, monkeypatch):
    """Between looking and removing a stage may have been started again where it stopped."""
    for key in ("a", "b"):
        (home.work_dir(key) / "checkpoint").write_text("x")
        aged(home.work_dir(key) / "checkpoint", 10 * 86400)
    real, held = work.usage, []

    def usage():
        found = real()
        held.append(leases.acquire("stage-a"))
        return found

    monkeypatch.setattr(work, "usage", usage)
    assert work.clean(5)[0] == 1
    held[0].release()
    assert (home.home() / "work" / "a" / "checkpoint").exists() and not (home.home() / "work" / "b").exists()


def test_heartbeats_go_on_in_threads_that_end_with_the_state_directory(state_dir):
    leases.owner()
    before = [t for t in threading.enumerate() if t.name == "owner-beat"]
    leases.owner()
    assert [t for t in threading.enumerate() if t.name == "owner-beat"] == before and before


def test_a_heartbeat_that_cannot_be_looked_at_is_no_death(state_dir):
    """A failing mount ended in UnboundLocalError; the owner keeps its lock until the file can be read, or is gone."""
    there, loop = elsewhere(), home.leases_dir() / "loop"
    loop.symlink_to(loop)  # stat: too many levels of symbolic links, an OSError other than not found
    assert leases.alive(there, loop)
    loop.unlink()
    assert not leases.alive(there, loop)
