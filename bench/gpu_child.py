"""One row of `bench.gpu`, in a process of its own: `python -m bench.gpu_child ROW`. Its last line is the result.

Run by `bench.gpu`. A process of its own has the GPU's memory to itself, and an error in it is its own.
"""

import importlib
import json
import os
import platform
import sys
import traceback
from importlib import metadata
from typing import Any

from bench.gpu_rows import CHECKS, ROWS, Row, scale

RESULT = "RESULT "
FACTS = "facts"
PACKAGES = ("torch", "transformers", "trl", "torchao", "accelerate", "flash_attn", "triton")
ISOLATION_LAYERS = 4
ABSURD_BATCH = 16384
"""Conversations of 2048 tokens: their embeddings alone are 343 GB."""


def main() -> None:
    try:
        result = run(*sys.argv[1:])
    except Exception as error:
        traceback.print_exc()
        result = {"status": "FAILED", "note": " ".join(f"{type(error).__name__}: {error}".split())[:200]}
    print(RESULT + json.dumps(result), flush=True)


def run(name: str, fail: str = "") -> dict[str, Any]:
    if name == FACTS:
        return facts()
    row = ROWS[name]
    for package in row.needs:
        try:
            importlib.import_module(package)
        except ImportError as error:
            return {"status": "skipped", "note": f"{package} cannot be imported: {error}"}
    if fail:
        raise RuntimeError("asked to fail")
    if row not in CHECKS:
        from bench.gpu_training import train

        return train(row)
    return out_of_memory(row) if name == "out-of-memory" else isolated(row)


def facts() -> dict[str, Any]:
    import torch

    cuda = torch.cuda.is_available()
    properties = torch.cuda.get_device_properties(0) if cuda else None
    return {
        "device": "cuda" if cuda else "cpu",
        "gpu": properties.name if properties else None,
        "gpu_bytes": properties.total_memory if properties else None,
        "num_gpus": torch.cuda.device_count(),
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "allocator": os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF"),
        **{package: version_of(package) for package in PACKAGES},
    }


def version_of(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def out_of_memory(row: Row) -> dict[str, Any]:
    """Whether a real error of the GPU is told for what it is."""
    try:
        from finetuning.classify import classify
    except ImportError as error:
        return {"status": "skipped", "note": f"finetuning.classify cannot be imported: {error}"}
    import torch

    from bench.gpu_model import build, device

    config = scale(device()).config | {"num_hidden_layers": 1}
    model = build(config, torch.float32, row.attention)
    try:
        model(input_ids=torch.zeros(ABSURD_BATCH, row.max_length, dtype=torch.int64, device=device()))
    except Exception as error:
        kind = classify(error).kind
        told = f"{type(error).__name__} is told as {kind}"
        return {"status": "done" if kind == "out_of_memory" else "FAILED", "note": told}
    return {"status": "FAILED", "note": f"a micro-batch of {ABSURD_BATCH} went through"}


def isolated(row: Row) -> dict[str, Any]:
    """Of few layers with their real widths. FlashAttention has no fp32."""
    import torch

    from bench.gpu_model import build, device
    from bench.isolation import TOLERANCE, isolation

    size = scale(device())
    config = size.config | {"num_hidden_layers": min(ISOLATION_LAYERS, size.config["num_hidden_layers"])}
    found = {}
    for name in ["float32", "bfloat16"][row.attention == "flash_attention_2" :]:
        found[name] = isolation(build(config, getattr(torch, name), row.attention).train())
    note = ", ".join(f"{name}: {pair.packed:.1e}, control {pair.control:.1e}" for name, pair in found.items())
    holds = all(pair.holds(TOLERANCE[name]) for name, pair in found.items())
    return {"status": "done" if holds else "FAILED", "note": f"largest relative difference {note}"}


if __name__ == "__main__":
    main()
