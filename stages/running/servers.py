"""The servers that stages ask (judges, writers, sampling engines, reward models behind a URL): how a request is asked
again, and what becomes of one that got no answer. One table for all of them, :data:`RULES`:

========================================  ===========  ======================================================
what came                                 asked again  then
========================================  ===========  ======================================================
400, 413, 422, 451; 200 with an `error`   no (200:     costs the row
                                          yes)
403                                       no           in doubt
no whole answer in time, 408, 504         yes          in doubt
a broken answer: reset, cut, no JSON,     yes          in doubt
another form than was asked for
500 and other 5xx                         yes          in doubt
401 (no key too), 402, 404, 405, 407,     no           ends the stage
410, 3xx (no redirect is followed)
nobody listens, DNS, 429, 502, 503        yes          ends the stage
TLS that does not come about              no           ends the stage
any other status                          no           in doubt
========================================  ===========  ======================================================

*Asked again*: after ``WAITS``, or what ``Retry-After`` says, ``LONGEST_WAIT`` at most, and up to half of the wait more,
drawn from request and attempt, so that what was refused together does not come back together. An answer of 200 with an
``error`` that has the code of a status is that status. *In doubt*: it costs the row, since it may be about this one
request (too long for a gateway, flagged text). Once ``FAILING`` different requests failed so one behind the other and
none was answered meanwhile, the server is asked again for what it answered last: where it still gives that, these
requests were to blame and cost their rows; else, or where it has answered nothing, the stage ends. It also ends where
a server that has answered nothing yet answers none of a whole call. Of a vLLM server that was given a policy's weights
(:attr:`Served.loaded`), nobody listening, 502 and 503 end the stage at once: started again it has the weights of its
files.

What ends a stage says which setting to write, and that the same command continues: every single answer is kept
(stages/running/journal.py), and of judges' stages what got none comes last in its block, so that requests that no server
answers do not end each start of a stage that asks one at a time. A time-out is one number per request, from looking up
the server's name to the last byte of its answer (:func:`stages.running.http_json.request_json`).
"""

from __future__ import annotations

import json
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Literal

from stages.running.http_json import ServerError, request_json, shown
from stages.running.randomness import seed_for
from stages.running.stopping import GRACE_SECONDS, stopping

#: Seconds before a server that is away or overloaded is asked again, unless it asks for more (``Retry-After``).
WAITS = (1.0, 4.0, 15.0)
#: Seconds of a server's ``Retry-After`` that are waited at most.
LONGEST_WAIT = 120.0
#: Different requests that a server failed on one behind the other, each asked again, after which it has to show that it
#: does not fail on all.
FAILING = 3


@dataclass(frozen=True)
class Rule:
    """What becomes of a kind of failure. do: what the user is told to do; ``{address}`` and so on are the settings'
    names (:class:`Settings`).
    """

    statuses: tuple[int, ...]
    again: bool
    then: Literal["row", "doubt", "stage"]
    do: str


KEY = "Write {key_variable}=NAME, the environment variable that holds its key"
CHECK = "Check {address} and {model}, and that it runs"
FULL = "It was asked again after growing waits: wait until it has room, or write a smaller {fewer}=N"
LOG = "Its own log says why; some servers answer so to a {model} that they do not know"
RULES = (
    Rule((400, 413, 422, 451), False, "row", "Write what it takes: it refuses all requests"),
    Rule((200,), True, "row", CHECK),
    Rule((401,), False, "stage", KEY),
    Rule((402,), False, "stage", "See to what its account still has"),
    Rule((403,), False, "doubt", KEY),
    Rule((404, 405, 410), False, "stage", CHECK),
    Rule((407,), False, "stage", "Export the proxy with its user: https_proxy=http://USER:PASSWORD@HOST:PORT"),
    Rule((429, 502, 503), True, "stage", FULL),
    Rule((408, 504), True, "doubt", FULL),
)
SENT_ON = Rule((), False, "stage", "Write the address that it sends on to as {address}")
NOBODY = Rule((), True, "stage", CHECK)
SLOW = Rule((), True, "doubt", "None came within {timeout_s}={seconds:g}: write a larger one, or a smaller {fewer}")
BROKEN = Rule((), True, "doubt", CHECK)
FAULT = Rule((), True, "doubt", LOG)
OTHER = Rule((), False, "doubt", CHECK)


