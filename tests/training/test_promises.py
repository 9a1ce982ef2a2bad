"""What users are promised of every training step and every batch of answers, where no other test says it by itself:
memory that is flat in the vocabulary, sequences that do not see each other, small updates that move weights, answers
that a kill neither loses nor doubles.
"""

import json
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from stages.batching import collate, make_item
from stages.models import modeling
from stages.models.modeling import Head, hidden_states, load_policy, token_logps
from stages.settings import OptimizerConfig
from stages.sft import NextToken
from stages.training import Trainer
from storage.datasets import open_dataset
from storage.files import tree_digest
from tests.training.test_invariance import text_items


class Living(TorchDispatchMode):
    """The most bytes that tensors made within the block held at once."""

    def __init__(self):
        super().__init__()
        self.now, self.most, self.seen = 0, 0, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for tensor in tree_flatten(made)[0]:
            if isinstance(tensor, torch.Tensor) and (storage := tensor.untyped_storage())._cdata not in self.seen:
                self.seen.add(storage._cdata)
                self.now += storage.nbytes()
                self.most = max(self.most, self.now)
                weakref.finalize(storage, self.freed, storage._cdata, storage.nbytes())
        return made

    def freed(self, key, size):
        self.seen.discard(key)
        self.now -= size


@pytest.mark.parametrize("entropy", (False, True))
def test_the_head_takes_the_memory_of_its_weights_and_a_constant_whatever_the_vocabulary(entropy, monkeypatch):
    monkeypatch.setattr(modeling, "HEAD_CHUNK_ELEMENTS", 1 << 15)
    monkeypatch.setattr(modeling, "HEAD_KEEP_ELEMENTS", 0)
    rows, width, beside = 600, 8, []
    for vocabulary in (1_000, 4_000, 16_000):
        hidden = torch.randn(rows, width, requires_grad=True)
        weight = torch.randn(vocabulary, width, requires_grad=True)
        targets = torch.randint(0, vocabulary, (rows,))
        with Living() as living:
            logps, entropies = token_logps(Head(weight, None, 1.0, None), hidden, targets, entropy=entropy)
            (logps.sum() + (entropies.sum() if entropy else 0.0)).backward()
        beside.append(living.most - 2 * weight.nbytes)  # the gradient, and one term of it
    whole = rows * 16_000 * 4
    assert max(beside) < 8 * (4 << 15) + 20 * hidden.nbytes < whole / 20
    assert living.most > weight.nbytes


def test_what_a_sequence_gives_has_no_gradient_to_its_neighbours_in_the_micro_batch(tiny):
    """Exactly none: the tokens of the others are read by no position of it, and the embedding of the first token of a
    neighbour is as far from it as from a run by itself.
    """
    model = load_policy(tiny["policy"]).double()
    one, two = (list(range(start, start + 20)) for start in (10, 100))
    items = [make_item(name, [], [ids], [[1] * 20]) for name, ids in (("one", one), ("two", two))]
    batch = collate(items)
    states = hidden_states(model, batch, batch.src_N)
    for name, own, other in ((0, one, two), (1, two, one)):
        model.zero_grad(set_to_none=True)
        states[batch.seq_N == name].square().sum().backward(retain_graph=True)
        moved = model.get_input_embeddings().weight.grad.abs().sum(1)
        assert (moved[own[:-1]] > 0).all() and (moved[other] == 0).all()
    alone = [hidden_states(model, b, b.src_N) for b in (collate([item]) for item in items)]
    assert torch.allclose(states, torch.cat(alone), rtol=0, atol=1e-12)


@pytest.mark.parametrize("compute_dtype", ("float32", "bfloat16"))
def test_a_small_learning_rate_moves_the_weights(half, compute_dtype):
    """A model stored in bfloat16 trains in float32, so that steps of 1e-6, which bfloat16 would round away, arrive."""
    model = load_policy(half["policy"])
    before = [p.detach().clone() for p in model.parameters()]
    config = OptimizerConfig(learning_rate=1e-6, lr_schedule="constant", warmup_ratio=0.0, compute_dtype=compute_dtype)
    trainer, items = Trainer(model, NextToken("token-mean"), config, 30), text_items(np.random.default_rng(0), 3)
    for _ in range(30):
        trainer.step(items)
    changed = [(p.detach() != b) for p, b in zip(model.parameters(), before) if p.grad is not None]
    has_gradient = [p.grad != 0 for p in model.parameters() if p.grad is not None]
    moved = sum(int((c & g).sum()) for c, g in zip(changed, has_gradient)) / sum(int(g.sum()) for g in has_gradient)
    assert all(p.dtype == torch.float32 for p in model.parameters()) and moved > 0.95
    largest = max(float((p.detach() - b).abs().max()) for p, b in zip(model.parameters(), before))
    assert largest < 1e-4, "in steps that small"


def test_kill9_samples_every_candidate_once(tiny, data, spec, forks):
    """Whole parts, in the order of the prompts, each completion once, behind kills at several places."""
    config = {
        "num_generations": 3,
        "max_completion_length": 8,
        "rewards": [{"name": "length", "kind": "length"}],
        "block": 4,
    }
    inputs = {"model": tiny["policy"], "prompts": data["prompts"]}
    whole = spec("rejection", config, inputs, "whole")
    forks.run(spec.path("whole"))
    killed = spec("rejection", config, inputs, "killed")
    folder = Path(killed["workdir"], "out", "candidates")
    for parts in (1, 4, 8):
        forks.start(spec.path("killed")).kill_when(lambda: len(list(folder.glob("part-*.parquet"))) >= parts)
    assert not (folder / "manifest.json").exists()
    forks.run(spec.path("killed"))
    results = [json.loads(Path(made["workdir"], "result.json").read_text()) for made in (whole, killed)]
    assert results[1]["resumed_from"] and results[0]["summary"] == results[1]["summary"]
    for name in ("candidates", "selected"):
        assert tree_digest(folder.parent / name) == tree_digest(Path(whole["workdir"], "out", name))
    rows = list(open_dataset(str(folder)).iter_rows())
    keys = [(row["prompt_idx"], row["completion_idx"]) for row in rows]
    assert keys == sorted(set(keys)) and len(keys) == 42 * 3
