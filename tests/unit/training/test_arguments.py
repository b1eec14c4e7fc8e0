import dataclasses
import json

import pytest

from megatron.core.config import TransformerConfig
from megatron.training.arguments import parse_arguments, refuse_misfits, resolve
from megatron.training.config import RunConfig
from megatron.training.gpt_data import gpt_datasets
from megatron.training.plan import batch_plans, run_schedule, schedule_lengths

BASE = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 2 --lr 1e-3 "
    "--train-iters 10 --mock-data"
)


def raw(more="", base=BASE):
    return parse_arguments(f"{base} {more}".split(), "test")


def settled(more="", world=1, vocab=101, saved=None, base=BASE):
    return resolve(raw(more, base), checkpoint_config=saved, tokenizer_vocab_size=vocab, world_size=world)


def test_resolve_fills_what_follows_from_other_settings():
    config = settled("--tensor-model-parallel-size 2", world=8)
    model = config.model
    assert (model.ffn_hidden_size, model.kv_channels, model.max_position_embeddings) == (256, 16, 32)
    assert model.vocab_size == 101
    assert model.padded_vocab_size(2) == 256
    assert config.global_batch_size == 8  # micro-batch 2 x 4 replicas
    assert config.data.split == "1, 1, 1"
    assert [plan.num_microbatches for plan in batch_plans(config, 8).values()] == [1]
    assert resolve(config, None, 101, 8) == config


def test_resolve_of_a_gated_mlp_and_of_recomputation():
    model = settled("--hidden-size 100 --swiglu --recompute-granularity full").model
    assert model.ffn_hidden_size == 256  # 8 x 100 / 3 = 266, down to a multiple of 64
    assert (model.recompute_method, model.recompute_num_layers) == ("uniform", 1)


def test_default_split_of_files_and_of_no_single_file():
    files = BASE.replace("--mock-data", "--data-path corpus")
    assert settled(base=files).data.split == "969, 30, 1"
    assert settled(base=BASE.replace("--mock-data", "--train-data-path corpus")).data.split is None


def test_files_of_data_paths_stand_for_what_they_hold(tmp_path, capsys):
    (tmp_path / "list").write_text("1 a 3 b\n")
    (tmp_path / "table").write_text('{"train": ["a"], "valid": ["b"]}')
    (tmp_path / "wrong").write_text('{"train": 1}')
    without = BASE.replace("--mock-data", "")
    listed = settled(f"--data-args-path {tmp_path}/list", base=without).data
    assert listed == settled("--data-path 1 a 3 b", base=without).data
    table = settled(f"--per-split-data-args-path {tmp_path}/table", base=without).data
    assert table == settled("--train-data-path a --valid-data-path b", base=without).data
    with pytest.raises(SystemExit):
        settled(f"--per-split-data-args-path {tmp_path}/wrong", base=without)
    assert f'--per-split-data-args-path {tmp_path}/wrong, "train": 1 is no list' in capsys.readouterr().err


def test_rearranging_text_takes_a_tokenizer():
    with pytest.raises(ValueError, match="--fim-data turns samples back into text: give the tokenizer"):
        gpt_datasets(settled("--fim-data"), None, (4, 0, 0))


def test_micro_batches_of_a_step():
    (plan,) = batch_plans(settled("--global-batch-size 24", world=3), 3).values()
    assert (plan.num_microbatches, plan.data_parallel_size, plan.global_batch_size) == (4, 3, 24)


def test_the_vocabulary_comes_from_the_tokenizer_or_the_flag():
    assert settled("--vocab-size 50", vocab=None).model.vocab_size == 50
    with pytest.raises(ValueError, match=r"--tokenizer-type and its files .* or, .* --vocab-size"):
        settled(vocab=None)
    with pytest.raises(ValueError, match=r"50 tokens by --vocab-size .* 101 by the tokenizer"):
        settled("--vocab-size 50")


@pytest.mark.parametrize(
    ("flags", "kind"),
    [
        ("", "learned_absolute"),
        ("--use-rotary-position-embeddings", "rope"),
        ("--no-position-embedding", "none"),
        ("--no-position-embedding --use-rotary-position-embeddings", "rope"),
        ("--use-rotary-position-embeddings --no-position-embedding", "rope"),
        ("--no-position-embedding --position-embedding-type rope", "rope"),
        ("--position-embedding-type rope --no-position-embedding", "rope"),
    ],
)
def test_older_spellings_of_positions(flags, kind):
    assert raw(flags).model.position_embedding_type == kind


