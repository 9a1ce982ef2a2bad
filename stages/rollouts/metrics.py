"""What people who debug RL look at, of one iteration's completions: rewards, lengths, advantages, staleness, the engine
against the trainer.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from stages.estimators import is_constant, reward_to_go, td_errors
from stages.evaluation.refusals import classify
from stages.generation import Sample
from stages.measures.statistics import pairwise_accuracy
from stages.measures.text import phrase_rates, reflection_counts, repetition_n, scripts, special_character_rate
from stages.policy.credit import Batch, Credit, explained_variance
from stages.reward.rewards import agreement
from stages.reward.verdicts import failures
from stages.verification.responses import view


def rollout_metrics(samples: Sequence[Sample], rewards, group_of, std_ddof: int = 1) -> dict[str, float]:
    """Rewards by component, lengths, truncation, groups without signal. ``rewards [B]``: NaN = unscorable; ``group_of
    [B]``: group number. ``std_ddof``: of the groups' stds in ``reward_std``, that of the run's advantages (TRL's
    ``reward_std`` too is the sample std); 0 for a group of one. What an environment lost says nothing of the policy's
    completions: it counts as unscorable, and among the generated tokens. SFT answers, which nobody sampled, are in what is
    said of whole groups, and their mean reward is ``members/sft_reward``."""
    out = _group_metrics(samples, rewards, group_of, std_ddof)
    sampled = np.array([s.mode != "sft" for s in samples], bool)
    if not sampled.all():
        given = rewards[~sampled & np.isfinite(rewards)]
        out |= {"members/sft_reward": float(given.mean())} if given.size else {}
        samples, rewards = [s for s, on in zip(samples, sampled) if on], rewards[sampled]
        if not samples:
            return out
    ok = np.isfinite(rewards)
    out |= {
        "reward/unscorable_fraction": float((~ok).mean()),
        "completions/generated_tokens": float(sum(sum(s.action_mask) for s in samples)),
        **completion_metrics([s for s in samples if not s.lost]),
    }
    if ok.any():
        out["reward"] = float(rewards[ok].mean())
    totals = [s.total for s in samples if np.isfinite(s.total)]
    if totals:
        out["reward/raw"] = float(np.mean(totals))
    for tier in sorted({s.tier for s in samples if s.tier}):
        own = [s.total for s in samples if s.tier == tier and np.isfinite(s.total)]
        out |= {
            f"reward/tier_{tier}": float(np.mean([s.tier == tier for s in samples])),
            **({f"reward/tier_{tier}_mean": float(np.mean(own))} if own else {}),
        }
    failed = [failures(s.parts, s.reasons) for s in samples]
    out |= {
        f"reward/{name}/unscorable_fraction": float(np.mean([name in one for one in failed]))
        for name in samples[0].parts
        if "/" not in name
    }
    # a function's metrics may be those of some answers only
    for name in dict.fromkeys(name for s in samples for name in s.parts):
        values = [s.parts[name] for s in samples if s.parts.get(name) is not None]
        if values:
            out[f"reward/{name}"] = float(np.mean(values))
            if "/" not in name:
                out[f"reward/{name}/std"] = float(np.std(values))
                longer = [len(s.ids) for s in samples if s.parts.get(name) is not None]
                if not is_constant(values) and not is_constant(longer):
                    out[f"reward/{name}/length_correlation"] = float(np.corrcoef(values, longer)[0, 1])
    verdicts = [s.correct for s in samples if s.correct is not None]
    if verdicts:
        out["completions/correct_fraction"] = float(np.mean(verdicts))
        for name, wanted in (("correct", True), ("incorrect", False)):
            chosen = [len(s.ids) for s in samples if s.correct is wanted]
            if chosen:
                out[f"completions/mean_{name}_length"] = float(np.mean(chosen))
    return out


def _group_metrics(samples: Sequence[Sample], rewards, group_of, std_ddof: int) -> dict[str, float]:
    """How far the members of a group differ in reward and verdict; one reward or verdict alone is compared with
    none.
    """
    ok, out = np.isfinite(rewards), {}
    by_group = [r for g in np.unique(group_of) if len(r := rewards[(group_of == g) & ok])]
    if by_group:
        out["reward_std"] = float(np.mean([np.std(r, ddof=min(std_ddof, len(r) - 1)) for r in by_group]))
    if compared := [is_constant(r) for r in by_group if len(r) > 1]:
        out["frac_reward_zero_std"] = float(np.mean(compared))
    verdicts = [
        [s.correct for s, of in zip(samples, group_of) if of == g and s.correct is not None]
        for g in np.unique(group_of)
    ]
    if compared := [v for v in verdicts if len(v) > 1]:
        out |= {
            "groups/all_correct_fraction": float(np.mean([all(v) for v in compared])),
            "groups/all_wrong_fraction": float(np.mean([not any(v) for v in compared])),
        }
    return out


def completion_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Lengths, cuts and signs of a policy that comes apart, of completions that were not lost; {} of none."""
    if not samples:
        return {}
    lengths = np.array([len(s.ids) for s in samples], float)
    ended = np.array([s.terminated for s in samples])
    out = {
        "completions/mean_length": float(lengths.mean()),
        "completions/min_length": float(lengths.min()),
        "completions/max_length": float(lengths.max()),
        "completions/clipped_ratio": float((~ended).mean()),
        "completions/empty_fraction": float(np.mean([not s.text.strip() for s in samples])),
        "completions/repetition": float(
            np.mean([repetition_n([t for t, own in zip(s.ids, s.action_mask) if own], 3) or 0.0 for s in samples])
        ),
        "completions/reflection": reflection_counts([s.text for s in samples])["share_with_any"],
        "completions/special_characters": float(np.mean([special_character_rate(s.text) for s in samples])),
        "completions/stock_phrases": phrase_rates([s.text for s in samples])["rate"],
        "completions/refusals": float(
            np.mean([classify(view(s.text, "answer_only")) in ("full", "partial") for s in samples])
        ),
        "completions/language_switch": float(
            np.mean(
                [
                    bool(scripts(s.text) - scripts("".join(m.get("content") or "" for m in s.prompt.get("prompt", ()))))
                    for s in samples
                ]
            )
        ),
    }
    if all(s.turns is None for s in samples):  # of turns each has an end of its own
        out["completions/eos_missing_fraction"] = float(np.mean([s.finish_reason != "eos" for s in samples]))
    if ended.any():
        out |= {
            f"completions/{name}_terminated_length": float(of(lengths[ended]))
            for name, of in (("mean", np.mean), ("min", np.min), ("max", np.max))
        }
    return out


