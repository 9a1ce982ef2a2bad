"""reward_model: a scalar reward model from preference pairs.

Bradley-Terry ranking loss, optionally with margins, soft labels, label smoothing or a centring term (catalogue ``rm.bt``,
``rm.margin``, ``rm.soft_label``), on a backbone with a linear head read at the last response token (``rm.head``). After
training the scores are anchored by a bias (``rm.calibrate``) and the model is judged on held-out pairs (``rm.eval``).
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from stages.settings import OptimizerConfig
from stages.spec import InputSpec, OutputSpec, StageSpec


class Config(OptimizerConfig):
    learning_rate: float = Field(1e-5, gt=0, description="Peak learning rate (ours 1e-5; InstructGPT 9e-6; TRL 1e-4).")
    batch_size: int = Field(32, ge=1, description="Pairs per optimizer step.")
    num_train_epochs: float = Field(1.0, gt=0, description="Passes over the pairs; reward models overfit after one (texts).")
    max_steps: int | None = Field(None, ge=1, title="Max steps", description="Optimizer steps; overrides num_train_epochs.")
    max_length: int = Field(1024, ge=8, description="Tokens of prompt and longer response; see the ingest report for lengths.")
    use_margin: bool = Field(False, description="Subtract the rows' margin inside the loss (rm.margin; Llama 3 dropped it).")
    use_soft_labels: bool = Field(False, description="Use label_prob as P(chosen preferred) (rm.soft_label).")
    label_smoothing: float = Field(0.0, ge=0, lt=0.5, description="Probability that a label is flipped.")
    center_rewards_coefficient: float = Field(0.0, ge=0, description="c * mean((r_w + r_l)^2) (TRL; 0.01 in the paper).")
    train_layers: Literal["all", "head"] = Field("all", description="Trainable set: everything, or the head only.")
    anchor: Literal["none", "chosen", "demonstrations"] = Field(
        "chosen", description="Set whose mean score becomes 0 (rm.calibrate): held-in chosen answers, or the `anchor` input.")
    eval_every: int = Field(0, ge=0, description="Optimizer steps between validation passes; 0 = only at start and end.")
    eval_rows: int = Field(2000, ge=0, description="Held-out pairs used at most.")


SPEC = StageSpec(
    name="reward_model", config=Config, gpu=True, parallel=True,
    inputs={"model": InputSpec("model", doc="Backbone: the SFT model (default choice), a base model, or a smaller one."),
            "data": InputSpec("dataset", kinds=("pairs/1",), doc="Preference pairs; validation and test splits judge the model."),
            "anchor": InputSpec("dataset", kinds=("demonstrations/1",), required=False,
                                doc="Demonstrations whose mean score becomes 0 (anchor=demonstrations).")},
    outputs={"model": OutputSpec("model", role="reward")})


class PairRanking:
    """Objective of ``rm.bt`` and relatives; all terms are sums over pairs, weighted rows count by their weight."""

    def __init__(self, config: Config):
        self.config = config

    def counts(self, items):
        return {"weight": sum(i.extra["weight"] for i in items), "pairs": float(len(items))}

    def __call__(self, model, batch):
        import torch

        from stages.losses import bradley_terry_loss
        from stages.modeling import response_scores
        from stages.training import Sums

        scores = response_scores(model, batch)
        chosen, rejected = scores[0::2], scores[1::2]

        def column(name):
            return torch.tensor([i.extra[name] for i in batch.items], device=scores.device, dtype=torch.float32)

        config, weight = self.config, column("weight")
        losses = bradley_terry_loss(
            chosen, rejected, margin=column("margin") if config.use_margin else None,
            label_prob=column("label_prob") if config.use_soft_labels else None, label_smoothing=config.label_smoothing,
            center_rewards_coefficient=config.center_rewards_coefficient)
        gap = (chosen - rejected).detach()
        return Sums({"ranking": ((losses * weight).sum(), "weight")}, {
            "accuracy": ((gap > 0).float().sum(), "pairs"), "margin": (gap.sum(), "pairs"),
            "score_mean": ((chosen + rejected).detach().sum() / 2, "pairs"),
            "no_eos_fraction": (torch.tensor(sum(2.0 - sum(i.extra["ended"]) for i in batch.items) / 2), "pairs")})


def run(stage):
    from stages.chat import renderer_for
    from stages.curves import training_report
    from stages.modeling import new_reward_model, save_reward_model, score_head
    from stages.pairs import encode_pairs
    from stages.training import ShuffledRows, Trainer, fit

    config, data = stage.config, stage.dataset("data")
    renderer = renderer_for(stage.path("model"))
    model = new_reward_model(stage.path("model"), stage.device, seed=stage.seed_for("head"))
    train, dropped = encode_pairs(data, "train", renderer, config.max_length)
    validation, _ = encode_pairs(data, "validation", renderer, config.max_length, config.eval_rows)
    test, _ = encode_pairs(data, "test", renderer, config.max_length, config.eval_rows)
    stage.log(f"{len(train)} training pairs, {len(validation)} validation, {len(test)} test; dropped {dropped}")
    if config.train_layers == "head":
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        score_head(model).weight.requires_grad_(True)
    source = ShuffledRows(stage, train, config.batch_size, config.num_train_epochs, config.max_steps)
    trainer = Trainer(model, PairRanking(config), config, source.total_steps, stage.device)
    fit(stage, trainer, source, evaluate=(lambda: trainer.evaluate(validation)) if validation else None,
        eval_every=config.eval_every)
    model.eval()
    bias, anchor = calibration_bias(stage, model, renderer, train, config)
    with stage.output_model("model", role="reward") as directory:
        save_reward_model(model, renderer.tokenizer, directory, {"bias": bias, "anchor": anchor})
    summary = {"steps": trainer.step_index, "pairs": len(train), "skipped_steps": trainer.skipped, "calibration_bias": bias,
               **{f"dropped/{k}": v for k, v in dropped.items()}}
    held_out = {"validation": validation, "test": test}
    for split, items in held_out.items():
        if items:
            summary |= {f"{split}/{k}": v for k, v in judge(stage, model, items, split, bias).items()}
    if train:
        scores = pair_scores(model, train[: config.eval_rows], config.max_tokens_per_micro_batch, stage.device)
        summary["train/final_accuracy"] = float((scores[:, 0] > scores[:, 1]).mean())
    stage.summary(summary)
    judged = "test" if test else "validation"
    if summary.get(f"{judged}/accuracy", 1.0) <= 0.55:
        stage.warn("reward_model_near_chance", f"Held-out accuracy is {summary[f'{judged}/accuracy']:.3f} (texts expect 0.65-0.80). "
                   "Raise learning_rate or num_train_epochs, add pairs, or look at the data's bias report.")
    if summary.get(f"{judged}/accuracy", 0.0) > 0.98:
        stage.warn("reward_model_too_good", "Held-out accuracy above 0.98 suggests a leak: check length and source-model shares "
                   "of chosen against rejected in the ingest report.")
    training_report(stage, "Reward model", summary)


def pair_scores(model, items, max_tokens: int, device: str):
    """Raw scores ``[n_items, 2]`` (chosen, rejected), in the items' order, through the same layout as training."""
    import numpy as np

    from stages.batching import per_response
    from stages.modeling import response_scores

    return np.array(per_response(items, max_tokens, device, lambda batch: response_scores(model, batch).tolist())).reshape(-1, 2)


