"""mix: demonstrations, prompts or plain text of several sources in given shares, whole tasks held out (``rs.mix``,
``sft.instruct``, ``data.mixture``).

    posttrain stage mix --input data.reasoning=A --input data.general=B --set weights='{reasoning: 3, general: 1}' --set
    held_out_categories=[translation]
    posttrain stage mix --input data.maths=A --input data.code=B --input data.web=C --set weights='{maths: 56, code: 20, web: 24}'      # plain text, shares of characters

Quotas are by largest remainder, ties to the first source in the order of the labels; rows are drawn once each with the
stage's seed and keep their order. Every row says in ``extra_json.mixed_from`` which source it is from. Rows of the
held-out categories are in the split ``test``, whatever their source, so that instruction tuning is judged on tasks it
never saw. Sources whose solutions end in different styles (a box, ####, "The answer is") are warned of, and rewritten
to one with ``answer_format`` (``data.answer_format``). Validation and test rows pass through as they are, but for those
of a source with weight 0, which is left out; a training row whose prompt or group is held out in any source, and a row
that an earlier source has, are left out and counted. One source alone goes through the same filters.

Prompts are mixed alike; ``label_domains`` writes their source into the column domain, by which rewards are routed
(``reward.domain_route``). Of plain text, whole documents are drawn as long as they fit into their source's share of the
characters; shares that are missed by that are warned of.
"""

from __future__ import annotations

from collections import Counter
from typing import Literal

from pydantic import Field, model_validator

from stages.measures.text import mixed_scripts
from stages.spec import InputSpec, OutputSpec, StageConfig, StageSpec


class Config(StageConfig):
    weights: dict[str, float] = Field(
        default_factory=dict,
        description=(
            "Share of each source by its label, in any unit (R1: reasoning 3, general 1); empty: "
            "their sizes. Of rows; of plain text of characters."
        ),
    )
    total: int | None = Field(
        None,
        ge=1,
        title="Total",
        description=(
            "Training rows of the mixture, of plain text characters; empty: as many as the shares allow without a row"
            " twice."
        ),
    )
    held_out_categories: list[str] = Field(
        default_factory=list,
        description="Tasks (column category) of which no row is trained on: all of them become the split `test`.",
    )
    drop_mixed_languages: bool = Field(
        False,
        description=(
            "Drop answers in which more than a tenth of the letters are of another script than most (R1's "
            "readability filter)."
        ),
    )
    drop_code_blocks: bool = Field(False, description="Drop answers with a ``` block (R1's readability filter).")
    max_paragraph_chars: int | None = Field(
        None,
        ge=1,
        title="Max paragraph chars",
        description="Drop answers with a longer paragraph (R1's readability filter); empty: any length.",
    )

    answer_format: Literal["warn", "boxed", "hash", "phrase", "answer_tag"] = Field(
        "warn",
        description=(
            "Sources whose worked solutions end in different styles: say so, or rewrite all to one"
            " (data.answer_format): \\boxed{12}, #### 12, The answer is: 12, <answer>12</answer>. An answer that would"
            " not be read as the same stays as it is, and is counted; weights={NAME: 0} leaves a source out."
        ),
    )
    label_domains: bool = Field(
        False,
        description=(
            "prompts: write the source's label into the column domain, which rewards are routed by (R1's last stage:"
            " reasoning, general)."
        ),
    )

    @model_validator(mode="after")
    def _shares(self):
        if any(w < 0 for w in self.weights.values()) or (self.weights and not sum(self.weights.values())):
            raise ValueError(
                "weights are shares, not below 0 and not all 0; write for example weights={reasoning: 3, general: 1}"
            )
        return self


SPEC = StageSpec(
    name="mix",
    config=Config,
    inputs={
        "data": InputSpec(
            "dataset",
            kinds=("demonstrations/1", "prompts/1", "text/1"),
            many=True,
            doc="Sources of one kind, one label each: data.NAME=REF.",
        )
    },
    outputs={"data": OutputSpec("dataset", doc="The mixture, of the same kind.")},
)

#: Share of its characters below which a source's whole documents are too long for its quota (ours).
SHORT = 0.9
#: Settings that one kind of rows reads.
READ_BY = {
    **dict.fromkeys(
        ("drop_mixed_languages", "drop_code_blocks", "max_paragraph_chars", "answer_format"), ("demonstrations/1",)
    ),
    "label_domains": ("prompts/1",),
    "held_out_categories": ("demonstrations/1", "prompts/1"),
}


