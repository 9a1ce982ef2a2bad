"""What evaluate leaves behind: metrics with intervals, tables, warnings, charts and examples."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from stages.reward.components import CUT_REWARD
from stages.reward.verdicts import ANOTHERS, NOT_ASKED

if TYPE_CHECKING:
    from stages.evaluation.plan import Plan


# -- results -----------------------------------------------------------------------------------------------------------


def conclude(stage, plan: Plan, meta: dict, records: list[dict]) -> None:
    """Metrics from the stored samples, the scores dataset, the summary and the reports."""
    from stages.evaluation import best_of, few_shot, mt_bench, multiple_choice, perturbed, refusals, rewardbench, scores

    metrics = scores.all_metrics(records) | plan.violations
    changed, records = perturbed.table(records), scores.originals(every := records)
    probe_table = scores.probe_metrics(records)[1]
    tables = (
        {
            field: scores.by_group([r for r in records if r["mode"] in ("sample", "greedy", "letter", "text")], field)
            for field in ("category", "difficulty")
        }
        if plan.n_prompts
        else {}
    )
    write_scores(stage, plan, meta, metrics, tables)
    unscored = len(plan.pairs) - sum(r["mode"] == "chosen" for r in records)
    orders = few_shot.spread(records, ("accuracy", "greedy_accuracy", *multiple_choice.RATES))
    summary = {
        **scores.flatten(metrics),
        "prompts": plan.n_prompts,
        "pairs": len(plan.pairs),
        **({"texts": len(plan.plain)} if plan.plain else {}),
        **(plan.given.summary() if plan.given else {}),
        "protocol_hash": meta["protocol_hash"],
        "benchmark": benchmark_name(stage),
        **plan.dropped,
        **{f"{row['metric']}_order_spread": row["spread"] for row in orders},
        **({"pairs_unscored": unscored} if unscored else {}),
    }
    stage.summary(summary)
    warnings(stage, metrics, records, unscored)
    multiple_choice.warnings(stage, records, metrics)
    rewardbench.warn(stage, records)
    best_of.warn(stage, records)
    refusals.warn(stage, records, metrics)
    mt_bench.warn(stage, records, [row for row, _ in plan.prompts])
    perturbed.warn(stage, every, metrics)
    publish(stage, plan, meta, metrics, tables | {"order": orders}, probe_table, records, changed)


def benchmark_name(stage) -> str:
    """Name of what is evaluated: the dataset's name and split."""
    return "+".join(
        f"{stage.dataset(name).name}/{stage.config.split}"
        for name in ("prompts", "pairs", "texts")
        if stage.has(name) and (name == "pairs" or stage.config.target == "policy")
    )


def write_scores(stage, plan: Plan, meta: dict, metrics: dict, tables: dict) -> None:
    """One ``eval_scores/1`` row per metric and per group's accuracy; ``config_json`` is the protocol, ``extra_json``
    the interval.
    """
    from stages.evaluation.multiple_choice import RATES
    from stages.evaluation.protocol import judged
    from stages.evaluation.scores import known, score_row

    benchmark, config = benchmark_name(stage), {**meta["protocol"], "protocol_hash": meta["protocol_hash"]}
    rows = [(name, m.value, m.se, m.n, {"low": m.low, "high": m.high}) for name, m in metrics.items()]
    for field, table in tables.items():
        rows += [
            (
                f"{metric}/{field}={row[field]}",
                row[metric],
                None,
                row["prompts"],
                {"low": row.get(f"{metric}_low"), "high": row.get(f"{metric}_high")},
            )
            for row in table
            for metric in ("accuracy", "greedy_accuracy", *RATES, "reward")
            if row.get(metric) is not None
        ]
    writer = stage.writer("scores", "eval_scores/1", meta=meta)
    writer.write(
        score_row(
            plan.run_id,
            benchmark,
            name,
            value,
            se,
            n,
            config=config,
            source=judged(meta),
            origin="ai",
            detail=known(interval),
        )
        for name, value, se, n, interval in rows
    )
    writer.close({"metrics": len(rows)})


#: Beginnings of the reasons why a prompt or answer is none of a component's business: known before the evaluation,
#: counted in unscorable_rate.
NOTHING_TO_SCORE = ("the prompt row has no ", "the prompt row asks for no ", NOT_ASKED, ANOTHERS, "environment failed")


