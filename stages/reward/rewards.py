"""Rewards: a named, weighted list of components, each scored and stored separately.

    rewards = build_rewards(config.rewards, stage.inputs, renderer=renderer, device=stage.device)
    for scored in rewards.score(rows): scored.total, scored.parts, scored.reasons, scored.correct

A component gives every row a value or `Unscorable(reason)`, never a silent zero. The total is the weighted sum of what
was scored (reward.composite): a missing primary component (verifier, code, python, model) makes the whole row
unscorable, a missing shaping term (format, length, ...) is skipped, unless `on_missing` says otherwise. Code that
others wrote runs in the sandbox.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from itertools import combinations

from stages.reward.components import READ_OTHERS, RewardComponent, TIERS
from stages.reward.scorers import RULES, alone, shown_to, vote
from stages.reward.verdicts import ALONE, ANOTHERS, NOT_ASKED, Scored, Unscorable, Verdict
from storage.files import sha256_text
from storage.schema import prompt_id


def build_rewards(
    components: Sequence[RewardComponent], inputs: dict, *, renderer=None, device: str = "cpu", frozen: str = "auto"
) -> "Rewards":
    """Scorers for the configured components. Reward models are loaded here, once, and stay frozen.

    inputs: stage inputs by name (a component of kind model names one of them). renderer: renders a prompt row
    when the caller does not pass its token ids. frozen: how matrices of models are kept (``frozen_dtype``). Raises
    ValueError naming the setting to change.
    """
    if not components:
        raise ValueError(
            "rewards is empty; write at least one component, for example rewards=[{name: verifier, kind: verifier}]"
        )
    names = [c.name for c in components]
    repeated = sorted({n for n in names if names.count(n) > 1})
    if repeated:
        raise ValueError(f"two reward components are called {repeated[0]!r}; give every component its own name")
    for component in components:
        if component.votes_of and component.votes_of not in (
            able := [c.name for c in components if c.kind not in READ_OTHERS]
        ):
            raise ValueError(
                f"reward {component.name!r}: votes_of={component.votes_of!r} is no component that scores answers one by"
                f" one; write one of {', '.join(able) or 'yours, once there is one'}, or leave it out"
            )
    check_inputs(components, inputs)
    scorers = {}
    for component in components:
        if component.kind in ("model", "judge", "group_preference", "debate"):
            scorers[component.name] = _scorer(component, inputs, device, frozen)
        elif component.kind == "icdpo":
            scorers[component.name] = _in_context_scorer(component, inputs, renderer, device, frozen)
        elif component.kind == "rubric":
            scorers[component.name] = _rubric_scorer(component, inputs, renderer, device)
    if any(c.blend for c in components):
        from stages.acting.agent_rewards import check_blend

        check_blend({c.name: c.weight for c in components if c.blend})
        if any(c.blend and c.from_step for c in components):
            raise ValueError(
                "the weights of a blend sum to 1 at every step; leave from_step out of its components, or write"
                " blend=false"
            )
    tiers = [c.tier for c in components if c.tier]
    if tiers and (len(tiers) < 2 or len(set(tiers)) < len(tiers)):
        raise ValueError(
            f"rewards has the tiers {', '.join(tiers)}; a router needs at least two of rule, learned and judge, each of"
            " them once, or leave tier out"
        )
    first = min((c for c in components if c.tier), key=lambda c: TIERS.index(c.tier), default=None)
    if first is not None and first.audit_fraction:
        raise ValueError(
            f"reward {first.name!r}: audit_fraction asks a tier about what an earlier one decided, and {first.tier} is the"
            " first; write it in a later one, or leave it out"
        )
    if sum(c.kind == "rubric" for c in components) > 1:
        raise ValueError("rewards has two components of kind rubric; put all items into one rubric, by category")
    return Rewards(list(components), scorers, renderer)


def _rubric_scorer(component: RewardComponent, inputs: dict, renderer, device: str):
    from stages.reward.rubric_reward import RubricScorer
    from stages.reward.rubrics import from_rows

    return RubricScorer(component, from_rows(_dataset(inputs, "rubric").iter_rows()), inputs, renderer, device)


def _dataset(inputs: dict, name: str):
    """A dataset among the stage inputs, each of which is a path or has one."""
    from storage.datasets import open_dataset

    return open_dataset(str(getattr(inputs[name], "path", inputs[name])))


def model_input(component: RewardComponent, inputs: Collection[str]) -> str:
    """Name of the stage input that holds a component's model."""
    name = (
        "judge"
        if component.kind in ("judge", "debate") and component.input == "reward_model" and "judge" in inputs
        else component.input
    )
    name = (
        {"group_preference": "group_preference", "icdpo": "model"}.get(component.kind, name)
        if name == "reward_model"
        else name
    )
    if name not in inputs:
        raise ValueError(
            f"reward {component.name!r} needs the stage input {name!r}; give"
            f" {name}=MODEL_REF{', or an endpoint' * (component.kind in ('judge', 'debate'))}, or remove the component"
        )
    return name


