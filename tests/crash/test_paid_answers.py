"""kill -9 of stages that ask servers, at any request: the next run asks for what is missing, nothing twice but what was
under way, and ends with the bytes of an undisturbed one.
"""

import collections
import contextlib
import hashlib
import json
import random
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from stages.decoding.engines import EngineError
from stages.decoding.sampling import SamplingParams
from stages.decoding.server_engine import ServerEngine
from stages.reward.judge import JudgeError, ServerJudge
from stages.reward.remote_rewards import Answer, RewardServer
from stages.running import journal
from storage.files import tree_digest
from storage.work import answers_kept
from tests.chat_server import chat_server
from tests.evaluation.conftest import tiny  # noqa: F401
from tests.processes import UNDRAWN
from tests.sampler import fake_vllm
from tests.sampler.servers import vllm_server
from tests.training.conftest import data, spec  # noqa: F401

AT_ONCE = 2


def number(text: str, of: int) -> int:
    return int(hashlib.sha256(text.encode()).hexdigest(), 16) % of


def answer(body):
    """A judge's points or words, or a reward server's numbers: functions of what is asked, points of the seed too."""
    if "rewards" in body or "answers" in body:
        return json.dumps({"rewards": [number(json.dumps(one), 100) / 10 for one in body["messages"]]}).encode()
    text = json.dumps(body)
    said = {
        "message": {"content": f"Fine{',' * number(text, 2)} it is. Score: {number(text, 6)}"},
        "finish_reason": "stop",
    }
    if body.get("logprobs"):
        likely = [{"token": str(i), "logprob": -1.0 - number(f"{i}{json.dumps(body)}", 40) / 10} for i in range(1, 11)]
        said |= {"logprobs": {"content": [{"token": "7", "logprob": -1.0, "top_logprobs": likely}]}}
    return said


def rewards(url, judge):
    return [
        {
            "name": "judged",
            "kind": "judge",
            "endpoint": url,
            "endpoint_model": "judge",
            "concurrency": AT_ONCE,
            **judge,
        },
        {
            "name": "remote",
            "kind": "remote",
            "url": f"{url}/scores",
            "request_form": "messages",
            "endpoint_model": "scorer",
            "batch_size": 2,
            "concurrency": AT_ONCE,
        },
    ]


POINTS = {"judge_mode": "additive", "judge_samples": 2}
SAMPLING = {"max_completion_length": 6, "logit_bias": {2: 4.0}}  # 2 ends a completion: what is cut is not judged
RL = {
    **SAMPLING,
    "num_generations": 2,
    "max_steps": 6,
    "prompts_per_step": 4,
    "learning_rate": 1e-2,
    "reward_override": "random",
}
STAGES = {  # settings, the judge's, inputs
    "rejection": ({**SAMPLING, "num_generations": 2, "block": 8, "max_prompts": 20}, POINTS, {"prompts": "prompts"}),
    "evaluate": (
        {**SAMPLING, "num_samples": 2, "chunk": 8, "split": "train", "limit": 20},
        POINTS,
        {"prompts": "prompts"},
    ),
    "constrain": ({"kinds": ["punctuation"], "block": 8, "validation_fraction": 0}, None, {"prompts": "prompts"}),
    "rl": (RL, POINTS, {"data": "prompts"}),
    "rl on two ranks": (RL, POINTS, {"data": "prompts"}),
    # the same answers again and again, of which the judge is asked once, however often the stage is killed
    "rl of few prompts": (
        {**RL, "max_prompts": 6, "max_completion_length": 3, "logit_bias": {2: 8.0, 40: 7.0, 50: 7.0}, "max_steps": 10},
        {"judge_mode": "score"},
        {"data": "prompts"},
    ),
}


@contextlib.contextmanager
def asked(tiny, what, spec, data, tmp_path):  # noqa: F811
    """``begin(name)`` -> (SPEC file, requests so far, of engine and rewards together) of one stage over servers."""
    config, judge, inputs = STAGES[what]
    with chat_server(answer) as rewarded, vllm_server(fake_vllm.LLM(tiny["policy"])) as (url, drawn):
        rewarded.usage = {"prompt_tokens": 7, "completion_tokens": 3}

        def begin(name):
            sampled = {"engine": "server", "engine_url": url, "engine_model": "tiny"}
            settings = {**config, "engine_concurrency": AT_ONCE} | (
                {**sampled, "rewards": rewards(rewarded.url, judge)}
                if judge
                else {"endpoint": rewarded.url, "endpoint_model": "writer"}
            )
            given = {name: data[kind] for name, kind in inputs.items()} | ({"model": tiny["policy"]} if judge else {})
            file = tmp_path / f"{name}.json"
            file.write_text(json.dumps(spec(what.split()[0], settings, given, name) | {"key": "of-both"}))
            return file

        yield begin, drawn, rewarded.seen


def counts(*requests):
    return collections.Counter(json.dumps(one, sort_keys=True) for seen in requests for one in seen)


