"""Settings that several stages share. Imports no machine-learning library, so forms and the command line load it at
once.
"""

from __future__ import annotations

import math
import hashlib
import json
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from stages.models.memory import MICRO_BATCH
from stages.spec import ConfigError, KeyVariable, OutputSpec, ServerBase, StageConfig
from storage.files import read_text

#: Settings that are read under a condition only: (settings, condition, why nothing reads them where it does not hold
#: and what to write).
ReadWhen = Iterable[tuple[tuple[str, ...], Callable[..., bool], str]]


def unread(config: StageConfig, rules: ReadWhen, *context, own: Mapping[str, Any] | None = None) -> dict[str, str]:
    """{setting: error text} of the settings that were changed although nothing would read them (no option is ignored
    silently).

    A value that is the default changes nothing, whoever wrote it, so resolved settings come back as they are; ``own``
    gives what a default of None stands for. Conditions are called with ``context``, or with the config where there is
    none.
    """
    found: dict[str, str] = {}
    for names, condition, text in rules:
        for name in (n for n in names if n in type(config).model_fields and n not in found):
            value, field = getattr(config, name), type(config).model_fields[name]
            if value not in (field.get_default(call_default_factory=True), (own or {}).get(name)) and not condition(
                *context or (config,)
            ):
                found[name] = f"{name}={value} would change nothing: {text}, or leave {name} out."
    return found


def refuse_unread(*args, **more) -> None:
    """Raise a ValueError that lists what :func:`unread` finds."""
    found = unread(*args, **more)
    if found:
        raise ValueError("\n  ".join(found.values()))


#: ``validation_fraction`` of stages that make rows of the prompts of one ``split``.
PARTED_TRAINING: ReadWhen = (
    (
        ("validation_fraction",),
        lambda c: c.split in ("", "train"),
        "rows stay in the split of their prompt, and only training prompts are parted; write split=train or"
        " validation_fraction=0",
    ),
)


def refuse_unread_in(stage, rules: ReadWhen) -> None:
    """:func:`refuse_unread` by rules about the inputs of a stage; conditions are called with the stage, and what they
    find is a ConfigError.
    """
    if found := unread(stage.config, rules, stage):
        raise ConfigError(f"{stage.name}: " + "\n  ".join(found.values()))


def refuse_unread_inputs(stage: str, given: Collection[str], rules: ReadWhen, *context) -> None:
    """Raise a ConfigError about inputs that were ``given`` although nothing would read them, by rules (inputs,
    condition, why and what to write) whose conditions are called with ``context``.
    """
    found: dict[str, str] = {}
    given = {name.partition(".")[0] for name in given}
    for names, condition, text in rules:
        for name in (n for n in names if n in given and n not in found and not condition(*context)):
            found[name] = f"the input {name} would change nothing: {text}, or leave the input out."
    if found:
        raise ConfigError(f"{stage}: " + "\n  ".join(found.values()))


Schedule = Literal["constant", "linear", "cosine", "cosine_with_restarts", "polynomial", "inverse_sqrt", "wsd"]


class BemaConfig(StageConfig):
    """Constants of the bias-corrected moving average of weights (:class:`stages.models.averages.Bema`), with TRL's names
    and defaults.
    """

    update_freq: int = Field(400, ge=1, description="Optimizer steps between updates of the average (phi).")
    ema_power: float = Field(
        0.5,
        ge=0,
        description=(
            "The moving average takes in a share (lag + multiplier * step)^-ema_power of the weights (kappa); 0: all of"
            " them."
        ),
    )
    bias_power: float = Field(
        0.2,
        ge=0,
        description=(
            "The share (lag + multiplier * step)^-bias_power of the way from the start is added to it (eta); 0: all of"
            " the way, always, and a large power next to nothing, which is a plain moving average."
        ),
    )
    lag: float = Field(10.0, ge=0, description="Steps that the average counts as older than it is (rho).")
    update_after: int = Field(
        0, ge=0, description="Optimizer steps that are not averaged; the weights behind them are the start (tau)."
    )
    multiplier: float = Field(1.0, ge=0, description="How much each step adds to the age (gamma).")
    min_ema_multiplier: float = Field(
        0.0, ge=0, le=1, description="Smallest share of the weights that the moving average takes in."
    )

    @model_validator(mode="after")
    def _age(self):
        age = self.lag + self.multiplier * (self.update_after + self.update_freq)
        if age < 1:
            raise ValueError(
                f"at the first update the average is lag + multiplier * step = {age:g} steps old, and below 1 it would take"
                " in more than the weights; write lag=10"
            )
        return self


