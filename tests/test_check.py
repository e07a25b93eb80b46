"""`python -m finetuning.data check`: the ugly datasets, the exit codes, and what is printed."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from finetuning.check import main
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
    assert counts["first_bad"]["duplicate"] == f"{path} line 21: equal to {path} line 1"
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


GOOD = {  # shape, rows kept to train on and to evaluate on, what was mended, what was dropped
    "00_control.jsonl": ("messages", (6, 2), {}, {}),
    "01_sharegpt_from_value.jsonl": ("sharegpt", (6, 2), {"roles mapped": 16}, {}),
    "02_roles_human_gpt.jsonl": ("messages", (6, 2), {"roles mapped": 16}, {}),
    "04_system_in_middle.jsonl": ("messages", (6, 2), {"late system messages kept": 8}, {}),
    "05_consecutive_user.jsonl": ("messages", (6, 2), {"turns of the same role merged": 8}, {}),
    "07_no_assistant.jsonl": ("messages", (6, 2), {}, {"no_assistant": 1}),
    "10_null_content.jsonl": ("messages", (6, 2), {}, {"null_content": 1}),
    "11_tool_calls_null_content.jsonl": ("messages", (6, 2), {"tool arguments parsed": 8}, {}),
    "12_tool_calls_dict_args.jsonl": ("messages", (6, 2), {}, {}),
    "13_content_parts.jsonl": ("messages", (6, 2), {"contents joined from parts": 16}, {}),
    "15_prompt_completion.jsonl": ("prompt_completion", (6, 2), {}, {}),
    "18_alpaca.json": ("alpaca", (6, 2), {}, {}),
    "19_prompt_and_messages.jsonl": ("messages", (6, 2), {}, {}),
    "22_bom.jsonl": ("messages", (6, 2), {}, {}),
    "23_crlf_blank_lines.jsonl": ("messages", (6, 2), {}, {}),
    "29_mixed_schema.jsonl": ("messages+sharegpt", (6, 2), {"roles mapped": 8}, {}),
    "30_duplicates.jsonl": ("messages", (2, 1), {}, {"duplicate": 5}),
    "31_leakage": ("messages", (6, 3), {}, {}),
    "33_validation_no_test": ("messages", (6, 2), {}, {}),
    "36_unicode.jsonl": ("messages", (6, 2), {}, {}),
    "37_lone_surrogate.jsonl": ("messages", (5, 2), {}, {"surrogate": 1}),
    "39_empty_messages_first.jsonl": ("messages", (6, 2), {}, {"empty": 1}),
    "42_messages_as_string.csv": ("messages", (6, 2), {}, {}),
    "45_reasoning_content.jsonl": ("messages", (6, 2), {}, {}),
}
ALIKE = ("04_", "05_", "29_", "45_")
"""Files of one row eight times, or of four twice."""
REFUSED = {
    "08_starts_with_assistant.jsonl": "line 1: message 1: the assistant speaks before the user (dataset.on_assistant_",
    "17_text_column.jsonl": "line 1: found columns text; to train on `text` as it is, without a chat template, set ",
    "24_bad_line.jsonl": "line 5: not valid JSON (Unterminated string starting at at column 43). Correct or remove it",
    "27_non_string_content.jsonl": "line 1: message 0 has content 0 (int), which is no text",
    "34_utf16.jsonl": "34_utf16.jsonl: is UTF-16. Convert it to UTF-8: iconv -f UTF-16 -t UTF-8",
    "41_empty_file.jsonl": "41_empty_file.jsonl': there are no rows in it.",
    "46_three_rows.jsonl": "the test split has 1 of at least 2 rows (dataset.min_rows). Give more rows",
}


@pytest.mark.parametrize("name", GOOD)
def test_ugly_files_that_can_be_trained_on(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--no-dataset.deduplicate"] if name.startswith(ALIKE) else []
    options += ["--dataset.min_rows", "1"] if name.startswith("30_") else []
    main([str(UGLY / name), "--json", "--tokenizer", str(SAMPLE), *options])
    counts = json.loads(capsys.readouterr().out)
    shape, (train, test), mended, dropped = GOOD[name]
    assert (counts["shape"], counts["splits"]) == (shape, {"train": train, "test": test})
    assert (counts["mended"], counts["dropped"]) == (mended, dropped)
    assert counts["first_bad"].keys() == dropped.keys(), "each reason with the file and line of its first row"
    assert all(re.match(rf"{UGLY / name} line \d+: ", where) for where in counts["first_bad"].values())
    assert counts["tokens"]["read"] == counts["tokens"]["kept"] > 0
    assert counts["turns_that_differ"] == 0
    overlap = 2 if name.startswith(("31_", "33_")) else 0
    assert counts["removed_from_train_because_in_test"] == overlap


@pytest.mark.parametrize("name", REFUSED)
def test_ugly_files_that_are_refused(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([str(UGLY / name)])
    assert ended.value.code == 1
    assert REFUSED[name] in capsys.readouterr().err


def test_every_ugly_file_is_one_or_the_other() -> None:
    assert {path.name for path in UGLY.iterdir()} == GOOD.keys() | REFUSED.keys()


def test_ugly_files_whose_fault_a_setting_allows(tmp_path: Path) -> None:
    """And 26, one conversation of 2 MB, which is made here."""
    allowed = {
        "08_starts_with_assistant.jsonl": ["--dataset.on_assistant_first", "keep", "--no-dataset.deduplicate"],
        "17_text_column.jsonl": ["--dataset.shape", "text"],
        "24_bad_line.jsonl": ["--dataset.on_unreadable", "drop"],
    }
    kept = [found(UGLY / name, *options)["kept"] for name, options in allowed.items()]
    assert kept == [8, 8, 8]
    huge = {"messages": [{"role": "user", "content": "lamp " * 400_000}, {"role": "assistant", "content": "Yes."}]}
    write_jsonl(tmp_path / "huge.jsonl", [*ROWS, huge])
    counts = found(tmp_path / "huge.jsonl", "--tokenizer", SAMPLE, "--dataset.split_seed", 1)
    assert (counts["kept"], counts["truncated_rows"], counts["dropped"]) == (20, 1, {"answers_cut": 1})
    assert sum(counts["splits"].values()) == 20
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
