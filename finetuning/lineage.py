"""Which code and libraries made something."""

import subprocess
from importlib.metadata import PackageNotFoundError, version

from config.settings import PROJECT_ROOT

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
