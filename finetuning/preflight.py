"""What must hold before any step runs, found out in seconds, without weights and without a GPU: a line a check.

`check` needs no ML library; what does, one child finds out. Program: `python -m finetuning.preflight JOB.json`, see
`Job`.
"""

import logging
import os
import uuid
from collections.abc import Callable
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from typing import Any, get_args

from pydantic import BaseModel

from config.sections import Config
from config.settings import Settings, shown
from finetuning import child
from finetuning.artifacts import lock
from finetuning.base import model_line
from finetuning.errors import Failure
from finetuning.findings import Findings, Line
from finetuning.inputs import Input, Kind
from finetuning.launcher import run_step
from finetuning.libraries import check_libraries
from finetuning.limits import check_context
from finetuning.refusals import is_unity_catalog
from finetuning.rights import database, registry_line, tracking_line
from finetuning.sample import rows_lines
from finetuning.workload import effort_lines

DATABRICKS = ("databricks", "databricks-uc", "uc")


class Places(BaseModel):
    """Where the artifacts of this run are, or will be."""

    model: Path
    tokens: Path
    training: Path


class Job(BaseModel):
    config: Config
    dataset: Input | None = None
    model: Input | None = None
    places: Places | None = None
    """When both are known."""
    only_look: bool = False
    """Make nothing, neither experiment nor registered model."""
    ask_servers: bool = True


def check(
    config: Config,
    identify: Callable[[Kind], Input],
    places: Callable[[Input, Input], Places],
    logger: logging.Logger | logging.LoggerAdapter,
    only_look: bool = False,
) -> tuple[Findings, dict[Kind, Input]]:
    """All findings, and dataset and model as far as they could be pinned. `identify` is given which of them.

    Where something is refused, or with `only_look`, no experiment and no registered model is made.
    """
    findings, settings = Findings(), Settings()
    inputs: dict[Kind, Input] = {}
    with findings.checking("configuration"):
        check_servers(settings)
    ask_servers = findings.failure is None
    with findings.checking("configuration"):
        check_settings(config, settings)
    if findings.failure is None:
        findings.ok("configuration", "the settings fit each other and this machine")
    with findings.checking("libraries"):
        check_libraries(findings)
    for kind in get_args(Kind):
        with findings.checking(kind):
            inputs[kind] = identify(kind)
    if "dataset" in inputs:
        findings.ok("dataset", inputs["dataset"].told)
    job = Job(
        config=config,
        places=places(inputs["dataset"], inputs["model"]) if len(inputs) == 2 else None,
        only_look=only_look or findings.failure is not None,
        ask_servers=ask_servers,
        **inputs,
    )
    with findings.checking("preflight"):
        found = run_step("preflight", job.model_dump(mode="json"), logger)
        findings.lines += map(Line.model_validate, found["lines"])
    return findings, inputs


def check_servers(settings: Settings) -> None:
    """Refuse addresses that MLflow does not take. Raises Failure naming the setting, its value and the remedy."""
    for name, uri in (("MLFLOW_TRACKING_URI", settings.tracking_uri), ("MLFLOW_REGISTRY_URI", settings.registry_uri)):
        if uri.startswith("file:") or not (":" in uri or uri in DATABRICKS):
            raise Failure(
                "configuration",
                f"{name}={shown(uri)}: MLflow no longer writes to plain files. Unset it for a database under the "
                "storage root, or give sqlite:////ABSOLUTE/PATH.db, http://HOST:PORT or databricks.",
            )


def check_settings(config: Config, settings: Settings) -> None:
    """Refuse settings that cannot work here. Raises Failure naming the setting, its value and the remedy."""
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
    """`lines`: model, rows and tokens, what the training takes, and whether the servers can be used."""
    job, settings, findings = Job.model_validate(values), Settings(), Findings()
    logging.getLogger("finetuning.data").setLevel(logging.WARNING)  # its counts would be those of a sample
    config, places, facts, work = job.config, job.places, None, None
    if job.model:
        facts = model_line(config.model, job.model, places and places.model, findings)
    with findings.checking("tokens"):
        check_context(config, facts and facts.context_length)
    if job.dataset:
        work = rows_lines(config, job.dataset, places and places.tokens, facts, findings)
    if places and facts:
        effort_lines(config, job.model, facts, work, places.training, findings)
    if job.ask_servers:
        only_look = job.only_look or findings.failure is not None
        _servers(config, settings, only_look, findings)
    return {"lines": [line.model_dump() for line in findings.lines]}


def _servers(config: Config, settings: Settings, only_look: bool, findings: Findings) -> None:
    with ExitStack() as first_runs:
        if not only_look:
            # MLflow makes the tables of a new database without a lock: of two first runs one finds them half made.
            for file in {database(settings.tracking_uri), database(settings.registry_uri)} - {None}:
                first_runs.enter_context(lock(file))
        with findings.checking("tracking server"):
            tracking_line(settings, only_look, findings)
        if findings.refused("tracking server") and settings.registry_uri == settings.tracking_uri:
            return  # it is the same server
        with findings.checking("registry"):
            registry_line(config.registry.registered_model_name, settings, only_look, findings)


if __name__ == "__main__":
    child.main(run)
