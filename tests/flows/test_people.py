"""A run that waits for people: from the command line, and suspended in Prefect and resumed with the path of the filled
file.
"""

import csv
import json

import pytest

from tests.evaluation.conftest import tiny_policy
from tests.flows.test_browser import CHROME, menu, named, page, until  # noqa: F401


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    root = tmp_path_factory.mktemp("people")
    tiny_policy(str(root / "policy"), 0)
    prompts = root / "prompts.jsonl"
    prompts.write_text(
        "\n".join(json.dumps({"prompt": f"what is {i} plus two?", "answer": str(i + 2)}) for i in range(24))
    )
    # a random model's answers end at their first letter
    small = {"max_completion_length": 24, "min_tokens": 2, "stop_strings": list("abcdefghijklmnopqrstuvwxyz")}
    return {
        "model": str(root / "policy"),
        "data": {"prompts": str(prompts)},
        "ingest_prompts": {"kind": "prompts/1", "test_fraction": 0.3},
        "sample": {"num_generations": 2, "allow_empty": True, **small},
        "dpo": {"max_steps": 1, "batch_size": 4, "max_length": 96},
        "evaluate": {"num_samples": 1, **small},
    }


def fill(file, to):
    """The task with answer 1 everywhere."""
    with open(file, encoding="utf-8", newline="") as handle:
        rows = list(csv.DictReader(handle))
    with open(to, "w", encoding="utf-8", newline="") as handle:
        out = csv.DictWriter(handle, rows[0])
        out.writeheader()
        out.writerows(row | {"choice": "1", "annotator": "ann"} for row in rows)
    return len(rows)


def test_a_run_ends_as_waiting_and_goes_on_with_the_filled_file(servers, given, tmp_path):
    (tmp_path / "c.yaml").write_text(json.dumps({**given, "seed": 1}))
    done = servers.cli("run", "human_feedback", "--config", str(tmp_path / "c.yaml"), "--json", check=False)
    waiting = json.loads(done.stdout.splitlines()[-1])
    assert done.returncode == 3 and waiting["status"] == "waiting" and waiting["step"] == "labels", done.stderr
    assert [row for row in servers.json("ls", "runs")["runs"] if row["run"] == waiting["run"]][0]["status"] == "WAITING"
    assert waiting["task"] in [row["task"] for row in servers.json("answer")["tasks"] if not row["answered"]]
    wrong = tmp_path / "wrong.csv"
    wrong.write_text("item_id,choice\nnobody,1\n")
    refused = servers.cli("answer", waiting["task"], str(wrong), check=False)
    assert refused.returncode == 2 and "there is no item 'nobody'" in refused.stderr
    items = fill(waiting["file"], tmp_path / "filled.csv")
    assert servers.json("answer", waiting["task"][:8], str(tmp_path / "filled.csv"))["answered"] == items
    result = servers.json("rerun", waiting["run"])
    assert result["status"] == "finished" and result["run"] == waiting["run"] and result["labels"]["annotators"] == 1
    steps = {step["step"]: step["cached"] for step in result["steps"]}
    assert steps["sample"] and steps["labels"] and not steps["labels_answers"] and "evaluate_dpo" in steps


def test_a_run_of_a_deployment_is_suspended_and_resumed_with_the_path(servers, given, tmp_path, request):
    """First with a path that is none, upon which it waits again; then in the browser, where there is one. Another task
    about the answers of the run above, which are sampled once.
    """
    run = servers.start(
        "human_feedback/human_feedback",
        {
            "config": {
                **given,
                "seed": 1,
                "task": {"instructions": "Which one? Write 1, 2, tie or skip into the column choice."},
            }
        },
    )
    assert (
        servers.wait(lambda: servers.state(run) in ("Suspended", "Failed", "Crashed") and servers.state(run), limit=300)
        == "Suspended"
    )
    (task,) = [row for row in servers.json("answer")["tasks"] if not row["answered"]]
    first = servers.api(f"/flow_runs/{run}")["state"]["id"]
    servers.api(f"/flow_runs/{run}/resume", {"run_input": {"answers": str(tmp_path / "none.csv")}})
    servers.wait(
        lambda: servers.state(run) == "Suspended" and servers.api(f"/flow_runs/{run}")["state"]["id"] != first,
        limit=300,
    )
    told = (task["file"], f"posttrain answer {task['task']}", f"there is no file {tmp_path / 'none.csv'}")
    servers.wait(lambda: all(part in said(servers, run) for part in told))  # logs come in batches
    fill(task["file"], tmp_path / "filled.csv")
    if CHROME:
        resume(servers, request.getfixturevalue("page"), run, tmp_path / "filled.csv")
    else:
        servers.api(f"/flow_runs/{run}/resume", {"run_input": {"answers": str(tmp_path / "filled.csv")}})
    assert (
        servers.wait(lambda: (state := servers.state(run)) in ("Completed", "Failed", "Crashed") and state, limit=400)
        == "Completed"
    )


def said(servers, run) -> str:
    return " ".join(
        row["message"] for row in servers.api("/logs/filter", {"logs": {"flow_run_id": {"any_": [run]}}, "limit": 200})
    )


def resume(servers, page, run, path):  # noqa: F811
    """What a person does: the run's menu, Resume, the path into the form, Resume."""

    def act():
        menu(servers, page, run, "Resume")
        (field,) = servers.wait(lambda: page.find_elements("css selector", "[role=dialog] textarea"))
        field.send_keys(str(path))
        servers.wait(lambda: named(page, "[role=dialog] button", "Resume")).click()

    until(page, lambda: servers.state(run) != "Suspended", act, seconds=60)
