"""A stand-in for the part of a Databricks workspace that serves models: endpoints, their states, their answers.

`Workspace()` is a server on 127.0.0.1 as long as the `with` block. An update takes so many looks at the endpoint
(`steps`), then the new configuration is active, or the update has failed with the message `fails_with`. What it
refuses, as Databricks documents it: a wrong token, a version that is not there, an update while another is in progress.
"""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "dapi-stand-in"
API, INVOCATIONS = "/api/2.0/serving-endpoints", "/serving-endpoints"
ANSWER = {"object": "chat.completion", "choices": [{"index": 0, "message": {"role": "assistant", "content": "Blue."}}]}


class Workspace:
    def __init__(self, versions: tuple[str, ...] = ("1", "2")):
        self.versions = versions
        self.endpoints: dict[str, dict[str, Any]] = {}
        self.calls: list[tuple[str, str, Any]] = []
        """Method, path and body of each request that changes or asks something."""
        self.steps, self.fails_with, self.answer = 3, "", [ANSWER]

    def __enter__(self) -> "Workspace":
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (Handler,), {"workspace": self}))
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.server.shutdown()
        self.server.server_close()

    @property
    def host(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"

    def start_update(self, name: str, config: dict[str, Any]) -> dict[str, Any]:
        """The endpoint as it is right after a create or an update."""
        endpoint = self.endpoints.setdefault(name, {"name": name, "state": {"ready": "NOT_READY"}})
        for entity in config["served_entities"]:
            entity["state"] = {"deployment": "DEPLOYMENT_CREATING", "deployment_state_message": "Creating container"}
        endpoint["pending_config"] = config
        endpoint["state"]["config_update"] = "IN_PROGRESS"
        endpoint["looks"] = self.steps
        return endpoint

    def look(self, name: str) -> dict[str, Any]:
        """The endpoint one step further; a look after the last step changes nothing."""
        endpoint = self.endpoints[name]
        endpoint["looks"] -= 1
        if endpoint["looks"] == 0 and self.fails_with:
            endpoint["state"]["config_update"] = "UPDATE_FAILED"
            for entity in endpoint["pending_config"]["served_entities"]:
                entity["state"] = {"deployment": "DEPLOYMENT_FAILED", "deployment_state_message": self.fails_with}
        elif endpoint["looks"] == 0:
            endpoint["config"] = endpoint.pop("pending_config")
            for entity in endpoint["config"]["served_entities"]:
                entity["state"] = {"deployment": "DEPLOYMENT_READY"}
            endpoint["state"] = {"ready": "READY", "config_update": "NOT_UPDATING"}
        return endpoint


class Handler(BaseHTTPRequestHandler):
    workspace: Workspace

    def do_GET(self) -> None:
        name = self.path.removeprefix(f"{API}/")
        if not self.path.startswith(API):
            self.refuse(404, "ENDPOINT_NOT_FOUND", f"no such path: {self.path}")
        elif self.is_allowed():
            if name in self.workspace.endpoints:
                self.send(200, self.workspace.look(name))
            else:
                self.refuse(404, "RESOURCE_DOES_NOT_EXIST", f"Endpoint with name '{name}' does not exist.")

    def do_POST(self) -> None:
        body = self.body()
        if not self.is_allowed():
            return
        if self.path == API:
            self.change(body["name"], body["config"])
        elif self.path.startswith(INVOCATIONS):
            self.send(200, self.workspace.answer)

    def do_PUT(self) -> None:
        body = self.body()
        if self.is_allowed():
            self.change(self.path.removeprefix(f"{API}/").removesuffix("/config"), body)

    def change(self, name: str, config: dict[str, Any]) -> None:
        [entity] = config["served_entities"]
        state = self.workspace.endpoints.get(name, {}).get("state", {})
        if entity["entity_version"] not in self.workspace.versions:
            version = f"'{entity['entity_name']}' version {entity['entity_version']}"
            self.refuse(404, "RESOURCE_DOES_NOT_EXIST", f"Registered model {version} does not exist.")
        elif state.get("config_update") == "IN_PROGRESS":
            self.refuse(409, "RESOURCE_CONFLICT", f"Endpoint '{name}' is being updated.")
        else:
            routes = [
                (route["served_model_name"], route["traffic_percentage"])
                for route in config["traffic_config"]["routes"]
            ]
            assert routes == [(entity["name"], 100)]
            self.send(200, self.workspace.start_update(name, {"served_entities": config["served_entities"]}))

    def is_allowed(self) -> bool:
        allowed = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        if not allowed:
            self.refuse(403, "PERMISSION_DENIED", "Invalid access token.")
        return allowed

    def body(self) -> Any:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.workspace.calls.append((self.command, self.path, body))
        return body

    def refuse(self, status: int, code: str, message: str) -> None:
        self.send(status, {"error_code": code, "message": message})

    def send(self, status: int, value: Any) -> None:
        text = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: Any) -> None:
        pass
