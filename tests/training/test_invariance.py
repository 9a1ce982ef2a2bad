"""Micro-batches, order, layout and padding cannot change a step: gradients in float64, for every objective."""

import numpy as np
import pytest
import torch

from stages.batching import collate, make_item, pad, plan
from stages.models.modeling import head_of, load_policy, token_logps
from stages.reward_models.reward_heads import new_reward_model


def pair_items(rng, n=7):
    items = []
    for i in range(n):
        prompt = rng.integers(10, 250, rng.integers(3, 20)).tolist()
        responses = [rng.integers(10, 250, rng.integers(1, 9)).tolist() for _ in range(2)]
        items.append(
            make_item(
                f"row-{i}",
                prompt,
                responses,
                [[1] * len(r) for r in responses],
                margin=0.3 * (i % 2),
                label_prob=1.0 - 0.1 * (i % 3),
                weight=1.0 + i % 3,
                ended=(True, False),
                prompt_id=str(i),
                strength=None,
                ref=[-3.0 - i, -4.0],
                counts={"weight": 1.0 + i % 3, "pairs": 1.0},
            )
        )
    return items


def group_items(rng, n=4, g=3):
    items = []
    for i in range(n):
        prompt = rng.integers(10, 250, rng.integers(3, 20)).tolist()
        responses = [rng.integers(10, 250, rng.integers(1, 9)).tolist() for _ in range(g)]
        masks = [[1] * len(r) for r in responses]
        if i == 1:
            masks[0] = [0] * len(responses[0])
        items.append(
            make_item(
                f"row-{i}",
                prompt,
                responses,
                masks,
                by_response=(
                    "advantages",
                    "rewards",
                    "correct",
                    "values",
                    "old_logps",
                    "ref_logps",
                    "teacher_prompts",
                ),
                teacher_prompts=[None if (i + k) % 3 == 0 else [*prompt, 20 + k, 30] for k in range(g)],
                advantages=rng.normal(size=g).tolist(),
                rewards=rng.normal(size=g).tolist(),
                correct=[1.0, 0.0, 1.0][:g],
                values=[rng.normal(0, 1, len(r)).tolist() for r in responses],
                old_logps=[rng.normal(-5.5, 0.1, len(r)).tolist() for r in responses],
                ref_logps=[rng.normal(-5.5, 0.1, len(r)).tolist() for r in responses],
            )
        )
    return items


def text_items(rng, n=7):
    items = []
    for i in range(n):
        ids = rng.integers(10, 250, rng.integers(4, 30)).tolist()
        items.append(
            make_item(f"row-{i}", [], [ids], [rng.integers(0, 2, len(ids)).tolist()[:-1] + [1]], weight=1.0 + i % 2)
        )
    return items


def read_items(rng, n=7):
    """Answers that a teacher with a vocabulary of its own reads in other tokens, behind another prompt."""
    items = []
    for i in range(n):
        sides = [
            (rng.integers(10, 250, rng.integers(3, 20)).tolist(), rng.integers(10, 250, rng.integers(4, 12)).tolist())
            for _ in range(2)
        ]
        count = int(rng.integers(1, 4))
        edges = [
            [0, *sorted(rng.choice(np.arange(1, len(ids)), count - 1, replace=False).tolist()), len(ids)]
            for _, ids in sides
        ]
        mine, read = (make_item(f"row-{i}", prompt, [ids], [[1] * len(ids)]) for prompt, ids in sides)
        spans = np.array([(*a, *b) for a, b in zip(*(zip(edge, edge[1:]) for edge in edges))])
        mine.extra.update(weight=1.0 + i % 2, own=i % 3 > 0, teacher_item=read, spans=spans)
        items.append(mine)
    return items


def answered_items(rng, n=7):
    """The same answers read by a teacher that shares the vocabulary."""
    items = read_items(rng, n)
    for item in items:
        read = item.extra["teacher_item"]
        item.extra["teacher_item"] = make_item(item.row_id, read.prompt, item.responses, item.masks)
    return items


