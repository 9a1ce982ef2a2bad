"""Agreement of annotators on the same items (`data.agreement`): what each said, and statistics per batch and slice.

An item is a prompt with two answers (comparisons, pairs, every two answers of a ranking) or with one (ratings, thumbs).
A label is a category, by which Cohen's and Fleiss's kappa and Krippendorff's nominal alpha go, and a number for the
interval alpha: the signed point of a graded comparison, a score.
"""

from __future__ import annotations

import json
from collections import Counter
from itertools import combinations, groupby
from typing import Iterable, Iterator

from stages.ingestion import curation, pairing
from stages.ingestion.rules import stripped
from stages.ingestion.votes import item_key
from storage.schema import prompt_id

SLICES = ("annotator", "batch", "language", "criterion")
LOW = 0.4  # below which a statistic is warned of (ours)
ENOUGH = 10  # items of a slice that are worth a warning

Label = tuple[bytes, str, str, float]  # item, annotator, category, number


def labels_of(kind: str, row: dict) -> list[Label]:
    """What a row says of its items, by whom; nothing where it names nobody and has no votes. An item does not depend on
    the order in which its two answers were shown.
    """
    who = (row.get("ann") or {}).get("annotator_id")
    if kind == "comparisons/1":
        if row["label_kind"] in ("votes", "choice") and (who is None or len(row["votes"]) > 1):
            said = (
                [(f"{who or 'vote'} {n}", _signed(vote)) for n, vote in enumerate(row["votes"], 1)]
                if len(row["votes"]) > 1
                else []
            )
        elif who is None:
            said = []
        elif row["label_kind"] == "likert":
            said = [
                (who, float(pairing.likert(row["label"], row["n_points"], row.get("orientation") or "low_is_a")[2]))
            ]
        else:
            said = [(who, _signed(row["votes"][0]) if row["label_kind"] in ("votes", "choice") else 2 * row["p_a"] - 1)]
        turned = bool(said) and prompt_id(stripped(row["response_a"])) > prompt_id(stripped(row["response_b"]))
        return [(item_key(row), name, *_side(-value if turned else value)) for name, value in said]
    if who is None:
        return []
    if kind == "pairs/1":
        turned = prompt_id(stripped(row["chosen"])) > prompt_id(stripped(row["rejected"]))
        return [(item_key(row | {"criteria": _criterion(row)}), who, *_side(-1.0 if turned else 1.0))]
    if kind == "rankings/1":
        ids = [prompt_id(stripped(one)) for one in row["completions"]]
        found = []
        for i, j in combinations(range(len(ids)), 2):
            a, b = (i, j) if ids[i] <= ids[j] else (j, i)
            item = item_key(
                {
                    "prompt": row["prompt"],
                    "response_a": row["completions"][a],
                    "response_b": row["completions"][b],
                    "criteria": _criterion(row),
                }
            )
            found.append(
                (item, who, *_side(float((row["ranks"][b] > row["ranks"][a]) - (row["ranks"][b] < row["ranks"][a]))))
            )
        return found
    if kind == "ratings/1":
        return [(item_key(row | {"criteria": _criterion(row)}), who, f"{row['score']:g}", float(row["score"]))]
    if kind == "unpaired/1":
        return [(item_key(row), who, "desirable" if row["label"] else "undesirable", float(row["label"]))]
    return []


def _signed(vote: str) -> float:
    return {"A": 1.0, "B": -1.0, "tie": 0.0}[pairing.votes([vote])["winner"]]


def _side(value: float) -> tuple[str, float]:
    return "first" if value > 0 else "second" if value < 0 else "tie", value + 0.0


def _criterion(row: dict) -> str | None:
    return row.get("criteria") or (row.get("ann") or {}).get("criteria")


def slices_of(row: dict) -> dict[str, str]:
    """{slice: value} of a row, the annotator aside: its batch, its criterion, and its language or else the script of
    its prompt.
    """
    extra = json.loads(row["extra_json"]) if isinstance(row.get("extra_json"), str) else row.get("extra_json") or {}
    language = (
        row.get("language")
        or (extra.get("language") if isinstance(extra, dict) else None)
        or curation.script_name(" ".join(m.get("content") or "" for m in row["prompt"] if m.get("role") == "user"))
    )
    found = {"batch": row.get("batch_id"), "language": language, "criterion": _criterion(row)}
    return {name: str(value) for name, value in found.items() if value not in (None, "")}


