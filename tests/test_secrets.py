"""No value of a secret in anything that a run leaves behind or prints."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from bench.servers import free_port
from config.settings import Settings
from finetuning.classify import classify
from tests.conftest import Server, make_place
from tests.registries import unity_catalog

MARKER = "a-secret-nobody-may-read"
SECRETS = {
    name: f"{MARKER}-{name}"
    for name in ("HF_TOKEN", "DATABRICKS_TOKEN", "MLFLOW_TRACKING_TOKEN", "MLFLOW_TRACKING_PASSWORD", "PREFECT_API_KEY")
}
SHORT = [
    "--training.max_steps", "2", "--training.eval_steps", "1", "--training.save_steps", "1",
    "--evaluation.exact_match_rows", "0", "--evaluation.sample_rows", "0", "--gate.better_than", "none",
]  # fmt: skip


def files_with_marker(*folders: Path) -> list[str]:
    command = ["grep", "-rlF", MARKER, *map(str, folders)]
    return subprocess.run(command, text=True, capture_output=True).stdout.split()


def test_a_run_and_a_failed_one_leave_none(
    run_flow: Callable[..., subprocess.CompletedProcess[str]],
    prefect_server: Server,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """The tracking server is away, so that the libraries complain of it and name it, in every step that asks it."""
    folder = tmp_path_factory.mktemp("secrets")
    place, base = make_place(folder), tmp_path_factory.getbasetemp()
    tracking = f"http://someone:{MARKER}@127.0.0.1:{free_port()}"
    environment = {**place.environment, **SECRETS, "MLFLOW_TRACKING_URI": tracking}
    with unity_catalog(folder / "unity") as url:
        environment["MLFLOW_REGISTRY_URI"] = f"uc:{url.replace('//', f'//someone:{MARKER}@')}"
        failed = run_flow("smoke", *SHORT, **environment)
        before = os.umask(0o077)
        try:
            done = run_flow("smoke", *SHORT, FINETUNE_TRACKING_REQUIRED="false", **environment)
        finally:
            os.umask(before)
    assert failed.returncode == 1
    assert "MLFLOW_TRACKING_URI=http://***@127.0.0.1" in failed.stderr, "the rest of the address is there"
    assert done.returncode == 0, done.stdout + done.stderr
    assert MARKER not in failed.stdout + failed.stderr + done.stdout + done.stderr
    [database] = base.glob("prefect-server[0-9]/prefect.db")
    assert files_with_marker(place.root, place.home, database.parent) == []
    readable = [path.name for path in (place.root / "trainings").iterdir() if path.stat().st_mode & 0o077]
    assert readable == [], "a umask of 077 keeps what is trained on to oneself"


def test_a_secret_that_a_library_quotes_is_taken_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """As requests and httpx do with a token that has a line break at its end."""
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", f"{MARKER}\n")
    monkeypatch.setenv("DATABRICKS_TOKEN", "none")
    said = f"Invalid leading whitespace in header value: 'Bearer {MARKER}\\n' of postgresql://me:word@host/db, none"
    assert classify(ValueError(said)).message.startswith(
        "ValueError: Invalid leading whitespace in header value: 'Bearer ***\\n' of postgresql://***@host/db, none"
    )


def test_dotenv_has_the_secrets_that_the_servers_ask_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Also those that Prefect's server and MLflow's basic auth ask for reach the libraries from there."""
    wanted = {"PREFECT_API_AUTH_STRING": f"admin:{MARKER}", "MLFLOW_TRACKING_PASSWORD": MARKER, "HF_TOKEN": MARKER}
    (tmp_path / ".env").write_text("".join(f"{name}={value}\n" for name, value in wanted.items()))
    monkeypatch.chdir(tmp_path)
    for name in wanted:
        monkeypatch.delenv(name, raising=False)
    settings = Settings()
    assert wanted.items() <= settings.environment().items()
    assert MARKER not in repr(settings) + str(settings.model_dump())
