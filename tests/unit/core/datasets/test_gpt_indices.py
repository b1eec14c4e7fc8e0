"""The index arrays: golden vectors, a plain walk over the documents as reference, 64-bit switches."""

import numpy as np
import pytest

from megatron.core.datasets import gpt_indices
from megatron.core.datasets.gpt_indices import build_gpt_indices, plan_epochs

GOLDEN_LENGTHS = np.array([10, 4, 7, 12, 3, 9], np.int32)
GOLDEN = {
    None: (
        "2 1 5 0 4 3",
        "(0,0)(1,1)(2,5)(3,4)(4,2)(5,7)",
        "2 0 4 3 1",
    ),
    8: (
        "2 1 5 0 4 3 0 4 3 2 5 1",
        "(0,0)(1,1)(2,5)(3,4)(4,2)(5,7)(6,3)(7,1)(8,6)(9,2)(10,3)(11,2)",
        "1 3 2 0 4 10 6 8 9 5 7",
    ),
    18: (
        "5 3 5 4 1 2 0 2 4 1 1 3 2 4 0 5 0 3 5 1 4 3 0 2",
        "(0,0)(0,8)(1,7)(2,3)(3,2)(5,3)(6,4)(7,2)(9,0)(11,0)(11,8)(12,4)(14,2)(15,0)(15,8)(16,7)(17,5)(18,1)"
        "(19,0)(21,1)(21,9)(22,5)(23,3)",
        "8 5 14 1 4 11 15 12 13 9 0 7 3 10 6 2 17 16 21 18 20 19",
    ),
}


def build(lengths, seq_length, num_samples, *, seed=1234, first=0, **kwargs):
    lengths = np.asarray(lengths, np.int32)
    plan = plan_epochs(int(lengths.sum()), seq_length, num_samples)
    return build_gpt_indices(lengths, plan, first_sequence=first, seq_length=seq_length, seed=seed, **kwargs)


def walk(lengths, documents, seq_length, samples):
    """Where each sample starts: read seq_length + 1 tokens from the start before, then step back by one."""
    position, offset = 0, 0
    starts = [[0, 0]]
    for _ in range(samples):
        wanted = seq_length + 1
        while wanted > (left := lengths[documents[position]] - offset):
            wanted -= left
            position, offset = position + 1, 0
        offset += wanted - 1
        starts.append([position, offset])
    return starts


@pytest.mark.parametrize("num_samples", GOLDEN)
def test_golden_vectors(num_samples):
    arrays = build(GOLDEN_LENGTHS, 8, num_samples)
    documents, samples, shuffle = GOLDEN[num_samples]
    assert " ".join(map(str, arrays["document_index"])) == documents
    assert "".join(f"({a},{b})" for a, b in arrays["sample_index"].tolist()) == samples
    assert " ".join(map(str, arrays["shuffle_index"])) == shuffle
    assert [arrays[name].dtype for name in ("document_index", "sample_index", "shuffle_index")] == [
        np.int32,
        np.int32,
        np.uint32,
    ]


def test_check_value_of_the_generator():
    numbers = np.arange(12)
    np.random.RandomState(1234).shuffle(numbers)
    assert numbers.tolist() == [7, 8, 11, 2, 9, 10, 1, 0, 4, 5, 6, 3]


@pytest.mark.parametrize("chunk", [1, 3, 1 << 20])
@pytest.mark.parametrize("case", range(6))
def test_samples_start_where_a_walk_over_the_tokens_does(monkeypatch, chunk, case):
    monkeypatch.setattr(gpt_indices, "CHUNK", chunk)
    generator = np.random.default_rng(case)
    lengths = generator.integers(0, 15, size=12)  # empty ones too
    seq_length = int(generator.integers(1, 30))
    arrays = build(lengths, seq_length, int(generator.integers(1, 40)))
    documents, samples = arrays["document_index"].tolist(), arrays["sample_index"].tolist()
    total = sum(int(lengths[document]) for document in documents)
    assert len(samples) - 1 == (total - 1) // seq_length
    assert samples == walk(lengths, documents, seq_length, len(samples) - 1)
    assert sorted(arrays["shuffle_index"].tolist()) == list(range(len(samples) - 1))


def test_split_that_starts_later_names_sequences_of_the_whole():
    arrays = build(GOLDEN_LENGTHS, 8, 8, first=1000)
    assert arrays["document_index"].tolist() == [1000 + int(d) for d in GOLDEN[8][0].split()]
    np.testing.assert_array_equal(arrays["sample_index"], build(GOLDEN_LENGTHS, 8, 8)["sample_index"])


