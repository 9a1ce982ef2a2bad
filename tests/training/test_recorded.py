"""An RL run that is computed again from its own rollouts: the same bytes, and every change to the record is found."""

import json
from pathlib import Path

import pytest

from stages.harness import execute
from stages.rl import Config, check
from stages.rollouts.recorded import difference
from stages.training import TrainingError
from storage.datasets import open_dataset, write_dataset
from tests.chat_server import chat_server
from tests.common import written
from tests.training.test_agents import SMALL as ACTING
from tests.training.test_grape import GRAPE, RUBRIC, prompts, rubric, user  # noqa: F401
from tests.training.test_rl_parts import LONG, rl, rows_of  # noqa: F401
from tests.training.test_rl_rules import SPREAD

PAID = {
    "max_steps": 4,
    "reward_override": "none",
    "rewards": [SPREAD, {"name": "short", "kind": "length", "weight": -0.3}],
    "learning_rate": 1e-2,
}

#: What an update reads of the completions and of the iterations before.
CASES = {
    "grpo": {"preset": "grpo", "beta": 0.1, "num_minibatches": 2, "num_iterations": 2, "max_steps": 8},
    "dapo, batches drawn again": {"preset": "dapo", "filter_groups_metric": "reward_std", "max_num_gen_batches": 0},
    "ppo": {"preset": "ppo", "critic_learning_rate": 1e-2, "kl_controller": "adaptive_ziegler", "target_kl": 0.01},
    "moving baseline, running scale": {"preset": "reinforce", "baseline": "moving_average", "reward_norm": "whiten"},
    "replayed": {"preset": "topr", "replay_fraction": 0.5, "replay_window": 2, "max_steps": 5},
    "sampled ahead": {"preset": "topr", "async_rollouts": True},
    "filters, so that log-probs are the trainer's": {"preset": "rloo", "top_k": 5},
    "a control experiment": {"preset": "grpo", "reward_override": "random"},
    "moving reference": {"preset": "grpo", "beta": 0.1, "ref_mode": "ema"},
    "components in the group, long ones pay": {
        "preset": "grpo",
        "multi_objective_aggregation": "normalize_then_sum",
        "soft_punish_cache": 3,
    },
    "table of baselines": {"preset": "a_lol", "rewards": [{"name": "r", "kind": "python", "source": LONG}]},
}

#: What is read beside the completions, and drawn again: setting that the log names, and settings.
DRAWN_AGAIN = {
    "greedy": ("baseline=greedy", {"preset": "remax", "soft_punish_cache": 3}),
    "greedy, random rewards": ("baseline=greedy", {"preset": "remax", "reward_override": "random"}),
    "greedy, replayed": ("baseline=greedy", {**CASES["replayed"], "baseline": "greedy"}),
    "greedy, sampled ahead": ("baseline=greedy", {**CASES["sampled ahead"], "baseline": "greedy", "max_steps": 5}),
    "greedy, under a multiplier, batches drawn again": (
        "baseline=greedy",
        {
            "preset": "remax",
            "dynamic_sampling": True,
            "filter_groups_metric": "reward_std",
            "max_num_gen_batches": 0,
            "num_generations": 2,
            "rewards": [SPREAD, {"name": "short", "kind": "length", "at_least": 0.5, "multiplier_step": 0.3}],
        },
    ),
    "continuations": ("advantage=vine", {"preset": "vineppo", "vine_samples": 2, "step_separator": "e"}),
    "mixture": ("opponent=mixture", {"preset": "nash_md"}),
    "average": ("opponent=ema", {"preset": "nash_md", "opponent": "ema", "opponent_decay": 0.5}),
    "critic's warm-up on prompts that pass rates choose": (
        "behind pass rates; the completions of critic_warmup_steps",
        {
            "preset": "ppo",
            "critic_learning_rate": 1e-2,
            "critic_warmup_steps": 2,
            "curriculum": "pass_at_k",
            "passk_k": 1,
            "passk_samples": 2,
            "rewards": [{"name": "r", "kind": "python", "source": LONG}],
        },
    ),
    "critic's warm-up on a band": (
        "behind pass rates; the completions of critic_warmup_steps",
        {
            "preset": "ppo",
            "critic_learning_rate": 1e-2,
            "critic_warmup_steps": 1,
            "difficulty_band": [0.1, 1.0],
            "passk_samples": 2,
            "rewards": [{"name": "r", "kind": "python", "source": LONG}],
        },
    ),
}


