"""Connections that are kept for the requests that follow, over real sockets: what they save, and that no answer reaches
another request than its own.
"""

import os
import re
import signal
import socket
import struct
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from stages.running import connections
from stages.running.http_json import ServerError, request_json
from stages.running.servers import NOBODY, rule_of
from tests.raw_server import raw_server, whole


def echo(connection, body, number):
    return whole(body)


def test_requests_that_follow_need_no_new_connection():
    """Also of other threads, and behind an answer that is an error."""
    with raw_server(
        lambda connection, body, number: whole(body, "429 Too" if number == 3 else "200 OK"), keep=99
    ) as server:
        assert [request_json(server.url, {"n": n}) for n in range(2)] == [{"n": 0}, {"n": 1}]
        with pytest.raises(ServerError, match="HTTP 429"):
            request_json(server.url, {"n": 2})
        thread = threading.Thread(target=request_json, args=(server.url, {"n": 3}))
        thread.start()
        thread.join()
        assert (len(server.seen), server.connections) == (4, 1)
        with ThreadPoolExecutor(8) as threads:
            found = list(threads.map(lambda n: request_json(server.url, {"n": n}), range(200)))
        assert found == [{"n": n} for n in range(200)] and server.connections <= 8
        assert {re.search(r"User-Agent: (\S*)", head)[1] for head in server.heads} == {"posttrain"}


@pytest.mark.parametrize("how", ["closed", "reset"])
def test_a_connection_that_the_server_ended_meanwhile_costs_nothing(how):
    """Neither a wait nor a question more: the server never saw the request that was sent on it."""

    def answer(connection, body, number):
        connection.sendall(whole(body))
        if how == "reset":
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.close()

    with raw_server(answer) as server:
        assert [request_json(server.url, {"n": n}) for n in range(30)] == [{"n": n} for n in range(30)]
        assert (len(server.seen), server.connections) == (30, 30)


def test_a_connection_that_ends_under_the_request_is_asked_for_again_where_it_was_kept():
    """The server read it: whether it is asked again is a matter of what it answered, not of who closes first."""

    def answer(connection, body, number):
        if number in (2, 4):
            connection.shutdown(socket.SHUT_RDWR)
            return None
        return whole(body)

    with raw_server(answer, keep=2) as server:
        assert request_json(server.url, {"n": 1}) == {"n": 1}
        assert request_json(server.url, {"n": 2}) == {"n": 2}, "sent again on a new connection"
        assert [body["n"] for body in server.seen] == [1, 2, 2]
    with raw_server(lambda connection, body, number: connection.shutdown(socket.SHUT_RDWR)) as server:
        with pytest.raises(ServerError, match="RemoteDisconnected"):
            request_json(server.url, {})
        assert len(server.seen) == 1, "a new one that ends is the server's answer"


def test_what_a_server_sends_behind_an_answer_answers_no_other_request():
    def twice(connection, body, number):
        return whole(body) + whole({"n": "of nobody"})

    with raw_server(twice, keep=99) as server:
        assert [request_json(server.url, {"n": n}) for n in range(5)] == [{"n": n} for n in range(5)]


def test_an_answer_that_came_too_late_is_not_the_next_ones():
    gone = threading.Event()

    def answer(connection, body, number):
        if number == 1:
            gone.wait(30)
        return whole(body)

    with raw_server(answer, keep=99) as server:
        with pytest.raises(ServerError, match="no answer came in 0.2 seconds"):
            request_json(server.url, {"n": 0}, timeout_s=0.2)
        gone.set()
        assert [request_json(server.url, {"n": n}) for n in (1, 2)] == [{"n": 1}, {"n": 2}]
        assert server.connections == 2


def test_a_connection_that_nobody_used_for_long_is_not_used_again(monkeypatch):
    """Gateways forget connections that are silent for minutes, as between two steps of RL, and tell nobody."""
    with raw_server(echo, keep=99) as server:
        monkeypatch.setattr(connections, "LONGEST_IDLE", 0.0)
        for n in range(3):
            assert request_json(server.url, {"n": n}) == {"n": n}
        assert server.connections == 3


