"""Lines to token ids, with a tokenizer whose ids are written in the text."""

import io

import numpy as np
import pytest
import sentencepiece

from megatron.core.config import TokenizerConfig
from megatron.core.tokenizers import build_tokenizer
from megatron.core.tokenizers.corpus import Chunk
from megatron.core.tokenizers.documents import DocumentEncoder
from tests.unit.core.tokenizers.texts import CHAPTERS


def chunk_of(*lines):
    return Chunk("in.jsonl", 11, [line.encode() for line in lines], 0, 5)


def encoder(keys=("text",), **options):
    return DocumentEncoder(build_tokenizer(TokenizerConfig("NullTokenizer"), 100), keys, "<u2", **options)


def test_documents_sequences_and_eod():
    lines = ['{"text": "1 2"}', '{"text": ""}', "", '{"text": ["3", " ", "4 5"]}', '{"text": " \\n"}']
    (part,) = encoder(append_eod=True)(chunk_of(*lines)).documents
    assert part.tokens.tolist() == [1, 2, 99, 3, 4, 5, 99]
    assert part.sequence_lengths.tolist() == [3, 1, 3]
    assert part.sequences_per_document.tolist() == [1, 2]
    assert part.num_empty == 2
    assert part.tokens.dtype == np.uint16


def test_a_bad_line_adds_to_no_key():
    lines = ['{"a": "1", "b": "2"}', '{"a": "3", "b": "x"}', '{"a": "4"}', '{"a": "5", "b": ""}']
    result = encoder(keys=("a", "b"))(chunk_of(*lines))
    assert [part.tokens.tolist() for part in result.documents] == [[1, 5], [2]]
    assert [(bad.path, bad.line) for bad in result.bad_lines] == [("in.jsonl", 12), ("in.jsonl", 13)]
    assert str(result.bad_lines[0]).startswith("in.jsonl:12: NullTokenizer reads numbers")


def test_a_prefix_stands_once_before_a_document(tmp_path):
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CHAPTERS[0].splitlines()), model_writer=model, vocab_size=200,
        hard_vocab_limit=False, minloglevel=2,
    )  # fmt: skip
    (tmp_path / "m.model").write_bytes(model.getvalue())
    llama = build_tokenizer(TokenizerConfig("Llama2Tokenizer", tokenizer_model=str(tmp_path / "m.model")))
    library = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    encode = DocumentEncoder(llama, ("text",), "<u2", append_eod=True, split_sentences=True)
    bos, eos = library.bos_id(), library.eos_id()
    assert encode.encode_document(["The whale. A ship."]) == [
        [bos, *library.encode("The whale.")],
        [*library.encode("A ship."), eos],
    ]
    assert encode.encode_document(["", " "]) == []


def test_a_token_that_does_not_fit_its_type_is_never_wrapped():
    encode = DocumentEncoder(build_tokenizer(TokenizerConfig("NullTokenizer"), 70_000), ("text",), "<u2")
    with pytest.raises(OverflowError):
        encode(chunk_of('{"text": "69999"}'))
