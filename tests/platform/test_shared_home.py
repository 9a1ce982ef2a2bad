"""A state directory of a group: what one of its users writes, the others can read and go on with, whatever their umask;
and what is another user's is not taken for gone.
"""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from stages.spec import PROJECT_ROOT
from storage import home, leases, store
from storage.checkpoints import Checkpoints
from storage.mlflow_database import make_database
from storage.outbox import tracking_uri
from tasks.run import run_stage

TOY = "tests.toy_stage"


@pytest.fixture
def private_umask():
    before = os.umask(0o077)
    yield
    os.umask(before)


def own_environment(monkeypatch):
    """What `env.prepare` sets ends with the test, and nothing is set that it would keep: an earlier test of the process
    may have prepared another state directory.
    """
    mine = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "MLFLOW_"))}
    monkeypatch.setattr(os, "environ", mine)


def closed_to_the_group(folder):
    """Files and directories below ``folder`` that its group may not read and write."""
    return sorted(
        str(p.relative_to(folder))
        for p in folder.rglob("*")
        if not p.is_symlink() and (p.stat().st_mode & 0o060) != 0o060
    )


@pytest.fixture
def shared(state_dir, private_umask, monkeypatch):
    monkeypatch.setattr(home, "_settled", None)
    state_dir.mkdir()
    state_dir.chmod(0o2770)
    return state_dir


def test_what_is_written_into_a_directory_of_a_group_is_the_groups(shared):
    run_stage(TOY, {}, {"steps": 7})
    make_database(tracking_uri())
    with leases.acquire("stage-x"):
        assert closed_to_the_group(shared) == []
    assert all(not p.stat().st_mode & 0o007 for p in shared.rglob("*"))  # others stay out, as the umask says


def test_what_is_exported_from_a_directory_of_a_group_is_its_users(shared, tmp_path):
    """The group could write to, or read, whatever a process wrote anywhere once it had looked at the state directory."""
    from flows.export import export

    result = run_stage(TOY, {}, {"steps": 7}, name_as="walk")
    (tmp_path / "there").mkdir(mode=0o755)
    (tmp_path / "there" / "mine").touch()
    (tmp_path / "there").chmod(0o2775)
    (tmp_path / "there" / "mine").chmod(0o664)
    export(result.outputs["data"], tmp_path / "there" / "new" / "data")
    export(result.outputs["model"], tmp_path / "there" / "model")
    made = [path for path in (tmp_path / "there").rglob("*") if path.name != "mine"]
    assert len(made) > 6 and not [path for path in made if path.stat().st_mode & 0o077]
    assert all(path.stat().st_mode & stat.S_ISGID for path in made if path.is_dir())  # as its user wants it there
    assert [stat.S_IMODE((tmp_path / "there" / name).stat().st_mode) for name in (".", "mine")] == [0o2775, 0o664]
    assert closed_to_the_group(shared) == []


def test_a_directory_of_one_user_keeps_to_his_umask(state_dir, private_umask, monkeypatch):
    monkeypatch.setattr(home, "_settled", None)
    run_stage(TOY, {}, {"steps": 7})
    assert not [p for p in state_dir.rglob("*") if p.stat().st_mode & 0o077]


def test_a_directory_that_only_a_umask_of_002_opened_to_the_group_is_nobodys_but_its_users(
    state_dir, private_umask, monkeypatch
):
    """Where groups have one user each the usual umask leaves the group's right to write; that is no wish to share."""
    from flows import env

    monkeypatch.setattr(home, "_settled", None)
    own_environment(monkeypatch)
    state_dir.mkdir()
    state_dir.chmod(0o775)
    env.prepare()
    assert not (state_dir / "prefect").exists()  # Prefect makes it, for its owner alone
    run_stage(TOY, {}, {"steps": 7})
    assert not [p for p in state_dir.rglob("*") if p.stat().st_mode & 0o077]


def test_prefects_database_is_closed_to_others_than_the_group(shared, monkeypatch):
    """It may hold secrets; Prefect itself gives its directory to nobody else."""
    from flows import env

    own_environment(monkeypatch)
    os.umask(0o002)
    shared.chmod(0o2775)
    env.prepare()
    assert stat.S_IMODE((shared / "prefect").stat().st_mode) & 0o777 == 0o770


def test_weights_have_the_mode_that_every_file_has(state_dir):
    """The library that writes them gives them to their owner alone; in checkpoints and in the store whoever may read
    what lies beside them reads them, too.
    """
    import torch
    from safetensors.torch import save_file

    before = os.umask(0o002)
    try:
        saved = Checkpoints(state_dir / "checkpoints").save(
            1, {}, {"weights": lambda path: save_file({"w": torch.zeros(2)}, path), "plain": b"x"}
        )
        (state_dir / "made").mkdir()
        (state_dir / "made" / "config.json").write_text("{}")
        save_file({"w": torch.zeros(2)}, state_dir / "made" / "model.safetensors")
        published = store.publish_model(state_dir / "made")
    finally:
        os.umask(before)
    assert {
        stat.S_IMODE(path.stat().st_mode) for folder in (saved.path, Path(published.path)) for path in folder.iterdir()
    } == {0o664}


def test_prefects_own_files_are_the_groups_too(shared, monkeypatch):
    """Prefect makes its directory for its owner alone, and SQLite its database without the right of the group to
    write.
    """
    from flows import env

    own_environment(monkeypatch)
    env.prepare()
    assert (shared / "prefect").stat().st_mode & 0o070 == 0o070 and (
        shared / "prefect" / "prefect.db"
    ).stat().st_mode & 0o060 == 0o060
    program = (
        "import asyncio, datetime, sys; from flows import env; env.prepare(); from flows.prefect_leases import"
        " ConcurrencyLeaseStorage as Storage\nlease = asyncio.run(Storage().create_lease([],"
        " datetime.timedelta(seconds=60)))\nassert asyncio.run(Storage().read_lease(lease.id)) == lease"
    )
    subprocess.run(
        [sys.executable, "-c", program],
        check=True,
        cwd=PROJECT_ROOT,
        env={**os.environ, "POSTTRAIN_HOME": str(shared)},
        timeout=120,
    )
    assert list((shared / "prefect" / "concurrency_leases").glob("*.json")) and closed_to_the_group(shared) == []


def test_the_ui_that_one_user_made_another_can_make_anew(shared):
    """After another version of Prefect was installed nobody else's `posttrain up` could start the server."""
    from flows import prefect_ui

    home.home()
    prefect_ui.quiet(shared / "ui")
    assert (shared / "ui" / "v2" / "assets").is_dir() and closed_to_the_group(shared / "ui") == []
    assert all(path.stat().st_mode & stat.S_ISGID for path in (shared / "ui").rglob("*") if path.is_dir())
