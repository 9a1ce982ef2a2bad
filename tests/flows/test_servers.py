"""Schedules, deployments, cancellation and recovery against real Prefect and MLflow servers."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from datetime import datetime
from pathlib import Path
from urllib.parse import urlsplit
from zoneinfo import ZoneInfo

import httpx
import jsonschema
import psutil
import pytest
import yaml

from flows import env
from flows.services import answers
from stages.spec import PROJECT_ROOT
from storage import records
from tests.common import stage_processes
from tests.flows.conftest import DEPLOY, NIGHTLY
from tests.raw_server import raw_server, whole

TINY = {"train": 8, "validation": 2, "test": 2}
WORLD = {"text": TINY, "demonstrations": TINY, "comparisons": TINY, "prompts": TINY}


def test_prefect_server_imports():
    """Fails with the fastapi versions that Prefect's server cannot start with."""
    subprocess.run([sys.executable, "-c", "from prefect.server.api.server import create_app"], check=True, timeout=120)


def test_a_run_that_stays_cancelling_is_given_up_before_prefect_would(tmp_path):
    """One that is cancelled before its process listens stays so until this, which was five minutes."""
    code = (
        "from flows import env; env.prepare(quiet=True); from prefect.settings import get_current_settings as settings;"
        " print(settings().server.services.cancellation_cleanup.cancelling_timeout_seconds)"
    )
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PREFECT_")}
    environment |= {"POSTTRAIN_HOME": str(tmp_path), "PYTHONPATH": str(PROJECT_ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert float(done.stdout) == env.CANCELLING_SECONDS < 300
    name = "PREFECT_SERVER_SERVICES_CANCELLATION_CLEANUP_CANCELLING_TIMEOUT_SECONDS"
    infra = PROJECT_ROOT / "infra"
    assert f"{name}={env.CANCELLING_SECONDS}\n" in (infra / "prefect.env").read_text()
    settings = yaml.safe_load((infra / "kubernetes" / "settings.yaml").read_text())["data"]
    assert settings[name] == str(env.CANCELLING_SECONDS)


def test_ports_of_the_containers_are_chosen_by_the_environment():
    """Every port that is named to somebody outside of the containers; inside they stay what they are."""
    text = (PROJECT_ROOT / "infra" / "compose.yaml").read_text()

    def services(**environment):
        filled = re.sub(r"\$\{(\w+):-(\w+)\}", lambda match: environment.get(match[1], match[2]), text)
        return yaml.safe_load(filled)["services"]

    usual, other = services(), services(POSTTRAIN_PREFECT_PORT="4201", POSTTRAIN_MLFLOW_PORT="5001")
    links = {"PREFECT_UI_URL": "http://localhost:{}", "POSTTRAIN_MLFLOW_URL": "http://localhost:{}"}
    for found, prefect, mlflow in ((usual, 4200, 5000), (other, 4201, 5001)):
        assert found["prefect"]["ports"] == [f"127.0.0.1:{prefect}:4200"]
        filled = {name: link.format(port) for (name, link), port in zip(links.items(), (prefect, mlflow))}
        assert filled.items() <= found["worker"]["environment"].items()
        assert found["mlflow"]["ports"] == [f"127.0.0.1:{mlflow}:5000"]
        allowed = found["mlflow"]["entrypoint"][-1].split(",")
        assert {"mlflow:5000", f"localhost:{mlflow}", f"127.0.0.1:{mlflow}"} <= {*allowed}
    for found in (usual, other):
        for name in links:
            del found["worker"]["environment"][name]
    assert usual["worker"] == other["worker"]


def test_the_containers_have_the_settings_of_the_command_line():
    """And a browser asks the server that it got the page from: the one that it calls localhost is another's."""
    infra = PROJECT_ROOT / "infra"
    lines = (infra / "prefect.env").read_text().splitlines()
    found = dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))
    usual = env.defaults(Path("/state"))
    assert {name: value for name, value in usual.items() if not value.startswith("/state")}.items() <= found.items()
    settings = yaml.safe_load((infra / "kubernetes" / "settings.yaml").read_text())["data"]
    assert (usual | found).items() <= settings.items() and found["PREFECT_UI_API_URL"] == "/api"


