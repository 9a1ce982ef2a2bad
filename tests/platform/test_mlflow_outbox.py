"""MLflow shows what is on disk: once, truly, and also after it was away."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stages.spec import PROJECT_ROOT
from flows.outcome import mlflow_page
from storage import mlflow_client, mlflow_database, mlflow_models, outbox, projector, records, registry, tracking
from storage.mlflow_run import MlflowRun
from storage.files import atomic_write_json, read_json
from tasks.run import StageError, finish_flow, run_stage, start_flow
from tasks.stopping import Cancelled

TOY = "tests.toy_stage"


@pytest.fixture(autouse=True)
def projection_on(state_dir, monkeypatch, mlflow_template):
    """A database whose tables exist already (making them takes longest)."""
    state_dir.mkdir(parents=True)
    shutil.copy(mlflow_template, state_dir / "mlflow.db")
    monkeypatch.setenv("POSTTRAIN_TRACKING", "on")
    monkeypatch.setenv("POSTTRAIN_TRACKING_WAIT_SECONDS", "120")
    monkeypatch.setattr(tracking, "RETRY_SECONDS", 0.5)


@pytest.fixture(scope="session")
def mlflow_template(tmp_path_factory):
    os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
    from mlflow import MlflowClient

    path = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    MlflowClient(tracking_uri=f"sqlite:///{path}").search_experiments()
    return path


def client():
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=outbox.tracking_uri(), registry_uri=outbox.tracking_uri())


def points(run_id, *keys):
    history = {k: client().get_metric_history(run_id, k if "/" in k else f"train/{k}") for k in keys}
    return {k: [(m.step, m.value) for m in sorted(found, key=lambda m: m.step)] for k, found in history.items()}


def expected(key):
    lines = [json.loads(line) for line in (records.home.work_dir(key) / "metrics.jsonl").read_text().splitlines()]
    return {k: [(line["step"], line["metrics"][k]) for line in lines] for k in ("position", "abs")}


def test_artifacts_live_under_the_state_directory(state_dir, tmp_path, monkeypatch):
    """Not in ./mlruns of wherever the command was given; and the user's environment stays as it was."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "raw.txt").write_text("x")
    run = start_flow("elsewhere", {}, prefect={"flow_run_id": "f-9", "url": None})
    run_stage(TOY, {"text": str(tmp_path / "raw.txt")}, {"steps": 3}, flow_run=run.as_flow_run("one"))
    finish_flow(run.run_id, "FINISHED")
    assert list((state_dir / "mlartifacts" / "elsewhere").rglob("record.json")) and not (tmp_path / "mlruns").exists()
    assert "MLFLOW_TRACKING_URI" not in os.environ


@pytest.mark.parametrize("cut_off", [False, True])
def test_the_first_stage_of_a_home_gets_a_whole_database(state_dir, monkeypatch, cut_off):
    """A stage of a second ended within MLflow's migrations, which cannot go on from there; and the next one found what
    was left.
    """
    import sqlite3

    (state_dir / "mlflow.db").unlink()
    if cut_off:
        with sqlite3.connect(state_dir / "mlflow.db") as half:
            half.execute("CREATE TABLE _alembic_tmp_jobs (id INTEGER)")
    monkeypatch.setenv("POSTTRAIN_TRACKING_WAIT_SECONDS", "120" if cut_off else "0.1")
    monkeypatch.setattr(tracking, "FIRST_SECONDS", 120.0)
    (state_dir / "raw.txt").write_text("x\ny\n")
    result = run_stage(TOY, {"text": str(state_dir / "raw.txt")}, {"steps": 3})
    # waited for although the limit was short
    assert result.mlflow_run_id and client().get_run(result.mlflow_run_id).info.status == "FINISHED"
    assert not list(state_dir.glob("mlflow.db.new*"))


def test_who_ends_a_run_does_not_wait_for_the_first_database_of_a_home(state_dir, monkeypatch):
    """It takes long on a busy machine, and the run was begun a moment ago."""
    import threading

    (state_dir / "mlflow.db").unlink()
    made = threading.Event()
    monkeypatch.setattr(tracking.Projector, "project", lambda self, unit: (made.wait(200), None))
    monkeypatch.setenv("POSTTRAIN_TRACKING_WAIT_SECONDS", "0.1")
    (state_dir / "raw.txt").write_text("x\ny\n")

    def end(event):
        if event["event"] == "started":
            raise Cancelled("SIGTERM")

    run, began = start_flow("ended", {}), time.monotonic()
    try:
        with pytest.raises(Cancelled):
            run_stage(
                TOY, {"text": str(state_dir / "raw.txt")}, {"steps": 3}, flow_run=run.as_flow_run("one"), on_event=end
            )
        finish_flow(run.run_id, "KILLED", timeout=0.1)
        assert time.monotonic() - began < tracking.FIRST_SECONDS / 2
        assert len(outbox.pending()) == 2  # told by the next command
    finally:
        made.set()


