"""The champion of a real registry: asked through MLflow's server, written down for vLLM, served by a stand-in of
Databricks. docs/serving.md says what is tried here and what is not."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from bench.servers import background, free_port, wait_for_http
from finetuning import endpoint, serving
from finetuning.artifacts import file_digest, fingerprint, write_manifest
from finetuning.packaging import CHAT_TASK, package_model
from finetuning.registry import register_version
from tests.conftest import PROJECT, Place
from tests.registries import start_run
from tests.serving_endpoints import ANSWER, API, TOKEN, Workspace
from tests.test_packaging import METADATA

SAMPLE = PROJECT / "samples" / "model"
NAME, ENDPOINT = "main.default.served", "main-default-served"
MESSAGES = [{"role": "user", "content": "Ben in Milan gets the blue chair on Friday. What does Ben get?"}]
VLLM_OPTIONS = {"model", "served-model-name", "dtype", "max-model-len", "generation-config"}
"""In vllm/engine/arg_utils.py of vLLM 0.32.0; its parser read the file, its CPU build served the sample."""


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory, place: Place) -> dict[str, str]:
    """Versions 1 and 2 of one model; 1 is the champion, and its model directory is below the storage root."""
    from mlflow import MlflowClient

    folder = tmp_path_factory.mktemp("serving")
    uri = f"sqlite:///{folder}/mlflow.db"
    package = package_model(SAMPLE, folder / "package", task=CHAT_TASK, metadata=METADATA)
    run_id, mark = start_run(uri, folder / "artifacts"), fingerprint(model=file_digest(SAMPLE / "model.safetensors"))
    for own in (mark, "elsewhere"):
        job = {"run_id": run_id, "tracking_uri": uri, "registry_uri": uri, "tags": {}, "description": "Orders."}
        register_version(package, name=NAME, fingerprint=own, **job)
    MlflowClient(uri).set_registered_model_alias(NAME, "champion", "1")
    directory = shutil.copytree(SAMPLE, place.root / "model-directories" / mark)
    write_manifest(directory)
    return {"MLFLOW_TRACKING_URI": uri, "MLFLOW_REGISTRY_URI": uri, "directory": str(directory)}


class Command(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def run(
    registry: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> Callable[..., Command]:
    """The command line, in this process."""
    for name, value in registry.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(endpoint, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(endpoint, "RETRY_SECONDS", 1)

    def run(*arguments: Any) -> Command:
        capsys.readouterr()
        caplog.clear()
        code = 0
        try:
            serving.main([str(argument) for argument in arguments])
        except SystemExit as end:
            code = end.code
        printed = capsys.readouterr()
        return Command(code, printed.out, printed.err + caplog.text)

    return run


# MLflow's own server


@pytest.fixture(scope="module")
def ask(registry: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Any]]:
    """`ask(path, **body)`: an answer of `mlflow models serve` of the champion."""
    import httpx

    folder, port = tmp_path_factory.mktemp("mlflow-serve"), free_port()
    command = ["mlflow", "models", "serve", "-m", f"models:/{NAME}@champion", "--env-manager", "local"]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    server = background(command, registry, folder / "log.txt", cwd=folder)
    with server:
        wait_for_http(f"http://127.0.0.1:{port}/ping", server)
        yield lambda path="/invocations", **body: httpx.post(f"http://127.0.0.1:{port}{path}", json=body, timeout=60)


@pytest.mark.parametrize("greedy", [{"top_k": 1}, {"temperature": 0.01}])
def test_messages_are_answered_with_a_list(ask: Callable[..., Any], greedy: dict[str, Any]) -> None:
    answers = [ask(messages=MESSAGES, max_tokens=12, **greedy).json() for _ in range(3)]
    for answer in answers:
        assert isinstance(answer, list)
        assert answer[0]["object"] == "chat.completion"
        assert answer[0]["usage"]["completion_tokens"] <= 12
    assert len({answer[0]["choices"][0]["message"]["content"] for answer in answers}) == 1


@pytest.mark.parametrize(
    "body",
    [
        {"dataframe_records": [{"messages": MESSAGES, "max_tokens": 4}]},
        {"dataframe_split": {"columns": ["messages", "max_tokens"], "data": [[MESSAGES, 4]]}},
    ],
)
def test_data_frames_are_answered_with_predictions(ask: Callable[..., Any], body: dict[str, Any]) -> None:
    [answer] = ask(**body).json()["predictions"]
    assert answer["choices"][0]["message"]["role"] == "assistant"


@pytest.mark.parametrize(
    ("change", "status", "said"),
    [
        ({"temperature": 0}, 400, "strictly positive float"),
        ({"stop": ["."]}, 400, "offline"),  # it wants the base model's tokenizer, by its name, from the hub
        ({"stream": False}, 400, "not valid for pipeline"),
        ({"n": 2}, 400, "not valid for pipeline"),
        ({"messages": []}, 500, "empty conversation"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]},
            400,
            "Failed to enforce schema",
        ),
        ({"inputs": {"messages": MESSAGES}}, 400, ""),
        ({"instances": [{"messages": MESSAGES}]}, 400, ""),
    ],
)
def test_what_mlflows_server_refuses(ask: Callable[..., Any], change: dict[str, Any], status: int, said: str) -> None:
    body = change if {"inputs", "instances"} & change.keys() else {"messages": MESSAGES, "max_tokens": 4, **change}
    answer = ask(**body)
    assert answer.status_code == status
    assert said in answer.text


def test_there_is_no_openai_path(ask: Callable[..., Any]) -> None:
    assert ask("/v1/chat/completions", messages=MESSAGES).status_code == 404


# vLLM


@pytest.mark.parametrize("name", [NAME, f"models:/{NAME}/1", f"models:/{NAME}@champion"])
def test_a_registered_version_for_vllm(
    run: Callable[..., Command], registry: dict[str, str], tmp_path: Path, name: str
) -> None:
    file = tmp_path / "serve.yaml"
    assert run("vllm", name, "--output", file)[:2] == (0, f"vllm serve --config {file}\n")
    options = yaml.safe_load(file.read_text())
    assert options == {
        "model": registry["directory"],
        "served-model-name": NAME,
        "dtype": "bfloat16",
        "max-model-len": 2048,
        "generation-config": "auto",
    }
    assert options.keys() == VLLM_OPTIONS
    assert "Qwen3ForCausalLM" in file.read_text()


def test_a_directory_for_vllm(run: Callable[..., Command], tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    assert run("vllm", SAMPLE, "--output", file, "--served_model_name", "orders").code == 0
    options = yaml.safe_load(file.read_text())
    assert (options["model"], options["served-model-name"]) == (str(SAMPLE), "orders")


@pytest.mark.parametrize("gone", ["chat_template.jinja", "generation_config.json", "model.safetensors", "config.json"])
def test_what_vllm_would_miss_is_said(run: Callable[..., Command], tmp_path: Path, gone: str) -> None:
    directory = shutil.copytree(SAMPLE, tmp_path / "model")
    (directory / gone).unlink()
    done = run("vllm", directory, "--output", tmp_path / "serve.yaml")
    assert done.code == 1
    assert f"the model directory {directory} lacks: " in done.err
    assert gone in done.err
    assert not (tmp_path / "serve.yaml").exists()


def test_a_version_that_is_elsewhere_is_not_downloaded(run: Callable[..., Command]) -> None:
    done = run("vllm", NAME, "--version", "2")
    assert done.code == 1
    assert f"mlflow artifacts download --artifact-uri models:/{NAME}/2 --dst-path DIRECTORY" in done.err


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        ((), 2, "vllm|databricks NAME"),
        (("vllm",), 2, "required: NAME"),
        (("vllm", SAMPLE, "--port", "1"), 2, "unrecognized arguments: --port"),
        (("databricks", NAME, "--workload_type", "HUGE"), 2, "HUGE"),
        (("databricks", NAME, "--version", "champion"), 2, "version"),
        (("vllm", SAMPLE, "--output", "serve.json"), 1, "only files that end with .yaml or .yml"),
        (("vllm", SAMPLE, "--output", "/nowhere/serve.yaml"), 1, "/nowhere/serve.yaml cannot be written"),
        (("vllm", "models:/a b@c@d"), 1, "is no directory, and not NAME"),
        (("vllm", "served"), 1, "must be catalog.schema.model"),
        (("databricks", f"models:/{NAME}/7"), 1, f"{NAME} has no version 7. Versions: 2, 1; choose one"),
        (("databricks", f"models:/{NAME}@best"), 1, f"{NAME} has no version with the alias 'best'. Versions: 2, 1"),
        (("databricks", "main.default.absent"), 1, "has no version with the alias 'champion'. Versions: none"),
    ],
)
def test_wrong_usage_and_refusals(run: Callable[..., Command], arguments: Any, code: int, said: str) -> None:
    done = run(*arguments)
    assert done.code == code
    assert said in done.err
    assert "Traceback" not in done.err


# Databricks


@pytest.fixture
def workspace(monkeypatch: pytest.MonkeyPatch) -> Iterator[Workspace]:
    with Workspace() as workspace:
        monkeypatch.setenv("DATABRICKS_HOST", workspace.host)
        monkeypatch.setenv("DATABRICKS_TOKEN", TOKEN)
        yield workspace


def paths(workspace: Workspace) -> list[tuple[str, str]]:
    return [(method, path) for method, path, _ in workspace.calls]


INVOKED = ("POST", f"/serving-endpoints/{ENDPOINT}/invocations")
UPDATED = ("PUT", f"{API}/{ENDPOINT}/config")


def test_made_then_left_then_changed(run: Callable[..., Command], workspace: Workspace) -> None:
    done = run("databricks", NAME, "--question", "What is it?", "--max_tokens", "9")
    assert done[:2] == (0, "Blue.\n")
    (_, _, made), (_, _, asked) = workspace.calls
    assert made["name"] == ENDPOINT
    [entity] = made["config"]["served_entities"]
    assert {key: value for key, value in entity.items() if key != "state"} == {
        "name": "served-1",
        "entity_name": NAME,
        "entity_version": "1",
        "workload_type": "GPU_MEDIUM",
        "workload_size": "Small",
        "scale_to_zero_enabled": True,
    }
    assert asked == {"messages": [{"role": "user", "content": "What is it?"}], "max_tokens": 9}
    for said in (f"making endpoint {ENDPOINT}", "NOT_READY, IN_PROGRESS; served-1: DEPLOYMENT_CREATING", "0 s  READY"):
        assert said in done.err

    workspace.calls.clear()
    done = run("databricks", NAME)
    assert done.code == 0
    assert f"has {NAME} version 1 already" in done.err
    assert paths(workspace) == [INVOKED]

    workspace.calls.clear()
    assert run("databricks", NAME, "--version", "2", "--no-scale_to_zero", "--workload_type", "CPU").code == 0
    assert paths(workspace) == [UPDATED, INVOKED]
    [entity] = workspace.endpoints[ENDPOINT]["config"]["served_entities"]
    assert (entity["entity_version"], entity["scale_to_zero_enabled"]) == ("2", False)


@pytest.mark.parametrize("answer", [[ANSWER], ANSWER, {"predictions": [ANSWER]}])
def test_every_form_of_answer(run: Callable[..., Command], workspace: Workspace, answer: Any) -> None:
    workspace.answer = answer
    assert run("databricks", NAME)[:2] == (0, "Blue.\n")


def test_a_failed_deployment_is_told_with_the_way_to_its_logs(
    run: Callable[..., Command], workspace: Workspace
) -> None:
    workspace.fails_with = "Container image creation failed"
    done = run("databricks", NAME, "--endpoint_name", "orders")
    assert (done.code, done.out) == (1, "")
    assert "endpoint orders failed: NOT_READY, UPDATE_FAILED; served-1: DEPLOYMENT_FAILED Container image" in done.err
    assert f"{workspace.host}/ml/endpoints/orders" in done.err
    assert "databricks serving-endpoints build-logs|logs orders served-1" in done.err

    workspace.fails_with = ""
    workspace.calls.clear()
    assert run("databricks", NAME, "--endpoint_name", "orders").code == 0
    assert paths(workspace)[0] == ("PUT", f"{API}/orders/config")


def test_an_update_under_way(run: Callable[..., Command], workspace: Workspace) -> None:
    """Of another version: waited for, then ours. Of this one: nothing is sent."""
    assert run("databricks", NAME).code == 0
    [entity] = workspace.endpoints[ENDPOINT]["config"]["served_entities"]
    workspace.start_update(ENDPOINT, {"served_entities": [{**entity, "entity_version": "2"}]})
    workspace.calls.clear()
    done = run("databricks", NAME)
    assert done.code == 0
    assert "is being changed to something else" in done.err
    assert paths(workspace) == [UPDATED, INVOKED]

    workspace.start_update(ENDPOINT, {"served_entities": [entity]})
    workspace.calls.clear()
    assert run("databricks", NAME).code == 0
    assert paths(workspace) == [INVOKED]


def test_an_endpoint_that_does_not_get_ready(run: Callable[..., Command], workspace: Workspace) -> None:
    workspace.steps = 10**6
    done = run("databricks", NAME, "--timeout_seconds", "0.2")
    assert done.code == 1
    assert f"endpoint {ENDPOINT} is not ready yet: NOT_READY, IN_PROGRESS; served-1: DEPLOYMENT_CREATING" in done.err


def test_what_the_server_refuses(
    run: Callable[..., Command], workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    workspace.versions = ()
    done = run("databricks", NAME)
    assert done.code == 1
    assert f"endpoint {ENDPOINT} for {NAME} version 1: Registered model '{NAME}' version 1 does not exist." in done.err

    monkeypatch.setenv("DATABRICKS_TOKEN", "dapi-wrong-secret")
    done = run("databricks", NAME)
    assert done.code == 1
    assert "Invalid access token." in done.err
    assert "dapi-wrong-secret" not in done.out + done.err

    monkeypatch.delenv("DATABRICKS_TOKEN")
    done = run("databricks", NAME)
    assert done.code == 1
    assert "Set DATABRICKS_HOST and DATABRICKS_TOKEN" in done.err


def test_nobody_there(run: Callable[..., Command], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATABRICKS_HOST", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setenv("DATABRICKS_TOKEN", TOKEN)
    done = run("databricks", NAME)
    assert done.code == 1
    assert f"endpoint {ENDPOINT} for {NAME} version 1: " in done.err
    assert TOKEN not in done.out + done.err
