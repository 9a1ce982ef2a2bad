"""`posttrain chat`: answers are what the sampler draws for the rendered turns, shown as they come."""

from __future__ import annotations

import io
import json

import pytest

from flows.chat import Conversation, converse
from stages.chat import renderer_for
from stages.decoding.sampler import Sampler, SamplingParams
from stages.models.modeling import load_frozen
from stages.spec import ConfigError

GIVEN = {"system": None, "temperature": 1.0, "top_p": 1.0, "max_tokens": 40, "seed": 3, "as_json": False}


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("POSTTRAIN_HOME", str(tmp_path / "home"))


def drawn(path: str, *conversations, n: int = 40) -> list:
    """Independent of the command: one call of the sampler per conversation, turn k with seed 3 + k."""
    renderer = renderer_for(path)
    sampler = Sampler(load_frozen(path, "cpu"), renderer.tokenizer, max_batch=1)
    params = SamplingParams(temperature=1.0, max_new_tokens=n, stop_ids=frozenset(renderer.stop_ids))
    return [
        sampler.generate([renderer.prompt_ids(messages)], params, [[3 + k]])[0][0]
        for k, messages in enumerate(conversations)
    ]


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def marked(reply) -> str:
    return reply.text + (" […]" if reply.finish_reason == "length" else "") + "\n"


def test_turns_continue_until_reset_and_the_printed_pieces_are_the_answers(tiny, monkeypatch, capsys):
    path, system = tiny["policy"], {"role": "system", "content": "Be brief."}
    monkeypatch.setattr("sys.stdin", io.StringIO("what is two\nplus\n/reset\nagain\n\nnot read\n"))
    converse(path, prompt=None, **GIVEN | {"system": "Be brief."})
    first = [system, user("what is two")]
    [one] = drawn(path, first)
    second = [*first, {"role": "assistant", "content": one.text}, user("plus")]
    replies = drawn(path, first, second, [system, user("again")])
    assert capsys.readouterr().out == "".join(map(marked, replies))
    assert any("\ufffd" in reply.text for reply in replies)  # bytes that are no characters were held back and shown


def test_an_answer_is_shown_token_by_token(tiny, monkeypatch):
    pieces = []
    monkeypatch.setattr("builtins.print", lambda text="", **_: pieces.append(text))
    converse(tiny["policy"], prompt="what is two", **GIVEN)
    assert len([one for one in pieces if one]) > 10 and "".join(pieces) + "\n" == marked(
        drawn(tiny["policy"], [user("what is two")])[0]
    )


def test_json_is_one_line(tiny, capsys):
    converse(tiny["policy"], prompt="what", **GIVEN | {"as_json": True, "max_tokens": 5})
    [reply] = drawn(tiny["policy"], [user("what")], n=5)
    [line] = capsys.readouterr().out.splitlines()
    found = json.loads(line)
    assert (found["answer"], found["tokens"], found["finish_reason"]) == (reply.text, 5, "length")


def test_an_answer_takes_the_room_that_is_left_and_a_full_conversation_says_so(tiny, monkeypatch, capsys):
    talk = Conversation(tiny["policy"], None, 1.0, 1.0, 10_000, 0)
    while (reply := talk.answer("what is two", streamed=False)).finish_reason != "length":
        talk.reset()
    asked = len(talk.renderer.prompt_ids([user("what is two")]))
    assert asked + len(reply.ids) == 256
    before = list(talk.messages)
    with pytest.raises(ConfigError, match="the model 256 positions, so that no answer fits; write less"):
        talk.answer("two " * 300, streamed=False)
    assert talk.messages == before
    monkeypatch.setattr("sys.stdin", io.StringIO("two " * 300 + "\n/reset\nwhat\n"))
    converse(tiny["policy"], prompt=None, **GIVEN)
    told = capsys.readouterr()
    assert "or write /reset" in told.err and told.out == marked(drawn(tiny["policy"], [user("what")])[0])


def test_what_writes_no_words_is_refused(tiny):
    with pytest.raises(ConfigError, match="whose head gives scores and no words; give a language model"):
        converse(tiny["reward"], prompt="what", **GIVEN)
