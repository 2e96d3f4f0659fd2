# SPDX-License-Identifier: Apache-2.0
"""Streams one rank's teacher targets, read and decoded ahead of training.

Nothing here communicates between ranks: :class:`TargetStream` answers what this rank can read, and
its caller lets the ranks agree on what to do about a failure.
"""

import functools
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from megatron.training.distillation import storage
from megatron.training.distillation.background_iterator import BackgroundIterator
from megatron.training.distillation.errors import TeacherDataError
from megatron.training.distillation.manifest import ExpectedRun
from megatron.training.distillation.shard_reader import TeacherRowReader
from megatron.training.distillation.targets import (
    DEFAULT_MAX_AHEAD_BYTES,
    IterationFailure,
    IterationTargets,
    LoadLayout,
)

logger = logging.getLogger(__name__)

# A process of its own decodes, and a thread here takes what it has decoded out of its hands, so
# that a step finds its targets ready. Each holds few, as the reader works ahead by itself.
PREFETCHED_ITERATIONS = 1
_READY_ITERATIONS = 1
_HELD_ITERATIONS = PREFETCHED_ITERATIONS + _READY_ITERATIONS + 3
"""What may be held outside of the reader, with the thread's, the one in use and the next one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamOptions:
    """How to read a cache.

    Attributes:
        logprobs_dir: Directory of the cache, a local path or ``msc://`` URL.
        expected_identifiers: The run whose data the shards must be of, or its identifiers alone;
            None accepts any.
        decode_threads: Threads that decode payloads ahead.
        decode_lookahead: Iterations decoded ahead; None chooses by the number of threads.
        max_ahead_bytes: Bytes of decoded rows that may be held ahead of training.
        msc_prefetch_depth: Whole shards fetched ahead from an object store.
        names: The directory's listing; None has every reader list it for itself.
    """

    logprobs_dir: str
    expected_identifiers: ExpectedRun | Mapping[str, Any] | None
    decode_threads: int
    decode_lookahead: int | None
    msc_prefetch_depth: int
    max_ahead_bytes: int = DEFAULT_MAX_AHEAD_BYTES
    names: Sequence[str] | None = None

    def reader(self, layout: LoadLayout) -> TeacherRowReader:
        """Open the cache for one load rank."""
        return TeacherRowReader(
            self.logprobs_dir,
            layout,
            expected_identifiers=self.expected_identifiers,
            decode_threads=self.decode_threads,
            decode_lookahead=self.decode_lookahead,
            msc_prefetch_depth=self.msc_prefetch_depth,
            max_ahead_bytes=self.max_ahead_bytes,
            held_iterations=_HELD_ITERATIONS,
            names=self.names,
        )


class _IterationDataset(IterableDataset[IterationTargets | IterationFailure]):
    """The reader's iterations from one sample on, as a dataset of whole iterations."""

    def __init__(self, options: StreamOptions, layout: LoadLayout, start_sample: int) -> None:
        self._options = options
        self._layout = layout
        self._start_sample = start_sample

    def __iter__(self) -> Iterator[IterationTargets | IterationFailure]:
        yield from self._options.reader(self._layout).iterations(self._start_sample)


class TargetStream:
    """Serves the targets of one load rank by the first sample of an iteration.

    Args:
        options: How to read the cache.
        layout: Which rows this rank needs.
        device: Where they will be copied to; what is meant for a GPU is put into page-locked
            memory, from which copies run ahead. None leaves it where it was read.
    """

    def __init__(
        self,
        options: StreamOptions,
        layout: LoadLayout,
        *,
        device: torch.device | None = None,
    ) -> None:
        self._options = options
        self._device = device
        self._layout = layout
        self._items: BackgroundIterator[IterationTargets | IterationFailure] | None = None
        self._next_start = 0
        self._waited = 0.0

    def use_listing(self, names: Sequence[str]) -> None:
        """Read what this listing of the directory names; what is open is forgotten."""
        self._options = replace(self._options, names=names)
        self.close()

    def iteration(self, start_sample: int) -> IterationTargets | IterationFailure:
        """Return the targets of the iteration that starts at *start_sample*, or why there are none.

        Data behind *start_sample* (training skipped iterations) is passed over with a warning. A
        step back, or one to a sample between the stream's iterations, reopens the cache there.
        Whatever fails is an answer: other ranks wait to agree on it.
        """
        began = time.perf_counter()
        try:
            return self._find(start_sample)
        except RuntimeError as error:
            # The DataLoader reports a worker that was killed, or died of a bug, as RuntimeError.
            failure = TeacherDataError(
                f"The loader process of {self._options.logprobs_dir} died at the batch that starts "
                f"at sample {start_sample}: {error}"
            )
            fatal = False
        except Exception as error:
            # No way in which data or storage fail, so it is not ignored: each rank raises.
            failure = TeacherDataError(
                f"The loader of {self._options.logprobs_dir} failed at the batch that starts at "
                f"sample {start_sample}: {type(error).__name__}: {error}"
            )
            failure.__cause__ = error
            fatal = True
        finally:
            self._waited += time.perf_counter() - began
        self.close()
        return IterationFailure(start=start_sample, error=failure, fatal=fatal)

    def take_wait(self) -> float:
        """Return the seconds that :meth:`iteration` has taken since the last call of this."""
        waited, self._waited = self._waited, 0.0
        return waited

    def _find(self, start_sample: int) -> IterationTargets | IterationFailure:
        """Return the item that starts at *start_sample*, from the open stream or a new one."""
        distance = start_sample - self._next_start
        if self._items is None or distance < 0 or distance % self._layout.gbs:
            self._open(start_sample)
        if self._next_start < start_sample:
            logger.warning(
                "Teacher data of samples %d to %d is behind training, which is at sample %d; "
                "it is skipped.",
                self._next_start,
                start_sample - 1,
                start_sample,
            )
        while True:
            item = self._next_item(start_sample)
            self._next_start = item.start + self._layout.gbs
            if item.start == start_sample:
                return item
            assert item.start < start_sample, (item.start, start_sample)

    def _next_item(self, start_sample: int) -> IterationTargets | IterationFailure:
        assert self._items is not None
        item = next(self._items, None)
        if item is None:
            # The stream ended at an earlier step; look again, a teacher may have written more.
            self._open(start_sample)
            item = next(self._items)
        return item

    def _open(self, start_sample: int) -> None:
        self.close()
        dataset = _IterationDataset(self._options, self._layout, start_sample)
        # An object store's client holds threads and sockets that do not survive a fork.
        if storage.is_remote(self._options.logprobs_dir):
            items = iter(dataset)
        else:
            # Rows come as one ordered stream, so one process; it decodes in threads of its own.
            items = iter(
                DataLoader(
                    dataset,
                    batch_size=None,
                    num_workers=1,
                    prefetch_factor=PREFETCHED_ITERATIONS,
                )
            )
        if self._device is not None and self._device.type == "cuda":
            self._items = BackgroundIterator(
                items,
                depth=_READY_ITERATIONS,
                prepare=_pinned,
                begin=functools.partial(torch.cuda.set_device, self._device),
            )
        else:
            self._items = BackgroundIterator(items, depth=_READY_ITERATIONS)
        self._next_start = start_sample

    def close(self) -> None:
        """Read no more; the next iteration that is asked for opens the cache again."""
        items, self._items = self._items, None
        if items is not None:
            items.close()


def _pinned(item: IterationTargets | IterationFailure) -> IterationTargets | IterationFailure:
    """Return the item in page-locked memory; a failure needs none."""
    return item.pin_memory() if isinstance(item, IterationTargets) else item