class OptimizerConfig(StageConfig):
    """Settings shared by every trained stage. ``LORA_RATE``: what a LoRA adapter multiplies the default learning rate
    by, where none is given.
    """

    LORA_RATE: ClassVar[float] = 1.0
    BALANCES: ClassVar[bool] = False  # whether router_aux_loss_coef is by default that of the model's config
    JUDGES_ANSWERS: ClassVar[bool] = False  # whether an input can make validation passes of other rows than eval_rows
    READ_WHEN: ClassVar[ReadWhen] = (
        (
            (
                "lora_alpha",
                "lora_rslora",
                "lora_dora",
                "lora_dropout",
                "lora_targets",
                "lora_exclude",
                "lora_modules_to_save",
            ),
            lambda c: c.lora_rank > 0,
            "there is no adapter (lora_rank=0); write lora_rank=16",
        ),
        (
            ("decay_ratio", "decay_type"),
            lambda c: c.lr_schedule == "wsd",
            "only lr_schedule=wsd has a final decay of its own; write lr_schedule=wsd",
        ),
        (
            ("lr_power",),
            lambda c: c.lr_schedule == "polynomial",
            "only lr_schedule=polynomial has a power; write lr_schedule=polynomial",
        ),
        (
            ("lr_cycles",),
            lambda c: c.lr_schedule == "cosine_with_restarts",
            "only lr_schedule=cosine_with_restarts starts anew; write lr_schedule=cosine_with_restarts",
        ),
        (
            ("warmup_ratio",),
            lambda c: c.warmup_steps is None,
            "warmup_steps says how long the warm-up is; leave warmup_steps out",
        ),
        (
            ("adam_beta1", "adam_beta2", "adam_epsilon"),
            lambda c: c.optimizer in ("adamw", "adamw_8bit", "muon"),
            "it is a constant of AdamW, which nothing uses here; write optimizer=adamw",
        ),
        (
            ("momentum",),
            lambda c: c.optimizer in ("sgd", "muon"),
            "AdamW's is adam_beta1, and adafactor has none; write optimizer=sgd",
        ),
        (
            ("min_lr_ratio",),
            lambda c: c.lr_schedule != "constant",
            "lr_schedule=constant does not decay; write lr_schedule=cosine or linear",
        ),
        (
            ("eval_every",),
            lambda c: c.JUDGES_ANSWERS or getattr(c, "eval_rows", 1) > 0,
            "eval_rows=0 keeps no validation rows; write eval_rows=500",
        ),
    )

    optimizer: Literal["adamw", "adamw_8bit", "sgd", "adafactor", "muon"] = Field(
        "adamw",
        description=(
            "torch's AdamW (8 bytes of state per trained weight), bitsandbytes' with its moments in 8 bits (2; 8 for"
            " embeddings and small weights), SGD (0, with momentum 4; needs a learning_rate of its"
            " own), Adafactor (next to none; steps relative to the size of weights, default learning rate 50 times"
            " AdamW's) or Muon on the layers' matrices with AdamW for the rest (4; AdamW's learning rate)."
        ),
    )
    learning_rate: float = Field(
        2e-5, gt=0, description="Peak learning rate, the default AdamW's; of sft and distill with LoRA 2e-4."
    )
    lr_schedule: Schedule = Field(
        "cosine",
        description=(
            "After warm-up: decay to min_lr_ratio (linear, cosine, polynomial; cosine_with_restarts lr_cycles times),"
            " 1/sqrt(step), or stable until the last decay_ratio of the steps, then decay_type (wsd)."
        ),
    )
    warmup_ratio: float = Field(0.1, ge=0, le=1, description="Share of the steps spent in linear warm-up.")
    warmup_steps: int | None = Field(
        None, ge=0, title="Warm-up steps", description="Steps of linear warm-up, in the place of warmup_ratio."
    )
    decay_ratio: float = Field(
        0.2, gt=0, le=1, description="Share of the steps spent in the final decay (lr_schedule=wsd)."
    )
    decay_type: Literal["linear", "cosine", "1-sqrt"] = Field(
        "linear", description="Form of the final decay (lr_schedule=wsd)."
    )
    lr_power: float = Field(1.0, gt=0, description="lr_schedule=polynomial: (share of the steps that is left)^power.")
    lr_cycles: int = Field(1, ge=1, description="lr_schedule=cosine_with_restarts: how many times it decays.")
    min_lr_ratio: float = Field(0.0, ge=0, le=1, description="Final learning rate as a share of the peak.")
    weight_decay: float = Field(
        0.0,
        ge=0,
        description="Decoupled weight decay (of sgd: added to the gradient), on matrices only (TRL default 0).",
    )
    adam_beta1: float = Field(0.9, ge=0, lt=1, description="AdamW beta1.")
    adam_beta2: float = Field(0.999, ge=0, lt=1, description="AdamW beta2.")
    adam_epsilon: float = Field(1e-8, gt=0, description="AdamW epsilon.")
    momentum: float | None = Field(
        None,
        ge=0,
        lt=1,
        title="Momentum",
        description="Of optimizer=sgd (default 0: no state at all) or muon (default 0.95).",
    )
    router_aux_loss_coef: float | None = Field(
        None,
        ge=0,
        title="Router balance",
        description=(
            "Mixtures of experts: weight of the load-balancing loss E sum_e f_e P_e over all tokens of an optimizer"
            " step; 0 = none. Empty: in sft that of the model's config (as in TRL), elsewhere 0."
        ),
    )
    max_grad_norm: float = Field(1.0, gt=0, description="Global gradient-norm clip (TRL default 1.0).")
    max_nonfinite_steps: int = Field(
        5,
        ge=0,
        description="Optimizer steps with a non-finite loss or gradient that are skipped before the stage fails.",
    )
    max_tokens_per_micro_batch: int | None = Field(
        None,
        ge=1,
        description=(
            "Tokens per forward pass (a shared prompt once; with its padding where the model's own code computes);"
            " bounds memory, cannot change the result. Empty: 4096; on a GPU up to 16384, as its memory allows. A prompt"
            " with more responses than fit goes through the model in parts, each with the prompt again; what a loss"
            " compares stays together. Halved, with a warning, where a micro-batch does not fit into memory."
        ),
    )
    packing: Literal["sorted", "best_fit"] = Field(
        "sorted",
        description=(
            "How rows fill micro-batches of max_tokens_per_micro_batch tokens: next to those of like length (sorted),"
            " or longest first into the fullest that has room (best_fit, TRL's packing): fewer micro-batches where"
            " lengths differ much. No row is padded, cut or seen by another either way, so the result is the same up to"
            " rounding (sft.pack)."
        ),
    )
    compute_dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="Type of the matrix products; weights, norms, residuals and optimizer stay float32."
    )
    forward: Literal["auto", "own", "model", "compiled"] = Field(
        "auto",
        description=(
            "Who computes the layers: our exact unpadded forward where it knows the architecture (auto, own), the"
            " model's own code, or that under torch.compile."
        ),
    )
    sharding: Literal["none", "full"] = Field(
        "none",
        description=(
            "On several devices: whole weights on each (none, DDP), or weights, gradients and optimizer state split"
            " over them (full, FSDP2)."
        ),
    )
    activation_checkpointing: bool = Field(
        False, description="Recompute layer activations in backward: less memory, slower."
    )
    lora_rank: int = Field(
        0,
        ge=0,
        description=(
            "Rank of a LoRA adapter; 0 trains all weights (texts 8-64; needs about 10 times the learning rate)."
        ),
    )
    lora_alpha: float | None = Field(
        None, gt=0, title="LoRA alpha", description="The adapter counts alpha / rank; empty: 2 * rank."
    )
    lora_rslora: bool = Field(False, description="The adapter counts alpha / sqrt(rank) (rsLoRA, Kalajdzievski 2023).")
    lora_dora: bool = Field(
        False,
        description=(
            "The length of every row of a weight is trained apart from its direction (DoRA, Liu et al. 2024). Through"
            " the model's own forward, which is slower."
        ),
    )
    lora_dropout: float = Field(
        0.0,
        ge=0,
        lt=1,
        description=(
            "Share of the numbers that the adapter reads as 0 in training, drawn anew for every row, token and layer of"
            " a step (peft; Hu et al. 0 to 0.1)."
        ),
    )
    lora_targets: str = Field(
        "all-linear", description="Layers with an adapter: all-linear, or names such as q_proj,v_proj."
    )
    lora_exclude: str = Field(
        "",
        description=(
            "Names of layers that get no adapter although lora_targets takes them (peft exclude_modules), such as"
            " k_proj,down_proj."
        ),
    )
    lora_modules_to_save: str = Field(
        "",
        description=(
            "Names of modules that are trained in full beside the adapter (peft modules_to_save), such as"
            " embed_tokens,lm_head for new tokens."
        ),
    )
    frozen_dtype: Literal["auto", "float32", "bfloat16", "nf4", "nf4_double"] = Field(
        "auto",
        description=(
            "How frozen matrices are kept (under an adapter; of references, teachers, reward models): as the checkpoint"
            " stores them where that is bfloat16, which changes no number (auto); all widened to float32; all in"
            " bfloat16, which rounds float32 ones once; or those of the linear layers in 4 bits (nf4; nf4_double: its"
            " scales in 8 bits), QLoRA. Products are in compute_dtype whichever it is."
        ),
    )
    save_dtype: Literal["float32", "bfloat16"] = Field(
        "float32",
        description="Type of the published weights; an adapter is merged in float32, and bfloat16 rounds the sum.",
    )
    ema_decay: float = Field(
        0.0,
        ge=0,
        lt=1,
        description=(
            "Train, but validate and publish the exponential moving average of the weights with this decay; 0 = off."
        ),
    )
    bema: BemaConfig | None = Field(
        None,
        title="BEMA",
        description=(
            "Train, but validate and publish the bias-corrected moving average of the weights (Block & Zhang 2025; TRL"
            " BEMACallback), such as {update_freq: 10}; empty: off."
        ),
    )
    select_by: str | None = Field(
        None,
        title="Select by",
        description=(
            "Validation metric whose best pass gives the published weights (for example loss, accuracy); empty: the"
            " last weights. Needs eval_every."
        ),
    )
    early_stopping_patience: int = Field(
        0, ge=0, description="Stop after this many validation passes in a row without a better select_by; 0 = never."
    )
    device_memory_gib: float | None = Field(
        None,
        gt=0,
        title="Device memory",
        description=(
            "Memory of one device, GiB, that weights, gradients and optimizer must fit into; empty: what the device"
            " has."
        ),
        json_schema_extra={"identity": False},
    )
    memory_check: Literal["refuse", "warn"] = Field(
        "refuse",
        description="What is done about a plan that does not fit: refused before anything is loaded, or only said.",
        json_schema_extra={"identity": False},
    )

    @property
    def micro_batch_tokens(self) -> int:
        """``max_tokens_per_micro_batch``, or what that is where it is left empty and no GPU has chosen."""
        return self.max_tokens_per_micro_batch or MICRO_BATCH

    @field_validator("lr_schedule", mode="before")
    @classmethod
    def _schedule_of_transformers(cls, value):
        ours = {
            "constant_with_warmup": "constant",
            "cosine_with_min_lr": "cosine with min_lr_ratio=SHARE",
            "cosine_warmup_with_min_lr": "cosine with min_lr_ratio=SHARE",
            "warmup_stable_decay": "wsd with decay_ratio=SHARE and decay_type=linear, cosine or 1-sqrt",
            "reduce_lr_on_plateau": "constant with select_by=loss early_stopping_patience=N",
            "greedy": "constant with select_by=loss early_stopping_patience=N",
        }
        if value in ours:
            raise ValueError(f"transformers' {value} is written otherwise here: lr_schedule={ours[value]}")
        return value

    @model_validator(mode="after")
    def _rate(self):
        if "learning_rate" not in self.model_fields_set:
            if self.optimizer == "sgd":
                raise ValueError(
                    "optimizer=sgd moves weights by the gradient itself, for which no learning rate is usual; write"
                    " learning_rate too, for example learning_rate=0.1 (about the most that max_grad_norm=1 lets all"
                    " weights move by together in a step)"
                )
            scale = (self.LORA_RATE if self.lora_rank else 1.0) * (50.0 if self.optimizer == "adafactor" else 1.0)
            if scale != 1.0:
                self.__dict__["learning_rate"] = scale * type(self).model_fields["learning_rate"].default
        return self

    @model_validator(mode="after")
    def _optimizer(self):
        if self.frozen_dtype.startswith("nf4") and self.forward == "compiled":
            raise ValueError(
                f"forward=compiled takes no weights in 4 bits; write forward=auto for frozen_dtype={self.frozen_dtype},"
                " or frozen_dtype=bfloat16"
            )
        if self.frozen_dtype.startswith("nf4") and self.sharding == "full":
            raise ValueError(
                f"frozen_dtype={self.frozen_dtype} packs whole matrices, and sharding=full splits them over the"
                " devices; write sharding=none (each device then holds the model in 4 bits), or frozen_dtype=bfloat16"
            )
        if self.frozen_dtype.startswith("nf4") and self.lora_dora:
            raise ValueError(
                "lora_dora=true trains with the lengths of the frozen weights' rows, which are not read off weights in"
                " 4 bits; write lora_dora=false, or frozen_dtype=bfloat16"
            )
        if self.lora_dropout and (self.lora_dora or self.forward == "compiled"):
            raise ValueError(
                f"lora_dropout is not computed with {'lora_dora=true' if self.lora_dora else 'forward=compiled'}; write"
                f" {'lora_dora=false' if self.lora_dora else 'forward=auto'}, or leave lora_dropout out"
            )
        if self.forward == "compiled" and self.router_aux_loss_coef:
            raise ValueError(
                "forward=compiled does not say what routers choose, which router_aux_loss_coef needs; write"
                " forward=auto or forward=model, or leave router_aux_loss_coef out"
            )
        if self.optimizer == "adamw_8bit" and self.sharding == "full":
            raise ValueError(
                "optimizer=adamw_8bit keeps blocks of 256 values together, and sharding=full splits weights anywhere;"
                " write optimizer=adamw, whose state is split over the devices, or sharding=none"
            )
        if self.optimizer == "adafactor" and self.lora_rank:
            raise ValueError(
                "optimizer=adafactor steps by shares of a weight's size, and half of an adapter starts at 0, where it"
                " hardly moves; write optimizer=adamw, whose state is small for an adapter, or muon"
            )
        return self

    @model_validator(mode="after")
    def _read(self):
        refuse_unread(self, self.READ_WHEN)
        return self

    @model_validator(mode="after")
    def _selection(self):
        if self.bema is not None and self.ema_decay:
            raise ValueError(
                f"ema_decay={self.ema_decay:g} and bema are two averages of the weights, and one is published; write"
                " ema_decay=0, or leave bema out"
            )
        if self.early_stopping_patience and not self.select_by:
            raise ValueError(
                "early_stopping_patience needs to know what gets better; write select_by=loss (and eval_every=STEPS)"
            )
        if self.select_by and not getattr(self, "eval_every", 1):
            raise ValueError(
                f"select_by={self.select_by} compares validation passes, but eval_every=0 makes none in between; write"
                " eval_every=STEPS"
            )
        return self


