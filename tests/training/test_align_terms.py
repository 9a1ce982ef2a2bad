"""What changes the loss of a whole family in align: f-divergences, the weight of what is beyond the common length, sums
of losses, the NLL of all chosen tokens.
"""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from stages.algorithms import DIRECT_METHODS
from stages.align import Config
from stages.direct.direct_alignment import DirectAlignment
from stages.harness import execute
from stages.spec import ConfigError, parse_config
from storage.datasets import open_dataset
from tests.common import silent, written
from tests.training.test_align_methods import FORMULAS, H, L, World, nll, pairwise, parts, preferences  # noqa: F401
from tests.training.test_invariance import gradient


def agrees(world, formula):
    """One step of the stage's trainer against the formula, and the same step however it is cut."""
    expected, theirs = world.independent(formula)
    loss, ours = world.step()
    assert loss == pytest.approx(expected, rel=2e-6) and theirs.abs().max() > 0
    assert torch.allclose(ours, theirs, rtol=0, atol=2e-6 * float(theirs.abs().max()))
    value, whole = gradient(world.policy, world.objective, world.items, 10**6)
    for max_tokens, order in ((1, world.items), (150, world.items[::-1])):
        other_value, other = gradient(world.policy, world.objective, order, max_tokens)
        assert other_value == pytest.approx(value, rel=1e-12) and torch.allclose(
            other, whole, rtol=0, atol=1e-12 * float(whole.abs().max())
        )
    return loss


# -- f-divergences --------------------------------------------------------------------------------------------------

SCORES = {
    "forward_kl": lambda h: 1 - torch.exp(-h),
    "js_divergence": lambda h: torch.log(2 * torch.exp(h) / (1 + torch.exp(h))),
    "alpha_divergence": lambda h: (torch.exp(h) ** -0.7 - 1) / -0.7,
}
LINKS = {
    "dpo": (0.1, lambda r, s, t: L(0.1 * (s - t))),
    "ipo": (0.1, lambda r, s, t: (s - t - 5.0) ** 2),
    "hinge_norm": (0.05, lambda r, s, t: (1 - 0.05 * (s - t)).clamp(min=0)),
    "length_norm": (5.0, lambda r, s, t: L(5.0 * (s / r["n"][0] - t / r["n"][1]))),
    "robust_dpo": (0.1, lambda r, s, t: (0.9 * L(0.1 * (s - t)) - 0.1 * L(-0.1 * (s - t))) / 0.8),
    "wpo": (0.1, lambda r, s, t: torch.exp(r["S"][0] / r["n"][0] + r["S"][1] / r["n"][1]).item() * L(0.1 * (s - t))),
}


@pytest.mark.parametrize("kind", list(SCORES))
@pytest.mark.parametrize("method", list(LINKS))
def test_an_f_divergence_takes_the_place_of_the_log_ratio(tiny, preferences, method, kind):
    more = {"f_alpha_divergence_coef": 0.3} if kind == "alpha_divergence" else {}
    world = World(tiny, preferences, method=method, f_divergence_type=kind, max_tokens_per_micro_batch=150, **more)
    f, link = SCORES[kind], LINKS[method][1]
    assert agrees(world, pairwise(lambda r, w, l: link(r, f(w), f(l)))) != pytest.approx(
        World(tiny, preferences, method=method).step()[0], rel=1e-4
    )


def test_methods_that_read_more_than_differences_have_no_other_divergence():
    """A constant added to both rewards (which every f' leaves open) changes nothing for the rows that say so, and
    something for the others.
    """
    from tests.maths.test_losses import F64, call

    g = torch.Generator().manual_seed(0)
    policy, ref = ([torch.randn(4, generator=g, dtype=F64) - 2 for _ in range(2)] for _ in range(2))
    for name, row in DIRECT_METHODS.items():
        # differences too, but of rewards under the KL, of any text, alone in a step, or beside the policy's own
        if row.data == "pairs" and row.needs_reference and name not in ("written", "rebel", "aot_paired", "pfl", "aql"):
            same = torch.allclose(call(row, policy, ref), call(row, policy, [r - 0.7 for r in ref]), rtol=1e-12)
            assert same == row.divergence, name
        if not row.divergence:
            with pytest.raises(ValueError, match="write method=dpo"):
                DirectAlignment(Config(method=name, f_divergence_type="forward_kl"))
    with pytest.raises(ValueError, match="f_divergence_type=alpha_divergence"):
        DirectAlignment(Config(f_divergence_type="forward_kl", f_alpha_divergence_coef=0.3))
    with pytest.raises(ValueError, match="f_alpha_divergence_coef"):
        Config(f_alpha_divergence_coef=1.5)


