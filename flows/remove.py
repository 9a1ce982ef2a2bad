"""`posttrain rm`: which results go, which stay and why, how much room that makes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sqlite3
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Any

from flows import services
from flows.config import ConfigError
from storage import home, removal, tracking

UNITS = {"h": 3600, "d": 86400, "w": 7 * 86400}


def remove(what: list[str], *, before: str | None, unalias: bool, dry_run: bool) -> dict[str, Any]:
    """{removed, kept, already, freed, shared, dry_run}; bytes: freed, and those that stay since others link them. What is named and has to stay refuses all of it; of a run, or
    by age, it is left out, and so is what others have made, too. Raises ConfigError, StoreError."""
    if bool(what) == (before is not None):
        raise ConfigError("write what to remove, REF, RUN or KEY, or an age: posttrain rm --before 30d")
    if before is not None and unalias:
        raise ConfigError("--unalias is for what is named; by age, what has an alias stays")
    if not dry_run:
        removal.finish()
    shelf = removal.Shelf()
    given = shelf.before(moment(before)) if before is not None else [one for text in what for one in shelf.named(text)]
    chosen: dict[str, removal.Result] = {}
    for one in given:
        if one.path in chosen:  # of several stages, or also named by itself
            before_it = chosen[one.path]
            one.keys = one.keys and before_it.keys and one.keys | before_it.keys
            one.run = one.run and before_it.run
        chosen[one.path] = one
    there = [one for one in chosen.values() if one.there]
    already = [one.ref for one in chosen.values() if one not in there] if before is None else []
    needed = shelf.needed(planned())
    kept = {one.path: why for one in there if (why := removal.why_kept(one, shelf, needed, unalias))}
    if before is None and (refused := [one for one in there if one.path in kept and not one.run]):
        raise ConfigError("\n  ".join(f"{one.ref} stays: {kept[one.path]}" for one in refused))
    kept |= {one.path: why for one in there if one.path not in kept and (why := removal.shared(one, shelf))}
    going = [one for one in there if one.path not in kept]
    sizes, freed, stay = removal.sizes(going)
    leaving = {one.path for one in going}
    rows = [
        {
            "ref": one.ref,
            "bytes": sizes[one.path],
            "made_by": f"{one.makers[0]['stage']} [{one.makers[0]['key'][:12]}]",
            "made_from_it": [
                f"{output.ref} ({record['stage']})"
                for record in one.users
                for output in shelf.outputs(record, frozenset())
                if output.path not in leaving and output.there
            ],
            "origin_gone": removal.cannot_be_made_again(one, shelf),
        }
        for one in going
    ]
    for one in () if dry_run else going:
        removal.remove(one, unalias)
    if unalias and going and not dry_run:
        services.connect(home.home())
        tracking.flush_registry(timeout=10)
    return {
        "removed": rows,
        "kept": [{"ref": one.ref, "why": kept[one.path]} for one in there if one.path in kept and before is None],
        "already": already,
        "freed": freed,
        "shared": stay,
        "dry_run": dry_run,
    }


def moment(age: str) -> float:
    """The time that ``30d``, ``12h``, ``2w`` or a date means, in seconds since the epoch. Raises ConfigError."""
    if match := re.fullmatch(r"(\d+(?:\.\d+)?)([hdw])", age.strip()):
        return time.time() - float(match[1]) * UNITS[match[2]]
    try:
        return datetime.fromisoformat(age.strip()).timestamp()
    except ValueError:
        raise ConfigError(f"--before {age} is no age or date; write 30d, 12h, 2w or 2026-10-01") from None


def planned() -> dict[str, str]:
    """digest -> which deployment, or run that Prefect is to begin, names it in its settings."""
    found: dict[str, str] = {}
    rows = []
    if api := os.environ.get("PREFECT_API_URL"):
        services.reachable(api)
        rows += _asked()
    try:
        rows += _kept(home.home() / "prefect" / "prefect.db")
    except (sqlite3.Error, ValueError) as error:
        raise ConfigError(
            f"nothing is removed, since the schedules cannot be read ({error}); `posttrain doctor` says what to do"
        ) from None
    for what, name, settings in rows:
        for digest in removal.digests_in(settings):
            found[digest] = f"{what} {name} names it; " + (
                f"remove that deployment first: prefect deployment delete '{name}', or in Prefect's UI"
                if what == "deployment"
                else "remove it when that has ended, or cancel that in Prefect's UI"
            )
    return found


def _kept(file: Path) -> list[tuple[str, str, Any]]:
    """(deployment | run, name, settings) in the database of this state directory, whether or not its server runs."""
    if not file.is_file():
        return []
    with contextlib.closing(sqlite3.connect(f"{file.absolute().as_uri()}?mode=ro", uri=True, timeout=30)) as database:
        if not database.execute("SELECT 1 FROM sqlite_master WHERE name = 'flow_run'").fetchone():
            return []  # a server has yet to be started on it
        rows = database.execute(
            "SELECT 'deployment', flow.name || '/' || deployment.name, deployment.parameters FROM deployment"
            " JOIN flow ON flow.id = deployment.flow_id UNION ALL SELECT 'deployment', flow.name || '/' ||"
            " deployment.name, deployment_schedule.parameters FROM deployment_schedule JOIN deployment ON deployment.id ="
            " deployment_schedule.deployment_id JOIN flow ON flow.id = deployment.flow_id UNION ALL SELECT 'run', name,"
            " parameters FROM flow_run WHERE state_type IN ('SCHEDULED', 'PENDING', 'PAUSED')"
        ).fetchall()
    return [(what, name, json.loads(settings or "{}")) for what, name, settings in rows]


def _asked() -> list[tuple[str, str, Any]]:
    """As :func:`_kept`, of a server elsewhere."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import FlowRunFilter

    waiting = FlowRunFilter.model_validate({"state": {"type": {"any_": ["SCHEDULED", "PENDING", "PAUSED"]}}})
    rows: list[tuple[str, str, Any]] = []
    with get_client(sync_client=True) as client:
        while page := client.read_deployments(limit=200, offset=len(rows)):
            rows += [("deployment", one.name, one.parameters) for one in page]
        count = len(rows)
        while page := client.read_flow_runs(flow_run_filter=waiting, limit=200, offset=len(rows) - count):
            rows += [("run", one.name, one.parameters) for one in page]
    return rows


