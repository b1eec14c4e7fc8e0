import json
from pathlib import Path

import pytest

from megatron.training.arguments import flag_sections, parse_arguments
from megatron.training.flags import flags_of
from megatron.training.foreign_flags import FOREIGN_FLAGS, FOREIGN_VALUES

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
    texts = [foreign.reason for foreign in FOREIGN_FLAGS.values()]
    texts += [text for values in FOREIGN_VALUES.values() for text in values.values()]
    named = {word.strip(",.;:()") for text in texts for word in text.split() if word.startswith("--")}
    assert named - {"--profile"} <= set(OURS)


@pytest.mark.parametrize(
    "words",
    [
        ["--zero-stage", "0"],
        ["--expert-model-parallel-size", "1"],
        ["--data-impl", "mmap"],
        ["--vocab-extra-ids", "0"],
        ["--attention-head-type", "multihead"],
    ],
)
def test_a_refused_flag_with_a_harmless_value_is_accepted(words, capsys, caplog):
    assert outcome(capsys, *words)[0] == "accepted"
    assert f"{' '.join(words)} has no meaning here" in caplog.text


def test_all_refusals_are_said_at_once(capsys):
    words = "--num-experts 8 --moe-router-topk 2 --sequence-parallel --spec a b --num-experts 4"
    verdict, said = outcome(capsys, *words.split())
    assert verdict == "refused"
    assert "--num-experts, --moe-router-topk: mixture of experts is not built" in said
    assert "--sequence-parallel: " in said
    assert "--spec: " in said


@pytest.mark.parametrize(
    ("words", "use"),
    [
        (["--recompute-granularity", "selective"], "--recompute-granularity full"),
        (["--position-embedding-type", "alibi"], "use rope"),
        (["--tokenizer-type", "PretrainedFromHF"], "use HuggingFaceTokenizer"),
        (["--dataloader-type", "external"], "use single or cyclic"),
        (["--optimizer", "muon"], "use adam"),
    ],
)
def test_values_that_others_know_are_refused_with_what_to_use(words, use, capsys):
    verdict, said = outcome(capsys, *words)
    assert verdict == "refused"
    assert words[0] in said
    assert use in said


def test_other_ranks_do_not_repeat_the_notes(caplog, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    parse_arguments([*ENOUGH, "--use-flash-attn"], "test")
    assert caplog.text == ""