def check_inputs(components: Sequence[RewardComponent], given: Collection[str]) -> None:
    """Raise ValueError where a component reads a stage input that is not among those ``given``."""
    for component in components:
        if (
            component.kind in ("model", "group_preference", "icdpo")
            or component.kind in ("judge", "debate")
            and not component.endpoint
        ):
            model_input(component, given)
        if component.kind == "rubric" and "rubric" not in given:
            raise ValueError(
                f"reward {component.name!r} needs the stage input 'rubric'; give rubric=FILE (YAML, JSON or JSON Lines)"
                " or a rubric_items/1 dataset"
            )
        if component.kind == "icdpo" and "demonstrations" not in given:
            raise ValueError(
                f"reward {component.name!r} needs the stage input 'demonstrations'; give demonstrations=FILE or a"
                " demonstrations/1 dataset"
            )
        if (
            component.kind in ("judge", "debate")
            and "{principle}" in component.judge_prompt
            and "principles" not in given
        ):
            raise ValueError(
                f"reward {component.name!r}: judge_prompt shows {{principle}}, which the stage input 'principles'"
                " holds; give principles=FILE (stages/reward/principles.py) or a principles/1 dataset"
            )


def inputs_read(components: Sequence[RewardComponent], given: Iterable[str]) -> set[str]:
    """Names of the stage inputs that components read where ``given`` are there. A rubric's items may name any model, so
    it counts as a reader of all.
    """
    found: set[str] = set()
    for component in components:
        if (
            component.kind in ("model", "group_preference", "icdpo")
            or component.kind in ("judge", "debate")
            and not component.endpoint
        ):
            named = {**dict.fromkeys(given), component.input: None, "group_preference": None, "model": None}
            found.add(model_input(component, named))
        found |= {
            "group_preference": {"context"},
            "icdpo": {"demonstrations"},
            "rubric": {"rubric", "reward_model", "judge", "gold", "group_preference"},
        }.get(component.kind, set())
        found |= {"principles"} if "{principle}" in component.judge_prompt else set()
    return found


def _model_path(component: RewardComponent, inputs: dict) -> str:
    name = model_input(component, inputs)
    return str(getattr(inputs[name], "path", inputs[name]))


def load_model(component: RewardComponent, inputs: dict, device: str, frozen: str = "auto"):
    """The reward model of a component."""
    from stages.reward_models.reward_scorers import load_scorer

    scorer = load_scorer(_model_path(component, inputs), device, frozen=frozen)
    if scorer.needs_group != (component.kind == "group_preference"):
        raise ValueError(
            f"reward {component.name!r}: the input {model_input(component, inputs)!r} is "
            + (
                "a group preference model, which scores in the context of a group; write kind: group_preference, group:"
                " NAME, and give context=DATASET"
                if scorer.needs_group
                else "no group preference model; give one that the stage group_preference trained, or write kind: model"
            )
        )
    if component.step_credit != "none" and not hasattr(scorer, "step_probabilities"):
        raise ValueError(
            f"reward {component.name!r}: step_credit={component.step_credit} pays what a process reward model says of"
            f" each step, and the input {model_input(component, inputs)!r} is of objective={scorer.card.objective};"
            " give one that reward_model objective=prm trained, or write step_credit=none"
        )
    scorer.ranking = component.ranking
    return scorer


