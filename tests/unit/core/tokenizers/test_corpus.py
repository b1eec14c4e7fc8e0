"""Reading JSON lines: chunks, gzip, and the reasons why a line is refused."""

import gzip
import json

import pytest

from megatron.core.tokenizers.corpus import input_files, read_chunks, texts_on_line


def test_chunks_hold_every_line_once_in_order(tmp_path):
    lines = [f"line {n} {'x' * (n * 37 % 500)}\n".encode() for n in range(300)]
    plain, zipped = tmp_path / "a.jsonl", tmp_path / "b.jsonl.gz"
    plain.write_bytes(b"".join(lines))
    zipped.write_bytes(gzip.compress(b"".join(lines[:50])) + gzip.compress(b"".join(lines[50:])))
    chunks = list(read_chunks([plain, zipped], chunk_bytes=1000))
    for path in (plain, zipped):
        mine = [chunk for chunk in chunks if chunk.path == str(path)]
        assert [line for chunk in mine for line in chunk.lines] == lines
        assert [chunk.first_line for chunk in mine] == [
            1 + sum(len(before.lines) for before in mine[:n]) for n in range(len(mine))
        ]
        assert max(chunk.num_bytes for chunk in mine) < 1000 + 520
        assert len(mine) > 50
    assert chunks[-1].bytes_read == plain.stat().st_size + zipped.stat().st_size


def test_a_damaged_gzip_file_is_named(tmp_path):
    path = tmp_path / "cut.gz"
    path.write_bytes(gzip.compress(b'{"text": "a"}\n' * 1000)[:-10])
    with pytest.raises(ValueError, match=r"cut\.gz: the gzip file is damaged or cut off after line"):
        list(read_chunks([path]))


def test_inputs_are_files_or_patterns(tmp_path):
    for name in ("b.jsonl", "a.jsonl", "odd[1].jsonl"):
        (tmp_path / name).touch()
    found = input_files([str(tmp_path / "odd[1].jsonl"), str(tmp_path / "[ab].jsonl")])
    assert [path.name for path in found] == ["odd[1].jsonl", "a.jsonl", "b.jsonl"]
    with pytest.raises(ValueError, match=r"--input: .*gone.jsonl \(no such file\), .* \(is a folder\)"):
        input_files([str(tmp_path / "gone.jsonl"), str(tmp_path)])


def test_texts_under_the_keys():
    line = json.dumps({"title": "T", "text": ["one", "two"], "id": 3}).encode()
    assert texts_on_line(line + b"\r\n", ["text", "title"]) == [["one", "two"], ["T"]]
    assert texts_on_line(b" \t\r\n", ["text"]) is None


@pytest.mark.parametrize(("line", "reason"), [
    (b'{"text": "a"}{"text": "b"}', r"malformed JSON: Extra data \(column 14\)"),
    (b'{"text": "cut off in the mid', "malformed JSON: Unterminated string"),
    (b'["text"]', "holds an array, but one JSON object is wanted"),
    (b'"text"', "holds a string"),
    (b'{"text": null}', "key 'text' holds null, but a string is wanted"),
    (b'{"text": 3}', "key 'text' holds a number"),
    (b'{"text": true}', "key 'text' holds a boolean"),
    (b'{"text": {"a": 1}}', "key 'text' holds an object"),
    (b'{"text": ["a", 1]}', "key 'text' holds a number in its list"),
    (b'{"content": "a", "id": 1}', "no key 'text'; the keys present are 'content', 'id'"),
    (b"{}", "the keys present are none"),
    (b'{"text": "\xff"}', "not UTF-8 at byte 11 of the line"),
    (b'{"text": "a\\ud800"}', "half of a surrogate pair"),
    (b"[" * 100_000, "malformed JSON"),
    (b'{"text": ' + b"1" * 5000 + b"}", "malformed JSON"),
])  # fmt: skip
def test_reasons_why_a_line_is_refused(line, reason):
    with pytest.raises(ValueError, match=reason):
        texts_on_line(line, ["text"])


def test_a_byte_order_mark_is_no_part_of_the_first_line(tmp_path):
    (tmp_path / "marked.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "a"}\n{"text": "b"}\n')
    (chunk,) = read_chunks([tmp_path / "marked.jsonl"])
    assert [texts_on_line(line, ["text"]) for line in chunk.lines] == [[["a"]], [["b"]]]
