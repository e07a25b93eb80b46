"""Seconds to write, to read and to hash a file below the storage root, and what that means for a large checkpoint.

python -m bench.hashing [--gib 1]
"""

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from config.settings import Settings
from finetuning.artifacts import file_digest

TRIES = 3
BLOCK_BYTES = 2**24
CHECKPOINT_GB = 48.3
"""4.02e9 parameters with two moments of Adam each, all in float32: 12 bytes a parameter."""


def write(path: Path, num_blocks: int, block: bytes) -> None:
    with path.open("wb") as file:
        for _ in range(num_blocks):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())


def read(path: Path) -> None:
    buffer = bytearray(BLOCK_BYTES)
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def best_seconds(action: Callable[[], object]) -> float:
    seconds = []
    for _ in range(TRIES):
        started = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def measure(folder: Path, num_blocks: int) -> dict[str, float]:
    """Seconds of each, the best of three. What is read was just written, so it comes from the page cache."""
    path, block = folder / "random", os.urandom(BLOCK_BYTES)
    actions = {
        "write, fsync": partial(write, path, num_blocks, block),
        "read": partial(read, path),
        "xxh3_128": partial(file_digest, path, "xxh3_128"),
        "sha256": partial(file_digest, path, "sha256"),
    }
    return {name: best_seconds(action) for name, action in actions.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gib", type=float, default=1, help="size of the file in GiB (default: 1)")
    num_blocks = max(1, round(parser.parse_args().gib * 2**30 / BLOCK_BYTES))
    gigabytes = num_blocks * BLOCK_BYTES / 1e9

    root = Settings().storage_root
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="bench-hashing-", dir=root) as folder:
        seconds = measure(Path(folder), num_blocks)

    whole = {name: taken / gigabytes * CHECKPOINT_GB for name, taken in seconds.items()}
    print(f"{gigabytes:.2f} GB, best of {TRIES}, read from the page cache\n")
    print(f"  {'':12}  {'seconds':>8}  {'GB/s':>6}  {f'{CHECKPOINT_GB} GB':>9}")
    for name, taken in seconds.items():
        print(f"  {name:12}  {taken:8.2f}  {gigabytes / taken:6.2f}  {whole[name]:7.0f} s")
    print(f"\nA checkpoint of a 4B model in float32 with Adam: written in {whole['write, fsync']:.0f} s,")
    print(f"hashed in {whole['xxh3_128']:.0f} s with xxh3_128 and in {whole['sha256']:.0f} s with sha256.")


if __name__ == "__main__":
    main()
