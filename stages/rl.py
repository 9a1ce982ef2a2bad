"""rl: policy-gradient fine-tuning with rewards from verifiers, reward models or mixtures.

An algorithm is a row of ``stages.algorithms.RL_PRESETS`` (``reinforce``, ``rloo``, ``grpo``, ``dr_grpo``, ...): advantage, scaling,
ratio and surrogate, KL in reward or loss, aggregation. Every field left empty below takes the preset's value; the resolved
row is printed at the start.

One iteration (``rl.md`` section 1.4): choose prompts, sample G completions each, score, take the KL off the reward if asked,
form advantages, then ``num_iterations`` passes over the batch in ``num_minibatches`` optimizer steps. Rollouts are a
``rollouts/1`` dataset with every token, mask, log-prob, reward component and advantage. Groups without signal are counted
but never forwarded. Killed at any instant, the next run samples and computes the same bytes.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from stages.rewards import RewardComponent
from stages.settings import OptimizerConfig, SamplingConfig
from stages.spec import InputSpec, OutputSpec, StageSpec


class Config(OptimizerConfig, SamplingConfig):
    preset: Literal["reinforce", "rloo", "grpo", "dr_grpo", "gspo", "cispo"] = Field("grpo", description="Algorithm (rl.md 1.5).")
    rewards: list[RewardComponent] = Field(default_factory=lambda: [RewardComponent(name="verifier", kind="verifier")],
                                           description="Named, weighted reward components.")
    learning_rate: float = Field(1e-6, gt=0, description="Peak learning rate, full parameters (texts 1e-6 to 1e-5).")
    lr_schedule: Literal["constant", "linear", "cosine"] = Field("constant", description="Decay after warm-up.")
    warmup_ratio: float = Field(0.0, ge=0, le=1, description="Share of the steps spent in linear warm-up.")
    max_steps: int = Field(100, ge=1, description="Optimizer steps.")
    prompts_per_step: int = Field(16, ge=1, description="Prompts per rollout batch.")
    num_generations: int = Field(8, ge=1, description="Completions per prompt, G (TRL 8; DeepSeekMath 64).")
    num_iterations: int | None = Field(None, ge=1, title="Num iterations", description="Passes over each rollout batch (mu).")
    num_minibatches: int = Field(1, ge=1, description="Optimizer steps per pass over a rollout batch, cut by prompt.")
    beta: float | None = Field(None, ge=0, title="Beta", description="KL-in-loss coefficient; 0 loads no reference.")
    kl_estimator: Literal["k2", "k3"] | None = Field(None, title="KL estimator", description="Estimator of the KL in the loss.")
    kl_is_weighted: bool = Field(False, description="Multiply the KL in the loss by pi/pi_old: reverse-KL gradient for k3 (KL-LOSS).")
    kl_coef: float | None = Field(None, ge=0, title="KL coefficient", description="KL-in-reward coefficient (sequence sum of k1).")
    epsilon: float | None = Field(None, gt=0, title="Epsilon", description="Lower clip range.")
    epsilon_high: float | None = Field(None, gt=0, title="Epsilon high", description="Upper clip range (DAPO .28).")
    scale_rewards: Literal["none", "group", "batch", "batch_centered"] | None = Field(None, title="Scale rewards", description="Std division of group advantages.")
    loss_agg_mode: Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"] | None = Field(
        None, title="Loss aggregation", description="Aggregation over the whole optimizer step (AGG).")
    loss_scale_factor: float | None = Field(None, gt=0, title="Loss scale factor", description="Constant of seq-mean-token-sum-norm; default max_completion_length.")
    entropy_coef: float = Field(0.0, ge=0, description="Entropy bonus (texts 0.01, off).")
    log_entropy: bool = Field(True, description="Log the policy's exact entropy (free when entropy_coef > 0).")
    truncation_policy: Literal["score", "zero", "penalty", "mask"] = Field("score", description="What a completion without end token earns (TERM).")
    missing_eos_penalty: float = Field(1.0, ge=0, description="Reward of a cut completion is minus this (truncation_policy=penalty).")
    baseline_decay: float = Field(0.9, ge=0, lt=1, description="Moving-average baseline of reinforce.")
    split: str = Field("train", description="Prompt split to train on.")
    max_prompt_length: int = Field(1024, ge=1, description="Prompt tokens at most; longer prompts are left out and counted.")
    eval_every: int = Field(0, ge=0, description="Optimizer steps between passes over validation prompts; 0 = only at start and end.")
    eval_prompts: int = Field(0, ge=0, description="Validation prompts sampled once each; 0 = no validation in this stage.")


SPEC = StageSpec(
    name="rl", config=Config, gpu=True,
    inputs={"model": InputSpec("model", doc="Policy to start from."),
            "data": InputSpec("dataset", kinds=("prompts/1",), doc="Prompts, with answers for verifiers."),
            "reward_model": InputSpec("model", required=False, doc="Scorer of components with kind=model."),
            "reference": InputSpec("model", required=False, doc="KL reference; default: the starting policy.")},
    outputs={"model": OutputSpec("model", role="policy"), "rollouts": OutputSpec("dataset")})


def resolve_preset(config: Config):
    """The preset row with the config's overrides applied and checked; (row, warnings)."""
    from stages.algorithms import rl_preset, validate_rl

    changes = {"kl_loss_coef": config.beta, "kl_loss_estimator": config.kl_estimator, "kl_reward_coef": config.kl_coef,
               "epsilon": config.epsilon, "epsilon_high": config.epsilon_high, "scale": config.scale_rewards,
               "aggregation": config.loss_agg_mode, "num_iterations": config.num_iterations}
    row = rl_preset(config.preset, **{k: v for k, v in changes.items() if v is not None})
    warnings = validate_rl(row, config.num_generations, updates_per_generation=row.num_iterations * config.num_minibatches,
                           loss_scale_factor=config.loss_scale_factor)
    if config.num_minibatches > config.prompts_per_step:
        raise ValueError(f"num_minibatches={config.num_minibatches} cuts {config.prompts_per_step} prompts into empty steps; write "
                         f"num_minibatches <= prompts_per_step.")
    if config.temperature == 0:
        raise ValueError("temperature=0 samples G equal completions, so no group carries a signal; write temperature=1.0.")
    return row, warnings