def print_removed(value: dict[str, Any]) -> None:
    """What went, or would go, what stays, and what there is to know of it."""
    from flows.display import table
    from flows.doctor import mib

    if value["removed"]:
        table(
            [
                {
                    "removed" if not value["dry_run"] else "would go": row["ref"],
                    "size": mib(row["bytes"]),
                    "made by": row["made_by"],
                    "still there, made from it": ", ".join(row["made_from_it"][:3])
                    + (f" and {len(row['made_from_it']) - 3} more" if len(row["made_from_it"]) > 3 else ""),
                }
                for row in value["removed"]
            ]
        )
    for row in value["removed"]:
        if row["origin_gone"]:
            print(f"{row['ref']} cannot be made again: {', '.join(row['origin_gone'][:3])} is gone", file=sys.stderr)
    for row in value["kept"]:
        print(f"{row['ref']} stays: {row['why']}")
    for ref in value["already"]:
        print(f"{ref} is gone already")
    verb = "would be freed" if value["dry_run"] else "freed"
    again = "; what made them stays known, and `posttrain rerun REF` makes one again" if value["removed"] else ""
    print(f"{mib(value['freed'])} {verb} by {len(value['removed'])} model(s) and dataset(s){again}")
    if value["shared"]:
        print(
            f"{mib(value['shared'])} stay on the disk: other results have the same files, such as datasets of other names"
            " with the same rows"
        )
