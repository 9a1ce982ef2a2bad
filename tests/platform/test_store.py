"""References, content digests, publishing."""

import json
import os
import shutil

import pytest

from storage import home, registry, store
from storage.datasets import open_dataset, write_dataset
from storage.files import tree_digest
from tests.toy_stage import row


def make_dataset(path, n=3):
    write_dataset(path, "toy", "text/1", (row(i, float(i)) for i in range(n)))
    return path


def make_model(path, weights="w"):
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    (path / "weights").write_text(weights)
    return path


def test_dataset_refs(tmp_path):
    first = store.publish_dataset(make_dataset(tmp_path / "a", 3), "toy")
    second = store.publish_dataset(make_dataset(tmp_path / "b", 4), "toy")
    assert store.resolve("dataset:toy@latest", "dataset").digest == second.digest == store.resolve("dataset:toy").digest
    assert store.resolve(f"dataset:toy@{first.digest[:10]}").path == first.path
    assert store.publish_dataset(make_dataset(tmp_path / "c", 3), "toy").path == first.path
    assert store.resolve("dataset:toy@latest").digest == first.digest
    assert not (tmp_path / "c").exists()


def test_model_refs(tmp_path):
    found = store.publish_model(make_model(tmp_path / "m"))
    assert registry.register("policy", found.digest, role="policy") == 1
    assert registry.register("policy", found.digest) == 1
    other = store.publish_model(make_model(tmp_path / "n", "x"))
    assert registry.register("policy", other.digest) == 2
    assert store.resolve("model:policy@candidate").digest == other.digest == store.resolve("model:policy").digest
    assert (
        store.resolve("model:policy/1", "model").digest
        == found.digest
        == store.resolve(f"model:m-{found.digest[:12]}").digest
    )
    registry.record_decision("policy", 1, promoted=True, evidence={"accuracy": [0.5, 0.6]})
    assert store.resolve("model:policy@champion").digest == found.digest
    registry.record_decision("policy", 2, promoted=False, evidence={"accuracy": [0.4, 0.5]})
    assert store.resolve("model:policy@champion").digest == found.digest
    history = registry.lookup("policy").history
    assert [e["event"] for e in history] == ["version", "alias", "version", "alias", "decision", "alias", "decision"]
    assert history[5]["evidence"] == {"accuracy": [0.5, 0.6]}


def test_the_directory_of_something_in_the_store_is_its_reference(tmp_path, monkeypatch):
    """It was recorded as a path of somebody's own: `posttrain rerun` of what was made of it failed once the home was
    moved. What lies elsewhere, in another home too, stays a path.
    """
    model = store.publish_model(make_model(tmp_path / "m"))
    data = store.publish_dataset(make_dataset(tmp_path / "a"), "toy")
    for found, kind in ((model, "model"), (data, "dataset")):
        given = store.resolve(found.path, kind)
        assert (given.ref, given.digest) == (found.ref, found.digest) and ":" in given.ref
    moved = tmp_path / "moved"
    shutil.copytree(home.home(), moved)
    other = str(moved / os.path.relpath(model.path, home.home()))
    assert store.resolve(other, "model").ref == other
    old = model.path, data.path
    os.rename(home.home(), tmp_path / "away")
    monkeypatch.setenv("POSTTRAIN_HOME", str(moved))
    assert [store.resolve(path).ref for path in old] == [model.ref, data.ref]
    assert store.resolve(str(tmp_path / "away" / "models" / model.digest), "model").ref.startswith("/")
    with pytest.raises(store.StoreError, match="does not exist"):
        store.resolve(str(tmp_path / "models" / ("0" * 64)), "model")


