"""A package is loaded and asked in a fresh process, away from the project: what serves it knows nothing of us."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from finetuning.errors import Failure
from finetuning.packaging import CHAT_TASK, link_or_copy, package_model

METADATA = {
    "task": CHAT_TASK,
    "pretrained_model_name": "Qwen/Qwen3-4B",
    "databricks_model_family": "Qwen3ForCausalLM",
    "databricks_model_size_parameters": "4b",
}
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ASK = """
import json, sys, mlflow
messages = [{"role": "user", "content": "What is blue?"}]
for package in sys.argv[1:]:
    answer = mlflow.pyfunc.load_model(package).predict({"messages": messages, "max_tokens": 4})
    pipeline = mlflow.transformers.load_model(package)
    reply = pipeline(messages, max_new_tokens=4)[0]["generated_text"][-1]
    print(json.dumps({"answer": answer, "reply": reply, "dtype": str(pipeline.model.dtype)}))
"""


def make_model_directory(directory: Path, max_shard_size: str) -> Path:
    """A random Qwen3 model of 470 KB in bfloat16, complete, as training leaves it."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=special, initial_alphabet=alphabet)
    bpe.train_from_iterator(["What is the colour of the lamp? It is blue.", "The lamp is blue."], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=special[2], pad_token=special[0])
    tokenizer.chat_template = CHATML
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=96,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=24,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(directory, max_shard_size=max_shard_size)
    tokenizer.save_pretrained(directory)
    for file in directory.iterdir():
        file.chmod(0o644)
    return directory


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Model directories `whole` and `sharded`, and their packages in `packages/`."""
    folder = tmp_path_factory.mktemp("packaging")
    for name, max_shard_size in (("whole", "2GB"), ("sharded", "200KB")):
        make_model_directory(folder / name, max_shard_size)
        package_model(folder / name, folder / "packages" / name, task=CHAT_TASK, metadata=METADATA)
    return folder


def test_a_fresh_process_loads_and_asks_it(folder: Path) -> None:
    packages = [str(folder / "packages" / name) for name in ("whole", "sharded")]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-c", ASK, *packages]
    result = subprocess.run(command, cwd=folder, env=environment, text=True, capture_output=True, timeout=300)
    assert result.returncode == 0, result.stderr
    lines = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    assert len(lines) == 2
    for line in lines:
        [answer] = line["answer"]
        assert answer["object"] == "chat.completion"
        assert answer["model"] == "Qwen/Qwen3-4B"
        assert answer["choices"][0]["message"]["role"] == line["reply"]["role"] == "assistant"
        assert 0 < answer["usage"]["completion_tokens"] <= 4
        assert line["dtype"] == "torch.bfloat16"


@pytest.mark.parametrize(("name", "num_weight_files"), [("whole", 1), ("sharded", 3)])
def test_weights_are_the_model_directorys_own_files(folder: Path, name: str, num_weight_files: int) -> None:
    weights = sorted((folder / name).glob("*.safetensors"))
    assert len(weights) == num_weight_files
    for file in weights:
        assert file.samefile(folder / "packages" / name / "model" / file.name)
    for file in (folder / name).iterdir():
        assert file.read_bytes() == (folder / "packages" / name / "model" / file.name).read_bytes()


def test_files_are_readable_for_everybody(folder: Path) -> None:
    modes = {path.stat().st_mode & 0o777 for path in (folder / "packages").rglob("*") if path.is_file()}
    assert modes == {0o644}


def test_requirements_can_be_installed(folder: Path) -> None:
    from importlib.metadata import version

    package = folder / "packages" / "whole"
    requirements = (package / "requirements.txt").read_text().split()
    assert f"torch=={version('torch').partition('+')[0]}" in requirements
    assert {line.partition("==")[0] for line in requirements} >= {"mlflow", "transformers", "accelerate", "jinja2"}
    for name in ("requirements.txt", "conda.yaml"):
        text = (package / name).read_text()
        assert "+" not in text
        assert "torchvision" not in text


def test_mlmodel_tells_what_a_registry_asks(folder: Path) -> None:
    from mlflow.models import Model

    model = Model.load(str(folder / "packages" / "whole"))
    assert model.signature.inputs.input_names()[0] == "messages"
    assert "choices" in model.signature.outputs.input_names()
    assert model.metadata == METADATA
    assert model.flavors["transformers"]["torch_dtype"] == "torch.bfloat16"
    assert str(folder) not in yaml.safe_dump(model.to_dict())


@pytest.mark.parametrize(
    ("gone", "said"),
    [
        (["chat_template.jinja"], "a chat template (chat_template.jinja)"),
        (["config.json", "tokenizer.json"], "config.json, tokenizer.json"),
        (["model-00002-of-00003.safetensors"], "model-00002-of-00003.safetensors (named by"),
        (["model.safetensors.index.json"], "weights (model.safetensors or model.safetensors.index.json)"),
    ],
)
def test_an_incomplete_model_directory_is_refused(folder: Path, tmp_path: Path, gone: list[str], said: str) -> None:
    directory = shutil.copytree(folder / "sharded", tmp_path / "model")
    for name in gone:
        (directory / name).unlink()
    with pytest.raises(Failure) as failure:
        package_model(directory, tmp_path / "package", task=CHAT_TASK, metadata=METADATA)
    assert f"the model directory {directory} lacks: {said}" in failure.value.message
    assert not (tmp_path / "package").exists()


def test_a_template_inside_the_tokenizer_configuration_counts(folder: Path, tmp_path: Path) -> None:
    directory = shutil.copytree(folder / "whole", tmp_path / "model")
    (directory / "chat_template.jinja").unlink()
    configuration = json.loads((directory / "tokenizer_config.json").read_text())
    (directory / "tokenizer_config.json").write_text(json.dumps({**configuration, "chat_template": CHATML}))
    package_model(directory, tmp_path / "package", task=CHAT_TASK, metadata=METADATA)


def test_other_tasks_and_full_outputs_are_refused(folder: Path) -> None:
    with pytest.raises(Failure, match="'llm/v1/completions' cannot be packaged"):
        package_model(folder / "whole", folder / "new", task="llm/v1/completions", metadata=METADATA)
    with pytest.raises(Failure, match="is not empty"):
        package_model(folder / "whole", folder / "packages" / "whole", task=CHAT_TASK, metadata=METADATA)


def test_a_private_file_is_copied_and_stays_private(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_text("weights")
    source.chmod(0o600)
    link_or_copy(source, target)
    assert target.read_text() == "weights"
    assert (source.stat().st_mode & 0o777, target.stat().st_mode & 0o777) == (0o600, 0o644)


def test_a_link_leads_to_the_file_behind_a_symbolic_link(tmp_path: Path) -> None:
    blob, snapshot, target = tmp_path / "blob", tmp_path / "snapshot", tmp_path / "target"
    blob.write_text("weights")
    snapshot.symlink_to(blob)
    link_or_copy(snapshot, target)
    assert not target.is_symlink()
    assert target.samefile(blob)


def test_the_pair_still_needs_a_packaging_of_our_own(tmp_path: Path) -> None:
    """docs/decisions.md, 1. When this fails, MLflow has caught up: read that decision again."""
    import mlflow
    from mlflow.ml_package_versions import _ML_PACKAGE_VERSIONS
    from packaging.version import Version
    from transformers import __version__

    assert Version(__version__) > Version(_ML_PACKAGE_VERSIONS["transformers"]["models"]["maximum"])
    directory = make_model_directory(tmp_path / "model", "2GB")
    with pytest.raises(AttributeError, match="__name__"):
        mlflow.transformers.save_model(str(directory), str(tmp_path / "package"), task=CHAT_TASK)
