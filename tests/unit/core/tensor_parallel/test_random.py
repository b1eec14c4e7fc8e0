import hashlib

import torch
import torch.nn.functional as F

from megatron.core.tensor_parallel import RandomStream

CPU = torch.device("cpu")


def test_key_is_the_hash_of_length_prefixed_words():
    # So it is the same on every machine and in every process, unlike Python's own hash of a string.
    def field(data: bytes) -> bytes:
        return len(data).to_bytes(8, "little") + data

    root = hashlib.blake2b(field(b"sroot") + field(b"i1234"), digest_size=8).digest()
    assert RandomStream.root(1234).key == int.from_bytes(root, "little")
    key = RandomStream.root(1234).key
    folded = hashlib.blake2b(
        field(f"i{key}".encode()) + field(b"slayer") + field(b"i3"), digest_size=8
    ).digest()
    assert RandomStream.root(1234).fold("layer", 3).key == int.from_bytes(folded, "little")


def test_different_words_give_different_streams():
    root = RandomStream.root(1)
    streams = [
        root,
        RandomStream.root(2),
        root.fold("a"),
        root.fold("b"),
        root.fold(1),
        root.fold("1"),
        root.fold("i1"),
        root.fold(-1),
        root.fold("a", "b"),
        root.fold("b", "a"),
        root.fold("ab"),
        root.fold("a").fold("b"),
        root.fold("a", ""),
        root.fold(1, 2),
        root.fold(12),
        root.fold(2**40),
    ]
    assert len({stream.key for stream in streams}) == len(streams)
    assert all(0 <= stream.key < 2**64 for stream in streams)


def test_large_keys_seed_both_kinds_of_generator():
    # Half of all keys are above 2**63, which a signed seed cannot hold.
    for key in (0, 2**63 - 1, 2**63, 2**64 - 1):
        stream = RandomStream(key)
        stream.seed_default(CPU)
        drawn = torch.rand(4)
        assert torch.equal(drawn, torch.rand(4, generator=stream.generator()))


def test_dropout_re_enters_its_stream():
    x = torch.ones(64, 64)
    stream = RandomStream.root(3).fold("dropout", 0)
    stream.seed_default(CPU)
    first = F.dropout(x, 0.5)
    torch.rand(1000)
    stream.seed_default(CPU)
    assert torch.equal(first, F.dropout(x, 0.5))
    stream.fold("other").seed_default(CPU)
    assert not torch.equal(first, F.dropout(x, 0.5))
