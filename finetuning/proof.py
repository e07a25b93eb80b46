"""Prove a registered version: what the registry gives back is what was trained, and it answers.

Downloaded into a folder of its own and loaded by a process that has loaded nothing else: the files are the exported
model directory's, byte for byte; the logits too; questions are answered through transformers and through
`mlflow.pyfunc`; tokenizer, template and generation config are there; an answer ends by itself.
"""

import gc
import json
import logging
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from config.sections import TrainingSection
from config.settings import Settings
from finetuning.artifacts import file_digest, read_json, read_manifest
from finetuning.champion import download
from finetuning.errors import Failure
from finetuning.evaluate import answer, row_losses
from finetuning.model import load_chat_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PROVEN = "finetune_proof"
"""Label of a version that was proven, with the day."""
NUM_ROWS = 4
"""Conversations whose logits are compared and whose last question is asked."""
MAX_NEW_TOKENS = 1024
"""Within which one of the answers must end by itself."""
logger = logging.getLogger(__name__)


class Job(BaseModel):
    name: str
    number: str
    model_directory: Path
    checkpoint: Path
    """With the weights as they were trained."""
    model: Path
    """Artifact of `finetuning.model`."""
    rows: Path
    """The test split."""
    training: TrainingSection
    trust_remote_code: bool


def prove(job: Job) -> dict[str, Any]:
    """What was measured, with the answers. Raises Failure when the version is not what was trained."""
    with TemporaryDirectory(prefix="proof-", dir=Settings().storage_root / "tmp") as temporary:
        package = download(job.name, job.number, Path(temporary))
        refuse_other_files(job, package / "model")
        facts = {"files": len(_listed(job)), **compare_weights(job, package / "model")}
        facts["pyfunc"] = ask_pyfunc(job, package)
    distance, loss = facts["largest_distance_of_a_logit_to_trained_weights"], facts["loss_minus_trained_weights"]
    logger.info("%s version %s is what was trained: %d files equal", job.name, job.number, facts["files"])
    logger.info("bfloat16 changes a logit by %.3g at most, and the loss by %.3g", distance, loss)
    return facts


def refuse_other_files(job: Job, registered: Path) -> None:
    """Raises Failure unless each file of the model directory is there with the same content."""
    other = [
        name
        for name, facts in _listed(job).items()
        if not (registered / name).is_file() or file_digest(registered / name) != facts["sha256"]
    ]
    if other:
        raise _refused(job, f"it differs from {job.model_directory} in {', '.join(sorted(other)[:5])}")
    generation, config = (
        read_json(registered / name) if (registered / name).is_file() else {}
        for name in ("generation_config.json", "tokenizer_config.json")
    )
    missing = [name for name in ("eos_token_id", "pad_token_id") if generation.get(name) is None]
    missing += [name for name in ("eos_token", "pad_token") if not config.get(name)]
    if missing:
        raise _refused(job, f"its generation config or its tokenizer lacks {', '.join(missing)}")


def compare_weights(job: Job, registered: Path) -> dict[str, Any]:
    """Logits and losses of three sets of weights, one in memory at a time: the registered, the exported, the trained.
    Raises Failure when the first two differ in one bit, or no answer ends by itself."""
    import torch

    with job.rows.open() as lines:
        rows = [json.loads(line) for line in islice(lines, NUM_ROWS)]
    answers = []

    def measure(weights: Path, prepared: Path, dtype: str, ask: bool = False) -> tuple[list[Any], float]:
        model, tokenizer = load_chat_model(weights, prepared, dtype=dtype, trust_remote_code=job.trust_remote_code)
        model = model.to("cuda" if torch.cuda.is_available() else "cpu").eval()
        found = [loss for loss in row_losses(model, tokenizer, rows, job.training) if loss]
        logits = [_logits(model, tokenizer(_text(row))["input_ids"], job.training.max_length) for row in rows]
        if ask:
            tokenizer.padding_side = "left"
            asked = [row for row in rows if row.get("messages")]
            answers.extend(answer(model, tokenizer, asked, MAX_NEW_TOKENS) if asked else [])
        del model
        gc.collect()
        return logits, sum(loss for loss, _ in found) / max(sum(count for _, count in found), 1)

    ours, loss = measure(registered, registered, "bfloat16", ask=True)
    exported, _ = measure(job.model_directory, job.model_directory, "bfloat16")
    if not all(torch.equal(*pair) for pair in zip(ours, exported, strict=True)):
        raise _refused(job, "its logits differ from those of the exported model directory")
    if answers and not any(one["stopped"] for one in answers):
        raise _refused(job, f"none of {len(answers)} answers ended by itself within {MAX_NEW_TOKENS} tokens")
    trained, trained_loss = measure(job.checkpoint, job.model, "float32")
    distance = max(float((one - other).abs().max()) for one, other in zip(ours, trained, strict=True))
    return {
        "loss": loss,
        "loss_minus_trained_weights": loss - trained_loss,
        "largest_distance_of_a_logit_to_trained_weights": distance,
        "answers": answers,
    }


def ask_pyfunc(job: Job, package: Path) -> list[dict[str, str]]:
    """As `mlflow models serve` loads it. Raises Failure when there is no answer."""
    import mlflow

    questions = ["Hello! What can you do?", "Name a colour."]
    loaded, answers = mlflow.pyfunc.load_model(str(package)), []
    for question in questions:
        try:
            reply = loaded.predict({"messages": [{"role": "user", "content": question}], "max_tokens": 32})
            text = reply[0]["choices"][0]["message"]["content"]
        except Exception as error:
            raise _refused(job, f"mlflow.pyfunc cannot answer: {' '.join(str(error).split())[:300]}") from error
        answers.append({"question": question, "answer": text})
    return answers


def _logits(model: "PreTrainedModel", tokens: list[int], max_length: int) -> Any:
    import torch

    with torch.inference_mode():
        return model(input_ids=torch.tensor([tokens[:max_length]], device=model.device)).logits[0].float().cpu()


def _text(row: dict[str, Any]) -> str:
    """The words alone: how they are put together is not what is compared here."""
    return row.get("text") or "\n".join(message["content"] or "" for message in row["messages"])


def _listed(job: Job) -> dict[str, Any]:
    return (read_manifest(job.model_directory) or {})["files"]


def _refused(job: Job, reason: str) -> Failure:
    message = f"{job.name} version {job.number} is registered, but not what was trained: {reason}"
    return Failure("bug", f"{message}. It has no alias; delete that version and run again.")
