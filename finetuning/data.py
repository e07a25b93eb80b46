"""Load a dataset, check every row, split it: the artifact is `train.jsonl`, `test.jsonl` and `report.json`.

A line is `{"messages": [{"role", "content", ...}], "tools": [...], "where": "FILE line N"}`, or `{"text", "where"}`
when that was asked for; all other columns are left behind. Rows pass through one at a time: what is kept in memory is
a few numbers a row. Programs: `python -m finetuning.data JOB.json` with `section`, `input` and `output`, and
`python -m finetuning.data check PATH_OR_NAME`, see `finetuning.check`.
"""

import json
import logging
import sys
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from config.sections import DatasetSection
from finetuning import child
from finetuning.artifacts import produce, write_json
from finetuning.containers import Row, Unreadable
from finetuning.errors import Failure
from finetuning.inputs import Input, is_unchanged
from finetuning.lengths import refuse_too_many, told
from finetuning.shapes import BadRow, normalise
from finetuning.sources import read_splits

if TYPE_CHECKING:
    from datasets import Dataset

DATA_VERSION = 3
"""Part of every dataset fingerprint: raise it when the same input and options give other rows."""

EVALUATION_SPLITS = ("test", "validation", "eval")
REPORT = "report.json"
logger = logging.getLogger(__name__)


def run(job: dict[str, Any]) -> dict[str, Any]:
    section, source = DatasetSection.model_validate(job["section"]), Input.model_validate(job["input"])
    return produce(Path(job["output"]), lambda directory: prepare(section, source, directory))


def prepare(section: DatasetSection, source: Input, output: Path, read: "list[Rows] | None" = None) -> dict[str, Any]:
    """Write both splits and the report below `output` and return what the manifest says of them. Raises Failure;
    `read` then has the splits that were read so far, with their counts."""
    root = f"{source.path.parent}/" if source.path else ""

    def rows_of(name: str) -> Rows:
        rows = Rows(name, section, output / f".{name}.rows", root)
        if read is not None:
            read.append(rows)
        return rows

    train, test = choose_splits(section, read_splits(section, source), rows_of)
    if not is_unchanged(source):  # after reading, so it covers what was read
        message = f"dataset.name={section.name!r}: its files changed since this run began. Start a new run."
        raise Failure("data", message)
    overlap = remove_overlap(train, test) if test and section.deduplicate else 0
    chosen = (train.rows, test.rows) if test else set_aside(train, section)
    report = {
        "splits": {rows.name: rows.report() for rows in (train, test) if rows},
        "removed_from_train_because_in_test": overlap,
        "set_aside": not test,
    }
    for name, origin, rows in zip(("train", "test"), (train, test or train), chosen, strict=True):
        if len(rows) < section.min_rows:
            raise Failure(
                "data",
                f"dataset.name={section.name!r}: the {name} split has {len(rows)} of at least {section.min_rows} rows "
                f"(dataset.min_rows){origin.without_duplicates()}. Give more rows, name the splits, or change "
                f"dataset.test_size (now {section.test_size}).",
            )
        origin.write(rows, output / f"{name}.jsonl")
        report[f"num_{name}"] = len(rows)
    for rows in filter(None, (train, test)):
        rows.file.unlink()
    if overlap:
        logger.info("%d conversations of the train split are in the test split as well: removed from train", overlap)
    write_json(output / REPORT, report)
    counts = {f"num_{name}": report[f"num_{name}"] for name in ("train", "test")}
    logger.info("%s: %d conversations to train on, %d to evaluate on", source.name, *counts.values())
    return {"source": source.name, "version": source.version, **counts}


