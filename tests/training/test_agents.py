"""Multi-turn RL: transcripts that grow and are never tokenised again, masks, turn credit, environments that fail, evaluation of agents."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from stages.agents import Agent
from stages.chat import renderer_for
from stages.environments import EnvironmentFailure, EnvironmentLimits, EnvironmentPool
from stages.generation import sampling_params
from stages.harness import execute
from stages.modeling import load_policy
from stages.rl import Config
from stages.sampler import Sampler
from storage.datasets import open_dataset, write_dataset
from storage.schema import complete_row

COUNTDOWN = "tests.training.environments:Countdown"
SMALL = {"preset": "agent", "environment": COUNTDOWN, "max_steps": 2, "prompts_per_step": 2, "num_generations": 4, "max_completion_length": 120, "max_turn_length": 8,
         "learning_rate": 1e-3, "max_turns": 4}


def train(spec, tiny, data, name, config, **inputs):
    made = spec("rl", {**SMALL, **config}, {"model": tiny["policy"], "data": data["prompts"]}, name)
    for key, path in inputs.items():
        made["inputs"][key] = {"kind": "model", "path": path, "ref": key, "digest": key}
    result = execute(made, lambda event: None)
    return result, [json.loads(line)["metrics"] for line in Path(made["workdir"], "metrics.jsonl").read_text().splitlines()]


def rows_of(result, name="rollouts"):
    return list(open_dataset(result["outputs"][name]["path"]).iter_rows())


def spans(row):
    return [(t["start"], t["end"]) for t in row["turns"]]


def test_the_transcript_is_what_was_sampled_and_what_the_template_says(tiny, data, spec):
    """Turns are the policy's tokens, what lies between is the template's rendering of the observation, and log-probs are the trainer's."""
    result, metrics = train(spec, tiny, data, "transcript", {"environment_options": {"turns": 3}})
    renderer, model = renderer_for(tiny["policy"]), load_policy(tiny["policy"])
    rows = [r for r in rows_of(result) if r["iteration"] == 0]
    assert any(len(r["turns"]) == 3 for r in rows)
    prompts = {r["prompt_id"]: r["prompt"] for r in open_dataset(data["prompts"]).iter_rows()}
    acts = {}
    for one in rows_of(result, "trajectories"):
        acts.setdefault(one["episode_id"], []).append(one)
    for row in rows:
        assert row["prompt_ids"] == renderer.prompt_ids([{"role": "system", "content": "count 3"}, *prompts[row["prompt_id"]]])
        inside = [False] * row["length"]
        for start, end in spans(row):
            inside[start:end] = [True] * (end - start)
        assert [1 - t for t in row["tool_mask"]] == [int(x) for x in inside] == row["loss_mask"]
        for (_, end), (start, _), turn in zip(spans(row), spans(row)[1:], acts[row["row_id"]]):
            between, closed = row["completion_ids"][end:start], row["completion_ids"][end - 1] == renderer.turn_end_id
            said = renderer.decode(between, skip_special_tokens=False)
            content = json.loads(turn["next_observation_json"])[0]["content"]
            assert said == ("" if closed else "<|im_end|>") + f"\n<|im_start|>tool\n{content}<|im_end|>\n<|im_start|>assistant\n"
            assert between.count(renderer.turn_end_id) == 1 + (not closed), "a special token in an observation must stay ordinary text"
        ids = torch.tensor([row["prompt_ids"] + row["completion_ids"]])
        logps = torch.log_softmax(model(input_ids=ids, use_cache=False).logits[0].double(), -1)[len(row["prompt_ids"]) - 1:-1].gather(1, ids[0, len(row["prompt_ids"]):, None])[:, 0]
        own = np.array(row["tool_mask"]) == 0
        assert np.allclose(np.array(row["logp_old"])[own], logps.detach().numpy()[own], atol=2e-5)
    assert metrics[0]["policy/ratio"] == pytest.approx(1.0, abs=1e-5)


