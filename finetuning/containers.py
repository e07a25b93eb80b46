"""Read one file of rows, whatever it is: JSON lines, JSON, CSV, parquet, arrow; plain or compressed.

Memory stays flat: of text a line is held, of parquet and arrow a batch; only a `.json` that is one document is loaded.
"""

import codecs
import csv
import io
import json
import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from finetuning.errors import Failure
from finetuning.filenames import TEXT_SUFFIXES, container
from finetuning.remote import remote_failure

if TYPE_CHECKING:
    import pyarrow

BATCH_ROWS = 256
BUFFER_BYTES = 1 << 20
HEAD_BYTES = 4096
"""What the encoding of a file is told by."""
LARGEST_CELL = 1 << 27
"""Characters; a quote that is never closed makes one cell of all that follows."""
BOMS = {  # UTF-16's is the beginning of UTF-32's
    codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}
NO_TEXT = re.compile("[\udc80-\udcff]")
"""What bytes that are no UTF-8 become by `surrogateescape`."""


class Row(NamedTuple):
    """A row as it was written."""

    where: str
    """`PATH line 12` of text lines, which count from 1; `PATH row 12` of all else, `NAME SPLIT row 12` of the hub,
    which count from 0."""
    values: dict[str, Any]


class Unreadable(NamedTuple):
    """A line that is no row."""

    where: str
    reason: str
    """`invalid_json`, `not_an_object`, `not_utf8` or `too_many_cells`."""
    text: str
    """For people: what is the matter, without full stop."""


Item = Row | Unreadable


class DataFile(NamedTuple):
    name: str
    """Path or URI, as errors name it."""
    parts: tuple[str, ...]
    """Directories below the root, and the file: they tell its split. Empty when this one file was asked for."""
    open: Callable[[], Any]
    uri: str | None
    """What it is behind."""


def read_file(file: DataFile) -> Iterator[Item]:
    """Rows of one file. Raises Failure, naming it and the reason, when it cannot be read on."""
    import pyarrow

    suffix, compression = container(file.name)
    try:
        with _opened(file, compression) as stream:
            if suffix in TEXT_SUFFIXES:
                _refuse_other_encodings(stream.peek(HEAD_BYTES)[:HEAD_BYTES], file.name)
            yield from READERS[suffix](stream, file.name)
    except (Failure, MemoryError):
        raise
    except (pyarrow.ArrowException, csv.Error, ValueError) as error:
        raise _damaged(file.name, error) from None
    except Exception as error:
        if type(error) is OSError and error.errno is None:  # of Arrow, about what it read
            raise _damaged(file.name, error) from None
        if file.uri and not isinstance(error, LookupError | TypeError | AttributeError):
            raise remote_failure(file.uri, error) from error
        raise


def _damaged(name: str, error: Exception) -> Failure:
    reason = re.sub(r"\s+", " ", str(error))[:200].rstrip(". ")
    return Failure(
        "data", f"{name}: cannot be read, it is damaged or of another kind ({reason}). Write or copy it again."
    )


def _opened(file: DataFile, compression: str | None) -> io.BufferedReader:
    import pyarrow

    raw = file.open()
    if compression:  # Arrow's, because Python's reader of zstd takes a file that was cut short for a whole one
        raw = pyarrow.CompressedInputStream(pyarrow.PythonFile(raw, mode="r"), compression)
    return raw if isinstance(raw, io.BufferedReader) else io.BufferedReader(raw, BUFFER_BYTES)


def _refuse_other_encodings(head: bytes, name: str) -> None:
    encoding = next((encoding for bom, encoding in BOMS.items() if head.startswith(bom)), None)
    if encoding:
        raise Failure(
            "data", f"{name}: is {encoding}. Convert it to UTF-8: iconv -f {encoding} -t UTF-8 FILE > NEW_FILE"
        )
    if head and head.count(0) * 10 >= len(head):
        message = f"{name}: is full of NUL bytes: UTF-16 without a byte order mark, or the remains of a crash."
        raise Failure(
            "data", f"{message} Convert it to UTF-8 (iconv -f UTF-16LE -t UTF-8 FILE > NEW_FILE), or write it again."
        )


def _read_lines(stream: Iterable[bytes], name: str) -> Iterator[Item]:
    for number, line in enumerate(map(_stripped, stream), start=1):
        if line:
            yield _line(line, f"{name} line {number}")


def _stripped(line: bytes) -> bytes:
    return line.removeprefix(codecs.BOM_UTF8).strip()


def _line(line: bytes, where: str) -> Item:
    try:
        value = DECODER.decode(line.decode())
    except UnicodeDecodeError as error:
        return Unreadable(where, "not_utf8", f"not UTF-8 (byte {error.start} is 0x{line[error.start]:02x})")
    except (ValueError, RecursionError) as error:
        reason = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else error
        return Unreadable(where, "invalid_json", f"not valid JSON ({reason})")
    return _row(value, where)


def _row(value: Any, where: str) -> Item:
    if isinstance(value, dict):
        return Row(where, value)
    return Unreadable(where, "not_an_object", f"a row is a JSON object, this is {type(value).__name__}")


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


DECODER = json.JSONDecoder(parse_constant=_no_constant)
LENIENT = json.JSONDecoder(parse_constant=lambda name: NotImplemented)
"""To find the rows of a document that have them: NotImplemented cannot be written as JSON."""


