"""What `export` does: a model or dataset out of the store, into a directory and to the Hub."""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path
from typing import Any

from stages.spec import ConfigError
from storage import home, store
from storage.files import atomic_write_text

#: What transformers notes in a saved tokenizer_config.json of where its maker had loaded it from, which is nothing that
#: a reader of the exported model should take for a setting.
HOW_LOADED = ("is_local", "local_files_only")


def export(
    ref: str,
    directory: Path | None,
    adapter: bool = False,
    base: str | None = None,
    push: str | None = None,
    private: bool = False,
) -> dict[str, Any]:
    """Copy a model's files, or a dataset's rows as Parquet by split, to a new directory, with a card where it brings
    none, and to the Hub.

    Args:
        directory: None: only to the Hub.
        adapter: its LoRA adapter alone, as peft loads one, with the tokenizer. base: path or hub id of the model that
            it belongs on, for its config.
        push: repository OWNER/NAME; private: made for its owner only.
    """
    import tempfile

    from storage import hub

    kind = (
        "dataset"
        if ref.startswith("dataset:") or not ref.startswith("model:") and store.is_dataset_dir(ref)
        else "model"
    )
    found = store.resolve(ref, kind)
    if directory is None and push is None:
        raise ConfigError(f"where to? write posttrain export {ref} DIR, or --push OWNER/NAME, or both")
    if private and push is None:
        raise ConfigError("--private is about a repository; write --push OWNER/NAME too, or leave it out")
    if directory is not None and directory.exists() and not directory.is_dir():
        raise ConfigError(f"{directory} is a file; name a new directory")
    if directory is not None and directory.exists() and any(directory.iterdir()):
        raise ConfigError(f"{directory} is not empty; name a new directory")
    if kind == "dataset" and (adapter or base):
        raise ConfigError(f"--adapter and --base are for models, and {ref} is a dataset; leave them out")
    if base and not adapter:
        raise ConfigError(
            f"--base {base} is the model that an adapter belongs on; write --adapter too, or leave it out"
        )
    if adapter and not Path(found.path, "adapter").is_dir():
        raise ConfigError(
            f"{ref} has no adapter beside its weights: it was not trained with lora_rank; leave --adapter out"
        )
    if push:
        hub.repository(push, kind, private)
    with contextlib.ExitStack() as stack:
        target = directory or Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="export-", dir=home.home())), "files"
        )
        with home.outside(target):
            _write_out(found, target, adapter, base, linked=directory is None)
        value = {
            "ref": found.ref,
            "digest": found.digest,
            "directory": str(directory.resolve()) if directory else None,
            "files": sum(1 for path in target.rglob("*") if path.is_file()),
        }
        if push:
            value |= {"repository": push, "url": hub.push(target, push, kind, f"{found.ref} (digest {found.digest})")}
    return value


def _write_out(found, directory: Path, adapter: bool, base: str | None, linked: bool) -> None:
    """The files of :func:`export`; ``linked``: those of a whole model are no copies, since they are only read."""
    from storage.cards import dataset_card, model_card
    from storage.datasets import open_dataset
    from storage.files import link_tree

    if found.kind == "dataset":
        open_dataset(found.path).export(directory)
    elif linked and not adapter:
        link_tree(Path(found.path), directory)
    elif not adapter:
        shutil.copytree(found.path, directory, dirs_exist_ok=True)
    else:
        shutil.copytree(Path(found.path, "adapter"), directory, dirs_exist_ok=True)
        for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"):
            if Path(found.path, name).is_file():
                shutil.copy2(Path(found.path, name), directory / name)
        if base:
            settings = json.loads((directory / "adapter_config.json").read_text())
            atomic_write_text(
                directory / "adapter_config.json",
                json.dumps({**settings, "base_model_name_or_path": base}, sort_keys=True, indent=1) + "\n",
            )
    for file in directory.rglob("tokenizer_config.json"):
        settings = json.loads(file.read_text(encoding="utf-8"))
        if settings.keys() & set(HOW_LOADED):  # another file takes its place: it may be a link into the store
            left = {name: value for name, value in settings.items() if name not in HOW_LOADED}
            atomic_write_text(file, json.dumps(left, indent=2, sort_keys=True, ensure_ascii=False) + "\n")
    if not (directory / "README.md").exists():
        atomic_write_text(
            directory / "README.md", dataset_card(found.ref) if found.kind == "dataset" else model_card(found.ref)
        )
