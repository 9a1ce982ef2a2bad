"""Parts of the RL stage on their own: critics, exact KL, filters, schedules, off-policy data, degenerate batches."""

import json
from dataclasses import replace
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch

from stages.policy import critics
from stages.running import randomness
from stages.algorithms import rl_preset
from stages.batching import collate, make_item
from stages.policy.credit import Batch, assign, critic_targets, shaped
from stages.generation import Sample
from stages.harness import Stage, execute
from stages.models.modeling import head_of, hidden_states, load_policy
from stages.models.divergence import exact_kl
from stages.policy.policy_update import PolicyGradient
from stages.registry import get_stage
from stages.rl import Config, resolve_preset
from stages.rollouts.groups import Group
from stages.rollouts.prompts import PromptOrder
from stages.rollouts.source import Rollouts
from stages.rollouts.steps import step_ends
from stages.models.sharding import Acting
from storage.datasets import open_dataset
from tests.common import random_value_head

SMALL = {
    "max_steps": 2,
    "prompts_per_step": 2,
    "num_generations": 4,
    "max_completion_length": 6,
    "learning_rate": 1e-3,
    "reward_override": "random",
    "rewards": [{"name": "length", "kind": "length"}],
}


LONG = "def score(completion):\n    return {'reward': float(len(completion)), 'correct': len(completion) > 1}"


@pytest.fixture()
def rl(tiny, data, spec):
    """``rl(name, config, **inputs)`` -> (result, metrics rows); ``rl.source(...)`` -> a Rollouts that has not
    started.
    """

    def made(name, config, inputs):
        critic = rl_preset(config.get("preset", "grpo")).needs_critic and config.get("critic_mode") != "shared"
        out = spec(
            "rl",
            {**SMALL, **({"critic_learning_rate": 1e-2} if critic else {}), **config},
            {"model": tiny["policy"], "data": data["prompts"]},
            name,
        )
        for key, path in inputs.items():
            kind = "dataset" if key in ("data", "ptx", "stored", "recorded", "baselines", "sft") else "model"
            out["inputs"][key] = {"kind": kind, "path": path, "ref": key, "digest": f"digest-{path}"}
        return out

    def build(name, config, **inputs):
        one = made(name, config, inputs)
        result = execute(one, lambda event: None)
        return result, [
            json.loads(line)["metrics"] for line in Path(one["workdir"], "metrics.jsonl").read_text().splitlines()
        ]

    def source(name, config, **inputs):
        from stages.chat import renderer_for
        from stages.generation import prompt_rows
        from stages.reward.rewards import build_rewards

        stage = Stage(get_stage("rl"), made(name, config, inputs), lambda event: None)
        renderer = renderer_for(tiny["policy"])
        row, _ = resolve_preset(stage.config)
        prompts = prompt_rows(stage, stage.dataset("data"), "train", renderer, 64)
        reference = (
            load_policy(stage.path("reference") if stage.has("reference") else tiny["policy"])
            if row.needs_reference
            else None
        )
        return Rollouts(
            stage,
            row,
            renderer,
            Acting(load_policy(tiny["policy"]), False),
            build_rewards(stage.config.rewards, stage.inputs, renderer=renderer),
            prompts,
            reference=reference,
        )

    build.source, build.made, build.tiny = source, made, tiny
    return build


def rows_of(result, name="rollouts"):
    return list(open_dataset(result["outputs"][name]["path"]).iter_rows())


# --- critics ----------------------------------------------------------------------------------------------------------


def test_the_critic_starts_as_the_reward_model_and_learns_its_targets(tiny, rl):
    """Values of the first rollout = the reward model's score of each prefix, calibration included; then its loss
    falls.
    """
    from stages.reward_models.reward_heads import load_reward_model
    from stages.reward_models.reward_scorers import load_scorer

    result, metrics = rl(
        "ppo",
        {"preset": "ppo", "max_steps": 8, "num_iterations": 8, "kl_coef": 0.0, "learning_rate": 1e-7},
        reward_model=tiny["reward"],
    )
    scorer = load_scorer(tiny["reward"])
    for row in rows_of(result)[:3]:
        prefixes = [row["prompt_ids"] + row["completion_ids"][:t] for t in range(row["length"])]
        assert np.allclose(row["values"], scorer.score_ids(prefixes), atol=1e-5)
        whole = scorer.score_ids([row["prompt_ids"] + row["completion_ids"]])[0]
        assert row["bootstrap_value"] == pytest.approx(0.0 if row["terminated"] else whole, abs=1e-5)
    assert metrics[-1]["critic/loss"] < 0.7 * metrics[0]["critic/loss"]
    first = rows_of(result)
    flat = [(v - g) ** 2 for r in first for v, g in zip(r["values"], r["returns"])]
    assert metrics[0]["critic/loss"] == pytest.approx(np.mean(flat), rel=1e-4)
    before, after = (load_reward_model(p) for p in (tiny["reward"], result["outputs"]["critic"]["path"]))
    assert any(not torch.equal(a, b) for a, b in zip(before.parameters(), after.parameters()))
    assert load_scorer(result["outputs"]["critic"]["path"]).bias == 0.5


@pytest.mark.parametrize("mode", ["separate", "shared"])
def test_the_end_of_a_cut_completion_is_worth_the_prompts_value_where_there_is_no_other(rl, mode):
    """critic_target=bandit trains the first token alone: what the head says of later states is of nothing."""
    config = {"preset": "ppo", "critic_target": "bandit", "critic_mode": mode, "max_completion_length": 12}
    result, metrics = rl(
        f"prompt-value-{mode}",
        {**config, "max_steps": 3, "num_iterations": 1, "learning_rate": 1e-2, "kl_coef": 0.0, "cliprange_value": 0.2},
    )
    rows = rows_of(result)
    assert all(row["bootstrap_value"] == (0.0 if row["terminated"] else row["values"][0]) for row in rows)
    cut = [row for row in rows if not row["terminated"] and row["values"][0] != 0.0]
    assert cut and all(np.allclose(row["returns"], row["values"][0]) for row in cut)
    # and so are the numbers of the update: a value and a return of each completion
    last = [row for row in rows if row["iteration"] == 2]
    assert metrics[-1]["critic/return_mean"] == pytest.approx(np.mean([row["returns"][0] for row in last]), abs=1e-5)
    assert metrics[-1]["critic/value_mean"] == pytest.approx(np.mean([row["values"][0] for row in last]), abs=1e-4)


def test_a_narrow_curriculum_draws_the_nearest_level_where_its_weights_underflow():
    from stages.policy.schedules import e2h_probabilities

    assert np.allclose(e2h_probabilities("gaussian", 12, 100, 5, sigma=0.01), [1, 0, 0, 0, 0], atol=1e-12)
    assert np.allclose(e2h_probabilities("gaussian", 88, 100, 5, sigma=0.01), [0, 0, 0, 0, 1], atol=1e-12)


def test_a_critic_says_why_it_cannot_start_from_a_reward_model(tiny, tmp_path):
    import shutil

    from stages.chat import renderer_for
    from stages.policy.critics import why_no_start
    from stages.reward_models.reward_heads import RewardCard, write_card

    renderer = renderer_for(tiny["policy"])
    assert why_no_start(tiny["reward"], renderer) is None
    shutil.copytree(tiny["reward"], tmp_path / "pairwise")
    write_card(tmp_path / "pairwise", RewardCard("pairwise"))
    assert "per token" in why_no_start(str(tmp_path / "pairwise"), renderer)


@pytest.mark.parametrize("mode", ["separate", "shared"])
def test_a_critic_that_knows_nothing_says_nothing(rl, mode):
    """Without a reward model to start from its values are 0 at first: the advantages of the first batch are returns,
    and nothing of their variance is the critic's. Then it learns.
    """
    result, metrics = rl(
        "fresh",
        {
            "preset": "ppo",
            "critic_mode": mode,
            "max_steps": 8,
            "num_iterations": 4,
            "kl_coef": 0.0,
            "learning_rate": 1e-3,
            "lam": 1.0,
            "whiten": False,
            "truncation_policy": "score",
        },
    )
    for row in rows_of(result):
        first = row["iteration"] == 0
        assert all(v == 0.0 for v in row["values"]) == (first or not row["values"])
        if first:
            assert np.allclose(row["advantages"], row["returns"]) and row["bootstrap_value"] == 0.0
    assert metrics[0]["critic/explained_variance"] == 0.0