# -- LD-DPO -----------------------------------------------------------------------------------------------------------


def weighed(item_of, alpha, f):
    """A loss on the log-ratios of which the part beyond the common length weighs alpha."""

    def loss(rows):
        total = weights = 0.0
        for r in rows:
            h = []
            for k in range(2):
                (head, tail), (ref_head, ref_tail) = (
                    parts(r[name], item_of(r), k) for name in ("tokens", "ref_tokens")
                )
                h.append(head.sum() + alpha * tail.sum() - ref_head.sum() - alpha * ref_tail.sum())
            total, weights = total + r["weight"] * f(r, *h), weights + r["weight"]
        return total / weights

    return loss


@pytest.mark.parametrize(
    "method,alpha,f",
    [
        ("dpo", 0.4, lambda r, w, l: L(0.1 * (w - l))),
        ("apo_zero", 0.0, lambda r, w, l: 1 - torch.sigmoid(0.1 * w) + torch.sigmoid(0.1 * l)),
        ("dpo_nll", 0.5, lambda r, w, l: L(0.1 * (w - l)) + nll(r)),
        (
            "wpo",
            0.5,
            lambda r, w, l: torch.exp(r["S"][0] / r["n"][0] + r["S"][1] / r["n"][1]).item() * L(0.1 * (w - l)),
        ),
    ],
)
def test_what_is_beyond_the_common_length_weighs_alpha_on_both_sides(tiny, preferences, method, alpha, f):
    world = World(tiny, preferences, method=method, ld_alpha=alpha, max_tokens_per_micro_batch=150)
    items = {i.extra["prompt_id"]: i for i in world.items}
    assert len({tuple(int(m.sum()) for m in i.masks) for i in world.items}) > 2
    agrees(world, weighed(lambda r: items[r["prompt_id"]], alpha, f))


def test_alpha_one_is_dpo_and_metrics_are_of_whole_responses(tiny, preferences):
    plain, one, none = (World(tiny, preferences, method="dpo", ld_alpha=a) for a in (None, 1.0, 0.0))
    results = [w.step() for w in (plain, one, none)]
    assert results[1][0] == pytest.approx(results[0][0], rel=1e-12) and torch.allclose(
        results[1][1], results[0][1], rtol=0, atol=1e-12 * float(results[0][1].abs().max())
    )
    assert abs(results[2][0] - results[0][0]) > 1e-3
    from stages.training import Trainer

    shown = [
        Trainer(w.policy, w.objective, w.config, 1).evaluate(w.items)
        for w in (World(tiny, preferences, method="dpo", ld_alpha=a) for a in (None, 0.0))
    ]
    for name in ("logps/chosen", "displacement/chosen_shift", "displacement/rejected_shift", "length/chosen"):
        assert shown[0][name] == pytest.approx(shown[1][name], rel=1e-9)
    assert shown[0]["rewards/margins"] != pytest.approx(shown[1]["rewards/margins"], rel=1e-3)


def test_both_sorted_losses_take_weighed_log_probs(tiny, preferences):
    from tests.training.test_align_methods import parts

    for method, picks in (
        ("aot_paired", lambda pi, q: (pi[:, 0] - pi[:, 1], q[:, 0] - q[:, 1])),
        ("aot_unpaired", lambda pi, q: (pi[:, 0] - q[:, 0], pi[:, 1] - q[:, 1])),
    ):
        world = World(tiny, preferences, method=method, ld_alpha=0.25, options={"label_smoothing": 0.1})
        items = {i.extra["prompt_id"]: i for i in world.items}

        def loss(rows):
            pi, q = (
                torch.stack(
                    [
                        torch.stack(
                            [
                                parts(r[name], items[r["prompt_id"]], k)[0].sum()
                                + 0.25 * parts(r[name], items[r["prompt_id"]], k)[1].sum()
                                for k in range(2)
                            ]
                        )
                        for r in rows
                    ]
                )
                for name in ("tokens", "ref_tokens")
            )
            a, b = picks(pi, q)
            d = 0.1 * (torch.sort(a)[0] - torch.sort(b)[0])
            return (0.9 * L(d) + 0.1 * L(-d)).mean()

        agrees(world, loss)


