"""Published datasets in their own columns mean what their authors say, or are refused with what to write."""

import json

import pytest

from stages.harness import StageFailure
from stages.ingest import matching_kind, native_kind

from .driver import assistant, ingest, user, write_lines

AXES = {"helpfulness": 3, "correctness": 4, "coherence": 4, "complexity": 1, "verbosity": 2}
LABELLED = {
    "prompt": "p",
    "response_0": "a",
    "response_1": "b",
    "is_response_0_safe": True,
    "is_response_1_safe": False,
    "better_response_id": 1,
    "safer_response_id": 0,
}
STEERED = {"prompt": "p", "response_1": "a", "response_2": "b", "preference_statement": "s"}
POST = {"post": "text", "title": "T", "subreddit": "tifu", "site": None, "article": None}
ASKED = "SUBREDDIT: r/tifu\n\nTITLE: T\n\nPOST: text\n\nTL;DR:"
PROBLEM = {
    "problem": "What is 1+1?",
    "solution": "So $\\boxed{2}$",
    "messages": [user("What is 1+1?"), assistant("So $\\boxed{2}$")],
}
CALLS = json.dumps([{"name": "f", "arguments": {"x": 1}}])
TOOLS = json.dumps([{"name": "f", "description": "d", "parameters": {"x": {"type": "int", "description": "n"}}}])


def said(messages) -> list[str]:
    return [message.get("content") for message in messages]


@pytest.mark.parametrize(
    "row, chosen, rejected, more",
    [
        ({**STEERED, "preference_strength": -3}, "a", "b", {"strength": 3}),
        ({**STEERED, "preference_strength": 2}, "b", "a", {"strength": 2}),
        (
            {"context": [user("p")], "response1": "a", "response2": "b", "overall_preference": 1, "domain": "stem"},
            "b",
            "a",
            {"strength": 1},
        ),
        (
            {"history": "p", "human_ref_A": "a", "human_ref_B": "b", "labels": 1, "score_A": 9, "score_B": 2},
            "a",
            "b",
            {},
        ),
        (
            {"history": "p", "human_ref_A": "a", "human_ref_B": "b", "labels": 0, "score_A": 2, "score_B": 9},
            "b",
            "a",
            {},
        ),
        (
            {
                "question": {"full_text": "p", "id": "x"},
                "answer_0": "a",
                "answer_1": "b",
                "score_0": -0.33,
                "score_1": 0.33,
                "quotes_0": {},
                "quotes_1": {},
            },
            "b",
            "a",
            {},
        ),
        (
            {
                "conversation_a": [user("p"), assistant("a")],
                "conversation_b": [user("p"), assistant("b")],
                "winner": "model_b",
                "model_a": "m",
                "model_b": "n",
            },
            "b",
            "a",
            {},
        ),
        (
            {
                "prompt": '["p"]',
                "response_a": '["a"]',
                "response_b": '["b"]',
                "winner_model_a": 0,
                "winner_model_b": 1,
                "winner_tie": 0,
            },
            "b",
            "a",
            {},
        ),
        ({"question": "p", "response_A": "a", "response_B": "b", "label": "B>A"}, "b", "a", {}),
        ({"prompt": "p", "response_0": "a", "response_1": "b", "better_response_id": 1}, "b", "a", {}),
        ({"prompt": "p", "response_1": "a", "response_2": "b", "winner": "model_a"}, "a", "b", {}),
        ({"instruction": "p", "output_1": "a", "output_2": "b", "label": "output_2"}, "b", "a", {}),
        ({"question": "p", "response_j": "a", "response_k": "b", "qid": 1}, "a", "b", {}),
        (
            {
                "instruction": "p",
                "chosen_response": "a",
                "chosen_rating": 5,
                "rejected_response": "b",
                "rejected_rating": 2,
            },
            "a",
            "b",
            {"chosen_score": 5.0, "rejected_score": 2.0},
        ),
        (
            {
                "prompt": "p",
                "chosen": [user("p"), assistant("a")],
                "chosen-rating": 4.5,
                "rejected": [user("p"), assistant("b")],
                "rejected-rating": 2.0,
            },
            "a",
            "b",
            {"chosen_score": 4.5},
        ),
        (
            {
                "conversations": [{"from": "human", "value": "p"}],
                "chosen": {"from": "gpt", "value": "a"},
                "rejected": {"from": "gpt", "value": "b"},
            },
            "a",
            "b",
            {},
        ),
        ({"trajectory": [{"from": "user", "value": "p"}], "chosen": "a", "rejected": "b"}, "a", "b", {}),
    ],
)
def test_preferences(tmp_path, row, chosen, rejected, more):
    (got,) = ingest(write_lines(tmp_path / "x.jsonl", [row]), tmp_path / "w", kind="pairs/1").rows
    assert (said(got["prompt"]), said(got["chosen"]), said(got["rejected"])) == (["p"], [chosen], [rejected])
    assert {name: got[name] for name in more} == more


