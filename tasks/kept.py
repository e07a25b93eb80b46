"""What a run that did not come to its end has left behind, and what the next one does with it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from config.sections import Config
from config.settings import Settings
from finetuning import resume
from finetuning.artifacts import read_json, read_manifest
from finetuning.export import export_fingerprint
from finetuning.inputs import Input
from tasks.common import stored_run
from tasks.data import dataset_fingerprint
from tasks.preflight import places


class Kept(NamedTuple):
    what: str
    path: Path
    next_time: str
    """What the same run, started again, does with it."""


def kept(flow_run_id: object) -> list[Kept]:
    """In the order of the steps; empty when the run ended before it knew what it was about."""
    stored = stored_run(flow_run_id)
    values = read_json(stored) if stored.is_file() else {}
    return list(_kept(Config.model_validate(values["config"]), values["inputs"])) if "inputs" in values else []


def training_of(found: list[Kept]) -> dict[str, Any]:
    """State of the training among them; empty without one."""
    return next((resume.read_state(one.path) for one in found if one.path.parent.name == "trainings"), {})


def _kept(config: Config, inputs: dict[str, Any]) -> Iterator[Kept]:
    root = Settings().storage_root
    source, base = (Input.model_validate(inputs[kind]) for kind in ("dataset", "model"))
    place = places(config)(source, base)
    dataset = root / "datasets" / dataset_fingerprint(config.dataset, source)
    for what, path in {"prepared dataset": dataset, "prepared model": place.model, "tokens": place.tokens}.items():
        if read_manifest(path):
            yield Kept(what, path, "found, and not made again")
    if not resume.read_state(training := place.training):
        return
    yield Kept("training", training, how_far(training, config.training.max_steps))
    if result := resume.finished(training):
        directory = root / "model-directories" / export_fingerprint(training.name, result["checkpoint"])
        if read_manifest(directory):
            yield Kept("model directory", directory, "registered as it is")


def how_far(training: Path, max_steps: int) -> str:
    if result := resume.finished(training):
        return f"finished at step {result['num_steps']}: nothing is trained again"
    for checkpoint in resume.checkpoints(training / "checkpoints"):
        if read_manifest(checkpoint):
            return f"goes on from {checkpoint.name} of {max_steps} steps"
    return "starts at its first step: it has no whole checkpoint yet"
