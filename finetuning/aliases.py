"""What people do with registered versions; see `finetuning.register`, which this is part of.

python -m finetuning.register list NAME
python -m finetuning.register promote NAME VERSION
python -m finetuning.register rollback NAME
"""

import argparse
import datetime
import sys

from config.settings import Settings, apply_environment, shown
from finetuning import artifacts
from finetuning.champion import ALIAS, registry
from finetuning.errors import Failure
from finetuning.promote import PREVIOUS, ROLLED_BACK, VERDICT, make_champion
from finetuning.proof import PROVEN
from finetuning.registry import ModelVersion, Registry

LINE = "{:<8}{:<10}{:<22}{:<18}{:<20}{}"


def main(arguments: list[str]) -> None:
    """Exit codes: 0 done, 1 refused, 2 wrong usage."""
    parser = argparse.ArgumentParser("python -m finetuning.register", description="Look at versions, move `champion`.")
    commands = parser.add_subparsers(dest="command", required=True)
    for command, told in COMMANDS.items():
        one = commands.add_parser(command, help=told, description=told)
        one.add_argument("name", help="catalog.schema.model")
        if command == "promote":
            one.add_argument("version")
    line = parser.parse_args(arguments)
    apply_environment()
    try:
        with artifacts.lock(Settings().storage_root / "registrations" / line.name):
            given = {name: value for name, value in vars(line).items() if name != "command"}
            print(DO[line.command](registry(), **given))
    except Failure as failure:
        sys.exit(failure.message)


def list_versions(versions: Registry, name: str) -> str:
    found = versions.versions(name)
    if not found:
        where = shown(versions.uri)
        raise Failure("configuration", f"{name} has no version in {where}. Check the name and MLFLOW_REGISTRY_URI.")
    rows = [LINE.format("version", "status", "aliases", "fingerprint", "proof", "verdict")]
    for one in found:
        labels = one.labels
        facts = (one.fingerprint or "-", labels.get(PROVEN, "none"), labels.get(VERDICT, "none"))
        rows.append(LINE.format(one.number, one.status, ", ".join(one.aliases) or "-", *facts))
    return "\n".join(rows)


def promote(versions: Registry, name: str, version: str) -> str:
    chosen = _find(versions, name, version)
    if chosen.status != "READY":
        raise Failure("configuration", f"{name} version {version} is {chosen.status} and cannot be loaded.")
    if PROVEN not in chosen.labels:
        message = f"{name} version {version} was never proven: nobody knows whether it loads and answers."
        raise Failure("configuration", f"{message} Run the flow again: it finds the version and proves it.")
    if ALIAS in chosen.aliases:
        return f"{name} version {version} is the champion already"
    make_champion(versions, name, version)
    versions.label(name, version, {VERDICT: f"champion: promoted by hand {_today()}", ROLLED_BACK: ""})
    return f"{name} version {version} is the champion now"


def rollback(versions: Registry, name: str) -> str:
    """The version before becomes the champion again, and no run promotes the one taken back by itself."""
    champion = versions.by_alias(name, ALIAS)
    if champion is None:
        raise Failure("configuration", f"{name} has no champion: there is nothing to roll back.")
    before = champion.labels.get(PREVIOUS)
    if not before:
        message = f"{name} version {champion.number} is the first champion: there is none before it."
        raise Failure("configuration", f"{message} Promote another: python -m finetuning.register list {name}")
    _find(versions, name, before)
    versions.label(name, champion.number, {ROLLED_BACK: _today()})
    versions.set_alias(name, ALIAS, before)
    return f"{name} version {before} is the champion again, in place of version {champion.number}"


def _find(versions: Registry, name: str, number: str) -> ModelVersion:
    found = {version.number: version for version in versions.versions(name)}
    if number not in found:
        raise Failure("configuration", f"{name} has no version {number!r}. It has: {', '.join(found) or 'none'}.")
    return found[number]


def _today() -> str:
    return datetime.datetime.now(datetime.UTC).date().isoformat()


DO = {"list": list_versions, "promote": promote, "rollback": rollback}
COMMANDS = {
    "list": "Show the versions of a model, with aliases, proof and verdict.",
    "promote": "Make a proven version the champion.",
    "rollback": "Make the champion before this one the champion again.",
}
