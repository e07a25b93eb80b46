"""The real thing, small: a Prefect server and worker, an MLflow server, the tiny model of `samples/`.

Everything that the tests write goes below one temporary storage root; HOME points to an empty folder, which a test
looks into at the end. No test reaches a network.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from bench.servers import background, free_port, wait_for_http
from config.settings import apply_environment

PROJECT = Path(__file__).resolve().parent.parent

for name in [name for name in os.environ if name.startswith(("FINETUNE_", "PREFECT_", "MLFLOW_", "DATABRICKS_"))]:
    del os.environ[name]
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_DISABLE_PROGRESS_BARS"] = "1"


class Place(NamedTuple):
    """A machine's point of view: a storage root, an empty home, and the environment that leads to both."""

    root: Path
    home: Path
    environment: dict[str, str]


def make_place(folder: Path) -> Place:
    root, home = folder / "root", folder / "home"
    home.mkdir()
    environment = {"HOME": str(home), "FINETUNE_STORAGE_ROOT": str(root)}
    return Place(root, home, environment)


# Before any test module is imported: `tasks` looks up where results are kept when it is imported. The first call of
# tempfile, which settles where pytest's own folders are, comes before TMPDIR is changed.
PLACE = make_place(Path(tempfile.mkdtemp(prefix="finetune-tests-")))
os.environ.update(PLACE.environment)
apply_environment()


@pytest.fixture(autouse=True, scope="session")
def place() -> Iterator[Place]:
    """The session's own; also what runs in the test process itself stays inside."""
    yield PLACE
    shutil.rmtree(PLACE.root.parent, ignore_errors=True)


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
