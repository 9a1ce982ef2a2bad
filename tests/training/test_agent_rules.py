"""Rules of agents, debates, shaped rewards and curricula that exact vectors do not show: what is missing, cut,
unreadable or the same.
"""

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from stages.generation import Sample
from stages.reward.components import RewardComponent
from stages.reward.rewards import build_rewards
from stages.rl import Config
from stages.rollouts.groups import Group
from stages.rollouts.prompts import PromptOrder
from stages.running import randomness
from storage.datasets import open_dataset
from tests.training.test_agents import COUNTDOWN, rows_of, train

TURNS = [{"reward": 0.0, "events": ["opened"]}, {"reward": 0.0, "events": ["other"]}]


def scored(components, rows):
    return build_rewards([RewardComponent(**c) for c in components], {}).score(rows)


def row(text, answer="4", n=10, turns=None, finish="eos", **more):
    return {
        "prompt_row": {
            "row_id": "p",
            "prompt_id": "p",
            "answer": answer,
            "answer_type": "integer",
            "extra_json": '{"verifier": "world"}',
            **more,
        },
        "prompt_ids": [1],
        "completion_text": text,
        "completion_ids": [5] * n,
        "finish_reason": finish,
        "turns": turns,
    }


# --- rewards ----------------------------------------------------------------------------------------------------------


def test_a_goal_is_an_end_and_no_cut():
    found = scored(
        [{"kind": "truncation"}],
        [row("x", finish=finish, turns=TURNS) for finish in ("goal", "stop", "turn_limit", "length")],
    )
    assert [s.total for s in found] == [0.0, 0.0, -1.0, -1.0]


def test_what_an_absent_source_leaves_goes_to_the_turns_that_earned_it():
    """REWARD-BLEND in an environment: the renormalised weight is the one that turns are paid with, and the one that is
    stored.
    """
    blend = [
        {"kind": "milestones", "milestones": {"opened": 1.0}, "weight": 0.5, "blend": True},
        {"kind": "verifier", "weight": 0.5, "blend": True},
        {"kind": "truncation", "weight": 2.0},
    ]
    absent, present = scored(
        blend, [row("x", answer=None, turns=TURNS, finish="stop"), row("Answer: 4.", turns=TURNS, finish="stop")]
    )
    assert (
        absent.total == 1.0
        and absent.turn_rewards == [1.0, 0.0]
        and absent.weights == {"milestones": 1.0, "truncation": 2.0}
    )
    assert (
        present.total == 1.0
        and present.turn_rewards == [0.5, 0.5]
        and present.weights == {"milestones": 0.5, "verifier": 0.5, "truncation": 2.0}
    )
    nothing = [{**blend[0], "weight": 0.0}, {**blend[1], "weight": 1.0}]
    assert scored(nothing, [row("x", answer=None, turns=TURNS)])[0].total is None, (
        "all the weight is on a source that is absent"
    )


def test_a_trajectory_that_its_environment_lost_is_compared_with_nobody():
    """What it had said so far voted for the majority's answer, was the shortest answer of its group, and had a verdict
    and values of its own in the means.
    """
    lost = [{**row("Answer: 7.", n=1, turns=TURNS, finish="failure"), "failure": "time-out"} for _ in range(3)]
    kept = [
        row("Answer: 4.", n=10, turns=TURNS, finish="stop"),
        row("Answer: 4.", n=20, turns=TURNS, finish="stop"),
        row("Answer: 5.", n=30, turns=TURNS, finish="stop"),
    ]
    rewards = [
        {"kind": "verifier"},
        {"kind": "majority", "extraction": "flexible"},
        {"kind": "length_group"},
        {"kind": "length_penalty"},
        {"kind": "milestones", "milestones": {"opened": 1.0}},
    ]
    alone, together = scored(rewards, kept), scored(rewards, [lost[0], *kept[:2], *lost[1:], kept[2]])
    assert [s for k, s in enumerate(together) if k in (1, 2, 5)] == alone
    assert [s.parts["majority"] for s in alone] == [1.0, 1.0, 0.0] and [
        s.parts["length_group"] for s in alone
    ] == pytest.approx([0.5, 0.0, -0.5])
    for k in (0, 3, 4):
        assert (
            together[k].total is None
            and together[k].correct is None
            and not any(v is not None for v in together[k].parts.values())
        )
        assert together[k].reasons == dict.fromkeys(
            ("verifier", "majority", "length_group", "length_penalty", "milestones"), "environment failed: time-out"
        )
    assert all(s.total is None for s in scored(rewards, lost))


