"""What a training's directory says: which training it is, how far it came, what a next attempt goes on from.

Needs no ML library. `training.json` holds
    fingerprint      all that determines the weights
    training_id      of this directory; the MLflow run carries it as a tag
    mlflow_run_id    None as long as the tracking server could not be reached
    mlflow_experiment_id  its experiment's: a link to the run needs both
    status           RUNNING, then FINISHED, KILLED or FAILED: that of the last attempt
    settled          whether the MLflow run has all metrics and its last status
    result           what the training came to, once all planned steps are done
"""

import logging
import shutil
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from config.sections import Config
from finetuning import artifacts

TRAINING_VERSION = 3
"""Part of every training fingerprint: raise it when the same data, model and options give other weights."""

NOT_CONTENT = {
    "logging_steps",
    "save_total_limit",
    "dataloader_pin_memory",
    "activation_checkpointing",  # what is recomputed is the same to the bit
    "activation_checkpointing_kwargs",
}
"""Training options that change no weight. Everything else is part of the training's fingerprint."""

STATE = "training.json"
logger = logging.getLogger(__name__)


def training_fingerprint(config: Config, tokens: str, model: str) -> str:
    """Identity of a training: all that determines its weights. `tokens` and `model` are fingerprints of artifacts."""
    options = config.training.model_dump(exclude=NOT_CONTENT)
    return artifacts.fingerprint(
        version=TRAINING_VERSION,
        tokens=tokens,
        model=model,
        attention=config.model.attn_implementation,
        training=options,
    )


def read_state(directory: Path) -> dict[str, Any]:
    """Empty for a training that never started, or whose state was lost with its disk."""
    try:
        return artifacts.read_json(directory / STATE)
    except (OSError, ValueError):
        return {}


def update_state(directory: Path, **values: Any) -> dict[str, Any]:
    state = {"training_id": uuid.uuid4().hex, "mlflow_run_id": None, **read_state(directory), **values}
    artifacts.write_json(directory / STATE, state)
    return state


def finished(directory: Path) -> dict[str, Any] | None:
    """The result of the training in `directory`, or None when it is not finished or its checkpoint is gone."""
    result = read_state(directory).get("result")
    whole = result and artifacts.read_manifest(directory / "checkpoints" / result["checkpoint"])
    return result if whole else None


def abandoned(trainings: Path) -> Iterator[Path]:
    """Trainings that were RUNNING when their process was killed: nobody holds their lock any more."""
    for state in trainings.glob(f"*/{STATE}"):
        if read_state(state.parent).get("status") == "RUNNING" and not artifacts.is_locked(state.parent):
            yield state.parent


def checkpoints(directory: Path) -> list[Path]:
    """All checkpoints in `directory`, newest first."""
    return sorted(directory.glob("checkpoint-*"), key=step_of, reverse=True)


def newest_whole_checkpoint(directory: Path) -> Path | None:
    """The newest checkpoint whose files are what its manifest states; those that are not are moved aside and named.

    Those that an earlier attempt moved aside make room for the new ones.
    """
    earlier = list(directory.glob("damaged-*"))
    for checkpoint in checkpoints(directory):
        unsealed = artifacts.read_manifest(checkpoint) is None
        damaged = ["its manifest, or a file it lists"] if unsealed else artifacts.damaged_files(checkpoint)
        if not damaged:
            return checkpoint
        while earlier:
            shutil.rmtree(earlier.pop())
        aside = checkpoint.with_name(f"damaged-{checkpoint.name}-{time.time_ns()}")
        checkpoint.rename(aside)
        logger.warning("%s is not whole (%s): moved to %s", checkpoint.name, ", ".join(damaged), aside)
    return None


def step_of(checkpoint: Path) -> int:
    """Optimizer steps done at `.../checkpoint-N`."""
    return int(checkpoint.name.rpartition("-")[2])


def remove_unsealed(directory: Path) -> None:
    """Free the space of checkpoints that a full disk cut short; the sealed ones stay."""
    for checkpoint in checkpoints(directory):
        if artifacts.read_manifest(checkpoint) is None:
            shutil.rmtree(checkpoint)
