"""What RL leaves behind: every completion with all numbers of its update, every group and why it was dropped, turns,
rubric items, validation answers.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable

import numpy as np

from stages.acting.agents import trajectory_rows
from stages.evaluation.scores import records_of
from stages.generation import Sample, gen_record
from stages.policy.members import Members
from stages.policy.rl_report import best_and_worst, rollout_samples, validation_rows
from stages.reward.verdicts import failures
from stages.reward.rubric_reward import score_rows, write_review
from stages.rollouts.crediting import Scored
from stages.rollouts.groups import Group
from stages.rollouts.policy import PolicySampler
from stages.rollouts.recorded import leaves_validation_out
from storage.schema import complete_row

SHOW_SECONDS = 30.0  # between the samples that are shown while a run goes on


class Records:
    """The output datasets of an RL stage, exactly once over kills (:meth:`stages.harness.Stage.writer`).

    Args:
        members: gives answers that are improved later the ids of their rows. policy: what samples, whose settings are
            kept beside the rollouts (``meta.sampling``).
    """

    def __init__(self, stage, members: Members, policy: PolicySampler):
        self.stage = stage
        self.config = stage.config
        self.members = members
        self.policy = policy
        self.decode = policy.renderer.tokenizer.decode
        self.shown = -math.inf  # when samples were shown last
        wanted = {"rollouts": "rollouts/1"} | ({} if stage.has("recorded") else {"prompt_stats": "prompt_stats/1"})
        wanted |= ({"trajectories": "trajectories/1"} if policy.agent is not None else {}) | (
            {"rubric_scores": "rubric_scores/1"} if members.component and not stage.has("recorded") else {}
        )
        passes = self.config.eval_prompts and not leaves_validation_out(self.config, stage.inputs)
        wanted |= {"validation": "eval_samples/1"} if passes else {}
        how = {} if stage.has("stored") else {"rollouts": {"meta": {"sampling": sampling_record(policy)}}}
        self.writers = {name: stage.writer(name, kind, **how.get(name, {})) for name, kind in wanted.items()}

    def _write(self, name: str, rows: list[dict]) -> None:
        self.writers[name].write(rows)
        self.writers[name].flush()

    def rollouts(self, scored: Scored, iteration: int, version: int) -> list[dict]:
        """``rollouts/1`` of one iteration, the turns of its completions and the rubric items of those that were not
        replayed, whose items are there already; the rows. A completion that could
        not be scored has reward_tier=unscorable, no shaped_reward, and each component's reason in
        ``extra_json.unscorable``; its ``reward`` is 0 because the column has to have a number. Of a policy that learns
        from itself, ``extra_json.teacher`` has the ids of the teacher's prompt (null: it read none), the index in its
        group of the answer that this shows and the feedback that it shows; ``extra_json.feedback`` is what was said.

        Columns have the names of the catalogue's dataset kinds; what its section on RL calls prompt_token_ids and
        completion_token_ids is ``prompt_ids`` and ``completion_ids`` there, rollout_logprobs, old_logprobs and
        ref_logprobs are ``logp_rollout`` (None: the old ones), ``logp_old`` and ``logp_ref``. Its response mask is the
        whole completion without ``tool_mask``, sampling parameters and the generator's checkpoint are in ``gen``."""
        draws, times = {}, {}  # which draw of its prompt in this iteration a group is
        for group in scored.group_at:
            if id(group) not in draws:
                key = group.prompt["prompt_id"], tuple(group.ids)
                draws[id(group)] = times[key] = times.get(key, -1) + 1
        rows = [
            complete(
                s.prompt, "rollouts/1", self._rollout(scored, i, iteration, version, draws[id(scored.group_at[i])])
            )
            for i, s in enumerate(scored.samples)
        ]
        self._write("rollouts", rows)
        if time.monotonic() - self.shown >= SHOW_SECONDS:
            # of the newest batch while it runs, of the first and the last at the end
            self.stage.report("rollout-samples", table=rollout_samples(rows, self.decode))
            self.shown = time.monotonic()
        self.members.written(scored.samples, rows)
        if "trajectories" in self.writers:
            self._write(
                "trajectories",
                [
                    complete(s.prompt, "trajectories/1", turn)
                    for s, one in zip(scored.samples, rows)
                    for turn in trajectory_rows(s, one["row_id"])
                ],
            )
        if "rubric_scores" in self.writers:
            self._write(
                "rubric_scores",
                [
                    made
                    for one, s, group in zip(rows, scored.samples, scored.group_at)
                    if group.fresh
                    for made in score_rows(one, s.items, iteration)
                ],
            )
        return rows

    def _rollout(self, scored: Scored, i: int, iteration: int, version: int, draw: int) -> dict:
        s, group, batch, credit = scored.samples[i], scored.group_at[i], scored.batch, scored.credit
        n, valued, old = len(s.ids), scored.values is not None, [float(v) for v in scored.old[i]]
        steps = batch.steps[i] if batch.steps else s.step_rewards or (None, None)
        turns = (
            None
            if s.turns is None
            else [
                {"start": t["start"], "end": t["end"], "reward": r, "events": t["events"]}
                for t, r in zip(s.turns, batch.turns[i][1])
            ]
        )
        extra = (
            {"mode": s.mode, "off_policy": s.off_policy, "parent_sample_id": s.parent}
            if self.members.active or s.off_policy
            else {}
        )
        extra |= ({"reencoded": True} if s.reencoded else {}) | ({"draw": draw} if draw else {})
        extra |= (
            {"pair_preference": float(scored.preferred_B[i])}
            if scored.preferred_B is not None and np.isfinite(scored.preferred_B[i])
            else {}
        )
        extra |= {"steps_paid": True} if batch.steps_paid else {}
        if scored.reprompts is not None:
            read = scored.reprompts[i]
            extra |= {"teacher": {"prompt_ids": read.ids, "solution": read.solution, "feedback": read.feedback}}
            extra |= {"feedback": s.feedback} if s.feedback else {}
        failed = failures(s.parts, s.reasons)
        extra |= {"unscorable": failed} if failed else {}
        ok = bool(np.isfinite(batch.rewards_B[i]))
        return {
            "iteration": iteration,
            "policy_version": group.version,
            "sample_idx": i,
            "prompt_ids": s.prompt_ids if s.context_ids is None else s.context_ids,
            "completion_ids": s.ids,
            "loss_mask": batch.trained(scored.trained_B)[i, :n].astype(int).tolist(),
            "logp_old": old,
            "logp_rollout": (
                None
                if scored.old is scored.sampled or s.mode == "sft" or s.logps is None
                else [float(v) for v in s.logps]
            ),
            "logp_plain_prompt": (
                [float(v) for v in scored.plain[i]] if s.mode != "fresh" or s.context is not None else None
            ),
            "sampling_prompt_id": s.context,
            "extra_json": json.dumps(extra) if extra else None,
            "logp_ref": None if scored.ref is None else [float(v) for v in scored.ref[i]],
            "values": scored.values[i] if valued else None,
            "bootstrap_value": float(np.broadcast_to(batch.bootstrap_B, len(scored.samples))[i]) if valued else None,
            "token_rewards": credit.token_rewards_BT[i, :n].tolist(),
            "advantages": credit.advantages_BT[i, :n].tolist(),
            "returns": credit.returns_BT[i, :n].tolist() if valued else None,
            "is_weights": None if scored.weights_BT is None else scored.weights_BT[i, :n].tolist(),
            "step_ends": steps[0],
            "step_rewards": steps[1],
            "step_values": batch.step_values[i] if batch.step_values else None,
            "tool_mask": s.tool_mask,
            "gen": (
                None
                if s.seed is None
                else {
                    **gen_record(
                        self.stage, self.config, self.policy.renderer, s.seed, group.version, self.policy.engine.name
                    ),
                    "max_tokens": self.config.completion_limit(max(group.version, 0)),
                }
            ),
            "turns": turns,
            "finish_reason": s.finish_reason if turns is not None else None,
            "score": float(s.total) if np.isfinite(s.total) else None,
            "reward": float(batch.rewards_B[i]) if ok else 0.0,
            "shaped_reward": float(credit.rewards_B[i]) if ok else None,
            "reward_tier": s.tier if ok else "unscorable",
            "reward_components": self._components(s, scored.overlong_B[i]),
            "is_correct": s.correct,
            "truncated": not s.terminated,
            "terminated": s.terminated,
            "length": n,
        }

    def _components(self, s: Sample, overlong: float) -> list[dict]:
        # of one without a total, as configured
        weights = s.weights or {c.name: c.weight for c in self.config.rewards if not c.tier}
        found = [{"name": k, "value": v, "weight": weights.get(k, 0.0)} for k, v in s.parts.items()]
        return found + ([{"name": "overlong", "value": float(overlong), "weight": 1.0}] if overlong else [])

    def groups(self, groups: Iterable[tuple[Group, str | None]], iteration: int) -> None:
        """``prompt_stats/1``: every group with the reason it was dropped for, or None. ``n`` are its members, judged or
        not; ``extra_json.verdicts``: how many of those that the policy said were judged, and how many of these were
        right, which is ``pass_at_1``."""
        rows = []
        for group, reason in groups:
            totals = [s.total for s in group.samples if np.isfinite(s.total)]
            verdicts = [s.correct for s in group.samples if s.correct is not None and s.mode != "sft"]
            logps = [v for s in group.samples for v, own in zip(s.logps or (), s.action_mask) if own]
            rows.append(
                complete(
                    group.prompt,
                    "prompt_stats/1",
                    {
                        "iteration": iteration,
                        "n": len(group.samples),
                        "mean_reward": float(np.mean(totals)) if totals else None,
                        "reward_std": float(np.std(totals)) if totals else None,
                        "pass_at_1": float(np.mean(verdicts)) if verdicts else None,
                        "mean_logprob": float(np.mean(logps)) if logps else 0.0,
                        "kept": reason is None,
                        "drop_reason": reason,
                        "extra_json": json.dumps({"verdicts": [len(verdicts), sum(verdicts)]}),
                    },
                )
            )
        self._write("prompt_stats", rows)

    def pass_rates(self, prompts, counts: dict[str, tuple[int, int]], kept: set[str]) -> None:
        """``prompt_stats/1`` of iteration -1: (samples, right ones) of the prompts that have any before training, and
        whether it is trained on (DIFF-FILTER).
        """
        rows = []
        for prompt, _ in (p for p in prompts if p[0]["row_id"] in counts):
            (n, c), ok = counts[prompt["row_id"]], prompt["row_id"] in kept
            rows.append(
                complete(
                    prompt,
                    "prompt_stats/1",
                    {
                        "iteration": -1,
                        "n": n,
                        "mean_reward": c / n,
                        "reward_std": (c / n * (1 - c / n)) ** 0.5,
                        "pass_at_1": c / n,
                        "mean_logprob": 0.0,
                        "kept": ok,
                        "drop_reason": None if ok else "difficulty",
                        "extra_json": json.dumps({"verdicts": [n, c]}),
                    },
                )
            )
        self._write("prompt_stats", rows)

    def baselines(self, found: Iterable[tuple[dict, float, int, list[int]]]) -> None:
        """``baselines/1``: (prompt, value, completions behind it, verdicts), all at once before training;
        ``extra_json.verdicts``: how many were judged, and how many of these were right.
        """
        rows = [
            complete(
                prompt,
                "baselines/1",
                {"b": value, "n": n, "policy_version": 0, "extra_json": json.dumps({"verdicts": verdicts})},
            )
            for prompt, value, n, verdicts in found
        ]
        writer = self.stage.writer("baselines", "baselines/1")
        writer.write(rows)
        writer.close({"prompts": len(rows)})

    def validation(self, samples: list[Sample], step: int) -> None:
        """``eval_samples/1`` of a pass over the validation prompts, and the best and worst of them as a report."""
        rows = validation_rows(samples, step)
        self._write("validation", rows)
        # of the newest pass while it runs, of all at the end
        self.stage.report("validation-samples", table=best_and_worst(records_of(rows)))

    def close(self, iterations: int) -> None:
        for name, writer in self.writers.items():
            writer.close({"iterations": iterations} if name == "rollouts" else {})
        if "rubric_scores" in self.writers and self.stage.rank == 0:
            write_review(self.stage)


def sampling_record(policy: PolicySampler) -> dict:
    """The settings that completions are sampled with, all of them (``stages.decoding.sampling.SamplingParams``), and by
    what engine; what a row adds is in its column ``gen``: seed, policy version, longest completion at that time."""
    plain = {
        name: sorted(v) if isinstance(v, frozenset) else list(v) if isinstance(v, tuple) else v
        for name, v in vars(policy.params).items()
        if name != "logit_processors"
    }
    return {**plain, "engine": policy.engine.name, "logp_old": "sampler" if policy.exact_logps else "trainer"}


def complete(prompt: dict, kind: str, values: dict) -> dict:
    """A row of an output dataset about a prompt."""
    return complete_row(
        kind,
        {"prompt_id": prompt["prompt_id"], "group_id": prompt["group_id"], **values},
        dataset=kind.split("/")[0],
        source=prompt["dataset"],
        origin="ai",
        split="train",
    )
