"""Asking a judge which of two answers is better, in both orders: what the stages ``judge`` and ``win_rate`` share
(``synth.judge``, ``synth.rlaif``).

    judge = PairJudge(stage)
    judge.run(items)                    # every request and answer as a row of ``judgements/1``, a part per block of items; a killed run continues
    for found in judge.opinions(items): found.p_a, found.why

``preference``  the probabilities of the letters A and B, nothing else (RLAIF, Constitutional AI); ``chain_of_thought``:
behind a reasoning of its own
``verdict``     a written [[A]], [[B]] or [[C]] (a tie), by default behind a short explanation (MT-Bench)
``five_way``    [[A>>B]], [[A>B]], [[A=B]], [[B>A]] or [[B>>A]] (Arena-Hard)

In ``judgements/1`` a verdict and a probability are about *printed* places: A is the answer that was shown first, which
in order 1 is the item's second. What cannot be read is asked for again with what was wrong, then stays an error: never
a tie, never a loss. Everything that stages say about a judge is computed from these rows, so the rows of an earlier run
(input ``judgements``) answer the same requests without asking.
"""

from __future__ import annotations

import functools
import json
import math
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal, Optional

from pydantic import Field, model_validator

from stages.pairs import both_orders
from stages.settings import ReadWhen, refuse_unread
from stages.spec import ConfigError, InputSpec, KeyVariable, ServerBase, StageConfig

ITEM = (
    "{preamble}\n\n{few_shot}{principle}[Question]\n{context}\n[End of question]\n\n[Answer A]\n{a}\n[End of answer"
    " A]\n\n[Answer B]\n{b}\n[End of answer B]"
)
FIRST = "Compare the two answers in a short explanation, then give your verdict"
REQUESTS = {
    "preference": "Which answer is better? Reply with the letter A or B only.",
    "verdict": FIRST + " strictly as [[A]] if A is better, [[B]] if B is better, or [[C]] for a tie.",
    "verdict at once": "Reply with nothing but [[A]] if A is better, [[B]] if B is better, or [[C]] for a tie.",
    "five_way": (
        FIRST
        + " strictly as [[A>>B]] if A is much better, [[A>B]] if it is slightly better, [[A=B]] for a tie, [[B>A]] or"
        " [[B>>A]]."
    ),
    "five_way at once": (
        "Reply with nothing but [[A>>B]] if A is much better, [[A>B]] if it is slightly better, [[A=B]] for a tie,"
        " [[B>A]] or [[B>>A]]."
    ),
}
REASON = "Compare the two answers: what speaks for each of them? Write a short reasoning, and no verdict yet."
REASONED = "\n\n[Reasoning]\n{reasoning}\n[End of reasoning]\n\n"
AGAIN = (
    "\n\nYour last reply could not be read: it held no verdict, or two different ones. Reply again, and end strictly"
    " with one of {marks}."
)
MARKS = {"verdict": "[[A]], [[B]] or [[C]]", "five_way": "[[A>>B]], [[A>B]], [[A=B]], [[B>A]] or [[B>>A]]"}
FIELDS = ("preamble", "few_shot", "principle", "context", "a", "b")
#: What Constitutional AI clamps the saturated probabilities behind a reasoning to.
CLAMP = (0.4, 0.6)
#: Shares from which a judge is warned of (``eval.judge_bias``, section F.2, [C]).
CONSISTENCY, FIRST_RATE, ERRORS, LONGER = 0.7, 0.1, 0.02, 0.6
#: Requests in the first block that end a run at once if none of them gets a readable answer.
HOPELESS = 8


