"""The whole job, ours against the notebook's: seconds, tokens a second, memory, and the held-out loss that they buy.

python -m bench.training [--data FILE] [--model DIRECTORY] [--rows N] [--steps 50] [--rounds 1] [-- --section.name ...]

Three notebooks: as it was; with its weights in our dtype; and evaluating on as many rows as we do. Ours is the flow,
with the options that are given last. A job is data, tokens, training with its evaluations and checkpoints, saving and
registration; what only we do (preflight, evaluation of base and result, proof) and Prefect's temporary server are told
apart. All models are judged by `finetuning.evaluate` on the same held-out conversations.
"""

import argparse
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench import steps
from config.settings import PROJECT_ROOT
from finetuning.artifacts import file_digest, read_json, write_json

OURS = ["--training.per_device_train_batch_size", "1", "--training.gradient_accumulation_steps", "8",
        "--training.per_device_eval_batch_size", "1", "--training.activation_checkpointing", "auto"]  # fmt: skip
"""The batch of `qwen3-4b`; activations are kept where they fit, as they do here."""
JOB_STEPS = {"load_and_split", "prepare_model", "tokenize", "train", "save_checkpoint", "publish", "register"}
MAX_LENGTH = 1024
"""What TRL leaves the notebook with; ours cuts at the same, so that both have the same work."""
LIKE_THE_NOTEBOOK = ["--training.max_length", str(MAX_LENGTH), "--training.bf16", "true",
                     "--evaluation.exact_match_rows", "0",
                     "--evaluation.max_new_tokens", "16"]  # fmt: skip
