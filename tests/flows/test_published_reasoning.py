"""Published recipes: the graphs they plan, the numbers their presets stand for, and each new flow once to its end on a
tiny world.
"""

import pytest

from flows.config import load_preset
from flows.recipe import Run, get_recipe, load_config
from stages.harness import execute
from stages.registry import get_stage
from storage.datasets import open_dataset
from tests.common import silent
from tests.flows.test_iterated import planned


def settled(recipe, preset=None, **values):
    from flows.config import merge

    return load_config(recipe, merge(load_preset(recipe, preset) if preset else {}, values))


def preset_plan(recipe, preset, monkeypatch, **values):
    from flows.config import merge

    return planned(recipe, monkeypatch, **merge(load_preset(recipe, preset), values))


class Direct(Run):
    """Runs every stage of a recipe in this process, without Prefect, MLflow and records; refs are paths."""

    def __init__(self, recipe, seed, root):
        super().__init__(recipe, seed, [])
        self.root, self.found, self.given = root, {}, {}

    def digest(self, ref: str) -> str:
        return ref

    def execute(self, stage, label, inputs, config, name_as, seed):
        kinds = get_stage(stage).SPEC
        kinds.check_inputs(inputs)
        given = {
            name: {"kind": kinds.input_spec(name).kind, "path": ref, "ref": ref, "digest": self.digest(ref)}
            for name, ref in inputs.items()
        }
        self.given[label] = {name: one["digest"] for name, one in given.items()}
        assert label not in self.found, f"two steps are called {label}"
        result = execute(
            {
                "stage": stage,
                "key": label,
                "config": config.model_dump(mode="json") if config else {},
                "seed": seed,
                "device": "cpu",
                "inputs": given,
                "workdir": str(self.root / label),
            },
            silent,
        )
        self.found[label] = {
            "outputs": {name: output["path"] for name, output in result["outputs"].items()},
            "metrics": result["summary"],
            "cached": False,
            "seconds": 0.0,
        }
        return self.found[label]

    def together(self, parts):
        return [part() for part in parts]

    def conclude(self, candidate, outputs, name, alias="champion"):
        return {"model": candidate}

    def rows(self, label, output):
        return list(open_dataset(self.found[label]["outputs"][output]).iter_rows())


#: A world of a few rows and a model of a few thousand parameters.
TINY = {
    "world": {
        "text": {"train": 60, "validation": 4},
        "demonstrations": {"train": 24, "validation": 4},
        "comparisons": {"train": 60, "validation": 4, "test": 8},
        "prompts": {"train": 24, "validation": 4, "test": 8},
    },
    "base_model": {
        "hidden_size": 32,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "intermediate_size": 64,
        "vocab_size": 400,
    },
    "pretraining": {"max_steps": 2, "batch_size": 4},
    "promote": {"min_prompts": 2},
}
STEP = {"max_steps": 1, "batch_size": 4, "max_length": 128}
# a blank model hardly ever ends by itself: <|im_end|> is token 2
SHORT = {"max_completion_length": 8, "logit_bias": {2: 4.0}}
ROLLOUT = {"max_steps": 2, "prompts_per_step": 4, "num_generations": 2, "learning_rate": 1e-3, **SHORT}
#: A task that a blank model can do: an even number of characters is right.
EVEN = {
    "name": "even",
    "kind": "python",
    "source": "def score(prompt, completion, answer):\n    return len(completion) % 2 == 0\n",
}


def ran(recipe, tmp_path, monkeypatch, **values):
    monkeypatch.setattr("tasks.promotion.champion", lambda name: None)
    run = Direct(recipe, 3, tmp_path)
    return run, get_recipe(recipe).method(run, load_config(recipe, {"seed": 3, **TINY, **values}))


# ---------------------------------------------------------------- splits


