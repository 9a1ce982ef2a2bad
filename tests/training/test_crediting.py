"""What training items are made of, each number of hand-made groups against one computed apart: normalised components,
importance weights, KL estimates, drift, limits, what is forwarded.
"""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from stages.batching import make_item
from stages.generation import Sample
from stages.rollouts.groups import Group
from stages.rollouts.metrics import weight_metrics
from storage.datasets import open_dataset
from tests.training.test_rl_parts import rl  # noqa: F401
from tests.training.test_rl_rules import SPREAD

PAID = {"preset": "grpo", "beta": 0.0, "reward_override": "none", "rewards": [SPREAD]}


def group(source, made, number=0, version=0, fresh=True):
    """Completions of a prompt: (ids, total, finish reason, further fields of the sample) each."""
    prompt, ids = source.order.prompts[number]
    samples = [
        Sample(prompt, ids, g, own, **{"logps": [-1.0] * len(own), **more}, finish_reason=end, text="x", total=total)
        for g, (own, total, end, more) in enumerate(made)
    ]
    for sample in samples:
        sample.parts, sample.reasons = sample.parts or {"spread": sample.total}, {}
    return Group(prompt, ids, samples, version, fresh)


def distributions(source, sample, temperature=1.0):
    """Log-probs [tokens, V] behind the prompt and the completion's earlier tokens, by the model's own forward."""
    whole = [*sample.prompt_ids, *sample.ids]
    with torch.no_grad():
        logits = source.policy.model(input_ids=torch.tensor([whole])).logits[0].double()
    return torch.log_softmax(logits / temperature, -1)[len(sample.prompt_ids) - 1 : -1].numpy()


def logps_of(source, sample):
    return distributions(source, sample)[range(len(sample.ids)), sample.ids]


@pytest.mark.parametrize("in_stats", [True, False])
def test_the_length_penalty_is_normalised_as_a_component_over_completions_in_the_statistics(rl, in_stats):  # noqa: F811
    """normalize_then_sum: sum of w (r - mean) / (std + eps) with the run's std, the penalty of long completions with
    weight 1; a masked cut completion is in the statistics unless told otherwise.
    """
    source = rl.source(
        "normalised",
        {
            **PAID,
            "multi_objective_aggregation": "normalize_then_sum",
            "truncation_policy": "mask",
            "truncated_in_stats": in_stats,
            "soft_punish_cache": 3,
            "max_completion_length": 5,
            "std_eps": 0.5,
        },
    )
    values = {"a": [1.0, 3.0, 2.0, 7.0], "b": [5.0, 5.0, 1.0, 0.0]}
    one = group(
        source,
        [
            (
                list(range(40, 40 + n)),
                2 * values["a"][i] + values["b"][i],
                end,
                {"parts": {k: v[i] for k, v in values.items()}, "weights": {"a": 2.0, "b": 1.0}},
            )
            for i, (n, end) in enumerate([(2, "eos"), (3, "eos"), (4, "eos"), (5, "length")])
        ],
    )
    found = source.crediting([one], 0, 0).batch.rewards_B
    at, expected = slice(0, 4 if in_stats else 3), 0.0
    for weight, column in ((2.0, values["a"]), (1.0, values["b"]), (1.0, [0.0, -1 / 3, -2 / 3, -1.0])):
        known = np.array(column)[at]
        expected = expected + weight * (known - known.mean()) / (known.std(ddof=1) + 0.5)
    assert found[at] == pytest.approx(expected)


