"""What watches a training: seal its checkpoints, stop it when told or when it is lost, report progress, log to MLflow.

Imports transformers: for the training child only.
"""

import logging
import math
import re
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

import torch
from transformers import PrinterCallback, TrainerCallback
from transformers.integrations import MLflowCallback

from finetuning import artifacts, child, processes
from finetuning.curves import draw
from finetuning.errors import REMEDIES, Failure
from finetuning.resume import checkpoints
from finetuning.tracking import History

__all__ = [
    "Curve",
    "MLflowCallback",
    "Metrics",
    "PrinterCallback",
    "Progress",
    "Seal",
    "Stop",
    "TokenCount",
    "Watch",
]

PROGRESS_SECONDS = 1.0
CURVE_SECONDS = 60.0
SHOWN = ("loss", "eval_loss", "learning_rate", "grad_norm", "mfu", "peak_memory_gib")
logger = logging.getLogger(__name__)


class Seal(TrainerCallback):
    """Give every checkpoint its manifest, and remove old ones only when a newer one is sealed.

    Of several processes the first one does it, after all have written their files.
    Hashing runs in a thread beside the training, so it costs no step; the checkpoint counts from the moment that its
    manifest is there. The Trainer's own rotation would delete the last sealed one before the next is.
    """

    def __init__(self, keep: int):
        self.keep = keep
        self.thread: threading.Thread | None = None
        self.error: Exception | None = None

    def on_save(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        refuse_non_finite_weights(model, state.global_step)  # all processes meet here
        if processes.rank():
            return
        self.wait()
        checkpoint = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        # By name: the training may have been moved since.
        best = state.best_model_checkpoint and checkpoint.with_name(Path(state.best_model_checkpoint).name)
        self.thread = threading.Thread(target=self._seal, args=(checkpoint, best))
        self.thread.start()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.wait()
        processes.share(None)  # one that leaves before the seal would have torch's agent end the others in 30 seconds

    def wait(self) -> None:
        """Until the checkpoint is sealed. Raises what kept it from being."""
        if self.thread:
            self.thread.join()
        if self.error:
            raise self.error

    def _seal(self, checkpoint: Path, best: Path | None) -> None:
        try:
            self._seal_and_rotate(checkpoint, best)
        except Exception as error:  # a thread's exception would only be printed
            self.error = error

    def _seal_and_rotate(self, checkpoint: Path, best: Path | None) -> None:
        artifacts.write_manifest(checkpoint, algorithm="xxh3_128")
        sealed = [path for path in checkpoints(checkpoint.parent) if artifacts.read_manifest(path)]
        kept = {sealed[0], best} if best else {sealed[0]}
        for path in sealed[1:]:
            if path not in kept and len(kept) < self.keep:
                kept.add(path)
            elif path not in kept:
                shutil.rmtree(path)


class Stop(TrainerCallback):
    """On SIGTERM: save a checkpoint at the end of the running step and stop; before the first step, stop at once.

    The signal reaches several processes at different steps, or only one of them: they stop at the step at whose end
    the first of them knows of it, or they would wait for each other for ever.
    """

    def __init__(self) -> None:
        self.requested = self.training = False
        signal.signal(signal.SIGTERM, self._request)

    def _request(self, number: int, frame: Any) -> None:
        if not self.training:
            raise Failure("preempted", f"training was stopped before its first step. {REMEDIES['preempted']}")
        self.requested = True
        logger.warning("SIGTERM: a checkpoint is saved at the end of this step, then the training stops")

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.training = True

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if any(processes.share(self.requested)):
            control.should_save = control.should_training_stop = True
            control.should_evaluate = False


class Watch(TrainerCallback):
    """End a training that cannot come to anything, at its next log line or evaluation."""

    def __init__(self, vocabulary_size: int):
        self.chance = math.log(vocabulary_size)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **kwargs: Any) -> None:
        for name in ("loss", "grad_norm", "eval_loss"):
            if name in logs and not math.isfinite(float(logs[name])):
                raise diverged(f"{name} became {logs[name]} at step {state.global_step}", state)
        loss, gradient = logs.get("loss"), logs.get("grad_norm")
        if loss is not None and gradient == 0 and abs(float(loss) - self.chance) < 1e-2:
            raise diverged(f"loss stands at ln(vocabulary)={self.chance:.2f} with zero gradients", state)


