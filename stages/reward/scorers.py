"""How each kind of component scores rows: `scorer(rewards, component, rows)` gives a Verdict or Unscorable per row."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from stages.acting.environments import GOAL
from stages.reward.components import ON_TURNS, RewardComponent
from stages.reward.programs import columns_of, in_groups, limits_of, score_code, score_python, score_regex
from stages.reward.verdicts import Unscorable, Verdict, text_read, value_of

if TYPE_CHECKING:
    from stages.reward.rewards import Rewards


def _verify(rewards: Rewards, component: RewardComponent, rows) -> list:
    from stages.verification.golds import BadGold
    from stages.verification.verifiers import SHARES, VERIFIERS, verifier_of

    def one(row):
        try:
            name = verifier_of(row["prompt_row"]) if component.verifier == "auto" else component.verifier
            correct, extracted = VERIFIERS[name](
                row["prompt_row"], text_read(component, row), component.extraction == "flexible", component.rel_tol
            )
            if name in SHARES:
                share = SHARES[name](row["prompt_row"], text_read(component, row))
                return Verdict(
                    component.incorrect_value + share * (component.correct_value - component.incorrect_value),
                    correct,
                    extracted,
                )
        except BadGold as error:
            return Unscorable(str(error))
        return Verdict(component.correct_value if correct else component.incorrect_value, correct, extracted)

    out = [one(row) for row in rows]
    if not component.symbolic:
        return out
    proved = symbolically(
        component,
        [
            (row["prompt_row"], v.extracted if isinstance(v, Verdict) and not v.correct else None)
            for row, v in zip(rows, out)
        ],
    )
    out = [replace(v, value=component.correct_value, correct=True) if known else v for v, known in zip(out, proved)]
    return [
        replace(v, metrics={"undecided": float(known is None)}) if isinstance(v, Verdict) else v
        for v, known in zip(out, proved)
    ]


def symbolically(component: RewardComponent, answers: Sequence[tuple[dict, str | None]]) -> list[bool | None]:
    """Whether each answer (None: not asked) to a prompt row of mathematics is provably its gold answer; None where the
    limits of the component ended the comparison.
    """
    from stages.verification.equality import equal_symbolically
    from stages.verification.golds import math_gold
    from stages.verification.verifiers import verifier_of

    of_maths = lambda row: (verifier_of(row) if component.verifier == "auto" else component.verifier) == "math"
    asked = {
        i: (answer, math_gold(row)) for i, (row, answer) in enumerate(answers) if answer is not None and of_maths(row)
    }
    found = dict(zip(asked, equal_symbolically(list(asked.values()), limits_of(component))))
    return [found.get(i, False) for i in range(len(answers))]


def shown_to(rewards: Rewards, component: RewardComponent, row: dict, as_ids: bool = False):
    """What a reward model is shown of a row (``stages.reward_models.reward_scorers.Response``), or the verdict on a row
    that it never sees.
    """
    from stages.reward_models.reward_scorers import Response

    if not ended(row):
        return Verdict(component.cut_reward)
    if not row["completion_text"].strip():
        return Verdict(component.empty_reward)
    if not text_read(component, row).strip():  # a thought that never ends has no answer: scored as cut (reward.view)
        return Verdict(component.cut_reward)
    as_ids = as_ids and closed(rewards.renderer, row)
    before = list(_prompt_ids(rewards, row)) if as_ids else []
    return Response(
        row["prompt_row"].get("prompt") or [],
        [{"role": "assistant", "content": text_read(component, row)}],
        before + list(row["completion_ids"]) if as_ids else None,
        row["prompt_row"],
        row.get("group"),
        len(before),
    )


def closed(renderer, row: dict) -> bool:
    """Whether a completion's ids end as the answers do that a reward model has learned from: with the template's end of
    a turn. One that a stop string or another stop token ended does not, and is read as its text with that end; of a
    trajectory there is no such text.
    """
    end = getattr(renderer, "turn_end_id", None)
    return end is None or bool(row.get("turns")) or list(row["completion_ids"])[-1:] == [end]


def _model(rewards: Rewards, component: RewardComponent, rows) -> list:
    """Verdict of a reward model. Its own template renders the text, unless it reads exactly the policy's token ids."""
    scorer = rewards.scorers[component.name]
    if component.step_credit != "none":
        return _steps(rewards, component, rows)
    as_ids = component.view == "full" and scorer.reads_ids_of(rewards.renderer)
    out = [shown_to(rewards, component, row, as_ids) for row in rows]
    positions = [i for i, shown in enumerate(out) if not isinstance(shown, Verdict)]
    responses = [out[i] for i in positions]
    scores = scorer.score(responses) if responses else []
    spread = scorer.disagreement if responses else None
    for k, (i, score) in enumerate(zip(positions, _scaled(component, scores))):
        verdict = Unscorable(scorer.why_not) if math.isnan(score) else value_of(float(score))
        if isinstance(verdict, Verdict):
            beside = {name: v[k] for name, v in scorer.beside.items() if v[k] is not None and not math.isnan(v[k])}
            verdict = replace(verdict, spread=spread[k] if spread else None, metrics=beside or None)
        out[i] = verdict
    return out


