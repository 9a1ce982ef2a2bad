"""The iterated recipes: which steps they run on which models, read from a plan (no stage is run)."""

import pytest

from flows.recipe import Plan, get_recipe, load_config
from stages.spec import ConfigError


def planned(recipe, monkeypatch, metrics=None, **values):
    """{label: (stage, inputs, config, seed)} of a plan; `metrics` are given to the steps by label or stage name."""
    steps = {}

    class Recorder(Plan):
        def execute(self, stage, label, inputs, config, name_as, seed):
            value = super().execute(stage, label, inputs, config, name_as, seed)
            steps[label] = (stage, inputs, config, seed)
            told = metrics or {}
            return {**value, "metrics": told.get(label, told.get(stage, {}))}

    flow = get_recipe(recipe)
    unread = {key.removeprefix("data.") for key in flow.config_type.NOT_READ}
    given = {"data": {"prompts": "(given.prompts)", "pairs": "(given.pairs)"}, **values}
    given["data"] = {name: ref for name, ref in given["data"].items() if name not in unread}
    monkeypatch.setattr("flows.start.promote", lambda *args, **more: {})  # asks the registry for a champion
    flow.method(
        Recorder(recipe, 7, []),
        load_config(
            recipe,
            {
                "model": "(given.model)",
                "seed": 7,
                **given,
            },
        ),
    )
    return steps


def test_the_iterated_recipes_plan_their_rounds(monkeypatch):
    steps = planned("online_dpo", monkeypatch, rounds=3, sample={"max_prompts": 10})
    models = [steps[f"sample_{k}"][1]["model"] for k in (1, 2, 3)]
    assert models == ["(given.model)", "(align_1.model)", "(align_2.model)"]
    assert [steps[f"sample_{k}"][2].prompt_offset for k in (1, 2, 3)] == [0, 10, 20] and len(
        {steps[f"sample_{k}"][3] for k in (1, 2, 3)}
    ) == 3
    assert [steps[f"align_{k}"][1].get("reference") for k in (1, 2, 3)] == [None, "(given.model)", "(given.model)"]
    assert [steps[f"align_{k}"][1]["data"] for k in (1, 2)] == ["(pairs_1.data)", "(pairs_2.data)"]
    bpo = planned("online_dpo", monkeypatch, rounds=3, reference="previous", total_steps=100)
    assert [bpo[f"align_{k}"][2].max_steps for k in (1, 2, 3)] == [33, 33, 34] and all(
        "reference" not in bpo[f"align_{k}"][1] for k in (1, 2, 3)
    )
    free = planned("online_dpo", monkeypatch, rounds=2, align={"method": "simpo"})
    assert "reference" not in free["align_2"][1]
    judged = planned("online_dpo", monkeypatch, rounds=1, sample={"rewards": [{"name": "rm", "kind": "model"}]})
    assert (
        judged["train_reward_model"][1]["model"] == "(given.model)"
        and judged["sample_1"][1]["reward_model"] == "(train_reward_model.model)"
    )
    given = planned(
        "online_dpo",
        monkeypatch,
        rounds=1,
        reward_model="(my.rm)",
        sample={"rewards": [{"name": "rm", "kind": "model"}]},
    )
    assert "train_reward_model" not in given and given["sample_1"][1]["reward_model"] == "(my.rm)"

    with pytest.raises(Exception, match="write sample.num_generations=64"):
        planned("online_dpo", monkeypatch, pairs={"select": "rso"})
    assert (
        planned("online_dpo", monkeypatch, rounds=1, pairs={"select": "rso"}, sample={"num_generations": 64})[
            "pairs_1"
        ][2].rso_accept
        == 8
    )

    own = planned("online_dpo", monkeypatch, rounds=2, sample={"rewards": [{"kind": "judge"}]})
    assert [own[f"sample_{k}"][1].get("judge") for k in (1, 2)] == ["(given.model)", "(align_1.model)"]
    for recipe, values, asked in (
        ("d2po", {}, {"gold_1": "(given.model)", "gold_2": "(align_1.model)"}),
        ("hh", {"labels": "fresh"}, {"label_best": "(distil.model)", "online_1": "(rl_1.model)"}),
        ("llama2", {"labels": "fresh"}, {"gold_2_current": "(improve_1.model)", "gold_2_other": "(improve_1.model)"}),
    ):  # self: the policy of the round labels, too
        steps = planned(recipe, monkeypatch, rounds=2, gold={"rewards": [{"kind": "judge"}]}, **values)
        assert {label: steps[label][1].get("judge") for label in asked} == asked

    steps = planned("rest", monkeypatch, rounds=2, thresholds=[0.5, 0.8], improve={"learning_rate": 1e-4})
    assert [steps[f"improve_{k}"][1]["model"] for k in ("1_1", "1_2", "2_1")] == [
        "(given.model)",
        "(improve_1_1.model)",
        "(improve_1_2.model)",
    ]
    assert [steps[f"improve_1_{k}"][2].learning_rate for k in (1, 2)] == pytest.approx([1e-4, 5e-5])
    assert [steps[f"filter_1_{k}"][2].threshold for k in (1, 2)] == [0.5, 0.8] and steps["filter_1_2"][1][
        "candidates"
    ] == "(grow_1.candidates)"
    em = planned(
        "rest",
        monkeypatch,
        rounds=2,
        thresholds=[],
        improve_from="start",
        sample={"select": "all_correct", "max_per_prompt": 10},
    )
    assert [em[f"improve_{k}_1"][1]["model"] for k in (1, 2)] == ["(given.model)"] * 2 and em["grow_2"][1][
        "model"
    ] == "(improve_1_1.model)"
    assert em["improve_1_1"][1]["data"] == "(grow_1.selected)"
    above = planned("rest", monkeypatch, rounds=1, thresholds=[0.5, 0.8], sample={"select": "threshold"})
    # Grow needs one too, though the filters alone read what lies above it
    assert [above[label][2].threshold for label in ("grow_1", "filter_1_1", "filter_1_2")] == [0.5, 0.5, 0.8]
    empty = planned("rest", monkeypatch, metrics={"rejection": {"selected": 0}}, rounds=2, thresholds=[0.5, 0.8])
    assert not any(label.startswith("improve") for label in empty) and "filter_1_2" not in empty

    steps = planned("sdpo", monkeypatch, metrics={"curriculum": {"stages": 2}}, curriculum={"stages": 5})
    assert [(steps[f"align_{k}"][1]["model"], steps[f"align_{k}"][2].stage_index) for k in (0, 1)] == [
        ("(given.model)", 0),
        ("(align_0.model)", 1),
    ]
    assert "align_2" not in steps and all("reference" not in steps[f"align_{k}"][1] for k in (0, 1))


