"""evaluate, compare and promote end to end on tiny random models, through the real stage process and in-process."""

import hashlib
import json
import math
from pathlib import Path

import pytest

from stages.harness import execute
from stages.spec import ConfigError
from storage.datasets import open_dataset
from storage.files import tree_digest
from tests.common import written

ROOT = Path(__file__).resolve().parents[2]
POLICY = {"num_samples": 3, "max_completion_length": 8, "chunk": 6, "generation_batch": 16}


def digest(path):
    path = Path(path)
    return open_dataset(path).digest if (path / "manifest.json").exists() else tree_digest(path)


def spec(stage, workdir, inputs, config, key=None, seed=0):
    given = {name: {"path": path, "digest": digest(path)} for name, path in inputs.items()}
    key = (
        key
        or hashlib.sha256(
            json.dumps([stage, config, {n: i["digest"] for n, i in given.items()}], sort_keys=True).encode()
        ).hexdigest()
    )
    return {
        "stage": stage,
        "key": key,
        "config": config,
        "seed": seed,
        "device": "cpu",
        "inputs": given,
        "workdir": str(workdir),
    }


@pytest.fixture(scope="module")
def evaluations(tiny, tmp_path_factory):
    """name -> (result, output folder) of the two policies, with reward model and reference."""
    found = {}
    for name in ("policy", "other"):
        workdir = tmp_path_factory.mktemp(name)
        inputs = {
            "model": tiny[name],
            "prompts": tiny["prompts"],
            "pairs": tiny["pairs"],
            "reward_model": tiny["reward"],
            "reference": tiny["policy"],
        }
        found[name] = execute(spec("evaluate", workdir, inputs, POLICY)), workdir / "out"
    return found


def test_policy_evaluation(evaluations):
    result, out = evaluations["other"]
    summary = result["summary"]
    assert summary["prompts"] == 20 and summary["pairs"] == 24
    for name in (
        "accuracy",
        "greedy_accuracy",
        "flexible_accuracy",
        "reward",
        "length_mean",
        "kl_reference",
        "pair_accuracy",
    ):
        assert summary[f"{name}_low"] <= summary[name] <= summary[f"{name}_high"], name
    # prompts without an answer are not wrong, they are ungraded
    assert summary["unscorable_rate"] == pytest.approx(4 / 20)
    assert {"pass_at_2", "pass_at_3", "distinct_1", "truncation_rate", "stop_rate"} <= set(summary)
    samples = open_dataset(out / "samples")
    samples.verify()
    rows = list(samples.iter_rows())
    modes = [json.loads(row["extra_json"])["mode"] for row in rows]
    assert (modes.count("sample"), modes.count("greedy"), modes.count("chosen"), modes.count("rejected")) == (
        60,
        20,
        24,
        24,
    )
    assert len({row["row_id"] for row in rows}) == len(rows)
    scores = {row["metric"]: row for row in open_dataset(out / "scores").iter_rows()}
    assert scores["accuracy"]["value"] == summary["accuracy"] and scores["accuracy"]["n"] == 16
    assert json.loads(scores["accuracy"]["config_json"])["protocol_hash"] == summary["protocol_hash"]
    assert "accuracy/category=add" in scores and "accuracy/difficulty=2" in scores
    reports = {report["name"] for report in result["reports"]}
    assert {
        "summary",
        "metrics",
        "length-distribution",
        "reward-histogram",
        "by-category",
        "margin-histogram",
    } <= reports