def test_a_prompt_that_is_held_out_of_one_file_is_held_out_of_all(tmp_path):
    """Every file that a recipe trains on has the shares of its prompts: what the models are evaluated on is in no other
    file's training rows.
    """
    import json

    from flows.recipe import RECIPES
    from stages.ingest import Config as IngestConfig

    apart = {
        ("overoptimisation", "ingest_pairs"): "cut in halves for two reward models",
        ("character", "ingest_pool"): "shown to who writes prompts, not trained on",
    }
    shares = lambda section: (section.validation_fraction, section.test_fraction)
    for recipe in RECIPES:
        sections = {
            name: field.default
            for name, field in get_recipe(recipe).config_type.model_fields.items()
            if isinstance(field.default, IngestConfig)
        }
        for name, section in sections.items():
            if name != "ingest_test" and (recipe, name) not in apart:
                assert shares(section) == shares(sections.get("ingest_prompts", section)) and section.test_fraction, (
                    recipe,
                    name,
                )
    (tmp_path / "asked.jsonl").write_text(
        "\n".join(json.dumps({"prompt": f"how many are {i} and one?", "answer": str(i + 1)}) for i in range(200))
    )
    config, splits = load_config("tulu3", {}), {}
    for section in ("ingest_prompts", "ingest_preference_prompts"):
        given = {"data": {"kind": "dataset", "path": str(tmp_path / "asked.jsonl"), "ref": "asked", "digest": "a"}}
        made = execute(
            {
                "stage": "ingest",
                "key": section,
                "config": getattr(config, section).model_copy(update={"decontaminate": "off"}).model_dump(mode="json"),
                "seed": 0,
                "device": "cpu",
                "inputs": given,
                "workdir": str(tmp_path / section),
            },
            silent,
        )
        splits[section] = {
            row["prompt_id"]: row["split"] for row in open_dataset(made["outputs"]["data"]["path"]).iter_rows()
        }
    assert (
        splits["ingest_prompts"] == splits["ingest_preference_prompts"]
        and list(splits["ingest_prompts"].values()).count("test") > 5
    )


@pytest.mark.parametrize("recipe", ["verifiable", "instruction_following", "tulu3"])
def test_no_problem_of_a_benchmark_is_left_out(recipe):
    """A file of test problems (data.test) is evaluated on to its last row: GSM8K's 1319 and MATH's 5000 alike."""
    from stages.ingestion.curation import split_of
    from storage.files import sha256_text

    section = get_recipe(recipe).config_type.model_fields["ingest_test"].default
    assert {split_of(sha256_text(f"{i}"), section.salt, section.fractions()) for i in range(20_000)} == {"test"}


@pytest.mark.parametrize(
    "recipe, values, says",
    [
        ("tulu3", {"others": {"policy": "a-model"}}, "policy is the name of the model that the recipe trains"),
        ("specialists", {"specialists": {"prompts": "a.jsonl", "code": "b.jsonl"}}, "prompts is the name of another"),
        (
            "specialists",
            {"specialists": {"maths": "a.jsonl", "champion": "b.jsonl"}},
            "champion is the name of another",
        ),
        ("llama2", {"data": {"benchmarks": {"text": "quiz.jsonl"}}}, "text is what the recipe calls"),
        ("hh", {"data": {"benchmarks": {"prompts": "quiz.jsonl"}}}, "prompts is what the recipe calls"),
    ],
)
def test_a_name_that_would_take_the_place_of_another_is_refused(recipe, values, says):
    """Else the one would stand for the other without a word: a teacher for the policy's own answers, held-out text for
    a benchmark.
    """
    from stages.spec import ConfigError

    with pytest.raises(ConfigError, match=says):
        load_config(recipe, values)


# ---------------------------------------------------------------- R1