def test_a_flow_as_mlflow_shows_it(state_dir, tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "ada")
    raw = tmp_path / "raw.txt"
    raw.write_text("x")
    run = start_flow("demo", {"sft": {"lr": 0.1}}, prefect={"flow_run_id": "f-1", "url": "http://prefect/runs/f-1"})
    first = run_stage(TOY, {"text": str(raw)}, {"steps": 6}, flow_run=run.as_flow_run("one"))
    second = run_stage(
        TOY,
        {"data": first.outputs["data"], "model": first.outputs["model"]},
        {"steps": 4},
        name_as="final",
        flow_run=run.as_flow_run("two"),
    )
    third = run_stage(TOY, {"text": str(raw)}, {"steps": 6}, flow_run=run.as_flow_run("three"))
    parent = finish_flow(run.run_id, "FINISHED", timeout=120)
    mlflow = client()
    assert outbox.pending() == [] and third.cached
    runs = {
        r.info.run_name: r for r in mlflow.search_runs([mlflow.get_experiment_by_name("posttrain/demo").experiment_id])
    }
    note = mlflow.get_experiment_by_name("posttrain/demo").tags["mlflow.note.content"]
    assert note.startswith("Runs of recipe `demo`; the + before a run shows its stages")
    assert len(runs) == 4 and {r.info.status for r in runs.values()} == {"FINISHED"}
    assert all(runs[n].data.tags["mlflow.parentRunId"] == parent for n in ("one", "two", "three"))
    origin = ("mlflow.user", "mlflow.source.name", "mlflow.source.type", "mlflow.source.git.commit")
    commit = records.git_commit(PROJECT_ROOT).removesuffix("-dirty") or None
    for r in runs.values():  # the columns "Created by", "Source" and "Version" of MLflow's UI
        assert [r.data.tags.get(tag) for tag in origin] == ["ada", "posttrain run demo", "LOCAL", commit]
        assert r.info.user_id == "ada"
    assert points(first.mlflow_run_id, "position", "abs") == expected(first.key)
    # MLflow's UI draws what has no group last, by name: the numbers of the end and nothing else
    assert {key.partition(":")[0] for key in runs["one"].data.metrics if "/" not in key} == {"final"}
    one, two = runs["one"], mlflow.get_run(runs["two"].info.run_id)
    assert (
        one.data.params["steps"] == "6"
        and one.data.params["seed"] == "0"
        and one.data.metrics["final:position"] == first.metrics["position"]
    )
    assert (
        one.data.metrics["perf/peak_memory_mib"] > 1
        and one.data.tags["prefect.flow_run_id"] == "f-1"
        and "http://prefect/runs/f-1" in one.data.tags["mlflow.note.content"]
    )
    assert (
        runs["three"].data.tags["posttrain.cached"] == "true"
        and runs["three"].data.metrics["final:position"] == first.metrics["position"]
    )
    data = two.inputs.dataset_inputs[0]
    full = {t.key: t.value for t in data.tags}
    assert (
        full["posttrain.digest"].startswith(data.dataset.digest)
        and len(full["posttrain.digest"]) == 64
        and data.dataset.name == "toy-data"
    )
    assert [m.model_id for m in two.inputs.model_inputs] == [
        mlflow_models.model_id_of(registry.lookup("toy").versions[1]["digest"])
    ]
    assert (
        mlflow.get_model_version_by_alias("final", "candidate").tags["posttrain.digest"]
        == registry.lookup("final").versions[1]["digest"]
    )
    described = mlflow.get_model_version_by_alias("final", "candidate").description
    assert "`model:final/1`, made by stage **toy**" in described and second.outputs["model"] not in described
    assert (
        f"- data: `{first.outputs['data']}`" in described
        and f"- position {second.metrics['position']:.4g}" in described
    )
    assert "`champion` passed the promotion gate, or a person" in mlflow.get_registered_model("final").description
    page = f"/#/experiments/{mlflow.get_run(parent).info.experiment_id}/runs/{parent}?workflowType=machine_learning"
    assert mlflow_page("http://s", run.run_id) == "http://s" + page and mlflow_page("http://s", "none") == "http://s"
    name, digest = first.outputs["data"].split("@")
    note = mlflow.get_run(parent).data.tags["mlflow.note.content"]
    assert f" {name}@{digest[:12]}, " in note and digest not in note
    model = mlflow.get_logged_model(two.outputs.model_outputs[0].model_id)
    assert str(model.status) in ("READY", "LoggedModelStatus.READY") and {m.key for m in model.metrics} == {
        "final:position"
    }
    stored = os.stat(os.path.join(second.paths["model"], "weights.bin"))
    assert (
        os.stat(os.path.join(mlflow_database.local_path(model.artifact_location), "weights.bin")).st_ino
        == stored.st_ino
    )
    assert {a.path for a in mlflow.list_artifacts(one.info.run_id, "reports")} == {
        "reports/walk.md",
        "reports/walk.json",
    }
    assert records.read(first.key)["mlflow"]["run_id"] == first.mlflow_run_id
    registry.record_decision("final", 1, promoted=True, evidence={"win_rate": 0.7})
    assert tracking.sync()["error"] is None
    champion = mlflow.get_model_version_by_alias("final", "champion")
    assert json.loads(champion.tags["posttrain.evidence"]) == {"win_rate": 0.7}
    top = mlflow.get_run(parent)
    assert (
        top.data.params == {"sft.lr": "0.1"}
        and top.data.metrics["two/position"] == second.metrics["position"]
        and "| two | toy | ran |" in top.data.tags["mlflow.note.content"]
    )


