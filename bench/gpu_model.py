"""The model of a training of `bench.gpu`, its loss and its optimizer, as the Trainer makes them."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from bench.gpu_rows import Row

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LEARNING_RATE, WEIGHT_DECAY = 2e-5, 0.01
HEAD_TOKENS = 1024
"""Tokens whose logits exist at a time where TRL is not there."""

Batch = dict[str, Any]
Loss = Callable[[Batch, int], Tensor]
"""Of a batch and the number of tokens that the sum is divided by."""


def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


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
