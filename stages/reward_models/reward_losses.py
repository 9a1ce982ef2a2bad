"""Losses of reward models as sums over a micro-batch (catalogue section B); formulas are in ``stages/losses.py``.

Every function takes the model's outputs, the batch and the stage's config, and returns ``Sums``: nothing divides here.
Legend: S responses, N trained tokens, C head outputs.
"""

from __future__ import annotations

import torch

from stages import losses
from stages.training import Sums


def column(batch, name: str, like: torch.Tensor) -> torch.Tensor:
    """One extra of every item, on the device and in the type of ``like``."""
    return torch.tensor([i.extra[name] for i in batch.items], device=like.device, dtype=like.dtype)


def no_eos(batch) -> tuple[torch.Tensor, str]:
    """Responses whose end token was cut away: their score is read in the middle of a sentence."""
    return torch.tensor(float(sum(len(i.responses) - sum(i.extra["ended"]) for i in batch.items))), "responses"


def bradley_terry(scores_SC, batch, config) -> Sums:
    """``rm.bt``, ``rm.margin``, ``rm.soft_label``: responses alternate chosen, rejected."""
    chosen, rejected = scores_SC[0::2, 0], scores_SC[1::2, 0]
    weight = column(batch, "weight", scores_SC)
    each = losses.bradley_terry_loss(
        chosen,
        rejected,
        margin=column(batch, "margin", scores_SC) if config.use_margin else None,
        label_prob=column(batch, "label_prob", scores_SC) if config.use_soft_labels else None,
        label_smoothing=config.label_smoothing,
        center_rewards_coefficient=config.center_rewards_coefficient,
    )
    gap = (chosen - rejected).detach()
    return Sums(
        {"ranking": ((each * weight).sum(), "weight")},
        {
            "accuracy": ((gap > 0).float().sum(), "pairs"),
            "margin": (gap.sum(), "pairs"),
            **spread(scores_SC),
            "no_eos_fraction": no_eos(batch),
        },
    )


def spread(scores_SC) -> dict:
    """Mean score and mean squared score of the responses; their difference shows a drifting or collapsing scale."""
    flat = scores_SC.detach()[:, 0]
    return {"mean_reward": (flat.sum(), "responses"), "score_square_mean": ((flat**2).sum(), "responses")}


def _decided_pairs(batch, device):
    """(winner, loser, weight) of every pair that the rankings of a batch decide; indices into the responses."""
    winners, losers, weights, start = [], [], [], 0
    for item in batch.items:
        for i, j in item.extra["pairs"]:
            winners.append(start + i)
            losers.append(start + j)
            weights.append(item.extra["pair_weight"])
        start += len(item.responses)
    return torch.tensor(winners, device=device), torch.tensor(losers, device=device), weights


def kwise_pairs(scores_SC, batch, config) -> Sums:
    """``rm.kwise_pairs``: all pairs of a ranking, weighted 1/pairs of their prompt (``per_prompt``) or 1
    (``per_pair``).
    """
    scores = scores_SC[:, 0]
    winners, losers, weights = _decided_pairs(batch, scores.device)
    each = losses.kwise_pairs_loss(scores, torch.stack([winners, losers], 1))
    total = (each * torch.tensor(weights, device=scores.device, dtype=scores.dtype)).sum()
    return Sums({"ranking": (total, "weight")}, _ranking_metrics(scores_SC, winners, losers, batch))


def plackett_luce(scores_SC, batch, config) -> Sums:
    """``rm.plackett_luce``: -log probability of each ranking (responses are best first); rankings with ties fall back
    to pairs.
    """
    scores = scores_SC[:, 0]
    winners, losers, weights = _decided_pairs(batch, scores.device)
    total, start, seen = scores.new_zeros(()), 0, 0
    for item in batch.items:
        stop, pairs = start + len(item.responses), item.extra["pairs"]
        if item.extra["listwise"]:
            each = losses.plackett_luce_loss(scores[start:stop], config.top_ranks)
            total = total + item.extra["weight"] * (each / (stop - start - 1) if config.normalise_by_k else each)
        else:
            chosen = slice(seen, seen + len(pairs))
            total = (
                total
                + item.extra["pair_weight"]
                * losses.kwise_pairs_loss(scores, torch.stack([winners[chosen], losers[chosen]], 1)).sum()
            )
        start, seen = stop, seen + len(pairs)
    return Sums({"ranking": (total, "weight")}, _ranking_metrics(scores_SC, winners, losers, batch))


