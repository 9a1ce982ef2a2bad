"""The content-addressed store and the references into it.

    dataset:NAME@DIGEST  dataset:NAME@latest        HOME/datasets/NAME/DIGEST/
    model:NAME@ALIAS  model:NAME/VERSION  model:m-DIGEST12      HOME/models/DIGEST/

Everything else that may be given as an input is taken as it is and hashed by content: dataset directories, model
directories, files, directories of raw files, and Hugging Face ids (``org/name`` or ``org/name@revision``), which are
pinned to a commit and fetched first. Digests may be shortened to 8 or more digits where they stay unique.

``POSTTRAIN_DATASETS`` (an fsspec URL such as ``s3://bucket/prefix``) moves the published datasets; default
``HOME/datasets``.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import os
import re
import shlex
import shutil
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from storage import home, registry
from storage.files import (
    atomic_write_json,
    fsync_dir,
    fsync_tree,
    link_tree,
    read_json,
    sha256_file,
    sha256_text,
    stat_signature,
    tree_digest,
)

HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?(@[\w./-]+)?$")
UNUSED_WEIGHTS = [
    "*.onnx",
    "*.h5",
    "*.msgpack",
    "*.gguf",
    "*.ot",
    "*.tflite",
    "*.mlmodel",
    "onnx/*",
    "original/*",
    "openvino/*",
]


class StoreError(LookupError):
    """A reference or path that cannot be resolved; the text says what to write instead."""


class OnlyAdapter(StoreError):
    """A directory that peft or TRL wrote an adapter alone to: ``path``, ``ref`` (itself, or the hub's id with the
    commit), ``base`` (the model it belongs on, as it says itself; "" where it does not). Stages put it into that first
    (``tasks.run.prepare``)."""

    def __init__(self, given: str, path: str, ref: str, base: str):
        self.path, self.ref, self.base = path, ref, base
        super().__init__(
            f"{given} is an adapter for {base or 'another model'} and no whole model; put it into that first, and give"
            f" what comes out: posttrain stage merge --set method=adapter --input {shlex.quote(f'adapter={ref}')} --input"
            f" {shlex.quote(f'base={base}') if base else 'base=MODEL'}"
        )


@dataclass(frozen=True)
class ResolvedInput:
    """kind ``dataset`` | ``model`` | ``file``; path local or URL; digest of the content; ref as a user would write it;
    manifest of a dataset (else empty)."""

    kind: str
    path: str
    ref: str
    digest: str
    manifest: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """JSON form without the manifest."""
        return {"kind": self.kind, "path": self.path, "ref": self.ref, "digest": self.digest}


# ------------------------------------------------------------------------------------------------------------ where


def datasets_root() -> str:
    """Directory or fsspec URL under which datasets are published."""
    return os.environ.get("POSTTRAIN_DATASETS") or str(home.datasets_dir())


def is_url(path: str) -> bool:
    """Whether a path is an fsspec URL rather than a local path."""
    return "://" in path and not path.startswith("file://")


def dataset_path(name: str, digest: str) -> str:
    """Where a published dataset lies."""
    return f"{datasets_root().rstrip('/')}/{name}/{digest}"


def model_path(digest: str) -> Path:
    """Where a published model lies."""
    return home.models_dir() / digest


def mark_of(kind: str, name: str, digest: str) -> Path:
    """File that says that a model or dataset was removed on purpose (`posttrain rm`)."""
    return home.home() / "removed" / f"{name + '@' if kind == 'dataset' else ''}{digest}.json"


def removed(kind: str, name: str, digest: str) -> dict[str, Any] | None:
    """{ref, path, time, user} of the removal of a model or dataset; None where it is there or was not removed."""
    path = dataset_path(name, digest) if kind == "dataset" else str(model_path(digest))
    if is_dataset_dir(path) if is_url(path) else Path(path).is_dir():
        return None
    return read_json(mark_of(kind, name, digest), None)


def _refuse_removed(text: str, kind: str, name: str, prefix: str, known: list[str]) -> None:
    """Raise StoreError where ``prefix`` is the beginning of the digest of what was removed, and of nothing else."""
    if not prefix or any(digest.startswith(prefix) for digest in known):
        return
    for file in (home.home() / "removed").glob("*.json"):
        was, _, digest = file.stem.rpartition("@")
        if was == (name if kind == "dataset" else "") and digest.startswith(prefix):
            if (mark := removed(kind, name, digest)) is not None:
                when = time.strftime("%Y-%m-%d", time.localtime(mark["time"]))
                others = f"; still there: {', '.join(f'dataset:{name}@{d[:12]}' for d in known[:5])}" if name else ""
                raise StoreError(
                    f"the files of {text} were removed with `posttrain rm` on {when}; `posttrain rerun {mark['ref']}`"
                    f" makes them again{others if known else ''}"
                )


def is_ref(text: str) -> bool:
    """Whether a text is a store reference rather than a path."""
    return text.startswith(("dataset:", "model:"))


def is_dataset_dir(path: str) -> bool:
    """Whether a local directory or URL holds a finished dataset."""
    from storage.datasets import is_dataset

    if not is_url(path) and not (Path(path) / "manifest.json").is_file():
        return False
    return is_dataset(path)


def is_model_dir(path: str) -> bool:
    """Whether a local directory holds a Hugging Face model (or adapter)."""
    return any((Path(path) / name).is_file() for name in ("config.json", "adapter_config.json"))


def wrong_use(path: str, use: str) -> str | None:
    """Why a model directory is not of ``use`` (``words``, ``scores``), as its config says; None where it does not say
    so.
    """
    made = (read_json(Path(path) / "config.json", None) or {}).get("architectures") or [""]
    if use == "words" and made[0].endswith(("ForSequenceClassification", "ForTokenClassification")):
        return f"is a {made[0]}, whose head gives scores and no words; give a language model"
    if use == "scores" and made[0].endswith("ForCausalLM") and not (Path(path) / "reward_calibration.json").exists():
        return f"is a {made[0]} and no reward model; give one, for example of stage reward_model"
    return None


def refuse_adapter(given: str, path: Path, ref: str) -> None:
    """Raise OnlyAdapter where a directory, which is written ``ref``, holds an adapter and no whole model."""
    if (path / "adapter_config.json").is_file() and not (path / "config.json").is_file():
        told = read_json(path / "adapter_config.json", None) or {}
        base, revision = str(told.get("base_model_name_or_path") or ""), told.get("revision")
        if revision and "@" not in base and HUB_ID.match(base) and not Path(base).exists():  # as peft loads it
            base += f"@{revision}"
        raise OnlyAdapter(given, str(path), ref, base)


def damaged_model(path: Path) -> str | None:
    """What a model directory lacks at first sight, before a stage starts on it: a readable config.json, the shards that
    its index names, the end of a safetensors file (None: nothing)."""
    for name in ("config.json", "adapter_config.json", "model.safetensors.index.json"):
        if (path / name).is_file() and not isinstance(read_json(path / name, None), dict):
            return f"{name} is not readable JSON"
    shards = sorted(set((read_json(path / "model.safetensors.index.json", {}).get("weight_map") or {}).values()))
    missing = [name for name in shards if not (path / name).is_file()]
    if missing:
        return (
            f"model.safetensors.index.json names {', '.join(missing[:3])}, which {'are' if len(missing) > 1 else 'is'}"
            f" not there ({len(missing)} of {len(shards)} files)"
        )
    for file in sorted(path.glob("*.safetensors")):
        with open(file, "rb") as handle:
            head = handle.read(8)
            length = int.from_bytes(head, "little")
            try:
                header = json.loads(handle.read(length)) if len(head) == 8 and length < file.stat().st_size else None
            except ValueError:
                header = None
        if not isinstance(header, dict):
            return f"{file.name} does not start as a safetensors file does (a Git LFS pointer, or cut off?)"
        full = (
            8
            + length
            + max((entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"), default=0)
        )
        if file.stat().st_size != full:
            return f"{file.name} has {file.stat().st_size:,} of {full:,} bytes"
    return None


# ---------------------------------------------------------------------------------------------------------- resolve


def resolve(text: str, kind: str | None = None, hub: str = "") -> ResolvedInput:
    """Resolve a reference, path, URL, hub id, an output of a stage as ``KEY:NAME`` or, for a ``kind``, the key (6 digits
    at least) of a stage that made one such thing. ``kind`` is what the caller needs; it decides what a bare directory or
    id is. ``hub``: ``model`` where the files of an id are those of a model's repository and not of a dataset's.

    Raises StoreError. A raw data file for a dataset input comes back with kind ``file``: it has to be ingested.
    """
    text = str(text).strip()
    if not text:
        raise StoreError("an empty reference was given; write dataset:NAME@latest, model:NAME@ALIAS or a path")
    text = pinned(text)
    if text.startswith("dataset:"):
        found = _dataset_ref(text)
    elif text.startswith("model:"):
        found = _model_ref(text)
    else:
        found = _path(text, kind, hub)
    if (
        kind
        and found.kind != kind
        and not (kind == "dataset" and found.kind == "file")
        and not (kind == "file" and found.kind == "dataset")
    ):
        raise StoreError(f"{text} is a {found.kind}, but a {kind} is needed here; {_example(kind)}")
    return found


def _example(kind: str) -> str:
    return {
        "dataset": "write dataset:NAME@latest, a dataset directory or a data file",
        "model": (
            "write model:NAME@champion or model:NAME/VERSION for a model of the store (`posttrain ls models`), the path"
            " of a model directory (with config.json), or OWNER/NAME for a model of the Hugging Face hub"
        ),
        "file": "write the path of a file or directory",
    }[kind]


def dataset_names() -> list[str]:
    """Names of published datasets."""
    return sorted(_names_in(datasets_root()))


def dataset_versions(name: str) -> list[str]:
    """Digests published under a name."""
    return sorted(n for n in _names_in(f"{datasets_root().rstrip('/')}/{name}") if re.fullmatch(r"[0-9a-f]{64}", n))


def _latest_file(name: str) -> Path:
    return home.datasets_dir() / name / "latest.json"


def latest_of(name: str) -> str | None:
    """Digest that ``dataset:NAME@latest`` means."""
    pointer = read_json(_latest_file(name), None)
    known = dataset_versions(name)
    if pointer and pointer["digest"] in known:
        return pointer["digest"]
    if pointer and removed("dataset", name, pointer["digest"]):
        return None
    return known[-1] if len(known) == 1 else None


def _names_in(where: str) -> list[str]:
    if is_url(where):
        import fsspec

        fs, root = fsspec.core.url_to_fs(where)
        fs.invalidate_cache()
        return [p.rstrip("/").rsplit("/", 1)[-1] for p in fs.ls(root, detail=False)] if fs.exists(root) else []
    path = Path(where)
    return [p.name for p in path.iterdir() if p.is_dir() and not p.name.startswith(".")] if path.is_dir() else []


DATASET_REF = re.compile(r"dataset:(?P<name>[^@/]+)(?:@(?P<selector>[\w.-]+))?")
STAGE_KEY = re.compile(r"[0-9a-f]{6,64}")  # or its beginning
MODEL_REF = re.compile(
    r"model:(?:m-(?P<digest>[0-9a-f]{8,64})|(?P<name>[^@/]+)(?:@(?P<alias>[\w.-]+)|/(?P<version>\d+))?)"
)


def _dataset_ref(text: str) -> ResolvedInput:
    from storage.datasets import DatasetError, open_dataset

    match = DATASET_REF.fullmatch(text)
    if not match:
        raise StoreError(f"{text!r} is not a dataset reference; write dataset:NAME@latest or dataset:NAME@DIGEST")
    name, selector = match["name"], match["selector"] or "latest"
    known = dataset_versions(name)
    wanted = selector if selector != "latest" else (read_json(_latest_file(name), None) or {}).get("digest", "")
    _refuse_removed(text, "dataset", name, wanted, known)
    if not known:
        names = dataset_names()
        raise StoreError(f"there is no dataset named {name!r}; the names are: {', '.join(names) or 'none yet'}")
    if selector == "latest":
        digest = latest_of(name)
        if digest is None:
            raise StoreError(
                f"which version of {name} is the latest is not recorded; write dataset:{name}@DIGEST with one of"
                f" {', '.join(d[:12] for d in known)}"
            )
    else:
        digest = _only(selector, known, f"dataset {name}", f"dataset:{name}@")
    path = dataset_path(name, digest)
    try:
        manifest = open_dataset(path).manifest
    except DatasetError as error:
        raise StoreError(f"{str(error).partition(';')[0]}; `posttrain rerun {text}` makes it again") from None
    return ResolvedInput("dataset", path, f"dataset:{name}@{digest}", digest, manifest)


def _model_ref(text: str) -> ResolvedInput:
    match = MODEL_REF.fullmatch(text)
    if not match:
        raise StoreError(
            f"{text!r} is not a model reference; write model:NAME@ALIAS, model:NAME/VERSION or model:m-DIGEST"
        )
    if match["digest"]:
        known = sorted(_names_in(str(home.models_dir())))
        _refuse_removed(text, "model", "", match["digest"], known)
        digest = _only(match["digest"], known, "the model store", "model:m-")
    else:
        try:
            digest, _ = registry.digest_of(match["name"], match["alias"] or match["version"] or "latest")
        except registry.RegistryError as error:
            raise StoreError(str(error)) from None
    path = model_path(digest)
    if not path.is_dir():
        _refuse_removed(text, "model", "", digest, [])
        raise StoreError(
            f"the files of {text} ({digest[:12]}) are gone from {home.models_dir()}; `posttrain rerun {text}` makes"
            " them again"
        )
    if (wrong := damaged_model(path)) is not None:
        raise StoreError(
            f"the files of {text} at {path} are damaged: {wrong}; `posttrain rerun {text}` makes them again"
        )
    return ResolvedInput("model", str(path), f"model:m-{digest[:12]}", digest)


def _only(prefix: str, known: list[str], what: str, form: str) -> str:
    matches = [d for d in known if d.startswith(prefix)]
    if len(matches) == 1:
        return matches[0]
    if not matches:
        raise StoreError(
            f"{what} has nothing with digest {prefix}; there is:"
            f" {', '.join(form + d[:12] for d in known[:20]) or 'nothing yet'}"
        )
    raise StoreError(
        f"digest {prefix} is ambiguous in {what}; write more digits: {', '.join(form + d[:16] for d in matches)}"
    )


def _path(text: str, kind: str | None, hub: str = "") -> ResolvedInput:
    if is_url(text):
        if kind in (None, "dataset") and is_dataset_dir(text):
            return _dataset_dir(text)
        raise StoreError(
            f"{text} is not a finished dataset directory (no readable manifest.json there); give a dataset URL, or a"
            " local path"
        )
    path = Path(text.removeprefix("file://")).expanduser()
    own = _in_this_home(path)
    if own is not None and not (kind == "file" and own.startswith("model:")):
        found = resolve(own, kind)
        if kind == "model":
            refuse_adapter(text, Path(found.path), found.path)
        return found
    if path.exists():
        path = path.absolute()
        if path.is_dir() and (kind in (None, "dataset", "file")) and is_dataset_dir(str(path)):
            return _dataset_dir(str(path))
        if path.is_dir() and kind in (None, "model") and is_model_dir(str(path)):
            if (wrong := damaged_model(path)) is not None:
                raise StoreError(f"{path} is no complete model: {wrong}; copy or download it again")
            if kind == "model":
                refuse_adapter(str(path), path, str(path))
            return ResolvedInput("model", str(path), str(path), cached_digest(path))
        if kind == "model":
            raise StoreError(f"{path} is not a model directory (no config.json in it); {_example('model')}")
        if path.is_dir() and not any(path.iterdir()):
            raise StoreError(f"the directory {path} is empty; give a directory with data files, or a file")
        return ResolvedInput("file", str(path), str(path), cached_digest(path))
    if kind and STAGE_KEY.fullmatch(text) and (found := _output_of(text, kind)) is not None:
        return found
    if (
        HUB_ID.match(text)
        and not text.startswith(".")
        and not Path(text).suffix.lower() in (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".txt", ".gz", ".zst")
    ):
        return _hub(text, kind, hub)
    raise StoreError(
        f"{text} does not exist;"
        f" {_example(kind) if kind else 'write a reference (dataset:..., model:...) or an existing path'}"
    )


def at_hand(text: str, kind: str) -> bool:
    """Whether :func:`resolve` finds a text without asking the hub: a reference, an existing path, or a stage's key."""
    from storage import records

    key = text.partition(":")[0]
    made = STAGE_KEY.fullmatch(key) is not None and records.match(key) is not None
    return is_ref(text) or made or Path(text.removeprefix("file://")).expanduser().exists()


