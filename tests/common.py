"""What tests of every part write their rows with."""

import functools
import math
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


_laid_out: set[str] = set()


def laid_out_once(chart):
    """In the place of ``stages.reporting.reports.line_chart``: curves of a kind that this process has laid out already
    are not laid out again, which is a fifth of the time of a small run of RL. Charts are of one kind if all that is
    written on them is the same and each curve has as many points (none, one, several), gaps or what is not finite
    where the other has some, and values and a spread of the same size and sign.
    """

    def sort(values) -> tuple:
        numbers = [math.nan if one is None else float(one) for one in values]
        finite = [one for one in numbers if math.isfinite(one)]
        sizes = (min(finite), max(finite), max(finite) - min(finite)) if finite else ()
        return (
            min(len(numbers), 2),
            [math.isfinite(one) for one in numbers[:1] + numbers[-1:]],
            sorted({str(one) for one in numbers if not math.isfinite(one)}),
            [one and (one > 0, math.floor(math.log10(abs(one)))) for one in sizes],
        )

    @functools.wraps(chart)
    def once(series, *, bands=None, **how):
        curves = [(name, len(x) == len(y), sort(x), sort(y)) for name, (x, y) in series.items()]
        shaded = [(name, sort(low), sort(high)) for name, (low, high) in (bands or {}).items()]
        kind = repr((curves, shaded, sorted(how.items())))
        if kind not in _laid_out:
            chart(series, bands=bands, **how)
            _laid_out.add(kind)
        return not_drawn(None)

    return once


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
