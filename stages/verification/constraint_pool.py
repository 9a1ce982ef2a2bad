"""Constraints that a program can check, drawn for a prompt: arguments, words for them, and which go together
(``synth.constraint``, ``data.constraint_pairs``).

    drawn = draw_constraints(rng, prompt, 3, Choice())     # [Drawn(id, kwargs, text), ...], any number up to 3

The kinds are those of IFEval (Zhou et al. 2023), which ``stages.verification.ifeval.CHECKERS`` decides. What is
drawn together can be met together: kinds that are at odds are kept apart by a table, arguments by the checkers
themselves, on the words that the other constraints force into every answer, and lengths by what the others take.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations

from stages.verification.constraints import check_constraint
from stages.verification.ifeval import CHECKERS
from stages.verification.languages import guess_language

COMMA = "punctuation:no_comma"
JSON = "detectable_format:json_format"
TITLE = "detectable_format:title"
OPTIONS = "detectable_format:constrained_response"
WORDS = "length_constraints:number_words"
SENTENCES = "length_constraints:number_sentences"
PARAGRAPHS = "length_constraints:number_paragraphs"
FIRST_WORD = "length_constraints:nth_paragraph_first_word"
PLACEHOLDERS = "detectable_content:number_placeholders"
POSTSCRIPT = "detectable_content:postscript"
BULLETS = "detectable_format:number_bullet_lists"
HIGHLIGHTS = "detectable_format:number_highlighted_sections"
SECTIONS = "detectable_format:multiple_sections"
TWO = "combination:two_responses"
REPEAT = "combination:repeat_prompt"
END = "startend:end_checker"
QUOTED = "startend:quotation"
CAPITAL = "change_case:english_capital"
LOWER = "change_case:english_lowercase"
CAPITAL_WORDS = "change_case:capital_word_frequency"
KEYWORDS = "keywords:existence"
FORBIDDEN = "keywords:forbidden_words"
FREQUENCY = "keywords:frequency"
LETTER = "keywords:letter_frequency"
LANGUAGE = "language:response_language"

#: Words that an answer is asked to have, or not to have: plain ones, without capitals and commas.
KEYWORD_POOL = tuple(
    """
garden window market bridge silver winter engine letter forest island mirror kitchen summer captain planet village ocean ticket orange pencil harbor
music shadow valley castle farmer doctor teacher picture river signal border desert hammer jacket ladder lantern meadow needle pocket ribbon saddle
balance benefit challenge choice comfort courage culture detail effort energy example future habit history impact journey lesson measure method moment
nature option pattern period plan practice problem process project purpose quality question reason record result routine search season secret skill
solution story strategy strength success support surface system task theory tradition travel trust value variety weather wonder
bright calm careful clear common deep early fair fresh gentle honest important local modern narrow patient quiet rapid simple steady strong useful
begin carry choose compare consider create describe discover explain follow gather improve include learn manage notice observe prepare protect remember
""".split()
)
#: Words that answers have without being asked, so that to leave them out is something.
FORBIDDEN_POOL = tuple(
    """
