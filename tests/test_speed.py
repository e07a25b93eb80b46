"""Where the time goes, and how much arithmetic a token takes."""

from types import SimpleNamespace

import pytest
from datasets import Dataset

from finetuning import speed
from finetuning.speed import Speed, flops_a_token, num_tokens, seen_length


def test_every_second_has_its_phase(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    clock, state = iter(range(100)), SimpleNamespace(global_step=0, num_input_tokens_seen=0)
    monkeypatch.setattr(speed.time, "monotonic", lambda: next(clock))
    args, watch = SimpleNamespace(output_dir=str(tmp_path)), Speed(1.0)
    watch.on_train_begin(args, state, None)
    for state.global_step in (1, 2):
        watch.on_step_begin(args, state, None)
        watch.on_pre_optimizer_step(args, state, None)
        watch.on_step_end(args, state, None)
        watch.on_log(args, state, None, logs={"loss": 1.0})
    watch.on_log(args, state, None, logs={"eval_loss": 1.0})
    watch.on_evaluate(args, state, None)
    watch.on_save(args, state, None)
    assert dict(watch.seconds) == {
        "data": 2, "forward_backward": 2, "optimizer": 2, "logging": 2, "evaluation": 1, "checkpoint": 1,
    }  # fmt: skip
    assert watch.summary()["time_shares"]["optimizer"] == 0.2


def test_rates_leave_evaluation_and_checkpoints_out(monkeypatch: pytest.MonkeyPatch) -> None:
    watch, state = Speed(flops_a_token=3.0), SimpleNamespace(global_step=2, num_input_tokens_seen=60)
    watch.positions = 100
    watch.seconds.update({"data": 1, "forward_backward": 8, "optimizer": 1, "evaluation": 90})
    monkeypatch.setattr(speed, "peak_flops", lambda: 36.0)
    rates = watch.interval(state)
    assert rates.pop("peak_memory_gib") > 0
    assert rates == {"step_seconds": 5.0, "tokens_per_second": 6.0, "padded_tokens_per_second": 10.0, "mfu": 0.5}
    assert watch.interval(state) == {}, "no step since"


def test_a_gpu_is_known_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(speed.processes, "num_gpus", lambda: 2)
    for name, peak in (("NVIDIA H100 80GB HBM3", 989e12), ("NVIDIA H100 PCIe", 756e12), ("NVIDIA L4", 121e12)):
        monkeypatch.setattr(speed.torch.cuda, "get_device_name", lambda name=name: name)
        assert speed.peak_flops() == 2 * peak
    monkeypatch.setattr(speed.torch.cuda, "get_device_name", lambda: "NVIDIA L40")
    assert speed.peak_flops() is None


def test_arithmetic_of_a_token_is_what_torch_counts() -> None:
    """Its counter takes every position of the square for attention; ours takes half of it, as the rest is masked."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=512, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, tie_word_embeddings=False, attn_implementation="eager",
    )  # fmt: skip
    model, length = Qwen3ForCausalLM(config), 128
    dataset = Dataset.from_dict({"input_ids": [list(range(length))]})
    with FlopCounterMode(display=False) as counter:
        ids = torch.tensor(dataset[0]["input_ids"])[None]
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    attention = 6 * 3 * 4 * 32 * length
    expected = flops_a_token(config, model.num_parameters(), dataset) + attention
    assert counter.get_total_flops() / length == pytest.approx(expected, rel=0.03)


def test_tokens_see_their_own_conversation() -> None:
    alone = Dataset.from_dict({"input_ids": [[1] * 10, [1] * 30]})
    packed = Dataset.from_dict({"input_ids": [[1] * 40], "seq_lengths": [[10, 30]]})
    assert num_tokens(alone) == num_tokens(packed) == 40
    assert seen_length(alone) == seen_length(packed) == (100 + 900) / 40
