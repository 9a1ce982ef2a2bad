"""What RL logs beside rewards, each number against one computed apart: returns, importance weights, distance from the
start, win rate against the reference, pretraining text.
"""

import json

import numpy as np
import pytest
import torch

from stages.losses import tapered_weights
from stages.models.modeling import load_policy
from stages.policy.sequence_losses import Responses, tapered_log
from stages.rl import Config, resolve_preset
from stages.rollouts.metrics import off_policy_metrics, weight_metrics
from storage.datasets import write_dataset
from storage.schema import complete_row
from tests.training.test_rl_parts import rl, rows_of  # noqa: F401


def test_returns_and_the_clip_of_a_shared_critic(rl):  # noqa: F811
    result, metrics = rl(
        "returns",
        {
            "preset": "ppo",
            "critic_mode": "shared",
            "cliprange_value": 1e-4,
            "num_iterations": 2,
            "kl_coef": 0.3,
            "truncation_policy": "score",
            "max_steps": 2,
        },
    )
    flat = np.concatenate([np.cumsum(np.array(r["token_rewards"])[::-1])[::-1] for r in rows_of(result)])
    assert metrics[0]["return/mean"] == pytest.approx(flat.mean(), abs=1e-5) and metrics[0][
        "return/std"
    ] == pytest.approx(flat.std(), abs=1e-5)
    # the second step on the same rollouts has moved all values, half of them towards their returns: those are held
    assert metrics[0]["critic/clip_fraction"] == 0.0 and 0.25 < metrics[1]["critic/clip_fraction"] < 0.75
    returns = np.concatenate([r["returns"] for r in rows_of(result)])
    assert metrics[0]["critic/return_mean"] == pytest.approx(returns.mean(), abs=1e-5)
    assert "return/mean" not in rl("whole", {"preset": "dr_grpo", "max_steps": 1})[1][0]


def test_returns_of_tokens_that_were_thrown_out_are_in_no_mean():
    """rejection_scope=drop: of tokens that are trained on no more."""
    from stages.policy.credit import Batch, Credit
    from stages.rollouts.metrics import return_metrics

    on, rewards = np.ones((2, 2), bool), np.array([[0.0, 1.0], [5.0, 2.0]])
    batch = Batch(
        rewards.sum(1), np.zeros(2, int), on, on[:, 0], on[:, 0], rejected_BT=np.array([[False, True], [True, False]])
    )
    credit = Credit(0 * rewards, None, rewards.sum(1), rewards, on[:, 0], 0 * rewards)
    assert return_metrics(batch, credit, on[:, 0], 1.0) == {"return/mean": 1.5, "return/std": 0.5}


def test_weights_that_are_logged_by_hand(rl):  # noqa: F811
    w, on = np.array([[0.5, 2.0, 9.0], [2.0, 1.0, 0.0]]), np.array([[True, True, False], [True, True, False]])
    found = weight_metrics(w, on, "token_truncate", 2.0)
    assert list(found.values()) == pytest.approx([5.5 / 4, 0.5, 5.5**2 / (4 * (0.25 + 4 + 4 + 1))])
    raised = weight_metrics(w, on, "token_truncate", 2.0, 0.5)
    assert raised["sampling/importance_weight/cut_fraction"] == 0.75
    assert (
        weight_metrics(np.zeros((1, 2)), np.ones((1, 2), bool), "token_mask", 2.0)[
            "sampling/importance_weight/cut_fraction"
        ]
        == 1.0
    )
    _, metrics = rl("tis", {"preset": "dr_grpo", "importance_correction": "token_truncate", "max_steps": 1})
    assert metrics[0]["sampling/importance_weight/mean"] == pytest.approx(1.0, abs=1e-3) and metrics[0][
        "sampling/importance_weight/ess_fraction"
    ] == pytest.approx(1.0, abs=1e-3)


def test_an_engine_without_log_probs_has_no_distance_to_them():
    found = off_policy_metrics([0, 2, -1], 3, [[-1.0, -2.0], None, []], [[-1.5, -2.5], [-1.0], []], [[1, 1], [1], []])
    assert found == {"staleness/mean": 2.0, "staleness/max": 3.0, "sampling/logp_difference": 0.5}
    assert off_policy_metrics([1], 3, [None], [[-1.0]], [[1]]) == {"staleness/mean": 2.0, "staleness/max": 2.0}


