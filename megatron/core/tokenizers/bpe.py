"""Tokenizers that Hugging Face's ``tokenizers`` library runs: GPT-2's BPE, and any ``tokenizer.json``."""

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import orjson
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from megatron.core.config.tokenizer import TokenizerConfig
from megatron.core.tokenizers.tokenizer import (
    NO_TEXT_HOLDS,
    Tokenizer,
    digest,
    extend_vocabulary,
    named_file,
    sentinel_names,
    special_ids,
    split_apart,
    utf8,
)

GPT2_END: Final = "<|endoftext|>"
KNOWN_NAMES: Final = {
    "bos": ("<s>", "<|begin_of_text|>", "<bos>", "<|startoftext|>"),
    "eos": ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>"),
    "pad": ("<pad>", "<|pad|>", "<|padding|>", "[PAD]"),
    "cls": ("[CLS]", "<cls>"),
    "sep": ("[SEP]", "<sep>"),
    "mask": ("[MASK]", "<mask>"),
}
"""Names under which a list of special tokens may have each of them, the likeliest first."""


@dataclass(frozen=True)
class SpecialNames:
    """What the special tokens of a vocabulary are called; None for those that it does not have."""

    bos: str | None = None
    eos: str | None = None
    pad: str | None = None
    cls: str | None = None
    sep: str | None = None
    mask: str | None = None

    def named(self) -> list[tuple[str, str]]:
        """The fields that are not None."""
        values = [(field.name, getattr(self, field.name)) for field in fields(self)]
        return [(role, name) for role, name in values if name is not None]