def test_mlflow_answers_browsers_of_other_machines_by_the_names_of_this_one(monkeypatch):
    """By itself it takes a name or a public address for an attack, and what its own page sends for another site's."""
    from fastapi import FastAPI
    from fastapi.testclient import TestClient
    from mlflow.server.fastapi_security import init_fastapi_security

    from flows.services import names_here

    path = "/ajax-api/2.0/mlflow/runs/search"

    def answer(variables, name, origin=None):
        for variable in ("MLFLOW_SERVER_ALLOWED_HOSTS", "MLFLOW_SERVER_CORS_ALLOWED_ORIGINS"):
            monkeypatch.delenv(variable, raising=False)
            if variable in variables:
                monkeypatch.setenv(variable, variables[variable])
        app = FastAPI()
        app.post(path)(lambda: {})
        init_fastapi_security(app)
        headers = {"Host": name, "Origin": origin or f"http://{name}"}
        return TestClient(app).post(path, headers=headers).status_code

    here = socket.gethostname().lower()
    open_, given = names_here("0.0.0.0", 5000), names_here("train.example", 5000)
    assert answer({}, f"{here}:5000") == 403 and answer(open_, f"{here}:5000") == 200
    assert answer(open_, "train.example:5000") == 403 and answer(given, "train.example:5000") == 200
    assert answer(open_, "localhost:8000") == 200  # a tunnel
    assert answer(open_, f"{here}:5000", "http://evil.example") == 403
    assert names_here("127.0.0.1", 5000) == names_here("localhost", 5000) == {}


def test_links_lead_where_browsers_find_the_servers(monkeypatch):
    """In containers the names by which processes find them mean nothing outside."""
    from flows.recipe import ui_url

    monkeypatch.delenv("POSTTRAIN_EMBEDDED", raising=False)
    monkeypatch.setenv("PREFECT_API_URL", "http://prefect:4200/api")
    monkeypatch.delenv("PREFECT_UI_URL", raising=False)
    assert ui_url("runs/flow-run", 7) == "http://prefect:4200/v2/runs/flow-run/7"
    monkeypatch.setenv("PREFECT_UI_URL", "http://localhost:4201/")
    assert ui_url("runs/flow-run", 7) == "http://localhost:4201/v2/runs/flow-run/7"


def test_a_server_of_this_machine_is_found_whatever_proxy_the_environment_names(monkeypatch):
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with raw_server(lambda connection, body, number: whole(b"OK", "200 OK" if number == 1 else "503 Busy")) as server:
        assert answers(server.url) and not answers(server.url)
    assert not answers(server.url)


def test_prefects_and_mlflows_clients_ask_no_proxy_for_servers_of_this_machine(monkeypatch):
    for name in ("no_proxy", "NO_PROXY", "http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "put back behind the test")
        monkeypatch.delenv(name)
    env.leave_own_servers_to_no_proxy()
    assert "no_proxy" not in os.environ, "no proxy is named"
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "intern, 127.0.0.1")
    for _ in range(2):
        env.leave_own_servers_to_no_proxy()
        assert os.environ["NO_PROXY"] == os.environ["no_proxy"] == "intern,127.0.0.1,localhost"
    monkeypatch.setenv("no_proxy", "*")
    env.leave_own_servers_to_no_proxy()
    assert os.environ["no_proxy"] == "*"
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with raw_server(lambda connection, body, number: whole(b"OK")) as server:
        assert httpx.get(server.url).text == "OK", "as Prefect's client asks"


def test_interval_schedule_creates_runs(servers):
    """With SQLAlchemy 2.1 no runs appear, and nothing but the server's log says so."""
    servers.python(
        "from flows.deploy import apply; from flows.single import stage_flow\nfrom datetime import timedelta; from"
        " prefect.client.schemas.schedules import IntervalSchedule\napply(stage_flow('world'), 'hourly', {'queue':"
        " 'cpu', 'schedule': IntervalSchedule(interval=timedelta(hours=1))})"
    )
    deployment = servers.deployment("stage-world/hourly")["id"]
    runs = servers.wait(
        lambda: servers.api(
            "/flow_runs/filter",
            {"deployments": {"id": {"any_": [deployment]}}, "flow_runs": {"state": {"type": {"any_": ["SCHEDULED"]}}}},
        ),
        limit=30,
    )
    assert len(runs) >= 2


