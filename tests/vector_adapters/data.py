"""Catalogue section A vectors (and sft.unroll): adapters that call stages/ingestion and storage/schema."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace


from stages import estimators, selection
from stages.ingest import Config
from stages.ingestion import curation, fields, formats, pairing, rules
from stages.label_steps import estimates
from stages.policy import schedules
from stages.reward_model import Config as RewardConfig
from stages.reward_models import reward_data
from stages.reward_models.reward_data import step_items
from stages.reward_models.reward_scorers import aggregate_steps
from stages.rollouts.groups import GroupSampler
from stages.rollouts.records import Records
from storage import schema
from tests.production import ranked

SHARED = Path(__file__).resolve().parents[2].parent / "shared" / "data"


def _lines(name: str) -> list[dict]:
    path = SHARED / name
    if not path.exists():
        from tests.vectors import Skip

        raise Skip(f"needs the data file {name}")
    opener = gzip.open if name.endswith(".gz") else open
    with opener(path, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


# -- likert, binarise, margin -------------------------------------------------------------------------
def _likert(inputs, params):
    n = params.get("n_points", 5)
    out = [pairing.likert(label, n, params.get("orientation", "low_is_a")) for label in inputs["labels"]]
    return {"winner": [o[0] for o in out], "strength": [o[1] for o in out], "signed": [o[2] for o in out]}


def _likert_soft(inputs, params):
    return {
        "label_prob_A": [
            pairing.likert_probability(
                label, params["n_points"], params.get("orientation", "low_is_a"), params.get("eps", 0.05)
            )
            for label in inputs["labels"]
        ]
    }


def _soft_label(inputs, params):
    out = [pairing.binarise(p, params.get("tie_policy", "drop")) for p in inputs["p_A"]]
    return {"winner": [o[0] for o in out], "label_prob": [o[1] for o in out], "kept": [o[2] for o in out]}


def _margin_tables(inputs, params):
    return {
        name: [pairing.margin(f"llama2_{name}", grade=label) for label in inputs["labels"]]
        for name in ("small", "large")
    }


def _margin_scores(inputs, params):
    gaps = [
        pairing.margin("score_diff", chosen_score=a, rejected_score=b)
        for a, b in zip(inputs["chosen_score"], inputs["rejected_score"])
    ]
    return {"margin": gaps, "kept": [gap > 0 for gap in gaps]}


# -- rankings and ratings -----------------------------------------------------------------------------
def _ranking(inputs, params):
    ranks = inputs["ranks"]
    out = {mode: pairing.ranking_pairs(ranks, mode) for mode in ("all", "best_vs_rest", "best_worst", "adjacent")}
    chosen = out[params.get("mode", "all")]
    return out | {"pairs": chosen, "n_pairs": len(chosen), "weight_per_pair": 1 / len(chosen) if chosen else None}


def _ranking_counts(inputs, params):
    return {"n_pairs": [len(pairing.ranking_pairs(list(range(k)))) for k in inputs["K"]]}


def _ranking_weighting(inputs, params):
    """Every pair of a prompt weighs 1/pairs (per_prompt), or 1."""
    groups = inputs["scores_best_to_worst"]
    return {
        "prompt_means": [ranked([scores], lambda of: 1 / len(of)) for scores in groups],
        "loss": ranked(groups, lambda of: 1 / len(of)),
        "pooled_WRONG": ranked(groups, lambda of: 1.0),
    }


def _rank_gap(inputs, params):
    stages = pairing.rank_gap_stages(inputs["ranks"], params.get("anchor"), params.get("order", "large_gap_first"))
    pairs = [pairs for _, pairs in stages]
    return {
        "stage_index": list(range(len(stages))),
        "rank_gap": [gap for gap, _ in stages],
        "pairs": pairs,
        "pairs_by_stage": pairs,
    }


def _ratings_pairs(inputs, params):
    out = pairing.ratings_pairs(inputs["scores"], params.get("min_margin", 1.0))
    return {"pairs": [(i, j) for i, j, _ in out], "margin": [gap for _, _, gap in out]}


def _ratings_best(inputs, params):
    """The overall score is ingestion's of a row with aspects; weights of aspects are no setting of it."""
    adapter = formats.Adapter("ratings", Config())
    rows = [
        {"prompt": "x", "completion": str(k), "aspects": {str(a): score for a, score in enumerate(row)}}
        for k, row in enumerate(inputs["aspect_scores"])
    ]
    scores = (
        pairing.overall_scores(inputs["aspect_scores"], params["weights"])
        if "weights" in params
        else [adapter(row)[1]["score"] for row in rows]
    )
    ranks = pairing.ranks_from_scores(scores)
    pairs = pairing.ranking_pairs(ranks, "best_vs_rest")
    worst = pairing.ranking_pairs(ranks, "best_worst")
    return {
        "overall": scores,
        "chosen": pairs[0][0] if pairs else 0,
        "candidates_rejected": sorted(j for i, j in pairs if i == pairs[0][0]),
        "rejected": worst[0][1] if worst else None,
    }


