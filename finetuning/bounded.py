"""Calls to servers that are given up after a while: no library here bounds all of its own waiting."""

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def within(seconds: float, call: Callable[[], T]) -> T:
    """The result of `call`, or what it raised. Raises TimeoutError when it takes longer; it may go on in its thread,
    which does not keep the process from ending."""
    results: list[T] = []
    errors: list[Exception] = []

    def work() -> None:
        try:
            results.append(call())
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError(f"no answer within {seconds:g} seconds; check the host and the network")
    return results[0]