def run(stage):
    from stages.spec import ConfigError

    config, labels = stage.config, sorted(stage.many("data"))
    weights = config.weights or dict.fromkeys(labels)
    if set(weights) != set(labels):
        raise ConfigError(
            f"mix: weights name {', '.join(sorted(weights))} and the inputs are"
            f" {', '.join(f'data.{name}' for name in labels)}; give one weight per input"
        )
    datasets = {name: stage.dataset(f"data.{name}" if name else "data") for name in labels}
    kind = kind_of(config, datasets)
    sources, aside, dropped = sorted_out(config, kind, datasets, weights)
    sizes = {name: [len(row["text"]) if kind == "text/1" else 1 for row in rows] for name, rows in sources.items()}
    quotas = quotas_of(config, kind, weights, {name: sum(own) for name, own in sizes.items()}, aside, dropped)
    formats = (
        answer_formats(stage, {name: sources[name] for name, quota in quotas.items() if quota})
        if kind == "demonstrations/1"
        else []
    )
    writer, counted = stage.writer("data", kind), Counter()
    chosen = {name: drawn(stage.rng("mix", name), sizes[name], quota) for name, quota in quotas.items()}
    for name, rows in chosen.items():
        writer.write([completed(kind, in_format(sources[name][i], config, counted)) for i in rows])
    characters = {name: sum(sizes[name][i] for i in rows) for name, rows in chosen.items()}
    taken = {name: len(rows) for name, rows in chosen.items()}
    if not any(taken.values()):
        raise ConfigError(
            "mix: the mixture has no row:"
            f" {'no document fits into its share of' if kind == 'text/1' else 'there is no share of'}"
            f" total={config.total}; write a greater total"
        )
    if kind == "text/1":
        warn_of_missed(stage, characters, quotas)
    writer.write([completed(kind, in_format(row, config, counted)) for row in aside])
    left_out = {f"dropped/{reason}": n for reason, n in sorted(dropped.items())}
    writer.close({**{f"rows/{name}": n for name, n in taken.items()}, "held_out": len(aside), **left_out})
    publish(
        stage,
        {
            "rows": sum(taken.values()),
            "held_out": len(aside),
            **{f"rows/{name}": n for name, n in taken.items()},
            **({f"characters/{name}": n for name, n in characters.items()} if kind == "text/1" else {}),
            **{f"left/{name}": len(sources[name]) - n for name, n in taken.items()},
            **left_out,
            **{f"answer_format/{name}": n for name, n in sorted(counted.items())},
        },
        formats,
    )


def sorted_out(config, kind: str, datasets: dict, weights: dict) -> tuple[dict[str, list[dict]], list[dict], dict]:
    """(training rows of each source, rows of other splits, rows left out by reason), each row with where it is from.

    Raises:
        ConfigError: a category that is to be held out is in no row.
    """
    import json

    from stages.spec import ConfigError

    keys = ("row_id",) if kind == "text/1" else ("prompt_id", "group_id")  # what may be on one side of the splits only
    held_out = {
        row[key]
        for dataset in datasets.values()
        for row in dataset.iter_rows(columns=[*keys, "split", *([] if kind == "text/1" else ["category"])])
        if row["split"] != "train" or row.get("category") in config.held_out_categories
        for key in keys
    } - {None}
    sources, aside, dropped, seen = {name: [] for name in datasets}, [], {}, set()
    for name, dataset in datasets.items():
        for row in dataset.iter_rows():
            row = {
                **row,
                "extra_json": json.dumps(json.loads(row["extra_json"] or "{}") | {"mixed_from": name}, sort_keys=True),
                **({"domain": name} if config.label_domains else {}),
            }
            held = row.get("category") in config.held_out_categories
            split = "test" if held else row["split"]
            reason = (
                "not_kept"
                if row.get("kept") is False
                else unreadable(row, config)
                if kind == "demonstrations/1"
                else None
            )
            if reason is None and split == "train" and {row[key] for key in keys} & held_out:
                reason = "held_out_elsewhere"
            identity = written_as(kind, row, config)
            if reason is None and identity in seen:
                reason = "duplicate_row"
            if reason is None and weights[name] == 0 and split != "train" and not held:
                reason = "weight_0"
            if reason:
                dropped[reason] = dropped.get(reason, 0) + 1
                continue
            if weights[name] != 0 or split != "train":  # what is not taken leaves another source its row
                seen.add(identity)
            (sources[name] if split == "train" else aside).append({**row, "split": split})
    missing = sorted(set(config.held_out_categories) - {row.get("category") for row in aside})
    if missing:
        raise ConfigError(
            f"mix: held_out_categories names {', '.join(missing)}, which no row has; the categories are: "
            f"{', '.join(sorted({r['category'] for rows in [aside, *sources.values()] for r in rows if r['category']})[:20]) or 'none'}"
        )
    return sources, aside, dropped


