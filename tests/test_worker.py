"""With a real server and a real worker: `prefect deployment run finetune/smoke` and `finetune/qwen3-4b`."""

import json
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from bench.servers import background, prefect_cli
from config.recipes import flatten
from config.sections import Config
from finetuning.artifacts import read_json
from tests.conftest import PROJECT, Place, Server

POOLS = ("h100", "cpu")


@pytest.fixture(scope="module")
def worker(prefect_server: Server, place: Place, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Deployed from another checkout than the worker's, which it then no longer finds: only the worker's counts."""
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "checkout"
    ignored = shutil.ignore_patterns(".git", ".venv", "__pycache__")
    shutil.copytree(PROJECT, elsewhere, ignore=ignored)
    for pool in POOLS:
        prefect_cli("work-pool", "create", pool, "--type", "process", **prefect_server.environment)
    deployed = prefect_cli("--no-prompt", "deploy", "--all", cwd=elsewhere, **prefect_server.environment)
    assert deployed.returncode == 0, deployed.stdout + deployed.stderr
    shutil.rmtree(elsewhere)
    environment = {**prefect_server.environment, "FINETUNE_PROJECT_DIR": str(PROJECT)}
    home = tmp_path_factory.mktemp("worker")
    workers = [["prefect", "worker", "start", "--pool", pool, "--type", "process", "--limit", "1"] for pool in POOLS]
    with (
        background(workers[0], environment, home / "h100.txt", cwd=home),
        background(workers[1], environment, home / "cpu.txt", cwd=home),
    ):
        yield prefect_server


def trigger(server: Server, deployment: str, *parameters: str) -> dict[str, Any]:
    """`prefect deployment run --watch`, and the flow run it made."""
    import httpx

    arguments = [word for parameter in parameters for word in ("--param", parameter)]
    result = prefect_cli("deployment", "run", deployment, "--watch", *arguments, **server.environment)
    body = {"sort": "START_TIME_DESC", "limit": 1}
    [run] = httpx.post(f"{server.api_url}/flow_runs/filter", json=body).json()
    logs = httpx.post(f"{server.api_url}/logs/filter", json={"logs": {"flow_run_id": {"any_": [run["id"]]}}}).json()
    run["logs"] = "\n".join(entry["message"] for entry in logs)
    assert (result.returncode == 0) == (run["state"]["type"] == "COMPLETED"), (
        result.stdout + result.stderr + run["logs"]
    )
    return run


def test_smoke(worker: Server, place: Place) -> None:
    run = trigger(worker, "finetune/smoke", 'training={"max_steps": 4, "eval_steps": 2, "save_steps": 2}')
    assert run["state"]["type"] == "COMPLETED"
    assert "registered as main.default.smoke version" in run["state"]["message"]
    assert "step 4 of 4" in run["logs"], "the trainer's log lines are in the Prefect log"
    assert progress_artifact(worker, run["id"]) == 100.0


def test_qwen3_4b_with_one_value_of_a_section_overridden(worker: Server, place: Place) -> None:
    run = trigger(
        worker,
        "finetune/qwen3-4b",
        f"model={json.dumps({'name': str(PROJECT / 'samples' / 'model')})}",
        f"dataset={json.dumps({'name': str(PROJECT / 'samples' / 'chat')})}",
        'training={"max_steps": 3}',
        'registry={"allow_local": true}',
    )
    assert run["state"]["type"] == "COMPLETED", run["logs"]
    assert "registered as main.default.qwen3_4b_assistant version 1" in run["state"]["message"]
    resolved = read_json(place.root / "runs" / f"{run['id']}.json")
    expected = flatten(Config().model_dump()) | {
        "model.name": str(PROJECT / "samples" / "model"),
        "dataset.name": str(PROJECT / "samples" / "chat"),
        "training.max_steps": 3,
        "registry.allow_local": True,
    }
    assert flatten(resolved["config"]) == expected
    given = {name for name, origin in resolved["origins"].items() if origin == "given"}
    assert given == {"model.name", "dataset.name", "training.max_steps", "registry.allow_local"}


def test_wrong_parameters_are_refused_at_the_trigger(worker: Server) -> None:
    """By Prefect's own schema check: no flow run is made."""
    for parameter, reason in (
        ('training={"max_stesp": 3}', "max_stesp"),
        ('training={"max_steps": 0}', "0 is less than the minimum of 1"),
        ('training={"precision": "float8"}', "float8"),
        ('trainig={"max_steps": 3}', "trainig"),
    ):
        result = prefect_cli("deployment", "run", "finetune/qwen3-4b", "--param", parameter, **worker.environment)
        assert result.returncode == 1
        assert reason in result.stdout + result.stderr


def test_the_form_is_complete(worker: Server) -> None:
    """Title, help, bounds and choices reach the Prefect UI, with the deployment's values filled in."""
    import httpx

    deployment = httpx.get(f"{worker.api_url}/deployments/name/finetune/smoke").json()
    schema = deployment["parameter_openapi_schema"]
    assert list(schema["properties"]) == ["model", "dataset", "training", "registry", "evaluation", "gate", "run"]
    steps = schema["definitions"]["TrainingSection"]["properties"]["max_steps"]
    assert (steps["title"], steps["minimum"], steps["description"]) == (
        "Optimizer steps",
        1,
        "Optimizer steps to train.",
    )
    assert schema["definitions"]["TrainingSection"]["properties"]["precision"]["enum"] == [
        "fp32",
        "bf16_stochastic_rounding",
        "bf16",
    ]
    assert schema["definitions"]["ModelSection"]["additionalProperties"] is False
    assert deployment["parameters"]["model"]["name"] == "samples/model"


def progress_artifact(server: Server, flow_run_id: str) -> float:
    import httpx

    body = {"artifacts": {"flow_run_id": {"any_": [flow_run_id]}, "type": {"any_": ["progress"]}}}
    [artifact] = httpx.post(f"{server.api_url}/artifacts/filter", json=body).json()
    return artifact["data"]
