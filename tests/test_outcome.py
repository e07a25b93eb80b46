"""When a run has nothing to do, and when it has after all."""

from pathlib import Path

import pytest
from mlflow import MlflowClient

from config.sections import Config
from config.settings import Settings
from finetuning.artifacts import write_json
from finetuning.outcome import Outcome, is_there, outcome_fingerprint, outcome_path, read_outcome, write_outcome
from finetuning.registry import Registry
from finetuning.versions import FINGERPRINT_TAG

NAME, DIRECTORY = "main.default.outcome", "0123456789abcdef"


@pytest.fixture(scope="module")
def registry_uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"sqlite:///{tmp_path_factory.mktemp('outcome')}/mlflow.db"


@pytest.fixture
def outcome(registry_uri: str, tmp_path: Path) -> Outcome:
    """Of a version that was just registered."""
    client = MlflowClient(registry_uri, registry_uri)
    if not client.search_registered_models():
        client.create_registered_model(NAME)
    version = client.create_model_version(NAME, str(tmp_path), tags={FINGERPRINT_TAG: DIRECTORY}).version
    return Outcome(
        name=NAME,
        version=str(version),
        model_directory=DIRECTORY,
        verdict="champion",
        published=tmp_path,
        mlflow_run_id="run",
        flow_run_id="flow",
    )


def test_a_version_that_the_registry_has_is_there(outcome: Outcome, registry_uri: str) -> None:
    assert is_there(outcome, Registry(registry_uri))


def test_one_that_was_deleted_or_is_another_is_not(outcome: Outcome, registry_uri: str) -> None:
    versions = Registry(registry_uri)
    assert not is_there(outcome.model_copy(update={"model_directory": "f" * 16}), versions)
    assert not is_there(outcome.model_copy(update={"name": "main.default.nobody"}), versions)
    MlflowClient(registry_uri, registry_uri).delete_model_version(NAME, outcome.version)
    assert not is_there(outcome, versions)


def test_what_decides_about_the_result_decides_what_is_the_same() -> None:
    config, settings = Config(), Settings()
    same = outcome_fingerprint(config, "training", settings)
    assert outcome_fingerprint(config.model_copy(update={"run": config.run}), "training", settings) == same
    others = [
        outcome_fingerprint(config, "another training", settings),
        outcome_fingerprint(config, "training", settings.model_copy(update={"mlflow_registry_uri": "databricks-uc"})),
    ]
    for section, values in (
        ("registry", {"model_name": "another"}),
        ("gate", {"better_than": "none"}),
        ("evaluation", {"loss_rows": 3}),
    ):
        changed = getattr(config, section).model_copy(update=values)
        others.append(outcome_fingerprint(config.model_copy(update={section: changed}), "training", settings))
    assert len({same, *others}) == 1 + len(others)


def test_a_file_that_cannot_be_read_is_no_outcome(outcome: Outcome) -> None:
    identity = "outcome-of-a-test"
    assert read_outcome(identity) is None
    write_outcome(identity, outcome)
    assert read_outcome(identity) == outcome
    write_json(outcome_path(identity), {"name": NAME})
    assert read_outcome(identity) is None
