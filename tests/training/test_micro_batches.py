"""max_tokens_per_micro_batch bounds what goes through a model at a time: groups that exceed it are parted, and no
number changes.
"""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from stages import training
from stages.algorithms import RL_PRESETS
from stages.batching import (
    choose_form,
    collate,
    cut,
    filled,
    make_item,
    padded_size,
    parts_of,
    per_response,
    plan,
    row_weight,
    segments_of,
    size,
)
from stages.harness import execute
from stages.models.modeling import load_policy, target_logps
from stages.policy import critics
from stages.policy.policy_update import PolicyGradient
from stages.reward_models.reward_heads import new_reward_model
from stages.rl import Config, resolve_preset
from stages.sft import Config as Sft
from stages.sft import NextToken
from stages.training import Trainer, TrainingError
from tests.common import random_value_head, silent
from tests.training.test_invariance import objectives

GROUP = 7


def groups(n=3, seed=0):
    """Groups of uneven responses with everything that an objective reads: masked ones, one that is masked in the
    middle, an empty one.
    """
    rng, items = np.random.default_rng(seed), []
    for i in range(n):
        responses = [rng.integers(10, 250, length).tolist() for length in rng.integers(1, 20, GROUP)]
        masks = [[1] * len(r) for r in responses]
        if i == 1:
            masks[0], masks[4] = [0] * len(responses[0]), [0] * len(responses[4])
            responses[2] = masks[2] = []
        masks[1][: len(masks[1]) // 2] = [0] * (len(masks[1]) // 2)
        extra = {
            name: [rng.normal(mean, 0.1, len(r)).tolist() for r in responses]
            for name, mean in (("old_logps", -5.5), ("ref_logps", -5.6), ("values", 0.3), ("returns", 0.5))
        }
        extra |= {
            "weights": [rng.uniform(0.5, 2.0, len(r)).tolist() for r in responses],
            "advantages": rng.normal(size=GROUP).tolist(),
            "rewards": rng.normal(size=GROUP).tolist(),
            "correct": (rng.random(GROUP) < 0.5).tolist(),
            "teacher_prompts": [None if (i + k) % 3 == 0 else list(range(20, 26 + k)) for k in range(GROUP)],
        }
        items.append(
            make_item(
                f"row-{i}",
                rng.integers(10, 250, 5 + 3 * i).tolist(),
                responses,
                masks,
                by_response=tuple(extra),
                skip_forward=False,
                **extra,
            )
        )
    return items


def texts():
    return [
        make_item(f"ptx-{k}", [], [list(range(20, 40 + k))], [[1] * (20 + k)], ptx=True, documents=1.0)
        for k in range(2)
    ]


def step(model, objective, items, budget, config):
    """(gradients, totals, tokens of every micro-batch) of one optimizer step."""
    trainer = Trainer(model, objective, config.model_copy(update={"max_tokens_per_micro_batch": budget}), 1)
    model.zero_grad(set_to_none=True)
    counts, totals, planned = objective.counts(items), {}, trainer.planned(items)
    for group in planned:
        Trainer._add(totals, [trainer.backward(group, counts)], counts)
    return (
        torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]),
        totals,
        [sum(map(size, group)) for group in planned],
    )


def same(model, objective, items, config, budgets=(30, 45)):
    whole, wanted, _ = step(model, objective, items, 10**6, config)
    assert torch.isfinite(whole).all() and whole.abs().max() > 0
    for budget in budgets:
        found, totals, tokens = step(model, objective, items, budget, config)
        assert max(tokens) <= budget and len(tokens) > len(items)
        assert torch.allclose(found, whole, rtol=0, atol=1e-12 * float(whole.abs().max()))
        assert totals.keys() == wanted.keys()
        for name, value in totals.items():  # sums of metrics are rounded to float32 before they are added
            exact = name in ("loss", "policy", "kl", "value", "ptx", "entropy_bonus", "positive_nll")
            assert value == pytest.approx(wanted[name], rel=1e-11 if exact else 1e-5, abs=1e-13 if exact else 1e-7), (
                name
            )


