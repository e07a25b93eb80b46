"""What Prefect calls when a run fails or is cancelled: it makes an artifact `failure` with why, what was kept, and what
to do.

The first is called in the flow's process; the second after that has ended, in a process of its own in the same folder
and environment. An error of a hook is logged by Prefect and changes nothing else.
"""

import traceback
from pathlib import Path
from typing import Any

from prefect import Flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import ArtifactCreate
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
from prefect.client.schemas.objects import FlowRun, State
from prefect.client.schemas.sorting import TaskRunSort

from config.settings import Settings, shown
from finetuning import links
from finetuning.classify import classify
from finetuning.errors import REMEDIES, Failure
from finetuning.markdown import code, fence, link, table, text
from tasks.kept import Kept, kept, training_of

FAILURE = "failure"


def tell_failure(flow: Flow[Any, Any], flow_run: FlowRun, state: State) -> None:
    error = state.result(raise_on_failure=False)
    failure = classify(error) if isinstance(error, Exception) else Failure("bug", state.message or state.name or "")
    told = [
        f"# Failed: {text(failure.kind)}",
        quoted(failure.message),
        f"In the step {code(step_of(error))}." if isinstance(error, Exception) else "",
        f"**What helps.** {text(REMEDIES[failure.kind])}" if REMEDIES[failure.kind] not in failure.message else "",
        *remains(flow_run),
        again(flow_run),
    ]
    _show(flow_run, f"Failed: {failure.kind}", told)


def tell_cancellation(flow: Flow[Any, Any], flow_run: FlowRun, state: State) -> None:
    told = ["# Cancelled", f"In the step {code(_newest_step(flow_run))}.", *remains(flow_run), again(flow_run)]
    _show(flow_run, "Cancelled", told)


def quoted(message: str) -> str:
    return "\n>\n".join(f"> {text(line)}" for line in message.splitlines())


def step_of(error: Exception) -> str:
    """The task that raised it, by the way the error came."""
    frames = traceback.extract_tb(error.__traceback__)
    tasks = [frame.name for frame in frames if Path(frame.filename).parent == Path(__file__).parent]
    return tasks[0] if tasks else "before the first task"


def remains(flow_run: FlowRun) -> list[str]:
    found = kept(flow_run.id)
    if not found:
        return ["## What was kept", "Nothing: it ended before anything was made."]
    rows = [[text(one.what), text(one.next_time), code(one.path)] for one in found]
    return ["## What was kept", table(["", "the next run", "where"], rows), *_training(found)]


def _training(found: list[Kept]) -> list[str]:
    state = training_of(found)
    if not state:
        return []
    run_id = state.get("mlflow_run_id")
    url = run_id and links.run_url(run_id, state.get("mlflow_experiment_id"))
    where = f"MLflow run {link(run_id, url)} at {code(shown(Settings().tracking_uri))}" if run_id else ""
    changed = "Another value of `training` or `model` is another training, which begins at its first step."
    [directory] = [one.path for one in found if one.what == "training"]
    return [where, f"Log of the training: {code(directory / 'log.txt')}", changed]


def again(flow_run: FlowRun) -> str:
    if not flow_run.deployment_id:
        return ""
    how = "This run once more, as it was configured; a changed setting needs a new run:"
    return f"## Again\n\n{how}\n\n{fence(f'prefect flow-run retry {flow_run.id}')}"


def _newest_step(flow_run: FlowRun) -> str:
    """Of a run whose process is gone."""
    mine = FlowRunFilter(id=FlowRunFilterId(any_=[flow_run.id]))
    with get_client(sync_client=True) as client:
        runs = client.read_task_runs(flow_run_filter=mine, sort=TaskRunSort.EXPECTED_START_TIME_DESC, limit=1)
    return runs[0].task_key.partition("-")[0] if runs else "before the first task"


def _show(flow_run: FlowRun, description: str, told: list[str]) -> None:
    markdown = "\n\n".join(filter(None, told))
    artifact = ArtifactCreate(
        key=FAILURE, type="markdown", description=description, data=markdown, flow_run_id=flow_run.id
    )
    with get_client(sync_client=True) as client:
        client.create_artifact(artifact)
