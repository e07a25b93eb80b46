"""The memory plan by itself: its numbers for Qwen3-4B, what it refuses and proposes, and its command."""

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from config.sections import Config, ModelSection, TrainingSection
from finetuning.errors import Failure
from finetuning.limits import check_gpu, disk_bytes
from finetuning.memory.__main__ import main
from finetuning.memory.architecture import NotUnderstood, architecture, read_config
from finetuning.memory.gpus import GPUS, Gpu, visible_gpu
from finetuning.memory.plan import plan, settled_checkpointing
from finetuning.memory.proposals import LARGER_GPU, check_memory, proposals
from tests.conftest import PROJECT

FILE = PROJECT / "bench" / "qwen3-4b-config.json"
"""Qwen/Qwen3-4B's own."""
QWEN = read_config(FILE)
H100, L40S, L4, SMALL = GPUS["h100-80gb"], GPUS["l40s-48gb"], GPUS["l4-24gb"], Gpu("small", 32 * 10**9)
LOGGER = logging.getLogger("test.memory")
GRID = """\
1e9 bytes of 84.9 on h100-80gb, precision fp32; ! does not fit
max_length    batch 1   batch 2   batch 4
      1024      70.9      70.9      72.2
      2048      70.9      72.2      74.8
      4096      72.1      74.9      80.3
      8192      74.7      80.5      91.5!
"""


def total(**training: Any) -> float:
    return plan(QWEN, ModelSection(), TrainingSection(**training), H100).total / 1e9


def test_qwen3_4b_has_as_many_parameters_as_its_weights() -> None:
    arch = architecture(QWEN)
    assert (arch.parameters, arch.embedding) == (4_022_468_096, 388_956_160)
    assert sum(arch.layer_matrices() + arch.layer_vectors()) == 100_930_816


def test_the_grid_is_what_the_command_prints() -> None:
    command = [sys.executable, "-m", "finetuning.memory", str(FILE), "--grid", "--gpu", "h100-80gb"]
    result = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True)
    assert (result.returncode, result.stdout, result.stderr) == (0, GRID, "")
    assert GRID in (PROJECT / "docs" / "performance.md").read_text()


def test_the_core_needs_the_standard_library_only() -> None:
    """A benchmark on a GPU machine uses it, where there may be nothing but torch and transformers."""
    code = """
import sys
from pathlib import Path
from types import SimpleNamespace
from finetuning.memory import gpus, plan
from finetuning.memory.architecture import read_config
section = SimpleNamespace(
    per_device_train_batch_size=1, gradient_accumulation_steps=8, max_length=2048, num_processes=1, packing=False,
    padding_free=False, bf16=True, activation_checkpointing="auto", activation_checkpointing_kwargs={},
    weight_dtype="float32", optimizer=("adamw_torch_fused", None))
config, model = read_config(Path(sys.argv[1])), SimpleNamespace(attn_implementation="sdpa")
what = config, model, section, gpus.GPUS["h100-80gb"]
print(plan.plan(*what).total, gpus.visible_gpu(), plan.settled_checkpointing(*what))
"""
    isolated = [sys.executable, "-S", "-c", code, str(FILE)]  # -S: without what is installed
    result = subprocess.run(isolated, cwd=PROJECT, capture_output=True, text=True)
    assert result.stdout == f"{plan(QWEN, ModelSection(), TrainingSection(), H100).total} None True\n", result.stderr


def test_what_changes_the_plan() -> None:
    assert total(precision="bf16_stochastic_rounding") < total(precision="bf16") < total(optim="adamw_torch_8bit")
    assert total(optim="adamw_torch_8bit") < total() < total(optim="adamw_torch")
    assert total() < total(activation_checkpointing=False)
    assert total(activation_checkpointing=False) < total(activation_checkpointing=False, packing=True)
    cached = plan(QWEN, ModelSection(), TrainingSection(max_length=8192), H100, autocast_cache=True)
    assert cached.peak / 1e9 > total(max_length=8192) - 1
    longer = TrainingSection(max_length=4096, activation_checkpointing=False)
    attentions = ("flash_attention_2", "sdpa", "eager")
    totals = [plan(QWEN, ModelSection(attn_implementation=one), longer, H100).total for one in attentions]
    assert totals[0] == totals[1] < totals[2]
    assert total(optim="adamw_bnb_8bit") < total()
    four = {"max_length": 4096, "per_device_train_batch_size": 4}
    assert total(**four) < total(**four, padding_free=True) == total(**four, packing=True), "one mask of 4 x 4096"


