"""Prepare a base model for chat training: template, pad token, end of turn, generation config.

The weights stay where they are (a path, or the hub's cache at the resolved commit). The artifact holds the tokenizer
files and the generation config that training uses and that the finished model is saved with; its manifest says what the
weights are. Program: `python -m finetuning.model JOB.json` with `section`, `input` and `output`.
"""

import logging
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from config.sections import ModelSection
from finetuning import child
from finetuning.artifacts import produce
from finetuning.chat import CHATML_TEMPLATE, TURN_END, TURN_START, Renderer, choose_template, turn_end
from finetuning.errors import Failure
from finetuning.inputs import MODEL_SUFFIXES, Input

if TYPE_CHECKING:
    from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

MODEL_VERSION = 3
"""Part of every model fingerprint: raise it when the same base gives other tokenizer files or another config."""

WEIGHTS = ".safetensors"
logger = logging.getLogger(__name__)


def run(job: dict[str, Any]) -> dict[str, Any]:
    section, source = ModelSection.model_validate(job["section"]), Input.model_validate(job["input"])
    return produce(Path(job["output"]), lambda directory: prepare(section, source, directory))


def prepare(section: ModelSection, source: Input, output: Path) -> dict[str, Any]:
    """Write tokenizer and generation config below `output` and return the facts of the base model."""
    base = source.path or download(source)
    config = load_config(base, section)
    tokenizer, told = load_tokenizer(base, section)
    rows, num_parameters = weight_shapes(base, config)
    generation = generation_config(base, config, tokenizer)
    tokenizer.save_pretrained(output)
    generation.save_pretrained(output)
    logger.info(
        "%s: %d parameters, chat template: %s, pad %s, end of turn %s",
        source.name, num_parameters, told, tokenizer.pad_token, tokenizer.eos_token,
    )  # fmt: skip
    return {
        "base": str(base),
        "source": source.name,
        "version": source.version,
        "architecture": (config.architectures or [type(config).__name__])[0],
        "num_parameters": num_parameters,
        "embedding_rows": rows,
        "vocabulary_size": len(tokenizer),
        "context_length": getattr(config, "max_position_embeddings", None),
        "chat_template": told,
        "license": model_license(Path(base)),
    }


def model_license(base: Path) -> str:
    """What the front matter of its model card says."""
    from huggingface_hub import ModelCard

    try:
        data = ModelCard.load(base / "README.md").data
    except (OSError, ValueError):
        return "unknown"
    return str(data.get("license_name") or data.get("license") or "unknown")


def load_config(base: Path | str, section: ModelSection) -> "PretrainedConfig":
    from transformers import AutoConfig

    return _load(AutoConfig, base, section)


def load_tokenizer(base: Path | str, section: ModelSection) -> tuple["PreTrainedTokenizerBase", str]:
    """The tokenizer with the template and the tokens it trains with, and in a few words which template that is."""
    from transformers import AutoTokenizer

    tokenizer = _load(AutoTokenizer, base, section)
    template, told = choose_template(tokenizer, section)
    set_chat_tokens(tokenizer, template)
    return tokenizer, told


def download(source: Input, weights: bool = True) -> Path:
    """The snapshot of the pinned commit in the hub's cache; what is there already is not fetched again."""
    from huggingface_hub import snapshot_download

    suffixes = MODEL_SUFFIXES - (set() if weights else {WEIGHTS})
    patterns = [*(f"*{suffix}" for suffix in sorted(suffixes)), "README.md"]
    try:
        return Path(snapshot_download(source.name, revision=source.version, allow_patterns=patterns))
    except Exception as error:
        message = f"model.name={source.name!r}: download from the hub failed ({type(error).__name__}: {error})"
        raise Failure("transient", message.splitlines()[0]) from error


def set_chat_tokens(tokenizer: "PreTrainedTokenizerBase", template: str) -> None:
    """Give `tokenizer` the chat template, and the tokens that it needs.

    ChatML comes with its two tokens, and the end of a turn becomes eos: a model whose eos is the end of a document
    would never stop after its turn. Without a pad token, pad is eos; padding is masked by position, so the real eos
    keeps its label.
    """
    if template == CHATML_TEMPLATE:
        tokenizer.add_special_tokens({"additional_special_tokens": [TURN_START, TURN_END]})
        if tokenizer.pad_token is None and tokenizer.eos_token != TURN_END:
            tokenizer.pad_token = tokenizer.eos_token
        tokenizer.eos_token = TURN_END
    tokenizer.chat_template = template
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise Failure("configuration", "model.name: its tokenizer has neither a pad nor an eos token. Add one.")
        tokenizer.pad_token = tokenizer.eos_token