def scorer_accuracy(samples: Sequence[Sample], group_of, components) -> dict[str, float]:
    """How often each reward model scores the better of two completions of a prompt higher, ties half: of a right and a
    wrong one where there are verdicts, else of two that the model of the input ``gold`` scores apart (F.2, drift). Of
    completions with an end, which a model is shown; nothing where no pair differs."""
    learned = [c for c in components if c.learned]
    gold = next((c.name for c in learned if c.input == "gold"), None)
    label = {i: float(s.correct) for i, s in enumerate(samples) if s.correct is not None}
    by = None if label else gold
    label = label or {i: s.parts[gold] for i, s in enumerate(samples) if gold and s.parts.get(gold) is not None}
    members: dict = {}
    for i in label:
        if samples[i].terminated:
            members.setdefault(group_of[i], []).append(i)
    pairs = [(a, b) for own in members.values() for a in own for b in own if label[a] > label[b]]
    out = {}
    for name in (c.name for c in learned if c.name != by):
        both = [
            (samples[a].parts[name], samples[b].parts[name])
            for a, b in pairs
            if samples[a].parts.get(name) is not None and samples[b].parts.get(name) is not None
        ]
        if both:
            out[f"reward/{name}/pair_accuracy"] = pairwise_accuracy(*zip(*both))["half_credit"]
    return out


def tier_agreement(samples: Sequence[Sample], group_of, components) -> dict[str, float]:
    """:func:`stages.reward.rewards.agreement` of these completions, within their groups."""
    found = agreement(((group, s.tier, s.parts) for s, group in zip(samples, group_of)), components)
    return {f"reward/tier_agreement/{name}": value for name, (value, _) in found.items()}


def cut_gain(samples: Sequence[Sample], rewards, kept) -> dict[str, float]:
    """How much more a completion without end earned than one with an end, in the mean, where both are trained on;
    ``rewards [B]``: NaN = unscorable, ``kept [B]``: trained on.
    """
    ended, counted = np.array([s.terminated for s in samples], bool), np.isfinite(rewards) & kept
    cut, whole = rewards[counted & ~ended], rewards[counted & ended]
    return {"reward/cut_gain": float(cut.mean() - whole.mean())} if len(cut) and len(whole) else {}


def step_metrics(batch: Batch) -> dict[str, float]:
    """Mean reward of the counted steps, and the share of groups whose steps all earned the same, which is what teaches
    nothing where steps are paid (GRPO-PROCESS); of groups with two counted steps or more.
    """
    groups = [
        [r for i in np.flatnonzero((batch.group_of_B == g) & batch.counted_B) for r in batch.steps[i][1]]
        for g in np.unique(batch.group_of_B)
    ]
    everyone = [r for rewards in groups for r in rewards]
    compared = [is_constant(rewards) for rewards in groups if len(rewards) > 1]
    return {
        **({"frac_reward_zero_std": float(np.mean(compared))} if compared else {}),
        **({"reward/step_mean": float(np.mean(everyone))} if everyone else {}),
    }


