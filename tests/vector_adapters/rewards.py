"""Reward vectors of the catalogue against stages/verification and stages/reward."""

from __future__ import annotations

import json

import numpy as np

from stages.estimators import apply_truncation, group_advantage, moved_multiplier, normalized_sum
from stages.generation import Sample
from stages.reward.components import RewardComponent
from stages.reward.rewards import build_rewards
from stages.reward.scorers import vote
from stages.rollouts.metrics import rollout_metrics
from stages.verification.constraints import check_constraint
from stages.verification.equality import math_equal
from stages.verification.extraction import (
    STRICT_ORDER,
    extract,
    extract_boxed,
    extract_hash,
    extract_last_number,
    extract_mc_letter,
)
from stages.verification.languages import SCRIPTS, language_share
from stages.verification.plain_numbers import as_rational
from stages.verification.responses import format_reward, view
from stages.verification.rule_rewards import code_reward, constraint_reward, soft_overlong
from tests.vectors import Skip


def texts(function):
    return lambda inputs, params, key="answers": {key: [function(t) for t in inputs["texts"]]}


def formats(inputs, params):
    prefilled = params.get("prefilled", "")
    if "text" in inputs:
        return {
            name: format_reward(inputs["text"], name, prefilled=prefilled) for name in ("think_answer", "think_only")
        }
    return {
        name: [format_reward(t, name, prefilled=prefilled) for t in inputs["texts"]]
        for name in ("think_answer", "think_only")
    }


def summed(weights=None, **columns):
    """The reward of each row whose components are known, by default all of weight 1."""
    known = build_rewards(
        [
            RewardComponent(name=name, kind="length", weight=weight)
            for name, weight in zip(columns, weights or [1.0] * len(columns))
        ],
        {},
    )
    return [known.total_of(dict(zip(columns, row))).total for row in zip(*columns.values())]


def overlong(inputs, params):
    rewards = [soft_overlong(n, params["L_max"], params["L_cache"]) for n in inputs["lengths"]]
    return {"reward": rewards, "total": summed(accuracy=inputs.get("accuracy", []), length=rewards)}


def truncation(inputs, params):
    policy = params.get("truncation_policy", "penalty")
    scores = np.array(inputs["rm_score"], float)
    ended = inputs["ended_with_eos"]
    if params.get("missing_eos_mode") == "subtract":
        component = RewardComponent(kind="truncation", missing_eos_penalty=params["missing_eos_penalty"])
        rows = [
            {"prompt_row": {}, "completion_text": "", "completion_ids": [], "finish_reason": "eos" if e else "length"}
            for e in ended
        ]
        penalties = [r.total for r in build_rewards([component], {}).score(rows)]
        return {"reward": summed(score=scores.tolist(), eos=penalties)}
    rewards, _, _ = apply_truncation(scores, ended, policy, params["missing_eos_penalty"])
    samples = [
        Sample({}, [1], k, [2], [0.0], "eos" if e else "length", "x", total=float(r), parts={}, reasons={})
        for k, (e, r) in enumerate(zip(ended, scores))
    ]
    logged = rollout_metrics(samples, np.asarray(rewards, float), np.arange(len(samples)))
    return {"reward": np.asarray(rewards).tolist(), "truncated_fraction": logged["completions/clipped_ratio"]}


def tulu(inputs, params):
    rows = [params["reward_if_correct"] * v for v in inputs["verified"]]
    rewards, _, _ = apply_truncation(
        np.array(rows, float), inputs["ended_with_eos"], "penalty", -params["non_stop_penalty"]
    )
    return {"reward": np.asarray(rewards).tolist()}


def composite(inputs, params):
    columns, weights = inputs["components"], params["weights"]
    n = len(next(iter(columns.values())))

    def totals(policy):
        known = build_rewards(
            [
                RewardComponent(name=name, kind="length", weight=weight, on_missing=policy)
                for name, weight in weights.items()
            ],
            {},
        )
        return [known.total_of({name: column[i] for name, column in columns.items()}).total for i in range(n)]

    return {policy: totals(policy) for policy in ("skip", "renormalise")}


def normalise_order(inputs, params):
    parts, weights, one = [inputs["accuracy"], inputs["format"]], params["weights"], [0] * len(inputs["accuracy"])
    total = summed(weights, accuracy=parts[0], format=parts[1])
    return {
        "sum_then_normalize": group_advantage(total, one, "mean_std", params["ddof"], 0.0)[0].tolist(),
        "normalize_then_sum": (
            normalized_sum(parts, [[w] * len(one) for w in weights], one, params["ddof"], 0.0).tolist()
        ),
    }


def rlvr(inputs, params):
    components = [
        RewardComponent(name="accuracy", kind="verifier", verifier="math", weight=params["weights"]["accuracy"]),
        RewardComponent(name="format", kind="format", preset="think_answer", weight=params["weights"]["format"]),
    ]
    rows = [
        {"prompt_row": {"answer": inputs["gold"]}, "completion_text": t, "completion_ids": [], "finish_reason": "eos"}
        for t in inputs["texts"]
    ]
    scored = build_rewards(components, {}).score(rows)
    return {
        "total": [s.total for s in scored],
        "accuracy": [s.parts["accuracy"] for s in scored],
        "format": [s.parts["format"] for s in scored],
    }


