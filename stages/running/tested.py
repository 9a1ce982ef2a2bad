"""A program and the test that judges it, in two processes: what the test calls is computed where the program runs, and
comes back as plain values.

A program that shares its interpreter with its test can pass without being right: by a result whose ``__eq__`` always
agrees, by replacing what the test uses (``math.isclose``, ``builtins``), by reading the test or the reply's token in
the frames above it. Here none of this is there to be reached (reward.code). The test's process holds a :class:`Remote`
for each name of the program; arguments and results are JSON, so that a number is a number, and a list that the program
changed in place is changed for the test too. An object of the program's own (its classes, generators, functions) stays
where it is and is spoken to from afar; it is equal to no plain value.

Tests that need the program's interpreter (they patch it, read its output, or hand it functions of their own) are run in
it as before: :func:`names_asked` says which. The functions below :func:`names_asked` run in the sandbox's children,
from their source.
"""

from __future__ import annotations

import ast
import builtins

_SHARED = frozenset(
    """
stdout stdin stderr globals locals modules __main__ patch mock Mock inspect seed asyncio importlib setattr eval exec input redirect_stdout capsys gc
""".split()
)


def names_asked(test: str) -> list[str] | None:
    """Names that a test may take from the program it judges, those of builtins last; None where the test has to share
    the program's interpreter.
    """
    try:
        tree = ast.parse(test)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    if _SHARED & _identifiers(tree):
        return None
    loaded = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    own = {
        node.id
        for node in tree.body
        for node in ast.walk(node)
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)
    }
    own |= {
        node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
    }
    own |= {
        (name.asname or name.name).split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for name in node.names
    }
    known = set(dir(builtins))
    classes = {
        name.id
        for node in ast.walk(tree)
        for part in _classes(node)
        for name in ast.walk(part)
        if isinstance(name, ast.Name)
    }
    if classes - known - own or any(isinstance(node, (ast.Global, ast.AsyncFunctionDef)) for node in ast.walk(tree)):
        return None  # a class of the program, where Python wants a class
    return sorted(loaded - known) + sorted(loaded & known)


def _identifiers(tree) -> set[str]:
    """Names that a test uses, of attributes, modules and parameters too; what its comments and texts say is none."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.arg):
            found.add(node.arg)
        elif isinstance(node, ast.alias):
            found.update(node.name.split("."))
        elif isinstance(node, ast.ImportFrom):
            found.update((node.module or "").split("."))
        elif isinstance(node, ast.Constant) and node.value == "__main__":
            found.add(node.value)
    return found


def _classes(node) -> list:
    """What has to be a class: in ``except``, ``class`` and the second argument of ``isinstance``."""
    if isinstance(node, ast.ExceptHandler):
        return [node.type] if node.type is not None else []
    if isinstance(node, ast.ClassDef):
        return node.bases
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in ("isinstance", "issubclass", "assertRaises", "raises")
    ):
        return node.args[1:2] if node.func.id.startswith("is") else node.args[:1]
    return []


# ------------------------------------------------------------------------------------------------ in the children


class Unsendable(Exception):
    """A value of the test's that is no data: a function, an object of its own."""


def packed(value, kept):
    """JSON of a value; what is no data is ``kept(value)``, which gives its number or raises."""
    kind = type(value)
    if value is None or kind is bool or kind is str or kind is float:
        return value
    if isinstance(value, int) and kind is not bool:
        value = int.__add__(value, 0)
        return value if -(2**63) < value < 2**63 else {"i": hex(value)}
    if kind is list:
        return [packed(one, kept) for one in value]
    if isinstance(value, float) and kind.__module__ != "numpy":
        return float.__pos__(value)
    if isinstance(value, str) and kind.__module__ != "numpy":
        return str.__str__(value)
    for base, mark in ((tuple, "t"), (list, "l"), (set, "s"), (frozenset, "z")):
        if isinstance(value, base):
            return {mark: [packed(one, kept) for one in base.__iter__(value)]}
    if isinstance(value, dict):
        return {"d": [[packed(key, kept), packed(one, kept)] for key, one in dict.items(value)]}
    if kind is range:
        return {"r": [value.start, value.stop, value.step]}
    if kind is complex:
        return {"c": [value.real, value.imag]}
    if kind in (bytes, bytearray):
        return {"b": value.hex()}
    if kind.__module__ == "numpy" and hasattr(value, "dtype") and not value.dtype.hasobject:
        return {"n": [packed(value.tolist(), kept), str(value.dtype)]}
    if (kind.__module__, kind.__name__) in (("fractions", "Fraction"), ("decimal", "Decimal")):
        return {"x": [kind.__module__, kind.__name__, str(value)]}
    if kind.__module__ == "datetime" and kind.__name__ in ("datetime", "date", "time"):
        return {"x": ["datetime", kind.__name__, value.isoformat()]}
    if kind.__module__ == "collections" and kind.__name__ == "deque":
        return {"q": [packed(one, kept) for one in value]}
    return {"o": kept(value)}


def unpacked(value, found):
    """The value of :func:`packed`; ``found(number)``: what is no data."""
    if isinstance(value, list):
        return [unpacked(one, found) for one in value]
    if not isinstance(value, dict):
        return value
    ((mark, held),) = value.items()
    if mark in ("t", "l", "s", "z"):
        return {"t": tuple, "l": list, "s": set, "z": frozenset}[mark](unpacked(one, found) for one in held)
    if mark == "d":
        return {unpacked(key, found): unpacked(one, found) for key, one in held}
    if mark == "i":
        return int(held, 16)
    if mark == "r":
        return range(*held)
    if mark == "c":
        return complex(*held)
    if mark == "b":
        return bytes.fromhex(held)
    if mark == "n":
        import numpy

        return numpy.array(unpacked(held[0], found), dtype=held[1])[()]
    if mark == "q":
        import collections

        return collections.deque(unpacked(one, found) for one in held)
    if mark == "x":
        import datetime
        import decimal
        import fractions

        kind = getattr({"datetime": datetime, "decimal": decimal, "fractions": fractions}[held[0]], held[1])
        return kind.fromisoformat(held[2]) if held[0] == "datetime" else kind(held[2])
    return found(held)


