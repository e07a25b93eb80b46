"""Train: the SFT program, one training in one directory.

Program: `python -m finetuning.train JOB.json`, see `Job`. Layout of the training's directory:
    job.json log.txt result.json    what the launcher keeps of the child
    training.json                   what `finetuning.resume` says of it
    loss.png                        of a training that takes longer than a minute
    checkpoints/checkpoint-N/       the Trainer's own, each with a manifest that is written last
A training that was cut short goes on from its newest checkpoint that is whole, in the same MLflow run; a finished
one is not touched again. Several processes train together under `finetuning.group`; the first one keeps the books.
"""

import logging
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from pydantic import BaseModel

from config.sections import Config
from finetuning import artifacts, child, processes, resume, tracking
from finetuning.classify import classify, out_of_disk
from finetuning.errors import REMEDIES, Failure
from finetuning.limits import disk_bytes
from finetuning.memory.architecture import NotUnderstood, read_config
from finetuning.memory.gpus import Gpu, visible_gpu
from finetuning.memory.plan import settled_checkpointing

CURVE = "loss.png"
logger = logging.getLogger(__name__)


class Job(BaseModel):
    config: Config
    fingerprint: str
    output: Path
    """The training's directory."""
    tokens: Path
    """Artifact of `finetuning.tokens`."""
    model: Path
    """Artifact of `finetuning.model`: tokenizer and generation config."""
    base: Path
    """Directory with the base model's weights."""
    run: tracking.RunFacts


def run(values: dict[str, Any]) -> dict[str, Any]:
    """Train, or go on training, and return what the training came to."""
    job = settled(Job.model_validate(values))
    processes.join(job.config.training.num_processes)
    if processes.rank():
        return _train_along(job)
    with artifacts.lock(job.output):
        if result := resume.finished(job.output):
            logger.info("this training is finished: its checkpoint %s is used", result["checkpoint"])
            processes.share(None)
        else:
            processes.check_devices(job.config.training.num_processes)
            close_abandoned(job.output.parent)
            result = _attempt(job)
        return {**result, "mlflow_run_id": _settled(job, result)}


def settled(job: Job) -> Job:
    """With activation checkpointing decided: `auto` is on unless the memory plan says that it fits without."""
    training = job.config.training
    if training.activation_checkpointing != "auto":
        return job
    memory = visible_gpu() or Gpu("host memory", psutil.virtual_memory().available)
    try:
        on = settled_checkpointing(read_config(job.base), job.config.model, training, memory)
    except NotUnderstood as unknown:
        on, why = True, f"no memory plan: {unknown}"
    else:
        why = f"{'nothing else' if on else 'it'} fits into {memory.total_bytes / 1e9:.1f} GB of {memory.name}"
    logger.info("activation checkpointing %s: %s", "on" if on else "off", why)
    training = training.model_copy(update={"activation_checkpointing": on})
    return job.model_copy(update={"config": job.config.model_copy(update={"training": training})})


def _train_along(job: Job) -> dict[str, Any]:
    """A process that is not the first: from the checkpoint that the first one names, or nothing to do."""
    if plan := processes.share(None)[0]:
        try:
            _train(job, None, *plan)
        except Exception as error:
            raise _full(job, classify(error)) from error
    return {}


def close_abandoned(trainings: Path) -> None:
    """A killed process cannot mark its MLflow run: do it for those that died."""
    for directory in resume.abandoned(trainings):
        logger.info("training %s was killed and has not been resumed", directory.name)
        if run_id := resume.read_state(directory)["mlflow_run_id"]:
            tracking.end(run_id, "KILLED", only_running=True)
        resume.update_state(directory, status="KILLED")


def _attempt(job: Job) -> dict[str, Any]:
    """From the newest whole checkpoint, or from the start, to the last planned step. Raises Failure."""
    checkpoint = resume.newest_whole_checkpoint(job.output / "checkpoints")
    run_id = _mlflow_run(job)
    where = f"going on from {checkpoint.name}" if checkpoint else "from the start"
    logger.info("MLflow run %s %s, %s", job.run.run_name, run_id, where)
    try:
        with tracking.ended_honestly(run_id), processes.as_one(job.output):
            processes.share((checkpoint,))
            result = {**_train(job, run_id, checkpoint), **_result(job)}
    except Exception as error:
        failure = _full(job, classify(error))
        with suppress(OSError):  # no room for it: the next training to start finds this one abandoned
            resume.update_state(job.output, status="KILLED" if failure.kind == "preempted" else "FAILED")
        raise failure from error
    resume.update_state(job.output, status="FINISHED", result=result)
    return result


def _mlflow_run(job: Job) -> str | None:
    """The id of the training's MLflow run, an earlier attempt's if there was one.

    None when the server cannot be reached and FINETUNE_TRACKING_REQUIRED is off. Raises Failure when it is on.
    """
    state = resume.update_state(job.output, fingerprint=job.fingerprint, status="RUNNING", settled=False)
    job.run.training_id, run_id = state["training_id"], state["mlflow_run_id"]
    if not run_id or tracking.is_deleted(run_id):
        run_id = tracking.open_or_postpone(job.run)
    _note(job, run_id)
    return run_id


