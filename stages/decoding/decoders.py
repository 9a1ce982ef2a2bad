"""Which decoder runs under the sampler, and what all of them ask of a model.

Three decoders behind one interface (`prefill`, `decode`: batched prefill, one-token steps over slots of static KV,
``stages.decoding.kv_cache``), chosen by `make_decoder`:

* `lean_decoder.LeanDecoder`: its own forward over the model's weights for the families of `stages.models.layers` with
  plain or fixed-table rotary embeddings. Fused qkv and gate/up weights (``lean_weights``), rotation as one complex
  product, in-place KV writes, KV views bounded by the longest live row; on a GPU kernels of its own
  (``stages.decoding.kernels``). Weights are read again at every `refresh()` (RL changes them).
* `model_decoders.GenericDecoder`: any Hugging Face decoder-only model with full and window attention, through its own
  forward with a slot cache and a 4D mask.
* `model_decoders.WholeDecoder`: any other (state-space, linear and chunked attention, convolutions, ALiBi): every token
  costs a forward of the whole rows.

Either computes in the model's own type, or in another (`dtype`): then from its own copy of the weights, which `refresh`
brings up to date.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from stages.models.layers import rope_limit


class DecoderError(ValueError):
    """A model this sampler cannot decode; the message says what to use instead."""


class CannotStep(DecoderError):
    """A model that cannot be decoded token by token from kept keys and values; the message says why."""


def max_positions(model) -> int | None:
    """Longest sequence the model has positions for, None when its config states none."""
    config = model.config.get_text_config(decoder=True)
    return getattr(config, "max_position_embeddings", None)


def make_decoder(model, lean: bool | None = None, dtype: torch.dtype | None = None):
    """The engine for a model. lean: None picks, True insists (error with the reason), False takes the generic one.
    dtype: what it computes in, None for the weights' own type."""
    from stages.decoding.lean_decoder import LeanDecoder, why_not_lean
    from stages.decoding.model_decoders import GenericDecoder, WholeDecoder

    reason = why_not_lean(model) if lean is not False else "asked for the generic engine"
    if reason is None:
        return LeanDecoder(bare(model), dtype)
    if lean:
        raise DecoderError(
            f"the lean engine does not take this model ({reason}): write lean=None to let the sampler choose"
        )
    try:
        return GenericDecoder(bare(model), dtype)
    except CannotStep as error:
        return WholeDecoder(bare(model), dtype, str(error))


def bare(model):
    """The Hugging Face model inside a peft wrapper (its adapter layers stay in place)."""
    return model.get_base_model() if hasattr(model, "get_base_model") and hasattr(model, "peft_config") else model


def rope_refusal(model) -> Callable[[int], None]:
    """What raises DecoderError for rows past the length up to which a model has one rotary table."""
    limit = rope_limit(model.config.get_text_config(decoder=True))

    def check(total: int) -> None:
        if limit is not None and total > limit[1]:
            raise DecoderError(
                f"{type(model).__name__} has {limit[0]} rotary embeddings, which past {limit[1]} tokens differ with the"
                f" longest row of a batch, and rows reach {total}: keep prompt + max_new_tokens <= {limit[1]}, or give"
                " the model's config a fixed rope_type such as yarn"
            )

    return check
