"""The models behind every pass over the training rows, kept beside the one of the end (``sft.ckpt_select``: which of
them answers best is decided later, by stage ``select_checkpoint``).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from stages.models.modeling import save_policy
from stages.spec import ConfigError


def epochs_of(stage, model, tokenizer, source) -> Epochs | None:
    """What ``publish_epochs`` asks for of a policy, None where it is off."""
    if not stage.config.publish_epochs:
        return None
    dtype, base = unrounded(stage), stage.inputs["model"].ref
    return Epochs(stage, source, lambda to: save_policy(model, tokenizer, to, base=base, dtype=dtype, trains_on=True))


def unrounded(stage) -> torch.dtype | None:
    """The type of ``save_dtype``, None for float32; what rounding costs is said at the end."""
    return None if stage.config.save_dtype == "float32" else getattr(torch, stage.config.save_dtype)


class Epochs:
    """The models behind every pass over the training rows, as outputs ``epoch.1``, ``epoch.2`` ...
    (``publish_epochs``): what would be published if training ended there, without a choice by ``select_by``.

    Args:
        source: the training source, which passes over rows (``steps_per_epoch``).
        write: writes the model as it is into a directory, so that training goes on from it; every rank calls.

    Raises:
        ConfigError: no pass ends within the run.
    """

    def __init__(self, stage, source, write: Callable[[Path], None]):
        self.stage, self.write = stage, write
        self.steps = source.steps_per_epoch
        self.same: int | None = None  # the epoch whose weights are those of the output model
        if self.steps > source.total_steps:
            raise ConfigError(
                f"{stage.name}: publish_epochs keeps the model behind every pass over the rows, and this run ends after"
                f" {source.total_steps} of the {self.steps} steps of the first one; write num_train_epochs=1 or more"
                f" (or max_steps={self.steps}), or leave publish_epochs out (recipe instructgpt: choose_checkpoint=false)"
            )

    def after_step(self, trainer) -> None:
        """Write the model where an epoch has just ended and training goes on."""
        if trainer.step_index % self.steps == 0 and trainer.step_index < trainer.total_steps:
            self._write(trainer)

    def before_settling(self, trainer) -> None:
        """Of an epoch that ends with the run: write its model where the one that is published has other weights."""
        if trainer.step_index % self.steps or trainer.step_index < trainer.total_steps:
            return
        if trainer.best.get("step", trainer.step_index) == trainer.step_index:
            self.same = trainer.step_index // self.steps
        else:
            self._write(trainer)

    def conclude(self) -> None:
        """The last epoch, where it is what was published."""
        if self.same is not None:
            self.stage.link_model(f"epoch.{self.same}", "model")

    def _write(self, trainer) -> None:
        epoch = trainer.step_index // self.steps
        with trainer.averaged(), self.stage.output_model(f"epoch.{epoch}") as directory:
            self.write(directory)
        self.stage.log(f"published the model of epoch {epoch} (step {trainer.step_index})")