class PolicyGradient:
    """Objective over prompt groups: surrogate, KL in the loss, entropy bonus; all aggregated over the whole step."""

    def __init__(self, row, config: Config):
        from stages.losses import denominator_of

        self.row, self.config, self.count = row, config, denominator_of(row.aggregation)
        self.scale = config.loss_scale_factor or config.max_completion_length

    def counts(self, items):
        return {"tokens": float(sum(i.n_targets for i in items)),
                "sequences": float(sum(bool(m.any()) for i in items for m in i.masks)),
                "forwarded": float(sum(i.n_targets for i in items if not i.extra.get("skip_forward")))}

    def __call__(self, model, batch):
        import torch

        from stages.losses import aggregate, kl_estimate, policy_loss
        from stages.modeling import target_logps
        from stages.training import Sums

        row, config = self.row, self.config
        want_entropy = config.log_entropy or config.entropy_coef > 0
        logps, entropy = target_logps(model, batch, config.temperature, want_entropy)
        logps_SL = batch.padded(logps)
        old_SL = batch.pad_lists([o for i in batch.items for o in i.extra["old_logps"]])
        advantages = torch.tensor([a for i in batch.items for a in i.extra["advantages"]], dtype=torch.float32, device=logps.device)

        def agg(values_SL):
            return aggregate(values_SL, batch.mask_SL, row.aggregation, self.scale)[0]

        losses, sums = policy_loss(logps_SL, old_SL, advantages, batch.mask_SL, epsilon=row.epsilon, epsilon_high=row.epsilon_high,
                                   ratio_level=row.ratio_level, surrogate=row.surrogate)
        terms = {"policy": (agg(losses), self.count)}
        metrics = {f"policy/{k}": (v.float(), "forwarded") for k, v in sums.items() if k != "tokens"}
        if row.needs_reference:
            ref_SL = batch.pad_lists([r for i in batch.items for r in i.extra["ref_logps"]])
            if row.kl_loss_coef:
                kl_SL = kl_estimate(logps_SL, ref_SL, row.kl_loss_estimator, batch.mask_SL, old_SL if config.kl_is_weighted else None)
                terms["kl"] = (row.kl_loss_coef * agg(kl_SL), self.count)
            metrics["kl/reference"] = (kl_estimate(logps_SL.detach(), ref_SL, "k3", batch.mask_SL).sum(), "forwarded")
        if want_entropy:
            metrics["entropy"] = (entropy.detach().sum(), "forwarded")
            if config.entropy_coef:
                terms["entropy_bonus"] = (-config.entropy_coef * agg(batch.padded(entropy)), self.count)
        return Sums(terms, metrics)


