"""Every engine against the contract (``tests/sampler/contract.py``), and what is special to each."""

import contextlib
import sys

import pytest

from stages.decoding.engines import EngineError, write_weights
from stages.decoding.sampler import Sampler, SamplerError, SamplingParams
from stages.generation import check_continued
from tests.evaluation.conftest import tiny  # noqa: F401
from tests.sampler import contract, fake_vllm
from tests.sampler.servers import transformers_serve, vllm_server

ENGINES = ("builtin", "vllm", "vllm-server", "transformers-serve")


@pytest.fixture(scope="module")
def made(tiny):  # noqa: F811
    """{"policy", "other": (path, model)}, "tokenizer"."""
    return contract.loaded({name: tiny[name] for name in ("policy", "other")})


@pytest.fixture(scope="module")
def serve(tmp_path_factory):
    with transformers_serve(tmp_path_factory.mktemp("serve") / "log") as url:
        yield url


@pytest.fixture()
def engines(made, request, monkeypatch):
    """``engines(kind)`` -> a fresh engine over the policy."""
    with contextlib.ExitStack() as stack:

        def build(kind):
            from stages.decoding.server_engine import ServerEngine
            from stages.decoding.vllm_engine import VLLMEngine

            path, model = made["policy"]
            if kind == "builtin":
                import copy

                return Sampler(copy.deepcopy(model), made["tokenizer"], max_batch=4)
            if kind == "vllm":
                monkeypatch.setitem(sys.modules, "vllm", fake_vllm)
                return VLLMEngine(path, made["tokenizer"], sleeps=True)
            if kind == "vllm-server":
                url, _ = stack.enter_context(vllm_server(fake_vllm.LLM(path, logprobs_mode="raw_logprobs")))
                return ServerEngine(url, made["tokenizer"], path)
            return ServerEngine(request.getfixturevalue("serve"), made["tokenizer"], path)

        yield build


@pytest.fixture(params=ENGINES)
def engine(engines, request):
    return engines(request.param)


class TestPromises(contract.Promises):
    pass


@pytest.mark.parametrize("kind", ENGINES[:3])
def test_greedy_settings(engines, made, kind):
    contract.check_greedy_settings_do_what_the_built_in_engine_does(
        engines(kind), Sampler(made["policy"][1], made["tokenizer"])
    )


@pytest.mark.parametrize("kind", ENGINES[:3])
def test_filters_and_draws(engines, made, kind):
    engine = engines(kind)
    contract.check_min_p_and_filters_together(engine, made["policy"][1])
    contract.check_draws_follow_the_distribution(engine, made["policy"][1])


@pytest.mark.parametrize("kind", ENGINES[1:3])
def test_what_vllm_cannot_honour_is_refused(engines, kind):
    engine = engines(kind)
    contract.check_vllm_refusals(engine)
    for setting in (dict(temperature=2.5), dict(frequency_penalty=3.0)):
        with pytest.raises((SamplerError, EngineError), match=r"must be in \["):
            engine.generate([[1, 40]], SamplingParams(max_new_tokens=2, **setting), [[0]])
    # a word that the first tokens of a continued completion may have begun
    for word in ("qxz", "q"):
        params = SamplingParams(max_new_tokens=4, bad_words=(word,))
        check_continued(engines("builtin"), params)
        if word == "q":
            check_continued(engine, params)
            continue
        with pytest.raises(SamplerError, match="Write engine=builtin, or leave this word out"):
            check_continued(engine, params)


@pytest.mark.parametrize("kind", ENGINES[1:])
def test_new_weights(engines, made, kind, tmp_path):
    write_weights(made["other"][1], made["tokenizer"], tmp_path / "new")
    contract.check_new_weights(engines(kind), str(tmp_path / "new"), made["other"][1])


def test_which_engines_give_log_probs_and_ids(engines):
    """The built-in and vLLM always, a vLLM server where nothing changes its raw log-probs, transformers serve
    neither.
    """
    for kind, plain, warm, ids in (
        ("builtin", True, True, True),
        ("vllm", True, True, True),
        ("vllm-server", True, False, True),
        ("transformers-serve", False, False, False),
    ):
        engine = engines(kind)
        for temperature, expected in ((1.0, plain), (0.7, warm)):
            ((c,),) = engine.generate([[1, 40]], SamplingParams(max_new_tokens=3, temperature=temperature), [[5]])
            assert (c.logps is not None) == expected and c.reencoded != ids and engine.reencodes != ids
        assert engine.exact_logps == engine.shares_weights == (kind == "builtin")