class LibraryTokenizer(Tokenizer):
    """A tokenizer of the ``tokenizers`` library.

    Args:
        name: the ``--tokenizer-type``.
        source: the flags and files it comes from.
        spec: the content of a ``tokenizer.json``.
        special: names of its special tokens.
        num_sentinels: the value of ``--vocab-extra-ids``; sentinels that the vocabulary lacks follow it.
        parse_special_tokens: read the names of special tokens that occur in a text as those tokens.
        files: contents of the files that it was made from.
        library: the library's tokenizer of ``spec``, if it is there already.
    """

    def __init__(
        self,
        name: str,
        source: str,
        spec: dict[str, Any],
        special: SpecialNames,
        *,
        num_sentinels: int,
        parse_special_tokens: bool,
        files: Sequence[bytes],
        library: tokenizers.Tokenizer | None = None,
    ) -> None:
        self.name, self.source = name, source
        spec, sentinels = _with_sentinels(spec, num_sentinels, source)
        if library is None or sentinels:
            library = load_library_tokenizer(spec, source)
        self._library = library
        vocabulary = self._library.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        self.bos = self.eos = self.pad = None
        for role, token in special.named():
            setattr(self, role, vocabulary.get(token))
        self.sentinels = tuple(sentinels.values())
        self._encoder = self._library
        if not parse_special_tokens:
            self._encoder = load_library_tokenizer(
                without_special_text(spec, _markers(spec, {token for _, token in special.named()})), source
            )
        self._encoder.no_truncation()
        self._encoder.no_padding()
        self._word_piece = spec["model"] if spec["model"].get("type") == "WordPiece" else None
        self.identity = {
            "type": name,
            "vocab_size": self.vocab_size,
            "eod": self.eos,
            "special": special_ids(self),
            "parse_special_tokens": parse_special_tokens,
            "sha256": digest(*files),
        }

    @property
    def encoder_json(self) -> str:
        """Content of a ``tokenizer.json`` that gives the ids of ``encode``."""
        content: str = self._encoder.to_str()
        return content

    def encode(self, text: str) -> list[int]:
        """Ids of a text; nothing is put before or after."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of several texts, each as ``encode`` gives them."""
        if self._encoder is not self._library and any(NO_TEXT_HOLDS in text for text in texts):
            found = [self._encode_all(split_apart(text)) for text in texts]
            return [[token for ids in pieces for token in ids] for pieces in found]
        return self._encode_all(texts)

    def _encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        try:
            # The fast call leaves out the position of each token in the text, a fifth of the time.
            found = self._encoder.encode_batch_fast(list(texts), add_special_tokens=False)
        except TypeError:
            for text in texts:
                utf8(text)  # says what the library does not
            raise
        return [encoding.ids for encoding in found]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of some ids, special tokens spelled out."""
        text: str = self._library.decode(list(ids), skip_special_tokens=False)
        return text

    def continues_word(self) -> npt.NDArray[np.bool_]:
        """[v] whether a piece goes on with the word of the piece before it: it begins with ``##``.

        Raises:
            ValueError: if the vocabulary is not of word pieces.
        """
        if self._word_piece is None:
            return super().continues_word()
        prefix = self._word_piece.get("continuing_subword_prefix", "##")
        continues = np.zeros(self.vocab_size, np.bool_)
        for piece, token_id in self._word_piece["vocab"].items():
            continues[token_id] = piece.startswith(prefix)
        return continues


def _markers(spec: dict[str, Any], named: Collection[str]) -> set[str]:
    """The tokens that no text may yield: special ones, and of the other added ones those with a role.

    An ordinary token of the vocabulary with a role stays one, since text is spelled with it; and a byte's
    character stays one even if it is listed as special.
    """
    added = spec.get("added_tokens") or ()
    found = {token["content"] for token in added if token.get("special") or token["content"] in named}
    return found - set(pre_tokenizers.ByteLevel.alphabet()) if spec["model"].get("type") == "BPE" else found


def _with_sentinels(
    spec: dict[str, Any], num_sentinels: int, source: str
) -> tuple[dict[str, Any], dict[str, int]]:
    """The tokenizer with sentinels among its special tokens, and their ids by name."""
    if not num_sentinels:
        return spec, {}
    vocabulary = load_library_tokenizer(spec, source).get_vocab(with_added_tokens=True)
    size = max(vocabulary.values(), default=-1) + 1
    ids = extend_vocabulary(sentinel_names(num_sentinels), vocabulary, size)
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    there = {token["content"]: token for token in spec.get("added_tokens") or ()}
    new = {name: {"id": token_id, "content": name, **plain} for name, token_id in ids.items()}
    kept = {name: {**token, "special": token["special"] or name in ids} for name, token in there.items()}
    added = sorted({**new, **kept}.values(), key=lambda token: int(token["id"]))
    model = spec["model"]
    if isinstance(model.get("vocab"), dict):
        # An added token has the id that the vocabulary gives its name, and only otherwise the next free one.
        model = {**model, "vocab": {**model["vocab"], **ids}}
    return {**spec, "added_tokens": added, "model": model}, ids


def gpt2_bpe_tokenizer(config: TokenizerConfig) -> LibraryTokenizer:
    """GPT-2's byte-level BPE from its two files, ``vocab.json`` and ``merges.txt``.

    ``<|endoftext|>`` is the end of a document where the vocabulary has it; there are no other special tokens.

    Raises:
        ValueError: if a file is missing or is not of its kind.
    """
    kind = "GPT2BPETokenizer"
    vocab_path = named_file("--vocab-file", config.vocab_file, kind, "a vocab.json")
    merge_path = named_file("--merge-file", config.merge_file, kind, "a merges.txt")
    source = f"--vocab-file {config.vocab_file} --merge-file {config.merge_file}"
    vocabulary = read_json(vocab_path)
    if not set(map(type, vocabulary.values())) <= {int}:
        raise ValueError(f"{vocab_path}: not a vocab.json, which maps tokens to ids")
    try:
        model = models.BPE.from_file(str(vocab_path), str(merge_path))
    except Exception as error:  # noqa: BLE001 - the library raises bare Exception for a malformed file
        raise ValueError(f"{source}: {error}") from None
    library = tokenizers.Tokenizer(model)
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    end = GPT2_END if GPT2_END in vocabulary else None
    if end is not None:
        library.add_special_tokens([end])
    return LibraryTokenizer(
        kind,
        source,
        orjson.loads(library.to_str()),
        SpecialNames(eos=end),
        num_sentinels=config.vocab_extra_ids,
        parse_special_tokens=config.parse_special_tokens,
        files=(vocab_path.read_bytes(), merge_path.read_bytes()),
        library=library,
    )


def hugging_face_tokenizer(config: TokenizerConfig) -> LibraryTokenizer:
    """The tokenizer of a ``tokenizer.json``, or of a folder that holds one; never downloaded.

    Its beginning, end, padding, classification, separator and mask token are, each:

    1. ``bos_token``, ``eos_token``, ``pad_token``, ``cls_token``, ``sep_token`` or ``mask_token`` of a
       ``tokenizer_config.json`` in the same folder, where that file names one (as a string or as an object
       with ``content``); a name that isn't in the vocabulary counts as none, and one that is an ordinary
       token, such as ``!`` for padding, is still what a text is spelled with;
    2. otherwise the first of its :data:`KNOWN_NAMES` that ``tokenizer.json`` (or ``added_tokens_decoder``
       beside it) lists among its added tokens as special, which for the end are
       ``<|endoftext|> </s> <|end_of_text|> <eos>``;
    3. otherwise none.

    The end of sequence is the end of a document. The post-processor of the file, which may put tokens before
    and after a text, is not used.

    Raises:
        ValueError: if there is no such file, or it is no tokenizer.
    """
    path = _tokenizer_json(config.tokenizer_model)
    spec = read_json(path)
    if "model" not in spec:
        keys = ", ".join(map(repr, list(spec)[:5]))
        raise ValueError(f"{path}: not a tokenizer.json: it has no key 'model' (keys: {keys})")
    beside = path.with_name("tokenizer_config.json")
    named = read_json(beside) if beside.is_file() else {}
    spec, listed = _with_listed_tokens(spec, named.get("added_tokens_decoder"))
    special = [token["content"] for token in spec.get("added_tokens") or () if token.get("special")]
    names = {
        role: _special_name(named.get(f"{role}_token"), known, special) for role, known in KNOWN_NAMES.items()
    }
    return LibraryTokenizer(
        "HuggingFaceTokenizer",
        f"--tokenizer-model {config.tokenizer_model}",
        spec,
        SpecialNames(**names),
        num_sentinels=config.vocab_extra_ids,
        parse_special_tokens=config.parse_special_tokens,
        files=(path.read_bytes(), *listed),
    )


def _with_listed_tokens(spec: dict[str, Any], listed: Any) -> tuple[dict[str, Any], list[bytes]]:
    """The tokenizer with the special tokens that ``added_tokens_decoder`` alone lists, and their names."""
    there = {token["content"] for token in spec.get("added_tokens") or ()}
    vocabulary = spec["model"].get("vocab")
    if isinstance(vocabulary, list):
        vocabulary = {token: token_id for token_id, (token, _) in enumerate(vocabulary)}
    if not isinstance(listed, dict) or not isinstance(vocabulary, dict):
        return spec, []
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    new = [
        {"id": vocabulary[token["content"]], "content": token["content"], **plain}
        for number, token in listed.items()
        if isinstance(token, dict)
        and token.get("special")
        and token.get("content") not in there
        and str(vocabulary.get(token.get("content"))) == number
    ]
    added = sorted([*(spec.get("added_tokens") or ()), *new], key=lambda token: int(token["id"]))
    return {**spec, "added_tokens": added}, [token["content"].encode() for token in new]


def _tokenizer_json(tokenizer_model: str | None) -> Path:
    if tokenizer_model is not None and Path(tokenizer_model).is_dir():
        folder = Path(tokenizer_model)
        path = folder / "tokenizer.json"
        if path.is_file():
            return path
        other = ""
        if (folder / "tokenizer.model").is_file():
            use = f"SentencePieceTokenizer --tokenizer-model {folder}/tokenizer.model"
            other = f"; for its tokenizer.model use --tokenizer-type {use}"
        elif (folder / "merges.txt").is_file():
            use = f"GPT2BPETokenizer --vocab-file {folder}/vocab.json --merge-file {folder}/merges.txt"
            other = f"; for its merges.txt use --tokenizer-type {use}"
        raise ValueError(f"--tokenizer-model {tokenizer_model}: the folder holds no tokenizer.json{other}")
    what = "a tokenizer.json or a folder that holds one"
    return named_file("--tokenizer-model", tokenizer_model, "HuggingFaceTokenizer", what)


def _special_name(named: Any, known: Sequence[str], special: Sequence[str]) -> str | None:
    if isinstance(named, dict):
        named = named.get("content")
    if isinstance(named, str):
        return named
    return next((name for name in known if name in special), None)


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        ValueError: naming the file, if it holds none.
    """
    try:
        content = path.read_bytes()
        try:
            value = orjson.loads(content)
        except orjson.JSONDecodeError:
            value = json.loads(content)  # takes more, and says better what is wrong
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: cannot be read as JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path}: holds a JSON {type(value).__name__}, not an object")
    return value


