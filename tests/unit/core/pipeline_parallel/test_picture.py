"""Pictures of timelines: what is in them, and that one can read it."""

import pytest
from matplotlib.collections import PolyCollection

from megatron.core.pipeline_parallel.picture import COLOURS, MOST_NUMBERED, draw
from megatron.core.pipeline_parallel.schedules import build_schedule
from megatron.core.pipeline_parallel.simulation import simulate
from megatron.core.pipeline_parallel.timeline import TimelineEvent


def events_of(name, stages, microbatches, chunks=1, weight=1.0):
    schedule = build_schedule(name, stages=stages, microbatches=microbatches, chunks=chunks)
    times = {"forward_time": 1.0, "backward_input_time": 1.0, "backward_weight_time": weight}
    return simulate(schedule, **times).events


def boxes_of(figure):
    """Corners of all boxes, each collection with its colour."""
    (axes,) = figure.axes
    found = []
    for collection in axes.collections:
        assert isinstance(collection, PolyCollection)
        for path in collection.get_paths():
            (left, top), (right, bottom) = path.vertices.min(axis=0), path.vertices.max(axis=0)
            found.append((round(left, 6), round(right, 6), round((top + bottom) / 2, 6)))
    return found


def legend_of(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_every_action_is_a_box_of_its_stage_s_row_with_its_number():
    events = events_of("zb-v", 3, 5, 2)
    figure = draw("title", events)
    assert sorted(boxes_of(figure)) == sorted((e.start_ms, e.end_ms, e.stage) for e in events)
    texts = figure.axes[0].texts
    assert sorted(int(text.get_text()) for text in texts) == sorted(event.microbatch for event in events)
    assert len(legend_of(figure)) == 6
    assert "backward, weights, chunk 1" in legend_of(figure)


def test_waits_are_shaded_and_transfers_are_not():
    step = [
        TimelineEvent(0, "forward", 0, 0, 0.0, 1.0),
        TimelineEvent(0, "send", 0, 0, 1.0, 2.0),
        TimelineEvent(0, "wait", 0, 0, 1.0, 4.5),
        TimelineEvent(0, "backward", 0, 0, 4.5, 6.0),
    ]
    figure = draw("title", step)
    assert sorted(boxes_of(figure)) == [(0.0, 1.0, 0), (1.0, 4.5, 0), (4.5, 6.0, 0)]
    assert legend_of(figure) == [COLOURS["wait"][0], "forward", "backward"]


@pytest.mark.parametrize(("microbatches", "numbered"), [(8, {0.05, 1.0}), (40, {1.0}), (2000, set())])
def test_numbers_that_one_could_not_read_are_left_out(microbatches, numbered):
    # The weights' passes are twenty times as short as the others: their numbers go first.
    events = events_of("zb-h1", 2, microbatches, weight=0.05)
    figure = draw("title", events)
    texts = figure.axes[0].texts
    assert all(text.get_size() > 4.9 for text in texts)
    lengths = {(e.start_ms + e.end_ms) / 2: round(e.end_ms - e.start_ms, 6) for e in events}
    assert {lengths[text.get_position()[0]] for text in texts} == numbered
    assert 15 <= figure.get_size_inches()[0] <= 40


def test_a_picture_of_more_boxes_than_one_can_read_is_an_image_without_numbers():
    events = events_of("1f1b", 60, MOST_NUMBERED // 120 + 1)
    assert len(events) > MOST_NUMBERED
    figure = draw("title", events)
    assert not figure.axes[0].texts
    assert len(boxes_of(figure)) == len(events)
    assert all(collection.get_rasterized() for collection in figure.axes[0].collections)
    assert max(figure.get_size_inches()) < 60


def test_what_takes_no_time_cannot_be_drawn():
    with pytest.raises(ValueError, match="no action that takes time"):
        draw("title", [TimelineEvent(0, "forward", 0, 0, 0.0, 0.0)])
