"""What a model was trained on is found through its lineage and matched against a benchmark; scores stand beside those
of the clean items.
"""

import json

import pytest

from stages.harness import execute
from stages.spec import ConfigError
from storage.datasets import open_dataset
from storage.files import tree_digest
from tests.common import user, written
from tests.data.driver import write_lines
from tests.evaluation.test_stages import spec

# six words in a row are in all of them
QUESTIONS = [
    f"Each of the {n} {who} of {where} sells {n + 5} {what} before noon; what is left of {n * 99} by then?"
    for n, (who, where, what) in enumerate(
        (
            ("millers", "Alder", "sacks"),
            ("bakers", "Birch", "loaves"),
            ("fishers", "Cedar", "eels"),
            ("weavers", "Dogwood", "shirts"),
            ("coopers", "Elm", "barrels"),
            ("smiths", "Fir", "nails"),
        ),
        start=2,
    )
]


@pytest.fixture()
def home(tmp_path, monkeypatch):
    for name, value in {
        "POSTTRAIN_HOME": str(tmp_path / "home"),
        "POSTTRAIN_TRACKING": "off",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }.items():
        monkeypatch.setenv(name, value)


def benchmark(path, rows=QUESTIONS):
    return write_lines(
        path, [{"prompt": question, "answer": str(7 * n), "split": "test"} for n, question in enumerate(rows, start=2)]
    )


def test_every_dataset_of_the_lineage_is_looked_through(tiny, home, tmp_path):
    """SFT on two of the questions, then DPO on a third (and on one more in a split that is not trained on): half the
    benchmark is found, each in its dataset.
    """
    from storage import store
    from tasks.run import run_stage
    from tasks.training_data import training_data

    filler = [{"prompt": f"Say the number {i}.", "completion": str(i)} for i in range(6)]
    lessons = write_lines(
        tmp_path / "lessons.jsonl",
        [
            {"prompt": QUESTIONS[0], "completion": "14"},
            {"prompt": QUESTIONS[1] + " Think first.", "completion": "21"},
            *filler,
        ],
    )
    pairs = write_lines(
        tmp_path / "pairs.jsonl",
        [
            {"prompt": QUESTIONS[2], "chosen": "28", "rejected": "27", "split": "train"},
            {"prompt": QUESTIONS[3], "chosen": "35", "rejected": "3", "split": "test"},
        ],
    )
    prompts = run_stage(
        "ingest",
        {"data": str(benchmark(tmp_path / "mill.jsonl"))},
        {"kind": "prompts/1", "test_fraction": 0.999},
        name_as="mill",
    ).outputs["data"]
    tuned = run_stage("sft", {"model": tiny["policy"], "data": str(lessons)}, {"max_steps": 1}).outputs["model"]
    aligned = run_stage("align", {"model": tuned, "data": str(pairs)}, {"method": "dpo", "max_steps": 1}).outputs[
        "model"
    ]
    data, outside = training_data(aligned)
    assert [name.rsplit("-", 1)[0] for name in data] == ["pairs-pairs", "lessons-demonstrations"] and outside == [
        store.resolve(tiny["policy"]).ref
    ]

    result = run_stage("contamination", {"model": aligned, "prompts": prompts}, {})
    assert (
        result.metrics["items"] == 6
        and result.metrics["contaminated"] == 3
        and result.metrics["contamination_rate"] == 0.5
        and result.metrics["unknown_ancestors"] == 1
    )
    assert {name.rsplit("-", 1)[0]: result.metrics[f"contamination_rate/{name}"] for name in data} == {
        "lessons-demonstrations": pytest.approx(2 / 6),
        "pairs-pairs": pytest.approx(1 / 6),
    }
    assert {w["code"] for w in result.warnings} == {"contamination", "lineage_unknown"}
    items = {row["prompt"][0]["content"]: row["tags"] for row in open_dataset(result.paths["items"]).iter_rows()}
    assert set(items) == set(QUESTIONS[:3]) and items[QUESTIONS[2]][0].startswith("pairs")
    again = run_stage("contamination", {"model": aligned, "prompts": prompts}, {})
    assert again.cached and again.key == result.key


