"""Stages end to end on a tiny model: reference cache, rejection sampling, RL rollouts that can be audited."""

import math
from pathlib import Path

import numpy as np
import pytest

from stages.harness import execute
from storage.datasets import open_dataset
from tests.common import silent, written


def test_a_reference_cache_is_reused_only_where_it_belongs(tiny, data, spec):
    """da.ref_cache: the same model, template and length take every row from the cache; another model takes none."""
    config = {"max_steps": 7, "batch_size": 6, "max_length": 96, "learning_rate": 1e-4}
    first = execute(spec("align", config, {"model": tiny["policy"], "data": data["pairs"]}, "first"), silent)
    cache = first["outputs"]["ref_logps"]["path"]
    rows = list(open_dataset(cache).iter_rows())
    assert len(rows) == 48 and len({r["group_id"] for r in rows}) == 48
    given = {"model": tiny["policy"], "data": data["pairs"]}
    again = spec("align", config, given, "again")
    again["inputs"]["ref_logps"] = {"kind": "dataset", "path": cache, "ref": "r", "digest": "r"}
    second = execute(again, silent)
    assert open_dataset(second["outputs"]["ref_logps"]["path"]).manifest["counts"]["from_cache"] == 48
    assert second["summary"] == first["summary"]
    other = spec("align", {**config, "max_length": 95}, given, "other")
    other["inputs"]["ref_logps"] = again["inputs"]["ref_logps"]
    third = execute(other, silent)
    assert open_dataset(third["outputs"]["ref_logps"]["path"]).manifest["counts"]["from_cache"] == 0
    assert any(w["code"] == "stale_reference_cache" for w in third["warnings"])


def test_only_rows_that_are_read_get_a_reference(tiny, data, spec):
    config = {"max_steps": 2, "batch_size": 6, "max_length": 96, "learning_rate": 1e-4}
    made = execute(spec("align", config, {"model": tiny["policy"], "data": data["pairs"]}, "short"), silent)
    assert len(list(open_dataset(made["outputs"]["ref_logps"]["path"]).iter_rows())) == 2 * 6 + 6
    assert made["summary"]["pairs"] == 42 and made["summary"]["steps"] == 2


def test_policy_equals_reference_at_step_0(tiny, data, spec):
    """The first validation loss of DPO is ln 2, that of IPO (1/(2 beta))^2."""
    import json

    for method, expected in (("dpo", math.log(2)), ("ipo", 25.0)):
        config = {"method": method, "max_steps": 1, "batch_size": 6, "max_length": 96}
        made = spec("align", config, {"model": tiny["policy"], "data": data["pairs"]}, method)
        execute(made, silent)
        start = json.loads(Path(made["workdir"], "metrics.jsonl").read_text().splitlines()[0])
        assert start["step"] == 0 and start["metrics"]["validation/loss"] == pytest.approx(expected, rel=1e-5)