def load_asked(component: RewardComponent, inputs: dict, device: str, frozen: str = "auto"):
    """The language model that a judge component asks: a server, or a local model."""
    from stages.reward.judge import LocalJudge, ServerJudge
    from stages.reward_models.reward_heads import RewardCard

    if component.endpoint:
        return ServerJudge(
            component.endpoint,
            component.endpoint_model,
            component.key_variable,
            max(component.timeout_s, 60.0),
            component.concurrency,
        )
    return LocalJudge(_model_path(component, inputs), RewardCard(), device, frozen=frozen)


def _scorer(component: RewardComponent, inputs: dict, device: str, frozen: str):
    from stages.reward.judge import Judge

    if component.kind == "model":
        return load_model(component, inputs, device, frozen)
    if component.kind == "group_preference":
        return _group_scorer(component, inputs, device, frozen)
    mode, prompt = component.judge_mode, component.judge_prompt
    if component.kind == "debate":
        from stages.reward.debate import JUDGE

        mode, prompt = "verdict" if mode == "verdict" else "preference", prompt or (JUDGE if mode != "verdict" else "")
    judge = Judge(
        load_asked(component, inputs, device, frozen),
        mode,
        prompt=prompt,
        max_tokens=component.judge_tokens,
        retries=component.judge_retries,
        samples=component.judge_samples,
        principles=_principles(component, inputs),
    )
    judge.ranking = component.ranking
    return judge


def _principles(component: RewardComponent, inputs: dict) -> dict[str, str]:
    """Texts of the active principles, by id, where the judge is shown that of the prompt."""
    if "{principle}" not in component.judge_prompt:
        return {}
    found = {
        row["principle_id"]: row["text"]
        for row in _dataset(inputs, "principles").iter_rows()
        if row["active"] and row["text"]
    }
    if not found:
        raise ValueError(
            f"reward {component.name!r}: no principle of the input 'principles' is active and has a text, so"
            " judge_prompt has nothing to show; write active: true and a `text`"
        )
    return found


def _group_scorer(component: RewardComponent, inputs: dict, device: str, frozen: str):
    from stages.reward_models.preference_module import points_of

    scorer = load_model(component, inputs, device, frozen)
    if "context" not in inputs:
        raise ValueError(
            f"reward {component.name!r} needs the stage input 'context', rated responses of the group; give"
            " context=FILE or a ratings/1 dataset"
        )
    dataset = _dataset(inputs, "context")
    points = points_of(dataset, component.group)
    if not points:
        raise ValueError(
            f"reward {component.name!r}: the input context has no row of group {component.group!r}; its groups are: "
            f"{', '.join(sorted({p.group for p in points_of(dataset)})[:20])}"
        )
    scorer.observe(points)
    return scorer


def _in_context_scorer(component: RewardComponent, inputs: dict, renderer, device: str, frozen: str):
    from stages.chat import renderer_for
    from stages.in_context import InContextScorer
    from stages.models.modeling import load_frozen

    path = _model_path(component, inputs)
    renderer = renderer or renderer_for(path)
    if renderer_for(path).vocabulary_hash != renderer.vocabulary_hash:
        raise ValueError(
            f"reward {component.name!r}: the model of input {component.input!r} has another tokenizer than the policy,"
            " whose token ids it would score; leave input out"
        )
    return InContextScorer(
        load_frozen(path, device, frozen),
        renderer,
        _dataset(inputs, "demonstrations"),
        device=device,
        count=component.num_demonstrations,
        coarse=component.coarse_demonstrations,
        max_tokens=component.demonstration_length,
    )


