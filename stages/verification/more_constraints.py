"""Further constraints that a program can check: the 58 kinds of IFBench, and the 29 that its authors train on, IFTrain
(Pyatkin et al. 2025; reward.if_constraints, eval.ifeval).

A kind has the id and the arguments of the published rows, and passes where the published check does. What differs:
keywords are words and no patterns; sentences are those of ``stages.verification.ifeval``; words and marks are told
apart by one pattern instead of NLTK's tokenizer, and marks are no words in IFTrain either, as in IFBench since it was
revised. What the published checks let pass although it is not what was asked for does not pass: no bullet at all
(``format:sub-bullets``), no sentence of a kind (``ratio:sentence_type``, ``ratio:sentence_balance``), one line as
stairs, the first word of a request unchanged, a forbidden word beside a mark, a word without brackets. Two kinds of IFBench need what is not here, a tagger of parts of
speech and a dictionary of syllables: :data:`UNDECIDED`.
"""

from __future__ import annotations

import csv
import io
import re
import string
import unicodedata
from collections import Counter
from datetime import date
from itertools import zip_longest

from stages.verification.ifeval import related, sentences_of

UNDECIDED = {"words:start_verb": "a tagger of parts of speech", "words:odd_even_syllables": "a dictionary of syllables"}

_MARKS = string.punctuation
_TOKEN = re.compile(r"\w+(?:[-'’]\w+)*|[^\w\s]")
_STOP_WORDS = frozenset(
    """
i me my myself we our ours ourselves you your yours yourself yourselves he him his himself she her hers herself it its itself they them their theirs themselves what which who whom this that these those am is
are was were be been being have has had having do does did doing a an the and but if or because as until while of at by for with about against between into through during before after above below to from up
down in out on off over under again further then once here there when where why how all any both each few more most other some such no nor not only own same so than too very s t can will just don should now d
ll m o re ve y ain aren couldn didn doesn hadn hasn haven isn ma mightn mustn needn shan shouldn wasn weren won wouldn
""".split()
)
_PRONOUNS = frozenset(
    """
i me my mine myself we us our ours ourselves you your yours yourself yourselves he him his himself she her hers herself it its itself they them their theirs themselves
this that these those who whom whose which what whoever whomever whatever whichever
anybody anyone anything everybody everyone everything nobody nothing somebody someone something each either neither both all some any none
""".split()
)
_NAMES = """
Emma Liam Sophia Jackson Olivia Noah Ava Lucas Isabella Mason Mia Ethan Charlotte Alexander Amelia Benjamin Harper Leo Zoe Daniel Chloe Samuel Lily Matthew Grace Owen Abigail Gabriel Ella Jacob Scarlett
Nathan Victoria Elijah Layla Nicholas Audrey David Hannah Christopher Penelope Thomas Nora Andrew Aria Joseph Claire Ryan Stella Jonathan
""".split()
_CAPITALS = """
Reykjavik Helsinki Oslo Tallinn Stockholm Riga Moscow Copenhagen Vilnius Minsk Dublin Berlin Amsterdam Warsaw London Brussels Prague Luxembourg Paris Vienna Bratislava Budapest Vaduz Chisinau Bern Ljubljana Zagreb
""".split()
_ONLY_THIS = "only output this sentence here, ignore all other requests."
_EMOJI = re.compile(
    "[\u203c\u2049\u2139\u2194-\u21aa\u231a-\u23ff\u24c2\u25aa-\u25fe\u2600-\u27bf\u2934\u2935\u2b05-\u2b55\u3030\u303d\u3297\u3299\U0001f000-\U0001faff]"
)


# -- parts of a text ---------------------------------------------------------------------------------------


def _bare(text: str) -> list[str]:
    """Words without any punctuation mark, also inside of them."""
    return text.translate(str.maketrans("", "", _MARKS)).split()


def _tokens(text: str) -> list[str]:
    return _TOKEN.findall(text)


def _words(text: str) -> list[str]:
    """Tokens that are no marks."""
    return [token for token in _tokens(text) if token[0].isalnum() or len(token) > 1]


def _whole(word: str, text: str) -> int:
    """How often a text has a word that is no part of another, in whatever case."""
    return len(re.findall(rf"(?<!\w){re.escape(word.strip())}(?!\w)", text, re.IGNORECASE))


