"""The rules of thumb: which method fits which data, and where they are told."""

import pytest

from stages import advise
from stages.harness import execute
from stages.registry import get_spec
from stages.spec import ConfigError
from storage.datasets import open_dataset
from tests.common import assistant, user, written
from tests.data.driver import ingest, write_lines
from tests.evaluation.test_stages import spec as plain

FULL = {"rows": 60_000}


def test_a_plan_says_what_the_models_of_all_passes_take_of_the_disk(tiny, tmp_path, monkeypatch):  # noqa: F811
    """InstructGPT keeps 16; what a plan says the stage says when it begins."""
    from flows.recipe import Plan, get_recipe, load_config
    from stages.models.memory import shape_of, shown
    from stages.sft import Config

    monkeypatch.setenv("POSTTRAIN_HOME", str(tmp_path / "not there yet"))
    given = {"demonstrations": "(d)", "prompts": "(p)", "text": "(t)", "rankings": "(r)"}
    values = {"model": tiny["policy"], "data": given}
    size = 4 * shape_of(tiny["policy"]).parameters

    def told(**more):
        plan = Plan("instructgpt", 0, [])
        get_recipe("instructgpt").method(plan, load_config("instructgpt", {**values, **more}))
        return [one for one in plan.advice if one.startswith("sft: publish_epochs")]

    (text,) = told()
    assert f"each of 16 passes, 16 x {shown(size)} = {shown(16 * size)} of disk" in text
    (half,) = told(sft={"save_dtype": "bfloat16", "num_train_epochs": 3})
    assert f"each of 3 passes, 3 x {shown(size // 2)} = {shown(3 * size // 2)}" in half
    assert not told(choose_checkpoint=False)
    assert advise.epochs_advice(Config(publish_epochs=True, num_train_epochs=1), 100, tmp_path) is None


@pytest.mark.parametrize(
    "facts,wanted",
    [
        ({"kind": "pairs/1", "parameters": 1_000_000_000}, "align method=dpo"),
        ({"kind": "pairs/1", "parameters": 30_000_000_000}, "reward_model, then rl preset=ppo"),
        ({"kind": "pairs/1", "doubtful": 0.3}, "reward_model, then rl preset=ppo"),
        ({"kind": "pairs/1", "doubtful": 0.3, "by_machine": 1.0}, "align method=dpo"),
        ({"kind": "pairs/1", "overlap": 0.9}, "align method=apo_zero"),
        ({"kind": "unpaired/1"}, "align method=kto"),
        ({"kind": "prompts/1", "verifiable": 1.0}, "rl preset=grpo"),
        ({"kind": "prompts/1"}, "rl preset=ppo with a reward_model"),
        (
            {"kind": "stepwise/1"},
            "reward_model objective=prm, then rl preset=ppo rewards=[{kind: model, step_credit: each}]",
        ),
    ],
)
def test_the_rules_of_the_texts(facts, wanted):
    assert advise.method_for(advise.Facts(**FULL, **facts))[0].startswith(wanted)


@pytest.mark.parametrize(
    "stage,config,facts,says",
    [
        ("align", {}, {"kind": "pairs/1"}, None),
        ("align", {}, {"kind": "pairs/1", "overlap": 0.9}, "method=apo_zero"),
        ("align", {"method": "apo_zero"}, {"kind": "pairs/1", "overlap": 0.9}, None),
        ("align", {"method": "kto"}, {"kind": "unpaired/1"}, None),
        ("align", {"method": "simpo"}, {"kind": "unpaired/1"}, "method=kto"),
        ("align", {}, {"kind": "pairs/1", "doubtful": 0.4}, "preset=ppo"),
        ("rl", {"preset": "ppo"}, {"kind": "prompts/1", "verifiable": 1.0}, "preset=grpo"),
        ("rl", {"preset": "grpo"}, {"kind": "prompts/1", "verifiable": 1.0}, None),
        (
            "rl",
            {"preset": "grpo", "rewards": [{"kind": "milestones"}]},
            {"kind": "prompts/1", "verifiable": 1.0},
            "credits the steps",
        ),
        ("sft", {}, {"kind": "demonstrations/1"}, None),
    ],
)
def test_a_stage_is_told_what_speaks_against_it(stage, config, facts, says):
    found = advise.advice(stage, get_spec(stage).config(**config), advise.Facts(**FULL, **facts))
    assert (says is None and found == []) or any(says in text for text in found)


