"""Train: the SFT program, one training in one directory.

Program: `python -m finetuning.train JOB.json`, see `Job`. Layout of the training's directory:
    job.json log.txt result.json    what the launcher keeps of the child
    training.json                   fingerprint, MLflow run id and, once all planned steps are done, the result
    checkpoints/checkpoint-N/       the Trainer's own, each with a manifest that is written last
A training that was cut short goes on from its newest checkpoint that is whole, in the same MLflow run; a finished
one is not touched again.
"""

import logging
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from config.sections import Config
from finetuning import artifacts, child, tracking
from finetuning.data import read_dataset
from finetuning.errors import REMEDIES, Failure
from finetuning.model import load_chat_model

if TYPE_CHECKING:
    from trl import SFTConfig, SFTTrainer

TRAINING_VERSION = 1
"""Part of every training fingerprint: raise it when the same data, model and options give other weights."""

NOT_CONTENT = {"logging_steps", "save_total_limit", "dataloader_pin_memory"}
"""Training options that change no weight. Everything else is part of the training's fingerprint."""

STATE = "training.json"
logger = logging.getLogger(__name__)


class Job(BaseModel):
    config: Config
    fingerprint: str
    output: Path
    """The training's directory."""
    dataset: Path
    """Artifact of `finetuning.data`."""
    model: Path
    """Artifact of `finetuning.model`: tokenizer and generation config."""
    base: Path
    """Directory with the base model's weights."""
    run: tracking.RunFacts


def training_fingerprint(config: Config, dataset: str, model: str) -> str:
    """Identity of a training: all that determines its weights. `dataset` and `model` are fingerprints of artifacts."""
    options = config.training.model_dump(exclude=NOT_CONTENT)
    return artifacts.fingerprint(
        version=TRAINING_VERSION, dataset=dataset, model=model, dtype=config.model.dtype, training=options
    )


def finished(directory: Path) -> dict[str, Any] | None:
    """The result of the training in `directory`, or None when it is not finished or its checkpoint is gone."""
    try:
        result = artifacts.read_json(directory / STATE).get("result")
    except OSError:
        return None
    whole = result and artifacts.read_manifest(directory / "checkpoints" / result["checkpoint"])
    return result if whole else None


def run(values: dict[str, Any]) -> dict[str, Any]:
    """Train, or go on training, and return what the training came to."""
    job = Job.model_validate(values)
    with artifacts.lock(job.output):
        if result := finished(job.output):
            logger.info("this training is finished: its checkpoint %s is used", result["checkpoint"])
            return result
        checkpoint = newest_whole_checkpoint(job.output / "checkpoints")
        run_id = _mlflow_run(job, checkpoint)
        with tracking.ended_honestly(run_id):
            result = {"mlflow_run_id": run_id, **_train(job, run_id, checkpoint)}
        artifacts.write_json(job.output / STATE, {**artifacts.read_json(job.output / STATE), "result": result})
        return result


def newest_whole_checkpoint(directory: Path) -> Path | None:
    """The newest checkpoint whose files are what its manifest states; those that are not are moved aside and named."""
    from finetuning.callbacks import checkpoints

    for checkpoint in checkpoints(directory):
        unsealed = artifacts.read_manifest(checkpoint) is None
        damaged = ["its manifest, or a file it lists"] if unsealed else artifacts.damaged_files(checkpoint)
        if not damaged:
            return checkpoint
        aside = checkpoint.with_name(f"damaged-{checkpoint.name}-{time.time_ns()}")
        checkpoint.rename(aside)
        logger.warning("%s is not whole (%s): moved to %s", checkpoint.name, ", ".join(damaged), aside)
    return None


def _mlflow_run(job: Job, checkpoint: Path | None) -> str:
    """The id of the training's MLflow run: the one that the training's earlier attempt opened, or a new one."""
    state = job.output / STATE
    known = artifacts.read_json(state)["mlflow_run_id"] if state.is_file() else None
    run_id = known or tracking.start_run(job.run)
    artifacts.write_json(state, {"fingerprint": job.fingerprint, "mlflow_run_id": run_id})
    where = f"going on from {checkpoint.name}" if checkpoint else "from the start"
    logger.info("MLflow run %s %s, %s", job.run.run_name, run_id, where)
    return run_id