VARIANTS = {
    "entropy": ("grpo", {"entropy_coef": 0.01, "log_entropy": True}),
    "kl full": ("grpo", {"kl_estimator": "full"}),
    "kl k2 weighted": ("grpo", {"kl_estimator": "k2", "kl_is_weighted": True}),
    "group scope": ("dapo", {"token_norm_scope": "group"}),
    "all sequences count": ("grpo", {"seq_denominator": "all"}),
    "tis": ("grpo", {"importance_correction": "token_truncate"}),
    "off-policy mask": ("grpo", {"off_policy_mask_threshold": 0.01, "num_iterations": 2}),
    "dppo": ("grpo", {"surrogate": "dppo_kl", "epsilon": 0.01}),
    "vespo with tis": ("vespo", {"importance_correction": "token_truncate"}),
    "shared critic": ("ppo", {"critic_mode": "shared", "cliprange_value": 0.2}),
    "shared bandit critic": ("ppo", {"critic_mode": "shared", "critic_target": "bandit"}),
    "distillation": (
        "sdpo",
        {"distillation_weight": 0.4, "distillation_mode": "full_logits", "distillation_alpha": 0.3},
    ),
    "distillation, token mean": ("sdpo", {"loss_agg_mode": "token-mean", "distillation_is_clip": None}),
    "pretraining mix": ("ppo_ptx", {"ptx_coef": 2.0}),
    "pretraining by documents": ("ppo_ptx", {"ptx_coef": 2.0, "ptx_agg": "seq-mean-token-sum"}),
}


@pytest.mark.parametrize("name", [*RL_PRESETS, *VARIANTS])
def test_groups_in_parts_have_the_gradients_and_metrics_of_whole_groups(tiny, name):
    preset, changes = VARIANTS.get(name, (name, {}))
    config = Config(preset=preset, num_generations=GROUP, **changes)
    row = resolve_preset(config)[0] if name in VARIANTS else RL_PRESETS[name]
    objective = PolicyGradient(row, config, value_head=random_value_head(32).double() if "shared" in name else None)
    model, items = load_policy(tiny["policy"]).double(), groups()
    if row.kl_loss_estimator == "full":
        objective.anchor = load_policy(tiny["other"]).double()
    if row.distillation_weight:
        objective.teacher = load_policy(tiny["other"]).double()
    budgets = (30, 45) if row.unit != "pairs" else (60,)
    same(model, objective, items + (texts() if row.ptx_coef else []), config, budgets if not row.ptx_coef else (45,))


def test_advantages_of_every_token_go_with_their_responses(tiny):
    config, items = Config(preset="dapo", num_generations=GROUP), groups()
    for item in items:
        item.extra["advantages"] = [np.linspace(-1, 1, len(r)).tolist() for r in item.responses]
    same(load_policy(tiny["policy"]).double(), PolicyGradient(resolve_preset(config)[0], config), items, config)


@pytest.mark.parametrize(
    "preset, changes",
    (
        ("ppo", {}),
        ("ppo", {"cliprange_value": 0.2}),
        ("ppo", {"token_norm_scope": "group"}),
        ("ppo_outcome", {}),
        ("vapo", {}),
    ),
)
def test_a_critics_items_are_parted_too(tiny, preset, changes):
    config = Config(preset=preset, num_generations=GROUP, **changes)
    same(
        new_reward_model(tiny["policy"]).double(),
        critics.ValueRegression(resolve_preset(config)[0], config, 0.5),
        groups(),
        config,
    )


