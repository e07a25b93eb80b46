"""The version that the alias `champion` points at: which one it is, and its files."""

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from config.settings import Settings
from finetuning.artifacts import read_manifest
from finetuning.bounded import within
from finetuning.errors import Failure
from finetuning.refusals import explained
from finetuning.registry import Registry

ALIAS, CHALLENGER = "champion", "challenger"
DOWNLOAD_SECONDS = 3600
"""What a download may take: MLflow sets no limit to some of its requests."""
logger = logging.getLogger(__name__)


class Champion(NamedTuple):
    name: str
    number: str
    fingerprint: str
    """Of its model directory; of a version that this pipeline did not make, its name and number."""


def registry() -> Registry:
    settings = Settings()
    return Registry(settings.registry_uri, settings.tracking_uri)


def find(name: str) -> Champion | None:
    """Raises Failure when the registry does not answer."""
    version = registry().by_alias(name, ALIAS)
    return version and Champion(name, version.number, version.fingerprint or f"{name} {version.number}")


@contextmanager
def model_directory(champion: Champion) -> Iterator[Path]:
    """Its model directory: the one it was made from when that is still there, otherwise downloaded for as long as it is
    needed. Raises Failure."""
    settings = Settings()
    own = settings.storage_root / "model-directories" / champion.fingerprint
    if read_manifest(own):
        yield own
        return
    with TemporaryDirectory(prefix="champion-", dir=settings.storage_root / "tmp") as temporary:
        logger.info("downloading champion %s version %s", champion.name, champion.number)
        yield download(champion.name, champion.number, Path(temporary)) / "model"


def download(name: str, number: str, target: Path) -> Path:
    """The package of a registered version, below `target`. Raises Failure; `configuration` when its files are gone."""
    import mlflow

    settings = Settings()
    mlflow.set_tracking_uri(settings.tracking_uri)
    mlflow.set_registry_uri(settings.registry_uri)
    uri = f"models:/{name}/{number}"
    call = partial(mlflow.artifacts.download_artifacts, artifact_uri=uri, dst_path=str(target))
    with explained(name, settings.registry_uri):
        try:
            return Path(within(DOWNLOAD_SECONDS, call))
        except Exception as error:
            if re.search("(?i)no such (file|artifact)|not found|does not exist", str(error)):
                reason = " ".join(str(error).split())
                raise Failure("configuration", f"the files of {uri} are gone: {reason}") from error
            raise