def test_weights_of_whole_sequences_are_normalised_by_their_mean_over_sequences(rl):  # noqa: F811
    """However long a sequence is it counts once, also where its first tokens are a tool's; one without a trained token
    does not count. The bounds that say which are cut move along.
    """
    source = rl.source(
        "sequences",
        {
            **PAID,
            "top_k": 100,
            "importance_correction": "sequence_truncate",
            "importance_clip_max": 1.5,
            "importance_clip_min": 0.25,
            "importance_normalise": True,
        },
    )
    mask = np.array([[1, 0, 0, 0], [1, 1, 1, 1], [0, 0, 1, 1], [0, 0, 0, 0]], bool)
    apart = np.where(mask, np.log([[2.0], [0.9], [0.4], [1.0]]), 0.0)
    weights, bounds = source.crediting.logprobs.importance_weights(apart - 1.0, np.full((4, 4), -1.0), mask)
    each = np.array([1.5, 0.9**4, 0.25])
    assert weights[mask] == pytest.approx(np.repeat(each / each.mean(), [1, 4, 2])) and bounds == pytest.approx(
        (0.25 / each.mean(), 1.5 / each.mean())
    )
    cut = weight_metrics(weights, mask, "sequence_truncate", bounds[1], bounds[0])
    assert cut["sampling/importance_weight/cut_fraction"] == pytest.approx(3 / 7)  # of the first and of the third


def test_rejected_tokens_lose_the_weight_that_the_others_keep(rl):  # noqa: F811
    source = rl.source(
        "zeroed",
        {
            **PAID,
            "top_k": 100,
            "importance_correction": "token_truncate",
            "importance_clip_max": 1.3,
            "rejection": "token",
            "rejection_scope": "zero",
            "rejection_min": 0.5,
            "rejection_max": 2.0,
        },
    )
    one = group(source, [([50, 60, 70, 80], 1.0, "eos", {}), ([51, 61, 71, 81], 0.0, "eos", {})])
    apart = np.array([[0.0, 0.5, -0.4, 1.0], [-1.0, 0.1, 0.0, 0.2]])
    for sample, off in zip(one.samples, apart):
        sample.logps = (logps_of(source, sample) - off).tolist()
    scored = source.crediting([one], 0, 0)
    ratio = np.exp(apart)
    expected = np.where((ratio < 0.5) | (ratio > 2.0), 0.0, np.minimum(ratio, 1.3))
    assert scored.weights_BT == pytest.approx(expected, abs=1e-4)
    assert np.array(scored.items[0].extra["weights"]) == pytest.approx(expected, abs=1e-4)
    assert all(m.all() for m in scored.items[0].masks)


def test_a_baseline_by_token_weighs_by_the_gradients_energy(rl):  # noqa: F811
    """otb: the squared norm of a token's gradient in the logits, |e - p|^2, times its squared importance weight."""
    source = rl.source(
        "energy",
        {
            **PAID,
            "preset": "otb",
            "top_k": 100,
            "importance_correction": "token_truncate",
            "importance_clip_max": 1.4,
        },
    )
    one = group(source, [([50, 60, 70], 1.0, "eos", {}), ([51, 61, 71], 0.0, "eos", {})])
    apart, expected = np.array([[0.2, -0.5, 0.9], [0.0, -0.1, 0.3]]), []
    for sample, off in zip(one.samples, apart):
        sample.logps = (logps_of(source, sample) - off).tolist()
        p = np.exp(distributions(source, sample))
        expected.append(((np.eye(p.shape[1])[sample.ids] - p) ** 2).sum(-1))
    weights = np.minimum(np.exp(apart), 1.4)
    assert source.crediting([one], 0, 0).batch.energy_BT == pytest.approx(np.array(expected) * weights**2, rel=1e-3)


