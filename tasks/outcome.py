"""Nothing to do: what this run is asked for was done by an earlier one, and the registry still has it."""

from pathlib import Path

from prefect import get_run_logger, runtime, task
from prefect.cache_policies import NO_CACHE

from config.sections import Config
from config.settings import Settings
from finetuning.artifacts import read_manifest
from finetuning.launcher import run_step
from finetuning.outcome import Outcome, outcome_fingerprint, read_outcome, write_outcome
from tasks.common import RETRIED, only_shown
from tasks.links import show_version
from tasks.preflight import Inputs, places
from tasks.promotion import Verdict
from tasks.registration import Version
from tasks.training import Training


@task(cache_policy=NO_CACHE, **RETRIED)
def find_outcome(config: Config, inputs: Inputs) -> Outcome | None:
    """What an earlier run came to that was asked for the same. Raises Failure when the registry does not answer."""
    outcome = read_outcome(_identity(config, inputs))
    if outcome is None or not (Settings().volumes_are_remote or read_manifest(outcome.published)):
        return None
    if not run_step("outcome", outcome.model_dump(mode="json"), get_run_logger())["there"]:
        return None
    with only_shown():
        show_version(outcome.name, outcome.version)
    return outcome


def remember_outcome(
    config: Config, inputs: Inputs, training: Training, published: Path, version: Version, verdict: Verdict
) -> None:
    """Not where something is left to do: a version that was not judged, an MLflow run that could not be made."""
    if not verdict.judged or training.mlflow_run_id is None:
        return
    outcome = Outcome(
        name=version.name,
        version=version.version,
        model_directory=published.name,
        verdict=verdict.outcome,
        published=published,
        mlflow_run_id=training.mlflow_run_id,
        flow_run_id=str(runtime.flow_run.id),
    )
    write_outcome(_identity(config, inputs), outcome)


def nothing_to_do(outcome: Outcome) -> str:
    return (
        f"nothing to do: {outcome.name} version {outcome.version} ({outcome.verdict} then) comes from the same model, "
        f"rows and settings, by flow run {outcome.flow_run_id}\nmodel directory: {outcome.published}\n"
        "run.refresh=true makes it all again"
    )


def _identity(config: Config, inputs: Inputs) -> str:
    training = places(config)(inputs.dataset, inputs.model).training
    return outcome_fingerprint(config, training.name, Settings())