def test_r1_goes_from_a_cold_start_to_smaller_models(monkeypatch):
    """SFT, RL in parts, right and readable answers of every part to the BASE again, RL with rewards by domain and view,
    the same mixture to the students.
    """
    monkeypatch.setattr("flows.r1.promote", lambda *args, **more: {})
    data = {
        "demonstrations": "(cold)",
        "prompts": "(problems)",
        "pairs": "(help)",
        "safety_pairs": "(safe)",
        "general": "(chats)",
        "general_prompts": "(asks)",
    }
    steps = planned(
        "r1",
        monkeypatch,
        data=data,
        students={"small": "(small.model)", "tiny": "(tiny.model)"},
        reason={"max_steps": 7},
        student_rl=True,
    )
    assert steps["cold_start"][1] == {"model": "(given.model)", "data": "(ingest_demonstrations.data)"}
    assert [(steps[f"reason_{k}"][1]["model"], steps[f"reason_{k}"][2].max_steps) for k in (1, 2, 3)] == [
        ("(cold_start.model)", 2),
        ("(reason_1.model)", 2),
        ("(reason_2.model)", 3),
    ]
    assert [steps[f"sample_{k}"][1]["model"] for k in (1, 2, 3)] == [f"(reason_{k}.model)" for k in (1, 2, 3)] and len(
        {steps[f"sample_{k}"][3] for k in (1, 2, 3)}
    ) == 3
    assert {name: ref for name, ref in steps["select"][1].items() if name.startswith("candidates")} == {
        f"candidates.checkpoint_{k}": f"(sample_{k}.candidates)" for k in (1, 2, 3)
    }
    assert steps["select"][2].select == "all_correct"
    readable = steps["readable"][2]
    assert (
        steps["readable"][1] == {"data.reasoning": "(select.selected)"}
        and readable.drop_mixed_languages
        and readable.drop_code_blocks
        and readable.max_paragraph_chars
    )
    assert steps["mix"][1] == {"data.reasoning": "(readable.data)", "data.general": "(ingest_general.data)"} and steps[
        "mix"
    ][2].weights == {"reasoning": 3, "general": 1}
    assert not steps["mix"][2].drop_code_blocks, "code in general answers is no fault"
    assert steps["sft"][1] == {"model": "(given.model)", "data": "(mix.data)"}, "the base again, not the model after RL"
    assert (
        steps["helpful_model"][1] == {"model": "(sft.model)", "data": "(ingest_pairs.data)"}
        and steps["ingest_safety_pairs"][1]["data"] == "(safe)"
    )
    assert (
        steps["scenarios"][1]
        == {
            "data.reasoning": "(ingest_prompts.data)",
            "data.general": "(ingest_general_prompts.data)",
        }
        and steps["scenarios"][2].label_domains
    )
    assert steps["rl"][1] == {
        "model": "(sft.model)",
        "data": "(scenarios.data)",
        "reward_model": "(helpful_model.model)",
        "gold": "(harmless_model.model)",
    }
    assert [(c.name, c.kind, c.input, c.view, c.domains) for c in steps["rl"][2].rewards] == [
        ("accuracy", "verifier", "reward_model", "answer_only", ["reasoning"]),
        ("helpful", "model", "reward_model", "answer_only", ["general"]),
        ("harmless", "model", "gold", "full", ["general"]),
    ]
    assert steps["distil_small"][1] == {"model": "(small.model)", "data": "(mix.data)"} and steps["rl_tiny"][1] == {
        "model": "(tiny.model)",
        "data": "(ingest_prompts.data)",
    }
    assert {name for name in steps if name.startswith("evaluate_")} == {
        f"evaluate_{name}"
        for name in (
            "base",
            "cold_start",
            "reason",
            "sft",
            "rl",
            "distilled_small",
            "distilled_tiny",
            "rl_small",
            "rl_tiny",
        )
    }

    least = planned("r1", monkeypatch, data={"demonstrations": "(cold)", "prompts": "(problems)"}, checkpoints=1)
    assert (
        not {"mix", "helpful_model", "harmless_model", "ingest_general", "world"} & set(least)
        and least["sft"][1]["data"] == "(readable.data)"
    ), "what is not given is left out, not taken from the world"
    assert (
        [c.name for c in least["rl"][2].rewards] == ["accuracy"]
        and least["scenarios"][1] == {"data.reasoning": "(ingest_prompts.data)"}
        and not any(n.startswith("distil") for n in least)
    )
    zero = planned(
        "r1",
        monkeypatch,
        data={"demonstrations": "(cold)", "prompts": "(problems)", "pairs": "(help)"},
        zero_branch=True,
        helpful_model="(my.rm)",
    )
    assert (
        zero["zero"][1]["model"] == "(given.model)"
        and zero["zero"][2].prompt_template == zero["sample_zero"][2].prompt_template == "think_answer"
    )
    assert (
        zero["cold_start_data"][1]
        == {
            "data.given": "(ingest_demonstrations.data)",
            "data.zero": "(sample_zero.selected)",
        }
        and zero["cold_start"][1]["data"] == "(cold_start_data.data)"
    )
    assert (
        zero["rl"][1]["reward_model"] == "(my.rm)"
        and "gold" not in zero["rl"][1]
        and zero["ingest_general"][1]["data"] == zero["ingest_general_prompts"][1]["data"] == "(help)"
    )
    with pytest.raises(Exception, match="give data.pairs or helpful_model=REF"):
        load_config("r1", {"data": {"general_prompts": "(asks)"}})


def test_r1_has_the_published_settings():
    config = settled("r1")
    for section in (config.zero, config.reason, config.rl):
        assert (
            section.preset,
            section.num_generations,
            section.learning_rate,
            section.beta,
            section.ref_mode,
            section.ref_sync_steps,
        ) == ("grpo", 16, 3e-6, 0.001, "refresh", 400)
    assert (
        config.zero.completion_limit(8199) == 32768
        and config.zero.completion_limit(8200) == 65536
        and config.zero.max_steps == 10_400
    )
    assert [(c.kind, c.weight) for c in config.reason.rewards] == [
        ("verifier", 1.0),
        ("language", 1.0),
    ] and config.sft.num_train_epochs == 2
    from stages.rl import resolve_preset

    for section in (config.zero, config.reason, config.rl, settled("r1", "demo").reason):
        resolve_preset(section)


