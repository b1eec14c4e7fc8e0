"""Which part of the vocabulary a tensor-parallel rank has."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class VocabShard:
    """One rank's run of the padded vocabulary: true tokens first, then padding."""

    first: int
    """The token of local row 0."""
    valid: int
    """Number of true tokens on this rank; may be 0."""
    rows: int
    """Number of local rows, padding counted: v_pad/tp."""
    vocab_size: int
    """v: true tokens of all ranks together."""

    @staticmethod
    def of(vocab_size: int, padded_vocab_size: int, group: ProcessGroup) -> "VocabShard":
        """The shard of this rank of ``group``.

        Raises:
            ValueError: if the padded size does not divide by the group's size or is below the true one.
        """
        if padded_vocab_size % group.size() or padded_vocab_size < vocab_size:
            raise ValueError(
                f"a padded vocabulary of {padded_vocab_size} does not fit: it must hold the {vocab_size} "
                f"true tokens and divide by the tensor-parallel size {group.size()}; "
                "see --make-vocab-size-divisible-by"
            )
        rows = padded_vocab_size // group.size()
        first = group.rank() * rows
        return VocabShard(first, min(max(vocab_size - first, 0), rows), rows, vocab_size)

    def local(self, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
        """Local row numbers of ``tokens``, and which tokens are on this rank (None: all are).

        The row number of another rank's token is 0, so that it can be looked up, and has to be masked after.
        """
        if self.first == 0 and self.valid == self.vocab_size:
            return tokens, None
        ids = tokens - self.first
        mine = (ids >= 0) & (ids < self.valid)
        return ids.masked_fill_(~mine, 0), mine

    def check(self, tokens: Tensor, what: str) -> None:
        """Fail if any of ``tokens`` is outside the true vocabulary, without waiting for a GPU.

        Raises:
            RuntimeError: on a CPU at once, on a GPU as a device-side assertion.
        """
        inside = ((tokens >= 0) & (tokens < self.vocab_size)).all()
        torch._assert_async(
            inside,
            f"a {what} is outside the vocabulary of {self.vocab_size}: "
            "was the data made with another tokenizer or --vocab-size?",
        )