def test_tokens_are_learned_from_that_are_uncertain_and_not_left_out(rl):  # noqa: F811
    """top_entropy_quantile and covariance_clip together."""
    source = rl.source(
        "both", {**PAID, "top_entropy_quantile": 0.5, "covariance_clip": 0.99, "covariance_band": [0.0, 1e9]}
    )
    one = group(source, [([50, 60, 70, 80], 1.0, "eos", {}), ([51, 61, 71, 81], 0.0, "eos", {})])
    entropies = []
    for sample in one.samples:
        p = distributions(source, sample)
        sample.logps = p[range(4), sample.ids].tolist()
        entropies.append(-(np.exp(p) * p).sum(-1))
    logps = np.array([s.logps for s in one.samples])
    covariances = (logps - logps.mean()) * np.array([[1.0], [-1.0]])
    uncertain = np.array(entropies) >= np.sort(np.ravel(entropies))[4]
    expected = uncertain & (covariances <= 0)
    assert expected.any() and (uncertain & ~expected).any()
    assert source.crediting([one], 0, 0).learned_BT.tolist() == expected.tolist()


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_the_kl_of_the_reward_by_other_estimators(rl, estimator):  # noqa: F811
    source = rl.source(
        estimator,
        {**PAID, "preset": "rloo", "kl_coef": 0.1, "kl_reward_estimator": estimator},
        reference=rl.tiny["other"],
    )
    one = group(source, [([50, 60, 70], 1.0, "eos", {}), ([51, 61], 0.0, "eos", {})])
    for sample in one.samples:
        sample.logps = logps_of(source, sample).tolist()
    source.policy.model, policy = source.crediting.logprobs.reference, source.policy.model
    then = [logps_of(source, sample) for sample in one.samples]
    source.policy.model = policy
    scored = source.crediting([one], 0, 0)
    for sample, ref, found in zip(one.samples, then, scored.batch.kl_BT):
        ratio = np.exp(ref - np.array(sample.logps))
        expected = np.log(ratio) ** 2 / 2 if estimator == "k2" else ratio - 1 - np.log(ratio)
        assert found[: len(ref)] == pytest.approx(expected, abs=1e-4) and expected.max() > 0.1


def test_drift_is_a_mean_over_the_trained_tokens(rl):  # noqa: F811
    """A tool's tokens, whatever their log-probs have become, are not among them."""
    source = rl.source("drift", PAID)
    one = group(source, [([50, 60, 70], 1.0, "eos", {}), ([51, 61], 0.0, "eos", {})])
    apart, masks = [np.array([9.0, 0.3, -0.5]), np.array([0.7, 5.0])], [[0, 1, 1], [1, 0]]
    items = [
        make_item(
            "r", s.prompt_ids, [s.ids], [m], by_response=("old_logps",), old_logps=[(logps_of(source, s) - d).tolist()]
        )
        for s, d, m in zip(one.samples, apart, masks)
    ]
    d = np.array([0.3, -0.5, 0.7])
    assert source.crediting.logprobs.drift(items) == pytest.approx((np.exp(d) - 1 - d).mean(), abs=1e-5)


def test_the_penalty_of_long_completions_follows_the_limit_of_the_step(rl):  # noqa: F811
    """Its tokens are a share of the limit where none are given (DAPO: 4096 of 20480)."""
    source = rl.source(
        "limits", {**PAID, "truncation_policy": "score", "context_schedule": [(0, 5), (2, 8)], "soft_punish_cache": 2}
    )
    samples = group(source, [(list(range(40, 40 + n)), 1.0, "eos", {}) for n in (3, 4, 5, 7)]).samples
    assert source.crediting.earned(samples, 0).tolist() == [1.0, 0.5, 0.0, 0.0]
    assert source.crediting.earned(samples, 2).tolist() == [1.0, 1.0, 1.0, 0.5]
    source.config.soft_punish_cache, source.crediting.row = None, replace(source.row, soft_punish_share=0.2)
    assert source.crediting.earned(samples, 2).tolist() == [1.0, 1.0, 1.0, 0.5]