def test_lengths_in_samples():
    config = settled("--global-batch-size 8 --lr-warmup-iters 2 --lr-decay-iters 6")
    lengths = schedule_lengths(config)
    assert (lengths.warmup, lengths.decay, lengths.wsd, lengths.weight_decay) == (16, 48, None, 80)
    by_samples = BASE.replace("--train-iters 10", "--train-samples 81 --global-batch-size 8")
    config = settled(
        "--lr-warmup-fraction 0.1 --lr-decay-style WSD --lr-wsd-decay-samples 20", base=by_samples
    )
    lengths = schedule_lengths(config)
    assert (lengths.warmup, lengths.decay, lengths.wsd) == (pytest.approx(8.1), 81, 20)


def test_skipping_nans_is_asked_for_in_either_way():
    assert not settled().skips_nonfinite
    assert settled("--skip-nan-iterations").skips_nonfinite
    assert settled("--no-check-for-nan-in-loss-and-grad").skips_nonfinite


def test_plain_values_and_back():
    config = settled("--global-batch-size 4 --untie-embeddings-and-output-weights")
    config = dataclasses.replace(
        config, data=dataclasses.replace(config.data, mock_data=False, data_path=("1", "a"))
    )
    assert RunConfig.from_json(json.loads(json.dumps(config.to_json()))) == config


def test_a_config_of_another_version():
    values = settled().to_json()
    del values["logging"]["metrics_file"]
    assert RunConfig.from_json(values) == settled()
    values["model"]["hyper"] = 3
    with pytest.raises(ValueError, match=r"does not know: model\.hyper"):
        RunConfig.from_json(values)
    del values["model"]
    with pytest.raises(ValueError, match="section model"):
        RunConfig.from_json(values)


def test_every_missing_flag_is_named(capsys):
    with pytest.raises(SystemExit):
        parse_arguments(["--num-layers", "4", "--train-iters", "10"], "test")
    missing = "--hidden-size, --num-attention-heads, --seq-length, --lr, --micro-batch-size"
    assert capsys.readouterr().err.endswith(f"required flags are missing: {missing}\n")


CHECKPOINT_ARGS = (
    "--use-checkpoint-args --load folder --micro-batch-size 2 --lr 1e-3 --train-iters 10 --mock-data"
)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--seed 4294967296", "--seed 4294967296: must be at most 4294967295"),
        ("--seed 0", "--seed 0: must be at least 1"),
        ("--adam-eps 0", "--adam-eps 0.0: must be above 0"),
        ("--adam-beta2 1", "--adam-beta2 1.0: must lie in [0, 1)"),
        ("--clip-grad -1", "--clip-grad -1.0: must be 0 (off) or above"),
    ],
)
def test_numbers_out_of_range(capsys, flags, said):
    with pytest.raises(SystemExit) as stop:
        parse_arguments([*BASE.split(), *flags.split()], "test")
    assert stop.value.code == 2
    assert capsys.readouterr().err.endswith(f"error: {said}\n")


def test_the_model_of_a_checkpoint():
    saved = settled("--swiglu --hidden-dropout 0.0 --ffn-hidden-size 96")
    config = settled(
        "--recompute-granularity full --attention-dropout 0.3", saved=saved, base=CHECKPOINT_ARGS
    )
    expected = dataclasses.replace(
        saved.model,
        attention_dropout=0.3,
        recompute_granularity="full",
        recompute_method="uniform",
        recompute_num_layers=1,
    )
    assert config.model == expected
    assert type(config.model) is TransformerConfig


def test_the_model_of_a_checkpoint_refuses_another_shape():
    saved = settled()
    assert settled("--num-layers 4", saved=saved, base=CHECKPOINT_ARGS).model == saved.model
    with pytest.raises(
        ValueError, match="the checkpoint has --num-layers 4, the command line --num-layers 6"
    ):
        settled("--num-layers 6", saved=saved, base=CHECKPOINT_ARGS)


def test_the_model_of_a_checkpoint_that_is_not_there_yet():
    assert settled(f"{BASE} --use-checkpoint-args --load x").model == settled().model
    with pytest.raises(ValueError, match=r"no checkpoint yet .* missing: --num-layers, --hidden-size"):
        settled(base=CHECKPOINT_ARGS)


