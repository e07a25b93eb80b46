"""Serve a model: a configuration for vLLM, or an endpoint of Databricks Model Serving.

    python -m finetuning.serving vllm DIRECTORY|NAME|URI [--output vllm.yaml]
    python -m finetuning.serving databricks NAME|URI [--workload_type GPU_MEDIUM] [--timeout_seconds 3600]

NAME is `catalog.schema.model` and stands for the version with the alias `champion`; URI is `models:/NAME/3` or
`models:/NAME@alias`. Exit codes: 0 done; 1 refused or failed, and a line says why; 2 wrong usage. Secrets come from the
environment only.
"""

import logging
import re
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_settings import (
    BaseSettings,
    CliPositionalArg,
    CliSettingsSource,
    CliSubCommand,
    SettingsConfigDict,
    get_subcommand,
)

from config.cli import DOTTED_OPTIONS, USAGE_ERROR
from config.recipes import explain
from config.settings import Settings, apply_environment
from finetuning import endpoint
from finetuning.artifacts import read_json, read_manifest
from finetuning.champion import ALIAS, registry
from finetuning.classify import classify
from finetuning.errors import Failure
from finetuning.packaging import check_model_directory
from finetuning.registry import ModelVersion, check_name

FAILED = 1
GENERATION_CONFIG = "generation_config.json"
MODEL_URI = re.compile(r"(?:models:/)?(?P<name>[^/@]+)(?:/(?P<number>\d+)|@(?P<alias>[\w-]+))?")
Version = Field(None, pattern=r"^\d+$")


class Vllm(BaseModel):
    """Check a model directory for vLLM and write what `vllm serve --config FILE` reads. Nothing is downloaded."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    name: CliPositionalArg[str]
    """A model directory, or a registered version that was trained on this machine."""
    version: str | None = Version
    """Number of the version, instead of the champion."""
    served_model_name: str | None = None
    """What requests call it. Default: the registered name, or the name of the directory."""
    output: Path = Path("vllm.yaml")
    """The file to write."""

    def run(self) -> None:
        directory, name = self._model()
        write_vllm_config(directory, self.served_model_name or name, self.output)
        print(f"vllm serve --config {self.output}")

    def _model(self) -> tuple[Path, str]:
        if Path(self.name).is_dir():
            return Path(self.name).resolve(), Path(self.name).resolve().name
        name, version = find_version(self.name, self.version)
        directory = Settings().storage_root / "model-directories" / (version.fingerprint or "-")
        if read_manifest(directory):
            return directory, name
        uri = f"models:/{name}/{version.number}"
        raise Failure(
            "configuration",
            f"the files of {uri} are not on this machine. Download them with: mlflow artifacts download --artifact-uri "
            f"{uri} --dst-path DIRECTORY; then: python -m finetuning.serving vllm DIRECTORY/model --served_model_name "
            f"{name}",
        )


class Databricks(BaseModel):
    """Make or change an endpoint that serves a version in Unity Catalog, wait until it does, and ask it something."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    name: CliPositionalArg[str]
    """The registered version."""
    version: str | None = Version
    """Number of the version, instead of the champion."""
    endpoint_name: str | None = Field(None, pattern=r"^[A-Za-z0-9_-]+$")
    """Default: the registered name with `-` for `.`."""
    workload_type: Literal[endpoint.WORKLOAD_TYPES] = "GPU_MEDIUM"
    """Kind of machine. GPU_SMALL is one without bfloat16."""
    workload_size: str = "Small"
    """How many requests at a time: Small 4, Medium 8 to 16, Large 16 to 64."""
    scale_to_zero: bool = True
    """Stop while nobody asks. The first question after that waits for the start."""
    timeout_seconds: float = Field(3600, gt=0)
    """How long to wait for the endpoint; it goes on starting afterwards."""
    question: str = "Hello! Who are you?"
    """What is asked in the end."""
    max_tokens: int = Field(64, ge=1)
    """Of the answer."""

    def run(self) -> None:
        name, version = find_version(self.name, self.version)
        wanted = endpoint.Wanted(
            endpoint=self.endpoint_name or name.replace(".", "-"),
            model=name,
            version=version.number,
            workload_type=self.workload_type,
            workload_size=self.workload_size,
            scale_to_zero=self.scale_to_zero,
        )
        print(endpoint.serve(wanted, self.timeout_seconds, self.question, self.max_tokens))


