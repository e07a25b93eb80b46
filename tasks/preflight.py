"""What must hold before any work starts, and which dataset and model are meant, exactly."""

from typing import NamedTuple

from prefect import get_run_logger, runtime, task
from prefect.cache_policies import NO_CACHE

from config.sections import Config
from config.settings import Settings
from finetuning.inputs import Input, identify
from finetuning.launcher import run_step
from finetuning.preflight import check_settings
from tasks.common import RETRIED


class Inputs(NamedTuple):
    dataset: Input
    model: Input


@task(cache_policy=NO_CACHE, **RETRIED)
def preflight(config: Config) -> Inputs:
    """Refuse a run that cannot end well, in seconds; pin dataset and model. Raises Failure with the remedy."""
    check_settings(config, Settings())
    refresh = str(runtime.flow_run.id) if config.run.refresh else None
    inputs = Inputs(
        identify("dataset", config.dataset.name, config.dataset.revision, refresh),
        identify("model", config.model.name, config.model.revision, refresh),
    )
    run_step("preflight", {"registered_model_name": config.registry.registered_model_name}, get_run_logger())
    for kind, source in inputs._asdict().items():
        get_run_logger().info("%s %s at version %s", kind, source.name, source.version)
    return inputs