@pytest.mark.parametrize(("tokens", "seq_length"), [(45, 8), (9, 8), (1000, 7), (65, 64), (50, 49)])
def test_fewest_epochs_that_hold_the_samples(tokens, seq_length):
    for num_samples in range(1, 120):
        plan = plan_epochs(tokens, seq_length, num_samples)
        assert plan.samples >= num_samples
        assert plan.epochs == 1 or ((plan.epochs - 1) * tokens - 1) // seq_length < num_samples


def test_too_few_tokens_for_a_sample():
    with pytest.raises(ValueError, match=r"64 tokens, but one sample takes --seq-length 64 \+ 1 tokens"):
        plan_epochs(64, 64, 10)


@pytest.mark.parametrize("chunk", [1, 3, 1 << 20])
@pytest.mark.parametrize("lengths", [[10, 4, 7, 12, 3, 9], [1, 0, 1], [9, 0, 0], [5, 5, 5, 2]])
@pytest.mark.parametrize(
    ("seq_length", "num_samples"), [(8, None), (8, 8), (8, 18), (1, 3), (60, 2), (16, 1)]
)
def test_partial_sample_holds_what_is_left(monkeypatch, lengths, seq_length, num_samples, chunk):
    monkeypatch.setattr(gpt_indices, "CHUNK", chunk)
    plan = plan_epochs(sum(lengths), seq_length, num_samples, keep_partial=True)
    arrays = build_gpt_indices(
        np.array(lengths, np.int32), plan, first_sequence=0, seq_length=seq_length, seed=3
    )
    documents, starts = arrays["document_index"].tolist(), arrays["sample_index"].tolist()
    tokens = [(position, t) for position, d in enumerate(documents) for t in range(lengths[d])]
    assert len(tokens) == plan.epochs * sum(lengths)
    places = [0, *(tokens.index((position, offset)) for position, offset in starts[1:])]
    assert places == [*range(0, len(tokens) - 1, seq_length), len(tokens) - 1]
    assert sorted(arrays["shuffle_index"].tolist()) == list(range(len(starts) - 1))


def test_one_token_makes_no_partial_sample():
    with pytest.raises(ValueError, match="1 tokens, but a sample takes 2 or more"):
        plan_epochs(1, 8, None, keep_partial=True)


def test_negative_length_is_refused():
    plan = plan_epochs(45, 8, None)
    lengths = np.array([10, 4, -7], np.int32)
    with pytest.raises(ValueError, match="sequence 102 has the negative length -7"):
        build_gpt_indices(lengths, plan, first_sequence=100, seq_length=8, seed=1)


def test_lengths_that_are_not_aligned_give_the_same_indices():
    raw = np.zeros(2 + 4 * len(GOLDEN_LENGTHS), np.uint8)
    raw[2:] = GOLDEN_LENGTHS.view(np.uint8)
    unaligned = raw[2:].view(np.int32)
    assert not unaligned.flags.aligned
    arrays = build_gpt_indices(unaligned, plan_epochs(45, 8, 8), first_sequence=0, seq_length=8, seed=1234)
    assert " ".join(map(str, arrays["document_index"])) == GOLDEN[8][0]
    assert "".join(f"({a},{b})" for a, b in arrays["sample_index"].tolist()) == GOLDEN[8][1]


def test_indices_grow_to_64_bits_instead_of_wrapping():
    narrow = build(GOLDEN_LENGTHS, 8, 18)
    wide = build(GOLDEN_LENGTHS, 8, 18, limit=23)  # 24 entries in the document index
    assert wide["sample_index"].dtype == np.int64
    assert build(GOLDEN_LENGTHS, 8, 18, limit=24)["sample_index"].dtype == np.int32
    documents = build(GOLDEN_LENGTHS, 8, 18, limit=24, first=20)["document_index"]
    assert documents.dtype == np.int64  # sequence number 25 is beyond the limit
    for name, array in narrow.items():
        np.testing.assert_array_equal(wide[name], array)


def test_token_positions_beyond_two_to_the_31():
    lengths = np.array([2**30, 2**30 + 5, 2**30, 7], np.int32)
    seq_length = 2**28
    arrays = build(lengths, seq_length, 40)
    starts = arrays["sample_index"]
    ends = np.cumsum(lengths[arrays["document_index"]], dtype=np.int64)
    positions = ends[starts[:, 0]] - lengths[arrays["document_index"]][starts[:, 0]] + starts[:, 1]
    assert positions[-1] > 2**33
    assert np.diff(positions).tolist() == [seq_length] * (len(starts) - 1)
    assert (starts >= 0).all()
