"""A stage small enough to kill a hundred times: a random walk with metrics, checkpoints, a dataset and a model."""

import sys
import time

from pydantic import Field

from stages.spec import InputSpec, OutputSpec, StageConfig, StageSpec


class Config(StageConfig):
    """Settings of the walk."""

    steps: int = Field(30, ge=1, description="number of steps")
    save_every: int = Field(5, ge=1, description="steps between checkpoints")
    sleep: float = Field(0.0, ge=0, description="seconds per step", json_schema_extra={"identity": False})
    fail_at: int = Field(-1, description="step at which to fail; -1 never")
    server: str = Field(
        "", description="where something answers", json_schema_extra={"identity": False, "address": True}
    )
    threads: bool = Field(False, description="note torch's threads", json_schema_extra={"identity": False})


SPEC = StageSpec(
    name="toy",
    config=Config,
    inputs={
        "text": InputSpec("file", required=False, doc="any file"),
        "data": InputSpec("dataset", required=False),
        "model": InputSpec("model", required=False),
    },
    outputs={"data": OutputSpec("dataset"), "model": OutputSpec("model", role="policy")},
)


def run(stage):
    """Walk; write one dataset row and one metric per step."""
    position = 0.0
    start = 0
    checkpoint = stage.checkpoints.latest()
    if checkpoint:
        start, position = checkpoint.step, float(checkpoint.file("position").read_text())
    if stage.config.threads and "torch" in sys.modules:
        stage.perf(start, {"threads": sys.modules["torch"].get_num_threads()})
    writer = stage.writer("data", "text/1")
    for step in range(start, stage.config.steps):
        if step == stage.config.fail_at:
            raise RuntimeError(f"asked to fail at step {step}")
        position += float(stage.rng("walk", step).normal())
        stage.metric(step, {"position": position, "abs": abs(position)})
        stage.perf(step, {"tokens_per_second": 1.0 + step})
        writer.write([row(step, position)])
        stage.progress(step + 1, stage.config.steps)
        if stage.config.sleep:
            time.sleep(stage.config.sleep)
        if (step + 1) % stage.config.save_every == 0:
            value = position
            stage.save_checkpoint(
                step + 1,
                {"n": step + 1},
                {"position": repr(value).encode(), "extra": lambda p: p.write_text("x" * 1000)},
            )
    writer.close({"steps": stage.config.steps})
    stage.report("walk", markdown="# walk\n", table=[{"steps": stage.config.steps}])
    with stage.output_model("model", role="policy") as folder:
        (folder / "config.json").write_text('{"model_type": "toy"}')
        (folder / "weights.bin").write_text(repr(position))
    stage.summary({"position": position})


def row(step, position):
    """One text row."""
    from storage.schema import complete_row

    return complete_row(
        "text/1", {"text": f"step {step} at {position!r}"}, dataset="toy", source="toy", origin="verifier"
    )
