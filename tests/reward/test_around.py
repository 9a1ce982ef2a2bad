"""The stages around reward models: curricula, step labels by rollouts, over-optimisation curves, going on from a
model.
"""

import json
from pathlib import Path

import numpy as np
import pytest

from stages.reward_model import Config, staged_rows
from stages.spec import ConfigError
from stages.training import ShuffledRows, StagedRows
from storage.datasets import open_dataset, write_dataset
from storage.schema import complete_row
from tests.common import BESIDE, assistant, beside, user


class Orders:
    """Stands for a stage: its seeded randomness."""

    def rng(self, *purpose):
        from stages.running.randomness import rng

        return rng(1, "test", *purpose)


class Row:
    def __init__(self, difficulty):
        self.extra = {"difficulty": difficulty}


def test_a_curriculum_goes_from_easy_to_hard_and_uses_every_row_once():
    rows = [Row(d) for d in np.random.default_rng(0).permutation(20).astype(float)]
    source = staged_rows(Orders(), rows, Config(curriculum="margin", curriculum_stages=3, batch_size=4))
    seen = [[r.extra["difficulty"] for r in source.items(step)] for step in range(source.total_steps)]
    assert sorted(d for batch in seen for d in batch) == list(range(20))
    stages = [source.after_step(step + 1, {})["curriculum_stage"] for step in range(source.total_steps)]
    assert stages == sorted(stages) and set(stages) == {0.0, 1.0, 2.0}
    by_stage = [[d for batch, s in zip(seen, stages) if s == k for d in batch] for k in (0, 1, 2)]
    assert max(by_stage[0]) < min(by_stage[1]) and max(by_stage[1]) < min(by_stage[2])
    short = staged_rows(Orders(), rows, Config(curriculum="margin", curriculum_stages=3, batch_size=4, max_steps=3))
    assert short.total_steps == 3 and isinstance(short._source, StagedRows) and short._source.steps == [1, 1, 1]
    given = staged_rows(Orders(), [Row(8.0), Row(1.0), Row(8.0)], Config(curriculum="stage_index", batch_size=4))
    assert [[r.extra["difficulty"] for r in given.items(step)] for step in (0, 1)] == [[1.0], [8.0, 8.0]]
    assert [ShuffledRows(Orders(), rows, 4, epochs, None).total_steps for epochs in (0.01, 0.75, 1, 1.25)] == [
        1,
        4,
        5,
        6,
    ]


def test_a_curriculum_and_a_pretrained_head_run_through_the_stage(tiny, rows, train):
    config = {"learning_rate": 3e-3, "batch_size": 8, "max_length": 96, "probe_pairs": 0}
    first = train(
        "reward_model",
        {**config, "objective": "pointwise_bce"},
        {"model": tiny["policy"], "data": rows["labels"]},
        "pmp",
    )
    path = first["outputs"]["model"]["path"]
    again = train(
        "reward_model",
        {**config, "init_head": "keep", "curriculum": "margin", "train_layers": "head_and_last", "last_layers": 1},
        {"model": path, "data": rows["pairs"]},
        "then-bt",
    )
    for start_from, data in ((path, rows["steps"]), (tiny["policy"], rows["pairs"])):
        with pytest.raises(
            ValueError, match="init_head=keep goes on from the head.*(one of 1 outputs|none).*init_head=fresh"
        ):
            train("reward_model", {**config, "init_head": "keep"}, {"model": start_from, "data": data}, "no-head")
    start = json.loads(
        Path(again["outputs"]["model"]["path"]).parents[1].joinpath("metrics.jsonl").read_text().splitlines()[0]
    )
    assert {name for name in start["metrics"] if "reward" in name} == {
        "validation/mean_reward",
        "validation/std_reward",
    }
    fresh = train("reward_model", {**config, "max_steps": 1}, {"model": tiny["policy"], "data": rows["pairs"]}, "fresh")
    cold = json.loads(
        Path(fresh["outputs"]["model"]["path"]).parents[1].joinpath("metrics.jsonl").read_text().splitlines()[0]
    )
    assert start["metrics"]["validation/loss"] < cold["metrics"]["validation/loss"], (
        "good and bad answers are told apart before the first pair (rm.pmp)"
    )
    from safetensors.torch import load_file

    before, after = (load_file(Path(p, "model.safetensors")) for p in (path, again["outputs"]["model"]["path"]))
    changed = {k for k in before if not (before[k] == after[k]).all()}
    assert changed and all(".layers.1." in k or k.startswith("score") for k in changed)


