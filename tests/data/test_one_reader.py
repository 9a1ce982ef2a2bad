"""Of each published shape one reader, and what it reads: two that accept the same columns would shadow each other
without a word.
"""

from __future__ import annotations

import json

import pytest

from stages.ingest import Config
from stages.ingestion import adapters, choices, formats, programs, published

from .driver import assistant, ingest, user, write_lines

TOOL = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}}}
TOOLS = json.dumps([TOOL])
GLAIVE = {
    "system": (
        "SYSTEM: You are a helpful assistant with access to the following functions. Use them if required"
        f" -\n{json.dumps(TOOL, indent=4)}\n\n{json.dumps({**TOOL, 'name': 'g'})}\n"
    ),
    "chat": (
        'USER: do it\nnow\n\n\nASSISTANT: <functioncall> {"name": "f", "arguments": \'{"x": 1}\'}'
        ' <|endoftext|>\n\n\nFUNCTION RESPONSE: {"y": 2}\n\n\nASSISTANT: It is 2. <|endoftext|>\n\n\n'
    ),
}
ORIG = {
    "orig_criteria": "Is it short?",
    "orig_feedback": "It is.",
    "orig_instruction": "q",
    "orig_reference_answer": "ref",
    "instruction": "###Task",
    "input": "",
}
FEEDBACK = {
    **ORIG,
    "orig_response": "r",
    "orig_score": "4",
    **{f"orig_score{i}_description": f"s{i}" for i in range(1, 6)},
    "output": "It is. [RESULT] 4",
}
COMPARED = {
    **ORIG,
    "orig_response_A": "a",
    "orig_response_B": "b",
    "orig_preference": "B",
    "orig_score_A": "2",
    "orig_score_B": "4",
    "output": "It is. [RESULT] B",
}
OPEN_MATH = {
    "expected_answer": "\\frac{1}{2}",
    "problem_type": "has_answer_extracted",
    "problem_source": "aops",
    "generation_model": "m",
    "pass_rate_72b_tir": "0.5",
    "problem": "1/2?",
    "generated_solution": "<think>t</think> \\boxed{\\frac12}",
    "inference_mode": "cot",
    "used_in_kaggle": True,
}
SYNTHETIC = {
    "problem_id": "p",
    "source": "s",
    "task_type": "verifiable_math",
    "in_source_id": "i",
    "prompt": "1+1?",
    "gold_standard_solution": "s",
    "verification_info": '{"ground_truth": "2"}',
    "metadata": "{}",
}
CODE = {
    **SYNTHETIC,
    "task_type": "prime_rl_code",
    "verification_info": json.dumps(
        {
            "language": "python",
            "test_cases": [{"type": "stdin_stdout", "fn_name": None, "input": "1\n", "output": "1\n"}],
        }
    ),
}
CALLED = {
    **SYNTHETIC,
    "task_type": "prime_rl_code",
    "verification_info": {
        "language": "python",
        "test_cases": [{"type": "function_call", "fn_name": "f", "input": "[1, 2]", "output": "3"}],
    },
}
TRUTHFUL = {
    "type": "Adversarial",
    "category": "Myths",
    "question": "q?",
    "best_answer": "a",
    "correct_answers": ["a", "c"],
    "incorrect_answers": ["b", "d"],
    "source": "s",
}
JUDGELM = {
    "review_id": "r",
    "question_id": 0,
    "answer1_id": "",
    "answer2_id": "",
    "reviewer_id": 1,
    "metadata": {},
    "text": "2 8\nThe second says more.",
    "score": [2.0, 8.0],
    "question_body": "q",
    "answer1_body": "a",
    "answer2_body": "b",
}
EDIT = {
    "domain": "general",
    "language": "english",
    "context": [user("q")],
    "original_response": "a",
    "edited_response": "b",
    "change_summary": "c",
    "feedback": ["f"],
}
PART = lambda text: [{"type": "text", "text": text, "image": None, "mimeType": None}]
ARENA = {
    "model_a": "m",
    "model_b": "n",
    "winner": "model_b",
    "conversation_a": [user("q"), assistant("a")],
    "conversation_b": [user("q"), assistant("b")],
    "language": "English",
    "is_code": False,
}
ARENA_140K = {
    **ARENA,
    "id": "x",
    "evaluation_order": 1,
    "full_conversation": [],
    "conversation_a": [{"role": "user", "content": PART("q")}, {"role": "assistant", "content": PART("a")}],
    "conversation_b": [{"role": "user", "content": PART("q")}, {"role": "assistant", "content": PART("b")}],
}