class AskedSettings(StageConfig):
    """Who is asked, and how patiently."""

    judge_tokens: int = Field(2048, ge=1, description="Tokens of a written reply at most (MT-Bench 2048).")
    judge_retries: int = Field(
        3, ge=0, description="Times an unreadable verdict is asked for again, with what is wrong with it (3 is ours)."
    )
    endpoint: ServerBase = Field(
        "",
        description=(
            "Base URL of a server with the OpenAI chat interface; empty: the local model of the input `judge`. A result"
            " is known by endpoint_model and not by this: with the server elsewhere the same command continues or reuses"
            " it."
        ),
        json_schema_extra={"identity": "given", "address": True},
    )
    endpoint_model: str = Field("", description="Name of the model on the server.")
    key_variable: KeyVariable = Field(
        "", description="Environment variable with the server's key.", json_schema_extra={"identity": ""}
    )
    timeout_s: float = Field(
        60.0, gt=0, description="Seconds to wait for one answer of a server.", json_schema_extra={"identity": False}
    )
    concurrency: int = Field(
        8, ge=1, description="Requests to a server under way at the same time.", json_schema_extra={"identity": False}
    )
    price_in: float = Field(0.0, ge=0, description="USD per million tokens read, for the cost in the report.")
    price_out: float = Field(0.0, ge=0, description="USD per million tokens written.")
    budget_usd: float | None = Field(
        None,
        gt=0,
        title="Budget",
        description=(
            "Ask no further block once so much was spent by these prices; the rest has no label (ops.cost). What the"
            " input judgements answers costs nothing. Empty: all are asked."
        ),
    )
    block: int = Field(64, ge=1, description="Pairs, or prompts with their answers, judged as one resumable unit.")

    @model_validator(mode="after")
    def _server(self):
        if self.budget_usd is not None and not (self.price_in or self.price_out):
            raise ValueError(
                "budget_usd is spent by price_in and price_out, and both are 0; write what the judge's tokens cost, for"
                " example price_in=3 price_out=15"
            )
        if self.endpoint and not self.endpoint_model:
            raise ValueError("endpoint needs endpoint_model, the name of the model on that server")
        return self


class JudgeSettings(AskedSettings):
    """Who is asked, what, and how."""

    READ_WHEN: ClassVar[ReadWhen] = (
        (
            ("inconsistent", "judge_retries"),
            lambda c: c.mode != "preference",
            "mode=preference takes the probabilities of two letters, which can be read and averaged; write mode=verdict",
        ),
        (
            ("judge_tokens",),
            lambda c: c.mode != "preference" or c.explains,
            "a probability is read at one token; write chain_of_thought=true",
        ),
    )

    mode: Literal["preference", "verdict", "five_way"] = Field(
        "preference",
        description=(
            "What the judge says: the probabilities of the letters A and B, a written verdict A, B or tie, or "
            "one of five, which tells much better from better (Arena-Hard)."
        ),
    )
    chain_of_thought: Optional[bool] = Field(
        None,
        title="Chain of thought",
        description=(
            "The judge explains first. Unset: with verdicts (MT-Bench), not with probabilities "
            "(Constitutional AI's default)."
        ),
    )
    clamp: Optional[list[float]] = Field(
        None,
        title="Clamp",
        description=(
            "preference: limits of each order's probability. Unset: [0.4, 0.6] behind a chain of thought, where "
            "probabilities saturate (Constitutional AI), else none; [0, 1] is none."
        ),
    )
    inconsistent: Literal["tie", "drop", "average"] = Field(
        "tie",
        description="verdicts that differ between the two orders: a tie (MT-Bench), no label, or the mean of both.",
    )
    preamble: str = Field(
        "",
        description=(
            "What the judge is told first: its task and what counts; empty: to judge impartially, by what, and by what"
            " not. A detailed one agrees more with people (RLAIF)."
        ),
    )
    few_shot: str = Field("", description="Worked examples, shown between preamble and item; empty: none.")
    template: str = Field(
        ITEM,
        description=(
            "How an item is shown: a text with {a} and {b}, and"
            f" {', '.join('{' + name + '}' for name in FIELDS[:4])} where they are wanted; other braces are doubled."
            " The request follows it."
        ),
    )
    request: str = Field(
        "",
        description=(
            "What is asked for at the end; empty: the built-in request of the mode. A verdict must come in its own"
            " brackets."
        ),
    )
    principle_of: Literal["drawn", "row"] = Field(
        "drawn",
        description=(
            "Which of the input principles an item is judged by: one that is drawn by its row, or the trait that its"
            " answers were sampled for, else that of the prompt's category (character training)."
        ),
    )
    view: Literal["full", "answer_only"] = Field(
        "answer_only",
        description=(
            "What is shown of an answer: all, or what follows its thought (a judge must not see hidden reasoning)."
        ),
    )

    @model_validator(mode="after")
    def _possible(self):
        refuse_unread(self, self.READ_WHEN)
        if self.clamp is not None and not (len(self.clamp) == 2 and 0 <= self.clamp[0] <= 0.5 <= self.clamp[1] <= 1):
            raise ValueError(
                f"clamp={self.clamp} is no range of probabilities around 0.5; write for example clamp=[0.4,0.6]"
            )
        if self.clamp is not None and self.mode != "preference":
            raise ValueError(
                f"clamp limits probabilities, and mode={self.mode} has none; write mode=preference, or leave clamp out"
            )
        try:
            shown = {name: self.template.format(**{**dict.fromkeys(FIELDS, ""), name: "#"}) for name in FIELDS}
        except (KeyError, IndexError, ValueError) as error:
            raise ValueError(
                f"template cannot be filled ({error!r}); its fields are {', '.join('{' + n + '}' for n in FIELDS)}, and"
                " other braces are doubled"
            ) from None
        if not all("#" in shown[name] for name in "ab"):
            raise ValueError("template does not show both answers; write {a} and {b} in it")
        unread = [name for name in ("preamble", "few_shot") if getattr(self, name) and "#" not in shown[name]]
        if unread:
            raise ValueError(
                f"template shows no {' and no '.join(unread)}; write {{{unread[0]}}} in it, or leave {unread[0]} out"
            )
        return self

    @property
    def explains(self) -> bool:
        return self.mode != "preference" if self.chain_of_thought is None else self.chain_of_thought

    @property
    def limits(self) -> tuple[float, float] | None:
        """What a probability is clamped to."""
        return (
            tuple(self.clamp)
            if self.clamp is not None
            else CLAMP
            if self.mode == "preference" and self.explains
            else None
        )

    @property
    def asks(self) -> str:
        """What is asked for behind the item."""
        return (
            self.request
            or REQUESTS[self.mode if self.mode == "preference" or self.explains else f"{self.mode} at once"]
        )