def _in_this_home(path: Path) -> str | None:
    """The reference of a model or dataset of this home that is given by its directory, as ``--json`` prints it, or by
    the one that it had before the home was moved; None of any other path. What is recorded then holds in every place.
    """
    path = path.absolute()
    name, digest = path.parent.name, path.name
    if not re.fullmatch(r"[0-9a-f]{64}", digest):
        return None
    if name == home.models_dir().name:
        here, ref = model_path(digest), f"model:m-{digest}"
    elif path.parent.parent.name == home.datasets_dir().name:
        here, ref = Path(dataset_path(name, digest)), f"dataset:{name}@{digest}"
    else:
        return None
    return ref if here.is_dir() and (not path.exists() or path.resolve() == here.resolve()) else None


def pinned(text: str) -> str:
    """``KEY:NAME``, an output of the finished stage whose key begins so, as its reference, whether its files are still
    there or not; any other text as it is. Raises StoreError where the stage has no such output.
    """
    from storage import records

    key, _, name = text.partition(":")
    record = records.match(key) if name and STAGE_KEY.fullmatch(key) else None
    if record is None:
        return text
    if name not in record["outputs"]:
        raise StoreError(_which_output(record, f"no output {name}"))
    return record["outputs"][name]["ref"]


def _which_output(record: dict[str, Any], made: str) -> str:
    key = record["key"][:12]
    outputs = ", ".join(f"{one['ref']} ({name})" for name, one in record["outputs"].items())
    return (
        f"stage {record['stage']} with key {key} made {made}; write which of its outputs is meant, by its reference or as"
        f" {key}:NAME: {outputs or 'none'}"
    )


