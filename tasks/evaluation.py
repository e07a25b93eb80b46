"""Ask the base model and the result the same held-out questions."""

from typing import Any

from prefect import get_run_logger, task
from prefect.artifacts import create_table_artifact
from prefect.cache_policies import NO_CACHE

from config.sections import Config
from config.settings import Settings
from finetuning.artifacts import fingerprint, read_json
from finetuning.evaluate import ANSWERS, EVALUATION_VERSION
from finetuning.launcher import run_step
from tasks.common import RETRIED, artifact_key
from tasks.model import ModelReference
from tasks.references import Reference

Scores = dict[str, dict[str, Any]]


@task(cache_policy=NO_CACHE, **RETRIED)
def evaluate(config: Config, dataset: Reference, model: ModelReference, result: Reference) -> Scores:
    """`before` and `after` -> {num_rows, exact_match, stopped}; empty when the recipe asks no questions."""
    section = config.evaluation
    if not section.exact_match_rows:
        return {}
    asked = {"rows": dataset.fingerprint, **section.model_dump(), "version": EVALUATION_VERSION}
    root = Settings().storage_root / "evaluations"
    models = {
        "before": (model.base, model.path, root / fingerprint(model=model.fingerprint, **asked)),
        "after": (result.path, result.path, root / fingerprint(model=result.fingerprint, **asked)),
    }
    job = {
        "models": {name: [str(path) for path in paths] for name, paths in models.items()},
        "rows": str(dataset.path / "test.jsonl"),
        "num_rows": section.exact_match_rows,
        "max_new_tokens": section.max_new_tokens,
        "trust_remote_code": config.model.trust_remote_code,
    }
    scores = run_step("evaluate", job, get_run_logger())
    before, after = (read_json(models[name][2] / ANSWERS) for name in ("before", "after"))
    rows = [
        {"question": b["question"], "reference": b["reference"], "before": b["answer"], "after": a["answer"]}
        for b, a in zip(before[:20], after[:20], strict=True)
    ]
    create_table_artifact(rows, key=artifact_key("answers", config.registry.model_name))
    return scores
