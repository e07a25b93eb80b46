"""What a training needs of its model and of the disk, from counts alone."""

import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

from config.sections import Config
from finetuning.errors import Failure

BYTES = {"bfloat16": 2, "float32": 4}
OPTIMIZER_STATES = 2
"""AdamW keeps two moments a parameter, in the dtype of the weights."""


def check_fits(config: Config, model: dict[str, Any], directory: Path) -> None:
    """Refuse a training that its model or the disk cannot take. `model` is the manifest of a prepared model."""
    context, wanted = model["context_length"], config.training.max_length
    if context and wanted > context:
        raise Failure(
            "configuration",
            f"training.max_length={wanted} is beyond the {context} positions of {config.model.name} "
            f"(max_position_embeddings). Set it to {context} or less.",
        )
    needed, free = disk_bytes(config, model["num_parameters"]), free_bytes(directory)
    if free is not None and needed > free:
        raise Failure(
            "out_of_disk",
            f"FINETUNE_STORAGE_ROOT: {directory} needs {needed / 2**30:.1f} GiB for "
            f"{config.training.save_total_limit + 1} checkpoints and two copies of the model, and {free / 2**30:.1f} "
            "GiB are free. Free some, lower training.save_total_limit, or set another root.",
        )


def disk_bytes(config: Config, num_parameters: int) -> int:
    """Most bytes on disk at once: one checkpoint more than are kept, because the Trainer deletes the old one after it
    wrote the new one; then the bfloat16 model directory and its copy in the volume. FSDP2 writes the weights twice,
    for `from_pretrained` and for itself."""
    copies = (1 if config.training.num_processes == 1 else 2) + OPTIMIZER_STATES
    checkpoint = num_parameters * BYTES[config.training.weight_dtype] * copies
    return (config.training.save_total_limit + 1) * checkpoint + 2 * num_parameters * BYTES["bfloat16"]


def free_bytes(path: Path) -> int | None:
    """Free bytes of the file system that `path` will be on; None when it cannot be asked."""
    with suppress(OSError):
        while not path.exists() and path != path.parent:
            path = path.parent
        return shutil.disk_usage(path).free
    return None
