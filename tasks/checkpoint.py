"""Save the chosen checkpoint as a model directory, and publish that."""

from pathlib import Path
from typing import Any

from prefect import get_run_logger, runtime, task
from prefect.cache_policies import NO_CACHE
from prefect.settings import PREFECT_UI_URL

from config.recipes import Resolved
from config.settings import Settings
from finetuning.evaluate import Evaluation
from finetuning.export import export_fingerprint
from finetuning.launcher import run_step
from finetuning.lineage import libraries
from tasks.common import RETRIED
from tasks.model import ModelReference
from tasks.preflight import Inputs
from tasks.references import Reference
from tasks.training import Training


@task(cache_policy=NO_CACHE, **RETRIED)
def save_checkpoint(resolved: Resolved, inputs: Inputs, model: ModelReference, training: Training) -> Reference:
    """The model directory of a finished training."""
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
    return Reference(path=output)


@task(cache_policy=NO_CACHE, **RETRIED)
def publish(resolved: Resolved, model_directory: Reference, evaluation: Evaluation) -> Path:
    """Give the model directory its card and copy it to
    `{volume_root}/{catalog}/{schema}/{volume}/{model_name}/{fingerprint}`."""
    target = volume_path(resolved) / model_directory.fingerprint
    job = {
        "model_directory": str(model_directory.path),
        "target": str(target),
        "evaluation": evaluation.model_dump(mode="json"),
    }
    run_step("publish", job, get_run_logger())
    get_run_logger().info("model directory: %s", target)
    return target


def volume_path(resolved: Resolved) -> Path:
    names = resolved.config.registry
    return Settings().volumes / names.catalog / names.schema / names.volume / names.model_name


def _provenance(resolved: Resolved, inputs: Inputs, model: ModelReference, training: Training) -> dict[str, Any]:
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
        "num_steps": training.num_steps,
        "num_tokens": training.num_tokens,
        "total_flos": training.total_flos,
        "gpu_hours": training.num_gpus * training.train_seconds / 3600,
        "license": model.facts.get("license", "unknown"),
        "libraries": libraries(),
        "recipe": resolved.recipe,
        "flow_run_url": runtime.flow_run.ui_url if PREFECT_UI_URL.value() else None,
        "mlflow_run_id": training.mlflow_run_id,
        "config": resolved.config.model_dump(),
        "origins": resolved.origins,
    }