def test_facts_are_part_of_what_the_model_reads(tiny, rows, train):
    from stages.reward_models.reward_data import with_facts
    from stages.reward_models.reward_scorers import Response, load_scorer

    result = train(
        "reward_model",
        {"learning_rate": 3e-3, "max_steps": 2, "batch_size": 4, "max_length": 96, "facts": True, "probe_pairs": 0},
        {"model": tiny["policy"], "data": rows["pairs"]},
    )
    scorer = load_scorer(result["outputs"]["model"]["path"])
    plain, none, told = (
        scorer.score([Response(user("q"), assistant("a"), row=row)])[0]
        for row in (None, {"extra_json": "{}"}, {"facts": ["the sky is blue"]})
    )
    assert plain == none != told and "none" in with_facts({}, user("q"), True)[-1]["content"]


def test_a_rollout_that_could_not_be_checked_is_no_wrong_answer():
    from stages.label_steps import checked, estimates

    parts, verdicts = checked(
        ["a", "b", "c", "d"], [[True, None, None, None], [None] * 4, [None, False, True, None], [None] * 4], "\n"
    )
    assert parts == ["a", "b\nc"] and estimates(verdicts) == ([1.0, 0.5], [1, 1])
    assert checked(["a"], [[None]], "\n") == ([], [])


@pytest.fixture(scope="module")
def sums(tiny, tmp_path_factory):
    """Prompts whose answers are checkable, and hand-made candidates with two steps each."""
    root = tmp_path_factory.mktemp("sums")
    prompts = [
        complete_row(
            "prompts/1",
            {"prompt": user(f"what is {i} plus {i}?"), "answer": str(2 * i), "answer_type": "integer", **BESIDE},
            dataset="sums",
            source="made",
            origin="human",
            split="train",
        )
        for i in range(4)
    ]
    candidates = [
        complete_row(
            "candidates/1",
            {
                "prompt": p["prompt"],
                "prompt_id": p["prompt_id"],
                "group_id": p["group_id"],
                "prompt_idx": i,
                "completion_idx": k,
                "completion": assistant(f"first {i}\n\n#### {2 * i + k}"),
                "scores": [],
                "reward": float(k),
                "correct": k == 0,
                "kept": True,
            },
            dataset="c",
            source="made",
            origin="ai",
            split="train",
        )
        for i, p in enumerate(prompts)
        for k in range(4)
    ]
    for name, kind, content in (("prompts", "prompts/1", prompts), ("candidates", "candidates/1", candidates)):
        write_dataset(str(root / name), name, kind, content)
    return {"prompts": str(root / "prompts"), "candidates": str(root / "candidates")}


def test_steps_are_labelled_by_rollouts(tiny, sums, train):
    """Every step of every solution gets the share of its rollouts that the verifier accepts; the rows train a process
    model.
    """
    accept = {
        "kind": "python",
        "source": (
            "def score(prompt, completion, answer):\n    return completion.count('first') == 1 and len(completion) % 2"
            " == 0"
        ),
    }
    config = {"rollouts": 3, "max_completion_length": 4, "block": 5, "rewards": [accept]}
    result = train("label_steps", config, {"model": tiny["policy"], **sums})
    rows = list(open_dataset(result["outputs"]["steps"]["path"]).iter_rows())
    assert len(rows) == 16 and all(
        len(r["completions"]) == len(r["soft_labels"]) == len(r["labels"]) == 2 for r in rows
    )
    assert all(
        (s > 0) == (label == 1) and s in (0.0, 1 / 3, 2 / 3, 1.0)
        for r in rows
        for s, label in zip(r["soft_labels"], r["labels"])
    )
    assert all(one == BESIDE for one in beside(rows))
    assert {r["solution_correct"] for r in rows} == {True, False} and 0 < result["summary"]["mean_soft_label"] < 1
    some = {
        "kind": "python",
        "source": "def score(prompt, completion, answer):\n    return None if len(completion) % 2 else True",
    }
    known = train("label_steps", {**config, "rewards": [some]}, {"model": tiny["policy"], **sums}, "some")
    assert {s for r in open_dataset(known["outputs"]["steps"]["path"]).iter_rows() for s in r["soft_labels"]} == {
        1.0
    } and known["summary"]["unscorable_rollouts"] > 0
    with pytest.raises(Exception, match="could be checked"):
        train(
            "label_steps",
            {**config, "rewards": [{**some, "source": "def score(prompt, completion, answer):\n    return None"}]},
            {"model": tiny["policy"], **sums},
            "none",
        )
    again = train("label_steps", {**config, "block": 16}, {"model": tiny["policy"], **sums}, "other-blocks")
    assert [r["soft_labels"] for r in open_dataset(again["outputs"]["steps"]["path"]).iter_rows()] == [
        r["soft_labels"] for r in rows
    ]
    model = train(
        "reward_model",
        {"learning_rate": 1e-3, "max_length": 96, "batch_size": 4},
        {"model": tiny["policy"], "data": result["outputs"]["steps"]["path"]},
        "prm",
    )
    held = train("label_steps", {**config, "validation_fraction": 0.4}, {"model": tiny["policy"], **sums}, "held-out")
    parts = {"train": set(), "validation": set()}
    for row in open_dataset(held["outputs"]["steps"]["path"]).iter_rows():
        parts[row["split"]].add(row["prompt_id"])
    assert all(parts.values()) and not parts["train"] & parts["validation"]
    judged = train(
        "reward_model",
        {"learning_rate": 1e-3, "max_length": 96, "batch_size": 4},
        {"model": tiny["policy"], "data": held["outputs"]["steps"]["path"]},
        "judged-prm",
    )
    wanted = {"accuracy", "step_auc", "first_error_accuracy"}
    assert {f"validation/{name}" for name in wanted} <= set(judged["summary"]), judged["summary"]
    chosen = train(
        "label_steps",
        {**config, "active": "convincing_wrong", "max_solutions": 3},
        {"model": tiny["policy"], **sums, "reward_model": model["outputs"]["model"]["path"]},
        "active",
    )
    assert [r["solution_correct"] for r in open_dataset(chosen["outputs"]["steps"]["path"]).iter_rows()] == [False] * 3
    with pytest.raises(Exception, match="reward_model=REF"):
        train("label_steps", {**config, "active": "uncertain"}, {"model": tiny["policy"], **sums}, "no-model")
    with pytest.raises(ConfigError, match="reward_model would change nothing.*write active=uncertain"):
        train("label_steps", config, {"model": tiny["policy"], "reward_model": tiny["reward"], **sums}, "unread")