def test_two_ups_at_once_start_each_server_once(servers):
    """The second waits and finds what the first started, at the ports that were asked for; a server that services.json
    does not know could not be stopped.
    """
    assert servers.urls == servers.urls_beside
    assert {name: urlsplit(servers.urls[name]).port for name in servers.ports} == servers.ports
    known = {row["pid"] for row in json.loads((servers.home / "services.json").read_text()).values()}
    found = {
        process.pid
        for process in psutil.process_iter(["cmdline", "cwd"])
        if process.info["cwd"] == str(servers.home.resolve()) and "flows.keep" in (process.info["cmdline"] or [])
    }
    assert found == known and len(known) == 3


def test_nightly_schedule_is_active(servers):
    schedules = servers.deployment("post_training/post_training-nightly")["schedules"]
    assert [(schedule["active"], schedule["schedule"]["cron"]) for schedule in schedules] == [(True, NIGHTLY)]


NIGHTLY_RUN = "post_training/post_training-nightly"
WORLD_STAGE = "stage-world/stage-world"
MIX_STAGE = "stage-mix/stage-mix"
RATE_STAGE = "stage-rate/stage-rate"


def pause_by_schedule_and_by_deployment(servers, name: str, command: tuple[str, ...]) -> list[tuple]:
    """Pause one in the UI's two ways, registering it again after each, and make it active again: of each what the
    command printed, whether the deployment is paused and whether its schedule is active."""
    found = []
    for deployment, active in ((False, False), (True, True), (False, True)):
        row = servers.deployment(name)
        servers.api(f"/deployments/{row['id']}", {"paused": deployment}, method="PATCH")
        one = f"/deployments/{row['id']}/schedules/{row['schedules'][0]['id']}"
        servers.api(one, {"active": active}, method="PATCH")
        said, row = servers.cli(*command).stdout, servers.deployment(name)
        found.append((said, row["paused"], [schedule["active"] for schedule in row["schedules"]]))
    return found


@pytest.fixture(scope="module")
def again(servers):
    """Everything was deployed once more, which takes a while, so it is done for several tests: {"said": what the
    command printed, "before", "after": what was registered, "rows": of some deployments before}. Before that people
    scheduled a recipe, deployed one under a name of their own, paused a schedule and edited a text, and an older
    version left its names."""

    def registered():
        return (
            sorted(
                (row["name"], row["id"], len(row["schedules"]))
                for row in servers.api("/deployments/filter", {"limit": 200})
            ),
            # a new one forgets the heartbeats of dead runs
            sorted((row["name"], row["id"]) for row in servers.api("/automations/filter", {"limit": 200})),
            sorted(row["name"] for row in servers.api("/work_pools/posttrain/queues/filter", {})),
        )

    command = ("deploy", "post_training", "--preset", "demo", "seed=5", "--timezone", "Europe/Berlin")
    name = "post_training/post_training-demo-scheduled"
    assert servers.json(*command, "--cron", "0 1 * * *") == {"deployments": [name], "paused": []}
    assert servers.deployment(name)["job_variables"] == {"env": {"POSTTRAIN_USER": records.user()}}
    paused = pause_by_schedule_and_by_deployment(servers, name, (*command, "--cron", "0 2 * * *"))
    apply = (
        "from flows.deploy import apply; from flows.post_training import post_training; from flows.single import"
        " stage_flow\nfor flow, name in ({}): apply(flow, name, {{'queue': 'cpu'}})"
    )
    servers.python(apply.format("(post_training, 'mine'),"))
    before = registered()
    servers.python(apply.format("(post_training, 'form'), (post_training, 'demo'), (stage_flow('mix'), 'stage')"))
    assert len(registered()[0]) == len(before[0]) + 3
    rows = {name: servers.deployment(name) for name in (NIGHTLY_RUN, WORLD_STAGE, MIX_STAGE, RATE_STAGE)}
    servers.api(
        f"/deployments/{rows[NIGHTLY_RUN]['id']}/schedules/{rows[NIGHTLY_RUN]['schedules'][0]['id']}",
        {"active": False},
        method="PATCH",
    )
    servers.api(f"/deployments/{rows[WORLD_STAGE]['id']}", {"description": "edited"}, method="PATCH")
    servers.api(f"/deployments/{rows[RATE_STAGE]['id']}", {"paused": True, "description": "edited"}, method="PATCH")
    found = {"said": servers.json(*DEPLOY), "before": before, "after": registered(), "rows": rows, "paused": paused}
    servers.api(f"/deployments/{servers.deployment('post_training/mine')['id']}", method="DELETE")
    return found


