"""Arms that are aligned by a prompt alone, whose opinions a model has, the H4 average, and the smoke test."""

import json
import math

import pytest

from stages import compare
from stages.evaluation import opinions, scores
from stages.harness import execute
from stages.spec import ConfigError
from storage.datasets import open_dataset
from tests.data.driver import ingest, write_lines
from tests.evaluation.test_benchmarks import evaluate, quiz  # noqa: F401
from tests.evaluation.test_stages import spec


def test_a_system_text_and_examples_make_an_arm_that_needs_no_training(tiny, tmp_path):
    """They stand before every prompt and in the protocol; only a comparison that says so takes the arm for a model."""
    examples = str(
        ingest(
            write_lines(
                tmp_path / "urial.jsonl",
                [
                    {
                        "messages": [
                            {"role": "user", "content": f"hello {i}"},
                            {"role": "assistant", "content": f"Hi {i}!"},
                        ],
                        "split": "train",
                    }
                    for i in range(3)
                ],
            ),
            tmp_path / "i",
        ).workdir
        / "out"
        / "data"
    )
    plain, _ = evaluate(tmp_path / "plain", {"model": tiny["policy"], "prompts": tiny["prompts"]})
    from stages.evaluation.few_shot import Shots

    shown = []
    real = Shots.ids
    Shots.ids = lambda self, renderer, row, reading="generation": (
        shown.append(self.show(row, reading)),
        real(self, renderer, row, reading),
    )[1]
    try:
        arm, _ = evaluate(
            tmp_path / "arm",
            {"model": tiny["policy"], "prompts": tiny["prompts"], "examples": examples},
            system="Be kind.",
            few_shot=3,
        )
    finally:
        Shots.ids = real
    for messages in shown:
        assert [m["role"] for m in messages] == ["system", *["user", "assistant"] * 3, "user"] and messages[0][
            "content"
        ] == "Be kind."
        assert messages[1:7] == shown[0][1:7]  # the same for every prompt, so that its cache can be kept
    inputs = {
        "evaluations.base": str(tmp_path / "plain" / "out" / "samples"),
        "evaluations.prompted": str(tmp_path / "arm" / "out" / "samples"),
    }
    with pytest.raises(ConfigError, match="different protocols.*few_shot"):
        execute(spec("compare", tmp_path / "c", inputs, {"metric": "greedy_accuracy"}))
    result = execute(spec("compare", tmp_path / "d", inputs, {"metric": "greedy_accuracy", "prompted": True}))[
        "summary"
    ]
    assert result["prompted/greedy_accuracy"] == arm["summary"]["greedy_accuracy"] and "prompted/regressed" in result
    text, _ = evaluate(
        tmp_path / "text",
        {"model": tiny["policy"], "prompts": tiny["prompts"]},
        system="Be kind.",
        prompt_template="none",
    )
    assert text["summary"]["protocol_hash"] != plain["summary"]["protocol_hash"]
    with pytest.raises(ConfigError, match="system stands before prompts"):
        evaluate(tmp_path / "pairs", {"model": tiny["policy"], "pairs": tiny["pairs"]}, system="Be kind.")


def test_likeness_of_distributions():
    assert opinions.alignment([0.2, 0.3, 0.5], [0.1, 0.6, 0.3], True) == pytest.approx(0.85)  # the catalogue's vector
    assert opinions.alignment([1, 1], [3, 3], True) == opinions.alignment([0.5, 0.5], [1, 1], False) == 1.0
    assert opinions.alignment([1, 0, 0], [0, 0, 1], True) == 0.0 and opinions.alignment(
        [1, 0], [0, 1], False
    ) == pytest.approx(0.0)
    js = 0.5 * (math.log2(1 / 0.75)) + 0.5 * (0.5 * math.log2(0.5 / 0.75) + 0.5 * math.log2(0.5 / 0.25))
    assert opinions.alignment([1, 0], [0.5, 0.5], False) == pytest.approx(1 - math.sqrt(js))
    assert (
        "2 shares for 3" in opinions.wrong({"a": [0.5, 0.5]}, 3)
        and "not numbers" in opinions.wrong({"a": [0, 0]}, 2)
        and opinions.wrong({"a": [1, 2]}, 2) is None
    )


