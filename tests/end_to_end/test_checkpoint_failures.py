"""Checkpoints that are not there, broken, or cannot be written: one line, a code above 0, nothing lost."""

import functools
import json
import os
import shutil
from pathlib import Path

import pytest

from megatron.core.checkpoint import store
from tests.program import launch
from tests.training_harness import SHAPES, flags, write_corpus

SMALL = [*SHAPES["gpt2"], "--num-layers", "2", "--hidden-size", "32", "--train-iters", "20"]


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus") / "corpus")


@pytest.fixture(scope="module")
def saved(prefix, tmp_path_factory):
    """A root with iterations 2 and 4."""
    root = tmp_path_factory.mktemp("saved") / "root"
    says = tmp_path_factory.mktemp("says")
    argv = flags(prefix, SMALL, "--save", str(root), "--save-interval", "2", "--exit-interval", "4")
    assert launch(1, argv, says).wait().codes == [0]
    return root


def refused(argv, folder, ranks=1, prepare=None):
    """What the job says in one line before it ends without training."""
    job = launch(ranks, argv, folder, prepare).wait()
    assert job.codes == [1] * ranks, job.errors
    lines = "".join(job.errors).splitlines()
    assert len(lines) == 1, job.errors
    assert not any("training step" in output or "iteration  " in output for output in job.outputs)
    return lines[0]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--load", "{root}/typo"], "{root}/typo does not exist"),
        (["--load", "{root}", "--ckpt-step", "999"], "iteration 999 (asked for) is not there"),
        (["--load", "{root}", "--save", "{root}", "--ckpt-step", "999"], "complete iterations: 2, 4"),
        (["--pretrained-checkpoint", "{root}/typo"], "{root}/typo does not exist"),
        (["--load", "{root}/typo", "--save", "{root}"], "{root}/typo does not exist"),
        (["--load", "{here}", "--save", "{here}", "--exit-on-missing-checkpoint"], "no checkpoint found"),
        (["--load", "{root}/iter_0000004"], "is itself the folder of one checkpoint"),
        (["--load", "{root}", "--seed", "8"], "--seed 7 in the checkpoint, --seed 8 now"),
        (["--save", "{root}/latest_checkpointed_iteration.txt"], "iteration.txt is a file; give a folder"),
    ],
)
def test_what_is_not_there_never_becomes_a_random_start(prefix, saved, tmp_path, given, said):
    places = {"root": saved, "here": tmp_path}
    job = launch(1, flags(prefix, SMALL, *(word.format(**places) for word in given)), tmp_path).wait()
    assert job.codes == [1]
    assert said.format(**places) in job.errors[0]
    assert job.errors[0].startswith("error: ")
    assert "Traceback" not in job.errors[0]
    assert "training step" not in job.outputs[0]


def test_a_run_that_may_replace_another_s_checkpoints_says_so(prefix, tmp_path):
    root = str(tmp_path / "root")
    argv = flags(prefix, SMALL, "--save", root, "--train-iters", "2", "--save-interval", "1")
    said = f"{root} already holds checkpoints up to iteration 2, which this run does not go on from"
    first = launch(1, argv, tmp_path).wait()
    again = launch(1, argv, tmp_path).wait()
    resumed = launch(1, [*argv, "--load", root, "--train-iters", "3"], tmp_path).wait()
    assert [job.codes for job in (first, again, resumed)] == [[0]] * 3, resumed.errors
    assert [said in job.outputs[0] for job in (first, again, resumed)] == [False, True, False]


def test_a_fresh_start_is_said(prefix, tmp_path):
    root = str(tmp_path / "root")
    argv = flags(prefix, SMALL, "--load", root, "--save", root, "--exit-interval", "1")
    job = launch(1, argv, tmp_path).wait()
    assert job.codes == [0], job.errors
    assert "(--load equals --save): starting from random weights" in job.outputs[0]
    assert (tmp_path / "root" / "latest_checkpointed_iteration.txt").read_text() == "1"


def spoil_tracker(root):
    (root / "latest_checkpointed_iteration.txt").write_text("release\n")


def point_tracker_elsewhere(root):
    (root / "latest_checkpointed_iteration.txt").write_text("6")


def lose_shard(root):
    (root / "iter_0000004" / "rank_00000.safetensors").unlink()