class Given:
    """A step of a plan as the rules about its inputs see it."""

    def __init__(self, inputs, config):
        self.inputs, self.config = inputs, config

    def has(self, name):
        return name in self.inputs

    def many(self, name):
        return {key: ref for key, ref in self.inputs.items() if key == name or key.startswith(name + ".")}


@pytest.mark.parametrize(
    "recipe,values",
    [
        (
            "rest",
            {
                "rounds": 2,
                "thresholds": [0.5, 0.8],
                "sample": {
                    "num_generations": 8,
                    "temperature": 0.7,
                    "max_prompts": 5,
                    "threshold_mode": "quantile",
                    "max_per_prompt": 3,
                    "block": 8,
                },
            },
        ),
        ("rest", {"thresholds": [], "sample": {"select": "all_correct", "max_per_prompt": 10, "rationalise": 2}}),
        (
            "d2po",
            {"rounds": 2, "gold_memory": "replay", "train_reward_model": {"replay_fraction": 0.3, "drift_alarm": 0.2}},
        ),
        (
            "iterated_rlhf",
            {
                "rounds": 2,
                "refresh": "after",
                "gold_memory": "replay",
                "train_reward_model": {"replay_fraction": 0.3, "drift_alarm": 0.2},
                "rl": {"rewards": [{"kind": "model"}]},
            },
        ),
        (
            "hh",
            {
                "rounds": 2,
                "labels": "fresh",
                "gold": {"temperature": 0.7, "rewards": [{"kind": "length"}]},
                "preference": {"drift_alarm": 0.2},
            },
        ),
        ("llama2", {"rounds": 3, "sample": {"temperature": 0.7}, "helpful": {"drift_alarm": 0.2}}),
    ],
)
def test_a_section_for_all_rounds_is_no_setting_that_one_step_ignores(recipe, values, monkeypatch):
    """What a round has no use for is reset by the recipe, and what the next one reads is kept."""
    from stages import rejection, reward_model
    from stages.settings import unread

    steps = planned(recipe, monkeypatch, metrics={"rejection": {"selected": 5}}, **values)
    asked = {
        label: (stage, Given(inputs, config))
        for label, (stage, inputs, config, _) in steps.items()
        if stage in ("rejection", "reward_model")
    }
    for label, (stage, given) in asked.items():
        assert not unread(
            given.config, {"rejection": rejection, "reward_model": reward_model}[stage].READ_OF_INPUTS, given
        ), label
        assert type(given.config).model_validate(given.config.model_dump(mode="json")) == given.config, label
    if recipe == "rest" and values["thresholds"]:
        assert {c.config.threshold_mode for label, (_, c) in asked.items() if label.startswith("filter")} == {
            "quantile"
        } and asked["filter_1_1"][1].config.max_per_prompt == 3
        assert (
            asked["grow_1"][1].config.num_generations,
            asked["grow_1"][1].config.temperature,
            asked["filter_1_1"][1].config.num_generations,
        ) == (8, 0.7, 16)
    if recipe == "d2po":
        assert [asked[f"discriminator_{k}"][1].config.replay_fraction for k in (1, 2)] == [0.1, 0.3] and asked[
            "discriminator_2"
        ][1].config.drift_alarm == 0.2


