"""The source of the training loop in RL: collects iterations of rollouts, hands them out in minibatches, and holds what
a run resumes from.
"""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import torch

from stages.algorithms import RLPreset
from stages.batching import Item, make_item
from stages.estimators import EntropyController, Multipliers
from stages.generation import check_continued, score, warn_of_failures
from stages.models.modeling import load_weights, move_towards, weights_digest, weights_file
from stages.models.sharding import Acting
from stages.policy.alarms import WATCHED, alarms, watched
from stages.policy.held_models import follows_policy
from stages.policy.members import Members
from stages.policy.schedules import changed_roles, freshness_guard, reference_due, stops_early
from stages.reward.verdicts import commonest_failure, failures
from stages.reward_models.reward_eval import warn_of_fooled
from stages.rollouts.ahead import Ahead
from stages.rollouts.beside import Beside
from stages.rollouts.comparisons import (
    NOTHING_COUNTED,
    check_company,
    check_constraints,
    counted,
    held_out,
    preferences_by,
)
from stages.rollouts.crediting import Crediting, trajectory_metrics
from stages.rollouts.groups import Group, GroupSampler, item_of
from stages.rollouts.metrics import rollout_metrics
from stages.rollouts.minibatches import minibatch
from stages.rollouts.policy import PolicySampler, agent_for, opponent_for
from stages.rollouts.prompts import PromptOrder, counts_of, verdict_counts, verdicts_on
from stages.rollouts.recorded import Recorded
from stages.rollouts.records import Records
from stages.rollouts.replay import ReplayWindow, StoredGroups, full_group, plain_group
from stages.rollouts.steps import StepRewards
from stages.running import usage
from stages.running.blocks import in_blocks
from stages.spec import ConfigError
from stages.training import TrainingError, was_skipped
from storage.checkpoints import Files


