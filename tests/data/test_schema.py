"""Schemas, identities and dataset directories."""

import json

import pyarrow as pa
import pytest

from storage.datasets import DatasetError, DatasetWriter, open_dataset, write_dataset
from storage.files import sha256_text
from storage.schema import (
    CONTENT_COLUMNS,
    SCHEMAS,
    RowIdSorter,
    SchemaError,
    complete_row,
    normalise_text,
    prompt_id,
    row_id,
)

from .driver import assistant, user


def pair(i: int, split: str = "train") -> dict:
    return complete_row(
        "pairs/1",
        {"prompt": [user(f"question {i}")], "chosen": [assistant("good")], "rejected": [assistant("bad")]},
        dataset="d",
        source="s",
        origin="human",
        split=split,
    )


def test_every_kind_has_common_columns_and_content():
    assert set(SCHEMAS) == set(CONTENT_COLUMNS)
    for kind, schema in SCHEMAS.items():
        assert schema.names[:4] == ["row_id", "prompt_id", "group_id", "schema"], kind
        assert not schema.field("row_id").nullable and schema.field("prompt_id").nullable
        assert len(set(schema.names)) == len(schema.names), kind


def test_identity_ignores_null_fields_and_provenance():
    row = {
        "prompt": [{"role": "user", "content": "What is 2+2?", "name": None}],
        "chosen": [assistant("4")],
        "rejected": [assistant("5")],
    }
    assert prompt_id(row["prompt"]) == "0bd13bfaa6e7191f"
    assert row_id("pairs/1", row) == row_id("pairs", row) == "0e7087cf2c8a28ef91e117327fb7c78e"
    done = complete_row(
        "pairs/1", row | {"weight": 3.0, "ann": {"annotator_id": "x"}}, dataset="a", source="b", origin="ai"
    )
    assert (
        done["row_id"] == "0e7087cf2c8a28ef91e117327fb7c78e"
        and done["group_id"] == done["prompt_id"]
        and done["pairs_in_group"] == 1
    )


def test_two_annotators_are_two_rows():
    row = {"prompt": [user("p")], "completions": [[assistant("a")], [assistant("b")]], "ranks": [0, 1]}
    assert row_id("rankings/1", row | {"ann": {"annotator_id": "1"}}) != row_id(
        "rankings/1", row | {"ann": {"annotator_id": "2"}}
    )


def test_unknown_kind_names_the_known_ones():
    with pytest.raises(SchemaError, match="pairs/1"):
        complete_row("pairs/9", {}, dataset="d", source="s", origin="human")


def dataset_hash(row_ids) -> str:
    return sha256_text("\n".join(sorted(row_ids)))


def test_dataset_hash_on_disk_equals_in_memory():
    ids = [f"{i * 7919 % 1000:032x}" for i in range(500)] + ["b", "ba", "é"]
    sorter = RowIdSorter(buffer=50)
    for start in range(0, len(ids), 40):
        sorter.add(ids[start : start + 40])
    assert sorter.digest() == dataset_hash(ids)


def test_normalise_text():
    assert normalise_text("  Hello ﬁne\tWORLD \n") == "hello fine world"


def test_writer_round_trip_and_splits(tmp_path):
    rows = [pair(i, "test" if i % 5 == 0 else "train") for i in range(250)]
    manifest = write_dataset(tmp_path / "d", "d", "pairs/1", rows, rows_per_part=100, parents=["x"], counts={"n": 1})
    assert [part["rows"] for part in manifest["parts"]] == [100, 100, 50]
    assert manifest["splits"] == {"test": 50, "train": 200} and manifest["dataset_hash"] == dataset_hash(
        r["row_id"] for r in rows
    )
    data = open_dataset(tmp_path / "d")
    data.verify()
    assert [row["row_id"] for row in data.iter_rows()] == [row["row_id"] for row in rows]
    assert next(data.iter_rows(["prompt"], split="test")) == {"prompt": [user("question 0")]}
    assert (
        data.to_pandas(["weight"]).shape == (250, 1)
        and data.table().schema.field("chosen").type == SCHEMAS["pairs/1"].field("chosen").type
    )