def test_sharding_over_several() -> None:
    one, four, eight = (TrainingSection(num_processes=number) for number in (1, 4, 8))
    held = [plan(QWEN, ModelSection(), training, H100).components for training in (one, four, eight)]
    assert held[0]["weights"] == 4 * held[1]["weights"] == 8 * held[2]["weights"]
    assert "unreduced gradients" not in held[0]
    assert held[1]["unreduced gradients"] == held[2]["unreduced gradients"] == 2 * 4_022_468_096
    bf16 = TrainingSection(num_processes=4, precision="bf16")
    assert plan(QWEN, ModelSection(), bf16, H100).components["weights"] * 2 == held[1]["weights"]
    whole = TrainingSection(num_processes=4, gradient_accumulation_steps=1)
    assert "unreduced gradients" not in plan(QWEN, ModelSection(), whole, H100).components


TOO_LARGE = {
    "a smaller micro-batch": (H100, {"max_length": 8192, "per_device_train_batch_size": 4}, "training.per_device_tr"),
    "checkpointing": (H100, {"activation_checkpointing": False, "per_device_train_batch_size": 2}, "training.act"),
    "8 bits": (H100, {"max_length": 32768}, "training.optim=adamw_torch_8bit"),
    "precision": (SMALL, {}, "training.precision=bf16_stochastic_rounding (29.2 GB; training.learning_rate does not"),
    "precision, for bf16": (SMALL, {"precision": "bf16"}, "training.precision=bf16_stoch"),
    "another optimizer": (
        SMALL,
        {"optim": "adamw_torch"},
        "training.precision=bf16_stochastic_rounding, training.optim=null (29",
    ),
    "shorter": (SMALL, {"precision": "bf16_stochastic_rounding", "max_length": 40960}, "training.max_length=1"),
    "more processes": (L4, {}, "training.gradient_accumulation_steps=1, training.num_processes=8"),
    "a larger GPU": (L4, {"gradient_accumulation_steps": 1}, "on a larger GPU=h100-80gb"),
}


@pytest.mark.parametrize("name", TOO_LARGE)
def test_every_proposal_fits_with_the_same_effective_batch(name: str) -> None:
    gpu, options, nearest = TOO_LARGE[name]
    training = TrainingSection(**options)
    found = list(proposals(QWEN, ModelSection(), training, gpu))
    assert str(found[0]).startswith(nearest)
    for proposal in found:
        dotted = {key.removeprefix("training."): value for key, value in proposal.changes.items() if key != LARGER_GPU}
        changed = TrainingSection.model_validate(training.model_dump() | dotted)
        assert changed == proposal.training
        assert Config(training=changed)
        on = GPUS.get(proposal.changes.get(LARGER_GPU), gpu)
        assert plan(QWEN, ModelSection(), changed, on).fits
        assert effective_batch(changed) == effective_batch(training)
    with pytest.raises(Failure) as refused:
        check_memory(QWEN, ModelSection(), training, gpu)
    assert refused.value.kind == "out_of_memory"
    assert str(refused.value).endswith(f"by the memory plan. Would fit: {found[0]}.")


def effective_batch(training: TrainingSection) -> int:
    return training.per_device_train_batch_size * training.gradient_accumulation_steps * training.num_processes


