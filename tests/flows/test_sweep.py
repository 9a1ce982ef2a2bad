"""Sweeps: which trials there are, what they share, how they are ranked, what is refused before anything runs."""

import json
import math
import os
import subprocess
import sys

import pytest

from flows.config import ConfigError
from flows.recipe import Plan, Variation, get_recipe, load_config
from flows.sweep import parse_over, planned
from tasks.run import StageError
from tests.common import assistant, user
from tests.evaluation.conftest import tiny_policy
from tests.processes import SHARED
from tests.serving import with_prefects_tables

STAGE = {"what": "sft", "inputs": {"model": "(given.model)", "data": "(given.data)"}, "metric": "loss", "goal": "min"}


class Steps(Plan):
    """A plan that answers every step with metrics of its own making."""

    def __init__(self, metrics):
        super().__init__("sweep", 0, [])
        self.metrics, self.calls = metrics, {}

    def execute(self, stage, label, inputs, config, name_as, seed):
        value = super().execute(stage, label, inputs, config, name_as, seed)
        self.calls[label] = (stage, inputs, config, seed)
        return {**value, "metrics": self.metrics(stage, config, seed)}


def swept(metrics, **values):
    steps = Steps(metrics)
    return steps, get_recipe("sweep").method(steps, load_config("sweep", values))


def test_every_combination_and_seed_is_a_trial_ranked_by_the_mean():
    steps, found = swept(
        lambda stage, config, seed: {"loss": config.learning_rate * 1e4 + config.num_train_epochs + seed},
        **STAGE,
        settings={"batch_size": 2},
        over={"learning_rate": [1e-4, 3e-4], "num_train_epochs": [2, 1]},
        seeds=[0, 2],
    )
    assert (
        list(steps.calls)[:3]
        == [
            "learning_rate-0.0001_num_train_epochs-2.s0.sft",
            "learning_rate-0.0001_num_train_epochs-2.s2.sft",
            "learning_rate-0.0001_num_train_epochs-1.s0.sft",
        ]
        and len(steps.calls) == 8
    )
    assert all(config.batch_size == 2 for _, _, config, _ in steps.calls.values())
    assert [(row["learning_rate"], row["num_train_epochs"], row["loss"]) for row in found["trials"]] == [
        (1e-4, 1, 3.0),
        (1e-4, 2, 4.0),
        (3e-4, 1, 5.0),
        (3e-4, 2, 6.0),
    ]
    assert found["trials"][0]["seeds"] == "2 to 4" and found["trials"][0]["standard error"] == pytest.approx(
        math.sqrt(2) / math.sqrt(2)
    )
    assert found["best"]["settings"] == {"learning_rate": 1e-4, "num_train_epochs": 1} and set(
        found["best"]["outputs"]
    ) == {"0", "2"}
    most = swept(
        lambda stage, config, seed: {"loss": config.learning_rate},
        **{**STAGE, "goal": "max"},
        over={"learning_rate": [1e-4, 3e-4]},
    )[1]
    assert most["best"]["settings"] == {"learning_rate": 3e-4}


def test_a_drawn_sweep_repeats_itself_and_inputs_can_be_swept():
    values = dict(**STAGE, over={"learning_rate": [i * 1e-5 for i in range(1, 9)]}, trials=3)
    drawn = [values for _, values, _ in planned(load_config("sweep", values))]
    assert len(drawn) == 3 and drawn == [values for _, values, _ in planned(load_config("sweep", values))]
    assert drawn != [v for _, v, _ in planned(load_config("sweep", {**values, "seed": 5}))]
    steps, _ = swept(lambda *_: {"loss": 1.0}, **STAGE, over={"inputs.data": ["(a.data)", "(b.data)"]})
    assert [inputs["data"] for _, inputs, _, _ in steps.calls.values()] == ["(a.data)", "(b.data)"] and list(
        steps.calls
    ) == ["trial-1.sft", "trial-2.sft"]