class Rollouts:
    """Source of training items: samples, scores and shapes a rollout batch whenever the last one is used up."""

    def __init__(self, stage, row, renderer, model, rewards, prompts, reference):
        from stages.estimators import MovingAverageBaseline
        from stages.generation import sampling_params
        from stages.sampler import Sampler

        self.stage, self.row, self.config, self.renderer = stage, row, stage.config, renderer
        self.model, self.rewards, self.prompts, self.reference = model, rewards, prompts, reference
        self.sampler = Sampler(model, renderer.tokenizer, max_batch=self.config.generation_batch)
        self.params = sampling_params(self.config, renderer)
        self.baseline = MovingAverageBaseline(self.config.baseline_decay)
        self.writer = stage.writer("rollouts", "rollouts/1")
        self.steps_per_batch = row.num_iterations * self.config.num_minibatches
        self.total_steps = self.config.max_steps
        self.iteration, self.batch, self.metrics, self.step_tokens = -1, [], {}, 0
        self.exact_logps = self.config.top_p == 1.0 and self.config.top_k == 0 and self.config.min_p == 0.0

    # -- Source protocol ------------------------------------------------------------------------------------------
    def items(self, step: int):
        iteration, inner = divmod(step, self.steps_per_batch)
        self.step_tokens = 0
        if iteration != self.iteration:
            self.batch, self.metrics = self._collect(iteration)
            self.iteration = iteration
        epoch, minibatch = divmod(inner, self.config.num_minibatches)
        if self.config.num_minibatches == 1:
            return self.batch
        order = self.stage.rng("minibatches", iteration, epoch).permutation(len(self.batch))
        return [self.batch[i] for i in order[minibatch::self.config.num_minibatches]]

    def after_step(self, step: int, metrics: dict[str, float]) -> dict[str, float]:
        first = (step - 1) % self.steps_per_batch == 0
        ratio = metrics.get("policy/ratio", 0.0)  # 0 when no token was trained
        if first and ratio and self.row.surrogate == "clip" and self.config.compute_dtype == "float32" and abs(ratio - 1.0) > 1e-3:
            from stages.training import TrainingError

            raise TrainingError(f"The policy ratio must be 1 on the first minibatch of a rollout, but its mean is {ratio:.6f}: sampler and "
                                "trainer disagree about the log-probabilities. Report this with the model's architecture.")
        return self.metrics if first else {}

    def state(self):
        import json

        in_hand = [
            {"row_id": i.row_id, "prompt": i.prompt.tolist(), "responses": [r.tolist() for r in i.responses],
             "masks": [m.tolist() for m in i.masks], "extra": i.extra} for i in self.batch]
        return ({"iteration": self.iteration, "baseline": self.baseline.state_dict(), "metrics": self.metrics},
                {"rollouts.json": json.dumps(in_hand).encode()})

    def restore(self, state, read):
        import json

        from stages.batching import make_item

        self.iteration, self.metrics = state["iteration"], state["metrics"]
        self.baseline.load_state_dict(state["baseline"])
        self.batch = [make_item(r["row_id"], r["prompt"], r["responses"], r["masks"], **r["extra"]) for r in json.loads(read("rollouts.json"))]

    # -- one rollout batch ------------------------------------------------------------------------------------------
    def _chosen_prompts(self, iteration: int):
        n, start = len(self.prompts), iteration * self.config.prompts_per_step
        out = []
        for k in range(start, start + self.config.prompts_per_step):
            epoch, index = divmod(k, n)
            out.append(self.prompts[self._permutation(epoch)[index]])
        return out

    def _permutation(self, epoch: int):
        if getattr(self, "_order", (None,))[0] != epoch:
            self._order = (epoch, self.stage.rng("prompts", epoch).permutation(len(self.prompts)))
        return self._order[1]

    def _collect(self, iteration: int):
        """Generate, score, shape: the training items of one iteration and its metrics."""
        import numpy as np

        from stages.batching import make_item
        from stages.estimators import apply_truncation, group_advantage, shape_rewards
        from stages.generation import sample_groups, score

        config, row = self.config, self.row
        chosen = self._chosen_prompts(iteration)
        seeds = [[self.stage.seed_for("rollout", iteration, k, prompt["row_id"], g) for g in range(config.num_generations)]
                 for k, (prompt, _) in enumerate(chosen)]
        groups = sample_groups(self.sampler, chosen, self.params, seeds)
        samples = [s for group in groups for s in group]
        score(self.rewards, samples)
        self.step_tokens = sum(len(s.ids) for s in samples)
        group_of = np.repeat(np.arange(len(groups)), config.num_generations)
        scores = np.array([s.total for s in samples])
        rewards, _, kept = apply_truncation(scores, [s.terminated for s in samples], config.truncation_policy, config.missing_eos_penalty)
        rewards = np.where(np.isnan(scores), np.nan, rewards)
        items = [make_item(prompt["row_id"], ids, [s.ids for s in group], [[1] * len(s.ids) for s in group])
                 for (prompt, ids), group in zip(chosen, groups)]
        old = [s.logps for s in samples] if self.exact_logps else self._logps(self.model, items)
        ref = self._logps(self.reference, items) if row.needs_reference else None
        metrics = rollout_metrics(samples, rewards, group_of)
        shaped = rewards
        if ref is not None:
            kl = [np.asarray(o) - np.asarray(r) for o, r in zip(old, ref)]
            metrics["kl/sequence_sum"] = float(np.mean([k.sum() for k in kl]))
            if row.kl_reward_coef:
                width = max(map(len, kl))
                padded = np.stack([np.pad(k, (0, width - len(k))) for k in kl])
                mask = np.stack([np.arange(width) < len(k) for k in kl])
                shaped = shape_rewards(rewards, padded, mask, row.kl_reward_coef, row.kl_reward_mode)
                metrics["reward/shaped"] = float(np.nanmean(shaped))
        valid = np.isfinite(shaped) & kept
        advantages, informative = group_advantage(shaped, group_of, row.group_mode, row.std_ddof, row.std_eps, valid)
        if row.baseline == "moving_average":
            advantages = np.where(valid, advantages - self.baseline.use(shaped[valid]), 0.0)
        metrics["advantage/std"] = float(advantages.std())
        metrics["groups/informative_fraction"] = float(np.mean([informative[group_of == g].any() for g in range(len(groups))]))
        final = []
        for g, item in enumerate(items):
            rows = np.flatnonzero(group_of == g)
            masks = [np.ones(len(samples[i].ids), int) * bool(valid[i]) for i in rows]
            dead = not advantages[rows].any() and not row.kl_loss_coef and not config.entropy_coef
            extra = {"advantages": advantages[rows].tolist(), "old_logps": [list(map(float, old[i])) for i in rows], "skip_forward": bool(dead)}
            if ref is not None:
                extra["ref_logps"] = [list(map(float, ref[i])) for i in rows]
            final.append(make_item(item.row_id, item.prompt, item.responses, masks, **extra))
        self._write(iteration, samples, rewards, advantages, old, ref, valid)
        return final, metrics

    def _logps(self, model, items) -> list[list[float]]:
        """Log-probs of every response token under ``model`` at the sampling temperature, in sample order."""
        from stages.batching import per_response
        from stages.modeling import target_logps

        def compute(batch):
            padded = batch.padded(target_logps(model, batch, self.config.temperature)[0]).cpu().numpy()
            lengths = [len(response) for item in batch.items for response in item.responses]
            return [row[:length].tolist() for row, length in zip(padded, lengths)]

        found = per_response(items, self.config.max_tokens_per_micro_batch, self.stage.device, compute)
        return [row for rows in found for row in rows]

    def _write(self, iteration, samples, rewards, advantages, old, ref, valid) -> None:
        import numpy as np

        from storage.schema import complete_row

        weights = {c.name: c.weight for c in self.config.rewards}
        rows = []
        for i, s in enumerate(samples):
            n = len(s.ids)
            scored = bool(np.isfinite(rewards[i]))
            rows.append(complete_row("rollouts/1", {
                "prompt_id": s.prompt["prompt_id"], "group_id": s.prompt["group_id"], "iteration": iteration,
                "policy_version": iteration * self.steps_per_batch, "sample_idx": i, "prompt_ids": s.prompt_ids, "completion_ids": s.ids,
                "loss_mask": [int(valid[i])] * n, "logp_old": [float(v) for v in old[i]],
                "logp_ref": None if ref is None else [float(v) for v in ref[i]], "advantages": [float(advantages[i])] * n,
                "reward": float(rewards[i]) if scored else 0.0, "reward_tier": None if scored else "unscorable",
                "reward_components": [{"name": k, "value": v, "weight": weights.get(k, 1.0)} for k, v in s.parts.items()],
                "is_correct": s.correct, "truncated": not s.terminated, "terminated": s.terminated, "length": n},
                dataset="rollouts", source=s.prompt["dataset"], origin="ai", split="train"))
        self.writer.write(rows)
        self.writer.flush()


