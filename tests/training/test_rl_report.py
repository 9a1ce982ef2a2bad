"""What an RL run tells: alarms, held-out answers, plots, and the comparison of two runs."""

import json
import struct
from pathlib import Path
from types import SimpleNamespace

import pytest

from stages.evaluation.run_comparison import HELD_OUT_SETTINGS, answers, curves, held_out
from stages.harness import execute
from stages.policy.alarms import ALARMS, alarms, watched
from stages.policy.rl_report import along, best_and_worst
from storage.datasets import open_dataset

SMALL = {
    "max_steps": 4,
    "prompts_per_step": 3,
    "num_generations": 4,
    "max_completion_length": 8,
    "learning_rate": 1e-3,
    "eval_every": 2,
    "eval_prompts": 4,
    "rewards": [
        {"name": "length", "kind": "length", "max_length": 8, "cache_length": 6},
        {"name": "verifier", "kind": "verifier"},
    ],
}


def rows(n=12, **columns):
    """n metric rows; a column is a number, or a function of the step."""
    return [
        {
            "step": k,
            **{name.replace("__", "/"): value(k) if callable(value) else value for name, value in columns.items()},
        }
        for k in range(n)
    ]


WILD = {  # rows that set an alarm off, and rows that must not
    "unscorable_rewards": (rows(reward__unscorable_fraction=0.03), rows(reward__unscorable_fraction=0.01)),
    "reward_collapse": (
        rows(20, reward=lambda k: 0.5 + 0.02 * (k % 3) if k < 17 else 0.1),
        rows(20, reward=lambda k: 0.5 + 0.02 * (k % 3)),
    ),
    "kl_over_target": (rows(kl__sequence_sum=4.0), rows(kl__sequence_sum=2.9)),
    "entropy_collapse": (rows(entropy=lambda k: 2.0 / (k + 1)), rows(entropy=lambda k: 2.0 - 0.1 * k)),
    "entropy_explosion": (rows(entropy=lambda k: 1.0 + k), rows(entropy=lambda k: 1.0 + 0.1 * k)),
    "clip_fraction_high": (
        rows(policy__outside_range=0.4),
        rows(policy__outside_range=lambda k: 0.9 if k == 5 else 0.1),
    ),
    "ratio_off": (rows(policy__ratio=1.2), rows(policy__ratio=1.05)),
    "dead_groups": (rows(frac_reward_zero_std=0.6), rows(frac_reward_zero_std=0.4)),
    "nothing_distilled": (
        rows(self_distillation__reprompt_sample_fraction=0.0),
        rows(self_distillation__reprompt_sample_fraction=0.2),
    ),
    "completions_truncated": (rows(completions__clipped_ratio=0.2), rows(completions__clipped_ratio=0.05)),
    "cut_completions_earn_more": (
        rows(completions__clipped_ratio=0.1, reward__cut_gain=2.0),
        rows(completions__clipped_ratio=0.1, reward__cut_gain=-0.5),
    ),
    "length_growth": (
        rows(completions__mean_length=lambda k: 10.0 + 3 * k, reward=0.5),
        rows(completions__mean_length=lambda k: 10.0 + 3 * k, reward=lambda k: 0.1 * k),
    ),
    "repetition": (
        rows(completions__repetition=lambda k: 0.04 + 0.02 * k),
        rows(completions__repetition=lambda k: 0.001 + 0.001 * k),
    ),
    "special_characters": (
        rows(completions__special_characters=lambda k: 0.1 + 0.05 * k),
        rows(completions__special_characters=lambda k: 0.2 + 0.005 * k),
    ),
    "stock_phrases": (
        rows(completions__stock_phrases=lambda k: 0.02 * k),
        rows(completions__stock_phrases=lambda k: 0.3 + 0.02 * k),
    ),
    "refusals": (rows(completions__refusals=lambda k: 0.01 * k), rows(completions__refusals=lambda k: 0.004 * k)),
    "rubric_low_confidence": (rows(rubric__flagged_items=1.0), rows(rubric__flagged_items=lambda k: float(k == 5))),
    "format_invalid": (
        rows(24, completions__format_valid=0.8),
        rows(24, completions__format_valid=lambda k: min(0.95, 0.1 * k)),
    ),
    "harmful_critic": (rows(critic__explained_variance=-0.2), rows(critic__explained_variance=0.1)),
    "td_error_stays": (
        rows(24, critic__td_error=0.3, critic__explained_variance=0.1),
        rows(24, critic__td_error=lambda k: 0.3 - 0.005 * k, critic__explained_variance=0.1),
    ),
    "reward_model_drift": (
        rows(24, reward__mine__pair_accuracy=lambda k: 0.8 - 0.005 * k),
        rows(24, reward__mine__pair_accuracy=lambda k: 0.8 - 0.001 * k),
    ),
    "tiers_disagree": (
        rows(reward__tier_agreement__rule_judge=0.6),
        rows(reward__tier_agreement__rule_judge=lambda k: 0.2 if k == 5 else 0.8),
    ),
    "over_optimisation": (
        rows(
            reward=lambda k: 0.1 * k,
            validation__reward=lambda k: 1.0 - 0.2 * abs(k - 5),
            kl__sequence_sum=lambda k: 0.3 * k,
        ),
        rows(
            reward=lambda k: 0.1 * k,
            validation__reward=lambda k: 0.1 * k,
            kl__sequence_sum=lambda k: 0.3 * k,
        ),
    ),
    "engine_mismatch": (
        rows(sampling__sampling_logp_difference__mean=0.08),
        rows(sampling__sampling_logp_difference__mean=0.01),
    ),
}


