"""overoptimisation: where raising a reward model's score stops raising the real one (``rm.overopt``).

Of best-of-n      given candidates of a policy and a gold scorer (another reward model, or the verifier's verdicts), the unbiased gold score of the
                  proxy's best of n, against sqrt(KL), with Gao et al.'s fit and its peak.
Along RL          given the rollouts of an RL stage, the gold score of its samples iteration by iteration; divergence: gold falls below its maximum
                  while the proxy does not.

For a train-RM / test-RM study, ingest with ``halves=true``, train two reward models (``split=rm_a``, ``split=rm_b``), optimise against one and give the
other as gold.
"""

from __future__ import annotations

from pydantic import Field

from stages.spec import InputSpec, OutputSpec, StageConfig, StageSpec


class Config(StageConfig):
    min_drop: float = Field(0.05, ge=0, description="Fall of the gold score below its running maximum that counts (divergence).")
    patience: int = Field(3, ge=0, description="Evaluations in a row for which it must count.")
    max_tokens_per_micro_batch: int = Field(8192, ge=1, description="Padded tokens per scoring forward; bounds memory.")


SPEC = StageSpec(
    name="overoptimisation", config=Config, gpu=True,
    inputs={"candidates": InputSpec("dataset", kinds=("candidates/1",), required=False, doc="Samples of the policy, from the rejection stage."),
            "rollouts": InputSpec("dataset", kinds=("rollouts/1",), required=False, doc="Samples along RL, from the rl stage."),
            "model": InputSpec("model", required=False, doc="The policy of the rollouts: its tokenizer reads them."),
            "reward_model": InputSpec("model", required=False, doc="The proxy; default: the rewards stored with the samples."),
            "gold": InputSpec("model", required=False, doc="The gold scorer; default: the verifier's verdicts stored with the samples.")},
    outputs={"curve": OutputSpec("dataset", doc="eval_scores/1: every point of the curves.")})


def run(stage):
    from stages.reports import document, facts
    from stages.spec import ConfigError

    if not (stage.has("candidates") or stage.has("rollouts")):
        raise ConfigError("overoptimisation needs candidates=REF (rejection stage) or rollouts=REF (rl stage)")
    summary: dict = {}
    points: list[tuple[str, float, float, int]] = []
    if stage.has("candidates"):
        summary |= best_of_n(stage, points)
    if stage.has("rollouts"):
        summary |= along_rl(stage, points)
    write_points(stage, points)
    stage.summary(summary)
    stage.report("summary", markdown=document("Over-optimisation", facts(summary)))


def score_all(stage, role: str, responses, stored, missing: str):
    """Scores of a model input where it is given, else what the samples carry; ConfigError where neither is there."""
    import numpy as np

    from stages.reward_scorers import load_scorer
    from stages.spec import ConfigError

    if stage.has(role):
        return np.array(load_scorer(stage.path(role), stage.device, stage.config.max_tokens_per_micro_batch).score(responses), float)
    values = np.array([np.nan if v is None else float(v) for v in stored], float)
    if np.isnan(values).all():
        raise ConfigError(f"overoptimisation: the samples carry no {missing}; give {role}=REF")
    return values


def best_of_n(stage, points) -> dict:
    """Proxy and gold score of the proxy's best of n, n = 1, 2, 4 ..., over prompts whose samples all have both scores."""
    import math

    import numpy as np

    from stages import selection
    from stages.evaluation import overopt
    from stages.reports import line_chart
    from stages.reward_scorers import Response

    rows = [r for r in stage.dataset("candidates").iter_rows() if r["drop_reason"] != "truncated"]
    responses = [Response(r["prompt"], r["completion"], row=r) for r in rows]
    proxy = score_all(stage, "reward_model", responses, [r["reward"] for r in rows], "reward")
    gold = score_all(stage, "gold", responses, [r["correct"] for r in rows], "verdict (correct)")
    groups: dict[int, list[int]] = {}
    for i, row in enumerate(rows):
        if not math.isnan(proxy[i] + gold[i]):
            groups.setdefault(row["prompt_idx"], []).append(i)
    width = min((len(g) for g in groups.values() if len(g) > 1), default=0)
    groups = {p: g for p, g in groups.items() if len(g) >= width > 1}
    if not groups:
        stage.warn("no_curve", "No prompt has two complete, scored samples; raise num_generations or max_completion_length of the rejection stage.")
        return {}
    ns = [1 << k for k in range(width.bit_length()) if 1 << k <= width]
    curve = {name: [float(np.mean([selection.best_of_n_estimate(proxy[g], n, values[g]) for g in map(np.array, groups.values())])) for n in ns]
             for name, values in (("proxy", proxy), ("gold", gold))}
    d = [math.sqrt(selection.best_of_n_kl(n)) for n in ns]
    points += [(f"best_of_{n}/{name}", value, x, len(groups)) for name, values in curve.items() for n, x, value in zip(ns, d, values)]
    stage.report("best-of-n", png=line_chart({"proxy": (d, curve["proxy"]), "gold": (d, curve["gold"])}, title="Best of n: proxy and gold", xlabel="sqrt(KL), sqrt(nats)",
                                             ylabel="score", markers=True))
    found = {"prompts": len(groups), "n": ns[-1], "proxy/1": curve["proxy"][0], f"proxy/{ns[-1]}": curve["proxy"][-1], "gold/1": curve["gold"][0],
             f"gold/{ns[-1]}": curve["gold"][-1], "gold/best_n": ns[int(np.argmax(curve["gold"]))], "proxy_gold_correlation": _within(proxy, gold, groups)}
    if len(ns) >= 3:
        alpha, beta = overopt.fit(d, np.array(curve["gold"]) - curve["gold"][0], "bon")
        found |= {"fit/alpha": alpha, "fit/beta": beta}
        if beta > 0 and alpha > 0:
            found["fit/peak_kl"] = overopt.peak(alpha, beta, "bon")[0] ** 2
    if curve["gold"][-1] < max(curve["gold"]) - stage.config.min_drop:
        stage.warn("overoptimised", f"The gold score of best-of-n is highest at n = {found['gold/best_n']} and falls by {max(curve['gold']) - curve['gold'][-1]:.3f} until "
                   f"n = {ns[-1]}: stop selecting harder, use an ensemble (reward_combine), or train the reward model on these samples.")
    return {k: v for k, v in found.items() if v == v}


