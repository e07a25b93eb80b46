"""Load and split the dataset, once for each content and set of options."""

from typing import Any

from prefect import get_run_logger, task

from config.sections import DatasetSection
from config.settings import Settings
from finetuning.artifacts import fingerprint
from finetuning.data import DATA_VERSION
from finetuning.inputs import Input
from finetuning.launcher import run_step
from tasks.common import CACHED, RETRIED
from tasks.references import Reference

ELSEWHERE = {"name", "revision", "min_rows", "on_long_rows"}
"""Options that decide nothing about the rows: where they come from is the input's version, and their length is a matter
of `tasks.tokens`."""


def dataset_fingerprint(section: DatasetSection, source: Input) -> str:
    return fingerprint(version=DATA_VERSION, source=source.identity, options=section.model_dump(exclude=ELSEWHERE))


def _cache_key(context: Any, parameters: dict[str, Any]) -> str:
    return f"dataset-{dataset_fingerprint(parameters['section'], parameters['source'])}"


@task(cache_key_fn=_cache_key, **CACHED, **RETRIED)
def load_and_split(section: DatasetSection, source: Input) -> Reference:
    """The prepared dataset: `train.jsonl`, `test.jsonl` and their counts."""
    output = Settings().storage_root / "datasets" / dataset_fingerprint(section, source)
    job = {"section": section.model_dump(), "input": source.model_dump(mode="json"), "output": str(output)}
    run_step("data", job, get_run_logger())
    return Reference(path=output)
