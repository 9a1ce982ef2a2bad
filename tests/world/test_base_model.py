"""The base model: same bytes twice, a lossless tokenizer, a chat template whose generation markers mask the answer."""

from __future__ import annotations

import json

import pytest

from storage.datasets import DatasetWriter
from storage.files import tree_digest
from storage.schema import complete_row


@pytest.fixture(scope="module")
def made(tmp_path_factory, forks):
    root = tmp_path_factory.mktemp("base")
    text = DatasetWriter(str(root / "text"), "text", "text/1")
    text.write(
        complete_row(
            "text/1",
            {"text": f"The color of the fox is red. {i} plus {i} is {2 * i}."},
            dataset="t",
            source="t",
            origin="human",
        )
        for i in range(200)
    )
    text.close()
    out = []
    for name in ("a", "b"):
        spec = {
            "stage": "base_model",
            "key": name * 16,
            "seed": 7,
            "device": "cpu",
            "workdir": str(root / name),
            "config": {
                "hidden_size": 32,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "intermediate_size": 48,
                "vocab_size": 400,
            },
            "inputs": {"text": {"kind": "dataset", "path": str(root / "text"), "ref": "text", "digest": "d"}},
        }
        (root / name).mkdir()
        (root / f"{name}.json").write_text(json.dumps(spec))
        forks.run(root / f"{name}.json")  # in turn from parents with different hash seeds
        out.append(root / name / "out" / "model")
    return out


def test_two_runs_make_the_same_bytes(made):
    assert tree_digest(made[0]) == tree_digest(made[1])


def test_it_loads_as_any_hugging_face_model_and_renders_with_markers(made):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(made[0]), AutoTokenizer.from_pretrained(made[0])
    assert tokenizer.pad_token_id != tokenizer.eos_token_id
    assert model.generation_config.eos_token_id == [
        tokenizer.convert_tokens_to_ids("<|im_end|>"),
        tokenizer.eos_token_id,
    ]
    assert model.get_output_embeddings().weight.data_ptr() == model.get_input_embeddings().weight.data_ptr()
    text = "Ünïcode \U0001f98a and   spaces\n\ttabs"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    messages = [{"role": "user", "content": "What color is the fox?"}, {"role": "assistant", "content": "red"}]
    encoded = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    answer = [i for i, m in zip(encoded["input_ids"], encoded["assistant_masks"]) if m]
    assert tokenizer.decode(answer) == "red<|im_end|>"


def test_head_widths_that_do_not_fit_are_refused_with_a_way_out():
    from stages.base_model import Config

    with pytest.raises(ValueError, match="write hidden_size"):
        Config(hidden_size=250)
    with pytest.raises(ValueError, match="does not divide"):
        Config(num_key_value_heads=3)
