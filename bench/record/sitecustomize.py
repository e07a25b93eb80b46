"""Imported by every Python that has this folder in PYTHONPATH: what a flow starts as a step, its job and its seconds,
go to a file in $RECORD each. `finetuning.launcher` starts a step with Popen and ends each with killpg."""

import json
import os
import sys
import time

running = {}


def look(event: str, arguments: tuple) -> None:
    words = [str(word) for word in arguments[1]] if event == "subprocess.Popen" else []
    if step := next((word for word in words if word.startswith("finetuning.")), ""):
        running.update(step=step.removeprefix("finetuning."), file=words[-1], started=time.monotonic())
    elif event == "os.killpg" and running:
        seconds = time.monotonic() - running["started"]
        with open(running["file"]) as job, open(f"{os.environ['RECORD']}/{time.time_ns()}.json", "x") as file:
            kept = {"step": running["step"], "directory": os.path.dirname(running["file"]), "seconds": seconds}
            json.dump({**kept, "job": json.load(job)}, file)
        running.clear()


if "RECORD" in os.environ and "prefect.engine" in sys.orig_argv:
    sys.addaudithook(look)
