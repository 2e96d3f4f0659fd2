# SPDX-License-Identifier: Apache-2.0
"""The contract between the teacher's writer and the student's reader, as pure functions.

Two sections: the tar format of a shard, and the plan that maps the student's batches onto the
teacher's rows. The payload codec, the metadata and the layout of a tar are modules of their own,
``payload``, ``shard_meta`` and ``tar_layout``, whose names are served here too. Everything works on
ints, bytes, tensors and already open streams. The format itself is specified in this package's
README.
"""

from __future__ import annotations

import math
import os
import re
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import BinaryIO, NamedTuple

from megatron.training.distillation.errors import CacheFormatError, CacheIdentityError
from megatron.training.distillation.member_content import Content, open_content
from megatron.training.distillation.packed_rows import PackedRows, TeacherRows
from megatron.training.distillation.payload import (
    FORMAT_VERSION,
    INDEX_SENTINEL,
    LOGPROB_SENTINEL,
    MAX_VOCAB_SIZE,
    decode_logprobs_payload,
    decode_packed_rows,
    decode_teacher_rows,
    encode_logprobs_payload,
    v2_pack_indices,
    v2_unpack_indices,
)
from megatron.training.distillation.shard_meta import (
    META_TAR_MEMBER,
    SaverSettings,
    ShardMeta,
    check_identity,
    identity_hash,
    parse_meta,
)
from megatron.training.distillation.tar_layout import (
    BLOCK,
    LOGPROBS_TAR_MEMBER_SUFFIX,
    TarMember,
    filled_up,
    member_name,
    parse_header,
    parse_member_name,
)

__all__ = [
    "FORMAT_VERSION",
    "INDEX_SENTINEL",
    "LOGPROBS_TAR_MEMBER_SUFFIX",
    "LOGPROB_SENTINEL",
    "MAX_VOCAB_SIZE",
    "META_TAR_MEMBER",
    "CacheFormatError",
    "CacheIdentityError",
    "LogprobsReshardPlan",
    "PackedRows",
    "ReshardSource",
    "RowRun",
    "SaverSettings",
    "ShardMeta",
    "ShardName",
    "TarMember",
    "TeacherRows",
    "check_identity",
    "decode_logprobs_payload",
    "decode_packed_rows",
    "decode_teacher_rows",
    "encode_logprobs_payload",
    "identity_hash",
    "member_name",
    "parse_member_name",
    "parse_meta",
    "read_exactly",
    "read_indexed_member",
    "read_member",
    "read_meta_member",
    "read_shard_meta",
    "read_tar_index",
    "row_runs",
    "v2_pack_indices",
    "v2_unpack_indices",
    "walk_tar",
    "write_shard_tar",
]

# ------------------------------------------------------------------------------------------
# Tar format: names, archive
# ------------------------------------------------------------------------------------------

_SHARD_RE = re.compile(r"dp(\d+)__(\d+)-(\d+)\.tar", re.ASCII)
_MAX_META_BYTES = 1 << 24


@dataclass(frozen=True, slots=True, order=True)
class ShardName:
    """Name of the shard with what one DP rank of the teacher saw of samples ``[start, end)``."""

    dp_rank: int
    start: int
    end: int

    def __str__(self) -> str:
        """Return the basename, such as ``dp0__0-16.tar``."""
        return f"dp{self.dp_rank}__{self.start}-{self.end}.tar"

    @classmethod
    def parse(cls, basename: str) -> ShardName | None:
        """Return the parts of a live shard's name; None for ``.stale``, ``.tmp`` and the rest."""
        match = _SHARD_RE.fullmatch(basename)
        if match is None:
            return None
        name = cls(*map(int, match.groups()))
        return name if name.start < name.end and str(name) == basename else None


def write_shard_tar(
    stream: BinaryIO, meta_bytes: bytes, members: Iterable[tuple[str, Content]]
) -> None:
    """Write an uncompressed tar: ``_meta.json`` first, then *members* ``(name, content)`` in order.

    Times and owners stay at zero, so equal content gives equal bytes. Content that is not in memory
    is copied piece by piece.
    """
    with tarfile.open(fileobj=stream, mode="w") as tar:
        for name, content in ((META_TAR_MEMBER, meta_bytes), *members):
            info = tarfile.TarInfo(name)
            info.size = len(content)
            with open_content(content) as source:
                tar.addfile(info, source)