def _output_of(key: str, kind: str) -> ResolvedInput | None:
    """The output that can be given as ``kind`` of the finished stage whose key begins so; where several can, the one
    that is not of many (``epoch.2``). None where there is no such stage, StoreError where it has several such outputs or
    none.
    """
    from storage import records

    record = records.match(key)
    if record is None:
        return None
    kind = "model" if kind == "model" else "dataset"
    found = {
        name: one["ref"]
        for name, one in record["outputs"].items()
        if one["kind"] == kind and (one.get("manifest") or {}).get("kind") != "quarantine/1"  # which no stage reads
    }
    refs = [ref for name, ref in found.items() if "." not in name] or list(found.values())
    if len(refs) != 1:
        raise StoreError(_which_output(record, f"{'several' if refs else 'no'} {kind}s"))
    return resolve(refs[0], kind)


def _dataset_dir(path: str) -> ResolvedInput:
    from storage.datasets import DatasetError, open_dataset

    try:
        data = open_dataset(path)
        if is_url(path):
            data.verify()
        else:
            _once(Path(path), "dataset", lambda: (data.verify(), data.digest)[1])
    except DatasetError as error:
        raise StoreError(str(error)) from None
    return ResolvedInput("dataset", path, path, data.digest, data.manifest)


def _known_by(name: str, kind: str | None) -> str:
    """``did you mean model:NAME@latest? `` for what is in this home under that name or one like it, else the empty
    string.
    """
    there = [("model", found) for found in registry.models()] if kind in (None, "model") else []
    there += [("dataset", found) for found in dataset_names()] if kind != "model" else []
    near = difflib.get_close_matches(name, [found for _, found in there], n=3, cutoff=0.5)
    refs = [f"{of}:{found}@latest" for found in dict.fromkeys(near) for of, other in there if other == found]
    return f"did you mean {' or '.join(refs)}? " if refs else ""


