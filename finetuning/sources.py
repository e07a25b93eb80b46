"""The splits of a dataset, each with its rows one at a time: local files, a URI, a Delta table, the hub."""

import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from config.sections import DatasetSection
from config.settings import shown
from finetuning.containers import BATCH_ROWS, DataFile, Item, Row, read_batches, read_file
from finetuning.errors import Failure
from finetuning.filenames import SAVED_SPLITS
from finetuning.inputs import Input, input_files, root_of
from finetuning.remote import open_table, remote_files

KNOWN_SPLITS = {"train", "test", "validation", "eval"}


def read_splits(section: DatasetSection, source: Input) -> dict[str, Iterator[Item]]:
    """Split -> its rows, none of which is read before it is asked for.

    Raises Failure, at once or while reading: a store that does not answer, a damaged file, another encoding than UTF-8.
    """
    if source.table_version is not None:
        return {"train": _read_table(source)}
    if not (source.path or source.uri):
        return _read_hub(section, source)
    files, exists = _local_files(source.path) if source.path else _remote_files(source.uri)
    parts = [file.parts for file in files]
    if all(len(each) == 2 for each in parts) and exists(SAVED_SPLITS):
        splits = [split for split, _ in parts]
    else:
        splits = split_names(parts, section)
    return {name: _read_files(files, splits, name) for name in dict.fromkeys(splits)}


def _read_files(files: list[DataFile], splits: list[str], name: str) -> Iterator[Item]:
    return chain.from_iterable(read_file(file) for file, split in zip(files, splits, strict=True) if split == name)


def _local_files(path: Path) -> tuple[list[DataFile], Callable[[str], bool]]:
    """The files, and what tells whether there is a file of some name beside them."""
    root = root_of(path)
    files = input_files("dataset", path)
    found = [DataFile(str(file), file.relative_to(root).parts, partial(open, file, "rb"), None) for file in files]
    return found, lambda name: (root / name).is_file()


def _remote_files(uri: str) -> tuple[list[DataFile], Callable[[str], bool]]:
    filesystem, paths, root, _ = remote_files(uri)

    def data_file(path: str) -> DataFile:
        name = shown(filesystem.unstrip_protocol(path)).partition("?")[0]
        parts = path.removeprefix(root).strip("/").split("/")
        return DataFile(name, tuple(filter(None, parts)), partial(filesystem.open, path, "rb"), uri)

    return [data_file(path) for path in paths], lambda name: filesystem.exists(f"{root}/{name}")


def split_names(files: list[tuple[str, ...]], section: DatasetSection) -> list[str]:
    """The split of each file, given by its parts: the word that its name begins with, or else the nearest directory of
    a known name, when any file has a known split at all; otherwise `train`."""
    asked = {section.train_split, section.test_split} - {None}
    told = [[_word(parts[-1], asked), *reversed(parts[:-1])] for parts in files if parts]
    known = [next((name for name in names if name in KNOWN_SPLITS | asked), None) for names in told]
    if not any(known):
        return ["train"] * len(files)
    own = 0 if any(names[0] in KNOWN_SPLITS | asked for names in told) else 1  # `extra.jsonl`, or `extra/0.jsonl`
    return [split or names[min(own, len(names) - 1)] for split, names in zip(known, told, strict=True)]


def _word(name: str, asked: set[str]) -> str:
    """`train` of `train-00000-of-00001.parquet`; of the splits that are asked for also `train_sft`, whole."""
    whole = [split for split in asked if re.match(rf"{re.escape(split)}(?![a-zA-Z0-9])", name)]
    return max(whole, key=len) if whole else re.match(r"[a-z]*", name.lower()).group()


def _read_table(source: Input) -> Iterator[Item]:
    """File by file in the order of their names: the log has them in another order when it was compacted."""
    _, dataset = open_table(source.name, source.uri, source.table_version)
    files = sorted(dataset.get_fragments(), key=lambda fragment: fragment.path)
    batches = (batch for file in files for batch in file.to_batches(schema=dataset.schema, batch_size=BATCH_ROWS))
    try:
        yield from read_batches(batches, shown(source.name))
    except FileNotFoundError as error:
        reason = f"a file of version {source.table_version} is gone ({str(error).splitlines()[0]})"
        raise Failure("data", f"dataset.name={source.name!r}: {reason}. Start a new run.") from None


def _read_hub(section: DatasetSection, source: Input) -> dict[str, Iterator[Item]]:
    splits = load_hub(section, source)
    return {split: hub_rows(f"{source.name} {split}", rows) for split, rows in splits.items()}


def load_hub(section: DatasetSection, source: Input, streaming: bool = False) -> dict[str, Any]:
    """Split -> its `datasets.Dataset`, or with `streaming` what reads of its files as much as it is asked for. Raises
    Failure."""
    from datasets import load_dataset
    from datasets.exceptions import DatasetGenerationError

    try:
        return load_dataset(source.name, section.config_name, revision=source.version, streaming=streaming)
    except ValueError as error:  # "Config name is missing", "BuilderConfig ... not found": both list what there is
        message = f"dataset.config_name={section.config_name!r}: {' '.join(str(error).split())[:400]}"
        raise Failure("configuration", message) from None
    except DatasetGenerationError as error:
        if isinstance(error.__cause__, OSError):  # the disk or the network
            raise
        reason = re.sub(r"\s+", " ", str(error.__cause__ or error))[:200]
        message = f"dataset.name={section.name!r}: datasets cannot read the files that the hub has of it ({reason})."
        raise Failure("data", f"{message} Download them, correct them and give their path.") from None


def hub_rows(where: str, rows: Iterable[dict[str, Any]]) -> Iterator[Item]:
    return (Row(f"{where} row {index}", row) for index, row in enumerate(rows))
