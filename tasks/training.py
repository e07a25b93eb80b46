"""Train on the GPU: one training, one directory, one MLflow run."""

import time
from pathlib import Path
from typing import Any

from prefect import get_run_logger, runtime, task
from prefect.artifacts import create_progress_artifact, update_progress_artifact
from prefect.cache_policies import NO_CACHE
from pydantic import BaseModel, ConfigDict

from config.recipes import Resolved
from config.sections import Config
from config.settings import Settings
from finetuning.artifacts import mark_used
from finetuning.launcher import Progress, run_step
from finetuning.limits import check_fits, check_gpu
from finetuning.resume import finished, training_fingerprint
from tasks.common import RETRIED, artifact_key
from tasks.model import ModelReference
from tasks.references import Reference

UPDATE_SECONDS = 2.0
"""Least time between two updates of the progress artifact; one costs the server about 14 ms."""


class Training(BaseModel):
    """A finished training."""

    model_config = ConfigDict(frozen=True)

    directory: Path
    fingerprint: str
    checkpoint: str
    """Name of the chosen checkpoint's folder."""
    mlflow_run_id: str | None
    """None when the tracking server was away from before the training until after it."""
    eval_loss: float | None
    num_steps: int
    num_tokens: int = 0
    total_flos: float = 0
    """Floating-point operations, as the Trainer estimates them."""
    num_gpus: int = 0
    train_seconds: float
    """Of the try that came to the end."""
    time_shares: dict[str, float] = {}
    """Phase -> share of those seconds."""
    peak_memory_gib: float | None = None

    @property
    def checkpoint_path(self) -> Path:
        return self.directory / "checkpoints" / self.checkpoint


@task(cache_policy=NO_CACHE, persist_result=False, **RETRIED)
def train(resolved: Resolved, dataset: Reference, model: ModelReference, tokens: Reference) -> Training:
    """Train, go on with a training that was cut short, or find it finished. Raises Failure."""
    config, settings = resolved.config, Settings()
    identity = training_fingerprint(config, tokens.fingerprint, model.fingerprint)
    directory = settings.storage_root / "trainings" / identity
    check_fits(config, model.facts, directory)
    if not finished(directory):
        check_gpu(config, model.base, get_run_logger())
    mark_used(directory)
    job = {
        "config": config.model_dump(),
        "fingerprint": identity,
        "output": str(directory),
        "tokens": str(tokens.path),
        "dataset": str(dataset.path),  # for `finetuning.store`: evaluation reads it after the training
        "model": str(model.path),
        "base": str(model.base),
        "run": {**_run_facts(resolved, dataset, identity, settings), "report_path": str(tokens.path)},
    }
    result = run_step(
        "train",
        job,
        get_run_logger(),
        directory=directory,
        on_progress=_progress_artifact(config),
        timeout_seconds=settings.training_timeout_seconds,
        num_processes=config.training.num_processes,
    )
    return Training(directory=directory, fingerprint=identity, **result)


def _run_facts(resolved: Resolved, dataset: Reference, identity: str, settings: Settings) -> dict[str, Any]:
    config = resolved.config
    return {
        "experiment_name": settings.mlflow_experiment_name,
        "artifact_location": settings.artifact_location,
        "run_name": f"{Path(config.model.name).name}_full-fine-tuning",
        "config": config.model_dump(),
        "origins": resolved.origins,
        "tags": {"finetune.fingerprint": identity, "prefect.flow_run_id": str(runtime.flow_run.id)},
        "dataset_name": config.dataset.name,
        "dataset_digest": dataset.fingerprint,
        "dataset_path": str(dataset.path),
    }


def _progress_artifact(config: Config) -> Progress:
    """Show progress in the Prefect UI, at a bounded rate; the last event of a training is always shown."""
    key = artifact_key("training", config.registry.model_name)
    artifact = create_progress_artifact(0.0, key=key, description="Waiting for the first step")
    shown = 0.0

    def show(event: dict[str, Any]) -> None:
        nonlocal shown
        last = event["step"] == event["max_steps"]
        if time.monotonic() - shown < UPDATE_SECONDS and not last:
            return
        shown = time.monotonic()
        loss = f"loss {event['loss']:.4g}, " if event["loss"] is not None else ""
        update_progress_artifact(
            artifact,
            100 * event["step"] / event["max_steps"],
            description=f"Step {event['step']} of {event['max_steps']}, {loss}{event['tokens_per_second']:,} tokens/s, "
            f"{event['eta_seconds']} s to go",
        )

    return show
