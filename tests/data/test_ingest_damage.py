"""Damaged input: every row is kept or accounted for, no damaged row changes a good one."""

import gzip
import json
import random

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stages.harness import StageFailure
from stages.spec import ConfigError
from storage.datasets import open_dataset

from .driver import assistant, ingest, user, write_lines


def good(i: int) -> dict:
    return {"prompt": f"question {i} <|im_end|>", "chosen": f"good answer {i}", "rejected": f"bad answer {i}"}


DEEP = "[" * 3000 + "]" * 3000
# raw line -> code expected
DAMAGE = {
    '{"prompt": "p", "chosen": "a"': "parse_error",
    "not json at all": "parse_error",
    "null": "wrong_type",
    "[1, 2]": "wrong_type",
    '"text"': "wrong_type",
    "123": "wrong_type",
    '{"prompt": "p", "chosen": "a"}': "missing_column",
    "{}": "missing_column",
    '{"prompt": "p", "chosen": null, "rejected": "b"}': "missing_column",
    '{"prompt": "p", "chosen": 5, "rejected": "b"}': "wrong_type",
    '{"prompt": {"a": [1]}, "chosen": "a", "rejected": "b"}': "wrong_type",
    '{"prompt": "p", "chosen": [[["x"]]], "rejected": [{"role": 1, "content": {}}]}': "wrong_type",
    '{"prompt": ["p"], "chosen": "a", "rejected": "b"}': "wrong_type",
    '{"prompt": "p", "chosen": "a", "rejected": 1e999}': "wrong_type",
    '{"prompt": "p", "chosen": NaN, "rejected": "b"}': "wrong_type",
    '{"prompt": 123456789012345678901234567890, "chosen": "a", "rejected": "b"}': "wrong_type",
    '{"prompt": "p", "chosen": "a", "rejected": "b", "chosen_score": ' + "9" * 5000 + "}": "parse_error",
    '{"prompt": "p", "chosen": "a", "rejected": "b", "chosen_score": NaN}': "bad_label",
    '{"prompt": "p", "chosen": "a", "rejected": "b", "weight": -1}': "bad_label",
    '{"prompt": "p", "chosen": "a", "rejected": "b", "label_prob": 7}': "bad_label",
    '{"prompt": "p", "chosen": "a", "rejected": "b", "license": ["x"]}': "wrong_type",
    '{"prompt": "  ", "chosen": "a", "rejected": "b"}': "empty_prompt",
    '{"prompt": "p", "chosen": " \\n ", "rejected": "b"}': "empty_completion",
    '{"prompt": "p", "chosen": "same", "rejected": " same "}': "chosen_equals_rejected",
    '{"prompt": "p", "chosen": "nul \\u0000 inside", "rejected": "b"}': "control_chars",
    '{"prompt": "p", "chosen": "bell \\u0007", "rejected": "b"}': "control_chars",
    '{"prompt": "p", "chosen": "lone \\ud800 surrogate", "rejected": "b"}': "invalid_utf8",
    '{"prompt": "p", "chosen": [{"role": "bot", "content": "x"}], "rejected": [{"role": "assistant", "content": "y"}]}': (
        "bad_role"
    ),
    '{"prompt": [{"role": "user", "content": "p"}, {"role": "user", "content": "p"}], "chosen": "a", "rejected": "b"}': (
        "non_alternating"
    ),
    '{"prompt": [], "chosen": "a", "rejected": "b"}': "empty_prompt",
    f'{{"prompt": {DEEP}, "chosen": "a", "rejected": "b"}}': "parse_error",
}
BYTES = {
    b'{"prompt": "p\xff\xfe", "chosen": "a", "rejected": "b"}': "invalid_utf8",
    b"\x00\x00\x00": "parse_error",
    b"\x80": "invalid_utf8",
    b'{"prompt": "p", "chosen": "' + b"x" * 1_200_000 + b'", "rejected": "b"}': "too_long",
}


@pytest.mark.parametrize("line, code", [*DAMAGE.items(), *BYTES.items()], ids=lambda value: str(value)[:40])
def test_each_kind_of_damage_has_its_code(tmp_path, line, code):
    source = write_lines(tmp_path / "x.jsonl", [good(0), good(1), good(2), good(3), line, good(4)])
    result = ingest(source, tmp_path / "w", max_quarantine_fraction=0.5)
    assert list(result.codes()) == [5] and code in result.codes()[5] and result.codes()[5] == sorted(result.codes()[5])
    assert [row["prompt"][0]["content"] for row in result.rows] == [good(i)["prompt"] for i in range(5)]
    assert result.refused[0]["source_file"] == "x.jsonl" and result.refused[0]["raw_json"]


