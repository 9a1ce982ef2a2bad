"""Messages to token ids and loss masks: the one function that every stage renders with.

Supervised tuning, reward models, direct alignment, rollouts and evaluation all call :class:`Renderer`, so a
conversation has the same ids wherever it is seen (catalogue ``sft.template``, ``sft.mask``).

How a conversation becomes ids
    1. The tokenizer's own chat template renders the text (a tokenizer without one gets :data:`PLAIN_TEMPLATE`).
    2. Special-token strings inside *message content* are encoded as ordinary text, never as control tokens.
    3. The text is cut at the borders of the trained spans and each piece is tokenised by itself, so a turn starts from
       exactly the ids that generation starts from: what is trained is what is sampled. A piece in the middle gets none
           of the space
       that SentencePiece-like tokenizers write before a text, so the ids are those of the whole text wherever borders
       are token borders.
    4. The trained span of an assistant turn runs from the end of its generation prompt to the end of its stop
       token; that it holds the message's text and calls is verified, row by row.

Tools (catalogue ``synth.tool_data``)
    A message's ``functions`` and ``function_calls`` go to the template in the form that it shows, which is tried out
    once: as they are (OLMo), or as ``tools`` and ``tool_calls`` of OpenAI's form (Qwen, Llama 3.1, Hermes, GLM, ...). A
    template that shows neither is refused, since a turn that calls would be trained as an empty one.

Masks mark *target* tokens: ``mask[j] = 1`` means that token ``j`` is predicted (from position ``j - 1``) and in the
loss.
"""

from __future__ import annotations

import hashlib
import json
import re
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

from stages.acting.tools import BadCall, render_call, stored_calls, stored_tools, tells_tools

MASK_POLICIES = ("all_assistant", "final_turn", "final_message", "completion", "full")

TOKENIZER_FILES = ("tokenizer*", "vocab*", "merges.txt", "*.model", "tekken.json")

#: For tokenizers without a chat template: string delimiters, each assistant turn closed by the end token.
PLAIN_TEMPLATE = (
    "{{- bos_token or '' -}}"
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'assistant' -%}"
    "{{- 'Assistant: ' -}}{%- generation -%}{{- message['content'] + eos_token -}}{%- endgeneration -%}{{- '\n\n' -}}"
    "{%- elif message['role'] == 'user' -%}{{- 'Human: ' + message['content'] + '\n\n' -}}"
    "{%- else -%}{{- message['role'] | capitalize + ': ' + message['content'] + '\n\n' -}}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- 'Assistant: ' -}}{%- endif -%}"
)

#: A name that no template has: what a template shows of it, it reads.
_PROBE = "zxqvprobe"

# Private-use characters that stand for special-token strings found inside content while the template runs.
_SENTINEL_BASE = 0xF0000


#: Renderings and tokenisations of a row's parts that are kept while the next rows are read.
ASKED_AGAIN = 16


class RenderError(ValueError):
    """A conversation cannot be rendered; the message says what to write instead."""


def _check_systems_shown(messages, text: str) -> None:
    """That the rendered text holds what every system message says, whatever its white space.

    Raises:
        RenderError: a template without a system role that passes over the message instead of refusing it.
    """
    for message in messages:
        content = message.get("content") if message["role"] == "system" else None
        if content and content.strip() not in text and "".join(content.split()) not in "".join(text.split()):
            raise RenderError(
                "The chat template leaves out the system message, so the model would never see it. Put the system"
                " prompt into the first user message (ingest: system_prompts=merge), leave it out"
                " (system_prompts=drop), or set chat_template to one that shows it."
            )


@contextmanager
def rendering(row):
    """Names the dataset row in what is said of a conversation that cannot be rendered."""
    try:
        yield
    except RenderError as error:
        raise RenderError(f"row {row['row_id']}: {error}") from error


@dataclass(frozen=True)
class Encoded:
    """``ids`` and ``mask`` (0/1), both of length T; ``truncated`` says that ``max_length`` cut the row."""

    ids: list[int]
    mask: list[int]
    truncated: bool = False

    @property
    def n_targets(self) -> int:
        return sum(self.mask[1:])


