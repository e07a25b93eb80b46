"""What a registry has of a model: its versions with fingerprint, labels and aliases, the same for every kind.

Four kinds: MLflow's own (sqlite, http), `databricks-uc[://profile]` and `uc:<url>`, the open-source Unity Catalog. That
one has neither tags nor aliases: there they are lines at the end of a version's comment. Every call is bounded in time,
and every error is a `Failure` that says what to do.
"""

import logging
import re
from collections.abc import Callable
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

from config.settings import shown
from finetuning.bounded import within
from finetuning.refusals import explained

FINGERPRINT_TAG = "finetune_fingerprint"
"""As all labels of ours without any of the characters . , - = / : that Databricks refuses in the key of a tag."""
ALIAS_LINE = "finetune_alias"
"""With `uc:` only: the line that names a version's aliases, separated by blanks."""
ANSWER_SECONDS = 90
"""What a registry may take for its answer. The databricks SDK alone would try a dead host for 7.5 minutes."""
TAG_VALUE_LENGTH = 1000
"""Characters that Databricks takes in a tag's value."""
LABEL_LINE = re.compile(r"([A-Za-z0-9_.-]+):(?: (.*))?")

T = TypeVar("T")
logger = logging.getLogger(__name__)


class ModelVersion(NamedTuple):
    """`description` is without the lines that hold labels and aliases in a `uc:` registry."""

    number: str
    status: str
    fingerprint: str | None
    labels: dict[str, str]
    aliases: tuple[str, ...]
    description: str
    run_id: str | None


