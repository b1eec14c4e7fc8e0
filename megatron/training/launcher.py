"""Which rank a process is, as its launcher says: torchrun's variables, else SLURM's, else a world of one."""

import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

DEFAULT_PORT = 29500
"""Where a world meets when neither MASTER_PORT nor a SLURM job number says otherwise."""

_TORCHRUN = ("RANK", "WORLD_SIZE")
_NODE_LISTS = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")


@dataclass(frozen=True)
class World:
    """A process's place among all processes of its job, before they have met."""

    rank: int
    """Number of this process, from 0."""
    world_size: int
    """Processes of the job."""
    local_rank: int
    """Number of this process on its node, from 0."""
    address: str | None
    """Host where the processes meet; None for a world of one."""
    port: int
    """Port there."""
    hosts_store: bool
    """Whether this process opens that port. Not always rank 0: under torchrun it may be open already."""
    attempt: int = 0
    """How often the launcher has restarted the job."""
    launcher: str = "a single process"
    """What started the processes, in words."""


def discover_world(environ: Mapping[str, str]) -> World:
    """Read this process's place from its environment.

    torchrun's ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``MASTER_ADDR`` and ``MASTER_PORT`` win over SLURM's
    ``SLURM_PROCID``, ``SLURM_NTASKS``, ``SLURM_LOCALID`` and ``SLURM_JOB_NODELIST``.

    Raises:
        ValueError: naming the variables that are missing or contradict each other.
    """
    if any(_has(environ, name) for name in _TORCHRUN):
        return _from_torchrun(environ)
    tasks = _number(environ, "SLURM_NTASKS") if _has(environ, "SLURM_NTASKS") else None
    if _has(environ, "SLURM_PROCID") or _has(environ, "SLURM_LOCALID") or (tasks or 1) > 1:
        return _from_slurm(environ)
    return World(0, 1, 0, None, DEFAULT_PORT, hosts_store=True)


def expand_node_list(text: str) -> list[str]:
    """The hosts of a SLURM node list such as ``node[01-03,07],gpu5``, in order.

    Raises:
        ValueError: if brackets or ranges don't make sense.
    """
    hosts: list[str] = []
    for item in _split_outside_brackets(text):
        parts = re.split(r"\[([^\[\]]*)\]", item)  # plain text and bracket contents take turns
        choices = [list(_expand_ranges(part, text)) if i % 2 else [part] for i, part in enumerate(parts)]
        if any(re.search(r"[\[\]\s]", part) for part in parts[::2]) or not item:
            raise ValueError(f"cannot read the node list {text!r}: {item!r} is no host")
        hosts += ["".join(words) for words in itertools.product(*choices)]
    return hosts


def _from_torchrun(environ: Mapping[str, str]) -> World:
    _require(environ, _TORCHRUN, "are torchrun's and come together")
    rank, size = _number(environ, "RANK"), _number(environ, "WORLD_SIZE")
    _check_rank("RANK", rank, "WORLD_SIZE", size)
    local_rank = _number(environ, "LOCAL_RANK") if _has(environ, "LOCAL_RANK") else rank
    if _has(environ, "LOCAL_WORLD_SIZE"):
        _check_rank("LOCAL_RANK", local_rank, "LOCAL_WORLD_SIZE", _number(environ, "LOCAL_WORLD_SIZE"))
    if local_rank > rank:
        raise ValueError(f"LOCAL_RANK={local_rank} contradicts RANK={rank}: it can't be larger")
    if size > 1:
        _require(environ, ("MASTER_ADDR", "MASTER_PORT"), f"say where WORLD_SIZE={size} processes meet")
    return World(
        rank,
        size,
        local_rank,
        environ.get("MASTER_ADDR") if size > 1 else None,
        _port(environ),
        hosts_store=rank == 0 and environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
        attempt=_number(environ, "TORCHELASTIC_RESTART_COUNT")
        if _has(environ, "TORCHELASTIC_RESTART_COUNT")
        else 0,
        launcher="torchrun" if _has(environ, "TORCHELASTIC_RUN_ID") else "RANK and WORLD_SIZE",
    )


