"""What nobody needs goes; what is in use, will be needed or is not this pipeline's never does."""

import multiprocessing
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from finetuning import resume, store
from finetuning.artifacts import is_locked, lock, mark_used, produce, read_manifest, write_json, write_manifest
from finetuning.lease import is_leased, lease
from tests.conftest import PROJECT, run_module

DATASET, MODEL, TRAINING, DIRECTORY, EVALUATION, OTHER = (letter * 16 for letter in "abcdef")
RUN = {f"datasets/{DATASET}", f"models/{MODEL}", f"trainings/{TRAINING}", f"model-directories/{DIRECTORY}"}


def artifact(root: Path, name: str, **facts: str) -> Path:
    def make(directory: Path) -> dict:
        (directory / "file.txt").write_text("x" * 3000)
        write_json(directory / "finetune.json", facts)
        return facts

    produce(root / name, make)
    return root / name


def training(root: Path, *, finished: bool, base: Path = Path("hub/snapshot")) -> Path:
    directory = root / "trainings" / TRAINING
    with lock(directory):
        (directory / "checkpoints" / "checkpoint-1").mkdir(parents=True)
        write_manifest(directory / "checkpoints" / "checkpoint-1")
        job = {"dataset": root / "datasets" / DATASET, "model": root / "models" / MODEL, "base": base}
        write_json(directory / "job.json", {name: str(path) for name, path in job.items()})
        resume.update_state(directory, **({"result": {"checkpoint": "checkpoint-1"}} if finished else {}))
    return directory


def run(root: Path, *, finished: bool = True, exported: bool = True) -> None:
    """What a run leaves behind that came so far."""
    artifact(root, f"datasets/{DATASET}")
    artifact(root, f"models/{MODEL}", base="hub/snapshot")
    training(root, finished=finished)
    if exported:
        artifact(root, f"model-directories/{DIRECTORY}", training=TRAINING)


def make_old(*paths: Path, days: float = 40) -> None:
    then = time.time() - days * store.DAY_SECONDS
    for path in paths:
        for entry in (path, store.lock_file(path), *path.rglob("*")):
            if os.path.lexists(entry):
                os.utime(entry, (then, then), follow_symlinks=False)


def there(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.glob("*/*") if path.suffix != ".lock"}


@pytest.fixture
def pruned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., dict[str, str]]:
    """Prune `tmp_path`; KIND/FINGERPRINT -> what became of it, and `free` -> the last line."""

    def prune(older_than_days: int = 30, dry_run: bool = False) -> dict[str, str]:
        store.prune(tmp_path, older_than_days, dry_run)
        _, *lines, last = capsys.readouterr().out.splitlines()
        return {"free": last} | {"/".join(line.split()[:2]): re.split(r"\s{2,}", line)[-1] for line in lines}

    return prune


@pytest.fixture
def listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[[], dict[str, list[str]]]:
    """KIND/FINGERPRINT -> the other columns."""

    def show() -> dict[str, list[str]]:
        store.show(tmp_path)
        lines = [re.split(r"\s{2,}", line) for line in capsys.readouterr().out.splitlines()]
        return {f"{kind}/{fingerprint}": columns for kind, fingerprint, *columns in lines}

    return show


@contextmanager
def held(directory: Path) -> Iterator[None]:
    """Its lock, by another process."""
    context = multiprocessing.get_context("fork")
    ready, done = context.Event(), context.Event()
    holder = context.Process(target=_hold, args=(directory, ready, done))
    holder.start()
    assert ready.wait(60)
    try:
        yield
    finally:
        done.set()
        holder.join()


def _hold(directory: Path, ready, done) -> None:
    with lock(directory):
        ready.set()
        done.wait(60)


