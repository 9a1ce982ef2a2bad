"""Log-probabilities of given responses under a policy: KL to a reference on samples, likelihood and implicit scores of pairs."""

from __future__ import annotations

from collections.abc import Sequence


def response_logps(model, items: Sequence, max_tokens: int, device: str) -> list[list[list[float]]]:
    """Per item, per response, the float32 log-probs of its target tokens (temperature 1, no filters), in the items' order.

    Args:
        model: causal LM. items: :class:`stages.batching.Item` with prompt, responses and masks.
        max_tokens: padded tokens per forward.
    """
    import torch

    from stages.batching import collate, plan
    from stages.modeling import head_of, hidden_states, token_logps

    found: dict[int, list[list[float]]] = {}
    if not items:
        return []
    model.eval()
    with torch.inference_mode():
        head = head_of(model)
        for group in plan(items, max_tokens):
            batch = collate(group, device)
            logps, _ = token_logps(head, hidden_states(model, batch, batch.src_N), batch.target_N)
            rows: list[list[float]] = [[] for _ in range(sum(len(i.responses) for i in group))]
            for sequence, value in zip(batch.seq_N.tolist(), logps.tolist()):
                rows[sequence].append(value)
            cursor = 0
            for item in group:
                found[id(item)] = rows[cursor : cursor + len(item.responses)]
                cursor += len(item.responses)
    return [found[id(item)] for item in items]


def sampled_kl(policy: Sequence[float], reference: Sequence[float]) -> float:
    """KL(policy || reference) of one sampled response, nats, estimated as sum log pi - log ref over its tokens (k1, unbiased
    for samples at temperature 1)."""
    return sum(policy) - sum(reference)