def again(rl, config, result, name="again", **inputs):  # noqa: F811
    return rl(name, config, recorded=inputs.pop("recorded", None) or result["outputs"]["rollouts"]["path"], **inputs)


def weights(result):
    return Path(result["outputs"]["model"]["path"], "model.safetensors").read_bytes()


def same_run(rl, tiny, config, **inputs):  # noqa: F811
    """Runs ``config`` and computes it again: the same model, rollouts and metrics; (first, metrics, again,
    metrics, events)."""
    first, then = rl("first", config, **inputs)
    events, one = [], rl.made("again", config, {"recorded": first["outputs"]["rollouts"]["path"], **inputs})
    result = execute(one, events.append)
    now = [json.loads(line)["metrics"] for line in Path(one["workdir"], "metrics.jsonl").read_text().splitlines()]
    assert weights(result) == weights(first) != Path(tiny["policy"], "model.safetensors").read_bytes()
    assert rows_of(result) == rows_of(first)
    assert result["summary"]["recorded/differing"] == 0 and result["summary"]["recorded/held"] > 100
    trained = [{k: v for k, v in one.items() if k.startswith(("loss", "policy", "reward"))} for one in then]
    # what dropped groups say is not in the rollouts
    for one, other in zip(trained, now, strict=True):
        assert {k: other[k] for k in one if k in other} == {k: v for k, v in one.items() if k in other}
        assert {"loss", "reward"} <= one.keys() & other.keys() or "reward" not in one
    assert not [w for w in result["warnings"] if w["code"] == "recorded_differs"]
    return first, then, result, now, events


@pytest.mark.parametrize("case", CASES)
def test_a_run_is_computed_again_from_its_rollouts(rl, tiny, case):  # noqa: F811
    same_run(rl, tiny, {**PAID, **CASES[case]})


@pytest.mark.parametrize("case", DRAWN_AGAIN)
def test_what_rollouts_do_not_hold_is_drawn_again(rl, tiny, case):  # noqa: F811
    says, config = DRAWN_AGAIN[case]
    config = {**PAID, **config}
    _, _, result, now, events = same_run(rl, tiny, config)
    (said,) = [e["text"] for e in events if e["event"] == "log" and e["text"].startswith("sampled again")]
    assert says in said
    again_by_iteration = [one["recorded/sampled_again"] for one in now if "recorded/sampled_again" in one]
    assert result["summary"]["recorded/sampled_again"] == sum(again_by_iteration) > 0
    assert len(again_by_iteration) == len({r["iteration"] for r in rows_of(result)})


@pytest.fixture(scope="module")
def first_of():
    """``first_of(run, config)``: what a run of these settings gave, which is done once for all tests that change its
    record, each in a copy of its own.
    """
    done = {}

    def first(run, config):
        key = json.dumps(config, sort_keys=True)
        if key not in done:
            done[key] = run("first", config)[0]
        return done[key]

    return first


def table_of(result):
    return json.loads(Path(next(r["table"] for r in result["reports"] if r["name"] == "recorded")).read_text())


def changed_rows(path, to, change):
    """The rollouts at ``path`` with ``change(rows)`` made to them, at ``to``."""
    rows = list(open_dataset(path).iter_rows())
    change(rows)
    write_dataset(str(to), "rollouts", "rollouts/1", rows)
    return str(to)


def changed(path, to, change):
    """The rollouts at ``path`` with ``change(row)`` made to their first row of the second iteration, at ``to``."""
    return changed_rows(path, to, lambda rows: change(next(r for r in rows if r["iteration"] == 1)))


def other_token(row):
    row["completion_ids"][0] = row["completion_ids"][0] % 7 + 10


def no_credit(row):
    row.update(advantages=[0.5] * len(row["advantages"]))


GRPO = {"preset": "grpo", "beta": 0.1}


