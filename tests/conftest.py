"""How the suite is spread over processes: the tests of one file stay together, since they share servers and models; the longest go alone and first."""

import pytest

LONG = ("training/test_resume.py", "training/test_distributed.py")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    if not hasattr(config, "workerinput"):  # one process: as collected
        return
    items.sort(key=lambda item: not str(item.path).endswith(LONG))
    for item in items:
        if not str(item.path).endswith(LONG):
            item.add_marker(pytest.mark.xdist_group(str(item.path)))
