"""One holder of a directory at a time across hosts that share a storage root, where a lock may not be passed on.

A lease is a numbered file beside the directory, `.NAME.lease.N`; the highest number counts. Whoever takes over makes
N+1 by a hard link, which fails if it exists, on NFS as well, so that of two only one succeeds. Clocks of hosts are
not compared, but for a whole day: a holder is dead when its file's time of change has stood still for EXPIRY_SECONDS of
the waiter's own clock.
"""

import json
import logging
import os
import signal
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

RENEW_SECONDS = 10.0
EXPIRY_SECONDS = 60.0
DEAD_SECONDS = 24 * 3600
"""So long unrenewed, a lease is a dead holder's whatever the clocks of two hosts say."""
RELEASED_NS = 0
"""Time of change of a released lease, which no live one has: the next one takes over at once."""
logger = logging.getLogger(__name__)


def kill_self(message: str) -> None:
    """Two processes that write into one directory are worse than one that dies: its training is resumed."""
    logger.critical(message)
    os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def lease(
    directory: Path,
    *,
    renew_seconds: float = RENEW_SECONDS,
    expiry_seconds: float = EXPIRY_SECONDS,
    on_lost: Callable[[str], None] = kill_self,
) -> Iterator[None]:
    """Hold the lease of `directory`; wait, and say so once, while another process has it."""
    mine = _acquire(directory, min(1.0, renew_seconds), expiry_seconds)
    done = threading.Event()
    arguments = (directory, mine, renew_seconds, expiry_seconds, on_lost, done)
    renewal = threading.Thread(target=_renew, args=arguments, daemon=True)
    renewal.start()
    try:
        yield
    finally:
        done.set()
        renewal.join()
        with suppress(OSError):
            os.utime(mine, ns=(RELEASED_NS, RELEASED_NS))


def is_leased(directory: Path) -> bool:
    """Whether somebody holds the lease, or died with it in the last DEAD_SECONDS: only waiting tells these apart."""
    with suppress(IndexError, FileNotFoundError):
        return not _is_free(_leases(directory)[-1])
    return False


def _acquire(directory: Path, poll_seconds: float, expiry_seconds: float) -> Path:
    directory.parent.mkdir(parents=True, exist_ok=True)
    seen: tuple[Path, int] | None = None
    since, said = time.monotonic(), False
    while True:
        leases = _leases(directory)
        newest = leases[-1] if leases else None
        changed = _changed(newest)
        if newest and changed is not None and not _is_free(newest):
            if seen != (newest, changed):
                seen, since = (newest, changed), time.monotonic()
            if time.monotonic() - since < expiry_seconds:
                if not said:
                    holder = _holder(newest)
                    where = f"{holder.get('host', 'a host unknown')}, process {holder.get('pid', 'unknown')}"
                    logger.info("%s is held by %s: waiting for it", directory, where)
                    said = True
                time.sleep(poll_seconds)
                continue
        if mine := _take(directory, _number(newest) + 1 if newest else 1):
            for older in leases:
                older.unlink(missing_ok=True)
            return mine


def _take(directory: Path, number: int) -> Path | None:
    """Lease number `number`, unless another process was faster."""
    mine = directory.with_name(f".{directory.name}.lease.{number}")
    temporary = mine.with_name(f".{directory.name}.claim.{uuid.uuid4().hex}")
    temporary.write_text(json.dumps({**_own_identity(), "pid": os.getpid()}))
    try:
        os.link(temporary, mine)
    except FileExistsError:
        return None
    finally:
        temporary.unlink()
    if _leases(directory)[-1] != mine:  # this number was used and deleted before
        mine.unlink(missing_ok=True)
        return None
    return mine


def _renew(
    directory: Path,
    mine: Path,
    renew_seconds: float,
    expiry_seconds: float,
    on_lost: Callable[[str], None],
    done: threading.Event,
) -> None:
    renewed = time.monotonic()
    while not done.wait(renew_seconds):
        try:
            os.utime(mine)
            newest = _leases(directory)[-1]
        except FileNotFoundError:
            newest = None
        except OSError as error:
            if time.monotonic() - renewed < expiry_seconds:
                continue
            return on_lost(f"the lease of {directory} could not be renewed for {expiry_seconds:g} seconds: {error}")
        if newest != mine:
            return on_lost(f"the lease of {directory} was taken over while this process did not renew it")
        renewed = time.monotonic()


def _is_free(lease_file: Path) -> bool:
    """Released, of a process of this host and boot that is gone, or not renewed for a day."""
    changed = _changed(lease_file)
    if changed is None or time.time() - changed / 1e9 > DEAD_SECONDS:
        return True
    holder = _holder(lease_file)
    return _own_identity().items() <= holder.items() and not Path(f"/proc/{holder.get('pid')}").exists()


def _own_identity() -> dict[str, Any]:
    return {"host": socket.gethostname(), "boot_id": Path("/proc/sys/kernel/random/boot_id").read_text().strip()}


def _holder(lease_file: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError):
        holder = json.loads(lease_file.read_text())
        return holder if isinstance(holder, dict) else {}
    return {}


def _changed(lease_file: Path | None) -> int | None:
    with suppress(FileNotFoundError):
        return lease_file and lease_file.stat().st_mtime_ns
    return None


def _leases(directory: Path) -> list[Path]:
    prefix = f".{directory.name}.lease."
    found = (path for path in directory.parent.iterdir() if path.name.startswith(prefix))
    return sorted((path for path in found if path.name[len(prefix) :].isdigit()), key=_number)


def _number(lease_file: Path) -> int:
    return int(lease_file.name.rpartition(".")[2])
