"""Fill in the middle: each document comes back whole when its pieces are put in order again."""

import io

import numpy as np
import pytest
import sentencepiece
import tokenizers

from megatron.core.config import FimConfig, TokenizerConfig
from megatron.core.datasets.fim import FillInTheMiddle
from megatron.core.tokenizers import build_tokenizer

SPECIAL = {
    "<fim_prefix>": 130,
    "<fim_middle>": 131,
    "<fim_suffix>": 132,
    "<fim_pad>": 133,
    "<eod>": 134,
    "<f>": 135,
}
PREFIX, MIDDLE, SUFFIX, PAD, EOD, FILE = SPECIAL.values()
AB = 136


class Characters:
    """ASCII characters by their codes, with one token for ``ab``; special names in a text are spelled out."""

    name, source, vocab_size, prefix, eos = "Characters", "--toy", 137, (), EOD

    def __init__(self):
        self.identity = {"type": "Characters"}

    def encode(self, text):
        return [*self.prefix, *(AB if c == "\x80" else ord(c) for c in text.replace("ab", "\x80"))]

    def decode(self, ids):
        names = {token_id: name for name, token_id in SPECIAL.items()} | {AB: "ab", 129: "\ufffd"}
        return "".join(names.get(token_id) or chr(token_id) for token_id in ids)


class WithBeginning(Characters):
    prefix = (1,)


def fim(tokenizer=None, seed=7, **options):
    return FillInTheMiddle(FimConfig(fim_data=True, **options), tokenizer or Characters(), seed)


def codes(text):
    """One id a character, so that text with ``ab`` in it becomes shorter when it is tokenized again."""
    return np.array([ord(c) for c in text], np.int64)


def split(ids, separator):
    parts = [[]]
    for token in ids:
        if token == separator:
            parts.append([])
        else:
            parts[-1].append(token)
    return parts


def in_order(document):
    """The text of a rearranged document, and its kind, by the tokens that it holds."""
    text = Characters().decode
    if PREFIX not in document:
        return text(document), "plain"
    assert [document.count(token) for token in (PREFIX, SUFFIX, MIDDLE)] == [1, 1, 1]
    assert document[0] == PREFIX
    before_middle, after_middle = split(document[1:], MIDDLE)
    before, suffix = split(before_middle, SUFFIX)
    if document[1] == SUFFIX and before == []:
        # SPM; a PSM document with an empty prefix looks the same, and reads the same too
        return text(after_middle) + text(suffix), "suffix first"
    return text(before) + text(after_middle) + text(suffix), "prefix first"


@pytest.mark.parametrize("tokenizer", [Characters(), WithBeginning()])
@pytest.mark.parametrize(("spm", "kind"), [(0.0, "prefix first"), (1.0, "suffix first")])
def test_pieces_in_order_are_the_document(spm, kind, tokenizer):
    text = "abababab ab xyz ababab abab."
    change = fim(tokenizer, fim_rate=1.0, fim_spm_rate=spm)
    kinds = set()
    for key in range(200):
        found = change.apply(codes(text), key)
        assert found.shape == (len(text),)
        assert found.dtype == np.int64
        filled = [token for token in found.tolist() if token >= 0]
        assert set(found.tolist()[len(filled) :]) <= {~PAD}  # padding comes last
        whole, seen = in_order(filled)
        assert whole == text
        kinds.add(seen)
    assert kind in kinds
    assert len(kinds) == 1 or spm == 0.0


def test_cuts_are_uniform_and_sorted():
    text = "c" * 60 + "ab" * 20
    change = fim(fim_rate=1.0, fim_spm_rate=0.0)
    found = [change.apply(codes(text), key).tolist() for key in range(3000)]
    prefixes = [len(Characters().decode(ids[1 : ids.index(SUFFIX)])) for ids in found]
    # The smaller of two uniform numbers from 0 to 100 is 33 on average, with a deviation of 24.
    assert abs(np.mean(prefixes) - 33.2) < 5 * 24 / 3000**0.5


@pytest.mark.parametrize("rate", [0.0, 0.3, 1.0])
def test_shares_of_documents_and_of_orders(rate):
    change = fim(fim_rate=rate, fim_spm_rate=0.25)
    text = "xab" * 30
    kinds = [
        in_order([t for t in change.apply(codes(text), key).tolist() if t >= 0])[1] for key in range(2000)
    ]
    changed = 2000 - kinds.count("plain")
    assert abs(changed - rate * 2000) <= 5 * (2000 * rate * (1 - rate)) ** 0.5
    if changed:
        # An empty prefix, once in about 46 documents, passes for SPM.
        share = 0.25 + 0.75 / 46
        assert (
            abs(kinds.count("suffix first") - share * changed) <= 5 * (changed * share * (1 - share)) ** 0.5
        )


