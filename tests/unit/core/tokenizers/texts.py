"""Real English for the tests of this folder: the sample corpus."""

import json
from pathlib import Path

CORPUS = Path(__file__).parents[4] / "data" / "moby_dick.jsonl"
CHAPTERS = [json.loads(line)["text"] for line in CORPUS.read_text(encoding="utf-8").splitlines()]
