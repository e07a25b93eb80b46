"""Checking, rendering and tokenising a dataset: ours against `load_dataset` and TRL's own preparation, in one run.

python -m bench.data [--data FILE] [--model DIRECTORY] [--rows 16000] [--gib 1]

Each way runs in a process of its own, imports included, a second time with what the first left behind. Then the memory
that a file of so many GiB takes. The sample's rows are repeated with a number in each, so that none is a duplicate.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from config.settings import PROJECT_ROOT
from finetuning.artifacts import file_digest

MAX_LENGTH = 2048


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.data", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--data", type=Path, default=PROJECT_ROOT / "samples" / "chat" / "train.jsonl")
    parser.add_argument("--model", type=Path, default=PROJECT_ROOT / "samples" / "model", help="with a tokenizer")
    parser.add_argument("--rows", type=int, default=16000)
    parser.add_argument("--gib", type=float, default=1.0, help="size of the file that memory is measured on; 0: none")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        print(f"data {options.data.name} {file_digest(options.data)[:16]}, {options.rows} rows of it")
        rows = [json.loads(line) for line in options.data.read_text().splitlines()]
        write(folder / "rows.jsonl", rows, options.rows, 2**62)
        found = {way: measured(way, folder, "rows.jsonl", options.model) for way in ("plain", "ours") for _ in "12"}
        first = {way: times[0] for way, times in TIMES.items()}
        again = TIMES["ours"][1] / first["ours"]
        print(f"ours / plain: {first['ours'] / first['plain']:.2f}; a second run of ours / its first: {again:.2f}")
        print(f"tokens to train on: {found['ours']['tokens']}, plain {found['plain']['tokens']}")
        if options.gib:
            count = write(folder / "large.jsonl", rows, 2**62, int(options.gib * 2**30))
            small = measured("check", folder, "rows.jsonl", options.model)["peak"]
            large = measured("check", folder, "large.jsonl", options.model)["peak"]
            sizes = [(folder / name).stat().st_size / 2**30 for name in ("rows.jsonl", "large.jsonl")]
            for size, peak in zip(sizes, (small, large), strict=True):
                print(f"rows of {size:.2f} GiB checked with a peak of {peak:.2f} GiB")
            print(f"the large file has {count} rows")


TIMES: dict[str, list[float]] = {}


def write(path: Path, rows: list[dict[str, Any]], most_rows: int, most_bytes: int) -> int:
    count = 0
    with path.open("w") as file:
        while count < most_rows and file.tell() < most_bytes:
            row = json.loads(json.dumps(rows[count % len(rows)]))
            row["messages"][0]["content"] += f" ({count})"
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
            count += 1
    return count


def measured(way: str, folder: Path, file: str, model: Path) -> dict[str, Any]:
    started = time.monotonic()
    command = [sys.executable, "-m", "bench.data_ways", way, str(folder), file, str(model)]
    done = subprocess.run(command, cwd=PROJECT_ROOT, text=True, capture_output=True, check=False)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    seconds = time.monotonic() - started
    TIMES.setdefault(way, []).append(seconds)
    result = json.loads(done.stdout.strip().splitlines()[-1])
    print(
        f"{way:<6} {len(TIMES[way])}. {seconds:6.1f} s  {result['cpu']:6.1f} CPU s  {result['peak']:.2f} GiB",
        flush=True,
    )
    return result


def usage() -> dict[str, float]:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return {"cpu": used.ru_utime + used.ru_stime, "peak": used.ru_maxrss / 2**20}


if __name__ == "__main__":
    main()
