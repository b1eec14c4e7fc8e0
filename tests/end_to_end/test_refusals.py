"""What cannot be run is refused before anything is started: in one line, on rank 0, with the way out."""

import itertools
import os
import tempfile
import time
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models

from megatron.training import initialize, training
from tests.program import launch
from tests.training_harness import flags, write_corpus

TINY = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32".split()


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus") / "corpus")


def one_line(job):
    """What rank 0 says, if it is one line and nobody else says anything."""
    assert job.errors[0].count("\n") == 1, job.errors
    assert not any(job.errors[1:]), job.errors
    assert not any("Traceback" in output for output in job.outputs)
    return job.errors[0].rstrip("\n")


MISFITS = [
    (
        4,
        "--hidden-size 48 --num-attention-heads 6 --tensor-model-parallel-size 4",
        "--num-attention-heads 6 does not divide by --tensor-model-parallel-size 4: give a tensor-parallel "
        "size of 1, 2, 3, 6, or a multiple of 4 heads",
    ),
    (
        3,
        "--tensor-model-parallel-size 2",
        "world size 3 is not a multiple of --tensor-model-parallel-size 2 x --pipeline-model-parallel-size 1 "
        "= 2: start 2 or 4 ranks, or choose sizes whose product is one of 1, 3",
    ),
    (
        2,
        "--seq-length 128 --max-position-embeddings 64",
        "--seq-length 128 is longer than --max-position-embeddings 64; raise the latter to at least 128",
    ),
    (
        1,
        "--global-batch-size 6 --micro-batch-size 4",
        "--global-batch-size 6 is not a multiple of --micro-batch-size 4 x data-parallel size 1 = 4: give "
        "--global-batch-size 4 or 8, or one of --micro-batch-size 1, 2, 3, 6",
    ),
    (
        2,
        "--pipeline-model-parallel-size 4",
        "--pipeline-model-parallel-size 4 is more than --num-layers 2: every stage needs a layer, so give at "
        "most 2 stages",
    ),
]


def test_numbers_that_do_not_fit_are_refused_before_ranks_meet(prefix, tmp_path):
    jobs = []
    for number, (world, more, _) in enumerate(MISFITS):
        folder = tmp_path / str(number)
        folder.mkdir()
        jobs.append(launch(world, flags(prefix, TINY, *more.split()), folder, pretend_to_be_alone))
    for job, (world, _, said) in zip(jobs, MISFITS, strict=True):
        job.wait()
        assert job.codes == [2] * world
        line = one_line(job)
        assert line.endswith(f"error: {said}")
        assert not any(job.outputs)


def pretend_to_be_alone():
    """Wait at a port that nobody opens, if it comes to that."""
    os.environ["MASTER_PORT"] = "1"


def test_a_lone_rank_of_many_does_not_wait_to_say_so(prefix, tmp_path):
    began = time.monotonic()
    argv = flags(prefix, TINY, "--tensor-model-parallel-size", "3")
    job = launch(1, argv, tmp_path, pretend_to_be_the_first_of_four).wait()
    assert job.codes == [2]
    assert "world size 4 is not a multiple" in one_line(job) or "does not divide" in one_line(job)
    assert time.monotonic() - began < 10


def pretend_to_be_the_first_of_four():
    os.environ["WORLD_SIZE"] = "4"


def see_no_gpu():
    initialize.device_type = lambda: "cpu"


def test_what_the_machine_lacks_is_refused_as_a_command_line_that_cannot_be_run(prefix, tmp_path):
    missing = ["--tokenizer-type", "GPT2BPETokenizer", "--vocab-file", "no.json", "--merge-file", "no.txt"]
    model = write_tokenizer(tmp_path)
    small = f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {model} --vocab-size 5".split()
    cases = {
        "--vocab-file no.json: no such file; GPT2BPETokenizer wants": missing,
        "--distributed-backend nccl needs GPUs": "--distributed-backend nccl".split(),
        "--vocab-size 5: the vocabulary of": small,
    }
    jobs = []
    for number, more in enumerate(cases.values()):
        says = tmp_path / str(number)
        says.mkdir()
        jobs.append(launch(2, flags(prefix, TINY, *more), says, see_no_gpu))
    for job, said in zip(jobs, cases, strict=True):
        job.wait()
        assert job.codes == [2, 2]
        assert one_line(job).startswith(f"error: {said}")


def write_tokenizer(folder):
    tokenizer = Tokenizer(models.WordLevel({str(number): number for number in range(9)}, unk_token="0"))
    tokenizer.save(str(folder / "tokenizer.json"))
    return str(folder / "tokenizer.json")


def read_data_as_nobody():
    """Be a user whom permissions stop, once the program itself is loaded."""
    attach_data = training.attach_data

    def attach_as_nobody(*arguments):
        if os.geteuid() == 0:
            os.seteuid(65534)
        attach_data(*arguments)

    training.attach_data = attach_as_nobody


def test_wrong_data_paths(prefix, tmp_path):
    folder = str(Path(prefix).parent)
    jsonl = tmp_path / "text.jsonl"
    jsonl.write_text('{"text": "1 2 3"}\n')
    unreadable = write_corpus(tmp_path / "unreadable")
    os.chmod(f"{unreadable}.bin", 0)
    top = Path(tempfile.gettempdir())
    for path in (tmp_path, Path(prefix).parent):
        for above in itertools.takewhile(lambda one: one != top, (path, *path.parents)):
            above.chmod(0o755)
    cases = {
        f"{prefix}.bin": f"Give the prefix without the suffix: {prefix}",
        folder: f"That is a folder; give one of the prefixes in it: {prefix}",
        f"{prefix}s": f"Did you mean {prefix}?",
        str(jsonl): "is itself a file: give the prefix that tools/preprocess_data.py made from it.",
        unreadable: "The user that runs this may not read the file: check its permissions",
    }
    jobs = []
    for number, path in enumerate(cases):
        says = tmp_path / str(number)
        says.mkdir()
        jobs.append(launch(2, flags(prefix, TINY, "--data-path", path), says, read_data_as_nobody))
    for job, (path, hint) in zip(jobs, cases.items(), strict=True):
        job.wait()
        assert job.codes == [1, 1]
        line = one_line(job)
        assert line.removeprefix("[rank 0] ").startswith(
            f"error: no dataset at the data path {path!r}: looked for {path}.idx ("
        )
        assert f"{path}.bin (" in line
        assert hint in line


@pytest.mark.parametrize("workers", [0, 2])
def test_tokens_outside_the_vocabulary(prefix, tmp_path, workers):
    argv = flags(prefix, TINY, "--vocab-size", "20", "--num-workers", str(workers))
    job = launch(1, argv, tmp_path).wait()
    assert job.codes == [1]
    assert one_line(job) == (
        f"error: {prefix}: holds the token 100, but the vocabulary has 20; was the data made with this "
        "tokenizer?"
    )
