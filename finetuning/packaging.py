"""An MLflow package (transformers flavor, chat task) made out of a saved model directory, without loading weights.

MLflow's own ways do not fit: `save_model(<path>)` fails with transformers >= 5.23 (mlflow/transformers/flavor_config.py
asks a string for its `__name__`), and passing objects needs twice the memory and disk. The layout, which
`mlflow.pyfunc.load_model` and `mlflow.transformers.load_model` expect:

    MLmodel  requirements.txt  conda.yaml  python_env.yaml  input_example.json  serving_input_example.json
    model/                  every file of the model directory, weights as hard links: a server can be pointed at it
    components/tokenizer/   the tokenizer's files once more: MLflow loads the tokenizer from there
"""

import contextlib
import os
import shutil
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from finetuning.artifacts import files_below, read_json
from finetuning.errors import Failure

CHAT_TASK = "llm/v1/chat"
REQUIREMENTS = ("mlflow", "torch", "transformers", "accelerate", "safetensors", "tokenizers", "jinja2")
"""What loading and answering imports. MLflow would add torchvision, which no chat model needs (mlflow#10929)."""
TOKENIZER_FILES = ("*token*", "*.jinja", "vocab*", "merges.txt", "*.model")
OUTPUT_LAYERS = ("lm_head", "embed_out")
"""Names of the layer that gives the logits; the second is GPT-NeoX's."""
INPUT_EXAMPLE = {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 64}


def package_model(model_directory: Path, output: Path, *, task: str, metadata: dict[str, str]) -> Path:
    """Fill `output`, which is empty or not there, with the package of `model_directory`, and return it.

    MLmodel is written last: without it nothing takes the directory for a model. Everybody can read the files (servers
    run as somebody else); the model directory itself is not changed, also not through a link.

    Raises:
        Failure: `task` is not the chat task, `output` holds something, or the model directory is not complete.
    """
    if task != CHAT_TASK:
        raise Failure("configuration", f"task {task!r} cannot be packaged, only {CHAT_TASK!r}")
    check_model_directory(model_directory)
    output.mkdir(parents=True, exist_ok=True)
    if any(output.iterdir()):
        raise Failure("configuration", f"{output} is not empty: a package is written into a new directory")
    _place_files(model_directory, output)
    _write_environment(output)
    _write_mlmodel(model_directory, output, task, metadata)
    for path in output.rglob("*"):
        if path.is_dir() or path.stat().st_nlink == 1:  # the mode of a link is its source's
            path.chmod(0o755 if path.is_dir() else 0o644)
    return output


def check_model_directory(model_directory: Path) -> None:
    """Raise a `Failure` unless config, weights with an output layer, tokenizer and a chat template are there."""
    missing = [name for name in ("config.json", "tokenizer.json") if not (model_directory / name).is_file()]
    missing += _missing_weights(model_directory)
    if not _has_chat_template(model_directory):
        missing.append("a chat template (chat_template.jinja)")
    if missing:
        raise Failure("configuration", f"the model directory {model_directory} lacks: {', '.join(missing)}")
    config = read_json(model_directory / "config.json")
    if not config.get("architectures"):
        raise Failure("configuration", f"{model_directory / 'config.json'} names no model class in 'architectures'")
    parts = {part for name in _tensor_names(model_directory) for part in name.split(".")}
    if parts.isdisjoint(OUTPUT_LAYERS) and not _is_tied(config):
        message = f"{model_directory} has no tensor lm_head.weight, and its config.json does not say that it is the "
        message += "embedding (tie_word_embeddings): loading would make up random values for it. Save the model again"
        raise Failure("configuration", message)


def link_or_copy(source: Path, target: Path) -> None:
    """Make `target` a hard link to `source`, or a copy of mode 0644 where that cannot be.

    A link shares its mode with the source: a file that others cannot read (safetensors 0.8 writes 0600) is copied, and
    no `chmod` goes through a link. A symbolic link, as in a hub snapshot, is followed: `target` is a regular file.
    """
    if source.stat().st_mode & 0o044 == 0o044:
        with contextlib.suppress(OSError):  # another file system, or one without hard links
            return os.link(source.resolve(), target)
    shutil.copyfile(source, target)
    target.chmod(0o644)


def _missing_weights(model_directory: Path) -> Iterator[str]:
    index = model_directory / "model.safetensors.index.json"
    if index.is_file():
        shards = set(read_json(index)["weight_map"].values())
        yield from (f"{name} (named by {index.name})" for name in sorted(shards) if not (index.parent / name).is_file())
    elif not (model_directory / "model.safetensors").is_file():
        yield f"weights (model.safetensors or {index.name})"


