"""What recipes share: the config base, the `Run` they call stages through, and the way one becomes a Prefect flow.

A recipe is a function `method(run, config)`. Calling `run("sft", model=ref, data=ref, config=config.sft)` runs the
stage as a Prefect task and returns its outputs by name; the same function under a `Plan` only says what would run.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_origin

from pydantic import BaseModel, BeforeValidator, Field, TypeAdapter, ValidationError, model_validator

from flows import run_log
from flows.config import ConfigError, build, given_in_form, load_preset, merge, presets
from flows.env import own_output
from stages.registry import Table, get_stage, load
from stages.spec import InputSpec, StageConfig, StageSpec, did_you_mean
from storage.files import read_json

RECIPES = Table(
    "posttrain.recipes",
    {
        "post_training": "flows.post_training",
        "preference": "flows.preference",
        "verifiable": "flows.verifiable",
        "instruction_following": "flows.instruction_following",
        "agent": "flows.agent",
        "r1": "flows.r1",
        "tulu3": "flows.tulu3",
        "llama3": "flows.llama3",
        "specialists": "flows.specialists",
        "iterated_rlhf": "flows.iterated_rlhf",
        "online_dpo": "flows.online_dpo",
        "d2po": "flows.d2po",
        "rlaif": "flows.rlaif",
        "rest": "flows.rest",
        "sdpo": "flows.sdpo",
        "constitutional": "flows.constitutional",
        "clair": "flows.clair",
        "character": "flows.character",
        "deliberative": "flows.deliberative",
        "reward": "flows.reward",
        "rl_benchmark": "flows.rl_benchmark",
        "instructgpt": "flows.instructgpt",
        "checkpoint_selection": "flows.checkpoint_selection",
        "llama2": "flows.llama2",
        "hh": "flows.hh",
        "deepseekmath": "flows.deepseekmath",
        "overoptimisation": "flows.overoptimisation",
        "objective_discovery": "flows.objective_discovery",
        "human_feedback": "flows.human_feedback",
        "sweep": "flows.sweep",
    },
)


class RecipeConfig(StageConfig):
    """Base of a recipe's configuration: a section per step, each the config of the stage it runs."""

    NOT_READ: ClassVar[Mapping[str, str]] = {}  # what no step of the recipe reads -> why, and what to write instead
    seed: int = Field(0, ge=0, description="Seed of every random choice; another seed is another run of all stages.")

    @model_validator(mode="before")
    @classmethod
    def _keep_section_defaults(cls, values: Any) -> Any:
        """A section given in part keeps what this recipe sets in the rest of it (for example the kind of rows to
        ingest).
        """
        if not isinstance(values, dict):
            return values
        filled = dict(values)
        for name, field in cls.model_fields.items():
            if isinstance(field.default, BaseModel) and isinstance(values.get(name), dict):
                filled[name] = merge(field.default.model_dump(exclude_unset=True), values[name])
        return filled

    @model_validator(mode="before")
    @classmethod
    def _all_as_written_are_read(cls, values: Any) -> Any:
        """Before a section is validated, which would say what else a setting needs that nothing reads."""
        for key, instead in cls.NOT_READ.items() if isinstance(values, dict) else ():
            section, _, below = key.partition(".")
            default, given = cls.model_fields[section].default, values.get(section)
            if isinstance(given, dict) and below in given:
                with contextlib.suppress(ValidationError):  # which the section will raise
                    value = TypeAdapter(type(default).model_fields[below].annotation).validate_python(given[below])
                    _refuse_unread(key, instead, value, getattr(default, below))
        return values

    @model_validator(mode="after")
    def _all_are_read(self):
        for key, instead in self.NOT_READ.items():
            section, _, below = key.partition(".")
            default = type(self).model_fields[section].default
            _refuse_unread(key, instead, value_at(self, key), value_at(default, below) if below else default)
        return self

    def remarks(self) -> list[str]:
        """What a plan says of the settings beside printing them."""
        return []


def _refuse_unread(key: str, instead: str, value: Any, default: Any) -> None:
    if plain(value) != plain(default):
        raise ValueError(f"{key} is not read by this recipe: {instead}; leave it out")


def value_at(config: BaseModel, key: str) -> Any:
    """The value of a dotted setting."""
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part)
    return value


def plain(value: Any) -> Any:
    return value.model_dump() if isinstance(value, BaseModel) else value


