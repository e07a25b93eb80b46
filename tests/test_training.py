"""A training that is killed, stopped or damaged ends as the undisturbed one; one that is lost leaves no model.

Each test runs the real program `finetuning.train` in its child process, without Prefect.
"""

import logging
import math
import os
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from config.sections import Config
from config.settings import Settings
from finetuning import data, model, tokens
from finetuning.artifacts import damaged_files, read_json, read_manifest, write_json
from finetuning.errors import Failure
from finetuning.inputs import identify
from finetuning.launcher import run_step
from tests.conftest import PROJECT
from tests.test_launcher import wait_for_child

LOGGER = logging.getLogger("test")
SAMPLES = PROJECT / "samples"
TRAINING = {
    "max_steps": 8,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "per_device_eval_batch_size": 8,
    "max_length": 128,
    "learning_rate": 1e-3,
    "warmup_steps": 2,
    "bf16": False,
    "activation_checkpointing": False,
    "eval_steps": 2,
    "save_steps": 2,
    "logging_steps": 1,
}


class Bench:
    """Prepared inputs, and trainings on them in directories of their own."""

    def __init__(self, folder: Path, base: Path = SAMPLES / "model"):
        self.folder, self.base = folder, base
        chat, weights = identify("dataset", str(SAMPLES / "chat"), "main"), identify("model", str(base), "main")
        small = {"name": str(SAMPLES / "chat")}
        self.dataset, self.model = folder / "dataset", folder / "model"
        data.run({"section": small, "input": chat.model_dump(mode="json"), "output": str(self.dataset)})
        keep_rows(self.dataset, 64)
        section = {"name": str(base)}
        model.run({"section": section, "input": weights.model_dump(mode="json"), "output": str(self.model)})

    def tokens(self, config: Config) -> Path:
        options = config.training
        output = self.folder / f"tokens-{options.max_length}-{options.packing}"
        job = {"dataset": self.dataset, "model": self.model, "section": config.dataset.model_dump()}
        job |= {"training": options.model_dump(), "trust_remote_code": False, "output": output}
        tokens.run(job)
        return output

    def train(self, name: str, on_progress: Callable | None = None, **training: Any) -> dict[str, Any]:
        config = Config.model_validate({"training": {**TRAINING, **training}})
        settings = Settings()
        run = {
            "experiment_name": self.experiment(name),
            "artifact_location": settings.artifact_location,
            "run_name": name,
            "config": config.model_dump(),
            "origins": {},
            "tags": {},
            "dataset_name": "sample",
            "dataset_digest": "0",
            "dataset_path": str(self.dataset),
        }
        job = {
            "config": config.model_dump(),
            "fingerprint": name,
            "output": str(self.folder / name),
            "tokens": str(self.tokens(config)),
            "model": str(self.model),
            "base": str(self.base),
            "run": run,
        }
        directory, count = self.folder / name, config.training.num_processes
        return run_step("train", job, LOGGER, directory=directory, on_progress=on_progress, num_processes=count)

    def signal_at(self, step: int, number: signal.Signals, name: str) -> Callable[[dict], None]:
        """For `on_progress`: send a signal to the trainer at its report of that step, once."""
        sent = []

        def act(event: dict[str, Any]) -> None:
            if event["step"] >= step and not sent:
                sent.append(step)
                os.kill(wait_for_child(self.folder / name, started=True), number)

        return act

    def weights(self, name: str) -> str:
        """Digest of the last checkpoint's weights."""
        return read_manifest(self.folder / name / "checkpoints" / "checkpoint-8")["files"]["model.safetensors"][
            "xxh3_128"
        ]

    def experiment(self, name: str) -> str:
        """The modules of tests share a tracking server."""
        return f"{self.folder.name} {name}"

    def mlflow(self, name: str) -> tuple[Any, dict[str, list[tuple[int, float]]]]:
        """The only run of the training, and its metric history without times."""
        from mlflow import MlflowClient

        client = MlflowClient(Settings().tracking_uri)
        [run] = client.search_runs([client.get_experiment_by_name(self.experiment(name)).experiment_id])
        names = [metric for metric in run.data.metrics if not metric.startswith("system/") and metric not in TIMED]
        histories = {metric: client.get_metric_history(run.info.run_id, metric) for metric in names}
        return run, {
            name: sorted((value.step, value.value) for value in history) for name, history in histories.items()
        }


