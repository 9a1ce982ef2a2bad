"""What both sides of a comparison are given, and how far two runs are apart."""

from __future__ import annotations

import numpy as np
import torch


def chat(*turns):
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(turns)]


PAIRS = [
    {
        "prompt": chat(f"q {i}"),
        "chosen": chat("", "yes " * (1 + i % 3) + "x")[1:],
        "rejected": chat("", "no " * (1 + i % 4) + str(i))[1:],
    }
    for i in range(12)
]


def uneven(samples, iteration: int) -> None:
    """Completions of uneven length, half of them ended, with rewards from a table of random numbers."""
    rng = np.random.default_rng(iteration + 7)
    for i, sample in enumerate(samples):
        n = int(rng.integers(1, 9))
        sample.ids, sample.logps, sample.finish_reason = list(sample.ids[:n]), list(sample.logps[:n]), "length"
        if i % 2:
            sample.ids[-1], sample.finish_reason = 2, "eos"
        sample.total = float(rng.normal())
        names = sorted(sample.weights)
        sample.parts = {**sample.parts, **{name: float(rng.normal() * (k + 1)) for k, name in enumerate(names)}}


def from_another_engine(samples, iteration: int) -> None:
    uneven(samples, iteration)
    rng = np.random.default_rng(iteration + 70)
    for sample in samples:
        sample.logps = [float(value + 0.7 * rng.normal()) for value in sample.logps]


RATE = 3e-3  # of RL: its rewards are stronger than labels


def apart(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Distance of two vectors as a share of the second's length."""
    return float((ours - theirs).norm() / theirs.norm().clamp(min=1e-12))
