import itertools

import pytest

from megatron.core.pipeline_parallel.partition import count_chunks, deal_layers
from tests.unit.core.pipeline_parallel.orders import places

ACCOUNTS = {"account_for_embedding": True, "account_for_loss": True}


def _sizes(*args, **kwargs):
    return [len(part) for part in deal_layers(*args, **kwargs)]


def _by_stage(sizes, stages, chunks, placement):
    """Layers of each stage, all its chunks together."""
    totals = [0] * stages
    for size, (stage, _) in zip(sizes, places(stages, chunks, placement), strict=True):
        totals[stage] += size
    return totals


def test_layers_are_dealt_evenly_in_order_and_none_is_lost():
    for stages in range(1, 9):
        for num_layers in range(stages, 40):
            ranges = deal_layers(num_layers, stages, 1, "loop")
            assert [layer for part in ranges for layer in part] == list(range(num_layers))
            sizes = [len(part) for part in ranges]
            assert len(sizes) == stages
            assert max(sizes) - min(sizes) <= 1


def test_extra_layers_go_to_the_middle():
    assert [len(part) for part in deal_layers(10, 4, 1, "loop")] == [2, 3, 3, 2]
    assert [len(part) for part in deal_layers(9, 4, 1, "loop")] == [2, 3, 2, 2]
    assert [len(part) for part in deal_layers(11, 4, 1, "loop")] == [3, 3, 3, 2]


def test_chunks_by_hand():
    assert _sizes(16, 4, 2, "loop") == [2] * 8
    # Five layers a stage, three of them in its first chunk, wherever that lies.
    assert _sizes(10, 2, 2, "loop") == [3, 3, 2, 2]
    assert _sizes(10, 2, 2, "v") == [3, 3, 2, 2]
    # The last stage of a loop holds the last part, that of a V the two in the middle.
    assert _sizes(12, 3, 2, "loop", first=2, last=4) == [1, 3, 2, 1, 3, 2]
    assert _sizes(12, 3, 2, "v", first=2, last=4) == [1, 3, 2, 2, 3, 1]


@pytest.mark.parametrize(("placement", "chunk_counts"), [("loop", (1, 2, 3)), ("v", (2,))])
def test_each_layer_is_there_once_in_order_whatever_the_flags(placement, chunk_counts):
    checked = 0
    for chunks, stages, num_layers in itertools.product(chunk_counts, range(1, 5), range(1, 19)):
        for first, last in itertools.product((None, 2, 3, 5), (None, 2, 4)):
            try:
                parts = deal_layers(num_layers, stages, chunks, placement, first=first, last=last)
            except ValueError:
                others = stages - (first is not None) - (last is not None)
                rest = num_layers - (first or 0) - (last or 0)
                fits = rest == 0 if others == 0 else rest >= others * chunks
                ends = [end for end in (first, last) if end is not None]
                assert not fits or min(ends, default=chunks) < chunks or stages == 1
                continue
            checked += 1
            assert [layer for part in parts for layer in part] == list(range(num_layers))
            assert len(parts) == stages * chunks
            sizes = [len(part) for part in parts]
            assert min(sizes) >= 1
            totals = _by_stage(sizes, stages, chunks, placement)
            assert first in (None, totals[0])
            assert last in (None, totals[-1])
            middle = totals[first is not None : stages - (last is not None)]
            assert not middle or max(middle) - min(middle) <= 1
    assert checked > 150


def test_one_stage_holds_all_layers():
    assert _sizes(20, 1, 1, "loop", last=20) == [20]
    message = r"--decoder-last-pipeline-num-layers 1, but --pipeline-model-parallel-size 1 .*--num-layers 20"
    with pytest.raises(ValueError, match=message):
        deal_layers(20, 1, 1, "loop", last=1)
    with pytest.raises(ValueError, match=r"--decoder-first-pipeline-num-layers 3, .*all of --num-layers 20"):
        deal_layers(20, 1, 2, "loop", first=3)


