"""human_task: questions for people as a file to fill in (ops.human_gate): which of two answers is better, or whether a
row is to be kept.

``ask=compare``  pairs, or the first two different candidates of each prompt that ended by themselves and say something;
which stands first is drawn, so that nobody can tell the chosen one from its place.
``ask=keep``     rows of any kind: inspection of answers, traits, principles, rubric items; the kept ones come back unchanged.

A recipe writes the task as a CSV file, pauses, and goes on when the filled file is there (``posttrain answer TASK
FILE``, or *Resume* in Prefect's UI); the stage `human_answers` reads it. The version of the instructions is their
digest; other instructions are another task.
"""

from __future__ import annotations

import json
from typing import Literal

from pydantic import Field

from stages.generation import NO_ANSWER
from stages.spec import ConfigError, InputSpec, OutputSpec, StageConfig, StageSpec

INSTRUCTIONS = {
    "compare": "Which answer is better? Write 1, 2, tie or skip into the column choice.",
    "keep": "Is this to be kept? Write yes, no or skip into the column choice.",
}
CHOICES = {"compare": ("1", "2", "tie", "skip"), "keep": ("yes", "no", "skip")}
KINDS = (
    "pairs/1",
    "candidates/1",
    "demonstrations/1",
    "prompts/1",
    "unpaired/1",
    "principles/1",
    "rubric_items/1",
    "text/1",
)


class Config(StageConfig):
    ask: Literal["compare", "keep"] = Field(
        "compare",
        description="What people are asked of each item: which of two answers is better, or whether a row is kept.",
    )
    instructions: str = Field("", description="What they are told; empty: one sentence that names the allowed entries.")
    split: str | None = Field(None, title="Split", description="Split of the data; empty: all rows.")
    limit: int | None = Field(None, ge=1, title="Limit", description="Items at most, drawn by their ids; empty: all.")


SPEC = StageSpec(
    name="human_task",
    config=Config,
    inputs={"data": InputSpec("dataset", kinds=KINDS, doc="What people are to look at.")},
    outputs={"tasks": OutputSpec("dataset", doc="human_tasks/1: one question per item, as it is shown.")},
)


def comparisons(stage, rows: list[dict], kind: str) -> list[tuple[str, dict]]:
    """(item id, {prompt, answers, rows}) of each pair, or of each prompt with two different candidates; in the order
    shown.
    """
    from stages.pairs import ended_of
    from storage.schema import provenance

    if kind == "pairs/1":
        found = [
            (
                row["row_id"],
                row["prompt"],
                [(row["chosen"], row["chosen_gen"]), (row["rejected"], row["rejected_gen"])],
                (row,),
            )
            for row in rows
            if all(ended_of(row, "chosen", "rejected"))  # as of candidates: it could be preferred
        ]
    elif kind == "candidates/1":
        groups: dict[str, list[dict]] = {}
        for row in (row for row in rows if row["drop_reason"] not in NO_ANSWER):
            groups.setdefault(row["prompt_id"], []).append(row)
        found = []
        for group in groups.values():
            shown = plain(group[0]["completion"])
            other = next((row for row in group[1:] if plain(row["completion"]) != shown), None)
            if other is not None:
                found.append(
                    (
                        group[0]["row_id"],
                        group[0]["prompt"],
                        [(row["completion"], row["gen"]) for row in (group[0], other)],
                        (group[0], other),
                    )
                )
    else:
        raise ConfigError(
            f"human_task: ask=compare needs two answers to each prompt, and {kind} has one; give pairs or candidates,"
            " or write ask=keep"
        )
    made = []
    for item, prompt, answers, made_of in found:
        if int(stage.rng("order", item).integers(2)):
            answers = answers[::-1]
        made.append(
            (
                item,
                {
                    "prompt": prompt,
                    "answers": [answer for answer, _ in answers],
                    "gens": [gen for _, gen in answers],
                    "source": made_of[0]["source"],
                    "split": made_of[0]["split"],
                    **provenance(*made_of),
                },
            )
        )
    return made


def run(stage):
    from stages.reporting.reports import document, sample_table
    from storage.files import canonical_json, sha256_text
    from storage.schema import complete_row

    config, data = stage.config, stage.dataset("data")
    rows = list(data.iter_rows(split=config.split))
    items = (
        comparisons(stage, rows, data.kind)
        if config.ask == "compare"
        else [(row["row_id"], {name: row[name] for name in SHOWN if row.get(name) is not None}) for row in rows]
    )
    if not items:
        raise ConfigError(
            f"human_task: {data.name} has nothing to ask about{f' in split {config.split!r}' if config.split else ''}; "
            + (
                "no prompt has two different candidates that ended by themselves: sample more of them, at a higher"
                " temperature, or raise max_completion_length"
                if data.kind == "candidates/1" and config.ask == "compare"
                else "write split=NAME, or give other data"
            )
        )
    if config.limit is not None:
        items = sorted(items, key=lambda one: stage.seed_for("item", one[0]))[: config.limit]
    instructions = config.instructions or INSTRUCTIONS[config.ask]
    version = sha256_text(canonical_json([config.ask, instructions]))[:12]
    writer = stage.writer(
        "tasks",
        "human_tasks/1",
        meta={"instructions": instructions, "version": version, "ask": config.ask, "data": data.digest},
    )
    writer.write(
        complete_row(
            "human_tasks/1",
            {
                "item_id": item,
                "ask": config.ask,
                "shown_json": json.dumps(shown, ensure_ascii=False, sort_keys=True, default=str),
                "instructions_version": version,
            },
            dataset=data.name,
            source="task",
            origin="conversion",
            split="train",
        )
        for item, shown in items
    )
    writer.close({"items": len(items)})
    stage.summary({"items": len(items), "instructions_version": version})
    stage.report(
        "task",
        markdown=document(
            "Task for people",
            instructions,
            sample_table([as_row(config.ask, item, shown) for item, shown in items[:10]]),
        ),
    )


def as_row(ask: str, item: str, shown: dict) -> dict[str, str]:
    """A line of the task file: what is shown, and the columns to fill in."""
    if ask == "compare":
        said = {
            "prompt": plain(shown["prompt"]),
            **{f"answer_{k + 1}": plain(answer) for k, answer in enumerate(shown["answers"])},
        }
    else:
        said = {f"row_{name}" if name == "item_id" else name: plain(value) for name, value in shown.items()}
    return {"item_id": item, **said, "choice": "", "annotator": "", "comment": ""}


def plain(value) -> str:
    """Messages as a person reads them (one is its text, several carry their roles; tools and calls follow the text);
    anything else as it is.
    """
    from stages.acting.tools import text_with_tools

    if not (isinstance(value, list) and value and isinstance(value[0], dict) and "role" in value[0]):
        return str(value)
    texts = [text_with_tools(message) for message in value]
    return (
        texts[0]
        if len(texts) == 1
        else "\n\n".join(f"{message['role']}: {text}" for message, text in zip(value, texts))
    )


#: Columns of a row that a person is shown where it is to be kept or not.
SHOWN = (
    "prompt",
    "messages",
    "completion",
    "chosen",
    "rejected",
    "answer",
    "category",
    "text",
    "label",
    "principle_id",
    "critique_request",
    "revision_request",
    "comparison_request",
    "item_id",
    "omega",
    "title",
    "description",
)
