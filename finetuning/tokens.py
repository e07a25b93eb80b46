"""Tokenise a prepared dataset with the template that will be saved and served, and account for every token.

The artifact holds `train.arrow` and `test.arrow` (`input_ids`, `labels`: -100 where nothing is trained; after packing
also `seq_lengths`), as training reads them, `report.json`, and `report.html` with the first conversations. Of the test
split it has the half that chooses the checkpoint, see `finetuning.halves`; the other half is in the report as `gate`.
Program: `python -m finetuning.tokens JOB.json`, see `Job`.
"""

import json
import logging
import os
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import accumulate, chain, compress, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import BaseModel

from config.sections import DatasetSection, TrainingSection
from finetuning import artifacts, child
from finetuning.chat import Renderer, reasoning_left_out, turn_end
from finetuning.errors import Failure
from finetuning.halves import gate_rows
from finetuning.lengths import Account, split_turns, told
from finetuning.preview import Part, page, parts

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

TOKENS_VERSION = 3
"""Part of every fingerprint of tokens: raise it when the same rows and model give other tokens or labels."""

IGNORED = -100
"""Label of a token that is not trained: torch's `ignore_index`."""
REPORT, PAGE = "report.json", "report.html"
ROWS_AT_ONCE = 256
"""Conversations that are encoded together, on all cores."""
PREVIEWED_ROWS = 20
COMPARED_ROWS = 200
"""Rows whose turns are rendered a second time, as they are served."""
logger = logging.getLogger(__name__)


class Job(BaseModel):
    dataset: Path
    """Artifact of `finetuning.data`."""
    model: Path
    """Artifact of `finetuning.model`."""
    section: DatasetSection
    training: TrainingSection
    gate_takes_half: bool = True
    """Of the test split; else all of it chooses the checkpoint."""
    trust_remote_code: bool
    output: Path


class Encoded(NamedTuple):
    input_ids: list[int]
    labels: list[int]

    @property
    def num_trained(self) -> int:
        return len(self.labels) - self.labels.count(IGNORED)

    def first(self, num_tokens: int) -> "Encoded":
        return Encoded(self.input_ids[:num_tokens], self.labels[:num_tokens])


def run(values: dict[str, Any]) -> dict[str, Any]:
    job = Job.model_validate(values)
    return artifacts.produce(job.output, lambda directory: prepare(job, directory))


def prepare(job: Job, output: Path) -> dict[str, Any]:
    """Write both splits and the report below `output` and return the facts for the manifest. Raises Failure."""
    from transformers import AutoTokenizer

    os.environ["TOKENIZERS_PARALLELISM"] = "true"  # nothing forks here
    tokenizer = AutoTokenizer.from_pretrained(job.model, trust_remote_code=job.trust_remote_code)
    encoder = Encoder(tokenizer, job.section, job.training)
    report: dict[str, Any] = {"max_length": job.training.max_length}
    previews: list[list[Part]] = []
    is_gate = gate_rows(job.dataset / "test.jsonl", job.gate_takes_half)
    evaluated_on = first([not gate for gate in is_gate], job.training.eval_max_rows)
    parts_of = {"train": ("train", None), "test": ("test", evaluated_on), "gate": ("test", is_gate)}
    for part, (split, chosen) in parts_of.items():
        if chosen is not None and not any(chosen):
            continue
        account = Account(part, job.training.max_length)
        with (job.dataset / f"{split}.jsonl").open() as lines:
            rows = map(json.loads, lines if chosen is None else compress(lines, chosen))
            encoded = encoder.encode(rows, account)
            shown = list(islice(encoded, PREVIEWED_ROWS))
            if part == "gate":
                deque(encoded, maxlen=0)
            else:
                write(output / f"{part}.arrow", chain(shown, encoded))
        previews += [parts(tokenizer, row) for row in shown] if part == "train" else []
        account.check(job.section)
        report[part] = account.report()
        if job.training.packing and part != "gate":
            report[part]["packed_sequences"] = pack(output / f"{part}.arrow", job.training)
    artifacts.write_json(output / REPORT, report)
    (output / PAGE).write_text(page(report, previews), encoding="utf-8")
    for part in [part for part in parts_of if part in report]:
        for line in describe(part, report[part], job.training):
            logger.info("%s", line)
    return {"dataset": str(job.dataset), "model": str(job.model), "num_tokens": report["train"]["tokens"]["kept"]}