def test_embeddings_and_loss_count_as_layers():
    assert _sizes(6, 4, 1, "loop", **ACCOUNTS) == [1, 2, 2, 1]
    assert _sizes(7, 4, 1, "loop", account_for_embedding=True) == [1, 2, 2, 2]
    assert _sizes(7, 4, 1, "loop", account_for_loss=True) == [2, 2, 2, 1]
    # A V's first stage has both: 2 layers of its 4.
    assert _sizes(6, 2, 2, "v", **ACCOUNTS) == [1, 2, 2, 1]
    assert _sizes(6, 2, 2, "loop", **ACCOUNTS) == [1, 2, 2, 1]
    # Then a part can be without a layer.
    assert _sizes(3, 4, 1, "loop", account_for_embedding=True) == [0, 1, 1, 1]
    for num_layers, stages in itertools.product(range(4, 20), range(1, 5)):
        parts = deal_layers(num_layers, stages, 1, "loop", **ACCOUNTS)
        assert [layer for part in parts for layer in part] == list(range(num_layers))


@pytest.mark.parametrize(
    ("layout", "sizes"),
    [
        ("Ettt|tt|ttL", [3, 2, 2]),
        ("Et*3|(tt|)*2L", [3, 2, 2, 0]),
        ("E t*3, | (tt|)*2, t L", [3, 2, 2, 1]),
        ("E||t|L", [0, 0, 1, 0]),
        ("E|((t*2|t|)*2t|)*2L", [0, 2, 1, 2, 1, 1, 2, 1, 2, 1, 1, 0]),
        ("E(t)(|)*2tL", [1, 0, 1]),
        ("Et*10|t*0|tL", [10, 0, 1]),
        ("EtL", [1]),
    ],
)
def test_a_layout_says_what_each_part_holds(layout, sizes):
    parts = deal_layers(sum(sizes), 1, len(sizes), "loop", layout=layout)
    assert [len(part) for part in parts] == sizes
    assert [layer for part in parts for layer in part] == list(range(sum(sizes)))
    if len(sizes) % 2 == 0:
        assert _sizes(sum(sizes), len(sizes) // 2, 2, "v", layout=layout) == sizes
        assert count_chunks(sum(sizes), len(sizes) // 2, layout=layout) == 2


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        ("Et|tm|L", r"multi-token prediction \(m\) is not supported"),
        ("Et|tx|L", "can't make sense of 'x'; it takes E"),
        ("Et|t*|L", r"can't make sense of '\*'"),
        ("Et|t*2*3|L", r"can't make sense of '\*'"),
        ("Et|(t|L", r"can't make sense of '\('"),
        ("Et|t)|L", r"can't make sense of '\)'"),
        ("Et|t|2L", "can't make sense of '2'"),
        ("Et|tL", "has 2 parts, but the stages have 3"),
        ("Et|t|L|", "has 4 parts, but the stages have 3"),
        ("tE|t|L", "E, the embeddings, must come first"),
        ("Et|t|Lt", "L, the loss, must come last"),
        ("Et|tE|L", "has E 2 times: give it once"),
        ("Et|t|", "has L 0 times"),
        ("Et|tt|L", r"has 3 layers \(t\), but --num-layers is 2"),
        ("E(((t*999)*999)*999)*999|t|L", "is longer than 1000000 letters"),
        ("E(((t*999|)*999)*9999999)*999|t|L", "is longer than 1000000 letters"),
    ],
)
def test_other_layouts_are_refused(layout, said):
    with pytest.raises(ValueError, match=rf"--pipeline-model-parallel-layout '.*{said}"):
        deal_layers(2, 3, 1, "loop", layout=layout)


@pytest.mark.parametrize(
    ("layout", "stages", "chunks", "placement", "stage"),
    [
        ("Ett||ttL", 3, 1, "loop", 1),
        ("E||t|L", 4, 1, "loop", 1),
        ("Et|||L", 2, 2, "loop", None),  # the second stage has the loss
        ("E|||t|t|L", 3, 2, "loop", None),
        ("Ett|t||t||L", 3, 2, "loop", None),
        ("Ett|||t||L", 3, 2, "loop", 1),
        ("E|tt|||t|L", 3, 2, "loop", None),
        ("E|tt|||t|L", 3, 2, "v", 2),
        ("E|tt||L", 2, 2, "v", None),
        ("Ett|||L", 2, 2, "v", 1),
    ],
)
def test_a_stage_that_a_layout_leaves_empty_is_refused_and_an_empty_chunk_is_not(
    layout, stages, chunks, placement, stage
):
    layers = layout.count("t")
    if stage is None:
        assert sum(_sizes(layers, stages, chunks, placement, layout=layout)) == layers
        return
    with pytest.raises(
        ValueError, match=rf"--pipeline-model-parallel-layout '.*' leaves stage {stage} of --.* {stages} with"
    ):
        deal_layers(layers, stages, chunks, placement, layout=layout)