def test_what_a_bootstrapped_completion_has_earned_so_far(rl):  # noqa: F811
    """Its steps' rewards, of a trajectory all that its turns earned; the rest is the value of its end."""
    source = rl.source("so-far", {**PAID, "preset": "ppo", "kl_coef": 0.0})
    ids = [50, 60, 70]
    samples = group(
        source,
        [
            (ids, 3.0, "eos", {}),
            (ids, 5.0, "length", {"step_rewards": ([0, 1], [0.5, 0.25])}),
            (ids, 5.0, "length", {}),
            (ids, float("nan"), "length", {"step_rewards": ([0], [0.5])}),
        ],
    ).samples
    overlong, after = np.full(4, -0.125), [0.5] * 4
    paid = lambda: source.crediting._truncated(samples, overlong, after)
    rewards, bootstrap, _ = paid()
    assert rewards[:3].tolist() == [2.875, 0.75, 0.0] and np.isnan(rewards[3])
    assert bootstrap[:3].tolist() == [0.0, 0.5, 0.5]
    source.policy.agent = object()
    assert paid()[0][:3].tolist() == [2.875, 4.875, 4.875] and np.isnan(paid()[0][3])


def test_metrics_are_of_the_fresh_completions_where_there_are_any(rl):  # noqa: F811
    source = rl.source("shown", {**PAID, "preset": "topr"})
    ids = [50, 60]
    new = group(source, [(ids, 1.0, "eos", {}), (ids, 0.0, "eos", {})])
    old = group(source, [(ids, 9.0, "eos", {}), (ids, 7.0, "eos", {})], 1, fresh=False)
    assert source.crediting([new, old], 0, 0).metrics["reward"] == 0.5
    assert source.crediting([old], 0, 0).metrics["reward"] == 8.0


def test_what_is_kept_of_groups(rl):  # noqa: F811
    """Verdicts of what the policy said, means of what could be scored, log-probs of tokens that it chose."""
    source = rl.source("kept", PAID)
    answers = [
        ([50, 60, 61], 1.0, "goal", {"correct": True, "logps": [-1.0, -9.0, -3.0], "tool_mask": [0, 1, 0]}),
        ([50], 0.0, "eos", {"correct": False, "logps": [-5.0]}),
        ([51], 4.0, "eos", {"correct": True, "logps": None, "mode": "sft"}),
        ([52], float("nan"), "eos", {"correct": None, "logps": [-3.0]}),
    ]
    records, (first, second, third) = source.records, (prompt for prompt, _ in source.order.prompts[:3])
    unknown = group(source, [([52], float("nan"), "eos", {"logps": None})], 1)
    records.groups([(group(source, answers), None), (unknown, "unscorable")], 3)
    ids = [p["row_id"] for p in (first, third)]
    records.pass_rates(source.order.prompts[:3], dict(zip(ids, [(4, 1), (2, 2)])), {ids[0]})
    records.writers["prompt_stats"].close()
    names = "iteration n mean_reward reward_std pass_at_1 mean_logprob kept drop_reason".split()
    path = source.stage.workdir / "out" / "prompt_stats"
    found = [
        (r["prompt_id"], *(r[name] for name in names), json.loads(r["extra_json"])["verdicts"])
        for r in open_dataset(str(path)).iter_rows()
    ]
    assert found == [
        (first["prompt_id"], 3, 4, 5 / 3, pytest.approx(np.std([1, 0, 4])), 0.5, -3.0, True, None, [2, 1]),
        (second["prompt_id"], 3, 1, None, None, None, 0.0, False, "unscorable", [0, 0]),
        (first["prompt_id"], -1, 4, 0.25, pytest.approx(np.std([1, 0, 0, 0])), 0.25, 0.0, True, None, [4, 1]),
        (third["prompt_id"], -1, 2, 1.0, 0.0, 1.0, 0.0, False, "difficulty", [2, 2]),
    ]