def test_the_refusal_names_setting_need_and_remedy() -> None:
    training = TrainingSection(max_length=8192, per_device_train_batch_size=4)
    with pytest.raises(Failure) as refused:
        check_memory(QWEN, ModelSection(), training, H100)
    assert str(refused.value) == (
        "training.per_device_train_batch_size=4 with training.max_length=8192 and training.precision=fp32 needs "
        "91.5 GB of the 84.9 GB of h100-80gb, by the memory plan. Would fit: training.per_device_train_batch_size=2, "
        "training.gradient_accumulation_steps=16 (80.5 GB)."
    )
    huge = QWEN | {"num_hidden_layers": 2000}
    assert not list(proposals(huge, ModelSection(), TrainingSection(), H100))
    with pytest.raises(Failure, match=r"no offload\): take a smaller model"):
        check_memory(huge, ModelSection(), TrainingSection(), H100)


@pytest.mark.parametrize(
    ("gpu", "max_length", "settled"), [(H100, 1024, False), (H100, 4096, True), (L4, 1024, True), (L40S, 8, True)]
)
def test_checkpointing_is_settled_by_what_fits(gpu: Gpu, max_length: int, settled: bool) -> None:
    training = TrainingSection(activation_checkpointing="auto", max_length=max_length)
    without = plan(QWEN, ModelSection(), training.model_copy(update={"activation_checkpointing": False}), gpu)
    assert settled_checkpointing(QWEN, ModelSection(), training, gpu) == (not without.fits) == settled
    assert plan(QWEN, ModelSection(), training, gpu).checkpointing == settled
    for given in (True, False):
        set_so = training.model_copy(update={"activation_checkpointing": given})
        assert settled_checkpointing(QWEN, ModelSection(), set_so, gpu) is given


STRANGE = {
    "another model": ({"model_type": "mixtral"}, {}, "model_type='mixtral' is not understood, only llama"),
    "no model": ({"model_type": None}, {}, "model_type=None"),
    "quantized": ({"quantization_config": {"bits": 4}}, {}, "quantization_config"),
    "no size": ({"hidden_size": "2560"}, {}, "hidden_size='2560' is not a positive number"),
    "a missing size": ({"vocab_size": None}, {}, "vocab_size=None"),
    "another optimizer": ({}, {"optim": "adafactor"}, "training.optim='adafactor'"),
    "its arguments": ({}, {"optim": "adamw_torch_8bit", "optim_args": "block_size=x"}, "block_size is not a number"),
    "checkpointing": ({}, {"activation_checkpointing_kwargs": {"context_fn": 1}}, "context_fn not understood"),
}


@pytest.mark.parametrize("name", STRANGE)
def test_nothing_is_guessed(name: str) -> None:
    model, training, message = STRANGE[name]
    with pytest.raises(NotUnderstood, match=message.replace("(", r"\(")):
        plan(QWEN | model, ModelSection(), TrainingSection(**training), H100)


