"""`posttrain chat`: a conversation with a model, through the same renderer and sampler as training."""

from __future__ import annotations

import sys
from typing import Any

from stages.spec import ConfigError
from storage import store
from tasks.run import whole_model


def converse(
    model: str,
    *,
    prompt: str | None,
    system: str | None,
    temperature: float,
    top_p: float,
    max_tokens: int,
    seed: int,
    as_json: bool,
) -> None:
    """Answer one prompt, or talk until the input ends. Answers go to stdout as they are drawn, everything else to stderr;
    with ``as_json`` one line, and nothing before it.

    Raises:
        ConfigError: no language model, or a prompt that leaves no room for an answer.
    """
    try:
        found = store.resolve(model, "model")  # before the imports that take seconds: a mistyped name is told at once
    except store.OnlyAdapter as adapter:
        found = whole_model(adapter, model, "chat")
    if wrong := store.wrong_use(found.path, "words"):
        raise ConfigError(f"{model} {wrong}")
    talk = Conversation(str(found.path), system, temperature, top_p, max_tokens, seed)
    if prompt is not None:
        reply = talk.answer(prompt, streamed=not as_json)
        if as_json:
            from flows.commands.app import emit

            emit(
                {
                    "model": found.ref,
                    "prompt": prompt,
                    "answer": reply.text,
                    "finish_reason": reply.finish_reason,
                    "tokens": len(reply.ids),
                }
            )
        return
    print(f"{found.ref} on {talk.device}; an empty line ends, /reset forgets the conversation", file=sys.stderr)
    with talk.sampler.remembering():  # an answer continues what was computed for the turns before it
        while text := said():
            if text == "/reset":
                talk.reset()
                continue
            try:
                talk.answer(text, streamed=True)
            except ConfigError as error:
                print(f"{error}, or write /reset", file=sys.stderr)


def said() -> str:
    """The next line of the input; empty at its end."""
    try:
        return input("you: " if sys.stdin.isatty() else "").strip()
    except EOFError:
        return ""


class Conversation:
    """Turns with one model."""

    def __init__(self, path: str, system: str | None, temperature: float, top_p: float, max_tokens: int, seed: int):
        import torch
        from transformers.utils.logging import disable_progress_bar

        from stages.chat import renderer_for
        from stages.decoding.decoders import max_positions
        from stages.decoding.sampler import Sampler
        from stages.models.modeling import load_frozen

        disable_progress_bar()
        self.renderer = renderer_for(path)
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        network = load_frozen(path, self.device)
        self.positions = max_positions(network)
        self.sampler = Sampler(network, self.renderer.tokenizer, max_batch=1)
        self.drawn = {"temperature": temperature, "top_p": top_p, "stop_ids": frozenset(self.renderer.stop_ids)}
        self.max_tokens, self.seed, self.turn = max_tokens, seed, 0
        self.opening = [{"role": "system", "content": system}] if system else []
        self.reset()

    def reset(self) -> None:
        self.messages = list(self.opening)

    def answer(self, text: str, streamed: bool) -> Any:
        """The model's :class:`stages.decoding.sampling.Completion`; ``streamed``: printed while it is drawn. One that ends
        for its length ends with […].

        Raises:
            ConfigError: the conversation leaves no room for one; it is as it was before.
        """
        from stages.decoding.sampling import SamplingParams

        messages = [*self.messages, {"role": "user", "content": text}]
        ids = self.renderer.prompt_ids(messages)
        room = self.max_tokens if self.positions is None else min(self.max_tokens, self.positions - len(ids))
        if room < 1:
            raise ConfigError(
                f"the conversation has {len(ids):,} tokens and the model {self.positions:,} positions, so that no answer"
                " fits; write less"
            )
        params = SamplingParams(max_new_tokens=room, **self.drawn)
        shown = Shown(self.sampler.tokenizer, params) if streamed else None
        [[reply]] = self.sampler.generate([ids], params, [[self.seed + self.turn]], on_token=shown)
        self.turn += 1
        self.messages = [*messages, {"role": "assistant", "content": reply.text}]
        if shown is not None:
            shown.end(reply)
        return reply


class Shown:
    """Prints an answer's text as its tokens come: what no later token can change."""

    def __init__(self, tokenizer: Any, params: Any):
        from stages.decoding.sampler import DerivedText

        self.text, self.stops, self.printed = DerivedText(tokenizer, params), params.stop_ids, ""

    def __call__(self, prompt: int, completion: int, ids: list[int]) -> None:
        if ids[-1] in self.stops:
            return
        text = self.text.of(ids).rstrip("\ufffd")  # half a character
        if text.startswith(self.printed):
            print(text[len(self.printed) :], end="", flush=True)
            self.printed = text

    def end(self, reply: Any) -> None:
        rest = reply.text.removeprefix(self.printed) if reply.text.startswith(self.printed) else "\n" + reply.text
        print(rest + (" […]" if reply.finish_reason == "length" else ""), flush=True)
