"""Rows out of every container and place, and what is said of those that cannot be had."""

import csv
import gzip
import json
import os
import shutil
import subprocess
import sys
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from config.sections import DatasetSection
from finetuning.artifacts import file_digest, fingerprint
from finetuning.containers import Row, Unreadable
from finetuning.errors import Failure
from finetuning.inputs import Input, identify, is_unchanged
from finetuning.shapes import SHAPES, normalise
from finetuning.sources import read_splits
from tests.conftest import PROJECT
from tests.hub import Repository, serve

PLAIN = [{"question": f"Wie viel ist {number} + 1, 什么?", "answer": f'"{number + 1}",\n' * 2} for number in range(5)]


def message_row(arguments: dict[str, Any]) -> dict[str, Any]:
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    return {
        "messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    }


NESTED = [message_row({"city": "Oslo"}), message_row({"number": 3}), message_row({"nested": {"a": [1]}})]


def read(name: Path | str, **options: Any) -> dict[str, list[Row | Unreadable]]:
    section = DatasetSection(name=str(name), **options)
    splits = read_splits(section, identify("dataset", str(name), "main"))
    return {split: list(rows) for split, rows in splits.items()}


def values(name: Path | str, split: str = "train", **options: Any) -> list[dict[str, Any]]:
    return [row.values for row in read(name, **options)[split]]


def refusal(name: Path | str, **options: Any) -> Failure:
    with pytest.raises(Failure) as refused:
        read(name, **options)
    assert "\n" not in refused.value.message
    return refused.value


def lines(rows: list[Any]) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def put(path: Path, content: bytes) -> Path:
    """Write, compressed as the name says."""
    import pyarrow

    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix in (".gz", ".zst"):
        with pyarrow.CompressedOutputStream(str(path), "gzip" if path.suffix == ".gz" else "zstd") as file:
            file.write(content)
    else:
        path.write_bytes(content)
    return path


def as_csv(rows: list[dict[str, str]], folder: Path) -> bytes:
    with (folder / "rows").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return (folder / "rows").read_bytes()


def put_arrow(path: Path, rows: list[Any], *, stream: bool) -> Path:
    import pyarrow

    table = pyarrow.Table.from_pylist(rows)
    with (pyarrow.ipc.new_stream if stream else pyarrow.ipc.new_file)(str(path), table.schema) as file:
        file.write_table(table, max_chunksize=2)
    return path


def put_parquet(path: Path, rows: list[Any]) -> Path:
    import pyarrow.parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=2)
    return path


def test_text_containers_hold_the_same_rows(tmp_path: Path) -> None:
    table = as_csv(PLAIN, tmp_path)
    documents = {
        "list.json": json.dumps(PLAIN, indent=1).encode(),
        "data.json": json.dumps({"data": PLAIN}).encode(),
        "lines.json": lines(PLAIN),
        "bom.json": b"\xef\xbb\xbf" + json.dumps(PLAIN).encode(),
        "d.jsonl": lines(PLAIN),
        "d.ndjson": lines(PLAIN),
        "bom.jsonl": b"\xef\xbb\xbf" + lines(PLAIN),
        "crlf.jsonl": b"\r\n \r\n" + lines(PLAIN).replace(b"\n", b"\r\n\r\n").rstrip(),
        "d.csv": table,
        "bom.csv": b"\xef\xbb\xbf" + table.replace(b"\r\n", b"\n\n"),
    }
    for name, content in documents.items():
        for ending in ("", ".gz", ".zst"):
            assert values(put(tmp_path / (name + ending), content)) == PLAIN, name + ending


def test_binary_containers_hold_the_same_rows(tmp_path: Path) -> None:
    assert values(put_parquet(tmp_path / "d.parquet", PLAIN)) == PLAIN
    assert values(put_arrow(tmp_path / "file.arrow", PLAIN, stream=False)) == PLAIN
    assert values(put_arrow(tmp_path / "stream.arrow", PLAIN, stream=True)) == PLAIN


SAID = [{"role": "user", "content": "Wo ist 什么?"}, {"role": "assistant", "content": 'Im "Regal",\nzwei.'}]
ASKED, ANSWERED = SAID[0]["content"], SAID[1]["content"]
SHAPED: dict[str, dict[str, Any]] = {
    "messages": {"messages": SAID},
    "sharegpt": {"conversations": [{"from": "human", "value": ASKED}, {"from": "gpt", "value": ANSWERED}]},
    "prompt_completion": {"prompt": ASKED, "completion": ANSWERED},
    "alpaca": {"instruction": ASKED, "input": "", "output": ANSWERED},
    "input_output": {"conversation": [{"input": ASKED, "output": ANSWERED}]},
    "text": {"text": ASKED + ANSWERED},
}


