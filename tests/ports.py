# SPDX-License-Identifier: Apache-2.0
"""Ports for servers that are started later, while other tests run on the same machine."""

import socket
from random import SystemRandom

_RANGE = range(12_000, 32_000)
"""Below what Linux gives to connections and to servers that ask for any port."""
_TRIES = 100


def free_port() -> int:
    """Return a port on the loopback interface that is free, and will hardly be taken meanwhile."""
    for _ in range(_TRIES):
        # Not from the common generator, whose seed several test processes may share.
        port = SystemRandom().choice(_RANGE)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError(f"no free port among {_TRIES} of {_RANGE}")
