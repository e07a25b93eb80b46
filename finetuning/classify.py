"""What kind of failure an exception of a library is, or the end of a child that left no result."""

import errno
import os
import re
import signal
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from config.settings import shown
from finetuning.errors import REMEDIES, Failure, Kind
from finetuning.limits import free_bytes

HOST_MEMORY = (
    "Plan 64 to 96 GB of host memory, not of the GPU's, for a 4B model: raise the container's limit, run fewer workers "
    "beside it, or take a larger host."
)
SHARED_MEMORY = "Enlarge /dev/shm: docker run --shm-size=8g, or on Kubernetes an emptyDir of medium Memory."
MAPPED_FILE = (
    "A page of a mapped file could not be had: /dev/shm or the disk that the file is on is full, or the file was cut "
    "short. Make room there, and run it again."
)
DRIVER = "Install a driver and a torch that fit the GPU, and look at CUDA_VISIBLE_DEVICES."
HUB_NAME = "Check the name; a private one needs HF_TOKEN."
OFFLINE = "Unset HF_HUB_OFFLINE, or give a path of your own as the name."
CERTIFICATE = "Set SSL_CERT_FILE and REQUESTS_CA_BUNDLE to the certificates that this server's is signed with."
PACKAGE = (
    "The environment lacks this package or has another version of it: install what constraints.txt pins, or leave out "
    "the option that asks for it."
)

MESSAGE_LENGTH = 400
"""Characters of a message of `classify_exit`."""
CAUSE_LENGTH = 300
"""Characters that `classify` quotes of an exception."""


class Sign(NamedTuple):
    """A text that tells the kind, in an exception or in a log line: no bare number, which a loss could be as well."""

    kind: Kind
    pattern: re.Pattern[str]
    remedy: str


def _sign(kind: Kind, pattern: str, remedy: str = "", flags: int = re.IGNORECASE) -> Sign:
    return Sign(kind, re.compile(pattern, flags), remedy or REMEDIES[kind])


SIGNS = (
    # The same at every try. The hint below every CUDA error speaks of "device-side assertions".
    _sign("bug", r"device-side assert triggered|ncclInvalid(Usage|Argument)"),
    # Before the texts on disk and memory that come with it: `unable to mmap ... file </torch_1_2>: Cannot allocate`.
    _sign("out_of_disk", r"insufficient shared memory|workers are out of shared memory|file </torch_", SHARED_MEMORY),
    _sign(
        "out_of_disk",
        r"\b(ENOSPC|EDQUOT)\b|No space left on device|Disk quota exceeded|os error (28|122)\b|database or disk is full"
        r"|PytorchStreamWriter failed|unexpected pos \d+ vs",
    ),
    _sign(
        "out_of_memory",
        r"OutOfMemoryError|(CUDA|HIP)( error:)? out of memory|_STATUS_ALLOC_FAILED|CUBLAS_STATUS_NOT_INITIALIZED",
    ),
    _sign(
        "out_of_memory",
        r"\bENOMEM\b|MemoryError\b|DefaultCPUAllocator|Cannot allocate memory|\bbad_alloc\b|killed by signal: Killed"
        r"|memory allocation of \d+ bytes failed",
        HOST_MEMORY,
    ),
    # An illegal access is most often a kernel's or a device's bad moment, and the next try has a new process.
    _sign(
        "transient",
        r"uncorrectable ECC|unspecified launch failure|illegal memory access|CUDA error: unknown error|launch timed out"
        r"|hardware stack error|GPU is lost|fallen off the bus|busy or unavailable"
        r"|NCCL error|nccl(Remote|System|Internal|UnhandledCuda)Error|collective operation timeout",
    ),
    _sign(
        "configuration",
        r"no kernel image is available|no NVIDIA driver|NVIDIA driver on your system is too old|driver version is "
        r"insufficient|no CUDA-capable device|No CUDA GPUs are available|invalid device ordinal|have NCCL built in",
        DRIVER,
    ),
    _sign("configuration", r"^RepositoryNotFoundError", HUB_NAME),  # by name: without a token its status is 401
    _sign("configuration", r"OfflineModeIsEnabled|outgoing traffic has been disabled", OFFLINE),
    _sign("configuration", r"certificate verify failed", CERTIFICATE),
    _sign("transient", r"database (table )?is locked|disk I/O error|\b(EIO|ESTALE)\b"),
)
NETWORK_SIGN = _sign(
    "transient",
    r"connection (was )?(refused|reset|aborted|closed|timed out)|Broken pipe|Max retries exceeded|timed out\b"
    r"|Temporary failure in name|Name or service not known|Failed to resolve|(Network|Host) is unreachable"
    r"|\b(EHOSTUNREACH|ENETUNREACH)\b|No route to host|check your (internet )?connection|CAS service error"
    r"|Server Error\b|Bad Gateway|Service Unavailable|Gateway Time-?out|Too Many Requests"
    r"|failed with error code (429|5\d\d)\b",
)
PACKAGE_SIGN = _sign(
    "configuration", r"^(ModuleNotFound|Import)Error: (?!.*'(config|finetuning|flows|tasks)\b)", PACKAGE, flags=0
)

