"""What config.json says of a model's sizes."""

import json
from pathlib import Path
from typing import Any, NamedTuple


class NotUnderstood(ValueError):
    """A model or a setting whose memory is not known here. Nothing is guessed; the message says which."""


class Family(NamedTuple):
    """What distinguishes the layers of a `model_type`, as in transformers' modeling files and config classes."""

    kv_heads: int | None = None
    """Default of num_key_value_heads; None: as many as there are heads."""
    head_dim: int | None = None
    """Default of head_dim; None: hidden_size / num_attention_heads."""
    tied: bool = False
    """Default of tie_word_embeddings."""
    qkv_bias: bool | None = None
    """Whether q, k and v have a bias; None: as attention_bias says, the output projection as well."""
    mlp_bias: bool = False
    """Whether mlp_bias is heeded."""
    qk_norm: bool = False
    fp32_norm: bool = False
    """Whether RMSNorm multiplies by its weight in fp32."""


FAMILIES = {
    "llama": Family(mlp_bias=True),
    "mistral": Family(kv_heads=8, qkv_bias=False),
    "qwen2": Family(kv_heads=32, qkv_bias=True),
    "qwen3": Family(kv_heads=32, head_dim=128, qk_norm=True),
    "gemma": Family(kv_heads=16, head_dim=256, tied=True, fp32_norm=True),
}


class Architecture(NamedTuple):
    family: Family
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool
    attention_bias: bool
    mlp_bias: bool
    window: int | None
    """Tokens a token sees at most, where the model has sliding windows."""

    @property
    def query_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def embedding(self) -> int:
        return self.vocabulary * self.hidden

    @property
    def num_embeddings(self) -> int:
        """The head counts as one where it is not tied."""
        return 1 if self.tied else 2

    def layer_matrices(self) -> list[int]:
        """Elements of the matrices of one layer: q, k, v, output, gate, up, down."""
        attention = [self.query_width, self.kv_width, self.kv_width, self.query_width]
        return [self.hidden * width for width in (*attention, *[self.intermediate] * 3)]

    def layer_vectors(self) -> list[int]:
        """Elements of the norms and biases of one layer."""
        vectors = [self.hidden] * 2 + [self.head_dim] * 2 * self.family.qk_norm
        if self.attention_bias:
            output = [] if self.family.qkv_bias else [self.hidden]
            vectors += [self.query_width, self.kv_width, self.kv_width, *output]
        if self.mlp_bias:
            vectors += [self.intermediate, self.intermediate, self.hidden]
        return vectors

    def tensors(self) -> list[int]:
        """Elements of every parameter of the model; the embedding (and the untied head) first."""
        layers = (self.layer_matrices() + self.layer_vectors()) * self.layers
        return [self.embedding] * self.num_embeddings + layers + [self.hidden]

    @property
    def parameters(self) -> int:
        return sum(self.tensors())


def read_config(path: Path) -> dict[str, Any]:
    """A config.json, or that of a model directory. Raises NotUnderstood when there is none."""
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise NotUnderstood(f"{file} is no readable config.json ({error}).") from None
    if not isinstance(config, dict):
        raise NotUnderstood(f"{file} holds no JSON object.")
    return config


def architecture(config: dict[str, Any]) -> Architecture:
    """Raises NotUnderstood for another kind of model than FAMILIES, a quantized one, or a value that is missing."""
    kind = config.get("model_type")
    if kind not in FAMILIES:
        raise NotUnderstood(f"config.json: model_type={kind!r} is not understood, only {', '.join(FAMILIES)}.")
    if config.get("quantization_config"):
        raise NotUnderstood("config.json: quantization_config: weights that are quantized are not understood.")
    family = FAMILIES[kind]
    hidden, heads = _number(config, "hidden_size"), _number(config, "num_attention_heads")
    biased = bool(config.get("attention_bias", False)) if family.qkv_bias is None else family.qkv_bias
    return Architecture(
        family=family,
        hidden=hidden,
        intermediate=_number(config, "intermediate_size"),
        layers=_number(config, "num_hidden_layers"),
        heads=heads,
        kv_heads=_number(config, "num_key_value_heads", family.kv_heads or heads),
        head_dim=_number(config, "head_dim", family.head_dim or hidden // heads),
        vocabulary=_number(config, "vocab_size"),
        tied=bool(config.get("tie_word_embeddings", family.tied)),
        attention_bias=biased,
        mlp_bias=family.mlp_bias and bool(config.get("mlp_bias", False)),
        window=config.get("sliding_window") if config.get("use_sliding_window", kind == "mistral") else None,
    )


def _number(config: dict[str, Any], name: str, default: int | None = None) -> int:
    value = config.get(name)
    value = default if value is None else value
    if type(value) is not int or value < 1:
        raise NotUnderstood(f"config.json: {name}={value!r} is not a positive number.")
    return value
