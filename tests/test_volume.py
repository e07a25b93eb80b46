"""A model directory goes to a volume over the Files API: broken and gone on with, and never half taken for whole."""

import json
import logging
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from config.settings import PROJECT_ROOT
from finetuning import volume
from finetuning.artifacts import MANIFEST, read_manifest, write_manifest
from finetuning.errors import Failure
from finetuning.volume import RECORD, publish_remote
from tests.registries import ask, faults, unity_catalog
from tests.unity_catalog import VOLUME

NAMES = ["config.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "notes/card.md"]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the volume's files are in."""
    return tmp_path_factory.mktemp("volume") / "storage"


@pytest.fixture(scope="module")
def server(root: Path) -> Iterator[str]:
    with unity_catalog(root) as url:
        yield url


@pytest.fixture
def target(server: str, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("DATABRICKS_HOST", server)
    monkeypatch.setenv("DATABRICKS_TOKEN", "none")
    monkeypatch.setattr(volume, "RETRY_SECONDS", 2)
    return f"/{VOLUME}/lamp/{uuid.uuid4().hex}"


@pytest.fixture
def model_directory(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    for number, name in enumerate(NAMES):
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(bytes([number]) * 10_000 * (number + 1))
    write_manifest(directory, fingerprint="f1")
    return directory


def sent(server: str, before: int) -> set[str]:
    """Names of the files that were uploaded since."""
    calls = ask(f"{server}/_calls")[before:]
    puts = {call.split("/")[-1] for call in calls if call.startswith("PUT /api/2.0/fs/files/")}
    return puts - {MANIFEST, RECORD}


def calls(server: str) -> int:
    return len(ask(f"{server}/_calls"))


def is_copy(copy: Path, model_directory: Path) -> bool:
    names = {str(path.relative_to(copy)) for path in copy.rglob("*") if path.is_file()}
    same = all((copy / name).read_bytes() == (model_directory / name).read_bytes() for name in NAMES)
    return same and names == {*NAMES, MANIFEST} and read_manifest(copy) == read_manifest(model_directory)


def test_a_copy(root: Path, server: str, target: str, model_directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "finetuning.volume")
    publish_remote(model_directory, target)
    assert is_copy(root / target[1:], model_directory)
    assert sum("MB/s" in record.message for record in caplog.records) == len(NAMES)
    before = calls(server)
    publish_remote(model_directory, target)
    assert not sent(server, before)


@pytest.mark.parametrize("how", [{"cut": True}, {"status": 400, "code": "SOMETHING"}], ids=["cut", "refused"])
def test_a_broken_copy_goes_on(root: Path, server: str, target: str, model_directory: Path, how: dict) -> None:
    fault = {"match": f"PUT .*{NAMES[1]}", "times": -1, **how}
    with faults(server, fault), pytest.raises(Failure, match=f"{target}.*it goes on where it stopped") as failure:
        publish_remote(model_directory, target)
    assert failure.value.kind == "transient"
    copy = root / target[1:]
    assert not (copy / MANIFEST).exists()
    arrived = set(json.loads((copy / RECORD).read_text())["files"])
    assert NAMES[1] not in arrived

    before = calls(server)
    publish_remote(model_directory, target)
    assert is_copy(copy, model_directory)
    assert sent(server, before) == {Path(name).name for name in NAMES if name not in arrived}


@pytest.mark.parametrize("after", [False, True])
def test_a_killed_copy_goes_on(root: Path, server: str, target: str, model_directory: Path, after: bool) -> None:
    program = "import pathlib, sys; from finetuning import volume\n"
    program += f"volume.publish_remote(pathlib.Path({str(model_directory)!r}), {target!r})"
    with faults(server, {"match": rf"PUT .*{MANIFEST}", "kill": True, "after": after}):
        killed = subprocess.run([sys.executable, "-c", program], cwd=PROJECT_ROOT, timeout=60)
    assert killed.returncode == -9
    assert (root / target[1:] / MANIFEST).exists() == after
    before = calls(server)
    publish_remote(model_directory, target)
    assert not sent(server, before)
    assert read_manifest(root / target[1:]) == read_manifest(model_directory)


def test_what_is_not_what_it_says_is_sent_again(root: Path, server: str, target: str, model_directory: Path) -> None:
    """A file that lost bytes, one that changed here, and one that nobody vouches for."""
    publish_remote(model_directory, target)
    copy = root / target[1:]
    (copy / NAMES[1]).write_bytes(b"half")
    (model_directory / NAMES[3]).write_bytes(bytes([9]) * (model_directory / NAMES[3]).stat().st_size)
    write_manifest(model_directory, fingerprint="f1")
    before = calls(server)
    publish_remote(model_directory, target)
    assert sent(server, before) == {NAMES[1], Path(NAMES[3]).name}
    assert is_copy(copy, model_directory)

    (copy / MANIFEST).write_text('{"files"')
    before = calls(server)
    publish_remote(model_directory, target)
    assert sent(server, before) == {Path(name).name for name in NAMES}
    assert is_copy(copy, model_directory)


def test_a_large_file_goes_in_parts(root: Path, server: str, target: str, model_directory: Path) -> None:
    with (model_directory / NAMES[0]).open("wb") as file:
        file.truncate(60 * 2**20)
    write_manifest(model_directory)
    with faults(server, {"match": "PUT /_part/", "cut": True}):
        publish_remote(model_directory, target)
    assert is_copy(root / target[1:], model_directory)
    assert len([call for call in ask(f"{server}/_calls") if call.startswith("PUT /_part/")]) >= 6  # of 10 MiB


def test_what_is_missing_is_named(server: str, target: str, model_directory: Path) -> None:
    with pytest.raises(Failure, match=r"the volume main\.default\.nowhere must exist") as failure:
        publish_remote(model_directory, "/Volumes/main/default/nowhere/lamp/f1")
    assert failure.value.kind == "configuration"
    fault = {"match": "PUT /api/2.0/fs/", "status": 403, "code": "PERMISSION_DENIED", "times": -1}
    with faults(server, fault), pytest.raises(Failure, match=r"WRITE VOLUME on main\.default\.checkpoints") as failure:
        publish_remote(model_directory, target)
    assert failure.value.kind == "authentication"
    (model_directory / NAMES[0]).unlink()
    with pytest.raises(Failure, match="not a complete model directory"):
        publish_remote(model_directory, target)


def test_the_step_goes_there_when_no_volume_is_mounted(target: str, root: Path, tmp_path: Path) -> None:
    from config.settings import Settings
    from finetuning import publish
    from finetuning.card import CARD
    from finetuning.export import PROVENANCE

    assert Settings().volumes_are_remote
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / PROVENANCE).write_text(json.dumps({"training": "none"}))
    (directory / CARD).write_text("It has its card already.")
    write_manifest(directory, fingerprint="f1")
    publish.run({"model_directory": directory, "target": target, "evaluation": {}})
    assert read_manifest(root / target.strip("/")) == read_manifest(directory)
