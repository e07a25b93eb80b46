"""What is refused, and given up, before anything is registered; what is registered is in `test_registries`."""

import socket
from pathlib import Path

import pytest

from finetuning import versions
from finetuning.errors import Failure
from finetuning.registry import check_registry, is_unity_catalog

NAME = "main.default.lamp"


@pytest.fixture
def database(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/mlflow.db"


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
    for _ in range(2):
        check_registry("main.default.checked", database)
    assert versions.Registry(database).has_model("main.default.checked")


def test_a_server_registers_only_what_was_logged_to_it(database: str) -> None:
    for tracking_uri in (database, "http://127.0.0.1:10"):
        with pytest.raises(Failure, match="registers only models logged to itself") as failure:
            check_registry(NAME, "http://127.0.0.1:9", tracking_uri)
        assert failure.value.kind == "configuration"


@pytest.mark.parametrize("registry_uri", ["http://user:secret@127.0.0.1:9", "uc:http://user:secret@127.0.0.1:9"])
def test_a_dead_registry_is_worth_another_try(registry_uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.raises(Failure, match=r"127\.0\.0\.1") as failure:
        check_registry(NAME, registry_uri)
    assert failure.value.kind == "transient"
    assert "secret" not in failure.value.message


def test_a_silent_registry_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "ANSWER_SECONDS", 1)
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(Failure, match="no answer within 1 seconds"):
        check_registry(NAME, f"uc:http://127.0.0.1:{silent.getsockname()[1]}")


def test_which_registries_are_unity_catalogs() -> None:
    assert [is_unity_catalog(uri) for uri in ("databricks-uc", "databricks-uc://profile", "uc:http://host")] == [
        True
    ] * 3
    assert [is_unity_catalog(uri) for uri in ("sqlite:///uc.db", "http://host", "databricks")] == [False] * 3
