"""mix: demonstrations of several sources in given shares, whole tasks held out (``rs.mix``, ``sft.instruct``).

    posttrain stage mix --input data.reasoning=A --input data.general=B --set weights='{reasoning: 3, general: 1}' --set held_out_categories=[translation]

Quotas are by largest remainder, ties to the first source in the order of the labels; rows are drawn once each with the stage's seed and keep their
order. Every row says in ``extra_json.mixed_from`` which source it is from. Rows of the held-out categories are in the split ``test``, whatever their
source, so that instruction tuning is judged on tasks it never saw. Sources whose solutions end in different styles (a box, ####, "The answer is") are warned of, and
rewritten to one with ``answer_format`` (``data.answer_format``). Validation and test rows pass through as they are; a training row whose prompt or group is
held out in any source, and a row that an earlier source has, are left out and counted.
"""

from __future__ import annotations

from collections import Counter
from typing import Literal

from pydantic import Field, model_validator

from stages.spec import InputSpec, OutputSpec, StageConfig, StageSpec


class Config(StageConfig):
    weights: dict[str, float] = Field(default_factory=dict, description="Share of each source by its label, in any unit (R1: reasoning 3, general 1); empty: "
                                                                        "their sizes.")
    total: int | None = Field(None, ge=1, title="Total", description="Training rows of the mixture; empty: as many as the shares allow without a row twice.")
    held_out_categories: list[str] = Field(default_factory=list, description="Tasks (column category) of which no row is trained on: all of them become the "
                                                                             "split `test`.")
    drop_mixed_languages: bool = Field(False, description="Drop answers in which more than a tenth of the letters are of another script than most (R1's "
                                                          "readability filter).")
    drop_code_blocks: bool = Field(False, description="Drop answers with a ``` block (R1's readability filter).")
    max_paragraph_chars: int | None = Field(None, ge=1, title="Max paragraph chars", description="Drop answers with a longer paragraph (R1's readability "
                                                                                                 "filter); empty: any length.")

    answer_format: Literal["warn", "boxed", "hash", "phrase", "answer_tag"] = Field(
        "warn", description="Sources whose worked solutions end in different styles: say so, or rewrite all to one (data.answer_format): \\boxed{12}, #### 12, The answer is: 12, "
        "<answer>12</answer>. An answer that would not be read as the same stays as it is, and is counted; weights={NAME: 0} leaves a source out.")

    @model_validator(mode="after")
    def _shares(self):
        if any(w < 0 for w in self.weights.values()) or (self.weights and not sum(self.weights.values())):
            raise ValueError("weights are shares, not below 0 and not all 0; write for example weights={reasoning: 3, general: 1}")
        return self


SPEC = StageSpec(
    name="mix", config=Config,
    inputs={"data": InputSpec("dataset", kinds=("demonstrations/1",), many=True, doc="Sources, one label each: data.NAME=REF.")},
    outputs={"data": OutputSpec("dataset", doc="demonstrations/1: the mixture.")})


def run(stage):
    import json

    from stages.reports import document, facts, markdown_table
    from stages.selection import largest_remainder
    from stages.spec import ConfigError

    config, labels = stage.config, sorted(stage.many("data"))
    weights = config.weights or dict.fromkeys(labels)
    if set(weights) != set(labels):
        raise ConfigError(f"mix: weights name {', '.join(sorted(weights))} and the inputs are {', '.join(f'data.{name}' for name in labels)}; give one weight "
                          f"per input")
    sources, dropped, aside, seen = {name: [] for name in labels}, {}, [], set()
    datasets = {name: stage.dataset(f"data.{name}" if name else "data") for name in labels}
    columns = ["prompt_id", "group_id", "split", "category"]
    held_out = {row[key] for dataset in datasets.values() for row in dataset.iter_rows(columns=columns) if row["split"] != "train" or
                row["category"] in config.held_out_categories for key in ("prompt_id", "group_id")} - {None}
    for name in labels:
        for row in datasets[name].iter_rows():
            row = {**row, "extra_json": json.dumps(json.loads(row["extra_json"] or "{}") | {"mixed_from": name}, sort_keys=True)}
            split = "test" if row["category"] in config.held_out_categories else row["split"]
            reason = "not_kept" if row["kept"] is False else unreadable(row, config)
            if reason is None and split == "train" and {row["prompt_id"], row["group_id"]} & held_out:
                reason = "held_out_elsewhere"
            if reason is None and row["row_id"] in seen:
                reason = "duplicate_row"
            if reason:
                dropped[reason] = dropped.get(reason, 0) + 1
                continue
            seen.add(row["row_id"])
            (sources[name] if split == "train" else aside).append({**row, "split": split})
    missing = sorted(set(config.held_out_categories) - {row["category"] for row in aside})
    if missing:
        raise ConfigError(f"mix: held_out_categories names {', '.join(missing)}, which no row has; the categories are: "
                          f"{', '.join(sorted({r['category'] for rows in [aside, *sources.values()] for r in rows if r['category']})[:20]) or 'none'}")
    shares = [len(sources[name]) if weights[name] is None else weights[name] for name in labels]
    fits = min(int(len(sources[name]) * sum(shares) / share + 1e-9) for name, share in zip(labels, shares) if share)
    quotas = largest_remainder(config.total or fits, shares)
    for name, quota in zip(labels, quotas):
        if quota > len(sources[name]):
            if config.total is None:  # the remainder went to a source that has no row left for it
                quotas[labels.index(name)] = len(sources[name])
                continue
            raise ConfigError(f"mix: {quota} of total={config.total} rows would come from {name!r}, which has {len(sources[name])}; write total={fits} or "
                              f"less, or another weight")
    formats, counted = answer_formats(stage, {name: rows for name, rows, quota in zip(labels, (sources[name] for name in labels), quotas) if quota}), Counter()
    writer = stage.writer("data", "demonstrations/1")
    for name, quota in zip(labels, quotas):
        chosen = sorted(stage.rng("mix", name).permutation(len(sources[name]))[:quota].tolist())
        writer.write([completed(in_format(sources[name][i], config, counted)) for i in chosen])
    writer.write([completed(in_format(row, config, counted)) for row in aside])
    writer.close({**{f"rows/{name}": quota for name, quota in zip(labels, quotas)}, "held_out": len(aside),
                  **{f"dropped/{k}": v for k, v in sorted(dropped.items())}})
    summary = {"rows": sum(quotas), "held_out": len(aside), **{f"rows/{name}": quota for name, quota in zip(labels, quotas)},
               **{f"left/{name}": len(sources[name]) - quota for name, quota in zip(labels, quotas)}, **{f"dropped/{k}": v for k, v in sorted(dropped.items())}}
    summary |= {f"answer_format/{name}": n for name, n in sorted(counted.items())}
    stage.summary(summary)
    stage.report("summary", markdown=document("Mixture", facts(summary), ("How the sources end their answers", markdown_table(formats))))


