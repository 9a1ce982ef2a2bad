"""overoptimisation: where raising a reward model's score stops raising the real one (``rm.overopt``,
``eval.over_optimisation``).

Of best-of-n      given candidates of a policy and a gold scorer (another reward model, or the verifier's verdicts), the unbiased gold score of the
                  proxy's best of n, against sqrt(KL), with Gao et al.'s fit and its peak.
Along RL          given the rollouts of an RL stage, proxy and gold score of its samples against sqrt(KL), point by point; divergence: gold falls below
                  its maximum while the proxy does not.

With a gold model, verdicts stored with the samples are a second gold score. Falls are counted in standard deviations of
each score over the starting policy's samples, so that scorers of any scale compare. Cut completions have no score, and
count in lengths only.

For a train-RM / test-RM study, ingest with ``halves=true``, train two reward models (``split=rm_a``, ``split=rm_b``),
optimise against one and give the other as gold: the recipe ``overoptimisation`` does it, and the stage
``overoptimisation_arms`` sets several runs side by side.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from pydantic import Field

from stages.spec import InputSpec, OutputSpec, StageConfig, StageSpec


class Config(StageConfig):
    min_drop: float = Field(
        0.05,
        ge=0,
        description=(
            "Fall of the gold score below its running maximum that counts (divergence), in standard deviations of the"
            " score over the starting policy's samples."
        ),
    )
    noise: float = Field(
        3.0,
        ge=0,
        description=(
            "The fall along RL must also exceed so many standard errors of a difference of two points, or the luckiest"
            " of many points would raise the alarm; 0 = min_drop alone."
        ),
    )
    patience: int = Field(3, ge=0, description="Points in a row for which it must count.")
    every: int = Field(
        1, ge=1, description="Iterations of RL in one point of the curve: enough that its mean is no noise."
    )
    max_tokens_per_micro_batch: int = Field(8192, ge=1, description="Padded tokens per scoring forward; bounds memory.")


SPEC = StageSpec(
    name="overoptimisation",
    config=Config,
    gpu=True,
    inputs={
        "candidates": InputSpec(
            "dataset", kinds=("candidates/1",), required=False, doc="Samples of the policy, from the rejection stage."
        ),
        "rollouts": InputSpec(
            "dataset", kinds=("rollouts/1",), required=False, doc="Samples along RL, from the rl stage."
        ),
        "model": InputSpec("model", required=False, doc="The policy of the rollouts: its tokenizer reads them."),
        "reward_model": InputSpec(
            "model", required=False, doc="The proxy; default: the rewards stored with the samples."
        ),
        "gold": InputSpec(
            "model", required=False, doc="The gold scorer; default: the verifier's verdicts stored with the samples."
        ),
    },
    outputs={
        "curve": OutputSpec(
            "dataset",
            doc=(
                "eval_scores/1: every point of the curves, with x = sqrt(KL) in config_json; the summary is in the"
                " manifest."
            ),
        )
    },
)


def run(stage):
    from stages.reporting.reports import document, facts
    from stages.spec import ConfigError

    if not (stage.has("candidates") or stage.has("rollouts")):
        raise ConfigError("overoptimisation needs candidates=REF (rejection stage) or rollouts=REF (rl stage)")
    summary: dict = {}
    points: list[dict] = []
    if stage.has("candidates"):
        summary |= best_of_n(stage, points)
    if stage.has("rollouts"):
        summary |= along_rl(stage, points)
    write_points(stage, points, summary)
    stage.summary(summary)
    stage.report("summary", markdown=document("Over-optimisation", facts(summary)))


def score_all(stage, role: str, responses, stored, missing: str, renderer=None):
    """Scores of a model input where it is given, else what the samples carry; ConfigError where neither is there.

    renderer: what rollouts were sampled with. They keep ids, not messages, so a scorer must read the policy's ids.
    """
    import numpy as np

    from stages.reward_models.reward_scorers import load_scorer, score_in_blocks
    from stages.spec import ConfigError

    if stage.has(role):
        scorer = load_scorer(stage.path(role), stage.device, stage.config.max_tokens_per_micro_batch)
        if renderer is not None and not scorer.reads_ids_of(renderer):
            raise ConfigError(
                f"overoptimisation: rollouts hold token ids, and the model given as {role} reads another tokenizer or"
                " template. Give candidates=REF (sampled with the rejection stage from a checkpoint) instead, which"
                " hold the text."
            )
        return np.array(
            score_in_blocks(stage, f"{'candidates' if renderer is None else 'rollouts'}-{role}", scorer, responses),
            float,
        )
    values = np.array([np.nan if v is None else float(v) for v in stored], float)
    if np.isnan(values).all():
        raise ConfigError(f"overoptimisation: the samples carry no {missing}; give {role}=REF")
    return values


def scored(stage, responses, rows, verdict: str, renderer=None) -> dict:
    """{"proxy", "gold" and, where a gold model is given and verdicts are stored, "verdict"} -> one score per row, NaN
    where there is none.
    """
    import numpy as np

    verdicts = [r[verdict] for r in rows]
    found = {
        "gold": score_all(stage, "gold", responses, verdicts, f"verdict ({verdict})", renderer),
        "proxy": score_all(stage, "reward_model", responses, [r["reward"] for r in rows], "reward", renderer),
    }
    if stage.has("gold") and any(v is not None for v in verdicts):
        found["verdict"] = np.array([np.nan if v is None else float(v) for v in verdicts])
    return found


def best_of_n(stage, points) -> dict:
    """Scores of the proxy's best of n, n = 1, 2, 4 ..., over prompts whose samples all have every score."""
    import math

    import numpy as np

    from stages import selection
    from stages.measures import overopt
    from stages.reporting.reports import line_chart
    from stages.reward_models.reward_scorers import Response

    rows = [r for r in stage.dataset("candidates").iter_rows() if r["drop_reason"] != "truncated"]
    scores = scored(stage, [Response(r["prompt"], r["completion"], row=r) for r in rows], rows, "correct")
    proxy, gold = scores["proxy"], scores["gold"]
    groups: dict[int, list[int]] = {}
    for i, row in enumerate(rows):
        if not math.isnan(sum(values[i] for values in scores.values())):
            groups.setdefault(row["prompt_idx"], []).append(i)
    width = min((len(g) for g in groups.values() if len(g) > 1), default=0)
    groups = {p: np.array(g) for p, g in groups.items() if len(g) >= width > 1}
    if not groups:
        stage.warn(
            "no_curve",
            "No prompt has two complete, scored samples; raise num_generations or max_completion_length of the"
            " rejection stage.",
        )
        return {}
    ns = [1 << k for k in range(width.bit_length()) if 1 << k <= width]
    d = [math.sqrt(selection.best_of_n_kl(n)) for n in ns]
    index = np.concatenate(list(groups.values()))
    curve, sd = {}, {}
    for name, values in scores.items():
        by_prompt = np.array(
            [[selection.best_of_n_estimate(proxy[g], n, values[g]) for n in ns] for g in groups.values()]
        )
        curve[name], sd[name] = by_prompt.mean(0).tolist(), spread(values[index])
        points += [
            point(
                f"best_of_{n}/{name}",
                value,
                x,
                len(groups),
                mean=curve[name][0],
                sd=sd[name],
                se=float(by_prompt[:, k].std(ddof=1) / math.sqrt(len(groups))) if len(groups) > 1 else None,
            )
            for k, (n, x, value) in enumerate(zip(ns, d, curve[name]))
        ]
    stage.report(
        "best-of-n",
        png=line_chart(
            {name: (d, values) for name, values in curve.items()},
            title="Best of n by the proxy",
            xlabel="sqrt(KL), sqrt(nats)",
            ylabel="score",
            markers=True,
        ),
    )
    found = {
        "prompts": len(groups),
        "n": ns[-1],
        "gold/best_n": ns[int(np.argmax(curve["gold"]))],
        "proxy_gold_correlation": _within(proxy, gold, groups),
    }
    found |= {f"{name}/{n}": values[ns.index(n)] for name, values in curve.items() for n in (1, ns[-1])}
    if len(ns) >= 3:
        alpha, beta = overopt.fit(d, np.array(curve["gold"]) - curve["gold"][0], "bon")
        found |= {"fit/alpha": alpha, "fit/beta": beta}
        if beta > 0 and alpha > 0:
            found["fit/peak_kl"] = overopt.peak(alpha, beta, "bon")[0] ** 2
    if curve["gold"][-1] < max(curve["gold"]) - stage.config.min_drop * sd["gold"]:
        stage.warn(
            "overoptimised",
            f"The gold score of best-of-n is highest at n = {found['gold/best_n']} and falls by"
            f" {max(curve['gold']) - curve['gold'][-1]:.3f} until n = {ns[-1]}: stop selecting harder, use an ensemble"
            " (reward_combine), or train the reward model on these samples.",
        )
    return {k: v for k, v in found.items() if v == v}


