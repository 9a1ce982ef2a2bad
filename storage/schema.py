"""Arrow schemas of every dataset kind, row identity and text normalisation.

This is the one place that says what a row is (catalogue A.0 and `data.version`):

* `SCHEMAS["pairs/1"]` ...: the Arrow schema of each kind, common columns first.
* `prompt_id`, `row_id`, `dataset_hash`: content hashes. Provenance (`gen`, `ann`, dates, weight,
  split) never enters a hash, so the same content has the same identity wherever it comes from.
* `complete_row`: fills the common columns of a row that has only its own.

Messages are `{"role", "content"}` dicts with optional `name`, `functions`, `function_calls` and
`tool_call_id`; null fields are dropped before hashing.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
import unicodedata
from functools import lru_cache
from pathlib import Path
from typing import Any, Iterable

import orjson
import pyarrow as pa

SPLITS = ("train", "validation", "test", "rm_a", "rm_b")

STR, F64, F32, BOOL = pa.string(), pa.float64(), pa.float32(), pa.bool_()
I8, I32, I64, TS = pa.int8(), pa.int32(), pa.int64(), pa.timestamp("us", tz="UTC")


def _struct(**fields: pa.DataType) -> pa.StructType:
    return pa.struct([pa.field(name, kind) for name, kind in fields.items()])


MESSAGE = _struct(role=STR, content=STR, name=STR, functions=STR, function_calls=STR, tool_call_id=STR)
GEN = _struct(
    model_id=STR,
    checkpoint_id=STR,
    policy_version=I64,
    template_id=STR,
    engine=STR,
    temperature=F64,
    top_p=F64,
    top_k=I32,
    max_tokens=I32,
    rng_seed=I64,
)
ANN = _struct(
    annotator_type=STR,
    annotator_id=STR,
    judge_id=STR,
    judge_prompt_id=STR,
    criteria=STR,
    principle_ids=pa.list_(STR),
    confidence=F64,
    cost_usd=F64,
    order_swapped=BOOL,
    annotated_at=TS,
)
ASPECT_SCORE = _struct(aspect=STR, score=F64, rationale=STR)
MESSAGES = pa.list_(MESSAGE)
TEST = _struct(kind=STR, input=STR, expected=STR, code=STR, timeout_s=F64)
CONSTRAINT = _struct(id=STR, kwargs_json=STR)
SEGMENT = _struct(start=I32, end=I32, scores=pa.list_(ASPECT_SCORE))
# One turn of the policy: its tokens [start, end) of the completion, what it earned of the reward, and what happened.
TURN = _struct(start=I32, end=I32, reward=F64, events=pa.list_(STR))
SPAN = _struct(start=I32, end=I32, label=STR, comment=STR)

# name -> (type, nullable)
_COMMON: list[tuple[str, pa.DataType, bool]] = [
    ("row_id", STR, False),
    ("prompt_id", STR, True),
    ("group_id", STR, False),
    ("schema", STR, False),
    ("dataset", STR, False),
    ("source", STR, False),
    ("origin", STR, False),
    ("split", STR, False),
    ("batch_id", STR, True),
    ("license", STR, True),
    ("collected_at", TS, True),
    ("weight", F64, False),
    ("extra_json", STR, True),
]

#: Columns that every kind has: where a row is from.
PROVENANCE = tuple(name for name, _, _ in _COMMON)

# Column lists of each kind; a trailing "?" marks a nullable column.
_M, _S = MESSAGES, pa.list_(STR)
_KINDS: dict[str, dict[str, pa.DataType]] = {
    "demonstrations/1": {
        "messages": _M,
        "train_turns": pa.list_(I32),
        "category?": STR,
        "difficulty?": F64,
        "difficulty_judge?": STR,
        "kept": BOOL,
        "gen?": GEN,
    },
    "prompts/1": {
        "prompt": _M,
        "domain?": STR,
        "category?": STR,
        "answer?": STR,
        "answer_type?": STR,
        "choices?": _S,
        "tests?": pa.list_(TEST),
        "constraints?": pa.list_(CONSTRAINT),
        "facts?": _S,
        "reward_route?": _S,
        "language?": STR,
    },
    "comparisons/1": {
        "prompt": _M,
        "response_a": _M,
        "response_b": _M,
        "label_kind": STR,
        "n_points?": I8,
        "label?": I8,
        "orientation?": STR,
        "votes?": _S,
        "p_a?": F64,
        "criteria?": STR,
        "turn_index?": I32,
        "gen_a?": GEN,
        "gen_b?": GEN,
        "ann?": ANN,
    },
    "pairs/1": {
        "prompt": _M,
        "chosen": _M,
        "rejected": _M,
        "chosen_score?": F64,
        "rejected_score?": F64,
        "margin?": F64,
        "strength?": I8,
        "label_prob?": F64,
        "pairs_in_group": I32,
        "rank_gap?": I32,
        "stage_index?": I32,
        "turn_index?": I32,
        "constraint_ids?": _S,
        "chosen_gen?": GEN,
        "rejected_gen?": GEN,
        "ann?": ANN,
    },
    "rankings/1": {
        "prompt": _M,
        "completions": pa.list_(_M),
        "ranks": pa.list_(I32),
        "scores?": pa.list_(F64),
        "gens?": pa.list_(GEN),
        "ann?": ANN,
    },
    "ratings/1": {
        "prompt": _M,
        "completion": _M,
        "score": F64,
        "scale_min": F64,
        "scale_max": F64,
        "aspects?": pa.list_(ASPECT_SCORE),
        "critique?": STR,
        "gen?": GEN,
        "ann?": ANN,
    },
    "unpaired/1": {"prompt": _M, "completion": _M, "label": BOOL, "label_kind": STR, "gen?": GEN, "ann?": ANN},
    "stepwise/1": {
        "prompt": _M,
        "completions": _S,
        "labels": pa.list_(I8),
        "soft_labels?": pa.list_(F64),
        "separator": STR,
        "answer?": STR,
        "solution_correct?": BOOL,
        "generation?": I32,
        "is_quality_control": BOOL,
        "ann?": ANN,
    },
    "segments/1": {
        "prompt": _M,
        "chosen": _M,
        "rejected": _M,
        "chosen_segments": pa.list_(SEGMENT),
        "rejected_segments": pa.list_(SEGMENT),
        "offset_unit": STR,
        "tokenizer_hash?": STR,
    },
    "span_feedback/1": {"prompt": _M, "completion": _M, "spans": pa.list_(SPAN), "critique?": STR},
    "feedback_events/1": {
        "event_id": STR,
        "conversation_id": STR,
        "prior_response_id": STR,
        "action": STR,
        "payload_json?": STR,
        "user_hash?": STR,
        "ts": TS,
    },
    "text/1": {"text": STR, "domain?": STR, "n_chars": I64},
    "revisions/1": {
        "prompt": _M,
        "original": STR,
        "critique": STR,
        "revision": STR,
        "principle_id": STR,
        "round": I32,
        "gen?": GEN,
    },
    "principles/1": {
        "principle_id": STR,
        "version": STR,
        "axis": STR,
        "text": STR,
        "critique_request": STR,
        "revision_request": STR,
        "comparison_request": STR,
        "kind": STR,
        "active": BOOL,
    },
    "candidates/1": {
        "prompt": _M,
        "prompt_idx": I32,
        "completion_idx": I32,
        "completion": _M,
        "scores": pa.list_(_struct(source=STR, value=F64)),
        "reward?": F64,
        "correct?": BOOL,
        "readable?": BOOL,
        "kept?": BOOL,
        "rank?": I32,
        "drop_reason?": STR,
        "gen?": GEN,
    },
    "rollouts/1": {
        "iteration": I64,
        "policy_version": I64,
        "sample_idx": I32,
        "prompt_ids": pa.list_(I32),
        "completion_ids": pa.list_(I32),
        "loss_mask": pa.list_(I8),
        "logp_old": pa.list_(F32),
        "logp_ref?": pa.list_(F32),
        "values?": pa.list_(F32),
        "token_rewards?": pa.list_(F32),
        "advantages?": pa.list_(F32),
        "reward": F64,
        "reward_components": pa.list_(_struct(name=STR, value=F64, weight=F64)),
        "reward_tier?": STR,
        "is_correct?": BOOL,
        "truncated": BOOL,
        "terminated": BOOL,
        "length": I32,
        "logp_plain_prompt?": pa.list_(F32),
        "sampling_prompt_id?": STR,
        "logp_rollout?": pa.list_(F32),
        "is_weights?": pa.list_(F32),
        "returns?": pa.list_(F32),
        "bootstrap_value?": F64,
        "score?": F64,  # sum of the components, before the rules for cut and long completions that make it the reward
        "shaped_reward?": F64,
        "step_ends?": pa.list_(I32),
        "step_rewards?": pa.list_(F64),
        "step_values?": pa.list_(F64),
        "tool_mask?": pa.list_(I8),
        "turns?": pa.list_(TURN),
        "finish_reason?": STR,
        "gen?": GEN,
    },
    "trajectories/1": {
        "episode_id": STR,
        "t": I32,
        "observation_json": STR,
        "action_json": STR,
        "next_observation_json": STR,
        "reward": F64,
        "events": _S,
        "reward_tier": STR,
        "reward_components?": pa.list_(_struct(name=STR, value=F64, weight=F64)),
        "logp_behaviour?": F64,
    },
    "judgements/1": {
        "item_id": STR,
        "judge_id": STR,
        "judge_prompt_id": STR,
        "order": I8,
        "raw": STR,
        "verdict?": STR,
        "rating?": F64,
        "p_a?": F64,
        "error?": STR,
        "attempt": I32,
        "tokens_in": I64,
        "tokens_out": I64,
        "cost_usd": F64,
        "cache_key": STR,
    },
    "rubric_items/1": {
        "category": STR,
        "item_id": STR,
        "version": STR,
        "kind": STR,
        "criterion": STR,
        "omega": F64,
        "critique_prompt_id?": STR,
        "scorer_id": STR,
        "parent_item_id?": STR,
        "critique_prompt?": STR,
        "settings_json?": STR,
        "generation_prompt?": STR,
        "improvement_prompt?": STR,
    },
    "rubric_scores/1": {
        "sample_row_id": STR,
        "item_id": STR,
        "item_version": STR,
        "critique?": STR,
        "reasoning?": STR,
        "score?": F64,
        "confidence?": F64,
        "scorer_id": STR,
        "attempt": I32,
        "error?": STR,
        "category?": STR,
        "omega?": F64,
        "raw?": STR,
    },
    "rubric_confidence/1": {
        "category": STR,
        "item_id": STR,
        "item_version": STR,
        "phi_bar": F64,
        "n": I64,
        "flagged": BOOL,
    },
    "ref_logps/1": {
        "ref_chosen_logp": F64,
        "ref_rejected_logp": F64,
        "n_chosen": I32,
        "n_rejected": I32,
        "ref_model_hash": STR,
        "tokenizer_hash": STR,
        "template_id": STR,
    },
    "ref_values/1": {
        "ref_values": pa.list_(F64),
        "parts?": pa.list_(I32),
        "n_tokens": pa.list_(I32),
        "ref_model_hash": STR,
        "tokenizer_hash": STR,
        "template_id": STR,
    },
    "teacher_logps/1": {
        "ids": pa.list_(I32),
        "mask": pa.list_(I8),
        "top_k": I32,
        "temperature": F64,
        "teacher_ids": pa.list_(I32),
        "teacher_logps": pa.list_(F32),
        "rest_logps": pa.list_(F32),
        "teacher_hash": STR,
        "tokenizer_hash": STR,
        "template_id": STR,
        "context_id?": STR,
    },
    "prompt_stats/1": {
        "iteration": I64,
        "n": I32,
        "mean_reward?": F64,
        "reward_std?": F64,
        "pass_at_1?": F64,
        "mean_logprob": F64,
        "kept": BOOL,
        "drop_reason?": STR,
    },
    "baselines/1": {"b": F64, "n": I32, "policy_version": I64},
    "group_preferences/1": {"group": STR, "question": STR, "response": STR, "embedding": pa.list_(F32), "y": F64},
    "battles/1": {
        "model_a": STR,
        "model_b": STR,
        "outcome_a": F64,
        "item_id": STR,
        "judge_id": STR,
        "len_a": I32,
        "len_b": I32,
        "order": I8,
    },
    "eval_items/1": {"benchmark": STR, "item_id": STR, "prompt": _M, "target_json": STR, "tags": _S, "eval_split": STR},
    "eval_samples/1": {
        "run_id": STR,
        "item_id": STR,
        "sample_idx": I32,
        "output": STR,
        "extracted?": STR,
        "correct?": BOOL,
        "format_error": BOOL,
        "tokens": I32,
    },
    "eval_scores/1": {
        "run_id": STR,
        "benchmark": STR,
        "metric": STR,
        "value": F64,
        "se?": F64,
        "n": I64,
        "config_json": STR,
    },
    "human_tasks/1": {"item_id": STR, "ask": STR, "shown_json": STR, "instructions_version": STR},
    "objectives/1": {
        "name": STR,
        "code": STR,
        "thought?": STR,
        "valid": BOOL,
        "failure?": STR,
        "proposer": STR,
        "attempts": I32,
    },
    # `at` stays null: a time would make two runs over the same bytes differ. The time of the check
    # is in the stage record.
    "quarantine/1": {"source_file": STR, "line_no": I64, "raw_json": STR, "codes": _S, "stage": STR, "at?": TS},
}


def _build(columns: dict[str, pa.DataType]) -> pa.Schema:
    fields = [pa.field(name, kind, nullable=nullable) for name, kind, nullable in _COMMON]
    for name, kind in columns.items():
        fields.append(pa.field(name.rstrip("?"), kind, nullable=name.endswith("?")))
    return pa.schema(fields)


SCHEMAS: dict[str, pa.Schema] = {kind: _build(columns) for kind, columns in _KINDS.items()}

# Columns hashed into row_id. "annotator_id" is read out of `ann`: two annotators of one item are
# two rows. Kinds of measurements are identified by their id columns.
CONTENT_COLUMNS: dict[str, tuple[str, ...]] = {
    "demonstrations/1": ("messages", "train_turns"),
    "prompts/1": ("prompt", "answer", "tests", "constraints"),
    "comparisons/1": (
        "prompt",
        "response_a",
        "response_b",
        "label_kind",
        "n_points",
        "label",
        "orientation",
        "votes",
        "p_a",
        "annotator_id",
    ),
    "pairs/1": ("prompt", "chosen", "rejected"),
    "rankings/1": ("prompt", "completions", "ranks", "annotator_id"),
    "ratings/1": ("prompt", "completion", "score", "aspects", "annotator_id"),
    "unpaired/1": ("prompt", "completion", "label"),
    "stepwise/1": ("prompt", "completions", "labels"),
    "segments/1": ("prompt", "chosen", "rejected", "chosen_segments", "rejected_segments"),
    "span_feedback/1": ("prompt", "completion", "spans"),
    "feedback_events/1": ("event_id", "conversation_id", "prior_response_id", "action"),
    "text/1": ("text",),
    "revisions/1": ("prompt", "original", "critique", "revision", "principle_id", "round"),
    "principles/1": ("principle_id", "version"),
    "candidates/1": ("prompt", "prompt_idx", "completion_idx", "completion"),
    "rollouts/1": ("prompt_id", "iteration", "policy_version", "sample_idx", "completion_ids"),
    "trajectories/1": ("episode_id", "t"),
    "judgements/1": ("item_id", "judge_id", "judge_prompt_id", "order", "attempt", "cache_key"),
    "rubric_items/1": ("category", "item_id", "version", "omega", "generation_prompt", "improvement_prompt"),
    "rubric_scores/1": ("sample_row_id", "item_id", "item_version", "scorer_id", "attempt"),
    "rubric_confidence/1": ("category", "item_id", "item_version"),
    "ref_logps/1": ("prompt_id", "group_id", "ref_model_hash", "tokenizer_hash", "template_id"),
    "ref_values/1": ("prompt_id", "group_id", "ref_model_hash", "tokenizer_hash", "template_id"),
    "teacher_logps/1": (
        "ids",
        "mask",
        "top_k",
        "temperature",
        "teacher_hash",
        "tokenizer_hash",
        "template_id",
        "context_id",
    ),
    "prompt_stats/1": ("prompt_id", "iteration"),
    "baselines/1": ("prompt_id", "policy_version"),
    "group_preferences/1": ("group", "question", "response"),
    "battles/1": ("model_a", "model_b", "item_id", "judge_id", "order"),
    "eval_items/1": ("benchmark", "item_id"),
    "eval_samples/1": ("run_id", "item_id", "sample_idx"),
    "eval_scores/1": ("run_id", "benchmark", "metric"),
    "human_tasks/1": ("item_id", "ask", "shown_json", "instructions_version"),
    "objectives/1": ("name", "code"),
    "quarantine/1": ("source_file", "line_no", "raw_json", "codes", "stage"),
}

# Values used where a required column was not given.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "demonstrations/1": {"kept": True},
    "pairs/1": {"pairs_in_group": 1},
    "stepwise/1": {"is_quality_control": False, "separator": "\n\n"},
    "segments/1": {"offset_unit": "char"},
    "principles/1": {"active": True},
}

# Column that holds the prompt, per kind; demonstrations and text have rules of their own.
_PROMPT_COLUMN = {kind: "prompt" for kind, columns in _KINDS.items() if "prompt" in columns}


class SchemaError(ValueError):
    """A kind or row that does not fit the schemas; the message says what to write instead."""


def schema_of(kind: str) -> pa.Schema:
    """Arrow schema of `kind` such as `pairs/1`. Raises SchemaError that lists the known kinds."""
    try:
        return SCHEMAS[kind]
    except KeyError:
        raise SchemaError(f"unknown dataset kind {kind!r}; write one of: {', '.join(SCHEMAS)}") from None


def canonical(obj: Any) -> str:
    """Canonical JSON (`data.version`): sorted keys, separators `,` and `:`, non-ASCII kept."""
    return json.dumps(obj, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def _sha(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def clean_message(message: dict) -> dict:
    """The message without its null fields."""
    return {key: value for key, value in message.items() if value is not None}


def clean_messages(messages: Iterable[dict]) -> list[dict]:
    """Messages without null fields, as they are hashed and rendered."""
    return [clean_message(message) for message in messages]


def _clean(value: Any) -> Any:
    """Drop null message fields anywhere inside a content column."""
    if type(value) is str:
        return value
    if isinstance(value, list):
        if all(type(item) is dict and None not in item.values() for item in value):
            return value  # the common case: nothing to drop
        return [_clean(item) for item in value]
    if isinstance(value, dict) and "role" in value:
        return clean_message(value)
    return value


def prompt_id(messages: list[dict]) -> str:
    """First 16 hex of the sha256 of the canonical messages: the join key of all tables."""
    return hashlib.sha256(_canonical_messages(messages)).hexdigest()[:16]


def _canonical_messages(messages: list[dict]) -> bytes:
    """Canonical JSON bytes of messages. orjson writes strings exactly as `json` does and is quick;
    it refuses lone surrogates and non-strings, which then take the slow road and its error."""
    if any(None in message.values() for message in messages):
        messages = clean_messages(messages)
    try:
        return orjson.dumps(messages, option=orjson.OPT_SORT_KEYS)
    except TypeError:
        return canonical(messages).encode("utf-8")


# Kinds whose content columns hold only strings, integers, booleans and lists of them: there orjson
# and canonical JSON agree byte for byte (they differ in how they print some floats).
_TEXT_ONLY = {"demonstrations/1", "pairs/1", "unpaired/1", "text/1", "rankings/1", "quarantine/1"}


def row_id(kind: str, row: dict) -> str:
    """First 32 hex of sha256(canonical {kind, content columns}) (`data.version`).

    `kind` may be written with or without version (`pairs/1` or `pairs`); the version is not hashed.
    """
    full = kind if "/" in kind else f"{kind}/1"
    columns = CONTENT_COLUMNS.get(full)
    if columns is None:
        raise SchemaError(f"unknown dataset kind {kind!r}; write one of: {', '.join(SCHEMAS)}")
    content: dict[str, Any] = {"kind": full.split("/")[0]}
    for name in columns:
        if name == "annotator_id":
            content[name] = (row.get("ann") or {}).get("annotator_id")
        elif name == "tests" and row.get(name):  # Parquet gives every test all of its fields, null where it has none
            content[name] = [clean_message(test) for test in row[name]]
        else:
            content[name] = _clean(row.get(name))
    if full == "comparisons/1" and row.get("criteria"):  # one annotator, two criteria: two rows
        content["criteria"] = row["criteria"]
    if full in _TEXT_ONLY:
        try:
            return hashlib.sha256(orjson.dumps(content, option=orjson.OPT_SORT_KEYS)).hexdigest()[:32]
        except TypeError:
            pass
    return _sha(canonical(content))[:32]


class RowIdSorter:
    """`dataset_hash`: sha256 of the sorted row ids joined by newline, so that the order of rows does not matter. Any
    number of ids in flat memory: they go to bucket files by their first two characters, each bucket is sorted alone."""

    def __init__(self, buffer: int = 200_000):
        self._buffer, self._limit, self._held = {}, buffer, 0
        self._dir: tempfile.TemporaryDirectory | None = None

    def add(self, ids: Iterable[str]) -> None:
        buffer = self._buffer
        for value in ids:
            buffer.setdefault(value[:2], []).append(value)
            self._held += 1
        if self._held >= self._limit:
            self._spill()

    def _spill(self) -> None:
        if self._dir is None:
            self._dir = tempfile.TemporaryDirectory(prefix="row-ids-")
        for prefix, values in self._buffer.items():
            with open(self._file(prefix), "a", encoding="utf-8") as out:
                out.write("".join(json.dumps(value) + "\n" for value in values))
        self._prefixes = getattr(self, "_prefixes", set()) | set(self._buffer)
        self._buffer, self._held = {}, 0

    def _file(self, prefix: str) -> Path:
        return Path(self._dir.name) / prefix.encode("utf-8", "surrogatepass").hex()

    def digest(self) -> str:
        """The dataset hash of everything added; the sorter is empty afterwards."""
        sha, first = hashlib.sha256(), True
        for prefix in sorted(set(self._buffer) | getattr(self, "_prefixes", set())):
            values = self._buffer.get(prefix, [])
            if self._dir is not None and self._file(prefix).exists():
                with open(self._file(prefix), encoding="utf-8") as lines:
                    values = values + [json.loads(line) for line in lines]
            values.sort()
            sha.update((("" if first else "\n") + "\n".join(values)).encode("utf-8"))
            first = False
        if self._dir is not None:
            self._dir.cleanup()
            self._dir = None
        self._buffer, self._prefixes, self._held = {}, set(), 0
        return sha.hexdigest()


def normalise_text(text: str) -> str:
    """NFKC, casefold, collapse whitespace, strip (`data.dedup`)."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def prompt_of(kind: str, row: dict) -> list[dict] | None:
    """Messages that make the prompt of a row, or None where the kind has no prompt.

    Demonstrations: everything before the first trained turn.
    """
    if kind == "demonstrations/1":
        messages, turns = row["messages"], row.get("train_turns") or []
        return messages[: min(turns)] if turns else messages
    column = _PROMPT_COLUMN.get(kind)
    return row.get(column) if column else None


