"""A policy acting in an environment over turns: trajectories as one growing token sequence (AGENT-RL, MASK-TOOL).

    prompt | turn 1 | observation | turn 2 | observation | ... | turn K
             mask 1   mask 0        mask 1                       mask 1

The policy's tokens are kept as they were sampled, with their log-probs; what the environment says is rendered by the
chat template once, tokenised, and inserted between them. Nothing is tokenised twice, so the trainer sees the very
sequence that the sampler saw. Trajectories go turn by turn together, and each ends for one of these reasons:

``goal``        the environment verified that the task is solved       ``turn_limit``  max_turns, truncated
``stop``        the policy ended it (a final answer, a stop action)    ``length``      no room for more tokens, truncated
``failure``     the environment's process failed: no reward, not trained on
``error``       the engine lost a turn: no reward, left out as any row that the engine has no completion for
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from stages.acting.agent_rewards import milestones_by_turn, milestones_of
from stages.acting.environments import GOAL, EnvironmentLimits, EnvironmentPool
from stages.generation import Sample, remembering, room_after, sample_with_room
from stages.running import ranks
from stages.running.randomness import seed_for


@dataclass
class Trajectory:
    """One episode in the making; token lists are of everything after the prompt."""

    task: dict
    index: int
    seed: int
    environment_seed: int
    prompt_ids: list[int] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    logps: list[float] | None = field(default_factory=list)  # None once the engine gave none for a turn
    tool_mask: list[int] = field(default_factory=list)
    turns: list[dict] = field(default_factory=list)
    finish: str | None = None
    failure: str | None = None
    error: str | None = None  # why the engine has no completion for a turn
    reencoded: bool = False
    # tokens after the prompt at most: max_completion_length, or fewer where the model has no positions for them
    limit: int = 0

    def say(self, completion, room: int) -> None:
        """A turn of the policy, ``stages.decoding.sampler.Completion``, with ``room`` tokens left. One that was cut
        short of them (max_turn_length) is closed for it and acted on as it stands; one that the engine lost ends the
        trajectory."""
        if completion.error is not None:
            self.finish, self.error = "error", completion.error
            return
        start = len(self.ids)
        self.ids += list(completion.ids)
        self.logps = (
            None
            if self.logps is None or completion.logps is None
            else self.logps + [float(v) for v in completion.logps]
        )
        self.reencoded = self.reencoded or completion.reencoded
        self.tool_mask += [0] * len(completion.ids)
        self.turns.append(
            {
                "start": start,
                "end": len(self.ids),
                "text": completion.text,
                "observation": "",
                "reward": 0.0,
                "events": [],
            }
        )
        if completion.finish_reason == "length" and len(completion.ids) >= room:
            self.finish = "length"

    def hear(self, ids: Sequence[int]) -> None:
        """Tokens of the environment."""
        self.ids += list(ids)
        self.logps = None if self.logps is None else self.logps + [0.0] * len(ids)
        self.tool_mask += [1] * len(ids)

    def sample(self) -> Sample:
        return Sample(
            self.task,
            self.prompt_ids,
            self.index,
            self.ids,
            self.logps,
            self.finish or "length",
            self.turns[-1]["text"] if self.turns else "",
            tool_mask=self.tool_mask,
            turns=self.turns,
            failure=self.failure,
            environment_seed=self.environment_seed,
            reencoded=self.reencoded,
            error=self.error,
            seed=self.seed,
        )


class Agent:
    """Samples trajectories; ``sample`` has the form of ``stages.generation.sample_groups``."""

    def __init__(self, config, renderer):
        self.config, self.renderer = config, renderer
        self.pool = EnvironmentPool(
            config.environment,
            config.environment_options,
            EnvironmentLimits(
                config.environment_timeout_s,
                config.environment_memory_mib,
                config.environment_workers,
                config.environment_network,
            ),
        )
        self.seconds: list[float] = []  # of every step of an environment since the last latency()

    def latency(self) -> dict[str, float]:
        """Mean and longest wall seconds of the environments' answers since the last call; a measurement, no metric that
        repeats.
        """
        found, self.seconds = self.seconds, []
        return (
            {"environment_step_seconds": sum(found) / len(found), "environment_step_seconds_max": max(found)}
            if found
            else {}
        )

    def close(self) -> None:
        self.pool.close()

    @staticmethod
    def seeds_of(seed: int) -> list[int]:
        """The seeds of the trajectories that one seed gives."""
        return [seed]

    @staticmethod
    def turn_seed(seed: int, turn: int) -> int:
        """What a turn of the trajectory with this seed is drawn with."""
        return seed_for(seed, "agent", "turn", turn)

    def sample(self, sampler, rows, params, seeds, prefixes=None) -> list[list[Sample]]:
        """Trajectories of each ``(task row, _)``; ``seeds[i]`` lists those of task i, and the first one is its
        environment's.

        ``params.max_new_tokens`` bounds the tokens of a whole trajectory, observations included. ``prefixes[i]``: a
        Sample whose turns are taken first, its actions played again in a fresh environment (VINEPPO). Several ranks
        share the tasks.
        """
        mine = range(ranks.rank(), len(rows), ranks.world_size())
        made = self._play(
            sampler,
            [rows[i][0] for i in mine],
            params,
            [seeds[i] for i in mine],
            None if prefixes is None else [prefixes[i] for i in mine],
        )
        found = {i: [t.sample() for t in group] for i, group in zip(mine, made)}
        everyone = {i: group for part in ranks.gather(found) for i, group in part.items()}
        return [everyone[i] for i in range(len(rows))]

    def _play(self, sampler, tasks, params, seeds, prefixes) -> list[list[Trajectory]]:
        worlds = (
            [seed_for(own[0], "agent", "environment") for own in seeds]
            if prefixes is None
            else [p.environment_seed for p in prefixes]
        )
        groups = [
            [Trajectory(task, g, seed, world) for g, seed in enumerate(own)]
            for task, own, world in zip(tasks, seeds, worlds)
        ]
        everyone = [t for group in groups for t in group]
        episodes, first = self.pool.reset(
            [plain_task(t.task) for t in everyone], [t.environment_seed for t in everyone]
        )
        episode_of = dict(zip(map(id, everyone), episodes))
        for trajectory, seen in zip(everyone, first):
            if seen.error:
                trajectory.finish, trajectory.failure = "failure", seen.error
                trajectory.prompt_ids = self.renderer.prompt_ids(trajectory.task["prompt"])
            else:
                trajectory.prompt_ids = self.renderer.prompt_ids(self._shown(seen.messages))
        for group in groups:
            same_start(group)
        if prefixes is not None:
            self._replay(groups, prefixes, episode_of)
        for trajectory in everyone:
            trajectory.limit = room_after(sampler, trajectory.prompt_ids, params.max_new_tokens)
            if trajectory.limit < 1 and trajectory.failure is None:
                trajectory.finish = "failure"
                trajectory.failure = (
                    f"the first messages have {len(trajectory.prompt_ids)} tokens, all that the model has positions for"
                )
                trajectory.prompt_ids = self.renderer.prompt_ids(trajectory.task["prompt"])
        with remembering(sampler):
            for turn in range(self.config.max_turns):
                live = [t for t in everyone if t.finish is None and len(t.turns) == turn]
                self._turn(sampler, live, params)
                acting = [t for t in live if t.finish is None]
                for trajectory, seen in zip(
                    acting, self.pool.step([episode_of[id(t)] for t in acting], [t.turns[-1]["text"] for t in acting])
                ):
                    self._observe(trajectory, seen)
        self.pool.end(episodes)
        return groups

    def _turn(self, sampler, live: list[Trajectory], params) -> None:
        """One turn of every trajectory in ``live``."""
        limit = self.config.max_turn_length or params.max_new_tokens
        requests: dict[tuple, list[Trajectory]] = {}
        for trajectory in live:  # one prefill for those that have the same tokens so far
            requests.setdefault((*trajectory.prompt_ids, -1, *trajectory.ids), []).append(trajectory)
        prompts = [own[0].prompt_ids + own[0].ids for own in requests.values()]
        seeds = [[self.turn_seed(t.seed, len(t.turns)) for t in own] for own in requests.values()]
        rooms = [min(limit, own[0].limit - len(own[0].ids)) for own in requests.values()]
        for own, completions in zip(
            requests.values(), sample_with_room(sampler, prompts, params, seeds, rooms) if prompts else []
        ):
            for trajectory, completion in zip(own, completions):
                trajectory.say(completion, trajectory.limit - len(trajectory.ids))

    def _observe(self, trajectory: Trajectory, seen) -> None:
        """What a turn led to: its reward and events, and either the end or the next observation."""
        turn = trajectory.turns[-1]
        self.seconds.append(seen.seconds)
        if seen.error:
            trajectory.finish, trajectory.failure = "failure", seen.error
            return
        turn |= {"reward": seen.reward, "events": list(seen.events)}
        if seen.done or GOAL in seen.events:
            trajectory.finish = "goal" if GOAL in seen.events else "stop"
        elif len(trajectory.turns) >= self.config.max_turns:
            trajectory.finish = "turn_limit"
        else:
            messages = self._shown(seen.messages)
            turn["observation"] = json.dumps(messages, ensure_ascii=False)
            ids = self.renderer.observation_ids(
                messages, bool(trajectory.ids) and trajectory.ids[-1] == self.renderer.turn_end_id
            )
            if len(trajectory.ids) + len(ids) >= trajectory.limit:  # nothing could be said after it
                trajectory.finish = "length"
            else:
                trajectory.hear(ids)

    def _shown(self, messages) -> list[dict]:
        """Messages as the template gets them: under ``observation_role``, those of the same role joined where that is
        user.
        """
        out: list[dict] = []
        for message in messages:
            if message["role"] == "tool" and self.config.observation_role == "user":
                message = {"role": "user", "content": message.get("content") or ""}
                if out and out[-1]["role"] == "user":
                    out[-1] = {**out[-1], "content": f"{out[-1]['content']}\n{message['content']}"}
                    continue
            out.append(dict(message))
        return out

    def _replay(self, groups, prefixes, episode_of) -> None:
        """Bring every trajectory to the end of its prefix, by playing the prefix's actions in its own environment."""
        for depth in range(max((len(p.turns) for p in prefixes), default=0)):
            acting = [
                (t, p.turns[depth])
                for group, p in zip(groups, prefixes)
                for t in group
                if t.finish is None and depth < len(p.turns)
            ]
            for (trajectory, turn), seen in zip(
                acting, self.pool.step([episode_of[id(t)] for t, _ in acting], [turn["text"] for _, turn in acting])
            ):
                if seen.error:  # a time-out, say, costs its own continuation
                    trajectory.finish, trajectory.failure = "failure", seen.error
                    continue
                again = (
                    seen.reward,
                    list(seen.events),
                    seen.done or json.dumps(self._shown(seen.messages), ensure_ascii=False),
                )
                if again != (turn["reward"], turn["events"], turn["observation"]):
                    raise ValueError(
                        f"the environment does not repeat what it did: turn {depth + 1} of a task led to {again!r:.200}"
                        f" where it had led to {(turn['reward'], turn['events'], turn['observation'])!r:.200}, so"
                        " nothing can be continued from there; make it a function of (task, seed, actions)"
                    )
        for group, prefix in zip(groups, prefixes):
            for trajectory in group:
                trajectory.prompt_ids, trajectory.ids = list(prefix.prompt_ids), list(prefix.ids)
                trajectory.logps = None if prefix.logps is None else list(prefix.logps)
                trajectory.tool_mask, trajectory.reencoded = list(prefix.tool_mask), prefix.reencoded
                trajectory.turns = [dict(turn) for turn in prefix.turns]


