"""A stage that publishes the model of every epoch beside its own, as an sft with publish_epochs does."""

from pydantic import Field

from stages.spec import OutputSpec, StageConfig, StageSpec


class Config(StageConfig):
    """Settings of the stage."""

    weights: list[int] = Field([1, 2, 3], description="what the model holds after each epoch")


SPEC = StageSpec(
    name="epochs",
    config=Config,
    outputs={
        "model": OutputSpec("model", role="policy"),
        "epoch": OutputSpec("model", role="policy", required=False, many=True),
    },
)


def run(stage):
    """Write the models; the last one is the stage's own, too."""
    weights = stage.config.weights
    for output, value in [*((f"epoch.{i}", one) for i, one in enumerate(weights, 1)), ("model", weights[-1])]:
        with stage.output_model(output, role="policy") as folder:
            (folder / "config.json").write_text('{"model_type": "toy"}')
            (folder / "weights.bin").write_text(str(value))
    stage.summary({"last": weights[-1]})
