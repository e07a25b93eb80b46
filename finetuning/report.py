"""The report of a finished run: as markdown for Prefect's UI, and as a page of HTML with the training's MLflow run.

Program: `python -m finetuning.report JOB.json`, see `Job`. The page is `report/report.html` of the run, beside
`report/curve.png`; a server that is away costs a warning.
"""

import logging
import tempfile
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from config.recipes import Resolved
from config.sections import Config
from config.settings import Settings, shown
from finetuning import child, resume
from finetuning.artifacts import read_json
from finetuning.bounded import within
from finetuning.curves import data_uri, png
from finetuning.evaluate import ANSWERS, BASE, CANDIDATE, CHAMPION, Evaluation
from finetuning.export import PROVENANCE
from finetuning.inputs import Input
from finetuning.markdown import page
from finetuning.tokens import REPORT

UPLOAD_SECONDS = 60
NUM_SAMPLES = 5
logger = logging.getLogger(__name__)


class Step(BaseModel):
    """A task of the flow run."""

    name: str
    seconds: float
    state: str
    """Prefect's name of it: Completed, Cached, Failed, ..."""


class Job(BaseModel):
    config: Config
    origins: dict[str, str]
    recipe: str | None
    dataset: Input
    model: Input
    training: Path
    """Its directory."""
    tokens: Path
    model_directory: Path
    published: Path
    evaluation: Evaluation
    name: str
    """Of the registered model."""
    number: str
    created: bool
    """Whether this run registered it."""
    outcome: str
    reason: str
    steps: list[Step]
    """In the order they began, without the report itself."""
    total_seconds: float
    """Since the flow run began, its earlier tries and the time between them as well."""
    flow_run_name: str
    flow_run_url: str | None

    @property
    def resolved(self) -> Resolved:
        return Resolved(self.config, self.origins, self.recipe)

    def provenance(self) -> dict[str, Any]:
        return read_json(self.model_directory / PROVENANCE)

    def training_state(self) -> dict[str, Any]:
        return resume.read_state(self.training)

    def tokens_report(self) -> dict[str, Any]:
        return read_json(self.tokens / REPORT)

    def models(self) -> dict[str, str]:
        """Key in the evaluation -> what a reader calls it; those that were evaluated."""
        names = {BASE: "base model", CHAMPION: f"champion, version {self.evaluation.champion}"}
        names[CANDIDATE] = f"this version, {self.number}"
        return {key: name for key, name in names.items() if key in self.evaluation.scores}

    def answers(self) -> dict[str, list[dict[str, Any]]]:
        artifacts = self.evaluation.artifacts
        return {key: read_json(artifacts[key] / ANSWERS)[:NUM_SAMPLES] for key in self.models()}


def run(values: dict[str, Any]) -> dict[str, Any]:
    """`markdown`; `curve`: the picture as an address of some 10,000 characters."""
    from finetuning.report_text import write

    job = Job.model_validate(values)
    picture = curve(job)
    markdown = write(job, data_uri(picture))
    upload(job, page(f"{job.name} version {job.number}: {job.outcome}", markdown), picture)
    return {"markdown": markdown, "curve": data_uri(picture)}


def curve(job: Job) -> bytes:
    """The training's losses, and for comparison those of other models on the gate's rows."""
    scores, history = job.evaluation.scores, (job.training_state().get("result") or {}).get("log_history", [])
    others = {key: name for key, name in job.models().items() if key != CANDIDATE}
    levels = {name: scores[key]["loss"] for key, name in others.items() if scores[key]["loss"] is not None}
    return png(history, levels)


def upload(job: Job, html: str, picture: bytes) -> None:
    run_id = job.training_state().get("mlflow_run_id")
    if run_id is None:
        return

    def call() -> None:
        from mlflow import MlflowClient

        client = MlflowClient(Settings().tracking_uri)
        client.log_text(run_id, html, "report/report.html")
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "curve.png"
            file.write_bytes(picture)
            client.log_artifact(run_id, str(file), "report")

    try:
        within(UPLOAD_SECONDS, call)
    except Exception as error:
        problem = " ".join(str(error).split())[:200]
        server = shown(Settings().tracking_uri)
        logger.warning("the report could not be kept with MLflow run %s at %s: %s", run_id, server, shown(problem))


if __name__ == "__main__":
    child.main(run)