def warnings(stage, metrics: dict, records: list[dict], unscored_pairs: int = 0) -> None:
    """Named warnings about results that should not be trusted as they are."""
    from stages.measures.reward_model import FOOLED

    checkable = [
        r
        for r in records
        if r["mode"] in ("sample", "greedy")
        and not r.get("error")
        and r.get("transcript") is None
        and (r.get("answer") is not None or r.get("constraints"))
    ]
    unread = []
    for r in checkable:
        constraints = r.get("constraints") or {}
        # components say theirs below
        told = any(not reason.startswith(NOTHING_TO_SCORE) for reason in (r.get("unscorable") or {}).values())
        if not told and ("unscorable" in constraints or (r.get("answer") is not None and r["correct"] is None)):
            unread.append(constraints.get("unscorable") or "the answer of the prompt cannot be read")
    if unread:
        stage.warn(
            "answers_unscorable",
            f"{len(unread)} of {len(checkable)} answers to prompts with an answer or constraints have no verdict and"
            f" are in no mean, for example: {max(unread, key=unread.count)}. Repair these prompts, or leave them out.",
        )
    if unscored_pairs:
        stage.warn(
            "pairs_unscored",
            f"{unscored_pairs} pairs have no score and are in no mean. Look at their length, and at the reward model's"
            " own warnings.",
        )
    truncated, chance = metrics.get("truncation_rate"), metrics.get("accuracy")
    missing: dict[str, Counter] = {}  # component -> reasons
    may_miss = {component.name for component in stage.config.rewards if component.on_missing == "skip"}
    for record in (r for r in records if not r.get("error")):
        for name, reason in (record.get("unscorable") or {}).items():
            if name not in may_miss and not reason.startswith(NOTHING_TO_SCORE):
                missing.setdefault(name, Counter())[reason] += 1
    for name, reasons in missing.items():
        reason, count = reasons.most_common(1)[0]
        stage.warn(
            "answers_unscorable",
            f"{reasons.total()} answers have no value of {name!r} and are in none of its means. Mend what the component"
            f" needs, or the prompts; of {count} the reason is: {reason}",
        )
    if truncated and truncated.value > 0.1:
        stage.warn(
            "answers_truncated",
            f"{truncated.value:.0%} of the answers"
            + (
                " were cut where they were made"
                if stage.has("answers")
                else f" hit max_completion_length={stage.config.max_completion_length}"
            )
            + " and count as they stand (accuracy_cut_wrong and reward_cut_penalised are the figures in which they do"
            " not). "
            + (
                "Raise the limit where they were made."
                if stage.has("answers")
                else "Raise max_completion_length, or train the stop token."
            ),
        )
    if stage.config.target != "policy" and chance:
        if chance.value > 0.98:
            stage.warn(
                "reward_model_too_good",
                f"Accuracy {chance.value:.3f} on held-out pairs suggests a leak (texts expect 0.65-0.80): look at"
                " length and source of chosen against rejected.",
            )
        longer = metrics["chosen_longer_share"].value
        if abs(longer - 0.5) > 0.1:
            stage.warn(
                "pairs_length_bias",
                f"In {longer:.0%} of the pairs the chosen answer is longer: compare length_matched_accuracy with"
                " accuracy.",
            )
        fooled = {name: m.value for name, m in metrics.items() if name.startswith("fooled_rate/") and m.value > FOOLED}
        if fooled:
            worst = max(fooled, key=fooled.get)
            stage.warn(
                "reward_model_fooled",
                f"The reward model scores '{worst.split('/')[1]}' probes at least as high as the clean answer in"
                f" {fooled[worst]:.0%} of the cases; a policy trained against it may find that. Train it again with"
                " spoiled_fraction=0.1 (stage reward_model).",
            )