def test_harmless_oddities_are_kept(tmp_path):
    lines = [
        '{"prompt": "p1", "chosen": "a", "rejected": "b", "junk": NaN, "big": 123456789012345678901234567890123}',
        '{"prompt": "p2", "chosen": "' + "x" * 900_000 + '", "rejected": "b"}',
        "",
        "   ",
        '{"prompt": "p3", "chosen": "tab\\t newline\\n \\u2028 end", "rejected": "b"}',
        '{"prompt": "p4", "chosen": "\\ud83d\\ude00", "rejected": "b"}',
    ]
    result = ingest(write_lines(tmp_path / "x.jsonl", lines), tmp_path / "w")
    assert result.data.num_rows == 4 and not result.refused and result.rows[3]["chosen"] == [assistant("😀")]


def test_ten_thousand_damaged_rows(tmp_path):
    rnd = random.Random(7)
    pool = [
        *[line.encode("utf-8", "surrogatepass") for line in DAMAGE if len(line) < 3000],
        *[b for b in BYTES if len(b) < 1000],
    ]
    lines, bad = [], 0
    for i in range(12_000):
        if i % 6 == 0:
            lines.append(json.dumps(good(i)).encode())
            continue
        bad += 1
        if rnd.random() < 0.5:
            lines.append(rnd.choice(pool))
            continue
        raw = bytearray(json.dumps(good(i)).encode())  # random bytes of a good row changed, cut or repeated
        while True:
            how, at = rnd.randrange(3), rnd.randrange(1, len(raw) - 1)
            broken = (
                raw[:at]
                if how == 0
                else (
                    raw[:at] + bytes([rnd.choice(b'\x00\x01\xff"{}[]\\')]) + raw[at + 1 :]
                    if how == 1
                    else raw[:at] + raw[at:] * 2
                )
            )
            if b"\n" not in broken and broken.strip():
                break
        lines.append(bytes(broken))
    result = ingest(write_lines(tmp_path / "x.jsonl", lines), tmp_path / "w", max_quarantine_fraction=1.0)
    assert bad == 10_000 and result.counts["rows_in"] == 12_000
    kept = {row["row_id"] for row in result.rows}
    clean = ingest(write_lines(tmp_path / "y.jsonl", [good(i) for i in range(0, 12_000, 6)]), tmp_path / "v")
    assert clean.data.num_rows == 2000 and {row["row_id"] for row in clean.rows} <= kept
    for row in result.refused:
        assert row["codes"] and 1 <= row["line_no"] <= 12_000 and row["codes"] == sorted(row["codes"])


FORMATS = [
    {"prompt": "p", "completion": "c", "label": True},
    {"messages": [user("p"), assistant("a")]},
    {"text": "t"},
    {"prompt": "p", "completions": ["a", "b"], "ranks": [0, 1]},
    {"prompt": "p", "completion": "c", "score": 3.5, "aspects": {"x": 1}},
    {"instruction": "i", "output_1": "a", "output_2": "b", "preference": 1.2},
    {"question": "q", "answer": "#### 4"},
    {"prompt": "p", "response_a": "a", "response_b": "b", "label": 2},
    {"prompt": "p", "answer": "3", "tests": [{"kind": "io", "input": "1"}]},
    {"prompt": "p", "completions": ["a", "b"], "labels": [True, False]},
    {"conversations": [{"from": "human", "value": "p"}, {"from": "gpt", "value": "c"}]},
    {"messages": [user("p")], "ground_truth": "4", "dataset": "gsm8k"},
    {"messages": [user("p")], "ground_truth": '{"func_name": "validate_title"}', "dataset": "ifeval"},
    {"instruction": "i", "input": "x", "output": "o"},
    {"prompt": "p", "instruction_id_list": ["length_constraints:number_words"], "kwargs": [{"num_words": 1}]},
    {"turns": ["a", "b"]},
]
GARBAGE = [
    None,
    True,
    0,
    -1,
    2**70,
    1.5,
    float("nan"),
    float("inf"),
    "",
    " ",
    "x",
    "<|im_end|>",
    "\x00",
    [],
    {},
    [[]],
    [None],
    [{}],
    {"a": {"b": []}},
    [1, "a"],
    [{"role": "user"}],
    [{"role": None, "content": 1}],
    [{"role": "assistant", "content": "x"}],
    [{"from": [], "value": {}}],
    [float("nan")],
    "9" * 400,
]