class Rows:
    """The good rows of a split, in a file, and the counts of all of them."""

    def __init__(self, name: str, section: DatasetSection, file: Path, root: str = ""):
        """`root` is left out where a row says where it comes from: the artifact is the same on any machine."""
        self.name, self.section, self.file, self.root = name, section, file, root
        self.offsets, self.digests, self.groups = array("Q"), array("Q"), array("Q")
        self.num_read = 0
        self.rows: Any = ()
        """Indices of the rows that are kept."""
        self.shapes, self.notes, self.dropped = Counter[str](), Counter[str](), Counter[str]()
        self.first_bad: dict[str, str] = {}

    def gather(self, items: Iterable[Row | Unreadable]) -> "Rows":
        """Read, check and keep; the counts are logged first. Raises Failure when too many are bad."""
        with self.file.open("wb") as file:
            for item in told(items, f"{self.name}: rows read"):
                self.num_read += 1
                if isinstance(item, Unreadable):
                    self._unreadable(item)
                    continue
                try:
                    shape, row = normalise(item.values, self.section, self.notes)
                    self._keep(row, item, file)
                    self.shapes[shape] += 1
                except BadRow as bad:
                    self._drop(bad.reason, item.where, bad.text)
        num_bad, first_bad = sum(self.dropped.values()), dict(self.first_bad)
        self.rows = self._first_of_equal() if self.section.deduplicate else range(len(self.offsets))
        self.dropped["duplicate"] = len(self.offsets) - len(self.rows)
        if self.num_read:
            for line in self.lines():
                logger.info("%s", line)
            refuse_too_many(f"{self.name} split", num_bad, self.num_read, self.section, first_bad)
        return self

    def _keep(self, row: dict[str, Any], item: Row, file: Any) -> None:
        group_by = self.section.group_by
        if group_by and group_by not in item.values:
            raise BadRow("no_group", f"there is no column {group_by!r} (dataset.group_by)")
        if group_by:
            self.groups.append(xxhash.xxh3_64_intdigest(str(item.values[group_by]).encode()))
        content = json.dumps(row, ensure_ascii=False, sort_keys=True).encode()
        self.digests.append(xxhash.xxh3_64_intdigest(content))
        self.offsets.append(file.tell())
        file.write(
            json.dumps({**row, "where": item.where.removeprefix(self.root)}, ensure_ascii=False).encode() + b"\n"
        )

    def _drop(self, reason: str, where: str, text: str) -> None:
        self.dropped[reason] += 1
        self.first_bad.setdefault(reason, f"{where}: {text}")

    def _unreadable(self, item: Unreadable) -> None:
        if self.section.on_unreadable == "fail":
            raise Failure(
                "data",
                f"{item.where}: {item.text}. Correct or remove it, or set dataset.on_unreadable to 'drop'.",
            )
        self._drop(item.reason, item.where, item.text)

    def _first_of_equal(self) -> Any:
        import numpy

        digests = numpy.frombuffer(self.digests, dtype=numpy.uint64)
        kept = numpy.sort(numpy.unique(digests, return_index=True)[1])
        if len(kept) < len(digests):
            gaps = numpy.flatnonzero(kept != numpy.arange(len(kept)))
            second = int(gaps[0]) if len(gaps) else len(kept)
            first = int(numpy.flatnonzero(digests == digests[second])[0])
            self.first_bad["duplicate"] = f"{self._where(second)}: equal to {self._where(first)}"
        return kept

    def _where(self, index: int) -> str:
        with self.file.open("rb") as file:
            file.seek(self.offsets[index])
            return self.root + json.loads(file.readline())["where"]

    def write(self, indices: Iterable[int], path: Path) -> None:
        with self.file.open("rb") as source, path.open("wb") as target:
            for index in indices:
                source.seek(self.offsets[index])
                target.write(source.readline())

    def without_duplicates(self) -> str:
        count = self.dropped["duplicate"]
        return f"; {count} duplicates were removed (dataset.deduplicate)" if count else ""

    def report(self) -> dict[str, Any]:
        dropped = {reason: count for reason, count in self.dropped.items() if count}
        return {
            "name": self.name,
            "rows": self.num_read,
            "kept": len(self.rows),
            "shapes": dict(self.shapes),
            "mended": dict(self.notes),
            "dropped": dropped,
            "first_bad": self.first_bad,
        }

    def lines(self) -> Iterator[str]:
        shapes = ", ".join(f"{count} {shape}" for shape, count in self.shapes.items())
        yield f"{self.name}: {self.num_read} rows read ({shapes}), {len(self.rows)} kept"
        if self.notes:
            yield f"{self.name}: " + ", ".join(f"{count} {note}" for note, count in self.notes.items())
        for reason, count in self.dropped.items():
            if count:
                yield f"{self.name}: {count} dropped, {reason}; {self.first_bad[reason]}"


