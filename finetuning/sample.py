"""The first rows of a dataset, read and tokenised as the steps do it, and how many there are: in seconds.

The lines `rows` and `tokens` of a preflight, for its child: they take datasets and transformers.
"""

import json
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from config.sections import Config, DatasetSection
from config.settings import Settings, shown
from finetuning.artifacts import read_json, read_manifest
from finetuning.base import Facts
from finetuning.bounded import within
from finetuning.containers import Item
from finetuning.data import Rows, choose_splits
from finetuning.errors import Failure
from finetuning.findings import Findings
from finetuning.inputs import Input
from finetuning.lengths import ALWAYS_TOLERATED, Account, refuse_too_many
from finetuning.model import load_tokenizer
from finetuning.sources import hub_rows, load_hub, read_splits
from finetuning.tokens import REPORT, Encoder
from finetuning.workload import Workload, workload

SAMPLE_ROWS = 300
"""Of each split."""
COUNT_SECONDS = 2.0
"""So long the rows of local files are counted."""
ANSWER_SECONDS = 60
"""What a sample may take: a store or the hub may be slow, or have files that cannot be read in part."""


class Sample(NamedTuple):
    train: Rows
    file: Path
    """Its rows that can be trained on, as JSON lines."""
    is_whole: bool
    """Whether it is all of the split."""
    num_rows: int
    """To train on: of the split, without the share that is set aside."""
    is_counted: bool
    """Whether there are just so many; else at least."""


def rows_lines(
    config: Config, source: Input, counted: Path | None, facts: Facts | None, findings: Findings
) -> Workload | None:
    """By the account in `counted`, where the artifact of the tokens would be, or else by a sample."""
    if counted and read_manifest(counted):
        report = read_json(counted / REPORT)["train"]
        findings.ok("rows", f"{report['rows']:,} to train on, prepared by an earlier run")
        findings.ok("tokens", _lengths(config, report))
        return workload(config, report, report["sequences"], "exactly")
    with tempfile.TemporaryDirectory() as folder:
        return _sampled(config, source, facts, Path(folder), findings)


def _sampled(config: Config, source: Input, facts: Facts | None, folder: Path, findings: Findings) -> Workload | None:
    sample = None
    with findings.checking("rows"):
        try:
            sample = take(config.dataset, source, folder)
        except Failure:
            raise
        except Exception as error:
            told = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            remedy = "A run reads all of it, and may find what is not told here."
            findings.warn("rows", f"no sample could be taken: {shown(told)}", remedy)
        else:
            describe(sample, config.dataset, findings)
    if not (sample and facts) or findings.refused("tokens"):
        return None
    with findings.checking("tokens"):
        report = count_tokens(config, facts.directory, sample)
        findings.ok("tokens", _lengths(config, report))
        num_sequences = sample.num_rows * report["sequences"] / report["rows"]
        return workload(config, report, num_sequences, "about" if sample.is_counted else "at least")


def _lengths(config: Config, report: dict[str, Any]) -> str:
    tokens, cut = report["tokens"], report["truncated_rows"] / report["rows"]
    return (
        f"{tokens['p50']:,} a conversation (median), {tokens['p95']:,} (95 %), {tokens['max']:,} (longest); "
        f"{report['trainable_share']:.0%} are trained; training.max_length={config.training.max_length} cuts {cut:.1%} "
        f"of {report['rows']:,} conversations"
    )


def take(section: DatasetSection, source: Input, folder: Path) -> Sample:
    """Raises Failure for what the data step would refuse as well, as far as the sample tells; TimeoutError."""
    return within(ANSWER_SECONDS, lambda: _take(section, source, folder))


def _take(section: DatasetSection, source: Input, folder: Path) -> Sample:
    splits, known = _splits(section, source)
    tolerant = section.model_copy(update={"max_bad_fraction": 1.0})  # a share of the first rows is none of all
    heads = {name: islice(rows, SAMPLE_ROWS) for name, rows in splits.items()}
    train, test = choose_splits(tolerant, heads, lambda name: Rows(name, tolerant, folder / f"{name}.rows"))
    rest = _count(splits[section.train_split], COUNT_SECONDS if _is_here(source) else 0)
    if rest == 0:
        refuse_too_many(f"{train.name} split", num_bad(train), train.num_read, section, train.first_bad)
    train.write(train.rows, folder / "train.jsonl")
    counted = known.get(section.train_split) or (None if rest is None else train.num_read + rest)
    total = counted or train.num_read
    num_rows = total if test else round(total * (1 - section.test_size))
    return Sample(train, folder / "train.jsonl", rest == 0, num_rows, counted is not None)


def num_bad(rows: Rows) -> int:
    return sum(count for reason, count in rows.dropped.items() if reason != "duplicate")


def describe(sample: Sample, section: DatasetSection, findings: Findings) -> None:
    rows, bad = sample.train, num_bad(sample.train)
    shapes = ", ".join(f"{count} of shape {shape}" for shape, count in rows.shapes.most_common())
    which = f"all {rows.num_read}" if sample.is_whole else f"the first {rows.num_read}"
    total = f"{'' if sample.is_counted else 'at least '}{sample.num_rows:,}"
    found = f"{which} rows: {shapes}; {total} to train on"
    if not bad:
        return findings.ok("rows", found)
    reason, where = next((reason, where) for reason, where in rows.first_bad.items() if reason != "duplicate")
    found += f"; {bad} cannot be trained on, the first ({reason}): {where}"
    if bad > ALWAYS_TOLERATED and bad > section.max_bad_fraction * rows.num_read:
        remedy = (
            f"When all rows are like these the run is refused (dataset.max_bad_fraction={section.max_bad_fraction})."
        )
        return findings.warn("rows", found, remedy)
    findings.ok("rows", found)


def _splits(section: DatasetSection, source: Input) -> tuple[dict[str, Iterator[Item]], dict[str, int]]:
    """The splits, of the hub without a download of whole files; and the counts of rows that their owner states."""
    if source.path or source.uri or _is_here(source):
        return read_splits(section, source), {}
    streams = load_hub(section, source, streaming=True)
    stated = {name: (stream.info.splits or {}).get(name) for name, stream in streams.items()}
    known = {name: split.num_examples for name, split in stated.items() if split and split.num_examples}
    return {name: hub_rows(f"{source.name} {name}", stream) for name, stream in streams.items()}, known


def _is_here(source: Input) -> bool:
    return bool(source.path) or (not source.uri and Settings().hf_hub_offline)


def _count(rows: Iterator[Item], seconds: float) -> int | None:
    """How many there are; None when that takes longer."""
    end, count = time.monotonic() + seconds, 0
    for _ in rows:
        count += 1
        if time.monotonic() > end:
            return None
    return count


def count_tokens(config: Config, base: Path, sample: Sample) -> dict[str, Any]:
    """The account of the sample's tokens, see `Account.report`. Raises Failure as the tokens step."""
    section = config.dataset
    tokenizer, _ = load_tokenizer(base, config.model)
    account = Account("train", config.training.max_length)
    with sample.file.open() as lines:
        deque(Encoder(tokenizer, section, config.training).encode(map(json.loads, lines), account), maxlen=0)
    account.check(section if sample.is_whole else section.model_copy(update={"max_bad_fraction": 1.0}))
    return account.report()
