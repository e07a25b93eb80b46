"""Run the flow here and now, or only look whether it would work, from the command line, without a deployment or a
worker."""

import logging
import shutil
import sys
from typing import TYPE_CHECKING

from prefect import tags

from config.cli import USAGE_ERROR, arguments_or_exit
from config.recipes import Parameters, RefusedConfiguration, read_recipe, resolve
from config.settings import Settings
from finetuning.errors import Failure
from finetuning.findings import Findings
from finetuning.preflight import check, check_storage
from tasks.configuration import RECIPE_TAG
from tasks.preflight import pinned, places

if TYPE_CHECKING:
    from prefect import Flow


def main(flow: "Flow") -> None:
    """Exit codes: 0 completed, 1 failed, 2 wrong usage. The reason of a failure is the last line on stderr."""
    deployment, given, only_plan = arguments_or_exit()
    try:
        recipe = read_recipe(deployment)
    except RefusedConfiguration as error:
        print(error, file=sys.stderr)
        sys.exit(USAGE_ERROR)
    try:  # before the temporary server, which needs the storage root, too
        check_storage(Settings().storage_root)
    except Failure as failure:
        sys.exit(str(failure))
    if only_plan:
        sys.exit(plan(deployment, recipe, given))

    with tags(RECIPE_TAG + deployment):
        state = flow(**given, return_state=True)
    if not state.is_completed():
        print(f"\n{state.message}", file=sys.stderr)
        sys.exit(1)
    print(f"\n{state.message}")


def plan(deployment: str, recipe: Parameters, given: Parameters) -> int:
    """Print what a preflight finds. Nothing is made: no run, no server, no experiment, no registered model. The exit
    code: 0 when nothing is refused, else 1."""
    findings = Findings()
    try:
        config = resolve(deployment, recipe, given).config
    except RefusedConfiguration as error:
        findings.refuse("configuration", Failure("configuration", str(error)))
    else:
        find, logger = pinned(config, stored=None, refresh=None), logging.getLogger(__name__)
        logger.setLevel(logging.ERROR)  # what a library warns of is in the findings, or of no use here
        findings, _ = check(config, find, places(config), logger, only_look=True)
    print(findings.text(shutil.get_terminal_size().columns if sys.stdout.isatty() else None))
    return 1 if findings.failure else 0
