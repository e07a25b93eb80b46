"""Put models to the same held-out rows: loss on their answers, and answers of their own to the last question.

The rows are the gate's half of the test split (`finetuning.halves`). Each model renders them with its own template and
tokenizer, in bfloat16, as it is served. The current champion is among them when the registry has one. Every model's
evaluation is an artifact of its own, named by model and rows: no model is evaluated twice on the same.
Program: `python -m finetuning.evaluate JOB.json`, see `Job`.
"""

import inspect
import logging
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from config.sections import DatasetSection, EvaluationSection, TrainingSection
from finetuning import champion, child
from finetuning.artifacts import fingerprint, produce, write_json
from finetuning.classify import classify
from finetuning.halves import HALVES_VERSION, read_gate_rows
from finetuning.lengths import Account
from finetuning.model import load_chat_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

EVALUATION_VERSION = 2
"""Part of every evaluation's fingerprint: raise it when the same model and rows give other numbers."""

ANSWERS, LOSSES = "answers.json", "losses.json"
BATCH_SIZE = 32
"""Questions answered at once."""
BASE, CHAMPION, CANDIDATE = "base", "champion", "candidate"
logger = logging.getLogger(__name__)


class Model(BaseModel):
    fingerprint: str
    weights: Path
    prepared: Path
    """Directory of tokenizer and generation config."""


class Job(BaseModel):
    models: dict[str, Model]
    """`base` and `candidate`."""
    registered_model_name: str
    """Its champion is evaluated as well; the registry is that of the settings."""
    evaluations: Path
    """Directory that the artifacts are made in."""
    rows: Path
    """The test split, as `finetuning.data` writes it."""
    rows_fingerprint: str
    gate_takes_half: bool = True
    section: EvaluationSection
    training: TrainingSection
    trust_remote_code: bool


class Evaluation(BaseModel):
    """What was found. Empty when nothing was asked, or no row is there to ask it of."""

    scores: dict[str, dict[str, Any]] = {}
    """Model -> {num_rows, loss, num_questions, exact_match, stopped}: the loss in nats a token, exact_match and stopped
    as shares from 0 to 1; None where nothing was asked."""
    artifacts: dict[str, Path] = {}
    """Model -> directory with its losses and answers."""
    champion: str | None = None
    """Number of the champion's version."""
    problem: str | None = None
    """Why the champion could not be evaluated."""


def run(values: dict[str, Any]) -> dict[str, Any]:
    """An `Evaluation`. Raises Failure."""
    job, found = Job.model_validate(values), Evaluation()
    rows = read_gate_rows(job.rows, job.gate_takes_half)
    if rows and (job.section.loss_rows or job.section.num_questions):
        for name, model in job.models.items():
            add(found, name, evaluation_path(job, model.fingerprint), partial(evaluate, job, model, rows))
        if holder := champion.find(job.registered_model_name):
            found.champion = holder.number
            add_champion(found, job, holder, rows)
    return found.model_dump(mode="json")


def add(found: Evaluation, name: str, output: Path, make: Callable[[Path], dict[str, Any]]) -> None:
    found.scores[name] = produce(output, make)["scores"]
    found.artifacts[name] = output


def add_champion(found: Evaluation, job: Job, holder: champion.Champion, rows: list[dict[str, Any]]) -> None:
    """One that cannot be had or loaded is a problem to tell, and holds up no version."""

    def measure(output: Path) -> dict[str, Any]:
        with champion.model_directory(holder) as files:
            model = Model(fingerprint=holder.fingerprint, weights=files, prepared=files)
            return evaluate(job, model, rows, output)

    try:
        add(found, CHAMPION, evaluation_path(job, holder.fingerprint), measure)
    except Exception as error:
        failure = classify(error)
        if failure.kind not in ("configuration", "data", "bug"):  # the machine's or the network's, not the champion's
            raise failure from error
        found.problem = f"champion version {holder.number} cannot be evaluated: {failure.message}"
        logger.warning("%s", found.problem)


def evaluation_path(job: Job, model: str) -> Path:
    asked = {
        "version": [EVALUATION_VERSION, HALVES_VERSION],
        "model": model,
        "rows": [job.rows_fingerprint, job.gate_takes_half],
        "section": job.section.model_dump(),
        "max_length": job.training.max_length,
        "assistant_only_loss": job.training.assistant_only_loss,
    }
    return job.evaluations / fingerprint(**asked)


