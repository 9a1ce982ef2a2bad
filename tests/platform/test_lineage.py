"""Where things come from, also where stages give back what they were given, and after the state directory was moved,
copied or lost a part.
"""

import os
import shutil
from pathlib import Path

import pytest

from storage import lineage, records, store
from tasks.run import run_stage
from tests.data.driver import write_lines

ROWS = [{"prompt": f"question {i}", "chosen": f"a good answer {i}", "rejected": "no"} for i in range(6)]


@pytest.fixture
def raw(tmp_path):
    return str(write_lines(tmp_path / "raw.jsonl", ROWS))


def leaves(node):
    """Paths of what came from outside."""
    found = [leaf for child in node["inputs"].values() for leaf in leaves(child)]
    return found or ([] if node.get("stage") else [node["path"]])


def test_stages_that_change_nothing_hide_no_origin(raw):
    """Ingesting a dataset again with other limits keeps its content and so its digest: every such stage is in the tree
    once, and the file at its end.
    """
    first = run_stage("ingest", {"data": raw}, {"dataset": "pairs"})
    digest = store.resolve(first.outputs["data"]).digest
    keys = [first.key]
    for least in (1, 2, 3):
        again = run_stage("ingest", {"data": first.outputs["data"]}, {"min_chars": least, "dataset": "pairs"})
        assert store.resolve(again.outputs["data"]).digest == digest
        keys.append(again.key)
    tree = lineage.tree(first.outputs["data"])
    assert leaves(tree) == [raw]
    chain, node = [], tree
    while node.get("key"):
        assert not node.get("again")
        chain.append(node["key"])
        node = node["inputs"]["data"]
    assert len(chain) == len(set(chain)) and set(chain) <= set(keys) and chain[-1] == keys[0]
    assert leaves(lineage.tree(again.key)) == [raw]


def test_what_was_made_later_is_no_origin(tmp_path, raw):
    """Another file with the same rows, read after a dataset was used, is not where that came from."""
    first = run_stage("ingest", {"data": raw}, {"dataset": "pairs"})
    used = run_stage("ingest", {"data": first.outputs["data"]}, {"kind": "unpaired/1", "dataset": "thumbs"})
    other = str(write_lines(tmp_path / "raw2.jsonl", [{"unused": None, **row} for row in ROWS]))
    shutil.move(raw, tmp_path / "was.jsonl")
    os.rename(other, raw)
    later = run_stage("ingest", {"data": raw}, {"dataset": "pairs", "limit": 1000})
    assert later.outputs == first.outputs and later.key != first.key
    node = lineage.tree(used.outputs["data"])["inputs"]["data"]
    assert node["key"] == first.key and lineage.tree(first.outputs["data"])["key"] == later.key


def test_what_made_a_dataset_is_known_when_its_files_are_gone(raw):
    """A month later, with the rows deleted to make room: its own lineage, that of what was made from it, and its
    settings.
    """
    from flows import report
    from flows.compare import load

    first = run_stage("ingest", {"data": raw}, {"dataset": "pairs", "min_chars": 2})
    second = run_stage("ingest", {"data": first.outputs["data"]}, {"kind": "unpaired/1", "dataset": "thumbs"})
    ref = first.outputs["data"]
    assert not report.describe(ref)["gone"] and not lineage.tree(second.outputs["data"])["inputs"]["data"]["gone"]
    shutil.rmtree(store.resolve(ref).path)
    node = lineage.tree(ref)
    assert node["key"] == first.key and node["gone"] and leaves(node) == [raw]
    text = lineage.lines(lineage.tree(second.outputs["data"]))
    assert [line.endswith("(its files are gone)") for line in text] == [False, True, False]
    shown = report.describe(ref)
    assert (
        shown["gone"]
        and shown["ref"] == ref
        and shown["made_by"]["config"]["min_chars"] == 2
        and shown["manifest"]["rows"] == 6
    )
    assert load(ref)["ingest"]["key"] == first.key
    with pytest.raises(store.StoreError):
        lineage.tree("dataset:never@latest")


