"""A run that a schedule made starts only while it is its time. On a real Prefect server, which makes the runs."""

import datetime
import time
from collections.abc import Iterator

import pytest

from config.sections import Config
from tests.conftest import Server

HOURS = 1e-6


@pytest.fixture(scope="module")
def runs(prefect_server: Server) -> Iterator[dict[str, str]]:
    """Ids of two runs whose time has come: one that a schedule made, one that was triggered."""
    import httpx

    with httpx.Client(base_url=prefect_server.api_url) as api:
        flow = api.post("/flows/", json={"name": "scheduled"}).json()["id"]
        now = datetime.datetime.now(datetime.UTC).isoformat()
        schedule = {"schedule": {"interval": 1, "anchor_date": now}, "active": True, "slug": "each-second"}
        body = {"flow_id": flow, "name": "scheduled", "schedules": [schedule]}
        deployment = api.post("/deployments/", json=body).json()["id"]
        triggered = api.post(f"/deployments/{deployment}/create_flow_run", json={}).json()["id"]
        made = {"flow_runs": {"deployment_id": {"any_": [deployment]}}, "sort": "EXPECTED_START_TIME_ASC"}
        for _ in range(60):
            scheduled = [run for run in api.post("/flow_runs/filter", json=made).json() if run["auto_scheduled"]]
            if scheduled and scheduled[0]["expected_start_time"] < datetime.datetime.now(datetime.UTC).isoformat():
                break
            time.sleep(0.5)
        time.sleep(0.1)
        yield {"scheduled": scheduled[0]["id"], "triggered": triggered}
        api.delete(f"/deployments/{deployment}")
        api.delete(f"/flow_runs/{triggered}")


@pytest.fixture
def too_late(prefect_server: Server, runs: dict[str, str], monkeypatch: pytest.MonkeyPatch):
    from prefect.settings import PREFECT_API_URL, temporary_settings

    from tasks.schedule import too_late

    def ask(made: str, hours: float | None, run_count: int = 1) -> str | None:
        monkeypatch.setenv("PREFECT__RUNTIME__FLOW_RUN__ID", runs[made])
        monkeypatch.setenv("PREFECT__RUNTIME__FLOW_RUN__RUN_COUNT", str(run_count))
        config = Config.model_validate({"run": {"max_late_hours": hours}})
        with temporary_settings({PREFECT_API_URL: prefect_server.api_url}):
            return too_late(config)

    return ask


def test_a_scheduled_run_that_is_late_is_skipped_with_the_reason(too_late) -> None:
    reason = too_late("scheduled", HOURS)
    assert reason
    assert reason.startswith("skipped: ")
    assert "run.max_late_hours=1e-06" in reason


def test_others_start(too_late) -> None:
    assert too_late("scheduled", 1) is None, "in time"
    assert too_late("scheduled", None) is None, "no limit"
    assert too_late("triggered", HOURS) is None, "a person wants it"
    assert too_late("scheduled", HOURS, run_count=2) is None, "it has begun"
