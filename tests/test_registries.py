"""One contract for every kind of registry: one READY version, however often and however badly it is tried.

Against a database, a real `mlflow server` and a stand-in for Unity Catalog; with UNITY_CATALOG_URL=http://HOST:PORT
also against a real open-source server, which needs the catalog `unity` with the schema `default`.
"""

import logging
import os
import re
import sqlite3
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.servers import background, free_port, wait_for_http
from config.settings import PROJECT_ROOT
from finetuning import versions
from finetuning.errors import Failure
from finetuning.packaging import CHAT_TASK, package_model
from finetuning.registry import RegisteredVersion, check_registry, is_unity_catalog, register_version
from finetuning.versions import FINGERPRINT_TAG, Registry, join_comment, split_comment
from tests.registries import (
    DATABRICKS,
    OPEN_SOURCE,
    PRESIGNED,
    Place,
    ask,
    faults,
    start_run,
    unity_catalog,
    unity_place,
)
from tests.test_packaging import METADATA, make_model_directory

REAL = os.environ.get("UNITY_CATALOG_URL")
UNITY = [*DATABRICKS, *OPEN_SOURCE]
KINDS = ["sqlite", "mlflow server", *UNITY, *(["real open-source server"] if REAL else [])]
CREATE = r"POST .*(model-versions/create|models/versions)$"
FINALIZE = r"(POST|PATCH) .*finalize$"

HIDDEN = "MLflow hides what the storage said"
"""Of `uc:` with a bucket only."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`package` of a tiny model, and what databases and servers write."""
    folder = tmp_path_factory.mktemp("registries")
    model_directory = make_model_directory(folder / "model", "2GB")
    package_model(model_directory, folder / "package", task=CHAT_TASK, metadata=METADATA)
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[str]:
    port = free_port()
    store = ["--backend-store-uri", f"sqlite:///{folder}/server.db", "--artifacts-destination", f"{folder}/server"]
    command = ["mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1", *store]
    environment = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}  # half the time to start
    with background(command, environment, folder / "server.log", cwd=folder):
        wait_for_http(f"http://127.0.0.1:{port}/health")
        yield f"http://127.0.0.1:{port}"


@pytest.fixture(scope="module")
def catalog(folder: Path) -> Iterator[str]:
    with unity_catalog(folder / "unity") as url:
        yield url