def _within(proxy, gold, groups) -> float:
    import numpy as np

    from stages.statistics import within_group_correlation

    index = [i for g in groups.values() for i in g]
    return within_group_correlation(proxy[index], gold[index], np.repeat(np.arange(len(groups)), [len(g) for g in groups.values()]))


def along_rl(stage, points) -> dict:
    """Mean proxy and gold score of every iteration's samples, and the first iteration at which they part."""
    import numpy as np

    from stages.chat import renderer_for
    from stages.evaluation import overopt
    from stages.reports import line_chart
    from stages.reward_scorers import Response

    renderer = renderer_for(stage.path("model"))
    rows = [r for r in stage.dataset("rollouts").iter_rows() if not r["truncated"]]
    responses = [Response([], [{"role": "assistant", "content": renderer.decode(r["completion_ids"])}], [*r["prompt_ids"], *r["completion_ids"]]) for r in rows]
    gold = score_all(stage, "gold", ids_only(stage, "gold", renderer, responses), [r["is_correct"] for r in rows], "verdict (is_correct)")
    proxy = score_all(stage, "reward_model", ids_only(stage, "reward_model", renderer, responses), [r["reward"] for r in rows], "reward")
    iterations = sorted({r["iteration"] for r in rows})
    at = np.array([r["iteration"] for r in rows])
    series = {name: [float(np.nanmean(values[at == i])) for i in iterations] for name, values in (("proxy", proxy), ("gold", gold))}
    kl = [float(np.nanmean([sum(r["logp_old"]) - sum(r["logp_ref"]) if r.get("logp_ref") else np.nan for r in rows if r["iteration"] == i] or [np.nan])) for i in iterations]
    points += [(f"iteration_{i}/{name}", value, k, int((at == i).sum())) for name, values in series.items() for i, k, value in zip(iterations, kl, values)]
    stage.report("along-rl", png=line_chart({name: (iterations, values) for name, values in series.items()}, title="Along RL: proxy and gold", xlabel="iteration",
                                            ylabel="mean score"))
    found = overopt.divergence(series["proxy"], series["gold"], min_drop=stage.config.min_drop, patience=stage.config.patience)
    if found["diverged"]:
        stage.warn("overoptimised", f"From iteration {iterations[found['detected_index']]} the gold score is {stage.config.min_drop} or more below its value at iteration "
                   f"{iterations[found['peak_index']]} while the proxy is not: take the checkpoint of the peak, raise kl_coef, or refresh the reward model.")
    return {"rl/iterations": len(iterations), "rl/gold_peak_iteration": iterations[found["peak_index"]], "rl/diverged": float(found["diverged"]),
            "rl/gold_first": series["gold"][0], "rl/gold_last": series["gold"][-1], "rl/proxy_first": series["proxy"][0], "rl/proxy_last": series["proxy"][-1]}


def ids_only(stage, role: str, renderer, responses):
    """Rollouts keep ids, not messages, so a scorer must read the policy's ids; ConfigError for one that does not."""
    from stages.reward_scorers import load_scorer
    from stages.spec import ConfigError

    if stage.has(role) and not load_scorer(stage.path(role), stage.device).reads_ids_of(renderer):
        raise ConfigError(f"overoptimisation: rollouts hold token ids, and the model given as {role} reads another tokenizer or template. Give candidates=REF (sampled "
                          "with the rejection stage from a checkpoint) instead, which hold the text.")
    return responses


def write_points(stage, points) -> None:
    from storage.files import canonical_json
    from storage.schema import complete_row

    writer = stage.writer("curve", "eval_scores/1")
    writer.write([complete_row("eval_scores/1", {"run_id": stage.key[:16], "benchmark": "overoptimisation", "metric": name, "value": value, "n": n,
                                                 "config_json": canonical_json({"x": x if x == x else None})},
                               dataset="overoptimisation", source="made", origin="verifier", split="test") for name, value, x, n in points])
    writer.close({"points": len(points)})
