"""superfilter: demonstrations that a small model finds hard given their instruction, by its likelihood of the answers
(``data.ifd``, Li et al. 2024).

    posttrain stage superfilter --input model=SMALL --input data=demonstrations.jsonl --set keep_fraction=0.1
    posttrain stage sft --input model=MODEL --input data=dataset:superfilter-data@latest

The instruction-following difficulty of a row is IFD = mean NLL(answer | instruction) / mean NLL(answer). At 1 or above
the instruction does not help to predict the answer, so the two do not belong together: such rows are left out. Of the
others the share ``keep_fraction`` of all rows with the highest IFD is kept. Every training row is written, with its IFD
as ``difficulty`` and whether it is ``kept``; training leaves out what is not. Rows of other splits pass through. Every
block of rows is a resumable unit.
"""

from __future__ import annotations

from pydantic import Field

from stages.settings import ChatConfig
from stages.spec import InputSpec, OutputSpec, StageSpec


class Config(ChatConfig):
    keep_fraction: float = Field(
        0.1,
        gt=0,
        le=1,
        description=(
            "Share of the training rows that is kept, of those with IFD below 1 the hardest; 1 keeps all of these (Li"
            " et al. 2024: 0.05 to 0.15)."
        ),
    )
    max_length: int = Field(
        1024, ge=8, description="Tokens per row; an answer that is cut is judged by what is left of it, and counted."
    )
    max_tokens_per_micro_batch: int = Field(8192, ge=1, description="Tokens per forward pass; bounds memory.")
    block: int = Field(256, ge=1, description="Rows judged as one resumable unit.")


SPEC = StageSpec(
    name="superfilter",
    config=Config,
    gpu=True,
    inputs={
        "model": InputSpec(
            "model",
            doc="A small model with a chat template; its tokens need not be those of the model that will be trained.",
        ),
        "data": InputSpec(
            "dataset",
            kinds=("demonstrations/1",),
            doc="Demonstrations; of a conversation the last answer is judged, given all before it.",
        ),
    },
    outputs={"data": OutputSpec("dataset", doc="The same rows with difficulty (IFD) and kept.")},
)


def run(stage):
    from functools import cache

    from stages.chat import stage_renderer
    from stages.ingestion.curation import superfilter
    from stages.models.modeling import load_frozen
    from stages.reporting.reports import document, facts
    from stages.running.blocks import in_blocks

    config, renderer, data = stage.config, stage_renderer(stage), stage.dataset("data")
    rows = list(data.iter_rows())
    pairs, at, counts = [], [], {"truncated": 0, "unjudged": 0}
    for index, row in enumerate(rows):
        if row["split"] != "train" or row.get("kept") is False:
            continue
        pair, cut = items_of(row, renderer, config.max_length)
        counts["truncated"] += cut
        if pair is None:
            counts["unjudged"] += 1
            continue
        at.append(index)
        pairs.append(pair)
    if not at:
        raise ValueError(
            f"superfilter: no training row has an answer to judge ({counts['unjudged']} have none within"
            f" max_length={config.max_length}); raise max_length, or give other rows"
        )
    model = cache(lambda: load_frozen(stage.path("model"), stage.device))

    def judge(part):
        return zip(
            *(mean_nlls(model(), items, config.max_tokens_per_micro_batch, stage.device) for items in zip(*part))
        )

    losses = list(zip(*in_blocks(stage, "nll", pairs, judge, config.block)))
    found = superfilter(*losses, config.keep_fraction)
    kept, judged = {at[k] for k in found["kept"]}, dict(zip(at, found["ifd"]))
    writer = stage.writer("data", "demonstrations/1")
    writer.write(
        (
            {**row, "difficulty": judged[index], "difficulty_judge": "ifd", "kept": index in kept}
            if index in judged
            else {**row, "kept": False}
            if row["split"] == "train"
            else row
        )
        for index, row in enumerate(rows)
    )
    summary = {
        "rows": len(rows),
        "judged": len(at),
        "kept": len(kept),
        "ifd_1_or_more": len(found["excluded"]),
        "ifd_mean": sum(found["ifd"]) / len(at),
        "nll_given_instruction": sum(losses[0]) / len(at),
        "nll_alone": sum(losses[1]) / len(at),
        **counts,
    }
    writer.close(summary)
    stage.summary(summary)
    if len(kept) < int(config.keep_fraction * len(at)):
        stage.warn(
            "few_helped",
            f"only {len(kept)} of {len(at)} rows have an IFD below 1, fewer than keep_fraction={config.keep_fraction}"
            " asks for. Look at whether the answers belong to their instructions, or write a smaller keep_fraction.",
        )
    stage.report("summary", markdown=document("Superfiltering", facts(summary)))


def items_of(row: dict, renderer, max_length: int):
    """((item of the last answer given all before it, item of the answer alone), whether it was cut); None without two
    tokens to judge.
    """
    from stages.batching import make_item
    from stages.chat import rendering

    with rendering(row):
        encoded = renderer.conversation(row["messages"], train="final_turn", max_length=max_length)
    answer = [token for token, trained in zip(encoded.ids, encoded.mask) if trained]
    if len(answer) < 2:
        return None, encoded.truncated
    start = renderer.tokenizer.bos_token_id
    before = [] if start is None else [start]  # without one the first token has no predictor
    return (
        make_item(row["row_id"], [], [encoded.ids], [encoded.mask]),
        make_item(row["row_id"], before, [answer], [[1 if before else 0] + [1] * (len(answer) - 1)]),
    ), encoded.truncated


def target_nlls(model, items, max_tokens: int, device: str) -> list[list[float]]:
    """-log p of every trained token of each item's one response, in nats."""
    from stages.batching import per_response
    from stages.models.modeling import target_logps

    def compute(batch):
        return [
            (-part.double()).tolist() for part in target_logps(model, batch)[0].split(batch.mask_SL.sum(1).tolist())
        ]

    return [found[0] for found in per_response(items, max_tokens, device, compute, model)]


def mean_nlls(model, items, max_tokens: int, device: str) -> list[float]:
    """Mean -log p of the trained tokens of each item."""
    return [sum(losses) / len(losses) for losses in target_nlls(model, items, max_tokens, device)]
