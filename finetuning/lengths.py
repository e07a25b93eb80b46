"""Account for the rows and tokens of a split: what was read, cut, dropped and why, and what is trained."""

import logging
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from config.sections import DatasetSection
from finetuning.errors import Failure

if TYPE_CHECKING:
    from finetuning.tokens import Encoded

ALWAYS_TOLERATED = 5
"""So many bad rows never are too many."""
PULSE_SECONDS = 10
SHOWN_AROUND = 300
"""Characters before and after the place where a training and a serving prompt part."""
BY_LENGTH = {"too_long", "answers_cut"}
"""Reasons that are a matter of training.max_length, not of the row."""
T = TypeVar("T")
logger = logging.getLogger(__name__)


def told(items: Iterable[T], what: str) -> Iterator[T]:
    """The same items. Says how far a long loop has come: with a bar on a terminal, elsewhere each ten seconds."""
    from tqdm import tqdm

    said = time.monotonic()
    with tqdm(desc=what, unit=" rows", unit_scale=True, disable=None, leave=False, delay=1) as bar:
        for count, item in enumerate(items, 1):
            yield item
            bar.update()
            if bar.disable and time.monotonic() - said > PULSE_SECONDS:
                said = time.monotonic()
                logger.info("%s: %d so far", what, count)