def test_length_rewards_ask_what_the_other_components_said():
    """A group's shortest right program earns the length reward, although no verifier of text can read it."""
    program = "```python\ndef f(): return {}\n```"
    rows = [
        row(program.format(value), answer=None, n=n, tests=[{"code": "assert f() == 1"}])
        for value, n in ((1, 10), (1, 20), (2, 5))
    ]
    found = scored([{"kind": "length_group"}, {"kind": "code"}], rows)
    assert [s.parts["code"] for s in found] == [1.0, 1.0, 0.0]
    assert [s.parts["length_group"] for s in found] == pytest.approx([0.5 - 5 / 15, -0.5, 0.0]), (
        "right ones earn lambda, wrong ones at most 0"
    )
    target = row("x", extra_json='{"target_length": "long"}')
    assert scored([{"kind": "length_target"}], [target])[0].total is None


def test_one_unreadable_score_does_not_make_a_batch_unscorable():
    component = RewardComponent(kind="model", normalise="batch")

    class Scorer:
        disagreement, beside, why_not = None, {}, "the judge gave no readable answer"
        reads_ids_of = staticmethod(lambda renderer: False)
        score = staticmethod(lambda responses: [1.0, math.nan, 3.0])

    from stages.reward.rewards import Rewards

    found = Rewards([component], {"model": Scorer}, None).score([row("x", prompt=[]) for _ in range(3)])
    assert [s.total for s in found] == [pytest.approx(-1.0), None, pytest.approx(1.0)] and "no readable" in found[
        1
    ].reasons["model"]


def test_a_milestone_that_is_no_regular_expression_is_refused_with_what_to_write():
    with pytest.raises(ValueError, match=r"clicked\\\\\(ok"):
        RewardComponent(kind="milestones", milestones={"clicked(ok": 1.0})
    clicked = [{"reward": 0.0, "events": ["clicked(ok"]}]
    assert (
        scored([{"kind": "milestones", "milestones": {r"clicked\(ok": 1.0}}], [row("x", turns=clicked)])[0].total == 1.0
    )


def test_no_tool_call_costs_a_trajectory():
    """Whatever the policy writes is answered: an episode that it could crash would be one that it is not judged by."""
    from stages.acting.tools import ToolEnvironment

    for syntax, action in (
        ("json", '<tool_call>{"name": "calculator", "arguments": [[1, 2], ["a", 3]]}</tool_call>'),
        ("json", '<tool_call>{"name": "calculator", "arguments": "ab"}</tool_call>'),
        ("python", f"calculator(expression=0x{'f' * 5000})"),
        ("python", f"calculator(expression={'-' * 5000}1)"),
    ):
        environment = ToolEnvironment(call_syntax=syntax)
        environment.reset({"prompt": []}, 0)
        messages, reward, done, events = environment.step(action)
        assert (
            messages[0]["content"].startswith("error: ")
            and events[0].startswith("error:")
            and (reward, done) == (0.0, False)
        )


def test_what_a_careless_environment_answers_is_refused_with_what_to_return(tiny, spec, tmp_path):
    """Events or an end that are a text were taken apart by letters or as true, and half of a surrogate pair ended the
    whole stage: in an observation, an event or the text of an error.
    """
    from storage.datasets import write_dataset
    from storage.schema import complete_row
    from tests.training.environments import Careless

    tasks = [
        complete_row(
            "prompts/1", {"prompt": [{"role": "user", "content": how}]}, dataset="d", source="s", origin="human"
        )
        for how in Careless.ANSWERS
    ]
    write_dataset(str(tmp_path / "tasks"), "tasks", "prompts/1", tasks)
    result, _ = train(
        spec,
        tiny,
        {"prompts": str(tmp_path / "tasks")},
        "careless",
        {
            "environment": "tests.training.environments:Careless",
            "environment_options": {},
            "max_steps": 1,
            "prompts_per_step": len(tasks),
            "num_generations": 1,
            "preset": "reinforce",
            "beta": 0.0,
        },
    )
    how_of = {t["prompt_id"]: t["prompt"][0]["content"] for t in tasks}
    by_how = {how_of[r["prompt_id"]]: r for r in rows_of(result)}
    assert set(by_how) == set(Careless.ANSWERS) and all(r["turns"] for r in by_how.values())
    for how, said in (
        ("raises", "ValueError: invalid literal"),
        ("events", "events as a list of strings such as ['goal_verified'] or [], not 'goal_verified'"),
        ("no events", "not None"),
        ("done", "True or False, not the text 'False'"),
        ("reward", "its reward as a number, not None"),
        ("one message", "a list of messages"),
        ("text", "a list of messages"),
        ("nothing", "step must return (messages, reward, done, events)"),
        ("no role", "such as {'role': 'user', 'content': 'text'}, not [{'content': 'ok'}]"),
    ):
        row = by_how[how]
        assert (
            said in json.loads(row["extra_json"])["unscorable"]["environment"]
            and row["finish_reason"] == "failure"
            and not any(row["loss_mask"])
        ), how
    for how in ("half", "number"):
        assert by_how[how]["finish_reason"] == "goal" and by_how[how]["reward"] == 1.5 and any(by_how[how]["loss_mask"])
    first = {a["episode_id"]: a for a in rows_of(result, "trajectories") if a["t"] == 0}
    acts = {how: first[r["row_id"]] for how, r in by_how.items()}
    assert json.loads(acts["half"]["next_observation_json"])[0]["content"] == "a\ufffdb" and acts["half"]["events"] == [
        "seen:\ufffd"
    ]
    assert json.loads(acts["number"]["next_observation_json"])[0]["content"] == "12"


