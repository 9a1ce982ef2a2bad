"""reward_model: a reward model from labelled answers, in any form that labels come in.

    pairs/1      bt, margin, soft_label (ranking losses), pairwise (both answers in one context), t2t_point, t2t_pair (label words),
                 control_tokens (each answer behind GOOD: against itself behind BAD:)
    rankings/1   kwise_pairs, plackett_luce
    ratings/1    regression, value
    trajectories/1   regression: every step's observation, action and next observation (``rm.agentic``; ranked trajectories are pairs/1)
    unpaired/1   pointwise_bce, control_tokens, orm (every token of an answer), value
    stepwise/1   prm (every step of a solution)

``objective=auto`` takes the natural one of the data. The backbone may be any decoder or encoder, with its own tokenizer
and template. After training the scores are anchored (``rm.calibrate``) and the model is judged on held-out rows
(``rm.eval``) through the same scorer that rejection sampling, RL and evaluation use.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, Literal

from pydantic import Field, model_validator

from stages.models.memory import Role
from stages.reward_models.reward_objectives import COMPARING, KINDS, refuse_unread
from stages.settings import EPOCHS, ChatConfig, EpochsConfig, OptimizerConfig, ReadWhen, refuse_unread_in
from stages.spec import ConfigError, InputSpec, OutputSpec, StageSpec, left_out, refuse_no_rows, warn_of_cut_rows


class Config(EpochsConfig, ChatConfig):
    READ_WHEN: ClassVar[ReadWhen] = (
        *OptimizerConfig.READ_WHEN,
        (
            ("last_layers",),
            lambda c: c.train_layers == "head_and_last",
            "the trained layers are not counted from the last; write train_layers=head_and_last",
        ),
        (
            ("curriculum_stages",),
            lambda c: c.curriculum not in ("none", "stage_index"),
            "there is no curriculum that is cut into stages; write for example curriculum=margin",
        ),
        (
            ("outcome_token",),
            lambda c: c.outcome_head == "gain_bias" or c.objective not in ("auto", "orm"),
            "a linear head reads no token's logit; write outcome_head=gain_bias",
        ),
        (
            ("neutral_as",),
            lambda c: c.step_classes == 3 or c.objective not in ("auto", "prm"),
            "with two classes a neutral step is a right one; write step_classes=3",
        ),
    )

    objective: Literal[
        "auto",
        "bt",
        "margin",
        "soft_label",
        "kwise_pairs",
        "plackett_luce",
        "pointwise_bce",
        "control_tokens",
        "regression",
        "orm",
        "value",
        "prm",
        "pairwise",
        "t2t_point",
        "t2t_pair",
    ] = Field(
        "auto",
        description=(
            "What is learned; auto: bt from pairs, kwise_pairs from rankings, regression from ratings, pointwise_bce"
            " from labels, prm from steps (catalogue section B)."
        ),
    )
    learning_rate: float = Field(1e-5, gt=0, description="Peak learning rate (ours 1e-5; InstructGPT 9e-6; TRL 1e-4).")
    batch_size: int = Field(32, ge=1, description="Rows (pairs, rankings, solutions) per optimizer step.")
    num_train_epochs: float = Field(
        1.0, gt=0, description="Passes over the rows; reward models overfit after one (texts)."
    )
    max_steps: int | None = Field(
        None, ge=1, title="Max steps", description="Optimizer steps; overrides num_train_epochs."
    )
    max_length: int = Field(
        1024, ge=8, description="Tokens of prompt and longer response; see the ingest report for lengths."
    )
    split: str = Field(
        "train",
        description=(
            "Split to learn from; rm_a or rm_b for train-RM / test-RM studies (ingest halves=true; rm.overopt)."
        ),
    )
    pooling: Literal["auto", "last", "mean", "cls"] = Field(
        "auto",
        description=(
            "State the head reads: last token (decoders), mean over tokens, or the encoder's own pooled head; auto:"
            " last / mean."
        ),
    )
    init_head: Literal["fresh", "keep"] = Field(
        "fresh", description="keep: go on from a reward model's head (pre-trained preference models, rm.pmp)."
    )
    train_layers: Literal["all", "head", "head_and_last"] = Field(
        "all", description="Trainable set: everything, the head, or head and last_layers."
    )
    last_layers: int = Field(2, ge=1, description="Layers trained with train_layers=head_and_last.")
    facts: bool = Field(
        False,
        description=(
            "Append each row's facts (column or extra_json entry `facts`) to what the model reads (rm.factual)."
        ),
    )

    use_margin: bool = Field(
        False, description="pairs: subtract the rows' margin inside the loss (rm.margin; Llama 3 dropped it)."
    )
    use_soft_labels: bool = Field(False, description="pairs: use label_prob as P(chosen preferred) (rm.soft_label).")
    label_smoothing: float = Field(0.0, ge=0, lt=0.5, description="pairs: probability that a label is flipped.")
    center_rewards_coefficient: float = Field(
        0.0, ge=0, description="pairs: c * mean((r_w + r_l)^2) (TRL; 0.01 in the paper)."
    )
    lm_loss_weight: float = Field(
        0.0,
        ge=0,
        description="bt family, orm: also the LM loss on the (chosen) answer, LM head kept in training (Cobbe: 1).",
    )
    curriculum: Literal["none", "margin", "score_gap", "rank_gap", "confidence", "stage_index"] = Field(
        "none",
        description="pairs: train from easy (large value) to hard; stage_index: stages as given (rm.curriculum).",
    )
    curriculum_stages: int = Field(3, ge=1, description="Stages of equal size of a curriculum.")
    pair_weighting: Literal["per_prompt", "per_pair"] = Field(
        "per_prompt", description="kwise_pairs: mean over prompts of mean over pairs, or over pairs."
    )
    tie_policy: Literal["error", "drop_item", "use_pairs"] = Field(
        "error", description="plackett_luce: what to do with equal ranks."
    )
    top_ranks: int | None = Field(
        None, ge=1, title="Top ranks", description="plackett_luce: only the first ranks are certain (partial rankings)."
    )
    normalise_by_k: bool = Field(False, description="plackett_luce: divide each ranking's loss by K - 1.")
    attributes: list[str] = Field(
        default_factory=list, description="regression: one output per aspect of the ratings; empty: the overall score."
    )
    attribute_weights: list[float] = Field(
        default_factory=list, description="regression: weights of the attributes in the score, sum 1; empty: equal."
    )
    regression_loss: Literal["mse", "huber"] = Field(
        "mse", description="regression: squared, or linear beyond one standard deviation."
    )
    centre_annotators: bool = Field(
        False, description="regression: move each annotator's mean rating to the overall mean."
    )
    balance: bool = Field(
        True, description="orm: equally many right and wrong answers per prompt; prompts with one kind are left out."
    )
    outcome_head: Literal["linear", "gain_bias"] = Field(
        "linear", description="orm: linear head, or gain and bias on one vocabulary logit (Cobbe et al.)."
    )
    outcome_token: str | None = Field(
        None, title="Outcome token", description="orm, gain_bias: the reserved token; empty: the pad token."
    )
    step_classes: Literal[2, 3] = Field(2, description="prm: wrong / right, or wrong / neutral / right (PRM800K).")
    step_separator: str = Field("", description="prm: text that ends a step; empty: the rows' own separator.")
    after_first_error: Literal["drop", "keep"] = Field(
        "drop", description="prm: labels behind the first wrong step are dropped or used."
    )
    hard_labels: bool = Field(False, description="prm: use hard labels although rows have soft ones (rm.prm_rollout).")
    neutral_as: Literal["positive", "negative"] = Field(
        "positive", description="prm: what a neutral step counts as in the score."
    )
    aggregation: Literal["auto", "prod", "min", "mean", "last"] = Field(
        "auto", description="Score of a solution from its steps (prm: prod) or tokens (orm: last)."
    )
    label_words: list[str] = Field(
        default_factory=list,
        description=(
            "t2t_point: good and bad word (Good, Bad); t2t_pair: the letters (A, B); control_tokens: the words before an"
            " answer (GOOD, BAD)."
        ),
    )
    label_request: Literal["sections", "slic"] = Field(
        "sections",
        description=(
            "t2t_point, t2t_pair: what the model reads before the label: [CONTEXT], [RESPONSE] ... as sections (RSO),"
            " or one line, [Context] ... [Summary] ... (SLiC-HF, data.t2t)."
        ),
    )
    normalise_over_labels: bool = Field(
        False, description="t2t_point: P(Good) / (P(Good) + P(Bad)) instead of P(Good)."
    )

    anchor: Literal["auto", "none", "chosen", "demonstrations", "generations"] = Field(
        "auto",
        description=(
            "Answers whose mean score becomes 0 (rm.calibrate): chosen ones, or the `anchor` input; auto: the `anchor`"
            " input where there is one, else chosen for rankings and none for others."
        ),
    )
    replay_fraction: float = Field(
        0.1,
        gt=0,
        lt=1,
        description=(
            "Share of the training rows that are drawn from the `replay` input (iterative GRPO .1); fewer where it has"
            " fewer."
        ),
    )
    drift_alarm: float = Field(
        0.05,
        ge=0,
        le=1,
        description=(
            "Fall in accuracy of the `previous` model on these rows that warns (rm.refresh; catalogue H: 5 points)."
        ),
    )
    eval_every: int = Field(
        0, ge=0, description="Optimizer steps between validation passes; 0 = only at start and end."
    )
    eval_rows: int = Field(2000, ge=0, description="Held-out rows used at most.")
    spoiled_fraction: float = Field(
        0.0,
        ge=0,
        lt=1,
        description=(
            "pairs: share of the training rows that set a chosen answer over a spoiled copy of it, by the probes of the"
            " report (reward.hack_probes): what the warning reward_model_fooled advises before anything is optimised"
            " against the model. 0 = none."
        ),
    )
    spoiled_by: list[str] = Field(
        default_factory=list,
        description=(
            "pairs: the probes that spoil, for example [repeated,padded]; empty: all. What is left out shows in the"
            " report how the model takes what it did not see."
        ),
    )
    probe_pairs: int = Field(
        64, ge=0, description="Held-out pairs on which probes and surface changes are tried at the end; 0 = none."
    )

    @model_validator(mode="after")
    def _possible(self):
        if self.attribute_weights and (
            len(self.attribute_weights) != len(self.attributes) or abs(sum(self.attribute_weights) - 1) > 1e-6
        ):
            raise ValueError(
                "attribute_weights needs one weight per attribute, with sum 1; write for example attributes=[a,b]"
                " attribute_weights=[0.7,0.3]"
            )
        if self.label_words and (len(self.label_words) != 2 or self.label_words[0] == self.label_words[1]):
            raise ValueError("label_words are two different words; write for example label_words=[Good,Bad]")
        if self.aggregation == "prod" and self.objective == "orm":
            raise ValueError(
                "aggregation=prod multiplies the steps of a prm; for the tokens of an orm write aggregation=last, mean or min"
            )
        if self.spoiled_by:
            from stages.measures.reward_model import PROBES

            if unknown := sorted(set(self.spoiled_by) - set(PROBES)):
                raise ValueError(f"spoiled_by={unknown}: there is no such probe; write some of {', '.join(PROBES)}")
        if self.spoiled_by and not self.spoiled_fraction:
            raise ValueError(
                "spoiled_by names probes, but spoiled_fraction=0 adds none of them; write for example"
                " spoiled_fraction=0.1"
            )
        if self.spoiled_fraction and self.curriculum != "none":
            raise ValueError(
                "spoiled_fraction adds pairs that have no difficulty; write curriculum=none, or spoiled_fraction=0"
            )
        if self.objective != "auto":
            refuse_unread(self.objective, self)
        return self


#: Settings that are read with some inputs only, as ``OptimizerConfig.READ_WHEN``: of the stage.
READ_OF_INPUTS: ReadWhen = (
    (
        ("replay_fraction",),
        lambda s: bool(s.many("replay")),
        "there are no earlier rows to train on again; give the input replay",
    ),
    (("drift_alarm",), lambda s: s.has("previous"), "no earlier reward model is measured; give the input previous"),
)


def reading(config: Config, *, replay, previous) -> Config:
    """The settings of a step of a recipe that has these inputs or has not (None, {}): what only another step of its
    rounds reads is as in a fresh configuration.
    """
    given = {"replay_fraction": bool(replay), "drift_alarm": previous is not None}
    return config.model_copy(update={name: Config.model_fields[name].default for name, so in given.items() if not so})


def kept_head(config: Config) -> Config:
    """The settings for going on from a reward model: its head is kept. Label words have none of their own, and the
    language model's is always kept.
    """
    return config if config.objective.startswith("t2t") else config.model_copy(update={"init_head": "keep"})


#: Answers of the anchor that are scored where eval_rows=0 keeps no held-out rows: the zero point needs them all the
#: same.
ANCHOR_ROWS = 2000

SPEC = StageSpec(
    name="reward_model",
    config=Config,
    gpu=True,
    parallel=True,
    roles=lambda config, given: [Role("reward model", "model", trained=True, sharded=True, headless=True)],
    inputs={
        "model": InputSpec(
            "model",
            doc=(
                "Backbone: the SFT model (default choice), a base model, a smaller one, an encoder, or a reward model"
                " to go on from."
            ),
        ),
        "data": InputSpec(
            "dataset",
            kinds=KINDS,
            doc="Pairs, rankings, ratings, labels or steps; validation and test splits judge the model.",
        ),
        "anchor": InputSpec(
            "dataset",
            kinds=("demonstrations/1", "candidates/1"),
            required=False,
            doc="Answers whose mean score becomes 0 (anchor=demonstrations or generations).",
        ),
        "replay": InputSpec(
            "dataset",
            kinds=KINDS,
            required=False,
            many=True,
            doc="Earlier rows of the same kind, a share of which is trained on again (replay_fraction).",
        ),
        "previous": InputSpec(
            "model",
            required=False,
            doc="The reward model that these rows, from the newer policy, replace: its drift is measured.",
        ),
    },
    outputs={"model": OutputSpec("model", role="reward"), "epoch": replace(EPOCHS, role="reward")},
)


class Setup:
    """One reward model in training: its row, settings, network and reader."""

    def __init__(self, stage, dataset):
        from stages.models.modeling import ModelError, adapted, load_policy, note_types, waits
        from stages.reward_models.reward_heads import (
            add_gain_bias,
            check_head,
            keep_lm_head,
            load_reward_model,
            new_reward_model,
            read_card,
            reader_for,
            resolve_pooling,
        )
        from stages.reward_models.reward_losses import RewardLoss
        from stages.reward_models.reward_objectives import objective_for

        config, path = stage.config, stage.path("model")
        in_shards = waits(config, path)
        self.stage, self.row = stage, objective_for(config.objective, dataset.kind)
        refuse_unread(self.row.name, config)  # what objective=auto stands for is known now
        self.config = config.model_copy(update={"objective": self.row.name, **dict(self.row.settings)})
        if self.row.reads == "labels":
            self.model, self.pooling, self.token = load_policy(path, stage.device, in_shards=in_shards), "last", None
        else:
            outputs = (
                self.config.step_classes
                if self.row.name == "prm"
                else max(1, len(self.config.attributes))
                if self.row.name == "regression"
                else 1
            )
            if config.init_head == "keep":
                check_head(path, outputs)
            self.model = (
                new_reward_model(path, stage.device, stage.seed_for("head"), outputs=outputs, in_shards=in_shards)
                if config.init_head == "fresh"
                else load_reward_model(path, stage.device, outputs=outputs, in_shards=in_shards)
            )
            self.pooling = resolve_pooling(config.pooling, self.model, self.row.reads)
        note_types(stage, path)
        if config.chat_template_given and getattr(self.model, "reads_both_ways", False):
            raise ConfigError(
                "reward_model: an encoder reads texts without a chat template; leave chat_template and"
                " chat_template_kwargs out"
            )
        self.reader = reader_for(path, self.model, config.max_length, self.pooling, config.template())
        gain = self.row.name == "orm" and config.outcome_head == "gain_bias"
        if gain and config.sharding == "full":
            raise ModelError(
                "outcome_head=gain_bias trains two single numbers, which cannot be split over devices; write"
                " outcome_head=linear, or sharding=none."
            )
        self.lm_head = keep_lm_head(self.model, path) if gain or self.config.lm_loss_weight else None
        if self.config.lm_loss_weight and self.pooling == "mean":
            raise ModelError(
                "lm_loss_weight needs the prompt apart from the response, which pooling=mean merges; write pooling=last."
            )
        self.objective = RewardLoss(
            self.row, self.config, self.pooling, self.lm_head if self.config.lm_loss_weight else None
        )
        self.token = None
        if gain:
            tokenizer = self.reader.tokenizer
            self.token = (
                tokenizer.convert_tokens_to_ids(config.outcome_token)
                if config.outcome_token
                else tokenizer.pad_token_id
            )
            if self.token is None:
                raise ModelError(
                    f"outcome_token={config.outcome_token!r} is not in the vocabulary; write a token of the model's"
                    " tokenizer."
                )
            self.objective.read = add_gain_bias(self.model, self.lm_head, self.token)
        #: Constant term of a head that was trained as gain and bias, which a linear head has no place for.
        self.offset = 0.0
        if self.row.name == "orm" and config.init_head == "keep":
            self.offset, read = read_card(path).options.get("offset", 0.0), self.objective.read
            self.objective.read = lambda *args: read(*args) + self.offset
        freeze_layers(self.model, config, self.row.reads)
        self.model = adapted(self.model, stage, path, lambda model: with_adapter(stage, model, config, self.row.reads))
        self.scale, self.shifts = None, None

    def items(self, dataset, split: str, dropped, limit=None, training: bool = False):
        """Items of one split; training rows also set the rating scale and are balanced."""
        from stages.reward_models.reward_data import annotator_shifts, balanced, check_attributes, encode, standardise

        if self.row.name == "regression" and training:
            check_attributes(self.config.attributes, dataset, split)
        items = encode(self.row, dataset, split, self.reader, self.config, dropped, limit)
        if self.row.name == "orm" and training and self.config.balance:
            items = balanced(items, dropped)
        if self.row.name == "regression" and items:
            if training and self.config.centre_annotators:
                self.shifts = annotator_shifts(items)
            scale = standardise(items, None if training else self.scale, self.shifts)
            self.scale = self.scale or scale
        return items

    def card(self, bias: float = 0.0, anchor: str | None = None, offset: float = 0.0):
        """What the trained directory will say about itself."""
        from stages.reward_models.reward_heads import RewardCard

        config, name = self.config, self.row.name
        options = {"facts": True} if config.facts else {}
        options |= {"chat_template_kwargs": config.chat_template_kwargs} if config.chat_template_kwargs else {}
        if name == "regression":
            mean, std = self.scale
            options |= {
                "mean": mean,
                "std": std,
                "weights": config.attribute_weights or [1.0 / len(mean)] * len(mean),
                "attributes": config.attributes,
            }
        elif name == "prm":
            options |= {
                "separator": self.separator,
                "neutral_as": config.neutral_as,
                "aggregation": "prod" if config.aggregation == "auto" else config.aggregation,
            }
        elif name == "orm":
            options |= {"offset": offset, "aggregation": "last" if config.aggregation == "auto" else config.aggregation}
        elif name == "control_tokens":
            options |= {"label_words": config.label_words or None}
        elif self.row.reads == "labels":
            options |= {
                "label_words": config.label_words or None,
                "normalise_over_labels": config.normalise_over_labels,
                "label_request": config.label_request,
            }
        return RewardCard(name, bias, anchor, self.pooling, self.reader.max_length, options)

    def scorer(self, stage, card):
        """The scorer that consumers will load, on the network in memory."""
        from stages.algorithms import resolve

        return resolve(self.row.score)(
            stage.path("model"),
            card,
            stage.device,
            self.config.micro_batch_tokens,
            model=self.model,
            reader=self.reader,
        )

    def save(self, directory, card, dtype, trains_on: bool = False) -> None:
        """Write the model with its card; ``dtype``, ``trains_on``: as ``stages.models.modeling.save_weights``."""
        from stages.models.modeling import save_policy
        from stages.reward_models.reward_heads import save_reward_model, write_card

        if self.row.reads == "labels":
            save_policy(self.model, self.reader.tokenizer, directory, dtype=dtype, trains_on=trains_on)
            write_card(directory, card)
        else:
            save_reward_model(self.model, self.reader.tokenizer, directory, card, dtype, trains_on)


def with_adapter(stage, model, config, reads: str):
    """The model with the LoRA adapter its config asks for; the reward head is trained in full beside it."""
    from stages.models.adapters import add_lora
    from stages.models.modeling import ModelError
    from stages.reward_models.reward_heads import score_head

    if not config.lora_rank:
        return model
    if config.train_layers != "all" or hasattr(model, "reward_gain") or hasattr(model, "kept_lm_head"):
        raise ModelError(
            "a LoRA adapter goes with train_layers=all, outcome_head=linear and lm_loss_weight=0; write these, or"
            " lora_rank=0."
        )
    model = add_lora(model, config, stage.seed_for("lora"), task="CAUSAL_LM" if reads == "labels" else "SEQ_CLS")
    if reads != "labels":
        for parameter in score_head(model).parameters():
            parameter.requires_grad_(True)
    return model


def freeze_layers(model, config, reads: str) -> None:
    """Leave the configured set trainable."""
    from stages.models.modeling import ModelError
    from stages.models.sharding import layers_of
    from stages.reward_models.reward_heads import score_head

    if config.train_layers == "all":
        return
    if reads == "labels":
        raise ModelError(
            "label words are read through the language model's own head; set train_layers=all for t2t objectives."
        )
    head = {id(p) for p in score_head(model).parameters()} | {
        id(p) for n, p in model.named_parameters() if n.startswith("reward_")
    }
    if config.train_layers == "head_and_last":
        head |= {id(p) for layer in layers_of(model)[-config.last_layers :] for p in layer.parameters()}
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.requires_grad and id(parameter) in head)


def staged_rows(stage, items, config):
    """The training source: shuffled rows, or the parts of a curriculum one after the other, each for all its epochs."""
    from stages.selection import order_by_difficulty
    from stages.training import ShuffledRows, StagedRows

    if config.curriculum == "none":
        return WithSpread(ShuffledRows(stage, items, config.batch_size, config.num_train_epochs, config.max_steps))
    difficulty = [i.extra["difficulty"] for i in items]
    part = (
        difficulty
        if config.curriculum == "stage_index"
        else order_by_difficulty(difficulty, config.curriculum_stages)[1]
    )
    return WithSpread(StagedRows(stage, items, part, config))


class WithSpread:
    """A source that adds the standard deviation of the step's scores to its metrics."""

    def __init__(self, source):
        self._source, self.total_steps = source, source.total_steps

    def __getattr__(self, name):
        return getattr(self._source, name)

    def after_step(self, step, metrics):
        return self._source.after_step(step, metrics) | spread(metrics)