#: Inputs of every stage that asks a judge about pairs.
JUDGE_INPUTS = {
    "judge": InputSpec("model", required=False, use="words", doc="Causal LM that judges; left out with an endpoint."),
    "principles": InputSpec(
        "dataset",
        kinds=("principles/1",),
        required=False,
        doc=(
            "Principles: a file (one per line, or YAML, JSON, JSON Lines) or a dataset. Each pair is judged by one "
            "of them, drawn by its row."
        ),
    ),
    "judgements": InputSpec(
        "dataset",
        kinds=("judgements/1",),
        required=False,
        doc="Judgements of an earlier run: what they answer is not asked again.",
    ),
}


@dataclass(frozen=True)
class Item:
    """Two answers to one prompt. ``row``: what the stage keeps beside them."""

    item_id: str
    prompt: list[dict]
    a: list[dict]
    b: list[dict]
    row: dict = field(default_factory=dict, compare=False)

    @property
    def identical(self) -> bool:
        return text_of(self.a) == text_of(self.b)


def text_of(messages: Sequence[dict]) -> str:
    """An answer's messages as a judge reads them."""
    from stages.reward_models.reward_heads import transcript

    return transcript(messages)


@dataclass(frozen=True)
class Opinion:
    """What a judge thinks of an item. p_a: probability or share in [0, 1] that its first answer is better, both orders
    averaged; None: it has none, and ``why``. printed: the verdict of each order, by printed place. shown_first: each
    order's probability of the answer shown first. words: each order's verdict of five, by printed place."""

    p_a: float | None
    why: str = ""
    printed: tuple[str, ...] = ()
    shown_first: tuple[float, ...] = ()
    words: tuple[str, ...] = ()
    judge_prompt_id: str = ""
    principle_ids: tuple[str, ...] = ()
    cost_usd: float = 0.0

    @property
    def strong(self) -> bool:
        """Whether both orders say that the same answer is much better."""
        return sorted(self.words) == ["A>>B", "B>>A"]

    @property
    def verdict(self) -> str:
        """ "A", "B", "tie" or "error" (no opinion)."""
        return "error" if self.p_a is None else verdict_of(self.p_a)


IDENTICAL = Opinion(0.5, "identical", ("tie", "tie"))
OVER_BUDGET = Opinion(None, "over budget")
THREE = {"A>>B": "A", "A>B": "A", "A=B": "tie", "B>A": "B", "B>>A": "B"}


def verdict_of(p_a: float) -> str:
    """The answer that a probability prefers; exactly one half is a tie."""
    return "A" if p_a > 0.5 else "B" if p_a < 0.5 else "tie"