def test_r1_runs_to_its_end(tmp_path, monkeypatch):
    """Two checkpoints and a student with a tokenizer of its own: what is right and readable is learned, and rewards are
    those of the prompt's domain.
    """
    cheap = {"rewards": [{"kind": "length", "max_length": 8, "cache_length": 8}], "num_minibatches": 1}
    run, result = ran(
        "r1",
        tmp_path,
        monkeypatch,
        checkpoints=2,
        cold_start=STEP,
        sft=STEP,
        distil=STEP,
        train_reward_model=STEP,
        student={
            "hidden_size": 16,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "intermediate_size": 32,
            "vocab_size": 330,
        },
        reason={**ROLLOUT, **cheap},
        sample={**SHORT, "num_generations": 2, "rewards": [EVEN]},
        rl={**ROLLOUT, "num_minibatches": 1, "max_steps": 1, "prompts_per_step": 16},
        evaluate={**SHORT, "num_samples": 1, "limit": 4},
    )
    assert (
        set(result["models"]) == {"base", "cold_start", "reason", "sft", "rl", "distilled_student"}
        and len(result["scores"]) == 6
    )
    chosen = run.rows("select", "selected")
    assert (
        chosen
        and all(len(row["messages"][-1]["content"]) % 2 == 0 for row in chosen)
        and len({row["gen"]["model_id"] for row in chosen}) == 2
    )
    mixed = [row for row in run.rows("mix", "data") if row["split"] == "train"]
    reasoning = [row for row in mixed if '"mixed_from":"reasoning"' in row["extra_json"].replace(" ", "")]
    assert reasoning and abs(len(reasoning) - 3 * (len(mixed) - len(reasoning))) <= 4
    scenarios = {row["prompt_id"]: row["domain"] for row in run.rows("scenarios", "data")}
    assert set(scenarios.values()) == {"reasoning", "general"}
    parts = [
        (
            {c["name"]: c["value"] for c in row["reward_components"] if c["value"] is not None},
            scenarios[row["prompt_id"]],
        )
        for row in run.rows("rl", "rollouts")
    ]
    assert {(frozenset(found), domain) for found, domain in parts} == {
        (frozenset({"accuracy"}), "reasoning"),
        (frozenset({"helpful", "harmless"}), "general"),
    }


# ---------------------------------------------------------------- Tulu 3


def test_tulu3_compares_answers_of_several_models_and_rewards_what_is_verified(monkeypatch):
    monkeypatch.setattr("flows.tulu3.promote", lambda *args, **more: {})
    data = {"demonstrations": "(skills)", "prompts": "(rlvr)", "preference_prompts": "(asks)", "test": "(benchmarks)"}
    steps = planned("tulu3", monkeypatch, data=data, judge="(my.judge)", others={"llama": "(llama)", "qwen": "(qwen)"})
    for name in ("ingest_demonstrations", "ingest_prompts", "ingest_preference_prompts"):
        assert steps[name][1]["benchmarks.test"] == "(benchmarks)" and (
            steps[name][2].decontaminate,
            steps[name][2].decontaminate_n,
            steps[name][2].decontaminate_threshold,
        ) == ("coverage", 8, 0.5)
    assert (
        steps["sample"][1]
        == {
            "model": "(sft.model)",
            "prompts": "(ingest_preference_prompts.data)",
            "judge": "(my.judge)",
        }
        and steps["sample_qwen"][1]["model"] == "(qwen)"
    )
    assert steps["pairs"][1] == {
        "candidates.policy": "(sample.candidates)",
        "candidates.llama": "(sample_llama.candidates)",
        "candidates.qwen": "(sample_qwen.candidates)",
    }
    assert steps["dpo"][1] == {"model": "(sft.model)", "data": "(pairs.data)"} == steps["reward_model"][1]
    assert steps["rl"][1] == {
        "model": "(dpo.model)",
        "data": "(ingest_prompts.data)",
        "reward_model": "(reward_model.model)",
    } and not any(c.kind == "model" for c in steps["rl"][2].rewards)
    assert (
        steps["evaluate_rl"][1]["prompts"] == "(ingest_test.data)"
        and "evaluate_base" in steps
        and "contamination" in steps
    )
    own = planned("tulu3", monkeypatch, data={"demonstrations": "(skills)", "prompts": "(rlvr)"})
    assert (
        own["sample"][1] == {"model": "(sft.model)", "prompts": "(ingest_prompts.data)", "judge": "(sft.model)"}
        and own["ingest_prompts"][2].decontaminate == "off"
    )


