"""The recipes with published settings: their numbers, their graphs, read from a plan (no stage is run), and each run
once to its end on a tiny model.
"""

import pytest

from flows.config import load_preset, merge
from flows.published import scaled, with_benchmarks
from flows.recipe import Run, get_recipe, load_config
from flows.outcome import print_result
from stages.registry import get_stage
from stages.rl import resolve_preset
from tests.common import silent
from tests.evaluation.conftest import tiny  # noqa: F401
from tests.flows.test_iterated import planned

GIVEN = {name: f"(given.{name})" for name in ("demonstrations", "pairs", "prompts", "text")}


def plan(recipe, monkeypatch, data=None, metrics=None, **values):
    return planned(recipe, monkeypatch, metrics, **{"data": {**GIVEN, **(data or {})}, **values})


def numbers(section, names):
    return {name: getattr(section, name) for name in names.split()}


# -- what was published ------------------------------------------------------------------------------------------------


def test_instructgpt_has_the_published_numbers():
    config = load_config("instructgpt", {})
    assert numbers(config.sft, "num_train_epochs learning_rate lr_schedule batch_size") == {
        "num_train_epochs": 16,
        "learning_rate": 9.65e-6,
        "lr_schedule": "cosine",
        "batch_size": 32,
    }
    assert (config.rank.min_generations, config.rank.num_generations, config.rank.max_prompts) == (4, 9, 33_000)
    assert numbers(config.kwise, "objective num_train_epochs learning_rate batch_size pair_weighting anchor") == {
        "objective": "kwise_pairs",
        "num_train_epochs": 1,
        "learning_rate": 9e-6,
        "batch_size": 64,
        "pair_weighting": "per_prompt",
        "anchor": "auto",
    }
    row, _ = resolve_preset(config.rl)
    assert (row.kl_reward_coef, row.epsilon, row.ptx_coef, row.gamma, row.lam, row.num_iterations, row.advantage) == (
        0.02,
        0.2,
        27.8,
        1.0,
        0.95,
        1,
        "gae",
    )
    rl = config.rl
    assert (
        rl.prompts_per_step * rl.num_generations,
        rl.prompts_per_step // rl.num_minibatches,
        rl.ptx_batch_ratio,
        rl.ema_decay,
        rl.temperature,
        rl.critic_init,
    ) == (512, 64, 8, 0.992, 1, "auto")
    assert rl.max_steps // rl.num_minibatches * 512 == 256_000
    large = load_config("instructgpt", load_preset("instructgpt", "175b"))
    assert (
        large.sft.learning_rate == 5.03e-6
        and large.sft.num_train_epochs == 16
        and large.rl.critic_learning_rate == 5e-6
        and large.rl.ptx_coef == 27.8
    )


def test_llama2_has_the_published_numbers():
    config = load_config("llama2", {})
    assert numbers(config.sft, "num_train_epochs learning_rate lr_schedule weight_decay batch_size max_length") == {
        "num_train_epochs": 2,
        "learning_rate": 2e-5,
        "lr_schedule": "cosine",
        "weight_decay": 0.1,
        "batch_size": 64,
        "max_length": 4096,
    }
    for model in (config.helpful, config.safety):
        assert numbers(model, "objective num_train_epochs learning_rate batch_size") == {
            "objective": "margin",
            "num_train_epochs": 1,
            "learning_rate": 1e-5,
            "batch_size": 512,
        }
    assert config.ingest_pairs.margin_mode == config.ingest_safety_pairs.margin_mode == "llama2_small"
    assert (config.combine.combine, config.combine.safety_threshold, config.rounds, config.sample.select) == (
        "safety_gate",
        0.15,
        5,
        "top_per_prompt",
    )
    row, _ = resolve_preset(config.rl)
    rl = config.rl
    assert (
        rl.learning_rate,
        rl.weight_decay,
        rl.max_grad_norm,
        row.epsilon,
        row.kl_reward_coef,
        rl.reward_norm,
        row.num_iterations,
    ) == (1e-6, 0.1, 1.0, 0.2, 0.01, "whiten", 1)
    assert (rl.prompts_per_step, rl.prompts_per_step // rl.num_minibatches) == (
        512,
        64,
    ) and 200 <= rl.max_steps // rl.num_minibatches <= 400
    large = load_config("llama2", load_preset("llama2", "70b"))
    assert (
        large.helpful.learning_rate == large.safety.learning_rate == 5e-6
        and large.rl.kl_coef == 0.005
        and large.helpful.objective == "margin"
    )


