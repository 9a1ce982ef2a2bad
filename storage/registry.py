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


#: An alias: what MLflow takes, too, and nothing that is read as a version (3, v3, latest).
ALIAS = re.compile(r"(?!(?:[vV]?\d+|(?i:latest))$)[A-Za-z0-9][A-Za-z0-9_-]*")


def is_alias(alias: str) -> bool:
    """Whether :func:`check_alias` takes it."""
    return bool(ALIAS.fullmatch(alias or "")) and len(alias) <= LONGEST


def check_alias(alias: str) -> str:
    """Return a usable alias, or raise RegistryError saying what one may hold."""
    if not is_alias(alias):
        raise RegistryError(
            f"{alias!r} cannot be an alias; write letters, digits, '-' and '_', starting with a letter or digit; a number,"
            " v and a number, and latest mean versions"
        )
    return alias


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
        entries = [{**entry, "time": time.time()} for entry in entries]
        handle.seek(0, os.SEEK_END)
        torn = handle.tell() > 0 and path.read_bytes()[-1:] != b"\n"
        handle.write(
            ("\n" if torn else "")
            + "".join(json.dumps(entry, sort_keys=True, ensure_ascii=False) + "\n" for entry in entries)
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
        set_alias(name, "candidate", version, reason="newest version", user=user)
    return version


#: ``over`` of :func:`set_alias`: whoever has the alias.
ANYBODY = object()


def set_alias(
    name: str,
    alias: str,
    version: int | None,
    *,
    reason: str = "",
    user: str = "",
    how: str = "",
    over: Any = ANYBODY,
) -> dict[str, Any]:
    """Point an alias (``candidate``, ``champion``, your own) at a version; None takes the alias away.

    how: what a person has done: ``hand``, or ``back`` for a step back to the version before (:func:`version_before`).
    over: the version that it is taken from; RegistryError where another one has it by now.

    Returns the entry in the log; ``{}`` where the alias was there already.
    """
    check_name(name)
    if version is not None:  # one that was given before there was a check can be taken away
        check_alias(alias)

    def make() -> dict[str, Any]:
        model = lookup(name)
        if version is not None and version not in model.versions:
            raise RegistryError(f"model {name} has no version {version}; its versions are {_listed(model.versions)}")
        before = model.aliases.get(alias)
        if over is not ANYBODY and before != over:
            raise RegistryError(
                f"model:{name}@{alias} was {_called(over)} and is {_called(before)} by now; see who moved it (posttrain"
                f" alias model:{name}@{alias}), and give the command again"
            )
        if before == version:
            return {"_existing": True}
        return {
            "event": "alias",
            "name": name,
            "alias": alias,
            "version": version,
            "before": before,
            "reason": reason,
            "user": user,
            "evidence": {},
            **({"how": how} if how else {}),
        }

    return _append(make)


def moves(model: ModelName, alias: str) -> list[dict[str, Any]]:
    """The entries by which an alias has moved, oldest first."""
    return [entry for entry in model.history if entry["event"] == "alias" and entry["alias"] == alias]


def version_before(model: ModelName, alias: str) -> int | None:
    """The version that an alias pointed at before the present one (of an alias that was taken away: the last one); None
    where there was none. A step back is no move of its own: the next one goes further back.
    """
    held: list[int] = []
    for entry in moves(model, alias):
        version = None if entry["version"] is None else int(entry["version"])
        if entry.get("how") == "back" and version in held:
            while held[-1] != version:
                held.pop()
        elif version is not None and held[-1:] != [version]:
            held.append(version)
    if alias in model.aliases:
        held = held[:-1]
    return held[-1] if held else None


def taken_by_hand(model: ModelName, alias: str, version: int) -> dict[str, Any] | None:
    """The entry by which a person took an alias from a version that has not had it again since; None where nobody did."""
    found = None
    for entry in moves(model, alias):
        if entry["version"] == version:
            found = None
        elif entry["before"] == version:
            found = entry if entry.get("how") else None
    return found


def told(entry: dict[str, Any], to: bool = True) -> str:
    """When, by whom and why an alias moved, for people; ``to``: said of the version that got it, not of the one that
    lost it.
    """
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry["time"]))
    words = [f"since {when}" if to else f"until {when}", *([f"by {entry['user']}"] if entry.get("user") else [])]
    if entry.get("how") == "back" and to:
        words += [f"back from {_called(entry['before'])}"]
    elif not to:
        words += [f"now {_called(entry['version'])}"]
    return ", ".join(words) + (f": {entry['reason']}" if entry["reason"] else "")


def history_of(name: str, version: int) -> list[str]:
    """When a version got and lost which aliases, by whom and why, oldest first; without what every new version is, the
    candidate.
    """
    return [
        f"{entry['alias']} {told(entry, to)}"
        for entry in lookup(name).history
        if entry["event"] == "alias" and (entry["alias"] != "candidate" or entry.get("how"))
        for place, to in (("before", False), ("version", True))
        if entry[place] == version
    ]


def moved_by_hand(name: str, version: int) -> list[str]:
    """What a person's last word on a version is, of every alias: it has it by hand, or was taken from it."""
    model = lookup(name)
    found = []
    for alias in dict.fromkeys(entry["alias"] for entry in model.history if entry["event"] == "alias"):
        last = [entry for entry in moves(model, alias) if version in (entry["version"], entry["before"])][-1:]
        found += [f"{alias} {told(entry, entry['version'] == version)}" for entry in last if entry.get("how")]
    return found


def record_decision(
    name: str,
    version: int,
    *,
    promoted: bool,
    evidence: dict[str, Any],
    alias: str = "champion",
    over: str | None = None,
    user: str = "",
) -> dict[str, Any]:
    """Keep a promotion decision, whichever way it went; a positive one moves the alias, and the entry is returned.

    over: digest, or its beginning, of the model that the evidence compares with ("": with none in office; None: not
    checked). Where another one holds the alias by now, the decision says nothing about it: it is kept as ``promoted:
    false``, the alias stays, and ``office`` of the entry is the digest of who holds it. What a person took the alias
    from gets it again by a person only: nothing is kept, and ``taken`` is the entry of that move.
    """

    def make() -> Any:
        model = lookup(name, version)
        before = model.aliases.get(alias)
        if promoted and before != version and (taken := taken_by_hand(model, alias, version)) is not None:
            return {"_existing": True, "taken": taken}
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
                "user": user,
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
                    "user": user,
                    "evidence": evidence,
                }
            )
        return entries

    check_alias(alias)
    return _append(make)


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


def _called(version: int | None) -> str:
    return "no version" if version is None else f"version {version}"