def rollout_metrics(samples, rewards, group_of) -> dict[str, float]:
    """What people who debug RL look at: rewards by component, lengths, truncation, groups without signal."""
    import numpy as np

    lengths = np.array([len(s.ids) for s in samples], float)
    ended = np.array([s.terminated for s in samples])
    ok = np.isfinite(rewards)
    out = {"completions/mean_length": float(lengths.mean()), "completions/clipped_ratio": float((~ended).mean()),
           "reward/unscorable_fraction": float((~ok).mean())}
    if ended.any():
        out["completions/mean_terminated_length"] = float(lengths[ended].mean())
    if ok.any():
        stds = [np.std(rewards[(group_of == g) & ok]) for g in np.unique(group_of) if ((group_of == g) & ok).any()]
        out |= {"reward/mean": float(rewards[ok].mean()), "reward/group_std": float(np.mean(stds)),
                "reward/frac_zero_std": float(np.mean([s == 0 for s in stds]))}
    for name in samples[0].parts:
        values = [s.parts[name] for s in samples if s.parts[name] is not None]
        if values:
            out[f"reward/{name}"] = float(np.mean(values))
    verdicts = [s.correct for s in samples if s.correct is not None]
    if verdicts:
        out["train/correct"] = float(np.mean(verdicts))
    return out