def test_hh_has_the_published_numbers():
    from flows.hh import our_prompt

    config = load_config("hh", {})
    row, _ = resolve_preset(config.rl)
    assert (
        row.kl_reward_coef == 0.001
        and config.rl.preset == "ppo"
        and config.best_of_n.num_generations == 16
        and config.preference.num_train_epochs == 1
    )
    assert 150_000 <= config.rl.max_steps // config.rl.num_minibatches * config.rl.prompts_per_step < 151_000
    assert config.pmp.objective == "pointwise_bce" and config.preference.objective == "bt"
    text = our_prompt()
    assert text.count("-----") == 14 and text.count("Human: ") == text.count("Assistant: ") == 15, (
        "fourteen conversations behind a preface, one of two turns"
    )
    study = load_config("overoptimisation", load_preset("overoptimisation", "hh"))
    assert study.arms == {"hh": {"kl_coef": 0.001}} and study.rl.preset == "ppo" and study.ingest_pairs.halves


def test_deepseekmath_has_the_published_numbers():
    config = load_config("deepseekmath", {})
    row, _ = resolve_preset(config.rl)
    rl = config.rl
    assert (
        rl.preset,
        rl.num_generations,
        rl.learning_rate,
        row.kl_loss_coef,
        row.epsilon,
        rl.max_completion_length,
        row.num_iterations,
        rl.num_minibatches,
    ) == ("grpo", 64, 1e-6, 0.04, 0.2, 1024, 1, 1)
    assert rl.prompts_per_step * rl.num_generations == 1024 and rl.max_steps * rl.prompts_per_step == 144_000
    assert config.train_reward_model.learning_rate == 2e-5 and config.train_reward_model.replay_fraction == 0.1
    assert load_config("deepseekmath", load_preset("deepseekmath", "iterative")).rounds == 2 and config.rounds == 1


@pytest.mark.parametrize("recipe", ["instructgpt", "llama2", "hh", "deepseekmath"])
def test_a_scaled_run_keeps_its_ratios(recipe):
    """Prompts and episodes by the scale, batches and steps by its root; epochs, minibatches per batch, answers per
    prompt and coefficients as they are.
    """
    whole, small = load_config(recipe, {}), scaled(load_config(recipe, {"scale": 0.01}))
    for name in ("prompts_per_step", "max_steps"):
        assert getattr(small.rl, name) == pytest.approx(getattr(whole.rl, name) / 10, abs=whole.rl.num_minibatches / 2)
    assert (
        small.rl.prompts_per_step % small.rl.num_minibatches == 0 and small.rl.max_steps % small.rl.num_minibatches == 0
    )
    kept = (
        "num_minibatches num_generations num_iterations kl_coef beta learning_rate ptx_batch_ratio ema_decay"
        " max_completion_length"
    )
    assert (
        numbers(small.rl, kept) == numbers(whole.rl, kept)
        and small.evaluate == whole.evaluate
        and small.world == whole.world
        and small.pretraining == whole.pretraining
    )
    for name in type(whole).model_fields:
        before, after = getattr(whole, name), getattr(small, name)
        if hasattr(before, "batch_size") and name not in whole.UNSCALED:
            assert (
                after.batch_size == max(1, round(before.batch_size / 10))
                and after.num_train_epochs == before.num_train_epochs
            ), name
        if getattr(before, "max_prompts", None):
            assert after.max_prompts == before.max_prompts // 100, name
    said = load_config(recipe, {"scale": 0.01}).remarks()
    assert (
        f"at scale=0.01 rl runs with max_steps={small.rl.max_steps}, prompts_per_step={small.rl.prompts_per_step}"
        in said
        and not whole.remarks()
    )
    assert (
        scaled(load_config(recipe, {})) == whole
        and (least := scaled(load_config(recipe, {"scale": 1e-6}))).rl.prompts_per_step == least.rl.num_minibatches
    )
    resolve_preset(least.rl)