def spread(metrics: dict[str, float]) -> dict[str, float]:
    """``std_reward`` of a step or pass, for the mean squared score that leaves its metrics."""
    square = metrics.pop("score_square_mean", None)
    return {} if square is None else {"std_reward": max(square - metrics["mean_reward"] ** 2, 0.0) ** 0.5}


def run(stage):
    from collections import Counter
    from functools import partial

    from stages.models.epochs import Epochs
    from stages.models.modeling import save_type
    from stages.preflight import preflight
    from stages.reporting.curves import training_report
    from stages.reward_models.reward_eval import FEW, count_of, held_out_of_all, sample_blocks, warn_about
    from stages.reward_models.reward_heads import drop_lm_head
    from stages.training import Trainer, fit
    from stages.validation_alarms import telling

    config, data = stage.config, stage.dataset("data")
    refuse_unread_in(stage, READ_OF_INPUTS)
    if stage.has("anchor") and config.anchor in ("none", "chosen"):
        raise ConfigError(
            f"reward_model: anchor={config.anchor} does not read the input `anchor`; leave it out, or write anchor=auto"
        )
    setup = Setup(stage, data)
    check_anchor(stage, setup.row, data)
    check_previous(stage, data.kind)
    setup.separator = step_separator(data, config)
    if setup.pooling == "mean" and setup.row.reads == "response":
        plain, other = ("[CLS]", "cls") if setup.model.reads_both_ways else ("the last token", "last")
        stage.warn(
            "pooling_of_our_own",
            "The head reads the mean over tokens. This project's scorers read the published model so too, but"
            f" transformers' AutoModelForSequenceClassification, and what is built on it, reads {plain}, so its scores"
            f" are others. Write pooling={other} for a model that every tool reads alike.",
        )
    dropped = Counter()
    train = setup.items(data, config.split, dropped, training=True)
    if setup.config.use_margin and not any(item.extra.get("margin") for item in train):
        stage.warn(
            "no_margins",
            "No pair has a margin, so objective=margin is bt. Ingest with margin_mode=llama2_small (strength labels) or"
            " score_diff (scores), or write objective=bt.",
        )
    if (
        train
        and config.curriculum == "stage_index"
        and not any(item.extra.get("stage_index") is not None for item in train)
    ):
        raise ConfigError(
            "reward_model: curriculum=stage_index takes the stages that the column stage_index says, and no pair has"
            " one; give the output of stage curriculum, or write curriculum=margin"
        )
    worse, replayed = spoiled(stage, setup, data, len(train), dropped), replay(stage, setup, len(train))
    train += worse + replayed
    validation = setup.items(data, "validation", Counter(), config.eval_rows)
    stage.log(
        f"{setup.row.name} on {data.kind}: {len(train)} training rows, {len(validation)} validation{left_out(dropped)}"
    )
    warn_of_cut_rows(stage, dropped, len(train))
    refuse_no_rows(dropped, len(train), config.split)
    source = staged_rows(stage, train, setup.config)
    trainer = Trainer(setup.model, setup.objective, config, source.total_steps, stage.device)
    preflight(stage, trainer, train, config.batch_size, setup.reader, completions_end=False)

    def evaluate():
        found = trainer.evaluate(validation)
        return spread(found) | found

    epochs = Epochs(stage, source, partial(write_epoch, stage, setup, data)) if config.publish_epochs else None
    fit(
        stage,
        trainer,
        source,
        evaluate=telling(stage, evaluate) if validation else None,
        eval_every=config.eval_every,
        epochs=epochs,
    )
    setup.model.eval()
    final = trainer.evaluate(train[: config.eval_rows])
    offset = setup.offset + drop_lm_head(setup.model, setup.lm_head, setup.token)
    card, judged = trained(stage, setup, data, offset)
    summary = {
        "steps": trainer.step_index,
        "rows": len(train),
        "skipped_steps": trainer.skipped,
        "calibration_bias": card.bias,
        **{f"dropped/{k}": v for k, v in sorted(dropped.items())},
        **{f"train/final_{k}": final[k] for k in ("accuracy", "loss") if k in final},
    }
    if data.kind == "pairs/1":
        # label words are asked for twice of a pair: of each answer, or in both orders
        summary["pairs"] = len(train) // (2 if setup.row.reads == "labels" else 1)
    if config.spoiled_fraction:
        summary["spoiled"] = len(worse)
    if stage.many("replay"):
        summary["replayed"] = len(replayed)
    summary |= {f"{split}/{k}": v for split in ("validation", "test") for k, v in judged.get(split, {}).items()}
    best = judged.get("test") or judged.get("validation") or {}
    earlier = (
        held_out_of_all(stage, setup.scorer(stage, card), earlier_rows(stage), "earlier", config.eval_rows)
        if stage.many("replay")
        else {}
    )
    summary |= {f"earlier/{k}": v for k, v in earlier.items()}
    dtype = save_type(stage, setup.model)
    with stage.output_model("model", role="reward") as directory:
        setup.save(directory, card, dtype)
    if epochs is not None:
        epochs.conclude()
    if stage.has("previous"):
        trainer = None  # gradients and moments make room for the earlier model
        setup.model.zero_grad(set_to_none=True)
        summary |= drift(stage, data, best)
    stage.summary(summary)
    if judged or earlier:
        warn_about(
            stage, earlier if count_of(best) < FEW <= count_of(earlier) else best, final.get("accuracy"), setup.row.name
        )
    training_report(
        stage,
        f"Reward model ({setup.row.name})",
        summary,
        *sample_blocks(stage, [*judged, *(["earlier"] if earlier else [])]),
    )