def test_a_trust_region_step_is_that_of_whole_groups(tiny):
    from stages.policy.trust_region import TrustRegionTrainer

    found = []
    for budget in (10**6, 40):
        config = Config(
            preset="trpo",
            num_generations=GROUP,
            truncation_policy="score",
            max_tokens_per_micro_batch=budget,
            cg_iters=4,
        )
        model = load_policy(tiny["policy"]).double()
        metrics = TrustRegionTrainer(model, PolicyGradient(resolve_preset(config)[0], config), config, 1).step(
            groups(2)
        )
        found.append((torch.cat([p.detach().flatten() for p in model.parameters()]), metrics))
    assert found[0][1]["trpo/step_fraction"] > 0
    assert torch.allclose(*(weights for weights, _ in found), rtol=0, atol=1e-7) and found[1][1] == pytest.approx(
        found[0][1], rel=1e-4, abs=1e-6
    )


# -- how items are parted ----------------------------------------------------------------------------------------------


def test_parts_fit_are_few_and_about_equal():
    rng = np.random.default_rng(5)
    for _ in range(200):
        lengths = rng.integers(0, 30, rng.integers(1, 12)).tolist()
        item = make_item(
            "x", [1] * int(rng.integers(1, 20)), [[2] * n for n in lengths], [[1] * n for n in lengths], by_response=()
        )
        budget = int(rng.integers(1, 120))
        parts = parts_of(item, budget)
        assert (
            parts == parts_of(item, budget)
            and sorted(k for at in parts for k in at) == list(range(len(lengths)))
            and all(list(at) == sorted(at) for at in parts)
        )
        taken, room = [sum(lengths[k] for k in at) for at in parts], max(0, budget - len(item.prompt))
        if size(item) <= budget:
            assert len(parts) == 1
            continue
        # within the budget wherever one response is
        assert all(total <= room or len(at) == 1 for total, at in zip(taken, parts))
        fit = sum(n for n in lengths if n <= room)
        if room:  # first fit decreasing: at most 11/9 of the least number of sets, and 2/3
            assert sum(total <= room for total in taken) <= 11 / 9 * (fit / room + 1) + 2 / 3 + 1
    even = make_item("x", [1] * 4, [[2] * 10] * 8, [[1] * 10] * 8, by_response=())
    assert [len(at) for at in parts_of(even, 74)] == [4, 4]  # seven would fit beside one
    assert [len(at) for at in parts_of(even, 10)] == [1] * 8  # not even one fits
    uneven = make_item("x", [1] * 4, [[2] * n for n in (2, 2, 4, 4)], [[1] * n for n in (2, 2, 4, 4)], by_response=())
    assert parts_of(uneven, 10) == [(0, 2), (1, 3)]  # the short ones first would take three


@pytest.mark.parametrize("form", ["rows", "tree"])
def test_padded_parts_are_within_the_budget_and_none_joins_an_earlier_one(form):
    """Where padding counts, the parts are those of first fit, longest response first, of the tokens of the padded
    rows.
    """

    def cost(items):
        rows = (
            [[len(i.prompt) + len(r)] for i in items for r in i.responses]
            if form == "rows"
            else [[len(i.prompt), *map(len, i.responses)] for i in items]
        )
        return len(rows) * max(map(sum, rows))

    rng, parted = np.random.default_rng(6), 0
    for _ in range(100):
        lengths = rng.integers(1, 30, rng.integers(1, 12)).tolist()
        item = make_item(
            "x", [1] * int(rng.integers(1, 20)), [[2] * n for n in lengths], [[1] * n for n in lengths], by_response=()
        )
        assert padded_size(segments_of([item, item]), form) == cost([item, item])
        budget = int(rng.integers(20, 300))
        parts = parts_of(item, budget, cost=cost)
        assert sorted(k for at in parts for k in at) == list(range(len(lengths))) and all(
            list(at) == sorted(at) for at in parts
        )
        assert all(cost([item.part(at)]) <= budget or len(at) == 1 for at in parts)
        assert (len(parts) == 1) == (cost([item]) <= budget or len(lengths) == 1)
        firsts = [max(at, key=lambda k: lengths[k]) for at in parts]
        assert [lengths[k] for k in firsts] == sorted((lengths[k] for k in firsts), reverse=True)
        parted += len(parts) > 1
        for n, k in enumerate(firsts):
            for at in parts[:n]:
                there = tuple(j for j in at if lengths[j] >= lengths[k])  # shorter ones came later
                assert cost([item.part((*there, k))]) > budget
    assert parted > 20 and padded_size([], form) == 0 and padded_size([(5, [])], form) == 5


