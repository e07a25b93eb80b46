"""One MLflow run a training, complete and honest, whatever the server does. On a database of its own."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from config.sections import Config
from config.settings import Settings
from finetuning import tracking
from finetuning.artifacts import read_json, write_json
from finetuning.errors import Failure
from tests.conftest import PROJECT


@pytest.fixture
def facts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tracking.RunFacts]:
    import mlflow

    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    before = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri(uri)
    yield tracking.RunFacts(
        training_id="t1",
        experiment_name="experiment",
        artifact_location=(tmp_path / "artifacts").as_uri(),
        run_name="run",
        config=Config().model_dump(),
        origins={},
        tags={},
        dataset_name="sample",
        dataset_digest="0",
        dataset_path="/data",
    )
    mlflow.set_tracking_uri(before)


def read(run_id: str):
    from mlflow import MlflowClient

    return MlflowClient().get_run(run_id)


def test_a_training_has_one_run_even_if_it_forgot_it(facts: tracking.RunFacts) -> None:
    run_id = tracking.open_run(facts)
    assert tracking.open_run(facts) == run_id
    assert tracking.open_run(facts.model_copy(update={"training_id": "t2"})) != run_id
    assert read(run_id).info.status == "RUNNING"


def test_what_a_killed_process_left_out_is_added(facts: tracking.RunFacts) -> None:
    from mlflow import MlflowClient

    experiment = tracking.ensure_experiment(facts.experiment_name, facts.artifact_location)
    bare = MlflowClient().create_run(experiment, tags={tracking.TRAINING_TAG: "t1"}).info.run_id
    assert tracking.open_run(facts) == bare
    assert read(bare).data.params["training.max_steps"] == "50"
    assert read(bare).inputs.dataset_inputs


def test_a_long_value_loses_no_other(facts: tracking.RunFacts) -> None:
    facts.config["training"]["optim_args"] = "x" * 7000
    params = read(tracking.open_run(facts)).data.params
    assert len(params["training.optim_args"]) >= 500
    assert params["training.learning_rate"] == "2e-05"


def test_settling_adds_what_is_missing_and_nothing_twice(facts: tracking.RunFacts) -> None:
    from mlflow import MlflowClient

    run_id = tracking.open_run(facts)
    MlflowClient().log_metric(run_id, "loss", 3.0, step=1)
    tracking.end(run_id, "KILLED")
    history = [{"loss": 3.0, "step": 1}, {"loss": 2.0, "step": 2}, {"eval_loss": 2.5, "step": 2}]
    assert tracking.settle(facts, run_id, history) == run_id
    assert tracking.settle(facts, run_id, history) == run_id
    logged = [(metric.step, metric.value) for metric in MlflowClient().get_metric_history(run_id, "loss")]
    assert logged == [(1, 3.0), (2, 2.0)]
    assert read(run_id).data.metrics["eval_loss"] == 2.5
    assert read(run_id).info.status == "FINISHED"


def test_a_run_that_was_never_opened_is_made_afterwards(facts: tracking.RunFacts) -> None:
    run_id = tracking.settle(facts, None, [{"loss": 1.0, "step": 1}])
    assert run_id
    assert read(run_id).data.metrics == {"loss": 1.0}
    assert read(run_id).data.params["model.name"] == "Qwen/Qwen3-4B"


def test_only_what_still_runs_is_closed(facts: tracking.RunFacts) -> None:
    run_id = tracking.open_run(facts)
    tracking.end(run_id, "FINISHED")
    tracking.end(run_id, "KILLED", only_running=True)
    assert read(run_id).info.status == "FINISHED"


def test_a_deleted_run_is_noticed(facts: tracking.RunFacts) -> None:
    from mlflow import MlflowClient

    run_id = tracking.open_run(facts)
    assert not tracking.is_deleted(run_id)
    MlflowClient().delete_run(run_id)
    assert tracking.is_deleted(run_id)
    assert tracking.is_deleted("0" * 32)
    assert tracking.open_run(facts) != run_id


def test_a_deleted_experiment_is_told_with_the_remedy(facts: tracking.RunFacts) -> None:
    from mlflow import MlflowClient

    experiment = tracking.ensure_experiment("experiment", None)
    MlflowClient().delete_experiment(experiment)
    with pytest.raises(Exception, match=rf"mlflow experiments restore --experiment-id {experiment}"):
        tracking.ensure_experiment("experiment", None)


def test_a_server_that_is_away(facts: tracking.RunFacts, monkeypatch: pytest.MonkeyPatch) -> None:
    import mlflow

    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    mlflow.set_tracking_uri("http://127.0.0.1:9")
    with pytest.raises(Failure, match=r"http://127.0.0.1:9 cannot be used.*FINETUNE_TRACKING_REQUIRED=false") as away:
        tracking.open_or_postpone(facts)
    assert away.value.kind == "transient"
    monkeypatch.setenv("FINETUNE_TRACKING_REQUIRED", "false")
    assert Settings().tracking_required is False
    assert tracking.open_or_postpone(facts) is None
    assert tracking.settle(facts, None, []) is None
    assert tracking.read_history("1") == {}


def test_two_first_runs_make_one_database(tmp_path: Path) -> None:
    """MLflow makes the tables without a lock: without ours one of the two finds them half made."""
    environment = {**os.environ, "MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/new.db", "MLFLOW_REGISTRY_URI": ""}
    processes = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        write_json(tmp_path / name / "job.json", {"config": {}})
        command = [sys.executable, "-m", "finetuning.preflight", str(tmp_path / name / "job.json")]
        processes.append(subprocess.Popen(command, cwd=PROJECT, env=environment, stdout=subprocess.DEVNULL))
    for process in processes:
        process.wait(timeout=120)
    assert [read_json(tmp_path / name / "result.json")["status"] for name in ("first", "second")] == ["done", "done"]
