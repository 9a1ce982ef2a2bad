"""The models behind every pass over the training rows, kept beside the one of the end (``sft.ckpt_select``: which of
them answers best is decided later, by stage ``select_checkpoint``).
"""

from __future__ import annotations

import torch

from stages.models.modeling import save_policy
from stages.spec import ConfigError


def epochs_of(stage, model, tokenizer, source) -> Epochs | None:
    """What ``publish_epochs`` asks for, None where it is off."""
    return Epochs(stage, model, tokenizer, source) if stage.config.publish_epochs else None


class Epochs:
    """The models behind every pass over the training rows, as outputs ``epoch.1``, ``epoch.2`` ...
    (``publish_epochs``): what would be published if training ended there, without a choice by ``select_by``.

    Args:
        source: the training source, which passes over rows (``steps_per_epoch``).

    Raises:
        ConfigError: no pass ends within the run.
    """

    def __init__(self, stage, model, tokenizer, source):
        self.stage, self.model, self.tokenizer = stage, model, tokenizer
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
        stage, dtype = self.stage, getattr(torch, self.stage.config.save_dtype)
        epoch = trainer.step_index // self.steps
        with trainer.averaged(), stage.output_model(f"epoch.{epoch}", role="policy") as directory:
            save_policy(
                self.model,
                self.tokenizer,
                directory,
                base=stage.inputs["model"].ref,
                dtype=None if dtype == torch.float32 else dtype,
                trains_on=True,
            )
        stage.log(f"published the model of epoch {epoch} (step {trainer.step_index})")
