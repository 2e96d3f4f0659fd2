# SPDX-License-Identifier: Apache-2.0
"""Compresses the teacher's finished iterations in the background and spools them by window.

Whatever waits for the device or takes time happens in the background thread.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import torch

from megatron.training.distillation.errors import LogitsWriteError
from megatron.training.distillation.host_copy import HostCopier, HostCopy
from megatron.training.distillation.payload import LOGPROB_SENTINEL, encode_logprobs_payload
from megatron.training.distillation.save_format import PayloadEncoder
from megatron.training.distillation.spool import HeldMemory, Spool, SpooledBytes
from megatron.training.distillation.utils import member_name


class BufferedIteration(NamedTuple):
    """One finished iteration, ready to be written."""

    start: int
    end: int
    payload: SpooledBytes

    @property
    def member_name(self) -> str:
        """Name of the member that the payload becomes."""
        return member_name(self.start, self.end)


class BufferedWindow(NamedTuple):
    """The iterations of one window by ascending start, and how to give up what keeps them."""

    iterations: list[BufferedIteration]
    close: Callable[[], None]


class _Job(NamedTuple):
    """An iteration that is being encoded, or has been."""

    end: int
    nbytes: int
    result: Future[SpooledBytes]


class IterationBuffer:
    """Encodes finished iterations in one background thread and keeps them until they are taken.

    Safe to use from several threads. The thread starts with the first iteration.

    Args:
        spool_dir: Where compressed iterations lie until they are written; None for memory.
        on_failure: Called from the background thread as soon as an iteration cannot be encoded or
            spooled.
        encode: Makes a member of the tensors of an iteration. Version 2's encoder by default.
    """

    def __init__(
        self,
        spool_dir: str | None = None,
        on_failure: Callable[[LogitsWriteError], None] | None = None,
        encode: PayloadEncoder = encode_logprobs_payload,
    ) -> None:
        self._spool_dir = spool_dir
        self._on_failure = on_failure
        self._encode_payload = encode
        self._lock = threading.Lock()
        self._encoder: ThreadPoolExecutor | None = None
        self._jobs: dict[int, _Job] = {}
        self._spool: Spool | None = None
        self._held = HeldMemory()
        self._copier = HostCopier()

    def __len__(self) -> int:
        """Return how many iterations wait to be taken."""
        return len(self._jobs)

    def take_held_peak(self) -> int:
        """Return the most bytes of memory that this held at once since the last call.

        They are the tensors of iterations that are not yet compressed, and the windows that are
        not yet closed unless they lie on a disk.
        """
        return self._held.take_peak()

    def add(
        self,
        start: int,
        end: int,
        values: torch.Tensor,
        indices: torch.Tensor,
        tail_logprob: torch.Tensor | None = None,
        label_fingerprints: torch.Tensor | None = None,
    ) -> None:
        """Queue one iteration; the tensors must not change afterwards. A replay replaces it.

        Args:
            start: First global sample of the iteration.
            end: First global sample after it.
            values: ``(S, n, K)`` log-probabilities in the dtype to store, on any device. Entries
                at the end of K that are masked everywhere are left out.
            indices: ``(S, n, K)`` token ids.
            tail_logprob: ``(S, n)`` log of the mass outside the K entries, or None.
            label_fingerprints: ``(ceil(S / 64), n)`` fingerprints of the labels, or None.
        """
        copy = self._copier.start(values, indices, tail_logprob, label_fingerprints)
        with self._lock:
            if self._encoder is None:
                self._encoder = ThreadPoolExecutor(1, thread_name_prefix="logits-encode")
            replaced = self._jobs.get(start)
            if replaced is not None and replaced.result.cancel():
                self._held.add(-replaced.nbytes)
            self._held.add(copy.nbytes)
            result = self._encoder.submit(self._encode, copy)
            result.add_done_callback(partial(self._tell, start, end))
            self._jobs[start] = _Job(end, copy.nbytes, result)

    def take(self) -> BufferedWindow:
        """Wait for the encoder, return all iterations and empty the buffer.

        What they lie in must be closed once it has been read.

        Raises:
            LogitsWriteError: An iteration could not be encoded or spooled. The buffer keeps
                everything.
        """
        with self._lock:
            iterations = []
            for start, job in sorted(self._jobs.items()):
                error = job.result.exception()
                if error is not None:
                    raise _lost(start, job.end, error) from error
                iterations.append(BufferedIteration(start, job.end, job.result.result()))
            self._jobs.clear()
            # The encoder has nothing left to do, so it appends to none.
            spool, self._spool = self._spool, None
            return BufferedWindow(iterations, _nothing if spool is None else spool.close)

    def close(self) -> None:
        """Stop the background thread; what waits in the buffer can still be taken."""
        with self._lock:
            if self._encoder is not None:
                self._encoder.shutdown(wait=True)
                self._encoder = None

    def _encode(self, copy: HostCopy) -> SpooledBytes:
        try:
            values, indices, tail_logprob, label_fingerprints = copy.wait()
            assert values is not None
            assert indices is not None
            # Of falling entries, those that any token keeps come first.
            width = int((values != LOGPROB_SENTINEL).any(dim=(0, 1)).sum())
            payload = self._encode_payload(
                values[..., :width], indices[..., :width], tail_logprob, label_fingerprints
            )
            if self._spool is None:
                self._spool = Spool(self._spool_dir, self._held)
            return self._spool.append(payload)
        finally:
            self._held.add(-copy.nbytes)

    def _tell(self, start: int, end: int, result: Future[SpooledBytes]) -> None:
        """Tell of an iteration that is lost."""
        error = None if result.cancelled() else result.exception()
        if error is not None and self._on_failure is not None:
            self._on_failure(_lost(start, end, error))


def _nothing() -> None:
    pass


def _lost(start: int, end: int, error: BaseException) -> LogitsWriteError:
    return LogitsWriteError(
        f"Samples {start} to {end - 1} of the logits dump could not be kept for their checkpoint: "
        f"{type(error).__name__}: {error}. Nothing of this window is confirmed: start the job "
        "again when the cause is gone, and it dumps the window again."
    )
