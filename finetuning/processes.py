"""One of the processes that train together: which one it is, what it agrees on with the others, how it is sharded.

The first one (rank 0) keeps the books: lock, state, MLflow run, manifests, progress, result. With
training.num_processes=1 nothing here imports torch.distributed.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from config.sections import TrainingSection
from finetuning.artifacts import read_json
from finetuning.errors import Failure

NUM_PROCESSES = "FINETUNE_NUM_PROCESSES"
"""Set by `finetuning.group` for its processes; RANK alone may stand in the environment for other reasons."""
RESULT = "result.json"
STEP_TIMEOUT = timedelta(minutes=30)
"""Longest wait of one process for another in a step: while the first one writes a checkpoint, say. transformers' own
value; torch's for GPUs is 10 minutes."""
SHARE_TIMEOUT = timedelta(days=30)
"""The others wait for the first one as long as it waits for the lock of another run. One that dies is noticed at once
by its connections, and by the group."""


def count() -> int:
    return int(os.environ.get(NUM_PROCESSES, 1))


def rank() -> int:
    """Number of this process in the group; the first one, or the only one, is 0."""
    return int(os.environ["RANK"]) if count() > 1 else 0


def result_file(directory: Path) -> Path:
    """Where this process leaves its result. A group exits with 1 whatever happened, so each has one of its own."""
    return directory / (f"result-{rank()}.json" if rank() else RESULT)


def reports(directory: Path) -> list[dict[str, Any]]:
    """What processes other than the first failed with, the earliest one first: the later ones may only have lost it."""
    return sorted((read_json(file) for file in directory.glob("result-*.json")), key=lambda report: report["time"])


@contextmanager
def as_one(directory: Path) -> Iterator[None]:
    """In the first process: when another one fails, that is the failure, and not the connection that broke."""
    try:
        yield
    except Exception:
        if count() > 1 and (failed := reports(directory)):
            raise Failure(failed[0]["kind"], failed[0]["message"]) from None
        raise


def join(num_processes: int) -> None:
    """Meet the others. Raises Failure when this is not as many processes as the job asks for."""
    if num_processes != count():
        raise Failure(
            "configuration",
            f"training.num_processes={num_processes}, and {count()} was started. By hand: python -m finetuning.group "
            f"{num_processes} finetuning.train JOB.json",
        )
    if num_processes == 1:
        return
    import torch
    from torch import distributed

    global _group
    # Before transformers does it, which would give the GPUs a group that cannot carry what is on the CPU.
    distributed.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo", timeout=STEP_TIMEOUT)
    _group = distributed.new_group(backend="gloo", timeout=SHARE_TIMEOUT)


_group: Any = None
"""For what is agreed on the CPU, beside the group that the tensors of the training go through."""


def share(value: Any) -> list[Any]:
    """The value of every process, by rank; all of them call it, and none goes on before the last one has."""
    if count() == 1:
        return [value]
    from torch import distributed

    values = [None] * count()
    distributed.all_gather_object(values, value, group=_group)
    return values


def check_devices(num_processes: int) -> None:
    """Refuse a number of processes that does not fit the visible GPUs. Raises Failure.

    With several GPUs and one process the Trainer would take them all by nn.DataParallel: other losses, another batch.
    """
    import torch

    visible = torch.cuda.device_count()
    if num_processes == 1 and visible > 1:
        raise Failure(
            "configuration",
            f"{visible} GPUs are visible and training.num_processes=1: set CUDA_VISIBLE_DEVICES to one of them, or "
            f"training.num_processes={visible}.",
        )
    if 0 < visible < num_processes:
        raise Failure(
            "configuration",
            f"{visible} {'GPU is' if visible == 1 else 'GPUs are'} visible and training.num_processes={num_processes}: "
            f"make more visible by CUDA_VISIBLE_DEVICES, or set training.num_processes={visible}.",
        )


def num_gpus() -> int:
    """GPUs that the training works on."""
    import torch

    return min(count(), torch.cuda.device_count())


def options(training: TrainingSection, values: dict[str, Any]) -> dict[str, Any]:
    """`values` for `SFTConfig` as several processes need them; as they are for one.

    On GPUs the weights, gradients and optimizer states are sharded (FSDP2): DDP holds all of them on each GPU, and the
    gradients twice. On the CPU transformers turns FSDP into DDP without a word, so there it is plain DDP.
    """
    if training.num_processes == 1:
        return values
    import torch

    # The loss is the mean over the tokens of all processes, as if one had the whole batch.
    values = {**values, "average_tokens_across_devices": True, "ddp_find_unused_parameters": False}
    return {**values, **_fsdp(training, values)} if torch.cuda.is_available() else values


def _fsdp(training: TrainingSection, values: dict[str, Any]) -> dict[str, Any]:
    return {
        "fsdp": True,
        "fsdp_config": {
            "version": 2,
            "reshard_after_forward": True,  # what full_shard was in version 1
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "state_dict_type": "FULL_STATE_DICT",  # a checkpoint is what `from_pretrained` loads
            # transformers refuses the Trainer's own beside FSDP's, and gathers each layer twice with it (#30404).
            "activation_checkpointing": bool(values["activation_checkpointing"]),
        },
        "activation_checkpointing": False,
        # Under autocast accelerate makes float32 of all sharded weights; bfloat16 weights compute in bfloat16 as it is.
        "bf16": values["bf16"] and training.precision == "fp32",
    }
