"""Where the numbers of an advantage come from: baselines on the scale of the rewards, continuations, stored and early
sampled groups, rewards of steps, constants of losses.
"""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch

from stages.estimators import DynamicSamplingExhausted
from stages.generation import Sample, sample_groups, score
from stages.models.modeling import load_policy
from stages.reward_models.reward_heads import RewardCard, write_card
from stages.rl import Config, resolve_preset
from stages.rollouts.groups import override_reward
from stages.rollouts.replay import full_group, plain_group
from stages.spec import ConfigError
from storage.datasets import open_dataset
from tests.common import written
from tests.training.test_rl_parts import rl, rows_of  # noqa: F401
from tests.training.test_rl_rules import SPREAD, completions

REMOTE = {"kind": "remote", "url": "http://h/score", "endpoint_model": "m", "normalise": "batch"}
PAID = {"reward_override": "none", "rewards": [SPREAD]}


def losing(engine, lost):
    """``engine`` without the completions of the seeds ``lost``."""
    from stages.decoding.sampler import Completion

    class Losing:
        def __getattr__(self, name):
            return getattr(engine, name)

        def generate(self, prompts, params, seeds, progress=None):
            return [
                [Completion([], None, "error", "", error="gone") if s in lost else c for c, s in zip(group, own)]
                for group, own in zip(engine.generate(prompts, params, seeds), seeds)
            ]

    return Losing()


# --- baselines on the scale of the rewards that they are taken off ----------------------------------------------------


# all three lose .4 for their length
@pytest.mark.parametrize(
    "config, finish, expected",
    [
        # the greedy completion was cut as well: -2
        ({"truncation_policy": "penalty", "missing_eos_penalty": 2.0}, "length", [1.0 + 2.0, 0.0]),
        ({"truncation_policy": "zero"}, "length", [1.0, 0.0]),
        ({"truncation_policy": "zero"}, "eos", [1.0 - 0.25, -0.25]),
        ({"truncation_policy": "score", "soft_punish_cache": 5}, "eos", [1.0 - 0.25, 3.0 - 0.25]),
    ],
)
def test_a_greedy_completion_is_paid_as_the_others(rl, config, finish, expected):
    """REMAX: the baseline is the reward of the greedy completion, cut and long ones by the rules for all."""
    source = rl.source("greedy", {**PAID, "preset": "remax", "kl_coef": 0.0, **config})
    group = completions(source, [(1.0, "eos"), (3.0, "length")])
    group.greedy_sample = completions(source, [(0.25, finish)]).samples[0]
    # in a checkpoint, or replayed
    again = full_group(json.loads(json.dumps(plain_group(group))), source.rows, fresh=True)
    for one in (group, again):
        assert source.crediting([one], 0, 0).credit.advantages_BT[:, 0] == pytest.approx(expected)


@pytest.mark.parametrize(
    "config, expected",
    [
        ({}, 2.0),
        ({"truncation_policy": "zero"}, 0.5),
        ({"truncation_policy": "penalty", "missing_eos_penalty": 3.0}, -1.0),
        ({"soft_punish_cache": 5}, 2.0 - 0.4),
        ({"truncation_policy": "mask"}, 2.0),
        ({"truncation_policy": "mask", "truncated_in_stats": False}, 1.0),
    ],
)
def test_baselines_of_the_starting_policy_are_paid_as_its_successors_answers(rl, config, expected):
    """BASELINE table, ASTAR-PO: mean reward, and beta log mean exp(r/beta), of what the completions would earn in
    training.
    """
    source = rl.source("table", {**PAID, "preset": "a_lol", **config})
    group = completions(source, [(1.0, "eos"), (3.0, "length"), (float("nan"), "eos")]).samples
    value, behind = source.crediting.baseline_of(group)
    assert value == pytest.approx(expected) and len(behind) == (1 if expected == 1.0 else 2)
    if not config:
        star = rl.source("star", {**PAID, "preset": "astar_po", "truncation_policy": "zero"})
        assert star.crediting.baseline_of(group)[0] == pytest.approx(0.5 * np.log((np.exp(1 / 0.5) + 1) / 2))
        assert star.crediting.baseline_of(group[2:]) is None


