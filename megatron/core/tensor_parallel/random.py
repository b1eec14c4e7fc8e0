"""Random numbers that are derived, not carried: a stream is a key, and a key is a pure function of words.

A stream for any purpose is reached from the seed by folding in what tells it apart, for example
``RandomStream.root(seed).fold("dropout", iteration, micro_batch, "layer", 3)``. No generator state is kept
anywhere, so recomputing an activation re-enters the stream of its first computation, a resumed run draws what
an uninterrupted one would, and nothing depends on the layout unless a rank's number is folded in.
"""

import hashlib
from dataclasses import dataclass

import torch

from megatron.core.device import seed_default_generator


@dataclass(frozen=True)
class RandomStream:
    """A stream of random numbers, named by a 64-bit key."""

    key: int
    """What the generators of this stream are seeded with, in [0, 2**64)."""

    @staticmethod
    def root(seed: int) -> "RandomStream":
        """The stream that all others of a run are folded from."""
        return RandomStream(_hash("root", seed))

    def fold(self, *words: int | str) -> "RandomStream":
        """The stream that ``words`` name under this one.

        A number and its decimal spelling are different words, and ``fold(a, b)`` is neither ``fold(b, a)``
        nor ``fold(a).fold(b)``. The same words give the same stream on every machine.
        """
        return RandomStream(_hash(self.key, *words))

    def seed_default(self, device: torch.device) -> None:
        """Seed the generator that dropout on ``device`` draws from; call right before the op that draws."""
        seed_default_generator(device, self.key)

    def generator(self) -> torch.Generator:
        """A fresh CPU generator at the start of this stream."""
        generator = torch.Generator()
        generator.manual_seed(self.key)
        return generator


def _hash(*words: int | str) -> int:
    digest = hashlib.blake2b(digest_size=8)
    for word in words:
        # The type's letter and the length in front keep any two lists of words apart.
        text = f"i{word}" if isinstance(word, int) else f"s{word}"
        data = text.encode()
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return int.from_bytes(digest.digest(), "little")