def test_a_fork_does_not_ask_over_its_parents_connections():
    """It would read the answer that its parent waits for, and the parent its own."""
    with raw_server(echo, keep=99) as server:
        assert request_json(server.url, {"n": 0}) == {"n": 0}
        for n in range(1, 5):
            child = os.fork()
            if child == 0:
                signal.alarm(60)
                os._exit(0 if request_json(server.url, {"n": -n}) == {"n": -n} else 1)
            assert request_json(server.url, {"n": n}) == {"n": n}
            assert os.waitpid(child, 0)[1] == 0
        assert server.connections == 5, "the parent's, and one of each child"


def test_a_fork_while_a_thread_makes_connections_is_not_blocked():
    with raw_server(echo) as server:
        with connections._lock:
            child = os.fork()
            if child == 0:
                signal.alarm(60)
                os._exit(0 if request_json(server.url, {"n": 1}) == {"n": 1} else 1)
            assert os.waitpid(child, 0)[1] == 0


def test_looking_up_a_name_is_under_the_deadline(monkeypatch):
    """A resolver that does not answer takes half a minute, whatever a socket's time-out is."""
    gate = threading.Event()
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *arguments, **more: gate.wait(120) and [])
    try:
        with pytest.raises(ServerError, match="no connection came about in 0.3 seconds") as raised:
            request_json("http://judge.invalid/v1", {}, timeout_s=0.3)
        assert not gate.is_set() and rule_of(raised.value) is NOBODY
    finally:
        gate.set()


@pytest.mark.parametrize("slow", ["headers", "body", "between chunks"])
def test_bytes_that_keep_coming_do_not_move_the_deadline(slow):
    """Of a kept connection too, whose second request has a deadline of its own."""
    over = threading.Event()

    def answer(connection, body, number):
        if number == 1:
            return whole(body)
        chunked = slow == "between chunks"
        connection.sendall(b"HTTP/1.1 200 OK\r\n")
        if slow != "headers":
            connection.sendall(b"Transfer-Encoding: chunked\r\n\r\n" if chunked else b"Content-Length: 5000\r\n\r\n")
        for _ in range(3000):
            if over.wait(0.01):
                return None
            connection.sendall({"headers": b"X: 1\r\n", "body": b" ", "between chunks": b"1\r\n \r\n"}[slow])

    with raw_server(answer, keep=99) as server:
        assert request_json(server.url, {"n": 1}, timeout_s=60.0) == {"n": 1}
        with pytest.raises(ServerError, match="only a part of the answer came in 0.4 seconds"):
            request_json(server.url, {"n": 2}, timeout_s=0.4)
        over.set()
        server.answer = echo
        assert request_json(server.url, {"n": 3}) == {"n": 3}


def test_a_proxy_for_everything_is_asked_and_one_that_is_none_is_told_without_its_user(monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "no_proxy", "NO_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with raw_server(echo, keep=99) as proxy:
        monkeypatch.setenv("all_proxy", f"http://127.0.0.1:{proxy.port}")
        assert [request_json("http://judge.invalid/v1", {"n": n}) for n in range(2)] == [{"n": 0}, {"n": 1}]
        assert proxy.heads[0].startswith("POST http://judge.invalid/v1 HTTP/1.1") and proxy.connections == 1
        monkeypatch.setenv("http_proxy", f"127.0.0.1:{proxy.port}")  # as some write it
        assert request_json("http://judge.invalid/v1", {"n": 2}) == {"n": 2}
    for address in ("socks5://me:secret@127.0.0.1:9", "http://me:secret@host:port"):
        monkeypatch.setenv("http_proxy", address)
        with pytest.raises(ServerError, match="export http_proxy=http://HOST:PORT, or no_proxy=HOST") as raised:
            request_json("http://judge.invalid/v1", {})
        assert raised.value.final and rule_of(raised.value) is NOBODY and "secret" not in str(raised.value)


@pytest.mark.parametrize("address", ["http://[judge/v1", "http://judge:port/v1", "http:///v1"])
def test_an_address_of_nobody_ends_the_stage_at_once(address):
    with pytest.raises(ServerError) as raised:
        request_json(address, {})
    assert raised.value.final and rule_of(raised.value) is NOBODY


def test_a_stage_that_asks_no_server_does_not_import_the_client():
    import subprocess
    import sys

    ask = "import sys, stages.running.servers; sys.exit('urllib3' in sys.modules or 'http.client' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", ask], cwd=os.getcwd()).returncode == 0