def trained(stage, setup: Setup, data, offset: float) -> tuple:
    """(card of the trained network in memory, calibrated and judged on held-out rows; its metrics by split)."""
    from stages.reward_models.reward_eval import FEW, count_of, fooled_by, held_out

    config, judged = stage.config, {}
    card = setup.card(offset=offset)
    card.bias, card.anchor = calibration_bias(stage, setup.scorer(stage, card), data, setup)
    for split in ("test", "validation"):  # probes are of the split that judges the model
        found = held_out(
            stage,
            setup.scorer(stage, card),
            data,
            split,
            limit=config.eval_rows,
            probe_pairs=0 if judged else config.probe_pairs,
        )
        if found:
            judged[split] = found
    best = judged.get("test") or judged.get("validation") or {}
    card.options["held_out"] = {k: best[k] for k in ("accuracy", "ece") if k in best} | {"rows": count_of(best)}
    if count_of(best) >= FEW and (fooled := fooled_by(best)):
        card.options["held_out"]["fooled_by"] = fooled
    return card, judged


def write_epoch(stage, setup: Setup, data, directory) -> None:
    """Write the reward model as it is (``publish_epochs``), with the card that it would have if training ended here;
    training goes on from it.
    """
    from stages.models.epochs import unrounded
    from stages.reward_models.reward_eval import Unreported
    from stages.reward_models.reward_heads import without_lm_head

    setup.model.eval()
    with without_lm_head(setup.model, setup.lm_head, setup.token) as constant:
        card, _ = trained(Unreported(stage), setup, data, setup.offset + constant)
        setup.save(directory, card, unrounded(stage), trains_on=True)
    setup.model.train()


