"""Tokenizers that Hugging Face's ``tokenizers`` library runs: GPT-2's BPE, and any ``tokenizer.json``."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from megatron.core.tokenizers.tokenizer import Tokenizer, digest, named_file

GPT2_END: Final = "<|endoftext|>"
KNOWN_BEGINNINGS: Final = ("<s>", "<|begin_of_text|>", "<bos>", "<|startoftext|>")
KNOWN_ENDS: Final = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>")
KNOWN_PADS: Final = ("<pad>", "<|pad|>", "<|padding|>", "[PAD]")

NO_TEXT_HOLDS: Final = "\U0010ffff"
"""A code point that Unicode keeps free of characters for good."""

ControlNames = tuple[str | None, str | None, str | None]
"""Names of the beginning, end and padding token."""


class LibraryTokenizer(Tokenizer):
    """A tokenizer of the ``tokenizers`` library.

    Args:
        spec: the content of a ``tokenizer.json``.
        control: names of its beginning, end and padding token, where it has them.
        parse_special_tokens: read the names of special tokens that occur in a text as those tokens.
        files: contents of the files that it was made from.
    """

    def __init__(
        self,
        name: str,
        source: str,
        spec: dict[str, Any],
        control: ControlNames,
        parse_special_tokens: bool,
        files: Sequence[bytes],
    ) -> None:
        self.name, self.source = name, source
        self._library = load_library_tokenizer(spec, source)
        vocabulary = self._library.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        self.bos, self.eos, self.pad = (vocabulary.get(token or "") for token in control)
        self._encoder = self._library
        if not parse_special_tokens:
            special = {token["content"] for token in spec.get("added_tokens") or () if token.get("special")}
            special |= {token for token in control if token in vocabulary}
            self._encoder = load_library_tokenizer(without_special_text(spec, special), source)
        self._encoder.no_truncation()
        self._encoder.no_padding()
        self.encoder_json = self._encoder.to_str()
        self.identity = {
            "type": name,
            "vocab_size": self.vocab_size,
            "eod": self.eos,
            "parse_special_tokens": parse_special_tokens,
            "sha256": digest(*files),
        }

    def encode(self, text: str) -> list[int]:
        """Ids of a text; nothing is put before or after."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of several texts, each as ``encode`` gives them."""
        # The fast call leaves out the position of each token in the text, a fifth of the time.
        return [found.ids for found in self._encoder.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of some ids, special tokens spelled out."""
        text: str = self._library.decode(list(ids), skip_special_tokens=False)
        return text


def gpt2_bpe_tokenizer(
    vocab_file: str | None, merge_file: str | None, parse_special_tokens: bool
) -> LibraryTokenizer:
    """GPT-2's byte-level BPE from its two files, ``vocab.json`` and ``merges.txt``.

    ``<|endoftext|>`` is the end of a document where the vocabulary has it; there is no beginning or padding.

    Raises:
        ValueError: if a file is missing or is not of its kind.
    """
    kind = "GPT2BPETokenizer"
    vocab_path = named_file("--vocab-file", vocab_file, kind, "a vocab.json")
    merge_path = named_file("--merge-file", merge_file, kind, "a merges.txt")
    source = f"--vocab-file {vocab_file} --merge-file {merge_file}"
    vocabulary = read_json(vocab_path)
    if not all(isinstance(token_id, int) for token_id in vocabulary.values()):
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
    spec, files = json.loads(library.to_str()), (vocab_path.read_bytes(), merge_path.read_bytes())
    return LibraryTokenizer(kind, source, spec, (None, end, None), parse_special_tokens, files)


def hugging_face_tokenizer(tokenizer_model: str | None, parse_special_tokens: bool) -> LibraryTokenizer:
    """The tokenizer of a ``tokenizer.json``, or of a folder that holds one; never downloaded.

    Its beginning, end and padding token are, each:

    1. ``bos_token``, ``eos_token`` or ``pad_token`` of a ``tokenizer_config.json`` in the same folder, where
       that file names one (as a string or as an object with ``content``); a name that isn't in the vocabulary
       counts as none;
    2. otherwise the first of these names that ``tokenizer.json`` lists among its added tokens as special:
       ``<|endoftext|> </s> <|end_of_text|> <eos>`` for the end, ``<s> <|begin_of_text|> <bos>
       <|startoftext|>`` for the beginning, ``<pad> <|pad|> <|padding|> [PAD]`` for padding;
    3. otherwise none.

    The end of sequence is the end of a document. The post-processor of the file, which may put tokens before
    and after a text, is not used.

    Raises:
        ValueError: if there is no such file, or it is no tokenizer.
    """
    path = _tokenizer_json(tokenizer_model)
    spec = read_json(path)
    if "model" not in spec:
        keys = ", ".join(map(repr, list(spec)[:5]))
        raise ValueError(f"{path}: not a tokenizer.json: it has no key 'model' (keys: {keys})")
    special = [token["content"] for token in spec.get("added_tokens") or () if token.get("special")]
    config_path = path.with_name("tokenizer_config.json")
    config = read_json(config_path) if config_path.is_file() else {}
    control = (
        _control_name(config.get("bos_token"), KNOWN_BEGINNINGS, special),
        _control_name(config.get("eos_token"), KNOWN_ENDS, special),
        _control_name(config.get("pad_token"), KNOWN_PADS, special),
    )
    source = f"--tokenizer-model {tokenizer_model}"
    files = (path.read_bytes(),)
    return LibraryTokenizer("HuggingFaceTokenizer", source, spec, control, parse_special_tokens, files)


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


def _control_name(named: Any, known: Sequence[str], special: Sequence[str]) -> str | None:
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
        value = json.loads(path.read_bytes())
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
        return tokenizers.Tokenizer.from_str(json.dumps(spec))
    except Exception as error:  # noqa: BLE001 - the library raises bare Exception for a malformed file
        raise ValueError(f"{source}: the tokenizers library cannot read it: {error}") from None


def without_special_text(spec: dict[str, Any], special: set[str]) -> dict[str, Any]:
    """The same tokenizer, ids and all, for which no text can yield one of the special tokens.

    Each special token gets a name that no text contains, in the list of added tokens and in the model's own
    vocabulary alike: a Unigram or a word-level model would find ``</s>`` in its vocabulary without the list.
    """

    def renamed(token: str) -> str:
        return NO_TEXT_HOLDS + token if token in special else token

    model = dict(spec["model"])
    vocabulary = model.get("vocab")
    if isinstance(vocabulary, dict):
        model["vocab"] = {renamed(token): token_id for token, token_id in vocabulary.items()}
    elif isinstance(vocabulary, list):
        model["vocab"] = [[renamed(token), score] for token, score in vocabulary]
    if isinstance(model.get("unk_token"), str):
        model["unk_token"] = renamed(model["unk_token"])
    if model.get("merges"):
        model["merges"] = [merge for merge in model["merges"] if not _touches(merge, special)]
    added = [{**token, "content": renamed(token["content"])} for token in spec.get("added_tokens") or ()]
    return {**spec, "model": model, "added_tokens": added}


def _touches(merge: str | list[str], special: set[str]) -> bool:
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return left in special or right in special or left + right in special