def dataset(path, kind, rows, split="train"):
    written(str(path), path.name, kind, [{"split": split, **row} for row in rows], source="made")
    return str(path)


def run(tmp_path, inputs, name="run", **config):
    result = execute(spec("contamination", tmp_path / name, inputs, config))
    return result["summary"], result


def test_rates_and_clean_scores_are_those_of_a_count_by_hand(tmp_path):
    prompts = dataset(
        tmp_path / "bench", "prompts/1", [{"prompt": user(question), "answer": "1"} for question in QUESTIONS], "test"
    )
    rows = list(open_dataset(prompts).iter_rows())
    samples = str(tmp_path / "samples")
    written(
        samples,
        "samples",
        "eval_samples/1",
        [
            {
                "run_id": "r",
                "item_id": row["row_id"],
                "sample_idx": k,
                "output": "",
                "correct": (position + k) % 3 == 0,
                "format_error": False,
                "tokens": 1,
                "group_id": row["group_id"],
                "prompt_id": row["prompt_id"],
                "extra_json": json.dumps({"mode": "sample", "finish": "stop"}),
            }
            for position, row in enumerate(rows)
            for k in range(2)
        ],
        dataset="bench",
        origin="ai",
        split="test",
    )
    training = {
        "training.text": dataset(
            tmp_path / "text", "text/1", [{"text": "Long ago. " + QUESTIONS[0] + " Nobody knew."}]
        ),
        "training.asked": dataset(tmp_path / "asked", "prompts/1", [{"prompt": user(QUESTIONS[4])}], "validation"),
        "training.asked.validation": dataset(
            tmp_path / "asked", "prompts/1", [{"prompt": user(QUESTIONS[4])}], "validation"
        ),
        "training.told": dataset(
            tmp_path / "told",
            "demonstrations/1",
            [
                {
                    "messages": user("Tell me.") + [{"role": "assistant", "content": QUESTIONS[5]}],
                    "train_turns": [1],
                    "kept": True,
                }
            ],
        ),
    }
    summary, result = run(tmp_path, {"prompts": prompts, "samples": samples, **training})
    assert [summary[f"contamination_rate/{name}"] for name in ("text", "asked", "asked.validation", "told")] == [
        pytest.approx(1 / 6),
        0,
        pytest.approx(1 / 6),
        0,
    ]
    correct = [[(position + k) % 3 == 0 for k in range(2)] for position in range(6)]
    assert summary["accuracy"] == pytest.approx(sum(map(sum, correct)) / 12)
    assert summary["accuracy_clean"] == pytest.approx(sum(sum(correct[p]) for p in (1, 2, 3, 5)) / 8) and summary[
        "accuracy_contaminated"
    ] == pytest.approx(sum(sum(correct[p]) for p in (0, 4)) / 4)
    answers, _ = run(tmp_path, {"prompts": prompts, **training}, "answers", completions=True)
    assert answers["contamination_rate/told"] == pytest.approx(1 / 6)
    strict, _ = run(tmp_path, {"prompts": prompts, **training}, "any", mode="any", n=5)
    assert strict["contamination_rate/text"] == 1.0  # "before noon what is left" is in all of them
    scores = {
        (row["metric"], row["benchmark"]): row for row in open_dataset(tmp_path / "run" / "out" / "scores").iter_rows()
    }
    assert (
        scores["accuracy_clean", "bench"]["n"] == 4
        and json.loads(scores["contamination_rate", "bench"]["config_json"])["mode"] == "coverage"
    )