def read_tar_index(stream: BinaryIO) -> list[TarMember]:
    """Return the regular members of a seekable tar, reading one header each and no content.

    Raises:
        CacheFormatError: It is not a tar, or one that ends before its end marker.
    """
    return list(walk_tar(stream))


def walk_tar(stream: BinaryIO) -> Iterator[TarMember]:
    """Yield what :func:`read_tar_index` returns; the stream may be moved in between."""
    end = stream.seek(0, os.SEEK_END)
    count = position = 0
    while True:
        stream.seek(position)
        header = read_exactly(stream, min(BLOCK, end - position))
        if len(header) < BLOCK:
            raise CacheFormatError(
                f"it is truncated at byte {end}, without an end marker after {count} members"
            )
        if not any(header):
            return
        info = parse_header(header, position)
        member = TarMember(info.name, position + BLOCK, info.size)
        position = member.offset + filled_up(member.size)
        if member.size < 0 or position > end:
            raise CacheFormatError(
                f"it is truncated: member {info.name} needs {member.size} bytes at byte "
                f"{member.offset}, the file has {end}"
            )
        if info.isreg():
            count += 1
            yield member


def read_shard_meta(stream: BinaryIO, index: Sequence[TarMember], where: str) -> ShardMeta:
    """Read and parse the leading ``_meta.json`` of the tar that *index* describes.

    Raises:
        CacheFormatError: It is not the first member, or not metadata of this format version.
    """
    return ShardMeta.from_bytes(read_meta_member(stream, index, where), where)


def read_meta_member(stream: BinaryIO, index: Sequence[TarMember], where: str) -> bytes:
    """Return the leading ``_meta.json`` of the tar that *index* describes, whatever its version.

    Raises:
        CacheFormatError: It is not the first member, or too large to be metadata.
    """
    if not index or index[0].name != META_TAR_MEMBER:
        found = index[0].name if index else "an empty archive"
        raise CacheFormatError(
            f"{where} must begin with {META_TAR_MEMBER}, found {found}: it is not a teacher shard."
        )
    if index[0].size > _MAX_META_BYTES:
        raise CacheFormatError(
            f"{META_TAR_MEMBER} in {where} has {index[0].size} bytes, expected at most "
            f"{_MAX_META_BYTES}."
        )
    return read_member(stream, index[0])


def read_member(stream: BinaryIO, member: TarMember) -> bytes:
    """Return the content of *member*; CacheFormatError if the stream ends first."""
    stream.seek(member.offset)
    data = read_exactly(stream, member.size)
    if len(data) != member.size:
        raise CacheFormatError(
            f"member {member.name} has {len(data)} bytes, its header says {member.size}"
        )
    return data


def read_indexed_member(stream: BinaryIO, member: TarMember, size: int | None = None) -> bytes:
    """Return the content of *member*, whose header is read with it and must say the same.

    Args:
        stream: The shard.
        member: The member, as the index has it.
        size: Return this many of its first bytes; None for all.

    Raises:
        CacheFormatError: There is another member, or none, or the stream ends first.
    """
    position = member.offset - BLOCK
    wanted = BLOCK + (member.size if size is None else size)
    stream.seek(position)
    data = read_exactly(stream, wanted)
    if len(data) != wanted:
        raise CacheFormatError(
            f"the file ends {len(data)} bytes after its header at byte {position}, and the index "
            f"of the shard says that it has {member.size} bytes"
        )
    info = parse_header(data[:BLOCK], position)
    if not info.isreg() or (info.name, info.size) != (member.name, member.size):
        raise CacheFormatError(
            f"the header at byte {position} is of {info.name} with {info.size} bytes, the index of "
            f"the shard says {member.name} with {member.size} bytes"
        )
    return data[BLOCK:]


def read_exactly(stream: BinaryIO, size: int) -> bytes:
    """Read *size* bytes from a stream that may return fewer per call; fewer only at its end."""
    data = stream.read(size)
    if len(data) == size:
        return data
    chunks = [data]
    while data and (missing := size - sum(map(len, chunks))):
        data = stream.read(missing)
        chunks.append(data)
    return b"".join(chunks)


