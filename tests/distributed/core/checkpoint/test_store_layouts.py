"""Any layout loads what any other saved."""

import itertools

import torch
import torch.distributed as dist

from megatron.core.checkpoint import (
    load,
    open_checkpoint,
    save,
    sharded_parameter,
    share_among_replicas,
    verify,
    whole_tensor,
)
from megatron.core.parameter import ParameterFacts, Piece
from tests.harness import make_state, run_ranks

CPU = torch.device("cpu")
LAYERS = 4
VOCABULARY = 101
HIDDEN = 6
GROUPS = 2  # of keys; with four tensor-parallel ranks each is on two
PARTS = {"model": torch.bfloat16, "optimizer.main": torch.float32, "optimizer.exp_avg": torch.float32}


def _dense(part, name, shape):
    """The whole tensor: values that tell part, name and place apart, exact in every format used."""
    seed = sum(map(ord, part + name))
    values = torch.randint(-1000, 1000, shape, generator=torch.Generator().manual_seed(seed))
    scale = 1 if PARTS[part] == torch.bfloat16 else 1 / 3
    return (values * scale).to(PARTS[part])


def _facts(shape, dim, *pieces, copy_of=None):
    return ParameterFacts(shape, dim, pieces, init_std=1.0, copy_of=copy_of)


