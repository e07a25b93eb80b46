"""Which data, base model, code and libraries made something."""

import subprocess
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from config.settings import PROJECT_ROOT

LINEAGE = (
    *("base_model", "base_model_version", "license", "dataset", "dataset_version", "recipe", "num_steps", "num_tokens"),
    *("total_flos", "gpu_hours", "eval_loss", "training", "checkpoint", "flow_run_url"),
)
"""Of `finetune.json`."""
LIBRARIES = ("torch", "transformers", "trl", "datasets", "accelerate", "mlflow")


def libraries() -> dict[str, str]:
    return {"finetune": code_version(), **{name: version(name) for name in LIBRARIES}}


def code_version() -> str:
    """The package's version, in a git checkout with its commit; `+changed` when files differ from it."""
    try:
        number = version("finetune")
    except PackageNotFoundError:
        number = "0"
    if not (PROJECT_ROOT / ".git").exists():
        return number
    try:
        command = ["git", "-C", str(PROJECT_ROOT), "describe", "--always", "--dirty=+changed", "--exclude=*"]
        commit = subprocess.run(command, text=True, capture_output=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return number
    return f"{number} at {commit}"


def tags(provenance: dict[str, Any]) -> dict[str, str]:
    """What a version and an MLflow run say of their making; keys and lengths are those that Unity Catalog takes."""
    settings = provenance["config"]
    values = {
        **{name: provenance[name] for name in LINEAGE},
        "seed": settings["training"]["seed"],
        "libraries": ", ".join(f"{name} {number}" for name, number in provenance["libraries"].items()),
    }
    return {name: str(value) for name, value in values.items() if value not in (None, "")}
