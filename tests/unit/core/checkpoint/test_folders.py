import logging

import pytest

from megatron.core.checkpoint import CheckpointError, CheckpointNotFoundError, find, survey
from megatron.core.checkpoint.folders import begin_partial, publish


def _complete(root, name):
    folder = root / name
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text(name)
    return folder


def test_the_tracker_is_obeyed(tmp_path):
    _complete(tmp_path, "iter_0000005")
    _complete(tmp_path, "iter_0000010")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("5\n")
    assert find(tmp_path).name == "iter_0000005"
    assert find(tmp_path, 10).name == "iter_0000010"


def test_without_a_tracker_the_newest_complete_one_is_taken(tmp_path, caplog):
    _complete(tmp_path, "iter_0000005")
    _complete(tmp_path, "iter_10000000")
    (tmp_path / "iter_10000001").mkdir()
    _complete(tmp_path, "iter_10000002.partial")
    with caplog.at_level(logging.INFO, logger="megatron"):
        assert find(tmp_path).name == "iter_10000000"
    assert "iter_10000001" in caplog.text
    assert "iter_10000002.partial" in caplog.text
    assert "taking the newest complete iteration, 10000000" in caplog.text


def test_what_is_not_there_is_an_error_that_lists_what_is(tmp_path):
    with pytest.raises(CheckpointNotFoundError, match="nowhere does not exist"):
        find(tmp_path / "nowhere")
    with pytest.raises(CheckpointNotFoundError, match="complete iterations: none"):
        find(tmp_path)
    _complete(tmp_path, "iter_0000005")
    (tmp_path / "iter_0000010.partial").mkdir()
    with pytest.raises(
        CheckpointNotFoundError, match=r"iteration 999 .*iterations: 5; unfinished: iter_0000010"
    ):
        find(tmp_path, 999)
    with pytest.raises(CheckpointNotFoundError, match="iteration 10 "):
        find(tmp_path, 10)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("15")
    with pytest.raises(CheckpointNotFoundError, match=r"iteration 15 \(named by latest"):
        find(tmp_path)
    with pytest.raises(CheckpointNotFoundError, match="give the folder above"):
        find(tmp_path / "iter_0000005")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("release")
    with pytest.raises(CheckpointError, match="holds 'release'"):
        find(tmp_path)


def test_a_long_list_is_cut_short(tmp_path):
    for step in range(1, 26):
        _complete(tmp_path, f"iter_{step:07d}")
    with pytest.raises(
        CheckpointNotFoundError, match=r"complete iterations: 5 older, 6, 7, .*, 25; unfinished"
    ):
        find(tmp_path, 99)


def test_only_a_root_where_no_save_came_to_its_end_is_empty(tmp_path):
    assert survey(tmp_path / "nowhere").empty
    assert survey(tmp_path).empty
    (tmp_path / "iter_0000005.partial").mkdir()
    assert survey(tmp_path).empty
    (tmp_path / "iter_0000005").mkdir()
    assert not survey(tmp_path).empty
    (tmp_path / "iter_0000005").rmdir()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("5")
    assert not survey(tmp_path).empty


def test_a_save_clears_what_dead_ones_left_and_nothing_else(tmp_path, caplog):
    _complete(tmp_path, "iter_0000005")
    _complete(tmp_path, "iter_0000005.replaced")
    (tmp_path / "iter_0000010.partial").mkdir()
    (tmp_path / "iter_0000010.partial" / "rank_00000.safetensors").write_text("half")
    _complete(tmp_path, "iter_0000015.replaced")
    (tmp_path / "notes").mkdir()
    assert find(tmp_path, 15).name == "iter_0000015.replaced"
    begin_partial(tmp_path, 20)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "iter_0000005",
        "iter_0000015",
        "iter_0000020.partial",
        "notes",
    ]
    assert find(tmp_path, 5).joinpath("manifest.json").read_text() == "iter_0000005"
    assert "removing" in caplog.text
    assert "iter_0000010.partial" in caplog.text


def test_a_foreign_folder_in_the_way_is_moved_and_never_deleted(tmp_path):
    foreign = tmp_path / "iter_0000005" / "mp_rank_00"
    foreign.mkdir(parents=True)
    (foreign / "model_optim_rng.pt").write_text("precious")
    partial = begin_partial(tmp_path, 5)
    (partial / "manifest.json").write_text("new")
    final = publish(tmp_path, 5, "0123456789abcdef")
    assert (final / "manifest.json").read_text() == "new"
    moved = tmp_path / "iter_0000005.foreign-01234567" / "mp_rank_00" / "model_optim_rng.pt"
    assert moved.read_text() == "precious"
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "5"
