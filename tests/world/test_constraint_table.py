"""IFEval's constraints, each with answers that meet it and that do not, and border cases of these and of IFBench's and
IFTrain's: nothing, white space, another script, Markdown, a word beside a mark (reward.if_constraints).
"""

from __future__ import annotations

import time

import pytest

from stages.verification.more_constraints import CHECKERS as MORE
from stages.verification.constraints import check_constraint
from stages.verification.ifeval import CHECKERS

from .test_more_constraints import CASES

THREE = {"num_paragraphs": 3, "nth_paragraph": 2, "first_word": "cats"}
WORDS = {"num_words": 3, "relation": "at least"}
FEW = {"num_words": 3, "relation": "less than"}
SENTENCES = {"num_sentences": 2, "relation": "at least"}
CAPITALS = {"capital_frequency": 2, "capital_relation": "less than"}
SHOUTS = {"capital_frequency": 2, "capital_relation": "at least"}
SECTIONS = {"section_spliter": "SECTION", "num_sections": 2}
TWICE = {"keyword": "cat", "frequency": 2, "relation": "at least"}
LETTER = {"letter": "Q", "let_frequency": 2, "let_relation": "less than"}
YES = "detectable_format:constrained_response"
BULLETS, LIGHTS = "detectable_format:number_bullet_lists", "detectable_format:number_highlighted_sections"
IFEVAL = [  # kind, arguments, texts that meet it, texts that do not
    ("punctuation:no_comma", {}, ["No comma; none.", "全角，逗号", "**so**"], ["a,b", ",", "1,000"]),
    (WORDS_ID := "length_constraints:number_words", WORDS, ["one two three", "**a** b-c", "é ü 猫"], ["a b", "... !!"]),
    (WORDS_ID, FEW, ["one two", "**one** — two"], ["one two three", "a-b-c"]),
    (WORDS_ID, WORDS | {"relation": "exactly"}, ["it's so"], ["one two three four"]),
    (WORDS_ID, {"num_words": 100, "relation": "around"}, ["a " * 90, "a " * 110], ["a " * 89, "a " * 111]),
    (
        "length_constraints:number_sentences",
        SENTENCES,
        ["It is. It was.", 'He said "no." She left.', "1. One.\n2. Two."],
        ["It is", "Dr. Who came.", "It costs 3.50 now."],
    ),
    ("length_constraints:number_sentences", SENTENCES | {"relation": "less than"}, ["One.", "# Title"], ["A b. C d!"]),
    (
        PARTS := "length_constraints:number_paragraphs",
        {"num_paragraphs": 2},
        ["a\n***\nb", "***\na\n***\nb\n***", "a***b"],
        ["a\n\nb", "a\n***\n \n***\nb", "a", "a\n***\nb\n***\nc"],
    ),
    (PARTS, {"num_paragraphs": 1}, ["a\n\nb", "***\na"], ["***", "a\n***\nb"]),
    (
        "length_constraints:nth_paragraph_first_word",
        THREE,
        ["a\n\nCats, b\n\nc", 'a\n\n"cats" b\n\n\n\nc', "a\n\nCATS\n\nc"],
        ["cats\n\nb\n\nc", "a\n\ncats b", "a\n\n**cats** b\n\nc", "a\ncats\nc", "a\n\ncatsup\n\nc"],
    ),
    (
        "detectable_content:number_placeholders",
        {"num_placeholders": 2},
        ["[a] [b]", "[a](x) [é]"],
        ["[a]", "[a\nb] [c]"],
    ),
    (
        POST := "detectable_content:postscript",
        {"postscript_marker": "P.S."},
        ["Bye.\nP.S. So.", "p. s. so", "**P.S.** so"],
        ["PS so", "P.S"],
    ),
    (POST, {"postscript_marker": "P.P.S"}, ["P.P.S. So.", "p. p. s so"], ["P.S. So.", "PPS so"]),
    (POST, {"postscript_marker": "N.B."}, ["n.b. so"], ["nxbx so"]),
    (
        BULLETS,
        {"num_bullets": 2},
        ["* a\n* b", "- a\n  - b", "• x\n* a\n- b"],
        ["* a", "**a**\n* b", "1. a\n2. b", "*\n* a"],
    ),
    (
        LIGHTS,
        {"num_highlights": 2},
        ["*a* *b*", "**a** *b*", "*é ü* **b**"],
        ["*a*", "** ** *a*", "*a\nb* *c*", "_a_ _b_"],
    ),
    (
        "detectable_format:multiple_sections",
        SECTIONS,
        ["SECTION 1\na\nSECTION 2\nb", "**SECTION 1** SECTION2"],
        ["SECTION 1", "Section 1\nSection 2", "SECTION one SECTION two"],
    ),
    ("detectable_format:title", {}, ["<<a>>\nb", "b <<é>>", "# <<a>>"], ["<< >>", "<a>", "<<a\nb>>", "# a"]),
    (
        "detectable_format:json_format",
        {},
        ['{"a": [1]}', '```json\n{"a": 1}\n```', "```JSON\n{}```", '"é"'],
        ["{'a': 1}", 'So: {"a": 1}', '{"a": 1,}', "[" * 100_000, "```"],
    ),
    (YES, {}, ["My answer is yes.", "So: My answer is maybe. Really"], ["My answer is yes", "my answer is no.", "yes"]),
    (
        "combination:two_responses",
        {},
        ["a******b", "a\n******\nb\n******"],
        ["a", "a******a", "a****** \n******b", "a******b******c", "******a"],
    ),
    (
        "combination:repeat_prompt",
        {"prompt_to_repeat": "Say é. "},
        ["say É. So.", "  Say é."],
        ["So. Say é.", '"Say é." So', "Say e."],
    ),
    (
        "startend:end_checker",
        {"end_phrase": "The end."},
        ["So the END. ", '"So. The end."'],
        ["The end", "The end. So"],
    ),
    ("startend:quotation", {}, ['"a"', ' "a"\n', '""'], ['"', '"a', "“a”", "'a'"]),
    ("change_case:english_capital", {}, ["THE CAT IS 3.", "**IT IS**"], ["The CAT", "LE CHAT EST ICI AVEC UNE", "123"]),
    ("change_case:english_lowercase", {}, ["the cat is here"], ["the Cat", "le chat est ici avec une", "猫"]),
    ("change_case:capital_word_frequency", SHOUTS, ["NASA and ESA", "I AM", "**A** B"], ["NASA", "Nasa Esa", "123 45"]),
    ("change_case:capital_word_frequency", CAPITALS, ["The U.S. won", "AC/DC", "COVID-19"], ["I AM"]),
    ("keywords:existence", {"keywords": ["cat", "a.b"]}, ["Concat A.B", "**cat** a.b"], ["cat", "cat axb"]),
    (
        FORBIDDEN := "keywords:forbidden_words",
        {"forbidden_words": ["cat"]},
        ["concat", "cats", "cat_", "猫"],
        ["a Cat.", "**cat**", "cat-like"],
    ),
    (
        FORBIDDEN,
        {"forbidden_words": ["C++", ".net"]},
        ["C+", "net", "asp.net"],
        ["I like C++ a lot", "use C++.", "a .NET app"],
    ),
    ("keywords:frequency", TWICE, ["cat Cat", "concatcat"], ["cat", "c at c at"]),
    ("keywords:frequency", TWICE | {"relation": "less than"}, ["cat", "dog"], ["cat cat"]),
    ("keywords:letter_frequency", LETTER, ["a quiet day", "abc"], ["Q q", "quiet quay"]),
    ("keywords:letter_frequency", LETTER | {"letter": "!", "let_relation": "at least"}, ["a!!"], ["a!"]),
    (
        "language:response_language",
        {"language": "de"},
        ["Das ist ein Haus und es ist gut."],
        ["This is the house.", "猫"],
    ),
    ("language:response_language", {"language": "ja"}, ["これは猫です。"], ["这是一只猫。", "This is a cat."]),
]

