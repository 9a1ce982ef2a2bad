"""The promotion decision: evidence, gates, protocols (test_promotion_needs_evidence)."""

import numpy as np
import pytest

from stages.evaluation.protocol import ProtocolError
from stages.evaluation.scores import all_metrics
from stages.promote import Config, Evaluation, decide
from stages.spec import ConfigError
from tests.evaluation.test_metrics import record

PROTOCOL = {"prompts": "abc", "temperature": 1.0}


def evaluation(name, rate, seed=0, n=150, model="m", protocol=PROTOCOL, scorer="rm", **fields):
    draws = np.random.default_rng(seed).random((n, 2))
    rows = [
        record(i, k, bool(draws[i, k] < rate), reward=float(draws[i, k] < rate), **fields)
        for i in range(n)
        for k in range(2)
    ]
    return Evaluation(
        name,
        rows,
        all_metrics(rows, 0),
        {"protocol": protocol, "model": f"{model}-{name}", "scorers": {"reward_model": scorer}},
    )


def test_a_clear_gain_is_promoted_with_its_evidence():
    decision = decide(Config(), evaluation("candidate", 0.7), champion=evaluation("champion", 0.5))
    assert decision["promote"] is True
    row = decision["evidence"][0]
    assert row["check"] == "improvement over champion" and row["low"] > 0 and row["n"] == 150
    assert row["candidate"] > row["compared_to"] and "above 0" in decision["reasons"][0]


def test_noise_is_not_a_gain():
    decision = decide(Config(), evaluation("candidate", 0.55, seed=1), champion=evaluation("champion", 0.55, seed=2))
    assert decision["promote"] is False and "not clearly above" in decision["reasons"][0]


def test_min_improvement_must_be_cleared_by_the_whole_interval():
    candidate, champion = evaluation("candidate", 0.7), evaluation("champion", 0.5)
    assert decide(Config(min_improvement=0.05), candidate, champion=champion)["promote"]
    assert not decide(Config(min_improvement=0.19), candidate, champion=champion)["promote"]


def test_few_prompts_never_promote():
    decision = decide(Config(), evaluation("candidate", 1.0, n=20), champion=evaluation("champion", 0.0, n=20))
    assert not decision["promote"] and "min_prompts=30" in decision["reasons"][0]


def test_gates_and_non_regression_can_veto():
    candidate, champion = evaluation("candidate", 0.8, tokens=30), evaluation("champion", 0.5, tokens=10)
    longer = Config(non_regression=[{"metric": "length_mean", "tolerance": 5}])
    decision = decide(longer, candidate, champion=champion)
    assert not decision["promote"] and "reaches beyond the tolerance" in decision["reasons"][0]
    assert decide(Config(non_regression=[{"metric": "length_mean", "tolerance": 20}]), candidate, champion=champion)[
        "promote"
    ]
    assert not decide(Config(gates=[{"metric": "accuracy", "min": 0.9}]), candidate, champion=champion)["promote"]
    assert not decide(
        Config(gates=[{"metric": "accuracy", "min": 0.79, "use_interval": True}]), candidate, champion=champion
    )["promote"]


def test_a_metric_where_less_is_better_is_tested_downwards():
    shorter, longer = evaluation("candidate", 0.5, tokens=10), evaluation("champion", 0.5, tokens=30)
    assert decide(Config(metric="length_mean"), shorter, champion=longer)["promote"]
    assert not decide(
        Config(metric="length_mean"),
        Evaluation("candidate", longer.records, longer.metrics, longer.meta),
        champion=shorter,
    )["promote"]


def test_first_model_is_judged_by_gates_and_baseline():
    candidate = evaluation("candidate", 0.7)
    assert decide(Config(gates=[{"metric": "accuracy", "min": 0.5}]), candidate)["promote"]
    assert not decide(Config(gates=[{"metric": "accuracy", "min": 0.95}]), candidate)["promote"]
    assert decide(Config(), candidate, baseline=evaluation("baseline", 0.2))["promote"]
    with pytest.raises(ConfigError, match="nothing is promoted without evidence"):
        decide(Config(), candidate)


def test_the_champion_does_not_replace_itself():
    champion = evaluation("champion", 0.5)
    twin = Evaluation("candidate", champion.records, champion.metrics, champion.meta)
    decision = decide(Config(), twin, champion=champion)
    assert not decision["promote"] and "byte for byte" in decision["reasons"][0]


