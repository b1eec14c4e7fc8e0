import numpy as np
import pytest
import torch.distributed as dist

from megatron.core.context_parallel import local_positions
from megatron.core.context_parallel.visibility import Visibility, tiles

LENGTH = 32


def _segments(seed: int, kinds: int) -> np.ndarray:
    """Three sequences of runs of random length; numbers come again, and the last two sequences are alike."""
    random = np.random.default_rng(seed)
    rows = []
    for _ in range(2):
        row = np.repeat(random.integers(0, kinds, LENGTH), random.integers(1, 9, LENGTH))
        rows.append(row[:LENGTH])
    return np.stack([*rows, rows[-1]])


def _counts(visibility: Visibility, batch_size: int, budget: int | None) -> np.ndarray:
    """How often each pair of tokens is seen, [b, s, s], by natural position."""
    cp, heads = visibility.cp_size, 2
    positions = [local_positions(LENGTH, dist.ProcessGroup(rank, cp)).numpy() for rank in range(cp)]
    counts = np.zeros((batch_size, LENGTH, LENGTH), dtype=int)
    for rank in range(cp):
        met = np.zeros((batch_size, LENGTH // cp), dtype=bool)
        for step in range(cp):  # a rank's own keys come first
            source = (rank - step) % cp
            pieces = visibility.pieces(rank, source, length=LENGTH // cp, batch_size=batch_size)
            if budget is not None:
                pieces = [tile for piece in pieces for tile in tiles(piece, heads, budget)]
            for piece in pieces:
                queries, keys = positions[rank][piece.queries], positions[source][piece.keys]
                seen = np.ones((len(queries), len(keys)), dtype=int)
                if piece.causal:
                    assert len(queries) == len(keys)
                    seen = np.tril(seen)
                sequences = range(piece.batch.start, piece.batch.stop)
                assert piece.pairs == len(sequences) * seen.sum()
                if budget is not None:
                    assert len(sequences) * heads * len(queries) * len(keys) <= budget
                counts[np.ix_(sequences, queries, keys)] += seen
                # The first piece of a query is the first in the order of work, for all its queries alike.
                assert (met[piece.batch, piece.queries] != piece.first).all()
                met[piece.batch, piece.queries] = True
        assert met.all()
    return counts


@pytest.mark.parametrize("cp", [1, 2, 4])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("budget", [None, 2, 50, 600])
def test_each_pair_that_may_see_each_other_is_in_one_piece_and_no_other_is(cp, causal, budget):
    for segments in (None, _segments(1, 3), _segments(2, 50), np.arange(96).reshape(3, LENGTH)):
        counts = _counts(Visibility(causal, cp, segments), 3, budget)
        expected = np.ones((3, LENGTH, LENGTH), dtype=int)
        if segments is not None:
            expected = (segments[:, :, None] == segments[:, None, :]).astype(int)
        if causal:
            expected = np.tril(expected)
        assert np.array_equal(counts, expected)


@pytest.mark.parametrize("cp", [2, 3, 8])
def test_causal_work_is_the_same_on_every_rank_and_in_every_step_but_the_first(cp):
    chunk, visibility = 4, Visibility(True, cp, None)
    work = [
        [
            sum(p.pairs for p in visibility.pieces(rank, (rank - step) % cp, length=2 * chunk, batch_size=1))
            for step in range(cp)
        ]
        for rank in range(cp)
    ]
    # Its own two chunks as one triangle, then half of the four pairs of chunks with each other rank.
    assert work == [[2 * chunk * (2 * chunk + 1) // 2] + [2 * chunk**2] * (cp - 1)] * cp
    s = 2 * cp * chunk
    assert sum(map(sum, work)) == s * (s + 1) // 2


def test_documents_cost_what_they_hold_and_sequences_cut_alike_go_together():
    segments = np.array([[0] * 20 + [1] * 12, [0] * 20 + [1] * 12, [0] * 32, [0] * 20 + [1] * 12])
    pieces = Visibility(True, 1, segments).pieces(0, 0, length=LENGTH, batch_size=4)
    assert sum(piece.pairs for piece in pieces) == 3 * (20 * 21 // 2 + 12 * 13 // 2) + 32 * 33 // 2
    assert [(p.batch.start, p.batch.stop) for p in pieces] == [(0, 2), (0, 2), (2, 3), (3, 4), (3, 4)]
