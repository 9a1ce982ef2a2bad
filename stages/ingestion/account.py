"""The end of an ingest run: its account (every row read is kept or in quarantine), what it warns of, its report, and
when it fails.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from stages.harness import StageFailure
from stages.ingestion import agreement, rules
from stages.ingestion.counts import LONG_PROMPT
from stages.ingestion.pairing import lambda_band

if TYPE_CHECKING:
    from stages.ingestion.pipeline import Ingestion


def conclude(run: Ingestion) -> None:
    """Close the outputs with the account of the run, tell summary, warnings and report, and only then fail where the
    data is no good.

    Raises:
        StageFailure: no rows, step labels of two meanings, or more damaged rows than `max_quarantine_fraction`.
    """
    stage, counts = run.stage, run.counts
    account, agreed = _account(run)
    splits = run.data.close(account)["splits"]
    run.quarantine.close({"rows": counts.rows_quarantined, "codes": account["codes"]})
    stage.summary(
        {
            "rows_in": counts.rows_in,
            "rows_kept": counts.rows_kept,
            "rows_quarantined": counts.rows_quarantined,
            "rows_out": counts.rows_out,
        }
        | {f"split.{name}": n for name, n in splits.items()}
        | {f"quarantine.{code}": n for code, n in account["codes"].items()}
        | {f"dropped.{reason}": n for reason, n in sorted(counts.dropped.items())}
        | ({"ids_shared": counts.ids_shared} if counts.ids_shared else {})
        | {f"reasoning.{name}": n for name, n in sorted(counts.reasoning.items())}
        | {f"bias.{name}": value for name, value in account.get("bias", {}).items()}
        | {f"decontamination.{name}": value for name, value in account.get("decontamination", {}).items()}
        | {f"agreement.{name}": value for name, value in account.get("agreement", {}).items() if value is not None}
    )
    for text in agreement.warnings(agreed):
        stage.warn("agreement", text)
    _warn(run, account)
    stage.report(
        "ingest",
        markdown=_markdown(run, account),
        table=[
            {
                "code": code,
                "rows": n,
                "meaning": rules.CODES.get(code, ""),
                "first": _places(counts.samples.get(code, [])),
            }
            for code, n in account["codes"].items()
        ]
        or [{"code": "", "rows": 0, "meaning": "nothing was refused", "first": ""}],
    )
    _refuse(run, account)


def _account(run: Ingestion) -> tuple[dict[str, Any], dict]:
    """(what the manifest says of the rows, agreement of annotators by slice)."""
    counts = run.counts
    if counts.rows_in != counts.rows_kept + counts.rows_quarantined:
        raise AssertionError(
            f"rows do not add up: {counts.rows_in} in, {counts.rows_kept} kept, {counts.rows_quarantined} quarantined"
        )
    account: dict[str, Any] = {
        "rows_in": counts.rows_in,
        "rows_kept": counts.rows_kept,
        "rows_quarantined": counts.rows_quarantined,
        "rows_out": counts.rows_out,
        "codes": dict(sorted(counts.codes.items())),
        "formats": counts.formats,
        "damaged_files": counts.damaged_files,
        **({"splits_of_files": run.splits.of_files} if run.splits.of_files else {}),
        "conversion": {
            "from": dict(sorted(counts.native.items())),
            "to": run.kind,
            "rows_in": counts.rows_kept,
            "rows_out": counts.rows_out,
            "dropped": dict(sorted(counts.dropped.items())),
        },
    }
    if counts.labels:
        account["labels"] = dict(sorted(counts.labels.items()))
    if counts.ids_shared:
        account["ids_shared"] = counts.ids_shared
    if counts.reasoning:
        account["reasoning"] = dict(sorted(counts.reasoning.items()))
    bias = run.bias.report()
    if bias:
        account["bias"] = bias
        account["prefixes"] = run.bias.prefix_bias()
    if run.benchmarks is not None:
        account["decontamination"] = run.benchmarks.report()
    agreed = agreement.agreement(run.seen.labels())
    if agreed:
        account["agreement"] = agreed["all", ""]
        run.stage.report(
            "agreement", table=[{"slice": part, "value": value, **found} for (part, value), found in agreed.items()]
        )
    return account, agreed


def _too_damaged(run: Ingestion) -> bool:
    counts = run.counts
    return bool(counts.rows_in) and counts.rows_damaged / counts.rows_in > run.config.max_quarantine_fraction


def _refuse(run: Ingestion, account: dict[str, Any]) -> None:
    counts, config = run.counts, run.config
    if not counts.rows_in and run.input.files:
        raise StageFailure(
            f"{', '.join(Path(file.path).name for file in run.input.files[:3])}"
            f" {'hold' if len(run.input.files) > 1 else 'holds'} no rows; give a file with data"
        )
    unclear = [source for source, found in counts.steps.items() if 0 in found and -1 not in found]
    if unclear and config.step_labels == "auto":
        raise StageFailure(
            f"the step labels of {', '.join(unclear[:3])} are 0 and 1 and never -1: write step_labels=zero_one if 0 is"
            " a wrong step, or step_labels=minus_one if 0 is a neutral one"
        )
    if _too_damaged(run):
        worst = sorted(account["codes"].items(), key=lambda item: (-item[1], item[0]))[:5]
        hint = " " + run.input.columns_hint() if "missing_column" in account["codes"] and run.input.files else ""
        if worst[0][0] == "invalid_utf8":
            hint += " A file in another encoding can be rewritten: iconv -f latin1 -t utf-8 FILE > NEW (or -f utf-16)."
        if worst[0][0] == "parse_error" and any(file.format == "jsonl" for file in run.input.files):
            hint += (
                " Every line has to be one JSON object; JSON over several lines, or several objects in one, can be"
                " rewritten: jq -c . FILE > NEW.jsonl."
            )
        if worst[0][0] == "duplicate_row":
            hint += " max_quarantine_fraction=1 takes the first of each; deduplicate=off keeps all."
        hint += "".join(
            f" {code}: {rules.CODES[code]}."
            for code, _ in worst
            if code
            in (
                "scale_unknown",
                "label_unsaid",
                "orphan_message",
                "verifier_spec_invalid",
                "bad_label",
                "wrong_type",
                "contradicts_row",
            )
        )
        hint += "".join(f" {name}: {damage}." for name, damage in list(counts.damaged_files.items())[:3])
        if first := counts.first.get(worst[0][0]):
            hint += f" The first with {worst[0][0]}: {first}"
        raise StageFailure(
            f"{counts.rows_damaged} of {counts.rows_in} rows ({counts.rows_damaged / counts.rows_in:.1%}) were refused,"
            f" more than max_quarantine_fraction={config.max_quarantine_fraction}: "
            + ", ".join(f"{n} {code} (first at {_places(counts.samples[code][:1])})" for code, n in worst)
            + f". See them: posttrain show {run.quarantine.path}. Repair the data, choose another format or column_map,"
            f" or raise max_quarantine_fraction.{hint}"
        )


def _warn(run: Ingestion, account: dict[str, Any]) -> None:
    stage, counts = run.stage, run.counts
    if not counts.rows_in:
        stage.warn("no_rows", "the input holds no rows; the dataset is empty. Give a file with rows")
    elif not counts.rows_out:
        stage.warn(
            "no_rows",
            "no row was left; the dataset is empty (see the quarantine codes and dropped reasons). Mend the rows, or write another format or column_map",
        )
    if counts.rows_quarantined:
        unknown = any(warning["code"] == "unknown_format" for warning in stage.warnings)
        stage.warn(
            "quarantined",
            f"{counts.rows_quarantined} of {counts.rows_in} rows were refused: "
            + ", ".join(f"{n} {code}" for code, n in account["codes"].items())
            # where the stage fails, the error says it
            + (f". {run.input.columns_hint()}" if unknown and not _too_damaged(run) else "")
            + ". Look at why (posttrain show of the output quarantine), and mend those that are meant to be there",
        )
    if near := run.input.misread():
        from stages.ingestion.formats import SYNONYMS

        column, known = next(iter(near.items()))
        known = next((ours for ours, others in SYNONYMS.items() if known in others), known)
        told = ", ".join(f"{name} (did you mean {like!r}?)" for name, like in near.items())
        stage.warn(
            "column_unread",
            f"the rows were read as {run.kind}, without the columns {told}, which stay in extra_json. If they were meant,"
            f" rename them, or write column_map='{{{known}: {column}}}'",
        )
    if counts.ids_shared:
        source, line, name = counts.id_shared
        stage.warn(
            "ids_shared",
            f"{counts.ids_shared} rows have the id of an earlier row of their file and were kept: only rows that say"
            f" the same are duplicates (the first at {source}:{line}, id {name!r}). Where a later row is meant to replace"
            " an earlier one, leave the earlier one out of the file.",
        )
    if counts.cut_prompts:
        stage.warn(
            "prompt_in_two_splits",
            f"{counts.cut_prompts} rows have a prompt that is also in another split, because the data's own column"
            " group_id or its own splits say so. Write group_by=opening to split by prompt whatever that column says, and"
            " decontaminate=coverage with benchmarks.NAME=FILE to take out rows of training files that are also in the test"
            " files",
        )
    if run.near is not None and run.near.group and run.near.clusters() and (run.splits.all_in is None):
        stage.warn(
            "near_groups",
            f"{run.near.clusters()} groups of near-duplicate prompts were kept together in this input only: another"
            " file with one of these prompts may have it in another split; ingest them as one input",
        )
    if run.benchmark_skips:
        stage.warn(
            "benchmark_rows_skipped",
            "rows of evaluation sets in which no prompt could be read, and which are not looked for: "
            + ", ".join(f"{n} of {name}" for name, n in run.benchmark_skips.items())
            + ". Rename the column of their questions to prompt, or leave these rows out",
        )
    splits = (
        sorted({source.name.split("/")[0] for source in run.input.files if "/" in source.name})
        if (Path(run.input.path) / "dataset_dict.json").exists()
        else []
    )
    if len(splits) > 1 and not run.splits.of_files:
        stage.warn(
            "splits_joined",
            f"the splits {', '.join(splits)} of the saved dataset were read as one set of rows; write"
            f" files='{splits[-1]}/*' to read one of them",
        )
    for text in run.bias.warnings():
        stage.warn("bias", text)
    if counts.reasoning.get("left"):
        stage.warn(
            "reasoning_left_out",
            f"{counts.reasoning['left']} assistant messages have reasoning in a field of its own that is not trained:"
            " it stays in extra_json. "
            + (
                "Ingest with reasoning=think to write it before their text."
                if run.config.reasoning == "drop"
                else "It, or their content, is no text; write it as text to train on it."
            ),
        )
    for form, n in counts.answers_left.items():
        stage.warn(
            "answers_left",
            f"{n} of {counts.rows_in} rows have answers, as rows of format={form} have them: they stay in extra_json,"
            f" since most rows have none and the file was taken for prompts. Ingest with format={form}, which refuses"
            " the rows without answers, or write format=prompts if prompts are what is wanted",
        )
    if counts.scores_against:
        stage.warn(
            "scores_against",
            f"{counts.scores_against} pairs have a higher score for the rejected answer: are these costs, or are chosen"
            " and rejected swapped? Where they are, write chosen_column=rejected rejected_column=chosen",
        )
    if counts.long_prompts:
        stage.warn(
            "very_long_prompt",
            f"{counts.long_prompts} prompts have more than {LONG_PROMPT} characters: stages leave out or cut what does"
            f" not fit (max_length, max_prompt_length). Write max_chars={LONG_PROMPT} to refuse such rows here.",
        )
    if run.kind == "demonstrations/1" and counts.native.get("pairs/1"):
        stage.warn(
            "chosen_only",
            "demonstrations were made of chosen answers only: training on them also raises the likelihood of "
            "rejected answers, which resemble them. Watch both with the input pairs of stage sft, or train on pairs (align)",
        )
    if run.kind == "unpaired/1" and counts.labels:
        band = lambda_band(counts.labels.get("desirable", 0), counts.labels.get("undesirable", 0))
        if band is None or not band[1]:
            stage.warn("one_class", "all labels are the same; KTO and BCO need both: add rows of the other label")
        elif not band[0] <= 1 <= band[1]:
            stage.warn(
                "class_balance",
                f"with lambda_U = 1, lambda_D should lie in [{band[0]:.3g}, {band[1]:.3g}]: write"
                f" options.desirable_weight={band[0]:.3g} for align method=kto",
            )
    rate = account.get("decontamination", {}).get("contamination_rate", 0)
    if rate > 0.02:
        stage.warn(
            "contamination",
            f"{rate:.1%} of the evaluation items overlap with this data (more than 2%). The rows that overlap are in"
            " quarantine; decide whether to use the others, or leave these benchmarks out of the evaluation.",
        )


def _markdown(run: Ingestion, account: dict[str, Any]) -> str:
    lines = [
        f"# Ingest: {run.input.name} as {run.kind}",
        "",
        (
            f"{account['rows_in']} rows read = {account['rows_kept']} kept + {account['rows_quarantined']} quarantined;"
            f" {account['rows_out']} rows written."
        ),
        "",
    ]
    if account["codes"]:
        lines += ["| code | rows | first at | meaning |", "|---|---|---|---|"]
        lines += [
            f"| {code} | {n} | {_places(run.counts.samples.get(code, []))} | {rules.CODES.get(code, '')} |"
            for code, n in account["codes"].items()
        ] + [""]
    if run.counts.ids_shared:
        source, line, name = run.counts.id_shared
        lines += [
            f"{run.counts.ids_shared} rows were kept whose id an earlier row of their file has (first at {source}:{line},"
            f" id {name!r}).",
            "",
        ]
    if run.splits.of_files:
        lines += [
            "Splits that files say: " + ", ".join(f"{name} = {split}" for name, split in run.splits.of_files.items()),
            "",
        ]
    if account["conversion"]["dropped"]:
        lines += [
            "Dropped by the conversion: "
            + ", ".join(f"{n} {reason}" for reason, n in account["conversion"]["dropped"].items()),
            "",
        ]
    for title, values in (
        ("Preference bias", account.get("bias")),
        ("Decontamination", account.get("decontamination")),
        ("Agreement of annotators", account.get("agreement")),
    ):
        if values:
            lines += [
                f"## {title}",
                "",
                "| | |",
                "|---|---|",
                *(f"| {k} | {v:.4g} |" if isinstance(v, float) else f"| {k} | {v} |" for k, v in values.items()),
                "",
            ]
    if account.get("prefixes"):
        lines += [
            "Beginnings of answers that tell chosen from rejected ones:",
            "",
            "| beginning | chosen | rejected | log-odds | z |",
            "|---|---|---|---|---|",
            *(
                f"| {row['prefix'].replace('|', chr(92) + '|')} | {row['chosen']} | {row['rejected']} |"
                f" {row['log_odds_ratio']:.3g} | {row['z']:.3g} |"
                for row in account["prefixes"]
            ),
            "",
        ]
    return "\n".join(lines)


def _places(samples: list) -> str:
    return ", ".join(f"{source}:{line}" for source, line in samples)
