"""Settings that several stages share. Imports no machine-learning library, so forms and the command line load it at once."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from stages.spec import StageConfig


class OptimizerConfig(StageConfig):
    """Settings shared by every trained stage."""

    learning_rate: float = Field(2e-5, gt=0, description="Peak AdamW learning rate.")
    lr_schedule: Literal["constant", "linear", "cosine"] = Field("cosine", description="Decay after warm-up, to min_lr_ratio.")
    warmup_ratio: float = Field(0.1, ge=0, le=1, description="Share of the steps spent in linear warm-up.")
    min_lr_ratio: float = Field(0.0, ge=0, le=1, description="Final learning rate as a share of the peak.")
    weight_decay: float = Field(0.0, ge=0, description="Decoupled weight decay, on matrices only (TRL default 0).")
    adam_beta1: float = Field(0.9, ge=0, lt=1, description="AdamW beta1.")
    adam_beta2: float = Field(0.999, ge=0, lt=1, description="AdamW beta2.")
    max_grad_norm: float = Field(1.0, gt=0, description="Global gradient-norm clip (TRL default 1.0).")
    max_nonfinite_steps: int = Field(5, ge=0, description="Optimizer steps with a non-finite loss or gradient that are skipped before the stage fails.")
    max_tokens_per_micro_batch: int = Field(4096, ge=1, description="Tokens per forward pass (a shared prompt once); bounds memory, cannot change the result.")
    compute_dtype: Literal["float32", "bfloat16"] = Field("float32", description="Autocast type of the forward pass; weights and optimizer stay float32.")
    activation_checkpointing: bool = Field(False, description="Recompute layer activations in backward: less memory, slower.")


class SamplingConfig(StageConfig):
    """How completions are drawn (``rl.md`` section 1.3)."""

    temperature: float = Field(1.0, ge=0, description="Softmax temperature; 0 is greedy.")
    top_p: float = Field(1.0, gt=0, le=1, description="Nucleus mass; 1 keeps all.")
    top_k: int = Field(0, ge=0, description="Keep the k most likely tokens; 0 keeps all.")
    min_p: float = Field(0.0, ge=0, le=1, description="Drop tokens less likely than min_p times the most likely one.")
    max_completion_length: int = Field(64, ge=1, description="New tokens at most.")
    generation_batch: int = Field(64, ge=1, description="Sequences decoded together; bounds memory.")
