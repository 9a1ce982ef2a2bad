"""A Prefect flow per stage, so that one stage can be run again from the UI, the API or a schedule.

The form has one field per input of the stage (a ref, a model directory, a data file), its config, and a seed.
Flows are module attributes named after their stages: `flows.single.sft`.
"""

from __future__ import annotations

import functools
import inspect
from typing import Annotated, Any, Optional

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, create_model

from flows.config import given_in_form
from stages.registry import STAGES, get_stage


def inputs_model(name: str) -> type[BaseModel]:
    """A form with one text field per input of the stage; inputs that take many are mappings label -> ref."""
    fields: dict[str, Any] = {}
    for key, spec in get_stage(name).SPEC.inputs.items():
        kinds = f" ({', '.join(spec.kinds)})" if spec.kinds else ""
        note = f"{spec.kind}{kinds}: a ref, a path or a hub id. {spec.doc}".strip()
        if spec.many:
            fields[key] = (dict[str, str], Field(description=note) if spec.required else Field({}, description=note))
        elif spec.required:
            fields[key] = (str, Field(description=note))
        else:
            fields[key] = (Optional[str], Field(None, title=key, description=note))
    return create_model(f"{title(name)}Inputs", __config__=ConfigDict(extra="forbid"), **fields)


def title(name: str) -> str:
    return "".join(part.capitalize() for part in name.split("_"))


@functools.cache
def stage_flow(name: str):
    """The flow that runs a stage alone."""
    from flows.recipe import ends, run_name, typed_flow

    module = get_stage(name)
    inputs_type, config_type = inputs_model(name), module.SPEC.config
    no_inputs = not any(spec.required for spec in module.SPEC.inputs.values())

    def told(inputs, seed, **_) -> str:
        return " · ".join([name, *ends(flatten_inputs(inputs).values()), f"seed {seed}"])

    def body(inputs, config, seed=0, name_as=None, force=False):
        return conduct_stage(name, inputs, config, seed, name_as, force)

    empty = inspect.Parameter.empty
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    required = any(field.is_required() for field in config_type.model_fields.values())
    shape = [
        ("inputs", inputs_type, inputs_type() if no_inputs else empty),
        (
            "config",
            Annotated[config_type, BeforeValidator(functools.partial(given_in_form, config_type))],
            empty if required else config_type(),
        ),
        ("seed", int, 0),
        ("name_as", Optional[str], None),
        ("force", bool, False),
    ]
    # Parameters without a default may follow those with one here: Prefect passes all of them by name.
    order = sorted(shape, key=lambda item: item[2] is not empty)
    body.__name__ = body.__qualname__ = name
    body.__module__ = __name__
    body.__doc__ = (
        (inspect.getdoc(module) or name)
        + "\n\nArgs:\n    inputs: what the stage reads\n    config: the stage's settings\n    seed: seed of its random"
        " choices\n    name_as: name to publish the outputs under\n    force: execute although a verified record"
        " exists\n"
    )
    parameters = [inspect.Parameter(key, kind, annotation=hint, default=default) for key, hint, default in order]
    return typed_flow(
        body,
        parameters,
        name=f"stage-{name.replace('_', '-')}",
        flow_run_name=lambda: run_name(told),
        persist_result=False,
    )


def conduct_stage(name: str, inputs: BaseModel, config: BaseModel, seed: int, name_as: str | None, force: bool) -> dict:
    """Run one stage as the only task of a flow run."""
    from flows.recipe import recorded

    given = flatten_inputs(inputs)
    with recorded(f"stage:{name}", config, seed, [name] if force else [], {**given, "name_as": name_as}) as run:
        outputs = run(name, config=config, name_as=name_as, **given)
    return {
        "run": run.record.run_id,
        "stage": name,
        "cached": outputs.cached,
        "outputs": outputs.refs,
        "metrics": outputs.metrics,
    }


def flatten_inputs(inputs: BaseModel) -> dict[str, Any]:
    return {key: value for key, value in inputs.model_dump().items() if value not in (None, {}, "")}


def __getattr__(name: str):
    if name in STAGES:
        return stage_flow(name)
    raise AttributeError(name)
