"""stages/FROM_VERL.md is true: every row of its tables, run by verl's functions and by stage ``rl``, in float64.

Left out where verl is not installed (``pip install --no-deps verl``).
"""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from stages.estimators import KLController, gae, whiten
from stages.losses import aggregate, denominator_of, kl_estimate, value_loss
from stages.rl import Config, resolve_preset
from tests.peers import our_side, trl_side, verl_side
from tests.peers.completions import RATE, apart, from_another_engine, uneven
from tests.peers.page import VERL, Row, names_of, rows_of

if verl_side.FOLDER is None:
    pytest.skip("verl is not installed", allow_module_level=True)

ROWS = rows_of(VERL)


def binary(samples, iteration: int) -> None:
    """Rewards of 0 and 1, in every second group as it comes equal ones."""
    uneven(samples, iteration)
    for i, sample in enumerate(samples):
        sample.total = float(i % 4 == 1 or i % 8 < 4 and i % 3 == 0) if (i // 4 + iteration) % 2 else 0.0


def change_of(row: Row):
    return (
        from_another_engine
        if row.section.endswith("/With")
        else binary
        if "adv_estimator=gpg" in row.theirs
        else uneven
    )


def both(row: Row, models, prompts, folder, reorder=lambda sampled, ours: sampled, **more):
    """(our run, verl's, the weights that both started from). ``reorder``: what verl is given of what we sampled."""
    ours, sampled = our_side.on_policy(
        models["policy"],
        models["other"],
        prompts,
        folder / "ours",
        change=change_of(row),
        learning_rate=RATE,
        max_tokens_per_micro_batch=64,
        **row.settings("ours") | more,
    )
    theirs = verl_side.on_policy(
        models["policy"],
        models["other"],
        reorder(sampled, ours),
        num_generations=4,
        learning_rate=RATE,
        sampler=row.section.endswith("/With"),
        **row.settings("theirs"),
    )
    return ours, theirs, trl_side.flat(trl_side.model_of(models["policy"]))


def agree(ours, theirs, start, losses: bool = True, near: float = 1e-7) -> None:
    for k in range(trl_side.STEPS):
        if k == 1:
            near *= 100  # Adam divides by roots of squares, which enlarges rounding where gradients are next to nothing
        if losses:
            assert ours.losses[k] == pytest.approx(theirs.losses[k], rel=near, abs=near / 3)
        assert ours.norms[k] == pytest.approx(theirs.norms[k], rel=near, abs=1e-9)
        assert apart(ours.gradients[k], theirs.gradients[k]) < near
        assert apart(ours.weights[k] - start, theirs.weights[k] - start) < 100 * near
    assert float((theirs.weights[-1] - start).norm()) > 1e-2


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.theirs)
def test_a_row_of_the_page_is_true(row, models, prompts, tmp_path):
    ours, theirs, start = both(row, models, prompts, tmp_path)
    if row.says.startswith("the same"):
        agree(
            ours,
            theirs,
            start,
            losses="gradient" not in row.says.split(";")[0],
            near=1e-5 if "float32" in row.says else 1e-7,
        )
    else:
        assert any(apart(a, b) > 1e-3 for a, b in zip(ours.gradients, theirs.gradients)) or ours.norms != pytest.approx(
            theirs.norms, rel=1e-3
        )


# --- why rows differ --------------------------------------------------------------------------------------------------


def row_of(theirs: str) -> Row:
    return next(row for row in ROWS if row.theirs == theirs)


def prompts_in_the_same_order(models, prompts, folder):
    """Given the groups in the order of our steps verl's run is ours."""

    def reorder(sampled, ours):
        found = []
        for k, given in enumerate(sampled):
            first = (
                [response.tolist() for response in ours.batches[2 * k]["items"][0].responses]
                if 2 * k < len(ours.batches)
                else given["completion_ids"][:4]
            )
            groups = (0, 1) if given["completion_ids"][:4] == first else (1, 0)
            found.append(
                {
                    name: None if value is None else [value[4 * g + i] for g in groups for i in range(4)]
                    for name, value in given.items()
                }
            )
        return found

    agree(*both(row_of("adv_estimator=grpo ppo_mini_batch_size=1"), models, prompts, folder, reorder))


