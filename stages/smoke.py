"""smoke: a base model and what was made of it, side by side on a few beginnings of sentences (eval.smoke).

    posttrain stage smoke --input models.base=BASE --input models.tuned=TUNED

A base model goes on with the text and does not end; a tuned one answers and stops. Each model is asked greedily, a
model with a chat template behind it, another with the plain text. ``NAME/stops`` is the share of prompts that it ends
by itself, ``NAME/tokens`` its mean length; a tuned model that runs on like the first one is warned of.
"""

from __future__ import annotations

from pydantic import Field

from stages.settings import SamplingConfig
from stages.spec import ConfigError, InputSpec, OutputSpec, StageSpec

PROMPTS = ["The president of the united states in 2006 was"]


class Config(SamplingConfig):
    prompts: list[str] = Field(PROMPTS, description="What is asked, each by itself.")
    temperature: float = Field(0.0, ge=0, description="Softmax temperature; 0 is greedy.")
    max_completion_length: int = Field(64, ge=1, description="New tokens at most.")


SPEC = StageSpec(
    name="smoke",
    config=Config,
    gpu=True,
    inputs={
        "models": InputSpec(
            "model",
            many=True,
            doc="The models, as models.NAME; the first one given is what the others are compared with.",
        )
    },
    outputs={"samples": OutputSpec("dataset", doc="eval_samples/1: every answer.")},
)


def run(stage):
    from stages.chat import PLAIN_TEMPLATE, load_tokenizer, renderer_for
    from stages.decoding.engines import make_engine
    from stages.generation import prompt_ids, sampling_params
    from stages.reporting.reports import document, markdown_table, sample_table
    from storage.files import canonical_json
    from storage.schema import complete_row, prompt_id

    config, names = stage.config, list(stage.many("models"))
    if config.engine != "builtin":
        raise ConfigError(
            f"smoke loads the models one after the other; engine={config.engine} serves one, so write engine=builtin"
        )
    if not config.prompts:
        raise ConfigError("smoke: prompts is empty; write prompts=['The president of the united states in 2006 was']")
    writer = stage.writer("samples", "eval_samples/1")
    summary, rows = {}, [{"prompt": prompt} for prompt in config.prompts]
    done = stage.units_done
    for index, name in enumerate(names):
        if index >= done:
            role = f"models.{name}" if name else "models"
            renderer = renderer_for(stage.path(role))
            template = "none" if load_tokenizer(stage.path(role)).chat_template in (None, PLAIN_TEMPLATE) else "chat"
            ids = [prompt_ids(renderer, [{"role": "user", "content": prompt}], template) for prompt in config.prompts]
            groups = make_engine(stage, renderer, role=role).generate(
                ids, sampling_params(config, renderer), [[stage.seed_for("smoke", k)] for k in range(len(ids))]
            )
            writer.write(
                complete_row(
                    "eval_samples/1",
                    {
                        "prompt_id": (pid := prompt_id([{"role": "user", "content": prompt}])),
                        "group_id": pid,
                        "run_id": f"{stage.key[:16]}:{name}",
                        "item_id": pid,
                        "sample_idx": 0,
                        "output": group[0].text,
                        "extracted": None,
                        "correct": None,
                        "format_error": False,
                        "tokens": len(group[0].ids),
                        "extra_json": canonical_json(
                            {
                                "mode": "greedy",
                                "finish": group[0].finish_reason,
                                "model": name,
                                "template": template,
                                "prompt": prompt,
                            }
                        ),
                    },
                    dataset="smoke",
                    source=name or "model",
                    origin="ai",
                    split="test",
                )
                for prompt, group in zip(config.prompts, groups)
            )
            writer.flush()
            stage.save_checkpoint(index + 1, {}, {})
        stage.progress(index + 1, len(names), name)
    writer.close({"models": len(names)})
    from stages.evaluation.scores import records_of
    from storage.datasets import open_dataset

    records = records_of(open_dataset(str(stage.workdir / "out" / "samples")).iter_rows())
    for name in names:
        own = [r for r in records if r["model"] == name]
        summary |= {
            f"{name or 'model'}/stops": sum(r["finish"] in ("eos", "stop") for r in own) / len(own),
            f"{name or 'model'}/tokens": sum(r["tokens"] for r in own) / len(own),
        }
        for row, r in zip(rows, own):
            row[name or "model"] = r["output"] + ("" if r["finish"] in ("eos", "stop") else " …")
    stage.summary(summary)
    runs_on = [name for name in names[1:] if summary[f"{name}/stops"] == 0]
    if runs_on:
        stage.warn(
            "runs_on",
            f"{', '.join(runs_on)} end{'s' * (len(runs_on) == 1)} none of the prompts within"
            f" {config.max_completion_length} tokens, as a base model does. Look at the chat template and its end"
            " token, and whether the stop token was trained.",
        )
    table = [
        {
            "model": name or "model",
            "stops": summary[f"{name or 'model'}/stops"],
            "tokens": summary[f"{name or 'model'}/tokens"],
        }
        for name in names
    ]
    stage.report(
        "summary",
        table=rows,
        markdown=document(
            "Smoke test",
            "… marks an answer that was cut.",
            ("", markdown_table(table)),
            ("Side by side", sample_table(rows)),
        ),
    )
