"""Files of BPE ranks, and the same vocabulary as a ``tokenizer.json``."""

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import pre_tokenizers

from megatron.core.tokenizers.tokenizer import NO_TEXT_HOLDS


@dataclass(frozen=True)
class MergeRanks:
    """What a file of ranks says."""

    ranks: dict[bytes, int]
    """Each token's bytes and its rank; a lower rank is merged first."""
    has_more: bool = False
    """Whether the file may hold more tokens than a vocabulary has, so that it is cut to size."""
    pattern: str | None = None
    """Regular expression of the pieces in which bytes are merged, where the file has it."""
    num_special_tokens: int | None = None
    """How many ids are special tokens, where the file says."""
    special_tokens: tuple[str, ...] | None = None
    """Names of the first of them, where the file says."""
    vocab_size: int | None = None
    """Ids in all, where the file says."""


def read_ranks(path: Path) -> MergeRanks:
    """Read a ``.tiktoken`` file or one of the JSON files of ranks.

    Raises:
        ValueError: naming the file and the place, if it is neither.
    """
    content = path.read_bytes()
    if content.lstrip()[:1] in (b"[", b"{"):
        return _read_json(path, content)
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(content.splitlines(), start=1):
        words = line.split()
        if not words:
            continue
        try:
            encoded, rank = words
            _add(ranks, base64.b64decode(encoded, validate=True), int(rank))
        except ValueError as error:
            raise ValueError(
                f"{path}:{number}: not a .tiktoken file, in which each line is a token in base64 and its "
                f"rank: {error}"
            ) from None
    if len(set(ranks.values())) != len(ranks):
        raise ValueError(f"{path}: not a .tiktoken file: two tokens have the same rank")
    return MergeRanks(ranks)


def _read_json(path: Path, content: bytes) -> MergeRanks:
    try:
        whole = json.loads(content)
        entries, special = whole, None
        config: dict[str, Any] = {}
        if isinstance(whole, dict):
            entries, config = whole["vocab"], whole.get("config") or {}
            special = _names(whole.get("special_tokens"))
        ranks: dict[bytes, int] = {}
        for rank, entry in enumerate(entries):
            if entry["rank"] != rank:
                raise ValueError(f"entry {rank} has rank {entry['rank']}")
            _add(ranks, base64.b64decode(entry["token_bytes"], validate=True), rank)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        reason = f"no {error}" if isinstance(error, KeyError) else error
        raise ValueError(
            f"{path}: not a JSON file of ranks, which lists objects with rank and token_bytes: {reason}"
        ) from None
    if isinstance(whole, dict) and special is None:
        special = ("<unk>", "<s>", "</s>")  # what all versions of such files begin with
    return MergeRanks(
        ranks,
        has_more=True,
        pattern=config.get("pattern"),
        num_special_tokens=config.get("default_num_special_tokens"),
        special_tokens=special,
        vocab_size=config.get("default_vocab_size"),
    )


def _names(entries: Any) -> tuple[str, ...] | None:
    if not entries:
        return None
    if [entry["rank"] for entry in entries] != list(range(len(entries))):
        raise ValueError("special_tokens are not in order of rank")
    return tuple(entry["token_str"] for entry in entries)


def _add(ranks: dict[bytes, int], token: bytes, rank: int) -> None:
    if token in ranks:
        raise ValueError(f"the token {token!r} has rank {ranks[token]} already")
    if not token or rank < 0:
        raise ValueError(f"the token {token!r} with rank {rank}")
    ranks[token] = rank


def tokenizer_json(
    ranks: Mapping[bytes, int], pattern: str, special: Mapping[str, int], *, parse_special_tokens: bool
) -> str:
    """Content of a ``tokenizer.json`` that merges bytes by rank.

    Any two neighbours whose bytes together are a token can be merged into it, so each way to cut a token in
    two is a merge of that token's rank.

    Args:
        ranks: ids of the tokens by their bytes.
        pattern: regular expression of the pieces in which bytes are merged.
        special: ids of special tokens by their names.
        parse_special_tokens: whether their names are read as them.
    """
    characters = _byte_characters()
    by_rank = sorted(ranks, key=lambda token: ranks[token])
    spelled = {token: "".join(characters[byte] for byte in token) for token in by_rank}
    merges = [
        [spelled[token[:cut]], spelled[token[cut:]]]
        for token in by_rank
        for cut in range(1, len(token))
        if token[:cut] in ranks and token[cut:] in ranks
    ]
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    prefix = "" if parse_special_tokens else NO_TEXT_HOLDS
    names = {prefix + name: token_id for name, token_id in special.items()}
    added = [
        {"id": token_id, "content": name, **plain}
        for name, token_id in sorted(names.items(), key=lambda item: item[1])
    ]
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": True,
        # An added token has the id that the vocabulary gives its name, whatever the list of them says.
        "vocab": names | {spelled[token]: ranks[token] for token in by_rank},
        "merges": merges,
    }
    whole = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "post_processor": None,
        "decoder": byte_level,
        "model": model,
    }
    return json.dumps(whole, ensure_ascii=False)


def _byte_characters() -> list[str]:
    """The character by which a byte-level vocabulary spells each byte (Radford et al. 2019)."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    hidden = (byte for byte in range(256) if byte not in printable)
    shifted = {byte: chr(256 + number) for number, byte in enumerate(hidden)}
    characters = [shifted.get(byte, chr(byte)) for byte in range(256)]
    assert sorted(characters) == sorted(pre_tokenizers.ByteLevel.alphabet())
    return characters
