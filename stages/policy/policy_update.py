"""What one optimizer step of RL minimises, as sums over a micro-batch.

surrogate or loss on whole responses + distillation from the reference behind another prompt + KL in the loss - entropy
bonus + value loss of a shared trunk + pretraining mix, each aggregated over the whole step. Which terms there are is a preset's row; nothing here asks for its name.

Shapes: S responses, L longest response, N trained positions, P pairs, H hidden size.
"""

from __future__ import annotations

import torch

from stages.algorithms import resolve
from stages.batching import collate, make_item, plan
from stages.losses import (
    aggregate,
    denominator_of,
    kl_estimate,
    masked,
    off_policy_keep,
    policy_loss,
    value_clips,
    value_loss,
)
from stages.models import sharding
from stages.models.divergence import divergence, exact_kl
from stages.models.modeling import head_of, hidden_states, precise, token_logps, tokens_together
from stages.running import cuda
from stages.training import Sums

#: Nats by which a log-prob of the sampler or of another micro-batch differs from the trainer's although nothing has
#: moved (1.4, run-time invariants).
ROUNDING = {"float32": 1e-4, "bfloat16": 1e-2}

#: What sums of :func:`stages.losses.policy_loss` are called in the log, where it is not ``policy/NAME`` (TRL's names).
LOGGED = {
    "clip_low": "clip_ratio/low_mean",
    "clip_high": "clip_ratio/high_mean",
    "region": "clip_ratio/region_mean",
    "ratio": "policy/ratio",
    "ratio_max": "policy/ratio_max",
    **{k: f"approx_kl/{k}" for k in ("k1", "k2", "k3")},
}


def pairs_of(items, trained_S) -> list[tuple[int, int]]:
    """Disjoint pairs of consecutive trained responses of each prompt, as positions among all responses; an odd one is
    left out.
    """
    pairs, start = [], 0
    for item in items:
        live = [start + k for k in range(len(item.responses)) if trained_S[start + k]]
        pairs += list(zip(live[0::2], live[1::2]))
        start += len(item.responses)
    return pairs


def prompts_of(item) -> list[list[int] | None]:
    """The prompt that the teacher reads each response of an item behind; None where it reads none."""
    return item.extra.get("teacher_prompts") or [None] * len(item.responses)


def counted_sequences(items, seq_denominator: str) -> float:
    """Responses that means over sequences divide by: those with a trained token, or ``all`` (AGG)."""
    return float(sum(seq_denominator == "all" or bool(m.any()) for i in items for m in i.masks))


def over_groups(row, config) -> bool:
    """Whether a mean over tokens is one over those of each prompt group, and then over groups (AGG)."""
    return row.aggregation == "token-mean" and config.token_norm_scope == "group"


def group_means(values_SL, mask_SL, items):
    """Sum of the groups' means of a token loss; the count of groups with a trained token divides it."""
    weights = torch.tensor(
        [1.0 / max((i.whole or i).n_targets, 1) for i in items for _ in i.responses],
        dtype=values_SL.dtype,
        device=values_SL.device,
    )
    return (masked(values_SL, mask_SL).sum(-1) * weights).sum()