def test_turns_as_the_tokenizer_writes_them_are_the_conversation(tiny):
    """Where every turn's tokens are the tokenizer's own, prompt, turns and observations are the ids and the mask that SFT trains on."""
    renderer = renderer_for(tiny["policy"])
    messages = [{"role": "user", "content": "what is 2 plus 3?"}, {"role": "assistant", "content": "calculator(expression='2 + 3')"},
                {"role": "tool", "content": "5"}, {"role": "tool", "content": "x <|im_end|> y"}, {"role": "assistant", "content": "Answer: 5."}]
    whole = renderer.conversation(messages)
    ids, mask = renderer.prompt_ids(messages[:1]), []
    mask = [0] * len(ids)
    for text, seen in (("calculator(expression='2 + 3')", messages[2:4]), ("Answer: 5.", None)):
        turn = renderer.tokenizer(text, add_special_tokens=False)["input_ids"] + [renderer.turn_end_id]
        ids, mask = ids + turn, mask + [1] * len(turn)
        if seen:
            between = renderer.observation_ids(seen, closed=True)
            ids, mask = ids + between, mask + [0] * len(between)
    assert whole.ids[:len(ids)] == ids and whole.mask[:len(ids)] == mask and not any(whole.mask[len(ids):])


def test_why_trajectories_end(tiny, data, spec):
    """A goal and a stop terminate; the turn limit and the context limit truncate."""
    for name, config, reason, terminated in (
            ("goal", {"environment_options": {"turns": 9, "goal_after": 2}, "max_turns": 4}, "goal", True), ("stop", {"environment_options": {"turns": 2}}, "stop", True),
            ("turns", {"environment_options": {"turns": 9}, "max_turns": 2}, "turn_limit", False),
            ("room", {"environment_options": {"turns": 9}, "max_turns": 9, "max_completion_length": 70}, "length", False)):
        result, metrics = train(spec, tiny, data, f"end-{name}", {**config, "max_steps": 1, "max_turn_length": None if name == "room" else 60, "max_completion_length": 200,
                                                                    **({"max_completion_length": 70} if name == "room" else {})})
        rows = [r for r in rows_of(result) if r["finish_reason"] == reason]
        assert rows and all(r["terminated"] is terminated and r["truncated"] is not terminated for r in rows), name
        assert all(r["length"] <= 200 for r in rows_of(result)) and metrics[0][f"agent/finish_{reason}"] == len(rows) / 8
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
            advantages[start:end] = value - (np.mean(others) if len(others) > 1 else np.mean([returns(r)[0] for r in group]))
        out.append(advantages)
    return out


def test_an_update_can_be_computed_again_from_the_rollouts(tiny, data, spec):
    """Turn returns, their group baseline, the loss on action tokens alone: weights after one SGD-like step follow from the dataset."""
    result, metrics = train(spec, tiny, data, "again", {"environment_options": {"turns": 3}, "gamma": 0.9, "max_steps": 1})
    rows = rows_of(result)
    expected = advantage_by_hand(rows, 0.9)
    for row, advantages in zip(rows, expected):
        assert np.allclose(row["advantages"], advantages, atol=1e-6)
        assert all(a == 0 for a, t in zip(row["advantages"], row["tool_mask"]) if t)
    model = load_policy(tiny["policy"])
    total, count = 0.0, 0
    for row, advantages in zip(rows, expected):
        ids, n = torch.tensor([row["prompt_ids"] + row["completion_ids"]]), len(row["prompt_ids"])
        logps = torch.log_softmax(model(input_ids=ids, use_cache=False).logits[0].double(), -1)[n - 1:-1].gather(1, ids[0, n:, None])[:, 0]
        own = torch.tensor(row["tool_mask"]) == 0
        total, count = total - (torch.tensor(advantages) * torch.exp(logps - logps.detach()))[own].sum(), count + int(own.sum())
    grads = torch.autograd.grad(total / count, list(model.parameters()))
    assert metrics[0]["train/grad_norm"] == pytest.approx(float(sum((g ** 2).sum() for g in grads) ** 0.5), rel=1e-3)