def test_different_protocols_and_scorers_are_refused():
    candidate = evaluation("candidate", 0.7)
    with pytest.raises(ProtocolError, match="run the evaluate stage again"):
        decide(Config(), candidate, champion=evaluation("champion", 0.5, protocol={**PROTOCOL, "temperature": 0.7}))
    with pytest.raises(ProtocolError, match="different inputs reward_model"):
        decide(Config(metric="reward"), candidate, champion=evaluation("champion", 0.5, scorer="another"))


GRADERS = [
    {"name": "gold", "kind": "model", "input": "gold"},
    {"name": "rm", "kind": "model"},
    {"name": "judge", "kind": "judge"},
    {"name": "remote", "kind": "judge", "endpoint": "http://x"},
    {"name": "gp", "kind": "group_preference"},
    {"name": "shown", "kind": "icdpo"},
    {"name": "most", "kind": "majority", "votes_of": "gold"},
    {"name": "rule", "kind": "verifier"},
    {"name": "argued", "kind": "debate"},
    {"name": "sure", "kind": "model", "tier": "learned"},
    {"name": "last", "kind": "judge", "tier": "judge", "endpoint": "http://x"},
]
SCORERS = dict.fromkeys(
    ("reward_model", "reference", "gold", "judge", "group_preference", "context", "rubric", "demonstrations"), "same"
)


@pytest.mark.parametrize(
    "metric, inputs",
    [
        ("reward", "reward_model"),
        ("greedy_reward", "reward_model"),
        ("best_of_2_accuracy", "reward_model"),
        ("kl_reference", "reference"),
        ("pair_accuracy", "reference"),
        ("reward/gold", "gold"),
        ("reward/gold/disagreement", "gold"),
        ("reward/rm", "reward_model"),
        ("reward/judge", "judge"),
        ("reward/gp", "group_preference context"),
        ("reward/most", "gold"),
        ("judge_accuracy", "judge"),
        ("judge_accuracy_without", "judge"),
        ("first_side_win_rate", "judge"),
        ("reward/shown", "demonstrations model"),
        ("reward/last", "reward_model"),
        ("reward/remote", ""),
        ("reward/rule", ""),
        ("accuracy", ""),
        ("length_mean", ""),
        ("pass_at_2", ""),
    ],
)
def test_every_input_that_measured_a_metric_must_be_the_same(metric, inputs):
    from stages.evaluation.protocol import require_same_scorers

    protocol = {**PROTOCOL, "target": "policy", "graders": GRADERS}
    for changed in [*SCORERS, "model"]:
        metas = {
            name: {
                "protocol": protocol,
                "model": name if changed == "model" else "m",
                "scorers": {**SCORERS, changed: name},
            }
            for name in ("candidate", "champion")
        }
        if changed not in inputs.split():
            require_same_scorers(metric, metas)
            continue
        with pytest.raises(ProtocolError, match=f"{metric} was measured with different inputs {changed}"):
            require_same_scorers(metric, metas)


@pytest.mark.parametrize("component", ["gold", "judge", "gp"])
def test_a_component_of_another_scorer_promotes_nothing(component):
    sides = [
        evaluation(name, rate, parts={component: rate}, protocol={**PROTOCOL, "graders": GRADERS})
        for name, rate in (("candidate", 0.9), ("champion", 0.1))
    ]
    for side in sides:
        side.meta["scorers"] = {**SCORERS, **dict.fromkeys(("gold", "judge", "group_preference"), side.name)}
    with pytest.raises(ProtocolError, match="different inputs"):
        decide(Config(metric=f"reward/{component}"), sides[0], champion=sides[1])


def test_answers_without_a_verdict_do_not_win():
    """The candidate has no verdict on the half of the prompts that is hard: on the other half alone it would win."""
    hard = {f"i{i}" for i in range(0, 120, 2)}
    made = {}
    for name in ("candidate", "champion"):
        rows = [
            (
                record(i, 0, None if name == "candidate" else True)
                if f"i{i}" in hard
                else record(i, 0, name == "candidate" or i % 3 == 0)
            )
            for i in range(120)
        ]
        made[name] = Evaluation(name, rows, all_metrics(rows), {"protocol": PROTOCOL, "model": name})
    decision = decide(Config(), made["candidate"], champion=made["champion"])
    assert (
        not decision["promote"]
        and "The candidate has no accuracy for 50.0% of the answers" in decision["reasons"][0]
        and decision["evidence"][0]["note"].startswith("60 items")
    )
    assert decide(Config(max_missing=0.5), made["candidate"], champion=made["champion"])["promote"]
    kept = decide(
        Config(metric="length_mean", non_regression=[{"metric": "accuracy"}]),
        made["candidate"],
        champion=made["champion"],
    )["evidence"][1]
    assert not kept["passed"] and "max_missing=0.02" in kept["reason"]


