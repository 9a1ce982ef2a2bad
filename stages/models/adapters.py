"""LoRA through peft: wrapping a model before training, the base model under it, and writing it out merged, the adapter
beside it.

Catalogue ``peft.lora`` (Hu et al. 2021): a frozen weight W is trained as W + (alpha / r) B A; B starts at 0, so the
first step's model is the base model, and switching the adapter off gives the reference policy back (``LORA-RL``).
"""

from __future__ import annotations

import contextlib
import json
import re
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch

from stages.models import dropout, pending, quantised, sharding
from stages.running import ranks
from stages.spec import ConfigError

ADAPTER_FOLDER = "adapter"


def is_adapted(model) -> bool:
    return hasattr(model, "peft_config")


def add_lora(model, config, seed: int, task: str = "CAUSAL_LM"):
    """The model ready to train: as it is with ``lora_rank=0``, else frozen with a fresh LoRA adapter.

    Args:
        config: an :class:`~stages.settings.OptimizerConfig`.
        seed: of A's initial values (Kaiming uniform); B is 0.
    """
    if not config.lora_rank:
        return model
    from peft import LoraConfig, get_peft_model

    targets = config.lora_targets if config.lora_targets == "all-linear" else names_in(config.lora_targets)
    settings = LoraConfig(
        r=config.lora_rank,
        lora_alpha=config.lora_alpha or 2 * config.lora_rank,
        lora_dropout=config.lora_dropout,
        bias="none",
        use_rslora=config.lora_rslora,
        use_dora=config.lora_dora,
        target_modules=targets,
        exclude_modules=names_in(config.lora_exclude) or None,
        modules_to_save=whole_modules(model, config) or None,
        task_type=task,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed % 2**63)
        try:
            adapted = get_peft_model(model, settings)
        except ValueError as error:
            from transformers.pytorch_utils import Conv1D

            from stages.models.modeling import ModelError

            if "ParamWrapper" in str(error):  # peft's adapter on a parameter of several experts
                less = "lora_dropout=0" if config.lora_dropout else "lora_dora=false"
                raise ModelError(
                    f"lora_targets={config.lora_targets!r} takes the experts of {type(model).__name__}, whose adapters"
                    f" have no {'dropout' if config.lora_dropout else 'DoRA'}; write"
                    f" lora_targets=q_proj,k_proj,v_proj,o_proj (or other layers outside of the experts), or {less}."
                    f" peft says: {error}"
                ) from error
            linear = sorted(
                {n.rsplit(".", 1)[-1] for n, m in model.named_modules() if isinstance(m, (torch.nn.Linear, Conv1D))}
                - {"base_layer", "default"}
            )
            raise ModelError(
                f"lora_targets={config.lora_targets!r} fits no layer of {type(model).__name__}; write all-linear or"
                f" some of: {', '.join(linear)}. peft says: {error}"
            ) from error
    output, embedding = adapted.get_output_embeddings(), adapted.get_input_embeddings()
    if (
        output is not None
        and (hasattr(output, "base_layer") or hasattr(embedding, "base_layer"))
        and output.weight is embedding.weight
    ):
        from stages.models.modeling import ModelError

        raise ModelError(
            f"lora_targets={config.lora_targets!r} names the"
            f" {'output layer' if hasattr(output, 'base_layer') else 'embedding'}, and {type(model).__name__} has one"
            " weight for the embedding and the output layer, so an adapter on one of them cannot be merged; leave it"
            " out, or write all-linear (which does)"
        )
    if config.lora_dropout:
        if output is not None and hasattr(output, "base_layer"):
            from stages.models.modeling import ModelError

            raise ModelError(
                f"lora_targets={config.lora_targets!r} names the output layer, whose adapter is added to its weight"
                " before the logits are computed, so that lora_dropout has no place; leave it out (all-linear does),"
                " or write lora_dropout=0"
            )
        dropout.put_into(adapted, config.lora_dropout, seed)
    return adapted