def made(folder: Path) -> dict:
    result = json.loads((folder / "result.json").read_text())
    return {
        "summary": result["summary"],
        "usage": result["usage"],
        "metrics": (folder / "metrics.jsonl").read_bytes() if (folder / "metrics.jsonl").exists() else b"",
        **{path.name: tree_digest(path) for path in (folder / "out").iterdir()},
    }


@pytest.mark.parametrize("what", STAGES)
def test_a_killed_stage_asks_servers_only_for_what_is_missing(what, tiny, data, spec, forks, tmp_path):  # noqa: F811
    options = {"target": UNDRAWN, "ranks": 2 if "two" in what else 1, "POSTTRAIN_CHECKPOINT_SECONDS": "0"}
    with asked(tiny, what, spec, data, tmp_path) as (begin, drawn, scored):
        forks.run(begin("whole"), **options)
        whole, once = made(tmp_path / "whole"), counts(drawn, scored)
        assert what == "constrain" or whole["usage"]["judge_calls"] > 5 and whole["usage"]["generated_tokens"] > 100
        drawn.clear()
        scored.clear()
        kills = sorted(random.Random(f"{what}, paid").sample(range(3, sum(once.values())), 4))
        for kill in kills:
            forks.start(file := begin("killed"), **options).kill_when(lambda: len(drawn) + len(scored) >= kill)
        forks.run(file, **options)
        again = counts(drawn, scored)
    assert set(again) == set(once)
    twice = sum((again - once).values())
    assert twice <= AT_ONCE * options["ranks"] * len(kills), f"{twice} requests were made again after kills at {kills}"
    assert made(tmp_path / "killed") == whole


# -- the journal by itself ---------------------------------------------------------------------------------------------


@pytest.fixture()
def start(tmp_path):
    """``start(url, …)``: a stage that asks the server at ``url`` starts, on one rank, behind the checkpoint of a step."""

    def begin(*urls, rank=0, step=0):
        journal.end()
        journal.begin(tmp_path / "answers", rank, step, {"rewards": [{"endpoint": url} for url in urls]})

    yield begin
    journal.end()


@pytest.fixture()
def tokenizer(tiny):  # noqa: F811
    return AutoTokenizer.from_pretrained(tiny["policy"])


def says(text):
    return {"message": {"content": text}, "finish_reason": "stop"}


def points(judge, *texts):
    return [reply.text for reply in judge.replies(texts, 8)]


def test_what_a_server_said_before_the_kill_stands_whatever_it_says_now(start, tmp_path):
    """And each answer once: who asks for the same twice gets two. A torn line costs its answer only."""
    with chat_server(lambda body: says(f"{len(server.seen)}")) as server:
        start(server.url)
        judge = ServerJudge(server.url, "m", concurrency=1)
        assert points(judge, "a", "b", "a") == ["1", "2", "3"]
        (file,) = (tmp_path / "answers").iterdir()
        with open(file, "ab") as end:
            end.write(file.read_bytes()[:20])
        start(server.url)
        judge = ServerJudge(server.url, "m", concurrency=1)
        assert points(judge, "a", "a", "c", "b", "a") == ["1", "3", "4", "2", "5"]
        start(server.url)
        assert points(ServerJudge(server.url, "m", concurrency=1), "c", "a", "a", "a", "b") == ["4", "1", "3", "5", "2"]
    assert len(server.seen) == 5


def test_a_server_may_move_and_two_of_one_name_are_told_apart(start):
    with chat_server(lambda body: says("first")) as first, chat_server(lambda body: says("second")) as second:
        start(first.url, second.url)
        assert points(ServerJudge(first.url, "m"), "a") == ["first"]
        start(first.url, second.url)
        assert points(ServerJudge(second.url, "m"), "a") == ["second"]
        start("http://127.0.0.1:9/v1", second.url)
        assert points(ServerJudge("http://127.0.0.1:9/v1", "m"), "a") == ["first"]
        assert points(ServerJudge(second.url, "another"), "a") == ["second"], "another model's answer is another"
    assert (len(first.seen), len(second.seen)) == (1, 2)


def test_answers_of_other_weights_are_never_used(start, tiny, tokenizer):  # noqa: F811
    params = SamplingParams(temperature=1.0, max_new_tokens=4)
    prompts, seeds = [tokenizer("a")["input_ids"]], [[1, 2]]

    def drawn(weights):
        start(url)
        engine = ServerEngine(url, tokenizer, tiny["policy"], model="tiny", api="vllm")
        engine.weights = weights
        return [c.ids for c in engine.generate(prompts, params, seeds)[0]]

    with vllm_server(fake_vllm.LLM(tiny["policy"])) as (url, seen):
        first = drawn("digest 1")
        assert len(seen) == 2 and drawn("digest 1") == first and len(seen) == 2
        drawn("digest 2")
        assert len(seen) == 4 and drawn("input") and len(seen) == 6


