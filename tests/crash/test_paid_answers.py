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

from storage.files import tree_digest
from tests.chat_server import chat_server
from tests.evaluation.conftest import tiny  # noqa: F401
from tests.processes import UNDRAWN
from tests.sampler import fake_vllm
from tests.sampler.servers import vllm_server
from tests.training.conftest import data, spec  # noqa: F401

AT_ONCE = 2
JUDGE = {"endpoint_model": "judge", "concurrency": AT_ONCE}


def number(text: str, of: int) -> int:
    return int(hashlib.sha256(text.encode()).hexdigest(), 16) % of


def answer(body):
    """A judge's points, or a reward server's numbers: functions of what is asked, the judge's of its seed too."""
    if "seed" in body:
        return {
            "message": {"content": f"Fine. Score: {number(json.dumps(body), 6)}"},
            "finish_reason": "stop",
        }
    return json.dumps({"rewards": [number(json.dumps(one), 100) / 10 for one in body["messages"]]}).encode()


def rewards(url):
    return [
        {"name": "points", "kind": "judge", "judge_mode": "additive", "judge_samples": 2, "endpoint": url, **JUDGE},
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


SAMPLING = {"max_completion_length": 6, "logit_bias": {2: 4.0}}  # 2 ends a completion: what is cut is not judged
STAGES = {
    "rejection": ({**SAMPLING, "num_generations": 2, "block": 8, "max_prompts": 20}, {"prompts": "prompts"}),
    "evaluate": ({**SAMPLING, "num_samples": 2, "chunk": 8, "split": "train", "limit": 20}, {"prompts": "prompts"}),
    "rl": (
        {
            **SAMPLING,
            "num_generations": 2,
            "max_steps": 6,
            "prompts_per_step": 4,
            "learning_rate": 1e-2,
            "reward_override": "random",
        },
        {"data": "prompts"},
    ),
}


@contextlib.contextmanager
def asked(tiny, what, spec, data, tmp_path):  # noqa: F811
    """``begin(name)`` -> (SPEC file, requests so far, of engine and rewards together) of one stage over servers."""
    config, inputs = STAGES[what]
    with chat_server(answer) as rewarded, vllm_server(fake_vllm.LLM(tiny["policy"])) as (url, drawn):
        rewarded.usage = {"prompt_tokens": 7, "completion_tokens": 3}

        def begin(name):
            settings = {
                **config,
                "engine": "server",
                "engine_url": url,
                "engine_model": "tiny",
                "engine_concurrency": AT_ONCE,
                "rewards": rewards(rewarded.url),
            }
            given = {"model": tiny["policy"], **{name: data[kind] for name, kind in inputs.items()}}
            file = tmp_path / f"{name}.json"
            file.write_text(json.dumps(spec(what, settings, given, name) | {"key": "of-both"}))
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
    environment = {"POSTTRAIN_CHECKPOINT_SECONDS": "0"}
    with asked(tiny, what, spec, data, tmp_path) as (begin, drawn, scored):
        forks.run(begin("whole"), target=UNDRAWN, **environment)
        whole, once = made(tmp_path / "whole"), counts(drawn, scored)
        assert whole["usage"]["judge_calls"] > 20 and whole["usage"]["generated_tokens"] > 100
        drawn.clear()
        scored.clear()
        kills = sorted(random.Random(f"{what}, paid").sample(range(3, sum(once.values())), 4))
        for kill in kills:
            forks.start(file := begin("killed"), target=UNDRAWN, **environment).kill_when(
                lambda: len(drawn) + len(scored) >= kill
            )
        forks.run(file, target=UNDRAWN, **environment)
        again = counts(drawn, scored)
    assert set(again) == set(once)
    twice = sum((again - once).values())
    assert twice <= AT_ONCE * len(kills), f"{twice} requests were made again after kills at {kills}"
    assert made(tmp_path / "killed") == whole
