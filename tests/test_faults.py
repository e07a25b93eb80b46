"""The fault matrix, one moment a fault; `python -m bench.faults` has them all."""

import subprocess
import sys

from tests.conftest import PROJECT


def test_every_fault_ends_as_promised() -> None:
    command = [sys.executable, "-m", "bench.faults", "--quick"]
    result = subprocess.run(command, cwd=PROJECT, text=True, capture_output=True, timeout=1800)
    print(result.stdout)  # the table, for whoever looks at a failure
    assert result.returncode == 0, result.stdout + result.stderr
