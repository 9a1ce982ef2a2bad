"""How worked solutions end: what is an ending, rewriting that verifiers read alike, sources that are told apart by it
in a mixture.
"""

import json
from collections import Counter

import pytest

from stages.harness import execute
from stages.spec import ConfigError
from stages.verification.answer_format import STYLES, ending_of, rewritten, style_of
from stages.verification.extraction import FLEXIBLE_ORDER, extract
from stages.verification.verifiers import verify_math
from storage.datasets import open_dataset, write_dataset
from storage.schema import complete_row
from tests.common import assistant, silent, user, written
from tests.world.test_rewards import _data


@pytest.mark.parametrize(
    "text,style,answer",
    [
        ("So it is\n#### 1,200", "hash", "1,200"),
        ("The area is $\\boxed{\\frac{1}{2}}$.", "boxed", "\\frac{1}{2}"),
        ("Thus, the answer is: 12.", "phrase", "12"),
        ("hm <answer>12</answer>", "answer_tag", "12"),
        ("The answer is $\\boxed{4}$.", "boxed", "4"),
        ("<answer>so \\boxed{5}</answer>\n", "answer_tag", "5"),
        ("**The final answer is: 3**", "phrase", "3"),
        ("The \\boxed{4} apples are red, so I ate some.", None, None),
        ("The answer is 4. But is that so?", None, None),
        ("#### 4\nThat was easy.", None, None),
        ("Hello there.", None, None),
        ("", None, None),
        ("\\boxed{", None, None),
        ("The answer is: ", None, None),
        ("<answer></answer>", None, None),
    ],
)
def test_an_ending_closes_the_text(text, style, answer):
    found = ending_of(text)
    assert (found and found.style, found and found.answer) == (style, answer)


@pytest.mark.parametrize(
    "text",
    [
        "2 + 2 = 4, so\n#### 4",
        "Then $x = \\boxed{\\frac{3}{4}}$.",
        "It follows. The answer is: 1,000",
        "<think>a</think>\n<answer>12</answer>",
        "The answer is \\boxed{(1, 2)}.",
        "#### 7",
    ],
)
@pytest.mark.parametrize("style", STYLES)
def test_an_answer_is_read_alike_in_every_style(text, style):
    before, new = ending_of(text), rewritten(text, style)
    after = ending_of(new)
    assert (
        after.style == style
        and rewritten(new, style) == new
        and verify_math({"answer": before.answer}, new, flexible=True)[0]
    )
    marks = ("\\boxed", "####", "he answer is:", "<answer>")
    assert sum(mark in new for mark in marks) == 1, "the old mark is gone"
    assert extract(new, FLEXIBLE_ORDER) is not None and rewritten(new, before.style) is not None


def test_what_stays_as_it_is():
    assert rewritten("No ending here.", "boxed") is None and rewritten("done\n#### 4", "hash") == "done\n#### 4"
    assert rewritten("The sum is $\\boxed{4}$ cm.", "phrase") is None, "words behind the box: it does not end the text"
    assert "the sum is $12$." in rewritten("Then the sum is $\\boxed{12}$.", "hash"), (
        "a box in a sentence leaves its content there"
    )


@pytest.mark.parametrize(
    "text,style",
    [
        ("The roots are $\\boxed{3}$ and $\\boxed{4}$.", "hash"),
        ("The roots are $\\boxed{3}$ and $\\boxed{4}$.", "phrase"),
        ("First \\boxed{7}, then more.\n#### 12", "phrase"),
        ("We have \\boxed{a} here.\nThe answer is: 7", "hash"),
        ("The answer is $x$ and $y$", "boxed"),
        ("so\n#### ", "boxed"),
    ],
)
def test_a_mark_that_is_left_before_the_new_ending_would_be_read_for_it(text, style):
    assert rewritten(text, style) is None


@pytest.mark.parametrize(
    "text,answer,boxed",
    [
        ("so\n#### 18 dollars", "18", "so\nThe answer is $\\boxed{18}$."),
        ("so\n#### **18**", "18", "so\nThe answer is $\\boxed{18}$."),
        ("so\n#### 1,800", "1800", "so\nThe answer is $\\boxed{1,800}$."),
        ("The answer is $12", "12", "The answer is $\\boxed{\\$12}$."),
        ("The answer is 12%", "12", "The answer is $\\boxed{12\\%}$."),
    ],
)
def test_an_answer_in_a_box_is_what_a_verifier_reads(text, answer, boxed):
    """Behind #### a verifier reads the number of "18 dollars", in a box it does not; $ and % are no LaTeX there as they
    stand.
    """
    assert (
        rewritten(text, "boxed") == boxed
        and verify_math({"answer": answer}, text, flexible=True)[0]
        and verify_math({"answer": answer}, boxed)[0]
    )


def test_a_step_in_the_sentence_of_the_box_is_kept():
    text = "The answer is the sum of both, which is $10 + 2 = \\boxed{12}$."
    assert rewritten(text, "hash") == "The answer is the sum of both, which is $10 + 2 = 12$.\n#### 12"
    assert rewritten("So.\nThe answer is $x = \\boxed{12}$.", "hash") == "So.\n#### 12"


def test_a_style_of_a_source_is_no_rare_exception():
    assert style_of(Counter({"hash": 95, "boxed": 5})) == ["hash"] and style_of(Counter({"hash": 80, "boxed": 20})) == [
        "hash",
        "boxed",
    ]
    assert (
        style_of(Counter({None: 95, "boxed": 5})) == []
        and style_of(Counter()) == []
        and style_of(Counter({None: 3, "phrase": 1})) == ["phrase"]
    )


