import pytest

from megatron.training.launcher import DEFAULT_PORT, World, discover_world, expand_node_list

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "head",
    "MASTER_PORT": "1234",
}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_NODELIST": "gpu[07-08,11]",
    "SLURM_JOB_ID": "1000001",
}


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("node1", ["node1"]),
        ("node[01-03,07],gpu5", ["node01", "node02", "node03", "node07", "gpu5"]),
        ("a,b,c", ["a", "b", "c"]),
        ("rack[1-2]n[08-10]", ["rack1n08", "rack1n09", "rack1n10", "rack2n08", "rack2n09", "rack2n10"]),
        ("n[1-2]-ib,m[3]", ["n1-ib", "n2-ib", "m3"]),
        ("127.0.0.[1-2]", ["127.0.0.1", "127.0.0.2"]),
        ("n[98-101]", ["n98", "n99", "n100", "n101"]),
    ],
)
def test_node_lists(text, hosts):
    assert expand_node_list(text) == hosts


@pytest.mark.parametrize(
    "text", ["", "node[1-", "node]1[", "node[]", "node[3-1]", "node[a-b]", "a,,b", "a b"]
)
def test_node_lists_that_are_none(text):
    with pytest.raises(ValueError, match="cannot read the node list"):
        expand_node_list(text)


def test_a_plain_process_is_a_world_of_one():
    assert discover_world({}) == World(0, 1, 0, None, DEFAULT_PORT, hosts_store=True)
    assert discover_world({"SLURM_JOB_ID": "5", "SLURM_NTASKS": "1", "MASTER_ADDR": "x"}).world_size == 1


def test_torchrun():
    world = discover_world(TORCHRUN)
    assert world == World(3, 4, 1, "head", 1234, hosts_store=False, launcher="RANK and WORLD_SIZE")
    assert discover_world(TORCHRUN | {"RANK": "0", "LOCAL_RANK": "0"}).hosts_store
    agent = {
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "2",
        "TORCHELASTIC_RUN_ID": "x",
    }
    world = discover_world(TORCHRUN | {"RANK": "0", "LOCAL_RANK": "0"} | agent)
    assert (world.hosts_store, world.attempt, world.launcher) == (False, 2, "torchrun")


def test_slurm():
    world = discover_world(SLURM)
    port = 20000 + (1000001 * 13) % 10000
    assert world == World(5, 8, 1, "gpu07", port, hosts_store=False, launcher="SLURM")
    assert discover_world(SLURM | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0"}).hosts_store
    assert discover_world(SLURM | {"MASTER_ADDR": "other", "MASTER_PORT": "77"}).address == "other"
    assert discover_world(SLURM | {"MASTER_PORT": "77"}).port == 77
    assert discover_world(SLURM | {"SLURM_STEP_NODELIST": "gpu11"}).address == "gpu11"
    assert discover_world(SLURM | {"SLURM_STEP_ID": "1"}).port == port + 1


def test_the_port_is_opened_on_the_first_node_wherever_rank_zero_is():
    first = {"SLURM_PROCID": "4", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
    zero = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "1"}
    assert discover_world(SLURM | first).hosts_store
    assert not discover_world(SLURM | zero).hosts_store


def test_torchrun_wins_over_slurm():
    assert discover_world(SLURM | TORCHRUN) == discover_world(TORCHRUN)
    assert discover_world(SLURM | {"SLURM_PROCID": "x"} | TORCHRUN) == discover_world(TORCHRUN)


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        ({"RANK": "0"}, "WORLD_SIZE is not set"),
        ({"WORLD_SIZE": "2"}, "RANK is not set"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR, MASTER_PORT are not set"),
        (TORCHRUN | {"MASTER_PORT": ""}, "MASTER_PORT is not set"),
        (TORCHRUN | {"MASTER_PORT": "70000"}, "MASTER_PORT=70000 is no port"),
        (TORCHRUN | {"RANK": "4"}, "RANK=4 contradicts WORLD_SIZE=4"),
        (TORCHRUN | {"RANK": "-1"}, "RANK='-1' is not a whole number"),
        (
            TORCHRUN | {"LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "2"},
            "LOCAL_RANK=3 contradicts LOCAL_WORLD_SIZE=2",
        ),
        (TORCHRUN | {"RANK": "0"}, "LOCAL_RANK=1 contradicts RANK=0"),
        ({"SLURM_PROCID": "0"}, "SLURM_NTASKS, SLURM_LOCALID are not set"),
        ({"SLURM_NTASKS": "2"}, "SLURM_PROCID, SLURM_LOCALID are not set"),
        (SLURM | {"SLURM_PROCID": "8"}, "SLURM_PROCID=8 contradicts SLURM_NTASKS=8"),
        (SLURM | {"SLURM_LOCALID": "6"}, "SLURM_LOCALID=6 contradicts SLURM_PROCID=5"),
        (SLURM | {"SLURM_NTASKS": "many"}, "SLURM_NTASKS='many' is not a whole number"),
        (
            SLURM | {"SLURM_JOB_NODELIST": "gpu[1-"},
            r"SLURM_JOB_NODELIST: cannot read the node list 'gpu\[1-'",
        ),
        (SLURM | {"SLURM_JOB_NODELIST": ""}, "neither SLURM_JOB_NODELIST nor MASTER_ADDR is set"),
    ],
)
def test_contradictions_and_gaps_are_named(environ, named):
    with pytest.raises(ValueError, match=named):
        discover_world(environ)
