"""The tiny models of the evaluation tests, and training rows for every trained stage."""

import json

import pytest

from tests.evaluation.conftest import tiny  # noqa: F401


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """{"demonstrations", "pairs", "prompts"}: datasets with train and validation rows of uneven length."""
    from storage.datasets import write_dataset
    from storage.schema import complete_row

    root = tmp_path_factory.mktemp("training-data")

    def user(text):
        return [{"role": "user", "content": text}]

    def assistant(text):
        return [{"role": "assistant", "content": text}]

    def rows(kind, make, n=48):
        return [
            complete_row(
                kind, make(i), dataset="made", source="s", origin="human", split="validation" if i % 8 == 0 else "train"
            )
            for i in range(n)
        ]

    made = {
        "demonstrations": rows(
            "demonstrations/1",
            lambda i: {
                "messages": user(f"say {'a' * (i % 7)} {i}") + assistant("b" * (1 + i % 11)),
                "train_turns": [1],
                "kept": True,
            },
        ),
        "pairs": rows(
            "pairs/1",
            lambda i: {
                "prompt": user(f"which one, number {i}? " + "hm " * (i % 5)),
                "chosen": assistant("yes " * (1 + i % 3)),
                "rejected": assistant("no " * (1 + i % 4) + str(i)),
                "pairs_in_group": 1,
                "margin": 0.1 * (i % 3),
            },
        ),
        "prompts": rows(
            "prompts/1",
            lambda i: {"prompt": user(f"what is {i} plus {i}?"), "answer": str(2 * i), "answer_type": "integer"},
        ),
    }
    kinds = {"demonstrations": "demonstrations/1", "pairs": "pairs/1", "prompts": "prompts/1"}
    paths = {}
    for name, content in made.items():
        paths[name] = str(root / name)
        write_dataset(paths[name], name, kinds[name], content)
    return paths


@pytest.fixture()
def spec(tmp_path):
    """``spec(stage, config, inputs, name)`` -> a SPEC dict with a work directory of its own."""

    def build(stage, config, inputs, name):
        given = {
            k: {
                "kind": "dataset" if k in ("data", "prompts", "anchor") else "model",
                "path": v,
                "ref": k,
                "digest": f"digest-{k}",
            }
            for k, v in inputs.items()
        }
        spec = {
            "stage": stage,
            "key": f"test-{name}",
            "config": config,
            "seed": 5,
            "device": "cpu",
            "inputs": given,
            "workdir": str(tmp_path / name),
        }
        (tmp_path / f"{name}.json").write_text(json.dumps(spec))
        return spec

    build.path = lambda name: str(tmp_path / f"{name}.json")
    return build


@pytest.fixture(scope="session")
def half(tiny, tmp_path_factory):
    """{"policy", "other", "reward"}: the tiny models stored in bfloat16, as models are published."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from stages.reward_models.reward_heads import load_reward_model, read_card, save_reward_model

    root, paths = tmp_path_factory.mktemp("half"), {}
    for name in ("policy", "other"):
        paths[name] = str(root / name)
        AutoModelForCausalLM.from_pretrained(tiny[name], dtype=torch.bfloat16).save_pretrained(paths[name])
        AutoTokenizer.from_pretrained(tiny[name]).save_pretrained(paths[name])
    paths["reward"] = str(root / "reward")
    save_reward_model(
        load_reward_model(tiny["reward"]),
        AutoTokenizer.from_pretrained(tiny["reward"]),
        paths["reward"],
        read_card(tiny["reward"]),
        torch.bfloat16,
    )
    return paths