@pytest.mark.parametrize(
    "method,more",
    [
        ("kto", {}),
        ("mdpo", {}),
        ("2d_dpo", {}),
        ("pl_dpo", {}),
        ("length_norm", {}),
        ("dpo", {"logp_reduction": "mean"}),
        ("simpo", {}),
        ("slic", {}),
        ("orpo", {}),
    ],
)
def test_ld_alpha_is_refused_where_nothing_is_summed_against_a_reference(method, more):
    with pytest.raises(ValueError, match="ld_alpha=0.5 would change nothing.*write method=dpo"):
        DirectAlignment(Config(method=method, ld_alpha=0.5, **more))


def test_a_reference_cache_serves_every_alpha_and_no_other_form(tiny, preferences, spec):
    """Head and tail are stored apart: another ld_alpha reads the same rows, and plain DPO does not take them for its
    own, nor the other way round.
    """

    def run(name, cache=None, **config):
        made = spec(
            "align",
            {"max_steps": 2, "batch_size": 4, "max_length": 96, "learning_rate": 1e-4, **config},
            {"model": tiny["policy"], "data": preferences["pairs"]},
            name,
        )
        if cache:
            made["inputs"]["ref_logps"] = {"kind": "dataset", "path": cache, "ref": "r", "digest": "r"}
        result = execute(made, silent)
        path = result["outputs"]["ref_logps"]["path"]
        return result, path, open_dataset(path).manifest["counts"]["from_cache"]

    first, parted, _ = run("half", ld_alpha=0.5)
    rows = list(open_dataset(parted).iter_rows())
    assert {tuple(r["parts"]) for r in rows} == {(2, 2)} and all(min(r["n_tokens"]) in r["n_tokens"] for r in rows)
    assert all(
        (r["ref_values"][1] == 0.0) == (r["n_tokens"][0] <= r["n_tokens"][1])
        and (r["ref_values"][3] == 0.0) == (r["n_tokens"][1] <= r["n_tokens"][0])
        for r in rows
    )
    again, _, known = run("again", parted, ld_alpha=0.5)
    other, _, shared = run("none", parted, ld_alpha=0.0)
    fresh, _, _ = run("fresh", ld_alpha=0.0)
    assert (
        known == shared == len(rows)
        and again["summary"] == first["summary"]
        and other["summary"] == fresh["summary"] != first["summary"]
    )
    plain, sums, stale = run("plain", parted)
    back, _, stale_too = run("back", sums, ld_alpha=0.5)
    assert stale == stale_too == 0 and back["summary"] == first["summary"]
    assert {w["code"] for w in plain["warnings"]} >= {"stale_reference_cache"}
    by_row = {r["group_id"]: r for r in open_dataset(sums).iter_rows()}
    assert all(
        by_row[r["group_id"]]["ref_chosen_logp"] == pytest.approx(sum(r["ref_values"][:2]), rel=1e-5) for r in rows
    )


def test_sums_over_segments_are_cached_for_these_segments_alone(tiny, preferences, spec, tmp_path):
    """da.ref_cache: a cache of rows whose segments were found otherwise has as many numbers of other tokens, and a
    sample of rows does not show it.
    """
    from storage.datasets import write_dataset

    def run(name, cache=None):
        made = spec(
            "align",
            {"method": "2d_dpo", "max_steps": 2, "batch_size": 6, "max_length": 96, "learning_rate": 1e-4},
            {"model": tiny["policy"], "data": preferences["segments"]},
            name,
        )
        if cache:
            made["inputs"]["ref_logps"] = {"kind": "dataset", "path": cache, "ref": name, "digest": name}
        result = execute(made, silent)
        path = result["outputs"]["ref_logps"]["path"]
        return result, path, open_dataset(path).manifest["counts"]["from_cache"]

    first, cache, _ = run("first")
    rows = list(open_dataset(cache).iter_rows())
    again, _, known = run("again", cache)
    assert known == len({r["group_id"] for r in rows}) and again["summary"] == first["summary"]
    # of a version that told nothing of the segments; all but the sample are of other ones
    old = [
        {
            **row,
            "template_id": row["template_id"].split(":by_index")[0] + ":by_index",
            "ref_values": [v - 3.0 * (i > 4) for v in row["ref_values"]],
        }
        for i, row in enumerate(rows)
    ]
    path = str(tmp_path / "old")
    write_dataset(path, "old", "ref_values/1", old)
    other, _, stale = run("other", path)
    assert stale == 0 and other["summary"] == first["summary"]
    assert "stale_reference_cache" in {w["code"] for w in other["warnings"]}


