"""Which samples a run sees: blends to their end, validation sets, and no resume with other data."""

import os
import shutil

import numpy as np
import pytest

from megatron.training.metrics import Metrics
from megatron.training.step import evaluation_losses
from megatron.training.training import build_hooks, train
from tests.distributed.training.test_evaluation import Records
from tests.harness import run_ranks
from tests.training_harness import VOCAB, flags, start, train_run, write_corpus

TINY = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32".split()


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "data").mkdir()
    for seed, name in enumerate("ab"):
        write_corpus(tmp_path / "data" / name, documents=120, seed=seed)
    return tmp_path / "data"


def line(paths, *more):
    return [*flags("-", TINY, "--data-path", *paths.split()), *more]


def run_to_its_end(argv):
    run = start(argv)
    records = Records()
    run.metrics = Metrics([records])
    train(run, build_hooks(run))
    return run.progress.consumed_samples, [(one.split, one.number) for one in records.evaluations]


def test_a_blend_of_many_tiny_weights_runs_to_its_end(folder, tmp_path):
    """On tensor-parallel ranks and with nothing built yet, validation and test included."""
    words = " ".join(f"0.0001 {folder}/a" for _ in range(20)) + f" 1 {folder}/b"
    argv = line(
        words, "--split", "60,20,20", "--train-iters", "4", "--eval-iters", "2", "--eval-interval", "2"
    )
    argv += ["--tensor-model-parallel-size", "2", "--data-cache-path", str(tmp_path / "cold")]
    both = run_ranks(2, run_to_its_end, argv, timeout_seconds=60)
    assert both == [(32, [*[("valid", None)] * 3, ("test", None)])] * 2


def losses_of_validation_sets(argv):
    run = start(argv)
    return {data.number: evaluation_losses(run, data)["lm loss"] for data in run.readers.evaluation}


def test_each_validation_set_has_its_own_loss(folder, tmp_path):
    files = tmp_path / "files.json"
    files.write_text(f'{{"train": ["{folder}/a"], "valid": ["{folder}/a", "{folder}/b"]}}')
    base = flags("-", TINY, "--train-iters", "1", "--eval-iters", "2")
    del base[base.index("--data-path") : base.index("--data-path") + 4]
    apart = [*base, "--per-split-data-args-path", str(files), "--multiple-validation-sets"]
    alone = [
        [*base, "--train-data-path", f"{folder}/a", "--valid-data-path", f"{folder}/{name}"] for name in "ab"
    ]
    (both,) = run_ranks(1, losses_of_validation_sets, apart)
    (lonely,) = run_ranks(1, losses_one_by_one, alone)
    assert both == {0: lonely[0], 1: lonely[1]}
    assert lonely[0] != lonely[1]


def losses_one_by_one(command_lines):
    return [losses_of_validation_sets(argv)[None] for argv in command_lines]


def saved_run(argv):
    train_run(argv)


def refusals(command_lines):
    """What each run says as it starts, if it does not."""
    said = []
    for argv in command_lines:
        try:
            start(argv)
            said.append(None)
        except ValueError as error:
            said.append(str(error))
    return said


def test_a_run_is_not_resumed_with_other_data(folder, tmp_path):
    more = ("--split", "90,10,0", "--train-iters", "2", "--save", str(tmp_path / "saved"))
    run_ranks(1, saved_run, line(f"1 {folder}/a 3 {folder}/b", *more))

    def variant(name):
        shutil.copytree(folder, tmp_path / name, ignore=shutil.ignore_patterns("cache"))
        os.utime(tmp_path / name / "a.idx", (0, 0))
        return tmp_path / name

    moved, changed, retokenized = map(variant, ("moved", "changed", "retokenized"))
    tokens = np.memmap(changed / "b.bin", np.uint16, "r+")
    tokens[100] = (tokens[100] + 1) % VOCAB
    tokens.flush()
    write_corpus(retokenized / "a", documents=120, seed=9)

    def resumed(folder, weight="1", *further):
        return line(f"{weight} {folder}/a 3 {folder}/b", *more, "--load", str(tmp_path / "saved"), *further)

    said = run_ranks(
        1,
        refusals,
        [
            resumed(moved),
            resumed(changed),
            resumed(retokenized),
            resumed(folder, "1", "--mid-level-dataset-surplus", "0.1"),
            resumed(folder, "2"),
            resumed(folder, "1", "--split", "80,20,0"),
            resumed(changed, "1", "--finetune"),
            resumed(retokenized, "2", "--split", "80,20,0", "--finetune"),
        ],
    )[0]
    same, one_token, other_tokens, surplus, weights, split, *finetuned = said
    assert same is None
    assert finetuned == [None, None]
    assert "the training data differs from what the checkpoint's run has read" in one_token
    assert one_token.count(" in the checkpoint, ") == 1
    assert "\n  dataset 2, content: " in one_token
    assert "--finetune" in one_token
    assert "\n  dataset 1, content: " in other_tokens
    assert "\n  --mid-level-dataset-surplus: 0.005 in the checkpoint, 0.1 now" in surplus
    assert f"--data-path 2 {folder}/a 3 {folder}/b now" in weights
    assert "--split 90,10,0 in the checkpoint, --split 80,20,0 now" in split