class Account:
    """Counts of one split."""

    def __init__(self, split: str, max_length: int):
        self.split, self.max_length = split, max_length
        self.num_turns = self.num_sequences = self.num_truncated = 0
        self.num_trained = self.num_kept = self.num_cut = self.num_dropped = 0
        self.turns_compared = self.turns_that_differ = self.num_reasoning_left_out = 0
        self.lengths = array("L")
        self.dropped: Counter[str] = Counter()
        self.first_bad: dict[str, str] = {}
        self.first_difference: dict[str, str] = {}
        """`where`, and what training and serving have in `common` before they part, as `trained` and as `served`."""

    @property
    def num_rows(self) -> int:
        return len(self.lengths) + sum(self.dropped[reason] for reason in self.dropped if reason not in BY_LENGTH)

    def count(self, row: dict[str, Any], num_tokens: int) -> None:
        """A row as it was read, before anything is cut."""
        self.num_turns += len(row.get("messages", ()))
        self.lengths.append(num_tokens)

    def compare(self, row: dict[str, Any], trained: str, turns: int, prompts_that_differ: list[str]) -> None:
        self.turns_compared += turns
        self.turns_that_differ += len(prompts_that_differ)
        if prompts_that_differ and not self.first_difference:
            self.first_difference = {"where": row.get("where", ""), **difference(trained, prompts_that_differ[0])}

    def drop(self, reason: str, row: dict[str, Any], text: str, num_tokens: int = 0) -> None:
        self.dropped[reason] += 1
        self.num_dropped += num_tokens
        self.first_bad.setdefault(reason, f"{row.get('where', f'row {self.num_rows}')}: {text}")

    def keep(self, encoded: "Encoded", row: dict[str, Any]) -> Iterator["Encoded"]:
        """The first `max_length` tokens, if any of them is trained."""
        short = encoded.first(self.max_length)
        cut = len(encoded.input_ids) - len(short.input_ids)
        self.num_truncated += cut > 0
        self.num_cut += cut
        if not short.num_trained:
            self.drop("answers_cut", row, f"its first {self.max_length} tokens hold no answer", len(short.input_ids))
            return
        self.num_sequences += 1
        self.num_kept += len(short.input_ids)
        self.num_trained += short.num_trained
        yield short

    def check(self, section: DatasetSection) -> None:
        """Raises Failure when too much was lost, or nothing is left."""
        rows = self.num_rows
        bad = sum(count for reason, count in self.dropped.items() if reason not in BY_LENGTH)
        first_bad = {reason: where for reason, where in self.first_bad.items() if reason not in BY_LENGTH}
        refuse_too_many(f"{self.split} split", bad, rows, section, first_bad)
        length = f"training.max_length={self.max_length}"
        longest = (
            f"; {self.percentile(99)} would do for 99 % of the conversations, {max(self.lengths, default=0)} for all"
        )
        if section.on_long_rows == "fail" and self.dropped["too_long"]:
            raise Failure(
                "data",
                f"{length}: {self.dropped['too_long']} of {rows} conversations of the {self.split} split are longer "
                f"(dataset.on_long_rows='fail'){longest}. The first: {self.first_bad['too_long']}.",
            )
        lost = self.dropped["answers_cut"]
        if lost == rows or (lost > ALWAYS_TOLERATED and lost > section.max_bad_fraction * rows):
            raise Failure(
                "data",
                f"{length}: {lost} of {rows} conversations of the {self.split} split have no answer within that length"
                f"{longest}. Raise it, set dataset.on_long_rows to 'split_turns' or 'drop', or allow more with "
                "dataset.max_bad_fraction.",
            )
        if not self.num_sequences:
            raise Failure("data", f"{length}: no conversation of the {self.split} split is left{longest}. Raise it.")

    def percentile(self, percent: float) -> int:
        import numpy

        return int(numpy.percentile(self.lengths, percent, method="higher")) if self.lengths else 0

    def report(self) -> dict[str, Any]:
        percentiles = {f"p{percent}": self.percentile(percent) for percent in (50, 95, 99)}
        read = sum(self.lengths)
        return {
            "rows": self.num_rows,
            "turns": self.num_turns,
            "sequences": self.num_sequences,
            "tokens": {
                **percentiles,
                "max": max(self.lengths, default=0),
                "read": read,
                "kept": self.num_kept,
                "cut": self.num_cut,
                "dropped": self.num_dropped,
                "trained": self.num_trained,
            },
            "trainable_share": round(self.num_trained / max(self.num_kept, 1), 4),
            "truncated_rows": self.num_truncated,
            "dropped": dict(self.dropped),
            "first_bad": self.first_bad,
            "packed_sequences_at_least": -(-self.num_kept // self.max_length),
            "turns_compared": self.turns_compared,
            "turns_that_differ": self.turns_that_differ,
            "first_difference": self.first_difference,
            "turns_without_their_reasoning": self.num_reasoning_left_out,
            "histogram": self.histogram(),
        }

    def histogram(self) -> list[tuple[int, int]]:
        """Upper bound in tokens, a power of two, -> conversations that are as long."""
        powers = Counter(max(length - 1, 0).bit_length() for length in self.lengths)
        return [(1 << power, powers[power]) for power in range(min(powers), max(powers) + 1)] if powers else []


def difference(trained: str, served: str) -> dict[str, str]:
    """The text around the place where the two part."""
    pairs = enumerate(zip(trained, served, strict=False))
    start = next((place for place, (one, other) in pairs if one != other), min(len(trained), len(served)))
    return {
        "common": trained[max(start - SHOWN_AROUND, 0) : start],
        "trained": trained[start : start + SHOWN_AROUND],
        "served": served[start : start + SHOWN_AROUND],
    }


def refuse_too_many(what: str, bad: int, rows: int, section: DatasetSection, first_bad: dict[str, str]) -> None:
    """Raises Failure when more rows are bad than the section allows."""
    first = next(iter(first_bad.values()), "")
    if bad and section.on_bad_rows == "fail":
        message = f"dataset.name={section.name!r}: {bad} of {rows} rows of the {what} cannot be trained on; {first}"
        raise Failure("data", f"{message}. Correct them, or set dataset.on_bad_rows to 'drop'.")
    if bad == rows:
        message = f"dataset.name={section.name!r}: {bad} of {rows} rows of the {what} cannot be trained on; {first}"
        raise Failure("data", f"{message}. Correct them.")
    if bad > ALWAYS_TOLERATED and bad > section.max_bad_fraction * rows:
        raise Failure(
            "data",
            f"dataset.name={section.name!r}: {bad} of {rows} rows of the {what} cannot be trained on, more than "
            f"dataset.max_bad_fraction={section.max_bad_fraction}; {first}. Correct them, or raise that.",
        )


def split_turns(
    row: dict[str, Any], max_length: int, length: Callable[[dict[str, Any]], int]
) -> Iterator[dict[str, Any]]:
    """Conversations that fit, each as many exchanges of `row` as go in, with its system message; none begins within
    an exchange. A single exchange that is too long comes out alone."""
    messages = row.get("messages", [])
    system = messages[:1] if messages and messages[0]["role"] == "system" else []
    rest = messages[len(system) :]
    starts = [0, *(number for number, message in enumerate(rest) if number and message["role"] == "user")]
    exchanges = [rest[start:end] for start, end in zip(starts, [*starts[1:], len(rest)], strict=True)]
    piece: list[dict[str, Any]] = []
    for exchange in exchanges:
        longer = {**row, "messages": [*system, *piece, *exchange]}
        if piece and length(longer) > max_length:
            yield {**row, "messages": [*system, *piece]}
            piece = []
        piece = [*piece, *exchange]
    yield {**row, "messages": [*system, *piece]}