def _ranking_metrics(scores_SC, winners, losers, batch) -> dict:
    gap = (scores_SC[winners, 0] - scores_SC[losers, 0]).detach()
    return {
        "accuracy": ((gap > 0).float().sum(), "pairs"),
        "margin": (gap.sum(), "pairs"),
        **spread(scores_SC),
        "no_eos_fraction": no_eos(batch),
    }


def pointwise_bce(scores_SC, batch, config) -> Sums:
    """``rm.pmp``: good or bad, each response by itself."""
    label, weight = column(batch, "target", scores_SC), column(batch, "weight", scores_SC)
    z = scores_SC[:, 0]
    right = ((z > 0) == (label > 0.5)).float().detach()
    return Sums(
        {"bce": ((losses.soft_bce(z, label) * weight).sum(), "weight")},
        {
            "accuracy": (right.sum(), "rows"),
            "base_rate": (label.sum(), "rows"),
            **spread(scores_SC),
            "no_eos_fraction": no_eos(batch),
        },
    )


def control_tokens(scores_SC, batch, config) -> Sums:
    """``rm.pmp`` by control tokens: responses alternate the right word and the wrong one before one answer, and each two
    are a Bradley-Terry pair; the mean is over these pairs.
    """
    right, wrong = scores_SC[0::2, 0], scores_SC[1::2, 0]
    weight = torch.tensor([i.extra["weight"] for i in batch.items for _ in i.responses[0::2]]).to(scores_SC)
    gap = (right - wrong).detach()
    return Sums(
        {"ranking": ((losses.bradley_terry_loss(right, wrong) * weight).sum(), "weight")},
        {
            "accuracy": ((gap > 0).float().sum(), "pairs"),
            "margin": (gap.sum(), "pairs"),
            **spread(scores_SC),
            "no_eos_fraction": no_eos(batch),
        },
    )


def regression(scores_SC, batch, config) -> Sums:
    """``rm.regression``: squared (or Huber) error against standardised ratings, the mean over the attributes a row
    has.
    """
    target = column(batch, "targets", scores_SC)
    present = ~torch.isnan(target)
    error = torch.where(present, scores_SC - torch.nan_to_num(target), torch.zeros_like(scores_SC))
    each = error**2
    if config.regression_loss == "huber":  # quadratic within one standard deviation, equal to the square there
        each = torch.where(error.abs() <= 1, each, 2 * error.abs() - 1)
    per_row = each.sum(1) / present.sum(1)
    return Sums(
        {config.regression_loss: ((per_row * column(batch, "weight", scores_SC)).sum(), "weight")},
        {
            "absolute_error": ((error.detach().abs().sum(1) / present.sum(1)).sum(), "rows"),
            **spread(scores_SC),
            "no_eos_fraction": no_eos(batch),
        },
    )


def outcome(outputs_NC, batch, config) -> Sums:
    """``rm.orm``: every completion token carries the outcome's label; token-mean."""
    label, weight = (column(batch, name, outputs_NC)[batch.seq_N] for name in ("target", "weight"))
    z = outputs_NC[:, 0]
    last = _last_values(z.detach(), batch)
    labels = column(batch, "target", outputs_NC)
    return Sums(
        {"bce": ((losses.soft_bce(z, label) * weight).sum(), "tokens")},
        {
            "accuracy": (((last > 0) == (labels > 0.5)).float().sum(), "rows"),
            "base_rate": (labels.sum(), "rows"),
            "no_eos_fraction": no_eos(batch),
        },
    )


def value(outputs_NC, batch, config) -> Sums:
    """``rm.value``: every token predicts the return of the whole response (discount 1), squared error."""
    target, weight = (column(batch, name, outputs_NC)[batch.seq_N] for name in ("target", "weight"))
    error = losses.value_loss(outputs_NC[:, 0], target, torch.ones_like(target))
    return Sums({"squared_error": ((error * weight).sum(), "tokens")}, {"no_eos_fraction": no_eos(batch)})


