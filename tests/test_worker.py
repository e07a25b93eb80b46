"""With a real server and a real worker: `prefect deployment run finetune/smoke` and `finetune/qwen3-4b`."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from bench.servers import background, prefect_cli
from bench.triggers import as_the_form_sends
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
        template = ("--type", "process", "--base-job-template", "work-pools/process.json")
        prefect_cli("work-pool", "create", pool, *template, **prefect_server.environment)
    environment = {**os.environ, **prefect_server.environment}
    command = [sys.executable, "-m", "flows.deploy"]
    deployed = subprocess.run(command, cwd=elsewhere, env=environment, text=True, capture_output=True)
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
    assert run["name"].startswith("model full fine-tuning on chat: "), run["name"]
    assert "step 4 of 4" in run["logs"], "the trainer's log lines are in the Prefect log"
    assert progress_artifact(worker, run["id"]) == 100.0


QWEN3_4B = {
    "model": {"name": str(PROJECT / "samples" / "model")},
    "dataset": {"name": str(PROJECT / "samples" / "chat")},
    "training": {"max_steps": 3},
    "registry": {"allow_local": True},
}
"""What finetune/qwen3-4b is overridden with to run on a CPU."""


def check_configuration(place: Place, run_id: str) -> None:
    """The recipe's values, and of them only ours overridden."""
    resolved = read_json(place.root / "runs" / f"{run_id}.json")
    assert flatten(resolved["config"]) == flatten(Config().model_dump()) | flatten(QWEN3_4B)
    assert {name for name, origin in resolved["origins"].items() if origin == "given"} == set(flatten(QWEN3_4B))


def test_qwen3_4b_with_one_value_of_a_section_overridden(worker: Server, place: Place) -> None:
    words = [f"{section}={json.dumps(values)}" for section, values in QWEN3_4B.items()]
    run = trigger(worker, "finetune/qwen3-4b", *words)
    assert run["state"]["type"] == "COMPLETED", run["logs"]
    assert "registered as main.default.qwen3_4b_assistant version 1" in run["state"]["message"]
    check_configuration(place, run["id"])


def test_two_at_once_as_the_form_of_the_ui_sends_them(worker: Server, place: Place) -> None:
    """The form sends every value that it shows. They wait for each other and find the work of the run before."""
    deployment = httpx.get(f"{worker.api_url}/deployments/name/finetune/qwen3-4b").json()
    url = f"{worker.api_url}/deployments/{deployment['id']}/create_flow_run"
    ids = [httpx.post(url, json=as_the_form_sends(QWEN3_4B)).raise_for_status().json()["id"] for _ in range(2)]
    runs = sorted((ended(worker, run_id) for run_id in ids), key=lambda run: run["start_time"])
    for run in runs:
        assert run["state"]["name"] == "Completed", run["state"]
        assert "main.default.qwen3_4b_assistant version 1" in run["state"]["message"]
        check_configuration(place, run["id"])
    assert runs[0]["end_time"] <= runs[1]["start_time"]


def ended(server: Server, run_id: str) -> dict[str, Any]:
    end = time.monotonic() + 300
    while time.monotonic() < end:
        run = httpx.get(f"{server.api_url}/flow_runs/{run_id}").json()
        if run["state"]["type"] in ("COMPLETED", "FAILED", "CRASHED", "CANCELLED"):
            return run
        time.sleep(0.5)
    raise TimeoutError(f"flow run is {run['state']}")


@pytest.fixture
def paused(worker: Server) -> Iterator[Server]:
    """Runs are made and nobody takes them."""
    httpx.patch(f"{worker.api_url}/work_pools/h100", json={"is_paused": True}).raise_for_status()
    yield worker
    for run in scheduled(worker):
        httpx.delete(f"{worker.api_url}/flow_runs/{run['id']}").raise_for_status()
    httpx.patch(f"{worker.api_url}/work_pools/h100", json={"is_paused": False}).raise_for_status()


def scheduled(server: Server) -> list[dict[str, Any]]:
    """Runs of ours that wait; other tests leave some of theirs on the server."""
    body = {"flow_runs": {"state": {"type": {"any_": ["SCHEDULED"]}}}, "flows": {"name": {"any_": ["finetune"]}}}
    return httpx.post(f"{server.api_url}/flow_runs/filter", json=body).json()


def test_new_data_starts_a_run_once_the_trigger_is_on(paused: Server) -> None:
    body = {"automations": {"name": {"any_": ["finetune-qwen3-4b-on-new-data"]}}}
    [automation] = httpx.post(f"{paused.api_url}/automations/filter", json=body).json()
    assert automation["enabled"] is False
    url = f"{paused.api_url}/automations/{automation['id']}"
    httpx.patch(url, json={"enabled": True}).raise_for_status()
    emit = ("event", "emit", "finetune.dataset.updated", "--resource-id")
    prefect_cli(*emit, "finetune.dataset.somebody/else", **paused.environment)
    prefect_cli(*emit, "finetune.dataset.trl-lib/Capybara", **paused.environment)
    end = time.monotonic() + 60
    while not (runs := scheduled(paused)) and time.monotonic() < end:
        time.sleep(0.3)
    [run] = runs
    assert run["created_by"]["type"] == "AUTOMATION"
    assert run["deployment_id"] == automation["actions"][0]["deployment_id"]
    httpx.patch(url, json={"enabled": False}).raise_for_status()


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
    body = {"artifacts": {"flow_run_id": {"any_": [flow_run_id]}, "type": {"any_": ["progress"]}}}
    [artifact] = httpx.post(f"{server.api_url}/artifacts/filter", json=body).json()
    return artifact["data"]
