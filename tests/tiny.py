"""Models made on the spot, for what the sample model does not show."""

from pathlib import Path
from typing import Any

CORPUS = ["What is the colour of the lamp? It is blue.", "How many chairs are there? There are three of them."]


def without_template(directory: Path) -> Path:
    """A Llama base model as they come before chat training: no template, no pad token, eos ends a document."""
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=_bpe("<|endoftext|>"), eos_token="<|endoftext|>")
    config = LlamaConfig(**_sizes(tokenizer), bos_token_id=None)
    LlamaForCausalLM(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def like_gemma(directory: Path) -> Path:
    """A Gemma with the template of the first two: turns end with a token that is not eos, and that neither its config
    nor a name in its tokenizer gives away. Its embedding has ten rows that no token uses."""
    from transformers import GemmaConfig, GemmaForCausalLM, PreTrainedTokenizerFast
    from trl.chat_template_utils import gemma_chat_template

    bpe = _bpe("<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token="<pad>", eos_token="<eos>", bos_token="<bos>")
    tokenizer.chat_template = gemma_chat_template
    sizes = {**_sizes(tokenizer), "vocab_size": len(tokenizer) + 10}
    config = GemmaConfig(**sizes, head_dim=16, bos_token_id=tokenizer.bos_token_id)
    GemmaForCausalLM(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def _bpe(*special_tokens: str) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=list(special_tokens), initial_alphabet=alphabet)
    bpe.train_from_iterator(CORPUS, trainer)
    return bpe


def _sizes(tokenizer: Any) -> dict[str, Any]:
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
        "eos_token_id": tokenizer.eos_token_id,
    }