class Program:
    """The program's side: runs it, and does with its names and objects what it is asked to."""

    def __init__(self, source):
        self.objects, self.space = [], {"__name__": "__main__"}
        exec(compile(source, "<program>", "exec"), self.space)

    def kept(self, value):
        self.objects.append(value)
        return len(self.objects) - 1

    def names(self, wanted):
        """{name: value} of those that the program defines; builtins that it redefines only where it defines nothing
        else that is wanted.
        """
        import builtins

        own = {name: self.space[name] for name in wanted if name in self.space and name != "__builtins__"}
        first = {name: value for name, value in own.items() if not hasattr(builtins, name)} or own
        return {name: packed(value, self.kept) for name, value in first.items()}

    def answer(self, number, what, args, named):
        """{"value"} or {"raised": [exception, text]}, and in "args" those that were changed in place."""
        import operator

        found = self.objects.__getitem__
        try:
            given, named = (
                [unpacked(one, found) for one in args],
                {name: unpacked(one, found) for name, one in named.items()},
            )
            item = found(number)
            value = (
                item(*given, **named)
                if what == "call"
                else (
                    getattr(item, *given)
                    if what == "attribute"
                    else (
                        setattr(item, *given)
                        if what == "set"
                        else (
                            {"iter": iter, "next": next, "len": len, "str": str, "repr": repr, "bool": bool}.get(what)
                            or getattr(operator, what)
                        )(item, *given)
                    )
                )
            )
            reply = {"value": packed(value, self.kept)}
            if what == "call":
                after = [
                    packed(one, self.kept) if type(one) in (list, dict, set) else before
                    for one, before in zip(given, args)
                ]
                reply["args"] = [[i, one] for i, (one, before) in enumerate(zip(after, args)) if one != before]
            return reply
        except BaseException as error:
            return {"raised": [type(error).__name__, str(error)[:300]]}


class Remote:
    """The test's side of a program's object."""

    __slots__ = ("_number", "_asked")

    def __init__(self, number, asked):
        object.__setattr__(self, "_number", number)
        object.__setattr__(self, "_asked", asked)

    def __call__(self, *args, **named):
        return self._asked(self, "call", *args, **named)

    def __getattr__(self, name):
        return self._asked(self, "attribute", name)

    def __setattr__(self, name, value):
        self._asked(self, "set", name, value)

    def __eq__(self, other):
        # two of the program's own; nothing of it decides what a plain value equals
        return bool(self._asked(self, "eq", other)) if type(other) is Remote else False

    def __ne__(self, other):
        return not self == other

    def __hash__(self):
        return hash(self._number)

    def __iter__(self):
        made = self._asked(self, "iter")
        return made if type(made) is Remote else iter(made)

    def __next__(self):
        return self._asked(self, "next")

    def __len__(self):
        return self._asked(self, "len")

    def __bool__(self):
        return self._asked(self, "bool") is True

    def __str__(self):
        return self._asked(self, "str")

    def __repr__(self):
        return self._asked(self, "repr")

    def __getitem__(self, key):
        return self._asked(self, "getitem", key)

    def __setitem__(self, key, value):
        self._asked(self, "setitem", key, value)

    def __contains__(self, key):
        return self._asked(self, "contains", key) is True


def _between(what):
    def does(self, other):
        return self._asked(self, what, other) if type(other) is Remote else NotImplemented

    return does


for _what in ("add", "sub", "mul", "truediv", "lt", "le", "gt", "ge"):  # of two of the program's own objects
    setattr(Remote, f"__{_what}__", _between(_what))


def judged(test, names, ask):
    """Run a test with a program's names (:meth:`Program.names`); ``ask``: (number, what, args, named) as JSON ->
    :meth:`Program.answer`. Returns True, or raises what the test raises.
    """
    import builtins

    known = {}

    def found(number):
        if number not in known:
            known[number] = Remote(number, asked)
        return known[number]

    def kept(value):
        if type(value) is Remote:
            return value._number
        raise Unsendable(type(value).__name__)

    def asked(remote, what, *args, **named):
        reply = ask(
            {
                "number": remote._number,
                "what": what,
                "args": [packed(one, kept) for one in args],
                "named": {name: packed(one, kept) for name, one in named.items()},
            }
        )
        if "raised" in reply:
            kind = getattr(builtins, reply["raised"][0], Exception)
            kind = kind if isinstance(kind, type) and issubclass(kind, Exception) else RuntimeError
            # it would end a loop over map(f, cases) before the first comparison
            if issubclass(kind, (StopIteration, StopAsyncIteration)) and what != "next":
                raise RuntimeError(": ".join(reply["raised"]))
            try:
                error = kind(reply["raised"][1])
            except TypeError:  # some exceptions want more
                error = RuntimeError(": ".join(reply["raised"]))
            raise error
        for i, after in reply.get("args") or ():
            after = unpacked(after, found)
            if type(args[i]) is list:
                args[i][:] = after
            elif type(args[i]) in (dict, set):
                args[i].clear()
                args[i].update(after)
        return unpacked(reply["value"], found)

    exec(
        compile(test, "<test>", "exec"),
        {"__name__": "__main__", **{name: unpacked(value, found) for name, value in names.items()}},
    )
    return True
