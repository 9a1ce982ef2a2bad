"""What an iteration of rollouts is made of, by hand: rounds of dynamic sampling, what a group could teach, moves of the
reference, pretraining text, and numbers of the update.
"""

import copy
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from stages.batching import make_item
from stages.generation import Sample
from stages.rollouts.groups import Group, override_reward
from stages.rollouts.replay import ReplayWindow, _groups_of
from stages.running.randomness import rng
from stages.training import TrainingError
from tests.training.test_crediting import PAID, group
from tests.training.test_rl_parts import rl  # noqa: F401
from tests.training.test_rl_rules import SPREAD

NAN = float("nan")


def told(source, *totals, number=0, **more):
    """A group of completions of these rewards, all that is configured having given them."""
    names = [c.name for c in source.config.rewards if c.weight]
    made = [
        ([50] * (2 + k), total, "eos", {"parts": {names[0]: total}, "weights": {names[0]: 1.0}, **more})
        for k, total in enumerate(totals)
    ]
    return group(source, made, number)


def test_rounds_go_on_until_enough_groups_teach_something(rl):  # noqa: F811
    """DYN-SAMPLING: every round draws other prompts with seeds of its own; numbers are over all that was sampled."""
    source = rl.source(
        "rounds",
        {
            **PAID,
            "preset": "dapo",
            "truncation_policy": "score",
            "soft_punish_cache": 0,
            "prompts_per_step": 2,
            "gen_batch_size": 3,
            "num_generations": 2,
            "filter_groups_metric": "acc",
        },
    )
    sampler, asked = source.groups, []
    rounds = [
        [told(source, 1.0, 1.0), told(source, 1.0, 0.0), told(source, 0.0, 0.0)],
        [told(source, 0.5, NAN), told(source, 0.25, 0.75), told(source, 1.0, 0.0)],
    ]
    for one in rounds[0]:
        for sample in one.samples:
            sample.correct = sample.total > 0.5
    sampler.sample = lambda prompts, iteration, version, first: asked.append((prompts, first)) or rounds[len(asked) - 1]
    kept, dropped, metrics = sampler.fill(lambda n: n, 2, 0, 0)
    assert asked == [(3, 0), (3, 3)]
    assert [id(g) for g in kept] == [id(rounds[0][1]), id(rounds[1][1])]
    assert [(id(g), why) for g, why in dropped] == [
        (id(rounds[0][0]), "all_correct"),
        (id(rounds[0][2]), "all_wrong"),
        (id(rounds[1][0]), "equal_rewards"),  # one reward is compared with none
        (id(rounds[1][2]), "surplus"),
    ]
    assert metrics["groups/generation_batches"] == 2 and metrics["groups/filter_rate"] == 3 / 6
    assert {
        name: metrics[f"groups/dropped_{name}"] for name in ("all_correct", "all_wrong", "equal_rewards", "surplus")
    } == {
        "all_correct": 1.0,
        "all_wrong": 1.0,
        "equal_rewards": 1.0,
        "surplus": 1.0,
    }
    assert metrics["completions/generated_tokens"] == 6 * (2 + 3)
    assert metrics["reward/sampled_mean"] == pytest.approx(5.5 / 11)


def test_answers_that_differ_in_length_alone_teach_nothing(rl):  # noqa: F811
    """The filter looks at the reward without what length earns; length alone is looked at where nothing else pays."""
    length = {"name": "long", "kind": "length_penalty", "length_alpha": 0.1}
    dapo = {**PAID, "preset": "dapo", "filter_groups_metric": "reward_std", "truncation_policy": "score"}
    both = rl.source("both", {**dapo, "rewards": [SPREAD, {**SPREAD, "name": "other"}, length]})
    alone = rl.source("alone", {**dapo, "rewards": [length]})
    weights = {"spread": 2.0, "other": 1.0, "long": 1.0}

    def why(source, *parts):
        made = [dict(zip(weights, values)) for values in parts]
        totals = [sum(weights[name] * value for name, value in one.items()) for one in made]
        return source.groups.no_signal(
            group(
                source,
                [([50], total, "eos", {"parts": one, "weights": weights}) for one, total in zip(made, totals)],
            )
        )

    # one reward of the task with two sums, and two rewards of the task with one sum
    assert why(both, (0.5, 0.0, -0.1), (0.5, 0.0, -0.2)) == "equal_rewards"
    assert why(both, (0.5, 0.0, -0.2), (0.4, 0.0, 0.0)) is None
    # as weighted: 2 * 0.5 is 1 * 1
    assert why(both, (0.5, 0.0, -0.1), (0.0, 1.0, -0.2)) == "equal_rewards"
    assert why(both, (0.5, 0.0, 0.0), (0.0, 0.5, 0.0)) is None
    assert why(alone, (0.0, 0.0, -0.1), (0.0, 0.0, -0.2)) is None