#: Output of stages with ``publish_epochs``.
EPOCHS = OutputSpec(
    "model",
    role="policy",
    required=False,
    many=True,
    doc="The model behind every pass over the training rows (publish_epochs).",
)


class EpochsConfig(OptimizerConfig):
    """Settings of stages that train a model in passes over rows."""

    publish_epochs: bool = Field(
        False,
        description=(
            "Also publish the model behind every pass over the training rows, as outputs epoch.1, epoch.2 ...: stage"
            " select_checkpoint chooses among them later (sft.ckpt_select). Each takes the disk of a model; the last one"
            " none where it is the published one."
        ),
    )

    @model_validator(mode="after")
    def _epochs_end(self):
        curriculum = getattr(self, "curriculum", "none")
        if self.publish_epochs and curriculum != "none":
            raise ValueError(
                f"publish_epochs keeps the model behind every pass over the rows, and curriculum={curriculum} trains"
                " each of its parts for all its passes; write curriculum=none, or leave publish_epochs out"
            )
        return self


class PolicyRowsConfig(EpochsConfig):
    """Settings of stages that train a policy in passes over rows."""

    report_samples: int = Field(
        4,
        ge=0,
        le=64,
        description=(
            "Prompts of the validation split (else of the training rows) that the starting and the published model"
            " answer for the report: greedily, in twice the tokens of the given answers, 128 at most; 0 = none. From 16 on"
            " align warns of answers that grew by 30%."
        ),
    )


