"""A stage that holds a GPU slot and does nothing for a while; `fail` makes it fail at the end."""

from __future__ import annotations

from pydantic import Field

from stages.spec import StageConfig, StageSpec


class Config(StageConfig):
    seconds: float = Field(0.1, ge=0, description="How long it takes.")
    fail: bool = Field(False, description="Fail at the end.")


SPEC = StageSpec(name="slow", config=Config, gpu=True)


def run(stage):
    import time

    from stages.harness import StageFailure

    steps = max(1, int(stage.config.seconds / 0.1))
    for step in range(steps):
        time.sleep(stage.config.seconds / steps)
        stage.progress(step + 1, steps)
    if stage.config.fail:
        raise StageFailure("it was told to fail")
    stage.summary({"steps": steps})
