"""The input cut into parts and blocks: every line once, in order, with its number, however it is cut."""

import gzip
import random
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.tokenizers import blocks
from megatron.core.tokenizers.blocks import lines_before, lines_of, plan_parts, read_parts

LINE = st.text("ab\r{é ", max_size=30).map(str.encode)


def write(folder, contents):
    files = []
    for number, (content, zipped) in enumerate(contents):
        files.append(folder / f"{number}.jsonl")
        files[-1].write_bytes(gzip.compress(content) if zipped else content)
    return files


def lines_of_parts(files, count, readers=2):
    """For each part the lines that it has, each with its file and number."""
    found = {part: [] for part in range(count)}
    parts = dict(enumerate(plan_parts(files, count)))
    for block in read_parts(parts, ["text"], readers):
        if block.ends_part:
            found[block.part].append(None)
            continue
        before = block.start if block.data is not None else lines_before(block.path, block.start)
        found[block.part] += [
            (block.path, number, line) for number, line in enumerate(lines_of(block), start=before + 1)
        ]
    return list(found.values())


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.lists(LINE, max_size=12), st.booleans(), st.booleans()), min_size=1, max_size=4),
       st.integers(1, 5), st.integers(1, 40))  # fmt: skip
def test_every_line_comes_once_in_order_with_its_number(tmp_path_factory, drawn, count, block_bytes):
    contents = [
        (b"\n".join(lines) + (b"\n" if ended and lines else b""), zipped) for lines, ended, zipped in drawn
    ]
    files = write(tmp_path_factory.mktemp("blocks"), contents)
    expected = []
    for path, (content, _) in zip(files, contents, strict=True):
        lines = content.split(b"\n")
        if not lines[-1]:
            lines.pop()
        expected += [(str(path), number, line) for number, line in enumerate(lines, start=1)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "BLOCK_BYTES", block_bytes)
        parts = lines_of_parts(files, count)
    assert all(part[-1] is None and None not in part[:-1] for part in parts)
    assert [line for part in parts for line in part[:-1]] == expected


def test_parts_are_about_equal_and_do_not_change_the_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 1000)
    files = write(
        tmp_path, [(b"x" * 99 + b"\n", False), (b"y" * 9 + b"\n", False)] * 1 + [(b"z\n" * 50_000, False)]
    )
    seen = set()
    for count in (1, 3, 7):
        parts = plan_parts(files, count)
        sizes = [sum(stretch.stop - stretch.start for stretch in part) for part in parts]
        assert sum(sizes) == 100_110
        assert max(sizes) - min(sizes) <= 2000
        cut = [block for block in read_parts(dict(enumerate(parts)), [], 1) if not block.ends_part]
        seen.add(tuple((block.path, block.start, block.stop) for block in cut))
    assert len(seen) == 1


def test_a_line_without_end_is_cut_off_instead_of_filling_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 1000)
    endless = (
        random.Random(0).randbytes(300_000).hex().encode()
    )  # hardly shrinks, so it comes in small pieces
    content = b'{"a": 1}\n' + endless + b"\n" + b'{"b": 2}\n' + b"y" * 3_000
    for zipped in (False, True):
        (path,) = write(tmp_path, [(content, zipped)])
        monkeypatch.setattr(blocks, "whole_lines", lambda *a: _whole_lines(*a, longest=90_000))
        parts = dict(enumerate(plan_parts([path], 1)))
        lines = [line for block in read_parts(parts, [], 1) for line in lines_of(block, longest=90_000)]
        assert lines == [b'{"a": 1}', endless[:90_001], b'{"b": 2}', b"y" * 3000]


_whole_lines = blocks.whole_lines


def test_a_damaged_file_is_told_of_and_readers_end(tmp_path, monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 1000)
    files = write(tmp_path, [(b"line\n" * 40_000, True)] * 4)
    before = threading.active_count()
    reader = read_parts(dict(enumerate(plan_parts(files, 4))), [], 3)
    next(reader)
    assert threading.active_count() > before
    reader.close()
    assert threading.active_count() == before
    files[2].write_bytes(files[2].read_bytes()[:-5])
    with pytest.raises(ValueError, match=r"2\.jsonl: the gzip file is damaged or cut off after line"):
        list(read_parts(dict(enumerate(plan_parts(files, 4))), [], 3))
    assert threading.active_count() == before