@pytest.mark.parametrize("recipe", ["instructgpt", "llama2", "hh", "deepseekmath"])
def test_every_demo_starts_from_the_embedded_world_and_from_a_model(recipe, monkeypatch):
    demo = load_preset(recipe, "demo")
    own = plan(recipe, monkeypatch, **demo)
    assert (
        "world" not in own
        and "pretraining" not in own
        and any(inputs.get("model") == "(given.model)" for _, inputs, _, _ in own.values())
    )
    world = planned(
        recipe, monkeypatch, **merge(demo, {"model": None, "data": {name: None for name in ("prompts", "pairs")}})
    )
    # the planner replaces the gate
    assert "world" in world and world["pretraining"][1]["model"] == "(base_model.model)" and "promote" not in own
    for values in ({}, load_preset(recipe, "demo")):
        assert load_config(recipe, values).scale == (0.01 if values else 1)


# -- graphs ------------------------------------------------------------------------------------------------------------


def test_instructgpt_ranks_trains_chooses_and_optimises(monkeypatch):
    steps = plan("instructgpt", monkeypatch, {"benchmarks": {"quiz": "(quiz)"}}, rounds=2, plain_ppo=True)
    assert list(steps)[0] == "ingest_benchmark_quiz" and steps["ingest_benchmark_quiz"][1] == {"data": "(quiz)"}
    config = load_config("instructgpt", {"data": {"benchmarks": {"quiz": "dataset:quiz@latest"}}})
    assert with_benchmarks(None, config) == config  # a dataset is one already
    assert steps["sft"][1] == {"model": "(given.model)", "data": "(ingest_demonstrations.data)"} and steps[
        "train_reward_model"
    ][1] == {"model": "(sft.model)", "data": "(ingest_pairs.data)"}
    assert steps["answers_1"][1] == {
        "model": "(sft.model)",
        "prompts": "(ingest_prompts.data)",
        "reward_model": "(train_reward_model.model)",
    }
    assert (
        steps["rankings_1"][1] == {"candidates.round_1": "(answers_1.candidates)"}
        and steps["rankings_1"][2].kind == "rankings/1"
    )
    assert steps["reward_model_1"][1] == {
        "model": "(sft.model)",
        "data": "(rankings_1.data)",
        "anchor": "(ingest_demonstrations.data)",
    }
    chosen = steps["select_sft"]
    assert steps["sft"][2].publish_epochs and chosen[:2] == (
        "select_checkpoint",
        {
            "candidates.1": "(sft.epoch.1)",
            "data": "(ingest_demonstrations.data)",
            "reward_model": "(reward_model_1.model)",
        },
    )
    assert (chosen[2].evaluate.limit, chosen[2].evaluate.max_completion_length, chosen[2].max_length) == (
        64,
        1000,
        2048,
    )
    optimised = {"model": "(select_sft.model)", "data": "(ingest_prompts.data)"}
    assert steps["rl_1"][1] == {**optimised, "reward_model": "(reward_model_1.model)", "ptx": "(ingest_text.data)"}
    assert (
        steps["answers_2"][1]["model"] == "(rl_1.model)"
        and steps["answers_2"][2].prompt_offset == 33_000
        and steps["answers_2"][3] != steps["answers_1"][3]
    )
    assert (
        set(steps["rankings_2"][1]) == {"candidates.round_1", "candidates.round_2"}
        and steps["reward_model_2"][1]["previous"] == "(reward_model_1.model)"
    )
    assert steps["rl_2"][1] == {**optimised, "reward_model": "(reward_model_2.model)", "ptx": "(ingest_text.data)"}
    plain = steps["rl_plain"]
    assert (
        plain[1] == {**optimised, "reward_model": "(reward_model_2.model)"}
        and resolve_preset(plain[2])[0].ptx_coef == 0
    )
    same = "learning_rate kl_coef num_minibatches max_steps prompts_per_step ema_decay lam epsilon"
    assert numbers(plain[2], same) == numbers(steps["rl_1"][2], same) and plain[3] == steps["rl_2"][3]
    tax = steps["alignment_tax"][1]
    assert set(tax) == {
        f"evaluations.{model}/{part}"
        for model in ("start", "sft", "round_1", "round_2", "plain_ppo")
        for part in ("prompts", "text", "quiz")
    }
    assert (
        steps["evaluate_sft_text"][1] == {"model": "(select_sft.model)", "texts": "(ingest_text.data)"}
        and steps["evaluate_sft_text"][2].split == "validation"
    )
    assert (
        steps["evaluate_round_1_quiz"][1] == {"model": "(rl_1.model)", "prompts": "(ingest_benchmark_quiz.data)"}
        and steps["evaluate_round_1_quiz"][2].split == "train"
    )


