"""What recipes with published settings share. The defaults of their sections are the published numbers, and `scale`
makes a run smaller in all of its parts at once.
"""

from __future__ import annotations

from typing import Any, ClassVar, Optional

from pydantic import BaseModel, Field, field_validator

from flows.recipe import Run
from flows.start import Data as WorldData
from flows.start import IteratedConfig, pretrained
from flows.steps import HELD_OUT, Evaluations, Source, ingest
from stages.compare import Config as CompareConfig
from stages.evaluate import Config as EvaluateConfig
from stages.ingest import Config as IngestConfig
from stages.rl import Config as RLConfig
from stages.rl import row_of

#: Share of replayed rows that no earlier rows can fill: all of them are trained on again.
EVERYTHING = 1 - 1e-9


class Data(WorldData):
    benchmarks: dict[str, str] = Field(
        default_factory=dict,
        description=(
            "Name -> prompts with answers (ref, file or hub id) on which no model was trained: what alignment cost"
            " there, beside the loss of held-out data.text."
        ),
    )

    @field_validator("benchmarks")
    @classmethod
    def _names_free(cls, benchmarks):
        if taken := {"prompts", "text"} & set(benchmarks):
            raise ValueError(
                f"{sorted(taken)[0]} is what the recipe calls its own held-out prompts or text; call the benchmark"
                " otherwise"
            )
        return benchmarks


#: Sections that are no part of what was published: the small models of the embedded world, and the judgement at the
#: end.
WORLDS_AND_JUDGES = ("world", "base_model", "pretraining", "evaluate", "tax", "win_rate", "promote")


class PublishedConfig(IteratedConfig):
    UNSCALED: ClassVar[tuple[str, ...]] = WORLDS_AND_JUDGES
    model: Optional[str] = Field(
        None,
        title="Model",
        description=(
            "Pretrained model (ref, directory or hub id); empty: a small one is trained here on the embedded world."
        ),
    )
    data: Data = Field(Data(), description="Your own data; empty: the embedded world.")
    scale: float = Field(
        1.0,
        gt=0,
        le=1,
        description=(
            "Size of the run as a share of the published one: prompts that are sampled and episodes by this factor,"
            " batches and optimizer steps each by its root. Passes over data, minibatches per batch, answers per prompt"
            " and all coefficients stay as they are; your data are used as they are."
        ),
    )
    ingest_text: IngestConfig = Field(
        IngestConfig(kind="text/1", **HELD_OUT), description="Checks and splits of data.text."
    )
    tax: EvaluateConfig = Field(
        EvaluateConfig(split="train", num_samples=0),
        description=(
            "What is read off every model on data.benchmarks (their split) and on the validation split of data.text "
            "(step alignment_tax)."
        ),
    )

    def remarks(self) -> list[str]:
        """What the steps get in the place of the settings that ``scale`` changes, a line per section."""
        small = scaled(self)
        changed = {
            name: {
                key: after
                for key in type(part).model_fields
                if (after := getattr(part, key)) != getattr(getattr(self, name), key)
            }
            for name in type(self).model_fields
            if (part := getattr(small, name)) is not getattr(self, name)
        }
        return [
            f"at scale={self.scale:g} {name} runs with {', '.join(f'{key}={value}' for key, value in values.items())}"
            for name, values in changed.items()
            if values
        ]


def scaled(config: Any) -> Any:
    """The configuration with every section at ``config.scale`` of its size."""
    if config.scale == 1:
        return config
    return config.model_copy(
        update={
            name: resized(section, config.scale)
            for name in type(config).model_fields
            if name not in config.UNSCALED and isinstance(section := getattr(config, name), BaseModel)
        }
    )


def resized(section: BaseModel, scale: float) -> BaseModel:
    """A stage's settings at a share of their size: ``max_prompts`` and ``limit`` by ``scale``, batches and steps by its
    root. RL keeps its optimizer steps per batch of completions, and a batch that they divide."""
    passes = minibatches = 1
    if isinstance(section, RLConfig):
        minibatches = section.num_minibatches
        passes = row_of(section).num_iterations * minibatches
    root, changes = scale**0.5, {}
    for name, factor, unit in (
        ("max_prompts", scale, 1),
        ("limit", scale, 1),
        ("batch_size", root, 1),
        ("prompts_per_step", root, minibatches),
        ("max_steps", root, passes),
    ):
        size = getattr(section, name, None)
        if size is not None:
            changes[name] = unit * max(1, round(size * factor / unit))
    return section.model_copy(update=changes)


def begun(run: Run, config: Any) -> tuple[Source, str, str, str | None, str]:
    """(source of data, demonstrations, prompts, held-out text, the pretrained model): what a recipe begins with that
    starts from one.
    """
    source = Source(run, config)
    demonstrations = ingest(run, "demonstrations", source("demonstrations"), config)
    prompts = ingest(run, "prompts", source("prompts"), config)
    return (
        source,
        demonstrations,
        prompts,
        held_out_text(run, source, config),
        pretrained(run, source, config, demonstrations),
    )


def held_out_text(run: Run, source: Source, config: Any) -> str | None:
    """Plain text, checked and split; None where a model is given without it, which the embedded world's text is not a
    sample of.
    """
    return (
        None if config.model is not None and config.data.text is None else ingest(run, "text", source("text"), config)
    )


def with_benchmarks(run: Run, config: Any) -> Any:
    """The configuration with the datasets that its benchmarks are ingested as, by the settings and so to the rows that
    an evaluation would ingest a file by itself; at the start, since that is when a file is to be told of that holds
    something else.
    """
    from storage.store import is_dataset_dir, is_ref

    benchmarks = {
        label: path
        if is_ref(path) or is_dataset_dir(path)
        else run("ingest", f"ingest_benchmark_{label}", data=path, config=IngestConfig(kind="prompts/1"))["data"]
        for label, path in config.data.benchmarks.items()
    }
    return config.model_copy(update={"data": config.data.model_copy(update={"benchmarks": benchmarks})})


def alignment_tax(
    run: Run, config: Any, models: dict[str, str], evaluations: Evaluations, text: str | None
) -> list[dict]:
    """What every model gained or lost against the first on the benchmarks and on held-out text, beside the evaluation's
    own prompts (step alignment_tax).
    """
    samples = {f"{name}/prompts": outputs["samples"] for name, outputs in evaluations.items()}
    on_text = config.tax.model_copy(update={"split": "validation"})
    asked = {
        **{label: {"prompts": path} for label, path in config.data.benchmarks.items()},
        **({"text": {"texts": text}} if text else {}),
    }
    for label, given in asked.items():
        for name, model in models.items():
            samples[f"{name}/{label}"] = run(
                "evaluate",
                f"evaluate_{name}_{label}",
                model=model,
                config=on_text if label == "text" else config.tax,
                **given,
            )["samples"]
    if not asked:
        return []
    found = run("compare", "alignment_tax", evaluations=samples, config=CompareConfig(order=list(models))).metrics
    return [
        {
            "model": name,
            "benchmarks that fell": found[f"{name}/regressed"],
            "mean change": found.get(f"{name}/mean_delta"),
            "worst": found.get(f"{name}/worst_delta"),
        }
        for name in list(models)[1:]
        if f"{name}/regressed" in found
    ]
