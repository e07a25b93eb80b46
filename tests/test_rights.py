"""Before a training: can artifacts be written from here, and what is known of the registered model."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.servers import background, free_port, wait_for_http
from finetuning import rights
from finetuning.errors import Failure
from finetuning.registry import Registry
from finetuning.rights import check_artifact_store, right_to_create


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("rights")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[str]:
    """It serves artifacts; an experiment that was made before has a path of its own disk."""
    port = free_port()
    store = ["--backend-store-uri", f"sqlite:///{folder}/server.db", "--artifacts-destination", f"{folder}/server"]
    command = ["mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1", *store]
    with background(command, {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}, folder / "server.log", cwd=folder):
        wait_for_http(f"http://127.0.0.1:{port}/health")
        yield f"http://127.0.0.1:{port}"


@pytest.fixture(params=["sqlite", "mlflow server"])
def uri(request: pytest.FixtureRequest, folder: Path) -> str:
    return f"sqlite:///{folder}/mlflow.db" if request.param == "sqlite" else request.getfixturevalue("server")


def test_the_probe_leaves_nothing(uri: str, folder: Path) -> None:
    from mlflow import MlflowClient

    client = MlflowClient(uri)
    location = (folder / "artifacts").as_uri() if uri.startswith("sqlite") else None
    experiment = client.create_experiment("good", location)
    check_artifact_store("good", uri)
    assert client.search_runs([experiment]) == []
    assert not [path for path in folder.rglob("finetune-probe-*")]


def test_a_place_that_only_the_server_has(uri: str) -> None:
    from mlflow import MlflowClient

    MlflowClient(uri).create_experiment("bad", "file:///proc/nope")
    with pytest.raises(Failure, match=r"go to file:///proc/nope, .*--serve-artifacts") as failure:
        check_artifact_store("bad", uri)
    assert failure.value.kind == "configuration"


def test_a_store_that_hangs_is_given_up(uri: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import time

    from mlflow import MlflowClient

    monkeypatch.setattr(rights, "ANSWER_SECONDS", 2)
    monkeypatch.setattr(rights, "_try", lambda *_: time.sleep(30))
    MlflowClient(uri).create_experiment("silent", (folder / "silent").as_uri())
    with pytest.raises(Failure, match="no answer within 2 seconds"):
        check_artifact_store("silent", uri)


def test_asking_makes_nothing(uri: str) -> None:
    name, registry = "main.default.asked", Registry(uri)
    assert "right to create: not proven" in right_to_create(name, uri)
    assert not registry.has_model(name)
    registry.ensure_model(name)
    assert "it has no version" in right_to_create(name, uri)
    with pytest.raises(Failure, match="it has 2 parts"):
        right_to_create("main.default", uri)