def test_the_stage_trains_with_a_moving_reference_and_another_divergence(tiny, preferences, spec):
    made = spec(
        "align",
        {
            "max_steps": 3,
            "batch_size": 6,
            "max_length": 96,
            "learning_rate": 1e-2,
            "reference_update": "ema",
            "ld_alpha": 0.3,
            "f_divergence_type": "js_divergence",
        },
        {"model": tiny["policy"], "data": preferences["pairs"]},
        "moving",
    )
    assert math.isfinite(execute(made, silent)["summary"]["validation/loss"])
    steps = [json.loads(line)["metrics"] for line in Path(made["workdir"], "metrics.jsonl").read_text().splitlines()]
    # f'(1) is 0 on both sides
    assert [m["loss"] for m in steps if "loss" in m][0] == pytest.approx(math.log(2), rel=1e-4)


# -- aot's names -------------------------------------------------------------------------------------------------------


def test_the_name_with_two_meanings_is_refused():
    from stages.align import SPEC

    with pytest.raises(ConfigError, match="aot_unpaired, and in TRL .*aot_paired; write the one"):
        parse_config(SPEC, {"method": "aot"})


# -- the NLL of all chosen tokens, and sums of losses ------------------------------------------------------------------


def all_tokens(rows):
    """TRL's loss_type sft: the mean over all chosen tokens (weights 1 there)."""
    return -sum(r["weight"] * r["S"][0] for r in rows) / sum(r["weight"] * r["n"][0] for r in rows)


def test_the_nll_may_be_the_mean_over_all_chosen_tokens_of_the_step(tiny, preferences):
    world = World(tiny, preferences, method="dpo", nll_coef=0.7, nll_reduction="token-mean")
    found = agrees(world, lambda rows: FORMULAS["dpo"](rows) + 0.7 * all_tokens(rows))
    assert abs(found - World(tiny, preferences, method="dpo", nll_coef=0.7).step()[0]) > 1e-4
    prompted = World(tiny, preferences, method="orpo", nll_reduction="token-mean", options={"nll_on_prompt": True})
    from tests.training.test_align_methods import free, log_odds_ratio

    agrees(
        prompted,
        lambda rows: (
            free(lambda r, w, l: 0.1 * L(log_odds_ratio(r)))(rows)
            - sum(r["weight"] * r["S"][2] for r in rows) / sum(r["weight"] * r["n"][2] for r in rows)
        ),
    )
    mixed = World(tiny, preferences, method="mdpo", nll_coef=1.0, nll_reduction="token-mean")
    agrees(mixed, lambda rows: FORMULAS["mdpo"](rows) + all_tokens(rows))


MPO = {
    "loss_weight": 0.8,
    "also": [{"method": "bco_pair", "weight": 0.2}],
    "nll_coef": 1.0,
    "nll_reduction": "token-mean",
}


def test_mpo_is_the_weighted_sum_of_its_losses(tiny, preferences):
    """TRL: loss_type=[sigmoid, bco_pair, sft], loss_weights=[0.8, 0.2, 1.0]."""
    world = World(tiny, preferences, method="dpo", max_tokens_per_micro_batch=150, **MPO)
    agrees(world, lambda rows: 0.8 * FORMULAS["dpo"](rows) + 0.2 * FORMULAS["bco_pair"](rows) + all_tokens(rows))
    from stages.training import Trainer

    shown = Trainer(world.policy, world.objective, world.config, 1).evaluate(world.items)
    assert shown["loss"] == pytest.approx(shown["preference"] + shown["bco_pair_preference"] + shown["nll"], rel=1e-9)


