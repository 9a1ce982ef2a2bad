"""Recipe configurations: presets, `--set` overrides, and errors that say what to write instead."""

from __future__ import annotations

import difflib
import re
import types
import typing
from collections.abc import Iterable, Iterator
from datetime import date
from pathlib import Path
from typing import Any

from pydantic import BaseModel, TypeAdapter, ValidationError

from flows.names import ELSEWHERE, VALUES
from stages.spec import ConfigError, StageConfig, explain, is_ours
from storage.files import read_text

PRESETS = Path(__file__).resolve().parent / "presets"
CONSTITUTION = PRESETS / "constitution.yaml"  # principles for recipes that are given none


# ---------------------------------------------------------------- values


def parse_sets(pairs: Iterable[str]) -> dict[str, Any]:
    """['rl.max_steps=40', 'sft.lora=null'] -> nested values. Values are YAML: numbers, true, null, [a, b], {a: 1}, text."""
    values: dict[str, Any] = {}
    for pair in pairs:
        key, sign, text = pair.partition("=")
        if not sign or not key.strip():
            raise ConfigError(f"{pair!r} is no setting: write key=value, for example --set sft.learning_rate=1e-4")
        place = values
        *parents, last = key.strip().split(".")
        for parent in parents:
            place = place.setdefault(parent, {})
            if not isinstance(place, dict):
                raise ConfigError(f"--set {pair!r}: {parent!r} was already given as a plain value")
        place[last] = scalar(text)
    return values


def scalar(text: str) -> Any:
    """A YAML value; unlike YAML 1.1 it also reads 1e-5 as a number. What is in no brackets is no mapping, list or date,
    but a text, whatever stands in it (``be kind: say yes``), and so is ``{answer}``.
    """
    import yaml

    if re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)[eE][+-]?\d+", text.strip()):
        return float(text)
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    if isinstance(value, (dict, list)) and text.strip()[0] not in "{[":
        return text
    if isinstance(value, dict) and value and ":" not in text:
        return text
    return text if isinstance(value, date) else value