class Adapter:
    """A LoRA adapter as peft wrote it to a directory (``adapter_config.json``, ``adapter_model.safetensors``).

    Raises:
        ConfigError: another kind of adapter, or of model.
    """

    def __init__(self, folder: Path):
        import pickle

        from peft.utils.save_and_load import load_peft_weights
        from safetensors import SafetensorError

        self.folder = folder
        try:
            settings = json.loads((folder / "adapter_config.json").read_text())
            self.weights = load_peft_weights(str(folder), device="cpu")
        except (OSError, ValueError, SafetensorError, pickle.UnpicklingError) as error:
            raise ConfigError(
                f"{folder} holds no adapter that peft can read ({error}); give a directory with adapter_config.json and"
                " adapter_model.safetensors"
            ) from error
        kind, task = settings.get("peft_type"), settings.get("task_type") or "CAUSAL_LM"
        if kind != "LORA" or task not in ("CAUSAL_LM", "SEQ_CLS"):
            raise ConfigError(
                f"{folder} is an adapter with peft_type={kind} and task_type={task}; LORA for CAUSAL_LM and SEQ_CLS are"
                " read. Merge it with peft (merge_and_unload), and give the directory that its save_pretrained wrote"
            )
        self.scores = task == "SEQ_CLS"

    @property
    def outputs(self) -> int | None:
        """Outputs of a classifier's head where the adapter brings one; None where the base has it."""
        heads = [
            value.shape[0]
            for name, value in self.weights.items()
            if re.search(r"\.(score|classifier)(\.out_proj)?\.weight$", name)
        ]
        return heads[0] if heads else None

    @staticmethod
    def positions(model) -> int:
        """Positions that a model has at most; 64 where it does not say."""
        return getattr(model.config.get_text_config(), "max_position_embeddings", None) or 64

    def put_on(self, model):
        """The model under the adapter, not trained; its embedding has as many rows as the adapter's, where that brings
        one.

        Raises:
            ConfigError: weights of the adapter fit nothing in the model, or the other way round.
        """
        from peft import PeftModel
        from peft.utils.save_and_load import get_peft_model_state_dict

        embedding = model.get_input_embeddings()
        path = next(name for name, module in model.named_modules() if module is embedding)
        rows = self.weights.get(f"base_model.model.{path}.weight")
        if rows is not None and len(rows) != embedding.num_embeddings:
            model.resize_token_embeddings(len(rows), mean_resizing=False)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # what does not fit is told below
                model = PeftModel.from_pretrained(model, str(self.folder), torch_device="cpu")
        except (RuntimeError, ValueError) as error:
            raise ConfigError(
                f"the adapter {self.folder} does not fit {type(model).__name__} ({str(error).strip().splitlines()[-1].strip()});"
                " give the model that it was trained on as base"
            ) from error
        there = get_peft_model_state_dict(model, save_embedding_layers=False)
        own = {name for name, _ in model.get_base_model().named_parameters()}
        odd = sorted(set(there) - set(self.weights)) + sorted(
            name for name in set(self.weights) - set(there) if name.removeprefix("base_model.model.") not in own
        )
        if odd:
            raise ConfigError(
                f"the adapter {self.folder} is of another model than {type(model.get_base_model()).__name__}: {odd[0]}"
                f" ({len(odd)} tensors in all) is only in one of them; give the model that it was trained on as base"
            )
        return model


def names_in(text: str) -> list[str]:
    """The names of a comma-separated list."""
    return [name for name in text.replace(" ", "").split(",") if name]