def _read_json(stream: io.BufferedReader, name: str) -> Iterator[Item]:
    """A list of objects, an object, an object around a list; or JSON lines, told by the first two."""
    lines: list[bytes] = []
    while sum(map(bool, map(_stripped, lines))) < 2 and (line := stream.readline()):
        lines.append(line)
    are_rows = [line.startswith(b"{") and isinstance(_line(line, name), Row) for line in map(_stripped, lines) if line]
    if not are_rows:
        return iter(())
    if len(are_rows) == 2 and are_rows[0]:
        return _read_lines(chain(lines, stream), name)
    lines += stream
    try:
        return _document(b"".join(lines), name)
    except (ValueError, RecursionError) as error:
        if are_rows[-1:] == [True]:
            return _read_lines(lines, name)
        raise Failure("data", f"{name}: not valid JSON ({error}). Correct it, or write it again.") from None


def _document(content: bytes, name: str) -> Iterator[Item]:
    try:
        rows, item = _rows_of(DECODER.decode(content.decode("utf-8-sig"))), _row
    except ValueError:
        rows, item = _rows_of(LENIENT.decode(content.decode("utf-8-sig", "surrogateescape"))), _doubtful_row
    return (item(row, f"{name} row {index}") for index, row in enumerate(rows))


def _doubtful_row(value: Any, where: str) -> Item:
    """A row of a document in which something is wrong."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except TypeError:
        return Unreadable(where, "invalid_json", "not valid JSON (NaN and Infinity are none)")
    return Unreadable(where, "not_utf8", "not UTF-8") if NO_TEXT.search(text) else _row(value, where)


def _rows_of(value: Any) -> list[Any]:
    """A list that is all that an object has holds the rows, unless it holds the messages of a single one."""
    if isinstance(value, dict) and len(value) == 1:
        [inner] = value.values()
        if isinstance(inner, list) and all(isinstance(row, dict) and not {"role", "from"} & set(row) for row in inner):
            return inner
    return value if isinstance(value, list) else [value]


def _read_csv(stream: BinaryIO, name: str) -> Iterator[Item]:
    """All cells are text; an empty one is as if it were not there."""
    csv.field_size_limit(LARGEST_CELL)
    lines = io.TextIOWrapper(stream, encoding="utf-8-sig", errors="surrogateescape", newline="")
    records = filter(None, csv.reader(lines, strict=True))
    header = next(records, [])
    for index, cells in enumerate(records):
        where = f"{name} row {index}"
        if len(cells) > len(header):
            yield Unreadable(where, "too_many_cells", f"{len(cells)} cells, and the header has {len(header)}")
        elif NO_TEXT.search("".join(cells)):
            yield Unreadable(where, "not_utf8", "not UTF-8")
        else:
            yield Row(where, {key: cell for key, cell in zip(header, cells, strict=False) if cell})


def _read_parquet(stream: BinaryIO, name: str) -> Iterator[Item]:
    from pyarrow.parquet import ParquetFile

    return read_batches(ParquetFile(stream, buffer_size=BUFFER_BYTES).iter_batches(BATCH_ROWS), name)


def _read_arrow(stream: io.BufferedReader, name: str) -> Iterator[Item]:
    from pyarrow import ipc

    if stream.peek(6).startswith(b"ARROW1"):
        file = ipc.open_file(stream)
        return read_batches(map(file.get_batch, range(file.num_record_batches)), name)
    return read_batches(ipc.open_stream(stream), name)


def read_batches(batches: Iterable["pyarrow.RecordBatch"], name: str) -> Iterator[Item]:
    pieces = (batch.slice(start, BATCH_ROWS) for batch in batches for start in range(0, len(batch), BATCH_ROWS))
    for index, row in enumerate(chain.from_iterable(map(_values, pieces))):
        where = f"{name} row {index}"
        yield Row(where, row) if row is not None else Unreadable(where, "not_utf8", "not UTF-8")


def _values(batch: "pyarrow.RecordBatch") -> list[dict[str, Any] | None]:
    """The rows of a batch; None: one with text that is not UTF-8."""
    try:
        rows = batch.to_pylist(maps_as_pydicts="lossy")
    except UnicodeDecodeError:
        return [None] if len(batch) == 1 else [row for one in range(len(batch)) for row in _values(batch.slice(one, 1))]
    parsers = {field.name: parser for field in batch.schema if (parser := _json_parser(field.type))}
    return [_parsed(row, parsers) for row in rows] if parsers else rows


def _json_parser(kind: "pyarrow.DataType") -> Callable[[Any], Any] | None:
    """What makes of a value of this type the objects that `datasets` stored in it as JSON text, because their fields
    differ from row to row; None: there are none in it."""
    from pyarrow import types

    if getattr(kind, "extension_name", "") == "arrow.json":
        return _unless_none(DECODER.decode)
    if types.is_struct(kind):
        parsers = {field.name: parser for field in kind if (parser := _json_parser(field.type))}
        return _unless_none(partial(_parsed, parsers=parsers)) if parsers else None
    if hasattr(kind, "value_type") and (parser := _json_parser(kind.value_type)):
        return _unless_none(lambda values: [parser(value) for value in values])
    return None


def _parsed(value: dict[str, Any], parsers: dict[str, Callable[[Any], Any]]) -> dict[str, Any]:
    return {**value, **{key: parser(value[key]) for key, parser in parsers.items()}}


def _unless_none(parse: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: None if value is None else parse(value)


READERS = {
    ".jsonl": _read_lines,
    ".ndjson": _read_lines,
    ".json": _read_json,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
    ".arrow": _read_arrow,
}
