"""python -m flows.deploy on a real server, from a checkout whose prefect.yaml is changed between two deploys."""

import os
import shutil
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import httpx
import pytest
import yaml

from bench.servers import prefect_cli
from tests.conftest import PROJECT, Server

NIGHTLY = {
    "slug": "nightly", "cron": "0 3 * * *", "timezone": "Europe/Paris", "parameters": {"gate": {"approval": True}},
}  # fmt: skip


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """With the deployment `it` alone, on a pool of its own."""
    for folder in ("config", "flows", "tasks", "finetuning"):
        shutil.copytree(PROJECT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    write(tmp_path)
    return tmp_path


def write(checkout: Path, **values: Any) -> None:
    file = yaml.safe_load((PROJECT / "prefect.yaml").read_text())
    [smoke] = [deployment for deployment in file["deployments"] if deployment["name"] == "smoke"]
    it = {**smoke, "name": "it", "work_pool": {**smoke["work_pool"], "name": "deploy"}, **values}
    (checkout / "prefect.yaml").write_text(yaml.safe_dump({**file, "deployments": [it]}))


def deploy(checkout: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "flows.deploy", *arguments]
    environment = {**os.environ, **environment}
    return subprocess.run(command, cwd=checkout, env=environment, text=True, capture_output=True, timeout=300)


def test_it_needs_a_server_that_stays(checkout: Path) -> None:
    refused = deploy(checkout)
    assert (refused.returncode, refused.stderr) == (
        2,
        "PREFECT_API_URL is not set: deployments need a server that stays.\n",
    )


def test_every_mistake_is_named_and_nothing_is_deployed(checkout: Path, prefect_server: Server) -> None:
    nightly = {**NIGHTLY, "parameters": {"training": {"max_stesp": 3}}}
    write(checkout, schedules=[nightly], parameters={"training": {"max_steps": 0}})
    refused = deploy(checkout, **prefect_server.environment)
    assert refused.returncode == 2
    assert "deployment it: training.max_steps=0: Input should be greater than or equal to 1" in refused.stderr
    assert "deployment it, schedule nightly: training.max_stesp=3: there is no such key." in refused.stderr
    assert httpx.get(f"{prefect_server.api_url}/deployments/name/finetune/it").status_code == 404


def test_pool_and_job_variables_are_checked_against_the_server(checkout: Path, prefect_server: Server) -> None:
    environment = prefect_server.environment
    write(checkout, work_pool={"name": "deplyo"})
    refused = deploy(checkout, **environment)
    assert refused.returncode == 2
    assert (
        "work_pool.name='deplyo': there is no such pool. Create it: prefect work-pool create deplyo" in refused.stderr
    )

    template = str(PROJECT / "work-pools" / "process.json")
    prefect_cli("work-pool", "create", "deploy", "--type", "process", "--base-job-template", template, **environment)
    write(checkout, work_pool={"name": "deploy", "job_variables": {"stream_ouput": False}})
    refused = deploy(checkout, **environment)
    assert refused.returncode == 2
    assert (
        "job_variables of pool deploy: stream_ouput=False: this key is not used here. Did you mean stream_output?"
        in (refused.stderr)
    )


def test_a_schedule_that_left_the_file_leaves_the_server(checkout: Path, prefect_server: Server) -> None:
    environment = {**prefect_server.environment, "FINETUNE_PROJECT_DIR": "/of/the/deployer"}
    write(checkout, schedules=[NIGHTLY])
    deployed = deploy(checkout, "it", **environment)
    assert deployed.returncode == 0, deployed.stdout + deployed.stderr
    found = httpx.get(f"{prefect_server.api_url}/deployments/name/finetune/it").json()
    [step] = found["pull_steps"]
    assert list(step.values()) == [{"directory": "{{ $FINETUNE_PROJECT_DIR }}"}], "the worker's, not the deployer's"
    end = time.monotonic() + 90
    while not (runs := scheduled(prefect_server, found["id"])) and time.monotonic() < end:
        time.sleep(0.5)
    times = [datetime.fromisoformat(run["expected_start_time"]).astimezone(ZoneInfo("Europe/Paris")) for run in runs]
    assert {(moment.hour, moment.minute) for moment in times} == {(3, 0)}
    assert runs[0]["parameters"]["gate"] == {"approval": True}

    prefect_cli("deployment", "schedule", "create", "finetune/it", "--interval", "86400", "-y", **environment)
    write(checkout)
    deployed = deploy(checkout, "it", **environment)
    assert "finetune/it: removed the schedule nightly, which left prefect.yaml" in deployed.stdout
    found = httpx.get(f"{prefect_server.api_url}/deployments/name/finetune/it").json()
    assert [one["slug"] for one in found["schedules"]] == [None], "what was made by hand stays"
    assert not [run for run in scheduled(prefect_server, found["id"]) if run["parameters"].get("gate")]
    prefect_cli("deployment", "delete", "finetune/it", **environment)


def scheduled(server: Server, deployment_id: str) -> list[dict[str, Any]]:
    wanted = {"deployment_id": {"any_": [deployment_id]}, "state": {"type": {"any_": ["SCHEDULED"]}}}
    return httpx.post(f"{server.api_url}/flow_runs/filter", json={"flow_runs": wanted}).json()
