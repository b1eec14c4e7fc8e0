"""Ids and special ids of Megatron Core's tokenizers.

    python megatron_core_tokenizers.py CASES.json

A program of its own, run with Megatron Core's folder alone on PYTHONPATH and outside this repository, since
both packages are called ``megatron``. The file holds a list of texts and a list of cases: a class of Megatron
Core's and its arguments. For each case a line of JSON comes back: the ids of each text, and the special ids.
"""

import json
import sys
from pathlib import Path

from megatron.core.tokenizers.text import libraries


def special_ids(tokenizer: object) -> dict[str, int | None]:
    """The special ids that it has."""
    found = {}
    for name in ("bos_id", "eos_id", "eod", "pad_id", "cls_id", "sep_id", "mask_id", "vocab_size"):
        try:
            found[name] = getattr(tokenizer, name)
        except (NameError, AttributeError, RecursionError):  # asking what it lacks may never end
            found[name] = None
    return found


def main() -> None:
    """Print a line for each case."""
    given = json.loads(Path(sys.argv[1]).read_text())
    for case in given["cases"]:
        tokenizer = getattr(libraries, case["class"])(**case["arguments"])
        ids = [tokenizer.text_to_ids(text) for text in given["texts"]]
        print(json.dumps({"ids": ids, "special": special_ids(tokenizer)}))


if __name__ == "__main__":
    main()
