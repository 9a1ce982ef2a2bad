"""The card of an exported model or dataset: README.md as Hugging Face reads it, written from the stage records behind
it.

What it says is what the records say: the stages in the order they ran, with their settings, data and numbers; the
evaluations of the model, each with the hash of its protocol (numbers under different hashes do not compare); the
versions it was made with; and how to make it again. Folders of the machine it was made on are left out: what came from
outside is named by its last part and the digest of its content.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from storage import lineage, records, store
from storage.files import read_json

#: Ends of architectures' names -> the class of transformers that loads them.
LOADERS = {
    "ForCausalLM": "AutoModelForCausalLM",
    "LMHeadModel": "AutoModelForCausalLM",
    "ForSequenceClassification": "AutoModelForSequenceClassification",
}


def _scoring(path: Path) -> str:
    """How transformers alone scores an answer as this project does; nothing for a model without a chat template."""
    if not (path / "chat_template.jinja").exists():
        return ""
    bias = read_json(path / "reward_calibration.json", {}).get("bias") or 0
    return """
messages = [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]
text = tokenizer.apply_chat_template(messages, tokenize=False)
text = text.rstrip()  # the score is read at the stop token, not at the line break that templates write behind it
score = model(**tokenizer(text, add_special_tokens=False, return_tensors="pt")).logits""" + (
        f" + {bias!r}  # the bias of reward_calibration.json\n" if bias else "\n"
    )


def model_card(ref: str) -> str:
    """Markdown with a YAML header. Raises StoreError when no model is known by that name."""
    found = store.resolve(ref, "model")
    tree = lineage.tree(found.ref)
    steps, outside = [], {}
    _walk(tree, steps, outside)
    maker = records.makers_of(found.digest)
    role = (
        next(
            (o.get("role") for o in (maker[0]["outputs"].values() if maker else ()) if o["digest"] == found.digest),
            None,
        )
        or "policy"
    )
    header = {
        "library_name": "transformers",
        "tags": sorted({"posttrain", *(node["stage"] for node in steps if node["kind"] == "model")}),
    }
    if role == "policy":
        header["pipeline_tag"] = "text-generation"
    bases = sorted({_hub_id(node) for node in outside.values() if node["kind"] == "model"} - {""})
    if bases:
        header["base_model"] = bases if len(bases) > 1 else bases[0]
    names = tree.get("names") or []
    text = [
        f"---\n{yaml.safe_dump(header, sort_keys=False)}---\n",
        f"# {names[0].split(' ')[0].removeprefix('model:') if names else found.ref.removeprefix('model:')}\n",
        f"A {role} model, `{found.ref}`, content digest `{found.digest}`."
        + (f" Registered as {', '.join(names)}." if names else "")
        + "\n",
    ]
    loader = next(
        (
            auto
            for end, auto in LOADERS.items()
            for name in read_json(Path(found.path) / "config.json", {}).get("architectures") or ()
            if name.endswith(end)
        ),
        None,
    )
    if loader:
        text.append(
            f"```python\nfrom transformers import AutoTokenizer, {loader}\n\ntokenizer ="
            f" AutoTokenizer.from_pretrained(DIRECTORY)\nmodel = {loader}.from_pretrained(DIRECTORY)\n"
            + (_scoring(Path(found.path)) if loader.endswith("SequenceClassification") else "")
            + "```\n"
        )
    text += _evaluations(found.digest)
    text += _made(steps)
    if maker:
        text.append(
            "## Versions\n\n"
            + ", ".join(f"{name} {version}" for name, version in sorted(maker[0]["versions"].items()))
            + "\n"
        )
        text.append(
            "The same bytes again, on the same kind of machine with the inputs named above: `posttrain rerun"
            f" {found.ref}`.\n"
        )
    return "\n".join(text)


def dataset_card(ref: str) -> str:
    """Markdown with a YAML header that says which of the exported files (:meth:`storage.datasets.Dataset.export`) are
    which split. Raises StoreError when no dataset is known by that name.
    """
    from storage.datasets import open_dataset

    found = store.resolve(ref, "dataset")
    data, tree, steps, outside = open_dataset(found.path), lineage.tree(found.ref), [], {}
    _walk(tree, steps, outside)
    splits = data.manifest["splits"] or {"train": data.num_rows}
    header = {
        "tags": sorted(
            {
                "posttrain",
                data.kind.replace("/", "-"),
                *(node["stage"] for node in steps if node["digest"] == found.digest),
            }
        ),
        "configs": [
            {
                "config_name": "default",
                "data_files": [{"split": split, "path": f"data/{split}-*.parquet"} for split in splits],
            }
        ],
    }
    text = [
        f"---\n{yaml.safe_dump(header, sort_keys=False)}---\n",
        f"# {data.name}\n",
        f"Rows of the form `{data.kind}`, `{found.ref}`, content digest `{found.digest}`: "
        + ", ".join(f"{count} {split}" for split, count in splits.items())
        + ".\n",
        "```python\nfrom datasets import load_dataset\n\ndata = load_dataset(DIRECTORY_OR_REPOSITORY)\n```\n",
        "## Columns\n",
        ", ".join(f"`{column.name}` ({column.type})" for column in data.schema) + "\n",
        *_made(steps),
    ]
    if steps:
        text.append(
            "The same bytes again, on the same kind of machine with the inputs named above: `posttrain rerun"
            f" {found.ref}`.\n"
        )
    return "\n".join(text)


def _made(steps: list[dict[str, Any]]) -> list[str]:
    """The stages behind something, in the order they ran."""
    text = ["## How it was made\n"] if steps else []
    for n, node in enumerate(steps, 1):
        text.append(
            f"### {n}. {node['label'] or node['stage']}"
            + (f" (stage {node['stage']})" if node["label"] not in ("", node["stage"]) else "")
            + "\n"
        )
        text += [f"- {name}: {_named(one)}" for name, one in node["inputs"].items()]
        text.append(
            f"- seed {node['seed']}, stage key `{node['key'][:16]}`"
            + (f", code {node['git'][:12]}" if node["git"] else "")
        )
        text.append(
            "- settings: "
            + ", ".join(
                f"`{key}={value}`" for key, value in lineage.flat(node["config"]) if value not in (None, "", [], {})
            )
        )
        numbers = [f"{key} {value:.4g}" for key, value in sorted(_numbers(node["metrics"]).items())]
        text.append(("- numbers: " + ", ".join(numbers) if numbers else "- no numbers") + "\n")
    return text


def _walk(node: dict[str, Any], steps: list, outside: dict) -> None:
    """Stages behind a node in the order they can run, each once; what came from outside by digest."""
    for child in node.get("inputs", {}).values():
        _walk(child, steps, outside)
    if node.get("again"):
        return
    if node.get("stage"):
        steps.append(node)
    elif node["kind"] in ("model", "dataset"):
        outside[node["digest"]] = node


def _is_path(ref: str) -> bool:
    return Path(ref).exists() or ref.startswith(("/", ".", "~"))


def _outside(node: dict[str, Any]) -> str:
    """A hub id as it is; of a path its last part."""
    return Path(node["ref"]).name if _is_path(node["ref"]) else node["ref"]


def _hub_id(node: dict[str, Any]) -> str:
    """The id without its commit, since the Hub takes nothing else as a base_model; empty for what lies on a disk."""
    return "" if _is_path(node["ref"]) else node["ref"].partition("@")[0]


def _named(node: dict[str, Any]) -> str:
    return f"`{node['ref'] if node.get('stage') else _outside(node)}` (digest `{node['digest'][:16]}`)"


def _numbers(metrics: dict[str, Any]) -> dict[str, float]:
    return {
        name: value
        for name, value in metrics.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool)
    }


def _evaluations(digest: str) -> list[str]:
    """Rows of the evaluations of a model, those under one protocol side by side in time."""
    rows = []
    for record in reversed(records.evaluations_of(digest)):
        numbers = _numbers(record["metrics"])
        data = record["metrics"].get("benchmark") or next(
            (
                _outside(one).split("@")[0].removeprefix("dataset:")
                for one in record["inputs"].values()
                if one["kind"] == "dataset"
            ),
            "",
        )
        counts = _counts(record)
        for name, value in sorted(numbers.items()):
            bounds = [numbers.get(f"{name}_{end}") for end in ("low", "high")]
            if not re.search("_(low|high|se)$", name) or name.rpartition("_")[0] not in numbers:
                interval = f"{bounds[0]:.4g} to {bounds[1]:.4g}" if None not in bounds else ""
                rows.append(
                    f"| {name} | {value:.4g} | {interval} | {counts.get(name, '')} | {data} |"
                    f" `{record['metrics'].get('protocol_hash', '')}` |"
                )
    return (
        [
            "## Evaluations\n",
            (
                "Numbers compare with those under the same protocol hash; n is what a number is over: prompts, pairs,"
                " answers or texts.\n"
            ),
            "| metric | value | 95% | n | data | protocol |\n|---|---|---|---|---|---|",
            *rows,
            "",
        ]
        if rows
        else []
    )


def _counts(record: dict[str, Any]) -> dict[str, int]:
    """What each metric of an evaluation is over, from its scores; {} where they are gone."""
    from storage.datasets import DatasetError, open_dataset

    try:
        return {
            row["metric"]: row["n"]
            for row in open_dataset(record["outputs"]["scores"]["path"]).iter_rows(columns=["metric", "n"])
        }
    except (DatasetError, KeyError):
        return {}
