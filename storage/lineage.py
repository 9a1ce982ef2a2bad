"""Where a model or dataset comes from: the tree of stage records behind a reference.

A node is a dictionary {ref, kind, digest, names, stage, key, label, config, seed, code, git, seconds, finished,
metrics, gone, inputs: {name: node}}; gone: its files are no longer there, while what made it is known. Leaves without
``stage`` are things that were brought from outside. A stage that is reached twice is written out once; later mentions
carry ``again: true``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from storage import records, registry, store


def tree(ref: str) -> dict[str, Any]:
    """Lineage of a reference, path, stage key (or its beginning) or run id. Raises StoreError when nothing is known by
    that name.
    """
    seen: set[str] = set()
    ref = store.pinned(ref)
    try:
        found = store.resolve(ref)
    except store.StoreError as error:
        record = records.match(ref) if ref and all(c in "0123456789abcdef" for c in ref) else None
        if record is not None:
            return _of_record(record, None, seen)
        if makers := records.makers_of_lost(ref):
            return _of_record(makers[0], records.digest_of(ref), seen)
        try:
            run = records.get_run(ref)
        except store.StoreError:
            raise error from None
        nodes = {
            label: _of_record(record, None, seen)
            for label, entry in run.stages().items()
            if (record := records.read(entry["key"]))
        }
        return {"ref": run.run_id, "kind": "run", "recipe": run.data["recipe"], "status": run.status, "inputs": nodes}
    return _of(found.ref, found.kind, found.digest, found.path, seen)


def _of(
    ref: str, kind: str, digest: str, path: str, seen: set[str], below: tuple[dict[str, Any], ...] = ()
) -> dict[str, Any]:
    """``below`` are the records on the way to this input, the one that takes it last: a stage that passes its input on
    unchanged is not its own origin, and what was made after it was taken is not where it came from (where clocks say so
    of all that made it, the newest counts)."""
    above = {record["key"] for record in below}
    makers = [maker for maker in records.makers_of(digest) if maker["key"] not in above]
    if below:
        makers = [maker for maker in makers if maker["finished"] <= below[-1]["finished"]] or makers
    if not makers:
        return {"ref": ref, "kind": kind, "digest": digest, "path": path, "names": _names(kind, digest), "inputs": {}}
    return _of_record(makers[0], digest, seen, below)


def _of_record(
    record: dict[str, Any], digest: str | None, seen: set[str], below: tuple[dict[str, Any], ...] = ()
) -> dict[str, Any]:
    output = next((o for o in record["outputs"].values() if o["digest"] == digest), None) or next(
        iter(record["outputs"].values()), {}
    )
    node = {
        "ref": output.get("ref", record["key"][:16]),
        "kind": output.get("kind", "stage"),
        "digest": output.get("digest", ""),
        "names": _names(output.get("kind", ""), output.get("digest", "")),
        "stage": record["stage"],
        "label": records.step_name(record, (below[0] if below else record).get("flow_run")),
        "key": record["key"],
        "config": record["config"],
        "seed": record["seed"],
        "code": record["code"],
        "git": record.get("git", ""),
        "seconds": record["perf"].get("seconds"),
        "finished": record["finished"],
        "metrics": record["metrics"],
        "outputs": {n: o["ref"] for n, o in record["outputs"].items()},
        "gone": bool(output) and not records.there(output),
        "mlflow": record.get("mlflow", {}),
        "inputs": {},
    }
    if record["key"] in seen:
        return {
            **{k: node[k] for k in ("ref", "kind", "digest", "names", "stage", "label", "key", "gone")},
            "again": True,
            "inputs": {},
        }
    seen.add(record["key"])
    for name, given in record["inputs"].items():
        node["inputs"][name] = _of(given["ref"], given["kind"], given["digest"], given["path"], seen, (*below, record))
    return node


def _names(kind: str, digest: str) -> list[str]:
    if kind != "model":
        return []
    return [
        f"model:{name}/{version}" + (f" ({'; '.join(said)})" if said else "")
        for name, version, aliases in registry.names_of(digest)
        for said in [[*([", ".join(aliases)] if aliases else []), *registry.moved_by_hand(name, version)]]
    ]


def flat(config: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted name, value) of every setting of a record."""
    for key, value in config.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def lines(node: dict[str, Any], name: str = "", indent: str = "", last: bool = True, top: bool = True) -> list[str]:
    """The tree as text, one line per node, for a terminal."""
    what = node["ref"] if len(node["ref"]) < 90 else node["ref"][:87] + "..."
    made = (
        f"  <- {node['stage']}"
        + (f" as {node['label']}" if node.get("label") not in (None, "", node.get("stage")) else "")
        + f" [{node['key'][:12]}]"
        if node.get("stage")
        else ""
    )
    extra = f"  = {', '.join(node['names'])}" if node.get("names") else ""
    again = "  (see above)" if node.get("again") else ""
    outside = "  (from outside)" if not node.get("stage") and node.get("kind") != "run" else ""
    branch = "" if top else indent + ("└─ " if last else "├─ ")
    gone = "  (its files are gone)" if node.get("gone") else ""
    found = [f"{branch}{name + ': ' if name else ''}{what}{extra}{made}{outside}{gone}{again}"]
    children = list(node.get("inputs", {}).items())
    for position, (child_name, child) in enumerate(children):
        found += lines(
            child, child_name, "" if top else indent + ("   " if last else "│  "), position == len(children) - 1, False
        )
    return found
