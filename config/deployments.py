"""What prefect.yaml may say: Prefect ignores keys that it does not know and does not check a schedule's parameters."""

from collections.abc import Iterator
from typing import Any

import yaml

from config.recipes import RefusedConfiguration, did_you_mean, resolve
from config.settings import PROJECT_ROOT

FILE = PROJECT_ROOT / "prefect.yaml"

# Those that Prefect reads, less what this project does without. Deployment concurrency is one: see docs/operate.md.
DEPLOYMENT_KEYS = {
    "name", "description", "tags", "entrypoint", "work_pool", "parameters", "schedules", "triggers", "pull", "version",
}  # fmt: skip
WORK_POOL_KEYS = {"name", "work_queue_name", "job_variables"}
SCHEDULE_KEYS = {
    "slug", "cron", "interval", "rrule", "anchor_date", "day_or", "timezone", "active", "parameters", "replaces",
}  # fmt: skip


def read_deployments() -> dict[str, dict[str, Any]]:
    """Name -> block of prefect.yaml."""
    return {deployment["name"]: deployment for deployment in yaml.safe_load(FILE.read_text())["deployments"]}


def problems(deployment: dict[str, Any]) -> Iterator[str]:
    """What is wrong with a block, a line each: where, the key, the value it has, the remedy."""
    where = f"deployment {deployment['name']}"
    yield from unknown(where, deployment, DEPLOYMENT_KEYS)
    yield from unknown(f"{where}, work_pool", deployment["work_pool"], WORK_POOL_KEYS)
    yield from refusals(where, deployment, {})
    slugs = [schedule.get("slug") for schedule in deployment.get("schedules") or []]
    for schedule, slug in zip(deployment.get("schedules") or [], slugs, strict=True):
        here = f"{where}, schedule {slug or schedule}"
        yield from unknown(here, schedule, SCHEDULE_KEYS)
        yield from refusals(here, deployment, schedule.get("parameters") or {})
        if not slug or slugs.count(slug) > 1:
            yield f"{here}: slug={slug!r}: give it one of its own, by which the next deploy finds it again."
        if not schedule.get("timezone"):
            yield f"{here}: timezone is not set and would be UTC: say which, Etc/UTC or Europe/Paris for example."


def unknown(where: str, found: dict[str, Any], known: set[str]) -> Iterator[str]:
    for key in sorted(set(found) - known):
        yield f"{where}: {key}={found[key]!r}: this key is not used here.{did_you_mean(key, known)}"


def refusals(where: str, deployment: dict[str, Any], given: dict[str, Any]) -> Iterator[str]:
    """Why a run of the deployment with these parameters would be refused."""
    try:
        resolve(deployment["name"], deployment.get("parameters") or {}, given)
    except RefusedConfiguration as error:
        yield from (f"{where}: {line}" for line in str(error).splitlines())
