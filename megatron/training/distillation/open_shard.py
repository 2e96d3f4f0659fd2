# SPDX-License-Identifier: Apache-2.0
"""One open shard: its metadata and its seal verified, its members found and decoded.

Where the metadata has an index, nothing but the metadata is read to find the members, and what is
read of each of them is checked against the index; elsewhere all headers are walked.
"""

import bisect
import itertools
import os
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import BinaryIO, NamedTuple

from megatron.training.distillation import storage
from megatron.training.distillation.errors import (
    CacheFormatError,
    TeacherDataError,
    TeacherDataMissingError,
    TeacherLayoutError,
)
from megatron.training.distillation.frame_layout import FORMAT_VERSION_V3, MAX_ID_BITS
from megatron.training.distillation.framed_member import FramedMembers
from megatron.training.distillation.manifest import ExpectedRun
from megatron.training.distillation.payload import (
    MAX_PAYLOAD_BYTES,
    PackedRows,
    decode_packed_rows,
    max_payload_bytes,
)
from megatron.training.distillation.payload_v3 import decode_framed_payload
from megatron.training.distillation.tar_layout import BLOCK, members_behind, tar_size
from megatron.training.distillation.utils import (
    ShardMeta,
    ShardName,
    TarMember,
    check_identity,
    parse_member_name,
    read_indexed_member,
    read_member,
    read_shard_meta,
    walk_tar,
)

REPAIR_HINT = "Restore the file from a copy, or dump these samples again"


class MemberRows(NamedTuple):
    """The rows of global samples ``[start, end)`` that one saved DP rank recorded."""

    start: int
    end: int
    entry: TarMember