def test_a_gain_on_one_passage_is_not_a_gain():
    def passages(name, right):
        rows = [record(f"{g}-{q}", 0, g < right, group_id=f"g{g}") for g in range(40) for q in range(5)]
        return Evaluation(name, rows, all_metrics(rows), {"protocol": PROTOCOL, "model": name})

    decision = decide(Config(), passages("candidate", 21), champion=passages("champion", 20))
    assert (
        not decision["promote"]
        and "on 40 prompts (groups of the 200 items that belong together count once)" in decision["reasons"][0]
    )
    assert not decide(Config(min_prompts=41), passages("candidate", 40), champion=passages("champion", 0))["promote"]


def test_mistakes_name_what_to_write():
    candidate = evaluation("candidate", 0.7)
    with pytest.raises(ConfigError, match="did you mean 'accuracy'"):
        decide(Config(gates=[{"metric": "acuracy", "min": 0.5}]), candidate)
    with pytest.raises(ConfigError, match="write one of"):
        decide(Config(metric="niceness"), candidate, champion=evaluation("champion", 0.5))
    with pytest.raises(ValueError, match="write min=NUMBER or max=NUMBER"):
        Config(gates=[{"metric": "accuracy"}])


@pytest.mark.parametrize("scorer, anew", [("rm", False), ("another", True)])
def test_the_champions_evaluation_by_another_reward_model_is_no_evidence(monkeypatch, scorer, anew):
    """`posttrain promote` takes an evaluation of the champion that measured the same, or evaluates it with the
    candidate's inputs.
    """
    from types import SimpleNamespace

    import tasks.run
    from tasks import promotion

    def made(model, reward_model):
        return {
            "inputs": {
                name: {"ref": digest, "digest": digest}
                for name, digest in (("model", model), ("prompts", "p"), ("reward_model", reward_model))
            },
            "metrics": {"protocol_hash": "h"},
            "outputs": {name: {"ref": f"{model} by {reward_model}: {name}"} for name in ("samples", "scores")},
            "config": {},
            "seed": 0,
        }

    asked = []
    monkeypatch.setattr(promotion.store, "resolve", lambda ref, kind: SimpleNamespace(ref=ref, digest=ref))
    monkeypatch.setattr(promotion, "evaluations_of", lambda digest: [made(digest, "rm" if digest == "new" else scorer)])
    monkeypatch.setattr(promotion, "champion", lambda name, alias: "office")
    monkeypatch.setattr(
        tasks.run,
        "run_stage",
        lambda stage, inputs, config, **more: (
            asked.append(inputs) or SimpleNamespace(outputs={"samples": "anew", "scores": "anew"})
        ),
    )
    found = promotion.evidence("new", name="policy", alias="champion")
    assert found["champion_samples"] == ("anew" if anew else "office by rm: samples")
    assert asked == ([{"prompts": "p", "reward_model": "rm", "model": "office"}] if anew else [])
    monkeypatch.setattr(
        promotion.records,
        "makers_of",
        lambda digest: [{**made("new", "rm"), "stage": "evaluate"}] if digest == "mine" else [],
    )
    named = promotion.evidence(
        "new", name="policy", alias="champion", given={"candidate_samples": "mine", "candidate_scores": "my scores"}
    )
    assert named == {
        **found,
        "candidate_samples": "mine",
        "candidate_scores": "my scores",
    }, "evidence that is named passes over no champion"
    with pytest.raises(ConfigError, match="foreign was not made by stage evaluate of this store.*champion_samples=REF"):
        promotion.evidence(
            "new", name="policy", alias="champion", given={"candidate_samples": "foreign", "candidate_scores": "x"}
        )
    whole = {f"{side}_{what}": what for side in ("candidate", "champion") for what in ("samples", "scores")}
    assert promotion.evidence("new", name="policy", alias="champion", given={**whole, "champion": "office"}) == {
        "candidate": "new",
        "champion": "office",
        **whole,
    }


