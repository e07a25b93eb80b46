"""Deploy prefect.yaml: `python -m flows.deploy [NAME ...]`, all of its deployments or those.

`prefect deploy`, and around it what that leaves out: parameters and job variables are checked before anything is
deployed, and schedules that left the file leave the server. Exit codes: 0 deployed, 1 the server refused it, 2 the file
or the command line is wrong.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.exceptions import ObjectNotFound
from prefect.settings import get_current_settings

from config.cli import USAGE_ERROR
from config.deployments import problems, read_deployments, unknown
from config.recipes import did_you_mean
from config.settings import PROJECT_ROOT

FLOW = "finetune"


def main() -> None:
    if not get_current_settings().api.url:
        refuse(["PREFECT_API_URL is not set: deployments need a server that stays."])
    wanted = chosen(read_deployments())
    refuse([line for deployment in wanted for line in problems(deployment)])
    with get_client(sync_client=True) as client:
        refuse([line for deployment in wanted for line in pool_problems(client, deployment)])
        names = [word for deployment in wanted for word in ("--name", deployment["name"])]
        command = [sys.executable, "-m", "prefect", "--no-prompt", "deploy", *names]
        # Where it is set, Prefect would put this machine's folder into the pull step instead of the worker's.
        environment = {name: value for name, value in os.environ.items() if name != "FINETUNE_PROJECT_DIR"}
        if subprocess.run(command, cwd=PROJECT_ROOT, env=environment).returncode:
            sys.exit(1)
        for deployment in wanted:
            remove_schedules(client, deployment)


def chosen(deployments: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(prog="python -m flows.deploy", description="Deploy prefect.yaml, checked.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"default: all of {', '.join(deployments)}")
    names = parser.parse_args().names or list(deployments)
    missing = [name for name in names if name not in deployments]
    refuse([f"{name}: no such deployment in prefect.yaml.{did_you_mean(name, deployments)}" for name in missing])
    return [deployments[name] for name in names]


def refuse(lines: list[str]) -> None:
    if lines:
        print("\n".join(lines), file=sys.stderr)
        sys.exit(USAGE_ERROR)


def pool_problems(client: SyncPrefectClient, deployment: dict[str, Any]) -> Iterator[str]:
    """What the deployment asks of its pool and the pool does not have: Prefect would ignore such a job variable."""
    pool, where = deployment["work_pool"]["name"], f"deployment {deployment['name']}"
    try:
        template = client.read_work_pool(pool).base_job_template
    except ObjectNotFound:
        yield (
            f"{where}: work_pool.name={pool!r}: there is no such pool. Create it: prefect work-pool create {pool} "
            "--type process --base-job-template work-pools/process.json (or docker, kubernetes)."
        )
        return
    variables = {name.split(".")[0]: value for name, value in deployment["work_pool"].get("job_variables", {}).items()}
    known = set(template.get("variables", {}).get("properties", {}))
    yield from unknown(f"{where}, job_variables of pool {pool}", variables, known)


def remove_schedules(client: SyncPrefectClient, deployment: dict[str, Any]) -> None:
    """Those with a slug that the file no longer has. One without a slug was made by hand and is no business of ours."""
    kept = {schedule["slug"] for schedule in deployment.get("schedules") or []}
    found = client.read_deployment_by_name(f"{FLOW}/{deployment['name']}")
    for schedule in found.schedules:
        if schedule.slug and schedule.slug not in kept:
            client.delete_deployment_schedule(found.id, schedule.id)
            print(f"{FLOW}/{deployment['name']}: removed the schedule {schedule.slug}, which left prefect.yaml")


if __name__ == "__main__":
    main()
