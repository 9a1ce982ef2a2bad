"""What a stage key sees and what it does not."""

import json
import os
import subprocess
import sys
from enum import Enum
from pathlib import Path

import pytest
from pydantic import Field

from stages import spec as spec_module
from stages.running.randomness import rng, seed_for
from stages.spec import (
    ConfigError,
    InputSpec,
    OutputSpec,
    StageConfig,
    StageSpec,
    UnhashableError,
    canonical_key,
    closure_digest,
    parse_config,
    stage_key,
)
from storage.files import canonical_json


class Optimizer(StageConfig):
    beta1: float = Field(0.9, ge=0, lt=1, description="first moment decay")


class Mode(Enum):
    FAST = "fast"


class Config(StageConfig):
    learning_rate: float = Field(1e-5, gt=0, description="peak learning rate")
    optimizer: Optimizer = Field(Optimizer(), description="optimizer settings")
    workers: int = Field(1, description="loader processes", json_schema_extra={"identity": False})
    mode: Mode = Mode.FAST
    anything: object = None


SPEC = StageSpec(
    "toy",
    Config,
    inputs={"model": InputSpec("model", doc="what to train"), "eval": InputSpec("dataset", many=True, required=False)},
    outputs={"model": OutputSpec("model")},
)


def key(config=None, inputs=None, seed=0, code="c"):
    return stage_key("toy", code, parse_config(SPEC, config), inputs or {}, seed)


def test_everything_that_counts_changes_the_key():
    keys = [
        key(),
        key({"learning_rate": 2e-5}),
        key({"optimizer.beta1": 0.8}),
        key(seed=1),
        key(code="d"),
        key(inputs={"model": "a" * 64}),
    ]
    assert len(set(keys)) == len(keys)
    assert key({"workers": 8}) == key()
    assert key({"learning_rate": 0.00001}) == key()


def test_addresses_of_servers_are_no_identity():
    from stages.decoding.engines import engine_label
    from stages.rejection import Config as Rejection

    rewards = [{"name": "r", "kind": "remote", "url": "http://a:5000/score", "endpoint_model": "rm"}]
    here = {"engine": "server", "engine_url": "http://a:8000/v1", "engine_model": "m", "rewards": rewards}
    one, other = Rejection(**here), Rejection(**here | {"engine_url": "http://b:8000/v1"})
    assert one.identity() == other.identity() and engine_label(one) == engine_label(other)
    assert one.addresses() == {"engine_url": "http://a:8000/v1", "rewards.0.url": "http://a:5000/score"}
    assert one.addresses(other.resolved())["engine_url"] == "http://b:8000/v1"
    assert Rejection(**here | {"engine_model": "n"}).identity() != one.identity()


def test_where_a_judge_is_asked_is_no_identity_but_that_a_server_is():
    """A server that moved made every result by its judge again. Of a local judge all is as it was."""
    from stages.evaluate import Config as Evaluate
    from stages.reward.judging import JudgeSettings as Judge
    from stages.objective import Config as Objective
    from stages.rl import Config as RL

    def asked(**server):
        judge = {"name": "r", "kind": "judge", **server}
        yield Judge(**server)
        yield Evaluate(rewards=[judge], refusal_judge=server)
        yield Evaluate(mt_bench=server)
        yield RL(preset="grpo", rewards=[judge])
        yield Objective(proposer="server" if server else "mutation", **server)

    here = {"endpoint": "http://a:1/v1", "endpoint_model": "m", "key_variable": "A_KEY"}
    moved, other = {**here, "endpoint": "http://b:2/v1", "key_variable": ""}, {**here, "endpoint_model": "n"}
    for one, then, another, local in zip(asked(**here), asked(**moved), asked(**other), asked(), strict=True):
        assert one.identity() == then.identity() != another.identity() and one.identity() != local.identity()
        assert set(one.addresses().values()) == {"http://a:1/v1"} and not local.addresses()
        assert set(one.addresses(then.resolved()).values()) == {"http://b:2/v1"}
        assert '"endpoint": ""' in json.dumps(local.identity()) and '"key_variable": ""' in json.dumps(local.identity())