def test_an_added_tool_may_answer_with_what_is_no_text(monkeypatch):
    from stages.acting.tools import TOOLS, ToolEnvironment

    said = iter((12, {"stock": 3}, None, "x" * 5_000_000))
    monkeypatch.setitem(TOOLS, "stock", ("how many there are", lambda environment, item: next(said)))
    environment = ToolEnvironment(tools=("stock",))
    environment.reset({"prompt": []}, 0)
    messages, reward, done, events = environment.step("stock(item='a')\n" * 4)
    assert (
        [m["content"] for m in messages] == ["12", "{'stock': 3}", "None", "x" * 2000]
        and events == ["tool:stock"] * 4
        and (reward, done) == (0.0, False)
    )


def test_a_policy_that_calls_a_tool_by_half_an_emoji_is_answered(tiny):
    """A JSON escape that ends in the middle of an emoji, which a policy may write, is half of a surrogate pair; the
    answer that repeats it ended the run.
    """
    from stages.acting.environments import EnvironmentPool
    from stages.chat import renderer_for

    with EnvironmentPool("tools", {"call_syntax": "json"}) as pool:
        ids, _ = pool.reset([{"prompt": [{"role": "user", "content": "q"}]}], [0])
        (seen,) = pool.step(ids, ['<tool_call>{"name": "\\ud83d", "arguments": {}}</tool_call>'])
    assert seen.messages[0]["content"] == "error: there is no tool \ufffd" and seen.events == ("error:unknown_tool",)
    assert renderer_for(tiny["policy"]).observation_ids(list(seen.messages), True)


def test_a_length_reward_may_come_late_and_every_token_may_cost():
    """LENGTH-CTRL: before from_step a component is scored and stored, and counts nothing; where runs are compared it
    always counts.
    """
    rewards = build_rewards(
        [
            RewardComponent(kind="verifier"),
            RewardComponent(kind="length_penalty", length_alpha=0.01, weight=2.0, from_step=3),
        ],
        {},
    )
    rows = [row("Answer: 4.", n=10)]
    for step, total in ((0, 1.0), (2, 1.0), (3, 0.8), (None, 0.8)):
        rewards.step = step
        found = rewards.score(rows)[0]
        assert (
            found.total == pytest.approx(total)
            and found.parts["length_penalty"] == pytest.approx(-0.1)
            and found.weights["length_penalty"] == (2.0 if total < 1 else 0.0)
        )
    with pytest.raises(ValueError, match="leave from_step out"):
        build_rewards(
            [
                RewardComponent(kind="verifier", weight=0.5, blend=True),
                RewardComponent(kind="format", weight=0.5, blend=True, from_step=1),
            ],
            {},
        )


# --- debates ----------------------------------------------------------------------------------------------------------


