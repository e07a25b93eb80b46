"""What a preflight finds: a line a check, with what was found and what helps. All that is refused, not the first."""

import textwrap
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Literal

from pydantic import BaseModel

from finetuning.errors import REMEDIES, Failure, Kind

CHECKS = (
    *("configuration", "libraries", "dataset", "rows", "tokens", "model", "steps", "memory", "disk"),
    *("tracking server", "registry", "time", "cost", "preflight"),
)
"""In the order in which they are shown."""


class Line(BaseModel):
    check: str
    result: Literal["ok", "warning", "refused"]
    found: str
    remedy: str = ""
    failure: tuple[Kind, str] | None = None
    """Kind and message, when it is refused."""


class Findings:
    def __init__(self, lines: Iterable[Line] = ()):
        self.lines = list(lines)

    def ok(self, check: str, found: str, remedy: str = "") -> None:
        self.lines.append(Line(check=check, result="ok", found=found, remedy=remedy))

    def warn(self, check: str, found: str, remedy: str = "") -> None:
        self.lines.append(Line(check=check, result="warning", found=found, remedy=remedy))

    def warn_of(self, check: str, failure: Failure) -> None:
        """What would be refused, where it is only likely, or not needed."""
        self.warn(check, *_parts(failure))

    def refuse(self, check: str, failure: Failure) -> None:
        found, remedy = _parts(failure)
        told = failure.kind, failure.message
        self.lines.append(Line(check=check, result="refused", found=found, remedy=remedy, failure=told))

    @contextmanager
    def checking(self, check: str) -> Iterator[None]:
        """A Failure is a line, and the next check goes on; but who is told to stop stops."""
        try:
            yield
        except Failure as failure:
            if failure.kind == "preempted":
                raise
            self.refuse(check, failure)

    def refused(self, check: str) -> bool:
        return any(line.check == check and line.failure for line in self.lines)

    @property
    def failure(self) -> Failure | None:
        """Of all that is refused. Its kind is one that no other try heals, if there is one."""
        told = [line.failure for line in self.in_order() if line.failure]
        if not told:
            return None
        lasting = [kind for kind, _ in told if kind != "transient"]
        return Failure([*lasting, told[0][0]][0], "\n".join(message for _, message in told))

    def in_order(self) -> list[Line]:
        return sorted(self.lines, key=lambda line: CHECKS.index(line.check))

    def rows(self) -> list[dict[str, str]]:
        return [line.model_dump(include={"check", "result", "found", "remedy"}) for line in self.in_order()]

    def text(self, width: int | None = None) -> str:
        """Aligned, a remedy below what was found; broken at `width` characters if one is given."""
        first = max(map(len, CHECKS)) + 2
        indent = " " * (first + len("refused") + 2)
        lines = []
        for line in self.in_order():
            lines += _broken(f"{line.check:{first}}{line.result:9}{line.found}", indent, width)
            lines += _broken(f"{indent}-> {line.remedy}", f"{indent}   ", width) if line.remedy else []
        return "\n".join(lines)


def _parts(failure: Failure) -> tuple[str, str]:
    """What is the matter, and what to do: the last sentence, or what helps against this kind."""
    found, dot, remedy = failure.message.rpartition(". ")
    if remedy[:1].isupper() and dot:
        return f"{found}.", remedy
    return failure.message, REMEDIES[failure.kind]


def _broken(line: str, indent: str, width: int | None) -> list[str]:
    if width is None:
        return [line]
    return textwrap.wrap(line, max(width, len(indent) + 20), subsequent_indent=indent, break_on_hyphens=False)