def test_a_judgement_of_a_turn_is_about_the_answers_up_to_it(tmp_path):
    """MT-Bench's judgements by people: both turns stand in every row, and `turn` says which of them was judged."""
    sides = {
        f"conversation_{side}": [message for k in "12" for message in (user(f"q{k}"), assistant(f"{side}{k}"))]
        for side in "ab"
    }
    rows = [{**sides, "winner": winner, "turn": turn} for turn, winner in ((1, "model_b"), (2, "model_a"))]
    made = ingest(write_lines(tmp_path / "x.jsonl", rows), tmp_path / "w", kind="pairs/1").rows
    said = lambda row, side: [message["content"] for message in row[side]]
    assert [(said(r, "prompt"), said(r, "chosen"), said(r, "rejected")) for r in made] == [
        (["q1"], ["b1"], ["a1"]),
        (["q1"], ["a1", "q2", "a2"], ["b1", "q2", "b2"]),
    ]


def test_two_columns_that_name_different_winners_are_not_chosen_between(tmp_path):
    """The first was taken, whatever the second said, where the answers had names other than response_a."""
    rows = [
        {"prompt": f"p{i}", "response_1": "a", "response_2": "b", "label": "response_2", "winner": winner}
        for i, winner in enumerate(("response_2", "response_1", None))
    ]
    result = ingest(write_lines(tmp_path / "x.jsonl", rows), tmp_path / "w", max_quarantine_fraction=1)
    assert [said(got["chosen"]) for got in result.rows] == [["b"], ["b"]] and result.codes() == {2: ["label_unsaid"]}


def test_no_preference_is_a_tie(tmp_path):
    rows = [
        {**STEERED, "preference_strength": 0},
        {"prompt": "q", "response_a": "a", "response_b": "b", "winner": "tie (bothbad)"},
    ]
    for index, row in enumerate(rows):
        assert ingest(write_lines(tmp_path / f"{index}.jsonl", [row]), tmp_path / f"w{index}").codes() == {
            1: ["all_tied"]
        }


def test_two_labels_of_a_row_are_chosen_between(tmp_path):
    path = write_lines(tmp_path / "x.jsonl", [LABELLED])
    with pytest.raises(StageFailure, match="label_column=better_response_id .* or label_column=safer_response_id"):
        ingest(path, tmp_path / "w")
    better, safer = (
        ingest(path, tmp_path / name, label_column=f"{name}_response_id").rows[0] for name in ("better", "safer")
    )
    assert said(better["chosen"]) == ["b"] and said(safer["chosen"]) == ["a"]


def test_summaries_are_asked_for_as_published_and_held_out_rows_stay_so(tmp_path):
    rows = [
        {
            "info": POST,
            "summaries": [{"text": "a", "policy": "sup4"}, {"text": "b", "policy": "ref"}],
            "choice": 1,
            "worker": "w",
            "batch": "b1",
            "split": split,
        }
        for split in ("train", "valid1")
    ]
    rows[1] = {**rows[1], "info": {**POST, "post": "other"}}
    path = write_lines(tmp_path / "x.jsonl", rows)
    pairs = ingest(path, tmp_path / "w").rows
    assert [
        (said(pair["prompt"]), said(pair["chosen"]), pair["chosen_gen"]["model_id"], pair["split"]) for pair in pairs
    ] == [([ASKED], ["b"], "ref", "train"), ([ASKED.replace("text", "other")], ["b"], "ref", "validation")]
    axis = {
        "info": POST,
        "summary": {"text": "a", "policy": "sup4", "axes": {"overall": 5, "accuracy": 6, "compatible": None}},
        "worker": "w",
        "split": "test",
    }
    (rating,) = ingest(write_lines(tmp_path / "y.jsonl", [axis]), tmp_path / "w2").rows
    assert (rating["score"], rating["scale_max"], rating["split"], rating["ann"]["annotator_id"]) == (
        5.0,
        7.0,
        "test",
        "w",
    )
    assert [(item["aspect"], item["score"]) for item in rating["aspects"]] == [("accuracy", 6.0)]