def answer_formats(stage, sources: dict[str, list[dict]]) -> list[dict]:
    """How the answers of each source end, a row per source; a warning where they end in more than one style and nobody asked for one. A source with rows of several origins (column
    source) is told apart by them."""
    from stages.answer_format import STYLES, ending_of, style_of

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
        stage.warn("answer_formats", f"The answers end in {len(used)} styles ({said}), between which a model learns to waver. Write answer_format={max(used, key=total.get)} to rewrite them to "
                   "one, or leave a source out with weights.")
    return [{"source": name, **{style: endings[style] for style in STYLES}, "none": endings[None]} for name, endings in found.items()]


def in_format(row: dict, config, counted: Counter) -> dict:
    """The row with its trained answers in the style asked for; an answer without a style stays as it is."""
    import json

    from stages.answer_format import ending_of, rewritten

    if config.answer_format == "warn":
        return row
    messages, changed = list(row["messages"]), set()
    for i in trained_turns(row):
        found = ending_of(text := messages[i]["content"] or "")
        new = rewritten(text, config.answer_format) if found else None
        counted["rewritten" if new not in (None, text) else "none" if not found else "already" if new == text else "not_rewritten"] += 1
        if new not in (None, text):
            messages[i] = {**messages[i], "content": new}
            changed.add(found.style)
    if not changed:
        return row
    return {**row, "messages": messages, "extra_json": json.dumps(json.loads(row["extra_json"] or "{}") | {"answer_format_was": sorted(changed)}, sort_keys=True)}


def trained_turns(row: dict) -> list[int]:
    """Places of the answers of a row that are trained: all of the assistant's where none is named."""
    return [i for i in row["train_turns"] or range(len(row["messages"])) if row["messages"][i]["role"] == "assistant"]


def answers_of(row: dict) -> list[str]:
    """The texts of a row that are trained."""
    return [row["messages"][i].get("content") or "" for i in trained_turns(row)]


def completed(row: dict) -> dict:
    from storage.schema import complete_row

    return complete_row("demonstrations/1", row, dataset="mix", source=row["source"], origin=row["origin"], split=row["split"])


def unreadable(row: dict, config) -> str | None:
    """Why the trained answers of a row are left out, or None."""
    texts = answers_of(row)
    if config.drop_code_blocks and any("```" in text for text in texts):
        return "code_block"
    if config.max_paragraph_chars is not None and any(len(part) > config.max_paragraph_chars for text in texts for part in text.split("\n\n")):
        return "long_paragraph"
    if config.drop_mixed_languages and any(mixed_scripts(text) > 0.1 for text in texts):
        return "mixed_languages"
    return None


def mixed_scripts(text: str) -> float:
    """Share of the letters that are not of the text's most frequent script (Latin, Cyrillic, CJK ...), by their Unicode names."""
    import unicodedata
    from collections import Counter

    scripts = Counter(unicodedata.name(letter, "?").split()[0] for letter in text if letter.isalpha())
    return 1.0 - max(scripts.values()) / sum(scripts.values()) if scripts else 0.0