def test_opinions_are_read_by_the_letters_and_have_no_right_answer(tiny, tmp_path):
    rows = [
        {
            "question": f"how good is {i}?",
            "choices": ["bad", "so", "good"],
            "groups": {"old": [1, 0, 0], "young": [0.2, 0.3, 0.5]},
            "split": "test",
            **({"ordinal": False} if i % 2 else {}),
        }
        for i in range(6)
    ]
    data = str(ingest(write_lines(tmp_path / "o.jsonl", rows), tmp_path / "i").workdir / "out" / "data")
    result, records = evaluate(tmp_path / "e", {"model": tiny["other"], "prompts": data})
    assert [r["mode"] for r in records] == ["letter"] * 6 and all(r["correct"] is None for r in records)
    assert (
        not [w for w in result["warnings"] if w["code"] == "choices_unscorable"]
        and "mc_letter_acc" not in result["summary"]
    )
    own = [opinions.alignment(r["probabilities"], [1, 0, 0], r["ordinal"]) for r in records]
    assert sum(r["ordinal"] for r in records) == 3 and result["summary"]["group_alignment/group=old"] == pytest.approx(
        sum(own) / 6
    )
    assert result["summary"]["group_alignment"] == pytest.approx(
        (result["summary"]["group_alignment/group=old"] + result["summary"]["group_alignment/group=young"]) / 2
    )


def test_the_h4_average_is_over_benchmarks_of_these_names(tiny, quiz, tmp_path):  # noqa: F811
    made = {}
    for name in ("policy", "other"):
        made[name] = evaluate(
            tmp_path / name, {"model": tiny[name], "prompts": quiz}, multiple_choice=["letter", "text"]
        )[0]["summary"]
    suites = ("arc-challenge", "HellaSwag", "mmlu", "truthful_qa")
    inputs = {
        f"evaluations.{name}/{suite}": str(tmp_path / name / "out" / "samples") for name in made for suite in suites
    }
    summary = execute(spec("compare", tmp_path / "c", inputs, {"metric": "mc_letter_acc"}))["summary"]
    for name, m in made.items():
        assert summary[f"{name}/h4"] == pytest.approx(
            (2 * m["mc_text_acc_norm"] + m["mc_letter_acc"] + m["mc_text_acc"]) / 4
        )
        assert summary[f"{name}/h4_low"] < summary[f"{name}/h4"] < summary[f"{name}/h4_high"]
    easy = {f"evaluations.{name}/arc_easy": str(tmp_path / "easy" / name / "out" / "samples") for name in made}
    for name in made:
        evaluate(tmp_path / "easy" / name, {"model": tiny[name], "prompts": quiz}, multiple_choice=["text"], limit=1)
    both = execute(spec("compare", tmp_path / "both", {**easy, **inputs}, {"metric": "mc_text_acc"}))["summary"]
    assert all(both[f"{name}/h4"] == summary[f"{name}/h4"] for name in made), "ARC of the average is its challenge set"
    two = execute(
        spec(
            "compare",
            tmp_path / "two",
            {
                **inputs,
                **{
                    f"evaluations.{name}/mmlu_pro": path
                    for name in made
                    for path in [inputs[f"evaluations.{name}/mmlu"]]
                },
            },
            {"metric": "mc_letter_acc"},
        )
    )
    assert "policy/h4" not in two["summary"] and any(
        w["code"] == "h4_ambiguous" and "mmlu, mmlu_pro" in w["text"] for w in two["warnings"]
    )
    fewer = execute(
        spec(
            "compare",
            tmp_path / "d",
            {key: path for key, path in inputs.items() if "mmlu" not in key},
            {"metric": "mc_letter_acc"},
        )
    )["summary"]
    assert "policy/h4" not in fewer and compare.h4([]) == {}


def test_a_smoke_test_shows_models_side_by_side(tiny, tmp_path):
    """Without a chat template a model gets the plain text; the same model is the same text twice, and one that never
    ends is warned of.
    """
    import shutil

    shutil.copytree(tiny["policy"], tmp_path / "base")
    config = json.loads((tmp_path / "base" / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (tmp_path / "base" / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "base" / "chat_template.jinja").unlink(missing_ok=True)
    inputs = {"models.base": str(tmp_path / "base"), "models.tuned": tiny["policy"], "models.again": tiny["policy"]}
    result = execute(spec("smoke", tmp_path / "s", inputs, {"max_completion_length": 8, "prompts": ["one", "two"]}))
    records = scores.records_of(open_dataset(tmp_path / "s" / "out" / "samples").iter_rows())
    assert [(r["model"], r["template"]) for r in records] == [("base", "none")] * 2 + [("tuned", "chat")] * 2 + [
        ("again", "chat")
    ] * 2
    assert [r["output"] for r in records[2:4]] == [r["output"] for r in records[4:]]
    for name in ("base", "tuned"):
        assert (
            result["summary"][f"{name}/stops"] == sum(r["finish"] == "eos" for r in records if r["model"] == name) / 2
        )
    runs_on = [name for name in ("tuned", "again") if result["summary"][f"{name}/stops"] == 0]
    assert [w["code"] for w in result["warnings"]] == ["runs_on"] * bool(runs_on)
