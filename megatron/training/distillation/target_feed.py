# SPDX-License-Identifier: Apache-2.0
"""Gives every rank of a tensor x context parallel replica its part of what one of them reads.

The rank that reads holds an iteration in host memory. Each microbatch travels by one collective, to
the device as the cache stores it, while the one before it is computed on; the first one of an
iteration carries what the others have to know of it, errors and the end of the data included.
"""

import contextlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist

from megatron.training.distillation import parallel
from megatron.training.distillation.packed_rows import BlockLayout, PackedRows
from megatron.training.distillation.replica_message import (
    HEAD_BYTES,
    Head,
    decode_failure,
    encode_failure,
)
from megatron.training.distillation.target_stream import TargetStream
from megatron.training.distillation.targets import IterationFailure, IterationTargets

_Item = IterationTargets | IterationFailure


class _Key(NamedTuple):
    """What travels: a microbatch of an iteration, with or without a head before it."""

    start: int
    microbatch: int
    has_head: bool


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Travelling:
    """Bytes on their way to this rank; what they are sent from is kept until they are there."""

    key: _Key
    content: torch.Tensor
    sent_from: Sequence[torch.Tensor] | None
    work: dist.Work | None
    arrival: torch.cuda.Event | None

    def wait(self) -> torch.Tensor:
        """Return the bytes; on a GPU its current stream waits, and this process does not."""
        if self.work is not None:
            self.work.wait()
        if self.arrival is not None:
            stream = torch.cuda.current_stream(self.content.device)
            stream.wait_event(self.arrival)
            self.content.record_stream(stream)
        return self.content


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class OpenIteration:
    """An iteration that has targets, on every rank of the replica.

    Attributes:
        start: Its first global sample.
        microbatches: How many it has.
        blocks: How the rows of each lie.
        first: The rows of the microbatch that it was opened with, on the device.
    """

    start: int
    microbatches: int
    blocks: BlockLayout
    first: PackedRows