def test_resumed_writer_gives_the_same_bytes(tmp_path):
    rows = [pair(i) for i in range(250)]
    whole = write_dataset(tmp_path / "a", "d", "pairs/1", rows, rows_per_part=60)
    killed = DatasetWriter(tmp_path / "b", "d", "pairs/1", rows_per_part=60)
    killed.write(rows[:200])  # three complete parts, 20 rows in hand, no close
    (tmp_path / "b" / ".part-00003.parquet.tmp").write_bytes(b"half")
    again = DatasetWriter(tmp_path / "b", "d", "pairs/1", rows_per_part=60)
    assert len(again.parts) == 3
    again.truncate(2)
    again.write(rows[120:])
    assert again.close() == whole
    assert [p.name for p in sorted((tmp_path / "b").iterdir())] == ["manifest.json"] + [
        f"part-{i:05d}.parquet" for i in range(5)
    ]


def test_unfinished_missing_and_damaged_are_refused(tmp_path):
    with pytest.raises(DatasetError, match="does not exist"):
        open_dataset(tmp_path / "no")
    writer = DatasetWriter(tmp_path / "d", "d", "pairs/1")
    writer.write([pair(1)])
    writer.flush()
    with pytest.raises(DatasetError, match="unfinished"):
        open_dataset(tmp_path / "d")
    writer.close()
    part = tmp_path / "d" / "part-00000.parquet"
    part.write_bytes(part.read_bytes()[:-1] + b"x")
    with pytest.raises(DatasetError, match="changed"):
        open_dataset(tmp_path / "d").verify()
    (tmp_path / "d" / "manifest.json").write_text("{")
    with pytest.raises(DatasetError, match="damaged"):
        open_dataset(tmp_path / "d")


def test_bad_values_name_their_column(tmp_path):
    writer = DatasetWriter(tmp_path / "d", "d", "pairs/1")
    writer.write([pair(1) | {"weight": "heavy"}])
    with pytest.raises(SchemaError, match="weight"):
        writer.flush()
    writer = DatasetWriter(tmp_path / "e", "d", "pairs/1")
    writer.write([{k: v for k, v in pair(1).items() if k != "split"}])
    with pytest.raises(SchemaError, match="split"):
        writer.flush()


def test_write_table_and_memory_url():
    table = pa.Table.from_pylist([pair(i) for i in range(120)], schema=SCHEMAS["pairs/1"])
    writer = DatasetWriter("memory://tests/pairs", "d", "pairs/1", rows_per_part=50, resume=False)
    writer.write_table(table)
    manifest = writer.close()
    data = open_dataset("memory://tests/pairs")
    data.verify()
    assert data.num_rows == 120 and len(manifest["parts"]) == 3
    assert json.loads(json.dumps(manifest)) == data.manifest


@pytest.mark.parametrize(
    "kind, row",
    [
        (
            "auto",
            {
                "prompt": "p",
                "tests": [
                    {"kind": "python", "code": "assert f(1) == 2"},
                    {"kind": "stdin", "input": "1", "expected": "2", "timeout_s": None},
                ],
            },
        ),
        ("auto", {"prompt": "p", "answer": "5"}),
        ("auto", {"prompt": "p", "constraints": [{"id": "punctuation:no_comma", "kwargs": {}}]}),
        ("auto", {"prompt": "p", "completion": "c", "score": 3, "aspects": {"a": 1, "b": 2.5}}),
        ("auto", {"prompt": "p", "completions": ["a", "b"], "ranks": [0, 1], "annotator_id": "x"}),
        ("comparisons/1", {"prompt": "p", "response_a": "a", "response_b": "b", "label": 2, "n_points": 5}),
        ("comparisons/1", {"prompt": "p", "response_a": "a", "response_b": "b", "p_a": 0.1, "annotator_id": "x"}),
        ("auto", {"prompt": "p", "completions": ["a", "b"], "labels": [True, False]}),
        (
            "auto",
            {
                "prompt": "p",
                "chosen": "abc",
                "rejected": "abd",
                **{f"{side}_segments": [{"start": 0, "end": 1, "scores": {"x": 1}}] for side in ("chosen", "rejected")},
            },
        ),
        (
            "auto",
            {
                "messages": [
                    {"role": "user", "content": "p"},
                    {
                        "role": "assistant",
                        "content": None,
                        "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}}],
                    },
                    {"role": "tool", "content": "1"},
                    {"role": "assistant", "content": "x"},
                ]
            },
        ),
    ],
)
def test_a_row_keeps_its_identity_when_it_is_read_back(tmp_path, kind, row):
    """Stages complete rows that they read and write them again: the same content is the same row."""
    from .driver import ingest, write_lines

    result = ingest(write_lines(tmp_path / "x.jsonl", [row]), tmp_path / "w", kind=kind)
    (read,) = result.rows
    assert row_id(result.data.kind, read) == read["row_id"]
