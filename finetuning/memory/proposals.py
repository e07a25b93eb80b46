"""What to change when a training does not fit its GPU, and the refusal that says so."""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from config.sections import EIGHT_BIT_OPTIMIZERS, ModelSection, TrainingSection
from finetuning.errors import Failure
from finetuning.memory.gpus import GPUS, Gpu
from finetuning.memory.plan import Plan, plan
from finetuning.memory.states import BITSANDBYTES, TORCHAO

SHRINK_STEP = 256
"""Tokens by which a shorter max_length is looked for."""
PROCESSES = (2, 4, 8)
"""So many GPUs of one machine are looked at."""
NOTHING_FITS = (
    "Nothing here makes it fit, and this pipeline keeps nothing in host memory (no offload): take a smaller model."
)
LARGER_GPU = "on a larger GPU"
LEARNING_RATE = "training.learning_rate does not carry over to another precision: choose it anew"


class Proposal(NamedTuple):
    changes: dict[str, Any]
    """Dotted option -> value; LARGER_GPU -> its name."""
    training: TrainingSection
    plan: Plan

    def __str__(self) -> str:
        options = ", ".join(f"{name}={_shown(value)}" for name, value in self.changes.items())
        note = f"; {LEARNING_RATE}" if "training.precision" in self.changes else ""
        return f"{options} ({gb(self.plan.total)}{note})"


def check_memory(config: dict[str, Any], model: ModelSection, training: TrainingSection, gpu: Gpu, **how: Any) -> Plan:
    """The plan. Raises Failure when it does not fit, naming the setting and the nearest that does; NotUnderstood."""
    planned = plan(config, model, training, gpu, **how)
    if planned.fits:
        return planned
    nearest = next(proposals(config, model, training, gpu, **how), None)
    remedy = f"Would fit: {nearest}." if nearest else NOTHING_FITS
    where = gpu.name if training.num_processes == 1 else f"each of {training.num_processes} {gpu.name}"
    raise Failure(
        "out_of_memory",
        f"training.per_device_train_batch_size={training.per_device_train_batch_size} with training.max_length="
        f"{training.max_length} and training.precision={training.precision} needs {gb(planned.total)} of the "
        f"{gb(gpu.total_bytes)} of {where}, by the memory plan. {remedy}",
    )


def proposals(
    config: dict[str, Any], model: ModelSection, training: TrainingSection, gpu: Gpu, **how: Any
) -> Iterator[Proposal]:
    """Settings that fit, all with the same effective batch, nearest first. Raises NotUnderstood.

    A smaller micro-batch with more accumulation; with activation checkpointing; with an 8-bit optimizer; with weights
    in bfloat16; shorter sequences; and only when none of these does: both of the last, more processes, a larger GPU.
    """

    def first(candidates: Iterable[tuple[TrainingSection, Gpu]]) -> Iterator[Proposal]:
        for changed, on in candidates:
            if changed.num_processes > 1 and changed.optimizer[0] in EIGHT_BIT_OPTIMIZERS:
                continue  # refused: it could not go on from a checkpoint
            if (planned := plan(config, model, changed, on, **how)).fits:
                yield Proposal(
                    _changes(training, changed) | ({} if on == gpu else {LARGER_GPU: on.name}), changed, planned
                )
                return

    nearer: list[dict[str, Any]] = []
    for way in _ways(training):
        for found in first((changed, gpu) for changed in way):
            if not any(changes.items() <= found.changes.items() for changes in nearer):  # less would do
                nearer.append(found.changes)
                yield found
    if not nearer:
        smallest = _micro_batches(with_precision(_checkpointed(training), "bf16_stochastic_rounding"))[-1]
        larger = sorted((one for one in GPUS.values() if one.total_bytes > gpu.total_bytes), key=lambda one: one[1])
        yield from first((changed, gpu) for changed in _shorter(smallest))
        yield from first((changed, gpu) for changed in _more_processes(_checkpointed(training)))
        yield from first((changed, on) for changed in (training, smallest) for on in larger)


def _ways(training: TrainingSection) -> Iterator[list[TrainingSection]]:
    """Each way with the settings that are tried for it, the nearest first."""
    yield _micro_batches(training)[1:]
    if training.activation_checkpointing is False:
        training = _checkpointed(training)
        yield _micro_batches(training)
    if training.precision == "fp32" and training.optimizer[0] not in (*TORCHAO, *BITSANDBYTES):
        yield _micro_batches(training.model_copy(update={"optim": TORCHAO[0], "optim_args": None}))
    if training.precision != "bf16_stochastic_rounding":
        yield _micro_batches(with_precision(training, "bf16_stochastic_rounding"))
    yield _shorter(_micro_batches(training)[-1])


def with_precision(training: TrainingSection, precision: str) -> TrainingSection:
    """With the optimizer that the precision needs, if the one that is set is another's."""
    rounds = precision == "bf16_stochastic_rounding" and training.optim not in (None, *TORCHAO)
    changes = {"optim": None, "optim_args": None} if rounds else {}
    return training.model_copy(update={"precision": precision, **changes})


def _micro_batches(training: TrainingSection) -> list[TrainingSection]:
    """As it is, then smaller and smaller micro-batches with the same effective batch."""
    batch, accumulation = training.per_device_train_batch_size, training.gradient_accumulation_steps
    divisors = [divisor for divisor in range(batch, 0, -1) if batch % divisor == 0]
    names = "per_device_train_batch_size", "gradient_accumulation_steps"
    return [
        training.model_copy(update=dict(zip(names, (size, accumulation * batch // size), strict=True)))
        for size in divisors
    ]


def _checkpointed(training: TrainingSection) -> TrainingSection:
    return training.model_copy(update={"activation_checkpointing": training.activation_checkpointing or True})


def _shorter(training: TrainingSection) -> list[TrainingSection]:
    lengths = range((training.max_length - 1) // SHRINK_STEP * SHRINK_STEP, 0, -SHRINK_STEP)
    return [training.model_copy(update={"max_length": length}) for length in lengths]


def _more_processes(training: TrainingSection) -> list[TrainingSection]:
    """With as many as share out the effective batch evenly."""
    smallest = _micro_batches(training)[-1]
    batch = smallest.gradient_accumulation_steps * smallest.num_processes
    return [
        smallest.model_copy(update={"num_processes": number, "gradient_accumulation_steps": batch // number})
        for number in PROCESSES
        if number > training.num_processes and batch % number == 0
    ]


def _changes(before: TrainingSection, after: TrainingSection) -> dict[str, Any]:
    old, new = before.model_dump(), after.model_dump()
    return {f"training.{name}": value for name, value in new.items() if value != old[name]}


def _shown(value: Any) -> str:
    """As the command line takes it; 1 is no bool."""
    return str(value).lower() if isinstance(value, bool) else "null" if value is None else str(value)


def gb(size: int) -> str:
    return f"{size / 1e9:.1f} GB"
