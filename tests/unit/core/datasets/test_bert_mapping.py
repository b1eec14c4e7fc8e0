"""The BERT mapping: golden vectors, a plain walk over the documents as reference, what is left out."""

import itertools

import numpy as np
import pytest

from megatron.core.datasets import bert_kernels, mersenne
from megatron.core.datasets.bert_mapping import MappingCounts, NoUsableDocumentError, build_bert_mapping

GOLDEN_LENGTHS = [5, 7, 6, 4, 9, 12, 3, 3, 3, 3, 3, 600, 5, 8, 8]
GOLDEN_DOCUMENTS = [0, 3, 5, 6, 11, 13, 15]
GOLDEN = {
    (2, 0.1): "(3,5,13)(3,5,13)(6,11,13)(6,11,13)(0,3,13)(3,5,13)(13,15,13)(13,15,2)(0,3,13)(0,3,13)(6,11,13)"
    "(13,15,13)",
    (2, 0.0): "(3,5,13)(3,5,13)(6,11,13)(6,11,13)(0,3,13)(3,5,13)(13,15,13)(13,15,13)(0,3,13)(0,3,13)"
    "(6,11,13)(13,15,13)",
    (2, 0.5): "(3,5,8)(6,11,10)(3,5,8)(0,3,13)(0,3,2)(6,11,12)(13,15,2)(9,11,2)(3,5,13)(6,9,8)(0,3,13)"
    "(13,15,2)(13,15,13)",
    (1, 0.1): "(5,6,13)(3,5,2)(0,3,13)(0,3,13)(13,15,13)(5,6,13)(13,15,13)(0,3,13)(13,15,13)(5,6,13)(6,11,13)"
    "(3,5,13)(3,5,13)(6,11,13)(6,11,13)",
}


def build(lengths, documents, num_samples, *, longest=13, short=0.1, seed=1234, least=2, **options):
    return build_bert_mapping(
        np.asarray(documents, np.int64),
        np.asarray(lengths, np.int32),
        num_samples=num_samples,
        max_seq_length=longest,
        short_seq_prob=short,
        seed=seed,
        min_sentences=least,
        **options,
    )


def written(arrays):
    return "".join(f"({a},{b},{c})" for a, b, c in arrays["sample_index"].tolist())


def reference(lengths, documents, num_samples, longest, ratio, seed, least):
    """Unshuffled samples of whole epochs, on NumPy's own 32-bit twister."""
    generator = np.random.RandomState(seed)

    def aim():
        drawn = int(generator.randint(0, 2**32, dtype=np.uint32)) if ratio else 1
        return 2 + drawn % (longest - 1) if ratio and drawn % ratio == 0 else longest

    found = []
    while True:
        for first, last in itertools.pairwise(documents):
            if last - first < least or (last - first > 1 and max(lengths[first:last]) > 512):
                continue
            start, target = first, aim()
            for end in range(first + 1, last + 1):
                enough = sum(lengths[start:end]) >= target and last - end > 1 and end - start >= least
                if enough or end == last:
                    found.append((start, end, target))
                    start, target = end, aim()
        if num_samples is None or len(found) >= num_samples:
            return found


@pytest.mark.parametrize(("least", "short"), GOLDEN)
def test_golden_vectors(least, short):
    arrays = build(GOLDEN_LENGTHS, GOLDEN_DOCUMENTS, 12, short=short, least=least)
    assert written(arrays) == GOLDEN[least, short]
    assert arrays["sample_index"].dtype == np.uint32


def test_samples_are_those_of_a_plain_walk():
    generator = np.random.default_rng(5)
    for trial in range(100):
        counts = generator.integers(0, 9, size=generator.integers(1, 30))
        counts[0] = 3  # at least one that is usable
        documents = np.concatenate(([0], np.cumsum(counts))).tolist()
        lengths = generator.integers(0, 30, size=documents[-1])
        lengths[generator.random(len(lengths)) < 0.02] = 513
        lengths[:3] = 512
        lengths = lengths.tolist()
        short, ratio = [(0.0, 0), (0.1, 10), (0.4, 3), (1.0, 1)][trial % 4]  # 1 / 0.4 = 2.5 is rounded up
        case = {"longest": int(generator.integers(2, 60)), "seed": int(generator.integers(1, 2**32))}
        least, num_samples = 1 + trial % 2, None if trial % 3 == 0 else int(generator.integers(1, 200))
        arrays = build(lengths, documents, num_samples, short=short, least=least, **case)
        expected = reference(lengths, documents, num_samples, case["longest"], ratio, case["seed"], least)
        assert sorted(map(tuple, arrays["sample_index"].tolist())) == sorted(expected)


