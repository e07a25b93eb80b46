"""Load a dataset, check it, split it: the artifact is `train.jsonl` and `test.jsonl`, one conversation a line.

A conversation is `{"messages": [{"role", "content", ...}], "tools": [...]}`; all other columns are left behind.
Program: `python -m finetuning.data JOB.json` with `section`, `input` and `output`.
"""

import json
import logging
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from config.sections import DatasetSection
from finetuning import child
from finetuning.artifacts import produce
from finetuning.errors import Failure
from finetuning.inputs import Input, digest, input_files

if TYPE_CHECKING:
    from datasets import Dataset

DATA_VERSION = 1
"""Part of every dataset fingerprint: raise it when the same input and options give other rows."""

ROLES = {"system", "user", "assistant", "tool"}
EVALUATION_SPLITS = ("test", "validation", "eval")
logger = logging.getLogger(__name__)


class Row(NamedTuple):
    where: str
    """File and line, or split and index: what an error names."""
    values: dict[str, Any]


def run(job: dict[str, Any]) -> dict[str, Any]:
    section, source = DatasetSection.model_validate(job["section"]), Input.model_validate(job["input"])
    return produce(Path(job["output"]), lambda directory: prepare(section, source, directory))


def prepare(section: DatasetSection, source: Input, output: Path) -> dict[str, Any]:
    """Write both splits below `output` and return what the manifest says of them."""
    splits = dict(_read_local(source.path) if source.path else _read_hub(section, source))
    checked = {name: check_rows(source.name, rows) for name, rows in splits.items()}
    if source.path and digest("dataset", source.path) != source.version:  # after reading, so it covers what was read
        message = f"dataset.name={section.name!r}: its files changed since this run began. Start a new run."
        raise Failure("data", message)
    train, test = choose_splits(section, checked)
    for name, rows in (("train", train), ("test", test)):
        if len(rows) < section.min_rows:
            raise Failure(
                "data",
                f"dataset.name={section.name!r}: the {name} split has {len(rows)} of at least {section.min_rows} rows "
                "(dataset.min_rows). Give more rows, name the splits, or change dataset.test_size "
                f"(now {section.test_size}).",
            )
        with (output / f"{name}.jsonl").open("w") as file:
            file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    logger.info("%s: %d conversations to train on, %d to evaluate on", source.name, len(train), len(test))
    return {"source": source.name, "version": source.version, "num_train": len(train), "num_test": len(test)}


def choose_splits(section: DatasetSection, splits: dict[str, list]) -> tuple[list, list]:
    """The rows to train on and to evaluate on: the named split, `test`, `validation`, `eval`, or a part set aside."""
    wanted = [section.train_split, *([section.test_split] if section.test_split else [])]
    for name in wanted:
        if name not in splits:
            key = "train_split" if name == section.train_split else "test_split"
            raise Failure("configuration", f"dataset.{key}={name!r}: the dataset has {', '.join(splits)}.")
    train = splits[section.train_split]
    test_split = section.test_split or next((name for name in EVALUATION_SPLITS if splits.get(name)), None)
    return (train, splits[test_split]) if test_split else set_aside(train, section)


def set_aside(rows: list, section: DatasetSection) -> tuple[list, list]:
    """Split by `datasets`' own shuffle, so that a seed gives the rows it gives elsewhere."""
    from datasets import Dataset

    if len(rows) < 2:
        raise Failure("data", f"dataset.name={section.name!r}: {len(rows)} rows cannot be split in two. Give more.")
    indices = Dataset.from_dict({"index": range(len(rows))})
    parts = indices.train_test_split(test_size=section.test_size, seed=section.split_seed)
    return tuple([rows[index] for index in parts[part]["index"]] for part in ("train", "test"))


def check_rows(name: str, rows: Iterable[Row]) -> list[dict[str, Any]]:
    """The rows as plain conversations. Raises Failure naming the first row that is none, and how many there are."""
    good, bad, found, total = [], [], set(), 0
    for row in rows:
        total += 1
        found.update(row.values)
        try:
            good.append(conversation(row.values))
        except ValueError as problem:
            bad.append(f"{row.where}: {problem}")
    if total == 0:
        raise Failure("data", f"dataset.name={name!r}: there are no rows in it.")
    if bad and "messages" not in found:
        columns = ", ".join(sorted(found))
        expected = "expected `messages`: a list of {role, content}"
        raise Failure("data", f"dataset.name={name!r}: no row has `messages`; found {columns}; {expected}.")
    if bad:
        raise Failure("data", f"dataset.name={name!r}: {len(bad)} of {total} rows cannot be trained on; {bad[0]}.")
    return good


