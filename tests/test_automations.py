"""`python -m flows.automations` on a real server, and its messages as a real webhook gets them."""

import json
import queue
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from prefect.blocks.notifications import CustomWebhookNotificationBlock
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import Completed, Crashed, Failed, Scheduled, State

from tests.conftest import Server, run_module

TOKEN = "the-token-of-the-webhook"
ALWAYS = ["finetune-crash-without-heartbeat", "finetune-requeue-crashed"]
LATE = Scheduled(name="Late")


class Hook(HTTPServer):
    """A webhook on this machine, and what it was sent: header and JSON."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.received: queue.Queue[tuple[str, dict[str, str]]] = queue.Queue()


class Handler(BaseHTTPRequestHandler):
    server: Hook

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.received.put((self.headers["Authorization"], body))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def client(prefect_server: Server) -> Iterator[SyncPrefectClient]:
    with temporary_settings({PREFECT_API_URL: prefect_server.api_url}), get_client(sync_client=True) as client:
        yield client
        for automation in client.read_automations():  # other tests share the server
            client.delete_automation(automation.id)


@pytest.fixture
def hook(client: SyncPrefectClient) -> Iterator[Hook]:
    """Behind a block, made as docs/notifications.md makes it."""
    with Hook() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        CustomWebhookNotificationBlock(
            name="finetune",
            url=f"http://127.0.0.1:{server.server_port}",
            json_data={"title": "{{subject}}", "text": "{{body}}"},
            headers={"Authorization": "Bearer {{token}}"},
            secrets={"token": TOKEN},
        ).save("finetune", overwrite=True)
        yield server
        server.shutdown()


def names(client: SyncPrefectClient) -> list[str]:
    return sorted(automation.name for automation in client.read_automations())


def test_messages(client: SyncPrefectClient, hook: Hook, prefect_server: Server) -> None:
    done = run_module("flows.automations", "--notify", "custom-webhook/finetune", **prefect_server.environment)
    assert done.returncode == 0, done.stderr
    flow = client.create_flow_from_name("told")
    deployment = client.create_deployment(flow, "some-deployment", tags=["finetune"])

    def told(state: State) -> dict[str, str]:
        run = client.create_flow_run_from_deployment(deployment, state=Scheduled())
        client.set_flow_run_state(run.id, state, force=True)
        authorization, message = hook.received.get(timeout=60)
        assert authorization == f"Bearer {TOKEN}"
        assert run.name in message["title"]
        assert str(run.id) in message["text"], "in the link, or instead of it where the server has no PREFECT_UI_URL"
        assert "some-deployment" in message["text"]
        return message

    remedy = "the GPU is too small. Halve the batch size."
    assert remedy in told(Failed(message=remedy))["text"]
    assert remedy in told(Failed(message=remedy, name="TimedOut"))["text"]
    assert "registered as a.b.c version 7" in told(Completed(message="registered as a.b.c version 7"))["text"]
    crashed = told(Crashed(message="exit code -9"))
    assert "exit code -9" in crashed["text"], "the state that crashed, not the one it was brought back to"
    assert "started again" in crashed["title"]
    assert "UTC" in told(LATE)["text"]
    assert hook.received.empty(), "one message each"


def test_who_is_told_of_what_can_be_changed(client: SyncPrefectClient, hook: Hook, prefect_server: Server) -> None:
    def automations(*arguments: str) -> tuple[int, str]:
        done = run_module("flows.automations", *arguments, **prefect_server.environment)
        return done.returncode, done.stderr

    assert automations("--notify", "slack-webhook/nobody")[0] == 2
    assert names(client) == [], "a block that is not there: nothing is changed"
    assert automations("--notify", "custom-webhook/finetune", "--on", "failed,late")[0] == 0
    kept = sorted([*ALWAYS, "finetune-notify-failed", "finetune-notify-late"])
    assert names(client) == kept
    assert automations()[0] == 0
    assert names(client) == kept, "again, and without --notify: neither more nor less"
    assert automations("--notify", "custom-webhook/finetune", "--on", "crashed")[0] == 0
    assert names(client) == sorted([*ALWAYS, "finetune-notify-crashed"])
    assert automations("--notify", "none")[0] == 0
    assert names(client) == ALWAYS
    code, said = automations("--on", "failed")
    assert (code, "needs --notify" in said) == (2, True)
    assert automations("--notify", "custom-webhook/finetune", "--on", "fail")[0] == 2