def test_a_split_inside_a_dataset_keeps_the_dataset_s_sentence_numbers():
    arrays = build(GOLDEN_LENGTHS, GOLDEN_DOCUMENTS[3:], None, short=0.0)
    assert sorted(arrays["sample_index"].tolist()) == [[6, 11, 13], [13, 15, 13]]
    assert MappingCounts(*arrays["counts"].tolist()) == (3, 0, 0, 1, 1)


def test_the_account_says_why_documents_are_left_out():
    documents = [0, 0, 1, 3, 5, 5, 6]
    arrays = build([9, 600, 1, 4, 4, 700], documents, 5, short=0.0)
    counts = MappingCounts(*arrays["counts"].tolist())
    assert counts == MappingCounts(documents=6, empty=2, short=2, long=1, epochs=5)
    assert (counts.usable, counts.skipped) == (1, 5)
    # A long sentence that is a whole document is of use where one sentence is enough.
    counts = MappingCounts(*build([9, 600, 1, 4, 4, 700], documents, 5, least=1)["counts"].tolist())
    assert counts == MappingCounts(documents=6, empty=2, short=0, long=1, epochs=2)


@pytest.mark.parametrize(
    ("lengths", "documents", "words"),
    [
        ([5] * 100, range(101), ["100 documents", "100 have one sentence", "--bert-no-binary-head"]),
        ([600, 5], [0, 2], ["1 have a sentence of more than 512 tokens", "--split-sentences"]),
        ([], [0, 0, 0], ["2 documents", "2 are empty"]),
        ([5, 5], [2], ["no documents", "--split"]),
    ],
)
@pytest.mark.parametrize("num_samples", [None, 10**9])
def test_no_usable_document_is_an_error_and_no_endless_loop(lengths, documents, words, num_samples):
    with pytest.raises(NoUsableDocumentError) as raised:
        build(lengths, list(documents), num_samples)
    assert all(word in str(raised.value) for word in words), raised.value


def test_arrays_of_a_mapped_file_and_rows_in_a_file(tmp_path):
    # In an .idx file the arrays are mapped, can't be written to and lie on odd addresses.
    raw = np.zeros(2 + 8 * len(GOLDEN_DOCUMENTS) + 4 * len(GOLDEN_LENGTHS), np.uint8)
    border = 2 + 8 * len(GOLDEN_DOCUMENTS)
    raw[2:border] = np.array(GOLDEN_DOCUMENTS, "<i8").view(np.uint8)
    raw[border:] = np.array(GOLDEN_LENGTHS, "<i4").view(np.uint8)
    raw.tofile(tmp_path / "index")
    mapped = np.memmap(tmp_path / "index", np.uint8, "r").view(np.ndarray)
    documents, lengths = mapped[2:border].view("<i8"), mapped[border:].view("<i4")
    assert not documents.flags.writeable
    assert not documents.flags.aligned

    def allocate(name, shape, dtype):
        return np.lib.format.open_memmap(tmp_path / f"{name}.npy", "w+", np.dtype(dtype), shape)

    build(lengths, documents, 12, allocate=allocate)["sample_index"].flush()
    assert written({"sample_index": np.load(tmp_path / "sample_index.npy")}) == GOLDEN[2, 0.1]


def test_rows_of_64_bits_hold_the_same_as_rows_of_32():
    rows = np.arange(3000, dtype=np.uint32).reshape(1000, 3)
    wide = rows.astype(np.uint64) + 2**40
    bert_kernels.shuffle_rows(rows, mersenne.seed_64(77))
    bert_kernels.shuffle_rows(wide, mersenne.seed_64(77))
    np.testing.assert_array_equal(rows, wide - 2**40)
    assert sorted(rows[:, 0].tolist()) == list(range(0, 3000, 3))


def stream(state, draw, words, dtype, blocks):
    block = np.empty(words, dtype)
    drawn = []
    for _ in range(blocks):
        draw(state, block)
        drawn.append(block.copy())
    return np.concatenate(drawn)


@pytest.mark.parametrize("seed", [0, 1, 1234, 2**32 - 1])
def test_the_32_bit_twister_is_numpy_s(seed):
    ours = stream(mersenne.seed_32(seed), mersenne.draw_32, 624, np.uint32, 3)
    numpy_s = np.random.RandomState(seed).randint(0, 2**32, size=3 * 624, dtype=np.uint32)
    np.testing.assert_array_equal(ours, numpy_s)


def test_the_64_bit_twister_gives_the_number_that_the_cpp_standard_names():
    # ISO C++ [rand.predef]: the 10000th number of a default mt19937_64, whose seed is 5489.
    drawn = stream(mersenne.seed_64(5489), mersenne.draw_64, 312, np.uint64, 33)
    assert drawn[9999] == 9981545732273789042