class Table:
    """Labels of some items, as far as statistics ask for them: how often each pattern of labels occurred, and what
    every two annotators said of what both labelled. ``one``: the annotator that every comparison is with."""

    def __init__(self, one: str | None = None):
        self.one, self.nominal, self.interval, self.names = one, Counter(), Counter(), set()
        self.confusions: dict[tuple[str, str], Counter] = {}

    def add(self, labels: list[tuple[str, str, float]]) -> None:
        """(annotator, category, number) of one item, two or more of them."""
        self.nominal[tuple(sorted(category for _, category, _ in labels))] += 1
        self.interval[tuple(sorted(value for *_, value in labels))] += 1
        self.names.update(name for name, *_ in labels)
        for (a, said, _), (b, other, _) in combinations(sorted(labels), 2):
            if self.one is None:
                self.confusions.setdefault((a, b), Counter())[said, other] += 1
            elif self.one in (a, b):
                self.confusions.setdefault((self.one, "others"), Counter())[
                    (said, other) if a == self.one else (other, said)
                ] += 1

    def statistics(self) -> dict:
        """What the report says of a slice; null where a denominator is undefined. observed: share of equal labels among
        two of an item; cohen_kappa: mean over every two annotators with items in common (of an annotator's slice:
        against all others together); fleiss_kappa: over the items with the commonest number of labels."""
        labels = sum(len(pattern) * n for pattern, n in self.nominal.items())
        kappas = [
            k
            for confusion in self.confusions.values()
            if (k := curation.cohen_kappa(_matrix(confusion))["kappa"]) is not None
        ]
        together = sum(confusion.total() for confusion in self.confusions.values())
        equal = sum(n for confusion in self.confusions.values() for (a, b), n in confusion.items() if a == b)
        sizes = Counter()
        for pattern, n in self.nominal.items():
            sizes[len(pattern)] += n
        usual = max(sizes, key=lambda size: (sizes[size], size), default=0)
        kinds = sorted({label for pattern in self.nominal for label in pattern})
        counts = [
            ([pattern.count(kind) for kind in kinds], n) for pattern, n in self.nominal.items() if len(pattern) == usual
        ]
        return {
            "items": self.nominal.total(),
            "labels": labels,
            "annotators": len(self.names),
            "observed": equal / together if together else None,
            "cohen_kappa": sum(kappas) / len(kappas) if kappas else None,
            "fleiss_kappa": curation.fleiss_kappa([row for row, _ in counts], [n for _, n in counts])["kappa"],
            "alpha_nominal": curation.krippendorff_alpha(list(self.nominal), times=list(self.nominal.values())),
            "alpha_interval": curation.krippendorff_alpha(
                list(self.interval), "interval", list(self.interval.values())
            ),
        }


def _matrix(confusion: Counter) -> list[list[int]]:
    kinds = sorted({label for pair in confusion for label in pair})
    return [[confusion[a, b] for b in kinds] for a in kinds]


def agreement(rows: Iterable[tuple[bytes, str, str, float, dict]]) -> dict[tuple[str, str], dict]:
    """{(slice, its value): statistics} of (item, annotator, category, number, slices), rows of an item together;
    ("all", "") is everything. Only items with two labels or more count, within a batch those with two of that batch.
    Empty where there are none."""
    tables: dict[tuple[str, str], Table] = {}
    for labels in _items(rows):
        parts: dict[tuple[str, str], list] = {("all", ""): labels} | {
            ("annotator", name): labels for name, *_ in labels
        }
        for label in labels:
            for part in label[3].items():
                parts.setdefault(part, []).append(label)
        for part, own in parts.items():
            if len(own) > 1:
                tables.setdefault(part, Table(part[1] if part[0] == "annotator" else None)).add(
                    [label[:3] for label in own]
                )
    order = ("all", *SLICES)
    return {
        part: tables[part].statistics() for part in sorted(tables, key=lambda part: (order.index(part[0]), part[1]))
    }


def _items(rows) -> Iterator[list[tuple[str, str, float, dict]]]:
    for _, group in groupby(rows, key=lambda row: row[0]):
        labels = [row[1:] for row in group]
        if len(labels) > 1:
            yield labels


def warnings(found: dict[tuple[str, str], dict]) -> list[str]:
    """What is to be looked at: alpha below ``LOW`` of everything, or of a slice with ``ENOUGH`` items."""
    low = [
        (part, one)
        for part, one in found.items()
        if one["alpha_nominal"] is not None and one["alpha_nominal"] < LOW and one["items"] >= ENOUGH
    ]
    return [
        f"annotators agree little: alpha {one['alpha_nominal']:.2f} on {one['items']} items"
        + (f" of {part[0]} {part[1]}" if part[1] else "")
        + f" (below {LOW}); read some of them, and write clearer guidelines"
        for part, one in low[:10]
    ]
