"""Prefect's UI without its analytics: its bundle calls an analytics service from every browser that opens it, whatever
the server is told.

    python -m flows.prefect_ui COMMAND ...     # runs a server (flows.prefect_server) with the UI made quiet, below PREFECT_HOME

`posttrain up` does the same. Prefect serves a directory of ours (PREFECT_UI_STATIC_DIRECTORY), which holds its own
files without the key that its analytics need to start.
"""

from __future__ import annotations

import os
import shutil
import sys
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

KEY = "c97dd2acbf306ab7bf54aca0aeb7ffa1"  # of the analytics service; in every bundle of Prefect
BASE = "/v2"
PLACEHOLDER = "/PREFECT_UI_SERVE_BASE_REPLACE_PLACEHOLDER"  # what Prefect replaces by the path that it serves a UI at


def quiet(folder: Path) -> dict[str, str]:
    """Make the UI's files below a directory, unless they are there; returns the variables that a Prefect server is
    started with.

    Raises OSError where the directory cannot be written.
    """
    source, target = Path(find_spec("prefect").origin).parent / "server" / "ui-v2", folder / "v2"
    stamp = f"v2:{metadata.version('prefect')}:{BASE}"  # by which Prefect sees that the files are made already
    if source.is_dir() and not (
        (target / "UI_SERVE_BASE").is_file() and (target / "UI_SERVE_BASE").read_text() == stamp
    ):
        shutil.rmtree(target, ignore_errors=True)
        for file in source.rglob(
            "*"
        ):  # with the modes of new files, so that in a group's directory they are the group's
            to = target / file.relative_to(source)
            (to if file.is_dir() else to.parent).mkdir(parents=True, exist_ok=True)
            if file.suffix in (".js", ".css", ".html", ".json", ".webmanifest"):
                text = file.read_text("utf-8", "surrogateescape")
                to.write_text(text.replace(PLACEHOLDER, BASE).replace(KEY, ""), "utf-8", "surrogateescape")
            elif file.is_file():
                shutil.copyfile(file, to)
        (target / "UI_SERVE_BASE").write_text(stamp)
    return {"PREFECT_UI_STATIC_DIRECTORY": str(folder)}


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("usage: python -m flows.prefect_ui COMMAND…, such as: python -m flows.prefect_ui prefect server start")
    os.environ.update(quiet(Path(os.environ.get("PREFECT_HOME") or Path.home() / ".prefect").absolute() / "ui"))
    os.execvp(sys.argv[1], sys.argv[1:])