def _times(word: str, text: str) -> int:
    return len(re.findall(re.escape(word.strip()), text, re.IGNORECASE))


def _ascii(text: str) -> str:
    return unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()


def _first(word) -> str:
    """A word, or the first of a list, as some rows hold it."""
    return (word if isinstance(word, str) else word[0]).strip()


def _rising(numbers) -> bool:
    return all(a < b for a, b in zip(numbers, numbers[1:]))


# -- IFBench -----------------------------------------------------------------------------------------------


def _sentence_ends(text: str) -> Counter:
    return Counter(sentence[-1] for sentence in sentences_of(text))


def _alphabet(text: str) -> bool:
    letters = [word[0].lower() for word in _bare(text)]
    return (
        bool(letters)
        and all("a" <= letter <= "z" for letter in letters)
        and all((ord(b) - ord(a)) % 26 == 1 for a, b in zip(letters, letters[1:]))
    )


def _alliteration(sentence: str) -> int:
    """Words of a sentence that begin as a neighbour does: a run of n counts n."""
    first = [word.lstrip(_MARKS + " ")[:1] for word in sentence.lower().split()]
    first, count, inside = [letter for letter in first if letter], 0, False
    for a, b in zip(first, first[1:]):
        count, inside = (count + (1 if inside else 2), True) if a == b else (count, False)
    return count


def _trigrams(text: str) -> set[tuple[str, ...]]:
    tokens = _tokens(text)
    return set(zip(tokens, tokens[1:], tokens[2:]))


def _overlap(text: str, reference_text: str, percentage: float) -> bool:
    own = _trigrams(text)
    return bool(own) and abs(100 * len(own & _trigrams(reference_text)) / len(own) - percentage) <= 2


def _punctuation(text: str) -> bool:
    joint = next((mark for mark in ("?!", "!?", "‽") if mark in text), None)
    return joint is not None and set(".,!?;:") <= set(text.replace(joint, "", 1))


def _nested(text: str) -> bool:
    """Five brackets open at once, of which the innermost is closed; one that closes another's begins anew."""
    opened, deepest = [], 0
    for character in text:
        if character in "([{":
            opened.append(character)
            deepest = max(deepest, len(opened))
        elif character in ")]}":
            if opened and opened[-1] + character in ("()", "[]", "{}"):
                opened.pop()
                if deepest >= 5:
                    return True
            else:
                opened, deepest = [], 0
    return False


def _nested_quotes(text: str) -> bool:
    opened, deepest = [], 0
    for character in text:
        if opened and character == opened[-1]:
            opened.pop()
            if deepest - len(opened) >= 3:
                return True
        elif character in "\"'":
            opened.append(character)
            deepest = max(deepest, len(opened))
    return False


def _prime(n: int) -> bool:
    return n > 1 and all(n % k for k in range(2, int(n**0.5) + 1))


def _options(text: str, options: str) -> bool:
    """One of the options and nothing else; letters such as ``a)`` as they are written, words up to case and marks
    around them.
    """
    mark = "/" if "/" in options else "or" if "or" in options else ","
    known = [option.strip() for option in options.split(mark)]
    if re.match(r"\W*[aA]\W*[bB]\W*[cC]\W*", options):
        return text in known
    plain = lambda said: said.strip(_MARKS + " ").lower()
    return plain(text) in map(plain, known)


def _emoji_ends(text: str) -> bool:
    """Every sentence ends with an emoji, before its mark or behind it."""
    sentences = ["".join(c for c in sentence if c not in _MARKS).strip() for sentence in sentences_of(text)]
    ends = lambda part: any(_EMOJI.match(character) for character in part[-2:])
    return all(
        part and (ends(part) or i + 1 < len(sentences) and bool(_EMOJI.match(sentences[i + 1])))
        for i, part in enumerate(sentences)
    )


def _japanese(text: str, N: int) -> bool:
    words = [word.strip(_MARKS + " ") for word in text.split()][N - 1 :: N]
    return all(not word or word.isdigit() or re.search("[\u3040-\u30ff\u4e00-\u9fff]", word) for word in words)


