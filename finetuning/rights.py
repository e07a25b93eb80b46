"""What can be known before a training of the places its result goes to: found out by trying, or by asking only."""

import contextlib
import logging
import tempfile
import uuid
from pathlib import Path

from config.settings import shown
from finetuning.bounded import within
from finetuning.errors import Failure
from finetuning.registry import Registry, check_name

ANSWER_SECONDS = 60
"""What the artifact store may take to write, read and delete a byte."""
logger = logging.getLogger(__name__)


def check_artifact_store(experiment_name: str, tracking_uri: str) -> None:
    """Write a byte where the experiment's artifacts and models go, read it back and delete it.

    Raises Failure: without `--serve-artifacts` a server may hand out a path that only itself has.
    """
    from mlflow import MlflowClient

    location = ""
    try:
        experiment = within(ANSWER_SECONDS, lambda: MlflowClient(tracking_uri).get_experiment_by_name(experiment_name))
        location = experiment.artifact_location
        within(ANSWER_SECONDS, lambda: _try(location, tracking_uri))
    except Exception as error:
        where = f"artifacts of experiment {experiment_name!r} go to {location}" if location else experiment_name
        message = (
            f"tracking server {shown(tracking_uri)}: {where}, which cannot be written and read from here: {error}. A "
            "path that only the server has needs `mlflow server --serve-artifacts` and an experiment made after that "
            "(MLFLOW_EXPERIMENT_NAME); a bucket needs its keys and its Python package here"
        )
        raise Failure("configuration", shown(" ".join(message.split()))) from error


def right_to_create(name: str, registry_uri: str) -> str:
    """A sentence on what `name` is in the registry; nothing is written. Raises Failure as `check_registry`."""
    check_name(name)
    registry = Registry(registry_uri)
    if not registry.has_model(name):
        return f"{name} is not in {shown(registry_uri)}; right to create: not proven, a run tries it before it trains"
    versions = registry.versions(name)
    number = f"version {versions[0].number} is its newest" if versions else "it has no version"
    return f"{name} is in {shown(registry_uri)}, {number}; right to add versions: not proven"


def _try(location: str, tracking_uri: str) -> None:
    from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

    store, folder = get_artifact_repository(location, tracking_uri=tracking_uri), f"finetune-probe-{uuid.uuid4().hex}"
    with tempfile.TemporaryDirectory() as temporary:
        probe = Path(temporary) / "probe"
        probe.write_bytes(b"1")
        store.log_artifact(str(probe), folder)
        try:
            (Path(temporary) / "back").mkdir()
            back = store.download_artifacts(f"{folder}/probe", str(Path(temporary) / "back"))
            if Path(back).read_bytes() != b"1":
                raise OSError("what was read back is not what was written")
        finally:
            with contextlib.suppress(Exception):  # a store may forbid it
                store.delete_artifacts(folder)