@pytest.mark.parametrize(
    ("text", "kind", "says"),
    [
        ("dataset:nothing", "dataset", "no dataset named"),
        ("model:nothing@champion", "model", "no model named"),
        ("/no/such/file", "dataset", "does not exist"),
        ("dataset:a/b/c", "dataset", "write dataset:NAME@latest"),
        ("", "model", "empty reference"),
        ("model:m-abc", "model", "is not a model reference|no model named"),
    ],
)
def test_unknown_things_are_explained(text, kind, says):
    with pytest.raises(store.StoreError, match=says):
        store.resolve(text, kind)


def test_paths_are_hashed_by_content(tmp_path):
    a, b = make_model(tmp_path / "a"), make_model(tmp_path / "b")
    assert store.resolve(str(a), "model").digest == store.resolve(str(b), "model").digest
    (b / "weights").write_text("v")
    assert store.resolve(str(a), "model").digest != store.resolve(str(b), "model").digest
    raw = tmp_path / "x.jsonl"
    raw.write_text("{}\n")
    assert store.resolve(str(raw), "dataset").kind == "file"
    with pytest.raises(store.StoreError, match="config.json"):
        store.resolve(str(tmp_path / "x.jsonl"), "model")


def test_same_size_change_is_seen(tmp_path):
    path = tmp_path / "f"
    path.write_text("aaaa")
    os.utime(path, ns=(10**18, 10**18))
    first = store.cached_digest(path)
    assert store.cached_digest(path) == first
    path.write_text("bbbb")
    assert store.cached_digest(path) != first


def test_damaged_store_copy_is_replaced(tmp_path):
    found = store.publish_model(make_model(tmp_path / "m"))
    with open(os.path.join(found.path, "weights"), "a") as handle:
        handle.write("!")
    again = store.publish_model(make_model(tmp_path / "n"))
    assert again.path == found.path and tree_digest(again.path) == found.digest


def test_unfinished_and_damaged_datasets_are_refused(tmp_path):
    path = make_dataset(tmp_path / "d")
    part = next(path.glob("part-*.parquet"))
    with open(part, "ab") as handle:
        handle.write(b"x")
    with pytest.raises(store.StoreError, match="was changed after it was written"):
        store.resolve(str(path), "dataset")


def test_second_name_costs_no_bytes(tmp_path):
    found = store.publish_dataset(make_dataset(tmp_path / "a"), "one")
    other = store.also_as(found.path, found.digest, "two")
    assert other.ref == f"dataset:two@{found.digest}"
    assert (
        os.stat(os.path.join(other.path, "manifest.json")).st_ino
        == os.stat(os.path.join(found.path, "manifest.json")).st_ino
    )
    shutil.rmtree(found.path)
    open_dataset(other.path).verify()


def test_two_that_publish_the_same_at_once_both_have_it(tmp_path, monkeypatch):
    """Arms of a run may make the same bytes; the second found a directory where it was to rename its own to."""

    def model(at):
        (tmp_path / at).mkdir()
        (tmp_path / at / "config.json").write_text("{}")
        return tmp_path / at

    one, other = model("one"), model("other")
    flush = store.fsync_tree

    def meanwhile(path):
        flush(path)
        if path == one:
            store.publish_model(other)

    monkeypatch.setattr(store, "fsync_tree", meanwhile)
    published = store.publish_model(one)
    assert tree_digest(published.path) == published.digest and not one.exists() and not other.exists()
    assert [path.name for path in home.models_dir().iterdir()] == [published.digest]


def test_two_that_give_a_second_name_at_once_both_have_it(tmp_path, monkeypatch):
    first = store.publish_dataset(make_dataset(tmp_path / "d"), "first")
    replace, came = os.replace, []

    def meanwhile(source, target):
        if os.path.isdir(source) and not came:
            came.append(target)
            store.also_as(first.path, first.digest, "second")
        replace(source, target)

    monkeypatch.setattr(os, "replace", meanwhile)
    assert store.also_as(first.path, first.digest, "second").digest == first.digest and came
    assert not list((home.datasets_dir() / "second").glob(".tmp-*"))