def test_too_few_and_too_many_rows():
    assert "are few: the texts use 10,000 to 100,000" in advise.size_advice(advise.Facts("demonstrations/1", 500))
    assert "more than the texts use" in advise.size_advice(advise.Facts("prompts/1", 2_000_000))
    assert (
        advise.size_advice(advise.Facts("demonstrations/1", 50_000)) is None
        and advise.size_advice(advise.Facts("text/1", 1)) is None
    )


@pytest.fixture()
def noisy(tmp_path):
    """Six pairs of people of which two contradict each other and one is doubted."""
    rows = [
        {"prompt": user(f"q {i}"), "chosen": assistant(f"yes of course {i}"), "rejected": assistant(f"never {i}")}
        for i in range(5)
    ]
    rows += [{"prompt": user("q 0"), "chosen": rows[0]["rejected"], "rejected": rows[0]["chosen"]}]
    rows[1]["label_prob"] = 0.6
    written(str(tmp_path / "pairs"), "noisy", "pairs/1", [row for row in rows])
    return str(tmp_path / "pairs")


def test_facts_are_counted(noisy):
    data = open_dataset(noisy)
    facts = advise.facts_of("pairs/1", list(data.iter_rows()), 6)
    # they share the number
    assert (
        facts.doubtful == pytest.approx((0.5 + 0.5 + 0.4) / 6)
        and facts.by_machine == 0.0
        and facts.overlap == pytest.approx(1 / 5)
    )


def test_the_stage_and_the_log_of_training_say_the_same(tiny, noisy, tmp_path):
    result = execute(plain("advise", tmp_path / "a", {"data": noisy, "model": tiny["policy"]}, {}))
    told = [row["text"] for row in open_dataset(tmp_path / "a" / "out" / "advice").iter_rows()]
    assert (
        result["summary"]["method"] == "reward_model, then rl preset=ppo"
        and len(told) == 2
        and "about 23% of the labels are wrong" in told[0]
        and "6 rows of pairs/1 are few" in told[1]
    )
    events = []
    execute(
        plain(
            "align",
            tmp_path / "b",
            {"model": tiny["policy"], "data": noisy},
            {"max_steps": 1, "max_length": 96, "batch_size": 2},
        ),
        events.append,
    )
    said = [event["text"] for event in events if event["event"] == "log" and event["text"].startswith("advice: ")]
    assert len(said) == 2 and any("would take reward_model, then rl preset=ppo" in text for text in said)
    with pytest.raises(ConfigError, match="write split=NAME"):
        execute(plain("advise", tmp_path / "c", {"data": noisy}, {"split": "test"}))


def test_training_on_preferred_answers_alone_is_told(tiny, tmp_path):
    pairs = [{"prompt": f"q {i}", "chosen": f"yes {i}", "rejected": f"no {i}"} for i in range(6)]
    ingest(write_lines(tmp_path / "p.jsonl", pairs), tmp_path / "i", kind="demonstrations/1")
    events, data = [], str(tmp_path / "i" / "out" / "data")
    execute(plain("sft", tmp_path / "a", {"model": tiny["policy"], "data": data}, {"max_steps": 1}), events.append)
    said = [event["text"] for event in events if event["event"] == "log" and event["text"].startswith("advice: ")]
    assert any("the preferred answers of 6 pairs" in text and "align learns from both" in text for text in said)