def rule_of(error: ServerError) -> Rule:
    """The row of the table that a failure falls under."""
    if error.unreachable:
        return NOBODY
    if error.status is None:
        return SLOW if isinstance(error.__cause__, TimeoutError) else BROKEN
    for rule in RULES:
        if error.status in rule.statuses:
            return rule
    return SENT_ON if 300 <= error.status < 400 else FAULT if error.status >= 500 else OTHER


@dataclass(frozen=True)
class Settings:
    """What the user calls a server's settings. fewer: what is under way at once."""

    address: str = "endpoint"
    model: str = "endpoint_model"
    key_variable: str = "key_variable"
    timeout_s: str = "timeout_s"
    fewer: str = "concurrency"


class Served:
    """A server that a stage asks, and whether it answers.

    Args:
        who: how errors call it, with its address. gives: what it should give. ends: the error that ends the stage.
            settings: what the user calls its settings; timeout_s: the value of that one. instead: what else may be
            done where it cannot be asked.
    """

    def __init__(
        self,
        who: str,
        gives: str,
        ends: type[Exception],
        timeout_s: float,
        settings: Settings = Settings(),
        instead: str = "",
    ):
        self.who, self.gives, self.ends, self.instead = who, gives, ends, instead
        self.named = {**vars(settings), "seconds": timeout_s}
        self.answered_at = -math.inf
        self.failing: set[Hashable] = set()
        self.loaded = False  # it has weights that are not those of its files
        self.asked_twice: list[dict] = []  # usage of what it answered a second time, to show that it answers
        self.probe: Callable | None = None  # asks little, to see whether a server of an earlier start still answers
        self._answered: Callable | None = None  # asks what it answered last
        self._silent_at = -math.inf  # when it did not answer that a second time
        self._last: ServerError | None = None
        self._lock, self._asking_twice = threading.Lock(), threading.Lock()

    @property
    def answered(self) -> bool:
        """Whether it has answered anything."""
        return self.answered_at > -math.inf

    def has_answered(self, ask: Callable | None) -> None:
        """It answered an earlier start of this stage (``ask`` asks what), so that what it fails on now is about a
        request as it was then.
        """
        with self._lock:
            self.answered_at = max(self.answered_at, 0.0)  # before any request of this process
            self._answered = self._answered or ask

    def settle(self, ask: Callable, about: Hashable):
        """What ``ask()`` gives, which asks patiently by itself. about: what the request is, so that one that fails
        several times counts once.

        Raises ServerError where a failure costs the row, ``ends`` where it ends the stage.
        """
        began = time.monotonic()
        try:
            found = ask()
        except ServerError as error:
            rule = rule_of(error)
            with self._lock:
                self._last = error
                # what is flagged or takes too long where others are answered is about what this one says
                # (of an earlier start it may have been another key)
                flagged = self.answered_at > 0.0 and error.status == 403
                if rule.then == "doubt" and not (self.answered_at > began or flagged):
                    self.failing.add(about)
                failed = len(self.failing)
            if rule.then == "stage" or rule.then == "doubt" and failed >= FAILING and not self._still_answers(began):
                raise self.away(error, failed if rule.then == "doubt" else 1) from error
            raise
        self._has_given(ask)
        return found

    def _has_given(self, ask: Callable) -> None:
        with self._lock:
            self.answered_at, self._answered = time.monotonic(), ask
            self.failing.clear()

    def _still_answers(self, since: float) -> bool:
        """Whether it answered anything since then, or gives again what it gave last."""
        with self._asking_twice:  # once for all that failed together
            if self.answered_at > since:
                return True
            if self._answered is None or self._silent_at > since:
                return False
            try:
                answer = self._answered()
            except ServerError:
                self._silent_at = time.monotonic()
                return False
            if isinstance(answer, dict) and answer.get("usage"):
                self.asked_twice.append(answer["usage"])
            self._has_given(self._answered)
            return True

    def away(self, error: ServerError, failed: int = 1) -> Exception:
        """The error that ends the stage. failed: requests in a row that failed."""
        return self.ends(
            f"{self.who} gives no {self.gives}"
            + " any more" * self.answered
            + f" ({error}{f'; {failed} requests one behind the other failed' if failed > 1 else ''})."
            + f" {rule_of(error).do.format(**self.named)}{self.instead}; then the same command continues."
        )

    def not_silent(self, asked: int) -> None:
        """Raise ``ends`` where a call of ``asked`` requests, none of which was answered, is all that was asked so far:
        with one request where it may be about the server, with ``FAILING`` where it refused each.
        """
        if not self.answered and self._last is not None and asked:
            if self.failing or asked >= FAILING:
                raise self.away(self._last, asked) from self._last

    def refuse_restarted(self, error: ServerError) -> None:
        """Raise ``ends`` where a server that was given weights ended: started again it has those of its files."""
        if self.loaded and (error.unreachable or error.status in (502, 503)):  # behind a gateway
            raise self.ends(
                f"{self.who} does not answer any more ({error}), and a server that is started again does not have"
                " the policy's weights. Start it; then the same command continues and gives it them."
            ) from error


