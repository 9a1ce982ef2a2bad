"""Multiple-choice files and MATH: what each source's rows become, and what is refused because it names no choice."""

import csv
import json

import pytest

from stages.ingestion.choices import chosen
from stages.ingestion.rules import Bad
from stages.verification.choices import asked, gold_of, question_of, stated
from storage.schema import row_id

from .driver import ingest, user, write_lines

BEES = ["milk", "honey", "wax"]
OPTIONS = "What do bees make?\nA. milk\nB. honey\nC. wax"


@pytest.mark.parametrize(
    "row, more",
    [
        # MMLU
        (
            {"question": "What do bees make?", "choices": BEES, "answer": 1, "subject": "zoology"},
            {"category": "zoology"},
        ),
        # MMLU-Pro
        (
            {
                "question": "What do bees make?",
                "options": BEES,
                "answer": "B",
                "answer_index": 1,
                "category": "zoology",
            },
            {"category": "zoology"},
        ),
        # ARC
        ({"question": "What do bees make?", "choices": {"text": BEES, "label": ["1", "2", "3"]}, "answerKey": "2"}, {}),
        # OpenBookQA
        (
            {
                "question_stem": "What do bees make?",
                "choices": {"text": BEES, "label": ["A", "B", "C"]},
                "answerKey": "B",
            },
            {},
        ),
        (
            {
                "question": "What do bees make?",
                "choices": [{"label": label, "text": text} for label, text in zip("ABC", BEES)],
                "answerKey": "B",
            },
            {},
        ),
        ({"question": "What do bees make?", "options": {"A": "milk", "B": "honey", "C": "wax"}, "answer": "B"}, {}),
        # a table with more options elsewhere
        (
            {
                "question": "What do bees make?",
                "options": {"A": "milk", "B": "honey", "C": "wax", "D": None},
                "answer": "B",
            },
            {},
        ),
        # letters as the source has them
        ({"question": "What do bees make?", "options": {"A": "milk", "C": "honey", "E": "wax"}, "answer": "C"}, {}),
        ({"question": "What do bees make?", "options": {"B": "milk", "C": "honey", "D": "wax"}, "answer": "C"}, {}),
        ({"question": "What do bees make?", "options": {"A": "milk", "B": "honey", "C": "wax"}, "answer": 1}, {}),
        ({"question": "What do bees make?", "options": {"A": "milk", "B": "honey", "C": "wax"}, "answer": "honey"}, {}),
        ({"question": "What do bees make?", "A": "milk", "B": "honey", "C": "wax", "answer": "B"}, {}),
        ({"question": "What do bees make?", "choices": BEES, "answer": "honey"}, {}),
        # PIQA
        ({"goal": "What do bees make?", "sol1": "milk", "sol2": "honey", "sol3": "wax", "label": 1}, {}),
        # WinoGrande
        (
            {"sentence": "What do bees make?", "option1": "milk", "option2": "honey", "option3": "wax", "answer": "2"},
            {},
        ),
        # TruthfulQA
        ({"question": "What do bees make?", "mc1_targets": {"choices": BEES, "labels": [0, 1, 0]}}, {}),
    ],
)
def test_every_source_becomes_the_same_row(tmp_path, row, more):
    result = ingest(write_lines(tmp_path / "x.jsonl", [row]), tmp_path / "w")
    (got,) = result.rows
    expected = {"prompt": [user(OPTIONS)], "choices": BEES, "answer": "B", "answer_type": "mc", "category": None} | more
    assert result.data.kind == "prompts/1" and {name: got[name] for name in expected} == expected
    assert question_of(got) == "What do bees make?" and gold_of(got) == 1
    # the options are in the prompt: nothing else names the row
    assert got["row_id"] == row_id("prompts/1", {"prompt": [user(OPTIONS)], "answer": "B"})


def test_endings_continue_their_context(tmp_path):
    """HellaSwag: the text before the options is the context alone, and each ending follows it."""
    row = {
        "ctx": "A man sits down. He",
        "endings": ["eats.", "flies."],
        "label": "0",
        "activity_label": "Sitting",
        "ctx_a": "A man sits down.",
        "ctx_b": "he",
    }
    (got,) = ingest(write_lines(tmp_path / "x.jsonl", [row]), tmp_path / "w").rows
    assert got["answer"] == "A" and got["choices"] == ["eats.", "flies."]
    assert (
        json.loads(got["extra_json"])["choices_are"] == "continuations"
        and json.loads(got["extra_json"])["activity_label"] == "Sitting"
    )
    assert asked(got, "text", chat=False) == "A man sits down. He" and stated(got, "text") == "eats."