#: Settings of the sampler that change logits before temperature and nucleus do.
CHANGES_OF_LOGITS = (
    "min_tokens",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
    "bad_words",
    "logit_bias",
)


class SamplingConfig(StageConfig):
    """How completions are drawn and by which engine (``stages/decoding/engines.py``)."""

    temperature: float = Field(1.0, ge=0, description="Softmax temperature; 0 is greedy.")
    top_p: float = Field(1.0, gt=0, le=1, description="Nucleus mass; 1 keeps all.")
    top_k: int = Field(0, ge=0, description="Keep the k most likely tokens; 0 keeps all.")
    min_p: float = Field(0.0, ge=0, lt=1, description="Drop tokens less likely than min_p times the most likely one.")
    max_completion_length: int = Field(256, ge=1, description="New tokens at most; reasoning takes thousands.")
    stop_strings: list[str] = Field(
        default_factory=list,
        description="Strings that end a completion, besides the model's stop tokens; its text ends before them.",
    )
    min_tokens: int = Field(0, ge=0, description="No completion ends before it has so many tokens.")
    repetition_penalty: float = Field(
        1.0,
        gt=0,
        description=(
            "Divides positive and multiplies negative logits of tokens in prompt or completion (CTRL 1.2); 1 = off."
        ),
    )
    frequency_penalty: float = Field(
        0.0, description="Subtracted from a token's logit for each time the completion has it; 0 = off."
    )
    presence_penalty: float = Field(
        0.0, description="Subtracted from a token's logit once the completion has it; 0 = off."
    )
    bad_words: list[str] = Field(
        default_factory=list,
        description="Words that are never completed (their last token is banned after the first ones).",
    )
    logit_bias: dict[int, float] = Field(
        default_factory=dict, description="Numbers added to the logits of token ids; -100 bans a token."
    )
    generation_batch: int = Field(64, ge=1, description="Sequences decoded together; bounds memory.")
    sampling_dtype: Literal["float32", "bfloat16"] = Field(
        "float32",
        description=(
            "engine=builtin: type of the weights, keys, values and products it samples with. bfloat16 takes half the"
            " memory and time on a GPU; its log-probs are not the trainer's then, which computes its own."
        ),
    )
    engine: Literal["builtin", "vllm", "server"] = Field(
        "builtin",
        description=(
            "Who samples: this process, vLLM in this process (a package to install), or a server with the OpenAI"
            " completions interface."
        ),
    )
    engine_url: ServerBase | None = Field(
        None,
        title="Engine URL",
        description=(
            "engine=server: base URL, for example http://localhost:8000/v1. A result is known by engine_model (write it:"
            " empty says nothing of what is served) and not by this: the same command with the server elsewhere"
            " continues or reuses it."
        ),
        json_schema_extra={"identity": False, "address": True},
    )
    engine_model: str | None = Field(
        None,
        title="Engine model",
        description=(
            "engine=server: the model's name there; empty: the only one it serves, or the model's own directory "
            "(transformers serve)."
        ),
    )
    engine_api: Literal["auto", "openai", "vllm", "transformers"] = Field(
        "auto",
        description=(
            "engine=server: its dialect. vllm and transformers take settings and weights that plain servers do not;"
            " auto asks the server."
        ),
    )
    engine_key_variable: KeyVariable = Field(
        "",
        description="engine=server: environment variable that holds the key; keys never enter a configuration.",
        json_schema_extra={"identity": False},
    )
    engine_timeout_s: float = Field(
        600.0,
        gt=0,
        description="engine=server: seconds that one completion may take.",
        json_schema_extra={"identity": False},
    )
    engine_concurrency: int = Field(
        32, ge=1, description="engine=server: requests under way at once.", json_schema_extra={"identity": False}
    )
    engine_options: dict[str, Any] = Field(
        default_factory=dict,
        description="engine=vllm: arguments of vllm.LLM, such as {gpu_memory_utilization: 0.5, dtype: bfloat16}.",
    )

    @model_validator(mode="after")
    def _engine(self):
        given = {
            "engine_url": self.engine_url,
            "engine_model": self.engine_model,
            "engine_key_variable": self.engine_key_variable,
            "engine_api": self.engine_api if self.engine_api != "auto" else None,
        }
        if self.engine == "server" and not self.engine_url:
            raise ValueError("engine=server needs to know where it is; write engine_url=http://HOST:PORT/v1")
        for name in (name for name, value in given.items() if value and self.engine != "server"):
            raise ValueError(
                f"{name}={given[name]} belongs to a server, but engine={self.engine}; write engine=server, or leave"
                f" {name} out"
            )
        if self.sampling_dtype != "float32" and self.engine != "builtin":
            raise ValueError(
                f"sampling_dtype={self.sampling_dtype} is of the built-in engine, but engine={self.engine}; "
                + (
                    "write engine_options={dtype: bfloat16}"
                    if self.engine == "vllm"
                    else "leave it out: the server decides"
                )
            )
        if self.engine_options and self.engine != "vllm":
            raise ValueError(
                f"engine_options are arguments of vllm.LLM, but engine={self.engine}; write engine=vllm, or leave"
                " engine_options out"
            )
        if self.min_tokens > self.max_completion_length:
            raise ValueError(
                f"min_tokens={self.min_tokens} is over max_completion_length={self.max_completion_length}; write a"
                " smaller min_tokens"
            )
        return self


