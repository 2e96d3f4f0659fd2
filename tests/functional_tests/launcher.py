# SPDX-License-Identifier: Apache-2.0
"""Forks torchrun and its ranks from a process that has imported the trainer: seconds less per job.

Ranks then run their script as an interpreter of their own would, and so does the fork server that a
rank has its checkpoint worker from. A job may ask for such interpreters instead: those of hybrid
models, and of most kinds of dumps one, do. What a user types is run that way by the tests of the
quickstart and of the SLURM scripts.
"""

import atexit
import multiprocessing
import os
import runpy
import shlex
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path

from torch.distributed import run

from tests.functional_tests.fork_server import fork_future_server

REPOSITORY_ROOT = Path(__file__).resolve().parents[2]
PRELOADED = "tests.functional_tests.preloaded"
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(REPOSITORY_ROOT),
    "CUDA_VISIBLE_DEVICES": "",
}
"""What torch reads when it is imported is the same for all jobs."""

_forks = multiprocessing.get_context("forkserver")
_forks.set_forkserver_preload([PRELOADED])


def start_torchrun(
    arguments: list[str], environment: Mapping[str, str], output: Path, *, fresh: bool = False
) -> BaseProcess:
    """Start torchrun as the leader of a session, with everything that is printed in *output*.

    Args:
        arguments: The command line of torchrun.
        environment: Environment variables besides :data:`ENVIRONMENT`; all there are.
        output: The file.
        fresh: Start the ranks, and their fork servers, as interpreters of their own.
    """
    return _start(_torchrun if fresh else _torchrun_forking, arguments, environment, output)


def start_rank(command: list[str], environment: Mapping[str, str], output: Path) -> BaseProcess:
    """Start one rank without torchrun; as :func:`start_torchrun` otherwise.

    Args:
        command: The script and its arguments.
        environment: As above, with what torchrun would set.
        output: The file.
    """
    return _start(_be_rank, command, environment, output)


def _start(
    target: Callable[[list[str]], None],
    arguments: list[str],
    environment: Mapping[str, str],
    output: Path,
) -> BaseProcess:
    with _environment(ENVIRONMENT):
        forkserver.ensure_running()
    process = _forks.Process(
        target=_lead, args=(target, arguments, {**environment, **ENVIRONMENT}, output)
    )
    process.start()
    return process


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _lead(
    target: Callable[[list[str]], None],
    arguments: list[str],
    environment: dict[str, str],
    output: Path,
) -> None:
    # The fork server passes over a module that it cannot import.
    assert PRELOADED in sys.modules, f"{PRELOADED} cannot be imported"
    prepared: dict[str, str] = sys.modules[PRELOADED].PREPARED
    os.setsid()
    with output.open("w") as stream:
        stream.write(shlex.join(arguments) + "\n")
        stream.flush()
        for descriptor in (1, 2):
            os.dup2(stream.fileno(), descriptor)
    os.environ.clear()
    os.environ.update(prepared | environment)
    tempfile.tempdir = None  # not yet read from the environment
    os.chdir(REPOSITORY_ROOT)
    target(arguments)


def _torchrun(arguments: list[str]) -> None:
    run.main(arguments)


def _torchrun_forking(arguments: list[str]) -> None:
    def be_rank(*command: str) -> None:
        # As torchrun starts the ranks that it does not fork.
        os.setsid()
        _be_rank(list(command))

    run.run_script_path = be_rank
    run.main(["--run-path", "--start-method", "fork", *arguments])


def _be_rank(command: list[str]) -> None:
    """Run a script in this forked process as ``python SCRIPT ARGUMENTS`` would."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    atexit._clear()
    # A rank that wants a fork server, for its checkpoint worker, starts one of its own.
    forkserver.set_forkserver_preload(["__main__"])
    fork_future_server()
    sys.argv = command
    sys.path.insert(0, str(Path(command[0]).parent))
    try:
        runpy.run_path(command[0], run_name="__main__")
    except Exception:
        traceback.print_exc()
        sys.exit(1)
    finally:
        # In the order of an interpreter that ends.
        threading._shutdown()
        atexit._run_exitfuncs()
