"""What the errors of the pinned libraries, and the ends of a child, amount to."""

import errno
import os
import pickle
import signal
import socket
import sqlite3
import ssl
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import httpx
import httpx2
import pytest
import requests
import sqlalchemy
import torch
import urllib3
from huggingface_hub import HfApi, hf_hub_download
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import hf_raise_for_status
from mlflow.exceptions import MlflowException, RestException
from mlflow.protos.databricks_pb2 import ErrorCode
from safetensors import SafetensorError
from torch.distributed import DistBackendError, DistNetworkError

from finetuning import classify as classification
from finetuning.classify import classify, classify_exit, count_oom_kills, out_of_disk
from finetuning.errors import REMEDIES, Failure, Kind

LONGEST = 700


class Killed(torch.utils.data.Dataset):
    """A dataset whose reader is killed, as the kernel does it when memory runs out."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)


class Broken(Killed):
    def __getitem__(self, index: int) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")


def thrown(action: Callable[[], Any]) -> Exception:
    with pytest.raises(Exception) as caught:  # noqa: PT011
        action()
    return caught.value


def caused(outer: Exception, inner: Exception) -> Exception:
    """`outer`, raised from `inner`."""

    def both() -> None:
        raise outer from inner

    return thrown(both)


def while_handling(inner: Exception, outer: Exception, hidden: bool = False) -> Exception:
    """`outer`, raised while `inner` was handled; hidden as by `from None`."""

    def both() -> None:
        try:
            raise inner
        except Exception:
            if hidden:
                raise outer from None
            raise outer  # noqa: B904

    return thrown(both)


def hub(status: int, code: str = "") -> Exception:
    request = httpx2.Request("GET", "https://huggingface.co/api/models/a/b")
    headers = {"X-Error-Code": code} if code else {}
    return thrown(lambda: hf_raise_for_status(httpx2.Response(status, headers=headers, request=request)))


def http_status(status: int) -> Exception:
    response = requests.Response()
    response.status_code, response.url = status, "http://host/steps/500"
    return thrown(response.raise_for_status)


def mlflow(code: str, text: str = "told so") -> Exception:
    return MlflowException(text, error_code=ErrorCode.Value(code))


def answer(code: str) -> Exception:
    return RestException({"error_code": code, "message": "told so"})


def refused(get: Callable[[str], Any]) -> Exception:
    with socket.socket() as taken:  # and nobody listens
        taken.bind(("127.0.0.1", 0))
        return thrown(lambda: get(f"http://127.0.0.1:{taken.getsockname()[1]}/"))


def silent(get: Callable[..., Any]) -> Exception:
    """A server that takes the connection and says nothing."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        return thrown(lambda: get(f"http://127.0.0.1:{server.getsockname()[1]}/", timeout=0.1))


def full_database() -> Exception:
    database = sqlite3.connect(":memory:")
    database.execute("PRAGMA max_page_count = 2")
    database.execute("CREATE TABLE t (a)")
    return thrown(lambda: database.execute("INSERT INTO t VALUES (zeroblob(100000))"))


def full_sqlalchemy() -> Exception:
    def fill() -> None:
        with sqlalchemy.create_engine("sqlite://").begin() as database:
            database.exec_driver_sql("PRAGMA max_page_count = 2")
            database.exec_driver_sql("CREATE TABLE t (a)")
            database.exec_driver_sql("INSERT INTO t VALUES (zeroblob(100000))")

    return thrown(fill)


def locked_database(tmp_path: Path) -> Exception:
    first, second = (sqlite3.connect(tmp_path / "a.db", timeout=0) for _ in range(2))
    first.execute("BEGIN EXCLUSIVE")
    return thrown(lambda: second.execute("CREATE TABLE t (a)"))


def torch_save_on_full_disk() -> Exception:
    """Through a handle: a library that renames its file into place would replace the device."""

    def save() -> None:
        with open("/dev/full", "wb", buffering=0) as file:
            torch.save({"weights": torch.zeros(1000)}, file)

    return thrown(save)


def cuda(text: str) -> Exception:
    hint = (
        "CUDA kernel errors might be asynchronously reported at some other API call.\nCompile with `TORCH_USE_CUDA_DSA`"
    )
    return torch.AcceleratorError(f"CUDA error: {text}\n{hint} to enable device-side assertions.\n")


