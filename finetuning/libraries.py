"""The installed libraries against the ranges of pyproject.toml and the tested versions of constraints.txt."""

import platform
import re
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from config.settings import PROJECT_ROOT
from finetuning.errors import Failure
from finetuning.findings import Findings

NAMED = ("torch", "transformers", "trl", "mlflow", "prefect")
INSTALL = "Install what was tested: pip install -c constraints.txt ."


def check_libraries(findings: Findings, project: Path = PROJECT_ROOT) -> None:
    """One line. A package that is not there is refused; one outside of its range was never tried and is a warning."""
    try:
        wanted = tomllib.loads((project / "pyproject.toml").read_text())["project"]
        pins = dict(re.findall(r"^([\w.-]+)==(\S+)", (project / "constraints.txt").read_text(), re.MULTILINE))
    except OSError as error:
        return findings.warn(
            "libraries", f"not compared: {error.filename} is not there", "Copy it from the repository."
        )
    tested = {canonicalize_name(name): pin for name, pin in pins.items()}
    requirements = [Requirement(text) for text in wanted["dependencies"]]
    installed = {requirement.name: _installed(requirement.name) for requirement in requirements}
    if missing := [name for name, number in installed.items() if number is None]:
        raise Failure("configuration", f"not installed: {', '.join(missing)}. {INSTALL}")
    outside = [
        f"{one.name} {installed[one.name]} is not {one.specifier}"
        for one in requirements
        if not one.specifier.contains(installed[one.name], prereleases=True)
    ]
    if not SpecifierSet(wanted["requires-python"]).contains(platform.python_version(), prereleases=True):
        outside.append(f"Python {platform.python_version()} is not {wanted['requires-python']}")
    if outside:
        return findings.warn("libraries", f"not tested: {', '.join(outside)}", INSTALL)
    others = [
        f"{name} {number} (tested: {tested.get(canonicalize_name(name))})"
        for name, number in installed.items()
        if number.partition("+")[0] != tested.get(canonicalize_name(name))
    ]
    if others:
        return findings.ok("libraries", f"all in their ranges, and not what was tested: {', '.join(others)}")
    named = ", ".join(f"{name} {installed[name]}" for name in NAMED)
    findings.ok("libraries", f"as tested: {named}, and {len(installed) - len(NAMED)} more")


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
