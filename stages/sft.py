"""sft: supervised fine-tuning on demonstrations, or on plain text (``train_on=full``).

Token-level negative log-likelihood of assistant turns (catalogue ``sft.nll``, ``sft.mask``, ``sft.template``), aggregated over
the whole optimizer step. Pre-training from scratch, continued pre-training, instruction tuning and the fit step of rejection
sampling are this stage with other data. Rows whose targets were all cut off by ``max_length`` are dropped and counted.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from stages.settings import OptimizerConfig
from stages.spec import InputSpec, OutputSpec, StageSpec


class RowsConfig(OptimizerConfig):
    """What training on demonstrations takes, whatever is learned from them (``sft``, ``distill``)."""

    batch_size: int = Field(32, ge=1, description="Rows per optimizer step.")
    num_train_epochs: float = Field(1.0, gt=0, description="Passes over the training rows (texts: 1-2); max_steps wins.")
    max_steps: int | None = Field(None, ge=1, title="Max steps", description="Optimizer steps; overrides num_train_epochs.")
    max_length: int = Field(1024, ge=8, description="Tokens per row (TRL default 1024); longer rows are cut and counted.")
    train_on: Literal["all_assistant", "final_turn", "final_message", "full"] = Field(
        "all_assistant", description="Which tokens are trained (sft.mask). Rows with train_turns use those under all_assistant.")
    eval_every: int = Field(0, ge=0, description="Optimizer steps between validation passes; 0 = only at the end.")
    eval_rows: int = Field(512, ge=0, description="Validation rows used at most.")


class Config(RowsConfig):
    loss_agg_mode: Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"] = Field(
        "token-mean", description="Loss aggregation over the whole optimizer step (sft.nll).")
    curriculum: Literal["none", "length", "difficulty"] = Field(
        "none", description="Train from easy to hard (sft.curriculum): by trained tokens, or by the rows' `difficulty` (ingested from that column).")
    curriculum_stages: int = Field(3, ge=1, description="Parts of equal size of a curriculum, each for all its epochs, shuffled inside.")
    eval_prompts: int = Field(64, ge=1, description="Validation prompts answered at each pass and scored by the reward_model input, where there is one.")
    eval_completion_length: int = Field(128, ge=1, description="New tokens of these answers at most.")


SPEC = StageSpec(
    name="sft", config=Config, gpu=True, parallel=True,
    inputs={"model": InputSpec("model", doc="Causal LM to start from."),
            "data": InputSpec("dataset", kinds=("demonstrations/1", "text/1"),
                              doc="Demonstrations; plain text rows are trained in full."),
            "reward_model": InputSpec("model", required=False, doc="Scores greedy answers to validation prompts: select_by=reward (sft.ckpt_select).")},
    outputs={"model": OutputSpec("model", role="policy")})


class NextToken:
    """Objective of ``sft.nll``: token log-likelihood, rows weighted by their weight."""

    def __init__(self, loss_agg_mode: str):
        from stages.losses import denominator_of

        self.mode, self.count = loss_agg_mode, denominator_of(loss_agg_mode)

    def counts(self, items):
        tokens = sum(i.n_targets * i.extra["weight"] for i in items)
        sequences = sum(i.extra["weight"] for i in items if i.n_targets)
        return {"tokens": tokens, "sequences": sequences, "targets": sum(i.n_targets for i in items),
                "real": sum(i.n_tokens for i in items)}

    def __call__(self, model, batch):
        import torch

        from stages.losses import aggregate, token_nll
        from stages.modeling import target_logps
        from stages.training import Sums

        logps, _ = target_logps(model, batch)
        weights = torch.tensor([i.extra["weight"] for i in batch.items], device=logps.device)
        loss_SL = batch.padded(token_nll(logps)) * weights[:, None]
        total, _ = aggregate(loss_SL, batch.mask_SL, self.mode)
        return Sums({"nll": (total, self.count)},
                    {"target_nll": (-logps.detach().sum(), "targets"),
                     "target_fraction": (torch.tensor(float(len(logps))), "real")})


def run(stage):
    from stages.chat import renderer_for
    from stages.modeling import policy_to_train, save_policy
    from stages.curves import training_report
    from stages.preflight import preflight
    from stages.training import Trainer, fit

    config, dataset = stage.config, stage.dataset("data")
    renderer = renderer_for(stage.path("model"))
    model = policy_to_train(stage)
    full_text = dataset.kind == "text/1"
    encode = encode_text if full_text else encode_demonstrations
    train, dropped = encode(dataset, "train", renderer, config)
    validation, _ = encode(dataset, "validation", renderer, config, limit=config.eval_rows)
    stage.log(f"{len(train)} training rows, {sum(i.n_tokens for i in train)} tokens, "
              f"{sum(i.n_targets for i in train)} of them trained; {len(validation)} validation rows; dropped {dropped}")
    source = rows_in_order(stage, train, config)
    answers = Answers(stage, dataset, renderer, model) if stage.has("reward_model") else None
    trainer = Trainer(model, NextToken(config.loss_agg_mode), config, source.total_steps, stage.device)
    preflight(stage, trainer, train, config.batch_size, renderer, completions_end=not full_text)
    before, final = fit(stage, trainer, source, eval_every=config.eval_every,
                        evaluate=lambda: {**trainer.evaluate(validation), **(answers.judge() if answers else {})})
    with stage.output_model("model", role="policy") as directory:
        save_policy(model, renderer.tokenizer, directory, base=stage.inputs["model"].ref)
    summary = {"steps": trainer.step_index, "rows": len(train), "skipped_steps": trainer.skipped,
               **{f"dropped/{k}": v for k, v in dropped.items()}}
    if final:
        summary |= {"validation/nll": final["target_nll"], "validation/nll_before": before["target_nll"]} if "target_nll" in final else {}
        summary |= {"validation/reward": final["reward"], "validation/reward_before": before["reward"]} if "reward" in final else {}
    stage.summary(summary)
    training_report(stage, "Supervised fine-tuning", summary)


def rows_in_order(stage, items, config):
    """The training source: shuffled rows, or a curriculum's parts one after the other."""
    from stages.selection import order_by_difficulty
    from stages.spec import ConfigError
    from stages.training import ShuffledRows, StagedRows

    if config.curriculum == "none" or not items:
        return ShuffledRows(stage, items, config.batch_size, config.num_train_epochs, config.max_steps)
    missing = [i.row_id for i in items if config.curriculum == "difficulty" and i.extra["difficulty"] is None]
    if missing:
        raise ConfigError(f"curriculum=difficulty needs a difficulty for every row, and {len(missing)} have none (first {missing[0]}); ingest data with a `difficulty` column, "
                          "or write curriculum=length")
    difficulty = [i.n_targets if config.curriculum == "length" else float(i.extra["difficulty"]) for i in items]
    return StagedRows(stage, items, order_by_difficulty(difficulty, config.curriculum_stages)[1], config)


