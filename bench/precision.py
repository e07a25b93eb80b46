"""What each precision of the weights makes of the same training: updates lost, weights unchanged, loss, seconds.

python -m bench.precision [--data FILE] [--model DIRECTORY] [--steps 150] [--learning_rate 2e-5]

`lost at once`: share of weights that an update of the size of the learning rate leaves as they are. `unchanged`: share
of weights that are, after all steps, what they were in the base model.
"""

import argparse
import logging
import os
import tempfile
from pathlib import Path
from typing import Any

from config.sections import Config
from config.settings import PROJECT_ROOT, Settings
from finetuning.artifacts import file_digest
from finetuning.launcher import run_step

PRECISIONS = ("fp32", "bf16_stochastic_rounding", "bf16")
QUIET = logging.getLogger("bench.precision")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.precision", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--data", type=Path, default=PROJECT_ROOT / "samples" / "chat" / "train.jsonl")
    parser.add_argument("--model", type=Path, default=PROJECT_ROOT / "samples" / "model")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--learning_rate", type=float, default=2e-5)
    options = parser.parse_args()
    for path in (options.data, options.model / "model.safetensors"):
        print(f"{path.parent.name}/{path.name} {file_digest(path)[:16]}")
    print(f"{options.steps} steps of 8 conversations, learning rate {options.learning_rate}")
    with tempfile.TemporaryDirectory(prefix="finetune-bench-") as root:
        os.environ |= {"FINETUNE_STORAGE_ROOT": root, "HF_HUB_OFFLINE": "1"}
        (Path(root) / "tmp").mkdir()
        job = prepare(Path(root), options)
        base = train(job, options, "fp32", max_steps=1)["eval_loss"]  # with a warm-up, the first step has rate 0
        print(f"\n{'':<26}{'lost at once':>14}{'unchanged':>11}{'eval loss':>11}{'train s':>9}{'peak GiB':>10}")
        print(f"{'base model':<26}{'':>25}{base:>11.4f}")
        for precision in PRECISIONS:
            result = train(job, options, precision)
            lost, unchanged = compare(
                options.model, Path(job["output"]) / "checkpoints" / result["checkpoint"], options
            )
            lost = f"{lost:.1%}" if precision == "bf16" else "-"
            print(f"{precision:<26}{lost:>14}{unchanged:>11.1%}{result['eval_loss']:>11.4f}"
                  f"{result['train_seconds']:>9.1f}{result['peak_memory_gib']:>10.2f}", flush=True)  # fmt: skip


def prepare(root: Path, options: argparse.Namespace) -> dict[str, Any]:
    """The inputs of all trainings."""
    from finetuning.inputs import identify

    config = configuration(options, "fp32")
    for step, source in (("data", options.data), ("model", options.model)):
        section = config.dataset if step == "data" else config.model
        found = identify("dataset" if step == "data" else "model", str(source), "main")
        job = {"section": section.model_dump(), "input": found.model_dump(mode="json"), "output": str(root / step)}
        run_step(step, job, QUIET)
    shared = {"dataset": str(root / "data"), "model": str(root / "model"), "trust_remote_code": False}
    sections = {"section": config.dataset.model_dump(), "training": config.training.model_dump()}
    run_step("tokens", {**shared, **sections, "output": str(root / "tokens")}, QUIET)
    return {"root": root, "tokens": str(root / "tokens"), "model": str(root / "model"), "base": str(options.model)}


def configuration(options: argparse.Namespace, precision: str, **training: Any) -> Config:
    values = {
        "max_steps": options.steps, "eval_steps": options.steps, "save_steps": options.steps, "padding_free": True,
        "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "per_device_eval_batch_size": 8,
        "learning_rate": options.learning_rate, "activation_checkpointing": False, "load_best_model_at_end": False,
    }  # fmt: skip
    sections = {"dataset": {"name": str(options.data)}, "model": {"name": str(options.model)}}
    return Config.model_validate({**sections, "training": {**values, "precision": precision, **training}})


def train(job: dict[str, Any], options: argparse.Namespace, precision: str, **training: Any) -> dict[str, Any]:
    if training:
        training |= {"eval_steps": 1, "save_steps": 1}
    config = configuration(options, precision, **training)
    name = f"{precision}-{config.training.max_steps}"
    job["output"] = str(job["root"] / name)
    run = {"experiment_name": name, "artifact_location": Settings().artifact_location, "run_name": name, "tags": {}}
    run |= {"config": config.model_dump(), "origins": {}, "dataset_name": "data", "dataset_digest": "0"}
    run["dataset_path"] = str(job["root"] / "data")
    files = {key: job[key] for key in ("tokens", "model", "base", "output")}
    values = {**files, "config": config.model_dump(), "fingerprint": name, "run": run}
    return run_step("train", values, QUIET, directory=Path(job["output"]))


def compare(base: Path, checkpoint: Path, options: argparse.Namespace) -> tuple[float, float]:
    """Share of the base's bfloat16 weights that such an update leaves as they are; share that the training has left."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    from finetuning.precision import lost_share

    disable_progress_bar()
    before = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    after = AutoModelForCausalLM.from_pretrained(checkpoint, dtype="auto").state_dict()
    pairs = [(weight.to(after[name].dtype), after[name]) for name, weight in before.named_parameters()]
    same = sum((was == now).sum().item() for was, now in pairs)
    return lost_share(before, options.learning_rate), same / sum(was.numel() for was, _ in pairs)


if __name__ == "__main__":
    main()