def test_a_recipe_is_swept_as_a_whole_and_promotes_nothing(monkeypatch):
    steps, found = swept(
        lambda stage, config, seed: {"accuracy": config.learning_rate * seed} if stage == "reward_model" else {},
        what="reward",
        metric="reward_0.accuracy",
        settings={"model": "(given.model)", "data.path": "(given.pairs)"},
        over={"reward_model.learning_rate": [1e-5, 2e-5]},
        seeds=[3],
    )
    assert list(steps.calls) == [
        "learning_rate-1e-05.ingest",
        "learning_rate-1e-05.reward_0",
        "learning_rate-2e-05.ingest",
        "learning_rate-2e-05.reward_0",
    ]
    assert {seed for _, _, _, seed in steps.calls.values()} == {3} and found["best"]["settings"] == {
        "reward_model.learning_rate": 2e-5
    }
    promoted = []
    monkeypatch.setattr(Steps, "conclude", lambda self, *args, **more: promoted.append(args), raising=False)
    monkeypatch.setattr("flows.start.promote", lambda *args, **more: {}, raising=False)
    swept(
        lambda stage, config, seed: {"accuracy": 0.5},
        what="post_training",
        metric="evaluate_sft.accuracy",
        preset="demo",
        over={"sft.learning_rate": [1e-4]},
    )
    assert not promoted


def test_failed_trials_stand_last_and_do_not_end_the_sweep():
    def metrics(stage, config, seed):
        if config.learning_rate > 1:
            raise StageError("sft", "the loss is not finite")
        return {"loss": float("nan") if config.learning_rate > 0.1 else config.learning_rate}

    found = swept(metrics, **STAGE, over={"learning_rate": [2.0, 0.5, 1e-4, 1e-3]})[1]
    assert [row["learning_rate"] for row in found["trials"]][:2] == [1e-4, 1e-3] and [
        row["failed"] for row in found["trials"] if row["loss"] is None
    ] == [1, 0]
    assert len(found["failures"]) == 1 and "not finite" in found["failures"][0]
    half = swept(
        lambda stage, config, seed: {
            "loss": float("nan") if config.learning_rate == 1e-5 and seed == 1 else config.learning_rate
        },
        **STAGE,
        over={"learning_rate": [1e-5, 1e-4]},
        seeds=[0, 1],
    )[1]
    assert half["best"]["settings"] == {"learning_rate": 1e-4}, (
        "a trial of which one seed diverged is no better than one that is whole"
    )
    with pytest.raises(ConfigError, match="every trial failed.*not finite"):
        swept(metrics, **STAGE, over={"learning_rate": [2.0, 3.0]})


@pytest.mark.parametrize(
    "values, text",
    [
        ({"over": {"learning_rat": [1e-4]}}, "did you mean 'learning_rate'"),
        ({"over": {"learning_rate": [1e-4, "abc"]}}, "valid number"),
        ({"over": {"learning_rate": []}}, "learning_rate has no values"),
        ({"over": {"learning_rate": [1e-4]}, "what": "stf"}, "did you mean 'sft'"),
        ({"over": {"learning_rate": [1e-4]}, "what": "sweep"}, "neither"),
        ({"over": {"inputs.modle": ["x"]}}, "model"),
        ({"over": {"learning_rate": [1e-4]}, "preset": "demo"}, "no presets"),
        ({"over": {"sft.learning_rate": [1e-4]}, "what": "post_training"}, "takes its data as settings"),
        ({"over": {"seed": [1]}, "what": "post_training", "inputs": {}}, "--seeds"),
        ({"over": {"rl.kl_coef": [None, 0.1]}, "what": "rest", "inputs": {}}, "rl.kl_coef: no step of this run reads"),
    ],
)
def test_what_is_wrong_is_said_before_anything_runs(values, text):
    with pytest.raises(ConfigError, match=text):
        planned(load_config("sweep", {**STAGE, **values}))


def test_a_setting_that_some_trials_have_no_use_for_may_be_swept():
    over = {"rl.kl_coef": [None, 0.1], "rl_after": [True, False]}
    assert len(planned(load_config("sweep", {"what": "rest", "over": over, "metric": "evaluate_start.accuracy"}))) == 4