def _hub(text: str, kind: str | None, hub: str = "") -> ResolvedInput:
    """Pin a hub id to a commit and fetch it. Raises StoreError when it cannot be pinned."""
    name, _, revision = text.partition("@")
    what = hub or ("model" if kind in (None, "model") else "dataset")
    near = _known_by(name, kind)
    if what == "model" and "/" not in text and not revision and registry.models():  # ids of the hub are OWNER/NAME
        raise StoreError(f"there is no {what if kind else 'model, dataset or run'} {text!r}; {near}{_example('model')}")
    try:
        from huggingface_hub import HfApi, snapshot_download

        if re.fullmatch(r"[0-9a-f]{40}", revision):
            commit = revision
        elif os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes"):
            commit = None
        else:
            commit = HfApi().repo_info(name, repo_type=what, revision=revision or None, timeout=15).sha
        local = snapshot_download(
            name,
            repo_type=what,
            revision=commit or revision or None,
            ignore_patterns=UNUSED_WEIGHTS if what == "model" else None,
            local_files_only=commit is None,
        )
        commit = commit or Path(local).name  # the cache names a snapshot by its commit
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        if what == "model" and "/" not in text:  # a bare word: which kind of name was meant is not known
            raise StoreError(
                f"there is no {what} {text!r}: no path, and nothing that can be fetched from the hub under that name;"
                f" {near}{_example('model')} (the hub's client: {type(error).__name__}: {reason})"
            ) from None
        raise StoreError(
            f"{text} is neither an existing path nor a {what} that can be fetched from the hub; {near}without network,"
            f" give a local {what} directory{' (with config.json)' if what == 'model' else ' or file'}; with it, check"
            f" the id, and HF_TOKEN for gated ones (the hub's client: {type(error).__name__}: {reason})"
        ) from None
    if not re.fullmatch(r"[0-9a-f]{40}", commit):
        raise StoreError(
            f"{text} could not be pinned to a commit; write {name}@COMMIT (40 hexadecimal digits) or give a local"
            " directory"
        )
    if what == "model" and not is_model_dir(local):
        raise StoreError(f"{text} holds no config.json, so it is not a transformers model; {_example('model')}")
    if kind == "model":
        refuse_adapter(text, Path(local), f"{name}@{commit}")
    return ResolvedInput(
        "model" if what == "model" and kind != "file" else "file",
        str(local),
        f"{name}@{commit}",
        cached_digest(Path(local)),
    )