@pytest.mark.parametrize(
    "config, says",
    [
        ({"preset": "remax", "reward_norm": "whiten"}, "baseline=moving_average"),
        ({"preset": "astar_po", "reward_clip": 1.0}, "another scale"),
        ({"preset": "a_lol", "reward_norm": "minmax"}, "baseline=table"),
        ({"preset": "a_lol", "rewards": [{"kind": "model", "normalise": "batch"}]}, "scored apart"),
        ({"preset": "vineppo", "rewards": [{"kind": "model", "normalise": "batch"}]}, "scored apart"),
        ({"preset": "vineppo", "rewards": [REMOTE]}, "scored apart"),
        ({"preset": "dapo", "rewards": [REMOTE]}, "reward_norm=whiten"),
        ({"preset": "a_lol", "rewards": [{"kind": "judge", "normalise": "batch"}]}, "scored apart"),
        ({"preset": "vineppo", "kl_coef": 0.02}, "write beta=1e-4"),
        ({"preset": "topr", "advantage": "win_rate", "opponent": "ema", "replay_fraction": 0.25}, "opponent=self"),
        ({"preset": "oreo", "whiten": True}, "same returns"),
        ({"preset": "oreo", "advantage_clip": 1.0}, "same returns"),
        ({"preset": "oreo", "baseline": "batch_mean"}, "same returns"),
        (
            {"preset": "grpo_process", "dynamic_sampling": True, "filter_groups_metric": "reward_std"},
            "rewards of their steps",
        ),
        ({"preset": "trpo", "num_minibatches": 2}, "num_minibatches=1.*or preset=ppo$"),
        ({"preset": "rloo", "num_minibatches": 2}, "num_minibatches=1.*surrogate=clip"),
        ({"clip_ratio_c": 1.2}, "clip_ratio_c=3.0"),
        ({"preset": "dapo", "clip_ratio_c": 1.25}, "1.28"),
        ({"kl_controller": "adaptive_ppo", "target_kl": 1.0, "kl_coef_min": 2.0, "kl_coef_max": 1.0}, "kl_coef_min <="),
        ({"preset": "reinforce", "num_generations": 1, "dynamic_sampling": True}, "num_generations=4"),
        ({"preset": "trpo", "ptx_coef": 1.0}, "ppo_ptx"),
    ],
)
def test_what_would_be_measured_on_two_scales_or_read_by_nothing_is_refused(config, says):
    with pytest.raises(ValueError, match=says):
        resolve_preset(Config(**config))


def test_one_completion_per_prompt_is_what_astar_po_is():
    assert any("num_generations=1" in w for w in resolve_preset(Config(preset="astar_po"))[1]) and not any(
        "A*-PO" in w for w in resolve_preset(Config(preset="astar_po", num_generations=1))[1]
    )


# --- continuations ----------------------------------------------------------------------------------------------------


def test_a_banned_word_may_not_be_ended_by_a_continuation(tiny):
    """A word that the kept tokens begin was banned among the new tokens only, so that it could be completed."""
    from stages.chat import renderer_for
    from stages.decoding.sampler import Sampler
    from stages.decoding.sampling import SamplingParams
    from stages.generation import Sample, continuations
    from stages.models.modeling import load_policy

    tokenizer = renderer_for(tiny["policy"]).tokenizer
    a, b, c = (tokenizer.encode(letter, add_special_tokens=False)[0] for letter in "qxz")
    assert tokenizer.encode("qxz", add_special_tokens=False) == [a, b, c]
    sampler = Sampler(load_policy(tiny["policy"]), tokenizer)

    def goes_on(kept, likely, word):
        begun = Sample({"row_id": "1"}, [5, 6], 0, [*kept, 9], [0.0] * (len(kept) + 1), "length", "")
        params = SamplingParams(max_new_tokens=len(kept) + 3, bad_words=(word,), logit_bias=likely)
        ((made,),) = continuations(sampler, [(begun, len(kept))], params, [[3]])
        assert made.ids[: len(kept)] == kept
        return made.ids[len(kept) :]

    first, *later = goes_on([a, b], {c: 90.0}, "qxz")
    assert first != c and later[-1] == c, "behind other tokens it ends no banned word"
    assert goes_on([b, b], {c: 90.0}, "qxz")[0] == c and goes_on([a], {b: 90.0}, "qx")[0] != b
    between = goes_on([a], {b: 90.0, c: 89.0}, "qxz")
    assert between[0] == b and between[1] == b, "the second new token would have ended it"
    assert goes_on([b], {b: 89.0, c: 90.0}, "qxz")[0] == c


