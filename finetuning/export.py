"""Save a training's checkpoint as a model directory: all that transformers, vLLM and MLflow need, and nothing else.

Files: weights in bfloat16 (`model.safetensors`, or shards of at most 2 GB with an index), `config.json`,
`generation_config.json`, the tokenizer's files with `chat_template.jinja`, `finetune.json` (where it comes from) and
`manifest.json`, written last. `finetuning.publish` adds the model card.
Program: `python -m finetuning.export JOB.json`, see `Job`.
"""

from pathlib import Path
from typing import Any

from pydantic import BaseModel

from finetuning import artifacts, child
from finetuning.artifacts import produce, write_json
from finetuning.model import load_chat_model

EXPORT_VERSION = 1
"""Part of every model directory's fingerprint: raise it when the same checkpoint gives other files."""

MAX_SHARD_SIZE = "2GB"
"""One file of 50 GB is transformers' default; an upload through a presigned URL reads a file whole into memory."""

PROVENANCE = "finetune.json"


class Job(BaseModel):
    checkpoint: Path
    model: Path
    """Artifact of `finetuning.model`: tokenizer and generation config."""
    output: Path
    trust_remote_code: bool
    provenance: dict[str, Any]


def run(values: dict[str, Any]) -> dict[str, Any]:
    job = Job.model_validate(values)
    return produce(job.output, lambda directory: export(job, directory))


def export(job: Job, output: Path) -> dict[str, Any]:
    """Fill `output` and return the fingerprint for its manifest."""
    model, tokenizer = load_chat_model(
        job.checkpoint, job.model, dtype="bfloat16", trust_remote_code=job.trust_remote_code
    )
    model.config.use_cache = True  # training turns it off
    model.save_pretrained(output, max_shard_size=MAX_SHARD_SIZE)
    tokenizer.save_pretrained(output)
    write_json(output / PROVENANCE, job.provenance)
    for file in output.iterdir():
        file.chmod(0o644)  # safetensors 0.8 writes 0600, which a server under another user cannot read
    return {"fingerprint": job.output.name}


def export_fingerprint(training: str, checkpoint: str) -> str:
    return artifacts.fingerprint(version=EXPORT_VERSION, training=training, checkpoint=checkpoint)


if __name__ == "__main__":
    child.main(run)
