"""Tokens that a tokenizer gets for a chat template, and rows of the model for them (``sft.template``)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from stages.models.modeling import ModelError


@torch.no_grad()
def add_rows(model, tokenizer, names: Sequence[str]) -> None:
    """Rows of embedding and LM head for tokens that were just added behind all others of ``tokenizer``: the mean of the
    rows of the tokens before them. A model whose matrices are padded that far keeps their size.

    Raises:
        ModelError: the model has fewer rows than the tokenizer had tokens.
    """
    ids = tokenizer.convert_tokens_to_ids(list(names))
    first, last = min(ids), max(ids)
    rows = model.get_input_embeddings().weight.shape[0]
    if first > rows:
        raise ModelError(
            f"the tokenizer has {first} tokens and the model's embedding {rows} rows: some were added to the tokenizer"
            f" only. Give the model as many rows first, with model.resize_token_embeddings({first}) and"
            " save_pretrained."
        )
    if last >= rows:
        model.resize_token_embeddings(last + 1, mean_resizing=False)
    ends = [model.get_input_embeddings(), model.get_output_embeddings()]
    for matrix in {id(end.weight): end.weight for end in ends if end is not None}.values():
        matrix[ids] = matrix[:first].double().mean(0).to(matrix.dtype)
    if (bias := getattr(ends[1], "bias", None)) is not None:
        bias[ids] = bias[:first].double().mean().to(bias.dtype)
