"""What the errors of registries and their storages mean, and what helps."""

import contextlib
import os
import re
from collections.abc import Iterator

from config.settings import shown
from finetuning.errors import Failure, Kind

NETWORK_DEFAULTS = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "4", "MLFLOW_DATABRICKS_ENDPOINT_HTTP_RETRY_TIMEOUT": "60"}
"""Half a minute of retries instead of four, a minute instead of eight: the step as a whole is tried again anyway."""
REFUSALS = (
    "PERMISSION_DENIED|UNAUTHENTICATED|UNAUTHORIZED|credential configuration"
    "|PermissionDenied|AccessDenied|40[13] Client Error"  # what storages say
)
HINTS = {
    r"KeyError\('s3_upload_extra_args'\)": (  # of MLflow's client, when it renews the keys of a `uc:` registry's bucket
        "MLflow hides what the storage said: look into the storage's log"
    ),
    "has managed location": (
        "give the catalog a storage root, or the server `storage-root.models` in etc/conf/server.properties"
    ),
    "(?i)temporary.*credential|credential vending": (
        "MLFLOW_USE_DATABRICKS_SDK_MODEL_ARTIFACTS_REPO_FOR_UC=true uploads through the Files API, without vended keys"
    ),
}


def is_unity_catalog(registry_uri: str) -> bool:
    """Return whether the registry is a Unity Catalog, of Databricks or the open-source server."""
    return registry_uri.partition(":")[0] in ("databricks-uc", "uc")


@contextlib.contextmanager
def explained(name: str, registry_uri: str) -> Iterator[None]:
    """Turn any error (every artifact store raises its own kind) into one that says what to do."""
    for variable, value in NETWORK_DEFAULTS.items():
        os.environ.setdefault(variable, value)
    try:
        yield
    except Failure:
        raise
    except Exception as error:
        kind, message = _kind(error), f"registry {registry_uri}, model {name}: {error}"
        message += "".join(f" ({hint})" for pattern, hint in HINTS.items() if re.search(pattern, message))
        if kind != "transient" and is_unity_catalog(registry_uri):
            catalog, schema = name.split(".")[0], name.rpartition(".")[0]
            rights = {"USE CATALOG": catalog, "USE SCHEMA": schema, "CREATE MODEL": schema}
            named = [right for right in rights if right in str(error).upper().replace("_", " ")] or list(rights)
            message += "; this must exist and you need " + ", ".join(f"{right} on {rights[right]}" for right in named)
        raise Failure(kind, shown(" ".join(message.split()))) from error


def _kind(error: Exception) -> Kind:
    """Everything but a refusal may pass at the next try. Codes that MLflow does not know are only in the answer."""
    code = getattr(error, "json", {}).get("error_code") or getattr(error, "error_code", "")
    if re.search(REFUSALS, f"{code} {error}"):
        return "authentication"
    return "configuration" if re.search("DOES_NOT_EXIST|NOT_FOUND|INVALID|BAD_REQUEST", str(code)) else "transient"
