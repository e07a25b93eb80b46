"""Check a dataset by itself, without model, GPU or server: can it be trained on, and what becomes of every row?

    python -m finetuning.data check PATH_OR_NAME [--tokenizer PATH] [--split train] [--json] [--preview 3]
        [--dataset.on_bad_rows fail] [--training.max_length 1024] [--model.chat_style keep]

Exit codes: 0 it can be trained on; 1 it is refused, and a line says why; 2 wrong usage.
"""

import json
import logging
import sys
from collections import Counter, deque
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pydantic import ValidationError
from pydantic_settings import BaseSettings, CliPositionalArg, CliSettingsSource, SettingsConfigDict

from config.cli import DOTTED_OPTIONS, USAGE_ERROR
from config.recipes import explain
from config.sections import DatasetSection, ModelSection, TrainingSection
from config.settings import apply_environment
from finetuning import data, tokens
from finetuning.artifacts import read_json
from finetuning.child import quiet_libraries
from finetuning.classify import classify
from finetuning.inputs import identify
from finetuning.lengths import Account

REFUSED = 1
SPLITS = ("train", "test")


class CommandLine(BaseSettings):
    """Check a dataset by itself: which shape its rows have, which cannot be trained on and why, how long they are.
    Exit code 0: it can be trained on. 1: it is refused, and a line says why. 2: wrong usage."""

    model_config = SettingsConfigDict(
        **DOTTED_OPTIONS, cli_prog_name="python -m finetuning.data check", cli_implicit_flags=True
    )

    name: CliPositionalArg[str]
    """What dataset.name takes: a hub id, a path, a pattern, a URI."""
    tokenizer: str | None = None
    """Directory or hub id of a tokenizer (a model directory has one): counts tokens, and checks template and mask."""
    split: str | None = None
    """Split to train on, instead of dataset.train_split."""
    json_output: bool = False
    """Print one JSON object and nothing else (`--json` for short)."""
    preview: int = 0
    """Show so many conversations with what is trained of them; needs a tokenizer. None beside `--json`."""
    dataset: DatasetSection = DatasetSection()
    model: ModelSection = ModelSection()
    training: TrainingSection = TrainingSection()

    @classmethod
    def settings_customise_sources(cls, settings_cls: type[BaseSettings], **sources: Any) -> tuple[()]:
        return ()  # the command line only


def main(arguments: list[str]) -> None:
    arguments = ["--json_output" if argument == "--json" else argument for argument in arguments]
    try:
        line = CommandLine(_cli_settings_source=CliSettingsSource(CommandLine, cli_parse_args=arguments))
    except ValidationError as error:
        print("\n".join(explain(error)), file=sys.stderr)
        sys.exit(USAGE_ERROR)
    apply_environment()
    logging.basicConfig(level=logging.WARNING if line.json_output else logging.INFO, format="%(message)s")
    quiet_libraries()
    read: list[data.Rows] = []
    try:
        with TemporaryDirectory() as folder:
            found = check(line, Path(folder), read)
    except Exception as error:
        failure = classify(error)
        if failure.kind == "bug":
            raise
        if line.json_output:
            show({**counts_of([rows.report() for rows in read]), "refused": failure.message})
        print(failure.message, file=sys.stderr)
        sys.exit(REFUSED)
    if line.json_output:
        show(found)
    else:
        splits = found["splits"]
        print(f"It can be trained on: {splits['train']} conversations to train on, {splits['test']} to evaluate on.")


def show(found: dict[str, Any]) -> None:
    print(json.dumps(found, ensure_ascii=False, indent=1))


def counts_of(splits: list[dict[str, Any]]) -> dict[str, Any]:
    """What is known when the rows were read."""
    shapes, mended, dropped = (
        sum((Counter(split[name]) for split in splits), Counter()) for name in ("shapes", "mended", "dropped")
    )
    return {
        "shape": "+".join(shape for shape, _ in shapes.most_common()),
        "rows": sum(split["rows"] for split in splits),
        "kept": sum(split["kept"] for split in splits),
        "mended": dict(mended),
        "dropped": dict(dropped),
        "first_bad": {reason: where for split in reversed(splits) for reason, where in split["first_bad"].items()},
        "tokens": None,
        "truncated_rows": None,
        "trainable_share": None,
        "splits": {split["name"]: split["kept"] for split in splits},
    }


def check(line: CommandLine, folder: Path, read: list[data.Rows]) -> dict[str, Any]:
    """The object that `--json` prints. Raises Failure."""
    section = line.dataset.model_copy(update={"name": line.name, "train_split": line.split or line.dataset.train_split})
    data.prepare(section, identify("dataset", line.name, section.revision), folder, read)
    report = read_json(folder / data.REPORT)
    found = counts_of([rows.report() for rows in read])
    found["splits"] = {split: report[f"num_{split}"] for split in SPLITS}
    found["removed_from_train_because_in_test"] = report["removed_from_train_because_in_test"]
    if line.tokenizer:
        counted = count_tokens(line, section, folder)
        for split, counts in counted.items():
            num_dropped = sum(counts["dropped"].values())
            found["dropped"] = dict(Counter(found["dropped"]) + Counter(counts["dropped"]))
            found["first_bad"] = counts["first_bad"] | found["first_bad"]
            found["kept"] -= num_dropped
            found["splits"][split] -= num_dropped
        found["tokens"] = counted["train"]["tokens"]
        found["trainable_share"] = counted["train"]["trainable_share"]
        for name in ("truncated_rows", "turns_that_differ", "turns_without_their_reasoning"):
            found[name] = sum(counts[name] for counts in counted.values())
    return found


def count_tokens(line: CommandLine, section: DatasetSection, folder: Path) -> dict[str, dict[str, Any]]:
    from finetuning.model import load_tokenizer
    from finetuning.preview import as_terminal

    tokenizer, _ = load_tokenizer(line.tokenizer, line.model)
    encoder = tokens.Encoder(tokenizer, section, line.training)
    counted = {}
    for split in SPLITS:
        account = Account(split, line.training.max_length)
        with (folder / f"{split}.jsonl").open() as lines:
            encoded = encoder.encode(map(json.loads, lines), account)
            shown = line.preview if split == "train" and not line.json_output else 0
            for row in islice(encoded, shown):
                print(as_terminal(tokenizer, row), "\n")
            deque(encoded, maxlen=0)
        account.check(section)
        counted[split] = account.report()
        for text in tokens.describe(split, counted[split], line.training):
            logging.info("%s", text)
    return counted
