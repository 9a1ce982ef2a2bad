"""The cost ledger, from what stages really used, and what a gain cost."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flows.cli import app
from stages.running import usage
from stages.harness import execute
from storage import costs, records
from tests.evaluation.conftest import tiny  # noqa: F401
from tests.training.conftest import data  # noqa: F401
from tests.evaluation.test_stages import POLICY, spec


def command(*arguments, code=0):
    done = CliRunner().invoke(app, [*map(str, arguments), "--json"])
    assert done.exit_code == code or (code and done.exception), done.output
    return json.loads(done.stdout.splitlines()[-1]) if not code else done.exception


@pytest.fixture()
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("POSTTRAIN_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def test_rows_without_a_price_have_no_total():
    rows = costs.ledger(
        [("a", {"gpu_hours": 2.0, "judge_calls": 10}), ("b", {"gpu_hours": 0.5, "generated_mtokens": 0})],
        {"gpu_hours": 3.0},
    )
    assert [(row["stage"], row["item"], row["total"]) for row in rows] == [
        ("a", "gpu_hours", 6.0),
        ("a", "judge_calls", None),
        ("b", "gpu_hours", 1.5),
    ]
    assert costs.totals(rows) == {
        "items": {"gpu_hours": 2.5, "judge_calls": 10},
        "total": 7.5,
        "unpriced": ["judge_calls"],
    }
    assert costs.totals([]) == {"items": {}, "total": None, "unpriced": []}
    assert costs.counts_of(
        {"stage": "rl", "inputs": {}, "outputs": {}, "perf": {"seconds": 1800, "devices": 4, "peak_gpu_memory_mib": 9}}
    ) == {"gpu_hours": 2.0}


def test_a_price_list_says_what_is_wrong_with_it(tmp_path, home):
    assert costs.prices_from() == {}
    file = tmp_path / "p.yaml"
    for text, says in (
        ("gpu_hour: 2", "did you mean 'gpu_hours'"),
        ("gpu_hours: -1", "is no price"),
        ("- 1", "is no list of prices"),
        ("gpu_hours: [1", "p.yaml cannot be read: while parsing"),
        ("# für\ngpu_hours: 1", "p.yaml cannot be read: it is not in UTF-8 .byte 0xfc at position 3.; save it"),
    ):
        file.write_bytes(text.encode("latin-1"))
        with pytest.raises(costs.PriceError, match=says):
            costs.prices_from(file)
    with pytest.raises(costs.PriceError, match="there is no price list"):
        costs.prices_from(tmp_path / "none.yaml")


def test_generated_tokens_are_those_of_the_samples_also_after_a_kill(tiny, tmp_path, monkeypatch):  # noqa: F811
    """An evaluation's own count; a run that goes on behind a checkpoint has the counts of both parts."""
    from storage.datasets import open_dataset

    made = spec("evaluate", tmp_path / "whole", {"model": tiny["policy"], "prompts": tiny["prompts"]}, POLICY)
    result = execute(made)
    tokens = sum(row["tokens"] for row in open_dataset(tmp_path / "whole" / "out" / "samples").iter_rows())
    assert result["usage"] == {"completions": 20 * 4, "generated_tokens": tokens}

    class Killed(BaseException):
        pass

    monkeypatch.setattr("stages.harness.PROGRESS_SECONDS", 0.0)  # every one is told

    def until(event):
        if event["event"] == "progress" and event["done"] == 2:
            raise Killed

    again = spec(
        "evaluate",
        tmp_path / "killed",
        {"model": tiny["policy"], "prompts": tiny["prompts"]},
        {**POLICY, "examples": 5},
    )
    with pytest.raises(Killed):
        execute(again, until)
    usage.begin()
    assert execute(again)["usage"] == result["usage"]


def test_a_served_judge_is_counted_by_what_the_server_says():
    from stages.reward.judge import ServerJudge
    from tests.chat_server import chat_server

    usage.begin()
    with chat_server(lambda body: {"message": {"content": "[[A]]"}, "finish_reason": "stop"}) as server:
        server.usage = {"prompt_tokens": 7, "completion_tokens": 2}
        ServerJudge(server.url, "m").answers(["one", "two"], 8, 0)
    assert usage.so_far() == {"judge_calls": 2, "judge_tokens_in": 14, "judge_tokens_out": 4}


