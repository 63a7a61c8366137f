"""A tiny target that speaks text: bytes as tokens and a chat template, so that a server does all it can."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.tiny_checkpoint import make_tiny_checkpoint
from tests.tiny_models import make_tiny_llama

END = "<end>"
CHAT_TEMPLATE = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"


def make_tiny_chat(folder: Path) -> tuple[Path, Path]:
    """Target and checkpoint in new folders below ``folder``."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: index for index, letter in enumerate([*letters, END])}
    target = make_tiny_llama(folder / "target", vocab_size=len(vocab), eos_token_id=vocab[END])
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END)
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(target)
    return target, make_tiny_checkpoint(target, folder / "checkpoint", copy_adapter=True).folder
