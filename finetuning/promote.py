"""Prove the registered version, and let the gate decide whether it becomes the champion.

Program: `python -m finetuning.promote JOB.json`, see `Job`. Only one of several runs decides about a model at a time.
"""

import datetime
import json
import logging
from typing import Any

from pydantic import BaseModel

from config.sections import GateSection
from config.settings import Settings
from finetuning import artifacts, child, gate, lineage, proof
from finetuning.bounded import within
from finetuning.champion import ALIAS, CHALLENGER, registry
from finetuning.evaluate import Evaluation
from finetuning.export import PROVENANCE
from finetuning.registry import ModelVersion, Registry

VERDICT, PREVIOUS, ROLLED_BACK = "finetune_verdict", "finetune_previous_champion", "finetune_rolled_back"
"""Labels of a version: what the gate said; on a champion which version was it before; on one that was taken back."""
ANSWER_SECONDS = 60
logger = logging.getLogger(__name__)


class Job(BaseModel):
    proof: proof.Job
    gate: GateSection
    evaluation: Evaluation
    mlflow_run_id: str | None


def run(values: dict[str, Any]) -> dict[str, Any]:
    """`outcome`: champion, challenger or awaiting approval; `reason`: a sentence; `metrics`; `judged`: False when
    another try may find what to compare with. Raises Failure."""
    job = Job.model_validate(values)
    settings, name, number = Settings(), job.proof.name, job.proof.number
    versions = registry()
    with artifacts.lock(settings.storage_root / "registrations" / name):
        version = _version(versions, name, number)
        if proof.PROVEN not in version.labels:
            facts = proof.prove(job.proof)
            keep(job, "proof.json", facts)
            today = datetime.datetime.now(datetime.UTC).date().isoformat()
            versions.label(name, number, {proof.PROVEN: f"passed {today}"})
        return decide(job, versions, version)


def decide(job: Job, versions: Registry, version: ModelVersion) -> dict[str, Any]:
    name, number = job.proof.name, job.proof.number
    champion = versions.by_alias(name, ALIAS)
    if champion and champion.number == number:
        return {"outcome": ALIAS, "reason": "it is the champion already", "metrics": {}, "judged": True}
    verdict = gate.judge(job.gate, job.evaluation)
    compared = job.gate.better_than == "champion" and verdict.metrics
    if compared and (champion and champion.number) != job.evaluation.champion:
        now = f"version {champion.number}" if champion else "none"
        reason = f"the champion is {now} meanwhile, which it was not compared with. Run again"
        verdict = gate.Verdict("not judged", reason, {})
    by_hand = f"python -m finetuning.register promote {name} {number}"
    labels = {f"finetune_{metric}": f"{value:.6g}" for metric, value in verdict.metrics.items()}
    if verdict.outcome == "passed" and version.labels.get(ROLLED_BACK):
        outcome, reason = CHALLENGER, f"{verdict.reason}; but it was rolled back by hand. To promote it: {by_hand}"
    elif verdict.outcome == "passed" and job.gate.approval:
        outcome, reason = "awaiting approval", f"{verdict.reason}. To promote it: {by_hand}"
    elif verdict.outcome == "passed":
        outcome, reason = ALIAS, verdict.reason
    else:
        outcome, reason = CHALLENGER, f"{verdict.outcome}: {verdict.reason}. To promote it anyway: {by_hand}"
    versions.label(name, number, labels | {VERDICT: f"{outcome}: {reason}"})
    if outcome == ALIAS:
        make_champion(versions, name, number)
    else:
        versions.set_alias(name, CHALLENGER, number)
    keep(job, "verdict.json", {"version": number, "outcome": outcome, **verdict._asdict()})
    judged = verdict.outcome != "not judged"
    return {"outcome": outcome, "reason": reason, "metrics": verdict.metrics, "judged": judged}


def make_champion(versions: Registry, name: str, number: str) -> None:
    """Point the alias at the version, which remembers the one before, and is no challenger any more."""
    before = versions.by_alias(name, ALIAS)
    if before and before.number != number:
        versions.label(name, number, {PREVIOUS: before.number})
    versions.set_alias(name, ALIAS, number)
    challenger = versions.by_alias(name, CHALLENGER)
    if challenger and challenger.number == number:
        versions.remove_alias(name, CHALLENGER)


def keep(job: Job, file: str, facts: dict[str, Any]) -> None:
    """With the MLflow run, beside scores and lineage; what cannot be kept is said, and holds nothing up."""
    if job.mlflow_run_id is None:
        return
    from mlflow import MlflowClient

    run_id, client = job.mlflow_run_id, MlflowClient(Settings().tracking_uri)
    provenance = artifacts.read_json(job.proof.model_directory / PROVENANCE)

    def call() -> None:
        client.log_text(run_id, json.dumps(facts, indent=1, ensure_ascii=False), file)
        for name, value in lineage.tags(provenance).items():
            client.set_tag(run_id, name, value)
        for model, scores in job.evaluation.scores.items():
            for name, value in scores.items():
                if value is not None:
                    client.log_metric(run_id, f"{model}_{name}", value)

    try:
        within(ANSWER_SECONDS, call)
    except Exception as error:
        logger.warning("%s could not be kept with MLflow run %s: %s", file, run_id, " ".join(str(error).split())[:200])


def _version(versions: Registry, name: str, number: str) -> ModelVersion:
    return next(version for version in versions.versions(name) if version.number == number)


if __name__ == "__main__":
    child.main(run)
