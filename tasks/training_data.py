"""What a model learned from: the datasets behind it and behind all its ancestors, found through the stage records."""

from __future__ import annotations

import re
from typing import Any

from stages.registry import get_stage
from stages.spec import ConfigError
from storage import lineage, store


def training_data(model: str) -> tuple[dict[str, str], list[str]]:
    """({label: dataset ref}, models brought from outside) of everything in a model's lineage that a model was trained
    on.

    A label is the dataset's name with the beginning of its digest, and the split that was trained on where the stage's
    settings say so (``maths-1a2b3c4d.train``). Datasets that only judged (``InputSpec.held_out``) are left out. Where a
    stage learned from rows without text (captured distributions, rollouts), what these were made of counts.
    """
    found: dict[str, str] = {}
    outside: list[str] = []
    nodes: dict[str, dict[str, Any]] = {}
    trainings: dict[str, None] = {}  # keys of the stages whose models are ancestors

    def visit(node: dict[str, Any]) -> None:
        if node.get("key"):
            if not node.get("again"):
                nodes[node["key"]] = node
            if node["kind"] == "model":
                trainings[node["key"]] = None
        if node["kind"] == "model" and not node.get("stage"):
            outside.append(node["ref"])
        for child in node["inputs"].values():
            visit(child)

    def add(node: dict[str, Any], split: str | None) -> None:
        """A dataset, or what it was made of where its rows hold no text."""
        maker = nodes.get(node.get("key") or "")
        if node["kind"] != "dataset":
            return
        if not _readable(node["ref"]) and maker is not None and maker["inputs"]:
            for child in maker["inputs"].values():
                add(child, (maker.get("config") or {}).get("split"))
            return
        name = (
            re.sub(
                r"[^A-Za-z0-9_-]+",
                "-",
                node["ref"].removeprefix("dataset:").split("@")[0].rstrip("/").rpartition("/")[2],
            )
            or "data"
        )
        found.setdefault(f"{name}-{node['digest'][:8]}" + (f".{split}" if split else ""), node["ref"])

    visit(lineage.tree(model))
    for node in map(nodes.__getitem__, trainings):
        for name, child in node["inputs"].items():
            if not _judges(node["stage"], name):
                add(child, (node.get("config") or {}).get("split"))
    return found, sorted(set(outside))


def _judges(stage: str, name: str) -> bool:
    """Whether an input of a stage is held out from what it trains; False for stages and inputs that are no longer
    known.
    """
    try:
        return get_stage(stage).SPEC.input_spec(name).held_out
    except ConfigError:
        return False


def _readable(ref: str) -> bool:
    """Whether the rows of a dataset hold the text of prompts."""
    from storage.schema import SCHEMAS

    kind = store.resolve(ref, "dataset").manifest.get("kind") or ""
    columns = SCHEMAS[kind].names if kind in SCHEMAS else []
    return any(name in columns for name in ("prompt", "messages", "text"))
