"""Prove the registered version, and let the gate decide about it."""

from typing import Any

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE
from pydantic import BaseModel

from config.sections import Config
from finetuning.evaluate import Evaluation
from finetuning.launcher import run_step
from tasks.common import RETRIED
from tasks.model import ModelReference
from tasks.references import Reference
from tasks.registration import Version
from tasks.training import Training


class Verdict(BaseModel):
    outcome: str
    """champion, challenger or awaiting approval"""
    reason: str
    metrics: dict[str, float]
    judged: bool
    """False when there was nothing to compare it with, this time."""


@task(cache_policy=NO_CACHE, **RETRIED)
def prove_and_promote(
    config: Config,
    dataset: Reference,
    model: ModelReference,
    training: Training,
    model_directory: Reference,
    evaluation: Evaluation,
    version: Version,
) -> Verdict:
    """The registered version is downloaded, loaded and asked; then it is champion or challenger. Raises Failure."""
    proof: dict[str, Any] = {
        "name": version.name,
        "number": version.version,
        "model_directory": str(model_directory.path),
        "checkpoint": str(training.checkpoint_path),
        "model": str(model.path),
        "rows": str(dataset.path / "test.jsonl"),
        "training": config.training.model_dump(),
        "trust_remote_code": config.model.trust_remote_code,
    }
    job = {
        "proof": proof,
        "gate": config.gate.model_dump(),
        "evaluation": evaluation.model_dump(mode="json"),
        "mlflow_run_id": training.mlflow_run_id,
    }
    verdict = Verdict(**run_step("promote", job, get_run_logger()))
    get_run_logger().info("%s version %s: %s: %s", version.name, version.version, verdict.outcome, verdict.reason)
    return verdict
