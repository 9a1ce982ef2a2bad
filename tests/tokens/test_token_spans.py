"""Which tokens of two tokenizers say the same: borders, characters in pieces, texts that one of them changes."""

import numpy as np
import pytest
from tokenizers import AddedToken

from stages.chat import Renderer
from stages.spec import ConfigError
from stages.token_spans import END, UNKNOWN, Pieces, form_of, runs, shared_vocabulary, spans, spans_of_turns, text_of
from tests.tokens.test_families import FAMILIES, renderer_of
from tests.training.other_tokenizers import other_tokenizer


def parted(text: bytes, rng) -> list[bytes]:
    ends = [0, *sorted(set(rng.integers(1, len(text), rng.integers(0, len(text))).tolist())), len(text)]
    return [text[a:b] for a, b in zip(ends, ends[1:])]


def test_borders_are_where_both_tokenisations_have_one():
    rng = np.random.default_rng(0)
    for _ in range(200):
        text = bytes(rng.integers(97, 100, rng.integers(2, 20)).tolist())
        mine, theirs = parted(text, rng), parted(text, rng)
        found = spans(mine, theirs)
        ends = [set(np.cumsum([len(p) for p in side]).tolist()) for side in (mine, theirs)]
        assert len(found) == len(ends[0] & ends[1])
        assert found[0, 0] == found[0, 2] == 0 and (found[-1, 1], found[-1, 3]) == (len(mine), len(theirs))
        assert (found[1:, [0, 2]] == found[:-1, [1, 3]]).all()
        for a, b, c, d in found:
            assert b"".join(mine[a:b]) == b"".join(theirs[c:d])


def at(*rows):
    return [list(row) for row in rows]


@pytest.mark.parametrize(
    "mine, theirs, expected",
    [
        # a character in two pieces and in three
        ([b"\xf0\x9f", b"\x99\x82", b"!"], [b"\xf0", b"\x9f\x99", b"\x82", b"!"], at((0, 2, 0, 3), (2, 3, 3, 4))),
        # lower case: the word that changes is one span, what follows is not
        ([b"Hel", b"lo", b" you", END], [b"h", b"ello", b" you", END], at((0, 2, 0, 2), (2, 3, 2, 3), (3, 4, 3, 4))),
        # a leading space that a template strips, a space that it adds
        ([b" yes", b" no", END], [b"yes", b" no", END], at((0, 1, 0, 1), (1, 2, 1, 2), (2, 3, 2, 3))),
        ([b"yes", END], [b" ", b"yes", END], at((0, 1, 0, 2), (1, 2, 2, 3))),
        # a token that says nothing that can be written
        (
            [b"a ", b"x", b" b", END],
            [b"a ", UNKNOWN, b" b", END],
            at((0, 1, 0, 1), (1, 2, 1, 2), (2, 3, 2, 3), (3, 4, 3, 4)),
        ),
        # an empty answer
        ([END], [END], at((0, 1, 0, 1))),
        # control tokens before the end go with it
        ([b"a", b"", END], [b"a", END], at((0, 1, 0, 1), (1, 3, 1, 2))),
        # a cut answer whose last character is not whole: what nobody reads is in no span
        ([b"ab", b"\xe2"], [b"a", b"b"], at((0, 1, 0, 2))),
        ([b"ab"], [b"a", b"b", END], at((0, 1, 0, 2))),
        ([], [END], []),
        ([b"\xe2"], [], []),
    ],
)
def test_spans_of_texts_that_differ(mine, theirs, expected):
    assert spans(mine, theirs).tolist() == expected
    assert spans(theirs, mine).tolist() == [[c, d, a, b] for a, b, c, d in expected]


SAID = [
    "naïve café — 東京 🙂!",
    " two  spaces\n\n\tand a tab",
    "",
    "x",
    "<end> is said, and </s><|im_end|>",
    "1234 + 5678 = 6912",
]


@pytest.mark.parametrize("form, added", (("bytes", False), ("spaces", False), ("spaces", True)))
def test_pieces_are_the_text(form, added):
    """Whatever is said, also what looks like a control token: the bytes of an answer's tokens are its UTF-8. Runs of
    spaces may be tokens that were added (Gemma)."""
    tokenizer = other_tokenizer(form)
    if added:
        tokenizer.add_tokens([AddedToken("\u2581\u2581", normalized=True, special=False)])
    renderer = Renderer(tokenizer)
    pieces = Pieces(renderer, "teacher")
    assert pieces.form == form
    if added:
        ids = renderer.answered_ids([{"role": "user", "content": "q"}], SAID[1], True)[1]
        assert tokenizer.convert_tokens_to_ids("\u2581\u2581") in ids
    for text in SAID:
        for ended in (True, False):
            prompt, ids = renderer.answered_ids([{"role": "user", "content": "q"}], text, ended)
            assert prompt == renderer.prompt_ids([{"role": "user", "content": "q"}])
            assert b"".join(pieces.of(ids)) == text.encode() + END * ended
            assert pieces.text(ids) == (text, ended)
            # as the whole conversation has it
            row = renderer.conversation(
                [{"role": "user", "content": "q"}, {"role": "assistant", "content": text}], ended=ended
            )
            assert [*prompt, *ids] == row.ids


def test_a_cut_answer_is_read_up_to_its_last_whole_character():
    renderer = Renderer(other_tokenizer("bytes", vocab_size=259))  # bytes alone
    pieces = Pieces(renderer, "student")
    _, ids = renderer.answered_ids([{"role": "user", "content": "q"}], "ab東", False)
    assert len(ids) == 5
    assert [pieces.text(ids[:n])[0] for n in range(6)] == ["", "a", "ab", "ab", "ab", "ab東"]
    assert pieces.text([*ids[:3], renderer.turn_end_id]) == ("ab\ufffd", True)
    assert pieces.text([*ids[1:3], ids[0]]) == ("b\ufffda", False)