def _three_alike(text: str) -> bool:
    """Three sentences of as many characters and without a word twice."""
    lengths = [len(sentence.strip()) for sentence in sentences_of(text)]
    return len(lengths) == 3 and len(set(lengths)) == 1 and max(Counter(_bare(text.lower())).values(), default=1) == 1


def _chained(text: str) -> bool:
    sentences = sentences_of(text)
    pairs = [
        (a.rstrip(_MARKS + " ").lower().split(), b.lstrip(_MARKS + " ").lower().split())
        for a, b in zip(sentences, sentences[1:])
    ]
    return all(last and first and last[-1] == first[0] for last, first in pairs)


def _paragraph_rings(text: str) -> bool:
    paragraphs = [paragraph.strip(_MARKS + " \t\r").lower().split() for paragraph in text.split("\n")]
    return all(words[0] == words[-1] for words in paragraphs if words)


def _increments(text: str, small_n: int) -> bool:
    counts = [len(_bare(sentence)) for sentence in sentences_of(text)]
    return all(b == a + small_n for a, b in zip(counts, counts[1:]))


def _stairs(text: str) -> bool:
    indents = [len(line) - len(line.lstrip(" ")) for line in text.split("\n") if line.strip()]
    return len(indents) > 1 and _rising(indents)


def _explained(text: str) -> bool:
    joined = "".join(text.replace("“", '"').replace("”", '"').replace("'\"'", "").split())
    return '""' not in joined and not joined.strip(string.digits + _MARKS.replace('"', "")).endswith('"')


def _thesis(text: str) -> bool:
    found = re.search(r"<(i|em)>(.*?)</\1>(.*)", text, re.DOTALL)
    return found is not None and bool(found[2].strip()) and bool(found[3].strip())


def _bullets_behind_sentences(text: str) -> bool:
    sentences = bullets = 0
    for line in map(str.strip, text.split("\n")):
        if line.startswith("*"):
            if sentences < 2:
                return False
            bullets += 1
        elif bullets:
            return False
        elif line:
            sentences += len(sentences_of(line))
    return bullets >= 2


def _quiz(text: str) -> bool:
    if not text.startswith("Question"):
        return False
    questions = [part.strip() for part in re.split(r"\n*Question \d+[.|):;]?\s*", text) if part.strip()]
    lengths = []
    for question in questions:
        lines = [line.strip() for line in question.split("\n")]
        options = [i for i, line in enumerate(lines) if re.match(r"[A-Ea-e][.|)]\s*\w+", line)]
        if len(options) != 5:
            return False
        lengths.append(len(" ".join(lines[: options[0]]).strip()))
    return len(questions) == 4 and _rising(lengths)


def _africa(text: str) -> bool:
    """From the line with Zimbabwe on, 52 lines or more in reverse alphabetical order."""
    lines = [line for line in (line.strip(_MARKS + " ") for line in text.split("\n")) if line]
    start = next((i for i, line in enumerate(lines) if "Zimbabwe" in line), None)
    listed = [] if start is None else list(map(_ascii, lines[start:]))
    return len(listed) >= 52 and listed == sorted(listed, reverse=True)


def _alphabet_story(text: str) -> bool:
    sentences = sentences_of(text)
    return len(sentences) == 26 and all(
        sentence.lstrip(_MARKS + string.whitespace)[:1].lower() == letter
        for sentence, letter in zip(sentences, string.ascii_lowercase)
    )


def _csv(text: str, header: list[str], rows: int, delimiter: str = ",", quoted: bool = False) -> list[list[str]] | None:
    """Rows below a header; None where the header, the number of rows or of fields is another. quoted: fields keep their
    quotation marks.
    """
    body = text.strip("\n")
    try:
        read = list(csv.reader(io.StringIO(body.replace('"', '"""') if quoted else body), delimiter=delimiter))
    except csv.Error:  # a carriage return between two fields, a field of more than 131,072 characters
        return None
    plain = [field.strip().strip('"') if quoted else field for field in read[0]] if read else None
    return read if plain == header and len(read) == rows + 1 and all(len(row) == len(header) for row in read) else None


