"""What a bad disk leaves behind: the doctor names it and what to do, and what it says works."""

import contextlib
import json
import os
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from stages.spec import PROJECT_ROOT
from storage import outbox, records, registry, removal, store, tracking
from storage.files import database_damage
from storage.outbox import tracking_uri
from tasks.run import run_stage
from tests.serving import with_prefects_tables

TOY = "tests.toy_stage"


def run_apart(program):
    """Run a program in a process of its own, with the state directory of this one."""
    subprocess.run(
        [sys.executable, "-c", program],
        check=True,
        cwd=PROJECT_ROOT,
        env=os.environ | {"PYTHONPATH": str(PROJECT_ROOT)},
        timeout=300,
    )


def told(state, check):
    """What a check of the doctor finds wrong."""
    from flows import doctor

    return [text for ok, text in getattr(doctor, check)(state, False) if not ok]


def shortened(path):
    os.truncate(path, 5)


def changed(path):
    """One byte, as bad memory does it; the size stays."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def emptied(path):
    path.write_bytes(b"")


@pytest.mark.parametrize("harm", [shortened, changed, emptied, os.unlink])
@pytest.mark.parametrize(
    "output, file", [("model", "weights.bin"), ("data", "part-00000.parquet"), ("data", "manifest.json")]
)
def test_the_doctor_sees_every_kind_of_damage_and_rerun_mends_it(state_dir, harm, output, file):
    result = run_stage(TOY, {}, {"steps": 3}, name_as="kept")
    assert told(state_dir, "contents") == []
    path = next(
        p for p in (state_dir / f"{output}s" if output == "model" else state_dir / "datasets" / "kept").rglob(file)
    )
    path.chmod(0o644)
    harm(path)
    found = told(state_dir, "contents")
    assert len(found) == 1 and "posttrain rerun" in found[0], found
    ref = found[0].split("`posttrain rerun ")[1].split("`")[0]
    assert records.makers_of(records.digest_of(ref))[0]["key"] == result.key
    again = run_stage(TOY, {}, {"steps": 3}, name_as="kept", force=True)
    assert again.outputs == result.outputs and told(state_dir, "contents") == []


def test_a_model_that_is_gone_is_made_again_by_the_name_it_had(state_dir):
    """`posttrain rerun` asked for the very files that were to be made again."""
    result = run_stage(TOY, {}, {"steps": 3}, name_as="kept")
    ref = result.outputs["model"]
    shutil.rmtree(result.paths["model"])
    for name in (ref, "model:kept/1", "model:kept@candidate", "model:kept@latest"):
        assert records.makers_of(records.digest_of(name))[0]["key"] == result.key
    with pytest.raises(store.StoreError, match="`posttrain rerun model:kept/1` makes them again"):
        store.resolve("model:kept/1")
    with pytest.raises(store.StoreError):
        records.digest_of("model:other/1")
    with_prefects_tables(state_dir)
    env = {**os.environ, "POSTTRAIN_TRACKING": "off", "PYTHONPATH": str(PROJECT_ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "flows.cli", "rerun", "model:kept/1", "--json"],
        cwd=PROJECT_ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert (
        all(row["same"] for row in json.loads(done.stdout.splitlines()[-1])["compared"])
        and store.resolve("model:kept/1").path == result.paths["model"]
    )


def test_a_damaged_store_model_is_refused_before_a_stage_starts_on_it(state_dir, tmp_path):
    import torch
    from safetensors.torch import save_file

    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "config.json").write_text("{}")
    save_file({"w": torch.zeros(200)}, tmp_path / "made" / "model.safetensors")
    found = store.publish_model(tmp_path / "made")
    os.truncate(f"{found.path}/model.safetensors", 300)
    with pytest.raises(store.StoreError, match="damaged: model.safetensors has 300 of .* bytes"):
        store.resolve(found.ref, "model")


def test_the_doctor_names_records_and_lines_of_the_registry_that_cannot_be_read(state_dir):
    from tasks.run import finish_flow, start_flow

    run_stage(TOY, {}, {"steps": 3}, name_as="kept")
    run = start_flow("demo", {})
    finish_flow(run.run_id, "FINISHED")
    registry.set_alias("kept", "champion", 1)
    assert told(state_dir, "bookkeeping") == []
    log = state_dir / "registry" / "models.jsonl"
    lines = log.read_text().splitlines(keepends=True)
    log.write_text("".join([lines[0], "\0" * 40 + "\n", *lines[2:]]))
    for folder in ("records", "runs"):
        emptied(next((state_dir / folder).glob("*.json")))
    found = told(state_dir, "bookkeeping")
    assert (
        ["/records/" in found[0], "/runs/" in found[1], "line 2 of" in found[2]] == [True] * 3
        and len(found) == 3
        and "remove it" in found[0]
    )


def harmed(path):
    """The pages of the tables, not the head that says it is a database."""
    with open(path, "r+b") as handle:
        handle.seek(4096)
        handle.write(os.urandom(4096 * 20))


@pytest.mark.parametrize("harm", [harmed, lambda path: path.write_bytes(os.urandom(9000))])
def test_a_damaged_database_is_told_with_what_to_do(state_dir, harm):
    from flows import services

    for name in ("mlflow.db", "prefect/prefect.db"):
        path = state_dir / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with sqlite3.connect(path) as database:
            database.execute("CREATE TABLE t (x)")
            database.executemany("INSERT INTO t VALUES (?)", [("y" * 1000,) for _ in range(300)])
        database.close()
        assert database_damage(path) is None
        harm(path)
    mlflow, prefect = told(state_dir, "bookkeeping")
    for text, name in ((mlflow, "mlflow.db"), (prefect, "prefect/prefect.db")):
        assert f"{name} is damaged (" in text and f"mv {state_dir / name} " in text and "posttrain down" in text
    (state_dir / "logs").mkdir()
    (state_dir / "logs" / "prefect-embedded.log").write_text("")
    ended = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])
    with pytest.raises(services.ServiceError, match="its database .*prefect.db is damaged .*Move it away"):
        services._wait(
            "the embedded Prefect server",
            ended,
            "http://127.0.0.1:9/",
            str(state_dir / "logs" / "prefect-embedded.log"),
        )


def test_a_lost_mlflow_database_is_made_anew_and_told_everything_again(state_dir, monkeypatch):
    """Every run had been sent once, and so none was sent again: the UI stayed empty."""
    monkeypatch.setenv("POSTTRAIN_TRACKING", "on")
    monkeypatch.setenv("POSTTRAIN_TRACKING_WAIT_SECONDS", "200")
    program = (
        f"from tasks.run import run_stage; from storage import tracking; run_stage({TOY!r}, {{}}, {{'steps': 4}},"
        " name_as='kept'); assert tracking.sync()['pending'] == 0"
    )

    def shown():
        with contextlib.closing(sqlite3.connect(state_dir / "mlflow.db")) as database:
            return [
                database.execute(query).fetchall()
                for query in (
                    (
                        "SELECT r.name, r.status, m.key, m.step, m.value FROM runs r JOIN metrics m USING (run_uuid)"
                        " WHERE m.key NOT LIKE 'perf/%' ORDER BY 3, 4"
                    ),
                    "SELECT name, version, run_link IS NULL FROM model_versions",
                    "SELECT name, alias, version FROM registered_model_aliases",
                )
            ]

    # MLflow keeps the file open
    run_apart(program)
    before = shown()
    assert len(before[0]) > 8 and before[1] and before[2]
    # what was removed on purpose is told of without files
    removal.remove(removal.Shelf().named("model:kept/1")[0], unalias=True)
    shutil.rmtree(state_dir / "mlartifacts")
    for left in state_dir.glob("mlflow.db*"):
        left.unlink()
    for cursor in outbox.cursors():  # as of a home that was somewhere else when it was told
        assert json.loads(cursor.read_text())["ours"]
        cursor.write_text(cursor.read_text().replace(str(state_dir), "/before"))
    assert tracking.sync() == {"sent": 1, "pending": 0, "error": None}
    assert shown() == [*before[:2], []]


def test_a_database_from_an_older_backup_is_told_what_came_after_it_and_nothing_twice(state_dir, monkeypatch):
    """The cursors said that it knew all of it: runs, points, models and aliases stayed lost without a word."""
    from flows import doctor

    monkeypatch.setenv("POSTTRAIN_TRACKING", "on")
    monkeypatch.setenv("POSTTRAIN_TRACKING_WAIT_SECONDS", "200")
    program = (
        "import contextlib\nfrom tasks.run import StageError, finish_flow, run_stage, start_flow\n"
        "from storage import registry, tracking\n"
        f"def walk(steps, **more): return run_stage({TOY!r}, {{}}, {{'steps': steps}}, **more)\n"
        "def fail():\n"
        f"    with contextlib.suppress(StageError): run_stage({TOY!r}, {{}}, {{'steps': 20, 'fail_at': 7}})\n"
        "def flow():\n"
        "    run = start_flow('demo', {}); walk(6, flow_run=run.as_flow_run('walk')); finish_flow(run.run_id, 'FINISHED')\n"
    )
    end = "\nassert tracking.sync()['error'] is None"
    database, backup = state_dir / "mlflow.db", state_dir / "backup.db"

    def ask(query):
        with contextlib.closing(sqlite3.connect(database)) as opened:
            opened.execute("CREATE TEMP VIEW there AS SELECT * FROM runs WHERE lifecycle_stage = 'active'")
            return sorted(opened.execute(query).fetchall())

    def shown():
        return [
            ask("SELECT r.name, r.status, m.key, m.step, m.value FROM there r JOIN metrics m USING (run_uuid)"),
            ask("SELECT r.name, t.key, t.value FROM there r JOIN tags t USING (run_uuid) WHERE key LIKE 'posttrain.%'"),
            ask("SELECT r.name, p.key, p.value FROM there r JOIN params p USING (run_uuid)"),
            ask("SELECT tag_value FROM logged_model_tags WHERE tag_key = 'posttrain.digest'"),
            ask("SELECT name, version FROM model_versions"),
            ask("SELECT name, alias, version FROM registered_model_aliases"),
        ]

    run_apart(program + "walk(3, name_as='kept')\nfail()\nwalk(9)" + end)
    (removed,) = ask("SELECT run_uuid FROM params WHERE key = 'steps' AND value = '9'")
    with sqlite3.connect(database) as opened, sqlite3.connect(backup) as copy:
        opened.backup(copy)
        # of the failed stage half of its curves, as a copy that was made while they were sent
        copy.execute("DELETE FROM metrics WHERE step BETWEEN 4 AND 7 AND key = 'train/position'")
        copy.execute("UPDATE latest_metrics SET step = 3 WHERE key = 'train/position' AND step = 6")
    run_apart(
        program + "walk(20)\nfail()\nwalk(5, name_as='kept')\nflow()\nregistry.set_alias('kept', 'champion', 2)"
        "\nfrom mlflow import MlflowClient"
        f"\nMlflowClient(tracking_uri=tracking.tracking_uri()).delete_run({removed[0]!r})" + end
    )
    before = shown()
    assert ("kept", "champion", 2) in before[5] and len(before[3]) == 5
    for left in state_dir.glob("mlflow.db*"):
        left.unlink()
    with sqlite3.connect(backup) as copy:  # that one run somebody removed for good, with its files
        for table in ("metrics", "latest_metrics", "tags", "params", "runs"):
            copy.execute(f"DELETE FROM {table} WHERE run_uuid = ?", removed)
    (artifacts,) = (state_dir / "mlartifacts").glob(f"*/{removed[0]}/artifacts")
    shutil.rmtree(artifacts)
    os.replace(backup, database)
    ((good, text),) = doctor.outbox(state_dir, True)
    assert good and "what it lacked of 5 run(s)" in text
    assert shown() == before
    assert [*doctor.outbox(state_dir, True)] == [(True, "MLflow has everything")]


def test_a_process_that_has_the_lost_database_open_goes_on_with_the_one_that_was_made_meanwhile(
    state_dir, monkeypatch, capfd
):
    """It looked its runs up in the old file, to which it could write no more, and noted them as known: nobody told the
    new one of them.
    """
    monkeypatch.setenv("POSTTRAIN_TRACKING", "on")
    monkeypatch.setenv("POSTTRAIN_TRACKING_WAIT_SECONDS", "200")
    first = run_stage(TOY, {}, {"steps": 4}, name_as="kept")
    assert first.mlflow_run_id
    for file in state_dir.glob("mlflow.db*"):
        file.rename(file.with_name(file.name + ".damaged"))
    # the runs are told again by this process, which has the old one open, and the rest by another
    program = "from storage import tracking; tracking.make_database(tracking.tracking_uri())"
    run_apart(program)
    second = run_stage(TOY, {}, {"steps": 5}, name_as="kept")
    for unit in outbox.pending():
        tracking.flush(unit, 120)
    tracking.flush_registry(120)
    assert outbox.pending() == [] and "could not be told" not in capfd.readouterr().err
    with contextlib.closing(sqlite3.connect(state_dir / "mlflow.db")) as database:
        runs = {run for (run,) in database.execute("SELECT run_uuid FROM runs WHERE status = 'FINISHED'")}
        (versions,) = database.execute("SELECT count(*) FROM model_versions WHERE name = 'kept'").fetchone()
    assert second.mlflow_run_id in runs and len(runs) == versions == 2


def test_a_damaged_line_of_the_registry_costs_that_line_alone(state_dir):
    """A byte that is no UTF-8 made every command that looks at models fail, and one that is JSON but no entry, too."""
    registry.register("kept", "a" * 64)
    log = state_dir / "registry" / "models.jsonl"
    bad = log.read_bytes().splitlines()[0].replace(b"kept", b"k\xffpt")
    log.write_bytes(log.read_bytes() + bad + b"\n17\n{}\n" + b"\0" * 20 + b"\n")
    assert registry.register("kept", "b" * 64) == 2
    assert sorted(registry.models()) == ["kept"] and sorted(registry.models()["kept"].versions) == [1, 2]
    (wrong,) = told(state_dir, "bookkeeping")
    assert wrong.startswith("lines 3, 4, 5, 6 of")


def touched(record):
    """Other times, the same content: what a copy of a home has."""
    for output in record["outputs"].values():
        for path in Path(output["path"]).iterdir():
            os.utime(path, (1, 1))


def test_who_checks_a_record_does_not_write_it_over_one_made_meanwhile(state_dir):
    """The doctor reads all records, then for long their files; a stage that was made again meanwhile lost its record."""
    record = records.read(run_stage(TOY, {}, {"steps": 2}).key)
    touched(record)
    records.write(newer := {**records.read(record["key"]), "finished": record["finished"] + 1.0, "label": "newer"})
    assert records.problems(record) == []
    assert records.read(record["key"]) == newer
    records.record_path(record["key"]).unlink()  # taken away by its user
    assert records.problems({**record, "outputs": {n: {**o, "stat": ""} for n, o in record["outputs"].items()}}) == []
    assert records.read(record["key"]) is None


def test_a_result_is_found_also_where_its_times_cannot_be_written_down(state_dir, monkeypatch):
    """A full disk, or the home of somebody else: content is read again next time, and nothing is computed again."""
    record = records.read(run_stage(TOY, {}, {"steps": 2}).key)
    touched(record)

    def full(*given):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(records, "write", full)
    assert records.find(record["key"])["outputs"].keys() == record["outputs"].keys()


def test_what_a_server_of_the_users_own_was_told_is_not_told_again_where_the_homes_first_database_is_made(state_dir):
    """One on this machine was taken for the home's, and all its curves would have been sent to it twice."""
    (state_dir).mkdir()
    (state_dir / "services.json").write_text(json.dumps({"mlflow": {"url": "http://127.0.0.1:5001", "pid": 0}}))
    told_to = {
        "own-server": "http://localhost:8080",
        "own-file": f"sqlite:///{state_dir.parent / 'own.db'}",
        "up": "http://localhost:5001/",
        "file": tracking_uri(),
    }
    for unit, uri in told_to.items():
        path, cursor = outbox.done_files_of(unit)
        path.write_text(json.dumps({"unit": unit, "type": "flow"}))
        cursor.write_text(json.dumps({"run_id": unit, "uri": uri, "ours": outbox.is_ours(uri)}))
    (state_dir / "outbox" / "models.json").write_text(json.dumps({uri: {"log": 3} for uri in told_to.values()}))
    assert outbox.forget() == 2
    assert sorted(outbox.pending()) == ["file", "up"]
    assert sorted(cursor.stem for cursor in outbox.cursors()) == ["own-file.cursor", "own-server.cursor"]
    kept = json.loads((state_dir / "outbox" / "models.json").read_text())
    assert sorted(kept) == sorted([told_to["own-server"], told_to["own-file"]])