class Answers:
    """Greedy answers of the trained model to validation prompts, scored by a reward model (``sft.ckpt_select``)."""

    def __init__(self, stage, dataset, renderer, model):
        from stages.reward_scorers import load_scorer
        from stages.sampler import Sampler
        from stages.sampling import SamplingParams
        from stages.sharding import Acting
        from stages.spec import ConfigError

        config = stage.config
        if dataset.kind != "demonstrations/1":
            raise ConfigError("sft: a reward_model judges answers to conversations, and plain text has none; leave the reward_model input out")
        self.prompts = []
        for row in dataset.iter_rows(split="validation"):
            turns = [i for i, m in enumerate(row["messages"]) if m["role"] == "assistant"]
            if turns and turns[0] and len(self.prompts) < config.eval_prompts:
                self.prompts.append(row["messages"][:turns[0]])
        if not self.prompts:
            raise ConfigError("sft: a reward_model needs validation rows to answer; give a dataset with a validation split, or leave the reward_model input out")
        self.renderer, self.scorer = renderer, load_scorer(stage.path("reward_model"), stage.device)
        self.acting = Acting(model, config)
        self.sampler = Sampler(self.acting.model, renderer.tokenizer)
        self.params = SamplingParams(temperature=0.0, max_new_tokens=config.eval_completion_length, stop_ids=renderer.stop_ids)

    def judge(self) -> dict[str, float]:
        """{"reward": mean score, "answer_length": mean tokens}; answers that cannot be scored do not count."""
        from stages.reward_scorers import Response

        self.acting.refresh()
        groups = self.sampler.generate([self.renderer.prompt_ids(p) for p in self.prompts], self.params, [[0] for _ in self.prompts])
        scores = self.scorer.score([Response(p, [{"role": "assistant", "content": g[0].text}]) for p, g in zip(self.prompts, groups)])
        known = [s for s in scores if s == s]
        return {"reward": sum(known) / len(known) if known else float("nan"), "answer_length": sum(len(g[0].ids) for g in groups) / len(groups)}


def encode_demonstrations(dataset, split: str, renderer, config, limit: int | None = None, more=None):
    """Items of a ``demonstrations/1`` split and the counts of rows dropped by reason.

    Args:
        more: (row, its encoding, its trained turns) -> further per-item values, or the reason why the row is dropped.
    """
    import json

    from stages.batching import make_item

    items, dropped = [], {"truncated": 0, "no_target": 0, "not_kept": 0}
    for row in dataset.iter_rows(split=split):
        if limit is not None and len(items) >= limit:
            break
        if row.get("kept") is False:
            dropped["not_kept"] += 1
            continue
        turns = (row.get("train_turns") or None) if config.train_on == "all_assistant" else None
        encoded = renderer.conversation(row["messages"], train=config.train_on, train_turns=turns, max_length=config.max_length)
        dropped["truncated"] += encoded.truncated
        if not encoded.n_targets:
            dropped["no_target"] += 1
            continue
        extra = more(row, encoded, turns) if more is not None else {}
        if isinstance(extra, str):
            dropped[extra] = dropped.get(extra, 0) + 1
            continue
        items.append(make_item(row["row_id"], [], [encoded.ids], [encoded.mask], weight=float(row.get("weight") or 1.0),
                               difficulty=json.loads(row.get("extra_json") or "{}").get("difficulty"), **extra))
    return items, dropped


def encode_text(dataset, split: str, renderer, config, limit: int | None = None):
    """Items of a ``text/1`` split: documents joined by the end token and cut into rows of ``max_length`` (``wrapped``)."""
    from stages.batching import make_item

    items, buffer = [], []

    def emit(ids):
        items.append(make_item(f"{split}-{len(items)}", [], [ids], [[1] * len(ids)], weight=1.0, difficulty=None))

    for row in dataset.iter_rows(columns=["text"], split=split):
        buffer += renderer.text_ids(row["text"])
        while len(buffer) >= config.max_length:
            emit(buffer[: config.max_length])
            buffer = buffer[config.max_length:]
        if limit is not None and len(items) >= limit:
            return items[:limit], {}
    if len(buffer) > 1:
        emit(buffer)
    return items, {}
