"""The MLflow run of a training: one a training, with its configuration, its dataset and an honest end."""

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from config.recipes import flatten

logger = logging.getLogger(__name__)


class RunFacts(BaseModel):
    """What is written at the start of a run."""

    experiment_name: str
    artifact_location: str | None
    run_name: str
    config: dict[str, Any]
    """The resolved configuration, section -> field -> value: the run's params."""
    origins: dict[str, str]
    tags: dict[str, str]
    dataset_name: str
    dataset_digest: str
    """Our own: MLflow's digest of a `messages` column is the same for all data."""
    dataset_path: str


def ensure_experiment(name: str, artifact_location: str | None) -> str:
    """The experiment's id; made when absent. Raises MlflowException when it was deleted (its name stays taken)."""
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

    client = MlflowClient()
    experiment = client.get_experiment_by_name(name)
    if experiment is None:
        try:
            return client.create_experiment(name, artifact_location)
        except MlflowException:  # another run made it a moment ago
            experiment = client.get_experiment_by_name(name)
    if experiment.lifecycle_stage == "deleted":
        raise MlflowException(
            f"experiment {name!r} (MLFLOW_EXPERIMENT_NAME) is deleted, and its name stays taken until it is purged. "
            f"Restore it with `mlflow experiments restore --experiment-id {experiment.experiment_id}` or set another."
        )
    return experiment.experiment_id


def start_run(facts: RunFacts) -> str:
    """Create the run and log what is known before training. Returns its id; the run is RUNNING and not active."""
    from mlflow import MlflowClient
    from mlflow.entities import Dataset, DatasetInput, InputTag, Param

    client = MlflowClient()
    experiment_id = ensure_experiment(facts.experiment_name, facts.artifact_location)
    run = client.create_run(experiment_id, run_name=facts.run_name, tags=facts.tags)
    run_id = run.info.run_id
    values = {name: str(value) for name, value in flatten(facts.config).items()}
    client.log_batch(run_id, params=[Param(name, value) for name, value in values.items()])
    client.log_dict(run_id, {"config": facts.config, "origins": facts.origins}, "config.json")
    source = json.dumps({"uri": facts.dataset_path})
    dataset = Dataset(name=facts.dataset_name, digest=facts.dataset_digest, source_type="local", source=source)
    client.log_inputs(run_id, datasets=[DatasetInput(dataset, [InputTag("mlflow.data.context", "training")])])
    return run_id


@contextmanager
def ended_honestly(run_id: str) -> Iterator[None]:
    """End the run as FINISHED or FAILED, whatever a callback's destructor makes of it in between."""
    import mlflow

    status = "FAILED"
    try:
        yield
        status = "FINISHED"
    finally:
        try:
            mlflow.end_run(status)
            mlflow.MlflowClient().set_terminated(run_id, status)
        except Exception as error:  # the tracking server went away: the training itself is not lost for that
            logger.warning("MLflow run %s could not be ended as %s: %s", run_id, status, error)


def log_file(run_id: str, path: Path) -> None:
    from mlflow import MlflowClient

    MlflowClient().log_artifact(run_id, str(path))