def test_a_good_copy_in_the_store_stays_where_its_source_cannot_be_removed(tmp_path, monkeypatch):
    """NFS leaves a file in place of a removed one that somebody has open, and the directory cannot go. What was left of
    the source took the place of the whole copy."""

    def model(at):
        (tmp_path / at).mkdir()
        for name in ("config.json", "generation_config.json"):
            (tmp_path / at / name).write_text("{}")
        return tmp_path / at

    published = store.publish_model(model("one"))
    rmdir = os.rmdir

    def busy(path, **given):
        if str(path) == str(tmp_path / "other"):
            raise OSError(39, "Directory not empty", str(path))
        rmdir(path, **given)

    monkeypatch.setattr(os, "rmdir", busy)
    again = store.publish_model(model("other"))
    assert again == published and tree_digest(published.path) == published.digest
    assert [path.name for path in home.models_dir().iterdir()] == [published.digest]


def test_hub_id_without_network_is_explained(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(store.StoreError, match="give a local model directory"):
        store.resolve("some-org/some-model", "model")


def test_datasets_on_a_url(tmp_path, monkeypatch):
    monkeypatch.setenv("POSTTRAIN_DATASETS", "memory://bucket/datasets")
    found = store.publish_dataset(make_dataset(tmp_path / "a"), "far")
    assert found.path == f"memory://bucket/datasets/far/{found.digest}"
    back = store.resolve("dataset:far@latest", "dataset")
    assert back.digest == found.digest and len(list(open_dataset(back.path).iter_rows())) == 3
    assert store.check_output("dataset", back.path, back.digest, None, full=True)[0]


def test_bad_names_are_refused():
    with pytest.raises(ValueError, match="cannot be a name"):
        registry.register("../up", "a" * 64)
    with pytest.raises(registry.RegistryError, match="no version 7"):
        registry.register("m", "b" * 64)
        registry.set_alias("m", "champion", 7)


def test_registry_survives_a_torn_line(state_dir):
    registry.register("m", "a" * 64)
    with open(state_dir / "registry" / "models.jsonl", "a") as handle:
        handle.write('{"event": "ver')
    assert registry.register("m", "c" * 64) == 2
    assert all(json.dumps(e) for e in registry.log()) and registry.lookup("m").aliases == {"candidate": 2}


def test_an_adapter_alone_is_refused_with_how_to_put_it_into_its_model(state_dir, tmp_path):
    """peft and TRL write adapters to directories without config.json, which transformers then has no words for. Stages
    put them into their models by themselves; export, promote and others ask for a whole one."""
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": "the/base"})
    )
    with pytest.raises(store.OnlyAdapter) as refused:
        store.resolve(str(folder), "model")
    assert (refused.value.path, refused.value.base) == (str(folder), "the/base")
    assert f"merge --set method=adapter --input adapter={folder} --input base=the/base" in str(refused.value)
    (folder / "config.json").write_text("{}")  # a whole model beside it
    assert store.resolve(str(folder), "model").path == str(folder)


