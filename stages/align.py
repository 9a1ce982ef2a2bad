"""align: direct alignment of a policy on preference pairs (DPO and its relatives).

Reference log-probabilities are computed once, before training, into a ``ref_logps/1`` dataset (catalogue ``da.ref_cache``);
a cache from an earlier run can be given as input and is used only if its fingerprints match. At step 0 policy equals
reference, so DPO's loss must be ln 2: that is checked (``da.dpo``). Chosen and rejected log-probabilities are logged
separately, with the displacement metrics of ``da.displacement``.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from stages.settings import OptimizerConfig
from stages.spec import InputSpec, OutputSpec, StageSpec


class Config(OptimizerConfig):
    method: Literal["dpo", "cdpo", "robust_dpo", "soft_dpo", "ipo", "apo_zero", "apo_down", "discopop", "cal_dpo", "hinge_norm", "length_norm",
                    "sppo_hard", "nca_pair", "bco_pair", "exo_pair", "dpo_nll"] = Field(
        "dpo", description="Direct-alignment loss with a reference policy (stages.algorithms.DIRECT_METHODS).")
    beta: float | None = Field(None, gt=0, title="Beta", description="Strength of the tie to the reference: higher stays closer; default the method's (dpo 0.1).")
    learning_rate: float = Field(5e-7, gt=0, description="Peak learning rate (ours 5e-7; TRL 1e-6; texts: very low).")
    batch_size: int = Field(32, ge=1, description="Pairs per optimizer step (texts 32-64).")
    num_train_epochs: float = Field(1.0, gt=0, description="Passes over the pairs.")
    max_steps: int | None = Field(None, ge=1, title="Max steps", description="Optimizer steps; overrides num_train_epochs.")
    max_length: int = Field(1024, ge=8, description="Tokens of prompt and longer response.")
    options: dict[str, float] = Field(default_factory=dict, description="The method's own options, e.g. label_smoothing for cdpo.")
    eval_every: int = Field(0, ge=0, description="Optimizer steps between validation passes; 0 = only at start and end.")
    eval_rows: int = Field(1000, ge=0, description="Held-out pairs used at most.")


SPEC = StageSpec(
    name="align", config=Config, gpu=True, parallel=True,
    inputs={"model": InputSpec("model", doc="Policy to start from (normally the SFT model)."),
            "data": InputSpec("dataset", kinds=("pairs/1",), doc="Preference pairs."),
            "reference": InputSpec("model", required=False, doc="Reference policy; default: the starting policy."),
            "ref_logps": InputSpec("dataset", kinds=("ref_logps/1",), required=False, doc="Reference log-probs of an earlier run.")},
    outputs={"model": OutputSpec("model", role="policy"), "ref_logps": OutputSpec("dataset")})


class PairPreference:
    """Objective of a row of ``DIRECT_METHODS``: per-pair losses on sequence log-probs; weighted rows count by their weight."""

    def __init__(self, config: Config):
        from stages.algorithms import DIRECT_METHODS, resolve, validate_direct

        self.method = DIRECT_METHODS[config.method]
        self.beta = config.beta if config.beta is not None else self.method.default_beta
        self.warnings = validate_direct(self.method, self.beta, has_reference=True)
        unknown = set(config.options) - set(self.method.options)
        if unknown:
            raise ValueError(f"method {config.method} has no option {sorted(unknown)}; it takes {sorted(self.method.options) or 'none'}.")
        self.options = {**self.method.options, **config.options}
        self.loss = resolve(self.method.loss)

    def counts(self, items):
        return {"weight": sum(i.extra["weight"] for i in items), "pairs": float(len(items)),
                "chosen_tokens": float(sum(int(i.masks[0].sum()) for i in items))}

    def __call__(self, model, batch):
        import torch

        from stages.training import Sums

        sequence = sequence_logps(model, batch)
        chosen, rejected = sequence[0::2], sequence[1::2]

        def column(name):
            return torch.tensor([i.extra[name] for i in batch.items], device=sequence.device, dtype=torch.float32)

        weight, beta, ref_chosen, ref_rejected = column("weight"), self.beta, column("ref_chosen"), column("ref_rejected")
        scale_chosen = scale_rejected = torch.ones_like(chosen)
        if self.method.logp_reduction == "mean":
            lengths = batch.mask_SL.sum(1).float()
            scale_chosen, scale_rejected = 1.0 / lengths[0::2], 1.0 / lengths[1::2]
        columns = {name: column(name) for name in self.method.columns}
        losses = self.loss(chosen * scale_chosen, rejected * scale_rejected, ref_chosen * scale_chosen, ref_rejected * scale_rejected,
                           beta=beta, **self.options, **columns)
        terms = {"preference": ((losses * weight).sum(), "weight")}
        if self.method.nll_coef:
            terms["nll"] = (-self.method.nll_coef * chosen.sum(), "chosen_tokens")
        shift_chosen, shift_rejected = (chosen - ref_chosen).detach(), (rejected - ref_rejected).detach()
        u = beta * (shift_chosen - shift_rejected)
        pairs = "pairs"
        return Sums(terms, {
            "rewards/chosen": (beta * shift_chosen.sum(), pairs), "rewards/rejected": (beta * shift_rejected.sum(), pairs),
            "rewards/margins": (u.sum(), pairs), "rewards/accuracies": ((u > 0).float().sum(), pairs),
            "logps/chosen": (chosen.detach().sum(), pairs), "logps/rejected": (rejected.detach().sum(), pairs),
            "gradient_weight": (torch.sigmoid(-u).sum(), pairs),
            "displacement/displaced_fraction": ((shift_chosen < 0).float().sum(), pairs),
            "displacement/both_fell_fraction": (((shift_chosen < 0) & (shift_rejected < 0)).float().sum(), pairs)})


def sequence_logps(model, batch):
    """Sum of target log-probs of each response, ``[S]`` float32, differentiable."""
    from stages.modeling import target_logps

    logps, _ = target_logps(model, batch)
    return logps.new_zeros(batch.mask_SL.shape[0]).index_add(0, batch.seq_N, logps)


def run(stage):
    import math

    from stages.chat import renderer_for
    from stages.curves import training_report
    from stages.modeling import policy_to_train, save_policy
    from stages.pairs import encode_pairs
    from stages.training import ShuffledRows, Trainer, TrainingError, fit

    config, data = stage.config, stage.dataset("data")
    renderer = renderer_for(stage.path("model"))
    train, dropped = encode_pairs(data, "train", renderer, config.max_length)
    validation, _ = encode_pairs(data, "validation", renderer, config.max_length, config.eval_rows)
    stage.log(f"{len(train)} training pairs, {len(validation)} validation; dropped {dropped}")
    add_reference(stage, renderer, train + validation)
    model = policy_to_train(stage)
    source = ShuffledRows(stage, train, config.batch_size, config.num_train_epochs, config.max_steps)
    objective = PairPreference(config)
    for text in objective.warnings:
        stage.warn("align_settings", text)
    trainer = Trainer(model, objective, config, source.total_steps, stage.device)
    if config.method == "dpo" and not stage.has("reference") and stage.checkpoints.latest() is None:
        loss = trainer.evaluate(train[: min(len(train), config.batch_size)])["loss"]
        if abs(loss - math.log(2)) > 1e-4 * max(1.0, objective.beta * 10):
            raise TrainingError(f"Policy equals reference at step 0, so the DPO loss must be ln 2 = 0.6931, but it is {loss:.6f}. The "
                                "cached reference does not belong to this model and data; drop the ref_logps input.")
    _, final = fit(stage, trainer, source, evaluate=(lambda: trainer.evaluate(validation)) if validation else None,
                   eval_every=config.eval_every)
    with stage.output_model("model", role="policy") as directory:
        save_policy(model, renderer.tokenizer, directory, base=stage.inputs["model"].ref)
    summary = {"steps": trainer.step_index, "pairs": len(train), "skipped_steps": trainer.skipped,
               **{f"dropped/{k}": v for k, v in dropped.items()}, **{f"validation/{k}": v for k, v in final.items()}}
    if final.get("displacement/both_fell_fraction", 0.0) > 0.5:
        stage.warn("likelihood_displacement", "On most held-out pairs the log-probabilities of chosen and rejected both fell. Raise "
                   "beta, lower learning_rate, or train fewer steps.")
    stage.summary(summary)
    training_report(stage, "Direct alignment", summary)


def add_reference(stage, renderer, items) -> None:
    """Fill ``ref_chosen``/``ref_rejected`` of every item from the given cache, or compute and publish them."""
    from stages.ranks import connect, first_rank_only
    from storage.datasets import is_dataset, open_dataset

    connect(stage.device)
    role = "reference" if stage.has("reference") else "model"
    prints = fingerprints(stage, role, renderer)
    cached = matching_cache(stage, prints)
    path = stage.workdir / "out" / "ref_logps"
    with first_rank_only() as here:
        if here and not is_dataset(str(path)):  # a resumed run finds it complete
            write_reference(stage, role, items, prints, cached)
    stored = {r["group_id"]: (r["ref_chosen_logp"], r["ref_rejected_logp"])
              for r in open_dataset(str(path)).iter_rows(
                  columns=["group_id", "ref_chosen_logp", "ref_rejected_logp"])}
    for item in items:
        item.extra["ref_chosen"], item.extra["ref_rejected"] = stored[item.row_id]


def write_reference(stage, role: str, items, prints, cached) -> None:
    """Compute what the cache lacks, 512 pairs at a time, and publish all of it as ``ref_logps/1``."""
    from stages.batching import per_response
    from stages.modeling import freeze, load_policy
    from storage.schema import complete_row

    writer = stage.writer("ref_logps", "ref_logps/1")
    by_row, chunk, model = dict(cached), 512, None
    for start in range(0, len(items), chunk):
        part = items[start:start + chunk]
        missing = [i for i in part if i.row_id not in by_row]
        if missing:
            model = model or freeze(load_policy(stage.path(role), stage.device))
            sums = per_response(missing, stage.config.max_tokens_per_micro_batch, stage.device, lambda batch: sequence_logps(model, batch).tolist())
            by_row.update(zip((i.row_id for i in missing), sums))
        writer.write([complete_row("ref_logps/1", {
            "group_id": i.row_id, "prompt_id": i.extra["prompt_id"], "ref_chosen_logp": by_row[i.row_id][0],
            "ref_rejected_logp": by_row[i.row_id][1], "n_chosen": int(i.masks[0].sum()), "n_rejected": int(i.masks[1].sum()),
            **prints}, dataset="ref_logps", source="align", origin="conversion") for i in part])
        writer.flush()
        stage.progress(min(start + chunk, len(items)), len(items), "reference log-probabilities")
    writer.close({"rows": len(items), "from_cache": len(cached)})


def fingerprints(stage, role: str, renderer) -> dict[str, str]:
    """What a cached log-prob depends on besides the row: weights, tokenizer, template, truncation (``da.ref_cache``)."""
    import hashlib

    vocabulary = hashlib.sha256(repr(sorted(renderer.tokenizer.get_vocab().items())).encode()).hexdigest()[:16]
    return {"ref_model_hash": stage.inputs[role].digest, "tokenizer_hash": vocabulary,
            "template_id": f"{renderer.template_hash}:{stage.config.max_length}:{stage.config.compute_dtype}"}


def matching_cache(stage, prints: dict[str, str]) -> dict[str, tuple[float, float]]:
    if not stage.has("ref_logps"):
        return {}
    cached, stale = {}, 0
    for row in stage.dataset("ref_logps").iter_rows():
        if all(row[k] == v for k, v in prints.items()):
            cached[row["group_id"]] = (row["ref_chosen_logp"], row["ref_rejected_logp"])
        else:
            stale += 1
    if stale:
        stage.warn("stale_reference_cache", f"{stale} cached reference rows belong to another model, tokenizer, template or max_length "
                   "and are recomputed.")
    return cached