# -- unpaired, correctness, constraints ---------------------------------------------------------------
def _pairs_to_unpaired(inputs, params):
    rows, conflicts = pairing.pairs_to_unpaired(
        [tuple(pair) for pair in inputs["pairs"]], params.get("on_conflict", "drop")
    )
    return {"rows": rows, "conflicts": conflicts}


def _unpaired_to_pairs(inputs, params):
    return {
        "all": pairing.unpaired_to_pairs(inputs["desirable"], inputs["undesirable"]),
        "kept": pairing.unpaired_to_pairs(
            inputs["desirable"], inputs["undesirable"], params.get("max_pairs_per_prompt")
        ),
    }


def _lambda_band(inputs, params):
    counts = inputs["n_desirable"], inputs["n_undesirable"], inputs.get("lambda_U", 1.0)
    return {
        "lambda_D_range": pairing.lambda_band(*counts, params.get("band", pairing.LAMBDA_BAND)),
        "lambda_D_range_4_3": pairing.lambda_band(*counts, (1.0, 4 / 3)),
    }


def _orm(inputs, params):
    return {
        "rows": [
            (completion, fields.to_label(label)) for completion, label in zip(inputs["completions"], inputs["correct"])
        ]
    }


def _correctness(inputs, params):
    correct, limit = inputs["correct"], params.get("max_pairs_per_prompt")
    if correct and isinstance(correct[0], list):
        out = [pairing.correctness_pairs(group, limit) for group in correct]
        return {"pairs": [pairs for pairs, _ in out], "reasons": [reason for _, reason in out]}
    pairs, reason = pairing.correctness_pairs(correct, limit)
    return {"pairs": pairs, "reason": reason}


def _constraints(inputs, params):
    reasons = [
        pairing.constraint_contrast(a, b)
        for a, b in zip(inputs["with_constraint_passes"], inputs["without_constraint_passes"])
    ]
    return {"kept": [reason is None for reason in reasons], "reason": reasons}


def _events(inputs, params):
    found = [pairing.event(event) for event in inputs["events"]]
    return {"label": [label for label, _ in found], "weight": [weight for _, weight in found]}


def _votes(inputs, params):
    out = [pairing.votes(item) for item in inputs["votes"]]
    return {"winner": [o["winner"] for o in out], "p_A": [o["p_a"] for o in out]}


# -- transcripts, prompts, turns ------------------------------------------------------------------------
def _hh(inputs, params):
    return fields.hh_pair(inputs["chosen"], inputs["rejected"])[0]


def _row_codes(row: dict) -> tuple[dict | None, set]:
    try:
        _, out, codes = formats.Adapter("preference", Config())(row)
    except rules.Bad as bad:
        return None, set(bad.codes)
    return out, codes | set(rules.pair_codes(out["prompt"], out["chosen"], out["rejected"]))


def _implicit(inputs, params):
    split = [fields.implicit_strings(a, b) for a, b in inputs["pairs"]]
    codes = [sorted(_row_codes({"chosen": a, "rejected": b})[1]) for a, b in inputs["pairs"]]
    return {
        "prompt": [s[0] for s in split],
        "chosen": [s[1] for s in split],
        "rejected": [s[2] for s in split],
        "codes": codes,
    }