# ------------------------------------------------------------------------------------------
# Reshard plan
# ------------------------------------------------------------------------------------------


class RowRun(NamedTuple):
    """Consecutive samples in rows ``[row_start, row_end)`` of saved DP rank *d_save*."""

    d_save: int
    row_start: int
    row_end: int


class ReshardSource(NamedTuple):
    """A :class:`RowRun` in the member of the teacher's iteration *iter_save* (0-based)."""

    iter_save: int
    d_save: int
    row_start: int
    row_end: int


def row_runs(
    member_start: int, first_sample: int, last_sample_exclusive: int, *, mbs_save: int, dp_save: int
) -> Iterator[RowRun]:
    """Yield where samples ``[first_sample, last_sample_exclusive)`` lie, in sample order.

    They belong to the members, one per saved DP rank, that start at *member_start*. Megatron's
    sampler deals blocks of ``mbs`` samples to the DP ranks in turn: row ``r`` of DP rank ``d`` is
    sample ``member_start + ((r // mbs) * dp + d) * mbs + r % mbs``.
    """
    assert member_start <= first_sample, (member_start, first_sample)
    offset, end = first_sample - member_start, last_sample_exclusive - member_start
    if dp_save == 1 and offset < end:  # all blocks are neighbours
        yield RowRun(0, offset, end)
        return
    while offset < end:
        block, inside = divmod(offset, mbs_save)
        length = min(mbs_save - inside, end - offset)
        row = block // dp_save * mbs_save + inside
        yield RowRun(block % dp_save, row, row + length)
        offset += length


@dataclass(frozen=True, slots=True)
class LogprobsReshardPlan:
    """Where a student finds its rows if every iteration of the teacher had *gbs_save* samples.

    Any sizes that Megatron itself accepts may be combined: each global batch size must be a
    multiple of its ``mbs * dp``.
    """

    mbs_save: int
    dp_save: int
    gbs_save: int
    mbs_load: int
    dp_load: int
    gbs_load: int

    def __post_init__(self) -> None:
        """Check the sizes; ValueError names the ones that do not fit."""
        for side in ("save", "load"):
            mbs, dp, gbs = (getattr(self, f"{name}_{side}") for name in ("mbs", "dp", "gbs"))
            if min(mbs, dp, gbs) < 1 or gbs % (mbs * dp):
                raise ValueError(
                    f"gbs_{side} ({gbs}) must be a positive multiple of mbs_{side} * dp_{side} "
                    f"({mbs} * {dp} = {mbs * dp})."
                )

    @property
    def num_mb_load(self) -> int:
        """Microbatches per DP rank and iteration of the student."""
        return self.gbs_load // (self.mbs_load * self.dp_load)

    @property
    def num_mb_save(self) -> int:
        """Microbatches per DP rank and iteration of the teacher."""
        return self.gbs_save // (self.mbs_save * self.dp_save)

    @property
    def samples_per_save_shard(self) -> int:
        """Rows of one member."""
        return self.gbs_save // self.dp_save

    def needed_d_saves(self, d_load: int) -> list[int]:
        """Return, sorted, the saved DP ranks that load DP rank *d_load* reads in any iteration."""
        phases = math.lcm(self.gbs_save, self.gbs_load) // self.gbs_load
        needed: set[int] = set()
        for i_load in range(phases):
            for m_load in range(self.num_mb_load):
                needed.update(
                    source.d_save for source in self.sources_for_microbatch(i_load, m_load, d_load)
                )
                if len(needed) == self.dp_save:
                    return sorted(needed)
        return sorted(needed)

    def sources_for_microbatch(
        self, i_load: int, m_load: int, d_load: int
    ) -> Iterator[ReshardSource]:
        """Yield, in sample order, the rows of one microbatch of one load DP rank."""
        sample = i_load * self.gbs_load + (m_load * self.dp_load + d_load) * self.mbs_load
        end = sample + self.mbs_load
        while sample < end:
            iter_save = sample // self.gbs_save
            start = iter_save * self.gbs_save
            stop = min(end, start + self.gbs_save)
            for run in row_runs(start, sample, stop, mbs_save=self.mbs_save, dp_save=self.dp_save):
                yield ReshardSource(iter_save, *run)
            sample = stop
