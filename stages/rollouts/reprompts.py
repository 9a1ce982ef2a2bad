"""What the teacher of a policy that learns from itself reads in the place of a question: a right answer of the same
group, and what the rewards said of the answer at hand (SDPO; Huebotter et al. 2026, arXiv:2601.20802).

The teacher is the reference. It reads the answer's own tokens behind this prompt, the policy reads them behind the
question alone, and :mod:`stages.policy.policy_update` holds the two against each other.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

import numpy as np

from stages.generation import Sample, prompt_ids
from stages.policy.members import Members
from stages.rollouts.groups import Group
from stages.verification.responses import view

#: The reward from which on an answer without a verdict is successful, where ``success_reward_threshold`` is empty.
SUCCESS = 1.0


@dataclass(frozen=True)
class Reprompt:
    """Of one completion: the teacher's prompt (None: it would read no more than the policy, or has no room), the index
    of the answer that it shows, and the feedback that it shows."""

    ids: list[int] | None
    solution: int | None = None
    feedback: str | None = None


class Reprompts:
    """Makes the teacher's prompts of the groups of an iteration.

    Args:
        positions: of the teacher, None for no limit. members: whose rubric has critiques.
    """

    def __init__(self, config, renderer, positions: int | None, members: Members):
        self.config, self.renderer, self.positions, self.members = config, renderer, positions, members

    def __call__(self, groups: list[Group]) -> tuple[list[Reprompt], dict[str, float]]:
        """(one of every completion, group after group; metrics, with TRL's names)."""
        found: list[Reprompt] = []
        for group in groups:
            right = [self.successful(s) for s in group.samples]
            for k, sample in enumerate(group.samples):
                sample.feedback = self.said_of(sample)
                shown = [j for j, ok in enumerate(right) if ok and self._may_show(j, k)]
                found.append(self._of(group, sample, shown[0] if shown else None))
        everyone = [s for g in groups for s in g.samples]
        share = lambda on: float(np.mean(on)) if len(on) else 0.0
        with_more = [one.solution is not None or one.feedback is not None for one in found]
        return found, {
            "self_distillation/success_group_fraction": share([any(map(self.successful, g.samples)) for g in groups]),
            "self_distillation/success_sample_fraction": share([one.solution is not None for one in found]),
            "self_distillation/feedback_available_fraction": share([s.feedback is not None for s in everyone]),
            "self_distillation/feedback_used_fraction": share([one.feedback is not None for one in found]),
            "self_distillation/reprompt_sample_fraction": share([one.ids is not None for one in found]),
            "self_distillation/too_long_fraction": share(
                [more and one.ids is None for more, one in zip(with_more, found)]
            ),
        }

    def successful(self, sample: Sample) -> bool:
        """Whether an answer may be shown: by its verdict, else by its reward; an unscorable one may not."""
        least = self.config.success_reward_threshold
        if least is None and sample.correct is not None:
            return sample.correct
        return bool(sample.total >= (SUCCESS if least is None else least))  # NaN is not

    def said_of(self, sample: Sample) -> str | None:
        """What was said of an answer: by rewards that say something, by the scorers of a rubric, or in the data."""
        extra = json.loads(sample.prompt.get("extra_json") or "{}")
        given = extra.get("privileged_context") if isinstance(extra, dict) else None
        said = sample.feedback or (self.members.feedback(sample.items) if self.members.component else "") or given
        return said if isinstance(said, str) and said.strip() else None

    def _may_show(self, shown: int, to: int) -> bool:
        return self.config.use_successful_as_teacher and not (shown == to and self.config.dont_reprompt_on_self_success)

    def _of(self, group: Group, sample: Sample, place: int | None) -> Reprompt:
        solution = None if place is None else group.samples[place]
        config, messages = self.config, sample.prompt["prompt"]
        feedback = sample.feedback if config.include_environment_feedback else None
        if solution is not None and config.environment_feedback_only_without_solution:
            feedback = None
        asked = max((i for i, m in enumerate(messages) if m["role"] == "user"), default=None)
        if asked is None or (solution is None and feedback is None):
            return Reprompt(None)
        parts = {"solution": "", "feedback": "", "prompt": messages[asked].get("content") or ""}
        if solution is not None:
            text = view(solution.seen, "answer_only") if config.remove_thinking_from_demonstration else solution.text
            parts["solution"] = filled(config.solution_template, {"successful_previous_attempt": text})
        if feedback is not None:
            parts["feedback"] = filled(config.feedback_template, {"feedback_raw": feedback})
        read = {**messages[asked], "content": filled(config.reprompt_template, parts)}
        ids = prompt_ids(self.renderer, [*messages[:asked], read, *messages[asked + 1 :]], config.prompt_template)
        fits = self.positions is None or len(ids) + len(sample.ids) <= self.positions
        fits = fits and len(ids) <= config.max_reprompt_len
        return Reprompt(ids if fits else None, place, feedback)


def filled(template: str, parts: dict[str, str]) -> str:
    """The template with ``{name}`` replaced by each part, once, whatever braces the parts hold."""
    pieces = re.split("(" + "|".join(re.escape(f"{{{name}}}") for name in parts) + ")", template)
    return "".join(parts.get(piece[1:-1], piece) if piece[:1] == "{" else piece for piece in pieces)