@pytest.mark.parametrize(
    "config, value",
    [({"truncation_policy": "zero"}, 0.0), ({"truncation_policy": "penalty", "missing_eos_penalty": 0.75}, -0.75)],
)
def test_continuations_are_paid_as_what_they_continue(rl, config, value):
    """VINEPPO: with every completion cut, every state is worth what a cut completion earns, and no step earns
    anything.
    """
    result, _ = rl(
        "cut",
        {
            **PAID,
            "preset": "vineppo",
            "vine_samples": 2,
            "step_separator": "e",
            "min_tokens": 6,
            "max_steps": 1,
            **config,
        },
    )
    rows = rows_of(result)
    assert all(
        r["truncated"] and r["reward"] == value and set(r["step_values"]) == {value} and not any(r["advantages"])
        for r in rows
    )
    assert any(c["value"] != value for r in rows for c in r["reward_components"])


# --- what the input baselines says ------------------------------------------------------------------------------------


def table_of(tmp_path, rows):
    said = [
        {"prompt_id": p, "group_id": p, "b": b, "n": 4, "policy_version": 0, "extra_json": extra}
        for p, b, extra in rows
    ]
    return written(tmp_path / "baselines", "baselines", "baselines/1", said, dataset="b", origin="ai")


def test_baselines_that_are_missing_are_told_before_training(rl, tmp_path):
    source = rl.source("known", {**PAID, "preset": "a_lol"})
    ids = [row["prompt_id"] for row, _ in source.order.prompts]
    path = table_of(tmp_path, [(p, 0.25, None) for p in ids[1:]])
    with pytest.raises(ConfigError, match=f"none for prompt {ids[0]} and 0 more"):
        rl.source("missing", {**PAID, "preset": "a_lol"}, baselines=path)._prepare()


def test_a_prompt_without_a_baseline_may_take_the_mean_of_its_batch(rl, tmp_path):
    """BASELINE, a missing id: the mean of the rewards that count, of known prompts their own; also of prompts that were
    not sampled from before.
    """
    config = {**PAID, "preset": "a_lol", "baseline_missing": "batch_mean"}
    ids = [row["prompt_id"] for row, _ in rl.source("known", config).order.prompts]
    source = rl.source("some", config, baselines=table_of(tmp_path, [(ids[0], 0.25, None)]))
    source._prepare()
    assert len(source.order.prompts) == len(ids)
    known, unknown = (
        completions(source, [(1.0, "eos"), (3.0, "eos")]),
        completions(source, [(5.0, "eos"), (0.0, "eos")]),
    )
    known.prompt, unknown.prompt = source.order.prompts[0][0], source.order.prompts[1][0]
    unknown.samples[1].total = float("nan")
    found = source.crediting([known, unknown], 0, 0).credit.advantages_BT
    assert found[:3, 0] == pytest.approx([1.0 - 0.25, 3.0 - 0.25, 5.0 - (1.0 + 3.0 + 5.0) / 3]) and not found[3].any()
    with pytest.raises(ConfigError, match="write baseline_missing=batch_mean"):
        rl.source("refused", {**config, "baseline_missing": "error"}, baselines=str(tmp_path / "baselines"))._prepare()
    with pytest.raises(ConfigError, match="(?s)baseline_missing.*baseline=table"):
        rl.source("unread", {**PAID, "preset": "astar_po", "baseline_missing": "batch_mean"})


def test_prompts_that_were_never_answered_right_are_left_out_whoever_measured(rl, tmp_path):
    """ASTAR-PO: the baselines that a stage writes say how many verdicts there were, so a run that is given them leaves
    out the same prompts.
    """
    source = rl.source("ids", {**PAID, "preset": "astar_po"})
    ids = [row["prompt_id"] for row, _ in source.order.prompts]
    path = table_of(tmp_path, [(p, 0.25, json.dumps({"verdicts": [4, k % 2]})) for k, p in enumerate(ids)])
    given = rl.source("given", {**PAID, "preset": "astar_po"}, baselines=path)
    given._prepare()
    assert [row["prompt_id"] for row, _ in given.order.prompts] == ids[1::2] and set(given.crediting.table) == set(
        ids[1::2]
    )
    shutil.rmtree(path)
    silent = rl.source(
        "silent", {**PAID, "preset": "astar_po"}, baselines=table_of(tmp_path, [(p, 0.25, None) for p in ids])
    )
    silent._prepare()
    assert len(silent.order.prompts) == len(ids) and "never_solved_unknown" in json.dumps(silent.stage.warnings)