def _quarantine(inputs, params):
    seen, out = set(), []
    for row in inputs["rows"]:
        pair, codes = _row_codes(row)
        if not codes:
            own = schema.row_id("pairs/1", pair)
            reverse = schema.row_id("pairs/1", pair | {"chosen": pair["rejected"], "rejected": pair["chosen"]})
            codes = {"duplicate_row"} if own in seen else {"contradicts_row"} if reverse in seen else set()
            if not codes:
                seen.add(own)
        out.append(sorted(codes))
    return {"codes": out}


def _roles(inputs, params):
    return {"codes": [rules.role_codes(roles) for roles in inputs["roles"]]}


def _hh_file(inputs, params):
    counts, kept = Counter(), []
    rows = _lines("hh_harmless_base_test.jsonl.gz")
    for row in rows:
        pair, codes = _row_codes(row)
        counts.update(codes)
        if not codes:
            kept.append((len(pair["chosen"][-1]["content"]), len(pair["rejected"][-1]["content"])))
    return {
        "rows": len(rows),
        "ok": len(kept),
        **{code: counts[code] for code in ("prompt_mismatch", "non_alternating", "empty_completion")},
        "mean_len_diff_chars": sum(a - b for a, b in kept) / len(kept),
        "share_chosen_longer": sum(a > b for a, b in kept) / len(kept),
        "share_equal_len": sum(a == b for a, b in kept) / len(kept),
    }


def _multiturn(inputs, params):
    out = pairing.unroll(inputs["roles"], params.get("policy", "all_turns"), params.get("balance", "none"))
    return {
        "target_message_index": [target for target, _ in out],
        "n_samples": len(out),
        "weight": [weight for _, weight in out],
    }


def _unroll(inputs, params):
    messages = inputs["messages"]
    out = pairing.unroll(inputs["roles"], params.get("policy", "all_turns"), params.get("balance", "none"))
    return {
        "samples": [{"prompt": messages[:target], "completion": messages[target]} for target, _ in out],
        "weights": [weight for _, weight in out],
    }


# -- steps and segments ---------------------------------------------------------------------------------
def _first_error(inputs, params):
    """Ingestion's row, and the item that the process reward model trains on."""
    row = formats.Adapter("stepwise", Config())(
        {"prompt": "x", "completions": ["step"] * len(inputs["ratings"]), "labels": inputs["ratings"]}
    )[1]
    item = step_item(
        {**row, "row_id": "row"},
        [[1]] * len(inputs["ratings"]),
        [0],
        after_first_error=params.get("after_first_error", "drop"),
    )
    return {
        "labels": item.extra["labels"],
        "n_steps": item.extra["n_steps"],
        "solution_correct": item.extra["solution_correct"],
    }


def _rollout_labels(inputs, params):
    n = inputs["rollouts_per_step"]
    soft, hard = estimates([[True] * count + [False] * (n - count) for count in inputs["successes"]])
    return {"soft": soft, "hard": hard}


class Ids:
    """A reader of texts that are ids already."""

    room = 1 << 20

    def plain(self, ids):
        return list(ids)

    prompt = plain

    def wrap(self, prompt, response, mask):
        return prompt, response, mask, len(prompt)


def step_item(row, steps, separator, prompt=(), **settings):
    """The training item of a process reward model (rm.prm) for steps that are ids already."""
    given = {"row_id": "row", **row, "completions": steps, "prompt": list(prompt), "separator": separator}
    return step_items(given, Ids(), RewardConfig(objective="prm", **settings), Counter())[0]


def packaged(prompt, steps, separator, labels, ignore_index):
    """(input ids, labels) of a solution: a step's label stands at its only trained token."""
    item = step_item({"labels": labels}, steps, separator, prompt, after_first_error="keep")
    given = iter(item.extra["labels"])
    return (
        [*item.prompt.tolist(), *item.responses[0].tolist()],
        [ignore_index] * len(item.prompt) + [next(given) if trained else ignore_index for trained in item.masks[0]],
    )


