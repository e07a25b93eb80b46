"""Ask held-out questions: the last assistant turn of test conversations is generated and compared with the reference.

Greedy, in batches, at the dtype the model is saved in. Program: `python -m finetuning.evaluate JOB.json`, see `Job`.
"""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from finetuning import child
from finetuning.artifacts import produce, write_json
from finetuning.data import read_dataset
from finetuning.model import load_chat_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

EVALUATION_VERSION = 1
"""Part of every evaluation's fingerprint: raise it when the same model and rows give other answers."""

ANSWERS = "answers.json"
BATCH_SIZE = 32


class Job(BaseModel):
    models: dict[str, tuple[Path, Path, Path]]
    """Name -> directory of the weights, directory of tokenizer and generation config, artifact to write."""
    rows: Path
    """A split, as `finetuning.data` writes it."""
    num_rows: int
    max_new_tokens: int
    trust_remote_code: bool


def run(values: dict[str, Any]) -> dict[str, Any]:
    """Model name -> {num_rows, exact_match, stopped}, the latter two as shares from 0 to 1."""
    job = Job.model_validate(values)
    return {
        name: produce(output, lambda directory, w=weights, p=prepared: evaluate(job, w, p, directory))["scores"]
        for name, (weights, prepared, output) in job.models.items()
    }


def evaluate(job: Job, weights: Path, prepared: Path, output: Path) -> dict[str, Any]:
    """Write the answers below `output` and return the scores for its manifest."""
    import torch

    model, tokenizer = load_chat_model(weights, prepared, dtype="auto", trust_remote_code=job.trust_remote_code)
    model = model.to("cuda" if torch.cuda.is_available() else "cpu").eval()
    tokenizer.padding_side = "left"
    rows = [row for row in read_dataset(job.rows) if row.get("messages")][: job.num_rows]
    answers = []
    for start in range(0, len(rows), BATCH_SIZE):
        answers += answer(model, tokenizer, rows[start : start + BATCH_SIZE], job.max_new_tokens)
    write_json(output / ANSWERS, answers)
    count = max(len(answers), 1)
    scores = {key: sum(answer[key] for answer in answers) / count for key in ("exact_match", "stopped")}
    return {"scores": {"num_rows": len(answers), **scores}}


def answer(
    model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase", rows: list[dict[str, Any]], max_new_tokens: int
) -> list[dict[str, Any]]:
    """Generate the last turn of each conversation: question, reference, answer, whether they match and it stopped."""
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
                "stopped": bool((tokens == tokenizer.eos_token_id).any()),
            }
        )
    return results


def visible(text: str) -> str:
    """The part of an answer a reader sees: without its reasoning block."""
    return re.sub(r"<think>.*?</think>", "", text, flags=re.DOTALL).strip()


if __name__ == "__main__":
    child.main(run)