def placed(at: Sequence[int], found: Iterable, column: list) -> list:
    """``column`` with what was ``found`` at the places ``at``."""
    for i, value in zip(at, found):
        column[i] = value
    return column


class Rewards:
    """Verdict rows: dicts with prompt_row (a `prompts/1` row), completion_text, completion_ids, finish_reason and,
    optionally, prompt_ids and group (what rewards that compare completions compare within)."""

    def __init__(self, components: list[RewardComponent], scorers: dict, renderer):
        self.components, self.scorers, self.renderer = components, scorers, renderer
        self.step: int | None = None  # optimizer step that ``from_step`` is compared with; None: every component counts
        # in the place of the weights of components with ``at_least``; empty: what they start at
        self.multipliers: dict[str, float] = {}

    def score(self, rows: Sequence[dict]) -> list[Scored]:
        """One `Scored` per row, in order; an error inside a component becomes an unscorable part with the error's text.
        A trajectory that its environment lost (``failure``) is shown to no component.
        """
        live = [i for i, row in enumerate(rows) if not row.get("failure")]
        results = {
            name: placed(live, column, [Unscorable(f"environment failed: {row.get('failure')}") for row in rows])
            for name, column in self._columns([rows[i] for i in live]).items()
        }
        scored = [
            self._combine(
                {name: column[i] for name, column in results.items()},
                rows[i].get("turns"),
                len(rows[i].get("completion_ids") or ()),
            )
            for i in range(len(rows))
        ]
        for name, column in results.items():  # every row of a batch has the same parts
            if any(isinstance(v, Verdict) and v.without is not None for v in column):
                for one, verdict in zip(scored, column):
                    one.parts[f"{name}/without"] = getattr(verdict, "without", None)
            if any(isinstance(v, Verdict) and v.spread is not None for v in column):
                for one, verdict in zip(scored, column):
                    one.parts[f"{name}/disagreement"] = getattr(verdict, "spread", None)
            for metric in dict.fromkeys(metric for v in column for metric in getattr(v, "metrics", None) or ()):
                for one, verdict in zip(scored, column):
                    one.parts[f"{name}/{metric}"] = (getattr(verdict, "metrics", None) or {}).get(metric)
        for component in (c for c in self.components if c.tier == "learned"):
            for one, verdict in zip(scored, results[component.name]):
                one.parts[f"{component.name}/confidence"] = (
                    confidence(component, verdict) if isinstance(verdict, Verdict) else None
                )
        return scored

    def _columns(self, rows) -> dict[str, list]:
        """Every component's column."""
        results = {
            c.name: self._own(c, rows) for c in self.components if not c.tier and c.kind not in READ_OTHERS
        } | self._routed(rows)
        said = [results[c.name] for c in self.components if c.name in results]
        known = [
            next((column[i].correct for column in said if getattr(column[i], "correct", None) is not None), None)
            for i in range(len(rows))
        ]
        results |= {
            c.name: self._reading(c, rows, results.get(c.votes_of), known)
            for c in self.components
            if c.kind in READ_OTHERS and c.name not in results
        }
        for c in (c for c in self.components if c.kind == "majority" or self.relative(c)):
            at = [i for i, row in enumerate(rows) if concerns(c, row["prompt_row"])]
            for i in alone([rows[i] for i in at], by_row=c.kind == "majority"):
                if isinstance(results[c.name][at[i]], Verdict):
                    results[c.name][at[i]] = Unscorable(ALONE)
        return results

    def _shown(self, component: RewardComponent, rows, score: Callable[[list, list[int]], Sequence]) -> list:
        """A component's column: ``score`` of (rows, their places). Rows of prompts that are routed to others are not
        shown to it.
        """
        at = [i for i, row in enumerate(rows) if concerns(component, row["prompt_row"])]
        return placed(at, score([rows[i] for i in at], at) if at else [], [Unscorable(ANOTHERS)] * len(rows))

    def _own(self, component: RewardComponent, rows) -> list:
        """The column of a component that reads the answers."""
        return self._shown(component, rows, lambda shown, at: RULES[component.kind](self, component, shown))

    def _reading(self, component: RewardComponent, rows, votes: list | None, known: list) -> list:
        """The column of a component that reads what the others said: of ``votes`` the weights of a majority, of
        ``known`` which answers are right.
        """

        def score(shown, at):
            if component.kind == "majority":
                return vote(component, shown, None if votes is None else [votes[i] for i in at])
            return RULES[component.kind](self, component, shown, [known[i] for i in at])

        return self._shown(component, rows, score)

    def _routed(self, rows) -> dict[str, list]:
        """Columns of the components with a tier; a row that a tier settled is not shown to the later ones (unless they
        audit it), and one of a prompt that is routed to others (``reward_route``) to none of them.
        """
        waiting, columns = list(range(len(rows))), {}
        for component in sorted((c for c in self.components if c.tier), key=lambda c: TIERS.index(c.tier)):
            column = columns[component.name] = [
                Unscorable(NOT_ASKED if concerns(component, row["prompt_row"]) else ANOTHERS) for row in rows
            ]
            asked = [i for i in waiting if concerns(component, rows[i]["prompt_row"])]
            placed(asked, RULES[component.kind](self, component, [rows[i] for i in asked]) if asked else [], column)
            left = {*waiting}
            seen = [i for i, row in enumerate(rows) if i not in left and audits(component, row["prompt_row"])]
            if seen:  # apart from those it decides, which it may compare
                said = RULES[component.kind](self, component, [rows[i] for i in seen])
                placed(seen, [Verdict(one.value) if isinstance(one, Verdict) else one for one in said], column)
            waiting = [i for i in waiting if not settles(component, column[i])]
        return columns

    def compares(self, component: RewardComponent) -> bool:
        """Whether a component's value says how an answer does beside the others of its group, and nothing where there
        are none.
        """
        return component.kind in ("majority", "length_group") or self.relative(component)

    def relative(self, component: RewardComponent) -> bool:
        """Whether a component's model says which of two answers is better."""
        return component.kind in ("model", "judge") and getattr(self.scorers.get(component.name), "relative", False)

    def preferences(self, name: str, pairs: Sequence[tuple[dict, dict]]) -> list[float]:
        """P(the first answer is better) of each pair of rows, by the component of this name, whose model compares: both
        orders averaged, NaN where it cannot be read. A cut or empty answer, which the model never sees, loses against
        one that it sees and is as good as another such."""
        component = next(c for c in self.components if c.name == name)
        shown = [tuple(shown_to(self, component, row) for row in pair) for pair in pairs]
        seen = [tuple(not isinstance(one, Verdict) for one in pair) for pair in shown]
        out = [(1.0 + a - b) / 2 for a, b in seen]
        asked = [k for k, both in enumerate(seen) if all(both)]
        for k, p in zip(asked, self.scorers[name].preferences([shown[k] for k in asked]) if asked else []):
            out[k] = float(p)
        return out

    def check_company(self, answers: int, write: str) -> None:
        """Refuse paid components that compare, where prompts get fewer than two answers; ValueError says what to
        ``write``.
        """
        for component in self.components:
            if answers < 2 and component.counts and self.compares(component):
                raise ValueError(
                    f"reward {component.name!r} ({component.kind}) compares an answer with the others to its prompt,"
                    f" and there are none; {write}, or take a reward that scores answers one by one."
                )

    def without(self, names: Collection[str]) -> "Rewards":
        """The same rewards less the components of these names."""
        return Rewards([c for c in self.components if c.name not in names], self.scorers, self.renderer)

    def total_of(self, parts: dict[str, float | None], reasons: dict[str, str] | None = None) -> Scored:
        """total and tier of component values that are known already (None = unscorable). reasons: why, by component;
        where they are not known, a component with ``domains`` is taken not to have been asked.
        """
        return self._combine(
            {
                c.name: (
                    Unscorable(
                        (ANOTHERS if c.domains else "no value") if reasons is None else reasons.get(c.name, "no value")
                    )
                    if parts.get(c.name) is None
                    else Verdict(parts[c.name])
                )
                for c in self.components
            }
        )

    def check(self, prompt_rows: Sequence[dict]) -> None:
        """Refuse prompts that a component can never score, before anything is sampled. Raises ValueError."""
        from stages.reward.debate import answers_of

        for component in self.components:
            for row in (
                row for row in prompt_rows if component.kind in ("rubric", "debate") and concerns(component, row)
            ):
                if component.kind == "rubric":
                    self.scorers[component.name].rubric.category_of(row, component.category)
                else:
                    answers_of(row)

    def _combine(self, verdicts: dict, turns: list | None = None, n_tokens: int = 0) -> Scored:
        scored = Scored(None)
        for component in self.components:
            verdict = verdicts[component.name]
            scored.items += verdict.items
            if isinstance(verdict, Unscorable):
                scored.parts[component.name] = None
                scored.reasons[component.name] = verdict.reason
                continue
            scored.parts[component.name] = verdict.value
            if verdict.feedback:
                scored.feedback = "\n\n".join(filter(None, (scored.feedback, verdict.feedback)))
            if scored.correct is None and verdict.correct is not None:
                scored.correct, scored.extracted = verdict.correct, verdict.extracted
        parts = dict(scored.parts)
        skipped = lambda c: (
            scored.reasons.get(c.name) == ANOTHERS or (scored.reasons.get(c.name) == ALONE and not c.counts)
        )
        policies = {c.name: "skip" if skipped(c) else c.missing_policy for c in self.components}
        # the tiers that the prompt is routed to
        router = sorted(
            (c for c in self.components if c.tier and scored.reasons.get(c.name) != ANOTHERS),
            key=lambda c: TIERS.index(c.tier),
        )
        decided = next((c for c in router if settles(c, verdicts[c.name])), None)
        for component in router if decided else ():
            if component is not decided:  # its value is stored, and does not count
                parts[component.name], policies[component.name] = None, "skip"
        scored.tier = decided.tier if decided else None
        weights = None if router and not decided else self._weights(parts, policies)
        if weights is None:
            return scored
        scored.weights, scored.total = weights, float(sum(w * parts[name] for name, w in weights.items()))
        if by_step := {
            name: verdicts[name].steps
            for name, weight in weights.items()
            if weight and verdicts[name].steps is not None
        }:
            from stages.reward.process_rewards import merged

            scored.step_rewards = merged(by_step, weights, n_tokens)
        if turns is not None:
            from stages.acting.agent_rewards import per_turn

            scored.turn_parts = {
                name: list(verdicts[name].turns) for name in weights if verdicts[name].turns is not None
            }
            scored.turn_rewards = per_turn(scored.total, scored.turn_parts, weights, len(turns))
        return scored

    def _weights(self, parts, policies) -> dict[str, float] | None:
        """The factor of each present component in the total; those of a blend are one term of it. None without a
        total.
        """
        weights = {
            c.name: self.multipliers.get(c.name, c.weight) if self.step is None or self.step >= c.from_step else 0.0
            for c in self.components
        }
        blended = [c.name for c in self.components if c.blend]
        if not blended:
            return present_weights(parts, weights, policies)
        inside = present_weights({name: parts[name] for name in blended}, weights, policies)
        whole = present_weights(
            {"": inside, **{name: value for name, value in parts.items() if name not in blended}},
            {"": 1.0, **weights},
            {"": "invalidate", **policies},
        )  # no component has an empty name
        return (
            None
            if whole is None
            else {
                **{name: w * whole[""] for name, w in inside.items()},
                **{name: w for name, w in whole.items() if name},
            }
        )


