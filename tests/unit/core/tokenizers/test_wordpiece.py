"""BERT's vocabularies: special ids, what counts as a line, and files that are none."""

import json

import pytest
from tokenizers import BertWordPieceTokenizer

from megatron.core.config import TokenizerConfig
from megatron.core.tokenizers import build_tokenizer

PIECES = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
    "the",
    "whale",
    "##s",
    "un",
    "##aff",
    "##able",
    "cafe",
    "Café",
]


def write(path, pieces, end="\n"):
    path.write_bytes("".join(piece + end for piece in pieces).encode())
    return path


def build(path, kind="BertWordPieceLowerCase", **options):
    return build_tokenizer(TokenizerConfig(kind, vocab_file=str(path), **options))


def test_ids_are_the_lines_of_the_file(tmp_path):
    path = write(tmp_path / "vocab.txt", PIECES)
    lower, cased = build(path), build(path, "BertWordPieceCase")
    assert lower.vocab_size == len(PIECES) == 13
    assert lower.encode("The WHALES, unaffable café!") == [5, 6, 7, 1, 8, 9, 10, 11, 1]
    assert cased.encode("The whales unaffable Café") == [1, 6, 7, 8, 9, 10, 12]
    assert lower.decode([5, 6, 7, 8, 9, 10]) == "the whales unaffable"
    assert lower.continues_word().tolist() == [False] * 7 + [True, False, True, True, False, False]
    assert lower.encode("x" * 101 + " the") == [1, 5]


def test_special_ids_are_those_of_the_file(tmp_path):
    tokenizer = build(write(tmp_path / "plain.txt", PIECES))
    assert (tokenizer.pad, tokenizer.cls, tokenizer.sep, tokenizer.mask) == (0, 2, 3, 4)
    # Megatron Core takes CLS and SEP for the beginning and the end where there is no such token.
    assert (tokenizer.bos, tokenizer.eos, tokenizer.eod) == (2, 3, 3)
    tokenizer = build(
        write(tmp_path / "more.txt", [*PIECES, "[EOS]", "[BOS]", "<extra_id_1>"]), vocab_extra_ids=3
    )
    assert (tokenizer.bos, tokenizer.eos, tokenizer.eod, tokenizer.sep) == (14, 13, 13, 3)
    assert tokenizer.sentinels == (16, 15, 17)  # the one that is there, and those that follow
    assert tokenizer.vocab_size == 18
    bare = build(write(tmp_path / "bare.txt", ["[UNK]", "the"]))
    assert (bare.cls, bare.sep, bare.pad, bare.mask, bare.bos, bare.has_eod) == (None,) * 5 + (False,)
    with pytest.raises(ValueError, match=r"BertWordPieceLowerCase .* has no end-of-document token"):
        _ = bare.eod


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_line_ends_at_a_line_feed_alone(tmp_path, end):
    strange = ["\ufeff[PAD]", "[UNK]", "\u2028", "\x85", "\u3000", "the"]
    tokenizer = build(write(tmp_path / "vocab.txt", strange, end))
    assert tokenizer.encode("the") == [5]
    assert tokenizer.pad == 0
    path = tmp_path / "no_end.txt"
    path.write_text("[UNK]\nthe")
    assert build(path).encode("the") == [1]


def test_a_tokenizer_json_of_word_pieces_is_the_same(tmp_path):
    path = write(tmp_path / "vocab.txt", PIECES)
    BertWordPieceTokenizer(str(path), lowercase=True).save(str(tmp_path / "tokenizer.json"))
    model = TokenizerConfig("HuggingFaceTokenizer", tokenizer_model=str(tmp_path))
    same, tokenizer = build_tokenizer(model), build(path)
    assert same.encode("unaffable whales") == tokenizer.encode("unaffable whales") == [8, 9, 10, 6, 7]
    assert (same.cls, same.sep, same.mask, same.pad) == (2, 3, 4, 0)
    assert same.continues_word().tolist() == tokenizer.continues_word().tolist()
    assert not same.has_eod  # the file names none
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "[SEP]", "cls_token": "the"}))
    named = build_tokenizer(model)
    assert (named.eod, named.cls, named.mask) == (3, 5, 4)


def test_files_that_are_no_vocabulary(tmp_path):
    (tmp_path / "latin.txt").write_bytes(b"[UNK]\ncaf\xe9\n")
    for path, message in [
        (write(tmp_path / "twice.txt", ["[UNK]", "a", "b", "a"]), r"twice\.txt:4: .*'a' is also on line 2"),
        (
            write(tmp_path / "none.txt", ["a", "b"]),
            r"none\.txt: not a vocab\.txt of WordPiece: no line is \[UNK\]",
        ),
        (tmp_path / "latin.txt", r"latin\.txt: not a vocab\.txt: not UTF-8 at byte 10"),
        (tmp_path / "gone.txt", r"--vocab-file .*gone\.txt: no such file"),
    ]:
        with pytest.raises(ValueError, match=message) as failure:
            build(path)
        assert "\n" not in str(failure.value)
    with pytest.raises(ValueError, match=r"BertWordPieceCase needs --vocab-file: a vocab\.txt"):
        build_tokenizer(TokenizerConfig("BertWordPieceCase"))
    with pytest.raises(ValueError, match=r"--vocab-size 12: .* has 13 ids"):
        build_tokenizer(
            TokenizerConfig("BertWordPieceCase", vocab_file=str(write(tmp_path / "v.txt", PIECES))), 12
        )
