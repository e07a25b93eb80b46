"""An endpoint of Databricks Model Serving that serves one version of a model in Unity Catalog."""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from config.settings import shown
from finetuning.errors import Failure

if TYPE_CHECKING:
    from databricks.sdk import WorkspaceClient
    from databricks.sdk.service.serving import ServedEntityInput, ServingEndpointDetailed

WORKLOAD_TYPES = (
    *("CPU", "CPU_MEDIUM", "CPU_LARGE", "GPU_SMALL", "GPU_MEDIUM", "GPU_LARGE", "GPU_XLARGE", "GPU_XLARGE_8"),
    "MULTIGPU_MEDIUM",
)
"""`ServingModelWorkloadType` of databricks-sdk; which of them a workspace has is for the server to say."""
POLL_SECONDS = 10
TELL_SECONDS = 60
"""A line of progress at each change, and after so long without one."""
ANSWER_SECONDS = 300
"""What one request may take: an endpoint that was scaled to zero starts first."""
RETRY_SECONDS = 60
"""How long the SDK tries a request again that found nobody; its own default is 300."""

logger = logging.getLogger(__name__)


class Wanted(NamedTuple):
    endpoint: str
    model: str
    version: str
    workload_type: str
    workload_size: str
    scale_to_zero: bool

    @property
    def entity_name(self) -> str:
        """Name of the served entity, by which its logs are found."""
        return f"{self.model.rpartition('.')[2]}-{self.version}"

    def entity(self) -> "ServedEntityInput":
        from databricks.sdk.service.serving import ServedEntityInput, ServingModelWorkloadType

        return ServedEntityInput(
            name=self.entity_name,
            entity_name=self.model,
            entity_version=self.version,
            workload_type=ServingModelWorkloadType(self.workload_type),
            workload_size=self.workload_size,
            scale_to_zero_enabled=self.scale_to_zero,
        )

    def is_config(self, config: Any) -> bool:
        """Whether a configuration of the endpoint, active or pending, is this one and nothing else."""
        entities = (config and config.served_entities) or []
        return [
            (
                *(entity.entity_name, entity.entity_version, entity.workload_size, bool(entity.scale_to_zero_enabled)),
                entity.workload_type.value if entity.workload_type else "CPU",
            )
            for entity in entities
        ] == [(self.model, self.version, self.workload_size, self.scale_to_zero, self.workload_type)]


def serve(wanted: Wanted, timeout_seconds: float, question: str, max_tokens: int) -> str:
    """Make, change or leave the endpoint so that it serves `wanted`, wait, and return its answer to `question`.

    Host and token are DATABRICKS_HOST and DATABRICKS_TOKEN, or what else databricks-sdk finds.
    Raises Failure: no access, the server refuses, the deployment fails, or it takes longer than `timeout_seconds`.
    """
    end = time.monotonic() + timeout_seconds
    with _explained(wanted):
        client = _client()
        _change(client, wanted, end)
        _watch(client, wanted, end, lambda endpoint: _is_served(endpoint, client, wanted))
        return ask(client, wanted.endpoint, question, max_tokens)


def _client() -> "WorkspaceClient":
    from databricks.sdk import WorkspaceClient
    from databricks.sdk.config import Config

    try:
        config = Config(http_timeout_seconds=ANSWER_SECONDS, retry_timeout_seconds=RETRY_SECONDS)
        return WorkspaceClient(config=config)
    except ValueError as error:  # no host, no token
        text = f"no access to Databricks: {' '.join(str(error).split())}. Set DATABRICKS_HOST and DATABRICKS_TOKEN"
        raise Failure("authentication", shown(text)) from error


def ask(client: "WorkspaceClient", endpoint: str, question: str, max_tokens: int) -> str:
    """The SDK's own `query` cannot read a list, which is what MLflow's server answers to `messages`."""
    body = {"messages": [{"role": "user", "content": question}], "max_tokens": max_tokens}
    found = client.api_client.do("POST", f"/serving-endpoints/{endpoint}/invocations", body=body)
    if isinstance(found, dict):
        found = found.get("predictions", found)
    answer = found[0] if isinstance(found, list) and found else found
    try:
        return answer["choices"][0]["message"]["content"]
    except (KeyError, IndexError, TypeError):
        raise Failure("bug", f"endpoint {endpoint} answered something else than a chat completion: {found!r}") from None


