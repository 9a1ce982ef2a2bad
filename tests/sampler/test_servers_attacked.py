"""What servers do, over real sockets: what a judge, a writer, a sampling engine and a reward model behind a URL lose by
it, what they say, and what is asked for again. ``stages/running/servers.py`` is the table; this is that it holds.
"""

import gzip
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from stages.decoding.engines import EngineError
from stages.decoding.sampler import SamplingParams
from stages.reward.judge import JudgeError, ServerJudge
from stages.reward.remote_rewards import Answer, RewardServer, RewardServerError
from stages.running import http_json, servers
from stages.running.http_json import ServerError, request_json
from stages.running.servers import RULES, Served, each, rule_of
from tests.evaluation.conftest import tiny  # noqa: F401
from tests.raw_server import raw_server, whole

CHAT = {"choices": [{"message": {"role": "assistant", "content": "fine"}, "finish_reason": "stop"}]}
TEXT = {"choices": [{"text": "fine", "finish_reason": "stop"}]}
CLIENTS = ("judge", "writer", "engine", "reward")


@pytest.fixture(autouse=True)
def no_waits(monkeypatch):
    monkeypatch.setattr(servers, "WAITS", (0.0,))


@pytest.fixture(scope="module")
def tokenizer(tiny):  # noqa: F811
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny["policy"])


@pytest.fixture()
def ask(tiny, tokenizer):  # noqa: F811
    """``ask(client, url, n, **settings)``: what each of n requests, one at a time, came to: None, or why it got no
    answer.
    """

    def one(client, url, n, timeout_s=60.0, concurrency=1):
        if client == "judge":
            asked = ServerJudge(url, "m", timeout_s=timeout_s, concurrency=concurrency)
            return [reply.error for reply in asked.replies([f"request {i}" for i in range(n)], 4)]
        if client == "writer":
            from stages.decoding.writers import ServerWriter
            from stages.write_prompts import Config

            config = Config(endpoint=url, endpoint_model="m", engine_concurrency=concurrency, timeout_s=timeout_s)
            found = ServerWriter(config).write([f"request {i}" for i in range(n)], list(range(n)), 4, 0.0)
            return [written.error for written in found]
        if client == "reward":
            asked = RewardServer(url, "m", "messages", "rewards", 1, concurrency, timeout_s)
            found = asked.scores([Answer([{"role": "user", "content": f"request {i}"}], {}, "eos") for i in range(n)])
            return [value if isinstance(value, str) else None for value in found]
        from stages.decoding.server_engine import ServerEngine

        asked = ServerEngine(
            url, tokenizer, tiny["policy"], model="m", api="openai", timeout_s=timeout_s, concurrency=concurrency
        )
        prompts = [tokenizer(word, add_special_tokens=False).input_ids for word in WORDS[:n]]
        params = SamplingParams(max_new_tokens=4, stop_ids=frozenset([tokenizer.eos_token_id]))
        return [group[0].error for group in asked.generate(prompts, params, [[0]] * n)]

    return one


WORDS = [f"request {i}" for i in range(8)]
ENDS = (EngineError, JudgeError, RewardServerError)


def fine(body) -> bytes:
    """A right answer to whoever asks."""
    if "prompt" in body:
        return whole(TEXT)
    return whole({"rewards": [1.0] * len(body["answers"])} if "answers" in body else CHAT)


def number_of(body) -> int:
    """Which of the requests it is."""
    return int(re.search(r"request (\d)", json.dumps(body))[1])


# -- one bad answer among good ones ------------------------------------------------------------------------------------


