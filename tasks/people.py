"""Steps that people take (ops.human_gate): the task file, where the filled one is put, and how a run waits for it.

    HOME/human/<first 16 of the task's digest>/task.csv, README.md     what people get
    HOME/human/<...>/answers.csv (or .jsonl, .parquet)                 the filled file, once it was checked

A run that needs answers ends as WAITING and goes on when it is given again, like one that was killed: nothing is held
meanwhile, and a restart of machine or server changes nothing. A run of a deployment is suspended in Prefect; *Resume*
in its UI asks for the path of the filled file, and the worker goes on with it.
"""

from __future__ import annotations

import contextlib
import csv
import fcntl
import json
import os
import re
from collections import Counter
from pathlib import Path
from typing import Any, Iterator

from stages.spec import ConfigError
from storage import home, store
from storage.datasets import open_dataset
from storage.files import atomic_write_bytes, atomic_write_text


class Waiting(Exception):
    """A run cannot go on before people have filled in a task; the text says which file, and what to do with it."""

    def __init__(self, label: str, task: str, file: str):
        self.label, self.task, self.file = label, task, file
        super().__init__(f"step {label} waits for people: fill in {file}, then `posttrain answer {task} FILE`")


def folder(digest: str) -> Path:
    return home.subdir("human", digest[:16])


def export(ref: str) -> Path:
    """Write the task file of a ``human_tasks/1`` dataset, unless it is there; its path."""
    from stages.human_task import as_row

    found = store.resolve(ref, "dataset")
    where = folder(found.digest)
    file = where / "task.csv"
    if not file.exists():
        data = open_dataset(found.path)
        rows = [as_row(row["ask"], row["item_id"], json.loads(row["shown_json"])) for row in data.iter_rows()]
        names = list(dict.fromkeys(name for row in rows for name in row))
        from stages.human_task import CHOICES

        meta = data.manifest["meta"]
        atomic_write_text(
            where / "README.md",
            f"# Task {found.digest[:16]}\n\n{meta['instructions']}\n\nInstructions version {meta['version']}."
            f" {len(rows)} items in task.csv; entries of the column choice: {', '.join(CHOICES[meta['ask']])}. Several"
            " people may answer: one line each, with different names in the column annotator.\n",
        )
        lines: list[str] = []

        class Lines:
            write = staticmethod(lines.append)

        out = csv.DictWriter(Lines, names)
        out.writeheader()
        out.writerows(rows)
        atomic_write_text(file, "".join(lines))
    return file


def answers_of(digest: str) -> Path | None:
    """The checked answers to a task, if they are there: the newest file, since who brought them in may have been ended
    before it removed the earlier one, of another form.
    """
    written = {}
    for file in folder(digest).glob("answers.*"):
        with contextlib.suppress(FileNotFoundError):  # removed meanwhile
            written[file] = file.stat().st_mtime_ns
    return max(written, key=written.get, default=None)


@contextlib.contextmanager
def _alone(where: Path) -> Iterator[None]:
    """Held while answers are put in place of earlier ones: two at once would each remove the other's."""
    with open(where / ".lock", "a") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def open_tasks() -> list[dict[str, Any]]:
    """{task, items, answered, file} of every task file of this state directory."""
    rows = []
    for file in sorted((home.home() / "human").glob("*/task.csv"), key=lambda one: one.stat().st_mtime):
        with open(file, encoding="utf-8", newline="") as handle:
            items = sum(1 for _ in csv.DictReader(handle))
        rows.append(
            {
                "task": file.parent.name,
                "items": items,
                "answered": any(file.parent.glob("answers.*")),
                "file": str(file),
            }
        )
    return rows