def choose_splits(
    section: DatasetSection, splits: dict[str, Iterator[Row | Unreadable]], rows_of: Callable[[str], Rows]
) -> tuple[Rows, Rows | None]:
    """The rows to train on, and those to evaluate on when a split of their own is there: the named one, `test`,
    `validation` or `eval`, the first of these that has rows."""
    for option in ("train_split", "test_split"):
        name = getattr(section, option)
        if name is not None and name not in splits:
            raise Failure("configuration", f"dataset.{option}={name!r}: the dataset has {', '.join(splits)}.")

    train = rows_of(section.train_split).gather(splits[section.train_split])
    if not train.num_read:
        raise Failure("data", f"dataset.name={section.name!r}: there are no rows in it.")
    for name in [section.test_split] if section.test_split else EVALUATION_SPLITS:
        if name in splits and name != section.train_split:
            test = rows_of(name).gather(splits[name])
            if test.num_read:
                return train, test
    return train, None


def remove_overlap(train: Rows, test: Rows) -> int:
    """Take the rows that the test split has out of the training split: what is evaluated on stays comparable."""
    import numpy

    digests = numpy.frombuffer(train.digests, dtype=numpy.uint64)[train.rows]
    seen = numpy.isin(digests, numpy.frombuffer(test.digests, dtype=numpy.uint64))
    train.rows = numpy.asarray(train.rows)[~seen]
    return int(seen.sum())


def set_aside(train: Rows, section: DatasetSection) -> tuple[Any, Any]:
    """Split by `datasets`' own shuffle, so that a seed gives the rows it gives elsewhere; with `group_by` whole groups
    go to one side or the other. Where the share is one row, two of four or more are set aside: one chooses the
    checkpoint, the other is the gate's."""
    import numpy

    rows = numpy.asarray(train.rows)
    if len(rows) < 2:
        removed = train.without_duplicates()
        raise Failure(
            "data",
            f"dataset.name={section.name!r}: {len(rows)} row cannot be split in two{removed}. Give more.",
        )
    if not section.group_by:
        one_row = len(rows) * section.test_size <= 1
        parts = shuffled_parts(len(rows), section, 2 if one_row and len(rows) >= 4 else section.test_size)
        return tuple(rows[part] for part in parts)
    groups, first = numpy.unique(numpy.frombuffer(train.groups, dtype=numpy.uint64)[rows], return_index=True)
    ordered = groups[numpy.argsort(first)]
    _, test = shuffled_parts(len(ordered), section, section.test_size)
    aside = numpy.isin(numpy.frombuffer(train.groups, dtype=numpy.uint64)[rows], ordered[test])
    return rows[~aside], rows[aside]


def shuffled_parts(count: int, section: DatasetSection, test_size: float) -> tuple[Any, Any]:
    """`test_size`: a share, or a whole number of rows."""
    from datasets import Dataset

    if count < 2:
        message = f"dataset.group_by={section.group_by!r}: {count} group cannot be split in two. Set it to null."
        raise Failure("data", message)
    parts = Dataset.from_dict({"index": range(count)}).train_test_split(test_size=test_size, seed=section.split_seed)
    return _indices(parts["train"]), _indices(parts["test"])


def _indices(part: "Dataset") -> Any:
    """In batches: all at once takes 600 bytes a row."""
    import numpy

    return numpy.concatenate([batch["index"].to_numpy() for batch in part.with_format("arrow").iter(10_000)])


def read_dataset(path: Path) -> "Dataset":
    """The split as a Dataset. Fields that differ from row to row (tool arguments) stay as they are: Arrow alone would
    give every row the keys of all others, with null values."""
    from datasets import Dataset

    with path.open() as file:
        return Dataset.from_list([json.loads(line) for line in file], on_mixed_types="use_json")


if __name__ == "__main__":
    if sys.argv[1:2] == ["check"]:
        from finetuning.check import main

        main(sys.argv[2:])
    else:
        child.main(run)
