"""The child's side of a step: read the job, live no longer than the parent, speak in lines, leave a result file.

Of several processes that train together (`finetuning.group`) each is such a child, and its parent is the group's.
A line on stdout is `LEVEL message`, `PROGRESS {json}`, or `RESULT {json}` when the disk has no room for the result
file; whatever a library prints besides is passed on as it is.
"""

import ctypes
import io
import json
import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from finetuning import processes
from finetuning.artifacts import read_json, write_json
from finetuning.classify import classify
from finetuning.errors import REMEDIES, Failure

PARENT_PID = "FINETUNE_PARENT_PID"
RESULT = processes.RESULT
PROGRESS, OUTCOME = "PROGRESS", "RESULT"
PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main(run: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Run a step as a program: `python -m finetuning.STEP JOB.json`; the result file appears beside the job.

    Exit code 0: done. 1: failed, and the result file says how.
    """
    job_file = Path(sys.argv[1])
    die_with_parent()
    signal.signal(signal.SIGTERM, _stop)
    _set_up_lines(processes.rank())
    quiet_libraries()
    try:
        outcome = {"status": "done", "result": run(read_json(job_file))}
    except Exception as error:
        failure = classify(error)
        if failure is not error:
            traceback.print_exc(file=sys.stdout)
        outcome = {"status": "failed", "kind": failure.kind, "message": failure.message, **_moment()}
    try:
        if outcome["status"] == "failed" or not processes.rank():
            write_json(processes.result_file(job_file.parent), outcome)
    except OSError:  # a full disk: what happened must not be lost with it
        print(OUTCOME, json.dumps(outcome), file=sys.__stdout__)
    leave(0 if outcome["status"] == "done" else 1)


def quiet_libraries() -> None:
    for name in ("httpx", "httpcore", "alembic", "mlflow.store.db.utils", "fsspec", "filelock", "urllib3"):
        logging.getLogger(name).setLevel(logging.WARNING)
    for name in ("torchao", "torch.utils._pytree"):  # kernels of other machines, and of its own use of torch
        logging.getLogger(name).setLevel(logging.ERROR)


def _moment() -> dict[str, float]:
    """Of several processes the first to fail knows why: the others lose the connection to it."""
    return {"time": time.time()} if processes.count() > 1 else {}


def _set_up_lines(rank: int) -> None:
    """Of the processes of a group the first one speaks; of the others only warnings and what their libraries print,
    with their number."""
    level, name = (logging.WARNING, f"process {rank}: ") if rank else (logging.INFO, "")
    logging.basicConfig(level=level, format=f"%(levelname)s {name}%(message)s", stream=sys.stdout, force=True)
    if processes.count() > 1:  # they share a pipe: a line is one write
        sys.stdout.reconfigure(line_buffering=True, write_through=False)
    if rank:
        sys.stdout = sys.stderr = _Named(name)


class _Named(io.TextIOBase):
    """Lines for the real stdout, with a name before each."""

    def __init__(self, name: str):
        self.name, self.rest = name, ""

    def write(self, text: str) -> int:
        *lines, self.rest = (self.rest + text).split("\n")
        for line in lines:
            sys.__stdout__.write(f"{self.name}{line}\n")
        return len(text)


def leave(code: int) -> NoReturn:
    """End the process without waiting for threads: an upload that was given up may hang in one of MLflow's for ever."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _stop(number: int, frame: Any) -> None:
    """Told to stop: unwind, so that locks, temporary files and the MLflow run are left in order."""
    raise Failure("preempted", f"the step was told to stop (SIGTERM). {REMEDIES['preempted']}")


def die_with_parent() -> None:
    """Ask the kernel for SIGKILL when the parent dies, however it dies. Started by hand, nothing is asked."""
    parent = os.environ.get(PARENT_PID)
    if parent is None:
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):  # it died before the request was made
        os.kill(os.getpid(), signal.SIGKILL)


def report_progress(**progress: Any) -> None:
    print(PROGRESS, json.dumps(progress), flush=True)
