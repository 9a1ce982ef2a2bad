"""Weight merging: the catalogue's numbers, the rules of each method, and the stage."""

import json
import random
import shutil
import time
from pathlib import Path

import pytest
import torch

from stages.harness import execute
from stages.merge import Config, coefficients_of, combine, slerp, ties
from stages.models.modeling import load_policy
from stages.spec import ConfigError
from storage.files import tree_digest
from tests.common import silent


def test_linear_is_the_catalogues_vector():
    merged = combine(Config(), "w", [torch.tensor([1.0, 2.0]), torch.tensor([3.0, -2.0])], [0.25, 0.75])
    assert merged.tolist() == [2.5, -1.0]
    assert combine(Config(), "n", [torch.tensor([7]), torch.tensor([9])], [0.5, 0.5]).tolist() == [7]


def test_slerp_keeps_the_length_and_ends_at_both_models():
    a, b = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])
    for share in (0.0, 0.3, 0.5, 1.0):
        assert float(slerp(a, b, share).norm()) == pytest.approx(1.0, abs=1e-6)
    assert torch.allclose(slerp(a, b, 0.5), torch.full((2,), 0.5**0.5)) and torch.allclose(
        slerp(a, b, 1.0), b, atol=1e-6
    )
    assert torch.allclose(slerp(a, 2 * a, 0.25), 1.25 * a)


def test_task_arithmetic_adds_what_each_model_learned():
    base, a, b = torch.zeros(3), torch.tensor([1.0, 0.0, 0.0]), torch.tensor([0.0, 2.0, 0.0])
    assert combine(Config(method="task_arithmetic"), "w", [a, b], [1.0, -0.5], base).tolist() == [1.0, -1.0, 0.0]


def test_ties_drops_small_and_outvoted_changes():
    changes = [torch.tensor([4.0, 1.0, -3.0, 0.1]), torch.tensor([2.0, -5.0, -1.0, 0.2])]
    assert ties(changes, [1.0, 1.0], 0.5).tolist() == [3.0, -5.0, -3.0, 0.0]


def test_the_stage_averages_models_and_names_what_does_not_fit(tiny, spec, tmp_path):
    from stages.chat import load_tokenizer
    from stages.models.modeling import save_policy

    other = load_policy(tiny["policy"])
    with torch.no_grad():
        for p in other.parameters():
            p.add_(1.0)
    save_policy(other, load_tokenizer(tiny["policy"]), tmp_path / "other")
    made = spec("merge", {"coefficients": {"a": 0.75, "b": 0.25}}, {}, "merge")
    made["inputs"] = {
        f"models.{n}": {"kind": "model", "path": p, "ref": n, "digest": n}
        for n, p in (("a", tiny["policy"]), ("b", str(tmp_path / "other")))
    }
    result = execute(made, lambda e: None)
    merged, first = (
        dict(load_policy(p).named_parameters()) for p in (result["outputs"]["model"]["path"], tiny["policy"])
    )
    assert all(torch.allclose(merged[n], first[n] + 0.25, atol=1e-6) for n in first)
    with pytest.raises(ConfigError, match="sum to 1"):
        coefficients_of(Config(coefficients={"a": 0.5, "b": 0.4}), ["a", "b"])
    with pytest.raises(ConfigError, match="name each model once"):
        coefficients_of(Config(coefficients={"a": 0.5, "c": 0.5}), ["a", "b"])
    assert not result["warnings"]
    tokenizer = load_tokenizer(tiny["policy"])
    tokenizer.chat_template = "{# another #}" + tokenizer.chat_template
    save_policy(other, tokenizer, tmp_path / "told")
    told = execute(of_two(spec, tiny["policy"], tmp_path / "told", "template"), lambda e: None)["warnings"]
    assert [one["code"] for one in told] == ["chat_templates_differ"] and told[0]["text"].startswith("b shows")
    made["config"] = {"method": "ties"}
    with pytest.raises(ConfigError, match="base=REF"):
        execute({**made, "workdir": made["workdir"] + "-ties"}, lambda e: None)


def of_two(spec, a, b, name, config=None, base=None):
    made = spec("merge", config or {}, {}, name)
    paths = {"models.a": a, "models.b": b, **({"base": base} if base else {})}
    made["inputs"] = {n: {"kind": "model", "path": str(p), "ref": n, "digest": n} for n, p in paths.items()}
    Path(spec.path(name)).write_text(json.dumps(made))
    return made