def test_a_row_for_each_artifact_with_who_needs_it(tmp_path: Path, listed) -> None:
    run(tmp_path, finished=False, exported=False)
    evaluation = artifact(tmp_path, f"evaluations/{EVALUATION}")
    (evaluation / "file.txt").unlink()
    make_old(evaluation, days=3.5)
    artifact(tmp_path, f"volumes/main/default/checkpoints/smoke/{DIRECTORY}")
    rows = listed()
    assert rows[f"datasets/{DATASET}"] == [
        store.human(store.disk(tmp_path / "datasets")[0]),
        "0 h",
        "yes",
        f"training {TRAINING}",
    ]
    assert rows[f"models/{MODEL}"][2:] == ["yes", f"training {TRAINING}"]
    assert rows[f"trainings/{TRAINING}"][2:] == ["no", "nobody"]
    assert rows[f"evaluations/{EVALUATION}"][1:] == ["3 d", "no", "nobody"]
    assert rows[f"volumes/{DIRECTORY}"][2] == "yes"
    assert {"datasets/total", "models/total", "trainings/total", "evaluations/total", "volumes/total"} < set(rows)

    resume.update_state(tmp_path / "trainings" / TRAINING, result={"checkpoint": "checkpoint-1"})
    assert listed()[f"trainings/{TRAINING}"][2:] == ["yes", "its model directory is not made yet"]
    artifact(tmp_path, f"model-directories/{DIRECTORY}", training=TRAINING)
    assert {row[3] for name, row in listed().items() if name in RUN} == {"nobody"}


def test_old_artifacts_that_nobody_needs_go(tmp_path: Path, pruned) -> None:
    run(tmp_path)
    make_old(tmp_path)
    recent = artifact(tmp_path, f"datasets/{OTHER}")
    expected = store.disk(*(tmp_path / name for name in RUN))[0]
    outcomes = pruned()
    assert {outcomes[name] for name in RUN} == {"removed"}
    assert outcomes[f"datasets/{OTHER}"] == "kept: used in the last 30 d"
    assert outcomes["free"] == f"{store.human(expected)} came free"
    assert there(tmp_path) == {str(recent.relative_to(tmp_path))}
    assert artifact(tmp_path, f"datasets/{DATASET}").is_dir(), "it can be made again"


def test_a_dry_run_says_the_same_and_changes_nothing(tmp_path: Path, pruned) -> None:
    run(tmp_path)
    make_old(tmp_path)
    before = {path: path.lstat().st_mtime_ns for path in tmp_path.rglob("*")}
    outcomes = pruned(dry_run=True)
    assert {outcomes[name] for name in RUN} == {"would be removed"}
    assert {path: path.lstat().st_mtime_ns for path in tmp_path.rglob("*")} == before
    assert pruned()["free"].split()[:2] == outcomes["free"].split()[:2]


@pytest.mark.parametrize("use", [mark_used, lambda path: (path / "manifest.json").touch()])
def test_a_use_counts_from_its_time_on(tmp_path: Path, pruned, use: Callable[[Path], None]) -> None:
    make_old(artifact(tmp_path, f"datasets/{DATASET}"), days=5)
    assert pruned(older_than_days=6)[f"datasets/{DATASET}"] == "kept: used in the last 6 d"
    use(tmp_path / "datasets" / DATASET)
    assert pruned(older_than_days=4)[f"datasets/{DATASET}"] == "kept: used in the last 4 d"
    make_old(tmp_path, days=5)
    assert pruned(older_than_days=4)[f"datasets/{DATASET}"] == "removed"


def test_an_unfinished_training_keeps_what_it_goes_on_with(tmp_path: Path, pruned) -> None:
    run(tmp_path, finished=False, exported=False)
    make_old(tmp_path / "datasets", tmp_path / "models")
    outcomes = pruned()
    assert outcomes[f"datasets/{DATASET}"] == outcomes[f"models/{MODEL}"] == f"kept: needed by training {TRAINING}"
    make_old(tmp_path)
    outcomes = pruned()
    assert outcomes[f"trainings/{TRAINING}"].startswith("removed although unfinished")
    assert outcomes[f"datasets/{DATASET}"] == outcomes[f"models/{MODEL}"] == "removed"


def test_a_finished_training_waits_for_its_model_directory(tmp_path: Path, pruned) -> None:
    run(tmp_path, exported=False)
    make_old(tmp_path)
    kept = {f"kept: needed by training {TRAINING}", "kept: its model directory is not made yet"}
    assert set(pruned().values()) == {*kept, "0 B came free"}
    directory = artifact(tmp_path, f"model-directories/{DIRECTORY}", training=TRAINING)
    (directory / "file.txt").unlink()
    make_old(tmp_path)
    pruned()
    assert there(tmp_path) == RUN - {f"model-directories/{DIRECTORY}"}, "a damaged one does not count"


