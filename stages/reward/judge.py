"""A language model asked for its opinion: generative judges as rewards (``rm.judge``, ``synth.d_rlaif``).

``score``        the expectation over the score words 1..10, rescaled to [-1, 1]: one forward pass, no sampling (d-RLAIF)
``reference``    the same, with the reference answer shown
``preference``   the probability of the letters A and B, both orders averaged: mean win probability among the answers of a prompt
``additive``     points for each of five criteria that build on one another, at the end of a written review: the mean of several reviews, 0 to 5 (self-rewarding, ``synth.self_reward``)
``verdict``      a short explanation ending in [[A]], [[B]] or [[C]], in both orders, temperature 0

The judge is a local causal LM, or any server with the OpenAI chat interface. What cannot be parsed is unscorable after
the retries, never guessed, never a tie.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from stages.measures.preference import OUTCOME
from stages.reward_models.reward_scorers import ComparingScorer, LabelScorer, Response, label_probability, same_prompt
from stages.running import journal, remembered, usage
from stages.running.http_json import ServerError
from stages.running.servers import ChatServer, Served, finish_of, said, withheld
from stages.verification.responses import view

MODES = ("score", "reference", "additive", "preference", "verdict")
SCORES = tuple(str(i) for i in range(1, 11))
IMPARTIAL = (
    "Act as an impartial judge. Consider helpfulness, relevance, accuracy, depth, creativity and level of detail. The"
    " order in which answers are shown, their length and their authors' names must not influence you."
)
QUESTION = IMPARTIAL + "\n\n[Question]\n{context}\n[End of question]"
ONE = "\n\n[Answer]\n{a}\n[End of answer]"
TWO = "\n\n[Answer A]\n{a}\n[End of answer A]\n\n[Answer B]\n{b}\n[End of answer B]"
PROMPTS = {
    "score": QUESTION + ONE + "\n\nRate the answer with one whole number from 1 to 10. Rating:",
    "reference": (
        QUESTION
        + "\n\n[Reference answer]\n{reference}\n[End of reference answer]"
        + ONE
        + "\n\nRate how well the answer agrees with the reference answer, with one whole number from 1 to 10. Rating:"
    ),
    # criteria and closing of Yuan et al. 2024 ("Self-Rewarding Language Models", figure 2), the parts marked as above
    "additive": (
        "Review the user's question and the corresponding response using the additive 5-point scoring system described"
        " below. Points are accumulated based on the satisfaction of each criterion:\n\n"
        "- Add 1 point if the response is relevant and provides some information related to the user's inquiry, even if"
        " it is incomplete or contains some irrelevant content.\n"
        "- Add another point if the response addresses a substantial portion of the user's question, but does not"
        " completely resolve the query or provide a direct answer.\n"
        "- Award a third point if the response answers the basic elements of the user's question in a useful way,"
        " regardless of whether it seems to have been written by an AI Assistant or if it has elements typically found"
        " in blogs or search results.\n"
        "- Grant a fourth point if the response is clearly written from an AI Assistant's perspective, addressing the"
        " user's question directly and comprehensively, and is well-organized and helpful, even if there is slight room"
        " for improvement in clarity, conciseness or focus.\n"
        "- Bestow a fifth point for a response that is impeccably tailored to the user's question by an AI Assistant,"
        " without extraneous information, reflecting expert knowledge, and demonstrating a high-quality, engaging, and"
        " insightful answer.\n\n[Question]\n{context}\n[End of question]"
        + ONE
        + "\n\nAfter examining the user's question and the response:\n\n- Briefly justify your total score, up to 100"
        ' words.\n- Conclude with the score using the format: "Score: <total points>"'
    ),
    "preference": QUESTION + TWO + "\n\nWhich answer is better? Reply with the letter A or B only.",
    "verdict": (
        QUESTION + TWO + "\n\nCompare the two answers in a short explanation, then give your verdict "
        "strictly as [[A]] if A is better, [[B]] if B is better, or [[C]] for a tie."
    ),
}
_GAP = r"[\s\u200b-\u200d\u2060\ufeff]"  # white space, seen or not
_MARK = re.compile(
    rf"\[{_GAP}*((?:end{_GAP}+of{_GAP}+)?(?:specification|question|reasoning|critique|(?:reference{_GAP}+)?answer(?:{_GAP}+(?:[a-z]|\d+))?)){_GAP}*\]",
    re.IGNORECASE,
)
_VERDICT = re.compile(r"\[\[([ABC])\]\]")
_POINTS = re.compile(r"\bscore\W{0,4}:[^\w-]{0,4}(\d+(?:\.\d+)?)", re.IGNORECASE)
_FIVE_WAY = re.compile(r"\[\[(A>>B|A>B|A=B|B>A|B>>A)\]\]")


class JudgeError(RuntimeError):
    """The judge cannot be asked; the text says what to change."""


# -- reading what a judge says -----------------------------------------------------------------------------------------


def spoken(text: str) -> str:
    """What a judge says behind its thought: what it weighs in there, or in a thought that is cut, is no verdict."""
    return view(text, "answer_only")


def parse_verdict(text: str) -> str | None:
    """ "A", "B" or "tie" when the text holds exactly one distinct marker, else None (``rm.judge``)."""
    found = set(_VERDICT.findall(spoken(text)))
    return {"A": "A", "B": "B", "C": "tie"}[found.pop()] if len(found) == 1 else None


def parse_five_way(text: str) -> str | None:
    """One of A>>B, A>B, A=B, B>A, B>>A when the text holds exactly one distinct marker, else None
    (``eval.arena_hard``).
    """
    found = set(_FIVE_WAY.findall(spoken(text)))
    return found.pop() if len(found) == 1 else None


def quoted(text: str) -> str:
    """Text that is shown to a judge: a mark of a request in it, such as ``[Answer B]``, ``[End of answer 2]`` or
    ``[Reasoning]``, however it is spaced, gets round brackets, so that none can open or close a part."""
    return _MARK.sub(r"(\1)", text)


def parse_rating(text: str, low: float = 1.0, high: float = 10.0) -> float | None:
    """The number in [[..]], else in [..]; None when there is none in the range, or two different ones
    (``synth.judge``).
    """
    for pattern in (r"\[\[(-?\d+(?:\.\d+)?)\]\]", r"\[(-?\d+(?:\.\d+)?)\]"):
        found = set(map(float, re.findall(pattern, spoken(text))))
        if found:
            return found.pop() if len(found) == 1 and low <= min(found) <= high else None
    return None


def parse_points(text: str) -> float | None:
    """The points of an additive review, ``Score: 4`` (also ``4/5``); None when there are none from 0 to 5, or two
    different ones (``synth.self_reward``)."""
    found = set(map(float, _POINTS.findall(spoken(text))))
    return found.pop() if len(found) == 1 and max(found) <= 5 else None


def two_orders(first: str | None, second: str | None) -> float | None:
    """Score of the response shown first in ``first``; ``second`` shows it second. The mean of both orders; None when
    one is unparsed.
    """
    if first is None or second is None:
        return None
    return (OUTCOME[first] + 1.0 - OUTCOME[second]) / 2


def expected_score(logps: Sequence[float]) -> tuple[float, float]:
    """(E[s], the same rescaled to [-1, 1]) over the words 1..10, probabilities renormalised over them (``rm.judge``,
    d-RLAIF).
    """
    z = np.asarray(logps, float)
    p = np.exp(z - z.max())
    e = float((p / p.sum()) @ np.arange(1, len(p) + 1))
    return e, 2 * (e - 1) / (len(p) - 1) - 1


def without_longer(logps, words: Sequence[Sequence]) -> np.ndarray:
    """Log-probabilities ``[texts, words]`` that the answer is each word, from those that it begins with the word's
    tokens: what begins a longer word ("1" of "10", for a tokenizer that splits numbers into digits) is not counted for
    the shorter one too."""
    p, out = np.exp(np.asarray(logps, float)), np.array(logps, float)
    for i, word in enumerate(words):
        longer = [
            j for j, other in enumerate(words) if len(other) > len(word) and list(other[: len(word)]) == list(word)
        ]
        if longer:
            with np.errstate(divide="ignore"):
                out[:, i] = np.log(np.maximum(p[:, i] - p[:, longer].sum(1), 0.0))
    return out


def soft_label(logp_a: float, logp_b: float, clamp: tuple[float, float] | None = None) -> float:
    """P(A) from the log-probs of the two letters, nothing else; ``clamp`` is Constitutional AI's with chain of thought
    (``rm.soft_label``). Raises ValueError where they say nothing: one is NaN, or both are -inf."""
    if math.isnan(logp_b - logp_a):
        raise ValueError(
            f"log-probabilities {logp_a} and {logp_b} give no probability of A; leave the request out as unscorable"
        )
    p = 1.0 / (1.0 + math.exp(min(700.0, logp_b - logp_a)))
    return p if clamp is None else min(max(p, clamp[0]), clamp[1])


# -- who is asked ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reply:
    """What a judge said to one request: a text, and whether it was cut for its length, or the log-probability of each
    word that it could answer with; tokens read and written; or why there is neither.
    """

    text: str = ""
    logps: tuple[float, ...] = ()
    tokens_in: int = 0
    tokens_out: int = 0
    error: str | None = None
    cut: bool = False

    def verdict(self, parse) -> str | None:
        """What ``parse`` reads in the text. In one that was cut a verdict counts only where it stands first: what is
        said of it in an explanation that goes on is not yet one.
        """
        return None if self.cut and not spoken(self.text).lstrip().startswith("[[") else parse(self.text)


TOO_LONG = "the request is longer than the judge can read"


class LocalJudge(LabelScorer):
    """A causal LM in this process. A request that exceeds its positions gets no answer: cutting it would change the
    question.
    """

    def load(self) -> None:
        from transformers import AutoConfig

        from stages.models.modeling import ModelError

        made = AutoConfig.from_pretrained(self.path).architectures or []
        if made and not any(name.endswith(("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")) for name in made):
            # transformers would load it with a random head over the vocabulary
            raise ModelError(
                f"{self.path} is a {made[0]}, which writes nothing, so it cannot judge; give a language model"
                " (judge=MODEL_REF), or an endpoint."
            )
        super().load()
        self._sampler = None

    def word_table(self, texts: Sequence[str], words: Sequence[str]) -> np.ndarray:
        """Log-probability of every word as the answer to every request ``[texts, words]``; more may follow, but no
        other of the words.
        """
        ids = [self.reader.instruction(t) for t in texts]
        table = np.full((len(texts), len(words)), math.nan)
        fits = [i for i, row in enumerate(ids) if len(row) + 8 <= self.reader.room]
        usage.count(local_judge_calls=len(fits))
        if fits:
            table[fits] = without_longer(
                self.word_logps([ids[i] for i in fits], words), [self.reader.plain(word) for word in words]
            )
        return table

    def chosen(self, texts: Sequence[str], words: Sequence[str]) -> list[Reply]:
        """As :meth:`word_table`, with what it cost."""
        return [
            (
                Reply(logps=tuple(row), tokens_in=len(self.reader.instruction(text)))
                if np.isfinite(row).any() and not np.isnan(row).any()
                else Reply(error=TOO_LONG)
            )
            for text, row in zip(texts, self.word_table(texts, words).tolist())
        ]

    def answers(self, texts: Sequence[str], max_tokens: int, attempt: int) -> list[str]:
        """One answer per request, of ``max_tokens`` or what there are positions for: greedy at attempt 0, temperature
        0.7 in later ones.
        """
        return [reply.text for reply in self.replies(texts, max_tokens, attempt)]

    def replies(self, texts: Sequence[str], max_tokens: int, attempt: int = 0) -> list[Reply]:
        """As :meth:`answers`, with what they cost."""
        from stages.decoding.sampler import Sampler
        from stages.decoding.sampling import SamplingParams
        from stages.generation import sample_with_room

        self._sampler = self._sampler or Sampler(self.model, self.reader.tokenizer)
        params = SamplingParams(
            temperature=0.7 if attempt else 0.0,
            max_new_tokens=max_tokens,
            stop_ids=frozenset(self.reader.renderer.stop_ids),
        )
        ids = [self.reader.instruction(t) for t in texts]
        rooms = [min(max_tokens, self.reader.room - len(row)) for row in ids]
        fits = [i for i, room in enumerate(rooms) if room >= min(max_tokens, SHORTEST_ANSWER)]
        usage.count(local_judge_calls=len(fits))
        said = [Reply(error=TOO_LONG)] * len(texts)
        for i, group in zip(
            fits,
            (
                sample_with_room(
                    self._sampler, [ids[i] for i in fits], params, [[attempt] for _ in fits], [rooms[i] for i in fits]
                )
                if fits
                else []
            ),
        ):
            said[i] = Reply(
                group[0].text,
                tokens_in=len(ids[i]),
                tokens_out=len(group[0].ids),
                cut=group[0].finish_reason == "length",
            )
        return said


class ServerJudge:
    """The model of a server with the OpenAI chat interface (:class:`stages.running.servers.ChatServer`, with its
    arguments).

    A request that the server refuses has no answer; JudgeError is raised where it answers nobody: it is away,
    overloaded for long, or does not know the key or the model (``stages.running.servers.RULES``).
    """

    def __init__(
        self, endpoint: str, model: str, key_variable: str = "", timeout_s: float = 60.0, concurrency: int = 8
    ):
        self.server = ChatServer(endpoint, model, key_variable, timeout_s, concurrency)
        self.served = Served(
            f"the judge at {endpoint}",
            "answers",
            JudgeError,
            timeout_s,
            instead=", or use a local model (--input judge=MODEL)",
        )
        self.one_token: dict[str, bool] = remembered.table(f"one token {model}")
        self.refusal = ""  # why the last request that it refused was refused
        self.served.probe = lambda: self._asked("Say yes.", max_tokens=1, temperature=0)

    def _ask(self, text: str, **more) -> dict:
        """The choice that answers a request. Raises ServerError where it has none, JudgeError where none has."""
        try:
            asked: list[dict] = []

            def ask() -> dict:
                asked.append(self._asked(text, **more))
                return asked[-1]

            choice = journal.once(
                self.server.endpoint,
                ["chat", self.server.model, text, more],
                ask,
                self.served,
                text,
                # a server that should say how likely tokens are may be started again so that it does
                lambda choice: (
                    choice if not more.get("logprobs") or choice.get("logprobs") or withheld(choice) else None
                ),
            )
            if not asked:
                self._count(choice)  # paid for by an earlier start
            return choice
        except ServerError as error:
            self.refusal = str(error)
            if more.get("logprobs") and error.status in (400, 422) and "logprob" in str(error):
                raise self._without_logprobs() from error
            raise

    def _asked(self, text: str, **more) -> dict:
        choice = self.server.ask([{"role": "user", "content": text}], **more)
        self._count(choice)
        return choice

    def _count(self, choice: dict) -> None:
        usage.count(
            judge_calls=1,
            judge_tokens_in=choice["usage"].get("prompt_tokens") or 0,
            judge_tokens_out=choice["usage"].get("completion_tokens") or 0,
        )

    def _likely(self, text: str, tokens: int, choice: dict | None = None) -> tuple[list[dict], str, bool]:
        """({token: log-probability} of the 20 most likely tokens at each position of an answer, the first token
        written, whether the answer ended by itself).
        """
        choice = choice or self._ask(text, max_tokens=tokens, temperature=0, logprobs=True, top_logprobs=20)
        try:
            content = (choice.get("logprobs") or {}).get("content") or []
            likely = [
                {one["token"]: float(one["logprob"]) for one in position.get("top_logprobs") or []}
                for position in content
            ]
            first = content[0]["token"].strip() if content else ""
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise self._without_logprobs() from error
        # this request's answer was withheld, which says nothing about the server
        if not content and (why := withheld(choice)):
            raise self._refusal(why)
        if not content:
            raise self._without_logprobs()
        return likely, first, finish_of(choice) == "stop"

    def _without_logprobs(self) -> JudgeError:
        return JudgeError(
            f"The judge at {self.server.endpoint} gives no token probabilities; write mode=verdict (of a reward"
            " component judge_mode=verdict), which reads its text."
        )

    def has_answered(self, text: str | None) -> None:
        """It answered an earlier start of the stage, this request among others."""
        self.served.has_answered(
            self.served.probe if text is None else lambda: self._asked(text, max_tokens=1, temperature=0)
        )

    def _refusal(self, why: str) -> ServerError:
        self.refusal = why
        return ServerError(why, 200)

    def _one_token(self, word: str) -> bool:
        """Whether the server writes a number as one token; it is asked to write it, once."""
        if word not in self.one_token:
            try:
                likely = self._likely(f"Write the number {word} in digits, and nothing else.", 1)[0]
            except ServerError as error:
                raise self.served.away(error) from error
            self.one_token[word] = any(token.strip() == word for token in likely[0])
        return self.one_token[word]

    def word_table(self, texts, words) -> np.ndarray:
        """As :meth:`LocalJudge.word_table`, from the 20 most likely first tokens; a word outside them has probability
        0.

        Where a server writes a word as several tokens and the first is another word ("1" of "10"), the second token
        tells them apart in answers that begin with it. In others each gets half of its probability, or, where that is
        more than ``UNDECIDED`` of all words, the request has no answer.
        """
        split = [
            (i, j)
            for i, short in enumerate(words)
            for j, long in enumerate(words)
            if i != j and long.startswith(short) and not self._one_token(long)
        ]

        def of(text: str) -> np.ndarray:
            row = np.full(len(words), -math.inf)
            try:
                likely, written, ended = self._likely(text, 2 if split else 1)
            except ServerError:
                return np.full(len(words), math.nan)
            for token, logp in likely[0].items():
                if token.strip() in words:
                    row[words.index(token.strip())] = np.logaddexp(row[words.index(token.strip())], logp)
            p = np.exp(row)
            for i, j in ((i, j) for i, j in split if p[i] and not p[j]):
                rest = words[j][len(words[i]) :]
                longer = 0.5 if p[i] <= UNDECIDED * p.sum() else math.nan
                if written == words[i]:
                    longer = (
                        sum(math.exp(logp) for token, logp in likely[1].items() if token.startswith(rest))
                        if len(likely) > 1
                        else 0.0
                        if ended
                        else math.nan
                    )
                with np.errstate(divide="ignore"):
                    row[[i, j]] = np.log([p[i] * max(1.0 - longer, 0.0), p[i] * min(longer, 1.0)])
            return row

        rows = self.server.each(of, texts, journal.keeps())
        self.served.not_silent(len(rows))
        return np.array(rows).reshape(len(texts), len(words))

    def answers(self, texts, max_tokens: int, attempt: int) -> list[str]:
        """One answer per request, empty where the server refuses it: at temperature 0 at attempt 0, 0.7 in later
        ones.
        """
        return [reply.text for reply in self.replies(texts, max_tokens, attempt)]

    def replies(self, texts, max_tokens: int, attempt: int = 0) -> list[Reply]:
        """As :meth:`answers`, with what they cost."""
        found = self.server.each(lambda text: self.reply(text, max_tokens, attempt), texts, journal.keeps())
        self.served.not_silent(len(found))
        return found

    def reply(self, text: str, max_tokens: int, attempt: int = 0) -> Reply:
        """As :meth:`answers` to one request, with what it cost, or why there is no answer."""

        def read(choice: dict) -> dict:
            if why := withheld(choice):
                raise self._refusal(why)
            return {"text": said(choice), "cut": finish_of(choice) == "length"}

        return self._replied(
            lambda: self._ask(text, max_tokens=max_tokens, temperature=0.7 if attempt else 0.0, seed=attempt), read
        )

    def choice(self, text: str, words: Sequence[str]) -> Reply:
        """As :meth:`reply`, with the log-probability of each of the words, none of which begins another, as the first
        token; -inf beyond the 20 most likely.
        """

        def read(choice: dict) -> dict:
            likely, found = self._likely(text, 1, choice)[0], dict.fromkeys(words, -math.inf)
            for token, logp in likely[0].items():
                if token.strip() in found:
                    found[token.strip()] = float(np.logaddexp(found[token.strip()], logp))
            if not np.isfinite(list(found.values())).any():
                return {
                    "error": (
                        f"none of {', '.join(words)} is among the most likely first tokens"
                        f" ({', '.join(map(repr, list(likely[0])[:5]))} ...)"
                    )
                }
            return {"logps": tuple(found.values())}

        return self._replied(lambda: self._ask(text, max_tokens=1, temperature=0, logprobs=True, top_logprobs=20), read)

    def _replied(self, ask, read) -> Reply:
        try:
            choice = ask()
        except ServerError as error:
            return Reply(error=str(error))
        try:
            found = read(choice)
        except ServerError as error:
            found = {"error": str(error)}
        return Reply(
            **found,
            tokens_in=int(choice["usage"].get("prompt_tokens") or 0),
            tokens_out=int(choice["usage"].get("completion_tokens") or 0),
        )


#: Share of the words' probability that may stay open between 1 and 10: half of it for each moves a score in [-1, 1] by
#: no more than this.
UNDECIDED = 0.01
#: Tokens that a local judge must have positions for behind a request: less holds no explanation, and is not asked.
SHORTEST_ANSWER = 32
#: What an unreadable verdict is asked for again with (``synth.judge``).
AGAIN = (
    "\n\nYour last reply could not be read: it held no verdict, or two different ones. Reply again, and end strictly"
    " with one of [[A]] (A is better), [[B]] (B is better) or [[C]] (a tie)."
)
#: Answers that a judge keeps; the one that was unused for the longest is forgotten first. Enough for what comes again
#: in a run (validation answers, debates without the debaters), and a few MiB.
KEPT_ANSWERS = 20_000


class Judge(ComparingScorer):
    """A judge in one of the ``MODES``, with the interface of a reward model. Answers that were asked for last are kept
    (:attr:`cache`, by digest of the request), up to ``KEPT_ANSWERS``, and checkpoints hold them."""

    @property
    def why_not(self) -> str:
        """Why a response may have no score."""
        return (
            "the judge gave no readable answer, the request is longer than it can read, or a server's first token"
            " cannot tell 1 from 10 (then use a local judge, or judge_mode=preference or verdict)"
            + (f"; the server last refused one: {refusal}" if (refusal := getattr(self.asked, "refusal", "")) else "")
        )

    def __init__(
        self,
        asked,
        mode: str,
        *,
        prompt: str = "",
        max_tokens: int = 2048,
        retries: int = 3,
        samples: int = 3,
        principles: Mapping[str, str] | None = None,
    ):
        if mode not in MODES:
            raise JudgeError(f"judge_mode={mode!r} is unknown; write one of: {', '.join(MODES)}")
        self.asked, self.mode, self.limit, self.retries = asked, mode, max_tokens, retries
        self.samples = samples
        self.prompt, self.principles = prompt or PROMPTS[mode], principles or {}
        self.relative = mode in ("preference", "verdict")
        self.disagreement, self.bias = None, 0.0
        who = asked.server.model if isinstance(asked, ServerJudge) else getattr(asked, "path", None)
        about = [who, mode, self.prompt, max_tokens, retries, samples]
        self.cache: dict[str, object] = remembered.table(f"answers {_key(repr(about))}")
        self.unparsed = 0

    def score(self, responses: Sequence[Response]) -> list[float]:
        """One number per response: NaN where the judge's answer could not be read."""
        if self.mode in ("score", "reference"):
            return [self._rating(row) for row in self._words([self._request(r) for r in responses], SCORES)]
        if self.mode == "additive":
            return self._by_points([self._request(r) for r in responses])
        if self.mode == "preference":
            return super().score(responses)
        return self._by_verdicts(responses)

    def _by_points(self, texts: Sequence[str]) -> list[float]:
        """Mean points of ``samples`` reviews of each request, each sampled at temperature 0.7; an unreadable one is
        sampled again ``retries`` times, then left out; NaN where none could be read."""
        found = self._known(texts)
        wanted = [t for t in dict.fromkeys(texts) if t not in found]
        points: dict[str, list[float]] = {t: [] for t in wanted}
        for sample in range(self.samples):
            open_ = wanted
            for again in range(self.retries + 1):
                if not open_:
                    break
                read = [
                    None if reply.cut else parse_points(reply.text)
                    for reply in self.asked.replies(open_, self.limit, 1 + sample + self.samples * again)
                ]
                for text, value in zip(open_, read):
                    points[text] += [] if value is None else [value]
                open_ = [text for text, value in zip(open_, read) if value is None]
            self.unparsed += len(open_)
        found |= {t: float(np.mean(own)) for t, own in points.items() if own}
        self._keep(found)
        return [found.get(t, math.nan) for t in texts]

    def _by_verdicts(self, responses) -> list[float]:
        """Mean verdict score against the other answers of the prompt; pairs with an unreadable verdict are left out."""
        scores = [math.nan] * len(responses)
        for members in same_prompt(responses):
            index = [(i, j) for k, i in enumerate(members) for j in members[k + 1 :]]
            given: dict[int, list[float]] = {i: [] for i in members}
            for (i, j), value in zip(index, self.verdicts([(responses[i], responses[j]) for i, j in index])):
                if value is not None:
                    given[i].append(value)
                    given[j].append(1.0 - value)
            for i in members:
                scores[i] = 0.5 if len(members) == 1 else float(np.mean(given[i])) if given[i] else math.nan
        return scores

    def verdicts(self, pairs: Sequence[tuple[Response, Response]]) -> list[float | None]:
        """Score of the first response of each pair: both orders, the mean; disagreement is a tie, an unreadable order
        None.
        """
        texts = [self._compare(a, b) for a, b in pairs] + [self._compare(b, a) for a, b in pairs]
        found = self._texts(texts)
        return [two_orders(a, b) for a, b in zip(found[: len(pairs)], found[len(pairs) :])]

    def preferences(self, pairs):
        if self.mode == "verdict":
            return [math.nan if v is None else v for v in self.verdicts(pairs)]
        return super().preferences(pairs)

    def one_order(self, pairs):
        return (
            label_probability(self._words([self._compare(a, b) for a, b in pairs], ("A", "B")), True).tolist()
            if pairs
            else []
        )

    def lengths(self, responses):
        return [len(r.text.split()) for r in responses]

    def _rating(self, logps) -> float:
        return expected_score(logps)[1] if np.isfinite(logps).any() else math.nan

    def _request(self, response: Response) -> str:
        from stages.reward_models.reward_heads import transcript

        reference = (response.row or {}).get("answer")
        if self.mode == "reference" and reference is None:
            raise JudgeError(
                "judge_mode=reference shows the judge each prompt's answer, and a prompt has none; give prompts with an"
                " `answer` column or use score."
            )
        return self.prompt.format(
            context=quoted(transcript(response.prompt)),
            a=quoted(response.text),
            reference=quoted(str(reference)),
            principle=self._principle(response),
        )

    def _compare(self, a: Response, b: Response) -> str:
        from stages.reward_models.reward_heads import transcript

        return self.prompt.format(
            context=quoted(transcript(a.prompt)), a=quoted(a.text), b=quoted(b.text), principle=self._principle(a)
        )

    def _principle(self, response: Response) -> str:
        """Text of the principle that the prompt's category names; empty for a prompt that shows none."""
        category = (response.row or {}).get("category")
        if self.principles and category not in self.principles:
            raise JudgeError(
                f"judge_prompt shows {{principle}}, and a prompt's category is {category!r}; write the id of one into"
                f" the column category: {', '.join(list(self.principles)[:10])}"
            )
        return self.principles.get(category, "")

    def _known(self, texts) -> dict[str, object]:
        """What is kept of these requests."""
        return {t: self.cache[key] for t in dict.fromkeys(texts) if (key := _key(t)) in self.cache}

    def _keep(self, answers: dict[str, object]) -> None:
        for text, answer in answers.items():
            self.cache.pop(_key(text), None)
            self.cache[_key(text)] = answer
        while len(self.cache) > KEPT_ANSWERS:
            del self.cache[next(iter(self.cache))]

    def _words(self, texts, words) -> np.ndarray:
        found = self._known(texts)
        fresh = [t for t in dict.fromkeys(texts) if t not in found]
        if fresh:
            found |= zip(fresh, self.asked.word_table(fresh, list(words)))
        self._keep(found)
        return np.array([found[t] for t in texts]).reshape(len(texts), len(words))

    def _texts(self, texts) -> list[str | None]:
        """Verdict of each request at temperature 0; unreadable answers are asked for again ``retries`` times, with what
        was wrong.
        """
        found = self._known(texts)
        fresh = until_read(
            self.asked,
            [t for t in texts if found.get(t) is None],
            lambda reply: reply.verdict(parse_verdict),
            AGAIN,
            self.retries,
            self.limit,
        )
        found |= {t: verdict for t, (verdict, _) in fresh.items()}
        self._keep(found)
        self.unparsed += sum(found[t] is None for t in texts)
        return [found[t] for t in texts]


def until_read(asked, texts: Sequence[str], read, again: str, retries: int, max_tokens: int) -> dict[str, tuple]:
    """{request: (what ``read`` makes of the :class:`Reply`, its text)} of a local or served judge at temperature 0, equal
    requests asked once. What cannot be read (None) is asked for up to ``retries`` times more, each time with ``again``
    behind the request once more; what got no reply at all is not (a server was asked patiently)."""
    found: dict[str, tuple] = {}
    fresh = list(dict.fromkeys(texts))
    for attempt in range(retries + 1):
        if not fresh:
            break
        replies = asked.replies([text + again * attempt for text in fresh], max_tokens)
        found |= {text: (read(reply), reply.text) for text, reply in zip(fresh, replies)}
        fresh = [text for text, reply in zip(fresh, replies) if found[text][0] is None and reply.error is None]
    return found


def _key(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
