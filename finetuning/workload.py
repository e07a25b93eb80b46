"""What a training is made of, and what it takes: steps and tokens, memory, disk, time, cost. Lines of a preflight."""

from pathlib import Path
from typing import Any, Literal, NamedTuple

from config.sections import Config
from config.settings import Settings
from finetuning.base import Facts
from finetuning.errors import Failure
from finetuning.estimate import estimate
from finetuning.findings import Findings
from finetuning.inputs import Input
from finetuning.limits import check_disk
from finetuning.memory.architecture import NotUnderstood, read_config
from finetuning.memory.gpus import Gpu, visible_gpu
from finetuning.memory.plan import plan
from finetuning.memory.proposals import check_memory, gb
from finetuning.resume import checkpoints, finished, read_state, step_of

Surely = Literal["exactly", "about", "at least"]


class Workload(NamedTuple):
    tokens_per_step: float
    epochs: float
    num_conversations: float
    """To train on."""
    surely: Surely


def workload(config: Config, report: dict[str, Any], num_conversations: float, surely: Surely) -> Workload:
    """`report`: of `finetuning.lengths.Account`, on as many of the conversations as were tokenised."""
    training = config.training
    rows = training.per_device_train_batch_size * training.gradient_accumulation_steps * training.num_processes
    mean = report["tokens"]["kept"] / report["sequences"]
    if training.packing:
        packed = report.get("packed_sequences") or num_conversations * mean / training.max_length  # full: an assumption
        per_step = rows * num_conversations * mean / packed
    else:
        per_step = rows * mean
    epochs = training.max_steps * per_step / (num_conversations * mean)
    return Workload(per_step, epochs, num_conversations, surely)


def effort_lines(
    config: Config, source: Input, facts: Facts, work: Workload | None, directory: Path, findings: Findings
) -> None:
    """The lines `steps`, `memory`, `disk`, `time` and `cost`, on the GPU that this process sees. `directory`: the
    training's, which may have begun, or be finished."""
    gpu, began = visible_gpu(), bool(read_state(directory))
    memory(config, facts.directory, gpu, began, findings)
    if facts.num_parameters is not None:
        disk(config, facts.num_parameters, directory, began, findings)
    if work:
        steps(config, work, findings)
        time_and_cost(config, source, work, facts.num_parameters, gpu, directory, findings)


def steps(config: Config, work: Workload, findings: Findings) -> None:
    training = config.training
    of = "sequences" if training.packing else "conversations"
    rows = training.per_device_train_batch_size * training.gradient_accumulation_steps * training.num_processes
    findings.ok(
        "steps",
        f"{training.max_steps:,} of {rows} {of} and about {work.tokens_per_step:,.0f} tokens, in all "
        f"{training.max_steps * work.tokens_per_step:,.0f} tokens or {'at most ' if work.surely == 'at least' else ''}"
        f"{work.epochs:.2g} epochs of {work.surely} {work.num_conversations:,.0f} conversations",
    )


def memory(config: Config, base: Path, gpu: Gpu | None, began: bool, findings: Findings) -> None:
    """`began`: a training that has begun, or is finished, is for its own task to refuse."""
    if gpu is None and config.training.bf16:
        remedy = f"python -m finetuning.memory {base} plans it for a GPU that is elsewhere."
        return findings.warn("memory", "no GPU here: it would train on the CPU (training.bf16=true)", remedy)
    if gpu is None:
        return findings.ok("memory", "no GPU here: it trains on the CPU")
    try:
        what = read_config(base), config.model, config.training, gpu
        planned = plan(*what)
        told = f"{gb(planned.total)} of {gb(gpu.total_bytes)} of {gpu.name} by the plan, its peak in {planned.moment}"
        if planned.fits:
            return findings.ok("memory", told)
        if planned.peak <= gpu.total_bytes:
            return findings.warn("memory", f"{told}: the peak fits, with what is lost around it it does not")
        check_memory(*what)
    except NotUnderstood as unknown:
        findings.warn("memory", f"no plan: {unknown}")
    except Failure as failure:
        _refuse_unless(began, "memory", failure, findings)


def disk(config: Config, num_parameters: int, directory: Path, began: bool, findings: Findings) -> None:
    try:
        needed, free = check_disk(config, num_parameters, directory)
    except Failure as failure:
        return _refuse_unless(began, "disk", failure, findings)
    at_hand = "how much is free cannot be told" if free is None else f"{free / 2**30:.3g} GiB are free"
    findings.ok("disk", f"{needed / 2**30:.3g} GiB needed at {Settings().storage_root}, {at_hand}")


def _refuse_unless(began: bool, check: str, failure: Failure, findings: Findings) -> None:
    findings.warn_of(check, failure) if began else findings.refuse(check, failure)


def time_and_cost(
    config: Config,
    source: Input,
    work: Workload,
    num_parameters: int | None,
    gpu: Gpu | None,
    directory: Path,
    findings: Findings,
) -> None:
    if finished(directory):
        findings.ok("time", "none: this training is finished, its checkpoint is used")
        return findings.ok("cost", "none for training")
    done = max(map(step_of, checkpoints(directory / "checkpoints")), default=0)
    num_tokens = (config.training.max_steps - done) * work.tokens_per_step
    seconds, how = estimate(config, source, num_parameters, num_tokens, gpu, directory.parent)
    where = f" from step {done}" if done else ""
    if seconds is None:
        findings.ok("time", f"unknown until the first steps{where}: {how}")
    else:
        findings.ok("time", f"about {_duration(seconds)} of training{where}: {how}")
    _cost(seconds, config.training.num_processes if gpu else 0, findings)


def _cost(seconds: float | None, num_gpus: int, findings: Findings) -> None:
    price = Settings().gpu_hour_price
    if not num_gpus:
        findings.ok("cost", "no GPU hours")
    elif seconds is None:
        findings.ok("cost", "unknown, as the time is")
    elif price is None:
        hours = f"about {seconds / 3600 * num_gpus:.2f} GPU hours of training"
        findings.ok("cost", hours, "With FINETUNE_GPU_HOUR_PRICE it is told in money.")
    else:
        hours = seconds / 3600 * num_gpus
        findings.ok("cost", f"about {hours * price:,.2f} for {hours:.2f} GPU hours of training at {price:g} each")


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
