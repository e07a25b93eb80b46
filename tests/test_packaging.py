"""A package is loaded and asked in a fresh process, away from the project: what serves it knows nothing of us."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

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
TIED = "tie_word_embeddings"
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


def make_model_directory(directory: Path, max_shard_size: str, tied: bool = True) -> Path:
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
        tie_word_embeddings=tied,
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


def test_requirements_are_pinned_without_build_labels(folder: Path) -> None:
    from importlib.metadata import version

    package = folder / "packages" / "whole"
    requirements = (package / "requirements.txt").read_text().splitlines()
    assert all(re.fullmatch(r"[a-z0-9_.-]+==[0-9a-z.]+", line) for line in requirements), requirements
    assert f"torch=={version('torch').partition('+')[0]}" in requirements
    assert {line.partition("==")[0] for line in requirements} >= {"mlflow", "transformers", "accelerate", "jinja2"}
    assert yaml.safe_load((package / "conda.yaml").read_text())["dependencies"][-1]["pip"] == requirements
    assert "torchvision" not in " ".join(requirements)


def test_requirements_agree_with_each_other(folder: Path) -> None:
    """Against what is installed here, dependencies and all: without an index, pip finds nothing left to fetch."""
    requirements = folder / "packages" / "whole" / "requirements.txt"
    pip = [sys.executable, "-m", "pip", "install", "--dry-run", "--no-index", "-r", str(requirements)]
    result = subprocess.run(pip, text=True, capture_output=True, timeout=600)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "Would install" not in result.stdout


def test_neither_a_log_by_path_nor_torchvision_has_part_in_it(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both ways of MLflow that failed: `log_model(<path>)` and requirements that it finds by itself."""
    import mlflow

    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("MLflow's own packaging was called")

    for name in ("save_model", "log_model", "get_default_pip_requirements"):
        monkeypatch.setattr(mlflow.transformers, name, fail)
    monkeypatch.setitem(sys.modules, "torchvision", None)
    package = package_model(folder / "whole", tmp_path / "package", task=CHAT_TASK, metadata=METADATA)
    [answer] = mlflow.pyfunc.load_model(str(package)).predict({"messages": [{"role": "user", "content": "Blue?"}]})
    assert answer["choices"]


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


@pytest.mark.parametrize("name", ["whole", "sharded"])
@pytest.mark.parametrize("said", [False, None])
def test_an_output_layer_that_is_nowhere_is_refused(folder: Path, tmp_path: Path, name: str, said: bool | None) -> None:
    """Both models are tied. A Qwen3 whose config.json does not say so is not: transformers draws a random layer."""
    directory = shutil.copytree(folder / name, tmp_path / "model")
    config = json.loads((directory / "config.json").read_text())
    assert config.pop(TIED) is True
    (directory / "config.json").write_text(json.dumps(config if said is None else config | {TIED: said}))
    with pytest.raises(Failure, match=r"has no tensor lm_head\.weight, and its config\.json does not say"):
        package_model(directory, tmp_path / "package", task=CHAT_TASK, metadata=METADATA)


@pytest.mark.parametrize("max_shard_size", ["2GB", "200KB"])
def test_an_output_layer_of_its_own_is_in_the_package(tmp_path: Path, max_shard_size: str) -> None:
    from transformers import AutoModelForCausalLM

    directory = make_model_directory(tmp_path / "model", max_shard_size, tied=False)
    package = package_model(directory, tmp_path / "package", task=CHAT_TASK, metadata=METADATA)
    models = [AutoModelForCausalLM.from_pretrained(path) for path in (directory, package / "model")]
    heads = [model.lm_head.weight for model in models]
    assert heads[0].equal(heads[1])
    assert not heads[0].equal(models[0].model.embed_tokens.weight)


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
