"""stages/FROM_OPENRLHF.md is true: every row of its tables, run by OpenRLHF's functions and by this project's stage, in
float64 on this side.

Left out where OpenRLHF is not installed (``pip install --no-deps openrlhf``).
"""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from stages.estimators import gae
from stages.losses import bradley_terry_loss, kl_estimate, value_loss
from stages.rl import Config
from tests.peers import openrlhf_side, our_side, trl_side
from tests.peers.completions import PAIRS, RATE, apart, from_another_engine, uneven
from tests.peers.page import OPENRLHF, Row, names_of, rows_of

if openrlhf_side.FOLDER is None:
    pytest.skip("OpenRLHF is not installed", allow_module_level=True)

ROWS = rows_of(OPENRLHF)


def both(row: Row, models, prompts, folder):
    """(our run, OpenRLHF's, the weights that both started from)."""
    policy, other, start = models["policy"], models["other"], trl_side.flat(trl_side.model_of(models["policy"]))
    if row.stage == "align":
        ours = our_side.align(policy, other, PAIRS, folder / "ours", **row.settings("ours"))
        return (
            ours,
            openrlhf_side.dpo(
                policy,
                other,
                [item for batch in ours.batches for item in batch["items"]],
                1e-2,
                **row.settings("theirs"),
            ),
            start,
        )
    change, settings = from_another_engine if row.section.endswith("/With") else uneven, row.settings("ours")
    if {"soft_punish_cache", "truncation_policy"} & settings.keys():
        settings["reward_override"] = "none"  # which would take the penalties out
    ours, sampled = our_side.on_policy(
        policy,
        other,
        prompts,
        folder / "ours",
        change=change,
        learning_rate=RATE,
        max_tokens_per_micro_batch=64,
        **settings,
    )
    return (
        ours,
        openrlhf_side.on_policy(
            policy, other, sampled, num_generations=4, learning_rate=RATE, limit=8, **row.settings("theirs")
        ),
        start,
    )


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.theirs)
def test_a_row_of_the_page_is_true(row, models, prompts, tmp_path):
    ours, theirs, start = both(row, models, prompts, tmp_path)
    if row.says.startswith("differs"):
        assert any(apart(a, b) > 1e-3 for a, b in zip(ours.gradients, theirs.gradients))
        return
    for k in range(trl_side.STEPS):
        near = 1e-5 if k == 0 else 1e-3
        if "gradient" not in row.says.split(";")[0]:
            assert ours.losses[k] == pytest.approx(theirs.losses[k], rel=near, abs=near / 3)
        assert ours.norms[k] == pytest.approx(theirs.norms[k], rel=near, abs=1e-9)
        assert apart(ours.gradients[k], theirs.gradients[k]) < near
        assert apart(ours.weights[k] - start, theirs.weights[k] - start) < 1e-3
    assert float((theirs.weights[-1] - start).norm()) > 1e-2


def the_kl_of_a_token_and_of_those_behind_it(models, prompts, folder):
    """With the KL in the loss of both, nothing is left of the difference."""
    row = row_of("algo.advantage.estimator=rloo algo.kl.init_coef=0.1")
    shared = {
        "algo.advantage": {"estimator": "rloo"},
        "algo.kl": {"init_coef": 0.1, "use_loss": True, "estimator": "k3"},
    }
    ours, sampled = our_side.on_policy(
        models["policy"],
        models["other"],
        prompts,
        folder / "ours",
        change=uneven,
        learning_rate=RATE,
        **row.settings("ours") | {"kl_coef": 0.0, "beta": 0.1},
    )
    theirs = openrlhf_side.on_policy(
        models["policy"], models["other"], sampled, num_generations=4, learning_rate=RATE, limit=8, **shared
    )
    assert all(apart(a, b) < 1e-3 for a, b in zip(ours.gradients, theirs.gradients))


def the_kl_is_a_mean_over_tokens(models, prompts, folder):
    """A difference of the KL term alone: without it (beta 0) the two agree, as a row of the page says."""
    row = row_of(
        "algo.advantage.estimator=group_norm algo.kl.init_coef=0.1 algo.kl.use_loss=true algo.kl.estimator=k3"
        " actor.loss_agg_mode=seq-mean-token-mean"
    )
    ours, theirs, _ = both(row, models, prompts, folder)
    without = Row(
        row.section,
        row.stage,
        row.theirs.replace("init_coef=0.1", "init_coef=0"),
        row.ours.replace("beta=0.1", "beta=0"),
        "the same",
    )
    plain, plain_theirs, _ = both(without, models, prompts, folder / "plain")
    assert apart(ours.gradients[0], theirs.gradients[0]) > 1e-3 > apart(plain.gradients[0], plain_theirs.gradients[0])


def a_tokens_kl_ends_at_ten_nats(models, prompts, folder):
    """Towards a reference that is near, where no d^2/2 is above 10, the two agree."""
    row = row_of("algo.advantage.estimator=group_norm algo.kl.init_coef=0.1 algo.kl.use_loss=true algo.kl.estimator=k2")
    ours, theirs, _ = both(row, {**models, "other": models["policy"]}, prompts, folder)
    assert all(apart(a, b) < 1e-3 for a, b in zip(ours.gradients, theirs.gradients))
    d = torch.tensor([[4.0, 5.0]], requires_grad=True)
    assert openrlhf_side.modules()[1].compute_approx_kl(d, torch.zeros(1, 2), kl_estimator="k2").tolist() == [
        [8.0, 10.0]
    ]


