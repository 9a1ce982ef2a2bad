"""Which code decides a verdict: what the functions that grade an answer reach, definition by definition.

:func:`reached` starts at functions (``module:name``) and follows every name that a definition mentions, through imports,
to the definitions of this project behind it. Of each it takes what it does: comments, docstrings, layout, annotations of
functions, the texts of errors and what describes a setting are left out. So an edit of another grader, of a message or
of a refusal leaves a protocol as it is, and one of the extraction of answers does not.

It never enters :data:`OUTSIDE`: what computes a model's numbers (a protocol names the models by what they hold, the
prompt templates by their digest), and what stores, starts and describes.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from stages.running import syntax
from stages.spec import module_file
from storage.files import sha256_text

OUTSIDE = (
    "storage",
    "stages.batching",
    "stages.chat",
    "stages.decoding",
    "stages.evaluation.grader_code",
    "stages.evaluation.protocol",
    "stages.models",
    "stages.reporting",
    "stages.reward_models",
    "stages.running.ranks",
    "stages.settings",
    "stages.spec",
)
DESCRIBING = ("description", "title", "doc", "examples", "json_schema_extra")


def digests(entries: Iterable[str], without: Iterable[str] = ()) -> dict[str, str]:
    """{module: 8 hex digits over the definitions of it that are reached}, without those of ``without``."""
    found: dict[str, dict[str, str]] = {}
    for name, meaning in reached(entries, without).items():
        module, _, definition = name.partition(":")
        found.setdefault(module.removeprefix("stages."), {})[definition] = meaning
    return {
        module: sha256_text("\n".join(f"{name} {meaning}" for name, meaning in sorted(parts.items())))[:8]
        for module, parts in sorted(found.items())
    }


def reached(entries: Iterable[str], without: Iterable[str] = ()) -> dict[str, str]:
    """{``module:name``: its meaning} of what the entries (``module:name``, ``module:Class.method``) reach, themselves
    included. ``without`` is not entered."""
    found: dict[str, str] = {}
    left, queue = set(without), list(entries)
    while queue:
        name = queue.pop()
        if name in found or name in left:
            continue
        module, _, definition = name.partition(":")
        statements = _statements(module, definition)
        if not statements:
            raise ValueError(f"{name} is defined nowhere; correct the name of the definition that grades")
        found[name] = "\n".join(_of(module).said(statement).text for statement in statements)
        queue += {one for statement in statements for one in _mentioned(module, statement)}
    return found


@dataclass(frozen=True)
class _Said:
    """A statement as text; what its own imports bind; (name, attribute) of attributes that it reads of names; its names,
    each with whether it is read as a whole."""

    text: str
    imported: dict[str, str]
    attributes: frozenset[tuple[str, str]]
    names: frozenset[tuple[str, bool]]


class _Module:
    """names: top-level name -> statements that bind it. imported: name -> what it stands for, ``module`` or
    ``module:name``. loose: top-level statements that bind nothing, such as entries put into a table."""

    def __init__(self, name: str, file: Path):
        self.names: dict[str, list[ast.stmt]] = {}
        self.loose: list[ast.stmt] = []
        self.name, self._said = name, {}
        tree = _Decisive().visit(syntax.parse(file.read_text(encoding="utf-8")))
        self.imported = _imports(name, tree.body)
        for statement in tree.body:
            bound = _bound(statement)
            for one in bound:
                self.names.setdefault(one, []).append(statement)
            if not bound and not isinstance(statement, (ast.Import, ast.ImportFrom)):
                self.loose.append(statement)
        self.loose = self.loose or [ast.Pass()]

    def said(self, statement: ast.stmt) -> _Said:
        """Of one of its statements, or of a part of one; the same are asked for again and again."""
        if id(statement) not in self._said:
            nodes = [*ast.walk(statement)]
            attributes = [one for one in nodes if isinstance(one, ast.Attribute)]
            parts = {id(one.value) for one in attributes}
            self._said[id(statement)] = _Said(
                _told(statement),
                _imports(self.name, nodes),
                frozenset((one.value.id, one.attr) for one in attributes if isinstance(one.value, ast.Name)),
                frozenset((one.id, id(one) not in parts) for one in nodes if isinstance(one, ast.Name)),
            )
        return self._said[id(statement)]


class _Decisive(ast.NodeTransformer):
    """Takes out of a tree what decides no value."""

    def _body(self, node):
        self.generic_visit(node)
        first = node.body[0] if node.body else None
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
            node.body = node.body[1:] or [ast.Pass()]
        return node

    visit_Module = visit_ClassDef = _body

    def visit_FunctionDef(self, node):
        node.returns = None
        for argument in ast.walk(node.args):
            if isinstance(argument, ast.arg):
                argument.annotation = None
        return self._body(node)

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Raise(self, node):
        self.generic_visit(node)
        return _Wordless().visit(node)

    def visit_Call(self, node):
        self.generic_visit(node)
        if getattr(node.func, "id", "") in ("Field", "InputSpec", "OutputSpec"):
            node.keywords = [one for one in node.keywords if one.arg not in DESCRIBING]
        return node

    def visit_If(self, node):
        self.generic_visit(node)
        test = getattr(node.test, "id", "") or getattr(getattr(node.test, "left", None), "id", "")
        return None if test in ("TYPE_CHECKING", "__name__") else node


class _Wordless(ast.NodeTransformer):
    """Takes the words out of an error; its other arguments, such as an exit status, stay."""

    def visit_Constant(self, node):
        return ast.Constant("") if isinstance(node.value, str) else node

    def visit_JoinedStr(self, node):
        return ast.Constant("")


@functools.lru_cache(maxsize=256)
def _module(name: str, file: Path, mtime: int) -> _Module:
    return _Module(name, file)


def _of(name: str) -> _Module | None:
    file = module_file(name)
    return None if file is None or _outside(name) else _module(name, file, file.stat().st_mtime_ns)


def _outside(name: str) -> bool:
    return any(name == one or name.startswith(one + ".") for one in OUTSIDE)


def _statements(module: str, name: str) -> list[ast.stmt]:
    """The statements that make a definition; those that bind nothing, with a module's first definition."""
    here = _of(module)
    if here is None:
        return []
    if name == "":
        return here.loose
    outer, _, inner = name.partition(".")
    found = here.names.get(outer, [])
    if inner:
        found = [part for one in found for part in getattr(one, "body", []) if inner in _bound(part)]
    return found