def test_what_cannot_be_scored_is_named_and_an_answer_without_a_program_is_a_format_error(tiny, tmp_path):
    """Code prompts count answers without a program; a component that cannot score some answers says of how many and
    why; prompts without tests are not meant.
    """

    tests = [{"kind": "python", "code": "assert f() == 1"}]
    rows = [
        {
            "tests": tests if i else None,
            "constraints": [{"id": "no:such" if i == 1 else "punctuation:no_comma", "kwargs_json": "{}"}],
        }
        for i in range(4)
    ]
    prompts = str(tmp_path / "prompts")
    written(
        prompts,
        "tasks",
        "prompts/1",
        [{"prompt": [{"role": "user", "content": f"write f {i}"}], **row} for i, row in enumerate(rows)],
        source="made",
        split="test",
    )
    config = {"num_samples": 0, "max_completion_length": 8, "rewards": [{"kind": "code"}, {"kind": "constraints"}]}
    result = execute(spec("evaluate", tmp_path / "run", {"model": tiny["policy"], "prompts": prompts}, config))
    assert result["summary"]["format_error_rate"] == 0.75
    (warned,) = [w for w in result["warnings"] if w["code"] == "answers_unscorable"]
    assert (
        "1 answers have no value of 'constraints'" in warned["text"]
        and "unknown constraint 'no:such'" in warned["text"]
    )
    assert "tests_not_run" not in {w["code"] for w in result["warnings"]}
    told = {
        w["code"]: w["text"]
        for w in execute(
            spec(
                "evaluate",
                tmp_path / "none",
                {"model": tiny["policy"], "prompts": prompts},
                config | {"rewards": [{"kind": "constraints"}]},
            )
        )["warnings"]
    }
    assert (
        told["tests_not_run"].startswith("3 prompts bring tests of programs")
        and "[{kind: code}]" in told["tests_not_run"]
    )


def test_kl_to_itself_is_zero_and_to_another_model_is_positive(evaluations):
    assert evaluations["policy"][0]["summary"]["kl_reference"] == pytest.approx(0.0, abs=1e-4)
    assert evaluations["other"][0]["summary"]["kl_reference"] > 0.1


def test_samples_of_two_models_share_their_seeds(evaluations):
    """Same protocol hash, same items in the same order: the comparison is paired."""
    items = {}
    for name, (result, out) in evaluations.items():
        items[name] = [(row["item_id"], row["sample_idx"]) for row in open_dataset(out / "samples").iter_rows()]
    assert items["policy"] == items["other"]
    assert evaluations["policy"][0]["summary"]["protocol_hash"] == evaluations["other"][0]["summary"]["protocol_hash"]


def test_killed_evaluation_ends_with_the_same_bytes(tiny, evaluations, tmp_path, forks):
    """SIGKILL after the second chunk, then the same command: byte-identical datasets and summary."""
    inputs = {
        "model": tiny["other"],
        "prompts": tiny["prompts"],
        "pairs": tiny["pairs"],
        "reward_model": tiny["reward"],
        "reference": tiny["policy"],
    }
    file = tmp_path / "spec.json"
    file.write_text(json.dumps(spec("evaluate", tmp_path / "work", inputs, POLICY)))
    checkpoints = tmp_path / "work" / "checkpoints"
    forks.start(file).kill_when(
        lambda: max((p.name for p in checkpoints.glob("step-*")), default="") >= "step-0000000002"
    )
    assert not (tmp_path / "work" / "result.json").exists()
    forks.run(file)
    result = json.loads((tmp_path / "work" / "result.json").read_text())
    assert result["resumed_from"] >= 2
    undisturbed, out = evaluations["other"]
    assert result["summary"] == undisturbed["summary"]
    for name in ("samples", "scores"):
        assert tree_digest(tmp_path / "work" / "out" / name) == tree_digest(out / name), name


def test_reward_model_evaluation(tiny, tmp_path):
    result = execute(
        spec(
            "evaluate",
            tmp_path,
            {"model": tiny["reward"], "pairs": tiny["pairs"]},
            {"target": "reward_model", "chunk": 10, "probe_pairs": 5},
        )
    )
    summary = result["summary"]
    assert (
        summary["pairs"] == 24 and 0 <= summary["accuracy_low"] <= summary["accuracy"] <= summary["accuracy_high"] <= 1
    )
    assert {
        "ece",
        "log_loss",
        "tie_rate",
        "length_matched_accuracy",
        "accuracy/strength=1",
        "accuracy/source=a",
        "fooled_rate/repeated",
        "changed_rate/typo",
    } <= set(summary)
    rows = {
        (row["item_id"], json.loads(row["extra_json"])["mode"]): json.loads(row["extra_json"])
        for row in open_dataset(tmp_path / "out" / "samples").iter_rows()
    }
    item = next(item for item, mode in rows if mode == "chosen")
    assert rows[item, "chosen"]["margin"] == pytest.approx(
        rows[item, "chosen"]["reward"] - rows[item, "rejected"]["reward"]
    )
    assert "calibration" in {report["name"] for report in result["reports"]}


