"""Which dataset and which model are meant, exactly: a path becomes the digest of its files, a hub id a commit, a URI
the digest of what its store tells of the files, a Delta table its version.

Cheap (one pass over local files, or few bounded requests), so that it runs at the start of every run, before any step
decides from the fingerprint whether its work is done already.
"""

import glob
import importlib
import json
import re
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict

from config.settings import Settings, shown
from finetuning.artifacts import file_digest, fingerprint
from finetuning.errors import Failure

if TYPE_CHECKING:
    import pyarrow.dataset
    from deltalake import DeltaTable

TEXT_SUFFIXES = {".jsonl", ".ndjson", ".json", ".csv"}
DATA_SUFFIXES = {*TEXT_SUFFIXES, ".parquet", ".arrow"}
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
"""Around text only: parquet and arrow compress by themselves."""
MODEL_SUFFIXES = {".json", ".safetensors", ".jinja", ".txt", ".model", ".py"}
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
DELTA_LOG = "_delta_log"
SAVED_STATE = "state.json"
"""Beside the *.arrow of a directory that `save_to_disk` of datasets wrote; names those that belong to it."""
SAVED_SPLITS = "dataset_dict.json"
"""One level up, when it has several splits."""
HUB_TIMEOUT_SECONDS = 20

Kind = Literal["dataset", "model"]


class Input(BaseModel):
    """A dataset or a base model, pinned."""

    model_config = ConfigDict(frozen=True)

    name: str
    path: Path | None
    """Absolute path of local files, or a pattern of such paths; None for a URI, a Delta table and the hub."""
    version: str
    """Digest of the local files' names and contents, or of what `uri` has, or the hub commit."""
    refresh: str | None = None
    """Id of the flow run that wants everything made again: artifacts of other runs do not count for it."""
    uri: str | None = None
    """For fsspec; of a Delta table for deltalake, which takes an absolute path as well."""
    table_version: int | None = None
    """Number of the version to read, when it is a Delta table."""

    @property
    def identity(self) -> dict[str, str | None]:
        """What an artifact made of it is named by."""
        return {"version": self.version, "refresh": self.refresh}


class Remote(NamedTuple):
    """What a URI names."""

    filesystem: Any
    files: dict[str, dict[str, Any]]
    """The filesystem's path of each data file, in order -> what it tells of it."""
    root: str
    """The file itself, or the directory that all are below, the same way written."""
    is_table: bool


def identify(kind: Kind, name: str, revision: str, refresh: str | None = None) -> Input:
    """Pin `name`: a URI, a path if there is one of that name, a pattern of paths, otherwise a hub id.

    Raises Failure, naming the setting, whether the hub was asked, and how to give a path instead.
    """
    if kind == "dataset" and "://" in name:
        remote = remote_files(name)
        if remote.is_table:
            return _identify_table(name, name, refresh)
        return Input(name=name, path=None, version=_remote_digest(remote), refresh=refresh, uri=name)
    path = Path(name).expanduser()
    if kind == "dataset" and (path / DELTA_LOG).is_dir():
        return _identify_table(name, str(path.resolve()), refresh)
    if path.exists() or (kind == "dataset" and is_pattern(name)):
        path = path.resolve() if path.exists() else path.absolute()
        return Input(name=name, path=path, version=digest(kind, path), refresh=refresh)
    if _looks_like_path(name):
        raise Failure("configuration", f"{kind}.name={name!r}: there is no such file or directory ({path.absolute()}).")
    return Input(name=name, path=None, version=_commit(kind, name, revision), refresh=refresh)


def is_unchanged(source: Input) -> bool:
    """Whether a dataset's files still are what was pinned. A commit, and a version of a table, never change."""
    if source.path:
        return digest("dataset", source.path) == source.version
    if source.uri and source.table_version is None:
        return _remote_digest(remote_files(source.uri)) == source.version
    return True


def container(name: str) -> tuple[str, str | None] | None:
    """Suffix of a data file without its compression, and the compression; None: a file of another kind."""
    path = PurePosixPath(name)
    compression = COMPRESSIONS.get(path.suffix)
    suffix = PurePosixPath(path.stem).suffix if compression else path.suffix
    return (suffix, compression) if suffix in (TEXT_SUFFIXES if compression else DATA_SUFFIXES) else None


def is_pattern(name: str) -> bool:
    return bool(re.search(r"[*\[]" if name.startswith("http") else r"[*?\[]", name))  # `?` asks a web server


def fixed_part(pattern: str) -> str:
    """The directory that everything matching is below."""
    parts = pattern.split("/")
    return "/".join(parts[: next((number for number, part in enumerate(parts) if is_pattern(part)), len(parts))])


def root_of(path: Path) -> Path:
    """The path itself, or the directory that everything matching it is below."""
    return path if path.exists() else Path(fixed_part(str(path)))