def test_gae_and_process_credit_run_over_action_tokens(tiny, data, spec):
    config = {"preset": "ppo", "kl_coef": 0.0, "num_iterations": 1, "whiten": False, "max_steps": 1, "environment_options": {"turns": 3}, "critic_learning_rate": 1e-3}
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
    rows = rows_of(train(spec, tiny, data, "process", {"preset": "grpo_process", "beta": 0.0, "max_steps": 1, "environment_options": {"turns": 3}})[0])
    flat = {p: [t["reward"] for r in rows if r["prompt_id"] == p for t in r["turns"]] for p in {r["prompt_id"] for r in rows}}
    row = next(r for r in rows if len(r["turns"]) > 1)
    values = flat[row["prompt_id"]]
    expected = sum((t["reward"] - np.mean(values)) / (np.std(values, ddof=1) + 1e-4) for t in row["turns"])
    assert row["advantages"][0] == pytest.approx(expected, rel=1e-4)


def test_a_failing_environment_costs_its_own_trajectory(tiny, data, spec, tmp_path):
    prompts = [complete_row("prompts/1", {"prompt": [{"role": "user", "content": f"{'fail' if i % 2 else 'fine'} {i}"}]}, dataset="d", source="s", origin="human") for i in range(4)]
    write_dataset(str(tmp_path / "tasks"), "tasks", "prompts/1", prompts)
    for how, said in (("hang", "time-out"), ("crash", "exit status 7"), ("raise", "no more"), ("eat", "memory")):
        made = spec("rl", {**SMALL, "prompts_per_step": 4, "max_steps": 1, "environment_options": {"turns": 3, "fail": {"1": how}}, "environment_timeout_s": 1.5,
                           "environment_memory_mib": 256}, {"model": tiny["policy"], "data": str(tmp_path / "tasks")}, f"fail-{how}")
        result = execute(made, lambda event: None)
        rows = rows_of(result)
        bad = [r for r in rows if r["finish_reason"] == "failure"]
        assert bad and all(r["reward_tier"] == "unscorable" and not any(r["loss_mask"]) and len(r["turns"]) == 2 for r in bad)
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


def test_what_an_environment_refuses(tiny, data, spec):
    with pytest.raises(Exception, match="PYTHONPATH"):
        Config(environment="nowhere:Nothing")
    with pytest.raises(Exception, match="make reset a function of"):
        train(spec, tiny, data, "moody", {"environment": "tests.training.environments:Moody"})
    with pytest.raises(Exception, match="scores trajectories in an environment"):
        train(spec, tiny, data, "no-environment", {"environment": "", "preset": "grpo", "rewards": [{"kind": "milestones"}]})
    with pytest.raises(Exception, match="credits the turns"):
        train(spec, tiny, data, "no-turns", {"environment": ""})
    assert Config(environment=COUNTDOWN).environment_digest and Config(environment=COUNTDOWN).rewards[0].kind == "environment"
    with pytest.raises(Exception, match="not the one that this run was started with"):
        Config(environment=COUNTDOWN, environment_digest="another")


def test_trajectories_do_not_depend_on_their_company(tiny, data):
    """The same tasks and seeds in another order and in other batches give the same trajectories."""
    config = Config(environment=COUNTDOWN, environment_options={"turns": 3}, max_turns=4, max_turn_length=8, max_completion_length=120)
    renderer, rows = renderer_for(tiny["policy"]), [(r, []) for r in open_dataset(data["prompts"]).iter_rows()][:4]
    sampler, agent = Sampler(load_policy(tiny["policy"]), renderer.tokenizer), Agent(config, renderer)
    params, seeds = sampling_params(config, renderer), [[10 * i, 10 * i + 1] for i in range(4)]
    together = agent.sample(sampler, rows, params, seeds)
    alone = [agent.sample(sampler, [rows[i]], params, [seeds[i]])[0] for i in (3, 0, 2, 1)]
    agent.close()
    for i, group in zip((3, 0, 2, 1), alone):
        assert [s.ids for s in group] == [s.ids for s in together[i]] and [s.turns for s in group] == [s.turns for s in together[i]]
        assert np.allclose(sum((s.logps for s in group), []), sum((s.logps for s in together[i]), []), atol=1e-5)
