"""Write the golden table of all flags anew, after a change of flags that is meant.

python -m tests.unit.training.write_golden
"""

import json
from pathlib import Path

from megatron.training.arguments import flag_sections
from megatron.training.flags import flag_table

TABLE = Path(__file__).with_name("flag_table.json")


def render() -> str:
    """The table as JSON text, one flag a line."""
    rows = ",\n".join("  " + json.dumps(row) for row in flag_table(flag_sections()))
    return f"[\n{rows}\n]\n"


if __name__ == "__main__":
    TABLE.write_text(render(), encoding="utf-8")