def test_the_ledger_of_models_and_what_a_gain_cost(tiny, data, home, tmp_path):  # noqa: F811
    """Two fine-tunings of one model, the second from the first: its own cost is what the first did not need, and the
    gain is per that.
    """
    common = ("--set", "max_steps=2", "--set", "max_length=96", "--set", "batch_size=4")
    first = command(
        "stage",
        "sft",
        "--input",
        f"model={tiny['policy']}",
        "--input",
        f"data={data['demonstrations']}",
        *common,
        "--set",
        "learning_rate=1e-3",
        "--name-as",
        "first",
    )
    second = command(
        "stage",
        "sft",
        "--input",
        f"model={first['outputs']['model']}",
        "--input",
        f"data={data['demonstrations']}",
        *common,
        "--set",
        "learning_rate=1e-2",
        "--name-as",
        "second",
    )
    models = [one["outputs"]["model"] for one in (first, second)]
    judged = [
        command(
            "stage",
            "evaluate",
            "--input",
            f"model={model}",
            "--input",
            f"prompts={tiny['prompts']}",
            "--set",
            "num_samples=0",
            "--set",
            "max_completion_length=8",
        )
        for model in models
    ]
    prices = tmp_path / "prices.yaml"
    prices.write_text("cpu_hours: 3600\n")
    value = command("cost", models[1], "--prices", prices, "--against", models[0], "--metric", "length_mean")
    seconds = [records.read(one["key"])["perf"]["seconds"] for one in (first, second)]
    assert (
        value["total"] == pytest.approx(sum(seconds))
        and len([row for row in value["ledger"] if row["item"] == "cpu_hours"]) == 2
    )
    difference = judged[1]["metrics"]["length_mean"] - judged[0]["metrics"]["length_mean"]
    assert value["gain"]["gain"] == pytest.approx(difference) and value["gain"]["usd"] == pytest.approx(seconds[1])
    assert value["gain"]["gain_per"]["cpu_hours"] == pytest.approx(difference / (seconds[1] / 3600)) and value["gain"][
        "gain_per"
    ]["usd"] == pytest.approx(difference / seconds[1])
    assert command("cost", models[0])["total"] is None
    assert "no evaluation with 'reward'" in str(
        command("cost", models[1], "--against", models[0], "--metric", "reward", code=2)
    )
    assert "brought from outside" in str(command("cost", tiny["policy"], code=2))
    the_card_tells_the_same_story(models[1], first, judged[1], tiny["policy"], tmp_path / "exported")
    two_evaluations_are_paired(judged)


def test_who_ran_what_and_what_it_cost(home, tmp_path, monkeypatch):
    """Two people and one file of labels, which were paid for once, by whoever brought them in."""
    from tests.data.driver import write_lines

    file = write_lines(tmp_path / "p.jsonl", [{"prompt": f"q {i}", "chosen": "a", "rejected": "b"} for i in range(5)])
    for user, kind in (("ada", "pairs/1"), ("bob", "demonstrations/1")):
        monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", user)
        command("stage", "ingest", "--input", f"data={file}", "--set", f"kind={kind}")
    listed = command("ls", "results")["results"]
    assert [row["user"] for row in listed] == ["bob", "ada"]
    assert command("show", listed[0]["key"])["user"] == "bob"
    found = command("cost")["ledger"]
    assert {(row["stage"], row["item"]) for row in found} == {
        ("ada", "cpu_hours"),
        ("ada", "human_labels"),
        ("bob", "cpu_hours"),
    } and [row["count"] for row in found if row["item"] == "human_labels"] == [5]
    by_stage = command("cost", "--by", "stage", "--until", "2100-01-01")
    assert {row["stage"] for row in by_stage["ledger"]} == {"ingest"} and by_stage["items"]["human_labels"] == 5
    assert {row["stage"] for row in command("cost", "--by", "recipe")["ledger"]} == {"single stages"}
    assert command("cost", "--since", "2100-01-01")["ledger"] == []
    assert "leave dataset:p-pairs@latest or them out" in str(
        command("cost", "dataset:p-pairs@latest", "--by", "user", code=2)
    )