def test_vllm_retries_a_failed_row_and_reports_it(engines, monkeypatch):
    engine, params = engines("vllm"), SamplingParams(max_new_tokens=4)
    whole = engine.generate(contract.PROMPTS, params, contract.SEEDS)
    n, total = fake_vllm.LLM.requests, 6
    monkeypatch.setattr(fake_vllm, "ABORT", {n + 2})
    assert contract.facts(engine.generate(contract.PROMPTS, params, contract.SEEDS)) == contract.facts(whole)
    n = fake_vllm.LLM.requests
    monkeypatch.setattr(fake_vllm, "ABORT", {n + 2, n + total + 1})
    got = engine.generate(contract.PROMPTS, params, contract.SEEDS)
    assert (
        [c.finish_reason for c in got[0]] == ["length", "error", "length"]
        and "abort" in got[0][1].error
        and got[0][1].ids == []
    )
    assert contract.facts(got[1:]) == contract.facts(whole[1:])
    monkeypatch.setattr(fake_vllm, "ABORT", set(range(10**6)))
    with pytest.raises(EngineError, match="failed on all 6 completions"):
        engine.generate(contract.PROMPTS, params, contract.SEEDS)


def test_what_vllm_gives_up_when_all_are_told_to_stop_is_no_lost_row(engines, monkeypatch):
    """Rows that a stopping vLLM aborts are drawn again by the run that continues; were they left out, it would end at
    another model.
    """
    from stages.running.stopping import Terminated, stopping

    engine, params = engines("vllm"), SamplingParams(max_new_tokens=4)
    engine.generate(contract.PROMPTS, params, contract.SEEDS)
    monkeypatch.setattr(stopping, "since", 1.0)
    engine.generate(contract.PROMPTS, params, contract.SEEDS)
    n = fake_vllm.LLM.requests
    monkeypatch.setattr(fake_vllm, "ABORT", {n + 2})
    with pytest.raises(Terminated):
        engine.generate(contract.PROMPTS, params, contract.SEEDS)

    def dead(*arguments, **more):
        raise RuntimeError("the engine core is dead")

    monkeypatch.setattr(fake_vllm.LLM, "generate", dead)
    with pytest.raises(Terminated):
        engine.generate(contract.PROMPTS, params, contract.SEEDS)
    monkeypatch.setattr(stopping, "since", None)
    with pytest.raises(EngineError, match="stopped.*the same command continues"):
        engine.generate(contract.PROMPTS, params, contract.SEEDS)


def test_a_vllm_whose_process_was_killed_is_an_error_and_no_endless_wait(engines, monkeypatch):
    import subprocess
    import threading

    import psutil

    engine, params, forever = engines("vllm"), SamplingParams(max_new_tokens=4), threading.Event()
    process = subprocess.Popen(["sleep", "60"])
    engine.processes = [psutil.Process(process.pid)]
    whole = engine.generate(contract.PROMPTS, params, contract.SEEDS)
    monkeypatch.setattr(fake_vllm.LLM, "generate", lambda *a, **k: forever.wait())
    process.kill(), process.wait()
    with pytest.raises(EngineError, match=rf"its process {process.pid} ended.*the same command continues"):
        engine.generate(contract.PROMPTS, params, contract.SEEDS)
    forever.set()
    assert len(whole) == 3


def test_vllm_sleeps_and_reloads_in_the_order_that_works(engines, made, tmp_path):
    engine = engines("vllm")
    write_weights(made["other"][1], made["tokenizer"], tmp_path / "new")
    engine.generate([[1, 2]], SamplingParams(max_new_tokens=1), [[0]])
    engine.sleep(keep_weights=False)
    with pytest.raises(EngineError, match="call update first"):
        engine.generate([[1, 2]], SamplingParams(max_new_tokens=1), [[0]])
    engine.update(str(tmp_path / "new"), "v1")
    assert engine.llm.calls == ["sleep 2", "wake weights", "reload", "wake kv_cache", "reset"]


def test_a_vllm_that_cannot_reload_from_a_directory_is_named(engines, monkeypatch):
    def old(self, method, timeout=None, args=(), kwargs=None):
        raise TypeError("reload_weights() got an unexpected keyword argument 'weights_path'")

    monkeypatch.setattr(fake_vllm.LLM, "collective_rpc", old)
    with pytest.raises(EngineError, match="vllm 0.0-fake cannot read new weights from a directory"):
        engines("vllm").update("somewhere", "v1")


