"""Bytes that grow with the tokens: what autograd keeps of a forward pass."""

from typing import TYPE_CHECKING

from finetuning.memory.architecture import Architecture
from finetuning.memory.states import Widths

if TYPE_CHECKING:
    from config.sections import TrainingSection


def is_masked(arch: Architecture, training: "TrainingSection", attention: str) -> bool:
    """Whether sdpa gets a mask: conversations of different lengths in a batch, several in one sequence, or a window.

    Without one it takes keys and values as they are (transformers/integrations/sdpa_attention.py); with one they are
    repeated for every query head, and the mask is kept for each layer in the dtype of the product. `eager` always has
    one, `flash_attention_2` never (it takes the lengths instead).
    """
    if attention != "sdpa":
        return attention == "eager"
    windowed = arch.window is not None and training.max_length > arch.window
    return training.per_device_train_batch_size > 1 or training.packing or windowed


def layer_activations(arch: Architecture, width: Widths, length: int, attention: str, masked: bool) -> int:
    """Bytes a token that autograd keeps of one decoder layer without checkpointing, tensor by tensor.

    Left out: the copies of weights under autocast, which do not depend on the tokens (`autocast_copies`).
    """
    hidden, compute = arch.hidden, width.compute
    norm = 4 * hidden + (4 if arch.family.fp32_norm else width.weight) * hidden + 4  # fp32 input, normalised, rsqrt
    inputs = (3 + 2 if width.autocast else 1 + 1) * hidden * compute  # of q, k, v and of gate, up: a cast for each
    heads = (arch.query_width, arch.heads), (arch.kv_width, arch.kv_heads)
    qk_norm = sum((4 + compute) * size + 4 * num for size, num in heads) if arch.family.qk_norm else 0
    repeated = attention == "eager" or (masked and arch.kv_heads < arch.heads)
    keys_values = 2 * (arch.query_width if repeated else arch.kv_width) * compute
    queries_and_output = 2 * arch.query_width * compute
    scores = _scores(arch, width, length, attention, masked)
    feed_forward = 4 * arch.intermediate * compute  # gate, its activation, up, their product
    return 2 * norm + inputs + qk_norm + queries_and_output + keys_values + scores + feed_forward


def _scores(arch: Architecture, width: Widths, length: int, attention: str, masked: bool) -> int:
    if attention == "eager":  # softmax in fp32, then in the dtype of the product
        return arch.heads * length * (4 if width.compute == 4 else 4 + width.compute)
    return 4 * arch.heads + (length * width.compute if masked else 0)  # the log-sum-exp, and the mask


def position_activations(arch: Architecture, width: Widths, batch: int) -> int:
    """Bytes a token of ids, and of cosine and sine, which a batch shares."""
    return 8 + 2 * arch.head_dim * width.weight // batch


def outer_activations(arch: Architecture, width: Widths, batch: int) -> int:
    """Bytes a token that are kept outside of the layers: positions and the final norm."""
    norm = (4 + (4 if arch.family.fp32_norm else width.weight)) * arch.hidden + 4
    return norm + position_activations(arch, width, batch)


def autocast_copies(arch: Architecture, width: Widths) -> int:
    """Bytes of one layer's matrices in the dtype of the products; 0 when they are in it already."""
    return width.compute * sum(arch.layer_matrices()) if width.autocast else 0