def test_a_critic_may_start_from_another_language_model(tiny, rl, tmp_path):
    """ACTOR-CRITIC, critic.init base or sft: its backbone, and values of 0; one with other tokens is refused."""
    import shutil

    from transformers import AutoTokenizer

    from stages.reward_models.reward_heads import load_reward_model, new_reward_model

    config = {"preset": "ppo", "max_steps": 1, "critic_learning_rate": 1e-12, "critic_mode": "separate"}
    result, _ = rl("base", config, critic=tiny["other"])
    assert all(v == 0.0 for row in rows_of(result) for v in row["values"])
    found = load_reward_model(result["outputs"]["critic"]["path"]).base_model.state_dict()
    other, policy = (new_reward_model(tiny[name]).base_model.state_dict() for name in ("other", "policy"))
    assert all(torch.allclose(found[name], value, atol=1e-6) for name, value in other.items())
    assert any(not torch.allclose(found[name], value, atol=1e-3) for name, value in policy.items())
    shutil.copytree(tiny["other"], tmp_path / "foreign")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "foreign")
    tokenizer.add_tokens(["<foreign>"])
    tokenizer.save_pretrained(tmp_path / "foreign")
    with pytest.raises(ValueError, match="input critic .* has another tokenizer than the policy"):
        rl("foreign", config, critic=str(tmp_path / "foreign"))


def test_a_shared_trunk_sums_policy_and_value_loss(tiny, rl):
    """PPO-FULL: one loss, one backward; the exported model is the policy alone."""
    result, metrics = rl(
        "shared",
        {
            "preset": "ppo",
            "critic_mode": "shared",
            "num_iterations": 1,
            "kl_coef": 0.0,
            "entropy_coef": 0.01,
            "max_steps": 1,
        },
    )
    found = metrics[0]
    rows = rows_of(result)
    error = np.mean([(v - g) ** 2 for r in rows for v, g in zip(r["values"], r["returns"])])
    assert found["value_loss"] == pytest.approx(0.5 * error, rel=1e-4) and found["entropy_bonus"] < 0
    assert found["loss"] == pytest.approx(found["policy_loss"] + found["value_loss"] + found["entropy_bonus"], rel=1e-5)
    assert "critic" not in result["outputs"]
    names = {n for n, _ in load_policy(result["outputs"]["model"]["path"]).named_parameters()}
    assert names == {n for n, _ in load_policy(tiny["policy"]).named_parameters()} and not any(
        "value" in n for n in names if "v_proj" not in n
    )


def test_dual_and_value_clipping_reach_the_steps_loss(tiny):
    """DUAL-CLIP: at ratio 5 a negative advantage counts c = 3 times, a positive one 1 + epsilon; VALUE-CLIP: the larger
    of both errors.
    """
    config = Config(preset="ppo", clip_ratio_c=3.0, cliprange_value=0.2, critic_mode="shared", kl_coef=0.0)
    model, head = load_policy(tiny["policy"]).double(), random_value_head(32).double()
    plain = make_item("r", [20, 30], [[40, 50, 60]], [[1, 1, 1]])
    batch = collate([plain])
    with torch.no_grad():
        states = hidden_states(model, batch, batch.src_N)
        logps, values = torch.log_softmax(head_of(model).logits(states), -1)[range(3), [40, 50, 60]], head(states)[:, 0]
    old_values, returns = (
        (values + torch.tensor([0.5, -0.5, 0.1])).tolist(),
        (values + torch.tensor([1.0, 1.0, -1.0])).tolist(),
    )
    item = make_item(
        "r",
        [20, 30],
        [[40, 50, 60]],
        [[1, 1, 1]],
        advantages=[[-1.0, -1.0, 2.0]],
        old_logps=[(logps - np.log(5)).tolist()],
        values=[old_values],
        returns=[returns],
    )
    sums = PolicyGradient(resolve_preset(config)[0], config, value_head=head)(model, collate([item]))
    terms = sums.loss
    assert (
        float(terms["policy_loss"][0].detach()) == pytest.approx(3.0 + 3.0 - 1.2 * 2.0, rel=1e-5)
        and terms["policy_loss"][1] == "tokens"
    )
    clipped = [old + np.clip(v - old, -0.2, 0.2) for v, old in zip(values.tolist(), old_values)]
    errors = [max((v - g) ** 2, (c - g) ** 2) for v, c, g in zip(values.tolist(), clipped, returns)]
    assert errors[1] > (float(values[1]) - returns[1]) ** 2 and float(terms["value_loss"][0].detach()) == pytest.approx(
        config.vf_coef * sum(errors), rel=1e-5
    )
    # the first value moved too far as well, but away from its return, and is drawn back
    assert float(sums.metrics["critic/clip_fraction"][0]) == 1.0


def batch_of(**changes):
    values = {
        "rewards_B": np.array([1.0, 0.0]),
        "group_of_B": np.array([0, 0]),
        "mask_BT": np.array([[1, 1, 1], [1, 1, 0]], bool),
        "kept_B": np.ones(2, bool),
        "counted_B": np.ones(2, bool),
        "kl_BT": np.array([[0.1, 0.2, 0.3], [0.4, 0.5, 0.0]]),
        "log_ratio_BT": np.array([[0.1, 0.2, 0.3], [0.4, 0.5, 0.0]]),
        "values_BT": np.array([[0.5, 0.6, 0.7], [0.1, 0.2, 9.0]]),
        "bootstrap_B": np.array([0.0, 0.3]),
    }
    return Batch(**{**values, **changes})


def test_critic_targets_by_hand():
    """Row 2 was cut, so its value after the last token is part of every bootstrapped target."""
    batch = batch_of()
    expected = {
        "mc_return": [[1, 1, 1], [0.3, 0.3, 0]],
        "td0": [[0.6, 0.7, 1], [0.2, 0.3, 0]],
        "terminal": [[1, 1, 1], [0.3, 0.3, 0]],
        "kl_adjusted_outcome": [[1, 1, 1], [0.3, 0.3, 0]],
    }
    for target, values in expected.items():
        row = rl_preset("ppo", critic_target=target, kl_reward_coef=0.0)
        assert np.allclose(critic_targets(row, batch, *shaped(row, batch, 0.0)), values), target
    for n, like in ((1, "td0"), (2, None), (9, "mc_return")):
        row = rl_preset("ppo", critic_target="n_step", n_steps=n, kl_reward_coef=0.0)
        assert np.allclose(
            critic_targets(row, batch, *shaped(row, batch, 0.0)),
            expected[like] if like else [[0.7, 1, 1], [0.3, 0.3, 0]],
        ), n
    row = rl_preset("oreo", options={"beta": 2.0})
    assert np.allclose(
        critic_targets(row, batch_of(bootstrap_B=0.0), *shaped(row, batch, 0.0)),
        [[1 - 1.2, 1 - 1.0, 1 - 0.6], [-1.8, -1.0, 0]],
    )


def test_a_critics_outcome_has_its_kl_taken_off():
    """kl_adjusted_outcome regresses on what the row is worth after its KL; ``terminal`` on the reward alone."""
    batch = batch_of(bootstrap_B=0.0)
    for target, values in (("kl_adjusted_outcome", [1 - 0.5 * 0.6, -0.5 * 0.9]), ("terminal", [1.0, 0.0])):
        row = rl_preset("ppo", critic_target=target, kl_reward_mode="sequence_sum")
        assert np.allclose(
            critic_targets(row, batch, *shaped(row, batch, 0.5)),
            np.where(batch.mask_BT, np.array(values)[:, None], 0.0),
        ), target


def test_groups_that_leave_the_step_leave_the_whitening_too():
    """NORM is over the loss mask: with zero_advantage=mask the zeros of groups without a signal moved mean and std."""
    batch = batch_of(
        rewards_B=np.array([1.0, 0.0, 1.0, 0.0, 0.5, 0.5]),
        group_of_B=np.array([0, 0, 0, 0, 1, 1]),
        mask_BT=np.array([[1, 1], [1, 0], [1, 0], [1, 1], [1, 1], [1, 1]], bool),
        kept_B=np.ones(6, bool),
        counted_B=np.ones(6, bool),
        kl_BT=None,
        log_ratio_BT=None,
        values_BT=None,
        bootstrap_B=0.0,
    )
    row = rl_preset("dr_grpo", whiten=True)
    for dropped, seen in ((True, slice(0, 4)), (False, slice(0, 6))):
        credit = assign(row, batch, 0.0, drop_dead=dropped)
        flat = credit.raw_BT[seen][batch.mask_BT[seen]]
        expected = np.where(batch.mask_BT, (credit.raw_BT - flat.mean()) / flat.std(), 0.0)
        assert np.allclose(credit.advantages_BT[seen], expected[seen], atol=1e-6)
    assert credit.informative_B.tolist() == [True] * 4 + [False] * 2


