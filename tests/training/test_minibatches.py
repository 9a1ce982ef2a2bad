"""Passes over a rollout batch, cut into optimizer steps by prompt, by completion or by token (OFFPOL-LOOP)."""

import numpy as np
import pytest

from stages.batching import make_item
from stages.rl import Config, resolve_preset
from stages.rollouts.minibatches import minibatch
from tests.training.test_rl_parts import rl  # noqa: F401


def made():
    rng = np.random.default_rng(1)
    items = []
    for i, lengths in enumerate(((3, 5), (1, 4), (2, 2), (6, 0))):
        masks = [[int(rng.random() < 0.8) for _ in range(n)] for n in lengths]
        items.append(
            make_item(
                f"row-{i}",
                [1, 2],
                [list(range(10 * i, 10 * i + n)) for n in lengths],
                masks,
                by_response=("advantages", "old_logps"),
                advantages=[float(10 * i), float(10 * i + 1)],
                old_logps=[[0.1 * i + t for t in range(n)] for n in lengths],
                skip_forward=False,
            )
        )
    return items


def trained(items):
    """{(row, advantage, token)} of the trained tokens, each with its old log-prob."""
    return sorted(
        (i.row_id, a, int(r[t]), o[t])
        for i in items
        for r, m, a, o in zip(i.responses, i.masks, i.extra["advantages"], i.extra["old_logps"])
        for t in np.flatnonzero(m)
    )


@pytest.mark.parametrize("unit", ["prompt", "sequence", "token"])
def test_every_token_is_in_one_step_with_what_belongs_to_it(unit):
    items, n = made(), 3
    parts = [minibatch(items, unit, n, k, np.random.default_rng(7)) for k in range(n)]
    assert sorted(t for part in parts for t in trained(part)) == trained(items)
    assert [trained(p) for p in parts] != [
        trained(minibatch(items, unit, n, k, np.random.default_rng(8))) for k in range(n)
    ]
    groups = [{i.row_id for i in part if i.n_targets} for part in parts]
    whole = {(row, a): sum(t[:2] == (row, a) for t in trained(items)) for row, a in {t[:2] for t in trained(items)}}
    split = {
        (row, a)
        for part in parts
        for row, a in {t[:2] for t in trained(part)}
        if sum(t[:2] == (row, a) for t in trained(part)) < whole[row, a]
    }
    shared = (
        len(set.intersection(*groups))
        if unit == "prompt"
        else sum(len(a & b) for a in groups for b in groups if a is not b)
    )
    assert (shared == 0, not split) == {"prompt": (True, True), "sequence": (False, True), "token": (False, False)}[
        unit
    ]
    counts = [len({t[:2] for t in trained(part)}) if unit == "sequence" else len(trained(part)) for part in parts]
    assert unit == "prompt" or max(counts) - min(counts) <= 1
    responses = {i.row_id: [r.tolist() for r in i.responses] for i in items}
    # a token keeps its context
    assert all(r.tolist() in responses[i.row_id] for part in parts for i in part for r in i.responses)


def test_a_part_without_anything_trains_nothing():
    parts = [minibatch(made()[2:3], "sequence", 4, k, np.random.default_rng(7)) for k in range(4)]
    assert sorted(sum(i.n_targets for i in part) > 0 for part in parts) == [False, False, True, True]
    assert all(i.extra["skip_forward"] for part in parts for i in part if not i.n_targets)


@pytest.mark.parametrize(
    "unit, preset", [("sequence", "ppo"), ("token", "ppo"), ("token", "dapo"), ("sequence", "topr")]
)
def test_steps_of_completions_and_of_tokens_add_up_to_the_batch(tiny, rl, unit, preset):  # noqa: F811
    """The sums that a step's gradient is made of, over the parts, are those of the whole batch; the stage takes
    num_iterations x num_minibatches steps.
    """
    import torch

    from stages.batching import collate
    from stages.policy.policy_update import PolicyGradient

    config = {
        "preset": preset,
        "num_minibatches": 3,
        "max_steps": 6,
        "minibatch_unit": unit,
        **({"num_iterations": 1, "kl_coef": 0.0} if preset == "ppo" else {}),
        **(
            {"filter_groups_metric": "reward_std", "truncation_policy": "score", "soft_punish_cache": 0}
            if preset == "dapo"
            else {}
        ),
    }
    result, metrics = rl("cut", config)
    assert (
        result["summary"]["updates_per_generation"] == 3 and result["summary"]["iterations"] == 2 and len(metrics) == 6
    )
    # the fixture makes no critic
    source = rl.source("parts", {**config, "preset": "reinforce_pp", "kl_coef": 0.0} if preset == "ppo" else config)
    source._next_iteration(0)
    row, _ = resolve_preset(source.config)
    objective = PolicyGradient(row, source.config)

    def sums(items):
        found = objective(source.policy.model, collate(items, "cpu"))
        return {name: value for name, (value, _) in found.loss.items()}, objective.counts(items)

    whole, count = sums(source.batch)
    parts = []
    for source.inner in range(3):
        parts.append(sums(source._minibatch()))
    assert torch.allclose(sum(p["policy_loss"] for p, _ in parts), whole["policy_loss"], atol=1e-5)
    for name in ("tokens", "trained") if unit == "sequence" else ("tokens",):
        assert sum(c[name] for _, c in parts) == count[name]


@pytest.mark.parametrize(
    "config, says",
    [
        ({"preset": "p3o", "minibatch_unit": "sequence"}, "minibatch_unit=prompt"),
        ({"preset": "grpo", "minibatch_unit": "token"}, "loss_agg_mode=token-mean"),
        ({"preset": "topr", "minibatch_unit": "token"}, "minibatch_unit=sequence"),
        ({"preset": "dapo", "minibatch_unit": "token", "token_norm_scope": "group"}, "token_norm_scope=batch"),
        ({"preset": "grpo", "minibatch_unit": "sequence", "seq_denominator": "all"}, "seq_denominator=nonempty"),
        ({"preset": "vespo", "minibatch_unit": "token"}, "surrogate=clip"),
        ({"preset": "gmpo", "minibatch_unit": "token", "loss_agg_mode": "token-mean"}, "surrogate=clip"),
        ({"preset": "gspo", "minibatch_unit": "token", "loss_agg_mode": "token-mean"}, "ratio_level=token"),
        ({"preset": "ppo", "critic_target": "bandit", "minibatch_unit": "token"}, "lambda_return"),
        ({"preset": "dapo", "minibatch_unit": "token", "off_policy_mask_threshold": 0.5}, "leave it out"),
        ({"preset": "dapo", "minibatch_unit": "token", "num_minibatches": 1}, "num_minibatches=4"),
        (
            {"preset": "grpo", "prompts_per_step": 1, "num_generations": 2, "minibatch_unit": "sequence"},
            "num_minibatches <= 2",
        ),
    ],
)
def test_where_parts_would_say_something_else(config, says):
    with pytest.raises(ValueError, match=says):
        resolve_preset(Config(**{"num_minibatches": 4, **config}))