def teacher_of_more_tokens():
    """A small teacher whose vocabulary is larger than the student's."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from stages.models.modeling import freeze

    torch.manual_seed(1)
    return freeze(
        LlamaForCausalLM(
            LlamaConfig(
                vocab_size=330,
                hidden_size=24,
                intermediate_size=48,
                num_hidden_layers=2,
                num_attention_heads=2,
                num_key_value_heads=2,
                initializer_range=0.2,
            )
        ).double()
    )


def distill_items(rng, n=7):
    """Demonstrations with what a teacher adds: a row of its own to read, its captured distributions, an answer of the
    student's.
    """
    items = text_items(rng, n)
    for i, item in enumerate(items):
        count = item.n_targets
        ids = np.stack([rng.permutation(250)[:4] for _ in range(count)]).astype(np.int32)
        kept = rng.dirichlet(np.ones(5), count)
        item.extra["captured"] = ids, np.log(kept[:, :4]).astype(np.float32), np.log(kept[:, 4]).astype(np.float32)
        if i % 3 == 1:
            context = rng.integers(10, 250, 5).tolist()
            said = [[*context, *item.responses[0].tolist()]], [[0] * 5 + item.masks[0].tolist()]
            item.extra["teacher_item"] = make_item(item.row_id, [], *said)
        if i % 3 == 2:
            item.extra["own"] = True
    return items


def complete(name, objective, frozen):
    """Give an objective that compares the policy with another model that model, ``frozen()`` in float64."""
    if getattr(getattr(objective, "row", None), "kl_loss_estimator", "") == "full":
        objective.anchor = frozen().double()
    if getattr(getattr(objective, "row", None), "distillation_weight", 0):
        objective.teacher = frozen().double()
    if name in ("distill/forward", "distill/reverse", "distill/jsd"):
        objective.teacher = frozen().double()
    elif name.startswith("distill/") and "captured" not in name:
        objective.teacher = teacher_of_more_tokens()


def objectives():
    from stages.align import Config as AlignConfig
    from stages.direct.direct_alignment import DirectAlignment
    from stages.distill import Config as DistillConfig
    from stages.distill import Distillation
    from stages.reward_models.reward_losses import RewardLoss
    from stages.reward_model import Config as RewardConfig
    from stages.reward_models.reward_objectives import REWARD_OBJECTIVES
    from stages.policy.policy_update import PolicyGradient
    from stages.algorithms import RL_PRESETS
    from stages.rl import Config as RLConfig
    from stages.running import randomness
    from stages.sft import NextToken, Noise

    out = {
        f"sft/{mode}": (NextToken(mode), text_items, False)
        for mode in ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean")
    }
    out["sft/unlikelihood"] = (NextToken("token-mean", unlikelihood_coef=0.5, unlikelihood_window=4), text_items, False)
    out["sft/self_paced"] = (NextToken("seq-mean-token-sum", unlikelihood_coef=0.5, threshold=7.5), text_items, False)
    noise = Noise(20.0, lambda *purpose: randomness.rng(0, "sft", *purpose))
    out |= {
        f"sft/{name}": (NextToken("token-mean", **more), text_items, False)
        for name, more in (
            ("dft", {"loss_type": "dft"}),
            ("label_smoothing", {"label_smoothing_factor": 0.1}),
            ("neftune", {"noise": noise}),
        )
    }
    out["reward_model"] = (
        RewardLoss(
            REWARD_OBJECTIVES["bt"],
            RewardConfig(use_margin=True, use_soft_labels=True, center_rewards_coefficient=0.01),
            "last",
        ),
        pair_items,
        True,
    )
    for method in ("dpo", "orpo"):  # every method: test_align_methods
        out[f"align/{method}"] = (DirectAlignment(AlignConfig(method=method)), pair_items, False)
    out["align/mpo"] = (
        DirectAlignment(
            AlignConfig(
                loss_weight=0.8, also=[{"method": "bco_pair", "weight": 0.2}], nll_coef=1.0, nll_reduction="token-mean"
            )
        ),
        pair_items,
        False,
    )
    shared = np.array([(i, i + 40) for i in range(0, 250, 2)])
    for name, more in (
        ("uld", {}),
        ("gold", {"direction": "jsd", "soft_weight": 0.6}),
        ("gold, first", {"objective": "gold", "span_merge": "first", "matched_weight": 1.0, "unmatched_weight": 0.3}),
        ("iw_opd", {"method": "on_policy", "distillation_temperature": 1.5}),
    ):
        config = DistillConfig(**{"objective": name, **more})
        make = answered_items if name == "iw_opd" else read_items
        out[f"distill/{name}"] = (Distillation(config, None, shared), make, False)
    for name, settings in (
        ("forward", {"soft_weight": 0.6, "distillation_temperature": 2.0}),
        ("reverse", {"direction": "reverse"}),
        ("jsd", {"direction": "jsd", "jsd_beta": 0.3}),
        ("captured", {"soft_weight": 0.6}),
        ("captured, renormalised", {"tail": "renormalise"}),
    ):
        out[f"distill/{name}"] = (Distillation(DistillConfig(**settings), None), distill_items, False)
    for preset, row in RL_PRESETS.items():
        out[f"rl/{preset}"] = (
            PolicyGradient(row, RLConfig(preset=preset, num_generations=3, entropy_coef=0.01)),
            group_items,
            False,
        )
    return out


def gradient(model, objective, items, max_tokens):
    counts = objective.counts(items)
    model.zero_grad(set_to_none=True)
    value = 0.0
    for group in plan(items, max_tokens):
        sums = objective(model, collate(group))
        loss = sum(total / max(counts[by], 1e-12) for total, by in sums.loss.values())
        loss.backward()
        value += float(loss.detach())
    return value, torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("name", list(objectives()))
def test_step_is_invariant_to_microbatching(tiny, name):
    objective, make, reward = objectives()[name]
    model = (new_reward_model(tiny["policy"]) if reward else load_policy(tiny["policy"])).double()
    items = make(np.random.default_rng(0))
    complete(name, objective, lambda: load_policy(tiny["other"]))
    value, whole = gradient(model, objective, items, 10**6)
    assert torch.isfinite(whole).all() and whole.abs().max() > 0
    # The model's own forward rounds norms and rotary tables to float32: it serves as the check of the value, not of the
    # invariance.
    for own, max_tokens, order, tolerance in (
        (False, 1, items, 1e-12),
        (False, 60, items[::-1], 1e-12),
        (True, 10**6, items, 2e-6),
        (True, 60, items[::-1], 2e-6),
    ):
        model._posttrain_lean = not own
        other_value, other = gradient(model, objective, order, max_tokens)
        assert other_value == pytest.approx(value, rel=tolerance)
        assert torch.allclose(other, whole, rtol=0, atol=tolerance * float(whole.abs().max()))


def test_padding_content_changes_nothing(tiny):
    model = load_policy(tiny["policy"])
    batch = collate(text_items(np.random.default_rng(1), 4))
    rows = pad(batch)
    real = torch.zeros(rows.ids_BT.numel(), dtype=torch.bool)
    real[rows.where_U] = True
    logps = []
    for filler in (0, 7, 249):
        ids = torch.where(real.view_as(rows.ids_BT), rows.ids_BT, filler)
        states = model.base_model(
            input_ids=ids, position_ids=rows.positions_BT, use_cache=False
        ).last_hidden_state.flatten(0, 1)[rows.where_U]
        logps.append(token_logps(head_of(model), states[batch.src_N], batch.target_N)[0].detach())
    assert torch.equal(logps[0], logps[1]) and torch.equal(logps[0], logps[2])


def test_head_equals_plain_softmax_with_gradients(monkeypatch):
    from stages.models import modeling

    torch.manual_seed(0)
    for softcap, scale, temperature, chunk, keep in (
        (None, 1.0, 1.0, 1 << 23, 1 << 25),
        (None, 0.5, 0.7, 40, 80),
        (None, 0.5, 0.7, 40, 0),
        (5.0, 2.0, 1.3, 40, 80),
    ):
        monkeypatch.setattr(modeling, "HEAD_CHUNK_ELEMENTS", chunk)
        monkeypatch.setattr(modeling, "HEAD_KEEP_ELEMENTS", keep)
        hidden = torch.randn(9, 6, dtype=torch.float64, requires_grad=True)
        weight = torch.randn(13, 6, dtype=torch.float64, requires_grad=True)
        bias = torch.randn(13, dtype=torch.float64, requires_grad=True)
        targets = torch.randint(0, 13, (9,))
        upstream, upstream_entropy = torch.randn(9, dtype=torch.float64), torch.randn(9, dtype=torch.float64)
        logps, entropy = token_logps(
            modeling.Head(weight, bias, scale, softcap), hidden, targets, temperature, entropy=True
        )
        ours = torch.autograd.grad((logps * upstream + entropy * upstream_entropy).sum(), (hidden, weight, bias))
        z = (hidden @ weight.t() + bias) * scale
        z = (softcap * torch.tanh(z / softcap) if softcap else z) / temperature
        plain = torch.log_softmax(z, -1)
        plain_entropy = -(plain.exp() * plain).sum(-1)
        picked = plain.gather(1, targets[:, None])[:, 0]
        theirs = torch.autograd.grad(
            (picked * upstream + plain_entropy * upstream_entropy).sum(), (hidden, weight, bias)
        )
        assert torch.allclose(logps, picked, atol=1e-12) and torch.allclose(entropy, plain_entropy, atol=1e-12)
        for a, b in zip(ours, theirs):
            assert torch.allclose(a, b, atol=1e-11)


def test_a_group_without_signal_counts_but_is_not_forwarded(tiny):
    from stages.policy.policy_update import PolicyGradient
    from stages.rl import Config, resolve_preset
    from stages.training import Trainer

    config = Config(preset="dr_grpo", num_generations=3)
    items = group_items(np.random.default_rng(2))
    quiet = [
        make_item(
            i.row_id, i.prompt, i.responses, i.masks, **{**i.extra, "advantages": [0.0] * 3, "skip_forward": True}
        )
        for i in items[:2]
    ]
    loud = [
        make_item(
            i.row_id, i.prompt, i.responses, i.masks, **{**i.extra, "advantages": [0.0] * 3, "skip_forward": False}
        )
        for i in items[:2]
    ]
    weights = []
    for head in (quiet, loud):
        model = load_policy(tiny["policy"])
        trainer, read = Trainer(model, PolicyGradient(resolve_preset(config)[0], config), config, 1), set()
        sums = trainer._sums
        trainer._sums = lambda group: read.update(i.row_id for i in group) or sums(group)
        trainer.step(head + items[2:])
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
        assert read == {i.row_id for i in (items[2:] if head is quiet else items)}
    assert torch.allclose(weights[0], weights[1], atol=1e-9)


def test_metrics_are_divided_by_their_counts_and_maxima_by_nothing(tiny):
    from stages.settings import OptimizerConfig
    from stages.training import Sums, Trainer

    class Told:
        def counts(self, items):
            return {"rows": float(len(items)), "shares": sum(i.extra["share"] for i in items)}

        def __call__(self, model, batch):
            value, share = (torch.tensor([i.extra[name] for i in batch.items]) for name in ("value", "share"))
            return Sums(
                {"first": (value.sum(), "rows"), "second": ((value * share).sum(), "shares")},
                {
                    "mean": (value.sum(), "rows"),
                    "value_max": (value.max(), "rows"),
                    "by_share": (share.sum(), "shares"),
                },
            )

    items = [
        make_item(f"row-{k}", [1], [[2]], [[1]], value=v, share=0.01 * (k + 1))
        for k, v in enumerate((0.5, 0.25, 0.125))
    ]
    for budget in (2, 4, 100):
        found = Trainer(
            load_policy(tiny["policy"]), Told(), OptimizerConfig(max_tokens_per_micro_batch=budget), 1
        ).evaluate(items)
        second = (0.5 + 2 * 0.25 + 3 * 0.125) / 6
        assert found == pytest.approx(
            {
                "loss": 0.875 / 3 + second,
                "first": 0.875 / 3,
                "second": second,
                "mean": 0.875 / 3,
                "value_max": 0.5,
                "by_share": 1.0,
            },
            rel=1e-6,
        )


def test_a_non_finite_step_is_skipped_then_fails_with_the_row(tiny):
    from stages.sft import Config, NextToken
    from stages.training import Trainer, TrainingError

    model = load_policy(tiny["policy"])
    before = torch.cat([p.detach().flatten().clone() for p in model.parameters()])
    items = text_items(np.random.default_rng(3), 2)
    items[0].extra["weight"] = float("nan")
    trainer = Trainer(model, NextToken("token-mean"), Config(max_nonfinite_steps=1), 5)
    assert trainer.step(items)["skipped_steps"] == 1
    assert torch.equal(before, torch.cat([p.detach().flatten() for p in model.parameters()]))
    with pytest.raises(TrainingError, match="row-0"):
        trainer.step(items)


def test_a_step_is_the_same_to_the_last_bit_however_threads_are_scheduled(tiny):
    """Many responses behind one prompt: the shared position's gradient is summed in a fixed order."""
    from stages.policy.policy_update import PolicyGradient
    from stages.rl import Config, resolve_preset
    from stages.training import Trainer

    config = Config(preset="dr_grpo", num_generations=768, max_tokens_per_micro_batch=10**6)
    rng = np.random.default_rng(4)
    responses = [rng.integers(10, 250, 2).tolist() for _ in range(768)]
    items = [
        make_item(
            "row",
            rng.integers(10, 250, 400).tolist(),
            responses,
            [[1] * 2] * 768,
            advantages=rng.normal(size=768).tolist(),
            old_logps=[[-5.5] * 2] * 768,
        )
    ]
    threads = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        seen = set()
        for _ in range(12):
            model = load_policy(tiny["policy"])
            trainer = Trainer(model, PolicyGradient(resolve_preset(config)[0], config), config, 1)
            trainer.step(items)
            seen.add(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
    finally:
        torch.set_num_threads(threads)
    assert len(seen) == 1
