"""Compressed inputs and parquet: the same lines as the plain file, or an error that names the file."""

import bz2
import datetime
import decimal
import gzip
import json
import lzma
import random

import orjson
import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from megatron.core.tokenizers.compression import kind_of, plain_pieces
from megatron.core.tokenizers.corpus import read_chunks, texts_on_line

LINES = [json.dumps({"text": f"{n} " + "word " * (n * 7 % 90)}).encode() + b"\n" for n in range(2000)]
PLAIN = b"".join(LINES)


def zst(data, checksum=True):
    return zstandard.ZstdCompressor(write_checksum=checksum).compress(data)


COMPRESS = {"gzip": gzip.compress, "zstd": zst, "bzip2": bz2.compress}


def lines_in(path, **options):
    return [line for chunk in read_chunks([path], **options) for line in chunk.lines]


@pytest.mark.parametrize("kind", COMPRESS)
def test_a_file_is_known_by_its_content_whatever_its_name(tmp_path, kind):
    for name in ("corpus.jsonl", "corpus.gz", "corpus.bz2", "corpus"):
        path = tmp_path / name
        half = len(PLAIN) // 2  # several members, cut within a line, are one text
        path.write_bytes(COMPRESS[kind](PLAIN[:half]) + COMPRESS[kind](b"") + COMPRESS[kind](PLAIN[half:]))
        assert kind_of(path) == kind
        assert lines_in(path) == LINES
        assert lines_in(path, chunk_bytes=100) == LINES
    (tmp_path / "plain.zst").write_bytes(PLAIN)
    assert lines_in(tmp_path / "plain.zst") == LINES


def test_what_may_stand_around_members_is_passed_over(tmp_path):
    (tmp_path / "a").write_bytes(gzip.compress(PLAIN) + bytes(1000))
    frame = b"\x5a\x2a\x4d\x18" + (4).to_bytes(4, "little") + b"abcd"
    (tmp_path / "b").write_bytes(frame + zst(PLAIN) + frame)
    for name in "ab":
        assert lines_in(tmp_path / name) == LINES


@pytest.mark.parametrize("kind", COMPRESS)
def test_a_file_that_is_cut_off_or_damaged_is_never_read_as_whole(tmp_path, kind):
    whole, path, draw = COMPRESS[kind](PLAIN), tmp_path / "corpus.jsonl.gz", random.Random(0)
    cuts = [*range(12), *(draw.randrange(12, len(whole)) for _ in range(20)), len(whole) - 1]
    damaged = [whole[:cut] for cut in cuts]
    for _ in range(30):
        at = draw.randrange(12, len(whole))
        damaged.append(whole[:at] + bytes([whole[at] ^ 1 << draw.randrange(8)]) + whole[at + 1 :])
    damaged.append(whole + b"more")
    for content in damaged:
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"corpus\.jsonl\.gz: the \w+ file is damaged or cut off"):
            lines_in(path)


def test_the_place_of_the_damage_is_told(tmp_path):
    first = gzip.compress(PLAIN[: len(LINES[0])])
    path = tmp_path / "corpus.gz"
    path.write_bytes(first + gzip.compress(b"".join(LINES[1:3]))[:-1])
    place = f"after line 3, before byte {path.stat().st_size + 1}: it ends in the middle"
    with pytest.raises(ValueError, match=place):
        lines_in(path)


@pytest.mark.parametrize(("content", "name"), [
    (lzma.compress(PLAIN), "an xz file"),
    (b"PK\x03\x04rest", "a zip file"),
    ('{"text": "a"}'.encode("utf-16"), "a UTF-16 file"),
])  # fmt: skip
def test_other_kinds_of_files_are_refused_by_name(tmp_path, content, name):
    (tmp_path / "in.jsonl").write_bytes(content)
    with pytest.raises(ValueError, match=rf"in\.jsonl: this is {name}"):
        lines_in(tmp_path / "in.jsonl")