def views(inputs, params):
    text, missing = inputs["text"], params.get("missing", "full")
    unclosed = text.split("</think>")[0]
    return {
        **{name: view(text, name, missing=missing) for name in ("full", "answer_only", "think_only")},
        "no_close_tag_answer_only": view(unclosed, "answer_only", missing=missing),
    }


def code_modes(inputs, params):
    rows = list(zip(inputs["passed"], inputs["total"], inputs["well_formatted"]))
    return {mode: [code_reward(p, t, mode, well_formatted=w) for p, t, w in rows] for mode in ("all", "fraction")}


def code_edge(inputs, params):
    """The cases of the vector, run for real: a test that hangs, no tests, a program that cannot be imported."""
    hang = {
        "program": "import sys\nx = int(input())\nwhile x == 3:\n    pass\nprint(x)",
        "tests": [{"input": str(i), "expected": str(i), "code": None} for i in range(4)],
    }
    broken = {"program": "import no_such_module_anywhere", "tests": [{"input": "", "expected": "", "code": None}] * 2}
    cases = {"timeout on one of 4 tests": hang, "no tests": {"program": "pass", "tests": []}, "import error": broken}
    rows = [
        {
            "prompt_row": {"tests": cases[c]["tests"]},
            "completion_text": f"```python\n{cases[c]['program']}\n```",
            "completion_ids": [],
            "finish_reason": "eos",
        }
        for c in inputs["cases"]
    ]
    return {
        mode: [
            s.parts["code"]
            for s in build_rewards([RewardComponent(kind="code", mode=mode, timeout_s=1.0)], {}).score(rows)
        ]
        for mode in ("all", "fraction")
    }


def constraints(inputs, params):
    return {"passes": [check_constraint(name, kwargs, text) for name, kwargs, text in inputs["cases"]]}


def score_rules(inputs, params):
    """Through the model component itself, with the raw scores in place of a network's."""

    class Scorer:
        disagreement, beside = None, {}

        def reads_ids_of(self, renderer):
            return True

        def score(self, responses):
            return [float(r.ids[0]) for r in responses]

    component = RewardComponent(
        kind="model", no_eos_reward=params["no_eos_reward"], empty_reward=params["empty_reward"]
    )
    from stages.reward.rewards import Rewards

    rows = [
        {
            "prompt_row": {},
            "prompt_ids": [raw],
            "completion_text": "" if empty else "x",
            "completion_ids": [],
            "finish_reason": "eos" if eos else "length",
        }
        for raw, eos, empty in zip(inputs["raw"], inputs["has_eos"], inputs["empty"])
    ]
    return {"final": [s.total for s in Rewards([component], {"model": Scorer()}, None).score(rows)]}


def gold_checksum(inputs, params):
    from pathlib import Path

    for path in (
        p
        for root in (Path.cwd(), *Path(__file__).resolve().parents)
        for p in root.glob("shared/data/**/*gsm8k*test*.jsonl")
    ):
        golds = [
            extract_hash(json.loads(line)["answer"])
            for line in path.read_text(encoding="utf-8").splitlines()
            if line.strip()
        ]
        values = [as_rational(g) for g in golds if g is not None]
        values = [v for v in values if v is not None]
        return {
            "n": len(golds),
            "n_parsed": len(values),
            "sum_of_golds": float(sum(values)),
            "n_negative": sum(v < 0 for v in values),
            "n_non_integer": sum(v.denominator != 1 for v in values),
        }
    raise Skip("the GSM8K test file (shared/data/**/*gsm8k*test*.jsonl)")


def majority(inputs, params):
    """Through the reward component: answers in boxes, no gold answer."""
    component = RewardComponent(kind="majority")
    texts = ["none" if a is None else f"\\boxed{{{a}}}" for a in inputs["answers"]]
    verdicts = vote(component, [{"prompt_row": {"row_id": "p"}, "completion_text": text} for text in texts])
    rewards = [v.value for v in verdicts]
    return {
        "pseudo_label": next((v.extracted for v in verdicts if v.value), None),
        "reward": rewards,
        "agreement": sum(rewards) / len(rewards),
    }


def language(inputs, params):
    return {
        unit: [language_share(text, SCRIPTS[params["target"]], unit) for text in inputs["texts"]]
        for unit in ("word", "char")
    }


def domains(inputs, params):
    """Every source is a function that returns its score, asked about the domains whose route names it."""
    components = [
        RewardComponent(
            name=name,
            kind="python",
            source=f"def score(prompt, completion, answer):\n    return {value}",
            weight=1.0,
            domains=[domain for domain, route in params["routes"].items() if name in route],
        )
        for name, value in inputs["scores"].items()
    ]
    rows = [
        {"prompt_row": {"domain": domain}, "completion_text": "x", "completion_ids": [], "finish_reason": "eos"}
        for domain in inputs["domains"]
    ]
    return {"reward": [one.total for one in build_rewards(components, {}).score(rows)]}


