"""A training loop in plain torch around another project's formulas: the weights, completions and rewards of a stage,
float64, AdamW and clipping.

verl and OpenRLHF train on clusters of GPUs; what they compute there is in functions of log-probs, rewards and masks,
which :mod:`tests.peers.verl_side` and :mod:`tests.peers.openrlhf_side` load without the rest and put between this
loop's forward and backward, micro-batch by micro-batch. The forward is that of the stages (:mod:`tests.peers.trl_side`
has transformers'), whose float64 is float64 everywhere.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import types
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import torch

from tests.peers.our_side import policy_of
from tests.peers.trl_side import STEPS, Run

MICRO = 3  # rows that go through the model at once


def folder_of(package: str) -> Path | None:
    """Where a package lies, without importing it; None where it is not installed."""
    found = importlib.util.find_spec(package)
    return (
        Path(list(found.submodule_search_locations)[0])
        if found is not None and found.submodule_search_locations
        else None
    )


@contextlib.contextmanager
def bare(packages: dict[str, Path], stubs: dict[str, dict]):
    """Inside, ``packages`` can be imported from without running their __init__, and ``stubs`` are modules with those
    names in them; afterwards nothing of it is left.
    """
    before = dict(sys.modules)
    for name, path in packages.items():
        module = types.ModuleType(name)
        module.__path__ = [str(path)]
        sys.modules[name] = module
    for name, content in stubs.items():
        if name in sys.modules and name in packages:
            module = sys.modules[name]
        else:
            module = sys.modules[name] = types.ModuleType(name)
        module.__dict__.update(content)
    try:
        yield
    finally:
        for name in set(sys.modules) - set(before):
            del sys.modules[name]
        sys.modules.update(before)


def log_probs(model, prompts, completions, temperature: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(log-probs, entropies, sums of squared probabilities) of every completion token, each ``[B, L]``, 0 behind the
    end.
    """
    from stages.batching import collate, make_item
    from stages.models.modeling import head_of, hidden_states

    width = max(map(len, completions))
    rows = []
    for prompt, ids in zip(prompts, completions):
        batch = collate([make_item("row", prompt, [ids], [[1] * len(ids)])])
        all_logps = torch.log_softmax(head_of(model).logits(hidden_states(model, batch, batch.src_N)) / temperature, -1)
        parts = (
            all_logps.gather(-1, torch.tensor(ids)[:, None])[:, 0],
            -(all_logps.exp() * all_logps).sum(-1),
            all_logps.exp().square().sum(-1),
        )
        rows.append([torch.nn.functional.pad(part, (0, width - len(ids))) for part in parts])
    return tuple(torch.stack(part) for part in zip(*rows))


def train(
    path: str,
    reference: str,
    iterations: list[dict],
    num_generations: int,
    credit: Callable,
    loss: Callable,
    *,
    learning_rate: float,
    max_grad_norm: float = 0.5,
    epochs: int = 1,
    minibatches: int = 1,
    temperature: float = 1.0,
    betas=(0.9, 0.999),
    weight_decay: float = 0.0,
) -> Run:
    """Three optimizer steps.

    Args:
        iterations: what :func:`tests.peers.our_side.on_policy` sampled, one dict per rollout batch.
        credit: given a batch (``mask``, ``old``, ``ref``, ``sampler`` log-probs and ``squares`` ``[B, L]``, ``scores
            [B]``, ``group [B]``, ``greedy [B]``, ``cut [B]``), the tensors that its loss needs, ``[B, ...]`` each.
        loss: given the log-probs and entropies of a micro-batch, its rows of those tensors, and those tensors of the
            whole minibatch, what goes into the backward.
    """
    model, other, run = policy_of(path), policy_of(reference), Run()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=learning_rate, betas=betas, eps=1e-8, weight_decay=weight_decay
    )
    for given in iterations:
        prompts, completions = given["prompt_ids"], given["completion_ids"]
        with torch.no_grad():
            old, _, squares = log_probs(model, prompts, completions, temperature)
            ref = log_probs(other, prompts, completions, temperature)[0]
        mask = torch.tensor(
            [[1.0] * len(ids) + [0.0] * (old.shape[1] - len(ids)) for ids in completions], dtype=torch.float64
        )
        sampler = torch.tensor(
            [list(row) + [0.0] * (old.shape[1] - len(row)) for row in given["logprobs"]], dtype=torch.float64
        )
        scores = torch.tensor(given["rewards"], dtype=torch.float64)
        batch = SimpleNamespace(
            mask=mask,
            old=old,
            ref=ref,
            sampler=sampler,
            squares=squares,
            scores=scores,
            group=[i // num_generations for i in range(len(prompts))],
            greedy=(
                None
                if given["greedy"] is None
                else torch.tensor(given["greedy"], dtype=torch.float64).repeat_interleave(num_generations)
            ),
            cut=torch.tensor(given["cut"]),
        )
        tensors = credit(batch)
        size = len(prompts) // minibatches
        for _ in range(epochs):
            for start in range(0, len(prompts), size):
                whole = {name: value[start : start + size] for name, value in tensors.items()}
                optimizer.zero_grad()
                total = 0.0
                for at in range(0, size, MICRO):
                    rows = slice(at, min(at + MICRO, size))
                    width = max(len(ids) for ids in completions[start : start + size][rows])
                    part = {
                        name: value[rows][:, :width] if value.dim() == 2 else value[rows]
                        for name, value in whole.items()
                    }
                    logps, entropies, _ = log_probs(
                        model, prompts[start : start + size][rows], completions[start : start + size][rows], temperature
                    )
                    value = loss(logps, entropies, part, whole)
                    value.backward()
                    total += float(value.detach())
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
                optimizer.step()
                run.step(total, norm, learning_rate, model)
                if len(run.losses) == STEPS:
                    return run
    raise AssertionError(f"{len(iterations)} batches of completions are not enough for {STEPS} steps")
