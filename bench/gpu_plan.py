"""What the memory plan says of a row of `bench.gpu`. The standard library only: the parent stays off the GPU."""

from types import SimpleNamespace
from typing import Any, NamedTuple

from bench.gpu_rows import Row, Scale
from finetuning.memory.gpus import GPUS
from finetuning.memory.plan import plan


class Planned(NamedTuple):
    """Bytes. All None when there is no plan, and `why` says why."""

    peak: int | None = None
    """What torch.cuda.max_memory_allocated should say."""
    total: int | None = None
    """With what is lost around it."""
    components: dict[str, int] | None = None
    why: str = ""


def planned(row: Row, size: Scale, gpu_name: str | None) -> Planned:
    if row.compiled or row.attention == "flex_attention":
        return Planned(why="no memory plan knows it")
    known = [gpu for name, gpu in GPUS.items() if name.split("-")[0] in (gpu_name or "").lower()]
    try:
        found = plan(size.config, model_section(row), training_section(row, size), (known or list(GPUS.values()))[0])
    except Exception as error:
        return Planned(why=f"memory plan: {type(error).__name__}: {error}")
    return Planned(found.peak, sum(found.components.values()), dict(found.components))


def model_section(row: Row) -> SimpleNamespace:
    """What `config.sections.ModelSection` says, without pydantic."""
    return SimpleNamespace(name="Qwen/Qwen3-4B", attn_implementation=row.attention)


def training_section(row: Row, size: Scale) -> SimpleNamespace:
    """What `config.sections.TrainingSection` says, without pydantic."""
    rounds = row.precision == "bf16_stochastic_rounding"
    optim_args = "bf16_stochastic_round=True" if rounds else None
    values: dict[str, Any] = {
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": row.accumulation,
        "max_length": row.max_length // size.shrink,
        "precision": row.precision,
        "weight_dtype": "float32" if row.precision == "fp32" else "bfloat16",
        "optim": row.optimizer,
        "optim_args": optim_args,
        "optimizer": (row.optimizer, optim_args),
        "bf16": True,
        "activation_checkpointing": row.checkpointing,
        "activation_checkpointing_kwargs": {"use_reentrant": False},
        "packing": row.packing,
        "padding_free": False,
        "num_processes": 1,
    }
    return SimpleNamespace(**values)