def note_template(config: StageConfig, name: str) -> None:
    """Fill in the digest of the template file that the setting ``name`` names, as ``NAME_digest``. Raises ValueError
    where it is not that of the run."""
    path, given = getattr(config, name), getattr(config, f"{name}_digest")
    if path:
        digest = hashlib.sha256(template_text(path).encode()).hexdigest()
        if given not in ("", digest):
            raise ValueError(f"{path} is not the {name} that this run was started with; leave {name}_digest out")
        config.__dict__[name], config.__dict__[f"{name}_digest"] = os.path.abspath(path), digest
    elif given:
        raise ValueError(f"{name}_digest is filled in by itself; write {name}=FILE, or leave {name}_digest out")


class ChatConfig(StageConfig):
    """How conversations are shown to the input ``model``: by its own chat template, or by another one, which a trained
    model is then saved with.
    """

    chat_template: str | None = Field(
        None,
        title="Chat template",
        description=(
            "Jinja file, or model directory, whose chat template is used instead of the model's own, and saved with a"
            " model that is trained (TRL chat_template_path)."
        ),
        json_schema_extra={"identity": False},
    )
    chat_template_digest: str = Field(
        "", description="Digest of that template; filled in by itself, so that a change of the file is another run."
    )
    chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict,
        description=(
            "Variables that the chat template gets, such as {enable_thinking: false} (TRL); give the same ones wherever"
            " the model is used."
        ),
    )

    @model_validator(mode="after")
    def _chat_template(self):
        refuse_own_variables(self.chat_template_kwargs)
        note_template(self, "chat_template")
        if self.chat_template_given and getattr(self, "prompt_template", "chat") != "chat":
            raise ValueError(
                f"prompt_template={self.prompt_template} shows prompts without the chat template; write"
                " prompt_template=chat, or leave chat_template and chat_template_kwargs out"
            )
        if getattr(self, "prompt_template", "chat") != "chat" and any(
            component.kind == "icdpo" for component in getattr(self, "rewards", ())
        ):
            raise ValueError(
                f"prompt_template={self.prompt_template} shows prompts without the chat template, and icdpo shows"
                " demonstrations by it, so that its two likelihoods would be of two forms; write prompt_template=chat,"
                " or leave icdpo out"
            )
        return self

    @property
    def chat_template_given(self) -> bool:
        return bool(self.chat_template or self.chat_template_kwargs)

    def template(self) -> tuple[str | None, str]:
        """(text of another chat template than the model's own, JSON of the variables that it gets): the arguments of
        ``stages.chat.renderer_for``.
        """
        return template_text(self.chat_template) if self.chat_template else None, json.dumps(
            self.chat_template_kwargs, sort_keys=True
        )


