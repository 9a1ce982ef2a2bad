"""Servers that go away, send elsewhere or are asked through a proxy, and keys that must not be seen anywhere."""

import re
import shutil
import socket
import ssl
import subprocess
import threading
import time
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from stages.decoding.engines import EngineError
from stages.decoding.sampler import SamplingParams
from stages.decoding.server_engine import ServerEngine
from stages.running import servers
from stages.running.http_json import ServerError, request_json
from stages.running.servers import rule_of
from stages.spec import ConfigError, parse_config
from tests.chat_server import chat_server
from tests.evaluation.conftest import tiny  # noqa: F401
from tests.sampler import fake_vllm
from tests.sampler.servers import vllm_server
from tests.serving import serving

PROMPTS, SEEDS, PARAMS = [[1, 40], [1, 50]], [[1, 2, 3], [4, 5, 6]], SamplingParams(max_new_tokens=3)
KEY = "sk-nobody-sees-this"


@pytest.fixture(autouse=True)
def no_waits(monkeypatch):
    monkeypatch.setattr(servers, "WAITS", (0.0,))


@pytest.fixture(scope="module")
def tokenizer(tiny):  # noqa: F811
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny["policy"])


class Answers(BaseHTTPRequestHandler):
    """Every request gets ``server.answer``: (status, headers, body), the body made of the request's headers."""

    def do_GET(self):
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.seen.append((self.command, self.path, dict(self.headers)))
        status, headers, body = self.server.answer
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body(self.headers).encode() if callable(body) else body.encode())

    do_POST = do_GET

    def log_message(self, *args):
        pass


@pytest.fixture()
def answers():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    server.seen, server.answer, server.url = [], (200, {}, "{}"), f"http://127.0.0.1:{server.server_port}/v1"
    with serving(server):
        yield server


# -- servers that go away ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("after", [1, 4])
def test_a_server_that_dies_costs_no_rows(tiny, tokenizer, monkeypatch, after):  # noqa: F811
    """Rows that it did not draw were left out, and an evaluation of the others was kept as the result."""
    calls = []

    def dies(url, body=None, **more):
        if url.endswith("/completions"):
            calls.append(body)
            if len(calls) > after:
                raise ServerError("URLError: connection refused", unreachable=True)
        return request_json(url, body, **more)

    with vllm_server(fake_vllm.LLM(tiny["policy"])) as (url, _):
        engine = ServerEngine(url, tokenizer, tiny["policy"], concurrency=1)
        whole, told = engine.generate(PROMPTS, PARAMS, SEEDS), []
        monkeypatch.setattr("stages.decoding.server_engine.request_json", dies)
        with pytest.raises(EngineError, match=r"no completions any more.*Check engine_url and engine_model.*continues"):
            engine.generate(PROMPTS, PARAMS, SEEDS, lambda *progress: told.append(progress))
        assert len(calls) == after + 2, "asked for once more, and nothing behind it"
        assert told == [(i + 1, 6) for i in range(after)]
        after = 100
        again = engine.generate(PROMPTS, PARAMS, SEEDS)
        assert [[c.ids for c in group] for group in again] == [[c.ids for c in group] for group in whole]


@pytest.mark.parametrize("status", [401, 402, 404, 429, 503])
def test_a_server_that_takes_nobodys_requests_ends_the_stage(tiny, tokenizer, answers, status):  # noqa: F811
    engine = ServerEngine(answers.url, tokenizer, tiny["policy"], model="tiny", api="vllm")
    answers.answer = (status, {}, "no")
    with pytest.raises(EngineError, match=f"HTTP {status}: no"):
        engine.generate(PROMPTS, PARAMS, SEEDS)


def test_a_server_that_fails_on_everything_is_not_asked_for_everything(tiny, tokenizer):  # noqa: F811
    """Each row is asked for several times, with waits, and `transformers serve` answers 500 to a model that it does not
    have: a stage waited for hours. One prompt that is too much for a server costs its own rows.
    """
    prompts, seeds = [[1, 40 + i] for i in range(8)], [[i, 10 + i] for i in range(8)]
    with vllm_server(fake_vllm.LLM(tiny["policy"]), lambda number: 3 <= number <= 6) as (url, _):
        found = ServerEngine(url, tokenizer, tiny["policy"], concurrency=1).generate(prompts, PARAMS, seeds)
        assert [[c.finish_reason for c in group] for group in found[:3]] == [
            ["length"] * 2,
            ["error"] * 2,
            ["length"] * 2,
        ]
    with vllm_server(fake_vllm.LLM(tiny["policy"]), lambda number: number > 2) as (url, seen):
        with pytest.raises(EngineError, match="no completions any more.*HTTP 500"):
            ServerEngine(url, tokenizer, tiny["policy"], concurrency=1).generate(prompts, PARAMS, seeds)
        assert len(seen) == 2 + 4 + 4 + 2 + 2, "the first prompt, two that failed, a row of the third, one of the first"


