"""Several answers in an order: Nectar, OpenAssistant, Stack Exchange preferences."""

from __future__ import annotations

from typing import Any, Iterator

from stages.ingestion.fields import hh_transcript
from stages.ingestion.published.forms import Form, are_dicts, is_number, listed, utterance, without
from stages.ingestion.sources import Record, canonical_bytes


def _nectar(row: dict, options) -> list[dict]:
    prompt = row["prompt"]
    if isinstance(prompt, str) and prompt.startswith("\n\nHuman:"):
        prompt = hh_transcript(prompt)
        prompt = prompt[:-1] if prompt[-1]["role"] == "assistant" and not prompt[-1]["content"] else prompt
    return [
        without(
            row,
            "answers",
            prompt=prompt,
            completions=[item["answer"] for item in row["answers"]],
            ranks=[item["rank"] for item in row["answers"]],
            models=[str(item.get("model")) for item in row["answers"]],
        )
    ]


def _votes(row: dict, options) -> list[dict]:
    """Answers with the score that votes gave them (Askell et al. 2021)."""
    return [
        without(
            row,
            "question",
            "answers",
            prompt=row["question"],
            completions=[item["text"] for item in row["answers"]],
            scores=[item["pm_score"] for item in row["answers"]],
        )
    ]


def _oasst(records: Iterator[Record], options) -> Iterator[Record]:
    """Messages of OpenAssistant, those of a tree one after the other, or whole trees: the replies to each path of
    messages.

    Ranked replies become a ranking, fewer than two of them `no_pair`; where demonstrations are wanted, the best reply.
    Messages that are deleted or failed their review are left out with what follows them (`left_out_message`).
    """
    tree, nodes = None, []
    for record in records:
        row = record.row
        if record.code is not None:
            yield record
        elif isinstance(row.get("prompt"), dict):
            yield from _replies(_flat(row["prompt"], None, record.line), options)
        else:
            if row.get("message_tree_id") != tree:
                yield from _replies(nodes, options)
                tree, nodes = row.get("message_tree_id"), []
            nodes.append((record.line, row))
    yield from _replies(nodes, options)


def _flat(node: dict, parent: str | None, line: int) -> list[tuple[int, dict]]:
    """The messages of a nested tree."""
    out, waiting = [], [(node, parent)]
    while waiting:
        item, above = waiting.pop()
        if not isinstance(item, dict):
            continue
        out.append((line, {**{key: value for key, value in item.items() if key != "replies"}, "parent_id": above}))
        waiting += [(reply, item.get("message_id")) for reply in reversed(item.get("replies") or [])]
    return out


def _replies(nodes: list[tuple[int, dict]], options) -> Iterator[Record]:
    known = {row.get("message_id"): row for _, row in nodes}
    children: dict[Any, list[tuple[int, dict]]] = {}
    for line, row in nodes:
        parent = row.get("parent_id")
        if parent is not None and parent not in known:
            yield Record(line, canonical_bytes(row), row, "orphan_message")
        elif not _left_out(row):
            children.setdefault(parent, []).append((line, row))
    waiting: list[tuple[int, dict, list[dict]]] = [(*node, []) for node in reversed(children.get(None, []))]
    reached: set[int] = set()
    while waiting:
        line, row, path = waiting.pop()
        reached.add(id(row))
        role = {"prompter": "user", "assistant": "assistant"}.get(row.get("role"))
        if role is None or not isinstance(row.get("text"), str):
            yield Record(line, canonical_bytes(row), None, "bad_role" if role is None else "wrong_type")
            continue
        path, replies = [*path, utterance(role, row["text"])], children.get(row.get("message_id"), [])
        waiting += [(*reply, path) for reply in reversed(replies)]
        answers = sorted(
            (reply for reply in replies if reply[1].get("role") == "assistant"),
            key=lambda reply: (not is_number(reply[1].get("rank")), reply[1].get("rank") or 0),
        )
        about = {
            "language": row.get("lang"),
            "message_tree_id": row.get("message_tree_id"),
            "message_id": row.get("message_id"),
        }
        if role != "user" or not answers:
            continue
        if options.kind in ("demonstrations/1", "text/1"):
            best = answers[0][1]
            made = {"messages": [*path, utterance("assistant", best.get("text"))], "train_turns": [len(path)], **about}
        else:
            ranked = [reply for _, reply in answers if is_number(reply.get("rank"))]
            if len(ranked) < 2:
                yield Record(line, canonical_bytes(row), None, "no_pair")
                continue
            made = {
                "prompt": path,
                "completions": [reply.get("text") for reply in ranked],
                "ranks": [reply["rank"] for reply in ranked],
                **about,
            }
        yield Record(line, canonical_bytes(made), made, None)
    for line, row in nodes:
        if id(row) not in reached and (row.get("parent_id") is None or row["parent_id"] in known):
            above, seen = row, {id(row)}
            while (
                not _left_out(above)
                and (above := known.get(above.get("parent_id"))) is not None
                and id(above) not in seen
            ):
                seen.add(id(above))
            yield Record(
                line,
                canonical_bytes(row),
                None,
                "orphan_message" if above is None or not _left_out(above) else "left_out_message",
            )


def _left_out(row: dict) -> bool:
    return row.get("deleted") is True or row.get("review_result") is False


NECTAR = Form(("prompt", "answers"), _nectar, lambda row, options: are_dicts(row["answers"], "answer", "rank"))
STACK_EXCHANGE = Form(
    ("question", "answers"), _votes, lambda row, options: are_dicts(row["answers"], "text", "pm_score")
)
OASST_MESSAGES = Form(
    ("message_id", "message_tree_id", "text", "role"),
    stream=_oasst,
    format=lambda options: "messages" if options.kind in ("demonstrations/1", "text/1") else "rankings",
)
OASST_TREES = Form(
    ("message_tree_id", "prompt"),
    None,
    lambda row, options: isinstance(row["prompt"], dict) and "replies" in row["prompt"],
    _oasst,
    lambda options: "messages" if options.kind in ("demonstrations/1", "text/1") else "rankings",
)
RANKED = listed("responses", "ranks")