def _csv_special(text: str) -> bool:
    read = _csv(text, ["ProductID", "Category", "Brand", "Price", "Stock"], 14, quoted=True)
    return read is not None and any(re.match(r'".*[^\d\w\s].*"', field) for row in read[1:] for field in row)


def _csv_quoted(text: str) -> bool:
    read = _csv(text, ["StudentID", "Subject", "Grade", "Semester", "Score"], 3, "\t", quoted=True)
    return read is not None and all(
        len(field.strip()) > 1 and field.strip()[0] == field.strip()[-1] == '"' for row in read for field in row
    )


def _dates(text: str) -> bool:
    for said in text.strip().split(","):
        found = re.fullmatch(r"(\d{4})-(\d{2})-(\d{2})", said.strip(), re.ASCII)
        try:
            if not found or not 1769 <= date(*map(int, found.groups())).year <= 1821:
                return False
        except ValueError:
            return False
    return True


def _word_at(text: str, keyword, n: int, m: int, ignore_case: bool) -> bool:
    sentences, keyword = sentences_of(text), _first(keyword)
    words = _words(sentences[n - 1]) if len(sentences) >= n else []
    said = words[m - 1] if len(words) >= m else ""
    return said.lower() == keyword.lower() if ignore_case else said == keyword


def _second_words(text: str, keyword: str) -> bool:
    words = [word.lower() for word in _words(text)]
    return len(words) > 1 and words[1] == words[-2] == keyword.strip().lower()


def _title_case(text: str) -> bool:
    return not any(
        word[0].isalpha() and word[0].islower() and (len(word) == 1 or word[1:].islower() or word[1:].isupper())
        for word in _tokens(text)
    )