def test_vllm_on_a_cpu_takes_what_its_rows_need(made, monkeypatch):
    """Two layers with two heads of 16: 512 bytes a token in float32; rows of 256 positions in blocks of 128, and one
    block more.
    """
    from stages.decoding import vllm_engine

    given = []
    monkeypatch.setitem(sys.modules, "vllm", fake_vllm)
    monkeypatch.setattr(vllm_engine, "on_cpu", lambda: True)
    monkeypatch.setattr(fake_vllm, "LLM", lambda **arguments: given.append(arguments))
    for options in ({}, {"max_model_len": 100}, {"gpu_memory_utilization": 0.1}, {"kv_cache_memory_bytes": 5}):
        vllm_engine.VLLMEngine(made["policy"][0], made["tokenizer"], max_batch=3, options=options)
    assert [g.get("kv_cache_memory_bytes") for g in given] == [3 * 384 * 512, 3 * 256 * 512, None, 5]
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "2")
    vllm_engine.VLLMEngine(made["policy"][0], made["tokenizer"])
    assert "kv_cache_memory_bytes" not in given[-1]


def test_a_vllm_that_does_not_start_says_what_to_write(made, monkeypatch):
    from stages.decoding.vllm_engine import VLLMEngine

    monkeypatch.setitem(sys.modules, "vllm", fake_vllm)

    def broken(error):
        def start(**arguments):
            raise error

        return start

    for error, sleeps, advice in (
        (TypeError("got an unexpected keyword argument 'logprobs_mode'"), False, "this version is too old"),
        (ValueError("Sleep mode is not supported on current platform."), True, "write engine_sleep=false"),
        (RuntimeError("Engine core initialization failed."), False, "kv_cache_memory_bytes: BYTES"),
    ):
        monkeypatch.setattr(fake_vllm, "LLM", broken(error))
        with pytest.raises(EngineError, match=advice):
            VLLMEngine(made["policy"][0], made["tokenizer"], sleeps=sleeps)


def test_vllms_processes_end_with_the_engine(engines):
    from types import SimpleNamespace

    engine, ended = engines("vllm"), []
    engine.llm.llm_engine = SimpleNamespace(engine_core=SimpleNamespace(shutdown=lambda: ended.append(1)))
    engine.close()
    assert ended == [1] and engine.llm is None


def test_a_prefix_cache_that_stays_is_an_error(engines, made, monkeypatch, tmp_path):
    write_weights(made["other"][1], made["tokenizer"], tmp_path / "new")
    monkeypatch.setattr(fake_vllm.LLM, "reset_prefix_cache", lambda self: False)
    for kind in ("vllm", "vllm-server"):
        with pytest.raises(EngineError, match="did not empty its prefix cache"):
            engines(kind).update(str(tmp_path / "new"), "v1")


def test_a_vllm_server_that_says_so_gives_log_probs_of_what_is_sampled(made):
    from stages.decoding.server_engine import ServerEngine

    path, model = made["policy"]
    with vllm_server(fake_vllm.LLM(path, logprobs_mode="processed_logprobs")) as (url, _):
        contract.check_logps_are_of_the_sampled_distribution(
            engine := ServerEngine(url, made["tokenizer"], path), model
        )
        assert (
            len(engine.generate([[1, 40]], SamplingParams(max_new_tokens=3, temperature=0.7), [[5]])[0][0].logps) == 3
        )
        with pytest.raises(SamplerError, match="takes no more than 100"):
            engine.generate([[1, 40]], SamplingParams(logit_bias={5: 300.0}), [[0]])


def test_a_stop_string_that_is_a_special_token_stops_vllm(made, tmp_path, monkeypatch):
    """Texts keep the tags of thought and answer where they are special tokens; vLLM's text leaves special tokens out
    unless told otherwise.
    """
    from stages.decoding.sampler import tag_ids
    from stages.decoding.vllm_engine import VLLMEngine
    from stages.models.modeling import save_policy
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(made["policy"][0])
    tokenizer.add_special_tokens({"additional_special_tokens": ["</answer>"]})
    tag = tokenizer.convert_tokens_to_ids("</answer>")
    import copy

    model = copy.deepcopy(made["policy"][1])
    model.resize_token_embeddings(len(tokenizer))
    save_policy(model, tokenizer, str(tmp_path / "tagged"))
    monkeypatch.setitem(sys.modules, "vllm", fake_vllm)
    engine = VLLMEngine(str(tmp_path / "tagged"), tokenizer)
    params = SamplingParams(temperature=0, max_new_tokens=6, logit_bias={tag: 50.0}, stop_strings=("</answer>",))
    assert tag in tag_ids(tokenizer)
    ((c,),) = engine.generate([[1, 40]], params, [[0]])
    assert (c.ids, c.finish_reason, c.text) == ([tag], "stop", "")
    (wanted,) = Sampler(model.eval(), tokenizer).generate([[1, 40]], params, [[0]])
    assert contract.facts([[c]]) == contract.facts([wanted])


