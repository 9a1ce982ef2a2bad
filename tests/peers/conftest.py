"""The tiny models of the evaluation tests, with a chat template that writes nothing behind the end of a turn, so that
both sides train the same tokens; and with others.
"""

import shutil
from pathlib import Path

import pytest

from tests.evaluation.conftest import tiny  # noqa: F401
from tests.training.other_tokenizers import other_policy

#: ChatML that shows tools and calls, and marks what the assistant says.
WITH_TOOLS = (
    "{%- if tools -%}{{- '<|im_start|>system\\nTools: ' + (tools | tojson) + '<|im_end|>\\n' -}}{%- endif -%}{%- for"
    " message in messages -%}{{- '<|im_start|>' + message['role'] + '\\n' -}}{%- if message['role'] == 'assistant'"
    " -%}{%- generation -%}{{- message['content'] or '' -}}{%- for call in message['tool_calls'] or [] -%}{{-"
    " '<tool_call>' + (call['function'] | tojson) + '</tool_call>' -}}{%- endfor -%}{{- '<|im_end|>' -}}{%-"
    " endgeneration -%}{{- '\\n' -}}{%- else -%}{{- (message['content'] or '') + '<|im_end|>\\n' -}}{%- endif -%}{%-"
    " endfor -%}{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)


@pytest.fixture(scope="session")
def models(tiny, tmp_path_factory):  # noqa: F811
    """{"policy", "other", "reward": Llamas with nothing behind the end of a turn; "qwen2": the same with biases and
    tied embeddings; "chatml", "chatml_reward": a line break there; "tools"; "other tokenizer": a Llama with one of its
    own}: paths.
    """
    root = tmp_path_factory.mktemp("peers")
    found = {"chatml": tiny["policy"], "chatml_reward": tiny["reward"]}

    def copy(source, name, change):
        found[name] = str(shutil.copytree(source, root / name))
        template = Path(found[name], "chat_template.jinja")
        template.write_text(change(template.read_text()))

    for name in ("policy", "other", "reward"):
        copy(
            tiny[name],
            name,
            lambda text: text.replace("{{- '\\n' -}}{%- else -%}", "{%- else -%}").replace(
                "'<|im_end|>\\n'", "'<|im_end|>'"
            ),
        )
    copy(tiny["policy"], "tools", lambda text: WITH_TOOLS)
    import torch
    from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

    from stages.models.modeling import save_policy

    tokenizer = AutoTokenizer.from_pretrained(found["policy"])
    torch.manual_seed(7)
    qwen2 = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(tokenizer),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            initializer_range=0.2,
            max_position_embeddings=256,
            tie_word_embeddings=True,
            bos_token_id=0,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    with torch.no_grad():
        for name, parameter in qwen2.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.2)
    found["other tokenizer"] = other_policy(
        str(root / "other tokenizer"),
        "bytes",
        template=Path(found["policy"], "chat_template.jinja").read_text(),
        specials=("<|endoftext|>", "<|im_end|>", "<|im_start|>", "<|pad|>"),
    )
    found["qwen2"] = str(root / "qwen2")
    save_policy(qwen2, tokenizer, found["qwen2"])
    return found


@pytest.fixture(scope="session")
def prompts(tmp_path_factory):
    from storage.datasets import write_dataset
    from storage.schema import complete_row

    path = str(tmp_path_factory.mktemp("peers-prompts") / "prompts")
    rows = [
        complete_row(
            "prompts/1",
            {
                "prompt": [{"role": "user", "content": f"what is {i} plus {i}?"}],
                "answer": str(2 * i),
                "answer_type": "integer",
            },
            dataset="sums",
            source="made",
            origin="human",
            split="train",
        )
        for i in range(6)
    ]
    write_dataset(path, "sums", "prompts/1", rows)
    return path
