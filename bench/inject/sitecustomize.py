"""Imported by every Python that has this folder in PYTHONPATH: does one thing, once, when a step opens a certain file.

FAULT   JSON: `step` that is to be hit (as in `python -m finetuning.STEP`), `opens` (a pattern for a path), `do` (a
        shell command; $SELF, $FLOW and $WORKER are process ids), `after` (seconds to wait beside the work; 0: at once),
        `once` (a file that is made when it happened)
CLOCK   seconds by which the clock goes back as soon as that file is there
"""

import json
import os
import re
import subprocess
import sys
import threading
import time


def main(fault: dict) -> None:
    if os.path.exists(fault["once"]):
        if back := float(os.environ.get("CLOCK", 0)):
            now, now_ns = time.time, time.time_ns
            time.time, time.time_ns = lambda: now() - back, lambda: now_ns() - int(back * 1e9)
        return
    if f"finetuning.{fault['step']}" in sys.orig_argv:
        sys.addaudithook(lambda event, arguments: event == "open" and look(fault, arguments[0]))


def look(fault: dict, path: object) -> None:
    if not isinstance(path, str) or not re.search(fault["opens"], path):
        return
    try:
        os.close(os.open(fault["once"], os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return
    if fault["after"]:
        threading.Timer(fault["after"], act, [fault]).start()
    else:
        act(fault)


def act(fault: dict) -> None:
    flow = os.getppid()
    with open(f"/proc/{flow}/stat") as stat:
        worker = stat.read().rpartition(")")[2].split()[1]
    subprocess.run(
        ["sh", "-c", fault["do"]], env={**os.environ, "SELF": str(os.getpid()), "FLOW": str(flow), "WORKER": worker}
    )


if "FAULT" in os.environ:
    main(json.loads(os.environ["FAULT"]))