@pytest.mark.parametrize("target", ["reward_model", "policy"])
def test_ties_are_left_out_and_counted(tiny, tmp_path, target):
    """Half of the pairs prefer neither side: the scores are those of the other half alone."""
    from storage.datasets import write_dataset

    rows = list(open_dataset(tiny["pairs"]).iter_rows())
    found = {}
    for name, kept in (("all", rows), ("decided", rows[::2]), ("ties", rows[1::2])):
        write_dataset(
            str(tmp_path / name),
            "opinions",
            "pairs/1",
            [
                {**row, "label_prob": 0.5 if index % 2 and name != "decided" or name == "ties" else 1.0}
                for index, row in enumerate(kept)
            ],
        )
        stage = spec(
            "evaluate",
            tmp_path / f"run-{name}",
            {"model": tiny["reward" if target == "reward_model" else "policy"], "pairs": str(tmp_path / name)},
            {"target": target, "probe_pairs": 2},
        )
        if name == "ties":
            with pytest.raises(ConfigError, match="all 12 rows are ties"):
                execute(stage)
        else:
            found[name] = execute(stage)["summary"]
    assert found["all"]["pairs"] == 12 and found["all"]["pairs_ties"] == 12 and found["decided"]["pairs_ties"] == 0
    assert [
        found["all"][key] == value
        for key, value in found["decided"].items()
        if key not in ("protocol_hash", "pairs_ties")
    ].count(False) == 0


def test_answers_that_a_reward_model_cannot_score_do_not_end_the_evaluation(tiny, tmp_path, monkeypatch):
    """Flattery and the first pair have no score: the rest is evaluated, what is missing is null in the samples and
    counted.
    """
    from stages.reward_models.reward_scorers import ScalarScorer

    plain = ScalarScorer.score
    monkeypatch.setattr(
        ScalarScorer,
        "score",
        lambda self, responses: [
            float("nan") if "wonderful" in r.text or r.text == "The answer is 0." else value
            for r, value in zip(responses, plain(self, responses))
        ],
    )
    result = execute(
        spec(
            "evaluate",
            tmp_path,
            {"model": tiny["reward"], "pairs": tiny["pairs"]},
            {"target": "reward_model", "probe_pairs": 3},
        )
    )
    rows = [json.loads(row["extra_json"]) for row in open_dataset(tmp_path / "out" / "samples").iter_rows()]
    assert [row.get("reward") for row in rows if row["mode"] == "probe:sycophantic"] == [None] * 3
    assert (
        result["summary"]["pairs_unscored"] == 1
        and "fooled_rate/sycophantic" not in result["summary"]
        and 0 <= result["summary"]["fooled_rate/padded"] <= 1
    )
    assert "pairs_unscored" in {warning["code"] for warning in result["warnings"]}


def test_instruction_following_is_reported_for_prompts_with_constraints(tiny, tmp_path, monkeypatch):
    """The four IFEval numbers of eval.ifeval, from answers that are known, against the catalogue's rule; a constraint
    that no checker knows is counted.
    """
    from stages.generation import Sample
    from stages.measures.suites import ifeval_accuracies
    from storage.datasets import write_dataset
    from storage.schema import complete_row

    def prompt(text, *constraints):
        return complete_row(
            "prompts/1",
            {
                "prompt": [{"role": "user", "content": text}],
                "constraints": [{"id": name, "kwargs_json": json.dumps(given)} for name, given in constraints] or None,
            },
            dataset="ifeval",
            source="made",
            origin="human",
            split="test",
        )

    no_comma, words, quoted = (
        ("punctuation:no_comma", {}),
        ("length_constraints:number_words", {"num_words": 3, "relation": "at least"}),
        ("startend:quotation", {}),
    )
    prompts = {
        "a": prompt("a", no_comma, words),
        "b": prompt("b", quoted),
        "c": prompt("c", no_comma, words),
        "d": prompt("d", no_comma),
        "e": prompt("e", ("made:up", {})),
        "f": prompt("f"),
    }
    answers = {"a": "one two three", "b": 'Sure:\n"quoted"', "c": "short", "d": "", "e": "x", "f": "x"}
    write_dataset(str(tmp_path / "ifeval"), "ifeval", "prompts/1", list(prompts.values()))
    monkeypatch.setattr(
        Sample,
        "text",
        property(lambda self: answers[self.prompt["prompt"][-1]["content"]], lambda self, value: None),
        raising=False,
    )
    result = execute(
        spec(
            "evaluate",
            tmp_path / "run",
            {"model": tiny["policy"], "prompts": str(tmp_path / "ifeval")},
            {**POLICY, "num_samples": 0},
        )
    )
    expected = ifeval_accuracies([[1, 1], [0], [1, 0], [0]], [[1, 1], [1], [1, 0], [0]])
    assert {name: result["summary"][name] for name in expected} == pytest.approx(expected)
    assert (
        result["summary"]["prompt_level_strict_acc_low"] < 0.25 < result["summary"]["prompt_level_strict_acc_high"]
        and result["summary"]["constraints_unscorable_rate"] == 0.2
    )
    assert "made:up" in next(
        warning["text"] for warning in result["warnings"] if warning["code"] == "answers_unscorable"
    )
    assert {row["metric"]: row["n"] for row in open_dataset(tmp_path / "run" / "out" / "scores").iter_rows()}[
        "inst_level_loose_acc"
    ] == 6