def test_a_recipe_runs_by_the_clocks_of_a_time_zone(servers, again):
    """Two in the morning in Berlin is one or midnight UTC; deploying everything again leaves the schedule as it is."""
    row = servers.deployment("post_training/post_training-demo-scheduled")
    assert [(one["active"], one["schedule"]["cron"], one["schedule"]["timezone"]) for one in row["schedules"]] == [
        (True, "0 2 * * *", "Europe/Berlin")
    ]
    assert row["parameters"]["config"]["seed"] == 5
    scheduled = {
        "deployments": {"id": {"any_": [row["id"]]}},
        "flow_runs": {"state": {"type": {"any_": ["SCHEDULED"]}}},
    }
    runs = servers.wait(lambda: servers.api("/flow_runs/filter", scheduled), limit=60)
    for run in runs:
        local = datetime.fromisoformat(run["expected_start_time"]).astimezone(ZoneInfo("Europe/Berlin"))
        assert (local.hour, local.minute) == (2, 0)
    servers.api(f"/deployments/{row['id']}", method="DELETE")


def test_a_schedule_that_was_paused_stays_so_when_its_recipe_is_deployed_again(again):
    by_schedule, by_deployment, resumed = again["paused"]
    assert by_schedule[1:] == (False, [False]) and by_deployment[1:] == (True, [True])
    for said, *_ in (by_schedule, by_deployment):
        assert "was paused in Prefect's UI and stays so; to make it active, switch it on there" in said
    assert resumed == ("post_training/post_training-demo-scheduled runs at '0 2 * * *' Europe/Berlin\n", False, [True])


def test_schedules_that_people_made_or_changed_in_the_ui_stay(servers):
    """Registering again, which containers do whenever they start, removed them without a word."""
    register = (
        "from flows.deploy import apply, cron_schedule; from flows.single import stage_flow\napply(stage_flow('mix'),"
        " 'timed', {'queue': 'cpu', %r: cron_schedule('0 4 1 1 *', 'UTC', 'nightly')})"
    )
    times = lambda: sorted((one["schedule"]["cron"], one["active"]) for one in row()["schedules"])
    row = lambda: servers.deployment("stage-mix/timed")
    servers.python(register % "first_schedule")
    assert times() == [("0 4 1 1 *", True)]
    here = f"/deployments/{row()['id']}"
    moved = {"schedule": {"cron": "0 5 1 1 *", "timezone": "UTC"}}
    servers.api(f"{here}/schedules/{row()['schedules'][0]['id']}", moved, method="PATCH")
    servers.api(f"{here}/schedules", [{"schedule": {"cron": "0 6 1 1 *", "timezone": "UTC"}, "active": False}])
    servers.api(here, {"description": "edited"}, method="PATCH")
    servers.python(register % "first_schedule")
    assert times() == [("0 5 1 1 *", True), ("0 6 1 1 *", False)] and row()["description"] != "edited"
    servers.python(register % "schedule")  # as --nightly says it
    assert times() == [("0 4 1 1 *", True)]
    servers.api(here, method="DELETE")


def test_deploy_is_idempotent(servers, again):
    assert servers.deployed["paused"] == []
    assert again["said"] == {**servers.deployed, "paused": [NIGHTLY_RUN, RATE_STAGE]}
    assert again["after"] == again["before"]


def test_deployments_have_names_that_tell_them_apart_and_older_ones_are_removed(again):
    names = [name for name, _, _ in again["after"][0]]
    assert len(names) == len(set(names)) and "mine" in names and not {"form", "demo", "stage"} & set(names)


def test_deploying_again_writes_what_differs_and_leaves_the_rest(servers, again):
    """A text that was edited in the UI comes back; what is as it should be is not written, and what was paused stays
    so.
    """
    now = {name: servers.deployment(name) for name in again["rows"]}
    assert [schedule["active"] for schedule in now[NIGHTLY_RUN]["schedules"]] == [False]
    assert now[RATE_STAGE]["paused"] and not now[WORLD_STAGE]["paused"]
    assert now[RATE_STAGE]["description"] == again["rows"][RATE_STAGE]["description"] != "edited"
    assert now[WORLD_STAGE]["description"] == again["rows"][WORLD_STAGE]["description"] != "edited"
    assert now[MIX_STAGE]["updated"] == again["rows"][MIX_STAGE]["updated"]


