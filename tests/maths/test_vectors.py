"""The catalogue's exact vectors hold for this project's functions."""

import contextlib
import functools
import io
import json
import math
from pathlib import Path

import pytest
import torch
import yaml

from stages import estimators, losses
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


@pytest.fixture(scope="module")
def runs(adapters):
    """Of a file: (results, functions that each of its vectors ran, what was printed, numbers that these functions
    returned), computed once."""

    @functools.cache
    def run(path):
        reached, returned, printed = {}, {}, io.StringIO()
        with contextlib.redirect_stdout(printed):
            results = vectors.run_file(path, *adapters, reached=reached, returned=returned)
        return results, reached, printed.getvalue(), returned

    return run


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_no_vector_fails(path, runs):
    results, _, printed, _ = runs(path)
    assert not results["failed"], printed
    assert results["passed"] and not results["unmapped"]


def test_vectors_run_the_functions_that_their_methods_are_said_to_live_in(runs):
    """Each vector a function that its row of tests/methods.yaml names, and each row with vectors one that is no oracle,
    unless the row has oracles only."""
    table = yaml.safe_load((vectors.ROOT / "tests" / "methods.yaml").read_text(encoding="utf-8"))

    def hits(names, where):
        return any(name == one or name.startswith(one + ".") for one in where for name in names)

    elsewhere, by_method = [], {}
    for path in FILES:
        results, reached, _, _ = runs(path)
        for name, vector in vectors.read_vectors(path).items():
            found = by_method.setdefault(vector["method"], set())
            if name in results["skipped"]:
                found.add("skipped")
                continue
            found |= reached[name]
            if not hits(reached[name], table[vector["method"]]["where"]):
                elsewhere.append(f"{name} ({vector['method']})")
    assert elsewhere == []
    project = {m: [w for w in table[m]["where"] if not w.startswith("tests.")] for m in by_method}
    assert [
        m for m, found in by_method.items() if found != {"skipped"} and project[m] and not hits(found, project[m])
    ] == []
    assert [m for m in by_method if not project[m]] == ["da.halo"]
    assert sorted(by_method) == sorted(m for m, row in table.items() if "vectors" in row["tests"])


#: Where a step's loss, or the step itself, is computed.
LOSSES = (
    "stages.losses:",
    "stages.direct.direct_losses:",
    "stages.policy.policy_update:",
    "stages.policy.sequence_losses:",
    "stages.reward_models.reward_losses:",
    "stages.models.divergence:",
    "stages.models.modeling:token_logps",
)


def gradients(expected) -> list[str]:
    """Names of gradients among expected values, at any depth."""
    if isinstance(expected, list):
        return [name for one in expected for name in gradients(one)]
    if not isinstance(expected, dict):
        return []
    return [k for k in expected if "grad" in k or k.startswith("d_")] + gradients(list(expected.values()))


def test_gradients_are_those_of_losses_that_stages_train_on(runs):
    without, found = [], 0
    for path in FILES:
        _, reached, _, _ = runs(path)
        for name, vector in vectors.read_vectors(path).items():
            if gradients(vector["expected"]) and vector["method"] != "eval.over_optimisation":  # d_peak is a distance
                found += 1
                without += [name] * (not any(of.startswith(LOSSES) for of in reached[name]))
    assert found > 70 and without == []


def test_expected_numbers_are_returned_by_the_project_or_are_listed_as_derived(runs):
    """What an adapter computes itself would hold whatever the project computes: each such number is named in
    tests/methods.yaml, and none that the project returns."""
    table = yaml.safe_load((vectors.ROOT / "tests" / "methods.yaml").read_text(encoding="utf-8"))
    found, listed, skipped = [], [], set()
    for path in FILES:
        results, _, _, returned = runs(path)
        skipped |= set(results["skipped"])
        for name, vector in vectors.read_vectors(path).items():
            if name in returned and name not in skipped:
                found += [f"{vector['method']} {name}: {at}" for at in vectors.not_returned(vector, returned[name])]
    for method, row in table.items():
        listed += [f"{method} {one}" for one in row.get("derived", ()) if one.partition(": ")[0] not in skipped]
    assert sorted(found) == sorted(listed)


def test_a_number_that_an_adapter_computes_is_found():
    vector = {
        "inputs": {"x": [2.0, 3.25]},
        "params": {},
        "expected": {
            "own": {"sum": [5.25, 1.0]},
            "returned": [-1.625, 7],
            "given": 3.25,
            "grad_x": 9.5,
            "wrong_sum": 6.5,
            "text": "a",
        },
        "tolerance": 1e-9,
    }
    assert vectors.not_returned(vector, {1.625}) == ["own.sum"]
    assert vectors.not_returned(vector, {1.6}) == ["own.sum", "returned"]
    assert vectors.not_returned(vector, {1.625, 5.25 + 1e-12}) == []


def test_numbers_that_functions_return_are_recorded():
    def inside():
        losses.aggregate(torch.tensor([[2.5, 0.25]]), torch.ones(1, 2), "token-mean")
        return 77.5

    numbers = set()
    with vectors.recorded(numbers):
        inside()
    assert {2.75, 2.0, 0.25} <= numbers and 77.5 not in numbers


def test_functions_that_run_are_recorded_by_name():
    def inside():
        return losses.aggregate(torch.ones(1, 2), torch.ones(1, 2), "token-mean")

    with vectors.recorded() as outer:
        with vectors.recorded() as found:
            inside()
        estimators.whiten([1.0, 2.0])
    assert {"stages.losses:aggregate", "stages.losses:masked"} <= found
    assert "stages.estimators:whiten" not in found and "stages.estimators:whiten" in outer
    assert all(name.partition(".")[0] in vectors.PROJECT for name in found)


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
    nothing = vectors.check({"loss": 1.0, "wrong_sums": [2.0, 3.0]}, {"loss": 1.0}, 1e-6)
    assert "nothing was computed" in nothing  # a number is no list of two
    assert vectors.check({"loss": "NaN"}, {"loss": 1.0}, 1e-6)
    assert vectors.main([str(tmp_path / "missing.json")]) == 2
