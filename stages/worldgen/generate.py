"""The data sets of the world, as plain rows: text, demonstrations, comparisons, prompts.

Who may see what. Every item belongs to exactly one split, decided by a hash of its content (of its exact wording
where there are too few contents to hold any out). Training text, training demonstrations, training comparisons and
training prompts draw only items of the train split, so no held-out prompt and no held-out content is in training data.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator

import numpy as np

from stages.worldgen.annotator import Annotator
from stages.worldgen.lexicon import Facts
from stages.worldgen.responses import Response, draw_response
from stages.worldgen.skills import Item, draw_item, draw_page

ASKERS, TELLERS = ("Tom", "Eve", "Max", "Zoe"), ("Ann", "Ben", "Ida", "Leo")
HELD_OUT_SHARE = {"test": 0.12, "validation": 0.08}
_MAX_DRAWS_PER_ROW = 400


def split_of(item: Item) -> str:
    """The one split an item belongs to: 12 % of contents are test, 8 % validation, the rest train."""
    unit = f"{item.category}|{item.instruction if item.small_space else item.content}"
    share = int.from_bytes(hashlib.sha256(unit.encode()).digest()[:8], "big") / 2**64
    if share < HELD_OUT_SHARE["test"]:
        return "test"
    return "validation" if share < sum(HELD_OUT_SHARE.values()) else "train"


def items_of(split: str, rng: np.random.Generator, facts: Facts, *, distinct: bool = True) -> Iterator[Item]:
    """Items of one split, for ever; `distinct` never repeats an instruction.

    Raises ValueError when the world has no more distinct prompts of that split to give.
    """
    seen: set[str] = set()
    misses = 0
    while misses < _MAX_DRAWS_PER_ROW:
        item = draw_item(rng, facts)
        misses += 1
        if split_of(item) != split or (distinct and item.instruction in seen):
            continue
        seen.add(item.instruction)
        misses = 0
        yield item
    raise ValueError(f"the world has no more distinct {split} prompts after {len(seen)}; ask for fewer rows")


def _take(iterator: Iterator[Item], n: int) -> Iterator[Item]:
    for _ in range(n):
        yield next(iterator)


def _user(item: Item) -> list[dict]:
    return [{"role": "user", "content": item.instruction}]


def _assistant(text: str) -> list[dict]:
    return [{"role": "assistant", "content": text}]


def _about(item: Item) -> dict:
    return {"category": item.category, "difficulty": item.difficulty, "content": item.content}


def passage(rng: np.random.Generator, facts: Facts, statements: int, dialogue_share: float) -> str:
    """A short plain text of about `statements` statements: pages about one subject each, and reported questions with
    their answers.

    Of items that are not in the train split, only the facts that a question of small space asks about may be stated;
    the question itself never is.
    """
    parts: list[str] = []
    done = 0
    while done < statements:
        if rng.random() < dialogue_share:
            item = draw_item(rng, facts)
            if split_of(item) == "train":
                asker, teller = ASKERS[int(rng.integers(len(ASKERS)))], TELLERS[int(rng.integers(len(TELLERS)))]
                said = item.steps if item.steps and rng.random() < 0.7 else f"{item.answer}."
                parts.append(f"{asker} asks {teller}: {item.instruction} {teller} says: {said}")
                done += 1
            continue
        stated: list[str] = []
        for item in draw_page(rng, facts, int(rng.integers(3, 6))):
            if item.statement not in stated and (split_of(item) == "train" or item.small_space):
                stated += ([item.context] if item.context and item.context not in stated else []) + [item.statement]
                done += 1
        parts += stated
    return " ".join(parts)


def text_rows(
    rng_of: Callable[..., np.random.Generator],
    facts: Facts,
    *,
    split: str,
    n: int,
    statements: tuple[int, int],
    dialogue_share: float,
) -> Iterator[dict]:
    """`text/1` rows: n passages of about `statements` (low, high) statements each."""
    rng = rng_of("text", split)
    for _ in range(n):
        wanted = int(rng.integers(statements[0], statements[1] + 1))
        yield {"text": passage(rng, facts, wanted, dialogue_share), "domain": "world"}


def demonstration_rows(
    rng_of, facts: Facts, *, split: str, n: int, wrong_share: float, style_weights: dict[str, float]
) -> Iterator[dict]:
    """`demonstrations/1` rows of mixed quality; the grade of each is in `extra` and nowhere else."""
    rng = rng_of("demonstrations", split)
    for item in _take(items_of(split, rng, facts), n):
        response = draw_response(item, rng, wrong_share=wrong_share, style_weights=style_weights)
        yield {
            "messages": _user(item) + _assistant(response.text),
            "train_turns": [1],
            "category": item.category,
            "difficulty": float(item.difficulty),
            "extra": {
                "quality": response.quality,
                "style": response.style,
                "correct": response.correct,
                "content": item.content,
            },
        }


def comparison_rows(
    rng_of,
    facts: Facts,
    annotator: Annotator,
    *,
    split: str,
    n: int,
    wrong_share: float,
    style_weights: dict[str, float],
) -> Iterator[dict]:
    """`comparisons/1` rows: two different answers to one prompt and a five-point label (low means A, 3 is a tie)."""
    rng = rng_of("comparisons", split)
    for item in _take(items_of(split, rng, facts), n):
        a = draw_response(item, rng, wrong_share=wrong_share, style_weights=style_weights)
        b = a
        while b.text == a.text:
            b = draw_response(item, rng, wrong_share=wrong_share, style_weights=style_weights)
        yield {
            "prompt": _user(item),
            "response_a": _assistant(a.text),
            "response_b": _assistant(b.text),
            "label_kind": "likert",
            "n_points": 5,
            "orientation": "low_is_a",
            "label": annotator.label(a, b, rng),
            "ann": {"annotator_type": "human", "annotator_id": "simulated-1"},
            "extra": _about(item) | {"a": _hidden(a, annotator), "b": _hidden(b, annotator)},
        }


def _hidden(response: Response, annotator: Annotator) -> dict:
    return {"correct": response.correct, "style": response.style, "utility": round(annotator.utility(response), 6)}


def prompt_rows(rng_of, facts: Facts, *, split: str, n: int) -> Iterator[dict]:
    """`prompts/1` rows with gold answers for the verifier `world`."""
    rng = rng_of("prompts", split)
    for item in _take(items_of(split, rng, facts), n):
        yield {
            "prompt": _user(item),
            "domain": "world",
            "category": item.category,
            "answer": item.answer,
            "answer_type": item.answer_type,
            "language": "en",
            "extra": {"verifier": "world", "difficulty": item.difficulty, "content": item.content},
        }
