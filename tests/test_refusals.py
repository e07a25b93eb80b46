"""Bad input is refused before any training: one clear line, exit code 1, and a Failed state that says the same."""

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import PROJECT, Place, Server, run_module

RunFlow = Callable[..., subprocess.CompletedProcess[str]]


def failed_states(server: Server) -> list[str]:
    import httpx

    body = {"flow_runs": {"state": {"type": {"any_": ["FAILED"]}}}}
    runs = httpx.post(f"{server.api_url}/flow_runs/filter", json=body).json()
    return [run["state"]["message"] for run in runs]


@pytest.mark.parametrize(
    ("arguments", "environment", "line"),
    [
        (["--dataset.name", "nowhere.jsonl"], {}, "dataset.name='nowhere.jsonl': there is no such file or directory"),
        (["--model.name", "Qwen/Qwen3-4B"], {}, "model.name='Qwen/Qwen3-4B': the hub was not asked (HF_HUB_OFFLINE=1)"),
        (["--dataset.name", "{empty}"], {}, "there are no rows in it."),
        (
            ["--dataset.name", "{text}"],
            {},
            "found columns text; to train on `text` as it is, without a chat template, set",
        ),
        (["--dataset.name", "{small}"], {}, "the test split has 1 of at least 2 rows (dataset.min_rows)"),
        (["--training.max_length", "100000"], {}, "training.max_length=100000 is beyond the"),
        (["--registry.allow_local", "false"], {}, "registry.allow_local=false and the registry is sqlite:///"),
        ([], {"MLFLOW_TRACKING_URI": "file:///tmp/mlruns"}, "MLFLOW_TRACKING_URI=file:///tmp/mlruns: MLflow no longer"),
        ([], {"MLFLOW_TRACKING_URI": "http://127.0.0.1:9"}, "MLFLOW_TRACKING_URI=http://127.0.0.1:9 cannot be used"),
        (["--training.eval_steps", "7"], {}, "is not a multiple of training.eval_steps=7"),
    ],
)
def test_refused_before_training(
    arguments: list[str],
    environment: dict[str, str],
    line: str,
    run_flow: RunFlow,
    prefect_server: Server,
    place: Place,
    bad_files: dict[str, str],
) -> None:
    environment = {"MLFLOW_REGISTRY_URI": environment.get("MLFLOW_TRACKING_URI", ""), **environment}
    result = run_flow("smoke", *[argument.format(**bad_files) for argument in arguments], **environment)
    assert result.returncode == 1, result.stdout
    last = result.stderr.strip().splitlines()[-1]
    assert line in last
    assert "Traceback" not in result.stdout + result.stderr
    assert any(line in message for message in failed_states(prefect_server))
    assert not (place.root / "trainings").exists() or not list((place.root / "trainings").glob("*/checkpoints"))


@pytest.fixture(scope="module")
def bad_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("bad")
    turns = [{"messages": [{"role": "user", "content": a}, {"role": "assistant", "content": "b"}]} for a in "xyz"]
    contents = {"empty": [], "text": [{"text": "a"}] * 30, "small": turns}
    for name, rows in contents.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {name: str(folder / f"{name}.jsonl") for name in contents}


def test_unknown_deployment_and_unwritable_root_start_nothing(tmp_path: Path, run_flow: RunFlow) -> None:
    unknown = run_flow("smokey")
    assert (unknown.returncode, unknown.stdout) == (2, "")
    assert unknown.stderr.startswith("deployment 'smokey' is not in prefect.yaml. Did you mean smoke? It has: qwen3-4b")
    (tmp_path / "file").write_text("")
    root = tmp_path / "file" / "root"
    closed = run_module("flows.finetune", "smoke", FINETUNE_STORAGE_ROOT=str(root), PREFECT_HOME=str(tmp_path))
    assert (closed.returncode, closed.stdout) == (1, "")
    assert closed.stderr.strip() == (
        f"FINETUNE_STORAGE_ROOT={root} cannot be written: Not a directory. Set it to a folder that can."
    )


def test_too_little_space_is_refused_with_the_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The numbers of Qwen3-4B in fp32: three checkpoints of 48.3e9 bytes and two models of 8.04e9."""
    from config.sections import Config
    from finetuning.errors import Failure
    from finetuning.limits import check_fits, disk_bytes

    model = {"context_length": 40960, "num_parameters": 4_022_468_096}
    assert disk_bytes(Config(), model["num_parameters"]) == 3 * 12 * 4_022_468_096 + 2 * 2 * 4_022_468_096
    usage = shutil.disk_usage(tmp_path)._replace(free=50 * 2**30)
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    with pytest.raises(
        Failure, match=r"needs 149.8 GiB for 3 checkpoints .* 50.0 GiB are free.*save_total_limit"
    ) as full:
        check_fits(Config(), model, tmp_path / "not" / "there" / "yet")
    assert full.value.kind == "out_of_disk"


def test_flash_attention_without_its_package_is_refused() -> None:
    from config.sections import Config
    from config.settings import Settings
    from finetuning.errors import Failure
    from finetuning.preflight import check_settings

    values = {"model": {"attn_implementation": "flash_attention_2"}, "registry": {"allow_local": True}}
    with pytest.raises(Failure, match=r"model\.attn_implementation='flash_attention_2' needs .* flash-attn") as refused:
        check_settings(Config.model_validate(values), Settings())
    assert refused.value.kind == "configuration"


def test_stochastic_rounding_without_a_compiler_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from config.sections import Config
    from config.settings import Settings
    from finetuning.errors import Failure
    from finetuning.preflight import check_settings

    values = {"training": {"precision": "bf16_stochastic_rounding"}, "registry": {"allow_local": True}}
    check_settings(Config.model_validate(values), Settings())
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(Failure, match=r"compiles its optimizer, and there is no g\+\+"):
        check_settings(Config.model_validate(values), Settings())


def test_registering_by_hand_refuses_what_is_no_model_directory(place: Place) -> None:
    result = run_module("finetuning.register", str(PROJECT / "samples"), **place.environment)
    assert result.returncode == 1
    assert result.stderr.startswith(f"{PROJECT / 'samples'} is no model directory of this pipeline")
