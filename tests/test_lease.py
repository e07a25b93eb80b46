"""One holder at a time, whatever the clocks of the hosts say."""

import json
import logging
import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from finetuning.lease import is_leased, lease

FAST = {"renew_seconds": 0.1, "expiry_seconds": 0.8}
HOUR_NS = 3600 * 10**9


def work(directory: Path, rounds: int, problems: list) -> None:
    """Enter and leave; a marker file that is there already means that somebody else is inside."""
    for _ in range(rounds):
        with lease(directory, **FAST):
            marker = directory.with_name("inside")
            try:
                marker.touch(exist_ok=False)
            except FileExistsError:
                problems.append("two at once")
            time.sleep(0.01)
            marker.unlink(missing_ok=True)


def hold(directory: Path, held) -> None:
    with lease(directory, **FAST):
        held.set()
        time.sleep(60)


def forge(directory: Path, number: int = 1, content: str | None = None, changed_ns: int | None = None) -> Path:
    """The lease of another host."""
    path = directory.with_name(f".{directory.name}.lease.{number}")
    path.write_text(json.dumps({"host": "far-away", "boot_id": "other", "pid": 1}) if content is None else content)
    if changed_ns is not None:
        os.utime(path, ns=(changed_ns, changed_ns))
    return path


def test_never_two_at_once(tmp_path: Path) -> None:
    with multiprocessing.Manager() as manager:
        problems = manager.list()
        clients = [multiprocessing.Process(target=work, args=(tmp_path / "a", 8, problems)) for _ in range(3)]
        for client in clients:
            client.start()
        for client in clients:
            client.join()
        assert [client.exitcode for client in clients] == [0, 0, 0]
        assert list(problems) == []


def test_a_killed_holder_of_this_host_is_taken_over(tmp_path: Path) -> None:
    held = multiprocessing.Event()
    holder = multiprocessing.Process(target=hold, args=(tmp_path / "a", held))
    holder.start()
    assert held.wait(30)
    assert is_leased(tmp_path / "a")
    os.kill(holder.pid, signal.SIGKILL)
    holder.join()
    with lease(tmp_path / "a", renew_seconds=0.1, expiry_seconds=10**6):
        assert [path.name for path in tmp_path.glob(".a.lease.*")] == [".a.lease.2"]
    assert not is_leased(tmp_path / "a")


@pytest.mark.parametrize("content", [None, "", '{"host": "far', "[]"])
def test_a_foreign_host_that_died_is_taken_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: str | None
) -> None:
    """Its lease lies an hour in the future: clocks are not compared."""
    caplog.set_level(logging.INFO)
    forge(tmp_path / "a", content=content, changed_ns=time.time_ns() + HOUR_NS)
    with lease(tmp_path / "a", **FAST):
        pass
    assert f"{tmp_path / 'a'} is held by {'a host unknown' if content is not None else 'far-away'}" in caplog.text


def test_a_foreign_host_whose_clock_runs_back_is_waited_for(tmp_path: Path) -> None:
    forged, stop, inside = forge(tmp_path / "a"), threading.Event(), threading.Event()

    def enter() -> None:
        with lease(tmp_path / "a", **FAST):
            inside.set()

    waiter = threading.Thread(target=enter)
    waiter.start()
    for tick in range(20):  # two and a half times as long as it takes to be thought dead
        changed = time.time_ns() - HOUR_NS - tick * 10**9
        os.utime(forged, ns=(changed, changed))
        assert not stop.wait(0.1)
        assert not inside.is_set()
    waiter.join(30)
    assert inside.is_set()


def test_a_holder_that_was_taken_over_learns_it(tmp_path: Path) -> None:
    lost: list[str] = []
    with lease(tmp_path / "a", **FAST, on_lost=lost.append):
        forge(tmp_path / "a", number=2)
        end = time.monotonic() + 30
        while not lost and time.monotonic() < end:
            time.sleep(0.05)
    assert "was taken over" in lost[0]