def test_advantages_are_clipped_on_both_sides():
    batch = batch_of(
        rewards_B=np.array([3.0, -2.0, 0.25, 0.0]),
        group_of_B=np.zeros(4, int),
        mask_BT=np.array([[1, 1, 1], [1, 1, 0], [0, 1, 1], [1, 0, 0]], bool),
        kept_B=np.ones(4, bool),
        counted_B=np.ones(4, bool),
        kl_BT=None,
        values_BT=None,
        bootstrap_B=0.0,
    )
    credit = assign(rl_preset("reinforce"), batch, 0.0, advantage_clip=1.5)
    assert credit.advantages_BT.tolist() == [[1.5, 1.5, 1.5], [-1.5, -1.5, 0], [0, 0.25, 0.25], [0, 0, 0]]
    assert credit.raw_BT.tolist() == [[3, 3, 3], [-2, -2, 0], [0, 0.25, 0.25], [0, 0, 0]]


def test_rejected_tokens_have_no_advantage_and_padding_neither():
    rejected = np.array([[0, 1, 0], [0, 0, 0]], bool)
    assert batch_of(rejected_BT=rejected).trained(np.array([True, False])).tolist() == [
        [True, False, True],
        [False, False, False],
    ]
    credit = assign(
        rl_preset("reinforce"), batch_of(rejected_BT=rejected, rewards_B=np.array([2.0, -1.0]), kl_BT=None), 0.0
    )
    assert credit.advantages_BT.tolist() == [[2, 0, 2], [-1, -1, 0]]


def test_an_unscorable_completion_is_credited_with_nothing():
    credit = assign(rl_preset("reinforce"), batch_of(rewards_B=np.array([np.nan, -1.0]), kl_BT=None), 0.0)
    assert credit.advantages_BT.tolist() == [[0, 0, 0], [-1, -1, 0]] and credit.informative_B.tolist() == [False, True]


def test_a_win_rate_is_the_mean_over_comparable_opponents():
    """NaN is no opponent; a completion without any is credited with nothing and teaches nothing."""
    nan = np.nan
    batch = batch_of(preference_BO=np.array([[0.9, nan, 0.6], [nan, nan, nan]]), kl_BT=None, rewards_B=np.zeros(2))
    credit = assign(rl_preset("nash_md"), batch, 0.0)
    assert np.allclose(credit.advantages_BT, [[0.25, 0.25, 0.25], [0, 0, 0]]) and credit.informative_B.tolist() == [
        True,
        False,
    ]


def test_constant_returns_leave_nothing_to_explain():
    """ops.monitor: null, not 0, which would pass for a critic that is as good as none."""
    from stages.policy.credit import explained_variance

    on = np.ones((2, 2), bool)
    assert (
        explained_variance(np.arange(4.0).reshape(2, 2), np.ones((2, 2)), on) is None
        and explained_variance(np.zeros((2, 2)), np.zeros((2, 2)), ~on) is None
    )
    assert explained_variance(np.arange(4.0).reshape(2, 2), np.arange(4.0).reshape(2, 2) + 7.0, on) == 1.0


def test_kl_modes_of_the_reward_reach_the_advantage():
    batch = batch_of(bootstrap_B=0.0)
    for mode, first in (
        ("sequence_sum", 1 - 0.5 * 0.6 - 0.5),
        ("sequence_mean", 1 - 0.5 * 0.2 - 0.5),
        ("token_broadcast", 1 - 0.5 * 0.1 - 0.5),
        ("token_terminal", 1 - 0.5 * 0.6 - 0.5),
    ):
        credit = assign(rl_preset("ppo_outcome", whiten=False, kl_reward_mode=mode), batch, 0.5)
        assert credit.advantages_BT[0, 0] == pytest.approx(first), mode
        assert credit.advantages_BT[1, 2] == 0


# --- exact KL, pretraining mix, weights -------------------------------------------------------------------------------


def items_of(rng, n=3, g=2, **extra):
    items = []
    for i in range(n):
        responses = [rng.integers(10, 250, rng.integers(2, 7)).tolist() for _ in range(g)]
        items.append(
            make_item(
                f"row-{i}",
                rng.integers(10, 250, 5).tolist(),
                responses,
                [[1] * len(r) for r in responses],
                advantages=rng.normal(size=g).tolist(),
                old_logps=[rng.normal(-5.5, 0.1, len(r)).tolist() for r in responses],
                **extra,
            )
        )
    return items


@pytest.mark.parametrize("direction", ["reverse", "forward"])
def test_exact_kl_in_chunks_equals_the_whole(tiny, direction, monkeypatch):
    from stages.models import modeling

    model, other = load_policy(tiny["policy"]).double(), load_policy(tiny["other"]).double()
    batch = collate(items_of(np.random.default_rng(0)))
    hidden, far = hidden_states(model, batch, batch.src_N), hidden_states(other, batch, batch.src_N).detach()
    logp, logq = (torch.log_softmax(m.get_output_embeddings()(h) / 0.7, -1) for m, h in ((model, hidden), (other, far)))
    whole = (logp.exp() * (logp - logq)).sum(-1) if direction == "reverse" else (logq.exp() * (logq - logp)).sum(-1)
    (expected,) = torch.autograd.grad((whole * torch.arange(len(whole))).sum(), hidden, retain_graph=True)
    if direction == "forward":  # KL-KD: the gradient of the cross-entropy from the other policy
        (kd,) = torch.autograd.grad(
            (-(logq.exp() * logp).sum(-1) * torch.arange(len(whole))).sum(), hidden, retain_graph=True
        )
        assert torch.allclose(kd, expected, atol=1e-10)
    monkeypatch.setattr(modeling, "HEAD_CHUNK_ELEMENTS", 4 * logp.shape[1])
    ours = exact_kl(head_of(model), hidden, head_of(other), far, 0.7, direction)
    (gradient,) = torch.autograd.grad((ours * torch.arange(len(ours))).sum(), hidden)
    assert (
        torch.allclose(ours, whole, atol=1e-10) and torch.allclose(gradient, expected, atol=1e-9) and (whole > 0).all()
    )


def loss_and_gradient(model, objective, items):
    counts = objective.counts(items)
    sums = objective(model, collate(items))
    terms = {k: t / max(counts[by], 1e-12) for k, (t, by) in sums.loss.items()}
    model.zero_grad()
    sum(terms.values()).backward()
    return terms, torch.cat([p.grad.flatten() for p in model.parameters()]), counts


def test_pretraining_rows_add_their_nll_and_touch_nothing_else(tiny):
    model = load_policy(tiny["policy"]).double()
    rng = np.random.default_rng(1)
    items, texts = items_of(rng), [rng.integers(10, 250, n).tolist() for n in (4, 9)]
    ptx = [make_item(f"ptx-{k}", [], [t], [[1] * len(t)], ptx=True) for k, t in enumerate(texts)]
    config = Config(preset="grpo", num_generations=2, beta=0.0)
    alone, g_alone, counts = loss_and_gradient(
        model, PolicyGradient(rl_preset("grpo", kl_loss_coef=0.0), config), items
    )
    mixed, g_mixed, mixed_counts = loss_and_gradient(
        model, PolicyGradient(rl_preset("grpo", kl_loss_coef=0.0, ptx_coef=3.0), config), items + ptx
    )
    assert (
        mixed["policy_loss"].item() == pytest.approx(alone["policy_loss"].item(), rel=1e-9)
        and counts["tokens"] == mixed_counts["tokens"]
    )
    nll = 0.0
    for t in texts:
        logits = model(input_ids=torch.tensor([t]), use_cache=False).logits[0, :-1]
        nll = nll - torch.log_softmax(logits, -1).gather(1, torch.tensor(t)[1:, None]).sum()
    nll = nll / (3 + 8)
    assert mixed["ptx_loss"].item() == pytest.approx(3.0 * nll.item(), rel=1e-6)
    model.zero_grad()
    nll.backward()
    only = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert torch.allclose(g_mixed - g_alone, 3.0 * only, atol=1e-6 * float(only.abs().max()))