# ---------------------------------------------------------------------------------------------------------- digests


def content_digest(path: Path) -> str:
    """Digest of a file (its bytes) or a directory (names and bytes)."""
    return sha256_file(path) if path.is_file() else tree_digest(path)


def cached_digest(path: Path) -> str:
    """:func:`content_digest`, read again only when names, sizes or times changed (and never trusted for fresh
    files).
    """
    return _once(path, "content", lambda: content_digest(path))


def unchanged(found: ResolvedInput) -> bool:
    """Whether what was given as a path has the content that it was resolved with; what lies in the store, or behind a
    URL, has.
    """
    path = Path(found.path)
    if is_url(found.path) or is_ref(found.ref) or not path.exists():  # one that is gone was read while it was there
        return True
    try:
        return (_dataset_dir(found.path).digest if found.kind == "dataset" else cached_digest(path)) == found.digest
    except (StoreError, OSError):
        return False


def _once(path: Path, what: str, compute: Any) -> str:
    slot = home.cache_dir() / "digests" / f"{sha256_text(what + ':' + str(path))}.json"
    before = stat_signature(path, changes=True)
    known = read_json(slot, None)
    if known and known.get("stat") == before:
        return known["digest"]
    digest = compute()
    newest = max(
        (
            max(p.stat().st_mtime, p.stat().st_ctime)
            for p in ([path] if path.is_file() else path.rglob("*"))
            if p.exists()
        ),
        default=0.0,
    )
    # a younger file could change within its timestamp
    if stat_signature(path, changes=True) == before and time.time() - newest > 2.0:
        # a full disk, or a home that may only be read: it is computed again next time
        with contextlib.suppress(OSError):
            atomic_write_json(slot, {"path": str(path), "stat": before, "digest": digest})
    return digest