EXPLAINED = {
    "algo.advantage.estimator=group_norm algo.kl.init_coef=0.1 algo.kl.use_loss=true algo.kl.estimator=k2": (
        a_tokens_kl_ends_at_ten_nats
    ),
    "algo.advantage.estimator=rloo algo.kl.init_coef=0.1": the_kl_of_a_token_and_of_those_behind_it,
    "algo.advantage.estimator=group_norm algo.kl.init_coef=0.1 algo.kl.use_loss=true algo.kl.estimator=k3 actor.loss_agg_mode=seq-mean-token-mean": (
        the_kl_is_a_mean_over_tokens
    ),
}


def row_of(theirs: str) -> Row:
    return next(row for row in ROWS if row.theirs == theirs)


def test_every_difference_is_explained():
    assert {row.theirs for row in ROWS if row.says.startswith("differs")} == set(EXPLAINED)


@pytest.mark.parametrize("why", EXPLAINED.values(), ids=lambda why: why.__name__)
def test_why_a_row_differs(why, models, prompts, tmp_path):
    why(models, prompts, tmp_path)


def test_reward_model_and_value_losses_are_the_same():
    losses = openrlhf_side.modules()[0]
    torch.manual_seed(0)
    chosen, rejected, margin = torch.randn(3, 6, dtype=torch.float64)
    assert torch.allclose(
        losses.PairWiseLoss()(chosen, rejected, margin), bradley_terry_loss(chosen, rejected, margin).mean(), atol=1e-14
    )
    assert torch.allclose(
        losses.LogExpLoss()(chosen, rejected), bradley_terry_loss(chosen, rejected).mean(), atol=1e-14
    )
    values, old, returns = torch.randn(3, 4, 5, dtype=torch.float64)
    mask = torch.tensor([[1] * n + [0] * (5 - n) for n in (5, 3, 1, 4)])
    for clip in (None, 0.2):
        theirs = losses.ValueLoss(clip)(values, old, returns, mask)
        assert torch.allclose(
            theirs, value_loss(values, returns, mask, old, clip, half=True).sum() / mask.sum(), atol=1e-14
        )


def test_the_names_of_the_page_are_options_of_openrlhf():
    """The first of each row; what follows is what it was called before."""
    known = openrlhf_side.shipped()
    assert not [names[0] for names, _, _ in names_of(OPENRLHF) if names[0] not in known]


# --- what is not a row: critics, and the last table -------------------------------------------------------------------


def their_gae(rewards, values, mask, gamma, lam):
    return openrlhf_side.modules()[2].RemoteExperienceMaker.get_advantages_and_returns(
        None, values, rewards, mask, gamma, lam
    )


def test_gae_of_answers_without_tools_is_the_same():
    torch.manual_seed(0)
    rewards, values = torch.randn(2, 3, 5, dtype=torch.float64)
    mask = torch.tensor([[1] * n + [0] * (5 - n) for n in (5, 3, 1)])
    for gamma, lam in ((1.0, 1.0), (0.9, 0.8)):
        theirs, returns = their_gae(rewards, values, mask, gamma, lam)
        ours, targets = gae(rewards, values, mask, 0.0, gamma, lam)
        assert np.allclose(theirs[mask.bool()], ours[mask.bool()], atol=1e-12) and np.allclose(
            returns[mask.bool()], targets[mask.bool()], atol=1e-12
        )


def tokens_of_a_tool():
    """Two tokens of the policy around one of a tool, gamma and lambda 1/2, values 0: the reward comes back two steps
    there, one here.
    """
    rewards, mask = torch.tensor([[0.0, 0.0, 1.0]], dtype=torch.float64), torch.tensor([[1, 0, 1]])
    assert float(their_gae(rewards, torch.zeros(1, 3), mask, 0.5, 0.5)[0][0, 0]) == 0.25**2
    assert gae(rewards, torch.zeros(1, 3), mask, 0.0, 0.5, 0.5)[0][0, 0] == 0.25


def kl_of_log_probs():
    d = torch.tensor([[-4.0, 1.0]], dtype=torch.float64)
    theirs = openrlhf_side.modules()[1].compute_approx_kl(d, torch.zeros(1, 2), kl_estimator="k3")
    ours = kl_estimate(d, torch.zeros(1, 2), "k3", torch.ones(1, 2))
    assert theirs.dtype == torch.float32 and theirs[0, 0] == 10 < ours[0, 0] and ours.dtype == torch.float64


def k1_in_the_loss():
    with pytest.raises(ValueError, match="kl_estimator"):
        Config(preset="grpo", beta=0.1, kl_estimator="k1")


#: The tests of the last table, by its first column.
ALSO = {"tokens of a tool": tokens_of_a_tool, "KL of log-probs": kl_of_log_probs, "k1 in the loss": k1_in_the_loss}


def test_every_other_difference_has_a_test():
    assert re.findall(r"^\| `([^`]+)` \|", OPENRLHF.partition("## What else")[2], re.M) == list(ALSO)


@pytest.mark.parametrize("what", ALSO)
def test_what_else_is_not_the_same(what):
    ALSO[what]()