def test_reward_scores_do_not_depend_on_the_chunk(tiny, tmp_path):
    margins = []
    for chunk in (3, 24):
        execute(
            spec(
                "evaluate",
                tmp_path / str(chunk),
                {"model": tiny["reward"], "pairs": tiny["pairs"]},
                {"target": "reward_model", "chunk": chunk, "probe_pairs": 0},
            )
        )
        margins.append(
            [
                json.loads(row["extra_json"]).get("margin")
                for row in open_dataset(tmp_path / str(chunk) / "out" / "samples").iter_rows()
            ]
        )
    assert (
        margins[0] == pytest.approx([m for m in margins[1]], abs=1e-5, nan_ok=True)
        if None not in margins[0]
        else [m for m in margins[0] if m is not None]
        == pytest.approx([m for m in margins[1] if m is not None], abs=1e-5)
    )


def test_comparison(evaluations, tmp_path):
    inputs = {f"evaluations.{name}": str(out / "samples") for name, (_, out) in evaluations.items()}
    result = execute(spec("compare", tmp_path, inputs, {"order": ["policy", "other"], "select_by": "length_mean"}))
    assert result["summary"]["best"] in evaluations and 0 < result["summary"]["best_prompts"] < 24
    assert result["summary"]["policy/accuracy"] == evaluations["policy"][0]["summary"]["accuracy"]
    assert result["summary"]["other/accuracy_gain"] == pytest.approx(
        result["summary"]["other/accuracy"] - result["summary"]["policy/accuracy"]
    )
    page = next(Path(report["markdown"]).read_text() for report in result["reports"] if report["name"] == "comparison")
    assert f"**{result['summary']['best']}**" in page and "gain over the row above" in page and "greedy answers" in page
    assert open_dataset(tmp_path / "out" / "comparison").num_rows > 6


def test_a_gain_that_may_be_chance_says_how_many_prompts_would_tell():
    """n per arm = ceil((z_.975 + z_.8)^2 (p1 (1 - p1) + p2 (1 - p2)) / (p1 - p2)^2), eval.statistics; by hand for .50
    against .55.
    """
    from stages.compare import table
    from stages.evaluation.scores import Metric

    metrics = {
        name: {"accuracy": Metric(value, 100, 0.05, value - 0.1, value + 0.1)}
        for name, value in (("a", 0.5), ("b", 0.55), ("c", 0.9))
    }
    gain = lambda d, low, high: {"difference": d, "low": low, "high": high, "p_value": 0.5, "better": 3, "worse": 2}
    rows = table(
        ["a", "b", "c"],
        metrics,
        ["accuracy"],
        {("b", "accuracy"): gain(0.05, -0.05, 0.15), ("c", "accuracy"): gain(0.35, 0.2, 0.5)},
        "accuracy",
    )
    assert [row.get("prompts to tell") for row in rows] == [
        None,
        math.ceil((1.959964 + 0.841621) ** 2 * (0.25 + 0.2475) / 0.0025),
        None,
    ]


