"""What the dtype of the weights does to a training: which updates it loses, and which weights have moved.

bfloat16 has 8 significant bits: a weight w has its next neighbour at w/256 to w/128, and an update below half of that
distance is rounded away. AdamW's updates are at most about the learning rate, so at a small one most are lost, step
after step (trl#5138). Imports transformers: for the training child only.
"""

import logging
from collections.abc import Iterator
from typing import Any

import torch
from transformers import TrainerCallback

from finetuning import processes

MOVED_AFTER = 10
"""Optimizer steps after the warm-up when the weights are compared with what they were."""
SAMPLED = 65_536
"""Elements of a tensor that are looked at, evenly spaced."""
FEW_MOVED = 0.1
logger = logging.getLogger(__name__)


def samples(model: torch.nn.Module) -> Iterator[tuple[int, torch.Tensor]]:
    """Each trained tensor's number of elements and a sample of them. Of a sharded one, this process's part."""
    for weight in model.parameters():
        if weight.requires_grad:
            local = weight.detach()
            local = (local.to_local() if hasattr(local, "to_local") else local).flatten()
            yield local.numel(), local[:: max(1, local.numel() // SAMPLED)]


def lost_share(model: torch.nn.Module, learning_rate: float) -> float:
    """Share of bfloat16 weights that an update of the size of the learning rate leaves as they are, up or down."""
    lost = total = 0.0
    for size, sample in samples(model):
        same = torch.ones_like(sample, dtype=torch.bool)
        for update in (learning_rate, -learning_rate):
            same &= (sample.float() + update).to(sample.dtype) == sample
        lost, total = lost + size * same.float().mean().item(), total + size
    return lost / max(total, 1.0)


def describe(model: torch.nn.Module, precision: str, optimizer: str, learning_rate: float) -> None:
    """Log the dtype of weights and optimizer, and with plain bfloat16 how much it loses."""
    dtypes = ", ".join(sorted({str(weight.dtype).removeprefix("torch.") for weight in model.parameters()}))
    if processes.rank():
        return
    logger.info("training.precision=%s: weights in %s, optimizer %s", precision, dtypes, optimizer)
    if precision == "bf16":
        logger.warning(
            "training.precision=bf16: at training.learning_rate=%g an update is lost in %.0f %% of the weights. "
            "fp32 and bf16_stochastic_rounding lose none on average; there a lower training.learning_rate is enough",
            *(learning_rate, 100 * lost_share(model, learning_rate)),
        )


class Moved(TrainerCallback):
    """Which share of the weights the first steps have moved: near 0, the training does nothing, whatever its loss."""

    def __init__(self) -> None:
        self.before: list[tuple[int, torch.Tensor]] = []
        self.until = 0
        self.share: float | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step == 0:
            self.before = [(size, sample.clone()) for size, sample in samples(model)]
            self.until = min(int(args.get_warmup_steps(state.max_steps)) + MOVED_AFTER, state.max_steps)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if not self.before or state.global_step < self.until:
            return
        pairs = [(size, was, now) for (size, was), (_, now) in zip(self.before, samples(model), strict=True)]
        moved = sum(size * (was != now).float().mean().item() for size, was, now in pairs)
        self.share, self.before = moved / max(sum(size for size, _, _ in pairs), 1), []
        level = logging.WARNING if self.share < FEW_MOVED else logging.INFO
        text = "%.1f %% of the weights have moved in %d steps (training.precision, training.learning_rate)"
        logger.log(level, text, 100 * self.share, state.global_step)

    def take(self) -> dict[str, float]:
        """The metric, once."""
        share, self.share = self.share, None
        return {} if share is None else {"moved_weights": round(share, 4)}