HEADLINES = {
    "accuracy": "right answers, mean over samples (avg@k)",
    "accuracy_cut_wrong": "the same where answers cut at the length or turn limit are wrong",
    "greedy_accuracy": "right answers, greedy",
    "flexible_accuracy": "right answers, answer searched for anywhere in the text",
    "reward": "reward model score of every answer as it stands, cut ones too",
    "reward_cut_penalised": (
        f"the same where answers that were cut score {CUT_REWARD:g}, as in rl and rejection (no_eos_reward)"
    ),
    "greedy_reward": "reward model score of the greedy answers as they stand, cut ones too",
    "kl_reference": "KL to the reference per answer, nats",
    "length_mean": "answer length, tokens",
    "length_characters": "answer length, characters",
    "stop_rate": "answers that end by themselves",
    "truncation_rate": "answers cut at the length or turn limit",
    "turns": "turns per trajectory",
    "tool_calls": "calls that a tool answered, per trajectory",
    "tool_errors": "calls that failed, per trajectory",
    "judge_accuracy": "debates in which the judge prefers the right answer",
    "judge_accuracy_without": "the same where it reads no debate",
    "first_side_win_rate": "debates won by the answer that the task names first",
    "environment_failure_rate": "trajectories whose environment failed",
    "format_error_rate": "answers whose format cannot be read",
    "unscorable_rate": "answers without a verdict",
    "self_consistency_gap": "the same less the accuracy of one sample",
    "distinct_1": "different words / words, per prompt",
    "distinct_2": "different word pairs / word pairs, per prompt",
    "repetition_3": "repeated word triples inside an answer",
    "stock_phrase_rate": "answers with a stock phrase",
    "prompt_level_strict_acc": "prompts with constraints whose answer meets all of them (IFEval)",
    "inst_level_strict_acc": "constraints met (IFEval)",
    "prompt_level_loose_acc": "prompts whose answer meets all of them with or without stars, first and last line",
    "inst_level_loose_acc": "constraints met with or without these",
    "constraints_unscorable_rate": "answers to prompts with constraints that cannot be checked",
    "pair_accuracy": "pairs that the policy itself orders right",
    "tie_rate": "ties",
    "log_loss": "-log sigmoid(margin), nats",
    "mean_margin": "score difference chosen - rejected",
    "ece": "expected calibration error, 10 bins",
    "length_matched_accuracy": "accuracy on pairs of nearly equal length",
    "chosen_longer_share": "pairs whose chosen answer is longer",
    "accuracy_ties_half": "the same with ties as half",
    "length_difference": "tokens of chosen - rejected",
    "fooled_rate": "probes that score at least as high as the clean answer",
    "changed_rate": "pairs whose order a harmless change of the text turns around",
    "score_length_spearman": "rank correlation of score and length",
    "rewardbench": "mean of RewardBench's four sections",
    "rewardbench_with_prior": "the same with prior sets at half weight",
    "section": "pairs ordered right, subsets weighted as published",
    "section_mean": "mean of the subsets",
    "over_refusal_rate": "safe prompts that are refused, in full or in part",
    "refusal_rate_unsafe": "unsafe prompts that are refused, in full or in part",
    "refusal_balanced": "mean of safe prompts not refused and unsafe ones refused",
    "refusal_rate": "mirrored prompts of a side that are refused",
    "refusal_rate_difference": "refusal rate of the first side - of the second",
    "refusal_unequal_pairs": "mirrored prompts that are treated differently",
    "refusal_unclassified_rate": "answers that are empty or were not read by the judge",
    "mt_bench": "rating by the judge, 1 to 10",
    "mt_bench_missing_rate": "turns without a rating",
    "group_alignment": (
        "likeness of the model's answers to a group's, 1 where the shares are equal (of groups: their mean)"
    ),
    "length_correct_correlation": (
        "correlation of an answer's length with its being right; below 0 long answers are wasted"
    ),
    "score_length_pearson": "correlation of score and length",
    "score_length_within_prompt": "the same inside a prompt",
}


