"""TRL's trainer, measured: what it logs says how fast it is and which weights move. For the training child only."""

import logging
from typing import Any

import torch
from accelerate.utils import AutocastKwargs
from transformers import TrainerCallback
from trl import SFTTrainer

from finetuning.precision import Moved
from finetuning.speed import Speed, num_tokens

logger = logging.getLogger(__name__)


class MeasuredTrainer(SFTTrainer):
    """An SFTTrainer whose log lines have speed and memory in them."""

    def __init__(self, *, speed: Speed, **options: Any):
        super().__init__(**options)
        self.speed, self.moved = speed, Moved()
        # Kept between micro-batches, the bfloat16 copies of fp32 weights would take 2 bytes a parameter.
        self.accelerator.autocast_handler = AutocastKwargs(cache_enabled=False)

    def measured_by(self) -> list[TrainerCallback]:
        """To be added after all others."""
        return [self.moved, self.speed]

    def training_step(self, model: Any, inputs: dict[str, Any], *rest: Any, **options: Any) -> torch.Tensor:
        self.speed.positions += inputs["input_ids"].numel() * self.args.world_size
        return super().training_step(model, inputs, *rest, **options)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if self.model.training and "loss" in logs:
            logs = {**logs, **self.speed.interval(self.state), **self.moved.take()}
        super().log(logs, start_time)

    def try_evaluation(self) -> None:
        """Evaluate the longest rows once, so that memory they do not fit into is missed now and not after hours."""
        rows = self.eval_dataset.with_format("arrow")["input_ids"]
        lengths = [len(row) for row in rows]
        longest = sorted(range(len(lengths)), key=lengths.__getitem__)[-self.args.per_device_eval_batch_size :]
        batch = self.data_collator([self.eval_dataset[index] for index in longest])
        self.model.eval()
        with self.accelerator.autocast():
            self.prediction_step(self.model, batch, prediction_loss_only=True)
        self._metrics["eval"].clear()

    def announce(self) -> None:
        """Say what the steps are made of, and how much of the work evaluation will be."""
        args, train, test = self.args, self.train_dataset, self.eval_dataset
        rows = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
        what = "packed sequences" if args.packing else "conversations"
        logger.info(
            "%d steps of %d %s on %s (%d to train on, %d to evaluate on)",
            *(args.max_steps, rows, what, args.device, len(train), len(test)),
        )
        evaluations = args.max_steps // int(args.eval_steps)
        passes = 4 if args.gradient_checkpointing else 3  # forward, twice of it backward, and once more to recompute
        evaluated = evaluations * num_tokens(test)
        trained = passes * args.max_steps * rows * num_tokens(train) / len(train)
        share = evaluated / (evaluated + trained)
        logger.info("%d evaluations, about %.0f %% of the work (training.eval_max_rows)", evaluations, 100 * share)
