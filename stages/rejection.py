"""rejection: sample N completions per prompt, score them, keep the best (rejection sampling, best-of-N).

Writes the whole M x N reward matrix in long form (``candidates/1``) and the selected rows as demonstrations for an ``sft``
stage (catalogue ``rs.sft``, ``rs.select``, ``rs.best_of_n``). Given ``candidates`` of an earlier run, only the selection is
repeated. Completions cut by the length limit, and unscorable ones, are never selected. A killed run continues at the
last complete block of prompts and ends with the same bytes.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from stages.rewards import RewardComponent
from stages.settings import SamplingConfig
from stages.spec import InputSpec, OutputSpec, StageSpec


class Config(SamplingConfig):
    num_generations: int = Field(16, ge=1, description="Completions per prompt, N (texts 10-30; ours 16).")
    rewards: list[RewardComponent] = Field(default_factory=lambda: [RewardComponent(name="verifier", kind="verifier")],
                                           description="Named, weighted reward components.")
    select: Literal["top_per_prompt", "top_k_per_prompt", "top_k_overall", "threshold", "all_correct", "random_per_prompt"] = Field(
        "top_per_prompt", description="Selector on the reward matrix (rs.select).")
    k: int = Field(1, ge=1, description="Rows kept per prompt (top_k_per_prompt) or in all (top_k_overall).")
    threshold: float | None = Field(None, title="Threshold", description="Keep rewards strictly above this (select=threshold; as a floor otherwise).")
    threshold_mode: Literal["absolute", "quantile"] = Field("absolute", description="What threshold is: a reward, or the share of valid candidates at or below it.")
    max_per_prompt: int | None = Field(None, ge=1, title="Max per prompt", description="select=all_correct, threshold: rows kept per prompt at most, the first (ReST-EM 10).")
    allow_empty: bool = Field(False, description="Selecting nothing is a result and no error (ReST stops there).")
    dedupe: bool = Field(True, description="Drop identical texts of one prompt before selecting (the first is kept).")
    mixture_coef: float = Field(0.0, ge=0, le=1, title="Mixture coefficient", description="Sample from policy^(1-c) reference^c, token by token (IPO-MD 0.25); 0 = the policy alone.")
    split: str = Field("train", description="Prompt split to sample from.")
    max_prompts: int | None = Field(None, ge=1, title="Max prompts", description="Prompts used at most.")
    prompt_offset: int = Field(0, ge=0, description="Prompts passed over before the first one used, in a circle: other prompts in each round.")
    max_prompt_length: int = Field(1024, ge=1, description="Prompt tokens at most; longer prompts are left out and counted.")
    block: int = Field(64, ge=1, description="Prompts generated and scored as one resumable unit.")


SPEC = StageSpec(
    name="rejection", config=Config, gpu=True,
    inputs={"model": InputSpec("model", doc="Policy that samples."),
            "prompts": InputSpec("dataset", kinds=("prompts/1",), doc="Prompts, with answers for verifiers."),
            "reference": InputSpec("model", required=False, doc="The other part of the mixture (mixture_coef)."),
            "reward_model": InputSpec("model", required=False, doc="Scorer of components with kind=model."),
            "judge": InputSpec("model", required=False, doc="Causal LM of components with kind=judge, and of a rubric's judged items."),
            "rubric": InputSpec("dataset", kinds=("rubric_items/1",), required=False, doc="Rubric of the component with kind=rubric: a file or a dataset."),
            "candidates": InputSpec("dataset", kinds=("candidates/1",), required=False,
                                    doc="Scored candidates of an earlier run: select again without generating.")},
    outputs={"candidates": OutputSpec("dataset"), "selected": OutputSpec("dataset"),
             "rubric_scores": OutputSpec("dataset", required=False, doc="rubric_scores/1: every item of every candidate, with critique and reasoning."),
             "rubric_confidence": OutputSpec("dataset", required=False, doc="rubric_confidence/1: mean confidence per rubric item.")})


def run(stage):
    import numpy as np

    from storage.datasets import open_dataset

    config = stage.config
    if stage.has("candidates"):
        candidates = stage.dataset("candidates")
        with_copy = stage.writer("candidates", "candidates/1")
        with_copy.write(candidates.iter_rows())
        with_copy.close({"copied": len(candidates)})
    else:
        generate(stage)
    rows = list(open_dataset(str(stage.workdir / "out" / "candidates")).iter_rows())
    n_prompts = 1 + max((r["prompt_idx"] for r in rows), default=-1)
    width = 1 + max((r["completion_idx"] for r in rows), default=-1)
    matrix = np.full((n_prompts, width), np.nan)
    correct = np.zeros((n_prompts, width), bool)
    where = {}
    for row in rows:
        cell = row["prompt_idx"], row["completion_idx"]
        where[cell] = row
        if row["kept"] is not False and row["reward"] is not None:
            matrix[cell] = row["reward"]
            correct[cell] = bool(row["correct"])
    if config.dedupe:
        drop_duplicates(matrix, where)
    chosen = select(matrix, correct, config, stage)
    write_selected(stage, [where[divmod(int(i), width)] for i in chosen], config.allow_empty)
    report(stage, rows, matrix, correct, chosen)


def generate(stage) -> None:
    """Sample and score every prompt, one Parquet part per block of prompts."""
    from stages.chat import renderer_for
    from stages.engines import make_engine
    from stages.generation import MixtureSampler, gen_record, prompt_rows, sample_groups, sampling_params, score, warn_of_failures
    from stages.modeling import freeze, load_policy
    from stages.rewards import build_rewards
    from stages.rubric_reward import score_rows, write_review
    from storage.schema import complete_row

    config = stage.config
    if bool(config.mixture_coef) != stage.has("reference"):
        raise ValueError("mixture_coef and the input `reference` go together; write for example mixture_coef=0.25 with --input reference=MODEL, or neither.")
    renderer = renderer_for(stage.path("model"))
    rows = prompt_rows(stage, stage.dataset("prompts"), config.split, renderer, config.max_prompt_length, None if config.prompt_offset else config.max_prompts)
    first = config.prompt_offset % len(rows)
    rows = (rows[first:] + rows[:first])[:config.max_prompts]
    writer = stage.writer("candidates", "candidates/1")
    rubric = any(component.kind == "rubric" for component in config.rewards)
    items = stage.writer("rubric_scores", "rubric_scores/1") if rubric else None
    done = len(writer.parts)
    total = len(rows)
    if rubric and total > config.block:
        stage.warn("rubric_blocks", f"Confidences of rubric items are averaged over blocks of {config.block} prompts; run stage rescore on the candidates for averages over "
                   "all of them, or raise block.")
    if done * config.block < total:
        if config.mixture_coef:
            if config.engine != "builtin":
                raise ValueError(f"mixture_coef={config.mixture_coef} mixes the distributions of two models token by token, which engine={config.engine} cannot do; "
                                 "write engine=builtin, or mixture_coef=0.")
            policy, reference = (freeze(load_policy(stage.path(role), stage.device)) for role in ("model", "reference"))
            sampler = MixtureSampler(policy, reference, renderer.tokenizer, config.mixture_coef)
        else:
            sampler = make_engine(stage, renderer)
        rewards = build_rewards(config.rewards, stage.inputs, renderer=renderer, device=stage.device)
        rewards.check([row for row, _ in rows])
        params = sampling_params(config, renderer)
    for start in range(done * config.block, total, config.block):
        block = rows[start:start + config.block]
        seeds = [[stage.seed_for("rejection", row["row_id"], k) for k in range(config.num_generations)] for row, _ in block]
        groups = sample_groups(sampler, block, params, seeds)
        warn_of_failures(stage, sampler, [s for group in groups for s in group])
        score(rewards, [s for group in groups for s in group])
        made = [complete_row("candidates/1", candidate(s, start + i, gen_record(stage, config, renderer, seeds[i][s.index], engine=sampler.name)),
                             dataset="candidates", source=s.prompt["dataset"], origin="ai")
                for i, group in enumerate(groups) for s in group]
        writer.write(made)
        writer.flush()
        if rubric:
            items.write([row for one, s in zip(made, (s for group in groups for s in group)) for row in score_rows(one, s.items)])
            items.flush()
        stage.save_checkpoint(start // config.block + 1, {}, {})
        stage.progress(min(start + config.block, total), total, "prompts")
    writer.close({"prompts": total, "completions": total * config.num_generations})
    if rubric:
        items.close({})
        write_review(stage)


def candidate(sample, prompt_idx: int, gen: dict) -> dict:
    import json
    import math

    reason = None if sample.terminated else "engine_error" if sample.error is not None else "truncated"
    if reason is None and math.isnan(sample.total):
        reason = "unscorable"
    return {"prompt": sample.prompt["prompt"], "prompt_id": sample.prompt["prompt_id"], "group_id": sample.prompt["group_id"],
            "prompt_idx": prompt_idx, "completion_idx": sample.index, "completion": [{"role": "assistant", "content": sample.text}],
            "scores": [{"source": k, "value": v} for k, v in sample.parts.items()],
            "reward": None if math.isnan(sample.total) else sample.total, "correct": sample.correct, "kept": reason is None,
            "drop_reason": reason, "gen": gen, "split": sample.prompt["split"],
            "extra_json": json.dumps({"completion_ids": sample.ids, "finish_reason": sample.finish_reason, "logp_sum": None if sample.logps is None else sum(sample.logps),
                                      "unscorable": sample.reasons, "category": sample.prompt.get("category"), "tier": sample.tier,
                                      **({"reencoded": True} if sample.reencoded else {}), **({"error": sample.error} if sample.error else {})}, sort_keys=True)}


def drop_duplicates(matrix, where) -> None:
    """Later copies of a text within one prompt lose their score, so that no selector takes them."""
    seen = set()
    for (i, j), row in sorted(where.items()):
        key = i, row["completion"][0]["content"]
        if key in seen:
            matrix[i, j] = float("nan")
        seen.add(key)


def select(matrix, correct, config, stage) -> list[int]:
    """Flat indices (prompt-major) kept by the configured selector."""
    import numpy as np

    from stages import selection

    width = matrix.shape[1]
    if config.select in ("top_per_prompt", "top_k_per_prompt"):
        best = selection.top_k_per_prompt(matrix, config.k if config.select == "top_k_per_prompt" else 1)
        flat = [i * width + j for i, row in enumerate(best) for j in row]
    elif config.select == "top_k_overall":
        flat = selection.top_k_overall(matrix, config.k)
    elif config.select == "threshold":
        if config.threshold is None:
            raise ValueError("select=threshold needs threshold; write for example threshold=0.5.")
        flat = selection.threshold(matrix, level(matrix, config))
    elif config.select == "all_correct":
        flat = np.flatnonzero(correct & ~np.isnan(matrix))
    else:
        picks = selection.random_per_prompt(matrix, stage.rng("random_per_prompt"))
        flat = [i * width + j for i, j in enumerate(picks) if j is not None]
    flat = sorted(int(i) for i in flat)
    if config.threshold is not None and config.select != "threshold":
        flat = [i for i in flat if matrix.flat[i] > level(matrix, config)]
    if config.max_per_prompt is not None and config.select in ("threshold", "all_correct"):
        flat = [i for at, i in enumerate(flat) if at < config.max_per_prompt or flat[at - config.max_per_prompt] // width != i // width]
    return flat


def level(matrix, config) -> float:
    """The threshold as a reward: itself, or the quantile of the valid rewards."""
    import numpy as np

    if config.threshold_mode == "absolute":
        return config.threshold
    if not 0.0 <= config.threshold < 1.0:
        raise ValueError(f"threshold={config.threshold} is no share; with threshold_mode=quantile write a value in [0, 1), for example 0.9.")
    return float(np.nanquantile(matrix, config.threshold)) if (~np.isnan(matrix)).any() else 0.0


def write_selected(stage, rows, allow_empty: bool = False) -> None:
    from storage.schema import complete_row

    writer = stage.writer("selected", "demonstrations/1")
    writer.write([complete_row("demonstrations/1", {
        "messages": row["prompt"] + row["completion"], "train_turns": [len(row["prompt"])], "kept": True, "gen": row["gen"],
        "prompt_id": row["prompt_id"], "group_id": row["group_id"]}, dataset="selected", source=row["source"], origin="ai", split="train")
        for row in rows])
    writer.close({"selected": len(rows)})
    if not rows and not allow_empty:
        raise ValueError("Nothing was selected: no completion ended by itself and could be scored above the threshold. Raise "
                         "max_completion_length or num_generations, or lower threshold; the candidates dataset shows each row's drop_reason.")


def report(stage, rows, matrix, correct, chosen) -> None:
    """Selection against the pool, and best-of-n curves with the unbiased estimator (``rm.overopt``)."""
    import numpy as np

    from stages import selection
    from stages.reports import document, facts, histogram, line_chart, sample_table

    valid = ~np.isnan(matrix)
    flat = matrix.ravel()
    lengths = np.array([len(r["completion"][0]["content"]) for r in rows], float)
    picked = set(chosen)
    width = matrix.shape[1]
    is_picked = np.array([r["prompt_idx"] * width + r["completion_idx"] in picked for r in rows])
    summary = {
        "prompts": matrix.shape[0], "completions": len(rows), "valid": int(valid.sum()), "selected": len(chosen),
        "truncated": sum(r["drop_reason"] == "truncated" for r in rows), "unscorable": sum(r["drop_reason"] == "unscorable" for r in rows),
        "prompts_covered": len({i // width for i in chosen}), "reward/mean": float(np.nanmean(flat)) if valid.any() else None,
        "reward/selected": float(np.mean([flat[i] for i in chosen])) if chosen else None, "length/mean": float(lengths.mean()),
        "length/selected": float(lengths[is_picked].mean()) if chosen else None}
    if any(r["correct"] is not None for r in rows):
        summary |= {"correct/mean": float(np.mean([bool(r["correct"]) for r in rows])),
                    "correct/selected": float(correct.ravel()[chosen].mean()) if chosen else None}
    stage.summary({k: v for k, v in summary.items() if v is not None})
    stage.report("rewards", png=histogram({"all": flat[valid.ravel()].tolist(), "selected": [float(flat[i]) for i in chosen]},
                                          title="Reward before and after selection", xlabel="reward"))
    full = valid.all(axis=1)
    if full.any() and width > 1:
        curve = [float(np.mean([selection.best_of_n_estimate(row, n) for row in matrix[full]])) for n in range(1, width + 1)]
        series = {"scorer": (list(range(1, width + 1)), curve)}
        if any(r["correct"] is not None for r in rows):
            series["correct"] = (list(range(1, width + 1)), [float(np.mean([
                selection.best_of_n_estimate(r, n, c.astype(float)) for r, c in zip(matrix[full], correct[full])])) for n in range(1, width + 1)])
        stage.report("best-of-n", png=line_chart(series, title="Best of n", xlabel="n", ylabel="mean"))
    table = [{"prompt": r["prompt"][-1]["content"], "completion": r["completion"][0]["content"], "reward": r["reward"], "correct": r["correct"]}
             for r, taken in zip(rows, is_picked) if taken][:20]
    stage.report("summary", markdown=document("Rejection sampling", facts(summary), ("Selected samples", sample_table(table))))