def opinion_of(calls: Sequence[dict], config: JudgeSettings) -> Opinion:
    """The opinion in the ``judgements/1`` rows of one item: of each order the last word counts."""
    from stages.measures.preference import OUTCOME, swap_combine
    from stages.reward.judge import soft_label, two_orders

    noted = [(row, json.loads(row["extra_json"])) for row in calls]
    last = {row["order"]: row for row, note in noted if not note.get("reasoning")}
    both, failed = (last[0], last[1]), last[0]["error"] or last[1]["error"]
    about = {
        "judge_prompt_id": last[0]["judge_prompt_id"],
        "principle_ids": tuple(dict.fromkeys(note["principle_id"] for _, note in noted if "principle_id" in note)),
        "cost_usd": sum(row["cost_usd"] for row in calls),
    }
    if config.mode == "preference":
        found = [None if row["error"] else soft_label(*_logps(row), config.limits) for row in both]
        printed = tuple("error" if p is None else verdict_of(p) for p in found)
        if failed:
            return Opinion(None, f"error: {failed}", printed, **about)
        return Opinion(both_orders(*found), "", printed, tuple(found), **about)
    words = tuple("error" if row["error"] else row["verdict"] for row in both)
    printed = tuple(THREE.get(word, word) for word in words)
    if failed:
        return Opinion(None, f"error: {failed}", printed, **about)
    about["words"] = words if config.mode == "five_way" else ()
    if config.inconsistent == "average":
        return Opinion(two_orders(*printed), "", printed, **about)
    combined = swap_combine(printed[:1], printed[1:], config.inconsistent)[0]
    return Opinion(OUTCOME.get(combined), "inconsistent" if combined == "drop" else "", printed, **about)


def _logps(row: dict) -> list[float]:
    return [-math.inf if value is None else value for value in json.loads(row["extra_json"])["logps"]]


# -- asking ------------------------------------------------------------------------------------------------------------


