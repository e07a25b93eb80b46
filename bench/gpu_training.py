"""One training of `bench.gpu`, in a process of its own: the loop of the Trainer written out, with random weights."""

import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from bench.gpu_rows import Row, Scale, model_flops, scale, sequences

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LEARNING_RATE, WEIGHT_DECAY, MAX_GRAD_NORM = 2e-5, 0.01, 1.0
HEAD_TOKENS = 1024
"""Tokens whose logits exist at a time where TRL is not there."""

Batch = dict[str, Tensor]
Loss = Callable[[Batch, int], Tensor]
"""Of a batch and the number of tokens that the sum is divided by."""


def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


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


def weight_dtype(row: Row) -> torch.dtype:
    return torch.float32 if row.precision == "fp32" else torch.bfloat16


def build(config: dict[str, Any], dtype: torch.dtype, attention: str) -> "PreTrainedModel":
    """Of random weights, made where they are needed: 16 GB of them would take minutes on the host."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    values = {name: value for name, value in config.items() if name not in ("architectures", "model_type")}
    with torch.device(device()):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(config["model_type"], **values), dtype=dtype, attn_implementation=attention
        )
    model.config.use_cache = False
    weight = model.get_input_embeddings().weight
    if (weight.device.type, weight.dtype) != (device(), dtype):
        raise RuntimeError(f"the weights are {weight.dtype} on {weight.device}, not {dtype} on {device()}")
    if config["tie_word_embeddings"] and model.get_output_embeddings().weight is not weight:
        raise RuntimeError("the head is not tied to the embedding")
    return model


def prepare(model: "PreTrainedModel", row: Row) -> None:
    model.train()
    if row.checkpointing and hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    elif row.checkpointing:  # its name until transformers 5.24
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if row.compiled:  # layer by layer: they share one graph, and lengths differ
        for layer in model.base_model.layers:
            layer.compile(dynamic=True)


def autocast() -> AbstractContextManager:
    return torch.autocast(device(), dtype=torch.bfloat16, cache_enabled=False)


def loss_of(model: "PreTrainedModel") -> tuple[Loss, str]:
    """TRL's head, as `SFTTrainer` adds it, or the same sum in plain torch."""
    try:
        from trl.trainer.utils import add_fused_lm_head
    except ImportError:
        return lambda batch, count: plain_loss(model, batch, count), "plain head"
    add_fused_lm_head(model, outputs=("log_probs", "entropy", "is_top1"))
    return lambda batch, count: model(**batch, fused_lm_head=True, num_items_in_batch=count).loss, "TRL's head"


def plain_loss(model: "PreTrainedModel", batch: Batch, count: int) -> Tensor:
    """Logits of a part are made again in the backward pass, so that those of all tokens never exist."""
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    hidden = model.base_model(**inputs, use_cache=False).last_hidden_state[0, :-1]
    labels, weight = batch["labels"][0, 1:], model.get_output_embeddings().weight
    parts = zip(hidden.split(HEAD_TOKENS), labels.split(HEAD_TOKENS), strict=True)
    return sum(checkpoint(_part_loss, part, weight, wanted, use_reentrant=False) for part, wanted in parts) / count


def _part_loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(functional.linear(hidden, weight).float(), labels, reduction="sum")


def optimizer_of(row: Row, model: "PreTrainedModel") -> torch.optim.Optimizer:
    how = {"lr": LEARNING_RATE, "weight_decay": WEIGHT_DECAY}
    if row.optimizer == "adamw_torch_8bit":
        from torchao.optim import AdamW8bit

        rounds = row.precision == "bf16_stochastic_rounding"
        return AdamW8bit(model.parameters(), **how, bf16_stochastic_round=rounds)
    # None, not False: only then torch works on lists of tensors, as it does for the Trainer's `adamw_torch`.
    return torch.optim.AdamW(model.parameters(), **how, fused=row.optimizer == "adamw_torch_fused" or None)


def batch_of(lengths: list[int], row: Row, size: Scale) -> Batch:
    """One sequence of random tokens, all trained but the first of each conversation. On the device."""
    ids = torch.randint(size.config["vocab_size"], (1, sum(lengths)), device=device())
    if not row.packing:
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    positions = torch.cat([torch.arange(length, device=device()) for length in lengths])[None]
    return {"input_ids": ids, "position_ids": positions, "labels": ids.masked_fill(positions == 0, -100)}


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