HTTP_CLIENT: dict[str, Kind] = {
    "UnsupportedProtocol": "configuration",
    "InvalidURL": "configuration",
    "LocalProtocolError": "authentication",  # a token with a line break in it
    "TransportError": "transient",
}
TYPES: dict[str, Kind] = {
    "builtins.PermissionError": "authentication",
    "builtins.ConnectionError": "transient",  # a broken pipe as well: whoever read at its other end has gone
    "builtins.TimeoutError": "transient",
    "socket.gaierror": "transient",
    "http.IncompleteRead": "transient",
    "urllib3.LocationValueError": "configuration",
    "urllib3.HTTPError": "transient",
    "requests.InvalidSchema": "configuration",
    "requests.MissingSchema": "configuration",
    "requests.InvalidURL": "configuration",
    "requests.ConnectionError": "transient",
    "requests.Timeout": "transient",
    "requests.RetryError": "transient",
    "requests.ChunkedEncodingError": "transient",
    **{f"{client}.{name}": kind for client in ("httpx", "httpx2") for name, kind in HTTP_CLIENT.items()},
    "torch.DistNetworkError": "transient",
    "torch.DistStoreError": "transient",
    "huggingface_hub.GatedRepoError": "authentication",
    "huggingface_hub.DisabledRepoError": "configuration",  # with HTTP 403
    "huggingface_hub.HFValidationError": "configuration",
}
"""By the package and the name of a class or one of its bases, the nearest first: none is imported for this."""

CODES: dict[Kind, re.Pattern[str]] = {
    "authentication": re.compile("PERMISSION_DENIED|UNAUTHENTICATED|UNAUTHORIZED"),
    "configuration": re.compile("NOT_FOUND|DOES_NOT_EXIST|ALREADY_EXISTS|INVALID|BAD_REQUEST|NOT_IMPLEMENTED|DISABLED"),
    "transient": re.compile("LIMIT_EXCEEDED|EXHAUSTED|UNAVAILABLE|DEADLINE|ABORTED|CANCELLED|CONFLICT|INTERNAL_ERROR"),
}
"""Error codes of MLflow and Databricks."""

MISTAKES = (LookupError, AssertionError, TypeError, ValueError, AttributeError, NameError, ArithmeticError)
"""Of Python itself: whatever words and numbers are in them, they tell of the code, not of the machine."""

CRASHES = {getattr(signal, f"SIG{name}") for name in ("BUS", "SEGV", "ABRT", "ILL", "FPE", "SYS", "TRAP")}
"""Signals that a process brings upon itself; all others come from outside."""
ORDINARY_LINE = re.compile(r"^(PROGRESS|DEBUG|INFO|WARNING) |\w*Warning: ")
ERROR_LINE = re.compile(r"^(\w+\.)*\w*(Error|Exception|Interrupt)\b|what\(\): |^Fatal Python error|panicked at|^ERROR ")

PROC, CGROUP = Path("/proc"), Path("/sys/fs/cgroup")