def prefix_of(sample: Sample, turns: int) -> Sample:
    """A trajectory up to the observation that follows its first ``turns`` turns: what a Monte-Carlo continuation starts
    from (VINEPPO).
    """
    end = sample.turns[turns]["start"]
    return replace(
        sample,
        ids=sample.ids[:end],
        logps=None if sample.logps is None else sample.logps[:end],
        tool_mask=sample.tool_mask[:end],
        turns=sample.turns[:turns],
    )


def same_start(group: list[Trajectory]) -> None:
    """The trajectories of a group share one prompt; an environment that starts them differently is refused."""
    starts = [t.prompt_ids for t in group if t.failure is None]
    if any(ids != starts[0] for ids in starts):
        raise ValueError(
            "the environment's reset gave different messages for one task and seed, so its trajectories cannot be"
            " compared; make reset a function of (task, seed)"
        )
    for trajectory in group:
        if starts:
            trajectory.prompt_ids = list(starts[0])


def plain_task(row: dict) -> dict:
    """A task row as the environment's process gets it: what JSON can say."""
    return json.loads(json.dumps(row, default=str))


def agent_metrics(samples: Sequence[Sample], components: Sequence = ()) -> dict[str, float]:
    """What people who debug agents look at: success, turns, reward per turn, tool errors, why trajectories ended, and
    of the reward ``components`` of kind milestones how many milestones a trajectory reached, and which share of the
    trajectories reached each. All but the ends are over trajectories that their environment did not lose."""
    out = {
        f"agent/finish_{reason}": sum(s.finish_reason == reason for s in samples) / max(len(samples), 1)
        for reason in ("goal", "stop", "turn_limit", "length", "failure")
    }
    samples = [s for s in samples if not s.lost]
    if not samples:
        return out
    turns = [t for s in samples for t in s.turns or []]
    calls = [e for t in turns for e in t["events"] if e.startswith(("tool:", "error:"))]
    failed = sum(e.startswith("error:") for e in calls)
    n = len(samples)
    paid = [r for s in samples for r in s.turn_rewards or ()]
    if paid:
        out["agent/reward_per_turn"] = sum(paid) / len(paid)
    for component in (c for c in components if c.kind == "milestones"):
        milestones = component.milestones or milestones_of()
        reached = [
            name
            for s in samples
            for now in milestones_by_turn([t["events"] for t in s.turns or []], milestones)
            for name in now
        ]
        out[f"agent/{component.name}"] = len(reached) / n
        out |= {
            f"agent/{component.name}/{re.sub(r'[^0-9A-Za-z_./ -]', '_', name)}": reached.count(name) / n
            for name in milestones
        }
    return out | {
        "agent/success": sum(succeeded(s) for s in samples) / n,
        "agent/turns": len(turns) / n,
        "agent/calls": sum(e.startswith("tool:") for e in calls) / n,
        "agent/errors": failed / n,
        "tools/call_frequency": len(calls) / n,
        "tools/failure_frequency": failed / max(len(calls), 1),
        "agent/tool_token_share": sum(sum(s.tool_mask) for s in samples) / max(sum(len(s.ids) for s in samples), 1),
    }


