"""Whatever is cut short or damaged, the loader lands on the newest complete checkpoint."""

import os
import shutil
from pathlib import Path

import pytest

from storage.checkpoints import Checkpoints


def fill(folder, steps=(1, 2), keep=5):
    store = Checkpoints(folder, keep=keep)
    for step in steps:
        store.save(step, {"n": step}, {"weights": bytes([step]) * 5000, "tree": write_tree})
    return store


def write_tree(path: Path):
    path.mkdir()
    (path / "a").write_text("a" * 100)
    (path / "b").write_text("b")


def test_round_trip_and_keep(tmp_path):
    store = fill(tmp_path, (1, 2, 3), keep=2)
    latest = Checkpoints(tmp_path).latest()
    assert latest.step == 3 and latest.state == {"n": 3} and latest.file("weights").read_bytes() == b"\x03" * 5000
    assert sorted(p.name for p in latest.file("tree").iterdir()) == ["a", "b"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-0000000002", "step-0000000003"]
    with pytest.raises(KeyError, match="tree, weights"):
        latest.file("optimizer")
    with pytest.raises(ValueError, match="not allowed"):
        store.save(4, {}, {"manifest.json": b""})
    with pytest.raises(ValueError, match="1 or more"):
        Checkpoints(tmp_path, keep=0)


FILES = ["manifest.json", "state.json", "weights", "tree/a", "tree/b"]


@pytest.mark.parametrize("damage", ["delete", "empty", "truncate", "flip", "grow"])
@pytest.mark.parametrize("name", FILES)
def test_checkpoint_fault_injection(tmp_path, name, damage):
    fill(tmp_path)
    path = tmp_path / "step-0000000002" / name
    data = path.read_bytes()
    if damage == "delete":
        path.unlink()
    else:
        path.write_bytes(
            {"empty": b"", "truncate": data[:-1], "flip": data[:-1] + bytes([data[-1] ^ 1]), "grow": data + b"x"}[
                damage
            ]
        )
    latest = Checkpoints(tmp_path).latest()
    harmless = name == "manifest.json" and damage == "truncate"  # only the final newline is gone
    assert latest.step == (2 if harmless else 1)
    Checkpoints(tmp_path).save(2, {"n": 22}, {})
    assert Checkpoints(tmp_path).latest().state == {"n": 22}


def test_all_damaged_is_a_fresh_start(tmp_path):
    fill(tmp_path)
    for path in tmp_path.rglob("state.json"):
        path.unlink()
    assert Checkpoints(tmp_path).latest() is None


class Cut(BaseException):
    pass


def test_a_checkpoint_that_is_written_again_is_never_gone(tmp_path, monkeypatch):
    """Killed between the two renames, a run that keeps one checkpoint had none and started afresh."""
    fill(tmp_path, (1,), keep=1)
    real = os.rename

    def rename(source, target):
        if Path(source).name.startswith(".tmp-"):
            raise Cut
        real(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", rename)
        patch.setattr(shutil, "rmtree", lambda *_, **__: None)  # nor anything after it
        with pytest.raises(Cut):
            Checkpoints(tmp_path, keep=1).save(1, {"n": 11}, {"weights": b"1"})
    latest = Checkpoints(tmp_path, keep=1).latest()
    assert latest.state == {"n": 1} and latest.file("weights").read_bytes() == b"\x01" * 5000
    assert [p.name for p in tmp_path.iterdir()] == ["step-0000000001"]


def test_cut_before_any_system_call_of_a_save(tmp_path, monkeypatch):
    """Stop a save before its n-th fsync, rename, replace or file write, for every n, without any clean-up."""
    calls = {"left": 0}

    def cut(real):
        def wrapped(*args, **kwargs):
            if calls["left"] == 0:
                raise Cut
            calls["left"] -= 1
            return real(*args, **kwargs)

        return wrapped

    n = 0
    while True:
        folder = tmp_path / str(n)
        fill(folder, (1,))
        with monkeypatch.context() as patch:
            for owner, name in (
                (os, "fsync"),
                (os, "rename"),
                (os, "replace"),
                (os, "mkdir"),
                (Path, "write_bytes"),
                (Path, "write_text"),
                (shutil, "rmtree"),
            ):
                patch.setattr(owner, name, cut(getattr(owner, name)))
            calls["left"] = n
            try:
                Checkpoints(folder, keep=1).save(2, {"n": 2}, {"weights": b"2" * 100})
                finished = True
            except Cut:
                finished = False
        latest = Checkpoints(folder).latest()
        assert latest.step in (1, 2) and latest.state == {"n": latest.step}
        assert not [p for p in folder.iterdir() if p.name.startswith(".")]
        if finished:
            assert latest.step == 2 and n > 8
            break
        n += 1