def first(chosen: list[bool], count: int | None) -> list[bool]:
    """The first `count` of the rows that are chosen; all of them without a count."""
    return (
        chosen
        if count is None
        else [is_so and so_far <= count for is_so, so_far in zip(chosen, accumulate(chosen), strict=True)]
    )


class Encoder:
    """Conversations in, tokens and labels out."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", section: DatasetSection, training: TrainingSection):
        """Raises Failure when the assistant's turns cannot be told, or do not end with a token of their own."""
        if not tokenizer.is_fast:
            raise Failure(
                "configuration", "model.name: its tokenizer is a slow one, which cannot tell where a turn is."
            )
        self.tokenizer, self.section, self.training = tokenizer, section, training
        self.renderer = Renderer(tokenizer, training.assistant_only_loss)
        added = tokenizer.added_tokens_decoder.values()  # more than all_special_tokens, where only some have a name
        self.control_tokens = tuple(token.content for token in added if token.special)
        try:
            end = turn_end(tokenizer, self.renderer)
        except ValueError as error:
            raise Failure("configuration", f"model.chat_template_file: {error}. Give another template.") from None
        if end is None:
            raise Failure(
                "configuration",
                "model.chat_template_file: with this template a trained turn does not end with a token of its own (eos "
                f"is {tokenizer.eos_token!r}), so that the model would never stop. Give one that puts it inside of "
                "{% generation %}.",
            )

    def encode(self, rows: Iterable[dict[str, Any]], account: Account) -> Iterator[Encoded]:
        rows = told(rows, f"{account.split}: conversations tokenised")
        while batch := list(islice(rows, ROWS_AT_ONCE)):
            yield from self._fitting(batch, account)

    def _fitting(self, rows: list[dict[str, Any]], account: Account) -> Iterator[Encoded]:
        for row, encoded in zip(rows, self.encode_rows(rows, account), strict=True):
            if encoded is None:
                continue
            length, parts = len(encoded.input_ids), [encoded]
            fits = length <= self.training.max_length
            if not fits and self.section.on_long_rows == "split_turns":
                try:
                    parts = self._parts(row)
                except ValueError as problem:
                    account.drop("template", row, str(problem))
                    continue
            account.count(row, length)
            if fits or self.section.on_long_rows in ("truncate", "split_turns"):
                for part in parts:
                    yield from account.keep(part, row)
            else:
                account.drop("too_long", row, f"{length} tokens", length)

    def _parts(self, row: dict[str, Any]) -> list[Encoded]:
        pieces = list(split_turns(row, self.training.max_length, self._length))
        return [part for part in self.encode_rows(pieces, None) if part]

    def encode_rows(self, rows: list[dict[str, Any]], account: Account | None) -> list[Encoded | None]:
        """Whole rows, however long; None for one that cannot be trained on. Without an account such a one raises
        ValueError, and nothing is counted."""
        rendered = [self._render(row, account) for row in rows]
        texts = [one.text for one in rendered if one]
        encodings = iter(self.tokenizer(texts, add_special_tokens=False, verbose=False).encodings if texts else [])
        return [one and Encoded(*self._labelled(next(encodings), one.trained)) for one in rendered]

    def _render(self, row: dict[str, Any], account: Account | None) -> Any:
        try:
            rendered = self.renderer.trained(row)
        except ValueError as problem:
            if account is None:
                raise
            account.drop("template", row, str(problem))
            return None
        if account is None:
            return rendered
        if token := self._control_token(row):
            account.drop("control_token", row, f"its text has {token!r}, which would act as the token of that name")
            return None
        account.num_reasoning_left_out += reasoning_left_out(row, rendered.text)
        if account.num_rows < COMPARED_ROWS:
            account.compare(row, rendered.text, *self.renderer.turns_that_differ(row, rendered))
        return rendered

    def _control_token(self, row: dict[str, Any]) -> str | None:
        written = json.dumps([row.get("messages"), row.get("tools")], ensure_ascii=False)
        return next((token for token in self.control_tokens if token in written), None)

    def _labelled(self, encoding: Any, spans: list[tuple[int, int]]) -> tuple[list[int], list[int]]:
        import numpy

        starts, ends = numpy.asarray(encoding.offsets, dtype=numpy.int64).reshape(-1, 2).T
        trained = numpy.zeros(len(starts), dtype=bool)
        for start, end in spans:
            trained |= (ends > start) & (starts < end)
        labels = numpy.where(trained, encoding.ids, IGNORED)
        return encoding.ids, labels.tolist()

    def _length(self, row: dict[str, Any]) -> int:
        text = self.renderer.trained(row).text
        return len(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def write(path: Path, rows: Iterable[Encoded]) -> None:
    import pyarrow

    lists = pyarrow.list_(pyarrow.int32())
    schema = pyarrow.schema([("input_ids", lists), ("labels", lists)])
    rows = iter(rows)
    with pyarrow.OSFile(str(path), "wb") as file, pyarrow.ipc.new_stream(file, schema) as stream:
        while batch := list(islice(rows, ROWS_AT_ONCE)):
            columns = [pyarrow.array(column, lists) for column in zip(*batch, strict=True)]
            stream.write_batch(pyarrow.record_batch(columns, schema=schema))


def pack(path: Path, training: TrainingSection) -> int:
    """Put several rows into one sequence, as TRL does it. Returns how many sequences there are then."""
    import pyarrow
    from trl import pack_dataset

    dataset = read_tokens(path).shuffle(seed=training.seed, keep_in_memory=True)
    packed = pack_dataset(dataset, training.max_length, "bfd", {"keep_in_memory": True})
    table = packed.with_format("arrow")[:]
    temporary = path.with_suffix(".packing")
    with pyarrow.OSFile(str(temporary), "wb") as file, pyarrow.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table)
    temporary.replace(path)
    return len(packed)