def the_card_tells_the_same_story(model, first, judged, policy, directory):
    """An exported model's card: both fine-tunings in their order, the evaluation of this model and no other, and no
    folder of this machine.
    """
    import yaml
    from transformers import AutoModelForCausalLM

    command("export", model, directory)
    card = (directory / "README.md").read_text()
    header = yaml.safe_load(card.split("---")[1])
    assert header == {
        "library_name": "transformers",
        "tags": ["posttrain", "sft"],
        "pipeline_tag": "text-generation",
    }
    assert (
        card.index("learning_rate=0.001`") < card.index("learning_rate=0.01`")
        and card.count("(stage sft)") + card.count(". sft") == 2
    )
    assert (
        first["outputs"]["model"] in card
        and f"| length_mean | {judged['metrics']['length_mean']:.4g} |" in card
        and card.count("| length_mean |") == 1
    )
    assert (
        "| metric | value | 95% | n | data | protocol |" in card
        and "_se |" not in card
        and f"| {judged['metrics']['prompts']} | {judged['metrics']['benchmark']} |"
        in next(line for line in card.splitlines() if line.startswith("| length_mean |"))
    )
    assert (
        judged["metrics"]["protocol_hash"] in card
        and str(Path(policy).parent) not in card
        and str(directory.parent) not in card
    )
    AutoModelForCausalLM.from_pretrained(directory)


def two_evaluations_are_paired(judged):
    """posttrain compare of evaluations: each difference with the interval that the samples give, and greedy answers to
    the same prompts.
    """
    from stages.evaluation.scores import paired, records_of
    from storage.datasets import open_dataset

    value = command("compare", judged[0]["key"], judged[1]["key"])
    samples = [
        records_of(open_dataset(records.read(one["key"])["outputs"]["samples"]["path"]).iter_rows()) for one in judged
    ]
    found = {row["metric"]: row for row in value["held_out"]}
    assert {
        "accuracy",
        "greedy_accuracy",
        "flexible_accuracy",
        "length_mean",
        "truncation_rate",
    } <= found.keys() and "pair_accuracy" not in found
    for metric, row in found.items():
        d = paired(samples[1], samples[0], metric)
        assert (row["a"], row["b"], row["difference"], row["low"], row["high"], row["prompts"]) == (
            d["champion"],
            d["candidate"],
            d["difference"],
            d["low"],
            d["high"],
            d["n"],
        )
    assert len(value["answers"]) == 8 and {"prompt", "a", "b"} <= value["answers"][0].keys()


