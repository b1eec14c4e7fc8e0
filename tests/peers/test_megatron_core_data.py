"""Our files, index arrays, blends and GPT samples against Megatron Core's, one process of it for all."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron.core.datasets.blend import blend_indices, exhaustive_indices, normalize
from megatron.core.datasets.gpt_dataset import GPTDataset, SampleFormat
from megatron.core.datasets.gpt_indices import build_gpt_indices, plan_epochs
from megatron.core.datasets.index_format import DTYPES
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
from megatron.core.datasets.mock_dataset import MockIndexedDataset

PEER = Path(sys.prefix, "peers", "megatron_core")
PROGRAM = Path(__file__).with_name("megatron_core_data.py")
INDEX_CASES = 200
BLEND_CASES = 200
VOCAB, EOD = 100, 7

pytestmark = pytest.mark.skipif(
    not (PEER / "megatron" / "core").is_dir(),
    reason=f"no Megatron Core in {PEER}: scripts/install_peers.sh fetches it",
)


def random_documents(generator, dtype, most=30):
    """Documents of sequences of tokens; some documents have none, some sequences are empty."""
    limits = np.iinfo(dtype) if dtype.kind != "f" else None
    low, high = (int(limits.min), int(limits.max)) if limits else (-1000, 1000)

    def sequence():
        tokens = generator.integers(low, high, size=generator.integers(0, 9), endpoint=True)
        return tokens.tolist()

    return [[sequence() for _ in range(generator.integers(0, 4))] for _ in range(generator.integers(1, most))]


def write_ours(prefix, dtype, documents):
    with IndexedDatasetBuilder(prefix, dtype) as builder:
        for document in documents:
            flat = np.array([token for tokens in document for token in tokens], dtype)
            builder.add_document(flat, [len(tokens) for tokens in document])
    return str(prefix)


def file_cases(folder):
    """For each token type one set of documents, which both write and both read."""
    cases = {}
    for code, dtype in DTYPES.items():
        documents = random_documents(np.random.default_rng(code), dtype)
        documents += [[[1, 2, 3]], []]
        prefix = write_ours(folder / f"ours-{dtype.name}", dtype, documents)
        theirs = {"do": "write", "prefix": f"{folder}/theirs-{dtype.name}", "dtype": dtype.name}
        cases[f"write-{dtype.name}"] = {**theirs, "documents": documents}
        for mmap in (True, False):
            cases[f"read-{dtype.name}-{mmap}"] = {"do": "read", "prefix": prefix, "mmap": mmap}
    return cases


def index_case(number):
    """Random lengths of a random part of a dataset, cut into random samples."""
    generator = np.random.default_rng(number)
    longest = int(generator.choice([1, 3, 40, 5000]))
    while True:
        lengths = generator.integers(0, longest, size=generator.integers(1, 60), endpoint=True)
        first = int(generator.integers(0, len(lengths)))
        stop = int(generator.integers(first + 1, len(lengths) + 1))
        total = int(lengths[first:stop].sum())
        if total >= 2:
            break
    seq_length = int(generator.integers(1, total))
    asked = int(generator.integers(1, 12 * max(1, total // seq_length)))
    return {
        "do": "indices",
        "lengths": lengths.tolist(),
        "sequences": [first, stop],
        "num_samples": None if generator.random() < 0.15 else min(asked, 4000),
        "seq_length": seq_length,
        "seed": int(generator.integers(0, 2**32)),
        # With an empty sequence last, its partial sample ends before the first token of that one.
        "keep_partial": bool(generator.random() < 0.25 and lengths.min() > 0),
        "reset": False,
        "eod_mask_loss": False,
        "eod": EOD,
        "vocab_size": VOCAB,
    }


def sample_cases(folder):
    documents = [
        [[*tokens, EOD]] for tokens in np.random.default_rng(3).integers(0, VOCAB, (40, 30)).tolist()
    ]
    documents = [
        [document[0][-length:]]
        for document, length in zip(documents, [*range(1, 31), *[7] * 10], strict=True)
    ]
    prefix = write_ours(folder / "samples", np.uint16, documents)
    cases = {}
    for reset in (False, True):
        for eod_mask_loss in (False, True):
            for keep_partial in (False, True):
                cases[f"samples-{reset:d}{eod_mask_loss:d}{keep_partial:d}"] = {
                    "do": "samples",
                    "prefix": prefix,
                    "sequences": [2, 39],
                    "num_samples": 70,
                    "seq_length": 16,
                    "seed": 99,
                    "keep_partial": keep_partial,
                    "reset": reset,
                    "eod_mask_loss": eod_mask_loss,
                    "eod": EOD,
                    "vocab_size": VOCAB,
                    "count": None,
                }
    mock = {**cases["samples-000"], "prefix": None, "sequences": [1000, 1300], "seq_length": 512, "count": 40}
    return {**cases, "mock": mock}


def blend_case(number):
    generator = np.random.default_rng(number)
    count = int(generator.integers(1, 30))
    if number % 3 == 0:
        sizes = generator.integers(1, 200, size=count).tolist()
        return {"do": "blend", "exhaustive": True, "weights": sizes, "size": sum(sizes)}
    weights = generator.random(count) ** float(generator.choice([0, 1, 6])) + 1e-9
    size = int(generator.integers(1, 5000))
    return {"do": "blend", "exhaustive": False, "weights": weights.tolist(), "size": size}


@pytest.fixture(scope="module")
def peer(tmp_path_factory):
    """The cases, and Megatron Core's arrays for them; its datasets lie beside ours in ``folder``."""
    folder = tmp_path_factory.mktemp("data")
    cases = {**file_cases(folder), **sample_cases(folder)}
    cases |= {f"indices-{number}": index_case(number) for number in range(INDEX_CASES)}
    cases |= {f"blend-{number}": blend_case(number) for number in range(BLEND_CASES)}
    (folder / "cases.json").write_text(json.dumps(cases))
    ended = subprocess.run(
        [sys.executable, str(PROGRAM), str(folder)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(PEER), "PYTHONSAFEPATH": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    with np.load(folder / "results.npz") as results:
        return folder, cases, dict(results)


def same(ours, theirs):
    """Equal to the last number, and of one type."""
    assert ours.dtype == theirs.dtype
    np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=lambda dtype: dtype.name)
def test_files_are_the_same_bytes_and_are_read_alike(peer, dtype):
    folder, cases, results = peer
    for suffix in (".idx", ".bin"):
        theirs = (folder / f"theirs-{dtype.name}{suffix}").read_bytes()
        assert (folder / f"ours-{dtype.name}{suffix}").read_bytes() == theirs
    sequences = [tokens for document in cases[f"write-{dtype.name}"]["documents"] for tokens in document]
    for mmap in (True, False):
        dataset = IndexedDataset(folder / f"theirs-{dtype.name}", mmap=mmap)
        dataset.verify()
        assert [dataset[i].tolist() for i in range(len(dataset))] == sequences
        theirs = {
            key: results[f"read-{dtype.name}-{mmap}/{key}"] for key in ("lengths", "documents", "tokens")
        }
        same(dataset.sequence_lengths, theirs["lengths"])
        same(dataset.document_indices, theirs["documents"])
        same(dataset.tokens(0, dataset.num_tokens), theirs["tokens"])
        parts = [dataset.get(i, len(s) // 3, len(s) // 2) for i, s in enumerate(sequences)]
        same(np.concatenate(parts), results[f"read-{dtype.name}-{mmap}/parts"])


def our_indices(case, lengths):
    first, stop = case["sequences"]
    part = lengths[first:stop]
    plan = plan_epochs(
        int(part.sum()), case["seq_length"], case["num_samples"], keep_partial=case["keep_partial"]
    )
    return build_gpt_indices(
        part, plan, first_sequence=first, seq_length=case["seq_length"], seed=case["seed"]
    )


def test_index_arrays_are_those_of_megatron_core(peer):
    _, cases, results = peer
    epochs = set()
    for number in range(INDEX_CASES):
        case = cases[f"indices-{number}"]
        arrays = our_indices(case, np.array(case["lengths"], np.int32))
        for name, array in arrays.items():
            same(array, results[f"indices-{number}/{name}"])
        epochs.add(len(arrays["document_index"]) // (case["sequences"][1] - case["sequences"][0]))
    assert {1, 2, 3} < epochs


def test_blends_are_those_of_megatron_core(peer):
    _, cases, results = peer
    for number in range(BLEND_CASES):
        case = cases[f"blend-{number}"]
        if case["exhaustive"]:
            arrays = exhaustive_indices(case["weights"])
        else:
            arrays = blend_indices(normalize(case["weights"]), case["size"])
        for name in ("dataset_index", "dataset_sample_index"):
            same(arrays[name], results[f"blend-{number}/{name}"])


def our_samples(case):
    options = {
        "eod_mask_loss": case["eod_mask_loss"],
        "reset_position_ids": case["reset"],
        "reset_attention_mask": case["reset"],
    }
    source = MockIndexedDataset(VOCAB, EOD) if case["prefix"] is None else IndexedDataset(case["prefix"])
    sample_format = SampleFormat(case["seq_length"], VOCAB, EOD, **options)
    return GPTDataset(source, our_indices(case, source.sequence_lengths), sample_format)


@pytest.mark.parametrize("keep_partial", [False, True])
@pytest.mark.parametrize("eod_mask_loss", [False, True])
@pytest.mark.parametrize("reset", [False, True])
def test_gpt_samples_are_those_of_megatron_core(peer, reset, eod_mask_loss, keep_partial):
    _, cases, results = peer
    name = f"samples-{reset:d}{eod_mask_loss:d}{keep_partial:d}"
    data = our_samples(cases[name])
    length = data.sample_format.seq_length
    assert len(data) == len(results[f"{name}/tokens"])
    blocked = results[f"{name}/attention_mask"]  # True: not to be looked at
    assert (blocked[:, 0].sum(axis=(1, 2)) > length * (length - 1) // 2).any() == reset
    for i in range(len(data)):
        sample = data[i]
        for key in ("tokens", "labels", "loss_mask"):
            same(sample[key], results[f"{name}/{key}"][i])
        positions = sample["position_ids"] if reset else np.arange(length)
        same(positions, results[f"{name}/position_ids"][i])
        segments = sample["segment_ids"] if reset else np.zeros(length)
        allowed = np.tril(segments[:, None] == segments[None, :])
        np.testing.assert_array_equal(~allowed, blocked[i, 0])


def test_made_up_data_is_that_of_megatron_core(peer):
    _, cases, results = peer
    data = our_samples(cases["mock"])
    for i, (tokens, labels) in enumerate(zip(results["mock/tokens"], results["mock/labels"], strict=True)):
        same(data[i]["tokens"], tokens)
        same(data[i]["labels"], labels)
