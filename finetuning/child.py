"""The child's side of a step: read the job, live no longer than the parent, speak in lines, leave a result file.

A line on stdout is `LEVEL message`, `PROGRESS {json}`, or `RESULT {json}` when the disk has no room for the result
file; whatever a library prints besides is passed on as it is.
"""

import ctypes
import json
import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from finetuning.artifacts import read_json, write_json
from finetuning.classify import classify
from finetuning.errors import REMEDIES, Failure

PARENT_PID = "FINETUNE_PARENT_PID"
RESULT = "result.json"
PROGRESS, OUTCOME = "PROGRESS", "RESULT"
PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main(run: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Run a step as a program: `python -m finetuning.STEP JOB.json`; the result file appears beside the job.

    Exit code 0: done. 1: failed, and the result file says how.
    """
    job_file = Path(sys.argv[1])
    die_with_parent()
    signal.signal(signal.SIGTERM, _stop)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s", stream=sys.stdout, force=True)
    for name in ("httpx", "httpcore", "alembic", "mlflow.store.db.utils", "fsspec", "filelock", "urllib3"):
        logging.getLogger(name).setLevel(logging.WARNING)
    for name in ("torchao", "torch.utils._pytree"):  # kernels of other machines, and of its own use of torch
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        outcome = {"status": "done", "result": run(read_json(job_file))}
    except Exception as error:
        failure = classify(error)
        if failure is not error:
            traceback.print_exc(file=sys.stdout)
        outcome = {"status": "failed", "kind": failure.kind, "message": failure.message}
    try:
        write_json(job_file.with_name(RESULT), outcome)
    except OSError:  # a full disk: what happened must not be lost with it
        print(OUTCOME, json.dumps(outcome))
    leave(0 if outcome["status"] == "done" else 1)


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
