"""SIGKILL of a whole run and all below it, at random moments: the same command again ends with the bytes of an
undisturbed run.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time

import psutil
import pytest

from storage.files import tree_digest
from tests.common import assistant, user
from tests.evaluation.conftest import tiny_policy

ROUNDS = [
    "rounds=2",
    "ingest_prompts.test_fraction=0.4",
    "sample.max_prompts=6",
    "sample.num_generations=4",
    "sample.max_completion_length=60",
    "evaluate.max_completion_length=24",
    "data.prompts={data}/prompts.jsonl",
    "model={model}",
    "sample.rewards=[{kind: regex, name: letters, pattern: '[0-9A-M]'}]",
    "sample.stop_strings=[a,b,c,d,e,f,g,h,i,j,k,l,m,n,o,p,q,r,s,t,u,v,w,x,y,z]",
]
RUNS = {
    "rounds of online DPO": (["run", "online_dpo", *ROUNDS, "align.batch_size=2", "align.num_train_epochs=2"], 8),
    "an ensemble of adapters in rounds": (
        [
            "run",
            "online_dpo",
            *ROUNDS,
            "reference=previous",
            "members=2",
            "total_steps=4",
            "align.lora_rank=4",
            "align.batch_size=2",
        ],
        8,
    ),
    "rounds of ReST": (
        ["run", "rest", *ROUNDS, "thresholds=[-0.5,0.5]", "improve.max_steps=3", "improve.batch_size=4"],
        8,
    ),
    "a sweep": (
        [
            "sweep",
            "stage:sft",
            "--input",
            "model={model}",
            "--input",
            "data={data}/demos.jsonl",
            "max_steps=4",
            "batch_size=4",
            "--metric",
            "loss",
            "--goal",
            "min",
            "--over",
            "learning_rate=1e-4,1e-3",
        ],
        8,
    ),
}


def start(arguments, home):
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PREFECT_", "MLFLOW_", "POSTTRAIN_"))}
    return subprocess.Popen(
        [sys.executable, "-m", "flows.cli", *arguments, "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**environment, "POSTTRAIN_HOME": str(home), "POSTTRAIN_CHECKPOINT_SECONDS": "0", "OMP_NUM_THREADS": "1"},
    )


def finish(process) -> dict:
    out, errors = process.communicate(timeout=600)
    assert process.returncode == 0, out + errors
    return json.loads(out.splitlines()[-1])


def lines(home) -> int:
    """Training steps recorded so far by all stages."""
    return sum(path.read_bytes().count(b"\n") for path in home.glob("work/*/metrics.jsonl"))


def kill(process) -> None:
    """SIGKILL of the process and whatever lives below it, all in one moment."""
    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    for member in family:
        try:
            member.send_signal(signal.SIGKILL)
        except psutil.NoSuchProcess:
            pass
    process.communicate(timeout=60)
    assert not psutil.wait_procs(family, timeout=60)[1]


def remains(home) -> dict:
    """Every stage's curves, and every model and dataset, by their content."""
    return {
        **{f"{path.parent.name}/metrics": path.read_bytes() for path in home.glob("work/*/metrics.jsonl")},
        **{f"model/{path.name}": tree_digest(path) for path in (home / "models").iterdir() if path.is_dir()},
        **{f"data/{path.relative_to(home)}": path.read_bytes() for path in (home / "datasets").rglob("*.parquet")},
    }


@pytest.mark.skipif(not os.environ.get("POSTTRAIN_TEST_LONG"), reason="takes minutes; POSTTRAIN_TEST_LONG=1 runs it")
@pytest.mark.parametrize("name", RUNS)
def test_kill9_of_a_run_equals_uninterrupted(tmp_path, name):
    tiny_policy(str(tmp_path / "model"), 0)
    (tmp_path / "demos.jsonl").write_text(
        "".join(json.dumps({"messages": user(f"say {i}") + assistant(f"it is {i}")}) + "\n" for i in range(20))
    )
    (tmp_path / "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": f"say {i}", "answer": str(i)}) + "\n" for i in range(24))
    )
    arguments, steps = RUNS[name]
    arguments = [a.replace("{model}", str(tmp_path / "model")).replace("{data}", str(tmp_path)) for a in arguments]
    whole = finish(start(arguments, tmp_path / "whole"))
    assert lines(tmp_path / "whole") >= steps
    dice = random.Random(f"{name} {os.environ.get('POSTTRAIN_TEST_SEED', '0')}")
    killed, home = 0, tmp_path / "killed"
    for after in sorted(dice.sample(range(1, steps), 2)):
        process, deadline = start(arguments, home), time.monotonic() + 300
        while process.poll() is None and lines(home) < after and time.monotonic() < deadline:
            time.sleep(0.002)
        if process.poll() is None:
            time.sleep(dice.random() * 0.3)
            kill(process)
            killed += 1
    assert killed == 2
    again = finish(start(arguments, home))
    assert remains(home) == remains(tmp_path / "whole")
    assert [step["step"] for step in again["steps"]] == [step["step"] for step in whole["steps"]] and any(
        step["cached"] for step in again["steps"]
    )
    assert {k: again.get(k) for k in ("trials", "best", "outputs")} == {
        k: whole.get(k) for k in ("trials", "best", "outputs")
    }