def test_importance_weights_multiply_the_loss(tiny, rl):
    """TIS: weights of the trainer's log-probs against the sampler's; the same engine gives 1, a doctored one more."""
    model = load_policy(tiny["policy"]).double()
    items = items_of(np.random.default_rng(2))
    row, config = rl_preset("dapo"), Config(preset="dapo", num_generations=2)
    plain = loss_and_gradient(model, PolicyGradient(row, config), items)[0]["policy_loss"]
    for item in items:
        item.extra["weights"] = [[2.0] * len(r) for r in item.responses]
    assert loss_and_gradient(model, PolicyGradient(row, config), items)[0]["policy_loss"].item() == pytest.approx(
        2 * plain.item(), rel=1e-9
    )
    result, _ = rl("tis", {"preset": "dr_grpo", "importance_correction": "token_truncate", "max_steps": 1})
    for r in rows_of(result):
        assert np.allclose(r["is_weights"], 1, atol=1e-4) and np.allclose(r["logp_rollout"], r["logp_old"], atol=1e-4)


def test_group_scope_divides_by_the_tokens_of_each_prompt(tiny):
    model = load_policy(tiny["policy"]).double()
    items = items_of(np.random.default_rng(3))
    config = Config(preset="dapo", num_generations=2, token_norm_scope="group")
    whole = loss_and_gradient(model, PolicyGradient(rl_preset("dapo"), config), items)[0]["policy_loss"].item()
    batch = Config(preset="dapo", num_generations=2)
    each = [
        loss_and_gradient(model, PolicyGradient(rl_preset("dapo"), batch), [i])[0]["policy_loss"].item() for i in items
    ]
    assert whole == pytest.approx(np.mean(each), rel=1e-9)


def test_group_scope_is_that_of_the_separate_critic_too(tiny):
    """AGG: policy and value terms are averaged alike; the separate critic's was a mean over all tokens."""
    from stages.reward_models.reward_heads import new_reward_model

    model = new_reward_model(tiny["policy"]).double()
    torch.nn.init.normal_(model.score.weight)
    items = items_of(np.random.default_rng(3), n=4)
    for item in items:
        graded = [[0.5 * k] * len(r) for k, r in enumerate(item.responses)]
        item.extra.update(returns=graded, values=graded)

    def loss(items, **changes):
        config = Config(preset="ppo", num_generations=2, **changes)
        return loss_and_gradient(model, critics.ValueRegression(resolve_preset(config)[0], config, 0.0), items)[0][
            "value"
        ].item()

    assert len({i.n_targets for i in items}) > 1
    each = [loss([i]) for i in items]
    assert loss(items, token_norm_scope="group") == pytest.approx(np.mean(each), rel=1e-9)
    assert loss(items) == pytest.approx(np.average(each, weights=[i.n_targets for i in items]), rel=1e-9)


def test_nll_of_correct_completions_only(tiny):
    model = load_policy(tiny["policy"]).double()
    items = items_of(np.random.default_rng(4), values=[[0.0], [0.0]], correct=[True, False])
    terms = loss_and_gradient(
        model, PolicyGradient(rl_preset("vapo"), Config(preset="vapo", num_generations=2)), items
    )[0]
    total = count = 0.0
    for i in items:
        ids = torch.tensor([i.prompt.tolist() + i.responses[0].tolist()])
        logp = torch.log_softmax(model(input_ids=ids, use_cache=False).logits[0, :-1], -1).gather(1, ids[0, 1:, None])[
            len(i.prompt) - 1 :
        ]
        total, count = total - float(logp.sum()), count + len(logp)
    assert terms["positive_nll"].item() == pytest.approx(0.1 * total / count, rel=1e-6)


# --- filters, lengths, degenerate batches -----------------------------------------------------------------------------


def test_dynamic_sampling_refills_records_what_it_drops_and_gives_up(rl):
    """Every trained group has a signal; dropped ones are in prompt_stats with the reason; equal rewards end in a clear
    error.
    """
    config = {
        "preset": "dapo",
        "filter_groups_metric": "reward_std",
        "truncation_policy": "score",
        "num_generations": 2,
        "gen_batch_size": 3,
        "max_num_gen_batches": 30,
    }
    result, metrics = rl("dapo", config)
    rows = rows_of(result)
    assert len(rows) == 2 * 2 * 2 and all(
        len({r["reward"] for r in rows[i : i + 2]}) == 2 for i in range(0, len(rows), 2)
    )
    stats = rows_of(result, "prompt_stats")
    assert sum(s["kept"] for s in stats) == 4 and {s["drop_reason"] for s in stats if not s["kept"]} <= {
        "equal_rewards",
        "surplus",
    }
    assert any(s["drop_reason"] == "equal_rewards" for s in stats) and metrics[0]["groups/generation_batches"] >= 1
    with pytest.raises(Exception, match="max_num_gen_batches"):
        rl("dead", {**config, "reward_override": "none", "max_num_gen_batches": 2})


@pytest.mark.parametrize("preset", ["grpo", "rloo", "ppo", "p3o", "reinforce_pp"])
def test_equal_rewards_of_a_single_group_train_without_noise(rl, preset):
    """One prompt, all rewards equal: advantages exactly 0 where groups are compared, nothing non-finite anywhere."""
    result, metrics = rl(
        f"equal-{preset}", {"preset": preset, "prompts_per_step": 1, "reward_override": "none", "max_steps": 1}
    )
    assert all(np.isfinite(v) for v in metrics[0].values())
    if preset == "grpo":
        assert all(a == 0 for r in rows_of(result) for a in r["advantages"]) and metrics[0]["frac_reward_zero_std"] == 1


def test_what_trl_logs_is_logged_under_its_name_or_the_one_that_the_page_gives(rl):
    from stages.acting.agents import agent_metrics
    from tests.peers.page import logged_by_trl, not_logged_as

    prompt, ids = {"prompt_id": "p"}, [1]
    acted = Sample(prompt, ids, 0, [5], [-1.0], "stop", "", 1.0, {}, {}, tool_mask=[0], turns=[{"events": []}])
    settings = {"beta": 0.04, "entropy_coef": 0.1, "max_steps": 1, "stop_strings": ["e", "a", "o"], "top_k": 100}
    rewards = [{"name": "NAME", "kind": "length"}]
    _, (row,) = rl("names", {"preset": "grpo", **settings, "max_completion_length": 12, "rewards": rewards})
    elsewhere = not_logged_as("rl")
    assert {"reward/NAME", "reward/NAME/std"} <= row.keys() and len(elsewhere) > 5
    found = row.keys() | agent_metrics([acted]).keys() | {"aux_loss"}  # of mixtures: test_balance
    assert not [name for name in logged_by_trl("grpo") + logged_by_trl("rloo") if name not in found | elsewhere]
    assert not elsewhere & found, "and what the page says is not logged so is not"


def test_cut_completions_stay_in_the_statistics_and_leave_the_loss(rl):
    """OVERLONG: a masked completion still moves its group's mean unless told otherwise; all cut means an empty step."""
    source = rl.source(
        "cut",
        {
            "preset": "dr_grpo",
            "truncation_policy": "mask",
            "soft_punish_cache": 3,
            "max_completion_length": 4,
            "reward_override": "none",
        },
    )
    prompt, ids = source.order.prompts[0]
    made = [
        Sample(prompt, ids, 0, [50, 60], [-1.0, -1.0], "eos", "", 1.0, {}, {}),
        Sample(prompt, ids, 1, [50, 60, 70, 80], [-1.0] * 4, "length", "", 0.5, {}, {}),
    ]
    items = source.crediting([Group(prompt, ids, made, 0)], 0, 0).items
    assert [m.tolist() for m in items[0].masks] == [[1, 1], [0, 0, 0, 0]]
    # penalties: 2 tokens of 4 with a cache of 3 cost 1/3, 4 tokens cost 1
    assert items[0].extra["advantages"][0] == pytest.approx(((1 - 1 / 3) - (0.5 - 1)) / 2)
    source.config.truncated_in_stats = False
    assert source.crediting([Group(prompt, ids, made, 0)], 0, 0).items[0].extra["advantages"] == [0.0, 0.0]
    result, metrics = rl("all-cut", {"preset": "grpo_plus", "max_steps": 1})
    if all(r["truncated"] for r in rows_of(result)):
        assert metrics[0]["empty_step"] == 1 and metrics[0]["grad_norm"] == 0


def test_the_length_limit_follows_the_context_schedule(rl):
    result, metrics = rl("context", {"preset": "dr_grpo", "max_steps": 3, "context_schedule": [[0, 3], [2, 5]]})
    longest = [max(r["length"] for r in rows_of(result) if r["iteration"] == i) for i in range(3)]
    assert longest == [3, 3, 5]
    assert Config(max_completion_length=4, context_schedule=[(0, 3), (2, 9)]).longest_completion == 9


