"""Evaluations of answers that somebody else made: which answer is to which prompt, what is graded, what is refused, and
how such numbers stand beside a model's.
"""

import json

import pytest

from stages.evaluation.protocol import ProtocolError
from stages.harness import execute
from stages.reward_models.reward_scorers import Response, load_scorer
from stages.spec import ConfigError
from storage.datasets import open_dataset
from storage.files import tree_digest
from tests.chat_server import chat_server
from tests.common import assistant, silent, user, written
from tests.evaluation.test_stages import POLICY, spec
from tests.evaluation.test_suites import QUESTIONS, answers_of, ingested, rating, warned

SUMS = [{"prompt": user(f"what is {i} plus {i}?"), "answer": str(2 * i), "answer_type": "integer"} for i in range(4)]


@pytest.fixture(scope="module")
def sums(tmp_path_factory):
    return written(tmp_path_factory.mktemp("sums") / "d", "sums", "prompts/1", SUMS, split="test")


@pytest.fixture()
def graded(tmp_path):
    """graded(rows or bytes of a file, prompts, config, inputs) -> the result of the stage, its answers."""

    def go(rows, prompts, config=None, name="answers.jsonl", **inputs):
        file = tmp_path / name
        text = rows if isinstance(rows, bytes) else "\n".join(map(json.dumps, rows)).encode()
        file.write_bytes(text)
        made = spec("evaluate", tmp_path / "run", {"answers": prompts, "prompts": prompts, **inputs}, config or {})
        made["inputs"]["answers"] = {"path": str(file), "digest": f"{hash(text):x}"}
        made["workdir"] = str(tmp_path / f"run-{made['inputs']['answers']['digest']}-{len(list(tmp_path.iterdir()))}")
        result = execute(made, silent)
        return result, list(open_dataset(result["outputs"]["samples"]["path"]).iter_rows())

    return go


def right(i, **more):
    return {"question": SUMS[i]["prompt"][0]["content"], "output": f"So it is #### {2 * i}", **more}


def wrong(i, **more):
    return {**right(i), "output": "#### 77", **more}


