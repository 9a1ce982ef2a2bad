"""What a person sees while stages run: a progress bar on a terminal, plain lines elsewhere. Always on stderr."""

from __future__ import annotations

import json
import re
import sys
import threading
import time
from pathlib import Path
from typing import Any

SLOW_LINES = 15.0
SHOWN = 300


def console(stderr: bool = False):
    from rich.console import Console

    return Console(stderr=stderr, highlight=False, soft_wrap=not (sys.stderr if stderr else sys.stdout).isatty())


class Display:
    """Called with (label, event) for every event of every stage, from any thread; a context manager."""

    def __init__(self):
        self.out = console(stderr=True)
        self.tty = self.out.is_terminal
        self.bar = None
        self.tasks: dict[str, Any] = {}  # one line of the bar per running stage
        self.loss: dict[str, str] = {}
        self.last_line: dict[str, float] = {}
        self.turn = threading.RLock()

    def __enter__(self) -> Display:
        return self

    def __exit__(self, *error) -> None:
        for label in list(self.tasks):
            self._close(label)

    def __call__(self, label: str, event: dict[str, Any]) -> None:
        handler = getattr(self, "_on_" + str(event.get("event")), None)
        label = event.get("label") or label  # raw data is ingested on the way to a stage, and says so
        if handler is not None:
            with self.turn:
                handler(label, event)

    def say(self, text: str, style: str | None = None) -> None:
        (self.bar.console if self.bar is not None else self.out).print(text, style=style, markup=False)

    def _on_started(self, label, event):
        self._close(label)
        self.loss[label] = ""
        self.last_line[label] = time.monotonic()
        if not self.tty:
            self.say(f"{label}: started")
            return
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        if self.bar is None:
            self.bar = Progress(
                TextColumn("[bold]{task.description}"),
                BarColumn(bar_width=30),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[note]}"),
                console=self.out,
                transient=True,
            )
            self.bar.start()
        self.tasks[label] = self.bar.add_task(label, total=None, note="")

    def _on_progress(self, label, event):
        done, total, message = event.get("done"), event.get("total"), event.get("message") or ""
        note = message or self.loss.get(label, "")
        if label in self.tasks:
            self.bar.update(self.tasks[label], completed=done or 0, total=total, note=note)
            return
        now = time.monotonic()
        if total and now - self.last_line.get(label, 0) > SLOW_LINES:
            self.last_line[label] = now
            self.say(f"{label}: {done}/{total} {note}".rstrip())

    def _on_metric(self, label, event):
        values = event.get("metrics") or {}
        shown = [
            f"{key.rpartition('/')[2]} {value:.4g}"
            for key, value in values.items()
            if isinstance(value, (int, float)) and any(word in key for word in ("loss", "reward", "accuracy", "kl"))
        ]
        if shown:
            self.loss[label] = "  ".join(shown[:3])
            if label in self.tasks:
                self.bar.update(self.tasks[label], note=self.loss[label])

    def _on_log(self, label, event):
        if self.bar is not None:
            self.say(f"  {label}: {event.get('text', '')}", style="dim")

    def _on_warning(self, label, event):
        self.say(f"  {label}: warning {event.get('code')}: {event.get('text')}", style="yellow")

    def _on_report(self, label, event):
        """On a terminal: the rows of the preflight with what is trained in colour."""
        if not self.tty or event.get("name") != "preflight" or not event.get("table"):
            return
        from rich.text import Text

        try:
            rows = json.loads(Path(event["table"]).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return
        for row in rows:
            text = Text(f"  {row['row']}  ", style="bold")
            for piece, trained in row["segments"]:
                shown = piece if len(piece) <= SHOWN else f"{piece[: SHOWN // 2]} … {piece[-SHOWN // 2 :]}"
                text.append(shown, style="dim" if trained is None else "black on green" if trained else "dim cyan")
            (self.bar.console if self.bar is not None else self.out).print(text)

    def _on_waiting(self, label, event):
        self.say(f"  {label}: {event.get('text', '')}")

    def _on_finished(self, label, event):
        self._line("+", label, event, f"{event['seconds']:.1f} s")

    def _on_cached(self, label, event):
        self._line("=", label, event, "cached", "dim")

    def _on_took_part(self, label, event):
        self._close(label)
        self.say(f"{'x' if event['error'] else '+'} {label:<22} {event['error'] or 'took part'}")

    def _on_ended(self, label, event):
        self._close(label)
        self.say(f"x {label:<22} {event.get('status', 'FAILED').lower()}", "bold red")

    def _line(self, mark, label, event, how, style=None):
        self._close(label)
        self.say(f"{mark} {label:<22} {how:>9}  {headline(event['metrics'])}", style)

    def _close(self, label):
        task = self.tasks.pop(label, None)
        if task is not None:
            self.bar.remove_task(task)
        if self.bar is not None and not self.tasks:
            self.bar.stop()
            self.bar = None


#: Names of metrics, or their ends, that say most, in this order.
FIRST = (
    "test/accuracy",
    "validation/accuracy",
    "accuracy",
    "win_rate",
    "reward",
    "validation/nll",
    "validation/loss",
    "loss",
    "pair_accuracy",
    "kl_reference",
    "length_mean",
    "rows_kept",
    "rows_quarantined",
    "rows",
    "steps",
)
#: Ends of names that never stand in for a result: bounds of intervals, and accounts of what was left out.
LAST = re.compile(r"(_high|_low|_se|_p10|_p90)$|^(dropped|quarantine|bias|perf)\b")


def headline(metrics: dict[str, Any], most: int = 4) -> str:
    """The few numbers of a stage that say most, as one line."""
    numbers = {
        key: value for key, value in metrics.items() if isinstance(value, (int, float)) and not isinstance(value, bool)
    }
    return "  ".join(f"{key}={number(value)}" for key, value in [*telling(numbers).items()][:most])


def telling(metrics: dict[str, Any]) -> dict[str, Any]:
    """The numbers of a stage, those that say most first, the others as they are."""

    def rank(key: str) -> int:
        first = (i for i, word in enumerate(FIRST) if key == word or key.endswith("/" + word))
        return next(first, len(FIRST) + bool(LAST.search(key)))

    return {key: metrics[key] for key in sorted(metrics, key=rank)}


def number(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value)


#: Ends of the names of a metric's interval and standard error, which stand beside it in a table.
BESIDE = ("_low", "_high", "_se")


def is_beside(metric: str, metrics) -> bool:
    """Whether ``metric`` is a bound or the error of another one of ``metrics``."""
    return any(metric.endswith(end) and metric.removesuffix(end) in metrics for end in BESIDE)


def metric_rows(metrics: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows {metric, value, 95% interval, se} of a stage's numbers, a metric with its interval and error in one."""
    rows = []
    for name, value in metrics.items():
        if is_beside(name, metrics):
            continue
        low, high, error = (metrics.get(name + end) for end in BESIDE)
        row = {"metric": name, "value": value}
        if low is not None and high is not None:
            row["95% interval"] = f"[{number(low)}, {number(high)}]"
        if error is not None:
            row["se"] = error
        rows.append(row)
    return rows


def setting(default: Any, width: int = 40) -> str:
    """A default as a person would write it, in one line of at most ``width`` characters."""
    from pydantic import BaseModel

    def plain(value: Any) -> Any:
        if isinstance(value, BaseModel):
            return plain(value.model_dump(exclude_defaults=True))
        if isinstance(value, dict):
            return {key: plain(one) for key, one in value.items()}
        return [plain(one) for one in value] if isinstance(value, (list, tuple)) else value

    text = repr(default) if isinstance(default, str) and not default.isprintable() else str(plain(default))
    return text if len(text) <= width else text[: width - 3] + "..."


#: Columns of what people copy: a narrow terminal breaks the others.
WHOLE = ("ref", "key", "run")


def table(rows: list[dict[str, Any]], title: str | None = None) -> None:
    """Rows as a table on stdout; plain tab-separated text when that is not a terminal."""
    if not rows:
        print("nothing yet")
        return
    names = list(dict.fromkeys(key for row in rows for key in row))
    if not sys.stdout.isatty():
        widths = {name: max(len(name), *(len(number(row.get(name, ""))) for row in rows)) for name in names}
        if title:
            print(title)
        for row in [dict(zip(names, names)), *rows]:
            print("  ".join(number(row.get(name, "")).ljust(widths[name]) for name in names).rstrip())
        return
    from rich.table import Table

    view = Table(title=title, title_justify="left", header_style="bold")
    for name in names:
        view.add_column(
            name,
            justify="right" if all(isinstance(row.get(name), (int, float)) for row in rows) else "left",
            overflow="fold",
            no_wrap=name in WHOLE,
        )
    for row in rows:
        view.add_row(*(number(row.get(name, "")) for name in names))
    console().print(view)
