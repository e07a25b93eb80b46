"""The fault matrix: each fault is injected into a real run of the flow, and its end compared with an undisturbed one.

python -m bench.faults [--quick] [--only NAME]

A real Prefect server with the automations of automations.yaml, real workers, real MLflow databases and servers, the
tiny model of `samples/`. Each row has a storage root of its own. It passes when the flow run ends as stated, there is
one MLflow run with that status, that many versions, weights equal to the undisturbed run's, no process left, and the
value of a secret in no file. `--quick`: one moment a fault. Exit code 1 when a row fails.
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil

from bench.servers import background, free_port, prefect_cli, wait_for_http
from config.settings import PROJECT_ROOT
from tests.registries import OPEN_SOURCE, PRESIGNED, ask, faults, unity_catalog, unity_place

TRAINING = {
    "max_steps": 16, "per_device_train_batch_size": 4, "per_device_eval_batch_size": 32, "max_length": 128,
    "eval_steps": 4, "save_steps": 4, "logging_steps": 1,
}  # fmt: skip
PARAMETERS = {
    "training": TRAINING, "gate": {"better_than": "none"},
    "evaluation": {"exact_match_rows": 0, "sample_rows": 0, "loss_rows": 0},
}  # fmt: skip
PREPARED = ("datasets", "models", "tokens")
"""What a row finds of the first one's: the steps before training are not what is disturbed."""
WAIT_SECONDS = 420
AT_ONCE = 3
"""Rows that run beside each other: one is mostly imports, which use one core, and waiting."""
MOMENTS: dict[str, dict[str, Any]] = {
    "before the first step": {"step": "train", "opens": r"train\.jsonl$"},
    "between steps": {"step": "train", "opens": r"checkpoint-4/\.manifest", "after": 0.1},
    "while a checkpoint is written": {"step": "train", "opens": r"checkpoint-8/trainer_state\.json$"},
    "while its manifest is written": {"step": "train", "opens": r"checkpoint-8/\.manifest"},
    "while the model directory is written": {"step": "export", "opens": r"/\.finetune\.json"},
}
BETWEEN, WRITING = "between steps", "while a checkpoint is written"
UNITY = [PRESIGNED, *OPEN_SOURCE[:1]]


class Failed(AssertionError):
    """A row does not end as it should."""