def test_steps_end_where_a_token_completes_the_separator():
    assert step_ends(["a", "b\n", "\nc", "d", "\n\n", "e"], "\n\n") == [2, 4, 5]
    assert (
        step_ends(["a\n\n"], "\n\n") == [0] and step_ends([], "\n\n") == [] and step_ends(["abc", "d"], "\n\n") == [1]
    )


# --- controllers, references, early stop ------------------------------------------------------------------------------


def test_a_kl_controller_moves_the_coefficient_towards_its_target(tiny, rl):
    """Policy far from the reference: Ziegler's rule raises the coefficient by a tenth of the clipped error per rollout;
    PPO's doubles it.
    """
    for controller, factor in (("adaptive_ziegler", 1.02), ("adaptive_ppo", 2.0)):
        _, metrics = rl(
            controller,
            {"preset": "rloo", "max_steps": 3, "kl_controller": controller, "target_kl": 1e-3},
            reference=tiny["other"],
        )
        coefs = [m["kl/coef"] for m in metrics]
        assert metrics[0]["kl/sequence_sum"] > 0.01 and coefs == pytest.approx([0.02, 0.02 * factor, 0.02 * factor**2])


def test_a_controller_of_the_kl_to_the_old_policy_measures_after_the_update(rl):
    """PPO-ADAPTKL: hardly any movement halves the coefficient, far too much doubles it."""
    for rate, factor in ((1e-7, 0.5), (3e-3, 2.0)):
        _, metrics = rl(
            f"old-{factor}",
            {
                "preset": "ppo_penalty_adaptive",
                "num_iterations": 1,
                "max_steps": 3,
                "learning_rate": rate,
                "truncation_policy": "score",
            },
        )
        assert [m["kl/coef"] for m in metrics] == pytest.approx([1.0, factor, factor**2])


def test_a_refreshed_reference_is_the_policy(rl):
    """Iterative GRPO: right after a hard copy the KL to the reference is 0, before it is not."""
    _, metrics = rl(
        "iter",
        {
            "preset": "grpo",
            "max_steps": 4,
            "ref_mode": "refresh",
            "ref_sync_steps": 2,
            "ref_sync_alpha": 1.0,
            "learning_rate": 3e-3,
        },
    )
    kl = [abs(m["kl/sequence_sum"]) for m in metrics]
    assert kl[0] < 1e-4 and kl[1] > 1e-3 and kl[2] < 1e-4 and kl[3] > 1e-3
    _, metrics = rl("previous", {"preset": "grpo", "max_steps": 3, "ref_mode": "previous", "learning_rate": 3e-3})
    assert all(abs(m["kl/sequence_sum"]) < 1e-6 for m in metrics)


def test_a_drifted_policy_samples_again(rl):
    config = {"preset": "dr_grpo", "max_steps": 6, "num_iterations": 3, "learning_rate": 1e-2}
    through, _ = rl("through", config)
    stopped, metrics = rl("stopped", {**config, "early_stop_kl": 1e-6})
    assert through["summary"]["iterations"] == 2 and stopped["summary"]["iterations"] == 6
    assert [m["policy/early_stops"] for m in metrics] == [0, 1, 1, 1, 1, 1]


def test_a_frozen_reference_that_moved_is_an_error(rl):
    source = rl.source("moved", {"preset": "grpo"})
    source.items(0)
    with torch.no_grad():
        next(source.reference.parameters()).add_(1.0)
    with pytest.raises(RuntimeError, match="reference"):
        source.close()


@pytest.mark.parametrize(
    "level, off, refused", (("token", 3e-4, True), ("token", 1e-5, False), ("sequence", 3e-3, True))
)
def test_a_sampler_that_disagrees_with_the_trainer_is_an_error(rl, monkeypatch, level, off, refused):
    """The ratio of the first minibatch is 1 to 1e-4 (ops.invariants); a product over a sequence's tokens adds their
    rounding up.
    """
    import stages.decoding.sampler

    drawn = stages.decoding.sampler.sample_step

    def shifted(*arguments):
        token, logp = drawn(*arguments)
        return token, logp - off

    monkeypatch.setattr(stages.decoding.sampler, "sample_step", shifted)
    settings = {"preset": "dr_grpo", "ratio_level": level, "max_steps": 1}
    if refused:
        with pytest.raises(RuntimeError, match="sampler and trainer disagree"):
            rl(f"shifted {level} {off}", settings)
    else:
        assert rl(f"shifted {level} {off}", settings)[1][0]["policy/ratio"] == pytest.approx(1 + off, abs=3e-6)


@pytest.mark.parametrize("preset", ["rloo", "reinforce", "dr_grpo", "topr"])
def test_errors_of_both_signs_do_not_cancel_in_the_ratio_check(rl, monkeypatch, preset):
    """Zero-mean noise on the sampler's log-probs leaves the mean ratio at 1, and surrogates without a ratio have none
    to look at: |ratio - 1| is what counts.
    """
    import stages.decoding.sampler

    drawn, sign = stages.decoding.sampler.sample_step, iter(range(10**9))

    def noisy(*arguments):
        token, logp = drawn(*arguments)
        return token, logp + 0.02 * (-1) ** next(sign)

    monkeypatch.setattr(stages.decoding.sampler, "sample_step", noisy)
    with pytest.raises(RuntimeError, match="sampler and trainer disagree"):
        rl(f"noisy {preset}", {"preset": preset, "max_steps": 1})


# --- off-policy data, opponents, order of prompts ---------------------------------------------------------------------


def test_stored_rollouts_are_trained_on_without_sampling(rl):
    """TOPR on another run's rollouts: same tokens and behaviour log-probs, rewards from the stored components."""
    first, _ = rl(
        "behaviour",
        {
            "preset": "dr_grpo",
            "num_generations": 3,
            "reward_override": "none",
            "rewards": [{"name": "length", "kind": "length", "max_length": 4, "cache_length": 3}],
        },
    )
    path = first["outputs"]["rollouts"]["path"]
    second, metrics = rl(
        "offline",
        {"preset": "topr", "baseline": "constant", "baseline_value": -0.5, "max_steps": 2, "reward_override": "none"},
        stored=path,
    )
    before = {(tuple(r["prompt_ids"]), tuple(r["completion_ids"])): r for r in rows_of(first)}
    for r in rows_of(second):
        original = before[tuple(r["prompt_ids"]), tuple(r["completion_ids"])]
        assert r["logp_old"] == original["logp_old"] and r["reward"] == pytest.approx(original["reward"])
        assert r["advantages"][0] == pytest.approx(r["reward"] + 0.5)
    assert (
        metrics[0]["replay/share"] == 1
        and metrics[0]["grad_norm"] > 0
        and metrics[0]["completions/generated_tokens"] == 0
    )
    sampled, stored = (open_dataset(r["outputs"]["rollouts"]["path"]).manifest["meta"] for r in (first, second))
    assert sampled["sampling"]["engine"] == "built-in" and "sampling" not in stored
    # of three completions two are a pair, which is said
    pairs = rl.source("pairs", {"preset": "copg"}, stored=path)
    assert pairs.crediting(pairs.stored.take(2), 0, 0).metrics["groups/unpaired_sequences"] == 2.0
    (told,) = [w["text"] for w in pairs.stage.warnings if w["code"] == "stored_unpaired"]
    assert told.startswith("4 of 4 groups") and "even num_generations" in told


def test_on_policy_presets_refuse_other_policies_rollouts():
    with pytest.raises(ValueError, match="topr"):
        resolve_preset(Config(preset="ppo", replay_fraction=0.5))


def test_replayed_groups_keep_the_log_probs_they_were_sampled_with(rl):
    result, metrics = rl(
        "replay",
        {
            "preset": "topr",
            "max_steps": 4,
            "prompts_per_step": 4,
            "num_generations": 2,
            "replay_fraction": 0.5,
            "replay_window": 3,
            "learning_rate": 3e-3,
        },
    )
    rows = rows_of(result)
    fresh = {
        (tuple(r["prompt_ids"]), tuple(r["completion_ids"])): r for r in rows if r["policy_version"] == r["iteration"]
    }
    replayed = [r for r in rows if r["policy_version"] < r["iteration"]]
    assert len(replayed) == 3 * 2 * 2 and metrics[1]["replay/share"] == 0.5 and metrics[3]["staleness/max"] >= 1
    for i, m in enumerate(metrics):  # what was sampled in an iteration, not what was trained on
        own = [r for r in rows if r["iteration"] == i == r["policy_version"]]
        assert m["completions/generated_tokens"] == sum(r["length"] for r in own) and m["reward"] == pytest.approx(
            np.mean([r["reward"] for r in own])
        )
    for r in replayed:
        original = fresh[tuple(r["prompt_ids"]), tuple(r["completion_ids"])]
        assert (
            r["logp_old"] == original["logp_old"]
            and original["iteration"] == r["policy_version"]
            and r["iteration"] - r["policy_version"] < 3
        )