def test_a_moved_home_is_whole_and_a_copy_stands_by_itself(state_dir, tmp_path, raw, monkeypatch):
    """After ``mv`` and after ``cp -r``: the same tree, cached results, and nothing is read from or written to where it
    was.
    """
    first = run_stage("ingest", {"data": raw}, {"dataset": "pairs"})
    config = {"kind": "unpaired/1", "dataset": "thumbs"}
    second = run_stage("ingest", {"data": first.outputs["data"]}, config)
    tree = lineage.tree(second.outputs["data"])
    moved, copied = tmp_path / "moved", tmp_path / "copied"
    os.rename(state_dir, moved)
    monkeypatch.setenv("POSTTRAIN_HOME", str(moved))
    assert lineage.lines(lineage.tree(second.outputs["data"])) == lineage.lines(tree)
    record = records.read(second.key)  # before anything is verified: what compare, costs and cards read
    assert (
        all(os.path.isdir(output["path"]) for output in record["outputs"].values())
        and os.path.isfile(os.path.join(record["workdir"], "SPEC.json"))
        and record["metrics_file"].startswith(str(moved))
    )
    assert record["reports"] and all(
        os.path.isfile(report[kind])
        for report in record["reports"]
        for kind in ("markdown", "table")
        if report.get(kind)
    )
    assert [one["workdir"] for one in records.all_records()] == [
        str(moved / "work" / key) for key in (first.key, second.key)
    ]
    again = run_stage("ingest", {"data": first.outputs["data"]}, config)
    assert again.cached and again.key == second.key and str(moved) in again.paths["data"]
    shutil.copytree(moved, copied)
    monkeypatch.setenv("POSTTRAIN_HOME", str(copied))
    again = run_stage("ingest", {"data": first.outputs["data"]}, config)
    assert again.cached and again.key == second.key and str(copied) in again.paths["data"], "a copy reads its own files"
    shutil.rmtree(store.resolve(first.outputs["data"]).path)  # a result in the middle
    assert leaves(lineage.tree(second.outputs["data"])) == [raw]
    with pytest.raises(store.StoreError):
        store.resolve(first.outputs["data"])
    made = run_stage("ingest", {"data": raw}, {"dataset": "pairs"})
    assert not made.cached and made.outputs == first.outputs
    assert run_stage("ingest", {"data": made.outputs["data"]}, config).cached


def test_a_step_that_trials_share_has_no_trials_name(raw):
    """Of a stage that several steps of a run share, the lineage and the card say what their names end in alike; a run
    that takes it from another one has a name of its own for it.
    """
    from storage.cards import dataset_card
    from tasks.run import finish_flow, start_flow

    def trial(run, name, least):
        shared = run_stage("ingest", {"data": raw}, {"dataset": "pairs"}, flow_run=run.as_flow_run(f"{name}.ingest"))
        return shared.key, run_stage(
            "ingest",
            {"data": shared.outputs["data"]},
            {"kind": "unpaired/1", "dataset": "thumbs", "max_pairs_per_prompt": least},
            flow_run=run.as_flow_run(f"{name}.label"),
        )

    sweep = start_flow("sweep", {})
    shared, first = trial(sweep, "max-0.1", 1)
    assert lineage.tree(first.outputs["data"])["inputs"]["data"]["label"] == "max-0.1.ingest"
    _, second = trial(sweep, "max-0.2", 2)
    finish_flow(sweep.run_id, "FINISHED")
    node = lineage.tree(second.key)
    assert (
        node["label"] == "max-0.2.label"
        and node["inputs"]["data"]["label"] == "ingest"
        and records.read(shared)["label"] == "max-0.1.ingest"
    )
    assert "ingest" in dataset_card(second.outputs["data"]) and "max-0.1.ingest" not in dataset_card(
        second.outputs["data"]
    )
    later = start_flow("preference", {})
    assert run_stage("ingest", {"data": raw}, {"dataset": "pairs"}, flow_run=later.as_flow_run("pairs")).cached
    third = run_stage(
        "ingest",
        {"data": first.outputs["data"]},
        {"kind": "unpaired/1", "dataset": "more"},
        flow_run=later.as_flow_run("more"),
    )
    assert lineage.tree(third.outputs["data"])["inputs"]["data"]["inputs"]["data"]["label"] == "pairs"


