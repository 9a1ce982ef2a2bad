"""Rewards that compare answers: P(y > y') reaches NASH, SPPO and ONLINE-IPO as the model gives it, groups stay apart,
and an answer alone is told.
"""

import json
import re
import shutil

import numpy as np
import pytest
import torch

from stages.algorithms import rl_preset
from stages.generation import Sample
from stages.policy.sequence_losses import Responses, on_policy_ipo
from stages.reward_models.reward_heads import RewardCard, write_card
from stages.reward_models.reward_scorers import ComparingScorer, Response, load_scorer, same_prompt
from stages.rollouts.groups import Group
from stages.spec import ConfigError
from storage.datasets import open_dataset
from tests.training.test_rl_parts import rl, rows_of  # noqa: F401

MODEL = {"name": "rm", "kind": "model"}
#: Rock, paper, scissors, and one that loses to all: P(row beats column) = .9.
BEATS = {
    ("rock", "scissors"),
    ("scissors", "paper"),
    ("paper", "rock"),
    *((x, "stone") for x in ("rock", "paper", "scissors")),
}
WORDS = ("rock", "paper", "scissors", "stone")


def p_of(a, b):
    return 0.5 if a == b else 0.9 if (a, b) in BEATS else 0.1


class Cycle(ComparingScorer):
    """What is shown first gets .05 more, which both orders cancel."""

    def __init__(self, unreadable=()):
        self.disagreement, self.bias, self.asked, self.unreadable = None, 0.0, [], unreadable

    def one_order(self, pairs):
        self.asked += [(a.text, b.text) for a, b in pairs]
        return [
            float("nan") if {a.text, b.text} == set(self.unreadable) else p_of(a.text, b.text) + 0.05 for a, b in pairs
        ]


@pytest.fixture()
def pairwise(tiny, tmp_path):
    """A directory with a model that compares."""
    shutil.copytree(tiny["reward"], tmp_path / "pairwise")
    write_card(tmp_path / "pairwise", RewardCard("pairwise"))
    return str(tmp_path / "pairwise")


def group_of(source, words, finish=None):
    prompt, ids = source.order.prompts[0]
    made = [
        Sample(
            prompt,
            ids,
            g,
            [50, 60, 70 + g],
            [-1.0, -2.0, -3.0],
            (finish or {}).get(g, "eos"),
            word,
            0.5,
            {"rm": 0.5},
            {},
        )
        for g, word in enumerate(words)
    ]
    return Group(prompt, ids, made, 0)


def playing(rl, name, pairwise, config, **scorer):
    source = rl.source(name, {"reward_override": "none", "rewards": [MODEL], **config}, reward_model=pairwise)
    source.rewards.scorers["rm"] = Cycle(**scorer)
    return source


# --- the probability itself -------------------------------------------------------------------------------------------


def test_win_rates_are_the_models_own_probabilities_of_cyclic_preferences(rl, pairwise):
    """SPPO: P_i = mean_j P(y_i > y_j), itself 1/2. A sigmoid of mean win rates would give .5, .5, .5 and .43 at .9 and
    .1.
    """
    source = playing(rl, "cycle", pairwise, {"preset": "sppo"})
    scored = source.crediting([group_of(source, WORDS)], 0, 0)
    table = np.array([[p_of(a, b) for b in WORDS] for a in WORDS])
    np.testing.assert_allclose(scored.batch.preference_BO, table, atol=1e-12)
    np.testing.assert_allclose(scored.credit.advantages_BT[:, 0], table.mean(1) - 0.5, atol=1e-12)
    assert len(source.rewards.scorers["rm"].asked) == 2 * 6, "every pair once, in both orders"


