"""Nothing half-written is ever taken for whole."""

import multiprocessing
import time
from pathlib import Path

import pytest

from finetuning.artifacts import (
    MANIFEST,
    damaged_files,
    directory_digest,
    fingerprint,
    produce,
    read_json,
    read_manifest,
    write_json,
)
from tasks.references import Reference


def make(directory: Path) -> dict:
    (directory / "sub").mkdir()
    (directory / "a.txt").write_text("a")
    (directory / "sub" / "b.txt").write_text("b")
    return {"num_rows": 2}


def test_a_complete_artifact_is_not_made_again(tmp_path: Path) -> None:
    artifact = tmp_path / "fp"
    manifest = produce(artifact, make)
    assert manifest["num_rows"] == 2
    assert set(manifest["files"]) == {"a.txt", "sub/b.txt"}
    assert {path.name for path in tmp_path.iterdir()} == {"fp", ".fp.lock"}
    assert produce(artifact, lambda directory: pytest.fail("made again")) == manifest


def test_a_failed_attempt_leaves_no_artifact(tmp_path: Path) -> None:
    def die(directory: Path) -> dict:
        make(directory)
        raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError):
        produce(tmp_path / "fp", die)
    assert not (tmp_path / "fp").exists()
    assert produce(tmp_path / "fp", make)["num_rows"] == 2  # over the leftovers


@pytest.mark.parametrize(
    "damage",
    [
        lambda artifact: (artifact / MANIFEST).unlink(),
        lambda artifact: (artifact / MANIFEST).write_text('{"files": {'),
        lambda artifact: (artifact / "a.txt").unlink(),
        lambda artifact: (artifact / "sub" / "b.txt").write_text("longer"),
    ],
)
def test_a_damaged_artifact_is_a_miss(tmp_path: Path, damage) -> None:
    artifact = tmp_path / "fp"
    produce(artifact, make)
    reference = Reference(path=artifact)
    damage(artifact)
    assert read_manifest(artifact) is None
    with pytest.raises(ValueError, match="no complete artifact"):
        Reference.model_validate(reference.model_dump())
    produce(artifact, make)
    assert read_manifest(artifact)


def test_hashes_find_what_sizes_do_not(tmp_path: Path) -> None:
    produce(tmp_path / "fp", make)
    (tmp_path / "fp" / "a.txt").write_text("x")
    assert read_manifest(tmp_path / "fp")
    assert damaged_files(tmp_path / "fp") == ["a.txt"]


def test_of_two_makers_one_makes_and_one_waits(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    makers = [context.Process(target=produce, args=(tmp_path / "fp", _slowly)) for _ in range(2)]
    for maker in makers:
        maker.start()
    for maker in makers:
        maker.join()
    assert [maker.exitcode for maker in makers] == [0, 0]
    assert len((tmp_path / "made").read_text()) == 1


def _slowly(directory: Path) -> dict:
    with (directory.parent / "made").open("a") as file:
        file.write("x")
    time.sleep(0.3)
    return make(directory)


def test_fingerprints_depend_on_names_and_values_only(tmp_path: Path) -> None:
    assert fingerprint(a=1, b=[2]) == fingerprint(b=[2], a=1)
    assert len({fingerprint(a=1), fingerprint(a=2), fingerprint(b=1), fingerprint(a="1")}) == 4
    assert fingerprint(a=1) == "015abd7f5cc57a2d", "a change of the scheme makes every artifact anew"
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        make(tmp_path / name)
    assert directory_digest(tmp_path / "one") == directory_digest(tmp_path / "two")
    (tmp_path / "two" / "a.txt").rename(tmp_path / "two" / "c.txt")
    assert directory_digest(tmp_path / "one") != directory_digest(tmp_path / "two")


def test_json_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert read_json(path) == {"a": 1}