def meaning(name: str, target: str) -> str:
    """What a metric says, for a reader of the report."""
    from stages.evaluation import bbq, best_of, conformance, held_out_text, multiple_choice, shift
    from stages.evaluation.signs import MEANINGS

    stem = name.split("/")[0]
    if name in MEANINGS:
        return MEANINGS[name]
    if stem == "violation_rate":
        return conformance.MEANING
    if stem == "token_shift":
        return shift.MEANINGS[name.split("/")[1]]
    if stem == "perturbed":
        _, metric, form, *_ = name.split("/")
        return (
            f"{metric} of items that have both forms: "
            + {
                "original": "the original ones",
                "perturbed": "the perturbed ones",
                "gap": "original less perturbed, paired",
            }[form]
        )
    if stem.endswith("_macro"):
        return f"{meaning(stem.removesuffix('_macro'), target)}: mean over categories, whatever their sizes"
    for known in (multiple_choice.HEADLINES, bbq.HEADLINES, held_out_text.HEADLINES, best_of.MEANINGS):
        if stem in known:
            return known[stem]
    if stem == "accuracy" and target != "policy":
        return "pairs whose chosen answer scores higher, ties wrong"
    if stem in HEADLINES:
        return HEADLINES[stem]
    for prefix, text in (
        ("pass_at_", "at least one of {} samples is right"),
        ("maj_at_", "the most frequent of {} answers is right"),
    ):
        if stem.startswith(prefix):
            return text.format(stem.removeprefix(prefix))
    if stem.startswith("best_of_"):
        return f"the sample that the reward model likes best of {stem.split('_')[2]} is right"
    return (
        f"{HEADLINES.get(stem[5:], '')} (by the policy's own likelihood)"
        if stem.startswith("pair_") and stem[5:] in HEADLINES
        else ""
    )


def publish(
    stage,
    plan: Plan,
    meta: dict,
    metrics: dict,
    tables: dict,
    probe_table: list[dict],
    records: list[dict],
    changed: list[dict],
) -> None:
    """Figures, tables and the page that a person reads."""
    from stages.reporting import reports
    from stages.evaluation import compute, shift
    from stages.evaluation.scores import item_values

    rows = [
        {
            "metric": name,
            "value": m.value,
            "low": m.low,
            "high": m.high,
            "se": m.se,
            "n": m.n,
            "meaning": meaning(name, stage.config.target),
        }
        for name, m in metrics.items()
    ]
    stage.report("metrics", table=rows)
    answered = [r for r in records if r["mode"] in ("sample", "greedy")]
    sampled = [r for r in answered if r["mode"] == "sample"] or answered
    if sampled:
        _draw_answers(stage, sampled)
    orders = tables.pop("order", [])
    if orders:
        stage.report("by-order", table=orders)
    for field, table in tables.items():
        if table:
            _draw_table(stage, field, table)
    _draw_best_of_n(stage, metrics)
    _draw_pairs(stage, records)
    if probe_table:
        stage.report("probes", table=probe_table)
    suites = _suites(stage, records, metrics, changed)
    for name, part in suites.items():
        if part:
            stage.report(name.lower().replace(",", "").replace(" ", "-"), table=part)
    examples = sample_examples(records, stage.config.examples)
    for name, part in examples.items():
        stage.report(f"samples-{name}", table=part)
    blocks = [(f"By {field}", _table_block(field, table)) for field, table in tables.items() if table]
    blocks += compute.publish(stage, records, metrics) if answered else []
    blocks += (
        shift.publish(stage, records, lambda token: plan.renderer.tokenizer.decode([token]))
        if stage.config.token_shift
        else []
    )
    graded = item_values(answered, "accuracy") if answered else {}
    of = "given answers" if plan.given else f"a {stage.config.target.replace('_', ' ')}"
    what = (
        f"{plan.n_prompts} prompts, {len(plan.pairs)} pairs{f', {len(plan.plain)} texts' if plan.plain else ''} of"
        f" split `{stage.config.split}`; {len(graded)} prompts with a checkable answer."
        f"{plan.given.told() if plan.given else ''}"
    )
    stage.report(
        "summary",
        markdown=reports.document(
            f"Evaluation of {of} on {benchmark_name(stage)}",
            what,
            "Brackets are 95% intervals over prompts.",
            ("Metrics", _headline(stage, metrics)),
            *blocks,
            ("Examples chosen and ordered otherwise", reports.markdown_table(orders) if orders else ""),
            *((name, reports.sample_table(part)) for name, part in suites.items() if part),
            ("Probes", reports.markdown_table(probe_table) if probe_table else ""),
            *((f"Samples: {name}", reports.sample_table(part)) for name, part in examples.items()),
            (
                "Protocol",
                f"Hash `{meta['protocol_hash']}`: only results with the same hash are compared.\n\n"
                + reports.facts(meta["protocol"]),
            ),
        ),
    )


