"""Check on a GPU what could only be calculated without one: memory, speed, the error of too little memory, packing.

python -m bench.gpu [--budget-seconds 420] [--rows recipe,notebook] [--output FILE]

The model is a Qwen3-4B of random weights; nothing is downloaded, and torch and transformers are enough (TRL and torchao
are used where they are). Each row is a process of its own, so that an error or too little memory costs that row only.
On a CPU everything is tiny and says nothing about speed. Exit codes: 0; 1 when a row failed, 2 on wrong usage.

tokens/s: tokens of conversations, without padding, by the seconds of whole optimizer steps. MFU: operations of the
model (`gpu_rows.model_flops`) by what the GPU could do. Memory is in 1e9 bytes. planned: by `finetuning.memory`;
measured: the peak of tensors (torch.cuda.max_memory_allocated); reserved: what torch's allocator took for them.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.gpu_child import FACTS, RESULT
from bench.gpu_plan import Planned, planned
from bench.gpu_rows import CHECKS, ROWS, Row, scale
from bench.gpu_table import summary, table

PROJECT_ROOT = Path(__file__).parents[1]
LEAST_SECONDS, MOST_SECONDS = 20, 150
"""Of one row: with less it is not begun, after more it is stopped (to compile is what may take that long)."""
TIMED_OUT = "stopped after"


def main() -> None:
    options = command_line()
    deadline = time.monotonic() + options.budget_seconds
    facts = child([FACTS], MOST_SECONDS)
    if "device" not in facts:
        sys.exit(facts["note"])
    print(", ".join(f"{name} {value}" for name, value in facts.items() if value is not None))
    gpus = facts["num_gpus"]
    print(
        "no GPU: nothing here says anything about one" if not gpus else f"{_count(gpus)}: FSDP2 not tried", flush=True
    )
    results = []
    for row in ROWS.values():
        results.append(outcome(row, facts, options, deadline - time.monotonic()))
        print(f"{row.name}: {results[-1]['status']}, {results[-1]['note']}", flush=True)
        if options.output:
            options.output.write_text(json.dumps({"facts": facts, "rows": results}, indent=1) + "\n")
    print(f"\n{table(results)}")
    sys.exit(any(result["status"] == "FAILED" for result in results))


def command_line() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--budget-seconds", type=float, default=420, help="after this the other rows are skipped")
    parser.add_argument("--rows", type=lambda text: text.split(","), default=list(ROWS), help=", ".join(ROWS))
    parser.add_argument("--fail", choices=ROWS, help="a row that is to fail, to see that the others go on")
    parser.add_argument("--output", type=Path, help="file to write the same to as JSON")
    options = parser.parse_args()
    if unknown := set(options.rows) - set(ROWS):
        parser.error(f"--rows: there is no {', '.join(sorted(unknown))}")
    return options


def _count(gpus: int) -> str:
    return "one GPU" if gpus == 1 else f"{gpus} GPUs, of which one is used"


def outcome(row: Row, facts: dict[str, Any], options: argparse.Namespace, seconds: float) -> dict[str, Any]:
    """What became of a row, with name, status (done, skipped, FAILED) and note."""
    plan = Planned() if row in CHECKS else planned(row, scale(facts["device"]), facts["gpu"])
    result: dict[str, Any] = {"name": row.name, "planned": plan.peak, "components": plan.components, "plan": plan.why}
    if reason := why_not(row, plan, facts, options, seconds):
        return result | {"status": "skipped", "note": reason}
    started = time.monotonic()
    found = child([row.name, *(["fail"] if options.fail == row.name else [])], min(seconds, MOST_SECONDS))
    if seconds < MOST_SECONDS and found.get("note", "").startswith(TIMED_OUT):
        found = {"status": "skipped", "note": f"no time left: {found['note']}"}
    result |= {"row_seconds": round(time.monotonic() - started, 1)} | found
    return result if "status" in result else result | summary(result, facts["gpu"])


def why_not(row: Row, plan: Planned, facts: dict[str, Any], options: argparse.Namespace, seconds: float) -> str | None:
    """The reason not to begin a row."""
    if row.name not in options.rows:
        return "not asked for"
    if row.gpu_only and facts["device"] == "cpu":
        return "needs a GPU"
    if plan.total and facts["gpu_bytes"] and plan.total > facts["gpu_bytes"]:
        return f"does not fit: planned {plan.total / 1e9:.1f} of {facts['gpu_bytes'] / 1e9:.1f}"
    return "no time left" if seconds < LEAST_SECONDS else None


def child(arguments: list[str], seconds: float) -> dict[str, Any]:
    """What a process of its own says in its last line; where it says nothing, that it failed, and how."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    command = [sys.executable, "-m", "bench.gpu_child", *arguments]
    with tempfile.TemporaryFile("w+") as said:  # no pipe: a compiler's worker would keep it open
        streams = {"stdin": subprocess.DEVNULL, "stdout": said, "stderr": subprocess.STDOUT}
        process = subprocess.Popen(command, cwd=PROJECT_ROOT, env=environment, start_new_session=True, **streams)
        try:
            ended = f"ended with exit code {process.wait(seconds)}"
        except subprocess.TimeoutExpired:
            ended = f"{TIMED_OUT} {seconds:.0f} seconds"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        said.seek(0)
        lines = said.read().strip().splitlines()
    for line in reversed(lines):
        if line.startswith(RESULT):
            return json.loads(line.removeprefix(RESULT))
    return {"status": "FAILED", "note": f"{ended}: {lines[-1][:200] if lines else 'no word'}"}


if __name__ == "__main__":
    main()