# -- asking ------------------------------------------------------------------------------------------------------------

_under_way = threading.local()


def patiently(ask: Callable, body=None):
    """What ``ask()`` gives. Where asking again may help it is asked again, after growing waits; not once the other
    requests of its call were given up. body: of the request, by which waits differ.

    Raises the last ServerError.
    """
    for attempt, wait in enumerate((*WAITS, None)):
        try:
            return ask()
        except ServerError as error:
            if wait is None or error.final or not rule_of(error).again or given_up():
                raise
            share = seed_for(0, "servers", "wait", json.dumps(body, sort_keys=True), attempt) / 2**63
            pause(max(wait, min(error.retry_after, LONGEST_WAIT)) + 0.5 * share * wait)
            if given_up():
                raise


def given_up() -> bool:
    """Whether the call that this thread asks for has ended."""
    over = getattr(_under_way, "over", None)
    return over is not None and over.is_set()


def pause(seconds: float) -> None:
    """Wait, of a call that ends meanwhile no longer than that."""
    over = getattr(_under_way, "over", None)
    time.sleep(seconds) if over is None else over.wait(seconds)


def each(
    function: Callable,
    of: Iterable,
    concurrency: int,
    progress: Callable[[int, int], None] | None = None,
    finish: bool = False,
) -> list:
    """``function`` of each, in their order, at most ``concurrency`` under way at once; the first error ends it at once,
    and so does an end of the stage, however long the requests under way hang.

    progress: told after each how many there are by now, and of how many. finish: the function keeps what it gets, and
    what is under way is waited for (where the stage is to end half of its grace period).
    """
    of = list(of)
    found: list = [None] * len(of)
    if len(of) < 2 or concurrency == 1:
        for at, one in enumerate(of):
            found[at] = function(one)
            if progress is not None:
                progress(at + 1, len(of))
        return found
    waiting, done = iter(enumerate(of)), queue.SimpleQueue()
    over, lock = threading.Event(), threading.Lock()

    def work() -> None:
        _under_way.over = over
        while not over.is_set():
            with lock:
                at, one = next(waiting, (None, None))
            if at is None:
                return
            try:
                found[at] = function(one)
                done.put(None)
            except BaseException as error:
                done.put(error)
                over.set()

    # of daemons, so that a process that ends does not wait for those that hang
    workers = [threading.Thread(target=work, daemon=True) for _ in range(min(concurrency, len(of)))]
    for worker in workers:
        worker.start()
    try:
        for count in range(1, len(of) + 1):
            if (error := done.get()) is not None:
                raise error
            if progress is not None:
                progress(count, len(of))
    except BaseException as error:
        over.set()
        if finish:
            grace = float(os.environ.get("POSTTRAIN_GRACE_SECONDS", GRACE_SECONDS))
            until = (
                math.inf
                if isinstance(error, Exception)
                else stopping.since + 0.75 * grace  # half of it a training loop has waited for its step
                if stopping.asked
                else time.monotonic() + grace / 2
            )
            for worker in workers:
                worker.join(None if until == math.inf else max(0.0, until - time.monotonic()))
        raise
    return found


# -- the OpenAI interfaces ---------------------------------------------------------------------------------------------

