"""The plan: what one GPU holds at the peak of a training step."""

from typing import TYPE_CHECKING, Any, NamedTuple

from finetuning.memory import moments
from finetuning.memory.activations import is_masked
from finetuning.memory.architecture import Architecture, NotUnderstood, architecture
from finetuning.memory.gpus import Gpu
from finetuning.memory.states import Widths, optimizer_bytes, step_bytes, widths

if TYPE_CHECKING:
    from config.sections import ModelSection, TrainingSection

CONTEXT_BYTES = 700_000_000
"""What the process holds outside of torch's allocator: a CUDA context with lazily loaded kernels (400 to 616 MiB
reported: pytorch#109888, LMCache#4019) and libraries' workspaces. An assumption."""
FRAGMENTATION = 0.04
"""Share of the peak that the caching allocator holds without using it. Out-of-memory messages in public issues say
0.9 % to 3.5 % ("reserved by PyTorch but unallocated"; the most: threestudio#402). An assumption."""


class Plan(NamedTuple):
    parameters: int
    moment: str
    """The moment of the step at which the peak is."""
    components: dict[str, int]
    """What the memory holds at that moment, and what is lost around it."""
    peak: int
    """What torch.cuda.max_memory_allocated should say."""
    gpu: Gpu
    checkpointing: bool
    """Whether it is with activation checkpointing."""

    @property
    def total(self) -> int:
        return sum(self.components.values())

    @property
    def fits(self) -> bool:
        return self.total <= self.gpu.total_bytes


def plan(
    config: dict[str, Any],
    model: "ModelSection",
    training: "TrainingSection",
    gpu: Gpu,
    *,
    autocast_cache: bool = False,
) -> Plan:
    """The peak on each of `training.num_processes` GPUs, with FSDP2 when they are several. Raises NotUnderstood.

    Every sequence of the micro-batch has max_length tokens, all trained, and gradients of earlier micro-batches are
    there already (on the high side by up to all gradients when gradient_accumulation_steps is 1).
    `activation_checkpointing="auto"`: without, or with it where that does not fit.
    `autocast_cache`: whether autocast keeps its copies of the weights until the forward pass ends; the training does
    not let it.

    Read of `model`: attn_implementation. Of `training`: per_device_train_batch_size, gradient_accumulation_steps,
    max_length, num_processes, packing, padding_free, bf16, activation_checkpointing, activation_checkpointing_kwargs,
    and weight_dtype and optimizer, as `config.sections.TrainingSection` has them.
    """
    if training.activation_checkpointing != "auto":
        return _plan(config, model, training, gpu, training.activation_checkpointing, autocast_cache)
    without = _plan(config, model, training, gpu, False, autocast_cache)
    return without if without.fits else _plan(config, model, training, gpu, True, autocast_cache)


def settled_checkpointing(
    config: dict[str, Any], model: "ModelSection", training: "TrainingSection", gpu: Gpu, **how: Any
) -> bool:
    """Whether to train with activation checkpointing: as the setting says, or, if it is "auto", unless it fits
    without. `how`: as for `plan`. Raises NotUnderstood."""
    checkpointing = training.activation_checkpointing
    return plan(config, model, training, gpu, **how).checkpointing if checkpointing == "auto" else checkpointing


def _plan(
    config: dict[str, Any],
    model: "ModelSection",
    training: "TrainingSection",
    gpu: Gpu,
    checkpointing: bool,
    autocast_cache: bool,
) -> Plan:
    if unknown := set(training.activation_checkpointing_kwargs) - {"use_reentrant", "preserve_rng_state"}:
        raise NotUnderstood(f"training.activation_checkpointing_kwargs: {', '.join(sorted(unknown))} not understood.")
    arch, width = architecture(config), widths(training)
    attention = model.attn_implementation
    batch, length = training.per_device_train_batch_size, training.max_length
    if training.packing or training.padding_free:  # all of a micro-batch is laid into one sequence
        batch, length = 1, batch * length
    step = moments.Step(
        arch=arch,
        width=_computing(width, training),
        attention=attention,
        masked=is_masked(arch, training, attention),
        batch=batch,
        length=length,
        checkpointing=checkpointing,
        autocast_cache=autocast_cache,
        optimizer_step=step_bytes(arch, training, width.weight),
    )
    moment, held = max(moments.moments(step).items(), key=lambda item: sum(item[1].values()))
    components = _always(arch, width, training) | held
    peak = sum(components.values())
    components |= {"CUDA context": CONTEXT_BYTES, "fragmentation": int(FRAGMENTATION * peak)}
    return Plan(arch.parameters, moment, components, peak, gpu, checkpointing)


def _computing(width: Widths, training: "TrainingSection") -> Widths:
    """FSDP2 hands a layer its weights and inputs in the dtype of the products: autocast has nothing left to cast."""
    return Widths(width.compute, width.compute) if training.num_processes > 1 else width


def _always(arch: Architecture, width: Widths, training: "TrainingSection") -> dict[str, int]:
    """Weights, gradients and optimizer state, of which every process has its share; and what sharding needs.

    Sharded, the weights of two layers and the gradients of one are there in one piece, and the embedding always; and
    until the last micro-batch gradients are not reduced (`Accelerator.no_sync`), so that every process has all.
    """
    processes = training.num_processes
    always = {
        "weights": arch.parameters * width.weight // processes,
        "gradients": arch.parameters * width.weight // processes,
        "optimizer state": optimizer_bytes(arch, training, width.weight) // processes,
    }
    if processes > 1:
        gathered = 3 * sum(arch.layer_matrices()) + arch.embedding * arch.num_embeddings
        always["gathered weights"] = width.compute * gathered
        if training.gradient_accumulation_steps > 1:
            always["unreduced gradients"] = width.compute * arch.parameters
    return always