@pytest.mark.parametrize("name", ALARMS)
def test_alarms_go_off_when_they_should_and_say_what_to_do(name):
    loud, quiet = WILD[name]
    assert name in alarms(loud, target_kl=2.0) and name not in alarms(quiet, target_kl=2.0)
    assert name not in alarms(loud[:2], target_kl=2.0)  # two points are no trend
    assert all(watched(metric) for metric in loud[0])
    assert any(
        f"{verb} " in ALARMS[name].text
        for verb in ("Use", "Raise", "Set", "Restore", "Clip", "Lower", "give", "lower", "raise", "Stop")
    )


def test_a_critic_or_a_reward_model_that_only_seems_worse_is_no_alarm():
    # a better policy pays more, and the critic explains it
    learned = rows(24, critic__td_error=lambda k: 0.1 + 0.01 * k, critic__explained_variance=0.7)
    # batches of a few pairs
    noisy = rows(24, reward__mine__pair_accuracy=lambda k: 0.5 + 0.4 * (k % 2) - 0.02 * (k > 18))
    assert not alarms(learned) and not alarms(noisy)
    fallen = rows(24, reward__other__pair_accuracy=0.8, reward__mine__pair_accuracy=lambda k: 0.8 if k < 12 else 0.7)
    assert list(alarms(fallen)) == ["reward_model_drift"]


def test_agreement_of_the_tiers_of_a_cascade():
    """reward.cascade, by hand: of completions that the earlier tier decided and a later one scored too, per prompt."""
    from stages.generation import Sample
    from stages.reward.components import RewardComponent
    from stages.rollouts.metrics import tier_agreement

    tiers = [RewardComponent(name="j", kind="judge", tier="judge", audit_fraction=1.0)]
    tiers.append(RewardComponent(name="v", kind="verifier", tier="rule"))
    seen = [
        Sample({}, [1], 0, [2], [0.0], "eos", "x", 0.0, {"v": rule, "j": judge}, {}, tier=tier)
        for tier, rule, judge in (
            ("rule", 1.0, 9.0),
            ("rule", 0.0, 2.0),  # against the first: alike
            ("rule", 0.0, 5.0),  # alike; the rule sees no difference to the second, which contradicts nothing
            ("rule", 0.0, None),  # not audited
            ("judge", None, 7.0),  # nobody decided before
            ("rule", 1.0, 3.0),
            ("rule", 0.0, 4.0),  # opposite
            ("rule", 1.0, 3.0),  # the same of both as the sixth; opposite to the seventh
        )
    ]
    groups = [0, 0, 0, 0, 0, 1, 1, 1]
    assert tier_agreement(seen, groups, tiers) == {"reward/tier_agreement/rule_judge": pytest.approx(2 / 4)}
    assert tier_agreement(seen[3:5], groups[3:5], tiers) == {} == tier_agreement(seen, range(8), tiers)


