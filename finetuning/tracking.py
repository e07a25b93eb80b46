"""The MLflow run of a training: one a training, with its configuration, its dataset and an honest end."""

import json
import logging
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel

from config.recipes import flatten
from config.settings import Settings, shown
from finetuning.bounded import within
from finetuning.errors import Failure

if TYPE_CHECKING:
    from mlflow import MlflowClient

TRACKING_SECONDS = 60
"""What the tracking server may take for a call that the training does not depend on."""
METRICS_A_REQUEST = 1000
"""MLflow's own limit."""
TRAINING_TAG = "finetune.training"

History = dict[str, set[int]]
"""Metric name -> steps that it was logged at."""

T = TypeVar("T")
logger = logging.getLogger(__name__)


class RunFacts(BaseModel):
    """What is written at the start of a run."""

    training_id: str = ""
    """Of the training's directory: made once, kept in `training.json`."""
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
    report_path: str | None = None
    """Folder with what became of rows and tokens, `report.json` and `report.html`."""


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


def open_run(facts: RunFacts) -> str:
    """The id of this training's run, made with all that is known before training unless it is there.

    Found by its tag, so that a process that was killed right after it made the run leaves no second one. The run is
    RUNNING and not active. Raises what MLflow raises, TimeoutError after TRACKING_SECONDS.
    """
    return within(TRACKING_SECONDS, lambda: _open_run(facts))


def open_or_postpone(facts: RunFacts) -> str | None:
    """As `open_run`; None when the server cannot be used and FINETUNE_TRACKING_REQUIRED is off.

    Raises Failure when it is on: a server that answered at the preflight may answer at the next try.
    """
    try:
        return open_run(facts)
    except Exception as error:
        settings = Settings()
        problem = f"the tracking server {shown(settings.tracking_uri)} cannot be used: {' '.join(str(error).split())}"
        if settings.tracking_required:
            raise Failure(
                "transient", f"{problem[:400]}. To train without it set FINETUNE_TRACKING_REQUIRED=false"
            ) from error
        logger.warning("%s; training goes on, and everything is logged afterwards", problem[:400])
        return None


def experiment_of(run_id: str) -> str | None:
    """The id of the run's experiment; None when the server does not answer."""
    from mlflow import MlflowClient

    problem = f"the experiment of MLflow run {run_id} could not be looked up"
    return _attempt(problem, lambda: MlflowClient().get_run(run_id).info.experiment_id)


def is_deleted(run_id: str) -> bool:
    """Whether somebody deleted the run since; False when the server does not answer."""
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

    def call() -> bool:
        try:
            return MlflowClient().get_run(run_id).info.lifecycle_stage == "deleted"
        except MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                return True
            raise

    return _attempt(f"MLflow run {run_id} could not be looked up", call) or False


def _open_run(facts: RunFacts) -> str:
    from mlflow import MlflowClient

    client = MlflowClient()
    experiment_id = ensure_experiment(facts.experiment_name, facts.artifact_location)
    found = client.search_runs([experiment_id], f"tags.`{TRAINING_TAG}` = '{facts.training_id}'", max_results=1)
    if not found:
        tags = {**facts.tags, TRAINING_TAG: facts.training_id}
        found = [client.create_run(experiment_id, run_name=facts.run_name, tags=tags)]
    run_id = found[0].info.run_id
    if not found[0].data.params:
        _describe(client, run_id, facts)
    return run_id


def _describe(client: "MlflowClient", run_id: str, facts: RunFacts) -> None:
    """Dataset and configuration; the params last, because their absence is what makes a next attempt do it again."""
    from mlflow.entities import Dataset, DatasetInput, InputTag, Param

    source = json.dumps({"uri": facts.dataset_path})
    dataset = Dataset(name=facts.dataset_name, digest=facts.dataset_digest, source_type="local", source=source)
    client.log_inputs(run_id, datasets=[DatasetInput(dataset, [InputTag("mlflow.data.context", "training")])])
    client.log_dict(run_id, {"config": facts.config, "origins": facts.origins}, "config.json")
    for name in ("report.json", "report.html") if facts.report_path else ():
        client.log_artifact(run_id, f"{facts.report_path}/{name}", "data")
    values = {name: str(value) for name, value in flatten(facts.config).items()}
    client.log_batch(run_id, params=[Param(name, value) for name, value in values.items()])


@contextmanager
def ended_honestly(run_id: str | None) -> Iterator[None]:
    """Mark the run KILLED (told to stop) or FAILED when the training does not end well; `settle` marks it FINISHED."""
    try:
        yield
    except Exception as error:
        stopped = isinstance(error, Failure) and error.kind == "preempted"
        _leave()
        if run_id:
            end(run_id, "KILLED" if stopped else "FAILED")
        raise


def end(run_id: str, status: str, only_running: bool = False) -> None:
    """Set the run's status; with `only_running`, unless it has ended in the meantime."""
    from mlflow import MlflowClient

    def call() -> None:
        client = MlflowClient()
        if not only_running or client.get_run(run_id).info.status == "RUNNING":
            client.set_terminated(run_id, status)

    _attempt(f"MLflow run {run_id} could not be marked {status}", call)


def settle(facts: RunFacts, run_id: str | None, log_history: list[dict[str, Any]]) -> str | None:
    """After the training: give the run what it lacks of the trainer's history, and mark it FINISHED.

    A server that was down in between has lost nothing then, and one that was down from the start (`run_id` None) gets
    the run now. Returns the run's id when all of that is done, None when it has to be tried again.
    """
    _leave()

    def call() -> str:
        from mlflow import MlflowClient

        known = run_id or _open_run(facts)
        _complete(known, log_history)
        MlflowClient().set_terminated(known, "FINISHED")
        return known

    return _attempt(f"the MLflow run of training {facts.training_id} is not complete yet", call)


def _leave() -> None:
    """End the active run of this thread, which stops the system metrics; its status is set elsewhere."""
    import mlflow

    try:
        mlflow.end_run()
    except Exception as error:
        logger.warning("the active MLflow run could not be left: %s", " ".join(str(error).split())[:200])


def read_history(run_id: str) -> History:
    """What the run has logged already; empty when the server does not answer."""
    return _attempt(f"the metrics of MLflow run {run_id} could not be read", lambda: _read_history(run_id)) or {}


def _read_history(run_id: str) -> History:
    from mlflow import MlflowClient

    client = MlflowClient()
    names = [name for name in client.get_run(run_id).data.metrics if not name.startswith("system/")]
    return {name: {metric.step for metric in client.get_metric_history(run_id, name)} for name in names}


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


def _attempt(problem: str, call: Callable[[], T]) -> T | None:
    """The result of `call`, or None after a warning: tracking trouble never ends a training, and never holds it up."""
    try:
        return within(TRACKING_SECONDS, call)
    except Exception as error:
        logger.warning("%s: %s", problem, " ".join(str(error).split())[:200])
        return None
