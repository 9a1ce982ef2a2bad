"""From prompts to scored groups: G completions of each prompt, whoever else is compared with them, and another round
where groups teach nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from stages.algorithms import RLPreset
from stages.batching import Item, make_item
from stages.decoding.sampling import SamplingParams
from stages.estimators import DynamicSamplingExhausted, fill_informative, informative_groups, is_constant
from stages.generation import Sample, regrade, score, warn_of_failures
from stages.policy.members import Members
from stages.reward.components import LENGTH_KINDS
from stages.rollouts.policy import PolicySampler
from stages.running import cuda


@dataclass
class Group:
    """A prompt's completions. ``version``: optimizer step of the policy that sampled them; ``opponents``: what win
    rates compare with; ``greedy_sample``: the greedy completion (baseline=greedy)."""

    prompt: dict
    ids: list[int]
    samples: list[Sample]
    version: int
    fresh: bool = True
    opponents: list[Sample] = field(default_factory=list)
    greedy_sample: Sample | None = None


@dataclass
class Completions:
    """The completions of one iteration, group after group."""

    samples: list[Sample]
    group_at: list[Group]  # of every completion
    group_of_B: np.ndarray  # the number of its group
    mask_BT: np.ndarray  # tokens that the policy chose
    new_B: np.ndarray  # replayed ones were counted when they were sampled; those of another run are new to this one

    @classmethod
    def of(cls, groups: list[Group]) -> Completions:
        """Of groups with their completions."""
        samples = [s for g in groups for s in g.samples]
        group_of = np.repeat(np.arange(len(groups)), [len(g.samples) for g in groups])
        group_at = [groups[g] for g in group_of]
        mask = np.zeros((len(samples), max([1, *(len(s.ids) for s in samples)])), bool)
        for i, s in enumerate(samples):
            mask[i, : len(s.ids)] = s.action_mask
        return cls(samples, group_at, group_of, mask, np.array([g.fresh or g.version < 0 for g in group_at]))

    @property
    def shown_B(self) -> np.ndarray:
        """Those that metrics are about: the new ones, or all where none is."""
        return self.new_B if self.new_B.any() else ~self.new_B

    @property
    def said_B(self) -> np.ndarray:
        """Of these the ones by the policy."""
        return self.shown_B & np.array([s.mode != "sft" for s in self.samples])

    def those(self, on_B: np.ndarray) -> list[Sample]:
        """The samples of chosen rows."""
        return [s for s, on in zip(self.samples, on_B) if on]

    def padded(self, rows: list[list[float]]) -> np.ndarray:
        """``[B, T]`` of a list of token values per completion, with 0 behind its end."""
        out = np.zeros(self.mask_BT.shape)
        for i, row in enumerate(rows):
            out[i, : len(row)] = row
        return out


def contexts_of(group: Group) -> list[tuple[list[int], list[Sample]]]:
    """The group's completions in order, those together that are trained behind the same ids."""
    return [
        (ids, list(own))
        for ids, own in itertools.groupby(
            group.samples, lambda s: s.context_ids if s.context_ids is not None else group.ids
        )
    ]


def item_of(group: Group, ids: list[int], samples: list[Sample]) -> Item:
    """Completions of a group behind the prompt ``ids``, without anything that the update reads."""
    return make_item(
        group.prompt["row_id"], ids, [s.ids for s in samples], [s.action_mask for s in samples], by_response=()
    )


def stale(groups: list[Group], version: int) -> bool:
    """Whether any completion was drawn by an earlier policy than the one of optimizer step ``version``."""
    return any(not g.fresh or g.version != version for g in groups)