class TargetFeed:
    """Serves the microbatches of one iteration after the other, to all ranks of a replica alike.

    All ranks of a replica make the same calls in the same order. A replica of one rank without a
    GPU takes its rows where they were read, and nothing travels.

    Args:
        stream: What this rank reads, with the slices of all context parallel ranks; not used on
            ranks that do not read.
        layout: This rank's place.
        gbs: The global batch size, which tells where the next iteration begins.
        device: Where the rows are wanted; that of the group's collectives if there are any.
    """

    def __init__(
        self,
        stream: TargetStream,
        layout: parallel.ParallelLayout,
        *,
        gbs: int,
        device: torch.device,
    ) -> None:
        self.stream = stream
        self.wait = 0.0
        """Seconds that the rank that reads has waited for the iteration opened last."""
        self._layout = layout
        self._gbs = gbs
        self._is_shared = layout.replica_size > 1
        self._device = device
        self._side_stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._capacity = 0
        self._read: _Item | None = None
        self._read_ahead: _Item | None = None
        self._ahead: _Travelling | None = None
        self._opened: OpenIteration | None = None
        self._holds_first: int | None = None

    def open(self, start: int, microbatch: int = 0) -> OpenIteration | IterationFailure:
        """Return the iteration from sample *start* on, or why it has no targets, on all ranks.

        Collective over TP x CP where that is more than one rank. One collective; one more where
        more bytes are needed than ever before.

        Args:
            start: Its first global sample.
            microbatch: The microbatch that will be taken first.
        """
        self._opened = None
        key = _Key(start, microbatch, self._is_shared)
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead.key != key:
            ahead.wait()
            ahead = None
        read, self._read_ahead = self._read_ahead, None
        self._read = read if read is not None and read.start == start else self._fetch(start)
        found = self._receive(key, ahead) if self._is_shared else self._take_over(key, ahead)
        if isinstance(found, OpenIteration):
            self._opened, self._holds_first = found, microbatch
        return found

    def take(self, microbatch: int) -> PackedRows:
        """Return the rows of a microbatch of the open iteration, on the device.

        Collective over TP x CP where that is more than one rank; the microbatch after it begins to
        travel, and after the last one the next iteration.
        """
        assert self._opened is not None
        opened = self._opened
        key = _Key(opened.start, microbatch, has_head=False)
        if self._holds_first == microbatch:
            rows = opened.first
        elif self._ahead is not None and self._ahead.key == key:
            ahead, self._ahead = self._ahead, None
            rows = opened.blocks.rows(ahead.wait())
        else:  # a replay, or not in order
            rows = opened.blocks.rows(self._send_block(key).wait())
        self._holds_first = None
        self._send_ahead(opened, microbatch)
        return rows

    # ---- on the way in -----------------------------------------------------------------------

    def _receive(self, key: _Key, message: _Travelling | None) -> OpenIteration | IterationFailure:
        """Receive the first message of an iteration, which is *message* if it is on its way."""
        message = message or self._send_first(key, self._read)
        content = message.wait()
        head = Head.decode(content[:HEAD_BYTES])
        if head.needed > self._capacity:  # all ranks read this in the same head
            self._capacity = head.needed
            content = self._send_first(key, self._read).wait()
        self.wait = head.wait
        body = content[HEAD_BYTES : HEAD_BYTES + head.needed]
        if head.blocks is None:
            # The rank that reads knows more of the error than its text.
            own = self._read
            return own if isinstance(own, IterationFailure) else decode_failure(body)
        return OpenIteration(
            start=key.start,
            microbatches=head.microbatches,
            blocks=head.blocks,
            first=head.blocks.rows(body),
        )

    def _take_over(self, key: _Key, block: _Travelling | None) -> OpenIteration | IterationFailure:
        """Open what this rank, the only one, has read; *block* is its first if on its way."""
        self.wait = self.stream.take_wait()
        read = self._read
        assert read is not None
        if isinstance(read, IterationFailure):
            return read
        block = block or self._send_block(key)
        return OpenIteration(
            start=key.start,
            microbatches=read.blocks.shape[0],
            blocks=read.layout,
            first=read.layout.rows(block.wait()),
        )

    # ---- on the way out ----------------------------------------------------------------------

    def _fetch(self, start: int) -> _Item | None:
        """Return what the stream has from sample *start* on; None on ranks that do not read."""
        return self.stream.iteration(start) if self._layout.reads_for_replica else None

    def _send_ahead(self, opened: OpenIteration, microbatch: int) -> None:
        """Begin to send what follows a microbatch, unless nothing travels or something does."""
        if self._ahead is not None or not (self._is_shared or self._side_stream):
            return
        if microbatch + 1 < opened.microbatches:
            self._ahead = self._send_block(_Key(opened.start, microbatch + 1, has_head=False))
            return
        start = opened.start + self._gbs
        self._read_ahead = self._fetch(start)
        key = _Key(start, 0, self._is_shared)
        if self._is_shared:
            self._ahead = self._send_first(key, self._read_ahead)
        elif isinstance(self._read_ahead, IterationTargets):
            self._ahead = self._send_block(key, self._read_ahead)

    def _send_first(self, key: _Key, read: _Item | None) -> _Travelling:
        """Begin to send the first message of an iteration, cut off at what the ranks agreed on."""
        with self._on_side_stream():
            parts = None
            if self._layout.reads_for_replica:
                assert read is not None
                head, bodies = self._message(read, key.microbatch)
                parts = [self._framed(head, body) for body in bodies]
            return self._send(key, HEAD_BYTES + self._capacity, parts)

    def _message(self, read: _Item, microbatch: int) -> tuple[Head, Sequence[torch.Tensor]]:
        """Return the head of what was read, and what follows it, by context parallel rank."""
        wait = self.stream.take_wait()
        if isinstance(read, IterationFailure):
            body = encode_failure(read)
            return Head(needed=body.numel(), wait=wait), [body] * self._layout.cp_size
        head = Head(
            needed=read.layout.nbytes,
            wait=wait,
            microbatches=read.blocks.shape[0],
            blocks=read.layout,
        )
        return head, read.blocks[microbatch].unbind()

    def _framed(self, head: Head, body: torch.Tensor) -> torch.Tensor:
        """Return head and body as one message on the device."""
        message = torch.empty(HEAD_BYTES + self._capacity, dtype=torch.uint8, device=self._device)
        body = body[: self._capacity]
        message[:HEAD_BYTES].copy_(head.encode())
        message[HEAD_BYTES : HEAD_BYTES + body.numel()].copy_(body, non_blocking=True)
        return message

    def _send_block(self, key: _Key, read: _Item | None = None) -> _Travelling:
        """Begin to send a microbatch without a head, of the open iteration unless *read* is given.

        Every rank knows its size.
        """
        read = read or self._read
        with self._on_side_stream():
            if isinstance(read, IterationTargets):
                given = read.blocks[key.microbatch].unbind()
                parts = [part.to(self._device, non_blocking=True) for part in given]
                return self._send(key, read.layout.nbytes, parts)
            assert self._opened is not None
            return self._send(key, self._opened.blocks.nbytes, None)

    def _send(self, key: _Key, nbytes: int, parts: Sequence[torch.Tensor] | None) -> _Travelling:
        work = None
        if self._is_shared:
            content, work = parallel.from_replica_reader(nbytes, parts, self._layout)
        else:
            assert parts is not None
            content = parts[0]
        arrival = None
        if self._side_stream is not None:
            if work is not None:
                work.wait()  # the side stream does, so that it may use the memory again
                work = None
            arrival = self._side_stream.record_event()
        return _Travelling(key=key, content=content, sent_from=parts, work=work, arrival=arrival)

    def _on_side_stream(self) -> AbstractContextManager[object]:
        if self._side_stream is None:
            return contextlib.nullcontext()
        return torch.cuda.stream(self._side_stream)