class CommandLine(BaseSettings):
    """Serve a model with vLLM or with Databricks Model Serving; see docs/serving.md."""

    model_config = SettingsConfigDict(
        **DOTTED_OPTIONS, cli_prog_name="python -m finetuning.serving", cli_implicit_flags=True
    )

    vllm: CliSubCommand[Vllm]
    databricks: CliSubCommand[Databricks]

    @classmethod
    def settings_customise_sources(cls, settings_cls: type[BaseSettings], **sources: Any) -> tuple[()]:
        return ()  # the command line only


def main(arguments: list[str]) -> None:
    try:
        line = CommandLine(_cli_settings_source=CliSettingsSource(CommandLine, cli_parse_args=arguments))
    except ValidationError as error:
        print("\n".join(explain(error)), file=sys.stderr)
        sys.exit(USAGE_ERROR)
    command = get_subcommand(line, is_required=False)
    if command is None:
        print("python -m finetuning.serving vllm|databricks NAME (see --help)", file=sys.stderr)
        sys.exit(USAGE_ERROR)
    apply_environment()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("finetuning").setLevel(logging.INFO)
    try:
        command.run()
    except Exception as error:
        failure = classify(error)
        if failure.kind == "bug":
            raise
        print(failure.message, file=sys.stderr)
        sys.exit(FAILED)


def find_version(name_or_uri: str, number: str | None) -> tuple[str, ModelVersion]:
    """Registered name and version. Raises Failure: no such version, or it is not READY."""
    match = MODEL_URI.fullmatch(name_or_uri)
    if match is None:
        raise Failure("configuration", f"{name_or_uri!r} is no directory, and not NAME, models:/NAME/3, models:/NAME@x")
    name, number, alias = match["name"], number or match["number"], match["alias"] or ALIAS
    check_name(name)
    versions = registry().versions(name)
    wanted = [one for one in versions if (one.number == number if number else alias in one.aliases)]
    if not wanted:
        there = ", ".join(one.number for one in versions) or "none"
        missing = f"no version {number}" if number else f"no version with the alias {alias!r}"
        raise Failure("configuration", f"{name} has {missing}. Versions: {there}; choose one with --version N")
    if wanted[0].status != "READY":
        raise Failure("transient", f"{name} version {wanted[0].number} is {wanted[0].status}, not READY")
    return name, wanted[0]


def write_vllm_config(directory: Path, served_model_name: str, output: Path) -> None:
    """The chat template needs no option: vLLM takes the directory's, as it takes its generation config.

    The names are options of vllm/engine/arg_utils.py, read by the parser of vLLM 0.32.0. Raises Failure when a file is
    missing, or when vLLM is installed here and refuses an option.
    """
    check_model_directory(directory)
    if not (directory / GENERATION_CONFIG).is_file():  # without it answers do not end where a turn does
        raise Failure("configuration", f"the model directory {directory} lacks: {GENERATION_CONFIG}")
    config = read_json(directory / "config.json")
    text_config = config.get("text_config", config)
    options = {
        "model": str(directory),
        "served-model-name": served_model_name,
        "dtype": config.get("dtype") or config.get("torch_dtype") or "auto",
        "max-model-len": text_config.get("max_position_embeddings"),
        "generation-config": "auto",
    }
    text = yaml.safe_dump({name: value for name, value in options.items() if value is not None}, sort_keys=False)
    if output.suffix not in (".yaml", ".yml"):
        raise Failure("configuration", f"{output}: vLLM reads only files that end with .yaml or .yml")
    try:
        output.write_text(f"# {config['architectures'][0]}. vllm serve --config {output.name}\n{text}")
    except OSError as error:
        raise Failure("configuration", f"{output} cannot be written: {error}") from error
    if find_spec("vllm"):
        parse_with_vllm(output)
    else:
        logging.getLogger(__name__).info("vLLM is not installed here: it has not read %s yet", output)


def parse_with_vllm(file: Path) -> Any:
    """The options as vLLM's own parser has them. Raises Failure."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    try:
        return AsyncEngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args(["--config", str(file)])
    except SystemExit:  # it has printed why
        raise Failure("configuration", f"the vLLM that is installed here refuses {file}") from None


if __name__ == "__main__":
    main(sys.argv[1:])
