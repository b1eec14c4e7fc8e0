"""The vocabularies that people use, where a folder of them is named: GPT-2's, BERT's, Mistral's, OpenAI's.

    TOKENIZER_FILES=folder pytest -m nightly tests/unit/core/tokenizers/test_real_vocabularies.py

The folder holds any of these, at any depth: ``encoder.json`` with ``vocab.bpe`` beside it (GPT-2),
``vocab.txt`` (BERT, uncased), ``tokenizer.model*`` (SentencePiece), ``cl100k_base.tiktoken``,
``tekken*.json``; and a ``corpus.jsonl`` to take texts from, in place of the sample corpus.
"""

import base64
import json
import os
import random
from pathlib import Path

import pytest
import sentencepiece
import tiktoken
import tiktoken.load
from tokenizers import Tokenizer as LibraryTokenizer
from transformers import BertTokenizerFast

from megatron.core.config import TokenizerConfig
from megatron.core.tokenizers import build_tokenizer
from tests.unit.core.tokenizers.families import GPT2_PATTERN, GPT4_PATTERN, MEGATRON_V2
from tests.unit.core.tokenizers.texts import CHAPTERS, NASTY, REAL, first_difference

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif("TOKENIZER_FILES" not in os.environ, reason="no folder in TOKENIZER_FILES"),
]


def find(pattern):
    paths = sorted(Path(os.environ["TOKENIZER_FILES"]).rglob(pattern))
    if not paths:
        pytest.skip(f"no {pattern} in TOKENIZER_FILES")
    return paths[0]


def gpt2():
    merges, vocabulary = find("vocab.bpe"), find("encoder.json")
    ranks = tiktoken.load.data_gym_to_mergeable_bpe_ranks(str(merges), str(vocabulary))
    library = tiktoken.Encoding("r50k", pat_str=GPT2_PATTERN, mergeable_ranks=ranks, special_tokens={})
    config = TokenizerConfig("GPT2BPETokenizer", vocab_file=str(vocabulary), merge_file=str(merges))
    return config, library.encode_ordinary, (50257, 50256)


def bert():
    path = find("vocab.txt")
    library = BertTokenizerFast(vocab=str(path), do_lower_case=True)
    library.split_special_tokens = True
    library.backend_tokenizer.encode_special_tokens = True
    config = TokenizerConfig("BertWordPieceLowerCase", vocab_file=str(path))
    return config, lambda text: library.encode(text, add_special_tokens=False), (30522, 102)


def sentence_piece():
    path = find("tokenizer.model*")
    library = sentencepiece.SentencePieceProcessor(model_file=str(path))
    config = TokenizerConfig("Llama2Tokenizer", tokenizer_model=str(path))
    return config, lambda text: [library.bos_id(), *library.encode(text)], (32000, 2)


def cl100k():
    path = find("cl100k_base.tiktoken")
    ranks = tiktoken.load.load_tiktoken_bpe(str(path))
    library = tiktoken.Encoding("cl100k", pat_str=GPT4_PATTERN, mergeable_ranks=ranks, special_tokens={})
    options = {"tiktoken_pattern": "cl100k", "tiktoken_num_special_tokens": 0}
    return (
        TokenizerConfig("TikTokenizer", tokenizer_model=str(path), **options),
        library.encode_ordinary,
        (100256, None),
    )


def tekken():
    path = find("tekken*.json")
    entries = json.loads(path.read_bytes())["vocab"][: (1 << 17) - 1000]
    ranks = {base64.b64decode(entry["token_bytes"]): entry["rank"] + 1000 for entry in entries}
    library = tiktoken.Encoding("tekken", pat_str=MEGATRON_V2, mergeable_ranks=ranks, special_tokens={})
    config = TokenizerConfig("TikTokenizer", tokenizer_model=str(path))
    return config, library.encode_ordinary, (1 << 17, 2)


def corpus_texts():
    paths = sorted(Path(os.environ["TOKENIZER_FILES"]).rglob("corpus.jsonl"))
    if not paths:
        return REAL
    lines = paths[0].read_bytes().splitlines()
    return [json.loads(line)["text"][:20_000] for line in random.Random(1851).sample(lines, 1000)]


@pytest.mark.parametrize("family", [gpt2, bert, sentence_piece, cl100k, tekken])
@pytest.mark.parametrize("kind", ["real", "nasty", "long line", "tokenizer.json"])
def test_ids_are_the_librarys(family, kind):
    config, reference, (vocab_size, eod) = family()
    tokenizer = build_tokenizer(config)
    assert (tokenizer.vocab_size, tokenizer.eos) == (vocab_size, eod)
    if kind == "long line":
        texts = [("\n".join(CHAPTERS) * 5)[:5_000_000], "a" * 20_000, " " * 50_000 + "x", "文" * 20_000]
    else:
        texts = NASTY if kind == "nasty" else corpus_texts()
    expected = list(map(reference, texts))
    if kind != "tokenizer.json":
        assert first_difference(texts, tokenizer.encode_batch(texts), expected) is None
    elif tokenizer.encoder_json is not None:
        library, texts = LibraryTokenizer.from_str(tokenizer.encoder_json), [*texts, *NASTY]
        found = [one.ids for one in library.encode_batch_fast(texts, add_special_tokens=False)]
        expected = [ids[len(tokenizer.prefix) :] for ids in [*expected, *map(reference, NASTY)]]
        assert first_difference(texts, found, expected) is None