@pytest.mark.parametrize("pairs,judge,warned", [(20, 0.0, True), (19, 0.0, False), (20, 1.0, False)])
def test_candidates_of_a_cascade_whose_tiers_disagree(pairs, judge, warned):
    """reward.cascade: rejection says it of the candidates it has scored, from what is stored of them."""
    from stages.candidates.report import tier_agreement
    from stages.reward.components import RewardComponent

    def row(k, right):
        scores = [{"source": "v", "value": float(right)}, {"source": "j", "value": judge if right else 0.5}]
        return {"prompt_idx": k, "scores": scores, "extra_json": json.dumps({"tier": "rule"})}

    tiers = [
        RewardComponent(name="v", kind="verifier", tier="rule"),
        RewardComponent(name="j", kind="judge", tier="judge", audit_fraction=0.5),
    ]
    said = []
    stage = SimpleNamespace(config=SimpleNamespace(rewards=tiers), warn=lambda code, text: said.append(code))
    found = tier_agreement(stage, [row(k, right) for k in range(pairs) for right in (True, False)])
    assert found == {"reward/tier_agreement/rule_judge": judge} and said == ["tiers_disagree"] * warned
    stage.config.rewards = [tiers[0], tiers[1].model_copy(update={"audit_fraction": 0.0})]
    assert tier_agreement(stage, [row(0, True)]) == {}


def test_accuracy_of_reward_models_on_the_policys_answers():
    from stages.generation import Sample
    from stages.reward.components import RewardComponent
    from stages.rollouts.metrics import scorer_accuracy

    model = RewardComponent(name="proxy", kind="model")
    gold = RewardComponent(name="gold", kind="model", input="gold", weight=0.0)

    def answers(*of):
        return [
            Sample({}, [1], 0, [2], [0.0], finish, "x", 0.0, {"proxy": proxy, "gold": judged}, {}, right)
            for right, proxy, judged, finish in of
        ]

    group, seen = (
        [0, 0, 0, 1, 1, 1],
        answers(
            (True, 2.0, 1.0, "eos"),
            (False, 1.0, 3.0, "eos"),
            (False, 2.0, 0.0, "eos"),
            (True, 0.0, 0.0, "eos"),
            (False, 5.0, 9.0, "length"),
            (True, 9.0, None, "eos"),
        ),
    )
    # right against wrong inside a prompt, a tie counts half, what was cut is not shown to a model
    assert scorer_accuracy(seen, group, [model, gold]) == {
        "reward/proxy/pair_accuracy": 0.75,
        "reward/gold/pair_accuracy": 0.5,
    }
    for one in seen:
        one.correct = None
    # by the gold model: 3.0 > 1.0 > 0.0 in the first prompt
    assert scorer_accuracy(seen, group, [model, gold]) == {
        "reward/proxy/pair_accuracy": pytest.approx((0.0 + 0.5 + 0.0) / 3)
    }
    assert scorer_accuracy(seen, group, [model]) == {} == scorer_accuracy(seen[:1], group[:1], [model, gold])
    assert (
        scorer_accuracy(
            answers((True, 1.0, None, "eos"), (False, 0.0, None, "eos")), [0, 0], [RewardComponent(kind="verifier")]
        )
        == {}
    )


def test_alarms_can_end_the_stage(tiny, data, spec):
    from typing import get_args

    from stages.policy.settings import AlarmName
    from stages.training import TrainingError

    assert set(get_args(AlarmName)) == set(ALARMS)
    with pytest.raises(TrainingError, match="completions_truncated: .* the same settings without it"):
        execute(
            spec(
                "rl",
                {**SMALL, "stop_on": ["completions_truncated"]},
                {"model": tiny["policy"], "data": data["prompts"]},
                "stopped",
            ),
            lambda event: None,
        )


def test_a_proxy_that_grows_while_held_out_answers_get_worse_is_over_optimised():
    hacked = rows(
        reward=lambda k: 0.1 * k,
        validation__reward=lambda k: 0.1 * k,
        validation__completions__correct_fraction=lambda k: 0.5 - 0.03 * k,
        kl__sequence_sum=1.0,
    )
    assert "over_optimisation" in alarms(hacked) and "over_optimisation" not in alarms(hacked[:4])