@pytest.fixture
def open_place(request: pytest.FixtureRequest, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Place]:
    def open_place(kind: str) -> Place:
        name, database = f"lamp_{uuid.uuid4().hex[:8]}", f"sqlite:///{folder}/mlflow.db"
        if kind in ("sqlite", "mlflow server"):
            uri = database if kind == "sqlite" else request.getfixturevalue("server")
            place = Place(uri, uri, f"main.default.{name}", {})
        elif kind == "real open-source server":
            place = Place(f"uc:{REAL}", database, f"unity.default.{name}", {})
        else:
            place = unity_place(kind, request.getfixturevalue("catalog"), database, name)
        for variable, value in {**place.environment, "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "0"}.items():
            monkeypatch.setenv(variable, value)
        return place

    return open_place


@pytest.fixture(params=KINDS)
def anywhere(request: pytest.FixtureRequest, open_place: Callable[[str], Place]) -> Place:
    return open_place(request.param)


@pytest.fixture(params=UNITY)
def unity(request: pytest.FixtureRequest, open_place: Callable[[str], Place]) -> Place:
    return open_place(request.param)


@pytest.fixture(params=[kind for kind in UNITY if kind != "uc, files"])
def uploading(request: pytest.FixtureRequest, open_place: Callable[[str], Place]) -> Place:
    """One whose storage is reached by requests."""
    return open_place(request.param)


@pytest.fixture
def run_id(folder: Path, request: pytest.FixtureRequest) -> str:
    """A run with an artifact, in the tracking store of the test's place."""
    from mlflow import MlflowClient

    name = next(name for name in ("unity", "uploading", "anywhere") if name in request.fixturenames)
    place = request.getfixturevalue(name)
    run_id = start_run(place.tracking_uri, folder / "artifacts" / place.name)
    MlflowClient(place.tracking_uri).log_text(run_id, "kept", "note.txt")
    return run_id


def job(place: Place, run_id: str) -> dict[str, Any]:
    texts = {"name": place.name, "run_id": run_id, "fingerprint": "f1", "description": "Knows a lamp."}
    uris = {"tracking_uri": place.tracking_uri, "registry_uri": place.registry_uri}
    return {**texts, **uris, "tags": {"base_model": "Qwen/Qwen3-4B"}}


def register(folder: Path, place: Place, run_id: str, **changes: Any) -> RegisteredVersion:
    return register_version(folder / "package", **{**job(place, run_id), **changes})


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def only_version(place: Place) -> versions.ModelVersion:
    """The one version that there must be, whole."""
    [version] = Registry(place.registry_uri).versions(place.name)
    assert (version.status, version.fingerprint) == ("READY", "f1")
    return version


def test_one_version_a_fingerprint(anywhere: Place, folder: Path, run_id: str) -> None:
    registry = Registry(anywhere.registry_uri, anywhere.tracking_uri)
    assert registry.versions(anywhere.name) == []
    first, second = register(folder, anywhere, run_id), register(folder, anywhere, run_id)
    assert first == RegisteredVersion(anywhere.name, "1", f"models:/{anywhere.name}/1", created=True)
    assert second == first._replace(created=False)
    assert only_version(anywhere).number == "1"

    assert register(folder, anywhere, run_id, fingerprint="f2").version == "2"
    newest, oldest = registry.versions(anywhere.name)
    assert (newest.number, newest.fingerprint, oldest.number, oldest.fingerprint) == ("2", "f2", "1", "f1")
    assert oldest.labels == {"base_model": "Qwen/Qwen3-4B", FINGERPRINT_TAG: "f1"}
    assert (oldest.status, oldest.run_id, oldest.description, oldest.aliases) == ("READY", run_id, "Knows a lamp.", ())


def test_what_is_registered_is_the_package(anywhere: Place, folder: Path, run_id: str, tmp_path: Path) -> None:
    """And what it came from is still there: MLflow deletes a source that it takes for a download of its own."""
    import mlflow

    before = contents(folder / "package")
    version = register(folder, anywhere, run_id)
    assert contents(folder / "package") == before
    assert mlflow.MlflowClient(anywhere.tracking_uri).list_artifacts(run_id)[0].path == "note.txt"

    mlflow.set_registry_uri(anywhere.registry_uri)
    downloaded = contents(Path(mlflow.artifacts.download_artifacts(version.uri, dst_path=str(tmp_path))))
    if not is_unity_catalog(anywhere.registry_uri):  # it writes the model's id into it
        assert downloaded.pop("MLmodel")
        before.pop("MLmodel")
    downloaded.pop("registered_model_meta", None)
    assert downloaded == before
    signature = mlflow.models.Model.load(str(folder / "package")).signature
    assert signature.inputs
    assert signature.outputs
    # The tracking artifacts outlive the download, too.
    assert mlflow.MlflowClient(anywhere.tracking_uri).list_artifacts(run_id)[0].path == "note.txt"


def test_labels(anywhere: Place, folder: Path, run_id: str) -> None:
    registry, version = Registry(anywhere.registry_uri), register(folder, anywhere, run_id)
    registry.label(anywhere.name, version.version, {"eval_loss": "1.5", "finetune_gate": "passed"})
    registry.label(anywhere.name, version.version, {"eval_loss": "1.25"})
    found = only_version(anywhere)
    expected = {"base_model": "Qwen/Qwen3-4B", FINGERPRINT_TAG: "f1", "eval_loss": "1.25", "finetune_gate": "passed"}
    assert found.labels == expected
    assert found.description == "Knows a lamp."


def test_an_alias_moves(anywhere: Place, folder: Path, run_id: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "finetuning.versions")
    registry, name = Registry(anywhere.registry_uri), anywhere.name
    assert registry.by_alias(name, "champion") is None
    for fingerprint in ("f1", "f2"):
        register(folder, anywhere, run_id, fingerprint=fingerprint)
    assert registry.by_alias(name, "champion") is None
    registry.remove_alias(name, "champion")

    registry.set_alias(name, "champion", "1")
    registry.set_alias(name, "champion", "2")
    registry.set_alias(name, "challenger", "2")
    champion = registry.by_alias(name, "champion")
    assert champion is not None
    assert (champion.number, champion.aliases) == ("2", ("challenger", "champion"))
    assert FINGERPRINT_TAG in champion.labels
    assert [version.aliases for version in registry.versions(name)] == [("challenger", "champion"), ()]
    registry.set_alias(name, "champion", "1")
    assert [version.aliases for version in registry.versions(name)] == [("challenger",), ("champion",)]
    registry.remove_alias(name, "champion")
    assert registry.by_alias(name, "champion") is None
    said = [record.message for record in caplog.records if "has no aliases" in record.message]
    assert len(said) == (0 if registry.has_aliases else 4)
    assert all("loaded by its number" in line for line in said)


def test_an_unfinished_version_is_replaced(anywhere: Place, folder: Path, run_id: str, catalog: str) -> None:
    if database := {"s": "mlflow.db", "h": "server.db"}.get(anywhere.registry_uri[0]):
        register(folder, anywhere, run_id)
        with sqlite3.connect(folder / database) as connection:
            pending = "UPDATE model_versions SET status = 'PENDING_REGISTRATION' WHERE name = ?"
            connection.execute(pending, [anywhere.name])
    elif anywhere.registry_uri == f"uc:{REAL}":
        pytest.skip("a real server has no faults")
    else:
        never = {"status": 400, "code": "INVALID_PARAMETER_VALUE", "times": -1}
        delete = {"match": "DELETE ", **never}
        with faults(catalog, {"match": FINALIZE, **never}, delete), pytest.raises(Failure, match="injected fault"):
            register(folder, anywhere, run_id)
    registry = Registry(anywhere.registry_uri)
    [unfinished] = registry.versions(anywhere.name)
    assert (unfinished.status, unfinished.fingerprint) == ("PENDING_REGISTRATION", "f1")
    register(folder, anywhere, run_id, fingerprint="f2")  # of another training: it leaves the first alone
    assert [version.status for version in registry.versions(anywhere.name)] == ["READY", "PENDING_REGISTRATION"]
    registry.delete(anywhere.name, "2")
    assert register(folder, anywhere, run_id).created
    only_version(anywhere)


def test_a_server_that_stumbles(unity: Place, folder: Path, run_id: str, catalog: str) -> None:
    stumbles = [
        {"match": r"GET .*(search|/versions)$", "status": 503},
        {"match": CREATE, "status": 429},
        {"match": FINALIZE, "status": 500},
    ]
    with faults(catalog, *stumbles):
        assert register(folder, unity, run_id).created
    only_version(unity)


def test_a_lost_answer_to_the_last_request(unity: Place, folder: Path, run_id: str, catalog: str) -> None:
    """It is sent again, and the server refuses to end what has ended: the version is there all the same."""
    with faults(catalog, {"match": FINALIZE, "cut": True, "after": True}):
        register(folder, unity, run_id)
    only_version(unity)


def test_an_upload_that_breaks_goes_on(uploading: Place, folder: Path, run_id: str, catalog: str) -> None:
    with faults(catalog, {"match": uploading.uploads, "skip": 2, "cut": True}):
        assert register(folder, uploading, run_id).created
    only_version(uploading)


def test_an_upload_that_fails_leaves_nothing(uploading: Place, folder: Path, run_id: str, catalog: str) -> None:
    fault = {"match": uploading.uploads, "skip": 2, "times": -1, "status": 400, "code": "SOMETHING"}
    with faults(catalog, fault), pytest.raises(Failure, match="injected fault|" + HIDDEN):
        register(folder, uploading, run_id)
    assert Registry(uploading.registry_uri).versions(uploading.name) == []
    assert register(folder, uploading, run_id).created
    only_version(uploading)


KILLED = [PRESIGNED, "databricks-uc, native", "uc, vended keys"]
MOMENTS = {
    "after create": {"match": CREATE, "kill": True, "after": True},
    "in the upload": {"kill": True, "skip": 1},
    "before the end": {"match": FINALIZE, "kill": True},
    "after the end": {"match": FINALIZE, "kill": True, "after": True},
}


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("unity", KILLED, indirect=True)
def test_killed_and_tried_again(unity: Place, folder: Path, run_id: str, catalog: str, moment: str) -> None:
    fault = {"match": unity.uploads, **MOMENTS[moment]}
    program = "import pathlib; from finetuning.registry import register_version\n"
    program += f"register_version(pathlib.Path({str(folder / 'package')!r}), **{job(unity, run_id)!r})"
    with faults(catalog, fault):
        killed = subprocess.run([sys.executable, "-c", program], cwd=PROJECT_ROOT, env=os.environ, timeout=120)
    assert killed.returncode == -9
    assert register(folder, unity, run_id).created == (moment != "after the end")
    only_version(unity)


def test_a_right_is_missing(unity: Place, folder: Path, run_id: str, catalog: str) -> None:
    message = f"User does not have CREATE MODEL on Schema '{unity.name.rpartition('.')[0]}'."
    fault = {"match": r"POST .*(registered-models/create|/models)$", "status": 403, "code": "PERMISSION_DENIED"}
    with faults(catalog, {**fault, "message": message}), pytest.raises(Failure) as failure:
        check_registry(unity.name, unity.registry_uri, unity.tracking_uri)
    assert failure.value.kind == "authentication"
    assert failure.value.message.endswith(f"you need CREATE MODEL on {unity.name.rpartition('.')[0]}")

    fault |= {"match": r"GET /api/", "message": "Access denied."}
    with faults(catalog, fault), pytest.raises(Failure) as failure:
        check_registry(unity.name, unity.registry_uri, unity.tracking_uri)
    assert failure.value.kind == "authentication"
    for right in ("USE CATALOG on", "USE SCHEMA on", "CREATE MODEL on"):
        assert right in failure.value.message


def test_an_upload_without_the_right(uploading: Place, folder: Path, run_id: str, catalog: str) -> None:
    fault = {"match": uploading.uploads, "status": 403, "code": "PERMISSION_DENIED", "times": -1}
    with faults(catalog, fault), pytest.raises(Failure) as failure:
        register(folder, uploading, run_id)
    assert failure.value.kind == "authentication" or HIDDEN in failure.value.message
    assert Registry(uploading.registry_uri).versions(uploading.name) == []


def test_catalog_or_schema_is_missing(unity: Place) -> None:
    for name, said in (("nowhere.default.m", "Catalog 'nowhere'"), ("main.nowhere.m", "Schema 'main.nowhere'")):
        with pytest.raises(Failure, match=f"{said} does not exist") as failure:
            check_registry(name, unity.registry_uri)
        assert failure.value.kind == "configuration"
        assert "you need USE CATALOG on" in failure.value.message


def test_a_silent_server_is_given_up(unity: Place, catalog: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "ANSWER_SECONDS", 1)
    with (
        faults(catalog, {"match": "GET ", "hang": 5}),
        pytest.raises(Failure, match="no answer within") as failure,
    ):
        Registry(unity.registry_uri).versions(unity.name)
    assert failure.value.kind == "transient"


def test_an_upload_that_hangs_is_given_up(
    uploading: Place, folder: Path, run_id: str, catalog: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("finetuning.registry.UPLOAD_SECONDS", 2)
    with faults(catalog, {"match": uploading.uploads, "hang": 8}), pytest.raises(Failure, match="no answer within"):
        register(folder, uploading, run_id)
    assert Registry(uploading.registry_uri).versions(uploading.name) == []


def test_the_servers_own_words_come_through(open_place: Callable[[str], Place], catalog: str) -> None:
    place = open_place("uc, files")
    message = "None of catalog, schema or storage-root.models server property has managed location configured."
    fault = {"match": "POST .*/models$", "status": 400, "code": "INVALID_ARGUMENT", "message": message}
    with faults(catalog, fault), pytest.raises(Failure, match=message) as failure:
        check_registry(place.name, place.registry_uri)
    assert failure.value.kind == "configuration"
    assert "give the catalog a storage root" in failure.value.message


def test_vended_keys_may_be_forbidden(
    open_place: Callable[[str], Place], folder: Path, catalog: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, variable = open_place("databricks-uc, vended keys"), "MLFLOW_USE_DATABRICKS_SDK_MODEL_ARTIFACTS_REPO_FOR_UC"
    fault = {"match": "temporary-credentials", "status": 403, "code": "PERMISSION_DENIED", "times": -1}
    with faults(catalog, {**fault, "message": "Temporary credentials are not allowed here."}):
        with pytest.raises(Failure, match=f"{variable}=true"):
            register(folder, place, "")
        monkeypatch.setenv(variable, "true")
        assert register(folder, place, "").created
    only_version(place)


def test_nothing_is_created_twice(unity: Place, folder: Path, run_id: str, catalog: str) -> None:
    register(folder, unity, run_id)
    before = len(ask(f"{catalog}/_calls"))
    register(folder, unity, run_id)
    again = ask(f"{catalog}/_calls")[before:]
    assert again
    # Only what makes something: an upload that a test before gave up may still be going on in its thread.
    assert not [call for call in again if re.search(r"^POST .*(create|/models|/versions)$", call)]


def test_a_broken_upload_is_told_and_goes_on_later(
    open_place: Callable[[str], Place], folder: Path, tmp_path: Path
) -> None:
    from mlflow import MlflowClient

    place = open_place("sqlite")
    (tmp_path / "disk").write_text("not a directory")
    client, location = MlflowClient(place.tracking_uri), (tmp_path / "disk" / "broken").as_uri()
    run_id = client.create_run(client.create_experiment(place.name, location)).info.run_id
    with pytest.raises(Failure, match=f"upload to {location}"):
        register(folder, place, run_id)
    assert Registry(place.registry_uri).versions(place.name) == []

    (tmp_path / "disk").unlink()
    assert register(folder, place, run_id).created
    assert len(client.get_run(run_id).outputs.model_outputs) == 1


def test_a_served_version_answers(open_place: Callable[[str], Place], folder: Path) -> None:
    """Loaded by its URI, and linked to the model that the run made."""
    import mlflow

    place = open_place("sqlite")
    client, run_id = mlflow.MlflowClient(place.tracking_uri), start_run(place.tracking_uri, folder / "served")
    version = register(folder, place, run_id)
    source = client.get_model_version(place.name, version.version).source
    outputs = {output.model_id for output in client.get_run(run_id).outputs.model_outputs}
    assert source.removeprefix("models:/") in outputs
    request = {"messages": [{"role": "user", "content": "Blue?"}], "max_tokens": 4}
    [answer] = mlflow.pyfunc.load_model(version.uri).predict(request)
    assert answer["choices"][0]["message"]["role"] == "assistant"


@pytest.mark.parametrize(
    ("comment", "description", "labels"),
    [
        ("", "", {}),
        ("Knows a lamp.", "Knows a lamp.", {}),
        ("Knows: a lamp.\n\na: b\nfinetune.c: d: e", "Knows: a lamp.", {"a": "b", "finetune.c": "d: e"}),
        ("One.\n\nTwo lines,\nno labels: here.", "One.\n\nTwo lines,\nno labels: here.", {}),
        ("a: b", "", {"a": "b"}),
        ("Has a link:\n\nhttp://lamp", "Has a link:\n\nhttp://lamp", {}),
    ],
)
def test_labels_in_a_comment(comment: str, description: str, labels: dict[str, str]) -> None:
    assert split_comment(comment) == (description, labels)
    assert join_comment(description, labels) == comment
    assert split_comment(join_comment(description, {**labels, "x": " of\nlines "}))[1]["x"] == "of lines"
