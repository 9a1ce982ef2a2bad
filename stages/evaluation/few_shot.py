"""What is shown before a question: examples of a dataset with their answers (few_shot, few_shot_cot), and how a
question is written under a reading.

The examples of an item are the first ``few_shot`` of a seeded permutation of the examples' split, the same for all
items (of a category, with ``few_shot_by=category``). No example is a row of the evaluated split, or shares prompt,
group or question with one. ``few_shot_orders`` permutations give as many prompts per item, and the spread of the scores
over them says what choice and order of the examples decide (eval.kshot_order).

``system`` stands before all of it, the same for every prompt: with examples this is an arm that is aligned by its
prompt alone, without training (eval.urial: a system text and three restyled examples; eval.hhh_prompt: fourteen
conversations).

With ``prompt_template=chat`` an example is a user turn and an assistant turn; with ``none`` the whole is one text of
blocks "Question: ... Answer: ...".
"""

from __future__ import annotations

import json
from collections import defaultdict

from stages.verification.choices import asked, is_choice, question_of, stated


class Shots:
    """The examples of one evaluation. ``show(row, reading)`` is what the model reads; ``facts`` what the protocol
    records.
    """

    def __init__(self, stage, evaluated):
        self.config = stage.config
        self.k, self.orders, self.template = (
            self.config.few_shot,
            self.config.few_shot_orders,
            self.config.prompt_template,
        )
        self.facts: dict | str = "none"
        self._drawn: dict[tuple[int, str], list[dict]] = {}
        if self.k:
            self._draw(stage, evaluated)

    def _draw(self, stage, evaluated) -> None:
        from stages.evaluation.protocol import source_of
        from stages.spec import ConfigError

        config, source = self.config, "examples" if stage.has("examples") else "prompts"
        data = stage.dataset(source)
        if data.digest == evaluated.digest and config.few_shot_split == config.split:
            raise ConfigError(
                f"evaluate: few_shot would show rows of the evaluated split {config.split!r}; write"
                f" few_shot_split=train (or another split of {data.name}), or give --input examples=OTHER_DATA"
            )
        if self.template not in ("chat", "none"):
            raise ConfigError(
                f"evaluate: prompt_template={self.template} is a prompt without examples; write few_shot=0, or"
                " prompt_template=none or chat"
            )
        taken = {key for row in evaluated.iter_rows(split=config.split) for key in _identities(row)}
        rows, left_out, unusable = [], 0, 0
        for row in data.iter_rows(split=config.few_shot_split):
            row = as_prompt(row)
            if taken & _identities(row):
                left_out += 1
            elif answer_of(row, "generation", True) is None:
                unusable += 1
            else:
                rows.append(row)
        if left_out:
            stage.warn(
                "examples_left_out",
                f"{left_out} examples are left out because they are in the evaluated split, too. Look at how the data"
                " was split; its scores may not be generalisation.",
            )
        groups = defaultdict(list)
        for row in rows:
            groups[(row.get("category") or "") if config.few_shot_by == "category" else ""].append(row)
        for name, part in groups.items():
            for order in range(self.orders):
                picked = stage.rng("few_shot", order, name).permutation(len(part))[: self.k]
                self._drawn[order, name] = [part[i] for i in picked]
        if config.few_shot_by == "any" and len(rows) < self.k:
            there = ", ".join(f"{name} ({n})" for name, n in (data.manifest.get("splits") or {}).items())
            raise ConfigError(
                f"evaluate: few_shot={self.k}, but split {config.few_shot_split!r} of {data.name} has {len(rows)}"
                f" usable examples ({unusable} without an answer, {left_out} that are evaluated); its splits:"
                f" {there or 'none'}. Write few_shot_split=NAME, a smaller few_shot, or give --input examples=DATA"
            )
        self.facts = {
            "k": self.k,
            "examples": data.digest,
            "split": config.few_shot_split,
            "by": config.few_shot_by,
            "solutions": config.few_shot_solutions,
            "orders": self.orders,
            "seed": stage.seed,
            "forms": source_of("stages.evaluation.few_shot:Shots"),
        }

    def of(self, row: dict) -> list[dict]:
        """The examples before a row. Raises ConfigError where its category has too few."""
        from stages.spec import ConfigError

        if not self.k:
            return []
        name = (row.get("category") or "") if self.config.few_shot_by == "category" else ""
        found = self._drawn.get((row.get("order", 0), name), [])
        if len(found) < self.k:
            raise ConfigError(
                f"evaluate: few_shot={self.k} with few_shot_by=category, but category {name!r} has {len(found)}"
                f" examples in split {self.config.few_shot_split!r}; write few_shot={max(1, len(found))},"
                " few_shot_by=any, or give --input examples=DATA with more"
            )
        return found

    def show(self, row: dict, reading: str = "generation") -> list[dict] | str:
        """The prompt of a row: messages (``prompt_template=chat``), else text. Raises ConfigError where an example
        cannot be shown so.
        """
        from stages.generation import PROMPT_TEMPLATES
        from stages.spec import ConfigError

        examples, chat = self.of(row), self.template == "chat"
        answers = [answer_of(example, reading, self.config.few_shot_solutions) for example in examples]
        if None in answers:
            raise ConfigError(
                f"evaluate: multiple_choice={reading} shows examples with choices, and"
                f" {examples[answers.index(None)]['dataset']} has some without; write few_shot=0, or give --input"
                " examples=MULTIPLE_CHOICE_DATA"
            )
        if chat:
            opening = [message for message in row["prompt"] if message["role"] == "system"]
            if self.config.system:
                opening = [
                    {
                        "role": "system",
                        "content": "\n\n".join(
                            [self.config.system, *(message.get("content") or "" for message in opening)]
                        ),
                    }
                ]
            turns = [
                turn
                for example, answer in zip(examples, answers)
                for turn in [*_asking(example, reading), {"role": "assistant", "content": answer}]
            ]
            return [*opening, *turns, *_asking(row, reading)]
        if reading == "generation" and not examples:
            return self._behind_system(PROMPT_TEMPLATES[self.template].replace("{question}", _said(row, reading, chat)))
        blocks = [f"{_block(example, reading)} {answer.strip()}" for example, answer in zip(examples, answers)]
        return self._behind_system("\n\n".join([*blocks, _block(row, reading)]))

    def _behind_system(self, text: str) -> str:
        return f"{self.config.system}\n\n{text}" if self.config.system else text

    def ids(self, renderer, row: dict, reading: str = "generation") -> list[int]:
        """Token ids of :meth:`show`: what a completion starts from."""
        shown = self.show(row, reading)
        return renderer.text_ids(shown, end=False) if isinstance(shown, str) else renderer.prompt_ids(shown)


