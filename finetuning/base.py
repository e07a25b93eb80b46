"""What is known of a base model before its weights are there: files of a few megabytes, headers, what the hub tells."""

from pathlib import Path
from typing import Any, NamedTuple

from config.sections import ModelSection
from config.settings import Settings
from finetuning.artifacts import read_manifest
from finetuning.errors import Failure
from finetuning.findings import Findings
from finetuning.inputs import HUB_TIMEOUT_SECONDS, Input
from finetuning.memory.architecture import NotUnderstood, architecture, read_config
from finetuning.model import download, load_config, weight_shapes


class Facts(NamedTuple):
    directory: Path
    """With its config.json, and the weights where they are here."""
    architecture: str
    num_parameters: int | None
    context_length: int | None


def model_line(section: ModelSection, source: Input, prepared: Path | None, findings: Findings) -> Facts | None:
    """The line `model` of a preflight."""
    with findings.checking("model"):
        facts = look(section, source, prepared)
        size = "parameters not known yet" if facts.num_parameters is None else f"{facts.num_parameters:,} parameters"
        positions = f", {facts.context_length:,} positions" if facts.context_length else ""
        findings.ok("model", f"{source.told}: {facts.architecture}, {size}{positions}")
        return facts


def look(section: ModelSection, source: Input, prepared: Path | None) -> Facts:
    """`prepared`: where its artifact would be; what that says is not looked up again. Raises Failure."""
    if prepared and (facts := read_manifest(prepared)):
        return Facts(Path(facts["base"]), *(facts[name] for name in Facts._fields[1:]))
    directory = source.path or download(source, weights=False)
    config = load_config(directory, section)
    if source.path or Settings().hf_hub_offline:
        num_parameters = weight_shapes(directory, config)[1]
    else:
        num_parameters = _on_the_hub(source, directory)
    name = (config.architectures or [type(config).__name__])[0]
    return Facts(directory, name, num_parameters, getattr(config, "max_position_embeddings", None))


def _on_the_hub(source: Input, directory: Path) -> int | None:
    """As the hub counts them, which it may not, or else as config.json says."""
    from huggingface_hub import HfApi

    token: Any = Settings().hf_token
    api = HfApi(token=token and token.get_secret_value())
    where = f"model.name={source.name!r}"
    try:
        info = api.model_info(source.name, revision=source.version, timeout=HUB_TIMEOUT_SECONDS)
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise Failure("transient", f"{where}: the hub was asked for its files but did not answer ({reason}).") from None
    if not any(file.rfilename.endswith(".safetensors") for file in info.siblings or ()):
        message = f"{where}: the hub has no *.safetensors weights of it. Convert them, or take another model."
        raise Failure("configuration", message)
    if info.safetensors:
        return info.safetensors.total
    try:
        return architecture(read_config(directory)).parameters
    except NotUnderstood:
        return None