def classify(error: BaseException) -> Failure:
    """The failure that an exception of a library amounts to, with a remedy; `error` is its cause.

    By type where there is one, by text where libraries give nothing else. The causes of an exception count as well: a
    Failure that a library wrapped, or that something went wrong after, is that failure.
    """
    chain = _chain(error)
    for link in chain:
        if isinstance(link, Failure):
            return link
    kind, remedy, decisive = _verdict(chain)
    if kind == "out_of_disk" and (path := _full_path(chain)):
        failure = out_of_disk(path, None, error)
    else:
        cause = _shorten(_text(error))
        if " ".join(str(decisive).split()) not in _text(error):
            cause = f"{_shorten(cause, CAUSE_LENGTH // 2)}, because of {_shorten(_text(decisive), CAUSE_LENGTH // 2)}"
        failure = Failure(kind, f"{_sentence(cause)} {remedy}")
    failure.__cause__ = error
    return failure


def out_of_disk(path: Path, needed_bytes: int | None, error: BaseException) -> Failure:
    """The failure that says which disk is full, what is free there now, and what is needed if that is known.

    `error` is the library's, or what `classify` made of it.
    """
    if isinstance(error, Failure):
        error = error.__cause__ or error
    full = "quota used up" if re.search("quota", _text(error), re.IGNORECASE) else "disk full"
    sizes = {"needed": needed_bytes, "free": free_bytes(path)}
    known = [f"{size / 2**30:.1f} GiB {name}" for name, size in sizes.items() if size is not None]
    where = f"{full} at {path}: {', '.join(known)}" if known else f"{full} at {path}"
    return Failure("out_of_disk", f"{_shorten(_text(error))}: {where}. {REMEDIES['out_of_disk']}")


def classify_exit(step: str, exit_code: int, tail: list[str], oom_kills: int) -> Failure:
    """The failure of a child that left no result: by the signal that ended it, otherwise by its last lines.

    `exit_code` is that of `subprocess`, negative for a signal; `oom_kills` is what `count_oom_kills` grew by.
    SIGBUS counts as a full disk: nearly always it is a page of a mapped file, in /dev/shm or on a disk, without room.
    """
    ended = f"was ended by signal {_signal_name(-exit_code)}" if exit_code < 0 else f"ended with exit code {exit_code}"
    telling = [line for line in tail if not ORDINARY_LINE.search(line)]
    signs = [*SIGNS, *([NETWORK_SIGN, PACKAGE_SIGN] if exit_code > 0 else [])]
    found = [(sign, line) for sign in signs for line in reversed(telling) if sign.pattern.search(line.strip())]
    kind: Kind
    if exit_code == -signal.SIGKILL and oom_kills > 0:
        kind, remedy, found = "out_of_memory", f"The kernel did it for lack of memory. {HOST_MEMORY}", []
    elif exit_code == -signal.SIGTERM:
        kind, remedy, found = "preempted", f"It was told to stop. {REMEDIES['preempted']}", []
    elif exit_code < 0 and -exit_code not in CRASHES:
        kind, remedy, found = "transient", f"Something outside did it. {REMEDIES['transient']}", []
    elif found:
        kind, remedy = found[0][0].kind, found[0][0].remedy
    elif exit_code == -signal.SIGBUS:
        kind, remedy = "out_of_disk", MAPPED_FILE
    else:
        kind, remedy = "bug", REMEDIES["bug"]
    said = found[0][1] if found else _last_words(tail)
    message = f"the step {step!r} {ended} and left no result. {remedy} Its last words: "
    return Failure(kind, message + (_shorten(said, MESSAGE_LENGTH - len(message)) or "none."))


def count_oom_kills() -> int:
    """How many processes the kernel has killed for lack of memory: only the difference of two calls says something.

    Counted in the own cgroup, where the children are, too, whichever limit was hit; where it has no counter, on the
    whole host, among whose victims can be strangers. 0 where neither can be read.
    """
    for file in [*_cgroup_files(), PROC / "vmstat"]:
        with suppress(OSError):
            if match := re.search(r"^oom_kill (\d+)$", file.read_text(), re.MULTILINE):
                return int(match[1])
    return 0


