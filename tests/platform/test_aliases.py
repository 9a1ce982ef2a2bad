"""An alias that a person moves: back to the version before, to another one, away; what is kept of it, and what a gate may
do after it."""

import json
import shutil
import subprocess
import sys
import time

import pytest

from flows.config import ConfigError
from stages.spec import PROJECT_ROOT
from storage import records, registry, removal, store, tracking
from tasks import promotion
from tasks.run import run_stage
from tests.platform.test_mlflow_outbox import aliases, client, mlflow_template  # noqa: F401
from tests.platform.test_run_stage import looked
from tests.platform.test_store import decided, make_model
from tests.serving import free_port

TOY = "tests.toy_stage"
CHAMPION = "model:policy@champion"


@pytest.fixture
def three(tmp_path):
    """Versions 1, 2 and 3 of policy, each promoted by its gate over the one before."""
    models = [store.publish_model(make_model(tmp_path / name, name)) for name in "abc"]
    for place, (model, before) in enumerate(zip(models, [None, *models])):
        said = decided(tmp_path / f"decision{place}", model, before)
        assert promotion.conclude(model.ref, said, name="policy")["promoted"]
    return models


def in_office(alias="champion"):
    return registry.lookup("policy").aliases.get(alias)


def test_back_is_the_version_before_and_again_the_one_before_that(three):
    value, _ = looked_once("alias", CHAMPION, "--previous", "--reason", "answers in French")
    assert (value["before"], value["version"], value["moved"], value["user"]) == (3, 2, True, records.user())
    assert store.resolve(CHAMPION).digest == three[1].digest, "what reads the alias gets it"
    assert promotion.point("policy", "champion", None, back=True)["version"] == 1
    with pytest.raises(ConfigError, match=r"has had no version before version 1; write the number of one \(1, 2, 3\)"):
        promotion.point("policy", "champion", None, back=True)
    # a step back is no move of its own, a move by hand is one
    assert promotion.point("policy", "champion", 3)["before"] == 1
    assert promotion.point("policy", "champion", None, back=True)["version"] == 1
    assert not promotion.point("policy", "champion", 1)["moved"]
    # of one that was taken away it is the last
    assert promotion.point("policy", "champion", None)["version"] is None and in_office() is None
    assert not promotion.point("policy", "champion", None)["moved"]
    assert promotion.point("policy", "champion", None, back=True)["version"] == 1


def test_what_was_decided_is_kept_and_shown(three):
    promotion.point("policy", "champion", None, back=True, reason="answers in French")
    entry = registry.log()[-1]
    assert {name: entry[name] for name in ("event", "before", "version", "user", "how", "reason")} == {
        "event": "alias",
        "before": 3,
        "version": 2,
        "user": records.user(),
        "how": "back",
        "reason": "answers in French",
    }
    who = f"by {records.user()}"
    value, text = looked("alias", CHAMPION)
    assert (value["version"], value["previous"]) == (2, 1) and value["model"] == f"m-{three[1].digest[:12]}"
    assert [(one["before"], one["version"]) for one in value["moves"]] == [(3, 2), (2, 3), (1, 2), (None, 1)]
    assert abs(value["moves"][0]["time"] - time.time()) < 600
    assert "posttrain alias model:policy@champion --previous" in text and "answers in French" in text
    for version, said in (
        (3, f"{who}, now version 2: answers in French"),
        (2, f"{who}, back from version 3: answers in French"),
    ):
        _, text = looked("show", f"model:policy/{version}")
        assert said in text and f"{who}: promoted by its gate" in text
        assert said in looked("lineage", f"model:policy/{version}")[1]
    assert "answers" not in looked("show", "model:policy/1")[1]


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["model:policy", "2"], "write model:policy@ALIAS, for example model:policy@champion"),
        (["policy@champion", "2"], "write model:NAME@ALIAS"),
        (["model:nobody@champion", "2"], "there is no model named 'nobody'; the names are: policy"),
        ([CHAMPION, "9"], "model policy has no version 9; its versions are 1, 2, 3"),
        ([CHAMPION, "best"], "'best' is no version; write its number, for example 3 of model:policy/3, or --previous"),
        ([CHAMPION, "model:m-{other}"], "is no version of policy, which has 1, 2, 3; .* promote model:m-"),
        (["model:policy@best", "--previous"], "has had no version before this"),
        (["model:policy@v1", "1"], "'v1' cannot be an alias; write letters"),
        (["model:policy@latest", "1"], "'latest' cannot be an alias"),
        (["model:policy@2026.11", "1"], "'2026.11' cannot be an alias"),
        (["model:policy@3", "1"], "'3' cannot be an alias"),
        (["model:policy@best", "--remove"], "has no alias 'best' to take away; its aliases are: candidate, champion"),
        ([CHAMPION, "2", "--remove"], "write one of: posttrain alias model:policy@champion VERSION, --previous"),
        ([CHAMPION, "--reason", "so"], "--reason is of a move"),
    ],
)
def test_what_cannot_be_is_refused_with_what_to_write(three, tmp_path, arguments, says):
    other = store.publish_model(make_model(tmp_path / "other", "other")).digest
    before = registry.log()
    with pytest.raises((ConfigError, LookupError), match=says):
        called("alias", *[word.replace("{other}", other[:12]) for word in arguments])
    assert registry.log() == before


