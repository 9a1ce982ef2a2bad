"""The code has one form: what `ruff format` writes, without unused or undefined names."""

import subprocess
import sys

import pytest

from stages.spec import PROJECT_ROOT


@pytest.mark.parametrize("check", [("format", "--check"), ("check",)], ids=["format", "lint"])
def test_the_code_is_as_ruff_writes_it(check):
    done = subprocess.run(
        [sys.executable, "-m", "ruff", *check, "--no-cache", str(PROJECT_ROOT)], capture_output=True, text=True
    )
    assert done.returncode == 0, (
        f"run `python -m ruff format` and `python -m ruff check --fix`:\n{done.stdout}{done.stderr}"
    )
