"""A small vocabulary of each family, trained on the sample corpus, and its own library's ids of a text."""

import base64
import io
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import sentencepiece
import tiktoken
from tokenizers import BertWordPieceTokenizer
from transformers import BertTokenizerFast, PreTrainedTokenizerFast

from megatron.core.config import TokenizerConfig
from megatron.core.tokenizers import build_tokenizer
from megatron.core.tokenizers.training import save_tokenizer, train_byte_level_bpe
from tests.unit.core.tokenizers.texts import CHAPTERS

GPT2_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
GPT4_PATTERN = (
    r"""'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|"""
    r"""\s++$|\s*[\r\n]|\s+(?!\S)|\s"""
)
"""As tiktoken's own definition of cl100k_base spells it."""
NUM_SPECIAL = 20


@dataclass(frozen=True)
class Family:
    """One tokenizer and its reference."""

    config: TokenizerConfig
    """Flags of the tokenizer."""
    reference: Callable[[str], list[int]]
    """Ids of a text by the family's own library, special text spelled out."""
    parsing: Callable[[str], list[int]] | None = None
    """The same with special text read as special tokens."""
    vocab_size: int | None = None
    """``--vocab-size``, where the tokenizer wants one."""

    def build(self, **options):
        """The tokenizer, with some settings changed."""
        config = TokenizerConfig(**{**self.config.__dict__, **options})
        return build_tokenizer(config, self.vocab_size)


def families(folder):
    """A family by name, the files written into a folder."""
    return {**_byte_level(folder), **_word_piece(folder), **_sentence_piece(folder), **_no_file()}