def cut_shard(root):
    shard = root / "iter_0000004" / "rank_00000.safetensors"
    os.truncate(shard, shard.stat().st_size - 1)


def swap_shard(root):
    shutil.copy(root / "iter_0000002" / "rank_00000.safetensors", root / "iter_0000004")


def edit_manifest(root):
    path = root / "iter_0000004" / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["state"]["progress"]["iteration"] = 3
    path.write_text(json.dumps(manifest))


def lose_manifest(root):
    (root / "iter_0000004" / "manifest.json").unlink()


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (spoil_tracker, "holds 'release' and not the number of an iteration"),
        (point_tracker_elsewhere, "iteration 6 (named by latest_checkpointed_iteration.txt) is not there"),
        (lose_shard, "rank_00000.safetensors"),
        (cut_shard, "rank_00000.safetensors"),
        (swap_shard, "rank_00000.safetensors"),
        (edit_manifest, "was changed after it was written"),
        (lose_manifest, "iteration 4 (named by latest_checkpointed_iteration.txt) is not there"),
    ],
)
def test_what_is_broken_is_named_even_where_the_run_saves_too(prefix, saved, tmp_path, spoil, said):
    root = tmp_path / "root"
    shutil.copytree(saved, root)
    spoil(root)
    argv = flags(prefix, SMALL, "--load", str(root), "--save", str(root))
    line = refused(argv, tmp_path)
    assert said in line
    assert str(root) in line


@pytest.mark.parametrize("spoil", [lose_shard, spoil_tracker])
def test_of_several_ranks_one_says_it(prefix, saved, tmp_path, spoil):
    """A missing file is found by ranks that have met; a broken tracker before they do."""
    root = tmp_path / "root"
    shutil.copytree(saved, root)
    spoil(root)
    refused(flags(prefix, SMALL, "--load", str(root)), tmp_path, ranks=2)


def enter_own_folder(parent: Path) -> None:
    os.chdir(parent / os.environ["RANK"])


@pytest.mark.parametrize("relation", ["none", "older"])
def test_ranks_that_see_different_folders_do_not_start(prefix, saved, tmp_path, relation):
    """Relative names, and a working folder of its own for each rank: nodes that share no file system."""
    for rank in "01":
        (tmp_path / rank).mkdir()
    shutil.copytree(saved, tmp_path / "0" / "root")
    if relation == "older":
        shutil.copytree(saved, tmp_path / "1" / "root")
        (tmp_path / "1" / "root" / "latest_checkpointed_iteration.txt").write_text("2")
    seen = {"none": "no checkpoint", "older": "root/iter_0000002"}[relation]
    argv = flags(prefix, SMALL, "--load", "root", "--save", "root")
    line = refused(argv, tmp_path, ranks=2, prepare=functools.partial(enter_own_folder, tmp_path))
    assert f"rank 1: sees {seen} where rank 0 sees root/iter_0000004" in line


def put_a_folder_in_the_way_of_rank_1() -> None:
    write = store.write_shard_file

    def write_after_spoiling(path, save_id, data):
        if os.environ["RANK"] == "1" and "0000004" in str(path):
            path.mkdir()
        return write(path, save_id, data)

    store.write_shard_file = write_after_spoiling


def test_one_rank_that_cannot_save_ends_all_and_the_checkpoint_before_stays(prefix, tmp_path):
    root = tmp_path / "root"
    argv = flags(prefix, SMALL, "--save", str(root), "--save-interval", "2", "--tensor-model-parallel-size=2")
    job = launch(4, argv, tmp_path, put_a_folder_in_the_way_of_rank_1).wait()
    assert job.codes == [1] * 4, job.errors
    lines = "".join(job.errors).splitlines()
    assert len(lines) == 1, job.errors
    assert "checkpoint of iteration 4" in lines[0]
    assert "rank 1: FileExistsError" in lines[0]
    assert (root / "latest_checkpointed_iteration.txt").read_text() == "2"
    assert sorted(path.name for path in root.iterdir() if path.is_dir()) == ["iter_0000002"]
    # The same command, without what was in the way, goes on from there.
    job = launch(4, [*argv, "--load", str(root), "--exit-interval", "4"], tmp_path).wait()
    assert job.codes == [0] * 4, job.errors
    assert "at iteration 2" in job.outputs[0]
    assert (root / "latest_checkpointed_iteration.txt").read_text() == "4"
