"""Labelled rows of every kind, and tiny backbones: a decoder (`tiny`), one with another template, and a BERT-class
encoder.
"""

import json
import re
from collections import Counter

import pytest

from tests.common import assistant, user
from tests.evaluation.conftest import tiny  # noqa: F401
from tests.training.conftest import data  # noqa: F401


def better(i):
    return "yes " * (1 + i % 3) + "good"


def worse(i):
    return "no " * (1 + i % 4) + "bad"


MAKE = {
    "pairs": (
        "pairs/1",
        lambda i: {
            "prompt": user(f"which, number {i}? " + "hm " * (i % 5)),
            "chosen": assistant(better(i)),
            "rejected": assistant(worse(i)),
            "margin": 0.5 + i % 3,
            "label_prob": 0.6 + 0.1 * (i % 4),
            "strength": 1 + i % 2,
            "stage_index": i % 2,
            "chosen_score": 5.0,
            "rejected_score": 1.0 + i % 3,
        },
    ),
    "rankings": (
        "rankings/1",
        lambda i: {
            "prompt": user(f"rank {i}"),
            "completions": [assistant("so so"), assistant(better(i)), assistant(worse(i)), assistant("none")][
                : 3 + i % 2
            ],
            "ranks": [2, 1, 3, 4][: 3 + i % 2],
        },
    ),
    "ratings": (
        "ratings/1",
        lambda i: {
            "prompt": user(f"rate {i % 8}"),
            "completion": assistant(better(i) if i % 2 else worse(i)),
            "score": 4.0 if i % 2 else 1.0 + (i % 4) / 4,
            "scale_min": 1.0,
            "scale_max": 5.0,
            "aspects": (
                [{"aspect": "help", "score": 4.0 if i % 2 else 2.0, "rationale": None}]
                + ([{"aspect": "truth", "score": 1.0 + i % 3, "rationale": None}] if i % 3 else [])
            ),
            "ann": {"annotator_type": "human", "annotator_id": str(i % 2)},
        },
    ),
    "labels": (
        "unpaired/1",
        lambda i: {
            "prompt": user(f"solve {i % 3}"),
            "completion": assistant(better(i) if i % 2 else worse(i)),
            "label": bool(i % 2),
            "label_kind": "correct",
        },
    ),
    "steps": (
        "stepwise/1",
        lambda i: {
            "prompt": user(f"prove {i}"),
            "completions": ["good one", "bad step" if i % 2 else "good two", "good end"],
            "labels": [1, -1 if i % 2 else 0, 1],
            "separator": "\n\n",
            "solution_correct": not i % 2,
        },
    ),
}


@pytest.fixture(scope="session")
def rows(tmp_path_factory):
    """{name: dataset path} of every kind in MAKE, with train, validation and test splits."""
    from storage.datasets import write_dataset
    from storage.schema import complete_row

    root = tmp_path_factory.mktemp("reward-data")
    paths = {}
    for name, (kind, make) in MAKE.items():
        content = [
            complete_row(
                kind,
                make(i),
                dataset="made",
                source=("a", "b")[i % 2],
                origin="human",
                split={0: "validation", 3: "test"}.get(i % 7, "train"),
            )
            for i in range(42)
        ]
        paths[name] = str(root / name)
        write_dataset(paths[name], name, kind, content)
    return paths


@pytest.fixture(scope="session")
def encoder(tmp_path_factory):
    """A random BERT with a word-piece tokenizer of its own, hidden size 32."""
    import torch
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    path = tmp_path_factory.mktemp("encoder")
    words = Counter(
        word
        for _, make in MAKE.values()
        for i in range(6)
        for word in re.findall(r"\w+|[^\w\s]", json.dumps(make(i)).lower())
    )
    letters = sorted({letter for word in words for letter in word})
    pieces = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        *letters,
        *(f"##{letter}" for letter in letters),
        *(w for w, _ in sorted(words.items(), key=lambda w: (-w[1], w[0]))),
    ]
    # written down, not trained: WordPieceTrainer gives another vocabulary in every process
    tokenizer = Tokenizer(
        models.WordPiece({piece: i for i, piece in enumerate(list(dict.fromkeys(pieces))[:200])}, unk_token="[UNK]")
    )
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    cls, sep = tokenizer.token_to_id("[CLS]"), tokenizer.token_to_id("[SEP]")
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", sep), ("[CLS]", cls))
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        unk_token="[UNK]",
        mask_token="[MASK]",
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )
    torch.manual_seed(4)
    BertModel(
        BertConfig(
            vocab_size=len(fast),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=128,
            pad_token_id=0,
            initializer_range=0.2,
        )
    ).save_pretrained(path)
    fast.save_pretrained(path)
    return str(path)


@pytest.fixture()
def train(tmp_path):
    """``train(stage, config, inputs)`` runs a stage in this process and returns its result."""
    from stages.harness import execute

    def go(stage, config, inputs, name="stage"):
        given = {k: {"path": v, "ref": k, "digest": f"digest-{k}"} for k, v in inputs.items()}
        return execute(
            {
                "stage": stage,
                "key": f"test-{name}",
                "config": config,
                "seed": 5,
                "device": "cpu",
                "inputs": given,
                "workdir": str(tmp_path / name),
            },
            lambda event: None,
        )

    return go
