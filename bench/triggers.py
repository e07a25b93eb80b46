"""Every way to start a run, tried on a real Prefect server with a real worker, and a table of what came of it.

python -m bench.triggers [--keep]

The deployment is finetune/qwen3-4b itself; model, dataset, steps and registry are overridden to what a CPU can do. Its
trigger on new data, which prefect.yaml has switched off, is on, and there is a schedule one minute ahead. The pool
takes one run at a time. Exit code 1 unless every row is as docs/operate.md says.
"""

import argparse
import contextlib
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml

from bench.faults import Arena, query
from bench.servers import prefect_cli
from config.recipes import flatten, merge
from config.sections import Config
from config.settings import PROJECT_ROOT

NAME = "finetune/qwen3-4b"
PARAMETERS: dict[str, Any] = {
    "model": {"name": "samples/model"},
    "dataset": {"name": "samples/chat"},
    "training": {"max_steps": 2, "max_length": 128},
    "evaluation": {"loss_rows": 32, "sample_rows": 0},
    "registry": {"allow_local": True},
}
LONG = merge(PARAMETERS, {"training": {"max_steps": 5000}})
OURS = flatten(PARAMETERS)
WAIT_SECONDS = 300


def as_the_form_sends(override: dict[str, Any]) -> dict[str, Any]:
    """The body of the request that the form of Prefect's UI makes for qwen3-4b: every value that it shows, dictionaries
    as text (its V2 leaves them as they are)."""
    values = Config.model_validate(override).model_dump()
    parameters = {
        section: {
            name: {"__prefect_kind": "json", "value": json.dumps(value, indent=2)} if isinstance(value, dict) else value
            for name, value in fields.items()
        }
        for section, fields in values.items()
    }
    state = {"type": "SCHEDULED", "message": "", "state_details": {"scheduled_time": None, "cache_expiration": None}}
    policy = {"retries": None, "retry_delay": None, "pause_keys": [], "resuming": False}
    return {
        "parameters": parameters, "state": state, "empirical_policy": policy, "work_queue_name": "default",
        "job_variables": {}, "enforce_parameter_schema": True,
    }  # fmt: skip


class Trial:
    def __init__(self, arena: Arena):
        self.arena, self.root = arena, arena.folder / "root"
        arena.environment["FINETUNE_STORAGE_ROOT"] = str(self.root)

    def deploy(self) -> None:
        """prefect.yaml with the schedule and the trigger of qwen3-4b on, as an operator would change them."""
        file = yaml.safe_load((PROJECT_ROOT / "prefect.yaml").read_text())
        [block] = [block for block in file["deployments"] if block["name"] == "qwen3-4b"]
        once = datetime.now(UTC) + timedelta(seconds=60)
        rule = f"DTSTART:{once:%Y%m%dT%H%M%S}\nRRULE:FREQ=DAILY;COUNT=1"
        soon = {"slug": "soon", "rrule": rule, "timezone": "Etc/UTC", "active": True, "parameters": PARAMETERS}
        block["schedules"].append(soon)
        block["triggers"][0] |= {"enabled": True, "parameters": PARAMETERS}
        path = self.arena.folder / "prefect.yaml"
        path.write_text(yaml.safe_dump(file))
        self.prefect("--no-prompt", "deploy", "--name", "qwen3-4b", "--prefect-file", str(path))
        self.id = self.arena.call(f"deployments/name/{NAME}")["id"]

    def prefect(self, *arguments: str, fails: bool = False) -> str:
        done = prefect_cli(*arguments, **self.arena.environment)
        assert bool(done.returncode) == fails, done.stdout + done.stderr
        return done.stdout + done.stderr

    def runs(self) -> list[dict[str, Any]]:
        return self.arena.call("flow_runs/filter", {"sort": "EXPECTED_START_TIME_ASC"})

    def new(self, start: Callable[[], Any], number: int = 1) -> list[str]:
        """The ids of the runs that come of calling `start`."""
        before = {run["id"] for run in self.runs()}
        start()
        return self.until(lambda: [run["id"] for run in self.runs() if run["id"] not in before][:number] or None)

    def until(self, condition: Callable[[], Any]) -> Any:
        end = time.monotonic() + WAIT_SECONDS
        while not (found := condition()):
            assert time.monotonic() < end, "it did not happen"
            time.sleep(0.3)
        return found

    def ended(self, run: str) -> dict[str, Any]:
        names = ("Completed", "Failed", "Crashed", "Cancelled")
        return self.until(lambda: (found := self.arena.call(f"flow_runs/{run}"))["state"]["name"] in names and found)

    def completed(self, run: str) -> str:
        """What it says, once its configuration is the recipe's with exactly our values overridden."""
        state = self.ended(run)["state"]
        assert state["name"] == "Completed", f"{state['name']}: {state['message']}"
        stored = json.loads((self.root / "runs" / f"{run}.json").read_text())
        assert flatten(stored["config"]) == flatten(Config().model_dump()) | OURS
        assert {name for name, origin in stored["origins"].items() if origin == "given"} == set(OURS)
        return state["message"].splitlines()[0]