def load_tokenizer(path: str):
    """Tokenizer of a model directory or hub id, with a chat template and an end token.

    Raises:
        RenderError: there is no tokenizer, it does not load, or it has no end-of-sequence token.
    """
    from transformers import AutoTokenizer

    # transformers would make an empty one
    if Path(path).is_dir() and not any(True for pattern in TOKENIZER_FILES for _ in Path(path).glob(pattern)):
        raise RenderError(
            f"{path} holds a model without a tokenizer; copy its tokenizer.json and tokenizer_config.json there, from"
            " where the model came from."
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
    except Exception as error:  # of many kinds: transformers, tokenizers and json raise their own
        raise RenderError(
            f"The tokenizer of {path} does not load"
            f" ({str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__}). A model needs"
            " its tokenizer.json (or tokenizer.model, and `pip install sentencepiece`) beside tokenizer_config.json;"
            " copy them from where the model came from."
        ) from error
    tokenizer.init_kwargs.pop("local_files_only", None)  # HF_HUB_OFFLINE of this process; no part of what is published
    if tokenizer.eos_token_id is None:
        raise RenderError(
            f"The tokenizer in {path} has no eos_token; set one in tokenizer_config.json, "
            'for example "eos_token": "<|endoftext|>".'
        )
    if tokenizer.chat_template is None:
        tokenizer.chat_template = PLAIN_TEMPLATE
    if tokenizer.pad_token_id is None:  # pads are never read (masks come from lengths), so the end token serves
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def stop_ids_of(tokenizer, generation_config=None) -> frozenset[int]:
    """Ids that end an assistant turn: the tokenizer's eos, the generation config's, and the template's own stop
    token.
    """
    ids = {int(tokenizer.eos_token_id)}
    configured = getattr(generation_config, "eos_token_id", None)
    if configured is not None:
        ids |= {int(i) for i in (configured if isinstance(configured, (list, tuple)) else [configured])}
    return frozenset(ids)


class Renderer:
    """Turns messages into ids with the tokenizer's chat template.

    Args:
        tokenizer: from :func:`load_tokenizer`.
        generation_config: adds its ``eos_token_id`` list to :attr:`stop_ids`.
        template_kwargs: variables that the template gets beside the messages, such as ``{"enable_thinking": False}``.

    Raises:
        RenderError: a variable that the template does not read.
    """

    def __init__(self, tokenizer, generation_config=None, template_kwargs=None):
        self.tokenizer, self.template_kwargs = tokenizer, dict(template_kwargs or {})
        template = (
            tokenizer.chat_template
            if isinstance(tokenizer.chat_template, str)
            else json.dumps(tokenizer.chat_template, sort_keys=True)
        )
        if unread := [name for name in self.template_kwargs if not re.search(rf"\b{re.escape(name)}\b", template)]:
            raise RenderError(
                f"chat_template_kwargs: the chat template reads no variable {unread[0]!r}, so it would change nothing;"
                " leave it out, or give a chat_template that reads it."
            )
        specials = sorted(
            {t for t in tokenizer.all_special_tokens} | {str(t) for t in tokenizer.get_added_vocab()},
            key=len,
            reverse=True,
        )
        self._specials = specials
        self._special_pattern = re.compile("|".join(map(re.escape, specials))) if specials else None
        # Added tokens that are not special, such as Qwen's <think>, are tokens wherever they are written, and templates
        # look for them in content.
        control = [s for s in specials if s not in plain_tokens(tokenizer)]
        self._control_pattern = re.compile("|".join(map(re.escape, control))) if control else None
        self._trailing_special = re.compile(rf"(?:{self._special_pattern.pattern})\s*\Z") if specials else None
        self._unprefixed = _without_leading_space(tokenizer)
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        # what one row asks for several times: its prompt, with each of its answers and alone
        self._rendered = lru_cache(ASKED_AGAIN)(self._render_plain)
        self._tokenised = lru_cache(ASKED_AGAIN)(self._ids_of_pieces)
        self._special_ids = lru_cache(ASKED_AGAIN)(lambda text: tuple(self._ids(text)))
        self.template_hash = hashlib.sha256(
            (template + (json.dumps(self.template_kwargs, sort_keys=True) if self.template_kwargs else "")).encode()
        ).hexdigest()[:16]
        turn_end = self.turn_end_id = self._turn_end_id({"role": "assistant", "content": "y"})
        self.stop_ids = stop_ids_of(tokenizer, generation_config) | ({turn_end} if turn_end is not None else set())
        # some end a call with a token of its own (gpt-oss: <|call|>)
        if "tool_calls" in template or "function_calls" in template:
            call_end = self._turn_end_id(
                {"role": "assistant", "content": "", "function_calls": render_call(_PROBE, {"x": "y"})}
            )
            self.stop_ids |= {call_end} & set(tokenizer.convert_tokens_to_ids(control))

    # -- public -------------------------------------------------------------------------------------------------
    @property
    def vocabulary_hash(self) -> str:
        """16 hex digits of the vocabulary: token ids mean the same to tokenizers that share it."""
        return hashlib.sha256(repr(sorted(self.tokenizer.get_vocab().items())).encode()).hexdigest()[:16]

    def prompt_ids(self, messages) -> list[int]:
        """Ids of the conversation with the generation prompt appended: what a completion starts from."""
        text, specials = self._render_safely(messages, generation=True)
        return self._tokenise(text, specials)

    def text_ids(self, text: str, end: bool = True) -> list[int]:
        """Ids of plain text (pre-training): one bos if the tokenizer has one, the text, the end token."""
        ids = self._plain_ids(text)
        if self.tokenizer.bos_token_id is not None:
            ids = [self.tokenizer.bos_token_id] + ids
        return ids + [self.tokenizer.eos_token_id] if end else ids

    def continuation_ids(self, prompt, text: str) -> tuple[list[int], list[int]]:
        """(prompt ids, ids of ``text`` behind it): tokenised together and split at the prompt's token count
        (eval.mc_answer_text), so a text that merges with the prompt's end has the tokens that it has there. Where
        nothing would be left of it, its own ids stand behind the prompt's.

        ``prompt``: messages, which the generation prompt follows, or plain text.
        """
        alone, whole = self.joint_ids(prompt, text)
        return (
            (whole[: len(alone)], whole[len(alone) :])
            if len(whole) > len(alone)
            else (alone, self._plain_ids(text, inside=True))
        )

    def joint_ids(self, prompt, text: str) -> tuple[list[int], list[int]]:
        """(ids of the prompt alone, ids of prompt and ``text`` together); see :meth:`continuation_ids`."""
        if isinstance(prompt, str):
            return self.text_ids(prompt, end=False), self.text_ids(prompt + text, end=False)
        shown, hidden = self._render_safely(prompt, generation=True)
        written, more = self._hide(text)
        return self._tokenise(shown, hidden), self._tokenise(shown + written, hidden | more)

    def completion_ids(
        self, prompt_messages, completion_messages, ended: bool = True
    ) -> tuple[list[int], list[int], list[int]]:
        """Split form for preference rows: (prompt ids, completion ids, completion mask).

        ``prompt ids`` equal :meth:`prompt_ids` of the prompt, so both responses of a pair share them exactly.
        ``ended``: as for :meth:`conversation`.
        """
        prompt = self.prompt_ids(prompt_messages)
        row = self.conversation(
            list(prompt_messages) + list(completion_messages),
            train="completion",
            n_prompt=len(prompt_messages),
            ended=ended,
        )
        if row.ids[: len(prompt)] != prompt:
            raise RenderError(
                "The chat template rewrites the prompt when an answer follows it; preference rows need a "
                "prefix-preserving template. Use a template that renders earlier turns unchanged."
            )
        return prompt, row.ids[len(prompt) :], row.mask[len(prompt) :]

    def answered_ids(self, messages, text: str, ended: bool = True) -> tuple[list[int], list[int]]:
        """(prompt ids, ids of ``text`` as an assistant says it behind that prompt), whatever it holds: it is tokenised by
        itself, as in :meth:`conversation`, and where it ``ended`` the token that closes a turn follows.
        """
        shown, hidden = self._render_safely(messages, generation=True)
        written, more = self._hide(text)
        end = self.tokenizer.eos_token_id if self.turn_end_id is None else self.turn_end_id
        ids = self._tokenise(written, more, shown) if written else []
        return self._tokenise(shown, hidden), ids + [end] * ended

    def observation_ids(self, messages, closed: bool) -> list[int]:
        """Ids between two assistant turns: what closes the first one, ``messages`` (tool or user), and the next
        generation prompt.

        They are appended to what the policy sampled, so a transcript grows and is never tokenised again; for turns as
        the tokenizer writes them, the sequence is that of :meth:`conversation`. ``closed``: the policy's last token
        already was the template's end of turn.
        """
        stand_in = chr(_SENTINEL_BASE + 0xFFF0)
        text, hidden = self._render_safely(
            [{"role": "user", "content": "x"}, {"role": "assistant", "content": stand_in}, *messages], generation=True
        )
        at = text.rfind(stand_in)
        if at < 0:
            raise RenderError(
                "The chat template does not write an earlier assistant turn as it is, so turns cannot be appended to"
                " it; use a template that keeps message['content']."
            )
        tail = text[at + len(stand_in) :]
        if closed:
            end = self.tokenizer.convert_ids_to_tokens(self.turn_end_id) if self.turn_end_id is not None else ""
            closing = self._closing(tail) if end else ""
            if not closing.endswith(end):
                raise RenderError(
                    f"The chat template closes an assistant turn that is followed by others with {tail[:20]!r} instead"
                    f" of {end!r}; use one that closes all turns alike."
                )
            tail = tail[len(closing) :]
        return self._tokenise(tail, hidden, end if closed else stand_in)

    def conversation(
        self,
        messages,
        train: str = "all_assistant",
        n_prompt: int | None = None,
        train_turns=None,
        max_length: int | None = None,
        ended: bool = True,
    ) -> Encoded:
        """Ids and target mask of a whole conversation (catalogue ``sft.mask``).

        Args:
            messages: list of ``{"role", "content"}``.
            train: one of :data:`MASK_POLICIES`. ``completion`` trains every assistant turn at or after message index
                ``n_prompt``; ``final_turn`` every assistant turn after the last user message; ``full`` all but the
                first token.
            train_turns: explicit message indices (the ``train_turns`` column of ``demonstrations/1``); overrides
                ``train``.
            max_length: keep the first ``max_length`` tokens; no end token is invented for a cut row.
            ended: False for a last turn that was cut when it was sampled: ids and mask stop with its text, and it gets
                no end token.

        Raises:
            RenderError: unknown policy, or a template that does not keep earlier turns as they are.
        """
        if train not in MASK_POLICIES:
            raise RenderError(f"Unknown mask policy {train!r}; use one of {', '.join(MASK_POLICIES)}.")
        messages = [clean_message(m) for m in messages]
        turns = self._turns(messages, train, n_prompt, train_turns)
        full, specials = self._render_safely(messages, generation=False)
        if train == "full":
            ids = self._tokenise(full, specials)
            mask = [0] + [1] * (len(ids) - 1)
        else:
            ids, mask = self._masked(messages, full, specials, turns, ended)
        truncated = max_length is not None and len(ids) > max_length
        if truncated:
            ids, mask = ids[:max_length], mask[:max_length]
        return Encoded(ids, mask, truncated)

    def decode(self, ids, skip_special_tokens: bool = True) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    # -- rendering ----------------------------------------------------------------------------------------------
    def _apply(self, messages, generation: bool, tools=None) -> str:
        return self.tokenizer.apply_chat_template(
            messages,
            tokenize=False,
            add_generation_prompt=generation,
            **({"tools": tools} if tools else {}),
            **self.template_kwargs,
        )

    def _render(self, messages, generation: bool, tools=None) -> str:
        try:
            return self._apply(messages, generation, tools)
        except Exception as error:
            roles = [m["role"] for m in messages]
            advice = (
                "Ingest the data with system_prompts=merge, which writes system prompts into the first user message,"
                if "system" in roles
                else (
                    "Let the environment answer as user (observation_role=user)"
                    if "tool" in roles
                    else "Validate the data with the ingest stage"
                )
            )
            raise RenderError(
                f"The chat template refused a conversation with roles [{', '.join(roles)}]: {error}. "
                f"{advice} or use a template that knows these roles."
            ) from error

    def _render_plain(self, said: tuple[tuple[str, str], ...], generation: bool) -> str:
        return self._render([{"role": role, "content": content} for role, content in said], generation)

    def _render_safely(self, messages, generation: bool):
        """(text, {sentinel: special string}): special-token strings in content are hidden from the template."""
        hidden: dict[str, str] = {}
        cleaned, plain = [], True
        for message in map(clean_message, messages):
            if (
                self._control_pattern is not None
                and message.get("content")
                and self._control_pattern.search(message["content"])
            ):
                content, more = self._hide(message["content"])
                message, hidden = {**message, "content": content}, hidden | more
            plain = plain and len(message) == 2 and message["role"] != "tool"
            cleaned.append(message)
        if plain:
            said = tuple((m["role"], m.get("content")) for m in cleaned)
            known = all(isinstance(content, str) for _, content in said)
            text = self._rendered(said, generation) if known else self._render(cleaned, generation)
            _check_systems_shown(cleaned, text)
            return text, hidden
        shown, tools, calls = self._with_tools(cleaned, hidden)
        text, at = self._render(shown, generation, tools), 0
        _check_systems_shown(shown, text)
        for own in calls:
            at = _end_of_calls(text, own, at)
            if at is None:
                raise RenderError(
                    f"The chat template leaves out {_said(own)}, a tool call (some show only the first of a turn, or"
                    " rewrite arguments). Set chat_template to one that shows all of them as they are, or leave the"
                    " row out."
                )
        return text, hidden

    # -- tools and calls ----------------------------------------------------------------------------------------
    @cached_property
    def _reads(self) -> dict[str, str | bool]:
        """How the template takes ``tools``, ``functions``, ``tool_calls`` and ``function_calls``: False where it shows
        nothing of them; tool_calls ``dict`` or ``json`` by the arguments' form.

        ``results``: whether it shows tool messages, if only by refusing them.
        """
        ask, system = {"role": "user", "content": "x"}, {"role": "system", "content": "s"}
        about = {
            "name": _PROBE,
            "description": "d",
            "parameters": {
                "type": "object",
                "properties": {"x": {"type": "string", "description": "d"}},
                "required": ["x"],
            },
        }

        def shows(messages, tools=None) -> bool:
            try:
                return _PROBE in self._apply(messages, False, tools)
            except Exception:  # templates raise errors of all kinds for what they do not take
                return False

        def called(**field) -> bool:
            turn = [ask, {"role": "assistant", "content": "", **field}]
            return shows(turn) or shows(
                [
                    *turn,
                    {"role": "tool", "name": _PROBE[::-1], "tool_call_id": "call00001", "content": "y"},
                    {"role": "assistant", "content": "z"},
                ]
            )

        def tool_call(arguments) -> list[dict]:
            return [{"type": "function", "id": "call00001", "function": {"name": _PROBE, "arguments": arguments}}]

        results, answers = (
            [],
            [
                {"content": "", "tool_calls": tool_call({"x": "y"})},
                {"content": "", "tool_calls": tool_call('{"x": "y"}')},
                {"content": "", "function_calls": "f(x='y')"},
                {"content": "z"},
            ],
        )
        for answer in answers:
            try:
                results.append(
                    _PROBE[::-1]
                    in self._apply(
                        [
                            ask,
                            {"role": "assistant", **answer},
                            {"role": "tool", "name": "f", "tool_call_id": "call00001", "content": _PROBE[::-1]},
                        ],
                        True,
                    )
                )
            except Exception:
                continue
        return {
            "tools": any(shows(start, [{"type": "function", "function": about}]) for start in ([ask], [system, ask])),
            "functions": shows([{**system, "functions": _PROBE}, ask]),
            "function_calls": called(function_calls=_PROBE),
            "tool_calls": (
                "dict"
                if called(tool_calls=tool_call({"x": "y"}))
                else "json"
                if called(tool_calls=tool_call('{"x": "y"}'))
                else False
            ),
            "results": any(results) or not results,
        }

    def _with_tools(self, messages, hidden: dict[str, str]):
        """(messages as the template takes them, tools or None, the calls of each message that has some); fills
        ``hidden``.
        """
        shown, tools, calls = [], [], []
        for message in messages:
            message = dict(message)
            if message["role"] == "tool" and not self._reads["results"]:
                raise RenderError(
                    "The chat template does not show the messages of tools, so their answers would be missing. Set"
                    " chat_template to one that knows the role tool, or let the environment answer as user"
                    " (observation_role=user)."
                )
            if message.get("functions") and not self._reads["functions"]:
                functions = message.pop("functions")
                if not tells_tools({**message, "functions": functions}):
                    found = self._read(stored_tools, functions, "tools")
                    if found and not self._reads["tools"]:
                        raise RenderError(
                            f"The conversation has tools ({found[0]['function']['name']}), which the chat template does"
                            " not show, so calls would be learned of tools that the model is not told of. Set"
                            " chat_template to one that reads `tools` (or `functions`), or write the tools into the"
                            " system message's text and leave them out of the data's tools."
                        )
                    tools += found
                    if message["role"] == "system" and found and not message["content"].strip():
                        continue  # it only carried the tools: without one, the template tells its default
            written = message.get("function_calls")
            if written and not self._reads["function_calls"]:
                del message["function_calls"]
                found = self._read(stored_calls, written, "calls")
                if not self._reads["tool_calls"]:
                    raise RenderError(
                        "The conversation has tool calls, which the chat template does not show: the turn would be"
                        " learned as one that ends where it should call. Set chat_template to one that reads"
                        " `tool_calls` (or `function_calls`), or write the calls into the message's text when the data"
                        " is made (ingest: tool_calls=text)."
                    )
                found = self._hidden(found, hidden)
                calls.append(found)
                message["tool_calls"] = [
                    {
                        "type": "function",
                        **({"id": call["id"]} if "id" in call else {}),
                        "function": {
                            "name": call["name"],
                            "arguments": (
                                json.dumps(call["arguments"], ensure_ascii=False)
                                if self._reads["tool_calls"] == "json"
                                else call["arguments"]
                            ),
                        },
                    }
                    for call in found
                ]
            elif written:
                calls.append(self._hidden(written, hidden))
            message |= {
                name: self._hidden(message[name], hidden)
                for name in ("name", "tool_call_id", "functions", "function_calls")
                if name in message
            }
            shown.append(message)
        return shown, self._hidden(tools, hidden) or None, calls

    def _calls_of(self, message) -> list[dict] | str | None:
        """The calls of a message as the template was given them."""
        written = message.get("function_calls")
        return (
            self._hidden(written if self._reads["function_calls"] else self._read(stored_calls, written, "calls"), {})
            if written
            else None
        )

    def _read(self, read, text: str, what: str):
        try:
            return read(text)
        except BadCall as error:
            raise RenderError(
                f"The conversation's {what} cannot be read: {error}. Write them as in OpenAI's API, or calls as"
                " name(argument='value'), one per line."
            ) from None

    def _hidden(self, value, hidden: dict[str, str]):
        """``value`` with the special-token strings of all its texts hidden, which are added to ``hidden``."""
        if isinstance(value, dict):
            return {self._hidden(k, hidden): self._hidden(v, hidden) for k, v in value.items()}
        if isinstance(value, list):
            return [self._hidden(v, hidden) for v in value]
        if not isinstance(value, str) or self._control_pattern is None or not self._control_pattern.search(value):
            return value
        text, more = self._hide(value)
        hidden |= more
        return text

    def _hide(self, content: str) -> tuple[str, dict[str, str]]:
        """(content with sentinels for the special-token strings in it, {sentinel: special string})."""
        hidden: dict[str, str] = {}

        def hide(match):
            sentinel = chr(_SENTINEL_BASE + self._specials.index(match.group()))
            hidden[sentinel] = match.group()
            return sentinel

        return (self._control_pattern.sub(hide, content) if self._control_pattern is not None else content), hidden

    def _plain_ids(self, text: str, inside: bool = False) -> list[int]:
        """Ids of text in which nothing is a control token; ``inside``: it continues a text."""
        if inside and self._unprefixed is not None:
            return self._unprefixed(text, True)
        return self._ids(text, as_text=True)

    def _ids(self, text: str, as_text: bool = False) -> list[int]:
        """The tokenizer's own ids of ``text``, nothing added; ``as_text``: special-token strings in it are text.

        Its Rust backend is asked directly where there is one: a call through transformers takes twice as long.
        """
        backend = self._backend
        if backend is None:
            return self.tokenizer(
                text, add_special_tokens=False, **({"split_special_tokens": True} if as_text else {})
            )["input_ids"]
        as_text = as_text or self.tokenizer.split_special_tokens
        if backend.encode_special_tokens != as_text:
            backend.encode_special_tokens = as_text
        if backend.truncation is not None:
            backend.no_truncation()
        if backend.padding is not None:
            backend.no_padding()
        return backend.encode(text, add_special_tokens=False).ids

    def _tokenise(self, text: str, hidden: dict[str, str], before: str = "") -> list[int]:
        """Ids of rendered text that stands behind ``before``: the template's own special tokens are control tokens,
        hidden ones are ordinary text.
        """
        return list(self._tokenised(text, tuple(hidden.items()), before))

    def _ids_of_pieces(self, text: str, specials: tuple[tuple[str, str], ...], before: str) -> tuple[int, ...]:
        hidden, ids = dict(specials), []
        for piece in re.split("([" + "".join(map(re.escape, hidden)) + "])", text) if hidden else [text]:
            if piece in hidden:
                ids += self._plain_ids(hidden[piece], inside=bool(before))
            elif piece:
                ids += self._piece_ids(piece, before)
            before = piece or before
        return tuple(ids)

    def _piece_ids(self, text: str, before: str) -> list[int]:
        """Ids of ``text`` as they are in ``before + text``, where its start is a border of tokens."""
        special = self._trailing_special.search(before) if self._trailing_special is not None else None
        if special:  # whether it swallows spaces, or a space is written behind it, is the tokenizer's own rule
            lead, ids = self._special_ids(special.group()), self._ids(special.group() + text)
            if tuple(ids[: len(lead)]) == lead:
                return ids[len(lead) :]
        if not before or self._unprefixed is None:
            return self._ids(text)
        first = self._special_pattern.search(text) if self._special_pattern is not None else None
        at = first.start() if first else len(text)
        return (self._unprefixed(text[:at], False) if at else []) + (self._ids(text[at:]) if first else [])

    def _turns(self, messages, train, n_prompt, train_turns) -> list[int]:
        assistant = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
        if train_turns is not None:
            wrong = [i for i in train_turns if i not in assistant]
            if wrong:
                raise RenderError(f"train_turns {wrong} are not assistant messages; give indices among {assistant}.")
            return list(train_turns)
        if train == "completion":
            return [i for i in assistant if i >= (n_prompt or 0)]
        if train == "final_message":
            return assistant[-1:]
        if train == "final_turn":
            users = [i for i, m in enumerate(messages) if m["role"] == "user"]
            return [i for i in assistant if i > (users[-1] if users else -1)]
        return assistant

    def _masked(self, messages, full: str, hidden, turns, ended: bool = True):
        """Tokenise piecewise at the trained spans' borders; every piece border is a border of generation too."""
        pieces: list[tuple[str, int]] = []  # (text, trained)
        cursor = 0
        for turn in turns:
            start_text, _ = self._render_safely(messages[:turn], generation=True)
            last = turn == len(messages) - 1
            content = self._hidden_content(messages[turn])
            calls = self._calls_of(messages[turn])
            closed = full if last else self._render_safely(messages[: turn + 1], False)[0]
            if (
                not full.startswith(start_text)
                or not full.startswith(closed)
                or (last and _place(full[len(start_text) :], content) is None)
            ):
                full, content = self._composed(messages, turn, start_text, full[:cursor])
                closed = full
            span = closed[len(start_text) :]
            stop = self._span_end(span, content, calls)
            self._check_header(span, content, calls, start_text, messages[:turn])
            if last and not ended:
                stop = self._text_end(span, content, calls, messages[turn])
                full = full[: len(start_text) + stop]
            pieces.append((full[cursor : len(start_text)], 0))
            pieces.append((span[:stop], 1))
            cursor = len(start_text) + stop
        pieces.append((full[cursor:], 0))
        piece_ids, before = [], ""
        for text, _ in pieces:
            piece_ids.append(self._tokenise(text, hidden, before) if text else [])
            before = text or before
        ids = [i for part in piece_ids for i in part]
        mask = [trained for part, (_, trained) in zip(piece_ids, pieces) for _ in part]
        return ids, mask

    def _check_header(self, span: str, content: str, calls, start_text: str, before) -> None:
        """Without a generation prompt the header of a turn would be trained, and sampled as part of every answer."""
        # behind a token that says so, which is the policy's to write ([TOOL_CALLS])
        opens_with_call = bool(calls) and not content
        header = (
            span[: span.find(calls if isinstance(calls, str) else calls[0]["name"])]
            if opens_with_call
            else span[: _place(span, content)[0]]
        )
        looks_like_one = "assistant" in header.lower() or (
            not opens_with_call and self._special_pattern is not None and self._special_pattern.search(header)
        )
        if looks_like_one and start_text == self._render_safely(before, generation=False)[0]:
            raise RenderError(
                f"The chat template has no generation prompt, so the header {header!r} of an assistant turn would be"
                " trained as part of the answer. End the template with {%- if add_generation_prompt -%}{{-"
                f" {header!r} -}}}}{{%- endif -%}}"
            )

    def _composed(self, messages, turn: int, start_text: str, done: str) -> tuple[str, str]:
        """(conversation, text of its last turn) as generation would have written it, for a last turn that the template
        shows otherwise.

        DeepSeek-R1's templates open the thinking in the generation prompt and strip it from every turn: the text
        continues ``start_text`` as it was given.
        """
        if turn < len(messages) - 1:
            raise RenderError(
                "The chat template rewrites earlier turns, so one rendering cannot train all of them. Unroll the"
                " conversations (ingest: multiturn=all_turns) and set train_on=final_turn (final_message where turns"
                " call tools), or set chat_template to one that keeps earlier turns."
            )
        stand_in, content = chr(_SENTINEL_BASE + 0xFFF0), self._hidden_content(messages[turn])
        head, found, closing = self._render_safely(
            [*messages[:turn], {**messages[turn], "content": stand_in}], generation=False
        )[0].rpartition(stand_in)
        if not found and content and messages[turn].get("function_calls"):
            raise RenderError(
                f"The chat template leaves out the text beside a tool call ({content[:60]!r}). Set chat_template to one"
                " that shows both, or leave the text out of turns that call."
            )
        opened = start_text[len(head) :] if start_text.startswith(head) else ""
        if not found or not content or not start_text.startswith(done) or not (opened or head.startswith(start_text)):
            before = self._render_safely(messages[:turn], generation=False)[0]
            if found and head.startswith(before) and start_text.startswith(before):
                raise RenderError(
                    f"The chat template's generation prompt {start_text[len(before) :]!r} is not how it starts an"
                    f" answer, {head[len(before) :]!r}, so what is trained would not be what is sampled. End the"
                    " generation prompt in the template as answers start there."
                )
            raise RenderError(
                "The chat template shows the prompt differently once an answer follows it (some drop the system prompt"
                " then), so what is trained would not be what is sampled. Put the system prompt into the first user"
                " message (ingest: system_prompts=merge), or use a template that renders earlier turns unchanged."
            )
        if not content.startswith(opened.strip()):
            raise RenderError(
                f"The chat template starts every answer with {opened!r}, which this one lacks: {content[:60]!r}. Write"
                f" the thinking into message['content'] ({opened.strip()}...</think>answer), or take {opened!r} out of"
                " the template's generation prompt."
            )
        content = content[len(opened.strip()) :].lstrip("\n") if opened else content
        return start_text + head[len(start_text) :] + content + closing, content

    def _hidden_content(self, message) -> str:
        text = message.get("content") or ""
        return self._hide(text)[0].strip()

    def _span_end(self, span: str, content: str, calls=None) -> int:
        """Offset just after the stop token that closes the turn; verifies that the span holds the content and the
        calls.
        """
        place = _place(span, content)
        if place is None:
            raise RenderError(
                f"The rendered assistant turn does not contain its own text ({content[:60]!r}); the chat template "
                "changes content. Use a template that writes message['content'] as it is."
            )
        if calls:
            end = _end_of_calls(span, calls, place[1])
            # Gemma 4 writes the text behind the calls
            if (
                end is None
                and (before := _end_of_calls(span, calls, 0)) is not None
                and span.find(content, before) >= 0
            ):
                end = span.find(content, before) + len(content)
            if end is None:
                raise RenderError(
                    f"The rendered assistant turn does not contain {_said(calls)}, its tool call; set chat_template to"
                    " one that writes calls as they are."
                )
            # calls have closing tokens of their own
            closing = (
                [m.end() for m in self._special_pattern.finditer(span, end)]
                if self._special_pattern is not None
                else []
            )
            return closing[-1] if closing else len(span.rstrip("\n"))
        tail = span[place[1] :]
        match = self._special_pattern.search(tail) if self._special_pattern is not None else None
        return place[1] + (
            match.start() + len(self._closing(tail[match.start() :])) if match else len(tail.rstrip("\n"))
        )

    def _text_end(self, span: str, content: str, calls, message) -> int:
        """Offset just after the text (and calls) of a turn that was cut, with the white space that it ends in."""
        end = _place(span, content)[1]
        if calls:
            end = max(end, _end_of_calls(span, calls, 0) or 0)
        text = message.get("content") or ""
        space = text[len(text.rstrip()) :]
        return end + len(space) * span.startswith(space, end)

    def _closing(self, tail: str) -> str:
        """What closes a turn at the start of ``tail``: a control token, and those right behind it up to the end token
        (Cohere: <|END_RESPONSE|><|END_OF_TURN_TOKEN|>).
        """
        first = self._special_pattern.match(tail)
        if first is None:
            return ""
        run = re.match(f"(?:{self._special_pattern.pattern})+", tail).group()
        end = run.find(self.tokenizer.eos_token)
        return run[: end + len(self.tokenizer.eos_token)] if end >= 0 else first.group()

    def _turn_end_id(self, answer: dict) -> int | None:
        """Id of the token with which the template closes such an assistant turn, if it is one special token."""
        try:
            row = self.conversation([{"role": "user", "content": "x"}, answer])
        except RenderError:
            return None
        last = [i for i, m in zip(row.ids, row.mask) if m][-1:]
        return (
            last[0]
            if last and last[0] in set(self.tokenizer.all_special_ids) | set(self.tokenizer.get_added_vocab().values())
            else None
        )


def _place(span: str, content: str) -> tuple[int, int] | None:
    """Where ``span`` holds an answer's text: as it is, or its thought and what follows it under the same tags with
    other white space (Qwen 3, GLM); None where it does not.
    """
    at = span.find(content)
    if at >= 0:
        return at, at + len(content)
    thought, closed, answer = content.partition("</think>")
    thought, answer = thought.removeprefix("<think>").strip(), answer.strip()
    at = span.find(thought) if closed else -1
    end = span.find("</think>", at + len(thought)) if at >= 0 else -1
    after = span.find(answer, end) if end >= 0 else -1
    return None if after < 0 else (max(span.rfind("<think>", 0, end), 0), after + len(answer))


def _end_of_calls(text: str, calls: list[dict] | str, at: int) -> int | None:
    """Offset behind the last of ``calls`` in ``text`` from ``at`` on, in order, each with its name and its arguments'
    names and values; None where one is missing.
    """
    if isinstance(calls, str):  # shown as written
        found = text.find(calls.strip(), at)
        return None if found < 0 else found + len(calls.strip())
    for call in calls:
        found = [[call["name"]], *_spellings(call["arguments"])]
        ends = [
            min((start + len(form) for form in forms if (start := text.find(form, at)) >= 0), default=None)
            for forms in found
        ]
        if None in ends:
            return None
        at = max(ends)
    return at


def _spellings(value) -> list[list[str]]:
    """The ways in which templates write each name and value in the arguments of a call: as JSON, as Python, or as
    text.
    """
    if isinstance(value, dict):
        return [forms for name, part in value.items() for forms in (*_spellings(name), *_spellings(part))]
    if isinstance(value, list):
        return [forms for part in value for forms in _spellings(part)]
    if isinstance(value, str):
        return [
            [
                value,
                value.strip(),
                *(json.dumps(value, ensure_ascii=ascii)[1:-1] for ascii in (False, True)),
                repr(value)[1:-1],
                value.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n"),
            ]
        ]
    return [[json.dumps(value), str(value)]]


def _said(calls: list[dict] | str) -> str:
    return repr(calls[:60]) if isinstance(calls, str) else ", ".join(call["name"] for call in calls)


def plain_tokens(tokenizer) -> set[str]:
    """Added tokens that are not special: a tokenizer with a Rust backend reads them as tokens even in text that holds
    no control tokens.
    """
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        return set()
    return {str(token.content) for token in tokenizer.added_tokens_decoder.values() if not token.special} - set(
        tokenizer.all_special_tokens
    )


def _without_leading_space(tokenizer):
    """``encode(text, plain) -> ids`` of the same tokenizer without the space it writes before a text (Llama 2, Mistral,
    Phi 3); None where it writes none.

    ``plain``: special-token strings are text.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    parts = {name: getattr(backend, name) for name in ("normalizer", "pre_tokenizer")}
    said = {name: part and json.loads(part.__getstate__()) for name, part in parts.items()}

    def clean(part):
        if isinstance(part, list):
            return [clean(p) for p in part if not (isinstance(p, dict) and p.get("type") == "Prepend")]
        if not isinstance(part, dict):
            return part
        changes = {"Metaspace": {"prepend_scheme": "never"}, "ByteLevel": {"add_prefix_space": False}}.get(
            part.get("type"), {}
        )
        return {name: clean(value) for name, value in part.items()} | changes

    bare = {name: None if (part or {}).get("type") == "Prepend" else clean(part) for name, part in said.items()}
    if bare == said:
        return None
    from tokenizers import Tokenizer

    described = json.dumps(json.loads(backend.to_str()) | bare | {"truncation": None, "padding": None})
    marked, plain = Tokenizer.from_str(described), Tokenizer.from_str(described)
    plain.encode_special_tokens = True
    return lambda text, as_text: (plain if as_text else marked).encode(text, add_special_tokens=False).ids


def clean_message(message) -> dict:
    """Drop null fields (Parquet structs carry them); content of a tool-call-only turn becomes the empty string."""
    out = {k: v for k, v in dict(message).items() if v is not None}
    out.setdefault("content", "")
    return out


@lru_cache(maxsize=4)
def renderer_for(
    path: str, chat_template: str | None = None, template_kwargs: str = "{}", new_tokens: tuple[str, ...] = ()
) -> Renderer:
    """Renderer of a model directory, with its generation config's stop ids.

    chat_template: text of a template instead of the model's own; template_kwargs: JSON of the variables that it gets;
    new_tokens: special tokens that the tokenizer gets behind all of its own.

    Raises:
        RenderError: one of the new tokens is a token already.
    """
    from transformers import GenerationConfig

    try:
        generation_config = GenerationConfig.from_pretrained(path)
    except OSError:
        generation_config = None
    tokenizer = load_tokenizer(path)
    if known := [name for name in new_tokens if name in tokenizer.get_vocab()]:
        raise RenderError(f"new_tokens: {', '.join(known)} is in the tokenizer's vocabulary already; leave it out.")
    if new_tokens:
        tokenizer.add_tokens(list(new_tokens), special_tokens=True)
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    return Renderer(tokenizer, generation_config, json.loads(template_kwargs))


def stage_renderer(stage) -> Renderer:
    """Renderer of a stage's model input under the stage's ``chat_template``, ``chat_template_kwargs`` and
    ``new_tokens``.
    """
    return renderer_for(stage.path("model"), *stage.config.template(), tuple(getattr(stage.config, "new_tokens", ())))
