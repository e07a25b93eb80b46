"""Whether conversations that are packed into one sequence see each other, by the logits."""

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel


class Isolation(NamedTuple):
    """The largest relative difference of a position's logits from those of its conversation alone."""

    packed: float
    """With positions that start again at each conversation, as in training."""
    control: float
    """With positions that go on: there they must differ, or the comparison shows nothing."""

    def holds(self, tolerance: float) -> bool:
        return self.packed <= tolerance and self.control > 4 * tolerance


TOLERANCE = {"float32": 1e-3, "bfloat16": 5e-2}
"""By the dtype of the model: far above its rounding, far below a leak, which is near 1."""


def isolation(model: "PreTrainedModel", lengths: Sequence[int] = (40, 150, 7, 83)) -> Isolation:
    """Conversations of random tokens of these lengths, in one sequence against each alone."""
    import torch

    model.config.use_cache = False  # with a cache transformers does not look for restarting positions
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(model.config.vocab_size, (length,), generator=generator) for length in lengths]
    counts = [torch.arange(length) for length in lengths]
    with torch.no_grad():
        alone = torch.cat([_logits(model, *pair) for pair in zip(ids, counts, strict=True)])
        together = _logits(model, torch.cat(ids), torch.cat(counts), **boundaries(lengths, str(model.device)))
        leaking = _logits(model, torch.cat(ids), torch.arange(sum(lengths)))
    return Isolation(_difference(together, alone), _difference(leaking, alone))


def boundaries(lengths: Sequence[int], device: str) -> dict[str, Any]:
    """Where conversations begin, as TRL's collator gives it beside the positions; only FlashAttention looks at it."""
    import torch

    starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
    return {
        "cu_seq_lens_q": starts,
        "cu_seq_lens_k": starts,
        "max_length_q": max(lengths),
        "max_length_k": max(lengths),
    }


def _logits(model: "PreTrainedModel", ids: "Tensor", positions: "Tensor", **where: Any) -> "Tensor":
    inputs = {"input_ids": ids[None], "position_ids": positions[None]}
    return model(**{name: value.to(model.device) for name, value in inputs.items()}, **where).logits[0].float()


def _difference(logits: "Tensor", reference: "Tensor") -> float:
    return ((logits - reference).norm(dim=-1) / reference.norm(dim=-1)).max().item()
