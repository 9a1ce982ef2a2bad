"""Two tokenisations of one text side by side: which tokens of a student say what which tokens of a teacher say.

A token is the bytes that it stands for (:class:`Pieces`), so pieces of a character count too. Where both tokenisations
have a border at the same place of the text, one span ends and the next begins (:func:`spans`); in between, tokens are
merged. Texts that are not the same, since a tokenizer or a template normalises what it reads (case, white space,
compatibility characters), are first aligned byte by byte, and only places where they agree can be borders. Used by
``distill objective=uld`` and ``gold``.

Legend: G spans, M entries that two vocabularies share.
"""

from __future__ import annotations

import codecs
import functools
import json
import re
from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher

import numpy as np

from stages.spec import ConfigError

#: Bytes that no UTF-8 text has: the token that ends a turn, and one that says nothing that can be written.
END, UNKNOWN = b"\xfe", b"\xff"
#: Pairs of bytes of two stretches that differ, up to which they are compared.
COMPARED = 1 << 20


@functools.cache
def _byte_of() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary stands for (GPT-2, Radford et al. 2019): printable ones
    themselves, the others in their order from 256 on.
    """
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + n): byte for n, byte in enumerate(others)}


def form_of(tokenizer) -> str | None:
    """How a tokenizer writes text into its tokens: ``bytes`` (GPT-2, Llama 3, Qwen), ``spaces`` (SentencePiece: a mark
    for each space, <0xE2> for a byte), None where it is neither.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    decoder = getattr(backend, "decoder", None)
    said = json.loads(decoder.__getstate__()) if decoder is not None else None
    shown = json.dumps(said, ensure_ascii=False)
    if "ByteLevel" in shown:
        return "bytes"
    spaced = "Metaspace" in shown or "\u2581" in shown
    return "spaces" if spaced or backend is None and any("\u2581" in token for token in tokenizer.get_vocab()) else None


class Pieces:
    """What each token of a renderer's tokenizer says, in bytes.

    Args:
        whose: the model's name in the error.

    Raises:
        ConfigError: the tokenizer writes text in a form that is not known here.
    """

    def __init__(self, renderer, whose: str):
        tokenizer = renderer.tokenizer
        self.form, self.stop_ids = form_of(tokenizer), renderer.stop_ids
        if self.form is None:
            raise ConfigError(
                f"distill: the tokens of the {whose}'s tokenizer are neither bytes (as of GPT-2, Llama 3, Qwen) nor"
                " SentencePiece's, so what each of them says is not known; write objective=divergence with a teacher"
                " that shares the tokenizer, or sample the teacher's answers with the rejection stage and fine-tune on"
                " them with sft"
            )
        self.vocabulary: dict[str, int] = tokenizer.get_vocab()
        added = tokenizer.added_tokens_decoder
        self.special = {i for i, token in added.items() if token.special} | set(tokenizer.all_special_ids)
        #: The token that the chat template ends a turn with.
        self.end = tokenizer.eos_token_id if renderer.turn_end_id is None else renderer.turn_end_id
        unknown = getattr(tokenizer, "unk_token_id", None)
        # pieces of SentencePiece that its user defined (Gemma's runs of spaces) are added tokens with its marks
        plain = self.special if self.form != "bytes" else added
        self.bytes: dict[int, bytes] = {
            i: UNKNOWN if i == unknown and i != self.end else token.encode() if i in plain else self._bytes(token)
            for token, i in self.vocabulary.items()
        }

    def _bytes(self, token: str) -> bytes:
        if self.form == "bytes":
            table = _byte_of()
            return bytes(table[c] for c in token) if all(c in table for c in token) else token.encode()
        if byte := re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", token):
            return bytes.fromhex(byte[1])
        return token.replace("\u2581", " ").encode()

    def of(self, ids: Sequence[int]) -> list[bytes]:
        """What each token of an answer says; :data:`END` for the token that ends it, nothing for the control tokens
        right before that one.
        """
        found = [self.bytes.get(int(i), UNKNOWN) for i in ids]
        if len(ids) and int(ids[-1]) in self.stop_ids:
            found[-1] = END
            for n in range(len(ids) - 2, -1, -1):
                if int(ids[n]) not in self.special:
                    break
                found[n] = b""
        return found

    def text(self, ids: Sequence[int]) -> tuple[str, bool]:
        """(what an answer says, whether it ended). Bytes that are no UTF-8 are U+FFFD; the first bytes of a character
        that a cut answer does not finish are left out.
        """
        pieces = self.of(ids)
        ended = pieces[-1:] == [END]
        said = b"".join(pieces[:-1] if ended else pieces)
        return codecs.getincrementaldecoder("utf-8")("replace").decode(said, ended), ended


