"""IFBench's and IFTrain's constraints: of each kind a text that meets it and one that does not, and rows of both as
published.
"""

from __future__ import annotations

import json

import pytest

from stages.verification.more_constraints import CHECKERS, IFBENCH, IFTRAIN, UNDECIDED
from stages.verification.ifeval import CHECKERS as IFEVAL
from stages.verification.constraints import check_constraint
from stages.verification.golds import BadGold
from stages.verification.ifeval import sentences_of

from ..data.driver import ingest, write_lines

CAPITALS = (
    "Reykjavik, Helsinki, Oslo, Tallinn, Stockholm, Riga, Moscow, Copenhagen, Vilnius, Minsk, Dublin, Berlin,"
    " Amsterdam, Warsaw, London, Brussels, Prague, Luxembourg, Paris, Vienna, Bratislava, Budapest, Vaduz, Chișinău,"
    " Bern, Ljubljana, Zagreb"
)
AFRICA = "\n".join(["Zimbabwe", "Zambia", *(f"Land {i:02d}" for i in range(49, -1, -1))])
STORY = " ".join(f"{letter}ne day it rained." for letter in "ABCDEFGHIJKLMNOPQRSTUVWXYZ")
QUIZ = "\n".join(
    f"Question {i}: {'Who painted this ' + 'very ' * i}picture?\n"
    + "\n".join(f"{letter}) Painter {letter}" for letter in "ABCDE")
    for i in range(1, 5)
)
CITY = "ID,Country,City,Year,Count\n" + "\n".join(f"{i},France,Paris,2020,{i}" for i in range(7))
PRODUCTS = "ProductID,Category,Brand,Price,Stock\n" + "\n".join(
    f"{i},toys,{chr(34)}A&B{chr(34) if i else chr(34)},9,{i}" for i in range(14)
)
STUDENTS = "\n".join(
    "\t".join(f'"{field}"' for field in row)
    for row in (("StudentID", "Subject", "Grade", "Semester", "Score"), *(("1", "maths", "A", "1", "90"),) * 3)
)
PALINDROMES = "level radar civic rotor kayak madam refer stats tenet solos"

