"""Which tokens of a conversation are trained, and what a conversation unrolls into (sft.mask, sft.unroll, sft.template).

Pure functions on roles and messages: no tokenizer. A token is described by its role ("bos", "system", "user",
"assistant", "tool", "eot") and by the index of the message it belongs to (-1 outside messages). An "eot" token
belongs to the message it closes.
"""
from __future__ import annotations

POLICIES = ("completion", "final_message", "final_turn", "all_assistant", "full")
ALIASES = {"all_assistant_turns": "all_assistant", "full_sequence_no_bos": "full", "full_sequence": "full"}


def completion_mask(roles, turn_index, policy: str = "all_assistant") -> list[int]:
    """0/1 per token. `completion` and `final_turn` train assistant tokens after the last user message,
    `final_message` only the last assistant message, `all_assistant` every assistant message, `full` all but BOS.

    The eot token that closes an assistant message is trained; system, user and tool tokens never are (except in
    `full`). Role headers carry the role "header" and count as untrained in all but `full`.
    """
    policy = ALIASES.get(policy, policy)
    if policy not in POLICIES:
        raise ValueError(f"mask policy {policy!r} is not known; write one of: {', '.join(POLICIES)}")
    if len(roles) != len(turn_index):
        raise ValueError(f"{len(roles)} roles but {len(turn_index)} message indices: give one of each per token")
    if policy == "full":
        return [int(role != "bos") for role in roles]
    role_of = {}
    for role, turn in zip(roles, turn_index):
        if turn >= 0 and role not in ("eot", "header"):
            role_of.setdefault(turn, role)
    assistant = [t for t, role in role_of.items() if role == "assistant"]
    if policy == "final_message":
        trained = set(assistant[-1:]) if assistant else set()
    elif policy == "all_assistant":
        trained = set(assistant)
    else:
        last_user = max((t for t, role in role_of.items() if role == "user"), default=-1)
        trained = {t for t in assistant if t > last_user}
    return [int(turn in trained and role in ("assistant", "eot")) for role, turn in zip(roles, turn_index)]


def spans_to_mask(spans, length: int) -> list[int]:
    """[(role, n_tokens)] segments, assistant trained -> 0/1 list of `length` (0 after the last span)."""
    mask = [int(role == "assistant") for role, n in spans for _ in range(n)]
    if len(mask) > length:
        raise ValueError(f"spans cover {len(mask)} tokens, more than the {length} given")
    return mask + [0] * (length - len(mask))


def composite_mask(attention, is_prompt, is_tool, is_pad, removed: bool = False) -> tuple[list[int], list[int]]:
    """(response_mask, loss_mask) of one row: generated tokens, and those that are trained (MASK-TOOL)."""
    response = [int(a and not p and not pad) for a, p, pad in zip(attention, is_prompt, is_pad)]
    return response, [int(r and not t and not removed) for r, t in zip(response, is_tool)]


def target_positions(prompt_length: int, input_length: int) -> tuple[list[int], list[int]]:
    """(positions of trained tokens, positions of the logits that predict them): shifted once (sft.nll)."""
    targets = list(range(prompt_length, input_length))
    return targets, [t - 1 for t in targets]


def unroll(messages, balance: str = "none") -> list[dict]:
    """N assistant messages -> N rows {prompt: messages before it, completion: the message, weight} (sft.unroll).

    `messages` are {"role", "content"} dicts; `balance="per_conversation"` gives each row the weight 1/N.
    """
    if balance not in ("none", "per_conversation"):
        raise ValueError(f"balance={balance!r} is not known; write 'none' or 'per_conversation'")
    turns = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
    weight = 1.0 / len(turns) if balance == "per_conversation" and turns else 1.0
    return [{"prompt": list(messages[:i]), "completion": messages[i], "weight": weight, "turn_index": k}
            for k, i in enumerate(turns)]


class TemplateError(ValueError):
    """A conversation the template cannot render."""


def validate_roles(roles) -> None:
    """Optional first system, then user/assistant strictly alternating from user; TemplateError otherwise (sft.template)."""
    rest = list(roles[1:] if roles and roles[0] == "system" else roles)
    for i, role in enumerate(rest):
        if role != ("user", "assistant")[i % 2]:
            raise TemplateError(f"Conversation roles must alternate user/assistant/user/assistant/...: message {i} is {role!r}")


def chatml(messages, bos_token: str = "", add_generation_prompt: bool = False) -> str:
    """ChatML text of a conversation, contents stripped; the stop token is <|im_end|> (sft.template)."""
    validate_roles([m["role"] for m in messages])
    text = bos_token + "".join(f"<|im_start|>{m['role']}\n{m['content'].strip()}<|im_end|>\n" for m in messages)
    return text + ("<|im_start|>assistant\n" if add_generation_prompt else "")
