"""Words of the world and the facts that hold in it (drawn from a seed)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

ANIMALS = "fox cat dog owl bear wolf deer goat duck frog crow hare lion seal swan toad".split()
THINGS = "key cup hat box pen map bell coin lamp rope sock drum ball book fork ring".split()
WORDS = ANIMALS + THINGS
COLORS = "red blue green black white brown grey gold".split()
HOMES = "forest river cave barn lake hill garden desert".split()
FOODS = "berries nuts fish grass corn seeds honey leaves".split()
MAX_AGE = 9
MAX_NUMBER = 20


@dataclass(frozen=True)
class Facts:
    """Attributes of every animal: colour, home, food (words) and age (1..MAX_AGE years)."""

    color: dict[str, str]
    home: dict[str, str]
    food: dict[str, str]
    age: dict[str, int]


def draw_facts(rng: np.random.Generator) -> Facts:
    """One consistent fact base; every attribute value is used about equally often."""

    def assign(values: list) -> dict:
        repeated = [values[i % len(values)] for i in range(len(ANIMALS))]
        order = rng.permutation(len(ANIMALS))
        return {animal: repeated[j] for animal, j in zip(ANIMALS, order)}

    return Facts(assign(COLORS), assign(HOMES), assign(FOODS), assign(list(range(1, MAX_AGE + 1))))