def test_the_shapes_here_are_all() -> None:
    assert set(SHAPED) == set(SHAPES)


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_out_of_every_container(tmp_path: Path, shape: str) -> None:
    rows = [SHAPED[shape]] * 3
    cells = [{name: cell if isinstance(cell, str) else json.dumps(cell) for name, cell in row.items()} for row in rows]
    contents = {"d.jsonl": lines(rows), "d.json": json.dumps(rows).encode(), "d.csv": as_csv(cells, tmp_path)}
    files = [put(tmp_path / (name + end), content) for name, content in contents.items() for end in ("", ".gz", ".zst")]
    files.append(put_parquet(tmp_path / "d.parquet", rows))
    files += [put_arrow(tmp_path / f"{stream}.arrow", rows, stream=stream) for stream in (False, True)]
    expected = {"text": ASKED + ANSWERED} if shape == "text" else {"messages": SAID}
    section = DatasetSection(shape="text" if shape == "text" else "auto")
    for file in files:
        told = [normalise(row, section, Counter()) for row in values(file)]
        assert told == [(shape, expected)] * 3, file.name


def test_rows_whose_fields_differ_come_out_as_they_were(tmp_path: Path) -> None:
    """Arrow would give every row the keys of all others; `datasets` stores such values as JSON text."""
    from datasets import Dataset

    dataset = Dataset.from_list(NESTED, on_mixed_types="use_json")
    dataset.to_parquet(tmp_path / "d.parquet")
    dataset.save_to_disk(tmp_path / "saved")
    for path in ("d.parquet", "saved"):
        assert values(tmp_path / path) == NESTED, path
    for name, content in {"d.jsonl": lines(NESTED), "d.json": json.dumps(NESTED).encode()}.items():
        assert values(put(tmp_path / name, content)) == NESTED


def test_maps_are_objects_and_json_of_any_depth_is_parsed(tmp_path: Path) -> None:
    import pyarrow

    inner = pyarrow.struct([("j", pyarrow.json_()), ("n", pyarrow.int64())])
    texts = pyarrow.array(['{"a": 1}', None], pyarrow.string()).cast(pyarrow.json_())
    structs = pyarrow.StructArray.from_arrays([texts, pyarrow.array([1, 2])], fields=list(inner))
    lists = pyarrow.ListArray.from_arrays([0, 2, 2], structs)
    maps = pyarrow.array([[("k", "v")], None], pyarrow.map_(pyarrow.string(), pyarrow.string()))
    put_path = tmp_path / "d.arrow"
    table = pyarrow.table({"l": lists, "m": maps})
    with pyarrow.ipc.new_file(str(put_path), table.schema) as file:
        file.write_table(table)
    assert values(put_path) == [
        {"l": [{"j": {"a": 1}, "n": 1}, {"j": None, "n": 2}], "m": {"k": "v"}},
        {"l": [], "m": None},
    ]


def test_a_row_says_where_it_is(tmp_path: Path) -> None:
    """Lines count from 1, as editors do; rows from 0, as `datasets` does."""
    texts = put(tmp_path / "d.jsonl", b"\n" + lines(PLAIN[:2]))
    assert [row.where for row in read(texts)["train"]] == [f"{texts} line 2", f"{texts} line 3"]
    many = [{"a": number} for number in range(1000)]
    for path in (
        put(tmp_path / "l.json", json.dumps(many).encode()),
        put(tmp_path / "d.csv", as_csv(many, tmp_path)),
        put_parquet(tmp_path / "d.parquet", many),
        put_arrow(tmp_path / "d.arrow", many, stream=True),
    ):
        rows = read(path)["train"]
        assert [row.where for row in rows] == [f"{path} row {number}" for number in range(1000)]
        assert [int(row.values["a"]) for row in rows] == list(range(1000))


def test_a_json_document_of_one_row_is_not_taken_for_a_list_of_its_messages(tmp_path: Path) -> None:
    row = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    for indent in (None, 1):
        assert values(put(tmp_path / "d.json", json.dumps(row, indent=indent).encode())) == [row]
    shared = {"conversations": [{"from": "human", "value": "a"}]}
    assert values(put(tmp_path / "d.json", json.dumps(shared).encode())) == [shared]
    assert values(put(tmp_path / "d.json", b'{"a": 1, "b": [{"c": 2}]}')) == [{"a": 1, "b": [{"c": 2}]}]