def test_helpfulness_is_the_score_of_helpsteer_and_turns_of_a_prompt_are_turns(tmp_path):
    rows = [
        {"prompt": "p", "response": "good", **AXES},
        {"prompt": "p", "response": "bad", **AXES, "helpfulness": 1},
        {"prompt": "hi\n<extra_id_1>Assistant\nhello\n<extra_id_1>User\nbye", "response": "c", **AXES},
    ]
    path = write_lines(tmp_path / "x.jsonl", rows)
    result = ingest(path, tmp_path / "w")
    assert result.data.kind == "ratings/1" and [row["score"] for row in result.rows] == [3.0, 1.0, 3.0]
    assert {item["aspect"]: item["score"] for item in result.rows[0]["aspects"]} == AXES
    assert [message["role"] for message in result.rows[2]["prompt"]] == ["user", "assistant", "user"] and said(
        result.rows[2]["prompt"]
    ) == ["hi", "hello", "bye"]
    (pair,) = ingest(path, tmp_path / "w2", kind="pairs/1", max_quarantine_fraction=1).rows
    assert (said(pair["chosen"]), said(pair["rejected"])) == (["good"], ["bad"])
    assert matching_kind(str(path), ("pairs/1", "demonstrations/1")) == "pairs/1"


def test_every_answer_of_ultrafeedback_is_a_rating(tmp_path):
    def answer(text, score, ratings):
        return {
            "model": "m",
            "response": text,
            "overall_score": score,
            "critique": "c",
            "custom_system_prompt": "s",
            "annotations": {name: {"Rating": rating, "Rationale": "r"} for name, rating in ratings.items()},
        }

    row = {
        "source": "evol",
        "instruction": "p",
        "models": ["m", "m"],
        "completions": [
            answer("a", 8.5, {"helpfulness": "5", "honesty": "4"}),
            answer("b", 10, {"helpfulness": "1", "honesty": "N/A"}),
            answer("c", 3.0, {"helpfulness": "2", "honesty": "2"}),
        ],
    }
    result = ingest(write_lines(tmp_path / "x.jsonl", [row]), tmp_path / "w", max_quarantine_fraction=0.5)
    assert [(said(rating["prompt"]), said(rating["completion"]), rating["score"]) for rating in result.rows] == [
        (["p"], ["a"], 8.5),
        (["p"], ["c"], 3.0),
    ]
    assert [(item["aspect"], item["score"], item["rationale"]) for item in result.rows[0]["aspects"]] == [
        ("helpfulness", 5.0, "r"),
        ("honesty", 4.0, "r"),
    ]
    # a 10 that meant 1
    assert result.counts["rows_in"] == 3 and [(row["line_no"], row["codes"]) for row in result.refused] == [
        (1, ["score_inconsistent"])
    ]


def test_a_row_that_nothing_comes_of_is_refused(tmp_path):
    """A question whose solutions are all missing gives no demonstration, and is counted."""
    rows = [
        {"question": f"q{i}", "final_answer": "1", "r1_solution_1": text, "r1_solution_2": None, "r1_solution_3": ""}
        for i, text in enumerate(("so 1", None, "thus 1"))
    ]
    result = ingest(
        write_lines(tmp_path / "x.jsonl", rows), tmp_path / "w", kind="demonstrations/1", max_quarantine_fraction=1
    )
    assert result.counts["rows_in"] == 3 and len(result.rows) == 2 and result.codes() == {2: ["missing_column"]}


def test_rankings(tmp_path):
    nectar = {
        "prompt": "\n\nHuman: p\n\nAssistant: x\n\nHuman: q\n\nAssistant: ",
        "answers": [{"answer": "b", "model": "m", "rank": 2.0}, {"answer": "a", "model": "n", "rank": 1.0}],
        "turns": 2,
        "num_responses": 2,
    }
    (row,) = ingest(write_lines(tmp_path / "n.jsonl", [nectar]), tmp_path / "w", kind="pairs/1").rows
    assert (said(row["prompt"]), said(row["chosen"]), said(row["rejected"]), row["chosen_gen"]["model_id"]) == (
        ["p", "x", "q"],
        ["a"],
        ["b"],
        "n",
    )
    votes = {
        "qid": 1,
        "question": "p",
        "answers": [{"answer_id": 1, "pm_score": 0, "text": "b"}, {"answer_id": 2, "pm_score": 3, "text": "a"}],
    }
    (row,) = ingest(write_lines(tmp_path / "s.jsonl", [votes]), tmp_path / "w2").rows
    assert row["scores"] == [0.0, 3.0] and row["ranks"] == [1, 0]