def completions_of_groups_without_a_signal(models, prompts, folder):
    """One group of two teaches nothing: the paper's factor is 2, verl's is 8 over the number of rewards that are not
    0.
    """
    row = row_of("adv_estimator=gpg loss_mode=gpg")
    ours, theirs, _ = both(row, models, prompts, folder, max_grad_norm=1e9)
    masked, _, _ = both(
        row,
        models,
        prompts,
        folder / "mask",
        max_grad_norm=1e9,
        zero_advantage="mask",
        loss_agg_mode="seq-mean-token-mean",
    )
    plain, _, _ = both(row, models, prompts, folder / "plain", max_grad_norm=1e9, loss_agg_mode="seq-mean-token-mean")
    assert plain.norms[0] > 0 and masked.norms[0] == pytest.approx(2 * plain.norms[0])
    right = sum(sample > 0 for sample in rewards_of(binary))
    assert theirs.norms[0] == pytest.approx(8 / right * ours.norms[0], rel=1e-6) and right != 4


def rewards_of(change) -> list[float]:
    from types import SimpleNamespace

    samples = [
        SimpleNamespace(ids=[5] * 8, logps=[0.0] * 8, finish_reason="", total=0.0, weights={}, parts={})
        for _ in range(8)
    ]
    change(samples, 0)
    return [sample.total for sample in samples]


def small_weights_are_raised(models, prompts, folder):
    """The first step has ratios of 1 and agrees; later ones do where no bound is below."""
    ours, theirs, _ = both(
        row_of("adv_estimator=grpo loss_mode=cispo ppo_epochs=3 clip_ratio_low=0.01 clip_ratio_high=0.28"),
        models,
        prompts,
        folder,
    )
    assert apart(ours.gradients[0], theirs.gradients[0]) < 1e-7 and apart(ours.gradients[2], theirs.gradients[2]) > 1e-3


def tokens_are_chosen_once(name):
    def with_steps_that_move_little(models, prompts, folder, monkeypatch):
        """A batch in one micro-batch and steps so small that the choice stays what it was: the two agree."""
        monkeypatch.setattr(verl_side.loop, "MICRO", 8)
        row = row_of(name)
        ours, sampled = our_side.on_policy(
            models["policy"],
            models["other"],
            prompts,
            folder / "ours",
            change=uneven,
            **row.settings("ours") | {"learning_rate": 1e-6},
        )
        theirs = verl_side.on_policy(
            models["policy"], models["other"], sampled, num_generations=4, learning_rate=1e-6, **row.settings("theirs")
        )
        for k in range(trl_side.STEPS):
            assert (
                ours.losses[k] == pytest.approx(theirs.losses[k], rel=1e-6)
                and apart(ours.gradients[k], theirs.gradients[k]) < 1e-6
            )

    return with_steps_that_move_little


EXPLAINED = {
    **{row.theirs: tokens_are_chosen_once(row.theirs) for row in ROWS if "_cov" in row.theirs},
    "adv_estimator=grpo ppo_mini_batch_size=1": prompts_in_the_same_order,
    "adv_estimator=gpg loss_mode=gpg": completions_of_groups_without_a_signal,
    "adv_estimator=grpo loss_mode=cispo ppo_epochs=3 clip_ratio_low=0.01 clip_ratio_high=0.28": (
        small_weights_are_raised
    ),
}


def test_every_difference_is_explained():
    assert {row.theirs for row in ROWS if row.says.startswith("differs")} == set(EXPLAINED)


@pytest.mark.parametrize("theirs", EXPLAINED)
def test_why_a_row_differs(theirs, models, prompts, tmp_path, monkeypatch):
    why = EXPLAINED[theirs]
    why(models, prompts, tmp_path, *([monkeypatch] if "_cov" in theirs else []))


def test_the_names_of_the_page_are_settings_of_verl():
    known = verl_side.shipped()
    assert not [name for names, _, _ in names_of(VERL) for name in names if name not in known]


# --- what is not a row: critics, controllers, and the last table ------------------------------------------------------

# one with a tool's tokens inside
MASK = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 1], [1, 0, 0, 0, 0], [1, 1, 1, 0, 0]])


