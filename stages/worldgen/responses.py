"""How answers are written: careful, chatty, sloppy or wrong.

The mixture is the point of the embedded default: demonstrations as people write them, of which a share is wrong.
A policy that imitates them inherits their mistakes; selection and reward are there to lift it above them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from stages.worldgen.lexicon import COLORS, FOODS, HOMES, MAX_NUMBER, WORDS
from stages.worldgen.skills import Item

STYLES = ("short", "worked", "chatty", "sloppy", "rambling")
OFF_TOPIC_SHARE = 0.4
OPENINGS = (
    "Sure, I can help with that.",
    "Let me think about it.",
    "That is a good question.",
    "I am happy to help.",
    "Here is what I found.",
)
CLOSINGS = ("I hope this helps.", "Let me know if you need more.", "Have a nice day.")
#: What a rambling answer goes on with: after each remark it ends with this probability.
REMARKS = (
    *CLOSINGS,
    "That is all.",
    "It is as simple as that.",
    "I am quite sure.",
    "You may want to check it.",
    "Thank you for asking.",
    "Ask me again.",
    "Well then.",
)
ENDS = 0.2


@dataclass(frozen=True)
class Response:
    """An answer as written: text, whether its answer is right, its style, and a quality grade 0 (bad) .. 3 (best)."""

    text: str
    correct: bool
    style: str
    quality: int


def mistake(item: Item, rng: np.random.Generator) -> tuple[str, str]:
    """A wrong (steps, answer): a plausible slip, or (OFF_TOPIC_SHARE) an answer to another kind of question
    altogether.
    """
    if rng.random() >= OFF_TOPIC_SHARE:
        return item.wrong(rng)
    if item.answer_type == "integer":
        others = COLORS + HOMES + FOODS + WORDS
    else:
        others = [str(n) for n in range(1, MAX_NUMBER + 1)]
    return "", others[int(rng.integers(len(others)))]


def write(item: Item, style: str, correct: bool, rng: np.random.Generator) -> Response:
    """Write an answer to `item` in one of STYLES; a wrong one looks exactly like a right one."""
    steps, answer = (item.steps, item.answer) if correct else mistake(item, rng)
    if style == "short":
        text = f"Answer: {answer}."
    elif style == "worked":
        text = f"{steps} Answer: {answer}." if steps else f"The answer is easy to see. Answer: {answer}."
    elif style == "chatty":
        opening, closing = OPENINGS[int(rng.integers(len(OPENINGS)))], CLOSINGS[int(rng.integers(len(CLOSINGS)))]
        text = f"{opening} {steps} Answer: {answer}. {closing}" if steps else f"{opening} Answer: {answer}. {closing}"
    elif style == "sloppy":
        text = f"{answer}" if rng.random() < 0.5 else f"hm {answer} i think"
    elif style == "rambling":
        text = " ".join(
            [
                f"Answer: {answer}." if rng.random() < 0.5 else f"It is {answer}.",
                *(REMARKS[int(rng.integers(len(REMARKS)))] for _ in range(int(rng.geometric(ENDS)) - 1)),
            ]
        )
    else:
        raise ValueError(f"unknown style {style!r}; use one of {', '.join(STYLES)}")
    grade = {"short": 2, "worked": 3, "chatty": 2, "sloppy": 1, "rambling": 1}[style] if correct else 0
    return Response(text, correct, style, grade)


def draw_response(
    item: Item, rng: np.random.Generator, *, wrong_share: float, style_weights: dict[str, float]
) -> Response:
    """One response with a random style; wrong with probability `wrong_share`, more often for hard items."""
    names = list(style_weights)
    weights = np.array([style_weights[n] for n in names], dtype=np.float64)
    style = names[int(rng.choice(len(names), p=weights / weights.sum()))]
    share = min(0.95, wrong_share * (0.6 + 0.2 * item.difficulty))
    return write(item, style, bool(rng.random() >= share), rng)
