"""Files as they come: packed, in other encodings, with other separators, damaged; and messages that say what to do
about those that cannot be read.
"""

import bz2
import gzip
import json
import lzma

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stages.harness import StageFailure
from stages.spec import ConfigError

from .driver import assistant, ingest, user, write_lines

ROWS = [{"prompt": f"p{i} é", "chosen": "a", "rejected": "b"} for i in range(400)]
LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS).encode()
PACKERS = {
    "gz": gzip.compress,
    "zst": lambda data: pa.Codec("zstd").compress(data, asbytes=True),
    "bz2": bz2.compress,
    "xz": lzma.compress,
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain")
    return ingest(write_lines(folder / "x.jsonl", ROWS), folder / "w", dataset="x").data.manifest["dataset_hash"]


@pytest.mark.parametrize("ending", PACKERS)
def test_packed_files_are_read_and_found(tmp_path, plain, ending):
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / f"x.jsonl.{ending}").write_bytes(PACKERS[ending](LINES))
    for index, path in enumerate((tmp_path / "d", tmp_path / "d" / f"x.jsonl.{ending}")):
        result = ingest(path, tmp_path / f"w{index}", dataset="x")
        assert result.data.manifest["dataset_hash"] == plain and not result.counts["damaged_files"]
    (tmp_path / f"y.json.{ending}").write_bytes(PACKERS[ending](json.dumps(ROWS).encode()))
    # an array, seen as one through the packing
    assert ingest(tmp_path / f"y.json.{ending}", tmp_path / "w2").counts["rows_in"] == 400


@pytest.mark.parametrize("ending", PACKERS)
def test_a_truncated_file_keeps_what_can_be_read(tmp_path, ending):
    rows = [
        {"prompt": f"p{i}", "chosen": json.dumps([i * 7919 % 1009 for _ in range(40)]), "rejected": f"b{i * i}"}
        for i in range(12_000)
    ]
    data = PACKERS[ending](b"".join(json.dumps(row).encode() + b"\n" for row in rows))
    (tmp_path / f"x.jsonl.{ending}").write_bytes(data[: len(data) * 2 // 3])
    result = ingest(tmp_path / f"x.jsonl.{ending}", tmp_path / "w")
    assert (
        100 < result.counts["rows_kept"] < 12_000
        and result.counts["damaged_files"]
        and any(w["code"] == "damaged_file" for w in result.result["warnings"])
    )


@pytest.mark.parametrize("coding", ("utf-16", "utf-32", "utf-8-sig"))
def test_a_byte_order_mark_says_the_encoding(tmp_path, plain, coding):
    (tmp_path / "x.jsonl").write_bytes(LINES.decode().encode(coding))
    assert ingest(tmp_path / "x.jsonl", tmp_path / "w", dataset="x").data.manifest["dataset_hash"] == plain
    # as spreadsheets save Unicode text
    (tmp_path / "x.csv").write_bytes("prompt\tchosen\trejected\r\np é\ta\tb\r\n".encode(coding))
    assert [row["prompt"][0]["content"] for row in ingest(tmp_path / "x.csv", tmp_path / "w2").rows] == ["p é"]


def test_a_semicolon_separates_where_no_comma_does(tmp_path):
    (tmp_path / "x.csv").write_text('prompt;chosen;rejected\n"p, q";a;b\n')
    assert [row["prompt"][0]["content"] for row in ingest(tmp_path / "x.csv", tmp_path / "w").rows] == ["p, q"]
    (tmp_path / "t.csv").write_text("text\none; two\n")
    assert [row["text"] for row in ingest(tmp_path / "t.csv", tmp_path / "w2").rows] == ["one; two"]


def test_columns_of_every_arrow_type(tmp_path):
    talk = [{"role": "user", "content": "p"}, {"role": "assistant", "content": "a"}]
    view = pa.large_list(pa.struct([("role", pa.string()), ("content", pa.large_string())]))
    pq.write_table(pa.table({"messages": pa.array([talk], view)}), tmp_path / "m.parquet")
    assert ingest(tmp_path / "m.parquet", tmp_path / "w").rows[0]["messages"] == [user("p"), assistant("a")]
    table = pa.table(
        {
            "prompt": pa.array(["p", "q"], pa.large_string()),
            "chosen": pa.array(["a", "a"]).dictionary_encode(),
            "rejected": pa.array(["b", None]),
            "meta": pa.array([[("k", 1)], None], pa.map_(pa.string(), pa.int64())),
            "when": pa.array([1, 2], pa.timestamp("us")),
        }
    )
    pq.write_table(table, tmp_path / "d.parquet")
    result = ingest(tmp_path / "d.parquet", tmp_path / "w2", max_quarantine_fraction=1)
    assert [row["chosen"] for row in result.rows] == [[assistant("a")]] and result.codes() == {2: ["missing_column"]}


@pytest.mark.parametrize("written", (json.dumps([user("p"), assistant("a")]), str([user("p"), assistant("a")])))
def test_messages_that_were_written_as_text(tmp_path, written):
    assert ingest(write_lines(tmp_path / "x.jsonl", [{"messages": written}]), tmp_path / "w").rows[0]["messages"] == [
        user("p"),
        assistant("a"),
    ]
    with pytest.raises(StageFailure, match="wrong_type"):
        ingest(write_lines(tmp_path / "y.jsonl", [{"messages": "User: p"}]), tmp_path / "w2")


@pytest.mark.parametrize(
    "name, data, error, tells",
    [
        ("x.zip", b"PK\x03\x04" + bytes(64), ConfigError, "zip archive or a spreadsheet; unpack it"),
        ("x.jsonl", json.dumps(ROWS[0], indent=1).encode(), StageFailure, "jq -c . FILE > NEW.jsonl"),
        (
            "x.json",
            json.dumps({"version": 1, "data": ROWS[:3]}).encode(),
            ConfigError,
            "jq -c '.data\\[\\]' FILE > NEW.jsonl",
        ),
        ("x.jsonl", "é".encode("latin1") + LINES[:20], StageFailure, "iconv"),
    ],
)
def test_what_cannot_be_read_says_what_to_do(tmp_path, name, data, error, tells):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(error, match=tells):
        ingest(tmp_path / name, tmp_path / "w")


def test_a_file_of_another_kind_in_a_directory_is_named(tmp_path):
    (tmp_path / "d").mkdir()
    write_lines(tmp_path / "d" / "a.jsonl", ROWS[:3])
    write_lines(tmp_path / "d" / "b.jsonl", [{"prompt": "p", "completion": "c"}])
    with pytest.raises(
        ConfigError, match="b.jsonl holds demonstrations/1 rows, .*files='...' reads some of the files, without b.jsonl"
    ):
        ingest(tmp_path / "d", tmp_path / "w")
