"""Several processes that train together, as one child of the launcher: they start, stop and end as one.

Program: `python -m finetuning.group N finetuning.STEP JOB.json`. It runs torch's elastic agent, which is what torchrun
and accelerate's launcher run, in this process and not in one more, for three reasons:
- The chain of deaths has no gap. This process asks to die with the launcher's, each process of the group with this
  one, which is its parent. torchrun itself would survive a flow that was killed.
- Their exit codes are seen here. torchrun exits with 1 whatever happened; this program leaves the result that tells,
  or ends by the signal that ended one of the group, so that the launcher classifies it as that of a single process.
- The port is the agent's own, not a fixed one that two trainings on a host would fight for.
"""

import logging
import os
import resource
import signal
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from finetuning import child, processes
from finetuning.artifacts import read_json, write_json

SHUTDOWN_SECONDS = 600
"""Between SIGTERM and SIGKILL: above the time that a checkpoint takes. The launcher's grace may be shorter, and ends
all. torch's own default of 30 would kill a save."""
logger = logging.getLogger(__name__)


def main(num_processes: int, module: str, job_file: Path) -> None:
    child.die_with_parent()
    directory = job_file.parent
    for file in directory.glob("result-*.json"):
        file.unlink()
    os.environ |= {child.PARENT_PID: str(os.getpid()), processes.NUM_PROCESSES: str(num_processes)}
    cores = len(os.sched_getaffinity(0))
    for name, value in {
        "OMP_NUM_THREADS": str(max(1, cores // num_processes)),
        "GLOO_SOCKET_IFNAME": "lo",  # the name of a container's host may lead nowhere
        "LOGLEVEL": "CRITICAL",  # torch's agent reports what is reported here
    }.items():
        os.environ.setdefault(name, value)
    exit_codes = launch(num_processes, [sys.executable, "-m", module, str(job_file)])
    outcome = settle(directory) if exit_codes else None
    if (number := deadly(exit_codes)) and collateral(outcome, number):
        (directory / processes.RESULT).unlink(missing_ok=True)
        end_by(number)
    child.leave(1 if exit_codes else 0)


def launch(num_processes: int, command: list[str]) -> list[int]:
    """Run `command` so many times, until all are done or one has failed. Returns the exit codes that are not 0, in the
    order of the ends; that of SIGTERM when this process was told to stop."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    with tempfile.TemporaryDirectory(prefix="group-", ignore_cleanup_errors=True) as folder:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=num_processes,
            run_id=str(os.getpid()),
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            rdzv_configs={"is_host": True},
            local_addr="localhost",
            max_restarts=0,  # the task is tried again as a whole, from the newest checkpoint
            logs_specs=DefaultLogsSpecs(log_dir=folder),
            shutdown_timeout=SHUTDOWN_SECONDS,
        )
        try:
            elastic_launch(config, command[0])(*command[1:])
        except ChildFailedError as error:
            for rank, failure in error.failures.items():
                if failure.exitcode < 0:
                    name = signal.Signals(-failure.exitcode).name
                    logger.error("process %d of %d was ended by signal %s", rank, num_processes, name)
            return [failure.exitcode for failure in error.failures.values()]
        except SignalException as error:
            return [-error.sigval]
    return []


def deadly(exit_codes: list[int]) -> int | None:
    """The signal that ended one of them: SIGTERM only if there is no other, for the agent stops the rest with it."""
    signals = [-code for code in exit_codes if code < 0]
    return min(signals, key=lambda number: number == signal.SIGTERM, default=None)


def collateral(outcome: dict[str, Any] | None, number: int) -> bool:
    """Whether a process that was ended by a signal explains what the others report: nothing, a connection that they
    lost, or that the agent told them to stop because of it."""
    kinds = {"transient"} if number == signal.SIGTERM else {"transient", "preempted"}
    return outcome is None or outcome.get("kind") in kinds


def settle(directory: Path) -> dict[str, Any] | None:
    """Leave in result.json what the group came to, and return it: the first process's word, unless another one failed
    before and it reports only what came of that."""
    outcome = None
    with suppress(OSError):
        outcome = read_json(directory / processes.RESULT)
    if outcome is None or outcome.get("kind") in ("transient", "preempted"):
        known = [*processes.reports(directory), *([outcome] if outcome else [])]
        outcome = min(known, key=lambda report: report["time"], default=None)
        with suppress(OSError):  # a full disk
            write_json(directory / processes.RESULT, outcome)
    return outcome


def end_by(number: int) -> NoReturn:
    """End as the process of the group did."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError):  # SIGKILL has no handler to reset
        signal.signal(number, signal.SIG_DFL)
    sys.stdout.flush()
    os.kill(os.getpid(), number)
    child.leave(128 + number)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s", stream=sys.stdout)
    main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
