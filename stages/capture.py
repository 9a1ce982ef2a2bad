"""capture: a teacher's next-token distributions on demonstrations, kept as a dataset, so that ``distill`` needs no
teacher in memory.

Of every trained token the K most likely tokens of the teacher with their log-probabilities, and the mass of all others
in one number (``kd.logit`` topk, ``kd.context``). With ``context`` the teacher reads that text before each conversation
and the stored tokens are those without it, which are what the student reads: the same target tokens, further back in
the teacher's row (Askell et al. 2021).

    posttrain stage capture --input model=TEACHER --input data=demonstrations.jsonl --set top_k=50
    posttrain stage distill --input model=STUDENT --input data=dataset:capture-captured@latest

Every block of rows is a resumable unit; each row is written once, with its split and weight.
"""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field, model_validator

from stages.settings import ChatConfig
from stages.spec import InputSpec, OutputSpec, StageSpec


class Config(ChatConfig):
    top_k: int = Field(
        50, ge=1, description="Tokens kept per position (Askell et al. 50, unverified); at most the vocabulary."
    )
    distillation_temperature: float = Field(
        1.0, gt=0, description="Temperature of the teacher's distribution; distill must train at the same."
    )
    context: str | None = Field(
        None,
        title="Context",
        description=(
            "System message that the teacher reads before each conversation and the student never sees (kd.context)."
            " With {prompt} in it, it takes the place of the last question instead, which {prompt} stands for."
        ),
    )
    max_length: int = Field(
        1024, ge=8, description="Tokens per row as the student reads it; longer rows are cut and counted."
    )
    train_on: Literal["all_assistant", "final_turn", "final_message", "full"] = Field(
        "all_assistant", description="Which tokens are captured (sft.mask)."
    )
    max_tokens_per_micro_batch: int = Field(8192, ge=1, description="Tokens per forward pass; bounds memory.")
    block: int = Field(256, ge=1, description="Rows captured as one resumable unit.")

    @model_validator(mode="after")
    def _answers_for_itself(self):
        from stages.distill import ANSWER

        if ANSWER in (self.context or ""):
            raise ValueError(
                "a teacher that has read {answer} in its context would only repeat it; write a context without {answer},"
                " or distill with method=on_policy lmbda=1, where the student answers"
            )
        return self


SPEC = StageSpec(
    name="capture",
    config=Config,
    gpu=True,
    inputs={
        "model": InputSpec("model", doc="The teacher, with the student's tokenizer."),
        "data": InputSpec("dataset", kinds=("demonstrations/1",), doc="Conversations to capture, all splits."),
    },
    outputs={
        "captured": OutputSpec(
            "dataset", doc="teacher_logps/1: tokens, mask, and the teacher's top-k log-probabilities."
        )
    },
)


def run(stage):
    from stages.batching import per_response
    from stages.chat import stage_renderer
    from stages.models.modeling import head_of, hidden_states, load_frozen, top_logps
    from stages.reporting.reports import document, facts
    from stages.running.blocks import remaining_blocks
    from storage.datasets import open_dataset

    config, renderer = stage.config, stage_renderer(stage)
    items, dropped = encode(stage, renderer)
    writer = stage.writer("captured", "teacher_logps/1", meta={"context": config.context})
    if stage.units_done * config.block < len(items):
        model = load_frozen(stage.path("model"), stage.device)

    def distributions(batch):
        values = top_logps(
            head_of(model), hidden_states(model, batch, batch.src_N), config.top_k, config.distillation_temperature
        )
        counts = batch.mask_SL.sum(1).tolist()
        return list(zip(*(part.cpu().split(counts) for part in values)))

    for _, block in remaining_blocks(stage, items, config.block):
        found = per_response(
            [i.extra.get("teacher_item") or i for i in block],
            config.max_tokens_per_micro_batch,
            stage.device,
            distributions,
            model,
        )
        writer.write(captured_row(stage, renderer, item, *row[0]) for item, row in zip(block, found))
    writer.close({"rows": len(items), **{f"dropped/{name}": count for name, count in dropped.items()}})
    outside = [
        x
        for row in open_dataset(str(stage.workdir / "out" / "captured")).iter_rows(columns=["rest_logps"])
        for x in row["rest_logps"]
    ]
    summary = {
        "rows": len(items),
        "positions": len(outside),
        "mass_outside": sum(map(math.exp, outside)) / len(outside),
        **{f"dropped/{k}": v for k, v in dropped.items()},
    }
    stage.summary(summary)
    stage.report("summary", markdown=document("Captured distributions", facts(summary)))


def encode(stage, renderer):
    """Items of all rows, as ``distill`` reads them, each with its row's own columns (and the teacher's item where that
    differs), and counts of dropped rows.
    """
    from stages.distill import behind_context, teacher_positions, within_positions
    from stages.sft import encode_demonstrations
    from storage.schema import provenance

    config = stage.config
    behind = None if config.context is None else behind_context(renderer, config)
    seen = within_positions(behind, teacher_positions(stage))

    def more(row, mine, turns):
        found = seen(row, mine, turns)
        own = {**provenance(row), **{name: row.get(name) for name in ("source", "origin", "split", "extra_json")}}
        return found if isinstance(found, str) else {**found, "row": own}

    items, dropped = encode_demonstrations(stage.dataset("data"), None, renderer, config, more=more)
    if not items:
        raise ValueError(
            f"No row is left to capture (dropped {dropped}). Raise max_length, shorten context, or give demonstrations"
            " with assistant turns."
        )
    return items, dropped


def captured_row(stage, renderer, item, ids, logps, rest) -> dict:
    """One finished ``teacher_logps/1`` row: ids and log-probs of position after position, ``top_k`` each."""
    from storage.files import sha256_text
    from storage.schema import complete_row

    config = stage.config
    return complete_row(
        "teacher_logps/1",
        {
            **item.extra["row"],
            "weight": item.extra["weight"],
            "ids": item.responses[0].tolist(),
            "mask": item.masks[0].tolist(),
            "top_k": ids.shape[1],
            "temperature": config.distillation_temperature,
            "teacher_ids": ids.flatten().tolist(),
            "teacher_logps": logps.flatten().tolist(),
            "rest_logps": rest.tolist(),
            "teacher_hash": stage.inputs["model"].digest,
            "tokenizer_hash": renderer.vocabulary_hash,
            "template_id": renderer.template_hash,
            "context_id": None if config.context is None else sha256_text(config.context)[:16],
        },
        dataset="captured",
        source=item.extra["row"]["source"],
        origin=item.extra["row"]["origin"],
    )
