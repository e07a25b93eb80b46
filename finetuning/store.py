"""List what the storage root holds, and prune what nobody needs any more.

    python -m finetuning.store list
    python -m finetuning.store prune [--older_than_days 30] [--dry_run true]

Never pruned: what a process works on, what was used within the limit, a finished training without its model directory
and what that needs, the copies in volumes, and whatever this pipeline did not make. What goes is moved aside under its
lock: a run that starts at that moment finds all of it or nothing. Lock files stay; without one, two could enter.
"""

import fcntl
import os
import re
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import Field, ValidationError
from pydantic_settings import BaseSettings, CliPositionalArg, CliSettingsSource, SettingsConfigDict, SettingsError

from config.cli import USAGE_ERROR
from config.recipes import explain
from config.settings import Settings
from finetuning import resume
from finetuning.artifacts import FINGERPRINT_LENGTH, MANIFEST, is_locked, read_json, read_manifest
from finetuning.export import PROVENANCE
from finetuning.launcher import LOG
from finetuning.lease import is_leased, lease

JOB = "job.json"
ARTIFACTS = {
    "trainings": (JOB, ("tokens", "dataset", "model", "base")),
    "model-directories": (PROVENANCE, ("training",)),
    "tokens": (MANIFEST, ("dataset", "model")),
    "models": (MANIFEST, ("base",)),
    "datasets": (MANIFEST, ()),
    "evaluations": (MANIFEST, ()),
}
"""Kind -> file and names of what one was, or will be, made from. Pruned in this order: a training before its needs."""
OTHERS = set("volumes huggingface mlflow prefect prefect-results runs outcomes registrations cache tmp".split())
FINGERPRINT = re.compile(f"[0-9a-f]{{{FINGERPRINT_LENGTH}}}")
SOURCE = re.compile(rf"\b({'|'.join(ARTIFACTS)})/{FINGERPRINT.pattern}\b")
DAY_SECONDS = 24 * 60 * 60
IN_USE = "in use"
LINE = "{:<17}  {:<16}  {:>10}  {:>9}  {:<8}  {}"


class Item(NamedTuple):
    kind: str
    """One of ARTIFACTS; `leftover` of an attempt that died; `volumes` for a copy there; `unknown`."""
    path: Path
    owner: Path
    """The artifact whose lock guards it: an artifact guards itself."""
    complete: bool = False
    """Of a training: finished."""
    sources: frozenset[Path] = frozenset()


class Store:
    """What lies below `root` now."""

    def __init__(self, root: Path):
        self.root = root
        copies = [path for path in sorted(root.glob("volumes/*/*/*/*/*")) if is_folder(path)]
        strange = [path for path in entries(root) if path.name not in OTHERS | ARTIFACTS.keys() or path.is_symlink()]
        self.items = [item for kind in ARTIFACTS for path in entries(root / kind) for item in read(path)]
        self.items += [Item("volumes", path, path, read_manifest(path) is not None) for path in copies]
        self.items += [Item("unknown", path, path) for path in strange]
        saved = [item.sources for item in self.items if item.kind == "model-directories" and item.complete]
        trainings = [item for item in self.items if item.kind == "trainings"]
        self.waiting = [one for one in trainings if not (one.complete and any(one.path in it for it in saved))]

    def users(self, item: Item) -> set[Path]:
        """Whose use is a use of the item: its owner's, that of what is made from it, and for a model directory that of
        its training, whose lock registering holds. A training is not used by its model directory."""
        readers = [other for other in self.items if item.path in other.sources and other.kind != "model-directories"]
        training = item.sources if item.kind == "model-directories" else ()
        return {item.path, item.owner, *training, *(reader.path for reader in readers)}

    def last_used(self, item: Item) -> float:
        return max(map(last_used, self.users(item)))

    def needed_by(self, item: Item, unfinished: bool = True) -> str:
        """Trainings that will read it: those without a model directory, the unfinished ones among them if so asked."""
        trainings = [one for one in self.waiting if item.path in one.sources and (unfinished or one.complete)]
        return ", ".join(f"training {one.path.name}" for one in trainings)

    def untouchable(self, item: Item) -> str:
        """Why it stays whatever its age and whoever needs it; empty when nothing is in the way."""
        if item.kind in ("volumes", "unknown"):
            return "never pruned"
        if any(map(is_locked, self.users(item))):
            return IN_USE
        if item.complete and item in self.waiting:
            return "its model directory is not made yet"
        unsettled = item.kind == "trainings" and item.complete and resume.read_state(item.path).get("settled") is False
        return "its MLflow run is not complete yet: run it again" if unsettled else ""

    def kept_because(self, item: Item, older_than_days: int) -> str:
        """Empty when it may go. A training uses what it needs, so that an unfinished one counts while it is recent."""
        days = 1 if item.kind == "leftover" else older_than_days
        recent = time.time() - self.last_used(item) < days * DAY_SECONDS
        needed_by = self.needed_by(item, unfinished=recent)
        lately = f"used in the last {days} d" if recent else ""
        return self.untouchable(item) or (f"needed by {needed_by}" if needed_by else lately)

    def line(self, item: Item, remark: str) -> str:
        path = "" if item.kind in ARTIFACTS else f" ({item.path.relative_to(self.root)})"
        if item.kind == "unknown":
            return LINE.format(item.kind, "", "", "", "", remark + path)
        size, complete = human(disk(item.path)[0]), "yes" if item.complete else "no"
        return LINE.format(item.kind, item.owner.name, size, age(self.last_used(item)), complete, remark + path)