def whole_modules(model, config) -> list[str]:
    """The names of ``lora_modules_to_save``, once such modules are there and hold their weights, of which peft makes
    the trained copies.

    Raises:
        ModelError: no module of that name, or one that shares its weight with another.
    """
    from stages.models.modeling import ModelError

    if not (wanted := names_in(config.lora_modules_to_save)):
        return []
    found = {
        name: [module for path, module in model.named_modules() if path.rsplit(".", 1)[-1] == name] for name in wanted
    }
    for name in wanted:
        if not found[name] or not any(True for module in found[name] for _ in module.parameters()):
            known = sorted(
                {
                    path.rsplit(".", 1)[-1]
                    for path, module in model.named_modules()
                    if next(module.parameters(recurse=False), None) is not None
                }
            )
            raise ModelError(
                f"lora_modules_to_save names {name!r}, and {type(model).__name__} has no such module with weights;"
                f" write some of: {', '.join(known)}"
            )
    pending.fill(model, [module for modules in found.values() for module in modules])
    output, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    chosen = {module for modules in found.values() for module in modules}
    if output is not None and output.weight is embedding.weight and chosen & {output, embedding}:
        raise ModelError(
            f"lora_modules_to_save={config.lora_modules_to_save!r}: {type(model).__name__} has one weight for the"
            " embedding and the output layer, which cannot be trained in one of them; leave them out, or train all"
            " weights (lora_rank=0)"
        )
    return wanted


def output_weight(output) -> torch.Tensor:
    """The LM head's weight ``[V, H]``, with the product of its LoRA adapter on top where it has one; differentiable in
    both factors.
    """
    if not hasattr(output, "lora_A"):
        return output.weight
    weight = output.base_layer.weight
    with torch.autocast(weight.device.type, enabled=False):
        return weight if output.disable_adapters else merged(output, weight)


def merged(layer, weight: torch.Tensor, read=lambda factor: factor) -> torch.Tensor:
    """The weight of a layer under its active adapters, W + (alpha / r) B A, as the layer stores it; differentiable in
    both factors. ``read`` is put between it and what the adapters hold. Of DoRA each row of that has the length that is
    trained, m; the length it is divided by has no gradient (Liu et al. 2024, section 4.3)."""
    turned = getattr(layer, "fan_in_fan_out", False)
    for adapter in layer.active_adapters:
        if adapter in layer.lora_A:
            delta = _update(layer, adapter, read)
        else:
            delta = (
                layer.scaling[adapter]
                * (read(layer.lora_embedding_B[adapter]) @ read(layer.lora_embedding_A[adapter])).t()
            )
        weight = weight + (delta.t() if turned else delta)
        if adapter in (getattr(layer, "lora_magnitude_vector", None) or {}):
            lengths = torch.linalg.norm(weight.detach(), dim=0 if turned else 1)
            factor = read(layer.lora_magnitude_vector[adapter].weight) / lengths
            weight = (factor if turned else factor[:, None]) * weight
    return weight


def _update(layer, adapter: str, read) -> torch.Tensor:
    """What an adapter adds to its layer's weight, (alpha / r) B A, of stacked experts (peft's ``ParamWrapper``) one by
    one; ``read`` is put between it and the factors.
    """
    a = read(layer.lora_A[adapter].weight)
    b = read(layer.lora_B[adapter].weight)
    experts = getattr(layer, "num_experts", 1)
    if experts == 1:
        return layer.scaling[adapter] * (b @ a)
    stacked = (
        torch.einsum("ore,eri->eoi", b.unflatten(1, (-1, experts)), a.unflatten(0, (experts, -1)))
        * layer.scaling[adapter]
    )
    return stacked if layer._did_swap_in_out_features else stacked.transpose(1, 2)


@contextlib.contextmanager
def switched_off(model):
    """The model without its adapter inside the block. Nothing else changes: peft's own switch also sets
    ``requires_grad``.
    """
    layers = [m for m in model.modules() if hasattr(m, "_disable_adapters")]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield model
    finally:
        for layer in layers:
            layer._disable_adapters = False


