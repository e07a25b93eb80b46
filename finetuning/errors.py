"""The one exception a step ends with when the user, not a developer, has to read it."""

from typing import Literal

Kind = Literal["configuration", "data", "authentication", "out_of_disk", "transient", "preempted", "bug"]


class Failure(Exception):
    """A step that cannot go on. The message is one line: the setting or row, the value it had, the remedy."""

    def __init__(self, kind: Kind, message: str):
        super().__init__(kind, message)  # both are args, so that the exception survives pickling
        self.kind = kind
        self.message = message

    def __str__(self) -> str:
        return self.message
