"""Train on the GPU: one training, one directory, one MLflow run."""

from pathlib import Path
from typing import Any

from prefect import get_run_logger, runtime, task
from prefect.cache_policies import NO_CACHE
from pydantic import BaseModel, ConfigDict

from config.recipes import Resolved
from config.settings import Settings
from finetuning.artifacts import mark_used
from finetuning.launcher import run_step
from finetuning.limits import check_fits, check_gpu
from finetuning.resume import finished, training_fingerprint
from tasks.common import RETRIED, only_shown
from tasks.model import ModelReference
from tasks.progress import TrainingProgress
from tasks.references import Reference


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
    progress = TrainingProgress(config, directory)
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
        on_progress=progress,
        timeout_seconds=settings.training_timeout_seconds,
        num_processes=config.training.num_processes,
    )
    with only_shown():
        progress.finish(result["num_steps"])
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
