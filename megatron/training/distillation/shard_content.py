# SPDX-License-Identifier: Apache-2.0
"""The seal of a shard: its own name, its size, its members and their checksums, in its metadata.

A reader that finds the seal intact knows that the shard is whole, that it has the name it was
written under, where each member lies, and whether what it reads is the one that belongs there.
"""

from __future__ import annotations

import contextlib
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.training.distillation.errors import CacheFormatError
from megatron.training.distillation.frame_layout import (
    FORMAT_VERSION_V3,
    HEADER_PREFIX_BYTES,
    header_checksum,
    header_size,
)
from megatron.training.distillation.member_content import Content, checksum, open_content
from megatron.training.distillation.tar_layout import IndexEntry, parse_member_name, tar_size

CONTENT_KEY = "content"
_INDEX_KEY = "index"
_INDEX_CHECKSUM_KEY = "index_crc32"
_INDEX_WIDTHS = (3, 5)  # without and with a header


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardContent:
    """What a shard holds, as its metadata says."""

    name: str
    """The file's base name."""
    size: int
    """Bytes of the whole archive."""
    members: int
    """Members after the metadata."""
    checksums: tuple[int, ...]
    """CRC-32 of each of them, as stored."""
    index: tuple[IndexEntry, ...] | None = None
    """Samples and bytes of each of them; None where their headers have to be looked for."""

    @classmethod
    def from_meta(cls, meta: Mapping[str, Any], where: str) -> ShardContent | None:
        """Return what the JSON of a ``_meta.json`` says; None if it says nothing.

        Raises:
            CacheFormatError: The seal is not one, or not of this metadata (found in *where*).
        """
        content = meta.get(CONTENT_KEY)
        if content is None:
            return None
        if not _is_seal(content):
            raise CacheFormatError(
                f"The metadata in {where} has {CONTENT_KEY} {str(content)[:80]!r}, expected name, "
                "bytes, members and a crc32 for each member."
            )
        found = _checksum_of_meta(meta)
        if found != content["meta_crc32"]:
            raise CacheFormatError(
                f"The metadata in {where} is damaged: its checksum is {found}, the recorded one "
                f"{content['meta_crc32']}."
            )
        return cls(
            name=content["name"],
            size=content["bytes"],
            members=content["members"],
            checksums=tuple(content["crc32"]),
            index=_index_of(content, where),
        )


def seal_meta(meta_bytes: bytes, name: str, members: Sequence[tuple[str, Content]]) -> bytes:
    """Return *meta_bytes*, a JSON object, with the content of the shard *name* described.

    An older description is replaced; everything else stays as it is.

    Raises:
        CacheFormatError: *meta_bytes* is not a JSON object.
    """
    try:
        meta = json.loads(meta_bytes)
    except (ValueError, RecursionError) as error:
        raise CacheFormatError(f"The metadata of {name} is not JSON: {error}") from error
    if not isinstance(meta, dict):
        raise CacheFormatError(f"The metadata of {name} is not a JSON object.")
    meta.pop(CONTENT_KEY, None)
    content = {
        "name": name,
        "bytes": 0,
        "members": len(members),
        "crc32": [checksum(data) for _, data in members],
        "meta_crc32": _checksum_of_meta(meta),
    }
    saver = meta.get("saver")
    version = saver.get("format_version") if isinstance(saver, dict) else None
    index = [
        [*span, len(data), *(_stored_header(data) if version == FORMAT_VERSION_V3 else ())]
        for member, data in members
        if (span := parse_member_name(member))
    ]
    if len(index) == len(members):  # a member of another name has no samples
        content |= {_INDEX_KEY: index, _INDEX_CHECKSUM_KEY: _checksum(index)}
    while True:  # the size has digits of its own; it only grows, and by few of them
        sealed = _compact_json({**meta, CONTENT_KEY: content}).encode()
        size = tar_size([len(sealed), *(len(data) for _, data in members)])
        if size == content["bytes"]:
            return sealed
        content["bytes"] = size


def _stored_header(content: Content) -> tuple[int, int]:
    """Return the size of the header of a payload of format v3, and its :func:`header_checksum`.

    Raises:
        CacheFormatError: The payload does not begin with one.
    """
    with contextlib.closing(open_content(content)) as stream:
        prefix = stream.read(HEADER_PREFIX_BYTES)
        size = header_size(prefix)
        return size, header_checksum(prefix + stream.read(size - len(prefix)))


def _checksum_of_meta(meta: Mapping[str, Any]) -> int:
    rest = {key: value for key, value in meta.items() if key != CONTENT_KEY}
    return _checksum(rest)


def _checksum(content: Any) -> int:
    return zlib.crc32(_compact_json(content).encode())


def _index_of(content: Mapping[str, Any], where: str) -> tuple[IndexEntry, ...] | None:
    """Return the index in a seal; None if there is none, as in shards of other writers."""
    if _INDEX_KEY not in content and _INDEX_CHECKSUM_KEY not in content:
        return None
    index: Any = content.get(_INDEX_KEY)
    if not _is_index(index, content["members"]):
        raise CacheFormatError(
            f"The metadata in {where} has {_INDEX_KEY} {str(index)[:80]!r}, expected first sample, "
            f"end and bytes of each of {content['members']} members."
        )
    found, recorded = _checksum(index), content.get(_INDEX_CHECKSUM_KEY)
    if found != recorded:
        raise CacheFormatError(
            f"The metadata in {where} is damaged: the checksum of its {_INDEX_KEY} is {found}, the "
            f"recorded one {recorded}."
        )
    return tuple(IndexEntry(*entry) for entry in index)


def _is_index(index: Any, members: int) -> bool:
    return (
        isinstance(index, list)
        and len(index) == members
        and all(
            isinstance(entry, list)
            and len(entry) in _INDEX_WIDTHS
            and all(type(number) is int and number >= 0 for number in entry)
            and entry[0] < entry[1]
            for entry in index
        )
    )


def _is_seal(content: Any) -> bool:
    if not isinstance(content, dict) or not isinstance(content.get("name"), str):
        return False
    numbers = [content.get(key) for key in ("bytes", "members", "meta_crc32")]
    checksums = content.get("crc32")
    if not isinstance(checksums, list) or len(checksums) != content.get("members"):
        return False
    return all(type(number) is int and number >= 0 for number in (*numbers, *checksums))


def _compact_json(content: Any) -> str:
    return json.dumps(content, separators=(",", ":"))