class Asker:
    """The judge of a stage, asked for texts or for the probabilities of letters; equal requests once, a server with a
    journal of its answers. ``judge_id`` names it.
    """

    def __init__(self, stage):
        from stages.running.journal import Journal

        config = stage.config
        if bool(config.endpoint) == stage.has("judge"):
            raise ConfigError(
                f"stage {stage.name} asks one judge: give --input judge=MODEL, or endpoint=URL with endpoint_model=NAME"
                + " and not both" * stage.has("judge")
            )
        self.stage, self.config = stage, config
        self.judge_id = (
            config.endpoint_model if config.endpoint else f"model:{stage.inputs['judge'].digest[:16] or 'local'}"
        )
        self._asked = None
        self._journal = Journal(stage.workdir / "answers" / "judge.jsonl", _of_server) if config.endpoint else None

    @property
    def asked(self):
        """The server, or the model in this process; loaded when first needed."""
        if self._asked is None:
            from stages.reward.judge import LocalJudge, ServerJudge
            from stages.reward_models.reward_heads import RewardCard

            config = self.config
            self._asked = (
                ServerJudge(
                    config.endpoint, config.endpoint_model, config.key_variable, config.timeout_s, config.concurrency
                )
                if config.endpoint
                else LocalJudge(self.stage.path("judge"), RewardCard(), self.stage.device)
            )
            if self._journal is not None and self._journal.known:
                self._asked.has_answered(self._journal.answered)
        return self._asked

    @functools.cached_property
    def known(self) -> dict[str, dict]:
        """The answers of an earlier run (input ``judgements``) by their key, where one is given; read when first
        needed.
        """
        rows = self.stage.dataset("judgements").iter_rows() if self.stage.has("judgements") else ()
        return {row["cache_key"]: row for row in rows if row["raw"] or not row["error"]}

    def cost(self, reply) -> float:
        """USD of a reply."""
        return (reply.tokens_in * self.config.price_in + reply.tokens_out * self.config.price_out) / 1e6

    def paid(self, rows: Iterable[dict]) -> float:
        """USD of the requests behind judgements: equal ones are asked once, and those that an earlier run answered
        (input ``judgements``) not at all.
        """
        return sum({row["cache_key"]: row["cost_usd"] for row in rows if row["cache_key"] not in self.known}.values())

    def _asked_twice(self) -> float:
        """USD of what a server was asked once more, since the last call, to see whether it answers at all."""
        twice = self._asked.served.asked_twice if self.config.endpoint and self._asked is not None else []
        used, twice[:] = list(twice), []
        read, written = (sum(u.get(f"{what}_tokens") or 0 for u in used) for what in ("prompt", "completion"))
        return (read * self.config.price_in + written * self.config.price_out) / 1e6

    def rows(self) -> Iterable[dict]:
        """The judgements that were written."""
        from storage.datasets import open_dataset

        return open_dataset(str(self.stage.workdir / "out" / "judgements")).iter_rows()

    def each_block(self, units: Sequence, ask, what: str, counted: str, advice: str, meta: dict) -> None:
        """Ask about all units, a block at a time: ``ask(units)`` gives calls, each with the ``rows`` that it left for
        the output ``judgements``. A killed run goes on behind the last complete block; once ``budget_usd`` is spent no
        further one is asked.

        what, counted: what the units are called in messages and in the manifest; advice: what to write where nothing
        can be read.

        Raises StageFailure where the judge cannot be asked or read at all; the next run goes on behind the last answer.
        """
        from stages.harness import StageFailure
        from stages.reward.judge import JudgeError
        from stages.running import usage
        from stages.running.blocks import remaining_blocks
        from stages.running.http_json import ServerError

        stage, config = self.stage, self.config
        writer = stage.writer("judgements", "judgements/1", meta={"judge": self.judge_id, **meta})
        checkpoint = stage.checkpoints.latest()
        spent = checkpoint.state.get("spent", 0.0) if checkpoint else 0.0
        known = self._journal.known if self._journal is not None else {}
        for reply in list(known.values())[checkpoint.state.get("answers", 0) if checkpoint else 0 :]:
            # paid for by an earlier start, behind its last checkpoint
            usage.count(judge_calls=1, judge_tokens_in=reply.tokens_in, judge_tokens_out=reply.tokens_out)
        state = lambda: {"spent": spent, "answers": len(known)}
        for start, block in remaining_blocks(stage, units, config.block, what, state):
            if config.budget_usd is not None and spent >= config.budget_usd:
                stage.warn(
                    "over_budget",
                    f"{spent:.2f} USD are spent, budget_usd={config.budget_usd:g}: {len(units) - start} of {len(units)}"
                    f" {what} were not asked about and have no label. Raise budget_usd, or give this run's judgements"
                    " as --input judgements=REF: what they answer is not asked again and costs nothing.",
                )
                break
            began = time.monotonic()
            try:
                calls = ask(block)
            except JudgeError as error:
                again = "" if isinstance(error.__cause__, ServerError) else " Then the same command continues."
                raise StageFailure(f"{error}{again}") from error
            final = [call.rows[-1] for call in calls]
            if start == 0 and len(final) >= HOPELESS and all(row["error"] for row in final):
                raise StageFailure(
                    f"The judge gave no readable answer to any of {len(final)} requests: {_brief(final[-1]['error'])}"
                    + f". Its last reply was {_brief(final[-1]['raw'])!r}" * bool(final[-1]["raw"])
                    + f". {advice}"
                )
            rows = [row for call in calls for row in call.rows]
            stage.perf(
                start // config.block + 1,
                {
                    "tokens_per_second": (
                        sum(row["tokens_in"] + row["tokens_out"] for row in rows) / max(1e-9, time.monotonic() - began)
                    )
                },
            )
            writer.write(rows)
            spent += self.paid(rows) + self._asked_twice()
        writer.close({counted: len(units)})

    def _replies(self, texts: Sequence[str], attempt: int) -> list:
        limit = self.config.judge_tokens
        keys = [self._key(text, "text", limit, attempt) for text in texts]
        return self._answered(
            keys, texts, lambda some: self.asked.replies(some, limit), lambda text: self.asked.reply(text, limit)
        )

    def _choices(self, texts: Sequence[str]) -> list:
        keys = [self._key(text, "letters", 1, 0) for text in texts]
        return self._answered(
            keys,
            texts,
            lambda some: self.asked.chosen(some, ("A", "B")),
            lambda text: self.asked.choice(text, ("A", "B")),
        )

    def _key(self, text: str, what: str, tokens: int, attempt: int) -> str:
        """Digest of judge, request, sampling (temperature 0) and attempt: equal ones have one answer."""
        from storage.files import canonical_json, sha256_text

        return sha256_text(
            canonical_json([self.judge_id, text.encode("utf-8", "surrogatepass").hex(), what, tokens, attempt])
        )[:32]

    def _answered(self, keys: Sequence[str], texts: Sequence[str], together, one_by_one) -> list:
        """(key, Reply) of each request: from earlier judgements, else from the server's answers so far, else asked for,
        equal requests once.
        """
        found = {key: _reply(self.known[key]) for key in keys if key in self.known}
        fresh = {key: text for key, text in zip(keys, texts) if key not in found}
        if fresh and self._journal is None:
            found |= zip(fresh, together(list(fresh.values())))
        elif fresh:
            found |= self._journal.ask(fresh, one_by_one, self.config.concurrency)
            if all(reply.error is not None for reply in found.values()):
                self.asked.served.not_silent(len(fresh))
        return [(key, found[key]) for key in keys]


