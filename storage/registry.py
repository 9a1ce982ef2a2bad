"""The registry of model names: versions, roles, aliases and the evidence for every promotion.

The truth is an append-only log, ``HOME/registry/models.jsonl``; MLflow's registry shows the same thing. A line is
never changed: an alias that moves is a new line with who was there before, why, and on what numbers.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import time
from dataclasses import dataclass, field
from typing import Any

from storage import home
from storage.files import fsync_dir

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
LONGEST = 200  # characters of a name: it names a directory, and MLflow takes 256


class RegistryError(LookupError):
    """An unknown name, version or alias; the text lists the ones there are."""


@dataclass
class ModelName:
    """One registered name. versions: version -> {digest, role, stage, key, run, user, time}; aliases: alias -> version."""

    name: str
    versions: dict[int, dict[str, Any]] = field(default_factory=dict)
    aliases: dict[str, int] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)


def check_name(name: str) -> str:
    """Return a usable model or dataset name, or raise ValueError saying what a name may hold."""
    if not NAME.fullmatch(name or "") or len(name) > LONGEST:
        raise ValueError(
            f"{name!r} cannot be a name; use letters, digits, '-', '_' and '.', starting with a letter or digit, at most"
            f" {LONGEST} of them"
        )
    return name


def _path():
    return home.registry_dir() / "models.jsonl"


def log() -> list[dict[str, Any]]:
    """Every entry, oldest first (a torn last line of an interrupted write, and a damaged one, is left out)."""
    return [entry for entry in _lines() if entry]


def damaged_lines() -> list[int]:
    """Numbers, from 1, of the lines of the log that are no entries."""
    return [number for number, entry in enumerate(_lines(), 1) if entry is None]


def _lines() -> list[dict[str, Any] | None]:
    """An entry per line of the log, an empty one for an empty line, None for one that cannot be read."""
    try:
        content = _path().read_bytes()
    except FileNotFoundError:
        return []
    found: list[dict[str, Any] | None] = []
    for line in content.split(b"\n"):  # not splitlines: a reason may hold characters that it breaks at
        try:
            entry = json.loads(line.decode("utf-8")) if line else {}
        except ValueError:
            entry = None
        found.append(entry if not line or isinstance(entry, dict) and {"name", "event"} <= entry.keys() else None)
    return found


def _append(make: Any) -> dict[str, Any]:
    """Write the entry, or list of entries, that ``make()`` returns while nobody else writes; the first one."""
    path = _path()
    with open(path, "a+", encoding="utf-8") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        made = make()
        entries = made if isinstance(made, list) else [made]
        if entries[0].pop("_existing", False):
            return entries[0]
        handle.seek(0, os.SEEK_END)
        torn = handle.tell() > 0 and path.read_bytes()[-1:] != b"\n"
        handle.write(
            ("\n" if torn else "")
            + "".join(
                json.dumps({**entry, "time": time.time()}, sort_keys=True, ensure_ascii=False) + "\n"
                for entry in entries
            )
        )
        handle.flush()
        os.fsync(handle.fileno())
    fsync_dir(path.parent)
    return entries[0]


def models() -> dict[str, ModelName]:
    """Every registered name with its versions, aliases and history."""
    found: dict[str, ModelName] = {}
    for entry in log():
        model = found.setdefault(entry["name"], ModelName(entry["name"]))
        model.history.append(entry)
        if entry["event"] == "version":
            model.versions[int(entry["version"])] = entry
        elif entry["event"] == "alias":
            if entry["version"] is None:
                model.aliases.pop(entry["alias"], None)
            else:
                model.aliases[entry["alias"]] = int(entry["version"])
    return found


def register(
    name: str,
    digest: str,
    *,
    role: str = "",
    stage: str = "",
    key: str = "",
    run: str = "",
    user: str = "",
    candidate: bool = True,
) -> int:
    """Version number of this model under this name: the existing one for a digest already there, else the next.
    A new version becomes the name's ``candidate``, unless it is none (``candidate=False``)."""
    check_name(name)

    def make() -> dict[str, Any]:
        known = models().get(name, ModelName(name)).versions
        for version, entry in known.items():
            if entry["digest"] == digest:
                return {"version": version, "_existing": True, "fresh": False}
        return {
            "event": "version",
            "name": name,
            "version": max(known, default=0) + 1,
            "digest": digest,
            "role": role,
            "stage": stage,
            "key": key,
            "run": run,
            "user": user,
        }

    entry = _append(make)
    version = int(entry["version"])
    model = models()[name]
    # new, or ended before this
    if (
        candidate
        and version == max(model.versions)
        and not any(
            e["event"] == "alias" and e["alias"] == "candidate" and e["version"] == version for e in model.history
        )
    ):
        set_alias(name, "candidate", version, reason="newest version")
    return version


