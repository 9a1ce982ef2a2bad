"""Where things come from, also where stages give back what they were given, and after the state directory was moved,
copied or lost a part.
"""

import os
import shutil

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