@pytest.mark.parametrize(
    "config, change, what",
    [
        (GRPO, lambda r: r["reward_components"][0].update(value=9.0), "reward spread, scored again"),
        (GRPO, no_credit, "advantages"),
        (GRPO, lambda r: r.update(logp_ref=[v - 0.25 for v in r["logp_ref"]]), "logp_ref"),
        (GRPO, lambda r: r.update(loss_mask=[0] * len(r["loss_mask"])), "loss_mask"),
        (GRPO, lambda r: r.update(reward=r["reward"] + 1e-9), "reward"),
        (DRAWN_AGAIN["greedy"][1], no_credit, "advantages"),
        (DRAWN_AGAIN["mixture"][1], no_credit, "advantages"),
        (DRAWN_AGAIN["continuations"][1], lambda r: r.update(step_values=[9.0] * len(r["step_values"])), "step_values"),
    ],
)
def test_what_was_changed_in_the_record_is_named(rl, first_of, tmp_path, config, change, what):  # noqa: F811
    config = {**PAID, **config, "max_steps": 2}
    first = first_of(rl, config)
    path = changed(first["outputs"]["rollouts"]["path"], tmp_path / "changed", change)
    result, _ = again(rl, config, first, recorded=path)
    (told,) = [w["text"] for w in result["warnings"] if w["code"] == "recorded_differs"]
    assert f"{what}: 1 of" in told and result["summary"]["recorded/differing"] >= 1
    row = next(one for one in table_of(result) if one["what"] == what)
    assert row["differ"] == 1 and row["largest"] > 0 and row["first"].startswith(("iteration 1, ", "prompt "))


def test_what_is_drawn_again_is_drawn_by_the_seeds_of_then(rl, first_of, tmp_path):  # noqa: F811
    config = {**PAID, **DRAWN_AGAIN["mixture"][1], "max_steps": 2}
    first = first_of(rl, config)
    for name, seed in (("number", 5), ("none", None)):

        def other_seeds(rows):
            for row in (r for r in rows if r["iteration"] == 1):
                row["gen"]["rng_seed"] = seed

        path = changed_rows(first["outputs"]["rollouts"]["path"], tmp_path / name, other_seeds)
        with pytest.raises(TrainingError, match="Iteration 1 .*gen.rng_seed is not one of the seeds.*--recorded"):
            again(rl, config, first, name, recorded=path)


ENVIRONMENT = {
    **{k: v for k, v in {**PAID, **ACTING}.items() if k not in ("learning_rate", "rewards")},
    "environment_options": {"turns": 3},
    "learning_rate": 1e-2,
    "max_steps": 3,
    "rewards": [{"kind": "environment"}, {**SPREAD, "weight": 0.1}],
}
DEBATE = {
    "preset": "dr_grpo",
    "environment": "debate",
    "environment_options": {"rounds": 2, "instruction": "{answer} not {other}"},
    "max_completion_length": 100,
    "rewards": [{"kind": "debate", "judge_prompt": "{context} {a} or {b}?"}],
}
PLAYED = {
    "agent": {},
    "failures": {"environment_options": {"turns": 3, "fail": {"1": "raise"}}, "prompts_per_step": 4},
    "goals": {"environment_options": {"turns": 3, "goal_after": 2}, "preset": "ppo", "critic_learning_rate": 1e-2},
    "cut": {"max_completion_length": 90, "truncation_policy": "score"},
    "stop strings": {"stop_strings": ["e", "a"]},
    "replayed": {"preset": "topr", "replay_fraction": 0.5, "replay_window": 2},
    "sampled ahead": {"preset": "topr", "async_rollouts": True},
    "greedy in the same world": {"preset": "remax", "kl_coef": 0.0},
    "continuations": {"preset": "vineppo", "vine_samples": 2},
    "random rewards": {"reward_override": "random"},
    "debate": DEBATE,
}


@pytest.fixture()
def tasks(tmp_path):
    """Prompts for the environments: of some the environment fails, or does not start."""
    asked = ["is 1 even?", "is fail 2", "is 3 even?", "is reset 4", "is 5 even?", "is 6 even?"]
    rows = [{"prompt": user(text), "answer": "yes", "extra_json": '{"answers": ["yes", "no"]}'} for text in asked]
    written(str(tmp_path / "tasks"), "tasks", "prompts/1", rows)
    return str(tmp_path / "tasks")


@pytest.mark.parametrize("case", PLAYED)
def test_trajectories_are_played_again_in_their_environment(rl, tiny, tasks, case):  # noqa: F811
    config = {**ENVIRONMENT, **PLAYED[case]}
    judge = {"judge": tiny["other"]} if case == "debate" else {}
    first, then, result, now, _ = same_run(rl, tiny, config, data=tasks, **judge)
    assert rows_of(result, "trajectories") == rows_of(first, "trajectories") != []
    for one, other in zip(then, now, strict=True):
        names = [k for k in one if k.startswith(("agent", "tools", "debate", "completions/mean"))]
        assert {k: other[k] for k in names} == {k: one[k] for k in names} and (names or "reward" not in one)
    held = {row["what"]: row for row in table_of(result)}
    lost = [r for r in rows_of(first) if r["finish_reason"] == "failure"]
    assert lost or case != "failures"
    assert held["observations of the environment"]["held"] == len(rows_of(first)) - len(lost)
    if case != "debate":
        assert held["reward environment, scored again"]["held"] > 0


