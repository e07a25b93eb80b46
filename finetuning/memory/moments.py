"""What the memory holds at each moment of a step that can be its peak, beside weights, gradients and moments."""

from typing import NamedTuple

from finetuning.memory import activations
from finetuning.memory.architecture import Architecture
from finetuning.memory.states import Widths

HEAD_TOKENS, HEAD_COLUMNS = 4096, 32768
"""Tokens and vocabulary columns of the one tile of logits that exists at a time: `TOKEN_CHUNK_SIZE` in
trl/kernels/chunked_logprob.py and `_CHUNKED_LOGPROB_CHUNK_SIZE` in trl/trainer/utils.py (trl 1.16). The tile has all
these columns even when the vocabulary is smaller."""
HEAD_STATISTICS = 40
"""Bytes a token of what the head keeps beside the hidden state: two int64 of labels and ids, six fp32 sums."""

Held = dict[str, int]
"""Component -> bytes."""


class Step(NamedTuple):
    """A micro-batch in which every sequence has `length` tokens, all trained."""

    arch: Architecture
    width: Widths
    attention: str
    masked: bool
    batch: int
    length: int
    checkpointing: bool
    autocast_cache: bool
    """Whether autocast keeps its copies of the weights until the forward pass ends."""
    optimizer_step: int

    @property
    def tokens(self) -> int:
        return self.batch * self.length

    @property
    def of_layer(self) -> int:
        """Bytes that the backward pass of one layer needs."""
        each = activations.layer_activations(self.arch, self.width, self.length, self.attention, self.masked)
        return self.tokens * each

    @property
    def kept_of_layer(self) -> int:
        """Bytes of that which are kept until then; with checkpointing the layer's input alone."""
        return self.tokens * self.arch.hidden * self.width.weight if self.checkpointing else self.of_layer

    def saved(self, outside: int) -> Held:
        """`outside`: bytes a token that are kept outside of the layers."""
        mask = self.length * (self.width.compute if self.attention == "eager" else 1) if self.masked else 0
        return {"saved activations": self.arch.layers * self.kept_of_layer + self.tokens * (outside + mask)}

    @property
    def copies(self) -> int:
        return activations.autocast_copies(self.arch, self.width)

    @property
    def kept_copies(self) -> Held:
        """Without checkpointing autograd keeps autocast's copies of the weights, whether it caches them or not."""
        return {} if self.checkpointing else self.all_copies

    @property
    def all_copies(self) -> Held:
        return {"autocast copies": self.copies * self.arch.layers}

    @property
    def scores(self) -> int:
        """Bytes a token of eager attention's softmax: in fp32, and converted."""
        return self.arch.heads * self.length * (4 + self.width.compute) if self.attention == "eager" else 0


def moments(step: Step) -> dict[str, Held]:
    arch, width, head_input = step.arch, step.width, step.arch.hidden * step.width.weight
    outside = activations.outer_activations(arch, width, step.batch) + head_input + HEAD_STATISTICS
    saved = step.saved(outside)
    forward = saved | (step.all_copies if step.autocast_cache else step.kept_copies)
    embedding_gradient = arch.embedding * width.weight
    return {
        "forward pass of the last layer": forward | {"layer at work": _passing(step)},
        "loss": forward | {"logits and loss": _tile(step)},
        "backward pass of the loss": saved | step.kept_copies | {"logits and loss": _tile(step) + _summed(step)},
        "backward pass of the last layer": _returning(step),
        "end of the backward pass": {
            "embedding gradient": embedding_gradient * (2 if arch.tied else 1),
            "layer at work": step.tokens * head_input,
        },
        "optimizer step": {"optimizer step": step.optimizer_step},
    }


def _passing(step: Step) -> int:
    feed_forward = step.arch.intermediate * step.width.compute
    largest = max(3 * feed_forward, step.scores) if step.checkpointing else 0  # otherwise it is among what is saved
    return step.tokens * (largest + 2 * step.arch.hidden * step.width.weight)


def _tile(step: Step) -> int:
    """One tile of logits and, with autocast, the casts of its rows of the head's weights and of its inputs."""
    rows, hidden, compute = min(step.tokens, HEAD_TOKENS), step.arch.hidden, step.width.compute
    cast = (min(step.arch.vocabulary, HEAD_COLUMNS) + rows) * hidden * compute if step.width.autocast else 0
    return rows * HEAD_COLUMNS * compute + cast


def _summed(step: Step) -> int:
    """TRL sums the gradients of the head and of its inputs in fp32 and converts them at the end; the next tile's
    weights are cast before this one's are free."""
    arch, width = step.arch, step.width
    sums = (4 + (width.weight if width.weight < 4 else 0)) * (arch.embedding + step.tokens * arch.hidden)
    next_columns = min(HEAD_COLUMNS, max(0, arch.vocabulary - HEAD_COLUMNS))
    return sums + (next_columns * arch.hidden * width.compute if width.autocast else 0)


def _returning(step: Step) -> Held:
    arch, width = step.arch, step.width
    saved = step.saved(activations.position_activations(arch, width, step.batch))
    feed_forward, residual = arch.intermediate * width.compute, arch.hidden * (width.weight + width.compute)
    # Of down: a gradient of its input, and of its weights before they are added. Then of activation and up, when the
    # product is free. In attention all of the feed-forward is free.
    largest = arch.intermediate * arch.hidden * (width.compute + (width.weight if width.autocast else 0))
    in_feed_forward = max(step.tokens * feed_forward + largest, step.tokens * 2 * feed_forward)
    in_attention = step.tokens * (step.scores - 4 * feed_forward)
    return (
        saved
        | (step.kept_copies or {"autocast copies": step.copies})
        | {
            "recomputed layer": step.of_layer - step.kept_of_layer,  # its input is there already
            "layer at work": max(in_feed_forward, in_attention) + step.tokens * residual,
            # of a tied embedding the head's part waits for the input's
            "embedding gradient": arch.embedding * width.weight if arch.tied else 0,
        }
    )