@pytest.mark.parametrize(("kind", "limit"), [("gzip", 32 << 20), ("zstd", 160 << 20), ("bzip2", 1 << 20)])
def test_pieces_of_what_shrinks_a_thousandfold_are_bounded(tmp_path, kind, limit):
    path, size = tmp_path / "zeros", 200_000_000
    path.write_bytes(COMPRESS[kind](bytes(size // 4)) * 4)
    with path.open("rb") as raw:
        sizes = [len(piece) for piece in plain_pieces(raw, kind)]
    assert sum(sizes) == size
    assert max(sizes) <= limit


def parquet(path, columns, **options):
    pyarrow.parquet.write_table(pyarrow.table(columns), path, **options)
    return path


def test_the_rows_of_a_parquet_file_are_json_lines(tmp_path):
    texts = [f"{n}\n“ü” " + "x" * (n * 31 % 700) for n in range(500)]
    columns = {
        "text": texts,
        "parts": [[str(n)] * (n % 3) for n in range(500)],
        "raw": pyarrow.array([text.encode() for text in texts], pyarrow.large_binary()),
        "id": list(range(500)),
    }
    path = parquet(tmp_path / "corpus", columns, row_group_size=64, compression="zstd")
    names = ["text", "parts", "raw"]
    rows = [json.loads(line) for line in lines_in(path, chunk_bytes=5000, columns=names)]
    assert [row["text"] for row in rows] == texts
    assert [row["parts"] for row in rows] == columns["parts"]
    assert [row["raw"] for row in rows] == texts
    assert [json.loads(line)["id"] for line in lines_in(path)] == list(range(500))
    chunks = list(read_chunks([path], chunk_bytes=5000, columns=names))
    assert len(chunks) > 20
    assert sum(len(chunk.lines) for chunk in chunks) == 500
    assert [chunk.first_line for chunk in chunks][:2] == [1, 1 + len(chunks[0].lines)]


BYTES = pyarrow.array([b"hello", "w\u00f6rd".encode()])


@pytest.mark.parametrize(("column", "expected"), [
    (BYTES, ["hello", "w\u00f6rd"]),
    (BYTES.cast(pyarrow.binary_view()), ["hello", "w\u00f6rd"]),
    (BYTES.cast(pyarrow.binary(5)), ["hello", "w\u00f6rd"]),
    (BYTES.dictionary_encode(), ["hello", "w\u00f6rd"]),
    (BYTES.cast(pyarrow.string()).dictionary_encode(), ["hello", "w\u00f6rd"]),
    (pyarrow.array([[b"a", b"\xc3\xb6"], []]), [["a", "\u00f6"], []]),
    (pyarrow.array([[b"a"], [b"b"]], pyarrow.list_(pyarrow.binary(), 1)), [["a"], ["b"]]),
])  # fmt: skip
def test_bytes_of_any_kind_are_text(tmp_path, column, expected):
    path = parquet(tmp_path / "corpus.parquet", {"text": column})
    for columns in (["text"], None):
        assert [json.loads(line)["text"] for line in lines_in(path, columns=columns)] == expected


def test_columns_beside_the_text_may_be_of_any_type(tmp_path):
    day = datetime.datetime(2020, 2, 3, 4, 5)
    columns = {
        "text": [b"a"],
        "day": [day.date()],
        "time": pyarrow.array([1580702700000000001], pyarrow.timestamp("ns")),
        "price": [decimal.Decimal("1.50")],
        "score": [float("nan")],
        "more": [{"name": b"b", "tags": [b"c"]}],
        "map": pyarrow.array([[("k", b"v")]], pyarrow.map_(pyarrow.string(), pyarrow.binary())),
    }
    path = parquet(tmp_path / "corpus.parquet", columns)
    (line,) = lines_in(path)
    row = orjson.loads(line)
    assert row.pop("time").startswith("2020-02-03")
    assert row == {
        "text": "a", "day": "2020-02-03", "price": "1.50", "score": None,
        "more": {"name": "b", "tags": ["c"]}, "map": [["k", "v"]],
    }  # fmt: skip


@pytest.mark.parametrize("values", [
    [datetime.date(2020, 1, 1)], [decimal.Decimal("1.5")], [1], [{"a": "b"}], [[["a"]]], [[1]],
])  # fmt: skip
def test_a_text_column_of_no_text_is_refused(tmp_path, values):
    path = parquet(tmp_path / "a.parquet", {"text": values})
    with pytest.raises(ValueError, match=r"a\.parquet: the column 'text' is of the type .*, but one of str"):
        lines_in(path, columns=["text"])


@pytest.mark.parametrize("kind", [pyarrow.binary(), pyarrow.string(), pyarrow.list_(pyarrow.string())])
def test_a_row_that_is_not_utf8_is_a_bad_line_alone(tmp_path, kind):
    raw = [b"a", b"\xff\n", b"b"]
    if pyarrow.types.is_list(kind):
        strings = pyarrow.Array.from_buffers(pyarrow.string(), 3, pyarrow.array(raw).buffers())
        column = pyarrow.ListArray.from_arrays([0, 1, 2, 3], strings)
    else:
        column = pyarrow.Array.from_buffers(kind, 3, pyarrow.array(raw).buffers())
    lines = lines_in(parquet(tmp_path / "corpus.parquet", {"text": column}), columns=["text"])
    assert len(lines) == 3
    good = [texts_on_line(line, ["text"]) for line in lines[::2]]
    assert good == [[["a"]], [["b"]]]
    with pytest.raises(ValueError, match="not UTF-8 at byte"):
        texts_on_line(lines[1], ["text"])


def test_a_parquet_file_that_cannot_be_used_is_named(tmp_path):
    path = parquet(tmp_path / "a.parquet", {"body": ["a" * 1000, "b"] * 100})
    with pytest.raises(ValueError, match=r"a\.parquet: no column 'text'; the columns present are 'body'"):
        lines_in(path, columns=["text"])
    whole = path.read_bytes()
    for content in (whole[:-1], whole[: len(whole) // 2], whole[:4]):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"a\.parquet: the parquet file is damaged or cut off"):
            lines_in(path)