def _steps(rewards: Rewards, component: RewardComponent, rows) -> list:
    """Verdicts of a process reward model whose steps are paid: the sum of their credits, and each at the last token of
    its step. Of a cut response its finished steps are scored.
    """
    from stages.reward.process_rewards import finished_steps, step_credits, step_ends, token_pieces
    from stages.reward_models.reward_scorers import Response, split_steps

    scorer, out, texts = rewards.scorers[component.name], [], {}
    separator = scorer.card.options["separator"]
    for i, row in enumerate(rows):
        text = row["completion_text"] if ended(row) else finished_steps(row["completion_text"], separator)
        out.append(
            Verdict(component.empty_reward if ended(row) else component.cut_reward, steps=(), metrics={"steps": 0.0})
        )
        if split_steps(text, separator):
            texts[i] = text
    asked = [
        Response(
            rows[i]["prompt_row"].get("prompt") or [],
            [{"role": "assistant", "content": text}],
            row=rows[i]["prompt_row"],
        )
        for i, text in texts.items()
    ]
    for (i, text), scores in zip(texts.items(), scorer.step_probabilities(asked) if asked else []):
        row, whole, n = rows[i], ended(rows[i]), len(split_steps(text, separator))
        if len(scores) != n:
            out[i] = Unscorable(
                f"the process reward model has room for {len(scores)} of its {n} steps; train it with a longer"
                " max_length, or write a smaller max_completion_length"
            )
            continue
        # tokens behind the text, of a stop string or an unfinished step, are no step of it
        ends = (
            step_ends(token_pieces(rewards.renderer, row["completion_ids"]), separator)[:n]
            if rewards.renderer is not None
            else []
        )
        if len(ends) != n:
            out[i] = Unscorable(
                "its steps cannot be found among its tokens"
                if rewards.renderer is not None
                else "steps are paid at tokens of a policy, and there is none"
            )
            continue
        if whole:  # what follows the last separator, an end token, ends its step
            ends[-1] = len(row["completion_ids"]) - 1
        credits = step_credits(scores, component.step_credit, component.clip)
        out[i] = Verdict(
            sum(credits) + (0.0 if whole else component.cut_reward),
            steps=tuple(zip(ends, credits)),
            metrics={
                "steps": float(len(scores)),
                "step_mean": float(sum(scores) / len(scores)),
                "step_min": float(min(scores)),
            },
        )
    return out


def _scaled(component: RewardComponent, scores: Sequence[float]) -> list[float]:
    """A model's scores as the component counts them: whitened, clipped, squashed; NaN (no score) stays, and is in no
    statistic.
    """
    from stages.estimators import normalise_rewards

    scores = normalise_rewards(scores, "whiten").tolist() if component.normalise == "batch" else scores
    scores = [
        max(-component.clip, min(component.clip, score)) if component.clip and math.isfinite(score) else score
        for score in scores
    ]
    return [
        1.0 / (1.0 + math.exp(-max(score, -700.0))) if component.squash == "sigmoid" and math.isfinite(score) else score
        for score in scores
    ]


