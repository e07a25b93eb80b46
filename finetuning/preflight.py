"""What must hold before any step runs: storage, tracking server, registry.

`check_settings` needs no library and no server. Program: `python -m finetuning.preflight JOB.json` asks the servers.
"""

import logging
import os
import uuid
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from typing import Any

from pydantic import BaseModel

from config.sections import Config
from config.settings import Settings, shown
from finetuning import child
from finetuning.artifacts import lock
from finetuning.bounded import within
from finetuning.errors import Failure
from finetuning.registry import check_registry, is_unity_catalog
from finetuning.rights import check_artifact_store
from finetuning.tracking import ensure_experiment

ANSWER_SECONDS = 30
"""What the tracking server may take for its first answer; a new database makes its tables in that time."""
DATABRICKS = ("databricks", "databricks-uc", "uc")
logger = logging.getLogger(__name__)


class Job(BaseModel):
    registered_model_name: str


def check_settings(config: Config, settings: Settings) -> None:
    """Refuse settings that cannot work. Raises Failure naming the setting, its value and the remedy."""
    for name, uri in (("MLFLOW_TRACKING_URI", settings.tracking_uri), ("MLFLOW_REGISTRY_URI", settings.registry_uri)):
        if uri.startswith("file:") or not (":" in uri or uri in DATABRICKS):
            raise Failure(
                "configuration",
                f"{name}={shown(uri)}: MLflow no longer writes to plain files. Unset it for a database under the "
                "storage root, or give sqlite:////ABSOLUTE/PATH.db, http://HOST:PORT or databricks.",
            )
    if not is_unity_catalog(settings.registry_uri) and not config.registry.allow_local:
        raise Failure(
            "configuration",
            f"registry.allow_local=false and the registry is {shown(settings.registry_uri)}, which is not a Unity "
            "Catalog: nobody would find the model there. Set MLFLOW_REGISTRY_URI to databricks-uc (or "
            "uc:http://HOST:PORT), or registry.allow_local to true.",
        )
    if config.model.attn_implementation == "flash_attention_2" and not find_spec("flash_attn"):
        raise Failure(
            "configuration",
            "model.attn_implementation='flash_attention_2' needs the package flash-attn, which is not there. "
            "Install it on the GPU machine, or set it to 'sdpa'.",
        )
    if config.training.precision == "bf16_stochastic_rounding" and not (which("g++") or which("clang++")):
        raise Failure(
            "configuration",
            "training.precision='bf16_stochastic_rounding' compiles its optimizer, and there is no g++ or clang++ on "
            "the PATH. Install one, or take another precision.",
        )


def check_storage(root: Path) -> None:
    """Write and remove a small file. Raises Failure."""
    probe = root / "tmp" / f"probe-{uuid.uuid4().hex}"
    try:
        probe.parent.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(os.urandom(4096))
        probe.unlink()
    except OSError as error:
        kind = "out_of_disk" if error.errno == 28 else "configuration"
        raise Failure(
            kind, f"FINETUNE_STORAGE_ROOT={root} cannot be written: {error.strerror}. Set it to a folder that can."
        ) from None


def run(values: dict[str, Any]) -> dict[str, Any]:
    """Reach both servers: experiment and registered model exist afterwards, artifacts arrive. Raises Failure."""
    job, settings = Job.model_validate(values), Settings()
    with ExitStack() as first_runs:
        for database in {_database(settings.tracking_uri), _database(settings.registry_uri)} - {None}:
            first_runs.enter_context(lock(database))
        _ask(job, settings)
    return {}


def _database(uri: str) -> Path | None:
    """The file of a sqlite URI. MLflow makes the tables of a new one without a lock: of two first runs one would
    find them half made."""
    return Path(uri.removeprefix("sqlite:///")).absolute() if uri.startswith("sqlite:///") else None


def _ask(job: Job, settings: Settings) -> None:
    try:
        within(ANSWER_SECONDS, lambda: ensure_experiment(settings.mlflow_experiment_name, settings.artifact_location))
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        message = f"the tracking server MLFLOW_TRACKING_URI={shown(settings.tracking_uri)} cannot be used: {reason}"
        if settings.tracking_required:
            raise Failure(
                "configuration", f"{message}. To train without it: FINETUNE_TRACKING_REQUIRED=false"
            ) from error
        logger.warning("%s. Training goes on without it, and everything is logged afterwards", message)
    else:
        if settings.tracking_uri.startswith(("sqlite:", "http:", "https:")):
            check_artifact_store(settings.mlflow_experiment_name, settings.tracking_uri)
    check_registry(job.registered_model_name, settings.registry_uri, settings.tracking_uri)


if __name__ == "__main__":
    child.main(run)
