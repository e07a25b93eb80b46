"""Give a model directory its card, and copy it to the volume.

Program: `python -m finetuning.publish JOB.json`, see `Job`.
"""

import shutil
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from config.settings import Settings
from finetuning import artifacts, child, resume
from finetuning.artifacts import MANIFEST, files_below, read_manifest
from finetuning.card import add_card
from finetuning.errors import Failure
from finetuning.evaluate import Evaluation
from finetuning.export import PROVENANCE
from finetuning.volume import publish_remote


class Job(BaseModel):
    model_directory: Path
    target: Path
    evaluation: Evaluation


def run(values: dict[str, Any]) -> dict[str, Any]:
    job = Job.model_validate(values)
    training = Settings().storage_root / "trainings" / artifacts.read_json(job.model_directory / PROVENANCE)["training"]
    with artifacts.lock(job.model_directory):
        result = resume.read_state(training).get("result") or {}
        add_card(job.model_directory, result.get("log_history", []), job.evaluation)
        if Settings().volumes_are_remote:
            publish_remote(job.model_directory, str(job.target))
        else:
            publish(job.model_directory, job.target)
    return {}


def publish(model_directory: Path, target: Path) -> None:
    """Copy a model directory to a volume, manifest last. A copy that is whole already is left alone.

    No rename and no append: a Unity Catalog volume has neither.
    Raises Failure when the target cannot be written.
    """
    wanted = read_manifest(model_directory)
    if wanted and read_manifest(target) == wanted:
        return
    try:
        target.mkdir(parents=True, exist_ok=True)
        (target / MANIFEST).unlink(missing_ok=True)
        for file in files_below(model_directory):
            (target / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(model_directory / file, target / file)
        shutil.copyfile(model_directory / MANIFEST, target / MANIFEST)
    except OSError as error:
        raise Failure(
            "configuration",
            f"the model directory could not be copied to {target} ({error}). It is whole at {model_directory}; set "
            "FINETUNE_VOLUME_ROOT or registry.volume to a place that can be written, and run again.",
        ) from error


if __name__ == "__main__":
    child.main(run)