def test_lines_that_are_no_rows_are_told_and_passed_over(tmp_path: Path) -> None:
    good = lines(PLAIN[:1])
    bad = {
        b'{"a": NaN}': ("invalid_json", "not valid JSON (NaN is no JSON)"),
        b'{"a": -Infinity}': ("invalid_json", "not valid JSON (-Infinity is no JSON)"),
        b'{"a": 1} x': ("invalid_json", "not valid JSON (Extra data at column 10)"),
        b'{"a": "': ("invalid_json", "not valid JSON (Unterminated string starting at at column 7)"),
        b"[" * 100_000: ("invalid_json", "not valid JSON (maximum recursion depth exceeded"),
        b'{"a": %s}' % (b"1" * 5000): ("invalid_json", "not valid JSON (Exceeds the limit"),
        b'[{"a": 1}]': ("not_an_object", "a row is a JSON object, this is list"),
        b"null": ("not_an_object", "a row is a JSON object, this is NoneType"),
        b'{"a": "\xe4"}': ("not_utf8", "not UTF-8 (byte 7 is 0xe4)"),
    }
    for ending in ("jsonl", "jsonl.zst"):
        path = put(tmp_path / f"d.{ending}", good + b"".join(line + b"\n" + good for line in bad))
        found = read(path)["train"]
        assert [item.values for item in found[::2]] == PLAIN[:1] * (len(bad) + 1)
        for number, (item, (reason, text)) in enumerate(zip(found[1::2], bad.values(), strict=True)):
            assert isinstance(item, Unreadable)
            assert (item.where, item.reason) == (f"{path} line {2 + 2 * number}", reason)
            assert item.text.startswith(text)


def test_rows_of_documents_that_are_none_are_told_and_passed_over(tmp_path: Path) -> None:
    document = put(tmp_path / "d.json", b'[{"a": 1}, 7, {"a": NaN}, {"a": "\xe4"}, {"a": 2}]')
    assert [(item.where, getattr(item, "reason", None)) for item in read(document)["train"]] == [
        (f"{document} row 0", None),
        (f"{document} row 1", "not_an_object"),
        (f"{document} row 2", "invalid_json"),
        (f"{document} row 3", "not_utf8"),
        (f"{document} row 4", None),
    ]
    table = put(tmp_path / "d.csv", b'a,b\n1,\n"\xe4",2\n1,2,3\n4\n')
    assert read(table)["train"] == [
        Row(f"{table} row 0", {"a": "1"}),
        Unreadable(f"{table} row 1", "not_utf8", "not UTF-8"),
        Unreadable(f"{table} row 2", "too_many_cells", "3 cells, and the header has 2"),
        Row(f"{table} row 3", {"a": "4"}),
    ]