@pytest.mark.parametrize("mode, keep", [("ema", 0.5), ("refresh", 0.75)])
def test_a_reference_that_waits_for_the_iteration_makes_all_its_moves_then(rl, mode, keep):  # noqa: F811
    """REF-POLICY: each move keeps ``ref_decay`` or 1 - ``ref_sync_alpha`` of what was left; its version is the number of
    moves that were made.
    """
    source = rl.source(
        f"moves-{mode}",
        {
            **PAID,
            "beta": 0.1,
            "kl_estimator": "full",
            "num_iterations": 3,
            "max_steps": 6,
            "ref_mode": mode,
            **({"ref_decay": 0.5} if mode == "ema" else {"ref_sync_steps": 1, "ref_sync_alpha": 0.25}),
        },
    )
    before = copy.deepcopy(source.reference.state_dict())
    name = next(iter(dict(source.policy.model.named_parameters())))
    with torch.no_grad():
        dict(source.policy.model.named_parameters())[name].add_(1.0)
    moved = lambda: float((source.reference.state_dict()[name] - before[name]).mean())
    source.iteration, versions = 0, []
    for step in (1, 2, 3):
        assert moved() == 0.0
        versions.append(source.after_step(step, {})["kl/reference_version"])
    assert versions == [0.0, 0.0, 3.0] and moved() == pytest.approx(1 - keep**3, abs=1e-5)


def test_a_reference_is_refreshed_every_so_many_steps(rl):  # noqa: F811
    source = rl.source(
        "every",
        {**PAID, "beta": 0.1, "max_steps": 6, "ref_mode": "refresh", "ref_sync_steps": 2, "ref_sync_alpha": 1.0},
    )
    source.iteration = 0
    assert [source.after_step(step, {})["kl/reference_version"] for step in range(1, 6)] == [0.0, 1.0, 1.0, 2.0, 2.0]


def test_a_step_that_was_skipped_moves_no_reference_and_no_opponent(rl):  # noqa: F811
    """Nor does it count among those after which a reference is refreshed."""
    kept = {"loss": 0.1, "grad_norm": 1.0, "skipped_steps": 1.0}
    steps = [{**kept, "grad_norm": float("nan")}, kept, kept]
    for name, config, of, expected in (
        ("ema", {"beta": 0.1, "ref_mode": "ema", "ref_decay": 0.5}, "reference", [0.0, 0.5, 0.75]),
        (
            "refresh",
            {"beta": 0.1, "ref_mode": "refresh", "ref_sync_steps": 2, "ref_sync_alpha": 1.0},
            "reference",
            [0.0, 0.0, 1.0],
        ),
        ("opponent", {"preset": "nash_md", "opponent": "ema", "opponent_decay": 0.5}, "opponent", [0.0, 0.5, 0.75]),
    ):
        source = rl.source(f"skipped-{name}", {**PAID, "max_steps": 6, **config})
        model = source.reference if of == "reference" else source.opponent.model
        weights = dict(source.policy.model.named_parameters())
        part = next(iter(weights))
        before, found, versions = model.state_dict()[part].clone(), [], []
        with torch.no_grad():
            weights[part].add_(1.0)
        source.iteration = 0
        for step, metrics in enumerate(steps, 1):
            versions.append(source.after_step(step, dict(metrics)).get("kl/reference_version"))
            found.append(float((model.state_dict()[part] - before).mean()))
        assert found == pytest.approx(expected, abs=1e-5)
        assert of != "reference" or versions == ([0.0, 1.0, 2.0] if name == "ema" else [0.0, 0.0, 1.0])


