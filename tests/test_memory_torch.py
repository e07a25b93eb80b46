"""The memory plan against torch's own bytes: tensors, what autograd saves, and the profiler's peak."""

from typing import Any

import pytest

from config.sections import ModelSection, TrainingSection
from finetuning.memory import activations, moments
from finetuning.memory.architecture import architecture
from finetuning.memory.gpus import GPUS
from finetuning.memory.plan import plan
from finetuning.memory.states import optimizer_bytes, widths

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
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=training.activation_checkpointing_kwargs)
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
    one_plus_weight = 4 * arch.hidden * arch.family.fp32_norm  # Gemma's norms keep it; too small for the plan
    assert of_layer == step.kept_of_layer + (0 if checkpointing else step.copies + 2 * one_plus_weight)
    outside = length * batch * activations.outer_activations(arch, width, batch) + one_plus_weight
    # Held, but not by autograd: a mask; and with checkpointing what a layer gets beside its input.
    beside = length * 2 * arch.head_dim * width.weight if checkpointing else 0
    assert found[1] - of_layer == outside - beside