def test_an_opponents_answers_are_compared_with_not_pooled(rl, pairwise):
    """NASH: P(y > y') - 1/2 of the policy's y and the opponent's y'; two completions of one prompt by opponents do not
    compete with each other.
    """
    source = playing(rl, "nash", pairwise, {"preset": "nash_md", "opponent": "ema", "kl_coef": 0.0})
    group = group_of(source, WORDS[:2])
    group.opponents = group_of(source, ("scissors", "stone", "rock")).samples
    scored = source.crediting([group], 0, 0)
    expected = np.array([[p_of(a, b) for b in ("scissors", "stone", "rock")] for a in WORDS[:2]])
    np.testing.assert_allclose(scored.batch.preference_BO, expected, atol=1e-12)
    np.testing.assert_allclose(scored.credit.advantages_BT[:, 0], expected.mean(1) - 0.5, atol=1e-12)
    assert (
        scored.metrics["preference/win_rate"] == pytest.approx(expected.mean())
        and "frac_reward_zero_std" not in scored.metrics
    )


def test_what_a_judge_does_not_see_or_cannot_read(rl, pairwise):
    """A cut answer loses against one that ends and ties with another; an unreadable comparison is missing for both."""
    source = playing(rl, "unread", pairwise, {"preset": "sppo"}, unreadable=("rock", "stone"))
    found = source.crediting([group_of(source, WORDS, {1: "length", 2: "length"})], 0, 0).batch.preference_BO
    np.testing.assert_allclose(
        found, [[0.5, 1, 1, np.nan], [0, 0.5, 0.5, 0], [0, 0.5, 0.5, 0], [np.nan, 1, 1, 0.5]], atol=1e-12
    )
    turned = playing(rl, "turned", pairwise, {"preset": "sppo", "reward_override": "inverted"})
    group = group_of(turned, WORDS)
    np.testing.assert_allclose(
        turned.crediting([group], 0, 0).batch.preference_BO,
        [[1 - p_of(a, b) for b in WORDS] for a in WORDS],
        atol=1e-12,
    )


def test_a_completion_without_a_score_is_compared_with_nobody(rl, pairwise):
    """And one that is in no statistic is nobody's opponent, though it has opponents itself."""
    source = playing(rl, "lost", pairwise, {"preset": "sppo", "truncation_policy": "mask", "truncated_in_stats": False})
    group = group_of(source, WORDS, {3: "length"})
    group.samples[1].total = float("nan")
    found = source.crediting([group], 0, 0).batch.preference_BO
    expected = np.array([[p_of(a, b) for b in WORDS] for a in WORDS])
    expected[3, :] = 0.0  # a cut answer loses
    expected[1, :] = expected[:, 1] = expected[:, 3] = np.nan
    np.testing.assert_allclose(found, expected, atol=1e-12)


def test_pairs_are_neighbours_among_what_is_trained(rl, pairwise):
    source = playing(rl, "pairs", pairwise, {"preset": "online_ipo", "num_generations": 4})
    group = group_of(source, (*WORDS, "rock"))
    group.samples[1].tool_mask = [1, 1, 1]  # no token of its own
    trained = np.array([True, True, False, True, True])
    found = source.crediting._paired(group.samples, [group] * 5, trained)
    p = p_of(WORDS[0], WORDS[3])
    np.testing.assert_allclose(found, [p, np.nan, np.nan, 1 - p, np.nan], atol=1e-12)


