"""Reward models behind a URL (kind remote), against a real server on this machine: what OpenRLHF's ``--remote_rm_url``
asks and gets.
"""

from __future__ import annotations

import json
import math
import threading

import pytest

from stages.chat import renderer_for
from stages.reward.components import RewardComponent
from stages.reward.remote_rewards import RewardServerError
from stages.reward.rewards import Rewards, build_rewards
from stages.running import servers
from tests.chat_server import chat_server
from tests.common import assistant, user


def row(text, answer="4", finish="eos", ids=None, prompt="How many?", **columns):
    return {
        "prompt_row": {
            "row_id": prompt,
            "prompt": user(prompt),
            "answer": answer,
            "extra_json": '{"level": 3}',
            **columns,
        },
        "completion_text": text,
        "completion_ids": ids or [1, 2],
        "finish_reason": finish,
        "prompt_ids": None,
    }


def scored(server, rows, renderer=None, **settings):
    component = RewardComponent(
        **{
            "kind": "remote",
            "name": "rm",
            "url": server.url,
            "endpoint_model": "our-rm",
            "request_form": "messages",
            **settings,
        }
    )
    return Rewards([component], {}, renderer).score(rows)


def lengths(body):
    return json.dumps({"rewards": [float(len(one[-1]["content"])) for one in body["messages"]]}).encode()


def test_it_is_asked_in_batches_as_openrlhf_asks(tiny):
    """The query is the prompt with the policy's template and the response with its end token; numbers come back in
    order, for batches of two, several at once.
    """
    renderer = renderer_for(tiny["policy"])
    rows = []
    for i in range(5):
        prompt = user(f"which, number {i}?")
        start, ids, _ = renderer.completion_ids(prompt, assistant("x" * i + "!"))
        rows.append(
            {
                **row("x" * i + "!", answer=str(i)),
                "prompt_row": {"prompt": prompt, "answer": str(i)},
                "completion_ids": ids,
                "prompt_ids": start,
            }
        )
    with chat_server(
        lambda body: json.dumps({"rewards": [float(label) for label in body["labels"]]}).encode()
    ) as server:
        component = RewardComponent(
            kind="remote", url=server.url + "/get_reward", endpoint_model="our-rm", batch_size=2, key_variable=""
        )
        found = build_rewards([component], {}, renderer=renderer).score(rows)
        assert [one.total for one in found] == [0.0, 1.0, 2.0, 3.0, 4.0] and found[0].parts == {"remote": 0.0}
        assert sorted(len(body["query"]) for body in server.seen) == [1, 2, 2] and all(
            path == "/v1/get_reward" for path, _ in server.calls
        )
        (first,) = [body for body in server.seen if body["labels"] == ["0", "1"]]
        assert list(first) == ["query", "prompts", "labels"]
        assert first["query"] == [
            renderer.decode([*one["prompt_ids"], *one["completion_ids"]], skip_special_tokens=False) for one in rows[:2]
        ]
        assert all(
            query.startswith(prompt) and text in prompt
            for query, prompt, text in zip(first["query"], first["prompts"], ("which, number 0?", "which, number 1?"))
        )
        with pytest.raises(ValueError, match="write request_form=messages"):
            build_rewards([component], {}).score(rows)
        with_view = Rewards([component.model_copy(update={"view": "answer_only"})], {}, renderer)
        server.seen.clear()
        with_view.score([{**rows[0], "completion_text": "<think>so</think>7"}])
        assert server.seen[0]["query"] == [server.seen[0]["prompts"][0] + "7"]


def test_a_server_of_ones_own_is_shown_messages_and_rows(monkeypatch):
    monkeypatch.setenv("RM_KEY", "secret")
    with chat_server(lambda body: json.dumps({"scores": [[0.5]]}).encode()) as server:
        (one,) = scored(
            server, [row("four", category="sums")], score_key="scores", key_variable="RM_KEY", squash="sigmoid"
        )
        assert one.total == pytest.approx(1 / (1 + math.exp(-0.5)))
        assert server.calls[0] == ("/v1", "Bearer secret")
        (body,) = server.seen
        assert (
            body["model"] == "our-rm"
            and body["messages"] == [[*user("How many?"), *assistant("four")]]
            and body["answers"] == ["4"]
            and body["finish_reasons"] == ["eos"]
        )
        assert body["rows"][0]["category"] == "sums" and body["rows"][0]["metadata"] == {"level": 3}
        server.choice = lambda body: b"[1e9, -1e9]"
        assert [one.total for one in scored(server, [row("a"), row("b")], clip=2.0)] == [2.0, -2.0]
        assert [round(one.total, 9) for one in scored(server, [row("a"), row("b")], squash="sigmoid")] == [1.0, 0.0]
        server.seen.clear()
        server.choice = lambda body: b"[3]"
        cut, whole = scored(server, [row("a", finish="length"), row("b")], no_eos_reward=-1.0)
        assert (cut.total, whole.total) == (-1.0, 3.0) and len(server.seen[0]["messages"]) == 1


@pytest.mark.parametrize(
    "answer, why",
    [
        (b"what?", "JSONDecodeError"),
        (b"", "holds no list 'rewards'"),
        (b'{"scores": [1, 2]}', "but only scores; score_key=NAME"),
        (b'{"rewards": [1]}', "1 numbers for 2 answers"),
        (b'{"rewards": [1, 2, 3]}', "3 numbers for 2 answers"),
        (b'{"rewards": 3}', "holds no list"),
        (500, "HTTP 500"),
        (415, "HTTP 415"),
    ],
)
def test_a_server_that_answers_otherwise_leaves_rows_unscorable(answer, why, monkeypatch):
    """Never a zero: the whole batch has the reason, after asking again where that may help."""
    monkeypatch.setattr(servers, "WAITS", (0.0, 0.0))
    monkeypatch.setattr(servers, "pause", lambda seconds: None)
    with chat_server(lambda body: answer) as server:
        found = scored(server, [row("a"), row("b")])
        assert [one.total for one in found] == [None, None] and all(why in one.reasons["rm"] for one in found), found[
            0
        ].reasons
        assert len(server.seen) == (1 if answer == 415 else 3)