class Rollouts:
    """Source of training items (``stages.training.Source``) of the RL stage.

    Args:
        row: the resolved preset.
        prompts: ``(row, prompt ids)`` to train on.
        reference, old, critic: frozen reference, copy of the policy that sampled (exact KL to it), value function; None
            where unused.
        start: the policy as it started, whose distance validation passes log (:mod:`stages.rollouts.beside`), or None.
        acting: the policy, and what is sampled from in this process (``sharding.Acting``).
    """

    def __init__(
        self,
        stage,
        row: RLPreset,
        renderer,
        acting: Acting,
        rewards,
        prompts,
        *,
        reference=None,
        old=None,
        critic=None,
        start=None,
    ):
        config = self.config = stage.config
        self.stage = stage
        self.row = row
        self.rewards = rewards
        self.reference = reference
        self.old = old
        self.critic = critic
        if stage.has("stored"):
            check_stored(stage, row)
        check_company(config, row, rewards, stage.has("stored"))
        warn_of_fooled(stage, rewards.components, rewards.scorers)
        check_constraints(rewards)
        self.held_out = held_out(stage, rewards)
        self.policy = PolicySampler(stage, renderer, acting, agent_for(config, row, renderer, rewards, stage))
        if row.advantage == "vine" and self.policy.agent is None:
            check_continued(self.policy.engine, self.policy.params)
        self.steps_per_batch = row.num_iterations * config.num_minibatches
        self.total_steps = config.max_steps
        members = self.members = Members(stage, renderer, rewards)
        members.check(prompts)
        self.opponent = opponent_for(stage, row, self.policy, reference)
        self.order = PromptOrder(config, prompts, stage.rng, self.total_steps)
        steps = self.steps = (
            StepRewards(stage, renderer) if row.advantage == "process" and self.policy.agent is None else None
        )
        self.groups = GroupSampler(stage, row, self.policy, rewards, members, self.opponent, steps)
        self.multipliers = Multipliers(
            {c.name: (c.weight, c.at_least, c.multiplier_step) for c in config.rewards if c.at_least is not None}
        )
        self.entropy = EntropyController(
            config.entropy_coef,
            config.entropy_target if config.use_adaptive_entropy else None,
            config.entropy_coef_delta,
            config.entropy_coef_min,
            config.entropy_coef_max,
        )
        self.window = ReplayWindow(config, prompts, stage.rng, self.total_steps) if config.replay_fraction else None
        self.stored = StoredGroups(stage, prompts) if stage.has("stored") else None
        if self.stored is not None and row.unit == "pairs":
            odd, n = sum(len(g.samples) % 2 for g in self.stored.groups), len(self.stored.groups)
            if odd:
                stage.warn(
                    "stored_unpaired",
                    f"{odd} of {n} groups of the input stored have an odd number of completions, which the loss of"
                    f" preset={config.preset} compares two by two, so that one of each is not trained on (metric"
                    " groups/unpaired_sequences). Store rollouts of an even num_generations, or write preset=topr.",
                )
        self.recorded = Recorded(stage, row, prompts, self.groups) if stage.has("recorded") else None
        self.ahead = Ahead(stage.device) if config.async_rollouts and self.recorded is None else None
        if self.ahead is not None and stage.device.startswith("cuda"):
            stage.log(
                "async_rollouts: attention's backward is not deterministic on a GPU while a thread samples, so a run"
                " that was killed may end with other last bits than an undisturbed one"
            )
        # what GroupSampler.fill gave for the next iteration, once it was waited for
        self.sampled_ahead: tuple | None = None
        if self.ahead is not None:
            check_ahead(stage, row, self.policy.exact_logps, members)
        self.rows = {row["row_id"]: row for row, _ in prompts}
        if self.stored is not None and preferences_by(config, row, rewards):
            raise ConfigError(
                "the input stored has no texts, so no model can compare them (advantage=win_rate); write"
                " advantage=reward_minus_baseline, or leave the input stored out."
            )
        if self.stored is not None and steps is not None and steps.reads_text:
            raise ConfigError(
                "the input stored has no texts, which a process reward model reads (advantage=process); give a scalar"
                " reward_model, or leave the input stored out."
            )
        self.crediting = Crediting(stage, row, self.policy, rewards, members, reference, critic, steps)
        self.beside = Beside(stage, row, self.policy, self.held_out, self.crediting, reference, start)
        self.records = Records(stage, members, self.policy)
        self.ptx = pretraining_items(stage.dataset("ptx"), renderer, config.ptx_max_length) if row.ptx_coef else []
        self.ptx_held_out = (
            pretraining_items(stage.dataset("ptx"), renderer, config.ptx_max_length, "validation")
            if row.ptx_coef and config.eval_prompts
            else []
        )
        self.on_new_batch = lambda: None  # called when an iteration's items are ready
        self.iteration, self.inner, self.version = -1, 0, 0  # version: optimizer steps of the policy that sampled
        self.batch: list[Item] = []  # items of the iteration in hand
        self.current: list[Item] = []  # of the optimizer step in hand
        self.metrics: dict[str, float] = {}
        self.step_tokens = 0
        self.warmed = not row.critic_warmup_steps or critic is None or critic.trainer is None
        self.holds_reference = holds_reference(row, config)
        self.moves_due = 0  # of the reference, where it is held through an iteration
        self.history: list[dict] = []  # what alarms read of the steps so far
        self.why_unscorable = ""  # the commonest reason among the newest completions that could not be scored
        fixed = {
            f"the scorer of {name}": scorer.model
            for name, scorer in rewards.scorers.items()
            if isinstance(getattr(scorer, "model", None), torch.nn.Module)
        }
        if reference is not None and config.ref_mode in ("frozen", "previous"):
            fixed["reference"] = reference
        self.fixed = fixed
        self.frozen: dict[str, str] | None = None  # digests of `fixed`, once its weights are where they stay

    def kl_loss_coef(self) -> float:
        """Current coefficient of the KL in the loss."""
        return self.crediting.controller.coef if self.row.kl_loss_coef else 0.0

    # -- Source protocol ------------------------------------------------------------------------------------------
    def items(self, step: int) -> list[Item]:
        self.step_tokens = 0
        if self.frozen is None:
            self.frozen = {name: weights_digest(part) for name, part in self.fixed.items()}
        used = self.iteration < 0 or self.inner >= self.steps_per_batch
        early = bool(
            not used
            and self.config.early_stop_kl
            and self.inner
            and stops_early(
                self.crediting.logprobs.drift(self._minibatch(), since_start=True), self.config.early_stop_kl
            )
        )
        if used or early:
            self._next_iteration(step)
            if self.config.early_stop_kl:
                self.metrics["policy/early_stops"] = float(early)  # of the iteration before
        chosen = self.current = self._minibatch()
        if not self.ptx:
            return chosen
        return chosen + self._drawn_text(chosen, step)

    def _minibatch(self) -> list[Item]:
        n = self.config.num_minibatches
        if n == 1:
            return self.batch
        epoch, part = divmod(self.inner, n)
        return minibatch(
            self.batch, self.config.minibatch_unit, n, part, self.stage.rng("minibatches", self.iteration, epoch)
        )

    def after_step(self, step: int, metrics: dict[str, float]) -> dict[str, float]:
        first = self.inner == 0
        self.inner += 1
        self._check_ratio(first, metrics.get("policy/ratio_deviation", 0.0))
        extra = dict(self.metrics) if first else {}
        if self.critic is not None:
            extra |= self.critic.train(self.current)
        # a step that was skipped moves no model, and is none of those that are counted
        skipped, taken = was_skipped(metrics), step - int(metrics.get("skipped_steps", 0))
        self.moves_due += (
            self.reference is not None
            and not skipped
            and reference_due(self.config.ref_mode, taken, self.config.ref_sync_steps)
        )
        averaged = self.opponent is not None and self.row.opponent == "ema" and not skipped
        if not self.holds_reference or self.inner >= self.steps_per_batch:
            self._move_reference()
        if averaged:
            move_towards(self.opponent.model, self.policy.model, self.config.opponent_decay)
        if self.reference is not None or self.config.ref_mode == "previous":  # how often it moved (REF-POLICY)
            mode, every = self.config.ref_mode, self.config.ref_sync_steps
            extra["kl/reference_version"] = float(
                {"ema": taken, "refresh": taken // every, "previous": self.iteration}.get(mode, 0) - self.moves_due
            )
        if self.row.num_iterations > 1:  # which pass over the batch the ratios and approx_kl of the step are of
            extra["policy/epoch"] = float((self.inner - 1) // self.config.num_minibatches + 1)
        if self.config.pays_entropy:
            if self.config.use_adaptive_entropy:
                extra["entropy_coef/paid"] = self.entropy.paid()
                if not skipped and "entropy" in metrics:
                    self.entropy.update(metrics["entropy"])
            extra["entropy_coef"] = self.entropy.coef
        # effective sample size over the tokens, (sum w)^2 / (n sum w^2) (ops.monitor)
        if metrics.get("policy/ratio_sq"):
            extra["policy/ess_fraction"] = metrics["policy/ratio"] ** 2 / metrics["policy/ratio_sq"]
        elif metrics.get("policy/importance_weight_sq"):
            # over the responses, whose weights these are (TOPR, OFFPOL-IS)
            extra["policy/importance_weight_ess"] = (
                metrics["policy/importance_weight"] ** 2 / metrics["policy/importance_weight_sq"]
            )
        self.watch({"step": step, **metrics, **extra})
        return extra

    def _move_reference(self) -> None:
        """Make the moves that are due, all towards the policy as it is now (REF-POLICY)."""
        if self.moves_due:
            keep = self.config.ref_decay if self.config.ref_mode == "ema" else 1.0 - self.config.ref_sync_alpha
            move_towards(self.reference, self.policy.model, keep**self.moves_due)
            self.moves_due = 0

    def watch(self, values: dict[str, float]) -> None:
        """Take note of a step's metrics, and warn of the alarms that are on now (each once)."""
        # a group of equal rewards is dead only where its completions are compared, and an outcome is only watched where
        # steps are paid
        off = {"frac_reward_zero_std": not self.row.compares, "reward/unscorable_fraction": self.steps is not None}
        self.history.append({name: value for name, value in values.items() if watched(name) and not off.get(name)})
        target = (
            self.row.target_kl
            if self.row.kl_target == "ref" and (self.row.kl_loss_coef or self.row.kl_reward_coef)
            else None
        )
        for name, text in alarms(self.history, target, self.config.kl_unit).items():
            if name == "unscorable_rewards" and name not in (w["code"] for w in self.stage.warnings):
                self.stage.warn(
                    name,
                    (
                        f"{text} In the newest rollouts most often: {self.why_unscorable}."
                        if self.why_unscorable
                        else text
                    ),
                )
            elif name != "unscorable_rewards":
                self.stage.warn(name, text)
            if name in self.config.stop_on:
                raise TrainingError(
                    f"{name}: {text} (The stage stopped because stop_on names this alarm; the same settings without it"
                    " go on from the last checkpoint.)"
                )

    def _check_ratio(self, first: bool, deviation: float) -> None:
        """Fresh completions start from a ratio of 1 at every token: ``deviation`` is the mean of |ratio - 1|, in which
        errors of both signs add up. With lora_dropout, which old log-probs are without, they do not, and nothing but
        the metric reads the ratio."""
        on_policy = (
            first
            and not self.config.lora_dropout
            and (not self.config.async_rollouts or self.iteration == 0)
            and self.stored is None
            and self.window is None
            and (self.policy.exact_logps or not self.row.behaviour_ratio)
        )
        near = 5e-2 if self.config.compute_dtype != "float32" else 1e-4  # bfloat16 rounds by the micro-batch
        if on_policy and deviation > near:
            raise TrainingError(
                "The policy ratio must be 1 on the first minibatch of a rollout, but tokens are off it by"
                f" {deviation:.6f} on average: sampler and trainer disagree about the log-probabilities. Report this"
                " with the model's architecture."
            )

    def _parts(self) -> dict:
        """Name -> what has a small state of its own."""
        found = {
            "order": self.order,
            "crediting": self.crediting,
            "members": self.members,
            "stored": self.stored,
            "recorded": self.recorded,
            "multipliers": self.multipliers if self.multipliers.bounds else None,
            "entropy": self.entropy if self.config.use_adaptive_entropy else None,
        }
        return {name: part for name, part in found.items() if part is not None}

    def state(self) -> tuple[dict, dict[str, bytes]]:
        self._wait_for_ahead()
        state = {
            name: getattr(self, name)
            for name in ("iteration", "inner", "version", "metrics", "warmed", "moves_due", "history", "why_unscorable")
        }
        state |= {name: part.state() for name, part in self._parts().items()}
        in_hand = [
            {
                "row_id": i.row_id,
                "prompt": i.prompt.tolist(),
                "responses": [r.tolist() for r in i.responses],
                "masks": [m.tolist() for m in i.masks],
                "by_response": i.by_response,
                "extra": i.extra,
            }
            for i in self.batch
        ]
        ahead = None
        if self.sampled_ahead is not None:
            kept, dropped, metrics = self.sampled_ahead
            ahead = {
                "kept": [plain_group(g) for g in kept],
                "dropped": [[plain_group(g), reason] for g, reason in dropped],
                "metrics": metrics,
            }
        files = {
            "rollouts.json": (
                json.dumps(
                    {"batch": in_hand, "window": self.window.state() if self.window else None, "ahead": ahead}
                ).encode()
            )
        }
        files |= {f"{name}.safetensors": weights_file(model) for name, model in self._moving().items()}
        if self.critic is not None:
            state["critic"], more = self.critic.state()
            files |= more
        return state, files

    def restore(self, state: dict, read: Files) -> None:
        for name in ("iteration", "inner", "version", "metrics", "warmed", "moves_due", "history", "why_unscorable"):
            setattr(self, name, state[name])
        for name, part in self._parts().items():
            part.restore(state[name])
        found = json.loads(read("rollouts.json"))
        self.batch = [
            make_item(r["row_id"], r["prompt"], r["responses"], r["masks"], by_response=r["by_response"], **r["extra"])
            for r in found["batch"]
        ]
        if self.window:
            self.window.restore(found["window"])
        if ahead := found["ahead"]:
            kept, dropped = (
                [full_group(g, self.rows, fresh=True) for g in groups]
                for groups in (ahead["kept"], [g for g, _ in ahead["dropped"]])
            )
            self.sampled_ahead = kept, list(zip(dropped, [reason for _, reason in ahead["dropped"]])), ahead["metrics"]
        for name, model in self._moving().items():
            load_weights(model, read.path(f"{name}.safetensors"))
        if self.critic is not None:
            self.critic.restore(state["critic"], read)
        if self.stored is not None and self.crediting.table and self.config.baseline_missing == "error":
            self.stored.keep(self.crediting.table)

    def _moving(self) -> dict:
        """Models beside the policy whose weights change and belong in a checkpoint."""
        found = {
            "reference": self.reference if follows_policy(self.config) else None,
            "old": self.old,
            "opponent": self.opponent.model if self.opponent is not None and self.row.opponent == "ema" else None,
        }
        return {name: model for name, model in found.items() if model is not None}

    def close(self) -> None:
        """Finish the datasets and check what must not have changed (ops.invariants)."""
        if self.iteration >= 0:
            self.crediting.finish(self.batch)
        self._wait_for_ahead()
        self.policy.close()
        self.records.close(self.iteration + 1)
        now = {name: (before, weights_digest(self.fixed[name])) for name, before in (self.frozen or {}).items()}
        ok, changed = changed_roles(now, list(now))
        if not ok:
            raise TrainingError(
                f"The weights of {', '.join(changed)} changed during training, although they are frozen; report this"
                " with the config."
            )

    # -- one iteration ----------------------------------------------------------------------------------------------
    def _next_iteration(self, step: int) -> None:
        if self.iteration >= 0:
            self.crediting.finish(self.batch)
        self._wait_for_ahead()
        self._move_reference()  # of an iteration that was stopped early
        if self.stored is None:
            self.policy.update()  # once for all that is sampled in this iteration, or ahead in it
        self.rewards.step, self.rewards.multipliers = step, dict(self.multipliers.values)
        drawn = self.policy.drawn
        self._prepare()
        self.iteration, self.inner, self.version = self.iteration + 1, 0, step
        if self.old is not None:
            move_towards(self.old, self.policy.model, 0.0)
        groups, metrics = self._groups()
        self._sample_ahead()
        self.policy.rest()
        scored = self.crediting(groups, self.iteration, self.version)
        rows = self.records.rollouts(scored, self.iteration, self.version)
        if self.recorded is not None:
            metrics |= self.recorded.hold_rows(rows, self.policy.drawn - drawn)
        self._note_unscorable(scored.samples)
        self.batch, self.metrics = scored.items, scored.metrics | metrics
        if self.policy.agent and (measured := self.policy.agent.latency()):
            self.stage.perf(step, measured)
        if asked := {name: n for name, n in usage.so_far().items() if "judge" in name}:
            self.stage.perf(step, asked)  # of the stage so far
        self.on_new_batch()

    def _note_unscorable(self, samples: list) -> None:
        """Remember why completions could not be scored, and warn at once where a batch has no reward at all."""
        lost = [failures(s.parts, s.reasons) for s in samples if not np.isfinite(s.total)]
        if self.stored is not None or self.steps is not None or not lost:
            return
        self.why_unscorable = commonest_failure(lost)
        if len(lost) == len(samples):
            self.stage.warn(
                "nothing_scored",
                f"None of the {len(lost)} completions of a batch could be scored, so it teaches nothing. Mend the"
                f" reward component, or give it more time. Most often: {self.why_unscorable}.",
            )

    def check_scored(self) -> None:
        """TrainingError where no completion of the whole run had a reward: the weights were never trained, and are no
        result.
        """
        shares = [one["reward/unscorable_fraction"] for one in self.history if "reward/unscorable_fraction" in one]
        if self.stored is None and self.steps is None and shares and min(shares) == 1.0:
            raise TrainingError(
                "No completion of the run could be scored, so nothing was learned and no model is published. Most"
                f" often: {self.why_unscorable}. Mend the reward component, or give it more time."
            )

    def _groups(self) -> tuple[list[Group], dict[str, float]]:
        """The groups of one iteration, stored ones or fresh ones and replayed ones, and metrics."""
        if self.recorded is not None:
            return self._recorded_groups(), {"completions/generated_tokens": 0.0}
        wanted, replayed, metrics = self.config.prompts_per_step, [], {}
        if self.stored is not None:
            return self.stored.take(wanted), {"replay/share": 1.0, "completions/generated_tokens": 0.0}
        if self.window is not None:
            replayed, metrics = self.window.draw(self.iteration, self.version)
        fresh, dropped, more = self.sampled_ahead or self._fill(wanted - len(replayed), self.iteration, self.version)
        self.sampled_ahead = None
        if self.ahead is not None and not all(
            freshness_guard(self.version, [g.version for g in fresh], self.config.max_staleness or self.steps_per_batch)
        ):
            raise TrainingError(
                "Groups that were sampled ahead are older than one iteration; report this with the config."
            )
        self.step_tokens = sum(
            len(s.ids) for g in (*fresh, *(g for g, _ in dropped)) for s in g.samples if s.mode != "sft"
        )
        self.records.groups([(g, None) for g in fresh] + dropped, self.iteration)
        self.order.learn(fresh + [g for g, _ in dropped])
        if self.window is not None:
            self.window.add(self.iteration, fresh)
        metrics |= self._hold_constraints([s for g in (*fresh, *(g for g, _ in dropped)) for s in g.samples])
        return fresh + replayed, metrics | more | self.order.metrics(fresh)

    def _recorded_groups(self) -> list[Group]:
        """The groups of this iteration in the input ``recorded``, their rewards and log-probs held against those of
        now."""
        groups = self.recorded.take(self.iteration)
        if self.policy.agent is not None:
            self.recorded.play(groups)
        self.recorded.hold_rewards(groups)
        if self.members.active:
            self.recorded.hold_members(groups)
        fresh = [g for g in groups if g.fresh and g.version == self.version]
        drawn = [(g, ids, own) for g in fresh for ids, own in self.recorded.sampled_behind(g)]
        if self.policy.exact_logps and drawn:
            items = [item_of(g, ids, own) for g, ids, own in drawn]
            self.recorded.hold_logps(
                [s for *_, own in drawn for s in own],
                self.crediting.logprobs.of(self.policy.model, items),
                self.iteration,
            )
        self._pay_as_then(groups)
        self.recorded.compare(groups, self.version)
        return groups

    def _pay_as_then(self, groups: list[Group]) -> None:
        """Set the multipliers to those that recorded groups were paid by: dropped groups moved them too."""
        for name in self.multipliers.bounds:
            paid = {s.weights[name] for g in groups if g.fresh for s in g.samples if name in (s.weights or ())}
            if paid:
                self.multipliers.values[name] = min(paid)
        self.rewards.multipliers = dict(self.multipliers.values)

    def _hold_constraints(self, samples) -> dict[str, float]:
        """Move the multipliers by the means over all that was sampled, dropped groups too, for the batches that are
        sampled from here on; metrics: what paid this batch, and what falls short.
        """
        out = {}
        for name in self.multipliers.bounds:
            found = [s.parts[name] for s in samples if s.mode != "sft" and s.parts.get(name) is not None]
            paid = {s.weights[name] for s in samples if s.weights and name in s.weights}
            out |= {f"reward/{name}/multiplier": min(paid)} if paid else {}
            out |= {f"reward/{name}/shortfall": self.multipliers.update(name, float(np.mean(found)))} if found else {}
        return out

    def _fill(self, wanted: int, iteration: int, version: int) -> tuple:
        drawn = 0

        def take(n: int) -> list:
            nonlocal drawn
            if drawn >= len(self.order.prompts) and not self.config.max_num_gen_batches:
                return []
            drawn += n
            return self.order.take(n, version)

        return self.groups.fill(take, wanted, iteration, version)

    def _sample_ahead(self) -> None:
        """Begin to sample the next iteration's groups from the weights as they are now, where there is a next
        iteration.
        """
        if self.recorded is not None and self.config.async_rollouts and self.row.read_baseline == "greedy":
            coming = self.recorded.coming(self.iteration + 1)
            self._pay_as_then(coming)
            self.rewards.step = self.version + self.steps_per_batch
            self.recorded.compare(coming, self.version)
        if self.ahead is None or self.version + self.steps_per_batch >= self.total_steps:
            return
        wanted, iteration, version = self.config.prompts_per_step, self.iteration + 1, self.version
        self.rewards.step = self.version + self.steps_per_batch  # that it is trained at, which from_step is about
        self.rewards.multipliers = dict(self.multipliers.values)  # as the newest batch moved them
        self.ahead.submit(lambda: self._fill(wanted, iteration, version))

    def _wait_for_ahead(self) -> None:
        """Until nothing is sampled ahead any more: then engine, rewards and prompt order are free for others."""
        if self.ahead is None or (found := self.ahead.take()) is None:
            return
        self.sampled_ahead = found
        self.stage.perf(
            self.version,
            {
                "async/waited_seconds": self.ahead.waited,
                "async/sampling_seconds": self.ahead.worked,
                "async/idle_fraction": self.ahead.waited / max(self.ahead.took, 1e-9),
            },
        )

    def _prepare(self) -> None:
        """Once, with the starting policy: measure the prompts' baselines and pass rates where something reads them, and
        train the critic.
        """
        if self.row.read_baseline in ("table", "v_star") and not self.crediting.table:
            self._measure_baselines()
        # recorded prompts are chosen already; a critic's warm-up chooses its own
        if self.order.wants_counts and (self.recorded is None or not self.warmed):
            prompts = self.order.prompts
            if self.stage.has("prompt_stats"):
                counts = counts_of(prompts, self.stage.dataset("prompt_stats").iter_rows())
            else:
                counts = self._measured_pass_rates(prompts)
            counts = self.order.enough(counts)
            if 0 < len(counts) < len(prompts):
                self.stage.warn(
                    "pass_rates_unknown",
                    f"{len(prompts) - len(counts)} of {len(prompts)} prompts have too few completions that could be"
                    " scored to have a pass rate, and are left out. Raise max_completion_length, or mend the reward.",
                )
            kept = self.order.start_from(counts)
            if self.config.difficulty_band and self.recorded is None:
                self.records.pass_rates(prompts, counts, kept)
                self.stage.log(
                    f"{len(self.order.prompts)} of {len(prompts)} prompts have a pass rate in"
                    f" difficulty_band={list(self.config.difficulty_band)}"
                )
        if not self.warmed:
            self._warm_up_critic()

    def _of_every_prompt(self, prompts, purpose: str, n: int, told, engine=None) -> list:
        """``told(group)``, plain numbers, of n scored completions of every prompt, block by block
        (:mod:`stages.running.blocks`); rubric rewards, whose confidence is a mean over what is scored at once, all at
        once."""
        whole = any(c.kind == "rubric" for c in self.config.rewards)
        block = len(prompts) if whole else max(1, 8 * self.config.generation_batch // n)
        before = self.policy.drawn
        found = in_blocks(
            self.stage,
            purpose,
            prompts,
            lambda part: [told(group) for group in self.groups.of_every_prompt(part, purpose, n, engine)],
            max(1, block),
            "prompts",
            together=True,
        )
        self.policy.drawn = before + len(prompts) * n * self.policy.seats  # what finished blocks hold counts too
        return found

    def _measured_pass_rates(self, prompts) -> dict[str, tuple[int, int]]:
        """{row id: (samples with a verdict, right ones)} of ``passk_samples`` completions of every prompt by the
        starting policy.
        """
        found = self._of_every_prompt(
            prompts,
            "pass-at-k",
            self.config.passk_samples,
            lambda group: [[s.correct for s in group], any(np.isfinite(s.total) for s in group)],
        )
        return verdict_counts((row["row_id"], verdicts, scored) for (row, _), (verdicts, scored) in zip(prompts, found))

    def _measure_baselines(self) -> None:
        """The baseline of every prompt: from the input ``baselines``, else from completions of the starting policy
        (v_star: of the reference). Prompts without one stay with ``baseline_missing=batch_mean``, and else are left out,
        and for v_star those that were never answered right, which have no V* to speak of (ASTAR-PO)."""
        prompts, v_star = self.order.prompts, self.row.baseline == "v_star"
        replaced = self.config.baseline_missing == "batch_mean"
        if self.stage.has("baselines"):
            rows = {r["prompt_id"]: r for r in self.stage.dataset("baselines").iter_rows()}
            known = {prompt_id: float(r["b"]) for prompt_id, r in rows.items()}
            missing = [row["prompt_id"] for row, _ in prompts if row["prompt_id"] not in known]
            if missing and not replaced:
                raise ConfigError(
                    f"the input baselines has none for prompt {missing[0]} and {len(missing) - 1} more; give the"
                    " baselines of these prompts, leave the input out so that they are sampled before training"
                    + ("." if v_star else ", or write baseline_missing=batch_mean.")
                )
            # that an rl stage wrote says them
            judged = {prompt_id: json.loads(r["extra_json"] or "{}").get("verdicts") for prompt_id, r in rows.items()}
        else:

            def told(group):
                made = self.crediting.baseline_of(group)
                return [made and [made[0], len(made[1]), verdicts_on(made[1])], verdicts_on(group)]

            found = self._of_every_prompt(
                prompts, "baseline", self.config.baseline_samples, told, self._reference_engine() if v_star else None
            )
            made = [(row, *of_prompt) for (row, _), (of_prompt, _) in zip(prompts, found) if of_prompt]
            self.records.baselines(made)
            known = {row["prompt_id"]: value for row, value, *_ in made}
            judged = {row["prompt_id"]: verdicts for (row, _), (_, verdicts) in zip(prompts, found)}
            if not known:
                raise TrainingError(
                    f"None of the completions behind baseline={self.row.baseline} could be scored. Mend the reward"
                    " component, or give the input baselines."
                )
            unknown = {row["row_id"] for row, _ in prompts if row["prompt_id"] not in known}
            if unknown and not replaced:
                self.order.leave_out(unknown)
                self.stage.warn(
                    "baselines_unknown",
                    f"{len(unknown)} of {len(prompts)} prompts have no completion that could be scored, so their"
                    " baseline is unknown, and are left out. Raise max_completion_length, or mend the reward.",
                )
        if self.stored is not None and not replaced:
            outside = sorted(
                {g.prompt["prompt_id"] for g in self.stored.groups}
                - {row["prompt_id"] for row, _ in prompts}
                - known.keys()
            )
            if outside:
                raise ConfigError(
                    f"the input stored has completions to {len(outside)} prompts without a baseline (the first is"
                    f" {outside[0]}); give data that holds these prompts, or the input baselines with theirs."
                )
        if v_star:
            hopeless = {
                row["row_id"]: row["prompt_id"]
                for row, _ in self.order.prompts
                if (of := judged.get(row["prompt_id"])) and of[0] and not of[1]
            }
            if self.stage.has("baselines") and not any(judged.values()):
                self.stage.warn(
                    "never_solved_unknown",
                    "The input baselines does not say which prompts were ever answered right, so none is left out for"
                    " that. Give the baselines of an rl stage, which say it.",
                )
            self.order.leave_out(set(hopeless))
            known = {prompt_id: b for prompt_id, b in known.items() if prompt_id not in hopeless.values()}
            self.stage.log(f"{len(hopeless)} prompts were never answered right by the starting policy and are left out")
        if absent := len([1 for row, _ in self.order.prompts if row["prompt_id"] not in known]):
            self.stage.log(f"{absent} of {len(prompts)} prompts have no baseline: the mean reward of their batch")
        self.crediting.table = known
        if self.stored is not None and not replaced:
            self.stored.keep(known)

    def _reference_engine(self):
        """What samples from the reference, where it is another model than the policy; None where it is the policy as it
        starts.
        """
        if (
            self.reference is None
            or not self.stage.has("reference")
            or self.stage.inputs["reference"].digest == self.stage.inputs["model"].digest
        ):
            return None
        from stages.decoding.sampler import Sampler
        from stages.models.sharding import root_of

        if root_of(self.reference) is not None:
            raise ConfigError(
                "baseline=v_star is an expectation under the input reference, which cannot be sampled from in shards;"
                " write sharding=none, or give the input baselines of a run that started from the reference."
            )
        return Sampler(
            self.reference,
            self.policy.renderer.tokenizer,
            max_batch=self.config.generation_batch,
            dtype=getattr(torch, self.config.sampling_dtype),
        )

    def _warm_up_critic(self) -> None:
        """Critic steps on rollouts of the starting policy, which are not kept, nor counted in running statistics or the
        moving baseline (VAPO value pretraining).
        """
        order, credit, n = self.order.state(), self.crediting.state(), self.config.prompts_per_step
        for step in range(self.row.critic_warmup_steps):
            groups = self.groups.sample(
                self.order.take(n, self.version), self.iteration, self.version, step * n, "critic-warmup"
            )
            self.critic.train(self.crediting(groups, self.iteration, self.version).items)
        self.order.restore(order)
        self.crediting.restore(credit)
        self.warmed = True

    # -- validation -------------------------------------------------------------------------------------------------
    def evaluate(self, prompts, step: int) -> dict[str, float]:
        """Metrics of one sampled completion per validation prompt, with the same seeds and length limit (the run's
        longest) at every call; the answers go to the dataset ``validation``."""
        self._wait_for_ahead()
        self.policy.update()
        params = replace(self.policy.params, max_new_tokens=self.config.longest_completion)
        seeds = [[self.stage.seed_for("validation", row["row_id"])] for row, _ in prompts]
        groups = self.policy.draw(prompts, seeds, params)
        drawn = [s for g in groups for s in (g if self.policy.seats == 2 else g[:1])]
        warn_of_failures(self.stage, self.policy.engine, drawn)
        samples = [s for s in drawn if s.error is None]
        self.policy.rest()
        # answers of all passes are compared, so every component counts in all of them, and as it did at the start
        self.held_out.step, self.held_out.multipliers = None, {}
        score(self.held_out, samples)
        self.records.validation(samples, step)
        found = (
            rollout_metrics(samples, np.array([s.total for s in samples]), np.arange(len(samples))) if samples else {}
        )
        if self.held_out is not self.rewards and not counted(self.held_out):
            found = {name: value for name, value in found.items() if name not in NOTHING_COUNTED}
        found |= trajectory_metrics(self.config, self.policy, samples)
        found |= self.beside(prompts, seeds, params, drawn)
        self.history.append(
            {"step": step, **{f"validation/{k}": v for k, v in found.items() if f"validation/{k}" in WATCHED}}
        )
        return found

    def beside_text(self, trainer) -> dict[str, float]:
        """Loss per token on the validation rows of the input ``ptx``, and how large the gradient of the pretraining mix
        is beside that of the RL loss, of the newest step (PPO-PTX).
        """
        found = {"ptx/held_out_nll": trainer.evaluate(self.ptx_held_out)["ptx/nll"]} if self.ptx_held_out else {}
        if self.ptx and self.current:
            norms = [
                trainer.gradient_norm(items) for items in (self._drawn_text(self.current, self.version), self.current)
            ]
            found |= {"ptx/gradient_norm_ratio": norms[0] / norms[1]} if norms[1] > 0 else {}
        return found

    def _drawn_text(self, chosen: list[Item], step: int) -> list[Item]:
        """The pretraining rows that are mixed into the completions ``chosen`` for a step."""
        n = max(1, round(self.config.ptx_batch_ratio * sum(len(i.responses) for i in chosen)))
        return [self.ptx[k] for k in self.stage.rng("ptx", step).integers(0, len(self.ptx), n)]


def holds_reference(row: RLPreset, config) -> bool:
    """Whether a moving reference stays where it is inside an iteration: the exact KL reads its whole distribution at
    every step, and the estimators the log-probs of the iteration's start.
    """
    return (
        follows_policy(config) and row.kl_loss_coef > 0 and row.kl_loss_estimator == "full" and row.kl_target == "ref"
    )


def check_ahead(stage, row: RLPreset, exact_logps: bool, members: Members) -> None:
    """Refuse ``async_rollouts`` where only the loaded parts show that it cannot be (the rest:
    ``stages.policy.presets.resolve_preset``).

    Raises:
        ConfigError: what to write instead.
    """
    if stage.has("stored"):
        raise ConfigError("async_rollouts=true: with the input stored nothing is sampled; write async_rollouts=false.")
    if not (exact_logps or row.off_policy_ok or stage.config.importance_correction != "none"):
        raise ConfigError(
            "async_rollouts=true: ratios would start from the policy of today, since the engine's log-probs are not the"
            " trainer's (another engine, filters, penalties or bfloat16), and nothing would correct for what changed"
            " since the batch was sampled; write importance_correction=token_truncate."
        )
    if members.active:
        raise ConfigError(
            "async_rollouts=true: groups with generation prompts, improved or SFT answers build on the iteration"
            " before, which is not scored yet; write async_rollouts=false."
        )


def check_stored(stage, row: RLPreset) -> None:
    """Refuse settings that choose or change what is sampled, where the input ``stored`` gives the completions.

    Raises:
        ConfigError: what to write instead.
    """
    config = stage.config
    if not row.off_policy_ok:
        raise ConfigError(
            f"the input stored gives rollouts of other policies to {config.preset}, which is on-policy; write"
            " preset=topr, offline_is, copg, mdpo or oreo, or leave the input out."
        )
    refused = {
        "baseline=greedy (write baseline=moving_average, or table, which is measured before training)": (
            row.read_baseline == "greedy"
        ),
        "mean of new completions to hold at a bound (write a weight instead of at_least)": any(
            c.at_least is not None for c in config.rewards
        ),
        "advantage=vine, which goes on from completions (write advantage=reward_minus_baseline)": (
            row.advantage == "vine"
        ),
        f"opponent={row.opponent} (write opponent=self)": row.advantage == "win_rate" and row.opponent != "self",
        f"replay_fraction={config.replay_fraction} (stored groups come again by themselves, pass after pass; write replay_fraction=0)": (
            config.replay_fraction > 0
        ),
        "dynamic_sampling=true (write dynamic_sampling=false)": row.dynamic_sampling,
        f"critic_warmup_steps={row.critic_warmup_steps} (write critic_warmup_steps=0)": row.critic_warmup_steps > 0,
        f"curriculum={config.curriculum} (write curriculum=none)": config.curriculum != "none",
        f"difficulty_band={config.difficulty_band} (store rollouts of the prompts that you want)": (
            config.difficulty_band is not None
        ),
        f"no_resampling_pass_rate={config.no_resampling_pass_rate}": config.no_resampling_pass_rate is not None,
        f"mode_mix={config.mode_mix} (write mode_mix=fresh)": config.mode_mix != "fresh",
        f"sft_member={config.sft_member} (write sft_member=none)": config.sft_member != "none",
        f"conditioning={config.conditioning} (write conditioning=plain)": config.conditioning != "plain",
    }
    for text in (text for text, on in refused.items() if on):
        raise ConfigError(
            f"the input stored gives the completions, and nothing is sampled, so there is no {text}; or leave the input"
            " stored out."
        )


def pretraining_items(data, renderer, max_length: int, split: str = "train") -> list[Item]:
    """The rows of a text or demonstrations dataset, every token trained (PPO-PTX); none of a ``split`` that is not
    there, unless it is that of training.
    """
    if split != "train" and split not in data.manifest["splits"]:
        return []
    from stages.sft import encode_text

    per_token = 0.0
    # a row holds several documents or a part of one: as many as its tokens make up on average
    if data.kind == "text/1":
        rows = [
            i.responses[0].tolist()
            for i in encode_text(data, split, renderer, SimpleNamespace(max_length=max_length))[0]
        ]
        per_token = sum(1 for _ in data.iter_rows(columns=["text"], split=split)) / max(
            sum(len(ids) - 1 for ids in rows), 1
        )
    else:
        rows = [renderer.conversation(r["messages"], max_length=max_length).ids for r in data.iter_rows(split=split)]
    made = [
        make_item(f"ptx-{k}", [], [ids], [[1] * len(ids)], ptx=True, documents=(len(ids) - 1) * per_token or 1.0)
        for k, ids in enumerate(rows)
        if len(ids) > 1
    ]
    if not made and split == "train":
        raise ValueError(
            "The input ptx has no train row with two tokens or more; give a text/1 dataset with a train split, or"
            " ptx_coef=0."
        )
    return made
