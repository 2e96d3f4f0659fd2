# SPDX-License-Identifier: Apache-2.0
"""Puts the rows of several members together as one rank's microbatches."""

import logging
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from typing import NamedTuple

import torch

from megatron.training.distillation.errors import CacheFormatError, TeacherSequenceError
from megatron.training.distillation.fingerprint import CHUNK, comparable_chunks
from megatron.training.distillation.payload import (
    INDEX_SENTINEL,
    LOGPROB_SENTINEL,
    PackedRows,
    TeacherRows,
)
from megatron.training.distillation.shard_directory import MemberRows, OpenShard
from megatron.training.distillation.targets import LoadLayout

logger = logging.getLogger(__name__)


class RowSource(NamedTuple):
    """Rows ``[row_start, row_end)`` of a member, which become this rank's rows from *row* on."""

    shard: OpenShard
    member: MemberRows
    row_start: int
    row_end: int
    row: int


class RowAssembler:
    """Copies selected rows into microbatches: trimmed, sliced for this CP rank, ids unpacked.

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
        self, sources: Mapping[Future[PackedRows], list[RowSource]]
    ) -> tuple[TeacherRows, ...]:
        """Return one :class:`TeacherRows` ``(S / cp, mbs, K)`` per microbatch.

        Args:
            sources: The decoding of each member, and which of its rows go where.

        Raises:
            CacheFormatError: A member is damaged, or the members do not fit together.
            TeacherSequenceError: The teacher's sequence length does not suit the student.
        """
        groups = [(job.result(), group) for job, group in sources.items()]
        values = [payload.values for payload, _ in groups]
        sequences = sorted({part.shape[0] for part in values})
        dtypes = sorted({str(part.dtype) for part in values})
        if len(sequences) > 1 or len(dtypes) > 1:
            raise CacheFormatError(
                f"The teacher rows of one batch differ in sequence length ({sequences}) or dtype "
                f"({dtypes}): the cache in {self._cache} mixes dumps. Dump it again."
            )
        chunks = self._positions(sequences[0])
        widths = {part.shape[2] for part in values}
        layout = self._layout
        shape = (
            layout.num_microbatches,
            sum(chunk.stop - chunk.start for chunk in chunks),
            layout.mbs,
            max(widths),
        )
        out_values = torch.empty(shape, dtype=values[0].dtype)
        out_indices = torch.empty(shape, dtype=torch.int32)
        if len(widths) > 1:  # top-P kept different numbers of entries
            out_values.fill_(LOGPROB_SENTINEL)
            out_indices.fill_(INDEX_SENTINEL)
        has_tail = all(payload.tail_logprob is not None for payload, _ in groups)
        out_tail = torch.empty(shape[:3]) if has_tail else None
        out_fingerprints = self._room_for_fingerprints(groups, sequences[0])
        for payload, group in groups:
            selected = [row for source in group for row in range(source.row_start, source.row_end)]
            offset = 0
            for chunk in chunks:
                part = payload.unpack(_as_slice(selected), chunk)
                positions = slice(offset, offset + chunk.stop - chunk.start)
                width = part.values.shape[2]
                begin = 0
                for source in _merged(group, layout.mbs):
                    count = source.row_end - source.row_start
                    first, column = divmod(source.row, layout.mbs)
                    blocks = max(1, count // layout.mbs)
                    to = (
                        slice(first, first + blocks),
                        positions,
                        slice(column, column + count // blocks),
                    )
                    rows = slice(begin, begin + count)
                    out_values[*to, :width] = _by_microbatch(part.values[:, rows], blocks)
                    out_indices[*to, :width] = _by_microbatch(part.indices[:, rows], blocks)
                    if out_tail is not None and part.tail_logprob is not None:
                        out_tail[to] = _by_microbatch(part.tail_logprob[:, rows], blocks)
                    if out_fingerprints is not None and part.label_fingerprints is not None:
                        # Of the whole sequence, so the same again for every chunk of this rank.
                        whole = part.label_fingerprints[: out_fingerprints.size(1), rows]
                        out_fingerprints[to[0], :, to[2]] = _by_microbatch(whole, blocks)
                    begin += count
                offset = positions.stop
        return tuple(
            TeacherRows(
                values=out_values[m],
                indices=out_indices[m],
                tail_logprob=None if out_tail is None else out_tail[m],
                label_fingerprints=None if out_fingerprints is None else out_fingerprints[m],
            )
            for m in range(layout.num_microbatches)
        )

    def _room_for_fingerprints(
        self, groups: list[tuple[PackedRows, list[RowSource]]], stored: int
    ) -> torch.Tensor | None:
        """Return ``(num_microbatches, C, mbs)`` int64 for the chunks that can be compared.

        None if there are none, or if a member of the batch has no fingerprints.
        """
        layout = self._layout
        chunks = comparable_chunks(stored, layout.seq_length or stored)
        if chunks == 0 or any(payload.label_fingerprints is None for payload, _ in groups):
            return None
        return torch.empty((layout.num_microbatches, chunks, layout.mbs), dtype=torch.int64)

    def _positions(self, stored: int) -> list[slice]:
        """Return this CP rank's positions of a stored sequence: chunks r and 2 * cp - 1 - r."""
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
        chunks = (layout.cp_rank, 2 * layout.cp_size - 1 - layout.cp_rank)
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


def _by_microbatch(rows: torch.Tensor, blocks: int) -> torch.Tensor:
    """Cut ``(S, n, ...)`` into *blocks* microbatches ``(blocks, S, n / blocks, ...)``."""
    return rows.unflatten(1, (blocks, -1)).transpose(0, 1)


def _as_slice(rows: list[int]) -> slice | list[int]:
    """Return *rows* as a slice where they are consecutive: a view instead of a copy."""
    if rows == list(range(rows[0], rows[0] + len(rows))):
        return slice(rows[0], rows[0] + len(rows))
    return rows