def _suites(stage, records: list[dict], metrics: dict, changed: list[dict]) -> dict[str, list[dict]]:
    """Tables of single benchmarks and of what answers look like, by their titles; empty where there is nothing."""
    from stages.evaluation import best_of, mt_bench, refusals, rewardbench, signs

    prefix = "pair_" if stage.config.target == "policy" else ""
    return {
        "RewardBench": rewardbench.table(records, metrics, prefix),
        "Right answers over several wrong ones": best_of.table(metrics, prefix),
        "Refusals": refusals.table(metrics),
        "MT-Bench": mt_bench.table(metrics, records),
        "Original and perturbed items": changed,
        "Style, reasoning, diversity": signs.table(metrics),
        "Right answers to look at": signs.odd_but_right(records, stage.config.examples),
    }


def _headline(stage, metrics: dict) -> str:
    """The metrics over all items as a table, with what each means."""
    from stages.reporting import reports

    return reports.markdown_table(
        [
            {
                "metric": name,
                "value": reports.with_interval(m.value, m.low, m.high),
                "n": m.n,
                "meaning": meaning(name, stage.config.target),
            }
            for name, m in metrics.items()
            if "/" not in name
        ]
    )


def _table_block(field: str, table: list[dict]) -> str:
    """Scores by the values of a column, as far as there are any."""
    from stages.reporting import reports

    columns = {
        "prompts": "prompts",
        "accuracy": "accuracy",
        "accuracy_low": "low",
        "accuracy_high": "high",
        "greedy_accuracy": "greedy",
        "mc_letter_acc": "letter",
        "mc_text_acc_norm": "text",
        "reward": "reward",
        "length_mean": "tokens",
        "truncation_rate": "cut",
    }
    return reports.markdown_table(
        table, {field: field, **{key: head for key, head in columns.items() if any(key in row for row in table)}}
    )


def _draw_table(stage, field: str, table: list[dict]) -> None:
    """Scores by the values of a column, and their accuracies as a figure."""
    from stages.reporting import reports

    stage.report(f"by-{field}", table=table)
    if any("accuracy" in row for row in table):
        stage.report(
            f"accuracy-by-{field}",
            png=reports.bar_chart(
                [
                    {
                        "model": row[field],
                        "value": row.get("accuracy"),
                        "low": row.get("accuracy_low"),
                        "high": row.get("accuracy_high"),
                    }
                    for row in table
                ],
                title=f"Accuracy by {field} (95% interval)",
                ylabel="accuracy",
            ),
        )


def _draw_answers(stage, sampled: list[dict]) -> None:
    """Lengths and rewards of the sampled answers."""
    from stages.reporting import reports
    from stages.evaluation.scores import cut, lengths_of

    lengths, unit = lengths_of(sampled)
    stage.report(
        "length-distribution",
        png=reports.histogram(
            {
                "ended": [length for r, length in zip(sampled, lengths) if not cut(r)],
                "cut": [length for r, length in zip(sampled, lengths) if cut(r)],
            },
            title="Answer length",
            xlabel=unit,
        ),
    )
    scored = [r for r in sampled if r["reward"] is not None]
    if scored:
        split = {
            "right": [r["reward"] for r in scored if r["correct"]],
            "wrong": [r["reward"] for r in scored if r["correct"] is False],
            "ungraded": [r["reward"] for r in scored if r["correct"] is None],
        }
        stage.report(
            "reward-histogram",
            png=reports.histogram(
                {name: part for name, part in split.items() if part}, title="Reward of sampled answers", xlabel="reward"
            ),
        )
        stage.report(
            "reward-against-length",
            png=reports.scatter(
                [length for r, length in zip(sampled, lengths) if r["reward"] is not None],
                [r["reward"] for r in scored],
                title="Reward against length",
                xlabel=unit,
                ylabel="reward",
            ),
        )