def entries(folder: Path) -> list[Path]:
    """What is in it, sorted. A link is not followed: what it leads to may lie anywhere."""
    return sorted(folder.iterdir()) if is_folder(folder) else []


def is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def read(path: Path) -> Iterator[Item]:
    """What an entry of an artifacts' folder amounts to: nothing for a lock file, leftovers besides for a training."""
    owner = path.name[1:].partition(".")[0] if path.name.startswith(".") else ""
    if FINGERPRINT.fullmatch(path.name) and is_folder(path):
        yield read_artifact(path)
        damaged = [entry for entry in entries(path / "checkpoints") if entry.name.startswith("damaged-checkpoint-")]
        yield from (Item("leftover", entry, path) for entry in damaged if is_folder(entry))
    elif not FINGERPRINT.fullmatch(owner):
        yield Item("unknown", path, path)
    elif path.suffix in (".partial", ".pruned") and is_folder(path):
        yield Item("leftover", path, path.with_name(owner))


def read_artifact(path: Path) -> Item:
    kind, root = path.parent.name, path.parent.parent
    file, names = ARTIFACTS[kind]
    facts = {}
    with suppress(OSError, ValueError):
        facts = read_json(path / file)
    # Found by KIND/FINGERPRINT: the root may have been moved. `training` is a fingerprint only.
    sources = {root / found[0] for name in names for found in SOURCE.finditer(f"trainings/{facts.get(name)}")}
    complete = resume.finished(path) if kind == "trainings" else read_manifest(path)
    return Item(kind, path, path, complete is not None, frozenset(sources))


def last_used(path: Path) -> float:
    """The newest time of what a use changes. Zero for what is not there."""
    times = [0.0]
    for file in (path, lock_file(path), *(path / name for name in (MANIFEST, JOB, resume.STATE, LOG))):
        with suppress(OSError):
            times.append(file.lstat().st_mtime)
    return max(times)


def lock_file(path: Path) -> Path:
    return path.with_name(f".{path.name}.lock")


def disk(*folders: Path) -> tuple[int, int]:
    """Bytes of the files below, hard links counted once; and how many come free when all of these go."""
    files, links = {}, Counter()
    for file in (Path(top, name) for folder in folders for top, _, names in os.walk(folder) for name in names):
        with suppress(FileNotFoundError):  # a run is at work there
            stat = file.lstat()
            files[stat.st_dev, stat.st_ino] = stat
            links[stat.st_dev, stat.st_ino] += 1
    free = sum(stat.st_size for key, stat in files.items() if links[key] >= stat.st_nlink)
    return sum(stat.st_size for stat in files.values()), free


def human(num_bytes: int) -> str:
    power = max(0, num_bytes.bit_length() - 1) // 10
    return f"{num_bytes / 1024**power:.{min(power, 1)}f} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"


