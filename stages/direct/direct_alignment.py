"""Direct alignment as an objective: one row of ``stages.algorithms.DIRECT_METHODS`` on items of
``stages.direct.preference_items``.

Also what its steps need around them: numbers of the whole step (KTO's z0, AOT's matches), running means (BCO), a moving
reference.

Legend: B items of a micro-batch; a loss sees sums (or means) of target log-probs per response.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from stages.algorithms import DIRECT_METHODS, resolve
from stages.direct.combinations import DIRECT_READ_WHEN, OPTION_RANGES, refuse_addend, validate_direct
from stages.batching import per_response
from stages.direct.direct_losses import (
    aot_matches,
    equal_ranks,
    f_divergence_score,
    kto_reference_point,
    log_odds,
    segment_sums,
    weighted_mean,
)
from stages.losses import displacement_metrics, sign_beyond_rounding
from stages.models.adapters import plain_parameters
from stages.models.averages import Bema
from stages.models.modeling import (
    head_of,
    hidden_states,
    load_weights,
    log_collision,
    move_towards,
    target_logps,
    token_logps,
    weights_file,
)
from stages.models.tensor_files import TensorFiles, writer_of
from stages.settings import refuse_unread
from stages.spec import ConfigError
from stages.training import ShuffledRows, Sums, products, was_skipped

UNIT = {"pairs": "pairs", "conditions": "pairs", "segments": "pairs", "unpaired": "rows", "rankings": "prompts"}
#: First parts of the names of validation metrics that are measured from the reference; under a moving one no two passes
#: can be compared by them.
FROM_REFERENCE = ("loss", "preference", "rewards", "displacement", "gradient_weight", "kl", "delta")


@dataclass(frozen=True)
class Term:
    """One loss on pairs: its columns, its keyword arguments, how token log-probs become the number of a response, its
    weight in the sum; ``aligned``: WPO's weights are.
    """

    loss: object
    columns: tuple[str, ...]
    arguments: dict
    reduction: str
    weight: float
    aligned: bool = False


def given_options(method, options: dict) -> tuple[dict, dict]:
    """(keyword arguments of a method's loss, settings of what is around it), the given values over the defaults.

    Raises:
        ValueError: an option that the method has not, or a value that it cannot have.
    """
    known = {**method.options, **method.settings}
    unknown = set(options) - set(known)
    if unknown:
        raise ValueError(f"method {method.name} has no option {sorted(unknown)}; it takes {sorted(known) or 'none'}.")
    for name, value in options.items():
        if isinstance(known[name], str) != isinstance(value, str):
            raise ValueError(f"options.{name}={value!r} of method {method.name}: write a value like {known[name]!r}.")
        allowed = OPTION_RANGES.get(f"{method.name}.{name}", OPTION_RANGES.get(name))
        if allowed is not None and not (
            value in allowed if isinstance(value, str) else allowed[0] <= value < allowed[1]
        ):
            raise ValueError(
                f"options.{name}={value!r} of method {method.name}: write "
                + (
                    f"one of {', '.join(allowed)}."
                    if isinstance(value, str)
                    else f"a number >= {allowed[0]:g}"
                    + (f" and < {allowed[1]:g}." if math.isfinite(allowed[1]) else ".")
                )
            )
    return tuple(
        {name: options.get(name, value) for name, value in part.items()} for part in (method.options, method.settings)
    )


class DirectAlignment:
    """Objective of a row of ``DIRECT_METHODS``: losses per pair, response or prompt; weighted rows count by their
    weight.

    Items carry ``ref``: the reference's values of their responses (see :meth:`values`). Numbers that depend on a whole
    optimizer step or on the run so far (KTO's z0, BCO's delta, AOT's sorted matches) are set by :meth:`prepare` before
    the step.

    Raises:
        ValueError: settings that this method cannot have; the text says what to write.
    """

    def __init__(self, config, has_reference: bool = False):
        self.config, self.method = config, DIRECT_METHODS[config.method]
        method = self.method
        beta = config.beta if config.beta is not None else method.default_beta
        self.warnings = validate_direct(
            method, beta, method.needs_reference or has_reference or config.reference_update != "frozen"
        )
        options, self.settings = given_options(method, config.options)
        if config.logp_reduction is not None and method.data != "pairs":
            raise ValueError(f"logp_reduction is for methods on pairs; leave it out for {config.method}.")
        if config.logp_reduction == "mean" and method.name in ("aot_unpaired", "aot_paired", "aql", "wpo"):
            raise ConfigError(
                f"logp_reduction=mean: {method.name} "
                + (
                    {
                        "wpo": "weighs pairs by the mean, which it takes of the sums itself",
                        "aql": "takes the mean over a step of sums",
                    }.get(method.name, "matches the responses of a step by their sums")
                )
                + "; leave logp_reduction out, or write method=length_norm for DPO on means."
            )
        if (
            config.select_by
            and config.reference_update != "frozen"
            and config.select_by.split("/")[0].endswith(FROM_REFERENCE)
        ):
            raise ConfigError(
                f"select_by={config.select_by} compares validation passes, and under"
                f" reference_update={config.reference_update} each is measured from another reference; leave select_by"
                " and early_stopping_patience out (the last weights are published), or write reference_update=frozen."
            )
        if config.nll_coef and method.data not in ("pairs", "conditions"):
            raise ValueError(
                f"nll_coef adds the NLL of a chosen response; {config.method} trains on {UNIT[method.data]} of"
                f" {method.data}, so leave it out."
            )
        if config.nll_coef == 0 and method.nll_of == "target":
            raise ValueError(
                f"{method.name} without its NLL term does not read the gold answers that it is for; write nll_coef=1, or"
                f" method={'simpo' if method.logp_reduction == 'mean' else 'reference_free'}"
            )
        if config.nll_coef == 0 and method.name == "cpo":
            raise ValueError(
                "cpo without its NLL term has nothing that keeps the policy where it was; write nll_coef=1, or"
                " method=reference_free for the ablation."
            )
        refuse_unread(config, DIRECT_READ_WHEN, method, config, own={"nll_reduction": method.nll_reduction})
        self.scale = 1.0 if beta is None else beta
        self.arguments = {**({} if beta is None else {"beta": beta}), **options}
        self.reduction = config.logp_reduction or method.logp_reduction
        self.nll_coef = method.nll_coef if config.nll_coef is None else config.nll_coef
        self.nll_reduction = config.nll_reduction or method.nll_reduction
        if self.settings.get("nll_on_prompt") and not self.nll_coef:
            raise ConfigError(
                f"options.nll_on_prompt says which tokens the NLL term of {method.name} counts, and nll_coef=0 switches"
                " that off; leave options.nll_on_prompt out, or write nll_coef=1."
            )
        self.loss = resolve(method.loss)
        self.terms = {
            "preference": Term(
                self.loss,
                method.columns,
                self.arguments,
                self.reduction,
                config.loss_weight,
                bool(self.settings.get("aligned")),
            )
        }
        for one in config.also:
            added = DIRECT_METHODS[one.method]
            if one.method == config.method or f"{one.method}_preference" in self.terms:
                raise ValueError(
                    f"also: {one.method} is in the sum already; write it once, with the weight that it is to have"
                )
            refuse_addend(method, added, config)
            own = (
                one.beta
                if one.beta is not None
                else None
                if added.default_beta is None
                else beta
                if beta is not None
                else added.default_beta
            )
            self.warnings += validate_direct(added, own, added.needs_reference)
            arguments, settings = given_options(added, one.options)
            self.terms[f"{one.method}_preference"] = Term(
                resolve(added.loss),
                added.columns,
                {**({} if own is None else {"beta": own}), **arguments},
                added.logp_reduction,
                one.weight,
                bool(settings.get("aligned")),
            )
        rows = [method, *(DIRECT_METHODS[one.method] for one in config.also)]
        #: The method's row with what all losses of the sum want of a pair.
        self.reads = replace(
            method,
            columns=tuple(dict.fromkeys(name for row in rows for name in row.columns)),
            positive_gap=any(row.positive_gap for row in rows),
        )
        self.z0, self.means = 0.0, {"chosen": 0.0, "rejected": 0.0}

    def values(self, model, batch, states_NH=None) -> list:
        """What a response is to this method, differentiable: the sum of its target log-probs (0-dim), of each segment
        [N], or (``ld_alpha``) of the targets within the length of the pair's shorter response and of those beyond it
        [2]. ``states_NH``: the hidden states behind the targets, where they are known."""
        logps, _ = (
            target_logps(model, batch) if states_NH is None else token_logps(head_of(model), states_NH, batch.target_N)
        )
        if self.config.ld_alpha is not None:
            lengths = batch.mask_SL.sum(1)
            common = lengths.view(-1, 2).amin(1).repeat_interleave(2)
            place = torch.arange(len(logps), device=logps.device) - (lengths.cumsum(0) - lengths)[batch.seq_N]
            beyond = place >= common[batch.seq_N]
            return list(logps.new_zeros(2 * len(lengths)).index_add(0, 2 * batch.seq_N + beyond, logps).view(-1, 2))
        if self.method.data != "segments":
            return list(logps.new_zeros(batch.mask_SL.shape[0]).index_add(0, batch.seq_N, logps))
        spans = [side for item in batch.items for side in item.extra["segments"]]
        return [
            segment_sums(row, [a for a, _ in side], [b - a for a, b in side])
            for row, side in zip(batch.padded(logps), spans)
        ]

    @property
    def _nll_of(self) -> int:
        """Which response of an item the NLL term is of: the chosen one, or as a third prompt and chosen answer, or the
        target answer.
        """
        return 2 if self.settings.get("nll_on_prompt") or self.method.nll_of == "target" else 0

    def counts(self, items):
        labels = [i.extra.get("label") for i in items]
        chosen = (
            {"chosen_tokens": sum(i.extra["weight"] * float(i.masks[self._nll_of].sum()) for i in items)}
            if self.nll_coef and self.nll_reduction == "token-mean"
            else {}
        )
        return {
            **chosen,
            "weight": sum(i.extra["weight"] for i in items),
            "rows": float(len(items)),
            "desirable": float(sum(label is True for label in labels)),
            "undesirable": float(sum(label is False for label in labels)),
            **{
                f"{name}_weight": sum(i.extra["weight"] for i, label in zip(items, labels) if label is value)
                for name, value in (("desirable", True), ("undesirable", False))
            },
        }

    def __call__(self, model, batch):
        states = hidden_states(model, batch, batch.src_N)
        values, more = self.values(model, batch, states), {}
        if any(term.aligned for term in self.terms.values()):
            collisions = log_collision(head_of(model), states)
            more["collisions"] = (
                collisions.new_zeros(batch.mask_SL.shape[0])
                .index_add(0, batch.seq_N, collisions)
                .view(len(batch.items), -1)
            )
        groups, at = [], 0
        for item in batch.items:
            groups.append(values[at : at + len(item.responses)])
            at += len(item.responses)
        return getattr(self, "_" + self.method.data)(batch, groups, **more)

    def compared(self, values):
        """What the loss compares of a response's values ``[..., responses]`` (``ld_alpha``: ``[..., responses, 2]``, of
        which the part beyond the common length weighs alpha; LD-DPO, Liu et al. 2024)."""
        return values if self.config.ld_alpha is None else values[..., 0] + self.config.ld_alpha * values[..., 1]

    # -- losses by kind of data -------------------------------------------------------------------------------------
    def _pairs(self, batch, groups, collisions=None):
        """``collisions`` [B, responses]: sums of :func:`stages.models.modeling.log_collision`, for WPO's aligned
        weights.
        """
        policy = torch.stack([torch.stack(g) for g in groups])
        ref = column(batch, "ref", policy)
        compared = self.compared(policy)
        compared_ref = None if ref is None or not self.method.needs_reference else self.compared(ref)
        if self.config.ld_alpha is not None:  # all else is of whole responses
            policy, ref = policy.sum(-1), ref.sum(-1)
        lengths = target_lengths(batch, policy)
        sizes = compared.detach()[:, :2]
        if self.config.f_divergence_type != "reverse_kl":
            compared = f_divergence_score(
                compared - compared_ref, self.config.f_divergence_type, self.config.f_alpha_divergence_coef
            )
            compared_ref = torch.zeros_like(compared)

        def scaled_by(reduction):
            scale = 1.0 / lengths[:, :2] if reduction == "mean" else torch.ones_like(policy[:, :2])
            return compared[:, :2] * scale, None if compared_ref is None else compared_ref[:, :2] * scale

        found = {
            "length_chosen": lengths[:, 0],
            "length_rejected": lengths[:, 1],
            "target": policy[:, -1] if policy.shape[1] > 2 else policy[:, 0],
        }
        found |= {"mean_chosen": policy[:, 0] / lengths[:, 0], "mean_rejected": policy[:, 1] / lengths[:, 1]}
        aligned = (
            {}
            if collisions is None
            else {
                name: found[name] - collisions[:, k] / lengths[:, k]
                for k, name in enumerate(("mean_chosen", "mean_rejected"))
            }
        )
        if self.method.data == "conditions":
            found["h_corrupted"] = policy[:, 2] - ref[:, 2]
        weight, terms = column(batch, "weight", policy), {}
        for name, term in self.terms.items():
            scaled, scaled_ref = scaled_by(term.reduction)
            known = {**found, **aligned} if term.aligned else found
            columns = {name: known[name] if name in known else column(batch, name, policy) for name in term.columns}
            sides = (
                scaled[:, 0],
                scaled[:, 1],
                *((None, None) if scaled_ref is None else (scaled_ref[:, 0], scaled_ref[:, 1])),
            )
            terms[name] = (term.weight * (term.loss(*sides, **term.arguments, **columns) * weight).sum(), "weight")
        if self.nll_coef:
            of = self._nll_of
            nll = -policy[:, of] / (lengths[:, of] if self.nll_reduction == "seq-mean" else 1.0)
            terms["nll"] = (
                self.nll_coef * (nll * weight).sum(),
                "chosen_tokens" if self.nll_reduction == "token-mean" else "weight",
            )
        scaled, scaled_ref = scaled_by(self.reduction)
        metrics = pair_metrics(
            self.scale,
            policy[:, 0],
            policy[:, 1],
            None if ref is None else ref[:, 0],
            None if ref is None else ref[:, 1],
            scaled.detach() - (0.0 if scaled_ref is None else scaled_ref),
            sizes / lengths[:, :2] if self.reduction == "mean" else sizes,
        )
        if not self.method.needs_reference and self.reduction == "mean":
            metrics["log_odds"] = ((log_odds(scaled[:, 0]) - log_odds(scaled[:, 1])).detach().sum(), "rows")
        return Sums(
            terms,
            {
                **metrics,
                "length/chosen": (lengths[:, 0].sum(), "rows"),
                "length/rejected": (lengths[:, 1].sum(), "rows"),
            },
        )

    _conditions = _pairs

    def _segments(self, batch, groups):
        losses, chosen, rejected, ref_chosen, ref_rejected = [], [], [], [], []
        for item, (c, r) in zip(batch.items, groups):
            rc, rr = (torch.as_tensor(v, dtype=c.dtype, device=c.device) for v in item.extra["ref"])
            wc, wr = (torch.as_tensor(v, dtype=c.dtype, device=c.device) for v in item.extra["segment_weights"])
            losses.append(self.loss(c - rc, r - rr, wc, wr, **self.arguments))
            for total, part in zip((chosen, rejected, ref_chosen, ref_rejected), (c, r, rc, rr)):
                total.append(part.sum())
        chosen, rejected, ref_chosen, ref_rejected = map(torch.stack, (chosen, rejected, ref_chosen, ref_rejected))
        terms = {"preference": ((torch.stack(losses) * column(batch, "weight", chosen)).sum(), "weight")}
        return Sums(
            terms,
            pair_metrics(
                self.scale,
                chosen,
                rejected,
                ref_chosen,
                ref_rejected,
                torch.stack([chosen - ref_chosen, rejected - ref_rejected], 1).detach(),
            ),
        )

    def _unpaired(self, batch, groups):
        policy = torch.stack([g[0] for g in groups])
        ratio = policy - column(batch, "ref", policy)[:, 0]
        label = torch.tensor([i.extra["label"] for i in batch.items], device=policy.device)
        statistic = {"z0": {"z0": self.z0}, "delta": {"delta": self.delta}}.get(self.method.statistic, {})
        losses = self.loss(ratio, label=label, **self.arguments, **statistic)
        terms = {"preference": ((losses * column(batch, "weight", policy)).sum(), "weight")}
        reward, metrics = self.scale * ratio.detach(), {"desirable_fraction": (label.float().sum(), "rows")}
        threshold = self.scale * self.z0 + (self.delta if self.method.statistic == "delta" else 0.0)
        # on the threshold: one half
        side = sign_beyond_rounding(reward - threshold, self.scale * policy.detach()).float()
        metrics["rewards/accuracies"] = ((0.5 + 0.5 * torch.where(label, side, -side)).sum(), "rows")
        lengths, weights = target_lengths(batch, policy)[:, 0], column(batch, "weight", policy)
        for name, count, of in (("chosen", "desirable", label), ("rejected", "undesirable", ~label)):
            if of.any():
                metrics |= {
                    f"rewards/{name}": (reward[of].sum(), count),
                    f"logps/{name}": (policy.detach()[of].sum(), count),
                    f"displacement/{name}_shift": (ratio.detach()[of].sum(), count),
                    f"length/{name}": (lengths[of].sum(), count),
                }
                if (
                    self.method.statistic == "delta"
                    and torch.is_grad_enabled()
                    and any(i.extra["weight"] for i in batch.items if i.extra["label"] is (name == "chosen"))
                ):
                    metrics[f"weighted/{name}"] = ((reward * weights)[of].sum(), f"{count}_weight")
        if label.any():
            metrics["displacement/displaced_fraction"] = (
                (sign_beyond_rounding(ratio.detach(), policy.detach())[label] < 0).float().sum(),
                "desirable",
            )
        return Sums(terms, metrics)

    def _rankings(self, batch, groups):
        losses, ends = [], []
        for item, group in zip(batch.items, groups):
            policy = torch.stack(group)
            ref, lengths = (
                torch.as_tensor(v, dtype=policy.dtype, device=policy.device) if v is not None else None
                for v in (item.extra.get("ref"), [int(m.sum()) for m in item.masks])
            )
            columns = {
                name: torch.as_tensor(item.extra[name], dtype=policy.dtype, device=policy.device)
                for name in self.method.columns
            }
            losses.append(
                self.loss(policy, ref if self.method.needs_reference else None, lengths, **self.arguments, **columns)
            )
            ends.append([policy[0], policy[-1], *((ref[0], ref[-1]) if ref is not None else (None, None))])
        best, worst, ref_best, ref_worst = (None if side[0] is None else torch.stack(side) for side in zip(*ends))
        ranked = torch.stack([best, worst], 1).detach()
        if self.method.needs_reference:
            ranked = ranked - torch.stack([ref_best, ref_worst], 1)
        terms = {"preference": ((torch.stack(losses) * column(batch, "weight", best)).sum(), "weight")}
        return Sums(terms, pair_metrics(self.scale, best, worst, ref_best, ref_worst, ranked))

    # -- numbers of the whole step, and of the run so far --------------------------------------------------------------
    @property
    def delta(self) -> float:
        """BCO's shift: midway between the running means of the rewards of both classes (``da.bco``)."""
        return 0.5 * (self.means["chosen"] + self.means["rejected"])

    def prepare(self, model, items, device: str, held_out: bool = False) -> dict[str, float]:
        """Set what the loss of these items needs beyond themselves, from the current policy; returns it for the log."""
        if self.method.statistic == "z0" and self.config.z_ref_mode != "zero":
            if held_out or self.config.z_ref_mode == "batch_mismatched":
                paired = [i for i in items if "mismatched" in i.extra] if len(items) > 1 else []
                mismatched, weights = [i.extra["mismatched"] for i in paired], [i.extra["weight"] for i in paired]
                ratios = [
                    v[0] - m.extra["ref"][0] for v, m in zip(self.log_probs(model, mismatched, device), mismatched)
                ]
                self.z0 = (
                    float(
                        kto_reference_point(
                            torch.tensor(ratios, dtype=torch.float64), torch.tensor(weights, dtype=torch.float64)
                        )
                    )
                    if ratios
                    else 0.0
                )
            return {"kl": self.z0}
        if self.method.statistic in ("mean", "sorted", "sorted_pairs"):
            policy, ref = (
                self.compared(torch.tensor(v, dtype=torch.float64))
                for v in (self.log_probs(model, items, device), [i.extra["ref"] for i in items])
            )
        if self.method.statistic == "mean":
            h = policy - ref
            mean = float(
                weighted_mean(h[:, 0] - h[:, 1], torch.tensor([i.extra["weight"] for i in items], dtype=torch.float64))
            )
            for item in items:
                item.extra["mean_h"] = mean
            return {"mean_h": mean}
        if self.method.statistic == "sorted_pairs":
            for item, margin in zip(items, equal_ranks(policy[:, 0] - policy[:, 1], ref[:, 0] - ref[:, 1]).tolist()):
                item.extra["matched_margin"] = margin
        if self.method.statistic == "sorted":
            ratios = policy - ref
            for item, rejected, chosen in zip(items, *(m.tolist() for m in aot_matches(ratios[:, 0], ratios[:, 1]))):
                item.extra["matched_rejected"], item.extra["matched_chosen"] = rejected, chosen
        return {"delta": self.delta} if self.method.statistic == "delta" else {}

    def log_probs(self, model, items, device: str) -> list[list]:
        """:meth:`values` of every response of every item, as plain numbers, in the precision of the training forward
        that they are compared with.
        """

        def compute(batch):
            with products(self.config, device):
                return [v.tolist() for v in self.values(model, batch)]

        return per_response(items, self.config.micro_batch_tokens, device, compute, model) if items else []

    def after_step(self, metrics: dict[str, float]) -> None:
        """BCO's running means take in the step's rewards, by the weights of their rows (``weighted/``, which nothing
        else reads, leave the metrics); a class that the step had none of changes nothing, and neither does a step that
        was skipped because its loss or gradient was not finite."""
        if self.method.statistic == "delta":
            m, taken = self.settings["momentum"], not was_skipped(metrics)
            for name in self.means:
                value = metrics.pop(f"weighted/{name}", math.nan)
                if taken and math.isfinite(value):
                    self.means[name] = m * self.means[name] + (1.0 - m) * value


def target_lengths(batch, like):
    """Trained tokens of each response, ``[items, responses]``, in the type of ``like``."""
    return batch.mask_SL.sum(1).to(like.dtype).view(len(batch.items), -1)


def column(batch, name: str, like):
    """A per-item value as a tensor in the type of ``like``; None where the items have none."""
    if batch.items[0].extra.get(name) is None:
        return None
    return torch.tensor([i.extra[name] for i in batch.items], device=like.device, dtype=like.dtype)


def pair_metrics(beta: float, chosen, rejected, ref_chosen, ref_rejected, values, compared=None) -> dict:
    """What people who debug direct alignment look at, as sums over rows (``da.dpo``, ``da.displacement``).

    chosen, rejected [B] sums of log-probs; ref_* likewise or None; values [B, 2] what the loss compares, reference
    subtracted; compared [B, 2] the policy's part of it, by default chosen and rejected. In ``rewards/accuracies`` a tie
    within rounding of these counts one half (ours; TRL counts an exact tie as wrong).
    """
    size = (torch.stack([chosen, rejected], 1) if compared is None else compared).detach().abs().sum(1)
    u = beta * (values[:, 0] - values[:, 1])
    metrics = {
        "rewards/chosen": beta * values[:, 0],
        "rewards/rejected": beta * values[:, 1],
        "rewards/margins": u,
        "rewards/accuracies": 0.5 + 0.5 * sign_beyond_rounding(values[:, 0] - values[:, 1], size).float(),
        "logps/chosen": chosen.detach(),
        "logps/rejected": rejected.detach(),
        "gradient_weight": torch.sigmoid(-u),
    }
    if ref_chosen is not None:
        found = displacement_metrics(chosen, rejected, ref_chosen, ref_rejected, beta)
        metrics |= {
            f"displacement/{name}": found[key].float()
            for name, key in (
                ("chosen_shift", "chosen_shift"),
                ("rejected_shift", "rejected_shift"),
                ("displaced_fraction", "displaced"),
                ("both_fell_fraction", "both_fell"),
            )
        }
    return {name: (value.sum(), "rows") for name, value in metrics.items()}


def margin(metrics: dict[str, float]) -> dict[str, float]:
    """``rewards/margins`` of single responses: between the means of the two classes, where a step has both."""
    if "rewards/margins" in metrics or not {"rewards/chosen", "rewards/rejected"} <= set(metrics):
        return {}
    return {"rewards/margins": metrics["rewards/chosen"] - metrics["rewards/rejected"]}


class MovingReference:
    """A reference policy that follows the trained one (``da.reference``: tr_soft, ema, per_interval; bema: every so many
    steps it is the bias-corrected moving average of the policy's weights, an adapter counting as merged).

    Args:
        start: the reference at first.
        policy: the policy as it starts, for bema where that is another model.
    """

    def __init__(self, config, start: torch.nn.Module, device: str, policy: torch.nn.Module | None = None):
        self.config, self.device, self.model = config, device, start
        self.bema = None
        if config.reference_update == "bema":
            self.bema = Bema(config.reference_bema, dict((start if policy is None else policy).named_parameters()))

    def attach(self, objective: DirectAlignment, items) -> None:
        """Give items (and their mismatched rows) this reference's values."""
        every = items + [i.extra["mismatched"] for i in items if "mismatched" in i.extra]
        for item, values in zip(every, objective.log_probs(self.model, every, self.device)):
            item.extra["ref"] = values

    def after_step(self, step: int, policy) -> None:
        """The update after the policy's optimizer step ``step`` (1-based, skipped ones not counted)."""
        config = self.config
        if config.reference_update == "bema":
            since = self.bema.steps + 1 - self.bema.config.update_after
            due = since > 0 and since % config.reference_interval == 0
            self.bema.after_step(plain_parameters(policy), dict(self.model.named_parameters()) if due else None)
            return
        if config.reference_update != "ema" and step % config.reference_interval:
            return
        keep = {"ema": config.reference_decay, "tr_soft": 1.0 - config.reference_alpha, "per_interval": 0.0}[
            config.reference_update
        ]
        move_towards(self.model, policy, keep)

    def state(self) -> tuple[dict, dict]:
        """(JSON state, files)."""
        if self.bema is None:
            return {}, {"reference.safetensors": weights_file(self.model)}
        tensors = {**dict(self.model.named_parameters()), **self.bema.tensors()}
        return {"averaged_steps": self.bema.steps}, {"reference.safetensors": writer_of(tensors)}

    def restore(self, state: dict, read) -> None:
        path = read.path("reference.safetensors")
        load_weights(self.model, path)
        if self.bema is not None:
            self.bema.restore(state["averaged_steps"], TensorFiles([path]))


class AlignmentRows(ShuffledRows):
    """Rows of each step with what their loss needs beyond them; the state is KTO's and BCO's numbers and the moving
    reference.
    """

    def __init__(
        self, stage, model, objective: DirectAlignment, items, validation, moving: MovingReference | None = None
    ):
        config = stage.config
        super().__init__(stage, items, config.batch_size, config.num_train_epochs, config.max_steps)
        self.model = model
        self.objective = objective
        self.validation = validation
        self.moving = moving
        self.device = stage.device
        self.history: list[list[float]] = []  # chosen_shift and margin at each validation pass
        self.logged: dict[str, float] = {}

    def items(self, step: int):
        rows = super().items(step)
        self.logged = self.prepare(rows)
        return rows

    def prepare(self, rows, held_out: bool = False) -> dict[str, float]:
        if self.moving is not None:
            self.moving.attach(self.objective, rows)
        return self.objective.prepare(self.model, rows, self.device, held_out)

    def rehearse_selection(self, trainer) -> None:
        """Refuse a ``select_by`` that no validation pass will have, before the reference of every row is computed: by a
        pass over one validation row (of each label), with the policy in the reference's place.

        Raises:
            TrainingError: with the names of the metrics that there are.
        """
        rows = list({item.extra.get("label"): item for item in self.validation}.values())
        MovingReference(trainer.config, self.model, self.device).attach(self.objective, rows)
        found = self.objective.prepare(self.model, rows, self.device, held_out=True)
        found |= trainer.evaluate(rows)
        found |= margin(found)
        if trainer.config.select_by not in found:
            trainer.consider(found)

    def evaluate(self, trainer) -> dict[str, float]:
        """A validation pass."""
        logged = self.prepare(self.validation, held_out=True)
        found = trainer.evaluate(self.validation)
        found |= {**logged, **margin(found)}
        if "displacement/chosen_shift" in found and "rewards/margins" in found:
            self.history.append([found["displacement/chosen_shift"], found["rewards/margins"]])
        return found

    def after_step(self, step: int, metrics):
        self.objective.after_step(metrics)
        if self.moving is not None and not was_skipped(metrics):
            self.moving.after_step(step - int(metrics["skipped_steps"]), self.model)
        return {**super().after_step(step, metrics), **self.logged, **margin(metrics)}

    def state(self):
        state, files = ({}, {}) if self.moving is None else self.moving.state()
        return {"z0": self.objective.z0, "means": self.objective.means, "history": self.history, **state}, files

    def restore(self, state, read) -> None:
        self.objective.z0, self.objective.means, self.history = (
            state["z0"],
            dict(state["means"]),
            list(state["history"]),
        )
        if self.moving is not None:
            self.moving.restore(state, read)