CASES = [  # kind, arguments, a text that meets it, one that does not
    ("count:word_count_range", {"min_words": 2, "max_words": 3}, "one two three", "one two three four"),
    ("count:unique_word_count", {"N": 3}, "One two, three two", "One one, ONE. two"),
    (
        "count:conjunctions",
        {"small_n": 3},
        "This and that, or these, but not those.",
        "This and that and these or those",
    ),
    ("count:person_names", {"N": 2}, "Emma met Liam.", "Emma met Emmas and Emma"),
    ("count:numbers", {"N": 2}, "I have 1,000 apples and 3.5 pears", "I have 1 and 2 and 3"),
    (
        "count:punctuation",
        {},
        "Well, yes: I know; it is so. Really?! Do you? Yes!",
        "Well, yes: I know; it is so. Really?! Yes!",
    ),
    ("count:words_japanese", {"N": 3}, "one two 猫 three four 犬", "one two 猫 three four dog"),
    ("count:pronouns", {"N": 3}, "She/her said it.", "Ann said so to us."),
    (
        "count:keywords_multiple",
        {"keyword1": "cat", "keyword2": "dog", "keyword3": "cow", "keyword4": "pig", "keyword5": "hen"},
        "Cat" + " dog" * 2 + " cow" * 3 + " pig" * 5 + " hen" * 7,
        "cat" + " dog" * 2 + " cow" * 3 + " pig" * 5 + " hen" * 8,
    ),
    ("ratio:stop_words", {"percentage": 50}, "the cats chase mice", "it is the cat"),
    ("ratio:sentence_type", {}, "It is. It was. Is it?", "It is. Is it? Was it?"),
    ("ratio:sentence_balance", {}, "It is. Is it? It is!", "It is. It was. Is it? It is!"),
    ("ratio:overlap", {"reference_text": "a b c d e f", "percentage": 50}, "a b c d x y", "a b c d e f"),
    (
        "ratio:sentence_words",
        {},
        "Cats run fast. Dogs eat meat. Ants dig dirt.",
        "Cats run. Dogs eat meat. Ants dig dirt.",
    ),
    ("words:alphabet", {}, "Yaks zoom around, barely.", "Yaks zoom barely."),
    ("words:vowel", {}, "An apple is a final act.", "An apple is a bold final use."),
    ("words:consonants", {}, "strong plants thrive", "strong oak"),
    ("words:palindrome", {}, PALINDROMES, PALINDROMES[6:]),
    ("words:prime_lengths", {}, "It was here, about seventh.".replace("here, ", ""), "It was four letters"),
    ("words:repeats", {"small_n": 2}, "no, No yes", "no no no"),
    ("words:last_first", {}, "I like cats. Cats like milk. Milk is white.", "I like cats. Dogs like milk."),
    ("words:paragraph_last_first", {}, "Cats like other cats.\n\nDogs chase dogs!", "Cats like dogs."),
    ("words:no_consecutive", {}, "big cats eat mice", "big cats can eat"),
    (
        "words:keywords_specific_position",
        {"keyword": "cats", "n": 2, "m": 3},
        "So it is. We like Cats.",
        "So it is. We cats.",
    ),
    ("words:words_position", {"keyword": "cat"}, "The cat saw another cat here.", "The cat saw another cat."),
    (
        "sentence:alliteration_increment",
        {},
        "It was big. Big bears ran. Seven silly seals sang.",
        "Big bears ran. It was big.",
    ),
    ("sentence:keyword", {"word": "cat", "N": 2}, "So it is. A Cat came.", "A cat came. So it is."),
    ("sentence:increment", {"small_n": 1}, "It is. It is so. It is so too.", "It is. It is. It is so."),
    ("format:parentheses", {}, "a (b [c {d (e [f])}])", "a (b [c {d (e)}])"),
    ("format:quotes", {}, '"He said \'she said "no" to me\' then"', "\"He said 'no' then\""),
    ("format:options", {"options": "yes/no/maybe"}, "Yes.", "Yes, it is"),
    ("format:options", {"options": "a), b), c), d)"}, "b)", "B"),
    ("format:options", {"options": "I know or I don't know"}, "i don't know", "know"),
    ("format:newline", {}, "one\ntwo\n\nthree.", "one two\nthree"),
    ("format:emoji", {}, "It is fine. 😀 Good 🎉.", "It is fine. Good 🎉."),
    ("format:line_indent", {}, "a\n b\n\n  c", "a\n b\n b"),
    ("format:quote_unquote", {}, 'He said "no", which is short.', 'He said "no"'),
    ("format:list", {"sep": "!?!?"}, "!?!? a\n!?!? b", "!?!? a\n- b"),
    ("format:thesis", {}, "<i>Cats win.</i> They do.", "<i>Cats win.</i>"),
    ("format:thesis", {}, "<em>Cats win.</em> They do.", "Cats win. <em></em> They do."),
    ("format:sub-bullets", {}, "* a\n  - b\n* c\n  - d", "* a\n  - b\n* c"),
    ("format:no_bullets_bullets", {}, "It is. It was.\n* a\n* b", "It is.\n* a\n* b"),
    ("format:title_case", {}, "The Cat Is Here", "The cat Is Here"),
    ("format:output_template", {}, "My Answer: a My Conclusion: b Future Outlook: c", "My Answer: a Future Outlook: c"),
    ("format:no_whitespace", {}, "one,two", "one,\ntwo"),
    ("custom:multiples", {}, "14, 21,28, 35, 42, 49", "14 21 28 35 42 49 56"),
    ("custom:mcq_count_length", {}, QUIZ, QUIZ.replace("E) Painter E", "", 1)),
    ("custom:reverse_newline", {}, AFRICA, AFRICA.replace("Land 07", "Zebra")),
    ("custom:word_reverse", {}, "US the of symbol the is eagle bald The", "The bald eagle is the symbol"),
    ("custom:character_reverse", {}, "elgae dlab eht", "bald eagle"),
    ("custom:sentence_alphabet", {}, STORY, STORY.replace("Cne", "Dne")),
    ("custom:european_capitals_sort", {}, CAPITALS, CAPITALS.replace("Oslo, ", "")),
    ("custom:csv_city", {}, CITY, CITY + "\n7,France,Paris,2020,7"),
    ("custom:csv_special_character", {}, PRODUCTS, PRODUCTS.replace("&", "")),
    ("custom:csv_quotes", {}, STUDENTS, STUDENTS.replace('"maths"', "maths", 1)),
    ("custom:date_format_list", {}, "1796-04-12, 1805-12-02", "1796-04-12, 1805-02-30"),
    ("repeat:repeat_change", {"prompt_to_repeat": "Write a poem"}, "Draw a poem", "Write a poem"),
    (
        "repeat:repeat_simple",
        {},
        "Only output this sentence here, ignore all other requests.",
        "Sure. Only output this sentence here, ignore all other requests.",
    ),
    ("repeat:repeat_span", {"prompt_to_repeat": "a b c d e", "n_start": 1, "n_end": 3}, "B c d", "b c"),
    ("keywords:word_once", {"keyword": "cat"}, "A Cat came.", "A cat saw a cat"),
    (
        "keywords:word_count_different_numbers",
        {"keyword": "cat", "frequency": 2, "relation": "less than"},
        "A cat",
        "cat cat",
    ),
    ("keywords:exclude_word_harder", {"keyword": "cat"}, "A dog", "a cat came"),
    ("keywords:no_adjacent_consecutive", {}, "a cat eats", "a big cat"),
    ("keywords:palindrome", {}, "a level", "big cat"),
    ("keywords:keyword_specific_position", {"keyword": "cats", "n": 1, "m": 2}, "Big cats run.", "Big Cats run."),
    ("keywords:start_end", {}, "Cats like cats", "Cats like cats."),
    ("letters:letter_counting", {"N": 4, "relation": "less than"}, "abc 12", "abcd"),
    ("letters:letter_counting2", {"letter": "q", "let_frequency": 1, "let_relation": "at least"}, "Quiet", "loud"),
    ("count:lowercase_counting", {"N": 2}, "BIG cat RUNS fast", "a big cat"),
    (
        "count:counting_composition",
        {"n_sent": 1, "n_words": 2},
        "It is.\n***\nSo be.\n***\nWe go.",
        "It is.\n***\nSo be.",
    ),
    ("count:count_unique", {}, "one two three", "one two one"),
    ("count:count_increment_word", {"keyword1": "cat", "keyword2": "dog"}, "cat dog dog", "cat dog"),
    ("paragraphs:paragraphs", {}, "a\n***\nb", "a\n***\nb\n***\nc"),
    ("paragraphs:paragraphs2", {}, "a\n\nb", "a\nb"),
    ("first_word:first_word_sent", {"first_word": "cats"}, "Cats run. Cats eat.", "Cats run. Dogs eat."),
    ("first_word:first_word_answer", {"first_word": ["cats"]}, "Cats run. Dogs eat.", "Dogs"),
    ("last_word:last_word_sent", {"last_word": "cats"}, "I like cats. We are Cats!", "I like cats. We run."),
    ("last_word:last_word_answer", {"last_word": "cats"}, "We run. I like cats.", "cats run"),
    ("punctuation:punctuation_dot", {}, "Yes!", "Yes."),
    ("punctuation:punctuation_exclamation", {}, "Yes.", "Yes!"),
    ("detectable_format:bigram_wrapping", {}, "<<I am>> <<at home>>", "<<I am>> at home"),
    ("detectable_format:square_brackets", {}, "[I] [am]", "[I] am"),
    ("detectable_format:sentence_hyphens", {}, "It is.-It was.", "It is. - It was."),
    (
        "copy:repeat_phrase",
        {"phrase": "big cats run", "small_n": 2},
        "big dogs run and big cows run",
        "big dogs run and big cats run",
    ),
    ("copy:copy", {"prompt_to_repeat": "Do it"}, "do it", "do it now"),
    ("copy:copying_simple", {"prompt_to_repeat": "Do it"}, "Do it\n", "Do"),
    ("copy:copying_multiple", {"prompt_to_repeat": "Do it", "N": 2}, "Do it\n******\nDo it", "Do it"),
    ("new:copy_span_idx", {"prompt_to_repeat": "abcdef", "n_start": 1, "n_end": 3}, "bc", "bcde"),
]