class OpenShard:
    """An open shard whose metadata has been verified and whose members are known.

    Args:
        path: Where it lies.
        name: What its name says.
        stream: Its content.
        identity: The run that its data must belong to; None accepts any.
        with_members: Whether its members are wanted; its metadata costs less without them.
    """

    def __init__(
        self,
        path: str,
        name: ShardName,
        stream: BinaryIO,
        identity: ExpectedRun | None,
        *,
        with_members: bool = True,
    ) -> None:
        self.path = path
        self.name = name
        self._stream = stream
        self._lock = threading.Lock()
        walk = self._walk()
        index = list(itertools.islice(walk, 1))
        self.meta = self._read_meta(index)
        self._meta_entry = index[0]
        self._check_size_and_name()
        located = self._indexed_members(index[0])
        self._has_index = located is not None
        if with_members:
            index += walk if located is None else located
        self._checksums = self._check_seal(index) if with_members else {}
        self.differences = [] if identity is None else check_identity(self.meta, identity, path)
        self.mbs, self.dp_size = self.meta.saver.mbs_save, self.meta.saver.dp_size_save
        if name.dp_rank >= self.dp_size:
            raise CacheFormatError(
                f"Teacher shard {path} is of DP rank {name.dp_rank}, but its metadata says "
                f"dp_size_save {self.dp_size}. It was renamed, or belongs to another cache."
            )
        self._members = self._check_members(index) if with_members else []
        self._framed = self._framed_members(index[1:])

    def _framed_members(self, members: list[TarMember]) -> FramedMembers | None:
        """Return what reads rows alone; None where the format or the index does not tell them."""
        content = self.meta.content
        if self.format_version != FORMAT_VERSION_V3 or content is None or content.index is None:
            return None
        return FramedMembers(self._read, dict(zip(members, content.index, strict=False)))

    @property
    def format_version(self) -> int:
        """Version of the format that its payloads are encoded in."""
        return self.meta.saver.format_version

    def _walk(self) -> Iterator[TarMember]:
        try:
            yield from walk_tar(self._stream)
        except CacheFormatError as error:
            raise CacheFormatError(
                f"Teacher shard {self.path} is damaged: {error}. {REPAIR_HINT}"
            ) from error

    def _read_meta(self, index: list[TarMember]) -> ShardMeta:
        return read_shard_meta(self._stream, index, self.path)

    def _check_size_and_name(self) -> None:
        """Compare the file with what was recorded; a cut may fall between two members."""
        content = self.meta.content
        if content is None:
            return
        size = self._stream.seek(0, os.SEEK_END)
        if size != content.size:
            raise CacheFormatError(
                f"Teacher shard {self.path} is damaged: it has {size} bytes, and was written with "
                f"{content.size} bytes and {content.members} members. {REPAIR_HINT}"
            )
        if content.name != str(self.name):
            raise CacheFormatError(
                f"Teacher shard {self.path} was written as {content.name}. It was renamed, or "
                "belongs to another cache: give it its name back, or dump these samples again."
            )

    def _indexed_members(self, meta: TarMember) -> list[TarMember] | None:
        """Return where the members lie as the index has it; None if there is no index."""
        content = self.meta.content
        if content is None or content.index is None:
            return None
        size = tar_size([meta.size, *(entry.size for entry in content.index)])
        if size != content.size:
            raise CacheFormatError(
                f"Teacher shard {self.path} is damaged: the members in its index make {size} "
                f"bytes, and it was written with {content.size}. {REPAIR_HINT}"
            )
        return members_behind(meta, content.index)

    def _check_seal(self, index: list[TarMember]) -> dict[TarMember, int]:
        """Return the recorded checksum of each member; none where the cache records none."""
        content = self.meta.content
        if content is None:
            return {}
        members = index[1:]
        if len(members) != content.members:
            raise CacheFormatError(
                f"Teacher shard {self.path} is damaged: it has {len(members)} members, and was "
                f"written with {content.members}. {REPAIR_HINT}"
            )
        return dict(zip(members, content.checksums, strict=True))

    def _check_members(self, index: list[TarMember]) -> list[MemberRows]:
        members = []
        reached = self.name.start
        for entry in index:
            span = parse_member_name(entry.name)
            if span is None:
                continue
            start, end = span
            if start < reached or end > self.name.end or (end - start) % (self.mbs * self.dp_size):
                raise CacheFormatError(
                    f"Teacher shard {self.path} is damaged: member {entry.name} does not fit, "
                    f"expected ascending ranges inside {self.name.start}-{self.name.end}, each a "
                    f"multiple of mbs_save * dp_size_save = {self.mbs} * {self.dp_size} samples. "
                    f"{REPAIR_HINT}"
                )
            members.append(MemberRows(start, end, entry))
            reached = end
        return members

    @property
    def size(self) -> int:
        """Bytes of the file."""
        with self._lock:
            return self._stream.seek(0, os.SEEK_END)

    def read_meta(self) -> bytes:
        """Return the metadata as they are stored."""
        with self._lock:
            return read_member(self._stream, self._meta_entry)

    @property
    def members(self) -> Sequence[MemberRows]:
        """The members by ascending samples."""
        return self._members

    def member_at(self, sample: int) -> MemberRows | None:
        """Return the member whose range covers *sample*."""
        position = bisect.bisect_right(self._members, sample, key=lambda member: member.start) - 1
        if position >= 0 and sample < self._members[position].end:
            return self._members[position]
        return None

    @property
    def decodes_rows(self) -> bool:
        """Whether rows of a member decode alone; else it is decoded whole."""
        return self._framed is not None

    def decode(self, member: MemberRows, rows: Sequence[int] | None = None) -> PackedRows:
        """Read and decode one member; errors say where.

        Args:
            member: The member.
            rows: The rows that are wanted, ascending, where rows decode alone; None for all.
        """
        return self._located(member, lambda: self._decode(member, rows))

    def decode_proven(self, member: MemberRows) -> PackedRows:
        """Decode all of a member, all bytes of which match what was recorded; errors say where.

        Where rows decode alone, :meth:`decode` checks what it reads and no more.
        """
        return self._located(member, lambda: self._decode_proven(member))

    def _located(self, member: MemberRows, decode: Callable[[], PackedRows]) -> PackedRows:
        """Return what *decode* returns; its errors come with the place."""
        where = f"member {member.entry.name} of teacher shard {self.path}"
        try:
            return decode()
        except TeacherLayoutError:
            raise
        except CacheFormatError as error:
            raise CacheFormatError(f"The {where} is damaged: {error}. {REPAIR_HINT}") from error
        except FileNotFoundError as error:
            raise TeacherDataMissingError(f"The {where} is no longer there: {error}") from error
        except storage.ERRORS as error:
            raise TeacherDataError(f"Cannot read {where}: {error}") from error

    def _decode(self, member: MemberRows, rows: Sequence[int] | None) -> PackedRows:
        if self._framed is not None:
            expected = (member.end - member.start) // self.dp_size
            return self._framed.decode(member.entry, rows, expected, self._max_bytes(member))
        assert rows is None, rows
        return self._decode_proven(member)

    def _decode_proven(self, member: MemberRows) -> PackedRows:
        expected = (member.end - member.start) // self.dp_size
        data = self._read(member.entry, 0, member.entry.size)
        self._check_checksum(member.entry, data)
        if self._framed is not None:
            self._framed.check_header(member.entry, data)
        found = self._parse(data, self._max_bytes(member))
        if found.values.shape[1] != expected:
            raise CacheFormatError(f"it has {found.values.shape[1]} rows, expected {expected}")
        return found

    def _read(self, entry: TarMember, begin: int, end: int) -> bytes:
        """Return a range of a member's content; an object store fetches what follows it ahead."""
        verified = self._has_index and begin == 0
        start = entry.offset + begin - BLOCK * verified
        with self._lock:
            storage.fetch_ahead(self._stream, start, entry.offset + end - start)
            if verified:
                return read_indexed_member(self._stream, entry, end)
            return read_member(
                self._stream, TarMember(entry.name, entry.offset + begin, end - begin)
            )

    def _check_checksum(self, entry: TarMember, data: bytes) -> None:
        """Compare what was read with what was recorded: it may be another shard's member."""
        recorded = self._checksums.get(entry)
        if recorded is not None and (found := zlib.crc32(data)) != recorded:
            raise CacheFormatError(
                f"its checksum is {found}, it was written with {recorded}: it was changed or "
                "exchanged since"
            )

    def _max_bytes(self, member: MemberRows) -> int:
        """Return what a member may decompress to, by the shape that the metadata promises."""
        manifest, k = self.meta.manifest, self.meta.saver.k
        length = None if manifest is None else manifest.sequence_length
        if type(length) is not int or type(k) is not int:
            return MAX_PAYLOAD_BYTES
        rows = (member.end - member.start) // self.dp_size
        planes = MAX_ID_BITS - 16 if self.format_version == FORMAT_VERSION_V3 else 1
        return max_payload_bytes(length, rows, k, planes)

    def _parse(self, data: bytes, max_bytes: int) -> PackedRows:
        if self.format_version == FORMAT_VERSION_V3:
            return decode_framed_payload(data, max_bytes)
        return decode_packed_rows(data, max_bytes)

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._stream.close()