def test_forms_of_a_question(tmp_path):
    (got,) = ingest(
        write_lines(tmp_path / "x.jsonl", [{"question": "What do bees make?", "choices": BEES, "answer": 1}]),
        tmp_path / "w",
    ).rows
    assert asked(got, "letter", chat=True) == asked(got, "letter", chat=False) == OPTIONS + "\nAnswer:"
    assert (
        asked(got, "text", chat=False) == "Question: What do bees make?\nAnswer:"
        and asked(got, "text", chat=True) == "What do bees make?"
    )
    assert asked(got, "generation", chat=True).startswith(OPTIONS + "\n\nReason concisely")
    assert [stated(got, reading) for reading in ("letter", "text", "generation")] == [
        "B",
        "honey",
        "Therefore, the answer is (B).",
    ]


def test_the_instruction_can_stand_in_the_prompt(tmp_path):
    """For RL: the verifier reads what the prompt asks for, and the readings of the evaluation are those of the prompt
    without it.
    """
    from stages.verification.choices import INSTRUCTION
    from stages.verification.verifiers import verify_choice

    source = write_lines(tmp_path / "x.jsonl", [{"question": "What do bees make?", "choices": BEES, "answer": 1}])
    (plain,), (told,) = (
        ingest(source, tmp_path / name, choice_instruction=name == "told").rows for name in ("plain", "told")
    )
    assert told["prompt"] == [user(OPTIONS + "\n\n" + INSTRUCTION)] and question_of(told) == question_of(plain)
    for reading in ("letter", "text", "generation"):
        assert asked(told, reading, True) == asked(plain, reading, True)
    assert (
        asked(plain, "generation", True) == told["prompt"][0]["content"]
        and verify_choice(told, stated(told, "generation"))[0]
    )


def test_a_table_with_columns_of_letters(tmp_path):
    """CSV: all cells are text; an empty option column is no option."""
    with open(tmp_path / "x.csv", "w", newline="") as out:
        writer = csv.DictWriter(out, ["prompt", "A", "B", "C", "D", "answer"])
        writer.writeheader()
        writer.writerows(
            [
                {"prompt": "What do bees make?", "A": "milk", "B": "honey", "C": "wax", "D": "", "answer": "B"},
                {"prompt": "And 1 + 1?", "A": "1", "B": "2", "C": "3", "D": "4", "answer": "B"},
            ]
        )
    rows = ingest(tmp_path / "x.csv", tmp_path / "w").rows
    assert [(row["choices"], row["answer"]) for row in rows] == [(BEES, "B"), (["1", "2", "3", "4"], "B")]


@pytest.mark.parametrize(
    "answer, base, expected",
    [
        (0, 0, 0),
        (3, 0, Bad),
        (3, 1, 2),
        (0, 1, Bad),
        ("c", 0, 2),
        ("(C)", 0, 2),
        ("D", 0, Bad),
        ("wax", 0, 2),
        ("Wax", 0, Bad),
        (1.0, 0, 1),
        (True, 0, Bad),
        (None, 0, Bad),
        (-1, 0, Bad),
    ],
)
def test_an_answer_names_one_choice_or_is_refused(answer, base, expected):
    if expected is Bad:
        with pytest.raises(Bad):
            chosen(answer, BEES, None, base)
    else:
        assert chosen(answer, BEES, None, base) == expected


def test_what_could_mean_two_choices_is_refused():
    with pytest.raises(Bad, match="choice_unknown"):
        # the text of the second choice, or the first choice?
        chosen("1", ["2", "1", "4"], ["x", "y", "z"][:0] or None, 1)
    assert chosen(1, ["2", "1", "4"], None, 1) == 0  # a number that is no text is an index
    assert chosen("1", ["2", "1", "4"], ["1", "2", "3"]) == 0  # labels of the source count first
    with pytest.raises(Bad, match="choice_unknown"):
        chosen("A", ["B", "A"], None)