def test_a_server_row_is_asked_for_twice_and_then_named(made, monkeypatch):
    from stages.decoding import server_engine
    from stages.running import servers

    monkeypatch.setattr(servers, "WAITS", (0.0,))
    path = made["policy"][0]
    for broken, reasons in ((lambda n: n == 2, ["length"] * 3), (lambda n: n in (2, 3), ["length", "error", "length"])):
        with vllm_server(fake_vllm.LLM(path), broken) as (url, _):
            engine = server_engine.ServerEngine(url, made["tokenizer"], path, concurrency=1)
            got = engine.generate([[1, 40]], SamplingParams(max_new_tokens=3), [[1, 2, 3]])[0]
            assert [c.finish_reason for c in got] == reasons
            assert all(
                ("HTTP 500" in c.error and "stumbled" in c.error) == (c.finish_reason == "error")
                for c in got
                if c.error
            )
    with vllm_server(fake_vllm.LLM(path), lambda n: True) as (url, _):
        with pytest.raises(EngineError, match="failed on all 1 completions"):
            server_engine.ServerEngine(url, made["tokenizer"], path).generate(
                [[1, 40]], SamplingParams(max_new_tokens=3), [[1]]
            )


def test_servers_refuse_what_they_cannot_do(made, engines):
    from stages.decoding.server_engine import ServerEngine

    path = made["policy"][0]
    with pytest.raises(EngineError, match="write engine_url with its /v1"):
        ServerEngine("http://127.0.0.1:9/v1", made["tokenizer"], path)
    with vllm_server(fake_vllm.LLM(path)) as (url, seen):
        plain = ServerEngine(url, made["tokenizer"], path, api="openai")
        for setting in (
            dict(top_k=5),
            dict(min_p=0.1),
            dict(repetition_penalty=1.2),
            dict(min_tokens=1),
            dict(bad_words=["x"]),
        ):
            with pytest.raises(SamplerError, match=f"openai has no {next(iter(setting))}"):
                plain.generate([[1, 40]], SamplingParams(**setting), [[0]])
        with pytest.raises(EngineError, match="cannot be given new weights"):
            plain.update("somewhere", "v1")
        assert not seen
    with pytest.raises(SamplerError, match="transformers has no frequency_penalty"):
        engines("transformers-serve").generate([[1, 40]], SamplingParams(frequency_penalty=0.5), [[0]])


def test_a_missing_vllm_says_what_to_do(made, monkeypatch):
    from stages.decoding.vllm_engine import VLLMEngine

    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(EngineError, match="pip install vllm"):
        VLLMEngine(made["policy"][0], made["tokenizer"])
    monkeypatch.setitem(sys.modules, "vllm", fake_vllm)
    with pytest.raises(EngineError, match="engine_options sets logprobs_mode"):
        VLLMEngine(made["policy"][0], made["tokenizer"], options={"logprobs_mode": "raw_logprobs"})


def test_pushed_weights_are_the_policys_with_lora_merged_and_the_policy_unchanged(made, tmp_path):
    import copy

    import torch

    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    model = peft.get_peft_model(
        copy.deepcopy(made["policy"][1]), peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    ).eval()
    before = {name: p.clone() for name, p in model.named_parameters()}
    write_weights(model, made["tokenizer"], tmp_path / "new")
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())
    from stages.models.modeling import load_policy

    read, ids = load_policy(str(tmp_path / "new"), "cpu").eval(), torch.tensor([[1, 40, 50, 60, 70]])
    with torch.inference_mode():
        torch.testing.assert_close(read(ids).logits, model(ids).logits, atol=1e-4, rtol=0)
        assert (read(ids).logits - made["policy"][1](ids).logits).abs().max() > 0.1