def test_tulu3_has_the_published_settings():
    from stages.rl import resolve_preset

    small, large = settled("tulu3"), settled("tulu3", "70b")
    assert (
        small.sft.learning_rate,
        small.sft.lr_schedule,
        small.sft.warmup_ratio,
        small.sft.batch_size,
        small.sft.max_length,
        small.sft.num_train_epochs,
    ) == (5e-6, "linear", 0.03, 128, 4096, 2)
    assert small.sft.loss_agg_mode == "seq-mean-token-sum-norm"  # a sum over tokens, up to a constant
    assert (
        small.dpo.method,
        small.dpo.beta,
        small.dpo.learning_rate,
        small.dpo.lr_schedule,
        small.dpo.warmup_ratio,
        small.dpo.batch_size,
        small.dpo.max_length,
    ) == ("length_norm", 5.0, 5e-7, "linear", 0.1, 128, 2048)
    assert (small.reward_model.learning_rate, small.reward_model.batch_size, small.reward_model.num_train_epochs) == (
        3e-6,
        256,
        1,
    )
    rl = small.rl
    assert (
        rl.preset,
        rl.kl_coef,
        rl.learning_rate,
        rl.temperature,
        rl.max_completion_length,
        rl.prompts_per_step * rl.num_generations,
    ) == ("ppo", 0.05, 3e-7, 1.0, 2048, 224)
    assert (rl.truncation_policy, rl.missing_eos_penalty, rl.missing_eos_mode, rl.critic_init) == (
        "penalty",
        10.0,
        "replace",
        "reward_model",
    )
    assert (large.sft.learning_rate, large.dpo.learning_rate, large.rl.kl_coef, large.rl.prompts_per_step) == (
        2e-6,
        2e-7,
        0.07,
        640,
    ) and large.rl.missing_eos_penalty == 10.0
    assert [c.kind for c in small.sample.rewards] == ["judge"] * 4 and sum(c.weight for c in small.sample.rewards) == 1
    resolve_preset(rl), resolve_preset(large.rl)


def test_tulu3_runs_to_its_end(tmp_path, monkeypatch):
    """Four aspects rated by a model, best against a random lower one, and rewards of 10, 0 and -10."""
    run, result = ran(
        "tulu3",
        tmp_path,
        monkeypatch,
        sft=STEP,
        dpo=STEP,
        reward_model=STEP,
        sample={**SHORT, "num_generations": 4, "max_prompts": 8, "max_prompt_length": 128},
        rl={**ROLLOUT, "num_generations": 1, "max_prompt_length": 128, "max_steps": 4, "prompts_per_step": 8},
        evaluate={**SHORT, "num_samples": 1, "limit": 4},
    )
    assert set(result["models"]) == {"base", "sft", "dpo", "rl", "reward"} and len(result["scores"]) == 4
    rated = run.rows("sample", "candidates")
    assert all(
        {s["source"] for s in row["scores"]} == {"instruction_following", "helpfulness", "truthfulness", "honesty"}
        for row in rated
    )
    for row in rated:
        assert row["reward"] is None or row["reward"] == pytest.approx(sum(s["value"] for s in row["scores"]) / 4)
    rollouts = run.rows("rl", "rollouts")
    assert (
        {row["reward"] for row in rollouts} <= {-10.0, 0.0, 10.0}
        and all(row["reward"] == -10.0 for row in rollouts if row["truncated"])
        and any(row["truncated"] for row in rollouts)
    )


# ---------------------------------------------------------------- Zephyr


def test_zephyr_is_sft_on_chats_then_dpo_on_best_against_random(monkeypatch):
    steps = preset_plan("preference", "zephyr", monkeypatch, data={"path": "(feedback)", "demonstrations": "(chats)"})
    assert (
        steps["sft"][1] == {"model": "(given.model)", "data": "(ingest_demonstrations.data)"}
        and steps["ingest_demonstrations"][1]["data"] == "(chats)"
    )
    assert (
        steps["dpo"][1] == {"model": "(sft.model)", "data": "(ingest_pairs.data)"}
        and "reward_model" not in steps
        and "reward_model" not in steps["evaluate_dpo"][1]
    )
    assert steps["ingest_pairs"][2].pair_mode == "best_vs_random" and steps["ingest_pairs"][2].test_fraction == 0.1


