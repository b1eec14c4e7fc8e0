"""Jobs on a cluster that the user has: each is a task of Ray or Dask.

Both are optional and imported only here, when asked for. Tasks read and write a file system that all machines
of the cluster share, and the machines need this package.
"""

import importlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, Literal

from megatron.corpora.jobs import Job, Work, run_here

Engine = Literal["local", "ray", "dask"]

REQUIREMENTS: Final = "requirements-cluster.txt"
"""Where both engines are pinned."""
_ROOT: Final = Path(__file__).resolve().parents[2]
_MODULES: Final = {"ray": "ray", "dask": "distributed"}


def run_on_cluster(
    engine: Engine, address: str | None, work: Work[Any], jobs: Sequence[Job], done: Callable[[int], None]
) -> Iterator[dict[str, Any]]:
    """Do the jobs on a cluster, one task and one CPU each.

    Args:
        engine: whose cluster.
        address: Ray's address (default: what ``RAY_ADDRESS`` says, else a cluster on this machine), or that
            of Dask's scheduler (default: a cluster on this machine).
        work: what to do.
        jobs: in any order.
        done: is told 1 for each job that is done.

    Yields:
        What came of each job, as they end.

    Raises:
        ValueError: if the engine is not installed, or a job has failed.
    """
    module = _imported(engine)
    outcomes = (_with_ray if engine == "ray" else _with_dask)(module, address, _Task(work), jobs)
    for report, problem in outcomes:
        if problem is not None:
            raise ValueError(problem)
        done(1)
        yield report


def _imported(engine: Engine) -> Any:
    try:
        return importlib.import_module(_MODULES[engine])
    except ImportError as error:
        raise ValueError(
            f"--engine {engine}: {error}; pip install -r {REQUIREMENTS} brings it, and --shard i/n divides "
            "the work without it"
        ) from None


class _Task:
    """A job as a task: an error of the user's comes back as a value, without the engine's traceback."""

    def __init__(self, work: Work[Any]) -> None:
        self._work = work

    def __call__(self, job: Job) -> tuple[dict[str, Any], str | None]:
        try:
            return run_here(self._work, job), None
        except (ValueError, OSError) as error:
            return {}, str(error)


def _with_ray(ray: Any, address: str | None, task: _Task, jobs: Sequence[Job]) -> Iterator[Any]:
    # Workers look for this package where it lies here, too: on shared storage that is the same place.
    path = {"PYTHONPATH": f"{_ROOT}:${{PYTHONPATH}}"}
    ray.init(address=address, log_to_driver=False, runtime_env={"env_vars": path})
    try:
        shared = ray.put(task)
        remote = ray.remote(num_cpus=1)(_call)
        waiting = [remote.remote(shared, job) for job in jobs]
        while waiting:
            ready, waiting = ray.wait(waiting)
            yield ray.get(ready[0])
    finally:
        ray.shutdown()


def _call(task: _Task, job: Job) -> tuple[dict[str, Any], str | None]:
    return task(job)


def _with_dask(distributed: Any, address: str | None, task: _Task, jobs: Sequence[Job]) -> Iterator[Any]:
    with distributed.Client(address) as client:
        futures = client.map(task, jobs, pure=False)
        for future in distributed.as_completed(futures):
            yield future.result()
