"""Flat memory, progress, and byte-identical results after kills."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import stages.ingest
from stages.ingestion import pipeline

from .driver import Result, ingest, write_lines

ROOT = Path(__file__).resolve().parents[2]
PEAK = """
import json, resource, sys
from stages.harness import execute
execute(json.load(open(sys.argv[1])))
print(json.dumps(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss))
"""


def rows(n: int):
    for i in range(n):
        filler = hashlib.sha256(str(i).encode()).hexdigest() * 4
        yield json.dumps(
            {"prompt": f"{filler} {i % (n // 2 + 1)}", "chosen": f"yes {filler}", "rejected": f"no {filler}"}
        )


def spec(path: Path, workdir: Path, **config) -> dict:
    return {
        "stage": "ingest",
        "key": "t",
        "config": config,
        "seed": 0,
        "device": "cpu",
        "inputs": {"data": {"kind": "file", "path": str(path)}},
        "workdir": str(workdir),
    }


def files(workdir: Path) -> dict[str, str]:
    return {
        str(p.relative_to(workdir)): hashlib.sha256(p.read_bytes()).hexdigest()
        for p in sorted((workdir / "out").rglob("*"))
        if p.is_file()
    }


def peak_kib(tmp_path: Path, n: int, **config) -> int:
    source = write_lines(tmp_path / f"{n}.jsonl", rows(n))
    (tmp_path / f"{n}.json").write_text(json.dumps(spec(source, tmp_path / f"w{n}", **config)))
    done = subprocess.run(
        [sys.executable, "-c", PEAK, str(tmp_path / f"{n}.json")], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert Result(tmp_path / f"w{n}").check().counts["rows_in"] == n
    return int(done.stdout.strip().splitlines()[-1])


def test_memory_does_not_grow_with_rows(tmp_path):
    small, large = peak_kib(tmp_path, 10_000), peak_kib(tmp_path, 40_000)
    assert large - small < 60_000, f"{small} KiB at 10,000 rows, {large} KiB at 40,000"


def test_progress_is_told(tmp_path):
    events = []
    ingest(write_lines(tmp_path / "x.jsonl", rows(3000)), tmp_path / "w", emit=events.append)
    told = [event for event in events if event["event"] == "progress"]
    assert told and told[-1]["done"] == told[-1]["total"] and "rows" in told[-1]["message"]


class Killed(Exception):
    pass


@pytest.mark.parametrize(
    "kind, config",
    [
        ("pairs/1", {"test_fraction": 0.1}),
        ("unpaired/1", {}),
        ("prompts/1", {}),
        ("pairs/1", {"near_duplicates": "keep_first"}),
        ("pairs/1", {"contradictions": "keep_as_votes"}),
        ("pairs/1", {"near_duplicates": "group", "test_fraction": 0.3}),
    ],
)
def test_interrupted_runs_end_with_the_same_bytes(tmp_path, monkeypatch, kind, config):
    """Die after any number of checkpoints, also between the scratch file's commit and the checkpoint."""
    monkeypatch.setattr(stages.ingest, "CHECKPOINT_ROWS", 100)
    lines = list(rows(450))
    lines[40:40] = ["{", lines[3], "[]"]
    lines[260:260] = [lines[1], "null", lines[200]]
    source = write_lines(tmp_path / "x.jsonl", lines)
    whole = ingest(source, tmp_path / "whole", kind=kind, **config)
    result = killed_again_and_again(source, tmp_path / "killed", monkeypatch, kind=kind, **config)
    assert files(tmp_path / "killed") == files(tmp_path / "whole") and result.counts == whole.counts


def test_an_interrupted_second_pass_forgets_only_what_it_had_not_finished(tmp_path, monkeypatch):
    """Labels of annotators meet in groups, and several groups of a prompt give the same demonstration: the first one
    counts, also after any death.
    """
    monkeypatch.setattr(stages.ingest, "CHECKPOINT_ROWS", 100)
    source = write_lines(
        tmp_path / "x.jsonl",
        [
            {
                "prompt": f"p{i // 6}",
                "response_a": "best",
                "response_b": f"worse {i}",
                "label": "A",
                "annotator_id": f"{j}",
            }
            for i in range(240)
            for j in range(2)
        ],
    )
    config = {"kind": "demonstrations/1", "contradictions": "drop_both"}
    whole = ingest(source, tmp_path / "whole", **config)
    assert whole.counts["rows_out"] == 40 and whole.counts["conversion"]["dropped"] == {
        "duplicate_after_conversion": 200,
        "merged_votes": 240,
    }
    result = killed_again_and_again(source, tmp_path / "killed", monkeypatch, **config)
    assert files(tmp_path / "killed") == files(tmp_path / "whole") and result.counts == whole.counts


def killed_again_and_again(source, workdir, monkeypatch, **config):
    """The result of a run that dies after each checkpoint, also between the scratch file's commit and the
    checkpoint.
    """
    original = pipeline.Ingestion._checkpoint
    commit = pipeline.SeenRows.commit
    for deaths in range(16):
        left = [1]

        def checkpoint(self, *args, **kwargs):
            original(self, *args, **kwargs)
            left[0] -= 1
            if left[0] < 0:
                raise Killed

        def half(self, position):
            commit(self, position)
            if deaths % 3 == 2:
                raise Killed

        monkeypatch.setattr(pipeline.Ingestion, "_checkpoint", checkpoint)
        monkeypatch.setattr(pipeline.SeenRows, "commit", half)
        try:
            result = ingest(source, workdir, **config)
            break
        except Killed:
            continue
    else:
        pytest.fail("the run never ended")
    assert deaths > 1
    return result


def test_lost_scratch_file_starts_again(tmp_path, monkeypatch):
    monkeypatch.setattr(stages.ingest, "CHECKPOINT_ROWS", 100)
    source = write_lines(tmp_path / "x.jsonl", rows(350))
    ingest(source, tmp_path / "whole")
    account = pipeline.Ingestion._account
    monkeypatch.setattr(pipeline.Ingestion, "_account", lambda self: (_ for _ in ()).throw(Killed()))
    with pytest.raises(Killed):
        ingest(source, tmp_path / "w")
    for path in (tmp_path / "w").glob("ingest.sqlite*"):
        path.unlink()
    monkeypatch.setattr(pipeline.Ingestion, "_account", account)
    ingest(source, tmp_path / "w")
    assert files(tmp_path / "w") == files(tmp_path / "whole")


def test_killed_process_ends_with_the_same_bytes(tmp_path):
    source = write_lines(tmp_path / "x.jsonl", rows(30_000))
    (tmp_path / "spec.json").write_text(json.dumps(spec(source, tmp_path / "w")))
    code = (
        "import stages.ingest, sys\nstages.ingest.CHECKPOINT_ROWS = 2000\nfrom stages.running.process import"
        " main\nsys.exit(main(sys.argv[1]))"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "spec.json")]
    for _ in range(2):
        seen = len(list((tmp_path / "w").glob("checkpoints/*")))
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 60
        before = {p.name for p in (tmp_path / "w").glob("checkpoints/*")}
        while (
            process.poll() is None
            and time.monotonic() < deadline
            and len({p.name for p in (tmp_path / "w").glob("checkpoints/*")} - before) < 2 + (seen == 0)
        ):
            time.sleep(0.01)
        if process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)
        process.wait()
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    (tmp_path / "spec2.json").write_text(json.dumps(spec(source, tmp_path / "whole")))
    subprocess.run(
        [*command[:-1], str(tmp_path / "spec2.json")],
        cwd=ROOT,
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    assert files(tmp_path / "w") == files(tmp_path / "whole")