def swap_words(folder: Path) -> None:
    said = json.loads((folder / "tokenizer.json").read_text())
    vocab = said["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    (folder / "tokenizer.json").write_text(json.dumps(said))


def set_in_config(**changes):
    return lambda folder: (folder / "config.json").write_text(
        json.dumps({**json.loads((folder / "config.json").read_text()), **changes})
    )


@pytest.mark.parametrize(
    "change,text",
    [
        (swap_words, "the same ids to different words"),
        (set_in_config(rope_parameters={"rope_type": "default", "rope_theta": 1e6}), "rope_parameters"),
        (set_in_config(num_attention_heads=1, num_key_value_heads=1, head_dim=32), "num_attention_heads"),
        (set_in_config(rms_norm_eps=1e-2), r"rms_norm_eps \(1e-06 and 0.01\)"),
        (
            set_in_config(
                use_cache=False,
                initializer_range=0.5,
                attention_dropout=0.3,
                transformers_version="4.0.0",
                pad_token_id=0,
            ),
            None,
        ),
    ],
)
@pytest.mark.parametrize("place", ("model", "base"))
def test_models_whose_weights_mean_something_else_are_not_averaged(tiny, spec, tmp_path, change, text, place):
    """Other words behind the same ids, or other settings of the same tensors; what changes nothing of what the weights
    compute is allowed.
    """
    shutil.copytree(tiny["policy"], tmp_path / "other")
    change(tmp_path / "other")
    other, config = str(tmp_path / "other"), {"method": "task_arithmetic"} if place == "base" else {}
    made = of_two(
        spec,
        tiny["policy"],
        tiny["policy"] if place == "base" else other,
        "merge",
        config,
        other if place == "base" else None,
    )
    if text is None:
        execute(made, silent)
        return
    with pytest.raises(ConfigError, match=text):
        execute(made, silent)


def test_kill9_merges_to_the_same_bytes(tiny, spec, forks):
    """Killed at a moment of chance and while the model is being written."""
    whole, killed = (
        of_two(spec, tiny["policy"], tiny["other"], name, {"method": "slerp"}) for name in ("whole", "killed")
    )
    forks.run(spec.path("whole"))
    out = Path(killed["workdir"], "out")
    for started, delay in (
        (lambda: True, random.uniform(0, 1)),
        ((out / ".model.tmp").exists, random.uniform(0, 0.02)),
    ):
        since = []

        def due():
            if started() and not since:
                since.append(time.monotonic())
            return bool(since) and time.monotonic() - since[0] > delay or (out / "model").exists()

        forks.start(spec.path("killed")).kill_when(due)
    forks.run(spec.path("killed"))
    assert tree_digest(out) == tree_digest(Path(whole["workdir"], "out"))
    summaries = [json.loads(Path(made["workdir"], "result.json").read_text())["summary"] for made in (whole, killed)]
    assert summaries[0] == summaries[1]


def test_only_ties_trims():
    with pytest.raises(ValueError, match="density=0.5 would change nothing.*method=ties"):
        Config(method="task_arithmetic", density=0.5)
    assert Config(method="ties", density=0.5).density == 0.5


def test_reward_models_are_not_merged_into_a_policy(spec, tmp_path):
    """With tied embeddings nothing of a causal LM is missing in a reward model's files."""
    from stages.models.modeling import ModelError
    from stages.reward_models.reward_heads import RewardCard, new_reward_model, save_reward_model
    from tests.evaluation.conftest import tiny_policy

    tokenizer = tiny_policy(str(tmp_path / "policy"), 0, tie_word_embeddings=True)
    for seed, name in enumerate("ab"):
        model = new_reward_model(str(tmp_path / "policy"), seed=seed)
        save_reward_model(model, tokenizer, tmp_path / name, RewardCard())
    with pytest.raises(ModelError, match="it is a LlamaForSequenceClassification, whose head gives scores"):
        execute(of_two(spec, tmp_path / "a", tmp_path / "b", "rewards"), silent)
    assert load_policy(str(tmp_path / "policy")).config.tie_word_embeddings