def test_instructgpt_takes_people_s_rankings_a_judge_or_a_given_ranker(monkeypatch):
    people = plan(
        "instructgpt", monkeypatch, {"rankings": "(people)"}, choose_checkpoint=False, backbone="(six.billion)"
    )
    assert people["ingest_rankings"][1]["data"] == "(people)" and people["reward_model_1"][1] == {
        "model": "(six.billion)",
        "data": "(ingest_rankings.data)",
        "anchor": "(ingest_demonstrations.data)",
    }
    assert (
        not {"answers_1", "rankings_1", "train_reward_model", "select_sft"} & set(people)
        and people["rl_1"][1]["model"] == "(sft.model)"
    )
    with pytest.raises(ValueError, match="write choose_checkpoint=false, or leave sft.curriculum out"):
        load_config("instructgpt", {"sft": {"curriculum": "length"}})
    short = plan("instructgpt", monkeypatch, {"text": None}, **load_preset("instructgpt", "sft_rm"))
    assert "rl_1" not in short and short["evaluate_sft"][1]["model"] == "(select_sft.model)"
    again = plan("instructgpt", monkeypatch, {"rankings": "(people)"}, rounds=2, reward_model="(ranker)")
    assert (
        again["answers_2"][1]["reward_model"] == "(ranker)"
        and again["reward_model_2"][1]["replay.given"] == "(ingest_rankings.data)"
        and again["reward_model_2"][2].replay_fraction > 0.99
    )
    assert (
        again["rankings_2"][1] == {"candidates.round_2": "(answers_2.candidates)"}
        and "replay.given" not in again["reward_model_1"][1]
        and "train_reward_model" not in again
    )
    judged = plan("instructgpt", monkeypatch, rank={"rewards": [{"kind": "judge"}]}, judge="(my.judge)")
    assert (
        judged["answers_1"][1]["judge"] == "(my.judge)"
        and "reward_model" not in judged["answers_1"][1]
        and "train_reward_model" not in judged
    )
    with pytest.raises(Exception, match="write data.text=REF_OR_PATH, or rl.preset=ppo rl.ptx_coef=0"):
        plan("instructgpt", monkeypatch, {"text": None})
    without = plan(
        "instructgpt", monkeypatch, {"text": None}, rl={"preset": "ppo", "ptx_coef": 0.0, "ptx_batch_ratio": 1.0}
    )
    assert "ptx" not in without["rl_1"][1] and "ingest_text" not in without and "alignment_tax" not in without