def test_judge_accuracy_is_over_what_the_judge_answered():
    from stages.reward.debate import debate_metrics

    def debater(seat, **parts):
        debate = {"answers": ["yes", "no"], "seat": seat, "said": [[], []]}
        return Sample(
            {"answer": "yes", "row_id": "1"},
            [1],
            0,
            [1],
            [0.0],
            "stop",
            "x",
            total=parts["judged"] or math.nan,
            parts=parts,
            turns=[{}],
            debate=debate,
        )

    one = debater(0, judged=0.2, **{"judged/without": None})
    assert debate_metrics([one, debater(1, judged=-0.2, **{"judged/without": None})], "judged") == {
        "debate/rounds": 1.0,
        "debate/judge_accuracy": 1.0,
    }
    both = [
        one,
        debater(0, judged=-0.1, **{"judged/without": 0.3}),
        debater(0, judged=None, **{"judged/without": -0.3}),
    ]
    found = debate_metrics(both, "judged")
    assert found["debate/judge_accuracy"] == 0.5 and found["debate/judge_accuracy_without"] == 0.5
    assert "debate/judge_accuracy_without" not in debate_metrics([debater(0, judged=0.2)], "judged")


# --- groups -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", ["agent", "grpo_process", "grpo"])
def test_an_average_member_of_a_group_with_a_signal_is_one_of_its_members(preset):
    """zero_advantage=mask drops groups: a completion as good as the mean stays in the denominators of an informative
    one.
    """
    from stages.algorithms import rl_preset
    from stages.policy.credit import Batch, assign

    totals, group = np.array([0.0, 0.5, 1.0, 0.3, 0.3]), np.array([0, 0, 0, 1, 1])
    steps = [([1], [float(r)]) for r in totals]
    batch = Batch(
        totals,
        group,
        np.ones((5, 2), bool),
        np.ones(5, bool),
        np.ones(5, bool),
        turns=steps if preset == "agent" else [],
        steps=steps,
    )
    credit = assign(rl_preset(preset), batch, 0.0)
    assert credit.advantages_BT[1].tolist() == [0.0, 0.0] and credit.informative_B.tolist() == [
        True,
        True,
        True,
        False,
        False,
    ]


@pytest.mark.parametrize("override", ["none", "random"])
def test_a_signal_of_length_alone_is_none(override):
    """DYN-SAMPLING on rewards reads the unshaped ones: right answers that differ in length only teach nothing about the
    task.
    """
    from types import SimpleNamespace

    from stages.algorithms import rl_preset
    from stages.rollouts.groups import GroupSampler

    config = Config(
        rewards=[{"kind": "python", "source": "def score(p, c, a): return 0.1"}, {"kind": "length_penalty"}],
        filter_groups_metric="reward_std",
        reward_override=override,
    )
    sampler = GroupSampler(SimpleNamespace(config=config), rl_preset(config.preset), None, None, None)
    prompt = ({"row_id": "1"}, [1])

    def no_signal(values, lengths):
        group = group_of(prompt, [None] * len(values), [v - n for v, n in zip(values, lengths)])
        for sample, value, n in zip(group.samples, values, lengths):
            sample.parts, sample.weights = (
                {"python": value, "length_penalty": -n},
                {
                    "python": 1.0,
                    "length_penalty": 1.0,
                },
            )
        return sampler.no_signal(group)

    assert no_signal([0.1, 0.1, 0.1], [0.3, 0.2, 0.7]) == (None if override == "random" else "equal_rewards")
    assert no_signal([0.1, 0.5, 0.1], [0.3, 0.2, 0.7]) is None
    config.rewards = config.rewards[1:]
    assert no_signal([0.1, 0.1], [0.3, 0.2]) is None, "where length is all there is, it is the task"


def test_tool_tokens_are_in_no_statistic_of_log_probs():
    from stages.rollouts.metrics import mismatch_metrics, rollout_metrics

    sample = Sample(
        {"row_id": "1"},
        [1],
        0,
        [5, 6, 6, 6, 6, 7],
        [-1.0, 0.0, 0.0, 0.0, 0.0, -2.0],
        "stop",
        "x",
        total=1.0,
        parts={},
        tool_mask=[0, 1, 1, 1, 1, 0],
    )
    found = mismatch_metrics([sample], [[-1.2, 0.0, 0.0, 0.0, 0.0, -2.4]])
    assert found["sampling/sampling_logp_difference/mean"] == pytest.approx(0.3) and found[
        "sampling/importance_sampling_ratio/max"
    ] == pytest.approx(math.exp(-0.2))
    assert mismatch_metrics([replace(sample, tool_mask=[1] * 6)], [[0.0] * 6]) == {}
    metrics = rollout_metrics([sample], np.array([1.0]), np.array([0]))
    assert (
        metrics["completions/repetition"] == 0.0
        and metrics["completions/generated_tokens"] == 2.0
        and metrics["completions/mean_length"] == 6.0
    )