def text_of(renderer, pieces: Pieces, asked, ids: Sequence[int]) -> tuple[str, bool]:
    """:meth:`Pieces.text` of an answer to the messages ``asked``, without the space that some tokenizers write behind a
    control token of their own accord (Phi 3, Llama 2).
    """
    text, ended = pieces.text(ids)
    if text.startswith(" ") and pieces.text(renderer.answered_ids(asked, text[1:], ended)[1])[0] == text:
        return text[1:], ended
    return text, ended


def spans(mine: Sequence[bytes], theirs: Sequence[bytes]) -> np.ndarray:
    """Spans ``[G, 4]`` of two tokenisations: first token and the one behind the last of ``mine``, and of ``theirs``.

    Every span has a token of each; they follow each other, and what one side alone says at the end is in none.
    """
    text, other = b"".join(mine), b"".join(theirs)
    ends, other_ends = _ends(mine), _ends(theirs)
    found, i, j = [], 0, 0
    for x, y in _borders(text, other, ends):
        if y in other_ends and ends[x] > i and other_ends[y] > j:
            found.append((i, ends[x], j, other_ends[y]))
            i, j = ends[x], other_ends[y]
    if len(mine) > i and len(theirs) > j:
        found.append((i, len(mine), j, len(theirs)))
    return np.array(found, np.int64).reshape(-1, 4)


def _ends(pieces: Sequence[bytes]) -> dict[int, int]:
    """{offset behind a token: how many tokens stand before it}; tokens that say nothing belong to the next."""
    found, at = {}, 0
    for n, piece in enumerate(pieces):
        at += len(piece)
        if piece:
            found[at] = n + 1
    return found


def _borders(text: bytes, other: bytes, ends: dict[int, int]) -> Iterator[tuple[int, int]]:
    """(offset in ``text``, offset in ``other``) of the places that can be borders, in order: ends of tokens of ``text``
    where both texts agree.
    """
    if text == other:
        yield from ((x, x) for x in ends)
        return
    before = _common(text, other)
    after = min(_common(text[::-1], other[::-1]), len(text) - before, len(other) - before)
    middle = _agreeing(text[before : len(text) - after], other[before : len(other) - after])
    # first those that stand behind text that agrees, then those before it
    blocks = [(0, 0, before), *((i + before, j + before, n) for i, j, n in middle)]
    blocks.append((len(text) - after, len(other) - after, after))
    at = 0
    for x in ends:
        while at + 1 < len(blocks) and blocks[at][0] + blocks[at][2] < x:
            at += 1
        for i, j, n in blocks[at : at + 3]:
            if n and i <= x <= i + n:
                yield x, j + x - i


