"""Prepared data and models are made once for each content, option and version, and a cached one that is gone is a miss.

The real tasks on a real Prefect server. Trainings and versions have no cache of Prefect's: see test_flow and
test_training for those.
"""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from config.sections import DatasetSection, ModelSection
from finetuning.artifacts import read_manifest
from finetuning.inputs import identify
from tests.conftest import PROJECT, Server
from tests.test_data import ROWS, conversation, write_jsonl

Made = Callable[..., tuple[str, Path]]


@pytest.fixture(scope="module", autouse=True)
def api(prefect_server: Server) -> Iterator[None]:
    from prefect.settings import PREFECT_API_URL, PREFECT_LOGGING_TO_API_ENABLED, temporary_settings

    with temporary_settings({PREFECT_API_URL: prefect_server.api_url, PREFECT_LOGGING_TO_API_ENABLED: False}):
        yield


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / f"{tmp_path.name}.jsonl", ROWS)  # the name counts: each test has its own


def dataset(rows: Path, refresh: str | None = None, **options: object) -> tuple[str, Path]:
    """Name of the task's state, and where the artifact is."""
    from tasks.data import load_and_split

    section = DatasetSection(name=str(rows), **options)
    state = load_and_split(section, identify("dataset", str(rows), "main", refresh), return_state=True)
    return state.name, state.result().path


def model(base: Path) -> tuple[str, Path]:
    from tasks.model import prepare_model

    state = prepare_model(ModelSection(name=str(base)), identify("model", str(base), "main"), return_state=True)
    return state.name, state.result().path


def test_the_same_rows_are_prepared_once(rows: Path) -> None:
    first, again = dataset(rows), dataset(rows)
    assert (first[0], again[0]) == ("Completed", "Cached")
    rows.touch()
    assert dataset(rows) == again


def test_other_content_options_versions_and_a_refresh_are_other_data(
    rows: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = [dataset(rows), dataset(rows, split_seed=1), dataset(rows, refresh="a flow run's id")]
    write_jsonl(rows, [*ROWS[:-1], conversation(99)])
    made.append(dataset(rows))
    monkeypatch.setattr("tasks.data.DATA_VERSION", "another")
    made.append(dataset(rows))
    assert {name for name, _ in made} == {"Completed"}
    assert len({path for _, path in made}) == len(made)


@pytest.mark.parametrize(
    "damage",
    [shutil.rmtree, lambda path: (path / "manifest.json").unlink(), lambda path: os.truncate(path / "train.jsonl", 9)],
    ids=["deleted", "no manifest", "cut short"],
)
def test_an_artifact_that_is_not_whole_is_made_again(rows: Path, damage: Callable[[Path], object]) -> None:
    _, path = dataset(rows)
    damage(path)
    assert dataset(rows) == ("Completed", path)
    assert read_manifest(path)
    assert dataset(rows) == ("Cached", path)


def test_a_model_with_another_template_is_another_model(tmp_path: Path) -> None:
    base = tmp_path / "base"
    shutil.copytree(PROJECT / "samples" / "model", base)
    made = [model(base), model(base)]
    assert [name for name, _ in made] == ["Completed", "Cached"]
    [template] = base.glob("chat_template.jinja")
    template.write_text(template.read_text() + "\n")
    assert model(base)[0] == "Completed"
    shutil.rmtree(base)
    shutil.copytree(PROJECT / "samples" / "model", base)
    assert model(base) == ("Cached", made[0][1])