def test_llama2_selects_over_all_rounds_and_ends_with_ppo(monkeypatch):
    steps = plan("llama2", monkeypatch, {"safety_pairs": "(safe)"}, rounds=3)
    assert steps["helpful"][1] == {"model": "(sft.model)", "data": "(ingest_pairs.data)"} and steps["safety"][1] == {
        "model": "(sft.model)",
        "data": "(ingest_safety_pairs.data)",
    }
    assert (
        steps["reward"][1] == {"members.helpful": "(helpful.model)", "members.safety": "(safety.model)"}
        and steps["reward"][2].combine == "safety_gate"
    )
    assert [steps[f"sample_{k}"][1]["model"] for k in (1, 2, 3)] == [
        "(sft.model)",
        "(improve_1.model)",
        "(improve_2.model)",
    ] and len({steps[f"sample_{k}"][3] for k in (1, 2, 3)}) == 3
    assert (
        all(steps[f"sample_{k}"][1]["reward_model"] == "(reward.model)" for k in (1, 2, 3)) and "select_1" not in steps
    )
    assert {n for n in steps["select_3"][1] if n.startswith("candidates")} == {
        f"candidates.round_{k}" for k in (1, 2, 3)
    } and steps["select_3"][2].rescore
    assert steps["select_3"][1]["reward_model"] == "(reward.model)" and not steps["sample_3"][2].rescore
    assert [steps[f"improve_{k}"][1] for k in (1, 3)] == [
        {"model": "(sft.model)", "data": "(sample_1.selected)"},
        {"model": "(improve_2.model)", "data": "(select_3.selected)"},
    ]
    assert steps["rl"][1] == {
        "model": "(improve_3.model)",
        "data": "(ingest_prompts.data)",
        "reward_model": "(reward.model)",
    } and list(steps).index("rl") > list(steps).index("improve_3")
    assert plan("llama2", monkeypatch, rounds=2, improve_from="sft")["improve_2"][1]["model"] == "(sft.model)"

    alone = plan("llama2", monkeypatch, rounds=1)
    assert alone["sample_1"][1]["reward_model"] == "(helpful.model)" and not {
        "safety",
        "reward",
        "ingest_safety_pairs",
    } & set(alone)
    fresh = plan("llama2", monkeypatch, {"safety_pairs": "(safe)"}, rounds=3, labels="fresh", gold={"temperature": 1.1})
    assert "gold_1_current" not in fresh and [fresh[f"gold_3_{who}"][1]["model"] for who in ("current", "other")] == [
        "(improve_2.model)",
        "(improve_1.model)",
    ]
    assert [fresh[f"gold_3_{who}"][2].temperature for who in ("current", "other")] == [1.1, 0.7] and fresh[
        "gold_3_current"
    ][3] != fresh["gold_3_other"][3]
    assert set(fresh["fresh_pairs_3"][1]) == {
        f"candidates.round_{k}_{who}" for k in (2, 3) for who in ("current", "other")
    }
    assert fresh["helpful_3"][1] == {
        "model": "(sft.model)",
        "data": "(fresh_pairs_3.data)",
        "replay.given": "(ingest_pairs.data)",
        "previous": "(helpful_2.model)",
    }
    assert (
        fresh["reward_3"][1] == {"members.helpful": "(helpful_3.model)", "members.safety": "(safety.model)"}
        and fresh["select_3"][1]["reward_model"] == fresh["rl"][1]["reward_model"] == "(reward_3.model)"
    )


def test_hh_distils_a_prompt_pretrains_and_begins_every_round_from_the_start(monkeypatch):
    steps = plan(
        "hh", monkeypatch, {"pmp": "(votes)"}, labels="fresh", rounds=2, hhh_prompt="Be kind.", final_judge="(judge)"
    )
    assert (
        steps["behind_prompt"][1]["model"] == "(given.model)"
        and steps["behind_prompt"][2].system == "Be kind."
        and "sft" not in steps
    )
    assert steps["distil"][1] == {"model": "(given.model)", "data": "(behind_prompt.selected)"} and (
        steps["distil"][2].method,
        steps["distil"][2].context,
    ) == ("context", "Be kind.")
    assert (
        steps["ingest_pmp"][1]["data"] == "(votes)"
        and steps["ingest_pmp"][2].kind == "unpaired/1"
        and steps["pmp"][1] == {"model": "(given.model)", "data": "(ingest_pmp.data)"}
    )
    assert (
        steps["early"][1] == {"model": "(pmp.model)", "data": "(ingest_pairs.data)"}
        and steps["early"][2].init_head == "keep"
    )
    best = steps["label_best"]
    assert (
        steps["best_of_n"][1]["reward_model"] == "(early.model)"
        and best[1]["candidates"] == "(best_of_n.candidates)"
        and (best[2].rescore, best[2].rescore_best) == (True, 2)
    )
    assert best[2].rewards[0].kind == "verifier" and "reward_model" not in best[1]
    assert (
        set(steps["fresh_pairs_1"][1]) == {"candidates.best_of_n"}
        and set(steps["fresh_pairs_2"][1]) == {"candidates.best_of_n", "candidates.online_1"}
        and "online_2" not in steps
    )
    for k, previous in ((1, "(early.model)"), (2, "(preference_1.model)")):
        assert steps[f"preference_{k}"][1] == {
            "model": "(pmp.model)",
            "data": f"(fresh_pairs_{k}.data)",
            "replay.given": "(ingest_pairs.data)",
            "previous": previous,
        }
        assert steps[f"rl_{k}"][1] == {
            "model": "(distil.model)",
            "data": "(ingest_prompts.data)",
            "reward_model": f"(preference_{k}.model)",
        }
    assert (
        steps["online_1"][1]["model"] == "(rl_1.model)"
        and steps["win_rate"][1]["judge"] == "(judge)"
        and steps["win_rate"][2].baseline == "start"
    )

    least = plan("hh", monkeypatch)
    assert (
        least["preference_1"][1] == {"model": "(given.model)", "data": "(ingest_pairs.data)"}
        and least["preference_1"][2].init_head == "fresh"
    )
    assert (
        not {"pmp", "early", "best_of_n", "win_rate", "online_1"} & set(least)
        and least["behind_prompt"][2].system.count("Human: ") == 15
    )
    with pytest.raises(Exception, match="write labels=fresh"):
        plan("hh", monkeypatch, rounds=2)


