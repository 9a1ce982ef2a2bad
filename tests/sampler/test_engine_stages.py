"""Stages over other engines: rejection, evaluate and RL with vLLM (a stand-in of the package), a vLLM server and
`transformers serve`.
"""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from stages.harness import execute
from stages.training import TrainingError
from storage.datasets import open_dataset
from tests.evaluation.conftest import tiny  # noqa: F401
from tests.sampler import fake_vllm
from tests.sampler.servers import transformers_serve, vllm_server
from tests.training.conftest import data, spec  # noqa: F401

LENGTH = [{"name": "length", "kind": "length", "max_length": 8, "cache_length": 6}]
RL = {
    "max_steps": 3,
    "prompts_per_step": 3,
    "num_generations": 4,
    "max_completion_length": 8,
    "learning_rate": 1e-2,
    "reward_override": "random",
    "rewards": LENGTH,
}


@pytest.fixture()
def vllm(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", fake_vllm)
    return fake_vllm


def rows_of(result, name):
    return list(open_dataset(result["outputs"][name]["path"]).iter_rows())


def metrics_of(made):
    return [json.loads(line)["metrics"] for line in Path(made["workdir"], "metrics.jsonl").read_text().splitlines()]


def test_rl_pushes_every_step_to_vllm_and_trains_on_its_own_log_probs(tiny, data, spec, vllm, monkeypatch):  # noqa: F811
    engines = []
    original = fake_vllm.LLM.__init__
    monkeypatch.setattr(
        fake_vllm.LLM, "__init__", lambda self, *a, **k: (engines.append(self), original(self, *a, **k))[1]
    )
    made = spec(
        "rl",
        {**RL, "engine": "vllm", "engine_sleep": True, "temperature": 0.8, "importance_correction": "token_truncate"},
        {"model": tiny["policy"], "data": data["prompts"]},
        "vllm",
    )
    result = execute(made, lambda event: None)
    # the preflight's push, after which it sleeps while the dearest micro-batch is tried, and one per step
    assert (
        engines[0].calls
        == ["reload", "reset", "sleep 2"] + ["wake weights", "reload", "wake kv_cache", "reset", "sleep 2"] * 3
    )
    assert result["summary"]["old_logps"] == "trainer" and result["summary"]["engine"] == "vllm 0.0-fake"
    found = rows_of(result, "rollouts")
    assert {r["iteration"] for r in found} == {0, 1, 2}
    for r in found:  # both engines compute the same function here, so a stale weight or another temperature would show
        assert r["logp_rollout"] == pytest.approx(r["logp_old"], abs=1e-4)
    for m in metrics_of(made):
        assert m["policy/ratio"] == pytest.approx(1.0, abs=1e-3)
        assert m["sampling/sampling_logp_difference/max"] < 1e-4 and m[
            "sampling/importance_sampling_ratio/mean"
        ] == pytest.approx(1.0, abs=1e-4)
    assert not (Path(made["workdir"]) / "engine").exists()


def test_an_engine_samples_the_next_batch_while_this_one_is_trained_on(tiny, data, spec, vllm):  # noqa: F811
    """What the engine was given is the policy of one iteration before; importance weights correct for what changed
    since.
    """
    made = spec(
        "rl",
        {**RL, "engine": "vllm", "async_rollouts": True, "importance_correction": "token_truncate"},
        {"model": tiny["policy"], "data": data["prompts"]},
        "ahead",
    )
    found = rows_of(execute(made, lambda event: None), "rollouts")
    assert {(r["iteration"], r["policy_version"]) for r in found} == {(0, 0), (1, 0), (2, 1)}
    for r in found:
        ratio = np.exp(np.subtract(r["logp_old"], r["logp_rollout"]))
        assert np.allclose(r["is_weights"], np.minimum(ratio, 2.0), atol=1e-4) and (
            np.allclose(ratio, 1, atol=1e-3) == (r["iteration"] == 0)
        )
    with pytest.raises(ValueError, match="importance_correction=token_truncate"):
        execute(
            spec(
                "rl",
                {**RL, "engine": "vllm", "async_rollouts": True},
                {"model": tiny["policy"], "data": data["prompts"]},
                "refused",
            ),
            lambda event: None,
        )


def test_rl_stops_where_the_engine_does_not_sample_from_the_policy(tiny, data, spec, vllm, monkeypatch):  # noqa: F811
    monkeypatch.setattr(fake_vllm.LLM, "collective_rpc", lambda self, *a, **k: [None])  # a push that does nothing
    monkeypatch.setattr(fake_vllm.LLM, "_processed", lambda self, z, *a: 3 * z)
    made = spec("rl", {**RL, "engine": "vllm"}, {"model": tiny["policy"], "data": data["prompts"]}, "stale")
    with pytest.raises(TrainingError, match="engine_max_mismatch=1.0"):
        execute(made, lambda event: None)


def test_rl_leaves_out_rows_that_the_engine_lost(tiny, data, spec, vllm, monkeypatch):  # noqa: F811
    from stages.preflight import TRIED

    # behind the completions that the preflight looks at
    first = fake_vllm.LLM.requests + TRIED[0] * min(TRIED[1], RL["num_generations"])
    monkeypatch.setattr(fake_vllm, "ABORT", {first + 2, first + 13})  # row 2, and its second try
    made = spec("rl", {**RL, "engine": "vllm"}, {"model": tiny["policy"], "data": data["prompts"]}, "lost")
    result = execute(made, lambda event: None)
    assert [m.get("rollout/failed_rows", 0.0) for m in metrics_of(made)] == [1.0, 0.0, 0.0]
    assert len([r for r in rows_of(result, "rollouts") if r["iteration"] == 0]) == 11
    assert any(w["code"] == "engine_rows_failed" for w in result["warnings"])


def test_rejection_and_evaluate_through_a_vllm_server(tiny, data, spec):  # noqa: F811
    settings = {
        "engine": "server",
        "max_completion_length": 8,
        "rewards": LENGTH,
        "repetition_penalty": 1.2,
        "stop_strings": ["zz"],
    }
    with vllm_server(fake_vllm.LLM(tiny["policy"])) as (url, seen):
        made = spec(
            "rejection",
            {
                **settings,
                "engine_url": url,
                "num_generations": 3,
                "max_prompts": 4,
                "select": "threshold",
                "threshold": -10.0,
            },
            {"model": tiny["policy"], "prompts": data["prompts"]},
            "rejection",
        )
        result = execute(made, lambda event: None)
        found = rows_of(result, "candidates")
        assert len(found) == 12 and {r["gen"]["engine"] for r in found} == {"server vllm: tiny"} and len(seen) == 12
        assert {body["seed"] for body in seen} == {r["gen"]["rng_seed"] % 2**31 for r in found}
        assert all("reencoded" not in json.loads(r["extra_json"]) for r in found)
        made = spec(
            "evaluate",
            {**settings, "engine_url": url, "num_samples": 2, "limit": 3, "logit_bias": {"50": -5}},
            {"model": tiny["policy"], "prompts": tiny["prompts"]},
            "evaluate",
        )
        made["inputs"]["prompts"]["digest"] = open_dataset(tiny["prompts"]).digest
        result = execute(made, lambda event: None)
        protocol = open_dataset(result["outputs"]["samples"]["path"]).manifest["meta"]["protocol"]
        assert (
            json.loads(protocol["logits"]) == {"repetition_penalty": 1.2, "logit_bias": {"50": -5.0}}
            and protocol["engine"] == "server:default:auto"
        )
        assert result["summary"]["prompts"] == 3 and len(rows_of(result, "samples")) == 9


def test_text_only_servers_mark_their_rows_and_rl_refuses_them(tiny, data, spec, tmp_path):  # noqa: F811
    with transformers_serve(tmp_path / "log") as url:
        settings = {"engine": "server", "engine_url": url, "max_completion_length": 6, "rewards": LENGTH}
        made = spec(
            "rejection",
            {**settings, "num_generations": 2, "max_prompts": 2, "select": "threshold", "threshold": -10.0},
            {"model": tiny["policy"], "prompts": data["prompts"]},
            "text",
        )
        found = rows_of(execute(made, lambda event: None), "candidates")
        assert len(found) == 4 and all(json.loads(r["extra_json"])["reencoded"] is True for r in found)
        rl = {**RL, **settings, "max_steps": 2, "prompts_per_step": 1, "num_generations": 2}
        with pytest.raises(ValueError, match="allow_reencoded_ids=true"):
            execute(spec("rl", rl, {"model": tiny["policy"], "data": data["prompts"]}, "refused"), lambda event: None)
        with pytest.raises(ValueError, match="importance_correction=none"):
            execute(
                spec(
                    "rl",
                    {**rl, "allow_reencoded_ids": True, "importance_correction": "token_mask"},
                    {"model": tiny["policy"], "data": data["prompts"]},
                    "tis",
                ),
                lambda event: None,
            )
        made = spec(
            "rl", {**rl, "allow_reencoded_ids": True}, {"model": tiny["policy"], "data": data["prompts"]}, "accepted"
        )
        result = execute(made, lambda event: None)
        for r in rows_of(result, "rollouts"):
            assert (
                json.loads(r["extra_json"]) == {"reencoded": True}
                and r["logp_rollout"] is None
                and np.isfinite(r["logp_old"]).all()
            )


def test_a_word_that_a_continuation_could_complete_is_refused_before_anything_is_sampled(
    tiny, data, spec, vllm, monkeypatch
):  # noqa: F811
    from stages.decoding.sampler import SamplerError

    monkeypatch.setattr(fake_vllm.LLM, "generate", lambda *_, **__: pytest.fail("it samples"))
    made = spec(
        "rl",
        {**RL, "preset": "vineppo", "engine": "vllm", "bad_words": ["qxz"]},
        {"model": tiny["policy"], "data": data["prompts"]},
        "vine",
    )
    with pytest.raises(SamplerError, match="'qxz' is several tokens, and here completions are continued"):
        execute(made, lambda event: None)


def test_settings_that_do_not_fit_say_what_to_write():
    from stages.rejection import Config
    from stages.rl import Config as RLConfig
    from stages.rl import resolve_preset

    for setting, advice in (
        (dict(engine="server"), "write engine_url="),
        (dict(engine_url="http://x/v1"), "write engine=server"),
        (dict(engine_api="vllm"), "write engine=server"),
        (dict(engine_options={"dtype": "float32"}), "write engine=vllm"),
        (dict(min_tokens=65, max_completion_length=64), "smaller min_tokens"),
    ):
        with pytest.raises(ValueError, match=advice):
            Config(**setting)
    with pytest.raises(ValueError, match="write engine=vllm"):
        resolve_preset(RLConfig(engine_sleep=True))
    assert (
        "engine_url" not in Config(engine="server", engine_url="http://a/v1").identity()
        and Config().identity()["engine"] == "builtin"
    )