def test_where_the_judge_of_an_evaluation_is_asked_is_no_part_of_its_protocol():
    """Of local judges the protocols are those of before, so that evaluations stay comparable."""
    from types import SimpleNamespace

    from stages.evaluate import Config
    from stages.evaluation import mt_bench, refusals

    def protocols(**server):
        prompts = [({"category": "unsafe"}, None)]
        yield mt_bench.protocol(SimpleNamespace(config=Config(mt_bench=server)))["mt_bench"]
        plan = SimpleNamespace(config=Config(refusal_judge=server), prompts=prompts)
        yield refusals.protocol(plan)["refusal_judge"]

    here = {"endpoint": "http://a:1/v1", "endpoint_model": "m", "key_variable": "A_KEY"}
    moved, other = {**here, "endpoint": "http://b:2/v1", "key_variable": ""}, {**here, "endpoint_model": "n"}
    for one, then, another, local in zip(protocols(**here), protocols(**moved), protocols(**other), protocols()):
        assert one == then != another and one != local
        assert {name: local[name] for name in ("endpoint", "key_variable", "concurrency", "input")} == {
            "endpoint": "",
            "key_variable": "",
            "concurrency": 8,
            "input": "judge",
        }


def test_key_is_the_same_in_any_process():
    code = "import tests.platform.test_identity as t; print(t.key({'learning_rate': 3e-5}, {'b': '1'*64, 'a': '2'*64}))"
    keys = set()
    for seed, locale in (("0", "C"), ("1", "C.UTF-8"), ("random", "de_DE.UTF-8")):
        env = {"PYTHONHASHSEED": seed, "LC_ALL": locale, "PATH": "/usr/bin:/bin"}
        keys.add(
            subprocess.run(
                [sys.executable, "-c", code],
                env=env,
                cwd=spec_module.PROJECT_ROOT,
                capture_output=True,
                text=True,
                check=True,
            ).stdout
        )
    assert keys == {key({"learning_rate": 3e-5}, {"a": "2" * 64, "b": "1" * 64}) + "\n"}


@pytest.mark.parametrize("value", [Path("/data"), float("nan"), lambda: 1, b"bytes", object()])
def test_what_cannot_be_hashed_is_refused(value):
    with pytest.raises(UnhashableError):
        key({"anything": value})


def test_a_stage_outside_of_the_project_is_told_where_to_put_it():
    with pytest.raises(UnhashableError, match="into .*stages and write stages.FILE, or into a package"):
        closure_digest("json.tool")


def test_input_without_digest_is_refused():
    with pytest.raises(UnhashableError, match="no content digest"):
        key(inputs={"model": ""})


def test_catalogue_canonical_form():
    text, digest = canonical_key(
        "train_rm", "v1", {"model": "tiny", "lr": 1e-06, "betas": [0.9, 0.95], "name": "été", "steps": 10}, ["b", "a"]
    )
    assert (
        text
        == '{"code_version":"v1","config":{"betas":[0.9,0.95],"lr":1e-06,"model":"tiny","name":"été","steps":10},"inputs":["a","b"],"stage":"train_rm"}'
    )
    assert digest == "88791cccc95ad83120281535e28b4ca0e02695d5a5ef457d4b22f0ac033be0bf"


def test_canonical_json_refuses():
    for bad in (float("inf"), {1: 2}, {"a": {2: 3}}, {3}):
        with pytest.raises((TypeError, ValueError)):
            canonical_json(bad)