def test_files_are_split_for_the_evaluation_at_the_end_and_its_lack_is_said_at_once(monkeypatch):
    """A file has no splits; training for hours and then finding no test prompts would be late."""
    for recipe in ("online_dpo", "rest", "sdpo", "post_training", "iterated_rlhf"):
        config = planned(recipe, monkeypatch)["ingest_prompts"][2]
        assert (config.validation_fraction, config.test_fraction) == (0.05, 0.1)
    ready = {"ingest": {"rows_out": 3, "split.train": 2, "split.test": 1}}
    assert "align_1" in planned("online_dpo", monkeypatch, metrics=ready, rounds=1)
    for metrics, text in (
        (
            {"rows_out": 3, "split.train": 3},
            r"no prompt is in split 'test'.*train \(3\).*ingest_prompts.test_fraction=0.5.*evaluate.split=train",
        ),
        ({"rows_out": 0}, "no prompts"),
    ):
        with pytest.raises(Exception, match=text):
            planned("online_dpo", monkeypatch, metrics={"ingest": metrics}, rounds=1)


def test_objective_discovery_shows_each_proposal_all_scores_before_it(monkeypatch):
    """Proposal k reads every earlier loss and its validation score; refused ones are not trained; the test prompts are
    for the end.
    """
    steps = planned("objective_discovery", monkeypatch, proposals=2)
    inputs = steps["objective_2"][1]
    assert {name.split(".")[1] for name in inputs if name.startswith("objectives.")} == {
        "dpo",
        "hinge",
        "exponential",
        "1",
    } and inputs["scores.1"] == "(validate_1.scores)"
    assert steps["align_2"][1]["objective"] == "(objective_2.objective)" and {
        steps[f"align_{k}"][1]["model"] for k in ("dpo", "1", "2")
    } == {"(given.model)"}
    assert (
        steps["validate_1"][2].split == "validation"
        and steps["evaluate_start"][2].split == "test"
        and steps["objective_1"][3] != steps["objective_2"][3]
    )
    refused = planned(
        "objective_discovery",
        monkeypatch,
        metrics={"objective": {"valid": 0.0}, "evaluate": {"accuracy": 0.5}},
        proposals=1,
    )
    assert "align_1" not in refused
    with pytest.raises(
        ConfigError, match="propose.metric=beauty is no metric of the evaluation; write one of accuracy"
    ):
        planned(
            "objective_discovery",
            monkeypatch,
            metrics={"evaluate": {"accuracy": 0.5}},
            propose={"metric": "beauty"},
        )


def test_d2po_buys_labels_then_updates_the_scorer_then_aligns(monkeypatch):
    steps = planned("d2po", monkeypatch, rounds=2, gold={"max_prompts": 5})
    assert [steps[f"gold_{k}"][2].prompt_offset for k in (1, 2)] == [0, 5] and steps["gold_2"][1][
        "model"
    ] == "(align_1.model)"
    assert {name for name in steps["gold_pairs_2"][1]} == {"candidates.round_1", "candidates.round_2"}
    assert steps["discriminator_1"][1]["model"] == "(given.model)" and "previous" not in steps["discriminator_1"][1]
    assert (
        steps["discriminator_2"][1]["model"] == steps["discriminator_2"][1]["previous"] == "(discriminator_1.model)"
        and steps["discriminator_2"][2].init_head == "keep"
    )
    assert [steps[f"sample_{k}"][1]["reward_model"] for k in (1, 2)] == [
        "(discriminator_1.model)",
        "(discriminator_2.model)",
    ]
    fresh = planned("d2po", monkeypatch, rounds=2, gold_memory="round", discriminator="restart")
    assert (
        set(fresh["gold_pairs_2"][1]) == {"candidates.round_2"}
        and fresh["discriminator_2"][1]["model"] == "(given.model)"
        and fresh["discriminator_2"][2].init_head == "fresh"
    )


def test_ipo_md_samples_from_the_mixture_with_the_starting_policy(monkeypatch):
    steps = planned("online_dpo", monkeypatch, rounds=2, align={"method": "ipo"}, sample={"mixture_coef": 0.25})
    assert [(steps[f"sample_{k}"][1]["model"], steps[f"sample_{k}"][1]["reference"]) for k in (1, 2)] == [
        ("(given.model)", "(given.model)"),
        ("(align_1.model)", "(given.model)"),
    ]