def messages_of_a_tree(tree="t", ok=True):
    def message(name, parent, role, text, rank=None, **more):
        return {
            "message_id": f"{tree}{name}",
            "parent_id": parent and f"{tree}{parent}",
            "message_tree_id": tree,
            "role": role,
            "text": text,
            "rank": rank,
            "lang": "en",
            "deleted": False,
            "review_result": True,
            **more,
        }

    return [
        message(1, None, "prompter", f"question {tree}"),
        message(2, 1, "assistant", "best", 0),
        message(3, 1, "assistant", "worse", 1),
        message(4, 1, "assistant", "spam", 2, review_result=False),
        message(5, 2, "prompter", "more"),
        message(6, 5, "assistant", "only", 0),
        message(7, 3, "prompter", "gone", deleted=True),
    ]


def test_openassistant_messages_become_rankings_or_the_best_replies(tmp_path):
    rows = messages_of_a_tree("t") + messages_of_a_tree("u")
    path = write_lines(tmp_path / "x.jsonl", rows)
    ranked = ingest(path, tmp_path / "w")
    assert ranked.data.kind == "rankings/1" and [
        (said(row["prompt"]), [said(item) for item in row["completions"]], row["ranks"]) for row in ranked.rows
    ] == [([f"question {tree}"], [["best"], ["worse"]], [0, 1]) for tree in "tu"]
    best = ingest(path, tmp_path / "w2", kind="demonstrations/1", validation_fraction=0.5)
    assert [(said(row["messages"]), row["train_turns"]) for row in best.rows][:2] == [
        (["question t", "best"], [1]),
        (["question t", "best", "more", "only"], [3]),
    ]
    # a tree is in one split
    assert len({(said(row["messages"])[0], row["split"]) for row in best.rows}) == 2
    lost = ingest(write_lines(tmp_path / "y.jsonl", [*rows[1:], *rows[:1]]), tmp_path / "w3", max_quarantine_fraction=1)
    assert {code for row in lost.refused for code in row["codes"]} == {
        "orphan_message",
        "left_out_message",
        "no_pair",
    } and len(lost.rows) == 1
    assert ranked.codes() == {
        5: ["no_pair"],
        4: ["left_out_message"],
        7: ["left_out_message"],
        12: ["no_pair"],
        11: ["left_out_message"],
        14: ["left_out_message"],
    }, "nothing vanishes"
    assert ranked.counts["rows_in"] == 8 and best.codes() == {
        4: ["left_out_message"],
        7: ["left_out_message"],
        11: ["left_out_message"],
        14: ["left_out_message"],
    }
    below = [{**row, "deleted": row["message_id"] == "t1"} for row in rows[:7]] + rows[7:]
    assert ingest(write_lines(tmp_path / "d.jsonl", below), tmp_path / "w5", max_quarantine_fraction=1).counts[
        "codes"
    ] == {"left_out_message": 9, "no_pair": 1}

    def nested(row):
        return {**row, "replies": [nested(other) for other in rows if other["parent_id"] == row["message_id"]]}

    trees = write_lines(
        tmp_path / "z.jsonl",
        [
            {"message_tree_id": root["message_id"], "tree_state": "ready_for_export", "prompt": nested(root)}
            for root in rows
            if root["parent_id"] is None
        ],
    )
    same = ingest(trees, tmp_path / "w4")
    assert [(row["prompt"], row["completions"], row["ranks"]) for row in same.rows] == [
        (row["prompt"], row["completions"], row["ranks"]) for row in ranked.rows
    ]
    assert native_kind(str(path)) == native_kind(str(trees)) == "rankings/1"


