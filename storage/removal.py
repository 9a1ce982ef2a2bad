"""Removing results that nobody needs any longer: the files of models and datasets go, the records of what made them stay.

What is removed is renamed out of its place first, after a mark was written (``HOME/removed/``): it is there in full or
gone, whenever the process ends, and :func:`finish` deletes what a killed one left. A result that was removed is no
damage; the stage that made it executes again when it is asked for, and takes the mark away. Of a model the files that
MLflow shows go with it, where they lie in this home: they are the same ones by other names.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from storage import home, records, registry, store, work
from storage.files import atomic_write_json, fsync_dir, read_json

LEFT = ("models/.removed-*", "datasets/*/.removed-*", "mlartifacts/*/models/*/.removed-*")


@dataclass
class Result:
    """A model or dataset in the store, or one that was. makers, users: records that have it as an output, as an input
    (users that gave it back as it was are none); keys: of the stages whose outputs it was chosen with, none where it was
    named by itself; run: the run that these are of."""

    kind: str
    name: str
    digest: str
    path: str
    ref: str
    makers: list[dict[str, Any]] = field(default_factory=list)
    users: list[dict[str, Any]] = field(default_factory=list)
    keys: frozenset[str] = frozenset()
    run: str | None = None

    @property
    def there(self) -> bool:
        """Whether its files are in the store."""
        return store.is_dataset_dir(self.path) if store.is_url(self.path) else Path(self.path).is_dir()


class Shelf:
    """What is known of every result, read once."""

    def __init__(self) -> None:
        self.records = list(records.all_records())
        self.runs = records.all_runs()
        self.by_key = {record["key"]: record for record in self.records}
        self.makers: dict[str, list[dict[str, Any]]] = {}
        self.users: dict[str, list[dict[str, Any]]] = {}
        for record in reversed(self.records):
            made = {output["digest"] for output in record["outputs"].values()}
            for digest in made:
                self.makers.setdefault(digest, []).append(record)
            for digest in {given["digest"] for given in record["inputs"].values()} - made:
                self.users.setdefault(digest, []).append(record)

    def result(
        self, kind: str, name: str, digest: str, keys: frozenset[str] = frozenset(), run: str | None = None
    ) -> Result:
        path = store.dataset_path(name, digest) if kind == "dataset" else str(store.model_path(digest))
        ref = f"dataset:{name}@{digest[:12]}" if kind == "dataset" else f"model:m-{digest[:12]}"
        makers = [
            record
            for record in self.makers.get(digest, [])
            if kind == "model" or any(one["name"] == name for one in record["outputs"].values())
        ]
        makers = makers or self.makers.get(digest, [])
        return Result(kind, name, digest, path, ref, makers, self.users.get(digest, []), keys, run)

    def outputs(self, record: Mapping[str, Any], keys: frozenset[str], run: str | None = None) -> list[Result]:
        return [self.result(one["kind"], one["name"], one["digest"], keys, run) for one in record["outputs"].values()]

    def named(self, text: str) -> list[Result]:
        """The results that a reference, a run (all that its steps gave) or the key of a stage names. Raises
        StoreError."""
        text = store.pinned(text)
        if store.is_ref(text):
            digest = records.digest_of(text)
            match = store.DATASET_REF.fullmatch(text)
            return [self.result("dataset", match["name"], digest) if match else self.result("model", "", digest)]
        try:
            run = records.get_run(text)
        except store.StoreError as error:
            if len(text) >= 6 and (record := records.match(text)):
                return self.outputs(record, frozenset([record["key"]]))
            if len(text) >= 6 and work.match(text):
                raise store.StoreError(
                    f"stage {text} has no result to remove; `posttrain doctor --clean-after DAYS` removes what"
                    " unfinished stages keep"
                ) from None
            if Path(text).exists():
                raise store.StoreError(
                    f"{text} is a path; write the reference of a result (`posttrain ls results`), a run or the key of a"
                    " stage"
                ) from None
            raise error from None
        if run.status in ("RUNNING", "WAITING"):
            how = "still runs" if run.status == "RUNNING" else "waits for people and will go on"
            raise store.StoreError(
                f"run {run.run_id} {how}; remove its results when it has ended, or single ones that it does not use:"
                " posttrain rm REF"
            )
        keys = frozenset(entry["key"] for entry in run.data["stages"]) & self.by_key.keys()
        return [result for key in keys for result in self.outputs(self.by_key[key], keys, run.run_id)]

    def before(self, moment: float) -> list[Result]:
        """The results that were made, and last used by a stage or a run, before a time."""
        used = {record["key"]: record["finished"] for record in self.records}
        for run in self.runs:
            for entry in run.data["stages"]:
                if entry["key"] in used:
                    used[entry["key"]] = max(used[entry["key"]], run.data["started"])
        return [
            result
            for record in self.records
            for result in self.outputs(record, frozenset(used))
            if all(used[one["key"]] < moment for one in (*result.makers, *result.users))
        ]

    def needed(self, also: Mapping[str, str]) -> dict[str, str]:
        """digest -> who needs it now and what to do instead: what runs or waits, and ``also``."""
        found = dict(also)
        for run in self.runs:
            if run.status not in ("RUNNING", "WAITING"):
                continue
            why = f"run {run.run_id} ({run.status.lower()}) reads it; remove it when that has ended"
            keys = [entry["key"] for entry in (*run.data["stages"], *run.data.get("begun", {}).values())]
            for record in (self.by_key[key] for key in keys if key in self.by_key):
                for one in (*record["inputs"].values(), *record["outputs"].values()):
                    found.setdefault(one["digest"], why)
            for digest in digests_in(run.data["config"]):
                found.setdefault(digest, why)
        return found | busy()


def busy() -> dict[str, str]:
    """digest -> which stage that runs or waits at this moment reads it, or makes it again."""
    found = {}
    for stage in work.running():
        why = f"stage {stage['stage']} [{stage['key'][:12]}], which is {stage['status']}, "
        for one in (stage["inputs"] or {}).values():
            if one.get("digest"):
                found[one["digest"]] = why + "reads it; remove it when that has ended"
        for one in (records.read(stage["key"]) or {"outputs": {}})["outputs"].values():
            found[one["digest"]] = why + "makes it again; remove it when that has ended"
    return found


def digests_in(settings: Any) -> set[str]:
    """Digests of the results that settings name: by references, or by paths into the store."""
    if isinstance(settings, Mapping):
        return {digest for value in settings.values() for digest in digests_in(value)}
    if isinstance(settings, (list, tuple)):
        return {digest for value in settings for digest in digests_in(value)}
    if not isinstance(settings, str):
        return set()
    if store.is_ref(settings):
        with contextlib.suppress(store.StoreError):
            return {records.digest_of(settings)}
    return set(re.findall(r"(?<![0-9a-f])[0-9a-f]{64}(?![0-9a-f])", settings))


def why_kept(result: Result, shelf: Shelf, needed: Mapping[str, str], unalias: bool) -> str | None:
    """Why a result has to stay, and what to write instead; None where it may go."""
    if result.digest in needed:
        return needed[result.digest]
    if (why := _given_by_others(result) if unalias else _in_office(result)) is not None:
        return why
    if not result.makers:
        return (
            "no record says what made it, so nothing could make it again; `posttrain export` gives a copy to keep, and"
            f" rm -r {result.path} removes it"
        )
    return None


def _in_office(result: Result) -> str | None:
    """Why a model that has an alias has to stay, and what to write instead; None where it has none."""
    aliases = [
        f"model:{name}/{version} is {' and '.join(aliases)}"
        for name, version, aliases in registry.names_of(result.digest)
        if aliases and result.kind == "model"
    ]
    if not aliases:
        return None
    return (
        f"{', '.join(aliases)}; give that to another (champion: `posttrain promote MODEL` or `posttrain alias"
        f" model:NAME@champion VERSION`; candidate is the newest version), or take it away with the files: posttrain rm"
        f" {result.ref} --unalias"
    )


def _given_by_others(result: Result) -> str | None:
    """Why a model with an alias that another person gave it stays even where aliases go with files, and what to write
    instead; None where there is none."""
    for name, version, aliases in registry.names_of(result.digest) if result.kind == "model" else ():
        for alias in aliases:
            last = registry.moves(registry.lookup(name), alias)[-1]
            if last.get("how") and last["user"] not in ("", records.user()):
                return (
                    f"model:{name}/{version} is {alias} {registry.told(last)}; ask {last['user']}, or take the alias away"
                    f" under your own name first: posttrain alias model:{name}@{alias} --remove --reason TEXT"
                )
    return None


def shared(result: Result, shelf: Shelf) -> str | None:
    """Whose result one is beside the stages or the run that it was chosen with; None where nobody's."""
    mine = {record["key"] for record in result.makers}
    others = [f"stage {one['stage']} [{one['key'][:12]}]" for one in result.makers if one["key"] not in result.keys]
    others += [
        f"run {run.run_id}"
        for run in shelf.runs
        if result.run and run.run_id != result.run and mine & {entry["key"] for entry in run.data["stages"]}
    ]
    if not result.keys or not others:
        return None
    return f"it is a result of {others[0]}, too; to remove it all the same: posttrain rm {result.ref}"