def test_the_rl_benchmark_gives_every_arm_the_same_number_of_completions(monkeypatch):
    from stages.algorithms import RL_PRESETS

    steps = planned(
        "rl_benchmark",
        monkeypatch,
        seeds=[0, 1],
        iterations=6,
        rl={"prompts_per_step": 4, "num_generations": 8},
        data={"prompts": "(given.prompts)", "pairs": "(given.pairs)", "text": "(given.text)"},
    )
    runs = {label: (inputs, config, seed) for label, (stage, inputs, config, seed) in steps.items() if stage == "rl"}
    assert (
        len(runs) == 2 * (len(RL_PRESETS) - 1)
        and "rl_agent_0" not in runs
        and {inputs["model"] for inputs, _, _ in runs.values()} == {"(given.model)"}
        and {seed for _, _, seed in runs.values()} == {0, 1}
    )
    for inputs, config, _ in runs.values():
        passes = (config.num_iterations or RL_PRESETS[config.preset].num_iterations) * config.num_minibatches
        assert config.max_steps == 6 * passes and config.prompts_per_step * config.num_generations == 32
    assert (
        runs["rl_ppo_ptx_0"][0]["ptx"] == "(given.text)"
        and runs["rl_grpo_process_1"][0]["reward_model"] == "(train_reward_model.model)"
        and "reward_model" not in runs["rl_grpo_0"][0]
    )
    assert (
        steps["learning"][1]["rollouts.grpo.1"] == "(rl_grpo_1.rollouts)"
        and steps["learning"][1]["evaluations.grpo.1"] == "(evaluate_grpo_1.samples)"
    )
    from stages.policy.credit import length_adaptive_lambda
    from stages.policy.sequence_losses import Responses, on_policy_ipo

    # settings for answers of some twenty tokens and rewards of 0 and 1 (NEEDS): a lambda that is not 0, and a
    # preference that asks for a difference one can see
    vapo, ipo = (runs[f"rl_{name}_0"][1] for name in ("vapo", "online_ipo"))
    assert (
        length_adaptive_lambda([15], vapo.lam_alpha)[0] == pytest.approx(0.933, abs=1e-3)
        and length_adaptive_lambda([15], RL_PRESETS["vapo"].lam_alpha)[0] == 0.0
    )
    import numpy as np
    import torch

    def loss(gap):  # of a right and a wrong answer whose log-ratios differ by so much
        logps = torch.tensor([[gap], [0.0]])
        one = Responses(
            logps,
            logps,
            torch.zeros(2, 1),
            torch.ones(2, 1),
            torch.tensor([1.0, 0.0]),
            torch.zeros(2, 1),
            None,
            torch.tensor([[0, 1]]),
        )
        return on_policy_ipo(one, **{**RL_PRESETS["online_ipo"].options, **ipo.options}).item()

    assert min(np.arange(0.0, 8.0, 0.01), key=loss) == pytest.approx(4.62, abs=0.011)
    own = planned("rl_benchmark", monkeypatch, seeds=[0], arms={"grpo": {}, "free": {"preset": "grpo", "beta": 0.0}})
    assert own["rl_free_0"][2].beta == 0.0 and own["rl_grpo_0"][2].beta is None and "train_reward_model" not in own
    with pytest.raises(Exception, match="names no preset"):
        planned("rl_benchmark", monkeypatch, arms={"mine": {}})


def test_overoptimisation_learns_the_proxy_and_its_judge_from_different_halves(monkeypatch):
    """One start, one proxy; gold never trains a policy; every arm and best-of-n end in one report; a given proxy or
    gold model is not trained again.
    """
    steps = planned(
        "overoptimisation",
        monkeypatch,
        arms={"no_kl": {"kl_coef": 0.0}, "kl": {"preset": "grpo", "beta": 0.1}},
        rl={"max_steps": 7},
    )
    assert (
        steps["ingest_pairs"][2].halves
        and (steps["proxy"][2].split, steps["gold"][2].split) == ("rm_a", "rm_b")
        and steps["proxy"][3] != steps["gold"][3]
    )
    assert (steps["judge_proxy"][2].split, steps["judge_gold"][2].split) == ("rm_b", "rm_a")
    for arm, preset in (("no_kl", "rloo"), ("kl", "grpo")):
        inputs, config = steps[f"rl_{arm}"][1:3]
        assert inputs == {"model": "(given.model)", "data": "(ingest_prompts.data)", "reward_model": "(proxy.model)"}
        assert (config.preset, config.max_steps, config.monitor_kl) == (preset, 7, True) and [
            (r.kind, r.weight) for r in config.rewards
        ] == [("model", 1.0), ("verifier", 0.0)]
        assert steps[f"curve_{arm}"][1] == {
            "rollouts": f"(rl_{arm}.rollouts)",
            "model": "(given.model)",
            "reward_model": "(proxy.model)",
            "gold": "(gold.model)",
        }
        assert (
            steps[f"evaluate_{arm}"][1] == {**steps["evaluate_start"][1], "model": f"(rl_{arm}.model)"}
            and steps[f"evaluate_{arm}"][1]["gold"] == "(gold.model)"
        )
    assert (
        steps["rl_no_kl"][2].kl_coef == 0.0 and steps["rl_kl"][2].beta == 0.1 and steps["best_of_n"][2].split == "test"
    )
    assert set(steps["arms"][1]) == {
        "curves.no_kl",
        "curves.kl",
        "curves.best_of_n",
        "evaluations.no_kl",
        "evaluations.kl",
        "start",
    }
    given = planned("overoptimisation", monkeypatch, reward_model="(my.rm)", gold_model="(my.gold)")
    assert (
        not {"proxy", "gold", "ingest_pairs", "judge_gold"} & set(given)
        and given["curve_no_kl"][1]["gold"] == "(my.gold)"
    )
    assert planned("overoptimisation", monkeypatch, backbone="(small)")["proxy"][1]["model"] == "(small)"