class PairJudge(Asker):
    """The judge of a stage about pairs. Every call is a row of the output ``judgements``."""

    def __init__(self, stage):
        from stages.reward import principles
        from stages.reward.judge import IMPARTIAL
        from storage.files import canonical_json, sha256_text

        super().__init__(stage)
        config = stage.config
        self.principles = principles.load(stage) if stage.has("principles") else []
        if mute := [p["principle_id"] for p in self.principles if not principles.comparison_request(p)]:
            raise ConfigError(
                f"stage {stage.name}: the principles {', '.join(mute[:5])} say nothing that two answers could be judged"
                " by; write their text or comparison_request, or active: false"
            )
        if self.principles and "{principle}" not in config.template:
            raise ConfigError(
                f"stage {stage.name}: template shows no principle; write {{principle}} in it, or leave the input"
                " `principles` out"
            )
        self.preamble = config.preamble or IMPARTIAL
        if config.principle_of == "row" and not self.principles:
            raise ConfigError(
                f"stage {stage.name}: principle_of=row judges each item by its own trait; give --input principles=FILE"
                " with the traits, or write principle_of=drawn"
            )
        shown = [config.mode, config.template, self.preamble, config.few_shot]
        self.prompt_id = f"{config.mode}-{sha256_text(canonical_json([*shown, config.asks]))[:8]}"
        self.reason_id = f"reasoning-{sha256_text(canonical_json([*shown, REASON]))[:8]}"

    def run(self, items: Sequence[Item]) -> None:
        """Ask about every item whose answers differ, as :meth:`Asker.each_block` does."""
        config = self.config
        self.each_block(
            [item for item in items if not item.identical],
            self._block,
            "pairs",
            "items",
            "Take another judge, mode or request.",
            {
                "template": config.template,
                "request": config.asks,
                "preamble": self.preamble,
                "few_shot": config.few_shot,
            },
        )

    def opinions(self, items: Sequence[Item]) -> list[Opinion]:
        """What the written judgements say of each item; identical answers are a tie that nobody was asked about."""
        calls: dict[str, list[dict]] = {}
        for row in self.rows():
            calls.setdefault(row["item_id"], []).append(row)
        return [
            (
                IDENTICAL
                if item.identical
                else opinion_of(calls[item.item_id], self.config)
                if item.item_id in calls
                else OVER_BUDGET
            )
            for item in items
        ]

    def _block(self, items: Sequence[Item]) -> list[_Call]:
        """The calls about a block of items, in the order of the items and of their orders."""
        named = [self._principle(item) if self.principles else None for item in items]
        calls = [
            _Call(item, order, principle, self._shown(item, order, principle))
            for item, principle in zip(items, named)
            for order in (0, 1)
        ]
        if self.config.mode == "preference":
            self._letters(calls)
        else:
            self._verdicts(calls)
        return calls

    def _principle(self, item: Item) -> dict:
        """What an item is judged by. Raises ConfigError for an item that names none of the principles."""
        from stages.reward.principles import draw

        if self.config.principle_of == "drawn":
            return draw(self.stage, self.principles, item.item_id)
        wanted = item.row.get("trait") or item.row.get("category")
        found = next((one for one in self.principles if one["principle_id"] == wanted), None)
        if found is None:
            raise ConfigError(
                f"stage {self.stage.name}: the answers to {item.row.get('prompt_id')} have the trait {wanted!r}, which"
                f" is none of the principles ({', '.join(one['principle_id'] for one in self.principles[:10])}); give"
                " the traits that they were sampled for, or write principle_of=drawn"
            )
        return found

    def _shown(self, item: Item, order: int, principle: dict | None) -> str:
        from stages.reward.judge import quoted
        from stages.reward.principles import comparison_request
        from stages.verification.responses import view

        a, b = (
            quoted(view(text_of(answer), self.config.view))
            for answer in ((item.a, item.b) if order == 0 else (item.b, item.a))
        )
        few_shot = self.config.few_shot and self.config.few_shot.rstrip("\n") + "\n\n"
        return self.config.template.format(
            preamble=self.preamble,
            few_shot=few_shot,
            principle=comparison_request(principle) + "\n\n" if principle else "",
            context=quoted(text_of(item.prompt)),
            a=a,
            b=b,
        )

    def _letters(self, calls: Sequence[_Call]) -> None:
        """Probabilities of the letters, behind a reasoning where one is asked for."""
        from stages.reward.judge import Reply, quoted

        asked = [(call, f"{call.shown}\n\n{self.config.asks}") for call in calls]
        if self.config.explains:
            asked = []
            for call, (key, reply) in zip(calls, self._replies([f"{call.shown}\n\n{REASON}" for call in calls], 0)):
                error = reply.error or (None if reply.text.strip() else "it wrote nothing")
                call.rows.append(self._row(call, key, reply, self.reason_id, error=error, reasoning=True))
                if error:  # no label without the reasoning that it was to be read behind
                    call.rows.append(self._row(call, key, Reply(error=f"no reasoning: {error}"), self.prompt_id))
                else:
                    asked.append(
                        (call, call.shown + REASONED.format(reasoning=quoted(reply.text.strip())) + self.config.asks)
                    )
        for (call, _), (key, reply) in zip(asked, self._choices([text for _, text in asked])):
            call.rows.append(self._row(call, key, reply, self.prompt_id))

    def _verdicts(self, calls: Sequence[_Call]) -> None:
        """Written verdicts; what cannot be read is asked for again."""
        from stages.reward.judge import parse_five_way, parse_verdict

        parse = parse_verdict if self.config.mode == "verdict" else parse_five_way
        again = AGAIN.format(marks=MARKS[self.config.mode])
        open_calls = list(calls)
        for attempt in range(self.config.judge_retries + 1):
            said = self._replies(
                [f"{call.shown}\n\n{self.config.asks}{again * attempt}" for call in open_calls], attempt
            )
            unread = []
            for call, (key, reply) in zip(open_calls, said):
                verdict = None if reply.error else reply.verdict(parse)
                unreadable = (
                    "its reply was cut before its end, and does not begin with a verdict; raise judge_tokens"
                    if reply.cut
                    else "its reply holds no verdict, or two different ones"
                )
                error = reply.error or (None if verdict else unreadable)
                call.rows.append(
                    self._row(call, key, reply, self.prompt_id, attempt=attempt, verdict=verdict, error=error)
                )
                if error and not reply.error:
                    unread.append(call)
            open_calls = unread

    def _row(
        self,
        call: _Call,
        key: str,
        reply,
        prompt_id: str,
        *,
        attempt: int = 0,
        verdict: str | None = None,
        error: str | None = None,
        reasoning: bool = False,
    ) -> dict:
        from stages.reward.judge import soft_label

        more, p_a = ({"reasoning": True} if reasoning else {}) | ({"cut": True} if reply.cut else {}), None
        if reply.logps:
            more["logps"], p_a = (
                [value if math.isfinite(value) else None for value in reply.logps],
                soft_label(*reply.logps),
            )
            verdict = verdict_of(p_a)
        return _completed(
            call,
            {
                "item_id": call.item.item_id,
                "judge_id": self.judge_id,
                "judge_prompt_id": prompt_id,
                "order": call.order,
                "raw": reply.text,
                "verdict": verdict,
                "p_a": p_a,
                "error": reply.error or error,
                "attempt": attempt,
                "tokens_in": reply.tokens_in,
                "tokens_out": reply.tokens_out,
                "cost_usd": self.cost(reply),
                "cache_key": key,
                "extra_json": _extra(call, more),
            },
        )