def conversation(row: dict[str, Any]) -> dict[str, Any]:
    """`messages` and `tools` of a row. Raises ValueError with the reason when it is no conversation."""
    messages = row.get("messages")
    if isinstance(messages, str):  # a CSV cell
        messages = json.loads(messages)
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"`messages` is {type(messages).__name__ if messages is not None else 'missing'} or empty")
    for number, message in enumerate(messages):
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            role = message.get("role") if isinstance(message, dict) else message
            raise ValueError(f"message {number} has role {role!r}, which is none of {', '.join(sorted(ROLES))}")
        if not isinstance(message.get("content"), str) and not message.get("tool_calls"):
            raise ValueError(f"message {number} has content {message.get('content')!r}, which is no text")
    if not any(message["role"] == "assistant" for message in messages):
        raise ValueError("no message has role 'assistant', so there is nothing to learn")
    messages = [{key: value for key, value in message.items() if value is not None} for message in messages]
    return {"messages": messages, **({"tools": row["tools"]} if row.get("tools") else {})}


def _read_local(path: Path) -> Iterator[tuple[str, Iterator[Row]]]:
    """Split name -> rows. A file's split is the word its name starts with, when any file has a known one."""
    files = input_files("dataset", path)
    names = {file: re.match(r"[a-z]*", file.stem.lower()).group() for file in files}
    known = {"train", *EVALUATION_SPLITS}
    if path.is_file() or not known & set(names.values()):
        names = dict.fromkeys(files, "train")
    for split in dict.fromkeys(names.values()):
        chosen = [file for file in files if names[file] == split]
        yield split, (row for file in chosen for row in read_file(file))


def read_file(path: Path) -> Iterator[Row]:
    """Rows of one data file. Raises Failure with file and line when it cannot be read."""
    if path.suffix in (".parquet", ".csv"):
        from datasets import load_dataset

        rows = load_dataset(path.suffix[1:], data_files=str(path), split="train")
        yield from (Row(f"{path} row {index}", row) for index, row in enumerate(rows))
        return
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise Failure("data", f"{path}: byte {error.start} is not UTF-8. Convert the file to UTF-8.") from None
    if path.suffix == ".json":
        values = _parse(text, str(path))
        numbered = enumerate(values if isinstance(values, list) else [values])
        yield from (_row(value, f"{path} row {index}") for index, value in numbered)
        return
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield _row(_parse(line, f"{path} line {number}"), f"{path} line {number}")


def _parse(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise Failure("data", f"{where}: not valid JSON ({error}). Correct or remove it.") from None


def _row(value: Any, where: str) -> Row:
    if not isinstance(value, dict):
        raise Failure("data", f"{where}: a row is a JSON object, this is {type(value).__name__}.")
    return Row(where, value)


def _read_hub(section: DatasetSection, source: Input) -> Iterator[tuple[str, Iterator[Row]]]:
    from datasets import load_dataset

    try:
        splits = load_dataset(source.name, section.config_name, revision=source.version)
    except ValueError as error:  # "Config name is missing", "BuilderConfig ... not found": both list what there is
        message = f"dataset.config_name={section.config_name!r}: {str(error).splitlines()[0]}"
        raise Failure("configuration", message) from None
    for split, rows in splits.items():
        yield split, (Row(f"{source.name} {split} row {index}", row) for index, row in enumerate(rows))


def read_dataset(path: Path) -> "Dataset":
    """The split as a Dataset. Fields that differ from row to row (tool arguments) stay as they are: Arrow alone would
    give every row the keys of all others, with null values."""
    from datasets import Dataset

    with path.open() as file:
        return Dataset.from_list([json.loads(line) for line in file], on_mixed_types="use_json")


if __name__ == "__main__":
    child.main(run)