class Outputs(Mapping):
    """The outputs of one stage: output name -> ref; `metrics` are its final numbers."""

    def __init__(
        self,
        stage: str,
        label: str,
        refs: dict[str, str],
        metrics: dict[str, Any] | None = None,
        cached: bool = False,
        seconds: float = 0.0,
    ):
        self.stage, self.label, self.refs = stage, label, refs
        self.metrics, self.cached, self.seconds = metrics or {}, cached, seconds

    def __getitem__(self, name: str) -> str:
        try:
            return self.refs[name]
        except KeyError:
            raise KeyError(
                f"stage {self.stage} ({self.label}) has no output {name!r}; it has: {', '.join(self.refs) or 'none'}"
            ) from None

    def __iter__(self):
        return iter(self.refs)

    def __len__(self) -> int:
        return len(self.refs)

    def many(self, name: str) -> dict[str, str]:
        """Outputs of a ``many`` declaration: label -> ref."""
        return {key.partition(".")[2]: ref for key, ref in self.refs.items() if key.startswith(f"{name}.")}


# the steps of the part of a run that this context computes
_part: ContextVar[list[Outputs] | None] = ContextVar("part", default=None)


class Run:
    """Runs the steps of one recipe run as Prefect tasks."""

    def __init__(self, recipe: str, seed: int, force: list[str], record=None):
        self.recipe, self.seed, self.force, self.record = recipe, seed, set(force), record
        self.steps: list[Outputs] = []

    def __call__(
        self,
        stage: str,
        label: str | None = None,
        *,
        config: StageConfig | None = None,
        name_as: str | None = None,
        seed: int | None = None,
        **inputs,
    ) -> Outputs:
        """Run a stage on refs or paths.

        label: the step's name in this recipe (default: the stage's); name_as: name to publish outputs under.
        inputs: name=ref, or name={label: ref} for inputs that take many; None leaves an optional input out.
        Raises StageError when the stage fails.
        """
        label = label or stage
        value = self.execute(stage, label, flatten(inputs), config, name_as, self.seed if seed is None else seed)
        outputs = Outputs(stage, label, value["outputs"], value["metrics"], value["cached"], value["seconds"])
        part = _part.get()
        (self.steps if part is None else part).append(outputs)
        return outputs

    def together(self, parts: Sequence[Callable[[], Any]]) -> list[Any]:
        """Results of parts of the recipe that do not need each other, in their order; as many at a time as there are
        slots for GPU stages.

        Raises the error of the first part that failed, once the others that run have ended; no further part starts
        then.
        """
        from tasks.together import together

        steps: list[list[Outputs]] = [[] for _ in parts]

        def of(i: int) -> Any:
            token = _part.set(steps[i])
            try:
                return parts[i]()
            finally:
                _part.reset(token)

        outer = _part.get()
        try:
            return together([lambda i=i: of(i) for i in range(len(parts))])
        finally:
            (self.steps if outer is None else outer).extend(step for one in steps for step in one)

    def execute(self, stage, label, inputs, config, name_as, seed) -> dict[str, Any]:
        from prefect.states import State

        from tasks.stages import stage_task

        state = stage_task(stage)(
            inputs,
            config.model_dump(mode="json") if config else {},
            seed,
            label,
            name_as,
            self.record.as_flow_run(label),
            label in self.force,
        )
        return state.result() if isinstance(state, State) else state

    def people(
        self, label: str, *, task: StageConfig, answers: StageConfig, data: str, name_as: str | None = None
    ) -> Outputs:
        """Ask people about data and go on with what they say (ops.human_gate): stage `human_task`, then, once its file
        is filled in, `human_answers`.

        Raises tasks.people.Waiting where it is not, which ends the run as WAITING; a run of a deployment is suspended
        instead.
        """
        asked = self("human_task", label, data=data, config=task)["tasks"]
        file = None if answers.labeler == "stub" else self.answered(label, asked)
        return self(
            "human_answers", f"{label}_answers", tasks=asked, data=data, answers=file, config=answers, name_as=name_as
        )

    def answered(self, label: str, task: str) -> str:
        from tasks.people import answered

        return answered(label, task)

    def conclude(self, candidate: str, outputs: Outputs, name: str, alias: str = "champion") -> dict[str, Any]:
        """Act on the decision of the `promote` or `select_checkpoint` stage and keep it: {promoted, model, name, alias,
        version, reasons}.
        """
        from storage import store
        from tasks.promotion import conclude

        return conclude(candidate, store.resolve(outputs["decision"]).path, name=name, alias=alias, stage=outputs.stage)

    def champion(self, name: str) -> str | None:
        """The model in office under a registered name; None while there is none."""
        from tasks.promotion import champion

        return champion(name)


