"""Kinds of task. A skill draws an `Item`: the question with its parts, its answer, and how the same
knowledge reads in plain text.

Every skill has graded difficulty (1 easy .. 3 hard) and several phrasings. The *content* of an item (the words or
numbers asked about) is kept apart from its phrasing, because held-out prompts are held out by content
wherever the space of contents is large enough.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from stages.worldgen.lexicon import ANIMALS, COLORS, FOODS, HOMES, MAX_AGE, MAX_NUMBER, THINGS, WORDS, Facts


@dataclass(frozen=True)
class Item:
    """One question with a verifiable answer.

    `steps` is the reasoning a careful writer shows before the answer ('' when there is nothing to show). `context` and
    `statement` are the plain-text form used for pre-training: what is given, and what is true of it. `wrong` draws a
    plausible wrong (steps, answer).
    """

    category: str
    difficulty: int
    content: str  # canonical content: the unit that is held out
    instruction: str
    answer: str
    answer_type: str  # text | integer
    statement: str
    wrong: Callable[[np.random.Generator], tuple[str, str]]
    steps: str = ""
    context: str = ""
    small_space: bool = False  # too few contents to hold out: held out by exact wording


def _pick(rng: np.random.Generator, options):
    return options[int(rng.integers(len(options)))]


def _sample(rng, options, n: int) -> list:
    return [options[int(i)] for i in rng.choice(len(options), size=n, replace=False)]


def _other(rng, options, value):
    return _pick(rng, [o for o in options if o != value])


def _near(rng, value: int, low: int = 0) -> int:
    """A number close to `value` but different, never below `low`."""
    return _pick(rng, [value + d for d in (-2, -1, 1, 2) if value + d >= low])


def _list(words) -> tuple[str, str]:
    """(the words as shown, the sentence that introduces them)."""
    shown = " ".join(map(str, words))
    return shown, f"{'Numbers' if isinstance(words[0], int) else 'List'}: {shown}."


# ---------------------------------------------------------------- knowledge

_VALUES = {"color": COLORS, "home": HOMES, "food": FOODS, "age": list(range(1, MAX_AGE + 1))}
_ASK = {
    "color": [
        "What color is the {a}?",
        "Which color does the {a} have?",
        "The {a} has what color?",
        "Please say what color the {a} is.",
    ],
    "home": [
        "Where does the {a} live?",
        "In which place does the {a} live?",
        "The {a} lives in what place?",
        "Please say where the {a} lives.",
    ],
    "food": [
        "What does the {a} eat?",
        "Which food does the {a} like?",
        "The {a} eats what?",
        "Please say what the {a} eats.",
    ],
    "age": [
        "How old is the {a}?",
        "How many years old is the {a}?",
        "The {a} is how old?",
        "Please say how old the {a} is.",
    ],
}
_ASK_ANY = [
    "Tell me the {k} of the {a}.",
    "Name the {k} of the {a}.",
    "What is the {k} of the {a}?",
    "Give the {k} of the {a}.",
]


def _fact(attribute: str, animal: str, value) -> str:
    return f"The {attribute} of the {animal} is {value}."


def lookup(rng, facts: Facts) -> Item:
    """Recall one attribute of one animal."""
    attribute, animal = _pick(rng, list(_VALUES)), _pick(rng, ANIMALS)
    value = getattr(facts, attribute)[animal]
    statement = _fact(attribute, animal, value)

    def wrong(r):
        other = _other(r, _VALUES[attribute], value)
        return _fact(attribute, animal, other), str(other)

    ask = _pick(rng, _ASK[attribute] + _ASK_ANY).format(a=animal, k=attribute)
    return Item(
        "lookup",
        1,
        f"{attribute} {animal}",
        ask,
        str(value),
        "integer" if attribute == "age" else "text",
        statement,
        wrong,
        statement,
        small_space=True,
    )


def check(rng, facts: Facts) -> Item:
    """Say whether a claim about an animal is true."""
    attribute, animal = _pick(rng, ["color", "home", "food"]), _pick(rng, ANIMALS)
    value = getattr(facts, attribute)[animal]
    claimed = value if rng.random() < 0.5 else _other(rng, _VALUES[attribute], value)
    answer = "yes" if claimed == value else "no"
    ask = _pick(
        rng,
        [
            "Is {v} the {k} of the {a}?",
            "Is the {k} of the {a} {v}?",
            "True or not: the {k} of the {a} is {v}?",
            "Would you say that the {k} of the {a} is {v}?",
        ],
    )
    fact = _fact(attribute, animal, value)

    def wrong(r):
        shown = _other(r, _VALUES[attribute], value) if answer == "yes" else claimed
        return _fact(attribute, animal, shown), "no" if answer == "yes" else "yes"

    return Item(
        "check",
        2,
        f"{attribute} {animal} {claimed}",
        ask.format(a=animal, v=claimed, k=attribute),
        answer,
        "text",
        f"{fact} Is it {claimed}? {answer}.",
        wrong,
        fact,
    )


def older(rng, facts: Facts) -> Item:
    """Compare the ages of two animals (two look-ups and a comparison)."""
    a, b = _sample(rng, ANIMALS, 2)
    while facts.age[a] == facts.age[b]:
        a, b = _sample(rng, ANIMALS, 2)
    word = _pick(rng, ["older", "younger"])
    answer = (max if word == "older" else min)((a, b), key=lambda x: facts.age[x])
    steps = f"{_fact('age', a, facts.age[a])} {_fact('age', b, facts.age[b])}"
    ask = _pick(
        rng,
        [
            f"Who is {word}, the {a} or the {b}?",
            f"Which one is {word}: the {a} or the {b}?",
            f"Tell me who is {word}, the {a} or the {b}.",
            f"Of the {a} and the {b}, who is {word}?",
        ],
    )
    return Item(
        "older",
        3,
        f"{word} {a} {b}",
        ask,
        answer,
        "text",
        f"{steps} The {word} one is the {answer}.",
        lambda r: (steps, b if answer == a else a),
        steps,
    )


def age_sum(rng, facts: Facts) -> Item:
    """Add the ages of two animals (two look-ups and an addition)."""
    a, b = _sample(rng, ANIMALS, 2)
    x, y = facts.age[a], facts.age[b]
    ask = _pick(
        rng,
        [
            f"How old are the {a} and the {b} together?",
            f"Add the ages of the {a} and the {b}.",
            f"What is the age of the {a} plus the age of the {b}?",
            f"Tell me the ages of the {a} and the {b} added up.",
        ],
    )
    stem = f"{_fact('age', a, x)} {_fact('age', b, y)} {x} plus {y} is "

    def wrong(r):
        v = _near(r, x + y, 1)
        return f"{stem}{v}.", str(v)

    steps = f"{stem}{x + y}."
    return Item("age_sum", 3, f"{a} {b}", ask, str(x + y), "integer", steps, wrong, steps)


# ---------------------------------------------------------------- lists of words


def _mixed(rng, n: int) -> list[str]:
    """One animal among n-1 things, in random order."""
    words = _sample(rng, THINGS, n - 1) + [_pick(rng, ANIMALS)]
    return [words[int(i)] for i in rng.permutation(n)]


def _animal_in(words: list[str]) -> str:
    return next(w for w in words if w in ANIMALS)


def find_animal(rng, facts: Facts, words: list[str] | None = None) -> Item:
    """Name the animal in a list of things."""
    words = words or _mixed(rng, int(rng.integers(2, 6)))
    animal, n = _animal_in(words), len(words)
    shown, context = _list(words)
    ask = _pick(
        rng,
        [
            f"Which word is an animal: {shown}?",
            f"Find the animal in: {shown}",
            f"Name the animal among {shown}.",
            f"One of these is an animal: {shown}. Which one?",
        ],
    )

    def wrong(r):
        thing = _other(r, words, animal)
        return f"The animal is the {thing}.", thing

    steps = f"The animal is the {animal}."
    return Item("find_animal", 1 if n <= 3 else 2, shown, ask, animal, "text", steps, wrong, steps, context)


def animal_fact(rng, facts: Facts, words: list[str] | None = None) -> Item:
    """An attribute of the one animal in a list of things (find, then look up)."""
    attribute = _pick(rng, list(_VALUES))
    words = words or _mixed(rng, int(rng.integers(2, 5)))
    animal = _animal_in(words)
    value = getattr(facts, attribute)[animal]
    shown, context = _list(words)
    ask = _pick(
        rng,
        [
            f"What is the {attribute} of the animal in: {shown}?",
            f"Find the animal and name its {attribute}: {shown}",
            f"Look at {shown}. Tell me the {attribute} of the animal.",
            f"Name the {attribute} of the animal among {shown}.",
        ],
    )
    start = f"The animal is the {animal}. "

    def wrong(r):
        v = _other(r, _VALUES[attribute], value)
        return start + _fact(attribute, animal, v), str(v)

    steps = start + _fact(attribute, animal, value)
    return Item(
        "animal_fact",
        3,
        f"{attribute} {shown}",
        ask,
        str(value),
        "integer" if attribute == "age" else "text",
        steps,
        wrong,
        steps,
        context,
    )


def count(rng, facts: Facts, words: list[str] | None = None) -> Item:
    """Count the words of a list."""
    words = words or _sample(rng, WORDS, int(rng.integers(2, 7)))
    n = len(words)
    shown, context = _list(words)
    ask = _pick(
        rng,
        [
            f"How many words are in: {shown}?",
            f"Count the words: {shown}",
            f"Count these: {shown}",
            f"Tell me the number of words in {shown}.",
        ],
    )

    def wrong(r):
        v = _near(r, n, 1)
        return f"There are {v} words.", str(v)

    steps = f"There are {n} words."
    return Item("count", 1 if n <= 3 else 2, shown, ask, str(n), "integer", steps, wrong, steps, context)


def upper(rng, facts: Facts, words: list[str] | None = None) -> Item:
    """Write a word in capital letters."""
    word = _pick(rng, words or WORDS)
    ask = _pick(
        rng,
        [
            f"Write in capitals: {word}",
            f"Put {word} in capital letters.",
            f"Shout: {word}",
            f"Make this big: {word}",
            f"Use capital letters for {word}.",
            f"Please shout {word}.",
            f"How do you write {word} in capitals?",
        ],
    )

    def wrong(r):
        return "", word if r.random() < 0.3 else _other(r, WORDS, word).upper()

    return Item(
        "upper", 1, word, ask, word.upper(), "text", f"{word} in capitals is {word.upper()}.", wrong, small_space=True
    )


def end_word(rng, facts: Facts, words: list[str] | None = None) -> Item:
    """Name the first or last word of a list."""
    words = words or _sample(rng, WORDS, int(rng.integers(2, 5)))
    n, where = len(words), _pick(rng, ["first", "last"])
    answer = words[0 if where == "first" else -1]
    shown, context = _list(words)
    ask = _pick(
        rng,
        [
            f"What is the {where} word of {shown}?",
            f"Name the {where} word: {shown}",
            f"Give me the {where} word in {shown}.",
            f"Which word is {where} in: {shown}?",
        ],
    )

    def wrong(r):
        other = _other(r, words, answer)
        return f"The {where} word is {other}.", other

    steps = f"The {where} word is {answer}."
    return Item("end_word", 1 if n == 2 else 2, f"{where} {shown}", ask, answer, "text", steps, wrong, steps, context)


# ---------------------------------------------------------------- numbers


def add(rng, facts: Facts) -> Item:
    """Add two small numbers."""
    x, y = (int(v) for v in rng.integers(1, 10, size=2))
    ask = _pick(
        rng,
        [
            f"What is {x} plus {y}?",
            f"Add {x} and {y}.",
            f"Compute {x} + {y}.",
            f"How much is {x} and {y} together?",
            f"Tell me the sum of {x} and {y}.",
            f"{x} plus {y} is how much?",
        ],
    )
    stem = f"{x} plus {y} is "

    def wrong(r):
        v = _near(r, x + y, 1)
        return f"{stem}{v}.", str(v)

    return Item(
        "add", 1, f"{x} {y}", ask, str(x + y), "integer", f"{stem}{x + y}.", wrong, f"{stem}{x + y}.", small_space=True
    )


def successor(rng, facts: Facts) -> Item:
    """Name the number before or after another."""
    number, where = int(rng.integers(2, MAX_NUMBER)), _pick(rng, ["after", "before"])
    answer = number + (1 if where == "after" else -1)
    ask = _pick(
        rng,
        [
            f"Which number comes {where} {number}?",
            f"What comes right {where} {number}?",
            f"Name the number {where} {number}.",
            f"Tell me the number that is just {where} {number}.",
            f"Count on: what is {where} {number}?",
        ],
    )
    stem = f"The number {where} {number} is "

    def wrong(r):
        v = _near(r, answer, 1)
        return f"{stem}{v}.", str(v)

    return Item(
        "successor",
        1,
        f"{where} {number}",
        ask,
        str(answer),
        "integer",
        f"{stem}{answer}.",
        wrong,
        f"{stem}{answer}.",
        small_space=True,
    )


def add_three(rng, facts: Facts) -> Item:
    """Add three small numbers, one after the other."""
    x, y, z = (int(v) for v in rng.integers(1, 6, size=3))
    ask = _pick(
        rng,
        [
            f"What is {x} plus {y} plus {z}?",
            f"Add {x}, {y} and {z}.",
            f"Compute {x} + {y} + {z}.",
            f"Tell me the sum of {x}, {y} and {z}.",
        ],
    )
    stem = f"{x} plus {y} is {x + y}. {x + y} plus {z} is "

    def wrong(r):
        v = _near(r, x + y + z, 1)
        return f"{stem}{v}.", str(v)

    return Item(
        "add_three",
        3,
        f"{x} {y} {z}",
        ask,
        str(x + y + z),
        "integer",
        f"{stem}{x + y + z}.",
        wrong,
        f"{stem}{x + y + z}.",
    )


def extreme(rng, facts: Facts, numbers: list[int] | None = None) -> Item:
    """Name the largest or smallest of two to four numbers."""
    numbers = numbers or _sample(rng, range(1, MAX_NUMBER + 1), int(rng.integers(2, 5)))
    n, word = len(numbers), _pick(rng, ["largest", "smallest"])
    answer = (max if word == "largest" else min)(numbers)
    shown, context = _list(numbers)
    ask = _pick(
        rng,
        [
            f"Which is the {word} number: {shown}?",
            f"Name the {word} of {shown}.",
            f"Find the {word}: {shown}",
            f"Tell me the {word} number in {shown}.",
        ],
    )

    def wrong(r):
        v = _other(r, numbers, answer)
        return f"The {word} is {v}.", str(v)

    return Item(
        "extreme",
        1 if n == 2 else 2,
        f"{word} {shown}",
        ask,
        str(answer),
        "integer",
        f"The {word} is {answer}.",
        wrong,
        f"The {word} is {answer}.",
        context,
    )


def sort_numbers(rng, facts: Facts, numbers: list[int] | None = None) -> Item:
    """Sort two to four numbers, smallest first."""
    numbers = numbers or _sample(rng, range(1, MAX_NUMBER + 1), int(rng.integers(2, 5)))
    n, ordered = len(numbers), sorted(numbers)
    shown, context = _list(numbers)
    ask = _pick(
        rng,
        [
            f"Sort: {shown}",
            f"Put these numbers in order: {shown}",
            f"Sort the numbers {shown}.",
            f"Order {shown} from small to large.",
        ],
    )

    def wrong(r):
        out = list(ordered)
        i, j = _sample(r, range(n), 2)
        out[i], out[j] = out[j], out[i]
        return "", shown if r.random() < 0.3 and numbers != ordered else " ".join(map(str, out))

    return Item(
        "sort_numbers",
        n - 1,
        shown,
        ask,
        " ".join(map(str, ordered)),
        "text",
        f"Sorted: {' '.join(map(str, ordered))}.",
        wrong,
        context=context,
    )


SKILLS: dict[str, Callable[[np.random.Generator, Facts], Item]] = {
    f.__name__: f
    for f in (
        lookup,
        check,
        find_animal,
        count,
        upper,
        end_word,
        successor,
        add,
        extreme,
        sort_numbers,
        animal_fact,
        add_three,
        older,
        age_sum,
    )
}


def draw_item(rng: np.random.Generator, facts: Facts, skill: str | None = None) -> Item:
    """One item of `skill`, or of a skill drawn uniformly."""
    return SKILLS[skill or _pick(rng, list(SKILLS))](rng, facts)


def draw_page(rng: np.random.Generator, facts: Facts, statements: int) -> list[Item]:
    """Items about one subject, as a text would treat it: a list, a few numbers, some animals, or some sums."""
    subject = int(rng.integers(4))
    if subject == 0:
        words = _mixed(rng, int(rng.integers(2, 5)))
        kinds = [find_animal, animal_fact, count, end_word, end_word, upper]
        return [_pick(rng, kinds)(rng, facts, words) for _ in range(statements)]
    if subject == 1:
        numbers = _sample(rng, range(1, MAX_NUMBER + 1), int(rng.integers(2, 5)))
        return [_pick(rng, [extreme, extreme, sort_numbers])(rng, facts, numbers) for _ in range(statements)]
    kinds = [lookup, lookup, check, older, age_sum] if subject == 2 else [add, add, add_three, successor]
    return [_pick(rng, kinds)(rng, facts) for _ in range(statements)]