def gpt2_ranks(vocab_json):
    """Ranks as tiktoken wants them of a vocab.json, its bytes spelled as GPT-2's paper code spells them."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in printable]
    byte_of = {chr(byte): byte for byte in printable}
    byte_of |= {chr(256 + n): byte for n, byte in enumerate(hidden)}
    vocabulary = json.loads(Path(vocab_json).read_text(encoding="utf-8"))
    end = vocabulary.pop("<|endoftext|>")
    return {bytes(byte_of[char] for char in token): rank for token, rank in vocabulary.items()}, end


def write_ranks(path, tokens):
    """Files of ranks: a list of objects in JSON, or lines."""
    if path.suffix == ".json":
        entries = [
            {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
            for rank, token in enumerate(tokens)
        ]
        path.write_text(json.dumps(entries))
    else:
        path.write_bytes(
            b"".join(b"%s %d\n" % (base64.b64encode(token), rank) for rank, token in enumerate(tokens))
        )


def _byte_level(folder):
    save_tokenizer(train_byte_level_bpe(CHAPTERS[:10], 700), folder / "bpe")
    ranks, end = gpt2_ranks(folder / "bpe" / "vocab.json")
    gpt2 = tiktoken.Encoding(
        "gpt2", pat_str=GPT2_PATTERN, mergeable_ranks=ranks, special_tokens={"<|endoftext|>": end}
    )
    ordinary, parsed = gpt2.encode_ordinary, lambda text: gpt2.encode(text, allowed_special="all")
    json_file = PreTrainedTokenizerFast(tokenizer_file=str(folder / "bpe" / "tokenizer.json"))
    files = {"vocab_file": str(folder / "bpe/vocab.json"), "merge_file": str(folder / "bpe/merges.txt")}
    found = {
        "gpt2": Family(TokenizerConfig("GPT2BPETokenizer", **files), ordinary, parsed),
        "hugging_face": Family(
            TokenizerConfig("HuggingFaceTokenizer", tokenizer_model=str(folder / "bpe")),
            ordinary,
            lambda text: json_file(text, add_special_tokens=False)["input_ids"],
        ),
    }
    tokens = [bytes((byte,)) for byte in range(256)]
    tokens += [token for token in sorted(ranks, key=ranks.get) if len(token) > 1]
    write_ranks(folder / "ranks.json", tokens)
    write_ranks(folder / "ranks.tiktoken", tokens)
    names = ["<unk>", "<s>", "</s>", "<mask>", "<pad>", "<cls>", "<sep>"]
    names += [f"<SPECIAL_{number}>" for number in range(7, NUM_SPECIAL)]
    lines = {
        "cl100k": (GPT4_PATTERN, "ranks.tiktoken"),
        "v2": (MEGATRON_V2, "ranks.json"),
        "v1": (MEGATRON_V1, "ranks.json"),
    }
    for pattern, (regex, file) in lines.items():
        library = tiktoken.Encoding(
            pattern,
            pat_str=regex,
            mergeable_ranks={token: NUM_SPECIAL + rank for rank, token in enumerate(tokens)},
            special_tokens={name: token_id for token_id, name in enumerate(names)},
        )
        options = {"tiktoken_pattern": pattern, "tiktoken_num_special_tokens": NUM_SPECIAL}
        config = TokenizerConfig("TikTokenizer", tokenizer_model=str(folder / file), **options)
        found[f"tiktoken_{pattern}"] = Family(
            config,
            library.encode_ordinary,
            lambda text, library=library: library.encode(text, allowed_special="all"),
        )
    return found


# Megatron-LM's two patterns, written out by hand from its published description, apart from ours.
MEGATRON_V1 = r"[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
MEGATRON_V2 = "|".join([
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
    r"\p{N}", r" ?[^\s\p{L}\p{N}]+[\r\n/]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+",
])  # fmt: skip


def _word_piece(folder):
    found = {}
    for kind, lowercase in (("BertWordPieceLowerCase", True), ("BertWordPieceCase", False)):
        trainer = BertWordPieceTokenizer(lowercase=lowercase, strip_accents=lowercase)
        trainer.train_from_iterator(CHAPTERS[:10], vocab_size=700, show_progress=False)
        path = folder / f"{kind}.txt"
        pieces = sorted(trainer.get_vocab().items(), key=lambda item: item[1])
        path.write_text("".join(f"{piece}\n" for piece, _ in pieces), encoding="utf-8")
        reference = BertTokenizerFast(vocab=str(path), do_lower_case=lowercase)
        spelled = _spelled_out(reference)
        found[kind] = Family(
            TokenizerConfig(kind, vocab_file=str(path)),
            lambda text, spelled=spelled: spelled.encode(text, add_special_tokens=False),
            lambda text, reference=reference: reference.encode(text, add_special_tokens=False),
        )
    return found


def _spelled_out(reference):
    """The same, without its special tokens among what it looks for in a text."""
    copy = BertTokenizerFast(vocab=reference.get_vocab(), do_lower_case=reference.do_lower_case)
    copy.split_special_tokens = True
    copy.backend_tokenizer.encode_special_tokens = True
    return copy


def _sentence_piece(folder):
    kinds = {
        "SentencePieceTokenizer": {"bos_id": 5, "eos_id": 3, "pad_id": 1, "unk_id": 0},
        "GPTSentencePieceTokenizer": {"model_type": "bpe", "character_coverage": 1.0, "pad_id": -1},
        "Llama2Tokenizer": {
            "model_type": "bpe", "byte_fallback": True, "normalization_rule_name": "identity",
            "remove_extra_whitespaces": False, "split_digits": True, "unk_surface": " \u2047 ",
        },
    }  # fmt: skip
    found = {}
    for kind, options in kinds.items():
        path = folder / f"{kind}.model"
        library = train_sentence_piece(path, **options)
        start = [library.bos_id()] if kind == "Llama2Tokenizer" else []
        config = TokenizerConfig(kind, tokenizer_model=str(path))
        found[kind] = Family(config, lambda text, library=library, start=start: start + library.encode(text))
    return found


def train_sentence_piece(path, **options):
    """Train a model, write it, and load it with the library."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CHAPTERS[0].splitlines()), model_writer=model, minloglevel=2,
        **{"vocab_size": 400, "hard_vocab_limit": False, **options},
    )  # fmt: skip
    path.write_bytes(model.getvalue())
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def _no_file():
    return {"bytes": Family(TokenizerConfig("ByteLevelTokenizer"), lambda text: list(text.encode()))}
