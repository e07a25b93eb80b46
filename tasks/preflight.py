"""What must hold before any work starts, and which dataset and model are meant, exactly."""

from collections.abc import Callable
from typing import NamedTuple

from prefect import get_run_logger, runtime, task
from prefect.artifacts import create_table_artifact
from prefect.cache_policies import NO_CACHE

from config.sections import Config
from config.settings import Settings
from finetuning.artifacts import read_json, write_json
from finetuning.inputs import Input, Kind, identify
from finetuning.preflight import Places, check
from finetuning.resume import training_fingerprint
from tasks.common import RETRIED, artifact_key, stored_run
from tasks.data import dataset_fingerprint
from tasks.model import model_fingerprint
from tasks.tokens import tokens_fingerprint


class Inputs(NamedTuple):
    dataset: Input
    model: Input


@task(cache_policy=NO_CACHE, **RETRIED)
def preflight(config: Config) -> Inputs:
    """Refuse a run that cannot end well, in seconds, with all that is wrong; pin dataset and model. Raises Failure."""
    refresh = str(runtime.flow_run.id) if config.run.refresh else None
    stored = read_json(stored_run())
    findings, inputs = check(config, pinned(config, stored.get("inputs"), refresh), places(config), get_run_logger())
    get_run_logger().info("preflight:\n%s", findings.text())
    create_table_artifact(
        findings.rows(), key=artifact_key("preflight"), description="What was looked at before any work"
    )
    if failure := findings.failure:
        raise failure
    if "inputs" not in stored:
        values = {kind: source.model_dump(mode="json") for kind, source in inputs.items()}
        write_json(stored_run(), {**stored, "inputs": values})
    return Inputs(**inputs)


def pinned(config: Config, stored: dict | None, refresh: str | None) -> Callable[[Kind], Input]:
    """Pinned once a flow run, as the configuration is: a file or a branch that changed since its first try must not
    turn the rest of the run into another training."""

    def pin(kind: Kind) -> Input:
        if stored:
            return Input.model_validate(stored[kind])
        section = getattr(config, kind)
        return identify(kind, section.name, section.revision, refresh)

    return pin


def places(config: Config) -> Callable[[Input, Input], Places]:
    """Where the artifacts made of a dataset and a model are, or will be."""

    def place(dataset: Input, model: Input) -> Places:
        root, prepared = Settings().storage_root, model_fingerprint(config.model, model)
        tokens = tokens_fingerprint(config, dataset_fingerprint(config.dataset, dataset), prepared)
        return Places(
            model=root / "models" / prepared,
            tokens=root / "tokens" / tokens,
            training=root / "trainings" / training_fingerprint(config, tokens, prepared),
        )

    return place
