"""The process of a stage: it ends with its parent, speaks JSON lines on stdout, starts the ranks of a stage that runs on
several devices, and says how it ended. What runs in it is ``stages.harness.execute``.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import linecache
import os
import signal
import sys
import threading
import time
import traceback
from functools import partial
from pathlib import Path
from typing import Any, Callable

from stages.harness import StageFailure, execute
from stages.registry import get_stage
from stages.running import allocator
from stages.running.stopping import Terminated, stopping
from stages.spec import PROJECT_ROOT, ConfigError, is_ours
from storage.files import atomic_write_json, read_json, refusal


def die_with_parent(parent: int) -> None:
    """End this process when process ``parent`` ends: the kernel's signal where there is one, and a watching thread
    anyway (the kernel's signal belongs to the parent's *thread*)."""
    if sys.platform == "linux":
        with contextlib.suppress(Exception):
            ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    direct = os.getppid()
    if not _exists(parent):
        os._exit(1)

    def watch() -> None:
        while True:
            if os.getppid() != direct or not _exists(parent):
                _kill_children()
                os._exit(1)
            time.sleep(0.25)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def _die_with_task() -> None:
    parent = os.environ.get("POSTTRAIN_PARENT_PID")
    if parent:
        die_with_parent(int(parent))


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _kill_children() -> None:
    with contextlib.suppress(Exception):
        import psutil

        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(Exception):
                child.kill()


def main(spec_path: str) -> int:
    """``python -m stages SPEC.json``: run one stage, events on stdout, everything else on stderr. Returns the exit
    code.
    """
    signal.signal(signal.SIGTERM, stopping.heed)
    spec = read_json(spec_path)
    spec.setdefault("workdir", str(Path(spec_path).with_suffix(".work")))
    devices, nodes = int(spec.get("devices") or 1), spec.get("nodes")
    if (devices > 1 or nodes) and "RANK" not in os.environ:
        return _launch_ranks(spec_path, spec["stage"], devices, Path(spec["workdir"]), nodes)
    _die_with_task()
    emit = _line_emitter()
    failed = emit
    if "RANK" in os.environ:
        _end_despite_collectives()
        failed = partial(_leave_error, Path(spec["workdir"]))
    try:
        if get_stage(spec["stage"]).SPEC.gpu:  # it trains or samples
            allocator.keep_freed_memory()
        execute(spec, emit)
        return 0
    except (ConfigError, StageFailure) as error:
        refused = isinstance(error, ConfigError)  # of whichever kind: a rubric, a protocol
        kind = "ConfigError" if refused else type(error).__name__
        failed({"event": "error", "type": kind, "message": str(error), "traceback": ""})
        print(f"{kind}: {error}", file=sys.stderr, flush=True)
        return 2 if refused else 1
    except (Terminated, KeyboardInterrupt):
        failed({"event": "error", "type": "Terminated", "message": "the stage was asked to stop", "traceback": ""})
        return 143
    except Exception as error:
        text, ours = traceback.format_exc(), refusal(error) or (str(error) if refused_by_us(error) else None)
        failed(
            {
                "event": "error",
                "type": StageFailure.__name__ if ours and not is_ours(type(error).__module__) else type(error).__name__,
                "message": ours or without_memory(error) or str(error),
                "traceback": "" if ours else text[-4000:],
            }
        )
        with contextlib.suppress(OSError):  # the log may lie on the disk that is full
            print(text, file=sys.stderr, flush=True)
        return 1
    finally:
        _kill_children()


def without_memory(error: Exception) -> str | None:
    """What to do where a GPU's memory did not suffice outside of micro-batches, which would have been halved: for a model
    that was loaded, an optimizer's step; None for other errors."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(error, torch.OutOfMemoryError):
        return None
    return (
        f"{str(error).partition(chr(10))[0]} The device's memory does not suffice. End what else uses it and give the same"
        " command again, which goes on from the last checkpoint; or write lora_rank=16, activation_checkpointing=true, or"
        " a lower max_tokens_per_micro_batch, generation_batch or max_length, of these what the stage has."
    )


def refused_by_us(error: Exception) -> bool:
    """Whether a ``raise`` in this project, of a ValueError or of an error of its own (a judge that does not answer, a
    server that is away), told the user what to do: the traceback, which stays in the log, adds nothing. A ValueError out
    of a library or of an expression (``int("x")``) is a defect and is shown with its place."""
    if not (isinstance(error, ValueError) or is_ours(type(error).__module__)) or error.__traceback__ is None:
        return False
    frame, line = list(traceback.walk_tb(error.__traceback__))[-1]
    path = Path(frame.f_code.co_filename)
    return (
        PROJECT_ROOT in path.parents
        and "site-packages" not in path.parts
        and "raise " in linecache.getline(str(path), line)
    )


