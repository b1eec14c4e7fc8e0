"""``tools/count_communication.py`` against the metrics file of a run with the same flags."""

import json
import runpy
import sys
from pathlib import Path

import pytest

from tests.program import launch
from tests.training_harness import GPT2_SHAPE, flags, write_corpus

TOOL = Path(__file__).resolve().parents[2] / "tools" / "count_communication.py"
LAYOUT = (
    "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 "
    "--num-virtual-stages-per-pipeline-rank 2 --bf16 --train-iters 3"
).split()


@pytest.fixture
def count(monkeypatch, capsys):
    """Calls the tool with a command line; gives exit code, standard output and standard error."""

    def run(argv: list[str]) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", [str(TOOL), *argv])
        code = 0
        try:
            runpy.run_path(str(TOOL), run_name="__main__")
        except SystemExit as end:
            code = int(end.code)
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


def test_a_run_logs_what_the_tool_counts_from_its_flags(tmp_path, count):
    argv = flags(write_corpus(tmp_path / "corpus"), GPT2_SHAPE, *LAYOUT)
    argv.remove("--eod-mask-loss")
    metrics = tmp_path / "metrics.jsonl"
    job = launch(4, [*argv, "--log-communication", "--metrics-file", str(metrics)], tmp_path).wait()
    assert job.codes == [0, 0, 0, 0], job.errors
    code, output, error = count([*argv, "--world-size", "4", "--json"])
    assert code == 0, error
    counted = json.loads(output)
    assert (counted["world_size"], counted["num_microbatches"]) == (4, 8)
    last_stage = {
        f"{axis}/{kind}": figures
        for axis, kinds in counted["stages"][-1].items()
        for kind, figures in kinds.items()
    }
    assert {"tp/all_reduce", "tp/all_gather", "pp/send", "pp/all_reduce", "world/all_reduce"} == set(
        last_stage
    )
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert len(records) == 3
    for record in records:
        logged = record["communication"]
        assert all(figures.pop("exposed_ms") > 0 for figures in logged.values())
        assert logged == last_stage


def test_stages_that_send_the_same_share_the_lines_of_a_table(count):
    code, output, error = count(flags("unused", GPT2_SHAPE, "--pipeline-model-parallel-size", "4"))
    assert code == 0, error
    heading, columns, *lines = output.splitlines()
    assert heading.startswith("4 ranks: tensor 1, pipeline 4, context 1, data 1; 8 micro-batches of 1 x 32")
    assert columns.split() == ["stage", "axis", "kind", "calls", "bytes"]
    # Activations of 32 x 64 float32 numbers, 8 of them each way.
    assert [line.split() for line in lines if " send " in line] == [
        ["0", "pp", "send", "8", "65,536"],
        ["1-2", "pp", "send", "16", "131,072"],
        ["3", "pp", "send", "8", "65,536"],
    ]


def test_what_does_not_change_the_count_may_be_left_out(count):
    model = [*GPT2_SHAPE, *"--micro-batch-size 1 --vocab-size 101 --tensor-model-parallel-size 2".split()]
    lengths = ("", "--train-samples 800", "--lr-warmup-samples 8", "--lr-warmup-iters 9 --lr 1e-3")
    given = (*lengths, "--train-data-path x")
    found = {count([*model, *words.split(), "--json"]) for words in given}
    (said,) = {(code, output) for code, output, _ in found}
    assert said[0] == 0, found
    counted = json.loads(said[1])
    assert (counted["world_size"], counted["num_microbatches"]) == (2, 1)
    # Four a layer, one each for the embeddings and the output layer's input, and two for the loss.
    assert counted["stages"][0]["tp"]["all_reduce"]["calls"] == 4 * 4 + 2 + 2


def test_help_begins_with_the_tool_s_own_flags(count):
    code, output, error = count(["--help"])
    assert (code, error) == (0, "")
    own, theirs = output.index("--world-size INT"), output.index("The flags of pretrain_gpt.py")
    assert output.index("Count what each rank of a training run sends") < own < theirs
    assert "--tensor-model-parallel-size INT" in output[theirs:]


@pytest.mark.parametrize("size", ["0", "-1"])
def test_a_world_without_ranks_is_refused(count, size):
    code, _, error = count(flags("unused", GPT2_SHAPE, "--world-size", size))
    assert code == 2
    assert error.endswith(f"error: --world-size {size}: a job has at least 1 rank\n")
    assert error.count("\n") == 1


def test_a_world_that_the_layout_does_not_divide_is_refused(count):
    argv = flags("unused", GPT2_SHAPE, "--tensor-model-parallel-size", "2", "--world-size", "3")
    code, _, error = count(argv)
    assert code == 1
    assert "world size 3 is not a multiple of --tensor-model-parallel-size 2" in error
    assert "Traceback" not in error