def test_a_prompt_without_a_scored_completion_has_no_baseline(rl):
    """It was 0, which is neither its mean nor unknown."""
    odd = {
        "name": "odd",
        "kind": "python",
        "source": "def score(prompt, completion, answer):\n    return None if int(answer) % 4 else 1.0",
    }
    source = rl.source("odd", {"preset": "a_lol", "reward_override": "none", "rewards": [odd], "baseline_samples": 2})
    known = [row["prompt_id"] for row, _ in source.order.prompts if not int(row["answer"]) % 4]
    source._prepare()
    assert sorted(source.crediting.table) == sorted(known) == sorted(
        row["prompt_id"] for row, _ in source.order.prompts
    ) and set(source.crediting.table.values()) == {1.0}
    assert "baselines_unknown" in json.dumps(source.stage.warnings)


@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
def test_v_star_is_an_expectation_under_the_reference(rl, tiny, dtype):
    """ASTAR-PO stage 1 samples from ref, also where that is another model than the policy, and in sampling_dtype."""
    from stages.chat import renderer_for
    from stages.decoding.sampler import Sampler

    config = {**PAID, "preset": "astar_po", "baseline_samples": 3, "sampling_dtype": dtype}
    own, other = rl.source("own", config), rl.source("other", config, reference=tiny["other"])
    seeds = [[other.stage.seed_for("baseline", row["row_id"], g) for g in range(3)] for row, _ in other.order.prompts]
    for source, path in ((own, tiny["policy"]), (other, tiny["other"])):
        prompts = source.order.prompts
        drawn = sample_groups(
            Sampler(load_policy(path), renderer_for(path).tokenizer, dtype=getattr(torch, dtype)),
            prompts,
            source.policy.params,
            seeds,
        )
        score(source.rewards, [s for group in drawn for s in group])
        source._prepare()
        for (row, _), group in zip(prompts, drawn):
            r = np.array([s.total for s in group])
            assert source.crediting.table[row["prompt_id"]] == pytest.approx(
                0.5 * np.log(np.mean(np.exp(r / 0.5))), abs=1e-9
            )
    assert own.crediting.table != other.crediting.table
    assert other._reference_engine().name == ("built-in" if dtype == "float32" else "built-in in bfloat16")


# --- stored groups, and groups that were sampled ahead ----------------------------------------------------------------


@pytest.fixture()
def stored(rl):
    return rl(
        "stored", {**PAID, "preset": "dr_grpo", "max_steps": 1, "max_completion_length": 3, "num_generations": 2}
    )[0]["outputs"]["rollouts"]["path"]


@pytest.mark.parametrize(
    "config, says",
    [
        ({"baseline": "greedy"}, "baseline=moving_average"),
        ({"advantage": "vine"}, "advantage=vine"),
        ({"advantage": "win_rate", "opponent": "ema"}, "opponent=self"),
        ({"replay_fraction": 0.25}, "replay_fraction=0"),
        ({"dynamic_sampling": True}, "dynamic_sampling=false"),
        ({"preset": "oreo", "critic_warmup_steps": 1}, "critic_warmup_steps=0"),
        ({"curriculum": "self_paced"}, "curriculum=none"),
        ({"difficulty_band": (0.2, 0.8)}, "prompts that you want"),
        ({"no_resampling_pass_rate": 0.5}, "no_resampling_pass_rate=0.5"),
    ],
)
def test_stored_completions_refuse_settings_about_sampling(rl, stored, config, says):
    rl.source("plain", {**PAID, "preset": "topr"}, stored=stored)
    with pytest.raises(ConfigError, match=f"(?s)input stored.*{says}"):
        rl.source("refused", {**PAID, "preset": "topr", **config}, stored=stored)


def test_stored_completions_of_prompts_without_a_baseline_are_told_at_once(rl, tmp_path, stored):
    source = rl.source("prompts", {**PAID, "preset": "a_lol"}, stored=stored)
    inside = {g.prompt["prompt_id"] for g in source.stored.groups}
    ids = [row["prompt_id"] for row, _ in source.order.prompts]
    assert inside < set(ids)
    table = rl.source(
        "whole", {**PAID, "preset": "a_lol"}, stored=stored, baselines=table_of(tmp_path, [(p, 0.5, None) for p in ids])
    )
    table._prepare()
    assert len(table.stored.groups) == len(inside)
    table.stored.keep(sorted(inside)[:1])
    assert [g.prompt["prompt_id"] for g in table.stored.take(3)] == sorted(inside)[:1] * 3
    with pytest.raises(ValueError, match="belongs to a prompt with a baseline"):
        table.stored.keep(set())


