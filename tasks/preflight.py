"""What must hold before any work starts, and which dataset and model are meant, exactly."""

from typing import NamedTuple

from prefect import get_run_logger, runtime, task
from prefect.cache_policies import NO_CACHE

from config.sections import Config
from config.settings import Settings
from finetuning.artifacts import read_json, write_json
from finetuning.inputs import Input, identify
from finetuning.launcher import run_step
from finetuning.preflight import check_settings
from tasks.common import RETRIED, stored_run


class Inputs(NamedTuple):
    dataset: Input
    model: Input


@task(cache_policy=NO_CACHE, **RETRIED)
def preflight(config: Config) -> Inputs:
    """Refuse a run that cannot end well, in seconds; pin dataset and model. Raises Failure with the remedy."""
    check_settings(config, Settings())
    inputs = _pinned(config)
    run_step("preflight", {"registered_model_name": config.registry.registered_model_name}, get_run_logger())
    for kind, source in inputs._asdict().items():
        get_run_logger().info("%s %s at version %s", kind, source.name, source.version)
    return inputs


def _pinned(config: Config) -> Inputs:
    """Pinned once a flow run, as the configuration is: a file or a branch that changed since its first try must not
    turn the rest of the run into another training."""
    stored = stored_run()
    values = read_json(stored)
    if "inputs" in values:
        return Inputs(**{kind: Input.model_validate(source) for kind, source in values["inputs"].items()})
    refresh = str(runtime.flow_run.id) if config.run.refresh else None
    inputs = Inputs(
        identify("dataset", config.dataset.name, config.dataset.revision, refresh),
        identify("model", config.model.name, config.model.revision, refresh),
    )
    pinned = {kind: source.model_dump(mode="json") for kind, source in inputs._asdict().items()}
    write_json(stored, {**values, "inputs": pinned})
    return inputs