def test_a_model_s_answers_read_from_a_file_are_graded_as_the_model_s(tiny, graded, tmp_path):
    """Every number that needs the text alone is the model's own, also from its dataset of samples, which keeps what is
    known of lengths and ends."""
    inputs = {"prompts": tiny["prompts"], "reward_model": tiny["reward"]}
    config = {"rewards": [{"kind": "verifier"}, {"kind": "format", "preset": "answer_mark"}], "chunk": 6}
    sampling = {name: POLICY[name] for name in ("num_samples", "max_completion_length", "generation_batch")}
    own = execute(spec("evaluate", tmp_path / "own", {**inputs, "model": tiny["other"]}, config | sampling), silent)
    samples = open_dataset(tmp_path / "own" / "out" / "samples")
    rows = [
        {"item": extra["prompt"], "prompt": extra["prompt"], "output": row["output"]}
        for row in samples.iter_rows()
        for extra in [json.loads(row["extra_json"])]
        if extra["mode"] == "sample"
    ]
    result, made = graded(rows, tiny["prompts"], config, reward_model=tiny["reward"])
    summary = result["summary"]
    of_lengths = ("reward", "reasoning/length", "length_correct", "best_of", "protocol_hash")
    shared = [name for name in summary if name in own["summary"] and not name.startswith(of_lengths)]
    assert {"accuracy_low", "flexible_accuracy", "format_error_rate", "pass_at_3", "distinct_1"} <= set(shared)
    for name in shared:
        assert summary[name] == pytest.approx(own["summary"][name], abs=1e-12), name
    # nobody says how they ended, so all are read as whole answers
    assert {"stop_rate", "truncation_rate", "length_mean", "greedy_accuracy", "kl_reference"}.isdisjoint(summary)
    scorer = load_scorer(tiny["reward"], "cpu")
    for row in made[:7]:
        extra = json.loads(row["extra_json"])
        shown = Response(user(extra["prompt"]), assistant(row["output"]))
        assert extra["reward"] == pytest.approx(scorer.score([shown])[0], abs=1e-5)
    assert summary["length_characters"] == pytest.approx(sum(len(row["output"]) for row in rows) / len(rows))
    assert {"answers": 60, "answers_from": "unknown", "prompts_unanswered": 0}.items() <= summary.items()
    stored = spec(
        "evaluate", tmp_path / "stored", {**inputs, "answers": str(tmp_path / "own" / "out" / "samples")}, config
    )
    kept = execute(stored, silent)["summary"]
    for metric in ("accuracy", "greedy_accuracy", "length_mean", "truncation_rate", "stop_rate"):
        assert kept[metric] == pytest.approx(own["summary"][metric], abs=1e-12), metric
    assert "length_characters" not in kept

    def again(rows, name, **more):
        file = written(tmp_path / name, "samples", "eval_samples/1", rows)
        return execute(spec("evaluate", tmp_path / f"{name}-run", {**inputs, "answers": file}, config | more), silent)

    # who is not answered is wrong, greedily too
    mode = lambda row: json.loads(row["extra_json"])["mode"]
    mine = list(samples.iter_rows())
    first, count = mine[0]["item_id"], len({row["item_id"] for row in mine})
    fewer = again([row for row in mine if row["item_id"] != first], "fewer", unanswered="empty")
    assert fewer["summary"]["prompts_unanswered"] == 1
    empty = [mode(row) for row in open_dataset(fewer["outputs"]["samples"]["path"]).iter_rows() if not row["output"]]
    assert empty == ["sample", "sample", "sample", "greedy"]
    sampled = [row for row in mine if row["item_id"] != first or mode(row) != "greedy"]
    with pytest.raises(ConfigError, match=f"1 of {count} prompts have no answer"):
        again(sampled, "sampled")
    turns = [{**row, "extra_json": json.dumps({**json.loads(row["extra_json"]), "mode": "turn"})} for row in mine]
    with pytest.raises(ConfigError, match="holds no sampled or greedy answers .*MT-Bench's model_answer file"):
        again(turns, "turns")


FORMS = {
    "text": [right(0), right(1), wrong(2), right(3)],
    "messages": [{"messages": [*SUMS[i]["prompt"], *assistant(right(i)["output"])]} for i in (0, 1, 3)] + [wrong(2)],
    "spaced": [{**right(i), "question": f"  what is {i}\nplus {i}? "} for i in (0, 1, 3)] + [wrong(2)],
    "completion of messages": [
        {"prompt": SUMS[i]["prompt"], "completion": assistant(f"#### {6 if i == 3 else 2 * i - (i == 2)}")}
        for i in range(4)
    ],
    "api": [
        {
            "custom_id": f"sum-{i}",
            "response": {
                "status_code": 200,
                "body": {"choices": [{"message": {"content": f"#### {2 * i + (i == 2)}"}, "finish_reason": "stop"}]},
            },
        }
        for i in range(4)
    ],
    "other api": [
        {
            "custom_id": f"sum-{i}",
            "result": {"message": {"content": [{"type": "text", "text": f"#### {2 * i + (i == 2)}"}]}},
        }
        for i in range(4)
    ],
    "harness": [
        {
            "doc_id": i,
            "doc": {"question": right(i)["question"], "answer": "gold"},
            "resps": [[f"#### {2 * i + (i == 2)}"]],
        }
        for i in range(4)
    ],
    "messages beside the right answer": [
        {
            "messages": [*SUMS[i]["prompt"], *assistant(f"#### {2 * i + (i == 2)}"), *user("thanks")],
            "answer": str(2 * i),
        }
        for i in range(4)
    ],
    "harness of instructions": [
        {
            "doc_id": i,
            "doc": {
                "question": right(i)["question"],
                "output": f"#### {2 * i}",
                "choices": [{"text": f"#### {2 * i}"}],
            },
            "resps": [[f"#### {2 * i + (i == 2)}"]],
        }
        for i in range(4)
    ],
    "ids": [{"id": f"sum-{i}", "response": f"#### {2 * i + (i == 2)}"} for i in range(4)],
    "an id of its own": [{"id": 100 + i, **(wrong(i) if i == 2 else right(i))} for i in range(4)],
}


