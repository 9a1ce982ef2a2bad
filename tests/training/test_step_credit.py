"""Steps of a process reward model as token rewards: forms of credit, where they land, what each estimator makes of
them, who refuses them.
"""

import json
from pathlib import Path

import numpy as np
import pytest

from stages.chat import renderer_for
from stages.harness import execute
from stages.reward.process_rewards import merged, step_credits, step_ends
from stages.reward.components import RewardComponent
from stages.reward.rewards import build_rewards
from stages.reward_models.reward_heads import RewardCard, new_reward_model, save_reward_model
from stages.reward_models.reward_scorers import Response, load_scorer
from stages.rl import Config, resolve_preset
from stages.spec import ConfigError
from storage.datasets import open_dataset

SEPARATOR = "e"


@pytest.fixture(scope="module")
def prm(tiny, tmp_path_factory):
    """A process reward model that knows nothing, and whose opinions differ a lot."""
    path = str(tmp_path_factory.mktemp("prm") / "prm")
    model = new_reward_model(tiny["policy"], seed=7, outputs=2)
    model.score.weight.data *= 4
    save_reward_model(
        model,
        renderer_for(tiny["policy"]).tokenizer,
        path,
        RewardCard(objective="prm", options={"separator": SEPARATOR, "aggregation": "prod", "classes": 2}),
    )
    return path


@pytest.fixture()
def rl(tiny, data, spec, prm):
    def go(name, config, **inputs):
        tokenizer = renderer_for(tiny["policy"]).tokenizer
        # several steps, some of them finished
        bias = {tokenizer.convert_tokens_to_ids(SEPARATOR): 4.0, tokenizer.eos_token_id: 2.0}
        made = spec(
            "rl",
            {
                "max_steps": 1,
                "prompts_per_step": 4,
                "num_generations": 4,
                "max_completion_length": 14,
                "learning_rate": 1e-3,
                "logit_bias": bias,
                "rewards": [
                    {"name": "steps", "kind": "model", "step_credit": "each", "weight": 0.5},
                    {"name": "short", "kind": "length", "max_length": 14, "cache_length": 12},
                ],
                **config,
            },
            {"model": tiny["policy"], "data": data["prompts"], "reward_model": prm},
            name,
        )
        for key, path in inputs.items():
            made["inputs"][key] = {"kind": "dataset", "path": path, "ref": key, "digest": f"digest-{key}"}
        result = execute(made, lambda event: None)
        return (
            list(open_dataset(result["outputs"]["rollouts"]["path"]).iter_rows()),
            [json.loads(line)["metrics"] for line in Path(made["workdir"], "metrics.jsonl").read_text().splitlines()],
            result,
        )

    return go


def test_every_form_adds_up_to_a_score_of_the_solution():
    p = [0.9, 0.2, 0.5, 0.2]
    made = {form: step_credits(p, form) for form in ("each", "mean", "difference", "min", "log")}
    assert {form: sum(v) for form, v in made.items()} == pytest.approx(
        {"each": 1.8, "mean": 0.45, "difference": 0.2, "min": 0.2, "log": np.log(0.9 * 0.2 * 0.5 * 0.2)}
    )
    # the first of two lowest
    assert (
        made["each"] == p
        and made["difference"] == pytest.approx([0.9, -0.7, 0.3, -0.3])
        and made["min"] == [0.0, 0.2, 0.0, 0.0]
    )
    assert step_credits([0.0, 1.0], "log") == pytest.approx([np.log(1e-6), 0.0]) and step_credits(
        [0.0, 1.0], "log", clip=2.0
    ) == pytest.approx([-2.0, 0.0])
    assert step_credits([], "min") == [] and step_credits([0.3], "difference") == [0.3]
    with pytest.raises(ValueError, match="write each, mean"):
        step_credits(p, "last")
    assert merged({"a": [(1, 1.0), (3, 0.5)], "b": [(1, 2.0)]}, {"a": 2.0, "b": -1.0}, 6) == (
        [1, 3, 5],
        [0.0, 1.0, 0.0],
    ) and merged({}, {}, 0) == ([], [])


def by_hand(tiny, prm, row, prompt, form="each", cut_reward=-1.0):
    """(token rewards of the weighted steps, their sum with what a cut end earns) of a stored completion, from the
    model's own probabilities.
    """
    tokenizer = renderer_for(tiny["policy"]).tokenizer
    pieces = [tokenizer.decode([t], skip_special_tokens=True) for t in row["completion_ids"]]
    text, n = "".join(pieces), row["length"]
    assert "�" in text or text == tokenizer.decode(row["completion_ids"], skip_special_tokens=True)
    if not row["terminated"]:
        text = text[: text.rindex(SEPARATOR) + 1] if SEPARATOR in text else ""
    steps = [s for s in text.split(SEPARATOR) if s.strip()]
    out = np.zeros(n)
    if not steps:
        return out, cut_reward if not row["terminated"] else -1.0
    whole = tokenizer.decode(row["completion_ids"], skip_special_tokens=True)
    whole = whole if row["terminated"] else whole[: whole.rindex(SEPARATOR) + 1]
    p = load_scorer(prm).step_probabilities([Response(prompt, [{"role": "assistant", "content": whole}])])[0]
    ends = [k for k in range(n) if SEPARATOR in pieces[k] and "".join(pieces[: k + 1]).split(SEPARATOR)[-2].strip()]
    ends = (ends + [n - 1])[: len(p)]
    if row["terminated"]:
        ends[-1] = n - 1
    credits = step_credits(p, form)
    for end, credit in zip(ends, credits):
        out[end] += 0.5 * credit
    return out, sum(credits) + (0.0 if row["terminated"] else cut_reward)