def test_what_an_environment_lost_is_neither_cut_nor_an_attempt():
    """It lowered success and turns, counted as cut at the length limit, and its half answer was one of the lengths."""
    from stages.acting.agents import agent_metrics
    from stages.rollouts.metrics import rollout_metrics

    done = Sample(
        {"row_id": "1", "prompt": []},
        [1],
        0,
        [5, 6, 7, 8],
        [-1.0] * 4,
        "goal",
        "done",
        total=1.0,
        parts={"score": 1.0},
        reasons={},
        correct=True,
        tool_mask=[0, 1, 0, 0],
        turns=[{"events": ["tool:search", "found"]}, {"events": ["goal_verified"]}],
        turn_rewards=[0.0, 1.0],
    )
    lost = replace(
        done,
        ids=[5] * 9,
        finish_reason="failure",
        failure="time-out",
        total=math.nan,
        parts={"score": None},
        reasons={"score": "environment failed: time-out"},
        correct=None,
        tool_mask=[0] + [1] * 8,
        turns=[{"events": ["error:failed", "found"]}] * 3,
        turn_rewards=None,
    )
    milestones = [RewardComponent(kind="milestones", milestones={"found": 1.0})]
    alone, both = agent_metrics([done], milestones), agent_metrics([done, lost], milestones)
    assert {k: v for k, v in both.items() if "finish_" not in k} == {
        k: v for k, v in alone.items() if "finish_" not in k
    }
    assert both["agent/success"] == both["agent/milestones"] == 1.0 and both["agent/turns"] == 2.0
    assert both["agent/finish_goal"] == both["agent/finish_failure"] == 0.5
    failing = agent_metrics([done, replace(done, turns=[{"events": ["error:failed", "found", "error:time-out"]}])])
    assert (failing["tools/call_frequency"], failing["tools/failure_frequency"]) == (1.5, 2 / 3), "as TRL counts"
    assert (failing["agent/calls"], failing["agent/errors"]) == (0.5, 1.0)
    assert set(agent_metrics([lost])) == {
        f"agent/finish_{reason}" for reason in ("goal", "stop", "turn_limit", "length", "failure")
    }
    groups = np.array([0, 0])
    found, expected = (
        rollout_metrics(own, np.array([s.total for s in own]), groups[: len(own)]) for own in ([done, lost], [done])
    )
    apart = {"reward/unscorable_fraction", "reward/score/unscorable_fraction", "completions/generated_tokens"}
    assert {k: v for k, v in found.items() if k not in apart} == {k: v for k, v in expected.items() if k not in apart}
    assert found["completions/clipped_ratio"] == 0.0 and found["completions/max_length"] == 4.0
    assert found["reward/unscorable_fraction"] == 0.5 and found["completions/generated_tokens"] == 4.0
    assert "completions/clipped_ratio" not in rollout_metrics([lost], np.array([math.nan]), groups[:1])


def test_only_groups_of_two_verdicts_are_all_correct_or_all_wrong():
    """A group with one verdict or none was in the denominator and never in the numerator."""
    from stages.rollouts.metrics import rollout_metrics

    sample = Sample({"row_id": "1", "prompt": []}, [1], 0, [5], [-1.0], "eos", "x", total=0.0, parts={})
    verdicts = [(0, True), (0, True), (1, False), (1, True), (2, True), (2, None), (3, None), (3, None)]
    samples, of = [replace(sample, correct=v) for _, v in verdicts], np.array([g for g, _ in verdicts])
    found = rollout_metrics(samples, np.zeros(len(samples)), of)
    assert found["groups/all_correct_fraction"] == 0.5 and found["groups/all_wrong_fraction"] == 0.0
    alone = rollout_metrics(samples[:3:2], np.zeros(2), np.arange(2))
    assert "groups/all_correct_fraction" not in alone and alone["completions/correct_fraction"] == 0.5