def test_what_fills_a_micro_batch_to_the_last_token_shares_it():
    items = [make_item(f"row-{n}", [], [[1] * n], [[1] * n]) for n in (4, 6, 10, 3)]
    for packing, rows in (("sorted", [[3, 4], [6], [10]]), ("best_fit", [[10], [6, 4], [3]])):
        assert [[size(i) for i in group] for group in plan(items, 10, packing)] == rows
    assert [
        [size(i) for i in group] for group in plan(items, 10, cost=lambda group: len(group) * max(map(size, group)))
    ] == [[3, 4], [6], [10]]
    assert [
        [size(i) for i in group] for group in plan(items, 12, cost=lambda group: len(group) * max(map(size, group)))
    ] == [[3, 4], [6], [10]]
    assert [
        [size(i) for i in group] for group in plan(items, 8, cost=lambda group: len(group) * max(map(size, group)))
    ] == [[3, 4], [6], [10]]
    # 3 and 4 are 7 tokens, and 8 with their padding
    assert [
        [size(i) for i in group] for group in plan(items, 7, cost=lambda group: len(group) * max(map(size, group)))
    ] == [[3], [4], [6], [10]]


def test_a_prompt_is_computed_once_where_that_saves_a_fifth():
    for prompt, responses, form in (
        (20, [40, 40], "rows"),
        (20, [30, 30], "tree"),
        (19, [30, 30], "rows"),
        (100, [5], "rows"),
        (0, [], "rows"),
    ):
        assert choose_form([(prompt, responses)]) == form


def test_a_row_without_a_weight_counts_once():
    assert [row_weight(row) for row in ({}, {"weight": None}, {"weight": 0}, {"weight": 2.5})] == [1.0, 1.0, 0.0, 2.5]
    for weight in (-0.5, math.inf, math.nan):
        with pytest.raises(ValueError, match="row r has the weight"):
            row_weight({"row_id": "r", "weight": weight})


def test_what_belongs_to_a_response_goes_with_it_and_the_rest_stays():
    item = make_item(
        "x",
        [1, 2],
        [[3], [4, 4], [5, 5, 5]],
        [[1], [1, 1], [1, 0, 1]],
        by_response=("a",),
        a=[10, 20, 30],
        b=[7, 8, 9],
        c=True,
    )
    one, two = cut([item], 5)
    assert (
        sorted([one.extra["a"], two.extra["a"]]) == [[10, 20], [30]]
        and one.extra["b"] == two.extra["b"] == [7, 8, 9]
        and one.extra["c"] is True
    )
    assert (
        one.whole is item
        and two.whole.n_targets == 5
        and one.row_id == two.row_id == "x"
        and one.part([0]).whole is item
    )
    assert cut([item], 8)[0] is item and cut([item, item], 8) == [item, item]


@pytest.mark.parametrize("name", [name for name in objectives() if not name.startswith("rl/")])
def test_what_a_loss_compares_stays_together(tiny, name):
    objective, make, reward = objectives()[name]
    model = (new_reward_model if reward else load_policy)(tiny["policy"])
    items = make(np.random.default_rng(0))
    trainer = Trainer(model, objective, Config(max_tokens_per_micro_batch=1), 1)
    assert sorted(map(id, (i for group in trainer.planned(items) for i in group))) == sorted(map(id, items))