def test_dialogues_of_prosocial_dialog_lead_up_to_every_answer(tmp_path):
    def turn(dialogue, number, last):
        return {
            "context": f"said {dialogue}.{number}",
            "response": f"answered {dialogue}.{number}",
            "rots": ["It's wrong to threaten someone."] if number else None,
            "safety_label": "__needs_caution__" if number else "__casual__",
            "safety_annotations": ["needs caution"],
            "safety_annotation_reasons": ["a threat"],
            "source": "socialchemistry",
            "etc": None,
            "dialogue_id": dialogue,
            "response_id": number,
            "episode_done": last,
        }

    rows = [turn(0, 0, False), turn(0, 1, True), turn(1, 0, True), turn(2, 1, True)]
    result = ingest(
        write_lines(tmp_path / "x.jsonl", rows), tmp_path / "w", validation_fraction=0.5, max_quarantine_fraction=1
    )
    assert result.data.kind == "demonstrations/1" and result.codes() == {4: ["orphan_message"]}
    assert [(said(row["messages"]), row["train_turns"]) for row in result.rows] == [
        (["said 0.0", "answered 0.0"], [1]),
        (["said 0.0", "answered 0.0", "said 0.1", "answered 0.1"], [3]),
        (["said 1.0", "answered 1.0"], [1]),
    ]
    assert result.rows[0]["split"] == result.rows[1]["split"]
    extra = json.loads(result.rows[1]["extra_json"])
    assert extra["safety_label"] == "__needs_caution__" and extra["rots"] == ["It's wrong to threaten someone."]
    prompts = ingest(tmp_path / "x.jsonl", tmp_path / "w2", kind="prompts/1", max_quarantine_fraction=1)
    assert [said(row["prompt"])[-1] for row in prompts.rows] == ["said 0.0", "said 0.1", "said 1.0"]


def test_labelled_answers(tmp_path):
    for index, rows in enumerate(
        [
            [{"prompt": f"p{i}", "response": "c", "category": {"x": False}, "is_safe": i == 0} for i in range(2)],
            [{"messages": [user(f"p{i}"), assistant("c")], "label": i == 0} for i in range(2)],
            [
                {
                    "conversations": [{"from": "human", "value": f"p{i}"}, {"from": "gpt", "value": "c"}],
                    "kto_tag": i == 0,
                }
                for i in range(2)
            ],
        ]
    ):
        result = ingest(write_lines(tmp_path / f"{index}.jsonl", rows), tmp_path / f"w{index}")
        assert result.data.kind == "unpaired/1" and [
            (said(row["prompt"]), said(row["completion"]), row["label"]) for row in result.rows
        ] == [(["p0"], ["c"], True), (["p1"], ["c"], False)]


@pytest.mark.parametrize(
    "row, answer, answer_type",
    [
        (
            {
                "data_source": "math_dapo",
                "prompt": [user("p")],
                "ability": "MATH",
                "reward_model": {"ground_truth": "34", "style": "rule"},
                "extra_info": {"index": "a"},
            },
            "34",
            "integer",
        ),
        (
            {
                "data_source": "train-math",
                "prompt": [user("p")],
                "ability": "math",
                "reward_model": {"ground_truth": '["x+1"]', "style": "rule"},
            },
            "x+1",
            "latex",
        ),
        (
            {"question": "p", "final_answer": "\\frac{1}{2}", "difficulty": 4.5, "r1_solution_1": "s"},
            "\\frac{1}{2}",
            "latex",
        ),
        ({"prompt": [user("p")], "solution": "$2^3$"}, "2^3", "latex"),
        ({"prompt": "p", "solution": "We see that\n\\boxed{7}"}, "7", "integer"),
        ({"prompt": "p", "ground_truth": "12"}, "12", "integer"),
        ({"ID": "2024-II-4", "Problem": "p", "Solution": "s", "Answer": 33}, "33", "integer"),
        ({"question": "p", "options": ["A)21", "B)22"], "rationale": "r", "correct": "B"}, "B", "mc"),
    ],
)
def test_prompts_have_the_answers_of_their_own_columns(tmp_path, row, answer, answer_type):
    result = ingest(write_lines(tmp_path / "x.jsonl", [row]), tmp_path / "w")
    (got,) = result.rows
    assert result.data.kind == "prompts/1" and (got["answer"], got["answer_type"]) == (answer, answer_type)
    kept = json.loads(got["extra_json"] or "{}")
    # as reward functions ask for them
    assert all(
        kept[name] == row[name]
        for name in ("reward_model", "data_source", "solution", "ground_truth")
        if name in row and "Problem" not in row
    )


def test_a_ground_truth_that_is_no_answer_is_not_taken_for_one(tmp_path):
    """Its JSON became the answer, which no completion could ever be equal to."""
    row = {"data_source": "train-math", "prompt": [user("p")], "ability": "math"}
    truths = ('{"functional": "check(f)"}', '["1/2", "0.5"]', "[0, 1]")
    rows = [
        row | {"prompt": [user(f"p{i}")], "reward_model": {"ground_truth": truth, "style": "rule"}}
        for i, truth in enumerate(truths)
    ]
    result = ingest(write_lines(tmp_path / "x.jsonl", rows), tmp_path / "w", max_quarantine_fraction=1)
    assert [got["answer"] for got in result.rows] == [None, "[0, 1]"] and result.codes() == {
        2: ["verifier_spec_invalid"]
    }
    assert json.loads(result.rows[0]["extra_json"])["reward_model"]["ground_truth"] == truths[0]


