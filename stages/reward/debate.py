"""Debate: two seats of one policy argue for opposite answers, a judge decides from what both said (DEBATE).

    seat A  prompt | statement | B's statement | statement | ...       loss on its own statements only
    seat B  prompt | statement | A's statement | statement | ...

Both speak at the same time in every round and then hear each other. The reward is zero-sum: the judge's probability of
a seat's answer, both orders averaged, less 1/2. A task is a ``prompts/1`` row whose ``extra_json`` holds ``{"answers":
[one, another]}``; where ``answer`` is one of them, the judge's accuracy with and without the debate is reported.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np

from stages.acting.agents import Trajectory
from stages.generation import Sample, remembering, room_after, sample_with_room
from stages.running import ranks
from stages.running.randomness import seed_for

SEAT = (
    "Argue that the right answer is: {answer}. Another debater argues for: {other}. A judge decides from what both of"
    " you say."
)
JUDGE = (
    "Two debaters argue for different answers to a question. Decide from their arguments which answer is"
    " right.\n\n[Question]\n{context}\n\n[Debater A]\n{a}\n\n[Debater B]\n{b}\n\nWhich debater's answer is right? Reply"
    " with the letter A or B only."
)


def judge_accuracy(p_first: Sequence[float], first_is_right: Sequence[bool]) -> float:
    """Share of debates in which the judge prefers the right answer; an even judge is half right."""
    return float(np.mean([won(p) if right else 1.0 - won(p) for p, right in zip(p_first, first_is_right)]))


def won(p: float) -> float:
    """1 where the judge prefers the side that it gives probability p, 0 where the other one, 1/2 where it is even."""
    return 0.5 if p == 0.5 else float(p > 0.5)


def answers_of(row: dict) -> list[str]:
    """The two answers of a task, or ValueError saying what to write."""
    found = json.loads(row.get("extra_json") or "{}").get("answers")
    if not isinstance(found, list) or len(found) != 2 or found[0] == found[1]:
        raise ValueError(
            f"environment=debate argues about two answers, and prompt {row['row_id'][:12]} has none; write "
            'extra_json={"answers": ["yes", "no"]} into the prompts'
        )
    return [str(a) for a in found]


class Debaters:
    """Samples debates; ``sample`` has the form of ``stages.generation.sample_groups`` and gives the debaters of seat A,
    then those of seat B.
    """

    seats = 2

    def __init__(self, config, renderer):
        self.config, self.renderer = config, renderer
        unknown = set(config.environment_options) - {"rounds", "instruction"}
        if unknown:
            raise ValueError(
                f"environment=debate has no option {sorted(unknown)[0]!r}; its environment_options are rounds and"
                " instruction (with {answer} and {other})"
            )
        self.rounds = int(config.environment_options.get("rounds", 2))
        self.instruction = str(config.environment_options.get("instruction", SEAT))
        if not 1 <= self.rounds <= config.max_turns:
            raise ValueError(f"rounds={self.rounds}: write at least 1 and at most max_turns={config.max_turns}")

    def close(self) -> None:
        """Nothing to end: debates need no process."""

    def latency(self) -> dict[str, float]:
        """Nothing to wait for."""
        return {}

    @staticmethod
    def seeds_of(seed: int) -> list[int]:
        """The seeds of the two debaters of a debate."""
        return [seed_for(seed, "debate", seat) for seat in (0, 1)]

    @staticmethod
    def turn_seed(seed: int, turn: int) -> int:
        """What a statement of the debater with this seed is drawn with."""
        return seed_for(seed, "turn", turn)

    def sample(self, sampler, rows, params, seeds) -> list[list[Sample]]:
        """2 G debaters of each task: ``seeds[i]`` lists one seed per debate; the k-th of seat A debates with the k-th
        of seat B.
        """
        mine = range(ranks.rank(), len(rows), ranks.world_size())
        made = self._debate(sampler, [rows[i][0] for i in mine], params, [seeds[i] for i in mine])
        everyone = {i: group for part in ranks.gather(dict(zip(mine, made))) for i, group in part.items()}
        return [everyone[i] for i in range(len(rows))]

    def prompt(self, row: dict, seat: int) -> list[dict]:
        """What a seat is told: its side, and the question."""
        answers = answers_of(row)
        return [
            {"role": "system", "content": self.instruction.format(answer=answers[seat], other=answers[1 - seat])},
            *row["prompt"],
        ]

    def _debate(self, sampler, tasks, params, seeds) -> list[list[Sample]]:
        debates = []  # (task, [debater of A, debater of B]) of every debate
        for task, own in zip(tasks, seeds):
            starts = [self.renderer.prompt_ids(self.prompt(task, seat)) for seat in (0, 1)]
            room = min(room_after(sampler, start, params.max_new_tokens) for start in starts)
            if room < 1:
                raise ValueError(
                    f"the prompt of a debater about task {task['row_id'][:12]} has {max(map(len, starts))} tokens, all"
                    " that the model has positions for; write a smaller max_prompt_length, which leaves it out"
                )
            debates += [
                (
                    task,
                    [
                        Trajectory(task, k, own_seed, seed, list(starts[seat]), limit=room)
                        for seat, own_seed in enumerate(self.seeds_of(seed))
                    ],
                )
                for k, seed in enumerate(own)
            ]
        share = params.max_new_tokens // (2 * self.rounds)
        # both sides' statements of all rounds fit into one transcript
        limit = max(1, min(self.config.max_turn_length or share, share))
        with remembering(sampler):
            for number in range(self.rounds):
                live = [t for _, pair in debates for t in pair if t.finish is None]
                found = (
                    sample_with_room(
                        sampler,
                        [t.prompt_ids + t.ids for t in live],
                        params,
                        [[self.turn_seed(t.seed, number)] for t in live],
                        [min(limit, t.limit - len(t.ids)) for t in live],
                    )
                    if live
                    else []
                )
                for trajectory, completions in zip(live, found):
                    trajectory.say(completions[0], trajectory.limit - len(trajectory.ids))
                for _, pair in debates:
                    if lost := next((t.error for t in pair if t.error is not None), None):  # for both sides
                        for t in pair:
                            t.finish, t.error = "error", lost
                    self._listen(pair, number)
        out, at = [], 0
        for task, own in zip(tasks, seeds):
            pairs = [pair for _, pair in debates[at : at + len(own)]]
            at += len(own)
            out.append([self._debater(task, pair, seat) for seat in (0, 1) for pair in pairs])
        return out

    def _listen(self, pair: list[Trajectory], number: int) -> None:
        """Each side hears what the other said in this round; a debate in which one side has no room left ends for
        both.
        """
        if any(len(t.turns) <= number or t.error is not None for t in pair):
            return
        if number == self.rounds - 1:
            for t in pair:
                t.finish = t.finish or "stop"
            return
        heard = []
        for own, other in (pair, pair[::-1]):
            messages = [{"role": "user", "content": other.turns[-1]["text"]}]
            own.turns[-1]["observation"] = json.dumps(messages, ensure_ascii=False)
            heard.append(self.renderer.observation_ids(messages, own.ids[-1] == self.renderer.turn_end_id))
        if any(t.finish or len(t.ids) + len(ids) >= t.limit for t, ids in zip(pair, heard)):
            for t in pair:
                t.finish = "length"
            return
        for t, ids in zip(pair, heard):
            t.hear(ids)

    def _debater(self, task: dict, pair: list[Trajectory], seat: int) -> Sample:
        sample = pair[seat].sample()
        sample.debate = {
            "answers": answers_of(task),
            "seat": seat,
            "said": [[turn["text"] for turn in t.turns] for t in pair],
        }
        return sample


def case(debate: dict, seat: int, heard: bool = True) -> str:
    """What the judge reads of a seat: its answer and, ``heard``, its statements."""
    return "\n".join([f"My answer is: {debate['answers'][seat]}", *(debate["said"][seat] if heard else [])])


def verdicts(judge, rows: Sequence[dict]) -> tuple[list[float], list[float]]:
    """The judge's probability of each row's own side, with and without the debate; NaN where it gave no readable
    answer.

    judge: ``stages.reward.judge.Judge`` in mode preference or verdict; both orders of every pair are asked and
    averaged.
    """
    from stages.reward_models.reward_scorers import Response

    found = []
    for heard in (True, False):
        pairs = []
        for row in rows:
            debate, asked = row["debate"], row["prompt_row"]
            first, second = (
                Response(asked["prompt"], [{"role": "assistant", "content": case(debate, seat, heard)}], row=asked)
                for seat in (0, 1)
            )
            pairs.append((first, second))
        p = judge.preferences(pairs)
        found.append([float(v) if row["debate"]["seat"] == 0 else 1.0 - float(v) for v, row in zip(p, rows)])
    return found[0], found[1]


def outcome(sample: Sample, name: str) -> dict:
    """A debater's seat and answer, whether that is the right one (None: not known), and who won, with and without the
    debate (``eval.debate``). ``name``: of the component that judges; a debate that it could not judge has no winner."""
    seat, known = sample.debate["seat"], sample.prompt.get("answer") in sample.debate["answers"]
    found = {
        "seat": seat,
        "side": sample.debate["answers"][seat],
        "right": sample.debate["answers"][seat] == sample.prompt["answer"] if known else None,
    }
    judged = {key: sample.parts.get(part) for key, part in (("won", name), ("won_without", f"{name}/without"))}
    return found | {key: won(value + 0.5) for key, value in judged.items() if value is not None and np.isfinite(value)}


def debate_metrics(samples: Sequence[Sample], name: str) -> dict[str, float]:
    """Judge accuracy with and without the debate, over the debaters whose answer is the right one (``eval.debate``).
    ``name``: of the component.
    """
    right = [s for s in samples if s.debate and s.prompt.get("answer") == s.debate["answers"][s.debate["seat"]]]
    turns = [len(s.turns) for s in samples if s.turns is not None]
    out = {"debate/rounds": float(np.mean(turns)) if turns else 0.0}
    for metric, part in (("debate/judge_accuracy", name), ("debate/judge_accuracy_without", f"{name}/without")):
        # the judge may have answered one of the two questions only
        read = [value + 0.5 for s in right if (value := s.parts.get(part)) is not None]
        if read:
            out[metric] = judge_accuracy(read, [True] * len(read))
    return out