def test_a_table_counts_its_items_and_all_of_its_tests():
    """Each model's items stand beside its numbers; of two gains with p = 0.02 and 0.04, Holm's are 0.04 and 0.04; one
    gain alone has no such column.
    """
    from stages.compare import table
    from stages.evaluation.scores import Metric

    metrics = {name: {"accuracy": Metric(0.5, n, 0.05, 0.4, 0.6)} for name, n in (("a", 100), ("b", 97), ("c", 100))}
    gain = lambda p: {"difference": 0.1, "low": 0.01, "high": 0.15, "p_value": p, "better": 3, "worse": 2}
    rows = table(
        ["a", "b", "c"],
        metrics,
        ["accuracy"],
        {("b", "accuracy"): gain(0.04), ("c", "accuracy"): gain(0.02)},
        "accuracy",
    )
    assert [row["items"] for row in rows] == [100, 97, 100] and [row.get("p of all") for row in rows] == [
        None,
        0.04,
        0.04,
    ]
    assert "p of all" not in table(["a", "b"], metrics, ["accuracy"], {("b", "accuracy"): gain(0.04)}, "accuracy")[1]


@pytest.mark.parametrize("factor, warned", [(1.4, True), (1.2, False), (0.5, False)])
def test_answers_that_grew_by_a_third_are_warned_of(evaluations, tmp_path, factor, warned):
    """Section H, alarms: length up by more than 30% against the model before."""
    from storage.datasets import write_dataset

    samples, inputs = open_dataset(evaluations["policy"][1] / "samples"), {}
    for name, times in (("sft", 1.0), ("dpo", factor)):
        rows = [{**row, "tokens": round((40 + 20 * (i % 2)) * times)} for i, row in enumerate(samples.iter_rows())]
        write_dataset(str(tmp_path / name), name, "eval_samples/1", rows, meta=samples.manifest["meta"])
        inputs[f"evaluations.{name}"] = str(tmp_path / name)
    found = {
        w["code"]: w["text"]
        for w in execute(spec("compare", tmp_path / "run", inputs, {"order": ["sft", "dpo"]}))["warnings"]
    }
    assert ("answers_longer" in found) is warned
    assert not warned or "answers of dpo are 40% longer than those of sft" in found["answers_longer"]


