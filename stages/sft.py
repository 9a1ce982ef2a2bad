"""sft: supervised fine-tuning on demonstrations, or on plain text (``train_on=full``).

Token-level negative log-likelihood of assistant turns (catalogue ``sft.nll``, ``sft.mask``, ``sft.template``),
aggregated over the whole optimizer step. Pre-training from scratch, continued pre-training, instruction tuning and the
fit step of rejection sampling are this stage with other data. Rows whose targets were all cut off by ``max_length`` are
dropped and counted.
"""

from __future__ import annotations

import math
from collections import Counter
from contextlib import contextmanager, nullcontext
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from stages.models.memory import Role
from stages.settings import EPOCHS, ChatConfig, PolicyRowsConfig, ReadWhen, refuse_unread_in
from stages.spec import ConfigError, InputSpec, OutputSpec, StageSpec, left_out, refuse_no_rows, warn_of_cut_rows


class RowsConfig(PolicyRowsConfig, ChatConfig):
    """What training on demonstrations takes, whatever is learned from them (``sft``, ``distill``)."""

    LORA_RATE: ClassVar[float] = 10.0
    batch_size: int = Field(32, ge=1, description="Rows per optimizer step.")
    num_train_epochs: float = Field(
        1.0, gt=0, description="Passes over the training rows (texts: 1-2); max_steps wins."
    )
    max_steps: int | None = Field(
        None, ge=1, title="Max steps", description="Optimizer steps; overrides num_train_epochs."
    )
    max_length: int = Field(
        1024, ge=8, description="Tokens per row (TRL default 1024); longer rows are cut and counted."
    )
    train_on: Literal["all_assistant", "final_turn", "final_message", "full"] = Field(
        "all_assistant",
        description="Which tokens are trained (sft.mask). Rows with train_turns use those under all_assistant.",
    )
    eval_every: Annotated[int, Field(ge=0)] | Literal["epoch"] = Field(
        0,
        description=(
            "Optimizer steps between validation passes; epoch = one behind every pass over the training rows; 0 = only "
            "at the end."
        ),
    )
    eval_rows: int = Field(512, ge=0, description="Validation rows used at most.")

    def steps_between_validations(self, rows: int) -> int:
        """``eval_every`` in optimizer steps, of so many training rows."""
        return max(1, -(-rows // self.batch_size)) if self.eval_every == "epoch" else self.eval_every


class Config(RowsConfig):
    BALANCES: ClassVar[bool] = True
    JUDGES_ANSWERS: ClassVar[bool] = True
    READ_WHEN: ClassVar[ReadWhen] = (
        *RowsConfig.READ_WHEN,
        (
            ("loss_scale_factor",),
            lambda c: c.loss_agg_mode == "seq-mean-token-sum-norm",
            "only one aggregation divides by a constant; write loss_agg_mode=seq-mean-token-sum-norm",
        ),
        (
            ("curriculum_stages",),
            lambda c: c.curriculum != "none",
            "there is no curriculum; write curriculum=length or difficulty",
        ),
        (
            ("unlikelihood_window",),
            lambda c: c.unlikelihood_coef > 0,
            "nothing is made unlikely (unlikelihood_coef=0); write unlikelihood_coef=1",
        ),
    )

    new_tokens: list[str] = Field(
        default_factory=list,
        description=(
            "Special tokens that the model gets, such as [<|im_start|>,<|im_end|>] for a chat_template with these"
            " (sft.template): their rows of embedding and LM head begin as the mean of all others; what a user writes"
            " is never read as one."
        ),
    )
    loss_agg_mode: Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"] = (
        Field(
            "token-mean",
            description=(
                "Loss aggregation over the whole optimizer step (sft.nll); the last divides sums by loss_scale_factor."
            ),
        )
    )
    loss_scale_factor: float | None = Field(
        None,
        gt=0,
        title="Loss scale factor",
        description="loss_agg_mode=seq-mean-token-sum-norm: constant that divides the token sums; empty: max_length.",
    )
    loss_type: Literal["nll", "dft"] = Field(
        "nll",
        description=(
            "Loss of a trained token: -log p, or that times its own (constant) probability p (Dynamic Fine-Tuning, Wu"
            " et al. 2025)."
        ),
    )
    label_smoothing_factor: float = Field(
        0.0,
        ge=0,
        lt=1,
        description=(
            "Share of the target's place that is spread evenly over the vocabulary (Hugging Face's label smoothing); 0"
            " = off."
        ),
    )
    neftune_noise_alpha: float | None = Field(
        None,
        gt=0,
        title="NEFTune alpha",
        description=(
            "Uniform noise of up to alpha / sqrt(tokens of the row * hidden size) on the embeddings in training "
            "(NEFTune, Jain et al. 2023: 5-15); empty: none."
        ),
    )
    curriculum: Literal["none", "length", "difficulty"] = Field(
        "none",
        description=(
            "Train from easy to hard (sft.curriculum): by trained tokens, or by the rows' `difficulty` (written by"
            " superfilter, or ingested from that column)."
        ),
    )
    curriculum_stages: int = Field(
        3, ge=1, description="Parts of equal size of a curriculum, each for all its epochs, shuffled inside."
    )
    unlikelihood_coef: float = Field(
        0.0,
        ge=0,
        description=(
            "Weight of the unlikelihood of repeated tokens (sft.unlikelihood; Welleck et al. 2020: 1); 0 = off."
        ),
    )
    unlikelihood_window: int = Field(
        32,
        ge=1,
        description=(
            "Trained tokens back within the row that must not come again, unless one is the target (ours 32; "
            "Welleck et al.: all)."
        ),
    )
    self_paced_threshold: float | None = Field(
        None,
        gt=0,
        title="Self-paced threshold",
        description=(
            "Train only on rows whose mean NLL per token is below it, "
            "1/K of sft.self_paced at the "
            "first step [nats]; empty: on all. The first validation loss is a good start."
        ),
    )
    self_paced_threshold_end: float | None = Field(
        None,
        gt=0,
        title="Self-paced threshold at the end",
        description="1/K at the last step, reached by a constant factor per step; empty: constant.",
    )
    eval_prompts: int = Field(
        64,
        ge=1,
        description=(
            "Validation prompts answered at each pass and scored by the reward_model input, where there is one."
        ),
    )
    eval_completion_length: int = Field(
        128, ge=1, description="New tokens of these answers at most; cut ones score -1, as in rl and rejection."
    )

    @model_validator(mode="after")
    def _new_tokens_learn(self):
        names = [name for name in self.new_tokens if name.strip() == name and name]
        if len(set(names)) != len(self.new_tokens):
            raise ValueError(
                f"new_tokens={self.new_tokens}: write each token once, without white space around it, for example"
                " new_tokens=['<|im_start|>','<|im_end|>']"
            )
        if self.new_tokens and (self.lora_rank or self.sharding != "none"):
            held = f"lora_rank={self.lora_rank}" if self.lora_rank else f"sharding={self.sharding}"
            raise ValueError(
                f"new_tokens add rows to embedding and LM head, which have to be trained whole and in one place, and"
                f" {held} is given; write lora_rank=0 sharding=none for a first short training with new_tokens, and go"
                " on from its model"
            )
        return self

    @model_validator(mode="after")
    def _terms_fit(self):
        if self.label_smoothing_factor and (self.loss_type == "dft" or self.unlikelihood_coef):
            other, why = (
                ("loss_type=dft", "takes tokens by their own probability and lets unlikely ones go")
                if self.loss_type == "dft"
                else (f"unlikelihood_coef={self.unlikelihood_coef:g}", "pushes down tokens that smoothing pushes up")
            )
            raise ValueError(
                f"label_smoothing_factor={self.label_smoothing_factor:g} gives every token of the vocabulary a share,"
                f" and {other} {why}; write one of the two"
            )
        if self.neftune_noise_alpha is not None and self.forward == "compiled":
            raise ValueError(
                "neftune_noise_alpha adds to the embeddings in the middle of a forward that forward=compiled has"
                " already compiled; write forward=auto or forward=model"
            )
        return self

    @model_validator(mode="after")
    def _threshold_rises(self):
        if self.self_paced_threshold_end is not None and self.self_paced_threshold_end < (
            self.self_paced_threshold or float("inf")
        ):
            raise ValueError(
                "self_paced_threshold_end lets harder rows in at the end, so it is not below self_paced_threshold;"
                " write for example self_paced_threshold=2 self_paced_threshold_end=8"
            )
        return self


def roles(config, given) -> list[Role]:
    """The policy, and the reward model that judges its answers."""
    return [Role("policy", "model", trained=True, sharded=True)] + [Role("reward_model", "reward_model")] * (
        "reward_model" in given
    )


SPEC = StageSpec(
    name="sft",
    config=Config,
    gpu=True,
    parallel=True,
    roles=roles,
    inputs={
        "model": InputSpec("model", use="words", doc="Causal LM to start from."),
        "data": InputSpec(
            "dataset", kinds=("demonstrations/1", "text/1"), doc="Demonstrations; plain text rows are trained in full."
        ),
        "reward_model": InputSpec(
            "model",
            required=False,
            use="scores",
            doc="Scores greedy answers to validation prompts: select_by=reward (sft.ckpt_select).",
        ),
        "pairs": InputSpec(
            "dataset",
            kinds=("pairs/1",),
            required=False,
            doc=(
                "Held-out preference pairs that each validation pass reads: logps/chosen and logps/rejected, since"
                " learning chosen answers makes rejected ones likelier, too (sft.nll)."
            ),
        ),
    },
    outputs={"model": OutputSpec("model", role="policy"), "epoch": EPOCHS},
)


class NextToken:
    """Objective of ``sft.nll``: token log-likelihood, rows weighted by their weight.

    ``unlikelihood_coef`` adds, at every trained token, -log(1 - p) of the tokens of :func:`recent_tokens`, summed and
    then aggregated like the likelihood (``sft.unlikelihood``, Welleck et al. 2020). With a ``threshold`` a row counts
    only while its mean token loss is below it: v in min_v sum v L - threshold sum v (``sft.self_paced``, Kumar et al.
    2010, threshold = 1/K). v is decided from the forward that trains, has no gradient, and leaves the counts that
    divide alone, as in the sum above. ``loss_type`` and ``label_smoothing_factor`` say what a token's loss is
    (:func:`stages.losses.dynamic_nll`, :func:`stages.losses.smoothed_nll`); metrics and threshold stay the NLL's.
    ``noise`` (:class:`Noise`) is added to the embeddings of whatever is computed with gradients.
    """

    def __init__(
        self,
        loss_agg_mode: str,
        unlikelihood_coef: float = 0.0,
        unlikelihood_window: int = 32,
        threshold: float | None = None,
        loss_scale_factor: float | None = None,
        loss_type: str = "nll",
        label_smoothing_factor: float = 0.0,
        noise: Noise | None = None,
    ):
        from stages.losses import denominator_of

        self.mode, self.count, self.loss_scale_factor = loss_agg_mode, denominator_of(loss_agg_mode), loss_scale_factor
        self.coef, self.window, self.threshold = unlikelihood_coef, unlikelihood_window, threshold
        self.loss_type, self.smoothing, self.noise = loss_type, label_smoothing_factor, noise

    def counts(self, items):
        tokens = sum(i.n_targets * i.extra["weight"] for i in items)
        sequences = sum(i.extra["weight"] for i in items if i.n_targets)
        return {
            "tokens": tokens,
            "sequences": sequences,
            "targets": sum(i.n_targets for i in items),
            "real": sum(i.n_tokens for i in items),
            "rows": sum(1 for i in items if i.n_targets),
            "step": 1.0,
        }

    def __call__(self, model, batch):
        import torch

        from stages.direct.direct_losses import unlikelihood_loss
        from stages.losses import aggregate, dynamic_nll, smoothed_nll, token_nll
        from stages.models.modeling import column_logps, head_of, hidden_states, token_and_mean_logps, token_logps
        from stages.training import Sums

        negative, hits = {}, torch.zeros(len(batch.target_N), dtype=torch.bool, device=batch.target_N.device)
        noise = self.noise(batch, model) if self.noise is not None and torch.is_grad_enabled() else None
        head, states = head_of(model), hidden_states(model, batch, batch.src_N, noise)
        if self.coef:
            repeats, valid = recent_tokens(batch.target_N, batch.seq_N, self.window)
            columns, _ = column_logps(head, states, torch.cat([batch.target_N[:, None], repeats], 1))
            logps, wrong = columns[:, 0], columns[:, 1:].masked_fill(~valid, -1.0)
            negative["unlikelihood"] = self.coef * unlikelihood_loss(wrong).masked_fill(~valid, 0.0).sum(1)
            repeated = (wrong.detach().exp() * valid).sum()
        elif self.smoothing:
            logps, means = token_and_mean_logps(head, states, batch.target_N, hits)
        else:
            logps, _ = token_logps(head, states, batch.target_N, hits=hits)
        nll = (
            dynamic_nll(logps)
            if self.loss_type == "dft"
            else smoothed_nll(logps, means, self.smoothing)
            if self.smoothing
            else token_nll(logps)
        )
        weights = torch.tensor([i.extra["weight"] for i in batch.items], device=logps.device)
        trained = torch.tensor(float(len(logps)))
        metrics = {
            "target_nll": (-logps.detach().sum(), "targets"),
            "target_fraction": (trained, "real"),
            "trained_tokens": (trained, "step"),
            "truncated_fraction": (
                torch.tensor(float(sum(bool(i.extra.get("truncated")) for i in batch.items))),
                "rows",
            ),
            **(
                {"repeat_probability": (repeated, "targets")}
                if self.coef
                else {"mean_token_accuracy": (hits.sum().float(), "targets")}
            ),
        }
        if self.threshold is not None:
            lengths = batch.mask_SL.sum(1)
            easy = (lengths > 0) & (batch.padded(-logps.detach()).sum(1) < self.threshold * lengths)
            weights = weights * easy
            metrics["admitted"] = (easy.sum().float(), "rows")
        terms = {
            name: (
                aggregate(
                    batch.padded(values) * weights[:, None],
                    batch.mask_SL,
                    self.mode,
                    self.loss_scale_factor,
                    counted=False,
                )[0],
                self.count,
            )
            for name, values in {"nll": nll, **negative}.items()
        }
        return Sums(terms, metrics)


def recent_tokens(target_N, seq_N, window: int):
    """Negative tokens of ``sft.unlikelihood``: for each trained token, the ``window`` trained tokens before it in the
    same response that are not the token itself, each of them once.

    Args:
        target_N, seq_N: trained tokens in order and the response of each, as in ``Batch``.

    Returns:
        (tokens ``[N, window]``, valid ``[N, window]``); what is not valid holds the target.
    """
    import torch

    n = len(target_N)
    at = torch.arange(n, device=target_N.device)
    window = max(1, min(window, int(torch.bincount(seq_N).max()) - 1)) if n else 1
    order = torch.argsort(seq_N * (int(target_N.max()) + 1 if n else 1) + target_N, stable=True)
    ordered_token, ordered_seq = target_N[order], seq_N[order]
    # where the same token comes next in the response
    again = torch.full((n,), n, dtype=torch.long, device=target_N.device)
    same = (ordered_token[1:] == ordered_token[:-1]) & (ordered_seq[1:] == ordered_seq[:-1])
    again[order[:-1]] = torch.where(same, order[1:], n)
    before = at[:, None] - torch.arange(1, window + 1, device=at.device)
    valid = before >= 0
    before = before.clamp(min=0)
    # not the target, and not there again nearer by
    valid &= (seq_N[before] == seq_N[:, None]) & (again[before] > at[:, None])
    return torch.where(valid, target_N[before], target_N[:, None]), valid


class Noise:
    """Embedding noise of NEFTune (Jain et al. 2023): each number uniform within alpha / sqrt(L H), L tokens of the row,
    H hidden size.

    Drawn anew for every row of every optimizer step from a generator of its own, so neither micro-batches nor resuming
    change it.

    Args:
        rng: ``rng(purpose, *counters)``, counter-based.
    """

    def __init__(self, alpha: float, rng):
        self.alpha, self.rng, self.step = alpha, rng, 0

    def __call__(self, batch, model):
        """Noise of a batch's tokens ``[U, H]``, float32."""
        import numpy as np
        import torch

        from stages.batching import size

        width = model.get_input_embeddings().weight.shape[-1]
        rows = [
            (self.rng("neftune", self.step, item.row_id).random((size(item), width), dtype=np.float32) * 2 - 1)
            * (self.alpha / (size(item) * width) ** 0.5)
            for item in batch.items
        ]
        return torch.as_tensor(np.concatenate(rows).astype(np.float32)).to(batch.ids_U.device)


class Noisy:
    """A source whose steps tell the noise which of them they are."""

    def __init__(self, source, noise: Noise):
        self._source, self._noise, self.total_steps = source, noise, source.total_steps

    def __getattr__(self, name):
        return getattr(self._source, name)

    def items(self, step: int):
        self._noise.step = step
        return self._source.items(step)


class SelfPaced:
    """A source that raises the objective's threshold from step to step (``sft.self_paced``): 1/K grows by a constant
    factor.
    """

    def __init__(self, stage, source, objective, config):
        self._stage, self._source, self._objective, self.total_steps = stage, source, objective, source.total_steps
        self._start, self._end = (
            config.self_paced_threshold,
            config.self_paced_threshold_end or config.self_paced_threshold,
        )

    def __getattr__(self, name):
        return getattr(self._source, name)

    def items(self, step: int):
        done = step / max(1, self.total_steps - 1)
        self._objective.threshold = self._start * (self._end / self._start) ** done
        return self._source.items(step)

    def after_step(self, step: int, metrics):
        if metrics.get("admitted") == 0:
            self._stage.warn(
                "self_paced_nothing",
                "In some steps no row was easier than self_paced_threshold, so they trained nothing (metric "
                "admitted). "
                "Write a higher self_paced_threshold; the first validation loss is a good start.",
            )
        return {**self._source.after_step(step, metrics), "self_paced_threshold": self._objective.threshold}

    @contextmanager
    def all_rows(self):
        """Validation counts every row."""
        threshold, self._objective.threshold = self._objective.threshold, None
        try:
            yield
        finally:
            self._objective.threshold = threshold


#: Settings that are read with an input or with some rows only, as ``OptimizerConfig.READ_WHEN``: of the stage.
READ_OF_INPUTS: ReadWhen = (
    (
        ("eval_prompts", "eval_completion_length"),
        lambda s: s.has("reward_model"),
        "no answers are judged without the input reward_model; give it",
    ),
    (
        ("eval_every",),
        lambda s: s.config.eval_rows > 0 or s.has("reward_model"),
        "eval_rows=0 keeps no validation rows; write eval_rows=500, or give the input reward_model",
    ),
    (
        ("train_on",),
        lambda s: s.dataset("data").kind != "text/1" or s.config.train_on == "full",
        "rows of plain text have no turns and are trained in full; write train_on=full",
    ),
)


def run(stage):
    from stages.chat import PLAIN_TEMPLATE, stage_renderer
    from stages.models.epochs import epochs_of
    from stages.models.modeling import policy_to_train
    from stages.models.new_tokens import add_rows
    from stages.reporting.curves import training_report
    from stages.preflight import preflight
    from stages.samples import Samples
    from stages.training import Trainer, fit
    from stages.validation_alarms import telling

    config, dataset = stage.config, stage.dataset("data")
    refuse_unread_in(stage, READ_OF_INPUTS)
    full_text = dataset.kind == "text/1"
    if full_text and config.chat_template_given:
        raise ConfigError(
            f"sft: the rows of {dataset.name} are plain text, which no chat template shows; leave chat_template and"
            " chat_template_kwargs out"
        )
    renderer = stage_renderer(stage)
    if not full_text and renderer.tokenizer.chat_template == PLAIN_TEMPLATE:
        stage.warn(
            "no_chat_template",
            "The model has no chat template of its own, so conversations are shown as lines that begin with Human: and"
            " Assistant:, and the trained model is saved with that template. Set chat_template to a Jinja file or a"
            " model directory for another one.",
        )
    model = policy_to_train(stage)
    if config.new_tokens:
        add_rows(model, renderer.tokenizer, config.new_tokens)
    encode = encode_text if full_text else encode_demonstrations
    train, dropped = encode(dataset, "train", renderer, config)
    warn_of_unseen_tokens(stage, renderer, train)
    validation, _ = encode(dataset, "validation", renderer, config, limit=config.eval_rows)
    stage.log(
        f"{len(train)} training rows, {sum(i.n_tokens for i in train)} tokens, "
        f"{sum(i.n_targets for i in train)} of them trained; {len(validation)} validation rows{left_out(dropped)}"
    )
    warn_of_cut_rows(stage, dropped, len(train))
    refuse_no_rows(dropped, len(train))
    source = rows_in_order(stage, train, config)
    answers = Answers(stage, dataset, renderer, model) if stage.has("reward_model") else None
    watched = watched_pairs(stage, renderer)
    noise = None if config.neftune_noise_alpha is None else Noise(config.neftune_noise_alpha, stage.rng)
    objective = NextToken(
        config.loss_agg_mode,
        config.unlikelihood_coef,
        config.unlikelihood_window,
        loss_scale_factor=config.loss_scale_factor or config.max_length,
        loss_type=config.loss_type,
        label_smoothing_factor=config.label_smoothing_factor,
        noise=noise,
    )
    if config.self_paced_threshold is not None:
        source = SelfPaced(stage, source, objective, config)
    if noise is not None:
        source = Noisy(source, noise)
    trainer = Trainer(model, objective, config, source.total_steps, stage.device)
    preflight(stage, trainer, train, config.batch_size, renderer, completions_end=not full_text)

    def evaluate():
        with source.all_rows() if config.self_paced_threshold is not None else nullcontext():
            return {
                **trainer.evaluate(validation),
                **(answers.judge() if answers else {}),
                **(pair_logps(model, watched, config, stage.device) if watched else {}),
            }

    samples = Samples(stage, model, renderer, dataset)
    epochs = epochs_of(stage, model, renderer.tokenizer, source)
    before, final = fit(
        stage,
        trainer,
        source,
        epochs=epochs,
        eval_every=config.steps_between_validations(len(train)),
        evaluate=telling(stage, evaluate) if validation or answers or watched else None,
    )
    samples.publish(model, renderer.tokenizer, epochs)
    summary = {
        "steps": trainer.step_index,
        "rows": len(train),
        "skipped_steps": trainer.skipped,
        **{f"dropped/{k}": v for k, v in dropped.items()},
    }
    if final:
        summary |= (
            {"validation/nll": final["target_nll"], "validation/nll_before": before["target_nll"]}
            if "target_nll" in final
            else {}
        )
        summary |= (
            {"validation/reward": final["reward"], "validation/reward_before": before["reward"]}
            if "reward" in final
            else {}
        )
        for name in ("logps/chosen", "logps/rejected"):
            if name in final:
                summary |= {f"validation/{name}": final[name], f"validation/{name}_before": before[name]}
    stage.summary(summary)
    training_report(stage, "Supervised fine-tuning", summary, samples.block())


def rows_in_order(stage, items, config):
    """The training source: shuffled rows, or a curriculum's parts one after the other."""
    from stages.selection import order_by_difficulty
    from stages.training import ShuffledRows, StagedRows

    if config.curriculum == "none" or not items:
        return ShuffledRows(stage, items, config.batch_size, config.num_train_epochs, config.max_steps)
    missing = [i.row_id for i in items if config.curriculum == "difficulty" and i.extra["difficulty"] is None]
    if missing:
        raise ConfigError(
            f"curriculum=difficulty needs a difficulty for every row, and {len(missing)} have none (first"
            f" {missing[0]}); ingest data with a `difficulty` column, or write curriculum=length"
        )
    if config.curriculum == "difficulty" and (odd := [i for i in items if number_of(i.extra["difficulty"]) is None]):
        raise ConfigError(
            f"curriculum=difficulty goes from low to high numbers, and {len(odd)} rows have another difficulty (first"
            f" {odd[0].row_id}: {odd[0].extra['difficulty']!r}); ingest data whose `difficulty` is a number, or write"
            " curriculum=length"
        )
    difficulty = [i.n_targets if config.curriculum == "length" else number_of(i.extra["difficulty"]) for i in items]
    return StagedRows(stage, items, order_by_difficulty(difficulty, config.curriculum_stages)[1], config)


class Answers:
    """Greedy answers of the trained model to validation prompts, scored by a reward model (``sft.ckpt_select``): cut and
    empty ones by the rule of ``rl`` and ``rejection`` (``rm.score_rules``).
    """

    def __init__(self, stage, dataset, renderer, model):
        from stages.reward.components import RewardComponent
        from stages.reward_models.reward_scorers import load_scorer
        from stages.decoding.sampler import Sampler
        from stages.decoding.sampling import SamplingParams
        from stages.models.sharding import Acting, asked

        config = stage.config
        if dataset.kind != "demonstrations/1":
            raise ConfigError(
                "sft: a reward_model judges answers to conversations, and plain text has none; leave the reward_model"
                " input out"
            )
        self.prompts = []
        for row in dataset.iter_rows(split="validation"):
            turns = [i for i, m in enumerate(row["messages"]) if m["role"] == "assistant"]
            if turns and turns[0] and len(self.prompts) < config.eval_prompts:
                self.prompts.append({**row, "prompt": row["messages"][: turns[0]]})
        if not self.prompts:
            raise ConfigError(
                "sft: a reward_model needs validation rows to answer; give a dataset with a validation split, or leave"
                " the reward_model input out"
            )
        self.stage, self.component = stage, RewardComponent(kind="model")
        self.renderer, self.scorer = (
            renderer,
            load_scorer(stage.path("reward_model"), stage.device, frozen=stage.config.frozen_dtype),
        )
        if self.scorer.relative:
            raise ConfigError(
                "sft: this reward_model compares answers to one prompt with each other, so the single answer of a"
                " validation pass always gets 0.5; give one that scores each answer by itself (objective=bt), or leave"
                " the reward_model input out"
            )
        self.acting = Acting(model, asked(config))
        self.sampler = Sampler(self.acting.model, renderer.tokenizer)
        self.params = SamplingParams(
            temperature=0.0, max_new_tokens=config.eval_completion_length, stop_ids=renderer.stop_ids
        )

    def judge(self) -> dict[str, float]:
        """{"reward": mean score, "answer_length": mean tokens, "stop_rate": share that ends by itself}; answers that
        cannot be scored do not count, and the reward model is not asked about unfinished ones.
        """
        from stages.reward.scorers import shown_to
        from stages.reward.verdicts import Verdict

        self.acting.refresh()
        groups = self.sampler.generate(
            [self.renderer.prompt_ids(row["prompt"]) for row in self.prompts], self.params, [[0] for _ in self.prompts]
        )
        self.sampler.release()
        answers = [group[0] for group in groups]
        shown = [
            shown_to(
                None,
                self.component,
                {"prompt_row": row, "completion_text": answer.text, "finish_reason": answer.finish_reason},
            )
            for row, answer in zip(self.prompts, answers)
        ]
        found = iter(self.scorer.score([one for one in shown if not isinstance(one, Verdict)]))
        scores = [one.value if isinstance(one, Verdict) else next(found) for one in shown]
        known = [s for s in scores if s == s]
        stop_rate = sum(answer.finish_reason in ("eos", "stop") for answer in answers) / len(answers)
        if stop_rate < 0.9:
            self.stage.warn(
                "answers_truncated",
                "In some validation passes more than a tenth of the answers hit"
                f" eval_completion_length={self.params.max_new_tokens} and count {self.component.cut_reward:g} in"
                " validation/reward, whatever they say (validation/stop_rate). Raise eval_completion_length, or train"
                " the stop token.",
            )
        return {
            "reward": sum(known) / len(known) if known else float("nan"),
            "answer_length": sum(len(answer.ids) for answer in answers) / len(answers),
            "stop_rate": stop_rate,
        }


def warn_of_unseen_tokens(stage, renderer, items) -> None:
    """Warn of ``new_tokens`` that no training row holds: their rows learn nothing of what they stand for."""
    wanted = dict(zip(renderer.tokenizer.convert_tokens_to_ids(list(stage.config.new_tokens)), stage.config.new_tokens))
    for item in items if wanted else ():
        for ids in (item.prompt, *item.responses):
            for seen in wanted.keys() & set(ids.tolist()):
                del wanted[seen]
        if not wanted:
            return
    if wanted:
        stage.warn(
            "unseen_new_tokens",
            f"No training row holds {', '.join(wanted.values())}, which new_tokens adds. Compare their spelling with"
            " that of the chat template (chat_template=FILE), or leave them out.",
        )


def watched_pairs(stage, renderer) -> list:
    """Items of the held-out rows of the input ``pairs``, chosen and rejected answer each; [] without that input.

    Raises:
        ConfigError: no pair is held out, or none is left of them.
    """
    from stages.pairs import encode_pairs

    if not stage.has("pairs"):
        return []
    config, pairs = stage.config, stage.dataset("pairs")
    items, dropped = encode_pairs(pairs, "validation", renderer, config.max_length, config.eval_rows)
    if not items:
        raise ConfigError(
            f"sft: the input pairs has no validation rows that can be read{left_out(dropped)}, with"
            f" eval_rows={config.eval_rows} and max_length={config.max_length}; give pairs with a validation split, or"
            " leave the input out"
        )
    return items


def pair_logps(model, items, config, device: str) -> dict[str, float]:
    """{"logps/chosen", "logps/rejected"}: mean log-probability of the answers of each side, sums over their tokens
    [nats] (``sft.nll``).
    """
    from stages.batching import per_response
    from stages.models.modeling import target_logps
    from stages.training import products

    def compute(batch):
        with products(config, device):
            logps = target_logps(model, batch)[0]
        sums = logps.new_zeros(batch.mask_SL.shape[0]).index_add(0, batch.seq_N, logps)
        return sums.tolist()

    found = per_response(items, config.micro_batch_tokens, device, compute, model)
    return {
        f"logps/{name}": math.fsum(values[side] for values in found) / len(found)
        for side, name in enumerate(("chosen", "rejected"))
    }


def encode_demonstrations(dataset, split: str, renderer, config, limit: int | None = None, more=None):
    """Items of a ``demonstrations/1`` split and the counts of rows dropped by reason.

    Args:
        more: (row, its encoding, its trained turns) -> further per-item values, or the reason why the row is dropped.
    """
    from stages.batching import make_item, row_weight
    from stages.chat import rendering
    from stages.running.parallel import items_of

    def of(rows):
        items, dropped = [], Counter()
        for row in rows:
            if row.get("kept") is False:
                dropped["not_kept"] += 1
                continue
            turns = (row.get("train_turns") or None) if config.train_on == "all_assistant" else None
            with rendering(row):
                encoded = renderer.conversation(
                    row["messages"], train=config.train_on, train_turns=turns, max_length=config.max_length
                )
                extra = more(row, encoded, turns) if more is not None and encoded.n_targets else {}
            dropped["truncated"] += encoded.truncated
            if not encoded.n_targets:
                dropped["no_target"] += 1
            elif isinstance(extra, str):
                dropped[extra] += 1
            else:
                items.append(
                    make_item(
                        row["row_id"],
                        [],
                        [encoded.ids],
                        [encoded.mask],
                        weight=row_weight(row),
                        truncated=encoded.truncated,
                        difficulty=difficulty_of(row),
                        **extra,
                    )
                )
        return items, dropped

    items, dropped = items_of(dataset.iter_rows(split=split), of, expected=dataset.rows_of(split), limit=limit)
    return items, {"truncated": 0, "no_target": 0, "not_kept": 0, **dropped}


def number_of(value) -> float | None:
    """A number, also one that is written as text; None for anything else."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return None if math.isnan(number) else number


def difficulty_of(row: dict):
    """How hard a row is said to be: its column ``difficulty``, which stages write (superfilter), else that of the file
    it was ingested from; None where neither says.
    """
    import json

    own = row.get("difficulty")
    return json.loads(row.get("extra_json") or "{}").get("difficulty") if own is None else own


def encode_text(dataset, split: str, renderer, config, limit: int | None = None):
    """Items of a ``text/1`` split: documents joined by the end token and cut into rows of ``max_length`` (``wrapped``).
    All tokens are trained but the one that begins a document (``sft.mask``: full)."""
    import numpy as np

    from stages.batching import make_item
    from stages.running.parallel import items_of

    rows = dataset.iter_rows(columns=["text"], split=split)
    documents = (renderer.text_ids(row["text"]) for row in rows)
    if limit is None:
        documents, _ = items_of(
            rows,
            lambda part: ([np.asarray(renderer.text_ids(row["text"]), np.int32) for row in part], {}),
            expected=dataset.rows_of(split),
        )
    items, buffer, starts = [], [], int(renderer.tokenizer.bos_token_id is not None)

    def emit(tokens):
        ids, mask = zip(*tokens)
        items.append(make_item(f"{split}-{len(items)}", [], [ids], [mask], weight=1.0, difficulty=None))

    for ids in documents:
        buffer += zip(ids, [0] * starts + [1] * (len(ids) - starts))
        while len(buffer) >= config.max_length:
            emit(buffer[: config.max_length])
            buffer = buffer[config.max_length :]
        if limit is not None and len(items) >= limit:
            return items[:limit], {}
    if len(buffer) > 1:
        emit(buffer)
    return items, {}
