# SPDX-License-Identifier: Apache-2.0
"""Reads rows of the members of a shard of format v3, and only the bytes that hold them."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from megatron.training.distillation.errors import CacheFormatError
from megatron.training.distillation.frame_codec import id_lookup
from megatron.training.distillation.frame_layout import FrameHeader, header_checksum
from megatron.training.distillation.id_ranks import IdLookup
from megatron.training.distillation.packed_rows import PackedRows
from megatron.training.distillation.payload_v3 import decode_framed_rows
from megatron.training.distillation.tar_layout import IndexEntry, TarMember

type ReadRange = Callable[[TarMember, int, int], bytes]
"""Returns bytes ``[begin, end)`` of a member's content."""

# Readers go on from member to member; the look-up of a large vocabulary takes a megabyte.
_HELD_MEMBERS = 3


class _Opened(NamedTuple):
    header: FrameHeader
    lookup: IdLookup


class FramedMembers:
    """The members of one shard. Safe to use from several threads.

    Args:
        read: Reads from the shard.
        index: What the shard's index says of each member.
    """

    def __init__(self, read: ReadRange, index: Mapping[TarMember, IndexEntry]) -> None:
        self._read = read
        self._index = index
        self._lock = threading.Lock()
        self._opened: OrderedDict[TarMember, _Opened] = OrderedDict()

    def decode(
        self, member: TarMember, rows: Sequence[int] | None, expected: int, max_bytes: int
    ) -> PackedRows:
        """Return *rows*, ascending, of a member that has *expected* of them; None for all.

        Raises:
            CacheFormatError: It has another number of rows, or what is read of it is damaged.
        """
        header, lookup = self._open(member)
        if header.rows != expected:
            raise CacheFormatError(f"it has {header.rows} rows, expected {expected}")
        offsets = header.offsets()
        if int(offsets[-1]) != member.size:
            raise CacheFormatError(f"its frames end at byte {offsets[-1]} of {member.size}")
        wanted = range(expected) if rows is None else rows
        content = {}
        for first, last in _runs(wanted):
            begin = int(offsets[first * header.frames_per_row])
            end = int(offsets[(last + 1) * header.frames_per_row])
            content[begin] = self._read(member, begin, end)
        return decode_framed_rows(header, content, wanted, max_bytes=max_bytes, lookup=lookup)

    def _open(self, member: TarMember) -> _Opened:
        """Return what a member begins with, read once for as long as it is in use."""
        with self._lock:
            if member in self._opened:
                self._opened.move_to_end(member)
                return self._opened[member]
        header = FrameHeader.from_bytes(self._read_header(member))
        opened = _Opened(header, id_lookup(header))
        with self._lock:
            self._opened[member] = opened
            if len(self._opened) > _HELD_MEMBERS:
                self._opened.popitem(last=False)
        return opened

    def _read_header(self, member: TarMember) -> bytes:
        data = self._read(member, 0, min(self._index[member].header_bytes, member.size))
        self.check_header(member, data)
        return data

    def check_header(self, member: TarMember, data: bytes) -> None:
        """Compare the header at the beginning of *data* with what the shard's index says of it.

        Raises:
            CacheFormatError: It is another one.
        """
        entry = self._index[member]
        data = data[: entry.header_bytes]
        if (found := header_checksum(data)) != entry.header_crc32:
            raise CacheFormatError(
                f"its checksum is {found} over its header, the shard was written with "
                f"{entry.header_crc32}: it was changed or exchanged since"
            )


def _runs(rows: Sequence[int]) -> list[tuple[int, int]]:
    """Return first and last of each run of neighbours among ascending *rows*."""
    runs: list[tuple[int, int]] = []
    for row in rows:
        if runs and row == runs[-1][1] + 1:
            runs[-1] = runs[-1][0], row
        else:
            runs.append((row, row))
    return runs
