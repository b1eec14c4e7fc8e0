"""Foreign flags of scripts that turn text into token files."""

from collections.abc import Mapping
from typing import Final

from megatron.training.foreign_flags.entries import ForeignFlag, accepted, refused

_TABLE: Final = (
    *accepted(
        "token files hold no padding",
        valued="--make-vocab-size-divisible-by --tensor-model-parallel-size",
    ),
    *accepted("the tool is one program of several processes", valued="--rank"),
    *accepted("documents are dealt to the workers by size", valued="--chunk-size"),
    *refused(
        "token files are always .bin and .idx files; leave it out",
        valued="--dataset-impl --data-impl",
        harmless="mmap",
    ),
)

PREPROCESSING_FLAGS: Final[Mapping[str, ForeignFlag]] = {foreign.spelling: foreign for foreign in _TABLE}
"""Every flag that is known to belong to preprocessing elsewhere and is not ours, by its spelling."""