def calibration_bias(stage, model, renderer, train, config) -> tuple[float, str | None]:
    """``b = -mean`` of the anchor's raw scores, so that 0 is an average expert answer (``rm.calibrate``)."""
    if config.anchor == "none" or (config.anchor == "chosen" and not train):
        return 0.0, None
    if config.anchor == "chosen":
        scores = pair_scores(model, train[: config.eval_rows or len(train)], config.max_tokens_per_micro_batch, stage.device)
        return -float(scores[:, 0].mean()), "chosen"
    if not stage.has("anchor"):
        raise ValueError("anchor=demonstrations needs the input `anchor` (a demonstrations dataset); give it with "
                         "--input anchor=FILE, or set anchor=chosen.")
    from stages.batching import make_item
    from stages.pairs import trim

    items = []
    for row in stage.dataset("anchor").iter_rows():
        encoded = renderer.conversation(row["messages"], max_length=config.max_length)
        ids, mask = trim(encoded.ids, encoded.mask)
        if sum(mask):
            items.append(make_item(row["row_id"], [], [ids, ids[:1]], [mask, [0]]))
        if len(items) >= max(1, config.eval_rows):
            break
    scores = pair_scores(model, items, config.max_tokens_per_micro_batch, stage.device)
    return -float(scores[:, 0].mean()), "demonstrations"


def judge(stage, model, items, split: str, bias: float) -> dict[str, float]:
    """Held-out metrics of ``rm.eval`` with a bootstrap interval over prompts, and the calibration figure."""
    import numpy as np

    from stages import statistics
    from stages.reports import calibration_diagram

    scores = pair_scores(model, items, stage.config.max_tokens_per_micro_batch, stage.device) + bias
    gap = scores[:, 0] - scores[:, 1]
    lengths = np.array([[len(r) for r in i.responses] for i in items], float)
    correct = (gap > 0).astype(float)
    low, high = statistics.bootstrap_ci(correct, n=1000, seed=stage.seed_for("bootstrap", split) % 2**32,
                                        clusters=[i.extra["prompt_id"] for i in items])
    flat_scores, flat_lengths = scores.ravel(), lengths.ravel()
    metrics = {
        "accuracy": float(correct.mean()), "accuracy_ci_low": low, "accuracy_ci_high": high,
        "tie_rate": float((gap == 0).mean()), "log_loss": float(np.logaddexp(0.0, -gap).mean()), "mean_margin": float(gap.mean()),
        "ece": statistics.ece(*statistics.preference_confidence(scores[:, 0], scores[:, 1])), "chosen_longer_share": float((lengths[:, 0] > lengths[:, 1]).mean()),
    }
    if flat_scores.std() > 0 and flat_lengths.std() > 0:
        metrics["score_length_correlation"] = float(np.corrcoef(flat_scores, flat_lengths)[0, 1])
    matched = np.abs(lengths[:, 0] - lengths[:, 1]) <= 0.1 * lengths.max(axis=1)
    if matched.sum() >= 20:
        metrics["length_matched_accuracy"] = float(correct[matched].mean())
    for strength in sorted({i.extra["strength"] for i in items if i.extra["strength"] is not None}):
        chosen = np.array([i.extra["strength"] == strength for i in items])
        metrics[f"accuracy_strength_{strength}"] = float(correct[chosen].mean())
    stage.report(f"calibration-{split}", png=calibration_diagram(
        *statistics.preference_confidence(scores[:, 0], scores[:, 1]), title=f"Reward model calibration ({split})"))
    return metrics
