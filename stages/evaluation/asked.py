"""A judge that an evaluation asks in words: its settings, and asking until the answer can be read (MT-Bench ratings,
refusal classes). Imports next to nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from pydantic import Field, model_validator

from stages.spec import KeyVariable, ServerBase, StageConfig


class AskedJudge(StageConfig):
    """Who is asked, and how long an answer may be."""

    input: str = Field(
        "judge", description="Stage input that holds the judge, a language model; not used with an endpoint."
    )
    endpoint: ServerBase = Field(
        "",
        description=(
            "Base URL of a server with the OpenAI chat interface; empty: the local model of `input`. A result is known by"
            " endpoint_model and not by this."
        ),
        json_schema_extra={"identity": "given", "address": True},
    )
    endpoint_model: str = Field("", description="Name of the model on the server.")
    key_variable: KeyVariable = Field(
        "", description="Environment variable with the server's key.", json_schema_extra={"identity": ""}
    )
    concurrency: int = Field(
        8, ge=1, description="Requests to a server under way at the same time.", json_schema_extra={"identity": False}
    )
    judge_tokens: int = Field(2048, ge=1, description="Tokens of a judge's answer at most (MT-Bench 2048).")
    judge_retries: int = Field(
        3, ge=0, description="Times an unreadable answer is asked for again (ours 3); after that it is missing."
    )
    timeout_s: float = Field(
        60.0,
        gt=0,
        le=600,
        description="Seconds that a server has for one answer; at least 60.",
        json_schema_extra={"identity": False},
    )

    @model_validator(mode="after")
    def _served(self):
        if self.endpoint and not self.endpoint_model:
            raise ValueError("endpoint needs endpoint_model, the name of the model on that server")
        return self

    def check(self, name: str, inputs: dict) -> None:
        """Refuse, before anything is sampled, settings that name no judge."""
        from stages.spec import ConfigError

        if not self.endpoint and self.input not in inputs:
            raise ConfigError(
                f"{name} has nobody to ask: give --input {self.input}=MODEL_REF, a language model, or write"
                f" {name}.endpoint=URL and {name}.endpoint_model=NAME"
            )

    def load(self, name: str, inputs: dict, device: str):
        """The judge (:class:`~stages.reward.judge.LocalJudge` or :class:`~stages.reward.judge.ServerJudge`). ``name``
        is what an error calls it.
        """
        from stages.reward.components import RewardComponent
        from stages.reward.rewards import load_asked
        from stages.running.http_json import SERVER_SETTINGS

        shared = {field: getattr(self, field) for field in ("input", *SERVER_SETTINGS)}
        return load_asked(RewardComponent(name=name, kind="judge", **shared), inputs, device)

    def ask(
        self, judge, texts: Sequence[str], read: Callable[[str], object | None], again: str
    ) -> list[tuple[object | None, str]]:
        """(what ``read`` makes of the answer, the answer) of every request; None where it stayed unreadable.

        Equal requests are asked once, at temperature 0; what cannot be read, or was cut before its end
        (:meth:`stages.reward.judge.Reply.verdict`), is asked for again with ``again`` behind the request.
        """
        from stages.reward.judge import until_read

        found = until_read(
            judge, texts, lambda reply: reply.verdict(read), again, self.judge_retries, self.judge_tokens
        )
        return [found[text] for text in texts]


class MTBench(AskedJudge):
    """The judge of the ratings, and how answers are sampled."""

    temperatures: Literal["category", "greedy"] = Field(
        "category",
        description=(
            "category: 0.7 for writing and roleplay, 0.1 for stem and humanities, 0 for all other categories; greedy: 0"
            " for all."
        ),
    )
