"""The kinds of failure, what helps against each, and the one exception that a user reads."""

from typing import Literal

from config.settings import shown

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
    """A step that cannot go on. The message is one line: the setting or row, the value it had, the remedy.

    What it quotes of a library may have a password in it; here, on everybody's way, it is taken out."""

    def __init__(self, kind: Kind, message: str):
        message = shown(message)
        super().__init__(kind, message)  # both are args, so that the exception survives pickling
        self.kind = kind
        self.message = message

    def __str__(self) -> str:
        return self.message
