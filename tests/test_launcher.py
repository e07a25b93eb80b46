"""Steps run in child processes: what comes back, how they end, and that nothing of them stays behind."""

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from finetuning.artifacts import read_json
from finetuning.errors import Failure
from finetuning.inputs import digest
from finetuning.launcher import run_step
from tests.conftest import PROJECT
from tests.test_data import ROWS, write_jsonl

LOGGER = logging.getLogger("test")


def job(dataset: Path, output: Path) -> dict:
    version = "a pipe has none" if dataset.is_dir() else digest("dataset", dataset)
    source = {"name": str(dataset), "path": str(dataset), "version": version}
    return {"section": {"name": str(dataset)}, "input": source, "output": str(output)}


def blocking_job(tmp_path: Path) -> dict:
    """A job that never ends: its data file is a pipe that nobody writes to."""
    (tmp_path / "data").mkdir()
    os.mkfifo(tmp_path / "data" / "train.jsonl")
    return job(tmp_path / "data", tmp_path / "artifact")


def test_result_log_and_job_come_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    dataset = write_jsonl(tmp_path / "d.jsonl", ROWS)
    result = run_step("data", job(dataset, tmp_path / "artifact"), LOGGER, directory=tmp_path / "step")
    assert (result["num_train"], result["num_test"]) == (18, 2)
    assert f"{dataset}: 18 conversations to train on, 2 to evaluate on" in caplog.messages
    assert {path.name for path in (tmp_path / "step").iterdir()} == {"job.json", "log.txt", "result.json"}


def test_a_refusal_keeps_its_kind_and_its_line(tmp_path: Path) -> None:
    with pytest.raises(Failure, match="found columns text") as refused:
        run_step("data", job(write_jsonl(tmp_path / "d.jsonl", [{"text": "a"}]), tmp_path / "artifact"), LOGGER)
    assert refused.value.kind == "data"


def test_a_bug_is_reported_with_its_traceback_in_the_log(tmp_path: Path) -> None:
    with pytest.raises(Failure, match="KeyError: 'section'") as failed:
        run_step("data", {}, LOGGER, directory=tmp_path)
    assert failed.value.kind == "bug"
    assert "Traceback (most recent call last)" in (tmp_path / "log.txt").read_text()


def test_a_child_does_not_wait_for_a_thread_that_hangs(tmp_path: Path) -> None:
    """As MLflow's upload threads do when an upload was given up."""
    (tmp_path / "job.json").write_text("{}")
    code = """
import threading, time
from finetuning import child
child.main(lambda job: threading.Thread(target=time.sleep, args=(600,)).start() or {"done": True})
"""
    command = [sys.executable, "-c", code, str(tmp_path / "job.json")]
    assert subprocess.run(command, cwd=PROJECT, timeout=60).returncode == 0
    assert read_json(tmp_path / "result.json") == {"status": "done", "result": {"done": True}}


def test_an_old_result_is_never_taken_for_the_new_one(tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text('{"status": "done", "result": {"old": true}}')
    with pytest.raises(Failure):
        run_step("data", {}, LOGGER, directory=tmp_path)
    assert read_json(tmp_path / "result.json")["status"] == "failed"


def test_a_killed_child_is_named_by_its_signal(tmp_path: Path) -> None:
    step = tmp_path / "step"
    killer = threading.Thread(target=lambda: os.kill(wait_for_child(step), signal.SIGKILL))
    killer.start()
    with pytest.raises(Failure, match="the step 'data' was ended by signal SIGKILL") as failed:
        run_step("data", blocking_job(tmp_path), LOGGER, directory=step)
    killer.join()
    assert failed.value.kind == "transient"


def test_what_takes_too_long_is_stopped_and_named(tmp_path: Path) -> None:
    with pytest.raises(Failure, match=r"TIMEOUT_SECONDS=6: the step 'data' took longer; .*told to stop") as stopped:
        run_step("data", blocking_job(tmp_path), LOGGER, directory=tmp_path / "step", timeout_seconds=6)
    assert stopped.value.kind == "configuration", "another try by itself would take as long again"


def test_a_result_that_was_there_in_time_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process can hang on its way out, in a driver or in a thread."""
    (tmp_path / "sitecustomize.py").write_text("import atexit, time\natexit.register(time.sleep, 300)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    dataset = write_jsonl(tmp_path / "d.jsonl", ROWS)
    directory = tmp_path / "step"
    result = run_step("data", job(dataset, tmp_path / "artifact"), LOGGER, directory=directory, timeout_seconds=6)
    assert result["num_train"] == 18


def test_a_result_that_cannot_be_written_comes_back_as_well(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    step = tmp_path / "step"
    values = blocking_job(tmp_path)

    def lose_the_directory() -> None:
        wait_for_child(step)
        (step / "job.json").unlink()
        (step / "log.txt").unlink()
        step.rmdir()
        (tmp_path / "data" / "train.jsonl").write_text("no JSON\n")

    thread = threading.Thread(target=lose_the_directory)
    thread.start()
    with pytest.raises(Failure, match=r"train.jsonl") as failed:
        run_step("data", values, LOGGER, directory=step)
    thread.join()
    assert failed.value.kind == "data"
    assert not [message for message in caplog.messages if message.startswith("RESULT")]


def test_a_line_that_cannot_be_shown_holds_nothing_up(tmp_path: Path) -> None:
    class Broken(logging.LoggerAdapter):
        def log(self, *args: object, **kwargs: object) -> None:
            raise ConnectionError("the server is away")

    dataset = write_jsonl(tmp_path / "d.jsonl", ROWS)
    assert run_step("data", job(dataset, tmp_path / "artifact"), Broken(LOGGER, {}))["num_train"] == 18


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_no_child_outlives_its_parent(tmp_path: Path, number: signal.Signals) -> None:
    values = blocking_job(tmp_path)
    code = (
        "import logging, pathlib\nfrom finetuning.launcher import run_step\n"
        f"run_step('data', {values!r}, logging.getLogger(), directory=pathlib.Path({str(tmp_path / 'step')!r}))"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=PROJECT)
    child = wait_for_child(tmp_path / "step")
    parent.send_signal(number)
    parent.wait()
    assert ends(child), "the child is still there"


def wait_for_child(step: Path, started: bool = False) -> int:
    """Pid of the process that runs the job in `step`, as soon as it has started to work."""
    end = time.monotonic() + 30
    while time.monotonic() < end:
        for process in psutil.process_iter(["cmdline"]):
            command = process.info["cmdline"] or []
            if str(step / "job.json") in command and (started or _imported(process)):
                return process.pid
        time.sleep(0.05)
    raise TimeoutError("the child did not start")


def _imported(process: psutil.Process) -> bool:
    """The child asks for its parent's death signal first; by the time it sleeps on the pipe it has."""
    return process.status() == psutil.STATUS_SLEEPING


def ends(pid: int) -> bool:
    end = time.monotonic() + 10
    while time.monotonic() < end:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.05)
    return False