def test_a_small_effective_sample_size_is_an_alarm():
    assert "ratio_off" in alarms(rows(policy__ratio=1.0, policy__ess_fraction=0.2)) and "ratio_off" not in alarms(
        rows(policy__ratio=1.0, policy__ess_fraction=0.5)
    )


def test_a_rate_that_starts_at_nothing_may_double_too():
    for name in ("repetition", "special_characters", "stock_phrases", "refusals"):
        assert name in alarms([{"step": k, f"completions/{name}": 0.3 * (k > 5)} for k in range(12)])
        assert name not in alarms([{"step": k, f"completions/{name}": 0.04 * (k > 5)} for k in range(12)])
    short = rows(9, critic__explained_variance=-0.2)
    assert "harmful_critic" not in alarms(short), "a critic that has begun is no harm yet"


def test_no_alarm_without_numbers():
    assert alarms([]) == {} and alarms(rows(20)) == {} and alarms(rows(20, entropy=float("nan"))) == {}
    assert alarms(rows(kl__sequence_sum=4.0)) == {}  # without a target there is no budget


def test_tables_and_paths():
    records = [
        {
            "step": s,
            "item_id": str(i),
            "reward": None if i == 4 else float(i * s),
            "prompt": "p",
            "output": f"{i}",
            "tokens": 1,
            "finish": "eos",
        }
        for s in (1, 2)
        for i in range(5)
    ]
    table = best_and_worst(records, count=3)
    assert [(r["step"], r["which"], r["answer"]) for r in table] == [
        (1, "best", "3"),
        (1, "best", "2"),
        (1, "worst", "0"),
        (1, "worst", "1"),
        (2, "best", "3"),
        (2, "best", "2"),
        (2, "worst", "0"),
        (2, "worst", "1"),
    ]
    logged = [
        {"step": 1, "x": 1.0, "y": 5.0},
        {"step": 2, "y": 6.0},
        {"step": 3, "x": 2.0},
        {"step": 4, "x": 3.0, "y": 7.0},
    ]
    assert along(logged, "x", "y") == ([1.0, 2.5], [5.0, 7.0], [1, 4]) and along(logged, "x", "z") == ([], [], [])


def png_size(file) -> tuple[int, int]:
    content = Path(file).read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", content[16:24])


def test_an_rl_run_tells_everything(tiny, data, spec):
    events = []
    made = spec("rl", {**SMALL, "monitor_kl": True}, {"model": tiny["policy"], "data": data["prompts"]}, "told")
    result = execute(made, lambda event: events.append(json.loads(event) if isinstance(event, str) else event))
    found = {r["name"]: r for r in result["reports"]}
    for name in (
        "curve-reward",
        "curve-reward-components",
        "curve-kl",
        "curve-entropy",
        "curve-clip",
        "curve-length",
        "curve-truncation",
        "curve-groups",
        "reward-against-kl",
        "proxy-against-held-out",
        "curve-held-out",
    ):
        assert min(png_size(found[name]["png"])) > 300, name
    kept = list(open_dataset(result["outputs"]["validation"]["path"]).iter_rows())
    extra = [json.loads(r["extra_json"]) for r in kept]
    assert [sum(e["step"] == s for e in extra) for s in (0, 2, 4)] == [4, 4, 4] and len(
        {r["item_id"] for r in kept}
    ) == 4
    table = json.loads(Path(found["validation-samples"]["table"]).read_text())
    assert {r["step"] for r in table} == {0, 2, 4} and {r["which"] for r in table} == {"best", "worst"}
    samples = json.loads(Path(found["rollout-samples"]["table"]).read_text())
    rollouts = list(open_dataset(result["outputs"]["rollouts"]["path"]).iter_rows())
    assert {r["step"] for r in samples} == {0, max(r["iteration"] for r in rollouts)} and {
        r["which"] for r in samples
    } == {"best", "worst"}
    for step in {r["step"] for r in samples}:
        assert max(r["reward"] for r in samples if r["step"] == step) == max(
            r["reward"] for r in rollouts if r["iteration"] == step
        )
    assert all(r["prompt"] and isinstance(r["answer"], str) for r in samples)
    page = Path(found["summary"]["markdown"]).read_text()
    # a policy that knows nothing never stops
    assert "Best and worst held-out samples" in page and "completions_truncated" in page
    live = [i for i, e in enumerate(events) if e.get("event") == "warning" and e.get("code") == "completions_truncated"]
    # said while it ran, once
    assert len(live) == 1 and any(e.get("event") == "metric" and e.get("step") == 4 for e in events[live[0] :])
    metrics = [json.loads(line) for line in Path(made["workdir"], "metrics.jsonl").read_text().splitlines()]
    first = next(m["metrics"] for m in metrics if m["step"] == 1)
    assert first["policy/ess_fraction"] == pytest.approx(1.0, abs=1e-5)
    assert first["kl/sequence_sum"] == pytest.approx(0.0, abs=1e-5)
    assert all(r["logp_ref"] is not None for r in open_dataset(result["outputs"]["rollouts"]["path"]).iter_rows())


