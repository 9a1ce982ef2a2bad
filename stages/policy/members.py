"""Who is in a prompt's group besides plain samples (GRAPE-GEN): improved answers and SFT answers.

``fresh``    the category's generation prompt (if the rubric has one) and the question
``improve``  the improvement prompt, the question, an earlier answer to it, and what the rubric's scorers said about
that answer
``sft``      the answer of a demonstration, which nobody sampled

Whatever an answer was sampled from, it is trained as an answer to the plain question (``conditioning=plain``, prompt
distillation): its old log-probs are computed under the policy that sampled, for ratio and KL alike; those of the
sampler are kept beside them. With ``conditioning=sampling`` ratio and KL are those behind what it was sampled from, and
the log-probs behind the plain question are kept.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from stages.generation import Sample, sample_groups
from stages.reward import grape
from stages.reward.rewards import concerns
from stages.reward.rubrics import Rubric

IMPROVE = (
    "You revise answers. You get a question, an earlier answer to it, and a critique with the reasons for its scores."
    " Address every point of the critique, keep what is right, and write only the improved answer."
)
REQUEST = (
    "{question}\n\n[Earlier answer]\n{answer}\n\n[Critique]\n{feedback}\n\nWrite the improved answer to the question."
)


def with_system(messages: list[dict], text: str) -> list[dict]:
    """The conversation with ``text`` in front of it as (or in) its system message."""
    if not text:
        return messages
    if messages and messages[0]["role"] == "system":
        own = messages[0]["content"]  # empty where the message only carries tools
        return [{**messages[0], "content": f"{text}\n\n{own}" if own else text}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


class Members:
    """Draws the members of the groups of one iteration and remembers, per prompt, the answer to be improved next."""

    def __init__(self, stage, renderer, rewards):
        config = self.config = stage.config
        self.stage, self.renderer = stage, renderer
        self.component = next((c for c in rewards.components if c.kind == "rubric"), None)
        self.rubric: Rubric = rewards.scorers[self.component.name].rubric if self.component else Rubric()
        self.prior: dict[str, dict] = {}  # by row id: text, total, feedback, sample_id
        self.chosen: dict[str, Sample] = {}  # of the iteration in hand, until it is written
        self.too_long = 0
        if config.mode_mix != "fresh" and self.component is None:
            raise ValueError(
                f"mode_mix={config.mode_mix} improves answers by the critiques of a rubric; add a reward component of"
                " kind rubric and the input rubric, or write mode_mix=fresh"
            )
        self.answers = self._sft_answers() if config.sft_member != "none" else {}
        self.active = config.mode_mix != "fresh" or config.sft_member != "none" or bool(self.rubric.generation_prompt)
        refused = {
            "importance_correction": config.importance_correction != "none",
            "rejection": config.rejection != "none",
            "replay_fraction": config.replay_fraction > 0,
            "stored": stage.has("stored"),
        }
        if self.rubric.generation_prompt and (config.environment or config.prompt_template != "chat"):
            raise ValueError(
                "the rubric's generation_prompt is the system message of a chat, which"
                f" {'an environment' if config.environment else 'prompt_template=' + config.prompt_template} has no"
                " place for; leave generation_prompt out of the rubric, or write"
                f" {'environment=' + repr('') if config.environment else 'prompt_template=chat'}"
            )
        for name in (name for name, on in refused.items() if on and self.active):
            raise ValueError(
                f"{name} cannot be combined with improved answers, SFT members or generation prompts, whose old"
                " log-probs are computed anew; leave it out, or write mode_mix=fresh, sft_member=none and a rubric"
                " without generation_prompt"
            )

    def _sft_answers(self) -> dict[str, tuple[list[int], str]]:
        """{prompt id: (ids, text)} of the demonstrations that answer a prompt in one turn."""
        from stages.pairs import trim

        found, long = {}, 0
        for row in self.stage.dataset("sft").iter_rows():
            start = min(row["train_turns"] or [len(row["messages"]) - 1])
            if len(row["messages"]) != start + 1 or row["prompt_id"] in found:
                continue
            _, ids, mask = self.renderer.completion_ids(row["messages"][:start], row["messages"][start:])
            ids = list(trim(ids, mask)[0])
            if len(ids) > self.config.longest_completion:
                long += 1
                continue
            found[row["prompt_id"]] = ids, row["messages"][-1].get("content") or ""
        if long:
            self.stage.warn(
                "sft_members_too_long",
                f"{long} SFT answers have more than {self.config.longest_completion} tokens (max_completion_length, or"
                " the longest of context_schedule) and do not join a group. Raise it to use them.",
            )
        if not found:
            raise ValueError(
                "the input sft has no row that answers a prompt in one turn within max_completion_length; give"
                " demonstrations/1 rows, or sft_member=none"
            )
        return found

    def check(self, prompts) -> None:
        """Refuse questions that are too long behind their category's generation prompt, before anything is sampled.
        Raises ValueError.
        """
        long = [
            n
            for row, _ in prompts
            if (asked := self.asked(row))
            and (n := len(self.renderer.prompt_ids(asked))) > self.config.max_prompt_length
        ]
        if long:
            raise ValueError(
                f"with the rubric's generation_prompt {len(long)} of {len(prompts)} prompts have more than"
                f" max_prompt_length={self.config.max_prompt_length} tokens; write a shorter generation_prompt, or"
                f" max_prompt_length={max(long)} (lower max_completion_length where the model has no more positions)"
            )

    def _system(self, prompt: dict) -> str:
        """The generation prompt of a prompt's category, "" without one, or where the rubric is not for the prompt."""
        return (
            self.rubric.generation_prompt.get(self.rubric.category_of(prompt, self.component.category), "")
            if self.component and concerns(self.component, prompt)
            else ""
        )

    def asked(self, prompt: dict) -> list[dict] | None:
        """What fresh answers are sampled from where that is not the plain question: with its generation prompt."""
        system = self._system(prompt)
        return with_system(prompt["prompt"], system) if system else None

    # -- one batch of groups -------------------------------------------------------------------------------------------
    def sample(self, sampler, chosen, params, seeds, iteration: int, first: int) -> list[list[Sample]]:
        """The members of the group of every chosen (prompt row, ids); ``seeds[k]``: G seeds. Indices count within a
        group.
        """
        from storage.schema import prompt_id

        config, requests, owners, seeds_of = self.config, [], [], []
        made: list[list[Sample]] = [[] for _ in chosen]
        for k, (prompt, ids) in enumerate(chosen):
            sft = self.answers.get(prompt["prompt_id"])
            count = len(seeds[k]) - (sft is not None and config.sft_member == "replace")
            wanted, ids_improve, messages = self._improve(prompt, count, iteration, first + k)
            fresh = self.asked(prompt)
            if count - wanted:
                requests.append((prompt, self.renderer.prompt_ids(fresh) if fresh else ids))
                owners.append((k, "fresh", prompt_id(fresh) if fresh else None))
                seeds_of.append(seeds[k][: count - wanted])
            if wanted:
                requests.append((prompt, ids_improve))
                owners.append((k, "improve", prompt_id(messages)))
                seeds_of.append(seeds[k][count - wanted : count])
        for (k, mode, context), (_, asked), group in zip(
            owners, requests, sample_groups(sampler, requests, params, seeds_of) if requests else []
        ):
            prompt, ids = chosen[k]
            behind = list(asked) if context is not None and config.conditioning == "sampling" else None
            parent = self.prior[prompt["row_id"]]["sample_id"] if mode == "improve" else None
            made[k] += [
                replace(
                    s,
                    prompt_ids=ids,
                    index=len(made[k]) + j,
                    mode=mode,
                    context=context,
                    context_ids=behind,
                    parent=parent,
                )
                for j, s in enumerate(group)
            ]
        for k, (prompt, ids) in enumerate(chosen):
            if prompt["prompt_id"] in self.answers:
                answer, text = self.answers[prompt["prompt_id"]]
                made[k].append(Sample(prompt, ids, len(made[k]), list(answer), [], "eos", text, mode="sft"))
        return made

    def _improve(self, prompt: dict, count: int, iteration: int, counter: int):
        """(answers to improve, ids of the request, its messages) of a prompt; none where it has no earlier answer, no
        rubric criticises it or the request is too long.
        """
        config, prior = self.config, self.prior.get(prompt["row_id"])
        if config.mode_mix == "fresh" or not concerns(self.component, prompt):
            return 0, [], []
        draws = (
            self.stage.rng("improve", iteration, counter, prompt["row_id"]).random(count)
            if config.mode_mix == "probability"
            else None
        )
        # the share is one of all G, an SFT answer in a sample's place included
        size = config.num_generations if draws is None else count
        wanted = min(count, grape.num_improve(size, config.improve_share, max(iteration, 0), prior is not None, draws))
        if not wanted:
            return 0, [], []
        category = self.rubric.category_of(prompt, self.component.category)
        *before, last = prompt["prompt"]
        request = {
            "role": "user",
            "content": REQUEST.format(question=last["content"], answer=prior["text"], feedback=prior["feedback"]),
        }
        messages = with_system([*before, request], self.rubric.improvement_prompt.get(category, IMPROVE))
        ids = self.renderer.prompt_ids(messages)
        if len(ids) > config.max_prompt_length:
            self.too_long += 1
            self.stage.warn(
                "improve_too_long",
                "Requests to improve an answer (question, answer and critique) can exceed "
                f"max_prompt_length={config.max_prompt_length} "
                "tokens; fresh answers take their place (metric members/improve_too_long). Raise max_prompt_length.",
            )
            return 0, [], []
        return wanted, ids, messages

    def remember(self, groups, iteration: int) -> None:
        """Keep, of every prompt, the scored answer that the next improvement starts from (``prior_choice``)."""
        if self.config.mode_mix == "fresh":
            return
        for group in groups:
            able = [s for s in group.samples if s.mode != "sft" and math.isfinite(s.total)]
            if not able:
                continue
            key, old = group.prompt["row_id"], self.prior.get(group.prompt["row_id"])
            if self.config.prior_choice == "random":
                chosen = able[int(self.stage.rng("prior", iteration, key).integers(len(able)))]
            else:
                sign = 1 if self.config.prior_choice == "best" else -1
                chosen = max(able, key=lambda s: sign * s.total)
                if old is not None and sign * old["total"] >= sign * chosen.total:
                    continue
            self.prior[key] = {
                "text": chosen.text,
                "total": float(chosen.total),
                "feedback": self.feedback(chosen.items),
                "sample_id": None,
            }
            self.chosen[key] = chosen

    def state(self) -> dict:
        return self.prior

    def restore(self, state: dict) -> None:
        self.prior = state

    def written(self, samples: list[Sample], rows: list[dict]) -> None:
        """Name the answers that were kept by the ids of their rollouts."""
        for sample, row in zip(samples, rows):
            key = sample.prompt["row_id"]
            if self.chosen.get(key) is sample:
                self.prior[key]["sample_id"] = row["row_id"]
        self.chosen.clear()

    def feedback(self, items: list[dict]) -> str:
        """What the scorers said about an answer, item by item."""
        criteria = {(i.category, i.item_id): i.criterion for own in self.rubric.items.values() for i in own}
        lines = []
        for item in items:
            if item["score"] is not None:
                said = " ".join(
                    t for t in (item["reasoning"], item["critique"] and f"Critique: {item['critique']}") if t
                )
                lines.append(
                    f"- {criteria[item['category'], item['item_id']]} Score {item['score']:.2f}. {said}".rstrip()
                )
        return "\n".join(lines)

    def metrics(self, samples: list[Sample], plain) -> dict[str, float]:
        """Shares of the members, and how far their text's log-probs under the plain question are from the sampler's
        (nats per token).
        """
        n = len(samples)
        apart = [
            float(np.mean(np.abs(np.subtract(o, s.logps))))
            for s, o in zip(samples, plain)
            if s.context is not None and s.ids and s.logps is not None
        ]
        out = {
            f"members/{mode}_share": sum(s.mode == mode for s in samples) / n for mode in ("fresh", "improve", "sft")
        }
        out |= {
            "members/off_policy_share": sum(s.off_policy for s in samples) / n,
            "members/improve_too_long": float(self.too_long),
        }
        self.too_long = 0  # per iteration: a run that was killed and goes on reports the same numbers
        return out | ({"members/logp_difference": float(np.mean(apart))} if apart else {})
