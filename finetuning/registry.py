"""One READY model version per fingerprint, in Unity Catalog or on an MLflow server, after any number of tries."""

import contextlib
import re
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from config.settings import shown
from finetuning.bounded import within
from finetuning.errors import Failure
from finetuning.refusals import explained, is_unity_catalog
from finetuning.versions import FINGERPRINT_TAG, ModelVersion, Registry, fitting, join_comment

if TYPE_CHECKING:
    from mlflow import MlflowClient

__all__ = ["ModelVersion", "RegisteredVersion", "Registry", "check_name", "check_registry", "is_unity_catalog"]
__all__ += ["register_version"]

UPLOAD_SECONDS = 600
"""What an upload may take, and a second more for each megabyte: MLflow sets no limit to some of its requests."""


class RegisteredVersion(NamedTuple):
    """A READY version; MLflow loads it by `uri`. `created` is False when an earlier try had made it."""

    name: str
    version: str
    uri: str
    created: bool


def check_name(name: str) -> None:
    """Refuse with any registry what Unity Catalog would refuse: the others accept nearly all (mlflow#13833)."""
    parts = name.split(".")
    bad = [part for part in parts if not re.fullmatch(r"[A-Za-z0-9_-]+", part)]
    if bad or len(parts) != 3:
        why = f"the part {bad[0]!r} is not of letters, digits, _ and -" if bad else f"it has {len(parts)} parts"
        raise Failure("configuration", f"registered model name {name!r}: {why}; it must be catalog.schema.model")


def check_registry(name: str, registry_uri: str, tracking_uri: str | None = None) -> None:
    """Make the registered model `name` unless it is there, so that what is missing shows before training.

    Raises:
        Failure: The name is not three parts, catalog or schema or a right is missing, nobody answers, or models logged
            to `tracking_uri` cannot be registered there.
    """
    check_name(name)
    if tracking_uri:
        check_pair(registry_uri, tracking_uri)
    Registry(registry_uri).ensure_model(name)


def check_pair(registry_uri: str, tracking_uri: str) -> None:
    """Raises Failure when models logged to the one cannot be registered at the other."""
    if registry_uri.startswith("http") and registry_uri.rstrip("/") != tracking_uri.rstrip("/"):
        remedy = "an MLflow server registers only models logged to itself (mlflow#18194): set both URIs to it"
        message = f"registry {shown(registry_uri)}, but tracking {shown(tracking_uri)}: {remedy}"
        raise Failure("configuration", message)


def register_version(
    package: Path,
    *,
    name: str,
    run_id: str | None,
    fingerprint: str,
    tracking_uri: str,
    registry_uri: str,
    tags: dict[str, str],
    description: str,
) -> RegisteredVersion:
    """Upload `package` and register it, or return the READY version that carries `fingerprint` already.

    Versions with this fingerprint that are not READY come from broken uploads and are deleted: no two processes may
    register one fingerprint at a time. Sets MLflow's global URIs: a sqlite registry resolves `models:/<id>` by them.

    Raises:
        Failure: As in `check_registry`, or the upload failed; a failed upload leaves no READY version.
    """
    if not (package / "MLmodel").is_file():
        raise Failure("bug", f"{package} is no MLflow package: it has no file MLmodel")
    check_registry(name, registry_uri, tracking_uri)
    tags, registry = fitting({**tags, FINGERPRINT_TAG: fingerprint}), Registry(registry_uri, tracking_uri)
    number = _ready_version(registry, name, fingerprint)
    if created := number is None:
        size = sum(path.stat().st_size for path in package.rglob("*") if path.is_file())
        try:
            with explained(name, registry_uri):
                seconds = UPLOAD_SECONDS + size / 1e6
                within(seconds, lambda: _create_version(registry, package.resolve(), name, run_id, tags, description))
        except Failure:
            with contextlib.suppress(Failure):  # what cannot be deleted now, the next try deletes
                number = _ready_version(registry, name, fingerprint)  # READY when only the last answer was lost
            if number is None:
                raise
        number = number or _ready_version(registry, name, fingerprint)
    if number is None:
        raise Failure("transient", f"registry {shown(registry_uri)}: the new version of {name} did not become READY")
    return RegisteredVersion(name, number, f"models:/{name}/{number}", created)


def _ready_version(registry: Registry, name: str, fingerprint: str) -> str | None:
    """Return the newest READY version that carries `fingerprint`, and delete those that are not READY."""
    own = [version for version in registry.versions(name) if version.fingerprint == fingerprint]
    for version in own:
        if version.status != "READY":
            registry.delete(name, version.number)
    return next((version.number for version in own if version.status == "READY"), None)


def _create_version(
    registry: Registry, package: Path, name: str, run_id: str | None, tags: dict[str, str], description: str
) -> None:
    """Make the version, upload, mark it READY.

    Unity Catalog gets the package as a plain path: of a run's artifacts (`register_model`) and of a `file:` URI MLflow
    takes the directory for a download of its own and deletes it in the end. An MLflow server refuses paths: there the
    package becomes a LoggedModel of the run first.
    """
    import mlflow

    mlflow.set_tracking_uri(registry.tracking_uri)
    mlflow.set_registry_uri(registry.uri)
    client = mlflow.MlflowClient()
    if is_unity_catalog(registry.uri):
        comment = description if registry.has_aliases else join_comment(description, tags)
        client.create_model_version(name, str(package), run_id=run_id, tags=tags, description=comment)
    else:
        model_id = _logged_model(client, package, name, run_id, tags)
        version = mlflow.register_model(f"models:/{model_id}", name, tags=tags)
        client.update_model_version(name, version.version, description)


def _logged_model(client: "MlflowClient", package: Path, name: str, run_id: str, tags: dict[str, str]) -> str:
    """Return the id of the run's LoggedModel with this fingerprint; a broken upload goes on in the same one."""
    from mlflow.entities import LoggedModelOutput

    experiment = client.get_run(run_id).info.experiment_id
    same = f"source_run_id = '{run_id}' AND tags.`{FINGERPRINT_TAG}` = '{tags[FINGERPRINT_TAG]}'"
    found = client.search_logged_models([experiment], filter_string=same)
    model = found[0] if found else client.create_logged_model(experiment, name.rpartition(".")[2], run_id, tags)
    if model.status != "READY":
        try:
            client.log_model_artifacts(model.model_id, str(package))
        except Exception as error:
            remedy = "a path that only the server has needs its option --serve-artifacts, a time-out needs a larger "
            remedy += "MLFLOW_HTTP_REQUEST_TIMEOUT"
            raise OSError(f"upload to {model.artifact_location} failed: {error} ({remedy})") from error
        client.log_outputs(run_id, [LoggedModelOutput(model.model_id, step=0)])
        client.finalize_logged_model(model.model_id, "READY")
    return model.model_id