TIMED = {
    *(f"eval_{name}" for name in ("runtime", "samples_per_second", "steps_per_second")),
    *(f"train_{name}" for name in ("runtime", "samples_per_second", "steps_per_second", "loss", "tokens_per_second")),
    "total_flos",
    *("step_seconds", "tokens_per_second", "padded_tokens_per_second", "peak_memory_gib", "moved_weights"),
}
"""Values of the clock and the machine, and what is of one process's part of the training."""


def keep_rows(dataset: Path, count: int) -> None:
    for name in ("train.jsonl", "test.jsonl"):
        lines = (dataset / name).read_text().splitlines(keepends=True)
        (dataset / name).write_text("".join(lines[:count]))


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    bench = Bench(tmp_path_factory.mktemp("training"))
    bench.train("straight")
    return bench


def assert_like_straight(bench: Bench, name: str) -> None:
    assert bench.weights(name) == bench.weights("straight")
    run, history = bench.mlflow(name)
    _, expected = bench.mlflow("straight")
    assert run.info.status == "FINISHED"
    assert history == expected, "no gap, no overlap, the same values"
    results = [read_json(bench.folder / which / "training.json")["result"] for which in (name, "straight")]
    assert results[0]["checkpoint"] == results[1]["checkpoint"]
    assert results[0]["eval_loss"] == results[1]["eval_loss"]


@pytest.mark.parametrize("step", [1, 3, 7])
def test_killed_and_started_again(bench: Bench, step: int) -> None:
    name = f"killed-at-{step}"
    with pytest.raises(Failure, match="was ended by signal SIGKILL") as killed:
        bench.train(name, bench.signal_at(step, signal.SIGKILL, name))
    assert killed.value.kind == "transient"
    bench.train(name)
    assert_like_straight(bench, name)


def test_told_to_stop_it_saves_and_goes_on(bench: Bench) -> None:
    with pytest.raises(Failure, match=r"stopped at step \d of 8, where a checkpoint was saved") as stopped:
        bench.train("stopped", bench.signal_at(3, signal.SIGTERM, "stopped"))
    assert stopped.value.kind == "preempted"
    assert bench.mlflow("stopped")[0].info.status == "KILLED"
    [*_, newest] = sorted((bench.folder / "stopped" / "checkpoints").glob("checkpoint-*"))
    assert damaged_files(newest) == []
    bench.train("stopped")
    assert bench.weights("stopped") == bench.weights("straight")
    assert bench.mlflow("stopped")[0].info.status == "FINISHED"


def test_with_packing_resume_is_exact_too(bench: Bench) -> None:
    bench.train("packed", packing=True)
    with pytest.raises(Failure):
        bench.train("packed-killed", bench.signal_at(5, signal.SIGKILL, "packed-killed"), packing=True)
    bench.train("packed-killed", packing=True)
    assert bench.weights("packed-killed") == bench.weights("packed")


