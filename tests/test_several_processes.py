"""Two processes that train together, by gloo on the CPU: the losses of one process, and its endings.

As in `tests.test_training` each test runs the real program. FSDP2 needs GPUs and is not tried here.
"""

import json
import math
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from finetuning.artifacts import damaged_files, read_json, read_manifest
from finetuning.errors import Failure
from tests.test_group import left_behind, members
from tests.test_training import Bench, assert_like_straight

TWO = {"num_processes": 2, "gradient_accumulation_steps": 1}


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    bench = Bench(tmp_path_factory.mktemp("several"))
    assert bench.train("straight", **TWO)["num_gpus"] == 0
    return bench


def signal_to(bench: Bench, name: str, step: int, who: str, number: signal.Signals) -> Callable[[dict], None]:
    """For `on_progress`: send a signal to the group, or to the second of its processes, at the report of that step."""
    sent = []

    def act(event: dict[str, Any]) -> None:
        if event["step"] >= step and not sent:
            sent.append(step)
            second = members(bench.folder / name, idle=False)[1]
            os.kill(second.ppid() if who == "group" else second.pid, number)

    return act


def test_two_processes_have_the_losses_of_one(bench: Bench) -> None:
    """Of one that has the same rows a step."""
    one = bench.train("one", per_device_train_batch_size=4, gradient_accumulation_steps=1)
    two = bench.train("straight", **TWO)
    assert [entry["step"] for entry in two["log_history"]] == [entry["step"] for entry in one["log_history"]]
    for ours, theirs in zip(two["log_history"], one["log_history"], strict=True):
        for name in {"loss", "grad_norm", "learning_rate", "num_tokens"} & theirs.keys():
            assert math.isclose(ours[name], theirs[name], rel_tol=1e-4), (name, ours, theirs)
    assert two["num_tokens"] == one["num_tokens"]


def test_the_first_process_keeps_the_books(bench: Bench) -> None:
    folder = bench.folder / "straight"
    lines = (folder / "log.txt").read_text().splitlines()
    assert len([line for line in lines if "8 steps of 4 conversations" in line]) == 1
    told = [json.loads(line.removeprefix("PROGRESS ")) for line in lines if line.startswith("PROGRESS")]
    steps = [event["step"] for event in told if "step" in event]
    assert len({event["mlflow_run_id"] for event in told if "mlflow_run_id" in event}) == 1
    assert steps == sorted(steps)
    assert not [line for line in lines if "process 1: " in line and line.startswith(("INFO", "PROGRESS"))]
    assert bench.mlflow("straight")[0].info.status == "FINISHED"
    assert {path.name for path in folder.iterdir()} == {
        "job.json", "log.txt", "result.json", "training.json", "checkpoints",
    }  # fmt: skip
    manifest = read_manifest(folder / "checkpoints" / "checkpoint-8")
    assert {"rng_state_0.pth", "rng_state_1.pth", "model.safetensors", "optimizer.pt"} <= manifest["files"].keys()
    assert left_behind(folder) == []


def test_killed_it_goes_on_to_the_same_weights(bench: Bench) -> None:
    with pytest.raises(Failure, match="the step 'train' was ended by signal SIGKILL") as killed:
        bench.train("killed", signal_to(bench, "killed", 3, "second", signal.SIGKILL), **TWO)
    assert killed.value.kind == "transient"
    assert left_behind(bench.folder / "killed") == []
    bench.train("killed", **TWO)
    assert_like_straight(bench, "killed")


def test_told_to_stop_all_stop_at_one_step(bench: Bench) -> None:
    """The whole group, and then only one of its processes."""
    folder = bench.folder / "stopped"
    for who in ("group", "second"):
        act = signal_to(bench, "stopped", 2, who, signal.SIGTERM)
        with pytest.raises(Failure, match=r"stopped at step \d of 8, where a checkpoint was saved") as stopped:
            bench.train("stopped", act, **TWO)
        assert stopped.value.kind == "preempted"
        assert read_json(folder / "training.json")["status"] == "KILLED"
        assert left_behind(folder) == []
        [*_, newest] = sorted((folder / "checkpoints").glob("checkpoint-*"))
        assert damaged_files(newest) == []
    bench.train("stopped", **TWO)
    assert bench.weights("stopped") == bench.weights("straight")
    assert bench.mlflow("stopped")[0].info.status == "FINISHED"


def test_what_another_process_failed_with_is_what_is_told(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second process cannot write its part of the checkpoint; the first one only loses its connection."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, resource\n"
        "if os.environ.get('RANK') == '1':\n"
        "    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    folder = bench.folder / "full"
    with pytest.raises(Failure) as failed:
        bench.train("full", **TWO)
    assert failed.value.kind == "out_of_disk", failed.value.message
    assert re.match(rf"RuntimeError: .*: disk full at {folder}: .* GiB needed", failed.value.message)
    assert "Connection" not in failed.value.message, "which is all that the first process knows"
    assert read_json(folder / "training.json")["status"] == "FAILED"
    assert bench.mlflow("full")[0].info.status == "FAILED"
    assert not list((folder / "checkpoints").glob("checkpoint-*")), "what is not whole makes room"
    assert left_behind(folder) == []
