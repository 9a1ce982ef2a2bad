"""Deliberative alignment: who is shown the specification, and who is not."""

import json
import math

import pytest

from flows.deliberative import BY_SPECIFICATION
from flows.recipe import get_recipe, load_config
from flows.outcome import print_result
from stages.reward import judge as judging
from stages.reward.debate import verdicts
from stages.reward.judge import JudgeError
from stages.reward.components import RewardComponent
from stages.reward.rewards import build_rewards
from stages.reward_models.reward_scorers import Response
from storage.datasets import open_dataset
from tests.chat_server import chat_server
from tests.evaluation.conftest import tiny  # noqa: F401
from tests.flows.test_ai_feedback import principles_of
from tests.flows.test_iterated import planned
from tests.flows.test_published import ENDS, RL, ROWS, InProcess, world  # noqa: F401


def part(text: str, name: str) -> str:
    return text.split(f"[{name}]\n")[1].split(f"\n[End of {name.lower()}]")[0]


def rating(body):
    """A server's rating: 9 for an answer with an even number of characters, else 2."""
    text = body["messages"][0]["content"]
    best = (
        "10"
        if text.startswith("Write the number 10")
        else "9"
        if "[Answer]" in text and len(part(text, "Answer")) % 2 == 0
        else "2"
    )
    likely = {best[:1]: 0.99, "5": 0.01}
    at = [likely, {"0": 0.99}][: body["max_tokens"]]
    return {
        "finish_reason": "length",
        "logprobs": {
            "content": [
                {
                    "token": max(p, key=p.get),
                    "top_logprobs": [{"token": t, "logprob": math.log(v)} for t, v in p.items()],
                }
                for p in at
            ]
        },
    }


def test_the_plan_hides_the_specification_from_training(monkeypatch):
    steps = planned(
        "deliberative",
        monkeypatch,
        data={"specifications": "(specs)", "prompts": "(requests)", "general": "(chat)", "ability": "(tasks)"},
        judge="(my.judge)",
        pretrained="(base)",
    )
    given = {"principles": "(ingest_specifications.data)", "judge": "(my.judge)"}
    assert steps["reason"][1] == {
        "model": "(given.model)",
        "prompts": "(ingest_prompts.data)",
        "traits": "(ingest_specifications.data)",
        **given,
    }
    assert [(c.name, c.view, c.weight) for c in steps["reason"][2].rewards] == [
        ("specification", "full", 1.0),
        ("thought", "full", 2.0),
    ] and "{trait}" in steps["reason"][2].system
    assert steps["sft"][1] == {"model": "(base)", "data": "(mix.data)"} and steps["mix"][1] == {
        "data.deliberative": "(reason.selected)",
        "data.general": "(ingest_general.data)",
    }
    assert steps["rl"][1] == {"model": "(sft.model)", "data": "(ingest_prompts.data)", **given}
    for section in ("rl", "evaluate_start", "evaluate_sft", "evaluate_rl"):
        assert [(c.kind, c.view) for c in steps[section][2].rewards] == [("judge", "answer_only")] and steps[section][
            1
        ]["principles"] == given["principles"]
    assert steps["compare_ability"][1] == {
        f"evaluations.ability_{name}": f"(evaluate_ability_{name}.samples)" for name in ("start", "sft", "rl")
    }
    served = {
        "rewards": [{"kind": "judge", "judge_prompt": BY_SPECIFICATION, "endpoint": "http://x", "endpoint_model": "m"}]
    }
    steps = planned(
        "deliberative",
        monkeypatch,
        data={"specifications": "(s)", "prompts": "(p)"},
        reason=served,
        rl=served,
        evaluate=served,
    )
    assert (
        all("judge" not in steps[name][1] for name in ("reason", "rl", "evaluate_rl"))
        and steps["sft"][1]["data"] == "(reason.selected)"
        and "compare_ability" not in steps
    )


def test_the_judge_sees_the_specification_of_the_prompt_and_not_the_thought(tiny, tmp_path):  # noqa: F811
    """A component's view, the principle of the row's category; a prompt without one is an error that names those there
    are.
    """
    with chat_server(rating) as server:
        judge = judging.Judge(
            judging.ServerJudge(server.url, "m"),
            "score",
            prompt=BY_SPECIFICATION,
            principles={"a": "Be brief.", "b": "Say [Answer] no."},
        )
        ask = [
            Response(
                [{"role": "user", "content": "q [End of specification]"}],
                [{"role": "assistant", "content": text}],
                None,
                {"category": category},
            )
            for text, category in (("even", "a"), ("odd", "b"))
        ]
        assert judge.score(ask) == pytest.approx([2 * 8 / 9 - 1, 2 * 1 / 9 - 1], abs=0.02)
        shown = [
            body["messages"][0]["content"]
            for body in server.seen
            if "[Specification]" in body["messages"][0]["content"]
        ]
        assert {part(text, "Specification") for text in shown} == {"Be brief.", "Say [Answer] no."} and all(
            text.count("[End of specification]") == 1 for text in shown
        )
        with pytest.raises(JudgeError, match="'c'.*a, b"):
            judge.score([Response(ask[0].prompt, ask[0].completion, None, {"category": "c"})])
        server.seen.clear()
        inputs = {
            "principles": principles_of(
                tmp_path, "specs", [{"id": "a", "text": "Be brief."}, {"id": "b", "text": "old", "active": False}]
            )
        }
        row = {
            "prompt_row": {"prompt": ask[0].prompt, "category": "a", "row_id": "r"},
            "prompt_ids": [1],
            "completion_ids": [2],
            "completion_text": "<think>aside</think>even",
            "finish_reason": "eos",
        }
        for view, answer in (("full", "<think>aside</think>even"), ("answer_only", "even")):
            component = RewardComponent(
                kind="judge", judge_prompt=BY_SPECIFICATION, view=view, endpoint=server.url, endpoint_model="m"
            )
            assert build_rewards([component], inputs).score([row])[0].total == pytest.approx(2 * 8 / 9 - 1, abs=0.02)
            assert (
                part(server.seen[-1]["messages"][0]["content"], "Answer") == answer
                and part(server.seen[-1]["messages"][0]["content"], "Specification") == "Be brief."
            )
    asks = RewardComponent(kind="judge", judge_prompt=BY_SPECIFICATION, endpoint="http://x", endpoint_model="m")
    with pytest.raises(ValueError, match="active: true"):
        build_rewards(
            [asks], {"principles": principles_of(tmp_path, "none", [{"id": "b", "text": "old", "active": False}])}
        )
    with pytest.raises(ValueError, match="principles=FILE"):
        build_rewards([RewardComponent(kind="judge", judge_prompt=BY_SPECIFICATION)], {"judge": tiny["policy"]})
    with pytest.raises(ValueError, match="{principle}"):
        RewardComponent(kind="judge", judge_prompt="{spec} {a}")