def test_a_question_with_choices_is_known_by_itself_and_by_its_options(tmp_path):
    from stages.verification.choices import with_options

    questions = [QUESTIONS[0], QUESTIONS[1], "Which is it?", "Which is it not?"]
    choices = [[" ".join(f"{letter}{i}{k}" for k in range(6)) for letter in "xyz"] for i in range(4)]
    prompts = dataset(
        tmp_path / "bench",
        "prompts/1",
        [
            {"prompt": user(with_options(question, each)), "choices": each, "answer": "A", "answer_type": "mc"}
            for question, each in zip(questions, choices)
        ],
        "test",
    )
    # a question without its options; a short one with them
    asked = [QUESTIONS[0], with_options(questions[3], choices[3])]
    summary, _ = run(
        tmp_path,
        {
            "prompts": prompts,
            "training.asked": dataset(tmp_path / "asked", "prompts/1", [{"prompt": user(text)} for text in asked]),
        },
    )
    items = {
        row["prompt"][0]["content"].split("\n")[0]
        for row in open_dataset(tmp_path / "run" / "out" / "items").iter_rows()
    }
    assert items == {QUESTIONS[0], "Which is it not?"} and summary["contamination_rate"] == 0.5


def test_what_cannot_be_looked_through_is_said(tmp_path):
    prompts = dataset(tmp_path / "bench", "prompts/1", [{"prompt": user(QUESTIONS[0])}], "test")
    ids = dataset(tmp_path / "captured", "baselines/1", [{"prompt_id": "p", "b": 0.5, "n": 4, "policy_version": 0}])
    summary, result = run(tmp_path, {"prompts": prompts, "training.captured": ids})
    assert (
        "contamination_rate" not in summary
        and summary["unread_datasets"] == 1
        and [w["code"] for w in result["warnings"]] == ["training_data_unread"]
    )
    with pytest.raises(ConfigError, match="training.NAME=REF"):
        run(tmp_path, {"prompts": prompts}, "nothing")
    with pytest.raises(ConfigError, match="splits: test"):
        run(tmp_path, {"prompts": prompts, "training.captured": ids}, "split", split="train")


def test_a_killed_report_continues_behind_its_last_dataset(tmp_path, forks):
    prompts = dataset(tmp_path / "bench", "prompts/1", [{"prompt": user(question)} for question in QUESTIONS], "test")
    inputs = {"prompts": prompts} | {
        f"training.part{i}": dataset(
            tmp_path / f"part{i}",
            "prompts/1",
            [{"prompt": user(f"{i} {j} " + QUESTIONS[i] * (j == 7))} for j in range(6000)],
        )
        for i in range(5)
    }
    run(tmp_path, inputs, "whole")
    file = tmp_path / "spec.json"
    file.write_text(json.dumps(spec("contamination", tmp_path / "work", inputs, {})))
    forks.start(str(file)).kill_when((tmp_path / "work" / "checkpoints" / "step-0000000002").exists)
    assert not (tmp_path / "work" / "result.json").exists()
    forks.run(str(file))
    result = json.loads((tmp_path / "work" / "result.json").read_text())
    assert result["resumed_from"] >= 2 and result["summary"]["contamination_rate"] == pytest.approx(5 / 6)
    for name in ("scores", "items"):
        assert tree_digest(tmp_path / "work" / "out" / name) == tree_digest(tmp_path / "whole" / "out" / name), name


def test_rows_that_training_leaves_out_contaminate_nothing(tmp_path):
    """``superfilter`` and ``rejection`` write what they do not keep, too."""
    said = lambda question, kept: {
        "messages": [{"role": "user", "content": question}, {"role": "assistant", "content": "14"}],
        "train_turns": [1],
        "kept": kept,
    }
    asked = [{"prompt": [{"role": "user", "content": question}], "answer": "14"} for question in QUESTIONS[:2]]
    rates = {}
    for name, kept in (("some", [True, False]), ("none", [False, False])):
        lessons = dataset(tmp_path / name, "demonstrations/1", list(map(said, QUESTIONS, kept)))
        prompts = dataset(tmp_path / f"prompts-{name}", "prompts/1", asked, split="test")
        inputs = {"prompts": prompts, "training.lessons": lessons}
        summary = execute(spec("contamination", tmp_path / f"run-{name}", inputs, {}))["summary"]
        rates[name] = summary["contamination_rate"], summary["unread_datasets"]
    assert rates == {"some": (0.5, 0), "none": (0.0, 0)}
