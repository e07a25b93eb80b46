"""Is a version better, beyond chance, than what is served now? The rule is the recipe's `gate` section."""

from pathlib import Path
from typing import Any, Literal, NamedTuple

from config.sections import GateSection
from finetuning.artifacts import read_json
from finetuning.evaluate import ANSWERS, BASE, CANDIDATE, CHAMPION, LOSSES, Evaluation

RESAMPLES, SEED, CONFIDENCE = 2000, 0, 0.95
LOWER_IS_BETTER = {"loss"}

Outcome = Literal["passed", "failed", "not judged"]


class Verdict(NamedTuple):
    outcome: Outcome
    reason: str
    """A sentence."""
    metrics: dict[str, float]
    """Improvement over the reference with the ends of its interval; empty when nothing was compared."""


class Improvement(NamedTuple):
    value: float
    low: float
    high: float
    num_rows: int


def judge(section: GateSection, found: Evaluation) -> Verdict:
    if section.better_than == "none":
        return Verdict("passed", "the gate asks for nothing (gate.better_than='none')", {})
    if CANDIDATE not in found.scores:
        return Verdict("not judged", "the test split has no row for the gate (dataset.test_size, dataset.min_rows)", {})
    reference = BASE if section.better_than == "base" or found.champion is None else CHAMPION
    if reference not in found.scores:
        return Verdict("not judged", found.problem or "", {})
    name = f"champion version {found.champion}" if reference == CHAMPION else "the base model"
    gained = improvement(section.metric, found.artifacts[reference], found.artifacts[CANDIDATE])
    if gained is None:
        return Verdict("not judged", f"no row has a {section.metric} of both it and {name}", {})
    before, after = (found.scores[model][section.metric] for model in (reference, CANDIDATE))
    told = (
        f"{section.metric} {after:.4g} against {before:.4g} of {name} on {gained.num_rows} rows, better by "
        f"{gained.value:.4g} (95 %: {gained.low:.4g} to {gained.high:.4g})"
    )
    metrics = {"improvement": gained.value, "improvement_low": gained.low, "improvement_high": gained.high}
    if not gained.low > section.min_improvement:
        needed = f"gate.min_improvement={section.min_improvement:g}"
        return Verdict("failed", f"{told}, which is not beyond {needed} for certain", metrics)
    for metric, allowed in section.max_regression.items():
        values = [found.scores[model][metric] for model in (reference, CANDIDATE)]
        if None in values:
            continue
        worse = (values[0] - values[1]) * (-1 if metric in LOWER_IS_BETTER else 1)
        if worse > allowed:
            limit = f"more than gate.max_regression.{metric}={allowed:g} allows"
            lost = f"but {metric} {values[1]:.4g} against {values[0]:.4g} is {limit}"
            return Verdict("failed", f"{told}, {lost}", metrics)
    return Verdict("passed", told, metrics)


def improvement(metric: str, reference: Path, candidate: Path) -> Improvement | None:
    """By how much the candidate is better, in the metric's unit, with a bootstrap interval over rows.

    Both models' losses of a row are divided by the candidate's number of tokens: that is right as well when another
    tokenizer cuts the same text into another number of them.
    """
    import numpy
    from scipy.stats import bootstrap

    pairs = _pairs(metric, read_rows(metric, reference), read_rows(metric, candidate))
    if not pairs:
        return None
    gains, weights = numpy.asarray(pairs, dtype=float).T

    def ratio(gains: Any, weights: Any, axis: int = -1) -> Any:
        return gains.sum(axis=axis) / weights.sum(axis=axis)

    value = float(ratio(gains, weights))
    if len(pairs) < 2 or numpy.ptp(gains / weights) == 0:
        return Improvement(value, value if len(pairs) > 1 else float("-inf"), value, len(pairs))
    interval = bootstrap(
        (gains, weights), ratio, paired=True, vectorized=True, n_resamples=RESAMPLES, confidence_level=CONFIDENCE,
        method="percentile", rng=SEED,
    ).confidence_interval  # fmt: skip
    return Improvement(value, float(interval.low), float(interval.high), len(pairs))


def read_rows(metric: str, evaluation: Path) -> list[Any]:
    if metric == "loss":
        return read_json(evaluation / LOSSES)
    return [answer["exact_match"] for answer in read_json(evaluation / ANSWERS)]


def _pairs(metric: str, reference: list[Any], candidate: list[Any]) -> list[tuple[float, float]]:
    """Gain and weight of each row that both models have."""
    both = zip(reference, candidate, strict=True)
    if metric == "loss":
        return [(before[0] - after[0], after[1]) for before, after in both if before and after]
    return [(float(after) - float(before), 1.0) for before, after in both]