def reset(connection, body):
    """The connection is reset in the middle of an answer."""
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\n{")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def drip(connection, body):
    """Headers that never end: a socket's own time-out begins anew with every byte."""
    connection.sendall(b"HTTP/1.1 200 OK\r\n")
    for i in range(200):
        connection.sendall(b"X-Wait: %d\r\n" % i)
        time.sleep(0.02)


HTML = b"<!doctype html><title>Sign in</title>"
BAD = {
    "reset": (reset, "ConnectionResetError|IncompleteRead", 2),
    "slow headers": (drip, "only a part of the answer came in 0.5 seconds", 2),
    "half a body": (b"HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\n{", "IncompleteRead", 2),
    "chunked garbage": (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n{}", "InvalidChunkLength", 2),
    "chunk without end": (
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"0" * (1 << 20),
        "LineTooLong: got more than 65536 bytes",
        2,
    ),
    "no JSON": (whole(b'{"choices": [', "200 OK"), "JSONDecodeError", 2),
    "a login page": (whole(HTML, "200 OK", "Content-Type: text/html"), "no JSON but text/html and begins", 2),
    "deep": (whole(b"[" * 100_000), "RecursionError", 2),
    "not UTF-8": (whole(b'"\xff\xfe\x80"'), "UnicodeDecodeError", 2),
    "cut gzip": (whole(gzip.compress(b"{}" * 99)[:-9], "200 OK", "Content-Encoding: gzip"), "compressed answer", 2),
    "no gzip": (whole(b"{}", "200 OK", "Content-Encoding: gzip"), "incorrect header", 2),
    "an error of 200": (whole({"error": {"message": "flagged"}}), "HTTP 200 with an error.*flagged", 2),
    "no choices": (whole({"choices": [], "rewards": None}), "holds no", 2),
    "null": (whole(None), "is empty|holds no", 2),
    "a fault": (whole(b"stumbled", "500 Internal Server Error"), "HTTP 500: stumbled", 2),
    "a gateway's time-out": (whole(b"", "504 Gateway Time-out"), "HTTP 504", 2),
    "flagged": (whole(b"policy", "403 Forbidden"), "HTTP 403: policy", 1),
    "too long": (whole(b"too many tokens", "400 Bad Request"), "HTTP 400: too many tokens", 1),
    "a legal reason": (whole(b"", "451 Unavailable For Legal Reasons"), "HTTP 451", 1),
}


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("name", BAD)
def test_one_bad_answer_costs_its_own_row(ask, name, client):
    """Asked for again where that may help; all others keep theirs, and the reason names what came."""
    made, said, times = BAD[name]

    def answer(connection, body, number):
        if number_of(body) != 2:
            return fine(body)
        return made(connection, body) if callable(made) else made

    with raw_server(answer) as server:
        found = ask(client, server.url, 4, timeout_s=0.5 if name == "slow headers" else 20.0)
    assert [why is None for why in found] == [True, True, False, True]
    assert re.search(said, found[2]), found[2]
    assert sum(number_of(body) == 2 for body in server.seen) == times and len(server.seen) == 3 + times


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize(
    "made",
    [
        lambda good: gzip_of(good),
        lambda good: good.replace(b"Content-Length", b"X-First: 1\r\nX-First: 2\r\nContent-Length", 1),
        lambda good: good.replace(b"\r\n\r\n", b"\r\n\r\n \n\n", 1).replace(*longer(good, 3), 1),
        lambda good: b"HTTP/1.1 100 Continue\r\n\r\n" + good,
    ],
    ids=["gzip", "duplicate headers", "blank lines first", "100 Continue"],
)
def test_odd_answers_that_are_right_are_taken(ask, made, client):
    with raw_server(lambda connection, body, number: made(fine(body))) as server:
        assert ask(client, server.url, 2) == [None, None] and len(server.seen) == 2


def gzip_of(good: bytes) -> bytes:
    return whole(gzip.compress(good.partition(b"\r\n\r\n")[2]), "200 OK", "Content-Encoding: gzip")


def longer(good: bytes, by: int) -> tuple[bytes, bytes]:
    length = int(re.search(rb"Content-Length: (\d+)", good)[1])
    return b"Content-Length: %d" % length, b"Content-Length: %d" % (length + by)


@pytest.mark.parametrize("client", CLIENTS)
def test_a_fault_that_passes_costs_nothing(ask, client):
    def answer(connection, body, number):
        return whole(b"", "500 Oops") if number in (2, 5) else fine(body)

    with raw_server(answer) as server:
        assert ask(client, server.url, 4) == [None] * 4 and len(server.seen) == 6


# -- servers that fail on everything -----------------------------------------------------------------------------------

AWAY = {
    "no key": (whole(b"who?", "401 Unauthorized"), r"HTTP 401: who\?.*key_variable=NAME", 1),
    "not paid": (whole(b"", "402 Payment Required"), "HTTP 402.*See to what its account still has", 1),
    "no such path": (whole(b"", "404 Not Found"), "HTTP 404.*Check (endpoint|engine_url|url) and", 1),
    "a login page": (
        whole(b"", "302 Found", "Location: https://login.example/"),
        "sends on to https://login.example/.*Write the address",
        1,
    ),
    "a proxy's user": (whole(b"", "407 Proxy Authentication Required"), "HTTP 407.*https_proxy=http://USER", 1),
    "full": (whole(b"", "429 Too Many Requests"), "HTTP 429.*wait until it has room", 2),
    "full for long": (
        whole(b"", "429 Too Many Requests", "Retry-After: 3600"),
        r"HTTP 429.*\(ask again after 3600 seconds\)",
        2,
    ),
    "restarting": (whole(b"", "503 Service Unavailable"), "HTTP 503.*wait until it has room", 2),
    "a gateway's own 402": (whole({"error": {"code": 402, "message": "credits"}}), "credits.*its account", 1),
}


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("name", AWAY)
def test_a_server_that_answers_nobody_ends_the_stage_at_the_first(ask, name, client, monkeypatch):
    monkeypatch.setattr(servers, "LONGEST_WAIT", 0.01)
    made, said, times = AWAY[name]
    with raw_server(lambda connection, body, number: made) as server:
        with pytest.raises(ENDS, match=f"(?s){said}.*; then the same command continues"):
            ask(client, server.url, 4)
        assert len(server.seen) == times


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("name", ["no JSON", "a login page", "a fault", "flagged", "null", "half a body"])
def test_a_server_that_fails_on_all_ends_the_stage_after_three(ask, name, client):
    """Not after each of a thousand prompts, and also where it had answered before; a count that begins anew with every
    answer.
    """
    made, said, times = BAD[name]

    def answer(connection, body, number):
        if number_of(body) == 3:
            failing.append(number)
        return fine(body) if number_of(body) in (0, 2) and not (failing and name != "flagged") else made

    failing = []
    with raw_server(answer) as server:
        known = name == "flagged"  # by one that answers others: of what it says
        if known:
            found = ask(client, server.url, 7)
            assert [why is None for why in found] == [True, False, True] + [False] * 4
            return
        with pytest.raises(ENDS, match=f"any more.*(?s:{said}).*3 requests one behind the other failed"):
            ask(client, server.url, 7)
        assert len(server.seen) == 2 + 4 * times + times, "and what it had answered before"
        assert number_of(server.seen[-1]) == 2
        server.answer, server.seen[:] = lambda connection, body, number: made, []
        with pytest.raises(ENDS, match=said):
            ask(client, server.url.replace("/v1", "/v2"), 7)
        assert len(server.seen) == 3 * times


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("name", ["no JSON", "a fault", "half a body"])
def test_bad_requests_side_by_side_cost_their_own_rows(ask, name, client):
    """Asked one at a time they looked like a server that fails on everything, at every start of the stage. It is asked
    again for what it answered last, and gives it.
    """
    made, said, times = BAD[name]
    with raw_server(lambda connection, body, number: made if 0 < number_of(body) < 7 else fine(body)) as server:
        found = ask(client, server.url, 8)
    assert [why is None for why in found] == [True] + [False] * 6 + [True]
    assert all(re.search(said, why) for why in found[1:7])
    assert [number_of(body) for body in server.seen] == [
        0, *(i for i in (1, 2, 3) for _ in range(times)), 0, *(i for i in (4, 5, 6) for _ in range(times)), 0, 7,
    ]  # fmt: skip


@pytest.mark.parametrize("alive", [True, False])
def test_what_fails_together_has_the_server_asked_once_whether_it_answers(alive):
    served, together, asked = Served("a", "b", EngineError, 1.0), threading.Barrier(8, timeout=60), []

    def good():
        asked.append(1)
        if len(asked) > 1 and not alive:
            raise ServerError("HTTP 500", 500)
        return {"usage": {"prompt_tokens": 3}}

    def bad(i):
        def ask():
            together.wait()
            raise ServerError("HTTP 500", 500)

        try:
            return served.settle(ask, i)
        except ServerError as error:
            return str(error)

    assert served.settle(good, "good") == {"usage": {"prompt_tokens": 3}}
    if alive:
        assert each(bad, range(8), 8, finish=True) == ["HTTP 500"] * 8
        assert served.asked_twice == [{"prompt_tokens": 3}], "which is paid"
    else:
        with pytest.raises(EngineError, match="gives no b any more.*requests one behind the other failed"):
            each(bad, range(8), 8, finish=True)
    assert len(asked) == 2


@pytest.mark.parametrize("client", CLIENTS)
def test_a_server_that_refuses_all_of_a_call_ends_the_stage(ask, client):
    with raw_server(lambda connection, body, number: whole(b"max_tokens is unknown", "400 Bad Request")) as server:
        with pytest.raises(ENDS, match="max_tokens is unknown"):
            ask(client, server.url, 4)


@pytest.mark.parametrize("client", CLIENTS)
def test_a_name_that_nobody_has_is_told(ask, client, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ENDS, match="Name or service not known|failure in name resolution.*Check .*and that it runs"):
        ask(client, "http://judge.invalid/v1", 1)


def test_every_status_falls_under_one_rule():
    """The table in the docstring is what is done: no status is in two rows, and all are in one."""
    named = [status for rule in RULES for status in rule.statuses]
    assert len(named) == len(set(named))
    for status in range(300, 600):
        rule = rule_of(ServerError("x", status))
        assert not (rule.then == "stage" and rule.again) or status in (429, 502, 503)
        assert rule.then == {3: "stage"}.get(status // 100, rule.then)
        assert rule.do.format(**Served("a", "b", EngineError, 1.0).named)


@pytest.mark.parametrize("client", ["judge", "engine", "reward"])
@pytest.mark.parametrize("of_200", [lambda key: {"error": f"who is {key}?"}, lambda key: [f"who is {key}?"], str])
def test_a_key_that_an_answer_repeats_is_not_told(tokenizer, tiny, monkeypatch, client, of_200):  # noqa: F811
    from stages.decoding.server_engine import ServerEngine

    monkeypatch.setenv("A_KEY", "sk-nobody-sees-this")
    made = whole(of_200("sk-nobody-sees-this"))
    with raw_server(lambda connection, body, number: made) as server:
        if client == "reward":
            asked = RewardServer(server.url, "m", "messages", key_variable="A_KEY")
            (why,) = asked.scores([Answer([{"role": "user", "content": "x"}], {}, "eos")])
        elif client == "engine":
            asked = ServerEngine(
                server.url, tokenizer, tiny["policy"], model="m", api="vllm", key_variable="A_KEY", concurrency=1
            )
            why = asked._row([1, 40], 0, SamplingParams(max_new_tokens=2), {}, None).error
        else:
            why = ServerJudge(server.url, "m", "A_KEY").reply("x", 4).error
        assert "Bearer sk-nobody-sees-this" in server.heads[-1]
    assert "(the key)" in why and "sk-" not in why


# -- what waits --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "headers, seconds",
    [
        (["Retry-After: 7"], 7),
        (["Retry-After: 0.5"], 0.5),
        (["Retry-After: -3"], 0),
        (["Retry-After: soon"], 0),
        (["Retry-After: nan"], 0),
        (["Retry-After: inf"], 0),
        (["Retry-After: 1e300"], 120),
        (["Retry-After: Mon, 99 Foo 2026 10:00:00 GMT"], 0),
        (["Retry-After: Fri, 01 Jan 1999 10:00:00 GMT"], 0),
        (["Retry-After: Fri, 31 Dec 9999 23:59:59 GMT"], 120),
        (["Retry-After: 5", "Retry-After: 9"], 5),
        (["retry-after-ms: 250", "Retry-After: 1"], 0.25),
        (["retry-after-ms: soon", "Retry-After: 3"], 3),
    ],
)
def test_every_form_of_retry_after_is_waited_for(headers, seconds, monkeypatch):
    waited = []
    monkeypatch.setattr(servers, "pause", waited.append)
    with raw_server(lambda connection, body, number: whole(b"", "429 Too Many Requests", *headers)) as server:
        with pytest.raises(ServerError, match="HTTP 429"):
            servers.patiently(lambda: request_json(server.url, {}))
    assert waited == [pytest.approx(seconds, abs=2e-3)]


def test_requests_that_were_refused_together_do_not_come_back_together(monkeypatch):
    """A wait is a function of the request and the attempt: a stage that is run again waits as long."""
    monkeypatch.setattr(servers, "WAITS", (1.0, 4.0))

    def waits(body, error):
        waited = []
        monkeypatch.setattr(servers, "pause", waited.append)

        def ask():
            raise error

        with pytest.raises(ServerError):
            servers.patiently(ask, body)
        return tuple(waited)

    full, later = ServerError("HTTP 429", 429), ServerError("HTTP 429", 429, retry_after=7.0)
    of_32 = [waits({"prompt": f"\ud83d {i}"}, full) for i in range(32)]
    assert of_32 == [waits({"prompt": f"\ud83d {i}"}, full) for i in range(32)]
    for at, wait in enumerate((1.0, 4.0)):
        found = sorted(waited[at] for waited in of_32)
        assert wait <= found[0] < 1.1 * wait and 1.4 * wait < found[-1] < 1.5 * wait and len(set(found)) == 32
    assert all(7.0 <= waits({"n": i}, later)[0] < 7.5 and 7.0 <= waits({"n": i}, later)[1] < 9.0 for i in range(8))


def test_a_long_answer_is_not_read_to_its_end(monkeypatch):
    """Also one that is short on the way: a few KiB of gzip are a GiB of zeros."""
    monkeypatch.setattr(http_json, "LONGEST_ANSWER", 1 << 20)
    bomb = whole(gzip.compress(b" " * (8 << 20)), "200 OK", "Content-Encoding: gzip")

    def endless(connection, body, number):
        connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
        for _ in range(1000):
            connection.sendall(b" " * (1 << 16))

    for answer in (endless, lambda connection, body, number: bomb):
        with raw_server(answer) as server:
            with pytest.raises(ServerError, match="longer than 1 MiB") as raised:
                servers.patiently(lambda: request_json(server.url, {}))
            assert rule_of(raised.value).then == "row" and len(server.seen) == 1


def test_an_ipv6_address_is_asked(ask):
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6")
    with raw_server(lambda connection, body, number: fine(body), "::1") as server:
        assert ask("judge", server.url, 2) == [None, None]


def test_a_proxy_with_a_user_is_told_who_asks_and_one_that_takes_none_is_named(monkeypatch):
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with raw_server(lambda connection, body, number: whole({})) as proxy:
        monkeypatch.setenv("http_proxy", f"http://me:a%40b@127.0.0.1:{proxy.port}")
        assert request_json("http://judge.invalid/v1", {}) == {}
        assert "proxy-authorization: basic bwu6yubi" in proxy.heads[0].lower()
    refused = b"HTTP/1.1 407 Proxy Authentication Required\r\nContent-Length: 0\r\n\r\n"
    with raw_server(lambda connection, body, number: refused) as proxy:
        monkeypatch.setenv("https_proxy", f"http://me:secret@127.0.0.1:{proxy.port}")
        with pytest.raises(ServerError, match="407.*wants another user, export https_proxy") as raised:
            request_json("https://judge.invalid/v1", {})
    assert raised.value.final and "secret" not in str(raised.value)


# -- what models say ---------------------------------------------------------------------------------------------------


def choice(content="fine", finish="stop", **message):
    return whole({"choices": [{"message": {"content": content, **message}, "finish_reason": finish}]})


@pytest.mark.parametrize(
    "made, text, error",
    [
        (choice(None), "", None),
        (choice("", reasoning_content="long thoughts"), "", None),
        (choice("fine", reasoning_content="long thoughts"), "fine", None),
        (choice([{"type": "text", "text": "fi"}, {"type": "text", "text": "ne"}]), "fine", None),
        (choice("fine", "eos_token"), "fine", None),
        (choice("fine", "max_tokens"), "fine", None),
        (choice("half", "content_filter"), "", "content filter withheld"),
        (choice(None, refusal="I cannot"), "", "the model refused: I cannot"),
        (choice(None, "tool_calls", tool_calls=[{"id": "1"}]), "", "called a tool"),
        (choice(5), "", "holds no text"),
        (choice(["fine"]), "", "holds no text"),
        (whole({"choices": [{"message": "fine"}]}), "", "holds no text"),
        (whole({"choices": ["fine"]}), "", "holds no choices"),
        (whole({"choices": [*CHAT["choices"], {"message": {"content": "other"}}]}), "fine", None),
        (whole({**CHAT, "usage": "none"}), "fine", None),
        (whole({**CHAT, "usage": {"prompt_tokens": None, "completion_tokens": "3"}}), "fine", None),
    ],
)
def test_what_a_model_says_otherwise(made, text, error):
    with raw_server(lambda connection, body, number: made if number_of(body) else fine(body)) as server:
        asked = ServerJudge(server.url, "m")
        assert asked.reply("request 0", 4).text == "fine"
        reply = asked.reply("request 1", 4)
    assert reply.text == text and (reply.error is None if error is None else error in reply.error)
    assert reply.cut == (b"max_tokens" in made)


@pytest.mark.parametrize(
    "made",
    [
        choice("A"),
        whole({"choices": [{"message": {"content": "A"}, "logprobs": [1]}]}),
        whole({"choices": [{"message": {"content": "A"}, "logprobs": {"content": [{"top_logprobs": [{}]}]}}]}),
        whole(b"logprobs is not supported with this model", "400 Bad Request"),
    ],
)
def test_a_judge_without_probabilities_says_which_mode_needs_none(made):
    with raw_server(lambda connection, body, number: made) as server:
        with pytest.raises(JudgeError, match="gives no token probabilities; write mode=verdict"):
            ServerJudge(server.url, "m").choice("request 1", ("A", "B"))


def test_tokens_of_an_answer_that_is_withheld_are_paid():
    made = whole(
        {
            "choices": [{"message": {"content": ""}, "finish_reason": "content_filter"}],
            "usage": {"prompt_tokens": 9, "completion_tokens": 2},
        }
    )
    with raw_server(lambda connection, body, number: made) as server:
        reply = ServerJudge(server.url, "m").reply("request 1", 4)
    assert reply.error and (reply.tokens_in, reply.tokens_out) == (9, 2)


def test_a_completion_of_another_request_is_none(tiny, tokenizer):  # noqa: F811
    """A server that mixes up its answers: the tokens that it read tell."""
    from stages.decoding.server_engine import ServerEngine

    def answer(connection, body, number):
        if body is None:
            return whole({})
        made = {"choices": [{"token_ids": [40, 41], "text": "x", "finish_reason": "length"}]}
        return whole({**made, "usage": {"prompt_tokens": len(body["prompt"]) + (body["prompt"][-1] == 50)}})

    with raw_server(answer) as server:
        asked = ServerEngine(server.url, tokenizer, tiny["policy"], model="m", api="vllm")
        found = asked.generate([[1, 40], [1, 50]], SamplingParams(max_new_tokens=2), [[0], [0]])
        assert [group[0].finish_reason for group in found] == ["length", "error"]
        assert "answers another request" in found[1][0].error
        server.answer = lambda connection, body, number: whole(
            {"choices": [{"token_ids": [40, 10**6 * (body["prompt"][-1] == 50)], "finish_reason": "length"}]}
        )
        found = asked.generate([[1, 40], [1, 50]], SamplingParams(max_new_tokens=2), [[0], [0]])
        assert found[0][0].ids == [40, 0] and "not of the model's vocabulary" in found[1][0].error


# -- the end of a stage ------------------------------------------------------------------------------------------------


def test_an_error_does_not_wait_for_requests_that_hang():
    over = threading.Event()

    def function(i):
        if i == 7:
            raise ValueError("seven")
        return over.wait(300)

    with pytest.raises(ValueError, match="seven"):
        each(function, range(100), 32)
    assert not over.is_set()
    over.set()
    seen = []
    assert each(lambda i: i * i, range(50), 8, lambda *told: seen.append(told)) == [i * i for i in range(50)]
    assert seen == [(i + 1, 50) for i in range(50)]


def test_requests_that_wait_are_not_asked_again_once_their_call_has_ended(monkeypatch):
    monkeypatch.setattr(servers, "WAITS", (300.0,))
    asked, together = [], threading.Barrier(4, timeout=60)

    def once(i):
        asked.append(i)
        together.wait()
        raise ServerError("HTTP 401", 401) if i == 3 else ServerError("HTTP 429", 429)

    with pytest.raises(ServerError, match="401"):
        each(lambda i: servers.patiently(lambda: once(i)), range(4), 4, finish=True)
    assert sorted(asked) == [0, 1, 2, 3]


STAGE = """
import json, signal, sys
from pathlib import Path
from stages.reward.judge import Reply, ServerJudge
from stages.running.journal import Journal
from stages.running.stopping import Terminated, stopping

signal.signal(signal.SIGTERM, stopping.heed)
signal.signal(signal.SIGINT, signal.default_int_handler)  # what is started in the background ignores it
judge = ServerJudge(sys.argv[1], "m", timeout_s=600.0, concurrency=32)
journal = Journal(Path(sys.argv[2]), lambda kept: Reply(**{**kept, "logps": ()}))
try:
    journal.ask({str(i): f"request {i}" for i in range(64)}, lambda text: judge.reply(text, 4), 32)
except (Terminated, KeyboardInterrupt):
    print("ended", flush=True)
    sys.exit(143)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stage_ends_while_its_requests_hang_and_keeps_what_was_answered(tmp_path, number):
    """32 requests under way that no server answers have ten minutes each; answers that come within half of the grace
    period are kept, since they are paid.
    """
    hang, late, asked = threading.Event(), threading.Event(), threading.Event()

    def answer(connection, body, n):
        i = int(re.search(r"request (\d+)", json.dumps(body))[1])
        if n >= 34:
            asked.set()
        if i in (0, 1):
            return whole(CHAT)
        (late if i == 2 else hang).wait(120)
        return whole(CHAT) if i == 2 else None

    with raw_server(answer) as server:
        process = subprocess.Popen(
            [sys.executable, "-c", STAGE, server.url, str(tmp_path / "answers.jsonl")],
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
            env={**os.environ, "POSTTRAIN_GRACE_SECONDS": "20"},
        )
        try:
            assert asked.wait(60)
            process.send_signal(number)
            time.sleep(1.0)
            late.set()
            out, _ = process.communicate(timeout=60)
        finally:
            process.kill()
            hang.set()
    assert (out, process.returncode) == ("ended\n", 143)
    kept = [json.loads(line)["key"] for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert sorted(kept) == ["0", "1", "2"] and len(server.seen) == 34


# -- what a server is --------------------------------------------------------------------------------------------------


def test_a_page_in_the_place_of_a_description_is_of_a_plain_server(tiny, tokenizer):  # noqa: F811
    """One that is overloaded, or does not answer in time, is not taken for another kind than it is."""
    from stages.decoding.server_engine import ServerEngine

    with raw_server(lambda connection, body, number: fine(body) if body else whole(HTML)) as server:
        assert ServerEngine(server.url, tokenizer, tiny["policy"], model="m").api == "openai"
        for made in (whole(b"", "429 Too Many Requests"), whole(b"", "408 Request Timeout"), SHORT, drip):
            server.answer = lambda connection, body, number, made=made: (
                made(connection, body) if callable(made) else made
            )
            with pytest.raises(EngineError, match="no OpenAI server answers"):
                ServerEngine(server.url, tokenizer, tiny["policy"], model="m", timeout_s=0.5)


SHORT = BAD["half a body"][0]
