"""Packaging and registering a model: ours against `log_model` of loaded objects, in one run.

python -m bench.packaging [--million-parameters 120]

The model is a Qwen3 of random weights in bfloat16, two bytes a parameter. Each way runs in a process of its own, with
an SQLite registry and an artifact store of its own. Counted from when everything is imported and the database is there:
peak memory (VmHWM less VmRSS), bytes that the kernel counts as written (also of files that are deleted again), and
blocks of new files that stay (hard links once, and not at all when the file was there before).
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from config.settings import PROJECT_ROOT

NAME = "main.default.packaged"
WAYS = ("log_model", "ours")
MEMORY_GOAL, DISK_GOAL = 0.2, 1.0
"""Of the model's bytes. The disk's has a small part on top: tokenizer, MLmodel and the database's rows."""
SMALL_FILES = 0.01


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.packaging", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--million-parameters", type=float, default=120)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        step("make", folder, str(options.million_parameters))
        size = sum(file.stat().st_size for file in (folder / "model").glob("*.safetensors"))
        print(f"model of {size / 1e6:.0f} MB\n\n{'way':<10} {'extra memory':>20} {'written':>20} {'stays':>20} seconds")
        found = {way: measured(way, folder, size) for way in WAYS}
    shares = {column: found["log_model"][column] / found["ours"][column] for column in ("memory", "written", "seconds")}
    print("\nlog_model / ours: " + ", ".join(f"{column} {share:.1f}x" for column, share in shares.items()))
    ours = found["ours"]
    met = {
        f"peak extra memory below {MEMORY_GOAL}x": ours["memory"] < MEMORY_GOAL * size,
        f"written at most {DISK_GOAL:g}x": ours["written"] <= (DISK_GOAL + SMALL_FILES) * size,
    }
    for goal, reached in met.items():
        print(f"{'met' if reached else 'MISSED'}: {goal}")
    sys.exit(not all(met.values()))


def measured(way: str, folder: Path, size: int) -> dict[str, float]:
    (folder / way / "tmp").mkdir(parents=True)
    before = inodes(folder)
    found = step(way, folder)
    found["stays"] = sum(blocks for inode, blocks in inodes(folder).items() if inode not in before)
    columns = [f"{found[name] / 1e6:9.1f} MB = {found[name] / size:4.2f}x" for name in ("memory", "written", "stays")]
    print(f"{way:<10} {' '.join(f'{column:>20}' for column in columns)} {found['seconds']:7.1f}", flush=True)
    return found


def step(way: str, folder: Path, *arguments: str) -> dict[str, float]:
    """Run `way` in a process of its own, and return what its last line says."""
    command = [sys.executable, "-c", f"import bench.packaging as b; b.{way}(*{(str(folder), *arguments)!r})"]
    environment = {**os.environ, "TMPDIR": str(folder / way / "tmp"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=PROJECT_ROOT, env=environment, text=True, capture_output=True, check=False)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    return json.loads(done.stdout.strip().splitlines()[-1])


def inodes(folder: Path) -> dict[int, int]:
    """Inode -> bytes of its blocks, of every file below."""
    files = [path.stat() for path in folder.rglob("*") if path.is_file()]
    return {file.st_ino: file.st_blocks * 512 for file in files}


class Start(NamedTuple):
    rss: int
    written: int
    time: float


def start() -> Start:
    return Start(_proc("status", "VmRSS") * 1024, _proc("io", "write_bytes"), time.monotonic())


def show_since(begin: Start) -> None:
    peak, written = _proc("status", "VmHWM") * 1024, _proc("io", "write_bytes")
    seconds = time.monotonic() - begin.time
    print(json.dumps({"memory": peak - begin.rss, "written": written - begin.written, "seconds": seconds}))


def _proc(file: str, name: str) -> int:
    """A number of /proc/self. ru_maxrss would not do: a new process inherits the peak of its parent."""
    lines = dict(line.split(":") for line in Path("/proc/self", file).read_text().splitlines())
    return int(lines[name].split()[0])


def make(folder: str, million_parameters: str) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from finetuning.export import MAX_SHARD_SIZE

    sample, output = PROJECT_ROOT / "samples" / "model", Path(folder) / "model"
    config = AutoConfig.from_pretrained(sample, hidden_size=1024, intermediate_size=3072, num_hidden_layers=1)
    config.update({"head_dim": 128, "num_attention_heads": 8, "num_key_value_heads": 4})
    layer = 1024 * 1024 * 2 + 1024 * 512 * 2 + 3 * 1024 * 3072
    config.num_hidden_layers = round(float(million_parameters) * 1e6 / layer) or 1
    config.layer_types = ["full_attention"] * config.num_hidden_layers
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(
        output, max_shard_size=MAX_SHARD_SIZE
    )
    AutoTokenizer.from_pretrained(sample).save_pretrained(output)
    for file in output.iterdir():
        file.chmod(0o644)  # as finetuning.export leaves them
    print(json.dumps({}))


def database(folder: Path) -> tuple[str, str]:
    """URI of a new database and the id of a run in it, which is the active one."""
    import mlflow

    uri = f"sqlite:///{folder}/mlflow.db"
    mlflow.set_tracking_uri(uri)
    mlflow.set_registry_uri(uri)
    mlflow.set_experiment(experiment_id=mlflow.create_experiment("packaging", (folder / "artifacts").as_uri()))
    return uri, mlflow.start_run().info.run_id


def metadata() -> dict[str, Any]:
    from finetuning.packaging import CHAT_TASK

    return {"task": CHAT_TASK, "pretrained_model_name": "Qwen/Qwen3-4B"}


def log_model(folder: str) -> None:
    """As the notebook does it, but with requirements named: without, it asks for torchvision."""
    import mlflow.transformers
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline  # noqa: F401

    from finetuning.packaging import CHAT_TASK

    database(Path(folder) / "log_model")
    directory = Path(folder) / "model"
    begin = start()
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    mlflow.transformers.log_model(
        transformers_model={"model": model, "tokenizer": tokenizer},
        name="model",
        task=CHAT_TASK,
        registered_model_name=NAME,
        metadata=metadata(),
        pip_requirements=["mlflow", "torch", "transformers"],
    )
    show_since(begin)


def ours(folder: str) -> None:
    import mlflow.transformers  # noqa: F401
    import torch  # noqa: F401
    from transformers import AutoTokenizer, pipeline  # noqa: F401

    from finetuning.packaging import CHAT_TASK, package_model
    from finetuning.registry import register_version

    own = Path(folder) / "ours"
    uri, run_id = database(own)
    begin = start()
    package = package_model(Path(folder) / "model", own / "tmp" / "package", task=CHAT_TASK, metadata=metadata())
    register_version(
        package,
        name=NAME,
        run_id=run_id,
        fingerprint="f1",
        tracking_uri=uri,
        registry_uri=uri,
        tags={},
        description="Random weights.",
    )
    show_since(begin)


if __name__ == "__main__":
    main()
