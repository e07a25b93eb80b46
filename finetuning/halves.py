"""The two halves of the test split: on one the trainer chooses its checkpoint, on the other the gate judges the result.

What has chosen a checkpoint flatters it, so the gate sees other rows. A row's half is a bit of its content's hash: it
stays where it is when rows are added, and a row that one version was judged by never chooses another's checkpoint.
"""

import json
from array import array
from pathlib import Path
from typing import Any

import xxhash

HALVES_VERSION = 1
"""Part of the fingerprints of tokens and evaluations: raise it when a row may change sides."""

SMALLEST_SHARE = 0.25
"""With few rows the bit may leave a side empty: then the rows in the order of their hashes are cut in the middle."""


def gate_rows(path: Path, takes_half: bool = True) -> list[bool]:
    """For each row of a split, as `finetuning.data` writes it, whether the gate has it. A single row chooses the
    checkpoint, and the gate has none; it also has none when it asks for nothing (`takes_half` False)."""
    hashes = array("Q")
    with path.open() as lines:
        for line in lines:
            row = {name: value for name, value in json.loads(line).items() if name != "where"}
            content = json.dumps(row, ensure_ascii=False, sort_keys=True)
            hashes.append(xxhash.xxh3_64_intdigest(content.encode()))
    if not takes_half:
        return [False] * len(hashes)
    mask = [bool(value & 1) for value in hashes]
    if min(sum(mask), len(mask) - sum(mask)) < SMALLEST_SHARE * len(mask):
        ordered = sorted(range(len(hashes)), key=lambda index: (hashes[index], index))
        gate = set(ordered[(len(ordered) + 1) // 2 :])
        mask = [index in gate for index in range(len(hashes))]
    return mask


def read_gate_rows(path: Path, takes_half: bool = True) -> list[dict[str, Any]]:
    """The rows to evaluate on: the gate's, or all when it takes none."""
    mask = gate_rows(path, takes_half)
    with path.open() as lines:
        return [json.loads(line) for line, gate in zip(lines, mask, strict=True) if gate or not takes_half]
