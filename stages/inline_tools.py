"""inline_tools: calls that stand in texts are made, and kept where their results help to predict what follows
(``synth.tool_data`` inline form, ``synth.toolformer``).

    posttrain stage inline_tools --input data=texts.jsonl
    posttrain stage inline_tools --input data=texts.jsonl --input model=MODEL --set min_gain=0.5 --set mode=append

A call is written ``<API>calculator(400 / 1400)</API>``, in plain text or in trained assistant turns, by a model or by
people: ``calculator(EXPRESSION)``, ``search(WORDS)`` in the row's own table (``extra_json={"table": {...}}``) or
``python(CODE)`` in the sandbox. Its result takes its place, or follows it (``mode``). A call that fails is taken out.

With ``min_gain`` a model judges every call (Toolformer, Schick et al. 2023): kept where min(L without a call, L with
the call and no result) - L with call and result >= min_gain, L being the weighted NLL of the next tokens. What stands
before the call is as it will be kept, what follows has no calls. Every block of rows is a resumable unit.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import Literal

from pydantic import Field

from stages.settings import ChatConfig
from stages.spec import InputSpec, OutputSpec, StageSpec

WINDOW = 5  # tokens that a call is judged by; token t weighs max(0, 1 - t / 5) (Schick et al. 2023)


class Config(ChatConfig):
    mode: Literal["replace", "append"] = Field(
        "replace", description="The result replaces the call, or stands behind it (to train calls)."
    )
    min_gain: float | None = Field(
        None,
        title="Minimum gain",
        description=(
            "Nats by which a result must lower the weighted NLL of what follows for its call to be kept (tau_f; Schick"
            " et al. 0.5 to 1); empty: every call that works is kept, and no model is needed."
        ),
    )
    timeout_s: float = Field(2.0, gt=0, description="Seconds that a python call may take.")
    max_length: int = Field(1024, ge=16, description="Tokens before a call that the model reads, the last ones.")
    max_tokens_per_micro_batch: int = Field(8192, ge=1, description="Tokens per forward pass; bounds memory.")
    block: int = Field(256, ge=1, description="Rows whose calls are made as one resumable unit.")


SPEC = StageSpec(
    name="inline_tools",
    config=Config,
    gpu=True,
    inputs={
        "data": InputSpec(
            "dataset", kinds=("text/1", "demonstrations/1"), doc="Texts or demonstrations with inline calls."
        ),
        "model": InputSpec("model", required=False, doc="Judges the calls, for min_gain."),
    },
    outputs={"data": OutputSpec("dataset", doc="The rows with calls made; rows without a call as they are.")},
)


def run(stage):
    from collections import Counter

    from stages.chat import stage_renderer
    from stages.reporting.reports import document, facts
    from stages.spec import ConfigError

    config, data = stage.config, stage.dataset("data")
    if (config.min_gain is not None) != stage.has("model"):
        raise ConfigError(
            "inline_tools: min_gain is judged by a model and a model judges by min_gain; give --input model=MODEL and"
            " min_gain=0.5 together, or neither"
        )
    checkpoint = stage.checkpoints.latest()
    state = checkpoint.state if checkpoint else {"counts": {}, "gains": 0.0, "judged": 0}
    counts, gains = Counter(state["counts"]), Gains(state["gains"], state["judged"])
    writer, total = stage.writer("data", data.kind), len(data)
    start = stage.units_done * config.block
    judge = Judge(stage, stage_renderer(stage)) if config.min_gain is not None and start < total else None
    for unit, rows in enumerate(batched(islice(data.iter_rows(), start, None), config.block), stage.units_done + 1):
        writer.write([with_calls_made(row, data.kind, config, counts, gains, judge) for row in rows])
        stage.save_checkpoint(unit, {"counts": dict(counts), "gains": gains.total, "judged": gains.count})
        stage.progress(min(unit * config.block, total), total, "rows")
    if not counts["calls"]:
        raise ValueError(
            "inline_tools: no text holds a call; write calls as <API>calculator(400 / 1400)</API>,"
            " <API>search(WORDS)</API> or <API>python(CODE)</API>"
        )
    summary = {
        "rows": total,
        **dict(sorted(counts.items())),
        **({"gain_mean": gains.total / gains.count} if gains.count else {}),
    }
    writer.close(summary)
    stage.summary(summary)
    stage.report("summary", markdown=document("Inline tools", facts(summary)))


@dataclass
class Gains:
    """Sum and number of the gains so far, in the order of the calls."""

    total: float = 0.0
    count: int = 0

    def append(self, gain: float) -> None:
        self.total, self.count = self.total + gain, self.count + 1


def batched(rows, size: int):
    """Lists of up to ``size`` rows."""
    while part := list(islice(rows, size)):
        yield part


def with_calls_made(row: dict, kind: str, config: Config, counts, gains: Gains, judge) -> dict:
    """A row with the calls of its text, or of its trained turns, made; the row itself where it has none."""
    from storage.schema import complete_row

    def made(text: str, conversation: list[dict] | None) -> str:
        gain = None if judge is None else lambda *parts: judge.gain(row, conversation, *parts)
        return with_results(text, row, config, counts, gains, gain)

    if kind == "text/1":
        text = made(row["text"], None)
        changed = {"text": text, "n_chars": len(text)} if text != row["text"] else {}
    else:
        messages = list(row["messages"])
        for turn in sorted(row["train_turns"]):  # each behind earlier ones as they are kept
            if text := messages[turn].get("content"):
                messages[turn] = {**messages[turn], "content": made(text, messages[:turn])}
        changed = {"messages": messages} if messages != row["messages"] else {}
    counts["rows_with_calls"] += bool(changed)
    if not changed:
        return row
    # other content is another row
    kept = {name: value for name, value in {**row, **changed}.items() if name not in ("row_id", "schema")}
    return complete_row(kind, kept, dataset=row["dataset"], source=row["source"], origin=row["origin"])


def with_results(text: str, row: dict, config: Config, counts, gains: Gains, gain=None) -> str:
    """The text with its calls made. gain(before, call, result, after) judges one; what it says is added to
    ``gains``.
    """
    from stages.acting.tools import API_CALL, substitute

    done, at = "", 0
    for match in API_CALL.finditer(text):
        done, at = done + text[at : match.start()], match.end()
        counts["calls"] += 1
        name, argument = match.groups()
        result = answer(name, argument, row, config)
        found = (
            None if result is None or gain is None else gain(done, match.group(), result, API_CALL.sub("", text[at:]))
        )
        if found is not None:
            gains.append(found)
        why = (
            "failed"
            if result is None
            else (
                "kept"
                if gain is None
                else "nothing_follows"
                if found is None
                else "kept"
                if found >= config.min_gain
                else "no_gain"
            )
        )
        counts[why] += 1
        if why == "kept":
            done += substitute(match.group(), {f"{name}({argument})": result}, config.mode)
    return done + text[at:]


def answer(name: str, argument: str, row: dict, config: Config) -> str | None:
    """What a tool says to its one argument; None where it fails."""
    import json

    from stages.acting.tools import BadCall, calculate, search

    try:
        if name == "calculator":
            return calculate(argument)
        if name == "search":
            return search(argument, json.loads(row.get("extra_json") or "{}").get("table") or {}, limit=1)
    except BadCall:
        return None
    if name == "python":
        from stages.running.sandbox import Limits, run_jobs

        (outcome,) = run_jobs(
            [{"kind": "program", "source": argument, "stdin": "", "timeout_s": config.timeout_s}], Limits(), fresh=True
        )
        return (
            None if outcome.error is not None or outcome.value["exit"] != 0 else outcome.value["stdout"].strip() or None
        )
    return None


class Judge:
    """A model that says how much a call's result helps."""

    def __init__(self, stage, renderer):
        from stages.models.modeling import load_frozen

        self.config, self.renderer, self.device = stage.config, renderer, stage.device
        self.model = load_frozen(stage.path("model"), stage.device)

    def gain(
        self, row: dict, conversation: list[dict] | None, before: str, call: str, result: str, after: str
    ) -> float | None:
        """``toolformer_gain`` of one call; None where nothing follows it."""
        from stages.acting.tools import toolformer_gain
        from stages.batching import make_item
        from stages.chat import rendering
        from stages.superfilter import target_nlls

        tokenizer = self.renderer.tokenizer
        ids = lambda text: list(tokenizer(text, add_special_tokens=False)["input_ids"]) if text else []
        follows = ids(after)[:WINDOW]
        if not follows:
            return None
        if conversation is None:
            start = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
        else:
            with rendering(row):
                start = list(self.renderer.prompt_ids(conversation))
        items = []
        for inserted in ("", call, f"{call} {result}"):
            seen = (start + ids(before + inserted))[-self.config.max_length :]
            items.append(make_item(row["row_id"], seen, [follows], [[1 if seen else 0] + [1] * (len(follows) - 1)]))
        return toolformer_gain(
            *(
                self.loss(losses)
                for losses in target_nlls(self.model, items, self.config.max_tokens_per_micro_batch, self.device)
            )
        )

    @staticmethod
    def loss(losses: list[float]) -> float:
        """Weighted NLL: weights max(0, 1 - t / 5) of token t, summing to 1."""
        weights = [1 - t / WINDOW for t in range(len(losses))]
        return sum(w * loss for w, loss in zip(weights, losses)) / sum(weights)
