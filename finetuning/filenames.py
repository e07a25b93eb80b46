"""Which files hold rows, by their names, wherever they lie."""

import json
import re
from collections.abc import Callable
from pathlib import PurePosixPath

from finetuning.errors import Failure

TEXT_SUFFIXES = {".jsonl", ".ndjson", ".json", ".csv"}
DATA_SUFFIXES = {*TEXT_SUFFIXES, ".parquet", ".arrow"}
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
"""Around text only: parquet and arrow compress by themselves."""
DELTA_LOG = "_delta_log"
SAVED_STATE = "state.json"
"""Beside the *.arrow of a directory that `save_to_disk` of datasets wrote; names those that belong to it."""
SAVED_SPLITS = "dataset_dict.json"
"""One level up, when it has several splits."""


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


def nothing_readable(kind: str, name: str) -> Failure:
    suffixes = f"{sorted(DATA_SUFFIXES)}, text also as {' or '.join(COMPRESSIONS)}"
    return Failure("configuration", f"{kind}.name={name!r}: no file of a kind that can be read: {suffixes}.")