@pytest.fixture(scope="module")
def named(tmp_path_factory):
    """The sums with ids of their file."""
    rows = [{**row, "extra_json": json.dumps({"id": f"sum-{i}"})} for i, row in enumerate(SUMS)]
    return written(tmp_path_factory.mktemp("named") / "d", "sums", "prompts/1", rows, split="test")


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_files(graded, named, form):
    """Answers find their prompts in any order, by an id or by the text."""
    result, rows = graded(FORMS[form][::-1], named)
    by_prompt = {json.loads(row["extra_json"])["prompt"]: row["correct"] for row in rows}
    assert by_prompt == {SUMS[i]["prompt"][0]["content"]: i != 2 for i in range(4)}
    assert result["summary"]["accuracy"] == 0.75 and not result["warnings"]
    if form == "api":
        assert result["summary"]["stop_rate"] == 1.0


def test_programs_by_their_task(graded, tmp_path):
    """HumanEval's samples file: pass@k, of completions that continue their prompt."""
    tasks = [
        {
            "task_id": f"HumanEval/{i}",
            "prompt": f'def add{i}(a):\n    """Add {i}."""\n',
            "entry_point": f"add{i}",
            "canonical_solution": f"    return a + {i}\n",
            "test": f"def check(candidate):\n    assert candidate(1) == {1 + i}\n",
        }
        for i in range(2)
    ]
    prompts = ingested(tmp_path, "humaneval", tasks, kind="prompts/1")
    rows = [
        {"task_id": f"HumanEval/{i}", "completion": f"    return a + {i if k < 2 - i else 9}\n"}
        for k in range(3)
        for i in range(2)
    ]
    summary = graded(rows, prompts, {"split": "train", "rewards": [{"kind": "code"}]})[0]["summary"]
    assert summary["accuracy"] == pytest.approx((2 / 3 + 1 / 3) / 2) and summary["pass_at_3"] == 1.0
    assert summary["pass_at_2"] == pytest.approx((1 + 2 / 3) / 2)


def test_unanswered_prompts_are_refused_or_wrong(graded, sums):
    rows = [right(0), right(0), right(1), right(1), right(3), right(3)]
    with pytest.raises(
        ConfigError, match=r"1 of 4 prompts have no answer \('what is 2 plus 2\?'.*write unanswered=empty"
    ):
        graded(rows, sums)
    result, made = graded(rows, sums, {"unanswered": "empty"})
    whole, _ = graded([*rows, wrong(2), wrong(2)], sums)
    assert result["summary"]["accuracy"] == whole["summary"]["accuracy"] == 0.75 and len(made) == 8
    assert result["summary"]["pass_at_2"] == 0.75 and result["summary"]["prompts_unanswered"] == 1
    assert result["summary"]["answers"] == 6 and "what is 2 plus 2?" in warned(result)["prompts_unanswered"]
    assert result["summary"]["protocol_hash"] != whole["summary"]["protocol_hash"]


def test_what_belongs_to_no_prompt_is_counted_by_reason(graded, named):
    """Damaged lines, rows without an answer, with nothing to match by, of other prompts, of two prompts at once."""
    rows = [
        right(0),
        right(1),
        right(2),
        right(3),
        {"question": "what is 9 plus 9?", "output": "18"},
        {"output": "#### 4"},
        {"id": "sum-1"},
        {"id": "sum-1", "output": None},
        right(1, id="sum-2"),
        {"custom_id": "sum-3", "response": {"status_code": 500, "body": {"error": {"message": "no"}}}},
    ]
    text = "\n".join(map(json.dumps, rows)).encode() + b'\n{"id": "sum-1", "outp\n\xff\xfe\n'
    result, made = graded(text, named)
    assert result["summary"]["accuracy"] == 1.0 and len(made) == 4 and result["summary"]["answers_left_out"] == 8
    told = warned(result)["answers_left_out"]
    for part in (
        "8 of 12 rows",
        "1 to no prompt of the data (the first: answers.jsonl, line 5)",
        "1 nothing in it says which prompt it answers",
        "2 no answer in it",
        "1 its id is that of one prompt, its text that of another",
        "1 whoever was asked gave none",
        "cannot be read (parse_error)",
    ):
        assert part in told, part