def quotas_of(config, kind: str, weights: dict, there: dict[str, int], aside: list, dropped: dict) -> dict[str, int]:
    """How many rows (of text: characters) are taken from each source, by its share of the total; ``there``: how many it
    has. ``aside``, ``dropped``: the rows that are no training rows, to say so.

    Raises:
        ConfigError: a source has nothing to take its share from, or less than that.
    """
    from stages.selection import largest_remainder
    from stages.spec import ConfigError

    labels = list(there)
    shares = [there[name] if weights[name] is None else weights[name] for name in labels]
    if lacking := [name for name, share in zip(labels, shares) if share and not there[name]] or labels * (
        not any(there.values())
    ):
        why = "; left out: " + ", ".join(f"{n} {reason}" for reason, n in sorted(dropped.items())) if dropped else ""
        raise ConfigError(
            f"mix: {', '.join(f'data.{name}' if name else 'data' for name in lacking)}"
            f" {'has' if len(lacking) == 1 else 'have'} no training row to take a share from ({len(aside)} rows of all"
            f" sources are in other splits{why}); give another dataset, or weights={{{lacking[0]}: 0}} beside others"
        )
    fits = min(int(there[name] * sum(shares) / share + 1e-9) for name, share in zip(labels, shares) if share)
    quotas = dict(zip(labels, largest_remainder(config.total or fits, shares)))
    for name, quota in quotas.items():
        if quota > there[name]:
            if config.total is None:  # the remainder went to a source that has no row left for it
                quotas[name] = there[name]
                continue
            raise ConfigError(
                f"mix: {quota} of total={config.total} {'characters' if kind == 'text/1' else 'rows'} would come from"
                f" {name!r}, which has {there[name]}; write total={fits} or less, or another weight"
            )
    return quotas


def drawn(rng, sizes: list[int], quota: int) -> list[int]:
    """Rows of a source, in their order, drawn once each until the next would exceed the quota."""
    import numpy as np

    order = rng.permutation(len(sizes))
    filled = np.cumsum([sizes[i] for i in order])
    return sorted(order[: int(np.searchsorted(filled, quota, side="right"))].tolist())


def warn_of_missed(stage, characters: dict[str, int], quotas: dict[str, int]) -> None:
    """Warn of sources whose whole documents leave much of their share of the characters empty."""
    short = [
        f"{name} has {characters[name]} of {quota}"
        for name, quota in quotas.items()
        if characters[name] < SHORT * quota
    ]
    if short:
        stage.warn(
            "shares_missed",
            f"Whole documents are taken until the next does not fit, which misses the shares: {'; '.join(short)}"
            " characters. Write a greater total, or cut long documents before.",
        )


def publish(stage, summary: dict, formats: list[dict]) -> None:
    """What the mixture is of, as numbers and as a page."""
    from stages.reporting.reports import document, facts, markdown_table

    stage.summary(summary)
    stage.report(
        "summary",
        markdown=document(
            "Mixture",
            facts(summary),
            *([("How the sources end their answers", markdown_table(formats))] if formats else []),
        ),
    )