def _vocabulary(rank, size, multiple, copy_of=None):
    padded = -(-VOCABULARY // (multiple * size)) * multiple * size
    rows = padded // size
    true = max(0, min(VOCABULARY - rank * rows, rows))
    piece = Piece(0, min(rank * rows, VOCABULARY), true)
    return (rows, HIDDEN), _facts((VOCABULARY, HIDDEN), 0, piece, copy_of=copy_of)


def _parameters(state, multiple):
    """Name, local shape and facts of each parameter of this rank, as the layers make them."""
    rank, size = state.rank("tp"), state.size("tp")
    stage, stages = state.rank("pp"), state.size("pp")
    found = {}
    if stage == 0:
        found["embedding.weight"] = _vocabulary(rank, size, multiple)
    for layer in range(stage * LAYERS // stages, (stage + 1) * LAYERS // stages):
        wide = 8 // size
        gate, up = Piece(0, rank * wide, wide), Piece(wide, 8 + rank * wide, wide)
        found[f"layers.{layer}.fc1.weight"] = (2 * wide, HIDDEN), _facts((16, HIDDEN), 0, gate, up)
        found[f"layers.{layer}.fc2.weight"] = (
            (HIDDEN, wide),
            _facts((HIDDEN, 8), 1, Piece(0, rank * wide, wide)),
        )
        share = max(1, size // GROUPS)
        keys = 4 // min(size, GROUPS)
        key = Piece(0, rank // share * keys, keys, primary=rank % share == 0)
        found[f"layers.{layer}.key.weight"] = (keys, HIDDEN), _facts((4, HIDDEN), 0, key)
        norm = Piece(0, 0, HIDDEN, primary=rank == 0)
        found[f"layers.{layer}.norm.weight"] = (HIDDEN,), _facts((HIDDEN,), 0, norm)
    if stage == stages - 1 and stage > 0:
        shape, facts = _vocabulary(rank, size, multiple, copy_of="embedding.weight")
        found["output_layer.weight"] = shape, facts
    return found


def _sharded(state, multiple, fill, primary_only):
    """This rank's part of everything, taken from the dense tensors or filled with -1; padding is -2."""
    tensors, locals_ = [], []
    for (path, (shape, facts)), part in itertools.product(_parameters(state, multiple).items(), PARTS):
        name = facts.copy_of or path
        local = torch.full(shape, -2, dtype=PARTS[part])
        dense = _dense(part, name, facts.global_shape)
        for piece in facts.pieces:
            view = local.narrow(facts.dim, piece.local, piece.length)
            view.copy_(dense.narrow(facts.dim, piece.start, piece.length)) if fill else view.fill_(-1)
        tensors.append(sharded_parameter(f"{part}.{name}", local, facts, primary_only=primary_only))
        locals_.append(local)
    return tensors, locals_


def _save(root, iteration, state, multiple):
    tensors, _ = _sharded(state, multiple, fill=True, primary_only=True)
    own = share_among_replicas(tensors, state.data_group.rank(), state.data_group.size())
    save(root, iteration, own, {"consumed_samples": 80}, state.world_group, CPU)


def _load(root, iteration, state, multiple):
    """Whether everything that this rank holds is filled with its part of the dense tensors."""
    _, expected = _sharded(state, multiple, fill=True, primary_only=False)
    tensors, found = _sharded(state, multiple, fill=False, primary_only=False)
    checkpoint = open_checkpoint(root, state.world_group, CPU, step=iteration)
    load(checkpoint, tensors, state.world_group, CPU)
    assert checkpoint.manifest.state == {"consumed_samples": 80}
    assert len(found) > len(PARTS)
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


# Tensor-parallel and pipeline size (what is left of four ranks is data parallel), padding of the vocabulary.
LAYOUTS = [(1, 1, 128), (2, 1, 128), (4, 1, 8), (1, 2, 8), (1, 4, 128), (2, 2, 8)]


def _all_pairs(root):
    states = [(make_state(tp=tp, pp=pp), multiple) for tp, pp, multiple in LAYOUTS]
    for number, (state, multiple) in enumerate(states):
        _save(root, number, state, multiple)
    return [[_load(root, number, *layout) for layout in states] for number in range(len(states))]


def test_every_layout_loads_what_every_other_saved(tmp_path):
    found = run_ranks(4, _all_pairs, tmp_path)
    assert found == [[[True] * len(LAYOUTS)] * len(LAYOUTS)] * 4
    # Every whole tensor lies there once and nothing else does: embedding; fc1, fc2, key, norm per layer.
    elements = VOCABULARY * HIDDEN + LAYERS * (16 * HIDDEN + 8 * HIDDEN + 4 * HIDDEN + HIDDEN)
    for number in range(len(LAYOUTS)):
        folder = tmp_path / f"iter_{number:07d}"
        manifest = verify(folder).manifest
        assert manifest.tensors["model.embedding.weight"].shape == (VOCABULARY, HIDDEN)
        assert not [name for name in manifest.tensors if "output_layer" in name]
        data = 0
        for path in folder.glob("*.safetensors"):
            data += path.stat().st_size - 8 - int.from_bytes(path.read_bytes()[:8], "little")
        assert data == elements * (2 + 4 + 4)


def _save_in(root, iteration, tp, pp, multiple):
    _save(root, iteration, make_state(tp=tp, pp=pp), multiple)


def _load_in(root, iteration, tp, pp, multiple):
    return _load(root, iteration, make_state(tp=tp, pp=pp), multiple)


def test_one_rank_and_four_exchange_checkpoints(tmp_path):
    run_ranks(1, _save_in, tmp_path, 1, 1, 1, 128)
    assert run_ranks(4, _load_in, tmp_path, 1, 2, 2, 8) == [True] * 4
    run_ranks(4, _save_in, tmp_path, 2, 4, 1, 128)
    assert run_ranks(1, _load_in, tmp_path, 2, 1, 1, 8) == [True]


def _save_alone(root):
    group = dist.new_group([0, 1, 2])
    rank = group.rank()
    tensors = [whole_tensor("w", torch.arange(3.0))] if rank == 1 else []
    save(root, 1, tensors, {"rank": rank}, group, CPU)
    checkpoint = open_checkpoint(root, group, CPU)
    found = torch.zeros(3)
    load(checkpoint, [whole_tensor("w", found)] if rank != 1 else [], group, CPU)
    return found.tolist()


def test_ranks_that_hold_nothing_take_part_and_leave_no_file(tmp_path):
    assert run_ranks(3, _save_alone, tmp_path) == [[0.0, 1.0, 2.0], [0.0, 0.0, 0.0], [0.0, 1.0, 2.0]]
    folder = tmp_path / "iter_0000001"
    assert sorted(path.name for path in folder.iterdir()) == ["manifest.json", "rank_00001.safetensors"]
    assert verify(folder).manifest.state == {"rank": 0}