#: name: (a row, the kind that is asked for, the one reader of this shape, the kind it becomes, what the row must hold:
#: our columns -> values, texts for messages)
SHAPES = {
    "Open-Reasoner-Zero (columns)": (
        {"0": {"from": "human", "value": "1+1?"}, "1": {"from": "assistant", "ground_truth": {"value": "2"}}},
        "auto",
        "_orz",
        "prompts/1",
        {"prompt": ["1+1?"], "answer": "2", "domain": "math"},
    ),
    "Glaive function calling": (
        GLAIVE,
        "auto",
        "_glaive",
        "demonstrations/1",
        {"messages": ["", "do it\nnow", None, '{"y": 2}', "It is 2."]},
    ),
    "Prometheus feedback, for the judge": (
        FEEDBACK,
        "auto",
        "instruction",
        "demonstrations/1",
        {"messages": ["###Task", "It is. [RESULT] 4"]},
    ),
    "Prometheus feedback, as ratings": (
        FEEDBACK,
        "ratings/1",
        "_prometheus",
        "ratings/1",
        {"prompt": ["q"], "completion": ["r"], "score": 4.0, "scale_min": 1.0, "scale_max": 5.0, "critique": "It is."},
    ),
    "Prometheus preference, as pairs": (
        COMPARED,
        "pairs/1",
        "_prometheus_pair",
        "pairs/1",
        {"prompt": ["q"], "chosen": ["b"], "rejected": ["a"]},
    ),
    "Prometheus preference, for the judge": (
        COMPARED,
        "demonstrations/1",
        "instruction",
        "demonstrations/1",
        {"messages": ["###Task", "It is. [RESULT] B"]},
    ),
    "ToolACE": (
        {
            "system": "You compose functions: " + TOOLS,
            "conversations": [
                {"from": "user", "value": "do"},
                {"from": "assistant", "value": "[f(x=1)]"},
                {"from": "tool", "value": "{}"},
                {"from": "assistant", "value": "Done."},
            ],
        },
        "auto",
        "messages",
        "demonstrations/1",
        {"messages": ["You compose functions: " + TOOLS, "do", "[f(x=1)]", "{}", "Done."]},
    ),
    "xLAM": (
        {"id": 0, "query": "do", "tools": TOOLS, "answers": json.dumps([{"name": "f", "arguments": {"x": 1}}])},
        "auto",
        "_xlam",
        "demonstrations/1",
        {"messages": ["", "do", None]},
    ),
    "Hermes function calling": (
        {
            "id": "1",
            "conversations": [
                {"from": "system", "value": "s"},
                {"from": "human", "value": "do"},
                {"from": "gpt", "value": "<tool_call>\n{}\n</tool_call>"},
            ],
            "tools": TOOLS,
            "category": "c",
            "subcategory": "s",
            "task": "t",
        },
        "auto",
        "messages",
        "demonstrations/1",
        {"messages": ["s", "do", "<tool_call>\n{}\n</tool_call>"], "category": "c"},
    ),
    "UltraInteract, SFT": (
        {"task": "Math", "dataset": "gsm8k", "instruction": "q", "response": "a", "id": "1", "parent_id": "root"},
        "auto",
        "instruction",
        "demonstrations/1",
        {"messages": ["q", "a"]},
    ),
    "UltraInteract, pairs": (
        {
            "task": "Math",
            "dataset": "gsm8k",
            "trajectory": [{"from": "user", "value": "q"}],
            "chosen": "a",
            "rejected": "b",
            "id": "1",
            "parent_id": "0",
        },
        "auto",
        "_pair_of_conversation",
        "pairs/1",
        {"prompt": ["q"], "chosen": ["a"], "rejected": ["b"]},
    ),
    "Tulu 3, SFT": (
        {"id": "1", "messages": [user("q"), assistant("a")], "source": "s"},
        "auto",
        "messages",
        "demonstrations/1",
        {"messages": ["q", "a"]},
    ),
    "Tulu 3, preferences": (
        {
            "id": "1",
            "source": "s",
            "prompt": "q",
            "chosen": [user("q"), assistant("a")],
            "rejected": [user("q"), assistant("b")],
            "chosen_rating": 5.0,
            "rejected_rating": 2.0,
        },
        "auto",
        "preference",
        "pairs/1",
        {"prompt": ["q"], "chosen": ["a"], "rejected": ["b"], "chosen_score": 5.0},
    ),
    "Tulu 3, RLVR": (
        {"messages": [user("q")], "ground_truth": "2", "dataset": "gsm8k", "constraint_type": None, "constraint": None},
        "auto",
        "rlvr",
        "prompts/1",
        {"prompt": ["q"], "answer": "2"},
    ),
    "open-instruct, code": (
        {"messages": [user("q")], "ground_truth": ["assert f(1) == 1", "assert f(2) == 2"], "dataset": "code"},
        "auto",
        "rlvr",
        "prompts/1",
        {"tests": ["assert f(1) == 1", "assert f(2) == 2"], "domain": "code"},
    ),
    "open-instruct, programs": (
        {
            "messages": [user("q")],
            "ground_truth": json.dumps([{"input": "1", "output": "2"}]),
            "dataset": ["code_stdio"],
        },
        "auto",
        "rlvr",
        "prompts/1",
        {"tests": [None], "domain": "code"},
    ),
    "OpenMathReasoning": (
        OPEN_MATH,
        "auto",
        "_open_math",
        "demonstrations/1",
        {"messages": ["1/2?", "<think>t</think> \\boxed{\\frac12}"]},
    ),
    "OpenMathReasoning, prompts": (
        OPEN_MATH,
        "prompts/1",
        "_open_math",
        "prompts/1",
        {"prompt": ["1/2?"], "answer": "\\frac{1}{2}", "answer_type": "latex"},
    ),
    "OpenMathInstruct-2": (
        {"problem": "p", "generated_solution": "s", "expected_answer": "2", "problem_source": "math"},
        "auto",
        "_open_math",
        "demonstrations/1",
        {"messages": ["p", "s"]},
    ),
    "SYNTHETIC-1, SFT": (
        {
            "response_id": "x",
            "problem_id": "p",
            "task_type": "verifiable_math",
            "score": 1,
            "messages": [user("q"), assistant("a")],
        },
        "auto",
        "messages",
        "demonstrations/1",
        {"messages": ["q", "a"]},
    ),
    "SYNTHETIC-1, mathematics": (
        SYNTHETIC,
        "auto",
        "_synthetic",
        "prompts/1",
        {"prompt": ["1+1?"], "answer": "2", "answer_type": "integer"},
    ),
    "SYNTHETIC-2, programs": (CODE, "prompts/1", "_synthetic", "prompts/1", {"tests": [None], "domain": "code"}),
    "SYNTHETIC-2, functions": (CALLED, "prompts/1", "_synthetic", "prompts/1", {"domain": "code"}),
    "DeepScaleR": (
        {"problem": "p", "answer": "2", "solution": "so \\boxed{2}"},
        "auto",
        "math",
        "prompts/1",
        {"prompt": ["p"], "answer": "2"},
    ),
    "DAPO-Math-17k": (
        {
            "data_source": "math_dapo",
            "prompt": [user("p")],
            "ability": "MATH",
            "reward_model": {"ground_truth": "34", "style": "rule"},
            "extra_info": {"index": "a"},
        },
        "auto",
        "_verl",
        "prompts/1",
        {"prompt": ["p"], "answer": "34"},
    ),
    "Skywork-Reward": (
        {"chosen": [user("q"), assistant("a")], "rejected": [user("q"), assistant("b")], "source": "s"},
        "auto",
        "preference",
        "pairs/1",
        {"prompt": ["q"], "chosen": ["a"], "rejected": ["b"]},
    ),
    "HelpSteer3": (
        {
            "domain": "g",
            "language": "english",
            "context": [user("q")],
            "response1": "a",
            "response2": "b",
            "overall_preference": -2,
            "individual_preference": [{"score": -2, "reasoning": "r"}],
        },
        "auto",
        "_steerpref",
        "pairs/1",
        {"prompt": ["q"], "chosen": ["a"], "rejected": ["b"], "strength": 2},
    ),
    "JudgeLM": (JUDGELM, "auto", "_judgelm", "pairs/1", {"prompt": ["q"], "chosen": ["b"], "rejected": ["a"]}),
    "HHH alignment": (
        {"input": "q", "targets": {"choices": ["a", "b"], "labels": [0, 1]}},
        "auto",
        "_hhh",
        "pairs/1",
        {"prompt": ["q"], "chosen": ["b"], "rejected": ["a"]},
    ),
    "HelpSteer3, edits": (EDIT, "auto", "_edited", "pairs/1", {"prompt": ["q"], "chosen": ["b"], "rejected": ["a"]}),
    "Arena 100k": (
        {**ARENA, "question_id": "x", "judge": "j", "turn": 1, "anony": True, "tstamp": 1.7e9},
        "auto",
        "_arena",
        "pairs/1",
        {"prompt": ["q"], "chosen": ["b"], "rejected": ["a"]},
    ),
    "Arena 140k": (ARENA_140K, "auto", "_arena", "pairs/1", {"prompt": ["q"], "chosen": ["b"], "rejected": ["a"]}),
    "LMSYS-Chat-1M": (
        {
            "conversation_id": "c",
            "model": "m",
            "conversation": [user("q"), assistant("a")],
            "turn": 1,
            "language": "English",
            "openai_moderation": [{"flagged": False}],
            "redacted": False,
        },
        "auto",
        "messages",
        "demonstrations/1",
        {"messages": ["q", "a"]},
    ),
    "TruthfulQA, generation": (TRUTHFUL, "auto", "_truthful", "prompts/1", {"category": "Myths", "answer_type": "mc"}),
    "TruthfulQA, multiple choice": (
        {
            "question": "q?",
            "mc1_targets": {"choices": ["a", "b"], "labels": [1, 0]},
            "mc2_targets": {"choices": ["a", "b"], "labels": [1, 0]},
        },
        "auto",
        "multiple_choice",
        "prompts/1",
        {"answer_type": "mc"},
    ),
    "IFBench": (
        {
            "key": "1",
            "prompt": "q",
            "instruction_id_list": ["count:word_count_range"],
            "kwargs": [{"min_words": 1, "max_words": 5}],
        },
        "prompts/1",
        "prompts",
        "prompts/1",
        {"prompt": ["q"]},
    ),
    "MBPP": (
        {
            "task_id": 1,
            "text": "q",
            "code": "def f(): return 1",
            "test_list": ["assert f() == 1"],
            "test_setup_code": "",
            "challenge_test_list": [],
        },
        "auto",
        "programs",
        "prompts/1",
        {"tests": ["assert f() == 1\n"]},
    ),
    "MBPP, demonstrations": (
        {
            "task_id": 1,
            "text": "q",
            "code": "def f(): return 1",
            "test_list": ["assert f() == 1"],
            "test_setup_code": "",
            "challenge_test_list": [],
        },
        "demonstrations/1",
        "_mbpp",
        "demonstrations/1",
        {},
    ),
    "APPS": (
        {
            "problem_id": 1,
            "question": "q",
            "solutions": "[]",
            "input_output": json.dumps({"inputs": ["1\n"], "outputs": ["2\n"]}),
            "difficulty": "easy",
            "starter_code": "",
        },
        "auto",
        "programs",
        "prompts/1",
        {"tests": [None]},
    ),
}