def test_documents_are_changed_one_by_one_and_their_ends_stay():
    texts = ["ababab one", "", "two abababab", "abab three abababab"]
    tokens = np.concatenate([np.append(codes(text), EOD) for text in texts])[:-1]
    found = fim(fim_rate=1.0).apply(tokens, 3)
    filled = [token for token in found.tolist() if token >= 0]
    assert [in_order(part)[0] for part in split(filled, EOD)] == texts
    assert all(PREFIX in part for part in split(filled, EOD) if part)


def test_what_becomes_too_long_is_cut_off():
    text = "no pairs in here"
    found = fim(fim_rate=1.0, fim_spm_rate=0.0).apply(codes(text), 0).tolist()
    assert len(found) == len(text)
    assert found[0] == PREFIX
    assert min(found) >= 0


def test_choice_depends_on_seed_and_number_alone():
    tokens = codes("abcabcabc abc abcab" * 4)
    one, other = fim(seed=3), fim(seed=3)
    forward = [one.apply(tokens, key).tolist() for key in range(50)]
    backward = [other(tokens, key).tolist() for key in reversed(range(50))]
    assert forward == backward[::-1]
    assert len({tuple(found) for found in forward}) > 20
    assert [fim(seed=4).apply(tokens, key).tolist() for key in range(50)] != forward


def test_fragments_are_changed_one_by_one():
    texts = ["abab first", "second abab", "abab third"]
    tokens = np.concatenate([np.append(codes(text), FILE) for text in texts])[:-1]
    change = fim(fim_rate=0.5, fim_split_sample="<f>", fim_fragment_rate=1.0)
    counts = []
    for key in range(300):
        filled = [token for token in change.apply(tokens, key).tolist() if token >= 0]
        parts = split(filled, FILE)
        # Each fragment takes 3 tokens more and up to 2 fewer: the last may be cut off.
        assert [in_order(part)[0] for part in parts[:2]] == texts[:2]
        counts.append(sum(PREFIX in part for part in parts))
    assert set(counts) == {0, 3}  # the whole group, or none of it
    assert abs(counts.count(3) - 150) < 5 * (300 / 4) ** 0.5
    alone = codes("no such token, abab")
    assert any(PREFIX in change.apply(alone, key) for key in range(50))  # a document without one: --fim-rate


def test_text_that_starts_so_is_left_alone():
    change = fim(fim_rate=1.0, fim_no_prefix="#!")
    assert change.apply(codes("#!abab"), 0).tolist() == codes("#!abab").tolist()
    assert change.apply(codes(" #!abab"), 0)[0] == PREFIX


def test_a_cut_character_is_not_lost():
    tokens = np.array([129, ord("a"), ord("b"), ord("c")])  # 129: bytes that are no character
    assert fim(fim_rate=1.0).apply(tokens, 0).tolist() == tokens.tolist()


def test_tokens_that_are_missing_are_named_with_their_flags():
    with pytest.raises(
        ValueError,
        match=r"^--fim-prefix-token <PRE> --fim-pad-token <P>: Characters \(--toy\) has no such token",
    ):
        fim(fim_prefix_token="<PRE>", fim_pad_token="<P>")
    with pytest.raises(ValueError, match="--fim-eod-token <end>: Characters"):
        fim(fim_eod_token="<end>")

    class Endless(Characters):
        eos = None

    with pytest.raises(ValueError, match=r"--fim-data: .* no end-of-document token.*--fim-eod-token"):
        fim(Endless())
    assert fim(Endless(), fim_eod_token="<eod>") is not None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fim_rate": 1.5}, "--fim-rate 1.5: must be a share"),
        ({"fim_spm_rate": -0.1}, "--fim-spm-rate -0.1: must be a share"),
        ({"fim_split_sample": "<f>"}, "--fim-split-sample <f>: needs --fim-fragment-rate"),
        ({"fim_fragment_rate": 0.5}, "--fim-fragment-rate 0.5: needs --fim-split-sample"),
    ],
)
def test_flags_that_make_no_sense(options, message):
    with pytest.raises(ValueError, match=message):
        FimConfig(**options)