class Arena:
    """Server, deployments, automations and a worker that the rows share."""

    def __init__(self, folder: Path):
        self.folder, self.secret = folder, f"hf_{uuid.uuid4().hex}"
        self.reference = ""
        self.prepared: Path | None = None
        """Storage root of the undisturbed run."""
        self.gpu_pool = threading.Lock()
        """One row at a time has workers of its own there."""
        port = free_port()
        self.api = f"http://127.0.0.1:{port}/api"
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "MLFLOW_"))}
        for name in [name for name in os.environ if name not in kept or name.startswith("FINETUNE_")]:
            del os.environ[name]
        (folder / "home").mkdir()
        self.environment = {
            "HOME": str(folder / "home"), "PREFECT_HOME": str(folder / "prefect"), "PREFECT_API_URL": self.api,
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false", "HF_HUB_OFFLINE": "1", "HF_TOKEN": self.secret,
            "FINETUNE_PROJECT_DIR": str(PROJECT_ROOT), "OMP_NUM_THREADS": "1", "FINETUNE_GRACE_SECONDS": "15",
        }  # fmt: skip
        self.server = ["prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port), "--no-ui"]

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        with background(self.server, self.environment, self.folder / "server.txt"):
            wait_for_http(f"{self.api}/health")
            for pool in ("h100", "cpu"):
                arguments = ("--type", "process", "--base-job-template", "work-pools/process.json")
                prefect_cli("work-pool", "create", pool, *arguments, **self.environment)
            for module in ("flows.deploy", "flows.automations"):
                command = [sys.executable, "-m", module]
                environment = {**os.environ, **self.environment}
                subprocess.run(command, cwd=PROJECT_ROOT, env=environment, check=True, stdout=subprocess.DEVNULL)
            with self.worker("cpu"):
                yield

    def worker(self, pool: str) -> background:
        command = ["prefect", "worker", "start", "--pool", pool, "--type", "process", "--limit", "4"]
        return background(command, self.environment, self.folder / f"worker-{pool}.txt", self.folder)

    def call(self, path: str, body: dict[str, Any] | None = None, method: str = "") -> Any:
        import httpx

        method = method or ("GET" if body is None else "POST")
        for wait in (0.5, 1, 2, 4, 0):  # its sqlite database may be busy, as Prefect's own client knows
            answer = httpx.request(method, f"{self.api}/{path}", json=body, timeout=30)
            if answer.status_code != 503:
                break
            time.sleep(wait)
        return answer.raise_for_status().json() if answer.content else None


class Case:
    """One row: its storage root, its runs, and what it came to."""

    def __init__(self, arena: Arena, name: str, moment: str):
        self.arena, self.name, self.moment = arena, name, moment
        self.root = arena.folder / f"row-{uuid.uuid4().hex[:8]}"
        self.root.mkdir()
        for kind in PREPARED if arena.prepared else ():
            shutil.copytree(arena.prepared / kind, self.root / kind)
        self.environment: dict[str, str] = {"FINETUNE_STORAGE_ROOT": str(self.root)}
        self.seen: list[str] = []
        self.unity_catalog = ""
        """URL of the stand-in that is this row's registry; otherwise it is a database below the root."""

    def inject(self, do: str, moment: str = "", **more: Any) -> None:
        """Do a shell command at a moment of the first run to come to it."""
        fault = {**MOMENTS.get(moment or self.moment, {}), "do": do, "once": f"{self.root}.happened", **more}
        self.environment |= {
            "FAULT": json.dumps({"after": 0, **fault}),
            "PYTHONPATH": str(PROJECT_ROOT / "bench" / "inject"),
        }

    def local(self, *arguments: str, wrapper: tuple[str, ...] = (), **environment: str) -> str:
        """`python -m flows.finetune smoke` on the shared server; its last line."""
        values = [
            word for section, fields in PARAMETERS.items() for name, value in fields.items()
            for word in (f"--{section}.{name}", str(value))
        ]  # fmt: skip
        command = [*wrapper, sys.executable, "-m", "flows.finetune", "smoke", *values, *arguments]
        environment = {**os.environ, **self.arena.environment, **self.environment, **environment}
        done = subprocess.run(
            command, cwd=PROJECT_ROOT, env=environment, text=True, capture_output=True, timeout=WAIT_SECONDS
        )
        with (self.root / "output.txt").open("a") as file:
            file.write(done.stdout + done.stderr)
        self.state = "Completed" if done.returncode == 0 else "Failed"
        self.message = done.stderr.strip().splitlines()[-1] if done.returncode else ""
        return self.message

    def trigger(self, deployment: str = "smoke", **parameters: Any) -> str:
        """The id of a new flow run of a deployment, with this row's environment on the worker."""
        found = self.deployment(deployment)
        body = {"parameters": {**PARAMETERS, **parameters}, "job_variables": {"env": self.environment}}
        body["state"] = {"type": "SCHEDULED"}
        return self.arena.call(f"deployments/{found['id']}/create_flow_run", body)["id"]

    def deployment(self, name: str) -> dict[str, Any]:
        return self.arena.call(f"deployments/name/finetune/{name}")

    def wait(self, run: str, *states: str) -> str:
        """The message of the run's state, as soon as that is one of `states` (default: Completed, Failed)."""
        states = states or ("Completed", "Failed")
        end = time.monotonic() + WAIT_SECONDS
        while time.monotonic() < end:
            state = self.arena.call(f"flow_runs/{run}")["state"]
            if state["name"] in states:
                self.state, self.message = state["name"], state["message"] or ""
                return self.message
            time.sleep(0.5)
        raise Failed(f"flow run is {state['name']} ({state['message']}) and not {', '.join(states)}")

    def happened(self) -> None:
        end = time.monotonic() + WAIT_SECONDS
        while not Path(f"{self.root}.happened").exists():
            if time.monotonic() > end:
                raise Failed("the fault was never injected")
            time.sleep(0.1)

    def expect(self, state: str = "Completed", runs: tuple[str, ...] = ("FINISHED",), versions: int = 1) -> None:
        """What the row must have come to by now. Raises Failed."""
        if "FAULT" in self.environment:
            self.happened()
        database = next(self.root.glob("**/mlflow.db"), None)
        found_runs = tuple(value for (value,) in query(database, "select status from runs"))
        statuses = self.versions(database)
        if set(statuses) - {"READY"}:
            raise Failed(f"versions are {statuses}")
        found_versions = len(statuses)
        weights = [
            json.loads(path.read_text())["files"]["model.safetensors"]["sha256"]
            for path in self.root.glob("model-directories/*/manifest.json")
        ]
        equal = not weights or not self.arena.reference or set(weights) == {self.arena.reference}
        orphans, leaks = self.processes(), self.leaks()
        same = "equal" if weights and equal else "none" if not weights else "DIFFERENT"
        self.seen.append(
            f"{self.state:<10} {','.join(found_runs) or '-':<9} {found_versions} version(s)  weights {same:<9} "
            f"{len(orphans)} orphans  secret in {len(leaks)} files"
        )
        expected = (state, runs, versions, len(weights) == (1 if versions else 0), True, [], [])
        found = (self.state, found_runs, found_versions, len(weights) == (1 if versions else 0), equal, orphans, leaks)
        if found != expected:
            raise Failed(f"expected {state}, MLflow {runs}, {versions} version(s); found {found}: {self.message}")
        self.weights = weights[0] if weights else ""

    def versions(self, database: Path | None) -> list[str]:
        """The status of each."""
        if not self.unity_catalog:
            return [status for (status,) in query(database, "select status from model_versions")]
        models = ask(f"{self.unity_catalog}/_state").values()
        return [version["status"] for model in models for version in model["versions"].values()]

    def processes(self) -> list[str]:
        """What still runs with this storage root, a moment after the end."""
        end = time.monotonic() + 20
        while time.monotonic() < end:
            found = []
            for process in psutil.process_iter(["pid", "cmdline"]):
                with contextlib.suppress(psutil.Error, OSError):
                    command = " ".join(process.info["cmdline"] or [])
                    root = process.environ().get("FINETUNE_STORAGE_ROOT")
                    if root == str(self.root) and "mlflow" not in command and "bench.faults" not in command:
                        found.append(command[:80])
            if not found:
                return []
            time.sleep(0.5)
        return found

    def leaks(self) -> list[str]:
        folders = [self.root, self.arena.folder / "prefect"]
        command = ["grep", "-rlF", self.arena.secret, *map(str, folders)]
        return subprocess.run(command, text=True, capture_output=True).stdout.split()


def query(database: Path | None, text: str) -> list[tuple]:
    if database is None:
        return []
    with contextlib.closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as connection:
        return connection.execute(text).fetchall()


def nothing(case: Case) -> None:
    case.local()
    case.expect()
    case.arena.reference, case.arena.prepared = case.weights, case.root


def kill_trainer(case: Case) -> None:
    case.inject("kill -9 $SELF")
    case.local()
    case.expect()


def stop_trainer(case: Case) -> None:
    case.inject("kill -15 $SELF")
    case.local()
    case.expect()


def kill_flow(case: Case) -> None:
    case.inject("kill -9 $FLOW")
    case.wait(case.trigger())
    case.expect()


def redeploy(case: Case) -> None:
    """Other values between the crash and the start after it: the run goes on with those it began with."""
    own, kept = case.root.name, ("flow_id", "entrypoint", "path", "pull_steps", "tags", "work_pool_name", "parameters")
    smoke = case.deployment("smoke")
    body = {name: smoke[name] for name in (*kept, "job_variables")}
    case.arena.call("deployments/", {**body, "name": own})
    case.inject("sleep 5; kill -9 $FLOW")
    run = case.trigger(own)
    case.happened()
    changed = {**smoke["parameters"], "training": {**smoke["parameters"]["training"], "precision": "bf16"}}
    case.arena.call(f"deployments/{case.deployment(own)['id']}", {"parameters": changed}, "PATCH")
    case.wait(run)
    case.expect()


def kill_worker(case: Case) -> None:
    """The flow does not need its worker: it comes to its end by itself."""
    case.inject("kill -9 $WORKER")
    with case.arena.gpu_pool, case.arena.worker("h100"):
        case.wait(case.trigger("qwen3-4b", **smoke_parameters()))
    case.expect()


def stop_worker(case: Case) -> None:
    """Prefect's worker kills its flow when it stops, and tells nobody: the run comes back by the automations."""
    case.inject("kill -15 $WORKER")
    with case.arena.gpu_pool:
        with case.arena.worker("h100") as worker:
            run = case.trigger("qwen3-4b", **smoke_parameters())
            case.happened()
            worker.wait(60)
        with case.arena.worker("h100"):
            case.wait(run)
    case.expect()


def smoke_parameters() -> dict[str, Any]:
    import yaml

    from config.recipes import merge

    deployments = yaml.safe_load((PROJECT_ROOT / "prefect.yaml").read_text())["deployments"]
    [smoke] = [deployment for deployment in deployments if deployment["name"] == "smoke"]
    return merge(smoke["parameters"], PARAMETERS)


def cancel(case: Case) -> None:
    case.inject("sleep 60", BETWEEN, after=0)  # hold the training where it is until the cancel ends the sleep, too
    run = case.trigger()
    case.happened()
    prefect_cli("flow-run", "cancel", run, **case.arena.environment)
    case.wait(run, "Cancelled")
    case.expect("Cancelled", ("KILLED",), 0)
    case.local()
    case.expect()


def time_out(case: Case) -> None:
    case.inject("sleep 100", BETWEEN, after=0)
    message = case.local(FINETUNE_TRAINING_TIMEOUT_SECONDS="25")
    if "FINETUNE_TRAINING_TIMEOUT_SECONDS=25: the step 'train' took longer" not in message:
        raise Failed(message)
    case.expect("Failed", ("KILLED",), 0)
    case.local()
    case.expect()


def damage(how: str) -> Callable[[Case], None]:
    def run(case: Case) -> None:
        case.inject(f"cd {case.root}/trainings/*/checkpoints/checkpoint-4 && {how}; kill -9 $SELF", WRITING)
        case.local()
        case.expect()

    return run


def disk_full(case: Case) -> None:
    """A small file system in a namespace: the ballast goes in while the training writes, and out again after."""
    inside = "mkdir -p $FINETUNE_STORAGE_ROOT/trainings && mount -t tmpfs -o size=64m tmpfs "
    inside += '$FINETUNE_STORAGE_ROOT/trainings && "$@"; code=$?; rm -f $FINETUNE_STORAGE_ROOT/trainings/ballast; '
    inside += 'tail -n 3 $FINETUNE_STORAGE_ROOT/trainings/*/result.json; [ $code -ne 0 ] && "$@"'
    wrapper = ("unshare", "-rm", "sh", "-c", inside, "sh")
    if subprocess.run(["unshare", "-rm", "sh", "-c", "mount -t tmpfs tmpfs /mnt"], capture_output=True).returncode:
        case.seen.append("skipped: this machine does not let a user mount a file system in a namespace")
        return
    case.inject(f"head -c 1G /dev/zero > {case.root}/trainings/ballast", WRITING, opens=r"checkpoint-8/config\.json$")
    case.local(wrapper=wrapper)
    output = (case.root / "output.txt").read_text()
    if "disk full at" not in output or " needed, 0.0 GiB free" not in output:
        raise Failed("the message does not say which disk is full")
    if "going on from checkpoint-4" not in output:
        raise Failed("the last good checkpoint was lost")
    case.expect()


class Tracking:
    """An MLflow server that comes and goes."""

    def __init__(self, case: Case):
        port = free_port()
        self.case, self.url = case, f"http://127.0.0.1:{port}"
        folder = case.root / "server"
        folder.mkdir()
        self.command = ["mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
        self.command += ["--backend-store-uri", f"sqlite:///{folder}/mlflow.db", "--serve-artifacts"]
        self.command += ["--artifacts-destination", str(folder / "artifacts")]
        case.environment["MLFLOW_TRACKING_URI"] = self.url

    def up(self) -> background:
        environment = {"HOME": str(self.case.arena.folder / "home"), "MLFLOW_DISABLE_TELEMETRY": "true"}
        server = background(self.command, environment, self.case.root / "mlflow.txt", self.case.root)
        server.__enter__()
        wait_for_http(f"{self.url}/health")
        return server


def tracking_before(case: Case) -> None:
    tracking = Tracking(case)
    message = case.local()
    if f"MLFLOW_TRACKING_URI={tracking.url} cannot be used" not in message:
        raise Failed(message)
    case.expect("Failed", (), 0)
    server = tracking.up()
    try:
        case.local()
        case.expect()
    finally:
        server.__exit__()


def tracking_at(moment: str) -> Callable[[Case], None]:
    """Goes away at that moment and is back a while later."""

    def run(case: Case) -> None:
        tracking = Tracking(case)
        server = tracking.up()
        case.inject(f"kill -9 -{server.process.pid}", moment, after=0)

        def revive() -> None:
            nonlocal server
            case.happened()
            time.sleep(6)
            server = tracking.up()

        reviver = threading.Thread(target=revive)
        reviver.start()
        try:
            case.local()
            reviver.join()
            case.expect()
            check_history(case)
        finally:
            server.__exit__()

    return run


def check_history(case: Case) -> None:
    database = next(case.root.glob("**/mlflow.db"))
    steps = [step for (step,) in query(database, "select step from metrics where key = 'loss' order by step")]
    if steps != list(range(1, TRAINING["max_steps"] + 1)):
        raise Failed(f"the loss was logged at the steps {steps}")


def dataset_changed(case: Case) -> None:
    """The run goes on with the rows it began with."""
    data = case.root / "data"
    shutil.copytree(PROJECT_ROOT / "samples" / "chat", data)
    case.inject(
        f"head -n 100 {data}/train.jsonl > {data}/cut && mv {data}/cut {data}/train.jsonl; kill -9 $FLOW", WRITING
    )
    case.wait(case.trigger(dataset={"name": str(data)}))
    case.expect()


def two_at_once(case: Case) -> None:
    runs = [case.trigger(), case.trigger()]
    for run in runs:
        case.wait(run)
    case.expect()


def clock_back(case: Case) -> None:
    case.environment["CLOCK"] = "3600"
    case.inject("kill -9 $SELF", WRITING)
    case.local()
    case.expect()


CREATE, FINALIZE = r"POST .*(model-versions/create|models/versions)$", r"(POST|PATCH) .*finalize$"


def registry(*injected: dict[str, Any], **environment: str) -> Callable[[Case], None]:
    """A Unity Catalog of the kind that the moment names; the run gets over what happens to its requests."""

    def run(case: Case) -> None:
        with registered_in(case) as url:
            case.environment |= environment
            with faults(url, *injected):
                case.local()
                case.expect()

    return run


def no_right(case: Case) -> None:
    """Told before anything is trained, with the right's name."""
    message = "User does not have CREATE MODEL on Schema 'main.default'."
    fault = {"match": "POST .*models", "status": 403, "code": "PERMISSION_DENIED", "message": message, "times": -1}
    with registered_in(case) as url:
        with faults(url, fault):
            said = case.local()
        if "you need CREATE MODEL on main.default" not in said:
            raise Failed(said)
        case.expect("Failed", (), 0)
        case.local()
        case.expect()


@contextlib.contextmanager
def registered_in(case: Case) -> Iterator[str]:
    with unity_catalog(case.root / "unity") as url:
        place = unity_place(case.moment, url, "", "")
        case.unity_catalog = url
        case.environment |= {**place.environment, "MLFLOW_REGISTRY_URI": place.registry_uri}
        yield url


FAULTS: dict[str, tuple[Callable[[Case], None], list[str]]] = {
    # The longest first: they wait for heartbeats and servers, and the others use the cores meanwhile.
    "SIGTERM worker": (stop_worker, [BETWEEN, "while the model directory is written"]),
    "tracking server down during": (tracking_at(BETWEEN), [BETWEEN]),
    "tracking server down before": (tracking_before, ["before the run"]),
    "tracking server down after": (tracking_at("while the model directory is written"), ["after the training"]),
    "cancel": (cancel, [BETWEEN]),
    "timeout": (time_out, [BETWEEN]),
    "disk full": (disk_full, [WRITING]),
    "SIGKILL trainer": (kill_trainer, [WRITING, *(moment for moment in MOMENTS if moment != WRITING)]),
    "SIGTERM trainer": (stop_trainer, [BETWEEN, "before the first step"]),
    "SIGKILL flow": (kill_flow, [WRITING, *(moment for moment in MOMENTS if moment != WRITING)]),
    "SIGKILL worker": (kill_worker, [BETWEEN, "while the model directory is written"]),
    "truncated weights": (damage("truncate -s 1000 model.safetensors"), [WRITING]),
    "missing optimizer": (damage("rm optimizer.pt"), [WRITING]),
    "empty trainer state": (damage("truncate -s 0 trainer_state.json"), [WRITING]),
    "dataset file changed": (dataset_changed, [WRITING]),
    "redeployed with other values": (redeploy, [WRITING]),
    "two triggers at once": (two_at_once, ["from the start"]),
    "clock going back": (clock_back, [WRITING]),
    "registry 429": (registry({"match": CREATE, "status": 429, "times": 3}), UNITY),
    "registry 500": (registry({"match": "/unity-catalog/", "status": 500, "times": 2}), UNITY),
    "registry 403": (no_right, UNITY),
    "registry hangs": (registry({"match": FINALIZE, "hang": 120}, MLFLOW_HTTP_REQUEST_TIMEOUT="5"), UNITY),
    "upload breaks": (registry({"match": "PUT /_blob/", "skip": 3, "times": 2, "cut": True}), [PRESIGNED]),
    "SIGKILL before the upload": (registry({"match": CREATE, "kill": True, "after": True}), UNITY),
    "SIGKILL after the upload": (registry({"match": FINALIZE, "kill": True}), UNITY),
}


def attempt(arena: Arena, name: str, moment: str, fault: Callable[[Case], None]) -> bool:
    case, started, problem = Case(arena, name, moment), time.monotonic(), ""
    try:
        fault(case)
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    verdict = "FAILED" if problem else "ok"
    seconds = time.monotonic() - started
    print(f"{verdict:<6} {name:<28} {moment:<37} {' | '.join(case.seen)}  {seconds:.0f} s", flush=True)
    if problem:
        print(f"       {problem}", flush=True)
    return not problem


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.faults", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="one moment a fault")
    parser.add_argument("--only", metavar="NAME", choices=FAULTS, help=f"one of: {', '.join(FAULTS)}")
    parser.add_argument("--keep", action="store_true", help="leave the storage roots of the rows, to look into")
    options = parser.parse_args()
    rows = [
        (name, moment, fault)
        for name, (fault, moments) in FAULTS.items()
        if options.only in (None, name)
        for moment in (moments[:1] if options.quick else moments)
    ]
    folder, started = Path(tempfile.mkdtemp(prefix="finetune-faults-")), time.monotonic()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # servers are stopped on the way out
    arena = Arena(folder)
    try:
        with arena.open():
            passed = [attempt(arena, "none", "", nothing)]
            with ThreadPoolExecutor(AT_ONCE) as pool:
                passed += pool.map(lambda row: attempt(arena, *row), rows)
    finally:
        if not options.keep:
            shutil.rmtree(folder, ignore_errors=True)
    print(f"{sum(passed)} of {len(passed)} rows as they should be, {time.monotonic() - started:.0f} s")
    sys.exit(not all(passed))


if __name__ == "__main__":
    main()