def test_a_version_is_named_by_its_number_or_its_model(three):
    for version, text in ((1, f"model:m-{three[0].digest[:12]}"), (2, "2"), (1, "model:policy/1")):
        assert looked_once("alias", CHAMPION, text)[0]["version"] == in_office() == version


def test_a_version_whose_files_are_gone_is_refused_with_the_command_that_makes_it_again(state_dir):
    for steps in (3, 4):
        run_stage(TOY, {}, {"steps": steps}, name_as="policy")
        promotion.point("policy", "champion", steps - 2)
    removal.remove(removal.Shelf().named("model:policy/1")[0])
    with pytest.raises(store.StoreError, match="removed with .*`posttrain rerun model:m-"):
        promotion.point("policy", "champion", None, back=True)
    assert in_office() == 2
    run_stage(TOY, {}, {"steps": 3}, name_as="policy")
    assert promotion.point("policy", "champion", None, back=True)["version"] == 1


def test_what_gets_an_alias_while_it_is_being_removed_stays(state_dir):
    for steps in (3, 4):
        run_stage(TOY, {}, {"steps": steps}, name_as="policy")
    (chosen,) = removal.Shelf().named("model:policy/1")
    assert removal.why_kept(chosen, removal.Shelf(), {}, False) is None
    promotion.point("policy", "champion", 1)
    with pytest.raises(store.StoreError, match="model:policy/1 is champion; .*posttrain alias"):
        removal.remove(chosen)
    assert store.resolve(CHAMPION).path


def test_of_two_that_move_an_alias_at_once_the_second_is_told(three, monkeypatch):
    """Both saw version 3 in office: the second would go one further back than it had seen."""
    here = registry.set_alias

    def first_another(*arguments, **named):
        monkeypatch.setattr(registry, "set_alias", here)
        here("policy", "champion", 1, how="hand")
        return here(*arguments, **named)

    monkeypatch.setattr(registry, "set_alias", first_another)
    with pytest.raises(registry.RegistryError, match="was version 3 and is version 1 by now"):
        promotion.point("policy", "champion", None, back=True)
    assert in_office() == 1


def test_who_is_in_office_already_is_not_announced_again(three, tmp_path, monkeypatch):
    """Automations would start anew for a model that new evidence speaks for."""
    told = []
    monkeypatch.setattr(promotion, "_announce", lambda name, version, model, alias: told.append((version, alias)))
    assert promotion.conclude(three[2].ref, decided(tmp_path / "again", three[2], three[0]), name="policy")["promoted"]
    assert told == []
    promotion.point("policy", "champion", None, back=True)
    promotion.point("policy", "champion", None)
    assert told == [(2, "champion")]


def test_a_gate_gives_nothing_back_that_a_person_took(three, tmp_path):
    """The same command, or the nightly run with a new evaluation, promoted the bad version again."""
    promotion.point("policy", "champion", None, back=True, reason="answers in French")
    entries = len(registry.log())
    for place, over in (("again", three[1]), ("newer", three[1]), ("against the first", three[0])):
        told = promotion.conclude(three[2].ref, decided(tmp_path / place, three[2], over), name="policy")
        assert not told["promoted"] and in_office() == 2
        assert "answers in French" in told["reasons"][0]
        assert told["reasons"][0].endswith("posttrain alias model:policy@champion 3")
    assert len(registry.log()) == entries
    # a better one passes, and what a person gives again a gate may, too
    new = store.publish_model(make_model(tmp_path / "d", "d"))
    assert promotion.conclude(new.ref, decided(tmp_path / "new", new, three[1]), name="policy")["promoted"]
    promotion.point("policy", "champion", 3)
    assert promotion.conclude(three[1].ref, decided(tmp_path / "b", three[1], three[2]), name="policy")["promoted"]
    assert promotion.conclude(three[2].ref, decided(tmp_path / "c", three[2], three[1]), name="policy")["promoted"]


