"""Trajectories of a record in their environment once more: what the policy said is played from the record, what the
environment answers is its own of now.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from stages.decoding.sampler import Completion, DerivedText
from stages.generation import Sample
from stages.rollouts.policy import PolicySampler


class Tape:
    """An engine that says recorded turns: the one that was drawn with a seed where it is asked with that seed, and a
    row with an error where none was.
    """

    def __init__(self, policy: PolicySampler):
        self.name, self.tokenizer = policy.engine.name, policy.renderer.tokenizer
        self.model = getattr(policy.engine, "model", None)  # whose positions bound a trajectory
        self.agent, self.params = policy.agent, policy.params
        self.text = DerivedText(self.tokenizer, policy.params)
        self.said: dict[int, Completion] = {}  # by the seed of the turn

    def record(self, seed: int, ids: Sequence[int], turns: Sequence[dict]) -> list[Completion]:
        """Put the turns of a trajectory on the tape: ``seed`` that it was drawn with, its tokens after the prompt, and
        the ``start`` and ``end`` of its turns there; the turns as the engine gave them."""
        found = []
        for k, turn in enumerate(turns):
            own = list(ids[turn["start"] : turn["end"]])
            eos = bool(own) and own[-1] in self.params.stop_ids
            reason = "eos" if eos else self.text.ended([], own, "length")[1]
            found.append(Completion(own, [0.0] * len(own), reason, self.text.of(own[:-1] if eos else own)))
            self.said[self.agent.turn_seed(seed, k)] = found[-1]
        return found

    def generate(self, prompts, params, seeds) -> list[list[Completion]]:
        """The recorded turns of these seeds, whatever comes before them."""
        absent = Completion([], [], "error", "", error="the input recorded has no such turn")
        return [[self.said.get(seed, absent) for seed in own] for own in seeds]


def as_recorded(then: Sample, said: Sequence[Completion], now: Sample) -> Sample:
    """A trajectory with the tokens of the record and the turns' text, and of its environment what it says now;
    ``said``: its turns. One that went on for longer then has no observation, reward and events of what is left.
    """
    turns = []
    for k, (turn, completion) in enumerate(zip(then.turns, said)):
        known = now.turns[k] if k < len(now.turns) else {"observation": "", "reward": 0.0, "events": []}
        turns.append({**known, "start": turn["start"], "end": turn["end"], "text": completion.text})
    if then.failure is not None and turns:  # by a time-out, say: of the turn that it was lost in nothing is known
        turns[-1] |= {"observation": "", "reward": 0.0, "events": []}
    return replace(
        then,
        text=turns[-1]["text"] if turns else "",
        turns=turns,
        environment_seed=now.environment_seed,
        debate=now.debate,
        opened=False,
    )
