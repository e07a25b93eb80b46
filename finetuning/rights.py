"""What can be known before a training of the places its result goes to: found out by trying, or by asking only.

The lines `tracking server` and `registry` of a preflight.
"""

import contextlib
import tempfile
import uuid
from pathlib import Path

from config.settings import Settings, shown
from finetuning.bounded import within
from finetuning.errors import Failure
from finetuning.findings import Findings
from finetuning.registry import Registry, check_name, check_pair, check_registry
from finetuning.tracking import ensure_experiment

FIRST_ANSWER_SECONDS = 30
"""What the tracking server may take for its first answer; a new database makes its tables in that time."""
ANSWER_SECONDS = 60
"""What the artifact store may take to write, read and delete a byte."""


def tracking_line(settings: Settings, only_look: bool, findings: Findings) -> None:
    """The experiment exists afterwards, and artifacts arrive; with `only_look` nothing is made. Raises Failure."""
    uri, name = shown(settings.tracking_uri), settings.mlflow_experiment_name
    if only_look and is_not_made_yet(settings.tracking_uri):
        return findings.ok("tracking server", f"{uri} is not there yet: the first run makes it")
    try:
        is_there = within(FIRST_ANSWER_SECONDS, lambda: _experiment(settings, only_look))
    except Exception as error:
        reason = shown(" ".join(str(error).split()))[:300]  # before the cut: half a password has no @ behind it
        message = f"the tracking server MLFLOW_TRACKING_URI={uri} cannot be used: {reason}"
        if settings.tracking_required:
            raise Failure(
                "configuration", f"{message}. To train without it: FINETUNE_TRACKING_REQUIRED=false"
            ) from error
        return findings.warn("tracking server", message, "Training goes on without it, and logs everything afterwards.")
    if only_look:
        made = "" if is_there else ", which the first run makes"
        return findings.ok("tracking server", f"{uri} answers; experiment {name!r}{made}; artifacts: not tried")
    tried = ""
    if settings.tracking_uri.startswith(("sqlite:", "http:", "https:")):
        check_artifact_store(name, settings.tracking_uri)
        tried = "; an artifact was written, read and deleted"
    findings.ok("tracking server", f"{uri}, experiment {name!r}{tried}")


def registry_line(name: str, settings: Settings, only_look: bool, findings: Findings) -> None:
    """The registered model exists afterwards; with `only_look` nothing is made. Raises Failure as `check_registry`."""
    uri, tracking_uri = settings.registry_uri, settings.tracking_uri
    if not only_look:
        check_registry(name, uri, tracking_uri)
        return findings.ok("registry", f"{name} is in {shown(uri)}; right to add versions: not proven")
    check_name(name)
    check_pair(uri, tracking_uri)
    if is_not_made_yet(uri):
        return findings.ok("registry", f"{shown(uri)} is not there yet: the first run makes it")
    findings.ok("registry", right_to_create(name, uri))


def is_not_made_yet(uri: str) -> bool:
    """A database that MLflow would make just by being asked."""
    file = database(uri)
    return file is not None and not file.exists()


def database(uri: str) -> Path | None:
    """The file of a sqlite URI."""
    return Path(uri.removeprefix("sqlite:///")).absolute() if uri.startswith("sqlite:///") else None


def _experiment(settings: Settings, only_look: bool) -> bool:
    """Whether it is there. Raises what MLflow raises, also when it was deleted."""
    from mlflow import MlflowClient

    name = settings.mlflow_experiment_name
    if only_look and MlflowClient().get_experiment_by_name(name) is None:
        return False
    ensure_experiment(name, settings.artifact_location)
    return True


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
