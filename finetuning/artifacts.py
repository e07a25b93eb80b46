"""Content-addressed directories: an artifact's name carries a fingerprint of all that determines its content.

A directory counts as an artifact only when its manifest is there and every file has the size that it states. The
manifest is written last, in a directory with a temporary name, which is then renamed into place.
"""

import fcntl
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import xxhash

from config.settings import Settings
from finetuning.lease import is_leased, lease

MANIFEST = "manifest.json"
FINGERPRINT_LENGTH = 16
"""Hexadecimal digits kept of a SHA-256: 64 bits, so that a million artifacts collide with probability 3e-8."""
logger = logging.getLogger(__name__)


def fingerprint(**parts: Any) -> str:
    """Digest of JSON values. Every argument counts, the names too."""
    canonical = json.dumps(parts, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(canonical.encode()).hexdigest()[:FINGERPRINT_LENGTH]


def file_digest(path: Path, algorithm: str = "sha256") -> str:
    """Hexadecimal digest of a file. `xxh3_128` is for finding damage only, at the speed of memory."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128 if algorithm == "xxh3_128" else algorithm).hexdigest()


def files_below(directory: Path) -> list[Path]:
    """All files below, sorted by relative path, without the manifest and hidden files."""
    files = (path for path in directory.rglob("*") if path.is_file())
    relative = (path.relative_to(directory) for path in files)
    return sorted(path for path in relative if path.name != MANIFEST and not path.name.startswith("."))


def directory_digest(directory: Path) -> str:
    """Digest of names and contents of all files below."""
    return fingerprint(**{str(path): file_digest(directory / path) for path in files_below(directory)})


def write_json(path: Path, value: Any) -> None:
    """Write atomically: a reader sees the old file or the whole new one, also after a power cut."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("w") as file:
            json.dump(value, file, indent=1, ensure_ascii=False)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def read_json(path: Path) -> Any:
    return json.loads(path.read_text())


def write_manifest(directory: Path, algorithm: str = "sha256", **facts: Any) -> None:
    """Seal `directory`: the manifest lists size and digest of every file and carries `facts` about the content."""
    files = {
        str(path): {"size": (directory / path).stat().st_size, algorithm: file_digest(directory / path, algorithm)}
        for path in files_below(directory)
    }
    write_json(directory / MANIFEST, {**facts, "algorithm": algorithm, "files": files})


def read_manifest(directory: Path) -> dict[str, Any] | None:
    """The manifest of a complete artifact, or None: no manifest, or a file is missing or has another size."""
    try:
        manifest = read_json(directory / MANIFEST)
        for name, file in manifest["files"].items():
            if (directory / name).stat().st_size != file["size"]:
                return None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return manifest


def damaged_files(directory: Path) -> list[str]:
    """Files whose content is not what the manifest states. Reads everything."""
    manifest = read_json(directory / MANIFEST)
    algorithm = manifest["algorithm"]
    return [
        name
        for name, file in manifest["files"].items()
        if not (directory / name).is_file() or file_digest(directory / name, algorithm) != file[algorithm]
    ]


def produce(directory: Path, make: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    """The manifest of the artifact `directory`, which `make(temporary directory)` fills unless it is there already.

    `make` returns the facts for the manifest. Of two processes that want the same artifact one makes it while the other
    waits. Leftovers of an attempt that died, and an artifact that lost files, are replaced.
    """
    with lock(directory):
        if manifest := read_manifest(directory):
            return manifest
        temporary = directory.with_name(f".{directory.name}.partial")
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        facts = make(temporary)
        write_manifest(temporary, **facts)
        if directory.exists():
            shutil.rmtree(directory)
        temporary.rename(directory)
        return read_json(directory / MANIFEST)


@contextmanager
def lock(directory: Path) -> Iterator[None]:
    """Hold the lock of `directory`; wait, and say so, while another process has it.

    On one host an advisory `flock`, which the kernel releases however the holder ends; with FINETUNE_SHARED_STORAGE a
    lease as well, because not every shared file system passes locks on.
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    with open(_lock_file(directory), "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("another run works on %s: waiting for it", directory)
            fcntl.flock(file, fcntl.LOCK_EX)
        with lease(directory) if Settings().shared_storage else nullcontext():
            yield


def is_locked(directory: Path) -> bool:
    """Whether a process works on `directory`: one of this host, or with FINETUNE_SHARED_STORAGE of another."""
    try:
        with open(_lock_file(directory)) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        pass
    except BlockingIOError:
        return True
    return Settings().shared_storage and is_leased(directory)


def mark_used(directory: Path) -> None:
    """Note the time: pruning goes by the last use. An artifact of a file system that is read-only stays as it is."""
    with suppress(OSError):
        _lock_file(directory).touch()


def _lock_file(directory: Path) -> Path:
    return directory.with_name(f".{directory.name}.lock")
