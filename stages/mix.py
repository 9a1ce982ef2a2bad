"""mix: demonstrations of several sources in given shares, whole tasks held out (``rs.mix``, ``sft.instruct``).

    posttrain stage mix --input data.reasoning=A --input data.general=B --set weights='{reasoning: 3, general: 1}' --set held_out_categories=[translation]

Quotas are by largest remainder, ties to the first source in the order of the labels; rows are drawn once each with the stage's seed and keep their
order. Every row says in ``extra_json.mixed_from`` which source it is from. Rows of the held-out categories are in the split ``test``, whatever their
source, so that instruction tuning is judged on tasks it never saw. Validation and test rows pass through as they are; a training row whose prompt or group is
held out in any source, and a row that an earlier source has, are left out and counted.
"""

from __future__ import annotations

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

    from stages.reports import document, facts
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
    writer = stage.writer("data", "demonstrations/1")
    for name, quota in zip(labels, quotas):
        chosen = sorted(stage.rng("mix", name).permutation(len(sources[name]))[:quota].tolist())
        writer.write([completed(sources[name][i]) for i in chosen])
    writer.write([completed(row) for row in aside])
    writer.close({**{f"rows/{name}": quota for name, quota in zip(labels, quotas)}, "held_out": len(aside),
                  **{f"dropped/{k}": v for k, v in sorted(dropped.items())}})
    summary = {"rows": sum(quotas), "held_out": len(aside), **{f"rows/{name}": quota for name, quota in zip(labels, quotas)},
               **{f"left/{name}": len(sources[name]) - quota for name, quota in zip(labels, quotas)}, **{f"dropped/{k}": v for k, v in sorted(dropped.items())}}
    stage.summary(summary)
    stage.report("summary", markdown=document("Mixture", facts(summary)))


def completed(row: dict) -> dict:
    from storage.schema import complete_row

    return complete_row("demonstrations/1", row, dataset="mix", source=row["source"], origin=row["origin"], split=row["split"])


def unreadable(row: dict, config) -> str | None:
    """Why the trained answers of a row are left out, or None."""
    texts = [row["messages"][i].get("content") or "" for i in row["train_turns"] or range(len(row["messages"])) if row["messages"][i]["role"] == "assistant"]
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