def test_replayed_completions_are_counted_once_in_what_is_kept_from_batch_to_batch(tiny, rl):
    """The moving baseline, the running scale of rewards, and the KL that the controller moves the coefficient by are of
    fresh completions, all from the rows.
    """
    config = {
        "preset": "topr",
        "max_steps": 4,
        "prompts_per_step": 4,
        "num_generations": 2,
        "replay_fraction": 0.5,
        "replay_window": 3,
        "learning_rate": 3e-3,
        "baseline": "moving_average",
        "reward_norm": "running",
        "reward_override": "none",
        "rewards": [{"kind": "python", "source": "def score(completion_ids):\n    return sum(completion_ids) % 7"}],
        "kl_coef": 0.1,
        "kl_controller": "adaptive_ziegler",
        "kl_horizon": 100,
        "target_kl": 1e-3,
    }
    result, metrics = rl("counted-once", config, reference=tiny["other"])
    rows, seen, average, coef = rows_of(result), [], None, 0.1
    assert any(r["policy_version"] < r["iteration"] for r in rows)
    for i, metric in enumerate(metrics):
        batch = [r for r in rows if r["iteration"] == i]
        fresh = [r for r in batch if r["policy_version"] == i]
        earned = {id(r): sum(c["weight"] * c["value"] for c in r["reward_components"]) for r in batch}
        seen += [earned[id(r)] for r in fresh]
        for r in batch:
            assert r["reward"] == pytest.approx((earned[id(r)] - np.mean(seen)) / np.std(seen), abs=1e-5)
        kl = np.mean([np.sum(np.subtract(r["logp_old"], r["logp_ref"])) for r in fresh])
        assert metric["kl/sequence_sum"] == pytest.approx(kl, abs=1e-5) and metric["kl/coef"] == pytest.approx(coef)
        coef *= 1 + len(fresh) / 100 * np.clip(kl / 1e-3 - 1, -0.2, 0.2)
        mean = np.mean([r["shaped_reward"] for r in fresh])
        used = mean if average is None else average
        for r in batch:
            assert r["advantages"][0] == pytest.approx(r["shaped_reward"] - used, abs=1e-5)
        average = mean if average is None else 0.9 * average + 0.1 * mean


def test_the_mixture_sampler_draws_from_the_geometric_mixture(tiny):
    from stages.generation import MixtureSampler
    from tests.oracles import geometric_mixture
    from stages.decoding.sampling import SamplingParams

    policy, other = load_policy(tiny["policy"]), load_policy(tiny["other"])
    found = MixtureSampler(policy, other, _Plain(), 0.3).generate(
        [[20, 30, 40]], SamplingParams(max_new_tokens=4), [list(range(5))]
    )[0]
    for completion in found:
        ids = torch.tensor([[20, 30, 40] + completion.ids])
        with torch.no_grad():
            mixed = np.log(
                geometric_mixture(
                    policy(input_ids=ids).logits[0, 2:-1].double(), other(input_ids=ids).logits[0, 2:-1].double(), 0.3
                )
            )
        assert np.allclose(completion.logps, [m[i] for m, i in zip(mixed, completion.ids)], atol=1e-4)
    assert len({tuple(c.ids) for c in found}) > 1


class _Plain:
    def decode(self, ids, **settings):
        return " ".join(map(str, ids))

    def convert_tokens_to_ids(self, token):
        return None


def test_self_play_with_a_mixture_opponent(rl):
    """It samples as the two models are held, and says so where sampling_dtype is another type."""
    for dtype in ("float32", "bfloat16"):
        config = {"preset": "nash_md", "opponent": "mixture", "max_steps": 1, "sampling_dtype": dtype}
        result, metrics = rl(f"mixture-{dtype}", config)
        assert np.isfinite(metrics[0]["loss"]) and any(a != 0 for r in rows_of(result) for a in r["advantages"])
        told = [w["text"] for w in result["warnings"] if "opponent=mixture reads policy and reference" in w["text"]]
        assert len(told) == (dtype != "float32")


def test_prompt_orders(rl):
    """easy_to_hard sorts; E2H starts with the easy level and ends with the hard one; rerank comes back to prompts that
    teach.
    """
    n = 12
    prompts = [
        ({"row_id": str(i), "prompt_id": str(i), "extra_json": json.dumps({"difficulty": i % 3})}, [i])
        for i in range(n)
    ]

    def ordered(**config):
        return PromptOrder(Config(**config), prompts, lambda *purpose: randomness.rng(3, "rl", *purpose), 100)

    def rows(order, count, version=0):
        return [int(row["row_id"]) for row, _ in order.take(count, version)]

    passes = ordered()
    seen = rows(passes, n) + rows(passes, n)
    assert sorted(seen[:n]) == sorted(seen[n:]) == list(range(n)) and seen[:n] != seen[n:]
    assert rows(ordered(curriculum="easy_to_hard"), n) == sorted(range(n), key=lambda i: i % 3)
    places = sorted(range(n), key=lambda i: i % 3)
    # an easier one in the place of all but the easiest
    mixed = [places.index(i) for i in rows(ordered(curriculum="easy_to_hard", curriculum_mix=0.999999), 2 * n)]
    assert all(mixed[k] < k % n or mixed[k] == 0 == k % n for k in range(2 * n)) and len(set(mixed)) > 3
    means = [
        np.mean([i % 3 for i in rows(ordered(curriculum="gaussian", curriculum_sigma=0.3), 60, version)])
        for version in (0, 50, 100)
    ]
    assert means[0] < 0.2 and 0.8 < means[1] < 1.2 and means[2] > 1.8
    uneven = PromptOrder(
        Config(curriculum="cosine"),
        [
            ({"row_id": str(i), "extra_json": json.dumps({"level": level})}, [])
            for i, level in enumerate((9, 0.25, 8, 100))
        ],
        lambda *purpose: randomness.rng(3, "rl", *purpose),
        100,
    )
    # levels go by their size
    assert np.bincount(rows(uneven, 80), minlength=4).argsort().tolist() == [3, 0, 2, 1] and 3 not in rows(uneven, 20)
    told = uneven.metrics([Group(uneven.prompts[i][0], [], [], 0) for i in (1, 1, 3)])
    assert told == {
        "curriculum/mean_level": 100.5 / 3,
        "curriculum/level_0.25": 2 / 3,
        "curriculum/level_8": 0.0,
        "curriculum/level_9": 0.0,
        "curriculum/level_100": 1 / 3,
    }
    rerank = ordered(curriculum="rerank")
    assert sorted(rows(rerank, n)) == list(range(n))
    sample = Sample(prompts[0][0], [], 0, [], [], "eos", "")
    rerank.learn(
        [
            Group(prompts[i][0], [], [replace(sample, total=t) for t in (spread, 0.0)], 0)
            for i, spread in (
                (0, 0.2),
                (2, 1.0),
                (9, 0.5),
                (10, 0.5),
                *((i, 0.0) for i in range(n) if i not in (0, 2, 9, 10)),
            )
        ]
    )
    assert rows(rerank, 4) == [2, 9, 10, 0]
    later = ordered(curriculum="rerank")
    later.restore(json.loads(json.dumps(rerank.state(), sort_keys=True)))  # as a checkpoint does
    assert rows(later, 3) == rows(rerank, 3) == [2, 9, 10]
    with pytest.raises(ValueError, match="difficulty"):
        rl.source("none", {"preset": "dr_grpo", "curriculum": "cosine"})


@pytest.mark.parametrize("curriculum", get_args(Config.model_fields["curriculum"].annotation))
@pytest.mark.parametrize("solved", [None, 0.7])
def test_every_order_of_prompts_goes_on_from_a_checkpoint(curriculum, solved):
    """With what was learned of prompts so far: restored behind every batch it gives the prompts that it would have."""
    prompts = [({"row_id": str(i), "extra_json": json.dumps({"difficulty": i % 3})}, [i]) for i in range(12)]
    config = Config(curriculum=curriculum, curriculum_mix=0.3 * (curriculum == "easy_to_hard"), prompts_per_step=4)
    config = config.model_copy(update={"no_resampling_pass_rate": solved})

    def made():
        return PromptOrder(config, prompts, lambda *purpose: randomness.rng(5, "rl", *purpose), 20)

    straight, broken = made(), made()
    if straight.wants_counts:
        for order in (straight, broken):
            order.start_from({str(i): (8, i % 9) for i in range(11)})  # one was never scored
    taken, sample = [], Sample({}, [], 0, [7, 8], [-0.5, -1.5], "eos", "")
    for step in range(20):
        drawn = [[row["row_id"] for row, _ in order.take(4, step)] for order in (straight, broken)]
        assert drawn[0] == drawn[1], step
        taken.append(tuple(drawn[0]))
        right = np.random.default_rng(step).random((4, 3)) < 0.2 + 0.04 * step
        groups = [
            Group(prompts[int(row_id)][0], [], [replace(sample, total=float(ok), correct=bool(ok)) for ok in oks], 0)
            for row_id, oks in zip(drawn[0], right)
        ]
        for order in (straight, broken):
            order.learn(groups)
        again = made()
        again.restore(json.loads(json.dumps(broken.state(), sort_keys=True)))
        broken = again
    assert len(set(taken)) > 2


