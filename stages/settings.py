"""Settings that several stages share. Imports no machine-learning library, so forms and the command line load it at once."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from stages.spec import StageConfig


class OptimizerConfig(StageConfig):
    """Settings shared by every trained stage."""

    learning_rate: float = Field(2e-5, gt=0, description="Peak AdamW learning rate.")
    lr_schedule: Literal["constant", "linear", "cosine", "inverse_sqrt", "wsd"] = Field(
        "cosine", description="After warm-up: decay to min_lr_ratio (linear, cosine), 1/sqrt(step), or stable until the last decay_ratio of the steps, then linear (wsd).")
    warmup_ratio: float = Field(0.1, ge=0, le=1, description="Share of the steps spent in linear warm-up.")
    decay_ratio: float = Field(0.2, gt=0, le=1, description="Share of the steps spent in the final decay (lr_schedule=wsd).")
    min_lr_ratio: float = Field(0.0, ge=0, le=1, description="Final learning rate as a share of the peak.")
    weight_decay: float = Field(0.0, ge=0, description="Decoupled weight decay, on matrices only (TRL default 0).")
    adam_beta1: float = Field(0.9, ge=0, lt=1, description="AdamW beta1.")
    adam_beta2: float = Field(0.999, ge=0, lt=1, description="AdamW beta2.")
    max_grad_norm: float = Field(1.0, gt=0, description="Global gradient-norm clip (TRL default 1.0).")
    max_nonfinite_steps: int = Field(5, ge=0, description="Optimizer steps with a non-finite loss or gradient that are skipped before the stage fails.")
    max_tokens_per_micro_batch: int = Field(4096, ge=1, description="Tokens per forward pass (a shared prompt once); bounds memory, cannot change the result.")
    compute_dtype: Literal["float32", "bfloat16"] = Field("float32", description="Type of the matrix products; weights, norms, residuals and optimizer stay float32.")
    forward: Literal["auto", "own", "model", "compiled"] = Field(
        "auto", description="Who computes the layers: our exact unpadded forward where it knows the architecture (auto, own), the model's own code, or that under torch.compile.")
    sharding: Literal["none", "full"] = Field("none", description="On several devices: whole weights on each (none, DDP), or weights, gradients and optimizer state split over them (full, FSDP2).")
    activation_checkpointing: bool = Field(False, description="Recompute layer activations in backward: less memory, slower.")
    lora_rank: int = Field(0, ge=0, description="Rank of a LoRA adapter; 0 trains all weights (texts 8-64; needs about 10 times the learning rate).")
    lora_alpha: float | None = Field(None, gt=0, title="LoRA alpha", description="The adapter counts alpha / rank; empty: 2 * rank.")
    lora_targets: str = Field("all-linear", description="Layers with an adapter: all-linear, or names such as q_proj,v_proj.")
    ema_decay: float = Field(0.0, ge=0, lt=1, description="Train, but validate and publish the exponential moving average of the weights with this decay; 0 = off.")
    select_by: str | None = Field(None, title="Select by", description="Validation metric whose best pass gives the published weights (for example loss, accuracy); empty: the last weights. Needs eval_every.")
    early_stopping_patience: int = Field(0, ge=0, description="Stop after this many validation passes in a row without a better select_by; 0 = never.")

    @model_validator(mode="after")
    def _selection(self):
        if self.early_stopping_patience and not self.select_by:
            raise ValueError("early_stopping_patience needs to know what gets better; write select_by=loss (and eval_every=STEPS)")
        if self.select_by and not getattr(self, "eval_every", 1):
            raise ValueError(f"select_by={self.select_by} compares validation passes, but eval_every=0 makes none in between; write eval_every=STEPS")
        return self


class SamplingConfig(StageConfig):
    """How completions are drawn (``rl.md`` section 1.3)."""

    temperature: float = Field(1.0, ge=0, description="Softmax temperature; 0 is greedy.")
    top_p: float = Field(1.0, gt=0, le=1, description="Nucleus mass; 1 keeps all.")
    top_k: int = Field(0, ge=0, description="Keep the k most likely tokens; 0 keeps all.")
    min_p: float = Field(0.0, ge=0, le=1, description="Drop tokens less likely than min_p times the most likely one.")
    max_completion_length: int = Field(64, ge=1, description="New tokens at most.")
    generation_batch: int = Field(64, ge=1, description="Sequences decoded together; bounds memory.")
