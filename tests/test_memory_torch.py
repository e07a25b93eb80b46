"""The memory plan against torch's own bytes: tensors, what autograd saves, and the profiler's peak."""

from typing import Any

import pytest

from config.sections import ModelSection, TrainingSection
from finetuning.memory import activations, moments
from finetuning.memory.architecture import architecture
from finetuning.memory.gpus import GPUS
from finetuning.memory.plan import plan
from finetuning.memory.states import widths

GPU = GPUS["h100-80gb"]
SMALL: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
WIDER = {"head_dim": 16}
"""Heads that are wider together than the hidden state, as Qwen3-4B's are."""
MODELS = {
    "qwen3": ("qwen3", WIDER | {"tie_word_embeddings": True}),
    "qwen3, odd sizes": ("qwen3", {"head_dim": 10, "intermediate_size": 90, "vocab_size": 515}),
    "qwen3, biases": ("qwen3", WIDER | {"attention_bias": True}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "llama": ("llama", WIDER),
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "mistral": ("mistral", WIDER | {"sliding_window": 128}),
    "gemma": ("gemma", WIDER),
}
PRECISIONS = {
    "fp32": {"precision": "fp32", "bf16": False},
    "fp32 with autocast": {"precision": "fp32"},
    "bf16": {"precision": "bf16", "bf16": False},
    "bf16 with autocast": {"precision": "bf16"},
}


def build(kind: str, values: dict[str, Any], training: TrainingSection, attention: str = "sdpa") -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **values)
    dtype = getattr(torch, training.weight_dtype)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention).train()
    if training.activation_checkpointing:
        model.activation_checkpointing_enable(training.activation_checkpointing_kwargs)
    return model


def size(tensor: Any) -> int:
    """Bytes of its storage; of a torchao state, of the tensors that it is made of."""
    if hasattr(tensor, "tensor_attrs"):
        return sum(size(getattr(tensor, name)) for name in tensor.tensor_attrs)
    return tensor.untyped_storage().nbytes()