def groups(rows):
    found = {}
    for r in rows:
        found.setdefault(r["prompt_id"], []).append(r)
    return found.values()


def returns(r):
    return np.cumsum(np.array(r["token_rewards"])[::-1])[::-1]


@pytest.mark.parametrize(
    "preset, config",
    [
        ("ppo", {}),
        ("a2c", {"critic_target": "mc_return"}),
        ("reinforce_pp", {}),
        ("rloo", {}),
        ("agent", {}),
        ("reinforce", {"advantage": "reward_to_go"}),
        ("ppo", {"truncation_policy": "score"}),
    ],
)
def test_steps_are_paid_at_their_ends(tiny, prm, data, rl, preset, config):
    """Token rewards = credits at step ends + the outcome at the end, computed apart from the model's probabilities;
    advantages are each estimator's, from those.
    """
    rows, metrics, result = rl(f"{preset}-{len(config)}", {"preset": preset, "kl_coef": 0.0, **config})
    prompts = {r["prompt_id"]: r["prompt"] for r in open_dataset(data["prompts"]).iter_rows()}
    several = 0
    bootstrap = (
        resolve_preset(
            Config(preset=preset, rewards=[{"kind": "model", "step_credit": "each"}], kl_coef=0.0, **config)
        )[0].truncation_policy
        == "bootstrap"
    )
    for r in rows:
        steps, value = by_hand(tiny, prm, r, prompts[r["prompt_id"]])
        parts = {c["name"]: c["value"] for c in r["reward_components"]}
        assert parts["steps"] == pytest.approx(value, abs=1e-5)
        expected = steps.copy()
        # a bootstrapped completion keeps what its steps earned, and its end is worth its value
        if r["terminated"] or not bootstrap:
            expected[-1] += 0.5 * value + parts["short"] - steps.sum()
        assert r["token_rewards"] == pytest.approx(expected, abs=1e-5) and r["reward"] == pytest.approx(
            expected.sum(), abs=1e-5
        )
        assert (
            sum(r["step_rewards"]) == pytest.approx(steps.sum(), abs=1e-5) and json.loads(r["extra_json"])["steps_paid"]
        )
        assert np.flatnonzero(steps).tolist() == [e for e, v in zip(r["step_ends"], r["step_rewards"]) if v]
        several += (np.abs(steps) > 0).sum() > 1
    assert several >= 4 and {True} < {r["terminated"] for r in rows} | {True} and any(not r["terminated"] for r in rows)
    if preset == "reinforce_pp":
        flat = np.concatenate([returns(r) for r in rows])
        assert all(
            np.allclose(r["advantages"], (returns(r) - flat.mean()) / (flat.std() + 1e-8), atol=1e-4) for r in rows
        )
    if preset == "reinforce":
        mean = np.mean([r["reward"] for r in rows])
        assert all(np.allclose(r["advantages"], returns(r) - mean, atol=1e-4) for r in rows)
    if preset in ("rloo", "agent"):
        for group in groups(rows):
            starts = [[0, *[e + 1 for e in r["step_ends"][:-1]]] for r in group]
            by_step = [[returns(r)[s] for s in at] for r, at in zip(group, starts)]
            for i, r in enumerate(group):
                for k, (start, end) in enumerate(zip(starts[i], r["step_ends"])):
                    here = [b[k] for j, b in enumerate(by_step) if len(b) > k and (j != i or preset == "agent")]
                    base = (
                        np.mean(here)
                        if len(here) > (preset == "agent")
                        else np.mean([b[0] for j, b in enumerate(by_step) if j != i or preset == "agent"])
                    )
                    assert np.allclose(r["advantages"][start : end + 1], by_step[i][k] - base, atol=1e-4)
    if preset == "ppo":
        raw = []
        for r in rows:
            running, after, out = 0.0, r["bootstrap_value"], np.zeros(r["length"])
            for t in reversed(range(r["length"])):
                running = r["token_rewards"][t] + after - r["values"][t] + 0.95 * running
                out[t], after = running, r["values"][t]
            raw.append(out)
        flat = np.concatenate(raw)
        assert all(
            np.allclose(r["advantages"], (a - flat.mean()) / (flat.std() + 1e-8), atol=1e-3) for r, a in zip(rows, raw)
        )
    assert (
        metrics[0]["reward/steps/steps"] > 1
        and 0 < metrics[0]["reward/steps/step_mean"] < 1
        and metrics[0]["grad_norm"] > 0
    )


