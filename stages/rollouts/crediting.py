"""From scored groups to training items: log-probs, values, shaped rewards, advantages, filters.

The models around the formulas of :mod:`stages.policy.credit`. What moves from iteration to iteration lives here too:
the moving baseline, the baseline table, the KL coefficient and its controller.

Legend: B completions, group after group; T token columns.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import numpy as np

from stages.acting.agents import agent_metrics
from stages.algorithms import BASELINE_ADVANTAGES, RLPreset
from stages.batching import Item, make_item
from stages.policy.credit import Batch, Credit, assign
from stages.reward.debate import debate_metrics
from stages.estimators import (
    KLController,
    MovingAverageBaseline,
    RunningScale,
    apply_truncation,
    covariance_in_band,
    kl_estimates,
    normalise_rewards,
    normalized_sum,
    overlong_penalty,
    table_baseline,
    token_covariances,
    top_covariances,
    top_entropy_tokens,
    v_star,
)
from stages.generation import Sample, preferences
from stages.policy.members import Members
from stages.reward.process_rewards import merged
from stages.rollouts.comparisons import inside, preferences_by
from stages.rollouts.groups import Completions, Group, contexts_of, item_of, stale
from stages.rollouts.logprobs import LogProbs
from stages.rollouts.metrics import (
    credit_metrics,
    cut_gain,
    return_metrics,
    rollout_metrics,
    scorer_accuracy,
    tier_agreement,
    step_metrics,
)
from stages.rollouts.policy import PolicySampler
from stages.rollouts.recorded import ASKING
from stages.rollouts.reprompts import Reprompt, Reprompts
from stages.rollouts.steps import StepRewards, monte_carlo
from stages.reward.rubric_reward import rubric_metrics
from stages.training import TrainingError


@dataclass
class Scored:
    """The completions of one iteration and everything that was computed about them; lists hold a list of token values
    per completion.
    """

    samples: list[Sample]
    group_at: list[Group]  # of every completion
    sampled: list[list[float] | None]  # log-probs by whoever sampled
    old: list[list[float]]  # log-probs that the update's ratios start from
    ref: list[list[float]] | None
    values: list[list[float]] | None
    weights_BT: np.ndarray | None  # importance weights (TIS)
    overlong_B: np.ndarray  # penalties of long completions, at most 0
    batch: Batch
    credit: Credit
    trained_B: np.ndarray
    # log-probs of the policy behind the plain question; ``old`` unless conditioning=sampling
    plain: list[list[float]]
    # P(a completion beats the other of its pair), where the loss reads it and a model compares; NaN = in no pair
    preferred_B: np.ndarray | None = None
    # log-probs of the policy that starts the iteration, where early_stop_kl needs others than ``old``
    start: list[list[float]] | None = None
    # tokens that the policy loss learns from (top_entropy_quantile, covariance_clip); None: all
    learned_BT: np.ndarray | None = None
    kept_close_BT: np.ndarray | None = None  # tokens that pay for |log pi/pi_old| (covariance_kl)
    reprompts: list[Reprompt] | None = None  # what the teacher reads, where there is one
    items: list[Item] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)


class Crediting:
    """Turns the groups of an iteration into items.

    Args:
        stage: for its config, device, inputs and seeds. row: the resolved preset.
        policy: the policy (its log-probs, and continuations for VINEPPO). rewards: what scores those.
        reference, critic: frozen reference and value function; steps: what reasoning steps earn. None where unused.
    """

    def __init__(
        self,
        stage,
        row: RLPreset,
        policy: PolicySampler,
        rewards,
        members: Members,
        reference=None,
        critic=None,
        steps: StepRewards | None = None,
    ):
        self.stage = stage
        self.config = stage.config
        self.row = row
        self.policy = policy
        self.rewards = rewards
        self.members = members
        self.critic, self.steps = critic, steps
        self.logprobs = LogProbs(stage, row, policy, reference)
        self.baseline, self.scale = MovingAverageBaseline(self.config.baseline_decay), RunningScale()
        self.asked = preferences_by(self.config, row, rewards)  # component that gives P(y > y'), where one compares
        self.controller = KLController(
            row.kl_loss_coef or row.kl_reward_coef,
            row.kl_controller,
            row.target_kl,
            self.config.kl_coef_min,
            self.config.kl_coef_max,
            self.config.k_beta,
            self.config.kl_horizon,
        )
        self.table: dict[str, float] = {}  # baseline per prompt id
        self.reprompts = None
        if row.distillation_weight:
            from stages.decoding.decoders import max_positions

            limits = [max_positions(m) for m in (policy.model, reference) if m is not None]
            limit = min((n for n in limits if n is not None), default=None)
            self.reprompts = Reprompts(self.config, policy.renderer, limit, members)
        self.last_kl, self.measured = 0.0, 0  # to the reference, nats in kl_unit, and of how many completions
        self.frozen_logps: int | None = None

    def __call__(self, groups: list[Group], iteration: int, version: int) -> Scored:
        """Items, metrics and all numbers behind them, of groups trained on from optimizer step ``version`` on."""
        config, row = self.config, self.row
        all_B = Completions.of(groups)
        samples, mask, padded = all_B.samples, all_B.mask_BT, all_B.padded
        items = [item_of(g, ids, own) for g in groups for ids, own in contexts_of(g)]
        logps = self.logprobs.read(groups, samples, items, version)
        weights, bounds, rejected = self.logprobs.corrections(all_B, logps)
        values, after = self.critic.values(items) if self.critic is not None else (None, 0.0)

        # those of another run by the limit of now
        overlong, punished = self._overlong(samples, [version if g.version < 0 else g.version for g in all_B.group_at])
        rewards, bootstrap, kept = self._truncated(samples, overlong, after)
        metrics = self._completion_metrics(all_B, rewards, kept, logps.plain, overlong if punished else None)
        log_ratio = None if logps.ref is None else padded(logps.old) - padded(logps.ref)
        kl, found = self._kl(all_B, log_ratio, items)
        metrics |= found | trajectory_metrics(config, self.policy, all_B.those(all_B.said_B))
        finite = np.isfinite(rewards)
        # behind the metrics: alarms compare the plain sums of iterations, these have mean 0
        rewards, found = self._scaled(all_B, rewards, overlong)
        metrics |= found

        in_loss = kept & (config.sft_in_loss | np.array([s.mode != "sft" for s in samples]))
        # where steps are paid, the outcome is only watched
        scorable = finite if self.steps is None else np.ones(len(samples), bool)
        counted = scorable & (kept | config.truncated_in_stats)
        batch = Batch(
            rewards,
            all_B.group_of_B,
            mask,
            scorable & in_loss,
            counted,
            kl,
            self._baselines(all_B.group_at, all_B.new_B[counted]),
            None if values is None else padded(values),
            bootstrap,
            log_ratio_BT=log_ratio,
            rejected_BT=rejected if config.rejection_scope == "drop" else None,
        )
        if row.advantage == "token_baseline":
            # of the policy as it is, also where ratios are to whoever sampled
            theirs = logps.old is logps.sampled and (not self.policy.exact_logps or stale(groups, version))
            own = self.logprobs.of(self.policy.model, items) if theirs else logps.old
            batch.energy_BT = (1.0 - 2.0 * np.exp(padded(own)) + padded(self.logprobs.collisions(items))) * (
                1.0 if weights is None else np.square(weights)
            )
        self._compare(batch, samples, all_B.group_at, iteration, version)
        # equal win rates inside the group say nothing of those that are learned from
        if self.asked and not inside(row):
            metrics.pop("frac_reward_zero_std", None)
        metrics |= self._comparison_metrics(batch)

        credit, trained, preferred, found = self._assigned(all_B, batch)
        metrics |= found | self.logprobs.correction_metrics(batch, trained, weights, bounds, rejected)
        if rejected is not None and config.rejection_scope == "zero":
            weights = np.where(rejected, 0.0, 1.0 if weights is None else weights)
        metrics |= self.logprobs.sampler_metrics(groups, samples, logps, items, version)
        learned, kept_close, found = self._learned_tokens(all_B, logps.old, batch, credit, trained, items, iteration)
        metrics |= found
        scored = Scored(
            samples,
            all_B.group_at,
            logps.sampled,
            logps.old,
            logps.ref,
            values,
            weights,
            overlong,
            batch,
            credit,
            trained,
            logps.plain,
            preferred,
            logps.start,
            learned,
            kept_close,
            metrics=metrics,
        )
        if self.reprompts is not None:
            scored.reprompts, found = self.reprompts(groups)
            metrics |= found
        scored.items = self._items(scored, items)
        # entropy, ratios and KL of the update are means over these groups' tokens
        if tokens := sum(i.n_targets for i in scored.items):
            metrics["groups/forwarded_fraction"] = (
                sum(i.n_targets for i in scored.items if not i.extra["skip_forward"]) / tokens
            )
        self.frozen_logps = _digest(scored.items)
        return scored

    # -- metrics ------------------------------------------------------------------------------------------------------
    def _completion_metrics(self, all_B: Completions, rewards, kept, plain, overlong) -> dict[str, float]:
        """Of the completions themselves and what they were paid; ``overlong``: penalties of long ones, if there are."""
        shown, said = all_B.shown_B, all_B.said_B
        drawn = all_B.those(shown)
        metrics = rollout_metrics(drawn, rewards[shown], all_B.group_of_B[shown], self.row.std_ddof) | scorer_accuracy(
            drawn, all_B.group_of_B[shown], self.config.rewards
        )
        metrics |= tier_agreement(drawn, all_B.group_of_B[shown], self.config.rewards)
        if self.stage.has("stored"):  # whose rows do not say what ended a completion
            metrics.pop("completions/eos_missing_fraction", None)
        if self.members.component:
            metrics |= rubric_metrics(
                [s.items for s in drawn],
                [s.parts.get(self.members.component.name) for s in drawn],
                self.members.component.flag_below,
                [s.mode != "sft" for s in drawn],
            )
        drawn = all_B.those(said)
        if self.row.truncation_policy != "bootstrap":  # which pays a cut completion by the value of its end
            metrics |= cut_gain(drawn, rewards[said], kept[said])
        if self.members.active:
            metrics |= self.members.metrics(all_B.samples, plain)
        if formed := [
            s.parts[c.name]
            for c in self.config.rewards
            if c.kind == "format"
            for s in drawn
            if s.parts.get(c.name) is not None
        ]:
            metrics["completions/format_valid"] = float(np.mean(formed))
        if overlong is not None:
            metrics["reward/overlong"] = float(overlong[said].mean()) if drawn else 0.0
        return metrics

    def _comparison_metrics(self, batch: Batch) -> dict[str, float]:
        """Of what rewards are compared with: opponents, steps and baselines."""
        row, metrics = self.row, {}
        if batch.preference_BO is not None and np.isfinite(batch.preference_BO).any():
            metrics["preference/win_rate"] = float(np.nanmean(batch.preference_BO))
        if batch.steps:
            metrics["completions/without_steps"] = float(np.mean([not ends for ends, _ in batch.steps]))
        if row.advantage == "process":
            metrics |= step_metrics(batch)
        if row.advantage in BASELINE_ADVANTAGES and row.baseline != "none":
            known = (
                self.baseline.value
                if row.baseline == "moving_average"
                else batch.baseline
                if not callable(batch.baseline) and row.baseline != "batch_mean"
                else None
            )
            if known is not None and np.isfinite(known).any():
                metrics["reward/baseline"] = float(np.nanmean(known))
        return metrics

    # -- what advantages read ----------------------------------------------------------------------------------------
    def _overlong(self, samples, steps) -> tuple[np.ndarray, bool]:
        """(penalties of long completions [B], whether there are any), each by the length limit of the optimizer step at
        which it was drawn. A control experiment has none.
        """
        config, found, punished = self.config, np.zeros(len(samples)), False
        limits = np.array([config.completion_limit(step) for step in steps], int)
        for limit in np.unique(limits) if config.reward_override == "none" else ():
            cache = (
                round(self.row.soft_punish_share * int(limit))
                if config.soft_punish_cache is None
                else config.soft_punish_cache
            )
            if cache:
                at, punished = np.flatnonzero(limits == limit), True
                found[at] = overlong_penalty([len(samples[i].ids) for i in at], int(limit), cache)
        return found, punished

    def _kl(self, all_B: Completions, log_ratio, items) -> tuple[np.ndarray | None, dict[str, float]]:
        """(the KL to the reference that the reward pays for [B, T], None where it pays none; metrics). ``log_ratio``:
        log pi_old/pi_ref, None without a reference. The measured KL is what the controller sees.
        """
        config, row, metrics, kl = self.config, self.row, {}, None
        if log_ratio is None:
            return kl, metrics
        # an estimate of KL(policy || reference) is over what the policy said to the question itself
        own = all_B.new_B & np.array([not s.off_policy for s in all_B.samples])
        self.measured = int(own.sum())
        if self.measured:
            sums, counts = log_ratio[own].sum(1), all_B.mask_BT[own].sum(1)
            metrics["kl/sequence_sum"] = float(sums.mean())
            if config.kl_unit != "sequence_sum":
                metrics[f"kl/{config.kl_unit}"] = float(
                    log_ratio[own].sum() / max(counts.sum(), 1)
                    if config.kl_unit == "token_mean"
                    else (sums / np.maximum(counts, 1)).mean()
                )
            self.last_kl = metrics[f"kl/{config.kl_unit}"]
        if row.kl_reward_coef and config.kl_reward_estimator == "full":
            kl = all_B.padded(self.logprobs.exact_kl(items))
            if (said := all_B.said_B).any():
                metrics["kl/full_sequence_sum"] = float(kl[said].sum(1).mean())
        elif row.needs_reference:
            kl = kl_estimates(log_ratio, config.kl_reward_estimator)
        return kl, metrics

    def _scaled(self, all_B: Completions, rewards, overlong) -> tuple[np.ndarray, dict[str, float]]:
        """(rewards on the scale that advantages read, metrics): their components normalised in the group, then the sums
        by the run's own mean and deviation, and clipped, each where it is asked for; NaN stays.
        """
        config, samples = self.config, all_B.samples
        finite, metrics = np.isfinite(rewards), {}
        if config.multi_objective_aggregation == "normalize_then_sum":
            rewards = np.where(finite, self._normalized(samples, overlong, all_B.group_of_B), np.nan)
        if config.reward_norm == "none" and config.reward_clip is None:
            return rewards, metrics
        # a bootstrapped completion has no reward: its end's value stands in for it
        paid = finite & np.array([self.row.truncation_policy != "bootstrap" or s.terminated for s in samples])
        if paid.any():
            metrics = {
                "reward/norm_mean": float(rewards[paid].mean()),
                "reward/norm_std": float(rewards[paid].std()),
            }
        normalised = normalise_rewards(
            np.where(paid, rewards, np.nan), config.reward_norm, self.scale, config.reward_clip, all_B.new_B
        )
        return np.where(paid, normalised, rewards), metrics

    def _normalized(self, samples, overlong, group_of):
        """Rewards whose components, the penalty of long completions one of them, are normalised in their group and then
        weighted (``multi_objective_aggregation``).
        """
        names = list(dict.fromkeys(name for s in samples for name in s.weights or ()))
        parts = [[s.parts[name] if name in (s.weights or ()) else np.nan for s in samples] for name in names]
        weights = [[(s.weights or {}).get(name, 0.0) for s in samples] for name in names]
        counted = np.array(
            [
                np.isfinite(s.total)
                and (self.row.truncation_policy != "mask" or self.config.truncated_in_stats or s.terminated)
                for s in samples
            ]
        )
        return normalized_sum(
            [*parts, overlong],
            [*weights, np.ones(len(samples))],
            group_of,
            self.row.std_ddof,
            self.row.std_eps,
            counted,
        )

    def _truncated(self, samples, overlong, after):
        """(rewards [B], NaN = unscorable; value after the last token [B]; rows that are kept [B]) by the rule for
        completions without end.
        """
        config, rule = self.config, self.row.truncation_policy
        scores = np.array([s.total for s in samples])
        rewards, bootstrap, kept = apply_truncation(
            scores + overlong,
            [s.terminated for s in samples],
            rule,
            config.missing_eos_penalty,
            config.missing_eos_mode,
            after,
        )
        if self.policy.agent and rule == "bootstrap":
            # what the turns of a truncated trajectory earned is kept; its value is what may still come
            rewards = scores + overlong
        elif rule == "bootstrap":  # and so is what finished steps earned of a cut completion
            rewards = np.where(
                [s.terminated for s in samples],
                rewards,
                [sum(s.step_rewards[1]) if s.step_rewards else 0.0 for s in samples],
            )
        return np.where(np.isfinite(scores), rewards, np.nan), bootstrap, kept

    def earned(self, samples: list[Sample], version: int) -> np.ndarray:
        """Rewards ``[B]`` of completions that those of a batch are compared with (greedy ones, opponents', of the
        starting policy, continuations), all drawn at optimizer step ``version``, by the same rules for cut and long
        ones; NaN = unscorable."""
        return self._truncated(samples, self._overlong(samples, [version] * len(samples))[0], 0.0)[0]

    def _baselines(self, group_at, new):
        """The baseline as ``Batch`` takes it; ``new``: which of the counted rewards a moving average does not hold
        yet.
        """
        kind = self.row.baseline if self.row.advantage in BASELINE_ADVANTAGES else "none"
        if kind == "moving_average":
            return lambda rewards: self.baseline.use(rewards, new)
        if kind == "batch_mean" and self.row.advantage == "reward_to_go":  # of whole rewards: group_advantage
            return lambda rewards: float(rewards.mean()) if len(rewards) else 0.0
        if kind == "constant":
            return self.config.baseline_value
        if kind == "greedy":
            # unscorable: the group has no baseline and teaches nothing
            found = {id(g): self.earned([g.greedy_sample], g.version)[0] for g in group_at}
            return np.array([found[id(g)] for g in group_at])
        if kind in ("table", "v_star"):
            ids = [g.prompt["prompt_id"] for g in group_at]
            if self.config.baseline_missing == "batch_mean" and not self.table.keys() >= set(ids):
                return lambda rewards: table_baseline(ids, self.table, float(rewards.mean()) if len(rewards) else 0.0)
            return table_baseline(ids, self.table)
        return 0.0

    def _compare(self, batch: Batch, samples, group_at, iteration: int, version: int) -> None:
        """Fill in turns, reasoning steps and preferences over opponents, where the advantage reads them."""
        if self.policy.agent:
            batch.turns = [([t["end"] - 1 for t in s.turns], s.turn_rewards or [0.0] * len(s.turns)) for s in samples]
        elif any(s.step_rewards is not None for s in samples):
            batch.turns, batch.steps_paid = [s.step_rewards or merged({}, {}, len(s.ids)) for s in samples], True
        if self.row.advantage == "vine":
            batch.steps, batch.step_values = monte_carlo(
                self.stage, self.policy, self.rewards, samples, group_at, iteration, version, self.earned
            )
        elif self.row.advantage == "process":
            batch.steps = batch.turns if self.steps is None else [self.steps(s) for s in samples]
        elif self.row.advantage == "win_rate":
            # as shaped: a penalty that nobody compares would be none
            own = np.where(batch.counted_B, batch.rewards_B, np.nan)
            others = {
                id(g): (
                    self.earned(g.opponents, g.version) if g.opponents else own[batch.group_of_B == batch.group_of_B[i]]
                )
                for i, g in enumerate(group_at)
                if not i or g is not group_at[i - 1]
            }
            batch.preference_BO = self._won(batch, samples, group_at, others)

    def _won(self, batch: Batch, samples, group_at, others: dict[int, np.ndarray]) -> np.ndarray:
        """P(completion beats each of its opponents) ``[B, O]``, NaN where a score is missing: of the model that
        compares, else of a Bradley-Terry model of the scores. ``others``: scores of a group's opponents, by the group's
        id. A completion beats itself with 1/2 (SPPO)."""
        from scipy.special import expit

        out = np.full((len(samples), max(map(len, others.values()))), np.nan)
        if self.asked is None:
            for i, group in enumerate(group_at):
                out[i, : len(others[id(group)])] = expit(batch.rewards_B[i] - others[id(group)])
            return out
        asked, start = {}, {}
        for i, group in enumerate(group_at):
            first = start.setdefault(id(group), i)
            for j, opponent in enumerate(group.opponents or group.samples):
                if not np.isfinite(batch.rewards_B[i]) or not np.isfinite(opponent.total):
                    continue
                if group.opponents or i - first < j:
                    asked[i, j] = samples[i], opponent
                elif i - first == j:
                    out[i, j] = 0.5
        for (i, j), p in zip(asked, self._preferences(list(asked.values()))):
            out[i, j] = p
            if not group_at[i].opponents:
                first = start[id(group_at[i])]
                out[first + j, i - first] = 1.0 - p
        for i, group in enumerate(group_at):  # completions that are in no statistic are nobody's opponents
            out[i, : len(others[id(group)])][~np.isfinite(others[id(group)])] = np.nan
        return out

    def _preferences(self, pairs) -> np.ndarray:
        """P(first is better) of pairs of samples by the model that compares, turned around where the rewards are
        (``reward_override``).
        """
        found = np.array(preferences(self.rewards, self.asked, pairs), float)
        return 1.0 - found if self.config.reward_override == "inverted" else found

    def _paired(self, samples, group_at, trained_B) -> np.ndarray:
        """P(a completion beats the other of its pair) ``[B]``; NaN in no pair, or where the model's answer could not be
        read. Pairs are those of the loss (:func:`stages.policy.policy_update.pairs_of`): neighbours among a group's
        trained completions. A record's are taken where they were asked for."""
        asked = next(c for c in self.rewards.components if c.name == self.asked)
        if self.stage.has("recorded") and asked.kind in ASKING:
            return np.array([np.nan if s.preferred is None else s.preferred for s in samples])
        out, pairs = np.full(len(samples), np.nan), []
        for _, members in itertools.groupby(range(len(samples)), lambda i: id(group_at[i])):
            live = [i for i in members if trained_B[i] and any(samples[i].action_mask)]
            pairs += zip(live[0::2], live[1::2])
        for (i, j), p in zip(pairs, self._preferences([(samples[i], samples[j]) for i, j in pairs])):
            out[i], out[j] = p, 1.0 - p
        return out

    # -- credit and the tokens that learn from it ----------------------------------------------------------------------
    def _assigned(self, all_B: Completions, batch: Batch) -> tuple[Credit, np.ndarray, np.ndarray | None, dict]:
        """(credit, completions that are trained on [B], P(a completion beats the other of its pair) [B] where the loss
        reads it, metrics).
        """
        config, row, metrics = self.config, self.row, {}
        # with two KLs the controller's is the loss's
        coef = row.kl_reward_coef if row.kl_loss_coef else self.controller.coef
        drop_dead = config.zero_advantage == "mask" and row.compares
        credit = assign(row, batch, coef, config.advantage_clip, drop_dead)
        trained = batch.kept_B & credit.informative_B if drop_dead else batch.kept_B
        if row.unit == "pairs":  # whose odd one the loss leaves out (policy_update.pairs_of)
            live = batch.trained(trained).any(1)
            metrics["groups/unpaired_sequences"] = float((np.bincount(all_B.group_of_B[live]) % 2).sum())
        preferred = None
        if row.pair_preference and self.asked:
            preferred = self._paired(all_B.samples, all_B.group_at, trained)
            trained = trained & np.isfinite(preferred)
        metrics |= credit_metrics(batch, credit, trained, coef, self.controller.coef, row.gamma)
        if batch.steps_paid or row.advantage in ("reward_to_go", "gae", "turn_returns"):
            metrics |= return_metrics(batch, credit, trained, row.gamma)
        return credit, trained, preferred, metrics

    def _learned_tokens(self, all_B: Completions, old, batch: Batch, credit: Credit, trained, items, iteration: int):
        """(tokens that the policy loss learns from [B, T], None = all; tokens that are held near the policy that sampled
        [B, T], None = none; metrics): those of high entropy, and by how log-prob and advantage vary together.
        """
        config, metrics, learned, kept_close = self.config, {}, None, None
        if config.top_entropy_quantile < 1:
            entropies = all_B.padded(self.logprobs.entropies(items))
            learned, metrics["entropy/threshold"] = top_entropy_tokens(
                entropies, batch.trained(trained), config.top_entropy_quantile
            )
        if config.covariance_clip or config.covariance_kl:
            on = batch.trained(trained)
            found = token_covariances(all_B.padded(old), credit.advantages_BT, on)
            metrics["covariance/max"] = float(found[on].max()) if on.any() else 0.0
            if config.covariance_clip:
                left_out = covariance_in_band(
                    found, on, config.covariance_clip, config.covariance_band, self.stage.rng("covariance", iteration)
                )
                learned = (on if learned is None else learned) & ~left_out
                metrics["covariance/clip_fraction"] = float(left_out.sum() / max(on.sum(), 1))
            if config.covariance_kl and on.any():
                kept_close = top_covariances(found, on, config.covariance_kl)
        return learned, kept_close, metrics

    # -- items ---------------------------------------------------------------------------------------------------------
    def _items(self, scored: Scored, items: list[Item]) -> list[Item]:
        """The groups again, with what the update reads; ``skip_forward`` where it could not move a weight."""
        config, row, advantages = self.config, self.row, scored.credit.advantages_BT
        # one number is stored where every completion has one advantage for all its tokens
        by_row = bool((np.where(scored.batch.mask_BT, advantages - advantages[:, :1], 0.0) == 0).all())
        on, final, start = scored.batch.trained(scored.trained_B), [], 0
        for item in items:
            rows = range(start, start + len(item.responses))
            start += len(rows)

            def cut(array):
                return [array[i, : len(scored.samples[i].ids)].tolist() for i in rows]

            extra = {
                "old_logps": [list(map(float, scored.old[i])) for i in rows],
                "advantages": [float(advantages[i, 0]) for i in rows] if by_row else cut(advantages),
            }
            if scored.ref is not None:
                extra["ref_logps"] = [list(map(float, scored.ref[i])) for i in rows]
            if scored.start is not None:
                extra["start_logps"] = [list(map(float, scored.start[i])) for i in rows]
            if scored.weights_BT is not None:
                extra["weights"] = cut(scored.weights_BT)
            if scored.learned_BT is not None:
                extra["learned"] = cut(scored.learned_BT.astype(float))
            if scored.kept_close_BT is not None:
                extra["kept_close"] = cut(scored.kept_close_BT.astype(float))
            if (
                config.off_policy_mask_threshold is not None
                and scored.old is not scored.sampled
                and all(logps is not None for logps in scored.sampled)
            ):
                # nobody sampled an SFT answer, and improved ones from something else than they are trained behind
                extra["sampler_logps"] = [
                    list(map(float, (scored.old if scored.samples[i].off_policy else scored.sampled)[i])) for i in rows
                ]
            if scored.values is not None:
                extra |= {"values": [scored.values[i] for i in rows], "returns": cut(scored.credit.returns_BT)}
            if row.objective:
                extra["rewards"] = [float(scored.credit.rewards_B[i]) for i in rows]
            if scored.preferred_B is not None:
                extra["preferences"] = [float(np.nan_to_num(scored.preferred_B[i], nan=0.5)) for i in rows]
            if row.positive_nll_coef:
                extra["correct"] = [bool(scored.samples[i].correct) for i in rows]
            if scored.reprompts is not None:
                extra["teacher_prompts"] = [scored.reprompts[i].ids for i in rows]
            masks = [on[i, : len(scored.samples[i].ids)].astype(int) for i in rows]
            by_response = tuple(extra)
            extra["skip_forward"] = not any(m.any() for m in masks) or bool(
                not row.objective
                and not (row.distillation_weight < 1 and advantages[rows.start : rows.stop].any())
                and not any(ids is not None for ids in extra.get("teacher_prompts", ()))
                and not row.kl_loss_coef
                and not config.pays_entropy
                and not row.positive_nll_coef
                and not (self.critic is not None and self.critic.trainer is None)
                and not (scored.kept_close_BT is not None and scored.kept_close_BT[rows.start : rows.stop].any())
                and row.update != "trust_region"
            )  # whose KL is a mean over the same tokens as its surrogate
            final.append(make_item(item.row_id, item.prompt, item.responses, masks, by_response=by_response, **extra))
        return final

    # -- between iterations --------------------------------------------------------------------------------------------
    def finish(self, items: list[Item]) -> None:
        """Check that the iteration's log-probs stayed what they were (ops.invariants), and move the KL controller."""
        if self.frozen_logps not in (None, _digest(items)):
            raise TrainingError(
                "The stored log-probabilities of a rollout changed while it was trained on; report this with the"
                " config."
            )
        if self.controller.controller == "fixed":
            return
        if self.row.kl_loss_coef and self.row.kl_target == "old":
            self.controller.update(self.logprobs.drift(items), sum(len(i.responses) for i in items))
        elif self.measured:
            self.controller.update(self.last_kl, self.measured)

    def baseline_of(self, group: list[Sample]) -> tuple[float, list[Sample]] | None:
        """(value, the completions behind it) of a prompt's scored completions before training (BASELINE table and
        v_star, ASTAR-PO stage 1), on the scale of the rewards that it is taken off; None where none could be scored."""
        rewards, _, kept = self._truncated(group, self._overlong(group, [0] * len(group))[0], 0.0)
        counted = np.isfinite(rewards) & (kept | self.config.truncated_in_stats)
        if not counted.any():
            return None
        value = (
            v_star(rewards[counted].tolist(), self.config.v_star_beta)
            if self.row.baseline == "v_star"
            else float(np.mean(rewards[counted].tolist()))
        )
        return value, [s for s, on in zip(group, counted) if on]

    def state(self) -> dict:
        return {
            "baseline": self.baseline.state_dict(),
            "scale": self.scale.state_dict(),
            "controller": self.controller.state_dict(),
            "last_kl": self.last_kl,
            "measured": self.measured,
            "table": self.table,
        }

    def restore(self, state: dict) -> None:
        self.baseline.load_state_dict(state["baseline"])
        self.scale.load_state_dict(state["scale"])
        self.controller.load_state_dict(state["controller"])
        self.last_kl, self.measured, self.table = state["last_kl"], state["measured"], state["table"]


def _digest(items: list[Item]) -> int:
    return hash(tuple(v for i in items for row in i.extra["old_logps"] for v in row))


def trajectory_metrics(config, policy: PolicySampler, samples: list[Sample]) -> dict[str, float]:
    """Metrics of agents or debates; none without an environment."""
    if policy.seats == 2:
        return debate_metrics(samples, next(c.name for c in config.rewards if c.kind == "debate"))
    return agent_metrics(samples, config.rewards) if policy.agent else {}