@pytest.mark.parametrize("status", [500, 504, 403, None])
def test_prompts_that_are_too_much_for_a_server_cost_their_own_rows(tiny, tokenizer, monkeypatch, status):  # noqa: F811
    """Also several at once, whose answers fail last: others were answered while they were waited for."""

    def asked(url, body=None, **more):
        if url.endswith("/completions") and body["prompt"][-1] < 43:
            answered.wait(30)
            time.sleep(0.3)
            raise ServerError(f"HTTP {status}", status)
        found = request_json(url, body, **more)
        if url.endswith("/completions"):
            answered.set()
        return found

    answered = threading.Event()

    monkeypatch.setattr("stages.decoding.server_engine.request_json", asked)
    with vllm_server(fake_vllm.LLM(tiny["policy"])) as (url, _):
        engine = ServerEngine(url, tokenizer, tiny["policy"], concurrency=8)
        found = engine.generate([[1, 40 + i] for i in range(8)], PARAMS, [[i] for i in range(8)])
    assert [group[0].finish_reason for group in found] == ["error"] * 3 + ["length"] * 5


@pytest.mark.parametrize("status", [403, 504])
def test_a_prompt_behind_an_answered_one_costs_its_own_row(tiny, tokenizer, monkeypatch, status):  # noqa: F811
    def asked(url, body=None, **more):
        if url.endswith("/completions") and body["prompt"][-1] in (42, 45):
            raise ServerError(f"HTTP {status}", status)
        return request_json(url, body, **more)

    monkeypatch.setattr("stages.decoding.server_engine.request_json", asked)
    with vllm_server(fake_vllm.LLM(tiny["policy"])) as (url, _):
        engine = ServerEngine(url, tokenizer, tiny["policy"], concurrency=1)
        found = engine.generate([[1, 40 + i] for i in range(6)], PARAMS, [[i] for i in range(6)])
    assert [group[0].finish_reason for group in found] == ["length", "length", "error", "length", "length", "error"]


def test_a_server_that_is_too_slow_says_which_settings_give_it_time(tiny, tokenizer):  # noqa: F811
    from stages.reward.judge import JudgeError, ServerJudge

    slow = threading.Event()
    with chat_server(lambda body: slow.wait(1.0)) as server:
        engine = ServerEngine(server.url, tokenizer, tiny["policy"], model="m", api="vllm", timeout_s=0.1)
        with pytest.raises(EngineError, match=r"engine_timeout_s=0.1: write a larger one, or a smaller engine_conc"):
            engine.generate([[1, 40], [1, 41], [1, 42]], PARAMS, [[1], [2], [3]])
        with pytest.raises(JudgeError, match="timeout_s=0.1: write a larger one, or a smaller concurrency"):
            ServerJudge(server.url, "m", timeout_s=0.1).answers(["x"], 4, 0)
        slow.set()


def test_a_vllm_server_that_was_started_again_is_not_asked_with_its_old_weights(tiny, tokenizer, monkeypatch):  # noqa: F811
    down, gateway = [], []

    def restarts(url, body=None, **more):
        if url.endswith("/completions") and gateway:
            raise ServerError("HTTP 502: Bad Gateway", 502)
        if url.endswith("/completions") and down:
            raise ServerError("URLError: connection refused", unreachable=down.pop())
        return request_json(url, body, **more)

    monkeypatch.setattr("stages.decoding.server_engine.request_json", restarts)
    with vllm_server(fake_vllm.LLM(tiny["policy"])) as (url, _):
        engine = ServerEngine(url, tokenizer, tiny["policy"], concurrency=1)
        down.append(True)
        assert engine.generate(PROMPTS, PARAMS, SEEDS), "it has the weights that it was started with"
        engine.update(tiny["other"], "other")
        down.append(False)  # a broken answer of a server that still runs
        assert engine.generate(PROMPTS, PARAMS, SEEDS)
        down.append(True)
        with pytest.raises(EngineError, match="does not have the policy's weights. Start it"):
            engine.generate(PROMPTS, PARAMS, SEEDS)
        engine.update(tiny["other"], "other")
        gateway.append(True)
        with pytest.raises(EngineError, match="HTTP 502.*does not have the policy's weights. Start it"):
            engine.generate(PROMPTS, PARAMS, SEEDS)