def test_tool_tokens_are_in_no_distance_to_the_policy_that_sampled():
    """MASK-TOOL: both sides have 0 there, which made the mean of a long observation's trajectory small."""
    sampled, old, own = [[-1.0, 0.0, 0.0, -2.0], [0.0]], [[-1.5, 0.0, 0.0, -2.7], [0.0]], [[1, 0, 0, 1], [0]]
    found = off_policy_metrics([1, 1], 2, sampled, old, own)
    assert found["sampling/logp_difference"] == pytest.approx(0.6)


def test_the_share_of_cut_weights_does_not_depend_on_their_normalisation(rl):  # noqa: F811
    found, settings = (
        {},
        {
            "preset": "dr_grpo",
            "top_k": 100,
            "importance_correction": "token_truncate",
            "importance_clip_max": 0.75,
            "max_steps": 1,
        },
    )
    for normalised in (False, True):
        result, metrics = rl(f"tis-{normalised}", {**settings, "importance_normalise": normalised})
        ratios = np.concatenate([np.exp(np.subtract(r["logp_old"], r["logp_rollout"])) for r in rows_of(result)])
        found[normalised] = metrics[0]
    cut = (ratios >= 0.75).mean()
    assert 0 < cut < 1 and all(
        m["sampling/importance_weight/cut_fraction"] == pytest.approx(cut) for m in found.values()
    )
    assert found[True]["sampling/importance_weight/mean"] == pytest.approx(1.0) and found[False][
        "sampling/importance_weight/mean"
    ] == pytest.approx(np.minimum(ratios, 0.75).mean(), rel=1e-5)


def test_the_taper_of_topr_is_logged(rl):  # noqa: F811
    logps, old = (
        torch.tensor([[-1.0, -1.0], [-3.0, -1.0], [-1.0, 0.0], [0.0, 0.0]]),
        torch.tensor([[-2.0, -1.0], [-1.0, -1.0], [-2.0, 0.0], [0.0, 0.0]]),
    )
    mask, advantages = (
        torch.tensor([[1, 1], [1, 1], [1, 0], [0, 0]]).bool(),
        torch.tensor([[1.0, 1.0], [-1.0, -1.0], [-2.0, 0.0], [0.0, 0.0]]),
    )
    found = tapered_log(
        Responses(logps, old, None, mask, torch.zeros(4), advantages, None, torch.zeros(0, 2)), (1.0, 1.0), (0.0, 1.0)
    )
    weights = [1.0, np.exp(-2.0), 1.0]
    assert {k: float(v) for k, v in found.items()} == pytest.approx(
        {
            "importance_weight": sum(weights),
            "importance_weight_sq": sum(x * x for x in weights),
            "importance_clipped": 2.0,
            "positive_responses": 1.0,
        }
    )
    # of the same policy by another micro-batch: a weight that is held at 1 was not clipped
    near = Responses(old + 1e-7, old, None, mask, torch.zeros(4), advantages, None, torch.zeros(0, 2))
    assert float((near.sums(near.logps_SL) != near.sums(old))[:3].sum()) > 0
    assert float(tapered_log(near, (1.0, 1.0), (0.0, 1.0))["importance_clipped"]) == 0.0
    assert float(tapered_log(near, (0.0, 0.0), (0.0, 0.0))["importance_clipped"]) == 3.0
    assert tapered_weights(logps.sum(-1)[:3], old.sum(-1)[:3], advantages[:3, 0]).tolist() == pytest.approx(weights)
    _, metrics = rl("topr", {"preset": "topr", "num_iterations": 2, "max_steps": 2, "learning_rate": 1e-2})
    assert all(
        0 < m["policy/importance_weight"] <= 1
        and 0 < m["policy/importance_weight_ess"] <= 1 + 1e-6
        and 0 <= m["policy/positive_responses"] <= 1
        for m in metrics
    )


