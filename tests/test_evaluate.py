"""Losses and answers of several models on the same rows, each measured once."""

from pathlib import Path
from typing import Any

import pytest

from config.sections import EvaluationSection, TrainingSection
from finetuning import champion, evaluate
from finetuning.artifacts import read_json
from finetuning.halves import read_gate_rows
from finetuning.model import load_chat_model
from tests.conftest import PROJECT
from tests.test_data import conversation, write_jsonl

SAMPLE = PROJECT / "samples" / "model"
NAME = "main.default.lamp"


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "test.jsonl", [conversation(10**number) for number in range(40)])


@pytest.fixture(autouse=True)
def no_champion(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(champion, "find", lambda name: None)


def job(tmp_path: Path, rows: Path, **section: Any) -> dict[str, Any]:
    model = {"weights": SAMPLE, "prepared": SAMPLE}
    return {
        "models": {name: {"fingerprint": name, **model} for name in ("base", "candidate")},
        "registered_model_name": NAME, "evaluations": tmp_path / "evaluations", "rows": rows, "rows_fingerprint": "r",
        "training": TrainingSection(max_length=256), "trust_remote_code": False,
        "section": EvaluationSection(**{"loss_rows": 8, "sample_rows": 2, "max_new_tokens": 8, **section}),
    }  # fmt: skip


def test_a_rows_loss_is_the_likelihood_of_its_answers(rows: Path) -> None:
    import torch

    model, tokenizer = load_chat_model(SAMPLE, SAMPLE, dtype="float32", trust_remote_code=False)
    model.eval()
    chosen = read_gate_rows(rows)[:4]
    losses = evaluate.row_losses(model, tokenizer, chosen, TrainingSection(max_length=256))
    for row, (loss, count) in zip(chosen, losses, strict=True):
        prompt = tokenizer.apply_chat_template(row["messages"][:-1], add_generation_prompt=True, tokenize=False)
        whole = prompt + row["messages"][-1]["content"] + "<|im_end|>\n"
        tokens = torch.tensor([tokenizer(whole, add_special_tokens=False)["input_ids"]])
        start = len(tokenizer(prompt, add_special_tokens=False)["input_ids"])
        with torch.no_grad():
            likelihood = model(tokens).logits[0, :-1].log_softmax(-1)
        expected = -likelihood[range(start - 1, tokens.shape[1] - 1), tokens[0, start:]].sum()
        assert count == tokens.shape[1] - start
        assert loss == pytest.approx(float(expected), rel=1e-4)
    assert evaluate.row_losses(model, tokenizer, chosen[2:3], TrainingSection(max_length=256)) == losses[2:3]


def test_a_row_whose_answer_is_cut_has_no_loss(rows: Path) -> None:
    model, tokenizer = load_chat_model(SAMPLE, SAMPLE, dtype="float32", trust_remote_code=False)
    assert evaluate.row_losses(model, tokenizer, read_gate_rows(rows)[:1], TrainingSection(max_length=8)) == [None]


def test_each_model_is_measured_once(tmp_path: Path, rows: Path) -> None:
    first = evaluate.run(job(tmp_path, rows))
    scores = first["scores"]
    assert scores["base"] == scores["candidate"]
    assert (scores["base"]["num_rows"], scores["base"]["num_questions"], scores["base"]["exact_match"]) == (8, 2, None)
    assert scores["base"]["loss"] > 1
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "evaluations").rglob("*.json")}
    assert evaluate.run(job(tmp_path, rows)) == first
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "evaluations").rglob("*.json")} == times
    assert evaluate.run(job(tmp_path, rows, loss_rows=4))["artifacts"] != first["artifacts"]


def test_a_champion_measured_before_is_not_fetched(tmp_path: Path, rows: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = evaluate.run(job(tmp_path, rows))
    monkeypatch.setattr(champion, "find", lambda name: champion.Champion(name, "3", "candidate"))
    found = evaluate.run(job(tmp_path, rows))
    assert (found["champion"], found["problem"]) == ("3", None)
    assert found["artifacts"]["champion"] == first["artifacts"]["candidate"]


def test_answers_are_compared_and_their_end_is_seen(tmp_path: Path, rows: Path) -> None:
    found = evaluate.run(job(tmp_path, rows, exact_match_rows=3, max_new_tokens=1))
    assert found["scores"]["base"]["exact_match"] == 0
    assert found["scores"]["base"]["stopped"] == 0
    answers = read_json(Path(found["artifacts"]["base"]) / evaluate.ANSWERS)
    assert len(answers) == 3
    assert answers[0]["reference"] == read_gate_rows(rows)[0]["messages"][-1]["content"]


def test_nothing_asked_is_nothing_loaded(tmp_path: Path, rows: Path) -> None:
    nothing = job(tmp_path, rows, loss_rows=0, sample_rows=0)
    assert evaluate.run(nothing) == {"scores": {}, "artifacts": {}, "champion": None, "problem": None}
    assert not (tmp_path / "evaluations").exists()
