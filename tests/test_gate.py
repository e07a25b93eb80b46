"""What the gate decides, and on which rows."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from config.recipes import RefusedConfiguration, resolve
from config.sections import GateSection
from finetuning.artifacts import write_json
from finetuning.evaluate import ANSWERS, LOSSES, Evaluation, summarize
from finetuning.gate import improvement, judge
from finetuning.halves import gate_rows, read_gate_rows
from tests.test_data import ROWS, conversation, write_jsonl


def evaluation(folder: Path, losses: list[Any], matches: list[bool] = (), stopped: bool = True) -> tuple[Path, dict]:
    """An artifact as `finetuning.evaluate` makes it, and its scores."""
    folder.mkdir(parents=True)
    answers = [{"exact_match": match, "stopped": stopped} for match in matches]
    write_json(folder / LOSSES, losses)
    write_json(folder / ANSWERS, answers)
    return folder, summarize(losses, answers, len(answers))


def found(tmp_path: Path, number: str | None = None, problem: str | None = None, **models: Any) -> Evaluation:
    return Evaluation(
        scores={name: scores for name, (_, scores) in models.items()},
        artifacts={name: path for name, (path, _) in models.items()},
        champion=number,
        problem=problem,
    )


def spread(mean: float, count: int = 50) -> list[tuple[float, int]]:
    """Losses of rows of ten tokens, a little apart."""
    return [(10 * (mean + math.sin(number) / 20), 10) for number in range(count)]


def test_halves_stay_when_rows_are_added(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "test.jsonl", [conversation(number) for number in range(200)])
    mask = gate_rows(path)
    assert 60 < sum(mask) < 140
    longer = [conversation(number) for number in range(1000, 1010)] + [conversation(number) for number in range(200)]
    assert gate_rows(write_jsonl(tmp_path / "longer.jsonl", longer))[10:] == mask
    rows = read_gate_rows(path)
    assert len(rows) == sum(mask)
    assert all("messages" in row for row in rows)


def test_a_gate_that_asks_for_nothing_takes_no_rows(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "test.jsonl", ROWS)
    assert not any(gate_rows(path, takes_half=False))
    assert len(read_gate_rows(path, takes_half=False)) == len(ROWS)
    assert not GateSection(better_than="none").takes_half


@pytest.mark.parametrize(("count", "gate"), [(1, 0), (2, 1), (3, 1), (4, 2)])
def test_few_rows_are_cut_in_the_middle(tmp_path: Path, count: int, gate: int) -> None:
    path = tmp_path / "test.jsonl"
    for start in range(10):
        mask = gate_rows(write_jsonl(path, [conversation(1000 * start + number) for number in range(count)]))
        assert sum(mask) >= gate or sum(mask) * 4 >= count
        assert sum(mask) < count


def test_where_a_row_stands_does_not_matter(tmp_path: Path) -> None:
    rows = [{**row, "where": f"here line {number}"} for number, row in enumerate(ROWS)]
    elsewhere = [{**row, "where": f"there line {number}"} for number, row in enumerate(ROWS)]
    masks = [
        gate_rows(write_jsonl(tmp_path / f"{name}.jsonl", split)) for name, split in (("a", rows), ("b", elsewhere))
    ]
    assert masks[0] == masks[1]


def test_better_beyond_chance_passes(tmp_path: Path) -> None:
    base, candidate = evaluation(tmp_path / "base", spread(3.0)), evaluation(tmp_path / "new", spread(2.5))
    verdict = judge(GateSection(), found(tmp_path, base=base, candidate=candidate))
    assert verdict.outcome == "passed"
    assert verdict.reason.startswith(
        "loss 2.5 against 3 of the base model on 50 rows, better by 0.5 (95 %: 0.5 to 0.5)"
    )
    assert verdict.metrics["improvement"] == pytest.approx(0.5)


def test_an_improvement_that_chance_explains_fails(tmp_path: Path) -> None:
    noise = [(loss + 3 * math.cos(7 * number), tokens) for number, (loss, tokens) in enumerate(spread(3.0))]
    base, candidate = evaluation(tmp_path / "base", spread(3.0)), evaluation(tmp_path / "new", noise)
    verdict = judge(GateSection(), found(tmp_path, base=base, candidate=candidate))
    assert verdict.outcome == "failed"
    assert "not beyond gate.min_improvement=0 for certain" in verdict.reason
    assert verdict.metrics["improvement_low"] < 0 < verdict.metrics["improvement_high"]


def test_the_champion_is_the_reference_once_there_is_one(tmp_path: Path) -> None:
    models = {
        "base": evaluation(tmp_path / "base", spread(3.0)),
        "champion": evaluation(tmp_path / "champion", spread(2.0)),
        "candidate": evaluation(tmp_path / "new", spread(2.5)),
    }
    verdict = judge(GateSection(), found(tmp_path, number="4", **models))
    assert verdict.outcome == "failed"
    assert "loss 2.5 against 2 of champion version 4" in verdict.reason
    assert judge(GateSection(better_than="base"), found(tmp_path, number="4", **models)).outcome == "passed"
    assert judge(GateSection(better_than="none"), found(tmp_path, number="4", **models)).outcome == "passed"


def test_the_least_improvement_is_asked_for(tmp_path: Path) -> None:
    base, candidate = evaluation(tmp_path / "base", spread(3.0)), evaluation(tmp_path / "new", spread(2.5))
    verdict = judge(GateSection(min_improvement=0.6), found(tmp_path, base=base, candidate=candidate))
    assert (verdict.outcome, "gate.min_improvement=0.6" in verdict.reason) == ("failed", True)


def test_a_regression_beyond_what_is_allowed_fails(tmp_path: Path) -> None:
    matches = [True] * 10
    base = evaluation(tmp_path / "base", spread(3.0), matches)
    candidate = evaluation(tmp_path / "new", spread(2.0), matches, stopped=False)
    verdict = judge(GateSection(), found(tmp_path, base=base, candidate=candidate))
    assert verdict.outcome == "failed"
    assert "but stopped 0 against 1 is more than gate.max_regression.stopped=0.1 allows" in verdict.reason
    allowed = GateSection(max_regression={"exact_match": 0.1})
    assert judge(allowed, found(tmp_path, base=base, candidate=candidate)).outcome == "passed"


def test_matching_answers_can_be_the_metric(tmp_path: Path) -> None:
    base = evaluation(tmp_path / "base", spread(3.0), [number % 4 == 0 for number in range(40)])
    candidate = evaluation(tmp_path / "new", spread(3.0), [number % 4 != 1 for number in range(40)])
    verdict = judge(GateSection(metric="exact_match"), found(tmp_path, base=base, candidate=candidate))
    assert verdict.outcome == "passed"
    assert "exact_match 0.75 against 0.25" in verdict.reason


def test_another_tokenizer_is_no_advantage(tmp_path: Path) -> None:
    """The same text at the same likelihood, in twice the tokens: half the loss a token, and no improvement."""
    reference, _ = evaluation(tmp_path / "base", [(10.0 + number, 5) for number in range(20)])
    candidate, _ = evaluation(tmp_path / "new", [(10.0 + number, 10) for number in range(20)])
    assert improvement("loss", reference, candidate).value == 0.0


def test_a_row_that_one_model_cannot_have_is_left_out(tmp_path: Path) -> None:
    reference, _ = evaluation(tmp_path / "base", [None, *spread(3.0)])
    candidate, _ = evaluation(tmp_path / "new", [(1.0, 10), *spread(2.0)])
    assert improvement("loss", reference, candidate).num_rows == 50


def test_what_cannot_be_judged_is_said(tmp_path: Path) -> None:
    assert judge(GateSection(), found(tmp_path)).outcome == "not judged"
    candidate, base = evaluation(tmp_path / "new", spread(2.0)), evaluation(tmp_path / "base", spread(3.0))
    without = found(tmp_path, number="4", problem="it cannot be loaded", base=base, candidate=candidate)
    assert judge(GateSection(), without)[:2] == ("not judged", "it cannot be loaded")
    one, other = evaluation(tmp_path / "one", [(1.0, 1)]), evaluation(tmp_path / "other", [(2.0, 1)])
    assert judge(GateSection(), found(tmp_path, base=other, candidate=one)).outcome == "failed", "of a single row"


def test_a_gate_without_a_measure_is_refused() -> None:
    with pytest.raises(RefusedConfiguration, match=r"gate\.metric='loss' needs evaluation\.loss_rows, which is 0"):
        resolve(None, {}, {"evaluation": {"loss_rows": 0}})
    with pytest.raises(RefusedConfiguration, match=r"gate\.max_regression\.speed"):
        resolve(None, {}, {"gate": {"max_regression": {"speed": 1}}})
    resolve(None, {}, json.loads('{"evaluation": {"loss_rows": 0}, "gate": {"better_than": "none"}}'))
