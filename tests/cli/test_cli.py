"""The command line: light help, errors that say what to write, exit codes, one JSON line."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.common import stage_processes
from tests.evaluation.conftest import tiny_policy
from tests.processes import SHARED
from tests.serving import free_port, with_prefects_tables

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = (
    "run sweep stage rerun answer up down status deploy ls show rm cost lineage compare promote alias select export chat doctor"
).split()
TINY = [
    part
    for kind in ("text", "demonstrations", "comparisons", "prompts")
    for part in ("--set", f"{kind}={{train: 8, validation: 2, test: 2}}")
]


#: Runs several commands, each in a fork of one interpreter that has imported what they need; writes what they say into
#: files 0.out, 0.err, 1.out ... and prints their exit codes.
SEVERAL = """
import gc, json, os, sys
gc.disable()
from flows.cli import program
from flows.recipe import get_recipe
get_recipe("post_training"), get_recipe("preference")
for i, arguments in enumerate(json.loads(sys.argv[1])):
    if not os.fork():
        for number, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{i}.{name}", os.O_WRONLY | os.O_CREAT), number)
        sys.argv = ["posttrain", *arguments]
        program()
    print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
"""


def environment(home: Path) -> dict[str, str]:
    env = {key: value for key, value in os.environ.items() if not key.startswith(("PREFECT_", "MLFLOW_", "POSTTRAIN_"))}
    return env | {
        "POSTTRAIN_HOME": str(home),
        "PYTHONPATH": str(ROOT),
        "POSTTRAIN_GRACE_SECONDS": "2",
        "POSTTRAIN_TRACKING": "off",
    }


def several(folder: Path, *commands: list[str]) -> list[tuple[int, str, str]]:
    """(exit code, stdout, stderr) of commands that end at once, most of whose time would be that of imports."""
    folder.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", SEVERAL, json.dumps(commands)],
        env=environment(folder / "home"),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=600,
    )
    codes = list(map(int, done.stdout.split()))
    assert len(codes) == len(commands), done.stderr
    return [
        (code, (folder / f"{i}.out").read_text(), (folder / f"{i}.err").read_text()) for i, code in enumerate(codes)
    ]


@pytest.fixture
def posttrain(tmp_path, forks):
    env = environment(with_prefects_tables(tmp_path / "home"))

    def call(*arguments, code: int = 0, start: bool = False, tracked: bool = False, program: str | None = None):
        """tracked: MLflow is told, which costs a new home its database. program: what calls the command line; SHARED
        for what starts stages, unless told otherwise.
        """
        if program is None and arguments[0] in ("stage", "rerun"):
            forks.hold()
            program = SHARED
        env["POSTTRAIN_TRACKING"] = "on" if tracked else "off"
        command = [sys.executable, *(["-m", "flows.cli"] if program is None else ["-c", program]), *map(str, arguments)]
        if start:
            # a shell starts what it puts in the background with interrupts ignored, and a suite may be such
            def heed():
                signal.signal(signal.SIGINT, signal.SIG_DFL)

            return subprocess.Popen(
                command, env=env, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=heed
            )
        done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=300)
        assert done.returncode == code, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    return call


def last_line(done) -> dict:
    return json.loads(done.stdout.splitlines()[-1])


def test_help_imports_nothing_heavy():
    code = (
        "import sys\nsys.argv = ['posttrain', '--help']\nfrom flows.cli import main\ntry:\n    main()\nexcept"
        " SystemExit as end:\n    assert not end.code\nheavy = {'torch', 'transformers', 'datasets', 'prefect',"
        " 'mlflow', 'pandas', 'pyarrow', 'numpy', 'matplotlib'}\nassert not heavy & set(sys.modules), heavy &"
        " set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, stdout=subprocess.DEVNULL, timeout=60)


def test_configs_import_nothing_heavy():
    """Forms, plans and the errors of a wrong setting need no machine learning library."""
    code = (
        "import sys\nfrom stages.registry import STAGES, get_stage\n[get_stage(name) for name in STAGES]\nheavy ="
        " {'torch', 'transformers', 'datasets', 'prefect', 'mlflow'}\nassert not heavy & set(sys.modules), heavy &"
        " set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=60)


@pytest.mark.parametrize("arguments, code", [(["ls", "runs", "--json"], 0), (["show", "nothing"], 2)])
def test_a_command_ends_without_taking_apart_what_it_imported(posttrain, arguments, code):
    """Prefect, MLflow and torch take half a second and more for that. What is printed and exit handlers are heeded."""
    program = (
        "import atexit, os, sys\nclass Kept:\n    def __del__(self, write=os.write):\n        write(2, b'taken"
        " apart')\nkept = Kept()\natexit.register(print, 'exit handler', file=sys.stderr)\nfrom flows.cli import"
        " program\nprogram()\n"
    )
    done = posttrain(*arguments, code=code, program=program)
    assert "exit handler" in done.stderr and "taken apart" not in done.stderr
    assert json.loads(done.stdout)["runs"] == [] if not code else "nothing" in done.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_exit_codes(command):
    from typer.testing import CliRunner

    from flows.cli import app

    shown = CliRunner().invoke(app, [command, "--help"])
    assert shown.exit_code == 0 and "Exit codes" in shown.output


WRONG = [
    (["run", "post_trainin"], "did you mean 'post_training'"),
    (["run", "post_training", "--set", "sft.learning_rat=1"], "did you mean 'sft.learning_rate'"),
    (["run", "post_training", "--set", "learning_rate=1"], "learning_rate"),
    (["run", "post_training", "--set", "sft.learning_rate=-1"], "greater than 0"),
    (["run", "post_training", "--set", "sft"], "write key=value"),
    (["run", "post_training", "sft"], "write key=value"),
    (["run", "post_training", "--preset", "dmo"], "has no preset"),
    (["run", "preference", "data.path=pairs.jsonl"], "write model="),
    (["run", "verifiable"], "model"),
    (["stage", "sftt"], "did you mean 'sft'"),
    (["stage", "mine.lower"], "for a stage of your own stages.FILE (in stages/FILE.py) or PACKAGE.FILE"),
    (["stage", "world", "--set", "prompt={train: 3}"], "did you mean 'prompts'"),
    (["stage", "sft", "--input", "modle=x"], "did you mean 'model'"),
    (["stage", "sft", "--input", "model=nowhere/there.jsonl", "--input", "data=x"], "does not exist"),
    (["ls", "run"], "did you mean 'runs'"),
    (["show", "dataset:nothing@latest"], "nothing"),
    (["rm"], "posttrain rm --before 30d"),
    (["rm", "--before", "soon"], "write 30d, 12h, 2w or 2026-10-01"),
    (["rm", "dataset:nothing@latest"], "there is no dataset named"),
    (["deploy"], "posttrain up"),
    (["deploy", "preference"], "--cron '0 2 * * *'"),
    (["deploy", "--cron", "0 2 * * *"], "names a recipe"),
    (["rerun", "abc", "--stage", "sft"], "there is no run"),
    (["show", str(ROOT / "flows")], "without the config.json of a model; write a ref (`posttrain ls datasets`"),
    (["stage", "world", "--seed", "-1"], "'--seed'"),
    (["run", "rest", "rl.kl_coef=0.1"], "rl.kl_coef: no step of this run reads it (rl_after: "),
    (["run", "agent", "rl.max_turn_length=9"], "act in one environment; write environment.max_turn_length"),
]


@pytest.fixture(scope="module")
def refused(tmp_path_factory):
    return several(tmp_path_factory.mktemp("wrong") / "usage", *(arguments for arguments, _ in WRONG))


@pytest.mark.parametrize("number", range(len(WRONG)), ids=[" ".join(arguments) for arguments, _ in WRONG])
def test_wrong_usage_exits_2_and_says_what_to_write(refused, number):
    code, _, error = refused[number]
    assert code == 2 and WRONG[number][1] in error, error


def test_stage_prints_one_json_line_and_is_cached_the_second_time(posttrain):
    first = last_line(posttrain("stage", "world", *TINY, "--seed", 3, "--json", tracked=True))
    assert {"demonstrations", "pairs", "prompts", "text"} <= set(first["outputs"])
    assert {"tokens_per_second", "seconds", "peak_memory_mib"} <= set(first["metrics"])
    assert not first["cached"]
    again = posttrain("stage", "world", *TINY, "--seed", 3, "--json", tracked=True)
    second = last_line(again)
    assert second["cached"] and second["outputs"] == first["outputs"] and len(again.stdout.splitlines()) == 1
    other = last_line(posttrain("stage", "world", *TINY, "--seed", 4, "--json"))
    assert other["key"] != first["key"]
    assert "posttrain ls results" in posttrain("ls").stdout  # no recipe was run, and there is something all the same

    shown = last_line(posttrain("show", first["outputs"]["prompts"], "--json"))
    assert shown["made_by"]["stage"] == "world"
    assert {row["kind"] for row in last_line(posttrain("ls", "datasets", "--json"))["datasets"]} >= {
        "prompts/1",
        "text/1",
    }
    settings = re.findall(r"^  (config|default) +(\w+)", posttrain("show", first["outputs"]["prompts"]).stdout, re.M)
    assert {name for how, name in settings if how == "config"} == {one.split("=")[0] for one in TINY[1::2]}
    assert settings[-1][0] == "default"
    tree = json.dumps(last_line(posttrain("lineage", first["outputs"]["prompts"], "--json")))
    assert first["key"] in tree and "world" in posttrain("lineage", first["outputs"]["prompts"]).stdout


def test_a_dataset_is_made_again_and_compared(posttrain):
    first = last_line(posttrain("stage", "world", *TINY, "--seed", "3", "--json"))
    ref = first["outputs"]["prompts"]
    again = last_line(posttrain("rerun", ref, "--json"))
    assert not again["cached"] and again["key"] == first["key"] and not again["code_changed"]
    assert len(again["compared"]) == len(first["outputs"]) and all(row["same"] for row in again["compared"])
    other = last_line(posttrain("rerun", ref, "--seed", "4", "--json"))
    assert other["key"] != first["key"] and not all(row["same"] for row in other["compared"])
    path = Path(first["record_path"])
    record = json.loads(path.read_text())
    record["outputs"]["text"]["ref"] = "dataset:another@" + "0" * 64
    path.write_text(json.dumps(record))
    said = posttrain("rerun", ref, code=1)
    assert "The bytes are not those of then" in said.stderr


def test_an_rl_run_is_computed_again_from_its_rollouts(posttrain, tmp_path):
    tiny_policy(tmp_path / "policy", 0)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"{i} plus {i}?", "answer": str(2 * i)}) + "\n" for i in range(8)))
    settings = ["preset=rloo", "max_steps=2", "num_generations=2", "prompts_per_step=2", "max_completion_length=4"]
    first = last_line(
        posttrain(
            *("stage", "rl", "--input", f"model={tmp_path / 'policy'}", "--input", f"data={prompts}", *settings),
            *("rewards=[{kind: length, weight: -1}]", "learning_rate=0.01", "--json"),
        )
    )
    ref = first["outputs"]["model"]
    again = last_line(posttrain("rerun", ref, "--recorded", "--json"))
    assert [row["output"] for row in again["compared"] if row["same"]] == ["model", "rollouts"]
    held = {row["what"]: row for row in again["held"]}
    assert {"reward length, scored again", "logp under the weights of then", "advantages"} <= held.keys()
    assert all(row["held"] and not row["differ"] for row in held.values())
    # a faster one does not sample what was recorded
    said = posttrain("rerun", ref, "--recorded", "--set", "learning_rate=0.5", code=1).stderr
    assert "not sampled from these weights" in said
    # without --recorded it is sampled again, or another one
    assert last_line(posttrain("rerun", ref, "--json"))["key"] == first["key"]
    other = last_line(posttrain("rerun", ref, "--set", "learning_rate=0.5", "--json"))
    assert not all(row["same"] for row in other["compared"])
    shown = last_line(posttrain("show", ref, "--json"))
    said = posttrain("rerun", shown["made_by"]["inputs"]["data"]["ref"], "--recorded", code=2).stderr
    assert "made by the stage ingest, which records no rollouts" in said


def test_an_rl_run_with_a_table_of_baselines_is_computed_again_from_its_own(posttrain, tmp_path):
    """They were sampled, and whoever scores them asked, again."""
    tiny_policy(tmp_path / "policy", 0)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"{i} plus {i}?", "answer": str(2 * i)}) + "\n" for i in range(8)))
    settings = ["preset=a_lol", "max_steps=2", "num_generations=2", "prompts_per_step=2", "max_completion_length=4"]
    first = last_line(
        posttrain(
            *("stage", "rl", "--input", f"model={tmp_path / 'policy'}", "--input", f"data={prompts}", *settings),
            *("rewards=[{kind: length, weight: -1}]", "learning_rate=0.01", "baseline_samples=3", "--json"),
        )
    )
    again = last_line(posttrain("rerun", first["outputs"]["model"], "--recorded", "--json"))
    assert [row["output"] for row in again["compared"] if row["same"]] == ["model", "rollouts"]
    assert not again["metrics"].get("recorded/sampled_again") and "baselines" not in again["outputs"]
    shown = last_line(posttrain("show", again["key"], "--json"))
    assert shown["inputs"]["baselines"]["ref"] == first["outputs"]["baselines"]


def test_failed_stage_exits_1_with_its_own_message(posttrain):
    done = posttrain("stage", "tests.flows.slow_stage", "--set", "fail=true", "--json", code=1)
    assert "it was told to fail" in done.stderr
    assert last_line(done) == last_line(done) | {"status": "failed", "exit_code": 1}


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupt_takes_the_stage_process_down(posttrain, tmp_path, number, code):
    running = posttrain("stage", "tests.flows.slow_stage", "--set", "seconds=120", start=True)
    children = []
    deadline = time.monotonic() + 60
    while not children and time.monotonic() < deadline:
        time.sleep(0.2)
        children = stage_processes(tmp_path / "home")
    assert children
    running.send_signal(number)
    _, error = running.communicate(timeout=60)
    assert running.returncode == code, error
    assert psutil.wait_procs(children, timeout=60)[1] == []
    assert (
        "goes on where it stopped: posttrain stage tests.flows.slow_stage --set seconds=120"
        if number == signal.SIGINT
        else "same command continues"
    ) in error


def test_dry_run_prints_the_plan_and_runs_nothing(posttrain):
    plan = last_line(
        posttrain(
            "run",
            "post_training",
            "--preset",
            "demo",
            "--set",
            "rl.max_steps=7",
            "sft.max_steps=3",
            "--dry-run",
            "--json",
            "dpo.beta=0.2",
        )
    )
    assert plan["config"]["rl"]["max_steps"] == 7
    # settings stand without --set too
    assert plan["config"]["sft"]["max_steps"] == 3 and plan["config"]["dpo"]["beta"] == 0.2
    assert [row["step"] for row in plan["plan"]][-1] == "promote" and all(row["plan"] == "run" for row in plan["plan"])


def test_a_reader_that_goes_is_no_failed_stage(posttrain):
    """As with other programs in a pipe: the status of SIGPIPE, and nothing is said."""
    listing = posttrain("ls", "stages", start=True)
    listing.stdout.close()
    assert (listing.wait(60), listing.stderr.read()) == (141, "")


@pytest.mark.parametrize(
    "text", ("be kind: say yes", "- be brief", "{answer}", "[INST] it", "2024-01-01", "{prompt} it is: {answer}")
)
def test_a_text_on_the_command_line_is_the_text_whatever_yaml_reads_in_it(text):
    from flows.config import build, parse_sets
    from flows.recipe import load_config
    from stages.registry import get_stage

    sets = [f"context={text}", "method=on_policy", "lmbda=1"]
    assert build(get_stage("distill").SPEC.config, parse_sets(sets)).context == text
    assert parse_sets([f"context={text}"]) == {"context": text}
    if not text.startswith("{"):
        made = load_config("hh", parse_sets([f"hhh_prompt={text}", "model=m", "data.pairs=d"]))
        assert made.hhh_prompt == text


def test_a_mapping_or_list_on_the_command_line_stays_one():
    from flows.config import build, parse_sets
    from stages.registry import get_stage
    from stages.spec import ConfigError

    config = get_stage("rl").SPEC.config
    assert build(config, parse_sets(["stop_strings=[a, b]", "rewards=[{kind: length}]"])).stop_strings == ["a", "b"]
    with pytest.raises(ConfigError, match="rewards.0.kind: .*write one of"):
        build(config, parse_sets(["rewards=[{kind: {x: y}}]"]))
    with pytest.raises(ConfigError, match="rewards: input should be a valid list"):
        build(config, parse_sets(["rewards={kind: length}"]))


def test_set_reads_yaml_scalars():
    from flows.config import parse_sets

    assert parse_sets(["a.b=1e-5", "a.c=null", "d=[1, x]", "e=true", "f=", "g=a=b"]) == {
        "a": {"b": 1e-5, "c": None},
        "d": [1, "x"],
        "e": True,
        "f": None,
        "g": "a=b",
    }


def test_a_text_may_look_like_a_number():
    from stages.registry import get_stage

    config = get_stage("rejection").SPEC.config
    assert config.model_validate({"stop_strings": [1, "x"]}).stop_strings == ["1", "x"]
    with pytest.raises(ValueError):
        config.model_validate({"stop_strings": [None]})


def test_a_section_given_in_part_keeps_the_recipes_settings_in_the_rest():
    from flows.recipe import load_config

    config = load_config(
        "preference",
        {"model": "m", "data": {"path": "p"}, "ingest_pairs": {"test_fraction": 0.2}, "evaluate_reward": {"limit": 20}},
    )
    assert (config.ingest_pairs.kind, config.ingest_pairs.validation_fraction, config.ingest_pairs.test_fraction) == (
        "pairs/1",
        0.05,
        0.2,
    )
    assert (config.evaluate_reward.target, config.evaluate_reward.limit) == ("reward_model", 20)


def test_presets_are_valid_configurations():
    from flows.config import load_preset, presets
    from flows.recipe import RECIPES, load_config

    for recipe in RECIPES:
        for preset in presets(recipe):
            values = load_preset(recipe, preset)
            if recipe != "verifiable":  # which needs the user's data
                load_config(recipe, values)


def test_a_preset_extends_another():
    from flows.config import load_preset

    below, above = load_preset("preference", "zephyr"), load_preset("preference", "zephyr_release")
    assert (
        "extends" not in above
        and above["sft"] == below["sft"]
        and above["dpo"] == {**below["dpo"], "beta": 0.01, "batch_size": 128, "num_train_epochs": 1}
    )


def test_show_says_why_rows_were_quarantined(posttrain, tmp_path):
    good = [{"prompt": f"q{i}", "chosen": "a", "rejected": "b"} for i in range(8)]
    (tmp_path / "x.jsonl").write_text(
        "\n".join(
            [
                *map(json.dumps, good),
                '{"prompt": "cut off',
                json.dumps({"prompt": "p", "chosen": "same", "rejected": "same"}),
            ]
        )
        + "\n"
    )
    made = last_line(posttrain("stage", "ingest", "--input", f"data={tmp_path / 'x.jsonl'}", "--json"))
    shown = posttrain("show", made["outputs"]["quarantine"]).stdout
    assert (
        'x.jsonl:9  {"prompt": "cut off' in shown
        and "refused parse_error: 1 rows" in shown
        and "refused chosen_equals_rejected: 1 rows" in shown
        and "x.jsonl:10" in shown
    )
    reasons = last_line(posttrain("show", made["outputs"]["quarantine"], "--json"))["quarantined"]
    assert {one["code"]: one["rows"] for one in reasons} == {"parse_error": 1, "chosen_equals_rejected": 1} and reasons[
        0
    ]["samples"][0]["source_file"] == "x.jsonl"


def test_a_dataset_of_the_wrong_kind_is_refused_with_a_conversion_that_exists(tmp_path, monkeypatch):
    from stages.spec import ConfigError
    from storage.datasets import write_dataset
    from storage.schema import complete_row
    from tasks.run import prepare

    monkeypatch.setenv("POSTTRAIN_HOME", str(tmp_path / "home"))
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "llama"}')

    def dataset(kind, **row):
        path = tmp_path / kind.split("/")[0]
        write_dataset(path, "made", kind, [complete_row(kind, row, dataset="made", source="s", origin="human")])
        return str(path)

    with pytest.raises(ConfigError, match="text/1 cannot be converted to that, so give another dataset"):
        prepare("align", {"model": str(model), "data": dataset("text/1", text="only text")})
    thumbs = dataset(
        "unpaired/1",
        prompt=[{"role": "user", "content": "q"}],
        completion=[{"role": "assistant", "content": "a"}],
        label=True,
        label_kind="thumbs",
    )
    with pytest.raises(ConfigError, match=f"posttrain stage ingest --input data={thumbs} --set kind=prompts/1"):
        prepare("rl", {"model": str(model), "data": thumbs})


def test_a_step_is_repeated_by_its_name_or_that_of_the_section_it_takes_its_settings_from(tmp_path, monkeypatch):
    from flows.commands.pipelines import steps_of
    from flows.preference import Config
    from flows.recipe import check_force
    from stages.spec import ConfigError
    from storage import records

    monkeypatch.setenv("POSTTRAIN_HOME", str(tmp_path / "home"))
    run = records.start_run("preference", {})
    for label in (
        "ingest_pairs",
        "dpo.ingest-data",
        "dpo",
        "evaluate_reward",
        "evaluate_start",
        "evaluate_dpo",
        "compare",
    ):
        records.append_stage(run.run_id, {"label": label, "stage": label.split("_")[0], "cached": False})
    unfinished = records.get_run(run.run_id)
    records.finish_run(run.run_id, "FINISHED")
    run = records.get_run(run.run_id)
    # evaluate_reward is a section of its own
    assert steps_of(run, Config, "evaluate") == ["evaluate_start", "evaluate_dpo"]
    assert (
        steps_of(run, Config, "compare") == ["compare"]
        and steps_of(run, Config, "evaluate_dpo") == ["evaluate_dpo"]
        and steps_of(run, Config, "dpo") == ["dpo"]
    )
    assert steps_of(unfinished, Config, "reward_model") == []  # it never came to it, and will run it now
    for finished, name in ((run, "sft"), (unfinished, "nosuch")):
        with pytest.raises(ConfigError, match="its steps are: ingest_pairs, dpo, evaluate_reward, evaluate_start"):
            steps_of(finished, Config, name)
    check_force(["dpo"], ["sft", "dpo"])
    with pytest.raises(ConfigError, match="force names no step of this run: rl; its steps are: sft, dpo"):
        check_force(["rl"], ["sft", "dpo"])


def test_a_repeated_run_whose_branch_is_switched_off_leaves_the_settings_of_that_branch_behind(tmp_path, monkeypatch):
    from flows.commands import pipelines
    from flows.recipe import load_config
    from storage import records

    monkeypatch.setenv("POSTTRAIN_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("flows.env.prepare", lambda **how: None)
    then = load_config("rest", {"rl_after": True, "rl": {"kl_coef": 0.1}, "sample": {"temperature": 0.5}})
    run = records.start_run("rest", then.model_dump(mode="json"))
    seen = []
    monkeypatch.setattr(pipelines, "execute", lambda recipe, values, *rest: seen.append(load_config(recipe, values)))
    pipelines.rerun(run.run_id, ["rl_after=false"])
    pipelines.rerun(run.run_id, ["rl_after=false", "rl.kl_coef=0.2"])  # said by the user now: refused by what runs it
    kept = [(config.rl_after, config.rl.kl_coef, config.sample.temperature) for config in seen]
    assert kept == [(False, None, 0.5), (False, 0.2, 0.5)]


def test_a_data_set_of_the_world_may_be_given_in_part(posttrain):
    """`demonstrations.train=N` alone was refused for the other two numbers, which have defaults."""
    sets = ["--set", "demonstrations.train=8", "--set", "comparisons={test: 4}", "--set", "tools.tasks.test=7"]
    config = last_line(posttrain("stage", "world", *sets, "--dry-run", "--json"))["config"]
    assert config["demonstrations"] == {"train": 8, "validation": 100, "test": 0}
    assert config["comparisons"] == {"train": 5000, "validation": 200, "test": 4}
    assert config["tools"]["tasks"] == {"train": 2000, "validation": 100, "test": 7}
    said = posttrain("stage", "world", "--set", "demonstrations.trian=8", "--dry-run", code=2).stderr
    assert "did you mean 'demonstrations.train'" in said


def test_a_finished_stage_says_its_warnings_first_and_then_the_numbers_that_matter(posttrain, monkeypatch):
    command = ("stage", "tests.toy_stage", "steps=3", "--set")
    posttrain(*command, "server=http://a:1/v1")
    lines = posttrain(*command, "server=http://b:2/v1").stdout.splitlines()
    assert lines[0].startswith("warning server_elsewhere: This result is reused") and lines[1].startswith("data: ")
    (key,) = {row["key"] for row in last_line(posttrain("ls", "results", "--json"))["results"]}
    assert last_line(posttrain("show", key, "--json"))["warnings"] == []

    from flows.display import telling

    told = {"perf/x": 1, "dropped/a": 2, "reward_low": 0.1, "reward": 0.2, "test/accuracy": 0.5, "kl": 3, "b_se": 4}
    assert [*telling(told)] == ["test/accuracy", "reward", "kl", "perf/x", "dropped/a", "reward_low", "b_se"]


def test_warnings_of_a_stage_are_shown_with_it(capsys):
    from flows.report import _print_maker

    _print_maker({"stage": "sft", "warnings": [{"code": "odd", "text": "it is"}], "metrics": {"loss": 1.0}})
    text = capsys.readouterr().out
    assert text.index("warning odd: it is") < text.index("number  loss")


def test_the_run_of_one_stage_is_repeated_by_the_command_that_is_named(tmp_path, monkeypatch):
    """It was named with `--input … --set …`, for which nobody could know the settings."""
    import shlex

    from flows.commands import pipelines
    from stages.spec import ConfigError
    from tasks.run import StageError, finish_flow, run_stage, start_flow
    from tests.platform.test_run_stage import looked

    monkeypatch.setenv("POSTTRAIN_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("POSTTRAIN_TRACKING", "off")
    monkeypatch.setattr("flows.env.prepare", lambda **how: None)
    (tmp_path / "raw text.txt").write_text("x")
    given = {"text": str(tmp_path / "raw text.txt")}
    for number, (fails, plan, last) in enumerate(((-1, "run", "--force"), (2, "continue", "walk"))):
        run = start_flow("stage:tests.toy_stage", {}, run_id=f"1234567{number}-1")
        how = {"seed": 3, "name_as": "walk", "flow_run": run.as_flow_run("toy")}
        if fails < 0:
            key = run_stage("tests.toy_stage", given, {"steps": 4}, **how).key
        else:
            with pytest.raises(StageError) as failed:
                run_stage("tests.toy_stage", given, {"steps": 5, "fail_at": fails}, **how)
            key = failed.value.key
        finish_flow(run.run_id, "FINISHED" if fails < 0 else "FAILED", None if fails < 0 else "so")
        with pytest.raises(ConfigError, match="ran one stage; repeat it with: ") as told:
            pipelines.rerun(run.run_id)
        program, *command = shlex.split(str(told.value).partition("repeat it with: ")[2])
        assert program == "posttrain" and command[-1] == last
        found, _ = looked(*command, "--dry-run")
        assert (found["key"], found["plan"], found["seed"]) == (key, plan, 3)


def test_only_what_goes_on_says_so_when_it_is_interrupted(posttrain):
    """`ls` promised to go on where it stopped; `alias --previous`, given again, would go one further back."""
    program = (
        "import sys\nfrom flows import report\nfrom flows.cli import main\ndef stop(*given):\n    raise"
        " KeyboardInterrupt\nreport.listing = stop\nmain()\n"
    )
    done = posttrain("ls", "models", "--json", code=130, program=program)
    assert done.stderr.strip() == "error: interrupted" and last_line(done)["exit_code"] == 130


def test_usage_errors_are_json_too(posttrain):
    assert last_line(posttrain("ls", "models", "--jsno", "--json", code=2)) == {
        "status": "failed",
        "exit_code": 2,
        "error": "No such option: --jsno (Possible options: --json)",
    }


def test_the_lines_of_a_paragraph_of_help_are_one():
    """Where the source breaks them a terminal of another width broke them again."""
    from flows.commands.app import flowing

    assert flowing("Say it\n    in one.\n\n    Then\n    more.\n\n    Example: a\n    b\n    Example: c\n    ") == (
        "Say it in one.\n\nThen more.\n\nExample: a b\nExample: c"
    )


def test_references_stay_whole_in_a_narrow_terminal(monkeypatch, capsys):
    from flows.display import table

    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "50")
    row = {"ref": "model:policy/12", "aliases": "candidate champion tried again", "stage": "reward_model", "files": ""}
    table([{**row, "what": "many words that have to be broken somewhere"}])
    assert "model:policy/12" in capsys.readouterr().out


def test_a_forced_step_that_the_plan_has_not_is_refused_before_anything_runs(posttrain):
    done = posttrain("run", "post_training", "--preset", "demo", "--force", "nosuch", "--dry-run", code=2)
    assert "force names no step of this run: nosuch" in done.stderr


def test_runs_that_start_at_the_same_time_on_a_new_home_all_start(posttrain, tmp_path):
    """Each makes a Prefect server on one database; two that made its tables at once failed."""
    shutil.rmtree(tmp_path / "home")
    # its stage takes a moment and no library
    program = (
        "import sys\nfrom flows import recipe\nrecipe.RECIPES.own['slow_recipe'] = 'tests.flows.slow_recipe'\nfrom"
        " flows.cli import main\nsys.argv = ['posttrain', 'run', 'slow_recipe', f'seed={sys.argv[1]}']\nmain()\n"
    )
    for one in [posttrain(seed, program=program, start=True) for seed in range(3)]:
        _, error = one.communicate(timeout=280)
        assert one.returncode == 0 and "+ slow" in error and "database" not in error, error


@pytest.mark.parametrize(
    "stage, word, here",
    [
        ("sft", "gradient_accumulation_steps", "here it is 'batch_size' (the rows of one optimizer step"),
        ("rl", "max_new_tokens", "here it is 'max_completion_length'"),
        ("rl", "num_train_epochs", "here it is 'max_steps'"),
        ("sft", "assistant_only_loss", "here it is 'train_on' (all_assistant for true"),
        ("sft", "completion_only_loss", "here it is 'train_on'"),
        ("rl", "steps_per_generation", "here it is 'num_minibatches'"),
        ("rl", "generation_batch_size", "here it is 'prompts_per_step' (it, divided by num_generations)"),
        ("rl", "vllm_importance_sampling_mode", "here it is 'importance_correction'"),
        ("rl", "importance_sampling_level", "here it is 'ratio_level'"),
        ("align", "loss_weights", "here it is 'loss_weight'"),
        ("rl", "vllm_importance_sampling_correction", "here it is 'importance_correction'"),
        ("rl", "adv_estimator", "here it is 'preset'"),
        ("align", "loss_type", "here it is 'method'"),
        ("sft", "output_dir", "posttrain export"),
        ("rl", "delta", "here it is 'clip_ratio_c'"),
        ("rl", "use_bias_correction_kl", "here it is 'kl_is_weighted'"),
        ("rl", "sync_ref_model", "here it is 'ref_mode' (refresh)"),
        ("align", "sync_ref_model", "here it is 'reference_update' (tr_soft)"),
        ("rl", "num_unique_prompts_rollout", "here it is 'prompts_per_step'"),
        ("rl", "loss_type", "here it is 'preset'"),
        ("reward_model", "loss_type", "here it is 'objective'"),
        ("align", "ref_model", "give it as --input reference=DIR"),
        ("sft", "model_name_or_path", "give it as --input model=DIR"),
        (
            "sft",
            "dataset_text_field",
            "setting of the stage ingest: posttrain stage ingest --input data=FILE --set text",
        ),
        ("sft", "load_best_model_at_end", "here it is 'select_by' (loss, with eval_every=STEPS"),
        ("sft", "learing_rate", "did you mean 'learning_rate'?"),
    ],
)
def test_the_words_of_other_libraries_are_known(stage, word, here):
    from flows.config import build
    from stages.registry import get_stage
    from stages.spec import ConfigError

    with pytest.raises(ConfigError) as told:
        build(get_stage(stage).SPEC.config, {word: 1})
    assert here in str(told.value)


@pytest.mark.parametrize(
    "stage, setting, value, here",
    [
        ("align", "method", "sigmoid", "there is no 'sigmoid'; here it is method=dpo; or write one of 'dpo'"),
        ("rl", "preset", "reinforce_plus_plus", "here it is preset=reinforce_pp"),
        ("sft", "packing", True, "nothing to pack; leave it out"),
        ("sft", "compute_dtype", "bf16", "here it is compute_dtype=bfloat16"),
        ("align", "method", "simop", "did you mean 'simpo'?"),
    ],
)
def test_the_values_of_other_libraries_are_known(stage, setting, value, here):
    from flows.config import build
    from stages.registry import get_stage
    from stages.spec import ConfigError

    with pytest.raises(ConfigError) as told:
        build(get_stage(stage).SPEC.config, {setting: value})
    assert here in str(told.value)


def test_a_section_of_another_library_is_not_taken_for_a_setting_that_sounds_alike():
    from flows.config import build
    from stages.registry import get_stage
    from stages.spec import ConfigError

    with pytest.raises(ConfigError) as told:
        build(get_stage("rl").SPEC.config, {"actor_rollout_ref": {"rollout": {"profiler_steps": True}}})
    assert str(told.value) == (
        "unknown key 'actor_rollout_ref.rollout.profiler_steps'; nothing here has that name, see --keys"
    )


@pytest.mark.parametrize(
    "stage, theirs, told",
    [
        ("rl", "data.max_prompt_length=512", "here it is 'max_prompt_length'"),
        ("rl", "actor_rollout_ref.rollout.val_kwargs.n=32", "answered once, as in training .eval_prompts=N."),
        ("rl", "actor_rollout_ref.rollout.val_kwargs.temperature=1.0", "answered once, as in training"),
        ("rl", "actor_rollout_ref.rollout.dtype=bfloat16", "here it is 'sampling_dtype'"),
        ("rl", "actor_rollout_ref.rollout.free_cache_engine=true", "here it is 'engine_sleep'"),
        ("rl", "actor_rollout_ref.actor.fsdp_config.param_offload=true", "nothing is moved to the CPU"),
        ("rl", "eval_temperature=0.6", "answered once, as in training"),
        ("rl", "ring_attn_size=2", "a sequence is computed on one device"),
        ("rl", "overlong_penalty_factor=1.0", "it is 1 here"),
        ("rl", "algo.advantage.no_std_norm=true", "here it is 'whiten' .true for false; true, the mean alone, is not"),
        ("rl", "no_advantage_std_norm=true", "here it is 'whiten' .true for false; true, the mean alone, is not"),
        ("rl", "reward_model.reward_manager=dapo", "here it is 'rewards'"),
        ("rl", "micro_train_batch_size=8", "here it is 'max_tokens_per_micro_batch'"),
        ("rl", "max_epochs=2", "here it is 'num_iterations'"),
        ("sft", "max_epochs=2", "here it is 'num_train_epochs'"),
        ("sft", "train_batch_size=256", "here it is 'batch_size'"),
        ("sft", "pretrain=x", "give it as --input model=DIR"),
        ("sft", "save_path=x", "copied out by `posttrain export`"),
        ("sft", "load_checkpoint=true", "the same command continues"),
        ("align", "ipo=true", "here it is 'method' .ipo."),
        ("align", "max_prompt_length=512", "here it is 'max_length'"),
        ("reward_model", "num_labels=1", "leave it out"),
    ],
)
def test_settings_of_other_libraries_examples_are_answered_rightly(stage, theirs, told):
    """These were answered with a setting of ours that is something else but sounds alike, or with none."""
    from flows.config import build, parse_sets
    from stages.registry import get_stage
    from stages.spec import ConfigError

    with pytest.raises(ConfigError, match=told):
        build(get_stage(stage).SPEC.config, parse_sets([theirs]))


def test_words_of_other_libraries_lead_to_settings_that_exist():
    from flows.config import build, keys, parse_sets
    from flows.names import ELSEWHERE, VALUES
    from stages.registry import STAGES, get_stage
    from stages.spec import ConfigError

    from flows.preference import Config

    with pytest.raises(
        ConfigError, match="unknown key 'lr'; here it is 'pretraining.learning_rate', .* or 'dpo.learning_rate'"
    ):
        build(Config, parse_sets(["lr=1e-4"]))
    known = {key.rsplit(".", 1)[-1] for name in STAGES for key in keys(get_stage(name).SPEC.config)}
    named = {word: ours.partition(": ")[0] for word, ours in ELSEWHERE.items()}
    assert not {
        word for word, ours in named.items() if ours not in known | {""} and ELSEWHERE.get(ours, "")[:2] != ": "
    }
    stage_of = {"method": "align", "preset": "rl", "kl_estimator": "rl", "engine": "rl", "distillation_mode": "rl"}
    for setting, values in VALUES.items():
        config = get_stage(stage_of.get(setting, "sft")).SPEC.config
        for theirs, ours in values.items():
            with pytest.raises(ConfigError, match="there is no"):
                build(config, {setting: theirs})
            written = dict(word.split("=", 1) for word in ours.split(": ")[0].split() if "=" in word)
            build(config, written)


def test_a_recipe_lists_its_settings_and_a_plan_those_that_were_chosen(posttrain):
    listed = posttrain("run", "preference", "--keys").stdout
    line = next(line for line in listed.splitlines() if line.startswith("ingest_pairs.kind "))
    assert "pairs/1" in line  # what the recipe sets, not the stage's own default
    settings = {
        row["setting"]: row for row in last_line(posttrain("run", "preference", "--keys", "--json"))["settings"]
    }
    assert settings["ingest_pairs.kind"]["default"] == "pairs/1" and settings["ingest_pairs.kind"]["doc"]
    stage = last_line(posttrain("stage", "sft", "--keys", "--json"))
    assert [one["input"] for one in stage["inputs"] if one["required"]] == ["model", "data"]
    assert next(row for row in stage["settings"] if row["setting"] == "max_steps")["default"] is None
    shown = posttrain("run", "post_training", "--preset", "demo", "dpo.beta=0.2", "--dry-run").stdout
    assert "  beta: 0.2" in shown and "adam_beta1" not in shown and shown.index("beta: 0.2") < shown.index("plan\n")


def test_what_a_recipe_is_given_is_looked_for_before_its_first_step(tmp_path):
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / "config.json").write_text("{")
    reasons = (
        (["preference", "data.path=nofile.jsonl", "model=model:nosuch@champion"], "model: there is no model named"),
        (["post_training", "data.pairs=nofile.jsonl"], "data.pairs: nofile.jsonl does not exist"),
        (["post_training", "model=model:nosuch@champion"], "model: there is no model named 'nosuch'"),
        (["preference", f"model={tmp_path / 'cut'}"], "config.json is not readable JSON"),
        (["post_training", "data.prompts=dataset:nosuch@latest"], "data.prompts: there is no dataset"),
        (["rlaif", "judge=model:nosuch@champion"], "judge: there is no model named 'nosuch'"),
        (["r1", "students={small: nosuch/}"], "students.small: nosuch/ does not exist"),
        (["instructgpt", "data.benchmarks={quiz: nofile.jsonl}"], "data.benchmarks.quiz: nofile.jsonl does not exist"),
        (["rest", "rl_after=true", "rl.preset=ppo_ptx", "rl.ptx_coef=1.0"], "rl: "),
    )
    for (given, why), (code, _, error) in zip(
        reasons, several(tmp_path / "refused", *(["run", *given] for given, _ in reasons))
    ):
        assert code == 2 and why in error and "started" not in error, error


def test_a_server_that_does_not_answer_and_a_home_that_is_none_are_told(posttrain, tmp_path, monkeypatch):
    from flows import env, services
    from stages.spec import ConfigError

    monkeypatch.setattr(services.time, "sleep", lambda seconds: None)
    clock = iter(range(0, 100, 6))
    monkeypatch.setattr(services.time, "monotonic", lambda: next(clock))
    with pytest.raises(
        services.ServiceError, match="no Prefect server answers at http://127.0.0.1:9/api.*posttrain up"
    ):
        services.reachable("http://127.0.0.1:9/api")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("POSTTRAIN_HOME", str(tmp_path / "file" / "home"))
    with pytest.raises(ConfigError, match="set POSTTRAIN_HOME to a directory"):
        env.state_dir()
    # both servers would keep their tables in one file named `what`
    monkeypatch.setenv("POSTTRAIN_HOME", str(tmp_path / "what?now" / "home"))
    with pytest.raises(ConfigError, match="question mark.*set POSTTRAIN_HOME to a directory without"):
        env.state_dir()
    assert not (tmp_path / "what?now").exists()


def test_a_server_that_started_is_written_down_though_the_next_one_fails(posttrain):
    """Else nothing could stop it: `down` knows what services.json names."""
    up = ("up", "--prefect-port", free_port())
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert "is taken" in posttrain(*up, "--mlflow-port", taken.getsockname()[1], code=1).stderr
    assert "prefect" in posttrain("down").stdout


def test_a_server_that_died_comes_back_at_its_port(tmp_path):
    """Runs that outlive it, and links, know no other."""
    from flows import services

    assert services._last_port(tmp_path, "mlflow") == services.PORTS["mlflow"]
    (tmp_path / "services.json").write_text(
        json.dumps({"mlflow": {"url": "http://127.0.0.1:45321", "pid": 1, "started": 0.0}, "worker": {"url": None}})
    )
    assert services.running(tmp_path) == {}
    assert (
        services._last_port(tmp_path, "mlflow") == 45321
        and services._last_port(tmp_path, "prefect") == services.PORTS["prefect"]
    )


def test_the_line_of_a_step_shows_results_and_no_bounds():
    from flows.display import headline

    found = {
        "pair_length_matched_accuracy": 0.4,
        "distinct_1": 0.99,
        "pair_accuracy": 0.575,
        "reward": -0.14,
        "reward_low": -0.19,
        "length_mean": 61.3,
    }
    assert headline(found) == "reward=-0.14  pair_accuracy=0.575  length_mean=61.3  pair_length_matched_accuracy=0.4"
    assert headline({"dropped/no_target": 0, "rows": 399, "steps": 3, "loss": 7.6}, 3) == "loss=7.6  rows=399  steps=3"


def test_a_metric_stands_with_its_interval_and_error_in_one_row():
    from flows.display import metric_rows

    rows = metric_rows(
        {
            "accuracy": 0.39,
            "accuracy_high": 0.4722,
            "accuracy_low": 0.3136,
            "accuracy_se": 0.04118,
            "prompts": 100,
            "length_low": 3,
        }
    )
    assert rows == [
        {"metric": "accuracy", "value": 0.39, "95% interval": "[0.3136, 0.4722]", "se": 0.04118},
        {"metric": "prompts", "value": 100},
        {"metric": "length_low", "value": 3},
    ]


def test_raw_data_that_is_refused_on_the_way_to_a_stage_says_where_its_settings_go(tmp_path, monkeypatch, capsys):
    """The advice of ingest names settings of its own, which the stage that was called does not take; what ingest says
    stands under its name.
    """
    from flows.display import Display
    from tasks.run import StageError, run_stage

    monkeypatch.setenv("POSTTRAIN_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("POSTTRAIN_TRACKING", "off")
    file = tmp_path / "dups.jsonl"
    file.write_text('{"prompt": "a", "completion": "b"}\n' * 5)
    with Display() as screen, pytest.raises(StageError, match="deduplicate=off") as caught:
        run_stage("mix", {"data.one": str(file)}, {}, on_event=lambda event: screen("mix", event))
    assert (
        f"posttrain stage ingest --input data={file} --set kind=demonstrations/1 --name-as dups-demonstrations --set"
        " KEY=VALUE, then --input data.one=dataset:dups-demonstrations@latest." in str(caught.value)
    )
    told = capsys.readouterr().err
    assert "ingest: started" in told and "mix" not in told


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_a_result_that_stdout_cannot_encode_is_still_one_json_line(encoding):
    """An error of somebody's code with half of a surrogate pair, or a terminal that is not UTF-8, ended ``--json`` with
    a traceback and no object.
    """
    value = {"error": "half \ud83d é"}
    done = subprocess.run(
        [sys.executable, "-c", f"from flows.commands.app import emit\nemit({value!r})"],
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": encoding},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and json.loads(done.stdout) == value, done.stderr


def test_a_file_of_settings_that_cannot_be_read_says_so(tmp_path):
    from flows.config import load_yaml
    from stages.spec import ConfigError

    (tmp_path / "mark.yaml").write_bytes("sft: {epochs: 2}".encode("utf-8-sig"))
    assert load_yaml(tmp_path / "mark.yaml") == {"sft": {"epochs": 2}}
    (tmp_path / "latin.yaml").write_bytes("sft: {run: für}".encode("latin-1"))
    (tmp_path / "cut.yaml").write_text("sft: {epochs: 2")
    for name, says in (("latin.yaml", "it is not in UTF-8"), ("cut.yaml", "not valid YAML"), (".", "is a directory")):
        with pytest.raises(ConfigError, match=says):
            load_yaml(tmp_path / name)


def test_an_unknown_key_names_the_command_that_lists_them():
    from flows.config import build
    from stages.registry import get_stage
    from stages.spec import ConfigError

    for stage in ("sft", "judge"):
        with pytest.raises(ConfigError, match=rf"unknown key 'zzqy'; all keys: `posttrain stage {stage} --keys`"):
            build(get_stage(stage).SPEC.config, {"zzqy": 1})


def test_a_method_that_is_taken_for_a_stage_is_answered_with_its_command(posttrain):
    for name, written in (("dpo", "stage align --set method=dpo"), ("GRPO", "stage rl --set preset=grpo")):
        said = posttrain("stage", name, code=2)
        assert f"there is no stage {name!r}; write posttrain {written}" in said.stderr
