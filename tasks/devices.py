"""The devices of this machine: how many a stage is to run on, and the slots that it takes for them."""

from __future__ import annotations

import functools
import os
import subprocess
from itertools import takewhile
from pathlib import Path
from typing import Any, Callable

from stages.models.memory import nvidia_smi
from stages.spec import ConfigError, StageConfig, StageSpec
from storage import leases
from tasks.stopping import raise_if_stopped


def cuda_devices() -> list[str]:
    """Ids of the CUDA devices this process may use (without importing torch). Of ``CUDA_VISIBLE_DEVICES`` CUDA reads
    numbers, ``GPU-`` and ``MIG-`` ids up to the first entry that is none, such as -1 or Slurm's NoDevFiles (CUDA C++
    Programming Guide, environment variables).
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        named = [d.strip() for d in visible.split(",")]
        return [*takewhile(lambda d: d.isdigit() or d.startswith(("GPU-", "MIG-")), named)]
    found = list(Path("/proc/driver/nvidia/gpus").glob("*")) if Path("/proc/driver/nvidia/gpus").is_dir() else []
    found = found or [d for d in Path("/dev").glob("nvidia*") if d.name[6:].isdigit()]
    return [str(i) for i in range(len(found) or _cards_told())]


@functools.cache  # asking takes a tenth of a second, and GPUs do not come and go
def _cards_told() -> int:
    """GPUs that ``nvidia-smi -L`` names; 0 where there is no such program. WSL2 has no device file for them."""
    program = nvidia_smi()
    if program is None:
        return 0
    try:
        told = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return 0
    return sum(line.startswith("GPU ") for line in told.splitlines())


def wanted_devices() -> int:
    """Devices of a stage that can share its work: ``POSTTRAIN_DEVICES``, else 1."""
    given = os.environ.get("POSTTRAIN_DEVICES") or "1"
    if not given.isdigit() or int(given) < 1:
        raise ConfigError(
            f"POSTTRAIN_DEVICES={given!r}: write the number of devices a training stage is to use, 1 or more"
        )
    return int(given)


def gpu_slots() -> int:
    """GPU stages that may run at once here: ``POSTTRAIN_GPU_SLOTS``, else one per GPU (0 without any: not limited)."""
    configured = os.environ.get("POSTTRAIN_GPU_SLOTS")
    if configured is not None and not (configured.isdigit() and int(configured) > 0):
        raise ConfigError(
            f"POSTTRAIN_GPU_SLOTS={configured!r}: write the number of GPU stages that may run at once, 1 or more"
        )
    return int(configured) if configured else len(cuda_devices())


def devices_of(spec: StageSpec, devices: int | None) -> int:
    """How many devices a stage is to run on: the argument, else what is wanted of stages that can share their work."""
    if devices is None:
        devices = wanted_devices() if spec.parallel else 1
    if devices > 1 and not spec.parallel:
        raise ConfigError(f"devices={devices}: stage {spec.name} runs on one device; write devices=1")
    return devices


def engine_cards(config: StageConfig) -> int:
    """GPUs that a stage's one process takes: those that vLLM is to split its model over, else 1 (training then uses the
    first of them).
    """
    options = getattr(config, "engine_options", None) or {}
    count = 1
    for name in ("tensor_parallel_size", "pipeline_parallel_size") if getattr(config, "engine", "") == "vllm" else ():
        count *= options[name] if isinstance(options.get(name), int) else 1
    return max(1, count)


def take_devices(
    spec: StageSpec,
    devices: int,
    wait: bool,
    tell: Callable[[dict[str, Any]], None],
    engine: int = 1,
    group: str = "gpu",
) -> tuple[list[leases.Lease], str, dict[str, str]]:
    """(slots, device, environment) of a stage process. CPU stages take no slot and see no GPU. engine:
    :func:`engine_cards`.
    """
    cards = cuda_devices()
    if not spec.gpu:
        return [], "cpu", {"CUDA_VISIBLE_DEVICES": ""}
    total = gpu_slots()
    most, taken = min(total, len(cards)), max(devices, engine)
    if cards and taken > most:
        if engine > devices:
            raise ConfigError(
                f"engine_options: vLLM is to split its model over {engine} GPUs, and this machine offers {len(cards)}"
                f" GPU(s) and {total} slot(s); write {{tensor_parallel_size: {most}}}"
            )
        raise ConfigError(
            f"devices={devices}: this machine offers {len(cards)} GPU(s) and {total} slot(s); write devices={most}"
        )
    threads = {}
    if not cards and devices > 1:  # ranks on the CPU share its cores, and one slot
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or str(max(1, cores // devices))}
    if not total:
        return [], "cpu", threads
    slots = leases.acquire_slots(
        group,
        total,
        taken if cards else 1,
        apart=len(cards) or None,
        wait=wait,
        on_wait=lambda text: tell({"event": "waiting", "text": text}),
        on_poll=raise_if_stopped,
    )
    if not cards:
        return slots, "cpu", threads
    chosen = [cards[slot.index % len(cards)] for slot in slots]
    tell({"event": "log", "text": f"GPU slot {', '.join(str(s.index) for s in slots)} (device {', '.join(chosen)})"})
    # auto: whether torch can use them is known in the stage's process
    return slots, "auto", {"CUDA_VISIBLE_DEVICES": ",".join(chosen)}