def provenance(*rows: dict) -> dict:
    """The common columns that a row made of `rows`, all of one prompt, has of them: prompt_id and group_id of the
    first, their mean weight, and batch_id, license and collected_at where they agree (else null).
    """
    shared = {
        name: rows[0].get(name) if all(row.get(name) == rows[0].get(name) for row in rows) else None
        for name in ("batch_id", "license", "collected_at")
    }
    return {
        "prompt_id": rows[0]["prompt_id"],
        "group_id": rows[0]["group_id"],
        "weight": sum(row["weight"] for row in rows) / len(rows),
        **shared,
    }


@lru_cache(maxsize=None)
def _defaults(kind: str) -> tuple[tuple[str, Any], ...]:
    return tuple(_DEFAULTS.get(kind, {}).items())


def complete_row(
    kind: str, row: dict, *, dataset: str, source: str, origin: str, split: str = "train", identity: str | None = None
) -> dict:
    """The row with its common columns filled. Values already in `row` win, except `row_id`.

    identity: the row id where the caller has computed it already.

    Shapes: `row` maps column names of `kind` to Python values; missing nullable columns may stay
    away. group_id defaults to prompt_id, and to row_id where there is no prompt.
    Raises SchemaError for an unknown kind.
    """
    schema_of(kind)
    out = {"schema": kind, "dataset": dataset, "source": source, "origin": origin, "split": split, "weight": 1.0, **row}
    for name, value in _defaults(kind):
        if out.get(name) is None:
            out[name] = value
    if kind == "text/1" and out.get("n_chars") is None:
        out["n_chars"] = len(out["text"])
    if out.get("prompt_id") is None:
        prompt = prompt_of(kind, out)
        out["prompt_id"] = prompt_id(prompt) if prompt is not None else None
    if out.get("group_id") is None:
        out["group_id"] = out["prompt_id"]
    out["row_id"] = identity or row_id(kind, out)
    if out["group_id"] is None:
        out["group_id"] = out["row_id"]
    return out