def test_a_system_prompt_beside_messages_that_open_with_another_is_kept_beside_them(tmp_path):
    """It was nowhere in the row that came of it."""
    talk = [{"role": "system", "content": "inside"}, user("q"), assistant("a")]
    rows = [{"messages": talk, "system": "beside"}, {"messages": talk[1:], "system": "beside"}]
    first, second = ingest(write_lines(tmp_path / "x.jsonl", rows), tmp_path / "w").rows
    assert said(first["messages"])[0] == "inside" and json.loads(first["extra_json"]) == {"system": "beside"}
    assert said(second["messages"])[0] == "beside" and second["extra_json"] is None


def test_problems_of_conversations_are_prompts_where_prompts_are_wanted(tmp_path):
    path = write_lines(tmp_path / "x.jsonl", [PROBLEM])
    assert ingest(path, tmp_path / "w").data.kind == "demonstrations/1"
    (got,) = ingest(path, tmp_path / "w2", kind="prompts/1").rows
    assert (said(got["prompt"]), got["answer"]) == (["What is 1+1?"], "2")


def test_a_proof_and_an_answer_that_was_not_found_are_no_answers(tmp_path):
    rows = [
        {"problem": f"p{i}", "solution": "s", "answer": answer} for i, answer in enumerate(("1", "proof", "notfound"))
    ]
    result = ingest(write_lines(tmp_path / "x.jsonl", rows), tmp_path / "w")  # left out by a policy: no damage
    assert [row["answer"] for row in result.rows] == ["1"] and result.codes() == {
        2: ["no_final_answer"],
        3: ["no_final_answer"],
    }


def test_programs_have_their_tests(tmp_path):
    mbpp = {
        "task_id": 1,
        "text": "Write f.",
        "code": "def f(): return 1\r\n",
        "test_list": ["assert f() == 1"],
        "test_setup_code": "import math",
        "challenge_test_list": [],
    }
    (row,) = ingest(write_lines(tmp_path / "m.jsonl", [mbpp]), tmp_path / "w").rows
    assert said(row["prompt"]) == ["Write f.\nYour code should pass these tests:\n\nassert f() == 1"] and [
        test["code"] for test in row["tests"]
    ] == ["import math\nassert f() == 1\n"]
    (row,) = ingest(tmp_path / "m.jsonl", tmp_path / "w1", kind="demonstrations/1").rows
    assert said(row["messages"])[1] == "```python\ndef f(): return 1\n```"
    stdio = {"inputs": ["1\n"], "outputs": [["2", "3"]]}
    for index, raw in enumerate(
        (
            {"question": "q", "input_output": json.dumps(stdio), "solutions": "[]"},
            {
                "prompt": [user("q")],
                "data_source": "taco",
                "ability": "code",
                "reward_model": {"style": "rule", "ground_truth": json.dumps(stdio)},
            },
        )
    ):
        (row,) = ingest(write_lines(tmp_path / f"{index}.jsonl", [raw]), tmp_path / f"w{index}x").rows
        assert (
            [(test["input"], test["expected"]) for test in row["tests"]] == [("1\n", "2\n3")]
            and row["domain"] == "code"
            and row["answer"] is None
        )
    called = {"question": "q", "input_output": json.dumps({**stdio, "fn_name": "f"})}
    with pytest.raises(StageFailure, match="verifier_spec_invalid"):
        ingest(write_lines(tmp_path / "f.jsonl", [called]), tmp_path / "wf")


@pytest.mark.parametrize(
    "row, kind, expected",
    [
        ({"responses": ["a", "b"], "ranks": [2, 1]}, "rankings/1", {"ranks": [2, 1]}),
        (
            {"responses": ["a", "b"], "ranks": [1, 2], "scores": [2, 1]},
            "rankings/1",
            {"ranks": [1, 2], "scores": [2, 1]},
        ),
        ({"steps": ["a", "b"], "labels": [1, -1]}, "stepwise/1", {"labels": [1, -1], "completions": ["a", "b"]}),
        ({"responses": ["a", "b"]}, "prompts/1", {"extra_json": '{"responses":["a","b"]}'}),
    ],
)
def test_lists_of_answers_and_of_steps_are_read_by_what_is_said_of_each(tmp_path, row, kind, expected):
    """The columns of the catalogue (section 0); without ranks or labels they are no more than a prompt's."""
    found = ingest(write_lines(tmp_path / "x.jsonl", [{"prompt": "p", **row}]), tmp_path / "w")
    assert found.data.kind == kind
    (got,) = found.rows
    assert {name: got[name] for name in expected} == expected
    if kind == "rankings/1":
        assert [said(answer) for answer in got["completions"]] == [["a"], ["b"]]