def test_the_kl_of_the_reward_is_paid_beside_the_steps(rl):
    rows, _, _ = rl("kl", {"preset": "ppo", "kl_coef": 0.3, "truncation_policy": "score"})
    for r in rows:
        kl = np.subtract(r["logp_old"], r["logp_ref"])
        paid = np.zeros(r["length"])
        paid[r["step_ends"]] = r["step_rewards"]
        paid[-1] += r["reward"] - sum(r["step_rewards"])
        assert r["token_rewards"] == pytest.approx(paid - 0.3 * kl, abs=1e-5) and r["shaped_reward"] == pytest.approx(
            r["reward"] - 0.3 * kl.sum(), abs=1e-4
        )


def test_stored_steps_are_paid_again(rl):
    rows, _, result = rl(
        "first",
        {
            "preset": "rloo",
            "kl_coef": 0.0,
            "rewards": [{"name": "steps", "kind": "model", "step_credit": "difference"}],
        },
    )
    config = {
        "preset": "oreo",
        "kl_reward_estimator": "k1",
        "critic_learning_rate": 1e-3,
        "logit_bias": {},
        "rewards": [{"name": "steps", "kind": "model", "step_credit": "difference"}],
    }
    again, _, _ = rl("again", config, stored=result["outputs"]["rollouts"]["path"])
    key = lambda r: tuple(r["completion_ids"])
    first = {key(r): r for r in rows}
    assert len(again) == len(rows) and all(
        r["token_rewards"] == pytest.approx(first[key(r)]["token_rewards"]) for r in again
    )


@pytest.mark.parametrize("preset", ["dr_grpo", "rloo"])
def test_an_unpaid_process_model_is_watched_anywhere(rl, preset):
    """Of weight 0, or before its from_step: its values are stored, and every token is credited as without it."""
    for k, unpaid in enumerate([{"weight": 0.0}, {"from_step": 5}][: 1 + (preset == "rloo")]):
        rows, metrics, _ = rl(
            f"watched-{k}",
            {
                "preset": preset,
                "rewards": [
                    {"name": "steps", "kind": "model", "step_credit": "min", **unpaid},
                    {"name": "short", "kind": "length", "max_length": 14, "cache_length": 12},
                ],
            },
        )
        assert "reward/steps" in metrics[0] and all(
            r["step_rewards"] is None and len(set(r["advantages"])) < 2 for r in rows
        )


@pytest.mark.parametrize(
    "config, says",
    [
        ({"preset": "grpo"}, "advantage=turn_returns"),
        ({"preset": "reinforce"}, "advantage=reward_to_go"),
        ({"preset": "ppo_outcome"}, "preset=ppo"),
        ({"preset": "vineppo"}, "preset=ppo"),
        ({"preset": "grpo_process"}, "input reward_model by itself"),
        ({"preset": "topr", "advantage": "reward_to_go"}, "preset=ppo, reinforce_pp or rloo"),
        ({"preset": "p3o"}, "preset=ppo"),
        ({"preset": "ppo", "critic_target": "terminal"}, "critic_target=lambda_return"),
        ({"preset": "ppo", "reward_clip": 1.0}, "write clip in the component"),
        ({"preset": "ppo", "environment": "tools"}, "leave one of them out"),
        ({"preset": "agent", "rewards": [{"kind": "verifier"}]}, "step_credit: each"),
    ],
)
def test_estimators_that_cannot_use_steps_refuse_them(config, says):
    with pytest.raises(ValueError, match=says):
        resolve_preset(Config(**{"rewards": [{"kind": "model", "step_credit": "each"}], **config}))


@pytest.mark.parametrize(
    "component, says",
    [
        ({"kind": "verifier", "step_credit": "each"}, "step_credit is for kind model"),
        ({"kind": "model", "step_credit": "each", "squash": "sigmoid"}, "leave squash out"),
        ({"kind": "model", "step_credit": "min", "view": "answer_only"}, "leave view out"),
    ],
)
def test_settings_of_a_component_that_do_not_go_together(component, says):
    with pytest.raises(ValueError, match=says):
        RewardComponent(**component)


def test_a_reward_model_without_steps_is_refused(tiny):
    with pytest.raises(ValueError, match="objective=prm trained"):
        build_rewards(
            [RewardComponent(kind="model", step_credit="each")],
            {"reward_model": tiny["reward"]},
            renderer=renderer_for(tiny["policy"]),
        )


def test_gamma_is_read_where_steps_are():
    assert (
        resolve_preset(Config(preset="rloo", gamma=0.9, rewards=[{"kind": "model", "step_credit": "each"}]))[0].gamma
        == 0.9
    )
    with pytest.raises(ValueError, match="gamma"):
        resolve_preset(Config(preset="rloo", gamma=0.9))


def test_step_ends_by_hand():
    assert step_ends(["a", "b\n", "\nc", "d", "\n\n", "e"], "\n\n") == [2, 4, 5]


def test_bad_paths_say_so(rl):
    with pytest.raises(ConfigError, match="pays steps"):
        rl("refused", {"preset": "grpo"})