"""And what the recipe `smoke`, through which it runs on a CPU, has otherwise."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.training", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--data", type=Path, default=PROJECT_ROOT / "samples" / "chat" / "train.jsonl")
    parser.add_argument("--model", type=Path, default=PROJECT_ROOT / "samples" / "model")
    parser.add_argument("--rows", type=int, help="of the data; all without it")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--learning_rate", type=float, default=2e-5)
    parser.add_argument("--rounds", type=int, default=1, help="each way so often, one after the other")
    parser.add_argument("ours", nargs="*", help="options of the flow, after --")
    options = parser.parse_args()
    for path in (options.data, options.model / "model.safetensors"):
        print(f"{path.parent.name}/{path.name} {file_digest(path)[:16]}")
    print(f"{options.steps} steps of 8 conversations, learning rate {options.learning_rate}")
    with tempfile.TemporaryDirectory(prefix="finetune-bench-") as temporary:
        found: dict[str, list[dict[str, Any]]] = {}
        options.data = split(options.data, options.rows, Path(temporary) / "data")
        for number in range(options.rounds):
            folder = Path(temporary) / str(number)
            ours = found.setdefault("ours", [])
            ours.append(flow(folder / "ours", options))
            rows = ours[0]["eval_rows"]
            for way, dtype, eval_rows in (
                ("notebook", "bfloat16", None),
                ("notebook, our dtype", "float32", None),
                ("notebook, our dtype and rows", "float32", rows),
            ):
                found.setdefault(way, []).append(notebook(folder / way.replace(", ", "-"), dtype, eval_rows, options))
        table(found, judge(found, options))


def split(data: Path, count: int | None, folder: Path) -> Path:
    """So many rows of it, a tenth of them set aside, the same for all ways."""
    folder.mkdir()
    rows = data.read_text().splitlines(keepends=True)
    random.Random(42).shuffle(rows)
    rows = rows[:count]
    for name, part in (("test", rows[: len(rows) // 10]), ("train", rows[len(rows) // 10 :])):
        (folder / f"{name}.jsonl").write_text("".join(part))
    return folder


def flow(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Our way: the seconds of its steps, and what its training says of itself."""
    given = ["--model.name", str(options.model), "--dataset.name", str(options.data), *LIKE_THE_NOTEBOOK, *OURS]
    given += ["--training.max_steps", str(options.steps), "--training.learning_rate", str(options.learning_rate)]
    for name in ("eval_steps", "save_steps"):
        given += [f"--training.{name}", str(options.steps // 2)]
    before = cpu_seconds()
    took = steps.run(folder, [*given, *options.ours])
    result = read_json(next(folder.glob("trainings/[!.]*/training.json")))["result"]
    seconds = {name: seconds for name, _, seconds in took}
    report = read_json(next(folder.glob("tokens/[!.]*/report.json")))
    return {
        "seconds": sum(seconds.get(name, 0) for name in JOB_STEPS),
        "apart": seconds["all"] - sum(seconds.get(name, 0) for name in JOB_STEPS),
        "cpu": cpu_seconds() - before,
        "train_seconds": result["train_seconds"],
        "shares": result["time_shares"],
        "tokens": result["num_tokens"],
        "peak_gib": result["peak_memory_gib"],
        "eval_rows": report["test"]["rows"],
        "model": next(folder.glob("model-directories/[!.]*")),
        "root": folder,
    }


def notebook(folder: Path, dtype: str, eval_rows: int | None, options: argparse.Namespace) -> dict[str, Any]:
    folder.mkdir(parents=True)
    job = {"folder": str(folder), "data": str(options.data), "model": str(options.model), "dtype": dtype}
    job |= {"steps": options.steps, "learning_rate": options.learning_rate, "eval_rows": eval_rows}
    write_json(folder / "job.json", job)
    before, started = cpu_seconds(), time.monotonic()
    command = [sys.executable, "-m", "bench.training_seed", str(folder / "job.json")]
    done = subprocess.run(command, cwd=PROJECT_ROOT, text=True, capture_output=True, check=False)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    result = read_json(folder / "result.json")
    return result | {"seconds": time.monotonic() - started, "cpu": cpu_seconds() - before}


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def judge(found: dict[str, list[dict[str, Any]]], options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """The loss of each way's model on the rows that ours was gated on, and of the base."""
    root, prepared = found["ours"][0]["root"], next(found["ours"][0]["root"].glob("models/[!.]*"))
    models = {"base": {"weights": str(options.model), "prepared": str(prepared)}}
    for way, runs in found.items():
        models[way] = {"weights": str(runs[0]["model"]), "prepared": str(prepared)}
    job = {
        "models": {way: {**files, "fingerprint": way} for way, files in models.items()},
        "registered_model_name": "main.default.nothing",
        "evaluations": str(root / "judged"),
        "rows": str(next(root.glob("datasets/[!.]*")) / "test.jsonl"),
        "rows_fingerprint": "bench",
        "section": {"sample_rows": 0},
        "training": {"max_length": MAX_LENGTH},
        "trust_remote_code": False,
    }
    write_json(root / "judge.json", job)
    environment = {**os.environ, "FINETUNE_STORAGE_ROOT": str(root), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "finetuning.evaluate", str(root / "judge.json")]
    done = subprocess.run(command, cwd=PROJECT_ROOT, env=environment, text=True, capture_output=True, check=False)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    return read_json(root / "result.json")["result"]["scores"]


def table(found: dict[str, list[dict[str, Any]]], scores: dict[str, dict[str, Any]]) -> None:
    print(f"{'':<30}{'job s':>8}{'CPU s':>8}{'train s':>9}{'evaluation':>12}{'tokens':>9}{'tokens/s':>10}"
          f"{'peak GiB':>10}{'loss':>9}")  # fmt: skip
    print(f"{'base':<30}{'':>66}{scores['base']['loss']:>9.4f}")
    for way, runs in found.items():
        for run in runs:
            rate = run["tokens"] / run["train_seconds"]
            print(f"{way:<30}{run['seconds']:>8.1f}{run['cpu']:>8.1f}{run['train_seconds']:>9.1f}"
                  f"{run['shares']['evaluation']:>12.0%}{run['tokens']:>9}{rate:>10.0f}{run['peak_gib']:>10.2f}"
                  f"{scores[way]['loss']:>9.4f}")  # fmt: skip
    print(f"\nours had {found['ours'][0]['apart']:.0f} s apart from the job: preflight, evaluation, proof, server")
    best = {way: min(run["seconds"] for run in runs) for way, runs in found.items()}
    rates = {way: max(run["tokens"] / run["train_seconds"] for run in runs) for way, runs in found.items()}
    for way in list(found)[1:]:
        print(f"ours / {way}: {best['ours'] / best[way]:.2f} of its seconds, {rates['ours'] / rates[way]:.2f} of its "
              "tokens a second")  # fmt: skip


if __name__ == "__main__":
    main()
