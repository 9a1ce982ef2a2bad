"""Tools, tool calls and reasoning on their way from a file to what is trained (synth.tool_data, synth.cold_start)."""

import json

import pytest

from stages.spec import ConfigError

from .driver import assistant, ingest, user, write_lines

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
CALL = {"id": "call00001", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'}}
CALLING = {"role": "assistant", "content": None, "tool_calls": [CALL]}
ANSWER = {"role": "tool", "tool_call_id": "call00001", "content": "sun"}
OPENAI = {"messages": [user("weather?"), CALLING, ANSWER, assistant("It is sunny.")], "tools": TOOLS}


def told(message: dict) -> list:
    return json.loads(message["functions"])


@pytest.mark.parametrize(
    "row, kind, column",
    [
        ({"prompt": [user("weather?")], "answer": "sun", "tools": TOOLS}, "prompts/1", "prompt"),
        ({"prompt": "weather?", "answer": "sun", "tools": json.dumps(TOOLS)}, "prompts/1", "prompt"),
        (
            {"prompt": "weather?", "chosen": [CALLING], "rejected": [assistant("No.")], "tools": TOOLS},
            "pairs/1",
            "prompt",
        ),
        (
            {"chosen": [user("weather?"), CALLING], "rejected": [user("weather?"), assistant("No.")], "tools": TOOLS},
            "pairs/1",
            "prompt",
        ),
        ({"prompt": "weather?", "completion": [CALLING], "label": True, "tools": TOOLS}, "unpaired/1", "prompt"),
        (
            {"prompt": "weather?", "completions": [[CALLING], [assistant("No.")]], "ranks": [0, 1], "tools": TOOLS},
            "rankings/1",
            "prompt",
        ),
        (
            {"prompt": "weather?", "response_a": [CALLING], "response_b": "No.", "label": "A", "tools": TOOLS},
            "pairs/1",
            "prompt",
        ),
        (
            {"prompt": [user("weather?")], "completion": [CALLING, ANSWER, assistant("It is sunny.")], "tools": TOOLS},
            "demonstrations/1",
            "messages",
        ),
        (OPENAI, "demonstrations/1", "messages"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_tools_column_reaches_the_system_message_of_every_kind(tmp_path, row, kind, column):
    (got,) = ingest(write_lines(tmp_path / "x.jsonl", [row]), tmp_path / "w", kind=kind).rows
    assert (
        got[column][0]["role"] == "system"
        and got[column][0]["content"] == ""
        and told(got[column][0]) == TOOLS
        and got[column][1] == user("weather?")
    )
    assert "tools" not in (got["extra_json"] or "")
    if kind == "demonstrations/1":
        assert got["train_turns"] == [2, 4] and json.loads(got["messages"][2]["function_calls"]) == CALL
    (kept,) = ingest(
        write_lines(tmp_path / "y.jsonl", [{**row, **({"system": "Be kind."} if column == "prompt" else {})}]),
        tmp_path / "s",
        kind=kind,
    ).rows
    assert told(kept[column][0]) == TOOLS and kept[column][0]["content"] == ("Be kind." if column == "prompt" else "")


def test_a_tools_column_that_defines_none_stays_beside_the_row(tmp_path):
    for number, tools in enumerate((["hammer", "saw"], "a hammer", [{"colour": "red"}])):
        (got,) = ingest(
            write_lines(tmp_path / f"{number}.jsonl", [{"prompt": "fix it", "tools": tools}]),
            tmp_path / str(number),
            kind="prompts/1",
        ).rows
        assert got["prompt"] == [user("fix it")] and json.loads(got["extra_json"]) == {"tools": tools}


def test_the_same_question_with_other_tools_is_another_row(tmp_path):
    other = [{"type": "function", "function": {"name": "ask_friend", "parameters": {}}}]
    for kind, row in (
        ("prompts/1", {"prompt": "weather?", "answer": "sun"}),
        ("demonstrations/1", {"prompt": "weather?", "completion": "sun"}),
    ):
        rows = [{**row, "tools": TOOLS}, {**row, "tools": other}, {**row, "tools": TOOLS}, row]
        got = ingest(
            write_lines(tmp_path / f"{kind[:3]}.jsonl", rows), tmp_path / kind[:3], kind=kind, max_quarantine_fraction=1
        )
        assert len(got.rows) == 3 and len({r["prompt_id"] for r in got.rows}) == 3


def test_other_ways_of_writing_calls(tmp_path):
    """LLaMA-Factory's ShareGPT with turns of their own for calls, and the older role of their answers."""
    sharegpt = {
        "conversations": [
            {"from": "human", "value": "weather?"},
            {"from": "function_call", "value": '{"name": "get_weather", "arguments": {"city": "Rome"}}'},
            {"from": "observation", "value": "sun"},
            {"from": "gpt", "value": "It is sunny."},
        ],
        "tools": json.dumps(TOOLS),
    }
    older = {
        "messages": [
            user("weather?"),
            {"role": "assistant", "content": None, "function_call": CALL["function"]},
            {"role": "function", "name": "get_weather", "content": "sun"},
            assistant("Sunny."),
        ],
        "tools": TOOLS,
    }
    for number, row in enumerate((sharegpt, older)):
        (got,) = ingest(write_lines(tmp_path / f"{number}.jsonl", [row]), tmp_path / str(number)).rows
        assert [m["role"] for m in got["messages"]] == ["system", "user", "assistant", "tool", "assistant"] and got[
            "train_turns"
        ] == [2, 4]
        assert (
            json.loads(got["messages"][2]["function_calls"])["name"] == "get_weather"
            and told(got["messages"][0]) == TOOLS
        )


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_is_written_before_the_text_or_its_loss_is_told(tmp_path, field):
    rows = [
        {
            "messages": [
                user(f"q{i}"),
                assistant("4") | {field: "two and two\n"},
                user("again"),
                {**CALLING, field: "I ask."},
                ANSWER,
                assistant("<think>\nhere\n</think>\n\n5") | {field: "here"},
            ]
        }
        for i in range(3)
    ]
    source = write_lines(tmp_path / "x.jsonl", rows)
    made = ingest(source, tmp_path / "w")
    said = [m.get("content") for m in made.rows[0]["messages"]]
    assert said == [
        "q0",
        "<think>\ntwo and two\n</think>\n\n4",
        "again",
        "<think>\nI ask.\n</think>\n\n",
        "sun",
        "<think>\nhere\n</think>\n\n5",
    ]
    assert made.result["summary"]["reasoning.written"] == 6 and not any(
        w["code"] == "reasoning_left_out" for w in made.result["warnings"]
    )
    dropped = ingest(source, tmp_path / "d", reasoning="drop")
    assert dropped.rows[0]["messages"][1]["content"] == "4" and "two and two" in dropped.rows[0]["extra_json"]
    assert any(
        w["code"] == "reasoning_left_out" and w["text"].startswith("6 assistant messages")
        for w in dropped.result["warnings"]
    ) and dropped.counts["reasoning"] == {"left": 6, "written": 0}
    blocks = write_lines(
        tmp_path / "y.jsonl", [{"messages": [user("q"), assistant("4") | {field: [{"type": "thinking"}]}]}]
    )
    assert any(w["code"] == "reasoning_left_out" for w in ingest(blocks, tmp_path / "b").result["warnings"])
    with pytest.raises(ConfigError, match="reasoning changes rows as they are read from files"):
        ingest(made.workdir / "out" / "data", tmp_path / "again", reasoning="drop")


def test_reasoning_of_preferred_answers(tmp_path):
    row = {
        "prompt": "q",
        "chosen": [assistant("4") | {"reasoning_content": "sum"}],
        "rejected": [{"role": "assistant", "content": "5", "reasoning_content": "guess"}],
    }
    (got,) = ingest(write_lines(tmp_path / "x.jsonl", [row]), tmp_path / "w", kind="pairs/1").rows
    assert [got[side][0]["content"] for side in ("chosen", "rejected")] == [
        "<think>\nsum\n</think>\n\n4",
        "<think>\nguess\n</think>\n\n5",
    ] and got["extra_json"] is None
    ranked = {
        "prompt": "q",
        "completions": [[assistant("4") | {"reasoning_content": "sum"}], [assistant("5")]],
        "ranks": [0, 1],
    }
    (got,) = ingest(write_lines(tmp_path / "y.jsonl", [ranked]), tmp_path / "r", kind="rankings/1").rows
    assert got["completions"][0][0]["content"] == "<think>\nsum\n</think>\n\n4"


def test_calls_are_written_as_text_where_that_is_asked(tmp_path):
    (got,) = ingest(write_lines(tmp_path / "x.jsonl", [OPENAI]), tmp_path / "w", tool_calls="text").rows
    assert got["messages"][2] == assistant(
        '<tool_call>{"name": "get_weather", "arguments": {"city": "Rome"}}</tool_call>'
    ) and got["train_turns"] == [2, 4]
    assert "functions" not in got["messages"][0] and '"name": "get_weather"' in got["messages"][0]["content"]
    pairs = write_lines(
        tmp_path / "p.jsonl",
        [{"prompt": "weather?", "chosen": [CALLING], "rejected": [assistant("No.")], "tools": TOOLS}],
    )
    (got,) = ingest(pairs, tmp_path / "p", kind="pairs/1", tool_calls="text", system_prompts="merge").rows
    assert (
        got["chosen"][0]["content"].startswith("<tool_call>")
        and got["prompt"][0]["role"] == "user"
        and got["prompt"][0]["content"].endswith("weather?")
    )
    broken = {
        "messages": [
            user("x"),
            {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{oops"}}]},
        ]
    }
    assert ingest(
        write_lines(tmp_path / "b.jsonl", [broken, OPENAI]),
        tmp_path / "b",
        tool_calls="text",
        max_quarantine_fraction=1,
    ).codes() == {1: ["wrong_type"]}