def test_a_mixture_of_two_policies_goes_from_one_to_the_other(tiny, data, spec, tmp_path):
    """mixture_coef=1 samples what the reference alone would, a small share something of its own; half a request is
    refused (da.ipo_md).
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(3)
    other = AutoModelForCausalLM.from_pretrained(tiny["policy"])
    for parameter in other.parameters():
        parameter.data += 0.3 * parameter.data.std() * torch.randn_like(parameter)
    other.save_pretrained(tmp_path / "other")
    AutoTokenizer.from_pretrained(tiny["policy"]).save_pretrained(tmp_path / "other")
    config = {
        "num_generations": 2,
        "max_completion_length": 8,
        "max_prompts": 8,
        "rewards": [{"name": "length", "kind": "length"}],
        "allow_empty": True,
    }

    def texts(name, more, **inputs):
        made = execute(spec("rejection", {**config, **more}, {"prompts": data["prompts"], **inputs}, name), silent)
        return [r["completion"][0]["content"] for r in open_dataset(made["outputs"]["candidates"]["path"]).iter_rows()]

    policy, reference = tiny["policy"], str(tmp_path / "other")
    own, others = texts("own", {}, model=policy), texts("others", {}, model=reference)
    assert texts("all", {"mixture_coef": 1.0}, model=policy, reference=reference) == others
    assert texts("half", {"mixture_coef": 0.5}, model=policy, reference=reference) not in (own, others)
    for more, inputs in (({"mixture_coef": 0.5}, {}), ({}, {"reference": reference})):
        with pytest.raises(Exception, match="go together"):
            texts(f"refused-{len(inputs)}", more, model=policy, **inputs)


def test_rejection_keeps_every_candidate_and_selects_again_without_sampling(tiny, data, spec):
    config = {
        "num_generations": 4,
        "max_completion_length": 10,
        "rewards": [{"name": "length", "kind": "length"}],
        "block": 16,
    }
    made = spec("rejection", config, {"model": tiny["policy"], "prompts": data["prompts"]}, "rs")
    first = execute(made, silent)
    candidates = open_dataset(first["outputs"]["candidates"]["path"])
    rows = list(candidates.iter_rows())
    assert len(rows) == 42 * 4 and len(candidates.manifest["parts"]) == 3
    best = {}
    for row in rows:
        if row["kept"] and row["reward"] is not None:
            current = best.get(row["prompt_idx"])
            if current is None or row["reward"] > current["reward"]:
                best[row["prompt_idx"]] = row
    selected = list(open_dataset(first["outputs"]["selected"]["path"]).iter_rows())
    assert [s["messages"][-1]["content"] for s in selected] == [
        best[i]["completion"][0]["content"] for i in sorted(best)
    ]
    again = spec(
        "rejection",
        {"rewards": config["rewards"], "select": "top_k_overall", "k": 5},
        {"model": tiny["policy"], "prompts": data["prompts"]},
        "rs2",
    )
    again["inputs"]["candidates"] = {
        "kind": "dataset",
        "path": first["outputs"]["candidates"]["path"],
        "ref": "c",
        "digest": "c",
    }
    second = execute(again, silent)
    assert second["summary"]["selected"] == 5 and second["summary"]["completions"] == len(rows)


def test_parts_of_the_prompts_are_disjoint_and_together_all_of_them(tiny, data, spec):
    """prompt_part: every n-th prompt, the same completions as in one run over all; max_prompts bounds the part;
    impossible parts are refused.
    """
    config = {
        "num_generations": 1,
        "max_completion_length": 4,
        "rewards": [{"name": "length", "kind": "length"}],
        "allow_empty": True,
    }

    def texts(name, **more):
        made = execute(
            spec("rejection", {**config, **more}, {"model": tiny["policy"], "prompts": data["prompts"]}, name), silent
        )
        return {
            r["prompt_id"]: r["completion"][0]["content"]
            for r in open_dataset(made["outputs"]["candidates"]["path"]).iter_rows()
        }

    whole, parts = texts("whole"), [texts(f"part-{k}", prompt_part=[k, 3]) for k in (1, 2, 3)]
    assert (
        sum(map(len, parts)) == len(whole)
        and {**parts[0], **parts[1], **parts[2]} == whole
        and [*whole][1::3] == [*parts[1]]
    )
    assert [*texts("few", prompt_part=[2, 3], max_prompts=2)] == [*parts[1]][:2]
    for part, message in (([0, 3], "the first of three"), ([1, 1000], "fewer parts")):
        with pytest.raises(Exception, match=message):
            texts("no", prompt_part=part)


def test_answers_to_plain_text_prompts_are_kept_behind_the_messages(tiny, data, spec):
    """rejection prompt_template: a base model is asked as it was trained (R1-Zero), and what is selected is a
    conversation.
    """
    config = {
        "num_generations": 1,
        "max_completion_length": 4,
        "max_prompts": 4,
        "rewards": [{"name": "length", "kind": "length"}],
        "allow_empty": True,
        "max_prompt_length": 1000,
    }
    given = {"model": tiny["policy"], "prompts": data["prompts"]}
    found = {
        t: list(
            open_dataset(
                execute(spec("rejection", {**config, "prompt_template": t}, given, f"t-{t}"), silent)["outputs"][
                    "candidates"
                ]["path"]
            ).iter_rows()
        )
        for t in ("chat", "none")
    }
    assert [r["prompt"] for r in found["none"]] == [r["prompt"] for r in found["chat"]] and [
        r["completion"] for r in found["none"]
    ] != [r["completion"] for r in found["chat"]]
    for more in ({"system": "Be kind."}, {"rationalise": 2, "rewards": [{"kind": "verifier"}]}):
        with pytest.raises(Exception, match="write prompt_template=chat"):
            execute(spec("rejection", {**config, "prompt_template": "none", **more}, given, "no"), silent)


@pytest.mark.parametrize("preset", ["reinforce", "rloo", "grpo", "dr_grpo"])
def test_rl_rollouts_explain_the_update(tiny, data, spec, preset):
    """Advantages in the rollout dataset follow from its rewards; log-probs are there; learning raises the reward."""
    from stages.estimators import group_advantage
    from stages.rl import Config, resolve_preset

    config = {
        "preset": preset,
        "max_steps": 3,
        "prompts_per_step": 4,
        "num_generations": 4,
        "max_completion_length": 10,
        "learning_rate": 1e-4,
        "rewards": [{"name": "length", "kind": "length", "max_length": 10, "cache_length": 10}],
    }
    result = execute(spec("rl", config, {"model": tiny["policy"], "data": data["prompts"]}, preset), silent)
    rows = list(open_dataset(result["outputs"]["rollouts"]["path"]).iter_rows())
    assert len(rows) == 3 * 16
    row, _ = resolve_preset(Config(preset=preset))
    for iteration in range(3):
        part = [r for r in rows if r["iteration"] == iteration]
        rewards = np.array([r["reward"] for r in part])
        if row.kl_reward_coef:
            kl = [sum(np.array(r["logp_old"]) - np.array(r["logp_ref"])) for r in part]
            rewards = rewards - row.kl_reward_coef * np.array(kl)
        if preset == "reinforce":
            continue
        expected, _ = group_advantage(rewards, np.repeat(np.arange(4), 4), row.group_mode)
        assert np.allclose([r["advantages"][0] for r in part], expected, atol=1e-5)
        assert all(len(r["completion_ids"]) == len(r["logp_old"]) == r["length"] for r in part)
        if row.needs_reference and iteration == 0:
            assert all(np.allclose(r["logp_old"], r["logp_ref"], atol=1e-4) for r in part), (
                "policy equals reference before the first step"
            )


def test_impossible_rl_settings_say_what_to_write():
    from stages.rl import Config, resolve_preset

    for config, text in (
        (Config(preset="grpo", num_generations=1), "num_generations"),
        (Config(preset="grpo", kl_coef=0.1), "allow_double_kl"),
        (Config(preset="rloo", num_minibatches=2), "num_iterations=1"),
        (Config(temperature=0.0), "temperature=1.0"),
    ):
        with pytest.raises(ValueError, match=text):
            resolve_preset(config)


def test_every_preset_name_is_offered():
    from typing import get_args

    from stages.algorithms import DIRECT_METHODS, RL_PRESETS
    from stages.align import Config as AlignConfig
    from stages.rl import Config

    assert set(get_args(Config.model_fields["preset"].annotation)) == set(RL_PRESETS)
    assert set(get_args(AlignConfig.model_fields["method"].annotation)) == set(DIRECT_METHODS)


def test_instruction_tuning_is_judged_on_tasks_it_never_saw(tiny, spec, tmp_path):
    """sft.instruct: tasks and refusals mixed, one task held out whole; sft trains on none of it, evaluate asks nothing
    else, zero-shot.
    """

    tasks = {
        "copy": lambda i: (f"copy {i}", f"{i}"),
        "refuse": lambda i: (f"do harm {i}", "no"),
        "double": lambda i: (f"double {i}", f"{2 * i}"),
    }
    for name, make in tasks.items():
        written(
            str(tmp_path / name),
            name,
            "demonstrations/1",
            [
                {
                    "messages": [
                        {"role": "user", "content": make(i)[0]},
                        {"role": "assistant", "content": make(i)[1]},
                    ],
                    "train_turns": [1],
                    "kept": True,
                    "category": name,
                }
                for i in range(24)
            ],
            source=name,
        )
    mix = spec("mix", {"held_out_categories": ["double"]}, {}, "mix")
    mix["inputs"] = {
        f"data.{name}": {"kind": "dataset", "path": str(tmp_path / name), "ref": name, "digest": name} for name in tasks
    }
    mixed = execute(mix, silent)
    data = open_dataset(mixed["outputs"]["data"]["path"])
    train, test = (list(data.iter_rows(split=name)) for name in ("train", "test"))
    assert (
        {r["category"] for r in train} == {"copy", "refuse"}
        and {r["category"] for r in test} == {"double"}
        and (len(train), len(test)) == (48, 24)
    )
    tuned = execute(
        spec(
            "sft",
            {"learning_rate": 1e-2, "batch_size": 8, "num_train_epochs": 3, "max_length": 64},
            {"model": tiny["policy"], "data": data.path},
            "sft",
        ),
        silent,
    )
    assert tuned["summary"]["rows"] == 48
    prompts = str(tmp_path / "prompts")
    written(
        prompts,
        "prompts",
        "prompts/1",
        [
            {
                "prompt": r["messages"][:1],
                "answer": r["messages"][1]["content"],
                "answer_type": "text",
                "category": r["category"],
            }
            for r in test
        ],
        source="double",
        split="test",
    )
    judged = execute(
        spec(
            "evaluate",
            {"num_samples": 0, "max_completion_length": 8, "rewards": [{"kind": "verifier", "verifier": "text"}]},
            {"model": tuned["outputs"]["model"]["path"], "prompts": prompts},
            "eval",
        ),
        silent,
    )
    assert (
        0 <= judged["summary"]["greedy_accuracy"] <= 1
        and len(list(open_dataset(judged["outputs"]["samples"]["path"]).iter_rows())) == 24
    )
