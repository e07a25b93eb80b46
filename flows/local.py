"""Run the flow here and now, from the command line, without a deployment or a worker."""

import sys
from typing import TYPE_CHECKING

from prefect import tags

from config.cli import USAGE_ERROR, arguments_or_exit
from config.recipes import RefusedConfiguration, read_recipe
from config.settings import Settings
from finetuning.errors import Failure
from finetuning.preflight import check_storage
from tasks.configuration import RECIPE_TAG

if TYPE_CHECKING:
    from prefect import Flow


def main(flow: "Flow") -> None:
    """Exit codes: 0 completed, 1 failed, 2 wrong usage. The reason of a failure is the last line on stderr."""
    deployment, given = arguments_or_exit()
    try:
        read_recipe(deployment)
    except RefusedConfiguration as error:
        print(error, file=sys.stderr)
        sys.exit(USAGE_ERROR)
    try:  # before the temporary server, which needs the storage root, too
        check_storage(Settings().storage_root)
    except Failure as failure:
        sys.exit(str(failure))

    with tags(RECIPE_TAG + deployment):
        state = flow(**given, return_state=True)
    if not state.is_completed():
        print(f"\n{state.message}", file=sys.stderr)
        sys.exit(1)
    print(f"\n{state.message}")
