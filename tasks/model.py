"""Prepare the base model: chat template, pad token, generation config."""

from pathlib import Path
from typing import Any, Self

from prefect import get_run_logger, task
from pydantic import model_validator

from config.sections import ModelSection
from config.settings import Settings
from finetuning.artifacts import file_digest, fingerprint
from finetuning.inputs import Input
from finetuning.launcher import run_step
from finetuning.model import MODEL_VERSION
from tasks.common import CACHED, RETRIED
from tasks.references import Reference


class ModelReference(Reference):
    """A prepared model; its weights, which lie outside of the artifact, are there as well."""

    @property
    def base(self) -> Path:
        """Directory with the base model's weights."""
        return Path(self.facts["base"])

    @model_validator(mode="after")
    def _has_weights(self) -> Self:
        if not self.base.is_dir():
            raise ValueError(f"{self.base}, where the weights were, is gone")
        return self


def model_fingerprint(section: ModelSection, source: Input) -> str:
    file = section.chat_template_file and Path(section.chat_template_file).expanduser()
    return fingerprint(
        version=MODEL_VERSION,
        source=source.identity,
        path=source.path and str(source.path),
        trust_remote_code=section.trust_remote_code,
        chat_style=section.chat_style,
        chat_template_file=file and file.is_file() and file_digest(file),
    )


def _cache_key(context: Any, parameters: dict[str, Any]) -> str:
    return f"model-{model_fingerprint(parameters['section'], parameters['source'])}"


@task(cache_key_fn=_cache_key, **CACHED, **RETRIED)
def prepare_model(section: ModelSection, source: Input) -> ModelReference:
    """The tokenizer and generation config that training uses; the weights stay where they are."""
    output = Settings().storage_root / "models" / model_fingerprint(section, source)
    job = {"section": section.model_dump(), "input": source.model_dump(mode="json"), "output": str(output)}
    run_step("model", job, get_run_logger())
    return ModelReference(path=output)