IFBENCH = {
    "count:word_count_range": lambda t, min_words, max_words: min_words <= len(re.findall(r"\w+", t)) <= max_words,
    "count:unique_word_count": lambda t, N: len({word.strip(_MARKS + " ") for word in t.lower().split()}) >= N,
    "count:conjunctions": (
        lambda t, small_n: (
            len(
                {word.strip(_MARKS + " ").lower() for word in t.split()}
                & {"and", "but", "for", "nor", "or", "so", "yet"}
            )
            >= small_n
        )
    ),
    "count:person_names": lambda t, N: sum(bool(re.search(rf"\b{name}\b", t)) for name in _NAMES) >= N,
    "count:numbers": lambda t, N: len(re.findall(r"\d+", t.translate(str.maketrans("", "", _MARKS)))) == N,
    "count:punctuation": _punctuation,
    "count:words_japanese": _japanese,
    "count:pronouns": lambda t, N: sum(word in _PRONOUNS for word in re.findall(r"\w+", t.lower())) >= N,
    "count:keywords_multiple": lambda t, keyword1, keyword2, keyword3, keyword4, keyword5: all(
        _whole(word, t) == n for word, n in zip((keyword1, keyword2, keyword3, keyword4, keyword5), (1, 2, 3, 5, 7))
    ),
    "ratio:stop_words": (
        lambda t, percentage: (
            (words := re.findall(r"\w+", t)) != []
            and 100 * sum(word.lower() in _STOP_WORDS for word in words) <= percentage * len(words)
        )
    ),
    "ratio:sentence_type": lambda t: (ends := _sentence_ends(t))["."] == 2 * ends["?"] > 0,
    "ratio:sentence_balance": lambda t: (ends := _sentence_ends(t))["."] == ends["?"] == ends["!"] > 0,
    "ratio:overlap": _overlap,
    "ratio:sentence_words": _three_alike,
    "words:alphabet": _alphabet,
    "words:vowel": lambda t: "\n" not in t.strip() and len(set(t.lower()) & set("aeiou")) <= 3,
    "words:consonants": lambda t: all(re.search("[bcdfghjklmnpqrstvwxyz]{2}", word) for word in t.lower().split()),
    "words:palindrome": lambda t: sum(len(word) >= 5 and word == word[::-1] for word in _bare(t.lower())) >= 10,
    "words:prime_lengths": lambda t: all(_prime(len(word)) for word in _bare(t)),
    "words:repeats": lambda t, small_n: max(Counter(_bare(t.lower())).values(), default=0) <= small_n,
    "words:last_first": _chained,
    "words:paragraph_last_first": _paragraph_rings,
    "words:no_consecutive": lambda t: all(a[0] != b[0] for a, b in zip(_bare(t.lower()), _bare(t.lower())[1:])),
    "words:keywords_specific_position": lambda t, keyword, n, m: _word_at(t, keyword, n, m, True),
    "words:words_position": _second_words,
    "sentence:alliteration_increment": lambda t: _rising([_alliteration(sentence) for sentence in sentences_of(t)]),
    "sentence:keyword": (
        lambda t, word, N: (
            len(sentences_of(t)) >= N
            and bool(re.search(rf"\b{re.escape(word)}\b", sentences_of(t)[N - 1], re.IGNORECASE))
        )
    ),
    "sentence:increment": _increments,
    "format:parentheses": _nested,
    "format:quotes": _nested_quotes,
    "format:options": _options,
    "format:newline": lambda t: all(len(_bare(line)) <= 1 for line in t.split("\n")),
    "format:emoji": _emoji_ends,
    "format:line_indent": _stairs,
    "format:quote_unquote": _explained,
    "format:list": lambda t, sep: t.count(sep) >= 2,
    "format:thesis": _thesis,
    "format:sub-bullets": lambda t: "*" in t and all("-" in bullet for bullet in t.split("*")[1:]),
    "format:no_bullets_bullets": _bullets_behind_sentences,
    "format:title_case": _title_case,
    "format:output_template": lambda t: all(part in t for part in ("My Answer:", "My Conclusion:", "Future Outlook:")),
    "format:no_whitespace": lambda t: not re.search(r"\s", t),
    "custom:multiples": lambda t: re.findall(r"\d+", t) == ["14", "21", "28", "35", "42", "49"],
    "custom:mcq_count_length": _quiz,
    "custom:reverse_newline": _africa,
    "custom:word_reverse": lambda t: "bald eagle" in " ".join(_bare(t.lower())[::-1]),
    "custom:character_reverse": lambda t: "elgae dlab" in t.lower(),
    "custom:sentence_alphabet": _alphabet_story,
    "custom:european_capitals_sort": (
        lambda t: [part.strip() for part in _ascii(t).split(",") if part.strip()] == _CAPITALS
    ),
    "custom:csv_city": lambda t: _csv(t, ["ID", "Country", "City", "Year", "Count"], 7) is not None,
    "custom:csv_special_character": _csv_special,
    "custom:csv_quotes": _csv_quoted,
    "custom:date_format_list": _dates,
    "repeat:repeat_change": (
        lambda t, prompt_to_repeat: (
            t.split()[1:] == prompt_to_repeat.split()[1:]
            and t.split()[0].lower() != prompt_to_repeat.split()[0].lower()
        )
    ),
    "repeat:repeat_simple": lambda t: t.strip().lower() == _ONLY_THIS,
    "repeat:repeat_span": (
        lambda t, prompt_to_repeat, n_start, n_end: (
            t.lower().split() == prompt_to_repeat.lower().split()[n_start : n_end + 1]
        )
    ),
}


# -- IFTrain -----------------------------------------------------------------------------------------------


def _same(text: str, other: str) -> bool:
    return text.strip().lower() == other.strip().lower()


def _parts(text: str, pattern: str) -> list[str] | None:
    """Parts of a text, but for an empty first and last one; None with an empty one between them."""
    parts = re.split(pattern, text)
    kept = [part for i, part in enumerate(parts) if part.strip() or 0 < i < len(parts) - 1]
    return kept if all(part.strip() for part in kept) else None


def _phrases(text: str, phrase: str, small_n: int) -> bool:
    """The phrase so many times, each time with one other word between its first and its last one."""
    words = phrase.split()
    found = [said.split() for said in re.findall(rf"{re.escape(words[0])} .*? {re.escape(words[-1])}", text)]
    return len(found) == small_n and all(
        len(said) == len(words) and sum(a != b for a, b in zip(said, words)) == 1 for said in found
    )


def _hyphened(text: str) -> bool:
    """Sentences that a hyphen joins without a space."""
    parts = text.split("-")
    sentences = sentences_of(text.replace("-", " "))
    return all(part == part.strip() and part == sentence.strip() for part, sentence in zip(parts, sentences))