def test_answers_to_prompts_that_are_not_evaluated_are_left_out(graded, sums):
    """As many as the limit says are left out without a warning."""
    result, made = graded([right(i) for i in range(4)], sums, {"limit": 2})
    assert len(made) == result["summary"]["prompts"] == result["summary"]["answers_left_out"] == 2
    assert not result["warnings"]


def test_numbers_of_answers_differ_and_rows_come_twice(graded, sums):
    """A prompt counts once; pass@k is of the fewest; the same sample is none again."""
    rows = [right(0), wrong(0), right(1), right(1), wrong(1), wrong(1), right(2), wrong(2), right(3), wrong(3)]
    result, _ = graded(rows, sums)
    assert result["summary"]["accuracy"] == 0.5 and result["summary"]["pass_at_2"] == pytest.approx((3 + 5 / 6) / 4)
    assert "pass_at_4" not in result["summary"]
    told = warned(result)
    assert "3 prompts have 2, 1 prompts have 4" in told["answers_uneven"] and "answers_repeated" not in told
    twice, _ = graded([right(i) for i in range(4)] * 2, sums)
    assert "4 of 8 rows" in warned(twice)["answers_repeated"]
    indexed = [{**right(i), "sample_idx": k} for i in range(4) for k in (0, 1, 1)]
    result, made = graded(indexed, sums)
    assert len(made) == 8 and "4 the same sample of its prompt again" in warned(result)["answers_left_out"]


@pytest.mark.parametrize(
    "rows, told",
    [
        (b"", "the input answers is empty; give a file"),
        ([{"foo": 1, "bar": "x"}], "no row of answers belongs to any of the 4 prompts.*Columns found: foo, bar. Write"),
        ([{"question": "other", "output": "x"}], "to no prompt of the data.*give the prompts that were asked"),
    ],
)
def test_files_of_something_else_are_refused(graded, sums, rows, told):
    for unanswered in ("refuse", "empty"):
        with pytest.raises(ConfigError, match=told):
            graded(rows, sums, {"unanswered": unanswered})


def test_columns_of_any_name(graded, named):
    rows = [{"nr": f"sum-{i}", "says": f"#### {2 * i}", "output": "#### 77"} for i in range(4)]
    result, _ = graded(rows, named, {"answer_column": "says", "id_column": "nr"})
    assert result["summary"]["accuracy"] == 1.0


@pytest.mark.parametrize(
    "config, inputs, told",
    [
        ({"temperature": 0.5}, (), "temperature=0.5 would change nothing: answers are given.*answers_from"),
        ({"num_samples": 1}, (), "num_samples=1 would change nothing"),
        ({"few_shot": 2}, (), "few_shot=2 would change nothing"),
        ({"system": "be kind"}, (), "system=be kind would change nothing"),
        ({"rewards": [{"kind": "length"}]}, (), r"reward 'length' \(length\) reads the tokens"),
        ({"rewards": [{"kind": "environment"}]}, (), "reads the turns that a model sampled"),
        ({}, ("model",), "answers and model do not go together"),
        ({}, ("pairs",), "orders pairs by its own likelihood; give --input model=MODEL"),
        ({}, ("texts",), "loss and perplexity of texts are a model's"),
        ({}, ("reference",), "a KL is between two models"),
    ],
)
def test_what_only_a_model_has_is_refused(config, inputs, told):
    from stages.evaluate import SPEC, Config

    with pytest.raises(ConfigError, match=told):
        SPEC.check_inputs(["answers", "prompts", *inputs], Config(**config))