def test_every_loss_of_a_sum_has_its_own_options_columns_and_reduction(tiny, preferences):
    also = [
        {"method": "odpo", "weight": 0.5, "options": {"alpha": 2.0}},
        {"method": "r_dpo", "weight": 2.0, "beta": 0.3},
        {"method": "length_norm", "beta": 4.0},
        {"method": "wpo"},
    ]
    world = World(tiny, preferences, method="ipo", beta=0.2, also=also)
    assert {"score_gap", "length_chosen", "mean_chosen"} <= set(
        world.objective.reads.columns
    ) and world.objective.reads.positive_gap
    agrees(
        world,
        pairwise(
            lambda r, w, l: (
                (w - l - 2.5) ** 2
                + 0.5 * L(0.2 * (w - l) - 2 * math.log(r["score_gap"]))
                + 2 * L(0.3 * (w - l) + 0.05 * (r["n"][0] - r["n"][1]))
                + L(4.0 * (w / r["n"][0] - l / r["n"][1]))
                + torch.exp(r["S"][0] / r["n"][0] + r["S"][1] / r["n"][1]).item() * L(0.2 * (w - l))
            )
        ),
    )
    free = World(tiny, preferences, method="simpo", also=[{"method": "reference_free", "beta": 0.1, "weight": 0.3}])
    agrees(free, lambda rows: FORMULAS["simpo"](rows) + 0.3 * FORMULAS["reference_free"](rows))
    both = World(
        tiny, preferences, method="dpo", also=[{"method": "ipo"}], f_divergence_type="forward_kl", ld_alpha=0.5
    )
    assert math.isfinite(both.step()[0])


def test_pairs_that_an_added_loss_cannot_read_are_dropped(tiny, preferences, tmp_path):

    rows = list(open_dataset(preferences["pairs"]).iter_rows(split="train"))
    rows[0]["chosen_score"] = rows[0]["rejected_score"]
    written(str(tmp_path / "d"), "d", "pairs/1", [r for r in rows])
    data = {**preferences, "pairs": str(tmp_path / "d")}
    assert len(World(tiny, data, method="dpo").items) == 6
    world = World(tiny, data, method="dpo", also=[{"method": "odpo"}])
    assert len(world.items) == 5 and world.dropped["score_gap_not_positive"] == 1


@pytest.mark.parametrize(
    "config,says",
    [
        ({"method": "dpo", "also": [{"method": "kto"}]}, "on pairs only"),
        ({"method": "mdpo", "also": [{"method": "dpo"}]}, "on pairs only"),
        ({"method": "dpo", "also": [{"method": "simpo"}]}, "simpo with reference_free"),
        ({"method": "dpo", "also": [{"method": "aot_paired"}]}, "trained alone"),
        ({"method": "aot_unpaired", "also": [{"method": "dpo"}]}, "trained alone"),
        ({"method": "ipo", "also": [{"method": "dpo_nll"}]}, "nll_coef=1 with dpo"),
        ({"method": "simpo", "also": [{"method": "slic"}]}, "write method=slic"),
        ({"method": "dpo", "also": [{"method": "written"}]}, "write method=written"),
        ({"method": "dpo", "also": [{"method": "soft_dpo"}]}, "takes every label as certain"),
        ({"method": "dpo", "also": [{"method": "dpo"}]}, "in the sum already"),
        ({"method": "dpo", "also": [{"method": "ipo"}, {"method": "ipo"}]}, "in the sum already"),
        ({"method": "dpo", "also": [{"method": "bco_pair"}], "f_divergence_type": "forward_kl"}, "has no form"),
        ({"method": "dpo", "also": [{"method": "length_norm", "beta": 5.0}], "ld_alpha": 0.5}, "does not weigh"),
        ({"method": "dpo", "also": [{"method": "length_norm"}]}, "for example beta: 5"),
        ({"method": "dpo", "also": [{"method": "bco_pair", "options": {"gamma": 1.0}}]}, "has no option"),
        ({"method": "dpo", "loss_weight": 0.5}, "no other loss beside it"),
        ({"method": "simpo", "also": [{"method": "orpo"}]}, "NLL term of its own"),
    ],
)
def test_sums_that_make_no_sense_say_what_to_write(config, says):
    with pytest.raises(ValueError, match=says):
        DirectAlignment(Config(**config))


def test_the_record_says_what_was_added():
    found = Config(beta=0.3, **MPO).effective()["also"]
    assert found == [{"method": "bco_pair", "weight": 0.2, "beta": 0.3, "options": {"delta": 0.0}}]
    objective = DirectAlignment(Config(beta=0.3, **MPO))
    assert objective.terms["bco_pair_preference"].arguments == {"beta": 0.3, "delta": 0.0}
    with pytest.raises(ConfigError, match="another reference"):
        DirectAlignment(Config(**MPO, reference_update="ema", select_by="bco_pair_preference", eval_every=2))