def test_gsm8ks_solutions_are_right_in_every_style():
    lines = _data("gsm8k_train.jsonl").read_text("utf-8").splitlines()[:400]
    for row in map(json.loads, lines):
        for style in STYLES:
            assert verify_math({"answer": row["answer"]}, rewritten(row["answer"], style), flexible=True)[0]


@pytest.fixture()
def mixed(tmp_path):
    def write(name, text, n=10, source=None):
        rows = [
            complete_row(
                "demonstrations/1",
                {"messages": user(f"{name} {i}") + assistant(text(i)), "train_turns": [1], "kept": True},
                dataset=name,
                source=source or name,
                origin="human",
                split="test" if i == 0 else "train",
            )
            for i in range(n)
        ]
        write_dataset(str(tmp_path / name), name, "demonstrations/1", rows)
        return str(tmp_path / name)

    paths = {
        "gsm": write("gsm", lambda i: f"so\n#### {i}"),
        "math": write("math", lambda i: f"so $\\boxed{{{i}}}$." if i else "\\boxed{a} so"),
        "chat": write("chat", lambda i: "Hello!"),
    }

    def go(config, names=("gsm", "math", "chat"), name="mix"):
        spec = {
            "stage": "mix",
            "key": name,
            "config": config,
            "seed": 5,
            "device": "cpu",
            "workdir": str(tmp_path / f"work-{name}"),
            "inputs": {f"data.{k}": {"kind": "dataset", "path": paths[k], "ref": k, "digest": k} for k in names},
        }
        result = execute(spec, silent)
        return result, [
            r["messages"][-1]["content"] for r in open_dataset(result["outputs"]["data"]["path"]).iter_rows()
        ]

    return go


def test_sources_that_end_in_different_styles_are_warned_of(mixed):
    result, texts = mixed({})
    (warned,) = [w["text"] for w in result["warnings"] if w["code"] == "answer_formats"]
    assert (
        "gsm: hash; math: boxed" in warned
        and "chat" not in warned
        and ("answer_format=boxed" in warned or "answer_format=hash" in warned)
    )
    assert sum("####" in text for text in texts) == 10
    assert not any(
        w["code"] == "answer_formats"
        for config, names in (
            ({}, ("gsm", "chat")),
            ({"weights": {"gsm": 1, "math": 0, "chat": 1}}, ("gsm", "math", "chat")),
        )
        for w in mixed(config, names, f"one{len(config)}")[0]["warnings"]
    )


def test_a_mixture_is_rewritten_to_one_style(mixed):
    result, texts = mixed({"answer_format": "phrase"}, name="phrase")
    summary = result["summary"]
    assert (
        sum(text.endswith(f"The answer is: {i}") for i in range(10) for text in texts) == 19
        and texts.count("Hello!") == 10
        and "\\boxed{a} so" in texts
    )
    assert (summary["answer_format/rewritten"], summary["answer_format/none"]) == (19, 11) and not any(
        w["code"] == "answer_formats" for w in result["warnings"]
    )
    rows = list(open_dataset(result["outputs"]["data"]["path"]).iter_rows())
    assert {tuple(json.loads(r["extra_json"]).get("answer_format_was", ())) for r in rows} == {
        ("hash",),
        ("boxed",),
        (),
    } and len({r["row_id"] for r in rows}) == len(rows)
    with pytest.raises(Exception, match="answer_format"):
        mixed({"answer_format": "latex"})


def test_one_answer_in_two_styles_is_one_row_once_it_is_in_one_style(tmp_path):
    row = lambda text: {"messages": user("2+1?") + assistant(text), "train_turns": [1]}
    inputs = {
        f"data.{name}": {"kind": "dataset", "path": written(tmp_path / name, name, "demonstrations/1", rows)}
        for name, rows in (("a", [row("It is 3.\n#### 3"), row("No.")]), ("b", [row("It is 3.\nThe answer is: 3")]))
    }

    def mix(name, **config):
        spec = {"stage": "mix", "key": "t", "config": config, "seed": 0, "device": "cpu", "inputs": inputs}
        return execute({**spec, "workdir": str(tmp_path / name)}, silent)["summary"]

    call = {"role": "assistant", "content": None, "function_calls": "add(a=2, b=1)"}
    called = {"messages": [*user("2+1?"), call, {"role": "tool", "content": "3"}, *assistant("#### 3")]}
    path = written(tmp_path / "c", "c", "demonstrations/1", [called | {"train_turns": [1, 3]}])
    alone = {"stage": "mix", "key": "t", "config": {"answer_format": "boxed"}, "seed": 0, "device": "cpu"}
    made = execute({**alone, "inputs": {"data": {"path": path}}, "workdir": str(tmp_path / "called")}, silent)
    (row_of_calls,) = open_dataset(made["outputs"]["data"]["path"]).iter_rows()
    assert row_of_calls["messages"][1]["function_calls"] and "boxed{3}" in row_of_calls["messages"][-1]["content"]
    assert mix("as_written")["rows"] == 3
    with pytest.raises(ConfigError, match="data.b has no training row.*1 duplicate_row"):
        mix("weighed", answer_format="boxed", weights={"a": 1, "b": 1})
    found = mix("rewritten", answer_format="boxed", weights={"a": 1, "b": 0})
    assert (found["rows"], found["dropped/duplicate_row"], found["answer_format/rewritten"]) == (2, 1, 1)