def test_rollouts_are_asked_as_the_solutions_were_and_go_on_with_them(tiny, sums, train, monkeypatch):
    """The prompt as plain text where it was shown so; tokens of the steps count for the length that is asked for."""
    from stages.chat import renderer_for
    from stages.decoding.sampler import Sampler

    asked, generate, renderer = [], Sampler.generate, renderer_for(tiny["policy"])

    def noted(self, prompts, params, seeds, *rest, **more):
        asked.extend((renderer.decode(ids), params.min_tokens) for ids in prompts)
        return generate(self, prompts, params, seeds, *rest, **more)

    monkeypatch.setattr(Sampler, "generate", noted)
    config = {
        "rollouts": 1,
        "max_completion_length": 16,
        "min_tokens": len(renderer._plain_ids("first 0\n\n")) + 2,
        "prompt_template": "none",
        "rewards": [{"kind": "python", "source": "def score(prompt, completion, answer):\n    return True"}],
    }
    train("label_steps", config, {"model": tiny["policy"], **sums})
    assert asked == [(f"what is {i} plus {i}?first {i}\n\n", 2) for i in range(4) for _ in range(4)]


def test_a_finished_solution_is_its_own_rollout(tiny, sums, train, tmp_path):
    """What a policy writes behind the end of a solution says nothing of its last step; rows keep their weight, and
    answers that failed are no solutions."""
    rows = [
        row
        | {"weight": 3.0 if row["prompt_idx"] == 0 else 1.0}
        | ({"kept": False, "drop_reason": "engine_error"} if row["prompt_idx"] == 3 else {})
        for row in open_dataset(sums["candidates"]).iter_rows()
    ]
    write_dataset(str(tmp_path / "candidates"), "c", "candidates/1", rows)
    ends = "def score(prompt, completion, answer):\n    return completion.endswith('#### ' + answer)"
    config = {"rollouts": 2, "max_completion_length": 4, "rewards": [{"kind": "python", "source": ends}]}
    inputs = {"model": tiny["policy"], **sums, "candidates": str(tmp_path / "candidates")}
    result = train("label_steps", config, inputs)
    made = list(open_dataset(result["outputs"]["steps"]["path"]).iter_rows())
    assert [(r["soft_labels"][-1], r["labels"][-1]) for r in made] == [
        (1.0, 1) if r["solution_correct"] else (0.0, -1) for r in made
    ]
    assert [r["weight"] for r in made] == [3.0] * 4 + [1.0] * 8 and result["summary"]["rollouts"] == 12 * (2 + 1)
    cut = train("label_steps", {**config, "max_steps_per_solution": 1}, inputs, "cut")
    assert cut["summary"]["steps"] == 12 and cut["summary"]["rollouts"] == 24, "of a solution that goes on"


