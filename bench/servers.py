"""Servers and workers for tests and measurements: on 127.0.0.1, on a free port, stopped by whoever started them."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from config.settings import PROJECT_ROOT

START_SECONDS = 90
SEARCH_PATH = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
"""As in an activated environment: `mlflow models serve` starts `uvicorn` by its name."""


class background:
    """A server or worker that runs as long as the `with` block, in a session of its own that ends with it."""

    def __init__(self, command: list[str], environment: dict[str, str], log: Path, cwd: Path = PROJECT_ROOT):
        self.command, self.environment, self.log, self.cwd = command, environment, log, cwd

    def __enter__(self) -> subprocess.Popen[bytes]:
        self.process = subprocess.Popen(
            [sys.executable, "-m", *self.command],
            cwd=self.cwd,
            env={**os.environ, "PATH": SEARCH_PATH, **self.environment},
            stdin=subprocess.DEVNULL,
            stdout=self.log.open("a"),
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


def wait_for_http(url: str, server: background | None = None) -> None:
    """Until `url` answers; what `server` printed last is in the error when it does not."""
    import httpx

    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end and (server is None or server.process.poll() is None):
        try:
            if httpx.get(url, timeout=2).is_success:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.3)
    printed = f"\n{server.log.read_text(errors='replace')[-2000:]}" if server else ""
    raise TimeoutError(f"{url} did not answer within {START_SECONDS} s{printed}")


def prefect_cli(
    *arguments: str, cwd: Path = PROJECT_ROOT, timeout: float = 900, **environment: str
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "prefect", *arguments]
    environment = {**os.environ, **environment}
    return subprocess.run(command, cwd=cwd, env=environment, text=True, capture_output=True, timeout=timeout)