def test_neither_a_model_nor_answers():
    from stages.evaluate import SPEC, Config

    with pytest.raises(ConfigError, match="needs input 'model'.*--input model=REF_OR_PATH, or --input answers=FILE"):
        SPEC.check_inputs(["prompts"], Config())
    with pytest.raises(ConfigError, match="unanswered=empty would change nothing: the model answers by itself"):
        SPEC.check_inputs(["model", "prompts"], Config(unanswered="empty"))
    with pytest.raises(ConfigError, match="give --input prompts=REF_OR_PATH"):
        SPEC.check_inputs(["answers"], Config())


def test_choices_are_read_from_the_words_alone(graded, tmp_path):
    rows = [{"prompt": user("one?\nA. 1\nB. 2"), "choices": ["1", "2"], "answer": "A", "answer_type": "mc"}]
    quiz = written(tmp_path / "quiz", "quiz", "prompts/1", rows, split="test")
    answers = [{"question": "one?", "output": "Therefore, the answer is (A)."}]
    with pytest.raises(ConfigError, match=r"letter and the text of choices.*write multiple_choice=\[generation\]"):
        graded(answers, quiz)
    summary = graded(answers, quiz, {"multiple_choice": ["generation"]})[0]["summary"]
    assert summary["accuracy"] == 1.0 and "mc_letter_acc" not in summary


def test_mt_bench_s_model_answers_are_rated_turn_by_turn(graded, tmp_path):
    """The judge reads the given first answer before the second question; a turn without an answer is no answer."""
    questions = ingested(tmp_path, "mtbench", QUESTIONS)
    said = [
        {"question_id": q["question_id"], "model_id": "m", "choices": [{"index": 0, "turns": ["first I say", "then"]}]}
        for q in QUESTIONS
    ]
    with chat_server(rating) as server:
        judge = {"endpoint": server.url, "endpoint_model": "judge", "judge_retries": 2}
        result, _ = graded(said, questions, {"split": "train", "mt_bench": judge})
        texts = [body["messages"][0]["content"] for body in server.seen]
        short = [{**said[0], "choices": [{"turns": ["first I say"]}]}, *said[1:]]
        with pytest.raises(ConfigError, match="1 of 4 prompts have no answer"):
            graded(short, questions, {"split": "train", "mt_bench": judge})
    summary = result["summary"]
    assert summary["mt_bench"] == pytest.approx((4 * 8 + 3 * 4) / 7) and summary["mt_bench_missing_rate"] == 1 / 8
    assert (summary["mt_bench/turn=1"], summary["mt_bench/turn=2"]) == (8.0, 4.0) and "length_mean" not in summary
    second = next(text for text in texts if "three plus three" in text)
    assert "Assistant: first I say\n\nHuman: and three plus three?" in second and "6 it is" in second


@pytest.fixture(scope="module")
def beside(tiny, tmp_path_factory):
    """Evaluations of a model and of answers to the same prompts: {name: samples}."""
    root = tmp_path_factory.mktemp("beside")
    rows = [
        {"prompt": row["prompt"], "output": f"#### {row['answer']}"}
        for row in open_dataset(tiny["prompts"]).iter_rows()
    ]
    (root / "best.jsonl").write_text("\n".join(map(json.dumps, rows)))
    made = {
        "model": spec("evaluate", root / "model", {"model": tiny["other"], "prompts": tiny["prompts"]}, POLICY),
        "best": spec("evaluate", root / "best", {"prompts": tiny["prompts"]}, {"answers_from": "gold"}),
        "shown": spec(
            "evaluate",
            root / "shown",
            {"prompts": tiny["prompts"]},
            {"rewards": [{"kind": "verifier", "view": "full"}]},
        ),
    }
    for name in ("best", "shown"):
        made[name]["inputs"]["answers"] = {"path": str(root / "best.jsonl"), "digest": "d" * 64}
    for one in made.values():
        execute(one, silent)
    return {name: str(root / name / "out" / "samples") for name in made}


