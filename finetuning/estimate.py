"""How long a training will take: from the speed of an earlier one of this model on this GPU, else from its operations.

Needs no ML library. What is assumed is told as an assumption.
"""

from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from config.sections import Config
from finetuning.artifacts import read_json, read_manifest
from finetuning.inputs import Input
from finetuning.memory.gpus import Gpu, named_peak
from finetuning.resume import STATE, read_state

ASSUMED_UTILISATION = 0.3
"""Share of a GPU's peak that a training is taken to reach while none of this model was measured. An assumption."""
STEPPING = ("data", "forward_backward", "optimizer", "logging")
"""Phases that the logged tokens a second are of; the rest are evaluations and checkpoints."""
DECISIVE = {
    *("per_device_train_batch_size", "max_length", "precision", "optim", "bf16", "activation_checkpointing"),
    *("packing", "padding_free"),
}
"""Training options that the speed depends on most."""


class Estimate(NamedTuple):
    seconds: float | None
    how: str


class Measured(NamedTuple):
    """A finished training."""

    name: str
    when: float
    tokens_per_second: float
    """Of the whole training, its evaluations and checkpoints included."""
    differences: list[str]
    """Options of DECISIVE that it had otherwise."""


def estimate(
    config: Config, source: Input, num_parameters: int | None, num_tokens: float, gpu: Gpu | None, trainings: Path
) -> Estimate:
    """Of a training that `num_tokens` go through."""
    where = f"{config.training.num_processes} {gpu.name}" if gpu else "a CPU"
    nearest_first = sorted(measured(config, source, gpu, trainings), key=lambda one: (len(one.differences), -one.when))
    if nearest_first:
        found = nearest_first[0]
        day = datetime.fromtimestamp(found.when).date()
        unlike = f", which had {', '.join(found.differences)}" if found.differences else ""
        how = f"{found.tokens_per_second:,.0f} tokens/s on {where}, measured by training {found.name} of {day}{unlike}"
        return Estimate(num_tokens / found.tokens_per_second, how)
    peak = gpu and named_peak(gpu.name)
    if peak and num_parameters and "bfloat16" in (config.training.weight_dtype, config.training.bf16 and "bfloat16"):
        passes = 4 / 3 if config.training.activation_checkpointing else 1
        flops = 6 * num_parameters * num_tokens * passes
        seconds = flops / (peak * config.training.num_processes * ASSUMED_UTILISATION)
        how = f"{flops:.2g} operations at an assumed {ASSUMED_UTILISATION:.0%} of the peak of {where}"
        return Estimate(seconds, f"{how}, without evaluations and checkpoints; none was measured here")
    return Estimate(None, f"no training of this model on {where} was measured here")


def measured(config: Config, source: Input, gpu: Gpu | None, trainings: Path) -> Iterator[Measured]:
    """Finished trainings of the same model on as many of the same GPU, or on a CPU; which CPU is not told apart."""
    num_gpus = config.training.num_processes if gpu else 0
    for state in trainings.glob(f"*/{STATE}"):
        result = read_state(state.parent).get("result") or {}
        if (result.get("num_gpus"), result.get("gpu")) != (num_gpus, gpu and gpu.name):
            continue
        job = _read_job(state.parent)
        model = job and read_manifest(Path(job["model"]))
        speed = tokens_per_second(result)
        if speed and model and (model["source"], model["version"]) == (source.name, source.version):
            yield Measured(state.parent.name, state.stat().st_mtime, speed, _differences(config, job["config"]))


def tokens_per_second(result: dict[str, Any]) -> float | None:
    """From its log lines: its seconds are those of its last try alone, its log has the steps of all."""
    lines = [line for line in result["log_history"] if "step_seconds" in line]
    seconds = sum(line["step_seconds"] for line in lines)
    stepping = sum(result.get("time_shares", {}).get(phase, 0) for phase in STEPPING)
    tokens = sum(line["tokens_per_second"] * line["step_seconds"] for line in lines)
    return tokens / seconds * stepping if seconds and stepping else None


def _read_job(directory: Path) -> dict[str, Any] | None:
    try:
        return read_json(directory / "job.json")
    except (OSError, ValueError):
        return None


def _differences(config: Config, before: dict[str, Any]) -> list[str]:
    now, then = config.training.model_dump(), before["training"]
    found = [f"training.{name}={then.get(name)}" for name in sorted(DECISIVE) if then.get(name) != now[name]]
    attention = before["model"]["attn_implementation"]
    return found + [f"model.attn_implementation={attention}"] * (attention != config.model.attn_implementation)