def test_zephyr_has_the_published_settings():
    paper, release = settled("preference", "zephyr"), settled("preference", "zephyr_release")
    assert (
        paper.sft.learning_rate,
        paper.sft.lr_schedule,
        paper.sft.warmup_ratio,
        paper.sft.max_length,
        paper.sft.num_train_epochs,
    ) == (2e-5, "cosine", 0.1, 2048, 1)
    assert (
        paper.dpo.beta,
        paper.dpo.learning_rate,
        paper.dpo.warmup_ratio,
        paper.dpo.batch_size,
        paper.dpo.num_train_epochs,
    ) == (0.1, 5e-7, 0.1, 32, 3)
    assert (
        release.dpo.beta,
        release.dpo.learning_rate,
        release.dpo.batch_size,
        release.dpo.num_train_epochs,
        release.dpo.max_length,
    ) == (0.01, 5e-7, 128, 1, 1024) and release.sft == paper.sft


def test_preference_works_on_the_embedded_world_and_as_before_on_your_pairs(monkeypatch):
    world = preset_plan("preference", "zephyr_demo", monkeypatch, model=None, data={})
    assert (
        world["ingest_pairs"][1]["data"] == "(world.comparisons)"
        and world["ingest_prompts"][1]["data"] == "(world.prompts)"
    )
    assert (
        world["sft"][1] == {"model": "(pretraining.model)", "data": "(ingest_demonstrations.data)"}
        and world["evaluate_start"][1]["model"] == "(pretraining.model)"
    )
    mine = planned("preference", monkeypatch, data={"path": "(pairs)"}, sft_first=True)
    assert list(mine) == [
        "ingest_pairs",
        "ingest_prompts",
        "ingest_chosen",
        "sft",
        "reward_model",
        "evaluate_reward",
        "dpo",
        "evaluate_start",
        "evaluate_sft",
        "evaluate_dpo",
        "compare",
    ]
    assert (
        mine["ingest_chosen"][1]["data"] == mine["ingest_prompts"][1]["data"] == "(pairs)"
        and mine["evaluate_start"][1]["model"] == "(given.model)"
    )
    # what learning the chosen answers does to the rejected ones is logged where it is asked for
    assert "pairs" not in mine["sft"][1]
    watched = planned("preference", monkeypatch, data={"path": "(pairs)"}, sft_first=True, watch_pairs=True)
    assert watched["sft"][1]["pairs"] == watched["dpo"][1]["data"] == "(ingest_pairs.data)"
    with pytest.raises(Exception, match="watch_pairs .*; write sft_first=true, or leave it out"):
        load_config("preference", {"model": "m", "data": {"path": "(pairs)"}, "watch_pairs": True})
    with pytest.raises(Exception, match="write model="):
        load_config("preference", {"data": {"path": "(pairs)"}})
    with pytest.raises(Exception, match="write sft_first=true"):
        load_config("preference", {"model": "m", "data": {"path": "(pairs)", "demonstrations": "(chats)"}})


# ---------------------------------------------------------------- SPPO and other presets of recipes that are there


def test_sppo_takes_a_third_of_the_prompts_per_round_and_the_policy_before_as_reference(monkeypatch):
    steps = preset_plan("online_dpo", "sppo", monkeypatch)
    assert [steps[f"sample_{k}"][2].prompt_part for k in (1, 2, 3)] == [(1, 3), (2, 3), (3, 3)] and {
        steps[f"sample_{k}"][2].prompt_offset for k in (1, 2, 3)
    } == {0}
    assert (
        all("reference" not in steps[f"align_{k}"][1] for k in (1, 2, 3))
        and steps["align_2"][1]["model"] == steps["sample_2"][1]["model"] == "(align_1.model)"
    )
    assert (
        steps["train_reward_model"][2].objective == "pairwise"
        and steps["sample_1"][1]["reward_model"] == "(train_reward_model.model)"
    )
    sample, pairs, align = steps["sample_1"][2], steps["pairs_1"][2], steps["align_1"][2]
    assert sample.num_generations == 5 and (pairs.kind, pairs.members) == ("rankings/1", "best_and_worst")
    assert (align.method, align.beta, align.win_probability) == (
        "sppo",
        1e-3,
        "scores",
    ) and 1 / align.beta == pytest.approx(1e3)