def in_turn(row):
    """Says another observation after the first turn."""
    at = next(t for t, on in enumerate(row["tool_mask"]) if on)
    row["completion_ids"][at] = row["completion_ids"][at] % 7 + 10


@pytest.mark.parametrize(
    "change, what",
    [
        (in_turn, "observations of the environment"),
        (lambda r: r.update(prompt_ids=[7, *r["prompt_ids"]]), "prompt_ids of the environment"),
        (lambda r: r.update(finish_reason="goal"), "finish_reason of the environment"),
        (lambda r: r["turns"][1].update(events=["turn2", "goal_verified"]), "turns"),
        (lambda r: r["turns"].pop(), "observations of the environment"),
        (lambda r: r["reward_components"][0].update(value=9.0), "reward environment, scored again"),
        (no_credit, "advantages"),
    ],
)
def test_what_was_changed_of_a_trajectory_is_named(rl, first_of, tmp_path, change, what):  # noqa: F811
    config = {**ENVIRONMENT, "max_steps": 2}
    first = first_of(rl, config)
    path = changed(first["outputs"]["rollouts"]["path"], tmp_path / "changed", change)
    try:
        result, _ = again(rl, config, first, recorded=path)
    except TrainingError as error:  # other tokens have other log-probs
        assert what in str(error), error
        return
    (told,) = [w["text"] for w in result["warnings"] if w["code"] == "recorded_differs"]
    assert f"{what}: 1 of" in told


def test_an_environment_that_answers_otherwise_is_named_and_the_run_goes_on_with_what_it_said_then(rl, tiny):  # noqa: F811
    config = {**ENVIRONMENT, "environment": "tests.training.environments:Forgetful", "environment_options": {}}
    first, _ = rl("first", config)
    result, _ = again(rl, config, first)
    (told,) = [w["text"] for w in result["warnings"] if w["code"] == "recorded_differs"]
    assert told.startswith(f"observations of the environment: {len(rows_of(first))} of {len(rows_of(first))} differ")
    assert result["summary"]["recorded/differing"] == 1
    assert weights(result) == weights(first) != Path(tiny["policy"], "model.safetensors").read_bytes()
    assert rows_of(result) == rows_of(first)


MEMBERS = {**GRAPE, "mode_mix": "share", "improve_share": 0.5, "sft_member": "append", "learning_rate": 1e-2}


@pytest.fixture()
def grape(tiny, spec, prompts, rubric, tmp_path):  # noqa: F811
    """``grape(name, config, **inputs)`` -> (result, metrics) of a run whose rubric asks questions of a kind with a
    generation prompt, with SFT answers to half of the prompts where they join."""
    document = json.loads(json.dumps(RUBRIC))
    document["categories"]["double"]["generation_prompt"] = "Be brief."
    answers = [
        {"messages": user(f"{i}+{i}?") + [{"role": "assistant", "content": f"{2 * i}"}], "train_turns": [1]}
        for i in (0, 1)
    ]
    written(str(tmp_path / "answers"), "answers", "demonstrations/1", answers)
    given = {"model": tiny["policy"], "data": prompts, "rubric": rubric(document), "reward_model": tiny["reward"]}

    def run(name, config, **inputs):
        config = {k: v for k, v in config.items() if k != "improve_share" or config["mode_mix"] != "fresh"}
        sft = {} if config.get("sft_member", "none") == "none" else {"sft": str(tmp_path / "answers")}
        one = spec("rl", config, {**given, **sft, **inputs}, name)
        result = execute(one, lambda event: None)
        lines = Path(one["workdir"], "metrics.jsonl").read_text().splitlines()
        return result, [json.loads(line)["metrics"] for line in lines]

    return run


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"sft_member": "replace", "mode_mix": "probability", "prior_choice": "best"},
        {"conditioning": "sampling", "sft_member": "none"},
        {"conditioning": "sampling", "sft_in_loss": False},
        {"mode_mix": "fresh", "sft_member": "none"},
    ],
)
def test_improved_and_sft_answers_are_taken_from_the_record(grape, tiny, more):
    config = {**MEMBERS, **more}
    first, then = grape("first", config)
    modes = {json.loads(r["extra_json"])["mode"] for r in rows_of(first)}
    expected = {"improve": config["mode_mix"] != "fresh", "sft": config["sft_member"] != "none"}
    assert modes == {"fresh"} | {mode for mode, on in expected.items() if on}
    result, now = grape("again", config, recorded=first["outputs"]["rollouts"]["path"])
    assert weights(result) == weights(first) != Path(tiny["policy"], "model.safetensors").read_bytes()
    assert rows_of(result) == rows_of(first) and result["summary"]["recorded/differing"] == 0
    for one, other in zip(then, now, strict=True):
        names = [k for k in one if k.startswith(("loss", "policy", "reward", "members"))]
        assert {k: other[k] for k in names} == {k: one[k] for k in names}
    held = {row["what"]: row["held"] for row in table_of(result)}
    apart = [r for r in rows_of(first) if r["sampling_prompt_id"] and json.loads(r["extra_json"])["mode"] == "fresh"]
    assert held["sampling_prompt_id"] > len(apart) > 0
    # nobody sampled SFT answers, and requests to improve are in the rollouts where they are trained behind them
    unknown = ["sft"] if config.get("conditioning") == "sampling" else ["sft", "improve"]
    sampled = [r for r in rows_of(first) if json.loads(r["extra_json"])["mode"] not in unknown]
    assert held["logp under the weights of then"] == len(sampled)


