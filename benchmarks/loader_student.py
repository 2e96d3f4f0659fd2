# SPDX-License-Identifier: Apache-2.0
"""A rank of a student that calls a loss object, for ``bench_loader``."""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

from benchmarks.loader_implementations import Installed, Ours
from benchmarks.loader_samples import QUARTERS, expected_ids, found_ids, marked_entries
from benchmarks.loader_state import RunState


class Student:
    """A rank of data parallel rank 0. What reaches the math of its loss is kept to be verified.

    Args:
        adapter: The implementation.
        state: What is set to the student's layout.
        request: The layout, the folder of the cache, and how many iterations from which one on.
    """

    def __init__(self, adapter: Installed | Ours, state: RunState, request: dict[str, Any]) -> None:
        self._adapter = adapter
        self._state = state
        self._folder = request["folder"]
        self._dp_size, self._gbs = request["dp"], request["gbs"]
        self._cp_size = request["cp"]
        self._cp_rank = state.set_parallel(request["tp"], self._cp_size)
        state.set_batches(request["length"], self._gbs, self._dp_size)
        self.iterations = range(request["start"], request["start"] + request["iterations"])
        self._step = request["length"] // QUARTERS
        length = request["length"] // self._cp_size
        self._logits = torch.zeros(length, 1, 1)
        self._labels = {
            sample: torch.full((1, length), sample)
            for iteration in self.iterations
            for sample in self._samples(iteration)
        }
        self._called: list[int] = []
        self._marked: list[tuple[torch.Tensor, torch.Tensor]] = []

    def as_rank(self) -> AbstractContextManager[None]:
        """Have the global state say which rank this is, for a ``with`` statement."""
        return self._state.as_rank(0, self._dp_size, self._cp_rank)

    def loss(self) -> Any:
        """Return the loss object, whose math is left out."""

        def deliver(logits: torch.Tensor, values: Any, indices: Any, *_: Any, **__: Any) -> Any:
            self._marked.append(marked_entries(values, indices, self._step))
            return torch.zeros(logits.shape[:2])

        return self._adapter.loss(self._folder, deliver)

    def calls(self, loss: Any, iteration: int) -> Iterator[float]:
        """Call *loss* for each microbatch of an iteration; yield the seconds that it takes."""
        self._state.set_position(iteration, self._gbs)
        for sample in self._samples(iteration):
            self._called.append(sample)
            began = time.perf_counter()
            self._adapter.call(loss, self._logits, self._labels[sample])
            yield time.perf_counter() - began

    def check(self) -> None:
        """Raise an error if a call got the rows of another sample."""
        wrong = sum(
            found_ids(*rows) != expected_ids(sample, self._cp_rank, self._cp_size)
            for sample, rows in zip(self._called, self._marked, strict=True)
        )
        if wrong:
            raise ValueError(f"wrong rows for {wrong} of {len(self._called)} samples")

    def _samples(self, iteration: int) -> range:
        return range(iteration * self._gbs, (iteration + 1) * self._gbs, self._dp_size)
