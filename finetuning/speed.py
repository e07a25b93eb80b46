"""Where the time of a training goes: seconds of each phase, tokens a second, share of the GPU's peak, memory.

Imports transformers: for the training child only. A GPU is waited for once an optimizer step, at its end; the Trainer
waits for it after each micro-batch anyway, to count the tokens.
"""

import logging
import resource
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import TrainerCallback

from finetuning import processes
from finetuning.memory.gpus import named_peak

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PretrainedConfig

logger = logging.getLogger(__name__)

PHASES = ("data", "forward_backward", "optimizer", "logging", "evaluation", "checkpoint")


class Speed(TrainerCallback):
    """Books the time since the last event under the phase that the event ends. Add it last: what others do at the same
    event is part of that phase."""

    def __init__(self, flops_a_token: float):
        self.flops_a_token = flops_a_token
        self.seconds: Counter[str] = Counter()
        """Phase -> seconds, since this process began to train."""
        self.positions = 0
        """Tokens that went through the model in training, padding among them."""
        self.now = time.monotonic()
        self.logged = (0, 0, 0, 0.0)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.now = time.monotonic()
        self.logged = self._counts(state)

    def on_step_begin(self, *_: Any, **kwargs: Any) -> None:
        self._book("data")

    def on_pre_optimizer_step(self, *_: Any, **kwargs: Any) -> None:
        self._book("forward_backward")

    def on_step_end(self, *_: Any, **kwargs: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # else the optimizer's kernels would be booked under what comes next
        self._book("optimizer")

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **kwargs: Any) -> None:
        if "eval_loss" not in logs:  # that one is logged before its evaluation is over
            self._book("logging")

    def on_evaluate(self, *_: Any, **kwargs: Any) -> None:
        self._book("evaluation")

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        seconds = self._book("checkpoint")
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        logger.info("%s: %.3f GiB written in %.1f s", folder.name, size / 2**30, seconds)

    def _book(self, phase: str) -> float:
        """The seconds since the last event."""
        then, self.now = self.now, time.monotonic()
        self.seconds[phase] += self.now - then
        return self.now - then

    def _counts(self, state: Any) -> tuple[int, int, int, float]:
        training = sum(self.seconds[phase] for phase in ("data", "forward_backward", "optimizer"))
        return state.global_step, state.num_input_tokens_seen, self.positions, training

    def interval(self, state: Any) -> dict[str, float]:
        """Metrics of the steps since the last call; evaluation and checkpoints are not in their time."""
        before, self.logged = self.logged, self._counts(state)
        steps, tokens, positions, seconds = (now - then for now, then in zip(self.logged, before, strict=True))
        if not steps or not seconds:
            return {}
        rates = {"step_seconds": seconds / steps, "tokens_per_second": tokens / seconds}
        if positions > tokens:
            rates["padded_tokens_per_second"] = positions / seconds
        if peak := peak_flops():
            rates["mfu"] = self.flops_a_token * tokens / seconds / peak
        return {name: round(value, 4) for name, value in rates.items()} | {"peak_memory_gib": peak_memory_gib()}

    def summary(self) -> dict[str, Any]:
        """Phase -> share of the time, and the peak of memory; logged as well."""
        total = sum(self.seconds.values()) or 1.0
        shares = {phase: round(self.seconds[phase] / total, 4) for phase in PHASES}
        words = (f"{share:.0%} {phase.replace('_', ' and ')}" for phase, share in shares.items())
        logger.info("time: %s; peak memory %.2f GiB", ", ".join(words), peak := peak_memory_gib())
        return {"time_shares": shares, "peak_memory_gib": peak}


def peak_flops() -> float | None:
    """Of all GPUs that train; None without one, or with one that is not known."""
    if not torch.cuda.is_available():
        return None
    flops = named_peak(torch.cuda.get_device_name())
    return flops and flops * processes.num_gpus()


def peak_memory_gib() -> float:
    """Most that torch had of a GPU's memory; on a CPU, the most that the process had."""
    if torch.cuda.is_available():
        return round(torch.cuda.max_memory_allocated() / 2**30, 3)
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 3)


def flops_a_token(config: "PretrainedConfig", num_parameters: int, dataset: "Dataset") -> float:
    """Floating-point operations that the mathematics of a training step needs a token; recomputation is none of them.

    Six for each parameter that is multiplied with (Kaplan et al. 2020, section 2.1), and for attention, where a token
    sees half of its conversation on average, six for each layer, width of the queries and token of the conversation.
    """
    text = config.get_text_config()
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    looked_up = 0 if config.tie_word_embeddings else text.vocab_size * text.hidden_size
    attention = 6 * text.num_hidden_layers * text.num_attention_heads * head_dim * seen_length(dataset)
    return 6 * (num_parameters - looked_up) + attention


def num_tokens(dataset: "Dataset") -> int:
    table = dataset.with_format("arrow")[:]
    return sum(len(chunk.flatten()) for chunk in table["input_ids"].chunks)


def seen_length(dataset: "Dataset") -> float:
    """Length of the conversation that a token is in, averaged over all tokens."""
    import numpy

    table = dataset.with_format("arrow")[:]
    if "seq_lengths" in table.column_names:
        lengths = table["seq_lengths"].combine_chunks().flatten().to_numpy()
    else:
        lengths = numpy.concatenate([numpy.diff(chunk.offsets) for chunk in table["input_ids"].chunks])
    return float((lengths.astype(float) ** 2).sum() / max(lengths.sum(), 1))