def generation_config(
    base: Path, config: "PretrainedConfig", tokenizer: "PreTrainedTokenizerBase"
) -> "GenerationConfig":
    """The base's generation config, with the tokenizer's pad and the tokens that end a turn, in a state that can be
    saved.

    transformers refuses to save one that sets temperature, top_p or top_k without sampling, and would do so after all
    training (transformers#29988); such a config gets do_sample=True, which is what its author meant.
    """
    from transformers import GenerationConfig

    has_file = (base / "generation_config.json").is_file()
    generation = GenerationConfig.from_pretrained(base) if has_file else GenerationConfig.from_model_config(config)
    named = generation.eos_token_id if isinstance(generation.eos_token_id, list) else [generation.eos_token_id]
    ends = dict.fromkeys([tokenizer.eos_token_id, turn_end_id(tokenizer), *named])
    generation.eos_token_id = [token for token in ends if token is not None]
    generation.pad_token_id = tokenizer.pad_token_id
    try:
        generation.validate(strict=True)
    except ValueError as error:
        logger.warning("generation_config.json sets sampling values without do_sample: it is set to true (%s)", error)
        generation.do_sample = True
        generation.validate(strict=True)
    return generation


def turn_end_id(tokenizer: "PreTrainedTokenizerBase") -> int | None:
    """The token that ends a turn with the template, which is what the model learns to end with, whatever eos is."""
    try:
        return tokenizer.convert_tokens_to_ids(turn_end(tokenizer, Renderer(tokenizer, assistant_only=False)))
    except ValueError:  # a template that renders no answer: `finetuning.tokens` refuses it when it is used
        return None


def weight_shapes(base: Path, config: "PretrainedConfig") -> tuple[int, int]:
    """Rows of the input embedding and number of parameters, from the headers of the safetensors files."""
    from safetensors import safe_open

    rows, total = 0, 0
    for file in sorted(base.glob("*.safetensors")):
        with safe_open(file, framework="numpy") as weights:
            for name in weights.keys():  # noqa: SIM118 a safe_open is not iterable
                shape = weights.get_slice(name).get_shape()
                total += math.prod(shape)
                if name.endswith("embed_tokens.weight") or name.endswith("wte.weight"):
                    rows = shape[0]
    if not total:
        raise Failure("configuration", f"model.name: {base} has no *.safetensors weights. Convert them first.")
    return rows or config.get_text_config().vocab_size, total


def load_chat_model(
    weights: Path, prepared: Path, *, dtype: str, trust_remote_code: bool, attn_implementation: str = "sdpa"
) -> tuple["PreTrainedModel", "PreTrainedTokenizerBase"]:
    """The model of `weights` (base or checkpoint) with the tokenizer and generation config of `prepared`.

    The embedding grows to the tokenizer and never shrinks: Qwen has spare rows, which are part of the checkpoint.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    tokenizer = AutoTokenizer.from_pretrained(prepared, trust_remote_code=trust_remote_code)
    how = {"dtype": dtype, "trust_remote_code": trust_remote_code, "attn_implementation": attn_implementation}
    model = AutoModelForCausalLM.from_pretrained(weights, **how)
    if len(tokenizer) > model.get_input_embeddings().num_embeddings:
        model.resize_token_embeddings(len(tokenizer))
    model.generation_config = GenerationConfig.from_pretrained(prepared)
    model.config.eos_token_id, model.config.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    return model, tokenizer


def _load(cls: Any, base: Path | str, section: ModelSection) -> Any:
    try:
        return cls.from_pretrained(base, trust_remote_code=section.trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        if "trust_remote_code" in str(error) and not section.trust_remote_code:
            message = f"model.name={section.name!r} is run by Python code that lies beside its weights. Read it, "
            message += "and set model.trust_remote_code to true, or take a model that needs none."
            raise Failure("configuration", message) from error
        reason = " ".join(str(error).split())[:300]
        raise Failure(
            "configuration", f"model.name={section.name!r}: {cls.__name__} cannot load it: {reason}"
        ) from error


if __name__ == "__main__":
    child.main(run)
