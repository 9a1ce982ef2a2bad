"""tests/methods.yaml points at functions and tests that exist."""
import ast
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]


def functions(path: Path) -> set[str]:
    """Top-level names defined or assigned in a module, read without importing it."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names = {n.name for n in tree.body if isinstance(n, (ast.FunctionDef, ast.ClassDef))}
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        names |= {t.id for t in targets if isinstance(t, ast.Name)}
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{m.name}" for m in node.body if isinstance(m, ast.FunctionDef)}
    return names


def test_every_entry_exists():
    table = yaml.safe_load((ROOT / "tests" / "methods.yaml").read_text(encoding="utf-8"))
    wrong = []
    for method, row in table.items():
        for where in row["where"]:
            module, _, name = where.partition(":")
            path = ROOT / (module.replace(".", "/") + ".py")
            if not path.exists() or name not in functions(path):
                wrong.append(f"{method}: {where}")
        for test in row["tests"]:
            if test == "vectors":
                continue
            path, _, name = test.partition("::")
            if not (ROOT / path).exists() or (name and name.replace("::", ".") not in functions(ROOT / path)):
                wrong.append(f"{method}: {test}")
    assert wrong == []
