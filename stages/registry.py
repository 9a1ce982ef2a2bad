"""The stages there are: name -> module. A plain table, nothing registers itself."""

from __future__ import annotations

import importlib
from types import ModuleType

from stages.spec import ConfigError, StageSpec, did_you_mean

STAGES: dict[str, str] = {
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
    "win_rate": "stages.win_rate",
    "trace_error": "stages.trace_error",
    "smoke": "stages.smoke",
    "contamination": "stages.contamination",
    "promote": "stages.promote",
    "compare": "stages.compare",
    "learning": "stages.learning",
}


def stage_module_name(name: str) -> str:
    """Module path of a stage name; a dotted name is taken as a module path itself (a stage of your own)."""
    if name in STAGES:
        return STAGES[name]
    if "." in name:
        return name
    raise ConfigError(
        f"there is no stage {name!r}; {did_you_mean(name, list(STAGES), 3)}`posttrain ls stages` lists them"
    )


def get_stage(name: str) -> ModuleType:
    """The module of a stage: it has ``SPEC``, ``Config`` and ``run(stage)``. Raises ConfigError for an unknown name."""
    module_name = stage_module_name(name)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and module_name.startswith(error.name):
            raise ConfigError(
                f"stage {name!r}: no module {module_name!r}; write one of {', '.join(STAGES)}, or stages.FILE for a"
                " stage of your own in stages/FILE.py"
            ) from None
        raise
    if not isinstance(getattr(module, "SPEC", None), StageSpec) or not callable(getattr(module, "run", None)):
        raise ConfigError(f"{module_name} is not a stage: it must define SPEC (a StageSpec) and run(stage)")
    return module


def get_spec(name: str) -> StageSpec:
    """The declaration of a stage."""
    return get_stage(name).SPEC
