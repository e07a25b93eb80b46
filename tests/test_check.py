"""`python -m finetuning.data check`: the ugly datasets, the exit codes, and what is printed."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import PROJECT
from tests.test_data import ROWS, conversation, write_jsonl
from tests.test_shapes import UGLY

SAMPLE = PROJECT / "samples" / "model"


def check(*arguments: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "finetuning.data", "check", *map(str, arguments)]
    return subprocess.run(command, cwd=PROJECT, text=True, capture_output=True, timeout=120)


def found(*arguments: Any, code: int = 0) -> dict[str, Any]:
    result = check(*arguments, "--json")
    assert result.returncode == code, result.stdout + result.stderr
    return json.loads(result.stdout)


def test_a_good_dataset_with_a_tokenizer(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "d.jsonl", [*ROWS, *ROWS[:2], {"messages": []}])
    counts = found(path, "--tokenizer", SAMPLE, "--preview", 2)
    assert (counts["shape"], counts["rows"], counts["kept"]) == ("messages", 23, 20)
    assert counts["splits"] == {"train": 18, "test": 2}
    assert counts["dropped"] == {"duplicate": 2, "empty": 1}
    assert counts["first_bad"]["empty"].startswith(f"{path} line 23: ")
    assert counts["tokens"]["read"] == counts["tokens"]["kept"] > 18 * 10
    assert 0 < counts["trainable_share"] < 0.5
    assert (counts["truncated_rows"], counts["turns_that_differ"]) == (0, 0)
    text = check(path, "--tokenizer", SAMPLE, "--preview", 1)
    assert text.stdout.splitlines()[-1] == "It can be trained on: 18 conversations to train on, 2 to evaluate on."
    assert "\033[32m" in text.stdout, "what is trained is green"


def test_refused_and_wrong_usage(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "d.jsonl", [{"prompt": "alone"}] * 20)
    counts = found(path, code=1)
    assert (counts["rows"], counts["kept"], counts["dropped"]) == (20, 0, {"no_assistant": 20})
    assert counts["refused"] in check(path).stderr
    assert check(tmp_path / "nowhere.jsonl").stderr.startswith("dataset.name='")
    for arguments in ([], [path, "--bogus", 1], [path, "--training.max_length", "many"]):
        assert check(*arguments).returncode == 2, arguments


def test_what_is_too_long_for_the_length_is_refused_with_one_that_would_do(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "d.jsonl", [conversation(10**60 + number) for number in range(40)])
    result = check(path, "--tokenizer", SAMPLE, "--training.max_length", 16)
    assert result.returncode == 1
    assert "training.max_length=16: 36 of 36 conversations of the train split have no answer" in result.stderr
    assert "would do for 99 % of the conversations" in result.stderr


@pytest.mark.parametrize(
    ("name", "options", "shape", "kept", "dropped"),
    [
        ("00_control.jsonl", [], "messages", 8, {}),
        ("01_sharegpt_from_value.jsonl", [], "sharegpt", 8, {}),
        ("07_no_assistant.jsonl", [], "messages", 8, {"no_assistant": 1}),
        ("10_null_content.jsonl", [], "messages", 8, {"null_content": 1}),
        ("12_tool_calls_dict_args.jsonl", [], "messages", 8, {}),
        ("15_prompt_completion.jsonl", [], "prompt_completion", 8, {}),
        ("17_text_column.jsonl", ["--dataset.shape", "text"], "text", 8, {}),
        ("18_alpaca.json", [], "alpaca", 8, {}),
        ("29_mixed_schema.jsonl", ["--no-dataset.deduplicate"], "messages+sharegpt", 8, {}),
        ("37_lone_surrogate.jsonl", [], "messages", 7, {"surrogate": 1}),
        ("39_empty_messages_first.jsonl", [], "messages", 8, {"empty": 1}),
        ("42_messages_as_string.csv", [], "messages", 8, {}),
    ],
)
def test_ugly_files_that_can_be_trained_on(
    name: str, options: list[str], shape: str, kept: int, dropped: dict[str, int]
) -> None:
    counts = found(UGLY / name, "--dataset.min_rows", 1, *options)
    assert (counts["shape"], counts["kept"], counts["dropped"]) == (shape, kept, dropped)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("08_starts_with_assistant.jsonl", "the assistant speaks before the user (dataset.on_assistant_first='drop')"),
        ("17_text_column.jsonl", "set dataset.shape=text"),
        ("27_non_string_content.jsonl", "which is no text"),
    ],
)
def test_ugly_files_that_are_refused(name: str, said: str) -> None:
    result = check(UGLY / name)
    assert result.returncode == 1
    assert said in result.stderr
    assert f"{name} line 1: " in result.stderr


def test_ugly_files_that_no_text_editor_keeps(tmp_path: Path) -> None:
    """Those whose bytes matter are made here: UTF-16, a cut line, nothing at all, one conversation of 2 MB."""
    lines = (UGLY / "00_control.jsonl").read_text().splitlines()
    contents = {
        "utf16.jsonl": "\n".join(lines).encode("utf-16"),
        "cut.jsonl": "\n".join([*lines[:4], lines[4][:40], *lines[5:]]).encode(),
        "empty.jsonl": b"",
    }
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    assert "utf16.jsonl: is UTF-16. Convert it to UTF-8: iconv" in check(tmp_path / "utf16.jsonl").stderr
    cut = check(tmp_path / "cut.jsonl").stderr
    assert "cut.jsonl line 5: not valid JSON" in cut
    assert "set dataset.on_unreadable to 'drop'" in cut
    dropped = found(tmp_path / "cut.jsonl", "--dataset.on_unreadable", "drop", "--dataset.min_rows", 1)["dropped"]
    assert dropped == {"invalid_json": 1}
    assert "there are no rows in it" in check(tmp_path / "empty.jsonl").stderr
    huge = {"messages": [{"role": "user", "content": "lamp " * 400_000}, {"role": "assistant", "content": "Yes."}]}
    write_jsonl(tmp_path / "huge.jsonl", [*ROWS, huge])
    counts = found(tmp_path / "huge.jsonl", "--tokenizer", SAMPLE, "--dataset.split_seed", 1)
    assert (counts["kept"], counts["truncated_rows"], counts["dropped"]) == (20, 1, {"answers_cut": 1})
    assert "huge.jsonl line 21: its first 2048 tokens hold no answer" in counts["first_bad"]["answers_cut"]


def test_splits_that_overlap_or_have_another_name(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "leak" / "train.jsonl", ROWS[:10])
    write_jsonl(tmp_path / "leak" / "test.jsonl", ROWS[8:12])
    counts = found(tmp_path / "leak")
    assert (counts["removed_from_train_because_in_test"], counts["splits"]) == (2, {"train": 8, "test": 4})
    shutil.move(tmp_path / "leak" / "test.jsonl", tmp_path / "leak" / "validation.jsonl")
    assert found(tmp_path / "leak")["splits"] == {"train": 8, "test": 4}
    three = check(write_jsonl(tmp_path / "three.jsonl", ROWS[:3]))
    assert three.returncode == 1
    assert "the test split has 1 of at least 2 rows (dataset.min_rows)" in three.stderr
