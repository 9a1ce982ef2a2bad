"""Names that a reader of Prefect's UI tells apart: of runs and of deployments."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from flows.config import ConfigError
from flows.deploy import cron_schedule, found_anywhere, recipe_deployments, scheduled, stage_deployments
from flows.recipe import load_config, made_up, reason, title
from stages.registry import STAGES, get_stage


@pytest.mark.parametrize(
    "name",
    [
        "lr-sweep",
        "baseline-large",
        "Baseline-Large",
        "dpo-run",
        "big-run",
        "new-data",
        "beta",
        "nightly",
        "first try",
        "Small-batch",
        "gold-standard-2",
    ],
)
def test_a_name_that_a_person_typed_is_kept(name):
    assert not made_up(name)


def test_names_that_prefect_makes_up_are_known():
    from prefect.utilities.names import generate_slug

    assert all(made_up(generate_slug(2)) for _ in range(2000))
    assert made_up("Intelligent-Kudu") and made_up("Licensed-Uakari") and made_up("Small-Ape")  # of the UI's form


def test_every_deployment_has_a_name_of_its_own():
    names = [name for _, name, _ in [*recipe_deployments(), *stage_deployments()]]
    assert len(set(names)) == len(names) > 90
    assert {"post_training", "post_training-demo", "post_training-nightly", "tulu3-70b", "stage-sft"} <= set(names)


@pytest.mark.parametrize("as_json", [False, True])
def test_deploying_says_how_far_it_is(monkeypatch, tmp_path, as_json):
    """Of a hundred deployments, which take a busy server minutes, and which are paused; what the server is asked is
    left out here.
    """
    from typer.testing import CliRunner

    from flows import deploy, display, services
    from flows.cli import app

    specs = [("flow", name, {}) for name in ("first", "second", "third")]
    monkeypatch.setenv("POSTTRAIN_HOME", str(tmp_path))
    monkeypatch.setenv("PREFECT_API_URL", "http://there:4200/api")
    monkeypatch.setattr(services, "connect", lambda state: True)
    monkeypatch.setattr(deploy, "recipe_deployments", lambda *_: specs[:2])
    monkeypatch.setattr(deploy, "stage_deployments", lambda: specs[2:])
    # of Prefect's own it would start a server
    monkeypatch.setattr("prefect.client.orchestration.get_client", lambda **_: contextlib.nullcontext())
    monkeypatch.setattr(deploy, "install_pool", lambda **_: None)
    monkeypatch.setattr(deploy, "forms", lambda flows: dict.fromkeys(flows))
    monkeypatch.setattr(deploy, "registered", lambda client: {"second": SimpleNamespace(paused=True, schedules=[])})
    monkeypatch.setattr(deploy, "apply", lambda flow, name, options, **_: name)
    monkeypatch.setattr(deploy, "retire", lambda *_: None)
    monkeypatch.setattr(deploy, "install_automations", lambda model: ["recover"])
    monkeypatch.setattr(display, "SLOW_LINES", -1)
    done = CliRunner().invoke(app, ["deploy", *(["--json"] if as_json else [])])
    assert done.exit_code == 0 and [one in done.stdout for one in ("first", "third", "recover")] == [True] * 3
    assert (
        as_json or "paused in Prefect's UI and left so; to make one active, switch it on there\n  second" in done.stdout
    )
    told = [
        "registering with http://there:4200",
        "deploy: started",
        "deploy: 0/3 deployments registered, now first",
        "deploy: 1/3 deployments registered, now second",
        "deploy: 2/3 deployments registered, now third",
        "deploy: 3/3 deployments registered, now older ones and automations",
        "deploy: 3/3 deployments registered; paused in Prefect's UI and left so: second; to make one active, switch it on"
        " there",
    ]
    assert done.stderr.splitlines() == ([] if as_json else told)


@pytest.mark.parametrize(
    "cron, timezone, said",
    [
        ("0 2 * *", "UTC", "no cron expression"),
        ("0 2 * * *", "Europe/Berlim", "no time zone"),
        ("0 2 * * *", "/etc/passwd", "no time zone"),
        ("0 2 * * *", "", "no time zone"),
    ],
)
def test_a_wrong_time_is_refused(cron, timezone, said):
    with pytest.raises(ConfigError, match=said):
        cron_schedule(cron, timezone, "cron")


def test_a_schedule_finds_files_from_anywhere(tmp_path, monkeypatch):
    """A worker runs in another directory than the command that registered its schedule."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pairs.jsonl").touch()
    (tmp_path / "policy").mkdir()
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama" / "config.json").touch()
    given = {"data": {"path": "pairs.jsonl"}, "model": "llama", "promote_as": "policy", "seed": 1, "judge": "self"}
    assert found_anywhere(given) == {
        **given,
        "data": {"path": str(tmp_path / "pairs.jsonl")},
        "model": str(tmp_path / "llama"),
    }


