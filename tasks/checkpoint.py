"""Save the chosen checkpoint as a model directory and copy it to the volume."""

from pathlib import Path

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE

from config.recipes import Resolved
from config.settings import Settings
from finetuning.export import export_fingerprint, publish
from finetuning.launcher import run_step
from tasks.common import RETRIED
from tasks.model import ModelReference
from tasks.preflight import Inputs
from tasks.references import Reference
from tasks.training import Training


class ModelDirectory(Reference):
    """A complete model directory."""

    published: Path
    """Its copy in the volume."""


@task(cache_policy=NO_CACHE, **RETRIED)
def save_checkpoint(resolved: Resolved, inputs: Inputs, model: ModelReference, training: Training) -> ModelDirectory:
    """The model directory of a finished training, also copied to
    `{volume_root}/{catalog}/{schema}/{volume}/{model_name}/{fingerprint}`."""
    identity = export_fingerprint(training.fingerprint, training.checkpoint)
    output = Settings().storage_root / "model-directories" / identity
    job = {
        "checkpoint": str(training.checkpoint_path),
        "model": str(model.path),
        "output": str(output),
        "trust_remote_code": resolved.config.model.trust_remote_code,
        "provenance": _provenance(resolved, inputs, model, training),
    }
    run_step("export", job, get_run_logger())
    target = volume_path(resolved) / identity
    publish(output, target)
    get_run_logger().info("model directory: %s", target)
    return ModelDirectory(path=output, published=target)


def volume_path(resolved: Resolved) -> Path:
    names = resolved.config.registry
    return Settings().volumes / names.catalog / names.schema / names.volume / names.model_name


def _provenance(resolved: Resolved, inputs: Inputs, model: ModelReference, training: Training) -> dict:
    """What `finetune.json` in the model directory says."""
    return {
        "base_model": resolved.config.model.name,
        "base_model_version": inputs.model.version,
        "architecture": model.facts["architecture"],
        "num_parameters": model.facts["num_parameters"],
        "dataset": resolved.config.dataset.name,
        "dataset_version": inputs.dataset.version,
        "training": training.fingerprint,
        "checkpoint": training.checkpoint,
        "eval_loss": training.eval_loss,
        "mlflow_run_id": training.mlflow_run_id,
        "config": resolved.config.model_dump(),
        "origins": resolved.origins,
    }