def answer(task: str, file: str | Path) -> dict[str, Any]:
    """Check a filled file and keep it as the answers to a task (the beginning of its id is enough), in place of earlier
    ones: ``replaced`` says whose they were, by annotator.

    Raises:
        ConfigError: no such task or file, or a line that is no answer.
    """
    from stages.human_answers import read_answers

    known = [one["task"] for one in open_tasks()]
    matching = [one for one in known if one.startswith(task)]
    if len(matching) != 1:
        raise ConfigError(
            f"there is no task {task!r}; the tasks are: {', '.join(known) or 'none'}"
            if not matching
            else f"task {task!r} is ambiguous; write more of it: {', '.join(matching)}"
        )
    file, where = Path(file), folder(matching[0])
    if not file.is_file():
        raise ConfigError(f"there is no file {file}; give the filled copy of {where / 'task.csv'}")
    with open(where / "task.csv", encoding="utf-8", newline="") as handle:
        header = csv.DictReader(handle)
        ask = "compare" if "answer_1" in (header.fieldnames or []) else "keep"
        items = {row["item_id"]: ask for row in header}
    given = read_answers(file, items)
    if not given:
        raise ConfigError(f"{file}: no line is filled in; write an entry into the column choice")
    now = {(item, who) for item, _, who in given}
    kept = where / f"answers{file.suffix if file.suffix in ('.jsonl', '.json', '.parquet') else '.csv'}"
    with _alone(where):
        earlier = answers_of(matching[0])
        replaced = (
            Counter(who for item, _, who in read_answers(earlier, items) if (item, who) not in now) if earlier else {}
        )
        atomic_write_bytes(kept, file.read_bytes())  # first, so that there is never none
        for old in where.glob("answers.*"):
            if old != kept:
                old.unlink()
    return {
        "task": matching[0],
        "items": len(items),
        "answered": len({item for item, _, _ in given}),
        "answers": str(kept),
        "replaced": dict(replaced),
    }


def answered(label: str, ref: str) -> str:
    """The path of the answers to a task; a run of a deployment is suspended until they come.

    Raises:
        Waiting: there are none yet (in a run without a deployment).
    """
    from prefect.runtime import deployment

    digest = store.resolve(ref, "dataset").digest
    file = export(ref)
    attempt = 0
    while answers_of(digest) is None:
        if not deployment.id:
            raise Waiting(label, digest[:16], str(file))
        attempt += 1
        _suspended(label, digest, file, attempt)
    return str(answers_of(digest))


def _suspended(label: str, digest: str, file: Path, attempt: int) -> None:
    """Suspend this flow run until somebody resumes it with the path of a filled file, and take that in; a file that
    cannot be read is said in the log, and the run waits again.
    """
    from prefect.artifacts import create_markdown_artifact
    from prefect.flow_runs import suspend_flow_run
    from prefect.input import RunInput
    from prefect.logging import get_run_logger
    from pydantic import Field

    class Answers(RunInput):
        answers: str = Field(
            "",
            description=(
                f"Path of the filled copy of {file}; empty where `posttrain answer {digest[:16]} FILE` has brought"
                " it in."
            ),
        )

    slug = re.sub(r"[^a-z0-9]+", "-", label.lower()).strip("-")  # all that Prefect takes in a key
    create_markdown_artifact(
        key=f"people-{slug}",
        markdown=(file.parent / "README.md").read_text(encoding="utf-8")
        + f"\nFile: `{file}`. Fill it in, then *Resume* this "
        f"run with the path of the filled file, or `posttrain answer {digest[:16]} FILE`.\n",
    )
    get_run_logger().warning(
        "%s waits for people: fill in %s, then Resume this run with the path of the filled file, or `posttrain answer"
        " %s FILE`",
        label,
        file,
        digest[:16],
    )
    given = suspend_flow_run(wait_for_input=Answers, timeout=None, key=f"{slug}-{digest[:16]}-{attempt}")
    if given is not None and given.answers.strip():
        try:
            answer(digest[:16], given.answers.strip())
        except ConfigError as error:
            get_run_logger().error("%s", error)


def resume(task: str) -> list[str]:
    """Resume the suspended flow runs that wait for a task, where a server is configured; their ids."""
    if not os.environ.get("PREFECT_API_URL"):
        return []
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import FlowRunFilter

    found = []
    with get_client(sync_client=True) as client:
        for run in client.read_flow_runs(
            flow_run_filter=FlowRunFilter.model_validate({"state": {"type": {"any_": ["PAUSED"]}}})
        ):
            if f"-{task[:16]}-" in str(run.state.state_details.pause_key):
                client.resume_flow_run(run.id, run_input={"answers": ""})
                found.append(str(run.id))
    return found
