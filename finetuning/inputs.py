"""Which dataset and which model are meant, exactly: a path becomes the digest of its files, a hub id a commit.

Cheap (one pass over local files, or one bounded request), so that it runs at the start of every run, before any step
decides from the fingerprint whether its work is done already.
"""

import re
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from config.settings import Settings
from finetuning.artifacts import file_digest, fingerprint
from finetuning.errors import Failure

DATA_SUFFIXES = {".jsonl", ".json", ".parquet", ".csv"}
MODEL_SUFFIXES = {".json", ".safetensors", ".jinja", ".txt", ".model", ".py"}
HUB_TIMEOUT_SECONDS = 20

Kind = Literal["dataset", "model"]


class Input(BaseModel):
    """A dataset or a base model, pinned."""

    model_config = ConfigDict(frozen=True)

    name: str
    path: Path | None
    """Absolute path of a local one; None for the hub."""
    version: str
    """Digest of the local files' names and contents, or the hub commit."""
    refresh: str | None = None
    """Id of the flow run that wants everything made again: artifacts of other runs do not count for it."""

    @property
    def identity(self) -> dict[str, str | None]:
        """What an artifact made of it is named by."""
        return {"version": self.version, "refresh": self.refresh}


def identify(kind: Kind, name: str, revision: str, refresh: str | None = None) -> Input:
    """Pin `name`: a path if there is one of that name, otherwise a hub id.

    Raises Failure, naming the setting, whether the hub was asked, and how to give a path instead.
    """
    path = Path(name).expanduser()
    if path.exists():
        return Input(name=name, path=path.resolve(), version=digest(kind, path.resolve()), refresh=refresh)
    if _looks_like_path(name):
        raise Failure("configuration", f"{kind}.name={name!r}: there is no such file or directory ({path.absolute()}).")
    return Input(name=name, path=None, version=_commit(kind, name, revision), refresh=refresh)


def input_files(kind: Kind, path: Path) -> list[Path]:
    """The files that count: a dataset's data files at any depth, a model's files in the directory itself."""
    if path.is_file():
        return [path]
    suffixes = DATA_SUFFIXES if kind == "dataset" else MODEL_SUFFIXES
    found = path.rglob("*") if kind == "dataset" else path.glob("*")
    return sorted(file for file in found if file.suffix in suffixes and not file.name.startswith("."))


def digest(kind: Kind, path: Path) -> str:
    files = input_files(kind, path)
    suffixes = sorted(DATA_SUFFIXES)
    if kind == "model" and not (path / "config.json").is_file():
        raise Failure("configuration", f"model.name={str(path)!r}: a model directory has a config.json, this has none.")
    if not files or (kind == "dataset" and files[0].suffix not in suffixes):
        raise Failure("configuration", f"{kind}.name={str(path)!r}: no file of a kind that can be read: {suffixes}.")
    return fingerprint(**{str(file.relative_to(path.parent)): file_digest(file) for file in files})


def _looks_like_path(name: str) -> bool:
    return name[0] in "./~" or name.count("/") > 1 or Path(name).suffix in DATA_SUFFIXES


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
        info = HfApi(token=token).repo_info(name, repo_type=kind, revision=revision, timeout=HUB_TIMEOUT_SECONDS)
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