def load_yaml(path: str | Path) -> dict[str, Any]:
    """The mapping in a YAML (or JSON) file."""
    import yaml

    try:
        values = yaml.safe_load(read_text(path))
    except FileNotFoundError:
        raise ConfigError(f"there is no configuration file {path}") from None
    except IsADirectoryError:
        raise ConfigError(f"{path} is a directory; write the path of a YAML or JSON file") from None
    except (ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: write a mapping of sections, for example 'sft: {{epochs: 2}}'")
    return values


def presets(recipe: str) -> list[str]:
    """Names of the recipe's presets (files flows/presets/RECIPE.NAME.yaml, or of presets/ beside the module of a recipe
    that an installed package brings).
    """
    return sorted(path.name.split(".")[1] for path in _presets_of(recipe).glob(f"{recipe}.*.yaml"))


def _presets_of(recipe: str) -> Path:
    from flows.recipe import RECIPES
    from stages.registry import load

    if recipe in RECIPES.own or recipe not in RECIPES:  # one of no table is called from Python
        return PRESETS
    return Path(load(RECIPES[recipe]).__file__).parent / "presets"


def load_preset(recipe: str, name: str) -> dict[str, Any]:
    path = _presets_of(recipe) / f"{recipe}.{name}.yaml"
    if not path.exists():
        raise ConfigError(f"recipe {recipe} has no preset {name!r}; it has: {', '.join(presets(recipe)) or 'none'}")
    values = load_yaml(path)
    below = values.pop("extends", None)  # a preset of the same recipe that this one is laid over
    return values if below is None else merge(load_preset(recipe, below), values)


def merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """`over` laid over `base`, section by section; neither is changed."""
    merged = dict(base)
    for key, value in over.items():
        below = merged.get(key)
        merged[key] = merge(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return merged


# ---------------------------------------------------------------- validation


def build(model: type[BaseModel], values: dict[str, Any]) -> BaseModel:
    """Validate `values`; a ConfigError lists every problem, one per line, with the nearest valid key."""
    unknown = list(_unknown(model, values))
    if unknown:
        raise ConfigError("\n".join(unknown))
    try:
        return model.model_validate(values)
    except ValidationError as error:
        what = getattr(model, "__module__", "config").rpartition(".")[2]
        raise ConfigError(explain(what, model, error, VALUES)) from None


def given_in_form(model: type[BaseModel], values: Any, usual: BaseModel | None = None, sections: bool = False) -> Any:
    """What somebody chose of the settings that a form of Prefect's UI sends, which sends all that have a value: those
    that differ from what they are in ``usual`` (default: what the model itself gives them). A value that follows others
    where nobody chose it (a LoRA adapter's learning rate, the rewards of an environment) would count as given. Where
    some settings are missing no form sent them, and they stay as they are. sections: the model is a recipe's, whose
    configs of stages may be given in part and are looked at one by one.
    """
    if not isinstance(values, dict):
        return values
    fields = model.model_fields
    defaults = (
        usual.model_dump(mode="json", warnings=False)
        if usual is not None
        else {
            name: TypeAdapter(field.annotation).dump_python(
                field.get_default(call_default_factory=True), mode="json", warnings=False
            )
            for name, field in fields.items()
            if not field.is_required()
        }
    )
    form = {name for name, value in defaults.items() if value is not None} <= values.keys()
    found = {}
    for name, value in values.items():
        if sections and isinstance(value, dict) and name in fields and isinstance(fields[name].default, StageConfig):
            found[name] = given_in_form(type(fields[name].default), value, fields[name].default)
        elif not form or name not in defaults or value != defaults[name]:
            found[name] = value
    return found


def keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Every dotted key of the configuration."""
    for name, field in model.model_fields.items():
        yield prefix + name
        for section in _sections(field.annotation):
            yield from keys(section, f"{prefix}{name}.")


def field_at(model: type[BaseModel], key: str) -> tuple[Any, str]:
    """(default, description) of a dotted key."""
    *parents, last = key.split(".")
    given = None  # what the model above sets in this section
    for parent in parents:
        given = model.model_fields[parent].default if given is None else getattr(given, parent, None)
        model, given = section(model, parent), given if isinstance(given, BaseModel) else None
    field = model.model_fields[last]
    default = (
        getattr(given, last)
        if hasattr(given, last)
        else "(required)"
        if field.is_required()
        else field.get_default(call_default_factory=True)
    )
    return (
        "(section)" if _sections(field.annotation) and isinstance(default, BaseModel) else default
    ), field.description or ""


def section(model: type[BaseModel], name: str) -> type[BaseModel]:
    """The model of a section, e.g. `sft` -> stages.sft.Config."""
    field = model.model_fields.get(name)
    sections = _sections(field.annotation) if field else []
    if not sections:
        names = [key for key, value in model.model_fields.items() if _sections(value.annotation)]
        raise ConfigError(
            f"there is no section {name!r}; the sections are: {', '.join(names)}"
            if names
            else "the settings of its steps are no sections of this recipe, so --stage with --set changes none; give its"
            " command again with other settings: what stays the same is reused"
        )
    return sections[0]


def _sections(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if typing.get_origin(annotation) in (typing.Union, types.UnionType, typing.Annotated):
        return [found for part in typing.get_args(annotation) for found in _sections(part)]
    return []


def _named(model: type[BaseModel]) -> str:
    """The command of the stage or recipe that these settings are of."""
    from flows.recipe import RECIPES
    from stages.registry import STAGES

    module = model.__module__
    for command, table in (("run", RECIPES), ("stage", STAGES)):
        for name, its in table.items():
            if its == module:
                return f"{command} {name}"
    return f"{'run' if module.startswith('flows.') else 'stage'} {module.rpartition('.')[2] if is_ours(module) else module}"


def _unknown(model: type[BaseModel], values: dict[str, Any], prefix: str = "", top: type[BaseModel] | None = None):
    top = top or model
    for name, value in values.items():
        field = model.model_fields.get(name)
        if field is None and name in getattr(model, "ALSO", ()):
            continue
        if field is None:
            typed = isinstance(value, dict) and difflib.get_close_matches(
                str(name),
                [key for key, below in model.model_fields.items() if _sections(below.annotation)],
                n=1,
                cutoff=0.6,
            )
            named = {} if typed else {path: _elsewhere(path, prefix, top) for path in _paths(str(name), value)}
            alike = difflib.get_close_matches(str(name), list(model.model_fields), n=1, cutoff=0.9)
            nested = isinstance(value, dict) and not typed and not alike
            if nested or any(named.values()):
                yield from (
                    f"unknown key {prefix + path!r}; {text or 'nothing here has that name, see --keys'}"
                    for path, text in named.items()
                )
                continue
            path = prefix + str(name)
            near = nearest(path, [key for key in keys(top) if not path.startswith(f"{key}.")])
            yield f"unknown key {prefix + str(name)!r}; " + (
                f"did you mean {near!r}?" if near else f"all keys: `posttrain {_named(top)} --keys`"
            )
            continue
        sections = _sections(field.annotation)
        if isinstance(value, dict) and sections:
            problems = [list(_unknown(option, value, f"{prefix}{name}.", top)) for option in sections]
            yield from min(problems, key=len)


def _paths(name: str, value: Any) -> Iterator[str]:
    """Dotted names of what is set in a section that does not exist here; the name itself where it is none."""
    if not isinstance(value, dict) or not value:
        yield name
        return
    for inner, below in value.items():
        yield from _paths(f"{name}.{inner}", below)


def _elsewhere(path: str, prefix: str, top: type[BaseModel], asked: tuple[str, ...] = ()) -> str | None:
    """Where a setting of another project is found here, by the longest end of its dotted name in ELSEWHERE, or by a
    setting of ours that its last part names; None where neither knows it. ``asked``: names that led to this one.
    """
    known, parts = [*keys(top), *getattr(top, "ALSO", ())], path.split(".")
    ends = [".".join(parts[i:]) for i in range(len(parts))]
    found = next((end for end in ends if end in ELSEWHERE), None)
    if len(parts) > 1 and found in (None, ends[-1]) and any(key.rsplit(".", 1)[-1] == ends[-1] for key in known):
        found = None  # a name of ours
    word = ELSEWHERE[found] if found else ends[-1] if len(parts) > 1 else None
    if word is None:
        return None
    ours, _, why = word.partition(": ")
    if not ours:
        return why

    def of_ours(name: str) -> str | None:
        if prefix + name in known:
            return repr(prefix + name)
        named = [key for key in known if key.rsplit(".", 1)[-1] == name]
        told = (
            ", ".join(map(repr, named[:-1])) + f" or {named[-1]!r}"
            if 1 < len(named) <= 6
            else "".join(map(repr, named[:1]))
        )
        return told or None

    here = of_ours(ours)
    if here is None and ours in ELSEWHERE and ours not in (path, *asked):
        # what takes its place where a stage has no such setting
        if found := _elsewhere(ours, prefix, top, (*asked, path)):
            return found
    return None if here is None else f"here it is {here}" + (f" ({why})" if why else "")


def nearest(word: str, words: list[str]) -> str | None:
    """The valid key closest to `word`: by spelling, else by its last part (learning_rate -> sft.learning_rate), else by
    its initials (lr) or as a part of it (per_device_train_batch_size -> batch_size)."""
    close = difflib.get_close_matches(word, words, n=1, cutoff=0.6)
    if close:
        return close[0]
    last = word.rsplit(".", 1)[-1]
    tails = {known.rsplit(".", 1)[-1]: known for known in reversed(words)}
    tail = difflib.get_close_matches(last, list(tails), n=1, cutoff=0.6)
    short = (
        tail
        or [known for known in reversed(tails) if "".join(part[0] for part in known.split("_") if part) == last]
        or sorted((known for known in tails if "_" in known and known in last), key=len, reverse=True)
    )
    return tails[short[0]] if short else None
