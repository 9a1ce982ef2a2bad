"""What people who debug RL look at, as named warnings that say what to do.

:func:`alarms` is a pure function of the metrics logged so far: an alarm is a row of :data:`ALARMS`, a condition on the
run's history and a text. The rl stage asks after every step and warns the first time that an alarm goes off. Thresholds
are the catalogue's.

A *level* is the mean over the last quarter of the points, at least three and at most twenty: one bad step is not an
alarm.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev

from stages.measures.overopt import divergence


class History:
    """Metric rows ``[{"step": 3, "reward": 0.2, ...}, ...]`` in the order of their steps; ``target_kl`` as
    configured, in ``kl_unit``.
    """

    def __init__(self, rows: Sequence[dict], target_kl: float | None = None, kl_unit: str = "sequence_sum"):
        self.rows, self.target_kl, self.kl_unit = rows, target_kl, kl_unit

    def values(self, name: str) -> list[float]:
        return [float(row[name]) for row in self.rows if row.get(name) is not None and math.isfinite(row[name])]

    def level(self, name: str) -> float | None:
        """Mean of the newest points; None before there are three."""
        found = self.values(name)
        return fmean(found[-min(20, max(3, len(found) // 4)) :]) if len(found) >= 3 else None

    def start(self, name: str) -> float | None:
        found = self.values(name)
        return fmean(found[:3]) if len(found) >= 3 else None

    def above(self, name: str, limit: float) -> bool:
        level = self.level(name)
        return level is not None and level > limit

    def grew(self, name: str, factor: float, points: int = 8) -> bool:
        """Whether the level is over ``factor`` times the start, once there are ``points`` points."""
        return (
            len(self.values(name)) >= points and self.start(name) > 0 and self.level(name) > factor * self.start(name)
        )

    def doubled(self, name: str, least: float, points: int = 8) -> bool:
        """Whether the level of a rate is over twice its start, which may be 0, and over ``least``, once there are
        ``points`` points.
        """
        return len(self.values(name)) >= points and self.level(name) > max(least, 2.0 * self.start(name))

    def gain(self, name: str) -> float:
        return (self.level(name) or 0.0) - (self.start(name) or 0.0)


#: Agreement of two tiers of a cascade below which they disagree (ours; chance is 0.5).
AGREE = 0.7


def _collapsed(h: History) -> bool:
    """The reward is more than three standard deviations below its mean so far (late collapse)."""
    found = h.values("reward")
    if len(found) < 13:
        return False
    before, now = found[:-3], fmean(found[-3:])
    return now < fmean(before) - 3 * pstdev(before) and pstdev(before) > 0


def _drifted(h: History) -> bool:
    """A reward model's pairwise accuracy on the policy's own answers is more than 5 points below what it was (F.2), and
    by more than two standard errors of the two means.
    """
    for name in sorted({name for row in h.rows for name in row if accuracy_of(name)}):
        found = h.values(name)
        n = min(20, max(5, len(found) // 4))
        if len(found) < 20:
            continue
        before, now = found[:n], found[-n:]
        noise = ((pstdev(before) ** 2 + pstdev(now) ** 2) / n) ** 0.5
        if fmean(before) - fmean(now) > max(0.05, 2 * noise):
            return True
    return False


def _tiers_disagree(h: History) -> bool:
    """A later tier of a cascade orders audited completions of a prompt otherwise than the tier that decided them in more
    than three tenths of the pairs (reward.cascade).
    """
    names = sorted({name for row in h.rows for name in row if agreement_of(name)})
    return any(h.level(name) is not None and h.level(name) < AGREE for name in names)


def _td_error_stays(h: History) -> bool:
    """The critic's mean |TD error| is no smaller than at the start after 20 batches, while its values explain less than
    half of the returns: with a better policy the error of a critic that explains them may grow (F.2, VALUE)."""
    return (
        len(h.values("critic/td_error")) >= 20
        and h.level("critic/td_error") >= h.start("critic/td_error")
        and not h.above("critic/explained_variance", 0.5)
    )


def _overoptimised(h: History) -> bool:
    """The held-out reward, or the held-out share of right answers, stayed below its maximum for three passes in a row
    while the training reward did not fall (``eval.over_optimisation``), and the policy moved away from its reference.
    Of the reward, a fall counts from a quarter of the training reward's spread on: less is noise."""
    if h.gain("kl/sequence_sum") < 0:
        return False
    noise = {
        "validation/reward": 0.25 * pstdev(h.values("reward") or [0.0]),
        "validation/completions/correct_fraction": 0.0,
    }
    for name, spread in noise.items():
        train, held_out, last = [], [], None
        for row in h.rows:
            last = row.get("reward", last)
            if row.get(name) is not None and last is not None:
                train.append(last)
                held_out.append(row[name])
        if len(held_out) >= 4 and divergence(train, held_out, min_drop=max(0.05, spread), patience=3)["diverged"]:
            return True
    return False


#: The share of answers that the teacher of self-distillation reads behind another prompt.
DISTILLED = "self_distillation/reprompt_sample_fraction"


