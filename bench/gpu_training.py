"""One training of `bench.gpu`, in a process of its own: the loop of the Trainer written out, with random weights."""

import math
import time
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch

from bench.gpu_model import Batch, Loss, build, device, loss_of, optimizer_of, prepare, weight_dtype
from bench.gpu_rows import Row, Scale, model_flops, scale, sequences
from bench.isolation import boundaries

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MAX_GRAD_NORM = 1.0


def train(row: Row) -> dict[str, Any]:
    """Warm up, measure, and return what it came to. Bytes are None on a CPU."""
    size = scale(device())
    model = build(size.config, weight_dtype(row), row.attention)
    prepare(model, row)
    loss, head = loss_of(model)
    optimizer = optimizer_of(row, model)
    lengths = sequences(row, (size.warm_up + size.steps) * row.accumulation, size.shrink)
    steps = [
        [batch_of(group, row, size) for group in lengths[start : start + row.accumulation]]
        for start in range(0, len(lengths), row.accumulation)
    ]
    losses, seconds, memory = measured(steps, size.warm_up, loss, optimizer, model)
    flat = [length for group in lengths[size.warm_up * row.accumulation :] for length in group]
    parameters = sum(tensor.numel() for tensor in model.parameters())
    return {
        "head": head,
        "parameters": parameters,
        "tokens": sum(flat),
        "flops": model_flops(size.config, parameters, flat),
        "step_seconds": seconds,
        "losses": losses,
        **memory,
        "evaluation_tokens_per_second": evaluated(steps[-1], loss, model) if row.evaluates else None,
    }


def batch_of(lengths: list[int], row: Row, size: Scale) -> Batch:
    """A sequence of random tokens on the device, all trained but the first of each conversation; as TRL's collator."""
    ids = torch.randint(size.config["vocab_size"], (1, sum(lengths)), device=device())
    if not row.packing:
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    positions = torch.cat([torch.arange(length, device=device()) for length in lengths])[None]
    labels = ids.masked_fill(positions == 0, -100)
    return {"input_ids": ids, "position_ids": positions, "labels": labels, **boundaries(lengths, device())}


def autocast() -> AbstractContextManager:
    return torch.autocast(device(), dtype=torch.bfloat16, cache_enabled=False)


def measured(
    steps: list[list[Batch]], warm_up: int, loss: Loss, optimizer: torch.optim.Optimizer, model: "PreTrainedModel"
) -> tuple[list[float], list[float], dict[str, int | None]]:
    """Loss of every step; seconds of each step after the warm-up, and the memory that those took."""
    losses, seconds = [], []
    for number, batches in enumerate(steps):
        if number == warm_up and device() == "cuda":
            torch.cuda.reset_peak_memory_stats()
        started = time.perf_counter()
        losses.append(one_step(batches, loss, optimizer, model))  # a number, so the GPU has finished
        seconds.append(time.perf_counter() - started)
    if not all(map(math.isfinite, losses)):
        raise RuntimeError(f"the loss is no number: {losses}")
    return losses, seconds[warm_up:], memory()


def one_step(batches: list[Batch], loss: Loss, optimizer: torch.optim.Optimizer, model: "PreTrainedModel") -> float:
    count = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)
    total = torch.zeros((), device=device())
    for batch in batches:
        with autocast():
            part = loss(batch, count)
        part.backward()
        total += part.detach()
    torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if device() == "cuda":
        torch.cuda.synchronize()
    return total.item()


def memory() -> dict[str, int | None]:
    """Bytes: the peak of tensors, the peak of torch's allocator, and what the GPU holds besides, of anyone."""
    if device() == "cpu":
        return dict.fromkeys(("peak", "reserved", "outside"))
    free, total = torch.cuda.mem_get_info()
    return {
        "peak": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.max_memory_reserved(),
        "outside": total - free - torch.cuda.memory_reserved(),
    }


def evaluated(batches: list[Batch], loss: Loss, model: "PreTrainedModel") -> float:
    """Tokens a second of the forward pass and the loss, a conversation at a time."""
    model.eval()
    with torch.no_grad(), autocast():
        loss(batches[0], 1).item()
        started = time.perf_counter()
        for batch in batches:
            loss(batch, 1).item()
    return sum(batch["labels"].numel() for batch in batches) / (time.perf_counter() - started)
