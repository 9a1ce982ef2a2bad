"""Where RL's training items come from: prompts, completions, rewards, filters, and the ``rollouts/1`` dataset.

:class:`Rollouts` is the source of the training loop. It collects a batch of prompt groups whenever the last one is used up (or
the policy has drifted from it), hands it out in minibatches, and keeps everything with state: prompt cursor, moving baseline,
KL controller, reference schedule, replay window, critic. Killed at any instant, a run repeats the iteration it was in.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from stages import ranks, sharding
from stages.agent_rewards import STEP_WEIGHTS, check_step_weights
from stages.agents import Agent, agent_metrics, prefix_of, trajectory_rows
from stages.algorithms import RLPreset
from stages.alarms import WATCHED, alarms
from stages.batching import Item, make_item, per_response
from stages.credit import Batch, assign, explained_variance
from stages.debate import Debaters, debate_metrics
from stages.evaluation.scores import records_of
from stages.evaluation.text import repetition_n
from stages.estimators import (DynamicSamplingExhausted, KLController, MovingAverageBaseline, apply_truncation, informative_groups, is_constant,
                               overlong_penalty, table_baseline, v_star)
from stages.generation import Sample, continuations, sample_groups, sampling_params, score, warn_of_failures
from stages.members import Members
from stages.rewards import ON_TURNS
from stages.rl_report import best_and_worst, validation_rows
from stages.rubric_reward import rubric_metrics, score_rows, write_review
from stages.modeling import load_weights, move_towards, weights_digest, weights_file
from stages.schedules import changed_roles, e2h_probabilities, freshness_guard, learning_scores, pass_at_k_band, reference_due, replay_plan, rerank, step_function
from stages.selection import difficulty_band, order_by_difficulty
from stages.training import TrainingError


@dataclass
class Group:
    """A prompt's completions. ``version``: optimizer step of the policy that sampled them; ``opponents``: what win rates compare
    with; ``greedy``: reward of the greedy completion ``greedy_sample`` (baseline=greedy)."""

    prompt: dict
    ids: list[int]
    samples: list[Sample]
    version: int
    fresh: bool = True
    opponents: list[Sample] = field(default_factory=list)
    greedy: float = 0.0
    greedy_sample: Sample | None = None


class Rollouts:
    """Source of training items (``stages.training.Source``) of the RL stage.

    Args:
        row: the resolved preset.
        reference, old, critic: frozen reference, copy of the policy that sampled (exact KL to it), value function; None where unused.
        model, refresh: the policy with whole weights, and what brings them up to date where training goes on elsewhere (``sharding.Acting``).
    """

    def __init__(self, stage, row: RLPreset, renderer, model, rewards, prompts, *, reference=None, old=None, critic=None, refresh=None):
        from stages.engines import make_engine

        config = self.config = stage.config
        self.stage, self.row, self.renderer, self.model, self.rewards = stage, row, renderer, model, rewards
        self.prompts, self.reference, self.old, self.critic = prompts, reference, old, critic
        self.refresh = refresh or (lambda: None)
        self.sampler = make_engine(stage, renderer, model, sleeps=config.engine_sleep)
        if self.sampler.reencodes and not config.allow_reencoded_ids:
            raise ValueError(f"{self.sampler.name} returns text, so the ids trained on would be an encoding of it and not what was sampled. Use an engine that "
                             "returns ids (engine=builtin, engine=vllm, a vLLM server), or accept it with allow_reencoded_ids=true.")
        self.params = sampling_params(config, renderer)
        self.agent = agent_for(config, row, renderer, rewards, stage)
        self.seats = getattr(self.agent, "seats", 1)  # groups that one task gives
        self.baseline = MovingAverageBaseline(config.baseline_decay)
        coef = row.kl_loss_coef or row.kl_reward_coef
        self.controller = KLController(coef, row.kl_controller if coef else "fixed", row.target_kl)
        self.writer = stage.writer("rollouts", "rollouts/1")
        self.trajectories = stage.writer("trajectories", "trajectories/1") if self.agent else None
        self.stats = stage.writer("prompt_stats", "prompt_stats/1")
        self.members = Members(stage, renderer, rewards)
        self.rubric_writer = stage.writer("rubric_scores", "rubric_scores/1") if self.members.component else None
        self.steps_per_batch = row.num_iterations * config.num_minibatches
        self.total_steps = config.max_steps
        self.iteration, self.inner, self.version, self.cursor = -1, 0, 0, 0
        self.batch, self.current, self.metrics, self.step_tokens = [], [], {}, 0
        self.failed_rows = 0               # of this iteration, that the engine has no completion for
        self.window: list[dict] = []       # replayable groups of the last iterations
        self.table: dict[str, float] = {}  # baseline per prompt id
        self.scores: dict[str, float] = {}  # what each prompt's last group could teach, by row id (curriculum=rerank)
        self.queue: list[int] = []         # prompts still to come in this pass (curriculum=rerank, pass_at_k)
        self.counts: dict[str, tuple[int, int]] = {}  # samples and right ones of each prompt, by row id (curriculum=pass_at_k)
        self.last_kl = 0.0
        self.warmed = not row.critic_warmup_steps or critic is None or critic.trainer is None
        self.exact_logps = self.sampler.exact_logps and self.params.plain and config.importance_correction == "none"
        if not self.exact_logps:
            stage.log(f"old log-probs: computed by the trainer, because {self._why_not_exact()}; the engine's are kept as logp_rollout")
        self.opponent = self._opponent()
        self.stored = self._stored() if stage.has("stored") else None
        self.levels = self._difficulties() if config.curriculum not in ("none", "rerank", "pass_at_k") else None
        self.ptx = self._pretraining() if row.ptx_coef else []
        self.process_scorer = None
        if row.advantage == "process" and not self.agent:
            from stages.reward_scorers import load_scorer

            self.process_scorer = load_scorer(stage.path("reward_model"), stage.device)
        self.history: list[dict] = []      # what alarms read of the steps so far
        self.validation = stage.writer("validation", "eval_samples/1") if config.eval_prompts else None
        self.frozen = {"reference": weights_digest(reference)} if reference is not None and config.ref_mode in ("frozen", "previous") else {}

    def _why_not_exact(self) -> str:
        if not self.sampler.exact_logps:
            return f"those of {self.sampler.name} are not the trainer's"
        return "importance_correction compares both" if self.params.plain else "filters, penalties or bans change the sampled distribution"

    def engine(self):
        """The sampling engine, holding the policy's current weights (users.md C2: every push is named by the digest of what it must hold)."""
        if self.sampler.shares_weights:
            return self.sampler
        wanted = weights_digest(self.model)[:16]
        if self.sampler.weights != wanted:
            from stages.engines import write_weights

            home = self.stage.workdir / "engine"
            old = list(home.glob("*"))
            write_weights(self.model, self.renderer.tokenizer, home / wanted)
            self.sampler.update(str(home / wanted), wanted)
            for directory in (d for d in old if d.name != wanted):
                shutil.rmtree(directory, ignore_errors=True)
        if self.sampler.weights != wanted:
            raise TrainingError(f"{self.sampler.name} holds the weights {self.sampler.weights} instead of the policy's {wanted}; report this with the config.")
        return self.sampler

    def kl_loss_coef(self) -> float:
        """Current coefficient of the KL in the loss."""
        return self.controller.coef if self.row.kl_loss_coef else 0.0

    # -- Source protocol ------------------------------------------------------------------------------------------
    def items(self, step: int) -> list[Item]:
        self.step_tokens = 0
        if self.iteration < 0 or self.inner >= self.steps_per_batch:
            self._next_iteration(step)
        chosen = self._minibatch()
        if self.config.early_stop_kl and self.inner and self._drift(chosen) > 1.5 * self.config.early_stop_kl:
            self.metrics["policy/early_stops"] = self.metrics.get("policy/early_stops", 0.0) + 1.0
            self._next_iteration(step)
            chosen = self._minibatch()
        self.current = chosen
        if not self.ptx:
            return chosen
        n = max(1, round(self.config.ptx_batch_ratio * sum(len(i.responses) for i in chosen)))
        return chosen + [self.ptx[k] for k in self.stage.rng("ptx", step).integers(0, len(self.ptx), n)]

    def _minibatch(self) -> list[Item]:
        n = self.config.num_minibatches
        if n == 1:
            return self.batch
        epoch, minibatch = divmod(self.inner, n)
        order = self.stage.rng("minibatches", self.iteration, epoch).permutation(len(self.batch))
        return [self.batch[i] for i in order[minibatch::n]]

    def after_step(self, step: int, metrics: dict[str, float]) -> dict[str, float]:
        first = self.inner == 0
        self.inner += 1
        self._check_ratio(first, metrics.get("policy/ratio", 0.0))
        extra = dict(self.metrics) if first else {}
        if self.critic is not None:
            extra |= self.critic.train(self.current)
        moves = self.reference is not None and reference_due(self.config.ref_mode, step, self.config.ref_sync_steps)
        if moves or (self.opponent is not None and self.config.opponent == "ema"):
            self.refresh()
        if moves:
            keep = self.config.ref_decay if self.config.ref_mode == "ema" else 1.0 - self.config.ref_sync_alpha
            move_towards(self.reference, self.model, keep)
        if self.opponent is not None and self.config.opponent == "ema":
            move_towards(self.opponent.model, self.model, self.config.opponent_decay)
        if metrics.get("policy/ratio_sq"):  # effective sample size over the tokens, (sum w)^2 / (n sum w^2) (ops.monitor)
            extra["policy/ess_fraction"] = metrics["policy/ratio"] ** 2 / metrics["policy/ratio_sq"]
        self.watch({"step": step, **metrics, **extra})
        return extra

    def watch(self, values: dict[str, float]) -> None:
        """Take note of a step's metrics, and warn of the alarms that are on now (each once)."""
        self.history.append({name: values[name] for name in WATCHED if name in values})
        target = self.row.target_kl if self.row.kl_target == "ref" and (self.row.kl_loss_coef or self.row.kl_reward_coef) else None
        for name, text in alarms(self.history, target).items():
            self.stage.warn(name, text)
            if name in self.config.stop_on:
                raise TrainingError(f"{name}: {text} (The stage stopped because stop_on names this alarm; the same settings without it go on from the last "
                                    "checkpoint.)")

    def _check_ratio(self, first: bool, ratio: float) -> None:
        on_policy = first and self.stored is None and not self.config.replay_fraction
        if on_policy and ratio and (self.row.objective or self.row.surrogate not in ("logp", "stopgrad_ratio")) and self.config.compute_dtype == "float32" \
                and abs(ratio - 1.0) > 1e-3:  # 0 when no token was trained
            raise TrainingError(f"The policy ratio must be 1 on the first minibatch of a rollout, but its mean is {ratio:.6f}: sampler and "
                                "trainer disagree about the log-probabilities. Report this with the model's architecture.")

    def state(self) -> tuple[dict, dict[str, bytes]]:
        in_hand = [{"row_id": i.row_id, "prompt": i.prompt.tolist(), "responses": [r.tolist() for r in i.responses],
                    "masks": [m.tolist() for m in i.masks], "extra": i.extra} for i in self.batch]
        state = {"iteration": self.iteration, "inner": self.inner, "version": self.version, "cursor": self.cursor, "metrics": self.metrics,
                 "baseline": self.baseline.state_dict(), "controller": self.controller.state_dict(), "last_kl": self.last_kl, "table": self.table,
                 "warmed": self.warmed, "scores": self.scores, "queue": self.queue, "counts": self.counts,
                 "left": [row["row_id"] for row, _ in self.prompts] if self.config.difficulty_band else None, "prior": self.members.prior,
                 "history": self.history}
        files = {"rollouts.json": json.dumps({"batch": in_hand, "window": self.window}).encode()}
        for name, model in self._moving().items():
            files[f"{name}.safetensors"] = weights_file(model)
        if self.critic is not None:
            state["critic"], more = self.critic.state()
            files |= more
        return state, files

    def restore(self, state: dict, read: Callable[[str], bytes]) -> None:
        for name in ("iteration", "inner", "version", "cursor", "metrics", "last_kl", "table", "warmed", "scores", "queue", "counts", "history"):
            setattr(self, name, state[name])
        self.members.prior = state["prior"]
        if state["left"] is not None:
            left = set(state["left"])
            self.prompts = [p for p in self.prompts if p[0]["row_id"] in left]
        self.baseline.load_state_dict(state["baseline"])
        self.controller.load_state_dict(state["controller"])
        found = json.loads(read("rollouts.json"))
        self.batch = [make_item(r["row_id"], r["prompt"], r["responses"], r["masks"], **r["extra"]) for r in found["batch"]]
        self.window = found["window"]
        for name, model in self._moving().items():
            load_weights(model, read.path(f"{name}.safetensors"))
        if self.critic is not None:
            self.critic.restore(state["critic"], read)

    def _moving(self) -> dict:
        """Models beside the policy whose weights change and belong in a checkpoint."""
        out = {}
        if self.reference is not None and self.config.ref_mode in ("ema", "refresh"):
            out["reference"] = self.reference
        if self.old is not None:
            out["old"] = self.old
        if self.opponent is not None and self.config.opponent == "ema":
            out["opponent"] = self.opponent.model
        return out

    def close(self) -> None:
        """Finish the datasets and check what must not have changed (ops.invariants)."""
        if self.iteration >= 0:
            self._finish_iteration()
        if self.agent:
            self.agent.close()
            self.trajectories.close({})
        self.sampler.close()
        shutil.rmtree(self.stage.workdir / "engine", ignore_errors=True)
        self.writer.close({"iterations": self.iteration + 1})
        self.stats.close({})
        if self.validation is not None:
            self.validation.close({})
        if self.rubric_writer is not None:
            self.rubric_writer.close({})
            if self.stage.rank == 0:
                write_review(self.stage)
        now = {name: (before, weights_digest(self.reference)) for name, before in self.frozen.items()}
        ok, changed = changed_roles(now, list(now))
        if not ok:
            raise TrainingError(f"The weights of {', '.join(changed)} changed during training, although they are frozen; report this with the config.")

    # -- one rollout batch ------------------------------------------------------------------------------------------
    def _next_iteration(self, step: int) -> None:
        if self.iteration >= 0:
            self._finish_iteration()
        self.refresh()
        if not self.warmed:
            self._warm_up_critic()
        if self.row.baseline in ("table", "v_star") and not self.table:
            self.table = self._baseline_table()
        if (self.config.curriculum == "pass_at_k" or self.config.difficulty_band) and not self.counts:
            self.counts = self._first_counts()
            if self.config.difficulty_band:
                self._filter_by_difficulty()
        self.iteration, self.inner, self.version = self.iteration + 1, 0, step
        if self.old is not None:
            move_towards(self.old, self.model, 0.0)
        self.failed_rows = 0
        groups, counts = self._groups()
        if self.config.engine_sleep:
            self.sampler.sleep(keep_weights=False)
        if self.failed_rows:
            counts["rollout/failed_rows"] = float(self.failed_rows)
        self.step_tokens = sum(len(s.ids) for g in groups if g.fresh for s in g.samples)
        self.batch, self.metrics = self._shape(groups)
        self.metrics |= counts
        self.frozen_logps = self._logps_digest()

    def _finish_iteration(self) -> None:
        """Check that the iteration's log-probs stayed what they were, and move the KL controller."""
        if getattr(self, "frozen_logps", None) not in (None, self._logps_digest()):
            raise TrainingError("The stored log-probabilities of a rollout changed while it was trained on; report this with the config.")
        if self.controller.controller == "fixed":
            return
        kl = self._drift(self.batch) if self.row.kl_loss_coef and self.row.kl_target == "old" else self.last_kl
        self.controller.update(kl)

    def _logps_digest(self) -> int:
        return hash(tuple(v for i in self.batch for row in i.extra["old_logps"] for v in row))

    def _groups(self) -> tuple[list[Group], dict[str, float]]:
        """The groups of one iteration: fresh ones (refilled until each has a signal, if asked for), stored or replayed ones."""
        config, wanted = self.config, self.config.prompts_per_step
        if self.stored is not None:
            n = len(self.stored)
            picks = [self.stored[self._order("stored", n, k)] for k in range(self.cursor, self.cursor + wanted)]
            self.cursor += wanted
            return [replace(g, fresh=False) for g in picks], {"replay/share": 1.0}
        counts: dict[str, float] = {}
        replayed: list[Group] = []
        if config.replay_fraction:
            replayed, counts = self._replayed()
            wanted -= len(replayed)
        kept, dropped, rounds = [], [], 0
        while len(kept) < wanted * self.seats:
            if rounds == config.max_num_gen_batches:
                raise DynamicSamplingExhausted(
                    f"{len(kept)} prompts with a signal of {wanted} after {rounds} generation batches in iteration {self.iteration}: raise "
                    "max_num_gen_batches or num_generations, use easier or harder prompts, or write dynamic_sampling=false with zero_advantage=mask")
            groups = self._sample(config.gen_batch_size or wanted if self.row.dynamic_sampling else wanted, (len(kept) + len(dropped)) // self.seats)
            rounds += 1
            for group in groups:
                reason = self._no_signal(group) if self.row.dynamic_sampling else None
                (dropped if reason else kept).append((group, reason))
        kept, surplus = kept[:wanted * self.seats], kept[wanted * self.seats:]
        dropped += [(group, "surplus") for group, _ in surplus]
        self._write_stats([(g, None) for g, _ in kept] + dropped)
        if self.row.dynamic_sampling:
            drawn = len(kept) + len(dropped)
            counts |= {"groups/generation_batches": float(rounds), "groups/filter_rate": (len(dropped) - len(surplus)) / drawn,
                       **{f"groups/dropped_{r}": float(sum(reason == r for _, reason in dropped))
                          for r in ("all_correct", "all_wrong", "equal_rewards", "surplus")}}
        fresh = [group for group, _ in kept]
        if config.curriculum == "rerank":
            self.scores |= learning_scores({g.prompt["row_id"]: [s.total for s in g.samples if np.isfinite(s.total)] or [0.0] for g, _ in kept + dropped})
        if config.curriculum == "pass_at_k":
            self.counts |= {g.prompt["row_id"]: counted(g.samples) for g, _ in kept + dropped}
        if config.replay_fraction:
            self.window.append({"iteration": self.iteration, "groups": [_plain_group(g) for g in fresh]})
        return fresh + replayed, counts

    def _no_signal(self, group: Group) -> str | None:
        """Why a group teaches nothing (DYN-SAMPLING): by correctness where the verifier gave verdicts, else by unshaped reward."""
        verdicts = [s.correct for s in group.samples]
        if self.config.filter_groups_metric == "acc" and all(v is not None for v in verdicts):
            right = sum(verdicts)
            return None if informative_groups([right], len(verdicts))[0] else "all_correct" if right else "all_wrong"
        totals = [s.total for s in group.samples if np.isfinite(s.total)]
        return "equal_rewards" if len(totals) < 2 or is_constant(totals) else None

    def _draw(self, sampler, rows, params, seeds) -> list[list[Sample]]:
        """Completions, or in an environment trajectories, of each ``(row, prompt ids)``; ``seeds[i]``: the seeds of row i."""
        return self.agent.sample(sampler, rows, params, seeds) if self.agent else sample_groups(sampler, rows, params, seeds)

    def _sample(self, n: int, first: int, purpose: str = "rollout") -> list[Group]:
        """``n`` fresh groups for the next prompts; ``first`` counts the groups this iteration has drawn already."""
        config = self.config
        chosen = [self.prompts[self._prompt_index(k)] for k in range(self.cursor, self.cursor + n)]
        self.cursor += n
        params = replace(self.params, max_new_tokens=self.completion_limit)

        def seeds(kind, count):
            return [[self.stage.seed_for(kind, self.iteration, first + k, prompt["row_id"], g) for g in range(count)] for k, (prompt, _) in enumerate(chosen)]

        own = seeds(purpose, config.num_generations)
        engine = self.engine()
        drawn = self.members.sample(engine, chosen, params, own, self.iteration, first) if self.members.active else \
            self._draw(engine, chosen, params, own)
        if self.seats == 2:  # the debaters of each side are a group of their own
            chosen, drawn = [c for c in chosen for _ in range(2)], [side for both in drawn for side in (both[: len(both) // 2], both[len(both) // 2:])]
        groups = [Group(prompt, samples[0].prompt_ids if self.agent else ids, samples, self.version) for (prompt, ids), samples in zip(chosen, drawn)]
        extra: list[Sample] = []
        if self.row.baseline == "greedy":
            greedy = [g[0] for g in self._draw(engine, chosen, replace(params, temperature=0.0), seeds("greedy", 1))]
            extra += greedy
        if self.opponent is not None:
            for group, found in zip(groups, sample_groups(self.opponent, chosen, params, seeds("opponent", config.num_generations))):
                group.opponents = found
                extra += found
        groups = self._without_failures(groups, greedy if self.row.baseline == "greedy" else [None] * len(groups))
        score(self.rewards, [s for g in groups for s in g.samples] + extra)
        for k, group in enumerate(groups):
            for g, sample in enumerate(group.samples):
                sample.total = self._overridden(sample.total, group.prompt["row_id"], first + k, g)
            if group.greedy_sample is not None:
                group.greedy = float(np.nan_to_num(group.greedy_sample.total))
        if purpose == "rollout":
            self.members.remember(groups, self.iteration)
        return groups

    def _without_failures(self, groups: list[Group], greedy: list[Sample | None]) -> list[Group]:
        """Groups without the rows that the engine has no completion for; a group that is left with nothing to compare is dropped."""
        everyone = [s for g in groups for s in (*g.samples, *g.opponents)] + [s for s in greedy if s is not None]
        warn_of_failures(self.stage, self.sampler, everyone)
        self.failed_rows += sum(s.error is not None for s in everyone)
        kept = []
        for group, first in zip(groups, greedy):
            group.samples, asked = [s for s in group.samples if s.error is None], len(group.samples)
            group.opponents, group.greedy_sample = [o for o in group.opponents if o.error is None], first
            short = len(group.samples) < min(asked, 2 if self.row.compares else 1) or (self.opponent is not None and not group.opponents)
            if not short and (first is None or first.error is None):
                kept.append(group)
        return kept

    def _overridden(self, total: float, *counters) -> float:
        """Control experiments: rewards that have nothing to do with the task, or its opposite."""
        if self.config.reward_override == "inverted":
            return -total
        if self.config.reward_override == "random":
            return float(self.stage.rng("random-reward", self.iteration, *counters).integers(0, 2))
        return total

    @property
    def completion_limit(self) -> int:
        return step_function(self.config.context_schedule, self.version, self.config.max_completion_length)

    def _order(self, purpose: str, n: int, k: int) -> int:
        """Row of position ``k`` in passes over ``n`` rows, each pass shuffled anew."""
        epoch, index = divmod(k, n)
        if getattr(self, "_permutation", (None,))[0] != (purpose, epoch):
            self._permutation = ((purpose, epoch), self.stage.rng(purpose, epoch).permutation(n))
        return int(self._permutation[1][index])

    def _prompt_index(self, k: int) -> int:
        config = self.config
        if config.curriculum == "rerank":
            return self._next_in_line()
        if config.curriculum == "pass_at_k":
            return self._next_admitted()
        if self.levels is None:
            return self._order("prompts", len(self.prompts), k)
        if config.curriculum == "easy_to_hard":
            return order_by_difficulty(self.levels)[0][k % len(self.prompts)]
        steps = sorted(set(self.levels))
        chances = e2h_probabilities(config.curriculum, self.version, self.total_steps, len(steps), config.curriculum_beta, config.curriculum_sigma)
        rng = self.stage.rng("curriculum", k)
        level = steps[int(rng.choice(len(steps), p=chances))]
        return int(rng.choice([i for i, v in enumerate(self.levels) if v == level]))

    def _next_in_line(self) -> int:
        """Prompts by what their last group could teach, those without a signal left out; a shuffled pass first (PROMPT-RERANK)."""
        if not self.queue:
            at = {row["row_id"]: i for i, (row, _) in enumerate(self.prompts)}
            self.queue = [at[row_id] for row_id in rerank(self.scores)[0]] or self.stage.rng("prompts", self.cursor).permutation(len(self.prompts)).tolist()
        return self.queue.pop(0)

    def _next_admitted(self) -> int:
        """Prompts in shuffled passes over those whose pass@k is high enough for this part of the run (PASSK-CURR)."""
        config = self.config
        if not self.queue:
            admitted = set(pass_at_k_band(self.counts, config.passk_k, config.passk_bands, self.version / self.total_steps))
            known = [i for i, (row, _) in enumerate(self.prompts) if row["row_id"] in admitted]
            self.queue = [known[int(i)] for i in self.stage.rng("prompts", self.cursor).permutation(len(known))]
            self.queue = self.queue[:max(config.prompts_per_step, 1)]  # judged anew for every batch
        return self.queue.pop(0)

    def _filter_by_difficulty(self) -> None:
        """Keep the prompts whose pass rate lies in the band; the counts of all of them go to prompt_stats as iteration -1 (DIFF-FILTER)."""
        from storage.schema import complete_row

        low, high = self.config.difficulty_band
        kept = {row_id: difficulty_band([c], n, low, high)[0] for row_id, (n, c) in self.counts.items()}
        rows = []
        for prompt, _ in self.prompts:
            n, c = self.counts[prompt["row_id"]]
            rows.append(complete_row("prompt_stats/1", {
                "prompt_id": prompt["prompt_id"], "group_id": prompt["group_id"], "iteration": -1, "n": n, "mean_reward": c / n, "reward_std": (c / n * (1 - c / n)) ** 0.5,
                "pass_at_1": c / n, "mean_logprob": 0.0, "kept": kept[prompt["row_id"]], "drop_reason": None if kept[prompt["row_id"]] else "difficulty"},
                dataset="prompt_stats", source=prompt["dataset"], origin="ai", split="train"))
        self.stats.write(rows)
        self.stats.flush()
        left = [p for p in self.prompts if kept[p[0]["row_id"]]]
        if not left:
            raise ValueError(f"no prompt has a pass rate in difficulty_band=[{low:g}, {high:g}]; widen it, or start from a model that solves some of them")
        self.stage.log(f"{len(left)} of {len(self.prompts)} prompts have a pass rate between {low:g} and {high:g}")
        self.prompts = left

    def _first_counts(self) -> dict[str, tuple[int, int]]:
        """(samples, right ones) of every prompt: the last ones of the input prompt_stats, else of the starting policy (PASSK-CURR, DIFF-FILTER)."""
        if self.stage.has("prompt_stats"):
            found: dict[str, tuple[int, int, int]] = {}
            for row in self.stage.dataset("prompt_stats").iter_rows():
                if row["iteration"] >= found.get(row["prompt_id"], (-1,))[0]:
                    found[row["prompt_id"]] = (row["iteration"], row["n"], round(row["n"] * row["pass_at_1"]))
            missing = [row["prompt_id"] for row, _ in self.prompts if row["prompt_id"] not in found]
            if missing:
                raise ValueError(f"the input prompt_stats knows nothing about prompt {missing[0]} and {len(missing) - 1} more; give statistics of these prompts, or leave the "
                                 "input out so that passk_samples are drawn.")
            return {row["row_id"]: found[row["prompt_id"]][1:] for row, _ in self.prompts}
        seeds = [[self.stage.seed_for("pass-at-k", p["row_id"], g) for g in range(self.config.passk_samples)] for p, _ in self.prompts]
        groups = self._draw(self.engine(), self.prompts, self.params, seeds)
        score(self.rewards, [s for g in groups for s in g])
        return {row["row_id"]: counted(group) for (row, _), group in zip(self.prompts, groups)}

    # -- from groups to training items ---------------------------------------------------------------------------
    def _shape(self, groups: list[Group], write: bool = True) -> tuple[list[Item], dict[str, float]]:
        """Log-probs, values, shaped rewards, advantages, filters: the items of one iteration and its metrics."""
        config, row = self.config, self.row
        samples = [s for g in groups for s in g.samples]
        group_of = np.repeat(np.arange(len(groups)), [len(g.samples) for g in groups])
        group_at = [groups[g] for g in group_of]
        width = max([1, *(len(s.ids) for s in samples)])
        actions = [s.action_mask for s in samples]
        mask = np.stack([np.pad(np.asarray(a, bool), (0, width - len(a))) for a in actions])

        def padded(rows):
            out = np.zeros(mask.shape)
            for i, r in enumerate(rows):
                out[i, : len(r)] = r
            return out

        items = [make_item(g.prompt["row_id"], g.ids, [s.ids for s in g.samples], [s.action_mask for s in g.samples]) for g in groups]
        sampled = [s.logps for s in samples]
        known = all(logps is not None for logps in sampled)
        fresh = all(g.fresh for g in groups)
        if fresh and self.exact_logps and not any(s.off_policy for s in samples):
            old = sampled
        elif fresh or row.on_policy_logps:
            old = self._logps(self.model, items)
        elif known:
            old = sampled  # of the policies that sampled them
        else:
            raise ValueError(f"replayed rollouts need the log-probs of who sampled them, and {self.sampler.name} gives none; write replay_fraction=0, or use "
                             "engine=builtin or engine=vllm.")
        if config.importance_correction != "none" and not known:
            raise ValueError(f"importance_correction={config.importance_correction} weighs with the sampler's log-probs, and {self.sampler.name} gives none; "
                             "write importance_correction=none, or use engine=vllm.")
        weights = self._importance_weights(padded(old), padded(sampled), mask) if config.importance_correction != "none" else None
        ref = None
        if row.needs_reference or config.monitor_kl:
            ref = old if config.ref_mode == "previous" else self._logps(self.reference, items)
        values, after = self.critic.values(items) if self.critic is not None else (None, 0.0)

        scores = np.array([s.total for s in samples])
        terminated = [s.terminated for s in samples]
        cache = round(row.soft_punish_share * self.completion_limit) if config.soft_punish_cache is None else config.soft_punish_cache
        overlong = overlong_penalty([len(s.ids) for s in samples], self.completion_limit, cache) if cache else np.zeros(len(samples))
        rewards, bootstrap, kept = apply_truncation(scores + overlong, terminated, row.truncation_policy, config.missing_eos_penalty,
                                                    config.missing_eos_mode, after)
        if self.agent and row.truncation_policy == "bootstrap":
            rewards = scores + overlong  # what the turns of a truncated trajectory earned is kept; its value is what may still come
        finite = np.isfinite(scores)
        rewards = np.where(finite, rewards, np.nan)
        metrics = rollout_metrics(samples, rewards, group_of)
        if self.members.component:
            metrics |= rubric_metrics([s.items for s in samples], [s.parts.get(self.members.component.name) for s in samples])
        if self.members.active:
            metrics |= self.members.metrics(samples, old)
        if cache:
            metrics["reward/overlong"] = float(overlong.mean())
        counted = finite & (kept | config.truncated_in_stats)
        kept = kept & (config.sft_in_loss | np.array([s.mode != "sft" for s in samples]))
        kl = None
        if ref is not None:
            d = padded(old) - padded(ref)
            kl = {"k1": d, "k2": d * d / 2, "k3": np.expm1(-d.clip(-20, 20)) + d}[config.kl_reward_estimator] if row.needs_reference else None
            metrics["kl/sequence_sum"] = self.last_kl = float(d.sum(1).mean())
        batch = Batch(rewards, group_of, mask, finite & kept, counted, kl, self._baselines(group_at),
                      None if values is None else padded(values), bootstrap, *self._comparisons(samples, group_at))
        if self.agent:
            metrics |= debate_metrics(samples, rewards_of(self.config, "debate")) if self.seats == 2 else agent_metrics(samples)
            batch.turns = [([t["end"] - 1 for t in s.turns], s.turn_rewards or [0.0] * len(s.turns)) for s in samples]
            if row.advantage == "process":
                batch.steps = batch.turns
        if row.advantage == "vine":
            batch.steps, batch.step_values = self._monte_carlo(samples, group_at)
        kl_reward_coef = self.controller.coef if row.kl_reward_coef else 0.0
        credit = assign(row, batch, kl_reward_coef, config.advantage_clip)
        trained = batch.kept_B & (credit.informative_B | (config.zero_advantage == "keep") | (not row.compares))
        metrics |= self._credit_metrics(batch, credit, trained, kl_reward_coef)
        if not fresh:
            metrics |= self._off_policy_metrics(groups, sampled, old)
        elif known and old is not sampled:
            metrics |= self._mismatch(samples, old)

        final, start = [], 0
        by_row = self._constant_per_row(credit.advantages_BT, mask)
        for item in items:
            rows = range(start, start + len(item.responses))
            start += len(rows)
            lengths = [len(samples[i].ids) for i in rows]

            def cut(array):
                return [array[i, :n].tolist() for i, n in zip(rows, lengths)]

            extra = {"old_logps": [list(map(float, old[i])) for i in rows],
                     "advantages": [float(credit.advantages_BT[i, 0]) for i in rows] if by_row else cut(credit.advantages_BT)}
            if ref is not None:
                extra["ref_logps"] = [list(map(float, ref[i])) for i in rows]
            if weights is not None:
                extra["weights"] = cut(weights)
            if values is not None:
                extra |= {"values": [values[i] for i in rows], "returns": cut(credit.returns_BT)}
            if row.objective:
                extra["rewards"] = [float(credit.rewards_B[i]) for i in rows]
            if row.positive_nll_coef:
                extra["correct"] = [bool(samples[i].correct) for i in rows]
            dead = (not row.objective and not credit.advantages_BT[rows.start:rows.stop].any() and not row.kl_loss_coef and not config.entropy_coef
                    and not row.positive_nll_coef and not (self.critic is not None and self.critic.trainer is None))
            extra["skip_forward"] = bool(dead)
            masks = [np.asarray(actions[i], int) * bool(trained[i]) for i in rows]
            final.append(make_item(item.row_id, item.prompt, item.responses, masks, **extra))
        if write:
            self._write(groups, group_at, samples, rewards, overlong, credit, old, sampled, ref, values, batch, weights, trained)
        return final, metrics

    @staticmethod
    def _constant_per_row(advantages_BT, mask) -> bool:
        """Whether every completion has one advantage for all its tokens (then one number is stored)."""
        return bool((np.where(mask, advantages_BT - advantages_BT[:, :1], 0.0) == 0).all())

    def _baselines(self, group_at):
        kind = self.row.baseline if self.row.advantage == "reward_minus_baseline" else "none"
        if kind == "moving_average":
            return self.baseline.use
        if kind == "constant":
            return self.config.baseline_value
        if kind == "greedy":
            return np.array([g.greedy for g in group_at])
        if kind in ("table", "v_star"):
            return table_baseline([g.prompt["prompt_id"] for g in group_at], self.table)
        return 0.0

    def _comparisons(self, samples, group_at):
        """(reasoning steps, preferences over opponents) of every completion, where the advantage reads them."""
        if self.process_scorer is not None:
            return [self._steps(s) for s in samples], None
        if self.row.advantage != "win_rate":
            return [], None
        from scipy.special import expit

        others = [[o.total for o in (g.opponents or g.samples)] for g in group_at]
        found = np.full((len(samples), max(map(len, others))), np.nan)
        for i, (sample, totals) in enumerate(zip(samples, others)):
            found[i, : len(totals)] = expit(sample.total - np.asarray(totals))  # Bradley-Terry; NaN where a score is missing
        return [], found

    def _monte_carlo(self, samples: list[Sample], group_at: list[Group]) -> tuple[list, list[list[float]]]:
        """(steps, values before each step) of every completion: the mean reward of ``vine_samples`` continuations from each border (VINEPPO).

        Steps end at the separator, in an environment with turns, whose actions are played again. Prompts are continued once for their group.
        """
        config, requests, where, starts = self.config, [], [], {}
        steps = [[t["end"] - 1 for t in s.turns] if self.agent else
                 step_ends([self.renderer.tokenizer.decode([t], skip_special_tokens=True) for t in s.ids], config.step_separator) for s in samples]
        steps = [[*ends[:-1], len(s.ids) - 1] if s.ids else [] for ends, s in zip(steps, samples)]
        for sample, group, ends in zip(samples, group_at, steps):
            if not ends:  # the environment failed before anything was said
                where.append([])
                continue
            if id(group) not in starts:
                starts[id(group)] = len(requests)
                requests.append((sample, 0))
            where.append([starts[id(group)], *range(len(requests), len(requests) + len(ends) - 1)])
            requests += [(sample, k + 1) for k in range(len(ends) - 1)]
        order = {id(s): i for i, s in enumerate(samples)}
        seeds = [[self.stage.seed_for("vine", self.iteration, s.prompt["row_id"], order[id(s)], k, j) for j in range(config.vine_samples)] for s, k in requests]
        params = replace(self.params, max_new_tokens=self.completion_limit)
        if self.agent:
            prefixes = [prefix_of(s, k) for s, k in requests]
            made = self.agent.sample(self.engine(), [(s.prompt, s.prompt_ids) for s, _ in requests], params, seeds, prefixes)
        else:
            made = continuations(self.engine(), [(s, steps[order[id(s)]][k - 1] + 1 if k else 0) for s, k in requests], params, seeds)
        score(self.rewards, [s for group in made for s in group])
        values = [float(np.mean([s.total for s in group if np.isfinite(s.total)] or [0.0])) for group in made]
        return [(ends, None) for ends in steps], [[values[i] for i in own] for own in where]

    def _steps(self, sample: Sample) -> tuple[list[int], list[float]]:
        """(last token, reward) of each step: a process reward model's probability that it is right, or a scalar reward model's score of
        the response up to there (GRPO-PROCESS). A completion whose steps cannot be read has none."""
        pieces, scorer = [self.renderer.tokenizer.decode([t], skip_special_tokens=True) for t in sample.ids], self.process_scorer
        if hasattr(scorer, "step_probabilities"):
            from stages.reward_scorers import Response

            ends = step_ends(pieces, scorer.card.options["separator"])
            found = scorer.step_probabilities([Response(sample.prompt["prompt"], [{"role": "assistant", "content": sample.text}], row=sample.prompt)])[0]
            return (ends, found) if len(ends) == len(found) else ([], [])
        if not hasattr(scorer, "score_ids"):
            raise ValueError(f"advantage=process reads a process reward model (objective=prm) or a scalar one, not objective={scorer.card.objective}; give "
                             "another reward_model.")
        ends = step_ends(pieces, self.config.step_separator)
        rows = [list(sample.prompt_ids) + sample.ids[: end + 1] for end in ends]
        return ends, scorer.score_ids(rows) if rows else []

    def _importance_weights(self, old, sampled, mask):
        import torch

        from stages.losses import truncated_importance_weights

        found = truncated_importance_weights(torch.tensor(old), torch.tensor(sampled), torch.tensor(mask), self.config.importance_correction,
                                             self.config.importance_clip_max)
        return found.expand(mask.shape).numpy()

    def _credit_metrics(self, batch, credit, trained, coef) -> dict[str, float]:
        on = batch.mask_BT & trained[:, None]
        flat = credit.advantages_BT[on]
        out = {"advantage/std": float(credit.advantages_BT[batch.mask_BT].std()) if batch.mask_BT.any() else 0.0, "advantage/std_raw": credit.raw_std,
               "groups/informative_fraction": float(np.mean([credit.informative_B[batch.group_of_B == g].any() for g in np.unique(batch.group_of_B)])),
               "groups/trained_sequences": float(trained.sum())}
        if flat.size:
            out |= {"advantage/mean": float(flat.mean()), "advantage/positive_fraction": float((flat > 0).mean())}
        if coef:
            out |= {"reward/shaped": float(credit.rewards_B[batch.counted_B].mean()) if batch.counted_B.any() else 0.0}
        if coef or self.row.kl_loss_coef:
            out["kl/coef"] = self.controller.coef
        if batch.values_BT is not None:
            out |= {"critic/explained_variance": explained_variance(batch.values_BT, credit.returns_BT, on)}
            if on.any():
                out |= {"critic/value_mean_old": float(batch.values_BT[on].mean()), "critic/return_mean_old": float(credit.returns_BT[on].mean())}
        return out

    def _off_policy_metrics(self, groups, sampled, old) -> dict[str, float]:
        late = [self.version - g.version for g in groups if g.version >= 0]
        out = {"staleness/mean": float(np.mean(late)), "staleness/max": float(max(late))} if late else {}
        if old is not sampled:
            out["sampling/logp_difference"] = float(np.mean([abs(np.mean(np.subtract(a, b))) for a, b in zip(old, sampled) if len(a)]))
        return out

    def _mismatch(self, samples, old) -> dict[str, float]:
        """How far the engine's log-probs are from the trainer's on the tokens just sampled (TIS): differences, ratios, KL(engine || trainer)."""
        apart = [np.subtract(o, s.logps) for s, o in zip(samples, old) if s.ids and not s.off_policy]
        if not apart:
            return {}
        d = np.concatenate(apart).clip(-20, 20)
        out = {"sampling/logp_difference/mean": float(np.abs(d).mean()), "sampling/logp_difference/max": float(np.abs(d).max()),
               "sampling/mismatch_kl": float((np.expm1(d) - d).mean()), **{f"sampling/importance_sampling_ratio/{name}": float(of(np.exp(d)))
                                                                          for name, of in (("mean", np.mean), ("min", np.min), ("max", np.max))}}
        limit = self.config.engine_max_mismatch
        if limit and not self.sampler.exact_logps and out["sampling/logp_difference/mean"] > limit:
            raise TrainingError(f"The log-probs of {self.sampler.name} differ from the trainer's by {out['sampling/logp_difference/mean']:.3f} nats per token, "
                                f"over engine_max_mismatch={limit}: it does not sample from the policy's weights, or with other settings. Check that it serves the "
                                "directory it is given, with its tokenizer and without a sampling default of its own.")
        return out

    def _logps(self, model, items) -> list[list[float]]:
        """Log-probs of every response token under ``model`` at the sampling temperature, in sample order."""
        from stages.modeling import target_logps

        def compute(batch):
            padded = batch.padded(target_logps(model, batch, self.config.temperature)[0]).cpu().numpy()
            lengths = [len(response) for item in batch.items for response in item.responses]
            return [row[:length].tolist() for row, length in zip(padded, lengths)]

        if sharding.root_of(model) is not None:
            return [row for rows in per_response(items, self.config.max_tokens_per_micro_batch, self.stage.device, compute, model) for row in rows]
        mine = range(ranks.rank(), len(items), ranks.world_size())
        found = dict(zip(mine, per_response([items[i] for i in mine], self.config.max_tokens_per_micro_batch, self.stage.device, compute)))
        everyone = {i: rows for part in ranks.gather(found) for i, rows in part.items()}
        return [row for i in range(len(items)) for row in everyone[i]]

    def _drift(self, items: list[Item]) -> float:
        """Mean k3 of KL(old||new) over the trained tokens of ``items``, nats."""
        live = [i for i in items if i.n_targets]
        total = count = 0.0
        self.refresh()
        for new, old, mask in zip(self._logps(self.model, live), (o for i in live for o in i.extra["old_logps"]), (m for i in live for m in i.masks)):
            d = np.where(mask > 0, np.subtract(new, old) if len(new) else 0.0, 0.0).clip(-20, 20)
            total, count = total + float((np.expm1(d) - d).sum()), count + float((mask > 0).sum())
        return total / max(count, 1.0)

    # -- what is prepared once, or kept between iterations ----------------------------------------------------------
    def _replayed(self) -> tuple[list[Group], dict[str, float]]:
        """Groups drawn from the window of older iterations (REPLAY), not older than max_staleness (ASYNC)."""
        config = self.config
        plan = replay_plan(self.iteration, [w["iteration"] for w in self.window], config.prompts_per_step, config.replay_window, config.replay_fraction)
        self.window = [w for w in self.window if w["iteration"] not in plan["evicted"]]
        pool = [_full_group(g, self.prompts) for w in self.window if w["iteration"] in plan["eligible_replay"] for g in w["groups"]]
        fit = freshness_guard(self.version, [g.version for g in pool], config.max_staleness or self.total_steps)
        usable = [g for g, ok in zip(pool, fit) if ok]
        n = min(plan["num_replay"], len(usable))
        picks = self.stage.rng("replay", self.iteration).permutation(len(usable))[:n]
        return [usable[i] for i in picks], {"replay/share": n / config.prompts_per_step, "replay/rejected_stale": float(len(pool) - len(usable))}

    def _warm_up_critic(self) -> None:
        """Critic steps on rollouts of the starting policy, which are not kept (VAPO value pretraining)."""
        cursor, queue = self.cursor, list(self.queue)
        for step in range(self.row.critic_warmup_steps):
            items, _ = self._shape(self._sample(self.config.prompts_per_step, step * self.config.prompts_per_step, "critic-warmup"), write=False)
            self.critic.train(items)
        self.cursor, self.queue, self.warmed = cursor, queue, True

    def _baseline_table(self) -> dict[str, float]:
        """Baseline of every prompt, given or from completions of the starting policy (BASELINE table and v_star, ASTAR-PO stage 1)."""
        from storage.schema import complete_row

        if self.stage.has("baselines"):
            return {r["prompt_id"]: float(r["b"]) for r in self.stage.dataset("baselines").iter_rows()}
        n = self.config.baseline_samples
        seeds = [[self.stage.seed_for("baseline", p["row_id"], g) for g in range(n)] for p, _ in self.prompts]
        groups = self._draw(self.engine(), self.prompts, self.params, seeds)
        warn_of_failures(self.stage, self.sampler, [s for g in groups for s in g])
        score(self.rewards, [s for g in groups for s in g])
        table, rows = {}, []
        for (prompt, _), group in zip(self.prompts, groups):
            totals = [s.total for s in group if np.isfinite(s.total)]
            value = 0.0 if not totals else v_star(totals, self.config.v_star_beta) if self.row.baseline == "v_star" else float(np.mean(totals))
            table[prompt["prompt_id"]] = value
            rows.append(complete_row("baselines/1", {"prompt_id": prompt["prompt_id"], "group_id": prompt["group_id"], "b": value, "n": len(totals),
                                                     "policy_version": 0}, dataset="baselines", source=prompt["dataset"], origin="ai", split="train"))
        writer = self.stage.writer("baselines", "baselines/1")
        writer.write(rows)
        writer.close({"prompts": len(rows)})
        return table

    def _opponent(self):
        if self.row.advantage != "win_rate" or self.config.opponent == "self":
            return None
        from stages.modeling import freeze, load_policy
        from stages.sampler import Sampler

        if self.config.opponent == "mixture":
            from stages.generation import MixtureSampler

            return MixtureSampler(self.model, self.reference, self.renderer.tokenizer, self.config.mixture_coef)
        return Sampler(freeze(load_policy(self.stage.path("model"), self.stage.device)), self.renderer.tokenizer, max_batch=self.config.generation_batch)

    def _difficulties(self) -> list[float]:
        out = []
        for row, _ in self.prompts:
            found = json.loads(row.get("extra_json") or "{}")
            value = found.get("difficulty", found.get("level", 1.0 - found["pass_rate"] if "pass_rate" in found else None))
            if value is None:
                raise ValueError(f"curriculum={self.config.curriculum} needs a difficulty for every prompt, but {row['row_id'][:12]} has none; write "
                                 'extra_json={"difficulty": 2} (or level, or pass_rate) into the prompts, or curriculum=none.')
            out.append(float(value))
        return out

    def _pretraining(self) -> list[Item]:
        """Rows of the input ptx, every token trained (PPO-PTX)."""
        from types import SimpleNamespace

        from stages.sft import encode_text

        data, length = self.stage.dataset("ptx"), self.config.ptx_max_length
        if data.kind == "text/1":
            rows = [i.responses[0].tolist() for i in encode_text(data, "train", self.renderer, SimpleNamespace(max_length=length))[0]]
        else:
            rows = [self.renderer.conversation(r["messages"], max_length=length).ids for r in data.iter_rows(split="train")]
        made = [make_item(f"ptx-{k}", [], [ids], [[1] * len(ids)], ptx=True) for k, ids in enumerate(rows) if len(ids) > 1]
        if not made:
            raise ValueError("The input ptx has no train row with two tokens or more; give a text/1 dataset with a train split, or ptx_coef=0.")
        return made

    def _stored(self) -> list[Group]:
        """Groups of the input ``stored``, in its order: completions of one prompt and iteration."""
        if not self.row.off_policy_ok:
            raise ValueError(f"the input stored gives rollouts of other policies to {self.config.preset}, which is on-policy; write preset=topr, "
                             "offline_is, copg, mdpo or oreo, or leave the input out.")
        by_id = {row["prompt_id"]: row for row, _ in self.prompts}
        groups: dict[tuple, Group] = {}
        for row in self.stage.dataset("stored").iter_rows():
            prompt = by_id.get(row["prompt_id"]) or {k: row[k] for k in ("row_id", "prompt_id", "group_id", "dataset")}
            parts = {c["name"]: c["value"] for c in row["reward_components"] if c["name"] != "overlong"}
            total = sum(c["weight"] * c["value"] for c in row["reward_components"] if c["name"] != "overlong" and c["value"] is not None)
            sample = Sample(prompt, row["prompt_ids"], 0, list(row["completion_ids"]), [float(v) for v in row["logp_rollout"] or row["logp_old"]],
                            "eos" if row["terminated"] else "length", "", float("nan") if row["reward_tier"] == "unscorable" else total, parts, {},
                            row["is_correct"])
            key = (row["iteration"], row["prompt_id"], tuple(row["prompt_ids"]))
            group = groups.setdefault(key, Group(prompt, list(row["prompt_ids"]), [], -1, False))
            sample.index = len(group.samples)
            group.samples.append(sample)
        if not groups:
            raise ValueError("the input stored has no rows; give a rollouts/1 dataset, for example the rollouts output of an rl stage.")
        return list(groups.values())

    # -- datasets ---------------------------------------------------------------------------------------------------
    def _write(self, groups, group_at, samples, rewards, overlong, credit, old, sampled, ref, values, batch, weights, trained) -> None:
        from storage.schema import complete_row

        component_weights, tiers = {c.name: c.weight for c in self.config.rewards}, {c.name: c.tier for c in self.config.rewards if c.tier}
        rows = []
        for i, s in enumerate(samples):
            n = len(s.ids)
            scored = bool(np.isfinite(rewards[i]))
            components = [{"name": k, "value": v, "weight": component_weights.get(k, 0.0) if tiers.get(k, s.tier) == s.tier else 0.0}
                          for k, v in s.parts.items()]
            if overlong[i]:
                components.append({"name": "overlong", "value": float(overlong[i]), "weight": 1.0})
            steps = batch.steps[i] if batch.steps else (None, None)
            turns = None if s.turns is None else [{"start": t["start"], "end": t["end"], "reward": r, "events": t["events"]}
                                                  for t, r in zip(s.turns, batch.turns[i][1])]
            rows.append(complete_row("rollouts/1", {
                "prompt_id": s.prompt["prompt_id"], "group_id": s.prompt["group_id"], "iteration": self.iteration,
                "policy_version": self.version if group_at[i].fresh else group_at[i].version, "sample_idx": i, "prompt_ids": s.prompt_ids,
                "completion_ids": s.ids, "loss_mask": batch.mask_BT[i, :n].astype(int).tolist() if trained[i] else [0] * n,
                "logp_old": [float(v) for v in old[i]],
                "logp_rollout": None if old is sampled or s.mode == "sft" or s.logps is None else [float(v) for v in s.logps],
                "logp_plain_prompt": [float(v) for v in old[i]] if s.off_policy else None, "sampling_prompt_id": s.context,
                "extra_json": json.dumps(extra) if (extra := self._extra(s)) else None,
                "logp_ref": None if ref is None else [float(v) for v in ref[i]], "values": None if values is None else values[i],
                "bootstrap_value": None if values is None else float(np.broadcast_to(batch.bootstrap_B, len(samples))[i]),
                "token_rewards": credit.token_rewards_BT[i, :n].tolist(), "advantages": credit.advantages_BT[i, :n].tolist(),
                "returns": None if values is None else credit.returns_BT[i, :n].tolist(), "is_weights": None if weights is None else weights[i, :n].tolist(),
                "step_ends": steps[0], "step_rewards": steps[1], "step_values": batch.step_values[i] if batch.step_values else None,
                "tool_mask": s.tool_mask, "turns": turns, "finish_reason": s.finish_reason if turns is not None else None, "reward": float(rewards[i]) if scored else 0.0,
                "shaped_reward": float(credit.rewards_B[i]) if scored else 0.0, "reward_tier": s.tier if scored else "unscorable",
                "reward_components": components, "is_correct": s.correct, "truncated": not s.terminated, "terminated": s.terminated, "length": n},
                dataset="rollouts", source=s.prompt["dataset"], origin="ai", split="train"))
        self.writer.write(rows)
        self.writer.flush()
        if self.agent:
            self.trajectories.write([complete_row("trajectories/1", {"prompt_id": one["prompt_id"], "group_id": one["group_id"], **turn}, dataset="trajectories",
                                                  source=one["source"], origin="ai", split="train")
                                     for s, one in zip(samples, rows) for turn in trajectory_rows(s, one["row_id"])])
            self.trajectories.flush()
        self.members.written(samples, rows)
        if self.rubric_writer is not None:
            self.rubric_writer.write([made for one, s in zip(rows, samples) for made in score_rows(one, s.items, self.iteration)])
            self.rubric_writer.flush()

    def _extra(self, s: Sample) -> dict:
        found = {"mode": s.mode, "off_policy": s.off_policy, "parent_sample_id": s.parent} if self.members.active else {}
        return found | ({"reencoded": True} if s.reencoded else {})

    def _write_stats(self, groups: list[tuple[Group, str | None]]) -> None:
        from storage.schema import complete_row

        rows = []
        for group, reason in groups:
            totals = [s.total for s in group.samples if np.isfinite(s.total)]
            verdicts = [s.correct for s in group.samples if s.correct is not None]
            logps = [v for s in group.samples for v in s.logps or ()]
            rows.append(complete_row("prompt_stats/1", {
                "prompt_id": group.prompt["prompt_id"], "group_id": group.prompt["group_id"], "iteration": self.iteration, "n": len(group.samples),
                "mean_reward": float(np.mean(totals)) if totals else 0.0, "reward_std": float(np.std(totals)) if totals else 0.0,
                "pass_at_1": float(np.mean(verdicts)) if verdicts else 0.0, "mean_logprob": float(np.mean(logps)) if logps else 0.0,
                "kept": reason is None, "drop_reason": reason}, dataset="prompt_stats", source=group.prompt["dataset"], origin="ai", split="train"))
        self.stats.write(rows)
        self.stats.flush()


def agent_for(config, row: RLPreset, renderer, rewards, stage) -> Agent | Debaters | None:
    """What samples trajectories, where an environment is set; refuses settings that have no meaning there."""
    if not config.environment:
        on_turns = [c.name for c in rewards.components if c.kind in ON_TURNS]
        if on_turns:
            raise ValueError(f"reward {on_turns[0]!r} scores trajectories in an environment; write environment=tools (or module:Class of your own), "
                             "or take it out of rewards")
        return None
    if config.environment == "debate":
        if not any(c.kind == "debate" for c in rewards.components):
            raise ValueError("environment=debate is decided by a judge; add a reward of kind debate and the input judge (or an endpoint)")
        for name, on in ((f"baseline={row.baseline}", row.baseline in ("greedy", "table", "v_star")), ("advantage=vine", row.advantage == "vine"),
                         ("curriculum=pass_at_k", config.curriculum == "pass_at_k")):
            if on:
                raise ValueError(f"{name} needs completions of one prompt, and a debate has two sides; write preset=dr_grpo or agent")
    refused = {"opponent": config.opponent != "self", "prompt_template": config.prompt_template != "chat", "mode_mix": config.mode_mix != "fresh",
               "sft_member": config.sft_member != "none", "stored": stage.has("stored")}
    for name in (name for name, on in refused.items() if on):
        raise ValueError(f"{name} is not supported in an environment: it answers a prompt in one turn; leave it out, or write environment=''")
    for text in {w for c in rewards.components if c.kind == "step_weighted" for w in check_step_weights(c.step_weights or STEP_WEIGHTS)}:
        stage.warn("step_weights", text)
    return Debaters(config, renderer) if config.environment == "debate" else Agent(config, renderer)


def rewards_of(config, kind: str) -> str:
    """Name of the first reward component of a kind."""
    return next(c.name for c in config.rewards if c.kind == kind)


def counted(samples: list[Sample]) -> tuple[int, int]:
    """(samples with a verdict, right ones) of a prompt; raises ValueError where nothing says what is right."""
    verdicts = [s.correct for s in samples if s.correct is not None]
    if not verdicts:
        raise ValueError("curriculum=pass_at_k and difficulty_band need to know which completions are right; add a reward of kind verifier, code or "
                         "environment, or leave them out.")
    return len(verdicts), sum(verdicts)


def _plain_group(group: Group) -> dict:
    """A group as JSON, its prompt by row id."""
    samples = [{k: v for k, v in vars(s).items() if k not in ("prompt", "prompt_ids")} for s in group.samples]
    return {"row_id": group.prompt["row_id"], "ids": list(group.ids), "version": group.version, "greedy": group.greedy, "samples": samples}


def _full_group(plain: dict, prompts) -> Group:
    row = next(row for row, _ in prompts if row["row_id"] == plain["row_id"])
    samples = [Sample(row, plain["ids"], **s) for s in plain["samples"]]
    return Group(row, plain["ids"], samples, plain["version"], False, [], plain["greedy"])


def step_ends(pieces: list[str], separator: str) -> list[int]:
    """Index of the last token of each non-blank reasoning step: the token that completes its separator, or the last token (GRPO-PROCESS)."""
    text, bounds = "".join(pieces), np.cumsum([len(p) for p in pieces])
    ends, start = [], 0
    for part in text.split(separator):
        stop = start + len(part) + len(separator)
        if part.strip():
            ends.append(int(min(np.searchsorted(bounds, stop), len(pieces) - 1)))
        start = stop
    return ends


def rollout_metrics(samples, rewards, group_of) -> dict[str, float]:
    """What people who debug RL look at: rewards by component, lengths, truncation, groups without signal."""
    lengths = np.array([len(s.ids) for s in samples], float)
    ended = np.array([s.terminated for s in samples])
    ok = np.isfinite(rewards)
    out = {"completions/mean_length": float(lengths.mean()), "completions/min_length": float(lengths.min()), "completions/max_length": float(lengths.max()),
           "completions/clipped_ratio": float((~ended).mean()), "completions/empty_fraction": float(np.mean([not s.text.strip() for s in samples])),
           "completions/repetition": float(np.mean([repetition_n(s.ids, 3) or 0.0 for s in samples])), "reward/unscorable_fraction": float((~ok).mean())}
    if ended.any():
        out["completions/mean_terminated_length"] = float(lengths[ended].mean())
    if ok.any():
        stds = [np.std(rewards[(group_of == g) & ok]) for g in np.unique(group_of) if ((group_of == g) & ok).any()]
        out |= {"reward/mean": float(rewards[ok].mean()), "reward/group_std": float(np.mean(stds)),
                "reward/frac_zero_std": float(np.mean([s == 0 for s in stds]))}
    for name in samples[0].parts:
        values = [s.parts[name] for s in samples if s.parts.get(name) is not None]
        if values:
            out[f"reward/{name}"] = float(np.mean(values))
    verdicts = [s.correct for s in samples if s.correct is not None]
    if verdicts:
        out["train/correct"] = float(np.mean(verdicts))
        for name, wanted in (("correct", True), ("incorrect", False)):
            chosen = [len(s.ids) for s in samples if s.correct is wanted]
            if chosen:
                out[f"completions/mean_{name}_length"] = float(np.mean(chosen))
    return out


def held_out_metrics(source: Rollouts, rewards, prompts, step: int) -> dict[str, float]:
    """One sampled completion per validation prompt, with the same seeds at every call; the answers go to the dataset ``validation``."""
    stage = source.stage
    source.refresh()
    groups = source._draw(source.engine(), prompts, source.params, [[stage.seed_for("validation", row["row_id"])] for row, _ in prompts])
    drawn = [s for g in groups for s in (g if source.seats == 2 else g[:1])]
    warn_of_failures(stage, source.sampler, drawn)
    samples = [s for s in drawn if s.error is None]
    if source.config.engine_sleep:
        source.sampler.sleep(keep_weights=False)
    score(rewards, samples)
    rows = validation_rows(samples, step)
    source.validation.write(rows)
    source.validation.flush()
    stage.report("validation-samples", table=best_and_worst(records_of(rows)))  # of the newest pass while it runs, of all at the end
    found = rollout_metrics(samples, np.array([s.total for s in samples]), np.arange(len(samples))) if samples else {}
    if source.seats == 2:
        found |= debate_metrics(samples, rewards_of(source.config, "debate"))
    elif source.agent:
        found |= agent_metrics(samples)
    source.history.append({"step": step, **{f"validation/{k}": v for k, v in found.items() if f"validation/{k}" in WATCHED}})
    return found