def test_rewards_get_what_they_read(monkeypatch):
    """Every recipe gives a stage the judge, rubric, group context and demonstrations that its rewards ask for, no
    others, and refuses what is missing at load.
    """
    group = [{"kind": "group_preference", "group": "north"}, {"kind": "icdpo"}]
    extra = {"group_preference": "(my.gp)", "context": "(my.ratings)", "demonstrations": "(given.demonstrations)"}
    given = {
        "group_preference": "(my.gp)",
        "context": "(my.ratings)",
        "data": {"prompts": "(p)", "pairs": "(q)", "demonstrations": "(given.demonstrations)"},
    }
    for recipe, section, labels in (
        ("online_dpo", "sample", ["sample_1"]),
        ("rest", "sample", ["grow_1"]),
        ("d2po", "gold", ["gold_1"]),
        ("d2po", "sample", ["sample_1"]),
        ("iterated_rlhf", "rl", ["rl_1"]),
        ("rl_benchmark", "rl", ["rl_grpo_7"]),
        ("post_training", "rl", ["rl"]),
        ("post_training", "rejection", ["rejection"]),
        ("overoptimisation", "best_of_n", ["best_of_n"]),
        ("online_dpo", "evaluate", ["evaluate_start", "evaluate_round_1"]),
    ):
        monkeypatch.setattr("flows.post_training.promote", lambda *args, **more: {})
        more = (
            {"rounds": 1}
            if recipe in ("online_dpo", "rest", "d2po", "iterated_rlhf")
            else {"seeds": [7], "arms": {"grpo": {}}}
            if recipe == "rl_benchmark"
            else {}
        )
        steps = planned(recipe, monkeypatch, **{section: {"rewards": group}}, **given, **more)
        plain = planned(recipe, monkeypatch, **given, **more)
        for label in labels:
            found = steps[label][1]
            assert (
                {name: found[name] for name in extra} == extra
                and "judge" not in found
                and not set(extra) & set(plain[label][1])
            ), (recipe, label)
        with pytest.raises(Exception, match=f"{section}.rewards .* needs group_preference; write group_preference="):
            load_config(recipe, {"model": "m", section: {"rewards": group}})
    steps = planned("iterated_rlhf", monkeypatch, rounds=2, rl={"rewards": [{"kind": "rubric"}]}, rubric="(my.rubric)")
    assert [(steps[f"rl_{k}"][1]["rubric"], steps[f"rl_{k}"][1]["judge"]) for k in (1, 2)] == [
        ("(my.rubric)", "(given.model)"),
        ("(my.rubric)", "(rl_1.model)"),
    ]
    steps = planned(
        "iterated_rlhf",
        monkeypatch,
        rounds=1,
        rl={"rewards": [{"kind": "rubric", "endpoint": "http://x", "endpoint_model": "m"}]},
        rubric="(my.rubric)",
    )
    assert "judge" not in steps["rl_1"][1]
    monkeypatch.setattr("flows.verifiable.promote", lambda *args, **more: {})
    own = planned(
        "verifiable",
        monkeypatch,
        data={"demonstrations": "(d)"},
        rl={"rewards": [{"kind": "icdpo"}]},
        judge="(my.judge)",
        evaluate={"rewards": [{"kind": "judge"}]},
    )
    assert (
        own["rl"][1]["demonstrations"] == "(d)"
        and own["evaluate_rl"][1]["judge"] == "(my.judge)"
        and "judge" not in own["rl"][1]
    )


def test_test_problems_of_their_own_are_kept_out_of_training(monkeypatch):
    monkeypatch.setattr("flows.verifiable.promote", lambda *args, **more: {})
    steps = planned("verifiable", monkeypatch, data={"demonstrations": "(d)", "prompts": "(p)", "test": "(t)"})
    for name in ("ingest_demonstrations", "ingest_prompts"):
        assert steps[name][1]["benchmarks.test"] == "(t)" and steps[name][2].decontaminate == "coverage"
    assert "benchmarks.test" not in steps["ingest_test"][1]
    steps = planned(
        "verifiable",
        monkeypatch,
        data={"demonstrations": "(d)", "test": "(t)"},
        ingest_prompts={"decontaminate": "off"},
    )
    assert (
        "benchmarks.test" in steps["ingest_demonstrations"][1] and "benchmarks.test" not in steps["ingest_prompts"][1]
    )
    steps = planned("verifiable", monkeypatch, data={"demonstrations": "(d)"})
    assert (
        "benchmarks.test" not in steps["ingest_demonstrations"][1]
        and steps["ingest_demonstrations"][2].decontaminate == "off"
    )


