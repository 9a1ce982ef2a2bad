"""The house stands as drawn: flows -> tasks -> stages -> storage, and nothing else."""

import ast
import os
import re
import subprocess
import sys

import pytest

from flows.recipe import RECIPES
from stages.registry import STAGES
from stages.sources import imports_in
from stages.spec import PROJECT_ROOT, imports_of

LAYERS = ("storage", "stages", "tasks", "flows")  # each may import itself and those before it
FOR_STAGES = {"storage.files", "storage.schema", "storage.datasets", "storage.checkpoints"}
PACKAGES = (
    "running",
    "reporting",
    "measures",
    "verification",
    "models",
    "decoding",
    "acting",
    "reward_models",
    "reward",
    "evaluation",
    "ingestion",
    "direct",
    "policy",
    "rollouts",
    "candidates",
)  # of stages; each may import itself, those before it, and what all of them share (stages/*.py)
FILES = sorted(p for layer in LAYERS for p in (PROJECT_ROOT / layer).rglob("*.py"))


def name_of(path):
    parts = path.relative_to(PROJECT_ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def wanted(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    name = name_of(path)
    if name == "stages.registry":  # the one table of names -> modules
        tree.body = [node for node in tree.body if not isinstance(node, ast.FunctionDef)] + [
            n
            for f in tree.body
            if isinstance(f, ast.FunctionDef)
            for n in ast.walk(f)
            if isinstance(n, (ast.Import, ast.ImportFrom))
        ]
    return {n for n in imports_of(name, *imports_in(name, _without_computed(tree), path.name == "__init__.py")) if n}


def _without_computed(tree):
    class Drop(ast.NodeTransformer):
        def visit_Call(self, node):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__") and not (node.args and isinstance(node.args[0], ast.Constant)):
                return ast.Constant(None)
            return self.generic_visit(node)

    return Drop().visit(tree)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PROJECT_ROOT)))
def test_arrows(path):
    name = name_of(path)
    layer = name.split(".")[0]
    for target in wanted(path):
        top = target.split(".")[0]
        if top in LAYERS:
            assert LAYERS.index(top) <= LAYERS.index(layer), f"{name} imports {target}: {layer} may not know {top}"
        assert top != "tests", f"{name} imports {target}"
        if top == "prefect":
            assert layer in ("tasks", "flows"), f"{name} imports prefect"
        if top == "mlflow":
            assert layer in ("flows", "tasks") or name in (
                "storage.projector",
                "storage.mlflow_client",
                "storage.mlflow_database",
                "storage.mlflow_models",
                "storage.mlflow_run",
                "storage.restored",
            ), f"{name} imports mlflow"
        if layer == "stages" and top == "storage" and target != "storage":
            assert ".".join(target.split(".")[:2]) in FOR_STAGES, (
                f"{name} imports {target}; stages may use {sorted(FOR_STAGES)}"
            )


@pytest.mark.parametrize(
    "path", [p for p in FILES if p.parent.name in PACKAGES], ids=lambda p: str(p.relative_to(PROJECT_ROOT))
)
def test_arrows_between_the_packages_of_stages(path):
    for target in wanted(path):
        package = (*target.split("."), "")[1]
        if target.startswith("stages.") and package in PACKAGES:
            assert PACKAGES.index(package) <= PACKAGES.index(path.parent.name), (
                f"{name_of(path)} imports {target}: stages/{path.parent.name} may not know stages/{package}"
            )


def test_every_package_of_stages_has_its_place():
    found = {p.parent.name for p in FILES if p.parent.parent.name == "stages"}
    assert found - {"worldgen"} == set(PACKAGES)


def named_elsewhere(package):
    """Modules that a table of their own names: stages and recipes."""
    tables = {"stages": STAGES, "flows": RECIPES}
    return {module.rpartition(".")[2] for module in tables.get(package, {}).values()}


@pytest.mark.parametrize(
    "package",
    sorted({name_of(p) for p in FILES if p.name == "__init__.py"} - {"stages.ingestion.published"}),  # by data set
)
def test_a_package_names_its_modules_and_no_others(package):
    """A newcomer finds in its docstring what is in which file."""
    folder = PROJECT_ROOT / package.replace(".", "/")
    text = ast.get_docstring(ast.parse((folder / "__init__.py").read_text(encoding="utf-8")))
    forms = (r"``(\w+)``", r"^(\w+)\.py ", r":(?:mod|class):`\.(\w+)")
    named = {name for form in forms for name in re.findall(form, text, re.M)}
    there = {p.stem for p in folder.glob("*.py")} - {"__init__", "__main__"} - named_elsewhere(package)
    assert named == there, f"{package}/__init__.py: write ``NAME`` and what the module does, of these and no others"


def test_the_tests_say_where_a_test_goes():
    folder = PROJECT_ROOT / "tests"
    named = set(
        re.findall(r"``(\w+)``", ast.get_docstring(ast.parse((folder / "__init__.py").read_text(encoding="utf-8"))))
    )
    there = {p.stem for p in folder.iterdir() if p.is_dir() or p.suffix == ".py"} - {
        "__init__",
        "conftest",
        "__pycache__",
    }
    assert named == there, "tests/__init__.py: write ``NAME`` and what belongs there, of these and no others"