def test_what_is_learned_of_prompts_orders_them_by_hand():
    """PROMPT-RERANK: unscorable completions and a tool's tokens say nothing; prompts of which nothing is known come
    behind those with a signal, in their order. SELF-PACED: the threshold of this part of the run, batch by batch.
    """
    from stages.rollouts.prompts import counts_of, difficulty_of

    def ordered(n, **config):
        prompts = [({"row_id": str(i), "prompt_id": str(i)}, [i]) for i in range(n)]
        return PromptOrder(Config(**config), prompts, lambda *purpose: randomness.rng(3, "rl", *purpose), 10)

    def taken(order, n, version=0):
        return [int(row["row_id"]) for row, _ in order.take(n, version)]

    def group(order, i, totals, logps, tool_mask=None):
        row = order.prompts[i][0]
        ids = [5] * len(logps or [0])
        return Group(
            row,
            [],
            [Sample(row, [], k, ids, logps, "eos", "", total, tool_mask=tool_mask) for k, total in enumerate(totals)],
            0,
        )

    nan = float("nan")
    order = ordered(6, curriculum="rerank", rerank_score="confidence")
    order.learn(
        [
            group(order, 0, [1.0, 0.0], [-1.0, -9.0], [0, 1]),
            group(order, 1, [1.0, 0.0], [-2.0, -2.0]),
            group(order, 2, [nan, nan], [-3.0]),
            group(order, 3, [1.0, nan], [-3.0]),  # one reward alone teaches nothing
            group(order, 4, [1.0, 0.0], None),
        ]
    )
    assert order.scores == pytest.approx({"0": np.exp(1.0), "1": np.exp(2.0), "3": 0.0})
    assert taken(order, 5) == [1, 0, 2, 4, 5]
    order.learn([group(order, 1, [nan, nan], [-3.0])])
    order.leave_out({"0", "5"})
    assert taken(order, 3) == [1, 2, 4]
    spread = ordered(3, curriculum="rerank")
    spread.learn([group(spread, i, [0.0, total], None) for i, total in enumerate((0.5, 2.0, 0.0))])
    assert spread.scores == {"0": 0.25, "1": 1.0, "2": 0.0} and taken(spread, 2) == [1, 0]

    paced = ordered(12, curriculum="self_paced", self_paced_thresholds=(0.4, 0.9), prompts_per_step=3)
    paced.start_from({str(i): (4, (0, 2, 3)[i % 3]) for i in range(12)})
    first = taken(paced, 1)
    assert len(paced.queue) == 2  # three to a batch
    first += taken(paced, 7)
    assert sorted(first) == [2, 2, 5, 5, 8, 8, 11, 11]
    # those that were let in since come first
    assert sorted(taken(paced, 4, version=5)) == [1, 4, 7, 10]
    assert sorted(taken(paced, 8, version=5)) == [1, 2, 4, 5, 7, 8, 10, 11]

    extra = {"difficulty": 2, "level": 5, "pass_rate": 0.25}
    found = []
    for name in ("", "difficulty", "level"):
        extra.pop(name, None)
        found.append(difficulty_of({"row_id": "r", "extra_json": json.dumps(extra)}, "cosine"))
    assert found == [2.0, 5.0, 0.75]
    stats = [
        {"prompt_id": "p", "iteration": iteration, "n": n, "pass_at_1": rate}
        for iteration, n, rate in ((-1, 8, 0.5), (2, 3, 1 / 3), (1, 4, 1.0), (2, 5, 0.4), (3, 5, None))
    ]
    assert counts_of([({"row_id": "r", "prompt_id": "p"}, [1])], stats) == {"r": (5, 2)}
    assert counts_of([({"row_id": "r", "prompt_id": "p"}, [1])], stats[:2]) == {"r": (3, 1)}


@pytest.mark.parametrize("curriculum", ["none", "easy_to_hard", "cosine", "pass_at_k"])
def test_a_difficulty_band_holds_for_every_order(curriculum):
    """Only prompts in the band come, in their own order, also behind a resume and where every admitted prompt lies
    outside it.
    """
    prompts = [
        ({"row_id": str(i), "prompt_id": str(i), "extra_json": json.dumps({"difficulty": i % 3})}, [i])
        for i in range(12)
    ]

    def ordered():
        return PromptOrder(
            Config(curriculum=curriculum, difficulty_band=(0.2, 0.6), passk_bands=[0.9, 0.0], prompts_per_step=4),
            prompts,
            lambda *purpose: randomness.rng(3, "rl", *purpose),
            10,
        )

    wide = ordered()
    wide.config = wide.config.model_copy(update={"passk_k": 4})
    # pass@k needs k samples, a pass rate one
    assert list(wide.enough({"one": (1, 1), "many": (10, 3)})) == (
        ["many"] if curriculum == "pass_at_k" else ["one", "many"]
    )
    order, counts = ordered(), {str(i): (10, min(i, 10)) for i in range(12)}
    assert order.wants_counts and order.start_from(counts) == {"2", "3", "4", "5", "6"} and not order.wants_counts
    again = ordered()
    again.restore(json.loads(json.dumps(order.state())))
    first = [row["row_id"] for row, _ in order.take(10, 0)]
    assert set(first) <= {"2", "3", "4", "5", "6"} and first == [row["row_id"] for row, _ in again.take(10, 0)]
    if curriculum == "easy_to_hard":
        assert {0, 1, 2} == {int(i) % 3 for i in first}
    with pytest.raises(ValueError, match="widen it"):
        ordered().start_from({str(i): (2, 2) for i in range(12)})


def test_an_adapter_trains_with_a_critic(rl):
    result, metrics = rl("lora", {"preset": "ppo", "lora_rank": 2, "num_iterations": 2, "truncation_policy": "score"})
    assert (
        metrics[-1]["grad_norm"] > 0
        and metrics[-1]["critic/grad_norm"] > 0
        and set(result["outputs"]) >= {"model", "critic"}
    )


def test_an_adapter_and_a_shared_value_head_train_together(tiny, rl, monkeypatch):
    """The head reads the adapted trunk and is trained beside the adapter; the reference is the model without either,
    and so is what is published.
    """
    heads, made = [], critics.new_value_head

    def watched(*arguments):
        heads.extend([made(*arguments), made(*arguments)])
        return heads[0]

    monkeypatch.setattr(critics, "new_value_head", watched)
    config = {
        "preset": "ppo",
        "lora_rank": 2,
        "critic_mode": "shared",
        "num_iterations": 2,
        "truncation_policy": "score",
        "learning_rate": 1e-2,
    }
    result, metrics = rl("lora-shared", config)
    assert (
        metrics[-1]["grad_norm"] > 0 and all(m["value_loss"] > 0 for m in metrics) and "critic" not in result["outputs"]
    )
    assert not torch.equal(heads[0].weight, heads[1].weight)
    after, before = (
        dict(load_policy(p).named_parameters()) for p in (result["outputs"]["model"]["path"], tiny["policy"])
    )
    assert after.keys() == before.keys() and {n for n in before if not torch.equal(before[n], after[n])} == {
        n for n in before if n.endswith("_proj.weight")
    }


