"""The corpus tools run in the test's process, as their command lines would run them."""

import contextlib
import importlib
import io
import json
import signal
import subprocess

from megatron.training.console import run_as_program


def run(tool, *flags, cwd):
    """What ``python tools/TOOL.py FLAGS`` gives: exit code, output and errors; a start takes seconds."""
    main = importlib.import_module(f"tools.{tool}").main
    arguments = [str(flag) for flag in flags]
    handler, code = signal.getsignal(signal.SIGTERM), 0
    output, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors), contextlib.chdir(cwd):
        try:
            run_as_program(lambda: main(arguments))
        except SystemExit as end:
            code = end.code
        finally:
            signal.signal(signal.SIGTERM, handler)
    return subprocess.CompletedProcess(arguments, code, output.getvalue(), errors.getvalue())


def report_of(result):
    """The report that a tool has printed."""
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def write_corpus(path, texts, **more):
    """JSON lines of texts, each with its number and ``more``."""
    lines = (json.dumps({"id": number, "text": text, **more}) for number, text in enumerate(texts))
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def read_corpus(path):
    """The objects of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def last_line(result):
    """The one line of errors of a tool that has failed; bars of progress stand before it."""
    lines = [line for line in result.stderr.replace("\r", "\n").splitlines() if "error:" in line]
    assert len(lines) == 1, result.stderr
    return lines[0]