@pytest.mark.parametrize("moves", ["nothing", "KL", "entropy", "NLL", "critic", "trust region", "its rewards"])
def test_a_group_without_advantage_is_forwarded_where_something_else_of_it_moves_a_weight(rl, moves):  # noqa: F811
    source = rl.source("dead", {**PAID, "num_iterations": 2, **({"entropy_coef": 0.1} if moves == "entropy" else {})})
    changes = {
        "KL": {"kl_loss_coef": 0.1},
        "NLL": {"positive_nll_coef": 0.1},
        "trust region": {"update": "trust_region"},
        "its rewards": {"objective": "nash"},
    }.get(moves, {})
    one = group(source, [([50, 60], 0.5, "eos", {"correct": True})] * 2)
    crediting = source.crediting
    scored = crediting([one], 0, 0)
    crediting.row = replace(source.row, **changes)
    if moves == "critic":  # in the policy's trunk, trained by the policy's loss
        crediting.critic = SimpleNamespace(trainer=None)
    items = [make_item(i.row_id, i.prompt, i.responses, [[1, 1]] * 2, by_response=()) for i in scored.items]
    scored.trained_B = np.ones(2, bool)
    (item,) = crediting._items(scored, items)
    assert not np.any(item.extra["advantages"]) and item.extra["skip_forward"] == (moves == "nothing")


def test_what_moves_from_batch_to_batch_is_in_a_checkpoint(rl):  # noqa: F811
    """Running scale, moving baseline, KL and its controller: a run that goes on pays the next batch as one that was
    never stopped.
    """
    config = {
        **PAID,
        "preset": "reinforce",
        "baseline": "moving_average",
        "reward_norm": "running",
        "kl_coef": 0.1,
        "kl_controller": "adaptive_ziegler",
        "target_kl": 1e-3,
    }
    ids = [50, 60, 70]

    def batch(source, *totals):
        one = group(source, [(ids, total, "eos", {}) for total in totals])
        for sample in one.samples:
            sample.logps = (logps_of(source, sample)).tolist()
        return source.crediting([one], 0, 0)

    def after(source, items):
        source.crediting.finish(items)
        scored = batch(source, 2.0, 4.0)
        return scored.batch.rewards_B.tolist(), scored.credit.advantages_BT.tolist(), source.crediting.controller.coef

    whole, resumed = (rl.source(name, config, reference=rl.tiny["other"]) for name in ("whole", "resumed"))
    items = batch(whole, 5.0, 1.0).items
    resumed.crediting.restore(json.loads(json.dumps(whole.crediting.state())))
    assert after(resumed, items) == after(whole, items)
    assert whole.crediting.scale.count == 4 and whole.crediting.controller.coef != 0.1


def test_the_kl_has_its_unit_where_completions_differ_in_length(rl):  # noqa: F811
    """Sum and mean over a completion's tokens, mean over all tokens; the last is what a controller by that unit sees."""
    for unit in ("sequence_sum", "sequence_mean", "token_mean"):
        source = rl.source(
            f"unit-{unit}",
            {
                **PAID,
                "preset": "rloo",
                "kl_coef": 0.1,
                "kl_controller": "adaptive_ziegler",
                "target_kl": 1.0,
                "kl_unit": unit,
            },
            reference=rl.tiny["other"],
        )
        one = group(source, [([50, 60, 70, 80, 90], 1.0, "eos", {}), ([51], 0.0, "eos", {})])
        scored = source.crediting([one], 0, 0)
        d = [np.subtract(a, b) for a, b in zip(scored.old, scored.ref)]
        expected = {
            "sequence_sum": (d[0].sum() + d[1].sum()) / 2,
            "sequence_mean": (d[0].mean() + d[1].mean()) / 2,
            "token_mean": np.concatenate(d).mean(),
        }[unit]
        assert scored.metrics[f"kl/{unit}"] == pytest.approx(expected) == source.crediting.last_kl
        assert scored.metrics["kl/sequence_sum"] == pytest.approx((d[0].sum() + d[1].sum()) / 2)


