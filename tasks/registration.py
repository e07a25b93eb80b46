"""Register the model directory as a version of `catalog.schema.model_name`."""

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE
from pydantic import BaseModel

from config.sections import Config
from config.settings import Settings, shown
from finetuning.launcher import run_step
from tasks.common import RETRIED, only_shown
from tasks.links import show_version
from tasks.references import Reference


class Version(BaseModel):
    """A registered version."""

    name: str
    version: str
    uri: str
    """What MLflow loads it by."""
    created: bool
    """False when an earlier run had registered the same model directory."""


@task(cache_policy=NO_CACHE, **RETRIED)
def register(config: Config, model_directory: Reference) -> Version:
    """Register, or find it registered. Raises Failure with the command that registers by hand."""
    job = {
        "model_directory": str(model_directory.path),
        "registered_model_name": config.registry.registered_model_name,
    }
    version = Version(**run_step("register", job, get_run_logger()))
    how = "registered" if version.created else "was registered already"
    get_run_logger().info("%s version %s %s in %s", version.name, version.version, how, shown(Settings().registry_uri))
    with only_shown():
        show_version(version.name, version.version)
    return version