def test_the_gpu_queue_lets_as_many_runs_through_as_there_are_slots(servers):
    def limits():
        queues = {
            row["name"]: row["concurrency_limit"] for row in servers.api("/work_pools/posttrain/queues/filter", {})
        }
        return queues["gpu"], servers.api("/v2/concurrency_limits/gpu")["limit"]

    before = limits()
    servers.python("from flows.deploy import install_pool; install_pool(gpu_slots=3)")
    assert limits() == (3, 3)
    servers.python("from flows.deploy import install_pool; install_pool()")
    assert limits() == (3, 3)
    servers.python(f"from flows.deploy import install_pool; install_pool(gpu_slots={before[1]})")
    assert limits() == before == (before[1], before[1])


def test_a_parameter_that_a_flow_does_not_have_is_refused_before_a_run_is_made(servers):
    with pytest.raises(AssertionError, match="409.*Additional properties are not allowed.*sead"):
        servers.start("stage-world/stage-world", {"sead": 1})


def test_forms_are_valid_json_schemas(servers):
    """Every parameter form is a schema that accepts the deployment's own defaults, with sections named after their
    steps.
    """
    deployments = servers.api("/deployments/filter", {"limit": 200})
    assert {"post_training", "post_training-demo", "post_training-nightly", "stage-sft"} <= {
        row["name"] for row in deployments
    }
    # recipes have the sections of the same stages, which differ by their titles; checking them all takes most of a
    # minute
    checked: set[str] = set()
    for row in deployments:
        schema, new = row["parameter_openapi_schema"], {}
        for name, section in schema.get("definitions", {}).items():
            if (plain := json.dumps({**section, "title": ""}, sort_keys=True)) not in checked:
                checked.add(plain)
                new[name] = section
        jsonschema.Draft202012Validator.check_schema({**schema, "definitions": new})
        if row["parameters"]:
            jsonschema.Draft202012Validator({**schema, "required": []}).validate({**row["parameters"]})
        assert "oneOf" not in str(schema), row["name"]
        definitions = schema.get("definitions", {})
        for place in (schema, *definitions.values()):
            for field, one in place.get("properties", {}).items():
                if "$ref" in one:  # as the UI puts them together
                    shown = {**definitions[one["$ref"].rpartition("/")[2]], **one}["title"]
                    assert shown.lower() == field.replace("_", " "), (row["name"], field, shown)


def test_a_deployment_says_what_its_flow_is_for_and_leaves_the_settings_to_the_form(again):
    assert again["rows"][NIGHTLY_RUN]["description"].endswith("judged on held-out\nprompts.")
    assert "Args:" not in again["rows"][MIX_STAGE]["description"]


@pytest.fixture(scope="module")
def world(servers):
    """(parameters, id) of a run of a stage's deployment that has ended well."""
    parameters = {"config": WORLD, "seed": 1}
    run = servers.start(WORLD_STAGE, parameters)
    assert servers.finished(run) == "Completed"
    return parameters, run


def test_stage_runs_from_its_form_and_is_cached_the_second_time(servers, world):
    parameters, first = world
    assert servers.tasks(first) == {"world · world": "Completed"}
    second = servers.start("stage-world/stage-world", parameters)
    assert servers.finished(second) == "Completed"
    assert servers.tasks(second) == {"world · world": "Cached"}
    artifacts = {artifact["key"]: artifact for artifact in servers.api("/artifacts/filter", {"limit": 200})}
    assert {"result-world", "mlflow-world"} <= artifacts.keys()
    page = artifacts["world-samples"]  # the page itself and not where it lies
    assert page["data"].startswith("# The world in samples") and page["description"] == "world: samples"