def test_a_stored_trajectory_that_its_environment_lost_stays_lost():
    """A control with random rewards paid it, and trained on it."""
    from types import SimpleNamespace

    from stages.rollouts.groups import override_reward
    from stages.rollouts.replay import _groups_of

    row = {
        **{name: "p" for name in ("row_id", "prompt_id", "group_id", "dataset")},
        "iteration": 0,
        "prompt_ids": [1],
        "completion_ids": [5, 6],
        "logp_rollout": None,
        "logp_old": [-1.0, -1.0],
        "reward_components": [{"name": "environment", "value": None, "weight": 1.0}],
        "reward_tier": "unscorable",
        "is_correct": None,
        "terminated": False,
        "tool_mask": [0, 0],
        "finish_reason": "failure",
        "step_rewards": None,
        "extra_json": json.dumps({"unscorable": {"environment": "environment failed: time-out"}}),
    }
    given = {**row, "finish_reason": None, "extra_json": json.dumps({"mode": "sft", "parent_sample_id": None})}
    (group,) = _groups_of([given], {})
    assert group.samples[0].mode == "sft", "nobody sampled it, in the run that reads it either"
    (group,) = _groups_of([row, {**row, "finish_reason": "turn_limit", "extra_json": None}], {})
    assert [s.lost for s in group.samples] == [True, False] and "time-out" in group.samples[0].failure
    stage = SimpleNamespace(
        config=Config(reward_override="random"), rng=lambda *purpose: randomness.rng(3, "rl", *purpose)
    )
    for k, sample in enumerate(group.samples):
        override_reward(stage, sample, "stored", k)
    assert [math.isfinite(s.total) for s in group.samples] == [False, True]


# --- prompt orders ----------------------------------------------------------------------------------------------------


def order(n=6, **config):
    prompts = [({"row_id": str(i), "prompt_id": str(i), "extra_json": "{}"}, [i]) for i in range(n)]
    return prompts, PromptOrder(Config(**config), prompts, lambda *purpose: randomness.rng(3, "rl", *purpose), 100)


def group_of(prompt, verdicts, totals):
    sample = Sample(prompt[0], [], 0, [], [], "eos", "")
    return Group(prompt[0], [], [replace(sample, correct=v, total=t) for v, t in zip(verdicts, totals)], 0)


def test_completions_that_could_not_be_scored_change_no_pass_rate():
    """An environment that failed, or a broken gold answer, is no reason to end a run that orders its prompts by
    pass@k.
    """
    nan = math.nan
    prompts, found = order(curriculum="pass_at_k", passk_k=2, passk_samples=4, num_generations=4)
    found.start_from({str(i): (4, 2) for i in range(6)})
    found.learn(
        [
            group_of(prompts[0], [True, None, None, None], [1.0, nan, nan, nan]),
            group_of(prompts[1], [None] * 4, [nan] * 4),
            group_of(prompts[2], [True] * 4, [1.0] * 4),
        ]
    )
    assert found.counts == {**{str(i): (4, 2) for i in range(6)}, "2": (4, 4)} and len(found.take(3, 0)) == 3
    found.learn([group_of(prompts[1], [None] * 4, [nan] * 4)])
    with pytest.raises(ValueError, match="which completions are right"):
        found.learn([group_of(prompts[1], [None] * 4, [0.5] * 4)])
    prompts, solved = order(no_resampling_pass_rate=0.5)
    solved.learn([group_of(prompts[0], [None], [nan]), group_of(prompts[1], [True], [1.0])])
    assert solved.solved == {"1"}
    assert found.enough({"a": (1, 1), "b": (2, 1)}) == {"b": (2, 1)}
    with pytest.raises(ValueError, match="pass rates are unknown"):
        order(curriculum="pass_at_k")[1].start_from({})


def test_reranking_drops_equal_rewards_and_keeps_what_it_knows_nothing_about():
    from stages.policy.schedules import learning_scores, rerank

    assert np.mean([0.1] * 3) != 0.1, "the mean of equal rewards rounds"
    assert rerank(learning_scores({"a": [0.1] * 3, "b": [0.7] * 6, "c": [0.0, 0.5]})) == (["c"], ["a", "b"])
    prompts, found = order(n=4, curriculum="rerank")
    found.take(4, 0)
    found.learn(
        [
            group_of(prompts[0], [None] * 2, [math.nan] * 2),
            group_of(prompts[1], [None] * 2, [0.0, 0.2]),
            group_of(prompts[2], [None] * 2, [0.0, 1.0]),
            group_of(prompts[3], [None] * 2, [0.1, 0.1]),
        ]
    )
    assert [row["row_id"] for row, _ in found.take(3, 0)] == ["2", "1", "0"]
    found.learn([group_of(prompts[2], [None] * 2, [math.nan] * 2)])
    assert found.scores["2"] == 0.5


