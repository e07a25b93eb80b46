"""What a finished run says of itself."""

from pathlib import Path

from config.sections import Config
from config.settings import Settings, shown
from tasks.evaluation import Scores
from tasks.registration import Version
from tasks.training import Training


def summary(config: Config, training: Training, published: Path, scores: Scores, version: Version) -> str:
    """A few lines: the version first, then what it can do and where everything is."""
    settings = Settings()
    how = "registered as" if version.created else "nothing new: it is registered already as"
    lines = [
        f"{config.model.name} fine-tuned on {config.dataset.name}, {how} {version.name} version {version.version}",
        f"registry: {shown(settings.registry_uri)}",
        f"model directory: {published}",
        f"MLflow run: {training.mlflow_run_id or 'not made yet, run this again'} at {shown(settings.tracking_uri)}",
        f"{training.num_steps} steps in {training.train_seconds:.0f} s, eval loss {training.eval_loss:.4g}",
    ]
    for name, score in scores.items():
        right = round(score["exact_match"] * score["num_rows"])
        lines.append(
            f"held-out questions answered exactly, {name} training: {right} of {score['num_rows']} "
            f"({score['exact_match']:.0%}); answers that end by themselves: {score['stopped']:.0%}"
        )
    return "\n".join(lines)
