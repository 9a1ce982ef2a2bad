"""Stages and recipes of a package of one's own: found by its entry points, known by its code, used like this project's."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from flows.config import load_preset, presets
from flows.recipe import RECIPES, get_recipe
from stages import sources
from stages.registry import STAGES, Table, get_stage
from stages.spec import PROJECT_ROOT, ConfigError, closure_digest, import_closure
from storage import records
from tasks.run import run_stage
from tests.serving import with_prefects_tables

ENTRY_POINTS = "[posttrain.stages]\nmy_walk = their_package.walk\n[posttrain.recipes]\nmy_two = their_package.my_two\n"
RECIPE = '''
"""my_two: two walks."""
from pydantic import Field

from flows.recipe import RecipeConfig, recipe
from their_package.walk import Config as Walk


class Config(RecipeConfig):
    walk: Walk = Field(Walk(steps=2), description="The walk.")


@recipe(Config)
def my_two(run, config):
    """Two walks, one after the other."""
    first = run("my_walk", "first", config=config.walk)
    second = run("my_walk", "second", model=first["model"], config=config.walk, seed=config.seed + 1)
    return {"models": {"second": second["model"]}}
'''


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def walk(step: str) -> str:
    """The toy stage as one of another package, each step of which is multiplied with ``step``."""
    text = (PROJECT_ROOT / "tests" / "toy_stage.py").read_text().replace('name="toy"', 'name="my_walk"')
    return text.replace("import sys\n", "import sys\n\nfrom their_package.helper import scale\n", 1).replace(
        "position += float(", f"position += {step} * float("
    )


def afresh() -> None:
    """Forget what was looked up before the test wrote it."""
    for name in [name for name in sys.modules if name.partition(".")[0] in ("their_package", "beside_it")]:
        del sys.modules[name]
    for table in (STAGES, RECIPES):
        table.__dict__.pop("installed", None)
    importlib.invalidate_caches()
    sources.package.cache_clear(), sources._source.cache_clear()


@pytest.fixture
def package(tmp_path, monkeypatch):
    """The folder in which their_package lies, as an installed distribution; on the path of stages, too."""
    folder = tmp_path / "src"
    write(
        folder,
        {
            "their_package/__init__.py": "",
            "their_package/walk.py": walk("scale"),
            "their_package/helper.py": "scale = 1.0\n",
            "their_package/unrelated.py": "x = 1\n",
            "their_package/my_two.py": RECIPE,
            "their_package/presets/my_two.long.yaml": "walk: {steps: 3}\n",
            "their_package-0.3.dist-info/METADATA": "Metadata-Version: 2.1\nName: their-package\nVersion: 0.3\n",
            "their_package-0.3.dist-info/entry_points.txt": ENTRY_POINTS,
        },
    )
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    afresh()
    yield folder
    afresh()


def test_a_stage_of_an_installed_package_is_known_by_its_code(package, monkeypatch):
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "")  # compiled code is kept
    first = run_stage("my_walk", {}, {"steps": 2})
    assert not first.cached and run_stage("my_walk", {}, {"steps": 2}).cached
    assert run_stage("their_package.walk", {}, {"steps": 2}).cached  # by its module, as where it is only on PYTHONPATH
    write(package, {"their_package/unrelated.py": "x = 2\n"})
    assert run_stage("my_walk", {}, {"steps": 2}).cached
    helper = package / "their_package/helper.py"
    before = helper.stat()
    helper.write_text("scale = 2.0\n")
    # of the same size and second, as two edits within one or a tool that keeps times: Python sees no other file
    os.utime(helper, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    changed = run_stage("my_walk", {}, {"steps": 2})
    assert not changed.cached and changed.metrics["position"] == pytest.approx(2 * first.metrics["position"])
    assert records.read(changed.key)["versions"]["their_package"] == "0.3"


def test_what_else_the_code_of_such_a_stage_is(package, monkeypatch):
    def digest():
        afresh()
        return closure_digest("their_package.walk", ("their_package/table.json",))

    helper = "their_package/helper.py"
    write(package, {"their_package/table.json": "{}", helper: "import rich\nfrom beside_it.deep import scale\n"})
    write(package, {"beside_it/__init__.py": "", "beside_it/deep.py": "import stages.losses\nscale = 1.0\n"})
    seen = [digest()]
    afresh()
    files, external = import_closure("their_package.walk")
    assert files["beside_it.deep"] == (package / "beside_it/deep.py").resolve()
    assert "stages.losses" in files and "rich" in external and not any(name.startswith("rich") for name in files)
    write(package, {"beside_it/deep.py": "import stages.losses\nscale = 2.0\n"})  # another package that is worked on
    seen.append(digest())
    write(package, {"their_package/table.json": "[]"})
    seen.append(digest())
    versions = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0" if name == "rich" else versions(name))
    seen.append(digest())  # a library that it imports itself
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0" if name == "typer" else versions(name))
    assert digest() == seen[2] and len(set(seen)) == 4


def test_an_installed_library_is_no_code_of_a_stage_on_the_path(package):
    write(package / "site-packages", {"beside_it/__init__.py": "", "beside_it/deep.py": "scale = 1.0\n"})
    sys.path.insert(0, str(package / "site-packages"))
    try:
        afresh()
        write(package, {"their_package/helper.py": "from beside_it.deep import scale\n"})
        files, external = import_closure("their_package.walk")
        assert "beside_it" in external and "beside_it.deep" not in files
        files, _ = import_closure("beside_it.deep")  # the stage itself may be one
        assert "beside_it.deep" in files
    finally:
        sys.path.remove(str(package / "site-packages"))


def test_its_recipe_is_run_planned_and_repeated_like_ours(package, tmp_path, state_dir):
    with_prefects_tables(state_dir)
    assert list(RECIPES)[-1] == "my_two" and get_recipe("my_two").name == "my_two"
    assert (
        presets("of_no_table") == []
        and presets("my_two") == ["long"]
        and load_preset("my_two", "long") == {"walk": {"steps": 3}}
    )
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(package), str(PROJECT_ROOT)])}

    def posttrain(*arguments):
        done = subprocess.run(
            [sys.executable, "-m", "flows.cli", *arguments], capture_output=True, text=True, env=env, cwd=tmp_path
        )
        return done.returncode, done.stdout, done.stderr

    code, out, err = posttrain("run", "my_two", "--preset", "long", "--json")
    assert code == 0, err
    done = json.loads(out.splitlines()[-1])
    assert [(step["stage"], step["cached"]) for step in done["steps"]] == [("my_walk", False)] * 2
    code, out, err = posttrain("rerun", "latest", "--set", "walk.steps=4", "--json")
    assert code == 0 and json.loads(out.splitlines()[-1])["recipe"] == "my_two", err
    code, out, err = posttrain("run", "my_two", "walk.stepz=4")
    assert code == 2 and "did you mean 'walk.steps'?" in err


def test_deployments_have_them(package):
    from flows.deploy import entrypoint, recipe_deployments, stage_deployments

    recipes = {name: entrypoint(flow) for flow, name, _ in recipe_deployments()}
    assert recipes["my_two"] == recipes["my_two-long"] == "their_package.my_two.my_two"
    assert "flows.single.my_walk" in {entrypoint(flow) for flow, _, _ in stage_deployments()}
    import flows.single

    assert flows.single.my_walk.name == "stage-my-walk"


def test_two_of_one_name_are_refused(package):
    write(package, {"their_package-0.3.dist-info/entry_points.txt": "[posttrain.stages]\nsft = their_package.walk\n"})
    afresh()
    with pytest.raises(
        ConfigError, match="their-package gives their_package.walk the name 'sft'.*which stages.sft has"
    ):
        list(STAGES)
    assert get_stage("sft").__name__ == "stages.sft"
    write(
        package,
        {
            "their_package-0.3.dist-info/entry_points.txt": "[group]\na = their_package.walk\n",
            "other-1.dist-info/METADATA": "Metadata-Version: 2.1\nName: other\nVersion: 1\n",
            "other-1.dist-info/entry_points.txt": "[group]\na = other.walk\nb = other.walk\n",
        },
    )
    afresh()
    with pytest.raises(ConfigError, match="the name 'a'"):
        Table("group", {}).installed
    assert Table("group", {"c": "ours"})["c"] == "ours"


def test_one_that_cannot_be_imported_says_whose_fault_it_is(package):
    write(package, {"their_package/helper.py": "import nothing_there\nscale = 1.0\n"})
    for get in (lambda: get_stage("my_walk"), lambda: get_recipe("my_two")):
        afresh()
        with pytest.raises(ConfigError, match="importing their_package.* failed .*nothing_there.*repair that package"):
            get()
    write(package, {"their_package/helper.py": "scale = 1.0\n", "their_package/my_two.py": "my_two = len\n"})
    afresh()
    with pytest.raises(ConfigError, match=r"define there @recipe\(Config\) def my_two\(run, config\)"):
        get_recipe("my_two")


def test_a_wheel_holds_what_runs_need(tmp_path):
    """All code and presets, with what is said of it, and a stage that runs from it where no checkout is."""
    site, source = tmp_path / "site", tmp_path / "source"
    packages = ("flows", "tasks", "stages", "storage")
    for name in packages:
        shutil.copytree(PROJECT_ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(PROJECT_ROOT / name, source / name)
    python = [sys.executable, "-P", "-c"]
    build = "from setuptools import build_meta; build_meta.build_wheel('..')"
    subprocess.run([*python, build], cwd=source, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("posttrain-*.whl")
    zipfile.ZipFile(wheel).extractall(site)
    for name in packages:
        wanted = {str(p.relative_to(source)) for kind in ("*.py", "*.yaml") for p in (source / name).rglob(kind)}
        assert wanted <= {str(p.relative_to(site)) for p in (site / name).rglob("*")}, name
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    program = f"""
import sys, flows
assert flows.__file__.startswith({str(site)!r}), flows.__file__
from flows.config import load_preset, presets
assert load_preset("post_training", "demo") and presets("hh")
from flows.cli import program
sys.argv = ["posttrain", "stage", "ingest", "--input", "data=rows.jsonl", "--json"]
program()
"""
    environment = {**os.environ, "PYTHONPATH": str(site)}
    done = subprocess.run([*python, program], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.strip().splitlines()[-1])["metrics"]["rows_out"] == 1
