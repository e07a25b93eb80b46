"""Whether conversations that are packed into one sequence see each other, by the logits."""

from typing import TYPE_CHECKING, NamedTuple

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


def isolation(model: "PreTrainedModel", lengths: tuple[int, ...] = (40, 150, 7, 83)) -> Isolation:
    """Conversations of random tokens of these lengths, in one sequence against each alone."""
    import torch

    model.config.use_cache = False  # with a cache transformers does not look for restarting positions
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(model.config.vocab_size, (length,), generator=generator) for length in lengths]
    counts = [torch.arange(length) for length in lengths]
    with torch.no_grad():
        alone = torch.cat([_logits(model, *pair) for pair in zip(ids, counts, strict=True)])
        together = _logits(model, torch.cat(ids), torch.cat(counts))
        leaking = _logits(model, torch.cat(ids), torch.arange(sum(lengths)))
    return Isolation(_difference(together, alone), _difference(leaking, alone))


def _logits(model: "PreTrainedModel", ids: "Tensor", positions: "Tensor") -> "Tensor":
    inputs = {"input_ids": ids[None], "position_ids": positions[None]}
    return model(**{name: value.to(model.device) for name, value in inputs.items()}).logits[0].float()


def _difference(logits: "Tensor", reference: "Tensor") -> float:
    return ((logits - reference).norm(dim=-1) / reference.norm(dim=-1)).max().item()