def _packaging(inputs, params):
    ids, labels = packaged(
        [], inputs["step_token_ids"], inputs["separator_ids"], inputs["labels"], params.get("ignore_index", -100)
    )
    return {"input_ids": ids, "labels": labels}


def _step_scores(inputs, params):
    return {how: aggregate_steps(inputs["step_probs"], how) for how in ("prod", "min", "last", "mean")}


def _segments(inputs, params):
    length, segments = inputs["text_token_count"], inputs["segments"]
    codes = rules.segment_codes("x" * length, segments)
    covered = {i for segment in segments for i in range(segment["start"], segment["end"])}
    return {
        "token_counts": [segment["end"] - segment["start"] for segment in segments],
        "covers_all": not codes and covered == set(range(length)),
        "codes": codes,
    }


# -- identity, dedup, splits ----------------------------------------------------------------------------
def _row_ids(inputs, params):
    kind = "pairs/1" if "chosen" in inputs else "unpaired/1" if "label" in inputs else "prompts/1"
    return {
        "prompt_canonical": schema.canonical(schema.clean_messages(inputs["prompt"])),
        "prompt_id": schema.prompt_id(inputs["prompt"]),
        "row_id": schema.row_id(kind, inputs),
    }


def _dataset_hash(inputs, params):
    sorter = schema.RowIdSorter()
    sorter.add(inputs["row_ids"])
    return {"dataset_hash": sorter.digest()}


def _normalise(inputs, params):
    from storage.files import sha256_text

    text = schema.normalise_text(inputs["text"])
    return {"normalised": text, "sha256": sha256_text(text)}


def _shingles(inputs, params):
    k, unit = params.get("k", 5), params.get("unit", "word")
    a, b = curation.shingles(inputs["a"], k, unit), curation.shingles(inputs["b"], k, unit)
    return {"shingles_a": len(a), "shingles_b": len(b), "intersection": len(a & b), "jaccard": curation.jaccard(a, b)}


def _split(inputs, params):
    return {
        "u": [curation.split_position(group, params["salt"]) for group in inputs["groups"]],
        "split": [curation.split_of(group, params["salt"], params["fractions"]) for group in inputs["groups"]],
    }


def _halves(inputs, params):
    return {"half": [curation.half_of(group, params.get("salt", curation.HALVES_SALT)) for group in inputs["groups"]]}


def _gsm8k_split(inputs, params):
    counts = Counter(
        curation.split_of(row["question"], params["salt"], params["fractions"]) for row in _lines("gsm8k_train.jsonl")
    )
    return {name: counts[name] for name in params["fractions"]}


# -- decontamination ------------------------------------------------------------------------------------
def _word_tokens(inputs, params):
    return {"tokens": curation.word_tokens(inputs["text"])}


def _coverage(inputs, params):
    n, threshold, evaluation = params["n"], params.get("threshold", 0.5), inputs["eval"]
    index = curation.DecontaminationIndex(n, "coverage", threshold)
    strict = curation.DecontaminationIndex(n, "any", threshold)
    for item in (index, strict):
        item.tokens = list  # the vector gives tokens
        item.add(evaluation)
    removed, shared, scores = [], [], []
    alone = [curation.DecontaminationIndex(n, "coverage", threshold) for _ in inputs["train"]]
    for one, row in zip(alone, inputs["train"]):
        one.tokens = list
        one.add(evaluation)
        one.check(row)
        scores.append(one.report()["mean_coverage"])  # of one evaluation text
    for row in inputs["train"]:
        removed.append(index.check(row))
        shared.append(strict.check(row))
    report = index.report()
    return {
        "any_match": shared,
        "covered_tokens": [score * len(evaluation) for score in scores],
        "score": scores,
        "eval_contaminated": report["eval_rows_over_threshold"] > 0,
        "train_removed": removed,
    }


def _short_text(inputs, params):
    return {
        "n_grams": [len(curation.ngrams([str(i) for i in range(words)], params["n"])) for words in inputs["n_words"]]
    }


