"""Put base model, champion and result to the same held-out rows."""

from prefect import get_run_logger, task
from prefect.artifacts import create_table_artifact
from prefect.cache_policies import NO_CACHE

from config.sections import Config
from config.settings import Settings
from finetuning.artifacts import read_json
from finetuning.evaluate import ANSWERS, BASE, CANDIDATE, Evaluation
from finetuning.launcher import run_step
from tasks.common import RETRIED, artifact_key
from tasks.model import ModelReference
from tasks.references import Reference


@task(cache_policy=NO_CACHE, **RETRIED)
def evaluate(config: Config, dataset: Reference, model: ModelReference, result: Reference) -> Evaluation:
    """Losses and answers of `base`, `champion` (if there is one) and `candidate`."""
    models = {
        BASE: {"fingerprint": model.fingerprint, "weights": str(model.base), "prepared": str(model.path)},
        CANDIDATE: {"fingerprint": result.fingerprint, "weights": str(result.path), "prepared": str(result.path)},
    }
    job = {
        "models": models,
        "registered_model_name": config.registry.registered_model_name,
        "evaluations": str(Settings().storage_root / "evaluations"),
        "rows": str(dataset.path / "test.jsonl"),
        "rows_fingerprint": dataset.fingerprint,
        "gate_takes_half": config.gate.takes_half,
        "section": config.evaluation.model_dump(),
        "training": config.training.model_dump(),
        "trust_remote_code": config.model.trust_remote_code,
    }
    found = Evaluation(**run_step("evaluate", job, get_run_logger()))
    _show(found, config)
    return found


def _show(found: Evaluation, config: Config) -> None:
    answers = {name: read_json(path / ANSWERS)[:20] for name, path in found.artifacts.items()}
    if answers.get(CANDIDATE):
        rows = [
            {"question": each[0]["question"], "reference": each[0]["reference"]}
            | {name: one["answer"] for name, one in zip(answers, each, strict=True)}
            for each in zip(*answers.values(), strict=True)
        ]
        create_table_artifact(rows, key=artifact_key("answers", config.registry.model_name))
