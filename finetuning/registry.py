"""One READY model version per fingerprint, in Unity Catalog or on an MLflow server, after any number of tries.

Three kinds of registry: `databricks-uc[://profile]`, `uc:<url>` (the open-source server: no tags, no aliases) and
MLflow's own (sqlite, http). Each is found out by trying it; what they do not tell is said where it matters.
"""

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from config.settings import shown
from finetuning.bounded import within
from finetuning.errors import Failure, Kind

if TYPE_CHECKING:
    from mlflow import MlflowClient

FINGERPRINT_TAG = "finetune.fingerprint"
"""A tag of the version; with `uc:`, which has no tags, the last line of its description."""
ANSWER_SECONDS = 90
"""What a registry may take for its first answer. The databricks SDK alone would try a dead host for 7.5 minutes."""
NETWORK_DEFAULTS = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "4", "MLFLOW_DATABRICKS_ENDPOINT_HTTP_RETRY_TIMEOUT": "60"}
"""Half a minute of retries instead of four, a minute instead of eight: the step as a whole is tried again anyway."""


class RegisteredVersion(NamedTuple):
    """A READY version; MLflow loads it by `uri`. `created` is False when an earlier try had made it."""

    name: str
    version: str
    uri: str
    created: bool


def is_unity_catalog(registry_uri: str) -> bool:
    """Return whether the registry is a Unity Catalog, of Databricks or the open-source server."""
    return registry_uri.partition(":")[0] in ("databricks-uc", "uc")


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
    if tracking_uri and registry_uri.startswith("http") and registry_uri.rstrip("/") != tracking_uri.rstrip("/"):
        remedy = "an MLflow server registers only models logged to itself (mlflow#18194): set both URIs to it"
        message = f"registry {shown(registry_uri)}, but tracking {shown(tracking_uri)}: {remedy}"
        raise Failure("configuration", message)
    with _explained(name, registry_uri):
        from mlflow.tracking._model_registry.client import ModelRegistryClient

        # MlflowClient would open a tracking store, too: without a URI that is a database in the working directory.
        client = ModelRegistryClient(registry_uri, tracking_uri=registry_uri)
        within(ANSWER_SECONDS, lambda: _ensure_registered_model(client, name))


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
    tags = {**tags, FINGERPRINT_TAG: fingerprint}
    with _explained(name, registry_uri):
        import mlflow

        mlflow.set_tracking_uri(tracking_uri)
        mlflow.set_registry_uri(registry_uri)
        client = mlflow.MlflowClient()
        number = _ready_version(client, name, fingerprint)
        if created := number is None:
            try:
                _create_version(client, package.resolve(), name, run_id, tags, description)
            except Exception:
                with contextlib.suppress(Exception):  # what cannot be deleted now, the next try deletes
                    _ready_version(client, name, fingerprint)
                raise
            number = _ready_version(client, name, fingerprint)
    if number is None:
        raise Failure("transient", f"registry {shown(registry_uri)}: the new version of {name} did not become READY")
    return RegisteredVersion(name, number, f"models:/{name}/{number}", created)


def _create_version(
    client: "MlflowClient", package: Path, name: str, run_id: str, tags: dict[str, str], description: str
) -> None:
    """Make the version, upload, mark it READY.

    Unity Catalog gets the package as a plain path: of a run's artifacts (`register_model`) and of a `file:` URI MLflow
    takes the directory for a download of its own and deletes it in the end. An MLflow server refuses paths: there the
    package becomes a LoggedModel of the run first.
    """
    import mlflow

    registry_uri = mlflow.get_registry_uri()
    if registry_uri.startswith("uc:"):
        description = f"{description}\n\n{_fingerprint_line(tags[FINGERPRINT_TAG])}"
    if is_unity_catalog(registry_uri):
        client.create_model_version(name, str(package), run_id=run_id, tags=tags, description=description)
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


def _fingerprint_line(fingerprint: str) -> str:
    return f"{FINGERPRINT_TAG}: {fingerprint}"


def _ready_version(client: "MlflowClient", name: str, fingerprint: str) -> str | None:
    """Return the newest READY version that carries `fingerprint`, and delete those that are not READY."""
    import mlflow
    from mlflow.entities.model_registry import ModelVersionSearch

    ready = []
    for version in mlflow.search_model_versions(filter_string=f"name = '{name}'"):
        if isinstance(version, ModelVersionSearch):  # a hit of a Unity Catalog, whose tags cannot be read
            version = client.get_model_version(name, str(version.version))
        described = _fingerprint_line(fingerprint) in (version.description or "").splitlines()
        if not described and version.tags.get(FINGERPRINT_TAG) != fingerprint:
            continue
        if version.status == "READY":
            ready.append(int(version.version))
        else:
            client.delete_model_version(name, str(version.version))
    return str(max(ready)) if ready else None


def _ensure_registered_model(client: Any, name: str) -> None:
    """Ask before creating: who may add versions to a model need not have the right to make models."""
    from mlflow.exceptions import MlflowException

    try:
        client.get_registered_model(name)
    except MlflowException as error:
        if not re.search("DOES_NOT_EXIST|NOT_FOUND", f"{error.error_code} {error}"):
            raise
        client.create_registered_model(name)


@contextlib.contextmanager
def _explained(name: str, registry_uri: str) -> Iterator[None]:
    """Turn any error (every artifact store raises its own kind) into one that says what to do."""
    for variable, value in NETWORK_DEFAULTS.items():
        os.environ.setdefault(variable, value)
    try:
        yield
    except Exception as error:
        kind, message = _kind(error), f"registry {registry_uri}, model {name}: {error}"
        if kind != "transient" and is_unity_catalog(registry_uri):
            catalog, schema = name.split(".")[0], name.rpartition(".")[0]
            rights = {"USE CATALOG": catalog, "USE SCHEMA": schema, "CREATE MODEL": schema}
            named = [right for right in rights if right in str(error).upper().replace("_", " ")] or list(rights)
            message += "; this must exist and you need " + ", ".join(f"{right} on {rights[right]}" for right in named)
        raise Failure(kind, shown(" ".join(message.split()))) from error


def _kind(error: Exception) -> Kind:
    """Everything but a refusal may pass at the next try. Codes that MLflow does not know are only in the answer."""
    code = getattr(error, "json", {}).get("error_code") or getattr(error, "error_code", "")
    if re.search("PERMISSION_DENIED|UNAUTHENTICATED|UNAUTHORIZED|credential configuration", f"{code} {error}"):
        return "authentication"
    return "configuration" if re.search("DOES_NOT_EXIST|NOT_FOUND|INVALID|BAD_REQUEST", str(code)) else "transient"