class Plan(Run):
    """Says of each step whether it would run, without running any; ``machines``: how many share what trains."""

    def __init__(self, recipe: str, seed: int, force: list[str], machines: int = 1):
        super().__init__(recipe, seed, force)
        self.machines = machines
        self.table: list[dict[str, str]] = []
        self.refused: list[str] = []
        self.advice: list[str] = []
        self.shapes: dict[str, Any] = {}  # of models that are not there yet: those they are trained from

    def execute(self, stage, label, inputs, config, name_as, seed):
        from storage import records
        from tasks.run import NotMadeYet, prepare

        spec = get_stage(stage).SPEC
        spec.check_inputs(inputs, config)
        found = None
        if label not in self.force and not any(ref.startswith("(") for ref in inputs.values()):
            with contextlib.suppress(NotMadeYet):
                found = records.find(prepare(stage, inputs, config, seed=seed, dry=True).key)
        row = {
            "step": label,
            "stage": stage,
            "plan": "cached" if found else "run",
            "inputs": ", ".join(f"{name}={short(ref)}" for name, ref in inputs.items()),
        }
        self.table.append(row if found else row | self.memory(label, spec, inputs, config))
        if found:
            return {
                "outputs": {name: output["ref"] for name, output in found["outputs"].items()},
                "metrics": found["metrics"],
                "cached": True,
                "seconds": 0.0,
            }
        return self.due(stage, label)

    def due(self, stage: str, label: str) -> dict[str, Any]:
        """What a step that is not done is taken to give: outputs that name it."""
        return {
            "outputs": {name: f"({label}.{name})" for name in get_stage(stage).SPEC.planned_outputs()},
            "metrics": {},
            "cached": False,
            "seconds": 0.0,
        }

    def memory(self, label, spec, inputs, config) -> dict[str, str]:
        """{"memory": GiB that a training step needs of GiB of the device}; what cannot fit goes to ``refused``. {}
        where shapes are not known yet.
        """
        from stages.models import memory
        from stages.spec import parse_config
        from storage import store
        from tasks.devices import cuda_devices, wanted_devices

        def shape(ref: str):
            if ref.startswith("(") or not store.at_hand(ref, "model"):  # not there yet, or on the hub
                return self.shapes.get(ref)
            try:
                return memory.shape_of(store.resolve(ref, "model").path)
            except store.OnlyAdapter as adapter:  # the whole has its base's shape
                return shape(adapter.base)

        known = {name: shape(ref) for name, ref in inputs.items() if spec.input_spec(name).kind == "model"}
        if (start := known.get("model")) is not None:  # what it publishes has its shape, in the type that it publishes
            low = frozenset(start.matrices) if getattr(config, "save_dtype", "float32") == "bfloat16" else frozenset()
            self.shapes |= {
                f"({label}.{name})": replace(start, low=low)
                for name in spec.planned_outputs()
                if spec.output_spec(name).kind == "model"
            }
        if spec.roles is None:
            return {}
        settings, devices = (
            parse_config(spec, config.model_dump(mode="json") if config else {}),
            (wanted_devices() if spec.parallel else 1),
        )
        try:
            roles = spec.roles(settings, set(inputs))
        except ValueError as error:
            raise ConfigError(f"{label}: {error}") from None
        device = "cuda" if cuda_devices() else "cpu"
        limit = memory.limit_of(settings, device, devices)
        ranks = devices * (self.machines if spec.parallel else 1)
        found = memory.need(roles, known, settings, ranks, device)
        if (
            limit is not None
            and settings.memory_check == "refuse"
            and (reason := memory.refusal(label, roles, known, settings, limit, ranks))
        ):
            self.refused.append(reason)
        self._advise(label, spec, inputs, settings, known.get("model"))
        if found.missing:
            return {"memory": f"not known before {', '.join(inputs[name] for name in found.missing)} is there"}
        return {"memory": memory.shown(found.states) + ("" if limit is None else f" of {memory.shown(limit)}")}

    def _advise(self, label, spec, inputs, settings, shape) -> None:
        """Collect what the rules of `advise` say of a training step: of what it keeps, and of its data where that is
        there already.
        """
        from stages.advise import epochs_advice, of_stage
        from storage import home, store
        from storage.datasets import open_dataset

        kept = epochs_advice(settings, shape.parameters if shape else 0, home.home())
        self.advice += [f"{label}: {kept}"] if kept else []
        ref = inputs.get("data", "")
        if store.is_ref(ref) or (os.path.isdir(ref) and store.is_dataset_dir(ref)):
            data = open_dataset(store.resolve(ref, "dataset").path)
            self.advice += [
                f"{label}: {text}"
                for text in of_stage(spec.name, settings, data.kind, data, shape.parameters if shape else 0)
            ]

    def together(self, parts: Sequence[Callable[[], Any]]) -> list[Any]:
        return [part() for part in parts]

    def answered(self, label: str, task: str) -> str:
        from storage import store
        from tasks.people import answers_of

        found = None if task.startswith("(") else answers_of(store.resolve(task, "dataset").digest)
        return str(found) if found else f"(people, {label})"

    def conclude(self, candidate: str, outputs: Outputs, name: str, alias: str = "champion") -> dict[str, Any]:
        return {}


