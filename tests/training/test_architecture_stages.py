"""Every training stage on models that are not Llama: what is computed, published and read again, with and without an
adapter.
"""

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from stages.harness import execute
from tests.architectures import BASE, MODELS, build
from tests.common import silent

#: (architecture, stage, rank of an adapter): windows and capped scores, experts in our forward and in the model's own,
#: sinks, parallel blocks with windows, latent attention.
RUNS = [
    *(("gemma2", stage, 0) for stage in ("sft", "align", "reward_model", "rl")),
    ("gemma3", "rl", 4),
    ("qwen3-moe", "rl", 0),
    ("qwen3-moe", "rl", 4),
    ("olmo2", "reward_model", 0),
    ("gpt-oss", "rl", 0),
    ("gpt-oss", "align", 4),
    ("cohere2", "align", 0),
    ("qwen3.5", "rl", 0),
    ("deepseek-v3", "sft", 4),
]
OPTIONS = {"batch_size": 6, "max_steps": 2, "learning_rate": 1e-3}
STAGES = {
    "sft": ({**OPTIONS, "max_length": 64, "eval_every": 1}, "data", "demonstrations"),
    "align": ({**OPTIONS, "max_length": 64}, "data", "pairs"),
    "reward_model": ({**OPTIONS, "max_length": 64}, "data", "pairs"),
    "rl": (
        {
            "prompts_per_step": 3,
            "num_generations": 3,
            "max_completion_length": 20,
            "max_steps": 2,
            "learning_rate": 1e-3,
            "rewards": [{"kind": "python", "source": "def score(p, c, a): return sum(map(ord, str(c))) % 7 / 7"}],
            "max_tokens_per_micro_batch": 120,
        },
        "data",
        "prompts",
    ),
}


@pytest.fixture(scope="module")
def folders(tiny, tmp_path_factory):
    """name -> a model directory with the tiny tokenizer."""
    from transformers import AutoTokenizer

    tokenizer, made = AutoTokenizer.from_pretrained(tiny["policy"]), {}

    def folder(name):
        if name not in made:
            made[name] = str(tmp_path_factory.mktemp("architectures") / name)
            family, more = MODELS[name]
            model = build(
                (family, more),
                vocab_size=len(tokenizer),
                eos_token_id=tokenizer.eos_token_id,
                bos_token_id=None,
                pad_token_id=tokenizer.pad_token_id,
                num_hidden_layers=BASE["num_hidden_layers"],
            )
            model.generation_config.eos_token_id = tokenizer.eos_token_id
            model.save_pretrained(made[name])
            tokenizer.save_pretrained(made[name])
        return made[name]

    return folder


@pytest.mark.parametrize("name, stage, rank", RUNS)
def test_stages_run(name, stage, rank, folders, data, spec):
    config, role, rows = STAGES[stage]
    made = execute(
        spec(stage, {**config, "lora_rank": rank}, {"model": folders(name), role: data[rows]}, "run"), silent
    )
    output = Path(next(one["path"] for one in made["outputs"].values() if one["kind"] == "model"))
    before, after = weights(folders(name)), weights(output)
    assert any(not torch.equal(before[key], after[key]) for key in before if key in after) and all(
        torch.isfinite(value).all() for value in after.values()
    )
    if stage == "align":  # policy equals reference at step 0
        start = json.loads(output.parents[1].joinpath("metrics.jsonl").read_text().splitlines()[0])
        assert start["metrics"]["validation/loss"] == pytest.approx(math.log(2), rel=1e-5)


def weights(path) -> dict[str, torch.Tensor]:
    return {key: value for file in sorted(Path(path).glob("*.safetensors")) for key, value in load_file(file).items()}
