import torch.distributed as dist

from tests.harness import make_state, run_ranks


def _layout(tp: int, pp: int) -> dict[str, list[int]]:
    state = make_state(tp=tp, pp=pp)
    groups = {axis: dist.get_process_group_ranks(state.group(axis)) for axis in ("pp", "dp", "cp", "tp")}
    groups["model"] = dist.get_process_group_ranks(state.model_group)
    groups["data"] = dist.get_process_group_ranks(state.data_group)
    groups["embedding"] = dist.get_process_group_ranks(state.embedding_group) if state.embedding_group else []
    return groups


def test_tensor_parallel_ranks_are_neighbours_and_stages_lie_apart():
    # 4 ranks as TP 2, PP 2: rank = 2 * stage + tp rank.
    found = run_ranks(4, _layout, 2, 2)
    assert [rank["tp"] for rank in found] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [rank["pp"] for rank in found] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert [rank["dp"] for rank in found] == [[0], [1], [2], [3]]
    assert [rank["embedding"] for rank in found] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert all(rank["model"] == [0, 1, 2, 3] for rank in found)


def test_data_parallel_is_what_the_layout_leaves():
    found = run_ranks(4, _layout, 2, 1)
    assert [rank["dp"] for rank in found] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert [rank["data"] for rank in found] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert all(rank["embedding"] == [] for rank in found)