class Registry:
    """Reads and marks versions; `register_version` of `finetuning.registry` makes them."""

    def __init__(self, uri: str, tracking_uri: str | None = None):
        self.uri, self.tracking_uri = uri, tracking_uri or uri
        self.has_aliases = not uri.startswith("uc:")

    @cached_property
    def client(self) -> Any:
        """MlflowClient would open a tracking store, too: without a URI that is a database in the working directory."""
        from mlflow.tracking._model_registry.client import ModelRegistryClient

        return ModelRegistryClient(self.uri, tracking_uri=self.tracking_uri)

    def versions(self, name: str) -> list[ModelVersion]:
        """All versions, newest first; none when the registered model is absent."""
        return self._ask(name, lambda: self._versions(name))

    def by_alias(self, name: str, alias: str) -> ModelVersion | None:
        if not self.has_aliases:
            return next((version for version in self.versions(name) if alias in version.aliases), None)
        return self._ask(name, lambda: self._by_alias(name, alias))

    def set_alias(self, name: str, alias: str, number: str) -> None:
        """Point `alias` at this version, and at no other."""
        if self.has_aliases:
            return self._ask(name, lambda: self.client.set_registered_model_alias(name, alias, number))
        logger.info(
            "registry %s has no aliases: %r is a line in the comment of %s version %s, which is loaded by its number",
            *(shown(self.uri), alias, name, number),
        )
        self._ask(name, lambda: self._move_alias_line(name, alias, number))

    def remove_alias(self, name: str, alias: str) -> None:
        """Nothing happens when there is none."""
        if not self.has_aliases:
            self._ask(name, lambda: self._move_alias_line(name, alias, None))
        elif self.by_alias(name, alias):
            self._ask(name, lambda: self.client.delete_registered_model_alias(name, alias))

    def label(self, name: str, number: str, labels: dict[str, str]) -> None:
        """Set version tags, or lines of the comment; other labels stay."""
        self._ask(name, lambda: self._label(name, number, labels))

    def delete(self, name: str, number: str) -> None:
        self._ask(name, lambda: self.client.delete_model_version(name, number))

    def ensure_model(self, name: str) -> None:
        """Ask before creating: who may add versions to a model need not have the right to make models."""
        self._ask(name, lambda: self._model(name) or self.client.create_registered_model(name))

    def has_model(self, name: str) -> bool:
        return self._ask(name, lambda: self._model(name)) is not None

    def _ask(self, name: str, call: Callable[[], T]) -> T:
        with explained(name, self.uri):
            return within(ANSWER_SECONDS, call)

    def _model(self, name: str) -> Any:
        from mlflow.exceptions import MlflowException

        try:
            return self.client.get_registered_model(name)
        except MlflowException as error:
            if not re.search("DOES_NOT_EXIST|NOT_FOUND", f"{error.error_code} {error}"):
                raise
            return None

    def _versions(self, name: str) -> list[ModelVersion]:
        from mlflow.entities.model_registry import ModelVersionSearch

        model = self._model(name)
        if model is None:
            return []
        found, page = [], None
        while page is None or page.token:
            page = self.client.search_model_versions(f"name = '{name}'", page_token=page and page.token)
            found += page
        if self.has_aliases:  # a hit of a Unity Catalog has no tags
            searched = [isinstance(version, ModelVersionSearch) for version in found]
            found = [
                self.client.get_model_version(name, str(version.version)) if bare else version
                for version, bare in zip(found, searched, strict=True)
            ]
        aliases = _aliases(model) if self.has_aliases else {}
        return [
            self._read(version, aliases) for version in sorted(found, key=lambda one: int(one.version), reverse=True)
        ]

    def _by_alias(self, name: str, alias: str) -> ModelVersion | None:
        """By way of the model: each kind of registry has an error of its own for an alias that is not there."""
        model = self._model(name)
        aliases = _aliases(model) if model else {}
        if alias not in aliases:
            return None
        return self._read(self.client.get_model_version(name, aliases[alias]), aliases)

    def _read(self, version: Any, aliases: dict[str, str]) -> ModelVersion:
        number = str(version.version)
        if self.has_aliases:
            description, labels = version.description or "", dict(version.tags)
            own = tuple(sorted(alias for alias, at in aliases.items() if at == number))
        else:
            description, labels = split_comment(version.description or "")
            own = tuple(labels.pop(ALIAS_LINE, "").split())
        fingerprint = labels.get(FINGERPRINT_TAG)
        return ModelVersion(number, version.status, fingerprint, labels, own, description, version.run_id or None)

    def _label(self, name: str, number: str, labels: dict[str, str]) -> None:
        if self.has_aliases:
            for key, value in fitting(labels).items():
                self.client.set_model_version_tag(name, number, key, value)
            return
        comment = self.client.get_model_version(name, number).description or ""
        description, known = split_comment(comment)
        changed = join_comment(description, {**known, **fitting(labels)})
        if changed != comment:
            self.client.update_model_version(name, number, changed)

    def _move_alias_line(self, name: str, alias: str, number: str | None) -> None:
        """First onto the new version, then off the others: at no time is there none."""
        for version in sorted(self._versions(name), key=lambda one: one.number != number):
            rest = [other for other in version.aliases if other != alias]
            if version.number == number:
                rest.append(alias)
            if set(rest) != set(version.aliases):
                self._label(name, version.number, {ALIAS_LINE: " ".join(sorted(rest))})


def fitting(labels: dict[str, str]) -> dict[str, str]:
    return {key: value[:TAG_VALUE_LENGTH] for key, value in labels.items()}


def split_comment(comment: str) -> tuple[str, dict[str, str]]:
    """Description and labels: the last paragraph, when each of its lines is `key: value`."""
    text, _, last = comment.rstrip().rpartition("\n\n")
    lines = [LABEL_LINE.fullmatch(line.strip()) for line in last.splitlines()]
    if not all(lines):
        return comment, {}
    return text.rstrip(), {line[1]: line[2] or "" for line in lines if line}


def join_comment(description: str, labels: dict[str, str]) -> str:
    """The comment that `split_comment` takes apart again; a label without a value is left out."""
    lines = [f"{key}: {' '.join(value.split())}" for key, value in labels.items() if value.strip()]
    return "\n\n".join(part for part in (description.rstrip(), "\n".join(lines)) if part)


def _aliases(model: Any) -> dict[str, str]:
    """Alias -> number. MLflow's own registries have a dict there, Unity Catalog a list."""
    if isinstance(model.aliases, dict):
        return {alias: str(number) for alias, number in model.aliases.items()}
    return {entry.alias: str(entry.version) for entry in model.aliases}