def test_what_one_trial_reads_is_not_looked_for_in_the_others(monkeypatch):
    """Each look is a plan of the whole recipe: a hundred trials took a hundred times as long before the first began."""
    plans = []

    class Counted(Variation):
        def __init__(self, *args):
            plans.append(args)
            super().__init__(*args)

    monkeypatch.setattr("flows.recipe.Variation", Counted)
    given = {"model": "(given.model)", "data.path": "(given.pairs)", "dpo.batch_size": 12}
    counts = []
    for values in ([0.21], [0.21, 0.22, 0.23, 0.24]):
        config = {
            "what": "preference",
            "settings": given,
            "over": {"dpo.beta": values},
            "metric": "evaluate_dpo.accuracy",
        }
        assert len(planned(load_config("sweep", config))) == len(values)
        counts.append(len(plans))
        plans.clear()
    assert counts[0] == counts[1] > 0


def test_a_sweep_has_no_section_whose_settings_a_rerun_changes():
    """What `posttrain rerun latest --stage TRIAL --set KEY=VALUE` is told."""
    from flows.config import section

    with pytest.raises(ConfigError, match="give its command again with other settings"):
        section(get_recipe("sweep").config_type, "method-dpo.s0.align")
    with pytest.raises(ConfigError, match="there is no section 'quack'; the sections are: .*evaluate"):
        section(get_recipe("preference").config_type, "quack")


def test_an_unknown_metric_names_those_that_there_are():
    with pytest.raises(ConfigError, match="no metric 'eval_loss'; .*final_loss, tokens"):
        swept(
            lambda *_: {"final_loss": 1.0, "tokens": 5},
            **{**STAGE, "metric": "eval_loss"},
            over={"learning_rate": [1e-4]},
        )


def test_values_on_the_command_line():
    assert parse_over(["a=1e-5, 3e-5", "b=grpo,rloo", "c=[[1, 2], []]", "d=true"]) == {
        "a": [1e-5, 3e-5],
        "b": ["grpo", "rloo"],
        "c": [[1, 2], []],
        "d": [True],
    }
    for wrong, text in ((["a"], "write SETTING=VALUE"), (["a=1", "a=2"], "given twice")):
        with pytest.raises(ConfigError, match=text):
            parse_over(wrong)


def test_a_sweep_from_the_command_line_reuses_its_trials(tmp_path, forks):
    """A real one: of two learning rates one was run before, by itself."""
    forks.hold()
    data = tmp_path / "demos.jsonl"
    data.write_text(
        "".join(json.dumps({"messages": user(f"say {i}") + assistant(f"it is {i}")}) + "\n" for i in range(20))
    )
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PREFECT_", "MLFLOW_", "POSTTRAIN_"))} | {
        "POSTTRAIN_HOME": str(with_prefects_tables(tmp_path / "home")),
        "POSTTRAIN_TRACKING": "off",
    }

    def command(*arguments):
        done = subprocess.run(
            [sys.executable, "-c", SHARED, *arguments, "--json"],
            capture_output=True,
            text=True,
            env=environment,
            timeout=600,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    tiny_policy(str(tmp_path / "model"), 0)
    rows = command("stage", "ingest", "--input", f"data={data}", "validation_fraction=0.4")
    given = [
        "--input",
        f"model={tmp_path / 'model'}",
        "--input",
        f"data={rows['outputs']['data']}",
        "max_steps=3",
        "batch_size=4",
    ]
    alone = command("stage", "sft", *given, "learning_rate=1e-3")
    found = command(
        "sweep", "sft", *given, "--metric", "validation/nll", "--goal", "min", "--over", "learning_rate=1e-5,1e-3"
    )
    assert [step["cached"] for step in found["steps"]] == [False, True] and [
        row["learning_rate"] for row in found["trials"]
    ] == [1e-3, 1e-5]
    assert (
        found["best"]["outputs"]["0"] == alone["outputs"]
        and found["best"]["validation/nll"] == alone["metrics"]["validation/nll"]
    )
    assert [step["step"] for step in found["steps"]] == ["learning_rate-1e-05.sft", "learning_rate-0.001.sft"]
    again = command("rerun", found["run"], "--stage", "learning_rate-1e-05.sft", "--dry-run")["plan"]
    assert [step["plan"] for step in again] == ["run", "cached"]