# --- MLflow -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def tracked(state_dir, monkeypatch, mlflow_template):  # noqa: F811
    state_dir.mkdir(parents=True)
    shutil.copy(mlflow_template, state_dir / "mlflow.db")
    monkeypatch.setenv("POSTTRAIN_TRACKING", "on")
    monkeypatch.setenv("POSTTRAIN_TRACKING_WAIT_SECONDS", "120")
    monkeypatch.setattr(tracking, "RETRY_SECONDS", 0.5)
    for steps in (3, 4):
        run_stage(TOY, {}, {"steps": steps}, name_as="policy")
        promotion.point("policy", "champion", steps - 2)
    return state_dir


def test_mlflow_shows_a_step_back_and_why(tracked):
    assert int(aliases()["policy"]["champion"]) == 2
    promotion.point("policy", "champion", None, back=True, reason="answers in French")
    assert int(aliases()["policy"]["champion"]) == 1
    said = {
        int(one.version): one.tags["posttrain.champion"] for one in client().search_model_versions("name = 'policy'")
    }
    assert said[1].endswith("back from version 2: answers in French") and f"by {records.user()}" in said[1]
    assert said[2].endswith("now version 1: answers in French") and said[2].startswith("until ")
    # a gate's word about it ends what a person said of it
    registry.set_alias("policy", "champion", 2)
    tracking.flush_registry(60)
    assert int(aliases()["policy"]["champion"]) == 2
    assert all("posttrain.champion" not in one.tags for one in client().search_model_versions("name = 'policy'"))
    promotion.point("policy", "champion", None)
    assert "champion" not in aliases()["policy"]


def test_an_alias_that_mlflow_does_not_take_holds_up_no_other(tracked, monkeypatch):
    """Of a store of before aliases were checked."""
    with monkeypatch.context() as patch:
        patch.setattr(registry, "check_alias", lambda alias: alias)
        registry.set_alias("policy", "2026.11", 1)
    promotion.point("policy", "champion", 1)
    assert tracking.sync()["error"] is None and aliases()["policy"] == {"candidate": 2, "champion": 1}
    promotion.point("policy", "2026.11", None)
    assert "2026.11" not in registry.lookup("policy").aliases and tracking.sync()["error"] is None


def test_killed_between_the_two_the_next_command_tells_mlflow(tracked, monkeypatch):
    class Killed(BaseException):
        pass

    def killed(*arguments, **named):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(tracking, "flush_registry", killed)
        with pytest.raises(Killed):
            promotion.point("policy", "champion", None, back=True)
    assert (in_office(), int(aliases()["policy"]["champion"])) == (1, 2)
    assert tracking.sync()["error"] is None and int(aliases()["policy"]["champion"]) == 1


def test_an_interrupt_while_mlflow_is_told_is_no_reason_to_give_the_command_again(three, monkeypatch):
    """It would go one further back."""

    def interrupted(*arguments, **named):
        raise KeyboardInterrupt

    monkeypatch.setattr(tracking, "flush_registry", interrupted)
    assert promotion.point("policy", "champion", None, back=True)["version"] == in_office() == 2


# --- with the servers of posttrain up ---------------------------------------------------------------------------------

#: The command line, in a process that says on stderr which of MLflow's databases it opens.
WATCHED = """
import sys
sys.addaudithook(lambda event, given: event == "sqlite3.connect" and "mlflow.db" in str(given[0])
                 and print("OPENED", given[0], file=sys.stderr))
from flows.cli import main
sys.argv = ["posttrain", *sys.argv[1:]]
main()
"""