@dataclass(frozen=True)
class Alarm:
    when: Callable[[History], bool]
    text: str


ALARMS: dict[str, Alarm] = {
    "unscorable_rewards": Alarm(
        lambda h: h.above("reward/unscorable_fraction", 0.02),
        "More than 2% of the completions could not be scored, so their groups teach less than they cost. The reasons"
        " are in the rollouts (extra_json.unscorable); give the verifier or judge more time, or mend it.",
    ),
    "reward_collapse": Alarm(
        _collapsed,
        "The reward fell more than three standard deviations below what it was. Restore an earlier checkpoint and go on"
        " with a lower learning_rate, or a higher kl_coef or beta.",
    ),
    "kl_over_target": Alarm(
        lambda h: bool(h.target_kl) and h.above(f"kl/{h.kl_unit}", 1.5 * h.target_kl),
        "The KL to the reference is over 1.5 times target_kl. Raise kl_coef, or let it move:"
        " kl_controller=adaptive_ppo.",
    ),
    "entropy_collapse": Alarm(
        lambda h: len(h.values("entropy")) >= 8 and h.level("entropy") < 0.2 * h.start("entropy"),
        "The entropy fell below a fifth of its start: the samples of a group grow alike. Clip higher"
        " (epsilon_high=0.28), add entropy_coef=0.01, or lower learning_rate.",
    ),
    "entropy_explosion": Alarm(
        lambda h: h.grew("entropy", 3.0),
        "The entropy rose to more than three times its start: the policy is coming apart. Set entropy_coef=0, and lower"
        " learning_rate.",
    ),
    "clip_fraction_high": Alarm(
        lambda h: h.above("policy/outside_range", 0.3),
        "More than 30% of the token ratios lie outside the clip range. Steps are too large or log-probs do not match:"
        " lower learning_rate, num_iterations or num_minibatches.",
    ),
    "ratio_off": Alarm(
        lambda h: (
            (h.level("policy/ratio") is not None and not 0.9 <= h.level("policy/ratio") <= 1.1)
            or (h.level("policy/ess_fraction") is not None and h.level("policy/ess_fraction") < 0.3)
        ),
        "The mean ratio of new to old policy is outside [0.9, 1.1], or few tokens carry most of the weight (effective"
        " sample size below 30%). Lower learning_rate, or sample more often (num_iterations=1, num_minibatches=1).",
    ),
    "dead_groups": Alarm(
        lambda h: h.above("frac_reward_zero_std", 0.5),
        "More than half of the groups have equal rewards and teach nothing. Use prompts of medium difficulty,"
        " dynamic_sampling=true, more num_generations, or a graded reward.",
    ),
    "nothing_distilled": Alarm(
        lambda h: len(h.values(DISTILLED)) >= 3 and h.level(DISTILLED) < 0.05,
        "For fewer than 5% of the answers the teacher has more to read than the policy had: no answer of their groups"
        " was successful, and nothing was said of them. Use easier prompts, more num_generations, a lower"
        " success_reward_threshold, or rewards that give feedback.",
    ),
    "completions_truncated": Alarm(
        lambda h: h.above("completions/clipped_ratio", 0.1),
        "More than 10% of the completions were cut by max_completion_length, so they end without an answer. Raise it,"
        " or set truncation_policy=mask.",
    ),
    "cut_completions_earn_more": Alarm(
        lambda h: h.above("completions/clipped_ratio", 0.02) and h.above("reward/cut_gain", 0.0),
        "Completions that are cut earn more than those that end, so the policy learns not to end. A reward model never"
        " sees cut ones: they get no_eos_reward (-1 unless you set it) in the place of a score. Set"
        " truncation_policy=mask, or the component's no_eos_reward below its scores, or squash=sigmoid where it"
        " predicts whether an answer is right.",
    ),
    "length_growth": Alarm(
        lambda h: (
            h.grew("completions/mean_length", 2.0)
            and h.gain("reward") <= 0.02 * max(1e-9, abs(h.start("reward") or 0.0))
        ),
        "Completions are twice as long as at the start while the reward is not higher. Use preset=dr_grpo or dapo,"
        " soft_punish_cache, or a length reward.",
    ),
    "repetition": Alarm(
        lambda h: h.doubled("completions/repetition", 0.05),
        "Completions repeat themselves twice as much as at the start. Read samples; raise kl_coef or beta, or penalise"
        " repetition in the reward.",
    ),
    "special_characters": Alarm(
        lambda h: h.doubled("completions/special_characters", 0.1),
        "Completions hold twice the share of special characters that they held at the start. Read samples; raise"
        " kl_coef or beta, or add a reward of kind language.",
    ),
    "stock_phrases": Alarm(
        lambda h: h.doubled("completions/stock_phrases", 0.1),
        "Twice as many completions as at the start have a stock phrase (Certainly!, I hope this helps ...). Read"
        " samples; raise kl_coef or beta, or train the reward model again with such answers among the rejected ones"
        " (spoiled_fraction=0.1).",
    ),
    "refusals": Alarm(
        lambda h: h.doubled("completions/refusals", 0.05),
        "Twice as many completions as at the start refuse, in full or in part. Read samples; where the prompts are"
        " harmless, lower the weight of the reward that pays for refusals, or raise kl_coef or beta.",
    ),
    "rubric_low_confidence": Alarm(
        lambda h: h.above("rubric/flagged_items", 0.5),
        "The judge is not sure of an item of the rubric: its mean confidence is below flag_below. Read what it said"
        " (dataset rubric_scores), then make the criterion more precise, split it (sub_items), or give another judge."
        " Rewards are not changed by this.",
    ),
    "format_invalid": Alarm(
        lambda h: len(h.values("completions/format_valid")) >= 20 and h.level("completions/format_valid") < 0.9,
        "After 20 batches fewer than 90% of the completions have the form that the rewards of kind format ask for."
        " Raise its weight, show the form in the prompt (prompt_template), or train on demonstrations of it first"
        " (stage sft).",
    ),
    "harmful_critic": Alarm(
        lambda h: len(h.values("critic/explained_variance")) >= 10 and h.level("critic/explained_variance") < 0.0,
        "The critic's values explain less than no critic would. Raise critic_learning_rate or critic_warmup_steps, or"
        " use a preset without critic.",
    ),
    "td_error_stays": Alarm(
        _td_error_stays,
        "The critic's TD error does not shrink, and its values explain less than half of the returns: advantages are"
        " mostly noise. Raise critic_learning_rate or critic_warmup_steps, start it from the reward model"
        " (critic_init=reward_model), or use a preset without critic.",
    ),
    "reward_model_drift": Alarm(
        _drifted,
        "A reward model tells the policy's better answers from its worse ones less often than at the start, by more"
        " than 5 points (reward/NAME/pair_accuracy): the policy has left what it was trained on. Train it again on"
        " answers of the policy (reward_model with the input previous; recipe iterated_rlhf), raise kl_coef or beta, or"
        " use an ensemble of reward models.",
    ),
    "tiers_disagree": Alarm(
        _tiers_disagree,
        "A tier of the cascade orders the completions of a prompt otherwise than a later one that audits it, in more than"
        " 30% of the pairs (reward/tier_agreement): what is cheap decides wrongly, or the two want other things. Read"
        " rollouts that both scored (posttrain show), then mend the rule, raise min_confidence of the reward model, or take"
        " the earlier tier out.",
    ),
    "over_optimisation": Alarm(
        _overoptimised,
        "The training reward holds while the held-out reward or the share of right held-out answers has fallen: the"
        " policy learns the reward's mistakes. Stop at the held-out peak (select_by=reward, or"
        " completions/correct_fraction), raise kl_coef or beta, or use an ensemble of reward models.",
    ),
    "engine_mismatch": Alarm(
        lambda h: h.above("sampling/sampling_logp_difference/mean", 0.05),
        "The sampler's log-probs are more than 0.05 nats per token from the trainer's. Set"
        " importance_correction=token_truncate (TIS), or sample in the trainer's precision and without top_p, top_k and"
        " penalties.",
    ),
}


