"""The catalogue's exact vectors hold for this project's functions."""

import json
import math
from pathlib import Path

import pytest

from tests import vectors

FILES = sorted((Path(__file__).parents[1] / "vectors_data").glob("*.json"))
ISSUE_METHODS = {
    "sft.nll",
    "sft.mask",
    "sft.template",
    "sft.unroll",
    "rm.head",
    "rm.bt",
    "rm.margin",
    "rm.soft_label",
    "rm.calibrate",
    "rm.eval",
    "rm.score_rules",
    "rs.sft",
    "rs.select",
    "rs.best_of_n",
    "da.dpo",
    "da.ref_cache",
    "AGG",
    "REINFORCE",
    "BASELINE",
    "RLOO",
    "GRPO",
    "DR-GRPO",
    "PPO-CLIP",
    "KL-EST",
    "KL-REWARD",
    "KL-LOSS",
    "KL-CTRL",
    "NORM",
    "TERM",
    "RETURN",
    "GAE",
    "DYN-SAMPLING",
    "OVERLONG",
    "eval.statistics",
    "eval.rm_accuracy",
    "eval.calibration",
    "eval.win_rate",
    "eval.pass_at_k",
    "eval.avg_at_k",
    "eval.maj_at_k",
    "eval.best_of_n",
}


@pytest.fixture(scope="module")
def adapters():
    named, by_method = vectors.load_adapters()
    return named, by_method + vectors.known_shapes(named)


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_no_vector_fails(path, adapters, capsys):
    results = vectors.run_file(path, *adapters)
    assert not results["failed"], capsys.readouterr().out
    assert results["passed"] and not results["unmapped"]


def test_every_vector_of_the_issues_methods_is_mapped(adapters):
    missing = [
        name
        for path in FILES
        for name, v in vectors.read_vectors(path).items()
        if v["method"] in ISSUE_METHODS and not vectors.candidates(name, v, *adapters)
    ]
    assert missing == []


def test_same_vectors_under_other_names_pass(adapters):
    """Held-back files name their vectors differently: method and input keys must find the adapter."""
    for path in FILES:
        for name, v in vectors.read_vectors(path).items():
            if v["method"] in ISSUE_METHODS and name in adapters[0]:
                status, detail = vectors.run_vector("another name", v, *adapters)
                assert status in ("passed", "skipped"), f"{name}: {status} {detail}"


def test_runner_reports_failures_traps_and_unmapped(tmp_path, capsys):
    good = {
        "method": "rm.best",
        "inputs": {"n": [2]},
        "params": {},
        "expected": {"kl": [math.log(2) - 0.5]},
        "tolerance": 1e-9,
    }
    file = tmp_path / "v.json"
    file.write_text(
        json.dumps(
            {
                "rs.best_of_n/kl": good,
                "rs.best_of_n/kl_wrong": {**good, "method": "rs.best_of_n", "expected": {"kl": [1.0]}},
                "nobody/knows": {**good, "method": "nobody.knows"},
            }
        )
    )
    assert vectors.main([str(file)]) == 1
    out = capsys.readouterr().out.splitlines()
    assert out[-1] == "1 passed, 1 failed, 1 unmapped"
    assert any(line.startswith("failed rs.best_of_n/kl_wrong") for line in out)
    assert vectors.check({"loss": 1.0, "wrong_loss": 2.0}, {"loss": 1.0}, 1e-6) is None
    assert vectors.check({"wrong_sum": 2.0}, {"sum": 2.0}, 1e-6)
    assert vectors.check({"loss": "NaN"}, {"loss": 1.0}, 1e-6)
    assert vectors.main([str(tmp_path / "missing.json")]) == 2