def input_files(kind: Kind, path: Path) -> list[Path]:
    """The files that count: a model's files in the directory itself, a dataset's data files at any depth, without
    hidden ones and those that begin with `_`."""
    if path.is_file():
        return [path]
    if kind == "model":
        found = path.glob("*")
        return sorted(file for file in found if file.suffix in MODEL_SUFFIXES and not file.name.startswith("."))
    root = root_of(path)
    found = path.rglob("*") if path.exists() else map(Path, glob.glob(str(path), recursive=True))
    names = [file.relative_to(root).as_posix() for file in found if not file.is_dir()]
    return [root / name for name in data_files(names, str(path), lambda name: (root / name).read_bytes())]


def data_files(names: list[str], where: str, read: Callable[[str], bytes]) -> list[str]:
    """Of all files below a directory, those that hold rows, in order. What `save_to_disk` wrote also has JSON files
    that hold none, and caches and older files beside its own. Raises Failure for a Delta table further down."""
    if table := next((name for name in names if f"/{DELTA_LOG}/" in name), None):
        table = table.partition(f"/{DELTA_LOG}/")[0]
        message = f"dataset.name={where!r}: below it is a Delta table, {table}. Give the path of the table itself."
        raise Failure("configuration", message)
    names = [name for name in names if container(name) and not re.search(r"(^|/)[._]", name)]
    folders = {PurePosixPath(name).parent for name in names if name.endswith(".arrow")}
    saved = {folder for folder in folders if str(folder / SAVED_STATE) in names}
    own = {
        str(folder / file["filename"])
        for folder in saved
        for file in json.loads(read(str(folder / SAVED_STATE)))["_data_files"]
    }
    rest = {name for name in names if PurePosixPath(name).parent not in saved}
    if saved:
        rest -= {name for name in rest if PurePosixPath(name).name == SAVED_SPLITS}
    return sorted(rest | own, key=lambda name: name.split("/"))


def digest(kind: Kind, path: Path) -> str:
    files = input_files(kind, path)
    if kind == "model" and not (path / "config.json").is_file():
        raise Failure("configuration", f"model.name={str(path)!r}: a model directory has a config.json, this has none.")
    if not files or (kind == "dataset" and not container(files[0].name)):
        raise _nothing_readable(kind, str(path))
    root = root_of(path).parent
    return fingerprint(**{str(file.relative_to(root)): file_digest(file) for file in files})


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
        raise _nothing_readable("dataset", shown(uri))
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


def _remote_digest(remote: Remote) -> str:
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


def _identify_table(name: str, uri: str, refresh: str | None) -> Input:
    """By number, id and files of the version: a copy of a table goes on with the same id and numbers."""
    if "://" in uri and not uri.startswith("s3://"):
        message = f"dataset.name={shown(name)!r}: a Delta table is read from a path or from s3://. Copy it there."
        raise Failure("configuration", message)
    table, _ = open_table(name, uri)
    files = sorted(file.removeprefix(table.table_uri) for file in table.file_uris())
    version = fingerprint(id=str(table.metadata().id), number=table.version(), files=files)
    return Input(name=name, path=None, version=version, refresh=refresh, uri=uri, table_version=table.version())


def _nothing_readable(kind: Kind, name: str) -> Failure:
    suffixes = f"{sorted(DATA_SUFFIXES)}, text also as {' or '.join(COMPRESSIONS)}"
    return Failure("configuration", f"{kind}.name={name!r}: no file of a kind that can be read: {suffixes}.")


def _looks_like_path(name: str) -> bool:
    return name[0] in "./~" or name.count("/") > 1 or container(name) is not None


def _commit(kind: Kind, name: str, revision: str) -> str:
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    settings = Settings()
    local = f"To use files of your own give their path as {kind}.name."
    where = f"{kind}.name={name!r}"
    try:
        if settings.hf_hub_offline:
            return Path(snapshot_download(name, repo_type=kind, revision=revision, local_files_only=True)).name
        token = settings.hf_token.get_secret_value() if settings.hf_token else None
        api = HfApi(token=token)
        info = api.repo_info(name, repo_type=kind, revision=revision, timeout=HUB_TIMEOUT_SECONDS)
        if info.gated:  # whose commit everybody may know
            api.auth_check(name, repo_type=kind)
        return info.sha
    except HFValidationError:
        raise Failure("configuration", f"{where}: neither a path that exists nor a hub id. {local}") from None
    except LocalEntryNotFoundError:
        message = f"{where}: the hub was not asked (HF_HUB_OFFLINE=1) and its cache has no revision {revision!r} of it."
        raise Failure("configuration", f"{message} Unset HF_HUB_OFFLINE, or: {local}") from None
    except GatedRepoError:
        message = f"{where}: the hub was asked; access is restricted. Accept its terms there and set HF_TOKEN."
        raise Failure("authentication", message) from None
    except RepositoryNotFoundError:
        message = f"{where}: the hub was asked and has none of this name that is public or open to HF_TOKEN. {local}"
        raise Failure("configuration", message) from None
    except RevisionNotFoundError:
        raise Failure(
            "configuration", f"{kind}.revision={revision!r}: the hub's {name} has no such revision."
        ) from None
    except Exception as error:  # httpx and requests errors alike: whatever the network did
        reason = re.sub(r"\s+", " ", str(error))[:200]
        message = f"{where}: the hub was asked but could not be reached ({type(error).__name__}: {reason}). {local}"
        raise Failure("transient", message) from None