def _remote(rewards: Rewards, component: RewardComponent, rows) -> list:
    """Verdicts of a reward server; what it gives no number for is unscorable and says why."""
    from stages.reward.remote_rewards import Answer, RewardServer

    def answer(row):
        text, columns = text_read(component, row), columns_of(row["prompt_row"])
        query = prompt = ""
        if component.request_form == "openrlhf":
            if rewards.renderer is None:
                raise ValueError(
                    f"reward {component.name!r}: request_form=openrlhf shows texts with the policy's template, which"
                    " needs a model; write request_form=messages"
                )
            ids = list(_prompt_ids(rewards, row))
            prompt = rewards.renderer.decode(ids, skip_special_tokens=False)
            query = (
                rewards.renderer.decode(ids + list(row["completion_ids"]), skip_special_tokens=False)
                if component.view == "full"
                else prompt + text
            )
        return Answer(
            [*(columns.get("prompt") or []), {"role": "assistant", "content": text}],
            columns,
            row.get("finish_reason"),
            query,
            prompt,
        )

    if component.name not in rewards.scorers:  # one of all calls: it knows whether it ever answered
        rewards.scorers[component.name] = RewardServer(
            component.url,
            component.endpoint_model,
            component.request_form,
            component.score_key,
            component.batch_size,
            component.concurrency,
            component.timeout_s,
            component.key_variable,
        )
    server = rewards.scorers[component.name]
    asked = [i for i, row in enumerate(rows) if component.no_eos_reward is None or ended(row)]
    found = dict(zip(asked, server.scores([answer(rows[i]) for i in asked])))
    scores = (
        dict(zip(asked, _scaled(component, [math.nan if isinstance(found[i], str) else found[i] for i in asked])))
        if asked
        else {}
    )
    return [
        (
            Verdict(component.no_eos_reward)
            if i not in found
            else Unscorable(found[i])
            if isinstance(found[i], str)
            else value_of(float(scores[i]))
        )
        for i in range(len(rows))
    ]


def alone(rows, by_row: bool = False) -> list[int]:
    """Positions of the rows that nothing can be compared with. ``by_row``: rows without a group are those of one prompt
    row, else of one prompt's messages.
    """
    of = (
        (lambda row: row["prompt_row"]["row_id"])
        if by_row
        else (lambda row: json.dumps(row["prompt_row"].get("prompt"), sort_keys=True, default=str))
    )
    return [members[0] for members in in_groups(rows, of) if len(members) == 1]


def vote(component: RewardComponent, rows, weights: list | None = None) -> list:
    """1 for rows whose extracted answer is the majority's among the rows of the same group, else 0; no answer, no vote
    (``rs.majority``, self-consistency).

    weights: verdicts of the component that ``votes_of`` names; a row that it cannot score does not vote.
    """
    from stages.selection import majority
    from stages.verification.equality import classes
    from stages.verification.extraction import FLEXIBLE_ORDER, STRICT_ORDER, extract

    order = FLEXIBLE_ORDER if component.extraction == "flexible" else STRICT_ORDER
    answers = [extract(text_read(component, row), order) for row in rows]
    out: list = [None] * len(rows)
    for members in in_groups(rows, lambda row: row["prompt_row"]["row_id"]):
        counted = [1.0 if weights is None else getattr(weights[i], "value", None) for i in members]
        if any(w is not None and w < 0 for w in counted):
            raise ValueError(
                f"reward {component.name!r}: votes_of={component.votes_of} gives negative votes; write squash=sigmoid"
                " for that component, or leave votes_of out"
            )
        said = classes([answers[i] for i in members])
        winner, _ = majority([None if w is None else one for one, w in zip(said, counted)], [w or 0.0 for w in counted])
        for i, one in zip(members, said):
            out[i] = Verdict(float(winner is not None and one == winner), None, answers[i])
    return out


