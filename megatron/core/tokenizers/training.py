"""Training a tokenizer."""

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT: Final = "<|endoftext|>"
SMALLEST_VOCABULARY: Final = 257
"""The 256 bytes and the end of text."""


def train_byte_level_bpe(texts: Iterable[str], vocab_size: int, *, show_progress: bool = False) -> Tokenizer:
    """Train a byte-level BPE as GPT-2's: any text can be encoded, and no id stands for the unknown.

    The same texts give the same tokenizer. ``<|endoftext|>`` is its only special token. The vocabulary comes
    out smaller than asked for where the texts hold too few pairs that occur twice.

    Raises:
        ValueError: if the vocabulary has no room for the bytes.
    """
    if vocab_size < SMALLEST_VOCABULARY:
        raise ValueError(
            f"--vocab-size {vocab_size}: a byte-level vocabulary has at least {SMALLEST_VOCABULARY} entries, "
            f"the 256 bytes and {END_OF_TEXT}"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=show_progress,
    )
    tokenizer.train_from_iterator(texts, trainer=trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> list[Path]:
    """Write a byte-level BPE in both usual forms; each file is replaced at once, whole.

    ``tokenizer.json`` with ``tokenizer_config.json`` is what HuggingFaceTokenizer and the transformers
    library read; ``vocab.json`` and ``merges.txt`` are what GPT2BPETokenizer reads. Both give the same ids.

    Returns:
        The files.
    """
    spec = json.loads(tokenizer.to_str())
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": END_OF_TEXT,
        "model_max_length": int(1e30),
    }
    by_id = dict(sorted(spec["model"]["vocab"].items(), key=lambda item: item[1]))
    contents = {
        "vocab.json": json.dumps(by_id, ensure_ascii=False),
        "merges.txt": _merges_text(spec["model"]["merges"]),
        "tokenizer_config.json": json.dumps(config, indent=2),
        "tokenizer.json": json.dumps(spec, ensure_ascii=False, indent=2),
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        partial = folder / f"{name}.partial-{os.getpid()}"
        try:
            partial.write_text(content + ("" if content.endswith("\n") else "\n"), encoding="utf-8")
            partial.replace(folder / name)
        finally:
            partial.unlink(missing_ok=True)
    return [folder / name for name in contents]


def _merges_text(merges: Sequence[Sequence[str]]) -> str:
    return "#version: 0.2\n" + "".join(f"{left} {right}\n" for left, right in merges)