class AdapterOff:
    """The base model under a LoRA adapter: a frozen reference that holds no weights of its own. Valid where the adapter
    was fresh when training started and the reference is the model it was put on."""

    def __init__(self, model):
        self.model = model

    def __call__(self, *args, **options):
        with switched_off(self.model):
            return self.model(*args, **options)

    def __getattr__(self, name):
        return getattr(self.model, name)

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """The base model's own weights."""
        return (
            (name, p)
            for name, p in self.model.get_base_model().named_parameters()
            if ".lora_" not in name and ".modules_to_save." not in name
        )


@torch.no_grad()
def plain_parameters(model) -> Iterator[tuple[str, torch.Tensor]]:
    """(name in the plain model, value) of every weight, an adapter merged in and shards gathered, one after the other;
    every rank must ask where the model is sharded."""
    base = model.get_base_model() if is_adapted(model) else model
    for plain, name, parameter in plain_names(model):
        value, layer = quantised.dense(sharding.whole(parameter)), _adapted_layer(base, name)
        if layer is not None:
            value = merged(layer, value, sharding.whole)
        yield plain, value
        del value  # before the next one is gathered


@torch.no_grad()
def rounding(model, dtype: torch.dtype) -> float | None:
    """How far rounding the merged matrices to ``dtype`` moves them, as a share of how far their adapter moved them
    (norms over all of them); None without an adapter. Every rank must ask where the model is sharded."""
    if not is_adapted(model):
        return None
    base, lost, moved = model.get_base_model(), 0.0, 0.0
    for (_, value), (_, name, parameter) in zip(plain_parameters(model), plain_names(model)):
        if _adapted_layer(base, name) is not None:
            value = value.float()
            lost += float((value.to(dtype).float() - value).square().sum())
            moved += float((value - sharding.whole(parameter).float()).square().sum())
    return (lost / moved) ** 0.5 if moved else 0.0


def _adapted_layer(base, name: str):
    """The layer whose adapter changes this parameter; None where there is none. Adapters on several parameters of one
    module stand one inside the other.
    """
    path, _, kind = name.rpartition(".base_layer.")
    while path:
        layer = base.get_submodule(path)
        if getattr(layer, "parameter_name", "weight") == kind:
            return layer
        path = path.removesuffix(".base_layer") if path.endswith(".base_layer") else ""
    return None


def plain_names(model) -> Iterator[tuple[str, str, torch.nn.Parameter]]:
    """(name in the plain model, name under the adapter, parameter) of every weight that the plain model has, tied ones
    once.
    """
    base = model.get_base_model() if is_adapted(model) else model
    for name, parameter in base.named_parameters():
        if ".lora_" not in name and ".original_module." not in name:  # peft keeps the untrained copy of a reward head
            yield re.sub(r"(\.base_layer)+\.", ".", name).replace(".modules_to_save.default.", "."), name, parameter


@torch.no_grad()
def save_adapter(model, directory: str | Path, base: str | None = None) -> None:
    """Write the adapter under ``directory/adapter`` (peft's own format), if there is one. Rank 0 writes; every rank
    must call where it is sharded.

    ``base`` is noted in the adapter as the model it belongs to.
    """
    if not is_adapted(model):
        return
    state = {
        name: sharding.whole(p)
        for name, p in model.named_parameters()
        if ".lora_" in name or ".modules_to_save." in name
    }
    if ranks.rank() != 0:
        return
    for settings in model.peft_config.values():
        settings.base_model_name_or_path = base
    model.save_pretrained(
        Path(directory, ADAPTER_FOLDER), state_dict=state, safe_serialization=True, save_embedding_layers=False
    )
    Path(directory, ADAPTER_FOLDER, "README.md").unlink(missing_ok=True)
    file = Path(directory, ADAPTER_FOLDER, "adapter_config.json")  # peft writes its sets in any order
    written = {
        k: sorted(v) if isinstance(v, list) and all(isinstance(x, str) for x in v) else v
        for k, v in json.loads(file.read_text()).items()
    }
    file.write_text(json.dumps(written, sort_keys=True, indent=1) + "\n")
