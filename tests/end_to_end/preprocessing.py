"""tools/preprocess_data.py for its tests: how it is run, and how its files are read by hand."""

import contextlib
import io
import itertools
import json
import signal
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np

from tools import preprocess_data

ROOT = Path(__file__).parents[2]
NULL = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "100"]


def command(folder, *flags, tokenizer=NULL):
    tool = [sys.executable, str(ROOT / "tools" / "preprocess_data.py")]
    return [*tool, *map(str, flags), "--output-prefix", str(folder / "out"), *tokenizer]


def run(folder, *flags, tokenizer=NULL):
    """Run the tool in this process, which has everything imported already: a start takes seconds."""
    arguments = command(folder, *flags, tokenizer=tokenizer)[2:]
    handler = signal.getsignal(signal.SIGTERM)
    output, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors), contextlib.chdir(folder):
        try:
            code = preprocess_data.main(arguments)
        except SystemExit as end:
            code = end.code
        finally:
            signal.signal(signal.SIGTERM, handler)
    return subprocess.CompletedProcess(arguments, code, output.getvalue(), errors.getvalue())


def run_apart(folder, *flags, tokenizer=NULL):
    arguments = command(folder, *flags, tokenizer=tokenizer)
    return subprocess.run(arguments, capture_output=True, text=True, timeout=60, cwd=folder, check=False)


def corpus(folder, *texts, name="in.jsonl"):
    path = folder / name
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def read(prefix):
    """Documents of a dataset, each a list of sequences; every byte of the two files is accounted for."""
    index = Path(f"{prefix}.idx").read_bytes()
    magic, version, code, sequences, entries = struct.unpack_from("<9sQBQQ", index)
    assert (magic, version) == (b"MMIDIDX\0\0", 1)
    dtype = {8: np.dtype("<u2"), 4: np.dtype("<i4")}[code]
    lengths = np.frombuffer(index, "<i4", sequences, 34)
    pointers = np.frombuffer(index, "<i8", sequences, 34 + 4 * sequences)
    documents = np.frombuffer(index, "<i8", entries, 34 + 12 * sequences)
    assert len(index) == 34 + 12 * sequences + 8 * entries
    tokens = np.fromfile(f"{prefix}.bin", dtype)
    assert lengths.sum() == len(tokens)
    flat = []
    for length, pointer in zip(lengths, pointers, strict=True):
        assert pointer == sum(map(len, flat)) * dtype.itemsize
        start = pointer // dtype.itemsize
        flat.append(tokens[start : start + length].tolist())
    return [flat[a:b] for a, b in itertools.pairwise(documents)]


def files_in(folder):
    return sorted(path.name for path in folder.iterdir())


def both_bytes(folder, name="out_text_document"):
    return (folder / f"{name}.bin").read_bytes(), (folder / f"{name}.idx").read_bytes()


def failed(folder, result, *, kept, code=1):
    """The run failed with one short message and left nothing behind; the message."""
    assert result.returncode == code, result.stderr
    assert "Traceback" not in result.stderr
    assert files_in(folder) == sorted(kept)
    return result.stderr
