# SPDX-License-Identifier: Apache-2.0
"""The store as one server, and the clock that everything in a simulation goes by."""

import heapq
import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

from tools.load_plan.setting import Store


class Clock:
    """Calls what is due, in the order of time."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._number = itertools.count()

    def at(self, time: float, action: Callable[..., None], *arguments: Any) -> None:
        """Have *action* called at *time*; what is due at the same time goes in order of asking."""
        heapq.heappush(self._due, (time, next(self._number), action, arguments))

    def run(self) -> None:
        """Call until nothing is due."""
        while self._due:
            self.now, _, action, arguments = heapq.heappop(self._due)
            action(*arguments)


class SharedStore:
    """Serves requests first come, first served, within a bandwidth and a rate of requests.

    A request begins when the rate allows it, its bytes leave the store after those of the requests
    before, and no faster than one connection takes them; then the latency passes. Requests overlap
    in latency and on their connections, not in the store's bandwidth.
    """

    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._next_begin = 0.0
        self._sent_until = 0.0
        self.requests = 0
        self.bytes = 0
        self._by_second: Counter[int] = Counter()

    def request(self, size: int, action: Callable[..., None], *arguments: Any) -> None:
        """Ask for *size* bytes now, and have *action* called when they are there."""
        store = self._store
        begin = max(self._clock.now, self._next_begin)
        self._next_begin = begin + 1 / store.requests_per_second
        send = max(begin, self._sent_until) if size else begin
        if size:
            self._sent_until = send + size / store.bandwidth
        done = max(send + size / store.bandwidth, send + size / store.connection_bandwidth)
        self._clock.at(done + store.latency, action, *arguments)
        self.requests += 1
        self.bytes += size
        self._by_second[int(begin)] += 1

    @property
    def peak_requests_per_second(self) -> int:
        """The most requests that began within one second."""
        return max(self._by_second.values(), default=0)
