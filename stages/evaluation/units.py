"""One unit of an evaluation, a chunk of prompts, choices, pairs or texts, as finished ``eval_samples/1`` rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stages.evaluation import pairs
from stages.evaluation.grading import constraint_verdicts, difficulty_of, parse_all, read_of

if TYPE_CHECKING:
    from stages.evaluation.plan import Plan


def finished(plan: Plan, kind: str, part) -> tuple[list[dict], list]:
    """The rows of a unit (``Plan.units``), and what a rubric said of each answer."""
    if kind == "prompts":
        return answers(plan, part)
    return {"choices": choice_scores, "pairs": pairs.score, "texts": text_scores}[kind](plan, part), []


def answers(plan: Plan, rows) -> tuple[list[dict], list]:
    """Sample the answers of one chunk of prompts, or take those that are given, grade and score them: finished
    ``eval_samples/1`` rows, and what a rubric said of each.
    """
    from stages.evaluation import mt_bench, refusals
    from stages.generation import score
    from stages.reward.rewards import build_rewards

    stage, config = plan.stage, plan.config
    if config.mt_bench:
        return (mt_bench.given if plan.given else mt_bench.answers)(plan, rows), []
    rewards = plan._once(
        "rewards", lambda: build_rewards(config.rewards, stage.inputs, renderer=plan.renderer, device=stage.device)
    )
    rewards.check([row for row, _ in rows])
    rewards.check_company(
        plan.answerer.fewest, "give several answers per prompt" if plan.given else "write num_samples=4"
    )
    flat = plan.answerer.drawn(rows)
    samples = [sample for _, sample, _ in flat]
    score(rewards, samples)
    model_scores = _reward(plan, samples) if stage.has("reward_model") else [None] * len(flat)
    ranks = iter(_ranks(plan, [s for mode, s, _ in flat if mode == "greedy"])) if config.token_shift else iter(())
    divergences = _kl(plan, samples) if stage.has("reference") else [None] * len(flat)
    refused = refusals.answered(plan, samples)
    refused = [
        more | (next(ranks) if config.token_shift and mode == "greedy" else {})
        for (mode, _, _), more in zip(flat, refused)
    ]
    readings = parse_all(
        [(s.prompt, read_of(s, plan.verifier)) if not s.lost else None for s in samples], plan.verifier
    )
    made = [
        _answer_row(plan, mode, sample, read, model_score, kl, more | beside)
        for (mode, sample, beside), read, model_score, kl, more in zip(
            flat, readings, model_scores, divergences, refused
        )
    ]
    return made, [sample.items for sample in samples]


def _reward(plan: Plan, samples) -> list[float | None]:
    from stages.reward.scorers import closed
    from stages.reward_models.reward_scorers import Response, same_prompt

    def whole(s) -> bool:  # a cut answer has no end, and its text would be given one
        return not s.terminated or closed(plan.renderer, {"completion_ids": s.ids, "turns": s.turns})

    scorer = plan.scorer("reward_model")
    everyone, samples = samples, [s for s in samples if not s.lost]
    as_ids = scorer.reads_ids_of(plan.renderer)
    shown = [
        Response(
            s.prompt["prompt"],
            [{"role": "assistant", "content": s.text}],
            s.prompt_ids + s.ids if as_ids and whole(s) else None,
            s.prompt,
            start=len(s.prompt_ids),
        )
        for s in samples
    ]
    # nothing to compare with (rewards.ALONE)
    alone = {of[0] for of in same_prompt(shown) if len(of) == 1} if scorer.relative else set()
    found = iter(None if value != value or k in alone else value for k, value in enumerate(scorer.score(shown)))
    return [next(found) if not s.lost else None for s in everyone]


def _kl(plan: Plan, samples) -> list[float | None]:
    """KL of each answer over the tokens that the policy chose; None where there is no answer."""
    from stages.batching import make_item
    from stages.decoding.likelihood import response_logps, sampled_kl

    items = [make_item(s.prompt["row_id"], s.prompt_ids, [s.ids], [s.action_mask]) for s in samples if not s.lost]
    sums = [
        response_logps(plan.policy(role), items, plan.config.max_tokens_per_micro_batch, plan.stage.device)
        for role in ("model", "reference")
    ]
    found = iter([sampled_kl(mine[0], theirs[0]) for mine, theirs in zip(*sums)])
    return [next(found) if not s.lost else None for s in samples]


def _ranks(plan: Plan, samples) -> list[dict]:
    """Fields of greedy answers' rows: their tokens, and the rank of each under the reference; {} of those without
    tokens.
    """
    from stages.batching import make_item
    from stages.decoding.likelihood import response_ranks

    items = [make_item(s.prompt["row_id"], s.prompt_ids, [s.ids], [[1] * len(s.ids)]) for s in samples if s.ids]
    found = iter(
        response_ranks(plan.policy("reference"), items, plan.config.max_tokens_per_micro_batch, plan.stage.device)
    )
    return [{"token_ids": list(s.ids), "base_ranks": next(found)[0]} if s.ids else {} for s in samples]


def _answer_row(plan: Plan, mode: str, sample, read: tuple, model_score, kl, more: dict) -> dict:
    from stages.evaluation import bbq, perturbed
    from stages.reward.programs import program_of
    from stages.verification.responses import view

    source = sample.prompt
    strict, flexible, extracted = read
    tokens = more.pop("tokens", None)  # of an answer that was given, where somebody counted them
    no_program = (
        plan.code is not None
        and bool(source.get("tests"))
        and sample.error is None
        and program_of(source, view(read_of(sample, plan.code), plan.code.view)) is None
    )
    extra = {
        "mode": mode,
        "finish": sample.finish_reason,
        "reward": model_score,
        "kl": kl,
        "parts": sample.parts,
        "unscorable": sample.reasons or None,
        "category": source.get("category") or source.get("domain"),
        "difficulty": difficulty_of(source),
        "prompt": source["prompt"][-1]["content"],
        "answer": source.get("answer"),
        "flexible_correct": flexible,
        "constraints": (
            constraint_verdicts(source, read_of(sample, plan.constraints), plan.constraints)
            if not sample.lost
            else None
        ),
        "reencoded": sample.reencoded or None,
        "opened": sample.opened or None,
        "forced": sample.forced,
        "error": sample.error,
        "order": source.get("order"),
        **perturbed.asked_of(source),
        **bbq.asked_of(source),
        **more,
        "nll": -sum(sample.logps) if mode == "sample" and sample.logps and sample.turns is None else None,
    }
    index = sample.index + source.get("order", 0) * (plan.config.num_samples if mode == "sample" else 1)
    if sample.turns is not None:
        from stages.acting.agents import transcript, turn_counts

        extra |= {**turn_counts(sample), "transcript": transcript(sample), "failure": sample.failure}
        if sample.debate is not None:
            from stages.reward.debate import outcome

            extra, index, extracted = extra | outcome(sample, plan.debate), 2 * index + sample.debate["seat"], None
        return plan._row(
            source,
            mode,
            index,
            sample.text,
            sum(sample.action_mask),
            extra,
            extracted=extracted,
            correct=sample.correct,
        )
    return plan._row(
        source,
        mode,
        index,
        sample.text,
        len(sample.ids) if tokens is None else tokens,
        extra,
        extracted=extracted,
        correct=strict if sample.correct is None else sample.correct,
        format_error=no_program or strict is not None and extracted is None,
    )


def choice_scores(plan: Plan, rows) -> list[dict]:
    """Read one chunk of prompts with choices by likelihood: a row per reading, its output the choice that it
    takes.
    """
    from stages.verification.choices import LETTERS
    from stages.decoding.decoders import max_positions
    from stages.evaluation import bbq, perturbed
    from stages.evaluation.multiple_choice import read

    made = []
    for row, reading, result in read(
        rows, plan.readings, plan.shots, plan.renderer, plan.logps_of, max_positions(plan.policy())
    ):
        known = {
            "mode": reading,
            "prompt": row["prompt"][-1]["content"],
            "answer": row.get("answer"),
            "category": row.get("category") or row.get("domain"),
            "difficulty": difficulty_of(row),
            "order": row.get("order"),
            **perturbed.asked_of(row),
            **bbq.asked_of(row),
        }
        choice, reason = result.pop("choice", None), result.pop("unscorable", None)
        correct, tokens = result.pop("correct", None), result.pop("tokens", 0)
        made.append(
            plan._row(
                row,
                reading,
                row.get("order", 0),
                "" if choice is None else LETTERS[choice] if reading == "letter" else row["choices"][choice],
                tokens,
                {**known, **result, "unscorable": reason and {"choices": reason}},
                correct=correct,
                extracted=None if choice is None else LETTERS[choice],
            )
        )
    return made


def text_scores(plan: Plan, rows) -> list[dict]:
    """Likelihood of one chunk of texts: a row each, without the text."""
    from stages.evaluation.held_out_text import score

    return [
        plan._row(
            row,
            "text_loss",
            0,
            "",
            found["tokens"],
            {"mode": "text_loss", "nll": found["nll"], "bytes": found["bytes"], "category": row.get("domain")},
        )
        for row, found in zip(rows, score(rows, plan.renderer, plan.logps_of, plan.config.max_length))
    ]
