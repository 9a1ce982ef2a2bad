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
    rows = [record(i, k, bool(draws[i, k] < rate), reward=float(draws[i, k] < rate), **fields) for i in range(n) for k in range(2)]
    return Evaluation(name, rows, all_metrics(rows, 0), {"protocol": protocol, "model": f"{model}-{name}", "scorers": {"reward_model": scorer}})


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
    assert decide(Config(non_regression=[{"metric": "length_mean", "tolerance": 20}]), candidate, champion=champion)["promote"]
    assert not decide(Config(gates=[{"metric": "accuracy", "min": 0.9}]), candidate, champion=champion)["promote"]
    assert not decide(Config(gates=[{"metric": "accuracy", "min": 0.79, "use_interval": True}]), candidate, champion=champion)["promote"]


def test_a_metric_where_less_is_better_is_tested_downwards():
    shorter, longer = evaluation("candidate", 0.5, tokens=10), evaluation("champion", 0.5, tokens=30)
    assert decide(Config(metric="length_mean"), shorter, champion=longer)["promote"]
    assert not decide(Config(metric="length_mean"), Evaluation("candidate", longer.records, longer.metrics, longer.meta), champion=shorter)["promote"]


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
    with pytest.raises(ProtocolError, match="reward model"):
        decide(Config(metric="reward"), candidate, champion=evaluation("champion", 0.5, scorer="another"))


def test_mistakes_name_what_to_write():
    candidate = evaluation("candidate", 0.7)
    with pytest.raises(ConfigError, match="did you mean 'accuracy'"):
        decide(Config(gates=[{"metric": "acuracy", "min": 0.5}]), candidate)
    with pytest.raises(ConfigError, match="write one of"):
        decide(Config(metric="niceness"), candidate, champion=evaluation("champion", 0.5))
    with pytest.raises(ValueError, match="write min=NUMBER or max=NUMBER"):
        Config(gates=[{"metric": "accuracy"}])
