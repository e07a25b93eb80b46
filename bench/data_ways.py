"""One way through a dataset, for `bench.data`: `python -m bench.data_ways plain|ours|check FOLDER FILE MODEL`."""

import json
import os
import shutil
import sys
from pathlib import Path

from bench.data import MAX_LENGTH, usage
from config.sections import DatasetSection, ModelSection, TrainingSection
from config.settings import PROJECT_ROOT


def plain(folder: Path, file: str, model: Path) -> int:
    """As a script would do it, with the mask; the trainer's model has no part in it."""
    os.environ["HF_DATASETS_CACHE"] = str(folder / "cache")
    from datasets import load_dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    splits = load_dataset("json", data_files=str(folder / file), split="train").train_test_split(0.1, seed=42)
    args = SFTConfig(
        output_dir=str(folder / "trl"), max_length=MAX_LENGTH, assistant_only_loss=True, use_cpu=True, bf16=False,
        report_to="none", disable_tqdm=True,
    )  # fmt: skip
    trainer = SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(PROJECT_ROOT / "samples" / "model"),
        args=args,
        train_dataset=splits["train"],
        eval_dataset=splits["test"],
        processing_class=AutoTokenizer.from_pretrained(model),
    )
    return sum(map(len, trainer.train_dataset.with_format("arrow")["input_ids"].to_pylist()))


def ours(folder: Path, file: str, model: Path) -> int:
    from finetuning import data, tokens
    from finetuning.inputs import identify
    from finetuning.model import load_tokenizer

    section = DatasetSection(name=str(folder / file))
    source = identify("dataset", section.name, "main")
    data.run({"section": section.model_dump(), "input": source.model_dump(), "output": str(folder / "dataset")})
    if not (folder / "model").is_dir():
        load_tokenizer(model, ModelSection(chat_style="keep"))[0].save_pretrained(folder / "model")
    job = {"dataset": folder / "dataset", "model": folder / "model", "section": section, "trust_remote_code": False}
    training = TrainingSection(max_length=MAX_LENGTH)
    return tokens.run({**job, "training": training, "output": folder / "tokens"})["num_tokens"]


def check(folder: Path, file: str, model: Path) -> int:
    """Rows alone: read, checked, split."""
    from finetuning import data
    from finetuning.inputs import identify

    section, output = DatasetSection(name=str(folder / file)), folder / "checked"
    output.mkdir()
    data.prepare(section, identify("dataset", section.name, "main"), output)
    shutil.rmtree(output)
    return 0


if __name__ == "__main__":
    way, folder, file, model = sys.argv[1:]
    num_tokens = {"plain": plain, "ours": ours, "check": check}[way](Path(folder), file, Path(model))
    print(json.dumps({**usage(), "tokens": num_tokens}))
