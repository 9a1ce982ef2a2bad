"""Frozen weights in less memory: the matrices of a frozen model, or of the model under a LoRA adapter, kept in bfloat16
or in 4 bits.

Only how they lie in memory changes. Products are computed in the type they always are: where that is float32, a matrix
is widened for its product and forgotten again, forward and backward; under ``compute_dtype=bfloat16`` it is multiplied
as it lies. So a checkpoint that is stored in bfloat16 gives the same bits kept so as widened to float32
(``frozen_dtype=auto`` keeps exactly what is stored so), and a float32 one, kept so by ``frozen_dtype=bfloat16``, is the
model of its rounded matrices. Norms, biases, heads of reward models, adapters and everything trained stay float32.

``nf4`` and ``nf4_double`` (QLoRA, :mod:`stages.models.quantised`) keep the linear layers in 4 bits; embedding and
output layer are kept as ``auto`` keeps them. The model is that of the dequantised matrices, for whoever computes with
it: trainer, reference, sampler, and the published one.
"""

from __future__ import annotations

import functools
from types import MethodType

import torch
from torch import nn

from stages.models import lean, pending, quantised

LOW = torch.bfloat16
_KEPT = "_posttrain_kept"


def is_kept(model) -> bool:
    """Whether matrices of this model are kept in bfloat16 or 4 bits by :func:`keep`."""
    return _KEPT in pending.plain(model).__dict__


def arithmetic(model) -> torch.dtype:
    """Type in which a model's products are computed outside autocast: that of its weights, float32 where they are only
    kept in bfloat16.
    """
    dtype = model.get_input_embeddings().weight.dtype
    return torch.float32 if dtype == LOW and is_kept(model) else dtype


def stores_low(path: str) -> bool:
    """Whether a model directory or hub id has weights in bfloat16, by the headers of its safetensors files; without
    such files by its config.
    """
    from transformers import AutoConfig

    files = pending.weight_files(path)
    if files:
        return any(kind == "BF16" for file in files for kind in pending.stored_types(file).values())
    return str(getattr(AutoConfig.from_pretrained(path), "dtype", None)).removeprefix("torch.") == "bfloat16"


def may_keep(path: str, how: str) -> bool:
    """Whether ``frozen_dtype=how`` keeps anything of this checkpoint in less than float32."""
    return how == "bfloat16" or how in quantised.FORMS or how == "auto" and stores_low(path)


def keep(model, how: str):
    """Keep the frozen float32 matrices of a model's backbone and output layer in bfloat16: all of them (``bfloat16``),
    or those that lose nothing (``auto``); or the linear layers in 4 bits (``nf4``, ``nf4_double``) and the others as
    ``auto`` does.

    Works on weights that are still in their files (:mod:`stages.models.pending`), too, which then never take more
    memory. Returns the model.
    """
    base = pending.plain(model)
    places = base.__dict__["_posttrain_pending"].places if pending.is_pending(base) else {}
    names = {module: name.replace(".base_layer", "") for name, module in base.named_modules()}
    output = base.get_output_embeddings()
    output = getattr(output, "base_layer", output)
    inside = [*lean.core_of(model).modules(), *([output] if output is not None else [])]
    taken = [
        m
        for m in inside
        if type(m) in _kinds()
        and m.weight.ndim == 2
        and m.weight.dtype == torch.float32
        and not quantised.is_quantised(m.weight)
        and not any(p.requires_grad for p in m.parameters())
    ]
    others = {id(p) for m in base.modules() if m not in set(taken) for p in m._parameters.values() if p is not None}
    linear = {m for m in taken if type(m) is not nn.Embedding and m is not output and id(m.weight) not in others}
    made: dict[nn.Parameter, nn.Parameter | None] = {}  # tied weights stay tied
    types = functools.cache(pending.stored_types)
    for module in taken:
        weight = module.weight
        if id(weight) in others:  # read by a layer of another kind as well
            continue
        if weight not in made:
            name = f"{names[module]}.weight"
            if how in quantised.FORMS and module in linear:
                made[weight] = (
                    _quantised(base, weight, name, how) if name in places else quantised.quantise(weight, how)
                )
            else:
                made[weight] = _narrowed(weight, places.get(name), how, types)
        if made[weight] is not None:
            module._parameters["weight"] = made[weight]
            module.forward = MethodType(_kinds()[type(module)], module)
    if how in quantised.FORMS and not linear:
        raise quantised.QuantisationError(
            f"frozen_dtype={how} keeps plain linear layers in 4 bits, and {type(base).__name__} has none that is"
            " frozen; write frozen_dtype=bfloat16"
        )
    if any(low is not None for low in made.values()):
        base.__dict__[_KEPT] = True
    return model


def _quantised(base, weight: nn.Parameter, name: str, how: str) -> nn.Parameter:
    """The placeholder of a weight that is still in its file, and is quantised as it is read."""
    base.__dict__["_posttrain_pending"].made[name] = functools.partial(quantised.quantise, form=how)
    return weight


def _narrowed(weight: nn.Parameter, place: tuple[str, str] | None, how: str, types) -> nn.Parameter | None:
    """The weight in bfloat16, a placeholder where it is still in a file; None where it stays as it is."""
    if place is not None:
        if how != "bfloat16" and types(place[0])[place[1]] != "BF16":
            return None
        low = torch.zeros((), dtype=LOW).expand(weight.shape)
    else:
        low = weight.detach().to(LOW)
        if how != "bfloat16" and not torch.equal(low.to(weight.dtype), weight):
            return None
    return nn.Parameter(low, requires_grad=False)


@torch.no_grad()
def widen(model):
    """Undo :func:`keep`: every matrix in float32 again. Returns the model."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in pending.plain(model).modules() if is_kept(model) else ():
        if (
            type(module) in _kinds()
            and "forward" in module.__dict__
            and (module.weight.dtype == LOW or quantised.is_quantised(module.weight))
        ):
            weight = module.weight
            if weight not in made:
                made[weight] = nn.Parameter(quantised.dense(weight).float(), requires_grad=False)
            module._parameters["weight"] = made[weight]
    return released(model) if made else model


def released(model):
    """A copy of a model with parameters of one type, whose layers compute as the library wrote them again, in that
    type.
    """
    base = pending.plain(model)
    for module in base.modules():
        if type(module) in _kinds():
            module.__dict__.pop("forward", None)
    base.__dict__.pop(_KEPT, None)
    return model


# -- layers of a model's own forward over kept weights -----------------------------------------------------------------


def _kinds() -> dict:
    from transformers.pytorch_utils import Conv1D

    return {nn.Linear: _linear, nn.Embedding: _embedding, Conv1D: _conv1d}


def _linear(module, x: torch.Tensor) -> torch.Tensor:
    return quantised.product(x, module.weight, module.bias)


def _conv1d(module, x: torch.Tensor) -> torch.Tensor:
    """GPT-2's linear layer, whose weight is [in, out]."""
    return quantised.product(x, module.weight, module.bias, turned=True)


def _embedding(module, ids: torch.Tensor) -> torch.Tensor:
    rows = nn.Embedding.forward(module, ids)
    return rows.float() if rows.dtype == LOW else rows