def copies(result: Result) -> list[Path]:
    """Directories in this home that MLflow shows a model's files from."""
    known = read_json(home.outbox_dir() / "models.json", {}) if result.kind == "model" else {}
    ids = {state["models"][result.digest] for state in known.values() if result.digest in state.get("models", {})}
    return [path for one in sorted(ids) for path in home.home().glob(f"mlartifacts/*/models/{one}/artifacts")]


def sizes(results: list[Result]) -> tuple[dict[str, int], int, int]:
    """(path -> bytes, bytes of all whose last names go with these, MLflow's with a model's, and bytes that stay): a
    file that another result links stays.
    """
    found, links = {}, {}
    for result in results:
        if store.is_url(result.path):
            import fsspec

            fs, root = fsspec.core.url_to_fs(result.path)
            found[result.path] = fs.du(root)
            links[result.path] = [1, 1, found[result.path]]
            continue
        found[result.path] = work.size_of(Path(result.path))
        for folder in (Path(result.path), *copies(result)):
            for file in folder.rglob("*"):
                if file.is_file():
                    stat = file.lstat()
                    links.setdefault((stat.st_dev, stat.st_ino), [0, stat.st_nlink, stat.st_size])[0] += 1
    freed = sum(size for seen, names, size in links.values() if seen >= names)
    return found, freed, sum(size for seen, names, size in links.values() if seen < names)