def test_a_writers_server_that_goes_away_costs_no_requests(tmp_path):
    """Also none of those that were answered, which may have been paid: the next run asks for the others."""
    from stages.decoding.writers import ServerWriter
    from stages.running import journal
    from stages.write_prompts import Config

    def write(seed):
        config = Config(endpoint=server.url, endpoint_model="m", engine_concurrency=1)
        journal.begin(tmp_path / "answers", 0, 0, config.model_dump(mode="json"))
        try:
            return ServerWriter(config).write(["a", "b", "c"], [seed, seed, seed], 5, 0.5)
        finally:
            journal.end()

    fine = {"message": {"content": "x"}, "finish_reason": "stop"}
    with chat_server(lambda body: 400 if len(server.seen) == 2 else fine) as server:
        assert [one.error is None for one in write(1)] == [True, False, True], "one that is refused is its own"
        server.choice = lambda body: 403 if len(server.seen) == 5 else fine
        assert [one.error is None for one in write(2)] == [True, False, True], "so is one whose text is flagged"
        server.choice = lambda body: 503 if len(server.seen) > 7 else fine
        with pytest.raises(EngineError, match="HTTP 503.*the same command continues"):
            write(3)
        server.seen.clear()
        server.choice = lambda body: fine
        assert [one.text for one in write(3)] == ["x"] * 3
        assert [body["messages"][0]["content"] for body in server.seen] == ["b", "c"]


# -- the way there -----------------------------------------------------------------------------------------------------