def test_a_damaged_model_directory_is_refused_before_a_stage_starts(state_dir, tmp_path):
    import torch
    from safetensors.torch import save_file

    def directory(name):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text('{"model_type": "llama"}')
        save_file({"a": torch.zeros(50), "b": torch.ones(3, 4)}, folder / "model.safetensors")
        return folder

    good = directory("good")
    assert store.resolve(str(good), "model").kind == "model"
    cut, index, pointer, config = map(directory, ("cut", "index", "pointer", "config"))
    os.truncate(cut / "model.safetensors", 200)
    (index / "model.safetensors.index.json").write_text(
        '{"weight_map": {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}}'
    )
    (pointer / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12\n")
    (config / "config.json").write_text('{"model_type": ')
    for folder, said in (
        (cut, r"has 200 of [\d,]+ bytes"),
        (index, r"names model-00002-of-00002.safetensors, which is not there \(1 of 2"),
        (pointer, "Git LFS pointer"),
        (config, "config.json is not readable JSON"),
    ):
        with pytest.raises(store.StoreError, match=said):
            store.resolve(str(folder), "model")


def test_a_part_that_is_no_parquet_any_more_is_told_with_what_to_do(tmp_path):
    from storage.datasets import DatasetError, open_dataset, write_dataset
    from storage.schema import complete_row

    rows = [
        complete_row("text/1", {"text": f"{i} " + "a" * 50}, dataset="d", source="d", origin="human")
        for i in range(100)
    ]
    write_dataset(tmp_path / "d", "d", "text/1", rows)
    part = next((tmp_path / "d").glob("*.parquet"))
    part.chmod(0o644)
    part.write_bytes(part.read_bytes()[:-20])
    with pytest.raises(DatasetError, match=f"{part.name} is damaged .* run the stage that made this dataset again"):
        list(open_dataset(tmp_path / "d").iter_rows())


def decided(where, candidate, champion, promote=True):
    """A finished `decision` dataset: what stage promote found against ``champion`` (None: nobody in office)."""
    from storage.datasets import write_dataset

    ref = lambda model: f"model:m-{model.digest[:12]}" if model else None
    decision = {
        "promote": promote,
        "candidate": ref(candidate),
        "champion": ref(champion),
        "reasons": ["it is better"],
        "evidence": [],
    }
    write_dataset(where, "decision", "eval_scores/1", [], meta={"decision": decision})
    return str(where)


def test_a_decision_against_somebody_else_moves_nothing(tmp_path):
    """Two runs beat the same champion: the second one was never compared with the first, so it waits for another
    comparison. Says who is in office, and is kept.
    """
    from tasks.promotion import conclude

    old, a, b = (store.publish_model(make_model(tmp_path / name, name)) for name in "oab")
    first = conclude(old.ref, decided(tmp_path / "0", old, None), name="policy")
    assert first["promoted"] and store.resolve("model:policy@champion").digest == old.digest
    one, two = decided(tmp_path / "1", a, old), decided(tmp_path / "2", b, old)
    assert conclude(a.ref, one, name="policy")["promoted"] and conclude(a.ref, one, name="policy")["promoted"]
    late = conclude(b.ref, two, name="policy")
    assert (
        not late["promoted"]
        and late["reasons"][0].startswith(f"model:m-{a.digest[:12]} holds model:policy@champion by now")
        and "promote again" in late["reasons"][0]
    )
    assert store.resolve("model:policy@champion").digest == a.digest
    kept = [e for e in registry.lookup("policy").history if e["event"] == "decision"]
    assert [e["promoted"] for e in kept] == [True, True, False] and kept[-1]["office"] == a.digest
    assert not conclude(b.ref, decided(tmp_path / "3", b, None), name="policy")["promoted"], (
        "nobody in office when it was decided"
    )
    assert (
        conclude(b.ref, decided(tmp_path / "4", b, a), name="policy")["promoted"]
        and store.resolve("model:policy@champion").digest == b.digest
    )
    registry.set_alias("policy", "champion", None)
    assert conclude(a.ref, one, name="policy")["promoted"], "nobody is displaced"


def test_of_many_that_promote_at_once_one_wins(tmp_path):
    from concurrent.futures import ThreadPoolExecutor

    from tasks.promotion import conclude

    models = [store.publish_model(make_model(tmp_path / f"m{i}", str(i))) for i in range(8)]
    paths = [decided(tmp_path / f"d{i}", model, None) for i, model in enumerate(models)]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda i: conclude(models[i].ref, paths[i], name="policy"), range(8)))
    assert sum(one["promoted"] for one in found) == 1
    assert sum(e["event"] == "alias" and e["alias"] == "champion" for e in registry.lookup("policy").history) == 1
    assert sorted(registry.lookup("policy").versions) == list(range(1, 9))