def test_online_ipo_regresses_on_the_probability_of_its_pairs(rl, pairwise):
    """ONLINE-IPO: (h - (p - 1/2)/tau)^2 with p = P(y1 > y2); pairs whose comparison cannot be read leave the step, the
    others stay as they were.
    """
    source = playing(rl, "ipo", pairwise, {"preset": "online_ipo", "num_generations": 4})
    scored = source.crediting([group_of(source, WORDS)], 0, 0)
    assert scored.items[0].extra["preferences"] == pytest.approx([0.1, 0.9, 0.9, 0.1]) and scored.trained_B.all()
    source.rewards.scorers["rm"].unreadable = ("rock", "paper")
    scored = source.crediting([group_of(source, WORDS)], 0, 0)
    assert scored.trained_B.tolist() == [False, False, True, True] and scored.items[0].extra["preferences"][
        2:
    ] == pytest.approx([0.9, 0.1])

    logps = torch.tensor([[-1.0, -2.0], [-0.5, -1.5]], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([[-1.2, -1.9], [-0.4, -1.1]], dtype=torch.float64)
    seen = Responses(
        logps,
        logps.detach(),
        ref,
        torch.ones(2, 2, dtype=torch.bool),
        torch.tensor([3.0, 1.0]),
        torch.zeros(2, 2),
        None,
        torch.tensor([[0, 1]]),
        torch.tensor([0.9, 0.1], dtype=torch.float64),
    )
    h = (-3.0 + 3.1) - (-2.0 + 1.5)
    loss = on_policy_ipo(seen, 0.25)
    assert loss.item() == pytest.approx((h - 0.4 / 0.25) ** 2, rel=1e-12)
    (gradient,) = torch.autograd.grad(loss.sum(), logps)
    np.testing.assert_allclose(gradient, 2 * (h - 1.6) * np.array([[1, 1], [-1, -1]]), rtol=1e-12)
    seen.preferences_S = None
    assert on_policy_ipo(seen, 0.25).item() == pytest.approx(
        (h - (1 / (1 + np.exp(-2.0)) - 0.5) / 0.25) ** 2, rel=1e-6
    ), "scores are Bradley-Terry's, as before"


@pytest.mark.parametrize("preset, options", [("sppo", {"eta": 1.0}), ("online_ipo", {"tau": 1.0})])
def test_a_run_with_a_preference_model(rl, tiny, data, pairwise, preset, options):
    """The stage end to end: what the rollouts say is what the model says of their texts."""
    from stages.chat import renderer_for

    config = {
        "preset": preset,
        "options": options,
        "max_steps": 1,
        "reward_override": "none",
        "rewards": [MODEL],
        "max_completion_length": 8,
        "num_generations": 4,
        "stop_strings": list("aeioulnrst"),
        "prompts_per_step": 4,
    }
    result, metrics = rl("run", config, reward_model=pairwise)
    decode, scorer = renderer_for(tiny["policy"]).tokenizer.decode, load_scorer(pairwise)
    rows, prompts = rows_of(result), {r["prompt_id"]: r["prompt"] for r in open_dataset(data["prompts"]).iter_rows()}
    letters = "aeioulnrst"
    # the text ends before a stop string
    texts = [re.split(f"[{letters}]", decode(r["completion_ids"], skip_special_tokens=True))[0] for r in rows]
    seen = [bool(r["terminated"] and text.strip()) for r, text in zip(rows, texts)]
    assert 1 < sum(seen) < len(rows)

    def p(i, j):
        if not (seen[i] and seen[j]):
            return (1 + seen[i] - seen[j]) / 2
        return scorer.preferences(
            [
                tuple(
                    Response(prompts[rows[k]["prompt_id"]], [{"role": "assistant", "content": texts[k]}])
                    for k in (i, j)
                )
            ]
        )[0]

    for start in range(0, len(rows), 4):
        for i in range(start, start + 4):
            if preset == "sppo":
                assert rows[i]["advantages"][0] == pytest.approx(
                    np.mean([0.5 if i == j else p(i, j) for j in range(start, start + 4)]) - 0.5, abs=1e-5
                )
            else:
                assert json.loads(rows[i]["extra_json"])["pair_preference"] == pytest.approx(
                    p(i, i + 1 - 2 * (i % 2)), abs=1e-5
                )
    assert np.isfinite(metrics[0]["loss"])


@pytest.mark.parametrize(
    "config, says",
    [
        (
            {"preset": "sppo", "rewards": [MODEL, {"name": "short", "kind": "length_penalty"}]},
            "short would not change; write weight: 0",
        ),
        ({"preset": "sppo", "rewards": [{**MODEL, "weight": 2.0}]}, "weight=2.0"),
        ({"preset": "sppo", "rewards": [{**MODEL, "no_eos_reward": 0.5}]}, "no_eos_reward=0.5"),
        ({"preset": "sppo", "truncation_policy": "penalty"}, "write score or mask"),
        ({"preset": "nash_md", "soft_punish_cache": 2}, "soft_punish_cache=0"),
        ({"preset": "online_ipo", "kl_coef": 0.1}, "write kl_coef=0"),
        ({"preset": "nash_md", "dynamic_sampling": True}, "dynamic_sampling=false"),
    ],
)
def test_what_a_probability_cannot_hold_is_refused(rl, pairwise, config, says):
    with pytest.raises(ConfigError, match=says):
        rl.source("refused", {"reward_override": "none", "rewards": [MODEL], **config}, reward_model=pairwise)


def test_what_is_only_watched_beside_it(rl, tiny, pairwise):
    source = rl.source(
        "watched",
        {
            "preset": "sppo",
            "reward_override": "none",
            "rewards": [MODEL, {"name": "short", "kind": "length_penalty", "weight": 0.0}],
        },
        reward_model=pairwise,
    )
    assert source.crediting.asked == "rm"
    assert (
        rl.source(
            "scores", {"preset": "sppo", "reward_override": "none", "rewards": [MODEL]}, reward_model=tiny["reward"]
        ).crediting.asked
        is None
    )
    assert (
        not rl_preset("grpo").reads_preferences
        and rl_preset("online_ipo").reads_preferences
        and rl_preset("nash_md").reads_preferences
    )


# --- groups, and answers that are alone -------------------------------------------------------------------------------


def test_models_that_compare_see_one_group_at_a_time(rl, pairwise):
    """Two draws of a prompt, the greedy completion and opponents do not compete with each other."""
    source = playing(rl, "apart", pairwise, {"preset": "grpo"})
    prompt = {"row_id": "p", "prompt_id": "p", "prompt": [{"role": "user", "content": "which?"}]}
    rows = [
        {"prompt_row": prompt, "completion_text": word, "completion_ids": [1], "finish_reason": "eos", "group": g}
        for word, g in (("rock", 0), ("stone", (0, "opponents")), ("paper", 0), ("rock", (0, "opponents")))
    ]
    assert [s.total for s in source.rewards.score(rows)] == pytest.approx([0.1, 0.1, 0.9, 0.9])
    pooled = [{**row, "group": None} for row in rows]  # rejection, evaluation: the answers to one prompt
    assert [s.total for s in source.rewards.score(pooled)] == pytest.approx(
        [
            np.mean([p_of(a, b) for j, b in enumerate(w) if j != i])
            for w in [("rock", "stone", "paper", "rock")]
            for i, a in enumerate(w)
        ]
    )
    same = [{"role": "user", "content": "q"}]
    assert same_prompt([Response(same, [], group=g) for g in (None, 1, None, 2, 1)]) == [[0, 2], [1, 4], [3]]


@pytest.mark.parametrize(
    "config, says",
    [
        ({"preset": "reinforce", "num_generations": 1}, "num_generations=4"),
        ({"preset": "remax"}, "baseline=moving_average"),
        ({"preset": "a_lol", "baseline_samples": 1}, "baseline_samples=8"),
        ({"preset": "vineppo"}, "every step is worth 1/2"),
    ],
)
@pytest.mark.parametrize("kind", ["model", "majority"])
def test_a_reward_that_compares_is_refused_where_an_answer_is_alone(rl, pairwise, config, says, kind):
    """It would be .5 (a model) or 1 (the majority) for every answer, and the run without a signal."""
    rewards, given = ([MODEL], {"reward_model": pairwise}) if kind == "model" else ([{"kind": "majority"}], {})
    if kind == "majority" and config["preset"] == "vineppo":
        config, says = {**config, "vine_samples": 1}, "vine_samples=9"
    with pytest.raises(ConfigError, match=says):
        rl.source("alone", {"reward_override": "none", "rewards": rewards, **config}, **given)
    rl.source("control", {"reward_override": "random", "rewards": rewards, **config}, **given)


def test_validation_leaves_out_what_compares_answers(rl, tiny, pairwise):
    """One answer per prompt would earn .5 at every pass: no number instead of a constant one, the rest as it was."""
    config = {"preset": "grpo", "max_steps": 1, "reward_override": "none", "eval_prompts": 3}
    result, _ = rl(
        "alone",
        {**config, "rewards": [MODEL, {"name": "verdict", "kind": "verifier", "weight": 0.0}]},
        reward_model=pairwise,
    )
    assert "validation_rewards" in json.dumps(result["warnings"])
    rows = [json.loads(r["extra_json"]) for r in rows_of(result, "validation")]
    assert all("rm" not in r["parts"] and r["parts"]["verdict"] == 0.0 for r in rows)
    watched = rl.source(
        "watched",
        {**config, "rewards": [MODEL, {"name": "verdict", "kind": "verifier", "weight": 0.0}]},
        reward_model=pairwise,
    )
    found = watched.evaluate(watched.order.prompts[:3], 0)
    assert (
        "reward" not in found
        and found["completions/correct_fraction"] == 0.0
        and found["reward/verdict"] == 0.0
        and "validation/reward" not in watched.history[-1]
    )
    mixed = rl.source(
        "mixed", {**config, "rewards": [MODEL, {"name": "short", "kind": "length_penalty"}]}, reward_model=pairwise
    )
    found = mixed.evaluate(mixed.order.prompts[:3], 0)
    assert found["reward"] == pytest.approx(found["reward/short"]) and found["reward/unscorable_fraction"] == 0.0
    scores = rl.source("scores", {**config, "rewards": [MODEL]}, reward_model=tiny["reward"])
    assert scores.held_out is scores.rewards and "reward" in scores.evaluate(scores.order.prompts[:3], 0)
    with pytest.raises(ConfigError, match="completions/correct_fraction"):
        rl.source(
            "select", {**config, "eval_every": 1, "select_by": "reward", "rewards": [MODEL]}, reward_model=pairwise
        )


def test_an_answer_alone_is_unscorable_everywhere(tiny, pairwise, data, spec):
    """One rule for RL, rejection and evaluation: no 1/2 and no majority of one. An answer beside cut ones is not alone;
    a watched component does not take the others' reward away.
    """
    from stages.harness import execute
    from stages.reward.components import RewardComponent
    from stages.reward.rewards import build_rewards
    from stages.reward.verdicts import ALONE

    def row(text, group, finish="eos"):
        return {
            "prompt_row": {
                "row_id": "p",
                "prompt": [{"role": "user", "content": "q"}],
                "answer": "2",
                "answer_type": "integer",
            },
            "completion_text": text,
            "completion_ids": [1, 2],
            "finish_reason": finish,
            "group": group,
        }

    rows = [
        row("rock", 0),
        row("paper", 0),
        row("rock", 1),
        row("rock", 2),
        row("x", 2, "length"),
        row("x", 3, "length"),
    ]
    made = {}
    for kind, component in (
        ("model", {**MODEL}),
        ("majority", {"name": "rm", "kind": "majority", "extraction": "flexible"}),
    ):
        rewards = build_rewards([RewardComponent(**component)], {"reward_model": pairwise})
        rewards.scorers["rm"] = Cycle()
        made[kind] = rewards.score(rows)
        assert [s.reasons.get("rm") for s in made[kind]] == [None, None, ALONE, None, None, ALONE] and [
            s.total is None for s in made[kind]
        ] == [False, False, True, False, False, True]
    assert (
        [s.total for s in made["model"]][:2] == pytest.approx([0.1, 0.9])
        and made["model"][3].total == 0.5
        and made["model"][4].total == -1.0
    )
    watched = build_rewards(
        [RewardComponent(**MODEL, weight=0.0), RewardComponent(kind="length_penalty", name="cost")],
        {"reward_model": pairwise},
    )
    watched.scorers["rm"] = Cycle()
    assert [s.total for s in watched.score(rows)] == pytest.approx([-6e-4] * 6)
    for stage, config, inputs in (
        (
            "rejection",
            {"num_generations": 1, "max_completion_length": 4},
            {"model": tiny["policy"], "prompts": data["prompts"]},
        ),
        (
            "evaluate",
            {"num_samples": 0, "max_completion_length": 4, "limit": 2},
            {"model": tiny["policy"], "prompts": tiny["prompts"]},
        ),
    ):
        with pytest.raises(ValueError, match="there are none; write num_"):
            execute(
                spec(stage, {"rewards": [MODEL], **config}, {**inputs, "reward_model": pairwise}, stage),
                lambda event: None,
            )
