"""Recipes: the deployments in prefect.yaml, and how a run's values come out of them.

Code defaults < the deployment's parameters < what was given, merged deeply. Prefect itself merges one level deep: it
would drop the deployment's other training values as soon as one is overridden.
"""

import difflib
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from pydantic import ValidationError

from config.sections import Config
from config.settings import PROJECT_ROOT

Parameters = dict[str, Any]


class RefusedConfiguration(ValueError):
    """A configuration that cannot be run. The message names the key, the value it had and the remedy, a line each."""


class Resolved(NamedTuple):
    config: Config
    origins: dict[str, str]
    """Dotted name of every value -> where it came from: `default`, `recipe NAME` or `given`."""
    recipe: str | None
    """Its name; a recipe may have no values of its own."""


def read_recipe(name: str, path: Path = PROJECT_ROOT / "prefect.yaml") -> Parameters:
    """The parameters of deployment `name`. Raises RefusedConfiguration when there is none of that name."""
    recipes = {deployment["name"]: deployment for deployment in yaml.safe_load(path.read_text())["deployments"]}
    if name not in recipes:
        raise RefusedConfiguration(
            f"deployment {name!r} is not in {path.name}.{did_you_mean(name, recipes)} It has: {', '.join(recipes)}."
        )
    return recipes[name].get("parameters") or {}


def merge(base: Parameters, override: Parameters) -> Parameters:
    """`base` with the values of `override` in place, dictionaries merged into each other at every depth."""
    merged = dict(base)
    for key, value in override.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = merge(merged[key], value) if both else value
    return merged


def flatten(values: Parameters, prefix: str = "") -> Parameters:
    """{'training': {'seed': 1}} -> {'training.seed': 1}, two levels deep: section and field."""
    return {f"{section}.{name}": value for section, fields in values.items() for name, value in fields.items()}


def resolve(recipe_name: str | None, recipe: Parameters, given: Parameters) -> Resolved:
    """The run's configuration and the origin of each value.

    `given` may repeat the recipe's own values (Prefect hands a flow the deployment's parameters together with the
    overrides) and the defaults (its form sends every value): what changes nothing was not given.
    Raises RefusedConfiguration, naming key, value and remedy.
    """
    config = validate(merge(recipe, given))
    from_recipe, from_given = flatten(recipe), flatten(given)
    origins = {}
    without = flatten(Config().model_dump()) | from_recipe
    for name in without:
        if name in from_given and from_given[name] != without[name]:
            origins[name] = "given"
        else:
            origins[name] = f"recipe {recipe_name}" if name in from_recipe else "default"
    return Resolved(config, origins, recipe_name)


def validate(values: Parameters) -> Config:
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        raise RefusedConfiguration("\n".join(explain(error))) from None


def explain(error: ValidationError) -> list[str]:
    """One line an error: the dotted key, the value it had, what is wrong, and the nearest right name of a wrong one."""
    lines = []
    for problem in error.errors():
        name = ".".join(str(part) for part in problem["loc"])
        if problem["type"] == "extra_forbidden":
            lines.append(f"{name}={problem['input']!r}: there is no such key.{did_you_mean(name, known_names())}")
        elif not name:  # a check across fields names its fields itself
            lines.append(problem["msg"].removeprefix("Value error, "))
        else:
            lines.append(f"{name}={problem['input']!r}: {problem['msg']}")
    return lines


def known_names() -> list[str]:
    """Every dotted name a run takes, and the sections by themselves."""
    defaults = Config().model_dump()
    return [*defaults, *flatten(defaults)]


def did_you_mean(name: str, names: Any) -> str:
    near = difflib.get_close_matches(name, list(names), n=1, cutoff=0.5)
    return f" Did you mean {near[0]}?" if near else ""