def test_blank_solutions_are_not_counted_as_ones_that_could_not_be_checked(tiny, sums, train, tmp_path):
    found = list(open_dataset(sums["candidates"]).iter_rows())
    unsure = "def score(prompt, completion, answer):\n    return None if answer == '2' else True"
    config = {"rollouts": 1, "max_completion_length": 4, "rewards": [{"kind": "python", "source": unsure}]}

    def label(blanks: int):
        blank = [row | {"completion": [row["completion"][0] | {"content": " \n\n "}]} for row in found[:blanks]]
        write_dataset(str(tmp_path / str(blanks)), "c", "candidates/1", blank + found[blanks:])
        inputs = {"model": tiny["policy"], **sums, "candidates": str(tmp_path / str(blanks))}
        return train("label_steps", config, inputs, f"blank-{blanks}")

    result = label(4)
    counts = ("solutions", "blank_solutions", "solutions_without_labels")
    assert [result["summary"][one] for one in counts] == [8, 4, 4]
    for said in ("4 of 16 solutions are blank", "Of 16 solutions 4 have no label"):
        assert said in str(result["warnings"])
    with pytest.raises(Exception, match="All 16 solutions are blank"):
        label(16)


def test_a_proxy_that_likes_wrong_answers_is_found_out(sums, train):
    """The stored reward grows as the verdict falls: best-of-n raises the proxy and ruins the gold score."""
    result = train("overoptimisation", {}, {"candidates": sums["candidates"]})
    summary = result["summary"]
    assert (
        summary["gold/1"] == pytest.approx(0.25)
        and summary["gold/4"] == 0.0
        and summary["proxy/4"] == 3.0
        and summary["gold/best_n"] == 1
    )
    assert [w["code"] for w in result["warnings"]] == ["overoptimised"] and summary["proxy_gold_correlation"] < 0
    points = {r["metric"]: r["value"] for r in open_dataset(result["outputs"]["curve"]["path"]).iter_rows()}
    assert points["best_of_2/proxy"] == pytest.approx(7 / 3), (
        "mean of the larger of two different draws from 0, 1, 2, 3"
    )


