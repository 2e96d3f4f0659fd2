# SPDX-License-Identifier: Apache-2.0
"""Where the members of a shard lie in its file and what they are called, pure."""

from __future__ import annotations

import re
import tarfile
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from megatron.training.distillation.errors import CacheFormatError

LOGPROBS_TAR_MEMBER_SUFFIX = ".pt.zst"
BLOCK = tarfile.BLOCKSIZE
"""Bytes of a header; content is filled up to a multiple of it."""
_MEMBER_RE = re.compile(rf"(\d+)-(\d+){re.escape(LOGPROBS_TAR_MEMBER_SUFFIX)}", re.ASCII)


class TarMember(NamedTuple):
    """A regular file inside a tar: its content is ``size`` bytes at ``offset`` of the archive."""

    name: str
    offset: int
    size: int


class IndexEntry(NamedTuple):
    """The member with global samples ``[start, end)`` is stored in ``size`` bytes.

    In format v3 the first ``header_bytes`` of them are a header with the checksum ``header_crc32``.
    """

    start: int
    end: int
    size: int
    header_bytes: int = 0
    header_crc32: int = 0


def member_name(start: int, end: int) -> str:
    """Return the name of the member with global samples ``[start, end)``, like ``0-8.pt.zst``."""
    return f"{start}-{end}{LOGPROBS_TAR_MEMBER_SUFFIX}"


def parse_member_name(name: str) -> tuple[int, int] | None:
    """Return ``(start, end)`` of a payload member, or None for any other name."""
    match = _MEMBER_RE.fullmatch(name)
    if match is None:
        return None
    start, end = map(int, match.groups())
    return (start, end) if start < end and member_name(start, end) == name else None


def tar_size(sizes: Iterable[int]) -> int:
    """Return the bytes of an archive with members of these *sizes*, as ``tarfile`` writes it."""
    used = sum(BLOCK + filled_up(size) for size in sizes) + 2 * BLOCK
    return -(-used // tarfile.RECORDSIZE) * tarfile.RECORDSIZE


def filled_up(size: int) -> int:
    """Return the bytes that content of *size* bytes takes in an archive, without its header."""
    return -(-size // BLOCK) * BLOCK


def members_behind(first: TarMember, entries: Sequence[IndexEntry]) -> list[TarMember]:
    """Return where the members of an index lie that follow *first*, each behind one header."""
    members = []
    position = first.offset + filled_up(first.size)
    for entry in entries:
        name = member_name(entry.start, entry.end)
        members.append(TarMember(name, position + BLOCK, entry.size))
        position += BLOCK + filled_up(entry.size)
    return members


def parse_header(header: bytes, position: int) -> tarfile.TarInfo:
    """Return what the header at byte *position* of an archive says.

    Raises:
        CacheFormatError: It is not one.
    """
    try:
        return tarfile.TarInfo.frombuf(header, "utf-8", "surrogateescape")
    except tarfile.TarError as error:
        raise CacheFormatError(f"no tar header at byte {position}: {error}") from error