def test_the_stage_trains_on_a_sum(tiny, preferences, spec):
    made = spec(
        "align",
        {**MPO, "max_steps": 2, "batch_size": 4, "max_length": 96, "learning_rate": 1e-4},
        {"model": tiny["policy"], "data": preferences["pairs"]},
        "mpo",
    )
    result = execute(made, silent)
    steps = [json.loads(line)["metrics"] for line in Path(made["workdir"], "metrics.jsonl").read_text().splitlines()]
    first = steps[0]
    assert first["validation/preference"] == pytest.approx(0.8 * math.log(2), rel=1e-4) and first[
        "validation/bco_pair_preference"
    ] == pytest.approx(0.4 * math.log(2), rel=1e-4)
    assert (
        np.isfinite([result["summary"]["validation/loss"], steps[1]["nll"]]).all() and "ref_logps" in result["outputs"]
    )


# -- TRL's own code ----------------------------------------------------------------------------------------------------

TRL = [
    ({"loss_type": ["sigmoid"]}, {"method": "dpo"}),
    ({"loss_type": ["sigmoid"], "ld_alpha": 0.3}, {"method": "dpo", "ld_alpha": 0.3}),
    ({"loss_type": ["aot"], "label_smoothing": 0.1}, {"method": "aot_paired", "options": {"label_smoothing": 0.1}}),
    (
        {"loss_type": ["aot_unpaired"], "label_smoothing": 0.1, "ld_alpha": 0.5},
        {"method": "aot_unpaired", "options": {"label_smoothing": 0.1}, "ld_alpha": 0.5},
    ),
    ({"loss_type": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 1.0]}, {"method": "dpo", **MPO}),
    (
        {"loss_type": ["sigmoid", "hinge", "exo_pair"], "loss_weights": [1.0, 0.5, 2.0], "label_smoothing": 0.01},
        {
            "method": "dpo",
            "also": [
                {"method": "hinge_norm", "weight": 0.5},
                {"method": "exo_pair", "weight": 2.0, "options": {"label_smoothing": 0.01}},
            ],
        },
    ),
    *(
        (
            {"loss_type": [theirs], "f_divergence_type": kind, "f_alpha_divergence_coef": 0.3},
            {
                "method": ours,
                "f_divergence_type": kind,
                **({"f_alpha_divergence_coef": 0.3} if kind == "alpha_divergence" else {}),
            },
        )
        for theirs, ours in (("sigmoid", "dpo"), ("sigmoid_norm", "length_norm"), ("discopop", "discopop"))
        for kind in SCORES
    ),
]