def _train(job: Job, run_id: str, checkpoint: Path | None) -> dict[str, Any]:
    from finetuning import callbacks

    os.environ |= {
        "MLFLOW_RUN_ID": run_id,
        "MLFLOW_EXPERIMENT_NAME": job.run.experiment_name,
        "MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING": "true",
        "MLFLOW_MAX_LOG_PARAMS": "0",  # the run has its params already; the Trainer's would be 200 more
    }
    stop = callbacks.Stop()  # from here on a SIGTERM is answered at the end of a step
    trainer = build_trainer(job)
    history = tracking.read_history(run_id)
    trainer.remove_callback(callbacks.PrinterCallback)
    trainer.remove_callback(callbacks.MLflowCallback)
    for callback in (
        callbacks.TokenCount(trainer),
        callbacks.Watch(len(trainer.processing_class)),
        callbacks.Metrics(history),
        stop,
        callbacks.Seal(job.config.training.save_total_limit),
        callbacks.Progress(),
    ):
        trainer.add_callback(callback)
    args = trainer.args
    rows = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
    sizes = len(trainer.train_dataset), len(trainer.eval_dataset)
    logger.info(
        "%d steps of %d conversations on %s (%d to train on, %d to evaluate on)",
        *(args.max_steps, rows, args.device, *sizes),
    )
    started = time.monotonic()
    outcome = trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    tracking.complete(run_id, trainer.state.log_history)
    return _result(job, trainer, outcome.training_loss, time.monotonic() - started)


def build_trainer(job: Job) -> "SFTTrainer":
    """Dataset, tokenizer, model, trainer: in the order of the data."""
    from transformers import set_seed
    from trl import SFTTrainer

    training = job.config.training
    set_seed(training.seed)
    train_dataset, eval_dataset = (read_dataset(job.dataset / f"{split}.jsonl") for split in ("train", "test"))
    section = job.config.model
    model, tokenizer = load_chat_model(
        job.base, job.model, dtype=section.dtype, trust_remote_code=section.trust_remote_code
    )
    trainer = SFTTrainer(
        model=model,
        args=sft_config(job.config, job.output / "checkpoints"),
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        processing_class=tokenizer,
    )
    if not len(trainer.train_dataset) or not len(trainer.eval_dataset):
        raise Failure(
            "data",
            f"training.max_length={training.max_length}: no conversation has a token to train on within that length. "
            "Raise it.",
        )
    # Rotation is ours (`callbacks.Seal`), and so is the choice of the best: export reads it from its checkpoint.
    trainer.args.save_total_limit, trainer.args.load_best_model_at_end = None, False
    return trainer


def sft_config(config: Config, output_dir: Path) -> "SFTConfig":
    """The section under its own names, and what the pipeline itself decides. The device follows the hardware."""
    import torch
    from trl import SFTConfig

    return SFTConfig(
        output_dir=str(output_dir),
        run_name=f"{config.model.name.split('/')[-1]}_full-fine-tuning",
        **config.training.model_dump(),
        eval_strategy="steps",
        save_strategy="steps",
        report_to="mlflow",
        use_cpu=not torch.cuda.is_available(),
        trust_remote_code=config.model.trust_remote_code,
        include_num_input_tokens_seen="non_padding",
        logging_nan_inf_filter=False,  # on, a dead run would log a loss of 0.0
        disable_tqdm=True,
    )


def _result(job: Job, trainer: "SFTTrainer", training_loss: float, seconds: float) -> dict[str, Any]:
    """What the training came to. Raises Failure when it did not reach its planned steps."""
    state = trainer.state
    if state.global_step < state.max_steps:
        message = f"training was stopped at step {state.global_step} of {state.max_steps}, where a checkpoint was saved"
        raise Failure("preempted", f"{message}. {REMEDIES['preempted']}")
    last = f"{trainer.args.output_dir}/checkpoint-{state.global_step}"
    best = state.best_model_checkpoint
    if job.config.training.load_best_model_at_end and best is None:
        metric = job.config.training.metric_for_best_model
        raise Failure("diverged", f"{metric} was never a number, so that no checkpoint is the best one.")
    chosen = best if job.config.training.load_best_model_at_end else last
    evaluations = [entry["eval_loss"] for entry in state.log_history if "eval_loss" in entry]
    return {
        "checkpoint": Path(chosen).name,
        "num_steps": state.global_step,
        "num_tokens": state.num_input_tokens_seen,
        "training_loss": training_loss,
        "eval_loss": min(evaluations, default=None),
        "train_seconds": round(seconds, 1),
        "log_history": state.log_history,
    }


if __name__ == "__main__":
    child.main(run)
