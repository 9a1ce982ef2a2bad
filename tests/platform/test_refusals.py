"""A full disk, a limit on file sizes, a home that may only be read: one sentence, nothing half-published, and the same
command goes on.
"""

import json
import os
import resource
import shutil
import sqlite3
import subprocess
import sys

import pytest

from stages.spec import PROJECT_ROOT, ConfigError
from storage import outbox, records, tracking
from storage.files import refusal
from tasks.run import StageError, prepare, run_stage

TOY = "tests.toy_stage"


@pytest.fixture
def command(tmp_path):
    """``command(home, *arguments, limit=bytes)``: the command line on a home, with a largest file size."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PREFECT_", "MLFLOW_", "POSTTRAIN_"))}
    # a limit would cut .pyc files short, and Python believes them
    env |= {"PYTHONPATH": str(PROJECT_ROOT), "POSTTRAIN_TRACKING": "off", "PYTHONDONTWRITEBYTECODE": "1"}

    def call(home, *arguments, limit=None):
        def hold():
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))

        return subprocess.run(
            [sys.executable, "-m", "flows.cli", *map(str, arguments)],
            env=env | {"POSTTRAIN_HOME": str(home)},
            cwd=PROJECT_ROOT,
            capture_output=True,
            text=True,
            timeout=300,
            preexec_fn=hold if limit else None,
        )

    return call


def test_rows_that_only_stages_make_are_not_looked_for_in_a_file(tmp_path):
    path = tmp_path / "answers.jsonl"
    path.write_text(json.dumps({"prompt": "q", "completion": "a"}) + "\n")
    with pytest.raises(
        ConfigError,
        match=(
            "input candidates of stage rate: .* is raw data, and rows of kind candidates/1 are what a stage makes; give"
            " its output"
        ),
    ):
        prepare("rate", {"candidates": str(path)}, {"endpoint": "http://h/v1", "endpoint_model": "m"})


@pytest.fixture
def pairs(tmp_path):
    path = tmp_path / "pairs.jsonl"
    path.write_text(
        "".join(
            json.dumps(
                {
                    "prompt": f"question {i} " + "why " * (i % 30),
                    "chosen": f"good {i}",
                    "rejected": f"bad {i} " + "x" * (i % 50),
                }
            )
            + "\n"
            for i in range(3000)
        )
    )
    return path


@pytest.fixture
def reference(pairs):
    """The outputs of ingesting the pairs where nothing is in the way."""
    return run_stage("ingest", {"data": str(pairs)}).outputs


@pytest.fixture
def disk(tmp_path):
    """A disk of 4 MiB; ``disk(free)`` fills it but for so many bytes, ``disk(None)`` makes room again."""
    place = tmp_path / "disk"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(place)], capture_output=True).returncode:
        pytest.skip("this user may not mount a small disk")

    def fill(free):
        (place / "ballast").unlink(missing_ok=True)
        if free is not None:
            (place / "ballast").write_bytes(b"0" * (shutil.disk_usage(place).free - free))
        return place / "home"

    yield fill
    subprocess.run(["umount", "-l", str(place)], check=True)


def published(home):
    """Directories of datasets and models that somebody could take for finished ones, and the records."""
    return sorted(
        p.name
        for p in [*home.glob("datasets/*/*/"), *home.glob("models/*/"), *home.glob("records/*.json")]
        if not p.name.startswith(".")
    )


def test_what_the_system_refused_is_said_with_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv("POSTTRAIN_HOME", str(tmp_path))
    with pytest.raises(OSError) as full, open("/dev/full", "wb", buffering=0) as handle:
        handle.write(b"x")
    said = refusal(full.value)
    assert "the disk is full" in said and "MiB free" in said and "posttrain doctor" in said and "same command" in said
    assert "may not be read or written" in refusal(
        PermissionError(13, "Permission denied", "/x/y")
    ) and "/x/y" in refusal(PermissionError(13, "Permission denied", "/x/y"))
    assert "read-only" in refusal(OSError(30, "Read-only file system", "/x/y"))
    # safetensors, tokenizers
    assert "disk is full" in refusal(RuntimeError("I/O error: No space left on device (os error 28)"))
    wrapped = ValueError("could not save")
    wrapped.__cause__ = full.value
    assert "disk is full" in refusal(wrapped)
    for other in (
        ValueError("bad row"),
        FileNotFoundError(2, "No such file", "/x"),
        sqlite3.OperationalError("disk I/O error"),
        KeyError("x"),
    ):
        assert refusal(other) is None


def test_a_file_size_limit_is_one_sentence_and_the_next_call_goes_on(command, pairs, tmp_path, reference):
    arguments = ("stage", "ingest", "--input", f"data={pairs}", "--json")
    for limit in (1, 3000):  # the first small file, the database of the running stage
        failed = command(tmp_path / "limited", *arguments, limit=limit)
        assert failed.returncode == 1 and "ulimit -f" in failed.stderr and "Traceback" not in failed.stderr, (
            failed.stderr
        )
        assert not published(tmp_path / "limited")
    done = command(tmp_path / "limited", *arguments)
    assert json.loads(done.stdout.splitlines()[-1])["outputs"] == reference


@pytest.mark.parametrize("free", [0, 16_000, 40_000, 70_000, 130_000])
def test_a_full_disk_is_one_sentence_and_with_room_the_same_command_goes_on(disk, pairs, reference, free, monkeypatch):
    monkeypatch.setenv("POSTTRAIN_HOME", str(disk(free)))
    with pytest.raises(StageError) as failed:
        run_stage("ingest", {"data": str(pairs)})
    assert "the disk is full" in failed.value.message and "Traceback" not in str(failed.value)
    assert not published(disk(None))
    assert run_stage("ingest", {"data": str(pairs)}).outputs == reference


@pytest.mark.parametrize("files", [3, 12, 22])
def test_a_disk_that_holds_no_more_files_is_told_as_that(disk, reference, pairs, files, monkeypatch):
    """Its room is not what is lacking."""
    home = disk(None)
    subprocess.run(["mount", "-o", f"remount,nr_inodes={files}", str(home.parent)], check=True)
    monkeypatch.setenv("POSTTRAIN_HOME", str(home))
    with pytest.raises(
        StageError,
        match="can hold no more files .* inodes free, though [34].. MiB.*; remove files .*same command again",
    ) as failed:
        run_stage("ingest", {"data": str(pairs)})
    assert "Traceback" not in str(failed.value) and not published(home)
    subprocess.run(["mount", "-o", "remount,nr_inodes=4000", str(home.parent)], check=True)
    assert run_stage("ingest", {"data": str(pairs)}).outputs == reference


def test_a_database_on_a_disk_without_inodes_or_that_may_only_be_read_is_told_as_that(disk, monkeypatch):
    home = disk(None)
    home.mkdir()
    monkeypatch.setenv("POSTTRAIN_HOME", str(home))
    database = sqlite3.connect(home / "a.db", isolation_level=None)
    database.execute("CREATE TABLE t (x)")
    assert refusal(
        sqlite3.OperationalError("unable to open database file")
    ) is None and "may not be read or written" in refusal(
        sqlite3.OperationalError("attempt to write a readonly database")
    )
    # the directory itself, the home, the database, and no journal
    subprocess.run(["mount", "-o", "remount,nr_inodes=4", str(home.parent)], check=True)
    (home / "last").touch()
    with pytest.raises(sqlite3.OperationalError) as failed:
        database.execute("INSERT INTO t VALUES (1)")
    assert "can hold no more files" in refusal(failed.value)
    database.close()
    subprocess.run(["mount", "-o", "remount,ro,nr_inodes=4000", str(home.parent)], check=True)
    with pytest.raises(sqlite3.OperationalError) as failed:
        sqlite3.connect(home / "a.db").execute("INSERT INTO t VALUES (1)")
    assert "read-only file system" in refusal(failed.value) and str(home) in refusal(failed.value)


def test_a_result_that_could_not_be_told_any_more_is_told_as_finished_by_the_next_call(state_dir, monkeypatch):
    """The disk filled, or the process was killed, between the record and the last word to MLflow: the run is not shown
    as killed for ever.
    """
    monkeypatch.setenv("POSTTRAIN_TRACKING", "on")
    monkeypatch.setenv("POSTTRAIN_TRACKING_WAIT_SECONDS", "0")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")  # the outbox is what this is about
    first = run_stage(TOY, {}, {"steps": 3})
    unit = outbox.unit_of(None, "toy", first.key)
    assert outbox.status(unit) == "FINISHED"
    dead = {
        **json.loads(outbox.files_of(unit)[0].read_text()),
        "status": "RUNNING",
        "owner": {"pid": 2**22 - 1, "host": "h"},
    }
    tracking.put(dead)
    again = run_stage(TOY, {}, {"steps": 3})
    assert again.cached and outbox.status(unit) == "FINISHED"
    assert prepare(TOY, {}, {"steps": 3}).key == first.key and records.find(first.key)


def test_a_home_that_may_only_be_read_can_be_looked_at(command, tmp_path):
    home = tmp_path / "home"
    tiny = [
        part
        for kind in ("text", "demonstrations", "comparisons", "prompts")
        for part in ("--set", f"{kind}={{train: 8, validation: 2, test: 2}}")
    ]
    assert command(home, "stage", "world", *tiny).returncode == 0
    if subprocess.run(["mount", "--bind", str(home), str(home)], capture_output=True).returncode:
        pytest.skip("this user may not mount")
    try:
        subprocess.run(["mount", "-o", "remount,ro,bind", str(home)], check=True)
        for arguments in (
            ("ls", "runs"),
            ("ls", "datasets"),
            ("status",),
            ("show", "dataset:world-pairs@latest"),
            ("lineage", "dataset:world-pairs@latest"),
        ):
            looked = command(home, *arguments)
            assert looked.returncode == 0, looked.stderr
        refused = command(home, "stage", "world", *tiny, "--seed", "7")
        assert (
            refused.returncode == 1
            and "read-only file system" in refused.stderr
            and "POSTTRAIN_HOME" in refused.stderr
            and "Traceback" not in refused.stderr
        )
    finally:
        subprocess.run(["umount", "-l", str(home)], check=True)


def test_a_mistyped_model_is_told_at_once_and_not_asked_of_the_hub(monkeypatch):
    """Names like it come first; the hub has only OWNER/NAME, so nobody waits for it."""
    from storage import registry, store

    asked = []
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(
        "huggingface_hub.snapshot_download",
        lambda name, **_: asked.append(name) or (_ for _ in ()).throw(OSError("away")),
    )
    registry.register("base", "ab" * 32)
    for ask in (lambda: store.resolve("bsae", "model"), lambda: store.resolve("bsae")):
        with pytest.raises(store.StoreError, match="^there is no .*'bsae'; did you mean model:base@latest"):
            ask()
    with pytest.raises(store.StoreError, match="^there is no model 'nothere'; write model:"):
        store.resolve("nothere", "model")
    assert asked == []
    with pytest.raises(
        store.StoreError, match=r"fetched from the hub; without network, .*\(the hub's client: OSError: away\)$"
    ):
        store.resolve("owner/nothere", "model")
    assert asked == ["owner/nothere"]


def test_a_bare_word_for_a_model_is_told_the_three_ways_to_name_one(monkeypatch, command, tmp_path):
    """In a home without models it may be an id of the hub, which older models have: model=gpt2."""
    from storage import registry, store

    monkeypatch.setattr(registry, "models", lambda: [])
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **_: (_ for _ in ()).throw(OSError("away")))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    ways = r"model:NAME@champion .*store .*, the path of a model directory .*, or OWNER/NAME .*hub"
    with pytest.raises(
        store.StoreError, match=rf"^there is no model 'small': no path, .*; write {ways}.*OSError: away"
    ):
        store.resolve("small", "model")
    with pytest.raises(store.StoreError, match=rf"^./small does not exist; write {ways}"):
        store.resolve("./small", "model")
    refused = command(tmp_path, "stage", "sft", "--input", "data=d.jsonl", "--set", "model=small")
    assert refused.returncode == 2 and "model is an input of stage sft and no setting; write --input model=" in (
        refused.stderr
    )


def test_typos_are_told_of_briefly(command, tmp_path):
    """A stage or recipe: the names nearest to it, not all; a setting before an input that is still to come."""
    from flows.recipe import get_recipe
    from stages.registry import get_stage
    from stages.spec import ConfigError

    with pytest.raises(ConfigError, match="did you mean 'rejection'.*`posttrain ls stages` lists them$"):
        get_stage("rejektion")
    with pytest.raises(ConfigError, match="did you mean 'preference'.*`posttrain ls recipes` lists them$"):
        get_recipe("prefrence")
    said = command(tmp_path, "stage", "rl", "--set", "lerning_rate=1")
    assert (
        said.returncode == 2
        and said.stderr.strip() == "error: unknown key 'lerning_rate'; did you mean 'learning_rate'?"
    )


def test_a_refusal_of_any_kind_is_wrong_usage(tmp_path):
    """A rubric that does not fit the prompts is said by itself, without a log and the advice to give the same command
    again.
    """
    program = (
        "import os, sys\nfrom stages.running import process\nfrom stages.reward.grape import RubricError\ndef refuse(spec,"
        " emit):\n    raise RubricError('write the category')\nprocess.execute ="
        " refuse\nos.environ['POSTTRAIN_PARENT_PID'] = str(os.getppid())\nsys.exit(process.main(sys.argv[1]))\n"
    )
    (tmp_path / "spec.json").write_text(json.dumps({"stage": TOY}))
    # main changes its process for good
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "spec.json")],
        cwd=PROJECT_ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2, done.stderr
    said = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [(one["type"], one["message"]) for one in said if one["event"] == "error"] == [
        ("ConfigError", "write the category")
    ]


def test_arguments_of_trl_without_a_setting_say_what_takes_their_place():
    from flows.config import build
    from stages.registry import get_stage

    for name, place in {
        "save_total_limit": "checkpoints are kept",
        "push_to_hub": "posttrain export REF --push",
        "seed": "--seed N",
        "log_completions": "every rollout is kept",
    }.items():
        with pytest.raises(ConfigError, match=f"unknown key '{name}'; .*{place}"):
            build(get_stage("rl").SPEC.config, {name: 1})


def test_a_stage_takes_its_seed_as_a_setting_too(command, tmp_path):
    """As in recipes: `--set seed=N` is `--seed N`, and the same stage run."""
    found = [
        json.loads(command(tmp_path, "stage", TOY, *given, "--json").stdout.splitlines()[-1])
        for given in (("--set", "seed=3"), ("--seed", "3"))
    ]
    assert [one["cached"] for one in found] == [False, True] and found[0]["key"] == found[1]["key"]


@pytest.mark.parametrize(
    "stage, config, said",
    [
        ("rejection", {"rewards": [{"kind": "model"}]}, "give reward_model=MODEL_REF"),
        ("rejection", {"rewards": [{"kind": "rubric"}]}, "give rubric=FILE"),
        ("rejection", {"rescore": True}, "give them as candidates.LABEL=REF"),
        ("rl", {"rewards": [{"kind": "model"}]}, "give reward_model=MODEL_REF"),
        (
            "rl",
            {
                "rewards": [
                    {
                        "kind": "judge",
                        "judge_prompt": "{principle}",
                        "endpoint": "http://localhost:1/v1",
                        "endpoint_model": "m",
                    }
                ]
            },
            "give principles=FILE",
        ),
        ("rl", {"temperature": 0}, "write temperature=1.0"),
    ],
)
def test_settings_without_their_inputs_are_refused_before_data_is_ingested(stage, config, said, tmp_path):
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "1 + 1 = ?", "answer": "2"}\n')
    with pytest.raises(ConfigError, match=said):
        run_stage(
            stage,
            {"model": str(tmp_path), "prompts" if stage == "rejection" else "data": str(tmp_path / "prompts.jsonl")},
            config,
        )
    assert not list(records.all_records())