def spoiled(stage, setup: Setup, data, fresh: int, dropped) -> list:
    """Items that set a chosen answer over a spoiled copy of it, one for each of so many rows, drawn with the stage's
    seed, that they are `spoiled_fraction` of all training rows.
    """
    import numpy as np

    from stages.algorithms import resolve
    from stages.measures.reward_model import probes
    from stages.pairs import is_tie
    from stages.reward_models.reward_data import Drop

    config, items = setup.config, []
    if not config.spoiled_fraction:
        return items
    wanted = round(fresh * config.spoiled_fraction / (1.0 - config.spoiled_fraction))
    make = resolve(setup.row.encode)
    there = data.rows_of(config.split)
    times = (
        np.bincount(stage.rng("spoiled").permutation(there * -(-wanted // there))[:wanted] % there, minlength=there)
        if there
        else []
    )
    for row, copies in zip(data.iter_rows(split=config.split), times):
        answer, prompt = row["chosen"][-1].get("content"), row["prompt"][-1].get("content") if row["prompt"] else ""
        if not copies or not isinstance(answer, str) or is_tie(row):
            continue
        made = {
            name: text
            for name, text in probes(answer, stage.rng("spoiled", row["row_id"]), prompt or "").items()
            if not config.spoiled_by or name in config.spoiled_by
        }
        names = list(made)
        for name in (names[i] for i in stage.rng("spoiled", row["row_id"], "names").permutation(len(names))[:copies]):
            pair = {
                **row,
                "row_id": f"{row['row_id']}/{name}",
                "rejected": [*row["chosen"][:-1], {**row["chosen"][-1], "content": made[name]}],
                "label_prob": None,
                "margin": None,
                "chosen_score": None,
                "rejected_score": None,
                "strength": None,
            }
            try:
                items.extend(make(pair, setup.reader, config, dropped))
            except Drop as reason:
                dropped[f"spoiled_{reason}"] += 1
    return items


def replay(stage, setup: Setup, fresh: int) -> list:
    """Items of earlier rows, drawn once each with the stage's seed, so many that they are `replay_fraction` of all
    training rows; for a balanced ``orm`` as many right as wrong ones of every prompt.
    """
    from collections import Counter

    from stages.reward_models.reward_data import right_and_wrong

    older, kind = earlier_rows(stage), stage.dataset("data").kind
    for dataset in older:
        if dataset.kind != kind:
            raise ConfigError(f"replay holds {dataset.kind} and data {kind}; give earlier rows of the kind {kind}")
    rows = [item for dataset in older for item in setup.items(dataset, setup.config.split, Counter())]
    share = setup.config.replay_fraction
    wanted = round(fresh * share / (1.0 - share))
    if setup.row.name == "orm" and setup.config.balance:
        drawn = [(rows[i], rows[j]) for i, j in right_and_wrong(rows)]
    else:
        drawn = [(row,) for row in rows]
    chosen = sorted(stage.rng("replay").permutation(len(drawn))[: wanted // len(drawn[0])] if drawn else ())
    return [row for i in chosen for row in drawn[i]]


def earlier_rows(stage) -> list:
    """The datasets of the input `replay`."""
    return [stage.dataset(f"replay.{name}" if name else "replay") for name in sorted(stage.many("replay"))]


def drift(stage, data, new: dict[str, float]) -> dict[str, float]:
    """How the previous reward model does on these rows, which come from the newer policy, against its own held-out rows
    (``rm.refresh``).
    """
    from stages.measures.statistics import chance_of_more
    from stages.reward_models.reward_eval import count_of, held_out
    from stages.reward_models.reward_scorers import load_scorer

    config = stage.config
    previous = load_scorer(stage.path("previous"), stage.device, config.micro_batch_tokens, config.frozen_dtype)
    found = next(
        (
            f
            for f in (
                held_out(stage, previous, data, split, config.eval_rows, label="previous")
                for split in ("test", "validation")
            )
            if f
        ),
        {},
    )
    own = previous.card.options.get("held_out", {})
    then, now = own.get("accuracy"), found.get("accuracy")
    n, m = own.get("rows"), count_of(found)  # models of before say no n
    if (
        then is not None
        and now is not None
        and then - now > config.drift_alarm
        and (not n or chance_of_more(round(then * n), n, round(now * m), m) < 0.05)
    ):
        stage.warn(
            "reward_model_drifted",
            f"The previous reward model was right in {then:.3f} of its own held-out rows and is in {now:.3f} of these"
            f" (drift_alarm={config.drift_alarm}): the policy has left the rows it learned from. Use the new model"
            f" ({new.get('accuracy', float('nan')):.3f}), score earlier samples again, and do not mix scores of both.",
        )
    return {f"previous/{k}": found[k] for k in ("accuracy", "log_loss", "ece") if k in found} | (
        {"previous/accuracy_then": then} if then is not None else {}
    )


def step_separator(data, config) -> str | None:
    """The separator of stepwise rows: the configured one, else that of the first row."""
    if data.kind != "stepwise/1":
        return None
    first = next(iter(data.iter_rows()), {})
    return config.step_separator or first.get("separator") or "\n\n"


def check_previous(stage, kind: str) -> None:
    """Refuse, before anything is trained, an earlier model that cannot be measured on these rows.

    Raises:
        ConfigError: its scores are of whole answers, and the rows of steps.
    """
    from stages.reward_models.reward_heads import read_card

    if not stage.has("previous") or kind != "stepwise/1":
        return
    objective = read_card(stage.path("previous")).objective
    if objective != "prm":
        raise ConfigError(
            f"reward_model: the input `previous` was trained with objective={objective}, which scores whole answers,"
            " and these rows judge every step; give an earlier model of objective=prm, or leave the input out"
        )


def check_anchor(stage, row, data) -> None:
    """Refuse, before anything is trained, an anchor that cannot be had at the end.

    Raises:
        ConfigError: the data prefer no answer, the input `anchor` is missing or has no answer that counts, or the model
            only compares.
    """
    anchor, kind = stage.config.anchor, data.kind
    if row.name in COMPARING and (stage.has("anchor") or anchor not in ("auto", "none")):
        raise ConfigError(
            f"reward_model: objective={row.name} compares answers, so its scores have no zero point that an anchor"
            " could set; leave " + ("the input `anchor`" if stage.has("anchor") else f"anchor={anchor}") + " out"
        )
    if anchor == "chosen" and kind not in ("pairs/1", "rankings/1", "unpaired/1"):
        raise ConfigError(
            f"reward_model: anchor=chosen takes the preferred answers of the data, and {kind} has none; write"
            " anchor=none, or give answers as the input `anchor` (demonstrations, or candidates of the rejection"
            " stage)"
        )
    if anchor in ("demonstrations", "generations") and not stage.has("anchor"):
        raise ConfigError(
            f"reward_model: anchor={anchor} needs the input `anchor` (demonstrations, or candidates of the rejection"
            " stage); give it with --input anchor=FILE, or set anchor=chosen"
        )
    named, answers = anchor_answers(stage, row, data)
    if named != "none" and not answers and (named != "chosen" or data.rows_of(stage.config.split)):
        raise ConfigError(
            f"reward_model: anchor={named} has no answer that counts among the first"
            f" {stage.config.eval_rows or ANCHOR_ROWS} rows of "
            + (f"split {stage.config.split}" if named == "chosen" else "the input `anchor`")
            + " (chosen or good, kept, complete, and not of weight 0), so that nothing could be the zero point; give"
            " such answers, or write anchor=none"
        )


def anchor_answers(stage, row, data) -> tuple[str, list]:
    """(the anchor that ``anchor`` and the inputs stand for, its answers that count: those of a weight over 0)."""
    from stages.batching import row_weight
    from stages.reward_models.reward_eval import anchor_responses

    config = stage.config
    given = (
        {"demonstrations/1": "demonstrations", "candidates/1": "generations"}[stage.dataset("anchor").kind]
        if stage.has("anchor")
        else None
    )
    anchor = config.anchor if config.anchor != "auto" else given or row.anchor
    if anchor == "none":
        return anchor, []
    source, split = (data, config.split) if anchor == "chosen" else (stage.dataset("anchor"), None)
    responses = anchor_responses(source, split, config.eval_rows or ANCHOR_ROWS)
    return anchor, [r for r in responses if row_weight(r.row)]


def calibration_bias(stage, scorer, data, setup) -> tuple[float, str | None]:
    """``b = -mean`` of the anchor's raw scores by the weights of their rows, so that 0 is an average expert answer
    (``rm.calibrate``).
    """
    from stages.batching import row_weight
    from stages.estimators import calibration_bias as bias_of

    if scorer.relative:
        return 0.0, None
    anchor, responses = anchor_answers(stage, setup.row, data)
    if anchor == "none":
        return 0.0, None
    known = [(s, row_weight(r.row)) for s, r in zip(scorer.score(responses), responses) if s == s]
    if not known:
        raise ValueError(
            f"anchor={anchor}: no answer of the anchor can be scored; give answers that the model has positions for, or"
            " set anchor=none."
        )
    scores, weights = zip(*known)
    return float(bias_of(scores, None if set(weights) == {1.0} else weights)), anchor