def load_library_tokenizer(spec: dict[str, Any], source: str) -> tokenizers.Tokenizer:
    """Build the library's tokenizer from the content of a ``tokenizer.json``.

    Raises:
        ValueError: if the library refuses it.
    """
    try:
        return tokenizers.Tokenizer.from_str(orjson.dumps(spec).decode())
    except Exception as error:  # noqa: BLE001 - the library raises bare Exception for a malformed file
        raise ValueError(f"{source}: the tokenizers library cannot read it: {error}") from None


def without_special_text(spec: dict[str, Any], special: set[str]) -> dict[str, Any]:
    """The same tokenizer, ids and all, for which no text can yield one of the special tokens.

    Each special token gets a name that no text contains (texts with :data:`NO_TEXT_HOLDS` are split there),
    in the list of added tokens and in the model's own vocabulary alike: a Unigram or a word-level model would
    find ``</s>`` in its vocabulary without the list.
    """

    def renamed(token: str) -> str:
        return NO_TEXT_HOLDS + token if token in special else token

    model = dict(spec["model"])
    vocabulary = model.get("vocab")
    if isinstance(vocabulary, dict):
        model[
            "vocab"
        ] = {  # written out, as are the merges: a call for each of them takes longer than the rest
            (NO_TEXT_HOLDS + token if token in special else token): token_id
            for token, token_id in vocabulary.items()
        }
    elif isinstance(vocabulary, list):
        model["vocab"] = [[renamed(token), score] for token, score in vocabulary]
    if isinstance(model.get("unk_token"), str):
        model["unk_token"] = renamed(model["unk_token"])
    if model.get("merges"):
        pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
        model["merges"] = [
            merge
            for merge, (left, right) in zip(model["merges"], pairs, strict=True)
            if left not in special and right not in special and left + right not in special
        ]
    added = [{**token, "content": renamed(token["content"])} for token in spec.get("added_tokens") or ()]
    return {**spec, "model": model, "added_tokens": added}