def test_text_of_parquet_that_is_not_utf8_costs_its_row_only(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    texts = pyarrow.Array.from_buffers(pyarrow.string(), 3, pyarrow.array([b"a", b"\xe4", b"c"]).buffers())
    pyarrow.parquet.write_table(pyarrow.table({"a": texts}), tmp_path / "d.parquet")
    found = read(tmp_path / "d.parquet")["train"]
    assert [getattr(item, "reason", None) for item in found] == [None, "not_utf8", None]


def test_a_lone_surrogate_passes(tmp_path: Path) -> None:
    assert values(put(tmp_path / "d.jsonl", b'{"a": "\\ud800"}')) == [{"a": "\ud800"}]
    assert values(put(tmp_path / "d.json", b'[{"a": "\\ud800"}]')) == [{"a": "\ud800"}]


def test_a_json_file_of_lines_is_known_by_either_of_its_first_two(tmp_path: Path) -> None:
    path = put(tmp_path / "d.json", b"{cut\n" + lines(PLAIN[:2]))
    assert [type(item) for item in read(path)["train"]] == [Unreadable, Row, Row]
    path = put(tmp_path / "d.json", lines(PLAIN[:1]) + b"{cut\n")
    assert [(type(item), item.where) for item in read(path)["train"]] == [
        (Row, f"{path} line 1"),
        (Unreadable, f"{path} line 2"),
    ]
    assert (
        "not valid JSON (Expecting ',' delimiter: line 2" in refusal(put(tmp_path / "d.json", b'[{"a": 1}\n')).message
    )


@pytest.mark.parametrize("name", ["d.jsonl", "d.json", "d.csv", "d.jsonl.gz", "d.csv.zst"])
def test_other_encodings_are_refused_with_the_way_to_convert_them(tmp_path: Path, name: str) -> None:
    for encoding, told in {"utf-16": "is UTF-16", "utf-32": "is UTF-32", "utf-16-le": "is full of NUL bytes"}.items():
        path = put(tmp_path / name, '{"a": "什么什么什么"}\n'.encode(encoding))
        refused = refusal(path)
        assert refused.kind == "data"
        assert refused.message.startswith(f"{path}: {told}")
        assert "iconv -f UTF-" in refused.message
    assert "full of NUL bytes" in refusal(put(tmp_path / name, bytes(10_000))).message


def damaged(folder: Path) -> dict[str, tuple[Path, str]]:
    text = lines([{"a": str(number) * 50} for number in range(20_000)])
    files = {name: put(folder / name, text) for name in ("cut.jsonl.gz", "cut.jsonl.zst")}
    files["cut.parquet"] = put_parquet(folder / "cut.parquet", PLAIN)
    files["cut.arrow"] = put_arrow(folder / "cut.arrow", PLAIN, stream=True)
    files["file.arrow"] = put_arrow(folder / "file.arrow", PLAIN, stream=False)
    for path in files.values():
        path.write_bytes(path.read_bytes()[:-40])
    files["no.jsonl.gz"] = folder / "no.jsonl.gz"
    files["no.jsonl.gz"].write_bytes(lines(PLAIN))
    files["empty.parquet"] = put(folder / "empty.parquet", b"")
    files["quote.csv"] = put(folder / "quote.csv", b'a,b\n1,"2\n3,4\n')
    return files


def test_damaged_files_are_named_with_the_reason(tmp_path: Path) -> None:
    for name, path in damaged(tmp_path).items():
        refused = refusal(path)
        assert refused.kind == "data", name
        assert refused.message.startswith(f"{path}: cannot be read, it is damaged or of another kind ("), name
        assert "()" not in refused.message, name
        assert refused.message.endswith("Write or copy it again."), name
    assert "Truncated compressed stream" in refusal(tmp_path / "cut.jsonl.zst").message


def test_nothing_is_no_error(tmp_path: Path) -> None:
    for name in ("d.jsonl", "d.json", "d.csv", "d.jsonl.gz", "d.json.zst"):
        for content in (b"", b"\n \n", b"\xef\xbb\xbf"):
            assert read(put(tmp_path / name, content)) == {"train": []}, name
    assert read(put(tmp_path / "d.json", b"[]")) == {"train": []}
    assert read(put(tmp_path / "d.csv", b"a,b\n")) == {"train": []}
    assert read(put_parquet(tmp_path / "d.parquet", [])) == {"train": []}


def test_rows_come_before_the_rest_is_read(tmp_path: Path) -> None:
    path = damaged(tmp_path)["cut.jsonl.gz"]
    rows = read_splits(DatasetSection(name=str(path)), identify("dataset", str(path), "main"))["train"]
    assert next(rows).where == f"{path} line 1"
    with pytest.raises(Failure, match="Truncated"):
        list(rows)
    (tmp_path / "d").mkdir()
    source = identify("dataset", str(put(tmp_path / "d" / "train.jsonl", b"")), "main")
    splits = read_splits(DatasetSection(), source)
    put(tmp_path / "d" / "train.jsonl", lines(PLAIN))
    assert [row.values for row in splits["train"]] == PLAIN, "nothing was read before"


@pytest.mark.parametrize("name", ["d.jsonl", "d.json", "d.jsonl.zst", "d.csv"])
def test_memory_stays_flat(tmp_path: Path, name: str) -> None:
    row = {"text": "x" * 2000}
    content = b"text\n" + b"x" * 2000 if name == "d.csv" else lines([row]).rstrip()
    path = put(tmp_path / name, content + b"\n" + (content.split(b"\n")[-1] + b"\n") * 9_999)
    rows = read_splits(DatasetSection(), identify("dataset", str(path), "main"))["train"]
    tracemalloc.start()
    try:
        assert sum(item.values == row for item in rows) == 10_000
        assert tracemalloc.get_traced_memory()[1] < 4e6, "of 20e6 bytes"
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("files", "options", "splits"),
    [
        ("a.jsonl b.jsonl.gz sub/c.json", {}, {"train": 3}),
        ("train.jsonl test.jsonl extra.jsonl", {}, {"train": 1, "test": 1, "extra": 1}),
        ("train-00000-of-00002.jsonl train-00001-of-00002.jsonl validation.csv", {}, {"train": 2, "validation": 1}),
        ("train/0.jsonl train/1.jsonl test/0.jsonl extra/0.jsonl", {}, {"train": 2, "test": 1, "extra": 1}),
        ("data/train-0.jsonl data/test-0.jsonl", {}, {"train": 1, "test": 1}),
        ("train/2024/part-0.jsonl eval/part-0.jsonl", {}, {"train": 1, "eval": 1}),
        ("a.jsonl dev.jsonl", {"train_split": "a", "test_split": "dev"}, {"a": 1, "dev": 1}),
        ("train_sft-0.jsonl train_gen-0.jsonl", {"train_split": "train_sft"}, {"train_sft": 1, "train": 1}),
        ("train.jsonl .hidden.jsonl _part.jsonl _temporary/x.jsonl .git/y.json notes.txt _SUCCESS", {}, {"train": 1}),
    ],
)
def test_splits_are_told_by_names(
    tmp_path: Path, files: str, options: dict[str, str], splits: dict[str, int], memory: Callable[[str, bytes], None]
) -> None:
    rows = {"csv": as_csv(PLAIN, tmp_path), "json": json.dumps(PLAIN).encode()}
    for name in files.split():
        path = put(tmp_path / "d" / name, rows.get(name.rpartition(".")[2], lines(PLAIN)))
        memory(f"d/{name}", path.read_bytes())
    for place in (tmp_path / "d", f"{tmp_path}/d/**", "memory://d", "memory://d/", "memory://d/**"):
        found = read(place, **options)
        assert {split: len(found[split]) for split in found} == {split: 5 * n for split, n in splits.items()}, place


