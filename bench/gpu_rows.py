"""What `bench.gpu` measures: the rows, their model, and conversations of the lengths of real ones. No torch in here."""

import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

MEDIAN_LENGTH, SPREAD, LENGTH_SEED = 1200, 0.4, 5
"""Of the log-normal distribution that lengths are drawn from. As in 140 rows of Capybara about two thirds are longer
than 1024 tokens, and cutting them there loses a quarter of all tokens; at 2048 it loses 2 %."""
CONVERSATION_LENGTH = 2048
"""Tokens that conversations are cut to before they are packed."""


class Row(NamedTuple):
    """One training, by its settings; the defaults are the recipe `qwen3-4b`."""

    name: str
    precision: str = "fp32"
    optimizer: str = "adamw_torch_fused"
    max_length: int = 2048
    accumulation: int = 8
    """Micro-batches of one sequence each that make an optimizer step."""
    packing: bool = False
    checkpointing: bool = True
    attention: str = "sdpa"
    compiled: bool = False
    evaluates: bool = False
    """Whether the forward pass alone is timed as well, a conversation at a time."""
    needs: tuple[str, ...] = ()
    """Packages that it cannot do without."""
    gpu_only: bool = False


ROUNDING = Row(
    "stochastic-rounding", precision="bf16_stochastic_rounding", optimizer="adamw_torch_8bit", needs=("torchao",)
)
PACKED_8192 = Row("packing-8192", max_length=8192, accumulation=2, packing=True)
TRAININGS = (
    Row("recipe", evaluates=True),
    Row("notebook", precision="bf16", optimizer="adamw_torch", max_length=1024, evaluates=True),
    Row("packing-2048", packing=True),
    PACKED_8192,
    Row("no-checkpointing", checkpointing=False),
    ROUNDING,
    ROUNDING._replace(name="rounding-no-checkpointing", checkpointing=False),
    PACKED_8192._replace(
        name="packing-8192-flash", attention="flash_attention_2", needs=("flash_attn",), gpu_only=True
    ),
    Row("compile", compiled=True, gpu_only=True),
    PACKED_8192._replace(name="packing-8192-flex", attention="flex_attention", gpu_only=True),
)
CHECKS = (
    Row("out-of-memory", gpu_only=True),
    Row("isolation-sdpa"),
    Row("isolation-eager", attention="eager"),
    Row("isolation-flash", attention="flash_attention_2", needs=("flash_attn",), gpu_only=True),
)
ROWS = {row.name: row for row in (*TRAININGS[:2], *CHECKS, *TRAININGS[2:])}
"""In the order in which they run: what matters most first, because time may run out."""


class Scale(NamedTuple):
    """How large the model and how long a row is: on a CPU as little as shows that the script works."""

    config: dict[str, Any]
    shrink: int
    """Lengths are divided by this."""
    warm_up: int
    """Optimizer steps before the clock starts."""
    steps: int
    """Optimizer steps that are measured."""


TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 512} | {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


def scale(device: str) -> Scale:
    """`device` is `cuda` or `cpu`."""
    config = json.loads(Path(__file__).with_name("qwen3-4b-config.json").read_text())
    return Scale(config, 1, 2, 4) if device == "cuda" else Scale(config | TINY, 32, 1, 1)


def conversations(limit: int, shrink: int) -> Iterator[int]:
    """Lengths in tokens without end, the same ones each time, cut to `limit`."""
    drawn = random.Random(LENGTH_SEED)
    while True:
        yield min(limit, max(2, round(drawn.lognormvariate(math.log(MEDIAN_LENGTH), SPREAD) / shrink)))


def sequences(row: Row, count: int, shrink: int) -> list[list[int]]:
    """The lengths of the conversations in each of `count` sequences: one, or as many as are packed into it.

    Of the packed the fullest, and those last: the memory plan is of full ones.
    """
    limit = row.max_length // shrink
    lengths = conversations(min(limit, CONVERSATION_LENGTH // shrink), shrink)
    if not row.packing:
        return [[next(lengths)] for _ in range(count)]
    bins: list[list[int]] = []
    wanted: list[int] = []
    while len([group for group in bins if sum(group) > 0.9 * limit]) < count:
        wanted += [next(lengths) for _ in range(count)]
        bins = packed(wanted, limit)
    return sorted(bins, key=sum)[-count:]


def packed(lengths: list[int], limit: int) -> list[list[int]]:
    """Best fit, the longest first, as TRL's `bfd`."""
    bins: list[list[int]] = []
    for length in sorted(lengths, reverse=True):
        fitting = [group for group in bins if sum(group) + length <= limit]
        if fitting:
            max(fitting, key=sum).append(length)
        else:
            bins.append([length])
    return bins


def model_flops(config: dict[str, Any], parameters: int, lengths: list[int]) -> int:
    """Floating-point operations of forward and backward, without what is recomputed or masked: six a parameter and
    token, and in causal attention a token sees half of its conversation. A tied embedding counts as the head."""
    attention = 12 * config["num_hidden_layers"] * config["num_attention_heads"] * config["head_dim"]
    return sum(length * (6 * parameters + attention * length // 2) for length in lengths)