BORDER = [  # kind, arguments, text, whether it meets it
    ("count:word_count_range", {"min_words": 2, "max_words": 3}, "**one** two-three", True),
    ("count:unique_word_count", {"N": 3}, "One **one** one, é", False),
    ("count:conjunctions", {"small_n": 2}, "And and AND", False),
    ("count:person_names", {"N": 1}, "emma", False),
    ("count:numbers", {"N": 1}, "1.5 million", True),
    ("count:punctuation", {}, "a, b; c: d. e!? f! g", False),
    ("count:words_japanese", {"N": 2}, "one 猫。 two 42", True),
    ("count:pronouns", {"N": 3}, "Who knows this? Everybody.", True),
    (
        "count:keywords_multiple",
        {"keyword1": "cat", "keyword2": "dog", "keyword3": "cow", "keyword4": "pig", "keyword5": "hen"},
        "concatenate" + " dog" * 2 + " cow" * 3 + " pig" * 5 + " hen" * 7,
        False,
    ),
    ("ratio:stop_words", {"percentage": 50}, "!!!", False),
    ("ratio:sentence_type", {}, "No mark at all", False),
    ("ratio:sentence_balance", {}, "No mark at all", False),
    ("ratio:overlap", {"reference_text": "a b c d", "percentage": 50}, "a b c x", True),
    ("ratio:overlap", {"reference_text": "a b c d", "percentage": 50}, "a b", False),
    ("ratio:sentence_words", {}, "Cats run. Cats ran. Cats hid.", False),
    ("words:alphabet", {}, "1 bat", False),
    ("words:alphabet", {}, "Élan fits", False),
    ("words:vowel", {}, "an\n\nant", False),
    ("words:consonants", {}, "strong - plants", False),
    ("words:palindrome", {}, "level " * 9 + "noon", False),
    ("words:prime_lengths", {}, "It's one", True),
    ("words:repeats", {"small_n": 1}, "No, **no**", False),
    ("words:last_first", {}, 'I like cats. "Cats" run.', False),
    ("words:paragraph_last_first", {}, "**Cats like cats.**\n\n-", True),
    ("words:no_consecutive", {}, "big - bat", False),
    ("words:keywords_specific_position", {"keyword": "cats", "n": 1, "m": 3}, "So, we, cats.", True),
    ("words:words_position", {"keyword": "cat"}, "The cat saw another cat.", False),
    ("sentence:alliteration_increment", {}, "Big bears ran. It was.", False),
    ("sentence:keyword", {"word": "cat", "N": 1}, "Cats came.", False),
    ("sentence:increment", {"small_n": 2}, "It is. It is **so** — so.", False),
    ("format:parentheses", {}, "(((((", False),
    ("format:quotes", {}, "\"a 'b", False),
    ("format:options", {"options": "yes/no"}, "**Yes**", True),
    ("format:newline", {}, "one\n\n-\ntwo", True),
    ("format:emoji", {}, "It is fine :).", False),
    ("format:line_indent", {}, "a single line", False),
    ("format:quote_unquote", {}, 'He said "no" "yes" to it', False),
    ("format:list", {"sep": "..."}, "a ... b", False),
    ("format:thesis", {}, "*Cats win.* They do.", False),
    ("format:sub-bullets", {}, "No bullet - none.", False),
    ("format:no_bullets_bullets", {}, "It is. It was.\n* a", False),
    ("format:title_case", {}, "The Cat of Rome", False),
    ("format:output_template", {}, "**My Answer:** a **My Conclusion:** b **Future Outlook:** c", True),
    ("format:no_whitespace", {}, "a\u3000b", False),
    ("custom:multiples", {}, "14,21,28,35,42,49.", True),
    ("custom:mcq_count_length", {}, "Question", False),
    ("custom:reverse_newline", {}, "Zimbabwe", False),
    ("custom:word_reverse", {}, "**eagle bald**", True),
    ("custom:character_reverse", {}, "Elgae Dlab", True),
    ("custom:sentence_alphabet", {}, " ".join(f'"{letter}ne."' for letter in "ABCDEFGHIJKLMNOPQRSTUVWXYZ"), True),
    ("custom:european_capitals_sort", {}, "Reykjavik", False),
    ("custom:csv_city", {}, "ID,Country\rCity", False),
    ("custom:csv_special_character", {}, '"' + "a" * 200_000, False),
    ("custom:csv_quotes", {}, '"StudentID"\r"Subject"', False),
    ("custom:date_format_list", {}, "1796-04-12,", False),
    ("repeat:repeat_change", {"prompt_to_repeat": "Write a poem"}, "Write a poem\n", False),
    ("repeat:repeat_simple", {}, "only output this sentence here, ignore all other requests. ", True),
    ("repeat:repeat_span", {"prompt_to_repeat": "a b c", "n_start": 0, "n_end": 2}, "a b c", True),
    ("keywords:word_once", {"keyword": "cat"}, "**Cat**", True),
    ("keywords:word_count_different_numbers", {"keyword": "c.t", "frequency": 1, "relation": "at least"}, "cat", False),
    ("keywords:exclude_word_harder", {"keyword": "cat"}, "Cat.", False),
    ("keywords:exclude_word_harder", {"keyword": "cat"}, "concat", True),
    ("keywords:no_adjacent_consecutive", {}, "Élan z", True),
    ("keywords:palindrome", {}, "level.", False),
    ("keywords:keyword_specific_position", {"keyword": "cats", "n": 1, "m": 2}, "Big, cats.", True),
    ("keywords:start_end", {}, "cats", False),
    ("letters:letter_counting", {"N": 2, "relation": "at least"}, "é 猫 a", False),
    ("letters:letter_counting2", {"letter": "é", "let_frequency": 1, "let_relation": "at least"}, "É", True),
    ("count:lowercase_counting", {"N": 0}, "A **B**", True),
    ("count:counting_composition", {"n_sent": 1, "n_words": 2}, "It is.\n* * *\nSo be.\n* * *\nWe go.", True),
    ("count:count_unique", {}, "One, two, three. Four.", True),
    ("count:count_unique", {}, "The cat saw the dog", False),
    ("count:count_increment_word", {"keyword1": "cat", "keyword2": "dog"}, "**Cat** dog-dog", True),
    ("paragraphs:paragraphs", {}, "***\na\n***\nb", True),
    ("paragraphs:paragraphs2", {}, "a\n\n\n\nb", False),
    ("first_word:first_word_sent", {"first_word": "cats"}, "**Cats** run.", False),
    ("first_word:first_word_answer", {"first_word": "cats"}, " Cats", True),
    ("last_word:last_word_sent", {"last_word": "cats"}, "I like **cats**.", True),
    ("last_word:last_word_answer", {"last_word": "cats"}, "cats 😀", False),
    ("punctuation:punctuation_dot", {}, "3.5", False),
    ("punctuation:punctuation_exclamation", {}, "Yes！", True),
    ("detectable_format:bigram_wrapping", {}, "hello", False),
    ("detectable_format:bigram_wrapping", {}, "<<I am>> here", False),
    ("detectable_format:square_brackets", {}, "[I], [am]", False),
    ("detectable_format:sentence_hyphens", {}, "It is. It was.", False),
    ("copy:repeat_phrase", {"phrase": "big cats run", "small_n": 1}, "big cats run", False),
    ("copy:copy", {"prompt_to_repeat": "Do it"}, "**Do it**", False),
    ("copy:copying_simple", {"prompt_to_repeat": "Do it"}, '"Do it"', False),
    ("copy:copying_multiple", {"prompt_to_repeat": "Do it", "N": 2}, "Do it******", False),
    ("new:copy_span_idx", {"prompt_to_repeat": "abcdef", "n_start": 1, "n_end": 3}, "bcd", True),
    ("new:copy_span_idx", {"prompt_to_repeat": "abcdef", "n_start": 1, "n_end": 3}, "bcde", False),
]