class Outline(Plan):
    """Names the steps that a run has not finished, by the results of those that it has; reads nothing but its
    record.
    """

    def __init__(self, run: Any):
        super().__init__(run.data["recipe"], 0, [])
        self.done, self.left = run.stages(), []

    def execute(self, stage, label, inputs, config, name_as, seed):
        entry = self.done.get(label)
        if entry is None:
            self.left.append(label)
            return self.due(stage, label)
        return {
            "outputs": entry["outputs"],
            "metrics": entry.get("metrics", {}),
            "cached": True,
            "seconds": 0.0,
        }


class Rehearsal(Plan):
    """Goes through a recipe's steps and runs none, so that what is not there, and what a late step would refuse, is
    told before the first one begins.
    """

    def __init__(self, recipe: str, config: RecipeConfig):
        super().__init__(recipe, config.seed, [])
        self.names = {ref: key for key, ref in texts(config.model_dump(mode="json"))}
        self.wrong: dict[str, None] = {}  # what is told, once each and in order
        self.given: list[tuple] = []  # all that steps and registry are asked with
        self.positions: dict[str, int | None] = {}  # of models: those there are, and those that are trained from them
        # (tokens sampled at most, positions, of which model) -> steps in which no prompt fits before them
        self.cramped: dict[tuple[int, int, str], list[str]] = {}

    def execute(self, stage, label, inputs, config, name_as, seed):
        self.given.append((stage, label, inputs, config, name_as, seed))
        self.check(stage, label, inputs, config)
        return self.due(stage, label)

    def check(self, stage: str, label: str, inputs: dict[str, str], config: StageConfig | None) -> None:
        from storage.store import StoreError

        spec = get_stage(stage).SPEC
        try:
            spec.check_inputs(inputs, config)
        except ConfigError as error:
            self.wrong[f"{label}: {error}"] = None
        for name, ref in inputs.items():
            try:
                path = look(ref, spec.input_spec(name))
            except StoreError as error:
                self.wrong[f"{self.names.get(ref, f'{label}, input {name}')}: {error}"] = None
                continue
            if path is not None and spec.input_spec(name).kind == "model":
                self.positions[ref] = positions_of(path)
        self.leave_room(label, spec, inputs, config or spec.config.model_construct())

    def leave_room(self, label: str, spec: StageSpec, inputs: dict[str, str], config: StageConfig) -> None:
        """Note a step that samples more tokens than the model has positions for behind any prompt."""
        model = inputs.get("model", "")
        own = getattr(config, "max_position_embeddings", None)  # of a model that is made from nothing
        room = own if own is not None else self.positions.get(model)
        self.positions |= {
            f"({label}.{name})": room for name in spec.planned_outputs() if spec.output_spec(name).kind == "model"
        }
        if room is not None and spec.name == "rejection" and config.engine == "vllm":  # which may stretch them
            room = config.engine_options.get("max_model_len") or room
        if room is not None and samples(spec.name, config, inputs) and config.max_completion_length >= room:
            whose = f"{self.names[model]} ({model})" if model in self.names else "the model"
            self.cramped.setdefault((config.max_completion_length, room, whose), []).append(label)

    def champion(self, name: str) -> str | None:
        self.given.append(("champion", name))
        return None

    def conclude(self, candidate: str, outputs: Outputs, name: str, alias: str = "champion") -> dict[str, Any]:
        self.given.append(("conclude", candidate, name, alias))
        return {}


