"""How the suite is spread over processes, and the processes that tests share.

The tests of one file stay together, since they share models; all that speak to the Prefect server share one, and those
that compile a model what torch loads for that. Whatever takes longest goes first, and alone where it shares nothing, so
that no process is left with a long file when the others have finished.
"""

import contextlib
import gc
import importlib
import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest

#: By the name of their group, the one that takes longest first.
TOGETHER = {
    "servers": ("flows/test_servers.py", "flows/test_browser.py", "flows/test_people.py", "flows/test_backlog.py"),
    "compiled": ("training/test_options.py::test_compiled_forward_trains_alike",),
}
ALONE = (
    "sampler/test_kernels.py::test_in_the_interpreter",
    "training/test_distributed.py",
    "training/test_resume.py",
    "training/test_rank_kill.py",
)
LONG = (
    "cli/test_cli",
    "evaluation/test_benchmarks",
    "evaluation/test_contamination",
    "evaluation/test_stages",
    "flows/test_every_recipe",
    "flows/test_keep",
    "flows/test_names",
    "flows/test_published",
    "flows/test_rounds",
    "flows/test_together",
    "sampler/test_engine",
    "/platform/",
    "/reward/",
    "/training/",
)
#: Files whose tests are (also) about charts: of reports themselves, and of each kind of stage that has its own.
DRAWN = (
    "evaluation/test_arms",
    "evaluation/test_learning",
    "evaluation/test_reports",
    "evaluation/test_stages",
    "evaluation/test_win_rate",
    "reward/test_around",
    "reward/test_group_preference",
    "reward/test_judge_stage",
    "reward/test_rate",
    "reward/test_stage",
    "training/test_constrain",
    "training/test_revise",
    "training/test_rl_report",
    "training/test_stages",
    "training/test_write_prompts",
)


def group(nodeid: str) -> str:
    """Tests with the same answer run in one process, one after the other."""
    for name, members in TOGETHER.items():
        if any(member in nodeid for member in members):
            return name
    return nodeid if any(name in nodeid for name in ALONE) else nodeid.split("::")[0]


def pytest_configure(config):
    """Whatever a test's processes leave behind, killed ones above all, lies in one directory, which goes when the suite
    ends; pytest keeps its own where it always does.
    """
    if hasattr(config, "workerinput"):  # a process of xdist has the environment of the one that started it
        return
    before, scratch = dict(os.environ), tempfile.mkdtemp(prefix="posttrain-tests-")
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
    # compiled kernels serve the next suite, too
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(config.rootpath / ".pytest_cache" / "torchinductor"))
    # ranks of one machine; set once, since a process whose environment is another is not forked from the same parent
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ["TMPDIR"], tempfile.tempdir = scratch, None

    def put_back():
        for name in ("PYTEST_DEBUG_TEMPROOT", "TORCHINDUCTOR_CACHE_DIR", "GLOO_SOCKET_IFNAME", "TMPDIR"):
            os.environ.pop(name)
            os.environ.update({name: before[name]} if name in before else {})
        tempfile.tempdir = None
        shutil.rmtree(scratch, ignore_errors=True)

    config.add_cleanup(put_back)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    if hasattr(config, "workerinput"):  # in one process: as collected
        first = [*TOGETHER]

        def turn(item) -> int:
            name = group(item.nodeid)
            if name in first:
                return first.index(name)
            if name == item.nodeid:
                return len(first)
            return len(first) + (1 if any(part in name for part in LONG) else 2)

        items.sort(key=turn)


def import_in_turn(config) -> None:
    """Import the files of tests, in each of xdist's processes another share of them first: pytest writes down what its
    assertions become, seven seconds for all files, so that each process finds what the others have done already.
    """
    worker = getattr(config, "workerinput", None)
    if worker is None or sys.dont_write_bytecode or config.args != config.getini("testpaths"):
        return
    files = sorted(Path(__file__).parent.rglob("test_*.py"))
    first = len(files) * int(worker["workerid"].removeprefix("gw")) // worker["workercount"]
    for file in files[first:] + files[:first]:
        name = ".".join(file.relative_to(config.rootpath).with_suffix("").parts)
        with contextlib.suppress(Exception, pytest.skip.Exception):  # told where it is collected
            importlib.import_module(name)


@pytest.hookimpl(wrapper=True)
def pytest_collection(session):
    # what collecting tests imports stays; looking through all of it again and again takes a quarter of that time
    gc.disable()
    try:
        import_in_turn(session.config)
        return (yield)
    finally:
        import hypothesis  # noqa: F401  pytest would later; it asks the collector who refers to trio's random numbers

        gc.freeze()  # and no later collection goes through it either, a second each
        gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    # not --dist loadgroup: pytest-xdist 3.8 sets a name that pytest 9.2 no longer reads, and its groups fall apart
    # without a word
    from xdist.scheduler import LoadScopeScheduling

    class ByGroup(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            return group(nodeid)

    return ByGroup(config, log)


@pytest.fixture(autouse=True, scope="module")
def undrawn(request):
    """Charts are made up to their layout, curves of one kind once, but not drawn: more than half of the time of a small
    run would be theirs. Runs in processes of their own draw them (but those of test_distributed), as do the files in
    DRAWN.
    """
    from tests.common import laid_out_once, not_drawn

    with pytest.MonkeyPatch.context() as patch:
        if not request.module.__name__.replace(".", "/").endswith(DRAWN):
            from stages.reporting import reports

            patch.setattr(reports, "_png", not_drawn)
            patch.setattr(reports, "line_chart", laid_out_once(reports.line_chart))
        yield


@pytest.fixture(scope="session")
def forks(tmp_path_factory):
    """``forks.run(SPEC.json)``: stages in processes forked from warm parents, on several ranks too
    (tests/processes.py).
    """
    from tests.processes import Forks

    return Forks(tmp_path_factory.mktemp("processes"))