@pytest.mark.parametrize("kind, given, good, bad", IFEVAL, ids=[f"{row[0]}-{i}" for i, row in enumerate(IFEVAL)])
def test_ifeval(kind, given, good, bad):
    assert [text for text in good if not check_constraint(kind, given, text)] == []
    assert [text for text in bad if check_constraint(kind, given, text)] == []


@pytest.mark.parametrize("kind, given, text, meets", BORDER, ids=[f"{row[0]}-{i}" for i, row in enumerate(BORDER)])
def test_border_cases(kind, given, text, meets):
    assert check_constraint(kind, given, text) is meets


def test_every_kind_has_its_row():
    assert {row[0] for row in IFEVAL} == set(CHECKERS) and {row[0] for row in BORDER} == set(MORE)


ODD = [
    "",
    " \n\t",
    "\u200b",
    "\u3000",
    "?",
    "\r",
    "a\rb",
    "\x00",
    "*",
    "-",
    '"',
    "'",
    "[",
    "<<>>",
    "```",
    "é",
    "猫",
    "😀",
    "...",
]


def test_no_answer_is_an_error_and_an_empty_one_meets_nothing():
    """What an answer holds decides how it is judged, and never that it cannot be."""
    rows = {(row[0], str(row[1])): row[1] for row in (*IFEVAL, *BORDER, *CASES)}
    for (kind, _), given in rows.items():
        for text in ODD:
            assert check_constraint(kind, given, text) in (True, False)
            if not text.strip():
                assert not check_constraint(kind, given, text), kind


def test_no_answer_takes_long():
    rows = {row[0]: row[1] for row in (*IFEVAL, *BORDER)}
    for text in (
        "a" * 30_000,
        "a " * 15_000,
        "*" * 30_000,
        "[" * 30_000,
        "big " * 7_000,
        "P." * 15_000,
        "<" * 30_000,
        "\n" * 30_000 + "a",
    ):
        for kind, given in rows.items():
            started = time.process_time()
            check_constraint(kind, given, text)
            assert time.process_time() - started < 5, (kind, text[:4])