def alarms(rows: Sequence[dict], target_kl: float | None = None, kl_unit: str = "sequence_sum") -> dict[str, str]:
    """{name: text} of the alarms that are on after these metric rows."""
    history = History(rows, target_kl, kl_unit)
    return {name: alarm.text for name, alarm in ALARMS.items() if alarm.when(history)}


#: The metrics that alarms read, beside accuracies of reward models and agreement of tiers: all that a run has to remember of its past.
WATCHED = (
    "step",
    "reward",
    "validation/reward",
    "validation/completions/correct_fraction",
    "reward/unscorable_fraction",
    "frac_reward_zero_std",
    DISTILLED,
    "kl/sequence_sum",
    "kl/sequence_mean",
    "kl/token_mean",
    "entropy",
    "policy/outside_range",
    "policy/ratio",
    "policy/ess_fraction",
    "completions/clipped_ratio",
    "reward/cut_gain",
    "completions/mean_length",
    "completions/repetition",
    "completions/special_characters",
    "completions/stock_phrases",
    "completions/refusals",
    "rubric/flagged_items",
    "completions/format_valid",
    "critic/explained_variance",
    "critic/td_error",
    "sampling/sampling_logp_difference/mean",
)


def accuracy_of(name: str) -> bool:
    """Whether a metric is the accuracy of a reward model on training completions, ``reward/NAME/pair_accuracy``."""
    return name.startswith("reward/") and name.endswith("/pair_accuracy") and name.count("/") > 1


def agreement_of(name: str) -> bool:
    """Whether a metric is the agreement of two tiers of a cascade, ``reward/tier_agreement/EARLIER_LATER``."""
    return name.startswith("reward/tier_agreement/")


def watched(name: str) -> bool:
    """Whether an alarm reads a metric."""
    return name in WATCHED or accuracy_of(name) or agreement_of(name)