def test_the_numbers_of_a_stage_with_several_models_are_about_its_last(state_dir):
    """Those of an sft with publish_epochs were linked to the model of its first epoch, and the model was called after its
    last epoch, which it is."""
    result = run_stage("tests.epochs_stage", {}, {"weights": [1, 2]}, name_as="policy")
    assert result.outputs["epoch.1"] != result.outputs["epoch.2"] == result.outputs["model"]
    mlflow = client()
    logged = mlflow.search_logged_models([mlflow.get_run(result.mlflow_run_id).info.experiment_id])
    judged = {model.name: [metric.key for metric in model.metrics or []] for model in logged}
    assert judged == {"policy": ["final:last"], "policy-epoch-1": []}


def test_a_dataset_is_called_in_mlflow_as_it_was_published(state_dir):
    (state_dir / "raw.txt").write_text("x")
    first = run_stage(TOY, {"text": str(state_dir / "raw.txt")}, {"steps": 3}, name_as="pairs")
    assert first.outputs["data"].startswith("dataset:pairs@")
    second = run_stage(TOY, {"data": first.outputs["data"]}, {"steps": 3})
    assert [one.dataset.name for one in client().get_run(second.mlflow_run_id).inputs.dataset_inputs] == ["pairs"]


def test_kill_and_resume_is_one_run_with_each_point_once(state_dir):
    killed = []

    def kill(event):
        if event["event"] == "started":
            killed.append(event["pid"])
        if event["event"] == "metric" and event["step"] == 13:
            os.kill(killed[0], signal.SIGSTOP)  # on a busy machine it would end meanwhile
            tracking.flush(f"stage.toy.{key[:16]}", timeout=60)  # points beyond the checkpoint are in MLflow already
            os.kill(killed[0], signal.SIGKILL)

    from tasks.run import prepare

    key = prepare(TOY, {}, {"steps": 20}).key
    with pytest.raises(StageError):
        run_stage(TOY, {}, {"steps": 20, "sleep": 0.1}, on_event=kill)
    assert tracking.sync(timeout=60)["pending"] == 0
    failed = outbox.run_id_of(f"stage.toy.{key[:16]}")
    assert (
        client().get_run(failed).info.status == "FAILED"
        and "SIGKILL" in client().get_run(failed).data.tags["posttrain.error"]
        and client().get_run(failed).data.tags["mlflow.note.content"].startswith("**Error:** ")
    )
    result = run_stage(TOY, {}, {"steps": 20})
    assert result.mlflow_run_id == failed and client().get_run(failed).info.status == "FINISHED"
    told = client().get_run(failed).data.tags
    assert "posttrain.error" not in told and "Error" not in told["mlflow.note.content"]
    assert points(failed, "position", "abs") == expected(result.key)
    speed = [step for step, _ in points(failed, "perf/tokens_per_second")["perf/tokens_per_second"]]
    assert speed == list(range(20))  # the final one is the last step's


def test_a_failed_stage_is_shown_as_failed_when_its_command_ends(state_dir):
    """Without any later command, which would send what is left."""
    with pytest.raises(StageError):
        run_stage(TOY, {}, {"steps": 9, "fail_at": 7})
    code = (
        f"import sqlite3; print(sqlite3.connect({str(state_dir / 'mlflow.db')!r}).execute('select status from"
        " runs').fetchall())"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
        == "[('FAILED',)]"
    )


