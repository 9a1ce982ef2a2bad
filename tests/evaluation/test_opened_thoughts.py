"""Thoughts that the chat template opens itself, as those of models that always reason do: a thought that was cut is no
answer, in rewards and in every number of an evaluation (reward.view).
"""

from __future__ import annotations

import json
import shutil

import pytest

from stages.evaluation.grading import constraint_verdicts, parse_all, read_of
from stages.evaluation import signs
from stages.generation import Sample, opens_thought, seen
from stages.harness import execute
from stages.reward.components import RewardComponent
from stages.reward.rewards import build_rewards
from tests.evaluation.test_stages import spec
from tests.evaluation.test_suites import answers_of, record

ROW = {
    "row_id": "x",
    "prompt": [{"role": "user", "content": "What is 2 + 2?"}],
    "answer": "4",
    "answer_type": "integer",
}
CUT, DONE = r"First, \boxed{4} is one idea, but", r"First, \boxed{5} is one idea.</think>It is \boxed{4}."


def sample(text, opened):
    return Sample(ROW, [1], 0, [1], None, "length", text, opened=opened)


def earned(text, opened, **settings):
    row = {
        "prompt_row": ROW,
        "completion_text": text,
        "completion_ids": [1],
        "finish_reason": "length",
        "opened": opened,
    }
    return build_rewards([RewardComponent(kind="verifier", **settings)], {}).score([row])[0].total


def test_a_cut_thought_is_not_read_as_the_answer():
    assert seen(CUT, True) == "<think>" + CUT and seen(DONE, True) == DONE and seen(CUT, False) == CUT
    assert [earned(CUT, True), earned(DONE, True), earned(CUT, False)] == [0.0, 1.0, 1.0]
    assert earned(CUT, True, view="full") == 1.0, "who asks for all of the text gets it as it was written"
    assert [parse_all([(ROW, read_of(sample(*one)))])[0][:2] for one in ((CUT, True), (DONE, True), (CUT, False))] == [
        (False, False),
        (True, True),
        (True, True),
    ]
    assert read_of(sample(CUT, True), RewardComponent(kind="verifier", view="full")) == CUT


def test_constraints_are_checked_on_the_answer_alone():
    """IFEval of a model that reasons: commas in its thought break nothing, and without an end of the thought there is
    no answer.
    """
    row = {"constraints": [{"id": "punctuation:no_comma", "kwargs_json": "{}"}]}
    verdict = lambda text, opened: constraint_verdicts(row, seen(text, opened))["strict"]
    assert [
        verdict("<think>well, well</think>Fine.", False),
        verdict("well, well</think>Fine.", True),
        verdict("Fine.", False),
        verdict("Fine.", True),
        verdict("well, well", False),
    ] == [[True], [True], [True], [False], [False]]


def test_signs_count_opened_thoughts():
    found = signs.metrics(
        [record("a", "one two three", opened=True), record("b", "one two</think>four"), record("c", "five")]
    )
    assert (
        found["reasoning/thought_rate"].value == pytest.approx(2 / 3)
        and found["reasoning/thought_unclosed_rate"].value == pytest.approx(1 / 3)
        and found["reasoning/thought_words"].value == 2.5
    )


def test_the_template_says_whether_it_opens_a_thought(tiny, tmp_path):
    from transformers import AutoTokenizer

    path = shutil.copytree(tiny["policy"], tmp_path / "reasoner")
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        if (path / name).exists():
            text = (path / name).read_text()
            if name.endswith("jinja"):
                (path / name).write_text(text + "{% if add_generation_prompt %}{{ '<think>\n' }}{% endif %}")
            elif "chat_template" in (config := json.loads(text)):
                (path / name).write_text(
                    json.dumps(
                        config
                        | {
                            "chat_template": (
                                config["chat_template"] + "{% if add_generation_prompt %}{{ '<think>\n' }}{% endif %}"
                            )
                        }
                    )
                )
    tokenizer = AutoTokenizer.from_pretrained(path)
    opened = opens_thought(tokenizer)
    ids = lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]
    assert (
        opened(ids("hello <think>\n"))
        and opened(ids("<think>"))
        and not opened(ids("<think></think>"))
        and not opened(ids("think"))
        and not opened([])
        and not opens_thought(None)([1])
    )
    results = {}
    for name, model in (("reasons", path), ("plain", tiny["policy"])):
        results[name] = execute(
            spec(
                "evaluate",
                tmp_path / name,
                {"model": model, "prompts": tiny["prompts"]},
                {"num_samples": 1, "max_completion_length": 8, "limit": 6},
            )
        )["summary"]
    assert (
        all(r["opened"] is True for r in answers_of(tmp_path / "reasons"))
        and results["reasons"]["reasoning/thought_unclosed_rate"] == 1.0
    )
    assert all(r["extracted"] is None for r in answers_of(tmp_path / "reasons")) and results["reasons"][
        "format_error_rate"
    ] == pytest.approx(5 / 6), "one of the six prompts has no answer to read"
    assert (
        not any(r.get("opened") for r in answers_of(tmp_path / "plain"))
        and "reasoning/thought_unclosed_rate" not in results["plain"]
    )


def test_the_reward_of_constraints_reads_the_answer_too():
    """As the four IFEval accuracies and open-instruct's verifier do; view=full checks all that was written."""
    row = {
        "prompt_row": {**ROW, "answer": None, "constraints": [{"id": "punctuation:no_comma", "kwargs_json": "{}"}]},
        "completion_text": "<think>well, well</think>Fine.",
        "completion_ids": [1],
        "finish_reason": "eos",
    }
    value = lambda **settings: (
        build_rewards([RewardComponent(kind="constraints", **settings)], {}).score([row])[0].total
    )
    assert value() == 1.0 and value(view="full") == 0.0


def test_style_is_of_the_answer_and_kl_of_the_policy_as_it_is():
    from stages.evaluate import Config
    from stages.evaluation.sampled import not_of_the_policy

    found = signs.metrics([record("a", "<think>Perhaps **this**, sorry.</think>Four."), record("b", "Perhaps.")])
    assert (
        found["style/hedging_rate"].value == 0.5
        and found["style/bold_rate"].value == found["style/apology_rate"].value == 0.0
        and found["reasoning/thought_rate"].value == 0.5
    )
    assert (
        not_of_the_policy(Config()) == ""
        and "greedy" in not_of_the_policy(Config(num_samples=0))
        and "temperature=0.6, top_p=0.95" in not_of_the_policy(Config(temperature=0.6, top_p=0.95))
    )