@pytest.mark.parametrize("forms", (("bytes", "spaces"), ("spaces", "bytes"), ("bytes", "bytes"), ("spaces", "spaces")))
def test_entries_that_two_vocabularies_share_say_the_same(forms):
    student, teacher = (
        Pieces(Renderer(other_tokenizer(form, specials=("<begin>", stop, "<pad>"), template=TURN, vocab_size=size)), "")
        for form, stop, size in zip(forms, ("<end>", "<stop>"), (300, 340))
    )
    pairs = shared_vocabulary(student, teacher)
    assert len(set(pairs[:, 0])) == len(set(pairs[:, 1])) == len(pairs) and (np.diff(pairs[:, 1]) > 0).all()
    assert [student.end, teacher.end] in pairs.tolist(), "they end a turn, under different names"
    names = [{i: name for name, i in pieces.vocabulary.items()} for pieces in (student, teacher)]
    shown = {names[0][i] for i, _ in pairs}
    assert {"<begin>", "<pad>"} <= shown
    for i, j in pairs:
        assert (i in student.special) == (j in teacher.special)
        assert student.bytes[i] == teacher.bytes[j] or i == student.end
    # a token that is not paired has no counterpart
    free = {teacher.bytes[j] for j in set(teacher.bytes) - set(pairs[:, 1].tolist()) if j not in teacher.special}
    alone = {student.bytes[i] for i in set(student.bytes) - set(pairs[:, 0].tolist()) if i not in student.special}
    if forms[0] != forms[1]:
        assert not free & alone - {UNKNOWN}
    assert len(shared_vocabulary(student, student)) == len(student.vocabulary)


TURN = (
    "{{ bos_token }}{% for m in messages %}{{ m['role'] + ': ' + m['content'] + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


def test_turns_are_aligned_one_by_one():
    mine, theirs = (
        Renderer(other_tokenizer(form, vocab_size=size)) for form, size in (("bytes", 270), ("spaces", 330))
    )
    talk = [
        {"role": role, "content": text}
        for role, text in (("user", "say 12"), ("assistant", "the answer"), ("user", "more"), ("assistant", "東京 yes"))
    ]
    rows, pieces = [r.conversation(talk) for r in (mine, theirs)], [Pieces(r, "") for r in (mine, theirs)]
    found = spans_of_turns(*((row.ids, row.mask) for row in rows), *pieces)
    said = [[i for i, m in zip(row.ids, row.mask) if m] for row in rows]
    texts = []
    for a, b, c, d in found:
        one = [b"".join(p.bytes[i] for i in ids[x:y]) for p, ids, x, y in zip(pieces, said, (a, c), (b, d))]
        assert one[0] == one[1]
        texts.append(one[0])
    assert b"".join(texts) == "the answer<end>東京 yes<end>".encode() and texts.count(b"<end>") == 2
    assert spans_of_turns((rows[0].ids, rows[0].mask), (rows[1].ids, [0] * len(rows[1].ids)), *pieces) is None


@pytest.mark.parametrize("family", FAMILIES)
def test_an_answer_of_every_family_is_its_text_and_an_end(family):
    renderer = renderer_of(family)
    pieces, said = Pieces(renderer, "teacher"), "Hello  the same 123 naïve 🙂"
    row = renderer.conversation([{"role": "user", "content": "hi </s>"}, {"role": "assistant", "content": said}])
    ((first, end),) = runs(row.mask)
    shown = b"".join(pieces.of(row.ids[first:end]))
    assert said.encode() in shown and shown.endswith(END) and shown.count(END) == 1
    asked = [{"role": "user", "content": "hi"}]
    for text in (said, " " + said, ""):
        for ended in (True, False):
            _, ids = renderer.answered_ids(asked, text, ended)
            if ids == renderer.answered_ids(asked, text.lstrip(), ended)[1]:  # a control token that swallows spaces
                text = text.lstrip()
            assert text_of(renderer, pieces, asked, ids) == (text, ended)


def test_borders_in_a_text_that_is_read_otherwise():
    """Another case (of as many bytes, or not), composed and decomposed characters: whatever is said between two borders
    is the same but for that.
    """
    import unicodedata

    rng, words = np.random.default_rng(1), "Hello WORLD the Straße İstanbul ﬁne naïve café 東京 12".split()
    for change in (str.lower, str.casefold, lambda text: unicodedata.normalize("NFKC", text)):
        for _ in range(30):
            text = " ".join(rng.choice(words, 12))
            mine, theirs = parted(text.encode(), rng), parted(change(text).encode(), rng)
            found = spans(mine, theirs)
            assert (found[-1, 1], found[-1, 3]) == (len(mine), len(theirs)) and found[0, 0] == found[0, 2] == 0
            x = y = 0
            for a, b, c, d in found:
                x, y = x + sum(map(len, mine[a:b])), y + sum(map(len, theirs[c:d]))
                cut = text.encode()[:x].decode(errors="ignore")
                assert change(cut).encode()[: max(0, y - 6)] == change(text).encode()[: max(0, y - 6)]
                assert abs(len(change(cut).encode()) - y) < 6
    long = " ".join(rng.choice(words, 3000))
    assert len(spans([bytes([b]) for b in long.encode()], [bytes([b]) for b in long.casefold().encode()])) > 15000


def test_a_tokenizer_of_another_form_is_refused_with_the_way_out():
    tokenizer = other_tokenizer("words")
    assert form_of(tokenizer) is None
    with pytest.raises(ConfigError, match="teacher's tokenizer are neither.*write objective=divergence.*sft"):
        Pieces(Renderer(tokenizer), "teacher")