def test_the_command_says_by_its_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(FILE.read_text())
    assert main([str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("4,022,468,096 parameters, with activation checkpointing; peak: end of the backward pass\n")
    assert "    70.89  total\n    84.93  h100-80gb\n" in out
    assert "precision fp32: no update is lost; 16.0 bytes a parameter, 70.9 GB in all\n" in out
    assert "precision bf16 instead: updates below half of the last digit are lost; 8.0 bytes a parameter" in out
    assert err == ""
    assert main([str(FILE), "--gpu", "l4-24gb"]) == 1
    assert capsys.readouterr().err.splitlines()[0::2] == ["does not fit", "fits: on a larger GPU=h100-80gb (70.9 GB)"]
    assert main([str(FILE), "--gpu", "l4-24gb", "--grid"]) == 1
    assert "1024      70.9!" in capsys.readouterr().out


WRONG = {
    "a GPU": ([str(FILE), "--gpu", "h100-80g"], "not known. Did you mean h100-80gb?"),
    "a value": ([str(FILE), "--training.max_length", "1"], "training.max_length='1'"),
    "an option": ([str(FILE), "--training.max_len", "9"], "--training.max_len"),
    "no path": ([], "required: PATH"),
    "no file": (["/not/there"], "no readable config.json"),
    "no object": (["LIST"], "holds no JSON object"),
    "an architecture": (["OTHER"], "model_type='gpt2' is not understood"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_usage_is_exit_code_2(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, message = WRONG[name]
    for placeholder, content in (("LIST", []), ("OTHER", {"model_type": "gpt2"})):
        (tmp_path / placeholder).write_text(json.dumps(content))
    known = {placeholder: str(tmp_path / placeholder) for placeholder in ("LIST", "OTHER")}
    assert main([known.get(argument, argument) for argument in arguments]) == 2
    assert message in capsys.readouterr().err


class Driver:
    """As much of NVIDIA's as is asked, for GPUs of these sizes; the driver keeps 1e9 bytes of each."""

    NVMLError, nvmlMemory_v2 = RuntimeError, 2

    def __init__(self, sizes: list[int]):
        self.sizes = sizes
        self.nvmlInit = self.nvmlShutdown = lambda: None
        self.nvmlDeviceGetCount = lambda: len(self.sizes)
        self.nvmlDeviceGetHandleByIndex = self.nvmlDeviceGetHandleByUUID = lambda handle: handle
        self.nvmlDeviceGetUUID = lambda handle: f"GPU-{handle}abc"
        self.nvmlDeviceGetName = lambda handle: f"NVIDIA {handle}"

    def nvmlDeviceGetMemoryInfo(self, handle: Any, version: int) -> Any:
        if handle == "MIG-none":
            raise RuntimeError("not found")
        return type("Memory", (), {"total": self.sizes[handle], "reserved": 10**9, "version": version})


@pytest.mark.parametrize(
    ("visible", "seen"),
    [(None, 1), ("0", 0), ("2, 0", 0), ("GPU-2", 2), ("2,7,1", 2), ("", None), ("-1", None), ("MIG-none", None)],
)
def test_the_smallest_gpu_that_is_visible(
    visible: str | None, seen: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = [80 * 10**9, 24 * 10**9, 141 * 10**9]
    monkeypatch.setitem(sys.modules, "pynvml", Driver(sizes))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert visible_gpu() == (None if seen is None else Gpu(f"NVIDIA {seen}", sizes[seen] - 10**9))


def test_a_machine_without_a_gpu_or_its_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", Driver([]))
    assert visible_gpu() is None
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert visible_gpu() is None


def test_the_flows_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Before the training: the plan is logged, and what cannot fit is refused; without a GPU nothing is said."""
    caplog.set_level(logging.INFO)
    (tmp_path / "config.json").write_text(FILE.read_text())
    monkeypatch.setattr("finetuning.limits.visible_gpu", lambda: None)
    check_gpu(Config(), tmp_path, LOGGER)
    assert not caplog.messages
    monkeypatch.setattr("finetuning.limits.visible_gpu", lambda: Gpu("NVIDIA L4", 22 * 2**30))
    with pytest.raises(Failure, match=r"needs 70.9 GB of the 23.6 GB of NVIDIA L4, by the memory plan. Would fit: "):
        check_gpu(Config(), tmp_path, LOGGER)
    assert "    70.89  total" in caplog.messages
    assert "precision fp32: no update is lost; 16.0 bytes a parameter, 70.9 GB in all" in caplog.messages
    monkeypatch.setattr("finetuning.limits.visible_gpu", lambda: Gpu("a tight one", 69 * 10**9))
    check_gpu(Config(), tmp_path, LOGGER)
    assert caplog.messages[-1].startswith("this may be more than a tight one has: the peak fits")
    monkeypatch.setattr("finetuning.limits.visible_gpu", lambda: H100)
    check_gpu(Config(), tmp_path, LOGGER)
    caplog.clear()
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    check_gpu(Config(), tmp_path, LOGGER)
    assert [message.partition(", only")[0] for message in caplog.messages] == [
        "no memory plan: config.json: model_type='gpt2' is not understood"
    ]


@pytest.mark.parametrize(
    ("precision", "optim", "each"),
    [
        ("fp32", None, 12),
        ("bf16", None, 6),
        ("bf16_stochastic_rounding", None, 4.03125),
        ("fp32", "adamw_8bit", 6.03125),
    ],
)
def test_bytes_on_disk(precision: str, optim: str | None, each: float) -> None:
    training = TrainingSection(precision=precision, optim=optim, save_total_limit=1)
    assert disk_bytes(Config(training=training), 1024) == 1024 * (2 * each + 4)
