"""Dataset loading, checking and splitting."""

import csv
import json
import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from config.sections import DatasetSection
from finetuning.artifacts import produce, read_manifest
from finetuning.data import prepare, read_dataset
from finetuning.errors import Failure
from finetuning.inputs import identify
from tasks.data import dataset_fingerprint


def conversation(number: int) -> dict[str, Any]:
    return {
        "messages": [
            {"role": "user", "content": f"What is {number} + 1?"},
            {"role": "assistant", "content": str(number + 1)},
        ],
        "source": "made here",
        "prompt": "a column that would confuse the trainer",
    }


ROWS = [conversation(number) for number in range(20)]


def write_jsonl(path: Path, rows: list[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def load(path: Path, **options: Any) -> tuple[list[dict], list[dict]]:
    """Train and test without where their rows are from."""
    section = DatasetSection(name=str(path), **options)
    output = path.parent / f"artifact-{dataset_fingerprint(section, identify('dataset', str(path), 'main'))}"
    produce(output, lambda directory: prepare(section, identify("dataset", str(path), "main"), directory))
    splits = [[json.loads(line) for line in (output / f"{name}.jsonl").open()] for name in ("train", "test")]
    for row in (row for split in splits for row in split):
        assert row.pop("where")
    return tuple(splits)


def report(folder: Path) -> dict[str, Any]:
    [file] = folder.glob("artifact-*/report.json")
    return json.loads(file.read_text())


def refusal(path: Path, **options: Any) -> Failure:
    with pytest.raises(Failure) as refused:
        load(path, **options)
    assert "\n" not in refused.value.message
    return refused.value


def test_only_the_conversation_is_kept(tmp_path: Path) -> None:
    train, test = load(write_jsonl(tmp_path / "d.jsonl", ROWS))
    assert (len(train), len(test)) == (18, 2)
    assert {tuple(row) for row in train + test} == {("messages",)}
    assert sorted(row["messages"][1]["content"] for row in train + test) == sorted(str(n + 1) for n in range(20))


def test_the_split_is_the_one_of_datasets(tmp_path: Path) -> None:
    from datasets import Dataset

    train, test = load(write_jsonl(tmp_path / "d.jsonl", ROWS), test_size=0.25, split_seed=7)
    expected = Dataset.from_list(ROWS).train_test_split(test_size=0.25, seed=7)
    assert [row["messages"] for row in test] == expected["test"]["messages"]
    assert [row["messages"] for row in train] == expected["train"]["messages"]


@pytest.mark.parametrize("name", ["test", "validation", "eval"])
def test_a_split_to_evaluate_on_is_used(tmp_path: Path, name: str) -> None:
    write_jsonl(tmp_path / "d" / "train-00000-of-00001.jsonl", ROWS[:15])
    write_jsonl(tmp_path / "d" / f"{name}.jsonl", ROWS[15:])
    train, test = load(tmp_path / "d")
    assert (len(train), len(test)) == (15, 5)


@pytest.mark.parametrize("test_size", [0, 1, 10])
def test_a_share_that_leaves_a_side_empty_is_no_value(test_size: float) -> None:
    with pytest.raises(ValidationError, match="test_size"):
        DatasetSection(test_size=test_size)


def test_one_row_cannot_be_split(tmp_path: Path) -> None:
    message = refusal(write_jsonl(tmp_path / "d.jsonl", ROWS[:1] * 3)).message
    assert "1 row cannot be split in two; 2 duplicates were removed (dataset.deduplicate). Give more." in message


def test_of_few_rows_two_are_set_aside(tmp_path: Path) -> None:
    """One to choose the checkpoint by, one for the gate; fewer than four are not worth it."""
    sizes = [
        tuple(map(len, load(write_jsonl(tmp_path / f"{count}.jsonl", ROWS[:count]), min_rows=1)))
        for count in (3, 4, 8, 10, 11)
    ]
    assert sizes == [(2, 1), (2, 2), (6, 2), (8, 2), (9, 2)]


def test_named_splits(tmp_path: Path) -> None:
    for name, rows in (("train", ROWS[:10]), ("test", ROWS[10:15]), ("extra", ROWS[15:])):
        write_jsonl(tmp_path / "d" / f"{name}.jsonl", rows)
    train, test = load(tmp_path / "d", test_split="extra")
    assert (len(train), test[0]["messages"]) == (10, ROWS[15]["messages"])
    message = refusal(tmp_path / "d", test_split="dev").message
    assert re.fullmatch(
        r"dataset.test_split='dev': the dataset has (extra|test|train)(, (extra|test|train)){2}.", message
    )
    assert refusal(tmp_path / "d", train_split="training").message.startswith("dataset.train_split='training': the")


def test_a_row_knows_where_it_is_from(tmp_path: Path) -> None:
    load(write_jsonl(tmp_path / "d.jsonl", ROWS))
    [artifact] = tmp_path.glob("artifact-*")
    wheres = [json.loads(line)["where"] for name in ("train", "test") for line in (artifact / f"{name}.jsonl").open()]
    assert sorted(wheres) == sorted(f"d.jsonl line {number}" for number in range(1, 21))


def test_of_equal_rows_one_is_kept(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "d.jsonl", [*ROWS, *ROWS[:5], {**ROWS[0], "source": "another column"}])
    train, test = load(path)
    assert len(train) + len(test) == 20
    [split] = report(tmp_path)["splits"].values()
    assert split["dropped"] == {"duplicate": 6}
    assert split["first_bad"] == {"duplicate": f"{path} line 21: equal to {path} line 1"}
    assert sum(map(len, load(path, deduplicate=False))) == 26


def test_what_is_in_test_is_taken_out_of_train(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "d" / "train.jsonl", ROWS[:15])
    write_jsonl(tmp_path / "d" / "test.jsonl", ROWS[10:])
    train, test = load(tmp_path / "d")
    assert [row["messages"] for row in train] == [row["messages"] for row in ROWS[:10]]
    assert len(test) == 10, "the test split stays comparable"
    assert report(tmp_path)["removed_from_train_because_in_test"] == 5


def test_a_group_stays_on_one_side(tmp_path: Path) -> None:
    rows = [{**row, "customer": number // 4} for number, row in enumerate(ROWS)]
    train, test = load(write_jsonl(tmp_path / "d.jsonl", rows), group_by="customer", test_size=0.4)
    sides = [{int(row["messages"][0]["content"].split()[2]) // 4 for row in side} for side in (train, test)]
    assert not sides[0] & sides[1]
    assert [len(side) for side in sides] == [3, 2]
    message = refusal(write_jsonl(tmp_path / "e.jsonl", rows), group_by="client").message
    assert "there is no column 'client' (dataset.group_by)" in message


def test_bad_rows_are_dropped_counted_and_bounded(tmp_path: Path) -> None:
    bad = {"messages": [{"role": "user", "content": "alone"}]}
    path = write_jsonl(tmp_path / "d.jsonl", [*ROWS, *[bad] * 5])
    assert sum(map(len, load(path))) == 20, "five are always tolerated"
    [split] = report(tmp_path)["splits"].values()
    assert (split["rows"], split["kept"], split["dropped"]) == (25, 20, {"no_assistant": 5})
    assert split["first_bad"]["no_assistant"].startswith(f"{path} line 21: ")
    message = refusal(path, on_bad_rows="fail").message
    assert f"5 of 25 rows of the train split cannot be trained on; {path} line 21: " in message
    assert "set dataset.on_bad_rows to 'drop'" in message
    many = write_jsonl(tmp_path / "many.jsonl", [*ROWS, *[bad] * 6])
    assert "6 of 26 rows of the train split cannot be trained on, more than dataset.max_bad_fraction=0.02" in (
        refusal(many).message
    )
    assert sum(map(len, load(many, max_bad_fraction=0.3))) == 20


def test_unreadable_lines_fail_or_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_bytes(b"".join(json.dumps(row).encode() + b"\n" for row in ROWS) + b'{"messages": [\n"text"\n\xff\n')
    message = refusal(path).message
    assert message.startswith(f"{path} line 21: ")
    assert message.endswith("Correct or remove it, or set dataset.on_unreadable to 'drop'.")
    assert sum(map(len, load(path, on_unreadable="drop"))) == 20
    assert report(tmp_path)["splits"]["train"]["dropped"] == {"invalid_json": 1, "not_an_object": 1, "not_utf8": 1}


def test_the_shape_is_said_aloud(tmp_path: Path) -> None:
    shares = {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]}
    load(write_jsonl(tmp_path / "d.jsonl", [*ROWS, shares]))
    assert report(tmp_path)["splits"]["train"]["shapes"] == {"messages": 20, "sharegpt": 1}


def test_containers_hold_the_same_rows(tmp_path: Path) -> None:
    from datasets import Dataset

    plain = [{"messages": row["messages"]} for row in ROWS]
    expected = load(write_jsonl(tmp_path / "d.jsonl", plain))
    (tmp_path / "d.json").write_text("\ufeff" + json.dumps(plain), encoding="utf-8")
    (tmp_path / "crlf.jsonl").write_bytes(b"\r\n".join(json.dumps(row).encode() for row in plain) + b"\r\n\r\n")
    Dataset.from_list(plain).to_parquet(tmp_path / "d.parquet")
    with (tmp_path / "d.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["messages"])
        writer.writerows([json.dumps(row["messages"])] for row in plain)
    for name in ("d.json", "crlf.jsonl", "d.parquet", "d.csv"):
        assert load(tmp_path / name) == expected, name


def test_tool_calls_keep_their_keys(tmp_path: Path) -> None:
    """Arrow would give every row the argument keys of all others, with null values."""

    def row(arguments: dict) -> dict:
        call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
        messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
        return {"messages": messages, "tools": [{"type": "function", "function": {"name": "f"}}]}

    rows = [row({"city": "Oslo"}), row({"number": 3}), row({"nested": {"a": [1]}})] * 4
    path = write_jsonl(tmp_path / "d.jsonl", rows)
    load(path, deduplicate=False)
    [artifact] = tmp_path.glob("artifact-*")
    calls = [
        row["messages"][1]["tool_calls"][0]["function"]["arguments"] for row in read_dataset(artifact / "train.jsonl")
    ]
    assert {json.dumps(call) for call in calls} == {'{"city": "Oslo"}', '{"number": 3}', '{"nested": {"a": [1]}}'}


def test_refusals_name_the_setting_or_the_row(tmp_path: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    assert refusal(empty).message == f"dataset.name='{empty}': there are no rows in it."

    text = write_jsonl(tmp_path / "text.jsonl", [{"text": "a"}] * 20)
    assert "20 of 20 rows of the train split cannot be trained on" in refusal(text).message
    assert "found columns text; to train on `text` as it is, without a chat template, set dataset.shape=text" in (
        refusal(text).message
    )

    three = refusal(write_jsonl(tmp_path / "three.jsonl", ROWS[:3]))
    assert "the test split has 1 of at least 2 rows (dataset.min_rows)" in three.message
    assert "dataset.test_size (now 0.1)" in three.message

    cut = tmp_path / "cut.jsonl"
    cut.write_text(json.dumps(ROWS[0]) + "\n" + json.dumps(ROWS[1])[:40] + "\n")
    assert refusal(cut).message.startswith(f"{cut} line 2: ")

    wide = tmp_path / "wide.jsonl"
    wide.write_text(json.dumps(ROWS[0]), encoding="utf-16")
    assert refusal(wide).message.startswith(f"{wide}: ")
    assert "UTF-16" in refusal(wide).message
    assert {refusal(path).kind for path in (empty, text, cut, wide)} == {"data"}


def test_a_path_that_is_not_there_names_the_setting(tmp_path: Path) -> None:
    with pytest.raises(Failure, match=r"dataset.name='.*nowhere.jsonl': there is no such file or directory"):
        identify("dataset", str(tmp_path / "nowhere.jsonl"), "main")
    (tmp_path / "folder").mkdir()
    with pytest.raises(Failure, match="no file of a kind that can be read"):
        identify("dataset", str(tmp_path / "folder"), "main")


def test_offline_the_hub_is_not_asked_and_the_message_says_so() -> None:
    with pytest.raises(Failure) as refused:
        identify("dataset", "trl-lib/Capybara", "main")
    message = refused.value.message
    assert message.startswith("dataset.name='trl-lib/Capybara': the hub was not asked (HF_HUB_OFFLINE=1)")
    assert message.endswith("To use files of your own give their path as dataset.name.")


def test_a_hub_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # the discard port: nobody listens
    with pytest.raises(Failure) as refused:
        identify("model", "Qwen/Qwen3-4B", "main")
    assert refused.value.message.startswith("model.name='Qwen/Qwen3-4B': the hub was asked but could not be reached (")
    assert refused.value.kind == "transient"


def test_the_fingerprint_follows_content_and_options(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "d.jsonl", ROWS)

    def current(**options: Any) -> str:
        return dataset_fingerprint(DatasetSection(name=str(path), **options), identify("dataset", str(path), "main"))

    first = current()
    path.touch()
    assert current() == first
    assert current(min_rows=5) == first, "a bound changes no byte"
    assert len({first, current(split_seed=1), current(test_size=0.2)}) == 3
    write_jsonl(path, [*ROWS[:-1], conversation(99)])
    assert current() != first


def test_golden_output(tmp_path: Path) -> None:
    """When this fails, the same input gives other rows than before: raise DATA_VERSION and put the new digest here."""
    load(write_jsonl(tmp_path / "d.jsonl", ROWS))
    [artifact] = tmp_path.glob("artifact-*")
    manifest = read_manifest(artifact)
    assert manifest
    assert {name: file["sha256"][:16] for name, file in manifest["files"].items()} == {
        "report.json": "3a437b9345be88fe",
        "test.jsonl": "3f566d281ec1d04e",
        "train.jsonl": "b605a18eab92c0da",
    }
