"""Flags of other systems' launch scripts: tables of what becomes of each.

A flag is accepted without effect only where ignoring it can neither change the numbers of a run nor lose
something that the user counts on. Any other is refused, with what to use instead.
"""

from megatron.training.foreign_flags.entries import ForeignFlag
from megatron.training.foreign_flags.parsing import (
    FOREIGN_FLAGS,
    Verdict,
    add_foreign_flags,
    family_refusal,
    judge_foreign_flags,
)
from megatron.training.foreign_flags.preprocessing import PREPROCESSING_FLAGS
from megatron.training.foreign_flags.refused import FAMILIES, FOREIGN_VALUES, FOREIGN_WORDS

__all__ = [
    "FAMILIES",
    "FOREIGN_FLAGS",
    "FOREIGN_VALUES",
    "FOREIGN_WORDS",
    "PREPROCESSING_FLAGS",
    "ForeignFlag",
    "Verdict",
    "add_foreign_flags",
    "family_refusal",
    "judge_foreign_flags",
]