def test_labels_by_people_count_where_they_come_in(home, tmp_path):
    rows = [{"prompt": f"q {i}", "chosen": "yes", "rejected": "no"} for i in range(6)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    made = command("stage", "ingest", "--input", f"data={tmp_path / 'pairs.jsonl'}")
    record = records.read(made["key"])
    from storage.datasets import open_dataset

    people = sum(
        row["origin"] == "human"
        for row in open_dataset(
            next(o["path"] for o in record["outputs"].values() if o["manifest"]["kind"] == "pairs/1")
        ).iter_rows()
    )
    assert costs.counts_of(record).get("human_labels", 0) == people
    synthetic = command("stage", "ingest", "--input", f"data={tmp_path / 'pairs.jsonl'}", "--set", "origin=ai")
    assert "human_labels" not in costs.counts_of(records.read(synthetic["key"]))


def test_benchmarks_that_are_datasets_take_no_labels_away(home, tmp_path):
    """Only the data says whether labels were paid for before: a file that is looked through for test problems brings
    its labels in all the same.
    """
    (tmp_path / "pairs.jsonl").write_text(
        "\n".join(json.dumps({"prompt": f"q {i}", "chosen": "yes", "rejected": "no"}) for i in range(6))
    )
    (tmp_path / "test.jsonl").write_text(
        "\n".join(
            json.dumps({"prompt": f"how many are {i} and one and nothing more than that?", "answer": str(i + 1)})
            for i in range(4)
        )
    )
    plain = command("stage", "ingest", "--input", f"data={tmp_path / 'pairs.jsonl'}")
    problems = command("stage", "ingest", "--input", f"data={tmp_path / 'test.jsonl'}", "--name-as", "problems")[
        "outputs"
    ]["data"]
    checked = command(
        "stage",
        "ingest",
        "--input",
        f"data={tmp_path / 'pairs.jsonl'}",
        "--input",
        f"benchmarks.test={problems}",
        "--set",
        "decontaminate=coverage",
    )
    assert (
        problems.startswith("dataset:")
        and costs.counts_of(records.read(checked["key"]))["human_labels"]
        == costs.counts_of(records.read(plain["key"]))["human_labels"]
        == 6
    )


def test_labels_of_one_file_are_paid_for_once(home, tmp_path):
    """A file that is read as pairs and once more as good and bad answers was labelled once."""
    (tmp_path / "pairs.jsonl").write_text(
        "\n".join(json.dumps({"prompt": f"q {i}", "chosen": "yes", "rejected": "no"}) for i in range(6))
    )
    made = [
        records.read(
            command("stage", "ingest", "--input", f"data={tmp_path / 'pairs.jsonl'}", "--set", f"kind={kind}")["key"]
        )
        for kind in ("pairs/1", "unpaired/1")
    ]
    assert [costs.counts_of(record)["human_labels"] for record in made] == [6, 6]
    rows = costs.ledger(costs.counted((record["stage"], record) for record in made), {"human_labels": 2.0})
    assert costs.totals(rows)["items"]["human_labels"] == 6 and sum(row["total"] or 0 for row in rows) == 12
    (tmp_path / "rankings.jsonl").write_text(
        "\n".join(
            json.dumps({"prompt": f"q {i}", "completions": ["one", "two", "three"], "ranks": [1, 2, 3]})
            for i in range(5)
        )
    )
    ranked = command("stage", "ingest", "--input", f"data={tmp_path / 'rankings.jsonl'}", "--set", "kind=pairs/1")
    assert ranked["metrics"]["rows_out"] == 15 and costs.counts_of(records.read(ranked["key"]))["human_labels"] == 5, (
        "a ranking is one row by people, whatever is made of it"
    )


def test_answers_of_people_to_a_task_are_labels(home, tmp_path):
    """Every filled line was paid for, also that of a second annotator; what a stub drew was not."""
    import csv

    from storage import store
    from storage.datasets import open_dataset

    (tmp_path / "pairs.jsonl").write_text(
        "\n".join(
            json.dumps({"prompt": f"q {i}", "chosen": f"yes {i}", "rejected": "no", "origin": "ai"}) for i in range(6)
        )
    )
    asked = command("stage", "ingest", "--input", f"data={tmp_path / 'pairs.jsonl'}", "--set", "origin=ai")["outputs"][
        "data"
    ]
    task = command("stage", "human_task", "--input", f"data={asked}")["outputs"]["tasks"]
    with open(tmp_path / "filled.csv", "w", newline="") as handle:
        out = csv.writer(handle)
        out.writerow(["item_id", "choice", "annotator"])
        for row in open_dataset(store.resolve(task).path).iter_rows():
            out.writerows([[row["item_id"], "1", "ann"], [row["item_id"], "skip", "bob"]])
    given = ("stage", "human_answers", "--input", f"tasks={task}", "--input", f"data={asked}")
    people = command(*given, "--input", f"answers={tmp_path / 'filled.csv'}")
    assert costs.counts_of(records.read(people["key"]))["human_labels"] == 12
    assert "human_labels" not in costs.counts_of(records.read(command(*given, "--set", "labeler=stub")["key"]))


def test_a_run_that_was_continued_paid_for_what_it_had_done(home):
    """Steps of an attempt that failed later are found done by the next one of the same run, and are still its cost;
    those of other runs are not.
    """
    entry = {"label": "sft", "stage": "sft", "key": "k1", "cached": False, "seconds": 1.0, "outputs": {}}
    first = records.start_run("r", {}, run_id="one", identity="same")
    records.append_stage(first.run_id, entry)
    records.append_stage(first.run_id, {**entry, "label": "dpo", "key": "k2", "cached": True})
    records.finish_run(first.run_id, "FAILED", "broke")
    again = records.start_run("r", {}, identity="same")
    for label, key in (("sft", "k1"), ("dpo", "k2")):
        records.append_stage(again.run_id, {**entry, "label": label, "key": key, "cached": True})
    other = records.start_run("r", {}, run_id="two")
    records.append_stage(other.run_id, {**entry, "cached": True})
    known = {"k1": {"stage": "sft"}, "k2": {"stage": "align"}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(records, "read", known.get)
        reused = {run: {label: free for label, _, free in costs.of_run(records.get_run(run))} for run in ("one", "two")}
    assert again.run_id == "one" and reused == {"one": {"sft": False, "dpo": True}, "two": {"sft": True}}