def succeeded(sample: Sample) -> bool:
    """Whether the environment verified the goal at any turn."""
    return any(GOAL in t["events"] for t in sample.turns or [])


def turn_counts(sample: Sample) -> dict[str, int]:
    """Turns, calls that a tool answered and calls that failed, of one trajectory."""
    events = [e for t in sample.turns for e in t["events"]]
    return {
        "turns": len(sample.turns),
        "tool_calls": sum(e.startswith("tool:") for e in events),
        "tool_errors": sum(e.startswith("error:") for e in events),
    }


def transcript(sample: Sample) -> list[dict]:
    """The turns and observations of a trajectory as messages, for readers."""
    out: list[dict] = []
    for turn in sample.turns:
        out.append({"role": "assistant", "content": turn["text"]})
        out += [{"role": m["role"], "content": m.get("content")} for m in json.loads(turn["observation"] or "[]")]
    return out


def turn_components(sample: Sample, turn: int) -> list[dict]:
    """What components say of one turn: those that score turns, and at the last turn all others; weight times value sums
    to the turn's reward.
    """
    if sample.turn_parts is None or sample.turn_rewards is None:
        return []
    last = turn == len(sample.turns) - 1
    return [
        {
            "name": name,
            "value": float(sample.turn_parts[name][turn] if name in sample.turn_parts else sample.parts[name]),
            "weight": weight,
        }
        for name, weight in sample.weights.items()
        if last or name in sample.turn_parts
    ]


def trajectory_rows(sample: Sample, episode_id: str) -> list[dict]:
    """``trajectories/1`` rows (without common columns): one per turn, observation and next observation as JSON
    messages.
    """
    rows, before = [], json.dumps(sample.prompt["prompt"], ensure_ascii=False, default=str)
    for t, turn in enumerate(sample.turns):
        at = slice(turn["start"], turn["end"])
        own = [v for v, tool in zip((sample.logps or [])[at], sample.tool_mask[at]) if not tool]
        after = turn["observation"] or "[]"
        said = json.dumps({"role": "assistant", "content": turn["text"]}, ensure_ascii=False)
        rows.append(
            {
                "episode_id": episode_id,
                "t": t,
                "observation_json": before,
                "action_json": said,
                "next_observation_json": after,
                "reward": float((sample.turn_rewards or [0.0] * len(sample.turns))[t]),
                "events": list(turn["events"]),
                "reward_tier": sample.tier or "unrouted",
                "reward_components": turn_components(sample, t),
                "logp_behaviour": None if sample.logps is None else float(sum(own)),
            }
        )
        before = after
    return rows