@pytest.mark.parametrize("preset", [name for name, row in RL_PRESETS.items() if row.unit == "pairs"])
def test_the_two_of_a_pair_stay_together(tiny, preset):
    """Pairs are of consecutive trained responses; an odd one is by itself, and those without a target are left out."""
    config = Config(preset=preset, num_generations=GROUP + 1, max_tokens_per_micro_batch=1)  # one of each was lost
    objective, items = PolicyGradient(resolve_preset(config)[0], config), groups()
    planned = [
        item for group in Trainer(load_policy(tiny["policy"]), objective, config, 1).planned(items) for item in group
    ]
    known = {len(i.prompt): i for i in items}
    seen = {
        n: sorted(
            tuple(
                (
                    known[n].responses.index(r)
                    if not isinstance(r, np.ndarray)
                    else next(k for k, own in enumerate(known[n].responses) if own is r)
                )
                for r in item.responses
            )
            for item in planned
            if len(item.prompt) == n
        )
        for n in known
    }
    assert seen == {5: [(0, 1), (2, 3), (4, 5), (6,)], 8: [(1, 3), (5, 6)], 11: [(0, 1), (2, 3), (4, 5), (6,)]}


def test_what_fits_is_planned_as_before(tiny):
    config, items = Config(preset="grpo", num_generations=GROUP, max_tokens_per_micro_batch=200), groups(6)
    trainer = Trainer(load_policy(tiny["policy"]), PolicyGradient(resolve_preset(config)[0], config), config, 1)
    assert [[id(i) for i in group] for group in trainer.planned(items)] == [
        [id(i) for i in group] for group in plan(items, 200)
    ]


def test_values_per_response_come_back_in_order_from_bounded_micro_batches(tiny, monkeypatch):
    from stages import batching

    model, items, tokens = load_policy(tiny["policy"]).double(), groups(), []

    def compute(batch):
        padded = batch.padded(target_logps(model, batch)[0])
        return [row[: len(r)].tolist() for row, r in zip(padded, (r for i in batch.items for r in i.responses))]

    monkeypatch.setattr(
        batching, "collate", lambda group, device="cpu": tokens.append(sum(map(size, group))) or collate(group, device)
    )
    whole = per_response(items, 10**6, "cpu", compute)
    assert len(tokens) == 1
    tokens.clear()
    parts = per_response(items + items[:1], 30, "cpu", compute)
    assert max(tokens) <= 30 and [list(map(len, rows)) for rows in parts] == [
        list(map(len, i.responses)) for i in items + items[:1]
    ]
    for rows, wanted in zip(parts, whole + whole[:1]):
        for one, other in zip(rows, wanted):
            assert one == pytest.approx(other, rel=1e-12)


# -- the stage ---------------------------------------------------------------------------------------------------------

RL = {
    "learning_rate": 1e-3,
    "max_steps": 2,
    "prompts_per_step": 3,
    "num_generations": 6,
    "max_completion_length": 10,
    "num_minibatches": 1,
    "rewards": [{"name": "length", "kind": "length", "max_length": 10, "cache_length": 9}],
}
RUNS = {
    "grpo": {"preset": "grpo"},
    "dapo": {"preset": "dapo", "dynamic_sampling": False},
    "gspo": {"preset": "gspo", "monitor_kl": True},
    "ppo": {"preset": "ppo", "num_iterations": 2, "critic_learning_rate": 1e-3},
    "p3o": {"preset": "p3o"},
}