def test_a_stage_without_a_layer_is_refused():
    with pytest.raises(ValueError, match=r"--num-layers 3 .*--pipeline-model-parallel-size 4 .*at most 3"):
        deal_layers(3, 4, 1, "loop")
    with pytest.raises(ValueError, match=r"must be at least 1"):
        deal_layers(3, 0, 1, "loop")
    with pytest.raises(
        ValueError, match=r"--num-layers 3 leaves .* 2 stages of 2 chunks .*at most 3 chunks of"
    ):
        deal_layers(3, 2, 2, "loop")
    with pytest.raises(ValueError, match=r"--num-layers 1 and 2 more .* 4 .*at most 3 stages"):
        deal_layers(1, 4, 1, "loop", **ACCOUNTS)
    with pytest.raises(
        ValueError, match=r"first-pipeline-num-layers 1: its stage has 2 chunks, .*at least 2"
    ):
        deal_layers(8, 2, 2, "loop", first=1)
    with pytest.raises(ValueError, match=r"layers 5 and .*layers 4 leave 1 of --num-layers 10 .*at least 2"):
        deal_layers(10, 4, 1, "loop", first=5, last=4)
    with pytest.raises(ValueError, match=r"first-.* 3 and .*last-.* 4 make 7 .*--num-layers is 8.* add up"):
        deal_layers(8, 2, 1, "loop", first=3, last=4)


def test_flags_that_contradict_each_other_are_refused():
    with pytest.raises(ValueError, match=r"num-layers 2 and --account-for-loss-in-pipeline-split contradict"):
        deal_layers(8, 2, 1, "loop", last=2, account_for_loss=True)
    with pytest.raises(
        ValueError, match=r"-layout says what each .*: drop --decoder-first-pipeline-num-layers 2"
    ):
        deal_layers(8, 2, 1, "loop", first=2, layout="E|L")
    with pytest.raises(ValueError, match=r"drop --account-for-embedding-in-pipeline-split"):
        deal_layers(8, 2, 1, "loop", account_for_embedding=True, layout="E|L")


def test_chunks_are_counted_by_the_flags_that_say_them():
    assert count_chunks(16, 4) is None
    assert count_chunks(16, 4, chunks=3) == 3
    assert count_chunks(16, 4, layers_per_chunk=2) == 2
    assert count_chunks(16, 4, layers_per_chunk=4) == 1
    assert count_chunks(61, 16, layout="Et*3|(tt|)*29,m|L") == 2
    assert count_chunks(4, 2, layout="Et|t|t|tL", chunks=2) == 2


def test_layers_that_do_not_divide_into_chunks_are_refused():
    message = (
        r"--num-layers-per-virtual-pipeline-stage 2: --num-layers 10 .*--pipeline-model-parallel-size 2 .*"
        r"in chunks of 2; 1 would make several chunks, or use --num-virtual-stages-per-pipeline-rank"
    )
    with pytest.raises(ValueError, match=message):
        count_chunks(10, 2, layers_per_chunk=2)
    with pytest.raises(ValueError, match=r"--num-layers 80 .* no number would make several"):
        count_chunks(80, 3, layers_per_chunk=8)
    for wrong in (0, -1):
        with pytest.raises(ValueError, match=rf"stage {wrong}: .*; 1, 2 would make several"):
            count_chunks(8, 2, layers_per_chunk=wrong)
    with pytest.raises(ValueError, match=r"-per-pipeline-rank 2 and .*-pipeline-stage 3 say the same"):
        count_chunks(12, 2, chunks=2, layers_per_chunk=3)
    with pytest.raises(ValueError, match=r"-per-pipeline-rank 0: must be at least 1"):
        count_chunks(12, 2, chunks=0)
    with pytest.raises(ValueError, match=r"has 3 parts, which can't be dealt over --pipeline-.* 2"):
        count_chunks(2, 2, layout="Et|t|L")
    with pytest.raises(ValueError, match=r"has 4 parts, so 2 for each of --pipeline-.* 2, not 4"):
        count_chunks(4, 2, layout="Et|t|t|tL", chunks=4)
