"""SentencePiece models trained here, against the library itself."""

import io

import pytest
import sentencepiece

from megatron.core.config import TokenizerConfig
from megatron.core.tokenizers import build_tokenizer
from tests.unit.core.tokenizers.texts import CHAPTERS


def train(path, **options):
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CHAPTERS[0].splitlines()), model_writer=model, vocab_size=200,
        hard_vocab_limit=False, minloglevel=2, **options,
    )  # fmt: skip
    path.write_bytes(model.getvalue())
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def build(path, kind="SentencePieceTokenizer", **options):
    return build_tokenizer(TokenizerConfig(kind, tokenizer_model=str(path), **options))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("sentencepiece") / "tokenizer.model"
    return path, train(path, bos_id=5, eos_id=3, pad_id=1, unk_id=0)


def test_control_ids_are_those_of_the_file(model):
    path, library = model
    for kind in ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer"):
        tokenizer = build(path, kind)
        assert (tokenizer.bos, tokenizer.eos, tokenizer.eod, tokenizer.pad) == (5, 3, 3, 1)
        assert tokenizer.vocab_size == library.vocab_size()
        assert tokenizer.name == kind


def test_ids_are_the_librarys_and_nothing_is_added(model):
    path, library = model
    text = CHAPTERS[1]
    assert build(path).encode(text) == library.encode(text)
    assert build(path).decode(library.encode(text)) == library.decode(library.encode(text))
    assert build(path, "Llama2Tokenizer").encode(text) == [5, *library.encode(text)]


def test_literal_markers_are_text_unless_asked_for(model):
    path, library = model
    text = "the whale</s>a ship"
    assert 3 not in build(path).encode(text)
    parsed = build(path, parse_special_tokens=True).encode(text)
    assert parsed == [*library.encode("the whale"), 3, *library.encode("a ship")]
    begun = build(path, "Llama2Tokenizer", parse_special_tokens=True).encode("<s>the whale")
    assert begun == [5, *library.encode("the whale")]  # the beginning is not doubled


def test_models_without_an_end(tmp_path):
    train(tmp_path / "none.model", bos_id=-1, eos_id=-1)
    tokenizer = build(tmp_path / "none.model")
    assert (tokenizer.bos, tokenizer.pad, tokenizer.has_eod) == (None, None, False)
    with pytest.raises(ValueError, match="no beginning-of-sequence piece"):
        build(tmp_path / "none.model", "Llama2Tokenizer")
    library = train(tmp_path / "own.model", bos_id=-1, eos_id=-1, control_symbols=["<|endoftext|>"])
    assert build(tmp_path / "own.model").eod == library.piece_to_id("<|endoftext|>")


def test_pieces_that_the_user_defined_are_text_unless_asked_for(tmp_path):
    """The library itself finds such pieces in a text, so that a document could hold an end of document."""
    names = ["<EOD>", "<CLS>", "<SEP>", "<MASK>", "<extra_id_1>", "<other>"]
    for model_type in ("unigram", "bpe"):
        path = tmp_path / f"{model_type}.model"
        library = train(
            path, model_type=model_type, eos_id=-1, user_defined_symbols=names, character_coverage=1.0
        )
        ids = {name: library.piece_to_id(name) for name in names}
        plain = build(path, vocab_extra_ids=2)
        assert (plain.eod, plain.cls, plain.sep, plain.mask) == tuple(ids[name] for name in names[:4])
        assert plain.sentinels == (library.vocab_size(), ids["<extra_id_1>"])
        assert plain.vocab_size == library.vocab_size() + 1
        text = "the<EOD>whale <MASK> a<extra_id_0>b<extra_id_1><other> ship"
        found = plain.encode(text)
        assert set(found) & {*ids.values(), *plain.sentinels} == {ids["<other>"]}
        control = train(tmp_path / "b.model", model_type=model_type, eos_id=-1, character_coverage=1.0,
                        user_defined_symbols=["<other>"], control_symbols=names[:5])  # fmt: skip
        assert control.id_to_piece(control.encode(text)) == library.id_to_piece(found)
        parsed = build(path, vocab_extra_ids=2, parse_special_tokens=True).encode(text)
        assert parsed.count(ids["<EOD>"]) == parsed.count(ids["<MASK>"]) == 1
        assert [one for one in parsed if one in plain.sentinels] == [*plain.sentinels]
        assert plain.decode([*plain.sentinels, *library.encode("ship")]) == "<extra_id_0><extra_id_1> ship"


def test_a_file_of_another_kind_is_refused(tmp_path):
    (tmp_path / "x.model").write_bytes(b"no model at all")
    with pytest.raises(ValueError, match=r"x\.model: not a SentencePiece model"):
        build(tmp_path / "x.model")
    with pytest.raises(ValueError, match=r"--tokenizer-model .* is a folder"):
        build(tmp_path)
