"""What the dtype of the weights does to their updates."""

from types import SimpleNamespace

import pytest
import torch
from pydantic import ValidationError

from config.sections import Config
from finetuning import precision
from finetuning.precision import Moved, describe, lost_share


def model_of(*values: float, dtype: torch.dtype = torch.bfloat16) -> torch.nn.Module:
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(torch.tensor(values, dtype=dtype))
    return model


def test_an_update_below_half_of_the_last_digit_is_lost() -> None:
    """Neighbours of 1.0 are 2**-7 above and 2**-8 below it, those of 1/64 are 64 times nearer."""
    model = model_of(1.0, 1.0, 1.0, 1 / 64)
    assert lost_share(model, 2**-10) == 0.75
    assert lost_share(model, 2**-7) == 0
    assert lost_share(model, 2**-17) == 1
    assert lost_share(model_of(1.0, dtype=torch.float32), 2**-17) == 0


def test_a_tensor_counts_by_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "SAMPLED", 2)
    model = model_of(*[1.0] * 30)
    model.small = torch.nn.Parameter(torch.tensor([1e-4] * 10, dtype=torch.bfloat16))
    assert lost_share(model, 2**-12) == 0.75


def test_plain_bf16_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        describe(model_of(1.0, 1.0, 1.0, 1e-4), "bf16", "adamw_torch_fused", 2e-5)
        describe(model_of(1.0, dtype=torch.float32), "fp32", "adamw_torch_fused", 2e-5)
    told, warned, fp32 = caplog.messages
    assert told == "training.precision=bf16: weights in bfloat16, optimizer adamw_torch_fused"
    assert "at training.learning_rate=2e-05 an update is lost in 75 % of the weights" in warned
    assert fp32 == "training.precision=fp32: weights in float32, optimizer adamw_torch_fused"


def test_which_weights_have_moved(caplog: pytest.LogCaptureFixture) -> None:
    model, moved = model_of(1.0, 1.0, 1.0, 1e-4), Moved()
    caplog.set_level("INFO")
    state = SimpleNamespace(global_step=0, max_steps=3)
    moved.on_train_begin(SimpleNamespace(get_warmup_steps=lambda steps: 1), state, None, model=model)
    for state.global_step in (1, 2, 3):
        with torch.no_grad():
            model.weight -= 2e-5
        moved.on_step_end(None, state, None, model=model)
    assert moved.take() == {"moved_weights": 0.25}
    assert moved.take() == {}
    assert caplog.messages == [
        "25.0 % of the weights have moved in 3 steps (training.precision, training.learning_rate)"
    ]


def test_a_resumed_training_does_not_say_again_what_moved() -> None:
    model, moved, state = model_of(1.0), Moved(), SimpleNamespace(global_step=20, max_steps=30)
    moved.on_train_begin(None, state, None, model=model)
    moved.on_step_end(None, state, None, model=model)
    assert moved.take() == {}


@pytest.mark.parametrize(
    ("training", "optimizer", "dtype"),
    [
        ({}, ("adamw_torch_fused", None), "float32"),
        ({"precision": "bf16", "optim": "adafactor"}, ("adafactor", None), "bfloat16"),
        (
            {"precision": "bf16_stochastic_rounding", "optim_args": "eps=1e-7"},
            ("adamw_torch_8bit", "eps=1e-7,bf16_stochastic_round=True"),
            "bfloat16",
        ),
    ],
)
def test_the_precision_has_its_optimizer(training: dict, optimizer: tuple, dtype: str) -> None:
    section = Config.model_validate({"training": training}).training
    assert (section.optimizer, section.weight_dtype) == (optimizer, dtype)


ROUNDING = {"precision": "bf16_stochastic_rounding"}


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"training": {**ROUNDING, "num_processes": 2}}, "could not go on from a checkpoint"),
        ({"training": {"optim": "adamw_torch_8bit", "num_processes": 2}}, "could not go on from a checkpoint"),
        ({"training": {**ROUNDING, "optim_args": "block_size=128"}}, "block_size fails at the first optimizer step"),
        (
            {"model": {"attn_implementation": "flash_attention_2"}, "training": {"bf16": False}},
            "'flash_attention_2' has no fp32",
        ),
    ],
)
def test_what_cannot_work_together_is_refused(values: dict, said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        Config.model_validate(values)


def test_an_optimizer_that_cannot_round_is_refused() -> None:
    with pytest.raises(ValidationError, match=r"needs training\.optim='adamw_torch_8bit' and has 'adamw_torch_fused'"):
        Config.model_validate({"training": {"precision": "bf16_stochastic_rounding", "optim": "adamw_torch_fused"}})