def age(then: float) -> str:
    hours = max(0, time.time() - then) / 3600
    return f"{hours // 24:.0f} d" if hours >= 24 else f"{hours:.0f} h"


def show(root: Path) -> None:
    """A line an item, then the total of each folder."""
    store = Store(root)
    print(LINE.format("kind", "fingerprint", "size", "last used", "complete", "needed by"))
    for item in store.items:
        print(store.line(item, store.untouchable(item) or store.needed_by(item) or "nobody"))
    for folder in filter(is_folder, entries(root)):
        print(LINE.format(folder.name, "total", human(disk(folder)[0]), "", "", "").rstrip())


def prune(root: Path, older_than_days: int, dry_run: bool) -> None:
    """Remove what may go, and say of every item what became of it."""
    store, gone, free = Store(root), [], 0
    print(LINE.format("kind", "fingerprint", "size", "last used", "complete", "outcome"))
    for item in store.items:
        if any(folder in item.path.parents for folder in gone):  # it went with its training
            continue
        outcome = ("would be " if dry_run else "") + "removed"
        if item.kind == "trainings" and not item.complete:
            outcome += " although unfinished: nobody has gone on with it"
        line, freed = store.line(item, outcome), disk(item.path)[1]
        reason = store.kept_because(item, older_than_days) or ("" if dry_run else remove(item, older_than_days))
        if not reason:
            gone.append(item.path)
            free += freed
        print(store.line(item, f"kept: {reason}") if reason else line)
    print(f"{human(disk(*gone)[1])} would come free" if dry_run else f"{human(free)} came free")


def remove(item: Item, older_than_days: int) -> str:
    """Move it aside under its lock, then delete it. Returns why that cannot be; empty when it is gone."""
    aside = item.owner.with_name(f".{item.owner.name}.pruned")
    store = Store(item.owner.parent.parent)  # as it is by now
    used = store.last_used(item)
    try:
        if reason := store.kept_because(item, older_than_days):
            return reason
        with claimed(item.owner):
            if store.last_used(item) > used:
                return IN_USE
            if item.path != aside:
                shutil.rmtree(aside, ignore_errors=True)
                item.path.rename(aside)
            if store.last_used(item) > used:  # who marked it just before the move counts on it
                aside.rename(item.path)
                return IN_USE
        shutil.rmtree(aside)
    except OSError as error:
        return IN_USE if isinstance(error, BlockingIOError) else str(error)
    return ""


@contextmanager
def claimed(path: Path) -> Iterator[None]:
    """The lock of `path`, without waiting and without marking a use. Raises BlockingIOError."""
    new = not lock_file(path).exists()
    with lock_file(path).open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if new:
            os.utime(file.fileno(), (0, 0))
        shared = Settings().shared_storage
        if shared and is_leased(path):
            raise BlockingIOError
        with lease(path) if shared else nullcontext():
            yield


class CommandLine(BaseSettings):
    """List what is below FINETUNE_STORAGE_ROOT, or prune what nobody needs and nobody has used lately."""

    model_config = SettingsConfigDict(
        cli_prog_name="python -m finetuning.store", cli_exit_on_error=False, use_attribute_docstrings=True
    )

    command: CliPositionalArg[Literal["list", "prune"]]
    """`list` says what is there and changes nothing, `prune` removes."""
    older_than_days: int = Field(30, ge=1)
    """Days since the last use. At least one: between two steps a run holds no lock."""
    dry_run: bool = False
    """Only say what would be removed."""

    @classmethod
    def settings_customise_sources(cls, settings_cls: type[BaseSettings], **sources: Any) -> tuple[()]:
        return ()  # the command line only: an environment variable must not decide what is removed


def main(arguments: list[str]) -> None:
    try:
        line = CommandLine(_cli_settings_source=CliSettingsSource(CommandLine, cli_parse_args=arguments))
    except (ValidationError, SettingsError) as error:
        print("\n".join(explain(error)) if isinstance(error, ValidationError) else error, file=sys.stderr)
        sys.exit(USAGE_ERROR)
    root = Settings().storage_root.resolve()
    try:
        show(root) if line.command == "list" else prune(root, line.older_than_days, line.dry_run)
    except OSError as error:
        sys.exit(f"{root}: {error}")


if __name__ == "__main__":
    main(sys.argv[1:])