def test_steps(tmp_path):
    raw = {
        "labeler": "w",
        "generation": 9,
        "is_quality_control_question": False,
        "question": {"problem": "p", "ground_truth_answer": "4"},
        "label": {
            "finish_reason": "solution",
            "steps": [
                {
                    "completions": [{"text": "a", "rating": 1}, {"text": "b", "rating": -1}],
                    "human_completion": None,
                    "chosen_completion": 0,
                },
                {"completions": [{"text": "c", "rating": 0}], "human_completion": None, "chosen_completion": None},
            ],
        },
    }
    path = write_lines(tmp_path / "x.jsonl", [raw])
    rows = ingest(path, tmp_path / "w", step_labels="minus_one").rows
    assert [(row["completions"], row["labels"], row["solution_correct"]) for row in rows] == [
        (["b"], [-1], False),
        (["a", "c"], [1, 0], True),
    ]
    assert rows[0]["answer"] == "4" and rows[0]["ann"]["annotator_id"] == "w"
    shepherd = {
        "input": "Why? Step 1: one. \u043a\u0438\nStep 2: two. The answer is: 2 \u043a\u0438",
        "label": "Why? Step 1: one. +\nStep 2: two. The answer is: 2 -",
        "task": "GSM8K",
    }
    (row,) = ingest(write_lines(tmp_path / "y.jsonl", [shepherd]), tmp_path / "w2").rows
    assert (said(row["prompt"]), row["completions"], row["labels"], row["separator"]) == (
        ["Why?"],
        ["Step 1: one.", "Step 2: two. The answer is: 2"],
        [1, -1],
        "\n",
    )


@pytest.mark.parametrize(
    "row, expected",
    [
        (
            {"source": "x", "conversation": [{"input": "p", "output": "a"}, {"input": "q", "output": "b"}]},
            ["p", "a", "q", "b"],
        ),
        ({"conversations": ["p", "a"], "source": "x"}, ["p", "a"]),
        ({"system_prompt": "s", "question": "p", "response": "a"}, ["s", "p", "a"]),
        ({"input": [user("p")], "output": "a", "system_prompt": "s", "reasoning": "on"}, ["s", "p", "a"]),
        ({"instruction": "p", "context": "c", "response": "a", "category": "closed_qa"}, ["p\n\nc", "a"]),
        ({"question": "p", "context": "c", "answer": "a"}, ["c\n\np", "a"]),
        ({"query": "p", "context": "c", "response": "a"}, ["p\n\nc", "a"]),
        ({"instruction": "q", "input": "", "output": "b", "history": [["p", "a"]]}, ["p", "a", "q", "b"]),
        (
            {"question": "p", "solution": "s", "thinking_trajectories": ["t"], "attempt": "a"},
            ["p", "<think>\nt\n</think>\n\na"],
        ),
    ],
)
def test_demonstrations(tmp_path, row, expected):
    result = ingest(write_lines(tmp_path / "x.jsonl", [row]), tmp_path / "w")
    assert result.data.kind == "demonstrations/1" and [said(got["messages"]) for got in result.rows] == [expected]


def test_calls_as_answers(tmp_path):
    (row,) = ingest(
        write_lines(tmp_path / "x.jsonl", [{"id": 0, "query": "p", "answers": CALLS, "tools": TOOLS}]), tmp_path / "w"
    ).rows
    system, asked, called = row["messages"]
    assert (
        json.loads(system["functions"]) == json.loads(TOOLS)
        and asked["content"] == "p"
        and json.loads(called["function_calls"])["function"] == {"name": "f", "arguments": {"x": 1}}
    )


