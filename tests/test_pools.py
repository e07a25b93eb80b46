"""work-pools/: what a container and a Kubernetes job come to, made by the workers' own code from the deployment."""

import asyncio
import copy
import json
import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import docker.models.containers
import httpx
import pytest
import yaml
from docker import DockerClient
from kubernetes_asyncio.client import ApiClient, V1Job
from prefect.blocks.system import Secret
from prefect.client.orchestration import get_client
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.workers.process import ProcessJobConfiguration
from prefect_docker.worker import DockerWorker, DockerWorkerJobConfiguration
from prefect_kubernetes.worker import KubernetesWorkerJobConfiguration

from bench.servers import prefect_cli
from config.settings import Settings
from tests.conftest import PROJECT, Server

KINDS: dict[str, Any] = {
    "process": ProcessJobConfiguration,
    "docker": DockerWorkerJobConfiguration,
    "kubernetes": KubernetesWorkerJobConfiguration,
}
TEMPLATES = {kind: json.loads((PROJECT / "work-pools" / f"{kind}.json").read_text()) for kind in KINDS}
DEPLOYMENTS = yaml.safe_load((PROJECT / "prefect.yaml").read_text())["deployments"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_template_uses_every_variable_that_it_offers(kind: str) -> None:
    """Prefect ignores the value of a variable that is nowhere in the job's configuration."""
    template = TEMPLATES[kind]
    used = set(re.findall(r"{{ (\w+) }}", json.dumps(template["job_configuration"])))
    assert used == set(template["variables"]["properties"])
    assert set(template["job_configuration"]) <= set(KINDS[kind].model_fields)


@pytest.mark.parametrize("kind", KINDS)
def test_every_job_variable_of_a_deployment_is_one_of_the_pool(kind: str) -> None:
    for deployment in DEPLOYMENTS:
        assert set(deployment["work_pool"]["job_variables"]) <= set(TEMPLATES[kind]["variables"]["properties"])


@pytest.fixture(scope="module")
def pools(prefect_server: Server) -> Iterator[str]:
    """A pool of each kind on a real server, and qwen3-4b, deployed as it is to the last of them."""
    environment = prefect_server.environment
    for kind in KINDS:
        made = prefect_cli(
            *("work-pool", "create", f"as-{kind}", "--type", kind),
            *("--base-job-template", f"work-pools/{kind}.json"),
            **environment,
        )
        assert made.returncode == 0, made.stdout + made.stderr
    deployed = prefect_cli("--no-prompt", "deploy", "--name", "qwen3-4b", "--pool", "as-kubernetes", **environment)
    assert deployed.returncode == 0, deployed.stdout + deployed.stderr
    yield prefect_server.api_url
    for kind in KINDS:
        prefect_cli("--no-prompt", "work-pool", "delete", f"as-{kind}", **environment)


def configuration(api_url: str, kind: str, job_variables: dict[str, Any]) -> Any:
    """What the pool's worker would start for a run of finetune/qwen3-4b with these job variables."""

    async def resolve() -> Any:
        async with get_client() as client:
            pool = await client.read_work_pool(f"as-{kind}")
            deployment = await client.read_deployment_by_name("finetune/qwen3-4b")
            run = await client.create_flow_run_from_deployment(deployment.id, job_variables=job_variables)
            # Read again: what a worker gets are the values as the server keeps them.
            run = await client.read_flow_run(run.id)
            found = await KINDS[kind].resolve_for_flow_run(
                run, client=client, work_pool=pool, worker_name="worker", deployment=deployment
            )
            await client.delete_flow_run(run.id)
            return found

    with temporary_settings({PREFECT_API_URL: api_url}):
        return asyncio.run(resolve())


AWAY = {"PREFECT_API_URL": "http://prefect.internal:4200/api"}
"""So that Docker's worker does not ask a daemon how a container reaches the own host."""


def container(found: DockerWorkerJobConfiguration) -> dict[str, Any]:
    """The body of the request that Docker's client would send to make the container."""
    client = DockerClient(base_url="unix:///nowhere", version="1.41")
    settings = DockerWorker(work_pool_name="as-docker")._build_container_settings(client, found)
    arguments = docker.models.containers._create_container_args({**settings, "version": "1.41"})
    arguments["host_config"] = dict(arguments["host_config"])
    return arguments


def test_process(pools: str) -> None:
    found = configuration(pools, "process", {})
    assert found.stream_output is False
    assert found.env["PREFECT_FLOWS_HEARTBEAT_FREQUENCY"] == "30"
    assert found.command.endswith("-m prefect.engine")


def test_docker(pools: str) -> None:
    made = container(configuration(pools, "docker", {"env": AWAY}))
    host = made["host_config"]
    assert made["image"] == "finetune:latest"
    assert made["user"] == "10001:10001"
    assert host["DeviceRequests"] == [
        {"Driver": "nvidia", "Count": 1, "DeviceIDs": [], "Capabilities": [["gpu"]], "Options": {}}
    ]
    assert (host["ShmSize"], host["ReadonlyRootfs"], host["Init"]) == (8 * 2**30, True, True)
    assert host["Binds"] == ["/srv/finetune:/data", "/etc/finetune/env:/app/.env:ro"]
    assert (host["CapDrop"], host["SecurityOpt"], host["Tmpfs"]) == (
        ["ALL"],
        ["no-new-privileges"],
        {"/tmp": "mode=1777"},
    )
    assert not host.get("Privileged")
    assert not host.get("AutoRemove")
    environment = made["environment"]
    assert environment["PREFECT_FLOWS_HEARTBEAT_FREQUENCY"] == "30", "the deployment's, beside the pool's own"
    assert environment["PREFECT_FLOW_RUN_EXECUTE_SIGTERM_BEHAVIOR"] == "reschedule"
    assert environment["PREFECT_HOME"] == "/data/prefect", "and not the worker's"


def test_a_deployment_takes_other_hardware_with_a_job_variable(pools: str) -> None:
    requests = [{"Driver": "nvidia", "DeviceIDs": ["2", "3"], "Capabilities": [["gpu"]]}]
    values = {"env": AWAY, "device_requests": requests, "shm_size": "32g", "mem_limit": "96g", "networks": ["mlflow"]}
    host = container(configuration(pools, "docker", values))["host_config"]
    assert host["DeviceRequests"][0]["DeviceIDs"] == ["2", "3"]
    assert (host["Memory"], host["MemorySwap"], host["NetworkMode"]) == (96 * 2**30, 96 * 2**30, "mlflow")

    values = {"gpus": 4, "node_selector": {"pool": "h100"}, "memory": "200Gi", "volume_claim": "big"}
    pod = configuration(pools, "kubernetes", values).job_manifest["spec"]["template"]["spec"]
    assert pod["nodeSelector"] == {"pool": "h100"}
    assert pod["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": 4, "memory": "200Gi"}
    assert pod["volumes"][0] == {"name": "data", "persistentVolumeClaim": {"claimName": "big"}}


def test_kubernetes(pools: str) -> None:
    manifest = configuration(pools, "kubernetes", {}).job_manifest
    pod = manifest["spec"]["template"]["spec"]
    [job] = pod["containers"]
    assert (manifest["spec"]["backoffLimit"], pod["restartPolicy"]) == (0, "Never"), "Prefect starts a run again"
    assert job["resources"]["limits"]["nvidia.com/gpu"] == job["resources"]["requests"]["nvidia.com/gpu"] == 1
    assert pod["nodeSelector"] == {"nvidia.com/gpu.present": "true"}
    assert pod["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    # Prefect's 30 seconds for the flow, which within them has its own for a checkpoint, and time for what comes after.
    assert pod["terminationGracePeriodSeconds"] > 30 + Settings().grace_seconds
    assert (pod["securityContext"]["runAsNonRoot"], pod["securityContext"]["runAsUser"]) == (True, 10001)
    assert job["securityContext"]["readOnlyRootFilesystem"] is True
    assert {volume["name"]: volume for volume in pod["volumes"]}["shm"]["emptyDir"] == {
        "medium": "Memory",
        "sizeLimit": "8Gi",
    }
    assert {mount["mountPath"] for mount in job["volumeMounts"]} == {"/data", "/dev/shm", "/tmp"}
    environment = {variable["name"]: variable["value"] for variable in job["env"]}
    assert environment["PREFECT_FLOWS_HEARTBEAT_FREQUENCY"] == "30"
    assert environment["PREFECT_FLOW_RUN_EXECUTE_SIGTERM_BEHAVIOR"] == "reschedule"
    assert environment["PREFECT_HOME"] == "/data/prefect"
    assert environment["FINETUNE_STORAGE_ROOT"] == "/data", "whatever the ConfigMap and the Secret say"
    reference = {"name": "finetune", "optional": True}
    assert job["envFrom"] == [{"configMapRef": reference}, {"secretRef": reference}]
    assert job["args"] == ["prefect", "flow-run", "execute"]


def test_kubernetes_knows_every_field_of_the_manifest(pools: str) -> None:
    """Read into Kubernetes' own classes and written again: a misspelt or misplaced field would be gone."""
    manifest = configuration(pools, "kubernetes", {}).job_manifest

    async def through_the_client() -> Any:
        async with ApiClient() as client:
            answer = SimpleNamespace(data=json.dumps(manifest))
            return client.sanitize_for_serialization(client.deserialize(answer, V1Job))

    returned = asyncio.run(through_the_client())
    for spec in (manifest["spec"], manifest["spec"]["template"]["spec"]):
        for name in ("parallelism", "completions"):  # Prefect insists on them in the pod, where Kubernetes ignores them
            spec.pop(name, None)
    assert as_quantities(returned) == as_quantities(manifest)


def as_quantities(manifest: Any) -> Any:
    """Kubernetes takes a count of GPUs as a number, and its classes give it back as a word."""
    return json.loads(json.dumps(manifest), parse_int=str)


def test_a_secret_stays_a_reference_in_the_pool(pools: str) -> None:
    """Only what the worker starts has the value; a deployment's job variables would have it in clear."""
    template = copy.deepcopy(TEMPLATES["docker"])
    template["variables"]["properties"]["env"]["default"]["HF_TOKEN"] = "{{ prefect.blocks.secret.finetune-hf }}"
    with temporary_settings({PREFECT_API_URL: pools}):
        Secret(value="hf_marker").save("finetune-hf", overwrite=True)
    url = f"{pools}/work_pools/as-docker"
    httpx.patch(url, json={"base_job_template": template}).raise_for_status()
    found = configuration(pools, "docker", {"env": AWAY})
    assert found.env["HF_TOKEN"] == "hf_marker"
    assert found.env["PREFECT_HOME"] == "/data/prefect"
    assert "hf_marker" not in httpx.get(url).text
    httpx.patch(url, json={"base_job_template": TEMPLATES["docker"]}).raise_for_status()


def test_a_job_variable_of_the_wrong_type_is_refused(pools: str) -> None:
    with pytest.raises(Exception, match="Validation failed for field 'gpus'"):
        configuration(pools, "kubernetes", {"gpus": "two"})