def evaluate(job: Job, files: Model, rows: list[dict[str, Any]], output: Path) -> dict[str, Any]:
    """Write losses and answers below `output` and return the scores for its manifest."""
    import torch

    model, tokenizer = load_chat_model(
        files.weights, files.prepared, dtype="bfloat16", trust_remote_code=job.trust_remote_code
    )
    model = model.to("cuda" if torch.cuda.is_available() else "cpu").eval()
    losses = row_losses(model, tokenizer, rows[: job.section.loss_rows], job.training)
    tokenizer.padding_side = "left"
    asked = [row for row in rows if row.get("messages")][: job.section.num_questions]
    answers = []
    for start in range(0, len(asked), BATCH_SIZE):
        answers += answer(model, tokenizer, asked[start : start + BATCH_SIZE], job.section.max_new_tokens)
    write_json(output / LOSSES, losses)
    write_json(output / ANSWERS, answers)
    return {"scores": summarize(losses, answers, job.section.exact_match_rows)}


def summarize(losses: list[tuple[float, int] | None], answers: list[dict[str, Any]], matched: int) -> dict[str, Any]:
    found = [loss for loss in losses if loss]
    num_tokens = sum(count for _, count in found)
    return {
        "num_rows": len(found),
        "loss": sum(loss for loss, _ in found) / num_tokens if num_tokens else None,
        "num_questions": len(answers),
        "exact_match": _share([answer["exact_match"] for answer in answers[:matched]]),
        "stopped": _share([answer["stopped"] for answer in answers]),
    }


def _share(values: list[bool]) -> float | None:
    return sum(values) / len(values) if values else None


def row_losses(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    rows: list[dict[str, Any]],
    training: TrainingSection,
) -> list[tuple[float, int] | None]:
    """For each row the negative log-likelihood of its trained tokens in nats, and their number; None for a row that
    the template refuses or whose answers are beyond `max_length`.

    One row at a time: the numbers do not depend on what is beside a row in its batch, and logits exist only where
    something is trained.
    """
    import torch

    from finetuning.tokens import IGNORED, Encoder

    encoder = Encoder(tokenizer, DatasetSection(), training)
    account = Account("gate", training.max_length)
    partial = "logits_to_keep" in inspect.signature(model.forward).parameters
    losses: list[tuple[float, int] | None] = []
    for encoded in encoder.encode_rows(rows, account):
        short = encoded and encoded.first(training.max_length)
        if not short or not short.num_trained:
            losses.append(None)
            continue
        labels = torch.tensor(short.labels[1:], device=model.device)
        positions = (labels != IGNORED).nonzero().flatten()
        if not len(positions):
            losses.append(None)
            continue
        tokens = torch.tensor([short.input_ids], device=model.device)
        with torch.inference_mode():
            if partial:
                logits = model(input_ids=tokens, logits_to_keep=positions).logits[0]
            else:
                logits = model(input_ids=tokens).logits[0, positions]
            loss = torch.nn.functional.cross_entropy(logits.float(), labels[positions], reduction="sum")
        losses.append((loss.item(), len(positions)))
    return losses


def answer(
    model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase", rows: list[dict[str, Any]], max_new_tokens: int
) -> list[dict[str, Any]]:
    """Generate the last turn of each conversation, greedily: question, reference, answer, whether they match and
    whether it stopped by itself."""
    import torch

    prompts = [
        tokenizer.apply_chat_template(
            row["messages"][:-1], tools=row.get("tools"), add_generation_prompt=True, tokenize=False
        )
        for row in rows
    ]
    inputs = tokenizer(prompts, padding=True, add_special_tokens=False, return_tensors="pt").to(model.device)
    with torch.inference_mode():
        output = model.generate(**inputs, do_sample=False, max_new_tokens=max_new_tokens)
    generated = output[:, inputs["input_ids"].shape[1] :]
    ends = torch.tensor(model.generation_config.eos_token_id, device=model.device).flatten()
    results = []
    for row, tokens in zip(rows, generated, strict=True):
        text = visible(tokenizer.decode(tokens, skip_special_tokens=True))
        reference = visible(row["messages"][-1]["content"] or "")
        results.append(
            {
                "question": row["messages"][-2]["content"] if len(row["messages"]) > 1 else "",
                "reference": reference,
                "answer": text,
                "exact_match": text == reference,
                "stopped": bool(torch.isin(tokens, ends).any()),
            }
        )
    return results


def visible(text: str) -> str:
    """The part of an answer a reader sees: without its reasoning block."""
    return re.sub(r"<think>.*?</think>", "", text, flags=re.DOTALL).strip()


if __name__ == "__main__":
    child.main(run)