def test_the_distance_from_the_start_under_a_reference_that_moves(tiny, rl):  # noqa: F811
    """0 before the first step, then what the models' own forwards say; also where the start is the model without its
    adapter.
    """
    for config in ({}, {"lora_rank": 4, "learning_rate": 3e-2}):
        _, metrics = rl(
            f"start-{len(config)}",
            {
                "preset": "grpo",
                "ref_mode": "refresh",
                "ref_sync_steps": 1,
                "ref_sync_alpha": 1.0,
                "monitor_kl": True,
                "eval_prompts": 4,
                "max_steps": 2,
                "learning_rate": 1e-2,
                **config,
            },
        )
        found = [m["validation/kl/start_sequence_sum"] for m in metrics if "validation/kl/start_sequence_sum" in m]
        assert abs(found[0]) < 1e-4 and abs(found[-1]) > 1e-3
    source = rl.source("drift", {"preset": "grpo", "eval_prompts": 3})
    source.beside.start = other = load_policy(tiny["other"])
    samples = [s for group in source.groups.sample(source.order.take(2, 0), 0, 0) for s in group.samples]
    expected = []
    for s in samples:
        ids = torch.tensor([[*s.prompt_ids, *s.ids]])
        with torch.no_grad():
            a, b = (
                m(input_ids=ids)
                .logits[0, -len(s.ids) - 1 : -1]
                .log_softmax(-1)
                .gather(1, torch.tensor(s.ids)[:, None])
                .sum()
                for m in (source.policy.model, other)
            )
        expected.append(float(a - b))
    assert source.beside._drift(samples) == pytest.approx({"kl/start_sequence_sum": np.mean(expected)}, abs=1e-3)


def test_what_samples_beside_the_policy_gives_its_memory_back_where_it_is_tight(tiny, rl, monkeypatch):  # noqa: F811
    """The opponent of a game, and a reference that moves, which samples each validation pass with what the last one
    made."""
    from stages.decoding.sampler import Sampler

    released, made, plain = [], [], Sampler.__init__
    monkeypatch.setattr(Sampler, "release", lambda sampler: released.append(sampler))
    monkeypatch.setattr(
        Sampler, "__init__", lambda sampler, *a, **k: (made.append(sampler), plain(sampler, *a, **k))[1]
    )
    config = {
        "preset": "nash_md",
        "opponent": "ema",
        "ref_mode": "ema",
        "eval_prompts": 2,
        "reward_override": "none",
        "rewards": [{"kind": "length", "max_length": 6, "cache_length": 6}],
    }
    source = rl.source("tight", config)
    prompts, before = source.order.prompts[:2], len(made)
    for rests, times in ((False, 0), (True, 1)):
        source.policy.rests = rests
        released.clear()
        source.groups.sample(prompts, 0, 0)
        assert released == [source.opponent] * times
        released.clear()
        source.evaluate(prompts, 0)
        assert released.count(made[-1]) == times and len(made) == before + 1
        assert made[-1].model is source.reference


def test_answers_are_compared_with_the_references(tiny, rl):  # noqa: F811
    """The reference's answers to the same prompts, drawn once; sigmoid of the difference of scores, 1/2 where both are
    the same model.
    """
    config = {
        "preset": "online_ipo",
        "options": {"tau": 1.0},
        "eval_prompts": 4,
        "reward_override": "none",
        "rewards": [{"kind": "length", "max_length": 6, "cache_length": 6}],
    }
    same = rl.source("same", config)
    prompts = same.order.prompts[:4]
    assert same.evaluate(prompts, 0)["preference/win_rate_reference"] == 0.5
    source = rl.source("against", config, reference=tiny["other"])
    found = source.evaluate(prompts, 0)["preference/win_rate_reference"]
    lengths = []
    for model in (source.policy.model, load_policy(tiny["other"])):
        from stages.decoding.sampler import Sampler

        drawn = Sampler(model, source.policy.renderer.tokenizer).generate(
            [ids for _, ids in prompts],
            source.policy.params,
            [[source.stage.seed_for("validation", row["row_id"])] for row, _ in prompts],
        )
        lengths.append([len(c.ids) for (c,) in drawn])
    score = lambda n: min(0.0, max(-1.0, -n / 6))
    assert found == pytest.approx(np.mean([1 / (1 + np.exp(score(b) - score(a))) for a, b in zip(*lengths)]))
    kept = source.beside.answers
    source.evaluate(prompts, 1)
    assert source.beside.answers is kept
    _, metrics = rl("nash", {"preset": "nash_md", "eval_prompts": 3, "max_steps": 1})
    assert metrics[0]["validation/preference/win_rate_reference"] == 0.5
    _, metrics = rl(
        "adapter",
        {
            "preset": "nash_md",
            "opponent": "self",
            "lora_rank": 4,
            "stop_strings": ["e"],
            "eval_prompts": 3,
            "max_steps": 1,
        },
    )
    assert metrics[0]["validation/preference/win_rate_reference"] == 0.5
    assert "preference/win_rate_reference" not in rl.source("scores", {"preset": "grpo", "eval_prompts": 3}).evaluate(
        prompts, 0
    )