def kind_of(config: Config, datasets: dict) -> str:
    """The kind of all sources.

    Raises:
        ConfigError: they are not of one kind, or a setting is for another.
    """
    from stages.spec import ConfigError

    kinds = {name: dataset.kind for name, dataset in datasets.items()}
    if len(set(kinds.values())) > 1:
        raise ConfigError(
            f"mix: the sources are {' and '.join(f'data.{name} ({kind})' for name, kind in kinds.items())}; give"
            f" sources of one kind: `posttrain stage ingest --input data=FILE --set kind={sorted(kinds.values())[0]}`"
            " makes that of a file, where it can be made of it"
        )
    (kind,) = set(kinds.values())
    for name, readers in READ_BY.items():
        if kind not in readers and getattr(config, name) != Config.model_fields[name].get_default(
            call_default_factory=True
        ):
            raise ConfigError(f"mix: {name} is for {' and '.join(readers)}, and the sources are {kind}; leave it out")
    return kind


def answer_formats(stage, sources: dict[str, list[dict]]) -> list[dict]:
    """How the answers of each source end, a row per source; a warning where they end in more than one style and nobody
    asked for one. A source with rows of several origins (column source) is told apart by them."""
    from stages.verification.answer_format import STYLES, ending_of, style_of

    found: dict[str, Counter] = {}
    for label, rows in sources.items():
        several = len({row["source"] for row in rows}) > 1
        for row in rows:
            where = found.setdefault(f"{label or 'data'}/{row['source']}" if several else label or "data", Counter())
            where.update([getattr(ending_of(text), "style", None) for text in answers_of(row)[-1:]])
    styles = {name: style_of(endings) for name, endings in found.items()}
    used = sorted({style for own in styles.values() for style in own}, key=STYLES.index)
    if len(used) > 1 and stage.config.answer_format == "warn":
        said = "; ".join(f"{name}: {', '.join(own)}" for name, own in styles.items() if own)
        total = sum(found.values(), Counter())
        stage.warn(
            "answer_formats",
            f"The answers end in {len(used)} styles ({said}), between which a model learns to waver. Write"
            f" answer_format={max(used, key=total.get)} to rewrite them to one, or leave a source out with weights.",
        )
    return [
        {"source": name, **{style: endings[style] for style in STYLES}, "none": endings[None]}
        for name, endings in found.items()
    ]


def in_format(row: dict, config, counted: Counter) -> dict:
    """The row with its trained answers in the style asked for; an answer without a style stays as it is."""
    import json

    from stages.verification.answer_format import ending_of, rewritten

    if config.answer_format == "warn":
        return row
    messages, changed = list(row["messages"]), set()
    for i in trained_turns(row):
        found = ending_of(text := messages[i].get("content") or "")
        new = rewritten(text, config.answer_format) if found else None
        counted[
            (
                "rewritten"
                if new not in (None, text)
                else "none"
                if not found
                else "already"
                if new == text
                else "not_rewritten"
            )
        ] += 1
        if new not in (None, text):
            messages[i] = {**messages[i], "content": new}
            changed.add(found.style)
    if not changed:
        return row
    return {
        **row,
        "messages": messages,
        "extra_json": json.dumps(
            json.loads(row["extra_json"] or "{}") | {"answer_format_was": sorted(changed)}, sort_keys=True
        ),
    }


def written_as(kind: str, row: dict, config) -> str:
    """The row_id that the row has in the mixture: two styles of one answer are one row in one style."""
    from storage.schema import row_id

    return row["row_id"] if config.answer_format == "warn" else row_id(kind, in_format(row, config, Counter()))


def trained_turns(row: dict) -> list[int]:
    """Places of the answers of a row that are trained: all of the assistant's where none is named."""
    return [i for i in row["train_turns"] or range(len(row["messages"])) if row["messages"][i]["role"] == "assistant"]


def answers_of(row: dict) -> list[str]:
    """The texts of a row that are trained."""
    return [row["messages"][i].get("content") or "" for i in trained_turns(row)]


def completed(kind: str, row: dict) -> dict:
    from storage.schema import complete_row

    return complete_row(kind, row, dataset="mix", source=row["source"], origin=row["origin"], split=row["split"])


def unreadable(row: dict, config) -> str | None:
    """Why the trained answers of a row are left out, or None."""
    texts = answers_of(row)
    if config.drop_code_blocks and any("```" in text for text in texts):
        return "code_block"
    if config.max_paragraph_chars is not None and any(
        len(part) > config.max_paragraph_chars for text in texts for part in text.split("\n\n")
    ):
        return "long_paragraph"
    if config.drop_mixed_languages and any(mixed_scripts(text) > 0.1 for text in texts):
        return "mixed_languages"
    return None
