# SPDX-License-Identifier: Apache-2.0
"""Has a rank's fork server forked from a process that has imported the trainer, as the rank is.

The checkpoint worker of a rank comes from a fork server, an interpreter of its own that the rank
starts; it or the worker then imports the trainer. Here the rank keeps a fork of itself, as it was
before its script ran, that runs the code of that interpreter when the rank asks for it.
"""

import json
import os
import socket
import sys
import traceback
from collections.abc import Iterable
from multiprocessing import util
from typing import Any

_CODE = "from multiprocessing.forkserver import main"
_MOST_DESCRIPTORS = 16
_CHUNK_BYTES = 2**16


def fork_future_server() -> None:
    """Keep a process ready that becomes the fork server of this one, or else ends with it."""
    ours, theirs = socket.socketpair()
    server = os.fork()
    if server == 0:
        _run_code_of_rank(theirs)
    theirs.close()
    spawn = util.spawnv_passfds

    def spawn_or_ask(path: Any, arguments: list[Any], descriptors: Iterable[int]) -> int:
        code = os.fsdecode(arguments[-1])
        if not code.startswith(_CODE) or ours.fileno() < 0:
            return spawn(path, arguments, descriptors)
        numbers = list(descriptors)
        request = {"code": code, "numbers": numbers, "environment": dict(os.environ)}
        with ours:
            socket.send_fds(ours, [b"\n"], numbers)
            ours.sendall(json.dumps(request).encode())
        return server

    util.spawnv_passfds = spawn_or_ask


def _run_code_of_rank(control: socket.socket) -> None:
    """Run the code that arrives through the socket *control*, if any, and end."""
    status = 1
    try:
        _let_go_of_all_but(control.fileno())
        with control:
            _, received, _, _ = socket.recv_fds(control, 1, _MOST_DESCRIPTORS)
            text = b"".join(iter(lambda: control.recv(_CHUNK_BYTES), b""))
        if text:
            request = json.loads(text)
            _renumber(received, request["numbers"])
            os.environ.clear()
            os.environ.update(request["environment"])
            sys.argv = ["-c"]
            exec(request["code"], {"__name__": "__main__"})
        status = 0
    except SystemExit:
        status = 0  # how a fork server ends
    except BaseException:  # must not go on as the rank, whatever happens
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _let_go_of_all_but(kept: int) -> None:
    """Have no descriptors of the rank, as an interpreter that it starts, besides what it prints to.

    Their numbers stay taken: libraries that the rank has used would close them later.
    """
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in map(int, os.listdir("/proc/self/fd")):
        if number > 2 and number not in (kept, nothing):
            os.dup2(nothing, number, inheritable=False)


def _renumber(descriptors: list[int], numbers: list[int]) -> None:
    """Give descriptors the numbers that they have in the rank's code."""
    beyond = max(*descriptors, *numbers) + 1
    for place, descriptor in enumerate(descriptors):
        os.dup2(descriptor, beyond + place, inheritable=False)
        os.close(descriptor)
    for place, number in enumerate(numbers):
        os.dup2(beyond + place, number, inheritable=False)
        os.close(beyond + place)