def _icdpo(rewards: Rewards, component: RewardComponent, rows) -> list:
    """Verdict of the in-context scorer, on exactly the policy's token ids."""
    scores = rewards.scorers[component.name].score([{**row, "prompt_ids": _prompt_ids(rewards, row)} for row in rows])
    return [
        (
            Unscorable("an empty answer, or no demonstration fits demonstration_length")
            if score is None
            else value_of(score)
        )
        for score in scores
    ]


def _prompt_ids(rewards: Rewards, row: dict):
    if row.get("prompt_ids") is not None:
        return row["prompt_ids"]
    if rewards.renderer is None:
        raise ValueError("rows without prompt_ids need a renderer; pass renderer= to build_rewards")
    return rewards.renderer.prompt_ids(row["prompt_row"]["prompt"])


def ended(row: dict) -> bool:
    """Whether the response is finished: an end token, a stop string, or the goal of an environment; not cut."""
    return row.get("finish_reason") in ("eos", "stop", "goal")


def _format(rewards, component, rows) -> list:
    from stages.verification.responses import format_reward

    return [
        Verdict(format_reward(text_read(component, row), component.preset, prefilled=component.prefilled))
        for row in rows
    ]


def _length(rewards, component, rows) -> list:
    from stages.verification.rule_rewards import soft_overlong

    # A response cut at the cap has no end token of its own, and counts as having reached the cap
    # (reward.length_soft_overlong).
    return [
        Verdict(soft_overlong(len(row["completion_ids"]), component.max_length, component.cache_length)) for row in rows
    ]


def _is_right(rewards, component, rows, known) -> list[bool]:
    """Whether each answer is right, for length rewards: what the other components say (``known``, None = nothing), else
    the environment, else a verifier of its own; an answer without any verdict counts as wrong."""
    verdicts = _verify(rewards, component, rows) if known is None or None in known else known
    return [
        (
            k
            if k is not None
            else (
                any(GOAL in t["events"] for t in row["turns"])
                if row.get("turns") is not None
                else bool(getattr(v, "correct", False))
            )
        )
        for row, v, k in zip(rows, verdicts, known or [None] * len(rows))
    ]


def _length_group(rewards, component, rows, known=None) -> list:
    """Kimi's length reward inside each prompt's group, before any normalisation (LENGTH-CTRL)."""
    from stages.verification.rule_rewards import kimi_length

    out, right = [None] * len(rows), _is_right(rewards, component, rows, known)
    for members in in_groups(
        rows, lambda row: (row["prompt_row"].get("prompt_id"), tuple(row.get("prompt_ids") or ()))
    ):
        for i, value in zip(
            members, kimi_length([len(rows[i]["completion_ids"]) for i in members], [right[i] for i in members])
        ):
            out[i] = Verdict(value)
    return out


def _length_target(rewards, component, rows, known=None) -> list:
    """L1's reward for the length that a prompt row asks for (LENGTH-CTRL)."""
    from stages.verification.rule_rewards import target_length

    def one(row, right):
        target = json.loads(row["prompt_row"].get("extra_json") or "{}").get("target_length")
        if not isinstance(target, (int, float)):
            return Unscorable('the prompt row asks for no length; write extra_json={"target_length": 200}')
        return Verdict(
            target_length(
                len(row["completion_ids"]),
                int(target),
                right,
                component.length_mode,
                component.length_alpha,
                component.length_delta,
            )
        )

    return [one(row, right) for row, right in zip(rows, _is_right(rewards, component, rows, known))]


def _length_penalty(rewards, component, rows) -> list:
    """A constant price of every token (LENGTH-CTRL)."""
    return [Verdict(-component.length_alpha * len(row["completion_ids"])) for row in rows]


