"""Start a step as a child process and bring back its result.

Heavy libraries stay out of this process, memory comes back when the step ends, and a crash, an out-of-memory kill or a
CUDA fault is an exit to report instead of the end of the flow.
"""

import contextvars
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from config.settings import PROJECT_ROOT, Settings, shown
from finetuning.artifacts import read_json, write_json
from finetuning.child import OUTCOME, PARENT_PID, PROGRESS, RESULT
from finetuning.classify import classify, classify_exit, count_oom_kills
from finetuning.errors import Failure

LOG = "log.txt"
TAIL_LINES = 20
LEVELS = {"DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"}

Progress = Callable[[dict[str, Any]], None]


def run_step(
    step: str,
    job: dict[str, Any],
    logger: logging.Logger | logging.LoggerAdapter,
    *,
    directory: Path | None = None,
    on_progress: Progress | None = None,
    timeout_seconds: float | None = None,
    num_processes: int = 1,
) -> dict[str, Any]:
    """Run `python -m finetuning.<step>` on `job` and return its result; several of it as a group (`finetuning.group`).

    Job, log and result files are kept in `directory`; without one they live in a temporary folder and go with it.
    Lines of the child go to `logger` at their level while it runs, progress events to `on_progress`. Must be called in
    the main thread: the child dies with the thread that started it.
    After `timeout_seconds` the child is stopped as a preempted one is; if it had its result by then, that counts.
    Raises Failure: what the child reported, how it ended when it could not report, or that it took too long.
    """
    if directory is None:
        settings = Settings()
        with tempfile.TemporaryDirectory(prefix=f"{step}-", dir=settings.storage_root / "tmp") as temporary:
            return run_step(
                step, job, logger, directory=Path(temporary), on_progress=on_progress, num_processes=num_processes
            )
    try:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / RESULT).unlink(missing_ok=True)
        write_json(directory / "job.json", job)
    except OSError as error:
        raise classify(error) from error
    oom_kills = count_oom_kills()
    program = ["finetuning.group", str(num_processes)] if num_processes > 1 else []
    command = [sys.executable, "-m", *program, f"finetuning.{step}", str(directory / "job.json")]
    exit_code, tail = _run(command, step, directory, logger, on_progress, timeout_seconds)
    outcome = _outcome(directory, tail)
    if outcome and outcome["status"] == "done":
        return outcome["result"]
    if exit_code is None:
        raise _timed_out(step, timeout_seconds, outcome)
    if outcome is None:
        raise classify_exit(step, exit_code, tail, count_oom_kills() - oom_kills)
    raise Failure(outcome["kind"], outcome["message"])


def _run(
    command: list[str],
    step: str,
    directory: Path,
    logger: Any,
    on_progress: Progress | None,
    timeout_seconds: float | None,
) -> tuple[int | None, list[str]]:
    """Exit code, None after a timeout, and last lines."""
    child = subprocess.Popen(
        command,
        cwd=PROJECT_ROOT,
        env={**os.environ, **_environment(), PARENT_PID: str(os.getpid())},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    tail: list[str] = []
    context = contextvars.copy_context()  # Prefect's client and logger find their run in it
    arguments = (child.stdout, directory / LOG, logger, on_progress, tail)
    reader = threading.Thread(target=context.run, args=(_forward, *arguments))
    reader.start()
    exit_code = None
    try:
        # On the process and not on the pipe's end: a grandchild may hold the pipe open.
        exit_code = child.wait(timeout_seconds)
    except subprocess.TimeoutExpired:
        logger.warning("the step %r has taken %g seconds and is stopped", step, timeout_seconds)
    finally:
        _end_group(child)
        reader.join(timeout=5)
    return exit_code, tail


def _timed_out(step: str, seconds: float | None, outcome: dict[str, Any] | None) -> Failure:
    """Not worth another try by itself: it would take as long again."""
    unknown = "it did not end in time to say how far it came. Run it again: it goes on from the newest checkpoint."
    end = outcome["message"] if outcome else unknown
    return Failure(
        "configuration", f"FINETUNE_TRAINING_TIMEOUT_SECONDS={seconds:g}: the step {step!r} took longer; {end}"
    )


def _environment() -> dict[str, str]:
    defaults = {
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",  # a fork after its threads started can deadlock
        # With spinning threads a CPU training on a busy machine takes ten times as long.
        "OMP_WAIT_POLICY": "PASSIVE",
        "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_LOGGING_LEVEL": "WARNING",
        "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
        # 120 s and 7 retries are MLflow's defaults: a dead server would hold a step for a quarter of an hour.
        "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "3",
    }
    defaults |= Settings().environment()
    return {name: value for name, value in defaults.items() if name not in os.environ}


def _forward(pipe: IO[str], log_file: Path, logger: Any, on_progress: Progress | None, tail: list[str]) -> None:
    """Read until the child ends, whatever becomes of a line: a pipe that nobody reads would hold the child up."""
    with log_file.open("a") as log:
        for line in map(shown, pipe):  # a traceback quotes what the library had, a URI with its password say
            tail[:] = [*tail[1 - TAIL_LINES :], line.rstrip()]
            with suppress(OSError):  # a full disk
                log.write(line)
                log.flush()
            with suppress(Exception):  # the Prefect server is away for a moment; the line is in the log file
                _pass_on(line.rstrip(), logger, on_progress)


def _pass_on(line: str, logger: Any, on_progress: Progress | None) -> None:
    first, _, rest = line.partition(" ")
    if first == PROGRESS:
        if on_progress:
            on_progress(json.loads(rest))
    elif first == OUTCOME:
        pass
    elif first in LEVELS:
        logger.log(getattr(logging, first), rest)
    elif line.strip():
        logger.info(line)


def _end_group(child: subprocess.Popen[str]) -> None:
    """End the child and all it started: SIGTERM to its session, time to save, SIGKILL."""
    for number, seconds in ((signal.SIGTERM, Settings().grace_seconds), (signal.SIGKILL, 5)):
        try:
            os.killpg(child.pid, number)
        except ProcessLookupError:
            return
        try:
            child.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            continue


def _outcome(directory: Path, tail: list[str]) -> dict[str, Any] | None:
    """What the child reported: in its result file, or, where the disk had no room for it, as a line."""
    with suppress(OSError):
        return read_json(directory / RESULT)
    spoken = [line.removeprefix(OUTCOME) for line in tail if line.startswith(f"{OUTCOME} {{")]
    return json.loads(spoken[-1]) if spoken else None