def of_mode(mode, change):
    return lambda rows: change(next(r for r in rows if r["iteration"] == 1 and f'"mode": "{mode}"' in r["extra_json"]))


@pytest.mark.parametrize(
    "more, mode, change, what",
    [
        ({}, "sft", other_token, "completion_ids of the input sft: 1 of"),
        ({}, "improve", no_credit, "advantages: 1 of"),
        ({}, "improve", other_token, "logp_old: 1 of"),
        (
            {"mode_mix": "fresh", "sft_member": "none"},
            "fresh",
            lambda r: r.update(sampling_prompt_id="f" * 64),
            "sampling_prompt_id: 1 of",
        ),
    ],
)
def test_what_was_changed_of_members_is_named(grape, first_of, tmp_path, more, mode, change, what):
    config = {**MEMBERS, "max_steps": 2, **more}
    first = first_of(grape, config)
    path = changed_rows(first["outputs"]["rollouts"]["path"], tmp_path / "changed", of_mode(mode, change))
    result, _ = grape("again", config, recorded=path)
    (told,) = [w["text"] for w in result["warnings"] if w["code"] == "recorded_differs"]
    assert what in told


def test_improved_answers_of_other_weights_are_refused(grape, tmp_path):
    """conditioning=sampling: what they were sampled from is in the rollouts."""
    config = {**MEMBERS, "max_steps": 2, "conditioning": "sampling", "sft_member": "none"}
    first, _ = grape("first", config)
    path = changed_rows(first["outputs"]["rollouts"]["path"], tmp_path / "changed", of_mode("improve", other_token))
    with pytest.raises(TrainingError, match="Iteration 1 .* not sampled from these weights"):
        grape("again", config, recorded=path)


def test_rollouts_of_other_weights_are_refused_where_they_begin(rl, tmp_path):  # noqa: F811
    config = {**PAID, "preset": "grpo", "max_steps": 3}
    first, _ = rl("first", config)
    with pytest.raises(TrainingError, match="Iteration 1 .* not sampled from these weights"):
        again(rl, {**config, "learning_rate": 2e-2}, first, "faster")
    path = changed(first["outputs"]["rollouts"]["path"], tmp_path / "changed", other_token)
    with pytest.raises(TrainingError, match="Iteration 1 .* not sampled from these weights"):
        again(rl, config, first, "other token", recorded=path)
    with pytest.raises(TrainingError, match="ends before iteration 3"):
        again(rl, {**config, "max_steps": 4}, first, "longer")
    result, _ = again(rl, {**config, "max_steps": 2}, first, "shorter")
    assert result["summary"]["recorded/differing"] == 0


