"""Jobs as tasks of Ray and Dask: with stand-ins for both, and the real ones where installed."""

import json
import sys
import types

import pytest

from tests.unit.corpora.tools import last_line, report_of, run


class Ray(types.ModuleType):
    """As much of Ray as is used: tasks run when they are waited for, the last first."""

    def init(self, address, log_to_driver, runtime_env):
        self.address = address

    def shutdown(self):
        self.address = "closed"

    def put(self, value):
        return value

    def get(self, reference):
        return reference()

    def remote(self, num_cpus):
        assert num_cpus == 1
        return lambda function: types.SimpleNamespace(remote=lambda *given: lambda: function(*given))

    def wait(self, waiting):
        return waiting[-1:], waiting[:-1]


class Dask(types.ModuleType):
    """As much of Dask as is used."""

    def Client(self, address):  # noqa: N802 - its name there
        self.address = address
        return self

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.address = "closed"

    def map(self, function, jobs, pure):
        assert not pure
        return [types.SimpleNamespace(result=lambda job=job: function(job)) for job in jobs]

    def as_completed(self, futures):
        return reversed(futures)


def corpus(folder, count=3):
    names = [f"{number}.jsonl" for number in range(count)]
    for number, name in enumerate(names):
        (folder / name).write_text(json.dumps({"text": "w " * (127 + number)}) + "\n")
    return names


@pytest.fixture(params=[("ray", "ray", Ray), ("dask", "distributed", Dask)], ids=["ray", "dask"])
def stand_in(request, monkeypatch):
    engine, name, kind = request.param
    module = kind(name)
    monkeypatch.setitem(sys.modules, name, module)
    return engine, module


def test_tasks_write_what_processes_write(tmp_path, stand_in):
    engine, module = stand_in
    flags = ["--input", *corpus(tmp_path)]
    here = report_of(run("clean_corpus", *flags, "--output-folder", "here", cwd=tmp_path))
    there = report_of(
        run(
            "clean_corpus",
            *flags,
            "--output-folder",
            "there",
            "--engine",
            engine,
            "--engine-address",
            "x",
            cwd=tmp_path,
        )
    )
    assert module.address == "closed"
    assert there == here
    assert there["kept"] == 2
    for path in (tmp_path / "here").iterdir():
        assert (tmp_path / "there" / path.name).read_bytes() == path.read_bytes()
    assert len(list((tmp_path / "there").iterdir())) == 3


def test_a_bad_line_in_a_task_ends_the_run_with_one_line(tmp_path, stand_in):
    engine, module = stand_in
    names = corpus(tmp_path)
    (tmp_path / names[1]).write_text("no JSON\n")
    result = run(
        "clean_corpus", "--input", *names, "--output-folder", "there", "--engine", engine, cwd=tmp_path
    )
    assert result.returncode == 1
    assert last_line(result).startswith(f"error: {names[1]}:1: malformed JSON")
    assert not (tmp_path / "there" / names[1]).exists()
    assert module.address == "closed"


@pytest.mark.nightly
@pytest.mark.parametrize(("engine", "module"), [("ray", "ray"), ("dask", "distributed")])
def test_real_engines_deduplicate_as_processes_do(tmp_path, engine, module):
    pytest.importorskip(module)
    names = corpus(tmp_path)
    flags = ["--input", *names, "--shingle-size", 1]
    report_of(run("deduplicate", *flags, "--output-folder", "here", "--work-folder", "a", cwd=tmp_path))
    report_of(
        run(
            "deduplicate",
            *flags,
            "--output-folder",
            "there",
            "--work-folder",
            "b",
            "--engine",
            engine,
            cwd=tmp_path,
        )
    )
    kept = [(tmp_path / "here" / name).read_bytes() for name in names]
    assert [(tmp_path / "there" / name).read_bytes() for name in names] == kept
    assert [bool(lines) for lines in kept] == [True, False, False]