# ---------------------------------------------------------------------------------------------------------- publish


def publish_dataset(source: Path, name: str, digest: str | None = None) -> ResolvedInput:
    """Move a finished dataset directory into the store under ``name``; the same digest already there is reused.

    digest: what it is known to have. Then this may be done again after it was interrupted anywhere: where the store has
    it, nothing is read of ``source``, which may be gone or half removed.
    """
    from storage.datasets import open_dataset

    registry.check_name(name)
    if digest is None or not check_output("dataset", dataset_path(name, digest), digest, None)[0]:
        data = open_dataset(source)
        data.verify()
        digest, target = data.digest, dataset_path(name, data.digest)
        if is_url(target):
            mark_of("dataset", name, digest).unlink(missing_ok=True)  # else the doctor would delete it as a rest
            _upload(source, target)
        else:
            _move_in(source, Path(target), lambda path: open_dataset(path).verify())
    shutil.rmtree(source, ignore_errors=True)
    set_latest(name, digest)
    mark_of("dataset", name, digest).unlink(missing_ok=True)
    data = open_dataset(dataset_path(name, digest))
    return ResolvedInput("dataset", data.path, f"dataset:{name}@{digest}", digest, data.manifest)


def set_latest(name: str, digest: str) -> None:
    """Make ``dataset:NAME@latest`` mean this digest."""
    atomic_write_json(_latest_file(name), {"digest": digest, "time": time.time()})