@pytest.mark.parametrize("theirs,ours", TRL)
def test_trl_computes_the_same_loss_from_the_same_log_probs(theirs, ours, monkeypatch):
    """The loss of TRL's DPOTrainer, given token log-probs of a policy and a reference for six pairs of uneven length,
    against our objective on the same numbers.
    """
    import contextlib
    from collections import defaultdict
    from types import SimpleNamespace

    trl = pytest.importorskip("trl", minversion="1.16")
    module = pytest.importorskip("trl.trainer.dpo_trainer")
    from stages.batching import collate, make_item
    from stages.direct import direct_alignment

    rng, beta = np.random.default_rng(0), 0.2
    lengths = [(3, 5), (4, 4), (6, 1), (2, 7), (5, 3), (1, 2)]
    # per response: policy, reference
    logps = [[torch.tensor(-rng.random((2, n)) * 3, dtype=torch.float32) for n in pair] for pair in lengths]
    order, width = [(i, k) for k in range(2) for i in range(len(lengths))], 1 + max(map(max, lengths))
    mask, tokens = torch.zeros(len(order), width, dtype=torch.long), torch.zeros(2, len(order), width - 1)
    for row, (i, k) in enumerate(order):
        mask[row, 1 : 1 + lengths[i][k]] = 1
        tokens[:, row, : lengths[i][k]] = logps[i][k]
    policy = tokens[0].clone().requires_grad_()

    def model(values):
        call = lambda **given: SimpleNamespace(
            log_probs=values, entropy=values.detach(), mean_logits=values.detach(), is_top1=values.detach() > -1
        )  # noqa: E731
        made = type("Model", (), {"__call__": lambda self, **given: call(**given), "training": True})()
        return made

    monkeypatch.setattr(module, "disable_gradient_checkpointing", lambda *given: contextlib.nullcontext())
    monkeypatch.setattr(module, "is_peft_model", lambda model: False)
    config = trl.DPOConfig(output_dir="unused", beta=beta, report_to="none", use_cpu=True, bf16=False, **theirs)
    own = SimpleNamespace(
        model=model(policy),
        ref_model=model(tokens[1]),
        args=config,
        aux_loss_enabled=False,
        precompute_ref_logps=False,
        beta=beta,
        use_weighting=False,
        _tp_size=1,
        _total_train_tokens=0,
        ld_alpha=config.ld_alpha,
        f_divergence_type=config.f_divergence_type,
        f_alpha_divergence_coef=config.f_alpha_divergence_coef,
        label_smoothing=config.label_smoothing,
        loss_types=config.loss_type,
        loss_weights=config.loss_weights or [1.0] * len(config.loss_type),
        _metrics={"train": defaultdict(list), "eval": defaultdict(list)},
        accelerator=SimpleNamespace(gather=lambda x: x, gather_for_metrics=lambda x: x, device="cpu"),
    )
    expected = module.DPOTrainer._compute_loss(
        own,
        own.model,
        {"input_ids": torch.zeros_like(mask), "attention_mask": torch.ones_like(mask), "completion_mask": mask},
        False,
    )
    (slope,) = torch.autograd.grad(expected, policy)

    objective = DirectAlignment(Config(beta=beta, **ours))
    items = [
        make_item(str(i), [9], [[7] * n for n in pair], [[1] * n for n in pair], weight=1.0)
        for i, pair in enumerate(lengths)
    ]
    flat = torch.cat([side[0] for pair in logps for side in pair]).requires_grad_()
    given = {"policy": flat, "reference": torch.cat([side[1] for pair in logps for side in pair])}
    monkeypatch.setattr(direct_alignment, "target_logps", lambda model, batch: (given[model], None))
    monkeypatch.setattr(direct_alignment, "hidden_states", lambda model, batch, at_N: given[model])
    monkeypatch.setattr(direct_alignment, "head_of", lambda model: None)
    monkeypatch.setattr(direct_alignment, "token_logps", lambda head, states_N, target_N: (states_N, None))
    batch = collate(items)
    for item, values in zip(items, zip(*[iter(objective.values("reference", batch))] * 2)):
        item.extra["ref"] = [v.tolist() for v in values]
    monkeypatch.setattr(
        objective,
        "log_probs",
        lambda model, of, device: [
            [v.tolist() for v in pair] for pair in zip(*[iter(objective.values(model, batch))] * 2)
        ],
    )
    objective.prepare("policy", items, "cpu")
    loss = objective("policy", batch).divided(objective.counts(items))
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-5)
    (mine,) = torch.autograd.grad(loss, flat)
    wanted = torch.cat([slope[order.index((i, k)), :n] for i, pair in enumerate(lengths) for k, n in enumerate(pair)])
    assert torch.allclose(mine, wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("also", (False, True))
def test_aligned_weights_of_wpo_are_relative_to_what_the_policy_would_draw(tiny, preferences, also):
    """exp of the mean of log pi(y_t) - log sum_v pi(v)^2 of both responses, without gradient (Zhou et al. 2024); alone,
    and beside another loss.
    """
    changes = (
        {"method": "dpo", "also": [{"method": "wpo", "weight": 0.5, "options": {"aligned": True}}]}
        if also
        else {"method": "wpo", "options": {"aligned": True}}
    )
    world = World(tiny, preferences, **changes)
    weights = {}
    with torch.no_grad():
        for item in world.items:
            mean = 0.0
            for k in range(2):
                logp = (
                    world.policy(input_ids=torch.tensor([[*item.prompt.tolist(), *item.responses[k].tolist()]]))
                    .logits[0, len(item.prompt) - 1 : -1]
                    .log_softmax(-1)
                )
                live = torch.tensor(item.masks[k].astype(bool))
                mean += float((world.logps(world.policy, item, k)[live] - (logp.exp() ** 2).sum(-1).log()[live]).mean())
            weights[item.extra["prompt_id"]] = math.exp(mean)
    agrees(
        world,
        pairwise(
            lambda r, w, l: (
                ((1.0 + 0.5 * weights[r["prompt_id"]]) if also else weights[r["prompt_id"]]) * L(0.1 * (w - l))
            )
        ),
    )
    assert len({round(w, 6) for w in weights.values()}) > 3
