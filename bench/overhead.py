"""What orchestration costs: one run of the smoke deployment on a real server and worker, against the same by hand.

python -m bench.overhead [--max-steps 80]

By hand is: the same child programs with the same jobs, one after the other, without Prefect, in a storage root of
their own. A short first run warms the caches of the operating system. `again` is the flow in its storage root once
more, where it finds everything done. The ratio needs a machine without other work; `its program`, of the same run, does
not.
"""

import argparse
import itertools
import json
import logging
import os
import signal
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from bench.faults import Arena
from config.settings import PROJECT_ROOT
from finetuning.launcher import run_step

GOAL_RATIO, GOAL_SECONDS = 1.05, 15.0


class Flow(NamedTuple):
    """Seconds of one flow run, from the trigger to its end."""

    all: float
    until_taken: float
    """Until a worker takes the run: it asks every PREFECT_WORKER_QUERY_SECONDS."""
    until_start: float
    """From then on: a process starts, reads the deployment and imports the flow."""
    steps: dict[str, float]
    """The tasks, in their order."""
    programs: list[dict[str, Any]]
    """Step, directory, job and seconds of the child programs, in their order."""


def flow(arena: Arena, max_steps: int, root: Path) -> Flow:
    deployment = arena.call("deployments/name/finetune/smoke")
    record = Path(tempfile.mkdtemp(dir=arena.folder))
    environment = {"RECORD": str(record), "PYTHONPATH": str(PROJECT_ROOT / "bench" / "record")}
    variables = {"env": {"FINETUNE_STORAGE_ROOT": str(root), **environment}}
    half = max_steps // 2
    parameters = {"training": {"max_steps": 2 * half, "eval_steps": half, "save_steps": half}}
    body = {"parameters": parameters, "job_variables": variables, "state": {"type": "SCHEDULED"}}
    run = arena.call(f"deployments/{deployment['id']}/create_flow_run", body)
    while run["state"]["type"] not in ("COMPLETED", "FAILED", "CRASHED"):
        time.sleep(1)
        run = arena.call(f"flow_runs/{run['id']}")
    if run["state"]["type"] != "COMPLETED":
        sys.exit(f"the flow run is {run['state']['name']}: {run['state']['message']}")
    tasks = arena.call("task_runs/filter", {"flow_runs": {"id": {"any_": [run["id"]]}}, "sort": "END_TIME_DESC"})
    steps = {task["task_key"].split("-")[0]: between(task["start_time"], task["end_time"]) for task in reversed(tasks)}
    programs = [json.loads(file.read_text()) for file in sorted(record.iterdir())]
    states = arena.call(f"flow_run_states/?flow_run_id={run['id']}")
    moments = [run["created"], *(state["timestamp"] for state in states if state["name"] in ("Pending", "Running"))]
    waited = [between(*pair) for pair in itertools.pairwise(moments)]
    return Flow(between(run["created"], run["end_time"]), *waited, steps, programs)


def between(start: str, end: str) -> float:
    return (datetime.fromisoformat(end) - datetime.fromisoformat(start)).total_seconds()


def by_hand(measured: Flow, recorded: Path, root: Path) -> dict[str, float]:
    """Seconds of each program in another storage root: where a job names the old one, or its MLflow run, the new one's
    is put."""
    os.environ["FINETUNE_STORAGE_ROOT"] = str(root)
    replaced, seconds = {str(recorded): str(root)}, {}
    for program in measured.programs:
        text = json.dumps(program)
        for old, new in replaced.items():
            text = text.replace(old, new)
        program, started = json.loads(text), time.monotonic()
        directory = Path(program["directory"])
        found = run_step(program["step"], program["job"], logging.getLogger("by hand"), directory=directory)
        seconds[program["step"]] = time.monotonic() - started
        if program["step"] == "train":
            [old] = recorded.glob("trainings/*/result.json")
            replaced[json.loads(old.read_text())["result"]["mlflow_run_id"]] = found["mlflow_run_id"]
    return seconds


def report(measured: Flow, again: Flow, hand: dict[str, float]) -> None:
    inside = {program["step"]: program["seconds"] for program in measured.programs}
    names = {"load_and_split": "data", "prepare_model": "model", "tokenize": "tokens", "save_checkpoint": "export"}
    names["prove_and_promote"] = "promote"
    line = "{:24}" + "{:>14}" * 4
    print(line.format("seconds of", "the flow", "its program", "by hand", "again"))
    print(line.format("until a worker takes it", f"{measured.until_taken:.1f}", "", "", f"{again.until_taken:.1f}"))
    print(line.format("until the flow starts", f"{measured.until_start:.1f}", "", "", f"{again.until_start:.1f}"))
    for name, seconds in measured.steps.items():
        program = names.get(name, name)
        alone = (f"{times[program]:.1f}" if program in times else "" for times in (inside, hand))
        print(line.format(name, f"{seconds:.1f}", *alone, f"{again.steps.get(name, 0):.1f}"))
    rest = [f"{run.all - run.until_taken - run.until_start - sum(run.steps.values()):.1f}" for run in (measured, again)]
    print(line.format("between and at the end", rest[0], "", "", rest[1]))
    programs, alone = sum(inside.values()), sum(hand.values())
    print(line.format("all", f"{measured.all:.1f}", f"{programs:.1f}", f"{alone:.1f}", f"{again.all:.1f}"))
    overhead = measured.all - programs
    print(
        f"\norchestration: {overhead:.1f} s beside its programs; the flow takes {measured.all / alone:.3f}x of by hand"
    )
    print(f"goal of {GOAL_RATIO}x: kept by every run of {overhead / (GOAL_RATIO - 1) / 60:.1f} minutes or longer")
    kept = "kept" if again.all < GOAL_SECONDS else "NOT kept"
    print(f"goal of {GOAL_SECONDS:.0f} s for the same run again: {kept}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.overhead", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--max-steps", type=int, default=80, help="optimizer steps of the training; an even number")
    max_steps = parser.parse_args().max_steps
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # servers are stopped on the way out
    with tempfile.TemporaryDirectory(prefix="finetune-overhead-") as name:
        folder = Path(name)
        arena = Arena(folder)
        arena.environment["PREFECT_WORKER_QUERY_SECONDS"] = "2"  # as docs/maintenance.md advises; Prefect's own is 10
        with arena.open():
            flow(arena, 2, folder / "warm")
            measured = flow(arena, max_steps, folder / "flow")
            again = flow(arena, max_steps, folder / "flow")
        os.environ |= {name: arena.environment[name] for name in ("HOME", "HF_HUB_OFFLINE", "OMP_NUM_THREADS")}
        report(measured, again, by_hand(measured, folder / "flow", folder / "hand"))


if __name__ == "__main__":
    main()