def _char_word(inputs, params):
    n, unit = params["n"], params.get("unit", "word")
    index = curation.DecontaminationIndex(n, "any", unit=unit)
    index.add(inputs["eval"])
    sides = [
        {"".join(gram) if unit == "char" else " ".join(gram) for gram in curation.ngrams(index.tokens(inputs[side]), n)}
        for side in ("eval", "train")
    ]
    return {"any_match": index.check(inputs["train"]), "shared": sorted(sides[0] & sides[1])}


def _decontam_gsm8k(inputs, params):
    index = curation.DecontaminationIndex(params["n"], "coverage", params["threshold"], params.get("unit", "word"))
    for row in _lines("gsm8k_test.jsonl"):
        index.add(row["question"])
    removed = sum(index.check(row["question"]) for row in _lines("gsm8k_train.jsonl"))
    report = index.report()
    return {
        "eval_rows_with_any_8gram": report["eval_rows_with_any_ngram"],
        "eval_rows_coverage_gt_half": report["eval_rows_over_threshold"],
        "train_rows_removed": removed,
        "mean_coverage": report["mean_coverage"],
    }


# -- difficulty, curricula, mixtures ----------------------------------------------------------------------
def _band(inputs, params):
    kept = [
        i
        for i, inside in enumerate(
            selection.difficulty_band(
                inputs["correct_counts"], inputs["N"], params.get("lo", 0.2), params.get("hi", 0.8)
            )
        )
        if inside
    ]
    return {"kept": [inputs["correct_counts"][index] for index in kept], "kept_indices": kept}


def _dynamic(inputs, params):
    stream, mixed = list(enumerate(inputs["correct_counts"])), estimators.informative_groups
    found = estimators.fill_informative(
        lambda seen: stream[seen:] or None,
        lambda group: None if mixed([group[1]], inputs["G"])[0] else "equal",
        int(mixed(inputs["correct_counts"], inputs["G"]).sum()),
    )
    return {"kept_indices": [at for at, _ in found["kept"]], "filtered_fraction": found["filter_rate"]}


def _prompt_stats(inputs, params):
    """``prompt_stats/1`` as RL writes it; a positive reward is a right answer."""
    written = []
    groups = [
        SimpleNamespace(
            prompt={
                "row_id": str(k),
                "prompt_id": str(k),
                "group_id": str(k),
                "dataset": "d",
                "source": "s",
                "origin": "human",
                "split": "train",
            },
            samples=[
                SimpleNamespace(total=r, correct=r > 0, logps=None, action_mask=(), mode="fresh") for r in rewards
            ],
        )
        for k, rewards in enumerate(inputs["rewards"])
    ]
    Records.groups(
        SimpleNamespace(_write=lambda name, rows: written.extend(rows)), [(group, None) for group in groups], 0
    )
    return {
        **{name: [row[name] for row in written] for name in ("mean_reward", "reward_std", "pass_at_1")},
        "zero_advantage": [estimators.is_constant(rewards) for rewards in inputs["rewards"]],
    }


def _length_dynamic(inputs, params):
    group = SimpleNamespace(
        samples=[SimpleNamespace(correct=bool(c), total=r) for c, r in zip(inputs["correct"], inputs["total_reward"])]
    )
    sampler = SimpleNamespace(
        config=SimpleNamespace(filter_groups_metric="acc"), row=SimpleNamespace(advantage="group_mean")
    )
    return {
        "reward_std_nonzero": not estimators.is_constant(inputs["total_reward"]),
        "keep_group": GroupSampler.no_signal(sampler, group) is None,
    }


def _gaussian(inputs, params):
    return {
        "p": [
            schedules.e2h_probabilities(
                "gaussian", progress, 1.0, inputs["levels"], params.get("beta", 1.0), params.get("sigma", 0.75)
            ).tolist()
            for progress in inputs["progress"]
        ]
    }


def _self_paced(inputs, params):
    return {"v": [curation.self_paced(inputs["losses"], k) for k in params["K"]]}


def _mixture(inputs, params):
    return {"counts": [selection.largest_remainder(total, inputs["weights"]) for total in params["N"]]}


# -- bias, agreement, text rows ---------------------------------------------------------------------------
def _bias(inputs, params):
    audit = curation.BiasAudit()
    for chosen, rejected in zip(inputs["chosen"], inputs["rejected"]):
        audit.add(chosen, rejected)
    report = audit.report()
    return report | {"share_chosen_longer": report["share_chosen_longer_chars"]}


