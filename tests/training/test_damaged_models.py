"""Model directories that load without a complaint of the library and are not what they seem."""

from __future__ import annotations

import pytest
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from stages.models.modeling import ModelError, head_of, load_policy
from stages.reward_models.reward_heads import load_reward_model

SHAPE = dict(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    max_position_embeddings=32,
)


@pytest.fixture
def damaged(tmp_path):
    """``damaged(change)``: a Llama directory whose weights ``change`` has changed in place."""

    def make(change, kind=LlamaForCausalLM):
        kind(LlamaConfig(**SHAPE)).save_pretrained(tmp_path)
        weights = load_file(tmp_path / "model.safetensors")
        change(weights)
        save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
        return str(tmp_path)

    return make


@pytest.mark.parametrize("in_shards", [False, True])
@pytest.mark.parametrize("load", [load_policy, lambda path, **how: load_reward_model(path, outputs=1, **how)])
def test_a_missing_layer_is_refused_and_not_drawn_at_random(damaged, load, in_shards):
    path = damaged(lambda weights: weights.pop("model.layers.1.mlp.down_proj.weight"))
    with pytest.raises(ModelError, match=r"lack 1 of the weights.*model\.layers\.1\.mlp\.down_proj\.weight"):
        load(path, in_shards=in_shards)


@pytest.mark.parametrize("in_shards", [False, True])
@pytest.mark.parametrize("load", [load_policy, lambda path, **how: load_reward_model(path, outputs=1, **how)])
def test_weights_of_another_shape_are_refused_and_not_drawn_at_random(damaged, load, in_shards):
    """A reward model, whose head may be new, began with all such weights at random."""
    path = damaged(lambda weights: None)
    LlamaConfig(**{**SHAPE, "hidden_size": 24}).save_pretrained(path)
    with pytest.raises(
        ModelError,
        match=r"shapes than its config\.json says, such as [\w.]+ \(32, 16\) instead of \(32, 24\)",
    ):
        load(path, in_shards=in_shards)


def test_a_head_of_other_labels_is_made_anew(damaged):
    path = damaged(lambda weights: None, LlamaForSequenceClassification)
    assert load_reward_model(path, outputs=3).score.weight.shape == (3, 16)


def test_a_directory_without_weights_says_so(damaged, tmp_path):
    damaged(lambda weights: None)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"is no complete model: .*model\.safetensors.*\. Copy or download it again"):
        load_reward_model(str(tmp_path), outputs=1)


def test_a_reward_model_is_no_policy_and_a_policy_gets_a_new_score_head(damaged):
    path = damaged(lambda weights: None)
    assert load_reward_model(path, outputs=1).score.weight.shape == (1, 16)
    with pytest.raises(
        ModelError, match="it is a LlamaForSequenceClassification, whose head gives scores and no words"
    ):
        load_policy(damaged(lambda weights: None, LlamaForSequenceClassification))


def test_weights_that_are_nan_are_named(damaged):
    def spoil(weights):
        weights["model.layers.0.mlp.up_proj.weight"][0, 0] = float("nan")

    with pytest.raises(
        ModelError, match=r"NaN or infinity \(1 tensors, the first is model\.layers\.0\.mlp\.up_proj\.weight\)"
    ):
        head_of(load_policy(damaged(spoil)))