def diverged(what: str, state: Any) -> Failure:
    finite = [entry["loss"] for entry in state.log_history if "loss" in entry and math.isfinite(float(entry["loss"]))]
    last = f"; the last finite loss was {float(finite[-1]):.4g}" if finite else ""
    return Failure("diverged", f"{what}{last}. Nothing is saved as a model. {REMEDIES['diverged']}")


def refuse_non_finite_weights(model: torch.nn.Module, step: int) -> None:
    """Each process looks at what it holds of the weights (a sharded one is a DTensor), and all of them refuse."""
    lost = (name for name, weight in model.named_parameters() if not torch.isfinite(_held(weight)).all())
    for name in filter(None, processes.share(next(lost, None))):
        message = f"{name} holds values that are not finite at step {step}. Nothing is saved as a model."
        raise Failure("diverged", f"{message} {REMEDIES['diverged']}")


def _held(weight: torch.Tensor) -> torch.Tensor:
    return weight.to_local() if hasattr(weight, "to_local") else weight


class Progress(TrainerCallback):
    """Report step, loss, useful tokens a second and seconds to go, at most once in PROGRESS_SECONDS."""

    def __init__(self) -> None:
        self.started = self.reported = time.monotonic()
        self.first_step = self.first_tokens = 0
        self.loss: float | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.started, self.first_step = time.monotonic(), state.global_step
        self.first_tokens = state.num_input_tokens_seen

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **kwargs: Any) -> None:
        self.loss = logs.get("loss", self.loss)
        self._report(state)
        shown = {name: logs[name] for name in SHOWN if name in logs}
        if shown:
            text = "  ".join(f"{name} {float(value):.4g}" for name, value in shown.items())
            rate, eta = self._speed(state)
            step, steps = state.global_step, state.max_steps
            logger.info("step %d of %d  %s  %.0f tokens/s  %.0f s to go", step, steps, text, rate, eta)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if time.monotonic() - self.reported >= PROGRESS_SECONDS:
            self._report(state)

    def _speed(self, state: Any) -> tuple[float, float]:
        seconds = max(time.monotonic() - self.started, 1e-9)
        done = max(state.global_step - self.first_step, 1)
        tokens = state.num_input_tokens_seen - self.first_tokens
        return tokens / seconds, seconds / done * (state.max_steps - state.global_step)

    def _report(self, state: Any) -> None:
        self.reported = time.monotonic()
        rate, eta = self._speed(state)
        child.report_progress(
            step=state.global_step,
            max_steps=state.max_steps,
            loss=self.loss,
            tokens_per_second=round(rate),
            eta_seconds=round(eta),
        )


class Curve(TrainerCallback):
    """Draw the losses so far into `path`, at most once in CURVE_SECONDS: a picture takes about a tenth of a second."""

    def __init__(self, path: Path):
        self.path, self.drawn = path, time.monotonic()

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if time.monotonic() - self.drawn < CURVE_SECONDS:
            return
        try:
            draw(state.log_history, self.path)
            child.report_progress(curve=str(self.path))
        except Exception as error:  # a full disk, say: no picture is worth a training
            logger.warning("the loss curve could not be drawn: %s", error)
        self.drawn = time.monotonic()


class Metrics(MLflowCallback):
    """HF's callback, but a value that the run has already is not logged again: a resumed training repeats the steps
    since its checkpoint. What it could not log is completed from the trainer's history at the end."""

    def __init__(self, history: History):
        super().__init__()
        self.history = history

    def setup(self, args: Any, state: Any, model: Any) -> None:
        try:
            super().setup(args, state, model)
        except Exception as error:
            self._unreachable(error)

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any], model: Any = None, **kwargs: Any
    ) -> None:
        new = {name: value for name, value in logs.items() if state.global_step not in self.history.get(name, ())}
        try:
            super().on_log(args, state, control, new, model=model, **kwargs)
        except Exception as error:
            self._unreachable(error)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The run is ended where its status is known, not here."""

    def _unreachable(self, error: Exception) -> None:
        reason = re.sub(r"\s+", " ", str(error))[:200]
        logger.warning("MLflow does not answer, the training goes on and its metrics are logged later (%s)", reason)


class TokenCount(TrainerCallback):
    """Resumed, TRL's `num_tokens` would start at zero; the Trainer's own count, which is equal, does not."""

    def __init__(self, trainer: Any):
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer._total_train_tokens = state.num_input_tokens_seen