def test_deepseekmath_goes_from_text_to_grpo_under_three_kinds_of_supervision(monkeypatch):
    steps = plan("deepseekmath", monkeypatch, rounds=2)
    assert (
        steps["midtrain"][1] == {"model": "(given.model)", "data": "(ingest_text.data)"}
        and steps["midtrain"][2].train_on == "full"
    )
    assert (
        steps["sft"][1] == {"model": "(midtrain.model)", "data": "(ingest_demonstrations.data)"}
        and steps["solutions_1"][1]["model"] == "(sft.model)"
    )
    assert steps["labels_1"][2].kind == "unpaired/1" and steps["reward_model_1"][1] == {
        "model": "(midtrain.model)",
        "data": "(labels_1.data)",
    }
    assert [steps[f"rl_{k}"][1] for k in (1, 2)] == [
        {"model": model, "data": "(ingest_prompts.data)", "reward_model": f"(reward_model_{k}.model)"}
        for k, model in ((1, "(sft.model)"), (2, "(rl_1.model)"))
    ]
    assert steps["solutions_2"][1]["model"] == "(rl_1.model)" and [
        (c.kind, c.squash, c.no_eos_reward) for c in steps["rl_1"][2].rewards
    ] == [("model", "sigmoid", None)], "cut is not better than wrong"
    assert steps["reward_model_2"][1] == {
        "model": "(reward_model_1.model)",
        "data": "(labels_2.data)",
        "previous": "(reward_model_1.model)",
        "replay.round_1": "(labels_1.data)",
    }
    assert (
        steps["reward_model_2"][2].init_head == "keep"
        and steps["reward_model_2"][2].replay_fraction == 0.1
        and "reference" not in steps["rl_2"][1]
    )

    process = plan("deepseekmath", monkeypatch, supervision="process", steps={"separator": "\n"})
    assert (
        process["steps_1"][1]
        == {
            "model": "(sft.model)",
            "candidates": "(solutions_1.candidates)",
            "prompts": "(ingest_prompts.data)",
        }
        and process["reward_model_1"][1]["data"] == "(steps_1.steps)"
    )
    assert (process["rl_1"][2].preset, process["rl_1"][2].step_separator, process["rl_1"][2].num_generations) == (
        "grpo_process",
        "\n",
        64,
    ) and "labels_1" not in process
    assert [c.squash for c in process["rl_1"][2].rewards] == ["none"]
    resolve_preset(type(process["rl_1"][2]).model_validate(process["rl_1"][2].model_dump()))
    rule = plan("deepseekmath", monkeypatch, supervision="rule")
    assert (
        [c.kind for c in rule["rl_1"][2].rewards] == ["verifier"]
        and "reward_model" not in rule["rl_1"][1]
        and not {"solutions_1", "reward_model_1"} & set(rule)
    )
    bare = plan("deepseekmath", monkeypatch, {"text": None}, reward_model="(my.rm)")
    assert (
        "midtrain" not in bare
        and bare["sft"][1]["model"] == "(given.model)"
        and bare["rl_1"][1]["reward_model"] == "(my.rm)"
        and "solutions_1" not in bare
    )
    for values, message in (
        ({"rl": {"preset": "grpo_process"}}, "write supervision=process"),
        ({"supervision": "rule", "reward_model": "x"}, "leave reward_model out"),
    ):
        with pytest.raises(Exception, match=message):
            plan("deepseekmath", monkeypatch, **values)