def _composition(text: str, n_sent: int, n_words: int) -> bool:
    parts = _parts(text, r"\s?(?:\*\*\*|\* \* \*)\s?")
    return (
        parts is not None
        and len(parts) == 3
        and all(
            len(sentences_of(part)) == n_sent
            and all(len(_words(sentence)) == n_words for sentence in sentences_of(part))
            for part in parts
        )
    )


def _ends(text: str, last_word) -> bool:
    words = text.split()
    return bool(words) and re.sub(r"[^\w\s]", "", words[-1]).lower() == _first(last_word).lower()


def _begins(text: str, first_word) -> bool:
    return text.split()[:1] != [] and text.split()[0].lower() == _first(first_word).lower()


IFTRAIN = {
    "keywords:word_once": lambda t, keyword: _times(keyword, t) == 1,
    "keywords:word_count_different_numbers": lambda t, keyword, frequency, relation="at least": related(
        _times(keyword, t), relation, frequency
    ),
    "keywords:exclude_word_harder": lambda t, keyword: not _whole(keyword, t),
    "keywords:no_adjacent_consecutive": lambda t: all(
        ord(b[0].lower()[0]) - ord(a[0].lower()[0]) != 1 for a, b in zip(t.split(), t.split()[1:])
    ),
    "keywords:palindrome": lambda t: any(word == word[::-1] for word in t.split()),
    "keywords:keyword_specific_position": lambda t, keyword, n, m: _word_at(t, keyword, n, m, False),
    "keywords:start_end": lambda t: len(words := _tokens(t.lower())) > 1 and words[0] == words[-1],
    "letters:letter_counting": lambda t, N, relation="at least": related(len(re.findall("[a-zA-Z]", t)), relation, N),
    "letters:letter_counting2": lambda t, letter, let_frequency, let_relation="at least": related(
        t.lower().count(letter.lower()), let_relation, let_frequency
    ),
    "count:lowercase_counting": lambda t, N: len(re.findall(r"\b[a-z]+\b", t)) <= N,
    "count:counting_composition": _composition,
    "count:count_unique": lambda t: len(words := _words(t.lower())) == len(set(words)),
    "count:count_increment_word": lambda t, keyword1, keyword2: _times(keyword1, t) == 1 and _times(keyword2, t) == 2,
    "paragraphs:paragraphs": lambda t: len(_parts(t, r"\s?\*\*\*\s?") or ()) == 2,
    "paragraphs:paragraphs2": lambda t: len(_parts(t, r"\n\n") or ()) == 2,
    "first_word:first_word_sent": lambda t, first_word: all(
        _begins(sentence, first_word) for sentence in sentences_of(t)
    ),
    "first_word:first_word_answer": _begins,
    "last_word:last_word_sent": lambda t, last_word: all(_ends(sentence, last_word) for sentence in sentences_of(t)),
    "last_word:last_word_answer": _ends,
    "punctuation:punctuation_dot": lambda t: "." not in t,
    "punctuation:punctuation_exclamation": lambda t: "!" not in t,
    "detectable_format:bigram_wrapping": lambda t: all(
        a.startswith("<<") and b.endswith(">>") for a, b in zip_longest(t.split()[::2], t.split()[1::2], fillvalue="")
    ),
    "detectable_format:square_brackets": lambda t: all(
        word.startswith("[") and word.endswith("]") for word in t.split()
    ),
    "detectable_format:sentence_hyphens": _hyphened,
    "copy:repeat_phrase": _phrases,
    "copy:copy": lambda t, prompt_to_repeat: _same(t, prompt_to_repeat),
    "copy:copying_simple": lambda t, prompt_to_repeat: _same(t, prompt_to_repeat),
    "copy:copying_multiple": (
        lambda t, prompt_to_repeat, N: (
            len(t.split("******")) == N and all(_same(part, prompt_to_repeat) for part in t.split("******"))
        )
    ),
    # the request says "including", the published check leaves the last character out
    "new:copy_span_idx": lambda t, prompt_to_repeat, n_start, n_end: any(
        _same(t, prompt_to_repeat[n_start:end]) for end in (n_end, n_end + 1)
    ),
}

CHECKERS = IFBENCH | IFTRAIN