def test_a_model_directory_goes_no_earlier_than_its_training(tmp_path: Path, pruned) -> None:
    """Else the training would wait for it again, for ever."""
    run(tmp_path)
    make_old(tmp_path / "model-directories")
    pruned()
    assert there(tmp_path) == RUN


def test_a_training_may_go_before_its_model_directory(tmp_path: Path, pruned) -> None:
    run(tmp_path)
    make_old(tmp_path)
    mark_used(tmp_path / "model-directories" / DIRECTORY)
    pruned()
    assert there(tmp_path) == {f"model-directories/{DIRECTORY}"}


@pytest.mark.parametrize("inside", ["", "checkpoints/checkpoint-9"])
@pytest.mark.parametrize("kind", ["model-directories", "trainings"])
def test_the_base_of_a_training_stays(tmp_path: Path, pruned, kind: str, inside: str) -> None:
    base = artifact(tmp_path, f"{kind}/{OTHER}")
    make_old(tmp_path)
    training(tmp_path, finished=False, base=base / inside)
    assert pruned()[f"{kind}/{OTHER}"] == f"kept: needed by training {TRAINING}"
    assert base.is_dir()
    (tmp_path / "trainings" / TRAINING / "job.json").unlink()
    artifact(tmp_path, f"models/{MODEL}", base=str(base / inside))
    assert pruned()[f"{kind}/{OTHER}"] == "kept: used in the last 30 d", "a model was prepared from it"


@pytest.mark.parametrize("holder", [f"trainings/{TRAINING}", f"datasets/{DATASET}"])
def test_what_a_process_works_with_stays_however_old(tmp_path: Path, pruned, listed, holder: str) -> None:
    run(tmp_path)
    with held(tmp_path / holder):
        make_old(tmp_path)
        rows, outcomes = listed(), pruned()
        assert pruned(dry_run=True)[f"datasets/{DATASET}"] == "kept: in use"
    assert rows[f"datasets/{DATASET}"][3] == "in use"
    in_use = RUN if holder.startswith("trainings") else {holder}
    assert {name for name in RUN if outcomes[name] == "kept: in use"} == in_use
    assert there(tmp_path) == in_use