def as_prompt(row: dict) -> dict:
    """A ``demonstrations/1`` row as a prompt whose solution is its last answer; a ``prompts/1`` row as it is."""
    if "messages" not in row:
        return row
    last = max(row["train_turns"], default=len(row["messages"]) - 1)
    solution = row["messages"][last].get("content") if row["messages"] else None
    return {**row, "prompt": row["messages"][:last], "extra_json": json.dumps({"solution": solution})}


def answer_of(row: dict, reading: str, solutions: bool) -> str | None:
    """How an example is answered: under ``generation`` by its worked solution where it has one and ``solutions`` asks
    for it, else by its answer in the form that its verifier reads. None where it has no answer, or no choices for a
    reading of choices."""
    from stages.verification.golds import BadGold

    extra = json.loads(row["extra_json"]) if row.get("extra_json") else {}
    solution = extra.get("solution") if solutions or row.get("answer") is None else None
    if is_choice(row):
        try:
            said = stated(row, reading)
        except BadGold:
            return None
        return f"{solution.strip()}\n{said}" if isinstance(solution, str) and reading == "generation" else said
    if reading != "generation" or not row["prompt"]:
        return None
    if isinstance(solution, str) and solution.strip():
        return solution
    answer = row.get("answer")
    form = {
        "integer": "#### {}",
        "number": "#### {}",
        "latex": "\\boxed{{{}}}",
        "mc": "Therefore, the answer is ({}).",
    }.get(row.get("answer_type") or "text", "{}")
    return (
        None
        if answer is None
        else form.format(answer.strip().strip("()") if row.get("answer_type") == "mc" else answer)
    )


def _identities(row: dict) -> set[str]:
    """What makes two rows the same question: prompt, group, or the text that asks, whatever its options, case and white
    space.
    """
    from storage.schema import normalise_text

    text = question_of(row) if is_choice(row) else row["prompt"][-1].get("content") or "" if row["prompt"] else ""
    return {row["prompt_id"], row["group_id"], "text:" + normalise_text(text)}


def _said(row: dict, reading: str, chat: bool) -> str:
    return asked(row, reading, chat) if is_choice(row) else row["prompt"][-1].get("content") or ""


def _asking(row: dict, reading: str) -> list[dict]:
    """The turns that ask a row, without system messages (those of examples are not shown)."""
    turns = [message for message in row["prompt"] if message["role"] != "system"]
    return [*turns[:-1], {**turns[-1], "content": _said(row, reading, True)}] if is_choice(row) else turns


def _block(row: dict, reading: str) -> str:
    said = _said(row, reading, False)
    return said if reading != "generation" else f"Question: {said}\nAnswer:"


def spread(records: list[dict], metrics: tuple[str, ...]) -> list[dict]:
    """Rows {metric, order 0, order 1, ..., mean, min, max, spread, std}: each metric under each order of the examples
    (eval.kshot_order); empty for one order.

    std over orders has ddof 1.
    """
    import numpy as np

    from stages.evaluation.scores import item_values

    orders = sorted({r["order"] for r in records if r.get("order") is not None})
    if len(orders) < 2:
        return []
    rows = []
    for metric in metrics:
        found = [item_values([r for r in records if r.get("order") == order], metric) for order in orders]
        if all(found):
            values = [float(np.mean([value for value, _ in one.values()])) for one in found]
            rows.append(
                {
                    "metric": metric,
                    **{f"order {order}": value for order, value in zip(orders, values)},
                    "mean": float(np.mean(values)),
                    "min": min(values),
                    "max": max(values),
                    "spread": max(values) - min(values),
                    "std": float(np.std(values, ddof=1)),
                }
            )
    return rows