def test_a_form_is_read_in_any_container_and_rows_that_are_not_of_it_keep_their_line(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [{"prompt": f"p{i}", "response": "c", **AXES} for i in range(3)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "x.parquet")
    lines = ingest(
        write_lines(tmp_path / "x.jsonl", [*rows, {"prompt": "q"}, "{broken"]),
        tmp_path / "w",
        max_quarantine_fraction=1,
    )
    assert (
        ingest(tmp_path / "x.parquet", tmp_path / "w2").data.manifest["dataset_hash"]
        == lines.data.manifest["dataset_hash"]
    )
    assert lines.codes() == {4: ["missing_column"], 5: ["parse_error"]}
    # a format that is named is taken
    named = ingest(tmp_path / "x.parquet", tmp_path / "w3", format="prompt_completion")
    assert named.data.kind == "demonstrations/1"


def test_columns_may_change_places(tmp_path):
    path = write_lines(tmp_path / "x.jsonl", [{"prompt": "p", "chosen": "a", "rejected": "b"}])
    (row,) = ingest(path, tmp_path / "w", chosen_column="rejected", rejected_column="chosen").rows
    assert (said(row["chosen"]), said(row["rejected"])) == (["b"], ["a"])


@pytest.mark.parametrize(
    "row, code, tells, more",
    [
        ({"prompt": "p", "response": "a", "quality": 3}, "unread_label", "score_column=quality", {}),
        ({"prompt": "p", "target": "a"}, "unread_answer", "answer_column=target", {}),
        (
            {"prompt": "p", "chosen": "a", "rejected": "b", "score_chosen": 1, "score_rejected": 2},
            "scores_against",
            "chosen_column=rejected",
            {},
        ),
        ({"prompt": "p", "response": "a", "topic": "x"}, None, "", {}),
        ({"question": "p", "answer": "a", "context": {"title": ["t"]}}, "unread_context", "without context", {}),
        ({"question": "p", "answer": "a", "context": "t"}, None, "", {}),
        ({"messages": [user("p"), assistant("a")], "document": "x"}, "unread_context", "without document", {}),
        ({"prompt": "p", "target": "a"}, None, "", {"answer_column": "target"}),
        (
            {"messages": [user("p"), assistant("a")], "images": ["a.png"]},
            "unread_images",
            "images, and every stage works on texts alone",
            {},
        ),
        (
            {"prompt": "p", "chosen": "a", "rejected": "b", "image": {"path": "a.png"}},
            "unread_images",
            "drop the column",
            {},
        ),
        ({"messages": [user("p"), assistant("a")], "images": []}, None, "", {}),
        ({"prompt": "p", "responses": ["a", "b"], "scores": [1, 2]}, "unread_answers", "completions and scores", {}),
        (
            {"prompt": "p", "response_0": "a", "response_1": "b", "better_response": 1},
            "unread_answers",
            "response_0 and response_1",
            {},
        ),
        ({"prompt": "p", "chosen": "a", "rejected": "b", "score_chosen": 2, "score_rejected": 1}, None, "", {}),
    ],
)
def test_what_is_put_aside_is_told_where_it_looks_like_the_label(tmp_path, row, code, tells, more):
    warnings = {
        w["code"]: w["text"]
        for w in ingest(write_lines(tmp_path / "x.jsonl", [row]), tmp_path / "w", **more).result["warnings"]
    }
    assert warnings.keys() & {
        "unread_label",
        "unread_answer",
        "unread_answers",
        "unread_context",
        "unread_images",
        "scores_against",
    } == ({code} if code else set()) and tells in warnings.get(code, "")


@pytest.mark.parametrize(
    "rows",
    (
        [message for tree in "abcdef" for message in messages_of_a_tree(tree)],
        [
            {
                "instruction": f"p{i}",
                "completions": [
                    {"response": text, "overall_score": score, "annotations": {}}
                    for text, score in (("a", 1), ("b", 2))
                ],
            }
            for i in range(6)
        ],
    ),
)
def test_a_run_that_was_ended_goes_on_in_the_middle_of_a_row(tmp_path, monkeypatch, rows):
    from stages import ingest as stage
    from stages.ingestion.pipeline import Ingestion

    path, take = write_lines(tmp_path / "x.jsonl", rows), Ingestion._take
    monkeypatch.setattr(stage, "CHECKPOINT_ROWS", 3)
    whole = ingest(path, tmp_path / "whole", kind="pairs/1").data.manifest["dataset_hash"]

    def ended(self, seq, *record):
        if seq == 5:
            self.seen.db.close()
            raise KeyboardInterrupt
        take(self, seq, *record)

    monkeypatch.setattr(Ingestion, "_take", ended)
    with pytest.raises(KeyboardInterrupt):
        ingest(path, tmp_path / "w", kind="pairs/1")
    monkeypatch.setattr(
        Ingestion,
        "_take",
        lambda self, seq, *record: take(self, seq, *record) if seq >= 3 else pytest.fail("again from the start"),
    )
    assert ingest(path, tmp_path / "w", kind="pairs/1").data.manifest["dataset_hash"] == whole
