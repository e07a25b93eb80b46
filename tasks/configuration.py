"""The run's configuration: resolved once, stored under the flow-run id, shown with the origin of every value."""

from pathlib import Path
from typing import Any

from prefect import get_run_logger, runtime, task
from prefect.artifacts import create_table_artifact
from prefect.cache_policies import NO_CACHE
from prefect.client.orchestration import get_client

from config.recipes import Parameters, RefusedConfiguration, Resolved, flatten, read_recipe, resolve
from config.sections import Config
from config.settings import Settings
from finetuning.artifacts import read_json, write_json
from finetuning.errors import Failure
from finetuning.preflight import check_storage
from tasks.common import artifact_key, stored_run

RECIPE_TAG = "recipe:"
"""Prefix of the tag that names the recipe of a run without a deployment."""


@task(cache_policy=NO_CACHE)
def resolve_configuration(given: Parameters) -> Resolved:
    """Code defaults < the deployment's parameters < what was given, merged deeply.

    A retry or a requeue of the same flow run gets what the first try resolved: a deployment that changed in between
    must not turn the rest of this run into another training. Raises Failure naming key, value and remedy.
    """
    check_run_count(Settings().max_run_count)
    root = Settings().storage_root
    check_storage(root)
    stored = stored_run()
    if stored.is_file():
        values = read_json(stored)
        resolved = Resolved(Config.model_validate(values["config"]), values["origins"], values["recipe"])
        get_run_logger().info("configuration: as resolved at the first try of this run")
    else:
        try:
            resolved = resolve(*_recipe(), given)
        except RefusedConfiguration as error:
            raise Failure("configuration", str(error)) from None
        stored.parent.mkdir(parents=True, exist_ok=True)
        write_json(stored, {**resolved._asdict(), "config": resolved.config.model_dump()})
        _name_run(resolved.config)
    _show(resolved)
    return resolved


def check_run_count(limit: int) -> None:
    """A run that crashes is started again by an automation, but not for ever. Raises Failure."""
    if runtime.flow_run.run_count > limit:
        raise Failure(
            "transient",
            f"this flow run was started {runtime.flow_run.run_count} times and never came to an end "
            f"(FINETUNE_MAX_RUN_COUNT={limit}). Look into the worker's log for what kills it; a new run goes on from "
            "the newest checkpoint.",
        )


def _recipe() -> tuple[str | None, Parameters]:
    """Name and parameters of the run's recipe: its deployment on the server, or for a local run the file's."""
    if runtime.deployment.id:
        with get_client(sync_client=True) as client:
            deployment = client.read_deployment(runtime.deployment.id)
        return deployment.name, deployment.parameters
    names = [tag.removeprefix(RECIPE_TAG) for tag in runtime.flow_run.tags if tag.startswith(RECIPE_TAG)]
    return (names[0], read_recipe(names[0])) if names else (None, {})


def _name_run(config: Config) -> None:
    """Model, method, data, and the name that it had: it tells runs apart, and may be what somebody called it."""
    model, dataset = Path(config.model.name).name, Path(config.dataset.name).name
    name = runtime.flow_run.name
    with get_client(sync_client=True) as client:
        client.update_flow_run(runtime.flow_run.id, name=f"{model} full fine-tuning on {dataset}: {name}")


def _show(resolved: Resolved) -> None:
    values = flatten(resolved.config.model_dump())
    rows: list[dict[str, Any]] = [
        {"setting": name, "value": str(value), "origin": resolved.origins[name]} for name, value in values.items()
    ]
    lines = [f"  {row['setting']} = {row['value']}  ({row['origin']})" for row in rows]
    get_run_logger().info("configuration:\n%s", "\n".join(lines))
    create_table_artifact(rows, key=artifact_key("configuration"), description="Every value and where it came from")