def test_a_proxy_is_not_asked_for_this_machines_own_servers(answers, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    for host in ("127.0.0.1", "localhost"):
        assert request_json(f"http://{host}:{answers.server_port}/v1") == {}
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{answers.server_port}")
    assert request_json("http://judge.invalid/v1") == {} and answers.seen[-1][1] == "http://judge.invalid/v1"


def test_a_server_that_cannot_be_reached_says_what_is_in_the_way(answers, monkeypatch, tmp_path):
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    monkeypatch.setenv("https_proxy", f"http://me:{KEY}@127.0.0.1:{port}")
    with pytest.raises(ServerError, match=f"refused.*proxy at 127.0.0.1:{port}, no_proxy=HOST asks without") as raised:
        request_json("https://judge.invalid/v1", {})
    assert rule_of(raised.value).then == "stage" and KEY not in str(raised.value)
    monkeypatch.setenv("no_proxy", "judge.invalid")
    with pytest.raises(ServerError) as raised:
        request_json("https://judge.invalid/v1", {})
    assert rule_of(raised.value).then == "stage" and "proxy" not in str(raised.value)
    with pytest.raises(ServerError, match="written with http://"):
        request_json(f"https://127.0.0.1:{answers.server_port}/v1", {})


@pytest.mark.skipif(shutil.which("openssl") is None, reason="there is no openssl to make a certificate with")
def test_a_certificate_that_nobody_knows_says_how_it_is_made_known(answers, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    made = "req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -keyout key.pem -out cert.pem".split()
    subprocess.run(["openssl", *made, "-addext", "subjectAltName=DNS:localhost"], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain("cert.pem", "key.pem")
    answers.socket = context.wrap_socket(answers.socket, server_side=True)
    url = f"https://localhost:{answers.server_port}/v1"
    with pytest.raises(ServerError, match="CERTIFICATE_VERIFY_FAILED.*export SSL_CERT_FILE=FILE") as raised:
        request_json(url, {})
    assert raised.value.final and rule_of(raised.value).then == "stage"
    monkeypatch.setenv("SSL_CERT_FILE", "cert.pem")
    assert request_json(url, {}) == {}


def test_a_date_after_which_a_server_wants_to_be_asked_is_waited_for(answers, monkeypatch):
    slept = []
    monkeypatch.setattr(servers, "pause", slept.append)
    for said, least, most in ((formatdate(time.time() + 60, usegmt=True), 55, 61), ("soon", 0, 0), ("7", 7, 7)):
        answers.answer = (429, {"Retry-After": said}, "")
        with pytest.raises(ServerError):
            servers.patiently(lambda: request_json(answers.url, {}))
        assert least <= slept.pop() <= most


def test_a_request_that_is_sent_on_says_where_and_takes_no_key_along(answers, tiny, tokenizer, monkeypatch):  # noqa: F811
    """urllib would follow with the key to any host, and make a GET of a POST, which servers answer with 405."""
    monkeypatch.setenv("A_KEY", KEY)
    other = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    other.seen, other.answer = [], (200, {}, "{}")
    with serving(other):
        there = f"http://127.0.0.1:{other.server_port}/v1"
        for status in (301, 302, 307, 308):
            answers.answer = (status, {"Location": there}, "")
            for body in (None, {"a": 1}):
                with pytest.raises(ServerError, match=f"{there}; write that address") as raised:
                    request_json(answers.url, body, key_variable="A_KEY")
                assert (rule_of(raised.value).then, rule_of(raised.value).again) == ("stage", False)
        with pytest.raises(EngineError, match=f"{there}; write that address"):
            ServerEngine(answers.url, tokenizer, tiny["policy"])
        assert other.seen == []


def test_a_proxy_that_does_not_get_through_is_no_plain_server(answers, tiny, tokenizer):  # noqa: F811
    answers.answer = (502, {}, "Bad Gateway")
    with pytest.raises(EngineError, match="no OpenAI server answers at .*HTTP 502: Bad Gateway"):
        ServerEngine(answers.url, tokenizer, tiny["policy"], model="m")


# -- keys --------------------------------------------------------------------------------------------------------------


def test_a_key_of_a_file_is_taken_without_its_line_break_and_shown_nowhere(answers, monkeypatch):
    """http.client shows a key with a line break in its error, and some servers repeat the key that they refuse."""
    monkeypatch.setenv("A_KEY", KEY + "\n")
    request_json(answers.url, {}, key_variable="A_KEY")
    assert answers.seen[-1][2]["Authorization"] == f"Bearer {KEY}"
    answers.answer = (401, {}, lambda headers: f"I do not know {headers['Authorization']}")
    with pytest.raises(ServerError, match=re.escape("I do not know Bearer (the key)")):
        request_json(answers.url, {}, key_variable="A_KEY")
    for value, said in ((f"{KEY}\n{KEY}", "holds a line break"), (f"{KEY}\u2026", "no key has"), (" ", "is empty")):
        monkeypatch.setenv("A_KEY", value)
        with pytest.raises(ServerError, match=said) as raised:
            request_json(answers.url, {}, key_variable="A_KEY")
        assert raised.value.status == 401 and KEY not in str(raised.value)


@pytest.mark.parametrize(
    "stage, settings",
    [
        ("evaluate", {"engine": "server", "engine_url": "http://a/v1", "engine_key_variable": KEY}),
        ("evaluate", {"engine": "server", "engine_url": f"http://me:{KEY}@a:8000/v1"}),
        ("evaluate", {"engine": "server", "engine_url": "http://a/v1", "api_key": KEY}),
        ("evaluate", {"mt_bench": {"endpoint": "http://a/v1", "endpoint_model": "m", "key_variable": KEY}}),
        ("judge", {"endpoint": f"https://{KEY}@a/v1", "endpoint_model": "m"}),
        ("judge", {"endpoint": "http://a/v1", "endpoint_model": "m", "key_variable": KEY}),
        ("revise", {"endpoint": f"https://a/v1?api_key={KEY}", "endpoint_model": "m"}),
        ("rl", {"rewards": [{"kind": "remote", "url": f"https://a/x?accessToken={KEY}"}]}),
        ("rl", {"rewards": [{"kind": "remote", "url": f"https://a/x?code={KEY}"}]}),
        ("objective", {"proposer": "server", "endpoint": "http://a", "endpoint_model": "m", "key_variable": KEY}),
        ("rl", {"rewards": [{"kind": "remote", "url": f"http://a/x?token={KEY}", "endpoint_model": "m"}]}),
        ("rl", {"rewards": [{"kind": "judge", "endpoint": f"http://:{KEY}@a/v1", "endpoint_model": "m"}]}),
    ],
)
def test_a_key_in_a_setting_is_refused_and_not_repeated(stage, settings):
    """It was kept in records, logs and MLflow, and shown by the error that said that no variable has its name."""
    from stages.registry import get_spec

    with pytest.raises(ConfigError, match="environment variable|no such setting") as raised:
        parse_config(get_spec(stage), settings)
    assert KEY not in str(raised.value)


@pytest.mark.parametrize(
    "address, said",
    [
        ("localhost:8000/v1", "begins with http:// or https://"),
        ("http://a/v1/chat/completions", "write http://a/v1"),
        ("http://a/v1/completions/", "write http://a/v1"),
        ("http://a/v1?version=2", "write http://a/v1"),
    ],
)
def test_an_address_that_no_path_can_follow_says_what_to_write(address, said):
    from stages.registry import get_spec

    with pytest.raises(ConfigError, match=said):
        parse_config(get_spec("judge"), {"endpoint": address, "endpoint_model": "m"})