def run(stage):
    from stages.chat import renderer_for
    from stages.curves import training_report
    from stages.generation import prompt_rows
    from stages.modeling import freeze, load_policy, policy_to_train, save_policy
    from stages.rewards import build_rewards
    from stages.training import Trainer, fit

    config = stage.config
    row, warnings = resolve_preset(config)
    stage.log(f"{row}")
    for text in warnings:
        stage.warn("rl_settings", text)
    renderer = renderer_for(stage.path("model"))
    prompts = prompt_rows(stage, stage.dataset("data"), config.split, renderer, config.max_prompt_length)
    held_out = []
    if config.eval_prompts:
        held_out = prompt_rows(stage, stage.dataset("data"), "validation", renderer, config.max_prompt_length, config.eval_prompts)
    rewards = build_rewards(config.rewards, stage.inputs, renderer=renderer, device=stage.device)
    model = policy_to_train(stage)
    reference = None
    if row.needs_reference:
        reference = freeze(load_policy(stage.path("reference" if stage.has("reference") else "model"), stage.device))
    source = Rollouts(stage, row, renderer, model, rewards, prompts, reference)
    trainer = Trainer(model, PolicyGradient(row, config), config, source.total_steps, stage.device)
    evaluate = (lambda: held_out_metrics(stage, source, rewards, held_out)) if held_out else None
    fit(stage, trainer, source, evaluate=evaluate, eval_every=config.eval_every)
    source.writer.close({"iterations": source.iteration + 1})
    with stage.output_model("model", role="policy") as directory:
        save_policy(model, renderer.tokenizer, directory, base=stage.inputs["model"].ref)
    summary = {"steps": trainer.step_index, "iterations": source.iteration + 1, "skipped_steps": trainer.skipped,
               **{f"last/{k}": v for k, v in source.metrics.items()}}
    stage.summary(summary)
    if source.metrics.get("completions/clipped_ratio", 0.0) > 0.5:
        stage.warn("mostly_truncated", "More than half of the last completions were cut by max_completion_length, so they teach little. "
                   "Raise max_completion_length or set truncation_policy=mask.")
    if source.metrics.get("reward/frac_zero_std", 0.0) > 0.8:
        stage.warn("dead_groups", "More than 80% of the last groups had equal rewards. Use easier or harder prompts, more "
                   "num_generations, or a graded reward.")
    training_report(stage, f"RL ({config.preset})", summary)


def held_out_metrics(stage, source: Rollouts, rewards, prompts) -> dict[str, float]:
    """One sampled completion per validation prompt, with the same seeds at every call."""
    import numpy as np

    from stages.generation import sample_groups, score

    groups = sample_groups(source.sampler, prompts, source.params, [[stage.seed_for("validation", row["row_id"])] for row, _ in prompts])
    samples = [g[0] for g in groups]
    score(rewards, samples)
    return rollout_metrics(samples, np.array([s.total for s in samples]), np.arange(len(samples)))