def _from_slurm(environ: Mapping[str, str]) -> World:
    _require(
        environ,
        ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
        "are SLURM's and come together; start with srun, or unset them for a single process",
    )
    rank, size = _number(environ, "SLURM_PROCID"), _number(environ, "SLURM_NTASKS")
    local_rank = _number(environ, "SLURM_LOCALID")
    _check_rank("SLURM_PROCID", rank, "SLURM_NTASKS", size)
    if local_rank > rank:
        raise ValueError(f"SLURM_LOCALID={local_rank} contradicts SLURM_PROCID={rank}: it can't be larger")
    address = environ.get("MASTER_ADDR") or (_first_host(environ) if size > 1 else None)
    first_node = _number(environ, "SLURM_NODEID") == 0 if _has(environ, "SLURM_NODEID") else rank == 0
    return World(
        rank,
        size,
        local_rank,
        address if size > 1 else None,
        _port(environ),
        # The port is opened on the first node of the list, wherever rank 0 may be.
        hosts_store=first_node and local_rank == 0,
        launcher="SLURM",
    )


def _first_host(environ: Mapping[str, str]) -> str:
    for name in _NODE_LISTS:
        if _has(environ, name):
            try:
                return expand_node_list(environ[name])[0]
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
    raise ValueError(
        f"SLURM_NTASKS={environ['SLURM_NTASKS']} processes need a place to meet, and neither "
        "SLURM_JOB_NODELIST nor MASTER_ADDR is set"
    )


def _port(environ: Mapping[str, str]) -> int:
    """``MASTER_PORT``, else one that follows from SLURM's job and step, so that jobs on one node differ."""
    if _has(environ, "MASTER_PORT"):
        port = _number(environ, "MASTER_PORT")
        if not 0 < port < 65536:
            raise ValueError(f"MASTER_PORT={port} is no port: give 1 to 65535")
        return port
    for name in ("SLURM_JOB_ID", "SLURM_JOBID"):
        if _has(environ, name):
            step = _number(environ, "SLURM_STEP_ID") if _has(environ, "SLURM_STEP_ID") else 0
            return 20000 + (_number(environ, name) * 13 + step) % 10000
    return DEFAULT_PORT


def _has(environ: Mapping[str, str], name: str) -> bool:
    return environ.get(name, "").strip() != ""


def _require(environ: Mapping[str, str], names: tuple[str, ...], what: str) -> None:
    missing = [name for name in names if not _has(environ, name)]
    if missing:
        found = [f"{name}={environ[name]}" for name in names if name not in missing]
        verb = "is" if len(missing) == 1 else "are"
        present = f" (found: {', '.join(found)})" if found else ""
        raise ValueError(f"{', '.join(missing)} {verb} not set{present}: {', '.join(names)} {what}")


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ[name].strip()
    if not text.isdecimal():
        raise ValueError(f"{name}={text!r} is not a whole number from 0 on")
    return int(text)


def _check_rank(rank_name: str, rank: int, size_name: str, size: int) -> None:
    if rank >= size:
        raise ValueError(f"{rank_name}={rank} contradicts {size_name}={size}: ranks go from 0 to {size - 1}")


def _split_outside_brackets(text: str) -> list[str]:
    return re.split(r",(?![^\[]*\])", text.strip())


def _expand_ranges(ranges: str, text: str) -> Iterator[str]:
    """``01-03,07`` as 01, 02, 03, 07: leading zeros stay."""
    for item in ranges.split(","):
        found = re.fullmatch(r"(\d+)(?:-(\d+))?", item)
        if found is None or int(found[2] or found[1]) < int(found[1]):
            raise ValueError(f"cannot read the node list {text!r}: {item!r} is no range")
        for number in range(int(found[1]), int(found[2] or found[1]) + 1):
            yield f"{number:0{len(found[1])}d}"