def _launch_ranks(spec_path: str, stage: str, devices: int, workdir: Path, nodes: dict[str, Any] | None = None) -> int:
    """Run the stage's ranks, of several nodes (``tasks.nodes``) those of this one; when one fails the others are ended,
    and the error told is that of the first to fail.
    """
    from stages.running.launch import launch

    first_rank, everyone = (devices * nodes["rank"], devices * nodes["count"]) if nodes else (0, devices)
    left = [workdir / f"error-rank{first_rank + i}.json" for i in range(devices)]
    for path in left:
        path.unlink(missing_ok=True)
    error, code = None, 1
    try:
        failed = launch(spec_path, stage, devices, main, started=_die_with_task, nodes=nodes)
        if not failed:
            return 0
        killed = [(rank, number) for rank, number in failed.items() if number < 0 and -number != signal.SIGTERM]
        told = [e for e in (read_json(p, None) for p in left) if e and e["type"] != "Terminated"]
        # a broken connection may abort the others
        first = [k for k in killed if -k[1] != signal.SIGABRT] or ([] if told else killed)
        if first or not told:
            rank, number = (first or [*failed.items()])[0]
            how = (
                f"was ended by {signal.Signals(-number).name}"
                if number < 0
                else f"ended with status {number} and no error message"
            )
            error = {
                "event": "error",
                "type": "RankDied",
                "traceback": "",
                "message": (
                    f"rank {rank} of {everyone} {how}, and the others with it"
                    + (
                        "; the kernel does that when memory runs out: lower max_tokens_per_micro_batch"
                        if -number == signal.SIGKILL
                        else ""
                    )
                ),
            }
        else:
            error = min(told, key=lambda e: e.pop("time"))
        code = 2 if error["type"] == "ConfigError" else 1
    except (Terminated, KeyboardInterrupt):
        error = {
            "event": "error",
            "type": "Terminated",
            "message": "the stage was asked to stop",
            "traceback": "",
        }
        code = 128 + signal.SIGTERM
    except ConfigError as failure:
        error, code = {"event": "error", "type": "ConfigError", "message": str(failure), "traceback": ""}, 2
    except Exception as failure:
        error = {
            "event": "error",
            "type": type(failure).__name__,
            "message": str(failure),
            "traceback": traceback.format_exc()[-4000:],
        }
    _line_emitter()(error)
    print(f"{error['type']}: {error['message']}", file=sys.stderr, flush=True)
    return code


def _leave_error(workdir: Path, error: dict[str, Any]) -> None:
    """Keep a rank's error for the launcher, which knows which rank failed first."""
    with contextlib.suppress(OSError):
        atomic_write_json(workdir / f"error-rank{os.environ['RANK']}.json", {**error, "time": time.time()})


def _end_despite_collectives(seconds: float = 5.0) -> None:
    """On SIGTERM end this process after a few seconds whatever it does: a rank that waits inside a collective for one
    that is gone never comes back to Python, where the signal's handler would run."""
    reads, writes = os.pipe()
    os.set_blocking(writes, False)
    signal.set_wakeup_fd(writes, warn_on_full_buffer=False)

    def watch() -> None:
        while signal.SIGTERM not in os.read(reads, 64):
            pass
        time.sleep(seconds)
        _kill_children()
        os._exit(128 + signal.SIGTERM)

    threading.Thread(target=watch, name="sigterm-watch", daemon=True).start()


def _line_emitter() -> Callable[[dict[str, Any]], None]:
    """Keep the real stdout for events and point file descriptor 1 at stderr, so that no library's print can break a
    line.
    """
    channel = os.dup(1)
    os.set_inheritable(channel, False)
    os.dup2(2, 1)
    lock = threading.Lock()

    def emit(event: dict[str, Any]) -> None:
        data = (json.dumps(event, ensure_ascii=False, default=str) + "\n").encode("utf-8", "backslashreplace")
        with lock:
            try:
                while data:
                    data = data[os.write(channel, data) :]
            except (BrokenPipeError, OSError):
                pass  # nobody listens any more; the files in the work directory stay the truth

    return emit