class PolicyGradient:
    """The policy's objective over prompt groups (and pretraining rows, which carry ``extra["ptx"]``).

    Args:
        row: preset (``stages.algorithms.RLPreset``).
        config: the RL stage's config.
        kl_coef: a function giving the current coefficient of the KL in the loss; default the row's.
        anchor: model of the exact KL in the loss (reference, or the policy that sampled), for
            ``kl_loss_estimator=full``.
        value_head: scalar head on the policy's trunk, where policy and critic share it.
        teacher: model that the policy is distilled from, behind the prompts ``extra["teacher_prompts"]``.
        entropy_coef: a function giving the current coefficient of the entropy bonus; default the config's.
    """

    def __init__(self, row, config, kl_coef=None, anchor=None, value_head=None, teacher=None, entropy_coef=None):
        self.row, self.config, self.anchor, self.value_head, self.teacher = row, config, anchor, value_head, teacher
        self.kl_coef = kl_coef or (lambda: row.kl_loss_coef)
        self.entropy_coef = entropy_coef or (lambda: config.entropy_coef)
        self.scale = config.loss_scale_factor or config.longest_completion
        self.objective = resolve(row.objective) if row.objective else None
        self.by_group = over_groups(row, config)
        self.count = "groups" if self.by_group else denominator_of(row.aggregation)

    def counts(self, items):
        rl = [i for i in items if not i.extra.get("ptx")]
        ptx = [i for i in items if i.extra.get("ptx")]
        return {
            "tokens": float(sum(i.n_targets for i in rl)),
            "trained": counted_sequences(rl, "nonempty"),
            "sequences": counted_sequences(rl, self.config.seq_denominator),
            "groups": float(sum(i.n_targets > 0 for i in rl)),
            "pairs": float(len(pairs_of(rl, [bool(m.any()) for i in rl for m in i.masks]))),
            "forwarded": float(sum(i.n_targets for i in rl if not i.extra.get("skip_forward"))),
            "correct_tokens": float(sum(m.sum() for i in rl for m, c in zip(i.masks, i.extra.get("correct", [])) if c)),
            "distilled_tokens": float(
                sum(m.sum() for i in rl for m, p in zip(i.masks, prompts_of(i)) if p is not None)
            ),
            "ptx_tokens": float(sum(i.n_targets for i in ptx)),
            "ptx_documents": float(sum(i.extra.get("documents", 1.0) for i in ptx)),
        }

    def units(self, item):
        """Responses that the loss compares: pairs where it is a loss on pairs, else each by itself."""
        pairs = pairs_of([item], [bool(m.any()) for m in item.masks]) if self.row.unit == "pairs" else []
        return [*pairs, *((k,) for k in range(len(item.responses)) if not any(k in pair for pair in pairs))]

    def aggregate(self, values_SL, mask_SL, items):
        """Sum of a token loss under the row's aggregation; ``self.count`` divides it."""
        if not self.by_group:
            return aggregate(values_SL, mask_SL, self.row.aggregation, self.scale, counted=False)[0]
        return group_means(values_SL, mask_SL, items)

    def __call__(self, model, batch):
        row, config = self.row, self.config
        want_entropy = config.log_entropy or config.pays_entropy
        hidden = hidden_states(model, batch, batch.src_N)
        head = head_of(model)
        logps, entropy = token_logps(head, hidden, batch.target_N, config.temperature, want_entropy)
        logps_SL = batch.padded(logps)
        is_ptx = torch.tensor([bool(i.extra.get("ptx")) for i in batch.items for _ in i.responses], device=logps.device)
        mask = batch.mask_SL & ~is_ptx[:, None]
        dtype = torch.promote_types(logps.dtype, torch.float32)

        def column(name):
            return batch.pad_lists([v for i in batch.items for v in i.extra.get(name, [[]] * len(i.responses))], dtype)

        def per_response(name):
            return torch.tensor(
                [v for i in batch.items for v in i.extra.get(name, [0.0] * len(i.responses))],
                dtype=dtype,
                device=logps.device,
            )

        flat = [a for i in batch.items for a in i.extra.get("advantages", [0.0] * len(i.responses))]
        by_token = any(isinstance(a, list) for a in flat)
        advantages = (
            torch.tensor(flat, dtype=dtype, device=logps.device)
            if not by_token
            else batch.pad_lists([a if isinstance(a, list) else [] for a in flat], dtype)
        )
        old_SL = column("old_logps")
        ref_SL = column("ref_logps") if row.needs_reference else None
        losses, sums = self._token_losses(batch, logps_SL, old_SL, advantages, mask, column)
        if self.objective:
            terms, own = self._responses(batch, mask, logps_SL, old_SL, ref_SL, advantages, per_response, column)
            metrics = {LOGGED[k]: (sums[k].float(), "forwarded") for k in ("ratio", "ratio_max", "k1", "k2", "k3")}
            metrics |= {f"policy/{k}": (v, "trained") for k, v in own.items()}
        else:
            terms = {"policy_loss": (self.aggregate(losses, mask, batch.items), self.count)}
            sums["region"] = sums["clip_low"] + sums["clip_high"]
            metrics = {LOGGED.get(k, f"policy/{k}"): (v.float(), "forwarded") for k, v in sums.items() if k != "tokens"}
        # whatever the surrogate makes of the ratio
        off = torch.expm1(masked(logps_SL.detach() - old_SL, mask).clamp(-20, 20)).abs()
        metrics["policy/ratio_deviation"] = (off.sum().float(), "forwarded")
        if share := row.distillation_weight:
            loss, by = terms.pop("policy_loss")
            if share < 1:
                terms["policy_loss"] = ((1 - share) * loss, by)
            distilled_SL, at_SL, gap = self._distilled(batch, head, hidden, logps, logps_SL, old_SL, mask)
            terms["distillation_loss"] = (share * self.aggregate(distilled_SL, at_SL, batch.items), self.count)
            metrics["self_distillation/kl"] = (gap, "distilled_tokens")
        if row.kl_loss_coef:
            kl_SL = self._kl(batch, head, hidden, logps_SL, old_SL, ref_SL, mask)
            terms["kl_loss"] = (self.kl_coef() * self.aggregate(kl_SL, mask, batch.items), self.count)
            if row.kl_loss_estimator == "full":
                metrics[f"kl/full_{row.kl_target}"] = (masked(kl_SL.detach(), mask).sum(), "forwarded")
        if ref_SL is None and config.monitor_kl and any("ref_logps" in i.extra for i in batch.items):
            ref_SL = column("ref_logps")  # to be logged only
        if ref_SL is not None:
            metrics["kl"] = (kl_estimate(logps_SL.detach(), ref_SL, "k3", mask).sum(), "forwarded")
        if want_entropy:
            entropy_SL = batch.padded(entropy)
            metrics["entropy"] = (masked(entropy_SL.detach(), mask).sum(), "forwarded")
            if config.pays_entropy:
                terms["entropy_bonus"] = (
                    -self.entropy_coef() * self.aggregate(entropy_SL, mask, batch.items),
                    self.count,
                )
        if row.positive_nll_coef:
            right = mask & (per_response("correct") > 0)[:, None]
            terms["positive_nll"] = (row.positive_nll_coef * masked(-logps_SL, right).sum(), "correct_tokens")
        if self.value_head is not None:
            terms["value_loss"], found = self._value(batch, hidden, mask, column)
            metrics |= found
        if row.ptx_coef:
            nll, by = self._ptx(batch, head, hidden, logps_SL, is_ptx)
            terms["ptx_loss"] = (row.ptx_coef * nll, by)
            metrics["ptx/nll"] = (nll.detach(), "ptx_tokens")
        if len(terms) == 1:  # which the trainer shows as the loss only
            (name, (loss, by)), *_ = terms.items()
            metrics[name] = (loss.detach(), by)
        return Sums(terms, metrics)

    def _token_losses(self, batch, logps_SL, old_SL, advantages, mask, column):
        """(the surrogate's loss per token, its sums for the log), less the tokens that are left out and with what holds
        others near the policy that sampled.
        """
        row, config = self.row, self.config
        losses, sums = policy_loss(
            logps_SL,
            old_SL,
            advantages,
            mask,
            epsilon=row.epsilon,
            epsilon_high=row.epsilon_high,
            ratio_level=row.ratio_level,
            surrogate="clip" if self.objective else row.surrogate,
            clip_ratio_c=row.clip_ratio_c,
            weights_BT=column("weights") if any("weights" in i.extra for i in batch.items) else None,
            options={} if self.objective else row.options,
        )
        if any("learned" in i.extra for i in batch.items):  # top_entropy_quantile, covariance_clip
            losses = losses * column("learned")
        if any("kept_close" in i.extra for i in batch.items):  # covariance_kl
            moved = masked(logps_SL - old_SL, mask)
            # below it the sign is that of rounding, and so would the gradient be
            moved = torch.where(moved.detach().abs() > ROUNDING[config.compute_dtype], moved, 0.0)
            losses = losses + config.covariance_kl_coef * column("kept_close") * moved.abs()
        if config.off_policy_mask_threshold is not None:
            sampler_SL = column("sampler_logps") if any("sampler_logps" in i.extra for i in batch.items) else old_SL
            keep = off_policy_keep(
                logps_SL,
                sampler_SL,
                advantages if advantages.dim() == 2 else advantages[:, None],
                mask,
                config.off_policy_mask_threshold,
            )
            losses, sums["off_policy_masked"] = torch.where(keep, losses, 0.0), (mask & ~keep).sum()
        return losses, sums

    def _distilled(self, batch, head, hidden, logps, logps_SL, old_SL, mask):
        """(loss of every token [S, L] that the teacher has read, times the ratio to the policy that started the
        iteration; where that is [S, L]; the sum of log pi - log teacher over these tokens).
        """
        config, prompts = self.config, [p for i in batch.items for p in prompts_of(i)]
        owners = [(item, k) for item in batch.items for k in range(len(item.responses))]
        there = [p is not None and bool(m) for p, m in zip(prompts, mask.any(-1).tolist())]
        read = [
            make_item(item.row_id, prompt, [item.responses[k]], [item.masks[k]])
            for prompt, (item, k), on in zip(prompts, owners, there)
            if on
        ]
        states = self._read_by_teacher(read, batch)
        at_N = torch.tensor(there, dtype=torch.bool, device=logps.device)[batch.seq_N]
        at_SL = mask & torch.tensor(there, dtype=torch.bool, device=logps.device)[:, None]
        if not read:
            return 0.0 * logps_SL, at_SL, logps.new_zeros(()).float()
        theirs, own, targets = head_of(self.teacher), logps[at_N], batch.target_N[at_N]
        with torch.no_grad():
            gap = own.detach() - token_logps(theirs, states, targets, config.temperature)[0].to(own.dtype)
        if config.distillation_mode == "sampled_token":
            values = gap * own
        else:
            values = (
                divergence(
                    head,
                    hidden[at_N],
                    theirs,
                    states,
                    {0.0: "forward", 1.0: "reverse"}.get(config.distillation_alpha, "jsd"),
                    config.temperature,
                    config.distillation_alpha if 0 < config.distillation_alpha < 1 else 0.5,
                )
                / config.temperature**2
            )
        if config.distillation_is_clip is not None:
            moved = (own.detach() - old_SL[batch.seq_N, batch.col_N][at_N]).clamp(-20, 20)
            values = values * moved.exp().clamp(max=config.distillation_is_clip)
        out = values.new_zeros(mask.shape).index_put((batch.seq_N[at_N], batch.col_N[at_N]), values)
        return out, at_SL, gap.sum().float()

    def _read_by_teacher(self, read, batch):
        """Hidden states of the teacher at the targets of ``read``, in their order; None where nothing is read.

        It computes without gradients, in micro-batches of its own. In shards, whose layers every rank gathers, it reads
        all at once, and the batch itself where nothing else is to be read: as often on every rank.
        """
        device, whole = batch.ids_U.device, sharding.root_of(getattr(self.teacher, "model", self.teacher)) is None
        with torch.no_grad():
            if not whole:
                seen = collate(read, device) if read else batch
                states = hidden_states(self.teacher, seen, seen.src_N)
                return states if read else None
            if not read:
                return None
            parts = plan(list(read), self.config.micro_batch_tokens, cost=tokens_together(self.teacher))
            place, found = {id(item): k for k, item in enumerate(read)}, [None] * len(read)
            for part in parts:
                for item, own in zip(part, self._teachers(part, device)):
                    found[place[id(item)]] = own
            return torch.cat(found)

    def _teachers(self, part, device) -> list[torch.Tensor]:
        """Hidden states of the teacher at the targets of each item; in halves where memory does not suffice for all."""
        try:
            seen = collate(part, device)
            return [*hidden_states(self.teacher, seen, seen.src_N).split([item.n_targets for item in part])]
        except (MemoryError, RuntimeError) as error:
            if len(part) == 1 or not cuda.out_of_memory(error):  # the policy's micro-batch may be smaller
                raise
        cuda.release(device)
        half = len(part) // 2
        return [*self._teachers(part[:half], device), *self._teachers(part[half:], device)]

    def _value(self, batch, hidden, mask, column):
        """(the value loss of a critic on the policy's trunk, metrics)."""
        config = self.config
        with torch.autocast(hidden.device.type, enabled=False):
            values_SL = batch.padded(self.value_head(precise(hidden))[:, 0])
        first = self.row.critic_target == "bandit"  # one value per prompt, at the first token
        at, seen = (mask & (mask.cumsum(-1) == 1), "trained") if first else (mask, "forwarded")
        error = value_loss(
            values_SL,
            column("returns"),
            at,
            column("values"),
            config.cliprange_value,
            config.value_loss_half,
        )
        total, by = (error.sum(), "sequences") if first else (self.aggregate(error, mask, batch.items), self.count)
        metrics = {
            "critic/value_mean": (masked(values_SL.detach(), at).sum(), seen),
            "critic/return_mean": (masked(column("returns"), at).sum(), seen),
        }
        if config.cliprange_value is not None:
            clips = value_clips(values_SL, column("returns"), at, column("values"), config.cliprange_value)
            metrics["critic/clip_fraction"] = (clips.float().sum(), seen)
        return (config.vf_coef * total, by), metrics

    def _ptx(self, batch, head, hidden, logps_SL, is_ptx):
        """NLL of the pretraining text, and what divides it."""
        config = self.config
        nll = masked(-logps_SL, batch.mask_SL & is_ptx[:, None]).sum()
        at = is_ptx[batch.seq_N]
        if config.temperature != 1.0 and bool(at.any()):  # the loss is the model's, not the sampler's
            nll = -token_logps(head, hidden[at], batch.target_N[at])[0].sum()
        return nll, "ptx_tokens" if config.ptx_agg == "token-mean" else "ptx_documents"

    def _kl(self, batch, head, hidden, logps_SL, old_SL, ref_SL, mask):
        """The KL of the loss per token: exact over the vocabulary, or an estimator on the sampled token."""
        row = self.row
        if row.kl_loss_estimator == "full":
            with torch.no_grad():
                other = hidden_states(self.anchor, batch, batch.src_N)
            return batch.padded(
                exact_kl(head, hidden, head_of(self.anchor), other, self.config.temperature, row.kl_direction)
            )
        target = old_SL if row.kl_target == "old" else ref_SL
        return kl_estimate(
            logps_SL, target, row.kl_loss_estimator, mask, old_SL if self.config.kl_is_weighted else None
        )

    def _responses(self, batch, mask, logps_SL, old_SL, ref_SL, advantages, per_response, column):
        """The preset's own loss on whole responses (``stages.policy.sequence_losses``), and sums over them for the
        log.
        """
        from stages.policy.sequence_losses import Responses

        advantages_SL = advantages if advantages.dim() == 2 else advantages[:, None].expand_as(logps_SL)
        pairs = pairs_of(batch.items, mask.any(-1).tolist())
        if self.row.unit == "pairs" and not pairs:
            return {"policy_loss": (0.0 * logps_SL.sum(), "pairs")}, {}
        seen = Responses(
            masked(logps_SL, mask),
            masked(old_SL, mask),
            None if ref_SL is None else masked(ref_SL, mask),
            mask,
            per_response("rewards"),
            masked(advantages_SL, mask),
            column("values") if self.row.needs_critic else None,
            torch.tensor(pairs, dtype=torch.long, device=logps_SL.device).reshape(-1, 2),
            per_response("preferences") if any("preferences" in i.extra for i in batch.items) else None,
        )
        values = self.objective(seen, **self.row.options)
        logged = resolve(self.row.objective_log)(seen, **self.row.options) if self.row.objective_log else {}
        if self.row.unit == "tokens":
            return {"policy_loss": (self.aggregate(values, mask, batch.items), self.count)}, logged
        values = masked(values, mask.any(-1)) if self.row.unit == "sequences" else values
        return {"policy_loss": (values.sum(), self.row.unit)}, logged