def _note(job: Job, run_id: str | None) -> None:
    """Keep which MLflow run it is, and tell the flow, which shows a link."""
    state = resume.read_state(job.output)
    experiment_id = state.get("mlflow_experiment_id") if run_id == state["mlflow_run_id"] else None
    if run_id and not experiment_id:
        experiment_id = tracking.experiment_of(run_id)
    resume.update_state(job.output, mlflow_run_id=run_id, mlflow_experiment_id=experiment_id)
    child.report_progress(mlflow_run_id=run_id)


def _settled(job: Job, result: dict[str, Any]) -> str | None:
    """See that the MLflow run is complete and FINISHED, now or, if the server is away, when this is asked for again."""
    state = resume.read_state(job.output)
    if not state["settled"]:
        job.run.training_id = state["training_id"]
        if run_id := tracking.settle(job.run, state["mlflow_run_id"], result["log_history"]):
            _note(job, run_id)
            state = resume.update_state(job.output, settled=True)
    return state["mlflow_run_id"]


def _full(job: Job, failure: Failure) -> Failure:
    """A disk that is full: make room by what it cut short, and say which disk and how much it takes."""
    if failure.kind != "out_of_disk":
        return failure
    if not processes.rank():
        resume.remove_unsealed(job.output / "checkpoints")
    if failure.__cause__ is None:  # in the words of another process
        return failure
    model = artifacts.read_manifest(job.model) or {}
    needed = disk_bytes(job.config, model["num_parameters"]) if model else None
    return out_of_disk(job.output, needed, failure)


def _train(job: Job, run_id: str | None, checkpoint: Path | None) -> dict[str, Any]:
    """Do the steps that are missing. Returns how long they took, and where that time went."""
    if checkpoint and resume.step_of(checkpoint) >= job.config.training.max_steps:
        return {"train_seconds": 0.0}  # killed between its last step and its result; the Trainer would do one more
    from finetuning import callbacks
    from finetuning.trainer import build_trainer

    stop = callbacks.Stop()  # from here on a SIGTERM is answered at the end of a step
    trainer = build_trainer(job)
    trainer.remove_callback(callbacks.PrinterCallback)
    trainer.remove_callback(callbacks.MLflowCallback)
    if job.config.training.num_processes == 1:  # else the weights are not where they will be before the training
        trainer.try_evaluation()
    if run_id:
        os.environ |= {
            "MLFLOW_RUN_ID": run_id,
            "MLFLOW_EXPERIMENT_NAME": job.run.experiment_name,
            "MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING": "true",
            "MLFLOW_MAX_LOG_PARAMS": "0",  # the run has its params already; the Trainer's would be 200 more
        }
        trainer.add_callback(callbacks.Metrics(tracking.read_history(run_id)))
    for callback in (
        callbacks.TokenCount(trainer),
        callbacks.Watch(len(trainer.processing_class)),
        stop,
        callbacks.Seal(job.config.training.save_total_limit),
        *([] if processes.rank() else [callbacks.Progress(), callbacks.Curve(job.output / CURVE)]),
        *trainer.measured_by(),
    ):
        trainer.add_callback(callback)
    trainer.announce()
    started = time.monotonic()
    trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    step, steps = trainer.state.global_step, trainer.state.max_steps
    if step < steps:
        message = f"training was stopped at step {step} of {steps}, where a checkpoint was saved"
        raise Failure("preempted", f"{message}. {REMEDIES['preempted']}")
    return {"train_seconds": round(time.monotonic() - started, 1), **trainer.speed.summary()}


def _result(job: Job) -> dict[str, Any]:
    """What the training came to, as its last checkpoint has it. Raises Failure when no checkpoint is the best."""
    training, directory = job.config.training, job.output / "checkpoints"
    last = directory / f"checkpoint-{training.max_steps}"
    state = artifacts.read_json(last / "trainer_state.json")
    best = state["best_model_checkpoint"]
    if training.load_best_model_at_end and best is None:
        message = f"{training.metric_for_best_model} was never a number, so that no checkpoint is the best one."
        raise Failure("diverged", message)
    gpu = visible_gpu()
    evaluations = [entry["eval_loss"] for entry in state["log_history"] if "eval_loss" in entry]
    return {
        "checkpoint": Path(best).name if training.load_best_model_at_end else last.name,
        "num_steps": state["global_step"],
        "num_tokens": state["num_input_tokens_seen"],
        "total_flos": state["total_flos"],
        "num_gpus": processes.num_gpus(),
        "gpu": gpu and gpu.name,
        "eval_loss": min(evaluations, default=None),
        "log_history": state["log_history"],
    }


if __name__ == "__main__":
    child.main(run)