def spread(values) -> float:
    """Standard deviation of the finite values; 1 where they are all equal, so that differences keep their unit."""
    import numpy as np

    return float(np.nanstd(values)) or 1.0


def _within(proxy, gold, groups) -> float:
    import numpy as np

    from stages.measures.statistics import within_group_correlation

    index = np.concatenate(list(groups.values()))
    return within_group_correlation(
        proxy[index], gold[index], np.repeat(np.arange(len(groups)), [len(g) for g in groups.values()])
    )


def said_by_the_policy(rows: Sequence[dict]) -> list[dict]:
    """The ``rollouts/1`` rows of what the policy sampled for their iteration: without SFT answers that joined a group,
    and without replayed completions, which are of an older policy than others of the iteration.
    """
    newest: dict[int, int] = {}
    for row in rows:
        newest[row["iteration"]] = max(row["policy_version"], newest.get(row["iteration"], -1))
    return [
        row
        for row in rows
        if row["policy_version"] == newest[row["iteration"]]
        and json.loads(row["extra_json"] or "{}").get("mode") != "sft"
    ]


def along_rl(stage, points) -> dict:
    """Mean scores, KL to the reference and length of every point of the run, and the first point at which proxy and
    gold part.
    """
    import numpy as np

    from stages.chat import renderer_for
    from stages.measures.statistics import clustered_se
    from stages.reward_models.reward_scorers import Response

    config, renderer = stage.config, renderer_for(stage.path("model"))
    everyone = said_by_the_policy(list(stage.dataset("rollouts").iter_rows()))
    rows = [r for r in everyone if not r["truncated"]]
    responses = [
        Response(
            [],
            [{"role": "assistant", "content": renderer.decode(r["completion_ids"])}],
            [*r["prompt_ids"], *r["completion_ids"]],
        )
        for r in rows
    ]
    if not rows:
        stage.warn(
            "no_curve",
            "Every completion of the run was cut at its length limit, so none has a score; raise"
            " max_completion_length.",
        )
        return {}
    scores = scored(stage, responses, rows, "is_correct", renderer)
    at = np.array([r["iteration"] for r in rows])
    iterations = sorted(set(at.tolist()))  # those in which something ended
    start, count = iterations[0], max(1, len(iterations) // config.every)
    windows = [[] for _ in range(count)]  # iterations of each point; what is left over joins the last
    for k, iteration in enumerate(iterations):
        windows[min(k // config.every, count - 1)].append(iteration)
    found: dict = {"rl/iterations": sum(map(len, windows)), "rl/points": count}
    parts = [[r for r in everyone if r["iteration"] in w] for w in map(set, windows)]
    kl = [
        mean_of(
            [
                float(
                    np.dot(np.subtract(r["logp_old"], r["logp_ref"]), 1 - np.array(r["tool_mask"] or [0] * r["length"]))
                )
                for r in part
                if r.get("logp_ref") and any(r["loss_mask"])
            ]
        )
        for part in parts
    ]
    length = [mean_of([r["length"] for r in part]) for part in parts]
    cut = [mean_of([r["truncated"] for r in part]) for part in parts]
    x = [max(k, 0.0) ** 0.5 for k in kl]  # NaN stays NaN: max(NaN, 0) is NaN
    series, sd, errors = {}, {}, {}
    for name, values in scores.items():
        first = values[(at == start) & ~np.isnan(values)]
        mean, sd[name] = (
            (float(first.mean()), spread(first)) if first.size else (float(np.nanmean(values)), spread(values))
        )
        series[name], errors[name] = [], []
        for window, distance in zip(windows, x):
            inside = np.flatnonzero(np.isin(at, window) & ~np.isnan(values))
            series[name].append(mean_of(values[inside]))
            se = clustered_se(values[inside], [rows[i]["prompt_id"] for i in inside]) if inside.size > 1 else None
            errors[name].append(se or 0.0)
            points.append(
                point(
                    f"iteration_{window[-1]}/{name}",
                    series[name][-1],
                    distance,
                    int(inside.size),
                    mean=mean,
                    sd=sd[name],
                    se=se,
                )
            )
    for name, values in (("kl", kl), ("length", length), ("truncated", cut)):
        points += [
            point(f"iteration_{window[-1]}/{name}", value, distance, len(part))
            for window, value, distance, part in zip(windows, values, x, parts)
        ]
    last = [window[-1] for window in windows]
    _draw_along_rl(stage, series, sd, last, x)
    found |= _where_they_part(stage, series, sd, errors, last, x, kl)
    found |= {
        "rl/diverged": max(value for key, value in found.items() if key.endswith("_diverged")),
        "rl/proxy_first": series["proxy"][0],
        "rl/proxy_last": series["proxy"][-1],
        "rl/kl_last": kl[-1],
        "rl/length_first": length[0],
        "rl/length_last": length[-1],
        "rl/truncated_last": cut[-1],
    }
    return {k: v for k, v in found.items() if v == v}


def _draw_along_rl(stage, series: dict, sd: dict, last: list[int], x: list[float]) -> None:
    """The scores' change from the start in standard deviations, by iteration and by distance from the reference."""
    from stages.reporting.reports import line_chart

    stage.report(
        "along-rl",
        png=line_chart(
            {name: (last, [(v - values[0]) / sd[name] for v in values]) for name, values in series.items()},
            title="Along RL: proxy and gold",
            xlabel="iteration",
            ylabel="change, standard deviations of the start",
        ),
    )
    if len({v for v in x if v == v}) > 1:
        stage.report(
            "against-kl",
            png=line_chart(
                {name: (x, [(v - values[0]) / sd[name] for v in values]) for name, values in series.items()},
                markers=True,
                title="Along RL: proxy and gold",
                xlabel="sqrt(KL), sqrt(nats)",
                ylabel="change, standard deviations of the start",
            ),
        )


def _where_they_part(stage, series: dict, sd: dict, errors: dict, last: list[int], x: list[float], kl: list) -> dict:
    """First, best and last value of every score but the proxy, and the first point at which the proxy goes on rising
    while it falls, of which the user is warned. ``last``, ``x``, ``kl``: last iteration, sqrt(KL) and KL of each point.
    """
    import numpy as np

    from stages.measures import overopt

    config, found = stage.config, {}
    for name in series:
        if name == "proxy":
            continue
        least = max(config.min_drop * sd[name], config.noise * 2**0.5 * float(np.median(errors[name])))
        outcome = overopt.divergence(series["proxy"], series[name], min_drop=least, patience=config.patience)
        peak = outcome["peak_index"] if outcome["diverged"] else int(np.nanargmax(series[name]))
        found |= {
            f"rl/{name}_first": series[name][0],
            f"rl/{name}_peak": series[name][peak],
            f"rl/{name}_last": series[name][-1],
            f"rl/{name}_peak_iteration": last[peak],
            f"rl/{name}_peak_kl": kl[peak],
            f"rl/{name}_drop_sd": (series[name][peak] - series[name][-1]) / sd[name],
            f"rl/{name}_diverged": float(outcome["diverged"]),
        }
        if outcome["diverged"]:
            since = last[outcome["detected_index"]]
            found["rl/detected_iteration"] = min(since, found.get("rl/detected_iteration", since))
            stage.warn(
                "overoptimised",
                f"From iteration {since} the {name} score is {least / sd[name]:.2g} standard deviations or more below"
                f" its value at iteration {last[peak]} while the proxy is not: take the checkpoint of the peak, raise"
                " kl_coef, or refresh the reward model.",
            )
        d = [(a, g - series[name][0]) for a, g in zip(x, series[name]) if a == a]
        if name == "gold" and len({a for a, _ in d if a > 0}) >= 3:
            found |= dict(zip(("rl/fit_alpha", "rl/fit_beta"), overopt.fit(*zip(*d), "rl")))
    return found


def mean_of(values) -> float:
    return float(sum(values) / len(values)) if len(values) else float("nan")


def point(
    metric: str,
    value: float,
    x: float,
    n: int,
    *,
    mean: float | None = None,
    sd: float | None = None,
    se: float | None = None,
) -> dict:
    """One point of a curve; z is its distance from the starting policy's mean in standard deviations of that policy's
    samples.
    """
    return {
        "metric": metric,
        "value": value,
        "se": se,
        "n": n,
        "x": x,
        "z": None if sd is None else (value - mean) / sd,
    }


def write_points(stage, points: list[dict], summary: dict) -> None:
    from stages.evaluation.scores import score_row

    def known(value):
        return value if value is not None and value == value else None

    writer = stage.writer("curve", "eval_scores/1", meta={"summary": summary})
    writer.write(
        score_row(
            stage.key[:16],
            "overoptimisation",
            p["metric"],
            p["value"],
            p["se"],
            p["n"],
            config={"x": known(p["x"])},
            source="made",
            origin="verifier",
            detail={"z": known(p["z"])},
        )
        for p in points
        if p["value"] == p["value"]
    )
    writer.close({"points": len(points)})
