"""advise: which method fits this data and model, and whether there is enough of it (ops.advisor).

The rules are those that the field's texts agree on, not laws: pairs that are clean and a small or medium model, DPO; a
large model or noisy feedback, PPO; labels by machines, DPO; pairs that hardly differ, APO; thumbs, KTO; verifiable
tasks (or little memory), the GRPO family; rewards at every step, PPO. Every training stage and `posttrain run
--dry-run` tell the same of what they are given, in the log and in the plan.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import Field

from stages.spec import InputSpec, OutputSpec, StageConfig, StageSpec

KINDS = ("pairs/1", "unpaired/1", "rankings/1", "demonstrations/1", "prompts/1", "stepwise/1", "text/1")
LARGE = 13e9  # parameters (texts)
#: Rows that the texts use: SFT 10k to 100k, comparisons 100k to 1M (50k to several million), prompts of RL 10k to 100k.
SIZES = {
    "demonstrations/1": (10_000, 100_000),
    "pairs/1": (50_000, 5_000_000),
    "rankings/1": (50_000, 5_000_000),
    "unpaired/1": (50_000, 5_000_000),
    "prompts/1": (10_000, 100_000),
}
NOISY = 0.15  # share of labels that are known to be wrong or even: beyond it labels are noisy (ours)
MINIMAL = 0.7  # mean word overlap of chosen and rejected from which pairs count as minimally contrasting (ours)
READ = 2000  # rows looked at
#: Methods of `align` by what they are for.
THUMBS, CONTRAST = ("kto", "bco", "apo_zero_unpaired"), ("apo_zero", "apo_down", "apo_zero_unpaired")


class Config(StageConfig):
    split: str = Field("train", description="Split that would be trained on.")


SPEC = StageSpec(
    name="advise",
    config=Config,
    inputs={
        "data": InputSpec("dataset", kinds=KINDS, doc="What is to be trained on."),
        "model": InputSpec("model", required=False, doc="The model that is to be trained."),
    },
    outputs={"advice": OutputSpec("dataset", doc="text/1: one row per piece of advice.")},
)


@dataclass(frozen=True)
class Facts:
    """What the rules read: kind and number of rows; shares of rows labelled by machines, of doubtful labels (label_prob
    near half, contradicting pairs), of prompts that can be verified; mean word overlap of chosen and rejected;
    parameters of the model, 0 where unknown; comparisons whose preferred answers the demonstrations are."""

    kind: str
    rows: int
    by_machine: float = 0.0
    doubtful: float = 0.0
    overlap: float = 0.0
    verifiable: float = 0.0
    parameters: int = 0
    preferred: int = 0


def facts_of(kind: str, rows: Sequence[Mapping], count: int, parameters: int = 0) -> Facts:
    """Facts of the first rows of ``count``."""
    share = lambda flags: sum(flags) / max(1, len(rows))
    found: dict[str, float] = {"by_machine": share([row["origin"] in ("ai", "verifier", "revision") for row in rows])}
    if kind == "pairs/1":
        text = lambda messages: " ".join(message.get("content") or "" for message in messages)
        said: dict[tuple, set] = {}
        for row in rows:
            a, b = text(row["chosen"]), text(row["rejected"])
            said.setdefault((row["prompt_id"], *sorted((a, b))), set()).add(a < b)
        against = [
            len(said[row["prompt_id"], *sorted((text(row["chosen"]), text(row["rejected"])))]) > 1 for row in rows
        ]
        # expected share of wrong labels
        doubt = lambda row: 0.0 if row["label_prob"] is None else 1.0 - row["label_prob"]
        found |= {
            "doubtful": share([max(doubt(row), 0.5 * other) for row, other in zip(rows, against)]),
            "overlap": share(
                [
                    len(a & b) / max(1, len(a | b))
                    for row in rows
                    for a, b in [(set(text(row["chosen"]).split()), set(text(row["rejected"]).split()))]
                ]
            ),
        }
    if kind == "prompts/1":
        found["verifiable"] = share(
            [row["answer"] is not None or bool(row["tests"]) or bool(row["constraints"]) for row in rows]
        )
    return Facts(kind, count, parameters=parameters, **found)


def facts_in(data, split: str | None, parameters: int = 0) -> Facts:
    """Facts of a split of an opened dataset, None: of all of it."""
    rows = [row for _, row in zip(range(READ), data.iter_rows(split=split))]
    facts = facts_of(data.kind, rows, data.num_rows if split is None else data.manifest["splits"][split], parameters)
    made_of = ((data.manifest.get("counts") or {}).get("conversion") or {}).get("from") or {}
    compared = sum(made_of.get(kind, 0) for kind in ("pairs/1", "comparisons/1", "rankings/1"))
    return replace(facts, preferred=compared if data.kind == "demonstrations/1" else 0)


def preferred_advice(facts: Facts) -> str | None:
    """What demonstrations that were made of comparisons leave out."""
    if not facts.preferred:
        return None
    return (
        f"the demonstrations are the preferred answers of {facts.preferred:,} pairs or rankings; the others are not"
        " trained on, and become likelier too where they resemble them: align learns from both"
    )


def method_for(facts: Facts) -> tuple[str, str] | None:
    """(how to train, why) for this data; None where the data leaves no choice."""
    if facts.kind == "unpaired/1":
        return "align method=kto", "single answers with a thumb up or down"
    if facts.kind == "prompts/1":
        if facts.verifiable >= 0.5:
            return (
                "rl preset=grpo (or dapo, dr_grpo, rloo)",
                (
                    f"{facts.verifiable:.0%} of the prompts can be verified, and these presets need neither critic nor"
                    " reward model"
                ),
            )
        return "rl preset=ppo with a reward_model", "the prompts cannot be verified, so a learned reward decides"
    if facts.kind == "stepwise/1":
        return (
            "reward_model objective=prm, then rl preset=ppo rewards=[{kind: model, step_credit: each}]",
            "rewards at every step are dense, which a critic makes use of",
        )
    if facts.kind not in ("pairs/1", "rankings/1"):
        return None
    if facts.overlap >= MINIMAL:
        return (
            "align method=apo_zero (apo_down where the model is better than the chosen answers)",
            f"chosen and rejected share {facts.overlap:.0%} of their words",
        )
    if facts.by_machine >= 0.5:
        return "align method=dpo", f"{facts.by_machine:.0%} of the labels are by machines"
    if facts.parameters > LARGE or facts.doubtful > NOISY:
        why = (
            f"about {facts.doubtful:.0%} of the labels are wrong"
            if facts.doubtful > NOISY
            else f"the model has {facts.parameters / 1e9:.0f} billion parameters"
        )
        return (
            "reward_model, then rl preset=ppo",
            why + ": a reward model averages over noise, and large models gain most from RL",
        )
    return "align method=dpo", "clean pairs" + (
        f" and a model of {facts.parameters / 1e9:.1f} billion parameters" if facts.parameters else ""
    )


def size_advice(facts: Facts) -> str | None:
    """What the number of rows is to what the texts use, where it is outside of it."""
    low, high = SIZES.get(facts.kind, (0, float("inf")))
    if facts.rows < low:
        return (
            f"{facts.rows:,} rows of {facts.kind} are few: the texts use {low:,} to {high:,}; watch the validation"
            " loss, train one epoch, or make more (rejection, judge, write_prompts)"
        )
    if facts.rows > high:
        return (
            f"{facts.rows:,} rows of {facts.kind} are more than the texts use ({low:,} to {high:,}); a curated part is"
            " often as good and cheaper (ingest dedup, curriculum, limit)"
        )
    return None


def advice(stage: str, config, facts: Facts) -> list[str]:
    """Advice on a training stage with these settings and data; [] where nothing speaks against it."""
    found = [text for text in (preferred_advice(facts), size_advice(facts)) if text]
    wanted = method_for(facts)
    if wanted is None:
        return found
    from stages.algorithms import rl_preset

    how, why = wanted
    method, preset = getattr(config, "method", ""), getattr(config, "preset", "")
    critic = stage == "rl" and rl_preset(preset).needs_critic
    fits = {
        "align": (
            method in THUMBS
            if facts.kind == "unpaired/1"
            else method in CONTRAST
            if "apo" in how
            else how.startswith("align")
        ),
        "rl": not critic if "grpo" in how else True,
    }.get(stage, True)
    dense = [c.kind for c in getattr(config, "rewards", ()) if c.kind in ("milestones", "step_weighted")]
    if dense and not critic and preset != "agent":
        found.append(
            f"rewards of kind {', '.join(dense)} pay at every step, and preset={preset} gives a whole answer one"
            " advantage: preset=ppo (or agent) credits the steps"
        )
    elif not fits:
        found.append(
            f"{stage} {'method=' + method if method else 'preset=' + preset}: the rules of thumb would take {how},"
            f" since {why}"
        )
    return found


def of_stage(stage: str, config, kind: str | None, data, parameters: int) -> list[str]:
    """As :func:`advice`, of an opened dataset."""
    if kind not in KINDS:
        return []
    split = getattr(config, "split", "train")
    return advice(
        stage, config, facts_in(data, split if split in (data.manifest.get("splits") or {}) else None, parameters)
    )


def epochs_advice(config, parameters: int, room: str | os.PathLike) -> str | None:
    """What the models behind every pass take of the disk (``publish_epochs``), float32 or as ``save_dtype`` says, the
    last one besides the published one; ``room``: a directory of that disk. None where none are kept or nothing is known
    of the model.
    """
    if not getattr(config, "publish_epochs", False) or not parameters or config.max_steps is not None:
        return None
    from stages.models.memory import shown

    passes = math.ceil(config.num_train_epochs)
    size = parameters * (2 if config.save_dtype == "bfloat16" else 4)
    if passes < 2:
        return None
    while not Path(room).exists():
        room = Path(room).parent
    return (
        f"publish_epochs keeps the model behind each of {passes} passes, {passes} x {shown(size)} ="
        f" {shown(passes * size)} of disk of which {shown(shutil.disk_usage(room).free)} are free; `posttrain rm` takes"
        " those that were not chosen, save_dtype=bfloat16 halves them, publish_epochs=false (choose_checkpoint=false of"
        " a recipe) keeps the last alone"
    )


def tell(stage) -> None:
    """Say in the log of a training stage what the rules say; on a fresh start only."""
    if (
        stage.spec.roles is None
        or stage.rank != 0
        or "data" not in stage.inputs
        or stage.checkpoints.latest() is not None
    ):
        return
    from stages.models.memory import shape_of

    data, shape = stage.dataset("data"), shape_of(stage.path("model"))
    parameters = shape.parameters if shape else 0
    kept = epochs_advice(stage.config, parameters, stage.workdir)
    for text in [*of_stage(stage.name, stage.config, data.kind, data, parameters), *([kept] if kept else [])]:
        stage.log("advice: " + text)


def run(stage):
    from dataclasses import asdict

    from stages.models.memory import shape_of
    from stages.reporting.reports import document, facts as listed
    from stages.spec import ConfigError
    from storage.schema import complete_row

    data = stage.dataset("data")
    counts = data.manifest.get("splits") or {}
    if stage.config.split not in counts:
        raise ConfigError(
            f"advise: the data has no split {stage.config.split!r} (splits: {', '.join(counts) or 'none'}); write"
            " split=NAME"
        )
    shape = shape_of(stage.path("model")) if stage.has("model") else None
    facts = facts_in(data, stage.config.split, shape.parameters if shape else 0)
    wanted, told = method_for(facts), [text for text in (preferred_advice(facts), size_advice(facts)) if text]
    if wanted:
        told.insert(0, f"{wanted[0]}, since {wanted[1]}")
    writer = stage.writer("advice", "text/1")
    writer.write(
        complete_row("text/1", {"text": text}, dataset="advice", source=data.name, origin="conversion", split="train")
        for text in told or ["nothing speaks for or against this data"]
    )
    writer.close({"advice": len(told)})
    stage.summary(
        {**{name: value for name, value in asdict(facts).items()}, "method": wanted[0] if wanted else "none to choose"}
    )
    for text in told:
        stage.log("advice: " + text)
    stage.report(
        "summary",
        markdown=document(f"Advice on {data.name}", listed(asdict(facts)), "\n".join(f"- {text}" for text in told)),
    )
