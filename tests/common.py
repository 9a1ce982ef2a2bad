"""What tests of every part write their rows with."""

from datetime import datetime, timezone

#: What a person wrote beside a prompt; rows that a stage makes of the prompt have it too.
BESIDE = {
    "batch_id": "week 3",
    "license": "cc-by-4.0",
    "collected_at": datetime(2024, 5, 1, 12, tzinfo=timezone.utc),
}


def beside(rows) -> list[dict]:
    return [{name: row[name] for name in BESIDE} for row in rows]


def user(text):
    return [{"role": "user", "content": text}]


def assistant(text):
    return [{"role": "assistant", "content": text}]


def stage_processes(home):
    """The processes of the stages that run now in a state directory, however they were started."""
    import psutil

    from storage.files import read_json

    found = [read_json(path, {}).get("child") for path in (home / "leases").glob("stage-*")]
    return [psutil.Process(child["pid"]) for child in found if child and psutil.pid_exists(child["pid"])]


def silent(event):
    """A listener of ``stages.harness.execute`` that keeps nothing."""


def not_drawn(figure) -> bytes:
    """In the place of ``stages.reporting.reports._png``, which takes ten times as long as all else about a chart."""
    return b"\x89PNG not drawn"


def random_value_head(hidden_size: int, seed: int = 1):
    """A value head that has learned something: with the zeros that critics start from, no gradient reaches the
    trunk.
    """
    import torch

    from stages.policy.critics import new_value_head

    head = new_value_head(hidden_size)
    with torch.no_grad():
        head.weight.copy_(
            torch.randn(head.weight.shape, generator=torch.Generator().manual_seed(seed)) / (hidden_size + 1) ** 0.5
        )
    return head


def written(path, name: str, kind: str, rows, *, dataset=None, source="s", origin="human", split="train") -> str:
    """A dataset of these rows, their common columns filled in; what a row has wins. Returns its path."""
    from storage.datasets import write_dataset
    from storage.schema import complete_row

    common = {"dataset": dataset or name, "source": source, "origin": origin, "split": split}
    write_dataset(path, name, kind, [complete_row(kind, row, **common) for row in rows])
    return str(path)


def ingested(path, kind: str, workdir, seed: int = 0, **config) -> str:
    """A file as a dataset of this kind, by stage ingest in this process. Returns its path."""
    from stages.harness import execute

    spec = {
        "stage": "ingest",
        "key": "ingested",
        "config": {"kind": kind, **config},
        "seed": seed,
        "device": "cpu",
        "inputs": {"data": str(path)},
        "workdir": str(workdir),
    }
    return execute(spec, silent)["outputs"]["data"]["path"]