def _cgroup_files() -> list[Path]:
    """Where the counter can be: from the own cgroup up, because a leaf may lack the memory controller and a container
    may see its own cgroup as the root."""
    files = []
    with suppress(OSError):
        for line in (PROC / "self" / "cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers not in ("", "memory"):
                continue
            root, name = (CGROUP / "memory", "memory.oom_control") if controllers else (CGROUP, "memory.events")
            own = Path(path.lstrip("/"))
            files += [root / group / name for group in (own, *own.parents)]
    return files


def _verdict(chain: list[BaseException]) -> tuple[Kind, str, BaseException]:
    """Kind, remedy and the exception that tells, of those in the chain."""
    worded = [link for link in chain if isinstance(link, OSError) or not isinstance(link, MISTAKES)]
    for sign in SIGNS:
        for link in worded:
            if sign.pattern.search(_searched(link)):
                return sign.kind, sign.remedy, link
    for link in chain:
        if kind := _kind_by_type(link) or _kind_by_status(link) or _kind_by_code(link):
            return kind, REMEDIES[kind], link
    for link in worded:
        if NETWORK_SIGN.pattern.search(_searched(link)):
            return "transient", NETWORK_SIGN.remedy, link
    # Not those in the chain: libraries try an import and go another way.
    if PACKAGE_SIGN.pattern.search(_searched(chain[0])):
        return "configuration", PACKAGE_SIGN.remedy, chain[0]
    return "bug", REMEDIES["bug"], chain[0]


def _kind_by_type(error: BaseException) -> Kind | None:
    names = (f"{base.__module__.split('.')[0]}.{base.__name__}" for base in type(error).__mro__)
    return next((TYPES[name] for name in names if name in TYPES), None)


def _kind_by_status(error: BaseException) -> Kind | None:
    """By the HTTP status that requests, httpx and the hub's client keep."""
    status = getattr(getattr(error, "response", None), "status_code", 0)
    if status in (401, 403, 407):
        return "authentication"
    if status in (408, 409, 425, 429) or status >= 500:
        return "transient"
    return "configuration" if status >= 400 else None


def _kind_by_code(error: BaseException) -> Kind | None:
    """By the code of MLflow or Databricks; one that MLflow does not know is only in the server's answer.

    INTERNAL_ERROR says nothing without an answer: every MlflowException has it that was given no other.
    """
    if type(error).__module__.split(".")[0] not in ("mlflow", "databricks"):
        return None
    answer = getattr(error, "json", None)
    code = str(getattr(error, "error_code", ""))
    if isinstance(answer, dict):
        code += f" {answer.get('error_code')}"
    elif code == "INTERNAL_ERROR":
        return None
    return next((kind for kind, pattern in CODES.items() if pattern.search(code)), None)


def _chain(error: BaseException | None) -> list[BaseException]:
    links: list[BaseException] = []
    while error is not None and error not in links:
        links.append(error)
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return links


def _text(error: BaseException) -> str:
    """Type and message in one line. A message that quotes a traceback is its last line."""
    message = str(error).strip()
    if "Traceback (most recent call last)" in message:  # a DataLoader's worker passes its error on like this
        return " ".join(message.splitlines()[-1].split())
    return " ".join(f"{type(error).__name__}: {message}".split())


def _searched(error: BaseException) -> str:
    """What signs are looked for in: the name of the errno, too, because a message is free to leave the reason out."""
    number = error.errno if isinstance(error, OSError) else None
    return f"{_text(error)} {errno.errorcode.get(number, '') if isinstance(number, int) else ''}"


def _full_path(chain: list[BaseException]) -> Path | None:
    """What could not be written: the second one when a copy failed."""
    for link in chain:
        if isinstance(link, OSError) and link.errno in (errno.ENOSPC, errno.EDQUOT):
            path = link.filename2 or link.filename
            if isinstance(path, str | bytes | os.PathLike):
                return Path(os.fsdecode(path)).absolute()
    return None


def _signal_name(number: int) -> str:
    with suppress(ValueError):
        return signal.Signals(number).name
    return str(number)


def _last_words(tail: list[str]) -> str:
    """The last line that is an error's, otherwise the last one that says anything."""
    words = [line for line in tail if re.search(r"\w", line) and not re.match(r"PROGRESS |frame #", line.strip())]
    errors = [line for line in words if ERROR_LINE.search(line.strip())]
    return (errors or words or [""])[-1]


def _shorten(text: str, length: int = CAUSE_LENGTH) -> str:
    """One line without passwords."""
    text = shown(" ".join(text.split()))
    return text if len(text) <= length else f"{text[: length - 1].rstrip()}…"


def _sentence(text: str) -> str:
    return text if text.endswith((".", "…")) else f"{text}."