def test_the_schedule_on_resume():
    saved = settled("--lr 3e-4 --lr-warmup-iters 2")
    same = settled("--lr 3e-4 --lr-warmup-iters 2 --clip-grad 0.5")
    assert run_schedule(same, saved).learning_rate(2) == pytest.approx(1.5e-4)
    other = "--lr 3e-5 --lr-warmup-iters 2"
    with pytest.raises(ValueError, match=r"--lr 0\.0003 in the checkpoint, --lr 3e-05 now"):
        run_schedule(settled(other), saved)
    override = settled(f"{other} --override-opt_param-scheduler")
    assert run_schedule(override, saved).learning_rate(2) == pytest.approx(1.5e-5)
    keep = settled(f"{other} --use-checkpoint-opt_param-scheduler")
    assert run_schedule(keep, saved).learning_rate(2) == pytest.approx(1.5e-4)


@pytest.mark.parametrize(
    ("saved", "now", "lines"),
    [
        (
            "--lr-warmup-iters 2",
            "--lr-warmup-iters 3",
            ["length of the warm-up: --lr-warmup-iters 2 (4 samples) in the checkpoint, "
             "--lr-warmup-iters 3 (6 samples) now"],
        ),
        (
            "--lr-warmup-fraction 0.1 --weight-decay 0.1",
            "--lr-warmup-fraction 0.2 --weight-decay 0.2",
            ["length of the warm-up: --lr-warmup-fraction 0.1 (2 samples) in the checkpoint, "
             "--lr-warmup-fraction 0.2 (4 samples) now",
             "--weight-decay 0.1 in the checkpoint, --weight-decay 0.2 now"],
        ),
        (
            "",
            "--train-iters 20",
            ["length of the learning rate's decay: --train-iters 10 (20 samples) in the checkpoint, "
             "--train-iters 20 (40 samples) now"],
        ),
        (
            "--lr-decay-style WSD --lr-wsd-decay-iters 2 --lr-decay-iters 8",
            "--lr-decay-style WSD --lr-wsd-decay-iters 3 --lr-decay-iters 9",
            ["length of the learning rate's decay: --lr-decay-iters 8 (16 samples) in the checkpoint, "
             "--lr-decay-iters 9 (18 samples) now",
             "length of the final annealing: --lr-wsd-decay-iters 2 (4 samples) in the checkpoint, "
             "--lr-wsd-decay-iters 3 (6 samples) now"],
        ),
        (
            "--weight-decay-incr-style linear --start-weight-decay 0 --end-weight-decay 0.1",
            "--weight-decay-incr-style linear --start-weight-decay 0 --end-weight-decay 0.2",
            ["--end-weight-decay 0.1 in the checkpoint, --end-weight-decay 0.2 now"],
        ),
    ],
)  # fmt: skip
def test_a_schedule_that_differs_is_refused_in_the_words_of_the_command_line(saved, now, lines):
    with pytest.raises(ValueError, match="differs from the checkpoint's") as error:
        run_schedule(settled(now), settled(saved))
    assert str(error.value).split("\n")[1:-1] == [f"  {line}" for line in lines]


def test_vocab_and_merges_alone_mean_the_tokenizer_of_gpt2(caplog):
    files = "--vocab-file v.json --merge-file m.txt"
    assert raw(files).tokenizer.tokenizer_type == "GPT2BPETokenizer"
    assert [record.getMessage() for record in caplog.records] == [
        "--tokenizer-type is not given: GPT2BPETokenizer is taken, for --vocab-file and --merge-file"
    ]
    caplog.clear()
    assert raw(f"--tokenizer-type GPT2BPETokenizer {files}").tokenizer.tokenizer_type == "GPT2BPETokenizer"
    assert caplog.records == []
    assert raw("--vocab-file v.json --vocab-size 9").tokenizer.tokenizer_type is None


def test_a_run_without_a_vocabulary_is_refused_like_any_misfit(capsys):
    refuse_misfits(raw("--vocab-size 9"), 1)
    refuse_misfits(raw("--tokenizer-type NullTokenizer"), 1)
    with pytest.raises(SystemExit) as stop:
        refuse_misfits(raw(), 1)
    assert stop.value.code == 2
    assert "the size of the vocabulary is not known: give --tokenizer-type" in capsys.readouterr().err