def readers_of(row: dict, kind: str) -> list[str]:
    """The published forms that accept a row; where none does, the formats of our own columns and special shapes."""
    found = [(form.read or form.stream).__name__ for form in published.FORMS if form.of(row, Config(kind=kind))]
    special = [
        name
        for name, fits in (
            ("programs", programs.is_program),
            ("multiple_choice", choices.is_multiple_choice),
            ("harmful", adapters.harmful_list),
            ("qa", adapters.is_qa),
        )
        if fits(row)
    ]
    return found or special or [formats.detect([row])]


@pytest.mark.parametrize("name", SHAPES)
def test_each_shape_has_one_reader(name, tmp_path):
    row, kind, reader, becomes, holds = SHAPES[name]
    assert readers_of(row, kind) == [reader]
    result = ingest(write_lines(tmp_path / "x.jsonl", [row]), tmp_path / "w", kind=kind)
    (got,) = result.rows
    said = {
        column: (
            [message.get("content") for message in value]
            if column in ("messages", "prompt", "chosen", "rejected", "completion")
            else [test["code"] for test in value]
            if column == "tests"
            else value
        )
        for column in holds
        for value in [got[column]]
    }
    assert result.data.kind == becomes and said == holds


def test_no_form_accepts_the_rows_of_another():
    for name, (row, *_) in SHAPES.items():
        for kind in (
            "auto",
            "prompts/1",
            "demonstrations/1",
            "pairs/1",
            "comparisons/1",
            "ratings/1",
            "unpaired/1",
            "text/1",
        ):
            assert len([form for form in published.FORMS if form.of(row, Config(kind=kind))]) <= 1, (name, kind)


