"""The real thing, small: a Prefect server and worker, an MLflow server, the tiny model of `samples/`.

Everything that the tests write goes below one temporary storage root; HOME points to an empty folder, which a test
looks into at the end. No test reaches a network.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

PROJECT = Path(__file__).resolve().parent.parent
SERVER_START_SECONDS = 90

for name in [name for name in os.environ if name.startswith(("FINETUNE_", "PREFECT_", "MLFLOW_", "DATABRICKS_"))]:
    del os.environ[name]
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_DISABLE_PROGRESS_BARS"] = "1"


class Place(NamedTuple):
    """A machine's point of view: a storage root, an empty home, and the environment that leads to both."""

    root: Path
    home: Path
    environment: dict[str, str]


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return make_place(tmp_path_factory.mktemp("place"))


def make_place(folder: Path) -> Place:
    root, home = folder / "root", folder / "home"
    home.mkdir()
    environment = {"HOME": str(home), "FINETUNE_STORAGE_ROOT": str(root)}
    return Place(root, home, environment)


@pytest.fixture(autouse=True, scope="session")
def own_storage_root(place: Place) -> None:
    """Also what runs in the test process itself stays inside, from before the first import of the project."""
    os.environ.update(place.environment)
    from config.settings import apply_environment

    apply_environment()


class Server(NamedTuple):
    api_url: str
    environment: dict[str, str]


@pytest.fixture(scope="session")
def prefect_server(place: Place, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    port = free_port()
    home = tmp_path_factory.mktemp("prefect-server")
    api_url = f"http://127.0.0.1:{port}/api"
    environment = {**place.environment, "PREFECT_HOME": str(home), "PREFECT_SERVER_ANALYTICS_ENABLED": "false"}
    command = ["prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port), "--no-ui"]
    with background(command, environment, home / "log.txt"):
        wait_for_http(f"{api_url}/health")
        yield Server(api_url, {**place.environment, "PREFECT_API_URL": api_url})


@pytest.fixture(scope="session")
def run_flow(place: Place, prefect_server: Server) -> Callable[..., subprocess.CompletedProcess[str]]:
    """`run_flow("smoke", "--training.max_steps", "2", MLFLOW_TRACKING_URI=...)`: the command line as a user has it,
    on the session's server, which spares each run the start of a temporary one."""

    def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return run_module("flows.finetune", *arguments, **{**prefect_server.environment, **environment})

    return run


def run_module(module: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.run(
        command, cwd=PROJECT, env={**os.environ, **environment}, text=True, capture_output=True, timeout=900
    )


def prefect_cli(*arguments: str, cwd: Path = PROJECT, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "prefect", *arguments]
    return subprocess.run(
        command, cwd=cwd, env={**os.environ, **environment}, text=True, capture_output=True, timeout=900
    )


class background:
    """A server or worker that runs as long as the `with` block, in a session of its own that ends with it."""

    def __init__(self, command: list[str], environment: dict[str, str], log: Path, cwd: Path = PROJECT):
        self.command, self.environment, self.log, self.cwd = command, environment, log, cwd

    def __enter__(self) -> subprocess.Popen[bytes]:
        self.process = subprocess.Popen(
            [sys.executable, "-m", *self.command],
            cwd=self.cwd,
            env={**os.environ, **self.environment},
            stdin=subprocess.DEVNULL,
            stdout=self.log.open("w"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        return self.process

    def __exit__(self, *_: Any) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self.process.pid, number)
                self.process.wait(timeout=15)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                continue


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_for_http(url: str) -> None:
    import httpx

    end = time.monotonic() + SERVER_START_SECONDS
    while time.monotonic() < end:
        try:
            if httpx.get(url, timeout=2).is_success:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.3)
    raise TimeoutError(f"{url} did not answer within {SERVER_START_SECONDS} s")