def publish_model(source: Path, digest: str | None = None) -> ResolvedInput:
    """Move a model directory into the store; the same digest already there is reused."""
    digest = digest or tree_digest(source)

    def check(path: Path) -> None:
        if tree_digest(path) != digest:
            raise StoreError(f"{path} was changed after it was published")

    _move_in(source, model_path(digest), check)
    mark_of("model", "", digest).unlink(missing_ok=True)
    return ResolvedInput("model", str(model_path(digest)), f"model:m-{digest[:12]}", digest)


def _move_in(source: Path, target: Path, check: Any) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.exists():
        try:
            check(target)
        except Exception:  # whatever is wrong with the old copy, a good one is in hand
            os.rename(target, target.parent / f".damaged-{target.name[:12]}-{uuid.uuid4().hex[:8]}")
        else:
            shutil.rmtree(source, ignore_errors=True)  # what cannot be removed does not make the copy a bad one
            return
    fsync_tree(source)
    try:
        _place(source, target)
    except OSError:
        if not target.exists():
            raise
        return _move_in(source, target, check)  # somebody else has just published the same
    fsync_dir(target.parent)


def _place(source: Path, target: Path) -> None:
    try:
        os.rename(source, target)
        return
    except OSError:
        if target.exists():
            raise
    tmp = target.parent / f".tmp-{uuid.uuid4().hex[:12]}"  # another file system
    try:
        shutil.copytree(source, tmp)
        fsync_tree(tmp)
        os.rename(tmp, target)
    finally:  # what a full disk cut short
        shutil.rmtree(tmp, ignore_errors=True)
    shutil.rmtree(source, ignore_errors=True)


def _upload(source: Path, url: str) -> None:
    """Copy a dataset directory to a URL, the manifest last, so that a reader never sees an unfinished dataset."""
    import fsspec

    fs, root = fsspec.core.url_to_fs(url)
    fs.makedirs(root, exist_ok=True)
    files = sorted(
        (p for p in source.iterdir() if p.is_file() and not p.name.startswith(".")),
        key=lambda p: (p.name == "manifest.json", p.name),
    )
    for path in files:
        fs.put_file(str(path), f"{root}/{path.name}")


def also_as(path: str, digest: str, name: str) -> ResolvedInput:
    """Make a published dataset known under a second name (hard links where possible, no bytes copied)."""
    from storage.datasets import open_dataset

    target = dataset_path(name, digest)
    if is_url(target):
        mark_of("dataset", name, digest).unlink(missing_ok=True)
        if digest not in dataset_versions(name):
            import fsspec

            fs, root = fsspec.core.url_to_fs(target)
            for part in [p["file"] for p in open_dataset(path).manifest["parts"]] + ["manifest.json"]:
                with fsspec.open(f"{path}/{part}", "rb") as read, fs.open(f"{root}/{part}", "wb") as write:
                    shutil.copyfileobj(read, write)
    elif not Path(target).exists():
        tmp = Path(target).parent / f".tmp-{uuid.uuid4().hex[:12]}"
        try:
            link_tree(Path(path), tmp)
            if not Path(target).exists():
                os.replace(tmp, target)
        except OSError:
            if not Path(target).exists():  # else somebody else has just done the same
                raise
        finally:
            shutil.rmtree(tmp, ignore_errors=True)
    set_latest(name, digest)
    mark_of("dataset", name, digest).unlink(missing_ok=True)
    return ResolvedInput("dataset", target, f"dataset:{name}@{digest}", digest, open_dataset(target).manifest)


def check_output(kind: str, path: str, digest: str, stat: str | None, *, full: bool = False) -> tuple[bool, str | None]:
    """(whether a published output is there and unchanged, its present stat signature). Content is read only when times
    or sizes differ from ``stat``, or with ``full``."""
    from storage.datasets import DatasetError, open_dataset

    if is_url(path):
        try:
            data = open_dataset(path)
            if full:
                data.verify()
            return data.digest == digest, None
        except (DatasetError, OSError):
            return False, None
    local = Path(path)
    if not local.is_dir():
        return False, None
    try:
        now = stat_signature(local)
        if now == stat and not full:
            return True, now
        if kind == "dataset":
            data = open_dataset(local)
            data.verify()
            return data.digest == digest, now
        return tree_digest(local) == digest, now
    except (DatasetError, OSError):
        return False, None
