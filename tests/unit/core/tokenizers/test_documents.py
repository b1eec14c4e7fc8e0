"""Lines to token ids, with a tokenizer whose ids are written in the text."""

import io

import numpy as np
import pytest
import sentencepiece

from megatron.core.config import TokenizerConfig
from megatron.core.tokenizers import build_tokenizer
from megatron.core.tokenizers.blocks import Block
from megatron.core.tokenizers.documents import DocumentEncoder
from megatron.core.tokenizers.fast_encoder import ReferenceEncoder
from megatron.core.tokenizers.sentences import split_sentences
from tests.unit.core.tokenizers.texts import CHAPTERS


def block_of(*lines):
    """A block of a file of which ten lines came before."""
    return Block(0, "in.jsonl", 10, data="".join(f"{line}\n" for line in lines).encode())


def encoder(keys=("text",), vocab_size=100, **options):
    tokenizer = build_tokenizer(TokenizerConfig("NullTokenizer"), vocab_size)
    return DocumentEncoder(ReferenceEncoder(tokenizer), keys, "<u2", **options)


def test_documents_sequences_and_eod():
    lines = ['{"text": "1 2"}', '{"text": ""}', "", '{"text": ["3", " ", "4 5"]}', '{"text": " \\n"}']
    (part,) = encoder(eod=99)(block_of(*lines)).documents
    assert part.tokens.tolist() == [1, 2, 99, 3, 4, 5, 99]
    assert part.sequence_lengths.tolist() == [3, 1, 3]
    assert part.sequences_per_document.tolist() == [1, 2]
    assert part.num_empty == 2
    assert part.tokens.dtype == np.uint16


def test_a_bad_line_adds_to_no_key():
    lines = ['{"a": "1", "b": "2"}', '{"a": "3", "b": "x"}', '{"a": "4"}', '{"a": "5", "b": ""}']
    result = encoder(keys=("a", "b"))(block_of(*lines))
    assert [part.tokens.tolist() for part in result.documents] == [[1, 5], [2]]
    assert result.num_bad == 2
    assert str(result.bad_line).startswith("in.jsonl:12: NullTokenizer reads numbers")


def test_a_prefix_stands_once_before_a_document(tmp_path):
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CHAPTERS[0].splitlines()), model_writer=model, vocab_size=200,
        hard_vocab_limit=False, minloglevel=2,
    )  # fmt: skip
    (tmp_path / "m.model").write_bytes(model.getvalue())
    llama = build_tokenizer(TokenizerConfig("Llama2Tokenizer", tokenizer_model=str(tmp_path / "m.model")))
    library = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    bos, eos = library.bos_id(), library.eos_id()
    encode = DocumentEncoder(ReferenceEncoder(llama), ("text",), "<u2", llama.prefix, eos, split_sentences)
    lines = ['{"text": "The whale. A ship."}', '{"text": ["", " "]}', '{"text": "Sea!"}']
    (part,) = encode(block_of(*lines)).documents
    sequences = [[bos, *library.encode("The whale.")], [*library.encode("A ship."), eos]]
    sequences.append([bos, *library.encode("Sea!"), eos])
    assert part.tokens.tolist() == [token for sequence in sequences for token in sequence]
    assert part.sequence_lengths.tolist() == list(map(len, sequences))
    assert part.sequences_per_document.tolist() == [2, 1]
    assert part.num_empty == 1


def test_a_token_that_does_not_fit_its_type_is_never_wrapped():
    with pytest.raises(OverflowError):
        encoder(vocab_size=70_000)(block_of('{"text": "69999"}'))