@pytest.mark.parametrize(
    "config, fresh, version, start",
    [
        ({"preset": "topr"}, True, 1, False),
        ({"preset": "topr"}, True, 0, True),
        ({"preset": "topr"}, False, 1, True),
        ({"preset": "topr", "top_k": 3}, True, 1, True),
        ({"preset": "grpo", "top_k": 3}, True, 1, False),  # old log-probs are those of the start themselves
    ],
)
def test_early_stopping_has_log_probs_of_the_start_where_ratios_do_not_start_there(rl, config, fresh, version, start):  # noqa: F811
    source = rl.source("start", {**PAID, **config, "early_stop_kl": 0.1, "num_iterations": 2})
    one = group(source, [([50, 60, 70], 1.0, "eos", {}), ([51, 61], 0.0, "eos", {})], version=version, fresh=fresh)
    scored = source.crediting([one], 1, 1)
    own = [logps_of(source, s) for s in one.samples]
    assert (scored.start is not None) == start
    assert all(a == pytest.approx(b, abs=1e-4) for a, b in zip(scored.start or (), own))
    assert not start or len(scored.items[0].extra["start_logps"]) == 2


@pytest.mark.parametrize(
    "config, fresh, mode, sampled",
    [
        ({"preset": "grpo"}, True, "fresh", True),
        ({"preset": "grpo"}, True, "sft", False),  # nobody sampled it
        ({"preset": "grpo", "top_k": 3}, True, "fresh", False),  # the sampler's are of the filtered distribution
        ({"preset": "topr", "top_k": 3}, True, "fresh", True),  # which is what the ratio is to
        ({"preset": "topr", "top_k": 3}, False, "fresh", True),
        ({"preset": "mdpo"}, True, "fresh", True),
        ({"preset": "mdpo"}, False, "fresh", False),  # the iterate is the policy, whoever sampled
    ],
)
def test_ratios_start_from_the_sampler_or_from_the_policy(rl, config, fresh, mode, sampled):  # noqa: F811
    source = rl.source("old", {**PAID, **config})
    made = [([50, 60, 70], 1.0, "eos", {}), ([51, 61], 0.0, "eos", {"mode": mode, "logps": [-2.0, -3.0]})]
    one = group(source, made, fresh=fresh)
    found = source.crediting([one], 0, 0).old
    for sample, old in zip(one.samples, found):
        assert old == pytest.approx(sample.logps if sampled else logps_of(source, sample), abs=1e-4)


def test_every_group_has_the_baseline_of_its_own_greedy_completion(rl):  # noqa: F811
    source = rl.source("greedy", {**PAID, "preset": "remax", "kl_coef": 0.0})
    groups = [group(source, [([50], 1.0, "eos", {}), ([60], 3.0, "eos", {})], number=k) for k in range(2)]
    for one, total in zip(groups, (0.25, 2.0)):
        one.greedy_sample = group(source, [([70], total, "eos", {})]).samples[0]
    assert source.crediting(groups, 0, 0).credit.advantages_BT[:, 0].tolist() == [0.75, 2.75, -1.0, 1.0]


def test_what_is_in_no_statistic_is_nobodys_opponent(rl):  # noqa: F811
    """Win rates inside groups of different size: a masked completion that is out of the statistics and one that could
    not be scored are beaten by nobody.
    """
    source = rl.source(
        "opponents", {**PAID, "preset": "sppo", "truncation_policy": "mask", "truncated_in_stats": False}
    )
    first = group(source, [([50], 1.0, "eos", {}), ([60], 3.0, "length", {}), ([70], float("nan"), "eos", {})])
    second = group(source, [([50], 1.0, "eos", {}), ([60], 0.0, "eos", {})], number=1)
    found = source.crediting([first, second], 0, 0).batch.preference_BO
    win = 1 / (1 + np.exp(-1))
    np.testing.assert_allclose(found[0], [0.5, np.nan, np.nan])
    np.testing.assert_allclose(found[3:], [[0.5, win, np.nan], [1 - win, 0.5, np.nan]])
