"""GPUs: those that a command can name, what they can do, and the one that this process sees."""

import os
import re
from contextlib import suppress
from typing import NamedTuple


class Gpu(NamedTuple):
    name: str
    total_bytes: int
    """What CUDA reports, which is less than the name says."""


GPUS = {
    name: Gpu(name, int(gib * 2**30))
    for name, gib in {
        "h100-80gb": 79.1,
        "h200-141gb": 139.7,
        "b200-192gb": 178.3,
        "a100-80gb": 79.1,
        "a100-40gb": 39.3,
        "l40s-48gb": 44.3,
        "l4-24gb": 22.0,
        "rtx4090-24gb": 23.5,
    }.items()
}
"""Capacity: the smallest "total capacity" in GiB of torch's out-of-memory messages in public issues, rounded down."""


PEAK_FLOPS = {
    "B200": 2250e12,
    "H200 NVL": 835e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "RTX 4090": 165e12,
}
"""Part of a GPU's name -> bf16 operations a second without sparsity, as NVIDIA's data sheets have them."""


def named_peak(name: str) -> float | None:
    """Of the GPU that calls itself so; None for one that is not known."""
    return next((flops for part, flops in PEAK_FLOPS.items() if re.search(rf"\b{part}\b", name)), None)


def visible_gpu() -> Gpu | None:
    """The smallest of the GPUs that CUDA_VISIBLE_DEVICES leaves to this process; None where there is none, or the
    driver does not say. Asks the driver, not torch: no CUDA context is made."""
    with suppress(ImportError):
        import pynvml

        with suppress(pynvml.NVMLError):
            pynvml.nvmlInit()
            try:
                gpus = [_described(pynvml, handle) for handle in _visible_handles(pynvml)]
            finally:
                pynvml.nvmlShutdown()
            return min(gpus, key=lambda gpu: gpu.total_bytes, default=None)
    return None


def _visible_handles(pynvml) -> list:
    """As CUDA reads the variable: indices or beginnings of UUIDs, and nothing from the first that is not there."""
    handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
    wanted = os.environ.get("CUDA_VISIBLE_DEVICES")
    if wanted is None:
        return handles
    uuids = {pynvml.nvmlDeviceGetUUID(handle): handle for handle in handles}
    names = {str(index): handle for index, handle in enumerate(handles)} | uuids
    visible = []
    for name in (part.strip() for part in wanted.split(",")):
        if name.startswith("MIG-"):
            visible.append(pynvml.nvmlDeviceGetHandleByUUID(name))
            continue
        full = name if name in names else next((uuid for uuid in uuids if name and uuid.startswith(name)), None)
        if full is None:
            break
        visible.append(names[full])
    return visible


def _described(pynvml, handle) -> Gpu:
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
    return Gpu(pynvml.nvmlDeviceGetName(handle), memory.total - memory.reserved)  # CUDA does not count what is reserved