def test_the_agent_recipe_acts_and_is_judged_in_one_environment(monkeypatch):
    """SFT on demonstrations of tool use, RL and both evaluations in the environment of its section; the world's tool
    data stands in for data not given.
    """
    monkeypatch.setattr("flows.agent.promote", lambda *args, **more: {})
    steps = planned("agent", monkeypatch, environment={"max_turn_length": 40}, rl={"learning_rate": 1e-4})
    assert steps["sft"][1]["model"] == "(given.model)" and steps["rl"][1] == {
        "model": "(sft.model)",
        "data": "(ingest_prompts.data)",
    }
    for name in ("rl", "evaluate_sft", "evaluate_agent"):
        config = steps[name][2]
        assert (config.environment, config.max_turns, config.max_turn_length) == ("tools", 6, 40) and config.rewards[
            0
        ].kind == "environment"
    assert (
        steps["rl"][2].learning_rate == 1e-4
        and steps["rl"][2].preset == "agent"
        and steps["evaluate_agent"][1]["model"] == "(rl.model)"
    )
    own = planned(
        "agent", monkeypatch, data={}, model=None, environment={"environment": "tests.training.environments:Countdown"}
    )
    assert (
        own["ingest_demonstrations"][1]["data"] == "(world.tool_demonstrations)"
        and own["ingest_prompts"][1]["data"] == "(world.tool_tasks)"
    )
    assert (
        own["base_model"][1]["conversations"] == "(ingest_demonstrations.data)"
        and own["rl"][2].environment_digest == own["evaluate_agent"][2].environment_digest != ""
    )
    for key, other in {"rl.max_turn_length": 20, "evaluate.max_turns": 2, "rl.environment": "tools"}.items():
        section, _, name = key.partition(".")
        with pytest.raises(ConfigError, match=f"{key} is not read by this recipe: .*; write environment.{name}"):
            load_config("agent", {section: {name: other}})


def test_iterated_rlhf_keeps_the_reward_model_with_the_policy(monkeypatch):
    """Labels on the current policy's answers, a reward model that goes on from the last one and is checked for drift,
    RL against it, KL to the start.
    """
    steps = planned("iterated_rlhf", monkeypatch, rounds=2, gold={"max_prompts": 5})
    assert [steps[f"gold_{k}"][1]["model"] for k in (1, 2)] == ["(given.model)", "(rl_1.model)"] and steps["gold_2"][
        2
    ].prompt_offset == 5
    assert (
        steps["discriminator_1"][2].init_head == "fresh"
        and steps["discriminator_2"][1]["model"] == steps["discriminator_2"][1]["previous"] == "(discriminator_1.model)"
    )
    assert [
        (steps[f"rl_{k}"][1]["model"], steps[f"rl_{k}"][1]["reward_model"], steps[f"rl_{k}"][1].get("reference"))
        for k in (1, 2)
    ] == [
        ("(given.model)", "(discriminator_1.model)", None),
        ("(rl_1.model)", "(discriminator_2.model)", "(given.model)"),
    ]
    assert (
        steps["rl_1"][2].rewards[0].kind == "model"
        and steps["rl_1"][2].preset == "rloo"
        and steps["rl_1"][3] != steps["rl_2"][3]
    )
    hybrid = planned("iterated_rlhf", monkeypatch, rounds=2, offline="first", kl_to="previous")
    assert (
        hybrid["rl_1"][1]["model"] == "(align_1.model)"
        and "align_2" not in hybrid
        and "reference" not in hybrid["rl_2"][1]
    )
    anchored = planned("iterated_rlhf", monkeypatch, rounds=2, offline="first")
    assert anchored["rl_1"][1]["reference"] == anchored["rl_2"][1]["reference"] == "(given.model)", (
        "the KL of the first round is to the first policy, too, and not to what DPO made of it"
    )
    after = planned("iterated_rlhf", monkeypatch, rounds=2, offline="after")
    assert (
        after["gold_2"][1]["model"] == "(align_1.model)"
        and after["align_2"][1]["model"] == "(rl_2.model)"
        and after["pairs_2"][1] == {"candidates.round_2": "(gold_2.candidates)"}
    )