def test_given_answers_stand_beside_a_model_s(beside, tmp_path):
    given = {f"evaluations.{name}": beside[name] for name in ("model", "best")}
    result = execute(spec("compare", tmp_path / "compare", given, {}), silent)
    summary = result["summary"]
    assert summary["best/accuracy"] == 1.0 > summary["model/accuracy"]
    assert summary["best/accuracy_gain"] == pytest.approx(1.0 - summary["model/accuracy"])
    assert "model/length_characters" in summary and "model/length_mean" not in summary
    told = warned(result)["answers_given"]
    assert "The answers of best were given" in told and "model 3, best 1" in told
    assert "answers_missing" not in warned(result)  # one answer to every prompt is none too few
    rows = list(open_dataset(tmp_path / "compare" / "out" / "comparison").iter_rows())
    assert {row["source"] for row in rows} >= {"answers:dddddddddddd"}
    with pytest.raises(ProtocolError, match="graders"):
        given["evaluations.best"] = beside["shown"]
        execute(spec("compare", tmp_path / "other", given, {}), silent)


def test_given_answers_are_no_evidence(beside, tiny, tmp_path):
    scores = beside["best"].replace("samples", "scores")
    inputs = {"candidate": tiny["other"], "candidate_samples": beside["best"], "candidate_scores": scores}
    with pytest.raises(ConfigError, match="nothing shows which model made them.*evaluate the model itself"):
        execute(spec("promote", tmp_path, inputs, {"gates": [{"metric": "accuracy", "min": 0.5}]}), silent)


def test_the_commands_know_given_answers(tiny, tmp_path, monkeypatch):
    """`posttrain compare` sets them beside a model's and says so; they are no evidence for `posttrain promote`."""
    from flows.compare import compare
    from tasks.promotion import evidence
    from tasks.run import run_stage

    for name, value in {"POSTTRAIN_HOME": str(tmp_path / "home"), "POSTTRAIN_TRACKING": "off"}.items():
        monkeypatch.setenv(name, value)
    rows = [
        {"prompt": row["prompt"], "output": f"#### {row['answer']}"}
        for row in open_dataset(tiny["prompts"]).iter_rows()
    ]
    (tmp_path / "best.jsonl").write_text("\n".join(map(json.dumps, rows)))
    short = {"num_samples": 1, "greedy": False, "max_completion_length": 4}
    model = run_stage("evaluate", {"model": tiny["other"], "prompts": tiny["prompts"]}, short)
    best = run_stage("evaluate", {"answers": str(tmp_path / "best.jsonl"), "prompts": tiny["prompts"]}, {})
    found = compare(model.key, best.key)
    (accuracy,) = [row for row in found["held_out"] if row["metric"] == "accuracy"]
    assert (accuracy["b"], accuracy["prompts"]) == (1.0, 16)
    assert any("The answers of b were given" in note for note in found["notes"]) and not found["config"]
    otherwise = {"rewards": [{"name": "verifier", "kind": "verifier", "verifier": "string_f1"}]}
    graded = run_stage("evaluate", {"answers": str(tmp_path / "best.jsonl"), "prompts": tiny["prompts"]}, otherwise)
    with pytest.raises(ConfigError, match="different protocols") as refused:
        compare(model.key, graded.key)
    assert "string_f1" in str(refused.value) and "temperature" not in str(refused.value)
    with pytest.raises(ConfigError, match="nothing shows that .* made them; evaluate the model itself"):
        evidence(tiny["other"], name="p", alias="champion", given={"candidate_samples": best.outputs["samples"]})


def test_a_scorer_of_given_answers_is_not_what_their_numbers_are_about(monkeypatch):
    from storage import mlflow_models

    monkeypatch.setattr(mlflow_models, "model_id_of", lambda digest: f"m-{digest}")
    scorer = {"kind": "model", "digest": "d", "ref": "model:scorer", "path": "/scorer"}
    document = {"inputs": {"reward_model": scorer}, "summary": {"accuracy": 1.0}}
    assert mlflow_models.judged({**document, "judges": "model"}, {}) == {}
    assert mlflow_models.judged({**document, "judges": ""}, {})[""][0] == "m-d"


