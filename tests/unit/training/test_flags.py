import json
from dataclasses import dataclass
from typing import Literal

import pytest

from megatron.core.config import flag
from megatron.training import flags
from megatron.training.flags import FlagParser, add_flags, build, expand_files, flag_text, flags_of
from tests.unit.training.write_golden import TABLE, render


@dataclass(frozen=True)
class Sample:
    """One of each kind."""

    width: int = flag()
    """Needed."""
    rate: float = 0.5
    """A number, 50% by default."""
    kind: Literal["plain", "fancy"] | None = None
    """A choice."""
    paths: tuple[str, ...] | None = flag(None, nargs="*")
    """Several."""
    shiny: bool = False
    """A switch
    on two lines."""
    bias: bool = flag(True, off="--disable-bias")
    """A switch that turns something off."""
    epsilon: float = flag(1e-5, aliases=("--eps",))
    """Has an older spelling."""
    derived: int | None = flag(None, cli=False)
    """No flag."""


def parse(*words):
    parser = FlagParser("prog")
    add_flags(parser, Sample, {"kind": {"baroque": "not built; use fancy"}})
    return build(Sample, parser.parse_args(list(words)))


def refusal(capsys, *words):
    with pytest.raises(SystemExit) as stop:
        parse(*words)
    assert stop.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err


def test_defaults_and_types():
    assert parse("--width", "3") == Sample(width=3)
    words = "--width=3 --rate 2 --kind fancy --paths a b --shiny --disable-bias --eps 1e-3"
    got = parse(*words.split())
    assert got == Sample(3, 2.0, "fancy", ("a", "b"), True, False, 1e-3)
    assert isinstance(got.rate, float)


def test_a_switch_has_a_negation_and_the_last_flag_counts():
    assert parse("--width", "1", "--shiny", "--no-shiny", "--width", "2") == Sample(width=2)


def test_a_field_with_an_off_switch_has_no_other(capsys):
    assert "unknown flag --bias" in refusal(capsys, "--width", "1", "--bias")
    assert "unknown flag --no-bias" in refusal(capsys, "--width", "1", "--no-bias")


def test_a_missing_flag_is_named():
    with pytest.raises(ValueError, match="--width missing"):
        parse("--shiny")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--widht", "3"], "unknown flag --widht; did you mean --width?"),
        (["--wid", "3"], "unknown flag --wid; did you mean --width?"),
        (["--Width", "3"], "unknown flag --Width; did you mean --width?"),
        (["--width", "3", "--disable_bias"], "unknown flag --disable_bias; did you mean --disable-bias?"),
        (["--zzz"], "unknown flag --zzz\n"),
        (["--eps-rate", "3"], "unknown flag --eps-rate\n"),
        (["--width", "3", "stray"], "'stray' follows no flag that takes it"),
        (["--width", "three"], "--width: 'three' is not a whole number"),
        (["--width", "3.5"], "--width: '3.5' is not a whole number"),
        (["--rate", "nan"], "--rate: 'nan' is not a finite number"),
        (["--kind", "odd"], "--kind: 'odd' is not one of plain, fancy"),
        (["--kind", "baroque"], "--kind: baroque: not built; use fancy"),
        (["--rate"], "--rate: expected one argument"),
        (["@/no/such/file"], "cannot read flags from /no/such/file"),
    ],
)
def test_refused_in_one_line(capsys, words, said):
    assert said in refusal(capsys, *words)


def test_only_rank_zero_says_what_is_wrong(capsys, monkeypatch):
    monkeypatch.setattr(flags, "_SECONDS_FOR_RANK_ZERO", 0.0)
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit) as stop:
        parse("--nonsense")
    assert stop.value.code == 2
    assert capsys.readouterr().err == ""


def test_flags_from_files(tmp_path):
    (tmp_path / "inner").write_text("--kind fancy\n")
    (tmp_path / "outer").write_text(
        f"# a comment\n--width 3 --shiny   # the rest of a line\n\n--paths 'a b' c\n@{tmp_path}/inner\n"
    )
    assert parse(f"@{tmp_path}/outer", "--width", "4") == Sample(
        4, kind="fancy", paths=("a b", "c"), shiny=True
    )


def test_a_file_that_includes_itself_or_has_an_open_quote(tmp_path):
    (tmp_path / "loop").write_text(f"--width 3\n@{tmp_path}/loop\n")
    with pytest.raises(ValueError, match="includes itself"):
        expand_files([f"@{tmp_path}/loop"])
    (tmp_path / "quote").write_text("--width 3\n--paths 'a\n")
    with pytest.raises(ValueError, match=r"quote:2: No closing quotation"):
        expand_files([f"@{tmp_path}/quote"])


def test_help_is_the_string_under_the_field(capsys):
    parser = FlagParser("prog")
    add_flags(parser, Sample)
    with pytest.raises(SystemExit) as stop:
        parser.parse_args(["--help"])
    assert stop.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for part in ("Needed. (required)", "A number, 50% by default. (default 0.5)", "A switch on two lines."):
        assert part in text


def test_a_field_without_help_or_with_an_impossible_type_is_a_mistake():
    @dataclass(frozen=True)
    class Silent:
        """No help."""

        width: int = 3

    with pytest.raises(TypeError, match=r"Silent\.width has no string under it"):
        flags_of(Silent)

    @dataclass(frozen=True)
    class Odd:
        """An impossible type."""

        table: dict[str, int] | None = None
        """A mapping."""

    with pytest.raises(TypeError, match="no command-line form"):
        flags_of(Odd)


def test_a_value_as_it_is_typed():
    said = {name: flag_text(Sample, name, value) for name, value in (
        ("width", 3), ("bias", True), ("shiny", True), ("paths", ("a", "b")), ("kind", None))}  # fmt: skip
    assert said == {"width": "--width 3", "bias": "no --disable-bias", "shiny": "--shiny",
                    "paths": "--paths a b", "kind": "no --kind"}  # fmt: skip
    assert flag_text(Sample, "bias", False) == "--disable-bias"


def test_the_golden_table_of_all_flags():
    assert json.loads(TABLE.read_text()) == json.loads(render()), (
        "the flags have changed: if that is meant, run python -m tests.unit.training.write_golden"
    )