def _change(client: "WorkspaceClient", wanted: Wanted, end: float) -> None:
    from databricks.sdk.errors import NotFound
    from databricks.sdk.service.serving import EndpointCoreConfigInput, Route, TrafficConfig

    entities, what = [wanted.entity()], f"{wanted.model} version {wanted.version}"
    traffic = TrafficConfig(routes=[Route(served_model_name=wanted.entity_name, traffic_percentage=100)])
    try:
        endpoint = client.serving_endpoints.get(wanted.endpoint)
    except NotFound:
        logger.info("making endpoint %s for %s", wanted.endpoint, what)
        config = EndpointCoreConfigInput(name=wanted.endpoint, served_entities=entities, traffic_config=traffic)
        client.serving_endpoints.create(wanted.endpoint, config=config)
        return
    if _update(endpoint) == "IN_PROGRESS":
        if wanted.is_config(endpoint.pending_config):
            logger.info("endpoint %s is being changed to %s already", wanted.endpoint, what)
            return
        logger.info("endpoint %s is being changed to something else: waiting for that to end", wanted.endpoint)
        endpoint = _watch(client, wanted, end, lambda endpoint: _update(endpoint) != "IN_PROGRESS")
    if not _is_broken(endpoint) and wanted.is_config(endpoint.config):
        logger.info("endpoint %s has %s already", wanted.endpoint, what)
        return
    logger.info("changing endpoint %s to %s", wanted.endpoint, what)
    client.serving_endpoints.update_config(wanted.endpoint, served_entities=entities, traffic_config=traffic)


def _watch(
    client: "WorkspaceClient", wanted: Wanted, end: float, is_done: Callable[["ServingEndpointDetailed"], bool]
) -> "ServingEndpointDetailed":
    begin, told, told_at = time.monotonic(), "", 0.0
    while True:
        endpoint, now = client.serving_endpoints.get(wanted.endpoint), time.monotonic()
        text = _describe(endpoint)
        if text != told or now - told_at >= TELL_SECONDS:
            logger.info("%4.0f s  %s", now - begin, text)
            told, told_at = text, now
        if is_done(endpoint):
            return endpoint
        if now + POLL_SECONDS > end:
            remedy = "It goes on by itself: run this again to wait on, or with a larger --timeout_seconds"
            message = f"endpoint {wanted.endpoint} is not ready yet: {text}. {remedy}. {_where(client, wanted)}"
            raise Failure("transient", message)
        time.sleep(POLL_SECONDS)


def _is_served(endpoint: "ServingEndpointDetailed", client: "WorkspaceClient", wanted: Wanted) -> bool:
    if _is_broken(endpoint):
        message = f"endpoint {wanted.endpoint} failed: {_describe(endpoint)}. {_where(client, wanted)}"
        raise Failure("configuration", message)
    ready = endpoint.state.ready and endpoint.state.ready.value == "READY"
    return bool(ready) and _update(endpoint) == "NOT_UPDATING" and wanted.is_config(endpoint.config)


def _is_broken(endpoint: "ServingEndpointDetailed") -> bool:
    states = [entity.state for entity in _entities(endpoint)]
    deployments = {state.deployment.value for state in states if state and state.deployment}
    failed = deployments & {"DEPLOYMENT_FAILED", "DEPLOYMENT_ABORTED"}
    return bool(failed) or _update(endpoint) in ("UPDATE_FAILED", "UPDATE_CANCELED")


def _update(endpoint: "ServingEndpointDetailed") -> str:
    return endpoint.state.config_update.value if endpoint.state.config_update else "NOT_UPDATING"


def _entities(endpoint: "ServingEndpointDetailed") -> list[Any]:
    """Of the change under way or failed; else the active ones."""
    pending = endpoint.pending_config and endpoint.pending_config.served_entities
    return pending or (endpoint.config and endpoint.config.served_entities) or []


def _describe(endpoint: "ServingEndpointDetailed") -> str:
    ready = endpoint.state.ready.value if endpoint.state.ready else "NOT_READY"
    parts = [f"{ready}, {_update(endpoint)}"]
    for entity in _entities(endpoint):
        state = entity.state
        if state and (state.deployment or state.deployment_state_message):
            said = f"{state.deployment.value if state.deployment else ''} {state.deployment_state_message or ''}"
            parts.append(f"{entity.name}: {' '.join(said.split())}")
    return "; ".join(parts)


def _where(client: "WorkspaceClient", wanted: Wanted) -> str:
    """The way to the logs: in the UI, and with Databricks' command line."""
    logs = f"databricks serving-endpoints build-logs|logs {wanted.endpoint} {wanted.entity_name}"
    return f"Logs: {client.config.host.rstrip('/')}/ml/endpoints/{wanted.endpoint}, or: {logs}"


@contextmanager
def _explained(wanted: Wanted) -> Iterator[None]:
    """Turn an error of the SDK into a `Failure` that names the endpoint."""
    from databricks.sdk import errors

    try:
        yield
    except Failure:
        raise
    except OSError as error:  # also of the SDK itself and of requests
        text = f"endpoint {wanted.endpoint} for {wanted.model} version {wanted.version}: {' '.join(str(error).split())}"
        if isinstance(error, (errors.Unauthenticated, errors.PermissionDenied)):
            text += ". It needs the rights to make endpoints and to use the model"
            raise Failure("authentication", shown(text)) from error
        refused = isinstance(error, (errors.BadRequest, errors.NotFound, errors.ResourceConflict))
        raise Failure("configuration" if refused else "transient", shown(text)) from error
