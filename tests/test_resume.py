"""What a training's directory says, without training."""

import json
import logging
from pathlib import Path

import pytest

from config.sections import Config
from finetuning import resume
from finetuning.artifacts import lock, write_json, write_manifest
from finetuning.errors import Failure
from finetuning.train import close_abandoned


def fingerprint(**training: object) -> str:
    return resume.training_fingerprint(Config.model_validate({"training": training}), "data", "model")


def test_other_values_are_another_training() -> None:
    """The Trainer would go on with the old schedule and not say so."""
    assert fingerprint(learning_rate=1e-3) != fingerprint(learning_rate=1e-4)
    assert fingerprint(max_steps=10) != fingerprint(max_steps=20)
    assert fingerprint(logging_steps=1, save_total_limit=5) == fingerprint()


def test_a_configuration_that_was_stored_and_read_is_the_same_training() -> None:
    config = Config()
    again = Config.model_validate(json.loads(json.dumps(config.model_dump())))
    assert resume.training_fingerprint(again, "data", "model") == resume.training_fingerprint(config, "data", "model")


def checkpoint(directory: Path, step: int, sealed: bool = True) -> Path:
    folder = directory / f"checkpoint-{step}"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_text(f"weights of {step}")
    if sealed:
        write_manifest(folder, algorithm="xxh3_128")
    return folder


def test_without_a_checkpoint_it_starts_from_the_start(tmp_path: Path) -> None:
    assert resume.newest_whole_checkpoint(tmp_path / "not there") is None


def test_the_newest_by_number_that_is_whole(tmp_path: Path) -> None:
    for step in (9, 10):
        checkpoint(tmp_path, step)
    checkpoint(tmp_path, 11, sealed=False)
    earlier = tmp_path / "damaged-checkpoint-3-1"
    earlier.mkdir()
    assert resume.newest_whole_checkpoint(tmp_path).name == "checkpoint-10"
    assert [path.name[:21] for path in tmp_path.glob("damaged-*")] == ["damaged-checkpoint-11"]


def test_a_full_disk_loses_only_what_it_cut_short(tmp_path: Path) -> None:
    checkpoint(tmp_path, 4)
    checkpoint(tmp_path, 8, sealed=False)
    resume.remove_unsealed(tmp_path)
    assert [path.name for path in resume.checkpoints(tmp_path)] == ["checkpoint-4"]


def test_a_result_without_its_checkpoint_is_none(tmp_path: Path) -> None:
    whole = checkpoint(tmp_path / "checkpoints", 4)
    resume.update_state(tmp_path, result={"checkpoint": whole.name})
    assert resume.finished(tmp_path)
    (whole / "model.safetensors").unlink()
    assert resume.finished(tmp_path) is None
    write_json(tmp_path / resume.STATE, {})
    (tmp_path / resume.STATE).write_text("{ half")
    assert resume.finished(tmp_path) is None


def test_only_trainings_that_nobody_works_on_are_abandoned(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    for name, status in (("dead", "RUNNING"), ("alive", "RUNNING"), ("done", "FINISHED")):
        (tmp_path / name).mkdir()
        resume.update_state(tmp_path / name, status=status)
    with lock(tmp_path / "alive"):
        assert [path.name for path in resume.abandoned(tmp_path)] == ["dead"]
        close_abandoned(tmp_path)
        assert list(resume.abandoned(tmp_path)) == []
    assert resume.read_state(tmp_path / "dead")["status"] == "KILLED"


def test_a_run_that_crashes_again_and_again_fails_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    from tasks.configuration import check_run_count

    monkeypatch.setenv("PREFECT__RUNTIME__FLOW_RUN__RUN_COUNT", "5")
    check_run_count(5)
    monkeypatch.setenv("PREFECT__RUNTIME__FLOW_RUN__RUN_COUNT", "6")
    with pytest.raises(Failure, match=r"started 6 times .*FINETUNE_MAX_RUN_COUNT=5"):
        check_run_count(5)