def _tensor_names(model_directory: Path) -> list[str]:
    """Names only: of a file without an index its header is read."""
    from safetensors import safe_open

    index = model_directory / "model.safetensors.index.json"
    if index.is_file():
        return list(read_json(index)["weight_map"])
    with safe_open(model_directory / "model.safetensors", framework="np") as file:
        return list(file.keys())


def _is_tied(config: dict[str, Any]) -> bool:
    """Whether the output layer is the embedding. Unless the file says so: what the model's type means by default."""
    from transformers import CONFIG_MAPPING

    tied = config.get("tie_word_embeddings", config.get("text_config", {}).get("tie_word_embeddings"))
    if tied is None and config.get("model_type") in CONFIG_MAPPING:
        tied = CONFIG_MAPPING[config["model_type"]]().tie_word_embeddings
    return tied is not False  # a type that only its own code knows may name the layer otherwise


def _has_chat_template(model_directory: Path) -> bool:
    """Transformers 5 writes a file, which copies by a known list of names lose; before, it was a key."""
    if (model_directory / "chat_template.jinja").is_file():
        return True
    config = model_directory / "tokenizer_config.json"
    return config.is_file() and bool(read_json(config).get("chat_template"))


def _place_files(model_directory: Path, package: Path) -> None:
    for name in files_below(model_directory):
        source, target = model_directory / name, package / "model" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.suffix == ".safetensors":
            link_or_copy(source, target)
        else:
            shutil.copyfile(source, target)
        if any(name.match(pattern) for pattern in TOKENIZER_FILES):
            component = package / "components" / "tokenizer" / name
            component.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, component)


def _write_environment(package: Path) -> None:
    """Pin what is installed here, without local labels: no index has the `torch==2.13.0+cpu` MLflow would write."""
    import yaml
    from mlflow.utils.environment import _process_pip_requirements, _PythonEnv

    pinned = [f"{name}=={version(name).partition('+')[0]}" for name in REQUIREMENTS]
    conda_environment, requirements, _ = _process_pip_requirements(None, pinned)
    (package / "requirements.txt").write_text("\n".join(requirements) + "\n")
    (package / "conda.yaml").write_text(yaml.safe_dump(conda_environment))
    _PythonEnv.current().to_yaml(str(package / "python_env.yaml"))


def _write_mlmodel(model_directory: Path, package: Path, task: str, metadata: dict[str, str]) -> None:
    """Write MLmodel with the signature MLflow has for the task; Unity Catalog refuses one without outputs."""
    import mlflow
    import transformers
    from mlflow.models.utils import _save_example
    from mlflow.transformers.llm_inference_utils import infer_signature_from_llm_inference_task

    size = sum(path.stat().st_size for path in package.rglob("*") if path.is_file())
    signature = infer_signature_from_llm_inference_task(task)
    model = mlflow.models.Model(signature=signature, metadata=metadata | {"task": task}, model_size_bytes=size)
    _save_example(model, INPUT_EXAMPLE, str(package))
    flavor = _flavor_configuration(model_directory, task, metadata)
    model.add_flavor("transformers", transformers_version=transformers.__version__, code=None, **flavor)
    environment = {"conda_env": "conda.yaml", "python_env": "python_env.yaml"}
    mlflow.pyfunc.add_to_model(model, loader_module="mlflow.transformers", **environment)
    model.save(str(package / "MLmodel"))


def _flavor_configuration(model_directory: Path, task: str, metadata: dict[str, str]) -> dict[str, object]:
    """Return the keys of mlflow/transformers/flavor_config.py, read from files.

    The weights load in the dtype they were saved in; no device is written, the loading machine decides. The source is
    the base model's name, not a path of this machine: it is in every answer of the loaded model.
    """
    from transformers import AutoTokenizer

    config = read_json(model_directory / "config.json")
    dtype = config.get("dtype") or config.get("torch_dtype")
    return {
        "task": "text-generation",
        "inference_task": task,
        "instance_type": "TextGenerationPipeline",
        "pipeline_model_type": config["architectures"][0],
        "source_model_name": metadata.get("pretrained_model_name", model_directory.name),
        "model_binary": "model",
        "components": ["tokenizer"],
        "tokenizer_type": type(AutoTokenizer.from_pretrained(model_directory)).__name__,
    } | ({"torch_dtype": f"torch.{dtype}"} if dtype else {})