def test_along_rl_the_gold_model_is_watched(tiny, data, train):
    """Rollouts of an RL stage scored by a gold model that reads the same ids; one with another template is refused."""
    config = {
        "preset": "grpo",
        "max_steps": 3,
        "prompts_per_step": 4,
        "num_generations": 4,
        "max_completion_length": 10,
        "rewards": [{"name": "length", "kind": "length"}],
    }
    rl = train("rl", config, {"model": tiny["policy"], "data": data["prompts"]}, "rl")
    result = train(
        "overoptimisation",
        {},
        {"rollouts": rl["outputs"]["rollouts"]["path"], "model": tiny["policy"], "gold": tiny["reward"]},
    )
    assert result["summary"]["rl/iterations"] >= 1 and np.isfinite(result["summary"]["rl/gold_last"])


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Rollouts of two runs of ten iterations, 40 completions each: the proxy rises in both; of the first, right answers
    rise to iteration 5 and then fall, those of the second rise to the end. log pi - log ref is (iteration / 5)^2 nats
    on the whole completion, lengths are 2 + iteration, one completion is cut."""
    root = tmp_path_factory.mktemp("runs")

    def write(name, right):
        rows = []
        for t in range(10):
            for k in range(40):
                n, cut = 2 + t, k == 39
                rows.append(
                    complete_row(
                        "rollouts/1",
                        {
                            "iteration": t,
                            "policy_version": t,
                            "sample_idx": k,
                            "prompt_ids": [1],
                            "completion_ids": [2 + k % 3] * n,
                            "loss_mask": [1] * n,
                            "logp_old": [(t / 5) ** 2 / n - 1.0] * n,
                            "logp_ref": [-1.0] * n,
                            "reward": 0.2 * t + (k % 2),
                            "reward_components": [],
                            "is_correct": k < right(t),
                            "truncated": cut,
                            "terminated": not cut,
                            "length": n,
                            "prompt_id": f"p{t}-{k // 4}",
                            "group_id": f"p{t}-{k // 4}",
                        },
                        dataset="r",
                        source="s",
                        origin="ai",
                    )
                )
            # neither an SFT answer nor a replayed completion is the policy's of this iteration
            other = {**rows[-2], "sample_idx": 40, "reward": 90.0, "is_correct": True}
            rows.append({**other, "row_id": f"sft-{t}", "extra_json": json.dumps({"mode": "sft"})})
            if t:
                rows.append({**other, "row_id": f"replayed-{t}", "sample_idx": 41, "policy_version": t - 1})
        write_dataset(str(root / name), name, "rollouts/1", rows)
        return str(root / name)

    return {
        "falls": write("falls", lambda t: 13 + 3 * min(t, 5) - 6 * max(t - 5, 0)),
        "rises": write("rises", lambda t: 13 + 2 * t),
    }


def curve_of(result):
    """{metric: (value, x, z)} of a curve, and its rows in order."""
    rows = list(open_dataset(result["outputs"]["curve"]["path"]).iter_rows())
    return {
        r["metric"]: (r["value"], json.loads(r["config_json"])["x"], json.loads(r["extra_json"])["z"]) for r in rows
    }, rows


def test_a_run_is_drawn_against_kl_in_units_of_its_start(tiny, runs, train):
    """Points by hand: sqrt(KL) = iteration / 5, means over what ended, z in standard deviations of the first iteration;
    the fall is found where it begins.
    """
    result = train(
        "overoptimisation",
        {"min_drop": 0.2, "patience": 2, "noise": 0},
        {"rollouts": runs["falls"], "model": tiny["policy"]},
    )
    points, rows = curve_of(result)
    start = np.array([k < 13 for k in range(39)], float)
    for t, right in ((0, 13), (5, 28), (9, 4)):
        value, x, z = points[f"iteration_{t}/gold"]
        assert (value, x) == (pytest.approx(right / 39), pytest.approx(t / 5, abs=1e-6)) and z == pytest.approx(
            (right / 39 - start.mean()) / start.std()
        )
        assert (
            points[f"iteration_{t}/proxy"][2] == pytest.approx(0.2 * t / np.std([k % 2 for k in range(39)]))
            and points[f"iteration_{t}/length"][0] == 2 + t
        )
    assert (
        all(r["n"] == 39 and 0 < r["se"] < 0.3 for r in rows if r["metric"].endswith("/proxy"))
        and points["iteration_9/truncated"][0] == 0.025
    )
    summary = result["summary"]
    assert (summary["rl/diverged"], summary["rl/gold_peak_iteration"], summary["rl/detected_iteration"]) == (
        1.0,
        5,
        7,
    ) and summary["rl/gold_peak_kl"] == pytest.approx(1.0, abs=1e-5)
    assert (
        summary["rl/gold_drop_sd"] == pytest.approx((28 - 4) / 39 / start.std())
        and summary["rl/length_last"] == 11
        and [w["code"] for w in result["warnings"]] == ["overoptimised"]
    )
    pooled = train("overoptimisation", {"every": 4}, {"rollouts": runs["falls"], "model": tiny["policy"]}, "pooled")
    points, _ = curve_of(pooled)
    assert pooled["summary"]["rl/points"] == 2 and [m for m in points if m.endswith("/length")] == [
        "iteration_3/length",
        "iteration_9/length",
    ], "what is left over joins the last point"
    assert points["iteration_3/gold"][0] == pytest.approx((13 + 16 + 19 + 22) / 4 / 39) and points[
        "iteration_9/length"
    ][0] == np.mean([6, 7, 8, 9, 10, 11])
    fine = train("overoptimisation", {"min_drop": 0.2}, {"rollouts": runs["rises"], "model": tiny["policy"]}, "fine")
    assert (
        fine["summary"]["rl/diverged"] == 0.0
        and not fine["warnings"]
        and fine["summary"]["rl/gold_peak_iteration"] == 9
    )
    doubtful = train(
        "overoptimisation",
        {"min_drop": 0.2, "patience": 2},
        {"rollouts": runs["falls"], "model": tiny["policy"]},
        "doubtful",
    )
    assert doubtful["summary"]["rl/diverged"] == 0.0, (
        "ten prompts a point, whole prompts right or wrong: three standard errors are more than the fall"
    )
    judged = train(
        "overoptimisation",
        {"noise": 0},
        {"rollouts": runs["falls"], "model": tiny["policy"], "gold": tiny["reward"]},
        "judged",
    )
    points, _ = curve_of(judged)
    assert (
        points["iteration_5/verdict"][0] == pytest.approx(28 / 39) != points["iteration_5/gold"][0]
        and judged["summary"]["rl/verdict_diverged"] == 1.0
    )


def test_arms_stand_side_by_side(tiny, runs, sums, train, tmp_path):
    """One figure and one table of all arms with best-of-n; gains on held-out prompts are paired with the start, by
    component; other protocols are refused.
    """
    curves = {
        f"curves.{name}": train(
            "overoptimisation",
            {"min_drop": 0.2, "patience": 2, "noise": 0},
            {"rollouts": path, "model": tiny["policy"]},
            name,
        )["outputs"]["curve"]["path"]
        for name, path in runs.items()
    }
    curves["curves.best_of_n"] = train("overoptimisation", {}, {"candidates": sums["candidates"]}, "bon")["outputs"][
        "curve"
    ]["path"]

    def evaluation(name, proxy, gold, right, protocol=1):
        rows = [
            complete_row(
                "eval_samples/1",
                {
                    "run_id": "r",
                    "item_id": f"i{i}",
                    "sample_idx": 0,
                    "output": "",
                    "correct": i < right,
                    "format_error": False,
                    "tokens": 3,
                    "prompt_id": f"p{i}",
                    "group_id": f"p{i}",
                    "extra_json": json.dumps(
                        {"mode": "sample", "finish": "eos", "parts": {"proxy": proxy + i, "gold": gold - i % 3}}
                    ),
                },
                dataset="e",
                source="s",
                origin="ai",
                split="test",
            )
            for i in range(20)
        ]
        write_dataset(str(tmp_path / name), name, "eval_samples/1", rows, meta={"protocol": {"p": protocol}})
        return str(tmp_path / name)

    given = {
        **curves,
        "start": evaluation("start", 0.0, 0.0, 10),
        "evaluations.falls": evaluation("e-falls", 3.0, -1.0, 4),
        "evaluations.rises": evaluation("e-rises", 1.0, 0.5, 12),
    }
    result = train("overoptimisation_arms", {}, given, "arms")
    summary = result["summary"]
    assert (
        summary["diverged"] == 1
        and [w["code"] for w in result["warnings"]] == ["overoptimised"]
        and "falls" in result["warnings"][0]["text"]
        and "rises" not in result["warnings"][0]["text"]
    )
    assert (
        summary["falls/gold_peak"] == pytest.approx(28 / 39)
        and summary["falls/kl_at_the_peak"] == pytest.approx(1.0, abs=1e-5)
        and summary["falls/length_last"] == 11
    )
    assert summary["falls/gap_to_gold"] == pytest.approx(
        1.8 / np.std([k % 2 for k in range(39)]) + (13 - 4) / 39 / np.std([k < 13 for k in range(39)])
    )
    assert (summary["best_of_n/gold_first"], summary["best_of_n/gold_last"], summary["best_of_n/kl_at_the_peak"]) == (
        0.25,
        0.0,
        0.0,
    )
    assert summary["best_of_n/kl_last"] == pytest.approx(np.log(4) - 3 / 4)
    for arm, proxy, gold, right in (("falls", 3.0, -1.0, -6 / 20), ("rises", 1.0, 0.5, 2 / 20)):
        assert [summary[f"{arm}/held_out/{m}_gain"] for m in ("proxy", "gold", "accuracy")] == pytest.approx(
            [proxy, gold, right]
        )
        assert summary[f"{arm}/held_out/gold_gain_low"] == pytest.approx(gold), (
            "paired: prompts differ from one another, their differences do not"
        )
    assert "start/held_out/gold_gain" not in summary and "start/held_out/kl" not in summary
    results = {r["metric"]: r["value"] for r in open_dataset(result["outputs"]["results"]["path"]).iter_rows()}
    assert (
        results["falls/gold"] - results["start/gold"]
        == pytest.approx(results["falls/gold/gain"])
        == pytest.approx(-1.0)
    )
    reports = Path(result["outputs"]["results"]["path"]).parents[1] / "reports"
    assert (reports / "proxy-and-gold.png").stat().st_size > 5000 and "| falls |" in (reports / "arms.md").read_text()
    with pytest.raises(Exception, match="protocol|differ"):
        train(
            "overoptimisation_arms", {}, {**given, "evaluations.rises": evaluation("other", 1.0, 0.5, 12, 2)}, "refused"
        )


def test_a_reward_model_that_the_policy_has_left_is_noticed(tiny, rows, train, tmp_path):
    """rm.refresh: the previous model learned the opposite; on the new rows it falls and the stage says so."""
    turned = [
        {**row, "chosen": row["rejected"], "rejected": row["chosen"]} for row in open_dataset(rows["pairs"]).iter_rows()
    ]
    write_dataset(
        str(tmp_path / "turned"),
        "turned",
        "pairs/1",
        [
            complete_row(
                "pairs/1",
                {k: row[k] for k in ("prompt", "chosen", "rejected")},
                dataset="made",
                source="s",
                origin="human",
                split=row["split"],
            )
            for row in turned
        ],
    )
    config = {"learning_rate": 3e-3, "batch_size": 8, "max_length": 96, "num_train_epochs": 2, "probe_pairs": 0}
    old = train("reward_model", config, {"model": tiny["policy"], "data": str(tmp_path / "turned")}, "old")["outputs"][
        "model"
    ]["path"]
    result = train("reward_model", config, {"model": tiny["policy"], "data": rows["pairs"], "previous": old}, "new")
    assert result["summary"]["previous/accuracy_then"] >= 0.75 and result["summary"]["previous/accuracy"] <= 0.25
    assert "reward_model_drifted" in [w["code"] for w in result["warnings"]]
    again = train(
        "reward_model",
        {**config, "max_steps": 1},
        {"model": tiny["policy"], "data": str(tmp_path / "turned"), "previous": old},
        "same",
    )
    assert "reward_model_drifted" not in [w["code"] for w in again["warnings"]]


def test_few_held_out_rows_are_no_evidence(tiny, rows, train, tmp_path):
    """A round with two held-out pairs: the model is judged on those of the earlier rows too, and neither its numbers
    nor those of the model before are alarms.
    """

    def made(name, label, n, held):
        pairs = [
            complete_row(
                "pairs/1",
                {"prompt": user(f"{label} {i}?"), "chosen": assistant("yes"), "rejected": assistant(f"no {i}")},
                dataset=name,
                source="s",
                origin="human",
                split="validation" if i < held else "train",
            )
            for i in range(n)
        ]
        write_dataset(str(tmp_path / name), name, "pairs/1", pairs)
        return str(tmp_path / name)

    def turned(name, path):
        flipped = [
            {**row, "chosen": row["rejected"], "rejected": row["chosen"]} for row in open_dataset(path).iter_rows()
        ]
        write_dataset(
            str(tmp_path / name),
            name,
            "pairs/1",
            [
                complete_row(
                    "pairs/1",
                    {k: row[k] for k in ("prompt", "chosen", "rejected")},
                    dataset="made",
                    source="s",
                    origin="human",
                    split=row["split"],
                )
                for row in flipped
            ],
        )
        return str(tmp_path / name)

    config = {"learning_rate": 3e-3, "batch_size": 8, "max_length": 96, "max_steps": 20, "probe_pairs": 0}
    fresh, older = made("two", "new", 22, 2), made("many", "old", 60, 30)
    old = train("reward_model", config, {"model": tiny["policy"], "data": turned("two-turned", fresh)}, "before")
    assert old["summary"]["validation/accuracy"] == 1.0 and {w["code"] for w in old["warnings"]} == {
        "few_held_out_rows"
    }
    now = train(
        "reward_model",
        config,
        {"model": tiny["policy"], "data": fresh, "replay": older, "previous": old["outputs"]["model"]["path"]},
        "now",
    )
    assert (
        now["summary"]["previous/accuracy"] == 0.0
        and now["summary"]["previous/accuracy_then"] == 1.0
        and now["summary"]["validation/pairs"] == 2
    )
    assert not {"few_held_out_rows", "reward_model_drifted"} & {w["code"] for w in now["warnings"]}
    assert now["summary"]["earlier/pairs"] == 30 and now["summary"]["earlier/accuracy"] > 0.9


def test_earlier_rows_are_replayed_in_their_share(tiny, rows, train, tmp_path):
    """GRPO-ITER: a tenth of the training rows are earlier comparisons, drawn once each; all others are of this
    round.
    """

    def made(name, label, n):
        pairs = [
            complete_row(
                "pairs/1",
                {"prompt": user(f"{label} {i}?"), "chosen": assistant("yes"), "rejected": assistant(f"no {i}")},
                dataset=name,
                source="s",
                origin="human",
                split="train",
            )
            for i in range(n)
        ]
        write_dataset(str(tmp_path / name), name, "pairs/1", pairs)
        return str(tmp_path / name)

    fresh, older = made("fresh", "new", 27), {"replay.a": made("a", "old", 5), "replay.b": made("b", "other", 5)}
    config = {"learning_rate": 1e-3, "batch_size": 8, "max_length": 96, "max_steps": 1, "probe_pairs": 0}
    result = train("reward_model", config, {"model": tiny["policy"], "data": fresh, **older}, "tenth")
    assert result["summary"]["rows"] == 30 and result["summary"]["replayed"] == 3
    most = train(
        "reward_model", {**config, "replay_fraction": 0.5}, {"model": tiny["policy"], "data": fresh, **older}, "half"
    )
    assert most["summary"]["replayed"] == 10 and most["summary"]["rows"] == 37, "all there are, none twice"
    alone = train("reward_model", config, {"model": tiny["policy"], "data": fresh}, "none")
    assert not {"replayed", "earlier/pairs"} & set(alone["summary"])
    with pytest.raises(
        ConfigError, match="replay holds ratings/1 and data pairs/1; give earlier rows of the kind pairs/1"
    ):
        train("reward_model", config, {"model": tiny["policy"], "data": fresh, "replay.a": rows["ratings"]}, "kinds")


def test_replayed_outcomes_are_as_balanced_as_fresh_ones(tiny, train, tmp_path, monkeypatch):
    """rm.orm: as many right as wrong answers of every prompt."""
    from stages import reward_model

    def made(name, answers):
        found = [
            complete_row(
                "unpaired/1",
                {
                    "prompt": user(f"{name} {prompt}?"),
                    "completion": assistant(f"it is {i}"),
                    "label": label,
                    "label_kind": "correctness",
                },
                dataset=name,
                source="s",
                origin="human",
                split="train",
            )
            for prompt, labels in answers.items()
            for i, label in enumerate(labels)
        ]
        write_dataset(str(tmp_path / name), name, "unpaired/1", found)
        return str(tmp_path / name)

    drawn, replay = [], reward_model.replay
    monkeypatch.setattr(reward_model, "replay", lambda *given: drawn.append(replay(*given)) or drawn[-1])
    data = {
        "model": tiny["policy"],
        "data": made("fresh", {p: [True, False] for p in "abc"}),
        "replay.a": made("old", {"d": [False] * 6 + [True] * 2, "e": [False] * 4, "f": [True, False, False]}),
    }
    config = {"objective": "orm", "batch_size": 8, "max_length": 96, "max_steps": 1, "replay_fraction": 0.5}
    result = train("reward_model", config, data, "balanced")
    assert result["summary"]["replayed"] == 6 and result["summary"]["rows"] == 12
    labels = {}
    for item in drawn[0]:
        labels.setdefault(item.extra["prompt_id"], []).append(item.extra["target"])
    assert sorted(map(sorted, labels.values())) == [[0.0, 0.0, 1.0, 1.0], [0.0, 1.0]]
    fewer = train("reward_model", {**config, "replay_fraction": 0.34}, data, "fewer")
    assert fewer["summary"]["replayed"] == 2 and sorted(i.extra["target"] for i in drawn[1]) == [0.0, 1.0]
    every = train("reward_model", {**config, "balance": False}, data, "every")
    assert every["summary"]["replayed"] == 6 and every["summary"]["rows"] == 12


def test_a_model_of_trajectories_reads_action_and_outcome(tiny, train, tmp_path):
    """rm.agentic: ratings of single steps (observation, action, next observation), and ranked trajectories as pairs of
    several turns.
    """
    from stages.reward_models.reward_data import transition
    from stages.reward_models.reward_scorers import Response, load_scorer
    from storage.datasets import write_dataset
    from storage.schema import complete_row

    def step(i, outcome):
        return {
            "episode_id": f"e{i}",
            "t": i % 3,
            "observation_json": json.dumps(f"room {i % 5}"),
            "action_json": json.dumps({"go": "north"}),
            "next_observation_json": json.dumps(outcome),
            "reward": 1.0 if outcome == "door" else -1.0,
            "events": [],
            "reward_tier": "rule",
        }

    split = lambda i: {0: "validation", 3: "test"}.get(i % 7, "train")
    steps = str(tmp_path / "steps")
    write_dataset(
        steps,
        "steps",
        "trajectories/1",
        [
            complete_row(
                "trajectories/1",
                step(i, "door" if i % 2 else "wall"),
                dataset="t",
                source="s",
                origin="verifier",
                split=split(i),
            )
            for i in range(56)
        ],
    )
    common = {"learning_rate": 3e-3, "batch_size": 8, "max_length": 128, "num_train_epochs": 3}
    result = train("reward_model", common, {"model": tiny["policy"], "data": steps}, "steps")
    assert (
        result["summary"]["test/pearson"] > 0.8
        and result["summary"]["test/mse"] < result["summary"]["test/baseline_mse"]
    )
    rated = [transition(step(2, outcome)) for outcome in ("door", "wall")]
    good, bad = load_scorer(result["outputs"]["model"]["path"]).score(
        [Response(r["prompt"], r["completion"]) for r in rated]
    )
    assert (
        good > bad and rated[0]["completion"][0]["content"] == '[ACTION]\n{"go": "north"}\n\n[NEXT OBSERVATION]\ndoor'
    )

    def trajectory(ends):
        said = [("assistant", "go north"), ("user", "a hall"), ("assistant", f"open the {ends}")]
        return [{"role": role, "content": text} for role, text in said]

    ranked = str(tmp_path / "ranked")
    write_dataset(
        ranked,
        "ranked",
        "pairs/1",
        [
            complete_row(
                "pairs/1",
                {
                    "prompt": [{"role": "user", "content": f"room {i}"}],
                    "chosen": trajectory("door"),
                    "rejected": trajectory("wall"),
                    "pairs_in_group": 1,
                },
                dataset="t",
                source="s",
                origin="human",
                split=split(i),
            )
            for i in range(42)
        ],
    )
    result = train("reward_model", {**common, "probe_pairs": 0}, {"model": tiny["policy"], "data": ranked}, "ranked")
    assert result["summary"]["test/accuracy"] == 1.0
