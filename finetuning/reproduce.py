"""The command that makes a version again, and what must be as it was."""

import json
import shlex
from typing import Any

from config.recipes import RefusedConfiguration, flatten, read_recipe, resolve
from config.settings import shown
from finetuning.inputs import Input
from finetuning.markdown import code, fence, table, text
from finetuning.report import Job

ELSEWHERE = "qwen3-4b"
"""A recipe that is in prefect.yaml, for a run whose own is not."""


def again(job: Job) -> str:
    libraries = dict(job.provenance()["libraries"])
    version, _, commit = libraries.pop("finetune").partition(" at ")
    checkout = f"git checkout {commit.removesuffix('+changed')}\n" if commit else ""
    told = [fence(f"{checkout}{command(job)}")]
    if commit.endswith("+changed"):
        told.append("Files of the checkout differed from that commit.")
    for kind, source in (("model", job.model), ("dataset", job.dataset)):
        if not is_on_hub(source):
            told.append(
                f"The {kind} {text(shown(source.name))} is not from the hub: its content was {code(source.version)}."
            )
    rows = [[text(name), text(number)] for name, number in {"finetune": version, **libraries}.items()]
    return "\n\n".join([*told, table(["library", "version"], rows)])


def command(job: Job) -> str:
    """Everything that the recipe, as prefect.yaml has it here, does not say; dataset and model by their commit."""
    recipe = job.recipe
    try:
        known = resolve(recipe, read_recipe(recipe or ELSEWHERE), {}).config
    except RefusedConfiguration:
        recipe, known = None, resolve(None, read_recipe(ELSEWHERE), {}).config
    config = pinned(job)
    options = {
        name: value
        for name, value in flatten(config).items()
        if value != flatten(known.model_dump())[name] and not name.startswith("run.")
    }
    given = (f"--{name} {shlex.quote(shown(written(value)))}" for name, value in options.items())
    return " \\\n  ".join([f"python -m flows.finetune {recipe or ELSEWHERE}", *given])


def pinned(job: Job) -> dict[str, Any]:
    config = job.config.model_dump()
    for kind, source in (("model", job.model), ("dataset", job.dataset)):
        if is_on_hub(source):
            config[kind]["revision"] = source.version
    return config


def is_on_hub(source: Input) -> bool:
    return source.path is None and source.uri is None


def written(value: Any) -> str:
    """As the command line reads it."""
    if value is None:
        return "null"
    return value if isinstance(value, str) else json.dumps(value)
