"""What the sources of this project say, for the identity of stages: a digest of each file's meaning and the modules
that it imports.

Parsing the hundred files behind a stage takes two seconds in every process that starts one, so what was read is kept
beside the compiled files (``stages/__pycache__/sources.*.json``), each entry with the digest of the very source that it
was read from.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib.util
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from stages.running import syntax
from storage.files import atomic_write_text, read_json, sha256_bytes, sha256_text

MODULE_STRING = re.compile(r"^((?:stages|storage)(?:\.\w+)+)(?::\w+)?$")


class Package(NamedTuple):
    """folder: in which a package or module lies. library: installed there by a package manager, not worked on."""

    folder: Path
    library: bool


@functools.cache
def package(top: str) -> Package | None:
    """Where the sources of a top-level package or module lie; None for what Python brings and what has none. Nothing of it
    is imported."""
    if top in sys.stdlib_module_names:
        return None
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):  # one that hides, or was made by hand
        return None
    if spec is None:
        return None
    places = list(spec.submodule_search_locations or []) or [spec.origin or ""]
    folder = Path(places[0]).resolve().parent
    return Package(folder, bool({"site-packages", "dist-packages"} & {*folder.parts})) if folder.is_dir() else None


class Source(NamedTuple):
    """digest: of the syntax tree without docstrings, so that comments and layout do not count. imports: dotted names
    imported anywhere, function bodies included; submodule candidates of ``from package import x`` are given as both
    ``package`` and ``package.x``. tables: names that whole strings such as ``'stages.losses:dpo_loss'`` give, of
    modules that may be there. computed: the line of an import whose name is computed, if there is one."""

    digest: str
    imports: list[str]
    tables: list[str]
    computed: int | None


def source(name: str, file: Path, root: Path) -> Source:
    """Of the module ``name`` in ``file`` of the project at ``root``."""
    return _source(name, file, file.stat().st_mtime_ns, root)


@functools.lru_cache(maxsize=4096)
def _source(name: str, file: Path, mtime: int, root: Path) -> Source:
    data = file.read_bytes()
    kept, content = _kept(root), sha256_bytes(data)
    if (entry := kept["sources"].get(name)) and entry[0] == content:
        return Source(*entry[1:])
    tree = syntax.parse(data.decode("utf-8"))
    found = Source(_meaning(tree), *imports_in(name, tree, file.name == "__init__.py"))
    kept["sources"][name], kept["new"] = [content, *found], True
    return found


def imports_in(name: str, tree: ast.AST, is_package: bool) -> tuple[list[str], list[str], int | None]:
    """``imports``, ``tables`` and ``computed`` (:class:`Source`) of a syntax tree."""
    tables = {
        match.group(1)
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and (match := MODULE_STRING.match(node.value))
    }
    found, computed = set(), None
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for part in node.body
        for inner in ast.walk(part)
    }
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = name.split(".")
                parts = parts if is_package else parts[:-1]
                parts = parts[: len(parts) - (node.level - 1)]
                base = ".".join([*parts, *([node.module] if node.module else [])])
            found.add(base)
            found.update(f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and _call_name(node) in ("import_module", "__import__"):
            argument = node.args[0] if node.args else None
            if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                found.add(argument.value)
            elif computed is None:
                computed = node.lineno
    return sorted(found), sorted(tables), computed


def drop_stale_bytecode(files: Iterable[Path]) -> None:
    """Remove the compiled code of these sources where it was written before the source was last touched.

    Python takes it for that of any text of the same size and the same second, so a module that is written twice within
    a second, or put back by a tool that keeps times, would run as what it was before, under the key of what it is. The
    time of a file's status (``st_ctime``) cannot be set back, whatever is written.
    """
    for file in files:
        with contextlib.suppress(OSError):  # there is none, or nobody may write there
            compiled = Path(importlib.util.cache_from_source(str(file)))
            if compiled.stat().st_mtime_ns <= file.stat().st_ctime_ns:
                compiled.unlink()


def _call_name(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def _meaning(tree: ast.AST) -> str:
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and node.body:
            first = node.body[0]
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                node.body = node.body[1:] or [ast.Pass()]
    return sha256_text(ast.dump(tree, annotate_fields=False))


# ------------------------------------------------------------------------------------------------------------- what is kept


def _file(root: Path) -> Path:
    return Path(importlib.util.cache_from_source(str(root / "stages" / "sources.py"))).with_suffix(".json")


@functools.lru_cache(maxsize=8)
def _kept(root: Path) -> dict:
    """What was read before, by this very code and Python: {"by", "sources": name -> [content, *Source]}."""
    by = sha256_bytes(Path(__file__).read_bytes() + sys.version.encode())
    found = read_json(_file(root), None)
    return (
        found
        if isinstance(found, dict) and found.get("by") == by and isinstance(found.get("sources"), dict)
        else {"by": by, "sources": {}}
    )


def keep(root: Path) -> None:
    """Write what was read since, where compiled files may be written."""
    import json

    kept = _kept(root)
    if kept.pop("new", False) and not sys.dont_write_bytecode:
        with contextlib.suppress(OSError):
            atomic_write_text(_file(root), json.dumps(kept))
