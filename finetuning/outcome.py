"""What a run came to, kept under the fingerprint of all that it was asked for: who asks for the same again has it.

Files: `outcomes/FINGERPRINT.json` below the storage root. Program: `python -m finetuning.outcome JOB.json` asks the
registry whether it still has what an outcome names.
"""

from pathlib import Path
from typing import Any

from pydantic import BaseModel

from config.sections import Config
from config.settings import Settings
from finetuning import child
from finetuning.artifacts import fingerprint, read_json, write_json
from finetuning.champion import registry
from finetuning.evaluate import EVALUATION_VERSION
from finetuning.export import EXPORT_VERSION
from finetuning.registry import Registry


class Outcome(BaseModel):
    name: str
    version: str
    model_directory: str
    """Its fingerprint, which the version carries."""
    verdict: str
    """champion, challenger or awaiting approval, at the time."""
    published: Path
    mlflow_run_id: str
    flow_run_id: str


def outcome_fingerprint(config: Config, training: str, settings: Settings) -> str:
    """All that decides about a run's result. `training` is the fingerprint of its training."""
    return fingerprint(
        version=[EXPORT_VERSION, EVALUATION_VERSION],
        training=training,
        sections=[section.model_dump() for section in (config.registry, config.evaluation, config.gate)],
        places=[settings.tracking_uri, settings.registry_uri, str(settings.volumes)],
    )


def outcome_path(identity: str) -> Path:
    return Settings().storage_root / "outcomes" / f"{identity}.json"


def read_outcome(identity: str) -> Outcome | None:
    try:
        return Outcome.model_validate(read_json(outcome_path(identity)))
    except (OSError, ValueError):  # none, or one of another release
        return None


def write_outcome(identity: str, outcome: Outcome) -> None:
    path = outcome_path(identity)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, outcome.model_dump(mode="json"))


def is_there(outcome: Outcome, versions: Registry) -> bool:
    """Whether the registry has the version, READY and of this model directory. Raises Failure."""
    found = next((one for one in versions.versions(outcome.name) if one.number == outcome.version), None)
    return found is not None and (found.status, found.fingerprint) == ("READY", outcome.model_directory)


def run(values: dict[str, Any]) -> dict[str, Any]:
    """`there`. Raises Failure when the registry does not answer."""
    return {"there": is_there(Outcome.model_validate(values), registry())}


if __name__ == "__main__":
    child.main(run)