def test_posttrain_compare_leaves_out_what_different_scorers_measured(monkeypatch):
    from flows import compare as command

    def made(reward_model):
        metrics = {
            "accuracy": 0.5,
            "reward": 1.0,
            "reward_low": 0.5,
            "best_of_2_accuracy": 0.5,
            "reward/rule": 1.0,
            "protocol_hash": "h",
        }
        inputs = {
            name: {"digest": digest}
            for name, digest in (("model", reward_model), ("prompts", "p"), ("reward_model", reward_model))
        }
        return {
            "evaluate": {
                "stage": "evaluate",
                "key": "k",
                "config": {"target": "policy", "rewards": GRADERS},
                "inputs": inputs,
                "metrics": metrics,
            }
        }

    monkeypatch.setattr(command, "load", made)
    found = command.compare("a", "b")
    assert [row["metric"] for row in found["metrics"]] == [
        "accuracy",
        "reward/rule",
    ] and "reward, best_of_2_accuracy left out, because different reward_model" in found["notes"][0]
    assert len(command.compare("a", "a")["metrics"]) == 5 and not command.compare("a", "a")["notes"]


def test_models_of_different_stages_are_compared_by_their_newest_evaluations_of_one_protocol(monkeypatch):
    from flows import compare as command

    def evaluation(model, key, finished, protocol, accuracy):
        return {
            "stage": "evaluate",
            "key": key,
            "finished": finished,
            "config": {"target": "policy"},
            "inputs": {"model": {"digest": model}},
            "outputs": {},
            "metrics": {"accuracy": accuracy, "protocol_hash": protocol},
        }

    known = {
        "sft": [evaluation("sft", "s-old", 1, "h", 0.1), evaluation("sft", "s-new", 3, "h", 0.2)],
        "align": [evaluation("align", "d-h", 2, "h", 0.5), evaluation("align", "d-other", 4, "other", 0.9)],
        "rl": [evaluation("rl", "r", 1, "third", 0.5)],
    }
    model = lambda name: {name: {"stage": name, "key": name, "outputs": {"model": {"digest": name}}, "metrics": {}}}
    monkeypatch.setattr(command, "load", model)
    monkeypatch.setattr(command.records, "users_of", known.get)
    found = command.compare("sft", "align")
    assert [(row["metric"], row["a"], row["b"]) for row in found["metrics"]] == [("accuracy", 0.2, 0.5)]
    assert "s-new and d-h" in found["notes"][0]
    with pytest.raises(ConfigError, match="evaluate both models with the same prompts and settings first"):
        command.compare("sft", "rl")


def test_runs_of_two_versions_of_the_code_are_compared_without_what_only_one_of_them_measured_so(monkeypatch):
    from flows import compare as command

    def run(name):
        new = name == "new"
        graders = [{"kind": "verifier", "timeout_s": 5.0} | ({"as_messages": False} if new else {})]
        shared = {"git": f"commit-of-{name}", "inputs": {}, "outputs": {}}
        return {
            "sft": {
                "stage": "ingest",
                "key": name,
                "config": {},
                "metrics": {"rows": 2 if new else 1},
                "code": name,
                **shared,
            },
            "judged": {
                "stage": "evaluate",
                "key": f"e-{name}",
                "config": {"target": "policy", "rewards": graders},
                "metrics": {"accuracy": 0.5, "protocol_hash": name},
                **shared,
            },
        }

    monkeypatch.setattr(command, "load", run)
    monkeypatch.setattr(command, "training", lambda *arguments: {})
    found = command.compare("old", "new")
    assert [(row["step"], row["metric"], row["difference"]) for row in found["metrics"]] == [("sft", "rows", 1)]
    note, code = found["notes"]
    assert code == "the code of sft is not the same in both: commit commit-of-ol of a, commit-of-ne of b"
    assert "step judged was evaluated under different protocols" in note
    assert "rewards[0].as_messages: (not there) -> False; code: commit-of-ol -> commit-of-ne. Evaluate" in note
    monkeypatch.setattr(command, "load", lambda name: {"judged": run(name)["judged"]})
    with pytest.raises(ConfigError, match="step judged was evaluated under different protocols"):
        command.compare("old", "new")
