"""Models whose weights are still in their files (``sharding=full``): no rank ever holds a whole one.

:func:`pending` builds a model as ``from_pretrained`` does, on placeholders that take no memory; :func:`fill` reads the
weights of some of its modules, for :func:`stages.models.sharding.shard` one layer at a time just before it is split.
:func:`write` is the way back: a sharded model into the files that ``save_pretrained`` would write, one gathered tensor
at a time.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

import torch
from torch import nn

from stages.models import sharding, tensor_files
from stages.running import ranks


@dataclass
class Pending:
    """What a model has not read yet: parameter name in the plain model -> (file, name there); where it shall lie; and
    what is made of some of them as they are read.
    """

    places: dict[str, tuple[str, str]]
    device: str
    made: dict[str, Callable[[torch.Tensor], nn.Parameter]] = field(default_factory=dict)


def load(
    factory,
    path: str,
    device: str,
    in_shards: bool = False,
    settings: dict | None = None,
    new: Callable[[nn.Module, str], bool] = lambda model, name: False,
    **options,
):
    """``factory.from_pretrained(path, **settings, **options)`` on ``device``, its weights left in their files where
    ``in_shards`` asks for it and that can be done. ``settings`` are the config's. With SDPA attention, or the
    architecture's own where it has none (Gemma2- and DeBERTa-class models).

    Raises:
        ValueError: the files lack weights that ``new(model, name)`` does not allow to be made here; the library would
            draw them at random and go on. Or they have other shapes than the config says.
    """

    def made(attention: str):
        chosen = {**options, "attn_implementation": attention}
        model, info = pending(factory, path, device, settings or {}, **chosen) if in_shards else (None, None)
        if model is None:
            model, info = factory.from_pretrained(path, output_loading_info=True, **(settings or {}), **chosen)
            model.to(device)
        if lacking := sorted(name for name in info["missing_keys"] if not new(model, name)):
            raise ValueError(
                f"its files lack {len(lacking)} of the weights, which would be random:"
                f" {', '.join(lacking[:3])}{' ...' if len(lacking) > 3 else ''}; they hold another kind of model, or a"
                " part of this one"
            )
        # where another head may be made here the library would make the rest at random, too
        if any(not new(model, name) for name, *_ in info["mismatched_keys"]):
            raise ValueError(_other_shapes(factory, path))
        return model

    try:
        return made("sdpa")
    except ValueError as error:
        if "scaled_dot_product_attention" not in str(error):
            raise
        return made("eager")
    except RuntimeError as error:  # the library's says only that there is a report above
        if "ignore_mismatched_sizes" not in str(error):
            raise
        raise ValueError(_other_shapes(factory, path)) from None


def _other_shapes(factory, path: str) -> str:
    """That a config gives stored weights other shapes, with the first that it does where the files are safetensors."""
    from transformers import AutoConfig

    with torch.device("meta"):
        model = factory.from_config(AutoConfig.from_pretrained(path))
    wanted, found = {name: tuple(weight.shape) for name, weight in model.named_parameters()}, {}
    for file in weight_files(path):
        with _open(file) as stored:
            found |= {name: tuple(stored.get_slice(name).get_shape()) for name in stored.keys()}
    other = [name for name in sorted(found.keys() & wanted.keys()) if found[name] != wanted[name]]
    such = f", such as {other[0]} {found[other[0]]} instead of {wanted[other[0]]}" if other else ""
    return (
        f"its weights have other shapes than its config.json says{such}; one of the two is of another model: copy both from"
        " the same place"
    )


def pending(factory, path: str, device: str, settings: dict, **options):
    """The model that ``from_pretrained`` loads, with its weights to be read later (:func:`fill`).

    Returns (model, the library's loading info), or (None, None) where they cannot be read one by one: no safetensors
    files, or weights that are made of several stored ones or have other names.
    """
    from transformers import AutoConfig, GenerationConfig

    found = {}  # name -> (file, shape)
    for file in weight_files(path):
        with _open(file) as stored:
            found |= {name: (file, stored.get_slice(name).get_shape()) for name in stored.keys()}
    if not found:
        return None, None
    seats = torch.zeros(len(found), dtype=options["dtype"])  # one number each, seen as a whole tensor
    placeholders = {name: seats[i].expand(shape) for i, (name, (_, shape)) in enumerate(found.items())}
    stored_as = {tensor.data_ptr(): name for name, tensor in placeholders.items()}
    config = AutoConfig.from_pretrained(path, **settings)
    with torch.device("meta"):
        kind = type(factory.from_config(config))  # the Auto classes themselves take no state_dict
    model, info = kind.from_pretrained(
        None, config=config, state_dict=placeholders, output_loading_info=True, **options
    )
    model.name_or_path = model.config.name_or_path = path
    if model.can_generate():
        try:
            model.generation_config = GenerationConfig.from_pretrained(path)
        except OSError:  # older models keep these settings in their config
            model.generation_config = GenerationConfig.from_pretrained(
                path, config_file_name="config.json", _from_model_config=True
            )
    new = {*info["missing_keys"], *(entry[0] for entry in info["mismatched_keys"])}
    places, prefix = {}, getattr(model, "base_model_prefix", "") + "."
    for name, parameter in model.named_parameters():
        stored = stored_as.get(parameter.data_ptr())
        if stored is None and name in new:
            continue  # a new head, made as always
        if stored not in (name, prefix + name, name.removeprefix(prefix)) or list(parameter.shape) != list(
            found[stored][1]
        ):
            return None, None
        places[name] = (found[stored][0], stored)
    model.__dict__["_posttrain_pending"] = Pending(places, device)
    return model, info


def weight_files(path: str) -> list[str]:
    """The safetensors files of a model directory or hub id, none where there are none."""
    from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file

    def there(name: str) -> str | None:
        return cached_file(
            path, name, _raise_exceptions_for_missing_entries=False, _raise_exceptions_for_connection_errors=False
        )

    single, index = there(SAFE_WEIGHTS_NAME), there(SAFE_WEIGHTS_INDEX_NAME)
    if single or not index:
        return [single] if single else []
    names = sorted(set(json.loads(Path(index).read_text())["weight_map"].values()))
    return [there(name) for name in names]


def stored_types(file: str) -> dict[str, str]:
    """{tensor: its type as the header of a safetensors file names it, such as "BF16"}."""
    with open(file, "rb") as handle:
        entries = json.loads(handle.read(int.from_bytes(handle.read(8), "little")))
    return {name: entry["dtype"] for name, entry in entries.items() if name != "__metadata__"}


def _open(file: str):
    from safetensors import safe_open

    return safe_open(file, "pt")


def is_pending(model) -> bool:
    return "_posttrain_pending" in plain(model).__dict__


def plain(model):
    """The model under a LoRA adapter, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


@torch.no_grad()
def fill(model, modules: Iterable[nn.Module] | None = None):
    """Read the weights of these modules (default: all), as far as they are still in files; what is tied stays tied.
    Returns the model.
    """
    base = plain(model)
    if not is_pending(base):
        return model
    waiting = base.__dict__["_posttrain_pending"]
    places, device = waiting.places, waiting.device
    chosen = None if modules is None else {part for module in modules for part in module.modules()}
    # closed behind each call: pages of a file that was read count as this process's memory
    open_files: dict[str, object] = {}
    for path, module in list(base.named_modules()):
        for name, parameter in list(module._parameters.items()) if chosen is None or module in chosen else ():
            plain_name = f"{path}.{name}".replace(".base_layer.", ".").removeprefix(".")
            where = places.pop(plain_name, None)
            if where is None:
                continue
            file, stored = where
            if file not in open_files:
                open_files[file] = _open(file)
            value = torch.empty(parameter.shape, dtype=parameter.dtype, device=device).copy_(
                open_files[file].get_tensor(stored)
            )
            value = (
                waiting.made[plain_name](value)
                if plain_name in waiting.made
                else nn.Parameter(value, requires_grad=parameter.requires_grad)
            )
            for other in base.modules():
                for key, tensor in other._parameters.items():
                    if tensor is parameter:
                        other._parameters[key] = value
    if not places:
        del base.__dict__["_posttrain_pending"]
    return model


# -- a sharded model into files ----------------------------------------------------------------------------------------


@torch.no_grad()
def write(model, directory: str | Path, largest: str | int | None = None, dtype: torch.dtype | None = None) -> bool:
    """Write a model, sharded or whole, its adapter merged in, as ``save_pretrained`` would, in files of at most
    ``largest`` (default: the library's): every rank holds one gathered tensor at a time, and must call. ``dtype``: what
    weights are rounded to (None: as they were computed).

    False, and nothing written, where the library would store the weights under other names or in another form.
    """
    from stages.models.adapters import plain_parameters

    base = plain(model)
    if getattr(base, "_weight_conversions", None):
        return False
    if sharding.root_of(model) is not None:
        sharding.root_of(model).reshard()
    shapes = {name: torch.empty(shape, dtype=kind, device="meta") for name, shape, kind in _contents(model, dtype)}
    shapes = {
        name: tensor
        for name, tensor in shapes.items()
        if not any(re.search(ignored, name) for ignored in getattr(base, "_keys_to_ignore_on_save", None) or ())
    }
    places = {}
    if ranks.rank() == 0:
        base.config.dtype, base.config.architectures = (
            str(_published(base, base.dtype, dtype)).removeprefix("torch."),
            [type(base).__name__],
        )
        base.config.save_pretrained(directory)
        if base.can_generate():
            base.generation_config.save_pretrained(directory)
        for file, names in layout(base, shapes, directory, largest).items():
            places |= {
                name: (Path(directory, file), at)
                for name, at in begin(Path(directory, file), {n: shapes[n] for n in names}).items()
            }
    for name, value in chain(plain_parameters(model), base.named_buffers()):
        if name in places:
            path, at = places[name]
            with open(path, "r+b") as handle:
                handle.seek(at)
                handle.write(tensor_files.raw(value.to(shapes[name].dtype)))
        del value  # before the next one is gathered
    return True


def _published(base, own: torch.dtype, dtype: torch.dtype | None) -> torch.dtype:
    """Type in which a weight of type ``own`` is written: ``dtype``, or the type it is computed in."""
    return dtype or (torch.float32 if "_posttrain_kept" in base.__dict__ else own)


def _contents(model, dtype: torch.dtype | None):
    """(name, shape, type) of everything that is stored of the plain model; nothing is gathered."""
    from stages.models.adapters import plain_names

    base = plain(model)
    yield from (
        (name, parameter.shape, _published(base, parameter.dtype, dtype)) for name, _, parameter in plain_names(model)
    )
    kept = base.state_dict()
    yield from ((name, value.shape, value.dtype) for name, value in base.named_buffers() if name in kept)


def layout(
    base, shapes: dict[str, torch.Tensor], directory: str | Path, largest: str | int | None = None
) -> dict[str, list[str]]:
    """Which file holds which tensors, as the library splits them; the index of several files is written beside them."""
    from huggingface_hub import split_torch_state_dict_into_shards

    def natural(name: str) -> list:  # layer 2 before layer 10
        return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in name.split(".")]

    shapes = {name: shapes[name] for name in sorted(shapes, key=natural)}
    largest = largest or inspect.signature(base.save_pretrained).parameters["max_shard_size"].default
    split = split_torch_state_dict_into_shards(
        shapes, filename_pattern="model{suffix}.safetensors", max_shard_size=largest
    )
    if split.is_sharded:
        index = {
            "metadata": {"total_parameters": sum(t.numel() for t in shapes.values()), **split.metadata},
            "weight_map": split.tensor_to_filename,
        }
        Path(directory, "model.safetensors.index.json").write_text(
            json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8"
        )
    return split.filename_to_tensors


def begin(path: Path, tensors: dict[str, torch.Tensor]) -> dict[str, int]:
    """A safetensors file of these shapes with room for the values; where in it each one starts. Wide types come first,
    then names in order.
    """
    start, places, length = tensor_files.header(
        dict(sorted(tensors.items(), key=lambda entry: (-entry[1].element_size(), entry[0]))), {"format": "pt"}
    )
    with open(path, "wb") as handle:
        handle.write(start)
        handle.truncate(length)
    return places
