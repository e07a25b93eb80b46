"""Register a model directory as a version of `catalog.schema.model_name`; nothing is trained.

By hand, for instance after the registry was down:
    python -m finetuning.register MODEL_DIRECTORY [--registry.catalog C --registry.schema S --registry.model_name M]
What people do with versions, see `finetuning.aliases`:
    python -m finetuning.register list|promote|rollback NAME [VERSION]
As a step of the flow: `python -m finetuning.register JOB.json`, see `Job`.
"""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_settings import BaseSettings, CliPositionalArg, CliSettingsSource, SettingsConfigDict

from config.recipes import explain
from config.sections import RegistrySection
from config.settings import Settings, apply_environment, shown
from finetuning import aliases, artifacts, child, lineage, resume
from finetuning.errors import Failure
from finetuning.export import PROVENANCE
from finetuning.packaging import CHAT_TASK, package_model
from finetuning.registry import is_unity_catalog, register_version


class Job(BaseModel):
    model_directory: Path
    registered_model_name: str


def run(values: dict[str, Any]) -> dict[str, Any]:
    """Register, and return name, version, URI and whether the version is new.

    Raises Failure; its message ends with the command that finishes the job by hand.
    """
    job = Job.model_validate(values)
    try:
        return register(job)._asdict()
    except Failure as failure:
        by_hand = f"python -m finetuning.register {job.model_directory}"
        message = f"{failure.message}. The model directory is whole and stays; to register it: {by_hand}"
        raise Failure(failure.kind, message) from failure


def register(job: Job) -> Any:
    manifest = artifacts.read_manifest(job.model_directory)
    if manifest is None:
        raise Failure(
            "configuration", f"{job.model_directory} is not a complete model directory: no manifest, or files missing"
        )
    provenance = artifacts.read_json(job.model_directory / PROVENANCE)
    settings = Settings()
    training = settings.storage_root / "trainings" / provenance["training"]
    # Made after the model directory when the tracking server was away until then.
    run_id = provenance["mlflow_run_id"] or resume.read_state(training).get("mlflow_run_id")
    if run_id is None and not is_unity_catalog(settings.registry_uri):
        where = shown(settings.tracking_uri)
        raise Failure("transient", f"{where} could not be reached, so that there is no MLflow run to register from")
    with (
        artifacts.lock(training),  # two at once: one version
        TemporaryDirectory(prefix="package-", dir=settings.storage_root / "tmp") as temporary,
    ):
        output = Path(temporary) / "package"
        package = package_model(job.model_directory, output, task=CHAT_TASK, metadata=metadata(provenance))
        return register_version(
            package,
            name=job.registered_model_name,
            run_id=run_id,
            fingerprint=manifest["fingerprint"],
            tracking_uri=settings.tracking_uri,
            registry_uri=settings.registry_uri,
            tags=lineage.tags(provenance),
            description=f"{provenance['base_model']}, fully fine-tuned on {provenance['dataset']}.",
        )


def metadata(provenance: dict[str, Any]) -> dict[str, str]:
    """What Databricks' model serving reads to choose its optimised server."""
    return {
        "task": CHAT_TASK,
        "pretrained_model_name": provenance["base_model"],
        "databricks_model_family": provenance["architecture"],
        "databricks_model_size_parameters": size_name(provenance["num_parameters"]),
    }


def size_name(num_parameters: int) -> str:
    """4_022_468_096 -> '4b', 134_515_008 -> '135m': the rounded count in the unit that models are named by."""
    for unit, size in (("b", 10**9), ("m", 10**6), ("k", 10**3)):
        if num_parameters >= size:
            return f"{round(num_parameters / size)}{unit}"
    return str(num_parameters)


class ByHand(BaseSettings):
    """Register a finished model directory. Which servers: MLFLOW_TRACKING_URI and MLFLOW_REGISTRY_URI."""

    model_config = SettingsConfigDict(
        cli_prog_name="python -m finetuning.register", cli_exit_on_error=True, cli_avoid_json=True
    )
    model_directory: CliPositionalArg[Path]
    registry: RegistrySection | None = None


def by_hand(arguments: list[str]) -> None:
    """Defaults are the names of the run that made the directory, as `finetune.json` has them."""
    apply_environment()
    try:
        source = CliSettingsSource(ByHand, cli_parse_args=arguments)
        line = ByHand(_cli_settings_source=source)
        provenance = artifacts.read_json(line.model_directory / PROVENANCE)
        given = line.registry.model_dump(exclude_unset=True) if line.registry else {}
        registry = RegistrySection(**{**provenance["config"]["registry"], **given})
    except ValidationError as error:
        sys.exit("\n".join(explain(error)))
    except OSError as error:
        sys.exit(f"{arguments[0]} is no model directory of this pipeline: {error}")
    directory = line.model_directory.resolve()
    try:
        version = run({"model_directory": directory, "registered_model_name": registry.registered_model_name})
    except Failure as failure:
        print(failure, file=sys.stderr)
        child.leave(1)
    print(f"{version['name']} version {version['version']} ({'new' if version['created'] else 'there already'})")


if __name__ == "__main__":
    if sys.argv[1:] and sys.argv[1].endswith(".json"):
        child.main(run)
    elif sys.argv[1:] and sys.argv[1] in aliases.DO:
        aliases.main(sys.argv[1:])
    else:
        by_hand(sys.argv[1:])