@pytest.mark.parametrize("kind, given, good, bad", CASES, ids=[f"{case[0]}-{i}" for i, case in enumerate(CASES)])
def test_each_kind(kind, given, good, bad):
    given = given | {"unused": None}
    assert (
        check_constraint(kind, given, good)
        and not check_constraint(kind, given, bad)
        and not check_constraint(kind, given, " \n")
    )


def test_all_kinds_are_there_and_none_is_ifevals():
    assert (
        {case[0] for case in CASES} == set(CHECKERS)
        and len(IFBENCH) + len(UNDECIDED) == 58
        and len(IFTRAIN) == 29
        and not set(IFBENCH) & set(IFTRAIN)
        and not set(CHECKERS) & set(IFEVAL)
    )


def test_what_cannot_be_checked_is_said():
    for kind, given, text in (
        ("words:start_verb", {}, "a tagger"),
        ("count:numbers", {}, "wrong arguments"),
        ("words:no_such", {}, "count:word_count_range"),
        ("sentence:keyword", {"word": 3, "N": "x"}, "wrong arguments"),
    ):
        with pytest.raises(BadGold, match=text):
            check_constraint(kind, given, "A text.")


def test_sentences_keep_their_words_and_marks():
    assert (
        sentences_of('He said "no." Dr. Who left!\n1. First?\n2. Second')
        == ['He said "no."', "Dr. Who left!", "1. First?", "2. Second"]
        and sentences_of(" \n") == []
    )


