"""Log-probabilities of given responses under a policy: KL to a reference on samples, likelihood and implicit scores of
pairs.
"""

from __future__ import annotations

from collections.abc import Sequence


def response_logps(model, items: Sequence, max_tokens: int, device: str) -> list[list[list[float]]]:
    """Per item, per response, the float32 log-probs of its target tokens (temperature 1, no filters), in the items'
    order.

    Args:
        model: causal LM. items: :class:`stages.batching.Item` with prompt, responses and masks.
        max_tokens: tokens per forward.
    """
    from stages.batching import per_response
    from stages.models.modeling import target_logps

    def compute(batch):
        rows: list[list[float]] = [[] for _ in range(len(batch.last_S))]
        for sequence, value in zip(batch.seq_N.tolist(), target_logps(model, batch)[0].tolist()):
            rows[sequence].append(value)
        return rows

    model.eval()
    return per_response(items, max_tokens, device, compute, model)


def prompted_logps(model, items: Sequence, max_tokens: int, device: str) -> list[list[list[float]]]:
    """:func:`response_logps` of a whole model in this process, a long beginning that prompts share (the examples of a
    few-shot evaluation) computed once where the responses are single tokens, as letters are."""
    found = next_token_logps(model, items, device)
    others = iter(
        response_logps(model, [item for i, item in enumerate(items) if i not in found], max_tokens, device)
        if len(found) < len(items)
        else ()
    )
    return [found[i] if i in found else next(others) for i in range(len(items))]


def next_token_logps(model, items: Sequence, device: str) -> dict[int, list[list[float]]]:
    """Index -> log-prob of each response, of the items whose responses are single tokens and whose prompts begin like
    others'.
    """
    import torch

    from stages.decoding.decoders import DecoderError, make_decoder
    from stages.decoding.prefixes import prefilled_groups, shared_beginnings

    short = [
        i
        for i, item in enumerate(items)
        if len(item.prompt) and all(len(r) == 1 and m.all() for r, m in zip(item.responses, item.masks))
    ]
    prompts = {i: items[i].prompt.tolist() for i in sorted(short, key=lambda i: -len(items[i].prompt))}
    groups = [group for group in shared_beginnings(prompts, list(prompts)) if group[1]]
    if not groups:
        return {}
    try:
        decoder = make_decoder(model)
        decoder.check_length(max(map(len, prompts.values())))
    except DecoderError:
        return {}
    found: dict[int, list[list[float]]] = {}
    model.eval()
    with torch.inference_mode():
        decoder.refresh()
        for indices, prefilled in prefilled_groups(
            decoder, prompts, groups, len(items), lambda x: torch.from_numpy(x).to(device)
        ):
            for i, logps in zip(indices, torch.log_softmax(prefilled.logits, -1)):
                found[i] = [[logps[int(r[0])].item()] for r in items[i].responses]
    return found


def response_ranks(model, items: Sequence, max_tokens: int, device: str) -> list[list[list[int]]]:
    """Per item, per response, the rank of each target token among the vocabulary: 1 + number of strictly larger logits
    (float32), so ties share the better rank.
    """
    import torch

    from stages.batching import per_response
    from stages.models.modeling import head_chunks, head_of, hidden_states, precise

    def compute(batch):
        head, hidden, ranks = head_of(model).widened(), hidden_states(model, batch, batch.src_N), []
        for rows in head_chunks(len(hidden), head.weight):
            logits = precise(head.logits(hidden[rows]))
            ranks += (1 + (logits > logits.gather(1, batch.target_N[rows, None])).sum(1)).tolist()
        found: list[list[int]] = [[] for _ in range(len(batch.last_S))]
        for sequence, rank in zip(batch.seq_N.tolist(), ranks):
            found[sequence].append(rank)
        return found

    model.eval()
    with torch.no_grad():
        return per_response(items, max_tokens, device, compute, model)


def sampled_kl(policy: Sequence[float], reference: Sequence[float]) -> float:
    """KL(policy || reference) of one sampled response, nats, estimated as sum log pi - log ref over its tokens (k1,
    unbiased for samples at temperature 1)."""
    return sum(policy) - sum(reference)