def test_few_fresh_comparisons_push_none_of_the_given_ones_out():
    """Llama 2's 1.4M given comparisons beside some hundreds of a round: all of them are trained on again."""
    from types import SimpleNamespace

    import numpy as np

    from flows.published import EVERYTHING
    from stages.reward_model import Config, replay

    settings = Config(replay_fraction=EVERYTHING)
    stage = SimpleNamespace(
        many=lambda name: ["given"],
        dataset=lambda name: SimpleNamespace(kind="pairs/1"),
        rng=lambda *a: np.random.default_rng(0),
    )
    pairs = SimpleNamespace(name="bt")
    setup = SimpleNamespace(config=settings, row=pairs, items=lambda *a: range(1_400_000))
    assert len(replay(stage, setup, 300)) == len(set(replay(stage, setup, 300))) == 1_400_000
    settings = settings.model_copy(update={"replay_fraction": 0.1})
    assert len(replay(stage, SimpleNamespace(config=settings, row=pairs, items=setup.items), 900)) == 100


# -- to the end --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """The embedded world in its smallest, as data given by path."""
    from stages.harness import execute

    sizes = {
        "text": {"train": 24, "validation": 2},
        "demonstrations": {"train": 24, "validation": 4},
        "comparisons": {"train": 24, "validation": 6, "test": 6},
        "prompts": {"train": 16, "validation": 2, "test": 6},
    }
    made = execute(
        {
            "stage": "world",
            "key": "world",
            "config": sizes,
            "seed": 1,
            "device": "cpu",
            "inputs": {},
            "workdir": str(tmp_path_factory.mktemp("world")),
        },
        silent,
    )
    return {name: out["path"] for name, out in made["outputs"].items()}


class InProcess(Run):
    """Runs every stage of a recipe in this process, one after the other; a ref is a path."""

    def __init__(self, recipe, folder):
        super().__init__(recipe, 3, [])
        self.folder, self.inputs, self.concluded = folder, {}, []

    def execute(self, stage, label, inputs, config, name_as, seed):
        from stages.harness import execute

        kinds, self.inputs[label] = get_stage(stage).SPEC.inputs, inputs
        given = {
            name: {"kind": kinds[name.partition(".")[0]].kind, "path": path, "ref": path, "digest": path}
            for name, path in inputs.items()
        }
        made = execute(
            {
                "stage": stage,
                "key": label,
                "config": config.model_dump(mode="json") if config else {},
                "seed": seed,
                "device": "cpu",
                "inputs": given,
                "workdir": str(self.folder / label),
            },
            silent,
        )
        return {
            "outputs": {name: out["path"] for name, out in made["outputs"].items()},
            "metrics": made["summary"],
            "cached": False,
            "seconds": 0.0,
        }

    def together(self, parts):
        return [part() for part in parts]

    def conclude(self, candidate, outputs, name, alias="champion"):
        self.concluded.append((name, alias))
        return {}


#: What a random model writes ends at its first letter, and has a reward by rules; sizes of a few rows and steps.
ENDS = {"max_completion_length": 24, "min_tokens": 2, "stop_strings": list("abcdefghijklmnopqrstuvwxyz")}
RULE = [
    {
        "name": "signs",
        "kind": "python",
        "source": "def score(prompt, completion, answer):\n    return float(len(completion) % 5)\n",
    }
]
ROWS = {"batch_size": 8, "max_length": 96}
RL = {**ENDS, "prompts_per_step": 8, "max_steps": 8}
SMALL = {
    "instructgpt": {
        "rank": {**ENDS, "max_prompts": 8, "rewards": RULE},
        "sft": {**ROWS, "num_train_epochs": 2},
        "select": {"evaluate": ENDS},
        "kwise": ROWS,
        "rl": {**RL, "ptx_batch_ratio": 1.0, "ptx_max_length": 16},
        "rounds": 2,
        "plain_ppo": True,
    },
    "llama2": {
        "sft": ROWS,
        "helpful": ROWS,
        "safety": ROWS,
        "improve": ROWS,
        "gold": {**ENDS, "max_prompts": 16, "rewards": RULE},
        "sample": {**ENDS, "num_generations": 3},
        "rl": RL,
        "rounds": 2,
        "labels": "fresh",
    },
    "hh": {
        "hhh_prompt": "Be kind.",
        "behind_prompt": ENDS,
        "distil": ROWS,
        "pmp": ROWS,
        "preference": ROWS,
        "best_of_n": {**ENDS, "max_prompts": 8, "num_generations": 6},
        "gold": {**ENDS, "max_prompts": 8, "rewards": RULE},
        "rl": RL,
        "rounds": 2,
        "labels": "fresh",
    },
    "deepseekmath": {
        "midtrain": {**ROWS, "max_steps": 2},
        "sft": {**ROWS, "max_steps": 2},
        "solutions": {
            **ENDS,
            "num_generations": 4,
            "rewards": [*RULE, {"name": "verifier", "kind": "verifier", "weight": 0.0}],
        },
        "labels": {"threshold": 1.5},
        "train_reward_model": ROWS,
        "rl": {**RL, "prompts_per_step": 2, "num_generations": 4, "max_steps": 2},
        "rounds": 2,
    },
}