def read_tokens(path: Path) -> "Dataset":
    """A split, mapped from the disk: it takes no memory of its own."""
    from datasets import Dataset

    return Dataset.from_file(str(path))


def describe(split: str, report: dict[str, Any], training: TrainingSection) -> Iterator[str]:
    tokens = report["tokens"]
    yield (
        f"{split}: {report['rows']} conversations of {tokens['p50']} tokens (median; 95 %: {tokens['p95']}, longest: "
        f"{tokens['max']}), {report['trainable_share']:.0%} of them trained"
    )
    if split == "train":
        yield batch(report, training)
    if report["truncated_rows"]:
        yield (
            f"{split}: training.max_length={training.max_length} cuts {report['truncated_rows']} conversations and "
            f"{tokens['cut']} tokens ({tokens['cut'] / tokens['read']:.1%}); {tokens['p99']} would cut 1 % of them"
        )
    for reason, count in report["dropped"].items():
        yield f"{split}: {count} dropped, {reason}; the first: {report['first_bad'][reason]}"
    if report["turns_without_their_reasoning"]:
        yield (
            f"{split}: the chat template leaves the reasoning of {report['turns_without_their_reasoning']} turns out; "
            "model.chat_style='keep' may render it"
        )
    if report["turns_that_differ"]:
        yield (
            f"{split}: {report['turns_that_differ']} of {report['turns_compared']} turns are trained after other text "
            "than they are served after; model.chat_style says which template is used"
        )


def batch(report: dict[str, Any], training: TrainingSection) -> str:
    """What an optimizer step is, in conversations and tokens: packing changes the one and padding the other."""
    packed = report.get("packed_sequences")
    rows = training.per_device_train_batch_size * training.gradient_accumulation_steps * training.num_processes
    share = rows / (packed or report["sequences"])
    each = f"{rows} packed sequences, about {share * report['sequences']:.1f}" if packed else str(rows)
    return (
        f"train: an optimizer step takes {each} conversations and about {share * report['tokens']['kept']:.0f} tokens; "
        f"training.max_steps={training.max_steps} go over the split {share * training.max_steps:.2f} times"
    )


if __name__ == "__main__":
    child.main(run)
