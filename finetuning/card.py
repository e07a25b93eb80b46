"""The model card: README.md of a model directory, with what it was made of, how the training went, what it can do."""

import json
from pathlib import Path
from typing import Any

from finetuning.artifacts import MANIFEST, file_digest, read_json, read_manifest, write_json
from finetuning.curves import draw
from finetuning.evaluate import ANSWERS, BASE, CANDIDATE, Evaluation
from finetuning.export import PROVENANCE

CARD, CURVES = "README.md", "curves.png"
NUM_SAMPLES = 4
LONGEST_SAMPLE = 600
"""Characters shown of an answer."""


def add_card(model_directory: Path, log_history: list[dict[str, Any]], evaluation: Evaluation) -> None:
    """Add card and curves to a finished model directory, each before the manifest that names it; what is there stays:
    a card says what was measured when the directory was made."""
    manifest = read_manifest(model_directory) or {}
    if CARD in manifest["files"]:
        return
    draw(log_history, model_directory / CURVES)
    provenance = read_json(model_directory / PROVENANCE)
    (model_directory / CARD).write_text(write(provenance, evaluation), encoding="utf-8")
    for name in (CURVES, CARD):
        path = model_directory / name
        path.chmod(0o644)
        manifest["files"][name] = {"size": path.stat().st_size, "sha256": file_digest(path)}
    write_json(model_directory / MANIFEST, manifest)


def write(provenance: dict[str, Any], evaluation: Evaluation) -> str:
    training = provenance["config"]["training"]
    header = {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "base_model": provenance["base_model"],
        "datasets": [provenance["dataset"]],
        "license": provenance["license"],
    }
    facts = {
        "Base model": f"{provenance['base_model']} at {provenance['base_model_version']}",
        "Licence of the base model": provenance["license"],
        "Data": f"{provenance['dataset']} at {provenance['dataset_version']}",
        "Recipe": provenance["recipe"] or "defaults",
        "Steps, tokens": f"{provenance['num_steps']}, {provenance['num_tokens']:,}",
        "Learning rate, seed": f"{training['learning_rate']:g}, {training['seed']}",
        "Compute": f"{provenance['total_flos']:.3g} FLOP, {provenance['gpu_hours']:.3g} GPU hours",
        "Checkpoint": f"{provenance['checkpoint']}, held-out loss {_number(provenance['eval_loss'])}",
        "Code, libraries": ", ".join(f"{name} {version}" for name, version in provenance["libraries"].items()),
        "MLflow run": provenance["mlflow_run_id"] or "none",
        "Flow run": provenance["flow_run_url"] or "none",
    }
    lines = [
        *("---", *(f"{key}: {json.dumps(value, ensure_ascii=False)}" for key, value in header.items()), "---", ""),
        f"# {provenance['base_model']}, fully fine-tuned on {provenance['dataset']}",
        "",
        *("| | |", "|---|---|", *(f"| {name} | {_cell(value)} |" for name, value in facts.items()), ""),
        *("## Training", "", f"![Loss by optimizer step]({CURVES})", ""),
        *_scores(evaluation),
        *_samples(evaluation),
        "## Use",
        "",
        "The chat template, the pad and eos tokens and the generation config are part of this directory:",
        "`AutoModelForCausalLM.from_pretrained(...)` and `tokenizer.apply_chat_template(...)` need nothing else.",
        "",
    ]
    return "\n".join(lines)


def _scores(evaluation: Evaluation) -> list[str]:
    scores = evaluation.scores
    if CANDIDATE not in scores:
        return []
    rows = [
        f"| {label} | {shown(scores[BASE][name])} | {shown(scores[CANDIDATE][name])} |"
        for name, label, shown in (
            ("loss", "Loss (nats a trained token)", _number),
            ("exact_match", "Answers equal to the reference", _share),
            ("stopped", "Answers that end by themselves", _share),
        )
    ]
    held_out = f"On {scores[CANDIDATE]['num_rows']} held-out conversations that chose no checkpoint:"
    return ["## Evaluation", "", held_out, "", "| | base model | this model |", "|---|---|---|", *rows, ""]


def _samples(evaluation: Evaluation) -> list[str]:
    if CANDIDATE not in evaluation.artifacts:
        return []
    before, after = (read_json(evaluation.artifacts[name] / ANSWERS) for name in (BASE, CANDIDATE))
    if not after:
        return []
    lines = ["## Answers", "", "| question | base model | this model |", "|---|---|---|"]
    for one, other in list(zip(before, after, strict=True))[:NUM_SAMPLES]:
        lines.append(f"| {_cell(one['question'])} | {_cell(one['answer'])} | {_cell(other['answer'])} |")
    return [*lines, ""]


def _cell(value: Any) -> str:
    text = str(value)
    text = text if len(text) <= LONGEST_SAMPLE else f"{text[:LONGEST_SAMPLE]} …"
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").replace("\n", "<br>")


def _number(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.4g}"


def _share(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.0%}"
