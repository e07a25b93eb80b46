"""How a step can fail, and the one exception that a user reads."""

import errno
import re
from typing import Literal

Kind = Literal[
    "transient",  # gone on the next try: a network, a server, a machine that went away
    "preempted",  # told to stop; a checkpoint was saved if there was time
    "out_of_memory",
    "out_of_disk",
    "data",
    "configuration",
    "authentication",
    "diverged",  # the training produced no usable weights, and would not the next time
    "bug",
]

REMEDIES: dict[Kind, str] = {
    "transient": "It is tried again by itself; run it again when that did not help.",
    "preempted": "Run it again: it goes on from the newest checkpoint.",
    "out_of_memory": (
        "Halve training.per_device_train_batch_size and double training.gradient_accumulation_steps (the same "
        "effective batch), lower training.max_length, or turn training.activation_checkpointing on."
    ),
    "out_of_disk": "Free space there, lower training.save_total_limit, or set FINETUNE_STORAGE_ROOT to another disk.",
    "data": "Correct the rows, and run it again.",
    "configuration": "Change the setting, and run it again.",
    "authentication": "Check the token or the rights of who runs this.",
    "diverged": "Lower training.learning_rate, or raise training.warmup_steps; look at the loss curve first.",
    "bug": "The log has the traceback.",
}


class Failure(Exception):
    """A step that cannot go on. The message is one line: the setting or row, the value it had, the remedy."""

    def __init__(self, kind: Kind, message: str):
        super().__init__(kind, message)  # both are args, so that the exception survives pickling
        self.kind = kind
        self.message = message

    def __str__(self) -> str:
        return self.message


DISK_TEXT = re.compile(
    r"No space left on device|Disk quota exceeded|os error 28|PytorchStreamWriter failed|unexpected pos"
)
MEMORY_TEXT = re.compile(r"out of memory|DefaultCPUAllocator: can't allocate|CUBLAS_STATUS_ALLOC_FAILED", re.IGNORECASE)
AUTHENTICATION_TEXT = re.compile(r"\b(401|403)\b|PERMISSION_DENIED|UNAUTHENTICATED|Unauthorized|Forbidden")
NETWORK_TEXT = re.compile(
    r"\b(429|500|502|503|504)\b|Connection ?(refused|reset|aborted|error)|Max retries|timed? ?out"
    r"|Temporary failure in name|NCCL|uncorrectable ECC|unspecified launch failure|CUDA error: unknown error",
    re.IGNORECASE,
)


def classify(error: BaseException) -> Failure:
    """The failure that an exception of a library amounts to, with a remedy.

    By type where there is one, by text where libraries give nothing else; the causes of an exception count as well.
    """
    if isinstance(error, Failure):
        return error
    chain = _chain(error)
    text = " | ".join(f"{type(link).__name__}: {link}" for link in chain)
    kind: Kind
    full = any(isinstance(link, OSError) and link.errno in (errno.ENOSPC, errno.EDQUOT) for link in chain)
    if full or DISK_TEXT.search(text):
        kind = "out_of_disk"
    elif any(isinstance(link, MemoryError) for link in chain) or MEMORY_TEXT.search(text):
        kind = "out_of_memory"
    elif AUTHENTICATION_TEXT.search(text) and _is_remote(chain):
        kind = "authentication"
    elif NETWORK_TEXT.search(text) and _is_remote(chain):
        kind = "transient"
    else:
        kind = "bug"
    cause = re.sub(r"\s+", " ", f"{type(error).__name__}: {error}")[:400]
    return Failure(kind, f"{cause.rstrip('.')}. {REMEDIES[kind]}")


def _chain(error: BaseException | None) -> list[BaseException]:
    links: list[BaseException] = []
    while error is not None and error not in links:
        links.append(error)
        error = error.__cause__ or error.__context__
    return links


def _is_remote(chain: list[BaseException]) -> bool:
    """Whether a number like 500 in the text can be an HTTP status: the error comes from a client or from CUDA."""
    sources = ("requests", "urllib3", "httpx", "httpcore", "huggingface_hub", "mlflow", "databricks", "torch", "google")
    kinds = (RuntimeError, ConnectionError, TimeoutError)
    return any(type(link).__module__.split(".")[0] in sources or isinstance(link, kinds) for link in chain)
