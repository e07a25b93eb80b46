"""Make the embedded example anew: `python -m samples.make [DIRECTORY]`, about two minutes on a CPU.

`chat/train.jsonl` and `chat/test.jsonl` are conversations with questions. `model/` is a tiny Qwen3 that has read talk
about orders, in which nobody ever asked a question: it knows the words and the turns, and answers none of them. Data
and tokenizer come out byte for byte the same everywhere; the weights do on the same kind of processor.
"""

import json
import math
import random
import sys
from functools import partial
from pathlib import Path
from typing import Any

from samples.conversations import Conversation, chatter, make, questions

NUM_TRAIN, NUM_TEST, NUM_CHATTER = 1600, 128, 6000
VOCABULARY_SIZE = 640
"""Byte alphabet, the example's words, Qwen3's special tokens."""
STEPS, BATCH_SIZE, LEARNING_RATE = 1000, 32, 3e-3
USER_WEIGHT = 0.2
"""Weight of the loss on user turns: what they say is chance, and mostly noise to learn."""

SPECIAL = (
    "<|endoftext|> <|im_start|> <|im_end|> <|object_ref_start|> <|object_ref_end|> <|box_start|> <|box_end|> "
    "<|quad_start|> <|quad_end|> <|vision_start|> <|vision_end|> <|vision_pad|> <|image_pad|> <|video_pad|>"
).split()
ADDED = (
    "<tool_call> </tool_call> <|fim_prefix|> <|fim_middle|> <|fim_suffix|> <|fim_pad|> <|repo_name|> <|file_sep|> "
    "<tool_response> </tool_response> <think> </think>"
).split()


def main(output: Path) -> None:
    train, test, talk = conversations()
    write_rows(output / "chat" / "train.jsonl", train)
    write_rows(output / "chat" / "test.jsonl", test)
    tokenizer = make_tokenizer(train + talk)
    model = pretrain(make_model(tokenizer), tokenizer, talk)
    save(model, tokenizer, output / "model")


def conversations() -> tuple[list[Conversation], list[Conversation], list[Conversation]]:
    """Training rows, held-out rows and what the base model has read; no order occurs twice among them."""
    taken: set[str] = set()
    test = make(random.Random(1), NUM_TEST, questions, taken)
    train = make(random.Random(2), NUM_TRAIN, questions, taken)
    return train, test, make(random.Random(3), NUM_CHATTER, chatter, taken)


def write_rows(path: Path, rows: list[Conversation]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_tokenizer(rows: list[Conversation]) -> Any:
    """A byte-level BPE of the example's text, with Qwen3's special tokens and chat template (without reasoning)."""
    import trl
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE - len(SPECIAL) - len(ADDED),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    texts = [message["content"] for row in rows for message in row["messages"]]
    bpe.train_from_iterator([*texts, *["user\n", "assistant\n", "system\n"] * 100], trainer)
    bpe.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    bpe.add_tokens([AddedToken(token, special=False, normalized=False) for token in ADDED])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|endoftext|>", model_max_length=2048
    )
    template = Path(trl.__file__).parent / "chat_templates" / "qwen3_instruct_2507.jinja"
    tokenizer.chat_template = template.read_text()
    return tokenizer


def make_model(tokenizer: Any) -> Any:
    """Qwen3's architecture, small, with tied embeddings as in Qwen3-4B."""
    import torch
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        initializer_range=0.05,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(
        eos_token_id=[tokenizer.eos_token_id, tokenizer.pad_token_id], pad_token_id=tokenizer.pad_token_id
    )
    return model


def pretrain(model: Any, tokenizer: Any, rows: list[Conversation]) -> Any:
    """Next-token training on the talk; one thread, so that the sums come out the same each time."""
    import torch
    from torch.nn.functional import cross_entropy

    torch.set_num_threads(1)
    encoded = [encode(tokenizer, row) for row in rows]
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, partial(_warmup_and_cosine, steps=STEPS))
    chance = random.Random(0)
    for step in range(STEPS):
        tokens, weights = batch(chance.sample(encoded, BATCH_SIZE), tokenizer.pad_token_id)
        logits = model(input_ids=tokens, attention_mask=(weights > 0).long()).logits[:, :-1]
        losses = cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none")
        loss = (losses * weights[:, 1:]).sum() / weights[:, 1:].sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        if (step + 1) % 100 == 0:
            print(f"step {step + 1} of {STEPS}  loss {loss.item():.3f}", flush=True)
    return model


def encode(tokenizer: Any, row: Conversation) -> tuple[list[int], list[float]]:
    """Token ids, and the weight of each in the loss."""
    ids = tokenizer.apply_chat_template(row["messages"], return_dict=True)["input_ids"]
    opening = tokenizer.encode("<|im_start|>assistant\n")
    weights, inside = [], False
    for position, token in enumerate(ids):
        weights.append(1.0 if inside else USER_WEIGHT)
        inside = (inside and token != tokenizer.eos_token_id) or ids[: position + 1][-len(opening) :] == opening
    return ids, weights


def batch(rows: list[tuple[list[int], list[float]]], pad: int) -> tuple[Any, Any]:
    """Token ids and loss weights, both of shape (rows, longest row); padding weighs nothing."""
    import torch

    length = max(len(ids) for ids, _ in rows)
    tokens = [ids + [pad] * (length - len(ids)) for ids, _ in rows]
    weights = [weights + [0.0] * (length - len(weights)) for _, weights in rows]
    return torch.tensor(tokens), torch.tensor(weights)


def _warmup_and_cosine(step: int, steps: int) -> float:
    return min(1.0, (step + 1) / 50) * (0.05 + 0.475 * (1 + math.cos(math.pi * step / steps)))


def save(model: Any, tokenizer: Any, directory: Path) -> None:
    import torch

    model.to(torch.bfloat16).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    for file in directory.iterdir():
        file.chmod(0o644)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if sys.argv[1:] else Path(__file__).parent)