@pytest.fixture
def project(tmp_path, monkeypatch):
    for name, text in {
        "stages/__init__.py": "",
        "stages/running/randomness.py": "",
        "stages/main.py": "def run(stage):\n    from stages import helper\n    return helper.f()\n",
        "stages/helper.py": "from . import deep as d\n\ndef f():\n    return d.g()\n",
        "stages/deep.py": "def g():\n    '''says one'''\n    return 1\n",
        "stages/other.py": "x = 1\n",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(spec_module, "PROJECT_ROOT", tmp_path)
    return tmp_path


def test_cache_key_sees_helpers(project):
    before = closure_digest("stages.main")
    (project / "stages/other.py").write_text("x = 2\n")
    (project / "stages/deep.py").write_text("# a remark\ndef g():\n    '''says something else'''\n\n    return 1\n")
    assert closure_digest("stages.main") == before
    (project / "stages/deep.py").write_text("def g():\n    return 2\n")
    assert closure_digest("stages.main") != before


def test_resources_count(project):
    (project / "stages/words.txt").write_text("a")
    before = closure_digest("stages.main", ("stages/words.txt",))
    (project / "stages/words.txt").write_text("b")
    assert closure_digest("stages.main", ("stages/words.txt",)) != before
    with pytest.raises(UnhashableError, match="does not exist"):
        closure_digest("stages.main", ("stages/gone.txt",))


def test_computed_import_is_refused(project):
    (project / "stages/deep.py").write_text(
        "import importlib\n\ndef g(name):\n    return importlib.import_module(name)\n"
    )
    with pytest.raises(UnhashableError, match="import the modules by name"):
        closure_digest("stages.main")


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        ({"learning_rat": 1}, ["learning_rat", "did you mean 'learning_rate'"]),
        ({"optimizer": {"beta": 0.5}}, ["optimizer.beta", "did you mean 'beta1'"]),
        ({"optimizer.beta1": 2}, ["optimizer.beta1", "given 2", "< 1"]),
        ({"learning_rate": "fast"}, ["learning_rate", "'fast'", "peak learning rate"]),
        ({"learning_rate": 0}, ["learning_rate", "> 0"]),
        ({"mode": "slow"}, ["mode", "'fast'"]),
        ({"mode": "fastt"}, ["mode: there is no 'fastt'; did you mean 'fast'? write one of 'fast'"]),
    ],
)
def test_config_errors_say_what_to_write(given, parts):
    with pytest.raises(ConfigError) as caught:
        parse_config(SPEC, given)
    for part in parts:
        assert part in str(caught.value)


def test_a_list_of_settings_is_shown_whole():
    from stages.registry import get_stage

    for given in ("verifier", "[{kind: verifier}", {"0": {"weight": 2}}):
        with pytest.raises(
            ConfigError, match=r"rewards: .* write the whole list, for example rewards='\[\{kind: verifier\}\]'"
        ):
            parse_config(get_stage("rl").SPEC, {"rewards": given})


def test_input_errors_say_what_to_write():
    with pytest.raises(ConfigError, match="model=REF_OR_PATH"):
        SPEC.check_inputs([])
    with pytest.raises(ConfigError, match="did you mean 'model'"):
        SPEC.check_inputs(["modell"])
    with pytest.raises(ConfigError, match="write model=REF"):
        SPEC.check_inputs(["model.a"])
    SPEC.check_inputs(["model", "eval.a", "eval.b"])


def test_randomness_is_counter_based():
    assert seed_for(0, "sft", "order", 3) == seed_for(0, "sft", "order", 3)
    assert len({seed_for(s, st, p, c) for s in (0, 1) for st in ("a", "b") for p in ("x", "y") for c in (0, 1)}) == 16
    assert 0 <= seed_for(5, "a", "b", "row-id") < 2**63
    assert rng(0, "a", "b", 1).normal() == rng(0, "a", "b", 1).normal() != rng(0, "a", "b", 2).normal()


def test_table_of_functions_counts_as_imports(project):
    (project / "stages/helper.py").write_text(
        "import importlib\n\nTABLE = {'a': 'stages.other:x'}\n\ndef f(name):\n    return"
        " importlib.import_module(TABLE[name])\n"
    )
    before = closure_digest("stages.main")
    (project / "stages/other.py").write_text("x = 2\n")
    assert closure_digest("stages.main") != before


@pytest.mark.parametrize("typed, meant", [("lr", "learning_rate"), ("per_device_train_batch_size", "batch_size")])
def test_names_of_other_tools_lead_to_ours(typed, meant):
    from flows.config import keys, nearest
    from stages.sft import Config

    assert nearest(typed, list(keys(Config))) == meant