class Variation(Rehearsal):
    """A rehearsal that checks nothing: what the steps would be given with other settings."""

    def check(self, stage, label, inputs, config):
        pass


def rehearse(recipe: str, method: Callable[[Run, Any], Any], config: RecipeConfig) -> None:
    """Find the models and data that a recipe is given, and check every step's settings with its inputs, before the
    first step runs and not hours later.

    Raises:
        ConfigError: all that is wrong, a line each, by the name of the setting.
    """
    run = Rehearsal(recipe, config)
    method(run, config)
    cramped = [
        f"{', '.join(labels)}: max_completion_length={length} leaves no room for a prompt in the {room} positions of"
        f" {model}; write a smaller one, or give a model with more"
        for (length, room, model), labels in run.cramped.items()
    ]
    if wrong := [*run.wrong, *cramped, *unread(recipe, method, config).values()]:
        raise ConfigError("\n".join(wrong))


def unread(
    recipe: str, method: Callable[[Run, Any], Any], config: RecipeConfig, read: set[str] | None = None
) -> dict[str, str]:
    """Settings that somebody chose and without which every step would be given the same, since what reads them is
    switched off or has another value in their place: dotted key -> what is said of it. What a preset of the recipe sets
    is nobody's choice. ``read``: keys that are not looked at; those that are found to be read are added to it.
    """
    read = set() if read is None else read

    def given(update: dict[str, Any]) -> list[tuple] | None:
        run = Variation(recipe, config)
        with contextlib.suppress(ValueError, AttributeError, KeyError, TypeError):  # what is refused is read
            method(run, config.model_copy(update=update))
            return run.given
        return None

    as_it_is = functools.cache(lambda: given({}))

    def idle(key: str, value: Any, usual: list[Any], put: Callable[[Any], dict[str, Any]]) -> bool:
        """Whether a value is none of the usual ones, of which the first is the default, and others in its place change
        nothing.
        """
        if key in read or value in usual:
            return False
        if all(given(put(one)) == as_it_is() for one in alternatives(value, usual[0])):
            return True
        read.add(key)
        return False

    found = {}
    usual = [preset_config(config, recipe, name) for name in presets(recipe)]
    for name, field in type(config).model_fields.items():
        value, default = getattr(config, name), field.get_default(call_default_factory=True)
        known = [default, *(getattr(one, name) for one in usual)]
        if isinstance(value, BaseModel) and isinstance(default, BaseModel):
            for leaf, its_field in type(value).model_fields.items():
                put = lambda one, leaf=leaf: {name: value.model_copy(update={leaf: one})}
                if idle(f"{name}.{leaf}", getattr(value, leaf), [getattr(one, leaf) for one in known], put):
                    found[f"{name}.{leaf}"] = (its_field if name == "data" else field).description
        elif isinstance(value, str) and isinstance(default, str | None) and get_origin(field.annotation) is not Literal:
            if idle(name, value, known, lambda one: {name: one}):
                found[name] = field.description
    said = "{}: no step of this run reads it ({}); leave it out, or switch on the step that does"
    return {key: said.format(key, (about or "").rstrip(".")) for key, about in found.items()}


def alternatives(value: Any, default: Any) -> list[Any]:
    """Values to try in the place of one: its default, and one that no rounding hides and that equals nothing else that
    was given.
    """
    if isinstance(value, str):
        return [default, "(another)"]
    counted = isinstance(value, int | float) and not isinstance(value, bool)
    return [default, type(value)(2 * value + 100)] if counted else [default]


def preset_config(config: RecipeConfig, recipe: str, preset: str) -> RecipeConfig:
    """What a preset sets, with what must be given as in ``config``."""
    required = {
        name: plain(getattr(config, name)) for name, field in type(config).model_fields.items() if field.is_required()
    }
    return type(config).model_validate(merge(required, load_preset(recipe, preset)))


def samples(stage: str, config: StageConfig, inputs: Collection[str]) -> bool:
    """Whether a step is sure to draw completions of its input `model`, each of up to ``max_completion_length`` tokens."""
    if stage == "evaluate":
        return "prompts" in inputs and config.target == "policy" and "generation" in config.multiple_choice
    given = {name.partition(".")[0] for name in inputs}
    return stage in ("rejection", "rl") and not given & {"candidates", "stored", "recorded"}


