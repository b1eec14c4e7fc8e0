"""BERT's tokenizers, from a ``vocab.txt``."""

import json
from pathlib import Path
from typing import Final

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from megatron.core.config.tokenizer import TokenizerConfig
from megatron.core.tokenizers.bpe import LibraryTokenizer, SpecialNames
from megatron.core.tokenizers.tokenizer import named_file

UNKNOWN: Final = "[UNK]"
LONGEST_WORD: Final = 100
"""Characters of a word; a longer one is unknown."""


def wordpiece_tokenizer(config: TokenizerConfig) -> LibraryTokenizer:
    """WordPiece as BERT has it (Devlin et al. 2019), from a file with one piece a line; the line is the id.

    Control characters are dropped, Chinese characters and punctuation stand alone, and
    BertWordPieceLowerCase also lowers the case and strips accents. A word is cut from the left into the
    longest pieces that the vocabulary has; a word that cannot be cut, or has over 100 characters, is
    ``[UNK]``.

    Special tokens are those of the file: ``[PAD]``, ``[CLS]``, ``[SEP]`` and ``[MASK]``. The beginning and
    end of a sequence are ``[BOS]`` and ``[EOS]`` where the file has them, otherwise ``[CLS]`` and ``[SEP]``;
    the end of a sequence is the end of a document.

    Raises:
        ValueError: if the file is missing, or is no such vocabulary.
    """
    kind = str(config.tokenizer_type)
    path = named_file("--vocab-file", config.vocab_file, kind, "a vocab.txt")
    vocabulary = read_vocabulary(path)
    lowercase = kind == "BertWordPieceLowerCase"
    library = tokenizers.Tokenizer(
        models.WordPiece(
            vocabulary,
            unk_token=UNKNOWN,
            max_input_chars_per_word=LONGEST_WORD,
            continuing_subword_prefix="##",
        )
    )
    library.normalizer = normalizers.BertNormalizer(
        clean_text=True, handle_chinese_chars=True, strip_accents=lowercase, lowercase=lowercase
    )
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    library.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    names = SpecialNames(
        bos=_first_of(("[BOS]", "[CLS]"), vocabulary),
        eos=_first_of(("[EOS]", "[SEP]"), vocabulary),
        pad=_first_of(("[PAD]",), vocabulary),
        cls=_first_of(("[CLS]",), vocabulary),
        sep=_first_of(("[SEP]",), vocabulary),
        mask=_first_of(("[MASK]",), vocabulary),
    )
    library.add_special_tokens([UNKNOWN, *dict.fromkeys(name for _, name in names.named())])
    return LibraryTokenizer(
        kind,
        f"--vocab-file {config.vocab_file}",
        json.loads(library.to_str()),
        names,
        num_sentinels=config.vocab_extra_ids,
        parse_special_tokens=config.parse_special_tokens,
        files=(path.read_bytes(),),
    )


def read_vocabulary(path: Path) -> dict[str, int]:
    """The pieces in a ``vocab.txt`` and their ids, which count the lines from 0.

    Raises:
        ValueError: naming file and line, if it is no such vocabulary.
    """
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not a vocab.txt: not UTF-8 at byte {error.start + 1}") from None
    vocabulary: dict[str, int] = {}
    # Pieces may be characters at which str.splitlines would split.
    for token_id, line in enumerate(text.removesuffix("\n").split("\n")):
        piece = line.removesuffix("\r")
        if piece in vocabulary:
            first = vocabulary[piece] + 1
            raise ValueError(
                f"{path}:{token_id + 1}: not a vocab.txt, which has each piece once: {piece[:40]!r} is also "
                f"on line {first}"
            )
        vocabulary[piece] = token_id
    if UNKNOWN not in vocabulary:
        raise ValueError(f"{path}: not a vocab.txt of WordPiece: no line is {UNKNOWN}")
    return vocabulary


def _first_of(names: tuple[str, ...], vocabulary: dict[str, int]) -> str | None:
    return next((name for name in names if name in vocabulary), None)
