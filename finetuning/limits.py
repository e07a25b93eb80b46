"""What a training needs of its model, of the disk and of the GPU, from counts alone."""

import logging
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

from config.sections import Config
from finetuning.errors import Failure
from finetuning.memory.architecture import NotUnderstood, read_config
from finetuning.memory.gpus import visible_gpu
from finetuning.memory.plan import plan
from finetuning.memory.proposals import check_memory
from finetuning.memory.report import precisions, table
from finetuning.memory.states import BYTES, state_bytes_on_disk


def check_fits(config: Config, model: dict[str, Any], directory: Path) -> None:
    """Refuse a training that its model or the disk cannot take. `model` is the manifest of a prepared model."""
    check_context(config, model["context_length"])
    check_disk(config, model["num_parameters"], directory)


def check_context(config: Config, context: int | None) -> None:
    """Raises Failure when a conversation may be longer than the model has positions."""
    wanted = config.training.max_length
    if context and wanted > context:
        raise Failure(
            "configuration",
            f"training.max_length={wanted} is beyond the {context} positions of {config.model.name} "
            f"(max_position_embeddings). Set it to {context} or less.",
        )


def check_disk(config: Config, num_parameters: int, directory: Path) -> tuple[int, int | None]:
    """Bytes that a training in `directory` needs, and those that are free there. Raises Failure when they are fewer."""
    needed, free = disk_bytes(config, num_parameters), free_bytes(directory)
    if free is not None and needed > free:
        raise Failure(
            "out_of_disk",
            f"FINETUNE_STORAGE_ROOT: {directory} needs {needed / 2**30:.1f} GiB for "
            f"{config.training.save_total_limit + 1} checkpoints and two copies of the model, and {free / 2**30:.1f} "
            "GiB are free. Free some, lower training.save_total_limit, or set another root.",
        )
    return needed, free


def check_gpu(config: Config, base: Path, logger: logging.Logger | logging.LoggerAdapter) -> None:
    """Log the memory plan on the GPU that this process sees, and refuse a training that it cannot hold: one whose peak
    is more than the GPU has. What the plan only assumes on top of it (CUDA's own, fragmentation) is warned about.
    Nothing is checked where there is no GPU, or for a model in `base` whose memory is not understood. Raises Failure.
    """
    gpu = visible_gpu()
    if not gpu:
        return
    try:
        what = read_config(base), config.model, config.training, gpu
        planned = plan(*what)
        for line in (*table(planned), *precisions(*what)):
            logger.info(line)
        if planned.peak > gpu.total_bytes:
            check_memory(*what)
        elif not planned.fits:
            logger.warning(
                "this may be more than %s has: the peak fits, with what is lost around it it does not", gpu.name
            )
    except NotUnderstood as unknown:
        logger.info("no memory plan: %s", unknown)


def disk_bytes(config: Config, num_parameters: int) -> int:
    """Most bytes on disk at once: one checkpoint more than are kept, because the Trainer deletes the old one after it
    wrote the new one; then the bfloat16 model directory and its copy in the volume. FSDP2 writes the weights twice,
    for `from_pretrained` and for itself."""
    weights = num_parameters * BYTES[config.training.weight_dtype] * (1 if config.training.num_processes == 1 else 2)
    checkpoint = weights + state_bytes_on_disk(config.training, num_parameters)
    return (config.training.save_total_limit + 1) * checkpoint + 2 * num_parameters * BYTES["bfloat16"]


def free_bytes(path: Path) -> int | None:
    """Free bytes of the file system that `path` will be on; None when it cannot be asked."""
    with suppress(OSError):
        while not path.exists() and path != path.parent:
            path = path.parent
        return shutil.disk_usage(path).free
    return None
