"""Right answers by wrong reasoning: labels of people, of rollouts and of a process reward model, against counts made
apart.
"""

import json
from pathlib import Path

import pytest

from stages.harness import execute
from stages.spec import ConfigError
from storage.datasets import open_dataset, write_dataset
from storage.schema import complete_row
from tests.common import assistant, user
from tests.evaluation.test_stages import spec


def solution(i, labels, correct):
    return complete_row(
        "stepwise/1",
        {
            "prompt": user(f"sum {i}"),
            "completions": [f"step {i}.{k}" for k in range(len(labels))],
            "labels": labels,
            "solution_correct": correct,
        },
        dataset="steps",
        source="people",
        origin="human",
        split="test",
    )


@pytest.fixture(scope="module")
def labelled(tmp_path_factory):
    """The catalogue's four solutions (right with none, right with one, wrong with one, right with no wrong step),
    neutral steps among them, one ungraded.
    """
    path = str(tmp_path_factory.mktemp("steps") / "steps")
    write_dataset(
        path,
        "steps",
        "stepwise/1",
        [
            solution(0, [1, 0, 1], True),
            solution(1, [1, -1], True),
            solution(2, [-1, 1, 1], False),
            solution(3, [1], True),
            solution(4, [-1], None),
        ],
    )
    return path


@pytest.fixture(scope="module")
def prm(tiny, tmp_path_factory):
    """A process reward model trained for a step on made labels."""
    root = tmp_path_factory.mktemp("prm")
    rows = [
        complete_row(
            "stepwise/1",
            {"prompt": user(f"sum {i}"), "completions": ["a b", "c d"], "labels": [1, (1, -1)[i % 2]]},
            dataset="steps",
            source="people",
            origin="human",
            split="train",
        )
        for i in range(8)
    ]
    write_dataset(str(root / "steps"), "steps", "stepwise/1", rows)
    result = execute(
        spec(
            "reward_model",
            root / "run",
            {"model": tiny["policy"], "data": str(root / "steps")},
            {"learning_rate": 1e-2, "max_length": 96, "batch_size": 4},
        )
    )
    return result["outputs"]["model"]["path"]


def test_labels_of_people_give_the_catalogues_numbers(labelled, tmp_path):
    result = execute(spec("trace_error", tmp_path, {"data": labelled}, {}))
    summary = result["summary"]
    assert (
        summary["final_answer_error"] == 0.25
        and summary["trace_error"] == pytest.approx(1 / 3)
        and summary["trace_error_low"] < 1 / 3 < summary["trace_error_high"]
    )
    assert (summary["solutions"], summary["right"], summary["without_verdict"], summary["without_labels"]) == (
        4,
        3,
        1,
        0,
    )
    assert summary["wrong_steps"] == pytest.approx(2 / 9) and [w["code"] for w in result["warnings"]] == [
        "solutions_left_out"
    ]
    scores = {row["metric"]: row for row in open_dataset(tmp_path / "out" / "scores").iter_rows()}
    assert scores["trace_error"]["n"] == 3
    page = next(Path(report["markdown"]).read_text() for report in result["reports"])
    assert "step 1.1" in page and "step 2.0" not in page