@pytest.mark.parametrize(
    "config",
    [
        CASES["replayed"],
        DRAWN_AGAIN["greedy, replayed"][1],
        DRAWN_AGAIN["greedy, sampled ahead"][1],
        {**ENVIRONMENT, **CASES["replayed"]},
    ],
)
def test_it_goes_on_where_it_was_stopped(rl, monkeypatch, config):  # noqa: F811
    config = {**PAID, **config}
    first, _ = rl("first", config)
    monkeypatch.setenv("POSTTRAIN_CHECKPOINT_SECONDS", "0")
    one = rl.made("again", config, {"recorded": first["outputs"]["rollouts"]["path"]})

    class Stopped(Exception):
        pass

    def stop(event):
        if event.get("event") == "metric" and event.get("step", 0) >= 3:
            raise Stopped

    with pytest.raises(Stopped):
        execute(one, stop)
    result = execute(one, lambda event: None)
    assert result["resumed_from"] and weights(result) == weights(first) and rows_of(result) == rows_of(first)
    whole, _ = again(rl, config, first, "whole")
    assert result["summary"] == whole["summary"]


JUDGE = {"kind": "judge", "name": "j", "endpoint": "http://127.0.0.1:9/v1", "endpoint_model": "m"}


@pytest.mark.parametrize(
    "config, says",
    [
        (
            {"preset": "remax"},
            "completions of baseline=greedy, which are not kept, and of which reward j would be asked",
        ),
        ({"preset": "vineppo"}, "continuations of advantage=vine, .*reward j"),
        ({"preset": "ppo", "critic_warmup_steps": 1}, "critic_warmup_steps, .*reward j"),
        ({"preset": "a_lol"}, "behind baseline=table, .*reward j"),
        (
            {"preset": "sppo", "rewards": [{**JUDGE, "judge_mode": "preference"}]},
            "preset=sppo, for which reward j comp",
        ),
    ],
)
def test_no_service_is_asked_about_what_is_drawn_again(config, says):
    with pytest.raises(ValueError, match=f"(?s){says}.*leave recorded out"):
        check(Config.model_validate({**PAID, "rewards": [JUDGE], **config}), ["model", "data", "recorded"])


def judged(body):
    """The answer of a judge that likes some texts better than others, for no reason."""
    text = body["messages"][0]["content"]
    likes = sum(map(ord, text))
    said = f"[[{'AB'[likes % 2]}]]" if "[[A]]" in text else str(1 + likes % 9)
    tokens = [{"token": said, "top_logprobs": [{"token": said, "logprob": -0.1}, {"token": "5", "logprob": -3.0}]}]
    return {"message": {"content": said}, "finish_reason": "stop", "logprobs": {"content": tokens}}


@pytest.mark.parametrize(
    "config",
    [
        {"preset": "grpo", "eval_prompts": 2, "eval_every": 2},
        {"preset": "online_ipo", "judge_mode": "verdict", "eval_prompts": 2, "eval_every": 2},
    ],
)
def test_no_service_is_asked_again(rl, tiny, config):  # noqa: F811
    """Not about validation answers either, and P(y > y') of pairs is the record's."""
    mode = {name: config[name] for name in ("judge_mode",) if name in config}
    config = {**PAID, **{name: value for name, value in config.items() if name not in mode}}
    config["stop_strings"] = list("abcdefghijklmnop")  # answers that end, which a judge is shown
    with chat_server(judged) as server:
        config["rewards"] = [{**JUDGE, "endpoint": server.url, **mode}]
        first, _ = rl("first", config)
        asked = len(server.seen)
        result, _ = again(rl, config, first)
        assert asked > 0 and len(server.seen) == asked
    assert weights(result) == weights(first) != Path(tiny["policy"], "model.safetensors").read_bytes()
    assert rows_of(result) == rows_of(first) and result["summary"]["recorded/differing"] == 0
    assert "validation" in first["outputs"] and "validation" not in result["outputs"]
    pairs = ["pair_preference" in (r["extra_json"] or "") for r in rows_of(first)]
    assert any(pairs) == bool(mode)


def test_differences_of_columns():
    inf = float("inf")
    assert difference(None, None) == difference([1.0, float("nan")], [1.0, float("nan")]) == difference([], []) == 0.0
    assert difference(float("nan"), float("nan")) == difference({"a": 1}, {"a": 1.0}) == 0.0
    assert difference(None, 1.0) == difference([1.0], [1.0, 2.0]) == difference("a", "b") == inf
    assert difference([1.0, 2.0], [1.0, 2.5]) == difference([{"v": 2.0}], [{"v": 1.5}]) == 0.5
    assert difference([1.0], [float("nan")]) == inf
