"""What a stage or a recipe is, printed: the answer to `posttrain stage NAME` and `posttrain run NAME --help`."""

from __future__ import annotations

from typing import Any

from flows.commands.app import emit, recipe_name


def describe_stage(name: str, as_json: bool) -> None:
    """Inputs, outputs and every setting of a stage, on stdout."""
    from flows.display import table
    from stages.registry import get_stage

    module = get_stage(name)
    what, inputs = (module.__doc__ or "").strip(), module.SPEC.inputs
    if as_json:
        given = [
            {
                "input": key,
                "kind": one.kind,
                "rows": one.kinds,
                "many": one.many,
                "required": one.required,
                "doc": one.doc,
            }
            for key, one in inputs.items()
        ]
        return emit({"stage": name, "what": what, "inputs": given, "settings": settings_of(module.SPEC.config)})
    print(what + "\n")
    table(
        [
            {
                "input": key + (".LABEL" if one.many else ""),
                "takes": one.kind + (f" {'|'.join(one.kinds)}" if one.kinds else ""),
                "required": "yes" if one.required else "no",
                "": one.doc,
            }
            for key, one in inputs.items()
        ]
        or [{"input": "none"}]
    )
    print()
    describe_settings(module.SPEC.config)


def describe_recipe(name: str, as_json: bool) -> None:
    """What a recipe does and every setting of it, on stdout."""
    from flows.recipe import get_recipe

    recipe_name(name)
    what, config_type = (get_recipe(name).method.__doc__ or "").strip(), get_recipe(name).config_type
    if as_json:
        return emit({"recipe": name, "what": what, "settings": settings_of(config_type)})
    print(what + "\n")
    describe_settings(config_type)


def settings_of(config_type: Any) -> list[dict[str, Any]]:
    """Rows {setting, default, doc}; a default that is a model of its own as the mapping that sets it."""
    from pydantic_core import to_jsonable_python

    from flows.config import field_at
    from flows.config import keys as config_keys

    return [
        {"setting": key, "default": to_jsonable_python(default, fallback=str), "doc": doc}
        for key, default, doc in ((key, *field_at(config_type, key)) for key in config_keys(config_type))
    ]


def describe_settings(config_type: Any) -> None:
    """Key, default and description of every setting."""
    from flows.config import field_at
    from flows.config import keys as config_keys
    from flows.display import setting, table

    table(
        [
            {"setting": key, "default": setting(default), "": doc}
            for key, default, doc in ((key, *field_at(config_type, key)) for key in config_keys(config_type))
        ]
    )
