"""The small values that tasks hand over: where an artifact is and which one it is."""

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator

from finetuning.artifacts import mark_used, read_manifest


class Reference(BaseModel):
    """An artifact that is complete: a reference to one that is gone or was cut short cannot be made.

    That is what makes a dead artifact a cache miss in Prefect: its persisted result no longer validates.
    """

    model_config = ConfigDict(frozen=True)

    path: Path

    @property
    def fingerprint(self) -> str:
        return self.path.name

    @property
    def facts(self) -> dict[str, Any]:
        """What the manifest says of the content."""
        return read_manifest(self.path) or {}

    @model_validator(mode="after")
    def _is_complete(self) -> "Reference":
        mark_used(self.path)  # before the look: pruning that comes in between sees the use
        if read_manifest(self.path) is None:
            raise ValueError(f"{self.path} is no complete artifact: its manifest or a file it lists is missing")
        return self