def test_run_against_the_servers_is_one_parent_with_children_in_mlflow(servers, world):
    import mlflow

    _, run = world
    client = mlflow.MlflowClient(servers.urls["mlflow"])
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    runs = client.search_runs(experiments, max_results=200)
    (parent,) = [
        one
        for one in runs
        if one.data.tags.get("posttrain.kind") == "flow" and one.data.tags.get("posttrain.run") == run
    ]
    children = [one for one in runs if one.data.tags.get("mlflow.parentRunId") == parent.info.run_id]
    assert [one.info.status for one in (parent, *children)] == ["FINISHED"] * 2
    (task,) = servers.api("/task_runs/filter", {"flow_runs": {"id": {"any_": [run]}}})
    page = f"[Prefect task run]({servers.urls['prefect']}/v2/runs/task-run/{task['id']})"
    assert page in children[0].data.tags["mlflow.note.content"]
    # in place, so that they can be read and written without the server too
    assert children[0].info.artifact_uri.startswith((servers.home / "mlartifacts").as_uri())
    assert "record.json" in [one.path for one in client.list_artifacts(children[0].info.run_id)]


def test_cancel_kills_the_stage_and_frees_its_slot(servers, slow_recipe):
    run = servers.start(slow_recipe, {"config": {"slow": {"seconds": 600}}})
    ours = servers.wait(lambda: stage_processes(servers.home))
    servers.wait(lambda: servers.api("/v2/concurrency_limits/gpu")["active_slots"] == 1)
    servers.api(f"/flow_runs/{run}/set_state", {"state": {"type": "CANCELLING", "name": "Cancelling"}})
    assert servers.finished(run) == "Cancelled"
    servers.wait(lambda: not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in ours))
    servers.wait(lambda: servers.api("/v2/concurrency_limits/gpu")["active_slots"] == 0, limit=90)
    assert servers.json("status")["gpu"] == []
    assert servers.json("show", run)["status"] == "KILLED"
    servers.wait(lambda: (servers.home / f"cancelled-{run}").exists())  # the flow's own hook


def test_the_log_of_a_run_that_a_stage_refuses_has_the_message_and_no_traceback(servers, slow_recipe):
    """Three tracebacks of a hundred lines hid it."""

    def told(deployment, parameters, what) -> list[str]:
        run = servers.start(deployment, parameters)
        assert servers.finished(run) == "Failed"
        errors = {"flow_run_id": {"any_": [run]}, "level": {"ge_": 40}}
        read = lambda: [row["message"] for row in servers.api("/logs/filter", {"logs": errors})]
        return servers.wait(lambda: any(what in text for text in found) and found if (found := read()) else None)

    failed = told(
        slow_recipe, {"config": {"seed": 14, "slow": {"fail": True}}}, "stage slow failed: it was told to fail"
    )
    odd = {"inputs": {"text": "dataset:none@latest"}, "config": {"hidden_size": 100, "num_attention_heads": 8}}
    refused = told("stage-base-model/stage-base-model", odd, "write hidden_size 96")  # the form's schema allows it
    assert not any("Traceback" in text for text in failed + refused), failed + refused


def test_run_declared_crashed_while_it_lives_ends_once_and_the_worker_goes_on(servers, slow_recipe):
    """A server that is busy for minutes loses heartbeats; the run is then started again beside its first process, waits
    for that one's stage and takes what it made. Prefect's worker would die of it if it had a limit."""
    worker = worker_processes(servers)
    run = servers.start(slow_recipe, {"config": {"slow": {"seconds": 75}}})
    servers.wait(lambda: servers.api("/v2/concurrency_limits/gpu")["active_slots"] == 1)
    servers.api(f"/flow_runs/{run}/set_state", {"state": {"type": "CRASHED", "name": "Crashed"}, "force": True})
    # a locked SQLite holds the server up for minutes
    servers.wait(lambda: servers.state(run) == "Completed", limit=400)
    rows = {"flow_runs": {"id": {"any_": [run]}}}
    servers.wait(
        lambda: sorted(row["state_name"] for row in servers.api("/task_runs/filter", rows)) == ["Cached", "Completed"],
        limit=400,
    )
    assert worker_processes(servers) == worker