def test_text_of_a_byte_level_tokenizer_comes_back(tmp_path):
    """Real ids, and characters of several bytes: only text that begins or ends inside one stays as it is."""
    library = tokenizers.Tokenizer(tokenizers.models.BPE())
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = tokenizers.decoders.ByteLevel()
    names = ["<fim_prefix>", "<fim_middle>", "<fim_suffix>", "<fim_pad>", "<|endoftext|>"]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=names,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    text = "Größe über alles: 東京 to Köln — naïve <fim_middle> façade. "
    library.train_from_iterator([text * 20], trainer)
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = build_tokenizer(
        TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(tmp_path))
    )
    prefix, middle, suffix, pad, eod = (library.token_to_id(name) for name in names)
    ids = tokenizer.encode(text * 3)
    assert not {prefix, middle, suffix, pad} & set(ids)  # spelled out where they are only text
    change = FillInTheMiddle(FimConfig(fim_data=True, fim_rate=1.0, fim_spm_rate=0.5), tokenizer, 1)
    whole, changed = tokenizer.decode(ids), 0
    for key in range(60):
        tokens = np.array([*ids[key % 20 :], *[eod] * 60], np.int64)  # room for what becomes longer
        found = [token for token in change.apply(tokens, key).tolist() if token >= 0]
        document = found[: found.index(eod)]
        if prefix not in document:
            assert "\ufffd" in tokenizer.decode(tokens.tolist())
            assert document == ids[key % 20 :]
            continue
        before_middle, after_middle = split(document[1:], middle)
        before, after = split(before_middle, suffix)
        pieces = [after_middle, after] if document[1] == suffix else [before, after_middle, after]
        assert whole.endswith("".join(map(tokenizer.decode, pieces)))
        changed += 1
    assert changed > 40


FIM_TOKENS = {
    name: name for name in ("fim_prefix_token", "fim_middle_token", "fim_suffix_token", "fim_pad_token")
}


def sentence_piece(folder, **options):
    model, path = io.BytesIO(), folder / "tokenizer.model"
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["one and two, then three", "a number and another one"] * 20),
        model_writer=model, vocab_size=60, hard_vocab_limit=False, minloglevel=2,
        user_defined_symbols=list(FIM_TOKENS), **options,
    )  # fmt: skip
    path.write_bytes(model.getvalue())
    return build_tokenizer(TokenizerConfig("SentencePieceTokenizer", tokenizer_model=str(path)))


def word_piece(folder):
    letters = "abcdefghijklmnopqrstuvwxyz,"
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *FIM_TOKENS, *letters, *(f"##{one}" for one in letters)]
    (folder / "vocab.txt").write_text("\n".join([*pieces, "one", "two", "and"]) + "\n")
    return build_tokenizer(TokenizerConfig("BertWordPieceCase", vocab_file=str(folder / "vocab.txt")))


def llama(folder):
    return sentence_piece(folder, normalization_rule_name="identity", remove_extra_whitespaces=False)


@pytest.mark.parametrize("make", [sentence_piece, llama, word_piece])
def test_tokenizers_that_never_give_back_a_text_that_was_cut_are_refused(tmp_path, make):
    tokenizer = make(tmp_path)
    assert tokenizer.decode(tokenizer.encode("one and two")) == "one and two"
    with pytest.raises(ValueError, match=r"--fim-data: \w+ \(--.*\) does not give back a text that was cut"):
        fim(tokenizer, **FIM_TOKENS)


def test_sentence_piece_without_a_space_before_each_text_is_as_good(tmp_path):
    tokenizer = sentence_piece(
        tmp_path, add_dummy_prefix=False, remove_extra_whitespaces=False, normalization_rule_name="identity"
    )
    tokens = np.array(tokenizer.encode("one and two, then three"), np.int64)
    room = np.append(tokens, [tokenizer.eos] * 40)
    change = fim(tokenizer, fim_rate=1.0, fim_spm_rate=0.0, **FIM_TOKENS)
    texts = [tokenizer.decode([token]) for token in range(tokenizer.vocab_size)]
    marks = [texts.index(name) for name in FIM_TOKENS]
    for key in range(30):
        found = change.apply(room, key).tolist()
        found = found[: found.index(tokenizer.eos)]
        assert found[0] == marks[0]
        before, rest = split(found[1:], marks[2])
        after, between = split(rest, marks[1])
        assert tokenizer.decode([*before, *between, *after]) == "one and two, then three"


class DropsSpacesAtEnds(Characters):
    """As a tokenizer that strips what it is given."""

    def encode(self, text):
        return super().encode(text.strip())


def test_a_document_whose_cut_would_lose_a_space_is_left_alone():
    text = "ab cd ab ef"
    change = fim(DropsSpacesAtEnds(), fim_rate=1.0, fim_spm_rate=0.0)
    room = np.append(codes(text), [EOD] * 5)
    kinds = []
    for key in range(200):
        document = [token for token in change.apply(room, key).tolist() if token >= 0]
        whole, kind = in_order(document[: document.index(EOD)])
        assert whole == text
        kinds.append(kind)
    # Of the 12 places for a cut 6 are beside a space.
    assert 20 < kinds.count("prefix first") < 100
