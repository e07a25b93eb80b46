"""Whether a run that a schedule made is still wanted when it can start."""

import datetime

from prefect import runtime
from prefect.client.orchestration import get_client

from config.sections import Config


def too_late(config: Config) -> str | None:
    """Why this run is not wanted any more, or None.

    After an outage, or behind a long training, every run that a schedule made meanwhile is still waiting. One that a
    person triggered is wanted however long it waited, and one that has begun once goes on.
    """
    limit = config.run.max_late_hours
    if limit is None or runtime.flow_run.run_count > 1:
        return None
    with get_client(sync_client=True) as client:
        run = client.read_flow_run(runtime.flow_run.id)
    if not run.auto_scheduled or run.expected_start_time is None:
        return None
    hours = (datetime.datetime.now(datetime.UTC) - run.expected_start_time).total_seconds() / 3600
    if hours <= limit:
        return None
    return (
        f"skipped: {hours:.3g} h late (run.max_late_hours={limit:g}). It was scheduled for "
        f"{run.expected_start_time:%Y-%m-%d %H:%M} UTC; nothing was started"
    )
