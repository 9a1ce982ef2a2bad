"""What crosses task boundaries is small JSON: references and numbers, no rows and no tensors, and nothing of it lies in
Prefect's storage.
"""

from __future__ import annotations

import ast
import json
import os
import sqlite3
import subprocess
import sys

from flows.recipe import RECIPES, get_recipe
from flows.single import stage_flow
from stages.registry import STAGES
from stages.spec import PROJECT_ROOT
from tasks.stages import stage_task
from tests.evaluation.conftest import tiny_policy
from tests.flows.test_killed_runs import ROUNDS

MOST = 64 * 1024
#: The command line, whose tasks write down what they return.
PROGRAM = """
import json, os
import tasks.stages
made = tasks.stages.stage_task

def told(task, run, state):
    value = getattr(state.data, "result", state.data)
    try:
        text = json.dumps(value)
    except TypeError as error:
        text = f"not JSON: {error}"
    with open(os.environ["TOLD"], "a") as file:
        file.write(json.dumps({"task": run.name, "text": text}) + "\\n")

def hooked(name):
    task = made(name)
    if told not in task.on_completion_hooks:
        task.on_completion_hooks.append(told)
    return task

tasks.stages.stage_task = hooked
from flows.cli import program
program()
"""


def test_results_of_a_whole_run_are_small_and_none_is_stored(tmp_path):
    tiny_policy(str(tmp_path / "model"), 0)
    (tmp_path / "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": f"say {i}", "answer": str(i)}) + "\n" for i in range(24))
    )
    home, told = tmp_path / "home", tmp_path / "told.jsonl"
    arguments = [a.replace("{model}", str(tmp_path / "model")).replace("{data}", str(tmp_path)) for a in ROUNDS]
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PREFECT_", "MLFLOW_", "POSTTRAIN_"))}
    environment |= {"POSTTRAIN_HOME": str(home), "TOLD": str(told), "OMP_NUM_THREADS": "1"}
    run = ["run", "online_dpo", *arguments, "rounds=1", "align.max_steps=2", "--json"]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *run],
        env=environment,
        cwd=PROJECT_ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    results = [json.loads(line) for line in told.read_text().splitlines()]
    stages = {one["task"].split(" · ")[0] for one in results}
    assert {"ingest", "rejection", "align", "evaluate"} <= stages
    for one in results:
        value = json.loads(one["text"])  # "not JSON" is not
        assert len(one["text"]) <= MOST, one["task"]
        assert value["outputs"] and all(":" in ref for ref in value["outputs"].values())
    with sqlite3.connect(home / "prefect" / "prefect.db") as database:
        for table in ("task_run_state", "flow_run_state"):
            count, longest = database.execute(f"select count(*), max(length(data)) from {table}").fetchone()
            assert count and (longest or 0) <= MOST, table
    assert not [path for path in (home / "prefect" / "results").rglob("*") if path.is_file()]


def test_no_task_or_flow_keeps_its_result():
    """By default Prefect pickles results as soon as a run has retries, a cache or a setting that asks for it."""
    for name in STAGES:
        assert stage_task(name).persist_result is False and not stage_task(name).retries, name
        assert stage_flow(name).persist_result is False, name
    for name in RECIPES:
        assert get_recipe(name).persist_result is False, name
    made = []  # tasks and flows are made in these two places only
    for path in [*(PROJECT_ROOT / "flows").rglob("*.py"), *(PROJECT_ROOT / "tasks").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module == "prefect":
                made += [
                    f"{path.parent.name}/{path.name}:{one.name}" for one in node.names if one.name in ("task", "flow")
                ]
    assert sorted(made) == ["flows/recipe.py:flow", "tasks/stages.py:task"]