def test_the_judge_of_a_debate_sees_the_specification_too():
    rows = [
        {
            "prompt_row": {"prompt": [{"role": "user", "content": "q"}], "category": "a"},
            "debate": {"answers": ["yes", "no"], "said": [["so"], ["not so"]], "seat": seat},
        }
        for seat in (0, 1)
    ]
    with chat_server(lambda body: {"message": {"content": "[[A]]"}, "finish_reason": "stop"}) as server:
        judge = judging.Judge(
            judging.ServerJudge(server.url, "m"),
            "verdict",
            prompt="{principle} | {context} | {a} | {b}",
            principles={"a": "Be brief."},
        )
        assert verdicts(judge, rows) == ([0.5, 0.5], [0.5, 0.5]), "whoever is shown first wins, in both orders: a tie"
        assert server.seen and all(body["messages"][0]["content"].startswith("Be brief. | ") for body in server.seen)


def test_deliberative_alignment_runs_to_its_end(tiny, world, tmp_path, capsys):  # noqa: F811
    """Answers are sampled behind the specification of their prompt, trained on without it, and rated by it at every
    step.
    """
    categories = sorted({row["category"] for row in open_dataset(world["prompts"]).iter_rows()})
    (tmp_path / "specs.yaml").write_text(
        json.dumps([{"id": name, "kind": "safety_spec", "text": f"Of {name}: say little."} for name in categories])
    )
    with chat_server(rating) as server:
        judge = {
            "kind": "judge",
            "name": "specification",
            "judge_prompt": BY_SPECIFICATION,
            "endpoint": server.url,
            "endpoint_model": "m",
        }
        config = load_config(
            "deliberative",
            {
                "model": tiny["policy"],
                "data": {
                    "specifications": str(tmp_path / "specs.yaml"),
                    "prompts": world["prompts"],
                    "general": world["demonstrations"],
                    "ability": world["prompts"],
                },
                "reason": {
                    **ENDS,
                    "num_generations": 3,
                    "rewards": [judge],
                    "threshold": 0.5,
                    "system": "Specification:\n{trait}",
                },
                "sft": {**ROWS, "num_train_epochs": 1},
                "rl": {**RL, "num_generations": 4, "max_steps": 2, "rewards": [{**judge, "view": "answer_only"}]},
                "evaluate": {**ENDS, "greedy": False, "rewards": [{**judge, "view": "answer_only"}]},
                "evaluate_ability": {**ENDS, "num_samples": 1, "greedy": False},
            },
        )
        run = InProcess("deliberative", tmp_path)
        result = get_recipe("deliberative").method(run, config)
        shown = [text for body in server.seen if "[Specification]" in (text := body["messages"][0]["content"])]
    asked_of = {row["prompt"][-1]["content"]: row["category"] for row in open_dataset(world["prompts"]).iter_rows()}
    assert len(shown) > 40 and all(
        part(text, "Specification")
        == f"Of {next(name for asked, name in asked_of.items() if asked in part(text, 'Question'))}: say little."
        for text in shown
    )
    kept = list(open_dataset(str(tmp_path / "reason" / "out" / "selected")).iter_rows())
    answers = list(open_dataset(str(tmp_path / "reason" / "out" / "candidates")).iter_rows())
    assert kept and all(
        len(row["messages"][-1]["content"]) % 2 == 0
        and not any("Specification" in m["content"] for m in row["messages"])
        for row in kept
    ), "rated 9, and without what they were sampled behind"
    assert len({row["completion"][0]["content"] for row in answers}) > len(kept) and run.inputs["mix"][
        "data.deliberative"
    ] == str(tmp_path / "reason" / "out" / "selected")
    print_result({**result, "run": "r"}, tmp_path)
    out = capsys.readouterr().out
    assert (
        [row["model"] for row in result["scores"]] == ["start", "sft", "rl"]
        and all(-1 <= row["reward/specification"] <= 1 for row in result["scores"])
        and "what the models can do" in out
    )
    assert run.inputs["compare_ability"].keys() == {f"evaluations.ability_{name}" for name in ("start", "sft", "rl")}
    assert [row["model"] for row in result["ability"]] == ["ability_start", "ability_sft", "ability_rl"]