def refuse_own_variables(chat_template_kwargs: dict[str, Any]) -> None:
    """Raises ValueError where a variable of a chat template is one that the platform gives itself."""
    if taken := sorted(
        {
            "messages",
            "conversation",
            "tools",
            "documents",
            "add_generation_prompt",
            "continue_final_message",
            "tokenize",
            "chat_template",
            "return_dict",
        }
        & set(chat_template_kwargs)
    ):
        raise ValueError(f"chat_template_kwargs: {taken[0]} is the platform's own to give; leave it out")


def template_text(path: str) -> str:
    """The chat template in a Jinja file or of a model directory; raises ValueError where there is none."""
    from pathlib import Path

    found = Path(path)
    try:
        if not found.is_dir():
            return read_text(found)
        if (found / "chat_template.jinja").is_file():
            return (found / "chat_template.jinja").read_text(encoding="utf-8")
        template = json.loads((found / "tokenizer_config.json").read_text(encoding="utf-8")).get("chat_template")
        if isinstance(template, list):  # one for every use
            template = next((t["template"] for t in template if t.get("name") == "default"), None)
    except (OSError, ValueError, AttributeError) as error:
        raise ValueError(
            f"chat_template={path} cannot be read ({error}); write the path of a Jinja file, or of a model directory"
            " (posttrain export MODEL DIR makes one)"
        ) from None
    if not template:
        raise ValueError(
            f"the model directory chat_template={path} has no chat template; write the path of a Jinja file, or of a"
            " model directory that has one"
        )
    return template