def logged(built):
    return [json.loads(line)["metrics"] for line in Path(built["workdir"], "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("case", RUNS)
def test_a_run_with_a_tiny_budget_is_the_run_with_a_large_one(tiny, data, spec, case, monkeypatch):
    from stages import batching

    sizes, runs = [], []

    def watched(group, device="cpu"):
        sizes.append(
            (
                sum(map(size, group)),
                max(len(i.prompt) + (2 if case == "p3o" else 1) * max(map(len, i.responses)) for i in group),
                sum(len(i.responses) for i in group),
            )
        )
        return collate(group, device)

    for module in (batching, training):
        monkeypatch.setattr(module, "collate", watched)
    for name, budget in (("large", 4096), ("tiny", 62)):
        sizes.clear()
        built = spec(
            "rl",
            # else Adam makes much of gradients that are rounding alone
            {**RL, **RUNS[case], "max_tokens_per_micro_batch": budget, "adam_epsilon": 1e-4},
            {"model": tiny["policy"], "data": data["prompts"]},
            name,
        )
        execute(built, silent)
        runs.append((logged(built), list(sizes)))
    (large, before), (small, after) = runs
    assert max(tokens for tokens, *_ in before) > 100 and all(tokens <= max(62, least) for tokens, least, _ in after)
    assert len(large) == len(small) == 2
    for number, (one, other) in enumerate(zip(large, small)):
        assert one.keys() == other.keys()
        near = {"rel": 1e-4, "abs": 1e-6} if not number else {"rel": 5e-2, "abs": 1e-3}  # Adam makes much of little
        far = {
            key: (value, other[key])
            for key, value in one.items()
            if isinstance(value, float) and value != pytest.approx(other[key], **near)
        }
        assert not far


def test_the_plan_counts_prompts_that_are_computed_again_and_the_trial_fills_the_budget(tiny, data, spec):
    events = []
    with pytest.raises(StopIteration):  # after the preflight

        def note(event):
            events.append(event)
            if event["event"] == "metric":
                raise StopIteration

        execute(
            spec(
                "rl",
                {**RL, "preset": "grpo", "max_tokens_per_micro_batch": 45},
                {"model": tiny["policy"], "data": data["prompts"]},
                "plan",
            ),
            note,
        )
    page = Path(next(e for e in events if e["event"] == "report" and e["name"] == "preflight")["markdown"]).read_text()
    warned = next(e["text"] for e in events if e.get("code") == "prompts_repeated")
    longest = int(page.split(" (longest)")[0].rsplit(", ", 1)[1])
    together = (45 - longest) // 10
    tokens = 3 * (-(-6 // together) * longest + 60)
    assert (
        1 <= together < 6
        and f"tokens per step at most | {tokens:,} |" in page
        and f"micro-batches per step at most | {3 * -(-6 // together)} |" in page
    )
    assert (
        f"{tokens} tokens per step instead of {3 * (longest + 60)}" in warned
        and f"max_tokens_per_micro_batch={longest + 60}" in warned
    )
    tried = next(e["text"] for e in events if "dearest micro-batch" in e.get("text", ""))
    assert f"({longest + 10 * together} tokens)" in tried or "(45 tokens)" in tried


def test_the_trial_adds_a_shorter_rollout_where_there_is_room():
    from stages.preflight import filled

    items = [
        make_item(
            str(k),
            [1] * 5,
            [[2] * 10] * 3,
            [[1] * 10] * 3,
            by_response=("old_logps", "advantages"),
            old_logps=[[0.0] * 10] * 3,
            advantages=[1.0] * 3,
        )
        for k in range(2)
    ]
    group = filled(items[:1], items[1:], 50)
    assert (
        sum(map(size, group)) == 50
        and [list(map(len, i.responses)) for i in group] == [[10] * 3, [10]]
        and collate(group).mask_SL.shape == (4, 10)
    )
    shorter = filled(items[:1], items[1:], 43)
    assert (
        sum(map(size, shorter)) == 43
        and len(shorter[1].extra["old_logps"][0]) == 3
        and shorter[1].extra["advantages"] == [1.0]
    )
    assert filled(items[:1], items[1:], 40) == items[:1] == filled(items[:1], [], 100)


@pytest.mark.parametrize(
    "budget, changes, says",
    (
        (200, {}, ", or write activation_checkpointing=true or lora_rank=16"),
        (24, {}, ", or write activation_checkpointing=true or lora_rank=16"),
        (8, {"activation_checkpointing": True, "lora_rank": 4}, ""),
    ),
)
def test_a_rollout_that_does_not_fit_by_itself_is_told_what_helps(tiny, budget, changes, says):
    """Whatever the budget was, groups are parted down to single completions first."""
    from stages.preflight import try_dearest

    config = Config(preset="grpo", num_generations=6, max_tokens_per_micro_batch=budget, **changes)
    trainer = Trainer(load_policy(tiny["policy"]), PolicyGradient(resolve_preset(config)[0], config), config, 1)
    items = [make_item(str(k), [1] * 14, [[2] * 10] * 6, [[1] * 10] * 6, by_response=()) for k in range(2)]
    tried = []

    def backward(group, counts):
        tried.append(sum(map(size, group)))
        raise MemoryError

    trainer.backward = backward
    with pytest.raises(
        TrainingError,
        match=(
            r"^Row 0 \(1 responses, 24 tokens\) does not fit into memory by itself, so a lower"
            rf" max_tokens_per_micro_batch \(now \d+\) cannot help\. Lower max_completion_length or max_prompt_length{says}\.$"
        ),
    ):
        try_dearest(trainer, items, 2, made_up=True)
    assert tried[-1] == 24 and tried == sorted(tried, reverse=True) and (tried[0] > 100) == (budget == 200)


def test_a_pair_that_does_not_fit_stays_together_and_is_told_what_helps(tiny):
    from stages.align import Config as Align
    from stages.preflight import try_dearest

    objective, make, _ = objectives()["align/dpo"]
    items = make(np.random.default_rng(0))
    for budget in (1, 4096):
        trainer = Trainer(load_policy(tiny["policy"]), objective, Align(max_tokens_per_micro_batch=budget), 1)

        def backward(group, counts):
            raise MemoryError

        trainer.backward = backward
        longest = max(items, key=size)
        with pytest.raises(
            TrainingError,
            match=rf"^Row {longest.row_id} \(2 responses, {size(longest)} tokens\).*Lower max_length, or write",
        ):
            try_dearest(trainer, items, len(items))


# -- packing -----------------------------------------------------------------------------------------------------------


def test_best_fit_makes_fewer_micro_batches_of_the_same_step(tiny):
    """Rows of 60 and 30 tokens fill micro-batches of 100 by twos; sorted, each of 60 stands alone. Loss and gradients
    are those of the whole step.
    """
    rng = np.random.default_rng(2)
    items = [
        make_item(f"row-{k}", [], [rng.integers(10, 250, n).tolist()], [[0] + [1] * (n - 1)], weight=1.0)
        for k, n in enumerate([60, 30, 60, 30, 60, 30, 60, 30, 10, 10])
    ]
    objective, model = NextToken("token-mean"), load_policy(tiny["policy"]).double()
    whole, totals, _ = step(model, objective, items, 10**6, Sft())
    counts = {}
    for packing in ("sorted", "best_fit"):
        found, parts, tokens = step(model, objective, items, 100, Sft(packing=packing))
        assert max(tokens) <= 100 and sum(tokens) == sum(map(size, items))
        assert torch.allclose(found, whole, rtol=0, atol=1e-12 * float(whole.abs().max())) and parts[
            "loss"
        ] == pytest.approx(totals["loss"], rel=1e-11)
        counts[packing] = len(tokens)
    assert counts == {"sorted": 6, "best_fit": 4}
    # too long: alone
    assert [[item.row_id for item in group] for group in plan(items, 59, "best_fit")[:4]] == [
        [f"row-{k}"] for k in (0, 2, 4, 6)
    ]


def test_how_full_micro_batches_are_is_measured(tiny, data, spec):
    items = [make_item(f"row-{n}", [], [[1] * n], [[1] * n]) for n in (60, 30, 60, 30, 10, 10)]
    assert [filled(plan(items, 100, packing), 100) for packing in ("sorted", "best_fit")] == [200 / 300, 1.0]
    # an item that is longer has the room that it takes
    assert filled(plan(items, 50), 50) == 200 / (60 + 60 + 50 + 50) and filled([], 50) == 0.0
    built = spec(
        "sft",
        {"batch_size": 4, "max_steps": 3, "max_tokens_per_micro_batch": 4096},
        {"model": tiny["policy"], "data": data["demonstrations"]},
        "filled",
    )
    seen = []

    def note(event):
        if event["event"] == "perf":
            seen.append(event["metrics"]["packing_fill"])

    execute(built, note)
    assert len(seen) == 1 and 0 < seen[0] < 0.2  # four short rows
