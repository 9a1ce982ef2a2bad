"""The program `posttrain`: the options that commands share, how settings come together, and how a command ends."""

from __future__ import annotations

import inspect
import json
import os
import re
import sys
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

EXIT_CODES = (
    "Exit codes: 0 done, 1 a stage or a gate failed, 2 wrong usage or configuration, 3 waits for people, 130"
    " interrupted, 143 terminated (the same command goes on)."
)

app = typer.Typer(
    name="posttrain",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help=(
        "Turns preference data and a base model into a better model, stage by stage.\n\nState lives under"
        " POSTTRAIN_HOME (default ./.posttrain). Refs name things in it: dataset:NAME@latest, dataset:NAME@DIGEST,"
        " model:NAME@champion, model:NAME/3, model:m-DIGEST. Where a ref is taken, a path or a hub id is too."
    ),
    epilog=EXIT_CODES,
)

Devices = Annotated[
    Optional[int],
    typer.Option(
        "--devices",
        min=1,
        help=(
            "GPUs (processes on a machine without) that each training stage runs on; default POSTTRAIN_DEVICES, else 1."
        ),
        callback=lambda n: os.environ.update(POSTTRAIN_DEVICES=str(n)) if n else None,
    ),
]
Json = Annotated[
    bool, typer.Option("--json", help="Print one JSON object as the last line of stdout, everything else on stderr.")
]
Sets = Annotated[
    Optional[list[str]],
    typer.Option("--set", "-s", metavar="KEY=VALUE", help="Override a setting; values are YAML. Repeatable."),
]
Given = Annotated[
    Optional[list[str]],
    typer.Argument(metavar="KEY=VALUE", help="Settings, the same as with --set.", show_default=False),
]
Files = Annotated[
    Optional[list[Path]], typer.Option("--config", "-c", help="YAML file with settings; later files win. Repeatable.")
]
Seed = Annotated[
    Optional[int],
    typer.Option(min=0, help="Seed of every random choice (default 0, or what the configuration says)."),
]
NodeCount = Annotated[
    Optional[int],
    typer.Option(
        "--nodes",
        min=1,
        help=(
            "Machines that share the stages that train, each on --devices; give the same command on all of them, which"
            " share POSTTRAIN_HOME. Of a recipe, all other stages run on node 0."
        ),
    ),
]
NodeRank = Annotated[
    Optional[int],
    typer.Option(
        "--node-rank",
        min=0,
        help=(
            "Which of them this is, from 0; by default what SLURM_NODEID, NODE_RANK, JOB_COMPLETION_INDEX or RANK says."
        ),
    ),
]
Rendezvous = Annotated[
    Optional[str],
    typer.Option(
        "--rendezvous", metavar="HOST:PORT", help="Where node 0 listens; by default MASTER_ADDR and MASTER_PORT."
    ),
]


def flowing(text: str) -> str:
    """A docstring as help: the lines of a paragraph are one, which a terminal of any width breaks where it ends; examples
    stay lines of their own.
    """
    return re.sub(r"(?<!\n)\n(?!\n|Example)", " ", inspect.cleandoc(text))


def with_settings(
    values: dict[str, Any], files: list[Path] | None, sets: list[str] | None, given: list[str] | None
) -> dict[str, Any]:
    """`values` with the files' settings laid over them, and the command line's over those."""
    from flows.config import load_yaml, merge, parse_sets

    for path in files or []:
        values = merge(values, load_yaml(path))
    return merge(values, parse_sets([*(sets or []), *(given or [])]))


def parse_inputs(pairs: list[str] | None, whose: str) -> dict[str, str]:
    """['model=DIR'] -> {'model': 'DIR'}; `whose` ends the message about one that is none."""
    from flows.config import ConfigError

    inputs = {}
    for pair in pairs or []:
        key, sign, ref = pair.partition("=")
        if not sign or not ref:
            raise ConfigError(f"--input {pair!r}: write NAME=REF_OR_PATH; the inputs of {whose}")
        inputs[key] = ref
    return inputs


def recipe_name(name: str) -> str:
    from flows.recipe import get_recipe

    get_recipe(name)
    return name


def emit(value: Any) -> None:
    """One JSON object on one line, the last of stdout."""
    sys.stdout.flush()
    text = json.dumps(value, ensure_ascii=False, default=str)
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        # a terminal of another encoding, or half of a surrogate pair in an error of somebody's code
        text = json.dumps(value, default=str)
    print(text, flush=True)


def classify(error: BaseException) -> int | None:
    """Exit code of an error that has a message for the user; None for a defect, whose traceback is wanted."""
    names = {cls.__name__ for cls in type(error).__mro__}
    of_chat = {"RenderError", "ModelError", "SamplerError", "DecoderError"}  # the one command that samples
    if names & {"ConfigError", "UnhashableError", "StoreError", "RegistryError", "PriceError", *of_chat}:
        return 2
    if names & {"StageError", "ServiceError", "DatasetError", "LeaseBusy", "NodeError"}:
        return 1
    if names & {"TerminationSignal", "Cancelled"}:
        return 143
    return None


def told(error: BaseException) -> tuple[int, str] | None:
    """(exit code, message) of an error that has a message for the user, which of one of the file system, wherever it
    comes from, is what to do; None for a defect."""
    from storage.files import refusal

    code = classify(error)
    text = refusal(error) if code is None else str(error) or type(error).__name__
    return None if text is None else (code or 1, text)


def fail(text: str, code: int) -> None:
    print(f"error: {text}", file=sys.stderr)
    if "--json" in sys.argv:
        emit({"status": "failed", "exit_code": code, "error": text})
    sys.stdout.flush()
    raise SystemExit(code)


class TerminationSignal(BaseException):
    """SIGTERM arrived: unwind, so that whatever runs is ended on the way out."""


def terminate(signum: int, frame: Any) -> None:
    """Unwind on SIGTERM; and since an exception raised by a signal can be lost where Python ignores exceptions (a
    finalizer, a callback), end everything from the outside when that has not happened in time."""
    insist(143)
    raise TerminationSignal("terminated; the same command continues where it stopped")


def insist(code: int) -> None:
    """End this process and all below it in time, whatever it waits for: Prefect's client asks a server that does not
    answer again for minutes.
    """
    import contextlib
    import threading
    import time

    def end() -> None:
        import psutil

        time.sleep(float(os.environ.get("POSTTRAIN_GRACE_SECONDS", "10")) + 15)
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                child.kill()
        print(
            "error: ended while waiting, probably for a Prefect server that does not answer; the same command goes on"
            " where this stopped",
            file=sys.stderr,
            flush=True,
        )
        os._exit(code)

    threading.Thread(target=end, name="terminate", daemon=True).start()