def test_without_padding_the_training_is_the_same(bench: Bench) -> None:
    """Other kernels, other rounding; but the same conversations in each step."""
    padded = bench.train("straight")["log_history"]
    free = bench.train("padding-free", padding_free=True)["log_history"]
    losses = [[entry["loss"] for entry in history if "loss" in entry] for history in (padded, free)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


def test_what_the_time_goes_into_is_said_before_and_after(bench: Bench) -> None:
    log = (bench.folder / "straight" / "log.txt").read_text()
    assert re.search(r"INFO 4 evaluations, about \d+ % of the work \(training.eval_max_rows\)", log)
    assert re.search(r"INFO time: \d+% data, \d+% forward and backward, .* \d+% evaluation, \d+% checkpoint; peak", log)
    assert re.search(r"INFO checkpoint-8: 0\.\d+ GiB written in \d+\.\d s", log)
    history = read_json(bench.folder / "straight" / "training.json")["result"]["log_history"]
    assert all(entry["tokens_per_second"] > 0 for entry in history if "loss" in entry)


def test_the_longest_rows_are_evaluated_before_the_first_step(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """With no logits kept, and leaving nothing behind for the log."""
    from finetuning.train import Job
    from finetuning.trainer import build_trainer

    config = Config.model_validate({"training": {**TRAINING, "per_device_eval_batch_size": 2}})
    job = read_json(bench.folder / "straight" / "job.json") | {"config": config, "output": bench.folder / "tried"}
    trainer = build_trainer(Job.model_validate(job))
    seen, step = [], type(trainer).prediction_step
    monkeypatch.setattr(
        type(trainer),
        "prediction_step",
        lambda self, model, batch, **how: seen.append((batch, step(self, model, batch, **how))),
    )
    trainer.try_evaluation()
    [(batch, (loss, logits, labels))] = seen
    lengths = sorted(len(row) for row in trainer.eval_dataset["input_ids"])
    assert sorted(batch["attention_mask"].sum(1).tolist()) == lengths[-2:]
    assert (loss > 0, logits, labels, trainer.args.prediction_loss_only) == (True, None, None, True)
    assert trainer._metrics["eval"] == {}
    assert trainer.accelerator.autocast_handler.cache_enabled is False


@pytest.mark.parametrize("setting", [True, "auto"])
def test_checkpointed_activations_change_no_weight(bench: Bench, setting: bool | str) -> None:
    """Nor does it matter that the same training goes on with another setting."""
    name = f"checkpointing-{setting}"
    bench.train(name, activation_checkpointing=setting)
    assert bench.weights(name) == bench.weights("straight")
    log = (bench.folder / name / "log.txt").read_text()
    assert ("activation checkpointing off: it fits into" in log) == (setting == "auto")


@pytest.mark.parametrize("precision", ["bf16", "bf16_stochastic_rounding"])
def test_every_precision_learns(bench: Bench, precision: str) -> None:
    result = bench.train(precision, precision=precision, bf16=True)
    losses = [entry["eval_loss"] for entry in result["log_history"] if "eval_loss" in entry]
    assert losses[-1] < losses[0] - 0.5
    moved = [entry["moved_weights"] for entry in result["log_history"] if "moved_weights" in entry]
    assert moved[0] > 0.9
    assert sum(result["time_shares"].values()) == pytest.approx(1, abs=0.01)


def test_a_finished_training_is_not_touched_again(bench: Bench) -> None:
    files = [path for path in (bench.folder / "straight" / "checkpoints").rglob("*") if path.is_file()]
    before = {path: path.stat().st_mtime_ns for path in files}
    events: list[dict] = []
    assert bench.train("straight", events.append)["num_steps"] == 8
    assert events == []
    assert {path: path.stat().st_mtime_ns for path in files} == before


def test_killed_between_its_last_step_and_its_result(bench: Bench) -> None:
    """The plain Trainer would do one step more."""
    shutil.copytree(bench.folder / "straight", bench.folder / "no-result")
    state = read_json(bench.folder / "straight" / "training.json")
    write_json(bench.folder / "no-result" / "training.json", {**state, "result": None, "status": "RUNNING"})
    events: list[dict] = []
    assert bench.train("no-result", events.append)["num_steps"] == 8
    assert not [event for event in events if "step" in event]
    assert bench.weights("no-result") == bench.weights("straight")


DAMAGE: dict[str, Callable[[Path], Any]] = {
    "no manifest": lambda checkpoint: (checkpoint / "manifest.json").unlink(),
    "truncated weights": lambda checkpoint: os.truncate(checkpoint / "model.safetensors", 1000),
    "changed optimizer": lambda checkpoint: flip_a_byte(checkpoint / "optimizer.pt"),
    "no scheduler": lambda checkpoint: (checkpoint / "scheduler.pt").unlink(),
    "empty trainer state": lambda checkpoint: (checkpoint / "trainer_state.json").write_text(""),
    "empty folder": lambda checkpoint: [path.unlink() for path in checkpoint.iterdir()],
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_moved_aside_and_named(
    bench: Bench, interrupted: Path, damage: str, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    caplog.set_level(logging.INFO)
    name = f"damaged-{damage.replace(' ', '-')}"
    shutil.copytree(interrupted, bench.folder / name)
    DAMAGE[damage](bench.folder / name / "checkpoints" / "checkpoint-6")
    found = model_free_newest(bench.folder / name / "checkpoints")
    assert found.name == "checkpoint-4"
    [aside] = (bench.folder / name / "checkpoints").glob("damaged-checkpoint-6-*")
    assert "checkpoint-6 is not whole" in caplog.text
    assert str(aside) in caplog.text


def test_after_damage_the_training_goes_on_from_the_one_before(bench: Bench, interrupted: Path) -> None:
    shutil.copytree(interrupted, bench.folder / "repaired")
    flip_a_byte(bench.folder / "repaired" / "checkpoints" / "checkpoint-6" / "model.safetensors")
    # The copy still names the MLflow run of the original: as after a restore from a backup.
    bench.train("repaired")
    assert bench.weights("repaired") == bench.weights("straight")


@pytest.fixture(scope="module")
def interrupted(bench: Bench) -> Path:
    """A training that was killed after it had sealed checkpoints 4 and 6."""
    with pytest.raises(Failure):
        bench.train("interrupted", bench.signal_at(7, signal.SIGKILL, "interrupted"))
    checkpoints = bench.folder / "interrupted" / "checkpoints"
    assert read_manifest(checkpoints / "checkpoint-6")
    return bench.folder / "interrupted"


def model_free_newest(checkpoints: Path) -> Path:
    from finetuning.resume import newest_whole_checkpoint

    found = newest_whole_checkpoint(checkpoints)
    assert found
    return found


def flip_a_byte(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-10, os.SEEK_END)
        byte = file.read(1)
        file.seek(-10, os.SEEK_END)
        file.write(bytes([byte[0] ^ 0xFF]))


def test_weights_that_are_no_numbers_are_never_a_checkpoint(tmp_path: Path) -> None:
    """A NaN training of the plain stack ends green: loss 0.0, the last checkpoint kept."""
    from safetensors.torch import load_file, save_file

    base = tmp_path / "base"
    shutil.copytree(SAMPLES / "model", base)
    weights = load_file(base / "model.safetensors")
    next(iter(weights.values())).view(-1)[0] = float("nan")
    save_file(weights, base / "model.safetensors", metadata={"format": "pt"})
    bench = Bench(tmp_path, base)
    with pytest.raises(
        Failure, match=r"became nan at step 1.*Nothing is saved as a model.*training.learning_rate"
    ) as lost:
        bench.train("nan")
    assert lost.value.kind == "diverged"
    assert bench.mlflow("nan")[0].info.status == "FAILED"
    assert not list((tmp_path / "nan" / "checkpoints").glob("checkpoint-*"))
    bench = Bench(tmp_path / "again", base)
    with pytest.raises(Failure, match="holds values that are not finite at step 2"):
        bench.train("nan-unlogged", logging_steps=50, eval_steps=100, load_best_model_at_end=False)
    assert not list((tmp_path / "again" / "nan-unlogged" / "checkpoints").glob("*/manifest.json"))


@pytest.mark.parametrize(
    ("logs", "said"),
    [
        ({"loss": math.nan}, "loss became nan at step 7; the last finite loss was 1.83"),
        ({"grad_norm": math.inf}, "grad_norm became inf at step 7"),
        ({"eval_loss": math.nan}, "eval_loss became nan at step 7"),
        ({"loss": math.log(512), "grad_norm": 0.0}, r"loss stands at ln\(vocabulary\)=6.24 with zero gradients"),
    ],
)
def test_what_cannot_come_to_anything_ends(logs: dict[str, float], said: str) -> None:
    from finetuning.callbacks import Watch

    state = SimpleNamespace(global_step=7, log_history=[{"loss": 1.83}])
    watch = Watch(vocabulary_size=512)
    watch.on_log(None, state, None, {"loss": math.log(512), "grad_norm": 0.1})
    watch.on_log(None, state, None, {"loss": 0.0, "grad_norm": 0.0})
    with pytest.raises(Failure, match=said) as ended:
        watch.on_log(None, state, None, logs)
    assert ended.value.kind == "diverged"


def test_a_training_without_a_best_checkpoint_has_no_result(tmp_path: Path) -> None:
    """The plain stack keeps its last checkpoint then, and says nothing."""
    from finetuning.train import _result

    last = tmp_path / "checkpoints" / "checkpoint-8"
    last.mkdir(parents=True)
    write_json(last / "trainer_state.json", {"best_model_checkpoint": None, "log_history": [], "global_step": 8})
    job = SimpleNamespace(config=Config.model_validate({"training": TRAINING}), output=tmp_path)
    with pytest.raises(Failure, match="eval_loss was never a number, so that no checkpoint is the best one"):
        _result(job)