@pytest.mark.parametrize("preset, moves", [("mdpo", True), ("topr", False), ("grpo", False)])
def test_the_iterate_of_a_batch_that_was_sampled_ahead_is_the_policy_that_starts_on_it(rl, preset, moves):
    """MDPO: pi_i is the policy at the start of the round, not the one that sampled an iteration ago; ratios to whoever
    sampled stay with those.
    """
    source = rl.source("ahead", {**PAID, "preset": preset, **({"beta": 0.0} if preset == "grpo" else {})})
    groups = source.groups.sample(source.order.take(2, 0), 0, 0)
    sampled = [s.logps for g in groups for s in g.samples]
    with torch.no_grad():
        for p in source.policy.model.parameters():
            p.mul_(1.1)
    found = source.crediting(groups, 1, 1).old
    apart = max(abs(a - b) for old, mine in zip(found, sampled) for a, b in zip(old, mine))
    assert (apart > 1e-3) == moves
    if moves:
        now = source.crediting.logprobs.of(source.policy.model, source.crediting(groups, 1, 1).items)
        assert max(abs(a - b) for old, mine in zip(found, now) for a, b in zip(old, mine)) < 1e-5


# --- rewards of steps -------------------------------------------------------------------------------------------------

NEVER = {"name": "never", "kind": "python", "source": "def score(prompt, completion, answer):\n    return None"}


def test_an_outcome_that_cannot_be_scored_vetoes_no_step(rl, tiny):
    """GRPO-PROCESS: steps are paid, `rewards` is only watched. The update is that of a run whose outcomes could be
    scored.
    """
    config = {"preset": "grpo_process", "reward_override": "none", "max_steps": 1, "step_separator": "e"}
    result, metrics = rl("never", {**config, "rewards": [NEVER]}, reward_model=tiny["reward"])
    scored, with_outcome = rl("scored", {**config, "rewards": [SPREAD]}, reward_model=tiny["reward"])
    assert metrics[0]["loss"] == with_outcome[0]["loss"] and metrics[0]["grad_norm"] == with_outcome[0]["grad_norm"] > 0
    assert [r["advantages"] for r in rows_of(result)] == [r["advantages"] for r in rows_of(scored)] and any(
        any(r["loss_mask"]) for r in rows_of(result)
    )
    codes = {w["code"] for w in result["warnings"]}
    assert "rewards_watched" in codes and not codes & {"nothing_scored", "unscorable_rewards"}
    steps = [r for row in rows_of(result) for r in row["step_rewards"]]
    assert metrics[0]["reward/step_mean"] == pytest.approx(np.mean(steps)) and metrics[0]["frac_reward_zero_std"] == 0.0


def test_groups_are_judged_by_the_rewards_of_their_steps(rl, tiny):
    """DYN-SAMPLING, dead groups: right and wrong answers of equal steps teach nothing, equal outcomes of different
    steps do.
    """
    source = rl.source(
        "groups", {"preset": "grpo_process", **PAID, "dynamic_sampling": True}, reward_model=tiny["reward"]
    )
    dead, alive = completions(source, [(1.0, "eos"), (0.0, "eos")]), completions(source, [(1.0, "eos"), (1.0, "eos")])
    for group, rewards in ((dead, [[0.5, 0.5], [0.5]]), (alive, [[0.1, 0.9], [0.4]])):
        for sample, steps, right in zip(group.samples, rewards, (True, group is alive)):
            sample.correct, sample.steps = right, ([1, 2][-len(steps) :], steps)
    assert source.groups.no_signal(dead) == "equal_rewards" and source.groups.no_signal(alive) is None
    scored = source.crediting([dead, alive], 0, 0)
    assert (
        scored.metrics["frac_reward_zero_std"] == 0.5
        and not scored.credit.advantages_BT[:2].any()
        and scored.credit.advantages_BT[2:].any()
    )
    assert scored.metrics["reward/step_mean"] == pytest.approx(np.mean([0.5, 0.5, 0.5, 0.1, 0.9, 0.4]))
    for step in range(4):
        source.watch({"step": step, "frac_reward_zero_std": 1.0, "reward/unscorable_fraction": 1.0})
    assert all("frac_reward_zero_std" in row and "reward/unscorable_fraction" not in row for row in source.history)


