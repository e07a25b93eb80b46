"""What a finished run says of itself: a report to read and to keep, and a few lines."""

from pathlib import Path
from typing import Any

from prefect import get_run_logger, runtime, task
from prefect.artifacts import create_image_artifact, create_markdown_artifact
from prefect.cache_policies import NO_CACHE
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
from prefect.client.schemas.sorting import TaskRunSort
from prefect.settings import PREFECT_UI_URL
from prefect.types._datetime import now

from config.recipes import Resolved
from config.sections import Config
from config.settings import Settings, shown
from finetuning.evaluate import Evaluation
from finetuning.launcher import run_step
from tasks.common import only_shown
from tasks.preflight import Inputs
from tasks.progress import CURVE
from tasks.promotion import Verdict
from tasks.references import Reference
from tasks.registration import Version
from tasks.training import Training

REPORT = "report"


@task(cache_policy=NO_CACHE)
def report(
    resolved: Resolved,
    inputs: Inputs,
    tokens: Reference,
    training: Training,
    model_directory: Reference,
    published: Path,
    evaluation: Evaluation,
    version: Version,
    verdict: Verdict,
) -> None:
    """Artifacts `report` and `loss-curve`, and the report as a page with the MLflow run. The version is registered by
    now: what goes wrong here is a warning."""
    job = {
        "config": resolved.config.model_dump(),
        "origins": resolved.origins,
        "recipe": resolved.recipe,
        **{kind: source.model_dump(mode="json") for kind, source in inputs._asdict().items()},
        "training": str(training.directory),
        "tokens": str(tokens.path),
        "model_directory": str(model_directory.path),
        "published": str(published),
        "evaluation": evaluation.model_dump(mode="json"),
        **version.model_dump(include={"name", "created"}),
        "number": version.version,
        **verdict.model_dump(include={"outcome", "reason"}),
        "flow_run_url": runtime.flow_run.ui_url if PREFECT_UI_URL.value() else None,
    }
    with only_shown():
        written = run_step("report", {**job, **_of_the_server()}, get_run_logger())
        label = f"{verdict.outcome}: {version.name} version {version.version}"
        create_markdown_artifact(written["markdown"], key=REPORT, description=label)
        create_image_artifact(written["curve"], key=CURVE, description="Loss of the training")


def _of_the_server() -> dict[str, Any]:
    """What it knows of this flow run: how long each task and all of it took, and the name it was given meanwhile."""
    mine = FlowRunFilter(id=FlowRunFilterId(any_=[runtime.flow_run.id]))
    with get_client(sync_client=True) as client:
        flow_run = client.read_flow_run(runtime.flow_run.id)
        runs = client.read_task_runs(flow_run_filter=mine, sort=TaskRunSort.EXPECTED_START_TIME_ASC)
    steps = [
        {
            "name": run.task_key.partition("-")[0],
            "seconds": run.estimated_run_time.total_seconds(),
            "state": run.state_name or "",
        }
        for run in runs
        if str(run.id) != str(runtime.task_run.id)
    ]
    total_seconds = (now("UTC") - flow_run.start_time).total_seconds()
    return {"steps": steps, "total_seconds": total_seconds, "flow_run_name": flow_run.name}


def summary(
    config: Config,
    training: Training,
    published: Path,
    evaluation: Evaluation,
    version: Version,
    verdict: Verdict,
) -> str:
    """A few lines: version and verdict first, then what it can do and where everything is."""
    settings = Settings()
    how = "registered as" if version.created else "nothing new: it is registered already as"
    lines = [
        f"{config.model.name} fine-tuned on {config.dataset.name}, {how} {version.name} version {version.version}",
        f"verdict: {verdict.outcome}: {verdict.reason}",
        f"registry: {shown(settings.registry_uri)}",
        f"model directory: {published}",
        f"MLflow run: {training.mlflow_run_id or 'not made yet, run this again'} at {shown(settings.tracking_uri)}",
        f"{training.num_steps} steps in {training.train_seconds:.0f} s, eval loss {training.eval_loss:.4g}",
    ]
    if training.time_shares:
        shares = (f"{share:.0%} {phase.replace('_', ' and ')}" for phase, share in training.time_shares.items())
        lines.append(f"time: {', '.join(shares)}; peak memory {training.peak_memory_gib:.2f} GiB")
    for name, score in evaluation.scores.items():
        told = []
        if score["loss"] is not None:
            told.append(f"loss {score['loss']:.4g} on {score['num_rows']} held-out conversations")
        if score["exact_match"] is not None:
            right = round(score["exact_match"] * config.evaluation.exact_match_rows)
            told.append(f"questions answered exactly: {right} ({score['exact_match']:.0%})")
        if score["stopped"] is not None:
            told.append(f"answers that end by themselves: {score['stopped']:.0%}")
        lines.append(f"{name}: {', '.join(told)}")
    return "\n".join(lines)
