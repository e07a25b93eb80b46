"""Several processes as one child: however one of them ends, all end, and what is reported is why."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from config.sections import Config, TrainingSection
from finetuning import group, processes
from finetuning.artifacts import read_json, write_json
from finetuning.errors import Failure
from finetuning.launcher import run_step
from tests.conftest import PROJECT
from tests.test_launcher import LOGGER, blocking_job


def members(step: Path, idle: bool = True) -> list[psutil.Process]:
    """The processes of the group that runs the job in `step`, by rank; `idle`: not before they wait for something."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        found = {}
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.Error, KeyError):
                if str(step / "job.json") in process.cmdline():
                    found[process.environ()["RANK"]] = process
        if len(found) == 2 and not (idle and any(each.status() != psutil.STATUS_SLEEPING for each in found.values())):
            return [found[rank] for rank in sorted(found)]
        time.sleep(0.05)
    raise TimeoutError("the group did not start")


def left_behind(step: Path) -> list[int]:
    """Processes of the job that are still there some seconds later."""
    end = time.monotonic() + 10
    while left := [process.pid for process in working_on(step)]:
        if time.monotonic() > end:
            return left
        time.sleep(0.05)
    return []


def working_on(step: Path) -> Iterator[psutil.Process]:
    for process in psutil.process_iter(["cmdline"]):
        if str(step / "job.json") in (process.info["cmdline"] or []):
            yield process


def run_sharded(step: Path, fails: int) -> tuple[dict, str]:
    """Result and output of `tests.sharded` as a group of two."""
    step.mkdir()
    write_json(step / "job.json", {"fails": fails})
    command = [sys.executable, "-m", "finetuning.group", "2", "tests.sharded", str(step / "job.json")]
    done = subprocess.run(command, cwd=PROJECT, text=True, capture_output=True, timeout=120)
    assert done.returncode == 1, done.stdout + done.stderr
    return read_json(step / "result.json"), done.stdout


def test_weights_that_only_another_process_holds_are_looked_at(tmp_path: Path) -> None:
    result, _ = run_sharded(tmp_path / "step", fails=-1)
    assert result["kind"] == "diverged"
    assert result["message"].startswith("weight holds values that are not finite at step 2.")
    others = read_json(tmp_path / "step" / "result-1.json")
    assert (others["kind"], others["message"]) == (result["kind"], result["message"]), (
        "all refuse, none is left waiting"
    )


def test_the_process_that_failed_is_reported_not_the_one_that_lost_it(tmp_path: Path) -> None:
    result, output = run_sharded(tmp_path / "step", fails=1)
    assert (result["kind"], "this process has no memory left" in result["message"]) == ("out_of_memory", True)
    named = [line for line in output.splitlines() if line.endswith("MemoryError: this process has no memory left")]
    assert [line.startswith("process 1: ") for line in named] == [True]


def test_no_process_outlives_the_flow(tmp_path: Path) -> None:
    values, step = blocking_job(tmp_path), tmp_path / "step"
    code = (
        "import logging, pathlib\nfrom finetuning.launcher import run_step\n"
        f"run_step('data', {values!r}, logging.getLogger(), directory=pathlib.Path({str(step)!r}), num_processes=2)"
    )
    flow = subprocess.Popen([sys.executable, "-c", code], cwd=PROJECT)
    members(step)
    flow.kill()
    flow.wait()
    assert left_behind(step) == []


@pytest.mark.parametrize(
    ("who", "number", "kind"),
    [
        ("group", signal.SIGKILL, "transient"),
        ("group", signal.SIGTERM, "preempted"),
        ("process", signal.SIGSEGV, "bug"),
    ],
)
def test_a_group_ends_as_its_process_does(tmp_path: Path, who: str, number: signal.Signals, kind: str) -> None:
    step = tmp_path / "step"

    def kill() -> None:
        process = members(step)[1]
        os.kill(process.ppid() if who == "group" else process.pid, number)

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(Failure) as failed:
        run_step("data", blocking_job(tmp_path), LOGGER, directory=step, num_processes=2)
    killer.join()
    assert failed.value.kind == kind
    assert ("told to stop" if kind == "preempted" else number.name) in failed.value.message
    assert left_behind(step) == []


LOST = {"status": "failed", "kind": "transient", "message": "Connection closed by peer", "time": 2.0}
CAUSE = {"status": "failed", "kind": "data", "message": "the cause", "time": 1.0}


