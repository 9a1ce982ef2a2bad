"""An RL run computed again from its own rollouts (input ``recorded``), which are not sampled.

Every iteration takes the recorded completions instead of drawing them, and holds against the record what it computes
itself: log-probs under the weights of that moment, which must be those that the completions were sampled with; the
rewards, scored again by every component that asks nobody; and each column of the rows that it writes, which says the
same of log-probs under the reference, values, advantages, returns, masks and weights. A run whose record is true ends
with the same rollouts and the same model, byte for byte; one whose start, data, settings or rollouts are others stops
at the first iteration that its weights did not sample.

What an update reads beside the rollouts (:func:`drawn_again`) is drawn a second time with the seeds of then, and an
environment is played again with the recorded turns (:mod:`.tape`). Nobody is asked or paid for any of it.
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
from stages.rollouts.groups import Group, GroupSampler
from stages.rollouts.replay import groups_with_rows, plain_sample
from stages.rollouts.tape import Tape, as_recorded
from stages.spec import ConfigError
from stages.training import TrainingError
from storage.schema import PROVENANCE, prompt_id

#: Kinds of rewards that ask somebody, who may answer otherwise today, and be paid for it: they are not asked again.
ASKING = ("judge", "rubric", "debate", "remote")

#: Columns that say where a row is from; ``gen`` has the model by the name that it was given by.
OF_THE_RUN = (*PROVENANCE, "gen")

#: Largest difference of a log-prob that rounding explains: the sampler adds up in another order than the trainer.
NEAR = 1e-3


def check_recorded(config, row: RLPreset, given: Iterable[str]) -> None:
    """Refuse settings under which the rollouts do not hold all that an update reads, and it cannot be had again without
    asking somebody.

    Raises:
        ValueError: what to write instead.
    """
    again = drawn_again(config, row, given)
    services = [c.name for c in config.rewards if asks_service(c)]
    refused = {
        "environment=debate and dynamic_sampling=true, whose dropped sides are not kept": (
            config.environment == "debate" and row.dynamic_sampling
        ),
        "the input stored, whose rollouts are another run's": "stored" in given,
        f"{', '.join(again)}, which are not kept, and of which reward {', '.join(services)} would be asked again": bool(
            again and services
        ),
        f"select_by={config.select_by}, which chose the weights by validation answers that are not kept, and about which"
        f" reward {', '.join(services)} would be asked again": bool(config.select_by and services),
        f"preset={config.preset}, for which reward {', '.join(services)} compares answers, and would be asked again": (
            row.advantage == "win_rate"
            and any(c.counts and c.judge_mode in ("preference", "verdict") for c in config.rewards if asks_service(c))
        ),
    }
    for text in (text for text, on in refused.items() if on):
        raise ValueError(
            f"the input recorded cannot repeat a run with {text}; leave recorded out, and the run is sampled again"
            " (posttrain rerun MODEL), with the same result"
        )


def drawn_again(config, row: RLPreset, given: Iterable[str]) -> list[str]:
    """What a run reads beside its rollouts, and which is drawn a second time with the seeds of then."""
    warm_up = row.needs_critic and row.critic_warmup_steps > 0
    found = {
        f"the completions behind baseline={row.read_baseline}": row.read_baseline in ("table", "v_star")
        and "baselines" not in given,
        "the completions behind pass rates": warm_up
        and (config.curriculum in ADMITTING or config.difficulty_band is not None)
        and "prompt_stats" not in given,
        "the completions of critic_warmup_steps": warm_up,
        "the completions of baseline=greedy": row.read_baseline == "greedy",
        f"the completions of opponent={row.opponent}": row.advantage == "win_rate" and row.opponent != "self",
        "the continuations of advantage=vine": row.advantage == "vine",
    }
    return [text for text, on in found.items() if on]


def asks_service(component) -> bool:
    """Whether a reward component is told by a service, which is paid and may answer otherwise today; also a rubric,
    whose items name their own, and whose confidence is a mean over what is scored at once."""
    return component.kind in ("rubric", "remote") or component.kind in ASKING and bool(component.endpoint)


def leaves_validation_out(config, given: Iterable[str]) -> bool:
    """Whether a run that is computed again makes no validation passes: their answers are drawn again, and a service
    would be asked about them."""
    return "recorded" in given and any(map(asks_service, config.rewards))


class Recorded:
    """The iterations of a run in its ``rollouts/1``, and what differs from them now.

    Args:
        stage: for its input ``recorded``. row: the resolved preset. prompts: ``(row, prompt ids)`` that are trained on.
        groups: what sampled the completions and their rewards (``rollouts.groups.GroupSampler``).

    Raises:
        ConfigError: there are no rows, or prompts of theirs are not in the input data.
    """

    def __init__(self, stage, row: RLPreset, prompts, groups: GroupSampler):
        from stages.decoding.sampler import DerivedText

        self.stage, self.row, self.sampler, self.policy = stage, row, groups, groups.policy
        tokenizer = self.policy.renderer.tokenizer
        self.text, self.opens = DerivedText(tokenizer, self.policy.params), opens_thought(tokenizer)
        self.rewards, self.paid = groups.rewards, {c.name for c in groups.rewards.components}
        self.asked = [c.name for c in self.rewards.components if c.kind in ASKING]
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
        self.members = groups.members
        self.ids = {prompt["prompt_id"]: list(ids) for prompt, ids in reversed(prompts)}
        self.prompts: dict[str, list[dict]] = {}  # every row of a prompt, whose row ids seeds are of
        for prompt, _ in prompts:
            self.prompts.setdefault(prompt["prompt_id"], []).append(prompt)
        self.most = len(prompts)
        self.again = drawn_again(stage.config, row, stage.inputs)
        if self.again:
            stage.log(f"sampled again with the seeds of then, since rollouts do not hold them: {'; '.join(self.again)}")
        # what is drawn for single groups has seeds of its own, and worlds are named by those of their group
        self.places = self.policy.agent is not None
        self.places |= row.read_baseline == "greedy" or row.advantage == "vine" or groups.opponent is not None
        self._iterations: Iterator = groupby(data.iter_rows(), lambda row: row["iteration"])
        # groups of earlier iterations, which come again where they are replayed -> iteration and prompts drawn before
        self._places: dict[str, tuple[int, int]] = {}
        self._coming: tuple | None = None  # (iteration, rows, groups) that were read ahead
        self.greedy: dict[str, dict] = {}  # greedy completions of groups that are trained on later, or once more
        self.rows: list[dict] = []  # of the iteration in hand
        self.found: dict[str, dict] = {}  # column -> what was held against it
        self.sampled_again = 0  # completions beside the recorded ones

    def take(self, iteration: int) -> list[Group]:
        """The groups of an iteration, in their order. Raises TrainingError where the record ends before it."""
        found = self._read(iteration)
        if found is None:
            raise TrainingError(
                f"The input recorded ends before iteration {iteration}; write the max_steps of the run that is"
                " repeated, or fewer."
            )
        self._coming, (_, self.rows, groups) = None, found
        return groups

    def coming(self, iteration: int) -> list[Group]:
        """The groups of an iteration that is not taken yet; none where the record ends before it."""
        self._coming = self._read(iteration)
        return self._coming[2] if self._coming else []

    def _read(self, iteration: int) -> tuple[int, list[dict], list[Group]] | None:
        if self._coming is not None and self._coming[0] == iteration:
            return self._coming
        for number, rows in self._iterations:
            rows = list(rows)
            groups = self._groups(number, rows)
            if number == iteration:
                return number, rows, groups
        return None

    def _groups(self, iteration: int, rows: list[dict]) -> list[Group]:
        plain, drawn = rows, -1
        if self.members.active:  # whose group is that of the plain question, whatever they are trained behind
            plain = [{**row, "prompt_ids": self.ids[row["prompt_id"]], "behind": row["prompt_ids"]} for row in rows]
        found = groups_with_rows(plain, self.by_id)
        for group, own in found:
            group.version = own[0]["policy_version"]
            group.samples = [self._as_drawn(s, row) for s, row in zip(group.samples, own)]
            name = name_of(group)
            group.fresh = name not in self._places
            if group.fresh:
                drawn = self._place(group, iteration, max(drawn, 0)) if self.places else drawn
                self._places[name] = iteration, drawn
        return [group for group, _ in found]

    def _place(self, group: Group, iteration: int, start: int) -> int:
        """How many prompts the iteration had drawn before a group, by the seeds of its completions, which also say
        which of the rows with its prompt was drawn.

        Raises:
            TrainingError: they are not of this run.
        """
        config, rows = self.stage.config, self.prompts[group.prompt["prompt_id"]]
        seeds = {s.seed for s in group.samples if s.mode != "sft"}
        seeds_of = getattr(self.policy.agent, "seeds_of", lambda seed: [seed])
        n = config.gen_batch_size or config.prompts_per_step
        rounds = (config.max_num_gen_batches or -(-self.most // n) + 1) if self.row.dynamic_sampling else 1
        for counter in (*range(start, n * rounds), *range(start)):
            for row in rows:
                own = self.sampler.seeds("rollout", [(row, None)], iteration, [counter])[0]
                if seeds <= {one for seed in own for one in seeds_of(seed)}:
                    group.prompt = row
                    for s in group.samples:
                        s.prompt = row
                    return counter
        raise TrainingError(
            f"Iteration {iteration} of the input recorded, prompt {group.prompt['prompt_id']}: gen.rng_seed is not one of"
            " the seeds that this run draws with, and what belongs to its completions is drawn by them. The seed"
            " or settings are not those of the run that wrote it, or its rows were changed; posttrain rerun MODEL"
            " --recorded takes all of them from the record."
        )

    def _as_drawn(self, s: Sample, row: dict) -> Sample:
        """A stored completion with what the sampler and the rewards said of it."""
        extra = json.loads(row["extra_json"] or "{}")
        drawn = {
            "total": s.total if row["score"] is None else row["score"],
            "reasons": extra.get("unscorable", {}),
            "tier": None if row["reward_tier"] == "unscorable" else row["reward_tier"],
            "context": row["sampling_prompt_id"],
            "preferred": extra.get("pair_preference"),
            "feedback": extra.get("feedback"),
            "weights": {name: weight for name, weight in s.weights.items() if name in self.paid},
        }
        if s.mode == "sft":  # which nobody sampled
            ids, text = self.members.answers.get(s.prompt["prompt_id"], ([], ""))
            text = text if list(ids) == s.ids else self.text.of(s.ids)
            return replace(s, **drawn, logps=[], finish_reason="eos", text=text)
        behind = drawn["context"] is not None and self.stage.config.conditioning == "sampling"
        drawn |= {"seed": (row["gen"] or {}).get("rng_seed"), "reencoded": extra.get("reencoded", False)}
        if row["turns"] is not None:
            paid = [float(turn["reward"]) for turn in row["turns"]]
            turns = {"turns": row["turns"], "turn_rewards": paid, "turn_parts": {}}
            if self.stage.config.reward_override != "none" or row["reward_tier"] == "unscorable":
                turns |= {"turn_rewards": None, "turn_parts": None}
            return replace(s, **drawn, **turns)
        eos = bool(s.ids) and s.ids[-1] in self.policy.params.stop_ids
        return replace(
            s,
            **drawn,
            finish_reason=("eos" if eos else "stop") if row["terminated"] else "length",
            text=self.text.of(s.ids[:-1] if eos and row["terminated"] else s.ids),
            opened=self.opens(s.prompt_ids),
            context_ids=list(row["behind"]) if behind else None,
        )

    # -- what is drawn again -------------------------------------------------------------------------------------------
    def compare(self, groups: Sequence[Group], version: int) -> None:
        """Give groups that are drawn with the weights of optimizer step ``version`` what they are compared with, sampled
        again: opponents, and greedy completions, which older groups have from then."""
        greedy = self.row.read_baseline == "greedy"
        if not greedy and self.sampler.opponent is None:
            return
        due = [g for g in groups if g.fresh and name_of(g) not in self.greedy]
        by_iteration = groupby(due, lambda g: self._places[name_of(g)][0])
        for iteration, own in ((k, list(own)) for k, own in by_iteration):
            self.sampler.again(own, iteration, version, [self._places[name_of(g)][1] for g in own])
        for group in groups if greedy else ():
            name = name_of(group)
            if name not in self.greedy:
                self.greedy[name] = plain_sample(group.greedy_sample)
            else:
                group.greedy_sample = Sample(group.prompt, group.ids, **self.greedy[name])
        config = self.stage.config
        if greedy and not config.replay_fraction:
            self.greedy = {name: self.greedy[name] for name in map(name_of, groups)}

    def play(self, groups: Sequence[Group]) -> None:
        """Play trajectories again in their environment, from the start of each and with what the policy said then, and
        note where it answers otherwise; the run goes on with what it said then."""
        tape, said, found = Tape(self.policy), {}, {}
        for s in (s for g in groups for s in g.samples):
            said[s.seed] = tape.record(s.seed, s.ids, s.turns)
        tasks: dict[tuple, dict] = {}  # version, iteration, prompts drawn before -> prompt
        for group in groups:
            tasks.setdefault((group.version, *self._places[name_of(group)]), group.prompt)
        for version, own in groupby(sorted(tasks), lambda task: task[0]):
            prompts = [(tasks[task], task[1:]) for task in own]
            seeds = [
                self.sampler.seeds("rollout", [(row, None)], iteration, [counter])[0]
                for row, (iteration, counter) in prompts
            ]
            played = self.policy.agent.sample(tape, prompts, self.sampler.params_at(version), seeds)
            found |= {s.seed: s for group in played for s in group}
        for group in groups:
            for k, then in enumerate(group.samples):
                now = found[then.seed]
                group.samples[k] = as_recorded(then, said[then.seed], now)
                if then.failure is None:
                    self._note("prompt_ids of the environment", then, then.prompt_ids, now.prompt_ids)
                    self._note("observations of the environment", then, then.ids, now.ids)
                    self._note("finish_reason of the environment", then, then.finish_reason, now.finish_reason)

    # -- what is held against the record -------------------------------------------------------------------------------
    def hold_rewards(self, groups: Sequence[Group]) -> None:
        """Score fresh completions again, by every component that asks nobody, and note what differs."""
        again = [
            [replace(s, parts=None, reasons=None, items=[], weights=None, step_rewards=None) for s in g.samples]
            for g in groups
            if g.fresh or self.policy.agent is not None  # what single turns earned is not kept
        ]
        rewards = self.rewards.without(self.asked) if self.asked else self.rewards
        if not rewards.components or not again:
            return
        rewards.step, rewards.multipliers = self.rewards.step, self.rewards.multipliers
        score(rewards, [s for g in again for s in g], [k for k, g in enumerate(again) for _ in g])
        then = [s for g in groups if g.fresh or self.policy.agent is not None for s in g.samples]
        for s, now in zip(then, (s for g in again for s in g)):
            for name in now.parts:
                self._note(f"reward {name}, scored again", s, s.parts.get(name), now.parts[name])
            if s.turn_parts is not None:
                s.turn_parts = now.turn_parts

    def hold_members(self, groups: Sequence[Group]) -> None:
        """Hold SFT answers against those of the input sft, and what fresh ones were sampled from against the question
        behind its category's generation prompt."""
        for s in (s for g in groups for s in g.samples):
            if s.mode == "sft":
                ids, _ = self.members.answers.get(s.prompt["prompt_id"], (None, ""))
                self._note("completion_ids of the input sft", s, s.ids, ids and list(ids))
            elif s.mode == "fresh":
                messages = self.members.asked(s.prompt)
                self._note("sampling_prompt_id", s, s.context, messages and prompt_id(messages))
                if s.context_ids is not None and messages:
                    ids = self.policy.renderer.prompt_ids(messages)
                    self._note("prompt_ids, with the generation prompt", s, s.context_ids, ids)

    def sampled_behind(self, group: Group) -> list[tuple[list[int], list[Sample]]]:
        """Completions of a group by the ids that they were sampled behind; without those that nobody sampled, and
        without improved ones whose request is not kept (conditioning=plain)."""
        found: dict[tuple, list[Sample]] = {}
        for s in group.samples:
            if s.mode == "sft" or s.mode == "improve" and s.context_ids is None:
                continue
            ids = s.context_ids or group.ids
            if s.context is not None and s.context_ids is None and (messages := self.members.asked(s.prompt)):
                ids = self.policy.renderer.prompt_ids(messages)
            found.setdefault(tuple(ids), []).append(s)
        return [(list(ids), own) for ids, own in found.items()]

    def hold_logps(self, samples: Sequence[Sample], logps: Sequence[Sequence[float]], iteration: int) -> None:
        """Hold the policy's log-probs against those that the completions were sampled with.

        Raises:
            TrainingError: they are not of these weights.
        """
        for s, now in zip(samples, logps, strict=True):
            self._note("logp under the weights of then", s, s.logps, list(now), NEAR)
        worst = self.found["logp under the weights of then"]
        if worst["largest"] > 50 * NEAR:
            told = "; ".join(differences(self.found)[:5])
            raise TrainingError(
                f"Iteration {iteration} of the input recorded was not sampled from these weights: log-probs of its"
                f" tokens differ by up to {worst['largest']:.3g}. The model, data, settings, seed or code are not those"
                " of the run that wrote it, or its rows were changed; posttrain rerun MODEL --recorded takes all of"
                f" them from the record.{f' So far: {told}.' if told else ''}"
            )

    def hold_rows(self, rows: Sequence[dict], again: int) -> dict[str, float]:
        """Hold the rows that are written now against the recorded ones; metrics: how many differ anywhere, and how many
        completions were sampled ``again`` beside them."""
        self.sampled_again += again
        odd = abs(len(rows) - len(self.rows))
        for then, now in zip(self.rows, rows):
            same = True
            for name in (n for n in then if n not in OF_THE_RUN):
                same &= self._note(name, now, then[name], now.get(name))
            odd += not same
        return {
            "recorded/differing_rows": float(odd),
            "recorded/rows": float(len(self.rows)),
            "recorded/sampled_again": float(again),
        }

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
                "; ".join(differences(self.found)[:5])
                + ". Look at the report recorded, which has all of them; install the libraries of then and take that code, with"
                " which nothing differs.",
            )
        return {
            "recorded/differing": float(len(odd)),
            "recorded/held": float(sum(one["held"] for one in table)),
            "recorded/sampled_again": float(self.sampled_again),
        }

    def state(self) -> dict:
        found = list(self.found.items())  # pairs: they are told in their order, and a checkpoint sorts keys
        return {"found": found, "greedy": self.greedy, "sampled_again": self.sampled_again}

    def restore(self, state: dict) -> None:
        self.found, self.greedy, self.sampled_again = dict(state["found"]), state["greedy"], state["sampled_again"]


def differences(found: dict[str, dict]) -> list[str]:
    """What of the things that were held against the record differs, and where first, in words."""
    return [
        f"{what}: {one['differ']} of {one['held']} differ, by up to {one['largest']:.3g}, first at {one['first']}"
        for what, one in found.items()
        if one["differ"]
    ]


def name_of(group: Group) -> str:
    """What a group is known by through the iterations: its prompt, who sampled it, and with what seed."""
    first = group.samples[0]
    return f"{first.prompt['prompt_id']} {group.version} {first.seed}"


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
    if any(isinstance(value, dict | str) for value in then):
        return max(map(difference, then, now))
    before, after = np.asarray(then, np.float32), np.asarray(now, np.float32)
    odd = np.abs(before - after)[~((before == after) | (np.isnan(before) & np.isnan(after)))]
    return float(np.nan_to_num(odd, nan=math.inf).max()) if len(odd) else 0.0
