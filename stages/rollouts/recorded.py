"""An RL run computed again from its own rollouts (input ``recorded``), with nothing sampled.

Every iteration takes the recorded completions instead of drawing them, and holds against the record what it computes
itself: log-probs under the weights of that moment, which must be those that the completions were sampled with; the
rewards, scored again by every component that asks nobody; and each column of the rows that it writes, which says the
same of log-probs under the reference, values, advantages, returns, masks and weights. A run whose record is true ends
with the same rollouts and the same model, byte for byte; one whose start, data, settings or rollouts are others stops
at the first iteration that its weights did not sample.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby

import numpy as np

from stages.algorithms import RLPreset
from stages.generation import Sample, by_prompt_id, opens_thought, score
from stages.policy.schedules import ADMITTING
from stages.rollouts.groups import Group
from stages.rollouts.replay import groups_with_rows
from stages.spec import ConfigError
from stages.training import TrainingError
from storage.schema import PROVENANCE

#: Kinds of rewards that ask somebody, who may answer otherwise today, and be paid for it: they are not asked again.
ASKING = ("judge", "rubric", "debate", "remote")

#: Columns that say where a row is from; ``gen`` has the model by the name that it was given by.
OF_THE_RUN = (*PROVENANCE, "gen")

#: Largest difference of a log-prob that rounding explains: the sampler adds up in another order than the trainer.
NEAR = 1e-3


def check_recorded(config, row: RLPreset, given: Iterable[str]) -> None:
    """Refuse settings under which the rollouts do not hold all that an update reads.

    Raises:
        ValueError: what to write instead.
    """
    refused = {
        f"environment={config.environment}, whose turns are not kept as texts": bool(config.environment),
        "baseline=greedy, whose completions are not kept": row.read_baseline == "greedy",
        "advantage=vine, whose continuations are not kept": row.advantage == "vine",
        f"opponent={row.opponent}, whose completions are not kept": row.advantage == "win_rate"
        and row.opponent != "self",
        f"mode_mix={config.mode_mix}, whose answers build on texts of other rows": config.mode_mix != "fresh",
        f"sft_member={config.sft_member}, whose answers nobody sampled": config.sft_member != "none",
        "critic_warmup_steps on prompts that pass rates choose, which are not kept": row.critic_warmup_steps > 0
        and (config.curriculum in ADMITTING or config.difficulty_band is not None),
        "the input stored, whose rollouts are another run's": "stored" in given,
    }
    for text in (text for text, on in refused.items() if on):
        raise ValueError(
            f"the input recorded cannot repeat a run with {text}; leave recorded out, and the run is sampled again"
            " (posttrain rerun MODEL), with the same result"
        )


class Recorded:
    """The iterations of a run in its ``rollouts/1``, and what differs from them now.

    Args:
        stage: for its input ``recorded``. prompts: ``(row, prompt ids)`` that are trained on. policy: the policy's
            sampler, whose settings the completions were drawn with (``rollouts.policy.PolicySampler``).
        rewards: what scores (``stages.reward.rewards.Rewards``).

    Raises:
        ConfigError: there are no rows, or prompts of theirs are not in the input data.
    """

    def __init__(self, stage, prompts, policy, rewards):
        from stages.decoding.sampler import DerivedText

        self.stage, self.policy = stage, policy
        tokenizer = policy.renderer.tokenizer
        self.text, self.opens = DerivedText(tokenizer, policy.params), opens_thought(tokenizer)
        self.asked = [c.name for c in rewards.components if c.kind in ASKING]
        self.rewards = rewards
        data = stage.dataset("recorded")
        wanted = {row["prompt_id"] for row in data.iter_rows(columns=["prompt_id"])}
        if not wanted:
            raise ConfigError("the input recorded has no rows; give the rollouts output of the run that is repeated.")
        self.by_id = by_prompt_id(stage, (row for row, _ in prompts), wanted)
        if absent := wanted - self.by_id.keys():
            raise ConfigError(
                f"the input recorded has completions to {len(absent)} prompts that data lacks; give the data, split and"
                " max_prompt_length of the run that is repeated (posttrain rerun MODEL --recorded takes them)."
            )
        self._iterations: Iterator = groupby(data.iter_rows(), lambda row: row["iteration"])
        self._seen: set[tuple] = set()  # groups of earlier iterations, which come again where they are replayed
        self.rows: list[dict] = []  # of the iteration in hand
        self.found: dict[str, dict] = {}  # column -> what was held against it

    def take(self, iteration: int) -> list[Group]:
        """The groups of an iteration, in their order. Raises TrainingError where the record ends before it."""
        for number, rows in self._iterations:
            self.rows = list(rows)
            groups = self._groups()
            if number == iteration:
                return groups
        raise TrainingError(
            f"The input recorded ends before iteration {iteration}; write the max_steps of the run that is repeated, or"
            " fewer."
        )

    def _groups(self) -> list[Group]:
        found = groups_with_rows(self.rows, self.by_id)
        for group, rows in found:
            first = rows[0]
            drawn = first["prompt_id"], first["policy_version"], (first["gen"] or {}).get("rng_seed")
            group.version, group.fresh = first["policy_version"], drawn not in self._seen
            self._seen.add(drawn)
            group.samples = [self._as_drawn(s, row) for s, row in zip(group.samples, rows)]
        return [group for group, _ in found]

    def _as_drawn(self, s: Sample, row: dict) -> Sample:
        """A stored completion with what the sampler and the rewards said of it."""
        ended = "eos" if s.ids and s.ids[-1] in self.policy.params.stop_ids else "stop"
        extra = json.loads(row["extra_json"] or "{}")
        return replace(
            s,
            finish_reason=ended if row["terminated"] else "length",
            text=self.text.of(s.ids),
            total=s.total if row["score"] is None else row["score"],
            reasons=extra.get("unscorable", {}),
            tier=None if row["reward_tier"] == "unscorable" else row["reward_tier"],
            seed=(row["gen"] or {}).get("rng_seed"),
            reencoded=extra.get("reencoded", False),
            opened=self.opens(s.prompt_ids),
        )

    # -- what is held against the record -------------------------------------------------------------------------------
    def hold_rewards(self, groups: Sequence[Group]) -> None:
        """Score fresh completions again, by every component that asks nobody, and note what differs."""
        again = [
            [replace(s, parts=None, reasons=None, items=[], weights=None, step_rewards=None) for s in g.samples]
            for g in groups
            if g.fresh
        ]
        rewards = self.rewards.without(self.asked) if self.asked else self.rewards
        if not rewards.components or not again:
            return
        rewards.step, rewards.multipliers = self.rewards.step, self.rewards.multipliers
        score(rewards, [s for g in again for s in g], [k for k, g in enumerate(again) for _ in g])
        then = [s for g in groups if g.fresh for s in g.samples]
        for s, now in zip(then, (s for g in again for s in g)):
            for name in now.parts:
                self._note(f"reward {name}, scored again", s, s.parts.get(name), now.parts[name])

    def hold_logps(self, samples: Sequence[Sample], logps: Sequence[Sequence[float]], iteration: int) -> None:
        """Hold the policy's log-probs against those that the completions were sampled with.

        Raises:
            TrainingError: they are not of these weights.
        """
        for s, now in zip(samples, logps):
            self._note("logp under the weights of then", s, s.logps, list(now), NEAR)
        worst = self.found["logp under the weights of then"]
        if worst["largest"] > 50 * NEAR:
            raise TrainingError(
                f"Iteration {iteration} of the input recorded was not sampled from these weights: log-probs of its"
                f" tokens differ by up to {worst['largest']:.3g}. The model, data, settings, seed or code are not those"
                " of the run that wrote it, or its rows were changed; posttrain rerun MODEL --recorded takes all of"
                " them from the record."
            )

    def hold_rows(self, rows: Sequence[dict]) -> dict[str, float]:
        """Hold the rows that are written now against the recorded ones; metrics: how many differ anywhere."""
        odd = abs(len(rows) - len(self.rows))
        for then, now in zip(self.rows, rows):
            same = True
            for name in (n for n in then if n not in OF_THE_RUN):
                same &= self._note(name, now, then[name], now.get(name))
            odd += not same
        return {"recorded/differing_rows": float(odd), "recorded/rows": float(len(self.rows))}

    def _note(self, what: str, where, then, now, near: float = 0.0) -> bool:
        """Whether two values are the same (up to ``near``); what was found of them is kept by ``what``."""
        one = self.found.setdefault(what, {"held": 0, "differ": 0, "largest": 0.0, "first": None})
        off = difference(then, now)
        one["held"] += then is not None or off > 0
        one["largest"] = max(one["largest"], off)
        if off > near:
            one["differ"] += 1
            place = (
                f"prompt {where.prompt['prompt_id']}, sample {where.index}"
                if isinstance(where, Sample)
                else (f"iteration {where['iteration']}, sample {where['sample_idx']}")
            )
            one["first"] = one["first"] or place
        return off <= near

    def tell(self) -> dict[str, float]:
        """The table of all that was held against the record, as a report, with a warning where anything differs; its
        summary metrics."""
        table = [{"what": name, **one} for name, one in self.found.items() if one["held"]]
        odd = [one for one in table if one["differ"]]
        self.stage.report("recorded", table=table)
        if self.asked:
            self.stage.log(f"not asked again: {', '.join(self.asked)}")
        if odd:
            self.stage.warn(
                "recorded_differs",
                "; ".join(
                    f"{one['what']}: {one['differ']} of {one['held']} differ, by up to {one['largest']:.3g}, first at"
                    f" {one['first']}"
                    for one in odd[:5]
                )
                + ". The report recorded has all of them; with the code and libraries of then nothing differs.",
            )
        return {"recorded/differing": float(len(odd)), "recorded/held": float(sum(one["held"] for one in table))}

    def state(self) -> dict:
        return self.found

    def restore(self, state: dict) -> None:
        self.found = state


def difference(then, now) -> float:
    """Largest difference of two values of a column, single precision for lists of tokens; infinite where they are not
    alike."""
    if then is None or now is None:
        return 0.0 if then is now else math.inf
    if isinstance(then, str | bool):
        return 0.0 if then == now else math.inf
    if isinstance(then, dict):
        return max((difference(value, now.get(name)) for name, value in then.items()), default=0.0)
    if isinstance(then, int | float):
        return 0.0 if then == now or (then != then and now != now) else abs(then - now)
    if len(then) != len(now):
        return math.inf
    if any(isinstance(value, dict) for value in then):
        return max(map(difference, then, now))
    before, after = np.asarray(then, np.float32), np.asarray(now, np.float32)
    odd = np.abs(before - after)[~((before == after) | (np.isnan(before) & np.isnan(after)))]
    return float(np.nan_to_num(odd, nan=math.inf).max()) if len(odd) else 0.0
