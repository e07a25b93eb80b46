"""The MLflow run of a training: one a training, with its configuration, its dataset and an honest end."""

import json
import logging
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from pydantic import BaseModel

from config.recipes import flatten
from finetuning.errors import Failure

TRACKING_SECONDS = 60
"""What the tracking server may take for a call that the training does not depend on."""
METRICS_A_REQUEST = 1000
"""MLflow's own limit."""

History = dict[str, set[int]]
"""Metric name -> steps that it was logged at."""

T = TypeVar("T")
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
    """End the run as FINISHED, KILLED (told to stop) or FAILED, whatever a callback makes of it in between."""
    status = "FAILED"
    try:
        yield
        status = "FINISHED"
    except Failure as failure:
        status = "KILLED" if failure.kind == "preempted" else "FAILED"
        raise
    finally:
        _end(run_id, status)


def _end(run_id: str, status: str) -> None:
    import mlflow

    try:
        mlflow.end_run(status)  # stops the system metrics; in this thread, where the run is active
    except Exception as error:
        logger.warning("MLflow run %s could not be ended here: %s", run_id, error)
    problem = f"MLflow run {run_id} could not be marked {status}"
    _bounded(problem, lambda: mlflow.MlflowClient().set_terminated(run_id, status))


def read_history(run_id: str) -> History:
    """What the run has logged already; empty when the server does not answer."""
    return _bounded(f"the metrics of MLflow run {run_id} could not be read", lambda: _read_history(run_id)) or {}


def _read_history(run_id: str) -> History:
    from mlflow import MlflowClient

    client = MlflowClient()
    names = [name for name in client.get_run(run_id).data.metrics if not name.startswith("system/")]
    return {name: {metric.step for metric in client.get_metric_history(run_id, name)} for name in names}


def complete(run_id: str, log_history: list[dict[str, Any]]) -> None:
    """Log the values of the trainer's history that the run lacks: a server that was down for a while loses none."""
    _bounded(f"the metrics of MLflow run {run_id} could not be completed", lambda: _complete(run_id, log_history))


def _complete(run_id: str, log_history: list[dict[str, Any]]) -> None:
    import mlflow
    from mlflow.entities import Metric

    mlflow.flush_async_logging()
    history, now = _read_history(run_id), int(time.time() * 1000)
    missing = [
        Metric(re.sub(r"[^0-9A-Za-z_\-. :/]", "_", name), float(value), now, entry["step"])
        for entry in log_history
        for name, value in entry.items()
        if name != "step" and isinstance(value, int | float) and entry["step"] not in history.get(name, ())
    ]
    for start in range(0, len(missing), METRICS_A_REQUEST):
        mlflow.MlflowClient().log_batch(run_id, metrics=missing[start : start + METRICS_A_REQUEST])


def _bounded(problem: str, call: Callable[[], T]) -> T | None:
    """The result of `call`, or None after a warning: tracking trouble never ends a training, and never holds it up."""
    outcome: dict[str, Any] = {}

    def work() -> None:
        try:
            outcome["result"] = call()
        except Exception as error:
            outcome["error"] = re.sub(r"\s+", " ", str(error))[:200]

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(TRACKING_SECONDS)
    if "result" not in outcome:
        logger.warning("%s: %s", problem, outcome.get("error", f"no answer within {TRACKING_SECONDS} s"))
    return outcome.get("result")