def _agreeing(text: bytes, other: bytes) -> list[tuple[int, int, int]]:
    """(place in ``text``, place in ``other``, length) of what two texts have in common, in order: byte by byte where
    they are as long and mostly the same (another case), else by words, and by bytes within those that differ.
    """
    if len(text) == len(other):
        same = np.frombuffer(text, np.uint8) == np.frombuffer(other, np.uint8)
        if 2 * same.sum() >= len(text):
            return [(a, a, b - a) for a, b in runs(same)]
    words = [re.findall(rb"\s*\S+|\s+", part) for part in (text, other)]
    starts = [np.cumsum([0, *map(len, part)]).tolist() for part in words]
    found = []
    for kind, a, b, c, d in SequenceMatcher(None, *words, False).get_opcodes():
        (i, end), (j, other_end) = (starts[0][a], starts[0][b]), (starts[1][c], starts[1][d])
        if kind == "equal":
            found.append((i, j, end - i))
        elif kind == "replace" and (end - i) * (other_end - j) <= COMPARED:
            blocks = SequenceMatcher(None, text[i:end], other[j:other_end], False).get_matching_blocks()
            found += [(i + x, j + y, n) for x, y, n in blocks if n]
    return found


def _common(text: bytes, other: bytes) -> int:
    """Length of the common beginning."""
    most = min(len(text), len(other))
    if text[:most] == other[:most]:
        return most
    differ = np.frombuffer(text[:most], np.uint8) != np.frombuffer(other[:most], np.uint8)
    return int(differ.argmax())


def runs(mask: Sequence[int]) -> list[tuple[int, int]]:
    """(first, behind the last) of every run of ones."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], np.asarray(mask, np.int8), [0]])))
    return [(int(a), int(b)) for a, b in edges.reshape(-1, 2)]


def spans_of_turns(mine, their_ids, my_pieces: Pieces, their_pieces: Pieces) -> np.ndarray | None:
    """Spans ``[G, 4]`` between the targets of two renderings (ids and mask each) of one conversation, turn by turn;
    places are counted among targets. None where they do not have the same turns.
    """
    parts = [runs(mine[1]), runs(their_ids[1])]
    if len(parts[0]) != len(parts[1]):
        return None
    found, i, j = [], 0, 0
    for (a, b), (c, d) in zip(*parts):
        found.append(
            spans(my_pieces.of(mine[0][a:b]), their_pieces.of(their_ids[0][c:d])) + np.array([i, i, j, j], np.int64)
        )
        i, j = i + b - a, j + d - c
    return np.concatenate(found) if found else np.zeros((0, 4), np.int64)


def shared_vocabulary(student: Pieces, teacher: Pieces) -> np.ndarray:
    """Entries ``[M, 2]`` that both vocabularies have (the student's id, the teacher's), in the order of the teacher's
    ids: the tokens that end a turn, control tokens of one name, tokens of one name where both are written in one form,
    and those that stand for the same bytes. An entry is in one pair at most.
    """
    mine, theirs = {student.end: teacher.end}, {teacher.end}

    def pair(found: dict, known: dict) -> None:
        for key, i in found.items():
            j = known.get(key)
            if j is not None and i not in mine and j not in theirs:
                mine[i] = j
                theirs.add(j)

    def named(pieces: Pieces, special: bool) -> dict[str, int]:
        return {name: i for name, i in pieces.vocabulary.items() if (i in pieces.special) == special}

    def said(pieces: Pieces) -> dict[bytes, int]:
        found: dict[bytes, int] = {}
        raw = _raw(pieces)
        for i in sorted(named(pieces, False).values(), key=lambda i: (i in raw, i)):
            if pieces.bytes[i] not in (UNKNOWN, b""):
                found.setdefault(pieces.bytes[i], i)
        return found

    pair(named(student, True), named(teacher, True))
    if student.form == teacher.form:
        pair(named(student, False), named(teacher, False))
    pair(said(student), said(teacher))
    return np.array(sorted(mine.items(), key=lambda both: both[1]), np.int64).reshape(-1, 2)


def _raw(pieces: Pieces) -> set[int]:
    """SentencePiece's tokens of single bytes, which are no words where a token of the same byte is one."""
    if pieces.form != "spaces":
        return set()
    return {i for name, i in pieces.vocabulary.items() if re.fullmatch(r"<0x[0-9A-Fa-f]{2}>", name)}
