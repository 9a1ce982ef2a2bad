"""A simulated human annotator: Bradley-Terry noise on a hidden utility, with ties, strengths and a length bias."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from stages.worldgen.responses import Response

STYLE_UTILITY = {"worked": 1.0, "short": 0.5, "chatty": 0.2, "sloppy": -1.5, "rambling": -1.0}


@dataclass(frozen=True)
class Annotator:
    """Hidden utility = correctness * [correct] + style + length_bias * words/10; noise is logistic (Bradley-Terry)."""

    correctness: float = 4.0
    length_bias: float = 0.25  # utility per ten words: people like long answers a little too much
    noise: float = 1.0  # scale of the logistic noise; 1 = Bradley-Terry on the utility itself
    tie_band: float = 0.35  # |perceived difference| below this is called a tie
    strong: float = 2.5  # |perceived difference| above this is a strong preference

    def utility(self, response: Response) -> float:
        """Hidden utility of a response."""
        return (
            self.correctness * response.correct
            + STYLE_UTILITY[response.style]
            + self.length_bias * len(response.text.split()) / 10.0
        )

    def label(self, a: Response, b: Response, rng: np.random.Generator) -> int:
        """Five-point label, low means A: 1 A clearly better, 2 A better, 3 tie, 4 B better, 5 B clearly better."""
        u = float(rng.random())
        noise = float(np.log(u) - np.log1p(-u)) if 0.0 < u < 1.0 else 0.0
        perceived = self.utility(b) - self.utility(a) + self.noise * noise
        if abs(perceived) < self.tie_band:
            return 3
        step = 2 if abs(perceived) >= self.strong else 1
        return 3 + step if perceived > 0 else 3 - step