def test_a_run_whose_process_is_killed_starts_again_once(servers, slow_recipe):
    """Prefect reports such a crash twice, by its runner and seconds later by its worker: two processes of the run would
    start.
    """
    run = servers.start(slow_recipe, {"config": {"seed": 9, "slow": {"seconds": 5}}})
    servers.wait(lambda: servers.state(run) == "Running")
    engine = servers.wait(
        lambda: next(
            (
                process
                for process in psutil.process_iter(["cmdline", "environ"])
                if "prefect.engine" in (process.info["cmdline"] or [])
                and (process.info["environ"] or {}).get("POSTTRAIN_HOME") == str(servers.home)
            ),
            None,
        )
    )
    engine.kill()
    servers.wait(lambda: servers.state(run) == "Completed", limit=400)
    states = [row["name"] for row in servers.api(f"/flow_run_states/?flow_run_id={run}")]
    assert states.count("AwaitingRetry") == 1 and states.count("Running") == 2, states
    (page,) = servers.api(
        "/artifacts/filter", {"artifacts": {"key": {"any_": ["slow-recipe-results"]}, "flow_run_id": {"any_": [run]}}}
    )
    assert page["task_run_id"] is None and "| slow | 0.250 |" in page["data"] and "model:slow/1" in page["data"]
    told = lambda: {row["message"] for row in servers.api("/logs/filter", {"logs": {"flow_run_id": {"any_": [run]}}})}
    servers.wait(lambda: f"results: {servers.urls['prefect']}/v2/artifacts/artifact/{page['id']}" in told())


def test_servers_and_a_worker_that_are_killed_are_started_again_and_the_run_goes_on(servers, slow_recipe):
    run = servers.start(slow_recipe, {"config": {"slow": {"seconds": 20}}, "force": ["slow"]})
    servers.wait(lambda: servers.api("/v2/concurrency_limits/gpu")["active_slots"] == 1)
    old = [
        *worker_processes(servers),
        *service_processes(servers, "prefect", "server"),
        *service_processes(servers, "mlflow", "server"),
    ]
    assert len(old) == 3
    for process in old:
        process.kill()
    servers.wait(
        lambda: (
            worker_processes(servers)
            and all(
                answers(servers.urls[name] + path) for name, path in (("prefect", "/api/health"), ("mlflow", "/health"))
            )
        ),
        limit=300,
    )
    assert servers.finished(run) == "Completed"
    assert all(row["running"] for row in servers.json("status")["servers"].values())
    assert servers.cli("doctor").stdout.count("ended with status -9") == 3
    another = servers.start("stage-world/stage-world", {"config": WORLD, "seed": 3})
    assert servers.finished(another) == "Completed"


def test_a_worker_that_is_killed_alone_is_started_again_and_its_run_ends_as_it_would_have(servers, slow_recipe):
    """What the run says has nowhere to go any more, and nobody waits for its process."""
    run = servers.start(slow_recipe, {"config": {"seed": 12, "slow": {"seconds": 20}}})
    servers.wait(lambda: stage_processes(servers.home))
    (worker,) = worker_processes(servers)
    worker.kill()
    servers.wait(lambda: worker_processes(servers) not in ([], [worker]), limit=120)
    assert servers.finished(run) == "Completed"
    states = [row["name"] for row in servers.api(f"/flow_run_states/?flow_run_id={run}")]
    assert states.count("Running") == 1, states


def test_a_run_that_is_killed_with_all_servers_starts_again_once_when_they_are_up(servers, slow_recipe):
    """As when the machine loses power: no server sees the last heartbeats, and `posttrain up` is all that follows."""
    run = servers.start(slow_recipe, {"config": {"seed": 11, "slow": {"seconds": 20}}})
    servers.wait(lambda: stage_processes(servers.home))
    assert servers.state(run) == "Running"
    everything = [
        process
        for process in psutil.process_iter(["environ"])
        if (process.info["environ"] or {}).get("POSTTRAIN_HOME") == str(servers.home)
    ]
    assert len(everything) >= 8  # three services and what keeps them, the run and its stage
    for process in everything:
        process.suspend()
    for process in everything:
        process.kill()
    assert not psutil.wait_procs(everything, timeout=60)[1]
    assert servers.json("up") == servers.urls
    assert f"{servers.urls['mlflow']}/#/models?workflowType=machine_learning" in servers.cli("up").stdout
    servers.wait(lambda: servers.state(run) == "Completed", limit=240)  # sooner than heartbeats could be missed
    states = [row["name"] for row in servers.api(f"/flow_run_states/?flow_run_id={run}")]
    assert [states.count(name) for name in ("Crashed", "AwaitingRetry", "Running")] == [1, 1, 2], states


