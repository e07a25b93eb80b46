"""Every kind of registry that a test can have, each with a tracking store, and the stand-in's faults."""

import json
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from bench.servers import background, free_port, wait_for_http

PRESIGNED = "databricks-uc, presigned URLs"
DATABRICKS: dict[str, dict[str, str]] = {
    PRESIGNED: {},
    "databricks-uc, vended keys": {},
    "databricks-uc, Files API": {"MLFLOW_USE_DATABRICKS_SDK_MODEL_ARTIFACTS_REPO_FOR_UC": "true"},
    "databricks-uc, native": {"MLFLOW_ENABLE_UC_NATIVE_MODEL_REGISTRY": "true"},
}
OPEN_SOURCE = ["uc, files", "uc, vended keys"]


class Place(NamedTuple):
    """A registry and how to reach it. `uploads` matches what a request of an upload is; None without requests."""

    registry_uri: str
    tracking_uri: str
    name: str
    """catalog.schema.model, of no other test."""
    environment: dict[str, str]
    uploads: str | None = None


@contextmanager
def unity_catalog(folder: Path) -> Iterator[str]:
    """The URL of a running stand-in."""
    port = free_port()
    with background(["tests.unity_catalog", str(port), str(folder)], {}, folder.with_suffix(".log")):
        wait_for_http(f"http://127.0.0.1:{port}/_state")
        yield f"http://127.0.0.1:{port}"


def unity_place(kind: str, url: str, tracking_uri: str, name: str) -> Place:
    """Where the stand-in at `url` is a registry of this kind."""
    catalog = "cloud" if kind.endswith("vended keys") else "main"
    uploads = {"databricks-uc, Files API": "PUT /api/2.0/fs/files/", "uc, files": None}.get(kind, "PUT /_blob/")
    environment = {}
    if kind in DATABRICKS:
        environment = {"DATABRICKS_HOST": url, "DATABRICKS_TOKEN": "none", **DATABRICKS[kind]}
    if catalog == "cloud":
        environment["MLFLOW_S3_ENDPOINT_URL"], uploads = url, "PUT /models/"
    registry_uri = "databricks-uc" if kind in DATABRICKS else f"uc:{url}"
    return Place(registry_uri, tracking_uri, f"{catalog}.default.{name}", environment, uploads)


def start_run(uri: str, artifact_location: Path) -> str:
    """The id of a run in an experiment of its own, whose artifacts go to this folder where no server says otherwise."""
    from mlflow import MlflowClient

    client = MlflowClient(uri)
    location = artifact_location.as_uri() if uri.startswith("sqlite") else None
    return client.create_run(client.create_experiment(artifact_location.name, location)).info.run_id


def ask(url: str, body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url, data), timeout=10) as answer:
        return json.load(answer)


@contextmanager
def faults(url: str, *injected: dict[str, Any]) -> Iterator[None]:
    """What a stand-in does to the next requests; none afterwards."""
    ask(f"{url}/_faults", injected)
    try:
        yield
    finally:
        ask(f"{url}/_faults", [])
