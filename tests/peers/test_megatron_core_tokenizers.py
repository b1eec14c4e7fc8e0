"""Our tokenizers against Megatron Core's on the same files: ids of texts, and special ids."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.core.tokenizers.families import families
from tests.unit.core.tokenizers.texts import NASTY, REAL, first_difference

PEER = Path(sys.prefix, "peers", "megatron_core")
PROGRAM = Path(__file__).with_name("megatron_core_tokenizers.py")
TEXTS = [*NASTY[:300], *REAL[:100]]

pytestmark = pytest.mark.skipif(
    not (PEER / "megatron" / "core").is_dir(),
    reason=f"no Megatron Core in {PEER}: scripts/install_peers.sh fetches it",
)


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """Our tokenizer and Megatron Core's answer, by family."""
    folder = tmp_path_factory.mktemp("tokenizers")
    known = families(folder)
    cases, ours = [], {}
    for pattern in ("v1", "v2"):
        tokenizer = known[f"tiktoken_{pattern}"].build(parse_special_tokens=True)
        arguments = {"tokenizer_path": str(folder / "ranks.json"), "pattern": pattern,
                     "num_special_tokens": 20, "vocab_size": tokenizer.vocab_size}  # fmt: skip
        ours[f"tiktoken_{pattern}"] = tokenizer
        cases.append({"class": "TikTokenTokenizer", "arguments": arguments})
    for kind, lowercase in (("BertWordPieceLowerCase", True), ("BertWordPieceCase", False)):
        bert = folder / kind
        bert.mkdir()
        (bert / "vocab.txt").write_bytes((folder / f"{kind}.txt").read_bytes())
        config = {"tokenizer_class": "BertTokenizer", "do_lower_case": lowercase}
        (bert / "tokenizer_config.json").write_text(json.dumps(config))
        (bert / "config.json").write_text(json.dumps({"model_type": "bert"}))
        ours[kind] = known[kind].build(parse_special_tokens=True)
        cases.append({"class": "HuggingFaceTokenizer", "arguments": {"tokenizer_path": str(bert)}})
    for kind in ("SentencePieceTokenizer", "GPTSentencePieceTokenizer"):
        ours[kind] = known[kind].build()
        arguments = {"tokenizer_path": str(folder / f"{kind}.model")}
        cases.append({"class": "SentencePieceTokenizer", "arguments": arguments})
    ours["bytes"] = known["bytes"].build()
    cases.append({"class": "ByteLevelTokenizer", "arguments": {}})
    (folder / "cases.json").write_text(json.dumps({"texts": TEXTS, "cases": cases}))
    ended = subprocess.run(
        [sys.executable, str(PROGRAM), "cases.json"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(PEER), "PYTHONSAFEPATH": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    answers = map(json.loads, ended.stdout.splitlines()[-len(cases) :])
    return dict(zip(ours, zip(ours.values(), answers, strict=True), strict=True))


NAMES = [
    "tiktoken_v1", "tiktoken_v2", "BertWordPieceLowerCase", "BertWordPieceCase", "SentencePieceTokenizer",
    "GPTSentencePieceTokenizer", "bytes",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_ids_of_texts_are_the_same(compared, name):
    tokenizer, theirs = compared[name]
    assert first_difference(TEXTS, tokenizer.encode_batch(TEXTS), theirs["ids"]) is None


@pytest.mark.parametrize("name", NAMES[:6])
def test_special_ids_are_the_same(compared, name):
    tokenizer, theirs = compared[name]
    special = theirs["special"]
    roles = ["bos", "eos", "pad"] if "Sentence" in name else ["bos", "eos", "pad", "cls", "sep", "mask"]
    ours = {f"{role}_id": getattr(tokenizer, role) for role in roles}
    # -1 is SentencePiece's way to say that there is none.
    assert ours == {role: None if special[role] == -1 else special[role] for role in ours}
    assert tokenizer.vocab_size == special["vocab_size"]
    if special["eod"] is not None:
        assert tokenizer.eod == special["eod"]
