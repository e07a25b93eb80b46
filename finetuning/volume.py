"""Copy a finished model directory to a Unity Catalog volume that is not mounted, over Databricks' Files API.

A broken copy is gone on with: `.uploaded.json` beside the files records what has arrived whole, with its hash, and goes
when `manifest.json`, the last file, is there. Login as for all of Databricks: DATABRICKS_HOST and DATABRICKS_TOKEN, or
a profile.
"""

import contextlib
import io
import json
import logging
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from threading import Lock
from typing import TYPE_CHECKING, Any

from finetuning.artifacts import MANIFEST, read_manifest
from finetuning.errors import Failure, Kind

if TYPE_CHECKING:
    from databricks.sdk import WorkspaceClient

RECORD = ".uploaded.json"
FILES_AT_ONCE = 4
"""Each large file goes up in parts besides, ten at a time."""
RETRY_SECONDS = 60
"""The SDK alone would try for five minutes; the step as a whole is tried again anyway."""
logger = logging.getLogger(__name__)


def publish_remote(model_directory: Path, target: str) -> None:
    """Copy `model_directory` to `target`, `/Volumes/catalog/schema/volume/...`, its manifest last.

    A file is not sent again when the volume has it with the right size and a manifest or record there has its hash.
    Raises Failure.
    """
    manifest = read_manifest(model_directory)
    if manifest is None:
        raise Failure("bug", f"{model_directory} is not a complete model directory: no manifest, or files missing")
    try:
        _Copy(model_directory, target.rstrip("/"), manifest).run()
    except Failure:
        raise
    except Exception as error:
        raise _explained(error, model_directory, target) from error


def workspace() -> "WorkspaceClient":
    from databricks.sdk import WorkspaceClient
    from databricks.sdk.config import Config

    return WorkspaceClient(config=Config(retry_timeout_seconds=RETRY_SECONDS))


class _Copy:
    def __init__(self, source: Path, target: str, manifest: dict[str, Any]):
        self.source, self.target, self.manifest = source, target, manifest
        self.files = workspace().files
        self.arrived: dict[str, Any] = {}
        """Name -> size and hash, as in the manifest."""
        self.lock = Lock()

    def run(self) -> None:
        there, record, sizes = self.read(MANIFEST), self.read(RECORD), self.sizes()
        self.arrived = {
            name: file
            for name, file in self.manifest["files"].items()
            if sizes.get(name) == file["size"] and file in (_file(there, name), _file(record, name))
        }
        missing = [name for name in self.manifest["files"] if name not in self.arrived]
        if there == self.manifest and not missing:
            return
        logger.info("%s: %s of %s files are there", self.target, len(self.arrived), len(self.manifest["files"]))
        if there is not None:
            self.files.delete(f"{self.target}/{MANIFEST}")
        self.make_directories()
        self.write(RECORD, {"files": self.arrived})
        self.send_all(missing)
        self.compare()
        self.write(MANIFEST, self.manifest)
        with contextlib.suppress(Exception):  # it does no harm
            self.files.delete(f"{self.target}/{RECORD}")

    def read(self, name: str) -> Any:
        """A JSON file of the volume; None when it is not there, or half there."""
        from databricks.sdk.errors import NotFound

        try:
            return json.loads(self.files.download(f"{self.target}/{name}").contents.read())
        except (NotFound, ValueError):
            return None

    def write(self, name: str, value: Any) -> None:
        content = io.BytesIO(json.dumps(value, indent=1, ensure_ascii=False).encode())
        self.files.upload(f"{self.target}/{name}", content, overwrite=True)

    def directories(self) -> list[PurePosixPath]:
        """Of all files, parents first."""
        parents = {parent for name in self.manifest["files"] for parent in PurePosixPath(name).parents}
        return sorted(parents | {PurePosixPath(".")})

    def make_directories(self) -> None:
        for directory in self.directories():
            self.files.create_directory(self.path(directory))

    def sizes(self) -> dict[str, int]:
        """Name -> bytes, of what the volume has."""
        from databricks.sdk.errors import NotFound

        sizes = {}
        for directory in self.directories():
            with contextlib.suppress(NotFound):
                for entry in self.files.list_directory_contents(self.path(directory)):
                    sizes[str(directory / entry.name)] = entry.file_size
        return sizes

    def path(self, name: PurePosixPath) -> str:
        return self.target if name == PurePosixPath(".") else f"{self.target}/{name}"

    def send_all(self, names: list[str]) -> None:
        """The largest first. The first error ends it; what has arrived by then is recorded."""
        started, sent, total = time.monotonic(), 0, sum(self.manifest["files"][name]["size"] for name in names)
        names = sorted(names, key=lambda name: self.manifest["files"][name]["size"], reverse=True)
        with ThreadPoolExecutor(FILES_AT_ONCE) as pool:
            futures = [pool.submit(self.send, name) for name in names]
            try:
                for name, future in zip(names, futures, strict=True):
                    future.result()
                    sent += self.manifest["files"][name]["size"]
                    rate = sent / 1e6 / max(time.monotonic() - started, 1e-3)
                    logger.info("uploaded %s: %.1f of %.1f MB, %.0f MB/s", name, sent / 1e6, total / 1e6, rate)
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise

    def send(self, name: str) -> None:
        self.files.upload_from(f"{self.target}/{name}", str(self.source / name), overwrite=True)
        with self.lock:
            self.arrived[name] = self.manifest["files"][name]
            self.write(RECORD, {"files": self.arrived})

    def compare(self) -> None:
        sizes = self.sizes()
        for name, file in self.manifest["files"].items():
            if sizes.get(name) != file["size"]:
                has = f"has {sizes[name]} bytes" if name in sizes else "is not there"
                raise Failure("transient", f"{self.target}/{name} {has} after the upload and not {file['size']} bytes")


def _file(manifest: Any, name: str) -> Any:
    return (manifest or {}).get("files", {}).get(name)


def _explained(error: Exception, model_directory: Path, target: str) -> Failure:
    from databricks.sdk.errors import InvalidParameterValue, NotFound, PermissionDenied, Unauthenticated

    catalog, schema, volume = (*target.strip("/").split("/")[1:4], "", "", "")[:3]
    kind: Kind = "transient"
    remedy = "it goes on where it stopped"
    if isinstance(error, PermissionDenied | Unauthenticated) or re.search("default auth", str(error)):
        kind = "authentication"
        rights = (
            f"WRITE VOLUME on {catalog}.{schema}.{volume}, USE SCHEMA on {catalog}.{schema}, USE CATALOG on {catalog}"
        )
        remedy = f"you need DATABRICKS_TOKEN and {rights}"
    elif isinstance(error, NotFound | InvalidParameterValue):
        kind, remedy = "configuration", f"the volume {catalog}.{schema}.{volume} must exist (registry.volume)"
    message = (
        f"the model directory {model_directory}, which is whole, could not be copied to {target}: {error}; {remedy}"
    )
    return Failure(kind, " ".join(message.split()))
