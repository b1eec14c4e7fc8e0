"""Dropout of attention probabilities whose masks can be drawn again, a tile at a time."""

import hashlib
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class ProbabilityDropout:
    """Sets attention probabilities to zero, and divides the others by what is kept.

    A mask is a pure function of the key and the place of its tile, so recomputation and the backward pass
    draw what the forward pass drew, and nothing is kept in between.
    """

    probability: float
    """Of being set to zero, in (0, 1)."""
    key: int
    """Names the masks of one attention of one micro-batch."""

    @property
    def kept(self) -> float:
        """Probability of not being set to zero."""
        return 1.0 - self.probability

    def mask(
        self, shape: tuple[int, ...], place: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Ones where a probability is kept and zeros elsewhere.

        Args:
            shape: of the tile.
            place: tells the tile from all others under the same key.
            dtype: of the result.
            device: of the result; each kind of device draws masks of its own.
        """
        words = ",".join(str(word) for word in (self.key, *place))
        digest = hashlib.blake2b(words.encode(), digest_size=8).digest()
        generator = torch.Generator(device)
        generator.manual_seed(int.from_bytes(digest, "little"))
        return torch.empty(shape, dtype=dtype, device=device).bernoulli_(self.kept, generator=generator)