def positions_of(path: str) -> int | None:
    """Longest sequence of a model directory, in tokens; None where its config.json does not say."""
    config = read_json(Path(path) / "config.json", None) or {}
    return (config.get("text_config") or config).get("max_position_embeddings")


def look(ref: str, wanted: InputSpec) -> str | None:
    """Find what an input is given, and whether a model is of the kind that it must be; a file that is there is read by
    its own step. The directory of what was found, of an adapter's base; None where there is none yet. Raises StoreError.
    """
    from storage import store

    if ref.startswith("("):  # what a step before it makes
        return None
    kind = wanted.kind
    if kind != "model" and not store.is_ref(ref) and (store.is_url(ref) or os.path.exists(os.path.expanduser(ref))):
        return None
    try:
        found = store.resolve(ref, kind if kind == "model" or not store.is_ref(ref) else None, wanted.hub)
    except store.OnlyAdapter as adapter:  # put into it before the step runs
        if not adapter.base:
            raise
        try:
            return store.resolve(adapter.base, kind).path
        except store.StoreError as error:
            raise store.StoreError(f"{adapter} (base={adapter.base}: {error})") from None
    if wanted.use and (wrong := store.wrong_use(found.path, wanted.use)):
        raise store.StoreError(f"{ref} {wrong}")
    return found.path


def texts(values: Any, key: str = "") -> Iterable[tuple[str, str]]:
    """(dotted key, text) of every setting that is a text."""
    if isinstance(values, Mapping):
        for name, value in values.items():
            yield from texts(value, f"{key}.{name}" if key else name)
    elif isinstance(values, str):
        yield key, values


def flatten(inputs: dict[str, Any]) -> dict[str, str]:
    """{'model': ref, 'eval': {'a': ref}, 'anchor': None} -> {'model': ref, 'eval.a': ref}."""
    flat = {}
    for name, value in inputs.items():
        if isinstance(value, Mapping):
            flat.update({f"{name}.{label}": str(ref) for label, ref in value.items()})
        elif value is not None:
            flat[name] = str(value)
    return flat


def short(ref: str) -> str:
    """A ref or path as it fits a table."""
    name, at, digest = ref.rpartition("@")
    if at and len(digest) > 12:
        return f"{name}@{digest[:10]}"
    return ref if len(ref) < 48 else "…" + ref[-46:]


def recipe(config_type: type[RecipeConfig]):
    """Decorator: `method(run, config)` -> a Prefect flow with parameters `config` (typed form) and `force`."""

    def decorate(method: Callable[[Run, Any], dict[str, Any]]):
        name = method.__name__

        def body(config, force=()):
            return conduct(name, method, config, list(force))

        required = any(field.is_required() for field in config_type.model_fields.values())
        parameters = [
            inspect.Parameter(
                "config",
                inspect.Parameter.POSITIONAL_OR_KEYWORD,
                annotation=Annotated[
                    config_type, BeforeValidator(functools.partial(given_in_form, config_type, sections=True))
                ],
                default=inspect.Parameter.empty if required else config_type(),
            ),
            inspect.Parameter("force", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=list[str], default=[]),
        ]
        body.__name__ = body.__qualname__ = name
        body.__module__ = method.__module__
        body.__doc__ = (
            (inspect.getdoc(method) or "")
            + "\n\nArgs:\n    config: one section per step; every field is described in place\n"
            "    force: steps to execute again although nothing changed\n"
        )
        built = typed_flow(
            body, parameters, name=name, flow_run_name=run_name, log_prints=False, persist_result=False, retries=0
        )
        built.method, built.config_type = method, config_type
        return built

    return decorate


def run_name(told: Callable[..., str] | None = None) -> str:
    """What Prefect calls the run that starts now: in the place of a name that Prefect made up what ``told``
    (:func:`title`) makes of its parameters, else what a person has called it."""
    from prefect.runtime import flow_run

    given = flow_run.name or ""
    return (
        given
        if given and not made_up(given)
        else told(**flow_run.parameters)
        if told
        else title(flow_run.parameters["config"])
    )


#: With one of these, a dash and an animal the form of Prefect's UI fills its field "Run Name".
UI_WORDS = frozenset(
    "Awesome Rustic Small Gorgeous Fantastic Sleek Intelligent Unbranded Refined Licensed Generic Practical Ergonomic"
    " Handcrafted Tasty Handmade Incredible".split()
)


