"""TRL's trainer, measured: what it logs says how fast it is and which weights move. For the training child only."""

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import AutocastKwargs
from transformers import TrainerCallback, set_seed
from trl import SFTConfig, SFTTrainer

from config.sections import Config
from finetuning import processes
from finetuning.model import load_chat_model
from finetuning.precision import Moved, describe
from finetuning.speed import Speed, flops_a_token, num_tokens
from finetuning.tokens import read_tokens

if TYPE_CHECKING:
    from finetuning.train import Job

OURS = {"assistant_only_loss", "precision", "optim", "optim_args", "eval_max_rows", "max_length", "num_processes"}
"""Options of `TrainingSection` that are not handed to `SFTConfig` as they are: the tokens have them, or the model."""

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
        recomputed = args.activation_checkpointing or (args.fsdp_config or {}).get("activation_checkpointing")
        passes = 4 if recomputed else 3  # forward, twice of it backward, and once more to recompute
        evaluated = evaluations * num_tokens(test)
        trained = passes * args.max_steps * rows * num_tokens(train) / len(train)
        share = evaluated / (evaluated + trained)
        logger.info("%d evaluations, about %.0f %% of the work (training.eval_max_rows)", evaluations, 100 * share)


def build_trainer(job: "Job") -> MeasuredTrainer:
    """Dataset, tokenizer, model, trainer: in the order of the data. The labels are in the dataset already."""
    training = job.config.training
    set_seed(training.seed)
    train_dataset, eval_dataset = (read_tokens(job.tokens / f"{split}.arrow") for split in ("train", "test"))
    section = job.config.model
    model, tokenizer = load_chat_model(
        job.base,
        job.model,
        dtype=training.weight_dtype,
        trust_remote_code=section.trust_remote_code,
        attn_implementation=section.attn_implementation,
    )
    describe(model, training.precision, training.optimizer[0], training.learning_rate)
    trainer = MeasuredTrainer(
        speed=Speed(flops_a_token(model.config, model.num_parameters(), train_dataset)),
        model=model,
        args=sft_config(job.config, job.output / "checkpoints"),
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        processing_class=tokenizer,
    )
    # Rotation is ours (`callbacks.Seal`), and so is the choice of the best: export reads it from its checkpoint.
    trainer.args.save_total_limit, trainer.args.load_best_model_at_end = None, False
    return trainer


def sft_config(config: Config, output_dir: Path) -> SFTConfig:
    """The section under its own names, and what the pipeline itself decides. The device follows the hardware."""
    optim, optim_args = config.training.optimizer
    padded = not (config.training.packing or config.training.padding_free)
    return SFTConfig(
        output_dir=str(output_dir),
        run_name=f"{config.model.name.split('/')[-1]}_full-fine-tuning",
        **processes.options(config.training, config.training.model_dump(exclude=OURS)),
        optim=optim,
        optim_args=optim_args,
        dataset_kwargs={"skip_prepare_dataset": True},
        eval_strategy="steps",
        save_strategy="steps",
        report_to="mlflow",
        use_cpu=not torch.cuda.is_available(),
        trust_remote_code=config.model.trust_remote_code,
        # TRL wants to cut by itself otherwise; the tokens are cut already.
        max_length=None if config.training.padding_free else config.training.max_length,
        # Without padding there is none to leave out, and where pad is eos the ends of turns would not be counted.
        include_num_input_tokens_seen="non_padding" if padded else "all",
        prediction_loss_only=True,  # else the logits of the whole evaluation are kept
        logging_nan_inf_filter=False,  # on, a dead run would log a loss of 0.0
        disable_tqdm=True,
    )