also always because best better can could different easy even every find first get give good great help how however important just know like make many may more most much need new often
one only other people should simple some start such take then there thing time try use want way well work would you your
""".split()
)
END_PHRASES = (
    "Is there anything else you would like to know?",
    "That is all there is to say about it.",
    "Tell me which part you would like to hear more about.",
    "And this is where my answer ends.",
    "Let me know whether this is what you had in mind.",
    "Nothing more needs to be added.",
)
LANGUAGE_NAMES = {
    "ar": "Arabic",
    "bg": "Bulgarian",
    "bn": "Bengali",
    "de": "German",
    "el": "Greek",
    "es": "Spanish",
    "fa": "Persian",
    "fi": "Finnish",
    "fr": "French",
    "gu": "Gujarati",
    "he": "Hebrew",
    "hi": "Hindi",
    "id": "Indonesian",
    "it": "Italian",
    "ja": "Japanese",
    "kn": "Kannada",
    "ko": "Korean",
    "ml": "Malayalam",
    "mr": "Marathi",
    "ne": "Nepali",
    "nl": "Dutch",
    "pa": "Punjabi",
    "pl": "Polish",
    "pt": "Portuguese",
    "ru": "Russian",
    "sv": "Swedish",
    "sw": "Swahili",
    "ta": "Tamil",
    "te": "Telugu",
    "th": "Thai",
    "tr": "Turkish",
    "uk": "Ukrainian",
    "ur": "Urdu",
    "vi": "Vietnamese",
    "zh": "Chinese",
}
OFTEN, SELDOM = "etaoinsr", "jqxz"  # letters that a text has many of without trying, and can do with few of
_YES_OR_NO = re.compile(
    r"(?i)\s*(?:is|are|was|were|am|do|does|did|can|could|will|would|should|shall|may|might|must|has|have|had)\b[^?\n]*\?\s*\Z"
)
LONGEST_REPEATED = 600  # characters of a prompt that is to be repeated, at most


@dataclass(frozen=True)
class Choice:
    """What is drawn from: kinds, words that are asked for and words that are forbidden, codes of languages, and the
    greatest number of words that is asked for at least.
    """

    kinds: tuple[str, ...] = tuple(CHECKERS)
    keywords: tuple[str, ...] = KEYWORD_POOL
    forbidden_words: tuple[str, ...] = FORBIDDEN_POOL
    languages: tuple[str, ...] = tuple(sorted(LANGUAGE_NAMES))
    max_words: int = 300


@dataclass(frozen=True)
class Drawn:
    """A constraint with its arguments, and the sentence that asks for it."""

    id: str
    kwargs: dict
    text: str


@dataclass(frozen=True)
class Kind:
    """arguments(rng, choice, prompt) draws them; ``renderings`` are the sentences, with the arguments and what
    ``words`` makes of them as fields; ``fits`` says which prompts it suits; ``forces`` the texts that every answer then
    has; ``takes`` the least (sentences, words) that an answer has for it."""

    renderings: tuple[str, ...]
    arguments: Callable = lambda rng, choice, prompt: {}
    words: Callable[[dict], dict] = lambda given: {}
    fits: Callable[[str], bool] = lambda prompt: True
    forces: Callable[[dict], list[str]] = lambda given: []
    takes: Callable[[dict], tuple[int, int]] = lambda given: (0, 0)


def _one(rng, options: Sequence):
    return options[int(rng.integers(len(options)))]


def _some(rng, options: Sequence, n: int) -> list:
    return [options[int(i)] for i in rng.choice(len(options), size=min(n, len(options)), replace=False)]


def _between(rng, low: int, high: int) -> int:
    return int(rng.integers(low, max(low, high) + 1))


def _bounded(name: str, relation: str, least: Callable, most: Callable, **more: Callable) -> Callable:
    """Arguments of a count: at least what ``least`` draws, or less than what ``most`` draws; ``more`` draws the others,
    told which of the two it is.
    """

    def draw(rng, choice, prompt):
        lower = bool(rng.integers(2))
        return {key: of(rng, choice, lower) for key, of in more.items()} | {
            name: (least if lower else most)(rng, choice),
            relation: "at least" if lower else "less than",
        }

    return draw


def _amount(name: str, relation: str = "relation") -> Callable[[dict], dict]:
    return lambda given: {"amount": ("at least" if given[relation] == "at least" else "fewer than") + f" {given[name]}"}


def _listed(name: str) -> Callable[[dict], dict]:
    return lambda given: {"listed": ", ".join(f'"{word}"' for word in given[name])}


def _words(text: str) -> int:
    return len(re.findall(r"\w+", text))


def _at_least(relation: str, taken: Callable[[dict], tuple[int, int]]) -> Callable[[dict], tuple[int, int]]:
    return lambda given: taken(given) if given[relation] == "at least" else (0, 0)


KINDS: dict[str, Kind] = {
    COMMA: Kind(
        (
            "Do not use any commas in your answer.",
            "Write your whole answer without a single comma.",
            "Your response must not contain commas.",
        )
    ),
    WORDS: Kind(
        ("Answer with {amount} words.", "Your response should have {amount} words.", "Write {amount} words."),
        _bounded(
            "num_words",
            "relation",
            lambda rng, c: 10 * _between(rng, max(2, c.max_words // 60), c.max_words // 10),
            lambda rng, c: 10 * _between(rng, 3, max(10, c.max_words // 10)),
        ),
        _amount("num_words"),
        takes=_at_least("relation", lambda given: (math.ceil(given["num_words"] / 25), given["num_words"])),
    ),
    SENTENCES: Kind(
        (
            "Your response should have {amount} sentences.",
            "Write {amount} sentences.",
            "Use {amount} sentences in your answer.",
        ),
        _bounded(
            "num_sentences",
            "relation",
            lambda rng, c: _between(rng, 3, max(3, c.max_words // 15)),
            lambda rng, c: _between(rng, 3, 20),
        ),
        _amount("num_sentences"),
        takes=_at_least("relation", lambda given: (given["num_sentences"], 8 * given["num_sentences"])),
    ),
    PARAGRAPHS: Kind(
        (
            "Write exactly {num_paragraphs} paragraphs, separated by the markdown divider ***.",
            "Your response must consist of {num_paragraphs} paragraphs. Put a line with *** between each two of them.",
            "There should be {num_paragraphs} paragraphs, with the divider *** between one and the next.",
        ),
        lambda rng, c, prompt: {"num_paragraphs": _between(rng, 2, 6)},
        takes=lambda given: (given["num_paragraphs"], 10 * given["num_paragraphs"]),
    ),
    FIRST_WORD: Kind(
        (
            (
                "Write {num_paragraphs} paragraphs, separated from each other by an empty line and nothing else."
                ' Paragraph {nth_paragraph} must start with the word "{first_word}".'
            ),
            (
                "There should be exactly {num_paragraphs} paragraphs with an empty line between each two of them, and"
                ' paragraph {nth_paragraph} has to begin with the word "{first_word}".'
            ),
        ),
        lambda rng, c, prompt: {
            "num_paragraphs": (n := _between(rng, 2, 6)),
            "nth_paragraph": _between(rng, 1, n),
            "first_word": _one(rng, c.keywords),
        },
        forces=lambda given: [given["first_word"]],
        takes=lambda given: (given["num_paragraphs"], 10 * given["num_paragraphs"]),
    ),
    PLACEHOLDERS: Kind(
        (
            "Use at least {num_placeholders} placeholders in square brackets, such as [name].",
            (
                "The response must contain at least {num_placeholders} placeholders that are "
                "written in square brackets, for example [address]."
            ),
        ),
        lambda rng, c, prompt: {"num_placeholders": _between(rng, 1, 6)},
        takes=lambda given: (0, 2 * given["num_placeholders"]),
    ),
    POSTSCRIPT: Kind(
        (
            "At the end of your response, add a postscript that starts with {postscript_marker}",
            "Close with a postscript; it has to start with {postscript_marker}",
        ),
        lambda rng, c, prompt: {"postscript_marker": _one(rng, ("P.S.", "P.P.S"))},
        forces=lambda given: [given["postscript_marker"]],
        takes=lambda given: (1, 6),
    ),
    BULLETS: Kind(
        (
            (
                "Your answer must contain exactly {num_bullets} bullet points, in markdown such as:\n* This is a"
                " point.\n* This is another one.\n"
            ),
            'Include exactly {num_bullets} bullet points, each on a line of its own that begins with "- ".',
        ),
        lambda rng, c, prompt: {"num_bullets": _between(rng, 2, 8)},
        takes=lambda given: (given["num_bullets"], 4 * given["num_bullets"]),
    ),
    HIGHLIGHTS: Kind(
        (
            "Highlight at least {num_highlights} parts of your answer with markdown, like *this part*.",
            (
                "At least {num_highlights} phrases of your answer should be set off as *highlighted "
                "text*, with asterisks around them."
            ),
        ),
        lambda rng, c, prompt: {"num_highlights": _between(rng, 1, 6)},
        takes=lambda given: (0, 2 * given["num_highlights"]),
    ),
    SECTIONS: Kind(
        (
            (
                "Divide your answer into at least {num_sections} sections. Begin each section with {section_spliter}"
                " and its number, such as:\n{section_spliter} 1\n[content]\n{section_spliter} 2\n[content]\n"
            ),
            (
                "Your response must have at least {num_sections} sections; write {section_spliter} X at the beginning"
                " of each, where X is its number (1, 2, ...)."
            ),
        ),
        lambda rng, c, prompt: {
            "section_spliter": _one(rng, ("SECTION", "Section", "Part", "Chapter")),
            "num_sections": _between(rng, 2, 5),
        },
        forces=lambda given: [f"{given['section_spliter']} {n + 1}" for n in range(given["num_sections"])],
        takes=lambda given: (given["num_sections"], 10 * given["num_sections"]),
    ),
    TITLE: Kind(
        (
            "Your answer must have a title in double angular brackets, such as <<a title>>.",
            "Give your response a title, wrapped in << and >>.",
        ),
        takes=lambda given: (1, 3),
    ),
    JSON: Kind(
        (
            "The whole output must be valid JSON. Markdown ticks around it are allowed.",
            "Answer in JSON, with nothing before or behind it.",
        ),
        takes=lambda given: (1, 10),
    ),
    OPTIONS: Kind(
        (
            'Answer with one of these options: "My answer is yes.", "My answer is no.", "My answer is maybe."',
            "Choose your answer from the following three: My answer is yes. / My answer is no. / My answer is maybe.",
        ),
        fits=lambda prompt: bool(_YES_OR_NO.match(prompt)),
        forces=lambda given: ["My answer is"],
        takes=lambda given: (1, 4),
    ),
    TWO: Kind(
        (
            "Give two different responses. Separate them from each other with six asterisks, ******, and nothing else.",
            "Write two different answers, with ****** (six asterisks) between them and nowhere else.",
        ),
        takes=lambda given: (2, 20),
    ),
    REPEAT: Kind(
        (
            (
                "First repeat the request above word for word without any change, then give your answer. Do not write"
                " anything before the repeated request, and do not repeat this paragraph."
            ),
            (
                "Before you answer, repeat everything above this paragraph exactly as it stands; your response starts"
                " with it."
            ),
        ),
        lambda rng, c, prompt: {"prompt_to_repeat": prompt.strip()},
        fits=lambda prompt: len(prompt) <= LONGEST_REPEATED,
        forces=lambda given: [given["prompt_to_repeat"]],
        takes=lambda given: (
            1 + len(re.findall(r"[.!?](?=\s)", given["prompt_to_repeat"])) + 1,
            _words(given["prompt_to_repeat"]) + 5,
        ),
    ),
    END: Kind(
        (
            "Finish your response with exactly this phrase: {end_phrase} No other words may follow it.",
            "The very last words of your answer must be: {end_phrase}",
        ),
        lambda rng, c, prompt: {"end_phrase": _one(rng, END_PHRASES)},
        forces=lambda given: [given["end_phrase"]],
        takes=lambda given: (1, _words(given["end_phrase"])),
    ),
    QUOTED: Kind(
        (
            "Wrap your entire response in double quotation marks.",
            "Put double quotation marks around the whole of your answer.",
        )
    ),
    CAPITAL: Kind(
        (
            "Your entire response must be in English and in capital letters only.",
            "Write your whole answer in English, using nothing but capital letters.",
        )
    ),
    LOWER: Kind(
        (
            "Your entire response must be in English and in lowercase letters. No capital letters are allowed.",
            "Answer in English, all in lower case, without a single capital letter.",
        )
    ),
    LANGUAGE: Kind(
        (
            "Your entire response must be in {name}; no other language is allowed.",
            "Write your answer in {name} and in no other language.",
        ),
        lambda rng, c, prompt: {"language": _one(rng, c.languages)},
        lambda given: {"name": LANGUAGE_NAMES[given["language"]]},
    ),
    CAPITAL_WORDS: Kind(
        (
            "Words with all capital letters should appear {amount} times.",
            "Use {amount} words that are written in capital letters only.",
        ),
        _bounded(
            "capital_frequency",
            "capital_relation",
            lambda rng, c: _between(rng, 2, 10),
            lambda rng, c: _between(rng, 2, 6),
        ),
        _amount("capital_frequency", "capital_relation"),
        takes=_at_least("capital_relation", lambda given: (0, 2 * given["capital_frequency"])),
    ),
    KEYWORDS: Kind(
        ("Include the keywords {listed} in your answer.", "Your response should contain all of these words: {listed}."),
        lambda rng, c, prompt: {"keywords": _some(rng, c.keywords, _between(rng, 1, 3))},
        _listed("keywords"),
        forces=lambda given: list(given["keywords"]),
        takes=lambda given: (0, 3 * len(given["keywords"])),
    ),
    FORBIDDEN: Kind(
        ("Do not use the words {listed} in your answer.", "None of these words may appear in your response: {listed}."),
        lambda rng, c, prompt: {"forbidden_words": _some(rng, c.forbidden_words, _between(rng, 1, 3))},
        _listed("forbidden_words"),
    ),
    FREQUENCY: Kind(
        (
            'The word "{keyword}" should appear {amount} times in your answer.',
            'Use the word "{keyword}" {amount} times.',
        ),
        _bounded(
            "frequency",
            "relation",
            lambda rng, c: _between(rng, 2, 5),
            lambda rng, c: _between(rng, 2, 4),
            keyword=lambda rng, c, lower: _one(rng, c.keywords),
        ),
        _amount("frequency"),
        forces=lambda given: (
            [" ".join([given["keyword"]] * given["frequency"])] if given["relation"] == "at least" else []
        ),
        takes=_at_least("relation", lambda given: (0, 3 * given["frequency"])),
    ),
    LETTER: Kind(
        (
            "The letter {letter} should appear {amount} times in your response.",
            "In your answer, use the letter {letter} {amount} times.",
        ),
        _bounded(
            "let_frequency",
            "let_relation",
            lambda rng, c: _between(rng, 5, 30),
            lambda rng, c: _between(rng, 2, 6),
            letter=lambda rng, c, lower: _one(rng, OFTEN if lower else SELDOM),
        ),
        _amount("let_frequency", "let_relation"),
        takes=_at_least("let_relation", lambda given: (0, 4 * given["let_frequency"])),
    ),
}

#: Kinds that go with these only: the others ask for a form of the answer that they cannot have, or leave it open which
#: of the two wins.
ONLY_WITH = {
    JSON: {WORDS, LETTER, KEYWORDS, FORBIDDEN, FREQUENCY},
    OPTIONS: {COMMA, FORBIDDEN},
    TWO: {COMMA, WORDS, PLACEHOLDERS, CAPITAL, LOWER, CAPITAL_WORDS, KEYWORDS, FORBIDDEN, FREQUENCY, LETTER, LANGUAGE},
    LANGUAGE: {COMMA, PLACEHOLDERS, TITLE, BULLETS, HIGHLIGHTS, QUOTED, TWO, PARAGRAPHS},
}
#: Kinds that do not go with these: at odds about letters (exact words against one case), about what paragraphs are
#: divided by, or about what comes first or last.
APART = {
    CAPITAL: {LOWER, CAPITAL_WORDS, SECTIONS, END, REPEAT},
    LOWER: {CAPITAL_WORDS, SECTIONS, END, REPEAT, POSTSCRIPT},
    FIRST_WORD: {PARAGRAPHS, SECTIONS, TITLE, POSTSCRIPT, REPEAT},
    PARAGRAPHS: {SECTIONS},
    QUOTED: {END, REPEAT},
    END: {POSTSCRIPT},
}


def apart(a: str, b: str) -> bool:
    """Whether two kinds are never drawn together; a kind goes with itself never."""
    return (
        a == b
        or b in APART.get(a, ())
        or a in APART.get(b, ())
        or any(one in ONLY_WITH and other not in ONLY_WITH[one] for one, other in ((a, b), (b, a)))
    )


def compatible(constraints: Sequence[tuple[str, dict]]) -> bool:
    """Whether an answer of an ordinary kind can meet all of (id, kwargs) at once: no two of them are :func:`apart`,
    what each forces into the answer breaks none of the others, and what they take has room in the number of words and
    sentences."""
    if any(apart(a, b) for (a, _), (b, _) in combinations(constraints, 2)):
        return False
    forced = "\n\n".join(text for name, given in constraints for text in KINDS[name].forces(given))
    for name, given in constraints if forced else ():
        upper = name in (COMMA, FORBIDDEN) or "less than" in given.values()
        if upper and not check_constraint(name, given, forced):
            return False
        if (
            name == PARAGRAPHS
            and "***" in forced
            or name == BULLETS
            and len(re.findall(r"(?m)^\s*(?:\*[^*]|-)", forced)) > given["num_bullets"]
        ):
            return False
    sizes = [KINDS[name].takes(given) for name, given in constraints if name not in (WORDS, SENTENCES)]
    for name, given in constraints:
        if name in (WORDS, SENTENCES) and given["relation"] == "at least":
            sizes = [
                *sizes,
                tuple(max(0, n - sum(size[i] for size in sizes)) for i, n in enumerate(KINDS[name].takes(given))),
            ]
    sentences, words = (sum(size[i] for size in sizes) for i in (0, 1))
    room = {name: given for name, given in constraints if given.get("relation") == "less than"}
    return (WORDS not in room or words <= 0.8 * (room[WORDS]["num_words"] - 1)) and (
        SENTENCES not in room or sentences <= room[SENTENCES]["num_sentences"] - 1
    )


def rendered(name: str, kwargs: dict, rendering: int) -> str:
    """The sentence that asks for a constraint, in one of its wordings."""
    options = KINDS[name].renderings
    return options[rendering % len(options)].format(**kwargs, **KINDS[name].words(kwargs))


def draw_constraints(rng, prompt: str, count: int, choice: Choice = Choice()) -> list[Drawn]:
    """Up to ``count`` compatible constraints for a prompt in English, kinds in a random order, each with its arguments
    and wording; fewer where no more go together.

    ``rng`` is a ``numpy.random.Generator``, of which the result is a function.
    """
    found: list[Drawn] = []
    for at in rng.permutation(len(choice.kinds)):
        name = choice.kinds[int(at)]
        if len(found) == count:
            break
        if not KINDS[name].fits(prompt):
            continue
        for _ in range(5):  # other arguments may fit where these do not
            given = KINDS[name].arguments(rng, choice, prompt)
            if compatible([*((one.id, one.kwargs) for one in found), (name, given)]):
                found.append(Drawn(name, given, rendered(name, given, int(rng.integers(len(KINDS[name].renderings))))))
                break
    return found


def with_constraints(prompt: str, drawn: Sequence[Drawn]) -> str:
    """The prompt with what is asked of its answer in a paragraph of its own."""
    return f"{prompt.rstrip()}\n\n" + " ".join(one.text for one in drawn)


def unfit(messages: Sequence[dict]) -> str | None:
    """Why no constraint can be added to a prompt: its last message is not the user's, or not in English, in which
    constraints are worded; None where one can.
    """
    if not messages or messages[-1].get("role") != "user" or not (messages[-1].get("content") or "").strip():
        return "last_not_user"
    return "not_english" if guess_language(messages[-1]["content"]) not in ("en", None) else None
