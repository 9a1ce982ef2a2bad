"""The stages there are: name -> module. A plain table of this project's, and what installed packages add to it.

A package of your own adds stages and recipes by entry points in its ``pyproject.toml``, and has them wherever these are
named (the command line, recipes, sweeps, deployments) once it is installed, ``pip install -e .`` included::

    [project.entry-points."posttrain.stages"]
    my_stage = "my_package.my_stage"      # a module with SPEC and run(stage)

    [project.entry-points."posttrain.recipes"]
    my_recipe = "my_package.my_recipe"    # a module with @recipe(Config) my_recipe(run, config); presets/ beside it
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator, Mapping
from types import ModuleType

from stages.spec import ConfigError, StageSpec, did_you_mean, is_ours


class Table(Mapping[str, str]):
    """Name -> module: those of this project, then those that installed packages give as entry points of ``group``.

    Packages are looked at once, when a name is asked for that is none of this project's or when all are listed. Raises
    ConfigError then for a name that two of them have, or this project and one of them.
    """

    def __init__(self, group: str, own: dict[str, str]):
        self.group, self.own = group, own

    def __getitem__(self, name: str) -> str:
        return self.own[name] if name in self.own else self.installed[name]

    def __iter__(self) -> Iterator[str]:
        yield from self.own
        yield from self.installed

    def __len__(self) -> int:
        return len(self.own) + len(self.installed)

    @functools.cached_property
    def installed(self) -> dict[str, str]:
        from importlib.metadata import entry_points

        found: dict[str, str] = {}
        for point in sorted(entry_points(group=self.group)):
            there = self.own.get(point.name) or found.get(point.name)
            if there not in (None, point.module):
                raise ConfigError(
                    f"the package {point.dist.name if point.dist else point.value} gives {point.module} the name"
                    f" {point.name!r} (entry point of {self.group}), which {there} has; give it another one in its"
                    " pyproject.toml and install it again, or uninstall it"
                )
            if there is None:
                found[point.name] = point.module
        return found


STAGES = Table(
    "posttrain.stages",
    {
        "world": "stages.world",
        "base_model": "stages.base_model",
        "ingest": "stages.ingest",
        "mix": "stages.mix",
        "advise": "stages.advise",
        "sft": "stages.sft",
        "reward_model": "stages.reward_model",
        "group_preference": "stages.group_preference",
        "reward_combine": "stages.reward_combine",
        "label_steps": "stages.label_steps",
        "write_prompts": "stages.write_prompts",
        "constrain": "stages.constrain",
        "overoptimisation": "stages.overoptimisation",
        "overoptimisation_arms": "stages.overoptimisation_arms",
        "rejection": "stages.rejection",
        "rescore": "stages.rescore",
        "revise": "stages.revise",
        "preferences": "stages.preferences",
        "judge": "stages.ai_labels",
        "human_task": "stages.human_task",
        "human_answers": "stages.human_answers",
        "rate": "stages.rate",
        "curriculum": "stages.curriculum",
        "rl": "stages.rl",
        "align": "stages.align",
        "objective": "stages.objective",
        "capture": "stages.capture",
        "superfilter": "stages.superfilter",
        "inline_tools": "stages.inline_tools",
        "distill": "stages.distill",
        "merge": "stages.merge",
        "evaluate": "stages.evaluate",
        "select_checkpoint": "stages.select_checkpoint",
        "win_rate": "stages.win_rate",
        "trace_error": "stages.trace_error",
        "smoke": "stages.smoke",
        "contamination": "stages.contamination",
        "promote": "stages.promote",
        "compare": "stages.compare",
        "learning": "stages.learning",
    },
)


def stage_module_name(name: str) -> str:
    """Module path of a stage name; a dotted name is taken as a module path itself (a stage of your own, in this checkout
    or on ``PYTHONPATH``).
    """
    if name in STAGES:
        return STAGES[name]
    if "." in name:
        return name
    raise ConfigError(
        f"there is no stage {name!r}; {did_you_mean(name, list(STAGES), 3)}`posttrain ls stages` lists them"
    )


def load(module: str) -> ModuleType:
    """Import a module of a table. Raises ConfigError for one that is there, none of this project's, and fails."""
    try:
        return importlib.import_module(module)
    except Exception as error:
        if is_ours(module) or isinstance(error, ModuleNotFoundError) and module.startswith(str(error.name)):
            raise
        raise ConfigError(
            f"importing {module} failed with {type(error).__name__}: {error}; repair that package, or uninstall it"
        ) from error


def get_stage(name: str) -> ModuleType:
    """The module of a stage: it has ``SPEC``, ``Config`` and ``run(stage)``. Raises ConfigError for an unknown name."""
    module_name = stage_module_name(name)
    try:
        module = load(module_name)
    except ModuleNotFoundError as error:
        if error.name and module_name.startswith(error.name):
            raise ConfigError(
                f"stage {name!r}: no module {module_name!r}; write one of {', '.join(STAGES)}, or for a stage of your"
                " own stages.FILE (in stages/FILE.py) or PACKAGE.FILE (of a package that is installed or on PYTHONPATH)"
            ) from None
        raise
    if not isinstance(getattr(module, "SPEC", None), StageSpec) or not callable(getattr(module, "run", None)):
        raise ConfigError(f"{module_name} is not a stage: it must define SPEC (a StageSpec) and run(stage)")
    return module


def get_spec(name: str) -> StageSpec:
    """The declaration of a stage."""
    return get_stage(name).SPEC