@pytest.mark.parametrize(
    "value, why",
    [
        ("NaN", "no finite number"),
        ("null", "no number"),
        ('"7"', "no finite number"),
        ("[1, 2]", "no finite number"),
        ("Infinity", "no finite number"),
        ("1" + "0" * 400, "no finite number"),
    ],
)
def test_one_number_that_is_none_costs_its_own_row(value, why):
    with chat_server(lambda body: f'{{"rewards": [1.5, {value}]}}'.encode()) as server:
        good, bad = scored(server, [row("a"), row("b")])
        assert good.total == 1.5 and bad.total is None and why in bad.reasons["rm"] and len(server.seen) == 1
        good, bad = scored(server, [row("a"), row("b")], normalise="batch")
        assert good.total is not None and bad.total is None, "what has no number is in no statistic"


def test_an_overloaded_server_is_asked_again_and_others_at_once(monkeypatch):
    monkeypatch.setattr(servers, "WAITS", (0.01, 0.02))
    slept, refused, real = [], set(), threading.Event().wait
    monkeypatch.setattr(servers, "pause", slept.append)

    def choice(body):
        real(0.1)
        first = body["messages"][0][-1]["content"]
        if first in ("a", "bb") and first not in refused:
            refused.add(first)
            return 429
        return lengths(body)

    with chat_server(choice) as server:
        found = scored(server, [row(text) for text in ("a", "bb", "ccc", "dddd")], batch_size=1, concurrency=3)
        assert [one.total for one in found] == [1.0, 2.0, 3.0, 4.0]
        assert len(slept) == 2, "what the server asked for, which is longer than our own wait"
        assert all(0.2 <= seconds <= 0.2 + 0.5 * 0.01 for seconds in slept), "and up to half of that one"
        assert 1 < server.most <= 3 and len(server.seen) == 6


@pytest.mark.parametrize("status", (413, 451))
def test_one_answer_that_is_refused_costs_its_own_score(status):
    """HTTP 413 of a batch is about one of its answers: it is halved until it is alone."""
    with chat_server(
        lambda body: status if any(len(one[-1]["content"]) > 5 for one in body["messages"]) else lengths(body)
    ) as server:
        found = scored(server, [row(text) for text in ("a", "bb", "too long", "ccc", "dddd")])
        assert [one.total for one in found] == [1.0, 2.0, None, 3.0, 4.0] and f"HTTP {status}" in found[2].reasons["rm"]


def test_a_slow_answer_costs_its_rows_and_a_server_that_is_away_ends_the_stage(monkeypatch):
    """A run that goes on without its rewards would learn from the few that are left, and be kept as if it had all."""
    monkeypatch.setattr(servers, "WAITS", ())
    with chat_server(lambda body: threading.Event().wait(1.0) or lengths(body)) as server:
        (one,) = scored(server, [row("a")], timeout_s=0.2)
        assert one.total is None and "Timeout" in one.reasons["rm"]
        with pytest.raises(RewardServerError, match="NO_SUCH_KEY.*key_variable=NAME.*the same command continues"):
            scored(server, [row("a")], key_variable="NO_SUCH_KEY")
        for status in (401, 404, 429, 503):
            server.choice = lambda body: status
            with pytest.raises(RewardServerError, match=f"HTTP {status}.*the same command continues"):
                scored(server, [row("a"), row("b")])
    with pytest.raises(RewardServerError, match="refused.*the same command continues"):
        scored(server, [row("a")])


def test_the_name_and_not_the_url_is_what_a_result_is_known_by():
    base = {"kind": "remote", "url": "http://a:1/x", "endpoint_model": "rm"}
    of = lambda **more: RewardComponent(**{**base, **more}).identity()
    assert (
        of() == of(url="https://b:2/y", concurrency=3, batch_size=5)
        and of() != of(endpoint_model="other")
        and of() != of(request_form="messages")
    )
    assert (
        "url" not in of()
        and RewardComponent(**base).timeout_s == 60.0
        and RewardComponent(**base).missing_policy == "invalidate"
    )
    again = RewardComponent.model_validate(RewardComponent(**base).model_dump())
    assert again == RewardComponent(**base)


@pytest.mark.parametrize(
    "wrong, text",
    [
        ({"url": ""}, "write url=http://HOST:PORT/PATH"),
        ({"url": "localhost:5000"}, "write url=http"),
        ({"endpoint_model": ""}, "needs endpoint_model"),
        ({"endpoint": "http://a"}, "write url"),
        ({"empty_reward": 0.0}, "shown empty answers too"),
        ({"kind": "judge"}, "url is for kind remote"),
        ({"kind": "verifier", "url": "", "endpoint_model": "", "score_key": "x"}, "score_key is for kind remote"),
        ({"kind": "model", "url": "", "endpoint_model": "", "batch_size": 4}, "batch_size is for kind remote"),
    ],
)
def test_what_would_not_be_read_is_refused(wrong, text):
    with pytest.raises(ValueError, match=text):
        RewardComponent(**{"kind": "remote", "url": "http://a:1/x", "endpoint_model": "rm", **wrong})