def test_the_separator_of_a_process_reward_model_is_its_own(rl, tiny, tmp_path, stored):
    shutil.copytree(tiny["reward"], tmp_path / "prm")
    write_card(tmp_path / "prm", RewardCard("prm", options={"separator": "\n"}))
    source = rl.source("steps", {"preset": "grpo_process", **PAID}, reward_model=str(tmp_path / "prm"))
    assert source.steps.separator == "\n" and "step_separator" in json.dumps(source.stage.warnings)
    with pytest.raises(ConfigError, match="no texts"):
        rl.source(
            "texts",
            {"preset": "topr", "advantage": "process", **PAID},
            reward_model=str(tmp_path / "prm"),
            stored=stored,
        )


# --- constants of losses, controls ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "preset, options, says",
    [
        ("offline_is", {"clip_pos": 1.5}, "smallest and the largest weight"),
        ("topr", {"clip_neg": [1.0, 0.5]}, "smallest and the largest weight"),
        ("topr", {"clip_neg": [-1.0, 0.5]}, r"\[0.0, 1.0\]"),
        ("mdpo", {"tau": 0}, "a number > 0"),
        ("copg", {"beta": -1.0}, "a number > 0"),
        ("p3o", {"form": "both"}, "separate, joint"),
        ("p3o", {"form": 1.0}, "separate, joint"),
        ("sppo", {"eta": [1.0, 2.0]}, "a number > 0"),
        ("grpo", {"tau": 1.0}, "has none"),
    ],
)
def test_constants_of_a_loss_are_of_its_type(preset, options, says):
    with pytest.raises(ConfigError, match=says):
        resolve_preset(Config.model_validate(json.loads(json.dumps({"preset": preset, "options": options}))))


def test_intervals_and_forms_reach_the_loss(rl):
    """OFFPOL-IS at ratio 1: weights clipped to .5 halve the loss; P3O's joint form has the same gradient and, behind a
    step, another value.
    """
    config = {"max_steps": 1, "rewards": [SPREAD], "reward_override": "random"}
    plain, half = (
        rl(name, {**config, "preset": "offline_is", "options": options})[1][0]["loss"]
        for name, options in (("plain", {}), ("half", {"clip_pos": [0.0, 0.5]}))
    )
    assert half == pytest.approx(plain / 2, rel=1e-6) and plain != 0
    assert resolve_preset(Config.model_validate({"preset": "topr", "options": {"clip_pos": [0, 1.5]}}))[0].options == {
        "clip_pos": (0.0, 1.5),
        "clip_neg": (0.0, 1.0),
    }
    forms = [
        rl(
            form,
            {
                **config,
                "preset": "p3o",
                "kl_coef": 0.0,
                "max_steps": 2,
                "num_iterations": 2,
                "learning_rate": 3e-6,
                "options": {"form": form},
            },
        )[1]
        for form in ("separate", "joint")
    ]
    assert forms[0][0]["grad_norm"] == pytest.approx(forms[1][0]["grad_norm"], rel=1e-4)
    # unclipped: D (rho1 rho2 - rho2 rho1) = 0, and rho1 rho2 D (h1 - h2)
    assert abs(forms[0][1]["loss"]) < 1e-6 < abs(forms[1][1]["loss"])


def test_a_format_that_is_not_asked_of_a_prompt_pays_nothing(rl):
    source = rl.source(
        "routed",
        {
            "preset": "dr_grpo",
            "reward_override": "format_only",
            "rewards": [{"name": "form", "kind": "format", "domains": ["math"]}],
        },
    )
    here, there = (Sample({}, [1], 0, [2], [0.0], "eos", "x", 3.0, {"form": value}, {}) for value in (1.0, None))
    for sample in (here, there):
        override_reward(source.stage, sample, 0)
    assert here.total == 0.1 and np.isnan(there.total)