def test_a_schedule_whose_run_would_not_start_is_refused_when_it_is_made(tmp_path, monkeypatch):
    monkeypatch.setenv("POSTTRAIN_HOME", str(tmp_path / "home"))
    (tmp_path / "pairs.jsonl").write_text('{"prompt": "p", "chosen": "a", "rejected": "b"}\n')
    given = {"data": {"path": str(tmp_path / "pairs.jsonl")}, "model": "model:never@champion"}
    with pytest.raises(ConfigError, match="^model: .*never"):
        scheduled("preference", given, cron="0 2 * * *")
    with pytest.raises(ConfigError, match="data.path: .*gone.jsonl does not exist"):
        scheduled("preference", {**given, "data": {"path": str(tmp_path / "gone.jsonl")}}, cron="0 2 * * *")


def test_a_run_that_was_ended_from_outside_says_so_in_its_record():
    """What Prefect raises when a run is cancelled has no words of its own."""
    from prefect.exceptions import TerminationSignal

    assert reason(TerminationSignal(signal=15)) == "TerminationSignal: cancelled, interrupted or told to end (SIGTERM)"
    assert reason(KeyboardInterrupt()).startswith("KeyboardInterrupt: cancelled, interrupted")
    assert reason(ConfigError("write x")) == "ConfigError: write x" and reason(ValueError()) == "ValueError: "


def test_an_automation_is_the_same_in_every_process():
    """Sets have another order in every process; an automation that is taken for another one is made anew and forgets
    the heartbeats so far.
    """
    code = (
        "import json, uuid; from flows.deploy import automations, installed_as\nprint(json.dumps([installed_as(one) for"
        " one in automations(uuid.UUID(int=1), 'model:policy@champion')], sort_keys=True))"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        ).stdout
        for seed in "01"
    }
    assert len(found) == 1


@pytest.mark.parametrize(
    "stage, settings, depends",
    [("sft", {"lora_rank": 8}, "learning_rate"), ("rl", {"environment": "tools"}, "rewards")],
)
def test_a_form_that_sends_every_default_chooses_none_of_them(stage, settings, depends):
    """A LoRA adapter was trained at a tenth of its learning rate, and an agent paid by a verifier, when a run was started
    from the form of a stage."""
    from flows.single import stage_flow

    kind = get_stage(stage).SPEC.config
    form = {**kind().model_dump(mode="json", warnings=False), **settings}
    given = {"inputs": {"model": "(given)", "data": "(given)"}, "config": form}
    config, meant = stage_flow(stage).validate_parameters(given)["config"], kind(**settings)
    assert config == meant and getattr(meant, depends) != getattr(kind(), depends)
    chosen = {**given, "config": {**form, "learning_rate": 0.25}}
    assert stage_flow(stage).validate_parameters(chosen)["config"].learning_rate == 0.25


@pytest.mark.parametrize("stage", sorted(STAGES))
def test_an_untouched_form_of_a_stage_is_its_defaults(stage):
    """Also where a setting has parts, all of which have to be given."""
    from flows.single import stage_flow

    kind = get_stage(stage).SPEC.config
    if any(field.is_required() for field in kind.model_fields.values()):
        return
    inputs = {name: "(given)" for name, spec in get_stage(stage).SPEC.inputs.items() if spec.required and not spec.many}
    inputs |= {name: {"one": "(given)"} for name, spec in get_stage(stage).SPEC.inputs.items() if spec.many}
    form = {"inputs": inputs, "config": kind().model_dump(mode="json", warnings=False)}
    assert stage_flow(stage).validate_parameters(form)["config"] == kind()


def test_a_run_is_called_after_what_it_is_given():
    """A choice among checkpoints was called `embedded world`, of which it has nothing."""
    chosen = load_config("checkpoint_selection", {"candidates": ["2150e67b3296"], "seed": 3})
    assert title(chosen) == "2150e67b3296 · seed 3"
    pairs = load_config("preference", {"model": "models/tiny-llama", "data": {"path": "a/pairs.jsonl"}})
    assert title(pairs) == "tiny-llama · pairs.jsonl · seed 0" and title(load_config("preference", {})).startswith(
        "emb"
    )