PromptTemplate = Literal["chat", "none", "think_answer", "zero_shot_cot"]
PROMPT_TEMPLATE = (
    "How a prompt is shown: the model's chat template; its last message as plain text (none); DeepSeek-R1-Zero's text"
    ' that asks for <think> and <answer>; or "Question: ... Answer: Let\'s think step by step." (zero_shot_cot). For'
    " base models (RL-ZERO); the same in training and evaluation."
)


#: Settings of an environment that decide what is answered in it.
OF_ENVIRONMENT = (
    "environment",
    "environment_options",
    "environment_digest",
    "max_turns",
    "max_turn_length",
    "observation_role",
)
#: Settings of an environment that are read under a condition only.
AGENT_READ_WHEN: ReadWhen = (
    (
        (
            "environment_options",
            "environment_timeout_s",
            "environment_memory_mib",
            "environment_network",
            "environment_workers",
            "max_turns",
            "max_turn_length",
            "observation_role",
        ),
        lambda c: bool(c.environment),
        "a prompt is answered once, without an environment; write environment=tools (or module:Class of your own)",
    ),
    (
        (
            "environment_timeout_s",
            "environment_memory_mib",
            "environment_network",
            "environment_workers",
            "observation_role",
        ),
        lambda c: c.environment != "debate",
        "a debate has no process of its own and no tool that answers; write another environment",
    ),
)