def set_alias(name: str, alias: str, version: int | None, *, reason: str = "") -> None:
    """Point an alias (``candidate``, ``champion``, your own) at a version; None takes the alias away."""
    check_name(name)
    check_name(alias)

    def make() -> dict[str, Any]:
        model = lookup(name)
        if version is not None and version not in model.versions:
            raise RegistryError(f"model {name} has no version {version}; its versions are {_listed(model.versions)}")
        before = model.aliases.get(alias)
        if before == version:
            return {"_existing": True}
        return {
            "event": "alias",
            "name": name,
            "alias": alias,
            "version": version,
            "before": before,
            "reason": reason,
            "evidence": {},
        }

    _append(make)


def record_decision(
    name: str,
    version: int,
    *,
    promoted: bool,
    evidence: dict[str, Any],
    alias: str = "champion",
    over: str | None = None,
) -> str | None:
    """Keep a promotion decision, whichever way it went; a positive one moves the alias.

    over: digest, or its beginning, of the model that the evidence compares with ("": with none in office; None: not
    checked). Where another one holds the alias by now, the decision says nothing about it: it is kept as ``promoted:
    false``, the alias stays, and the digest of who holds it is returned.
    """

    def make() -> list[dict[str, Any]]:
        model = lookup(name, version)
        before = model.aliases.get(alias)
        office = model.versions[before]["digest"] if before in model.versions else None
        unknown = (
            promoted
            and over is not None
            and before != version
            and office is not None
            and not (over and office.startswith(over))
        )
        moved = promoted and not unknown
        entries = [
            {
                "event": "decision",
                "name": name,
                "version": version,
                "alias": alias,
                "promoted": moved,
                "evidence": evidence,
                **({"office": office} if unknown else {}),
            }
        ]
        if moved:
            entries.append(
                {
                    "event": "alias",
                    "name": name,
                    "alias": alias,
                    "version": version,
                    "before": before,
                    "reason": "promoted by its gate",
                    "evidence": evidence,
                }
            )
        return entries

    check_name(alias)
    return _append(make).get("office")


def lookup(name: str, version: int | None = None) -> ModelName:
    """A registered name (checked to have ``version`` when given)."""
    found = models()
    if name not in found:
        raise RegistryError(
            f"there is no model named {name!r}; the names are: {', '.join(sorted(found)) or 'none yet'}"
        )
    if version is not None and version not in found[name].versions:
        raise RegistryError(f"model {name} has no version {version}; its versions are {_listed(found[name].versions)}")
    return found[name]


def digest_of(name: str, selector: str) -> tuple[str, int]:
    """(digest, version) of ``name`` at an alias, a version number or ``latest``."""
    model = lookup(name)
    if selector == "latest":
        version = max(model.versions)
    elif selector.isdigit():
        version = int(selector)
    elif selector in model.aliases:
        version = model.aliases[selector]
    else:
        raise RegistryError(
            f"model {name} has no alias {selector!r}; its aliases are: {', '.join(sorted(model.aliases)) or 'none'}; or"
            f" write model:{name}/VERSION with {_listed(model.versions)}"
        )
    if version not in model.versions:
        raise RegistryError(f"model {name} has no version {version}; its versions are {_listed(model.versions)}")
    return model.versions[version]["digest"], version


def names_of(digest: str) -> list[tuple[str, int, list[str]]]:
    """(name, version, aliases) of every place where a digest is registered."""
    return [
        (model.name, version, sorted(a for a, v in model.aliases.items() if v == version))
        for model in models().values()
        for version, entry in model.versions.items()
        if entry["digest"] == digest
    ]


def _listed(versions: dict[int, Any]) -> str:
    return ", ".join(str(v) for v in sorted(versions)) or "none"