def test_promote_select_and_alias_tell_the_running_server_and_open_no_database(tracked, monkeypatch, tmp_path):
    """With `posttrain up` running, promote and select wrote into the database of its MLflow server beside it."""
    import os

    from flows import services
    from tests.evaluation.conftest import tiny_policy

    tiny_policy(str(tmp_path / "policy"), 0)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"{i} plus {i}?", "answer": str(2 * i)}) + "\n" for i in range(8)))
    rows = [{"prompt": f"{i} plus {i}?", "completion": str(2 * i)} for i in range(4)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = {"model": str(tmp_path / "policy"), "data": str(tmp_path / "rows.jsonl")}
    trained, other = (
        run_stage("sft", given, {"max_steps": 1}, seed=seed, name_as="mine").outputs["model"] for seed in (0, 1)
    )
    measured = {"split": "train", "num_samples": 1, "max_completion_length": 4}
    run_stage("evaluate", {"model": trained, "prompts": str(prompts)}, measured)

    url = f"http://127.0.0.1:{free_port()}"
    environment = {**os.environ, "PYTHONPATH": str(PROJECT_ROOT), "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    server = subprocess.Popen(
        [sys.executable, "-m", "mlflow", "server", "--port", url.rpartition(":")[2], "--workers", "1"]
        + ["--backend-store-uri", f"sqlite:///{tracked / 'mlflow.db'}", "--serve-artifacts"]
        + ["--artifacts-destination", (tracked / "mlartifacts").as_uri()],
        env=environment,
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 300
        while not services.answers(url + "/health") and server.poll() is None and time.monotonic() < deadline:
            time.sleep(0.2)
        services.atomic_write_json(
            tracked / "services.json", {"mlflow": services._entry(server, url, tmp_path / "log")}
        )
        commands = (
            ["promote", trained, *("--name", "mine", "--set", "gates=[{metric: length_mean, min: 0}]")]
            + ["--set", "min_prompts=2"],
            ["select", trained, other, *("--name", "mine", "--input", f"prompts={prompts}")]
            + [
                "--input",
                f"data={tmp_path / 'rows.jsonl'}",
                "--set",
                "split=train",
                "--set",
                "select_on=metric:length_mean",
            ]
            + ["--set", "evaluate.max_completion_length=4", "--set", "evaluate.split=train"],
            ["alias", CHAMPION, "--previous"],
        )
        for command in commands:
            done = subprocess.run(
                [sys.executable, "-c", WATCHED, *command, "--json"],
                env=environment,
                cwd=PROJECT_ROOT,
                capture_output=True,
                text=True,
                timeout=300,
            )
            assert "OPENED" not in done.stderr and done.returncode == 0, done.stderr + done.stdout
        from mlflow import MlflowClient

        there = MlflowClient(tracking_uri=url, registry_uri=url).search_registered_models()
        shown = {one.name: {alias: int(at) for alias, at in one.aliases.items()} for one in there}
        assert shown["policy"] == {"candidate": 2, "champion": 1} and {"champion", "selected"} <= shown["mine"].keys()
        assert shown == {name: one.aliases for name, one in registry.models().items()}
    finally:
        services._stop([server.pid], grace=10)


def called(*arguments):
    """A command, with its exceptions."""
    from typer.testing import CliRunner

    from flows.cli import app

    done = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    return done.exit_code, done.stdout


def looked_once(*arguments):
    code, text = called(*arguments, "--json")
    return json.loads(text.splitlines()[-1]), code


def test_rm_takes_no_alias_that_another_person_gave(tmp_path, monkeypatch):
    from flows.remove import remove

    monkeypatch.setenv("POSTTRAIN_HOME", str(tmp_path / "home"))
    for seed in (0, 1):
        run_stage(TOY, {}, {"steps": 2}, seed=seed, name_as="policy")

    monkeypatch.setenv("POSTTRAIN_USER", "ann")
    promotion.point("policy", "champion", 1, reason="answers in German")
    monkeypatch.setenv("POSTTRAIN_USER", "ben")
    gone = lambda: remove(["model:policy/1"], before=None, unalias=True, dry_run=False)
    with pytest.raises(
        ConfigError,
        match=r"model:policy/1 is champion since .* by ann: answers in German; ask ann, or take .* posttrain alias"
        r" model:policy@champion --remove --reason TEXT",
    ):
        gone()
    assert in_office() == 1
    promotion.point("policy", "champion", None, reason="ann left")  # under his own name, for all to read
    assert gone()["removed"] and in_office() is None
    promotion.point("policy", "champion", 2)
    assert remove(["model:policy/2"], before=None, unalias=True, dry_run=False)["removed"], (
        "what he gave goes with the files"
    )
