"""docs/flags.md says what the code says."""

import json
from pathlib import Path

from megatron.training.foreign_flags import FOREIGN_FLAGS
from scripts.write_flags_page import PAGE, render

TABLE = Path(__file__).parent / "training" / "flag_table.json"


def test_the_page_is_current():
    assert PAGE.read_text(encoding="utf-8") == render(), "run python scripts/write_flags_page.py"


def test_every_flag_of_the_golden_table_and_every_foreign_one_is_on_the_page():
    words = set(PAGE.read_text(encoding="utf-8").replace("`", " ").replace(",", " ").split())
    own = {spelling for row in json.loads(TABLE.read_text()) for spelling in (row["flag"], *row["aliases"])}
    assert own | set(FOREIGN_FLAGS) <= words


def test_a_flag_s_row_has_spelling_values_default_and_meaning():
    rows = PAGE.read_text(encoding="utf-8").splitlines()
    assert "| `--lr X` | **required** | Highest learning rate. |" in rows
    assert (
        "| `--cp-comm-type {p2p,all_gather,a2a}` | `p2p` | How ranks of a sequence see each other's keys and "
        "values: passed round a ring (p2p), gathered, or by exchanging sequence shards for heads (a2a). |"
        in rows
    )
