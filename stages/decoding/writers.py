"""Language models that are asked in words for a text: a model input of the stage under its engine, or a chat server
(stages ``revise``, ``write_prompts``, ``constrain``).

A writer answers every request or says why not: what fails on one request is that request's error, and EngineError is
raised where the server is away or all of a batch failed. With a model input a text is a function of (weights, request, seed); what a
server makes of a seed is its own.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from pydantic import Field, model_validator

from stages.settings import SamplingConfig
from stages.spec import KeyVariable, ServerBase

#: Ends each worked example of a request in plain text, and so the text that continues it.
STOP = "\n###"
#: What is asked: a text, or the messages of a conversation.
Request = str | list[dict]


def messages_of(request: Request) -> list[dict]:
    """A request as chat messages; those of rows without the columns that are empty."""
    return (
        [{"role": "user", "content": request}]
        if isinstance(request, str)
        else [{name: value for name, value in message.items() if value is not None} for message in request]
    )


class WriterConfig(SamplingConfig):
    """Who is asked: a model input, or the model of a server with the OpenAI chat interface; the other sampling settings
    are those of the model input.
    """

    endpoint: ServerBase = Field(
        "",
        description=(
            "Base URL of a server with the OpenAI chat interface that writes instead of a model input,"
            " engine_concurrency requests at once; for example http://localhost:8000/v1."
        ),
        json_schema_extra={"identity": False, "address": True},
    )
    endpoint_model: str = Field("", description="Name of the model on that server.")
    key_variable: KeyVariable = Field(
        "",
        description="Environment variable that holds the server's key; keys never enter a configuration.",
        json_schema_extra={"identity": False},
    )
    timeout_s: float = Field(
        600.0,
        gt=0,
        description="Seconds that the server may take for one answer.",
        json_schema_extra={"identity": False},
    )
    request_format: Literal["chat", "text"] = Field(
        "chat",
        description=(
            "How a request is shown: as a user's message under the chat template, or as plain text behind worked "
            "examples, which the model continues (base models)."
        ),
    )
    max_request_length: int = Field(
        4096, ge=1, description="Tokens of a request to a model input at most; longer ones are not asked, and counted."
    )

    @model_validator(mode="after")
    def _endpoint(self):
        if bool(self.endpoint) != bool(self.endpoint_model):
            raise ValueError(
                "endpoint and endpoint_model go together; write for example endpoint=http://localhost:8000/v1"
                " endpoint_model=NAME, or neither"
            )
        if self.endpoint and self.request_format == "text":
            raise ValueError(
                "request_format=text continues a plain text, which the chat interface of an endpoint does not; write"
                " request_format=chat, or give a model with engine=server"
            )
        return self


@dataclass(frozen=True)
class Written:
    """What came of a request. finish_reason: eos or stop (complete), length (cut), too_long (not asked) or error; gen:
    who wrote it and how.
    """

    text: str
    finish_reason: str
    gen: dict
    error: str | None = None

    @property
    def problem(self) -> str | None:
        """Why there is no complete text: cut, empty, request_too_long or engine_error."""
        if self.finish_reason not in ("eos", "stop"):
            return {"length": "cut", "too_long": "request_too_long"}.get(self.finish_reason, "engine_error")
        return None if self.text.strip() else "empty"


class ModelWriter:
    """A model input of the stage. engine: an engine over it, where the stage has one already."""

    def __init__(self, stage, role: str, engine=None):
        from stages.chat import renderer_for
        from stages.decoding.engines import make_engine, vocabulary_of
        from stages.generation import sampling_params

        self.stage, self.role, self.config = stage, role, stage.config
        self.renderer = renderer_for(stage.path(role))
        self.engine = engine or make_engine(stage, self.renderer, role=role)
        self.params = sampling_params(stage.config, self.renderer)
        if self.config.request_format == "text":
            self.params = replace(self.params, stop_strings=(*self.params.stop_strings, STOP))
        self.positions = vocabulary_of(stage.path(role))[1]

    def write(
        self, requests: Sequence[Request], seeds: Sequence[int], max_tokens: int, temperature: float
    ) -> list[Written]:
        """One text per request; equal requests in a row are one group, whose prompt is computed once."""
        from itertools import groupby

        from stages.decoding.engines import EngineError
        from stages.generation import gen_record

        params = replace(
            self.params,
            max_new_tokens=max_tokens,
            temperature=temperature,
            min_tokens=min(self.params.min_tokens, max_tokens),
        )
        ids = [
            (
                self.renderer.text_ids(text, end=False)
                if self.config.request_format == "text"
                else self.renderer.prompt_ids(messages_of(text))
            )
            for text in requests
        ]
        limit = min(
            self.config.max_request_length,
            self.positions - max_tokens if self.positions is not None else self.config.max_request_length,
        )
        asked = [i for i, row in enumerate(ids) if len(row) <= limit]
        alike = [list(group) for _, group in groupby(asked, key=lambda i: ids[i])]
        groups = (
            self.engine.generate(
                [ids[group[0]] for group in alike], params, [[seeds[i] for i in group] for group in alike]
            )
            if asked
            else []
        )
        gens = [
            {
                **gen_record(self.stage, self.config, self.renderer, seed, engine=self.engine.name, role=self.role),
                "temperature": temperature,
                "max_tokens": max_tokens,
            }
            for seed in seeds
        ]
        out = [Written("", "too_long", gen) for gen in gens]
        for i, c in zip(asked, (c for group in groups for c in group)):
            out[i] = Written(c.text, c.finish_reason, gens[i], c.error)
        # engines other than servers do not raise by themselves
        if asked and all(out[i].error is not None for i in asked):
            raise EngineError(
                f"{self.engine.name} failed on all {len(asked)} requests. The first one: {out[asked[0]].error}"
            )
        return out


class ServerWriter:
    """The model of a server with the OpenAI chat interface (``/chat/completions``)."""

    role = None

    def __init__(self, config: WriterConfig):
        from stages.decoding.engines import EngineError
        from stages.running.servers import ChatServer, Served, Settings

        self.config = config
        self.server = ChatServer(
            config.endpoint, config.endpoint_model, config.key_variable, config.timeout_s, config.engine_concurrency
        )
        self.served = Served(
            f"the server at {config.endpoint}",
            "answers",
            EngineError,
            config.timeout_s,
            Settings(fewer="engine_concurrency"),
        )
        self.served.probe = lambda: self.server.ask(
            [{"role": "user", "content": "Say yes."}], max_tokens=1, temperature=0
        )

    def write(
        self, requests: Sequence[Request], seeds: Sequence[int], max_tokens: int, temperature: float
    ) -> list[Written]:
        """One text per request, equal ones of one seed asked once; one that the server does not answer is that
        request's error.
        """
        from stages.decoding.engines import EngineError
        from stages.running import journal

        keys = [(json.dumps(messages_of(request)), seed) for request, seed in zip(requests, seeds)]
        asked = dict(zip(keys, zip(requests, seeds)))
        found = dict(
            zip(
                asked,
                self.server.each(
                    lambda pair: self._one(*pair, max_tokens, temperature), asked.values(), journal.keeps()
                ),
            )
        )
        out = [found[key] for key in keys]
        if out and all(w.error is not None for w in out):
            self.served.not_silent(len(out))
            raise EngineError(
                f"the server at {self.config.endpoint} failed on all {len(out)} requests ({out[0].error}). Check"
                " endpoint and endpoint_model; run the stage again to continue with this block."
            )
        return out

    def _one(self, request: Request, seed: int, max_tokens: int, temperature: float) -> Written:
        from stages.running import journal
        from stages.running.http_json import ServerError
        from stages.running.servers import finish_of, said, withheld

        gen = {
            "model_id": self.config.endpoint_model,
            "engine": "chat server",
            "temperature": temperature,
            "max_tokens": max_tokens,
            "rng_seed": seed,
        }
        messages = messages_of(request)
        how = {"temperature": temperature, "max_tokens": max_tokens, "seed": seed % 2**31}

        def why_not(choice: dict) -> str | None:
            if (why := withheld(choice)) is not None or finish_of(choice) in ("stop", "length"):
                return why
            return f"finish_reason is {choice.get('finish_reason')!r}"

        try:
            choice = journal.once(
                self.config.endpoint,
                ["chat", self.config.endpoint_model, messages, how],
                lambda: self.server.ask(messages, **how),
                self.served,
                (str(request), seed),
                lambda choice: choice if why_not(choice) is None else None,
            )
        except ServerError as error:
            return Written("", "error", gen, str(error))
        why = why_not(choice)
        return Written(said(choice), finish_of(choice), gen) if why is None else Written("", "error", gen, why)


def make_writer(stage, *roles: str, engines: dict | None = None):
    """The writer that the stage was given: the endpoint, else the first of the model inputs ``roles``. engines: those
    that the stage has already, by role.

    Raises ConfigError where it was given none.
    """
    from stages.spec import ConfigError

    if stage.config.endpoint:
        return ServerWriter(stage.config)
    role = next((name for name in roles if stage.has(name)), None)
    if role is None:
        raise ConfigError(
            f"{stage.name}: nobody writes; give {' or '.join(f'{name}=MODEL' for name in roles)}, or endpoint=URL and"
            " endpoint_model=NAME"
        )
    return ModelWriter(stage, role, (engines or {}).get(role))


def warn_of_failed(stage, written: Sequence[Written]) -> None:
    """Name the requests that the writer could not answer."""
    failed = [w for w in written if w.error is not None]
    if failed:
        stage.warn(
            "engine_rows_failed",
            f"{len(failed)} of {len(written)} requests asked for at once have no answer; their rows are left out. Look at"
            f" why, and run the stage again where the server was at fault. The first reason: {failed[0].error}",
        )


def check_template(name: str, text: str, fields: Sequence[str], needed: Sequence[str]) -> None:
    """Raise ValueError where a template cannot be filled with ``fields``, or does not show one that is ``needed``."""
    try:
        marked = {field: f"\0{field}\0" for field in fields}
        filled = text.format(**marked)
    except (KeyError, IndexError, ValueError) as error:
        raise ValueError(
            f"{name} cannot be filled ({error!r}); its fields are {', '.join(f'{{{f}}}' for f in fields)}, and other"
            " braces are doubled"
        ) from None
    missing = [field for field in needed if marked[field] not in filled]
    if missing:
        raise ValueError(
            f"{name} shows no {' and no '.join(f'{{{f}}}' for f in missing)}; write it there, without it the model"
            " would not know"
        )