def trained(**settings):
    return run_stage("tests.toy_stage", {}, {"steps": 3, **settings}, name_as="kept")


def removed(*what, before=None, unalias=False, dry_run=False):
    from flows.remove import remove

    return remove(list(what), before=before, unalias=unalias, dry_run=dry_run)


def test_a_result_that_was_removed_is_known_no_damage_and_made_again(state_dir, raw, capsys):
    from flows import report
    from flows.remove import print_removed
    from tests.platform.test_damaged_state import told

    first = run_stage("ingest", {"data": raw}, name_as="pairs")
    config = {"kind": "unpaired/1"}
    second = run_stage("ingest", {"data": first.outputs["data"]}, config, name_as="thumbs")
    ref = first.outputs["data"]
    size = sum(file.stat().st_size for file in Path(first.paths["data"]).iterdir())
    plan = removed(ref, dry_run=True)
    assert plan["freed"] == plan["removed"][0]["bytes"] == size and os.path.isdir(first.paths["data"])
    assert [made.split("@")[0] for made in plan["removed"][0]["made_from_it"]] == [
        "dataset:thumbs",
        "dataset:thumbs-quarantine",
    ]
    done = removed("dataset:pairs@latest")
    assert done == {**plan, "dry_run": False} and not os.path.exists(first.paths["data"])
    print_removed(done)
    assert "freed by 1 model(s) and dataset(s)" in capsys.readouterr().out
    assert told(state_dir, "contents") == [] and removed(ref)["already"] == [ref[: len("dataset:pairs@") + 12]]
    node = lineage.tree(second.outputs["data"])["inputs"]["data"]
    assert node["gone"] and leaves(node) == [raw] and report.describe(ref)["made_by"]["stage"] == "ingest"
    for text in (ref, "dataset:pairs@latest"):
        with pytest.raises(store.StoreError, match="removed with `posttrain rm` on .* makes them again"):
            store.resolve(text)
    assert run_stage("ingest", {"data": second.outputs["data"]}, {"limit": 3}).outputs
    made = run_stage("ingest", {"data": raw}, name_as="pairs")
    assert not made.cached and made.outputs == first.outputs and store.resolve("dataset:pairs@latest").digest
    assert run_stage("ingest", {"data": made.outputs["data"]}, config).cached
    shutil.rmtree(first.paths["data"])
    assert len(told(state_dir, "contents")) == 1, "what was removed once and made again may be lost"
    os.unlink(raw)
    assert removed(second.key, dry_run=True)["removed"][0]["origin_gone"] == [raw]


def test_what_is_needed_is_not_removed(raw):
    """By aliases, a run that waits for people, a stage that runs, a deployment; the reason says what to do."""
    import sqlite3

    from flows.config import ConfigError
    from storage import home, leases, registry
    from storage.files import atomic_write_json
    from tasks.run import finish_flow, start_flow

    model = trained()
    with pytest.raises(ConfigError, match="model:kept/1 is candidate; .*--unalias"):
        removed(model.outputs["model"])
    with pytest.raises(ConfigError, match="candidate"):
        removed(model.key, model.outputs["data"])
    assert all(map(os.path.isdir, model.paths.values())), "all or nothing"

    pairs = run_stage("ingest", {"data": raw}, name_as="pairs")
    ref, digest = pairs.outputs["data"], store.resolve(pairs.outputs["data"]).digest
    run = start_flow("preference", {"data": {"path": "dataset:pairs@latest"}})
    for status, said in ((None, "running"), ("WAITING", "waiting")):
        if status:
            finish_flow(run.run_id, status)
        with pytest.raises(ConfigError, match=f"run {run.run_id} .{said}. reads it"):
            removed(ref)
        with pytest.raises(store.StoreError, match="still runs|waits for people"):
            removed(run.run_id)
    finish_flow(run.run_id, "FAILED", "so")

    work = home.work_dir("0" * 64)
    given = {"data": store.resolve(ref).to_dict()}
    atomic_write_json(work / "SPEC.json", {"stage": "stages.sft", "inputs": given})
    with leases.acquire("stage-" + "0" * 64):
        with pytest.raises(ConfigError, match="stage sft .000000000000., which is waiting, reads it"):
            removed(ref)

    from prefect.server.database.orm_models import Base  # the tables that this version of Prefect has

    file = home.subdir("prefect") / "prefect.db"
    with sqlite3.connect(file) as database:
        for name in ("flow", "deployment", "deployment_schedule", "flow_run"):
            columns = ", ".join(column.name for column in Base.metadata.tables[name].columns)
            database.execute(f"CREATE TABLE {name} ({columns})")
    with sqlite3.connect(file) as database:
        database.execute("INSERT INTO flow (id, name) VALUES ('f', 'preference')")
        database.execute(
            "INSERT INTO deployment (flow_id, name, parameters) VALUES ('f', 'nightly', ?)",
            ['{"config": {"data": {"path": "%s"}}}' % ref],
        )
    with pytest.raises(ConfigError, match="deployment preference/nightly names it"):
        removed(ref)
    with sqlite3.connect(file) as database:
        database.execute("DELETE FROM deployment")
    assert removed(ref)["freed"] > 0 and store.removed("dataset", "pairs", digest)

    gone = removed(model.outputs["model"], unalias=True)
    assert gone["freed"] > 0 and registry.models()["kept"].aliases == {} and not os.path.exists(model.paths["model"])
    again = trained()
    assert not again.cached and again.outputs == model.outputs and store.resolve("model:kept/1").path


