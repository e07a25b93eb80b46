"""The memory plan by itself, without a GPU and without weights.

    python -m finetuning.memory CONFIG_OR_MODEL_DIRECTORY [--gpu h100-80gb] [--training.max_length 8192 ...] [--grid]

Exit codes: 0 it fits (of a grid: some of it); 1 it does not, and what would is printed; 2 wrong usage, or a
configuration whose memory is not understood.
"""

import sys
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_settings import (
    BaseSettings,
    CliImplicitFlag,
    CliPositionalArg,
    CliSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from config.cli import DOTTED_OPTIONS, USAGE_ERROR
from config.recipes import did_you_mean, explain
from config.sections import ModelSection, TrainingSection
from finetuning.memory.architecture import NotUnderstood, read_config
from finetuning.memory.gpus import GPUS
from finetuning.memory.plan import plan
from finetuning.memory.proposals import NOTHING_FITS, proposals
from finetuning.memory.report import grid, grid_table, precisions, table

DOES_NOT_FIT = 1


class CommandLine(BaseSettings):
    """The peak of GPU memory of a training step, from config.json alone. Exit code 0: it fits (of a grid: some of it).
    1: it does not, and what would is printed. 2: wrong usage, or a configuration that is not understood."""

    model_config = SettingsConfigDict(
        **DOTTED_OPTIONS, cli_prog_name="python -m finetuning.memory", cli_exit_on_error=False
    )

    path: CliPositionalArg[Path]
    """A config.json, or a directory with one."""
    gpu: str = "h100-80gb"
    """Which GPU; training.num_processes says how many."""
    grid: CliImplicitFlag[bool] = False
    """Show max_length and micro-batch against each other instead."""
    model: ModelSection = ModelSection()
    training: TrainingSection = TrainingSection()

    @classmethod
    def settings_customise_sources(cls, settings_cls: type[BaseSettings], **sources: Any) -> tuple[()]:
        return ()  # the command line only


def main(arguments: list[str]) -> int:
    """The exit code."""
    try:
        line = CommandLine(_cli_settings_source=CliSettingsSource(CommandLine, cli_parse_args=arguments))
        if line.gpu not in GPUS:
            near = did_you_mean(line.gpu, GPUS)
            raise SettingsError(f"--gpu {line.gpu}: not known.{near} Known: {', '.join(GPUS)}.")
        return _show_grid(line) if line.grid else _show_plan(line)
    except ValidationError as error:
        print("\n".join(explain(error)), file=sys.stderr)
    except (SettingsError, NotUnderstood) as error:
        print(error, file=sys.stderr)
    return USAGE_ERROR


def _show_grid(line: CommandLine) -> int:
    gpu = GPUS[line.gpu]
    cells = grid(read_config(line.path), line.model, line.training, gpu)
    print(*grid_table(cells, line.training, gpu), sep="\n")
    return 0 if any(cell.fits for cell in cells.values()) else DOES_NOT_FIT


def _show_plan(line: CommandLine) -> int:
    what = read_config(line.path), line.model, line.training, GPUS[line.gpu]
    planned = plan(*what)
    print(*table(planned), "", *precisions(*what), sep="\n")
    if planned.fits:
        return 0
    found = [f"fits: {proposal}" for proposal in proposals(*what)]
    print("does not fit", *(found or [NOTHING_FITS]), sep="\n", file=sys.stderr)
    return DOES_NOT_FIT


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
