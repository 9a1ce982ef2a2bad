"""Kinds of task. A skill draws an `Item`: the question with its parts, its answer, and how the same
knowledge reads in plain text.

Every skill has graded difficulty (1 easy .. 3 hard) and several phrasings. The *content* of an item (the words or
numbers asked about) is kept apart from its phrasing, because held-out prompts are held out by content
wherever the space of contents is large enough.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from stages.worldgen.lexicon import ANIMALS, COLORS, FOODS, HOMES, MAX_AGE, ORDINALS, WORDS, Facts


@dataclass(frozen=True)
class Item:
    """One question with a verifiable answer.

    `steps` is the reasoning a careful writer shows before the answer ('' when there is nothing to show).
    `sentence` is the plain-text form used for pre-training. `wrong` draws a plausible wrong (steps, answer).
    """

    category: str
    difficulty: int
    content: str                 # canonical content: the unit that is held out
    instruction: str
    answer: str
    answer_type: str             # text | integer
    sentence: str
    wrong: Callable[[np.random.Generator], tuple[str, str]]
    steps: str = ""
    small_space: bool = field(default=False)   # too few contents to hold out: held out by exact wording


def _pick(rng: np.random.Generator, options):
    return options[int(rng.integers(len(options)))]


def _sample(rng, options, n: int) -> list:
    return [options[int(i)] for i in rng.choice(len(options), size=n, replace=False)]


def _other(rng, options, value):
    return _pick(rng, [o for o in options if o != value])


def _near(rng, value: int, low: int = 0) -> int:
    """A number close to `value` but different, never below `low`."""
    options = [value + d for d in (-2, -1, 1, 2) if value + d >= low]
    return _pick(rng, options)


def _shuffled_wrong(rng, words: list[str]) -> list[str]:
    """A list that is almost `words`: two places swapped, one word dropped, or one replaced."""
    out = list(words)
    kind = int(rng.integers(3))
    if kind == 0 and len(set(out)) > 1:
        i, j = _sample(rng, range(len(out)), 2)
        out[i], out[j] = out[j], out[i]
    elif kind == 1 and len(out) > 2:
        del out[int(rng.integers(len(out)))]
    else:
        i = int(rng.integers(len(out)))
        out[i] = _other(rng, WORDS, out[i])
    if out == words:
        out[-1] = _other(rng, WORDS, out[-1])
    return out


# ---------------------------------------------------------------- knowledge

_LOOKUP = {
    "color": (["What color is the {a}?", "Tell me the color of the {a}.", "Which color does the {a} have?",
               "Name the color of the {a}.", "The {a} has what color?", "Please say what color the {a} is."],
              "The {a} is {v}.", COLORS),
    "home": (["Where does the {a} live?", "Tell me the home of the {a}.", "In which place does the {a} live?",
              "Name the home of the {a}.", "The {a} lives in what place?", "Please say where the {a} lives."],
             "The {a} lives in the {v}.", HOMES),
    "food": (["What does the {a} eat?", "Tell me the food of the {a}.", "Which food does the {a} like?",
              "Name the food of the {a}.", "The {a} eats what?", "Please say what the {a} eats."],
             "The {a} eats {v}.", FOODS),
    "age": (["How old is the {a}?", "Tell me the age of the {a}.", "What age does the {a} have?",
             "Name the age of the {a}.", "The {a} is how old?", "Please say how old the {a} is."],
            "The {a} is {v} years old.", list(range(1, MAX_AGE + 1))),
}


def lookup(rng, facts: Facts) -> Item:
    """Recall one attribute of one animal."""
    attribute, animal = _pick(rng, list(_LOOKUP)), _pick(rng, ANIMALS)
    phrasings, statement, values = _LOOKUP[attribute]
    value = getattr(facts, attribute)[animal]
    sentence = statement.format(a=animal, v=value)

    def wrong(r):
        other = _other(r, values, value)
        return statement.format(a=animal, v=other), str(other)

    return Item("lookup", 1, f"{attribute} {animal}", _pick(rng, phrasings).format(a=animal), str(value),
                "integer" if attribute == "age" else "text", sentence, wrong, sentence, small_space=True)


def check(rng, facts: Facts) -> Item:
    """Say whether a claim about an animal is true."""
    attribute, animal = _pick(rng, ["color", "home", "food"]), _pick(rng, ANIMALS)
    _, statement, values = _LOOKUP[attribute]
    value = getattr(facts, attribute)[animal]
    claimed = value if rng.random() < 0.5 else _other(rng, values, value)
    ask = {"color": ["Is the {a} {v}?", "True or not: the {a} is {v}?", "Does the {a} have the color {v}?"],
           "home": ["Does the {a} live in the {v}?", "True or not: the {a} lives in the {v}?",
                    "Is the {v} the home of the {a}?"],
           "food": ["Does the {a} eat {v}?", "True or not: the {a} eats {v}?", "Is {v} the food of the {a}?"]}
    answer = "yes" if claimed == value else "no"
    fact = statement.format(a=animal, v=value)

    def wrong(r):
        flipped = "no" if answer == "yes" else "yes"
        shown = _other(r, values, value) if answer == "yes" else claimed
        return statement.format(a=animal, v=shown), flipped

    sentence = f"{fact} So is it {claimed}? {answer}."
    return Item("check", 1, f"{attribute} {animal} {claimed}",
                _pick(rng, ask[attribute]).format(a=animal, v=claimed), answer, "text", sentence, wrong, fact)


def older(rng, facts: Facts) -> Item:
    """Compare the ages of two animals (two look-ups and a comparison)."""
    a, b = _sample(rng, ANIMALS, 2)
    while facts.age[a] == facts.age[b]:
        a, b = _sample(rng, ANIMALS, 2)
    word = _pick(rng, ["older", "younger"])
    better = max if word == "older" else min
    answer = better((a, b), key=lambda x: facts.age[x])
    steps = f"The {a} is {facts.age[a]} years old. The {b} is {facts.age[b]} years old."
    ask = _pick(rng, [f"Who is {word}, the {a} or the {b}?", f"Which one is {word}: the {a} or the {b}?",
                      f"Tell me who is {word}, the {a} or the {b}.", f"Of the {a} and the {b}, who is {word}?"])

    def wrong(r):
        return steps, b if answer == a else a

    return Item("older", 3, f"{word} {a} {b}", ask, answer, "text",
                f"{steps} So the {answer} is {word}.", wrong, steps)


def age_sum(rng, facts: Facts) -> Item:
    """Add the ages of two animals (two look-ups and an addition)."""
    a, b = _sample(rng, ANIMALS, 2)
    x, y = facts.age[a], facts.age[b]
    ask = _pick(rng, [f"How old are the {a} and the {b} together?", f"Add the ages of the {a} and the {b}.",
                      f"What is the age of the {a} plus the age of the {b}?",
                      f"Tell me the ages of the {a} and the {b} added up."])
    stem = f"The {a} is {x} years old. The {b} is {y} years old. {x} plus {y} is "

    def wrong(r):
        v = _near(r, x + y, 1)
        return f"{stem}{v}.", str(v)

    steps = f"{stem}{x + y}."
    return Item("age_sum", 3, f"{a} {b}", ask, str(x + y), "integer", steps, wrong, steps)


def color_of(rng, facts: Facts) -> Item:
    """Colour of the first or last animal of a list (select, then look up)."""
    names = _sample(rng, ANIMALS, int(rng.integers(2, 5)))
    where = _pick(rng, ["first", "last"])
    animal = names[0] if where == "first" else names[-1]
    value, shown = facts.color[animal], " ".join(names)
    steps = f"The {where} one is {animal}. The {animal} is {value}."
    ask = _pick(rng, [f"What color is the {where} animal in: {shown}?", f"Color of the {where} animal: {shown}",
                      f"Look at: {shown}. Which color is the {where} one?",
                      f"Name the color of the {where} animal of {shown}."])

    def wrong(r):
        other = _pick(r, [n for n in names if facts.color[n] != value] or [animal])
        v = facts.color[other] if other != animal else _other(r, COLORS, value)
        return f"The {where} one is {other}. The {other} is {v}.", v

    return Item("color_of", 3, f"{where} {shown}", ask, value, "text", f"List: {shown}. {steps}", wrong, steps)


# ---------------------------------------------------------------- lists of words

def repeat(rng, facts: Facts) -> Item:
    """Copy a list."""
    n = int(rng.integers(2, 6))
    words = _sample(rng, WORDS, n)
    shown = " ".join(words)
    ask = _pick(rng, [f"Repeat: {shown}", f"Say these words again: {shown}", f"Copy the words {shown}.",
                      f"Write the same words: {shown}", f"Please repeat the list {shown}."])
    return Item("repeat", 1 if n <= 3 else 2, shown, ask, shown, "text", f"The words {shown} again: {shown}.",
                lambda r: ("", " ".join(_shuffled_wrong(r, words))))


def reverse(rng, facts: Facts) -> Item:
    """Reverse a list."""
    n = int(rng.integers(2, 6))
    words = _sample(rng, WORDS, n)
    shown, back = " ".join(words), words[::-1]
    ask = _pick(rng, [f"Reverse: {shown}", f"Write these words backwards: {shown}", f"Reverse the list {shown}.",
                      f"Say {shown} in reverse order.", f"Turn the order around: {shown}"])

    def wrong(r):
        return "", shown if r.random() < 0.4 else " ".join(_shuffled_wrong(r, back))

    return Item("reverse", 1 if n == 2 else 2 if n <= 4 else 3, shown, ask, " ".join(back), "text",
                f"The words {shown} backwards: {' '.join(back)}.", wrong)


def upper(rng, facts: Facts) -> Item:
    """Write words in capital letters."""
    n = int(rng.integers(1, 5))
    words = _sample(rng, WORDS, n)
    shown = " ".join(words)
    ask = _pick(rng, [f"Write in capitals: {shown}", f"Put {shown} in capital letters.", f"Shout: {shown}",
                      f"Make these words big: {shown}", f"Use capital letters for {shown}."])

    def wrong(r):
        return "", shown if r.random() < 0.3 else " ".join(_shuffled_wrong(r, words)).upper()

    return Item("upper", 1 if n <= 2 else 2, shown, ask, shown.upper(), "text",
                f"The words {shown} in capitals: {shown.upper()}.", wrong, small_space=n == 1)


def reverse_upper(rng, facts: Facts) -> Item:
    """Reverse a list, then write it in capitals (two operations)."""
    n = int(rng.integers(2, 5))
    words = _sample(rng, WORDS, n)
    shown, back = " ".join(words), words[::-1]
    joined = " ".join(back)
    ask = _pick(rng, [f"Reverse and write in capitals: {shown}", f"Turn around and shout: {shown}",
                      f"Write {shown} backwards in capital letters.", f"Reverse {shown}, then use capitals."])

    def wrong(r):
        bad = _shuffled_wrong(r, back)
        return f"Backwards: {' '.join(bad)}.", " ".join(bad).upper()

    steps = f"Backwards: {joined}."
    return Item("reverse_upper", 3, shown, ask, joined.upper(), "text",
                f"The words {shown} backwards: {joined}. In capitals: {joined.upper()}.", wrong, steps)


def select(rng, facts: Facts) -> Item:
    """Name the n-th, first or last word of a list."""
    n = int(rng.integers(2, 6))
    words = _sample(rng, WORDS, n)
    i = int(rng.integers(n))
    where = "last" if i == n - 1 and rng.random() < 0.7 else ORDINALS[i]
    shown = " ".join(words)
    ask = _pick(rng, [f"What is the {where} word of {shown}?", f"Name the {where} word: {shown}",
                      f"Give me the {where} word in {shown}.", f"Which word is {where} in: {shown}?"])
    return Item("select", 1 if i == 0 or where == "last" else 2, f"{where} {shown}", ask, words[i], "text",
                f"List: {shown}. The {where} one is {words[i]}.", lambda r: ("", _other(r, words, words[i])))


def count(rng, facts: Facts) -> Item:
    """Count the words of a list."""
    n = int(rng.integers(1, 7))
    words = [_pick(rng, WORDS) for _ in range(n)]
    shown = " ".join(words)
    ask = _pick(rng, [f"How many words are in: {shown}?", f"Count the words: {shown}",
                      f"Count these: {shown}", f"Tell me the number of words in {shown}."])
    return Item("count", 1 if n <= 3 else 2, shown, ask, str(n), "integer",
                f"The list {shown} has {n} words.", lambda r: ("", str(_near(r, n, 1))), small_space=n == 1)


def member(rng, facts: Facts) -> Item:
    """Say whether a word is in a list."""
    n = int(rng.integers(2, 6))
    words = _sample(rng, WORDS, n)
    inside = rng.random() < 0.5
    word = _pick(rng, words) if inside else _pick(rng, [w for w in WORDS if w not in words])
    shown, answer = " ".join(words), "yes" if inside else "no"
    ask = _pick(rng, [f"Is {word} in the list {shown}?", f"Does {shown} contain {word}?",
                      f"Can you find {word} in: {shown}?", f"Look for {word} in {shown}. Is it there?"])
    return Item("member", 1 if n <= 3 else 2, f"{word} in {shown}", ask, answer, "text",
                f"List: {shown}. Is {word} there? {answer}.", lambda r: ("", "no" if inside else "yes"))


# ---------------------------------------------------------------- numbers

def add(rng, facts: Facts) -> Item:
    """Add two or three small numbers."""
    level = int(rng.integers(1, 4))
    if level < 3:
        x, y = (int(rng.integers(1, 11)), int(rng.integers(1, 11))) if level == 1 else (
            int(rng.integers(8, 16)), int(rng.integers(2, 13)))
        ask = _pick(rng, [f"What is {x} plus {y}?", f"Add {x} and {y}.", f"Compute {x} + {y}.",
                          f"How much is {x} and {y} together?", f"Tell me the sum of {x} and {y}."])
        stem, total, parts = f"{x} plus {y} is ", x + y, f"{x} {y}"
    else:
        x, y, z = (int(v) for v in rng.integers(1, 10, size=3))
        ask = _pick(rng, [f"What is {x} plus {y} plus {z}?", f"Add {x}, {y} and {z}.", f"Compute {x} + {y} + {z}.",
                          f"Tell me the sum of {x}, {y} and {z}."])
        stem, total, parts = f"{x} plus {y} is {x + y}. {x + y} plus {z} is ", x + y + z, f"{x} {y} {z}"

    def wrong(r):
        v = _near(r, total, 1)
        return f"{stem}{v}.", str(v)

    return Item("add", level, parts, ask, str(total), "integer", f"{stem}{total}.", wrong, f"{stem}{total}.",
                small_space=level < 3)


def compare(rng, facts: Facts) -> Item:
    """Name the larger or smaller of two numbers."""
    x, y = _sample(rng, range(1, 31), 2)
    word = _pick(rng, ["larger", "smaller"])
    answer = max(x, y) if word == "larger" else min(x, y)
    ask = _pick(rng, [f"Which is {word}, {x} or {y}?", f"Name the {word} number: {x} or {y}?",
                      f"Of {x} and {y}, which one is {word}?", f"Tell me the {word} of {x} and {y}."])
    return Item("compare", 1, f"{word} {x} {y}", ask, str(answer), "integer",
                f"Of {x} and {y}, {answer} is {word}.", lambda r: ("", str(x + y - answer)))


def sort_numbers(rng, facts: Facts) -> Item:
    """Sort three or four numbers, smallest first."""
    n = int(rng.integers(3, 5))
    numbers = _sample(rng, range(1, 31), n)
    shown, ordered = " ".join(map(str, numbers)), sorted(numbers)
    ask = _pick(rng, [f"Sort: {shown}", f"Put these numbers in order: {shown}", f"Sort the numbers {shown}.",
                      f"Order {shown} from small to large."])

    def wrong(r):
        out = list(ordered)
        i, j = _sample(r, range(n), 2)
        out[i], out[j] = out[j], out[i]
        return "", shown if r.random() < 0.3 and numbers != ordered else " ".join(map(str, out))

    return Item("sort_numbers", n - 1, shown, ask, " ".join(map(str, ordered)), "text",
                f"The numbers {shown} in order: {' '.join(map(str, ordered))}.", wrong)


SKILLS: dict[str, Callable[[np.random.Generator, Facts], Item]] = {
    f.__name__: f for f in (lookup, check, repeat, reverse, upper, select, count, member, add, compare,
                            sort_numbers, reverse_upper, color_of, older, age_sum)}


def draw_item(rng: np.random.Generator, facts: Facts, skill: str | None = None) -> Item:
    """One item of `skill`, or of a skill drawn uniformly."""
    return SKILLS[skill or _pick(rng, list(SKILLS))](rng, facts)