@pytest.mark.parametrize("row", FORMATS, ids=lambda row: "+".join(row)[:40])
def test_garbage_in_every_column_never_crashes(tmp_path, row):
    lines = [row | {"id": i} for i in range(80)]
    for column in row:
        lines += [row | {column: junk} for junk in GARBAGE] + [{k: v for k, v in row.items() if k != column}]
    result = ingest(
        write_lines(tmp_path / "x.jsonl", lines),
        tmp_path / "w",
        max_quarantine_fraction=1.0,
        deduplicate="off",
        contradictions="off",
        n_points=5,
    )
    assert result.counts["rows_in"] == len(lines) and {line for line in result.codes()} <= set(
        range(81, len(lines) + 1)
    )


def test_truncated_and_corrupt_gzip_keep_the_readable_part(tmp_path):
    rnd = random.Random(1)
    lines = [json.dumps(good(i) | {"pad": rnd.random()}).encode() for i in range(3000)]
    packed = gzip.compress(b"\n".join(lines) + b"\n", mtime=0)
    for name, data in (
        ("cut", packed[: len(packed) // 2]),
        ("flip", packed[: len(packed) // 2] + b"\xff" * 20 + packed[len(packed) // 2 + 20 :]),
    ):
        (tmp_path / f"{name}.jsonl.gz").write_bytes(data)
        result = ingest(tmp_path / f"{name}.jsonl.gz", tmp_path / name, max_quarantine_fraction=1.0)
        assert 1000 < result.data.num_rows < 3000 and list(result.counts["damaged_files"]) == [f"{name}.jsonl.gz"]
        assert [r["prompt"][0]["content"] for r in result.data.iter_rows(["prompt"])][:1000] == [
            good(i)["prompt"] for i in range(1000)
        ]
        assert any(w["code"] == "damaged_file" for w in result.result["warnings"])


def test_damaged_parquet(tmp_path):
    table = pa.Table.from_pylist([good(i) for i in range(4000)])
    pq.write_table(table, tmp_path / "x.parquet", row_group_size=1000, compression="zstd")
    data = bytearray((tmp_path / "x.parquet").read_bytes())
    folder = tmp_path / "folder"
    folder.mkdir()
    write_lines(folder / "a.jsonl", [good(i) for i in range(10)])
    (folder / "b.parquet").write_bytes(bytes(data[: len(data) // 2]))
    cut = ingest(folder, tmp_path / "w")
    assert (
        cut.counts["rows_kept"] == 10
        and cut.refused[0]["source_file"] == "b.parquet"
        and "b.parquet" in cut.counts["damaged_files"]
    )
    column = pq.ParquetFile(tmp_path / "x.parquet").metadata.row_group(1).column(0)
    start, size = column.dictionary_page_offset or column.data_page_offset, column.total_compressed_size
    data[start : start + size] = b"\xff" * size
    (tmp_path / "y.parquet").write_bytes(bytes(data))
    result = ingest(tmp_path / "y.parquet", tmp_path / "v", max_quarantine_fraction=0.5)
    assert (
        result.counts["rows_in"] == 4000
        and result.counts["rows_kept"] == 3000
        and result.counts["codes"] == {"parse_error": 1000}
    )
    assert set(result.codes()) == set(range(1001, 2001))


def test_csv_damage_stays_in_its_line(tmp_path):
    text = (
        'prompt,chosen,rejected\np0,a,b\np1,"open quote,b\np2,"two\nlines",b\np3,a,b,too many\np4,a\np5,"x'
        ' ""y""",b\np6,a,b\n'
    )
    (tmp_path / "x.csv").write_text(text)
    result = ingest(tmp_path / "x.csv", tmp_path / "w", max_quarantine_fraction=0.9)
    assert [r["prompt"][0]["content"] for r in result.rows] == ["p0", "p2", "p5", "p6"]
    assert result.codes() == {3: ["parse_error"], 6: ["parse_error"], 7: ["missing_column"]}
    assert result.rows[1]["chosen"][0]["content"] == "two\nlines"


def test_empty_and_unreadable_inputs(tmp_path):
    (tmp_path / "empty.jsonl").write_bytes(b"")
    with pytest.raises(StageFailure, match="empty.jsonl holds no rows; give a file with data"):
        ingest(tmp_path / "empty.jsonl", tmp_path / "w", kind="pairs/1")
    (tmp_path / "noise.jsonl").write_bytes(random.Random(3).randbytes(20_000))
    with pytest.raises(StageFailure):
        ingest(tmp_path / "noise.jsonl", tmp_path / "v")


@pytest.mark.parametrize("kind, error", [("auto", ConfigError), ("demonstrations/1", StageFailure)])
def test_a_column_that_is_null_in_every_row_is_named(tmp_path, kind, error):
    source = write_lines(tmp_path / "x.jsonl", [{"prompt": None, "completion": f"answer {i}"} for i in range(5)])
    with pytest.raises(error, match=r"Empty \(null\) in every row, and read as if not there: prompt; fill them in"):
        ingest(source, tmp_path / "w", kind=kind)
    source = write_lines(tmp_path / "y.jsonl", [{**good(i), "chosen": None} for i in range(5)])
    with pytest.raises(ConfigError, match=r"prompts/1 rows, which cannot become pairs/1.* Empty .*: chosen; fill"):
        ingest(source, tmp_path / "v", kind="pairs/1")


def test_too_much_damage_fails_after_writing_the_account(tmp_path):
    source = write_lines(tmp_path / "x.jsonl", [good(0), good(1), *["{" for _ in range(3)]])
    with pytest.raises(
        StageFailure, match=r"3 of 5 rows .* max_quarantine_fraction=0.2: 3 parse_error \(first at x.jsonl:3\)"
    ):
        ingest(source, tmp_path / "w")
    quarantine = open_dataset(tmp_path / "w" / "out" / "quarantine")
    assert quarantine.num_rows == 3 and open_dataset(tmp_path / "w" / "out" / "data").manifest["counts"]["codes"] == {
        "parse_error": 3
    }
    assert (tmp_path / "w" / "reports" / "ingest.md").exists()


def test_the_error_shows_the_first_row_that_was_refused_to_its_last_column(tmp_path):
    """It said a code and a line, and the label that was wrong had to be looked up."""
    rows = [{"prompt": "\ud800" + "p" * 500, "response": f"answer {i}", "label": "good"} for i in range(5)]
    with pytest.raises(
        StageFailure,
        match=r'true or false, 1 or 0, yes or no;.* The first with bad_label: .*p…", "response": "answer 0", "label": "good"}$',
    ):
        ingest(write_lines(tmp_path / "x.jsonl", [{**one, "prompt": "p" * 500} for one in rows]), tmp_path / "w")
    with pytest.raises(StageFailure, match=r"The first with .*: "):  # half of a surrogate pair
        ingest(write_lines(tmp_path / "y.jsonl", rows), tmp_path / "v")


# without the mark that says so
@pytest.mark.parametrize(
    "encoding, error, tells",
    [
        ("latin-1", StageFailure, "invalid_utf8.*posttrain show .*quarantine.*iconv -f latin1 -t utf-8"),
        ("utf-16-le", ConfigError, "iconv -f utf-16le -t utf-8"),
    ],
)
def test_a_file_in_another_encoding_is_refused_with_how_to_rewrite_it(tmp_path, encoding, error, tells):
    (tmp_path / "x.csv").write_bytes(
        ("prompt,chosen,rejected\n" + "".join(f"où {i},très bien {i},mal {i}\n" for i in range(9))).encode(encoding)
    )
    with pytest.raises(error, match=tells):
        ingest(tmp_path / "x.csv", tmp_path / "w")
    # and with a byte order mark
    (tmp_path / "x.csv").write_bytes((tmp_path / "x.csv").read_bytes().decode(encoding).encode("utf-8-sig"))
    assert [row["prompt"][0]["content"] for row in ingest(tmp_path / "x.csv", tmp_path / "w2").rows][:2] == [
        "où 0",
        "où 1",
    ]


def test_cells_over_several_lines_in_another_encoding_are_refused_with_how_to_rewrite_them(tmp_path):
    """Their second lines can be read, and were taken for rows of their own."""
    cells = "".join(f'Größe {i}?;"Übung\nist {i}"\n' for i in range(9))
    (tmp_path / "x.csv").write_bytes(f"question;answer\n{cells}".encode("latin-1"))
    with pytest.raises(StageFailure, match="9 of 9 rows .* 9 invalid_utf8 .*iconv -f latin1 -t utf-8"):
        ingest(tmp_path / "x.csv", tmp_path / "w")
    one = 'first;"a\nb"\n\xff;"a\nb"\nlast;c\n'.encode("latin-1")  # one such row costs no other
    (tmp_path / "x.csv").write_bytes(b"question;answer\n" + one)
    kept = ingest(tmp_path / "x.csv", tmp_path / "v", max_quarantine_fraction=1)
    assert len(kept.rows) == 2 and len(kept.quarantine) == 1
    # a quote that opens nothing still costs its own line alone
    (tmp_path / "x.csv").write_bytes(b"question;answer\n" + 'a";b\n\xff;c\nd;e\nf";g\nh;i\n'.encode("latin-1"))
    kept = ingest(tmp_path / "x.csv", tmp_path / "u", max_quarantine_fraction=1)
    assert len(kept.rows) == 2 and len(kept.quarantine) == 3


def test_solutions_without_a_box_are_refused_with_how_to_learn_them(tmp_path):
    rows = [json.dumps({"problem": f"{i} + 1?", "solution": f"{i + 1}"}) for i in range(3)]
    source = write_lines(tmp_path / "x.jsonl", rows)
    with pytest.raises(ConfigError, match=r"boxed.*prompt_column=problem completion_column=solution"):
        ingest(source, tmp_path / "w")
    learnt = ingest(source, tmp_path / "v", prompt_column="problem", completion_column="solution")
    assert [row["messages"][-1]["content"] for row in learnt.rows] == ["1", "2", "3"]


TWICE = [
    '{"prompt": "p", "chosen": "a", "rejected": "b", "chosen": "c"}',
    '{"prompt": [{"role": "user", "content": "p", "content": "q"}], "chosen": "a", "rejected": "b"}',
    '{"prompt" : "p", "chosen" : "a", "rejected" : "b", "prompt" : "q"}',
]
ONCE = [
    '{"prompt": "say \\":\\" and \\\\\\":", "chosen": "{\\"chosen\\": 1, \\"chosen\\": 2}", "rejected": "b\\\\"}',
    '{"prompt":"q","chosen":"a","rejected":"b","k\\\\":1,"meta":[{"a":1},{"a":2}]}',
    '{"prompt" : "r", "chosen" : "a", "rejected" : "b"}',
]


def test_a_key_that_comes_twice_is_no_row(tmp_path):
    """Of two values of one key every parser keeps one and says nothing; columns of a table likewise."""
    for index, path in enumerate((write_lines(tmp_path / "x.jsonl", TWICE + ONCE), tmp_path / "x.json")):
        if index:
            path.write_text("[" + ",\n".join(TWICE + ONCE) + "]")
        result = ingest(path, tmp_path / f"w{index}", max_quarantine_fraction=1)
        assert result.codes() == {1: ["parse_error"], 2: ["parse_error"], 3: ["parse_error"]}
        assert [row["prompt"][0]["content"] for row in result.rows] == ['say ":" and \\":', "q", "r"]
        assert '"c"' in result.refused[0]["raw_json"], "what was refused is kept as it was"
    table = pa.Table.from_arrays(
        [pa.array([x]) for x in ("p", "good", "bad", "worse")], names=["prompt", "chosen", "rejected", "chosen"]
    )
    pq.write_table(table, tmp_path / "x.parquet")
    with pa.ipc.new_stream(str(tmp_path / "x.arrow"), table.schema) as out:
        out.write_table(table)
    for ending in ("parquet", "arrow"):
        with pytest.raises(StageFailure, match="several columns are called chosen; give each its own name"):
            ingest(tmp_path / f"x.{ending}", tmp_path / ending)


def test_numbers_with_more_digits_than_a_float_holds_keep_them(tmp_path):
    rows = ['{"prompt": "p", "answer": 123456789012.3456789}', '{"prompt": "q", "answer": 12345678901234567890123}']
    assert [row["answer"] for row in ingest(write_lines(tmp_path / "x.jsonl", rows), tmp_path / "w").rows] == [
        "123456789012.3456789",
        "12345678901234567890123",
    ]
