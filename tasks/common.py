"""What all tasks share: where Prefect keeps the small results of cached ones, what it may retry, what it logs."""

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from prefect import get_run_logger, runtime
from prefect.tasks import exponential_backoff

from config.settings import Settings
from finetuning.errors import Failure

CACHED: dict[str, Any] = {
    # Under the storage root, so that every worker that sees the artifacts sees the results, too.
    "result_storage": Settings().storage_root / "prefect-results",
    "result_serializer": "json",  # validates a Reference when it is read: a dead artifact is a miss
    "persist_result": True,
}

HEALING = {"transient", "preempted"}
"""Kinds of failure that can be gone on the next try; everything else fails at once."""


def can_heal(task: Any, run: Any, state: Any) -> bool:
    failure = state.result(raise_on_failure=False)
    return isinstance(failure, Failure) and failure.kind in HEALING


RETRIED: dict[str, Any] = {
    "retries": 2,
    "retry_delay_seconds": exponential_backoff(5),
    "retry_jitter_factor": 0.5,
    "retry_condition_fn": can_heal,
}


class WithoutTraceback(logging.Filter):
    """Prefect logs every exception with its traceback. A Failure is a sentence for the user: it needs none, and the
    traceback of a bug in a child is in the log already, where the child printed it."""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.exc_info and isinstance(record.exc_info[1], Failure):
            record.exc_info = record.exc_text = None
        return True


for name in ("prefect.flow_runs", "prefect.task_runs"):
    logging.getLogger(name).addFilter(WithoutTraceback())


def stored_run(flow_run_id: object = None) -> Path:
    """What the first try of a flow run, this one by default, decided for all later ones: `config`, `origins`, `recipe`,
    `inputs`."""
    return Settings().storage_root / "runs" / f"{flow_run_id or runtime.flow_run.id}.json"


@contextmanager
def only_shown() -> Iterator[None]:
    """Around what a run makes for the eye alone, at a point where failing would throw away work."""
    try:
        yield
    except Exception as error:
        get_run_logger().warning("this could not be shown in Prefect: %s", " ".join(str(error).split())[:300])


def artifact_key(*words: str) -> str:
    """A Prefect artifact key: lower-case letters, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", "-".join(words).lower()).strip("-")