def test_a_single_file_is_for_training_whatever_its_name(tmp_path: Path) -> None:
    assert values(put(tmp_path / "test" / "_test.jsonl", lines(PLAIN))) == PLAIN


def test_what_datasets_saved_comes_out_with_its_splits(tmp_path: Path, memory: Callable[[str, bytes], None]) -> None:
    """Caches, and files of an earlier save with more shards, are no part of it."""
    from datasets import Dataset, DatasetDict

    saved = tmp_path / "saved"
    splits = {"train_sft": Dataset.from_list(PLAIN), "test_sft": Dataset.from_list(PLAIN[:2])}
    DatasetDict(splits).save_to_disk(saved, num_shards={"train_sft": 2, "test_sft": 1})
    for name in ("cache-0123.arrow", "data-00002-of-00003.arrow"):
        shutil.copy(saved / "train_sft" / "data-00000-of-00002.arrow", saved / "train_sft" / name)
    for file in filter(Path.is_file, saved.rglob("*")):
        memory(f"saved/{file.relative_to(saved)}", file.read_bytes())
    for place in (saved, "memory://saved"):
        found = read(place)
        assert {split: [row.values for row in rows] for split, rows in found.items()} == {
            "test_sft": PLAIN[:2],
            "train_sft": PLAIN,
        }
    assert read(saved)["train_sft"][4].where == f"{saved}/train_sft/data-00001-of-00002.arrow row 1"
    assert read(saved / "test_sft") == {"train": read(saved)["test_sft"]}


def test_patterns_take_files_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("b", "a", "sub/c"):
        put(tmp_path / "d" / f"{name}.jsonl", lines([{"name": name}]))
    put(tmp_path / "[odd].jsonl", lines([{"name": "odd"}]))
    monkeypatch.chdir(tmp_path)

    def names(pattern: str) -> list[str]:
        return [row["name"] for row in values(pattern)]

    assert names("d/*.jsonl") == names(f"{tmp_path}/d/?.jsonl") == ["a", "b"]
    assert names("d/**/*.jsonl") == names("d/**") == names("d") == ["a", "b", "sub/c"]
    assert names("[odd].jsonl") == ["odd"], "a file of that name comes first"
    source = identify("dataset", "d/*.jsonl", "main")
    assert source.path == tmp_path / "d" / "*.jsonl"
    put(tmp_path / "d" / "z.jsonl", lines([{"name": "z"}]))
    assert not is_unchanged(source)
    assert refusal("d/*.csv").message.startswith("dataset.name='")
    assert "no file of a kind that can be read: ['.arrow', '.csv'" in refusal("d/*.csv").message


def test_the_version_of_files_is_what_it_always_was(tmp_path: Path) -> None:
    """Artifacts are named by it. Nothing but contents and names, below the file's or directory's own, counts."""
    put(tmp_path / "d" / "train.jsonl", lines(PLAIN))
    put(tmp_path / "d" / "sub" / "a-b.json", json.dumps(PLAIN).encode())
    digests = {name: file_digest(tmp_path / "d" / name) for name in ("sub/a-b.json", "train.jsonl")}
    expected = fingerprint(**{f"d/{name}": digest for name, digest in digests.items()})
    assert identify("dataset", str(tmp_path / "d"), "main").version == expected
    file = identify("dataset", str(tmp_path / "d" / "train.jsonl"), "main")
    assert file.version == fingerprint(**{"train.jsonl": digests["train.jsonl"]})


def test_an_input_survives_json() -> None:
    source = Input(name="s3://b/d", path=None, version="0", uri="s3://b/d", table_version=3)
    assert Input.model_validate_json(source.model_dump_json()) == source
    assert Input.model_validate({"name": "n", "path": "/p", "version": "0"}).uri is None, "as stored by earlier runs"
    assert source.identity == {"version": "0", "refresh": None}