class AgentConfig(StageConfig):
    """An environment that the policy acts in over several turns (``AGENT-RL``); without one, a prompt is answered once.
    Rewards that are not given are then the environment's own."""

    environment: str = Field(
        "",
        description=(
            "What the policy acts in: a built-in environment (tools, verdicts), debate, or module:Class of your own"
            " (see stages/acting/environments.py); empty: a prompt is answered once."
        ),
    )
    environment_options: dict[str, Any] = Field(
        default_factory=dict,
        description="Keyword arguments of the environment's class, for example tools and call_syntax of `tools`.",
    )
    environment_digest: str = Field(
        "",
        description=(
            "Digest of the source of an environment of your own; filled in by itself, so that a change of that file is"
            " another run."
        ),
    )
    environment_timeout_s: float = Field(
        10.0,
        gt=0,
        le=3600,
        description="Wall seconds of one reset or step; what takes longer costs its own trajectory.",
    )
    environment_memory_mib: int = Field(1024, ge=64, description="Memory of one episode's process.")
    environment_network: bool = Field(False, description="Episodes may open network connections.")
    environment_workers: int = Field(
        0, ge=0, description="Episodes that compute at a time; 0 = one per core.", json_schema_extra={"identity": False}
    )
    max_turns: int = Field(
        8,
        ge=1,
        description=(
            "Turns of the policy at most; a trajectory that needs more is truncated (TRL max_tool_calling_iterations)."
        ),
    )
    max_turn_length: int | None = Field(
        None,
        ge=1,
        title="Max turn length",
        description=(
            "New tokens of one turn at most, after which it is closed and acted on as it "
            "stands; default: what is left of max_completion_length, which counts tool output too."
        ),
    )
    observation_role: Literal["tool", "user"] = Field(
        "tool", description="Role under which tool messages are shown; user for chat templates that know no tool role."
    )

    @model_validator(mode="after")
    def _environment(self):
        refuse_unread(self, AGENT_READ_WHEN)
        if self.environment and getattr(self, "engine", "builtin") != "builtin":
            raise ValueError(
                f"environment={self.environment} needs the exact tokens of growing transcripts, which"
                f" engine={self.engine} does not give; write engine=builtin"
            )
        if self.environment not in ("", "debate"):
            from stages.acting.environments import path_of

            path_of(self.environment)
        if ":" in self.environment:
            digest = source_digest(self.environment)
            if self.environment_digest not in ("", digest):
                raise ValueError(
                    f"the source of environment {self.environment} is not the one that this run was started with; leave"
                    " environment_digest out"
                )
            self.__dict__["environment_digest"] = digest
        if self.environment and "rewards" in type(self).model_fields and "rewards" not in self.model_fields_set:
            from stages.reward.components import RewardComponent

            self.__dict__["rewards"] = [
                RewardComponent(kind="debate" if self.environment == "debate" else "environment")
            ]
        return self


class BenchmarkConfig(StageConfig):
    """How benchmark questions are shown: examples before them, and the readings of multiple choice (prompts with
    ``choices``).
    """

    multiple_choice: list[Literal["letter", "text", "generation"]] = Field(
        ["letter", "text", "generation"],
        description=(
            'How prompts with choices are read: the letter\'s probability behind "Answer:", the log-likelihood of each'
            ' choice\'s text, a generated answer that ends "Therefore, the answer is (X)" (eval.mc_letter,'
            " eval.mc_answer_text, eval.mc_generation)."
        ),
    )
    system: str = Field(
        "",
        description=(
            "System message before every prompt: with few_shot a prompted arm that needs no training (URIAL, the HHH"
            " prompt). A prompt's own follows it."
        ),
    )
    few_shot: int = Field(
        0, ge=0, le=64, description="Examples shown before every question, k; 0 = none. GSM8K 5 or 8, MMLU 5, MATH 4."
    )
    few_shot_split: str = Field(
        "train",
        description=(
            "Split of the examples: of the input `examples`, else of the prompts. Rows that are evaluated are never"
            " shown."
        ),
    )
    few_shot_by: Literal["any", "category"] = Field(
        "any", description="category: the examples of a question are of its own category (MMLU's subjects)."
    )
    few_shot_solutions: bool = Field(
        True,
        description=(
            "Examples show their worked solution where they have one (few-shot chain of thought); false: the answer"
            " alone."
        ),
    )
    few_shot_orders: int = Field(
        1,
        ge=1,
        le=32,
        description=(
            "Choices and orders of the examples, each evaluated; with two or more their spread is reported"
            " (eval.kshot_order)."
        ),
    )

    @model_validator(mode="after")
    def _benchmark(self):
        if not self.multiple_choice or len(set(self.multiple_choice)) < len(self.multiple_choice):
            raise ValueError("multiple_choice lists each reading once; write for example multiple_choice=[letter,text]")
        if self.system and getattr(self, "environment", ""):
            raise ValueError(f"environment={self.environment} has a system message of its own; leave system out")
        if self.few_shot and getattr(self, "environment", ""):
            raise ValueError(
                f"environment={self.environment} has prompts of its own, without examples; write few_shot=0"
            )
        refuse_unread(
            self,
            (
                (
                    ("few_shot_split", "few_shot_by", "few_shot_solutions", "few_shot_orders"),
                    lambda c: c.few_shot > 0,
                    "no examples are shown (few_shot=0); write few_shot=5",
                ),
            ),
        )
        return self


def source_digest(path: str) -> str:
    """sha256 of the source file behind "module:Class"; raises ValueError where there is none."""
    import importlib.util

    module, _, name = path.partition(":")
    try:
        found = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        found = None
    if found is None or not found.origin or not name:
        raise ValueError(
            f"environment {path!r} was not found; write module:Class with the module's directory on PYTHONPATH"
        )
    with open(found.origin, "rb") as source:
        return hashlib.sha256(source.read()).hexdigest()


def whole_part(share: float, count: int) -> int:
    """How many of ``count`` things a share of them is, rounded down; 0.29 of 100 is 29, whose product in floating point
    is a little below.
    """
    return math.floor(share * count + 1e-9)