@pytest.mark.parametrize(
    "module",
    [
        "flows",
        "tasks",
        "tasks.run",
        "storage.store",
        "storage.records",
        "storage.tracking",
        "stages.registry",
        "stages.harness",
    ],
)
def test_light_imports(module):
    heavy = ("torch", "transformers", "datasets", "mlflow", "prefect", "pandas", "matplotlib")
    code = f"import sys, {module}; print([m for m in {heavy!r} if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=PROJECT_ROOT, check=True)
    assert run.stdout.strip() == "[]"


def test_no_command_imports_prefect_or_mlflow_before_their_environment_is_set():
    """Both read it once; a command that is late has them keep runs in the user's own directories, and phone home."""
    commands = {
        node.name: node
        for file in (PROJECT_ROOT / "flows" / "commands").glob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef) and "env.prepare(" in ast.unparse(node)
    }
    assert len(commands) > 15
    lines = set()
    for node in commands.values():
        prepared = min(
            one.lineno for one in ast.walk(node) if "env.prepare" in ast.unparse(one) and hasattr(one, "func")
        )
        lines |= {
            ast.unparse(one)
            for one in ast.walk(node)
            if isinstance(one, (ast.Import, ast.ImportFrom)) and one.lineno < prepared
        }
    code = "\n".join(["import sys", "import flows.cli", *sorted(lines)])
    code += "\nprint([m for m in ('prefect', 'mlflow') if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=PROJECT_ROOT, check=True)
    assert run.stdout.strip() == "[]"


def test_a_recipe_called_from_python_sends_nothing():
    code = (
        "import os\nfrom flows.reward import reward\nfrom prefect.settings import get_current_settings\nserver ="
        " get_current_settings().server\nprint(server.analytics_enabled, server.ui.show_promotional_content,"
        " os.environ['DO_NOT_TRACK'], os.environ['MLFLOW_DISABLE_TELEMETRY'], os.environ['HF_HUB_DISABLE_TELEMETRY'])"
    )
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PREFECT", "MLFLOW", "HF_", "DO_NOT"))}
    for given, said in (({}, "False False true true 1"), ({"DO_NOT_TRACK": "0"}, "False False 0 true 1")):
        run = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, cwd=PROJECT_ROOT, check=True, env=env | given
        )
        assert run.stdout.strip() == said


def test_every_stage_declares_itself_lightly():
    code = (
        "import sys\nfrom stages.registry import STAGES, get_stage\nfor name in STAGES:\n    spec ="
        " get_stage(name).SPEC\n    assert spec.name == name, (name, spec.name)\n    spec.config()\n    for field, info"
        " in spec.config.model_fields.items():\n        assert info.description, f'{name}.{field} has no"
        " description'\nprint([m for m in ('torch', 'transformers', 'mlflow', 'prefect') if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=PROJECT_ROOT)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "[]"


def test_every_recipe_is_there_without_what_stages_compute_with():
    """Plans, forms, `posttrain deploy` and a worker's process of a run are made of all or one of them."""
    code = (
        "import sys\nfrom flows.recipe import RECIPES, get_recipe\nfor name in RECIPES:\n    get_recipe(name)\nprint([m for m"
        " in ('torch', 'transformers', 'datasets', 'pandas', 'matplotlib', 'mlflow') if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=PROJECT_ROOT)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "[]"


def test_every_stage_can_be_hashed():
    from stages.registry import STAGES
    from stages.spec import closure_digest

    for module in STAGES.values():
        assert len(closure_digest(module)) == 64


def test_every_config_field_is_read():
    """No option of a stage or a recipe is accepted and then ignored: each is read by name, or by a name put together
    from a pattern.
    """
    import ast
    import re
    import typing

    from pydantic import BaseModel

    from flows.recipe import RECIPES, get_recipe
    from stages.registry import STAGES, get_stage

    read, patterns = set(), set()
    for folder in ("stages", "flows", "tasks", "storage"):
        for path in (PROJECT_ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Attribute):
                    read.add(node.attr)
                elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "getattr" and len(node.args) > 1:
                    name = node.args[1]
                    if isinstance(name, ast.Constant):
                        read.add(name.value)
                    elif isinstance(name, ast.JoinedStr):
                        patterns.add(
                            "".join(part.value if isinstance(part, ast.Constant) else r"\w+" for part in name.values)
                        )
                elif isinstance(node, (ast.Tuple, ast.Dict)):  # tables of names that are looked up
                    read |= {
                        part.value
                        for part in [*getattr(node, "elts", ()), *getattr(node, "keys", ())]
                        if isinstance(part, ast.Constant)
                    }

    assert {r"ingest_\w+", r"\w+_column"} <= patterns
    seen: set[type] = set()

    def visit(annotation):
        if isinstance(annotation, type) and issubclass(annotation, BaseModel) and annotation not in seen:
            seen.add(annotation)
            for field in annotation.model_fields.values():
                visit(field.annotation)
        for part in typing.get_args(annotation):
            visit(part)

    for stage in STAGES:
        visit(get_stage(stage).SPEC.config)
    for recipe in RECIPES:
        visit(get_recipe(recipe).config_type)
    ignored = [
        f"{model.__module__}.{model.__name__}.{field}"
        for model in seen
        for field in model.model_fields
        if field not in read and not any(re.fullmatch(pattern, field) for pattern in patterns)
    ]
    assert len(seen) > 40 and not ignored, ignored