def test_every_validation_pass_is_in_the_dataset_once(rl):  # noqa: F811
    """Also where another pass than the last one gave the weights (select_by), which are not sampled from again."""
    config = {
        "preset": "grpo",
        "reward_override": "none",
        "rewards": [
            {
                "name": "spread",
                "kind": "python",
                "source": "def score(completion_ids):\n    return sum(completion_ids) % 7",
            }
        ],
        "learning_rate": 3e-2,
        "max_steps": 5,
        "eval_prompts": 3,
        "eval_every": 1,
        "select_by": "reward",
        "early_stopping_patience": 1,
    }
    result, metrics = rl("selected", config)
    passes = [m["validation/reward"] for m in metrics if "validation/reward" in m]
    assert np.argmax(passes) < len(passes) - 1
    seen = [json.loads(r["extra_json"])["step"] for r in rows_of(result, "validation")]
    assert seen == [step for step in range(len(passes)) for _ in range(3)]


def test_pretraining_text_is_held_out_and_its_gradient_compared(tiny, rl, tmp_path):  # noqa: F811
    rows = [
        complete_row(
            "text/1",
            {"text": f"two plus {i} is a sum. " * (1 + i % 3)},
            dataset="t",
            source="s",
            origin="human",
            split="validation" if i % 3 == 0 else "train",
        )
        for i in range(12)
    ]
    write_dataset(str(tmp_path / "text"), "text", "text/1", rows)
    result, metrics = rl(
        "ptx",
        {
            "preset": "ppo_ptx",
            "ptx_coef": 0.5,
            "eval_prompts": 3,
            "max_steps": 1,
            "num_iterations": 1,
            "max_grad_norm": 1e9,
        },
        ptx=str(tmp_path / "text"),
    )
    first, last = metrics[0], metrics[-1]
    assert (
        first["validation/ptx/held_out_nll"] != last["validation/ptx/held_out_nll"]
        and "validation/ptx/gradient_norm_ratio" not in first
        and last["validation/ptx/gradient_norm_ratio"] > 0
    )
    from stages.chat import renderer_for

    model, renderer = load_policy(tiny["policy"]), renderer_for(tiny["policy"])
    from types import SimpleNamespace

    from stages.sft import encode_text
    from storage.datasets import open_dataset

    items = encode_text(open_dataset(str(tmp_path / "text")), "validation", renderer, SimpleNamespace(max_length=512))[
        0
    ]
    total = count = 0.0
    for item in items:
        ids = torch.tensor([item.responses[0].tolist()])
        with torch.no_grad():
            logps = model(input_ids=ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])
        total, count = total - float(logps.sum()), count + len(logps)
    assert first["validation/ptx/held_out_nll"] == pytest.approx(total / count, rel=1e-4)


def test_pretraining_text_is_a_plain_language_model_loss_whatever_the_samplers_temperature(tiny):
    from stages.batching import make_item
    from stages.policy.policy_update import PolicyGradient
    from stages.training import Trainer

    items, found = [make_item(f"t{n}", [], [list(range(5, 5 + n))], [[1] * n], ptx=True) for n in (6, 9)], []
    for temperature in (1.0, 0.5):
        config = Config(preset="ppo_ptx", temperature=temperature, log_entropy=False)
        trainer = Trainer(load_policy(tiny["policy"]), PolicyGradient(resolve_preset(config)[0], config), config, 2)
        found.append((trainer.evaluate(items)["ptx/nll"], trainer.gradient_norm(items)))
    assert found[0] == pytest.approx(found[1], rel=1e-5) and min(found[0]) > 0


def test_the_norm_of_a_gradient_moves_nothing(tiny):
    """Trainer.gradient_norm is that of the step, and weights, moments and gradients are as before."""
    from stages.batching import make_item
    from stages.policy.policy_update import PolicyGradient
    from stages.training import Trainer

    config = Config(preset="dr_grpo", log_entropy=False, max_grad_norm=1e9)
    trainer = Trainer(load_policy(tiny["policy"]), PolicyGradient(resolve_preset(config)[0], config), config, 2)
    items = [
        make_item(
            "a",
            [3, 4],
            [[5, 6], [7]],
            [[1, 1], [1]],
            by_response=("old_logps", "advantages"),
            old_logps=[[-1.0, -2.0], [-1.0]],
            advantages=[1.0, -1.0],
        )
    ]
    before = {n: p.detach().clone() for n, p in trainer.parameters.items()}
    norm = trainer.gradient_norm(items)
    assert (
        norm > 0
        and all(torch.equal(before[n], p) and p.grad is None for n, p in trainer.parameters.items())
        and not trainer.optimizer.state
    )
    assert trainer.step(items)["grad_norm"] == pytest.approx(norm)