@pytest.mark.parametrize("recipe", list(SMALL))
def test_a_published_recipe_runs_to_its_end(recipe, tiny, world, tmp_path, monkeypatch, capsys):
    """Every stage takes what the one before it made, with the settings that the recipe gives it, down to the table at
    the end.
    """
    data = {
        "demonstrations": world["demonstrations"],
        "pairs": world["comparisons"],
        "prompts": world["prompts"],
        "text": world["text"],
    }
    if recipe == "deepseekmath":  # its pairs are made in the run
        del data["pairs"]
    more = {"llama2": {"safety_pairs": world["pairs"]}, "hh": {"pmp": world["pairs"]}}.get(recipe, {})
    config = load_config(
        recipe,
        {
            "model": tiny["policy"],
            "data": {**data, **more},
            "evaluate": {**ENDS, "num_samples": 1, "greedy": False},
            "tax": {"max_completion_length": 4, "max_length": 64},
            **SMALL[recipe],
            **({"train_reward_model": ROWS} if recipe == "instructgpt" else {}),
        },
    )
    monkeypatch.setattr("flows.start.promote", lambda *args, **more: {})  # asks the registry for a champion
    run = InProcess(recipe, tmp_path)
    result = get_recipe(recipe).method(run, config)
    assert [row["model"] for row in result["scores"]] == list(result["models"]) and len(result["models"]) == {
        "instructgpt": 5,
        "llama2": 5,
        "hh": 3,
        "deepseekmath": 5,
    }[recipe]
    assert all(0 <= row["accuracy"] <= 1 for row in result["scores"]) and result["best"] in result["models"]
    assert [row["model"] for row in result["alignment_tax"]] == list(result["models"])[1:] and all(
        row["mean change"] is not None for row in result["alignment_tax"]
    )
    capsys.readouterr()
    print_result({**result, "run": "r", "decision": None}, tmp_path)
    shown = capsys.readouterr().out
    assert "what was lost against the first model" in shown and ("rounds: the reward model of each" in shown) == (
        recipe != "llama2"
    )
    steps = {step.label: step.metrics for step in run.steps}
    if recipe == "instructgpt":
        assert (
            steps["reward_model_2"]["previous/accuracy"] >= 0
            and steps["select_sft"]["selected"] in ("1", "2")
            and run.concluded == [("sft", "selected")]
            and steps["answers_1"]["completions"] < 72
        )
    elif recipe == "llama2":
        assert (
            steps["select_2"]["completions"] == 2 * steps["sample_1"]["completions"]
            and steps["reward_2"]["members"] == 2
            and steps["helpful_2"]["replayed"] > 8
        )
    elif recipe == "hh":
        assert (
            steps["label_best"]["completions"] <= 2 * 8 < steps["best_of_n"]["completions"] == 48
            and steps["preference_1"]["replayed"] > 8
        )
        assert [row["accuracy_earlier"] for row in result["rounds"]] == [
            round(steps[f"preference_{k}"]["earlier/accuracy"], 4) for k in (1, 2)
        ]
    else:
        assert steps["reward_model_2"]["replayed"] >= 1 and steps["reward_model_2"]["previous/accuracy"] >= 0