def test_self_rewarding_is_reviewed_by_the_policy_of_the_round(monkeypatch):
    """Four answers, three reviews each, best against worst, and DPO from the policy that wrote and reviewed them."""
    steps = preset_plan("online_dpo", "self_rewarding", monkeypatch)
    for k, policy in ((1, steps["sample_1"][1]["model"]), (2, "(align_1.model)")):
        assert steps[f"sample_{k}"][1]["model"] == steps[f"sample_{k}"][1]["judge"] == policy
        assert steps[f"align_{k}"][1]["model"] == policy and "reference" not in steps[f"align_{k}"][1]
        sample = steps[f"sample_{k}"][2]
        assert (sample.num_generations, sample.temperature, sample.top_p) == (4, 0.7, 0.9)
        (reward,) = sample.rewards
        assert (reward.kind, reward.judge_mode, reward.judge_samples) == ("judge", "additive", 3)
        assert steps[f"pairs_{k}"][2].select == "best_vs_worst"
    assert "sample_3" not in steps


def test_slic_starling_one_shot_and_distillation_are_presets(monkeypatch):
    slic = preset_plan("online_dpo", "slic", monkeypatch)
    assert (
        "sample_2" not in slic
        and slic["train_reward_model"][2].objective == "t2t_pair"
        and slic["sample_1"][2].rewards[0].ranking == "tournament"
    )
    assert (
        slic["align_1"][2].method == "slic"
        and slic["align_1"][2].options == {"delta": 1.0, "reg_coef": 0.1}
        and "reference" not in slic["align_1"][1]
    )
    starling = preset_plan("iterated_rlhf", "starling", monkeypatch)
    assert (
        starling["ingest_pairs"][2].kind == "rankings/1"
        and starling["train_reward_model"][2].objective == "plackett_luce"
        and "gold_1" not in starling
    )
    assert (
        starling["rl_1"][1]
        == {
            "model": "(given.model)",
            "data": "(ingest_prompts.data)",
            "reward_model": "(train_reward_model.model)",
        }
        and starling["rl_1"][2].preset == "ppo"
    )
    few = preset_plan("rl_benchmark", "one_shot_rlvr", monkeypatch)
    assert [few[f"rl_{name}_0"][2].max_prompts for name in ("one", "eight", "all", "random_rewards")] == [
        1,
        8,
        None,
        1,
    ] and few["rl_random_rewards_0"][2].reward_override == "random"
    small = preset_plan("rest", "distill_small", monkeypatch, teacher="(large)", rl_after=True)
    assert (
        small["grow_1"][1]["model"] == "(large)"
        and small["improve_1_1"][1] == {"model": "(given.model)", "data": "(grow_1.selected)"}
        and small["rl"][1]["model"] == "(improve_1_1.model)"
    )
    assert small["evaluate_rl"][1]["model"] == "(rl.model)" and "rl" not in preset_plan(
        "rest", "distill_small", monkeypatch
    )


# ---------------------------------------------------------------- specialists


def test_specialists_start_from_one_base_and_are_merged(monkeypatch):
    monkeypatch.setattr("flows.specialists.promote", lambda *args, **more: {})
    steps = planned("specialists", monkeypatch, specialists={"maths": "(m)", "code": "(c)"}, merge={"method": "ties"})
    assert [(steps[f"sft_{name}"][1], steps[f"ingest_{name}"][1]["data"]) for name in ("maths", "code")] == [
        ({"model": "(given.model)", "data": "(ingest_maths.data)"}, "(m)"),
        ({"model": "(given.model)", "data": "(ingest_code.data)"}, "(c)"),
    ]
    assert (
        steps["merge"][1]
        == {
            "models.maths": "(sft_maths.model)",
            "models.code": "(sft_code.model)",
            "base": "(given.model)",
        }
        and "ingest_demonstrations" not in steps
    )
    soup = planned("specialists", monkeypatch, copies=2)
    assert (
        soup["merge"][1] == {"models.copy_1": "(sft_copy_1.model)", "models.copy_2": "(sft_copy_2.model)"}
        and soup["sft_copy_1"][3] != soup["sft_copy_2"][3]
    )
    assert soup["sft_copy_1"][1] == soup["sft_copy_2"][1] and soup["evaluate_merged"][1]["model"] == "(merge.model)"
    for values, message in (
        ({"specialists": {"a": "x"}}, "two or more"),
        ({"specialists": {"a": "x", "merged": "y"}}, "call the specialist otherwise"),
        ({"specialists": {"a": "x", "b": "y"}, "data": {"demonstrations": "z"}}, "leave data.demonstrations out"),
    ):
        with pytest.raises(Exception, match=message):
            load_config("specialists", values)