def test_one_prompt_fills_a_batch_with_groups_of_its_own(tiny, data, spec):
    """recipe.one_shot_rlvr: max_prompts=1 draws the first prompt of the split several times in a step, each time with
    other completions.
    """
    made = spec(
        "rl",
        {**SMALL, "preset": "dr_grpo", "max_steps": 2, "prompts_per_step": 3, "num_generations": 4, "max_prompts": 1},
        {"model": tiny["policy"], "data": data["prompts"]},
        "one",
    )
    rows = list(open_dataset(execute(made, lambda event: None)["outputs"]["rollouts"]["path"]).iter_rows())
    first = next(iter(open_dataset(data["prompts"]).iter_rows(split="train")))
    assert (
        len(rows) == 2 * 12
        and {r["prompt_id"] for r in rows} == {first["prompt_id"]}
        and len({tuple(r["completion_ids"]) for r in rows}) > 18
    )
    for iteration in (0, 1):  # a group is four draws, not all twelve
        part = [r for r in rows if r["iteration"] == iteration]
        for group in (part[k : k + 4] for k in (0, 4, 8)):
            assert sum(r["advantages"][0] for r in group) == pytest.approx(0, abs=1e-4)


def test_a_base_model_is_prompted_with_plain_text(tiny, data, spec):
    """RL-ZERO: the prompt template is a setting of RL and of the evaluation; none and think_answer hold no chat
    tokens.
    """
    from stages.chat import renderer_for

    tokenizer = renderer_for(tiny["policy"]).tokenizer
    prompts = {r["prompt_id"]: r["prompt"][0]["content"] for r in open_dataset(data["prompts"]).iter_rows()}
    for template, start, end in (
        ("none", "what is", "?"),
        ("think_answer", "A conversation between User and Assistant.", "?. Assistant:"),
    ):
        made = spec(
            "rl",
            {
                **SMALL,
                "preset": "dr_grpo",
                "max_steps": 1,
                "prompt_template": template,
                "max_completion_length": 4,
                "max_prompt_length": 1000,
            },
            {"model": tiny["policy"], "data": data["prompts"]},
            f"zero-{template}",
        )
        if template == "think_answer":  # longer than the tiny model's positions: it says so before anything is trained
            with pytest.raises(Exception, match="positions"):
                execute(made, lambda event: None)
            continue
        for row in rows_of(execute(made, lambda event: None)):
            text = tokenizer.decode(row["prompt_ids"])
            assert text == prompts[row["prompt_id"]] and text.startswith(start) and text.endswith(end)
    from stages.generation import prompt_ids

    text = tokenizer.decode(
        prompt_ids(renderer_for(tiny["policy"]), [{"role": "user", "content": "what is 1 plus 1?"}], "think_answer")
    )
    assert (
        text.startswith(start) and text.endswith("User: what is 1 plus 1?. Assistant:") and "<|im_start|>" not in text
    )
    hashes = {
        t: execute(
            spec(
                "evaluate",
                {"num_samples": 0, "limit": 2, "max_completion_length": 2, "prompt_template": t},
                {"model": tiny["policy"], "prompts": tiny["prompts"]},
                f"e-{t}",
            ),
            lambda event: None,
        )["summary"]["protocol_hash"]
        for t in ("chat", "none")
    }
    assert hashes["chat"] != hashes["none"]


def test_what_is_kept_of_completions_of_different_length(rl):
    """A number of every token of the completion and none of the padding; of every group what its rows say."""
    result, _ = rl(
        "kept",
        {
            "preset": "ppo",
            "max_steps": 1,
            "prompts_per_step": 3,
            "num_generations": 4,
            "importance_correction": "token_truncate",
            "stop_strings": list("aeioulnrst"),
            "reward_override": "none",
            "rewards": [{"name": "long", "kind": "python", "source": LONG}],
            "truncation_policy": "score",
        },
    )
    rows = rows_of(result)
    assert len({len(r["completion_ids"]) for r in rows}) > 2
    for r in rows:
        for (
            column
        ) in "loss_mask logp_old logp_rollout logp_ref values token_rewards advantages returns is_weights".split():
            assert len(r[column]) == r["length"] == len(r["completion_ids"]), column
        assert r["logp_plain_prompt"] is None and r["truncated"] == (not r["terminated"]) and r["extra_json"] is None
    for group in rows_of(result, "prompt_stats"):
        own = [r for r in rows if r["prompt_id"] == group["prompt_id"]]
        rewards = [r["reward"] for r in own]
        assert group["n"] == len(own) == 4 and group["kept"] and group["drop_reason"] is None
        assert group["mean_reward"] == pytest.approx(np.mean(rewards))
        assert group["reward_std"] == pytest.approx(np.std(rewards))
        assert group["pass_at_1"] == pytest.approx(np.mean([r["is_correct"] for r in own]))
        assert json.loads(group["extra_json"])["verdicts"] == [4, sum(r["is_correct"] for r in own)]
        assert group["mean_logprob"] == pytest.approx(np.mean(np.concatenate([r["logp_old"] for r in own])), rel=1e-5)


@pytest.mark.parametrize("preset, reference", [("grpo", True), ("dapo", False)])
def test_an_update_is_recomputed_from_the_rollouts_alone(tiny, rl, preset, reference):
    """ops: advantages from the rows' rewards, loss and gradient norm of the step from the rows' ids, masks, log-probs
    and temperature, with the model's own forward; and every completion drawn again from its row's seed and the settings
    in the manifest."""
    result, metrics = rl(
        "audited",
        {
            "preset": preset,
            "max_steps": 1,
            "max_grad_norm": 1e9,
            "temperature": 0.8,
            "dynamic_sampling": False,
            "prompts_per_step": 3,
            "truncation_policy": "score",
        },
    )
    rows = list(open_dataset(result["outputs"]["rollouts"]["path"]).iter_rows())
    assert len(rows) == 12 and any(any(r["loss_mask"]) for r in rows)
    preset = rl_preset(preset)
    groups = {}
    for r in rows:
        groups.setdefault(r["prompt_id"], []).append(r["shaped_reward"])
    model = load_policy(tiny["policy"])
    terms, lengths = [], []
    for r in rows:
        rewards = groups[r["prompt_id"]]
        std = np.std(rewards, ddof=preset.std_ddof) + preset.std_eps
        assert r["advantages"] == pytest.approx(
            [m * (r["shaped_reward"] - np.mean(rewards)) / std for m in r["loss_mask"]], abs=1e-5
        )
        n, mask = len(r["completion_ids"]), torch.tensor(r["loss_mask"], dtype=torch.bool)
        logits = (
            model(input_ids=torch.tensor([[*r["prompt_ids"], *r["completion_ids"]]])).logits[0, -n - 1 : -1]
            / r["gen"]["temperature"]
        )
        logp = logits.log_softmax(-1).gather(1, torch.tensor(r["completion_ids"])[:, None])[:, 0]
        assert torch.allclose(logp.detach()[mask], torch.tensor(r["logp_old"])[mask], atol=1e-5)
        ratio, advantage = torch.exp(logp - torch.tensor(r["logp_old"])), torch.tensor(r["advantages"])
        token = -torch.minimum(
            ratio * advantage, ratio.clamp(1 - preset.epsilon, 1 + (preset.epsilon_high or preset.epsilon)) * advantage
        )
        assert (r["logp_ref"] is not None) == reference
        assert r["logp_rollout"] is None and r["logp_plain_prompt"] is None, "they are those of logp_old"
        if reference:
            log_ratio = torch.tensor(r["logp_ref"]) - logp
            token = token + preset.kl_loss_coef * (torch.exp(log_ratio) - 1 - log_ratio)
        if mask.any():
            terms.append(token[mask])
            lengths.append(int(mask.sum()))
    from stages.chat import renderer_for
    from stages.decoding.sampler import Sampler
    from stages.decoding.sampling import SamplingParams

    how = open_dataset(result["outputs"]["rollouts"]["path"]).manifest["meta"]["sampling"]
    assert how["temperature"] == 0.8 and how["min_p"] == 0.0 and how["logp_old"] == "sampler"
    params = SamplingParams(**{name: how[name] for name in SamplingParams.__dataclass_fields__ if name in how})
    again = Sampler(model, renderer_for(tiny["policy"]).tokenizer).generate(
        [r["prompt_ids"] for r in rows], params, [[r["gen"]["rng_seed"]] for r in rows]
    )
    assert [list(c.ids) for (c,) in again] == [r["completion_ids"] for r in rows] and len(
        {r["gen"]["rng_seed"] for r in rows}
    ) == 12
    loss = (
        torch.stack([t.mean() for t in terms]).mean()
        if preset.aggregation == "seq-mean-token-mean"
        else torch.cat(terms).sum() / sum(lengths)
    )
    loss.backward()
    norm = torch.sqrt(sum(p.grad.double().square().sum() for p in model.parameters() if p.grad is not None))
    step = next(m for m in metrics if "loss" in m)
    assert step["loss"] == pytest.approx(float(loss.detach()), abs=2e-6) and norm > 1e-3
    assert step["grad_norm"] == pytest.approx(float(norm), rel=2e-3)