def test_unusable_questions_are_refused_with_a_reason(tmp_path):
    rows = [
        {"question": "q", "choices": BEES, "answer": 7},
        {"question": "q", "choices": ["only"], "answer": 0},
        {"question": "q", "choices": ["a", " "], "answer": 0},
        {"question": "q", "choices": "['a' 'b']", "answer": 0},
        {"question": "q2", "choices": BEES, "answer": 2},
    ]
    result = ingest(write_lines(tmp_path / "x.jsonl", rows), tmp_path / "w", max_quarantine_fraction=1.0)
    assert (
        result.codes() == {1: ["choice_unknown"], 2: ["choice_unknown"], 3: ["choice_unknown"], 4: ["wrong_type"]}
        and len(result.rows) == 1
    )


def test_math_keeps_answer_level_and_subject(tmp_path):
    rows = [
        {
            "problem": "Half of one?",
            "level": "Level 3",
            "type": "Algebra",
            "solution": "It is $\\boxed{\\frac{1}{2}}$.",
        },
        {
            "problem": "Two and two?",
            "level": "Level 1",
            "type": "Prealgebra",
            "solution": "First $\\boxed{3}$, no: $\\boxed{4}$.",
        },
        {"problem": "Is it even?", "level": "Level 2", "type": "Number Theory", "solution": "So it is \\boxed{even}."},
        {"problem": "No box.", "level": "Level ?", "type": "Algebra", "solution": "None."},
    ]
    result = ingest(write_lines(tmp_path / "x.jsonl", rows), tmp_path / "w", max_quarantine_fraction=1.0)
    got = result.rows
    assert [
        (row["answer"], row["answer_type"], row["category"], json.loads(row["extra_json"])["level"]) for row in got
    ] == [
        ("\\frac{1}{2}", "latex", "Algebra", 3),
        ("4", "integer", "Prealgebra", 1),
        ("even", "latex", "Number Theory", 2),
    ]
    assert json.loads(got[0]["extra_json"])["solution"].startswith("It is") and result.codes() == {
        4: ["verifier_spec_invalid"]
    }
    lessons = ingest(write_lines(tmp_path / "y.jsonl", rows), tmp_path / "w2", kind="demonstrations/1").rows
    assert lessons[1]["messages"][-1]["content"] == rows[1]["solution"]


def test_math_500_and_aime_say_their_answer(tmp_path):
    rows = [
        {"problem": "p", "solution": "s", "answer": "\\sqrt{2}", "subject": "Geometry", "level": 5, "unique_id": "u"},
        {"problem": "q", "answer": 204},
    ]
    a, b = ingest(write_lines(tmp_path / "x.jsonl", rows), tmp_path / "w").rows
    assert (a["answer"], a["answer_type"], a["category"]) == ("\\sqrt{2}", "latex", "Geometry") and json.loads(
        a["extra_json"]
    )["level"] == 5
    assert (b["answer"], b["answer_type"]) == ("204", "integer")


def test_a_benchmark_of_choices_is_looked_for_by_its_questions(tmp_path):
    """decontaminate: the same question with other options, or none, is the benchmark's."""
    question = "Which of the planets of our sun has the largest number of known moons today?"
    bench = write_lines(
        tmp_path / "bench.jsonl",
        [
            {
                "question": question,
                "choices": ["Saturn, as it turns out after a long count", "Jupiter, as most books still say today"],
                "answer": 0,
            }
        ],
    )
    source = write_lines(
        tmp_path / "x.jsonl",
        [{"prompt": question, "completion": "Saturn"}, {"prompt": "Name a moon.", "completion": "Io"}],
    )
    assert ingest(source, tmp_path / "w", inputs={"benchmarks.b": bench}, decontaminate="coverage").codes() == {
        1: ["contaminated"]
    }


@pytest.mark.parametrize(
    "answer, labels, index",
    [
        ("C", ["B", "C", "D"], 1),
        ("c", ["B", "C", "D"], 1),
        ("(C)", ["B", "C", "D"], 1),
        ("A", ["B", "C", "D"], None),
        ("E", ["B", "C", "D"], None),
        ("0", ["1", "2", "3"], None),
        (0, ["1", "2", "3"], None),
        ("4", ["1", "2", "3"], None),
        (3, ["1", "2", "3"], 2),
        ("B", ["1", "2", "3"], 1),
        (1, ["A", "B", "C"], 1),
        ("two", ["1", "2", "3"], 1),
    ],
)
def test_an_answer_that_is_none_of_the_labels_names_nothing(answer, labels, index):
    """The letter A where the choices are called B, C and D is an error of the data, not the first choice."""
    if index is not None:
        assert chosen(answer, ["one", "two", "three"], labels) == index
        return
    with pytest.raises(Bad, match="choice_unknown"):
        chosen(answer, ["one", "two", "three"], labels)
