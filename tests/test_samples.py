"""The embedded example is honest: held out is held out, and the answer is in the question."""

import json
from collections import Counter, defaultdict
from pathlib import Path

from samples.make import conversations, make_tokenizer, write_rows
from tests.conftest import PROJECT

SAMPLES = PROJECT / "samples"


def rows(name: str) -> list[list[dict[str, str]]]:
    return [json.loads(line)["messages"] for line in (SAMPLES / "chat" / f"{name}.jsonl").open()]


def test_the_code_makes_the_files(tmp_path: Path) -> None:
    train, test, talk = conversations()
    for name, made in (("train", train), ("test", test)):
        write_rows(tmp_path / f"{name}.jsonl", made)
        assert (tmp_path / f"{name}.jsonl").read_bytes() == (SAMPLES / "chat" / f"{name}.jsonl").read_bytes()
    make_tokenizer(train + talk).save_pretrained(tmp_path)
    for name in ("tokenizer.json", "chat_template.jinja"):
        assert (tmp_path / name).read_bytes() == (SAMPLES / "model" / name).read_bytes()


def test_no_held_out_question_was_trained_on() -> None:
    trained = {conversation[0]["content"] for conversation in rows("train")}
    assert not trained & {conversation[0]["content"] for conversation in rows("test")}
    notes = {text[: text.index(".") + 1] for text in trained}
    held_out = {conversation[0]["content"] for conversation in rows("test")}
    assert not notes & {text[: text.index(".") + 1] for text in held_out}


def test_the_answer_needs_the_note() -> None:
    """Its word stands in the note, and no question kind has an answer that would often be right."""
    answers = defaultdict(Counter)
    for conversation in rows("train"):
        note = conversation[0]["content"].split(".")[0].replace(",", "").split()
        for question, answer in zip(conversation[::2], conversation[1::2], strict=True):
            word = answer["content"].rstrip(".").split()[-1]
            assert word in note
            kind = question["content"].split(". ")[-1].split()[0:2]
            answers[" ".join(kind)][answer["content"]] += 1
    total = sum(counter.total() for counter in answers.values())
    best_guess = sum(max(counter.values()) for counter in answers.values())
    assert len(answers) >= 5
    assert best_guess / total < 0.2


def test_nobody_asked_the_base_model_a_question() -> None:
    _, _, talk = conversations()
    assert not [row for row in talk for message in row["messages"] if "?" in message["content"]]
    trained = {message["content"] for row in rows("train") for message in row if message["role"] == "assistant"}
    said = {message["content"] for row in talk for message in row["messages"] if message["role"] == "assistant"}
    assert not trained & said


def test_it_is_small() -> None:
    files = [path for path in SAMPLES.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert sum(path.stat().st_size for path in files) < 2_000_000
    assert {oct(path.stat().st_mode & 0o777) for path in (SAMPLES / "model").iterdir()} == {"0o644"}