def made_up(name: str) -> bool:
    """Whether Prefect made up a run's name: `brawny-cuckoo` (its server, by coolname) or `Intelligent-Kudu` (its UI).
    `lr-sweep` is a person's.
    """
    import coolname.data

    first, dash, second = name.partition("-")
    if first in UI_WORDS and second[:1].isupper():
        return True
    lists = coolname.data.config.values()
    words = {
        word
        for one in lists
        for word in (
            *one.get("words", ()),
            *(
                part
                for phrase in one.get("phrases", ())
                for part in (phrase.split() if isinstance(phrase, str) else phrase)
            ),
        )
    }
    return bool(dash) and {first, second} <= words


def title(config: RecipeConfig) -> str:
    """A recipe's run in a few words: `tiny-llama · pairs.jsonl · seed 0`."""
    data, several = getattr(config, "data", None), getattr(config, "candidates", None)
    given = [
        getattr(config, "what", None),
        getattr(config, "model", None),
        *(several if isinstance(several, (list, tuple)) else ()),
        *(data.model_dump().values() if isinstance(data, BaseModel) else ()),
    ]
    return " · ".join([*(ends(given) or ["embedded world"]), f"seed {config.seed}"])


def ends(given: Iterable[Any]) -> list[str]:
    """The last parts of up to three paths or refs, each once; what is no text is left out."""
    return list(
        dict.fromkeys(short(re.split(r"[/\\]", one.rstrip("/\\"))[-1]) for one in given if isinstance(one, str) and one)
    )[:3]


def typed_flow(body: Callable, parameters: list[inspect.Parameter], **options: Any):
    """A Prefect flow of ``body`` with these parameters. Prefect makes their JSON schema while a flow is built, which
    takes a large recipe most of a second in every process that imports it; only a form reads it, and makes it itself
    (``flows.deploy.form``), so it is built without types."""
    from prefect import flow

    run_log.install()
    body.__signature__ = inspect.Signature([inspect.Parameter(one.name, one.kind) for one in parameters])
    built = flow(body, **options)
    for one in (body, built):
        one.__signature__, one.__annotations__ = (
            inspect.Signature(parameters),
            {one.name: one.annotation for one in parameters},
        )
    return built


def conduct(name: str, method: Callable, config: RecipeConfig, force: list[str]) -> dict[str, Any]:
    """Run a recipe inside its Prefect flow run; returns the method's small JSON result with the steps."""
    from prefect.states import Completed

    from tasks.people import Waiting

    try:
        with recorded(name, config, config.seed, force) as run:
            rehearse(name, method, config)
            result = method(run, config)
            check_force(force, [step.label for step in run.steps])
    except Waiting as waiting:
        return Completed(
            name="Waiting",
            message=str(waiting),
            data={
                "status": "waiting",
                "run": run.record.run_id,
                "recipe": name,
                "step": waiting.label,
                "task": waiting.task,
                "file": waiting.file,
            },
        )
    steps = [
        {
            "step": step.label,
            "stage": step.stage,
            "cached": step.cached,
            "seconds": round(step.seconds, 2),
            "outputs": step.refs,
        }
        for step in run.steps
    ]
    show_results(name, result or {})
    return {"run": run.record.run_id, "recipe": name, **(result or {}), "steps": steps}


def show_results(recipe: str, result: dict[str, Any]) -> None:
    """What the terminal prints at the end, as an artifact of the flow run: scores, the decision, the models. Its log
    ends with the address, since the UI shows a run's artifacts in no order."""
    from prefect.artifacts import create_markdown_artifact
    from prefect.logging import get_run_logger

    from stages.reporting.reports import document, markdown_table

    decision = result.get("decision")
    sections = [
        (title, markdown_table(result[name]))
        for name, title in (
            ("scores", "Held-out prompts"),
            ("ability", "Ability"),
            ("win_rates", "Win rates"),
            ("rounds", "Rounds"),
            ("alignment_tax", "Alignment tax"),
        )
        if result.get(name)
    ]
    if decision:
        verdict = (
            f"`{decision['model']}` is {'now' if decision['promoted'] else 'not'}"
            f" `model:{decision['name']}@{decision['alias']}`"
        )
        sections.append(("Promotion", "\n".join([verdict, "", *(f"- {reason}" for reason in decision["reasons"])])))
    if result.get("models"):
        sections.append(
            ("Models", markdown_table([{"model": name, "ref": ref} for name, ref in result["models"].items()]))
        )
    if not sections:
        return
    try:
        page = create_markdown_artifact(
            key=f"{recipe.replace('_', '-')}-results",
            markdown=document(f"Results of {recipe}", *sections),
            description="scores, decision and models",
        )
        if url := ui_url("artifacts/artifact", page):
            get_run_logger().info("results: %s", url)
    except Exception as error:  # for the eye only
        get_run_logger().warning("no artifact with the results: %s", error)