def _prefix(inputs, params):
    return curation.prefix_log_odds(
        inputs["chosen_with_prefix"],
        inputs["n_chosen"],
        inputs["rejected_with_prefix"],
        inputs["n_rejected"],
        params.get("smoothing", 0.5),
    )


def _source_share(inputs, params):
    audit = curation.BiasAudit()
    for models in zip(inputs["chosen_models"], inputs["rejected_models"]):
        audit.add("", "", models)
    return curation.source_share(inputs["chosen_models"], inputs["rejected_models"]) | {
        "pairs_cross_model": audit.report()["pairs_cross_model"]
    }


def _point_biserial(inputs, params):
    """From answers whose lengths differ so: the one shown first is chosen or rejected."""
    audit = curation.BiasAudit()
    for gap, won in zip(inputs["length_diff"], inputs["first_wins"]):
        first, second = "x" * (1_000 + round(gap)), "x" * 1_000
        audit.add(*((first, second) if won else (second, first)), first_won=bool(won))
    return {"pearson": audit.report().get("length_label_correlation")}


def _cohen(inputs, params):
    return curation.cohen_kappa(inputs["confusion"])


def _fleiss(inputs, params):
    return curation.fleiss_kappa(inputs["counts"])


def _krippendorff(inputs, params):
    return {metric: curation.krippendorff_alpha(inputs["units"], metric) for metric in ("nominal", "interval")}


class _Letters:
    """A reader for which a token is a letter."""

    room = 10**6
    plain = staticmethod(lambda text: list(map(ord, text)))
    instruction = staticmethod(lambda text: list(map(ord, text)))


def _t2t(form):
    def rows(inputs, params):
        row = {
            "row_id": "x",
            "prompt": [{"role": "user", "content": inputs["context"]}],
            "chosen": [{"role": "assistant", "content": inputs["summary_chosen"]}],
            "rejected": [{"role": "assistant", "content": inputs["summary_rejected"]}],
        }
        make = reward_data.point_label_items if form == "pointwise" else reward_data.pair_label_items
        return {
            "rows": [
                ["".join(map(chr, ids)) for ids in (item.prompt, item.responses[0])]
                for item in make(
                    row,
                    _Letters,
                    RewardConfig(objective="t2t_point" if form == "pointwise" else "t2t_pair", label_request="slic"),
                    Counter(),
                )
            ]
        }

    return rows


def _t2t_any(inputs, params):
    return _t2t("pairwise" if "balance" in params else "pointwise")(inputs, params)


def _superfilter(inputs, params):
    out = curation.superfilter(
        inputs["loss_with_instruction"], inputs["loss_without_instruction"], params["keep_fraction"]
    )
    return {"ifd": out["ifd"], "excluded_ifd_ge_1": out["excluded"], "kept": out["kept"]}


