"""Catalogue section D vectors: name -> function(inputs, params) -> {expected key: value}."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch

from stages import align, losses, selection
from stages.align import displaced
from stages.batching import make_item
from stages.decoding import likelihood
from stages.evaluation import grading, held_out_text, mt_bench, scores
from stages.ingest import Config
from stages.ingestion import formats
from stages.measures import overopt, preference, reward_model, sampling, statistics, suites, text
from stages.models import modeling
from stages.reward import debate
from tests.evaluation.test_metrics import answers
from tests.production import aligned_step, head


def _pass_at_k(inputs, params):
    rows = inputs["n_c_k"]
    values = [sampling.pass_at_k(*row) for row in rows]
    n, c, k = rows[0]
    return {"pass_at_k": values, "unbiased": values[0], "plug_in_WRONG": 1 - (1 - c / n) ** k}


def _avg_at_k(inputs, params):
    rows, k = answers(inputs["correct"]), len(inputs["correct"][0])
    metric = scores.policy_metrics(rows)["accuracy"]
    return {
        "per_problem": [value for value, _ in scores.item_values(rows, "accuracy").values()],
        f"avg_at_{k}": metric.value,
        "se_over_problems": metric.se,
    }


def _maj_at_k(inputs, params):
    return {"maj_at_k": [sampling.maj_at_k(inputs["answers"], inputs["gold"], k) for k in params["ks"]]}


def _bon(inputs, params):
    return {"expected_best": [selection.best_of_n_estimate(inputs["scores"], n) for n in params["n"]]}


def _proxy_gold(inputs, params):
    return {
        "gold_of_proxy_best": [selection.best_of_n_estimate(inputs["proxy"], n, inputs["gold"]) for n in params["n"]],
        "proxy_best": [selection.best_of_n_estimate(inputs["proxy"], n) for n in params["n"]],
    }


def _overopt_curve(form):
    def adapter(inputs, params):
        d, gold = overopt.peak(params["alpha"], params["beta"], form)
        return {
            "gold": overopt.curve(inputs["d"], params["alpha"], params["beta"], form),
            "d_peak": d,
            "gold_peak": gold,
        }

    return adapter


def _overopt_fit(inputs, params):
    alpha, beta = overopt.fit(inputs["d"], inputs["gold"], params["form"])
    return {"alpha": alpha, "beta": beta}


def _overopt_divergence(inputs, params):
    return overopt.divergence(
        inputs["train_rm"], inputs["test_rm"], min_drop=params["delta"], patience=params["patience"]
    )


def _wilson(inputs, params):
    bounds = [statistics.wilson(k, inputs["n"], params["z"]) for k in inputs["k"]]
    return {"low": [low for low, _ in bounds], "high": [high for _, high in bounds]}


def _paired(inputs, params):
    a, b = (answers([[value] for value in inputs[side]]) for side in "ab")
    result = scores.paired(a, b, "accuracy")
    apart = [scores.policy_metrics(rows)["accuracy"].se for rows in (a, b)]
    return {
        "diff": result["difference"],
        "se_paired": result["se"],
        "se_unpaired": math.hypot(*apart),
        "discordant": [result["better"], result["worse"]],
    }


def _token_rank(inputs, params):
    logits = torch.tensor([inputs["base_logits"]])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(modeling, "hidden_states", lambda model, batch, at: logits)
        patch.setattr(modeling, "head_of", lambda model: head(logits))
        return {
            "rank": likelihood.response_ranks(
                torch.nn.Identity(), [make_item("row", [0], [[inputs["token"]]], [[1]])], 8, "cpu"
            )[0][0][0]
        }


def _displacement(inputs, params):
    """Checkpoints as validation passes, measured from the first one."""
    chosen, rejected = (torch.tensor(inputs[side], dtype=torch.float64) for side in ("logp_chosen", "logp_rejected"))
    passes = [losses.displacement_metrics(w, l, chosen[0], rejected[0], beta=1.0) for w, l in zip(chosen, rejected)]
    last = passes[-1]
    margin = [
        aligned_step(align.Config(method="reference_free", beta=1.0), [[w[None], l[None]]])["rewards/margins"]
        for w, l in zip(chosen, rejected)
    ]
    history = [[float(one["chosen_shift"]), float(one["margin"])] for one in passes]
    return {
        "margin": margin,
        "chosen_change": last["chosen_shift"],
        "rejected_change": last["rejected_shift"],
        "displaced": displaced([history[0], history[-1]], falls=1),
    }


def _clustered(inputs, params):
    scores = inputs["scores"]
    return {
        "mean": sum(scores) / len(scores),
        "se_clustered": statistics.clustered_se(scores, inputs["cluster"]),
        "se_naive": statistics.clustered_se(scores, range(len(scores))),
    }


def _mc_answer_text(inputs, params):
    return suites.mc_answer_text(
        inputs["loglik"], inputs["choices"], inputs["n_tokens"], inputs["gold"], inputs.get("uncond_loglik")
    )


def _judge_swap(inputs, params):
    return {
        "winner": preference.swap_combine(
            inputs["order1"], inputs["order2_as_printed"], params.get("inconsistent", "tie")
        )
    }


def _lc(inputs, params):
    if inputs.get("model_equals_baseline"):
        lengths = [10.0, 20.0, 35.0]
        return preference.length_controlled_win_rate(lengths, lengths, [0.5, 0.5, 0.5])
    return preference.length_controlled_win_rate(
        inputs["len_model"],
        inputs["len_baseline"],
        inputs["preference"],
        inputs.get("instruction_difficulty"),
        l2=params.get("regularisation", 0.0),
    )


def _elo(inputs, params):
    settings = {"k": params["K"], "scale": params["scale"], "base": params["base"], "init": params["init"]}
    battles = [tuple(row) for row in inputs["battles"]]
    return {
        "ratings": preference.elo(battles, **settings),
        "after_first": preference.elo(battles[:1], **settings),
        "reversed_order_ratings": preference.elo(battles[::-1], **settings),
    }


def _bradley_terry(inputs, params):
    fit = preference.bradley_terry(inputs["win_matrix"], l2=params.get("l2"))
    return {
        "scores": fit.scores.tolist(),
        "elo_scale": fit.elo_scale.tolist(),
        "p_0_beats_1": fit.probability(0, 1),
        "difference": float(fit.scores[0] - fit.scores[1]),
        "converged_without_l2": preference.bradley_terry(inputs["win_matrix"], l2=0.0).converged,
    }


def _arena_hard(inputs, params):
    wins = [preference.arena_hard_wins(verdict, params["strong_weight"]) for verdict in inputs["verdicts"]]
    return {"wins_A": [a for a, _ in wins], "wins_B": [b for _, b in wins]}


def _refusal_asymmetry(inputs, params):
    return suites.refusal_asymmetry(inputs["refused_view_A"], inputs["refused_view_B"])


def _alignment_tax(inputs, params):
    return suites.alignment_tax(inputs["before"], inputs["after"], inputs.get("se"))


def _contrast(inputs, params):
    if "a" in inputs:
        return {"levenshtein": text.levenshtein(inputs["a"], inputs["b"])}
    return text.contrastiveness(inputs["chosen"], inputs["rejected"])


def _diversity(inputs, params):
    n = params["n"]
    return {
        f"distinct_{n}": text.distinct_n([inputs["tokens"]], n),
        f"repetition_{n}": text.repetition_n(inputs["tokens"], n),
    }


def _length_correlation(inputs, params):
    pair = inputs["score"], inputs["length"]
    return {"pearson": statistics.pearson(*pair), "spearman": reward_model.spearman(*pair)}


def _ingested(name):
    """Rows of a public data file kept beside the project, as ingest reads them; the vector is skipped where it is
    absent.
    """
    import json
    from pathlib import Path

    from tests.vectors import Skip

    file = Path(__file__).resolve().parents[2].parent / "shared" / "data" / name
    if not file.exists():
        raise Skip(f"needs the data file {name}")
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    read = formats.Adapter(formats.detect(rows), Config())
    return [read(row)[1] for row in rows]


def _mt_bench_counts(inputs, params):
    rows = _ingested("mt_bench_question.jsonl")
    return {
        "questions": len(rows),
        "turns": max(len(mt_bench.questions_of(row)[0]) for row in rows),
        "per_category": dict(Counter(row["category"] for row in rows)),
    }


def _ifeval_counts(inputs, params):
    rows = _ingested("ifeval_input_data.jsonl")
    kinds = Counter(one["id"] for row in rows for one in row["constraints"])
    return {
        "prompts": len(rows),
        "instructions": sum(len(grading.constraint_verdicts(row, "An answer.")["strict"]) for row in rows),
        "instruction_types": len(kinds),
        "no_comma": kinds["punctuation:no_comma"],
        "number_words": kinds["length_constraints:number_words"],
    }


ADAPTERS = {
    "mt_bench_file_counts": _mt_bench_counts,
    "ifeval_file_counts": _ifeval_counts,
    "pass_at_k": _pass_at_k,
    "pass_at_k_undefined": _pass_at_k,
    "pass_at_k_biased_trap": _pass_at_k,
    "avg_at_k": _avg_at_k,
    "maj_at_k_expected": _maj_at_k,
    "maj_at_k_with_null": _maj_at_k,
    "weighted_maj": lambda i, p: {"answer": selection.majority(i["answers"], i["weights"])[0]},
    "bon_expected_max": _bon,
    "bon_proxy_gold": _proxy_gold,
    "bon_kl": lambda i, p: {"kl_upper": [selection.best_of_n_kl(n) for n in i["n"]]},
    "mc_answer_text": _mc_answer_text,
    "mc_letter": lambda i, p: suites.mc_letter(i["letter_loglik"], i["gold"]),
    "ifeval_accuracies": lambda i, p: suites.ifeval_accuracies(i["strict"], i["loose"]),
    "ifeval_loose_variants": lambda i, p: {"variants": suites.ifeval_loose_variants(i["response"])},
    "winrate_ties_half": lambda i, p: preference.win_rate(i["verdicts"]),
    "judge_position_bias": lambda i, p: preference.judge_bias(i["order1"], i["order2_as_printed"]),
    "judge_swap_combine": _judge_swap,
    "style_feature": lambda i, p: preference.style_feature(i["count_a"], i["count_b"]),
    "lc_winrate_minimal": _lc,
    "lc_winrate_difficulty": _lc,
    "lc_winrate_identity": _lc,
    "elo_online": _elo,
    "bradley_terry_mle": _bradley_terry,
    "bradley_terry_two": _bradley_terry,
    "bradley_terry_separable": _bradley_terry,
    "arena_hard_weights": _arena_hard,
    "mt_bench_mean": lambda i, p: suites.mt_bench(i["scores_turn1_turn2"], p["missing"]),
    "rewardbench_section": lambda i, p: {
        "section_score": suites.rewardbench_section(i["subset_accuracy"], i["subset_counts"])
    },
    "rewardbench_total": lambda i, p: suites.rewardbench_total(i["sections"], i["prior_sets"], p["prior_weight"]),
    "rm_length_correlation": _length_correlation,
    "rm_transform_robustness": lambda i, p: reward_model.transform_robustness(
        i["correct_original"], i["correct_transformed"]
    ),
    "hack_probe_rate": lambda i, p: reward_model.fooled_rate(i["scores_clean_vs_probe"]),
    "overopt_bon_curve": _overopt_curve("bon"),
    "overopt_rl_curve": _overopt_curve("rl"),
    "overopt_fit": _overopt_fit,
    "overopt_divergence": _overopt_divergence,
    "reward_kl_frontier": lambda i, p: {"frontier": suites.kl_frontier(i["kl_reward"])},
    "refusal_metrics": lambda i, p: suites.over_refusal(i["safe_prompts_refused"], i["unsafe_prompts_refused"]),
    "refusal_asymmetry": _refusal_asymmetry,
    "alignment_tax": _alignment_tax,
    "token_shift": lambda i, p: suites.token_shift(i["base_ranks"]),
    "token_shift_rank_ties": _token_rank,
    "h4_mean": lambda i, p: {"h4": suites.h4_mean(i["arc"], i["hellaswag"], i["mmlu"], i["truthfulqa"])},
    "trace_error": lambda i, p: suites.trace_error(i["final_correct"], i["has_wrong_step"]),
    "perturbed_gap": lambda i, p: suites.perturbed_gap(i["original_correct"], i["perturbed_correct"]),
    "contrastiveness": _contrast,
    "levenshtein_basic": _contrast,
    "repetition_and_distinct": _diversity,
    "stock_phrase_rate": lambda i, p: text.phrase_rates(i["texts"], i["phrases"]),
    "reflection_words": lambda i, p: text.reflection_counts(i["texts"], i["words"]),
    "accuracy_vs_budget": lambda i, p: {"accuracy": suites.accuracy_vs_budget(i["tokens"], i["correct"], i["budgets"])},
    "displacement_flags": _displacement,
    "judge_agreement": lambda i, p: suites.judge_agreement(i["judge"], i["human"]),
    "debate_judge_accuracy": lambda i, p: {
        "accuracy": debate.judge_accuracy(
            [float(v == "A") for v in i["verdict"]], [side == "A" for side in i["correct_side"]]
        )
    },
    "wilson_interval": _wilson,
    "paired_difference": _paired,
    "clustered_se": _clustered,
    "power_two_proportions": lambda i, p: {
        "n_per_arm": statistics.power_two_proportions(i["p1"], i["p2"], p["alpha"], p["power"])
    },
    "mcnemar_exact": lambda i, p: {"p_value": [statistics.mcnemar_exact(*row) for row in i["discordant"]]},
    "group_alignment_wd": lambda i, p: suites.group_alignment(i["p"], i["q"]),
    "perplexity": lambda i, p: {
        f"{prefix}{metric}": held_out_text.ratio(metric, math.fsum(i["token_nll"]), n)
        for prefix, metric, n in (("token_", "perplexity", len(i["token_nll"])), ("", "bits_per_byte", i["n_bytes"]))
    },
}