def check_force(force: list[str], steps: list[str]) -> None:
    """ConfigError where a step that was to be executed again is none of the run's."""
    unmet = sorted(set(force) - set(steps))
    if unmet:
        raise ConfigError(f"force names no step of this run: {', '.join(unmet)}; its steps are: {', '.join(steps)}")


@contextlib.contextmanager
def recorded(recipe: str, config: BaseModel, seed: int, force: list[str], inputs: Mapping[str, Any] | None = None):
    """A `Run` whose run record says what came of it, whatever that is. The same run, given again after it failed or was
    killed, goes on in its record and its MLflow run, whatever Prefect calls it this time."""
    from prefect.exceptions import Pause
    from prefect.runtime import deployment, flow_run

    from storage.files import canonical_json, sha256_text
    from storage.records import user
    from tasks.people import Waiting
    from tasks.run import finish_flow, start_flow
    from tasks.stages import close_lost
    from tasks.stopping import killed_told, wake_main_thread

    own_output()
    wake_main_thread()
    prefect = {
        "flow_run_id": str(flow_run.id),
        "flow_run_name": flow_run.name,
        "url": ui_url("runs/flow-run", flow_run.id),
        # Prefect has no login: of a run from a form nobody knows who sent it
        "worker_of": user() if deployment.id and not os.environ.get("POSTTRAIN_USER") else None,
    }
    resolved = config.model_dump(mode="json")
    identity = sha256_text(canonical_json([recipe, resolved, seed, sorted(force), dict(inputs or {})]))
    record = start_flow(recipe, resolved, run_id=str(flow_run.id), prefect=prefect, identity=identity)
    if record.data["attempts"] > 1:
        close_lost(record.data["flow_runs"], prefect["flow_run_id"])
    try:
        yield Run(recipe, seed, force, record)
    except (Waiting, Pause) as error:  # the latter: suspended in Prefect, by tasks.people
        finish_flow(
            record.run_id,
            "WAITING",
            str(error) if isinstance(error, Waiting) else "waits for people, suspended in Prefect",
            timeout=10,
        )
        raise
    except BaseException as error:
        finish_flow(
            record.run_id,
            "FAILED" if isinstance(error, Exception) else "KILLED",
            reason(error),
            timeout=10,
        )
        with killed_told():
            raise
    finish_flow(record.run_id, "FINISHED")


def reason(error: BaseException) -> str:
    """Why a run ended, for its record; what ends it from outside often says nothing itself."""
    silent = not isinstance(error, Exception) and not str(error)
    return f"{type(error).__name__}: " + ("cancelled, interrupted or told to end (SIGTERM)" if silent else str(error))


def ui_url(kind: str, identifier: Any) -> str | None:
    """A page of Prefect's UI, such as that of a run (kind ``runs/flow-run``), when a server with a UI is configured:
    PREFECT_UI_URL where a browser finds it elsewhere than this process finds the API."""
    api = os.environ.get("PREFECT_API_URL", "")
    if not api or os.environ.get("POSTTRAIN_EMBEDDED"):
        return None
    base = os.environ.get("PREFECT_UI_URL") or api.removesuffix("/api")
    return f"{base.rstrip('/')}/v2/{kind}/{identifier}"


def get_recipe(name: str):
    """The flow of a recipe; ConfigError for an unknown name."""
    if name not in RECIPES:
        raise ConfigError(
            f"there is no recipe {name!r}; {did_you_mean(name, list(RECIPES), 3)}`posttrain ls recipes` lists them"
        )
    found = getattr(load(RECIPES[name]), name, None)
    if not hasattr(found, "method") or found.name != name:
        raise ConfigError(
            f"{RECIPES[name]} has no recipe {name!r}: define there @recipe(Config) def {name}(run, config), as"
            " flows/reward.py does"
        )
    return found


def load_config(name: str, values: dict[str, Any]) -> RecipeConfig:
    """The recipe's config from plain values."""
    return build(get_recipe(name).config_type, values)