def test_prompts_are_ranked_by_what_one_asks_for():
    from stages.policy.schedules import learning_scores

    rewards, logps = (
        {"a": [0.0, 0.0, 0.0, 1.0], "b": [0.4, 0.6], "c": [0.2, 0.2]},
        {
            "a": [-0.1, -0.3],
            "b": [-1.0],
            "c": [-9.0],
        },
    )
    assert learning_scores(rewards) == pytest.approx({"a": 0.375, "b": 0.1, "c": 0.0})
    assert learning_scores(rewards, "std") == pytest.approx({"a": math.sqrt(3) / 4, "b": 0.1, "c": 0.0})
    assert learning_scores(rewards, "confidence", logps) == pytest.approx({"a": math.exp(0.2), "b": math.e, "c": 0.0})
    prompts, found = order(n=2, curriculum="rerank", rerank_score="confidence")
    found.take(2, 0)
    groups = [group_of(prompts[i], [None] * 2, totals) for i, totals in enumerate(([0.0, 1.0], [0.0, 0.1]))]
    for group, logp in zip(groups, (-0.1, -2.0)):
        for sample in group.samples:
            sample.ids, sample.logps, sample.tool_mask = [5, 6], [logp, 0.0], [0, 1]
    found.learn(groups)
    assert found.scores == pytest.approx({"0": math.exp(0.1), "1": math.exp(2.0)}), "tool tokens are nobody's choice"
    assert [row["row_id"] for row, _ in found.take(2, 0)] == ["1", "0"]