def concerns(component: RewardComponent, prompt_row: dict) -> bool:
    """Whether a component scores answers to a prompt: by the prompt's domain, and by its own list of kinds and names
    (reward.domain_route).
    """
    route = prompt_row.get("reward_route")
    return (not component.domains or prompt_row.get("domain") in component.domains) and (
        not route or component.kind in route or component.name in route
    )


def audits(component: RewardComponent, prompt_row: dict) -> bool:
    """Whether a tier is asked about a prompt's answers that earlier ones decided (``audit_fraction``): drawn by the
    prompt, so that all answers to it are, and tiers with the same fraction see the same prompts (reward.cascade).
    """
    if not component.audit_fraction or not concerns(component, prompt_row):
        return False
    name = prompt_row.get("prompt_id") or prompt_id(prompt_row["prompt"])
    return int(sha256_text(f"audit {name}")[:8], 16) < component.audit_fraction * 2**32


def agreement(
    answers: Iterable[tuple[Hashable, str | None, dict]], components: Sequence[RewardComponent]
) -> dict[str, tuple[float, int]]:
    """How far a later tier of a cascade orders the answers that an earlier one decided as that one does, where it audits
    them (reward.cascade): {"EARLIER_LATER": (value, pairs)} over pairs of answers to a prompt that both tell apart, 1
    for the same order, 0 for the opposite. Where one sees no difference, as a rule does between two right answers, the
    other contradicts nothing.

    Args:
        answers: (its prompt, the tier that decided, the components' values) of each.
    """
    name_of = {c.tier: c.name for c in components if c.tier}
    present, answers, out = [tier for tier in TIERS if tier in name_of], list(answers), {}
    for earlier, later in combinations(present, 2):
        values: dict = {}
        for prompt, tier, parts in answers:
            both = parts.get(name_of[earlier]), parts.get(name_of[later])
            if tier == earlier and None not in both:
                values.setdefault(prompt, []).append(both)
        sign = lambda x: (x > 0) - (x < 0)
        signs = [(sign(a[0] - b[0]), sign(a[1] - b[1])) for own in values.values() for a, b in combinations(own, 2)]
        if told := [float(x == y) for x, y in signs if x and y]:
            out[f"{earlier}_{later}"] = sum(told) / len(told), len(told)
    return out