def test_specialists_run_to_their_end(tmp_path, monkeypatch):
    import torch
    from transformers import AutoModelForCausalLM

    run, result = ran(
        "specialists",
        tmp_path,
        monkeypatch,
        copies=2,
        sft={**STEP, "learning_rate": 1e-2},
        evaluate={**SHORT, "num_samples": 1, "limit": 4},
    )
    assert set(result["models"]) == {"base", "copy_1", "copy_2", "merged"} and len(result["scores"]) == 4
    one, two, mean = (
        AutoModelForCausalLM.from_pretrained(result["models"][name]).state_dict()
        for name in ("copy_1", "copy_2", "merged")
    )
    moved = [name for name in mean if not torch.equal(one[name], two[name])]
    assert moved and all(torch.allclose(mean[name], (one[name] + two[name]) / 2, atol=1e-6) for name in mean)


# ---------------------------------------------------------------- Llama 3


def test_llama3_learns_the_base_again_in_every_round(monkeypatch):
    """Fresh comparisons and a reward model on all of them, the best of K answers beside the skills to the base, DPO
    with NLL and masked formatting on this round's comparisons, averages.
    """
    data = {"prompts": "(p)", "demonstrations": "(skills)"}
    steps = planned("llama3", monkeypatch, rounds=2, data=data)
    assert steps["sft"][1] == {"model": "(given.model)", "data": "(ingest_demonstrations.data)"} and [
        steps[f"gold_{k}"][1]["model"] for k in (1, 2)
    ] == ["(sft.model)", "(dpo_1.model)"]
    assert (
        set(steps["gold_pairs_2"][1]) == {"candidates.round_1", "candidates.round_2"}
        and steps["discriminator_2"][2].objective == "bt"
        and not steps["discriminator_2"][2].use_margin
    )
    assert (
        steps["sample_2"][1]
        == {
            "model": "(dpo_1.model)",
            "prompts": "(ingest_prompts.data)",
            "reward_model": "(discriminator_2.model)",
        }
        and 10 <= steps["sample_2"][2].num_generations <= 30
    )
    assert steps["mix_2"][1] == {"data.sampled": "(sample_2.selected)", "data.skills": "(ingest_demonstrations.data)"}
    assert [steps[f"sft_{k}"][1] for k in (1, 2)] == [
        {"model": "(given.model)", "data": f"(mix_{k}.data)"} for k in (1, 2)
    ]
    assert steps["pairs_2"][1] == {"candidates.round_2": "(gold_2.candidates)"} and steps["dpo_2"][1] == {
        "model": "(sft_2.model)",
        "data": "(pairs_2.data)",
    }
    dpo, sft, config = steps["dpo_1"][2], steps["sft_1"][2], settled("llama3")
    assert (config.rounds, sft.learning_rate, dpo.learning_rate, dpo.beta, dpo.nll_coef, dpo.mask_formatting) == (
        6,
        1e-5,
        1e-5,
        0.1,
        0.2,
        True,
    ) and 8500 <= sft.max_steps <= 9000
    mean = planned("llama3", monkeypatch, rounds=1, average=2, start="(mine)", data={**data, "pairs": "(people)"})
    assert (
        mean["average_dpo_1"][1] == {"models.seed_1": "(dpo_1_1.model)", "models.seed_2": "(dpo_1_2.model)"}
        and mean["dpo_1_1"][3] != mean["dpo_1_2"][3]
    )
    assert (
        mean["dpo_1_1"][1]["model"] == "(average_sft_1.model)"
        and mean["evaluate_round_1"][1]["model"] == "(average_dpo_1.model)"
    )
    assert (
        "sft" not in mean
        and mean["gold_1"][1]["model"] == "(mine)"
        and mean["discriminator_1"][1]["replay.people"] == "(ingest_pairs.data)"
    )
    people = {**data, "pairs": "(people)"}
    learned = planned("llama3", monkeypatch, rounds=2, data=people)
    assert set(learned["gold_pairs_2"][1]) == {"candidates.round_1", "candidates.round_2"}
    assert {name: ref for name, ref in learned["discriminator_2"][1].items() if name.startswith("replay")} == {
        "replay.people": "(ingest_pairs.data)"
    } and learned["discriminator_2"][2].replay_fraction > 0.999, "all comparisons of people and of all rounds"
    share = {"gold_memory": "replay", "train_reward_model": {"replay_fraction": 0.3}}
    some = planned("llama3", monkeypatch, rounds=2, data=people, **share)
    assert set(some["gold_pairs_2"][1]) == {"candidates.round_2"} and some["discriminator_2"][2].replay_fraction == 0.3
    assert {"replay.people", "replay.round_1"} < set(some["discriminator_2"][1])
    with pytest.raises(Exception, match="write gold_memory=replay for a share"):
        planned("llama3", monkeypatch, data=people, train_reward_model={"replay_fraction": 0.3})