ADAPTERS = {
    "likert5_map": _likert,
    "likert8_map": _likert,
    "likert8_map_flipped": _likert,
    "likert_linear_soft_label": _likert_soft,
    "pair_from_soft_label": _soft_label,
    "margin_llama2_tables": _margin_tables,
    "margin_from_scores": _margin_scores,
    "ranking_to_pairs_ties": _ranking,
    "ranking_to_pairs_modes": _ranking,
    "ranking_pair_counts": _ranking_counts,
    "ranking_prompt_weighting": _ranking_weighting,
    "curriculum_rank_gap": _rank_gap,
    "curriculum_best_vs_k": _rank_gap,
    "ratings_to_pairs": _ratings_pairs,
    "ratings_binarise_best_vs_rest": _ratings_best,
    "pairs_to_unpaired": _pairs_to_unpaired,
    "unpaired_to_pairs": _unpaired_to_pairs,
    "kto_lambda_band": _lambda_band,
    "preference_to_orm": _orm,
    "hh_transcript_parse": _hh,
    "hh_harmless_base_test_ingest": _hh_file,
    "implicit_prompt_strings": _implicit,
    "quarantine_codes": _quarantine,
    "validate_message_roles": _roles,
    "multiturn_unroll": _multiturn,
    "multiturn_final_only": _multiturn,
    "sft.unroll/three_turns": _unroll,
    "correctness_pairs": _correctness,
    "correctness_pairs_degenerate": _correctness,
    "constraint_pairs": _constraints,
    "prm_first_error_truncate": _first_error,
    "prm_rollout_labels": _rollout_labels,
    "prm_packaging": _packaging,
    "prm_aggregate": _step_scores,
    "segments_half_open": _segments,
    "implicit_event_map": _events,
    "vote_aggregate": _votes,
    "cohen_kappa": _cohen,
    "fleiss_kappa": _fleiss,
    "krippendorff_alpha": _krippendorff,
    "krippendorff_reference": _krippendorff,
    "normalise_text": _normalise,
    "word_tokens": _word_tokens,
    "row_ids": _row_ids,
    "dataset_hash": _dataset_hash,
    "split_hash": _split,
    "split_two_halves": _halves,
    "gsm8k_split_counts": _gsm8k_split,
    "shingle_jaccard": _shingles,
    "decontam_coverage": _coverage,
    "decontam_any_but_below_threshold": _coverage,
    "decontam_short_text": _short_text,
    "decontam_char_vs_word": _char_word,
    "decontam_gsm8k": _decontam_gsm8k,
    "difficulty_band": _band,
    "dynamic_sampling_keep": _dynamic,
    "prompt_stats": _prompt_stats,
    "correctness_then_length_dynamic": _length_dynamic,
    "curriculum_gaussian_levels": _gaussian,
    "self_paced_weights": _self_paced,
    "mixture_counts": _mixture,
    "mixture_counts_three": _mixture,
    "bias_length_format": _bias,
    "bias_prefix_log_odds": _prefix,
    "bias_source_share": _source_share,
    "bias_point_biserial": _point_biserial,
    "t2t_pointwise_rows": _t2t("pointwise"),
    "t2t_pairwise_rows": _t2t("pairwise"),
    "superfilter_ifd": _superfilter,
}

# For files with other vector names: method -> [(input keys, adapter)].
METHOD_ADAPTERS = {
    "data.likert": [({"labels"}, _likert)],
    "data.binarise": [({"labels"}, _likert_soft), ({"p_A"}, _soft_label)],
    "data.margin": [
        ({"labels"}, _margin_tables),
        ({"chosen_score", "rejected_score"}, _margin_scores),
    ],
    "data.ranking": [
        ({"ranks"}, _ranking),
        ({"ranks", "completions"}, _ranking),
        ({"K"}, _ranking_counts),
        ({"scores_best_to_worst"}, _ranking_weighting),
    ],
    "data.split": [({"groups"}, lambda inputs, params: (_split if "fractions" in params else _halves)(inputs, params))],
    "data.t2t": [({"context", "summary_chosen", "summary_rejected"}, _t2t_any)],
    "data.multiturn": [({"roles"}, _multiturn)],
    "sft.unroll": [({"messages", "roles"}, _unroll)],
    "data.correctness_pairs": [({"correct"}, _correctness)],
    "data.difficulty": [
        ({"correct_counts", "N"}, _band),
        ({"correct_counts", "G"}, _dynamic),
        ({"rewards", "mean_logprob"}, _prompt_stats),
        ({"rewards"}, _prompt_stats),
        ({"correct", "total_reward"}, _length_dynamic),
    ],
    "data.decontam": [
        (
            {"eval", "train"},
            lambda inputs, params: (_char_word if isinstance(inputs["eval"], str) else _coverage)(inputs, params),
        ),
        ({"text"}, _word_tokens),
        ({"n_words"}, _short_text),
    ],
    "data.curriculum": [({"ranks"}, _rank_gap), ({"levels", "progress"}, _gaussian), ({"losses"}, _self_paced)],
    "data.mixture": [({"weights"}, _mixture)],
    "data.pair": [({"chosen", "rejected"}, _hh), ({"pairs"}, _implicit)],
    "data.validate": [({"rows"}, _quarantine), ({"roles"}, _roles)],
}
