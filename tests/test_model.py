"""Chat template, pad token, end of turn, generation config; saving a checkpoint as a model directory."""

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest

from config.sections import ModelSection
from finetuning import export
from finetuning.artifacts import MANIFEST, produce, read_json, read_manifest, write_json
from finetuning.errors import Failure
from finetuning.inputs import identify
from finetuning.launcher import run_step
from finetuning.model import TURN_END, load_chat_model, prepare
from finetuning.publish import publish
from finetuning.register import size_name
from tests.conftest import PROJECT
from tests.tiny import like_gemma, without_template

SAMPLE = PROJECT / "samples" / "model"


def prepared(base: Path, output: Path) -> dict[str, Any]:
    section = ModelSection(name=str(base))
    return produce(output, lambda directory: prepare(section, identify("model", str(base), "main"), directory))


@pytest.fixture
def sample(tmp_path: Path) -> Path:
    return Path(shutil.copytree(SAMPLE, tmp_path / "base"))


def test_a_chat_model_is_taken_as_it_is(sample: Path, tmp_path: Path) -> None:
    facts = prepared(sample, tmp_path / "out")
    assert facts["chat_template"] == "its own"
    assert facts["architecture"] == "Qwen3ForCausalLM"
    assert facts["base"] == str(sample)
    model, tokenizer = load_chat_model(sample, tmp_path / "out", dtype="float32", trust_remote_code=False)
    assert facts["num_parameters"] == sum(weight.numel() for weight in model.parameters())
    assert facts["context_length"] == model.config.max_position_embeddings
    assert tokenizer.chat_template == (sample / "chat_template.jinja").read_text()
    assert (tokenizer.pad_token, tokenizer.eos_token) == ("<|endoftext|>", TURN_END)


def test_without_a_template_it_gets_chatml(tmp_path: Path) -> None:
    """The turn's end becomes eos, pad is another token, the embedding grows, and tied weights stay tied."""
    base = without_template(tmp_path / "base")
    facts = prepared(base, tmp_path / "out")
    assert facts["chat_template"] == "ChatML, as it has none"
    assert facts["vocabulary_size"] > facts["embedding_rows"]
    model, tokenizer = load_chat_model(base, tmp_path / "out", dtype="float32", trust_remote_code=False)
    assert model.get_input_embeddings().num_embeddings == len(tokenizer)
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.eos_token == TURN_END
    assert tokenizer.pad_token == "<|endoftext|>"
    assert model.generation_config.eos_token_id == [tokenizer.eos_token_id, tokenizer.pad_token_id]
    assert model.generation_config.pad_token_id == tokenizer.pad_token_id


def test_a_model_stops_where_its_turns_end(sample: Path, tmp_path: Path) -> None:
    """Gemma's eos ends a document; so does that of a base model that comes with a chat template."""
    prepared(like_gemma(tmp_path / "gemma"), tmp_path / "gemma-out")
    model, tokenizer = load_chat_model(
        tmp_path / "gemma", tmp_path / "gemma-out", dtype="float32", trust_remote_code=False
    )
    assert model.get_input_embeddings().num_embeddings == len(tokenizer) + 10, "spare rows stay"
    ends = tokenizer.convert_tokens_to_ids(["<eos>", "<end_of_turn>"])
    assert model.generation_config.eos_token_id == ends
    assert (tokenizer.pad_token, model.generation_config.pad_token_id) == ("<pad>", tokenizer.pad_token_id)

    config = read_json(sample / "tokenizer_config.json")
    write_json(sample / "tokenizer_config.json", {**config, "eos_token": "<|endoftext|>"})
    (sample / "generation_config.json").unlink()
    prepared(sample, tmp_path / "out")
    _, tokenizer = load_chat_model(sample, tmp_path / "out", dtype="float32", trust_remote_code=False)
    saved = read_json(tmp_path / "out" / "generation_config.json")
    assert tokenizer.convert_tokens_to_ids(["<|endoftext|>", TURN_END]) == saved["eos_token_id"]


def test_without_a_pad_token_pad_is_eos(sample: Path, tmp_path: Path) -> None:
    config = read_json(sample / "tokenizer_config.json")
    write_json(sample / "tokenizer_config.json", {**config, "pad_token": None})
    prepared(sample, tmp_path / "out")
    _, tokenizer = load_chat_model(sample, tmp_path / "out", dtype="float32", trust_remote_code=False)
    assert tokenizer.pad_token == tokenizer.eos_token == TURN_END


def test_a_generation_config_that_could_not_be_saved_is_mended(sample: Path, tmp_path: Path) -> None:
    """transformers refuses it when it saves, which would be after all training (transformers#29988)."""
    path = sample / "generation_config.json"
    write_json(path, {**read_json(path), "do_sample": False, "temperature": 0.6, "top_p": 0.95})
    prepared(sample, tmp_path / "out")
    saved = read_json(tmp_path / "out" / "generation_config.json")
    assert (saved["do_sample"], saved["temperature"]) == (True, 0.6)