def test_calls_of_glaive_are_calls_and_its_functions_are_tools(tmp_path):
    broken = {**GLAIVE, "chat": GLAIVE["chat"].replace("'{\"x\": 1}'", "'{\"x\": '")}
    plain = {
        "system": "SYSTEM: You are a helpful assistant, with no access to external functions.",
        "chat": "USER: hi\n\n\nASSISTANT: Hello. <|endoftext|>",
    }
    result = ingest(
        write_lines(tmp_path / "x.jsonl", [GLAIVE, broken, plain]), tmp_path / "w", max_quarantine_fraction=1
    )
    calls, talk = sorted((row["messages"] for row in result.rows), key=len, reverse=True)
    assert (
        [tool["name"] for tool in json.loads(calls[0]["functions"])] == ["f", "g"]
        and json.loads(calls[2]["function_calls"])["function"] == {"name": "f", "arguments": {"x": 1}}
        and calls[3]["role"] == "tool"
    )
    assert [message["content"] for message in talk] == [
        "You are a helpful assistant, with no access to external functions.",
        "hi",
        "Hello.",
    ] and result.codes() == {2: ["wrong_type"]}


def test_a_conversation_may_be_the_list_of_its_messages(tmp_path):
    """Open-Reasoner-Zero's file is a list of lists; so are dumps of chats."""
    rows = [
        [{"from": "human", "value": f"{i}+1?"}, {"from": "assistant", "ground_truth": {"value": str(i + 1)}}]
        for i in range(3)
    ]
    (tmp_path / "orz.json").write_text(json.dumps(rows))
    assert [
        (row["prompt"][0]["content"], row["answer"]) for row in ingest(tmp_path / "orz.json", tmp_path / "w").rows
    ] == [("0+1?", "1"), ("1+1?", "2"), ("2+1?", "3")]
    chats = write_lines(
        tmp_path / "chats.jsonl",
        [{"messages": [user("p"), assistant("a")]}, json.dumps([user("q"), assistant("b")]), json.dumps([1, 2]), "[]"],
    )
    result = ingest(chats, tmp_path / "w2", max_quarantine_fraction=1)
    assert [[m["content"] for m in row["messages"]] for row in result.rows] == [
        ["p", "a"],
        ["q", "b"],
    ] and result.codes() == {3: ["wrong_type"], 4: ["wrong_type"]}


def test_functions_of_synthetic_are_called_with_their_arguments(tmp_path):
    from stages.reward.components import RewardComponent
    from stages.reward.rewards import build_rewards

    (row,) = ingest(write_lines(tmp_path / "x.jsonl", [CALLED]), tmp_path / "w", kind="prompts/1").rows
    answers = [f"```python\ndef f(a, b): return a {sign} b\n```" for sign in "+-"]
    scored = build_rewards([RewardComponent(kind="code")], {}).score(
        [
            {"prompt_row": row, "completion_text": text, "completion_ids": [1], "finish_reason": "eos"}
            for text in answers
        ]
    )
    assert [one.total for one in scored] == [1.0, 0.0]