def override_reward(stage, sample: Sample, *counters) -> None:
    """Control experiments (``reward_override``): rewards that have nothing to do with the task, its opposite, or its
    format alone. Nobody says what is right then, and a trajectory earns them at its end. ``counters`` name the random
    number."""
    kind = stage.config.reward_override
    if kind == "none":
        return
    sample.correct, sample.feedback = None, None
    # what an environment or an engine lost earns nothing, whatever the control
    if sample.lost:
        return
    sample.turn_rewards, sample.turn_parts, sample.step_rewards = None, None, None
    if kind == "inverted":
        sample.total = -sample.total
    elif kind == "random":
        sample.total = float(stage.rng("random-reward", *counters).integers(0, 2))
    else:
        found = [
            c.weight * sample.parts[c.name]
            for c in stage.config.rewards
            if c.kind == "format" and sample.parts[c.name] is not None
        ]
        # a prompt that no format is asked of (domains, reward_route) earns nothing, not 0
        sample.total = sum(found) if found else float("nan")


class GroupSampler:
    """Samples and scores groups.

    Args:
        stage: for its config, seeds and warnings. row: the resolved preset.
        members: who is in a group besides plain samples (GRAPE-GEN).
        opponent: an engine to compare with (``policy.opponent_for``), or None.
        steps: what reasoning steps earn (``steps.StepRewards``), or None.
    """

    def __init__(
        self, stage, row: RLPreset, policy: PolicySampler, rewards, members: Members, opponent=None, steps=None
    ):
        self.stage, self.config, self.row = stage, stage.config, row
        self.policy, self.rewards, self.members, self.opponent, self.steps = policy, rewards, members, opponent, steps
        self.failed_rows = 0  # of the last fill, that the engine has no completion for

    def fill(
        self, take: Callable[[int], list], wanted: int, iteration: int, version: int
    ) -> tuple[list[Group], list[tuple[Group, str]], dict[str, float]]:
        """Groups of ``wanted`` prompts, with ``dynamic_sampling`` only ones with a signal (DYN-SAMPLING).

        Args:
            take: gives the next n prompts, none where no more may be drawn.

        Returns:
            (groups, [(dropped group, reason)], metrics).
        """
        dynamic, seats, self.failed_rows = self.row.dynamic_sampling, self.policy.seats, 0
        n = self.config.gen_batch_size or wanted if dynamic else wanted
        rounds = itertools.count()  # groups that the engine lost count as drawn: seeds are of prompts, not of groups
        seen: list[Group] = []

        def draw(_) -> list[Group] | None:
            prompts = take(n)
            if not prompts:
                return None
            found = self.sample(prompts, iteration, version, n * next(rounds))
            if seen and self.config.reward_override == "none":
                # by the same confidences, before it is asked who teaches something; what they are compared with too
                regrade(
                    self.rewards,
                    [
                        s
                        for g in (*seen, *found)
                        for s in (*g.samples, *g.opponents, *([] if g.greedy_sample is None else [g.greedy_sample]))
                    ],
                )
            seen.extend(found)
            return found

        try:
            found = fill_informative(
                draw,
                self.no_signal if dynamic else lambda group: None,
                wanted * seats,
                self.config.max_num_gen_batches,
            )
        except DynamicSamplingExhausted as error:
            judged = [g for g in seen if self.no_signal(g) in ("all_correct", "all_wrong")]
            totals = [[self._unshaped(s) for s in g.samples if np.isfinite(s.total)] for g in judged]
            if graded := sum(len(of) > 1 and not is_constant(of) for of in totals):
                raise DynamicSamplingExhausted(
                    f"{error}. In {graded} of them all answers were right or all wrong, and their rewards differ; write"
                    " filter_groups_metric=reward_std to learn from these"
                ) from None
            raise
        self.members.remember(seen, iteration)
        dropped = found["dropped"] + [(group, "surplus") for group in found["surplus"]]
        metrics = {"rollout/failed_rows": float(self.failed_rows)} if self.failed_rows else {}
        if dynamic:
            metrics |= {
                "groups/generation_batches": float(found["batches"]),
                "groups/filter_rate": found["filter_rate"],
                **{
                    f"groups/dropped_{r}": float(sum(reason == r for _, reason in dropped))
                    for r in ("all_correct", "all_wrong", "equal_rewards", "surplus")
                },
            }
            # what the kept groups alone say looks too good
            everyone = [
                s for group in [*found["kept"], *(g for g, _ in dropped)] for s in group.samples if s.mode != "sft"
            ]
            metrics |= {
                "completions/generated_tokens": float(sum(sum(s.action_mask) for s in everyone)),
                **(
                    {"reward/sampled_mean": float(np.mean(totals))}
                    if (totals := [s.total for s in everyone if np.isfinite(s.total)])
                    else {}
                ),
            }
        return found["kept"], dropped, metrics

    def no_signal(self, group: Group) -> str | None:
        """Why a group teaches nothing: by the rewards of its steps where these are paid, by correctness where the
        verifier gave verdicts, else by unshaped reward.
        """
        if self.row.advantage == "process":
            return (
                "equal_rewards"
                if is_constant(
                    [r for s in group.samples for r in (self.steps(s)[1] if self.steps else s.turn_rewards or [])]
                )
                else None
            )
        verdicts = [s.correct for s in group.samples]
        if self.config.filter_groups_metric == "acc" and all(v is not None for v in verdicts):
            right = sum(verdicts)
            return None if informative_groups([right], len(verdicts))[0] else "all_correct" if right else "all_wrong"
        totals = [self._unshaped(s) for s in group.samples if np.isfinite(s.total)]
        return "equal_rewards" if len(totals) < 2 or is_constant(totals) else None

    def _unshaped(self, sample: Sample) -> float:
        """The reward without what a completion's length earns: answers that differ in nothing else teach nothing about
        the task.
        """
        counted = [c.name for c in self.config.rewards if c.kind not in LENGTH_KINDS]
        if self.config.reward_override != "none" or not counted:
            return sample.total
        return sum(sample.weights[name] * sample.parts[name] for name in counted if name in sample.weights)

    def sample(self, prompts, iteration: int, version: int, first: int = 0, purpose: str = "rollout") -> list[Group]:
        """One fresh group of every ``(row, prompt ids)``; ``first`` counts the prompts this iteration has drawn
        already, ``purpose`` names the seeds.
        """
        seats = self.policy.seats
        counters = range(first, first + len(prompts))
        own = self.seeds(purpose, prompts, iteration, counters)
        with cuda.freely(self.stage.device):
            drawn = (
                self.members.sample(self.policy.engine, prompts, self.params_at(version), own, iteration, first)
                if self.members.active
                else self.policy.draw(prompts, own, self.params_at(version))
            )
        greedy, opponents = self._beside(prompts, own, iteration, version, counters)
        groups = []
        for (row, ids), samples, against, best in zip(prompts, drawn, opponents, greedy):
            for seat in range(seats):  # the debaters of each side are a group of their own
                side = samples[seat * len(samples) // seats : (seat + 1) * len(samples) // seats]
                groups.append(
                    Group(
                        row,
                        side[0].prompt_ids if self.policy.agent else ids,
                        side,
                        version,
                        True,
                        against or [],
                        greedy_sample=best,
                    )
                )
        # lost ones count, as in `again`, which knows groups by the prompts drawn before them
        places = {id(group): first + k for k, group in enumerate(groups)}
        groups = self._without_failures(groups)
        self._score(groups, iteration, [places[id(group)] for group in groups])
        return groups

    def again(self, groups: list[Group], iteration: int, version: int, counters: Sequence[int]) -> None:
        """Draw and score again what recorded groups are compared with, their greedy completion and their opponents;
        ``counters``: how many prompts their iteration had drawn before each."""
        prompts = [(g.prompt, g.ids) for g in groups]
        own = self.seeds("rollout", prompts, iteration, counters)
        greedy, opponents = self._beside(prompts, own, iteration, version, counters)
        everyone = [s for beside in opponents for s in beside or ()] + [s for s in greedy if s is not None]
        warn_of_failures(self.stage, self.policy.engine, everyone)
        for group, best, against in zip(groups, greedy, opponents):
            group.greedy_sample, group.opponents = best, [s for s in against or () if s.error is None]
        self._score(groups, iteration, counters, ("greedy", "opponents"))

    def seeds(self, purpose: str, prompts, iteration: int, counters: Sequence[int]) -> list[list[int]]:
        """G seeds of each ``(row, prompt ids)``, of which the iteration has drawn ``counters[k]`` before."""
        return [
            [
                self.stage.seed_for(purpose, iteration, counter, row["row_id"], g)
                for g in range(self.config.num_generations)
            ]
            for counter, (row, _) in zip(counters, prompts)
        ]

    def params_at(self, version: int) -> SamplingParams:
        """What completions are sampled with at an optimizer step."""
        return replace(self.policy.params, max_new_tokens=self.config.completion_limit(version))

    def _beside(self, prompts, own, iteration: int, version: int, counters) -> tuple[list, list]:
        """(the greedy completion, the opponents) of every prompt, None where nothing is compared with them; ``own``: the
        seeds of its group."""
        greedy = opponents = [None] * len(prompts)
        params = self.params_at(version)
        if self.row.read_baseline == "greedy":
            # in the same world as its group
            greedy = [g[0] for g in self.policy.draw(prompts, [s[:1] for s in own], replace(params, temperature=0.0))]
        if self.opponent is not None:
            seeds = self.seeds("opponent", prompts, iteration, counters)
            opponents = self.policy.draw(prompts, seeds, params, self.opponent)
        return greedy, opponents

    def _score(self, groups: list[Group], iteration: int, counters, parts=("samples", "greedy", "opponents")) -> None:
        """Rewards of these parts of the groups, in place: the greedy completion and the opponents of a group are not
        members of it."""

        def members(group: Group, part: str) -> list[Sample]:
            if part == "greedy":
                return [] if group.greedy_sample is None else [group.greedy_sample]
            return group.samples if part == "samples" else group.opponents

        apart = [((k, part), s) for part in parts for k, g in enumerate(groups) for s in members(g, part)]
        score(self.rewards, [s for _, s in apart], [key for key, _ in apart])
        for k, group in enumerate(groups):
            of = iteration, group.prompt["row_id"], counters[k]
            names = {"samples": (), "greedy": ("greedy",), "opponents": ("opponent",)}
            for part in parts:
                for g, sample in enumerate(members(group, part)):
                    override_reward(self.stage, sample, *of, *names[part], *([] if part == "greedy" else [g]))

    def of_every_prompt(self, prompts, purpose: str, n: int, engine=None) -> list[list[Sample]]:
        """``n`` scored completions of every prompt by the policy as it is (or by another ``engine``), unscorable where
        the engine lost one: what pass rates and baselines start from.
        """
        params = replace(self.policy.params, max_new_tokens=self.config.completion_limit(0))
        drawn = self.policy.draw(
            prompts,
            [[self.stage.seed_for(purpose, row["row_id"], g) for g in range(n)] for row, _ in prompts],
            params,
            engine,
        )
        warn_of_failures(self.stage, engine or self.policy.engine, [s for group in drawn for s in group])
        score(self.rewards, [s for group in drawn for s in group], [k for k, group in enumerate(drawn) for _ in group])
        if purpose == "baseline":  # pass rates choose prompts, baselines are compared with what is earned
            for (row, _), group in zip(prompts, drawn):
                for g, sample in enumerate(group):
                    override_reward(self.stage, sample, purpose, row["row_id"], g)
        return drawn

    def _without_failures(self, groups: list[Group]) -> list[Group]:
        """Groups without the rows that the engine has no completion for; a group that is left with nothing to compare
        is dropped.
        """
        everyone = [s for g in groups for s in (*g.samples, *g.opponents)] + [
            g.greedy_sample for g in groups if g.greedy_sample is not None
        ]
        warn_of_failures(self.stage, self.policy.engine, everyone)
        self.failed_rows += sum(s.error is not None for s in everyone)
        kept = []
        for group in groups:
            group.samples, asked = [s for s in group.samples if s.error is None], len(group.samples)
            group.opponents = [o for o in group.opponents if o.error is None]
            short = len(group.samples) < min(asked, 2 if self.row.compares else 1) or (
                self.opponent is not None and not group.opponents
            )
            if not short and (group.greedy_sample is None or group.greedy_sample.error is None):
                kept.append(group)
        return kept