def _last_values(values_N, batch) -> torch.Tensor:
    """Value at the last trained token of each response ``[S]``."""
    ends = (
        torch.searchsorted(
            batch.seq_N.contiguous(), torch.arange(batch.mask_SL.shape[0], device=values_N.device), right=True
        )
        - 1
    )
    return values_N[ends]


def steps(outputs_NC, batch, config) -> Sums:
    """``rm.prm``: cross-entropy against each step's class (or its soft label), the mean over labelled steps."""
    target = torch.tensor(
        [t for i in batch.items for t in i.extra["targets"]], device=outputs_NC.device, dtype=outputs_NC.dtype
    )
    each = -(target * torch.log_softmax(outputs_NC, -1)).sum(-1)
    right = (outputs_NC.argmax(-1) == target.argmax(-1)).float()
    return Sums(
        {"cross_entropy": ((each * column(batch, "weight", outputs_NC)[batch.seq_N]).sum(), "steps")},
        {"accuracy": (right.sum(), "labelled"), "base_rate": (target[:, -1].sum(), "labelled")},
    )


def pairwise(logits_SC, batch, config) -> Sums:
    """``rm.pairwise``: rows alternate (chosen, rejected) and (rejected, chosen); both orders count half."""
    forward, backward = logits_SC[0::2, 0], logits_SC[1::2, 0]
    p = column(batch, "label_prob", logits_SC)
    p = p * (1 - config.label_smoothing) + (1 - p) * config.label_smoothing
    each = (losses.soft_bce(forward, p) + losses.soft_bce(backward, 1 - p)) / 2
    a, b = torch.sigmoid(forward.detach()), torch.sigmoid(backward.detach())
    return Sums(
        {"bce": ((each * column(batch, "weight", logits_SC)).sum(), "weight")},
        {"accuracy": ((a > b).float().sum(), "pairs"), "order_inconsistency": ((a + b - 1).abs().sum(), "pairs")},
    )


def label_nll(logps_N, batch, config) -> Sums:
    """``rm.t2t_point``, ``rm.t2t_pair``: negative log-likelihood of the label word."""
    weight = column(batch, "weight", logps_N)[batch.seq_N]
    return Sums(
        {"nll": (-(logps_N * weight).sum(), "tokens")},
        {"label_probability": (logps_N.detach().exp().sum(), "labelled")},
    )


class RewardLoss:
    """The objective of the training loop: outputs read as the row says, its loss, and optionally the language-model
    term.

    Args:
        row: of ``REWARD_OBJECTIVES``. lm_head: keeps the LM loss on the (chosen) response as a regulariser (``rm.orm``
            joint objective of Cobbe et al.; ``rm.mentions`` NLL-regularised reward models), or None.
    """

    def __init__(self, row, config, pooling: str, lm_head=None):
        from stages.algorithms import resolve
        from stages.reward_models.reward_heads import READS

        self.row, self.config, self.pooling, self.lm_head = row, config, pooling, lm_head
        self.read, self.loss = READS[row.reads], resolve(row.loss)

    def counts(self, items) -> dict[str, float]:
        totals: dict[str, float] = {"responses": float(sum(len(i.responses) for i in items))}
        for item in items:
            for name, value in item.extra["counts"].items():
                totals[name] = totals.get(name, 0.0) + value
        return totals

    def __call__(self, model, batch) -> Sums:
        sums = self.loss(self.read(model, batch, self.pooling), batch, self.config)
        if self.lm_head is not None:
            sums.loss["language_model"] = (
                self.config.lm_loss_weight * self._language_model(model, batch),
                "chosen_tokens",
            )
        return sums

    def _language_model(self, model, batch):
        """Summed NLL of the first response of each item (the chosen one of a pair), under the LM head that is kept for
        it.
        """
        from stages.models.modeling import token_logps
        from stages.reward_models.reward_heads import states_of

        first, start = [], 0
        for item in batch.items:
            first.append(start)
            start += len(item.responses)
        keep = torch.isin(batch.seq_N, torch.tensor(first, device=batch.seq_N.device))
        logps, _ = token_logps(self.lm_head(model), states_of(model, batch, batch.src_N[keep]), batch.target_N[keep])
        weight = column(batch, "weight", logps)
        item_of = torch.tensor([k for k, i in enumerate(batch.items) for _ in i.responses], device=logps.device)
        return -(logps * weight[item_of[batch.seq_N[keep]]]).sum()