def settles(component: RewardComponent, verdict) -> bool:
    """Whether a tier's opinion is the last word: a score, and from a reward model one that is sure enough
    (REWARD-ROUTER).
    """
    if isinstance(verdict, Unscorable):
        return False
    if component.tier != "learned":
        return True
    return confidence(component, verdict) >= component.min_confidence


def confidence(component: RewardComponent, verdict: Verdict) -> float:
    """How sure a reward model is: the probability of its own opinion, max(p, 1 - p) with p = sigmoid(score)."""
    p = (
        verdict.value
        if component.squash == "sigmoid"
        else 1.0 / (1.0 + math.exp(-max(-700.0, min(700.0, verdict.value))))
    )
    return max(p, 1.0 - p)


def present_weights(parts: dict, weights: dict[str, float], policy: dict[str, str]) -> dict[str, float] | None:
    """Weights of the parts that are present (not None); None when nothing is left, a missing part invalidates, or its
    weight has nothing to go to.

    policy: per part `skip`, `renormalise` (times sum of all weights / sum of present weights) or `invalidate`.
    """
    present = [name for name, value in parts.items() if value is not None]
    missing = [name for name in parts if name not in present]
    dropped, kept = (
        sum(weights[name] for name in missing if policy[name] == "renormalise"),
        sum(weights[name] for name in present),
    )
    if not present or any(policy[name] == "invalidate" for name in missing) or (dropped and not kept):
        return None
    scale = (kept + dropped) / kept if dropped else 1.0
    return {name: weights[name] * scale for name in present}