def test_answers_that_one_model_lacks_are_said(evaluations, tmp_path):
    """The same evaluation without the verdicts of a quarter of its answers: the comparison names the side that lacks
    them.
    """
    from storage.datasets import write_dataset

    rows = list(open_dataset(evaluations["policy"][1] / "samples").iter_rows())
    graded = [row for row in rows if row["correct"] is not None and json.loads(row["extra_json"])["mode"] == "sample"]
    for row in graded[: len(graded) // 4]:
        row["correct"] = None
    meta = open_dataset(evaluations["policy"][1] / "samples").manifest["meta"]
    write_dataset(str(tmp_path / "less"), "less", "eval_samples/1", rows, meta=meta)
    whole, less = str(evaluations["policy"][1] / "samples"), str(tmp_path / "less")
    told = {
        w["code"]: w["text"]
        for w in execute(
            spec(
                "compare",
                tmp_path / "run",
                {"evaluations.whole": whole, "evaluations.less": less},
                {"order": ["whole", "less"]},
            )
        )["warnings"]
    }
    assert (
        told["answers_missing"].startswith("less has no accuracy for") and "scored for whole" in told["answers_missing"]
    )
    none = execute(spec("compare", tmp_path / "same", {"evaluations.a": whole, "evaluations.b": whole}, {}))
    assert "answers_missing" not in {w["code"] for w in none["warnings"]}


def test_comparison_refuses_different_protocols(tiny, evaluations, tmp_path):
    execute(
        spec(
            "evaluate",
            tmp_path / "warm",
            {"model": tiny["policy"], "prompts": tiny["prompts"]},
            {**POLICY, "temperature": 0.5},
        )
    )
    inputs = {
        "evaluations.a": str(evaluations["policy"][1] / "samples"),
        "evaluations.b": str(tmp_path / "warm" / "out" / "samples"),
    }
    with pytest.raises(ConfigError, match="temperature: 1.0 for a, 0.5 for b"):
        execute(spec("compare", tmp_path / "compare", inputs, {}))


@pytest.mark.parametrize(
    "config",
    [{"metric": "reward"}, {"select_by": "reward"}, {"select_by": "best_of_2_accuracy"}, {"metric": "kl_reference"}],
)
def test_comparison_refuses_metrics_of_different_scorers(tiny, evaluations, tmp_path, config):
    """The same prompts and settings, but another reward model (of another seed) and another reference."""
    execute(
        spec(
            "evaluate",
            tmp_path / "b",
            {"model": tiny["policy"], "prompts": tiny["prompts"], "pairs": tiny["pairs"], "reference": tiny["other"]},
            POLICY,
        )
    )
    inputs = {
        "evaluations.a": str(evaluations["policy"][1] / "samples"),
        "evaluations.b": str(tmp_path / "b" / "out" / "samples"),
    }
    with pytest.raises(ConfigError, match="was measured with different inputs re"):
        execute(spec("compare", tmp_path / "compare", inputs, config))
    result = execute(spec("compare", tmp_path / "allowed", inputs, {"select_by": "accuracy"}))["summary"]
    assert "a/accuracy" in result and "a/reward" not in result and "a/kl_reference" not in result


def promotion_inputs(tiny, evaluations, candidate="other", champion="policy"):
    inputs = {}
    for role, name in (("candidate", candidate), ("champion", champion)):
        if name:
            out = evaluations[name][1]
            inputs |= {role: tiny[name], f"{role}_samples": str(out / "samples"), f"{role}_scores": str(out / "scores")}
    return inputs


def test_promotion_is_recorded_whatever_it_is(tiny, evaluations, tmp_path):
    from stages.promote import read_decision

    config = {"min_prompts": 2, "prompts": "confirmation", "gates": [{"metric": "accuracy", "max": 1.0}]}
    result = execute(spec("promote", tmp_path, promotion_inputs(tiny, evaluations), config))
    decision = read_decision(str(tmp_path / "out" / "decision"))
    assert decision["promote"] is False and result["summary"]["promote"] == 0  # two random models
    assert decision["candidate"].startswith("model:m-") and decision["champion"].startswith("model:m-")
    assert [row["check"] for row in decision["evidence"]] == ["improvement over champion", "gate"]
    whole = evaluations["other"][0]["summary"]["prompts"]
    assert all(0 < row["n"] < whole for row in decision["evidence"])
    first = next(iter(open_dataset(tmp_path / "out" / "decision").iter_rows()))
    assert first["metric"] == "promote" and json.loads(first["config_json"]) == decision


def test_promotion_without_champion_needs_a_gate(tiny, evaluations, tmp_path):
    inputs = promotion_inputs(tiny, evaluations, champion=None)
    with pytest.raises(ConfigError, match="nothing is promoted without evidence"):
        execute(spec("promote", tmp_path / "a", inputs, {}))
    config = {"gates": [{"metric": "length_mean", "max": 8}], "non_regression": [{"metric": "accuracy"}]}
    result = execute(spec("promote", tmp_path / "b", inputs, config))
    assert ["no champion that accuracy could fall behind" in w["text"] for w in result["warnings"]] == [True]
    assert result["summary"]["promote"] == 1 and result["summary"]["champion"] == "none"


def test_promotion_refuses_evidence_about_another_model(tiny, evaluations, tmp_path):
    inputs = promotion_inputs(tiny, evaluations) | {"candidate": tiny["policy"]}
    with pytest.raises(ConfigError, match="judge model"):
        execute(spec("promote", tmp_path, inputs, {}))


def test_impossible_settings_are_refused_at_load(tiny, tmp_path):
    for config, text in (
        ({"num_samples": 0, "greedy": False}, "greedy=true"),
        ({"temperature": 0.0}, "num_samples=0"),
        ({"num_samples": 0, "top_p": 0.9}, "top_p=0.9 would change nothing: every answer is greedy"),
        ({"num_samples": 0, "temperature": 0.6}, "temperature=0.6 would change nothing: every answer is greedy"),
        ({"num_sample": 3}, "did you mean 'num_samples'"),
    ):
        with pytest.raises(ConfigError, match=text):
            execute(spec("evaluate", tmp_path, {"model": tiny["policy"], "prompts": tiny["prompts"]}, config))
    with pytest.raises(ConfigError, match="prompts=REF_OR_PATH"):
        execute(spec("evaluate", tmp_path, {"model": tiny["policy"]}, {}))
    with pytest.raises(ConfigError, match="pairs=REF_OR_PATH"):
        execute(spec("evaluate", tmp_path, {"model": tiny["reward"]}, {"target": "reward_model"}))