def _bound(statement: ast.stmt) -> list[str]:
    """Names that a top-level statement binds, imports aside."""
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return [statement.name]
    targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
    if isinstance(statement, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
        return [
            one.id
            for target in targets
            for one in ast.walk(target)
            if isinstance(getattr(one, "ctx", None), ast.Store) and isinstance(one, ast.Name)
        ] or [one.id for target in targets for one in ast.walk(target) if isinstance(one, ast.Name)]
    return []


def _imports(module: str, statements: Iterable[ast.AST]) -> dict[str, str]:
    """What imports bind: name -> ``module`` or ``module:name``."""
    found = {}
    for statement in statements:
        if isinstance(statement, ast.Import):
            found |= {(one.asname or one.name.split(".")[0]): one.name for one in statement.names}
        elif isinstance(statement, ast.ImportFrom) and statement.module:
            for one in statement.names:
                inner = f"{statement.module}.{one.name}"
                found[one.asname or one.name] = inner if module_file(inner) else f"{statement.module}:{one.name}"
    return found


def _mentioned(module: str, statement: ast.stmt) -> Iterator[str]:
    """``module:name`` of what a statement mentions of this project, and the loose statements of its module."""
    here = _of(module)
    said = here.said(statement)
    known = here.imported | said.imported
    yield f"{module}:"
    for name, attribute in said.attributes:
        of = known.get(name, "")
        if of and ":" not in of and (there := _of(of)) is not None:  # an attribute of a module
            if attribute in there.names:
                yield f"{of}:{attribute}"
            elif attribute in there.imported:
                yield from _followed(there.imported[attribute])
    for name, whole in said.names:
        if name in here.names:
            yield f"{module}:{name}"
        of = known.get(name, "")
        if ":" in of or (of and whole):
            yield from _followed(of)


def _followed(of: str) -> Iterator[str]:
    """What an imported name stands for, through modules that import it themselves; of a whole module all of it."""
    module, _, name = of.partition(":")
    there = _of(module)
    if there is None:
        return
    if not name:
        yield from (f"{module}:{one}" for one in there.names)
    elif name in there.names:
        yield f"{module}:{name}"
    elif name in there.imported:
        yield from _followed(there.imported[name])


def _told(node) -> str:
    """A tree as text that is the same for every version of Python that has its syntax."""
    if isinstance(node, ast.AST):
        fields = (
            (name, getattr(node, name, None)) for name in node._fields if name not in ("ctx", "kind", "type_comment")
        )
        return f"{type(node).__name__}({' '.join(f'{n}={_told(v)}' for n, v in fields if v is not None and v != [])})"
    if isinstance(node, list):
        return f"[{' '.join(map(_told, node))}]"
    return repr(node)
