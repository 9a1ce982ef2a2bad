"""posttrain export of datasets, and --push of both kinds to a server that speaks the Hub's interface."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.evaluation.conftest import tiny  # noqa: F401
from tests.hub_server import READS_ONLY, TOKEN, hub_server
from tests.platform.test_costs import command
from storage import datasets, store


@pytest.fixture(scope="module")
def made(tmp_path_factory, tiny):  # noqa: F811
    """A home with an ingested dataset and a model trained on it: their refs."""
    root = tmp_path_factory.mktemp("export")
    rows = root / "talk.jsonl"
    rows.write_text("".join('{"prompt": "number %d?", "completion": "it is %d"}\n' % (i, i) for i in range(4000)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("POSTTRAIN_HOME", str(root / "home"))
        data = command("stage", "ingest", "--input", f"data={rows}", "--set", "validation_fraction=0.1")["outputs"][
            "data"
        ]
        model = command(
            "stage",
            "sft",
            "--input",
            f"model={tiny['policy']}",
            "--input",
            f"data={data}",
            "--set",
            "max_steps=1",
            "--set",
            "max_length=64",
            "--set",
            "lora_rank=2",
        )["outputs"]["model"]
        yield {"home": str(root / "home"), "data": data, "model": model, "rows": str(rows)}


@pytest.fixture()
def hub(monkeypatch, made):
    """A hub, and this process with its address and the right token."""
    from huggingface_hub import constants

    with hub_server() as server:
        monkeypatch.setenv("POSTTRAIN_HOME", made["home"])
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # the server speaks the older of the two protocols
        yield server


def test_a_dataset_is_exported_as_parquet_by_split_with_its_lineage(made, tmp_path, monkeypatch):
    import datasets as library

    monkeypatch.setenv("POSTTRAIN_HOME", made["home"])
    monkeypatch.setattr(datasets, "_FILE_BYTES", 2000)  # less than a batch of rows, so that there are several files
    value = command("export", made["data"], tmp_path / "out")
    ours = datasets.open_dataset(store.resolve(made["data"]).path)
    files = sorted(p.relative_to(tmp_path / "out").as_posix() for p in (tmp_path / "out").rglob("*") if p.is_file())
    assert (
        value["files"] == len(files)
        and "data/train-00000.parquet" in files
        and "data/train-00001.parquet" in files
        and "README.md" in files
    )
    found = library.load_dataset(str(tmp_path / "out"), cache_dir=str(tmp_path / "cache"))
    assert {split: part.num_rows for split, part in found.items()} == ours.manifest["splits"] and len(found) > 1
    for split, part in found.items():
        assert part.data.table.cast(ours.schema).combine_chunks().equals(ours.table(split=split).combine_chunks())
    card = (tmp_path / "out/README.md").read_text()
    header = yaml.safe_load(card.split("---")[1])
    assert {"ingest", "posttrain", "demonstrations-1"} <= set(header["tags"]) and [
        one["split"] for one in header["configs"][0]["data_files"]
    ] == list(ours.manifest["splits"])
    assert (
        ours.digest in card
        and "talk.jsonl" in card
        and str(tmp_path) not in card
        and str(Path(made["rows"]).parent) not in card
    )


@pytest.mark.parametrize(
    "arguments,said",
    (
        (("model",), "--push OWNER/NAME"),
        (("model", "--private", "DIR"), "write --push"),
        (("data", "--adapter", "DIR"), "leave them out"),
        (("model", "--push", "name"), "OWNER/NAME"),
        (("model", "--push", "a/b/c"), "OWNER/NAME"),
        (("model", "--push", "me/na me"), "OWNER/NAME"),
    ),
)
def test_what_makes_no_sense_is_refused(arguments, said, made, tmp_path, hub):
    assert said in str(
        command("export", *(made.get(a, str(tmp_path / "no") if a == "DIR" else a) for a in arguments), code=2)
    )
    assert not hub.calls and not (tmp_path / "no").exists()


def test_what_is_there_is_not_written_over(made, tmp_path):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("mine")
    assert "file is a file; name a new" in str(command("export", made["model"], tmp_path / "file", code=2))
    assert "full is not empty; name a new" in str(command("export", made["model"], tmp_path / "full", code=2))
    assert {path.read_text() for path in (tmp_path / "file", tmp_path / "full" / "file")} == {"mine"}


def test_a_model_is_pushed_with_its_card(made, hub, tmp_path):
    value = command("export", made["model"], "--push", "me/policy", "--private")
    repo = hub.repos["model", "me/policy"]
    path = Path(store.resolve(made["model"]).path)
    assert repo["private"] and value["url"].startswith(hub.url) and value["directory"] is None
    stored = {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*") if p.is_file()}
    assert {
        n: d for n, d in repo["files"].items() if n not in ("README.md", ".gitattributes", "tokenizer_config.json")
    } == {n: d for n, d in stored.items() if n != "tokenizer_config.json"}
    # how the tokenizer was loaded where it was trained stays there
    kept, sent = (json.loads(files["tokenizer_config.json"]) for files in (stored, repo["files"]))
    assert "is_local" in kept and "local_files_only" not in kept
    assert sent == {n: value for n, value in kept.items() if n != "is_local"}
    assert made["model"] in repo["commits"][0] and "model.safetensors" in repo["files"]
    card = repo["files"]["README.md"].decode()
    assert "- model: `policy` (digest" in card and "base_model" not in card  # a directory is no model of the hub
    assert not list(Path(made["home"]).glob("export-*"))
    # once more, with a shard that an earlier push left, and one that is its owner's
    repo["files"] |= {"model-00001-of-00002.safetensors": b"old", "notes.txt": b"mine"}
    sent = sum(path.startswith("/storage/") for _, path in hub.calls)
    command("export", made["model"], tmp_path / "out", "--push", "me/policy")
    assert (
        "model-00001-of-00002.safetensors" not in repo["files"]
        and repo["files"]["notes.txt"] == b"mine"
        and len(repo["commits"]) == 2
    )
    assert sum(path.startswith("/storage/") for _, path in hub.calls) == sent  # what is there is not sent again
    assert {str(p.relative_to(tmp_path / "out")) for p in (tmp_path / "out").rglob("*") if p.is_file()} == repo[
        "files"
    ].keys() - {".gitattributes", "notes.txt"}
    for name in ("tokenizer_config.json", "model.safetensors"):
        assert (tmp_path / "out" / name).read_bytes() == repo["files"][name]
    assert path.joinpath("tokenizer_config.json").read_bytes() == stored["tokenizer_config.json"]
    command("export", made["model"], "--adapter", "--push", "me/adapter")
    assert b"is_local" not in hub.repos["model", "me/adapter"]["files"]["tokenizer_config.json"]
    assert {"adapter_config.json", "adapter_model.safetensors", "README.md"} <= hub.repos["model", "me/adapter"][
        "files"
    ].keys() and not hub.repos["model", "me/adapter"]["private"]


def test_the_base_of_a_card_is_a_model_of_the_hub_without_its_commit(made, monkeypatch):
    """The Hub refuses a card whose base_model is a path or has a commit behind its name."""
    from storage import cards, lineage

    monkeypatch.setenv("POSTTRAIN_HOME", made["home"])
    tree = lineage.tree

    def from_the_hub(ref):
        found = json.loads(json.dumps(tree(ref)))
        found["inputs"]["model"]["ref"] = f"Qwen/Qwen3-0.6B@{'0' * 40}"
        return found

    monkeypatch.setattr(lineage, "tree", from_the_hub)
    header = yaml.safe_load(cards.model_card(made["model"]).split("---\n")[1])
    assert header["base_model"] == "Qwen/Qwen3-0.6B"


def test_a_dataset_is_pushed(made, hub):
    command("export", made["data"], "--push", "me/talk")
    files = hub.repos["dataset", "me/talk"]["files"]
    assert {"data/train-00000.parquet", "README.md"} <= files.keys() and files["data/train-00000.parquet"][
        :4
    ] == b"PAR1"


def test_what_the_hub_refuses_is_said(made, hub, monkeypatch, tmp_path):
    from huggingface_hub import constants

    push = ("export", made["model"], tmp_path / "out", "--push", "me/policy")
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    assert "does not accept the token" in str(command(*push, code=2))
    monkeypatch.setenv("HF_TOKEN", READS_ONLY)
    assert "does not let this token write" in str(command(*push, code=2))
    hub.repos["model", "me/policy"] = {"private": False, "files": {}, "commits": []}
    assert "--private would not keep" in str(command(*push, "--private", code=2))
    assert not (tmp_path / "out").exists()  # nothing is copied for a repository that cannot be written to
    assert (
        "does not let this token write" in str(command(*push, code=2))
        and not hub.repos["model", "me/policy"]["commits"]
    )
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert "does not let this token write to theirs/policy" in str(
        command(*push[:2], "--push", "theirs/policy", code=2)
    )
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    assert "no token" in str(command(*push[:2], "--push", "me/other", code=2))
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE" in str(command(*push[:2], "--push", "me/other", code=2))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{taken.getsockname()[1]}")  # nobody listens
        assert "cannot be reached" in str(command(*push[:2], "--push", "me/other", code=2))


def test_the_command_reads_its_environment(made):
    with hub_server() as server:
        environment = {
            **os.environ,
            "POSTTRAIN_HOME": made["home"],
            "HF_ENDPOINT": server.url,
            "HF_TOKEN": TOKEN,
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",
        }
        done = subprocess.run(
            [sys.executable, "-m", "flows.cli", "export", made["data"], "--push", "me/talk", "--private"],
            env=environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        assert f"-> {server.url}/me/talk/commit/1" in done.stdout and server.repos["dataset", "me/talk"]["private"]
        done = subprocess.run(
            [sys.executable, "-m", "flows.cli", "export", made["data"], "--push", "me/talk"],
            env={**environment, "HF_TOKEN": "hf_wrong"},
            capture_output=True,
            text=True,
        )
        assert (
            done.returncode == 2
            and done.stderr.splitlines()[-1].startswith("error: ")
            and "does not accept the token" in done.stderr
        )