def test_sft_members_may_be_as_long_as_the_run_allows(rl, tmp_path):
    from stages.policy.members import Members

    source = rl.source("members", {"preset": "dr_grpo"})
    prompt, path = source.order.prompts[0][0], str(tmp_path / "sft")
    written(
        path,
        "sft",
        "demonstrations/1",
        [
            {
                "messages": [*prompt["prompt"], {"role": "assistant", "content": "b" * 12}],
                "train_turns": [1],
                "kept": True,
            }
        ],
        dataset="d",
    )
    stage = source.stage
    stage.inputs["sft"] = replace(stage.inputs["data"], path=path)
    for schedule, joins in (([], False), ([(0, 6), (1, 40)], True)):
        stage.config = Config(**{**stage.config.model_dump(), "sft_member": "append", "context_schedule": schedule})
        if joins:
            assert len(Members(stage, source.policy.renderer, source.rewards).answers) == 1
        else:
            with pytest.raises(ValueError, match="answers a prompt"):
                Members(stage, source.policy.renderer, source.rewards)


def test_an_sft_answer_is_not_off_policy_where_nothing_has_moved(rl, tmp_path, data):
    """Nobody sampled it, so that how far pi is from whoever did (off_policy_mask_threshold) is measured from the policy
    that started the iteration.
    """
    path = str(tmp_path / "sft")
    written(
        path,
        "sft",
        "demonstrations/1",
        [
            {
                "messages": [*row["prompt"], {"role": "assistant", "content": "bbb"}],
                "train_turns": [1],
                "kept": True,
            }
            for row in open_dataset(data["prompts"]).iter_rows(split="train")
        ],
        dataset="d",
    )
    worst = {"name": "worst", "kind": "python", "source": "def score(completion):\n    return -('bbb' in completion)"}
    result, metrics = rl(
        "sft-mask",
        {
            "preset": "grpo",
            "reward_override": "none",
            "rewards": [worst],
            "sft_member": "append",
            "num_iterations": 2,
            "off_policy_mask_threshold": 0.01,
        },
        sft=path,
    )
    assert any(r["advantages"][0] < 0 and '"sft"' in r["extra_json"] for r in rows_of(result))
    assert metrics[0]["policy/ratio"] == 1.0 and metrics[0]["policy/off_policy_masked"] == 0.0


def test_refilling_that_ends_says_where_rewards_differ_between_answers_that_are_all_wrong(rl):
    graded = {"preset": "dapo", "reward_override": "none", "max_num_gen_batches": 2, "max_steps": 1}
    graded["rewards"] = [{"name": "right", "kind": "verifier"}, SPREAD]
    with pytest.raises(DynamicSamplingExhausted, match="of them all answers.*write filter_groups_metric=reward_std"):
        rl("graded", graded)
    with pytest.raises(DynamicSamplingExhausted, match="zero_advantage=mask$"):
        rl("wrong", {**graded, "rewards": graded["rewards"][:1]})


def test_refilling_without_a_limit_of_rounds_ends_with_the_prompts(rl):
    """DYN-SAMPLING, max_num_gen_batches=0: only with a limit of passes over the prompts, here one in a step."""
    config = {
        "preset": "dapo",
        "reward_override": "none",
        "max_num_gen_batches": 0,
        "max_steps": 1,
        "gen_batch_size": 1,
    }
    source = rl.source("known", config)
    n = len(source.order.prompts)
    with pytest.raises(
        DynamicSamplingExhausted,
        match=rf"0 groups .* after {n} generation batches \({n} groups\): raise num_generations",
    ):
        rl("endless", config)


# --- completions that the engine lost ---------------------------------------------------------------------------------


def test_a_round_after_lost_completions_draws_others(rl):
    """A group that the engine lost counts as drawn: a prompt that comes again in the next round would else be sampled
    with the seeds of this one, and its completions trained on twice.
    """
    source = rl.source("lost-round", {**PAID, "preset": "grpo"})
    (first, second), engine = source.order.prompts[:2], source.policy.engine
    lost = {source.stage.seed_for("rollout", 0, 0, first[0]["row_id"], g) for g in range(8)}
    source.policy.engine = losing(engine, lost)
    rounds = [[first, second], [second, first]]
    kept, dropped, metrics = source.groups.fill(lambda n: rounds.pop(0), 2, 0, 0)
    assert not rounds and metrics["rollout/failed_rows"] == source.stage.config.num_generations
    assert [g.prompt["row_id"] for g in kept] == [second[0]["row_id"]] * 2
    seeds = [s.seed for g in (*kept, *(g for g, _ in dropped)) for s in g.samples]
    assert len(set(seeds)) == len(seeds)