def credit_metrics(
    batch: Batch, credit: Credit, trained_B, kl_reward_coef: float, kl_coef: float, gamma: float = 1.0
) -> dict[str, float]:
    """Advantages over the trained tokens, groups with a signal, the KL coefficients, and how much of the returns the
    critic explains.
    """
    on = batch.trained(trained_B)
    flat = credit.advantages_BT[on]
    out = {
        "advantage/std": float(flat.std()) if flat.size else 0.0,
        "groups/informative_fraction": float(
            np.mean([credit.informative_B[batch.group_of_B == g].any() for g in np.unique(batch.group_of_B)])
        ),
        "groups/trained_sequences": float(trained_B.sum()),
        "groups/trained_tokens": float(on.sum()),
    }
    if flat.size:
        raw = credit.raw_BT[on]
        out |= {
            "advantage/mean": float(flat.mean()),
            "advantage/positive_fraction": float((flat > 0).mean()),
            "advantage/zero_fraction": float((flat == 0).mean()),
            "advantage/min": float(flat.min()),
            "advantage/max": float(flat.max()),
            "advantage/mean_raw": float(raw.mean()),
            "advantage/std_raw": float(raw.std()),
            "advantage/min_raw": float(raw.min()),
            "advantage/max_raw": float(raw.max()),
        }
    if kl_reward_coef:
        out |= {
            "kl/reward_coef": kl_reward_coef,
            "reward/shaped": float(credit.rewards_B[batch.counted_B].mean()) if batch.counted_B.any() else 0.0,
        }
    if kl_coef:
        out["kl/coef"] = kl_coef
    if batch.values_BT is not None:
        explained = explained_variance(batch.values_BT, credit.returns_BT, on)
        out |= {} if explained is None else {"critic/explained_variance": explained}
        if on.any():
            delta = td_errors(credit.token_rewards_BT, batch.values_BT, batch.mask_BT, batch.bootstrap_B, gamma)
            out |= {
                "critic/td_error": float(np.abs(delta[on]).mean()),
                "critic/value_mean_old": float(batch.values_BT[on].mean()),
                "critic/return_mean_old": float(credit.returns_BT[on].mean()),
            }
    return out


def return_metrics(batch: Batch, credit: Credit, trained_B, gamma: float) -> dict[str, float]:
    """Mean and spread of the returns G_t at the trained tokens, KL penalties taken off (RETURN)."""
    returns = reward_to_go(credit.token_rewards_BT, batch.mask_BT, gamma)[batch.trained(trained_B)]
    return {"return/mean": float(returns.mean()), "return/std": float(returns.std())} if returns.size else {}


def weight_metrics(weights_BT, on_BT, mode: str, clip_max: float, clip_min: float = 0.0) -> dict[str, float]:
    """Importance weights of the trained tokens: mean, share that was cut to ``clip_max``, raised to ``clip_min`` (0 = no
    bound) or set to 0, effective sample size as a share of the tokens (TIS).
    """
    w = np.asarray(weights_BT, float)[on_BT]
    if not w.size:
        return {}
    cut = (w >= clip_max) | (0 < clip_min) & (w <= clip_min) if mode.endswith("truncate") else w == 0
    return {
        "sampling/importance_weight/mean": float(w.mean()),
        "sampling/importance_weight/cut_fraction": float(cut.mean()),
        "sampling/importance_weight/ess_fraction": (
            float(w.sum() ** 2 / (w.size * np.square(w).sum())) if w.any() else 0.0
        ),
    }


def off_policy_metrics(versions: Sequence[int], version: int, sampled, old, own) -> dict[str, float]:
    """How old the policies are that sampled (optimizer steps; -1 = of another run), and how far their log-probs are
    from the current policy's in the mean over a completion's tokens that the policy chose, which ``own`` has a 1 for.
    """
    late = [version - v for v in versions if v >= 0]
    out = {"staleness/mean": float(np.mean(late)), "staleness/max": float(max(late))} if late else {}
    # None: of an engine that gives none
    apart = (
        [
            abs(np.mean(np.subtract(a, b)[np.array(mask, bool)]))
            for a, b, mask in zip(old, sampled, own)
            if any(mask) and b is not None
        ]
        if old is not sampled
        else []
    )
    if apart:
        out["sampling/logp_difference"] = float(np.mean(apart))
    return out


def mismatch_metrics(samples: Sequence[Sample], old) -> dict[str, float]:
    """How far the engine's log-probs are from the trainer's on the tokens just sampled (TIS): differences, ratios,
    KL(engine || trainer).
    """
    apart = [
        np.subtract(o, s.logps)[np.array(s.action_mask, bool)]
        for s, o in zip(samples, old)
        if any(s.action_mask) and not s.off_policy
    ]
    if not apart:
        return {}
    d = np.concatenate(apart).clip(-20, 20)
    return {
        "sampling/sampling_logp_difference/mean": float(np.abs(d).mean()),
        "sampling/sampling_logp_difference/max": float(np.abs(d).max()),
        "sampling/mismatch_kl": float((np.expm1(d) - d).mean()),
        **{
            f"sampling/importance_sampling_ratio/{name}": float(of(np.exp(d)))
            for name, of in (("mean", np.mean), ("min", np.min), ("max", np.max))
        },
    }
