"""The command line `python -m flows.finetune DEPLOYMENT --section.name value ...`: parsing only, nothing is run."""

import sys

from pydantic import ValidationError
from pydantic_settings import (
    BaseSettings,
    CliPositionalArg,
    CliSettingsSource,
    CliToggleFlag,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from config.recipes import Parameters, RefusedConfiguration, did_you_mean, explain, known_names
from config.sections import (
    DatasetSection,
    EvaluationSection,
    GateSection,
    ModelSection,
    RegistrySection,
    RunSection,
    TrainingSection,
)

USAGE_ERROR = 2
DOTTED_OPTIONS = SettingsConfigDict(
    cli_kebab_case=False,
    cli_avoid_json=True,
    cli_hide_none_type=True,
    cli_parse_none_str="null",
    # One option sets one value: with partial updates on, the defaults of its siblings would count as given, too.
    nested_model_default_partial_update=False,
    use_attribute_docstrings=True,
)
"""How every command of ours takes sections."""


class CommandLine(BaseSettings):
    """Fine-tune a chat model and register it, here and now. An option sets one value of the deployment; all others stay
    as prefect.yaml has them. Where things are stored and which servers are used: environment variables, see README."""

    model_config = SettingsConfigDict(
        **DOTTED_OPTIONS, cli_prog_name="python -m flows.finetune", cli_exit_on_error=False
    )

    deployment: CliPositionalArg[str]
    """Name of a deployment in prefect.yaml, for example `smoke`."""

    plan: CliToggleFlag[bool] = False
    """Only look whether it would work, what it would train on and what it would take, and make nothing. Exit code 0:
    nothing is refused. 1: something is. 2: wrong usage."""

    model: ModelSection = ModelSection()
    dataset: DatasetSection = DatasetSection()
    training: TrainingSection = TrainingSection()
    registry: RegistrySection = RegistrySection()
    evaluation: EvaluationSection = EvaluationSection()
    gate: GateSection = GateSection()
    run: RunSection = RunSection()

    @classmethod
    def settings_customise_sources(
        cls, settings_cls: type[BaseSettings], **sources: PydanticBaseSettingsSource
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return ()  # the command line only: an environment variable must not become a hyperparameter


def parse(arguments: list[str]) -> tuple[str, Parameters]:
    """The deployment's name and what was given, sections to values, and `plan` if it was. Leaves the process on
    `--help`.

    Raises RefusedConfiguration: an unknown option with the nearest right name, a wrong value with key and value.
    """
    _refuse_unknown_options(arguments)
    try:
        source = CliSettingsSource(CommandLine, cli_parse_args=arguments)
        line = CommandLine(_cli_settings_source=source)
    except ValidationError as error:
        raise RefusedConfiguration("\n".join(explain(error))) from None
    except SettingsError as error:
        raise RefusedConfiguration(f"{error} (see python -m flows.finetune --help)") from None
    given = line.model_dump(exclude_unset=True)
    return given.pop("deployment"), given


def _refuse_unknown_options(arguments: list[str]) -> None:
    """argparse would take `--training.max_st` for an abbreviation and would not name the nearest option."""
    names = [*known_names(), "plan"]
    for argument in arguments:
        name = argument.removeprefix("--").partition("=")[0]
        if argument.startswith("--") and name not in (*names, "help"):
            raise RefusedConfiguration(f"{argument}: there is no such option.{did_you_mean(name, names)}")


def arguments_or_exit() -> tuple[str, Parameters, bool]:
    """The deployment's name, what was given, and whether it is only to be planned."""
    try:
        deployment, given = parse(sys.argv[1:])
        return deployment, given, given.pop("plan", False)
    except RefusedConfiguration as error:
        print(error, file=sys.stderr)
        sys.exit(USAGE_ERROR)