def worker(dataset: Killed) -> Exception:
    return thrown(lambda: list(torch.utils.data.DataLoader(dataset, num_workers=1)))


BUS_ERROR = (
    "DataLoader worker (pid 11) is killed by signal: Bus error. It is possible that dataloader's workers are out of "
    "shared memory. Please try to raise your shared memory limit."
)
CERTIFICATE = ssl.SSLCertVerificationError(1, "[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: self-signed")

CASES: dict[str, tuple[Callable[[], BaseException], Kind]] = {
    # memory
    "CUDA out of memory": (
        lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        "out_of_memory",
    ),
    "CUDA error: out of memory": (lambda: cuda("out of memory"), "out_of_memory"),
    "cublas": (
        lambda: RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"),
        "out_of_memory",
    ),
    "CPU allocator": (lambda: thrown(lambda: torch.empty(1 << 60)), "out_of_memory"),
    "MemoryError": (lambda: thrown(lambda: bytearray(1 << 62)), "out_of_memory"),
    "ENOMEM": (lambda: OSError(errno.ENOMEM, "no fork"), "out_of_memory"),
    "loader's worker killed": (lambda: worker(Killed()), "out_of_memory"),
    # disk
    "ENOSPC": (lambda: OSError(errno.ENOSPC, "No space left on device"), "out_of_disk"),
    "ENOSPC, other text": (lambda: OSError(errno.ENOSPC, "cannot write"), "out_of_disk"),
    "EDQUOT": (lambda: OSError(errno.EDQUOT, "Disk quota exceeded"), "out_of_disk"),
    "safetensors": (
        lambda: SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
        "out_of_disk",
    ),
    "torch.save": (torch_save_on_full_disk, "out_of_disk"),
    "torch.save, the writer": (
        lambda: RuntimeError("PytorchStreamWriter failed writing file data/3: file write failed"),
        "out_of_disk",
    ),
    "torch.save, the end": (
        lambda: RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 576 vs 534"),
        "out_of_disk",
    ),
    "sqlite": (full_database, "out_of_disk"),
    "sqlalchemy": (full_sqlalchemy, "out_of_disk"),
    "mlflow's store": (
        lambda: caused(mlflow("TEMPORARILY_UNAVAILABLE", "(OperationalError)"), full_sqlalchemy()),
        "out_of_disk",
    ),
    "loader's worker, disk": (lambda: worker(Broken()), "out_of_disk"),
    "loader's worker, shm": (lambda: RuntimeError(BUS_ERROR), "out_of_disk"),
    "mmap of shm": (
        lambda: RuntimeError("unable to mmap 64 bytes from file </torch_12_3>: Cannot allocate memory (12)"),
        "out_of_disk",
    ),
    # a device or a group of them
    "device-side assert": (lambda: cuda("device-side assert triggered"), "bug"),
    "ncclInvalidUsage": (lambda: DistBackendError("NCCL error in: x.cpp:1, ncclInvalidUsage: Duplicate GPU"), "bug"),
    "launch failure": (lambda: cuda("unspecified launch failure"), "transient"),
    "illegal access": (lambda: cuda("an illegal memory access was encountered"), "transient"),
    "ECC": (lambda: RuntimeError("CUDA error: uncorrectable ECC error encountered"), "transient"),
    "NCCL": (lambda: DistBackendError("NCCL error in: x.cpp:1, ncclRemoteError: A call failed"), "transient"),
    "torch's store": (lambda: DistNetworkError("The client socket has been closed"), "transient"),
    "no kernel image": (lambda: cuda("no kernel image is available for execution on the device"), "configuration"),
    "no driver": (lambda: RuntimeError("Found no NVIDIA driver on your system."), "configuration"),
    # the hub
    "hub 401": (lambda: hub(401), "configuration"),  # RepositoryNotFoundError: the hub's word for no such name, too
    "hub 403": (lambda: hub(403), "authentication"),
    "hub 429": (lambda: hub(429), "transient"),
    "hub 500": (lambda: hub(500), "transient"),
    "hub 503": (lambda: hub(503), "transient"),
    "gated": (lambda: hub(403, "GatedRepo"), "authentication"),
    "no repository": (lambda: hub(404, "RepoNotFound"), "configuration"),
    "no revision": (lambda: hub(404, "RevisionNotFound"), "configuration"),
    "no file": (lambda: hub(404, "EntryNotFound"), "configuration"),
    "no hub id": (lambda: HFValidationError("Repo id must be in the form 'namespace/repo_name'"), "configuration"),
    "not in the cache": (lambda: thrown(lambda: hf_hub_download("a/b", "c", local_files_only=True)), "configuration"),
    "offline": (lambda: thrown(lambda: HfApi().repo_info("a/b")), "configuration"),
    "hub wrapped": (
        lambda: caused(OSError("a/b is not a valid model identifier"), hub(404, "RepoNotFound")),
        "configuration",
    ),
    # HTTP
    "requests refused": (lambda: refused(requests.get), "transient"),
    "httpx refused": (lambda: refused(httpx.get), "transient"),
    "httpx2 refused": (lambda: refused(httpx2.get), "transient"),
    "urllib3 refused": (lambda: refused(lambda url: urllib3.PoolManager(retries=0).request("GET", url)), "transient"),
    "requests timeout": (lambda: silent(requests.get), "transient"),
    "httpx timeout": (lambda: silent(httpx.get), "transient"),
    "httpx2 timeout": (lambda: silent(httpx2.get), "transient"),
    "no such host": (lambda: socket.gaierror(socket.EAI_NONAME, "Name or service not known"), "transient"),
    "HTTP 401": (lambda: http_status(401), "authentication"),
    "HTTP 404": (lambda: http_status(404), "configuration"),
    "HTTP 503": (lambda: http_status(503), "transient"),
    "no scheme": (lambda: thrown(lambda: requests.get("host/path")), "configuration"),
    "no scheme, httpx": (lambda: thrown(lambda: httpx.get("host/path")), "configuration"),
    "line break in a token": (
        lambda: httpx.LocalProtocolError("Illegal header value b'Bearer x\\n'"),
        "authentication",
    ),
    "certificate": (lambda: caused(requests.exceptions.SSLError("Max retries exceeded"), CERTIFICATE), "configuration"),
    # MLflow
    "mlflow PERMISSION_DENIED": (lambda: mlflow("PERMISSION_DENIED"), "authentication"),
    "mlflow RESOURCE_DOES_NOT_EXIST": (lambda: mlflow("RESOURCE_DOES_NOT_EXIST"), "configuration"),
    "mlflow INVALID_PARAMETER_VALUE": (lambda: mlflow("INVALID_PARAMETER_VALUE"), "configuration"),
    "mlflow REQUEST_LIMIT_EXCEEDED": (lambda: mlflow("REQUEST_LIMIT_EXCEEDED"), "transient"),
    "mlflow TEMPORARILY_UNAVAILABLE": (lambda: mlflow("TEMPORARILY_UNAVAILABLE"), "transient"),
    "mlflow without a code": (lambda: MlflowException("no such flavor"), "bug"),
    "mlflow around a network": (lambda: caused(MlflowException("API request"), refused(requests.get)), "transient"),
    "mlflow HTTP 502": (lambda: MlflowException("API request failed with error code 502 != 200."), "transient"),
    "answer PERMISSION_DENIED": (lambda: answer("PERMISSION_DENIED"), "authentication"),
    "answer UNAUTHENTICATED": (lambda: answer("UNAUTHENTICATED"), "authentication"),
    "answer 403": (lambda: answer("403"), "authentication"),
    "answer INTERNAL_ERROR": (lambda: answer("INTERNAL_ERROR"), "transient"),
    "answer of an unknown code": (lambda: answer("CATALOG_DOES_NOT_EXIST"), "configuration"),
    "locked database": (lambda: sqlite3.OperationalError("database is locked"), "transient"),
    # Python
    "reset": (lambda: ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"), "transient"),
    "broken pipe": (lambda: BrokenPipeError(errno.EPIPE, "Broken pipe"), "transient"),
    "no route": (lambda: OSError(errno.EHOSTUNREACH, "No route to host"), "transient"),
    "stale file handle": (lambda: OSError(errno.ESTALE, "Stale file handle"), "transient"),
    "timeout": (lambda: TimeoutError("no answer"), "transient"),
    "no right": (lambda: PermissionError(errno.EACCES, "Permission denied", "/a"), "authentication"),
    "no package": (lambda: thrown(lambda: __import__("flash_attn_9")), "configuration"),
    "other version of a package": (lambda: thrown(lambda: exec("from trl import Nothing9")), "configuration"),
    "no module of ours": (lambda: thrown(lambda: __import__("finetuning.nothing9")), "bug"),
    "KeyError 500": (lambda: KeyError("500"), "bug"),
    "AssertionError 403": (lambda: AssertionError("403 != 500"), "bug"),
    "AssertionError with words": (lambda: AssertionError("Connection refused, out of memory, timed out"), "bug"),
    "RuntimeError 403": (lambda: RuntimeError("expected 500 rows, got 403"), "bug"),
    "FileNotFoundError": (lambda: FileNotFoundError(errno.ENOENT, "No such file", "/a/500"), "bug"),
    # chains
    "while handling a network": (lambda: while_handling(ConnectionError("x"), KeyError("a")), "transient"),
    "after a cache miss": (lambda: while_handling(KeyError("a"), TimeoutError("x")), "transient"),
    "after a failed import": (lambda: while_handling(ImportError("no fast one"), KeyError("a")), "bug"),
    "from None": (lambda: while_handling(ConnectionError("x"), KeyError("a"), hidden=True), "bug"),
    "wrapped failure": (lambda: caused(RuntimeError("wrapped"), Failure("preempted", "stopped.")), "preempted"),
    "while unwinding": (lambda: while_handling(Failure("preempted", "stopped."), KeyError("a")), "preempted"),
}


@pytest.mark.parametrize("name", CASES)
def test_an_exception_has_its_kind_in_one_line(name: str) -> None:
    make, kind = CASES[name]
    error = make()
    failure = classify(error)
    assert failure.kind == kind, failure.message
    assert "\n" not in failure.message
    assert len(failure.message) <= LONGEST
    assert failure.message.endswith("."), failure.message


def test_a_real_lock_is_transient(tmp_path: Path) -> None:
    assert classify(locked_database(tmp_path)).kind == "transient"


def test_every_kind_has_a_remedy() -> None:
    assert set(REMEDIES) == set(get_args(Kind))
    assert all(remedy.endswith(".") for remedy in REMEDIES.values())


@pytest.mark.parametrize("kind", get_args(Kind))
def test_a_failure_survives_pickling(kind: Kind) -> None:
    again = pickle.loads(pickle.dumps(Failure(kind, "dataset.name='a': none.")))
    assert (again.kind, again.message, str(again)) == (kind, "dataset.name='a': none.", "dataset.name='a': none.")


def test_a_classified_one_survives_pickling_and_knows_its_cause() -> None:
    error = OSError(errno.ENOSPC, "No space left on device", "/")
    failure = classify(error)
    assert failure.__cause__ is error
    assert pickle.loads(pickle.dumps(failure)).message == failure.message


def test_a_failure_stays_what_it_is() -> None:
    failure = Failure("data", "row 3 has no messages.")
    assert classify(failure) is failure


def test_host_memory_has_another_remedy_than_the_gpus() -> None:
    assert classification.HOST_MEMORY in classify(MemoryError()).message
    assert REMEDIES["out_of_memory"] in classify(torch.OutOfMemoryError("CUDA out of memory.")).message


def test_a_full_disk_is_named_with_what_is_free(tmp_path: Path) -> None:
    failure = classify(OSError(errno.ENOSPC, "No space left on device", str(tmp_path / "not" / "there")))
    assert f": disk full at {tmp_path}/not/there: " in failure.message
    assert " GiB free. Free space there" in failure.message


def test_a_copy_failed_at_its_target(tmp_path: Path) -> None:
    error = OSError(errno.EDQUOT, "Disk quota exceeded", "/source", None, str(tmp_path))
    assert f"quota used up at {tmp_path}: " in classify(error).message


def test_a_file_descriptor_is_no_path() -> None:
    assert "disk full at" not in classify(OSError(errno.ENOSPC, "No space left on device", 3)).message


def test_what_is_needed_is_said_once_with_the_librarys_error(tmp_path: Path) -> None:
    error = OSError(errno.ENOSPC, "No space left on device", "/elsewhere")
    for source in (error, classify(error)):
        failure = out_of_disk(tmp_path, 45 * 2**30, source)
        assert failure.message.startswith("OSError: [Errno 28] No space left on device: '/elsewhere': disk full at ")
        assert f"disk full at {tmp_path}: 45.0 GiB needed, " in failure.message
        assert failure.message.count("disk full") == failure.message.count("Free space there") == 1


def test_a_password_is_not_shown() -> None:
    message = classify(RuntimeError("cannot reach postgresql://me:secret@host/db")).message
    assert "secret" not in message
    assert "postgresql://***@host/db" in message


ORDINARY = [
    "INFO step 500 of 1000  loss 4.03",
    "{'loss': 4.03, 'grad_norm': 0.503, 'epoch': 0.429}",
    "WARNING Connection refused, trying again",
    "INFO MemoryError would be a sad word here",
    "lib.py:28: UserWarning: No space left on device is what you may see soon",
    "PROGRESS {'timed out': 'CUDA out of memory'}",
    "step 500 of 1000  loss 4.03",
    "",
]
DIED = "terminate called after throwing an instance of 'c10::AcceleratorError'"

EXITS: dict[str, tuple[int, int, list[str], Kind, str]] = {
    # exit code, growth of the kernel's counter, lines after the ordinary ones, kind, words of the message
    "killed for memory": (-signal.SIGKILL, 1, [], "out_of_memory", "signal SIGKILL .* 64 to 96 GB of host memory"),
    "killed": (-signal.SIGKILL, 0, [], "transient", "signal SIGKILL .*Something outside.*loss 4.03$"),
    "hung up": (-signal.SIGHUP, 0, [], "transient", "SIGHUP"),
    "interrupted": (-signal.SIGINT, 0, ["KeyboardInterrupt"], "transient", "SIGINT.*KeyboardInterrupt$"),
    "broken pipe": (-signal.SIGPIPE, 0, [], "transient", "SIGPIPE"),
    "a real-time signal": (-60, 0, [], "transient", "signal 60 "),
    "told to stop": (-signal.SIGTERM, 0, [], "preempted", "SIGTERM.*newest checkpoint"),
    "bus error": (-signal.SIGBUS, 0, [], "out_of_disk", "SIGBUS.*/dev/shm or the disk"),
    "bus error in a worker": (-signal.SIGBUS, 0, [BUS_ERROR], "out_of_disk", "SIGBUS.*--shm-size"),
    "segfault": (
        -signal.SIGSEGV,
        0,
        ["Fatal Python error: Segmentation fault", "", "frame #3: abc"],
        "bug",
        "Fatal Python",
    ),
    "segfault after a network": (-signal.SIGSEGV, 0, ["urllib3: Connection refused"], "bug", "SIGSEGV"),
    "illegal instruction": (-signal.SIGILL, 0, [], "bug", "SIGILL"),
    "floating point": (-signal.SIGFPE, 0, [], "bug", "SIGFPE"),
    "abort": (-signal.SIGABRT, 0, ["free(): invalid pointer"], "bug", "SIGABRT.*invalid pointer$"),
    "abort by CUDA": (
        -signal.SIGABRT,
        0,
        [DIED, "  what():  CUDA error: unspecified launch failure", "frame #0: c10::Error"],
        "transient",
        "what.*launch failure$",
    ),
    "abort by an assert": (
        -signal.SIGABRT,
        0,
        ["  what():  CUDA error: device-side assert triggered"],
        "bug",
        "assert",
    ),
    "abort by NCCL": (
        -signal.SIGABRT,
        0,
        ["[rank0]:[E17] ProcessGroupNCCL.cpp:1: Watchdog caught collective operation timeout: WorkNCCL(SeqNum=44)"],
        "transient",
        "Watchdog",
    ),
    "abort for memory": (-signal.SIGABRT, 0, ["terminate called after 'std::bad_alloc'"], "out_of_memory", "bad_alloc"),
    "abort for disk": (-signal.SIGABRT, 0, ["  what():  No space left on device"], "out_of_disk", "what"),
    "exit for disk": (3, 0, ["OSError: [Errno 28] No space left on device"], "out_of_disk", "exit code 3 "),
    "exit for memory": (1, 0, ["torch.OutOfMemoryError: CUDA out of memory."], "out_of_memory", "Halve"),
    "exit for a network": (1, 0, ["ConnectionRefusedError: [Errno 111] Connection refused"], "transient", "refused$"),
    "exit for an HTTP status": (1, 0, ["requests.HTTPError: 503 Server Error: for url"], "transient", "503 Server"),
    "exit for a package": (1, 0, ["ModuleNotFoundError: No module named 'torch'"], "configuration", "'torch'$"),
    "exit for a module of ours": (1, 0, ["ModuleNotFoundError: No module named 'finetuning.a'"], "bug", "finetuning.a"),
    "exit by an error": (1, 0, ["Traceback", "KeyError: 'a'", "  bye"], "bug", "KeyError: 'a'$"),
    "exit without words": (1, 0, [], "bug", "loss 4.03$"),
    "exit 0": (0, 0, [], "bug", "exit code 0 "),
}


@pytest.mark.parametrize("name", EXITS)
def test_an_end_without_a_result_has_its_kind_in_one_line(name: str) -> None:
    exit_code, oom_kills, lines, kind, words = EXITS[name]
    failure = classify_exit("train", exit_code, [*ORDINARY, *lines, ""], oom_kills)
    assert failure.kind == kind, failure.message
    assert failure.message.startswith("the step 'train' ")
    with pytest.raises(Failure, match=words):
        raise failure
    assert "\n" not in failure.message
    assert len(failure.message) <= classification.MESSAGE_LENGTH


@pytest.mark.parametrize("exit_code", [-signal.SIGKILL, -signal.SIGBUS, 1])
def test_the_message_stays_short_whatever_was_written(exit_code: int) -> None:
    for line in ("word " * 1000, "CUDA out of memory " * 100):
        assert len(classify_exit("register", exit_code, [line], 1).message) <= classification.MESSAGE_LENGTH
    assert classify_exit("data", exit_code, [], 0).message.endswith("Its last words: none.")


def test_a_real_signal_is_named() -> None:
    code = "import os, signal; print('about to end', flush=True); os.kill(os.getpid(), signal.SIGSEGV)"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    message = classify_exit("train", child.returncode, child.stdout.splitlines(), 0).message
    assert message.startswith("the step 'train' was ended by signal SIGSEGV and left no result.")
    assert message.endswith("about to end")


def test_the_kernels_counter_never_falls() -> None:
    first = count_oom_kills()
    assert 0 <= first <= count_oom_kills()


COUNTERS = {
    # files below the root, and the count
    "cgroup v2": ({"cgroup": "0::/pod/a", "fs/pod/a/memory.events": "oom 9\noom_kill 3\noom_group_kill 0"}, 3),
    "v2, counted further up": (
        {"cgroup": "0::/pod/a", "fs/pod/memory.events": "oom_kill 4", "vmstat": "oom_kill 8"},
        4,
    ),
    "v2, in a container": ({"cgroup": "0::/docker/1234", "fs/memory.events": "oom_kill 5"}, 5),
    "cgroup v1": (
        {"cgroup": "4:memory:/a\n3:cpu:/b\n0::/", "fs/memory/a/memory.oom_control": "under_oom 0\noom_kill 6"},
        6,
    ),
    "whole host": ({"cgroup": "0::/", "vmstat": "nr_free_pages 1\noom_kill 7\n"}, 7),
    "none": ({}, 0),
}


@pytest.mark.parametrize("name", COUNTERS)
def test_the_counter_is_found(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, count = COUNTERS[name]
    monkeypatch.setattr(classification, "PROC", tmp_path / "proc")
    monkeypatch.setattr(classification, "CGROUP", tmp_path / "fs")
    for file, text in files.items():
        path = tmp_path / {"cgroup": "proc/self/cgroup", "vmstat": "proc/vmstat"}.get(file, file)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert count_oom_kills() == count