@dataclass
class _Call:
    """One order of one item, and the rows it left."""

    item: Item
    order: int
    principle: dict | None
    shown: str
    rows: list[dict] = field(default_factory=list)


def _extra(call: _Call, more: dict) -> str:
    return json.dumps(
        {**({"principle_id": call.principle["principle_id"]} if call.principle else {}), **more}, sort_keys=True
    )


def _completed(call: _Call, row: dict) -> dict:
    from storage.schema import complete_row

    given = call.item.row
    return complete_row(
        "judgements/1",
        {**row, "prompt_id": given.get("prompt_id"), "group_id": given.get("group_id")},
        dataset="judgements",
        source=given.get("source") or "judge",
        origin="ai",
        split=given.get("split") or "train",
    )


def _reply(row: dict):
    from stages.reward.judge import Reply

    note = json.loads(row["extra_json"])
    logps = () if note.get("logps") is None else tuple(_logps(row))
    return Reply(row["raw"], logps, row["tokens_in"], row["tokens_out"], cut=note.get("cut", False))


def _of_server(kept: dict):
    """A reply of the journal."""
    from stages.reward.judge import Reply

    return Reply(**{**kept, "logps": tuple(kept["logps"])})


def _brief(text: str, limit: int = 200) -> str:
    return text if len(text) <= limit else text[:limit] + "..."


# -- what can be said about a judge ------------------------------------------------------------------------------------


