"""Seconds of each step of the smoke run, in a new storage root and again in the same one.

python -m bench.steps [--section.name value ...]    the options are those of `python -m flows.finetune smoke`
"""

import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from config.settings import PROJECT_ROOT

FINISHED = re.compile(r"(?:Task|Flow) run '([\w-]+?)(?:-\w{3})?' - Finished in state (\w+)")


def run(root: Path, arguments: list[str]) -> list[tuple[str, str, float]]:
    """Step, state and seconds since the step before; the first is the start of Python and of a temporary server."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "MLFLOW_"))}
    command = [sys.executable, "-m", "flows.finetune", "smoke", *arguments]
    started = last = time.monotonic()
    steps = []
    with subprocess.Popen(
        command,
        cwd=PROJECT_ROOT,
        env={**environment, "FINETUNE_STORAGE_ROOT": str(root), "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        lines = []
        for line in process.stdout:
            lines.append(line)
            now = time.monotonic()
            if "Beginning flow run" in line:
                steps.append(("start, with a temporary server", "", now - last))
            elif match := FINISHED.search(line):
                steps.append((*match.groups(), now - last))
            else:
                continue
            last = now
    steps.append(("stop of the temporary server", "", time.monotonic() - last))
    steps.append(("all", f"exit code {process.returncode}", time.monotonic() - started))
    if process.returncode:
        sys.exit("".join(lines[-30:]))
    return steps


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="finetune-bench-") as root:
        for title in ("new storage root", "the same again"):
            print(f"\n{title}")
            for name, state, seconds in run(Path(root), sys.argv[1:]):
                print(f"  {seconds:7.1f} s  {name}  {state}")


if __name__ == "__main__":
    main()