def test_server_away_then_back(state_dir, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("POSTTRAIN_TRACKING_WAIT_SECONDS", "1")
    run = start_flow("demo", {})
    result = run_stage(TOY, {}, {"steps": 6}, flow_run=run.as_flow_run("walk"))
    finish_flow(run.run_id, "FINISHED", timeout=1)
    assert result.mlflow_run_id is None and records.find(result.key)
    assert len(outbox.pending()) == 2
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    answer = tracking.sync()
    assert answer["error"] is None and answer["pending"] == 0 == len(outbox.pending())
    unit = outbox.unit_of(run.as_flow_run(), "walk", result.key)
    run_id = outbox.run_id_of(unit)
    assert points(run_id, "position", "abs") == expected(result.key)
    assert client().get_run(run_id).info.status == "FINISHED"
    assert client().get_model_version_by_alias("toy", "candidate").version


def test_batch_sent_but_not_noted_is_not_doubled(state_dir, tmp_path, monkeypatch):
    """Stop the projection at each write of its cursor in turn; whoever goes on sends nothing twice and leaves nothing
    out.
    """
    lines = [json.dumps({"step": s, "metrics": {"loss": 1.0 / (s + 1)}}) for s in range(5)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "perf.jsonl").write_text("\n".join(lines) + "\n")
    connection = mlflow_client.Connection()
    experiment = connection.experiment("cut")

    class Cut(Exception):
        pass

    for stop_at in range(5):
        run_id = client().create_run(experiment).info.run_id
        document = {"unit": f"u{stop_at}", "workdir": str(tmp_path)}
        writes = []

        def write(path, state):
            writes.append(path)
            if len(writes) == stop_at:
                raise Cut
            atomic_write_json(path, state)

        for _ in range(2):  # the second time nothing stops it
            cursor = read_json(outbox.files_of(document["unit"])[1], {})
            monkeypatch.setattr(mlflow_client, "atomic_write_json", write)
            told = MlflowRun(connection, document["unit"], run_id, cursor)
            try:
                told.metrics(document)
                told.perf(document)
            except Cut:
                pass
            monkeypatch.setattr(mlflow_client, "atomic_write_json", atomic_write_json)
        found = points(run_id, "loss", "perf/loss")
        assert found["loss"] == found["perf/loss"] == [(s, 1.0 / (s + 1)) for s in range(5)]


def test_dead_process_is_shown_as_killed(state_dir):
    code = (
        "from tasks.run import run_stage, start_flow; r = start_flow('demo', {}); print(r.run_id, flush=True);"
        f" run_stage({TOY!r}, {{}}, {{'steps': 900, 'sleep': 0.1}}, flow_run=r.as_flow_run('walk'), on_event=lambda e:"
        " e['event'] == 'metric' and print('go', flush=True))"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=PROJECT_ROOT, stdout=subprocess.PIPE, text=True)
    run_id = parent.stdout.readline().strip()
    assert parent.stdout.readline() == "go\n"
    parent.kill()
    parent.wait()
    assert records.get_run(run_id).status == "KILLED"
    assert tracking.sync()["pending"] == 0
    found = client().search_runs([client().get_experiment_by_name("posttrain/demo").experiment_id])
    assert len(found) == 2 and {r.info.status for r in found} == {"KILLED"}


def test_saying_how_things_stand_never_waits_for_mlflow(state_dir):
    """A stage that is being ended says so while the projection may be importing MLflow or waiting for a server."""
    import threading

    document = {"unit": "hangs", "type": "flow", "run_id": "r", "recipe": "demo"}
    with outbox.unit_lock("hangs", wait=True):  # a projection that hangs
        caller = threading.Thread(target=tracking.put, args=(document,), daemon=True)
        caller.start()
        caller.join(30)
        assert not caller.is_alive() and outbox.pending() == ["hangs"]


def test_a_run_that_was_deleted_in_mlflow_holds_up_no_other_and_is_there_again_when_it_goes_on(state_dir):
    """MLflow takes nothing for a deleted run: it stayed unsent for ever, and all that came after it with it."""

    def flow(identity):
        run = start_flow("demo", {}, identity=identity)
        tracking.flush(outbox.flow_unit(run.run_id), 120)
        return run.run_id

    failed = flow("failed")
    finish_flow(failed, "FAILED", "no", timeout=120)
    deleted, other = flow("deleted"), flow("other")
    told = {run: outbox.run_id_of(outbox.flow_unit(run)) for run in (failed, deleted, other)}
    for run in (failed, deleted):
        client().delete_run(told[run])
    for run in (deleted, other):
        records.finish_run(run, "FINISHED")
    assert tracking.sync() == {"sent": 2, "pending": 0, "error": None}
    assert client().get_run(told[deleted]).info.lifecycle_stage == "deleted"
    assert client().get_run(told[other]).info.status == "FINISHED"
    assert flow("failed") == failed
    finish_flow(failed, "FINISHED", timeout=120)
    found = client().get_run(told[failed]).info
    assert (found.lifecycle_stage, found.status) == ("active", "FINISHED") and not outbox.pending()


def test_a_model_that_was_deleted_in_mlflow_is_there_again_when_it_is_made_again(state_dir):
    """To make room, with `mlflow gc`: MLflow refused its metrics then, and the run was never complete."""
    from click.testing import CliRunner
    from mlflow.cli import gc

    first = run_stage(TOY, {}, {"steps": 3}, name_as="kept")
    (experiment,) = {one.experiment_id for one in client().search_experiments()} - {"0"}
    (model,) = client().search_logged_models([experiment])
    client().delete_logged_model(model.model_id)
    uri = outbox.tracking_uri()
    assert CliRunner().invoke(gc, ["--backend-store-uri", uri, "--tracking-uri", uri]).exit_code == 0
    assert not list((state_dir / "mlartifacts").rglob("weights.bin"))
    assert run_stage(TOY, {}, {"steps": 3}, name_as="kept", force=True).outputs == first.outputs
    assert tracking.sync()["error"] is None and not outbox.pending()
    (again,) = client().search_logged_models([experiment])
    assert again.model_id != model.model_id and len(list((state_dir / "mlartifacts").rglob("weights.bin"))) == 1


def test_a_model_that_was_removed_goes_from_mlflow_too_and_comes_back_with_it(state_dir):
    """MLflow's files are the same ones by other names: while they stayed nothing was freed."""
    from flows.remove import remove

    take = lambda ref, dry_run: remove([ref], before=None, unalias=True, dry_run=dry_run)
    first = run_stage(TOY, {}, {"steps": 3}, name_as="kept")
    (copy,) = (state_dir / "mlartifacts").glob("*/models/*/artifacts")
    weights = Path(first.paths["model"]) / "weights.bin"
    size = sum(file.stat().st_size for file in weights.parent.iterdir())
    assert os.path.samefile(copy / weights.name, weights)
    plan = take(first.outputs["model"], True)
    assert (plan["freed"], plan["shared"]) == (size, 0) and copy.is_dir()
    assert take(first.outputs["model"], False) == {**plan, "dry_run": False}
    assert not list(copy.parent.iterdir()) and not weights.parent.exists()
    again = run_stage(TOY, {}, {"steps": 3}, name_as="kept")
    assert not again.cached and again.outputs == first.outputs
    assert tracking.sync()["error"] is None and os.path.samefile(copy / weights.name, weights)


def test_a_unit_that_another_process_completes_meanwhile_is_not_pending(state_dir, monkeypatch):
    """It was listed and then gone, which ended the run that looked."""
    monkeypatch.setattr(tracking, "poke", lambda unit: None)
    for unit in ("a", "b"):
        tracking.put({"unit": unit, "type": "flow", "run_id": unit, "recipe": "demo"})
    real = Path.glob

    def glob(folder, pattern):
        found = list(real(folder, pattern))
        outbox.files_of("a")[0].unlink(missing_ok=True)
        return found

    monkeypatch.setattr(Path, "glob", glob)
    assert outbox.pending() == ["b"]


def test_what_is_said_while_a_unit_is_completed_is_not_lost(state_dir, monkeypatch):
    monkeypatch.setattr(tracking, "poke", lambda unit: None)
    first = {"unit": "slow", "type": "flow", "run_id": "r", "recipe": "demo"}
    tracking.put(first)

    class Slow(projector.Projector):
        def _flow(self, document, cursor):
            if "more" not in document:
                tracking.put({**first, "more": 1})
            return True

    projecting = Slow()
    assert projecting.project("slow") == (False, None) and outbox.pending() == ["slow"]
    assert projecting.project("slow") == (True, None) and outbox.pending() == []


def test_the_same_run_given_again_goes_on_in_its_mlflow_run(state_dir):
    first = start_flow("demo", {"x": 1}, run_id="flow-1", prefect={"flow_run_id": "flow-1"}, identity="same")
    stage = run_stage(TOY, {}, {"steps": 3}, flow_run=first.as_flow_run("walk"))
    parent = finish_flow(first.run_id, "KILLED", timeout=120)
    assert client().get_run(parent).info.status == "KILLED"
    again = start_flow("demo", {"x": 1}, run_id="flow-2", prefect={"flow_run_id": "flow-2"}, identity="same")
    assert again.run_id == "flow-1" and again.data["attempts"] == 2 and again.data["flow_runs"] == ["flow-1", "flow-2"]
    assert records.get_run("flow-2").run_id == "flow-1"
    assert run_stage(TOY, {}, {"steps": 3}, flow_run=again.as_flow_run("walk")).mlflow_run_id == stage.mlflow_run_id
    # flow-1 runs: a second copy is a run of its own
    assert start_flow("demo", {"x": 1}, run_id="flow-3", identity="same").run_id == "flow-3"
    finish_flow("flow-3", "FINISHED", timeout=120)
    assert (
        finish_flow("flow-1", "FINISHED", timeout=120) == parent and client().get_run(parent).info.status == "FINISHED"
    )
    # the newest one finished: nothing to go on with
    assert start_flow("demo", {"x": 1}, run_id="flow-4", identity="same").run_id == "flow-4"
    assert start_flow("demo", {"x": 2}, run_id="flow-5", identity="other").run_id == "flow-5"


def test_a_server_in_front_of_the_same_database_continues_what_was_sent(state_dir, monkeypatch):
    """Another address of one store is not another store: no point is sent twice."""
    result = run_stage(TOY, {}, {"steps": 6})
    unit = f"stage.{result.label}.{result.key[:16]}"
    done, cursor_path = outbox.done_files_of(unit)
    document = read_json(done)
    before = client().get_metric_history(result.mlflow_run_id, "train/position")
    # one slash more: the same file under another name
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:////{str(state_dir / 'mlflow.db')}")
    tracking.put({**document, "more": 1})
    assert tracking.flush(unit, timeout=120) == result.mlflow_run_id and outbox.pending() == []
    assert (
        len(client().get_metric_history(result.mlflow_run_id, "train/position"))
        == len(before)
        == len(expected(result.key)["position"])
    )


def aliases():
    return {model.name: model.aliases for model in client().search_registered_models()}


def test_the_champion_is_in_mlflow_when_the_run_ends(state_dir):
    """Promotion comes after the last stage: nothing that a later stage sends may be needed for it to be seen."""
    run = start_flow("demo", {})
    result = run_stage(TOY, {}, {"steps": 3}, name_as="toy", flow_run=run.as_flow_run("walk"))
    digest = result.outputs["model"].removeprefix("model:m-")
    version = registry.register(
        "policy",
        next(o["digest"] for o in records.read(result.key)["outputs"].values() if o["digest"].startswith(digest)),
    )
    registry.set_alias("policy", "champion", version)
    finish_flow(run.run_id, "FINISHED", timeout=120)
    assert aliases()["policy"]["champion"] in (1, "1") and "toy" in aliases()


def test_a_model_that_a_store_has_not_got_holds_up_its_own_name_only(state_dir, monkeypatch):
    first = run_stage(TOY, {}, {"steps": 3}, name_as="first")
    monkeypatch.setenv("POSTTRAIN_TRACKING", "off")
    run_stage(TOY, {}, {"steps": 4}, name_as="unseen")  # MLflow is never told
    monkeypatch.setenv("POSTTRAIN_TRACKING", "on")
    digest = next(o["digest"] for o in records.read(first.key)["outputs"].values() if o["kind"] == "model")
    registry.set_alias("policy", "champion", registry.register("policy", digest))
    tracking.flush_registry(120)
    assert {"first", "policy"} <= set(aliases()) and "unseen" not in aliases()
    assert "champion" in aliases()["policy"]
    # the same store under another address
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:////{str(state_dir / 'mlflow.db')}")
    registry.set_alias("policy", "champion", None)
    tracking.flush_registry(120)
    assert "champion" not in aliases()["policy"]
    run_stage(TOY, {}, {"steps": 4}, name_as="unseen", force=True)
    tracking.flush_registry(120)
    assert "unseen" in aliases()


def test_a_line_of_the_registry_that_is_damaged_after_it_was_told_hides_no_later_one(state_dir):
    """How many entries were told was compared with how many there are: with one less, the next one was not told; and
    one about a version whose own line is damaged kept all later ones back.
    """
    run_stage(TOY, {}, {"steps": 3}, name_as="first")
    tracking.flush_registry(120)
    log = state_dir / "registry" / "models.jsonl"
    lines = log.read_text().splitlines(keepends=True)
    log.write_text("x" + "".join(lines))  # the line of the version itself
    (record,) = records.all_records()
    registry.register("other", record["outputs"]["model"]["digest"])
    registry.set_alias("other", "champion", 1)
    tracking.flush_registry(120)
    assert aliases()["other"] == {"candidate": 1, "champion": 1} and aliases()["first"] == {"candidate": 1}
    (state_dir / "outbox" / "models.json").unlink()  # as of another store, which has the model and no name of it
    client().delete_registered_model("first")
    registry.set_alias("other", "champion", None)
    tracking.flush_registry(120)
    assert aliases() == {"other": {"candidate": 1}}
    log.write_text("".join(lines) + "".join(log.read_text().splitlines(keepends=True)[len(lines) :]))  # brought back
    tracking.flush_registry(120)
    assert aliases() == {"other": {"candidate": 1}, "first": {"candidate": 1}}


def test_a_moved_home_keeps_its_artifacts_and_leaves_the_old_place_alone(state_dir, tmp_path, monkeypatch):
    first = run_stage(TOY, {}, {"steps": 3})
    assert first.mlflow_run_id
    moved = tmp_path / "elsewhere" / "home"
    moved.parent.mkdir()
    os.rename(state_dir, moved)
    monkeypatch.setenv("POSTTRAIN_HOME", str(moved))
    second = run_stage(TOY, {}, {"steps": 4})
    assert second.mlflow_run_id and not state_dir.exists()
    for run in (first.mlflow_run_id, second.mlflow_run_id):
        assert client().get_run(run).info.artifact_uri.startswith((moved / "mlartifacts").as_uri() + "/")
        assert "record.json" in [entry.path for entry in client().list_artifacts(run)]
    assert run_stage(TOY, {}, {"steps": 3}).cached  # outputs are found at the new place too
    models = client().search_logged_models([client().get_run(first.mlflow_run_id).info.experiment_id])
    assert len(models) == 2 and all(model.artifact_location.startswith(moved.as_uri()) for model in models)


def test_what_was_begun_behind_a_server_goes_on_without_it(state_dir):
    """The server of `posttrain up` handed artifacts out from ``mlartifacts``; once it was stopped, no run of an
    experiment that it knew was complete in MLflow."""
    mlflow = client()
    for recipe in ("stages", "demo"):
        mlflow.create_experiment(f"posttrain/{recipe}", artifact_location=f"mlflow-artifacts:/{recipe}")
    theirs = mlflow.create_experiment("mine", artifact_location="mlflow-artifacts:/9")  # somebody else's
    of_theirs = mlflow.create_run(theirs).info.run_id
    raw = state_dir / "mlartifacts" / "stages" / "before" / "artifacts"
    raw.mkdir(parents=True)
    before = mlflow.create_run(mlflow.get_experiment_by_name("posttrain/stages").experiment_id).info.run_id
    shutil.move(raw, state_dir / "mlartifacts" / "stages" / before / "artifacts")
    (state_dir / "mlartifacts" / "stages" / before / "artifacts" / "sent.txt").write_text("by the server")
    result = run_stage(TOY, {}, {"steps": 3})
    assert outbox.pending() == [] and "record.json" in [
        one.path for one in client().list_artifacts(result.mlflow_run_id)
    ]
    assert [one.path for one in client().list_artifacts(before)] == ["sent.txt"]
    assert (state_dir / "mlartifacts" / "stages" / result.mlflow_run_id / "artifacts" / "record.json").is_file()
    assert client().get_experiment(theirs).artifact_location == "mlflow-artifacts:/9"
    assert client().get_run(of_theirs).info.artifact_uri.startswith("mlflow-artifacts:/9/")


@pytest.mark.parametrize("way", [os.rename, shutil.copytree])
def test_what_a_home_has_still_to_tell_is_told_from_where_it_is_now(state_dir, tmp_path, monkeypatch, way):
    """Documents name files by their whole path: metrics and reports were not found any more, a model's files neither,
    for which nothing else was told either, and of a copy the record in the first home was written to.
    """
    data = run_stage(TOY, {}, {"steps": 3})
    told = run_stage(TOY, {"data": data.outputs["data"]}, {"steps": 5})
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("POSTTRAIN_TRACKING_WAIT_SECONDS", "1")
    untold = run_stage(TOY, {"data": data.outputs["data"]}, {"steps": 4})
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    moved = tmp_path / "elsewhere" / "home"
    moved.parent.mkdir()
    way(state_dir, moved)
    monkeypatch.setenv("POSTTRAIN_HOME", str(moved))
    answer = tracking.sync()
    assert answer["error"] is None and answer["pending"] == 0 and answer["sent"] >= 1
    runs = [told.mlflow_run_id, outbox.run_id_of(outbox.unit_of(None, "toy", untold.key))]
    assert points(runs[1], "position", "abs") == expected(untold.key)
    for run, result in zip(runs, (told, untold)):
        found = client().get_run(run)
        assert {entry.path for entry in client().list_artifacts(run)} >= {"record.json", "reports"}
        assert found.data.tags["posttrain.record"] == str(records.record_path(result.key))
        assert found.data.tags["posttrain.workdir"] == str(moved / "work" / result.key)
        (source,) = [json.loads(one.dataset.source)["uri"] for one in found.inputs.dataset_inputs]
        assert source == data.paths["data"].replace(str(state_dir), str(moved))
    assert client().get_model_version_by_alias("toy", "candidate").tags["posttrain.key"] == untold.key
    if way is shutil.copytree:
        assert not read_json(state_dir / "records" / f"{untold.key}.json")["mlflow"]


def test_a_database_that_can_grow_no_more_is_told_of_in_one_line(state_dir, monkeypatch, capfd):
    """MLflow logs the whole statement with a traceback besides. Once there is room, the next run sends what is
    missing.
    """
    import sqlite3

    from sqlalchemy import Engine, event

    with sqlite3.connect(state_dir / "mlflow.db") as database:
        pages = database.execute("PRAGMA page_count").fetchone()[0]
    limit = lambda connection, _: connection.execute(f"PRAGMA max_page_count = {pages}")
    monkeypatch.setattr(mlflow_database, "_opened", {})
    event.listen(Engine, "connect", limit)
    try:
        with contextlib.suppress(StageError):
            result = run_stage(TOY, {}, {"steps": 400, "save_every": 1000})
    finally:
        event.remove(Engine, "connect", limit)
    told = capfd.readouterr().err
    assert (
        "MLflow (sqlite:///" in told and "could not be told: the disk is full" in told and "the next run sends" in told
    )
    assert "Traceback" not in told and "INSERT" not in told
    assert outbox.pending()
    # connections with the limit are closed
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    SqlAlchemyStore._engine_map[outbox.tracking_uri()].dispose()
    assert tracking.sync() == {"sent": 1, "pending": 0, "error": None}
    run_id = outbox.run_id_of(outbox.unit_of(None, "toy", result.key))
    assert points(run_id, "position", "abs") == expected(result.key)


def test_killed_after_any_call_of_mlflow_the_next_goes_on(state_dir, monkeypatch):
    """SIGKILL, or a full disk, after MLflow took a call and before the cursor says so: whoever goes on completes the
    run, and what it shows is there once.
    """
    monkeypatch.setattr(tracking, "poke", lambda unit: None)
    result = run_stage(TOY, {}, {"steps": 12, "save_every": 100})
    done = next(
        path
        for path in [
            *outbox.home.outbox_dir().glob("stage.*.json"),
            *outbox.home.subdir("outbox", "done").glob("stage.*.json"),
        ]
        if not path.name.endswith(".cursor.json")
    )
    document = read_json(done)
    assert document["status"] == "FINISHED"

    class Killed(BaseException):
        pass

    class Client:
        """MLflow's client; the process ends after so many calls that write."""

        def __init__(self, left):
            self.inner, self.left, self.last = client(), left, None

        def __getattr__(self, name):
            def call(*arguments, **named):
                answer = getattr(self.inner, name)(*arguments, **named)
                if name.startswith(("log_", "create_", "finalize_", "set_", "update_")):
                    self.left, self.last = self.left - 1, name
                    if self.left < 0:
                        raise Killed(name)
                return answer

            return call

    seen = []
    for stop in range(100):
        unit, cut = f"cut{stop}", Client(stop)
        atomic_write_json(
            outbox.files_of(unit)[0],
            {
                **document,
                "unit": unit,
                "outputs": {
                    name: {**o, "digest": f"{stop:064x}"} if o["kind"] == "model" else o
                    for name, o in document["outputs"].items()
                },
            },
        )
        projecting = projector.Projector()
        projecting.connection._client, projecting.connection._uri = cut, outbox.tracking_uri()
        try:
            projecting.project(unit)
        except Killed as killed:
            seen.append(str(killed))
        else:
            break
        assert projector.Projector().project(unit) == (True, None), seen[-1]
        run = client().get_run(outbox.run_id_of(unit))
        assert (
            run.info.status == "FINISHED"
            and len(run.outputs.model_outputs) == 1
            and points(run.info.run_id, "position", "abs") == expected(result.key)
        ), seen[-1]
    assert {"log_outputs", "log_batch", "create_run", "create_logged_model"} <= set(seen) and len(seen) > 10


def test_the_run_of_a_stage_from_its_deployment_is_called_after_the_stage_once():
    from storage.mlflow_text import flow_title

    run = {"run_id": "b55828fb-d20e", "recipe": "stage:sft", "prefect": {"flow_run_name": "sft · tiny · seed 0"}}
    assert flow_title(run) == "sft · tiny · seed 0 · b55828fb"
    assert flow_title({**run, "recipe": "dpo"}) == "dpo · sft · tiny · seed 0 · b55828fb"
    assert flow_title({**run, "prefect": None}) == "stage:sft · b55828fb"
