"""Where a person finds what a run makes, as artifacts of the run: a link where a browser can follow one, else the path
or the command."""

from pathlib import Path

from prefect.artifacts import create_link_artifact, create_markdown_artifact

from config.settings import Settings, shown
from finetuning import links
from finetuning.markdown import code, facts, fence, text

RUN, CHECKPOINTS, VERSION = "mlflow-run", "checkpoints", "registered-version"
"""Their keys."""


def show_mlflow_run(run_id: str, experiment_id: str | None) -> None:
    server = Settings().tracking_uri
    _show(RUN, f"MLflow run {run_id}", links.run_url(run_id, experiment_id), server)


def show_version(name: str, number: str) -> None:
    _show(VERSION, f"{name} version {number}", links.version_url(name, number), Settings().registry_uri)


def show_checkpoints(training: Path, every: int, keep: int) -> None:
    """A browser opens no folder, and the folder is the worker's: its path is shown."""
    what = facts({"Checkpoints": code(training / "checkpoints"), "Log": code(training / "log.txt")})
    kept = f"One every {every} steps; the best and the newest, {keep} in all, are kept. A run that is cut short goes on"
    about = f"{kept} from the newest one that is whole."
    create_markdown_artifact(f"{about}\n\n{what}", key=CHECKPOINTS, description="Where the training saves")


def _show(key: str, label: str, url: str | None, server: str) -> None:
    if url:
        create_link_artifact(url, link_text=label, key=key, description=label)
        return
    command = links.show_command(server)
    how = f"Nothing serves it yet. This does:\n\n{fence(command)}" if command else "It has no address for a browser."
    create_markdown_artifact(f"{text(label)} in {code(shown(server))}\n\n{how}", key=key, description=label)
