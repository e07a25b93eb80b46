"""Which dataset and which model are meant, exactly: a path becomes the digest of its files, a hub id a commit, a URI
the digest of what its store tells of the files, a Delta table its version.

Cheap (one pass over local files, or few bounded requests), so that it runs at the start of every run, before any step
decides from the fingerprint whether its work is done already.
"""

import glob
import re
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from config.settings import Settings, shown
from finetuning.artifacts import file_digest, fingerprint
from finetuning.errors import Failure
from finetuning.filenames import DELTA_LOG, container, data_files, fixed_part, is_pattern, nothing_readable
from finetuning.remote import open_table, remote_digest, remote_files

MODEL_SUFFIXES = {".json", ".safetensors", ".jinja", ".txt", ".model", ".py"}
HUB_TIMEOUT_SECONDS = 20
DIGITS = 12
"""Of a version, for people."""

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

    @property
    def told(self) -> str:
        """For people."""
        return f"{shown(self.name)} at version {self.version[:DIGITS]}"


def identify(kind: Kind, name: str, revision: str, refresh: str | None = None) -> Input:
    """Pin `name`: a URI, a path if there is one of that name, a pattern of paths, otherwise a hub id.

    Raises Failure, naming the setting, whether the hub was asked, and how to give a path instead.
    """
    if kind == "dataset" and "://" in name:
        remote = remote_files(name)
        if remote.is_table:
            return _identify_table(name, name, refresh)
        return Input(name=name, path=None, version=remote_digest(remote), refresh=refresh, uri=name)
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
        return remote_digest(remote_files(source.uri)) == source.version
    return True


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


def digest(kind: Kind, path: Path) -> str:
    files = input_files(kind, path)
    if kind == "model" and not (path / "config.json").is_file():
        raise Failure("configuration", f"model.name={str(path)!r}: a model directory has a config.json, this has none.")
    if not files or (kind == "dataset" and not container(files[0].name)):
        raise nothing_readable(kind, str(path))
    root = root_of(path).parent
    return fingerprint(**{str(file.relative_to(root)): file_digest(file) for file in files})


def _identify_table(name: str, uri: str, refresh: str | None) -> Input:
    """By number, id and files of the version: a copy of a table goes on with the same id and numbers."""
    if "://" in uri and not uri.startswith("s3://"):
        message = f"dataset.name={shown(name)!r}: a Delta table is read from a path or from s3://. Copy it there."
        raise Failure("configuration", message)
    table, _ = open_table(name, uri)
    files = sorted(file.removeprefix(table.table_uri) for file in table.file_uris())
    version = fingerprint(id=str(table.metadata().id), number=table.version(), files=files)
    return Input(name=name, path=None, version=version, refresh=refresh, uri=uri, table_version=table.version())


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
