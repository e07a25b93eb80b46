"""Bytes that do not depend on the tokens: of an element, of the optimizer's state and of its step."""

import math
from typing import TYPE_CHECKING, NamedTuple

from finetuning.memory.architecture import Architecture, NotUnderstood

if TYPE_CHECKING:
    from config.sections import TrainingSection

BYTES = {"bfloat16": 2, "float32": 4}
OPTIMIZER_STATES = 2
"""AdamW keeps two moments a parameter."""
IN_WEIGHT_DTYPE = ("adamw_torch", "adamw_torch_fused")
TORCHAO = ("adamw_torch_8bit",)
BITSANDBYTES = ("adamw_bnb_8bit", "adamw_8bit", "paged_adamw_8bit")
SMALLEST_QUANTIZED = 4096
"""Elements below which torchao and bitsandbytes leave an optimizer state as it is (`_new_buffer`, `min_8bit_size`)."""
QUANTIZATION_BLOCK = 256
"""Elements that share one fp32 scale in both (`block_size`, `blocksize`)."""
QUANTIZATION_MAP = 4 * 256
"""Bytes of the table that torchao keeps with each quantized state: 256 fp32."""


class Widths(NamedTuple):
    """Bytes of an element."""

    weight: int
    compute: int
    """Inputs and outputs of matrix products."""

    @property
    def autocast(self) -> bool:
        """Whether products take copies of weights and inputs in another dtype."""
        return self.weight != self.compute


def widths(training: "TrainingSection") -> Widths:
    """Sharded weights in bfloat16 stay so: `finetuning.processes` turns autocast off for them, with which accelerate
    would make them fp32 (`fsdp2_prepare_model`)."""
    weight = BYTES[training.weight_dtype]
    return Widths(weight, BYTES["bfloat16"] if training.bf16 else weight)


def optimizer_bytes(arch: Architecture, training: "TrainingSection", weight: int) -> int:
    """AdamW's two moments of every parameter. Raises NotUnderstood for an optimizer of another kind.

    torch's: in the dtype of the weights, and an fp32 step count for each tensor. torchao's: a byte and its share of a
    scale, where the tensor is large and whole blocks. bitsandbytes': the same, but fp32 for small tensors and for
    embeddings, which transformers excepts (`create_optimizer`); a tied head is that embedding.
    """
    optim, optim_args = training.optimizer
    if optim in IN_WEIGHT_DTYPE:
        return sum(OPTIMIZER_STATES * weight * size + 4 for size in arch.tensors())
    if optim in TORCHAO:
        block = _block_size(optim_args)
        return sum(OPTIMIZER_STATES * _torchao_state(size, weight, block) + 4 for size in arch.tensors())
    if optim in BITSANDBYTES:
        is_quantized = (index > 0 and size >= SMALLEST_QUANTIZED for index, size in enumerate(arch.tensors()))
        return sum(
            OPTIMIZER_STATES * (size + 4 * math.ceil(size / QUANTIZATION_BLOCK) if quantized else 4 * size)
            for size, quantized in zip(arch.tensors(), is_quantized, strict=True)
        )
    raise NotUnderstood(f"training.optim={optim!r}: how much it keeps a parameter is not understood.")


def _torchao_state(size: int, weight: int, block: int) -> int:
    if size >= SMALLEST_QUANTIZED and size % block == 0:
        return size + 4 * (size // block) + QUANTIZATION_MAP
    return weight * size


def _block_size(optim_args: str | None) -> int:
    arguments = dict(pair.strip().split("=", 1) for pair in (optim_args or "").split(",") if "=" in pair)
    try:
        return max(1, int(arguments.get("block_size", QUANTIZATION_BLOCK)))
    except ValueError:
        raise NotUnderstood(f"training.optim_args={optim_args!r}: block_size is not a number.") from None


def step_bytes(arch: Architecture, training: "TrainingSection", weight: int) -> int:
    """What the optimizer's step takes for itself. `adamw_torch` works on lists of tensors ("uses ~ sizeof(params) more
    peak memory", torch.optim.AdamW); torchao's compiled step holds both moments of one tensor in fp32 and their new
    scales; the others work in place."""
    optim, optim_args = training.optimizer
    if optim == "adamw_torch":
        return arch.parameters * weight
    if optim in TORCHAO:
        return OPTIMIZER_STATES * 4 * (arch.embedding + arch.embedding // _block_size(optim_args))
    return 0


def state_bytes_on_disk(training: "TrainingSection", num_parameters: int) -> int:
    """About what a checkpoint's optimizer state takes, from the count of parameters alone. An 8-bit state is taken for
    quantized in all of its tensors; one that is not known for AdamW's, which is the largest in use."""
    if training.optimizer[0] in (*TORCHAO, *BITSANDBYTES):
        return OPTIMIZER_STATES * (num_parameters + 4 * num_parameters // QUANTIZATION_BLOCK)
    return OPTIMIZER_STATES * BYTES[training.weight_dtype] * num_parameters
