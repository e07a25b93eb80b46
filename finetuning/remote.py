"""Data that is no local file: what a URI names, through fsspec, and Delta tables."""

import importlib
import re
from typing import TYPE_CHECKING, Any, NamedTuple

from config.settings import shown
from finetuning.artifacts import fingerprint
from finetuning.errors import Failure
from finetuning.filenames import DELTA_LOG, container, data_files, fixed_part, is_pattern, nothing_readable

if TYPE_CHECKING:
    import pyarrow.dataset
    from deltalake import DeltaTable

DRIVERS = {
    "memory": "fsspec",
    "s3": "s3fs",
    "gs": "gcsfs",
    "abfs": "adlfs",
    "abfss": "adlfs",
    "az": "adlfs",
    "https": "aiohttp",
    "http": "aiohttp",
}
"""Schemes of URIs, and the package that fsspec needs for each."""
STAMPS = (
    *("ETag", "etag", "md5Hash", "content_md5", "Content-MD5", "crc32c", "Digest"),
    *("LastModified", "last_modified", "Last-Modified", "updated", "mtime", "created"),
)
"""What the stores say of a file's content, the surest first: S3, Google, Azure, web servers, memory."""


class Remote(NamedTuple):
    """What a URI names."""

    filesystem: Any
    files: dict[str, dict[str, Any]]
    """The filesystem's path of each data file, in order -> what it tells of it."""
    root: str
    """The file itself, or the directory that all are below, the same way written."""
    is_table: bool


def remote_files(uri: str) -> Remote:
    """The data files that a URI names: itself, those below it, or those that match. Raises Failure, also when there
    are none."""
    where = f"dataset.name={shown(uri)!r}"
    scheme = uri.partition("://")[0]
    if scheme not in DRIVERS:
        raise Failure(
            "configuration", f"{where}: a URI begins with one of {', '.join(f'{one}://' for one in DRIVERS)}."
        )
    try:
        importlib.import_module(DRIVERS[scheme])
        from fsspec.core import url_to_fs

        filesystem, path = url_to_fs(uri)
        filesystem.invalidate_cache()  # it keeps listings as long as the process lives
        remote = _list(filesystem, path.rstrip("/"), shown(uri))
    except ImportError as error:
        package = DRIVERS[scheme]
        message = f"{where}: {scheme}:// needs the package {package} ({error}). Install it: pip install {package}"
        raise Failure("configuration", message) from None
    except Exception as error:
        raise remote_failure(uri, error) from None
    if not remote.files and not remote.is_table:
        raise nothing_readable("dataset", shown(uri))
    return remote


def _list(filesystem: Any, path: str, where: str) -> Remote:
    if is_pattern(path):
        root, found = fixed_part(path), filesystem.glob(path, detail=True)
        found = {name: facts for name, facts in found.items() if facts["type"] == "file"}
    elif (facts := filesystem.info(path))["type"] == "file":
        readable = {path: facts} if container(path.partition("?")[0]) else {}
        return Remote(filesystem, readable, path, is_table=False)
    else:
        root, found = path, filesystem.find(path, detail=True)
    names = [name[len(root) + 1 :] for name in found]
    if any(name.startswith(f"{DELTA_LOG}/") for name in names):
        return Remote(filesystem, {}, root, is_table=True)
    chosen = data_files(names, where, lambda name: filesystem.cat_file(f"{root}/{name}"))
    return Remote(filesystem, {f"{root}/{name}": found[f"{root}/{name}"] for name in chosen}, root, is_table=False)


def remote_digest(remote: Remote) -> str:
    """Of names and sizes, and of the first of STAMPS that the store gives: of a file whose store gives none (some web
    servers), a change that keeps its size goes unseen."""
    files = {}
    for path, facts in remote.files.items():
        stamp = next((str(facts[stamp]) for stamp in STAMPS if facts.get(stamp)), None)
        files[remote.filesystem.unstrip_protocol(path)] = [facts.get("size"), stamp]
    return fingerprint(**files)


def remote_failure(uri: str, error: Exception) -> Failure:
    """What it means that the store of `uri` refuses, or does not answer."""
    if isinstance(error, Failure):
        return error
    cause = error.__cause__ or error  # fsspec says FileNotFoundError for whatever a web server does
    where = f"dataset.name={shown(uri)!r}"
    reason = shown(re.sub(r"\s+", " ", f"{type(cause).__name__}: {cause}"))[:200]
    status = getattr(cause, "status", 0)
    if status in (401, 403) or isinstance(error, PermissionError) or re.search("Credential|Auth", type(cause).__name__):
        return Failure("authentication", f"{where}: access is refused ({reason}). Set the credentials its store needs.")
    if isinstance(error, FileNotFoundError) and (
        status in (404, 410) or cause is error or not isinstance(cause, OSError)
    ):
        return Failure("configuration", f"{where}: there is no such file or directory.")
    return Failure("transient", f"{where}: its store was asked but could not be reached ({reason}).")


def open_table(
    source_name: str, uri: str, version: int | None = None
) -> tuple["DeltaTable", "pyarrow.dataset.Dataset"]:
    """A Delta table, of its newest version unless one is given. Raises Failure, also when reading it takes a feature
    that deltalake lacks: its parquet files have rows that deletion vectors take out again."""
    where = f"dataset.name={shown(source_name)!r}"
    try:
        from deltalake import DeltaTable
        from deltalake.exceptions import DeltaError, DeltaProtocolError
    except ImportError as error:
        message = f"{where}: a Delta table needs the package deltalake ({error}). Install it: pip install deltalake"
        raise Failure("configuration", message) from None
    try:
        table = DeltaTable(uri, version=version)
        return table, table.to_pyarrow_dataset()
    except DeltaProtocolError as error:
        raise Failure("configuration", f"{where}: {error} Write its rows to parquet, and give their path.") from None
    except DeltaError as error:
        reason = str(error).splitlines()[0]
        raise Failure("data", f"{where}: the log of this Delta table cannot be read ({reason}). Repair it.") from None
    except OSError as error:
        raise remote_failure(uri, error) from None