def test_the_report_says_whose_answers_they_are(beside):
    from pathlib import Path

    page = (Path(beside["best"]).parents[1] / "reports" / "summary.md").read_text()
    assert page.startswith("# Evaluation of given answers on sums/test") and "20 answers were given (gold)" in page
    assert not answers_of(Path(beside["best"]).parents[1])[0].get("finish")


def test_a_killed_grading_ends_with_the_same_bytes(tiny, sums, tmp_path, forks):
    """SIGKILL behind a chunk, with a reward model that scores, and warnings that were told before."""
    rows = [right(i) for i in range(4) for _ in range(5)] + [{"question": "who?", "output": "me"}, right(0)]
    (tmp_path / "answers.jsonl").write_text("\n".join(map(json.dumps, rows)))
    specs = {
        name: spec("evaluate", tmp_path / name, {"prompts": sums, "reward_model": tiny["reward"]}, {"chunk": 1}, "k")
        for name in ("whole", "killed")
    }
    for name, one in specs.items():
        one["inputs"]["answers"] = {"path": str(tmp_path / "answers.jsonl"), "digest": "a" * 64}
        (tmp_path / f"{name}.json").write_text(json.dumps(one))
    forks.run(tmp_path / "whole.json")
    checkpoints = tmp_path / "killed" / "checkpoints"
    forks.start(tmp_path / "killed.json").kill_when(
        lambda: max((p.name for p in checkpoints.glob("step-*")), default="") >= "step-0000000002"
    )
    assert not (tmp_path / "killed" / "result.json").exists()
    forks.run(tmp_path / "killed.json")
    whole, killed = (json.loads((tmp_path / name / "result.json").read_text()) for name in specs)
    assert killed["resumed_from"] >= 2 and killed["summary"] == whole["summary"]
    assert [w["code"] for w in whole["warnings"]] == [w["code"] for w in killed["warnings"]]
    assert {"answers_left_out", "answers_uneven"} <= {w["code"] for w in killed["warnings"]}
    for name in ("samples", "scores"):
        assert tree_digest(tmp_path / "whole/out" / name) == tree_digest(tmp_path / "killed/out" / name), name


def test_limit_is_of_the_same_prompts_whoever_answers(tiny, graded, tmp_path):
    """A prompt that the model has no room for is among the first ones, and is left out of its numbers alone."""
    asked = [{**SUMS[i], "prompt": user("what is " * (40 if i == 1 else 1) + f"{i} plus {i}?")} for i in range(4)]
    prompts = written(tmp_path / "prompts", "sums", "prompts/1", asked, split="test")
    short = {"limit": 3, "num_samples": 0, "max_completion_length": 4, "max_prompt_length": 60}
    model = execute(spec("evaluate", tmp_path / "model", {"model": tiny["other"], "prompts": prompts}, short), silent)
    rows = [{"prompt": row["prompt"], "output": f"#### {row['answer']}"} for row in asked]
    result, made = graded(rows, prompts, {"limit": 3})
    seen = {row["item_id"] for row in open_dataset(model["outputs"]["samples"]["path"]).iter_rows()}
    assert (model["summary"]["prompts"], result["summary"]["prompts"]) == (2, 3) and "prompts_too_long" in warned(model)
    assert seen < {row["item_id"] for row in made}
    given = {
        "evaluations.model": model["outputs"]["samples"]["path"],
        "evaluations.theirs": result["outputs"]["samples"]["path"],
    }
    compared = execute(spec("compare", tmp_path / "compare", given, {"metric": "accuracy"}), silent)
    assert (
        "model has no accuracy" in warned(compared)["answers_missing"]
        and "no room" in warned(compared)["answers_missing"]
    )


