"""Weight merging: the catalogue's numbers, the rules of each method, and the stage."""

import pytest
import torch

from stages.harness import execute
from stages.merge import Config, coefficients_of, combine, slerp, ties
from stages.modeling import load_policy
from stages.spec import ConfigError


def test_linear_is_the_catalogues_vector():
    merged = combine(Config(), "w", [torch.tensor([1.0, 2.0]), torch.tensor([3.0, -2.0])], [0.25, 0.75])
    assert merged.tolist() == [2.5, -1.0]
    assert combine(Config(), "n", [torch.tensor([7]), torch.tensor([9])], [0.5, 0.5]).tolist() == [7]


def test_slerp_keeps_the_length_and_ends_at_both_models():
    a, b = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])
    for share in (0.0, 0.3, 0.5, 1.0):
        assert float(slerp(a, b, share).norm()) == pytest.approx(1.0, abs=1e-6)
    assert torch.allclose(slerp(a, b, 0.5), torch.full((2,), 0.5 ** 0.5)) and torch.allclose(slerp(a, b, 1.0), b, atol=1e-6)
    assert torch.allclose(slerp(a, 2 * a, 0.25), 1.25 * a)


def test_task_arithmetic_adds_what_each_model_learned():
    base, a, b = torch.zeros(3), torch.tensor([1.0, 0.0, 0.0]), torch.tensor([0.0, 2.0, 0.0])
    assert combine(Config(method="task_arithmetic"), "w", [a, b], [1.0, -0.5], base).tolist() == [1.0, -1.0, 0.0]


def test_ties_drops_small_and_outvoted_changes():
    changes = [torch.tensor([4.0, 1.0, -3.0, 0.1]), torch.tensor([2.0, -5.0, -1.0, 0.2])]
    assert ties(changes, [1.0, 1.0], 0.5).tolist() == [3.0, -5.0, -3.0, 0.0]


def test_the_stage_averages_models_and_names_what_does_not_fit(tiny, spec, tmp_path):
    from stages.chat import load_tokenizer
    from stages.modeling import save_policy

    other = load_policy(tiny["policy"])
    with torch.no_grad():
        for p in other.parameters():
            p.add_(1.0)
    save_policy(other, load_tokenizer(tiny["policy"]), tmp_path / "other")
    made = spec("merge", {"coefficients": {"a": 0.75, "b": 0.25}}, {}, "merge")
    made["inputs"] = {f"models.{n}": {"kind": "model", "path": p, "ref": n, "digest": n} for n, p in (("a", tiny["policy"]), ("b", str(tmp_path / "other")))}
    result = execute(made, lambda e: None)
    merged, first = (dict(load_policy(p).named_parameters()) for p in (result["outputs"]["model"]["path"], tiny["policy"]))
    assert all(torch.allclose(merged[n], first[n] + 0.25, atol=1e-6) for n in first)
    with pytest.raises(ConfigError, match="sum to 1"):
        coefficients_of(Config(coefficients={"a": 0.5, "b": 0.4}), ["a", "b"])
    with pytest.raises(ConfigError, match="name each model once"):
        coefficients_of(Config(coefficients={"a": 0.5, "c": 0.5}), ["a", "b"])
    made["config"] = {"method": "ties"}
    with pytest.raises(ConfigError, match="base=REF"):
        execute({**made, "workdir": made["workdir"] + "-ties"}, lambda e: None)