def _language(rewards, component, rows) -> list:
    from stages.verification.languages import SCRIPTS, language_of, language_share

    def one(row):
        scripts = language_of(row["prompt_row"])
        if scripts is None:
            named = row["prompt_row"].get("language")
            return Unscorable(
                f"the language {named!r} is none of {', '.join(SCRIPTS)}"
                if named
                else "the prompt has no letters; write its language into the column language"
            )
        return Verdict(language_share(text_read(component, row), scripts, component.language_unit))

    return [one(row) for row in rows]


def _truncation(rewards, component, rows) -> list:
    return [Verdict(0.0 if ended(row) else -component.missing_eos_penalty) for row in rows]


def _constraints(rewards, component, rows) -> list:
    from stages.verification.constraints import check_constraint
    from stages.verification.golds import BadGold
    from stages.verification.rule_rewards import constraint_reward

    def one(row):
        constraints = row["prompt_row"].get("constraints") or []
        try:
            satisfied = [
                check_constraint(c["id"], json.loads(c["kwargs_json"] or "{}"), text_read(component, row))
                for c in constraints
            ]
        except (BadGold, ValueError) as error:
            return Unscorable(str(error))
        value = constraint_reward(satisfied, component.mode, component.threshold)
        return Unscorable("the prompt row has no constraints") if value is None else Verdict(value, all(satisfied))

    return [one(row) for row in rows]


def _rubric(rewards, component, rows) -> list:
    return rewards.scorers[component.name].score(rows)


def _on_turns(rewards, component, rows) -> list:
    """Components of trajectories: a number per turn from the environment's rewards or events."""
    from stages.acting import agent_rewards as of

    def one(row):
        turns = row.get("turns")
        if turns is None:
            return Unscorable(
                f"reward {component.name!r} scores trajectories in an environment; write environment=NAME, or take"
                " it out"
            )
        events = [t["events"] for t in turns]
        if component.kind == "environment":
            values, verdict = [t["reward"] for t in turns], any(GOAL in e for e in events)
        elif component.kind == "milestones":
            values, verdict = of.milestone_rewards(events, milestones), None
        else:
            values, verdict = (
                of.step_rewards(
                    events, component.step_weights or of.STEP_WEIGHTS, {**of.STEP_EVENTS, **component.step_events}
                ),
                None,
            )
        return Verdict(float(sum(values)), verdict, turns=tuple(values))

    milestones = component.milestones or of.milestones_of()
    if component.milestone_normalise == "category_sum":
        sums: dict[str, float] = {}
        for name, value in milestones.items():
            sums[name.split(".")[0]] = sums.get(name.split(".")[0], 0.0) + value
        milestones = {name: value / (sums[name.split(".")[0]] or 1.0) for name, value in milestones.items()}
    return [one(row) for row in rows]


def _debate(rewards, component, rows) -> list:
    """Zero-sum: the judge's probability of a debater's own answer, less 1/2 (DEBATE)."""
    from stages.reward.debate import verdicts

    if any(row.get("debate") is None for row in rows):
        return [
            Unscorable(f"reward {component.name!r} judges debates; write environment=debate, or take it out")
        ] * len(rows)
    judge = rewards.scorers[component.name]
    return [
        Unscorable(judge.why_not) if math.isnan(p) else Verdict(p - 0.5, without=None if math.isnan(q) else q - 0.5)
        for p, q in zip(*verdicts(judge, rows))
    ]


RULES = {
    "length_group": _length_group,
    "length_target": _length_target,
    "length_penalty": _length_penalty,
    "language": _language,
    "verifier": _verify,
    "model": _model,
    "judge": _model,
    "remote": _remote,
    "format": _format,
    "length": _length,
    "truncation": _truncation,
    "regex": score_regex,
    "constraints": _constraints,
    "code": score_code,
    "python": score_python,
    "rubric": _rubric,
    "group_preference": _model,
    "icdpo": _icdpo,
    **dict.fromkeys(ON_TURNS, _on_turns),
    "debate": _debate,
}
