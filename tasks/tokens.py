"""Tokenise the dataset with the template that will be saved and served, and show what comes of every token."""

from typing import Any

from prefect import get_run_logger, task
from prefect.artifacts import create_table_artifact

from config.sections import Config
from config.settings import Settings
from finetuning.artifacts import fingerprint, read_json
from finetuning.halves import HALVES_VERSION
from finetuning.launcher import run_step
from finetuning.tokens import REPORT, TOKENS_VERSION
from tasks.common import CACHED, RETRIED, artifact_key
from tasks.model import ModelReference
from tasks.references import Reference


def tokens_fingerprint(config: Config, dataset: str, model: str) -> str:
    """`dataset` and `model` are the fingerprints of those artifacts."""
    training = config.training
    return fingerprint(
        version=[TOKENS_VERSION, HALVES_VERSION],
        dataset=dataset,
        model=model,
        gate_takes_half=config.gate.takes_half,
        max_length=training.max_length,
        eval_max_rows=training.eval_max_rows,
        assistant_only_loss=training.assistant_only_loss,
        packing=training.packing and training.seed,
        on_long_rows=config.dataset.on_long_rows,
        on_bad_rows=config.dataset.on_bad_rows,
        max_bad_fraction=config.dataset.max_bad_fraction,
    )


def _cache_key(context: Any, parameters: dict[str, Any]) -> str:
    config, dataset, model = (parameters[name] for name in ("config", "dataset", "model"))
    return f"tokens-{tokens_fingerprint(config, dataset.fingerprint, model.fingerprint)}"


@task(cache_key_fn=_cache_key, **CACHED, **RETRIED)
def tokenize(config: Config, dataset: Reference, model: ModelReference) -> Reference:
    """`train.arrow` and `test.arrow` as training reads them, and a report on rows and tokens. Raises Failure."""
    identity = tokens_fingerprint(config, dataset.fingerprint, model.fingerprint)
    output = Settings().storage_root / "tokens" / identity
    job = {
        "dataset": str(dataset.path),
        "model": str(model.path),
        "section": config.dataset.model_dump(),
        "training": config.training.model_dump(),
        "gate_takes_half": config.gate.takes_half,
        "trust_remote_code": config.model.trust_remote_code,
        "output": str(output),
    }
    run_step("tokens", job, get_run_logger())
    _show(read_json(output / REPORT))
    return Reference(path=output)


def _show(report: dict[str, Any]) -> None:
    rows = []
    for split, counts in report.items():
        if isinstance(counts, dict):
            facts = {name: value for name, value in counts.items() if not isinstance(value, dict | list)}
            facts |= {f"tokens {name}": value for name, value in counts["tokens"].items()}
            for reason, count in counts["dropped"].items():
                facts[f"dropped: {reason}"] = f"{count}, the first: {counts['first_bad'][reason]}"
            rows += [{"split": split, "what": name, "value": str(value)} for name, value in facts.items()]
    create_table_artifact(rows, key=artifact_key("data"), description="Rows and tokens of each split")