@pytest.mark.parametrize(
    ("first", "other", "settled"),
    [
        (LOST, CAUSE, CAUSE),
        (None, CAUSE, CAUSE),
        (CAUSE, LOST, CAUSE),
        ({**LOST, "time": 0.5}, LOST, {**LOST, "time": 0.5}),
        ({"status": "done", "result": {}}, CAUSE, {"status": "done", "result": {}}),
    ],
)
def test_whose_word_counts(tmp_path: Path, first: dict | None, other: dict, settled: dict) -> None:
    if first:
        write_json(tmp_path / "result.json", first)
    write_json(tmp_path / "result-1.json", other)
    assert group.settle(tmp_path) == settled
    assert read_json(tmp_path / "result.json") == settled


@pytest.mark.parametrize(
    ("exit_codes", "number"),
    [([1, 1], None), ([1, -9], 9), ([-11, -15], 11), ([-15, -9], 9), ([-15], 15), ([], None)],
)
def test_which_signal_ended_it(exit_codes: list[int], number: int | None) -> None:
    assert group.deadly(exit_codes) == number


@pytest.mark.parametrize(
    ("kind", "number", "expected"),
    [("transient", 9, True), ("preempted", 9, True), ("preempted", 15, False), ("data", 9, False), (None, 9, True)],
)
def test_what_a_signal_explains(kind: str | None, number: int, expected: bool) -> None:
    assert group.collateral(kind and {"kind": kind}, number) == expected


@pytest.mark.parametrize(
    ("visible", "asked", "said"),
    [
        (4, 1, "4 GPUs are visible and training.num_processes=1: set CUDA_VISIBLE_DEVICES to one of them, or "
               "training.num_processes=4."),
        (1, 2, "1 GPU is visible and training.num_processes=2: make more visible by CUDA_VISIBLE_DEVICES, or set "
               "training.num_processes=1."),
        (2, 8, "2 GPUs are visible and training.num_processes=8"),
    ],
)  # fmt: skip
def test_gpus_that_do_not_fit_are_refused(monkeypatch: pytest.MonkeyPatch, visible: int, asked: int, said: str) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: visible)
    with pytest.raises(Failure) as refused:
        processes.check_devices(asked)
    assert refused.value.kind == "configuration"
    assert refused.value.message.startswith(said)


@pytest.mark.parametrize(("visible", "asked"), [(0, 1), (0, 2), (1, 1), (4, 2), (4, 4)])
def test_gpus_that_fit(monkeypatch: pytest.MonkeyPatch, visible: int, asked: int) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: visible)
    processes.check_devices(asked)


def test_a_job_for_several_is_not_trained_by_one() -> None:
    with pytest.raises(Failure, match=r"num_processes=2, and 1 was started.*finetuning.group 2") as refused:
        processes.join(2)
    assert refused.value.kind == "configuration"


def test_one_process_trains_as_ever(tmp_path: Path) -> None:
    values = {"bf16": True}
    assert processes.options(TrainingSection(), values) is values
    assert processes.share("value") == ["value"]
    assert processes.result_file(tmp_path) == tmp_path / "result.json"


@pytest.mark.parametrize(("precision", "autocast"), [("fp32", True), ("bf16", False)])
def test_gpus_share_the_weights(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, precision: str, autocast: bool
) -> None:
    """What transformers and accelerate make of the options; FSDP2 itself needs GPUs."""
    from accelerate.utils import FullyShardedDataParallelPlugin
    from trl import SFTConfig

    from finetuning.trainer import OURS

    training = Config.model_validate({"training": {"num_processes": 2, "precision": precision}}).training
    with monkeypatch.context() as patch:
        patch.setattr("torch.cuda.is_available", lambda: True)
        options = processes.options(training, training.model_dump(exclude=OURS))
    assert options["bf16"] == autocast, "accelerate makes float32 of weights under autocast"
    args = SFTConfig(output_dir=str(tmp_path), use_cpu=True, eval_strategy="steps", **options)
    plugin = FullyShardedDataParallelPlugin(**args.fsdp_plugin_args)
    assert (plugin.fsdp_version, plugin.reshard_after_forward, plugin.activation_checkpointing) == (2, True, True)
    assert plugin.state_dict_type.name == "FULL_STATE_DICT"
    assert not args.activation_checkpointing, "transformers refuses both"
    assert args.average_tokens_across_devices