#: Finish reasons of servers and gateways that say otherwise what OpenAI calls stop and length.
FINISHED = {
    **dict.fromkeys(("stop", "eos", "eos_token", "stop_sequence", "end_turn", "STOP"), "stop"),
    **dict.fromkeys(("length", "max_tokens", "MAX_TOKENS"), "length"),
}


class ChatServer:
    """The model of a server with the OpenAI chat interface (``/chat/completions``).

    Args:
        endpoint: base URL, for example ``http://localhost:8000/v1``. model: name the server knows. key_variable:
            environment variable that holds the key, if one is needed; keys never enter a configuration. timeout_s:
            seconds of one answer. concurrency: requests under way at once.
    """

    def __init__(
        self, endpoint: str, model: str, key_variable: str = "", timeout_s: float = 60.0, concurrency: int = 8
    ):
        self.endpoint = endpoint.rstrip("/")
        self.model = model
        self.key_variable = key_variable
        self.timeout_s = timeout_s
        self.concurrency = concurrency

    def ask(self, messages: list[dict], **settings) -> dict:
        """The choice that answers a conversation, with the answer's ``usage``.

        Raises ServerError, after asking again where that may help.
        """
        body = {"model": self.model, "messages": messages, **settings}

        def once() -> dict:
            answer = request_json(
                self.endpoint + "/chat/completions", body, key_variable=self.key_variable, timeout_s=self.timeout_s
            )
            choice, used = first_choice(answer, "chat completion", self.key_variable), answer.get("usage")
            used = used.items() if isinstance(used, dict) else ()
            try:
                said(choice)
            except (TypeError, AttributeError):
                raise _none(answer, "chat completion", "its message holds no text", self.key_variable) from None
            return {**choice, "usage": {name: n for name, n in used if isinstance(n, int)}}

        return patiently(once, body)

    def each(self, function: Callable, of: Iterable, finish: bool = False) -> list:
        """As :func:`each`, with as many under way as the server is to be asked at once."""
        return each(function, of, self.concurrency, finish=finish)


def first_choice(answer, what: str, key_variable: str) -> dict:
    """The first choice of an answer. Raises ServerError where it is no ``what``, in which the key is not shown."""
    refuse_error(answer, key_variable)
    choices = answer.get("choices") if isinstance(answer, dict) else None
    if not (isinstance(choices, list) and choices and isinstance(choices[0], dict)):
        raise _none(answer, what, "it holds no choices" if answer is not None else "it is empty", key_variable)
    return choices[0]


def _none(answer, what: str, why: str, key_variable: str) -> ServerError:
    said = "" if answer is None else f": {shown(answer, key_variable, 200)}"
    return ServerError(f"the answer is no {what}, {why}{said}")


def refuse_error(answer, key_variable: str) -> None:
    """Raise the ServerError that an answer of 200 tells of in its field ``error``, as gateways write it; with a code
    that is a status, as if the answer had that status.
    """
    error = answer.get("error") if isinstance(answer, dict) else None
    if not error:
        return
    code = error.get("code") if isinstance(error, dict) else None
    status = int(code) if isinstance(code, (int, str)) and str(code).isdecimal() and 300 <= int(code) < 600 else 200
    raise ServerError(f"HTTP 200 with an error: {shown(error, key_variable, 300)}", status)


def said(choice: dict) -> str:
    """The text of a choice, which some servers send in parts; empty where it has none. What a model thought, which
    servers send beside it (``reasoning_content``), is no part of it.
    """
    content = (choice.get("message") or {}).get("content") or ""
    return content if isinstance(content, str) else "".join(part.get("text") or "" for part in content)


def finish_of(choice: dict) -> str | None:
    """Why a choice ends, in OpenAI's words."""
    reason = choice.get("finish_reason")
    return FINISHED.get(reason, reason) if isinstance(reason, str) else None


def withheld(choice: dict) -> str | None:
    """Why a choice has no text to be read: a filter took it away, or the model refused or called a tool instead."""
    message = choice.get("message") or {}
    if finish_of(choice) == "content_filter":
        return "the server's content filter withheld the answer"
    if said(choice).strip():
        return None
    if message.get("refusal"):
        return f"the model refused: {str(message['refusal'])[:200]}"
    if message.get("tool_calls") or message.get("function_call"):
        return "the model called a tool instead of answering"
    return None
