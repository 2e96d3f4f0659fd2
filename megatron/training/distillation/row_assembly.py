# SPDX-License-Identifier: Apache-2.0
"""Puts the rows of several members together as one rank's microbatches."""

import bisect
import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import NamedTuple

import torch
from torch.utils.data import get_worker_info

from megatron.training.distillation.errors import CacheFormatError, TeacherSequenceError
from megatron.training.distillation.fingerprint import CHUNK, comparable_chunks
from megatron.training.distillation.packed_rows import BlockLayout, PackedRows, plane_bytes
from megatron.training.distillation.payload import LOGPROB_SENTINEL
from megatron.training.distillation.shard_directory import MemberRows, OpenShard
from megatron.training.distillation.targets import IterationTargets, LoadLayout

logger = logging.getLogger(__name__)


class RowSource(NamedTuple):
    """Rows ``[row_start, row_end)`` of a member, which become this rank's rows from *row* on."""

    shard: OpenShard
    member: MemberRows
    row_start: int
    row_end: int
    row: int

    def within(self, rows: Sequence[int]) -> "RowSource":
        """Return the source in what holds only *rows* of the member, ascending and each once."""
        first = bisect.bisect_left(rows, self.row_start)
        return self._replace(row_start=first, row_end=first + self.row_end - self.row_start)


