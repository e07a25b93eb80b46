"""What a finished run says of itself."""

from pathlib import Path

from config.sections import Config
from config.settings import Settings, shown
from finetuning.evaluate import Evaluation
from tasks.promotion import Verdict
from tasks.registration import Version
from tasks.training import Training


def summary(
    config: Config,
    training: Training,
    published: Path,
    evaluation: Evaluation,
    version: Version,
    verdict: Verdict,
) -> str:
    """A few lines: version and verdict first, then what it can do and where everything is."""
    settings = Settings()
    how = "registered as" if version.created else "nothing new: it is registered already as"
    lines = [
        f"{config.model.name} fine-tuned on {config.dataset.name}, {how} {version.name} version {version.version}",
        f"verdict: {verdict.outcome}: {verdict.reason}",
        f"registry: {shown(settings.registry_uri)}",
        f"model directory: {published}",
        f"MLflow run: {training.mlflow_run_id or 'not made yet, run this again'} at {shown(settings.tracking_uri)}",
        f"{training.num_steps} steps in {training.train_seconds:.0f} s, eval loss {training.eval_loss:.4g}",
    ]
    if training.time_shares:
        shares = (f"{share:.0%} {phase.replace('_', ' and ')}" for phase, share in training.time_shares.items())
        lines.append(f"time: {', '.join(shares)}; peak memory {training.peak_memory_gib:.2f} GiB")
    for name, score in evaluation.scores.items():
        told = []
        if score["loss"] is not None:
            told.append(f"loss {score['loss']:.4g} on {score['num_rows']} held-out conversations")
        if score["exact_match"] is not None:
            right = round(score["exact_match"] * config.evaluation.exact_match_rows)
            told.append(f"questions answered exactly: {right} ({score['exact_match']:.0%})")
        if score["stopped"] is not None:
            told.append(f"answers that end by themselves: {score['stopped']:.0%}")
        lines.append(f"{name}: {', '.join(told)}")
    return "\n".join(lines)