def _draw_best_of_n(stage, metrics: dict) -> None:
    """Accuracy of what the reward model picks of n samples, beside pass@n."""
    from stages.reporting import reports

    picked = {int(name.split("_")[2]): m for name, m in metrics.items() if name.startswith("best_of_")}
    if picked and "accuracy" in metrics:
        xs = [1, *sorted(picked)]
        curve = {
            "picked by the reward model": (xs, [metrics["accuracy"].value, *(picked[n].value for n in sorted(picked))])
        }
        passes = {int(name.split("_")[2]): m.value for name, m in metrics.items() if name.startswith("pass_at_")}
        if set(xs[1:]) <= set(passes):
            curve["at least one right (pass@n)"] = (xs, [metrics["accuracy"].value, *(passes[n] for n in xs[1:])])
        stage.report(
            "best-of-n",
            png=reports.line_chart(
                curve,
                title="Accuracy of the best of n samples",
                xlabel="n",
                ylabel="accuracy",
                markers=True,
                log_x=True,
            ),
        )


def _draw_pairs(stage, records: list[dict]) -> None:
    """Score differences of the pairs; of a reward model also its calibration, and scores by side and length."""
    from stages.reporting import reports
    from stages.evaluation.scores import odds_of

    margins = [r["margin"] for r in records if r["mode"] == "chosen"]
    if margins:
        stage.report(
            "margin-histogram",
            png=reports.histogram({"pairs": margins}, title="Score difference chosen - rejected", xlabel="margin"),
        )
        if stage.config.target != "policy":
            odds = [odds_of(r) for r in records if r["mode"] == "chosen"]
            stage.report("calibration", png=reports.calibration_figure(odds))
            sides = {side: [r["reward"] for r in records if r["mode"] == side] for side in ("chosen", "rejected")}
            stage.report(
                "score-histogram",
                png=reports.histogram(sides, title="Scores of chosen and rejected answers", xlabel="score"),
            )
            stage.report(
                "score-against-length",
                png=reports.scatter(
                    [r["tokens"] for r in records if r["mode"] in sides],
                    [r["reward"] for r in records if r["mode"] in sides],
                    title="Score against length",
                    xlabel="tokens",
                    ylabel="score",
                ),
            )


def shown(record: dict) -> str:
    """An answer as a reader of the report sees it: the text, or the turns of a trajectory."""
    if not record.get("transcript"):
        return record["output"]
    return " ⏎ ".join(m["content"] if m["role"] == "assistant" else f"[{m['content']}]" for m in record["transcript"])


def sample_examples(records: list[dict], count: int) -> dict[str, list[dict]]:
    """Rows worth reading: right and wrong answers (those the reward model likes best first), or the pairs ordered most
    wrongly.
    """
    from stages.evaluation.scores import counted

    if not count:
        return {}
    pairs = sorted((r for r in records if r["mode"] == "chosen"), key=lambda r: (r["margin"], r["item_id"]))
    rejected = {r["item_id"]: r for r in records if r["mode"] == "rejected"}
    found = {}
    sampled = [r for r in records if r["mode"] == "sample"] or [r for r in records if r["mode"] == "greedy"]
    # stable: dataset order on ties
    liked = sorted(sampled, key=lambda r: -(r["reward"] if r["reward"] is not None else 0.0))
    groups = {"right": [r for r in liked if r["correct"]], "wrong": [r for r in liked if r["correct"] is False]}
    if sampled and not any(groups.values()):
        groups = {"highest reward": liked[:count], "lowest reward": liked[::-1][:count]}
    for name, part in groups.items():
        one_each = list({r["item_id"]: r for r in reversed(part)}.values())[::-1]
        rows = [
            {
                "prompt": r["prompt"],
                "output": shown(r),
                "expected": r.get("answer"),
                "correct": r["correct"],
                "reward": r["reward"],
                "tokens": r["tokens"] if counted(r) else None,
                "finish": r["finish"],
            }
            for r in one_each[:count]
        ]
        if rows:
            found[name] = [
                {key: value for key, value in row.items() if any(other[key] is not None for other in rows)}
                for row in rows
            ]
    if pairs:
        found["pairs most wrong"] = [
            {
                "prompt": r["prompt"],
                "chosen": r["output"],
                "rejected": rejected[r["item_id"]]["output"],
                "margin": r["margin"],
            }
            for r in pairs[:count]
        ]
    return found