class RowAssembler:
    """Copies selected rows, still packed, into blocks: trimmed, one per microbatch and CP rank.

    Safe to use from several threads.

    Args:
        layout: The student's batches and this rank's share.
        cache: Directory of the cache, for messages.
    """

    def __init__(self, layout: LoadLayout, cache: str) -> None:
        self._layout = layout
        self._cache = cache
        self._trim_lock = threading.Lock()
        self._trim_warned = False

    def assemble(
        self, start: int, sources: Mapping[Future[PackedRows], list[RowSource]]
    ) -> IterationTargets:
        """Return the targets of the iteration from sample *start* on.

        Args:
            start: First global sample of the iteration.
            sources: The decoding of each member, and which of its rows go where.

        Raises:
            CacheFormatError: A member is damaged, or the members do not fit together.
            TeacherSequenceError: The teacher's sequence length does not suit the student.
        """
        groups = [(job.result(), group) for job, group in sources.items()]
        stored = self._common_length([payload for payload, _ in groups])
        slices = [self._positions(stored, cp_rank) for cp_rank in self._layout.cp_ranks]
        blocks = self._block_layout([payload for payload, _ in groups], stored, slices[0])
        shape = (self._layout.num_microbatches, len(slices), blocks.nbytes)
        targets = IterationTargets(start=start, layout=blocks, blocks=_room(shape))
        room = blocks.rows(targets.blocks)
        for payload, group in groups:
            for source in _merged(group, self._layout.mbs):
                for number, chunks in enumerate(slices):
                    self._copy(payload, source, chunks, room, number)
        return targets

    def _common_length(self, payloads: list[PackedRows]) -> int:
        """Return the sequence length of all *payloads*; they must agree on it and the dtype."""
        sequences = sorted({payload.values.shape[0] for payload in payloads})
        dtypes = sorted({str(payload.values.dtype) for payload in payloads})
        if len(sequences) > 1 or len(dtypes) > 1:
            raise CacheFormatError(
                f"The teacher rows of one batch differ in sequence length ({sequences}) or dtype "
                f"({dtypes}): the cache in {self._cache} mixes dumps. Dump it again."
            )
        return sequences[0]

    def _block_layout(
        self, payloads: list[PackedRows], stored: int, chunks: list[slice]
    ) -> BlockLayout:
        """Return the layout of the blocks; only what all *payloads* have has a place in it.

        Raises:
            TeacherSequenceError: Nothing would be left to prove the targets with.
        """
        proven = all(payload.label_fingerprints is not None for payload in payloads)
        needed = self._layout.seq_length or stored
        compared = comparable_chunks(stored, needed) if proven else 0
        if proven and compared == 0:
            raise TeacherSequenceError(
                f"The teacher sequences in {self._cache} have {stored} tokens, the student's "
                f"{needed}: of sequences that are trimmed to {CHUNK} tokens or fewer no labels "
                "can be compared, so nothing would prove that the targets belong to the "
                f"student's samples. Use --seq-length {stored}, or at least {CHUNK + 1}."
            )
        return BlockLayout(
            positions=sum(chunk.stop - chunk.start for chunk in chunks),
            samples=self._layout.mbs,
            k=max(payload.values.shape[2] for payload in payloads),
            high_planes=max(payload.high_planes for payload in payloads),
            dtype=payloads[0].values.dtype,
            has_tail=all(payload.tail_logprob is not None for payload in payloads),
            chunks=compared,
        )

    def _copy(
        self,
        payload: PackedRows,
        source: RowSource,
        chunks: list[slice],
        room: PackedRows,
        number: int,
    ) -> None:
        """Copy the rows of *source* into the blocks of slice *number*.

        Args:
            payload: The member.
            source: Which of its rows go where; whole microbatches, or rows of a single one.
            chunks: The positions of the slice.
            room: Views ``(num_microbatches, slices, positions, mbs, ...)`` of all blocks.
            number: The slice.
        """
        mbs = self._layout.mbs
        rows = slice(source.row_start, source.row_end)
        first, column = divmod(source.row, mbs)
        blocks = max(1, (rows.stop - rows.start) // mbs)
        columns = slice(column, column + (rows.stop - rows.start) // blocks)

        def fill(into: torch.Tensor, stored: torch.Tensor) -> None:
            """Copy ``(positions, rows, ...)`` to ``(blocks, positions, columns, ...)``."""
            stored = stored.unflatten(1, (blocks, -1)).transpose(0, 1)
            into[first : first + blocks, number, :, columns, ...] = stored

        k, room_k = payload.values.shape[2], room.values.shape[-1]
        stored_planes, room_planes = _planes(payload), _planes(room)
        h, width = stored_planes.shape[-2:]
        filled = 0
        for chunk in chunks:
            at = slice(filled, filled + chunk.stop - chunk.start)
            filled = at.stop
            fill(room.values[:, :, at, :, :k], payload.values[chunk, rows])
            fill(
                _as_int16(room.indices_low)[:, :, at, :, :k],
                _as_int16(payload.indices_low)[chunk, rows],
            )
            fill(room_planes[:, :, at, :, :h, :width], stored_planes[chunk, rows])
            if room.tail_logprob is not None and payload.tail_logprob is not None:
                fill(room.tail_logprob[:, :, at], payload.tail_logprob[chunk, rows])
        if room.label_fingerprints is not None and payload.label_fingerprints is not None:
            # Of the whole sequence, so the same for every slice.
            comparable = room.label_fingerprints.shape[2]
            fill(room.label_fingerprints, payload.label_fingerprints[:comparable, rows])
        place = (slice(first, first + blocks), number, slice(None), columns)
        if h < room_planes.shape[-2]:  # ids of a vocabulary that needs fewer bits than another's
            room_planes[place][..., h:, :] = 0
        if k < room_k:  # top-P kept fewer entries here than elsewhere
            room.values[place][..., k:] = LOGPROB_SENTINEL
            _as_int16(room.indices_low)[place][..., k:] = -1
            planes = room_planes[place]
            planes[..., width:] = 0xFF
            if k % 8:
                planes[..., k // 8] |= 0xFF >> k % 8

    def _positions(self, stored: int, cp_rank: int) -> list[slice]:
        """Return a CP rank's positions of a stored sequence: chunks r and 2 * cp - 1 - r."""
        layout = self._layout
        needed = stored if layout.seq_length is None else layout.seq_length
        if stored < needed:
            raise TeacherSequenceError(
                f"The teacher sequences in {self._cache} have {stored} tokens, the "
                f"student's {needed}. Use --seq-length {stored}, or a teacher with longer ones."
            )
        if stored > needed:
            with self._trim_lock:
                if not self._trim_warned:
                    self._trim_warned = True
                    logger.warning(
                        "The teacher sequences in %s have %d tokens, the student's %d: trimming "
                        "them to their first %d tokens. That is right only where a sample begins "
                        "with the same token in both runs; Megatron's GPTDataset cuts its "
                        "documents into other samples when --seq-length differs. The labels of "
                        "the first %d tokens are compared with the teacher's.",
                        self._cache,
                        stored,
                        needed,
                        needed,
                        comparable_chunks(stored, needed) * CHUNK,
                    )
        if layout.cp_size == 1:
            return [slice(0, needed)]
        length, rest = divmod(needed, 2 * layout.cp_size)
        if rest:
            raise TeacherSequenceError(
                f"A sequence of {needed} tokens cannot be cut into {2 * layout.cp_size} equal "
                f"chunks, two for each of {layout.cp_size} context-parallel ranks. Change one size."
            )
        chunks = (cp_rank, 2 * layout.cp_size - 1 - cp_rank)
        return [slice(chunk * length, (chunk + 1) * length) for chunk in chunks]


def _merged(sources: list[RowSource], mbs: int) -> Iterator[RowSource]:
    """Join sources of one member that are whole microbatches and neighbours on both sides."""
    last: RowSource | None = None
    for source in sources:
        count = source.row_end - source.row_start
        if (
            last is not None
            and count % mbs == 0
            and source.row_start == last.row_end
            and source.row - last.row == last.row_end - last.row_start
            and source.row % mbs == last.row % mbs == 0
        ):
            last = last._replace(row_end=source.row_end)
            continue
        if last is not None:
            yield last
        last = source
    if last is not None:
        yield last


def _planes(rows: PackedRows) -> torch.Tensor:
    """Return the ``high_bits`` of *rows* as ``(..., h, ceil(K / 8))``."""
    return rows.high_bits.unflatten(-1, (-1, plane_bytes(rows.values.shape[-1])))


def _as_int16(ids: torch.Tensor) -> torch.Tensor:
    """Return the same bits as int16, as torch can copy few views of uint16."""
    return ids.view(torch.int16)


def _room(shape: tuple[int, ...]) -> torch.Tensor:
    """Return uint8 memory; a loader process takes it where the trainer can see it as well."""
    room = torch.empty(shape, dtype=torch.uint8)
    return room if get_worker_info() is None else room.share_memory_()
