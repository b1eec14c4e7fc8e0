import json
from pathlib import Path

import pytest

from megatron.training.arguments import flag_sections, parse_arguments
from megatron.training.flags import flags_of
from megatron.training.foreign_flags import FAMILIES, FOREIGN_FLAGS, FOREIGN_VALUES, PREPROCESSING_FLAGS

KNOWN = json.loads(Path(__file__).with_name("known_flags.json").read_text())
OURS = {
    spelling: flag for section in flag_sections() for flag in flags_of(section) for spelling in flag.spellings
}
ENOUGH = ["--num-layers=2", "--hidden-size=64", "--num-attention-heads=4", "--seq-length=32", "--lr=1e-3",
          "--micro-batch-size=2", "--train-iters=10", "--mock-data"]  # fmt: skip


def outcome(capsys, *words):
    """("accepted" | "refused", what was said on one line) of a command line."""
    code = 0
    try:
        parse_arguments([*ENOUGH, *words], "test")
    except SystemExit as stop:
        code = stop.code
    error = capsys.readouterr().err
    assert (code, error.count("\n")) in ((0, 0), (2, 1))
    return "refused" if code else "accepted", error


def test_no_known_flag_is_unknown_here():
    assert len(KNOWN) == 270
    strange = [row["flag"] for row in KNOWN if row["flag"] not in OURS and row["flag"] not in FOREIGN_FLAGS]
    assert strange == []


def test_no_flag_is_both_ours_and_foreign():
    assert not set(OURS) & set(FOREIGN_FLAGS)


@pytest.mark.parametrize("row", KNOWN, ids=lambda row: row["flag"])
def test_known_flags_take_as_many_values_as_scripts_give(row):
    name = row["flag"]
    if name in OURS:
        flag = OURS[name]
        takes = "switch" if "switch" in flag.type else "list" if flag.nargs else "value"
    else:
        takes = {0: "switch", None: "value"}.get(FOREIGN_FLAGS[name].nargs, "list")
    # What scripts give as one value may be a list here: the number of experts of each layer.
    assert takes == row["takes"] or (takes, row["takes"]) == ("list", "value")


@pytest.mark.parametrize("name", sorted(FOREIGN_FLAGS))
def test_each_foreign_flag_is_accepted_or_refused_in_one_line(name, capsys, caplog):
    foreign = FOREIGN_FLAGS[name]
    words = [name] if foreign.nargs == 0 else [name, "7"]
    verdict, said = outcome(capsys, *words)
    if foreign.accepted:
        assert verdict == "accepted"
        assert [record.getMessage() for record in caplog.records] == [
            f"{name} has no meaning here: {foreign.reason}"
        ]
    else:
        assert verdict == "refused"
        assert f"{name}: {foreign.reason}" in said


def test_what_refusals_name_exists():
    """Every flag that a refusal sends the user to is a flag here."""
    texts = [foreign.reason for foreign in FOREIGN_FLAGS.values()] + list(FAMILIES.values())
    texts += [text for values in FOREIGN_VALUES.values() for text in values.values()]
    named = {word.strip(",.;:()") for text in texts for word in text.split() if word.startswith("--")}
    assert named - {"--profile", "--timing-log-level"} <= set(OURS)


@pytest.mark.parametrize(
    "words",
    [
        ["--zero-stage", "0"],
        ["--expert-model-parallel-size", "1"],
        ["--data-impl", "mmap"],
        ["--dataset-impl", "mmap"],
        ["--timing-log-level", "0"],
        ["--exp-avg-dtype", "fp32"],
        ["--extra-vocab-size", "0"],
        ["--attention-head-type", "multihead"],
        ["--num-distributed-optimizer-instances", "1"],
    ],
)
def test_a_refused_flag_with_a_harmless_value_is_accepted(words, capsys, caplog):
    assert outcome(capsys, *words)[0] == "accepted"
    assert f"{' '.join(words)} has no meaning here" in caplog.text


def test_all_refusals_are_said_at_once(capsys):
    words = "--num-experts 8 --moe-router-topk 2 --use-mpi --spec a b --num-experts 4"
    verdict, said = outcome(capsys, *words.split())
    assert verdict == "refused"
    assert "--num-experts, --moe-router-topk: mixture of experts is not built" in said
    assert "--use-mpi: " in said
    assert "--spec: " in said