def test_a_refusal_is_told_without_its_traceback_and_a_defect_with_it():
    from stages.chat import RenderError
    from stages.reward.components import RewardComponent
    from stages.reward.judge import JudgeError
    from stages.running.process import refused_by_us

    def caught(call):
        try:
            call()
        except (ValueError, RuntimeError) as error:
            return error

    def absent():
        raise JudgeError("the judge does not answer; write endpoint=URL")

    def broken():
        raise RuntimeError("of a library")

    def refuse():
        raise RenderError("write this instead")

    assert refused_by_us(caught(refuse)) and refused_by_us(caught(absent)) and not refused_by_us(caught(broken))
    assert not refused_by_us(caught(lambda: int("x"))) and not refused_by_us(
        caught(lambda: RewardComponent(kind="nonsense"))
    )


def test_a_reward_function_may_be_a_file_and_its_text_is_the_setting(tmp_path):
    from stages.reward.components import RewardComponent

    (tmp_path / "mine.py").write_text("def score(prompt, completion, answer):\n    return len(completion)\n")
    assert RewardComponent(kind="python", source=str(tmp_path / "mine.py")).source == (tmp_path / "mine.py").read_text()
    with pytest.raises(ValueError, match="cannot be read .* write the path of a Python file"):
        RewardComponent(kind="python", source=str(tmp_path / "other.py"))


def test_a_default_is_one_short_line():
    from flows.display import setting
    from stages.reward.components import RewardComponent

    assert (
        setting("\n\n") == r"'\n\n'"
        and setting(0.5) == "0.5"
        and len(setting([RewardComponent(kind="verifier")])) <= 40
    )


def test_parsing_sources_survives_other_threads():
    """CPython 3.11 shares the depth of the tree under construction between threads: SystemError when a collection lets
    another one parse.
    """
    import ast
    import gc
    import threading
    import time

    from stages.running import syntax

    source, before, problems = Path(closure_digest.__code__.co_filename).read_text(), gc.get_threshold(), []
    wanted = ast.dump(ast.parse(source))

    def pause(*_):
        time.sleep(0.0002)

    def work():
        try:
            for _ in range(6):
                if ast.dump(syntax.parse(source)) != wanted:
                    problems.append("another tree")
        except BaseException as error:
            problems.append(repr(error))

    gc.callbacks.append(pause)
    gc.set_threshold(400, 2, 2)
    try:
        threads = [threading.Thread(target=work) for _ in range(4)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
    finally:
        gc.set_threshold(*before)
        gc.callbacks.remove(pause)
    assert not problems
    with pytest.raises(SyntaxError):
        syntax.parse("a b")


def test_what_sources_say_is_kept_and_never_taken_for_another_source(project, monkeypatch):
    """Parsing all sources takes two seconds; the next process reads what the last one found, which must not outlive the
    source, the parser or a file that appears.
    """
    from stages import sources

    monkeypatch.setattr(sys, "dont_write_bytecode", False)

    def afresh():
        sources._source.cache_clear(), sources._kept.cache_clear()
        return closure_digest("stages.main")

    first, file = afresh(), sources._file(project)
    assert file.parent == project / "stages" / "__pycache__" and afresh() == first
    monkeypatch.setattr(sources.syntax, "parse", lambda *_: pytest.fail("parsed again"))
    assert afresh() == first
    monkeypatch.undo()
    monkeypatch.setattr(spec_module, "PROJECT_ROOT", project)
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    deep = project / "stages/deep.py"
    times = deep.stat().st_mtime_ns
    deep.write_text("def g():\n    '''says one'''\n    return 2\n")  # of the same size and time
    os.utime(deep, ns=(times, times))
    assert afresh() != first
    deep.write_text("TABLE = ['stages.late:f']\n")
    before = afresh()
    (project / "stages/late.py").write_text("def f(): pass\n")  # named by a table that was read before
    assert afresh() != before
    whole = afresh()
    for damage in ("{", "[]", '{"by": "another", "sources": {"stages.deep": []}}'):
        file.write_text(damage)
        assert afresh() == whole