def stepped(model: Any, optim: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The optimizer after its first step, in which it makes its state. torchao would compile a program for every shape
    of parameter; the state is made before it runs, so it need not."""
    import torch
    from torchao.optim import AdamW8bit

    monkeypatch.setattr(torch, "compile", lambda function, **options: lambda *arguments: None)
    if optim == "adamw_torch_8bit":
        optimizer = AdamW8bit(model.parameters(), bf16_stochastic_round=True)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), fused=optim == "adamw_torch_fused")
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    return optimizer


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused", "adamw_torch_8bit"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", MODELS)
def test_states_are_torchs(name: str, precision: str, optim: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, different = MODELS[name]
    values = SMALL | different
    training = TrainingSection(precision=precision, optim=optim)
    model = build(kind, values, training)
    optimizer = stepped(model, optim, monkeypatch)
    components = plan(model.config.to_dict(), ModelSection(), training, GPU).components
    assert components["weights"] == sum(size(parameter) for parameter in model.parameters())
    assert components["gradients"] == sum(size(parameter.grad) for parameter in model.parameters())
    state = sum(size(tensor) for states in optimizer.state.values() for tensor in states.values())
    assert components["optimizer state"] == state
    # A config.json says what differs from the defaults of its class; the plan knows those.
    assert architecture(values | {"model_type": kind}) == architecture(model.config.to_dict())


def saved(model: Any, batch: int, length: int, training: TrainingSection, shape: str) -> int:
    """Bytes that autograd keeps of a forward pass of the layers, the model's parameters left out."""
    import torch

    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    storages: dict[int, Any] = {}

    def pack(tensor: Any) -> Any:
        if tensor.untyped_storage().data_ptr() not in parameters:
            storages[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    inputs: dict[str, Any] = {"input_ids": torch.randint(0, 512, (batch, length))}
    if shape == "padded":
        inputs["attention_mask"] = torch.ones(batch, length, dtype=torch.long)
        inputs["attention_mask"][0, length // 2 :] = 0
    if shape == "packed":
        inputs["position_ids"] = torch.arange(length).remainder(length // 2).expand(batch, length).contiguous()
    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with hooks, torch.autocast("cpu", dtype=torch.bfloat16, enabled=training.bf16, cache_enabled=False):
        model.model(**inputs, use_cache=False)
    return sum(size(tensor) for tensor in storages.values())


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("shape", ["whole", "padded", "packed"])
@pytest.mark.parametrize("kind", ["qwen3", "qwen2", "llama", "gemma"])
def test_saved_activations_are_autograds(
    kind: str, shape: str, attention: str, precision: str, checkpointing: bool
) -> None:
    """Of a layer: what three have more than one. Equal to the byte."""
    length, batch = 64, 2 if shape == "padded" else 1
    training = TrainingSection(
        **PRECISIONS[precision],
        activation_checkpointing=checkpointing,
        packing=shape == "packed",
        per_device_train_batch_size=batch,
        max_length=length,
    )
    found = {}
    for layers in (1, 3):
        model = build(kind, SMALL | {"num_hidden_layers": layers}, training, attention)
        found[layers] = saved(model, batch, length, training, shape)
    arch, width = architecture(model.config.to_dict()), widths(training)
    masked = activations.is_masked(arch, training, attention)
    step = moments.Step(arch, width, attention, masked, batch, length, checkpointing, False, 0)
    of_layer = (found[3] - found[1]) // 2
    is_gemma = arch.family.fp32_norm  # its norms keep 1 + weight, its embedding a scale: too small for the plan
    one_plus_weight, scale = 4 * arch.hidden * is_gemma, width.weight * is_gemma
    assert of_layer == step.kept_of_layer + (0 if checkpointing else step.copies + 2 * one_plus_weight)
    outside = length * batch * activations.outer_activations(arch, width, batch) + one_plus_weight + scale
    # Held, but not by autograd: a mask; and with checkpointing what a layer gets beside its input.
    beside = length * 2 * arch.head_dim * width.weight if checkpointing else 0
    assert found[1] - of_layer == outside - beside


BIG = SMALL | {
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "head_dim": 32,
}
COLUMNS = 512
"""Of a tile of logits; TRL's 32768 would hide the rest."""
MICRO_BATCHES: dict[str, tuple[int, dict[str, Any]]] = {
    "one long sequence": (1024, {"max_length": 512}),
    "two": (1024, {"max_length": 256, "per_device_train_batch_size": 2}),
    "without checkpointing": (1024, {"max_length": 256, "activation_checkpointing": False}),
    "many words": (32768, {"max_length": 64}),
}


def peak_of_micro_batch(model: Any, training: TrainingSection, cache: bool) -> int:
    """Bytes at the peak of a micro-batch that is not the step's first, optimizer state and all."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    batch, length = training.per_device_train_batch_size, training.max_length

    def micro_batch() -> None:
        ids = torch.randint(0, model.config.vocab_size, (batch, length))
        mask = torch.ones_like(ids)
        if batch > 1:
            mask[0, -4:] = 0
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=training.bf16, cache_enabled=cache):
            labels = {"labels": ids, "num_items_in_batch": 100}
            loss = model(input_ids=ids, attention_mask=mask, **labels, fused_lm_head=True).loss
        loss.backward()

    micro_batch()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    optimizer.step()
    states = [(one, one.grad, *optimizer.state[one].values()) for one in model.parameters()]
    held = sum(size(tensor) for tensors in states for tensor in tensors)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        micro_batch()
    now = peak = 0
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return held + peak


@pytest.mark.parametrize(
    ("precision", "cache"),
    [("fp32", False), ("fp32 with autocast", False), ("fp32 with autocast", True), ("bf16 with autocast", False)],
)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", MICRO_BATCHES)
@pytest.mark.parametrize(("kind", "tied"), [("qwen3", True), ("llama", False)])
def test_the_peak_is_the_profilers(
    kind: str, tied: bool, name: str, attention: str, precision: str, cache: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of TRL's head only the buffers count here: a GPU's kernels work in them, those of the CPU beside them."""
    import trl.kernels.chunked_logprob as head
    import trl.trainer.utils

    for kernel in ("_forward_tile", "_backward_tile", "_addmm_fp32"):
        monkeypatch.setattr(head, kernel, lambda *arguments, **options: None)
    monkeypatch.setattr(trl.trainer.utils, "_CHUNKED_LOGPROB_CHUNK_SIZE", COLUMNS)
    monkeypatch.setattr(moments, "HEAD_COLUMNS", COLUMNS)
    vocabulary, options = MICRO_BATCHES[name]
    training = TrainingSection(**PRECISIONS[precision], **options)
    model = build(kind, BIG | {"tie_word_embeddings": tied, "vocab_size": vocabulary}, training, attention)
    trl.trainer.utils.add_fused_lm_head(model, outputs=("log_probs", "entropy", "is_top1"))
    measured = peak_of_micro_batch(model, training, cache)
    section = ModelSection(attn_implementation=attention)
    planned = plan(model.config.to_dict(), section, training, GPU, autocast_cache=cache)
    assert planned.peak == pytest.approx(measured, rel=0.05)
