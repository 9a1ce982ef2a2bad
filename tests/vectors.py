"""Runs catalogue vector files against this project's own functions.

    python -m tests.vectors FILE...

A vectors file is JSON: {name: {"method", "inputs", "params", "expected", "tolerance", "note"}}. An adapter reads a
vector's inputs and params, calls the project and returns the quantities it computed by their expected names; it never
sees the expected values. Adapters live in tests/vector_adapters/*.py:

* ADAPTERS = {vector name: adapter};
* METHOD_ADAPTERS = {method: [(set of input keys, adapter), ...]} as the fallback for files whose names are new: the
  entries of the vector's method are tried, those whose keys fit its inputs best first. Adapters of named vectors of
  the same method serve as further fallbacks by the input keys those vectors have in tests/vectors_data.

Comparison: |got - expected| <= tolerance * max(1, |expected|), recursively; strings "NaN", "Infinity", "-Infinity"
(any spelling) are floats, null is None, extra returned keys are ignored. Keys starting with `wrong_` or ending in
`_WRONG` or named `must_not_equal...` are results of known mistakes: nothing the adapter returns under the right name
may equal them. Vectors that need a data file which is not there are skipped and printed, not counted as failures.

Output: one line per failing vector, last line `N passed, M failed, K unmapped`. Exit code 1 on failures, 2 if a file
cannot be read.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import pkgutil
import sys
from bisect import bisect_left
from collections.abc import Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path

DATA = Path(__file__).parent / "vectors_data"
ROOT = Path(__file__).resolve().parents[1]
PROJECT = ("stages", "tasks", "flows", "storage")
#: Of tests/production.py: what they return is what the project left in the object that it was given.
READ_BACK = tuple(f"tests.production:{name}" for name in ("Weights.numbers", "averaged", "logged", "targets_of"))
SPECIAL = {"nan": math.nan, "inf": math.inf, "infinity": math.inf, "-inf": -math.inf, "-infinity": -math.inf}


class Skip(Exception):
    """Raised by an adapter whose data file is absent; the text says which."""


def load_adapters():
    """(adapters by vector name, [(method, input keys, adapter)]) of every module in tests.vector_adapters.

    A module that cannot be imported (it is being worked on, or lacks a dependency) is reported and left out.
    """
    import tests.vector_adapters as package

    named, by_method = {}, []
    for info in sorted(pkgutil.iter_modules(package.__path__), key=lambda i: i.name):
        try:
            module = importlib.import_module(f"{package.__name__}.{info.name}")
        except Exception as error:  # a broken adapter file must not hide the others' results
            print(f"adapters {info.name} not loaded: {type(error).__name__}: {error}")
            continue
        own = getattr(module, "ADAPTERS", {})
        if twice := sorted(named.keys() & own.keys()):
            raise ValueError(
                f"{module.__name__}: another module has adapters for {', '.join(twice)}; leave one of the two"
            )
        named.update(own)
        for method, entries in getattr(module, "METHOD_ADAPTERS", {}).items():
            entries = entries.items() if isinstance(entries, Mapping) else entries
            by_method += [(method, frozenset(keys), adapter) for keys, adapter in entries]
    return named, by_method


def known_shapes(named):
    """Fallback entries from the vectors this project ships: (method, input keys) -> the adapter of that vector."""
    entries = []
    for path in sorted(DATA.glob("*.json")):
        for name, vector in read_vectors(path).items():
            if name in named:
                entries.append((vector["method"], frozenset(vector["inputs"]), named[name]))
    return entries


def read_vectors(path) -> dict:
    """{name: vector}; accepts a list of vectors with a "name" as well."""
    data = json.loads(Path(path).read_text(encoding="utf-8"))
    data = data.get("vectors", data) if isinstance(data, dict) else data
    return {v["name"]: v for v in data} if isinstance(data, list) else data


def decode(value):
    """Special float strings of inputs and expectations become floats, at any depth."""
    if isinstance(value, str):
        return SPECIAL.get(value.lower(), value)
    if isinstance(value, list):
        return [decode(v) for v in value]
    if isinstance(value, dict):
        return {k: decode(v) for k, v in value.items()}
    return value


def plain(value):
    """Tensors, arrays and numpy scalars as Python lists and numbers."""
    if hasattr(value, "detach"):
        value = value.detach().cpu().numpy()
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    return value


def difference(got, expected, tolerance: float, where: str = "") -> str | None:
    """None when equal within the tolerance, else where and how they differ."""
    if isinstance(expected, dict):
        if not isinstance(got, dict):
            return f"{where}: got {short(got)}, expected an object"
        for key, value in expected.items():
            if key == "note" and isinstance(value, str):
                continue
            if key not in got:
                return f"{where}{'.' if where else ''}{key}: not computed"
            found = difference(got[key], value, tolerance, f"{where}{'.' if where else ''}{key}")
            if found:
                return found
        return None
    if isinstance(expected, list):
        if not isinstance(got, list) or len(got) != len(expected):
            return f"{where}: got {short(got)}, expected {short(expected)}"
        for i, (g, e) in enumerate(zip(got, expected)):
            found = difference(g, e, tolerance, f"{where}[{i}]")
            if found:
                return found
        return None
    if isinstance(expected, (int, float)) and isinstance(got, (int, float)):
        g, e = float(got), float(expected)
        if math.isnan(e) or math.isnan(g):
            same = math.isnan(e) and math.isnan(g)
        elif math.isinf(e) or math.isinf(g):
            same = e == g
        else:
            same = abs(g - e) <= tolerance * max(1.0, abs(e))
        return None if same else f"{where}: got {got!r}, expected {expected!r}"
    return None if got == expected else f"{where}: got {short(got)}, expected {short(expected)}"


def short(value, limit: int = 120) -> str:
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def is_trap(key: str) -> bool:
    """Is this expected key the result of a known mistake?"""
    return key.startswith("wrong_") or key.endswith("_WRONG") or key.startswith("must_not_equal")


def check(expected: dict, got: dict, tolerance: float) -> str | None:
    """First difference between what was computed and what the vector expects; traps must not be met."""
    right = {k: v for k, v in expected.items() if not is_trap(k)}
    found = difference(got, right, tolerance)
    if found:
        return found
    for key, bad in expected.items():
        if not is_trap(key):
            continue
        same = key.removeprefix("wrong_").removesuffix("_WRONG")
        # the trap is compared with the value of the same name, else with everything of its shape that was computed
        candidates = (
            {same: got[same]} if same in got else {k: v for k, v in got.items() if k in right and not is_trap(k)}
        )
        compared = 0
        for name, value in candidates.items():
            value = value[0] if key == "must_not_equal_first" and isinstance(value, list) else value
            if name in right and difference(right[name], bad, tolerance) is None:
                continue  # the vector itself gives this number a right name as well
            if difference(value, bad, tolerance) is None:
                return f"{name} equals the known mistake {key} = {short(bad)}"
            compared += shape(value) == shape(bad)
        if not compared:
            return f"nothing was computed that could be the known mistake {key} = {short(bad)}"
    return None


def shape(value):
    """Of nested lists, () of a number."""
    return (len(value), *(shape(value[0]) if value else ())) if isinstance(value, list) else ()


def candidates(name, vector, named, by_method):
    """[(adapter, sure)] to try, best first. `sure`: by name, or of the method with all its input keys present."""
    if name in named:
        return [(named[name], True)]
    keys = set(vector.get("inputs", {}))
    ranked = sorted(
        (
            (not wanted <= keys, len(wanted ^ keys), i)
            for i, (method, wanted, _) in enumerate(by_method)
            if method == vector.get("method") and (wanted & keys or not wanted)
        )
    )
    out = []
    for loose, _, i in ranked:
        if all(by_method[i][2] is not adapter for adapter, _ in out):
            out.append((by_method[i][2], not loose))
    return out


def called(code) -> str | None:
    """ "module:qualified name" of a function of the project, of tests/oracles.py or of READ_BACK, else None."""
    path = Path(code.co_filename).resolve()
    if not path.is_relative_to(ROOT):
        return None
    parts = path.relative_to(ROOT).with_suffix("").parts
    name = f"{'.'.join(parts)}:{code.co_qualname}"
    return name if parts[0] in PROJECT or parts == ("tests", "oracles") or name in READ_BACK else None


def numbers_in(value, depth: int = 4):
    """The numbers of what a function returned: of tensors and arrays that are no table of a real model's, of
    containers and of the fields of objects.
    """
    if isinstance(value, (bool, str, bytes)) or value is None:
        return
    if isinstance(value, (int, float)):
        yield float(value)
    elif hasattr(value, "numel") and hasattr(value, "layout"):
        if value.numel() <= 4096 and str(value.layout) == "torch.strided" and not (value.is_meta or value.is_complex()):
            yield from value.detach().double().flatten().tolist()
    elif hasattr(value, "dtype") and hasattr(value, "ravel"):
        if value.size <= 4096 and value.dtype.kind in "fiuO":
            yield from (float(one) for one in value.ravel().tolist() if isinstance(one, (int, float)))
    elif depth and isinstance(value, Mapping):
        yield from numbers_in(list(value.values()), depth)
    elif depth and isinstance(value, (list, tuple, set, frozenset)):
        for one in list(value)[:4096]:
            yield from numbers_in(one, depth - 1)
    elif depth and type(value).__module__.partition(".")[0] in PROJECT:
        yield from numbers_in(list(getattr(value, "__dict__", {}).values()), depth - 1)


@contextmanager
def recorded(numbers: set[float] | None = None):
    """The set of functions that run inside the block, as :func:`called` names them; ``numbers`` gets what those of the
    project returned.
    """
    names: dict = {}

    def note(frame, event, argument):
        code = frame.f_code
        if event == "call" and code not in names:
            names[code] = called(code)
        elif event == "return" and numbers is not None:
            name = names.get(code)
            if name and (name in READ_BACK or not name.startswith("tests.")):
                numbers.update(numbers_in(argument))

    reached: set[str] = set()
    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield reached
    finally:
        sys.setprofile(before)
        reached |= {name for name in names.values() if name}


def run_vector(name, vector, named, by_method) -> tuple[str, str]:
    """("passed" | "failed" | "unmapped" | "skipped", detail).

    An adapter that was guessed from the method and computes none of the expected quantities does not map the vector.
    """
    inputs, params = decode(vector.get("inputs", {})), decode(vector.get("params", {}))
    expected, tolerance = decode(vector["expected"]), float(vector.get("tolerance", 0))
    wanted = {k for k in expected if not is_trap(k) and k != "note"}
    first = ""
    for adapter, sure in candidates(name, vector, named, by_method):
        got: dict = {}
        try:
            got = plain(adapter(inputs, params))
            found = check(expected, got, tolerance)
        except Skip as reason:
            return "skipped", str(reason)
        except Exception as error:  # the report names the vector; a crash in one must not stop the rest
            if type(error).__name__ == expected.get("error"):
                return "passed", ""
            found = f"{type(error).__name__}: {error}"
        if found is None:
            return "passed", ""
        if name in named or (sure and wanted <= set(got)):
            first = first or found
    return ("failed", first) if first else ("unmapped", "")


def not_returned(vector, numbers: set[float]) -> list[str]:
    """Paths of the expected numbers of a vector that no function of the project returned, nor their negatives: what an
    adapter computed itself.

    Left aside are gradients, which autograd takes of what was returned, integers, which count or name something, 0, 1
    and 1/2, and what the vector itself gives.
    """
    given = set(numbers_in([decode(vector.get(part, {})) for part in ("inputs", "params")], 9))
    known = sorted({abs(x) for x in numbers | given if math.isfinite(x)})
    tolerance, found = float(vector.get("tolerance", 0)), {}

    def look(value, path):
        if isinstance(value, dict):
            for key, one in value.items():
                if not (is_trap(key) or "grad" in key or key.startswith("d_")):
                    look(one, f"{path}.{key}" if path else key)
        elif isinstance(value, list):
            for one in value:
                look(one, path)
        elif isinstance(value, float) and math.isfinite(value) and abs(value) not in (0.0, 0.5, 1.0):
            room = max(tolerance, 1e-9) * max(1.0, abs(value))
            at = bisect_left(known, abs(value) - room)
            if at == len(known) or known[at] > abs(value) + room:
                found[path] = True

    look(decode(vector["expected"]), "")
    return list(found)


def run_file(path, named, by_method, show_unmapped: bool = False, reached=None, returned=None) -> dict[str, list[str]]:
    """Results of one file: status -> names; prints one line per failing or skipped vector. ``reached`` gets the
    functions that each vector ran, ``returned`` the numbers that they returned where it expects some.
    """
    out: dict[str, list[str]] = {"passed": [], "failed": [], "unmapped": [], "skipped": []}
    for name, vector in read_vectors(path).items():
        wanted = returned is not None and not_returned(vector, set())  # recording takes time
        numbers: set[float] | None = set() if wanted else None
        with nullcontext(set()) if reached is None else recorded(numbers) as found:
            status, detail = run_vector(name, vector, named, by_method)
        if reached is not None:
            reached[name] = found
        if wanted:
            returned[name] = numbers
        out[status].append(name)
        if status in ("failed", "skipped") or (status == "unmapped" and show_unmapped):
            print(f"{status} {name} ({vector.get('method')}){': ' + detail if detail else ''}")
    return out


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.vectors", description="Check vector files against the project's functions."
    )
    parser.add_argument("files", nargs="+", metavar="FILE")
    parser.add_argument("--unmapped", action="store_true", help="also print the vectors that no adapter covers")
    options = parser.parse_args(argv)
    named, by_method = load_adapters()
    by_method = by_method + known_shapes(named)
    total = {"passed": 0, "failed": 0, "unmapped": 0, "skipped": 0}
    for path in options.files:
        try:
            results = run_file(path, named, by_method, options.unmapped)
        except (OSError, ValueError, KeyError, TypeError) as error:
            print(
                f"{path}: not a vectors file ({type(error).__name__}: {error}); it must be JSON of the form {{name:"
                " {method, inputs, params, expected}}"
            )
            return 2
        for status, names in results.items():
            total[status] += len(names)
    if total["skipped"]:
        print(f"{total['skipped']} skipped")
    print(f"{total['passed']} passed, {total['failed']} failed, {total['unmapped']} unmapped")
    return 1 if total["failed"] else 0


if __name__ == "__main__":
    from tests import vectors  # whose Skip the adapters raise: this module's is another class

    sys.exit(vectors.main())
