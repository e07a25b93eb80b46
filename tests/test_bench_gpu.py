"""The check for a GPU, on a CPU: that it would run. What it measures there means nothing."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import gpu, gpu_child, gpu_model, gpu_plan, gpu_rows, gpu_table, gpu_training
from bench.isolation import TOLERANCE, isolation
from config.sections import ModelSection, TrainingSection
from finetuning.memory.gpus import GPUS
from finetuning.memory.plan import plan
from tests.conftest import PROJECT

CPU = {"device": "cpu", "gpu": None, "gpu_bytes": None}
ON_CPU = [row for row in gpu_rows.TRAININGS if not row.gpu_only]

ROUNDING = {"precision": "bf16_stochastic_rounding"}
NOTEBOOK = {"precision": "bf16", "optim": "adamw_torch", "max_length": 1024}


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bench.gpu", *arguments]
    return subprocess.run(command, cwd=PROJECT, text=True, capture_output=True, check=False, timeout=300)


def test_a_row_that_fails_costs_only_itself(tmp_path: Path) -> None:
    output = tmp_path / "gpu.json"
    rows = "notebook,packing-2048,isolation-sdpa,out-of-memory"
    done = run("--budget-seconds", "250", "--rows", rows, "--fail", "notebook", "--output", str(output))
    assert done.returncode == 1, done.stdout + done.stderr
    found = json.loads(output.read_text())
    results = {row["name"]: row for row in found["rows"]}
    assert list(results) == list(gpu_rows.ROWS)
    assert {name: row["status"] for name, row in results.items() if row["note"] != "not asked for"} == {
        "notebook": "FAILED",
        "out-of-memory": "skipped",
        "isolation-sdpa": "done",
        "packing-2048": "done",
    }
    assert results["notebook"]["note"] == "RuntimeError: asked to fail"
    assert results["packing-2048"]["tokens_per_second"] > 0
    assert found["facts"]["torch"] == torch.__version__
    table = done.stdout.split("\n\n")[-1]
    assert [line.split()[0] for line in table.splitlines()] == ["row", *gpu_rows.ROWS]
    assert "no GPU" in done.stdout


def test_without_time_every_row_is_skipped() -> None:
    done = run("--budget-seconds", "0")
    assert done.returncode == 0, done.stdout + done.stderr
    outcomes = [line.split(": ")[1] for line in done.stdout.split("\n\n")[-1].splitlines()[1:]]
    assert set(outcomes) <= {"no time left", "needs a GPU"}
    assert len(outcomes) == len(gpu_rows.ROWS)


def test_a_row_is_stopped_when_its_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    assert gpu.child(["recipe"], 0.2)["note"].startswith("stopped after 0 seconds")
    monkeypatch.setattr(gpu, "LEAST_SECONDS", 0)
    options = gpu.argparse.Namespace(rows=["recipe"], fail=None)
    result = gpu.outcome(gpu_rows.ROWS["recipe"], CPU, options, 0.2)
    assert result["status"] == "skipped"
    assert result["note"].startswith("no time left: stopped after")


@pytest.mark.parametrize("row", ON_CPU, ids=lambda row: row.name)
def test_every_training_runs(row: gpu_rows.Row, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **how: function)  # torchao's optimizer: it takes long
    found = gpu_training.train(row)
    assert found["parameters"] == 106_880
    assert found["losses"][1] < found["losses"][0]
    assert bool(found["evaluation_tokens_per_second"]) == row.evaluates


def test_the_plain_head_gives_the_loss_of_trls(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = gpu_rows.ROWS["packing-2048"]
    theirs = gpu_training.train(packed)
    monkeypatch.setitem(sys.modules, "trl.trainer.utils", None)
    ours = gpu_training.train(packed)
    assert (theirs["head"], ours["head"]) == ("TRL's head", "plain head")
    assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-4)


def test_checkpointing_changes_no_loss() -> None:
    with_it, without = (gpu_training.train(gpu_rows.ROWS[name]) for name in ("recipe", "no-checkpointing"))
    assert with_it["losses"] == without["losses"]


def test_the_real_model_is_made_where_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """On `meta`, which shows that nothing of it is made elsewhere first."""
    monkeypatch.setattr(gpu_model, "device", lambda: "meta")
    model = gpu_model.build(gpu_rows.scale("cuda").config, torch.float32, "sdpa")
    assert {tensor.device.type for tensor in (*model.parameters(), *model.buffers())} == {"meta"}
    assert sum(tensor.numel() for tensor in model.parameters()) == 4_022_468_096


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_packed_conversations_do_not_see_each_other(attention: str, dtype: str) -> None:
    model = gpu_model.build(gpu_rows.scale("cpu").config, getattr(torch, dtype), attention)
    found = isolation(model.train())
    assert found.holds(TOLERANCE[dtype]), found
    assert found.control > 0.5


def test_lengths_are_those_of_real_conversations() -> None:
    drawn = gpu_rows.conversations(10**6, 1)
    lengths = [next(drawn) for _ in range(2000)]
    assert sum(length > 1024 for length in lengths) / 2000 == pytest.approx(0.65, abs=0.03)
    lost = [1 - sum(min(length, limit) for length in lengths) / sum(lengths) for limit in (1024, 2048)]
    assert lost == pytest.approx([0.27, 0.03], abs=0.02)


@pytest.mark.parametrize("row", gpu_rows.TRAININGS, ids=lambda row: row.name)
def test_what_is_measured_has_the_length_that_is_planned(row: gpu_rows.Row) -> None:
    """A full sequence in the measured steps, and not the first of its step: there are gradients already, as planned."""
    size = gpu_rows.scale("cuda")
    groups = gpu_rows.sequences(row, (size.warm_up + size.steps) * row.accumulation, 1)
    lengths = [sum(group) for group in groups]
    assert max(lengths) <= row.max_length
    later = [length for number, length in enumerate(lengths) if number % row.accumulation]
    assert max(later[size.warm_up * (row.accumulation - 1) :]) > 0.99 * row.max_length
    assert all(len(group) == 1 for group in groups) or row.packing


def test_a_plan_that_does_not_fit_skips_the_row() -> None:
    options = gpu.argparse.Namespace(rows=list(gpu_rows.ROWS), fail=None)
    facts = {"device": "cuda", "gpu": "NVIDIA H100 80GB HBM3", "gpu_bytes": 85_000_000_000}
    plan = gpu_plan.Planned(88_000_000_000, 92_000_000_000)
    reason = gpu.why_not(gpu_rows.ROWS["no-checkpointing"], plan, facts, options, 400)
    assert reason == "does not fit: planned 92.0 of 85.0"


def test_utilisation_is_of_the_gpu_at_hand() -> None:
    config = gpu_rows.scale("cuda").config
    flops = gpu_rows.model_flops(config, 4_022_468_096, [2048])
    assert flops == 2048 * (6 * 4_022_468_096 + 12 * 36 * 32 * 128 * 1024)
    result: dict[str, Any] = {"head": "", "losses": [1.0], "evaluation_tokens_per_second": None, "plan": ""}
    result |= {"step_seconds": [1.0], "tokens": 2048, "flops": 494.5e12, "peak": 70, "planned": 77}
    found = gpu_table.summary(result, "NVIDIA H200")
    assert found["mfu"] == pytest.approx(0.5)
    assert found["plan_error"] == pytest.approx(0.1)
    assert gpu_table.summary(result, "NVIDIA GeForce 256")["mfu"] is None


def test_an_error_of_the_gpu_is_told_by_its_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """What can be tried of it here: the error itself needs a GPU."""

    class Full(torch.nn.Module):
        def forward(self, input_ids: torch.Tensor) -> None:
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {input_ids.numel()} GiB.")

    monkeypatch.setattr(gpu_child, "ABSURD_BATCH", 1)
    monkeypatch.setattr(gpu_model, "build", lambda *how: Full())
    assert gpu_child.out_of_memory(gpu_rows.ROWS["out-of-memory"]) == {
        "status": "done",
        "note": "OutOfMemoryError is told as out_of_memory",
    }


def test_every_row_has_a_plan() -> None:
    """That of the pipeline, for the settings of the row."""
    for row in ON_CPU:
        found = gpu_plan.planned(row, gpu_rows.scale("cuda"), "NVIDIA H100 80GB HBM3")
        assert (found.peak > 0, found.why) == (True, "")
    found = gpu_plan.planned(gpu_rows.ROWS["notebook"], gpu_rows.scale("cuda"), "NVIDIA H200")
    real = plan(gpu_rows.scale("cuda").config, ModelSection(), TrainingSection(**NOTEBOOK), GPUS["h200-141gb"])
    assert (found.peak, found.total) == (real.peak, real.total)
    unknown = gpu_rows.scale("cuda")._replace(config={"model_type": "gpt2"})
    assert "NotUnderstood" in gpu_plan.planned(gpu_rows.ROWS["notebook"], unknown, None).why


@pytest.mark.parametrize(
    ("name", "changes"), [("recipe", {}), ("stochastic-rounding", ROUNDING), ("notebook", NOTEBOOK)]
)
def test_the_sections_are_those_of_the_recipes(name: str, changes: dict[str, Any]) -> None:
    row, size = gpu_rows.ROWS[name], gpu_rows.scale("cuda")
    ours, real = gpu_plan.training_section(row, size), TrainingSection(**changes)
    compared = set(vars(ours)) - {"optim", "optim_args"}
    assert {key: getattr(ours, key) for key in compared} == {key: getattr(real, key) for key in compared}
    model = gpu_plan.model_section(row)
    assert (model.name, model.attn_implementation) == (ModelSection().name, ModelSection().attn_implementation)