def test_a_lease_of_another_host_counts(tmp_path: Path, pruned, listed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FINETUNE_SHARED_STORAGE", "true")
    make_old(artifact(tmp_path, f"datasets/{DATASET}"), artifact(tmp_path, f"datasets/{OTHER}"))
    (tmp_path / f"datasets/.{DATASET}.lease.7").write_text('{"host": "another", "pid": 1}')
    outcomes = pruned()
    assert outcomes[f"datasets/{DATASET}"] == "kept: in use"
    assert outcomes[f"datasets/{OTHER}"] == "removed"
    assert not [name for name in listed() if name.startswith("unknown")]


def test_a_lease_of_a_host_that_died_long_ago_does_not(tmp_path: Path, pruned, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FINETUNE_SHARED_STORAGE", "true")
    dataset = artifact(tmp_path, f"datasets/{DATASET}")
    lease_file = tmp_path / f"datasets/.{DATASET}.lease.7"
    lease_file.write_text('{"host": "another", "pid": 1}')
    make_old(dataset, lease_file)
    assert pruned()[f"datasets/{DATASET}"] == "removed"


def test_a_training_whose_metrics_are_nowhere_else_stays(tmp_path: Path, pruned) -> None:
    run(tmp_path)
    resume.update_state(tmp_path / "trainings" / TRAINING, settled=False)
    make_old(tmp_path)
    assert pruned()[f"trainings/{TRAINING}"] == "kept: its MLflow run is not complete yet: run it again"


@pytest.mark.parametrize("moment", ["before the lock", "before the move"])
def test_a_run_that_starts_at_that_moment_keeps_it(
    tmp_path: Path, pruned, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    dataset = artifact(tmp_path, f"datasets/{DATASET}")
    make_old(dataset)
    if moment == "before the lock":
        claimed = store.claimed
        monkeypatch.setattr(store, "claimed", lambda path: mark_used(path) or claimed(path))
        monkeypatch.setattr(Path, "rename", lambda path, target: pytest.fail("moved"))
    else:
        rename = Path.rename
        monkeypatch.setattr(Path, "rename", lambda path, target: mark_used(dataset) or rename(path, target))
    assert pruned()[f"datasets/{DATASET}"] == "kept: in use"
    assert read_manifest(dataset)
    assert there(tmp_path) == {f"datasets/{DATASET}"}


@pytest.mark.parametrize("shared", ["false", "true"])
def test_the_lock_is_taken_at_once_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared: str) -> None:
    monkeypatch.setenv("FINETUNE_SHARED_STORAGE", shared)
    dataset = artifact(tmp_path, f"datasets/{DATASET}")
    make_old(dataset)
    before = store.last_used(dataset)
    with store.claimed(dataset):
        assert is_leased(dataset) == (shared == "true")
        with pytest.raises(BlockingIOError), store.claimed(dataset):
            pass
    assert not is_locked(dataset)
    assert store.last_used(dataset) == before, "that is no use"


def test_a_lease_is_not_waited_for_either(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FINETUNE_SHARED_STORAGE", "true")
    dataset = artifact(tmp_path, f"datasets/{DATASET}")
    with lease(dataset), pytest.raises(BlockingIOError), store.claimed(dataset):
        pass


def test_leftovers_go_after_a_day(tmp_path: Path, pruned, listed) -> None:
    artifact(tmp_path, f"datasets/{DATASET}")
    damaged = training(tmp_path, finished=False) / "checkpoints" / "damaged-checkpoint-1-17"
    leftovers = [tmp_path / f"datasets/.{DATASET}.partial", tmp_path / f"models/.{MODEL}.pruned", damaged]
    for folder in leftovers:
        folder.mkdir(parents=True)
        (folder / "file.txt").write_text("x")
    assert {name for name in listed() if name.startswith("leftover")} == {
        f"leftover/{fingerprint}" for fingerprint in (DATASET, MODEL, TRAINING)
    }
    pruned()
    assert all(folder.is_dir() for folder in leftovers)
    make_old(tmp_path, days=2)
    with held(tmp_path / "datasets" / DATASET):
        make_old(tmp_path, days=2)
        outcomes = pruned()
        assert outcomes[f"leftover/{DATASET}"].startswith("kept: in use")
        assert outcomes[f"leftover/{MODEL}"].startswith("removed")
        assert [folder.is_dir() for folder in leftovers] == [True, False, False]
    make_old(tmp_path, days=2)
    pruned()
    assert there(tmp_path) == {f"datasets/{DATASET}", f"trainings/{TRAINING}"}
    assert (damaged.parent / "checkpoint-1").is_dir()


def test_a_leftover_goes_with_its_training(tmp_path: Path, pruned) -> None:
    (training(tmp_path, finished=False) / "checkpoints" / "damaged-checkpoint-1-17").mkdir()
    make_old(tmp_path)
    for dry_run in (True, False):
        assert set(pruned(dry_run=dry_run)) == {f"trainings/{TRAINING}", "free"}


def test_links_are_not_followed(tmp_path: Path, pruned, listed) -> None:
    outside = tmp_path.with_name(f"{tmp_path.name}-outside")
    artifact(outside, f"datasets/{DATASET}")
    (outside / "damaged-checkpoint-1").mkdir()
    make_old(outside)
    (artifact(tmp_path, f"datasets/{DATASET}") / "link").symlink_to(outside)
    (training(tmp_path, finished=False) / "checkpoints").rename(tmp_path / "trainings" / TRAINING / "moved")
    (tmp_path / "trainings" / TRAINING / "checkpoints").symlink_to(outside)
    links = [tmp_path / "models", tmp_path / "datasets" / OTHER, tmp_path / "evaluations" / f".{OTHER}.partial"]
    for link in links:
        link.parent.mkdir(exist_ok=True)
        link.symlink_to(outside / "datasets")
    make_old(tmp_path)
    before = {path: path.lstat().st_mtime_ns for path in outside.rglob("*")}
    assert {name for name in listed() if name.startswith(("unknown", "leftover"))} == {
        "unknown/never pruned (models)",
        f"unknown/never pruned (datasets/{OTHER})",
    }
    outcomes = pruned()
    assert outcomes[f"datasets/{DATASET}"] == "removed"
    assert outcomes[f"trainings/{TRAINING}"].startswith("removed")
    assert {path: path.lstat().st_mtime_ns for path in outside.rglob("*")} == before
    assert all(link.is_symlink() for link in links)


def test_what_is_not_ours_is_listed_and_left_alone(tmp_path: Path, pruned, listed) -> None:
    ours = [f"models/.{MODEL}.lease/x", "runs/x.json", "huggingface/hub/x"]
    strange = ["notes.txt", "datasets/mine", f"datasets/{DATASET}.bak", "datasets/.hidden"]
    copy = f"volumes/main/default/checkpoints/smoke/{DIRECTORY}"
    for name in [*ours, *strange]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    artifact(tmp_path, copy)
    make_old(tmp_path, days=400)
    before = {path: path.lstat().st_mtime_ns for path in tmp_path.rglob("*")}
    rows = listed()
    assert {name for name in rows if "never" in name} == {f"unknown/never pruned ({name})" for name in strange}
    assert rows[f"volumes/{DIRECTORY}"][3] == f"never pruned ({copy})"
    assert pruned()["free"] == "0 B came free"
    assert {path: path.lstat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_hard_links_count_once_and_come_free_with_the_last(tmp_path: Path, pruned) -> None:
    first, second = (artifact(tmp_path, f"evaluations/{name}") for name in (EVALUATION, OTHER))
    own = store.disk(second)[0] - 3000
    for link in (first / "again.txt", second / "again.txt"):
        link.hardlink_to(first / "file.txt")
    (second / "file.txt").unlink()
    assert store.disk(first) == (own + 3000, own)
    assert store.disk(first, second) == (2 * own + 3000, 2 * own + 3000)
    make_old(first)
    assert pruned()["free"] == f"{own} B came free"
    make_old(second)
    assert pruned()["free"] == f"{store.human(own + 3000)} came free"


def test_the_command(tmp_path: Path) -> None:
    environment = {"FINETUNE_STORAGE_ROOT": str(tmp_path / "root"), "DRY_RUN": "true"}
    nothing = run_module("finetuning.store", "list", **environment)
    assert (nothing.returncode, len(nothing.stdout.splitlines())) == (0, 1), nothing.stderr
    assert run_module("finetuning.store", "prune", **environment).stdout.endswith("\n0 B came free\n")
    assert not (tmp_path / "root").exists()
    artifact(tmp_path / "root", f"datasets/{DATASET}")
    make_old(tmp_path / "root", days=5)
    tried = run_module("finetuning.store", "prune", "--older_than_days", "4", "--dry_run", "true", **environment)
    assert f"datasets           {DATASET}     3.2 KiB        5 d  yes       would be removed\n" in tried.stdout
    assert DATASET in run_module("finetuning.store", "list", **environment).stdout
    done = run_module("finetuning.store", "prune", "--older_than_days", "4", **environment)
    assert done.stdout.endswith("3.2 KiB came free\n"), done.stderr
    assert there(tmp_path / "root") == set()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "error parsing CLI: the following arguments are required: COMMAND"),
        (["clean"], "command='clean': Input should be 'list' or 'prune'"),
        (["prune", "--older_than_days", "0"], "older_than_days='0': Input should be greater than or equal to 1"),
        (["prune", "--older_than", "9"], "error parsing CLI: unrecognized arguments: --older_than 9"),
    ],
)
def test_wrong_usage_exits_with_2_and_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exited:
        store.main(arguments)
    assert exited.value.code == 2
    assert capsys.readouterr().err == f"{message}\n"


def test_it_imports_no_ml_library() -> None:
    heavy = "{'torch', 'transformers', 'trl', 'datasets', 'mlflow', 'accelerate', 'pandas', 'prefect'}"
    code = f"import sys, finetuning.store; print(sorted({heavy} & set(sys.modules)))"
    imported = subprocess.run([sys.executable, "-c", code], cwd=PROJECT, text=True, capture_output=True, check=True)
    assert imported.stdout.strip() == "[]"