def test_gae_and_the_value_loss_are_the_same():
    core = verl_side.modules()[0]
    torch.manual_seed(0)
    rewards, values, old = torch.randn(3, 4, 5, dtype=torch.float64)
    on = MASK.bool()
    for gamma, lam in ((1.0, 1.0), (0.9, 0.8), (1.0, 0.0)):
        theirs, returns = core.compute_gae_advantage_return(rewards * MASK, values, MASK, gamma, lam)
        ours, targets = gae(rewards, values, MASK, 0.0, gamma, lam)
        assert np.allclose(targets[on], returns[on], atol=1e-12)
        assert np.allclose(whiten(ours, MASK, ddof=1)[on], theirs[on], atol=1e-7)
    for mode in ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum"):
        theirs = core.compute_value_loss(values, rewards, old, MASK, 0.2, mode)[0]
        total, counts = aggregate(value_loss(values, rewards, MASK, old, 0.2, half=True), MASK, mode)
        assert torch.allclose(theirs, total / counts[denominator_of(mode)], atol=1e-8)


def test_kl_controllers_are_the_same():
    core = verl_side.modules()[0]
    theirs, ours = core.AdaptiveKLController(0.2, 0.1, 10000), KLController(0.2, "adaptive_ziegler", 0.1, horizon=10000)
    for kl in (0.05, 0.1, 0.5, 0.11):
        theirs.update(kl, 512)
        assert ours.update(kl, 512) == pytest.approx(theirs.value, rel=1e-12)


def whitening():
    core = verl_side.modules()[0]
    x = torch.tensor([[1e-4, 3e-4, 2e-4]], dtype=torch.float64)
    theirs, ours = core.verl_F.masked_whiten(x, torch.ones(1, 3)), whiten(x, ddof=1)
    # the variance is 1e-8 too
    assert ours.std(ddof=1) == pytest.approx(1, abs=1e-3) and float(theirs.std()) == pytest.approx(1 / 2**0.5, abs=1e-3)
    same = torch.full((1, 3), 0.3, dtype=torch.float64)
    assert not whiten(same, ddof=1).any()


def one_completion():
    core = verl_side.modules()[0]
    rewards = torch.tensor([[0.0, 2.0]], dtype=torch.float64)
    assert core.compute_grpo_outcome_advantage(rewards, torch.ones(1, 2), [0])[0].tolist() == [
        [pytest.approx(2.0, abs=1e-5)] * 2
    ]
    with pytest.raises(ValueError, match="num_generations >= 2"):
        resolve_preset(Config(preset="grpo", num_generations=1))


def k3_in_the_loss():
    core = verl_side.modules()[0]
    logps = torch.tensor([[-5.0, -1.0]], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([[-1.0, -0.5]], dtype=torch.float64)
    theirs, ours = core.kl_penalty(logps, ref, "low_var_kl"), kl_estimate(logps, ref, "k3", torch.ones(1, 2))
    assert float(theirs[0, 0].detach()) == 10 < float(ours[0, 0].detach()) and torch.allclose(theirs[0, 1], ours[0, 1])
    a, b = (torch.autograd.grad(x.sum(), logps)[0][0] for x in (theirs, ours))
    assert (
        float(a[0]) == 0
        and float(b[0]) == pytest.approx(1 - 2.718281828459045**4)
        and float(a[1]) == pytest.approx(float(b[1]))
    )


def sequences_without_a_token():
    core = verl_side.modules()[0]
    loss, mask = torch.ones(2, 3, dtype=torch.float64), torch.tensor([[1, 1, 0], [0, 0, 0]])
    total, counts = aggregate(loss, mask, "seq-mean-token-sum")
    assert (
        float(core.agg_loss(loss, mask, "seq-mean-token-sum", global_batch_size=2)) == 1.0
        and float(total) / counts["sequences"] == 2.0
    )


#: The tests of the last table, by its first column.
ALSO = {
    "whitening": whitening,
    "one completion of a prompt": one_completion,
    "k3 in the loss": k3_in_the_loss,
    "sequences without a token": sequences_without_a_token,
}


def test_every_other_difference_has_a_test():
    assert re.findall(r"^\| `([^`]+)` \|", VERL.partition("## What else")[2], re.M) == list(ALSO)


@pytest.mark.parametrize("what", ALSO)
def test_what_else_is_not_the_same(what):
    ALSO[what]()