def cannot_be_made_again(result: Result, shelf: Shelf) -> list[str]:
    """The files and directories from outside that a result comes from and that are gone."""
    gone, seen, open_ = [], set(), [result.digest]
    while open_:
        digest = open_.pop()
        makers = [] if digest in seen else shelf.makers.get(digest, [])[:1]
        seen.add(digest)
        for given in (given for record in makers for given in record["inputs"].values()):
            if given["digest"] in shelf.makers:
                open_.append(given["digest"])
            elif given["ref"] == given["path"] and not store.is_url(given["path"]) and not Path(given["path"]).exists():
                gone.append(given["path"])
    return sorted(set(gone))


# ---------------------------------------------------------------------------------------------------------------- remove


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Held while files go, and while an alias is given to what must not."""
    with open(home.subdir("removed") / ".lock", "a") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def remove(result: Result, unalias: bool = False) -> None:
    """Remove the files of a result. Raises StoreError where a stage has begun to use it, or it has been given
    an alias, meanwhile."""
    with alone():
        if (
            why := busy().get(result.digest) or (_given_by_others(result) if unalias else _in_office(result))
        ) is not None:
            raise store.StoreError(f"{result.ref}: {why}")
        for name, version, aliases in registry.names_of(result.digest) if result.kind == "model" and unalias else ():
            for alias in aliases:
                registry.set_alias(name, alias, None, reason=f"version {version} was removed", user=records.user())
        mark = {"ref": result.ref, "path": result.path, "time": time.time(), "user": records.user()}
        atomic_write_json(store.mark_of(result.kind, result.name, result.digest), mark)
        if store.is_url(result.path):
            _unload(result.path)
            return
        for path in (*copies(result), Path(result.path)):
            going = path.parent / f".removed-{path.name[:12]}-{uuid.uuid4().hex[:8]}"
            with contextlib.suppress(FileNotFoundError):
                os.rename(path, going)
                fsync_dir(path.parent)
                shutil.rmtree(going)


def _unload(url: str) -> None:
    """Remove a dataset at a URL, the manifest first, so that nobody takes what is left for one."""
    import fsspec

    fs, root = fsspec.core.url_to_fs(url)
    if fs.exists(f"{root}/manifest.json"):
        fs.rm_file(f"{root}/manifest.json")
    if fs.exists(root):
        fs.rm(root, recursive=True)
    fs.invalidate_cache()


def finish() -> int:
    """Delete what removals that were killed have left, and the marks of what is there; how many results were left."""
    left = [path for pattern in LEFT for path in home.home().glob(pattern)]
    if not left and not any((home.home() / "removed").glob("*.json")):
        return 0  # also where the state directory may only be read
    with alone():
        left = [path for pattern in LEFT for path in home.home().glob(pattern)]
        for path in left:
            shutil.rmtree(path)
        count = len(left)
        for file in (home.home() / "removed").glob("*.json"):
            path = (read_json(file, None) or {}).get("path", "")
            name, _, digest = file.stem.rpartition("@")
            if store.removed("dataset" if name else "model", name, digest) is None:
                file.unlink(missing_ok=True)
            elif store.is_url(path) and digest in store.dataset_versions(name):
                _unload(path)
                count += 1
    return count