def by_cli(trial: Trial) -> str:
    words = [word for section, values in PARAMETERS.items() for word in ("--param", f"{section}={json.dumps(values)}")]
    [run] = trial.new(lambda: trial.prefect("deployment", "run", NAME, *words))
    return trial.completed(run)


def by_api(trial: Trial) -> str:
    body = as_the_form_sends(PARAMETERS)
    return trial.completed(trial.arena.call(f"deployments/{trial.id}/create_flow_run", body)["id"])


def by_python(trial: Trial) -> str:
    from prefect.deployments import run_deployment
    from prefect.settings import PREFECT_API_URL, temporary_settings

    with temporary_settings({PREFECT_API_URL: trial.arena.api}):
        run = run_deployment(NAME, parameters=PARAMETERS, timeout=WAIT_SECONDS)
    return trial.completed(str(run.id))


def by_schedule(trial: Trial) -> str:
    [run] = trial.until(lambda: [run["id"] for run in trial.runs() if run["auto_scheduled"]])
    return trial.completed(run)


def by_event(trial: Trial) -> str:
    arguments = ("event", "emit", "finetune.dataset.updated", "--resource-id", "finetune.dataset.trl-lib/Capybara")
    [run] = trial.new(lambda: trial.prefect(*arguments))
    return trial.completed(run)


def two_at_once(trial: Trial) -> str:
    body = {"parameters": PARAMETERS, "state": {"type": "SCHEDULED"}}
    ids = [trial.arena.call(f"deployments/{trial.id}/create_flow_run", body)["id"] for _ in range(2)]
    for run in ids:
        trial.completed(run)
    first, second = sorted((trial.arena.call(f"flow_runs/{run}") for run in ids), key=lambda run: run["start_time"])
    assert first["end_time"] <= second["start_time"], "one at a time"
    return "one after the other"


def cancelled(trial: Trial) -> str:
    def statuses() -> list[str]:
        return [status for (status,) in query(next(trial.root.glob("**/mlflow.db")), "select status from runs")]

    body = {"parameters": LONG, "state": {"type": "SCHEDULED"}}
    run = trial.arena.call(f"deployments/{trial.id}/create_flow_run", body)["id"]
    trial.until(lambda: "RUNNING" in statuses())
    number = len(processes(trial))
    trial.prefect("flow-run", "cancel", run)
    assert trial.ended(run)["state"]["name"] == "Cancelled"
    trial.until(lambda: not processes(trial))
    assert sorted(statuses()) == ["FINISHED", "KILLED"]
    return f"{number} processes gone, MLflow run KILLED"


def processes(trial: Trial) -> list[int]:
    """Those of flow runs, by what their environment says."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            environment = process.environ()
            if environment.get("FINETUNE_STORAGE_ROOT") == str(trial.root) and "PREFECT__FLOW_RUN_ID" in environment:
                found.append(process.pid)
    return found


def refused(trial: Trial) -> str:
    before = len(trial.runs())
    said = trial.prefect("deployment", "run", NAME, "--param", 'training={"max_stesp": 3}', fails=True)
    body = {"parameters": {"training": {"max_stesp": 3}}, "enforce_parameter_schema": True}
    answer = httpx.post(f"{trial.arena.api}/deployments/{trial.id}/create_flow_run", json=body)
    assert answer.is_client_error
    assert all("max_stesp" in text for text in (said, answer.text))
    assert len(trial.runs()) == before, "no run was made"
    return f"command: exit code 1; API: {answer.status_code}; no run"


ROWS: dict[str, Callable[[Trial], str]] = {
    "prefect deployment run": by_cli,
    "API, as the form of the UI sends it": by_api,
    "run_deployment() in Python": by_python,
    "schedule, a minute ahead": by_schedule,
    "event: new data": by_event,
    "two at once": two_at_once,
    "cancel while it trains": cancelled,
    "a wrong parameter": refused,
}


def attempt(trial: Trial, name: str) -> bool:
    started, problem = time.monotonic(), ""
    try:
        said = ROWS[name](trial)
    except Exception as error:
        problem = said = f"{type(error).__name__}: {error}"
    print(f"{'FAILED' if problem else 'ok':<6} {name:<36} {time.monotonic() - started:4.0f} s  {said}", flush=True)
    return not problem


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.triggers", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--keep", action="store_true", help="leave the storage root and the logs, to look into")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="finetune-triggers-"))
    trial = Trial(Arena(folder))
    try:
        with trial.arena.open():
            trial.prefect("work-pool", "update", "h100", "--concurrency-limit", "1")
            trial.deploy()
            with trial.arena.worker("h100"):
                passed = [attempt(trial, name) for name in ROWS]
    finally:
        if not options.keep:
            shutil.rmtree(folder, ignore_errors=True)
    print(f"{sum(passed)} of {len(passed)} as they should be")
    sys.exit(not all(passed))


if __name__ == "__main__":
    main()