def service_processes(servers, *words):
    """The commands under flows.keep that hold these arguments in a row."""
    return [
        process
        for process in psutil.process_iter(["cmdline", "environ"])
        if "flows.keep" not in (line := process.info["cmdline"] or [])
        and any(line[i : i + len(words)] == [*words] for i in range(len(line)))
        and (process.info["environ"] or {}).get("POSTTRAIN_HOME") == str(servers.home)
    ]


def worker_processes(servers):
    return service_processes(servers, "worker", "start")


def test_crash_recovery_is_installed(servers):
    found = {row["name"]: row for row in servers.api("/automations/filter", {"limit": 200})}
    lost, recover = found["posttrain: heartbeat lost"], found["posttrain: recover crashed runs"]
    assert lost["enabled"] and lost["trigger"]["posture"] == "Proactive" and lost["trigger"]["within"] >= 300
    assert lost["actions"][0]["state"] == "CRASHED"
    assert (
        recover["enabled"]
        and recover["trigger"]["posture"] == "Proactive"
        and recover["trigger"]["after"] == ["prefect.flow-run.Crashed"]
    )
    assert recover["actions"][0] | {"state": "SCHEDULED", "name": "AwaitingRetry"} == recover["actions"][0]


def test_new_pairs_start_the_preference_recipe(servers, tmp_path):
    data = tmp_path / "pairs.jsonl"
    data.write_text(
        "".join(f'{{"prompt": "say {i}", "chosen": "number {i} it is", "rejected": "no {i}"}}\n' for i in range(40))
    )
    result = servers.json(
        "stage", "ingest", "--input", f"data={data}", "--set", "kind=pairs/1", "--name-as", "incoming"
    )
    deployment = servers.deployment("preference/preference")["id"]
    runs = servers.wait(
        lambda: servers.api("/flow_runs/filter", {"deployments": {"id": {"any_": [deployment]}}}), limit=300
    )
    assert runs[0]["parameters"]["config"]["data"]["path"] == result["outputs"]["data"]
    for run in runs:
        servers.api(
            f"/flow_runs/{run['id']}/set_state", {"state": {"type": "CANCELLED", "name": "Cancelled"}, "force": True}
        )


def test_what_is_published_and_promoted_is_told_to_automations(servers, tmp_path):
    made = servers.json("stage", "tests.toy_stage", "--set", "steps=6", "--name-as", "told")["outputs"]
    named = lambda name: {"filter": {"event": {"name": [name]}}}
    events = lambda kind, what: servers.api("/events/filter", named(f"posttrain.{kind}.{what}"))["events"]
    for kind, output in (("model", "model"), ("dataset", "data")):
        resource = f"posttrain.{kind}.told"
        (told,) = servers.wait(
            lambda: [one for one in events(kind, "published") if one["resource"]["prefect.resource.id"] == resource]
        )
        assert told["payload"]["ref"] == made[output] and told["resource"]["posttrain.published-by"] == "stage"
    decision = {"promote": True, "reasons": [], "champion": None}
    servers.python(
        "from storage.datasets import write_dataset; from tasks.promotion import conclude\n"
        f"write_dataset({str(tmp_path / 'decision')!r}, 'decision', 'eval_scores/1', [], meta={{'decision': {decision}}})\n"
        f"for _ in range(2): conclude({made['model']!r}, {str(tmp_path / 'decision')!r}, name='hero')"
    )
    (told,) = servers.wait(lambda: events("model", "promoted"))
    assert told["payload"] == {
        "ref": made["model"],
        "name": "hero",
        "digest": told["payload"]["digest"],
        "version": 1,
        "alias": "champion",
    }


def test_doctor_is_content(servers):
    checks = servers.json("doctor")
    assert checks["ok"], checks
    for name in ("prefect", "mlflow"):
        assert any(name in check["text"].lower() for check in checks["checks"])


def test_nothing_calls_home(servers):
    """The servers, the worker, the flows and the stages of all the tests above spoke to this machine only."""
    guard = subprocess.run(
        [sys.executable, "-c", "import socket; socket.create_connection(('192.0.2.1', 9), 1)"],
        capture_output=True,
        text=True,
        env={**servers.env, "OFFLINE_LOG": str(servers.home / "guard.txt")},
    )
    assert "do not leave this machine" in guard.stderr and "192.0.2.1" in (servers.home / "guard.txt").read_text()
    assert not servers.calls_home.exists(), servers.calls_home.read_text()