def test_what_is_no_answer_is_asked_for_again(start, tiny, tokenizer):  # noqa: F811
    """A completion by another tokenizer, scores that are none, a judge without probabilities: whoever sees to the
    server gets others.
    """
    with chat_server(lambda body: json.dumps({"rewards": [None] * len(body["messages"])}).encode()) as server:
        rows = [Answer([{"role": "user", "content": "q"}], {}, "stop")]
        start(server.url)
        assert "no number" in RewardServer(server.url, "m", "messages").scores(rows)[0]
        server.choice = lambda body: b'{"rewards": [2.5]}'
        start(server.url)
        assert RewardServer(server.url, "m", "messages").scores(rows) == [2.5]
        start(server.url)
        assert RewardServer(server.url, "m", "messages").scores(rows) == [2.5] and len(server.seen) == 2
        server.choice = lambda body: says("A")
        with pytest.raises(JudgeError, match="judge_mode=verdict"):
            ServerJudge(server.url, "m").choice("x", ("A", "B"))
        server.choice = answer
        start(server.url)
        assert ServerJudge(server.url, "m").choice("x", ("7", "8")).logps
        wrong = {"text": "hm", "token_ids": [10**6], "finish_reason": "length"}
        engine = ServerEngine(server.url, tokenizer, tiny["policy"], model="tiny", api="vllm")
        server.choice = lambda body: wrong
        with pytest.raises(EngineError, match="failed on all"):
            engine.generate([[1]], SamplingParams(max_new_tokens=1), [[1]])
        server.choice = lambda body: wrong | {"token_ids": [5]}
        start(server.url)
        assert engine.generate([[1]], SamplingParams(max_new_tokens=1), [[1]])[0][0].ids == [5]


def test_two_scores_of_one_server_are_told_apart(start):
    """They send the same request, and of its answer each reads its own."""
    rows = [Answer([{"role": "user", "content": "q"}], {}, "stop")]
    with chat_server(lambda body: b'{"kind": [null], "safe": [2.5]}') as server:
        scores = lambda key: RewardServer(server.url, "m", "messages", score_key=key).scores(rows)[0]
        start(server.url)
        assert "no number" in scores("kind") and scores("safe") == 2.5
        server.choice = lambda body: b'{"kind": [7.5], "safe": [2.5]}'
        start(server.url)
        assert scores("kind") == 7.5 and scores("safe") == 2.5 and len(server.seen) == 3


def test_answers_behind_a_checkpoint_before_the_first_one_are_found(start, tmp_path):
    with chat_server(lambda body: says("fine")) as server:
        start(server.url)
        journal.settled(4, 4)
        points(ServerJudge(server.url, "m"), "a")
        (tmp_path / "checkpoints" / "step-0000000004").mkdir(parents=True)
        assert answers_kept(tmp_path) == 1
        start(server.url, step=4)
        points(ServerJudge(server.url, "m"), "a")
    assert len(server.seen) == 1


def test_a_key_that_is_no_longer_taken_ends_a_stage_that_goes_on(start):
    """403 says that a text is flagged where others are answered; at a start of its own nobody was answered yet."""
    with chat_server(lambda body: says("fine")) as server:
        start(server.url, step=3)
        flagged = lambda body: 403 if "bad" in json.dumps(body) else says("fine")
        server.choice = flagged
        judge = ServerJudge(server.url, "m", concurrency=1)
        assert judge.replies(["bad 1", "bad 2", "bad 3", "good"], 4)[3].text == "fine", "asked for something else"
        start(server.url, step=3)
        server.choice = lambda body: 403
        with pytest.raises(JudgeError, match="key_variable"):
            ServerJudge(server.url, "m", concurrency=1).replies(["bad 1", "bad 2", "bad 3", "good"], 4)


def test_checkpoints_drop_what_they_hold_on_every_rank(start, tmp_path):
    """Two checkpoints are kept, of which the older one may be needed; other ranks learn of them by the first one's
    files.
    """
    folder = tmp_path / "answers"
    there = lambda: sorted(path.stem.lstrip("0") for path in folder.iterdir())
    with chat_server(lambda body: says("fine")) as server:
        journal.settled(1, 1)
        start(server.url)
        journal.settled(1, 1)
        assert not folder.exists(), "nobody was asked"
        for step in (1, 2, 3):
            points(ServerJudge(server.url, "m"), f"step {step}")
            journal.settled(step, max(1, step - 1))
            journal.settled(step, max(1, step - 1))  # saved again
        assert there() == ["2-0", "3-0"]
        points(ServerJudge(server.url, "m"), "step 4")
        (tmp_path / "checkpoints" / "step-0000000003").mkdir(parents=True)
        assert answers_kept(tmp_path) == 1, "what `posttrain show KEY` tells"
        start(server.url, step=3)
        assert journal._open.waiting.keys() == {
            entry["key"] for entry in journal.entries(folder / "0000000003-0.jsonl")
        }
        start(server.url, step=2)
        assert len(journal._open.waiting) == 2, "the newest checkpoint was damaged"
        start(server.url, rank=1)
        points(ServerJudge(server.url, "m"), "of rank 1")
        assert there() == ["2-0", "3-0", "3-1"]
        start(server.url, step=3)
        points(ServerJudge(server.url, "m"), "of rank 1")  # any number of ranks goes on
        assert len(server.seen) == 5