def test_comparison_of_two_runs_pairs_prompts_and_refuses_other_protocols():
    def records(shift):
        return [
            {
                "step": s,
                "mode": "sample",
                "item_id": f"i{i}",
                "prompt_id": f"p{i}",
                "reward": i % 3 + shift * s,
                "correct": None,
                "prompt": f"q{i}",
                "output": f"{shift} {i}",
            }
            for s in (0, 10)
            for i in range(12)
        ]

    from stages.rl import Config

    assert set(HELD_OUT_SETTINGS) <= set(Config.model_fields)
    config = {name: 1 for name in HELD_OUT_SETTINGS}
    table, note = held_out(records(0.0), records(0.05), (config, config))
    assert note is None and table[0]["metric"] == "held-out reward" and table[0]["prompts"] == 12
    # pairing removes the prompts' spread
    assert [table[0][name] for name in ("difference", "low", "high")] == pytest.approx([0.5] * 3)
    # a template, a tool or a sign that may not be written is another question, or another way to answer it
    for name in ("temperature", "prompt_template", "chat_template_digest", "environment", "bad_words"):
        note = held_out(records(0.0), records(0.1), (config, {**config, name: 0.5}))[1]
        assert note.endswith(f"different {name}")
    assert (
        held_out(records(0.0), [{**r, "item_id": r["item_id"] + "x"} for r in records(0.0)], (config, config))[1]
        == "the runs have no validation prompt in common"
    )
    assert answers(records(0.0), records(0.05), 2)[0] == {
        "prompt": "q0",
        "a": "0.0 0",
        "reward_a": 0.0,
        "b": "0.05 0",
        "reward_b": 0.5,
    }
    assert curves({"a": rows(reward=1.0), "b": rows(entropy=1.0)}) is None
    assert curves({"a": rows(reward=1.0, reward__x=2.0), "b": rows(3, reward=0.5, reward__x=1.0)})[:4] == b"\x89PNG"


def test_posttrain_compare_of_two_rl_stages(tiny, data, tmp_path, monkeypatch):
    """Through the real stage processes, records and command line."""
    from typer.testing import CliRunner

    from flows.cli import app
    from tasks.run import run_stage

    for name, value in (
        ("POSTTRAIN_HOME", str(tmp_path / "home")),
        ("POSTTRAIN_TRACKING", "off"),
        ("CUDA_VISIBLE_DEVICES", ""),
    ):
        monkeypatch.setenv(name, value)
    runs = [
        run_stage(
            "rl", {"model": tiny["policy"], "data": data["prompts"]}, {**SMALL, "eval_every": 0, "learning_rate": lr}
        )
        for lr in (1e-3, 5e-2)
    ]
    done = CliRunner().invoke(app, ["compare", runs[0].key, runs[1].key, "--out", str(tmp_path / "figures"), "--json"])
    assert done.exit_code == 0, done.output
    value = json.loads(done.output.splitlines()[-1])
    assert {row["metric"] for row in value["held_out"]} == {"held-out reward", "held-out accuracy"} and value[
        "held_out"
    ][0]["prompts"] == 4
    assert (
        value["config"] == ["rl.learning_rate: 0.001 -> 0.05"] and len(value["answers"]) == 4 and value["notes"] == []
    )
    assert min(png_size(value["figures"][0])) > 300 and value["figures"][0].startswith(str(tmp_path / "figures"))
    plain = CliRunner().invoke(app, ["compare", runs[0].key, runs[1].key])
    assert plain.exit_code == 0 and "held-out reward" in plain.output and "curves: " in plain.output