def test_a_process_model_labels_what_has_no_labels(tiny, prm, tmp_path):
    """Candidates, whose verdicts are known; a threshold turns its probabilities into labels."""
    candidates = [
        complete_row(
            "candidates/1",
            {
                "prompt": user(f"sum {i}"),
                "prompt_idx": i,
                "completion_idx": 0,
                "completion": assistant("a b\n\nc d\n\n" + "e " * i),
                "scores": [],
                "reward": 0.0,
                "correct": i % 2 == 0,
                "kept": True,
            },
            dataset="c",
            source="made",
            origin="ai",
            split="train",
        )
        for i in range(6)
    ]
    write_dataset(str(tmp_path / "candidates"), "c", "candidates/1", candidates)
    inputs = {"data": str(tmp_path / "candidates"), "reward_model": prm}
    first = execute(spec("trace_error", tmp_path / "a", inputs, {"block": 4}))
    rows = list(open_dataset(tmp_path / "a" / "out" / "steps").iter_rows())
    soft = [p for row in rows for p in row["soft_labels"]]
    assert [len(row["labels"]) for row in rows] == [2] + [3] * 5 and all(
        (p >= 0.5) == (label == 1) for row in rows for p, label in zip(row["soft_labels"], row["labels"])
    )
    threshold = (min(soft) + max(soft)) / 2
    cut = execute(spec("trace_error", tmp_path / "b", inputs, {"threshold": threshold}))["summary"]
    right = [row for row in rows if row["solution_correct"]]
    assert (
        cut["trace_error"] == pytest.approx(sum(min(row["soft_labels"]) < threshold for row in right) / 3)
        and first["summary"]["final_answer_error"] == 0.5
    )
    with pytest.raises(ConfigError, match="give --input reward_model=PRM"):
        execute(spec("trace_error", tmp_path / "c", {"data": str(tmp_path / "candidates")}, {}))
    with pytest.raises(ConfigError, match="objective=prm"):
        execute(
            spec(
                "trace_error",
                tmp_path / "d",
                {"data": str(tmp_path / "candidates"), "reward_model": tiny["reward"]},
                {},
            )
        )


def test_samples_of_an_evaluation_are_judged_with_their_prompts(tiny, prm, tmp_path):
    execute(
        spec(
            "evaluate",
            tmp_path / "e",
            {"model": tiny["policy"], "prompts": tiny["prompts"]},
            {"num_samples": 2, "temperature": 5.0, "max_completion_length": 8},
        )
    )
    rows = list(open_dataset(tmp_path / "e" / "out" / "samples").iter_rows())
    for row in rows:  # greedy answers and perturbed forms are in no accuracy
        note = json.loads(row["extra_json"])
        row["correct"] = note["mode"] == "greedy" if row["correct"] is not None else None
    forms = [
        {
            **row,
            "sample_idx": row["sample_idx"] + 10,
            "extra_json": json.dumps(json.loads(row["extra_json"]) | {"pair": "p", "perturbation": "numbers"}),
            "correct": True,
        }
        for row in rows
    ]
    samples = str(tmp_path / "samples")
    write_dataset(samples, "samples", "eval_samples/1", [*rows, *forms])
    result = execute(
        spec("trace_error", tmp_path / "t", {"data": samples, "prompts": tiny["prompts"], "reward_model": prm}, {})
    )
    assert (
        result["summary"]["final_answer_error"] == 1
        and result["summary"]["without_verdict"] == 8
        and result["summary"]["not_solutions"]
        == len(rows) + sum(json.loads(r["extra_json"])["mode"] == "greedy" for r in rows)
    )
    with pytest.raises(ConfigError, match="give --input prompts="):
        execute(spec("trace_error", tmp_path / "u", {"data": samples, "reward_model": prm}, {}))


def test_a_killed_labelling_ends_with_the_same_bytes(prm, labelled, tmp_path, forks):
    inputs, config = {"data": labelled, "reward_model": prm}, {"block": 1}
    whole = execute(spec("trace_error", tmp_path / "whole", inputs, config))
    (tmp_path / "spec.json").write_text(json.dumps(spec("trace_error", tmp_path / "work", inputs, config)))
    work = tmp_path / "work"
    forks.start(tmp_path / "spec.json").kill_when(
        lambda: any((work / "checkpoints").glob("step-*")) or (work / "result.json").exists()
    )
    again = execute(spec("trace_error", tmp_path / "work", inputs, config))
    assert again["summary"] == whole["summary"]
    for name in ("steps", "scores"):
        assert (
            open_dataset(tmp_path / "work" / "out" / name).digest
            == open_dataset(tmp_path / "whole" / "out" / name).digest
        )