def judge_metrics(items: Sequence[Item], opinions: Sequence[Opinion], judge: Asker) -> dict[str, float]:
    """How far the judge can be trusted: errors, consistency over both orders, preference for the place shown first and
    for the longer answer (``eval.judge_bias``), and cost.
    """
    from stages.measures.preference import judge_bias

    asked = [(item, found) for item, found in zip(items, opinions) if not item.identical and found is not OVER_BUDGET]
    rows, unasked = list(judge.rows()), sum(found is OVER_BUDGET for found in opinions)
    out = ({"judge/over_budget": unasked} if unasked else {}) | {
        "pairs": len(items),
        "identical": len(items) - len(asked) - unasked,
        "judge/calls": len(rows),
        "judge/errors": sum(found.why.startswith("error") for _, found in asked),
        "judge/tokens_in": sum(row["tokens_in"] for row in rows),
        "judge/tokens_out": sum(row["tokens_out"] for row in rows),
        "judge/cost_usd": judge.paid(rows),
    }
    if asked:
        out["judge/error_rate"] = out["judge/errors"] / len(asked)
    both = [found for _, found in asked if found.printed and "error" not in found.printed]
    if both:
        bias = judge_bias([found.printed[0] for found in both], [found.printed[1] for found in both])
        out |= {"judge/consistency": bias["consistency"], "judge/first_position_rate": bias["first_position_rate"]}
        if all(found.shown_first for found in both):
            out["judge/position_bias"] = position_bias(both)
    longer = [longer_wins(item, found.verdict, judge.config.view) for item, found in asked]
    if known := [value for value in longer if value is not None]:
        out |= {"judge/longer_wins": sum(known) / len(known), "judge/longer_wins_of": len(known)}
    return {name: value for name, value in out.items() if value is not None}


def position_bias(opinions: Sequence[Opinion]) -> float:
    """Mean probability of the answer shown first, minus one half: what the place is worth to the judge
    (``synth.rlaif``).
    """
    return sum(sum(found.shown_first) / 2 for found in opinions) / len(opinions) - 0.5


def longer_wins(item: Item, verdict: str, which: str = "full") -> bool | None:
    """Whether a verdict is for the answer with more characters of what the judge is shown (``which``: the view); None
    where neither is, or neither won.
    """
    from stages.verification.responses import view

    a, b = len(view(text_of(item.a), which)), len(view(text_of(item.b), which))
    return None if a == b or verdict not in ("A", "B") else (verdict == "A") == (a > b)


def warn_about_judge(stage, metrics: dict[str, float], makers: Iterable[str] = ()) -> None:
    """The catalogue's warnings about a judge. makers: names or digests of the models whose answers it judged."""
    if metrics.get("judge/error_rate", 0.0) > ERRORS:
        stage.warn(
            "judge_errors",
            f"{metrics['judge/errors']:.0f} of {metrics['pairs'] - metrics['identical']:.0f} pairs have no opinion"
            f" ({metrics['judge/error_rate']:.0%}): the judge could not be read, or could not read them. They are left"
            " out. Read why in judgements; give the judge more room (judge_tokens) or time, or take another one.",
        )
    if metrics.get("judge/consistency", 1.0) < CONSISTENCY:
        stage.warn(
            "judge_inconsistent",
            f"The judge says the same in both orders of only {metrics['judge/consistency']:.0%} of the pairs (below"
            f" {CONSISTENCY:.0%}): take a stronger judge, or a clearer preamble.",
        )
    if abs(metrics.get("judge/first_position_rate", 0.5) - 0.5) > FIRST_RATE:
        stage.warn(
            "judge_position_bias",
            f"The answer shown first wins {metrics['judge/first_position_rate']:.0%} of the decided calls: the judge"
            " goes by position. Both orders were asked, which balances it, at the price of ties. Take a stronger judge, or"
            " write a clearer preamble.",
        )
    if metrics.get("judge/longer_wins", 0.5) > LONGER and metrics["judge/longer_wins_of"] >= 20:
        stage.warn(
            "judge_length_bias",
            f"The longer answer wins {metrics['judge/longer_wins']:.0%} of the decided pairs: look at a"
            " length-controlled rate, or at the lengths in the data.",
        )
    name = stage.config.endpoint_model or (stage.inputs["judge"].digest if stage.has("judge") else "")
    own = sorted(
        {
            maker
            for maker in makers
            if maker and name and (maker == name or (stage.config.endpoint and family(maker) == family(name) != ""))
        }
    )
    if own:
        stage.warn(
            "judge_family",
            f"The judge and a judged model ({', '.join(maker[:24] for maker in own[:3])}) are of one family: judges"
            " favour text like their own. Check with another judge.",
        )


def family(name: str) -> str:
    """The letters that a model's name begins with, such as gpt of openai/gpt-4o; empty for references and digests."""
    last = name.rsplit("/", 1)[-1].lower()
    return "" if ":" in name or re.fullmatch(r"[0-9a-f]*", last) else re.match(r"[a-z]*", last)[0]