def test_iterative_grpo_refreshes_reference_and_scorer(monkeypatch):
    """A round's KL is to the policy it starts from; the scorer goes on from itself after the round, on new answers and
    a share of all earlier comparisons.
    """
    steps = planned(
        "iterated_rlhf",
        monkeypatch,
        rounds=2,
        refresh="after",
        kl_to="previous",
        gold_memory="replay",
        rl={"preset": "grpo", "rewards": [{"name": "rm", "kind": "model"}]},
    )
    order = [label for label in steps if label.startswith(("rl_", "gold_pairs", "discriminator", "train_reward"))]
    assert order == [
        "train_reward_model",
        "rl_1",
        "gold_pairs_1",
        "discriminator_1",
        "rl_2",
        "gold_pairs_2",
        "discriminator_2",
    ]
    assert [steps[f"rl_{k}"][1]["reward_model"] for k in (1, 2)] == [
        "(train_reward_model.model)",
        "(discriminator_1.model)",
    ]
    assert (
        not any("reference" in steps[f"rl_{k}"][1] for k in (1, 2))
        and steps["rl_2"][1]["model"] == steps["gold_1"][1]["model"] == "(rl_1.model)"
    )
    first, second = (steps[f"discriminator_{k}"] for k in (1, 2))
    assert {n: ref for n, ref in second[1].items() if n.startswith("replay")} == {
        "replay.start": "(ingest_pairs.data)",
        "replay.round_1": "(gold_pairs_1.data)",
    }
    assert (
        [n for n in first[1] if n.startswith("replay")] == ["replay.start"]
        and first[2].init_head == "keep"
        and first[1]["previous"] == "(train_reward_model.model)"
    )
    never = planned("iterated_rlhf", monkeypatch, rounds=2, refresh="never", reward_model="(my.rm)")
    assert [never[f"rl_{k}"][1]["reward_model"] for k in (1, 2)] == ["(my.rm)"] * 2 and not any(
        label.startswith(("gold", "discriminator")) for label in never
    )
    ruled = planned(
        "iterated_rlhf",
        monkeypatch,
        rounds=1,
        refresh="never",
        rl={"rewards": [{"name": "verifier", "kind": "verifier"}]},
    )
    assert "train_reward_model" not in ruled and "reward_model" not in ruled["rl_1"][1], (
        "a reward model that nothing asks for is not trained"
    )
    with pytest.raises(ValueError, match="write refresh=before, or offline=none"):
        planned("iterated_rlhf", monkeypatch, refresh="after", offline="first")


def test_rlaif_labels_its_own_answers_and_runs_its_arms_from_one_start(monkeypatch):
    """The judge labels the start's answers; every arm starts from the same model and meets it in the end; d-RLAIF
    trains no reward model.
    """
    steps = planned("rlaif", monkeypatch, judge="(my.judge)", principles="(my.principles)")
    assert steps["sample"][1]["model"] == "(given.model)" and steps["sample"][2].num_generations == 2
    assert (
        steps["label"][1] == {"data": "(sample.candidates)", "judge": "(my.judge)", "principles": "(my.principles)"}
        and steps["label"][2].validation_fraction == 0.05
    )
    assert (
        steps["reward_model"][1] == {"model": "(given.model)", "data": "(label.data)"}
        and steps["reward_model"][2].objective == "soft_label"
    )
    assert steps["rl_rlaif"][1] == {
        "model": "(given.model)",
        "data": "(ingest_prompts.data)",
        "reward_model": "(reward_model.model)",
    }
    assert steps["win_rate"][1] == {
        "answers.start": "(evaluate_start.samples)",
        "answers.rlaif": "(evaluate_rlaif.samples)",
        "prompts": "(ingest_prompts.data)",
        "judge": "(my.judge)",
    }
    assert (
        steps["win_rate"][2].baseline == "start"
        and steps["evaluate_rlaif"][1]["reward_model"] == "(reward_model.model)"
    )
    from flows.steps import win_rates

    found = {
        "rlaif/win_rate": 0.61234,
        "rlaif/win_rate_low": 0.5,
        "rlaif/win_rate_high": 0.7,
        "rlaif/lc_win_rate": 0.58,
        "start/win_rate": 0.5,
    }
    assert win_rates(found, ["rlaif", "direct"], "start") == [
        {
            "model": "rlaif",
            "against": "start",
            "win rate": 0.6123,
            "win rate 95%": "[0.500, 0.700]",
            "length-controlled": 0.58,
        }
    ]
    own = planned("rlaif", monkeypatch)
    assert (
        own["label"][1]["judge"] == own["win_rate"][1]["judge"] == "(given.model)"
        and "principles" not in own["label"][1]
    )

    direct = planned(
        "rlaif",
        monkeypatch,
        judge="(my.judge)",
        direct=True,
        labels=False,
        final_judge="(other.judge)",
        rl={"rewards": [{"name": "opinion", "kind": "model"}, {"kind": "format"}]},
    )
    assert not {"sample", "label", "reward_model", "rl_rlaif"} & set(direct) and direct["rl_direct"][1] == {
        "model": "(given.model)",
        "data": "(ingest_prompts.data)",
        "judge": "(my.judge)",
    }
    assert [(r.kind, r.name, r.judge_mode) for r in direct["rl_direct"][2].rewards] == [
        ("judge", "opinion", "score"),
        ("format", "format", "score"),
    ] and direct["win_rate"][1]["judge"] == "(other.judge)"

    every = planned("rlaif", monkeypatch, judge="(my.judge)", direct=True, human=True, teacher_sft=True)
    assert {name for name in every["win_rate"][1] if name.startswith("answers.")} == {
        f"answers.{arm}" for arm in ("start", "rlaif", "direct", "human", "teacher_sft")
    }
    assert (
        {every[f"rl_{arm}"][1]["model"] for arm in ("rlaif", "direct", "human")}
        == {every["imitate"][1]["model"]}
        == {"(given.model)"}
    )
    assert (
        every["train_reward_model"][1]["data"] == "(ingest_pairs.data)"
        and every["rl_human"][1]["reward_model"] == "(train_reward_model.model)"
        and every["teach"][1]["model"] == "(my.judge)"
    )

    server = {"endpoint": "http://x", "endpoint_model": "m"}
    far = planned("rlaif", monkeypatch, label=server, direct=True)
    assert (
        "judge" not in far["label"][1]
        and "judge" not in far["win_rate"][1]
        and far["win_rate"][2].endpoint == "http://x"
        and "judge" not in far["rl_direct"][1]
    )
    assert far["rl_direct"][2].rewards[0].endpoint_model == "m"

    several = planned(
        "rlaif",
        monkeypatch,
        judge="(my.judge)",
        objectives={"kind": "(kind.file)", "true": "(true.file)"},
        combine={"combine": "weighted", "weights": {"kind": 0.4, "true": 0.6}},
    )
    assert [several[f"label_{name}"][1]["principles"] for name in ("kind", "true")] == [
        "(kind.file)",
        "(true.file)",
    ] and several["rl_rlaif"][1]["reward_model"] == "(combine.model)"
    assert several["combine"][1] == {
        "members.kind": "(reward_model_kind.model)",
        "members.true": "(reward_model_true.model)",
        "anchor": "(sample.candidates)",
    }
    for values, message in (
        ({"labels": False}, "no arm to run"),
        ({"teacher_sft": True}, "judge=MODEL_REF"),
        ({"rl": {"rewards": [{"kind": "verifier"}]}}, "no component of kind model"),
        ({"objectives": {"a": "x"}, "principles": "y"}, "principles of its own"),
        ({"label": server, "judge": "(my.judge)"}, "would not be asked"),
        ({"train_reward_model": {"objective": "bt"}}, "objective=soft_label"),
    ):
        with pytest.raises(Exception, match=message):
            planned("rlaif", monkeypatch, **values)