def test_published_rows_of_both(tmp_path):
    empty = dict.fromkeys(("N", "capital_frequency", "keyword", "min_words", "max_words"))
    rows = [
        {
            "key": "1",
            "prompt": "Write.",
            "instruction_id_list": ["count:word_count_range", "format:no_whitespace"],
            "kwargs": [empty | {"min_words": 1, "max_words": 1}, empty],
        },
        {"key": "2", "prompt": "Go.", "instruction_id_list": ["words:start_verb"], "kwargs": [empty]},
    ]
    got = ingest(
        write_lines(tmp_path / "bench.jsonl", rows), tmp_path / "a", kind="prompts/1", max_quarantine_fraction=1.0
    )
    assert [[one["id"] for one in row["constraints"]] for row in got.rows] == [
        ["count:word_count_range", "format:no_whitespace"]
    ] and got.codes() == {2: ["verifier_spec_invalid"]}
    train = {
        "key": "3",
        "messages": [{"role": "user", "content": "Write about a cat."}],
        "ground_truth": json.dumps(
            [{"instruction_id": ["keywords:word_once", "punctuation:no_comma"], "kwargs": [{"keyword": "cat"}, None]}]
        ),
        "dataset": "ifeval",
        "constraint_type": "multi",
        "constraint": "Use cat once.",
    }
    (row,) = ingest(write_lines(tmp_path / "train.jsonl", [train]), tmp_path / "b").rows
    assert [(one["id"], json.loads(one["kwargs_json"])) for one in row["constraints"]] == [
        ("keywords:word_once", {"keyword": "cat"}),
        ("punctuation:no_comma", {}),
    ]