def test_easier_prompts_come_again_in_a_static_order():
    """CURRICULUM, a fraction of earlier stages: places in the order that an easier prompt takes."""
    n = 200
    prompts = [
        ({"row_id": str(i), "prompt_id": str(i), "extra_json": json.dumps({"pass_rate": 1 - i / n})}, [i])
        for i in range(n)
    ]

    def taken(mix):
        found = PromptOrder(
            Config(curriculum="easy_to_hard", curriculum_mix=mix),
            prompts,
            lambda *purpose: randomness.rng(3, "rl", *purpose),
            100,
        )
        first = [int(row["row_id"]) for row, _ in found.take(n // 2, 0)]
        again = PromptOrder(
            Config(curriculum="easy_to_hard", curriculum_mix=mix),
            prompts,
            lambda *purpose: randomness.rng(3, "rl", *purpose),
            100,
        )
        again.restore(found.state())
        return first + [int(row["row_id"]) for row, _ in again.take(n // 2, 0)]

    assert taken(0.0) == list(range(n))
    mixed = taken(0.25)
    assert all(i <= k for k, i in enumerate(mixed)) and 0.15 < np.mean([i < k for k, i in enumerate(mixed)]) < 0.35


# --- runs -------------------------------------------------------------------------------------------------------------


def test_stored_trajectories_are_trained_on_their_own_tokens(tiny, data, spec):
    """TOPR on an agent's rollouts: tool tokens stay context (MASK-TOOL), rewards are what was paid."""
    blend = [
        {"kind": "environment", "weight": 0.5, "blend": True},
        {"kind": "regex", "name": "absent", "pattern": "(", "weight": 0.5, "blend": True},
    ]
    first, metrics = train(
        spec,
        tiny,
        data,
        "acted",
        {
            "environment_options": {"turns": 3},
            "max_steps": 1,
            "rewards": [*blend, {"kind": "milestones", "milestones": {"turn1": 0.25, "turn[23]": 0.5}}],
        },
    )
    before = {(tuple(r["prompt_ids"]), tuple(r["completion_ids"])): r for r in rows_of(first)}
    assert any(sum(r["tool_mask"]) for r in before.values())
    for r in before.values():
        parts = {c["name"]: c for c in r["reward_components"]}
        assert parts["absent"]["value"] is None and parts["environment"]["weight"] == 1.0
        assert r["reward"] == pytest.approx(parts["environment"]["value"] + parts["milestones"]["value"])
    for act in rows_of(first, "trajectories"):
        assert act["reward"] == pytest.approx(sum(c["weight"] * c["value"] for c in act["reward_components"])) and {
            c["name"] for c in act["reward_components"]
        } >= {"environment", "milestones"}
    turns = [t for r in before.values() for t in r["turns"]]
    assert metrics[0]["agent/reward_per_turn"] == pytest.approx(np.mean([t["reward"] for t in turns]))
    reached = [
        sum(any(e.startswith(f"turn{k}") for t in r["turns"] for e in t["events"]) for k in (1, 2))
        for r in before.values()
    ]
    assert (
        metrics[0]["agent/milestones"] == pytest.approx(np.mean(reached))
        and metrics[0]["agent/milestones/turn1"] == 1.0
    )
    made = spec(
        "rl",
        {
            "preset": "topr",
            "baseline": "constant",
            "baseline_value": -0.5,
            "max_steps": 1,
            "prompts_per_step": 2,
            "num_generations": 4,
            "max_completion_length": 120,
            "learning_rate": 1e-3,
        },
        {"model": tiny["policy"], "data": data["prompts"]},
        "from-acted",
    )
    made["inputs"]["stored"] = {
        "kind": "dataset",
        "path": first["outputs"]["rollouts"]["path"],
        "ref": "stored",
        "digest": "stored",
    }
    from stages.harness import execute

    again = rows_of(execute(made, lambda event: None))
    assert len(again) == len(before)
    for r in again:
        original = before[tuple(r["prompt_ids"]), tuple(r["completion_ids"])]
        assert (
            r["tool_mask"] == original["tool_mask"]
            and r["loss_mask"] == [1 - t for t in original["tool_mask"]]
            and r["reward"] == pytest.approx(original["reward"])
        )


def test_the_models_positions_end_a_trajectory(tiny, data):
    """The context limit truncates like the completion limit; first messages that leave no room cost their own
    trajectories.
    """
    from stages.acting.agents import Agent
    from stages.chat import renderer_for
    from stages.decoding.sampler import Sampler
    from stages.generation import sampling_params
    from stages.models.modeling import load_policy

    config = Config(
        environment=COUNTDOWN,
        environment_options={"turns": 9},
        max_turns=9,
        max_turn_length=8,
        max_completion_length=400,
    )
    renderer, model = renderer_for(tiny["policy"]), load_policy(tiny["policy"])
    rows = [(r, []) for r in open_dataset(data["prompts"]).iter_rows()][:2]
    longest = max(len(renderer.prompt_ids([{"role": "system", "content": "count 9"}, *r["prompt"]])) for r, _ in rows)
    agent, params = Agent(config, renderer), sampling_params(config, renderer)
    model.config.max_position_embeddings = longest + 60
    found = agent.sample(Sampler(model, renderer.tokenizer), rows, params, [[1, 2], [3, 4]])
    assert all(
        s.finish_reason in ("length", "stop")
        and s.failure is None
        and s.turns
        and len(s.prompt_ids) + len(s.ids) <= longest + 60
        for group in found
        for s in group
    )
    assert any(s.finish_reason == "length" and not s.terminated and sum(s.tool_mask) for group in found for s in group)
    measured = agent.latency()
    assert (
        0 < measured["environment_step_seconds"] <= measured["environment_step_seconds_max"] < 10
        and agent.latency() == {}
    )
    model.config.max_position_embeddings = longest
    lost = [
        s
        for group in agent.sample(Sampler(model, renderer.tokenizer), rows, params, [[1, 2], [3, 4]])
        for s in group
        if s.failure
    ]
    agent.close()
    assert lost and all(
        "the model has positions for" in s.failure and not s.ids and s.finish_reason == "failure" for s in lost
    )


def test_the_greedy_baseline_is_of_the_same_world(tiny, data, spec):
    """REMAX in an environment: the greedy trajectory starts from the seed of the group that it is compared with."""
    result, _ = train(
        spec,
        tiny,
        data,
        "greedy",
        {"environment": "tests.training.environments:Seeded", "preset": "remax", "kl_coef": 0.0, "max_steps": 1},
    )
    rows = rows_of(result)
    assert len({r["reward"] for r in rows}) == 2 and all(r["advantages"] == [0.0] * r["length"] for r in rows)


def test_a_control_with_random_rewards_pays_no_trajectory_that_its_environment_lost(tiny, spec, tmp_path):
    from storage.datasets import write_dataset
    from storage.schema import complete_row

    prompts = [
        complete_row(
            "prompts/1",
            {"prompt": [{"role": "user", "content": f"{word} {i}"}]},
            dataset="d",
            source="s",
            origin="human",
        )
        for i, word in enumerate(("fail", "go"))
    ]
    write_dataset(str(tmp_path / "tasks"), "tasks", "prompts/1", prompts)
    result, _ = train(
        spec,
        tiny,
        {"prompts": str(tmp_path / "tasks")},
        "control",
        {"environment_options": {"turns": 3, "fail": {"1": "raise"}}, "max_steps": 1, "reward_override": "random"},
    )
    bad = [r for r in rows_of(result) if r["finish_reason"] == "failure"]
    assert bad and all(r["reward_tier"] == "unscorable" and not any(r["loss_mask"]) for r in bad)