@pytest.mark.parametrize(
    ("words", "use"),
    [
        (["--position-embedding-type", "alibi"], "use rope"),
        (["--tokenizer-type", "PretrainedFromHF"], "use HuggingFaceTokenizer"),
        (["--tokenizer-type", "MultimodalTokenizer"], "models of images are not built"),
        (["--tokenizer-type", "NullMultimodalTokenizer"], "models of images are not built"),
        (["--tokenizer-type", "SFTTokenizer"], "use HuggingFaceTokenizer for text"),
        (["--dataloader-type", "external"], "use single or cyclic"),
        (["--optimizer", "muon"], "use adam"),
        (["--cp-comm-type", "a2a+p2p"], "a2a+p2p: hierarchies of two types are not built; use p2p"),
        (["--cp-comm-type", "p2p", "a2a", "p2p"], "error: --cp-comm-type takes one type, which all layers"),
    ],
)
def test_values_that_others_know_are_refused_with_what_to_use(words, use, capsys):
    verdict, said = outcome(capsys, *words)
    assert verdict == "refused"
    assert words[0] in said
    assert use in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--num-distributed-optimizer-instances 2", "divided over all data-parallel ranks, not over groups"),
        ("--init-model-with-meta-device", "makes its own parameters where they stay; leave it out"),
    ],
)
def test_what_sounds_like_zero_3_and_is_not_has_an_answer_of_its_own(words, said, capsys):
    verdict, answer = outcome(capsys, *words.split())
    assert verdict == "refused"
    assert said in answer
    assert "optim_grads_params" not in answer


def test_other_ranks_do_not_repeat_the_notes(caplog, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    parse_arguments([*ENOUGH, "--use-flash-attn"], "test")
    assert caplog.text == ""


# A choice of what Megatron-LM's releases from 23.08 on know and our own flags do not.
MEGATRON_LM = """
decoupled-lr decoupled-min-lr empty-unused-memory-level fp8-format fp8-margin fp8-interval
fp8-amax-history-len fp8-amax-compute-algo use-cpu-initialization
no-persist-layer-norm log-progress timing-log-level timing-log-option no-initialization
ckpt-fully-parallel-save ckpt-fully-parallel-load use-dist-ckpt dist-ckpt-format skip-train
save-retain-interval use-rope-scaling squared-relu use-torch-fsdp2
barrier-with-L1-time no-barrier-with-level-1-timing wandb-save-dir use-sharp
use-ring-exchange-p2p standalone-embedding-stage overlap-p2p-communication no-overlap-p2p-communication
delay-grad-reduce no-delay-grad-reduce use-tp-pp-dp-mapping
init-method-xavier-uniform fp32-residual-connection onnx-safe openai-gelu adlr-autoresume
adlr-autoresume-interval data-parallel-random-init no-data-sharding test-mode activations-checkpoint-method
activations-checkpoint-granularity query-in-block-prob dataset-impl
lazy-mpu-init bert-load mask-prob short-seq-prob sample-rate mmap-warmup fp16-lm-cross-entropy
rotary-interleaved no-contiguous-buffers-in-local-ddp no-manual-gc-eval use-legacy-models no-one-logger
encoder-num-layers yaml-cfg log-straggler window-size embedding-init-method-std decrease-batch-size-if-needed
use-nccl-ub
""".split()


@pytest.mark.parametrize("name", MEGATRON_LM)
def test_flags_of_megatron_lm_are_known(name):
    assert f"--{name}" in FOREIGN_FLAGS


@pytest.mark.parametrize("prefix", sorted(FAMILIES))
def test_a_family_is_refused_whatever_its_flags_are(prefix, capsys):
    name = f"{prefix.removesuffix('-')}-thing-of-tomorrow"
    verdict, said = outcome(capsys, name, "3")
    assert verdict == "refused"
    assert f"{name}: {FAMILIES[prefix]}" in said
    assert "unknown" not in said


def test_no_family_holds_a_flag_of_ours():
    assert not [flag for flag in OURS for prefix in FAMILIES if flag.startswith(prefix)]


def test_unknown_and_refused_flags_are_said_together(capsys):
    words = "--nonsense 3 --use-mpi --micro-batchsize 3 --moe-router-new=3 --moe-router-topk 2"
    verdict, said = outcome(capsys, *words.split())
    assert verdict == "refused"
    assert (
        "error: unknown flag --nonsense; unknown flag --micro-batchsize; did you mean --micro-batch-size?; "
        in said
    )
    assert "; --use-mpi: start the script with torchrun or srun, and leave it out" in said
    assert "; --moe-router-topk, --moe-router-new: mixture of experts is not built" in said


def test_names_of_flags_that_mean_something_else_are_not_hinted_at(capsys):
    for name in ("--eval-size-x", "--lr-head", "--data-seed", "--log-dir-x", "--save-x-steps"):
        assert outcome(capsys, name, "3")[1].endswith(f"unknown flag {name}\n")


def test_preprocessing_flags():
    assert PREPROCESSING_FLAGS["--dataset-impl"].accepts(["mmap"])
    assert not PREPROCESSING_FLAGS["--dataset-impl"].accepts(["lazy"])