def test_the_update_says_how_many_tokens_its_weights_are_worth(rl):  # noqa: F811
    """(sum w)^2 / (n sum w^2), of the ratios, else of the responses' own weights."""
    source, w = rl.source("worth", PAID), np.array([0.5, 1.0, 3.0])
    worth = w.sum() ** 2 / (3 * (w**2).sum())
    for name, logged in (
        ("policy/ess_fraction", {"policy/ratio": w.mean(), "policy/ratio_sq": (w**2).mean()}),
        (
            "policy/importance_weight_ess",
            {"policy/importance_weight": w.mean(), "policy/importance_weight_sq": (w**2).mean()},
        ),
    ):
        assert source.after_step(1, logged)[name] == pytest.approx(worth)


def test_pretraining_rows_are_drawn_by_the_completions_of_the_step(rl):  # noqa: F811
    source = rl.source("text", PAID)
    source.ptx = [make_item(f"ptx-{k}", [], [[5, 6]], [[1, 1]], ptx=True) for k in range(4)]
    chosen = [make_item("r", [1], [[2]] * n, [[1]] * n, by_response=()) for n in (3, 4)]
    drawn = []
    for ratio in (2.0, 1.0, 0.5, 0.4, 0.01):
        source.config.ptx_batch_ratio = ratio
        drawn.append(source._drawn_text(chosen, 3))
    assert [len(rows) for rows in drawn] == [14, 7, 4, 3, 1]
    assert {i.row_id for i in drawn[0]} <= {i.row_id for i in source.ptx} and len({i.row_id for i in drawn[0]}) > 1
    assert [i.row_id for i in source._drawn_text(chosen, 3)] == [i.row_id for i in drawn[-1]]


def test_a_run_that_scored_anything_at_all_is_a_result(rl):  # noqa: F811
    source = rl.source("scored", PAID)
    name = "reward/unscorable_fraction"
    source.check_scored()
    source.history = [{name: 1.0}, {}, {name: 0.9}]
    source.check_scored()
    source.history, source.why_unscorable = [{name: 1.0}, {"step": 2.0}, {name: 1.0}], "timeout"
    with pytest.raises(TrainingError, match="timeout"):
        source.check_scored()


def test_controls_pay_by_weight_and_not_what_was_lost(rl):  # noqa: F811
    """format_only: the weighted formats alone, nothing where none was asked; inverted: turned around; a lost completion
    earns nothing under any.
    """
    forms = [{"name": f"f{k}", "kind": "format", "weight": w} for k, w in enumerate((0.5, 2.0))]
    source = rl.source("format", {**PAID, "reward_override": "format_only", "rewards": [SPREAD, *forms]})
    made = group(
        source,
        [
            (
                [50],
                9.0,
                "eos",
                {"parts": {"spread": 5.0, "f0": 1.0, "f1": 0.5}, "correct": True, "turn_rewards": [9.0]},
            ),
            ([50], 9.0, "eos", {"parts": {"spread": 5.0, "f0": None, "f1": 1.0}}),
            ([50], 9.0, "eos", {"parts": {"spread": 5.0, "f0": None, "f1": None}}),
            ([], NAN, "error", {"parts": {}, "error": "gone"}),
        ],
    ).samples
    for sample in made:
        override_reward(source.stage, sample, 0)
    assert [s.total for s in made[:2]] == [1.5, 2.0] and all(np.isnan(s.total) for s in made[2:])
    assert made[0].correct is None and made[0].turn_rewards is None


