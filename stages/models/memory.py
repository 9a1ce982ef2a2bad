"""How much memory a training stage needs, before it loads anything (catalogue ``ops.memory``).

    weights, gradients and Adam moments are known from shapes: what they alone need and the device has not is refused
        (:func:`check`)
    KV cache and logits are upper bounds: where they would not fit besides, that is a warning
    activations are tried, on the dearest micro-batch (``stages/preflight.py``)

A stage declares which models it holds (``StageSpec.roles``). Master weights are float32, so a trained parameter takes 4
bytes, its gradient 4 and AdamW's moments 8, 16 in all as in mixed precision (2 + 2 + 4 + 8); a frozen one takes 4, or 2
where it is a matrix that is kept in bfloat16, or about half a byte in 4 bits (``frozen_dtype``). Imports no torch:
``posttrain run --dry-run`` asks, too.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from stages.spec import ConfigError
from storage.files import read_json

TRAINED, FROZEN, KEPT = 16, 4, 2  # bytes per parameter; KEPT: frozen in bfloat16
# weights in 4 bits that share a scale, and scales that share one under double quantisation (stages.models.quantised)
NF4_BLOCK, NF4_DOUBLE_BLOCK = 64, 256
# optimizer=adamw_8bit: values of a matrix from which on its moments are kept so, and those that share a scale
FROM_8BIT, BLOCK_8BIT = 4096, 256
GIB = 2**30
SAMPLING = "policy that samples"
#: What the built-in engine holds while it samples: keys and values, and the weights as it multiplies with them
#: (stacked, an adapter merged in, in ``sampling_dtype``).
SAMPLED = "KV cache and sampling weights"
#: Elements of log-probabilities that the LM head keeps for backward at most, whatever the vocabulary.
HEAD_KEEP_ELEMENTS = 1 << 25
#: Bytes of logits that it keeps in the place of those on a GPU.
HEAD_KEEP_BYTES_ON_GPU = 1 << 30
#: Elements of logits that the LM head computes at a time on a GPU, and the bytes that each takes meanwhile: in two
#: types, log-probability, probability.
HEAD_CHUNK_ON_GPU, HEAD_CHUNK_BYTES = 1 << 27, 14
#: Of finished rows that turns may continue; a constant, since what is kept decides over the last bits of what is
#: computed.
KEPT_BYTES = 2 << 30
#: Tokens of a micro-batch where no setting says otherwise: by default, and on a GPU at most.
MICRO_BATCH, MICRO_BATCH_ON_GPU = 4096, 16384


@dataclass(frozen=True)
class Role:
    """One model that a stage holds.

    Args:
        source: input that it has the shape of.
        whole: all its weights are trained, whatever ``lora_rank`` says (a critic).
        before: only until training starts (a reference whose log-probs are then cached).
        sharded: split over the devices under ``sharding=full``.
        headless: without the output layer (critics and reward models read hidden states).
        moves: not trained, but written to while training goes on (a reference that follows the policy), so that it
            stays float32.
    """

    name: str
    source: str
    trained: bool = False
    whole: bool = False
    before: bool = False
    sharded: bool = False
    headless: bool = False
    moves: bool = False


@dataclass(frozen=True)
class Shape:
    """Parameters of a model directory; ``matrices``: {name: (rows, columns)} of its weight matrices; ``config``: its
    text config; ``low``: the matrices that are stored in bfloat16."""

    parameters: int
    matrices: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    config: Mapping = field(default_factory=dict)
    low: frozenset[str] = frozenset()

    def frozen_bytes(self, how: str) -> int:
        """Of the model as a frozen one, its matrices kept as ``frozen_dtype=how`` says; routers and experts, and
        Gemma's scaled embedding, are no plain layers and stay float32.
        """
        scaled = str(self.config.get("model_type", "")).startswith("gemma")
        total = FROZEN * self.parameters
        for name, (rows, columns) in self.matrices.items():
            if ".experts." in name or name.endswith(".gate.weight") or scaled and name.endswith("embed_tokens.weight"):
                continue
            if how.startswith("nf4") and not outside_layers(name):
                total -= FROZEN * rows * columns - nf4_bytes(rows * columns, how)
            elif how == "bfloat16" or how != "float32" and name in self.low:
                total -= (FROZEN - KEPT) * rows * columns
        return total

    def widest_layer(self) -> int:
        """Weights of the layer that has the most in matrices."""
        layers: dict[str, int] = {}
        for name, (rows, columns) in self.matrices.items():
            if (found := re.search(r"\.\d+\.", name)) and not outside_layers(name):
                layers[name[: found.end()]] = layers.get(name[: found.end()], 0) + rows * columns
        return max(layers.values(), default=0)


def nf4_bytes(count: int, how: str) -> int:
    """Of a matrix of so many weights in 4 bits: two weights a byte, and the scales of its blocks."""
    blocks = -(-count // NF4_BLOCK)
    return (count + 1) // 2 + (4 * blocks if how == "nf4" else blocks + 4 * -(-blocks // NF4_DOUBLE_BLOCK) + 4)


def shape_of(path: str | Path) -> Shape | None:
    """Read from the headers of the safetensors files alone; of other weights from their size. None where there are
    none.
    """
    folder, matrices, parameters, low = Path(path), {}, 0, set()
    config = read_json(folder / "config.json", {})
    files = [f for f in sorted(folder.rglob("*.safetensors")) if "adapter" not in f.relative_to(folder).parts]
    for file in files:
        with open(file, "rb") as handle:
            entries = json.loads(handle.read(int.from_bytes(handle.read(8), "little")))
        for name, entry in entries.items():
            if name != "__metadata__":
                count = 1
                for n in entry["shape"]:
                    count *= n
                parameters += count
                if len(entry["shape"]) == 2:
                    matrices[name] = tuple(entry["shape"])
                    low |= {name} if entry["dtype"] == "BF16" else set()
    if not files:
        size = {"float32": 4, "float64": 8}.get(config.get("torch_dtype") or config.get("dtype"), 2)
        parameters = sum(f.stat().st_size for f in folder.glob("pytorch_model*.bin")) // size
    return Shape(parameters, matrices, config.get("text_config") or config, frozenset(low)) if parameters else None


def lora_parameters(shape: Shape, config) -> int:
    """rank * (rows + columns) of every matrix that gets an adapter: all but embeddings and output layer, or those
    named; rows more with DoRA; and matrices trained whole.
    """
    listed = lambda text: text.replace(" ", "").split(",")
    named = None if config.lora_targets == "all-linear" else listed(config.lora_targets)
    total = 0
    for name, (rows, columns) in shape.matrices.items():
        layer = name.removesuffix(".weight").rsplit(".", 1)[-1]
        if layer in listed(config.lora_modules_to_save):
            total += rows * columns
        elif layer in listed(config.lora_exclude):
            continue
        elif layer in named if named else not outside_layers(name):
            total += config.lora_rank * (rows + columns) + rows * config.lora_dora
    return total


def trained_bytes(config, shape: Shape, role: Role, adapter: int | None) -> int:
    """Weights, gradients and optimizer state of what is trained of a model: all of it, or an adapter of so many
    parameters. A critic's optimizer is AdamW.
    """
    if not role.trained:
        return 0
    count = shape.parameters if adapter is None else adapter
    optimizer = "adamw" if role.whole else getattr(config, "optimizer", "adamw")
    if optimizer == "sgd":
        return (8 + (4 if config.momentum else 0)) * count
    if optimizer == "adafactor":
        in_matrices = sum(rows * columns for rows, columns in shape.matrices.values())
        return 8 * count + 4 * (sum(rows + columns for rows, columns in shape.matrices.values()) + count - in_matrices)
    if optimizer == "adamw_8bit":
        small = (
            [
                rows * columns
                for name, (rows, columns) in shape.matrices.items()
                if rows * columns >= FROM_8BIT and not is_embedding(name)
            ]
            if adapter is None
            else [adapter]
        )
        return state_bytes([count], []) - 6 * sum(small) + 8 * sum(-(-n // BLOCK_8BIT) for n in small)
    if optimizer == "muon":
        layers = (
            sum(rows * columns for name, (rows, columns) in shape.matrices.items() if not outside_layers(name))
            if adapter is None
            else adapter
        )
        return state_bytes([count], []) - 4 * layers
    return state_bytes([count], [])


def outside_layers(name: str) -> bool:
    """Whether a matrix is an embedding, an output layer or a head."""
    return is_embedding(name) or any(word in name for word in ("lm_head", "score."))


def is_embedding(name: str) -> bool:
    """Whether a matrix is an embedding."""
    return any(word in name for word in ("embed", "wte", "wpe"))


def frozen_dtype(config) -> str:
    """How frozen matrices are kept under these settings."""
    return getattr(config, "frozen_dtype", "auto")


def state_bytes(
    trained: Collection[int], frozen: Collection[int], bytes_trained: int = TRAINED, bytes_frozen: int = FROZEN
) -> int:
    """Weights, gradients and optimizer of models with these numbers of parameters."""
    return bytes_trained * sum(trained) + bytes_frozen * sum(frozen)


def kv_bytes(layers: int, kv_heads: int, head_dim: int, tokens: int, bytes_per_value: int) -> int:
    """Keys and values of ``tokens`` tokens, over all sequences."""
    return 2 * layers * kv_heads * head_dim * tokens * bytes_per_value


def kv_of(text: Mapping, tokens: int, bytes_per_value: int) -> int:
    """Of so many tokens of the model with this text config, which states its layers."""
    heads = text.get("num_key_value_heads") or text["num_attention_heads"]
    width = text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"]
    return kv_bytes(text["num_hidden_layers"], heads, width, tokens, bytes_per_value)


def logits_bytes(tokens: int, vocabulary: int, bytes_per_value: int = 4) -> int:
    """Logits of all tokens of a forward at once; here they are made in chunks (``HEAD_KEEP_ELEMENTS``)."""
    return tokens * vocabulary * bytes_per_value


def shown(size: int) -> str:
    """Bytes for a person."""
    return f"{size / GIB:.2f} GiB" if size >= GIB / 10 else f"{size / 2**20:.2f} MiB"


@dataclass
class Need:
    """What a stage needs on one device, bytes: ``rows`` per role, ``states`` certain, ``caches`` at most on top."""

    rows: list[dict]
    states: int
    caches: dict[str, int]
    missing: list[str]

    def told(self, device: int | None) -> str:
        more = " or ".join(f"{shown(size)} of {name}" for name, size in self.caches.items())
        held = ", ".join(f"{row['model']} {shown(row['bytes'])}" for row in self.rows)
        return (
            f"{shown(self.states)} for weights, gradients and optimizer ({held})"
            + (f" + at most {more}" if more else "")
            + ("" if device is None else f", of {shown(device)}")
        )


def copies_of(config) -> int:
    """Copies of the trained weights that a trainer keeps beside them: averages (of ``bema`` with its start and mean) and
    the best.
    """
    averaged = 3 if getattr(config, "bema", None) is not None else bool(getattr(config, "ema_decay", 0))
    return averaged + bool(getattr(config, "select_by", None))


def need(
    roles: Sequence[Role], shapes: Mapping[str, Shape | None], config, devices: int = 1, device: str = "cpu"
) -> Need:
    """What these roles need on each of ``devices`` devices of the kind ``device``; models whose shape is not known are
    named as missing.
    """
    rows, during, before = [], 0, 0
    lora, sharded = getattr(config, "lora_rank", 0), getattr(config, "sharding", "none") == "full" and devices > 1
    if (
        sharded
        and not any(r.name == SAMPLING for r in roles)
        and getattr(config, "engine", "") == "builtin"
        and hasattr(config, "num_generations")
    ):
        # what is sharded cannot be sampled from (stages.models.sharding.Acting)
        roles = [*roles, Role(SAMPLING, "model")]
    for role in roles:
        shape = shapes.get(role.source)
        if shape is None:
            continue
        if role.headless:
            shape = replace(
                shape,
                parameters=shape.parameters
                - sum(a * b for name, (a, b) in shape.matrices.items() if name == "lm_head.weight"),
                matrices={name: size for name, size in shape.matrices.items() if name != "lm_head.weight"},
            )
        share = devices if sharded and role.sharded else 1
        adapter = lora_parameters(shape, config) if lora and role.trained and not role.whole else None
        trained = 0 if not role.trained else shape.parameters if adapter is None else adapter
        changes = role.moves or role.whole or not lora and (role.trained or role.name == SAMPLING)
        held = FROZEN * shape.parameters if changes else shape.frozen_bytes(frozen_dtype(config))
        extra = 0 if role.whole or not role.trained else trained * 4 * copies_of(config)
        size = (
            trained_bytes(config, shape, role, adapter)
            + (held if not role.trained or adapter is not None else 0)
            + extra
        ) // share
        weights = held // share
        during += 0 if role.before else size
        before += weights if role.before or role.trained else 0
        rows.append(
            {
                "model": role.name,
                "parameters": shape.parameters,
                "trained": trained,
                "held": weights,
                "bytes": weights if role.before else size,
            }
            | ({"while": "before training"} if role.before else {})
        )
    return Need(
        rows,
        max(during, before),
        caches_of(config, shapes.get("model"), device),
        sorted({r.source for r in roles if shapes.get(r.source) is None}),
    )


def together(config) -> tuple[int, str]:
    """Tokens that go through a model at a time at most, of those that it is trained on, and the setting that bounds
    them: one answer is never split.
    """
    answer = getattr(config, "longest_completion", getattr(config, "max_completion_length", 0))
    return max(
        (config.micro_batch_tokens, "max_tokens_per_micro_batch"),
        (answer, "max_completion_length"),
        (getattr(config, "max_length", 0), "max_length"),
    )


def caches_of(config, shape: Shape | None, device: str = "cpu") -> dict[str, int]:
    """Logits of a chunk (on a GPU) and kept for backward, and what is held while sampling: the KV cache of what is
    sampled together, every sequence as long as it may be, and of what turns continue; the weights once more."""
    text = shape.config if shape is not None else {}
    logits = (
        min(logits_bytes(together(config)[0], text["vocab_size"]), 4 * HEAD_KEEP_ELEMENTS)
        if "vocab_size" in text
        else 0
    )
    head = (
        max(
            ((rows * columns) for name, (rows, columns) in shape.matrices.items() if rows == text.get("vocab_size")),
            default=0,
        )
        if shape is not None
        else 0
    )
    if (
        logits
        and config.compute_dtype == "float32"
        and getattr(config, "lora_rank", 0)
        and shape.frozen_bytes(config.frozen_dtype) < FROZEN * shape.parameters
    ):
        logits += 4 * head  # kept in bfloat16, and widened while logits are computed
    if logits and device != "cpu":
        every = together(config)[0] * text["vocab_size"]
        logits += min(4 * every, HEAD_KEEP_BYTES_ON_GPU) - min(4 * every, 4 * HEAD_KEEP_ELEMENTS)
        logits += HEAD_CHUNK_BYTES * min(every, HEAD_CHUNK_ON_GPU)
    found = {"logits": logits} if logits else {}
    if frozen_dtype(config).startswith("nf4") and shape is not None:
        found["a layer in float32"] = FROZEN * shape.widest_layer()
    if (
        not hasattr(config, "generation_batch")
        or getattr(config, "engine", "builtin") != "builtin"
        or "num_hidden_layers" not in text
    ):
        return found
    everyone = getattr(config, "prompts_per_step", config.generation_batch) * getattr(config, "num_generations", 1)
    rows = min(config.generation_batch, everyone)
    length = getattr(config, "max_prompt_length", 0) + getattr(
        config, "longest_completion", config.max_completion_length
    )
    if text.get("max_position_embeddings"):
        length = min(length, text["max_position_embeddings"])
    size = 2 if config.sampling_dtype == "bfloat16" else 4
    kv = lambda rows: kv_of(text, rows * length, size)
    return {
        SAMPLED: (
            kv(rows)
            + (min(KEPT_BYTES, kv(everyone)) if getattr(config, "environment", "") else 0)
            + size * shape.parameters
        ),
        "logits": logits,
    } | found


# ---------------------------------------------------------------------------------------------------------------- refusing


def engine_share(free: int, total: int, weights: int, states: int, caches: int, sleeps: bool) -> float:
    """Share of a GPU's memory that vLLM may take (``gpu_memory_utilization``) beside what trains there, 0.05 or more.

    Args:
        free, total: bytes of the GPU now, with the weights of what trains in it.
        weights, states, caches: of :class:`Need`, bytes; ``weights`` those of its ``states`` that are held already.
        sleeps: the engine gives its memory back while a step is computed, so that beside it there are only the
            optimizer's moments (8 of the 12 bytes that are missing).
    """
    missing = max(0, states - weights)
    # a tenth: for activations, which are known when they are tried
    left = free - (2 * missing // 3 + total // 50 if sleeps else missing + max(caches, total // 10))
    return max(0.05, left * 100 // total / 100)


def nvidia_smi() -> str | None:
    """Path of nvidia-smi, also where WSL2 keeps it outside PATH; None where there is none."""
    return shutil.which("nvidia-smi") or shutil.which("nvidia-smi", path="/usr/lib/wsl/lib")


def device_bytes(device: str, devices: int = 1) -> int | None:
    """Memory of one GPU (the smallest that is visible), or on a CPU this process's share of the machine's or
    container's; None where it cannot be known.
    """
    if device.startswith("cuda") or device == "auto":
        try:
            visible = os.environ.get("CUDA_VISIBLE_DEVICES")
            found = subprocess.run(
                [
                    nvidia_smi() or "nvidia-smi",
                    "--query-gpu=memory.total",
                    "--format=csv,noheader,nounits",
                    *([f"--id={visible}"] if visible else []),
                ],
                capture_output=True,
                text=True,
                timeout=20,
                check=True,
            ).stdout.split()
            return min(int(float(mib)) for mib in found) * 2**20
        except (OSError, ValueError, subprocess.SubprocessError):
            return None
    import psutil

    total = psutil.virtual_memory().total
    for name in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            total = min(total, int(Path(name).read_text()))
        except (OSError, ValueError):
            pass
    return total // devices


def limit_of(config, device: str, devices: int = 1) -> int | None:
    """Bytes that the plan must fit into: ``device_memory_gib`` where it is given, else what the device has."""
    given = getattr(config, "device_memory_gib", None)
    return int(given * GIB) if given else device_bytes(device, devices)


def activation_bytes(config, text: Mapping) -> int:
    """What backward needs of one token at most, bytes: of every layer the residual stream before attention and before
    the MLP in float32; and in the type of the products both norms, queries, keys, values, what attention gives, and
    the MLP's two products and their gated one; with ``activation_checkpointing`` one residual of every layer. Once
    more of one layer, whose gradients are computed. 0 where the shape of a layer is not known.
    """
    if not {"num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads"} <= text.keys():
        return 0
    hidden, width = text["hidden_size"], 2 if config.compute_dtype == "bfloat16" else 4
    heads = text["num_attention_heads"]
    head = text.get("head_dim") or hidden // heads
    keys = 2 * (text.get("num_key_value_heads") or heads) * head
    experts = text.get("num_experts_per_tok") or 1
    inner = experts * (text.get("moe_intermediate_size") or text["intermediate_size"])
    layer = 2 * 4 * hidden + width * (2 * hidden + 2 * heads * head + keys + 3 * inner)
    kept = 4 * hidden if config.activation_checkpointing else layer
    return text["num_hidden_layers"] * kept + layer


def micro_batch_for(
    roles: Sequence[Role],
    shapes: Mapping[str, Shape | None],
    config,
    limit: int | None,
    devices: int = 1,
    device: str = "cpu",
) -> int:
    """Tokens of a micro-batch where none are given: on a GPU, where what starts the kernels of a micro-batch takes as
    long for few tokens as for many, doubled up to ``MICRO_BATCH_ON_GPU`` as long as weights, optimizer, caches and
    activations take nine tenths of ``limit`` bytes at most. It follows from the settings, the model and the device
    alone, so that a run that goes on cuts its steps as before.
    """
    chosen = MICRO_BATCH
    if device == "cpu" or limit is None or any(shapes.get(role.source) is None for role in roles):
        return chosen
    per_token = [activation_bytes(config, shapes[role.source].config) for role in roles if role.trained]
    while all(per_token) and per_token and 2 * chosen <= MICRO_BATCH_ON_GPU:
        tried = config.model_copy(update={"max_tokens_per_micro_batch": 2 * chosen})
        found = need(roles, shapes, tried, devices, device)
        if found.states + sum(found.caches.values()) + 2 * chosen * max(per_token) > 0.9 * limit:
            break
        chosen *= 2
    return chosen


def _shapes_and_limit(stage, roles: Sequence[Role]) -> tuple[dict[str, Shape | None], int | None]:
    """Shapes of the models that a stage holds, and the bytes that these must fit into on each of its devices."""
    return (
        {role.source: shape_of(stage.inputs[role.source].path) for role in roles},
        limit_of(stage.config, stage.device, int(os.environ.get("LOCAL_WORLD_SIZE", stage.world_size))),
    )


def size_micro_batches(stage) -> None:
    """Give a stage that trains on a GPU the ``max_tokens_per_micro_batch`` of :func:`micro_batch_for`, that of the rank
    with the least memory, where it was left empty.
    """
    if (
        stage.spec.roles is None
        or not stage.device.startswith("cuda")
        or getattr(stage.config, "max_tokens_per_micro_batch", 0) is not None
    ):
        return
    from stages.running import ranks

    try:
        roles = stage.spec.roles(stage.config, set(stage.inputs))
    except ValueError:
        return  # as in :func:`check`
    shapes, limit = _shapes_and_limit(stage, roles)
    tokens = micro_batch_for(roles, shapes, stage.config, limit, stage.world_size, stage.device)
    if stage.world_size > 1:
        ranks.connect(stage.device)
        tokens = min(ranks.gather(tokens))
    stage.config = stage.config.model_copy(update={"max_tokens_per_micro_batch": tokens})
    stage.log(f"micro-batches of {tokens:,} tokens (max_tokens_per_micro_batch was left empty)")


def sampling_stays(stage) -> bool:
    """Whether what the built-in engine holds while it samples may be held while is trained, too: where all that is
    known takes three quarters of the memory at most. The rest is for activations.
    """
    roles = stage.spec.roles(stage.config, set(stage.inputs))
    shapes, limit = _shapes_and_limit(stage, roles)
    if limit is None:
        return True
    found = need(roles, shapes, stage.config, stage.world_size, stage.device)
    return 4 * (found.states + sum(found.caches.values())) <= 3 * limit


def lacks_room_to_sample(stage, rows: int, length: int) -> str | None:
    """Why a stage that does not sample while it trains cannot hold so many rows of ``length`` tokens in the built-in
    engine beside what it trains with (its copy of the weights, and the published model where that is read back, too);
    None where it can, or where shapes or memory are not known.
    """
    roles = stage.spec.roles(stage.config, set(stage.inputs))
    shapes, limit = _shapes_and_limit(stage, roles)
    shape = shapes.get("model")
    if limit is None or shape is None or "num_hidden_layers" not in shape.config:
        return None
    states = need(roles, shapes, stage.config, stage.world_size, stage.device).states
    copies = 1 if stage.config.save_dtype == "float32" else 2
    more = kv_of(shape.config, rows * length, 4) + copies * 4 * shape.parameters
    if states + more <= limit:
        return None
    return f"sampling takes {shown(more)} beside {shown(states)} of training, of {shown(limit)}"


def refusal(
    name: str, roles: Sequence[Role], shapes: Mapping[str, Shape | None], config, limit: int, devices: int = 1
) -> str | None:
    """Why a stage cannot run in ``limit`` bytes per device and what to write instead; None where weights, gradients and
    optimizer fit.
    """
    found = need(roles, shapes, config, devices)
    if found.states <= limit:
        return None
    fits = lambda held=roles, **changes: need(held, shapes, config.model_copy(update=changes), devices).states
    says = lambda size: f"needs {shown(size)}" + ("" if size <= limit else ", still too much")
    advice = []
    if not config.lora_rank and any(r.trained and not r.whole for r in roles):
        advice.append(f"lora_rank=16 ({says(fits(lora_rank=16))})")
    for how in ("bfloat16", "nf4"):
        possible = how != "nf4" or config.sharding == "none" and not config.lora_dora and config.forward != "compiled"
        if possible and frozen_dtype(config) != how and (smaller := fits(frozen_dtype=how)) < found.states:
            advice.append(f"frozen_dtype={how} ({says(smaller)})")
    if (
        not config.lora_rank
        and config.optimizer == "adamw"
        and config.sharding == "none"
        and any(r.trained and not r.whole for r in roles)
    ):
        advice.append(f"optimizer=adamw_8bit ({says(fits(optimizer='adamw_8bit'))})")
        advice.append(f"optimizer=adafactor ({says(fits(optimizer='adafactor'))})")
    for setting, off in (("ema_decay", 0.0), ("bema", None), ("select_by", None)):
        if getattr(config, setting, None):
            advice.append(f"{setting} left out ({says(fits(**{setting: off}))})")
    for role in roles:
        without = [r for r in roles if r is not role]
        if role.before:
            advice.append(
                "no input reference, where it is the starting policy: that stands for it until it is trained"
                f" ({says(fits(without))})"
            )
        elif role.name == "critic":
            advice.append(
                f"critic_mode=shared, or a preset without a critic such as grpo or rloo ({says(fits(without))})"
            )
        elif role.name == "reference":
            advice.append(
                "a plan without a resident reference:"
                f" {'beta=0 kl_coef=0' if hasattr(config, 'kl_coef') else 'reference_update=frozen, whose log-probabilities are cached'}"
                f" ({says(fits(without))})"
            )
        elif role.name in ("reward_model", "judge", "gold", "teacher"):
            advice.append(f"a smaller {role.name.replace('_', ' ')}")
    if any(r.sharded for r in roles):
        many = next(
            (
                n
                for n in range(2, 65)
                if need(roles, shapes, config.model_copy(update={"sharding": "full"}), n).states <= limit
            ),
            None,
        )
        if many and many != devices:
            advice.append(f"sharding=full with --devices {many}")
    return (
        f"{name} cannot fit on this device: it needs {found.told(limit)}. Write instead "
        + "; or ".join(advice or ["a smaller model"])
        + ". Another device's memory is device_memory_gib=GIB; memory_check=warn goes on anyway."
    )


def check(stage) -> None:
    """Refuse, before any weight is loaded, a stage whose models cannot fit on its device, and tell what it will need; a
    resumed run has fitted.

    Raises:
        ConfigError: says what to write instead (``memory_check=warn``: a warning).
    """
    if stage.spec.roles is None:
        return
    if frozen_dtype(stage.config).startswith("nf4") and importlib.util.find_spec("bitsandbytes") is None:
        raise ConfigError(
            f"{stage.name}: frozen_dtype={stage.config.frozen_dtype} needs bitsandbytes, which is not installed; run"
            " pip install 'posttrain[qlora]', or write frozen_dtype=bfloat16."
        )
    if stage.checkpoints.latest() is not None:
        return
    try:
        roles = stage.spec.roles(stage.config, set(stage.inputs))
    except ValueError:
        return  # settings that do not fit together: the stage itself says it better
    if frozen_dtype(stage.config) != "auto" and not any(
        not r.moves and not r.trained or r.trained and not r.whole and stage.config.lora_rank for r in roles
    ):
        raise ConfigError(
            f"{stage.name}: frozen_dtype={stage.config.frozen_dtype} would change nothing: nothing is frozen here;"
            " write lora_rank=16, or leave frozen_dtype out."
        )
    shapes, limit = _shapes_and_limit(stage, roles)
    found = need(roles, shapes, stage.config, stage.world_size, stage.device)
    stage.log("memory: " + found.told(limit))
    if limit is None:
        return
    reason = refusal(stage.name, roles, shapes, stage.config, limit, stage.world_size)
    if reason and stage.config.memory_check == "refuse":
        raise ConfigError(reason)
    if reason:
        stage.warn("memory", reason)
    elif found.states + (most := max(found.caches.values(), default=0)) > limit:
        what = together(stage.config)[1]
        if most == found.caches.get(SAMPLED):
            what = "generation_batch or max_completion_length" + (
                ", or sampling_dtype=bfloat16" if stage.config.sampling_dtype == "float32" else ""
            )
        stage.warn(
            "memory",
            f"{found.told(limit)}: at its most this does not fit. Write a smaller {what}; the preflight tries the"
            " dearest micro-batch.",
        )
