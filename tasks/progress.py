"""What a running training shows in the Prefect UI: its progress, its curve, and where it logs and saves."""

import time
from pathlib import Path
from typing import Any
from uuid import UUID

from prefect.artifacts import create_image_artifact, create_progress_artifact, update_progress_artifact
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import ArtifactUpdate

from config.sections import Config
from finetuning.curves import data_uri
from finetuning.markdown import duration
from finetuning.resume import read_state
from tasks.common import artifact_key
from tasks.links import show_checkpoints, show_mlflow_run

UPDATE_SECONDS = 2.0
"""Least time between two updates of the progress artifact; one costs the server about 14 ms."""
CURVE = "loss-curve"


class TrainingProgress:
    """Called with the events of the training child, see `finetuning.child.report_progress`."""

    def __init__(self, config: Config, directory: Path):
        self.directory, self.updated, self.run_id = directory, 0.0, None
        self.curve: UUID | None = None
        key = artifact_key("training", config.registry.model_name)
        self.bar = create_progress_artifact(0.0, key=key, description="Waiting for the first step")
        show_checkpoints(directory, config.training.save_steps, config.training.save_total_limit)

    def __call__(self, event: dict[str, Any]) -> None:
        if "step" in event:
            self._step(event)
        elif "curve" in event:
            self._curve(Path(event["curve"]))
        else:
            self.show_run()

    def _step(self, event: dict[str, Any]) -> None:
        """At a bounded rate; the last event of a training is always shown."""
        last = event["step"] == event["max_steps"]
        if time.monotonic() - self.updated < UPDATE_SECONDS and not last:
            return
        self.updated = time.monotonic()
        update_progress_artifact(self.bar, 100 * event["step"] / event["max_steps"], description=described(event))

    def _curve(self, picture: Path) -> None:
        image = data_uri(picture.read_bytes())
        if self.curve is None:
            self.curve = create_image_artifact(image, key=CURVE, description="Loss so far, drawn once a minute")
        else:
            with get_client(sync_client=True) as client:
                client.update_artifact(self.curve, ArtifactUpdate(data=image))

    def show_run(self) -> None:
        state = read_state(self.directory)
        run_id = state.get("mlflow_run_id")
        if run_id and run_id != self.run_id:
            self.run_id = run_id
            show_mlflow_run(run_id, state.get("mlflow_experiment_id"))

    def finish(self, num_steps: int) -> None:
        """Also of a training that had been finished before, which reports nothing."""
        self.show_run()
        if not self.updated:
            update_progress_artifact(self.bar, 100.0, description=f"All {num_steps} steps were done before")


def described(event: dict[str, Any]) -> str:
    loss = f"loss {event['loss']:.4g}, " if event["loss"] is not None else ""
    left = duration(event["eta_seconds"])
    return f"Step {event['step']} of {event['max_steps']}, {loss}{event['tokens_per_second']:,} tokens/s, {left} to go"