def test_replayed_groups_are_of_the_window_and_not_too_old():
    """REPLAY: a window of 3 holds two iterations before this one; a group whose policy is more than max_staleness steps
    old is not among those drawn from, and a killed run draws the same.
    """
    prompts = [({"row_id": f"r{k}"}, [k]) for k in range(4)]
    config = SimpleNamespace(replay_window=3, replay_fraction=0.5, max_staleness=4, prompts_per_step=4)
    made = lambda: ReplayWindow(config, prompts, lambda *a: rng(1, "rl", *a), 100)
    window = made()
    for iteration, version in enumerate((0, 1, 5, 8)):
        groups = [
            Group(row, ids, [Sample(row, ids, 0, [9], [-0.5 * iteration], "eos", "x", 1.0, {}, {})], version)
            for row, ids in prompts[: 2 + iteration % 2]
        ]
        window.add(iteration, groups)
    again = made()
    again.restore(json.loads(json.dumps(window.state())))
    for one in (window, again):
        drawn, metrics = one.draw(4, 9)
        assert {g.version for g in drawn} <= {5, 8} and not any(g.fresh for g in drawn) and len(drawn) == 2
        assert all(g.samples[0].prompt is g.prompt and g.samples[0].prompt_ids == g.ids for g in drawn)
        assert metrics == {"replay/share": 0.5, "replay/rejected_stale": 0.0}
        assert [w["iteration"] for w in one.window] == [2, 3]
    alike = [[(g.version, g.ids) for g in one.draw(4, 9)[0]] for one in (window, again)]
    assert alike[0] == alike[1]
    drawn, metrics = window.draw(4, 10)
    assert {g.version for g in drawn} == {8} and metrics == {"replay/share": 0.5, "replay/rejected_stale": 2.0}
    drawn, metrics = window.draw(4, 99)
    assert drawn == [] and metrics == {"replay/share": 0.0, "replay/rejected_stale": 5.0}


def test_stored_completions_are_groups_with_what_they_earned():
    """By iteration, prompt and draw; the reward is the weighted sum of the stored parts without the penalty of long
    completions, which is this run's own; log-probs are the sampler's where they were kept beside the trainer's.
    """
    parts = lambda a, b: [
        {"name": "a", "value": a, "weight": 2.0},
        {"name": "b", "value": b, "weight": 0.5},
        {"name": "overlong", "value": -0.25, "weight": 1.0},
    ]
    row = {
        "row_id": "r",
        "prompt_id": "p",
        "group_id": "g",
        "dataset": "d",
        "iteration": 0,
        "prompt_ids": [1, 2],
        "completion_ids": [5, 6],
        "logp_rollout": None,
        "logp_old": [-1.0, -2.0],
        "terminated": True,
        "reward_tier": None,
        "reward_components": parts(1.0, 3.0),
        "is_correct": True,
        "tool_mask": None,
        "step_ends": [0, 1],
        "step_rewards": [0.5, 0.25],
        "extra_json": None,
    }
    known = {"row_id": "known", "prompt_id": "q"}
    groups = _groups_of(
        [
            row,
            {**row, "reward_components": parts(1.0, None), "terminated": False, "logp_rollout": [-3.0, -4.0]},
            {**row, "extra_json": json.dumps({"draw": 1, "steps_paid": True})},
            {**row, "iteration": 1, "reward_tier": "unscorable"},
            {**row, "prompt_id": "q", "tool_mask": [0, 1]},
        ],
        {"q": known},
    )
    assert [len(g.samples) for g in groups] == [2, 1, 1, 1] and groups[3].prompt is known
    assert not any(g.fresh for g in groups) and {g.version for g in groups} == {-1}
    (whole, cut), (second,), (lost,), (tool,) = (g.samples for g in groups)
    assert (whole.total, cut.total) == (3.5, 2.0) and np.isnan(lost.total) and "overlong" not in whole.parts
    assert whole.logps == [-1.0, -2.0] and cut.logps == [-3.0, -4.0] and [s.index for s in (whole, cut)] == [0, 1]
    assert whole.terminated and not cut.terminated and whole.correct and tool.action_mask == [1, 0]
    assert whole.step_rewards is None and second.step_rewards == ([0, 1], [0.5, 0.25])
    assert whole.weights == {"a": 2.0, "b": 0.5} and groups[0].prompt["prompt_id"] == "p"
