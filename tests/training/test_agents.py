"""Multi-turn RL: transcripts that grow and are never tokenised again, masks, turn credit, environments that fail,
evaluation of agents.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from stages.acting.agents import Agent
from stages.acting.environments import EnvironmentFailure, EnvironmentLimits, EnvironmentPool
from stages.chat import renderer_for
from stages.decoding.sampler import Sampler
from stages.generation import sampling_params
from stages.harness import execute
from stages.models.modeling import load_policy
from stages.models.sharding import Acting
from stages.rl import Config
from storage.datasets import open_dataset, write_dataset
from storage.schema import complete_row
from tests.common import silent, written

COUNTDOWN = "tests.training.environments:Countdown"
SMALL = {
    "preset": "agent",
    "environment": COUNTDOWN,
    "max_steps": 2,
    "prompts_per_step": 2,
    "num_generations": 4,
    "max_completion_length": 120,
    "max_turn_length": 8,
    "learning_rate": 1e-3,
    "max_turns": 4,
}
# one turn, without an environment
ANSWERS = {name: value for name, value in SMALL.items() if name not in ("environment", "max_turns", "max_turn_length")}


def train(spec, tiny, data, name, config, **inputs):
    made = spec(
        "rl",
        {**(ANSWERS if config.get("environment") == "" else SMALL), **config},
        {"model": tiny["policy"], "data": data["prompts"]},
        name,
    )
    for key, path in inputs.items():
        made["inputs"][key] = {"kind": "model", "path": path, "ref": key, "digest": key}
    result = execute(made, silent)
    return result, [
        json.loads(line)["metrics"] for line in Path(made["workdir"], "metrics.jsonl").read_text().splitlines()
    ]


def rows_of(result, name="rollouts"):
    return list(open_dataset(result["outputs"][name]["path"]).iter_rows())


def spans(row):
    return [(t["start"], t["end"]) for t in row["turns"]]


def test_the_transcript_is_what_was_sampled_and_what_the_template_says(tiny, data, spec):
    """Turns are the policy's tokens, what lies between is the template's rendering of the observation, and log-probs
    are the trainer's.
    """
    result, metrics = train(spec, tiny, data, "transcript", {"environment_options": {"turns": 3}})
    renderer, model = renderer_for(tiny["policy"]), load_policy(tiny["policy"])
    rows = [r for r in rows_of(result) if r["iteration"] == 0]
    assert any(len(r["turns"]) == 3 for r in rows)
    prompts = {r["prompt_id"]: r["prompt"] for r in open_dataset(data["prompts"]).iter_rows()}
    acts = {}
    for one in rows_of(result, "trajectories"):
        acts.setdefault(one["episode_id"], []).append(one)
    for row in rows:
        assert row["prompt_ids"] == renderer.prompt_ids(
            [{"role": "system", "content": "count 3"}, *prompts[row["prompt_id"]]]
        )
        inside = [False] * row["length"]
        for start, end in spans(row):
            inside[start:end] = [True] * (end - start)
        assert [1 - t for t in row["tool_mask"]] == [int(x) for x in inside] == row["loss_mask"]
        for (_, end), (start, _), turn in zip(spans(row), spans(row)[1:], acts[row["row_id"]]):
            between, closed = row["completion_ids"][end:start], row["completion_ids"][end - 1] == renderer.turn_end_id
            said = renderer.decode(between, skip_special_tokens=False)
            content = json.loads(turn["next_observation_json"])[0]["content"]
            assert (
                said
                == ("" if closed else "<|im_end|>")
                + f"\n<|im_start|>tool\n{content}<|im_end|>\n<|im_start|>assistant\n"
            )
            assert between.count(renderer.turn_end_id) == 1 + (not closed), (
                "a special token in an observation must stay ordinary text"
            )
        ids = torch.tensor([row["prompt_ids"] + row["completion_ids"]])
        logps = torch.log_softmax(model(input_ids=ids, use_cache=False).logits[0].double(), -1)[
            len(row["prompt_ids"]) - 1 : -1
        ].gather(1, ids[0, len(row["prompt_ids"]) :, None])[:, 0]
        own = np.array(row["tool_mask"]) == 0
        assert np.allclose(np.array(row["logp_old"])[own], logps.detach().numpy()[own], atol=2e-5)
    assert metrics[0]["policy/ratio"] == pytest.approx(1.0, abs=1e-5)


def test_turns_as_the_tokenizer_writes_them_are_the_conversation(tiny):
    """Where every turn's tokens are the tokenizer's own, prompt, turns and observations are the ids and the mask that
    SFT trains on.
    """
    renderer = renderer_for(tiny["policy"])
    messages = [
        {"role": "user", "content": "what is 2 plus 3?"},
        {"role": "assistant", "content": "calculator(expression='2 + 3')"},
        {"role": "tool", "content": "5"},
        {"role": "tool", "content": "x <|im_end|> y"},
        {"role": "assistant", "content": "Answer: 5."},
    ]
    whole = renderer.conversation(messages)
    ids, mask = renderer.prompt_ids(messages[:1]), []
    mask = [0] * len(ids)
    for text, seen in (("calculator(expression='2 + 3')", messages[2:4]), ("Answer: 5.", None)):
        turn = renderer.tokenizer(text, add_special_tokens=False)["input_ids"] + [renderer.turn_end_id]
        ids, mask = ids + turn, mask + [1] * len(turn)
        if seen:
            between = renderer.observation_ids(seen, closed=True)
            ids, mask = ids + between, mask + [0] * len(between)
    assert whole.ids[: len(ids)] == ids and whole.mask[: len(ids)] == mask and not any(whole.mask[len(ids) :])


def test_why_trajectories_end(tiny, data, spec):
    """A goal and a stop terminate; the turn limit and the context limit truncate."""
    for name, config, reason, terminated in (
        ("goal", {"environment_options": {"turns": 9, "goal_after": 2}, "max_turns": 4}, "goal", True),
        ("stop", {"environment_options": {"turns": 2}}, "stop", True),
        ("turns", {"environment_options": {"turns": 9}, "max_turns": 2}, "turn_limit", False),
        ("room", {"environment_options": {"turns": 9}, "max_turns": 9, "max_completion_length": 70}, "length", False),
    ):
        result, metrics = train(
            spec,
            tiny,
            data,
            f"end-{name}",
            {
                **config,
                "max_steps": 1,
                "max_turn_length": None if name == "room" else 60,
                "max_completion_length": 200,
                **({"max_completion_length": 70} if name == "room" else {}),
            },
        )
        rows = [r for r in rows_of(result) if r["finish_reason"] == reason]
        assert rows and all(r["terminated"] is terminated and r["truncated"] is not terminated for r in rows), name
        assert (
            all(r["length"] <= 200 for r in rows_of(result)) and metrics[0][f"agent/finish_{reason}"] == len(rows) / 8
        )
        if name == "goal":
            assert all(r["is_correct"] and len(r["turns"]) == 2 for r in rows)


def advantage_by_hand(rows, gamma):
    """AGENT-RL by the book: discounted turn returns less the mean of the same turn in the group."""
    out = []
    for row in rows:
        group = [r for r in rows if r["prompt_id"] == row["prompt_id"]]

        def returns(r):
            values = [t["reward"] for t in r["turns"]]
            return [sum(gamma ** (j - k) * values[j] for j in range(k, len(values))) for k in range(len(values))]

        advantages = np.zeros(row["length"])
        for k, ((start, end), value) in enumerate(zip(spans(row), returns(row))):
            others = [returns(r)[k] for r in group if len(r["turns"]) > k]
            advantages[start:end] = value - (
                np.mean(others) if len(others) > 1 else np.mean([returns(r)[0] for r in group])
            )
        out.append(advantages)
    return out


def test_an_update_can_be_computed_again_from_the_rollouts(tiny, data, spec):
    """Turn returns, their group baseline, the loss on action tokens alone: weights after one SGD-like step follow from
    the dataset.
    """
    result, metrics = train(
        spec, tiny, data, "again", {"environment_options": {"turns": 3}, "gamma": 0.9, "max_steps": 1}
    )
    rows = rows_of(result)
    expected = advantage_by_hand(rows, 0.9)
    for row, advantages in zip(rows, expected):
        assert np.allclose(row["advantages"], advantages, atol=1e-6)
        assert all(a == 0 for a, t in zip(row["advantages"], row["tool_mask"]) if t)
    model = load_policy(tiny["policy"])
    total, count = 0.0, 0
    for row, advantages in zip(rows, expected):
        ids, n = torch.tensor([row["prompt_ids"] + row["completion_ids"]]), len(row["prompt_ids"])
        logps = torch.log_softmax(model(input_ids=ids, use_cache=False).logits[0].double(), -1)[n - 1 : -1].gather(
            1, ids[0, n:, None]
        )[:, 0]
        own = torch.tensor(row["tool_mask"]) == 0
        total = total - (torch.tensor(advantages) * torch.exp(logps - logps.detach()))[own].sum()
        count = count + int(own.sum())
    grads = torch.autograd.grad(total / count, list(model.parameters()))
    assert metrics[0]["grad_norm"] == pytest.approx(float(sum((g**2).sum() for g in grads) ** 0.5), rel=1e-3)


def test_gae_and_process_credit_run_over_action_tokens(tiny, data, spec):
    config = {
        "preset": "ppo",
        "kl_coef": 0.0,
        "num_iterations": 1,
        "whiten": False,
        "max_steps": 1,
        "environment_options": {"turns": 3},
        "critic_learning_rate": 1e-3,
    }
    rows = rows_of(train(spec, tiny, data, "gae", config, reward_model=tiny["reward"])[0])
    for row in rows:
        own = np.flatnonzero(np.array(row["tool_mask"]) == 0)
        rewards = np.zeros(row["length"])
        for t in row["turns"]:
            rewards[t["end"] - 1] += t["reward"]
        values = [row["values"][i] for i in own]
        running, after, out = 0.0, row["bootstrap_value"], np.zeros(len(own))
        for k in reversed(range(len(own))):
            running = rewards[own[k]] + after - values[k] + 0.95 * running
            out[k], after = running, values[k]
        assert np.allclose(np.array(row["advantages"])[own], out, atol=1e-5)
        assert row["bootstrap_value"] == 0.0 or row["truncated"]
    assert sum(t["reward"] > 0 for r in rows for t in r["turns"]) > 4
    rows = rows_of(
        train(
            spec,
            tiny,
            data,
            "process",
            {"preset": "grpo_process", "beta": 0.0, "max_steps": 1, "environment_options": {"turns": 3}},
        )[0]
    )
    flat = {
        p: [t["reward"] for r in rows if r["prompt_id"] == p for t in r["turns"]]
        for p in {r["prompt_id"] for r in rows}
    }
    row = next(r for r in rows if len(r["turns"]) > 1)
    values = flat[row["prompt_id"]]
    expected = sum((t["reward"] - np.mean(values)) / (np.std(values, ddof=1) + 1e-4) for t in row["turns"])
    assert row["advantages"][0] == pytest.approx(expected, rel=1e-4)


def test_a_failing_environment_costs_its_own_trajectory(tiny, data, spec, tmp_path):
    prompts = [
        complete_row(
            "prompts/1",
            {"prompt": [{"role": "user", "content": f"{'fail' if i % 2 else 'fine'} {i}"}]},
            dataset="d",
            source="s",
            origin="human",
        )
        for i in range(4)
    ]
    write_dataset(str(tmp_path / "tasks"), "tasks", "prompts/1", prompts)
    for how, said in (("hang", "time-out"), ("crash", "exit status 7"), ("raise", "no more"), ("eat", "memory")):
        made = spec(
            "rl",
            {
                **SMALL,
                "prompts_per_step": 4,
                "max_steps": 1,
                "environment_options": {"turns": 3, "fail": {"1": how}},
                "environment_timeout_s": 1.5,
                "environment_memory_mib": 256,
            },
            {"model": tiny["policy"], "data": str(tmp_path / "tasks")},
            f"fail-{how}",
        )
        result = execute(made, silent)
        rows = rows_of(result)
        bad = [r for r in rows if r["finish_reason"] == "failure"]
        assert bad and all(
            r["reward_tier"] == "unscorable" and not any(r["loss_mask"]) and len(r["turns"]) == 2 for r in bad
        )
        assert {r["prompt_id"] for r in bad} <= {p["prompt_id"] for p in prompts[1::2]}
        fine = [r for r in rows if r["prompt_id"] in {p["prompt_id"] for p in prompts[::2]}]
        assert all(r["finish_reason"] in ("stop", "length") and any(r["loss_mask"]) for r in fine)


def test_a_pool_says_what_went_wrong_and_leaves_no_process():
    with EnvironmentPool(COUNTDOWN, {"fail": {"0": "hang"}}, EnvironmentLimits(timeout_s=0.5)) as pool:
        ids, first = pool.reset([{"prompt": [{"role": "user", "content": text}]} for text in ("fine", "fail")], [1, 1])
        assert first[0].messages[0]["content"] == "count 3"
        good, bad = pool.step(ids, ["e e", "e e"])
        assert good.reward == 0.75 and good.events == ("turn1", "fields:3/4") and "time-out" in bad.error
        assert pool.step(ids, ["e", "e"])[1].error == "the episode has ended"
        host = pool.process.pid
    assert not Path(f"/proc/{host}").exists() or "Z" in Path(f"/proc/{host}/stat").read_text().split()[2]
    with pytest.raises(EnvironmentFailure, match="No module named 'nowhere'"):
        EnvironmentPool("nowhere:Nothing").reset([{}], [0])
    with pytest.raises(ValueError, match="write one of tools"):
        EnvironmentPool("tool")


def test_what_an_environment_refuses(tiny, data, spec, tmp_path):
    with pytest.raises(Exception, match="there is no environment 'tool'; write one of tools"):
        Config(environment="tool")
    with pytest.raises(Exception, match="PYTHONPATH"):
        Config(environment="nowhere:Nothing")
    with pytest.raises(Exception, match="make reset a function of"):
        train(spec, tiny, data, "moody", {"environment": "tests.training.environments:Moody"})
    with pytest.raises(Exception, match="scores trajectories in an environment"):
        train(
            spec,
            tiny,
            data,
            "no-environment",
            {"environment": "", "preset": "grpo", "rewards": [{"kind": "milestones"}]},
        )
    with pytest.raises(Exception, match="credits the turns"):
        train(spec, tiny, data, "no-turns", {"environment": ""})
    assert (
        Config(environment=COUNTDOWN).environment_digest
        and Config(environment=COUNTDOWN).rewards[0].kind == "environment"
    )
    from stages.evaluate import Config as Evaluation

    for config in (Config, Evaluation):
        with pytest.raises(Exception, match="write engine=builtin"):
            config(environment=COUNTDOWN, engine="server", engine_url="http://localhost:1/v1")
    asked = [{"kind": "debate", "endpoint": "http://localhost:1/v1", "endpoint_model": "m"}]
    with pytest.raises(Exception, match="argues about two answers, and prompt"):
        train(spec, tiny, data, "debate-answers", {"environment": "debate", "rewards": asked})
    written(
        str(tmp_path / "tasks"),
        "tasks",
        "prompts/1",
        [{"prompt": [{"role": "user", "content": "q"}], "extra_json": '{"answers": ["a", "b"]}'}],
        dataset="d",
    )
    disputed = {"prompts": str(tmp_path / "tasks")}
    with pytest.raises(Exception, match="baseline=v_star needs completions of one prompt"):
        train(spec, tiny, disputed, "debate-table", {"environment": "debate", "preset": "astar_po", "rewards": asked})
    with pytest.raises(Exception, match="judges debates; write environment=debate"):
        train(spec, tiny, disputed, "no-debate", {"rewards": asked})
    with pytest.raises(Exception, match="not the one that this run was started with"):
        Config(environment=COUNTDOWN, environment_digest="another")


def test_trajectories_do_not_depend_on_their_company(tiny, data):
    """The same tasks and seeds in another order and in other batches give the same trajectories."""
    config = Config(
        environment=COUNTDOWN,
        environment_options={"turns": 3},
        max_turns=4,
        max_turn_length=8,
        max_completion_length=120,
    )
    renderer, rows = renderer_for(tiny["policy"]), [(r, []) for r in open_dataset(data["prompts"]).iter_rows()][:4]
    sampler, agent = Sampler(load_policy(tiny["policy"]), renderer.tokenizer), Agent(config, renderer)
    params, seeds = sampling_params(config, renderer), [[10 * i, 10 * i + 1] for i in range(4)]
    together = agent.sample(sampler, rows, params, seeds)
    alone = [agent.sample(sampler, [rows[i]], params, [seeds[i]])[0] for i in (3, 0, 2, 1)]
    agent.close()
    for i, group in zip((3, 0, 2, 1), alone):
        assert [s.ids for s in group] == [s.ids for s in together[i]] and [s.turns for s in group] == [
            s.turns for s in together[i]
        ]
        assert np.allclose(sum((s.logps for s in group), []), sum((s.logps for s in together[i]), []), atol=1e-5)


class _Changed:
    """An engine whose every completion goes through ``change(seed, completion)``."""

    def __init__(self, engine, change):
        self.engine, self.change = engine, change

    def __getattr__(self, name):
        return getattr(self.engine, name)

    def generate(self, prompts, params, seeds, progress=None):
        found = self.engine.generate(prompts, params, seeds)
        return [[self.change(s, c) for s, c in zip(own, group)] for own, group in zip(seeds, found)]


@pytest.mark.parametrize("environment", [COUNTDOWN, "debate"])
def test_a_turn_that_the_engine_lost_or_gave_no_log_probs_of(tiny, data, environment):
    """A lost turn loses its trajectory (of a debate both sides), with the reason, and no other; an engine without
    log-probs gives trajectories without them.
    """
    from dataclasses import replace

    from stages.acting.agents import trajectory_rows
    from stages.decoding.sampler import Completion
    from stages.reward.debate import Debaters
    from stages.running.randomness import seed_for

    debate = environment == "debate"
    config = Config(
        environment=environment,
        environment_options={"rounds": 2} if debate else {"turns": 3},
        max_turns=4,
        max_turn_length=8,
        max_completion_length=200,
    )
    renderer, prompts = renderer_for(tiny["policy"]), list(open_dataset(data["prompts"]).iter_rows())[:2]
    rows = [({**r, "extra_json": '{"answers": ["yes", "no"]}'}, []) for r in prompts]
    sampler = Sampler(load_policy(tiny["policy"]), renderer.tokenizer)
    agent = (Debaters if debate else Agent)(config, renderer)
    params, seeds = sampling_params(config, renderer), [[1, 2], [3, 4]]
    # the second turn of the first trajectory of the second task
    gone = seed_for(seed_for(3, "debate", 1), "turn", 1) if debate else seed_for(3, "agent", "turn", 1)
    whole = agent.sample(sampler, rows, params, seeds)
    error = Completion([], None, "error", "", error="gone")
    some = agent.sample(_Changed(sampler, lambda s, c: error if s == gone else c), rows, params, seeds)
    none = agent.sample(_Changed(sampler, lambda s, c: replace(c, logps=None)), rows, params, seeds)
    agent.close()
    lost = [(1, 0), (1, 2)] if debate else [(1, 0)]
    for i, group in enumerate(whole):
        for k, s in enumerate(group):
            other = some[i][k]
            if (i, k) in lost:
                assert len(s.turns) > 1 and (other.error, other.finish_reason) == ("gone", "error")
                assert other.ids == s.ids[: len(other.ids)] and not other.terminated
            else:
                assert (other.ids, other.logps, other.error) == (s.ids, s.logps, None)
            assert (none[i][k].ids, none[i][k].tool_mask, none[i][k].logps) == (s.ids, s.tool_mask, None)
            assert {t["logp_behaviour"] for t in trajectory_rows(none[i][k], "e")} == {None}


# --- rewards of trajectories ------------------------------------------------------------------------------------------


def test_components_of_a_trajectory_are_paid_turn_by_turn(tiny, data, spec):
    """Milestones pay once, indicators every turn; their weighted sum is the reward of the turn, and an outcome goes to
    the last one.
    """
    rewards = [
        {"kind": "environment", "weight": 2.0},
        {"kind": "milestones", "milestones": {"turn1": 0.25, "turn[23]": 0.5}, "weight": 3.0},
        {"kind": "step_weighted", "step_weights": {"form": 0.4, "turn2": 0.6}},
        {"kind": "length", "max_length": 120, "cache_length": 119, "weight": 0.5},
    ]
    result, metrics = train(
        spec, tiny, data, "components", {"environment_options": {"turns": 3}, "rewards": rewards, "max_steps": 1}
    )
    acts = {}
    for one in rows_of(result, "trajectories"):
        acts.setdefault(one["episode_id"], []).append(one)
    for row in rows_of(result):
        parts, last = {c["name"]: c["value"] for c in row["reward_components"]}, len(row["turns"]) - 1
        if row["finish_reason"] == "length":
            continue
        letters = [len(json.loads(a["action_json"])["content"]) for a in acts[row["row_id"]]]
        paid = [
            sum(c in "e " for c in json.loads(a["action_json"])["content"]) / (n + 1)
            for a, n in zip(acts[row["row_id"]], letters)
        ]
        milestones = [0.25, 0.5, 0.0][: last + 1]
        steps = [0.4 * min(n, 4) / 4 + 0.6 * (k == 1) for k, n in enumerate(letters)]
        expected = [2 * p + 3 * m + s for p, m, s in zip(paid, milestones, steps)]
        expected[last] += 0.5 * parts["length"]
        assert [t["reward"] for t in row["turns"]] == pytest.approx(expected) and row["reward"] == pytest.approx(
            sum(expected)
        )
        assert parts["milestones"] == pytest.approx(sum(milestones)) and [
            a["reward"] for a in acts[row["row_id"]]
        ] == pytest.approx(expected)
    assert metrics[0]["reward/milestones"] <= 0.75


def test_blends_and_length_rewards_of_groups():
    from stages.reward.components import RewardComponent
    from stages.reward.rewards import build_rewards

    def scored(components, rows):
        return build_rewards([RewardComponent(**c) for c in components], {}).score(rows)

    def row(text, answer="4", n=10, extra=None, prompt="p"):
        return {
            "prompt_row": {
                "prompt_id": prompt,
                "answer": answer,
                "answer_type": "integer",
                "extra_json": json.dumps({"verifier": "world", **(extra or {})}),
            },
            "prompt_ids": [1],
            "completion_text": text,
            "completion_ids": [5] * n,
            "finish_reason": "eos",
        }

    mix = [
        {"name": "rule", "kind": "verifier", "weight": 0.5, "blend": True},
        {"name": "form", "kind": "regex", "pattern": "Answer", "weight": 0.5, "blend": True},
        {"kind": "truncation", "weight": 1.0},
    ]
    known, unknown = scored(mix, [row("Answer: 5."), row("Answer: 5.", answer=None)])
    # the absent rule is renormalised away
    assert known.total == pytest.approx(0.5) and unknown.total == pytest.approx(1.0)
    assert scored([{**mix[0], "on_missing": "skip"}, *mix[1:]], [row("Answer: 5.", answer=None)])[
        0
    ].total == pytest.approx(0.5)
    with pytest.raises(ValueError, match="sum to 1"):
        build_rewards([RewardComponent(**{**c, "weight": 0.4}) for c in mix[:2]], {})
    rows = [row("Answer: 4.", n=n) for n in (10, 20)] + [row("Answer: 5.", n=30), row("Answer: 4.", n=7, prompt="q")]
    # the last one is alone with its prompt
    assert [s.total for s in scored([{"kind": "length_group"}], rows)] == pytest.approx([0.5, 0.0, -0.5, 0.0])
    asked = [
        row("Answer: 4.", n=1200, extra={"target_length": 1000}),
        row("Answer: 5.", n=1200, extra={"target_length": 1000}),
        row("Answer: 4."),
    ]
    exact = scored([{"kind": "length_target"}], asked)
    assert (
        [s.total for s in exact[:2]] == pytest.approx([0.94, -0.06])
        and exact[2].total is None
        and "target_length" in exact[2].reasons["length_target"]
    )
    assert [s.total for s in scored([{"kind": "length_target", "length_mode": "max"}], asked[:2])] == pytest.approx(
        [0.44, 0.0]
    )


# --- tools ------------------------------------------------------------------------------------------------------------


def test_tools_answer_calls_and_failures_are_observations():
    from stages.acting.tools import ToolEnvironment, parse_calls, render_call

    def task(**more):
        return {
            "prompt": [{"role": "user", "content": "q"}],
            "answer": "7",
            "answer_type": "integer",
            "extra_json": json.dumps({"verifier": "world", "table": {"red lamp": "7"}}),
            **more,
        }

    environment = ToolEnvironment(tools=["calculator", "search", "python"], tool_timeout_s=0.5)
    first = environment.reset(task(), 0)
    assert first[0]["role"] == "system" and all(
        name in first[0]["content"] for name in ("calculator(expression)", "search(query)", "python(code)")
    )
    cases = {
        "calculator(expression='2 + 5 * 3')": ("2 + 5 * 3 = 17", "tool:calculator"),
        "search(query='lamp')": ("red lamp: 7", "tool:search"),
        "search(query='green')": ("nothing found", "error:failed"),
        "calculator(expression='__import__(1)')": ("not an arithmetic", "error:arguments"),
        "calculator(expression='9**9**9')": ("too large", "error:arguments"),
        "calculator(expression='1/0')": ("division by zero", "error:arguments"),
        "calculator('2')": ("write calls as", "error:syntax"),
        "calculator(2 +": ("cannot read", "error:syntax"),
        "drill(x='1')": ("no tool drill", "error:unknown_tool"),
        "search(word='lamp')": ("takes query", "error:arguments"),
        "python(code='print(6*7)')": ("42", "tool:python"),
        "python(code='1/0')": ("ZeroDivisionError", "error:failed"),
        "python(code='while True: pass')": ("time-out", "error:timeout"),
        "python(code='9**9**9**9')": ("time-out", "error:timeout"),
        "python(code='import os; os._exit(1)')": ("ended", "error:failed"),
    }
    for action, (said, event) in cases.items():
        messages, reward, done, events = environment.step(action)
        assert (
            said in messages[0]["content"]
            and messages[0]["role"] == "tool"
            and events == [event]
            and (reward, done) == (0.0, False)
        ), action
    messages, *_, events = environment.step("\n".join(["search(query='lamp')"] * 5))
    assert len(messages) == 5 and events == ["tool:search"] * 4 + ["error:failed"]
    assert environment.step("Answer: 7.")[1:] == (1.0, True, ["answered", "goal_verified"]) and environment.step(
        "Answer: 8."
    )[1:3] == (0.0, True)
    said = render_call("search", {"query": "a 'quoted' word"}, "json")
    assert (
        parse_calls(f"let me see\n{said}", "json")
        == [{"name": "search", "args": {"query": "a 'quoted' word"}}]
        == parse_calls(render_call("search", {"query": "a 'quoted' word"}))
    )
    assert parse_calls("The answer (7) is clear.\nAnswer: 7.") == [] and str(
        parse_calls("<tool_call>{oops", "json")[0]
    ).startswith("error: write calls as")


def test_the_worlds_tool_tasks_are_solved_by_their_own_calls(tmp_path):
    """The calls of a careful worker lead to the verified goal; a shop's answers are in one split; the rest of the world
    stays as it is.
    """
    from stages.acting.tools import ToolEnvironment
    from stages.running import randomness
    from stages.worldgen import tool_tasks

    def rng_of(*purpose):
        return randomness.rng(3, "world", "world", 3, *purpose)

    tasks = {
        split: [t for _, t in zip(range(60), tool_tasks.tasks_of(split, "tasks", rng_of))]
        for split in ("train", "test")
    }
    assert not {t.unit for t in tasks["train"]} & {t.unit for t in tasks["test"]} and {
        t.category for t in tasks["test"]
    } == {k.__name__ for k in tool_tasks.KINDS}
    rows = list(tool_tasks.tool_task_rows(rng_of, split="train", n=60))
    for task, row in zip(tasks["train"], rows):
        environment = ToolEnvironment()
        environment.reset({**row, "extra_json": json.dumps(row["extra"])}, 0)
        for tool, argument in task.calls:
            messages, _, done, events = environment.step(
                tool_tasks.render_call(tool, {"expression" if tool == "calculator" else "query": argument})
            )
            assert events == [f"tool:{tool}"] and not done
        assert "goal_verified" in environment.step(f"Answer: {task.answer}.")[3]
    rng, counts = rng_of("manners"), {}
    for task in tasks["train"]:
        messages, manner = tool_tasks.demonstration(task, rng, 0.5)
        counts.setdefault(manner, []).append(messages[-1]["content"] == f"Answer: {task.answer}.")
    assert all(counts["careful"]) and sum(counts["careless"]) + sum(counts["guess"]) < 0.3 * len(tasks["train"])

    def world(name, config):
        small = {
            "text": {"train": 5, "validation": 1},
            "demonstrations": {"train": 8, "validation": 1},
            "comparisons": {"train": 8, "validation": 1, "test": 1},
            "prompts": {"train": 8, "validation": 1, "test": 1},
        }
        return execute(
            {
                "stage": "world",
                "key": name,
                "config": {**small, **config},
                "seed": 3,
                "device": "cpu",
                "inputs": {},
                "workdir": str(tmp_path / name),
            },
            lambda e: None,
        )

    plain = world("plain", {})
    more = world(
        "more",
        {
            "tools": {
                "demonstrations": {"train": 20, "validation": 2},
                "tasks": {"train": 20, "validation": 2, "test": 4},
            }
        },
    )
    assert set(more["outputs"]) - set(plain["outputs"]) == {"tool_demonstrations", "tool_tasks"}
    assert all(more["outputs"][k]["digest"] == v["digest"] for k, v in plain["outputs"].items())


# --- evaluation -------------------------------------------------------------------------------------------------------


def test_a_coin_says_that_answers_are_right_or_wrong_and_what_follows_earns_nothing(tiny, data, spec):
    """verdicts: the same prompt and answer have one verdict, different ones about half of each; the second turn,
    whatever it is, ends the episode with the verdict's reward.
    """
    tasks = [{"prompt": [{"role": "user", "content": f"q{k % 4}"}]} for k in range(80)]
    with EnvironmentPool("verdicts", {"wrong": "No."}) as pool:
        ids, first = pool.reset(tasks, [1] * 80)
        assert [list(seen.messages) for seen in first] == [task["prompt"] for task in tasks]
        said = pool.step(ids, [f"a{k // 8}" for k in range(80)])
        assert {seen.messages[0]["content"] for seen in said} == {"That is right.", "No."} and not any(
            seen.done or seen.reward for seen in said
        )
        assert (
            said[0].messages == said[4].messages
            and 20 < sum(seen.messages[0]["content"] == "No." for seen in said) < 60
        )
        ends = pool.step(ids, ["", *["x"] * 79])
    for before, after in zip(said, ends):
        right = before.messages[0]["content"] == "That is right."
        assert (
            after.done
            and after.reward == float(right)
            and after.events == ("goal_verified",) * right
            and not after.messages
        )
    result, _ = train(
        spec,
        tiny,
        data,
        "verdicts",
        {
            "environment": "verdicts",
            "environment_options": {},
            "max_turns": 2,
            "preset": "dr_grpo",
            "loss_agg_mode": "seq-mean-token-mean",
        },
    )
    rows = rows_of(result)
    assert {r["is_correct"] for r in rows} == {True, False} and all(
        r["reward"] == float(r["is_correct"]) and len(r["turns"]) == 2 for r in rows
    )


def test_an_agent_is_evaluated_in_its_environment(tiny, spec):
    config = {
        "environment": COUNTDOWN,
        "environment_options": {"turns": 3, "goal_after": 2},
        "max_turns": 4,
        "max_turn_length": 8,
        "max_completion_length": 120,
        "num_samples": 2,
    }
    result = execute(spec("evaluate", config, {"model": tiny["policy"], "prompts": tiny["prompts"]}, "eval"), silent)
    summary = result["summary"]
    assert summary["accuracy"] == 1.0 and summary["accuracy_low"] < 1.0 and summary["greedy_accuracy"] == 1.0
    assert (
        summary["turns"] == 2.0
        and summary["tool_errors"] == 0.0
        and summary["truncation_rate"] == 0.0
        and summary["environment_failure_rate"] == 0.0
    )
    rows = [json.loads(r["extra_json"]) for r in open_dataset(result["outputs"]["samples"]["path"]).iter_rows()]
    assert len(rows) == 60 and all(
        [m["role"] for m in r["transcript"]] == ["assistant", "tool", "assistant"] and r["finish"] == "goal"
        for r in rows
    )
    stopped = execute(
        spec(
            "evaluate",
            {**config, "stop_strings": ["a", "e"], "greedy": False},
            {"model": tiny["policy"], "prompts": tiny["prompts"]},
            "stopped",
        ),
        silent,
    )
    assert stopped["summary"]["protocol_hash"] != summary["protocol_hash"]
    said, before = (
        [
            m["content"]
            for r in open_dataset(made["outputs"]["samples"]["path"]).iter_rows()
            for m in json.loads(r["extra_json"])["transcript"]
            if m["role"] == "assistant"
        ]
        for made in (stopped, result)
    )
    assert said and not any(set("ae") & set(text) for text in said) and any(set("ae") & set(text) for text in before), (
        "turns end at stop strings as in training"
    )
    short = execute(
        spec(
            "evaluate",
            {**config, "max_turns": 1, "greedy": False},
            {"model": tiny["policy"], "prompts": tiny["prompts"]},
            "short",
        ),
        silent,
    )["summary"]
    assert (
        short["accuracy"] == 0.0
        and short["truncation_rate"] == 1.0
        and short["protocol_hash"] != summary["protocol_hash"]
    )


def test_an_agents_kl_is_over_its_own_tokens_and_what_its_environment_lost_counts_nowhere(
    tiny, spec, tmp_path, monkeypatch
):
    """The log-probs of what tools said were part of the KL to the reference, and a trajectory that its environment lost
    was a wrong answer of flexible_accuracy, with a score of the reward model.
    """
    tasks = [
        complete_row(
            "prompts/1",
            {
                "prompt": [{"role": "user", "content": f"{'fail' if i == 1 else 'reset' if i == 2 else 'fine'} {i}"}],
                "answer": "3",
                "answer_type": "integer",
            },
            dataset="d",
            source="s",
            origin="human",
            split="test",
        )
        for i in range(4)
    ]
    write_dataset(str(tmp_path / "tasks"), "tasks", "prompts/1", tasks)
    played, original = [], Agent.sample

    def noted(self, *arguments, **more):
        found = original(self, *arguments, **more)
        played.extend(sample for group in found for sample in group)
        return found

    monkeypatch.setattr(Agent, "sample", noted)
    config = {
        "environment": COUNTDOWN,
        "environment_options": {"turns": 3, "fail": {"1": "raise"}},
        "max_turn_length": 6,
        "max_completion_length": 120,
        "num_samples": 2,
        "greedy": False,
    }
    made = spec(
        "evaluate",
        config,
        {
            "model": tiny["policy"],
            "prompts": str(tmp_path / "tasks"),
            "reference": tiny["other"],
            "reward_model": tiny["reward"],
        },
        "kl",
    )
    warned = []
    result = execute(made, lambda event: warned.append(event.get("text", "")) if event["event"] == "warning" else None)
    rows = [
        {**r, **json.loads(r["extra_json"])} for r in open_dataset(result["outputs"]["samples"]["path"]).iter_rows()
    ]
    lost = [r for r in rows if r["finish"] == "failure"]
    assert (
        len(rows) == 8
        and len(lost) == 4
        and {r["turns"] for r in lost} == {0, 2}
        and result["summary"]["environment_failure_rate"] == 0.5
    )
    models = [load_policy(tiny[name]).double() for name in ("policy", "other")]
    for row in (r for r in rows if r["finish"] != "failure"):
        sample = next(s for s in played if (s.prompt["prompt_id"], s.index) == (row["prompt_id"], row["sample_idx"]))
        ids, own = torch.tensor([sample.prompt_ids + sample.ids]), torch.tensor(sample.tool_mask) == 0
        assert 0 < own.sum() < len(own)
        mine, theirs = (
            torch.log_softmax(m(input_ids=ids, use_cache=False).logits[0], -1)[len(sample.prompt_ids) - 1 : -1].gather(
                1, ids[0, len(sample.prompt_ids) :, None]
            )[:, 0]
            for m in models
        )
        assert (
            row["kl"] == pytest.approx(float((mine - theirs)[own].sum()), abs=1e-4)
            and row["reward"] is not None
            and row["flexible_correct"] is not None
        )
    assert all(
        r.get(name) is None for r in lost for name in ("kl", "reward", "correct", "flexible_correct", "extracted")
    )
    assert not any("answer of the prompt cannot be read" in text for text in warned), "the prompt is not to blame"


# --- VinePPO, pass@k, debate ------------------------------------------------------------------------------------------


def test_continuations_start_where_a_trajectory_was(tiny, data):
    """Actions of a prefix are played again, its tokens and rewards are kept, and what follows is sampled anew (VINEPPO
    in an environment).
    """
    from stages.acting.agents import prefix_of

    config = Config(
        environment=COUNTDOWN,
        environment_options={"turns": 3},
        max_turns=4,
        max_turn_length=8,
        max_completion_length=120,
    )
    renderer, rows = renderer_for(tiny["policy"]), [(r, []) for r in open_dataset(data["prompts"]).iter_rows()][:3]
    sampler, agent = Sampler(load_policy(tiny["policy"]), renderer.tokenizer), Agent(config, renderer)
    params = sampling_params(config, renderer)
    whole = [group[0] for group in agent.sample(sampler, rows, params, [[k] for k in range(3)])]
    again = agent.sample(sampler, rows, params, [[7, 8]] * 3, [prefix_of(s, 1) for s in whole])
    same = agent.sample(sampler, rows, params, [[k] for k in range(3)], [prefix_of(s, 1) for s in whole])
    agent.close()
    for sample, pair, repeated in zip(whole, again, same):
        assert len(sample.turns) == 3 and repeated[0].ids == sample.ids, "the same seed continues to the same end"
        start = sample.turns[1]["start"]
        for one in pair:
            assert (
                one.ids[:start] == sample.ids[:start]
                and one.turns[0] == sample.turns[0]
                and one.tool_mask[:start] == sample.tool_mask[:start]
            )
            assert one.failure is None and one.finish_reason == sample.finish_reason
        assert pair[0].ids[start:] != pair[1].ids[start:]


def test_values_of_vineppo_are_what_continuations_earn(tiny, data, spec):
    """A reward that the first character decides is known after the first step: later steps get no credit, the first
    gets R - V(prompt).
    """
    for name, config in (
        (
            "text",
            {
                "environment": "",
                "rewards": [{"kind": "regex", "pattern": r"\A[^A-Za-z]"}],
                "step_separator": "e",
                "max_completion_length": 40,
            },
        ),
        ("turns", {"environment_options": {"turns": 3}}),
    ):
        result, metrics = train(
            spec,
            tiny,
            data,
            f"vine-{name}",
            {"preset": "vineppo", "vine_samples": 3, "max_steps": 1, "num_generations": 8, **config},
        )
        rows = rows_of(result)
        several = [r for r in rows if len(r["step_ends"]) > 1]
        assert len(several) > 2, "completions of several steps"
        assert all(len(r["step_values"]) == len(r["step_ends"]) and r["step_ends"][-1] == r["length"] - 1 for r in rows)
        for prompt in {r["prompt_id"] for r in rows}:
            assert len({r["step_values"][0] for r in rows if r["prompt_id"] == prompt}) == 1, (
                "the prompt's value is estimated once"
            )
        if name == "text":
            assert {round(3 * r["step_values"][0], 6) % 1 for r in rows} == {0.0}
            for r in several:
                assert r["step_values"][1:] == [r["reward"]] * (len(r["step_ends"]) - 1)
                expected = [r["reward"] - r["step_values"][0]] * (r["step_ends"][0] + 1)
                assert r["advantages"] == pytest.approx(expected + [0.0] * (r["length"] - len(expected)))
        else:
            assert all(t["end"] - 1 == e for r in rows for t, e in zip(r["turns"], r["step_ends"]))


def test_continuations_that_an_engine_lost_are_left_out(tiny, data, spec):
    """A value is the mean of the continuations there are; where there is none, the last known one, and the group's mean
    reward for a prompt.
    """
    from stages.decoding.sampler import Completion
    from stages.generation import prompt_rows
    from stages.harness import Stage
    from stages.registry import get_stage
    from stages.reward.rewards import build_rewards
    from stages.rl import resolve_preset
    from stages.rollouts.source import Rollouts
    from stages.rollouts.steps import monte_carlo

    config = {
        **ANSWERS,
        "preset": "vineppo",
        "vine_samples": 3,
        "step_separator": "e",
        "max_completion_length": 24,
        "rewards": [{"kind": "regex", "pattern": r"[ -~]\Z"}],
    }
    stage = Stage(
        get_stage("rl"),
        spec("rl", config, {"model": tiny["policy"], "data": data["prompts"]}, "vine-lost"),
        silent,
    )
    renderer = renderer_for(tiny["policy"])
    rewards = build_rewards(stage.config.rewards, stage.inputs, renderer=renderer)
    source = Rollouts(
        stage,
        resolve_preset(stage.config)[0],
        renderer,
        Acting(load_policy(tiny["policy"]), False),
        rewards,
        prompt_rows(stage, stage.dataset("data"), "train", renderer, 64),
    )
    groups = source.groups.sample(source.order.take(2, 0), 0, 0)
    samples = [s for g in groups for s in g.samples]
    group_at = [g for g in groups for _ in g.samples]
    engine = source.policy.engine

    class Losing:
        """The engine without the completions of some seeds."""

        def __init__(self, lost):
            self.lost = lost

        def __getattr__(self, name):
            return getattr(engine, name)

        def generate(self, prompts, params, seeds, progress=None):
            found = engine.generate(prompts, params, seeds)
            return [
                [Completion([], None, "error", "", error="gone") if s in self.lost else c for c, s in zip(group, own)]
                for group, own in zip(found, seeds)
            ]

    def values(lost):
        source.policy.engine = Losing(
            {stage.seed_for("vine", 0, samples[i].prompt["row_id"], i, k, j) for i, k, j in lost}
        )
        return monte_carlo(stage, source.policy, rewards, samples, group_at, 0, 0, source.crediting.earned)[1]

    whole = values([])
    i = next(i for i, v in enumerate(whole) if i % 4 and len(v) > 1 and 0 < v[1] < 1)
    first = 4 * (i // 4)  # its group's prompt is continued with the first completion's seeds
    alone = [values([(i, 1, j) for j in range(3) if j != kept])[i][1] for kept in range(3)]
    assert whole[i][1] == pytest.approx(np.mean(alone)) and set(alone) == {0.0, 1.0}
    assert values([(i, 1, 0)])[i][1] == pytest.approx(np.mean(alone[1:]))
    assert any(w["code"] == "engine_rows_failed" for w in stage.warnings)
    lost = values([(i, 1, j) for j in range(3)])
    assert (
        lost[i][:2] == [whole[i][0]] * 2
        and lost[i][2:] == whole[i][2:]
        and [v for k, v in enumerate(lost) if k != i] == [v for k, v in enumerate(whole) if k != i]
    )
    assert values([(first, 0, j) for j in range(3)])[i] == [
        pytest.approx(np.mean([s.total for s in groups[i // 4].samples])),
        *whole[i][1:],
    ]


def rows_under_a_curriculum(tiny, data, spec, tmp_path, iterations, **curriculum):
    """(rollouts of six steps, the easy prompts): every fifth prompt was always right, the others in a quarter of the
    samples; before the last of several ``iterations`` all were right.
    """
    known = list(open_dataset(data["prompts"]).iter_rows(split="train"))
    easy = {r["prompt_id"] for i, r in enumerate(known) if i % 5 == 0}
    stats = written(
        tmp_path / "stats",
        "stats",
        "prompt_stats/1",
        [
            {
                "prompt_id": r["prompt_id"],
                "iteration": k,
                "n": 8,
                "mean_reward": 0.0,
                "reward_std": 0.0,
                "pass_at_1": 1.0 if r["prompt_id"] in easy or k < iterations - 1 else 0.25,
                "mean_logprob": 0.0,
                "kept": True,
            }
            for r in known
            for k in range(iterations)
        ],
        origin="ai",
    )
    made = spec(
        "rl",
        {
            **ANSWERS,
            "preset": "grpo",
            "beta": 0.0,
            "max_completion_length": 8,
            "max_steps": 6,
            "rewards": [{"kind": "verifier"}],
            **curriculum,
        },
        {"model": tiny["policy"], "data": data["prompts"]},
        curriculum["curriculum"],
    )
    made["inputs"]["prompt_stats"] = {"kind": "dataset", "path": stats, "ref": "stats", "digest": "stats"}
    return rows_of(execute(made, silent)), easy


def test_prompts_are_admitted_by_pass_at_k(tiny, data, spec, tmp_path):
    from stages.policy.schedules import pass_at_k_band

    counts = {"a": (4, 4), "b": (4, 2), "c": (4, 1), "d": (4, 0)}
    assert pass_at_k_band(counts, 1, [0.75, 0.5, 0.25, 0.0], 0.0) == ["a"] and pass_at_k_band(
        counts, 1, [0.75, 0.5, 0.25, 0.0], 0.3
    ) == ["a", "b"]
    # pass@2 of b: 5/6
    assert pass_at_k_band(counts, 1, [0.75, 0.5, 0.25, 0.0], 0.99) == list("abcd") and pass_at_k_band(
        counts, 2, [0.8, 0.0], 0.0
    ) == ["a", "b"]
    assert pass_at_k_band({"c": (4, 1), "d": (4, 0)}, 1, [0.75, 0.2, 0.0], 0.0) == ["c"], (
        "a band that admits none falls to the next"
    )
    with pytest.raises(ValueError, match="passk_k"):
        pass_at_k_band(counts, 5, [0.5], 0.0)
    rows, easy = rows_under_a_curriculum(
        tiny, data, spec, tmp_path, iterations=2, curriculum="pass_at_k", passk_bands=[0.9, 0.2]
    )
    first, later = ({r["prompt_id"] for r in rows if (r["iteration"] < 3) is early} for early in (True, False))
    assert first <= easy and len(first) == 6, (
        "the first half of the run sees what pass@1 >= 0.9 admits, none twice while others wait"
    )
    assert later - easy and not later & first, "then lower ones; those that the policy failed have left the band"
    with pytest.raises(Exception, match="must fall"):
        from stages.rl import resolve_preset

        resolve_preset(Config(curriculum="pass_at_k", passk_bands=[0.1, 0.5]))


def test_self_paced_rl_lets_harder_prompts_in(tiny, data, spec, tmp_path):
    """SELF-PACED: v = 1 iff the share of wrong answers is below 1/K, strictly; 1/K grows by a constant factor; the
    easiest where it would admit none.
    """
    from stages.policy.schedules import self_paced_admitted

    counts = {"a": (4, 4), "b": (4, 2), "c": (4, 1), "d": (4, 0)}
    assert self_paced_admitted(counts, (0.5, 2.0), 0.0) == ["a"] and self_paced_admitted(counts, (0.5, 2.0), 0.5) == [
        "a",
        "b",
        "c",
    ], "1/K is 1 half way: a loss of 1 waits"
    assert self_paced_admitted(counts, (0.5, 2.0), 0.51) == list("abcd") and self_paced_admitted(
        {"c": (4, 1), "d": (4, 0), "e": (8, 2)}, (0.1, 2.0), 0.0
    ) == ["c", "e"]
    rows, easy = rows_under_a_curriculum(
        tiny, data, spec, tmp_path, iterations=1, curriculum="self_paced", self_paced_thresholds=[0.4, 1.25]
    )
    first = {r["prompt_id"] for r in rows if r["iteration"] == 0}
    last = {r["prompt_id"] for r in rows if r["iteration"] == 5}
    assert first <= easy and last - easy, "a loss of 0.75 is let in once 1/K has passed it"
    with pytest.raises(Exception, match="must be above 0 and not fall"):
        from stages.rl import resolve_preset

        resolve_preset(Config(curriculum="self_paced", self_paced_thresholds=[0.8, 0.4]))


def test_prompts_outside_the_difficulty_band_are_left_out(tiny, data, spec, tmp_path):
    """DIFF-FILTER: bounds are inclusive, the counts of all prompts stay in prompt_stats, none in the band is an
    error.
    """
    known = list(open_dataset(data["prompts"]).iter_rows(split="train"))
    rates = {r["prompt_id"]: (k % 11) / 10 for k, r in enumerate(known)}
    stats = [
        complete_row(
            "prompt_stats/1",
            {
                "prompt_id": p,
                "iteration": 0,
                "n": 10,
                "mean_reward": 0.0,
                "reward_std": 0.0,
                "pass_at_1": rate,
                "mean_logprob": 0.0,
                "kept": True,
            },
            dataset="d",
            source="s",
            origin="ai",
        )
        for p, rate in rates.items()
    ]
    write_dataset(str(tmp_path / "stats"), "stats", "prompt_stats/1", stats)
    config = {
        **ANSWERS,
        "preset": "grpo",
        "beta": 0.0,
        "max_completion_length": 8,
        "prompts_per_step": 12,
        "difficulty_band": [0.2, 0.4],
        "rewards": [{"kind": "verifier"}],
    }
    made = spec("rl", config, {"model": tiny["policy"], "data": data["prompts"]}, "band")
    made["inputs"]["prompt_stats"] = {
        "kind": "dataset",
        "path": str(tmp_path / "stats"),
        "ref": "stats",
        "digest": "stats",
    }
    result = execute(made, silent)
    wanted = {p for p, rate in rates.items() if rate in (0.2, 0.3, 0.4)}
    assert {r["prompt_id"] for r in rows_of(result)} == wanted
    table = [r for r in rows_of(result, "prompt_stats") if r["iteration"] == -1]
    assert (
        len(table) == len(known)
        and {r["prompt_id"] for r in table if r["kept"]} == wanted
        and {r["drop_reason"] for r in table if not r["kept"]} == {"difficulty"}
    )
    with pytest.raises(Exception, match="no prompt has a pass rate"):
        execute(
            spec("rl", {**config, "passk_samples": 2}, {"model": tiny["policy"], "data": data["prompts"]}, "no-band"),
            silent,
        )


def test_debaters_are_paid_by_the_judge_and_trained_on_their_own_words(tiny, spec, tmp_path):
    from stages.reward.debate import JUDGE, case
    from stages.reward.judge import Judge, LocalJudge
    from stages.reward_models.reward_heads import RewardCard
    from stages.reward_models.reward_scorers import Response

    tasks = [
        complete_row(
            "prompts/1",
            {
                "prompt": [{"role": "user", "content": f"is {i} even?"}],
                "answer": "yes" if i % 2 == 0 else "no",
                "extra_json": '{"answers": ["yes", "no"]}',
            },
            dataset="d",
            source="s",
            origin="human",
        )
        for i in range(2)
    ]
    write_dataset(str(tmp_path / "tasks"), "tasks", "prompts/1", tasks)
    judged = [{"kind": "debate", "judge_prompt": "{context} {a} or {b}?"}]
    config = {
        **SMALL,
        "environment": "debate",
        "environment_options": {"rounds": 2, "instruction": "{answer} not {other}"},
        "max_steps": 1,
        "max_completion_length": 100,
        "rewards": judged,
    }
    made = spec(
        "rl", config, {"model": tiny["policy"], "data": str(tmp_path / "tasks"), "judge": tiny["other"]}, "debate"
    )
    result = execute(made, silent)
    rows, renderer = rows_of(result), renderer_for(tiny["policy"])
    metrics = json.loads(Path(made["workdir"], "metrics.jsonl").read_text().splitlines()[0])["metrics"]
    said = {}
    for one in rows_of(result, "trajectories"):
        said.setdefault(one["episode_id"], []).append(json.loads(one["action_json"])["content"])
    assert len(rows) == 2 * 2 * 4 and metrics["debate/rounds"] == 2.0
    judge = Judge(LocalJudge(tiny["other"], RewardCard(), "cpu"), "preference", prompt=judged[0]["judge_prompt"])
    right = []
    for start in range(0, 16, 8):
        for first, second in zip(rows[start : start + 4], rows[start + 4 : start + 8]):
            assert first["reward"] == pytest.approx(-second["reward"]) and abs(first["reward"]) <= 0.5
            task = next(t for t in tasks if t["prompt_id"] == first["prompt_id"])
            debate = {"answers": ["yes", "no"], "said": [said[first["row_id"]], said[second["row_id"]]]}
            p = judge.preferences(
                [
                    tuple(
                        Response(task["prompt"], [{"role": "assistant", "content": case(debate, seat)}])
                        for seat in (0, 1)
                    )
                ]
            )[0]
            assert first["reward"] == pytest.approx(p - 0.5, abs=1e-6)
            right.append(p > 0.5 if task["answer"] == "yes" else p < 0.5)
            for own, other, answer in ((first, second, "yes"), (second, first, "no")):
                assert renderer.decode(own["prompt_ids"]).startswith(f"system\n{answer} not ")
                heard = renderer.decode([t for t, tool in zip(own["completion_ids"], own["tool_mask"]) if tool])
                assert said[other["row_id"]][0] in heard and own["loss_mask"] == [1 - t for t in own["tool_mask"]]
        for side in (rows[start : start + 4], rows[start + 4 : start + 8]):
            returns = [r["reward"] for r in side]
            assert [r["advantages"][0] for r in side] == pytest.approx(
                [x - np.mean(returns) for x in returns], abs=1e-6
            ), "each side is a group of its own"
    assert (
        metrics["debate/judge_accuracy"] == pytest.approx(np.mean(right))
        and 0 <= metrics["debate/judge_accuracy_without"] <= 1
    )
    assert "{a}" in JUDGE and "{b}" in JUDGE
    with pytest.raises(Exception, match="two answers"):
        execute(
            spec("rl", config, {"model": tiny["policy"], "data": tiny["prompts"], "judge": tiny["other"]}, "no-answers")
            | {"config": {**config, "split": "test"}},
            silent,
        )
    with pytest.raises(Exception, match="a debate has two sides"):
        execute(
            spec(
                "rl",
                {**config, "advantage": "vine"},
                {"model": tiny["policy"], "data": str(tmp_path / "tasks"), "judge": tiny["other"]},
                "vine",
            ),
            silent,
        )


def test_a_debate_is_evaluated_before_a_judge(tiny, spec, tmp_path):
    """eval.debate: every debater is a row; judge accuracy and win rate of the first side follow from the judge's own
    answers.
    """
    from stages.generation import Sample
    from stages.reward.debate import case, outcome, won
    from stages.reward.judge import Judge, LocalJudge
    from stages.reward_models.reward_heads import RewardCard
    from stages.reward_models.reward_scorers import Response

    tasks = [
        complete_row(
            "prompts/1",
            {
                "prompt": [{"role": "user", "content": f"is {i} even?"}],
                "answer": None if i == 3 else "yes" if i % 2 == 0 else "no",
                "extra_json": '{"answers": ["yes", "no"]}',
            },
            dataset="d",
            source="s",
            origin="human",
            split="test",
        )
        for i in range(4)
    ]
    write_dataset(str(tmp_path / "tasks"), "tasks", "prompts/1", tasks)
    prompt = "{context} {a} or {b}?"
    config = {
        "environment": "debate",
        "environment_options": {"instruction": "{answer} not {other}"},
        "num_samples": 3,
        "greedy": False,
        "max_completion_length": 100,
        "chunk": 3,
        "rewards": [{"kind": "debate", "judge_prompt": prompt}],
    }
    built = spec(
        "evaluate",
        config,
        {"model": tiny["policy"], "prompts": str(tmp_path / "tasks"), "judge": tiny["other"]},
        "debate",
    )
    result = execute(built, silent)
    rows = [{**r, **json.loads(r["extra_json"])} for r in rows_of(result, "samples")]
    assert len(rows) == 4 * 3 * 2 and len({(r["item_id"], r["sample_idx"]) for r in rows}) == len(rows)
    judge = Judge(LocalJudge(tiny["other"], RewardCard(), "cpu"), "preference", prompt=prompt)
    found, without, first = {}, {}, {}
    for task in tasks:
        for k in range(3):
            pair = [
                next(r for r in rows if r["prompt_id"] == task["prompt_id"] and r["sample_idx"] == 2 * k + seat)
                for seat in (0, 1)
            ]
            assert (
                [r["side"] for r in pair] == ["yes", "no"]
                and all(r["turns"] == 2 for r in pair)
                and pair[0]["won"] + pair[1]["won"] == 1
            )
            debate = {
                "answers": ["yes", "no"],
                "said": [[m["content"] for m in r["transcript"] if m["role"] == "assistant"] for r in pair],
            }
            wins = [
                won(
                    judge.preferences(
                        [
                            tuple(
                                Response(task["prompt"], [{"role": "assistant", "content": case(debate, seat, heard)}])
                                for seat in (0, 1)
                            )
                        ]
                    )[0]
                )
                for heard in (True, False)
            ]
            assert pair[0]["won"] == wins[0] and pair[0]["won_without"] == wins[1]
            first.setdefault(task["prompt_id"], []).append(wins[0])
            if task["answer"]:
                for into, win in ((found, wins[0]), (without, wins[1])):
                    into.setdefault(task["prompt_id"], []).append(win if task["answer"] == "yes" else 1 - win)
            assert all(
                r.get("right") == (None if task["answer"] is None else r["side"] == task["answer"]) for r in pair
            )
    for name, values in (
        ("judge_accuracy", found),
        ("judge_accuracy_without", without),
        ("first_side_win_rate", first),
    ):
        assert result["summary"][name] == pytest.approx(np.mean([np.mean(v) for v in values.values()])), name
    assert len(found) == 3 and len(first) == 4
    sample = Sample.__new__(Sample)
    sample.debate, sample.prompt, sample.parts = (
        {"answers": ["yes", "no"], "seat": 1},
        {"answer": "no"},
        {"debate": 0.0, "debate/without": float("nan")},
    )
    assert outcome(sample, "debate") == {"seat": 1, "side": "no", "right": True, "won": 0.5}
    with pytest.raises(Exception, match="kind: debate"):
        execute(
            spec(
                "evaluate",
                {**config, "rewards": [{"kind": "verifier"}]},
                {"model": tiny["policy"], "prompts": str(tmp_path / "tasks")},
                "unjudged",
            ),
            silent,
        )
