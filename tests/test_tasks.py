"""What tasks hand over and how they are cached, read off the tasks themselves."""

import importlib
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from prefect import Task
from prefect.cache_policies import NO_CACHE
from pydantic import BaseModel

from tests.conftest import PROJECT

SMALL = (str, int, float, bool, type(None), Path)
"""Besides what is made of them."""


def tasks() -> dict[str, Task]:
    modules = (importlib.import_module(f"tasks.{path.stem}") for path in sorted((PROJECT / "tasks").glob("*.py")))
    found = {
        name: value for module in modules for name, value in vars(module).items() if isinstance(value, Task)
    }  # fmt: skip
    assert {"preflight", "load_and_split", "train", "register", "report"} <= set(found)
    return found


def parts(kind: Any) -> Iterator[Any]:
    """The types that a value of type `kind` is made of."""
    if kind in (dict[str, Any], list[Any]):  # what JSON holds: a section's own options for a library
        yield str
    elif inner := get_args(kind):
        for part in inner:
            yield from parts(part)
    elif isinstance(kind, type) and issubclass(kind, BaseModel):
        for field in kind.model_fields.values():
            yield from parts(field.annotation)
    elif isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "_fields"):
        for part in get_type_hints(kind).values():
            yield from parts(part)
    else:
        yield kind


def is_small(kind: Any) -> bool:
    return kind in (*SMALL, dict, list, ...) or isinstance(kind, str | int | float)  # the latter of a Literal


@pytest.mark.parametrize(("name", "one"), tasks().items())
def test_a_task_takes_and_returns_small_values_only(name: str, one: Task) -> None:
    """A model, tokenizer or dataset would be pickled for the cache key and for the result."""
    hints = get_type_hints(one.fn)
    assert set(hints) == {*one.fn.__code__.co_varnames[: one.fn.__code__.co_argcount], "return"}, "all are annotated"
    assert [kind for hint in hints.values() for kind in parts(hint) if not is_small(kind)] == []


def test_what_is_not_small_is_seen() -> None:
    class Holds(BaseModel, arbitrary_types_allowed=True):
        names: list[str]
        lock: types.SimpleNamespace | None

    assert [kind for kind in parts(Holds) if not is_small(kind)] == [types.SimpleNamespace]
    assert not all(map(is_small, parts(Any)))


@pytest.mark.parametrize(("name", "one"), tasks().items())
def test_a_task_says_how_it_is_cached(name: str, one: Task) -> None:
    """Prefect's default takes a path for what it holds, and asks to hash whatever is passed."""
    if one.cache_key_fn is None:
        assert one.cache_policy == NO_CACHE, name
    else:
        assert one.persist_result, name
        assert one.result_serializer == "json", name
