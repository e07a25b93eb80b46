"""One version however often it is tried, against a real database and a real `mlflow server`."""

import socket
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.servers import background, free_port, wait_for_http
from finetuning import registry
from finetuning.errors import Failure
from finetuning.packaging import CHAT_TASK, package_model
from finetuning.registry import FINGERPRINT_TAG, RegisteredVersion, check_registry, is_unity_catalog, register_version
from tests.test_packaging import METADATA, make_model_directory

NAME = "main.default.lamp"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`package` of a tiny model, and what databases and servers write."""
    folder = tmp_path_factory.mktemp("registry")
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
def database(folder: Path) -> str:
    return f"sqlite:///{folder}/mlflow.db"


@pytest.fixture(params=["database", "server"])
def uri(request: pytest.FixtureRequest) -> str:
    return request.getfixturevalue(request.param)


def start_run(uri: str, artifact_location: Path) -> str:
    from mlflow import MlflowClient

    client = MlflowClient(uri)
    location = artifact_location.as_uri() if uri.startswith("sqlite") else None
    return client.create_run(client.create_experiment(artifact_location.name, location)).info.run_id


def register(folder: Path, uri: str, run_id: str, **changes: Any) -> RegisteredVersion:
    job = {"name": NAME, "run_id": run_id, "fingerprint": "f1", "tracking_uri": uri, "registry_uri": uri}
    job |= {"tags": {"recipe": "tiny"}, "description": "Knows a lamp.", **changes}
    return register_version(folder / "package", **job)


def test_one_version_a_fingerprint(uri: str, folder: Path) -> None:
    import mlflow

    run_id = start_run(uri, folder / "one")
    first, second = register(folder, uri, run_id), register(folder, uri, run_id)
    assert first == RegisteredVersion(NAME, "1", f"models:/{NAME}/1", created=True)
    assert second == first._replace(created=False)
    assert register(folder, uri, run_id, fingerprint="f2").version == "2"

    client = mlflow.MlflowClient(uri)
    version = client.get_model_version(NAME, "1")
    assert (version.status, version.run_id, version.description) == ("READY", run_id, "Knows a lamp.")
    assert version.tags == {"recipe": "tiny", FINGERPRINT_TAG: "f1"}
    outputs = {output.model_id for output in client.get_run(run_id).outputs.model_outputs}
    assert version.source.removeprefix("models:/") in outputs
    request = {"messages": [{"role": "user", "content": "Blue?"}], "max_tokens": 4}
    [answer] = mlflow.pyfunc.load_model(first.uri).predict(request)
    assert answer["choices"][0]["message"]["role"] == "assistant"


def test_an_unfinished_version_is_replaced(database: str, folder: Path) -> None:
    from mlflow import MlflowClient

    run_id, name = start_run(database, folder / "unfinished"), "main.default.unfinished"
    register(folder, database, run_id, name=name)
    with sqlite3.connect(folder / "mlflow.db") as connection:
        connection.execute("UPDATE model_versions SET status = 'PENDING_REGISTRATION' WHERE name = ?", [name])
    assert register(folder, database, run_id, name=name).created
    [version] = MlflowClient(database).search_model_versions(f"name = '{name}'")
    assert version.status == "READY"


def test_a_broken_upload_is_told_and_goes_on_later(database: str, folder: Path) -> None:
    from mlflow import MlflowClient

    (folder / "disk").write_text("not a directory")
    run_id, name = start_run(database, folder / "disk" / "broken"), "main.default.broken"
    with pytest.raises(Failure) as failure:
        register(folder, database, run_id, name=name)
    assert f"upload to {(folder / 'disk' / 'broken').as_uri()}" in failure.value.message
    client = MlflowClient(database)
    assert client.search_model_versions(f"name = '{name}'") == []

    (folder / "disk").unlink()
    assert register(folder, database, run_id, name=name).created
    assert len(client.get_run(run_id).outputs.model_outputs) == 1


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("main.default", "it has 2 parts"),
        ("main.default.a.b", "it has 4 parts"),
        ("main..m", "the part '' is not of letters"),
        ("main.default.a b", "the part 'a b' is not of letters"),
        ("main.default/x.m", "the part 'default/x' is not of letters"),
    ],
)
def test_a_bad_name_is_refused(database: str, name: str, said: str) -> None:
    with pytest.raises(Failure) as failure:
        check_registry(name, database)
    assert said in failure.value.message
    assert failure.value.kind == "configuration"


def test_the_check_makes_the_registered_model(database: str) -> None:
    from mlflow import MlflowClient

    for _ in range(2):
        check_registry("main.default.checked", database)
    assert MlflowClient(database).get_registered_model("main.default.checked")


def test_a_server_registers_only_what_was_logged_to_it(database: str, folder: Path) -> None:
    with pytest.raises(Failure, match="registers only models logged to itself"):
        register(folder, database, "a" * 32, registry_uri="http://127.0.0.1:9")


@pytest.mark.parametrize("registry_uri", ["http://user:secret@127.0.0.1:9", "uc:http://user:secret@127.0.0.1:9"])
def test_a_dead_registry_is_worth_another_try(registry_uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.raises(Failure, match=r"127\.0\.0\.1") as failure:
        check_registry(NAME, registry_uri)
    assert failure.value.kind == "transient"
    assert "secret" not in failure.value.message


def test_a_silent_registry_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "ANSWER_SECONDS", 1)
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(Failure, match="no answer within 1 seconds"):
        check_registry(NAME, f"uc:http://127.0.0.1:{silent.getsockname()[1]}")


def test_which_registries_are_unity_catalogs() -> None:
    assert [is_unity_catalog(uri) for uri in ("databricks-uc", "databricks-uc://profile", "uc:http://host")] == [
        True
    ] * 3
    assert [is_unity_catalog(uri) for uri in ("sqlite:///uc.db", "http://host", "databricks")] == [False] * 3