@pytest.fixture
def memory() -> Iterator[Callable[[str, bytes], None]]:
    """Puts a file at `memory://NAME`."""
    from fsspec.implementations.memory import MemoryFileSystem

    yield MemoryFileSystem().pipe_file
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


def test_files_behind_a_uri(tmp_path: Path, memory: Callable[[str, bytes], None]) -> None:
    for path in (
        put(tmp_path / "d.jsonl.zst", lines(PLAIN)),
        put(tmp_path / "d.csv", as_csv(PLAIN, tmp_path)),
        put(tmp_path / "d.json", json.dumps(PLAIN).encode()),
        put_parquet(tmp_path / "d.parquet", PLAIN),
        put_arrow(tmp_path / "d.arrow", PLAIN, stream=False),
    ):
        memory(path.name, path.read_bytes())
        assert values(f"memory://{path.name}") == PLAIN
    memory("_d.jsonl", b"{cut\n")
    assert [item.where for item in read("memory:///_d.jsonl")["train"]] == ["memory:///_d.jsonl line 1"]
    memory("d.jsonl.gz", gzip.compress(lines(PLAIN))[:-10])
    assert refusal("memory://d.jsonl.gz").message.startswith("memory:///d.jsonl.gz: cannot be read")


def test_the_version_behind_a_uri_follows_names_sizes_and_stamps(memory: Callable[[str, bytes], None]) -> None:
    memory("d/train.jsonl", lines(PLAIN))
    source = identify("dataset", "memory://d", "main", refresh="r")
    assert (source.path, source.uri, source.refresh) == (None, "memory://d", "r")
    assert is_unchanged(source)
    memory("d/_SUCCESS", b"")
    assert is_unchanged(source), "no data file"
    memory("d/train.jsonl", lines(PLAIN))
    assert not is_unchanged(source), "written anew"
    other = identify("dataset", "memory://d", "main")
    memory("d/test.jsonl", lines(PLAIN))
    assert not is_unchanged(other)


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("ftp://host/d.jsonl", "configuration", "a URI begins with one of memory://, s3://, gs://,"),
        ("memory://none", "configuration", "dataset.name='memory://none': there is no such file or directory."),
        ("memory://none/*.jsonl", "configuration", "no file of a kind that can be read"),
        ("memory://d.txt", "configuration", "no file of a kind that can be read"),
        ("gs://bucket/d.jsonl", "configuration", "gs:// needs the package gcsfs (.*). Install it: pip install gcsfs"),
        ("az://c/d.jsonl", "configuration", "az:// needs the package adlfs (.*). Install it: pip install adlfs"),
        (
            "http://u:p@127.0.0.1:9/d.jsonl",
            "transient",
            r"='http://\*\*\*@127.0.0.1:9/d.jsonl': its store was asked but",
        ),
    ],
)
def test_uris_that_name_nothing(
    name: str, kind: str, message: str, memory: Callable[[str, bytes], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    memory("d.txt", b"text")
    for package in ("gcsfs", "adlfs"):
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(Failure, match=message) as refused:
        identify("dataset", name, "main")
    assert refused.value.kind == kind
    assert "u:p" not in refused.value.message


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The file system of a server that has an empty `bucket`."""
    s3fs = pytest.importorskip("s3fs", reason="s3fs is not installed")
    server = pytest.importorskip("moto.server", reason="moto[s3] is not installed").ThreadedMotoServer("127.0.0.1", 0)
    server.start()
    host, port = server.get_host_and_port()
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ALLOW_HTTP": "true",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_MAX_ATTEMPTS": "1",
    }.items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    filesystem = s3fs.S3FileSystem()
    httpx.post(f"http://{host}:{port}/moto-api/reset", timeout=10).raise_for_status()  # what a test before has left
    filesystem.mkdir("bucket")
    yield filesystem
    server.stop()
    s3fs.S3FileSystem.clear_instance_cache()


def test_s3(bucket: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket.pipe({"bucket/d/train.jsonl": lines(PLAIN), "bucket/d/test-0.jsonl.gz": gzip.compress(lines(PLAIN[:1]))})
    for name in ("s3://bucket/d", "s3://bucket/d/*", "s3://bucket"):
        found = read(name)
        assert [row.values for row in found["train"]] == PLAIN
        assert [row.where for row in found["test"]] == ["s3://bucket/d/test-0.jsonl.gz line 1"]
    source = identify("dataset", "s3://bucket/d", "main")
    bucket.pipe_file("bucket/d/train.jsonl", lines(PLAIN))
    assert is_unchanged(source), "the same content"
    bucket.pipe_file("bucket/d/train.jsonl", lines(PLAIN[::-1]))
    assert not is_unchanged(source)
    assert refusal("s3://nowhere/d").message == "dataset.name='s3://nowhere/d': there is no such file or directory."
    rows = read_splits(DatasetSection(), source)["train"]
    bucket.rm("bucket/d", recursive=True)
    with pytest.raises(Failure, match="there is no such file") as gone:
        list(rows)
    assert gone.value.kind == "configuration"
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    bucket.clear_instance_cache()
    denied = refusal("s3://bucket/d")
    assert (denied.kind, denied.message[:48]) == ("authentication", "dataset.name='s3://bucket/d': access is refused ")


def table(path: Path, *writes: list[dict[str, Any]]) -> Path:
    import pyarrow
    from deltalake import write_deltalake

    for rows in writes:
        write_deltalake(path, pyarrow.Table.from_pylist(rows), mode="append")
    return path


def test_a_delta_table_is_read_at_its_version(tmp_path: Path) -> None:
    deltalake = pytest.importorskip("deltalake", reason="deltalake is not installed")
    path = table(tmp_path / "t", PLAIN[:3], PLAIN[3:])
    source = identify("dataset", str(path), "main")
    assert (source.path, source.uri, source.table_version) == (None, str(path), 1)
    deltalake.DeltaTable(path).delete("answer like '%1%'")
    assert is_unchanged(source)
    rows = list(read_splits(DatasetSection(name=str(path)), source)["train"])
    assert sorted(row.values["answer"] for row in rows) == [row["answer"] for row in PLAIN]
    assert [row.where for row in rows] == [f"{path} row {number}" for number in range(5)]
    assert sorted(row["answer"] for row in values(path)) == [row["answer"] for row in PLAIN[1:]]
    other = table(shutil.copytree(path, tmp_path / "copy"), PLAIN)
    versions = {identify("dataset", str(each), "main").version for each in (path, table(path, PLAIN[:1]), other)}
    assert len(versions | {source.version}) == 4 - 1, "path and copy have the same number, and other rows"


def test_delta_tables_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memory: Any) -> None:
    pytest.importorskip("deltalake", reason="deltalake is not installed")
    path = table(tmp_path / "t", PLAIN)
    nested = refusal(tmp_path)
    assert nested.message.endswith("below it is a Delta table, t. Give the path of the table itself.")

    source = identify("dataset", str(path), "main")
    for file in path.glob("*.parquet"):
        file.rename(tmp_path / file.name)
    with pytest.raises(Failure, match=r"a file of version 0 is gone \(.*\). Start a new run.") as gone:
        list(read_splits(DatasetSection(name=str(path)), source)["train"])
    assert "\n" not in gone.value.message

    [log] = (path / "_delta_log").glob("*.json")
    features = {"minReaderVersion": 3, "minWriterVersion": 7}
    features |= {"readerFeatures": ["deletionVectors"], "writerFeatures": ["deletionVectors"]}
    actions = [json.loads(line) for line in log.read_text().splitlines()]
    log.write_bytes(lines([{"protocol": features} if "protocol" in action else action for action in actions]))
    refused = refusal(path)
    assert refused.kind == "configuration"
    assert "'deletionVectors'" in refused.message

    log.write_text("{cut")
    assert "the log of this Delta table cannot be read (" in refusal(path).message
    memory("t/_delta_log/00000000000000000000.json", b"")
    assert "a Delta table is read from a path or from s3://" in refusal("memory://t").message
    monkeypatch.setitem(sys.modules, "deltalake", None)
    assert refusal(path).message.endswith("Install it: pip install deltalake")


def test_a_delta_table_on_s3(tmp_path: Path, bucket: Any) -> None:
    pytest.importorskip("deltalake", reason="deltalake is not installed")
    bucket.put(str(table(tmp_path / "t", PLAIN)), "bucket/t", recursive=True)
    assert read("s3://bucket/t")["train"] == [Row(f"s3://bucket/t row {n}", row) for n, row in enumerate(PLAIN)]


HUB_PROGRAM = """
import json, sys

def only_this_machine(event, arguments):
    if event == "socket.connect" and arguments[1][0] != "127.0.0.1":
        raise RuntimeError(f"a test wants to reach {arguments[1]}")

sys.addaudithook(only_this_machine)
from config.sections import DatasetSection
from finetuning.errors import Failure
from finetuning.inputs import identify
from finetuning.model import download
from finetuning.shapes import SHAPES, normalise
from finetuning.sources import read_splits

def said(kind, name, revision="main", **options):
    try:
        source = identify(kind, name, revision)
        if kind == "model":
            return source.version, sorted(file.name for file in download(source).iterdir())
        splits = read_splits(DatasetSection(name=name, **options), source)
        return source.version, {split: list(rows) for split, rows in splits.items()}
    except Failure as failure:
        return failure.kind, failure.message

print(json.dumps([said(*arguments, **options) for *arguments, options in json.loads(sys.argv[1])]))
"""
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(scope="module")
def hub_says(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """What comes of `(kind, name, revision, options)`, all asked by one process, which is new: the libraries read
    HF_ENDPOINT when they are imported."""
    card = (
        b"---\nconfigs:\n- config_name: a\n  data_files: train.jsonl\n- config_name: b\n  data_files: test.jsonl\n---\n"
    )
    files = {"train.jsonl": lines(PLAIN), "test.jsonl": lines(PLAIN[:2])}
    asked = {
        "plain": ("dataset", "org/plain", "main", {}),
        "commit": ("dataset", "org/plain", COMMIT, {}),
        "gated": ("dataset", "org/gated", "main", {}),
        "missing": ("dataset", "org/missing", "main", {}),
        "revision": ("dataset", "org/plain", "v9", {}),
        "no_config": ("dataset", "org/configs", "main", {}),
        "config": ("dataset", "org/configs", "main", {"config_name": "b"}),
        "broken": ("dataset", "org/broken", "main", {}),
        "model": ("model", "org/tiny", "main", {}),
        "gated_model": ("model", "org/gated", "main", {}),
        "missing_model": ("model", "org/missing", "main", {}),
    }
    repositories = {
        ("dataset", "org/plain"): Repository(COMMIT, {**files, "README.md": b"# Rows"}),
        ("dataset", "org/configs"): Repository(COMMIT, {**files, "README.md": card}),
        ("dataset", "org/gated"): Repository(COMMIT, files, is_gated=True),
        ("dataset", "org/broken"): Repository(COMMIT, {"train.jsonl": lines(PLAIN) + b"{cut\n"}),
        ("model", "org/tiny"): Repository(COMMIT, {"config.json": b"{}", "model.safetensors": b"0", "old.bin": b"1"}),
        ("model", "org/gated"): Repository(COMMIT, {"config.json": b"{}"}, is_gated=True),
    }
    with serve(repositories) as hub:
        home = {"HF_HOME": str(tmp_path_factory.mktemp("hub")), "HF_TOKEN": ""}
        environment = {**os.environ, **home, "HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0"}
        command = [sys.executable, "-c", HUB_PROGRAM, json.dumps(list(asked.values()))]
        done = subprocess.run(command, cwd=PROJECT, env=environment, text=True, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return dict(zip(asked, json.loads(done.stdout.splitlines()[-1]), strict=True)).__getitem__


def test_a_branch_of_the_hub_is_its_commit_and_has_its_splits(hub_says: Callable[[str], Any]) -> None:
    commit, splits = hub_says("plain")
    assert commit == COMMIT
    assert splits == {
        "train": [[f"org/plain train row {number}", row] for number, row in enumerate(PLAIN)],
        "test": [[f"org/plain test row {number}", row] for number, row in enumerate(PLAIN[:2])],
    }
    assert hub_says("commit") == [commit, splits]


def test_configurations_of_the_hub_are_listed(hub_says: Callable[[str], Any]) -> None:
    kind, message = hub_says("no_config")
    assert kind == "configuration"
    assert message.startswith("dataset.config_name=None: Config name is missing")
    assert "['a', 'b']" in message
    assert len(hub_says("config")[1]["train"]) == 2


def test_a_model_of_the_hub_is_downloaded_without_what_is_not_used(hub_says: Callable[[str], Any]) -> None:
    assert hub_says("model") == [COMMIT, ["config.json", "model.safetensors"]]


@pytest.mark.parametrize(
    ("asked", "kind", "message"),
    [
        ("gated", "authentication", "dataset.name='org/gated': the hub was asked; access is restricted."),
        ("gated_model", "authentication", "model.name='org/gated': the hub was asked; access is restricted."),
        ("missing", "configuration", "dataset.name='org/missing': the hub was asked and has none of this name"),
        ("missing_model", "configuration", "model.name='org/missing': the hub was asked and has none of this name"),
        ("revision", "configuration", "dataset.revision='v9': the hub's org/plain has no such revision."),
        ("broken", "data", "dataset.name='org/broken': datasets cannot read the files that the hub has of it ("),
    ],
)
def test_what_the_hub_refuses(asked: str, kind: str, message: str, hub_says: Callable[[str], Any]) -> None:
    told = hub_says(asked)
    assert told[0] == kind
    assert told[1].startswith(message)