def test_of_a_run_goes_what_no_other_run_has_and_by_age_what_is_not_used(raw):
    from tasks.run import finish_flow, start_flow

    runs = [start_flow("preference", {"seed": seed}) for seed in range(2)]
    for number, run in enumerate(runs):
        shared = run_stage("ingest", {"data": raw}, name_as="pairs", flow_run=run.as_flow_run("pairs"))
        own = run_stage(
            "ingest",
            {"data": shared.outputs["data"]},
            {"kind": "unpaired/1", "limit": 3 + number},
            name_as=f"own{number}",
            flow_run=run.as_flow_run("own"),
        )
        finish_flow(run.run_id, "FINISHED")
    assert removed(before="1h")["removed"] == []
    value = removed(runs[1].run_id)
    assert {row["ref"].split("@")[0] for row in value["removed"]} == {"dataset:own1", "dataset:own1-quarantine"}
    assert all(f"a result of run {runs[0].run_id}, too" in row["why"] for row in value["kept"]) and value["kept"]
    assert not os.path.exists(own.paths["data"]) and os.path.isdir(shared.paths["data"])
    trained()
    left = removed(before="0h")["removed"]
    assert {row["ref"].split("@")[0] for row in left if row["ref"].startswith("dataset:")} == {
        "dataset:pairs",
        "dataset:pairs-quarantine",
        "dataset:own0",
        "dataset:own0-quarantine",
        "dataset:kept",
    }
    assert store.resolve("model:kept@candidate").path


def test_a_removal_that_is_killed_is_finished(state_dir, raw):
    """Before its files were taken out of their place they are all there; after that the rest goes with the doctor, or
    with the same command.
    """
    import signal

    from flows import doctor
    from storage import removal

    def killed_at(module, name):
        child = os.fork()
        if not child:
            setattr(module, name, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
            removed(first.outputs["data"])
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        return list((state_dir / "datasets" / "pairs").glob(".removed-*"))

    def finished():
        return not list((state_dir / "datasets" / "pairs").glob(".removed-*"))

    first = run_stage("ingest", {"data": raw}, name_as="pairs")
    marks = state_dir / "removed"
    assert killed_at(removal.os, "rename") == [] and len(list(marks.glob("*.json"))) == 1
    assert run_stage("ingest", {"data": raw}, name_as="pairs").cached
    assert [ok for ok, _ in doctor.contents(state_dir, True)] == [True] and not list(marks.glob("*.json"))
    assert len(killed_at(removal.shutil, "rmtree")) == 1 and not os.path.exists(first.paths["data"])
    assert removed(first.outputs["data"])["already"] and finished()
    assert run_stage("ingest", {"data": raw}, name_as="pairs").outputs == first.outputs
    assert len(killed_at(removal.shutil, "rmtree")) == 1
    found = list(doctor.contents(state_dir, True))
    assert [ok for ok, _ in found] == [True, True] and "deleted what" in found[0][1] and finished()
