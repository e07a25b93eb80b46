"""The plan in words: its table, the grid, and what each precision would take."""

from typing import Any

from config.sections import ModelSection, TrainingSection
from finetuning.memory.gpus import Gpu
from finetuning.memory.plan import Plan, plan
from finetuning.memory.proposals import gb, with_precision

PRECISIONS = {
    "fp32": "no update is lost",
    "bf16_stochastic_rounding": "small updates survive on average",
    "bf16": "updates below half of the last digit are lost",
}
GRID_LENGTHS, GRID_BATCHES = (1024, 2048, 4096, 8192), (1, 2, 4)
Grid = dict[tuple[int, int], Plan]
"""max_length and micro-batch -> plan."""


def table(planned: Plan) -> list[str]:
    """One line a component, in 1e9 bytes."""
    rows = [(size, name) for name, size in planned.components.items() if size]
    rows += [(planned.total, "total"), (planned.gpu.total_bytes, planned.gpu.name)]
    checkpointing = "with" if planned.checkpointing else "without"
    head = f"{planned.parameters:,} parameters, {checkpointing} activation checkpointing; peak: {planned.moment}"
    return [head, "1e9 bytes", *(f"{size / 1e9:9.2f}  {name}" for size, name in rows)]


def precisions(
    config: dict[str, Any], model: ModelSection, training: TrainingSection, gpu: Gpu, **how: Any
) -> list[str]:
    """A line for the precision that is set, with the reason for it, then one for each other. Raises NotUnderstood."""
    lines = []
    for precision in sorted(PRECISIONS, key=lambda name: name != training.precision):
        planned = plan(config, model, with_precision(training, precision), gpu, **how)
        states = sum(planned.components[name] for name in ("weights", "gradients", "optimizer state"))
        each = states * training.num_processes / planned.parameters
        instead = "" if precision == training.precision else " instead"
        lines.append(
            f"precision {precision}{instead}: {PRECISIONS[precision]}; {each:.1f} bytes a parameter, "
            f"{gb(planned.total)} in all"
        )
    return lines


def grid(config: dict[str, Any], model: ModelSection, training: TrainingSection, gpu: Gpu, **how: Any) -> Grid:
    cells = [(length, batch) for length in GRID_LENGTHS for batch in GRID_BATCHES]
    return {
        (length, batch): plan(
            config,
            model,
            training.model_copy(update={"max_length": length, "per_device_train_batch_size": batch}),
            gpu,
            **how,
        )
        for length, batch in cells
    }


def grid_table(cells: Grid, training: TrainingSection, gpu: Gpu) -> list[str]:
    """A line a max_length, a column a micro-batch, totals in 1e9 bytes; `!` where it does not fit."""
    lines = [f"1e9 bytes of {gpu.total_bytes / 1e9:.1f} on {gpu.name}, precision {training.precision}; ! does not fit"]
    lines.append("max_length " + "".join(f"{f'batch {batch}':>10}" for batch in GRID_BATCHES))
    for length in GRID_LENGTHS:
        row = (cells[length, batch] for batch in GRID_BATCHES)
        totals = "".join(f"{cell.total / 1e9:9.1f}{' ' if cell.fits else '!'}" for cell in row)
        lines.append(f"{length:10} {totals}".rstrip())
    return lines
