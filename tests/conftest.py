"""How the suite is spread over processes, and the processes that tests share.

The tests of one file stay together, since they share models; all that speak to the Prefect server share one. Whatever takes longest goes
first, and alone where it shares nothing, so that no process is left with a long file when the others have finished.
"""

import pytest

ALONE = ("training/test_distributed.py", "training/test_resume.py", "training/test_rank_kill.py")
LONG = ("training", "platform", "reward")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    if not hasattr(config, "workerinput"):  # one process: as collected
        return
    order = {}
    for item in items:
        shared = "servers" in item.fixturenames
        alone = not shared and (str(item.path).endswith(ALONE) or item.get_closest_marker("slow"))
        order[item] = 0 if shared else 1 if alone else 2 if item.path.parent.name in LONG else 3
        if not alone:
            item.add_marker(pytest.mark.xdist_group("servers" if shared else str(item.path)))
    items.sort(key=order.get)


@pytest.fixture(scope="session")
def forks(tmp_path_factory):
    """``forks.run(SPEC.json)``: stages in processes forked from warm parents, on several ranks too (tests/processes.py)."""
    from tests.processes import Forks

    return Forks(tmp_path_factory.mktemp("processes"))
