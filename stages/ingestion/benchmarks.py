"""The evaluation sets that `decontaminate` keeps out of training data, as an index of what they ask."""

from __future__ import annotations

from stages.ingest import Config
from stages.ingestion import conversions, rules
from stages.ingestion.curation import DecontaminationIndex
from stages.ingestion.formats import _ASKED, Adapter
from stages.ingestion.input_data import parsed
from stages.ingestion.published import adapter_of
from stages.ingestion.rules import Bad, user_turns
from stages.ingestion.sources import Reading, SourceError, find_files
from stages.spec import ConfigError
from stages.verification.choices import question_of


def benchmark_index(stage) -> tuple[DecontaminationIndex | None, dict[str, int]]:
    """(index of the inputs `benchmarks`, or None with decontaminate=off; {benchmark/file: rows in which no prompt could
    be read}).
    """
    config, given = stage.config, stage.many("benchmarks")
    if config.decontaminate == "off":
        return None, {}
    if not given:
        raise ConfigError(
            "stage ingest: decontaminate needs evaluation sets; give benchmarks.NAME=PATH for each, or set"
            " decontaminate=off"
        )
    index = DecontaminationIndex(config.decontaminate_n, config.decontaminate, config.decontaminate_threshold)
    skips = {}
    for label, item in given.items():
        try:
            files = find_files(item.path)
        except SourceError as error:
            raise ConfigError(f"stage ingest, input benchmarks.{label}: {error}") from None
        for source in files:
            adapter = adapter_of(source, Config(kind="prompts/1"))
            before, skipped = len(index), 0
            for record in adapter.records(Reading(source)) if adapter else Reading(source):
                row = parsed(record)
                texts = asked_of(row, adapter) if row is not None else []
                for turn, text in enumerate(texts):
                    index.add(text, later=turn > 0)
                skipped += not texts
            if len(index) == before:
                raise ConfigError(
                    f"stage ingest, input benchmarks.{label}: no readable prompt was found in {source.name}; give files"
                    " with a prompt, question, instruction, problem or text column (a pattern such as DIR/*.jsonl"
                    " picks some of a directory)"
                )
            if skipped:
                skips[f"{label}/{source.name}"] = skipped
    return index, skips


def asked_of(row: dict, adapter: Adapter | None) -> list[str]:
    """What a row of an evaluation set asks, turn by turn: its turns, what the adapter makes of it, or the text of the
    column that looks like it.
    """
    turns = row.get("turns")
    if isinstance(turns, list) and (texts := [text for text in turns if isinstance(text, str) and text.strip()]):
        return texts
    texts: list[str] = []
    try:
        kind, native, _ = adapter(row) if adapter is not None else ("text/1", {"text": ""}, None)
        texts = [native["text"]] if kind == "text/1" else user_turns(conversions.prompt_row(kind, native)["prompt"])
        # asked with other options, it is the same question
        texts = [*texts[:-1], question_of(native)] if native.get("choices") else texts
    except (Bad, RecursionError, OverflowError):
        pass
    for name in ("prompt", *_ASKED, "text", "messages"):
        if any(text.strip() for text in texts):
            break
        value = row.get(name)
        texts = (
            [value]
            if isinstance(value, str)
            else (
                [
                    text
                    for item in value
                    if isinstance(item, dict) and item.get("role") in ("user", None)
                    for text in rules.texts_of(item.get("content"))
                ]
                if isinstance(value, list)
                else []
            )
        )
    return [text for text in texts if text.strip()]