def test_rest_ends_where_a_round_gains_less_than_a_standard_error(monkeypatch):
    """recipe.rejection_sampling: on the validation prompts, which the choice at the end does not read."""

    def rounds(*accuracies, **more):
        told = {f"validate_{k}": {"accuracy": value, "accuracy_se": 0.1} for k, value in enumerate(accuracies)}
        steps = planned("rest", monkeypatch, metrics=told | more, rounds=4, thresholds=[], stop_when_flat=True)
        asked = {label: step for label, step in steps.items() if label.startswith("validate")}
        assert {config.split for _, _, config, _ in asked.values()} == {"validation"}
        assert (
            asked["validate_1"][1]["model"] == "(improve_1_1.model)"
            and asked["validate_0"][1]["model"] == "(given.model)"
        )
        return sum(label.startswith("improve") for label in steps)

    assert rounds(0.2, 0.4, 0.45, 0.9) == 2 and rounds(0.2, 0.1) == 1 and rounds(0.2, 0.35, 0.5, 0.65, 0.8) == 4
    assert rounds(0.0, 0.0) == 1 and rounds() == 4  # a plan knows no numbers
    assert not [
        label for label in planned("rest", monkeypatch, rounds=2, thresholds=[]) if label.startswith("validate")
    ]
    with pytest.raises(ConfigError, match="promote.metric=accuracy, which the evaluation does not have.*write"):
        rounds(validate_0={"length_mean": 3.0})


def test_thresholds_that_do_not_rise_are_refused():
    with pytest.raises(ConfigError, match=r"write thresholds=\[0.5, 0.9\]"):
        load_config("rest", {"model": "m", "data": {"prompts": "p"}, "thresholds": [0.9, 0.5, 0.5]})


def test_given_answers_are_graded_before_what_is_trained_unless_that_judges_them(monkeypatch):
    monkeypatch.setattr("flows.verifiable.promote", lambda *args, **more: {})

    def steps(**values):
        data = {"demonstrations": "(given.demonstrations)", "prompts": "(given.prompts)", "answers": {"theirs": "(a)"}}
        return planned("verifiable", monkeypatch, {"evaluate": {"accuracy": 0.5}}, **{"data": data, **values})

    judge = {"evaluate": {"rewards": [{"kind": "verifier"}, {"name": "judge", "kind": "judge", "weight": 0}]}}
    for values, first in (({}, True), (judge, False), ({**judge, "judge": "(given.judge)"}, True)):
        order = list(made := steps(**values))
        assert (order.index("evaluate_given_theirs") < order.index("sft")) is first
        judges = {label: made[label][1].get("judge") for label in ("evaluate_given_theirs", "evaluate_sft")}
        assert len(set(judges.values())) == 1 and (values == {}) == (None in judges.values())
        assert set(made["compare_given"][1]) >= {"evaluations.theirs"}
    for name, value in (
        ("environment", "tests.training.environments:Countdown"),
        ("mt_bench", {"endpoint": "http://localhost:1", "endpoint_model": "x"}),
    ):
        with pytest.raises(
            ConfigError, match=f"under evaluate.{name} the models are asked otherwise.*leave data.answers"
        ):
            steps(evaluate={name: value} | ({"rewards": [{"kind": "environment"}]} if name == "environment" else {}))
