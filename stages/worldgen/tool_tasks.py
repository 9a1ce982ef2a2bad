"""Questions of the world that need a tool, and demonstrations of how people answer them (``synth.tool_data``,
``recipe.tool_rl``).

What a thing costs differs from shop to shop and is written nowhere but in the shop's table, which only ``search`` can
see; sums and products are too large for a small model's head. A demonstration calls tools, reads what they say, and
answers. As elsewhere in this world a share of them is bad: guesses without a tool, forgotten look-ups, wrong operators,
calls that cannot be read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from stages.acting.tools import BadCall, calculate, render_call, search, system_message
from stages.worldgen.generate import HELD_OUT_SHARE
from stages.worldgen.lexicon import THINGS
from stages.worldgen.skills import _pick, _sample

TOOLS_OF_THE_WORLD = ("calculator", "search")
SHOPS = (100, 999)
PRICES = (2, 30)
THINGS_PER_SHOP = 6


@dataclass(frozen=True)
class ToolTask:
    """A question, its answer, the shop's table, and the calls that a careful worker makes: (tool, argument) in
    order.
    """

    category: str
    difficulty: int
    unit: str  # what is held out: a shop, or the numbers
    instruction: str
    answer: str
    answer_type: str
    table: dict[str, str]
    calls: tuple[tuple[str, str], ...]
    wrong: str  # a careless worker's calculation or look-up


def split_of_unit(unit: str) -> str:
    """The one split of a shop or of a pair of numbers."""
    share = int.from_bytes(hashlib.sha256(f"tools|{unit}".encode()).digest()[:8], "big") / 2**64
    if share < HELD_OUT_SHARE["test"]:
        return "test"
    return "validation" if share < sum(HELD_OUT_SHARE.values()) else "train"


def shop_table(rng_of: Callable[..., np.random.Generator], number: int) -> dict[str, str]:
    """What the things in a shop cost, the same whenever the shop is visited."""
    rng = rng_of("shop", number)
    return {thing: str(int(rng.integers(PRICES[0], PRICES[1] + 1))) for thing in _sample(rng, THINGS, THINGS_PER_SHOP)}


def arithmetic(rng, rng_of) -> ToolTask:
    """A sum, difference or product of numbers that are too large to do in the head."""
    word, sign = _pick(rng, [("plus", "+"), ("minus", "-"), ("times", "*")])
    y, x = sorted(int(v) for v in (rng.integers(2, 10) if sign == "*" else rng.integers(11, 41), rng.integers(11, 41)))
    expression, other = f"{x} {sign} {y}", f"{x} {_pick(rng, [s for s in '+-*' if s != sign])} {y}"
    ask = _pick(
        rng,
        [
            f"What is {x} {word} {y}?",
            f"Compute {x} {word} {y}.",
            f"How much is {x} {word} {y}?",
            f"Tell me {x} {word} {y}.",
        ],
    )
    return ToolTask(
        "arithmetic", 1, f"{x} {y}", ask, calculate(expression), "integer", {}, (("calculator", expression),), other
    )


def price(rng, rng_of) -> ToolTask:
    """What one thing costs in a shop."""
    number, table = _shop(rng, rng_of)
    thing, other = _sample(rng, list(table), 2)
    ask = _pick(
        rng,
        [
            f"What does the {thing} cost in shop {number}?",
            f"How much is the {thing} in shop {number}?",
            f"Tell me the price of the {thing} in shop {number}.",
            f"In shop {number}, what is the price of the {thing}?",
        ],
    )
    return ToolTask("price", 1, f"shop {number}", ask, table[thing], "integer", table, (("search", thing),), other)


def several(rng, rng_of) -> ToolTask:
    """What several pieces of one thing cost: a look-up and a product."""
    number, table = _shop(rng, rng_of)
    thing, n = _pick(rng, list(table)), int(rng.integers(2, 10))
    ask = _pick(
        rng,
        [
            f"What do {n} pieces of the {thing} cost in shop {number}?",
            f"How much do I pay for {n} times the {thing} in shop {number}?",
            f"In shop {number}, what is the price of the {thing} times {n}?",
        ],
    )
    expression = f"{n} * {table[thing]}"
    return ToolTask(
        "several",
        2,
        f"shop {number}",
        ask,
        calculate(expression),
        "integer",
        table,
        (("search", thing), ("calculator", expression)),
        f"{n} + {table[thing]}",
    )


def together(rng, rng_of) -> ToolTask:
    """What two things cost together: two look-ups and a sum."""
    number, table = _shop(rng, rng_of)
    a, b = _sample(rng, list(table), 2)
    ask = _pick(
        rng,
        [
            f"What do the {a} and the {b} cost together in shop {number}?",
            f"How much are the {a} and the {b} together in shop {number}?",
            f"In shop {number}, what do I pay for the {a} and the {b}?",
        ],
    )
    expression = f"{table[a]} + {table[b]}"
    return ToolTask(
        "together",
        3,
        f"shop {number}",
        ask,
        calculate(expression),
        "integer",
        table,
        (("search", a), ("search", b), ("calculator", expression)),
        f"{table[a]} * {table[b]}",
    )


def cheaper(rng, rng_of) -> ToolTask:
    """Which of two things is cheaper: two look-ups and a comparison."""
    number, table = _shop(rng, rng_of)
    a, b = _sample(rng, list(table), 2)
    while table[a] == table[b]:
        a, b = _sample(rng, list(table), 2)
    word = _pick(rng, ["cheaper", "dearer"])
    answer = (min if word == "cheaper" else max)((a, b), key=lambda x: int(table[x]))
    ask = _pick(
        rng,
        [
            f"Which is {word} in shop {number}, the {a} or the {b}?",
            f"In shop {number}, what is {word}: the {a} or the {b}?",
            f"Of the {a} and the {b}, which one is {word} in shop {number}?",
        ],
    )
    return ToolTask(
        "cheaper",
        2,
        f"shop {number}",
        ask,
        answer,
        "text",
        table,
        (("search", a), ("search", b)),
        b if answer == a else a,
    )


KINDS = (arithmetic, price, several, together, cheaper)


def _shop(rng, rng_of) -> tuple[int, dict[str, str]]:
    number = int(rng.integers(SHOPS[0], SHOPS[1] + 1))
    return number, shop_table(rng_of, number)


def tasks_of(split: str, purpose: str, rng_of) -> Iterator[ToolTask]:
    """Tasks of one split for ever, no question twice."""
    rng, seen = rng_of("tool-" + purpose, split), set()
    while True:
        task = _pick(rng, KINDS)(rng, rng_of)
        if split_of_unit(task.unit) == split and task.instruction not in seen:
            seen.add(task.instruction)
            yield task


def demonstration(task: ToolTask, rng: np.random.Generator, wrong_share: float) -> tuple[list[dict], str]:
    """(messages, manner) of one worker: careful, corrected (a call that could not be read, then the right one),
    careless or guess.
    """
    messages = [system_message(TOOLS_OF_THE_WORLD), {"role": "user", "content": task.instruction}]
    manner = "careful" if rng.random() >= wrong_share else _pick(rng, ["guess", "careless"])
    if manner == "guess":
        guess = _pick(rng, list(task.table)) if task.answer_type == "text" else str(int(rng.integers(2, 200)))
        return messages + [{"role": "assistant", "content": f"Answer: {guess}."}], manner
    calls = list(task.calls)
    if manner == "careless":
        calls[-1] = (calls[-1][0], task.wrong)
    if manner == "careful" and rng.random() < 0.1:
        manner = "corrected"
        broken = f"{calls[0][0]}({calls[0][1]!r})"
        messages += _said(broken, "error: write calls as name(argument='value')")
    result = ""
    for tool, argument in calls:
        try:
            result = f"{argument} = {calculate(argument)}" if tool == "calculator" else search(argument, task.table)
        except BadCall as error:
            result = str(error)
        messages += _said(render_call(tool, {"expression" if tool == "calculator" else "query": argument}), result)
    answer = task.answer
    if manner == "careless":
        answer = task.wrong if task.answer_type == "text" else result.split()[-1]
    return messages + [{"role": "assistant", "content": f"Answer: {answer}."}], manner


def _said(call: str, result: str) -> list[dict]:
    return [{"role": "assistant", "content": call}, {"role": "tool", "content": result}]


def tool_demonstration_rows(rng_of, *, split: str, n: int, wrong_share: float) -> Iterator[dict]:
    """`demonstrations/1` rows of tool use; every assistant turn is trained, what tools said is not."""
    rng = rng_of("tool-manners", split)
    for _, task in zip(range(n), tasks_of(split, "demonstrations", rng_of)):
        messages, manner = demonstration(task, rng, wrong_share)
        yield {
            "messages": messages,
            "train_turns": [i for i, m in enumerate(messages) if m["role"] == "assistant"],
            "category": task.category,
            "difficulty": float(task.difficulty),
            "extra": {"manner": manner, "content": task.unit},
        }


def tool_task_rows(rng_of, *, split: str, n: int) -> Iterator[dict]:
    """`prompts/1` rows for the environment ``tools``: the table that ``search`` sees stands in ``extra_json``."""
    for _, task in zip(range(n), tasks_of(split, "tasks", rng_of)):
        yield {
            "prompt": [{"role": "user", "content": task.instruction}],
            "domain": "tools",
            "category": task.category,
            "answer": task.answer,
            "answer_type": task.answer_type,
            "language": "en",
            "extra": {"verifier": "world", "difficulty": task.difficulty, "content": task.unit, "table": task.table},
        }
