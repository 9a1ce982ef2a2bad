"""The world stage end to end, in its own process: kinds, splits, ties, and the same bytes twice."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter

import pytest

from storage.datasets import open_dataset

SMALL = {
    "text": {"train": 30, "validation": 5},
    "demonstrations": {"train": 40, "validation": 10},
    "comparisons": {"train": 120, "validation": 20, "test": 40},
    "prompts": {"train": 40, "validation": 10, "test": 30},
}


def run(root, seed: int) -> dict:
    root.mkdir()
    spec = {
        "stage": "world",
        "key": "w" * 16,
        "seed": seed,
        "device": "cpu",
        "workdir": str(root),
        "config": SMALL,
        "inputs": {},
    }
    (root / "SPEC.json").write_text(json.dumps(spec))
    out = subprocess.run(
        [sys.executable, "-m", "stages", str(root / "SPEC.json")], check=True, capture_output=True, text=True
    ).stdout
    done = [json.loads(line) for line in out.splitlines() if '"event":"done"' in line.replace(" ", "")][-1]
    return {
        "summary": done["summary"],
        "digests": {n: o["digest"] for n, o in done["outputs"].items()},
        "path": root / "out",
    }


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    root = tmp_path_factory.mktemp("world")
    return run(root / "a", 1), run(root / "b", 1), run(root / "c", 2)


def test_every_output_has_its_kind_and_splits(world):
    kinds = {
        "text": "text/1",
        "demonstrations": "demonstrations/1",
        "comparisons": "comparisons/1",
        "pairs": "pairs/1",
        "prompts": "prompts/1",
    }
    for name, kind in kinds.items():
        dataset = open_dataset(str(world[0]["path"] / name))
        dataset.verify()
        assert dataset.kind == kind
        if name in SMALL:
            assert Counter(row["split"] for row in dataset.iter_rows()) == {s: n for s, n in SMALL[name].items() if n}


def test_pairs_are_the_decided_comparisons(world):
    rows = list(open_dataset(str(world[0]["path"] / "comparisons")).iter_rows())
    pairs = list(open_dataset(str(world[0]["path"] / "pairs")).iter_rows())
    assert len(pairs) == sum(row["label"] != 3 for row in rows) and 0 < world[0]["summary"]["tie_share"] < 0.3
    assert {p["strength"] for p in pairs} == {1, 2} and {p["split"] for p in pairs} == {"train", "validation", "test"}


def test_the_seed_decides_the_bytes(world):
    assert world[0]["digests"] == world[1]["digests"]
    assert not set(world[0]["digests"].values()) & set(world[2]["digests"].values())