@pytest.mark.parametrize(
    "inputs, gpu",
    [
        (("answers", "prompts"), False),
        (("answers", "prompts", "rubric"), False),
        (("answers", "prompts", "reward_model"), True),
        (("answers", "prompts", "judge"), True),
        (("answers", "prompts", "gold"), True),
        (("model", "prompts"), True),
    ],
)
def test_a_gpu_is_taken_where_a_model_computes(inputs, gpu):
    from stages.evaluate import SPEC
    from stages.win_rate import SPEC as WIN_RATE

    assert SPEC.takes_gpu(inputs) is gpu
    assert not WIN_RATE.takes_gpu(["answers.a", "answers.b", "prompts"]) and WIN_RATE.takes_gpu(["recorded", "judge"])


def test_a_record_lists_no_setting_of_how_a_model_is_asked(tiny, tmp_path, monkeypatch):
    """Nor does the process wait for a slot; the same command, and the record's own settings, find the record."""
    from storage import records
    from tasks import run

    for name, value in {"POSTTRAIN_HOME": str(tmp_path / "home"), "POSTTRAIN_TRACKING": "off"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("POSTTRAIN_GPU_SLOTS", "1")
    rows = [
        {"prompt": row["prompt"], "output": f"#### {row['answer']}"}
        for row in open_dataset(tiny["prompts"]).iter_rows()
    ]
    (tmp_path / "best.jsonl").write_text("\n".join(map(json.dumps, rows)))
    inputs, told = {"answers": str(tmp_path / "best.jsonl"), "prompts": tiny["prompts"]}, []
    slots = run.leases.acquire_slots("gpu", 1, 1)  # somebody else trains
    try:
        made = run.run_stage("evaluate", inputs, {"limit": 7}, on_event=told.append, wait=False)
    finally:
        for slot in slots:
            slot.release()
    record = records.read(made.key)
    assert record["config"]["limit"] == 7 and {"rewards", "unanswered", "split"} <= record["config"].keys()
    assert {"num_samples", "greedy", "temperature", "engine", "prompt_template", "seed"}.isdisjoint(record["config"])
    (prepared,) = [event for event in told if event["event"] == "prepared"]
    assert "num_samples" not in prepared["config"]
    again = run.run_stage("evaluate", inputs, record["config"])
    assert again.cached and again.key == made.key


def test_the_win_rate_of_given_answers_is_that_of_their_file(tiny, tmp_path):
    """Samples of a grading meet a model's, or those of another file, as the file itself does."""
    prompts = [row["prompt"] for row in open_dataset(tiny["prompts"]).iter_rows()]
    rows = {
        name: [{"instruction": p[0]["content"], "output": f"{text} {i}" * (1 + i % 3)} for i, p in enumerate(prompts)]
        for name, text in (("mine", "four"), ("theirs", "what is two"))
    }
    files, samples = {}, {}
    for name, answers in rows.items():
        files[f"answers.{name}"] = str(tmp_path / f"{name}.json")
        (tmp_path / f"{name}.json").write_text(json.dumps(answers))
        made = spec("evaluate", tmp_path / name, {"prompts": tiny["prompts"]}, {})
        made["inputs"]["answers"] = {"path": files[f"answers.{name}"], "digest": name}
        samples[f"answers.{name}"] = execute(made, silent)["outputs"]["samples"]["path"]
    config, shared = {"baseline": "theirs"}, {"prompts": tiny["prompts"], "reward_model": tiny["reward"]}

    def rates(which, name):
        made = spec("win_rate", tmp_path / f"rate-{name}", shared, config)
        made["inputs"] |= {label: {"path": path, "digest": f"{name}{label}"} for label, path in which.items()}
        return {k: v for k, v in execute(made, silent)["summary"].items() if not isinstance(v, str)}

    ours = rates(samples, "samples")
    assert ours == rates(files, "files") and 0 < ours["mine/win_rate"] < 1
    mixed = {"answers.mine": files["answers.mine"], "answers.theirs": samples["answers.theirs"]}
    assert rates(mixed, "mixed") == ours
