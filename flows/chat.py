"""`posttrain chat`: a conversation with a model, through the same renderer and sampler as training."""

from __future__ import annotations

import sys

from storage import store


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
    """Answer one prompt, or talk until the input ends. Answers go to stdout, everything else to stderr."""
    found = store.resolve(model, "model")  # before the imports that take seconds: a mistyped name is told of at once
    import torch
    from transformers.utils.logging import disable_progress_bar

    from stages.chat import renderer_for
    from stages.decoding.sampler import Sampler, SamplingParams
    from stages.models.modeling import load_frozen

    disable_progress_bar()
    renderer = renderer_for(found.path)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sampler = Sampler(load_frozen(found.path, device), renderer.tokenizer, max_batch=1)
    params = SamplingParams(
        temperature=temperature, top_p=top_p, max_new_tokens=max_tokens, stop_ids=frozenset(renderer.stop_ids)
    )
    opening = [{"role": "system", "content": system}] if system else []
    messages = list(opening)

    def answer(text: str, turn: int):
        messages.append({"role": "user", "content": text})
        reply = sampler.generate([renderer.prompt_ids(messages)], params, [[seed + turn]])[0][0]
        messages.append({"role": "assistant", "content": reply.text})
        return reply

    if prompt is not None:
        reply = answer(prompt, 0)
        if as_json:
            from flows.cli import emit

            return emit(
                {
                    "model": found.ref,
                    "prompt": prompt,
                    "answer": reply.text,
                    "finish_reason": reply.finish_reason,
                    "tokens": len(reply.ids),
                }
            )
        return print(reply.text)
    print(f"{found.ref} on {device}; an empty line ends, /reset forgets the conversation", file=sys.stderr)
    turn = 0
    while True:
        try:
            text = input("you: " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return
        if not text:
            return
        if text == "/reset":
            messages[:] = opening
            continue
        reply = answer(text, turn)
        turn += 1
        print(reply.text + ("" if reply.finish_reason != "length" else " […]"), flush=True)