def test_refusals_name_the_model(sample: Path, tmp_path: Path) -> None:
    (sample / "config.json").rename(sample / "other.json")
    with pytest.raises(Failure, match=r"model.name='.*base': a model directory has a config.json, this has none."):
        identify("model", str(sample), "main")
    (sample / "other.json").rename(sample / "config.json")
    for weights in sample.glob("*.safetensors"):
        weights.unlink()
    with pytest.raises(Failure, match=r"has no \*.safetensors weights"):
        prepared(sample, tmp_path / "out")
    write_json(sample / "config.json", {"model_type": "no-such-type"})
    with pytest.raises(Failure, match=r"model.name='.*base': AutoConfig cannot load it: .*no-such-type"):
        prepared(sample, tmp_path / "out")


def test_code_beside_the_weights_is_run_only_when_it_is_trusted(sample: Path, tmp_path: Path) -> None:
    """In a child, as in a run: nobody could answer a question on its stdin."""
    ran = tmp_path / "ran"
    (sample / "own.py").write_text(f"open({str(ran)!r}, 'w')\n")
    write_json(sample / "config.json", {"model_type": "own", "auto_map": {"AutoConfig": "own.Own"}})
    source = identify("model", str(sample), "main").model_dump(mode="json")
    job = {"section": ModelSection(name=str(sample)).model_dump(), "input": source, "output": str(tmp_path / "out")}
    with pytest.raises(Failure, match=r"Python code that lies beside its weights.*model.trust_remote_code to true"):
        run_step("model", job, logging.getLogger("test"), directory=tmp_path / "job", timeout_seconds=120)
    assert not ran.exists()


def exported(checkpoint: Path, model: Path, output: Path) -> dict[str, Any]:
    job = {
        "checkpoint": str(checkpoint),
        "model": str(model),
        "output": str(output),
        "trust_remote_code": False,
        "provenance": {"base_model": "x"},
    }
    return export.run(job)


def test_the_model_directory_holds_these_files(sample: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "MAX_SHARD_SIZE", "200KB")  # a real model's 2 GB shards, in small
    (sample / "training_args.bin").write_bytes(b"a pickle, which must not go along")
    prepared(sample, tmp_path / "prepared")
    manifest = exported(sample, tmp_path / "prepared", tmp_path / "fp")
    files = {path.name for path in (tmp_path / "fp").iterdir()}
    shards = {name for name in files if name.startswith("model-")}
    assert len(shards) > 1
    assert files - shards == {
        "chat_template.jinja",
        "config.json",
        "finetune.json",
        "generation_config.json",
        MANIFEST,
        "model.safetensors.index.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert set(manifest["files"]) == files - {MANIFEST}
    assert manifest["fingerprint"] == "fp"
    assert {oct(path.stat().st_mode & 0o777) for path in (tmp_path / "fp").iterdir()} == {"0o644"}
    config = read_json(tmp_path / "fp" / "config.json")
    assert (config["dtype"], config["use_cache"]) == ("bfloat16", True)


def test_a_published_copy_is_whole_or_has_no_manifest(sample: Path, tmp_path: Path) -> None:
    prepared(sample, tmp_path / "prepared")
    exported(sample, tmp_path / "prepared", tmp_path / "fp")
    target = tmp_path / "volume" / "fp"
    publish(tmp_path / "fp", target)
    assert read_manifest(target) == read_manifest(tmp_path / "fp")
    (target / "config.json").unlink()
    assert read_manifest(target) is None
    publish(tmp_path / "fp", target)
    assert read_manifest(target) == read_manifest(tmp_path / "fp")
    (tmp_path / "file").write_text("")
    with pytest.raises(Failure, match=r"could not be copied to .*It is whole at .*set FINETUNE_VOLUME_ROOT"):
        publish(tmp_path / "fp", tmp_path / "file" / "fp")


def test_golden_output(tmp_path: Path) -> None:
    """When it fails, the same base gives other files than before: raise MODEL_VERSION and put the new values here."""
    prepared(SAMPLE, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    config.pop("transformers_version")
    assert config == {"eos_token_id": [612, 610], "pad_token_id": 610}
    template = (tmp_path / "out" / "chat_template.jinja").read_text()
    assert template == (SAMPLE / "chat_template.jinja").read_text()


@pytest.mark.parametrize(
    ("num_parameters", "name"), [(4_022_468_096, "4b"), (134_515_008, "135m"), (596_049_920, "596m"), (225_664, "226k")]
)
def test_sizes_are_named_as_models_are(num_parameters: int, name: str) -> None:
    assert size_name(num_parameters) == name