def router(inputs, params):
    """Who gives the reward: the rule where the prompt has an answer, then a learned reward where there is one, then the
    judge.
    """
    says = "def score(prompt, completion, answer, there):\n    return 9.0 if there else None"
    components = [
        RewardComponent(name="rule", kind="verifier", tier="rule"),
        RewardComponent(name="learned", kind="python", tier="learned", source=says),
        RewardComponent(
            name="judge", kind="python", tier="judge", source="def score(prompt, completion, answer):\n    return 0.5"
        ),
    ]
    rows = [
        {
            "prompt_row": {
                "answer": "4" if rule else None,
                "answer_type": "integer",
                "extra_json": json.dumps({"there": learned}),
            },
            "completion_text": "\\boxed{4}",
            "completion_ids": [1],
            "finish_reason": "eos",
        }
        for rule, learned in zip(inputs["has_rule"], inputs["has_rm"])
    ]
    return {"choice": [one.tier for one in build_rewards(components, {}).score(rows)]}


def humaneval(inputs, params):
    """The published programs, and programs that only return None, against the published tests."""
    import gzip
    from pathlib import Path

    path = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "HumanEval.jsonl.gz"
    if not path.exists():
        raise Skip("needs the data file HumanEval.jsonl.gz")
    problems = [json.loads(line) for line in gzip.open(path, "rt", encoding="utf-8")]

    def passed(completion) -> int:
        rows = [
            {
                "prompt_row": {
                    "prompt": [{"role": "user", "content": p["prompt"]}],
                    "tests": [{"code": f"{p['test']}\ncheck({p['entry_point']})\n"}],
                },
                "completion_text": completion(p),
                "completion_ids": [1],
                "finish_reason": "eos",
            }
            for p in problems
        ]
        return int(
            sum(one.total for one in build_rewards([RewardComponent(kind="code", timeout_s=30.0)], {}).score(rows))
        )

    right = passed(lambda p: p["canonical_solution"])
    return {
        "canonical_pass": right,
        "return_none_pass": passed(lambda p: "    return None\n"),
        "pass_at_1_canonical": right / len(problems),
    }


def signals(inputs, params):
    """Shares of groups as an RL step logs them."""
    flat = [(k, reward) for k, group in enumerate(inputs["group_rewards"]) for reward in group]
    samples = [
        Sample({}, [1], k, [2], [0.0], "eos", "x", total=float(reward), parts={}, reasons={}, correct=reward == 1)
        for k, reward in flat
    ]
    logged = rollout_metrics(samples, np.array([float(reward) for _, reward in flat]), np.array([k for k, _ in flat]))
    return {
        "zero_advantage_fraction": logged["frac_reward_zero_std"],
        "all_correct": logged["groups/all_correct_fraction"],
        "none_correct": logged["groups/all_wrong_fraction"],
    }


def constrained(inputs, params):
    return {
        "lambda_new": [
            moved_multiplier(inputs["lambda"], mean, inputs["c_k"], params["eta"]) for mean in inputs["mean_R_k"]
        ]
    }


ADAPTERS = {
    "constrained_lambda": constrained,
    "advisor_reward_source": router,
    "humaneval_canonical": humaneval,
    "zero_advantage_fraction": signals,
    "language_consistency": language,
    "domain_route": domains,
    "majority_reward": majority,
    "majority_tie": majority,
    "majority_none": majority,
    "extract_boxed": texts(extract_boxed),
    "extract_gsm8k": texts(extract_hash),
    "extract_flexible": texts(lambda t: extract(t, STRICT_ORDER) or extract_last_number(t)),
    "extract_mc_letter": lambda i, p: {"letters": [extract_mc_letter(t) for t in i["texts"]]},
    "math_equivalence": lambda i, p: {
        "equal": [math_equal(a, b, rel_tol=p.get("rel_tol", 0.0)) for a, b in i["pairs"]]
    },
    "gsm8k_gold_checksum": gold_checksum,
    "format_reward": formats,
    "format_reward_prefilled": formats,
    "soft_overlong": overlong,
    "soft_overlong_no_cache": overlong,
    "soft_overlong_combined": overlong,
    "eos_gate": truncation,
    "eos_subtract": truncation,
    "eos_gate_tulu": tulu,
    "composite_missing": composite,
    "composite_normalise_order": normalise_order,
    "rlvr_accuracy_plus_format": rlvr,
    "reward_view": views,
    "reward_view_missing_tags": views,
    "code_reward_modes": code_modes,
    "code_reward_bad_format": code_modes,
    "code_reward_edge": code_edge,
    "orm_threshold": lambda i, p: {
        "reward": code_reward(i["tests_passed"], i["tests"], "threshold", threshold=p["pass_rate_threshold"])
    },
    "if_constraint_reward": lambda i, p: {
        m: [constraint_reward(s, m) for s in i["satisfied"]] for m in ("all", "fraction")
    },
    "ifeval_checkers": constraints,
    "rm.score_rules/truncation": score_rules,
}
