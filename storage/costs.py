"""The cost ledger (catalogue ``ops.cost``): what stages used, by their records, times what it costs.

Rows {stage, item, count, unit_cost, total}. Counted are the seconds of a stage's process per device (of the attempt
that finished it: what was lost to kills is in no record; of a stage that has not finished, of its last attempt until
now), completions and tokens that it generated, questions to judges
with the tokens that servers charge, and labels by people: rows of files that came from outside, once per file, and
lines of filled tasks. A price list is a YAML file {item: USD per unit}, the units being those of :data:`ITEMS`; an item
without a price has a count and no total.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from storage import home, records, store
from storage.files import read_text

#: item -> (what one unit is, units per counted thing)
ITEMS = {
    "gpu_hours": ("hour of one GPU", 1 / 3600),
    "cpu_hours": ("hour of a stage without a GPU", 1 / 3600),
    "generated_mtokens": ("million tokens sampled from policies and local judges", 1e-6),
    "judge_calls": ("question to a judge on a server", 1),
    "judge_mtokens_in": ("million tokens that it read", 1e-6),
    "judge_mtokens_out": ("million tokens that it wrote", 1e-6),
    "local_judge_calls": ("question to a judge in the stage's process", 1),
    "human_labels": ("row or line labelled by people", 1),
}
COUNTED = {
    "generated_tokens": "generated_mtokens",
    "judge_calls": "judge_calls",
    "judge_tokens_in": "judge_mtokens_in",
    "judge_tokens_out": "judge_mtokens_out",
    "local_judge_calls": "local_judge_calls",
}
#: Kinds of data whose rows by people are their labels.
LABELS = (
    "pairs/1",
    "comparisons/1",
    "rankings/1",
    "ratings/1",
    "unpaired/1",
    "stepwise/1",
    "segments/1",
    "span_feedback/1",
    "demonstrations/1",
)


class PriceError(ValueError):
    """A price list that cannot be used; the text says what to write."""


def prices_from(path: str | Path | None = None) -> dict[str, float]:
    """{item: USD per unit}, from the file, else from ``HOME/prices.yaml``; {} where that does not exist.

    Raises:
        PriceError: the file is missing, no mapping, or names an unknown item.
    """
    import yaml

    file = Path(path) if path is not None else home.home() / "prices.yaml"
    if not file.is_file():
        if path is None:
            return {}
        raise PriceError(
            f"there is no price list {file}; write a YAML file such as {{gpu_hours: 2.5, judge_mtokens_in: 3,"
            " human_labels: 1}"
        )
    try:
        given = yaml.safe_load(read_text(file)) or {}
    except (ValueError, yaml.YAMLError) as error:
        raise PriceError(
            f"{file} cannot be read: {error}; write lines ITEM: USD, items being {', '.join(ITEMS)}"
        ) from None
    if not isinstance(given, dict):
        raise PriceError(f"{file} is no list of prices; write lines ITEM: USD, items being {', '.join(ITEMS)}")
    for name, price in given.items():
        if name not in ITEMS:
            near = difflib.get_close_matches(str(name), ITEMS, n=1)
            raise PriceError(
                f"{file}: there is no item {name!r}; "
                + (f"did you mean {near[0]!r}? " if near else "")
                + f"the items are: {', '.join(ITEMS)}"
            )
        if isinstance(price, bool) or not isinstance(price, (int, float)) or not 0 <= price < float("inf"):
            raise PriceError(f"{file}: {name}: {price!r} is no price; write USD per {ITEMS[name][0]}, 0 or more")
    return {name: float(price) for name, price in given.items()}


def counts_of(record: Mapping[str, Any]) -> dict[str, float]:
    """{item: units} that a stage used."""
    perf = record.get("perf") or {}
    device = "gpu_hours" if "peak_gpu_memory_mib" in perf else "cpu_hours"
    found = {device: perf.get("seconds", 0.0) * perf.get("devices", 1) * ITEMS[device][1]}
    for name, n in (record.get("usage") or {}).items():
        if name in COUNTED:
            found[COUNTED[name]] = n * ITEMS[COUNTED[name]][1]
    if people := _labels(record):
        found["human_labels"] = people
    return found


def _labels(record: Mapping[str, Any]) -> int:
    """Rows by people in what a stage brought in from outside (of data that was there already they were paid before),
    lines that people filled in of a task.
    """
    if record["stage"] == "human_answers":
        return int(record["metrics"]["answers"]) if "answers" in record["inputs"] else 0
    if record["stage"] != "ingest" or str(_brought_in(record).get("ref", "")).startswith("dataset:"):
        return 0
    from storage.datasets import open_dataset

    total, converted, by_people = 0, set(), (record.get("config") or {}).get("origin", "human") == "human"
    for output in record["outputs"].values():
        if output["kind"] != "dataset" or (output.get("manifest") or {}).get("kind") not in LABELS:
            continue
        data = open_dataset(output["path"])
        for row in data.iter_rows([name for name in ("origin", "ann", "extra_json") if name in data.schema.names]):
            total += row["origin"] == "human"
            # people labelled the rows that it was made of: a ranking, a rating
            if row["origin"] == "conversion" and by_people and (row.get("ann") or {}).get("annotator_type") != "ai":
                converted |= set(json.loads(row["extra_json"] or "{}").get("row_ids") or ())
    return total + len(converted)


def _brought_in(record: Mapping[str, Any]) -> Mapping[str, Any]:
    """The input that holds what people did."""
    return record["inputs"].get("answers" if record["stage"] == "human_answers" else "data") or {}


def counted(steps: Iterable[tuple[str, Mapping[str, Any]]]) -> list[tuple[str, dict[str, float]]]:
    """(step, {item: units}) of (step, stage record): what several of them read from one file was labelled once."""
    found, paid = [], {}
    for step, record in steps:
        counts = counts_of(record)
        if file := "human_labels" in counts and _brought_in(record).get("digest"):
            counts["human_labels"], paid[file] = (
                max(0, counts["human_labels"] - paid.get(file, 0)),
                max(counts["human_labels"], paid.get(file, 0)),
            )
        found.append((step, counts))
    return found


def ledger(counts: Iterable[tuple[str, Mapping[str, float]]], prices: Mapping[str, float]) -> list[dict[str, Any]]:
    """Rows {stage, item, count, unit_cost, total} of (stage, {item: units}); without a price unit_cost and total are
    None.
    """
    return [
        {
            "stage": stage,
            "item": item,
            "count": n,
            "unit_cost": prices.get(item),
            "total": None if item not in prices else n * prices[item],
        }
        for stage, found in counts
        for item, n in found.items()
        if n
    ]


def totals(rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """{items: {item: units}, total: USD of all rows with a price (None without one), unpriced: items without a
    price}.
    """
    items: dict[str, float] = {}
    rows = list(rows)
    for row in rows:
        items[row["item"]] = items.get(row["item"], 0.0) + row["count"]
    priced = [row["total"] for row in rows if row["total"] is not None]
    return {
        "items": items,
        "total": sum(priced) if priced else None,
        "unpriced": sorted({row["item"] for row in rows if row["total"] is None}),
    }


# ---------------------------------------------------------------------------------------------------------------- of what


def of_run(run: records.RunRecord) -> list[tuple[str, dict[str, Any], bool]]:
    """(step, stage record, whether an earlier run had paid for it) of every step of a run whose record is there."""
    return [
        (label, record, not entry.get("paid", not entry["cached"]))
        for label, entry in run.stages().items()
        if (record := records.read(entry["key"])) is not None
    ]


def so_far(standing: Mapping[str, Any]) -> dict[str, float]:
    """{item: units} of a stage that has not finished (:func:`storage.work.standing`): the hours of its last attempt;
    the rest is counted when it ends.
    """
    if not standing.get("device"):
        return {}  # no process of it was started
    item = "cpu_hours" if standing["device"] == "cpu" else "gpu_hours"
    return {item: standing["seconds"] * (standing.get("devices") or 1) * ITEMS[item][1]}


def behind(ref: str) -> dict[str, dict[str, Any]]:
    """{stage key: record} of every stage that something was made by, each once."""
    from storage.lineage import tree

    found: dict[str, dict[str, Any]] = {}

    def walk(node: Mapping[str, Any]) -> None:
        if node.get("key") and node["key"] not in found and (record := records.read(node["key"])) is not None:
            found[node["key"]] = record
        for child in (node.get("inputs") or {}).values():
            walk(child)

    walk(tree(ref))
    return found


def gain(model: str, against: str, metric: str, prices: Mapping[str, float]) -> dict[str, Any]:
    """What an improvement cost (``eval.reward_per_compute``): the difference of a metric between two models'
    evaluations under one protocol, and that per unit of everything that made the one and not the other.

    Raises:
        StoreError: one of them was never evaluated with this metric, or both only under different protocols.
    """
    digests = {name: store.resolve(name, "model").digest for name in (model, against)}
    judged = {
        name: [r for r in records.evaluations_of(digest) if isinstance(r["metrics"].get(metric), (int, float))]
        for name, digest in digests.items()
    }
    for name, found in judged.items():
        if not found:
            raise store.StoreError(
                f"{name} has no evaluation with {metric!r}; evaluate it (posttrain stage evaluate --input model={name}"
                " ...), or write another --metric"
            )
    protocol = lambda record: record["metrics"].get("protocol_hash")
    pair = next(((a, b) for a in judged[model] for b in judged[against] if protocol(a) == protocol(b)), None)
    if pair is None:
        raise store.StoreError(
            f"{model} and {against} were only evaluated under different protocols, so their {metric} does not compare;"
            " evaluate both with the same prompts and settings"
        )
    difference = pair[0]["metrics"][metric] - pair[1]["metrics"][metric]
    paid = behind(against)
    spent = totals(ledger(counted((r["stage"], r) for key, r in behind(model).items() if key not in paid), prices))
    per = {item: difference / n for item, n in spent["items"].items() if n}
    return {
        "metric": metric,
        "model": pair[0]["metrics"][metric],
        "against": pair[1]["metrics"][metric],
        "gain": difference,
        "spent": spent["items"],
        "usd": spent["total"],
        "gain_per": per | ({"usd": difference / spent["total"]} if spent["total"] else {}),
    }
